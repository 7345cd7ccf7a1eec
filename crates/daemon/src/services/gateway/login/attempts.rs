//! How often somebody may try to log in: by the address that he comes from, and by the name that he gives.
//!
//! Each attempt spends one, and one that succeeds gets it back; time gives the others back one by one. So nobody is
//! locked out for ever. An address from which a user has logged in before is not held up by what others try with his
//! name.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::{Duration, Instant};

/// Attempts that fail from one address (IPv6: one /64) before it waits.
const FROM_ADDRESS: u32 = 10;
/// An address gets one attempt back in so many seconds.
const ADDRESS_GAIN_S: u64 = 30;
/// Attempts that fail with one name, from addresses that are new to it, before all such wait.
const WITH_NAME: u32 = 20;
/// A name gets one attempt back in so many seconds.
const NAME_GAIN_S: u64 = 15;
/// Addresses, and names, of which failed attempts are known; the one that has the fewest is forgotten for a new one.
const TRACKED_MAX: usize = 16_384;
/// Addresses of users that are known to be good.
const KNOWN_MAX: usize = 65_536;

/// Somebody who tries.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Attempt {
    name: String,
    from: IpAddr,
}

/// What was tried so far.
#[derive(Debug, Default)]
pub(super) struct Attempts {
    addresses: BTreeMap<IpAddr, Spent>,
    names: BTreeMap<String, Spent>,
    known: BTreeSet<Attempt>,
}

/// Attempts spent: when the last of them is given back.
#[derive(Clone, Copy, Debug)]
struct Spent {
    free_at: Instant,
}

impl Attempt {
    pub(super) fn new(name: &str, from: IpAddr) -> Self {
        Self { name: name.to_owned(), from: part_of(from) }
    }
}

impl Attempts {
    /// Spends an attempt.
    ///
    /// # Errors
    /// There is none now: how long to wait.
    pub(super) fn spend(&mut self, now: Instant, attempt: &Attempt) -> Result<(), Duration> {
        let is_known = self.known.contains(attempt);
        let address = self.addresses.get(&attempt.from).copied();
        let name = self.names.get(&attempt.name).copied().filter(|_| !is_known);
        let address = after(now, address, FROM_ADDRESS, ADDRESS_GAIN_S)?;
        let name = after(now, name, WITH_NAME, NAME_GAIN_S)?;
        remember(now, &mut self.addresses, &attempt.from, address);
        if !is_known {
            remember(now, &mut self.names, &attempt.name, name);
        }
        Ok(())
    }

    /// The attempt succeeded: it was not spent, and the address is known to be this user's.
    pub(super) fn succeed(&mut self, attempt: Attempt) {
        give_back(&mut self.addresses, &attempt.from, ADDRESS_GAIN_S);
        if !self.known.contains(&attempt) {
            give_back(&mut self.names, &attempt.name, NAME_GAIN_S);
            if self.known.len() >= KNOWN_MAX {
                self.known.pop_first();
            }
            self.known.insert(attempt);
        }
    }

    /// The attempt came to nothing by no fault of the user's: it was not spent.
    pub(super) fn take_back(&mut self, attempt: &Attempt) {
        give_back(&mut self.addresses, &attempt.from, ADDRESS_GAIN_S);
        if !self.known.contains(attempt) {
            give_back(&mut self.names, &attempt.name, NAME_GAIN_S);
        }
    }

    /// The user is gone.
    pub(super) fn forget(&mut self, name: &str) {
        self.known.retain(|known| known.name != name);
        self.names.remove(name);
    }
}

/// The part of an address that counts: one host of IPv6 has a whole /64.
fn part_of(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V4(address) => address.into(),
        IpAddr::V6(address) => {
            let [a, b, c, d, ..] = address.segments();
            IpAddr::from([a, b, c, d, 0, 0, 0, 0])
        }
    }
}

/// What is spent after one more attempt.
fn after(now: Instant, spent: Option<Spent>, max: u32, gain_s: u64) -> Result<Spent, Duration> {
    let gain = Duration::from_secs(gain_s);
    let free_at = spent.map_or(now, |spent| spent.free_at.max(now)) + gain;
    match (free_at - now).checked_sub(gain * max) {
        Some(wait) if !wait.is_zero() => Err(wait),
        _ => Ok(Spent { free_at }),
    }
}

fn remember<K: Ord + Clone>(now: Instant, all: &mut BTreeMap<K, Spent>, key: &K, spent: Spent) {
    if all.len() >= TRACKED_MAX && !all.contains_key(key) {
        all.retain(|_, spent| spent.free_at > now);
        let least = all.iter().min_by_key(|(_, spent)| spent.free_at);
        if let Some(least) = least.filter(|_| all.len() >= TRACKED_MAX).map(|(key, _)| key.clone())
        {
            all.remove(&least);
        }
    }
    all.insert(key.clone(), spent);
}

fn give_back<K: Ord>(all: &mut BTreeMap<K, Spent>, key: &K, gain_s: u64) {
    if let Some(spent) = all.get_mut(key)
        && let Some(earlier) = spent.free_at.checked_sub(Duration::from_secs(gain_s))
    {
        spent.free_at = earlier;
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn attempt(name: &str, from: &str) -> Attempt {
        Attempt::new(name, from.parse().unwrap())
    }

    #[test]
    fn an_address_that_fails_waits_and_gets_its_attempts_back() {
        let (mut attempts, now) = (Attempts::default(), Instant::now());
        for number in 0..FROM_ADDRESS {
            attempts.spend(now, &attempt(&format!("u{number}"), "192.0.2.1")).unwrap();
        }
        let wait = attempts.spend(now, &attempt("anna", "192.0.2.1")).unwrap_err();
        assert_eq!(wait, Duration::from_secs(ADDRESS_GAIN_S));
        attempts.spend(now, &attempt("anna", "192.0.2.2")).unwrap();
        let later = now + wait;
        attempts.spend(later, &attempt("anna", "192.0.2.1")).unwrap();
        assert!(attempts.spend(later, &attempt("anna", "192.0.2.1")).is_err());
    }

    #[test]
    fn one_host_of_ipv6_is_one_address() {
        let (mut attempts, now) = (Attempts::default(), Instant::now());
        for number in 0..FROM_ADDRESS {
            attempts.spend(now, &attempt("x", &format!("2001:db8::{number}"))).unwrap();
        }
        assert!(attempts.spend(now, &attempt("y", "2001:db8::ffff:1")).is_err());
        attempts.spend(now, &attempt("y", "2001:db8:0:1::1")).unwrap();
        // The same host by an IPv6 socket.
        for _ in 0..FROM_ADDRESS {
            attempts.spend(now, &attempt("z", "::ffff:192.0.2.9")).unwrap();
        }
        assert!(attempts.spend(now, &attempt("y", "192.0.2.9")).is_err());
    }

    #[test]
    fn a_good_user_is_let_in_while_others_try_his_name() {
        let (mut attempts, now) = (Attempts::default(), Instant::now());
        let home = attempt("anna", "198.51.100.1");
        attempts.spend(now, &home).unwrap();
        attempts.succeed(home.clone());
        let mut taken = 0;
        for number in 0..200_u8 {
            taken += u32::from(
                attempts.spend(now, &attempt("anna", &format!("203.0.113.{number}"))).is_ok(),
            );
        }
        assert_eq!(taken, WITH_NAME, "all of them together");
        for _ in 0..50 {
            attempts.spend(now, &home).unwrap();
            attempts.succeed(home.clone());
        }
        // From a new address she waits, but not for ever.
        let hotel = attempt("anna", "198.51.100.99");
        let wait = attempts.spend(now, &hotel).unwrap_err();
        assert!(wait <= Duration::from_secs(NAME_GAIN_S), "{wait:?}");
        attempts.spend(now + wait, &hotel).unwrap();
        attempts.forget("anna");
        assert!(attempts.known.is_empty());
    }

    #[test]
    fn what_is_known_has_a_limit() {
        let (mut attempts, now) = (Attempts::default(), Instant::now());
        for number in 0..u32::try_from(TRACKED_MAX + 100).unwrap() {
            let from = IpAddr::from(number.to_be_bytes());
            attempts.spend(now, &Attempt { name: format!("u{number}"), from }).unwrap();
        }
        assert_eq!((attempts.addresses.len(), attempts.names.len()), (TRACKED_MAX, TRACKED_MAX));
    }
}
