//! The switch under both engines: a Linux bridge with a VXLAN device, or an Open vSwitch datapath.

use serde::{Deserialize, Serialize};

/// What moves frames between local ports and paths.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SwitchKind {
    /// A Linux bridge.
    #[default]
    Bridge,
    /// The datapath of the kernel's openvswitch module.
    Odp,
}

impl SwitchKind {
    /// The value in the CLI and in JSON.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bridge => "bridge",
            Self::Odp => "odp",
        }
    }
}
