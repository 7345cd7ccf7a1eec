//! Upkeep of the host around the core: link sizes, firewall, privileges, log, state files, warnings.

pub(crate) mod firewall;
pub(crate) mod forward;
pub(crate) mod hardening;
pub(crate) mod host;
pub(crate) mod landlock;
pub(crate) mod log;
pub(crate) mod mtu;
pub(crate) mod opener;
pub(crate) mod origin;
mod privileges;
pub(crate) mod reach;
pub(crate) mod records;
pub(crate) mod store;
pub(crate) mod warnings;
