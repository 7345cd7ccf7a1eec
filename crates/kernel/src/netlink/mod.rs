//! Netlink: sockets, the exchange of request and answer, attributes.

pub(crate) mod error;
pub(crate) mod generic;
pub(crate) mod late;
pub(crate) mod socket;
