//! Format `ovpn` between hosts, moved by the kernel's data channel device (`docs/design/ovpn.md`).
//!
//! An SA is one direction, and a peer of the device has both under one key id. So a path has two peers of the
//! device. A *receiver* opens the other host's packets, and a *sender* seals packets to it. The unused half
//! of their keys is random and discarded. So each direction is rekeyed by itself, as in format `esp`.
//!
//! The device selects the peer to send to by the packet's destination. It accepts a packet only from the peer
//! that owns its source. So each of its peers has a tunnel address. A receiver has the address that the other
//! host sends from; a sender has the address that the other host receives at.

pub(super) mod change;
mod device;
mod open;
mod state;
mod watch;

pub(super) use self::open::Channel;
pub(super) use self::state::ChannelState;
pub(super) use self::watch::{is_channels, is_tunnel};

/// Counts of operations on the device and their results, for `weft report`.
#[derive(Default)]
pub(super) struct ChannelCounters {
    devices_made: u64,
    devices_refused: u64,
    devices_lost: u64,
    peers_made: u64,
    peers_refused: u64,
    peers_lost: u64,
    peers_surplus: u64,
    keys_set: u64,
    keys_refused: u64,
    remotes_refused: u64,
    deletions_refused: u64,
    readings_failed: u64,
    floats: u64,
    notices_lost: u64,
}

impl ChannelCounters {
    /// By name.
    pub(super) const fn named(&self) -> [(&'static str, u64); 14] {
        [
            ("channel_devices_made", self.devices_made),
            ("channel_devices_refused", self.devices_refused),
            ("channel_devices_lost", self.devices_lost),
            ("channel_peers_made", self.peers_made),
            ("channel_peers_refused", self.peers_refused),
            ("channel_peers_lost", self.peers_lost),
            ("channel_peers_surplus", self.peers_surplus),
            ("channel_keys_set", self.keys_set),
            ("channel_keys_refused", self.keys_refused),
            ("channel_remotes_refused", self.remotes_refused),
            ("channel_deletions_refused", self.deletions_refused),
            ("channel_readings_failed", self.readings_failed),
            ("channel_floats", self.floats),
            ("channel_notices_lost", self.notices_lost),
        ]
    }
}
