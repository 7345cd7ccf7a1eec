//! A device's peer table alone, for measuring how long it takes to find a packet's peer.

use std::net::{IpAddr, Ipv4Addr};

use weft_openvpn::device::rules::NewPeer;
use weft_openvpn::device::{DeviceError, Keepalive, Mode};

use super::peers::{Peer, Peers};
use super::{Route, Routes};

/// The first peer's id.
const FIRST: u32 = 1;
/// A VPN address is this and the peer's id.
const VPN: u32 = 0x0a08_0000;
/// The network behind the first peer, of which 16 bits are given.
const BEHIND: u32 = 0x0a09_0000;

/// The peers of a device in mode mp, reached by nothing.
#[derive(Debug)]
pub struct PeerTable(Peers);

impl PeerTable {
    /// A table of `count` peers, and a route to a network behind the first.
    ///
    /// # Errors
    /// There are more than a device takes.
    pub fn new(count: u32) -> Result<Self, DeviceError> {
        let mut peers = Peers::new(Mode::Mp);
        for id in FIRST..FIRST + count {
            let new = NewPeer {
                id,
                tx_id: id,
                remote: None,
                local: None,
                vpn_ipv4: Some(Ipv4Addr::from_bits(VPN + id)),
                vpn_ipv6: None,
                keepalive: Keepalive::default(),
            };
            peers.insert(Peer::new(&new, 0, None, 0))?;
        }
        let gateway = Some(Ipv4Addr::from_bits(VPN + FIRST).into());
        let destination = (Ipv4Addr::from_bits(BEHIND).into(), 16);
        peers.routes = Routes::of(&[Route { destination, gateway, metric: 0 }]);
        Ok(Self(peers))
    }

    /// Whether all look-ups find the right peer. A packet with the id of the `number`th peer, from 0 on, and
    /// a packet to its VPN address find the same peer. A packet to the network behind the first peer finds
    /// the first.
    pub fn finds(&self, number: u32) -> bool {
        let id = FIRST + number;
        let found = self.0.with_id(id);
        let towards = |base| self.0.towards(IpAddr::V4(Ipv4Addr::from_bits(base + id)));
        found.is_some() && towards(VPN) == found && towards(BEHIND) == self.0.with_id(FIRST)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn every_peer_of_a_table_is_found_and_no_other() {
        for count in [1, 300] {
            let table = PeerTable::new(count).unwrap();
            assert!((0..count).all(|number| table.finds(number)));
            assert!(!table.finds(count));
        }
    }
}
