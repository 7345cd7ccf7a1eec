//! The networks of a host.
//!
//! On the wire a network has a VNI of 24 bits. In the tables it has a small number, which leaves room for an Ethernet
//! address in one key of 64 bits. Commands name VNIs; the number never leaves the engine.

use weft_path::Vni;

use super::hash::{Slab, Table};
use crate::error::{CommandError, EngineError};

/// Networks that one host can be in at once. Each but the first takes a TAP device with a queue for each worker, eight
/// at least.
pub const NETWORKS_MAX: usize = 256;

/// The number of a network in the tables, under [`NETWORKS_MAX`]. Another network gets it once this one is removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NetworkNumber(u16);

impl NetworkNumber {
    /// That of the network that the engine was started with.
    pub(crate) const FIRST: Self = Self(0);

    pub(crate) const fn new(number: u16) -> Self {
        Self(number)
    }

    #[inline]
    pub(crate) const fn get(self) -> u16 {
        self.0
    }

    /// The table key of an Ethernet address in this network: the number in the upper 16 bits, the address in the
    /// others.
    #[inline]
    pub(crate) fn key(self, mac: [u8; 6]) -> u64 {
        let [a, b, c, d, e, f] = mac;
        u64::from_be_bytes([0, 0, a, b, c, d, e, f]) | u64::from(self.0) << 48
    }

    /// The network and the address of a key.
    pub(crate) const fn of_key(key: u64) -> (Self, [u8; 6]) {
        let [high, low, mac @ ..] = key.to_be_bytes();
        (Self(u16::from_be_bytes([high, low])), mac)
    }
}

/// Names a network in the life of an engine. A device keeps it. So a device that outlives its network for a moment
/// does not become one of the network that gets the number next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NetworkId {
    pub(crate) number: NetworkNumber,
    /// Never given again.
    serial: u64,
}

/// A network.
#[derive(Debug)]
pub(crate) struct Network {
    pub(crate) id: NetworkId,
    pub(crate) vni: Vni,
    /// The peers that get its frames to groups.
    pub(crate) broadcast: Vec<u32>,
}

/// The networks of a host.
#[derive(Debug)]
pub(crate) struct Networks {
    /// The one that the engine was started with; it stays.
    first: Network,
    /// The others, each one place before its number.
    others: Slab<Network>,
    /// Their numbers, by VNI.
    numbers: Table<u16>,
    last_serial: u64,
}

impl Networks {
    pub(crate) fn new(first: Vni) -> Self {
        let id = NetworkId { number: NetworkNumber::FIRST, serial: 0 };
        Self {
            first: Network { id, vni: first, broadcast: Vec::new() },
            others: Slab::new(),
            numbers: Table::new(),
            last_serial: 0,
        }
    }

    #[inline]
    pub(crate) const fn first(&self) -> &Network {
        &self.first
    }

    /// The number of the network with this VNI.
    #[inline]
    pub(crate) fn number_of(&self, vni: u32) -> Option<NetworkNumber> {
        if vni == self.first.vni.0 {
            return Some(NetworkNumber::FIRST);
        }
        self.numbers.get(vni.into()).map(NetworkNumber)
    }

    /// The network with this number.
    #[inline]
    pub(crate) fn get(&self, number: NetworkNumber) -> Option<&Network> {
        match number.0.checked_sub(1) {
            None => Some(&self.first),
            Some(place) => self.others.get(place.into()),
        }
    }

    fn get_mut(&mut self, number: NetworkNumber) -> Option<&mut Network> {
        match number.0.checked_sub(1) {
            None => Some(&mut self.first),
            Some(place) => self.others.get_mut(place.into()),
        }
    }

    /// The network of a device, while it is there.
    #[inline]
    pub(crate) fn of(&self, id: NetworkId) -> Option<&Network> {
        self.get(id.number).filter(|network| network.id == id)
    }

    /// The network with this VNI.
    ///
    /// # Errors
    /// There is none.
    pub(crate) fn by_vni(&self, vni: Vni) -> Result<&Network, CommandError> {
        let number = self.number_of(vni.0);
        number.and_then(|number| self.get(number)).ok_or(CommandError::UnknownNetwork { vni })
    }

    /// Sets the peers that get a network's frames to groups.
    ///
    /// # Errors
    /// There is no such network.
    pub(crate) fn set_broadcast(&mut self, vni: Vni, peers: Vec<u32>) -> Result<(), CommandError> {
        let number = self.number_of(vni.0);
        let network = number.and_then(|number| self.get_mut(number));
        network.ok_or(CommandError::UnknownNetwork { vni })?.broadcast = peers;
        Ok(())
    }

    /// Takes one more. One that is there stays as it is.
    ///
    /// # Errors
    /// There are [`NETWORKS_MAX`] of them.
    pub(crate) fn add(&mut self, vni: Vni) -> Result<NetworkId, EngineError> {
        if let Ok(network) = self.by_vni(vni) {
            return Ok(network.id);
        }
        let there_are = self.numbers.len() + 1;
        if there_are >= NETWORKS_MAX {
            return Err(EngineError::Configuration {
                what: "the number of networks",
                allowed: "at most 256",
                given: (there_are + 1).to_string(),
            });
        }
        self.last_serial += 1;
        let number = NetworkNumber(self.others.next() as u16 + 1);
        let id = NetworkId { number, serial: self.last_serial };
        self.others.insert(Network { id, vni, broadcast: Vec::new() });
        self.numbers.insert(vni.0.into(), number.0);
        Ok(id)
    }

    /// Forgets a network; returns its number.
    ///
    /// # Errors
    /// There is no such network, or it is the first.
    pub(crate) fn remove(&mut self, vni: Vni) -> Result<NetworkNumber, EngineError> {
        let number = self.number_of(vni.0).ok_or(EngineError::UnknownNetwork { vni })?;
        let place = number.0.checked_sub(1).ok_or(EngineError::FirstNetwork { vni })?;
        self.others.remove(place.into());
        self.numbers.remove(vni.0.into());
        Ok(number)
    }

    /// A peer is gone from all of them.
    pub(crate) fn forget_peer(&mut self, peer: u32) {
        let others = self.others.iter_mut().map(|(_, network)| network);
        for network in others.chain([&mut self.first]) {
            network.broadcast.retain(|at| *at != peer);
        }
    }

    /// The VNIs of all of them, the first one's first.
    pub(crate) fn vnis(&self) -> impl Iterator<Item = Vni> {
        let others = self.others.iter().map(|(_, network)| network.vni);
        [self.first.vni].into_iter().chain(others)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_key_holds_network_and_address() {
        let mac = [0x02, 0x42, 10, 32, 0xff, 1];
        for number in [0, 1, 255] {
            let number = NetworkNumber::new(number);
            assert_eq!(NetworkNumber::of_key(number.key(mac)), (number, mac));
        }
        assert_eq!(NetworkNumber::FIRST.key(mac), 0x0242_0a20_ff01);
    }

    #[test]
    fn networks_are_taken_up_to_their_number_and_come_and_go() {
        let mut networks = Networks::new(Vni(1));
        let first = networks.first().id;
        let last = NETWORKS_MAX as u32;
        let ids: Vec<_> = (2..=last).map(|vni| networks.add(Vni(vni)).unwrap()).collect();
        let one_more = Vni(last + 1);
        let refusal = networks.add(one_more).unwrap_err().to_string();
        assert!(refusal.contains("at most 256, not 257"), "{refusal}");
        // Those that are there stay as they are.
        assert_eq!([1, 2].map(|vni| networks.add(Vni(vni)).unwrap()), [first, ids[0]]);
        assert_eq!(networks.vnis().count(), NETWORKS_MAX);
        for vni in networks.vnis() {
            let number = networks.number_of(vni.0).unwrap();
            assert_eq!(networks.get(number).unwrap().vni, vni);
        }

        let refusal = networks.remove(Vni(1)).unwrap_err();
        assert!(matches!(refusal, EngineError::FirstNetwork { vni: Vni(1) }), "{refusal}");
        let refusal = networks.remove(one_more).unwrap_err();
        assert!(matches!(refusal, EngineError::UnknownNetwork { .. }), "{refusal}");
        let unknown = CommandError::UnknownNetwork { vni: one_more };
        assert_eq!(networks.set_broadcast(one_more, vec![3]), Err(unknown));
        networks.set_broadcast(Vni(2), vec![3]).unwrap();
        assert_eq!(networks.remove(Vni(2)).unwrap(), ids[0].number);
        assert_eq!(networks.number_of(2), None);
        // The number goes to another network. It has nothing of the old one, and is no device's of the old one.
        let id = networks.add(one_more).unwrap();
        assert_eq!(id.number, ids[0].number);
        assert!(networks.of(id).unwrap().broadcast.is_empty());
        assert!(networks.of(ids[0]).is_none() && networks.of(ids[1]).is_some());
    }
}
