//! The search for a free address in a part of a network's range (`--ip-range`). Other hosts may have the same part, and
//! the hosts that own its addresses are asked for one after the other.

use std::collections::BTreeSet;
use std::iter::{Chain, Skip, Take};
use std::net::IpAddr;

use ipnet::{IpAddrRange, IpNet};
use weft_crypto::PeerId;

/// Addresses that are claimed in turn: more than a /24 has.
pub(super) const CLAIMS_MAX: usize = 256;

/// What to do next.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// To claim this address.
    Claim(IpAddr),
    /// None is left.
    Exhausted,
    /// [`CLAIMS_MAX`] were claimed in vain, and there are others.
    GivenUp,
}

/// A search, from one place in the part once round.
pub(super) struct Search {
    rest: Chain<Skip<IpAddrRange>, Take<IpAddrRange>>,
    /// Addresses that are somebody's.
    taken: BTreeSet<IpAddr>,
    claims: usize,
}

impl Search {
    /// `place` is less than the number of addresses; `taken` are those that this host has given.
    pub(super) fn new(part: IpNet, place: usize, taken: BTreeSet<IpAddr>) -> Self {
        let hosts = part.hosts();
        Self { rest: hosts.skip(place).chain(hosts.take(place)), taken, claims: 0 }
    }

    pub(super) fn step(&mut self) -> Step {
        let Some(address) = self.rest.find(|address| !self.taken.contains(address)) else {
            return Step::Exhausted;
        };
        if self.claims == CLAIMS_MAX {
            return Step::GivenUp;
        }
        self.claims += 1;
        Step::Claim(address)
    }

    /// Leaves out addresses that others are known to have.
    pub(super) fn leave_out(&mut self, taken: BTreeSet<IpAddr>) {
        self.taken.extend(taken);
    }
}

/// A host's place in a part, always the same. Hosts that all began with the first address would claim each other's.
pub(super) fn place_of(local: PeerId, part: IpNet) -> usize {
    let digest = weft_crypto::fingerprint(&[local.as_bytes(), part.to_string().as_bytes()]);
    let [a, b, c, d, ..] = digest;
    let number = usize::try_from(u32::from_be_bytes([a, b, c, d])).unwrap_or_default();
    let (_, addresses) = part.hosts().size_hint();
    number % addresses.unwrap_or(usize::MAX).max(1)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    /// What a host does for an address, where these are given. With the number of its claims.
    fn search(
        (local, part): (PeerId, IpNet),
        own: &BTreeSet<IpAddr>,
        others: &BTreeSet<IpAddr>,
        announced: &BTreeSet<IpAddr>,
    ) -> (Result<IpAddr, Step>, usize) {
        let mut search = Search::new(part, place_of(local, part), own.clone());
        loop {
            match search.step() {
                Step::Claim(address) if others.contains(&address) => {
                    search.leave_out(announced.clone());
                }
                Step::Claim(address) => return (Ok(address), search.claims),
                step => return (Err(step), search.claims),
            }
        }
    }

    fn hosts() -> [PeerId; 3] {
        [1, 2, 3].map(|number| PeerId::from_bytes([number; 32]))
    }

    #[test]
    fn hosts_with_one_part_give_all_of_it_and_each_address_once() {
        let part: IpNet = "10.40.9.0/24".parse().unwrap();
        let mut given = hosts().map(|_| BTreeSet::new());
        for number in 0..254 {
            let host = number % 3;
            let others = given.iter().enumerate().filter(|(other, _)| *other != host);
            let others = others.flat_map(|(_, given)| given).copied().collect();
            // Nobody has announced anything yet.
            let (found, _) = search((hosts()[host], part), &given[host], &others, &BTreeSet::new());
            assert!(given[host].insert(found.unwrap()), "{number}");
        }
        let all: BTreeSet<&IpAddr> = given.iter().flatten().collect();
        assert_eq!(all.len(), 254);
        let others = given[1].union(&given[2]).copied().collect();
        let (found, _) = search((hosts()[0], part), &given[0], &others, &others);
        assert_eq!(found, Err(Step::Exhausted));
    }

    #[test]
    fn hosts_begin_at_places_of_their_own_in_parts_of_any_size() {
        let part: IpNet = "10.40.0.0/16".parse().unwrap();
        let places: BTreeSet<usize> = hosts().map(|host| place_of(host, part)).into();
        assert_eq!(places.len(), 3);
        let local = hosts()[0];
        for part in ["10.40.0.7/32", "10.40.0.0/31", "10.40.0.0/30", "fd00::/126", "fd00::/64"] {
            let part: IpNet = part.parse().unwrap();
            let mut search = Search::new(part, place_of(local, part), BTreeSet::new());
            assert!(matches!(search.step(), Step::Claim(address) if part.contains(&address)));
        }
    }

    #[test]
    fn a_long_run_of_others_is_left_out_once_they_have_announced_it() {
        let part: IpNet = "10.40.0.0/16".parse().unwrap();
        let local = hosts()[0];
        let from_here = Search::new(part, place_of(local, part), BTreeSet::new()).rest;
        let others: BTreeSet<IpAddr> = from_here.take(CLAIMS_MAX + 1).collect();
        let own = BTreeSet::new();
        let (found, claims) = search((local, part), &own, &others, &others);
        assert!(found.is_ok_and(|address| !others.contains(&address)));
        assert_eq!(claims, 2);
        // One that nobody has announced is not called exhausted.
        let (found, claims) = search((local, part), &own, &others, &BTreeSet::new());
        assert_eq!((found, claims), (Err(Step::GivenUp), CLAIMS_MAX));
    }
}
