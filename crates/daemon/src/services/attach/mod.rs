//! Containers on the network: attach, detach, their interfaces' condition, direct ports and shortcuts.

pub(crate) mod attachments;
pub(crate) mod bypass;
pub(crate) mod condition;
pub(crate) mod kept;
mod kept_ports;
mod look;
pub(crate) mod loops;
pub(crate) mod mend;
pub(crate) mod ports;
pub(crate) mod shortcuts;
