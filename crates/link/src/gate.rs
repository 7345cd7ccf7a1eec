//! Selects the inbound connections to serve until they are admitted, and those to evict.
//!
//! The places for strangers are limited. A source with an unvalidated address gets one only while few are
//! taken; otherwise a QUIC retry makes it prove its address. A newcomer always gets a place: it takes that of
//! the oldest silent connection from the network with the most places. Known peers have separate places. A peer
//! is known by the address where it was last, or by the key it has shown.

use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;
use weft_crypto::PeerId;

use crate::limits::{
    KNOWN_PLACES_MAX, KNOWN_PLACES_PER_HOST_MAX, KNOWN_PLACES_PER_PEER_MAX,
    UNADMITTED_BEFORE_RETRY_MAX, UNADMITTED_MAX,
};
use crate::source::{Network, networks_of, source_of};

/// How well a connection's address is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Standing {
    Stranger,
    /// A known peer was last seen at this address, but from another port.
    Host,
    /// A known peer was last seen here. Other hosts behind the same NAT come from another port.
    Socket,
}

/// The progress of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// In the handshake; its address is not validated.
    Unvalidated,
    /// Its address is validated, and it has tried no password.
    Silent,
    /// It tries a password, which uses its budget.
    Trying,
    /// It knows the password.
    Proven,
}

struct Seat {
    remote: SocketAddr,
    standing: Standing,
    stage: Stage,
    /// The known peer whose key it has presented.
    peer: Option<PeerId>,
    evicted: Arc<Notify>,
}

impl Seat {
    fn is_known(&self) -> bool {
        self.peer.is_some() || self.standing != Standing::Stranger
    }

    fn is_strangers(&self) -> bool {
        !self.is_known() && self.stage != Stage::Proven
    }
}

/// The connections that have not been admitted.
#[derive(Default)]
pub(crate) struct Gate {
    inside: Mutex<Inside>,
}

#[derive(Default)]
struct Inside {
    /// Seats in order of arrival.
    seats: BTreeMap<u64, Seat>,
    next: u64,
}

/// The decision on an incoming connection.
pub(crate) enum Entry {
    /// Serve it; dropping the pass frees the place.
    Pass(Pass),
    /// Make the source prove its address first.
    Retry,
}

impl Gate {
    /// Admits a connection to a place. Calls `standing` only for a validated address.
    pub(crate) fn enter(
        self: &Arc<Self>,
        remote: SocketAddr,
        validated: bool,
        standing: impl FnOnce() -> Standing,
    ) -> Entry {
        let standing = if validated { standing() } else { Standing::Stranger };
        let mut inside = self.lock();
        if !validated && inside.is_pressed(remote.ip()) {
            return Entry::Retry;
        }
        let standing = inside.place_of_known(remote, standing);
        if standing == Standing::Stranger {
            inside.make_room_for_stranger(remote);
        }
        let stage = if validated { Stage::Silent } else { Stage::Unvalidated };
        let evicted = Arc::new(Notify::new());
        let seat = Seat { remote, standing, stage, peer: None, evicted: evicted.clone() };
        let id = inside.next;
        inside.next += 1;
        inside.seats.insert(id, seat);
        Entry::Pass(Pass { gate: self.clone(), id, evicted })
    }

    fn lock(&self) -> MutexGuard<'_, Inside> {
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inside {
    /// Whether few places are left, or this source has one already, so that no forged address gets a place.
    fn is_pressed(&self, address: IpAddr) -> bool {
        let same = |seat: &Seat| {
            seat.stage == Stage::Unvalidated && source_of(seat.remote.ip()) == source_of(address)
        };
        self.seats.len() >= UNADMITTED_BEFORE_RETRY_MAX || self.seats.values().any(same)
    }

    /// Makes room among the places of a known host; returns a stranger's standing if there are none for it.
    fn place_of_known(&mut self, remote: SocketAddr, standing: Standing) -> Standing {
        if standing == Standing::Stranger {
            return standing;
        }
        let all = self.seats.values().filter(|seat| seat.is_known()).count();
        let of_host = |seat: &Seat| {
            seat.standing != Standing::Stranger
                && seat.peer.is_none()
                && seat.remote.ip() == remote.ip()
        };
        let here: Vec<u64> =
            self.seats.iter().filter(|(_, seat)| of_host(seat)).map(|(id, _)| *id).collect();
        if here.len() >= KNOWN_PLACES_PER_HOST_MAX {
            // Its neighbours behind a NAT are evicted before it.
            let is_peers =
                |id: &u64| self.seats.get(id).map(|seat| seat.standing == Standing::Socket);
            let victim = here.into_iter().min_by_key(|id| (is_peers(id), *id));
            victim.into_iter().for_each(|id| self.evict(id));
        } else if all >= KNOWN_PLACES_MAX {
            return Standing::Stranger;
        }
        standing
    }

    /// Evicts from the largest network, then the largest network inside it, and so on down to the socket.
    /// Neighbours behind one NAT have separate sockets.
    fn make_room_for_stranger(&mut self, newcomer: SocketAddr) {
        let strangers = || self.seats.iter().filter(|(_, seat)| seat.is_strangers());
        if strangers().count() < UNADMITTED_MAX {
            return;
        }
        let mut networks: HashMap<Network, usize> = HashMap::new();
        let mut sockets: HashMap<SocketAddr, usize> = HashMap::new();
        for remote in strangers().map(|(_, seat)| seat.remote).chain([newcomer]) {
            *sockets.entry(remote).or_default() += 1;
            for network in networks_of(remote.ip()) {
                *networks.entry(network).or_default() += 1;
            }
        }
        let order = |(id, seat): (&u64, &Seat)| {
            let widest_first = networks_of(seat.remote.ip()).into_iter().rev();
            let sizes = widest_first.map(|network| networks.get(&network).copied());
            let sizes = sizes.chain([sockets.get(&seat.remote).copied()]);
            let largest_first = sizes.map(std::cmp::Reverse).collect::<Vec<_>>();
            (seat.stage == Stage::Trying, largest_first, *id)
        };
        let victim = strangers().map(order).min().map(|(_, _, id)| id);
        victim.into_iter().for_each(|id| self.evict(id));
    }

    fn evict(&mut self, id: u64) {
        if let Some(seat) = self.seats.remove(&id) {
            seat.evicted.notify_one();
        }
    }
}

/// A place in admission.
pub(crate) struct Pass {
    gate: Arc<Gate>,
    id: u64,
    evicted: Arc<Notify>,
}

impl Pass {
    /// Returns when the connection has to give up its place.
    pub(crate) async fn evicted(&self) {
        self.evicted.notified().await;
    }

    /// The handshake is over. `known` is the peer if this host knows the key.
    pub(crate) fn shook_hands(&self, known: Option<PeerId>) {
        let mut inside = self.gate.lock();
        if let Some(peer) = known {
            let same = |seat: &Seat| seat.peer == Some(peer);
            let before: Vec<u64> =
                inside.seats.iter().filter(|(_, seat)| same(seat)).map(|(id, _)| *id).collect();
            if before.len() >= KNOWN_PLACES_PER_PEER_MAX {
                before.first().into_iter().for_each(|id| inside.evict(*id));
            }
        }
        if let Some(seat) = inside.seats.get_mut(&self.id) {
            (seat.stage, seat.peer) = (Stage::Silent, known);
        }
    }

    /// The connection tries a password.
    pub(crate) fn tries(&self) {
        self.set(Stage::Trying);
    }

    /// The connection knows the password.
    pub(crate) fn is_proven(&self) {
        self.set(Stage::Proven);
    }

    fn set(&self, stage: Stage) {
        if let Some(seat) = self.gate.lock().seats.get_mut(&self.id) {
            seat.stage = stage;
        }
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        self.gate.lock().seats.remove(&self.id);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    struct Room {
        gate: Arc<Gate>,
        passes: Vec<(SocketAddr, Pass)>,
    }

    impl Room {
        fn new() -> Self {
            Self { gate: Arc::default(), passes: Vec::new() }
        }

        fn enter(&mut self, from: &str, standing: Standing) -> u64 {
            let from: SocketAddr = from.parse().unwrap();
            let Entry::Pass(pass) = self.gate.enter(from, true, || standing) else {
                panic!("asked to retry")
            };
            let id = pass.id;
            self.passes.push((from, pass));
            id
        }

        fn strangers(&mut self, count: usize, from: impl Fn(usize) -> String) -> Vec<u64> {
            (0..count).map(|number| self.enter(&from(number), Standing::Stranger)).collect()
        }

        fn has(&self, id: u64) -> bool {
            self.gate.lock().seats.contains_key(&id)
        }

        fn count(&self) -> usize {
            self.gate.lock().seats.len()
        }

        fn pass(&self, id: u64) -> &Pass {
            &self.passes.iter().find(|(_, pass)| pass.id == id).unwrap().1
        }
    }

    #[test]
    fn hardly_any_place_is_given_to_an_address_that_may_be_forged() {
        let gate = Arc::new(Gate::default());
        let enter = |from: &str| gate.enter(from.parse().unwrap(), false, || Standing::Socket);
        let mut passes = Vec::new();
        let Entry::Pass(first) = enter("192.0.2.1:1") else { panic!("asked to retry") };
        assert!(matches!(enter("192.0.2.1:2"), Entry::Retry), "one of a source");
        for last in 2.. {
            match enter(&format!("192.0.2.{last}:1")) {
                Entry::Pass(pass) => passes.push(pass),
                Entry::Retry => break,
            }
        }
        assert_eq!(passes.len() + 1, UNADMITTED_BEFORE_RETRY_MAX);
        drop(passes);
        // The handshake has validated its address.
        first.shook_hands(None);
        assert!(matches!(enter("192.0.2.1:2"), Entry::Pass(_)));
        drop(first);
        assert!(gate.lock().seats.is_empty());
    }

    #[test]
    fn a_newcomer_takes_the_place_of_the_oldest_that_is_silent() {
        let mut room = Room::new();
        let before = room.strangers(UNADMITTED_MAX, |n| format!("10.{n}.0.1:6783"));
        room.pass(before[0]).tries();
        let newcomer = room.enter("192.0.2.1:6783", Standing::Stranger);
        assert!(room.has(newcomer) && room.has(before[0]) && !room.has(before[1]));
        assert!(before[2..].iter().all(|id| room.has(*id)));
        assert_eq!(room.count(), UNADMITTED_MAX);
        // An evicted connection leaves no gap when it ends.
        room.passes.retain(|(_, pass)| pass.id != before[1]);
        assert_eq!(room.count(), UNADMITTED_MAX);
    }

    #[test]
    fn a_newcomer_is_told_by_nobody_that_it_must_go_but_by_those_who_come_after_it() {
        let mut room = Room::new();
        room.strangers(3 * UNADMITTED_MAX, |n| format!("10.{n}.0.1:6783"));
        for (number, (_, pass)) in room.passes.iter().enumerate() {
            let gone = !room.has(pass.id);
            assert_eq!(gone, number < 2 * UNADMITTED_MAX, "{number}");
        }
    }

    #[test]
    fn a_stranger_with_many_addresses_takes_places_of_strangers_alone() {
        for flood in [
            (|n| format!("192.0.2.1:{}", n + 1)) as fn(usize) -> String,
            |n| format!("192.0.2.{}:6783", n % 256),
            |n| format!("[2001:db8:0:{n:x}::1]:6783"),
            // Addresses behind the NAT of the others.
            |_| "10.0.0.1:1".into(),
        ] {
            let mut room = Room::new();
            let others = room.strangers(UNADMITTED_MAX / 4, |n| format!("10.{n}.0.1:6783"));
            let behind_nat = room.strangers(UNADMITTED_MAX / 4, |n| format!("10.0.0.1:{}", n + 2));
            room.strangers(1_000, flood);
            assert!(behind_nat.iter().all(|id| room.has(*id)), "{}", flood(1));
            assert!(others.iter().all(|id| room.has(*id)), "{}", flood(1));
            assert_eq!(room.count(), UNADMITTED_MAX);
        }
    }

    #[test]
    fn a_flood_of_strangers_leaves_known_peers_alone() {
        let mut room = Room::new();
        let peer = PeerId::of_public_key(&[7; 32]);
        let by_place = room.enter("192.0.2.1:6783", Standing::Socket);
        let by_host = room.enter("192.0.2.2:6783", Standing::Host);
        let by_key = room.enter("198.51.100.1:6783", Standing::Stranger);
        room.pass(by_key).shook_hands(Some(peer));
        let proven = room.enter("198.51.100.2:6783", Standing::Stranger);
        room.pass(proven).is_proven();
        room.strangers(1_000, |n| format!("203.0.{}.1:6783", n % 256));
        assert!([by_place, by_host, by_key, proven].iter().all(|id| room.has(*id)));
        assert_eq!(room.count(), UNADMITTED_MAX + 4);
    }

    #[test]
    fn a_known_peer_is_not_kept_out_by_its_neighbours_behind_a_nat_nor_does_it_take_more_than_its_own()
     {
        let mut room = Room::new();
        let peer = room.enter("192.0.2.1:6783", Standing::Socket);
        for port in 1..1_000 {
            room.enter(&format!("192.0.2.1:{port}"), Standing::Host);
        }
        assert!(room.has(peer));
        assert_eq!(room.count(), KNOWN_PLACES_PER_HOST_MAX);
        for _ in 0..100 {
            room.enter("192.0.2.1:6783", Standing::Socket);
        }
        assert_eq!(room.count(), KNOWN_PLACES_PER_HOST_MAX);

        let mut room = Room::new();
        let key = PeerId::of_public_key(&[7; 32]);
        for port in 1..100 {
            let id = room.enter(&format!("192.0.2.1:{port}"), Standing::Stranger);
            room.pass(id).shook_hands(Some(key));
        }
        assert_eq!(room.count(), KNOWN_PLACES_PER_PEER_MAX);

        let mut room = Room::new();
        for host in 0..2 * KNOWN_PLACES_MAX {
            room.enter(&format!("10.{}.{}.1:6783", host / 256, host % 256), Standing::Socket);
        }
        assert_eq!(room.count(), KNOWN_PLACES_MAX + UNADMITTED_MAX);
    }
}
