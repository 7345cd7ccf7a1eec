//! From the wire to a TAP device: open in place, inspect, merge, write.

pub(crate) mod batch;
pub(crate) mod inspect;
pub(crate) mod merger;
pub(crate) mod open;
pub(crate) mod receiver;
