//! Ranges of IPv4 addresses, and sets of them.

use std::fmt;
use std::net::Ipv4Addr;

use ipnet::Ipv4Net;
use serde::{Deserialize, Serialize};

/// A run of IPv4 addresses, both ends included.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct AddressRange {
    /// The lowest address.
    pub first: Ipv4Addr,
    /// The highest address; not below `first`.
    pub last: Ipv4Addr,
}

impl AddressRange {
    /// All addresses of a network, its network and broadcast address included.
    pub fn of_net(net: Ipv4Net) -> Self {
        Self { first: net.network(), last: net.broadcast() }
    }

    /// How many addresses it has.
    pub fn size(&self) -> u64 {
        (u64::from(u32::from(self.last)) + 1).saturating_sub(u64::from(u32::from(self.first)))
    }

    /// Whether the address is in it.
    pub fn contains(&self, address: Ipv4Addr) -> bool {
        self.first <= address && address <= self.last
    }

    /// The addresses that are in both ranges; `None` if there are none.
    pub fn intersection(&self, other: &Self) -> Option<Self> {
        let common = Self { first: self.first.max(other.first), last: self.last.min(other.last) };
        (common.first <= common.last).then_some(common)
    }

    /// The range of these numbers, which must be 32 bits wide and in order.
    fn from_numbers(first: u64, last: u64) -> Option<Self> {
        let (first, last) = (u32::try_from(first).ok()?, u32::try_from(last).ok()?);
        (first <= last).then(|| Self { first: first.into(), last: last.into() })
    }

    fn numbers(&self) -> (u64, u64) {
        (u64::from(u32::from(self.first)), u64::from(u32::from(self.last)))
    }

    /// Splits the range roughly in half: the cut is within an eighth of the middle, at the address that makes
    /// the rounder numbers. Returns the lower and the upper part; `None` for fewer than two addresses.
    pub fn halves(&self) -> Option<(Self, Self)> {
        let (first, last) = self.numbers();
        let size = self.size();
        if size < 2 {
            return None;
        }
        let low = first + (size * 3 / 8).max(1);
        let high = (first + size * 5 / 8).clamp(low, last);
        let cut = (0..32)
            .rev()
            .map(|bit| ((low + (1 << bit) - 1) >> bit) << bit)
            .find(|aligned| *aligned <= high)?;
        Some((Self::from_numbers(first, cut - 1)?, Self::from_numbers(cut, last)?))
    }
}

impl fmt::Display for AddressRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (first, size) = (u64::from(u32::from(self.first)), self.size());
        if size.is_power_of_two() && first % size == 0 {
            write!(f, "{}/{}", self.first, 32 - size.trailing_zeros())
        } else {
            write!(f, "{}-{}", self.first, self.last)
        }
    }
}

/// Disjoint ranges in ascending order, no two of which touch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct RangeSet(Vec<AddressRange>);

impl RangeSet {
    /// The union of some ranges that are disjoint; `None` if they overlap or one is upside down.
    pub(crate) fn disjoint(ranges: &[AddressRange]) -> Option<Self> {
        let mut sorted = ranges.to_vec();
        sorted.sort_unstable();
        let mut set = Vec::<AddressRange>::with_capacity(sorted.len());
        for range in sorted {
            if range.first > range.last {
                return None;
            }
            match set.last_mut() {
                Some(before) if before.last >= range.first => return None,
                Some(before) if before.numbers().1 + 1 == range.numbers().0 => {
                    before.last = range.last;
                }
                _ => set.push(range),
            }
        }
        Some(Self(set))
    }

    pub(crate) fn ranges(&self) -> &[AddressRange] {
        &self.0
    }

    /// How many addresses it has.
    pub(crate) fn size(&self) -> u64 {
        self.0.iter().map(AddressRange::size).sum()
    }

    pub(crate) fn contains(&self, address: Ipv4Addr) -> bool {
        let after = self.0.partition_point(|range| range.first <= address);
        after
            .checked_sub(1)
            .and_then(|index| self.0.get(index))
            .is_some_and(|r| r.contains(address))
    }

    pub(crate) fn overlaps(&self, other: &Self) -> bool {
        self.0.iter().any(|mine| other.0.iter().any(|theirs| mine.intersection(theirs).is_some()))
    }

    /// Whether all of it lies in a network.
    pub(crate) fn is_within(&self, net: Ipv4Net) -> bool {
        let whole = AddressRange::of_net(net);
        self.0.iter().all(|range| whole.contains(range.first) && whole.contains(range.last))
    }

    /// The part of it that lies in a network.
    pub(crate) fn within(&self, net: Ipv4Net) -> impl Iterator<Item = AddressRange> + '_ {
        let whole = AddressRange::of_net(net);
        self.0.iter().filter_map(move |range| range.intersection(&whole))
    }

    /// Adds ranges; `false`, and nothing changed, if one of them overlaps.
    pub(crate) fn add(&mut self, ranges: &[AddressRange]) -> bool {
        let all = [&self.0[..], ranges].concat();
        Self::disjoint(&all).map(|set| *self = set).is_some()
    }

    /// Takes a range away, as far as it is in the set.
    pub(crate) fn subtract(&mut self, away: AddressRange) {
        let (low, high) = away.numbers();
        let keep = |range: &AddressRange| {
            let (first, last) = range.numbers();
            let below = low.checked_sub(1).and_then(|end| {
                AddressRange::from_numbers(first, last.min(end)).filter(|_| first <= end)
            });
            [below, AddressRange::from_numbers(first.max(high + 1), last)].into_iter().flatten()
        };
        self.0 = self.0.iter().flat_map(keep).collect();
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use proptest::prelude::*;

    use super::*;

    fn range(first: u32, last: u32) -> AddressRange {
        AddressRange { first: first.into(), last: last.into() }
    }

    #[test]
    fn halves_of_a_network_are_networks() {
        let whole = AddressRange::of_net("10.32.0.0/12".parse().unwrap());
        let (low, high) = whole.halves().unwrap();
        assert_eq!(
            (low.to_string(), high.to_string()),
            ("10.32.0.0/13".into(), "10.40.0.0/13".into())
        );
        let used = AddressRange { first: "10.32.0.5".parse().unwrap(), last: whole.last };
        assert_eq!(used.halves().unwrap().1.to_string(), "10.40.0.0/13");
        assert_eq!(range(7, 7).halves(), None);
        assert_eq!(range(7, 8).halves(), Some((range(7, 7), range(8, 8))));
    }

    #[test]
    fn the_whole_of_ipv4_is_a_range_too() {
        let whole = range(0, u32::MAX);
        assert_eq!(whole.size(), 1 << 32);
        assert_eq!(whole.to_string(), "0.0.0.0/0");
        let (low, high) = whole.halves().unwrap();
        assert_eq!(low.size(), high.size());
        let mut set = RangeSet::disjoint(&[whole]).unwrap();
        set.subtract(high);
        assert_eq!(set.ranges(), [low]);
        set.subtract(range(0, 0));
        set.subtract(low);
        assert_eq!(set.ranges(), []);
    }

    proptest! {
        #[test]
        fn halves_cover_the_range_and_neither_is_small(first in any::<u32>(), size in 2_u64..1 << 32) {
            let last = (u64::from(first) + size - 1).min(u64::from(u32::MAX)) as u32;
            prop_assume!(last > first);
            let whole = range(first, last);
            let (low, high) = whole.halves().unwrap();
            prop_assert_eq!((low.first, high.last), (whole.first, whole.last));
            prop_assert_eq!(u32::from(low.last) + 1, u32::from(high.first));
            prop_assert!(low.size().min(high.size()) >= whole.size() * 3 / 8);
        }

        #[test]
        fn a_set_behaves_as_a_set_of_numbers(
            adds in prop::collection::vec((0_u32..64, 0_u32..8), 0..12),
            cuts in prop::collection::vec((0_u32..64, 0_u32..8), 0..12),
        ) {
            let mut set = RangeSet::default();
            let mut model = std::collections::BTreeSet::new();
            for (first, more) in adds {
                let free = (first..=first + more).all(|n| !model.contains(&n));
                prop_assert_eq!(set.add(&[range(first, first + more)]), free);
                if free {
                    model.extend(first..=first + more);
                }
            }
            for (first, more) in cuts {
                set.subtract(range(first, first + more));
                model.retain(|n| !(first..=first + more).contains(n));
            }
            prop_assert_eq!(set.size(), model.len() as u64);
            for n in 0..80 {
                prop_assert_eq!(set.contains(n.into()), model.contains(&n));
            }
        }
    }
}
