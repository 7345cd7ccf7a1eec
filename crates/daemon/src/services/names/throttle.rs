//! Rates of clients: a bucket of tokens each, in a table of bounded size.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

/// Clients whose buckets are remembered; all further ones share one bucket.
pub(crate) const CLIENTS_MAX: usize = 4_096;
/// Bits of an IPv6 address that name a client outside the network, as one host may use all addresses of its subnet.
const IPV6_CLIENT_BITS: u32 = 64;

/// A rate and how much may come at once.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rate {
    /// Tokens a second.
    pub(crate) per_s: u32,
    /// Tokens of a full bucket.
    pub(crate) burst: u32,
}

#[derive(Clone, Copy, Debug)]
struct Bucket {
    tokens: f64,
    at: Instant,
}

/// The rates of all clients.
#[derive(Debug)]
pub(crate) struct Throttle {
    rate: Rate,
    buckets: BTreeMap<IpAddr, Bucket>,
    /// The bucket of clients beyond the limit.
    others: Bucket,
    /// When the table was last looked through for clients that are silent.
    swept: Instant,
}

/// The shortest time between two looks through a full table, in milliseconds.
const SWEEP_MS: u64 = 1_000;

impl Throttle {
    pub(crate) fn new(now: Instant, rate: Rate) -> Self {
        let others = Bucket { tokens: rate.burst.into(), at: now };
        Self { rate, buckets: BTreeMap::new(), others, swept: now }
    }

    /// Takes one token of a client ([`client_of`]); `false` if it has none left.
    pub(crate) fn admit(&mut self, now: Instant, key: IpAddr) -> bool {
        let rate = self.rate;
        let is_full = self.buckets.len() >= CLIENTS_MAX && !self.buckets.contains_key(&key);
        if is_full && now.saturating_duration_since(self.swept) >= Duration::from_millis(SWEEP_MS) {
            self.swept = now;
            self.buckets.retain(|_, bucket| bucket.filled(now, rate) < f64::from(rate.burst));
        }
        let bucket = match self.buckets.len() >= CLIENTS_MAX && is_full {
            true => &mut self.others,
            false => {
                self.buckets.entry(key).or_insert(Bucket { tokens: rate.burst.into(), at: now })
            }
        };
        bucket.tokens = bucket.filled(now, rate);
        bucket.at = now;
        let admitted = bucket.tokens >= 1.0;
        if admitted {
            bucket.tokens -= 1.0;
        }
        admitted
    }
}

impl Bucket {
    fn filled(&self, now: Instant, rate: Rate) -> f64 {
        let since = now.saturating_duration_since(self.at).as_secs_f64();
        (self.tokens + since * f64::from(rate.per_s)).min(rate.burst.into())
    }
}

/// The name of a source in tables of clients. A container has its own, though all of a network share one subnet.
pub(crate) fn client_of(address: IpAddr, is_container: bool) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) if !is_container => {
            let mask = u128::MAX << (128 - IPV6_CLIENT_BITS);
            IpAddr::V6((u128::from(address) & mask).into())
        }
        own => own,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    const RATE: Rate = Rate { per_s: 10, burst: 20 };

    #[test]
    fn a_client_has_a_burst_then_its_rate_and_takes_nothing_from_others() {
        let now = Instant::now();
        let mut throttle = Throttle::new(now, RATE);
        let (one, two) = ([10, 0, 0, 1].into(), [10, 0, 0, 2].into());
        assert_eq!((0..100).filter(|_| throttle.admit(now, one)).count(), 20);
        assert!(throttle.admit(now, two));
        let later = now + Duration::from_millis(1_500);
        assert_eq!((0..100).filter(|_| throttle.admit(later, one)).count(), 15);
    }

    #[test]
    fn the_addresses_of_one_subnet_are_one_client() {
        let now = Instant::now();
        let mut throttle = Throttle::new(now, RATE);
        let address = |n: u16| format!("2001:db8::{n:x}").parse().unwrap();
        let mut admitted = |is_container| {
            let admits = |n: &u16| throttle.admit(now, client_of(address(*n), is_container));
            (1..=100).filter(admits).count()
        };
        assert_eq!(admitted(false), 20);
        assert_eq!(admitted(true), 100, "each container is a client");
        let mapped = "::ffff:10.0.0.1".parse().unwrap();
        for is_container in [false, true] {
            assert_eq!(client_of(mapped, is_container), IpAddr::from([10, 0, 0, 1]));
        }
    }

    #[test]
    fn any_number_of_sources_takes_a_bounded_table_and_silent_ones_make_room() {
        let now = Instant::now();
        let mut throttle = Throttle::new(now, RATE);
        let admitted = (0..100_000_u32).filter(|n| throttle.admit(now, IpAddr::V4((*n).into())));
        assert_eq!(admitted.count(), CLIENTS_MAX + 20, "those beyond share one bucket");
        assert_eq!(throttle.buckets.len(), CLIENTS_MAX);
        let later = now + Duration::from_secs(10);
        assert!(throttle.admit(later, [192, 0, 2, 1].into()));
        assert_eq!(throttle.buckets.len(), 1);
    }
}
