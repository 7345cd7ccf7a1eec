//! The ranges of a network that other hosts own, as they or others told.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;

use weft_crypto::PeerId;

use crate::message::{NetworkId, RangeAnnouncement};
use crate::range::RangeSet;

/// The last announcement of each other host, with its ranges in order.
#[derive(Debug, Default)]
pub(crate) struct Announced {
    all: BTreeMap<PeerId, (RangeAnnouncement, RangeSet)>,
    weight: usize,
}

impl Announced {
    /// What an announcement counts against [`crate::limits::ANNOUNCED_RANGES_MAX`]: its ranges, and one for itself.
    pub(crate) fn weight_of(announcement: &RangeAnnouncement) -> usize {
        1 + announcement.ranges.len()
    }

    /// What all of it counts.
    pub(crate) const fn weight(&self) -> usize {
        self.weight
    }

    pub(crate) fn len(&self) -> usize {
        self.all.len()
    }

    pub(crate) fn get(&self, owner: PeerId) -> Option<&RangeAnnouncement> {
        self.all.get(&owner).map(|(announcement, _)| announcement)
    }

    pub(crate) fn announcements(&self) -> impl Iterator<Item = &RangeAnnouncement> {
        self.all.values().map(|(announcement, _)| announcement)
    }

    pub(crate) fn ranges(&self) -> impl Iterator<Item = (PeerId, &RangeSet)> {
        self.all.iter().map(|(owner, (_, ranges))| (*owner, ranges))
    }

    /// How many addresses a host's ranges have.
    pub(crate) fn size_of(&self, owner: PeerId) -> u64 {
        self.all.get(&owner).map_or(0, |(_, ranges)| ranges.size())
    }

    /// The hosts that own an address.
    pub(crate) fn owners_of(&self, address: Ipv4Addr) -> impl Iterator<Item = PeerId> {
        self.ranges().filter(move |(_, ranges)| ranges.contains(address)).map(|(owner, _)| owner)
    }

    /// Keeps an announcement in place of its owner's last one. `ranges` are those of the announcement.
    pub(crate) fn insert(&mut self, announcement: RangeAnnouncement, ranges: RangeSet) {
        self.weight += Self::weight_of(&announcement);
        let before = self.all.insert(announcement.owner, (announcement, ranges));
        self.weight -= before.map_or(0, |(before, _)| Self::weight_of(&before));
    }

    /// Forgets the ranges of other foundings.
    pub(crate) fn retain_founding(&mut self, founding: NetworkId) {
        self.all.retain(|_, (announcement, _)| announcement.network == founding);
        self.weight = self.announcements().map(Self::weight_of).sum();
    }
}
