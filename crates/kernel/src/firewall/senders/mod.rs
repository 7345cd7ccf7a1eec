//! The Ethernet addresses that each peer may send from by a path of the kernel engine, on a bridge.
//!
//! Each peer has a number. The kernel assigns it to the packets that it opens. They get it as a mark from the
//! peer's inbound state, or by the outer address, which the data channel's device has checked. The guard
//! moves it to the packet's priority before any other program sees the packet, since many programs change
//! marks. The VXLAN device keeps it. Before the bridge, the number, the VXLAN device and the source address together
//! must be a member of a set. So a peer's addresses on one network count on no other.
//!
//! Members are written by netlink, not by `nft`: they change with every container, and `nft` may take
//! seconds.

mod codec;

use std::{
    collections::{BTreeSet, HashMap},
    net::IpAddr,
    sync::Arc,
};

use tokio::sync::Mutex;
use weft_crypto::PeerId;
use weft_path::Vni;

use self::codec::{SETS, element, member, set_of};
use super::elements::{
    DeviceName, ELEMENTS_MAX, Element, Elements, OwnChanges, Set, Step, device_name,
};
use crate::{
    error::KernelError,
    handle::Kernel,
    net::{devices::overlay_ports, neighbours::MacAddress},
};

/// The numbers of senders: marks and priorities with this high byte. VLAN devices give small priorities.
pub(crate) const NUMBERS: u32 = 0x5800_0000;
/// The bits that identify a mark as a sender's number.
pub(crate) const NUMBERS_MASK: u32 = 0xff00_0000;
/// The tables that the guard consists of have this name.
pub(crate) const TABLE: &str = "weft-guard";
/// The guard's maps to numbers, with the type of their keys.
pub(crate) const MAPS: [(&str, &str); 3] =
    [("marks", "mark"), ("senders4", "ipv4_addr"), ("senders6", "ipv6_addr")];
/// The set of numbers, overlay ports and Ethernet addresses, in the bridge's table.
pub(crate) const MACS: &str = "senders";
/// Most messages in one transaction.
const STEPS_MAX: usize = 3;

/// The Ethernet addresses that each peer's frames may come from. Clones share the same state.
///
/// The sets are empty until the guard exists; from then on they hold every wanted member.
#[derive(Clone)]
pub struct Senders {
    kernel: Kernel,
    shared: Arc<Mutex<Shared>>,
    own: OwnChanges,
}

#[derive(Default)]
struct Shared {
    peers: HashMap<PeerId, Peer>,
    macs: HashMap<Place, PeerId>,
    /// The peer of each outer address; the last claim holds.
    addresses: HashMap<IpAddr, PeerId>,
    /// Whether the guard has the sets and they hold the wanted members.
    stands: bool,
    socket: Option<Elements>,
}

#[derive(Default)]
struct Peer {
    /// `None`: nothing comes from it by the kernel.
    number: Option<u32>,
    macs: BTreeSet<Place>,
    addresses: BTreeSet<IpAddr>,
}

/// An Ethernet address on a network.
type Place = (Vni, MacAddress);

/// A member of one of the sets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Member {
    /// Packets that an inbound state marks with a number have that number.
    Mark(u32),
    /// Packets from an outer address have a number.
    Address(IpAddr, u32),
    /// Frames with a number may come by this overlay port from this Ethernet address.
    Mac(u32, DeviceName, MacAddress),
}

impl Senders {
    /// Starts with no permitted senders. Nothing is sent to the kernel.
    #[must_use]
    pub fn new(kernel: Kernel) -> Self {
        Self { kernel, shared: Arc::default(), own: OwnChanges::default() }
    }

    /// Sets a peer's number, and the outer addresses that identify the peer where no state marks its packets.
    ///
    /// # Errors
    /// [`KernelError::Refused`], [`KernelError::Socket`] or [`KernelError::TimedOut`] if the write failed.
    /// The wanted members are kept. The guard then counts as not whole, and the next setting of the guard
    /// writes everything.
    pub async fn set_peer(
        &self,
        peer: PeerId,
        number: u32,
        addresses: impl IntoIterator<Item = IpAddr>,
    ) -> Result<(), KernelError> {
        let addresses: BTreeSet<IpAddr> = addresses.into_iter().collect();
        let mut shared = self.shared.lock().await;
        let touched = shared.touched(peer, &addresses);
        let change = |shared: &mut Shared| {
            shared.peers.entry(peer).or_default().number = Some(number);
            shared.set_addresses(peer, addresses);
        };
        self.change(&mut shared, &touched, change).await
    }

    /// Accepts no more frames from this peer.
    ///
    /// # Errors
    /// See [`Self::set_peer`].
    pub async fn remove_peer(&self, peer: PeerId) -> Result<(), KernelError> {
        let mut shared = self.shared.lock().await;
        let touched = shared.touched(peer, &BTreeSet::new());
        let change = |shared: &mut Shared| {
            shared.set_addresses(peer, BTreeSet::new());
            if let Some(it) = shared.peers.get_mut(&peer) {
                it.number = None;
            }
            shared.peers.retain(|_, it| it.number.is_some() || !it.macs.is_empty());
        };
        self.change(&mut shared, &touched, change).await
    }

    /// Assigns these Ethernet addresses on a network to peers, and frees those in `remove`.
    ///
    /// # Errors
    /// See [`Self::set_peer`].
    pub async fn set_macs(
        &self,
        vni: Vni,
        add: &[([u8; 6], PeerId)],
        remove: &[[u8; 6]],
    ) -> Result<(), KernelError> {
        let mut shared = self.shared.lock().await;
        let all = remove.iter().chain(add.iter().map(|(mac, _)| mac));
        let owners = all.filter_map(|mac| shared.macs.get(&(vni, *mac)));
        let touched = owners.chain(add.iter().map(|(_, peer)| peer)).copied().collect();
        let change = |shared: &mut Shared| {
            for mac in remove {
                shared.forget((vni, *mac));
            }
            for (mac, peer) in add {
                shared.forget((vni, *mac));
                shared.macs.insert((vni, *mac), *peer);
                shared.peers.entry(*peer).or_default().macs.insert((vni, *mac));
            }
        };
        self.change(&mut shared, &touched, change).await
    }

    /// Frees all Ethernet addresses of a network.
    ///
    /// # Errors
    /// See [`Self::set_peer`].
    pub async fn remove_network(&self, vni: Vni) -> Result<(), KernelError> {
        let shared = self.shared.lock().await;
        let all = shared.macs.keys().filter(|(of, _)| *of == vni).map(|(_, mac)| *mac);
        let all: Vec<MacAddress> = all.collect();
        drop(shared);
        self.set_macs(vni, &[], &all).await
    }

    /// Fills the guard's sets, unless they are already filled. `anew` means that the sets are empty. True if
    /// something was written.
    pub(crate) async fn stand(&self, anew: bool) -> Result<bool, KernelError> {
        let mut shared = self.shared.lock().await;
        if shared.stands && !anew {
            return Ok(false);
        }
        let wanted = shared.wanted();
        let mut steps = SETS.map(Step::Empty).to_vec();
        steps.extend(by_set(&wanted).map(|(set, members)| Step::Add(set, members)));
        self.write(&mut shared, &steps).await?;
        shared.stands = true;
        Ok(true)
    }

    /// Notes that the guard's sets are gone.
    pub(crate) async fn fall(&self) {
        self.shared.lock().await.stands = false;
    }

    /// Whether the sets hold the wanted members.
    pub(crate) async fn are_whole(&self) -> Result<bool, KernelError> {
        let mut shared = self.shared.lock().await;
        if !shared.stands {
            return Ok(false);
        }
        let mut found = Vec::new();
        for set in SETS {
            let socket = self.socket(&mut shared)?;
            match socket.list(set).await {
                Ok(all) => found.extend(all.iter().map(|it| member(set, it.as_ref()?))),
                Err(error) => {
                    shared.socket = None;
                    return Err(error.while_doing("list who may send from which address"));
                }
            }
        }
        let found: Option<BTreeSet<Member>> = found.into_iter().collect();
        let whole = found.is_some_and(|found| found == shared.wanted().into_iter().collect());
        shared.stands = whole;
        Ok(whole)
    }

    /// Recognizes changes that were made here.
    pub(crate) fn own_changes(&self) -> OwnChanges {
        self.own.clone()
    }

    /// Changes the wanted members of some peers, and writes the difference.
    async fn change(
        &self,
        shared: &mut Shared,
        touched: &BTreeSet<PeerId>,
        change: impl FnOnce(&mut Shared),
    ) -> Result<(), KernelError> {
        let before = shared.wanted_of(touched);
        change(shared);
        let after = shared.wanted_of(touched);
        if !shared.stands || before == after {
            return Ok(());
        }
        let gone: Vec<Member> = before.difference(&after).copied().collect();
        let new: Vec<Member> = after.difference(&before).copied().collect();
        // Remove members first, since a map has one value for a key.
        let mut steps: Vec<_> = by_set(&gone).map(|(set, it)| Step::Remove(set, it)).collect();
        steps.extend(by_set(&new).map(|(set, it)| Step::Add(set, it)));
        self.write(shared, &steps).await
    }

    async fn write(&self, shared: &mut Shared, steps: &[Step]) -> Result<(), KernelError> {
        // If this future is dropped, the contents of the sets are unknown.
        shared.stands = false;
        let mut begin = 0;
        while begin < steps.len() {
            // Sets are emptied in one transaction with the first members that come instead.
            let end = steps.len().min(begin + STEPS_MAX + SETS.len());
            let socket = self.socket(shared)?;
            if let Err(error) = socket.change(steps.get(begin..end).unwrap_or_default()).await {
                shared.socket = None;
                return Err(error.while_doing("write who may send from which address"));
            }
            begin = end;
        }
        shared.stands = true;
        Ok(())
    }

    fn socket<'a>(&self, shared: &'a mut Shared) -> Result<&'a mut Elements, KernelError> {
        let opened = match shared.socket.take() {
            Some(socket) => socket,
            None => Elements::open(&self.kernel, &self.own)?,
        };
        Ok(shared.socket.insert(opened))
    }
}

impl Shared {
    /// Peers whose members may change if a peer has exactly these outer addresses.
    fn touched(&self, peer: PeerId, addresses: &BTreeSet<IpAddr>) -> BTreeSet<PeerId> {
        let before = self.peers.get(&peer).into_iter().flat_map(|it| &it.addresses);
        let all: BTreeSet<&IpAddr> = before.chain(addresses).collect();
        let has = |it: &Peer| all.iter().any(|address| it.addresses.contains(*address));
        let others = self.peers.iter().filter(|(_, it)| has(it)).map(|(id, _)| *id);
        others.chain([peer]).collect()
    }

    fn set_addresses(&mut self, peer: PeerId, addresses: BTreeSet<IpAddr>) {
        let it = self.peers.entry(peer).or_default();
        let before = std::mem::replace(&mut it.addresses, addresses);
        // An address that another peer took since then stays with it.
        let new = it.addresses.difference(&before).map(|address| (*address, peer));
        self.addresses.extend(new);
        let gone: Vec<IpAddr> = before.difference(&it.addresses).copied().collect();
        for address in gone {
            if self.addresses.get(&address) != Some(&peer) {
                continue;
            }
            let has = |(id, it): (&PeerId, &Peer)| it.addresses.contains(&address).then_some(*id);
            match self.peers.iter().filter_map(has).min() {
                // It was taken from this one, which still has it.
                Some(heir) => _ = self.addresses.insert(address, heir),
                None => _ = self.addresses.remove(&address),
            }
        }
    }

    fn forget(&mut self, place: Place) {
        let Some(owner) = self.macs.remove(&place) else { return };
        if let Some(peer) = self.peers.get_mut(&owner) {
            peer.macs.remove(&place);
            if peer.macs.is_empty() && peer.number.is_none() {
                self.peers.remove(&owner);
            }
        }
    }

    fn wanted(&self) -> Vec<Member> {
        self.wanted_of(self.peers.keys()).into_iter().collect()
    }

    fn wanted_of<'a>(&self, peers: impl IntoIterator<Item = &'a PeerId>) -> BTreeSet<Member> {
        let mut wanted = BTreeSet::new();
        for id in peers {
            let Some((peer, number)) = self.peers.get(id).and_then(|it| Some((it, it.number?)))
            else {
                continue;
            };
            let has = |address: &&IpAddr| self.addresses.get(*address) == Some(id);
            wanted.insert(Member::Mark(number));
            wanted.extend(
                peer.addresses.iter().filter(has).map(|address| Member::Address(*address, number)),
            );
            let ports = |(vni, mac): &Place| {
                let mac = *mac;
                overlay_ports(*vni).map(|port| Member::Mac(number, device_name(&port), mac))
            };
            wanted.extend(peer.macs.iter().flat_map(ports));
        }
        wanted
    }
}

/// Elements of one set each, few enough for one message. The order of members is that of sets.
fn by_set(members: &[Member]) -> impl Iterator<Item = (Set, Vec<Element>)> {
    let runs = members.chunk_by(|one, next| set_of(one) == set_of(next));
    runs.flat_map(|run| run.chunks(ELEMENTS_MAX))
        .filter_map(|part| Some((set_of(part.first()?), part.iter().map(element).collect())))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(n: u8) -> PeerId {
        PeerId::from_bytes([n; 32])
    }

    fn outer(n: u8) -> IpAddr {
        [192, 0, 2, n].into()
    }

    /// Sets a peer's addresses and returns the members to write. Checks that the peers left out have
    /// unchanged members.
    fn set(shared: &mut Shared, n: u8, addresses: &[u8]) -> Vec<Member> {
        let addresses: BTreeSet<IpAddr> = addresses.iter().map(|n| outer(*n)).collect();
        let touched = shared.touched(peer(n), &addresses);
        let others: Vec<PeerId> =
            shared.peers.keys().filter(|id| !touched.contains(id)).copied().collect();
        let before = shared.wanted_of(&others);
        shared.peers.entry(peer(n)).or_default().number = Some(NUMBERS + u32::from(n));
        shared.set_addresses(peer(n), addresses);
        assert_eq!(shared.wanted_of(&others), before);
        let all = shared.wanted();
        all.into_iter().filter(|member| matches!(member, Member::Address(..))).collect()
    }

    #[test]
    fn an_address_goes_back_to_the_peer_that_still_has_it() {
        let is = |address, n: u8| Member::Address(outer(address), NUMBERS + u32::from(n));
        let mut shared = Shared::default();
        assert_eq!(set(&mut shared, 1, &[1, 9]), [is(1, 1), is(9, 1)]);
        assert_eq!(set(&mut shared, 2, &[9]), [is(1, 1), is(9, 2)], "the last one has it");
        assert_eq!(set(&mut shared, 1, &[1, 9]), [is(1, 1), is(9, 2)], "said again");
        assert_eq!(set(&mut shared, 3, &[9]), [is(1, 1), is(9, 3)]);
        assert_eq!(set(&mut shared, 2, &[]), [is(1, 1), is(9, 3)], "it had lost it");
        assert_eq!(set(&mut shared, 3, &[]), [is(1, 1), is(9, 1)]);
        assert_eq!(set(&mut shared, 1, &[]), []);
        assert!(shared.addresses.is_empty());
    }
}
