//! Ethernet addresses behind ports that may send from others (`--allow-macs`): those of bridges inside containers, of
//! macvlan, of VRRP. This host hears them on the port and announces them, so that other hosts deliver to them and take
//! frames from them. They have no IP addresses there: questions for these go to all hosts.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::oneshot;
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
/// How long an address that is heard here stays here, although another host announces it.
const HOLD: Duration = Duration::from_secs(1);
/// Frames of one socket in an interval that are looked into.
const FRAMES_MAX: usize = 64;
const TYPE_ARP: u16 = 0x0806;

/// Listens, for as long as it is polled.
pub(crate) async fn keep(attachments: Arc<Attachments>, pulse: Pulse) {
    let mut shown = attachments.shown();
    let mut learned = Learned::default();
    let mut ears: BTreeMap<String, Ear> = BTreeMap::new();
    let mut looked = Instant::now();
    loop {
        let open = attachments.open_ports().await;
        let gone = learned.retain(|port| open.contains_key(port));
        attachments.tell_learned(gone).await;
        ears.retain(|port, _| open.contains_key(port));
        for (port, place) in open {
            match Ear::index_of(&port) {
                Some(index) if ears.get(&port).is_some_and(|ear| ear.is_at(index, &place)) => {}
                Some(index) => {
                    ears.extend(Ear::open(index, place).map(|ear| (port, ear)));
                }
                // It is not there now.
                None => _ = ears.remove(&port),
            }
        }
        loop {
            let listen = async {
                match ears.is_empty() {
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
            for (port, ear) in &ears {
                for mac in ear.heard() {
                    let told = learned.handle_heard(port, ear.place.vni, mac, now);
                    attachments.tell_learned(told).await;
                }
            }
            if now - looked >= LOOK && !learned.is_empty() {
                looked = now;
                let conflicts = attachments.conflicts().await;
                attachments.tell_learned(learned.handle_conflicts(&conflicts, now)).await;
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

    async fn conflicts(&self) -> Vec<Conflict> {
        let (reply, conflicts) = oneshot::channel();
        self.tell(Request::Conflicts { reply }).await;
        conflicts.await.unwrap_or_default()
    }
}

/// The place of a port.
#[derive(Clone, PartialEq, Eq)]
struct Place {
    vni: Vni,
    /// Addresses that containers of this host have.
    taken: BTreeSet<Mac>,
}

/// Hears the senders of frames that come in by a port.
struct Ear {
    /// The port's device: one that comes back under its name is another.
    index: u32,
    place: Place,
    sockets: [PacketSocket; 2],
}

impl Ear {
    fn index_of(port: &str) -> Option<u32> {
        PacketSocket::sender().ok()?.index_of(port).ok()
    }

    fn is_at(&self, index: u32, place: &Place) -> bool {
        self.index == index && self.place == *place
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
        heard.retain(|mac| is_unicast(*mac) && !self.place.taken.contains(mac));
        heard
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
    /// False once another host has it.
    announced: bool,
}

/// The addresses that were heard. Pure: time is an argument.
#[derive(Default)]
struct Learned(BTreeMap<(Vni, Mac), Heard>);

impl Learned {
    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// A frame came in by a port.
    fn handle_heard(&mut self, port: &str, vni: Vni, mac: Mac, now: Instant) -> Vec<Told> {
        if let Some(heard) = self.0.get_mut(&(vni, mac)) {
            (heard.port, heard.last) = (port.to_owned(), now);
            let is_new = !std::mem::replace(&mut heard.announced, true);
            return is_new.then_some(Told::Announce(vni, mac)).into_iter().collect();
        }
        let mut told = Vec::new();
        let of_port = || self.0.iter().filter(|(_, heard)| heard.port == port);
        if of_port().count() >= LEARNED_PER_PORT_MAX {
            let oldest = of_port().min_by_key(|(_, heard)| heard.last).map(|(key, _)| *key);
            if let Some((vni, mac)) = oldest {
                self.0.remove(&(vni, mac));
                told.push(Told::Withdraw(vni, mac));
            }
        }
        let heard = Heard { port: port.to_owned(), last: now, announced: true };
        self.0.insert((vni, mac), heard);
        told.push(Told::Announce(vni, mac));
        told
    }

    /// Another host announces some of them. This host gives way with those that it does not hear any more, until it
    /// hears them again.
    fn handle_conflicts(&mut self, conflicts: &[Conflict], now: Instant) -> Vec<Told> {
        let mut told = Vec::new();
        for conflict in conflicts {
            let Ok(mac) = conflict.address.parse::<Mac>() else { continue };
            let Some(heard) = self.0.get_mut(&(conflict.vni, mac)) else { continue };
            if heard.announced && now.saturating_duration_since(heard.last) >= HOLD {
                heard.announced = false;
                told.push(Told::Withdraw(conflict.vni, mac));
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
    use weft_crypto::PeerId;

    use super::*;

    const VNI: Vni = Vni(7);
    const MAC: Mac = Mac([0, 0, 0x5e, 0, 1, 5]);

    fn conflict() -> Conflict {
        let [winner, loser] = [1, 2].map(|n| PeerId::from_bytes([n; 32]));
        Conflict { vni: VNI, address: MAC.to_string(), winner, loser }
    }

    #[test]
    fn the_host_that_heard_an_address_last_has_it() {
        let mut learned = Learned::default();
        let begin = Instant::now();
        let all = [conflict()];
        assert_eq!(learned.handle_heard("a", VNI, MAC, begin), [Told::Announce(VNI, MAC)]);
        assert_eq!(learned.handle_heard("a", VNI, MAC, begin + HOLD), []);
        assert_eq!(learned.handle_conflicts(&all, begin + HOLD), [], "the other one gives way");
        assert_eq!(learned.handle_conflicts(&all, begin + 2 * HOLD), [Told::Withdraw(VNI, MAC)]);
        assert_eq!(learned.handle_conflicts(&all, begin + 2 * HOLD), []);
        let again = begin + 3 * HOLD;
        assert_eq!(learned.handle_heard("b", VNI, MAC, again), [Told::Announce(VNI, MAC)]);
        assert_eq!(learned.retain(|port| port == "b"), []);
        assert_eq!(learned.retain(|port| port == "a"), [Told::Withdraw(VNI, MAC)]);
        assert!(learned.is_empty());
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
        let told = learned.handle_heard("a", VNI, MAC, later);
        assert_eq!(told, [Told::Withdraw(VNI, mac(1)), Told::Announce(VNI, MAC)]);
        assert_eq!(learned.handle_heard("b", VNI, mac(1), later), [Told::Announce(VNI, mac(1))]);
    }

    #[test]
    fn groups_and_nobody_send_nothing() {
        assert!(is_unicast(MAC) && !is_unicast(Mac([0; 6])) && !is_unicast(Mac([0xff; 6])));
    }
}
