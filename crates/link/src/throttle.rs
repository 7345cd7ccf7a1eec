//! Who may try a password when: few failures a minute per source, then delay, never lock-out; and
//! how many connections may be in admission at once.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::limits::{
    FAILURE_DELAY_MAX_S, FAILURE_SOURCES_MAX, FAILURES_PER_MINUTE_MAX, UNADMITTED_BEFORE_RETRY_MAX,
    UNADMITTED_MAX, UNADMITTED_PER_SOURCE_MAX,
};

/// An IPv4 address, or the /64 of an IPv6 address.
pub(crate) fn source_of(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(v6) => Ipv6Addr::from_bits(v6.to_bits() & (u128::MAX << 64)).into(),
        v4 => v4,
    }
}

/// The time between two attempts of a source that has used up its free ones.
const INTERVAL: Duration = Duration::from_millis(60_000 / FAILURES_PER_MINUTE_MAX as u64);

/// Failures by source, each source as the time at which its last attempt is paid off.
#[derive(Default)]
pub(crate) struct Throttle {
    paid_off: HashMap<IpAddr, Instant>,
}

impl Throttle {
    /// Books an attempt: how long its answer must wait, or `None` if too many wait already. Every
    /// attempt counts as a failure until [`Self::succeeded`].
    pub(crate) fn attempt(&mut self, address: IpAddr, now: Instant) -> Option<Duration> {
        let source = source_of(address);
        self.make_room(source, now);
        let paid_off = self.paid_off.get(&source).map_or(now, |at| (*at).max(now)) + INTERVAL;
        let delay = (paid_off - now).saturating_sub(INTERVAL * FAILURES_PER_MINUTE_MAX);
        if delay > Duration::from_secs(FAILURE_DELAY_MAX_S) {
            return None;
        }
        self.paid_off.insert(source, paid_off);
        Some(delay)
    }

    /// An attempt was none to guess.
    pub(crate) fn succeeded(&mut self, address: IpAddr) {
        if let Some(at) = self.paid_off.get_mut(&source_of(address)) {
            *at = at.checked_sub(INTERVAL).unwrap_or(*at);
        }
    }

    fn make_room(&mut self, source: IpAddr, now: Instant) {
        if self.paid_off.len() < FAILURE_SOURCES_MAX || self.paid_off.contains_key(&source) {
            return;
        }
        self.paid_off.retain(|_, at| *at > now);
        if self.paid_off.len() >= FAILURE_SOURCES_MAX {
            let oldest = self.paid_off.iter().min_by_key(|(_, at)| **at).map(|(source, _)| *source);
            oldest.map(|source| self.paid_off.remove(&source));
        }
    }
}

/// Counts the connections in admission.
#[derive(Default)]
pub(crate) struct Gate {
    inside: Mutex<HashMap<IpAddr, usize>>,
}

/// What to do with an incoming connection.
pub(crate) enum Entry {
    /// Serve it; the place is free again when the pass is dropped.
    Pass(Pass),
    /// Let the source show first that it owns its address.
    Retry,
    /// No place.
    Full,
}

impl Gate {
    pub(crate) fn enter(self: &Arc<Self>, address: IpAddr, validated: bool) -> Entry {
        let source = source_of(address);
        let mut inside = self.inside.lock().unwrap_or_else(PoisonError::into_inner);
        let total: usize = inside.values().sum();
        if total >= UNADMITTED_BEFORE_RETRY_MAX && !validated {
            return Entry::Retry;
        }
        let count = inside.get(&source).copied().unwrap_or(0);
        if total >= UNADMITTED_MAX || count >= UNADMITTED_PER_SOURCE_MAX {
            return Entry::Full;
        }
        inside.insert(source, count + 1);
        Entry::Pass(Pass { gate: self.clone(), source })
    }
}

/// A place in admission.
pub(crate) struct Pass {
    gate: Arc<Gate>,
    source: IpAddr,
}

impl Drop for Pass {
    fn drop(&mut self) {
        let mut inside = self.gate.inside.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = inside.get_mut(&self.source) {
            *count -= 1;
            if *count == 0 {
                inside.remove(&self.source);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn v4(last: u8) -> IpAddr {
        [192, 0, 2, last].into()
    }

    #[test]
    fn five_failures_are_answered_at_once_then_one_each_twelve_seconds() {
        let now = Instant::now();
        let mut throttle = Throttle::default();
        for _ in 0..5 {
            assert_eq!(throttle.attempt(v4(1), now), Some(Duration::ZERO));
        }
        for step in 1..=4 {
            assert_eq!(throttle.attempt(v4(1), now), Some(INTERVAL * step));
        }
        assert_eq!(throttle.attempt(v4(1), now), None, "too many wait");
        assert_eq!(throttle.attempt(v4(2), now), Some(Duration::ZERO), "others do not");
        let mapped: IpAddr = "::ffff:192.0.2.1".parse().unwrap();
        assert_eq!(throttle.attempt(mapped, now), None, "the same source");
        let later = now + Duration::from_secs(180);
        assert_eq!(throttle.attempt(v4(1), later), Some(Duration::ZERO), "never locked out");
    }

    #[test]
    fn successes_cost_nothing() {
        let now = Instant::now();
        let mut throttle = Throttle::default();
        for _ in 0..1000 {
            assert_eq!(throttle.attempt(v4(1), now), Some(Duration::ZERO));
            throttle.succeeded(v4(1));
        }
    }

    #[test]
    fn an_ipv6_source_is_its_64() {
        let now = Instant::now();
        let mut throttle = Throttle::default();
        let address = |text: &str| text.parse::<IpAddr>().unwrap();
        for low in 0..5 {
            throttle.attempt(address(&format!("2001:db8::{low}")), now);
        }
        assert_eq!(throttle.attempt(address("2001:db8::ffff"), now), Some(INTERVAL));
        assert_eq!(throttle.attempt(address("2001:db8:0:1::1"), now), Some(Duration::ZERO));
    }

    #[test]
    fn the_table_of_sources_is_bounded() {
        let now = Instant::now();
        let mut throttle = Throttle::default();
        for source in 0..3 * FAILURE_SOURCES_MAX as u32 {
            assert_eq!(
                throttle.attempt(IpAddr::V4(source.into()), now),
                Some(Duration::ZERO),
                "{source}"
            );
        }
        assert_eq!(throttle.paid_off.len(), FAILURE_SOURCES_MAX);
    }

    #[test]
    fn one_source_cannot_take_every_place_and_under_load_addresses_are_validated() {
        let gate = Arc::new(Gate::default());
        let mut passes = Vec::new();
        for _ in 0..UNADMITTED_PER_SOURCE_MAX {
            let Entry::Pass(pass) = gate.enter(v4(1), false) else { panic!("refused") };
            passes.push(pass);
        }
        assert!(matches!(gate.enter(v4(1), true), Entry::Full));
        for source in 2.. {
            match gate.enter(v4(source), false) {
                Entry::Pass(pass) => passes.push(pass),
                Entry::Retry => break,
                Entry::Full => panic!("full before a retry"),
            }
        }
        assert_eq!(passes.len(), UNADMITTED_BEFORE_RETRY_MAX);
        let mut source = 100;
        while let Entry::Pass(pass) = gate.enter(v4(source), true) {
            passes.push(pass);
            source += 1;
        }
        assert_eq!(passes.len(), UNADMITTED_MAX);
        drop(passes);
        assert!(gate.inside.lock().unwrap().is_empty());
        assert!(matches!(gate.enter(v4(1), false), Entry::Pass(_)));
    }
}
