//! Format `ovpn` between hosts, moved by the kernel's data channel device (`docs/design/ovpn.md`).
//!
//! An SA is one direction, and a peer of the device has both under one key id. So a path has two peers of the
//! device. A *receiver* opens the other host's packets, and a *sender* seals packets to it. The unused half
//! of their keys is random and discarded. So each direction is rekeyed by itself, as in format `esp`.
//!
//! The device selects the peer to send to by the packet's destination. It accepts a packet only from the peer
//! that owns its source. So each of its peers has a tunnel address. A receiver has the address that the other
//! host sends from; a sender has the address that the other host receives at.

mod device;
mod state;
mod watch;

use std::collections::BTreeSet;
use std::net::{Ipv6Addr, SocketAddr};

use weft_crypto::{Cipher, SaKey};
use weft_openvpn::device::{KEY_ID_MAX, PEER_ID_MAX, Slot};
use weft_path::PathId;

pub(super) use self::device::Channel;
pub(super) use self::state::ChannelState;
pub(super) use self::watch::{is_channels, is_tunnel};
use super::state::Way;

/// A change to make on the device.
#[derive(Debug, PartialEq)]
pub(super) enum Change {
    /// Make a peer.
    NewPeer(PathId, PeerSpec),
    /// Send to a peer at another address.
    SetRemote(PathId, u32, SocketAddr),
    /// Put a key into a slot of a peer, in place of the present one.
    NewKey(PathId, KeySpec),
    /// Empty a slot of a peer.
    DeleteKey { id: u32, slot: Slot },
    /// Delete a peer with its keys.
    DeletePeer { id: u32, address: Ipv6Addr },
}

/// A peer of the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PeerSpec {
    pub(super) id: u32,
    /// The peer id in packets to this peer; only senders have one.
    pub(super) tx_id: Option<u32>,
    pub(super) address: Ipv6Addr,
    pub(super) remote: SocketAddr,
}

/// The key of an SA, for a peer of the device.
#[derive(Debug, PartialEq)]
pub(super) struct KeySpec {
    /// The peer's id.
    pub(super) peer: u32,
    pub(super) slot: Slot,
    pub(super) way: Way,
    pub(super) spi: u32,
    pub(super) cipher: Cipher,
    pub(super) key: SaKey,
}

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

impl Change {
    /// The path that fails if it is refused; none for a deletion.
    const fn path(&self) -> Option<PathId> {
        match self {
            Self::NewPeer(path, _) | Self::SetRemote(path, ..) | Self::NewKey(path, _) => {
                Some(*path)
            }
            Self::DeleteKey { .. } | Self::DeletePeer { .. } => None,
        }
    }
}

/// Splits changes in two lists, each in order. The first holds changes to apply before frames use the
/// device's peers; the second, deletions to apply once no frame uses them. A deletion that makes room for a
/// later change goes into the first list.
pub(super) fn split(changes: Vec<Change>) -> (Vec<Change>, Vec<Change>) {
    let (mut ids, mut addresses) = (BTreeSet::new(), BTreeSet::new());
    let (mut first, mut last) = (Vec::new(), Vec::new());
    for change in changes.into_iter().rev() {
        let waits = match &change {
            Change::NewPeer(_, peer) => {
                addresses.insert(peer.address);
                ids.insert(peer.id);
                false
            }
            Change::SetRemote(_, id, _) | Change::NewKey(_, KeySpec { peer: id, .. }) => {
                ids.insert(*id);
                false
            }
            Change::DeleteKey { id, .. } => !ids.contains(id),
            Change::DeletePeer { id, address } => !ids.contains(id) && !addresses.contains(address),
        };
        if waits { last.push(change) } else { first.push(change) }
    }
    first.reverse();
    last.reverse();
    (first, last)
}

/// The peer id in an SPI of format `ovpn`, which is a packet's first word.
const fn peer_id(spi: u32) -> u32 {
    spi & PEER_ID_MAX
}

/// The key id in it.
const fn key_id(spi: u32) -> u32 {
    spi >> 24 & KEY_ID_MAX
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    const PATH: PathId = PathId(1);

    fn address(number: u16) -> Ipv6Addr {
        Ipv6Addr::new(0xfd77, 0, 0, 0, 0, 0, 0, number)
    }

    fn make(id: u32, number: u16) -> Change {
        let remote = (Ipv4Addr::LOCALHOST, 6786).into();
        Change::NewPeer(PATH, PeerSpec { id, tx_id: None, address: address(number), remote })
    }

    fn delete(id: u32, number: u16) -> Change {
        Change::DeletePeer { id, address: address(number) }
    }

    fn key(peer: u32, slot: Slot) -> Change {
        let (cipher, key) = (Cipher::Aes256Gcm, SaKey::for_ovpn([1; 40]));
        Change::NewKey(PATH, KeySpec { peer, slot, way: Way::In, spi: 0x4800_0100, cipher, key })
    }

    #[test]
    fn deletions_wait_unless_they_make_room() {
        let empty = |id, slot| Change::DeleteKey { id, slot };
        let given = vec![
            delete(1, 1),
            empty(2, Slot::Primary),
            // The address of the next.
            delete(3, 4),
            make(4, 4),
            key(4, Slot::Primary),
            // The slot of the next.
            empty(4, Slot::Secondary),
            key(4, Slot::Secondary),
            empty(4, Slot::Primary),
            // The id of the next.
            delete(5, 5),
            make(5, 6),
        ];
        let (first, last) = split(given);
        let expected = [
            delete(3, 4),
            make(4, 4),
            key(4, Slot::Primary),
            empty(4, Slot::Secondary),
            key(4, Slot::Secondary),
            delete(5, 5),
            make(5, 6),
        ];
        assert_eq!(first, expected);
        assert_eq!(last, [delete(1, 1), empty(2, Slot::Primary), empty(4, Slot::Primary)]);
    }

    #[test]
    fn an_spi_is_a_first_word() {
        assert_eq!((peer_id(0x4d12_3400), key_id(0x4d12_3400)), (0x12_3400, 5));
        assert_eq!((peer_id(0x48ff_feff), key_id(0x4f00_0000)), (0xff_feff, 7));
    }
}
