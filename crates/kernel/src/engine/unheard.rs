//! Detects that packets opened by the kernel do not reach the engine.
//!
//! After the kernel has opened a packet, the host's input rules apply to it once more. A firewall there drops
//! it silently, and the peer's probes go unanswered as if the network had dropped them. This host can tell
//! the two apart: its SAs have opened packets, but no probe arrived.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use weft_crypto::PeerId;
use weft_path::PathId;

/// A peer is silent if none of its probes arrived for this many milliseconds; a standby path sends one every
/// ten seconds.
const SILENT_MS: u64 = 12_000;
/// The most SAs to read at once; further ones are read in later turns.
const READ_MAX: usize = 256;

/// When each peer was last heard, and how many packets its SAs opened meanwhile.
#[derive(Default)]
pub(super) struct Unheard {
    pub(super) next: Option<Instant>,
    /// When each peer's last probe came.
    heard: BTreeMap<PeerId, Instant>,
    /// Paths of silent peers.
    silent: BTreeMap<PathId, Opened>,
    /// The path that was read last.
    last: Option<PathId>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Opened {
    packets: u64,
    /// It opened some before the last look. Its probe may just have been on its way to the engine.
    grew: bool,
    told: bool,
}

/// The number of packets that all SAs of a path have opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Reading {
    pub(super) peer: PeerId,
    pub(super) path: PathId,
    pub(super) packets: u64,
}

/// A path whose packets are opened but never reach the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Deaf {
    pub(super) path: PathId,
    pub(super) peer: PeerId,
    /// It was not the last time.
    pub(super) is_news: bool,
}

impl Unheard {
    pub(super) fn hear(&mut self, now: Instant, peer: PeerId) {
        self.heard.insert(peer, now);
    }

    fn is_silent(&self, now: Instant, peer: &PeerId) -> bool {
        let silent = |heard: &Instant| now >= *heard + Duration::from_millis(SILENT_MS);
        self.heard.get(peer).is_none_or(silent)
    }

    /// Selects the paths to read now: those of silent peers, in turn, that have at most [`READ_MAX`] SAs
    /// together.
    pub(super) fn turn<T>(
        &mut self,
        now: Instant,
        paths: impl Iterator<Item = (PeerId, PathId, T)>,
    ) -> Vec<(PeerId, PathId, T)> {
        let mut asked: Vec<_> = paths.filter(|(peer, ..)| self.is_silent(now, peer)).collect();
        asked.sort_by_key(|(_, path, _)| *path);
        if asked.len() > READ_MAX {
            let after = |last: PathId| asked.partition_point(|(_, path, _)| *path <= last);
            let first = self.last.map_or(0, after);
            asked.rotate_left(first);
            // All of a path's SAs, or none: they are added up.
            let cut = asked[READ_MAX].1;
            let whole = asked[..READ_MAX].iter().rposition(|(_, path, _)| *path != cut);
            asked.truncate(whole.map_or(READ_MAX, |last| last + 1));
        }
        self.last = asked.last().map(|(_, path, _)| *path);
        asked
    }

    /// Takes readings of silent peers' paths, and returns the paths that still open packets.
    pub(super) fn note(&mut self, now: Instant, readings: &[Reading]) -> Vec<Deaf> {
        let mut deaf = Vec::new();
        for &Reading { peer, path, packets } in readings {
            if !self.is_silent(now, &peer) {
                self.silent.remove(&path);
                continue;
            }
            // For a peer that was heard before, the earlier count proves nothing.
            let heard = self.heard.contains_key(&peer);
            let before = if heard { packets } else { 0 };
            let new = Opened { packets: before, ..Opened::default() };
            let it = self.silent.entry(path).or_insert(new);
            if std::mem::replace(&mut it.grew, packets > it.packets) {
                let is_news = !std::mem::replace(&mut it.told, true);
                deaf.push(Deaf { path, peer, is_news });
            }
            it.packets = packets;
        }
        deaf
    }

    /// Forgets paths that are gone and peers that were heard again.
    pub(super) fn retain(&mut self, now: Instant, paths: &BTreeMap<PathId, PeerId>) {
        self.heard.retain(|peer, _| paths.values().any(|of| of == peer));
        let silent: Vec<PathId> = self
            .silent
            .keys()
            .filter(|path| paths.get(path).is_some_and(|peer| self.is_silent(now, peer)))
            .copied()
            .collect();
        self.silent.retain(|path, _| silent.binary_search(path).is_ok());
    }
}

/// Sums the counts of paths all of whose SAs were read. An unread SA counted as 0 would make the next reading
/// look like new packets.
pub(super) fn added_up<T>(
    asked: &[(PeerId, PathId, T)],
    counts: impl Iterator<Item = Option<u64>>,
) -> Vec<Reading> {
    let mut sums: BTreeMap<PathId, (PeerId, Option<u64>)> = BTreeMap::new();
    for ((peer, path, _), count) in asked.iter().zip(counts) {
        let (_, sum) = sums.entry(*path).or_insert((*peer, Some(0)));
        *sum = sum.zip(count).map(|(sum, count)| sum + count);
    }
    let reading = |(path, (peer, sum)): (PathId, (PeerId, Option<u64>))| {
        Some(Reading { peer, path, packets: sum? })
    };
    sums.into_iter().filter_map(reading).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PEER: PeerId = PeerId::from_bytes([9; 32]);
    const PATH: PathId = PathId(1);
    const NONE: [bool; 0] = [];

    fn s(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn note(it: &mut Unheard, now: Instant, packets: u64) -> Vec<bool> {
        let deaf = it.note(now, &[Reading { peer: PEER, path: PATH, packets }]);
        deaf.into_iter().map(|deaf| deaf.is_news).collect()
    }

    #[test]
    fn packets_without_a_probe_are_told_once_the_probe_would_have_come() {
        let (mut it, now) = (Unheard::default(), Instant::now());
        assert_eq!(note(&mut it, now, 0), NONE);
        assert_eq!(note(&mut it, now + s(3), 4), NONE, "the probe may be on its way to the engine");
        assert_eq!(note(&mut it, now + s(6), 4), [true]);
        assert_eq!(note(&mut it, now + s(9), 4), NONE, "nothing comes: the network may be down");
        assert_eq!(note(&mut it, now + s(12), 6), NONE);
        assert_eq!(note(&mut it, now + s(15), 6), [false]);
        it.hear(now + s(16), PEER);
        assert_eq!(note(&mut it, now + s(18), 9), NONE);
        assert_eq!(note(&mut it, now + s(21), 12), NONE);
    }

    #[test]
    fn a_peer_that_falls_silent_is_judged_by_what_comes_afterwards() {
        let (mut it, now) = (Unheard::default(), Instant::now());
        it.hear(now, PEER);
        assert_eq!(note(&mut it, now + s(11), 500), NONE);
        assert_eq!(note(&mut it, now + s(12), 500), NONE);
        assert_eq!(note(&mut it, now + s(15), 500), NONE, "the network is down");
        assert_eq!(note(&mut it, now + s(18), 502), NONE);
        assert_eq!(note(&mut it, now + s(21), 502), [true]);
        // A rekey: the SAs that counted are gone.
        assert_eq!(note(&mut it, now + s(24), 0), NONE);
        assert_eq!(note(&mut it, now + s(27), 2), NONE);
        assert_eq!(note(&mut it, now + s(30), 2), [false]);
        it.retain(now, &BTreeMap::new());
        assert!(it.heard.is_empty() && it.silent.is_empty());
    }

    #[test]
    fn of_many_paths_each_has_its_turn_whole() {
        let (mut it, now) = (Unheard::default(), Instant::now());
        let all = || (0..200).flat_map(|path| (0..3).map(move |sa| (PEER, PathId(path), sa)));
        let mut seen = BTreeMap::<PathId, usize>::new();
        for _ in 0..3 {
            let turn = it.turn(now, all());
            assert!(turn.len() <= READ_MAX && turn.len() % 3 == 0, "{}", turn.len());
            turn.into_iter().for_each(|(_, path, _)| *seen.entry(path).or_default() += 1);
        }
        assert!(seen.len() == 200 && seen.values().all(|count| count % 3 == 0));
        it.hear(now, PEER);
        assert!(it.turn(now, all()).is_empty(), "one that is heard is not looked at");
    }

    #[test]
    fn a_path_of_which_an_sa_was_not_read_is_not_judged() {
        let asked = [(PEER, PATH, 0), (PEER, PATH, 1), (PEER, PathId(2), 2), (PEER, PathId(3), 3)];
        let read = |counts: [Option<u64>; 4]| -> Vec<(PathId, u64)> {
            let readings = added_up(&asked, counts.into_iter());
            readings.into_iter().map(|it| (it.path, it.packets)).collect()
        };
        let rest = [(PathId(2), 5), (PathId(3), 0)];
        assert_eq!(read([Some(1), Some(2), Some(5), Some(0)]), [(PATH, 3), rest[0], rest[1]]);
        assert_eq!(read([Some(1), None, Some(5), Some(0)]), rest);
        assert_eq!(read([None, Some(2), Some(5), Some(0)]), rest);
    }
}
