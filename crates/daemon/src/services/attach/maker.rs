//! The face that made an attachment: a command, a CNI runtime, Docker's engine, or `weft expose`.

use serde::{Deserialize, Serialize};
use weft_container::{Sandbox, cni};

use crate::devices::NETWORK;

/// The face that made an attachment, with the key by which it knows it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Maker {
    /// `weft attach`.
    #[default]
    Command,
    /// A CNI runtime.
    Cni {
        key: cni::Key,
        /// When the plugin started, in nanoseconds after the machine's start.
        started_ns: u64,
    },
    /// Docker's engine, by its id of an endpoint on a network of Weft's driver. The engine moves the interface
    /// into the container and sets it up.
    Docker { endpoint: String },
    /// `weft expose`: the host itself.
    Host,
}

impl Maker {
    /// The value in the CLI and in JSON.
    pub(crate) const fn name(&self) -> &'static str {
        match self {
            Self::Command => "attach",
            Self::Cni { .. } => "cni",
            Self::Docker { .. } => "docker",
            Self::Host => EXPOSE,
        }
    }

    /// The command that ends the attachment, for error texts.
    pub(super) const fn remedy(&self) -> &'static str {
        match self {
            Self::Command => "weft detach",
            Self::Cni { .. } => "remove the container by its runtime",
            Self::Docker { .. } => "docker network disconnect",
            Self::Host => "weft hide",
        }
    }

    pub(crate) const fn is_command(&self) -> bool {
        matches!(self, Self::Command)
    }

    /// Whether the engine has the container's end of the pair, so that Weft knows no namespace.
    pub(crate) const fn is_docker(&self) -> bool {
        matches!(self, Self::Docker { .. })
    }

    /// Whether Weft can find out that the attached namespace has ended. Docker's engine tells that, and the host
    /// does not end.
    pub(crate) const fn has_namespace(&self) -> bool {
        matches!(self, Self::Command | Self::Cni { .. })
    }
}

/// The key of the host's own attachment to network `weft`.
const HOST_ID: &str = "host:expose";
/// The name of [`Maker::Host`] in the CLI and in JSON.
pub(crate) const EXPOSE: &str = "expose";

/// The key of the host's own attachment to a network in the register.
pub(super) fn host_id(network: &str) -> String {
    on(network, HOST_ID)
}

/// The key of a container that `weft attach` attached to a network. On network `weft` it is that of the container.
pub(super) fn command_id(sandbox: &Sandbox, network: &str) -> String {
    on(network, &sandbox.id)
}

/// A network's name has neither a colon nor a slash, and a container's key begins with its kind and a colon.
fn on(network: &str, key: &str) -> String {
    if network == NETWORK { key.to_owned() } else { format!("{network}/{key}") }
}

/// The key of a CNI runtime's attachment in the register.
pub(super) fn cni_id(key: &cni::Key) -> String {
    format!("cni:{}/{}/{}", key.network, key.container, key.interface)
}

/// The key of a container of Docker's, by its full id.
pub(super) fn docker_key(container: &str) -> String {
    format!("docker:{container}")
}

/// The key of an endpoint of Docker's in the register.
pub(super) fn docker_id(endpoint: &str) -> String {
    format!("docker-endpoint:{endpoint}")
}
