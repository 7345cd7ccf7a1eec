//! Ethernet addresses behind ports that may send from others (`--allow-macs`): those of bridges inside containers, of
//! macvlan, of VRRP. This host hears them on the port and announces them, so that other hosts deliver to them and take
//! frames from them. They have no IP addresses there: questions for these go to all hosts.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::oneshot;
use weft_crypto::PeerId;
use weft_io::packet::PacketSocket;
use weft_mesh::Conflict;
use weft_path::{Mac, Vni};

use super::{Attachments, mac_of};
use crate::core::control::Request;
use crate::services::supervisor::Pulse;

/// The most addresses behind one port; the one that was not heard for longest is forgotten first.
const LEARNED_PER_PORT_MAX: usize = 256;
/// The interval of listening, while a port may send from others.
const LISTEN: Duration = Duration::from_millis(200);
/// The interval of looking for addresses that another host announces too.
const LOOK: Duration = Duration::from_secs(1);
/// How long an address that is heard here stays here, although another host begins to announce it.
const HOLD: Duration = Duration::from_secs(1);
/// The same for the host that gets no frames meanwhile. It is longer, so that not both give way if neither knew of the
/// other, as after a partition.
const HOLD_LOSER: Duration = Duration::from_secs(2);
/// The same for a host that heard it after the other one began, which has it by right. It is longer, so that not both
/// give way, however late the other one looks.
const HOLD_NEWCOMER: Duration = Duration::from_secs(5);
/// Frames of one socket in an interval that are looked into.
const FRAMES_MAX: usize = 64;
const TYPE_ARP: u16 = 0x0806;

/// Listens, for as long as it is polled.
pub(crate) async fn keep(attachments: Arc<Attachments>, pulse: Pulse) {
    let mut shown = attachments.shown();
    let mut learned = Learned::default();
    let mut listeners: BTreeMap<String, Listener> = BTreeMap::new();
    let mut looked = Instant::now();
    loop {
        let open = attachments.open_ports().await;
        let gone = learned.retain(|port| open.contains_key(port));
        attachments.tell_learned(gone).await;
        listeners.retain(|port, _| open.contains_key(port));
        for (port, place) in open {
            match Listener::index_of(&port) {
                Some(index)
                    if listeners.get_mut(&port).is_some_and(|it| it.stays(index, &place)) => {}
                Some(index) => {
                    let Some(listener) = Listener::open(index, place) else { continue };
                    attachments.tell_known(&mut learned, &port, &listener).await;
                    listeners.insert(port, listener);
                }
                // It is not there now.
                None => _ = listeners.remove(&port),
            }
        }
        loop {
            let listen = async {
                match listeners.is_empty() {
                    true => std::future::pending().await,
                    false => tokio::time::sleep(LISTEN).await,
                }
            };
            let changed = async {
                tokio::select! {
                    changed = shown.changed() => Some(changed.is_ok()),
                    () = listen => None,
                }
            };
            match pulse.wait(changed).await {
                Some(true) => break,
                Some(false) => return,
                None => {}
            }
            let now = Instant::now();
            for (port, listener) in &listeners {
                for mac in listener.heard() {
                    let told = learned.handle_heard(port, listener.place.vni, mac, now);
                    attachments.tell_learned(told).await;
                }
            }
            if learned.is_unsettled() || (now - looked >= LOOK && !learned.is_empty()) {
                looked = now;
                attachments.settle_conflicts(&mut learned).await;
            }
        }
    }
}

impl Attachments {
    /// The ports that may send from any address.
    async fn open_ports(&self) -> BTreeMap<String, Place> {
        let inner = self.lock().await;
        let mut taken: BTreeMap<Vni, BTreeSet<Mac>> = BTreeMap::new();
        for saved in inner.saved.values() {
            taken.entry(saved.vni()).or_default().insert(mac_of(&saved.attachment));
        }
        let open = inner.saved.values().filter(|it| it.attachment.allow_macs && it.is_attached());
        let place = |vni: Vni| Place { vni, taken: taken.get(&vni).cloned().unwrap_or_default() };
        open.map(|saved| (saved.host_interface.clone(), place(saved.vni()))).collect()
    }

    async fn tell_learned(&self, told: Vec<Told>) {
        for told in told {
            tracing::debug!(?told, "an address behind a port");
            self.tell(match told {
                Told::Announce(vni, mac) => Request::AnnounceMac { vni, mac },
                Told::Withdraw(vni, mac) => Request::Withdraw { vni, mac },
            })
            .await;
        }
    }

    /// Takes over the addresses behind a port that the bridge knows already: from before this daemon started, or from
    /// before it listened there.
    async fn tell_known(&self, learned: &mut Learned, port: &str, listener: &Listener) {
        let known = match self.kernel.learned_behind(listener.index).await {
            Ok(known) => known,
            Err(error) => {
                tracing::debug!(port, %error, "addresses behind a port count once they are heard");
                return;
            }
        };
        let now = Instant::now();
        let known = known.into_iter().map(Mac).filter(|mac| listener.is_behind(*mac));
        for mac in known.take(LEARNED_PER_PORT_MAX) {
            let told = learned.handle_known(port, listener.place.vni, mac, now);
            self.tell_learned(told).await;
        }
        self.settle_conflicts(learned).await;
    }

    async fn settle_conflicts(&self, learned: &mut Learned) {
        let (reply, conflicts) = oneshot::channel();
        self.tell(Request::Conflicts { reply }).await;
        let conflicts = conflicts.await.unwrap_or_default();
        let told = learned.handle_conflicts(&conflicts, self.local, Instant::now());
        self.tell_learned(told).await;
    }
}

/// The place of a port.
#[derive(Clone)]
struct Place {
    vni: Vni,
    /// Addresses that containers of this host have.
    taken: BTreeSet<Mac>,
}

/// Listens for the senders of frames that come in by a port.
struct Listener {
    /// The port's device: one that comes back under its name is another.
    index: u32,
    place: Place,
    sockets: [PacketSocket; 2],
}

impl Listener {
    fn index_of(port: &str) -> Option<u32> {
        PacketSocket::sender().ok()?.index_of(port).ok()
    }

    /// Whether it listens on this device already. Other containers of the network may have come or gone.
    fn stays(&mut self, index: u32, place: &Place) -> bool {
        let stays = self.index == index && self.place.vni == place.vni;
        if stays {
            self.place.clone_from(place);
        }
        stays
    }

    /// `None`: the device has gone.
    fn open(index: u32, place: Place) -> Option<Self> {
        // All of ARP; of IPv6 the announcements of addresses.
        let sockets = [
            PacketSocket::incoming(index, TYPE_ARP).ok()?,
            PacketSocket::announcements(index).ok()?,
        ];
        Some(Self { index, place, sockets })
    }

    /// The senders since the last time, without containers of this host.
    fn heard(&self) -> BTreeSet<Mac> {
        let mut buffer = [0; weft_packet::announcement::LEN_MAX];
        let mut heard = BTreeSet::new();
        for socket in &self.sockets {
            for _ in 0..FRAMES_MAX {
                let Ok(length) = socket.recv(&mut buffer) else { break };
                let source = buffer.get(6..12).filter(|_| length >= 12);
                let source = source.and_then(|bytes| <[u8; 6]>::try_from(bytes).ok());
                heard.extend(source.map(Mac));
            }
        }
        heard.retain(|mac| self.is_behind(*mac));
        heard
    }

    /// It is no group, and no container of this host.
    fn is_behind(&self, mac: Mac) -> bool {
        is_unicast(mac) && !self.place.taken.contains(&mac)
    }
}

fn is_unicast(mac: Mac) -> bool {
    mac.0[0] & 1 == 0 && mac.0 != [0; 6]
}

/// The announcement to the other hosts.
#[derive(Debug, PartialEq, Eq)]
enum Told {
    Announce(Vni, Mac),
    Withdraw(Vni, Mac),
}

struct Heard {
    port: String,
    last: Instant,
    claim: Claim,
}

/// The right of this host to an address, seen from here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Claim {
    /// Heard just now: not yet compared with what others announce.
    Begun,
    /// The switch knew it, and it was not heard since. It may have moved away meanwhile: this host gives way at once.
    Known,
    /// No other host announces it.
    Alone,
    /// Another host announces it too, and began before this one heard it: that host gives way.
    Newcomer,
    /// Another host began to announce it at this moment.
    Incumbent(Instant),
    /// Another host has it. It is not announced here until it is heard again.
    GivenUp,
}

/// The addresses that were heard. Pure: time is an argument.
#[derive(Default)]
struct Learned(BTreeMap<(Vni, Mac), Heard>);

impl Learned {
    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Conflicts are worth a look at once: something was heard since the last look, or is contested.
    fn is_unsettled(&self) -> bool {
        let is_settled = |claim| matches!(claim, Claim::Alone | Claim::Known | Claim::GivenUp);
        self.0.values().any(|heard| !is_settled(heard.claim))
    }

    /// A frame came in by a port.
    fn handle_heard(&mut self, port: &str, vni: Vni, mac: Mac, now: Instant) -> Vec<Told> {
        if let Some(heard) = self.0.get_mut(&(vni, mac)) {
            (heard.port, heard.last) = (port.to_owned(), now);
            let before = std::mem::replace(&mut heard.claim, Claim::Begun);
            return match before {
                Claim::GivenUp => vec![Told::Announce(vni, mac)],
                _ => Vec::new(),
            };
        }
        let port = port.to_owned();
        self.insert((vni, mac), Heard { port, last: now, claim: Claim::Begun })
    }

    /// The switch knows an address behind a port. It takes the place of none that was heard.
    fn handle_known(&mut self, port: &str, vni: Vni, mac: Mac, now: Instant) -> Vec<Told> {
        let count = self.0.values().filter(|it| it.port == port).count();
        if count >= LEARNED_PER_PORT_MAX || self.0.contains_key(&(vni, mac)) {
            return Vec::new();
        }
        let port = port.to_owned();
        self.insert((vni, mac), Heard { port, last: now, claim: Claim::Known })
    }

    fn insert(&mut self, key: (Vni, Mac), heard: Heard) -> Vec<Told> {
        let mut told = Vec::new();
        let of_port = || self.0.iter().filter(|(_, it)| it.port == heard.port);
        if of_port().count() >= LEARNED_PER_PORT_MAX {
            let oldest = of_port().min_by_key(|(_, it)| it.last).map(|(key, _)| *key);
            if let Some((vni, mac)) = oldest {
                self.0.remove(&(vni, mac));
                told.push(Told::Withdraw(vni, mac));
            }
        }
        self.0.insert(key, heard);
        told.push(Told::Announce(key.0, key.1));
        told
    }

    /// Addresses that several hosts announce. The host that hears one after another host began to announce it keeps it:
    /// the address has moved there. The other host does not hear it any more, and gives way until it hears it again.
    fn handle_conflicts(&mut self, conflicts: &[Conflict], me: PeerId, now: Instant) -> Vec<Told> {
        let mut contested = BTreeMap::new();
        for conflict in conflicts {
            if let Ok(mac) = conflict.address.parse::<Mac>() {
                *contested.entry((conflict.vni, mac)).or_insert(false) |= conflict.loser == me;
            }
        }
        let mut told = Vec::new();
        for (key, heard) in &mut self.0 {
            let Some(is_loser) = contested.get(key).copied() else {
                if !matches!(heard.claim, Claim::GivenUp | Claim::Known) {
                    heard.claim = Claim::Alone;
                }
                continue;
            };
            let (silent_since, hold) = match heard.claim {
                Claim::GivenUp => continue,
                Claim::Known => (now, Duration::ZERO),
                Claim::Begun | Claim::Newcomer => {
                    heard.claim = Claim::Newcomer;
                    (heard.last, HOLD_NEWCOMER)
                }
                Claim::Alone | Claim::Incumbent(_) => {
                    let since = match heard.claim {
                        Claim::Incumbent(since) => since,
                        _ => now,
                    };
                    heard.claim = Claim::Incumbent(since);
                    match is_loser {
                        true => (heard.last.max(since), HOLD_LOSER),
                        false => (heard.last, HOLD),
                    }
                }
            };
            if now.saturating_duration_since(silent_since) >= hold {
                heard.claim = Claim::GivenUp;
                told.push(Told::Withdraw(key.0, key.1));
            }
        }
        told
    }

    /// Forgets those behind other ports.
    fn retain(&mut self, is_open: impl Fn(&str) -> bool) -> Vec<Told> {
        let mut told = Vec::new();
        self.0.retain(|(vni, mac), heard| {
            let stays = is_open(&heard.port);
            if !stays {
                told.push(Told::Withdraw(*vni, *mac));
            }
            stays
        });
        told
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::print_stdout)]

    use rand::rngs::StdRng;
    use rand::{RngExt, SeedableRng};

    use super::*;

    const VNI: Vni = Vni(7);
    const MAC: Mac = Mac([0, 0, 0x5e, 0, 1, 5]);

    fn conflict() -> Conflict {
        let [winner, loser] = [1, 2].map(|n| PeerId::from_bytes([n; 32]));
        Conflict { vni: VNI, address: MAC.to_string(), winner, loser }
    }

    fn id(n: u8) -> PeerId {
        PeerId::from_bytes([n; 32])
    }

    #[test]
    fn the_host_that_another_begins_beside_gives_way_with_a_silent_address() {
        let mut learned = Learned::default();
        let begin = Instant::now();
        let all = [conflict()];
        assert_eq!(learned.handle_heard("a", VNI, MAC, begin), [Told::Announce(VNI, MAC)]);
        assert!(learned.is_unsettled());
        assert_eq!(learned.handle_conflicts(&[], id(1), begin), []);
        assert!(!learned.is_unsettled());
        assert_eq!(learned.handle_heard("a", VNI, MAC, begin + HOLD), []);
        assert_eq!(learned.handle_conflicts(&[], id(1), begin + HOLD), []);
        let soon = begin + HOLD + HOLD / 2;
        assert_eq!(learned.handle_conflicts(&all, id(1), soon), [], "it was just heard");
        assert!(learned.is_unsettled());
        let gives_way = [Told::Withdraw(VNI, MAC)];
        assert_eq!(learned.handle_conflicts(&all, id(1), begin + 2 * HOLD), gives_way);
        assert_eq!(learned.handle_conflicts(&all, id(1), begin + 2 * HOLD), []);
        let again = begin + 3 * HOLD;
        assert_eq!(learned.handle_heard("b", VNI, MAC, again), [Told::Announce(VNI, MAC)]);
        assert_eq!(learned.retain(|port| port == "b"), []);
        assert_eq!(learned.retain(|port| port == "a"), [Told::Withdraw(VNI, MAC)]);
        assert!(learned.is_empty());
    }

    /// Two hosts that look late, by up to a second: an address that moves is always with the host that heard it last.
    #[test]
    fn an_address_that_moves_stays_with_the_host_that_heard_it_last() {
        let seed = rand::random();
        println!("seed: {seed}");
        let mut random = StdRng::seed_from_u64(seed);
        let begin = Instant::now();
        let mut hosts = [1, 2].map(|_| Learned::default());
        let mut holders = [false; 2];
        let mut ms = 0;
        for turn in 0..200 {
            let owner = turn % 2;
            // It announces itself some times, and moves on soon or late.
            let until = ms + [1_200, 9_000][usize::from(random.random_ratio(1, 2))];
            let mut next = [0, 1].map(|_| ms);
            let heard_until = ms + 500;
            while ms < until {
                let now = begin + Duration::from_millis(ms);
                if ms < heard_until && ms % 100 == 0 {
                    let told = hosts[owner].handle_heard("a", VNI, MAC, now);
                    holders[owner] |= !told.is_empty();
                }
                for n in 0..2 {
                    if ms >= next[n] || (n == owner && hosts[n].is_unsettled() && ms < heard_until)
                    {
                        let seen: Vec<_> =
                            (holders == [true; 2]).then(conflict).into_iter().collect();
                        let told = hosts[n].handle_conflicts(&seen, id(n as u8 + 1), now);
                        holders[n] &= told.is_empty();
                        next[n] = ms + random.random_range(200..1_000);
                    }
                }
                assert!(holders[owner], "turn {turn}, at {ms} ms");
                ms += 50;
            }
            if until - heard_until > 8_000 {
                assert!(!holders[1 - owner], "turn {turn}: the other host has not given way");
            }
        }
    }

    /// Neither has heard it for long: one of them keeps it, whichever looks first.
    #[test]
    fn after_a_partition_one_of_two_hosts_keeps_a_silent_address() {
        for first in [1, 2] {
            let begin = Instant::now();
            let mut hosts = BTreeMap::from([1, 2].map(|n| (n, Learned::default())));
            for learned in hosts.values_mut() {
                learned.handle_heard("a", VNI, MAC, begin);
                learned.handle_conflicts(&[], id(1), begin);
            }
            let healed = begin + Duration::from_secs(60);
            let mut holders = BTreeSet::from([1, 2]);
            for turn in 0..10 {
                for n in [first, 3 - first] {
                    let seen: Vec<_> = (holders.len() == 2).then(conflict).into_iter().collect();
                    let now = healed + LOOK * turn;
                    if !hosts.get_mut(&n).unwrap().handle_conflicts(&seen, id(n), now).is_empty() {
                        holders.remove(&n);
                    }
                }
            }
            assert_eq!(holders.len(), 1, "{first} looks first");
        }
    }

    /// A daemon that starts anew knows from the switch what is there, and does not take what has moved away.
    #[test]
    fn an_address_that_the_switch_knew_gives_way_at_once_until_it_is_heard() {
        let mut learned = Learned::default();
        let now = Instant::now();
        assert_eq!(learned.handle_known("a", VNI, MAC, now), [Told::Announce(VNI, MAC)]);
        assert_eq!(learned.handle_known("a", VNI, MAC, now), []);
        assert_eq!(learned.handle_conflicts(&[], id(1), now), []);
        assert_eq!(learned.handle_conflicts(&[conflict()], id(1), now), [Told::Withdraw(VNI, MAC)]);
        assert_eq!(learned.handle_known("a", VNI, MAC, now), []);
        assert_eq!(learned.handle_heard("a", VNI, MAC, now), [Told::Announce(VNI, MAC)]);
        assert_eq!(learned.handle_conflicts(&[conflict()], id(1), now), []);
    }

    #[test]
    fn a_port_has_so_many_and_the_longest_silent_goes_first() {
        let mut learned = Learned::default();
        let begin = Instant::now();
        let mac = |n: usize| Mac([2, 0, 0, 0, (n >> 8) as u8, n as u8]);
        for n in 0..LEARNED_PER_PORT_MAX {
            learned.handle_heard("a", VNI, mac(n), begin + Duration::from_millis(n as u64));
        }
        let later = begin + Duration::from_secs(9);
        learned.handle_heard("a", VNI, mac(0), later);
        assert_eq!(learned.handle_known("a", VNI, MAC, later), []);
        let told = learned.handle_heard("a", VNI, MAC, later);
        assert_eq!(told, [Told::Withdraw(VNI, mac(1)), Told::Announce(VNI, MAC)]);
        assert_eq!(learned.handle_heard("b", VNI, mac(1), later), [Told::Announce(VNI, mac(1))]);
    }

    #[test]
    fn groups_and_nobody_send_nothing() {
        assert!(is_unicast(MAC) && !is_unicast(Mac([0; 6])) && !is_unicast(Mac([0xff; 6])));
    }
}
