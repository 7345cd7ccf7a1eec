//! Netlink: the one exchange of requests and answers (`exchange`), notices, and the reader and writer of messages
//! and attributes. `route` and `generic` are the two protocols that several folders speak; the others stand with
//! their only user.

pub(crate) mod error;
pub(crate) mod exchange;
pub(crate) mod generic;
pub(crate) mod notices;
pub(crate) mod reader;
pub(crate) mod route;
pub(crate) mod socket;
pub(crate) mod writer;
