//! The peers of a data channel device, and how a packet finds its own.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use weft_io::udp::Remote;
use weft_openvpn::device::rules::{NewPeer, PeerChange};
use weft_openvpn::device::{DeviceError, Keepalive, Mode, PeerState, Traffic};

use super::keys::Keys;
use super::routes::Routes;
use crate::stats::counters;
use crate::tables::hash::Slab;

/// Peers that a device takes.
pub const DEVICE_PEERS_MAX: usize = 16_384;

/// A peer, as the workers use it.
#[derive(Debug)]
pub(crate) struct Peer {
    /// Unique among all peers that the device ever had; its id and its place may be reused.
    pub(crate) number: u64,
    /// The peer id in packets from it.
    pub(crate) id: u32,
    /// The peer id in packets to it.
    pub(crate) tx_id: u32,
    /// The transport that it is reached by.
    pub(crate) transport: u16,
    /// Its address, over UDP.
    pub(crate) remote: Option<Remote>,
    pub(crate) vpn_ipv4: Option<Ipv4Addr>,
    pub(crate) vpn_ipv6: Option<Ipv6Addr>,
    pub(crate) keepalive: Keepalive,
    pub(crate) keys: Keys,
    pub(crate) counts: Counts,
    /// When something was last sent to it and last received from it, in ms of the device's clock.
    sent_ms: AtomicU64,
    heard_ms: AtomicU64,
}

/// Traffic to and from a peer. Several threads add to it.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    vpn: Way,
    link: Way,
}

/// Traffic from a peer that a worker adds to the counts at once.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Received {
    /// The IP packets in it.
    pub(crate) inside: counters::Traffic,
    /// All of it, as it came.
    pub(crate) outside: counters::Traffic,
}

#[derive(Debug, Default)]
struct Way {
    rx_bytes: AtomicU64,
    tx_bytes: AtomicU64,
    rx_packets: AtomicU64,
    tx_packets: AtomicU64,
}

impl Way {
    fn traffic(&self) -> Traffic {
        Traffic {
            rx_bytes: self.rx_bytes.load(Relaxed),
            tx_bytes: self.tx_bytes.load(Relaxed),
            rx_packets: self.rx_packets.load(Relaxed),
            tx_packets: self.tx_packets.load(Relaxed),
        }
    }
}

impl Counts {
    /// Counts sent packets, with their bytes inside and outside.
    #[inline]
    pub(crate) fn sent(&self, packets: u64, inside: u64, outside: u64) {
        for (way, bytes) in [(&self.vpn, inside), (&self.link, outside)] {
            way.tx_packets.fetch_add(packets, Relaxed);
            way.tx_bytes.fetch_add(bytes, Relaxed);
        }
    }

    /// Counts sent keepalives, with their bytes outside.
    pub(crate) fn sent_outside(&self, packets: u64, outside: u64) {
        self.link.tx_packets.fetch_add(packets, Relaxed);
        self.link.tx_bytes.fetch_add(outside, Relaxed);
    }

    /// The authentic packets and bytes.
    pub(crate) fn received(&self, received: Received) {
        for (way, it) in [(&self.vpn, received.inside), (&self.link, received.outside)] {
            way.rx_packets.fetch_add(it.packets, Relaxed);
            way.rx_bytes.fetch_add(it.bytes, Relaxed);
        }
    }
}

impl Peer {
    /// A peer without keys, of which nothing was heard yet.
    pub(crate) fn new(new: &NewPeer, transport: u16, remote: Option<Remote>, now_ms: u64) -> Self {
        Self {
            number: 0,
            id: new.id,
            tx_id: new.tx_id,
            transport,
            remote,
            vpn_ipv4: new.vpn_ipv4,
            vpn_ipv6: new.vpn_ipv6,
            keepalive: new.keepalive,
            keys: Keys::default(),
            counts: Counts::default(),
            sent_ms: AtomicU64::new(now_ms),
            heard_ms: AtomicU64::new(now_ms),
        }
    }

    /// Something goes to it at this time of the device's clock.
    #[inline]
    pub(crate) fn sent(&self, now_ms: u64) {
        self.sent_ms.store(now_ms, Relaxed);
    }

    /// Something authentic came from it at this time of the device's clock.
    #[inline]
    pub(crate) fn heard(&self, now_ms: u64) {
        self.heard_ms.store(now_ms, Relaxed);
    }

    /// As the kernel's device has it, a keepalive of which one time is 0 is none.
    const fn has_keepalive(&self) -> bool {
        self.keepalive.interval_s > 0 && self.keepalive.timeout_s > 0
    }

    /// Nothing was heard of it for longer than its keepalive allows.
    pub(crate) fn is_expired(&self, now_ms: u64) -> bool {
        let limit_ms = u64::from(self.keepalive.timeout_s) * 1_000;
        self.has_keepalive() && now_ms.saturating_sub(self.heard_ms.load(Relaxed)) >= limit_ms
    }

    /// Nothing was sent to it for as long as its keepalive allows.
    pub(crate) fn is_ping_due(&self, now_ms: u64) -> bool {
        let limit_ms = u64::from(self.keepalive.interval_s) * 1_000;
        self.has_keepalive() && now_ms.saturating_sub(self.sent_ms.load(Relaxed)) >= limit_ms
    }

    /// As it is told of. `local` is where its transport sends from.
    pub(crate) fn state(&self, local: Option<SocketAddr>) -> PeerState {
        PeerState {
            id: self.id,
            tx_id: Some(self.tx_id),
            remote: self.remote.map(|remote| remote.address()),
            local,
            socket_netns: None,
            vpn_ipv4: self.vpn_ipv4,
            vpn_ipv6: self.vpn_ipv6,
            keepalive: self.keepalive,
            vpn: self.counts.vpn.traffic(),
            link: self.counts.link.traffic(),
        }
    }

    fn vpn_addresses(&self) -> impl Iterator<Item = IpAddr> + use<> {
        let (ipv4, ipv6) = (self.vpn_ipv4, self.vpn_ipv6);
        ipv4.map(IpAddr::V4).into_iter().chain(ipv6.map(IpAddr::V6))
    }
}

/// All peers of a device.
#[derive(Debug)]
pub(crate) struct Peers {
    mode: Mode,
    peers: Slab<Peer>,
    by_id: HashMap<u32, u32>,
    by_vpn_address: HashMap<IpAddr, u32>,
    by_remote: HashMap<SocketAddr, u32>,
    /// Peers with signs of life.
    with_keepalive: usize,
    /// Peers that there ever were.
    ever: u64,
    pub(crate) routes: Routes,
}

impl Peers {
    pub(crate) fn new(mode: Mode) -> Self {
        Self {
            mode,
            peers: Slab::new(),
            by_id: HashMap::new(),
            by_vpn_address: HashMap::new(),
            by_remote: HashMap::new(),
            with_keepalive: 0,
            ever: 0,
            routes: Routes::default(),
        }
    }

    pub(crate) const fn mode(&self) -> Mode {
        self.mode
    }

    #[inline]
    pub(crate) fn get(&self, index: u32) -> Option<&Peer> {
        self.peers.get(index)
    }

    pub(crate) fn get_mut(&mut self, index: u32) -> Option<&mut Peer> {
        self.peers.get_mut(index)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, &Peer)> {
        self.peers.iter()
    }

    /// Whether any peer has signs of life to be looked after.
    pub(crate) const fn has_keepalive(&self) -> bool {
        self.with_keepalive > 0
    }

    pub(crate) fn len(&self) -> usize {
        self.by_id.len()
    }

    /// The peer with this id.
    ///
    /// # Errors
    /// There is none.
    pub(crate) fn index_of(&self, id: u32) -> Result<u32, DeviceError> {
        self.with_id(id).ok_or(DeviceError::NoPeer(id))
    }

    /// The peer whose packets bear this id.
    #[inline]
    pub(crate) fn with_id(&self, id: u32) -> Option<u32> {
        self.by_id.get(&id).copied()
    }

    /// The peer that is there: whose it is when a packet bears no id.
    #[inline]
    pub(crate) fn at(&self, remote: SocketAddr) -> Option<u32> {
        self.by_remote.get(&remote).copied()
    }

    /// The peer that packets to this address go to.
    #[inline]
    pub(crate) fn towards(&self, address: IpAddr) -> Option<u32> {
        match self.mode {
            Mode::P2p => self.peers.iter().next().map(|(index, _)| index),
            Mode::Mp => self.by_vpn_address.get(&address).copied().or_else(|| {
                let hop = self.routes.next_hop(address)?;
                self.by_vpn_address.get(&hop).copied()
            }),
        }
    }

    /// Whether packets from this address may come from this peer: those to it would go there.
    #[inline]
    pub(crate) fn may_come_from(&self, index: u32, address: IpAddr) -> bool {
        self.mode == Mode::P2p || self.towards(address) == Some(index)
    }

    /// Adds a peer. The only one of a device in mode p2p makes room for it and is returned.
    ///
    /// # Errors
    /// Its id or one of its VPN addresses is another's, or there are [`DEVICE_PEERS_MAX`].
    pub(crate) fn insert(&mut self, mut peer: Peer) -> Result<Option<Peer>, DeviceError> {
        let replaced = match self.mode {
            Mode::P2p => {
                let before = self.peers.iter().next().map(|(_, peer)| peer.id);
                before.and_then(|id| self.remove(id).ok())
            }
            Mode::Mp => None,
        };
        if self.by_id.contains_key(&peer.id) {
            return Err(DeviceError::PeerExists(peer.id));
        }
        if peer.vpn_addresses().any(|address| self.by_vpn_address.contains_key(&address)) {
            return Err(DeviceError::VpnAddressTaken);
        }
        if self.len() >= DEVICE_PEERS_MAX {
            return Err(DeviceError::TooManyPeers(DEVICE_PEERS_MAX));
        }
        let (id, remote) = (peer.id, peer.remote);
        self.ever += 1;
        peer.number = self.ever;
        self.with_keepalive += usize::from(peer.has_keepalive());
        let addresses = peer.vpn_addresses();
        let index = self.peers.insert(peer);
        self.by_id.insert(id, index);
        self.by_vpn_address.extend(addresses.map(|address| (address, index)));
        if let Some(remote) = remote {
            self.by_remote.insert(remote.address(), index);
        }
        Ok(replaced)
    }

    /// Changes a peer; `remote` is the change's, as its transport sends there. Its signs of life are
    /// reckoned from now on, if they change.
    ///
    /// # Errors
    /// There is no such peer, or a VPN address is another's; nothing is changed then.
    pub(crate) fn change(
        &mut self,
        id: u32,
        change: &PeerChange,
        remote: Option<Remote>,
        now_ms: u64,
    ) -> Result<(), DeviceError> {
        let index = self.index_of(id)?;
        let ipv4 = change.vpn_ipv4.map(IpAddr::V4);
        let mut new = ipv4.into_iter().chain(change.vpn_ipv6.map(IpAddr::V6));
        let anothers = |address| self.by_vpn_address.get(&address).is_some_and(|of| *of != index);
        if new.any(anothers) {
            return Err(DeviceError::VpnAddressTaken);
        }
        let peer = self.peers.get_mut(index).ok_or(DeviceError::NoPeer(id))?;
        for old in peer.vpn_addresses() {
            self.by_vpn_address.remove(&old);
        }
        peer.vpn_ipv4 = change.vpn_ipv4.or(peer.vpn_ipv4);
        peer.vpn_ipv6 = change.vpn_ipv6.or(peer.vpn_ipv6);
        self.by_vpn_address.extend(peer.vpn_addresses().map(|address| (address, index)));
        peer.tx_id = change.tx_id.unwrap_or(peer.tx_id);
        if let Some(keepalive) = change.keepalive {
            self.with_keepalive -= usize::from(peer.has_keepalive());
            peer.keepalive = keepalive;
            self.with_keepalive += usize::from(peer.has_keepalive());
            peer.sent(now_ms);
            peer.heard(now_ms);
        }
        if let Some(remote) = remote {
            self.set_remote(index, remote);
        }
        Ok(())
    }

    /// The peer is there from now on.
    pub(crate) fn set_remote(&mut self, index: u32, remote: Remote) {
        let Some(peer) = self.peers.get_mut(index) else { return };
        if let Some(old) = peer.remote.replace(remote)
            && self.by_remote.get(&old.address()) == Some(&index)
        {
            self.by_remote.remove(&old.address());
        }
        self.by_remote.insert(remote.address(), index);
    }

    /// Erases the keys that no longer seal.
    pub(crate) fn remove_spent_keys(&mut self) {
        self.peers.iter_mut().for_each(|(_, peer)| peer.keys.remove_spent());
    }

    /// Removes a peer, and erases its keys with it.
    ///
    /// # Errors
    /// There is no such peer.
    pub(crate) fn remove(&mut self, id: u32) -> Result<Peer, DeviceError> {
        let index = self.by_id.remove(&id).ok_or(DeviceError::NoPeer(id))?;
        let peer = self.peers.remove(index).ok_or(DeviceError::NoPeer(id))?;
        self.with_keepalive -= usize::from(peer.has_keepalive());
        for address in peer.vpn_addresses() {
            self.by_vpn_address.remove(&address);
        }
        if let Some(remote) = peer.remote
            && self.by_remote.get(&remote.address()) == Some(&index)
        {
            self.by_remote.remove(&remote.address());
        }
        Ok(peer)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::dco::Route;

    /// A peer of a device in mode mp, by its id alone.
    fn new_peer(id: u32) -> NewPeer {
        NewPeer {
            id,
            tx_id: id,
            remote: None,
            local: None,
            vpn_ipv4: Some(vpn_ipv4(id)),
            vpn_ipv6: Some(vpn_ipv6(id)),
            keepalive: Keepalive::default(),
        }
    }

    fn vpn_ipv4(id: u32) -> Ipv4Addr {
        Ipv4Addr::from_bits(0x0a08_0000 + id)
    }

    fn vpn_ipv6(id: u32) -> Ipv6Addr {
        Ipv6Addr::from_bits(0xfd08 << 112 | u128::from(id))
    }

    fn add(peers: &mut Peers, new: &NewPeer) -> Result<(), DeviceError> {
        peers.insert(Peer::new(new, 0, None, 0)).map(|_| ())
    }

    /// A device with the peers 1 to `last`, and routes over it.
    fn peers(last: u32, routes: &[Route]) -> Peers {
        let mut peers = Peers::new(Mode::Mp);
        for id in 1..=last {
            add(&mut peers, &new_peer(id)).unwrap();
        }
        peers.routes = Routes::of(routes);
        peers
    }

    /// Networks, written with their lengths, by the VPN addresses of peers.
    fn routes(all: &[(&str, IpAddr)]) -> Vec<Route> {
        let route = |(network, gateway): &(&str, IpAddr)| {
            let (address, bits) = network.split_once('/').unwrap();
            let destination = (address.parse().unwrap(), bits.parse().unwrap());
            Route { destination, gateway: Some(*gateway), metric: 0 }
        };
        all.iter().map(route).collect()
    }

    /// The id of the peer that packets to an address go to. Those from it may come from that one alone.
    fn towards(peers: &Peers, address: &str) -> Option<u32> {
        let address = address.parse().unwrap();
        let found = peers.towards(address);
        for (index, _) in peers.iter() {
            assert_eq!(peers.may_come_from(index, address), found == Some(index), "{address}");
        }
        found.map(|index| peers.get(index).unwrap().id)
    }

    #[test]
    fn a_vpn_address_comes_before_the_next_hop_of_any_route_to_it() {
        // Longer than any other, and towards another peer.
        let peers = peers(
            2,
            &routes(&[
                ("10.8.0.1/32", vpn_ipv4(2).into()),
                ("10.8.0.0/24", vpn_ipv4(2).into()),
                ("fd08::1/128", vpn_ipv6(2).into()),
                ("fd08::/64", vpn_ipv6(2).into()),
            ]),
        );
        assert_eq!(towards(&peers, "10.8.0.1"), Some(1));
        assert_eq!(towards(&peers, "fd08::1"), Some(1));
        // No peer has these addresses.
        assert_eq!(towards(&peers, "10.8.0.77"), Some(2));
        assert_eq!(towards(&peers, "fd08::77"), Some(2));
    }

    #[test]
    fn networks_are_reached_by_next_hops_of_either_family() {
        let peers = peers(
            3,
            &routes(&[
                ("2001:db8:1::/48", vpn_ipv6(1).into()),
                ("2001:db8:1:7::/64", vpn_ipv6(2).into()),
                ("192.168.0.0/16", vpn_ipv4(1).into()),
                // As RFC 5549 has it.
                ("198.51.100.0/24", vpn_ipv6(3).into()),
                ("203.0.113.0/24", vpn_ipv4(9).into()),
                ("2001:db8:9::/48", vpn_ipv6(9).into()),
            ]),
        );
        for (address, id) in [
            ("2001:db8:1:6::1", Some(1)),
            ("2001:db8:1:7::1", Some(2)),
            ("192.168.3.4", Some(1)),
            ("198.51.100.1", Some(3)),
            ("203.0.113.1", None),
            ("2001:db8:9::1", None),
            ("2001:db8:2::1", None),
            ("172.16.0.1", None),
        ] {
            assert_eq!(towards(&peers, address), id, "{address}");
        }
    }

    #[test]
    fn a_changed_vpn_address_is_its_peers_and_the_one_before_is_nobodys() {
        let mut peers = peers(2, &[]);
        let to = |id| PeerChange { vpn_ipv6: Some(vpn_ipv6(id)), ..PeerChange::default() };
        assert_eq!(peers.change(1, &to(2), None, 0), Err(DeviceError::VpnAddressTaken));
        assert_eq!(towards(&peers, "fd08::1"), Some(1));
        peers.change(1, &to(9), None, 0).unwrap();
        assert_eq!(towards(&peers, "fd08::9"), Some(1));
        assert_eq!(towards(&peers, "fd08::1"), None);
        // The other family's stays.
        assert_eq!(towards(&peers, "10.8.0.1"), Some(1));
        peers.change(2, &to(1), None, 0).unwrap();
        assert_eq!(towards(&peers, "fd08::1"), Some(2));
    }

    #[test]
    fn a_device_takes_so_many_peers_and_no_more() {
        let most = DEVICE_PEERS_MAX as u32;
        let mut peers = peers(most, &[]);
        let new = new_peer(most + 1);
        assert_eq!(add(&mut peers, &new), Err(DeviceError::TooManyPeers(DEVICE_PEERS_MAX)));
        // Nothing is left of the refused peer.
        assert_eq!(peers.index_of(new.id), Err(DeviceError::NoPeer(new.id)));
        assert_eq!(peers.towards(vpn_ipv4(new.id).into()), None);
        assert_eq!((peers.len(), peers.iter().count()), (DEVICE_PEERS_MAX, DEVICE_PEERS_MAX));
        peers.remove(7).unwrap();
        assert_eq!(add(&mut peers, &new), Ok(()));
        assert_eq!(towards(&peers, &vpn_ipv6(new.id).to_string()), Some(new.id));
        assert_eq!(add(&mut peers, &new_peer(7)).unwrap_err().errno(), 16);
    }

    #[test]
    fn a_keepalive_of_which_one_time_is_zero_is_none() {
        const LATE_MS: u64 = 1 << 40;
        let with = |interval_s, timeout_s| {
            let keepalive = Keepalive { interval_s, timeout_s };
            let peer = Peer::new(&NewPeer { keepalive, ..new_peer(1) }, 0, None, 0);
            (peer.has_keepalive(), peer.is_ping_due(LATE_MS), peer.is_expired(LATE_MS))
        };
        assert_eq!(with(1, 1), (true, true, true));
        for (interval_s, timeout_s) in [(0, 0), (0, 5), (5, 0)] {
            assert_eq!(with(interval_s, timeout_s), (false, false, false));
        }
        let keepalive = Keepalive { interval_s: 3, timeout_s: 5 };
        let peer = Peer::new(&NewPeer { keepalive, ..new_peer(1) }, 0, None, 0);
        let due = |now_ms| (peer.is_ping_due(now_ms), peer.is_expired(now_ms));
        assert_eq!([2_999, 3_000, 5_000].map(due), [(false, false), (true, false), (true, true)]);
    }
}
