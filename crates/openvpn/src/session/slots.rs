//! Which key is in which of the device's two slots, and when that changes.
//!
//! A new key is received at once, but seals only when it has settled: until then the peer may not have it. So it goes
//! to the secondary slot first, and the slots are exchanged later. The old key is received until its end.

use std::collections::VecDeque;
use std::time::Instant;

use super::event::{DataKeys, Event};
use crate::device::Slot;

/// The slots.
#[derive(Debug, Default)]
pub(super) struct Slots {
    has_primary: bool,
    /// When the key in the secondary slot has settled; `None`: it is an old one, or there is none.
    swaps_at: Option<Instant>,
    /// When the old key ends.
    removes_at: Option<Instant>,
    /// When the key that seals now ends, once the next one has taken its place.
    old_ends_at: Option<Instant>,
}

impl Slots {
    /// A new key, which settles at `settles_at`; the one before it ends at `old_ends_at`.
    pub(super) fn install(
        &mut self,
        keys: DataKeys,
        settles_at: Instant,
        old_ends_at: Instant,
        events: &mut VecDeque<Event>,
    ) {
        let keys = Box::new(keys);
        if !self.has_primary {
            self.has_primary = true;
            events.push_back(Event::InstallKey(Slot::Primary, keys));
            return;
        }
        events.push_back(Event::InstallKey(Slot::Secondary, keys));
        self.swaps_at = Some(settles_at);
        self.old_ends_at = Some(old_ends_at);
        self.removes_at = None;
    }

    /// The key in the secondary slot seals from now on, if it has not settled yet.
    pub(super) fn settle(&mut self, events: &mut VecDeque<Event>) {
        if self.swaps_at.take().is_some() {
            events.push_back(Event::SwapKeys);
            self.removes_at = self.old_ends_at.take();
        }
    }

    pub(super) fn handle_timeout(&mut self, now: Instant, events: &mut VecDeque<Event>) {
        if self.swaps_at.is_some_and(|at| at <= now) {
            self.settle(events);
        }
        if self.removes_at.take_if(|at| *at <= now).is_some() {
            events.push_back(Event::RemoveSecondaryKey);
        }
    }

    pub(super) fn poll_timeout(&self) -> Option<Instant> {
        [self.swaps_at, self.removes_at].into_iter().flatten().min()
    }
}
