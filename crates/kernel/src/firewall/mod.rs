//! The tables of nftables that Weft writes: the guard with its senders, the forward rule and the clamp of segment
//! sizes. Also the verdicts of the host's own rules on Weft's packets.

pub(crate) mod forward;
pub(crate) mod guard;
pub(crate) mod mss;
pub(crate) mod nft;
pub(crate) mod nft_watch;
pub(crate) mod ruleset;
pub(crate) mod senders;
