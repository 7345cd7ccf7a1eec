//! The tables of nftables that Weft writes: the guard with its senders, the locks of ports, the forward rules, the
//! clamp of segment sizes and the translation of addresses. Also the verdicts of the host's own rules on Weft's
//! packets.

pub(crate) mod clients;
mod elements;
pub(crate) mod forward;
pub(crate) mod guard;
pub(crate) mod masquerade;
pub(crate) mod mss;
pub(crate) mod nft;
pub(crate) mod nft_watch;
mod own_table;
pub(crate) mod port_locks;
pub(crate) mod ruleset;
pub(crate) mod senders;
