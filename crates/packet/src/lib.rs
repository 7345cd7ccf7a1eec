//! pure: views and builders of every header; checksums; split and merge of super-packets.
//!
//! Nothing here allocates on the data path, and nothing panics on bytes from outside. Parsers check lengths once
//! and give views or small values. Byte offsets count from the first byte of the Ethernet frame unless said
//! otherwise; numbers are in host byte order.
#![forbid(unsafe_code)]

pub mod announcement;
pub mod arp;
mod bytes;
pub mod checksum;
pub mod coalesce;
pub mod ecn;
pub mod esp;
pub mod ethernet;
mod fragment;
pub mod icmp;
pub mod ipv4;
pub mod ipv6;
pub mod layout;
pub mod membership;
pub mod mss;
pub mod probe;
pub mod split;
pub mod tcp;
pub mod toobig;
pub mod tunnel;
pub mod udp;
pub mod vnet;
pub mod vxlan;

/// Bytes are not the header that they were to be. The fault is the sender's; count and drop.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParseError {
    /// The bytes end before the header does.
    #[error("{header} header cut short: {have} bytes, {need} needed; drop the packet")]
    Truncated {
        /// The header's name.
        header: &'static str,
        /// Bytes that the header takes.
        need: usize,
        /// Bytes that there are.
        have: usize,
    },
    /// A field of the header has a value that it cannot have.
    #[error("{header} header with a bad {field}; drop the packet")]
    Invalid {
        /// The header's name.
        header: &'static str,
        /// The field's name.
        field: &'static str,
    },
}
