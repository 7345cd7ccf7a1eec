//! The environment variables by which a runtime says what it wants.

use std::{
    collections::BTreeMap,
    ffi::{OsStr, OsString},
    os::unix::ffi::OsStrExt,
    path::PathBuf,
};

use serde::{Deserialize, Serialize};
use weft_packet::ethernet::Mac;

use super::{
    address::{self, RequestedAddress},
    error::{CniError, Code},
};

/// The longest container id accepted, in bytes. Runtimes use 64 to 130.
pub const CONTAINER_ID_BYTES_MAX: usize = 256;
/// The longest path of a namespace accepted, in bytes (the kernel's PATH_MAX).
pub const NAMESPACE_PATH_BYTES_MAX: usize = 4_096;
/// The longest `CNI_ARGS` accepted, in bytes.
pub const ARGS_BYTES_MAX: usize = 16_384;
/// Most pairs in `CNI_ARGS`.
pub const ARGS_PAIRS_MAX: usize = 64;
/// The longest name of an interface, in bytes (the kernel's IFNAMSIZ less one).
pub const INTERFACE_BYTES_MAX: usize = 15;

pub(super) const COMMAND: &str = "CNI_COMMAND";
pub(super) const CONTAINER: &str = "CNI_CONTAINERID";
pub(super) const NETNS: &str = "CNI_NETNS";
pub(super) const IFNAME: &str = "CNI_IFNAME";
pub(super) const ARGS: &str = "CNI_ARGS";
pub(super) const PATH: &str = "CNI_PATH";

const KNOWN: [&str; 6] = [COMMAND, CONTAINER, NETNS, IFNAME, ARGS, PATH];

/// A command of the specification.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Command {
    /// Adds a container to a network.
    Add,
    /// Takes it out.
    Del,
    /// Checks that it is as ADD left it.
    Check,
    /// Removes attachments that the runtime no longer knows.
    Gc,
    /// Says whether an ADD would succeed.
    Status,
    /// Lists the supported versions.
    Version,
}

impl Command {
    const ALL: [(&str, Self); 6] = [
        ("ADD", Self::Add),
        ("DEL", Self::Del),
        ("CHECK", Self::Check),
        ("GC", Self::Gc),
        ("STATUS", Self::Status),
        ("VERSION", Self::Version),
    ];

    /// The variables without which it cannot run.
    fn needs(self) -> &'static [&'static str] {
        match self {
            Self::Add | Self::Check => &[CONTAINER, NETNS, IFNAME],
            Self::Del => &[CONTAINER, IFNAME],
            Self::Gc | Self::Status => &[PATH],
            Self::Version => &[],
        }
    }
}

/// The variables of the specification that are set.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Environment(BTreeMap<&'static str, OsString>);

impl Environment {
    /// Keeps the specification's variables of an environment, such as [`std::env::vars_os`] gives it.
    /// An empty variable counts as unset.
    #[must_use]
    pub fn of<K: AsRef<OsStr>, V: Into<OsString>>(
        variables: impl IntoIterator<Item = (K, V)>,
    ) -> Self {
        let known = |name: &OsStr| KNOWN.into_iter().find(|known| name == OsStr::new(*known));
        let kept = variables.into_iter().filter_map(|(name, value)| {
            let value = value.into();
            (!value.is_empty()).then_some((known(name.as_ref())?, value))
        });
        Self(kept.collect())
    }

    /// The command.
    ///
    /// # Errors
    /// Code 4 if there is none, or an unknown one.
    pub fn command(&self) -> Result<Command, CniError> {
        let commands = Command::ALL.map(|(name, _)| name).join(", ");
        let Some(value) = self.0.get(COMMAND) else {
            let why = format!(
                "{COMMAND} is not set; this program is a CNI plugin, which a container runtime runs with one of {commands}"
            );
            return Err(CniError::new(
                Code::InvalidEnvironment,
                format!("{COMMAND} is missing"),
                why,
            ));
        };
        let found = Command::ALL.into_iter().find(|(name, _)| value == OsStr::new(*name));
        found.map(|(_, command)| command).ok_or_else(|| {
            invalid(COMMAND, &format!("{value:?} is no command; Weft knows {commands}"))
        })
    }

    /// The container that a command is for.
    ///
    /// # Errors
    /// Code 4 names each variable that the command needs and that is missing, or the first one that
    /// is malformed.
    pub(super) fn target(&self, command: Command) -> Result<Target, CniError> {
        self.check_needs(command)?;
        Ok(Target {
            container: self.checked(CONTAINER, check_container)?,
            interface: self.checked(IFNAME, check_interface)?,
            namespace: match command {
                // A path that leads nowhere must not keep a container from ending.
                Command::Del => self.namespace().unwrap_or_default(),
                _ => self.namespace()?,
            },
        })
    }

    /// Fails with code 4 if a variable is missing that the command needs.
    pub(super) fn check_needs(&self, command: Command) -> Result<(), CniError> {
        let missing: Vec<&str> =
            command.needs().iter().copied().filter(|name| !self.0.contains_key(name)).collect();
        if missing.is_empty() {
            return Ok(());
        }
        let names = missing.join(", ");
        let why = format!("the runtime must set {names} for this command");
        Err(CniError::new(Code::InvalidEnvironment, format!("{names} missing"), why))
    }

    /// `CNI_ARGS`.
    pub(super) fn args(&self) -> Result<Args, CniError> {
        match self.0.get(ARGS) {
            Some(_) => parse_args(self.text(ARGS)?),
            None => Ok(Args::default()),
        }
    }

    fn namespace(&self) -> Result<Option<PathBuf>, CniError> {
        let Some(value) = self.0.get(NETNS) else { return Ok(None) };
        if value.len() > NAMESPACE_PATH_BYTES_MAX {
            let why = format!("longer than {NAMESPACE_PATH_BYTES_MAX} bytes");
            return Err(invalid(NETNS, &why));
        }
        let path = PathBuf::from(value);
        if !path.is_absolute() || value.as_bytes().contains(&0) {
            let why = format!("{value:?} is no absolute path of a network namespace");
            return Err(invalid(NETNS, &why));
        }
        Ok(Some(path))
    }

    fn checked(
        &self,
        name: &'static str,
        check: fn(&str) -> Result<(), String>,
    ) -> Result<String, CniError> {
        let text = self.text(name)?;
        check(text).map_err(|why| invalid(name, &why))?;
        Ok(text.to_owned())
    }

    fn text(&self, name: &'static str) -> Result<&str, CniError> {
        let value = self.0.get(name).map_or(OsStr::new(""), OsString::as_os_str);
        value.to_str().ok_or_else(|| invalid(name, "not UTF-8"))
    }
}

/// The container that a command is for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Target {
    pub(super) container: String,
    pub(super) interface: String,
    /// At DEL it may be unknown.
    pub(super) namespace: Option<PathBuf>,
}

/// The pairs of `CNI_ARGS` that Weft uses.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Args {
    pub(super) addresses: Vec<RequestedAddress>,
    pub(super) mac: Option<Mac>,
    pub(super) owner: Owner,
}

/// The pod or container as its users know it. Podman gives its container's name as a pod's, and nerdctl its container's
/// host name.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Owner {
    /// The pod's name.
    pub name: Option<String>,
    /// The pod's Kubernetes namespace.
    pub namespace: Option<String>,
    /// The pod's UID.
    pub uid: Option<String>,
}

fn parse_args(text: &str) -> Result<Args, CniError> {
    let invalid = |why: &str| invalid(ARGS, why);
    if text.len() > ARGS_BYTES_MAX {
        return Err(invalid(&format!("longer than {ARGS_BYTES_MAX} bytes")));
    }
    let pairs: Vec<&str> =
        text.split(';').filter(|pair| !pair.is_empty()).take(ARGS_PAIRS_MAX + 1).collect();
    if pairs.len() > ARGS_PAIRS_MAX {
        return Err(invalid(&format!("more than {ARGS_PAIRS_MAX} pairs")));
    }
    let (mut args, mut unknown, mut ignore) = (Args::default(), None, false);
    let mut hostname = None;
    for pair in pairs {
        let Some((key, value)) = pair.split_once('=') else {
            return Err(invalid(&format!("{pair:?} is no KEY=VALUE")));
        };
        let text = || Some(value.to_owned()).filter(|value| !value.is_empty());
        match key {
            "IgnoreUnknown" => {
                ignore = match value.to_ascii_lowercase().as_str() {
                    "1" | "true" => true,
                    "0" | "false" => false,
                    _ => return Err(invalid(&format!("{pair:?}: neither true nor false"))),
                }
            }
            // An empty address asks for none, as podman's and nerdctl's callers do.
            "IP" if value.is_empty() => {}
            "IP" => {
                let addresses = value.split(',').map(address::parse_address);
                args.addresses =
                    addresses.collect::<Result<_, _>>().map_err(|why| invalid(&why))?;
            }
            "MAC" if value.is_empty() => {}
            "MAC" => args.mac = Some(address::parse_mac(value).map_err(|why| invalid(&why))?),
            "K8S_POD_NAME" => args.owner.name = text(),
            "K8S_POD_NAMESPACE" => args.owner.namespace = text(),
            "K8S_POD_UID" => args.owner.uid = text(),
            "K8S_POD_INFRA_CONTAINER_ID" => {}
            "NERDCTL_CNI_DHCP_HOSTNAME" => hostname = text(),
            _ => unknown = unknown.or(Some(key)),
        }
    }
    args.owner.name = args.owner.name.take().or(hostname);
    match unknown {
        Some(key) if !ignore => {
            Err(invalid(&format!("unknown key {key:?}; add IgnoreUnknown=1 to ignore it")))
        }
        _ => Ok(args),
    }
}

/// The specification's rule for container ids, and for names of networks.
pub(super) fn check_container(id: &str) -> Result<(), String> {
    let inner = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-');
    if id.len() > CONTAINER_ID_BYTES_MAX {
        return Err(format!("longer than {CONTAINER_ID_BYTES_MAX} bytes"));
    }
    if !id.starts_with(|c: char| c.is_ascii_alphanumeric()) || !id.chars().all(inner) {
        return Err(format!(
            "{id:?} must begin with a letter or digit, and have no others but letters, digits, '_', '.' and '-'"
        ));
    }
    Ok(())
}

/// The kernel's and the specification's rule for names of interfaces.
pub(super) fn check_interface(name: &str) -> Result<(), String> {
    let forbidden = |c: char| matches!(c, '/' | ':' | '\0') || c.is_whitespace();
    if name.is_empty() || name.len() > INTERFACE_BYTES_MAX {
        return Err(format!("{name:?} must have 1 to {INTERFACE_BYTES_MAX} bytes"));
    }
    if matches!(name, "." | "..") || name.contains(forbidden) {
        return Err(format!("{name:?} is no name of an interface: no '/', ':' or white space"));
    }
    Ok(())
}

fn invalid(name: &str, why: &str) -> CniError {
    CniError::new(Code::InvalidEnvironment, format!("invalid {name}"), format!("{name}: {why}"))
}
