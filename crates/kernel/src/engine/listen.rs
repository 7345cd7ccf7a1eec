//! Compares the packets that silent peers' SAs open with the probes that arrive.

use std::time::{Duration, Instant};

use weft_crypto::PeerId;
use weft_path::{EngineEvent, PathId};

use super::unheard::{Deaf, Reading, added_up};
use super::worker::Worker;
use crate::xfrm::StateId;

/// Interval of checks of silent peers' SAs, in milliseconds.
const LISTEN_MS: u64 = 3_000;

impl Worker {
    pub(super) fn listening_due(&self) -> Option<Instant> {
        let due = self.unheard.next.unwrap_or(self.next_reading);
        self.ipsec.is_some().then_some(due)
    }

    /// Compares the packets that silent peers' SAs have opened with the probes received from these peers.
    pub(super) async fn listen(&mut self) {
        let now = Instant::now();
        self.unheard.next = Some(now + Duration::from_millis(LISTEN_MS));
        let channel = self.state.channel.received();
        let mut readings: Vec<Reading> =
            channel.map(|(peer, path, packets)| Reading { peer, path, packets }).collect();
        let of_channel = readings.iter().map(|reading| (reading.path, reading.peer));
        let paths = self.state.inbound().map(|(peer, path, _)| (path, peer));
        self.unheard.retain(now, &paths.chain(of_channel).collect());
        let asked = self.unheard.turn(now, self.state.inbound());
        readings.extend(self.opened(&asked).await);
        for Deaf { path, peer, is_news } in self.unheard.note(now, &readings) {
            self.counters.paths_unheard += u64::from(is_news);
            (self.events)(EngineEvent::Unheard { peer, path });
        }
    }

    /// The number of packets that each path's SAs have opened together. Leaves out paths that the kernel does
    /// not report.
    async fn opened(&self, asked: &[(PeerId, PathId, StateId)]) -> Vec<Reading> {
        let Some(ipsec) = self.ipsec.as_ref().filter(|_| !asked.is_empty()) else {
            return Vec::new();
        };
        let ids: Vec<StateId> = asked.iter().map(|(.., id)| *id).collect();
        let usages = ipsec.xfrm.usage(&ids).await.into_iter();
        // An SA that is gone has opened nothing.
        added_up(asked, usages.map(|it| Some(it.ok()?.map_or(0, |usage| usage.packets))))
    }
}
