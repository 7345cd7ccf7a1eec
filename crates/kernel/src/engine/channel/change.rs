//! Changes to make on the device, and their order.

use std::collections::BTreeSet;
use std::net::{Ipv6Addr, SocketAddr};

use weft_crypto::{Cipher, SaKey};
use weft_openvpn::device::{KEY_ID_MAX, PEER_ID_MAX, Slot};
use weft_path::PathId;

use crate::engine::sa::Way;

/// A change to make on the device.
#[derive(Debug, PartialEq)]
pub(in crate::engine) enum Change {
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
pub(in crate::engine) struct PeerSpec {
    pub(in crate::engine) id: u32,
    /// The peer id in packets to this peer; only senders have one.
    pub(in crate::engine) tx_id: Option<u32>,
    pub(in crate::engine) address: Ipv6Addr,
    pub(in crate::engine) remote: SocketAddr,
}

/// The key of an SA, for a peer of the device.
#[derive(Debug, PartialEq)]
pub(in crate::engine) struct KeySpec {
    /// The peer's id.
    pub(in crate::engine) peer: u32,
    pub(in crate::engine) slot: Slot,
    pub(in crate::engine) way: Way,
    pub(in crate::engine) spi: u32,
    pub(in crate::engine) cipher: Cipher,
    pub(in crate::engine) key: SaKey,
}

impl Change {
    /// The path that fails if it is refused; none for a deletion.
    pub(super) const fn path(&self) -> Option<PathId> {
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
pub(in crate::engine) fn split(changes: Vec<Change>) -> (Vec<Change>, Vec<Change>) {
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
pub(super) const fn peer_id(spi: u32) -> u32 {
    spi & PEER_ID_MAX
}

/// The key id in it.
pub(super) const fn key_id(spi: u32) -> u32 {
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
