//! Upkeep of the host around the core: link sizes, firewall, privileges, log, state files, warnings.

pub(crate) mod firewall;
pub(crate) mod host;
pub(crate) mod log;
pub(crate) mod mtu;
pub(crate) mod origin;
pub(crate) mod privileges;
pub(crate) mod store;
pub(crate) mod warnings;
