//! Which client has which addresses, as the gateways of a mesh agree on it.
//!
//! The host where a client first connects gets addresses from the mesh and tells the others. Every gateway then serves
//! the client with these. There is no consensus yet: the first host's word holds. Where two hosts gave addresses while
//! they could not talk, both come to know both mappings, and one rule says which stays.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::ops::Bound;

use serde::{Deserialize, Serialize};
use weft_crypto::PeerId;

/// Mappings kept at most.
pub(super) const MAPPINGS_MAX: usize = 200_000;
/// Mappings in one message.
pub(super) const MAPPINGS_PER_MESSAGE: usize = 500;
/// Addresses of a client: one of each family.
const ADDRESSES_MAX: usize = 2;

/// A network and the name of a client.
pub(crate) type Key = (String, String);

/// The addresses of a client on a network.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Mapping {
    pub(crate) network: String,
    pub(crate) name: String,
    pub(crate) addresses: Vec<IpAddr>,
    /// The host whose range they are from. It alone frees them.
    pub(crate) by: PeerId,
    /// When it was made, on the gateways' clock.
    made: u64,
    /// Revocations of the name that the maker knew. One more makes the mapping void.
    epoch: u32,
    /// Mappings in whose place it was made since.
    #[serde(default)]
    generation: u32,
}

impl Mapping {
    pub(super) fn key(&self) -> Key {
        (self.network.clone(), self.name.clone())
    }

    /// Whether this one stays and the other goes. Of two different ones exactly one beats the other.
    fn beats(&self, other: &Self) -> bool {
        let rank = |it: &Self| {
            let newer = (it.epoch, it.generation);
            (newer, Reverse((it.made, it.by, it.addresses.clone())))
        };
        rank(self) > rank(other)
    }
}

/// The outcome of a merge.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Merged {
    /// Nothing is new.
    Known,
    /// It is new, or has taken the place of this one.
    New(Option<Mapping>),
    /// It has lost, or there is no place for it.
    Refused,
}

/// All mappings, and how often names were revoked.
#[derive(Default)]
pub(super) struct Mappings {
    all: BTreeMap<Key, Mapping>,
    epochs: BTreeMap<String, u32>,
}

impl Mappings {
    /// Those of an earlier run.
    pub(super) fn restore(saved: Vec<Mapping>) -> Self {
        let all = saved.into_iter().map(|mapping| (mapping.key(), mapping)).collect();
        Self { all, epochs: BTreeMap::new() }
    }

    pub(super) fn get(&self, key: &Key) -> Option<&Mapping> {
        self.all.get(key)
    }

    pub(super) fn all(&self) -> impl Iterator<Item = &Mapping> {
        self.all.values()
    }

    /// Notes addresses that this host gives a client. `None`: they are known already.
    pub(super) fn give(
        &mut self,
        (network, name): Key,
        addresses: Vec<IpAddr>,
        (local, now): (PeerId, u64),
    ) -> Option<Mapping> {
        let key = (network, name);
        let before = self.all.get(&key);
        if before.is_some_and(|it| it.by == local && it.addresses == addresses) {
            return None;
        }
        let epoch = self.epochs.get(&key.1).copied().unwrap_or_default();
        // In the place of one that no longer holds, it must beat it on all hosts.
        let earlier = before.filter(|it| it.epoch >= epoch);
        let generation = earlier.map_or(0, |it| it.generation.saturating_add(1));
        let epoch = before.map_or(epoch, |it| it.epoch.max(epoch));
        let (network, name) = key.clone();
        let new = Mapping { network, name, addresses, by: local, made: now, epoch, generation };
        self.all.insert(key, new.clone());
        Some(new)
    }

    /// Takes a mapping from another host.
    pub(super) fn merge(&mut self, new: Mapping) -> Merged {
        let key = new.key();
        let is_void = self.is_void(&new);
        let before = self.all.get(&key);
        if before == Some(&new) {
            return Merged::Known;
        }
        let is_full = before.is_none() && self.all.len() >= MAPPINGS_MAX;
        // Nothing could take the place of one of the last generation.
        let is_odd = new.addresses.is_empty()
            || new.addresses.len() > ADDRESSES_MAX
            || new.generation == u32::MAX;
        if is_void || is_full || is_odd || before.is_some_and(|before| before.beats(&new)) {
            return Merged::Refused;
        }
        Merged::New(self.all.insert(key, new))
    }

    /// Notes how often names were revoked. Returns the mappings that are void by that, which are removed.
    pub(super) fn set_epochs(&mut self, epochs: BTreeMap<String, u32>) -> Vec<Mapping> {
        self.epochs = epochs;
        let void: Vec<Key> =
            self.all.values().filter(|it| self.is_void(it)).map(Mapping::key).collect();
        void.iter().filter_map(|key| self.all.remove(key)).collect()
    }

    /// Some mappings, those after a key, and whether there are more.
    pub(super) fn page(&self, after: Option<&Key>) -> (Vec<Mapping>, bool) {
        let from = after.map_or(Bound::Unbounded, Bound::Excluded);
        let mut rest = self.all.range((from, Bound::Unbounded)).map(|(_, mapping)| mapping.clone());
        let page: Vec<Mapping> = rest.by_ref().take(MAPPINGS_PER_MESSAGE).collect();
        (page, rest.next().is_some())
    }

    fn is_void(&self, mapping: &Mapping) -> bool {
        self.epochs.get(&mapping.name).is_some_and(|epoch| *epoch > mapping.epoch)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn id(number: u8) -> PeerId {
        PeerId::from_bytes([number; 32])
    }

    fn key(name: &str) -> Key {
        ("weft".into(), name.into())
    }

    fn address(last: u8) -> Vec<IpAddr> {
        vec![IpAddr::from([10, 32, 0, last])]
    }

    #[test]
    fn of_two_mappings_the_earlier_stays_on_both_hosts() {
        let (mut one, mut two) = (Mappings::default(), Mappings::default());
        let first = one.give(key("alice"), address(1), (id(1), 10)).unwrap();
        let second = two.give(key("alice"), address(2), (id(2), 20)).unwrap();
        assert_eq!(one.merge(second.clone()), Merged::Refused);
        assert_eq!(two.merge(first.clone()), Merged::New(Some(second)));
        assert_eq!(two.merge(first), Merged::Known);
        assert!(one.get(&key("alice")) == two.get(&key("alice")));
        assert_eq!(one.give(key("alice"), address(1), (id(1), 30)), None, "it is known");
    }

    #[test]
    fn a_mapping_ends_with_a_revocation_and_the_next_one_beats_it() {
        let (mut one, mut two) = (Mappings::default(), Mappings::default());
        let first = one.give(key("alice"), address(1), (id(1), 10)).unwrap();
        two.merge(first.clone());
        let revoked = BTreeMap::from([("alice".to_owned(), 1)]);
        assert_eq!(one.set_epochs(revoked.clone()), std::slice::from_ref(&first));
        assert_eq!(one.merge(first.clone()), Merged::Refused, "a void one comes back");
        let next = one.give(key("alice"), address(3), (id(1), 40)).unwrap();
        // The other host has not heard of the revocation yet.
        assert_eq!(two.merge(next.clone()), Merged::New(Some(first)));
        assert_eq!(two.set_epochs(revoked), []);
        assert_eq!(two.get(&key("alice")), Some(&next));
    }

    #[test]
    fn a_mapping_in_the_place_of_a_departed_hosts_beats_it_everywhere() {
        let (mut one, mut two) = (Mappings::default(), Mappings::default());
        let old = one.give(key("alice"), address(1), (id(1), 10)).unwrap();
        two.merge(old.clone());
        let new = two.give(key("alice"), address(2), (id(2), 50)).unwrap();
        assert_eq!(one.merge(new.clone()), Merged::New(Some(old.clone())));
        assert_eq!(two.merge(old), Merged::Refused);
        // A revocation ends it as any other.
        assert_eq!(one.set_epochs(BTreeMap::from([("alice".to_owned(), 1)])), [new]);
    }

    #[test]
    fn all_mappings_come_in_pages_and_odd_ones_are_refused() {
        let mut all = Mappings::default();
        for number in 0..MAPPINGS_PER_MESSAGE + 3 {
            all.give(key(&format!("c{number:05}")), address(1), (id(1), 1));
        }
        let (first, more) = all.page(None);
        assert!(more && first.len() == MAPPINGS_PER_MESSAGE);
        let (rest, more) = all.page(Some(&first.last().unwrap().key()));
        assert!(!more && rest.len() == 3);
        let odd = Mapping { addresses: Vec::new(), name: "odd".into(), ..rest[0].clone() };
        assert_eq!(all.merge(odd), Merged::Refused);
        let last = Mapping { generation: u32::MAX, ..rest[0].clone() };
        assert_eq!(all.merge(last), Merged::Refused);
        assert_eq!(all.all().count(), MAPPINGS_PER_MESSAGE + 3);
    }
}
