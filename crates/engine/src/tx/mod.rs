//! From a TAP device to the wire: find the peer, cut, seal into a GSO batch, send.

pub(crate) mod gso_batch;
pub(crate) mod repeats;
pub(crate) mod too_long;
pub(crate) mod transmitter;
