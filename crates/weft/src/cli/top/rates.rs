//! Rates from two readings of counters. A counter that is lower than before was reset meanwhile, so
//! its value counts as growth. A counter that was missing before has no rate yet.

use std::collections::BTreeMap;

use serde::Serialize;

use weft_api::{ContainerTraffic, LaneTraffic, PeerTraffic, Traffic, Volume, WorkerTraffic};

/// Rates between two readings: one line of `weft top --json`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Rates {
    /// Time between the readings, in milliseconds.
    pub(super) interval_ms: u64,
    pub(super) peers: Vec<PeerRates>,
    pub(super) containers: Vec<ContainerRates>,
    pub(super) workers: Vec<WorkerRates>,
    /// By reason; reasons without any drops are omitted.
    pub(super) drops: BTreeMap<String, Drops>,
}

/// Bits and packets per second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(super) struct VolumeRates {
    pub(super) received_bps: f64,
    pub(super) sent_bps: f64,
    pub(super) received_pps: f64,
    pub(super) sent_pps: f64,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct PeerRates {
    pub(super) peer: String,
    pub(super) nickname: Option<String>,
    pub(super) engine: Option<String>,
    #[serde(flatten)]
    pub(super) rates: VolumeRates,
    /// Refused datagrams of the peer, and unsent packets to it, per second.
    pub(super) dropped_pps: f64,
    /// The share of each lane of the vector engine.
    pub(super) lanes: Vec<LaneRates>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct LaneRates {
    pub(super) lane: u16,
    #[serde(flatten)]
    pub(super) rates: VolumeRates,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct ContainerRates {
    pub(super) id: String,
    pub(super) name: String,
    #[serde(flatten)]
    pub(super) rates: VolumeRates,
    /// Packets that the kernel dropped at the container's interface, per second.
    pub(super) dropped_pps: f64,
}

/// Per second.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct WorkerRates {
    pub(super) worker: usize,
    /// Share of the time that its thread worked, in percent.
    pub(super) busy_percent: f64,
    /// Share of the time that it polled with nothing to do, in percent.
    pub(super) awake_percent: f64,
    /// The same of its helpers' threads together: each may add up to 100.
    pub(super) helpers_busy_percent: f64,
    pub(super) datagrams_received_pps: f64,
    pub(super) datagrams_sent_pps: f64,
    pub(super) tap_reads_pps: f64,
    pub(super) tap_writes_pps: f64,
    pub(super) dropped_pps: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct Drops {
    /// Packets per second.
    pub(super) pps: f64,
    /// Packets since the daemon started.
    pub(super) total: u64,
}

impl Rates {
    /// The rates between an earlier and a later reading of one daemon.
    pub(super) fn between(before: &Traffic, now: &Traffic) -> Self {
        let interval_ms = now.monotonic_ms.saturating_sub(before.monotonic_ms);
        let per = PerSecond { interval_ms };
        let drops = now.drops.iter().filter(|(_, total)| **total > 0);
        Self {
            interval_ms,
            peers: now.peers.iter().map(|peer| per.peer(&before.peers, peer)).collect(),
            containers: {
                let containers = now.containers.iter();
                containers.map(|container| per.container(&before.containers, container)).collect()
            },
            workers: {
                let workers = now.workers.iter();
                workers.map(|worker| per.worker(&before.workers, worker)).collect()
            },
            drops: drops
                .map(|(name, total)| {
                    let pps = per.rate(before.drops.get(name).copied(), *total);
                    (name.clone(), Drops { pps, total: *total })
                })
                .collect(),
        }
    }
}

/// Divides by the elapsed time.
#[derive(Clone, Copy)]
struct PerSecond {
    interval_ms: u64,
}

impl PerSecond {
    /// Growth of a counter per second; 0 over no time.
    fn rate(self, before: Option<u64>, now: u64) -> f64 {
        let growth = before.map_or(0, |before| now.checked_sub(before).unwrap_or(now));
        if self.interval_ms == 0 { 0.0 } else { growth as f64 * 1_000.0 / self.interval_ms as f64 }
    }

    fn volume(self, before: Option<&Volume>, now: &Volume) -> VolumeRates {
        let rate = |of: fn(&Volume) -> u64| self.rate(before.map(of), of(now));
        VolumeRates {
            received_bps: rate(|volume| volume.bytes_received) * 8.0,
            sent_bps: rate(|volume| volume.bytes_sent) * 8.0,
            received_pps: rate(|volume| volume.packets_received),
            sent_pps: rate(|volume| volume.packets_sent),
        }
    }

    fn peer(self, before: &[PeerTraffic], now: &PeerTraffic) -> PeerRates {
        let before = before.iter().find(|before| before.peer == now.peer);
        let lanes = before.map_or(&[][..], |before| &before.lanes);
        PeerRates {
            peer: now.peer.clone(),
            nickname: now.nickname.clone(),
            engine: now.engine.clone(),
            rates: self.volume(before.map(|before| &before.volume), &now.volume),
            dropped_pps: self.rate(before.map(|before| before.dropped), now.dropped),
            lanes: now.lanes.iter().map(|lane| self.lane(lanes, lane)).collect(),
        }
    }

    fn lane(self, before: &[LaneTraffic], now: &LaneTraffic) -> LaneRates {
        let before = before.iter().find(|before| before.lane == now.lane);
        let rates = self.volume(before.map(|before| &before.volume), &now.volume);
        LaneRates { lane: now.lane, rates }
    }

    fn container(self, before: &[ContainerTraffic], now: &ContainerTraffic) -> ContainerRates {
        let before = before.iter().find(|before| before.id == now.id);
        ContainerRates {
            id: now.id.clone(),
            name: now.name.clone(),
            rates: self.volume(before.map(|before| &before.volume), &now.volume),
            dropped_pps: self.rate(before.map(|before| before.dropped), now.dropped),
        }
    }

    fn worker(self, before: &[WorkerTraffic], now: &WorkerTraffic) -> WorkerRates {
        let before = before.iter().find(|before| before.worker == now.worker);
        let rate = |of: fn(&WorkerTraffic) -> u64| self.rate(before.map(of), of(now));
        WorkerRates {
            worker: now.worker,
            // Microseconds in a second, as a share of it.
            busy_percent: rate(|worker| worker.busy_us) / 1e4,
            awake_percent: rate(|worker| worker.awake_us) / 1e4,
            helpers_busy_percent: rate(|worker| worker.helpers_busy_us) / 1e4,
            datagrams_received_pps: rate(|worker| worker.datagrams_received),
            datagrams_sent_pps: rate(|worker| worker.datagrams_sent),
            tap_reads_pps: rate(|worker| worker.tap_reads),
            tap_writes_pps: rate(|worker| worker.tap_writes),
            dropped_pps: rate(|worker| worker.dropped),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn traffic(monotonic_ms: u64, bytes: u64, packets: u64) -> Traffic {
        let volume = Volume {
            packets_received: packets,
            bytes_received: bytes,
            packets_sent: 2 * packets,
            bytes_sent: 2 * bytes,
        };
        Traffic {
            monotonic_ms,
            peers: vec![PeerTraffic {
                peer: "aa".into(),
                volume,
                dropped: packets,
                lanes: vec![LaneTraffic { lane: 0, volume }],
                ..PeerTraffic::default()
            }],
            containers: vec![ContainerTraffic {
                id: "netns:c1".into(),
                volume,
                dropped: packets,
                ..ContainerTraffic::default()
            }],
            workers: vec![WorkerTraffic {
                busy_us: 2_500 * packets,
                awake_us: 1_000 * packets,
                helpers_busy_us: 12_500 * packets,
                datagrams_sent: packets,
                dropped: packets,
                ..WorkerTraffic::default()
            }],
            drops: [("no_endpoint".into(), packets), ("forged".into(), 0)].into(),
        }
    }

    #[test]
    fn rates_are_over_the_time_that_passed() {
        let rates = Rates::between(&traffic(10_000, 1_000, 10), &traffic(10_500, 2_000, 60));
        assert_eq!(rates.interval_ms, 500);
        let wanted = VolumeRates {
            received_bps: 16_000.0,
            sent_bps: 32_000.0,
            received_pps: 100.0,
            sent_pps: 200.0,
        };
        assert_eq!((rates.peers[0].rates, rates.containers[0].rates), (wanted, wanted));
        assert_eq!(rates.peers[0].lanes, [LaneRates { lane: 0, rates: wanted }]);
        assert_eq!((rates.peers[0].dropped_pps, rates.containers[0].dropped_pps), (100.0, 100.0));
        let worker = &rates.workers[0];
        assert_eq!((worker.datagrams_sent_pps, worker.dropped_pps), (100.0, 100.0));
        assert_eq!((worker.busy_percent, worker.helpers_busy_percent), (25.0, 125.0));
        assert_eq!(worker.awake_percent, 10.0);
        assert_eq!((worker.datagrams_received_pps, worker.tap_reads_pps), (0.0, 0.0));
        assert_eq!(rates.drops.len(), 1, "only what was ever dropped");
        assert_eq!(rates.drops["no_endpoint"], Drops { pps: 100.0, total: 60 });
    }

    #[test]
    fn a_counter_that_began_anew_counts_from_zero() {
        let rates = Rates::between(&traffic(0, 1_000_000, 1_000_000), &traffic(1_000, 500, 5));
        assert_eq!(rates.peers[0].rates.received_bps, 4_000.0);
        assert_eq!(rates.drops["no_endpoint"], Drops { pps: 5.0, total: 5 });
    }

    #[test]
    fn a_new_peer_has_no_rate_yet_and_a_gone_one_no_line() {
        let (before, mut now) = (traffic(0, 100, 1), traffic(1_000, 200, 2));
        let mut lane = now.clone();
        lane.peers[0].lanes[0].lane = 1;
        let nothing_yet = LaneRates { lane: 1, rates: VolumeRates::default() };
        assert_eq!(Rates::between(&before, &lane).peers[0].lanes, [nothing_yet]);
        now.peers[0].peer = "bb".into();
        now.containers.clear();
        let rates = Rates::between(&before, &now);
        assert_eq!(rates.peers[0].rates, VolumeRates::default());
        assert_eq!(rates.containers, []);
        assert_eq!(rates.workers[0].dropped_pps, 1.0);
    }

    #[test]
    fn no_time_gives_no_rate_and_no_nonsense() {
        for now in [traffic(5, 9_000, 9), traffic(4, 9_000, 9)] {
            let rates = Rates::between(&traffic(5, 1, 1), &now);
            assert_eq!(rates.peers[0].rates, VolumeRates::default());
            assert_eq!(rates.drops["no_endpoint"].pps, 0.0);
        }
    }
}
