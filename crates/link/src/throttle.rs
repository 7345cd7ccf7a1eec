//! Rate limit for password attempts: few failures a minute per source and per network, then delay, never
//! lock-out.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::Notify;
use weft_crypto::PeerId;

use crate::limits::{
    FAILURE_DELAY_MAX_S, FAILURE_SOURCES_MAX, FAILURES_IN_ALL_PER_MINUTE_MAX,
    FAILURES_PER_MINUTE_MAX, FAILURES_PER_PROVIDER_PER_MINUTE_MAX,
    FAILURES_PER_SITE_PER_MINUTE_MAX, WAITING_MAX,
};
use crate::source::{Network, networks_of};

/// The party whose failures are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Payer {
    /// A known peer that has shown its key: attempts by others from its address do not count against it.
    Peer(PeerId),
    Network(Network),
}

impl Payer {
    /// Failures a minute, which is also the burst limit.
    fn rate(self) -> u32 {
        match self {
            Self::Peer(_) | Self::Network(Network::Host(_)) => FAILURES_PER_MINUTE_MAX,
            Self::Network(Network::Site(_)) => FAILURES_PER_SITE_PER_MINUTE_MAX,
            Self::Network(Network::Provider(_)) => FAILURES_PER_PROVIDER_PER_MINUTE_MAX,
            Self::Network(Network::All) => FAILURES_IN_ALL_PER_MINUTE_MAX,
        }
    }

    /// The interval between two attempts once the burst is used up.
    fn interval(self) -> Duration {
        Duration::from_secs(60) / self.rate()
    }
}

/// The debt of one payer.
struct Account {
    /// When its last attempt is paid off.
    paid_off: Instant,
    /// Attempts that were taken back: waiting ones move up.
    taken_back: u32,
}

/// Failures by payer.
#[derive(Default)]
pub(crate) struct Throttle {
    accounts: HashMap<Payer, Account>,
    /// Attempts that wait for their turn.
    waiting: usize,
    /// Notified when an attempt was taken back.
    turns: Arc<Notify>,
}

/// A booked attempt: each payer, the time of its turn, and its count of attempts taken back.
pub(crate) struct Booking(Vec<(Payer, Instant, u32)>);

impl Throttle {
    /// Books an attempt of a known peer, or of an address; `None` if too many wait already. Every attempt
    /// counts as a failure until [`Self::take_back`].
    pub(crate) fn attempt(
        &mut self,
        known: Option<PeerId>,
        address: IpAddr,
        now: Instant,
    ) -> Option<Booking> {
        let payers = match known {
            Some(peer) => vec![Payer::Peer(peer)],
            None => networks_of(address).into_iter().map(Payer::Network).collect(),
        };
        let mut booked = Vec::new();
        for payer in payers {
            let account = self.accounts.get(&payer);
            let owed = account.map_or(now, |account| account.paid_off.max(now));
            let free = payer.interval() * (payer.rate() - 1);
            let turn = owed.checked_sub(free).unwrap_or(now).max(now);
            booked.push((payer, turn, account.map_or(0, |account| account.taken_back)));
        }
        let latest = booked.iter().map(|(_, turn, _)| *turn).max()?;
        let too_late = latest - now > Duration::from_secs(FAILURE_DELAY_MAX_S);
        if too_late || (latest > now && self.waiting >= WAITING_MAX) {
            return None;
        }
        for (payer, ..) in &booked {
            self.make_room(*payer, now);
            let account = self.accounts.entry(*payer);
            let account = account.or_insert(Account { paid_off: now, taken_back: 0 });
            account.paid_off = account.paid_off.max(now) + payer.interval();
        }
        Some(Booking(booked))
    }

    /// The remaining wait of an attempt.
    pub(crate) fn delay(&self, booking: &Booking, now: Instant) -> Duration {
        let wait = |(payer, turn, before): &(Payer, Instant, u32)| {
            let account = self.accounts.get(payer)?;
            let sooner = payer.interval() * account.taken_back.saturating_sub(*before);
            Some(turn.saturating_duration_since(now).saturating_sub(sooner))
        };
        booking.0.iter().filter_map(wait).max().unwrap_or_default()
    }

    /// Refunds an attempt that was not a wrong guess, or never had its turn.
    pub(crate) fn take_back(&mut self, booking: &Booking) {
        for (payer, ..) in &booking.0 {
            if let Some(account) = self.accounts.get_mut(payer) {
                account.paid_off =
                    account.paid_off.checked_sub(payer.interval()).unwrap_or(account.paid_off);
                account.taken_back = account.taken_back.saturating_add(1);
            }
        }
        self.turns.notify_waiters();
    }

    /// Registers a waiting attempt. Returns the notification to check its turn again.
    pub(crate) fn wait(&mut self) -> Arc<Notify> {
        self.waiting += 1;
        self.turns.clone()
    }

    /// The attempt no longer waits.
    pub(crate) fn waited(&mut self) {
        self.waiting -= 1;
    }

    fn make_room(&mut self, payer: Payer, now: Instant) {
        if self.accounts.len() < FAILURE_SOURCES_MAX || self.accounts.contains_key(&payer) {
            return;
        }
        self.accounts.retain(|_, account| account.paid_off > now);
        if self.accounts.len() >= FAILURE_SOURCES_MAX {
            let all = Payer::Network(Network::All);
            let others = self.accounts.iter().filter(|(payer, _)| **payer != all);
            let oldest =
                others.min_by_key(|(_, account)| account.paid_off).map(|(payer, _)| *payer);
            oldest.map(|payer| self.accounts.remove(&payer));
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    /// The interval between two attempts of one source.
    const INTERVAL: Duration = Duration::from_millis(60_000 / FAILURES_PER_MINUTE_MAX as u64);

    fn v4(last: u8) -> IpAddr {
        [192, 0, 2, last].into()
    }

    fn at(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    impl Throttle {
        fn try_at(&mut self, address: IpAddr, now: Instant) -> Option<Duration> {
            let booking = self.attempt(None, address, now)?;
            Some(self.delay(&booking, now))
        }
    }

    #[test]
    fn five_failures_are_answered_at_once_then_one_each_twelve_seconds() {
        let now = Instant::now();
        let mut throttle = Throttle::default();
        for _ in 0..5 {
            assert_eq!(throttle.try_at(v4(1), now), Some(Duration::ZERO));
        }
        for step in 1..=4 {
            assert_eq!(throttle.try_at(v4(1), now), Some(INTERVAL * step));
        }
        assert_eq!(throttle.try_at(v4(1), now), None, "too many wait");
        assert_eq!(throttle.try_at(v4(2), now), Some(Duration::ZERO), "others do not");
        assert_eq!(throttle.try_at(at("::ffff:192.0.2.1"), now), None, "the same source");
        let later = now + Duration::from_secs(180);
        assert_eq!(throttle.try_at(v4(1), later), Some(Duration::ZERO), "never locked out");
    }

    #[test]
    fn successes_cost_nothing() {
        let now = Instant::now();
        let mut throttle = Throttle::default();
        for _ in 0..1000 {
            let booking = throttle.attempt(None, v4(1), now).unwrap();
            assert_eq!(throttle.delay(&booking, now), Duration::ZERO);
            throttle.take_back(&booking);
        }
    }

    #[test]
    fn neighbours_at_one_address_that_succeed_do_not_wait_for_each_other() {
        let now = Instant::now();
        let mut throttle = Throttle::default();
        let bookings: Vec<_> =
            (0..9).map(|_| throttle.attempt(None, v4(1), now).unwrap()).collect();
        assert_eq!(throttle.delay(&bookings[8], now), INTERVAL * 4);
        for (done, booking) in bookings.iter().enumerate().take(4) {
            throttle.take_back(booking);
            assert_eq!(throttle.delay(&bookings[8], now), INTERVAL * (3 - done as u32));
        }
    }

    #[test]
    fn a_guesser_gains_little_by_many_addresses() {
        let now = Instant::now();
        let guesses = |address: &dyn Fn(u32) -> String| {
            let mut throttle = Throttle::default();
            let at_once = |number: &u32| {
                throttle.try_at(at(&address(*number)), now).is_some_and(|delay| delay.is_zero())
            };
            (0..5_000).filter(at_once).count()
        };
        let limits = [
            FAILURES_PER_MINUTE_MAX,
            FAILURES_PER_SITE_PER_MINUTE_MAX,
            FAILURES_PER_PROVIDER_PER_MINUTE_MAX,
            FAILURES_IN_ALL_PER_MINUTE_MAX,
        ];
        let found = [
            guesses(&|n| format!("2001:db8::{n:x}")),
            guesses(&|n| format!("2001:db8:0:{:x}::1", n % 256)),
            guesses(&|n| format!("2001:db8:0:{:x}::1", n % 256 * 256)),
            guesses(&|n| format!("2001:db8:{n:x}::1")),
        ];
        assert_eq!(found, limits.map(|limit| limit as usize));
        let limits = [limits[0], limits[2], limits[3]];
        let found = [
            guesses(&|_| "192.0.2.1".into()),
            guesses(&|n| format!("192.0.2.{}", n % 256)),
            guesses(&|n| format!("10.{}.{}.1", n / 256, n % 256)),
        ];
        assert_eq!(found, limits.map(|limit| limit as usize));
    }

    #[test]
    fn a_known_peer_does_not_pay_for_what_others_try() {
        let now = Instant::now();
        let mut throttle = Throttle::default();
        while throttle.try_at(v4(1), now).is_some() {}
        let peer = PeerId::of_public_key(&[7; 32]);
        for _ in 0..FAILURES_PER_MINUTE_MAX {
            let booking = throttle.attempt(Some(peer), v4(1), now).unwrap();
            assert_eq!(throttle.delay(&booking, now), Duration::ZERO);
        }
        let booking = throttle.attempt(Some(peer), v4(1), now).unwrap();
        assert_eq!(throttle.delay(&booking, now), INTERVAL, "but for its own");
    }

    #[test]
    fn few_wait_at_a_time() {
        let now = Instant::now();
        let mut throttle = Throttle::default();
        let mut waiting = 0;
        for source in 0..5_000_u32 {
            let Some(booking) = throttle.attempt(None, IpAddr::V4((source << 8).into()), now)
            else {
                continue;
            };
            if !throttle.delay(&booking, now).is_zero() {
                throttle.wait();
                waiting += 1;
            }
        }
        assert_eq!(waiting, WAITING_MAX);
    }

    #[test]
    fn the_table_of_sources_is_bounded() {
        let mut now = Instant::now();
        let mut throttle = Throttle::default();
        for source in 0..3 * FAILURE_SOURCES_MAX as u32 {
            let source = IpAddr::V4((source << 8).into());
            assert_eq!(throttle.try_at(source, now), Some(Duration::ZERO), "{source}");
            now += Duration::from_secs(60) / FAILURES_IN_ALL_PER_MINUTE_MAX;
        }
        assert!(throttle.accounts.len() <= FAILURE_SOURCES_MAX);
        assert!(throttle.accounts.contains_key(&Payer::Network(Network::All)));
    }
}
