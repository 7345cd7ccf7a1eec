//! The peers of a kernel's device as their notices were told, and how much of each key is used.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use weft_kernel::ovpn::KnownPeer;
use weft_openvpn::device::{PeerAttributes, PeerState, Slot};

use super::keys::Key;

/// A peer.
#[derive(Clone, Copy)]
pub(super) struct Kept {
    /// Its address, over UDP.
    remote: Option<SocketAddr>,
    /// Its keys, the primary first.
    keys: [Option<Key>; 2],
}

/// All peers by their ids.
#[derive(Default)]
pub(super) struct Book(BTreeMap<u32, Kept>);

impl Book {
    /// Adds a peer without keys, and replaces an earlier record of its id.
    pub(super) fn insert(&mut self, id: u32, remote: Option<SocketAddr>) {
        self.0.insert(id, Kept { remote: remote.map(plain), keys: [None; 2] });
    }

    pub(super) fn contains(&self, id: u32) -> bool {
        self.0.contains_key(&id)
    }

    pub(super) fn remove(&mut self, id: u32) -> Option<Kept> {
        self.0.remove(&id)
    }

    /// Undoes [`Self::remove`].
    pub(super) fn put_back(&mut self, id: u32, kept: Kept) {
        self.0.entry(id).or_insert(kept);
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    /// A peer has another address now.
    pub(super) fn moved(&mut self, id: u32, remote: SocketAddr) {
        if let Some(kept) = self.0.get_mut(&id) {
            kept.remote = Some(plain(remote));
        }
    }

    /// Sets or clears a key in a slot of a peer.
    pub(super) fn set_key(&mut self, id: u32, slot: Slot, key: Option<Key>) {
        if let Some(kept) = self.0.get_mut(&id) {
            match slot {
                Slot::Primary => kept.keys[0] = key,
                Slot::Secondary => kept.keys[1] = key,
            }
        }
    }

    /// The two keys of a peer were swapped.
    pub(super) fn swap_keys(&mut self, id: u32) {
        if let Some(kept) = self.0.get_mut(&id) {
            kept.keys.swap(0, 1);
        }
    }

    /// A key of a peer is used up.
    pub(super) fn key_gone(&mut self, id: u32, key_id: u32) {
        if let Some(kept) = self.0.get_mut(&id) {
            for slot in &mut kept.keys {
                slot.take_if(|key| key.id == key_id);
            }
        }
    }

    /// Whether any key has a usage limit.
    pub(super) fn has_limits(&self) -> bool {
        self.0.values().flat_map(|kept| &kept.keys).flatten().any(Key::is_limited)
    }

    /// The keys that have reached their limit by the device's counters: peer, slot, key id.
    pub(super) fn used_up(&self, peers: &[PeerState]) -> Vec<(u32, Slot, u32)> {
        let of = |peer: &PeerState| {
            let keys = self.0.get(&peer.id).map(|kept| kept.keys).unwrap_or_default();
            let (id, now) = (peer.id, peer.link);
            let keys = Slot::ALL.into_iter().zip(keys);
            keys.filter_map(move |(slot, key)| {
                let key = key.filter(|key| key.is_used_up(&now))?;
                Some((id, slot, key.id))
            })
        };
        peers.iter().flat_map(of).collect()
    }

    /// The peers in the state that is known.
    pub(super) fn known(&self) -> Vec<KnownPeer> {
        let known = |(id, kept): (&u32, &Kept)| KnownPeer {
            id: *id,
            remote: kept.remote,
            primary_key_id: kept.keys[0].map(|key| key.id),
        };
        self.0.iter().map(known).collect()
    }
}

/// The address that a peer's attributes give it.
pub(super) fn remote_of(attributes: &PeerAttributes) -> Option<SocketAddr> {
    let port = attributes.remote_port?;
    let ipv4 = attributes.remote_ipv4.map(|address| SocketAddr::from((address, port)));
    ipv4.or_else(|| attributes.remote_ipv6.map(|address| SocketAddr::from((address, port))))
}

/// An address in the device's form: an IPv4-mapped IPv6 address becomes IPv4.
fn plain(address: SocketAddr) -> SocketAddr {
    match address {
        SocketAddr::V6(v6) => match v6.ip().to_ipv4_mapped() {
            Some(ipv4) => SocketAddr::from((ipv4, v6.port())),
            None => address,
        },
        SocketAddr::V4(_) => address,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use weft_crypto::DataCipher;
    use weft_openvpn::device::Traffic;

    use super::*;

    fn key(id: u32) -> Option<Key> {
        Some(Key::new(id, DataCipher::Aes256Gcm, Traffic::default()))
    }

    fn at(text: &str) -> Option<SocketAddr> {
        Some(text.parse().unwrap())
    }

    #[test]
    fn the_list_of_peers_follows_their_events() {
        let mut book = Book::default();
        book.insert(1, at("192.0.2.1:1"));
        book.insert(2, at("[::ffff:192.0.2.2]:2"));
        let known = |book: &Book, id: u32| book.known().into_iter().find(|peer| peer.id == id);
        let peer = |id, remote, primary_key_id| Some(KnownPeer { id, remote, primary_key_id });
        assert_eq!(known(&book, 2), peer(2, at("192.0.2.2:2"), None));
        book.set_key(1, Slot::Primary, key(5));
        book.set_key(1, Slot::Secondary, key(6));
        book.moved(1, "192.0.2.9:9".parse().unwrap());
        assert_eq!(known(&book, 1), peer(1, at("192.0.2.9:9"), Some(5)));
        book.swap_keys(1);
        assert_eq!(known(&book, 1), peer(1, at("192.0.2.9:9"), Some(6)));
        // By then it was the other slot's key.
        book.key_gone(1, 5);
        assert_eq!(known(&book, 1), peer(1, at("192.0.2.9:9"), Some(6)));
        book.swap_keys(1);
        assert_eq!(known(&book, 1), peer(1, at("192.0.2.9:9"), None));
        book.insert(1, None);
        assert_eq!(known(&book, 1), peer(1, None, None));
        let kept = book.remove(1).unwrap();
        assert!(book.contains(2) && !book.contains(1));
        book.put_back(1, kept);
        assert!(book.contains(1));
        book.clear();
        assert_eq!(book.known(), []);
    }

    #[test]
    fn keys_are_used_up_one_by_one() {
        let mut book = Book::default();
        for id in [1, 2] {
            book.insert(id, None);
        }
        assert!(!book.has_limits());
        book.set_key(1, Slot::Primary, key(5));
        book.set_key(2, Slot::Primary, key(5));
        let much = Traffic { tx_bytes: 1 << 40, tx_packets: 1 << 30, ..Traffic::default() };
        // It was installed when the other one had carried that much.
        book.set_key(1, Slot::Secondary, key(6).map(|key| Key { before: much, ..key }));
        assert!(book.has_limits());
        let state = |id, link| PeerState { id, link, ..PeerState::default() };
        let found = [state(1, much), state(2, Traffic::default()), state(3, much)];
        assert_eq!(book.used_up(&found), [(1, Slot::Primary, 5)]);
        book.swap_keys(1);
        assert_eq!(book.used_up(&found), [(1, Slot::Secondary, 5)]);
        book.set_key(1, Slot::Secondary, None);
        assert_eq!(book.used_up(&found), []);
    }

    #[test]
    fn of_a_peer_that_is_not_kept_nothing_is_known() {
        let mut book = Book::default();
        book.moved(3, "192.0.2.9:9".parse().unwrap());
        book.set_key(3, Slot::Primary, key(1));
        book.swap_keys(3);
        book.key_gone(3, 1);
        assert_eq!(book.known(), []);
        assert!(book.remove(3).is_none());
    }
}
