//! Remembers DELs, so that a late ADD does not bring back what a DEL took away.
//!
//! A runtime may end an ADD that takes too long and send DEL, while the ADD is still under way in the
//! daemon (cilium #9913, #20398). But DEL followed by a new ADD of the same attachment is usual:
//! nerdctl sends DEL before every ADD, and podman restarts a container under its id. So not the order
//! of arrival decides, but when each plugin process started. The clock is CLOCK_BOOTTIME, which all
//! processes of a machine share.

use std::collections::{BTreeMap, VecDeque};

use super::daemon::{Key, Target};

/// How long a DEL is remembered, in milliseconds. An ADD older than that is refused in any case.
pub const DEL_REMEMBERED_MS: u64 = 600_000;
/// Most DELs remembered.
pub const DELS_MAX: usize = 65_536;

/// The DELs of the last ten minutes.
#[derive(Debug)]
pub struct Deletions {
    limit: usize,
    dels: BTreeMap<Target, Del>,
    /// In order of arrival: when each DEL was noted. A later DEL of the same target outdates its entry.
    order: VecDeque<(u64, Target)>,
    /// ADDs that started no later are refused, since some DELs of that time are forgotten.
    floor_ns: Option<u64>,
}

#[derive(Debug)]
struct Del {
    started_ns: u64,
    noted_ns: u64,
}

impl Default for Deletions {
    fn default() -> Self {
        Self::with_limit(DELS_MAX)
    }
}

impl Deletions {
    /// Remembers at most `limit` DELs. If more come, ADDs that started before the oldest ones are
    /// refused, whatever their key.
    #[must_use]
    pub fn with_limit(limit: usize) -> Self {
        let limit = limit.max(1);
        Self { limit, dels: BTreeMap::new(), order: VecDeque::new(), floor_ns: None }
    }

    /// Notes a DEL whose plugin started at `started_ns`.
    pub fn note(&mut self, target: Target, started_ns: u64, now_ns: u64) {
        self.expire(now_ns);
        // A time in the future would refuse new ADDs.
        let started_ns = started_ns.min(now_ns);
        let del = self.dels.entry(target.clone()).or_insert(Del { started_ns, noted_ns: now_ns });
        del.started_ns = started_ns.max(del.started_ns);
        del.noted_ns = now_ns;
        self.order.push_back((now_ns, target));
        while self.order.len() > self.limit {
            self.drop_oldest();
        }
    }

    /// Whether an ADD whose plugin started at `started_ns` may still make this attachment. It must not
    /// if a DEL started at the same time or later, or if that cannot be told any more.
    pub fn allows(&mut self, key: &Key, started_ns: u64, now_ns: u64) -> bool {
        self.expire(now_ns);
        let on_its_network = Target::from(key.clone());
        let on_any_network = Target { network: None, ..on_its_network.clone() };
        let dels = [on_its_network, on_any_network];
        let latest =
            dels.iter().filter_map(|target| self.dels.get(target)).map(|del| del.started_ns);
        let oldest_ns = now_ns.saturating_sub(DEL_REMEMBERED_MS * NS_PER_MS);
        started_ns >= oldest_ns
            && latest.chain(self.floor_ns).max().is_none_or(|refused_ns| started_ns > refused_ns)
    }

    /// The number of DELs remembered.
    #[must_use]
    pub fn len(&self) -> usize {
        self.dels.len()
    }

    /// Whether none is remembered.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.dels.is_empty()
    }

    fn expire(&mut self, now_ns: u64) {
        let is_old =
            |noted_ns: u64| now_ns.saturating_sub(noted_ns) > DEL_REMEMBERED_MS * NS_PER_MS;
        while self.order.front().is_some_and(|(noted_ns, _)| is_old(*noted_ns)) {
            self.drop_oldest();
        }
    }

    fn drop_oldest(&mut self) {
        let Some((noted_ns, target)) = self.order.pop_front() else { return };
        if self.dels.get(&target).is_some_and(|del| del.noted_ns == noted_ns)
            && let Some(del) = self.dels.remove(&target)
        {
            self.floor_ns = self.floor_ns.max(Some(del.started_ns));
        }
    }
}

const NS_PER_MS: u64 = 1_000_000;

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use proptest::prelude::*;

    use super::*;

    const S: u64 = 1_000_000_000;

    fn key(container: &str) -> Key {
        Key { network: "shop".into(), container: container.into(), interface: "eth0".into() }
    }

    fn target(container: &str) -> Target {
        key(container).into()
    }

    #[test]
    fn an_add_that_started_before_a_del_is_refused_and_one_that_started_after_is_not() {
        let mut deletions = Deletions::default();
        assert!(deletions.allows(&key("a"), 5 * S, 6 * S));
        deletions.note(target("a"), 10 * S, 11 * S);
        assert!(!deletions.allows(&key("a"), 9 * S, 12 * S));
        assert!(!deletions.allows(&key("a"), 10 * S, 12 * S), "an undo has the time of its ADD");
        assert!(deletions.allows(&key("a"), 10 * S + 1, 12 * S));
        assert!(deletions.allows(&key("b"), 9 * S, 12 * S));
        let other_interface = Key { interface: "net1".into(), ..key("a") };
        assert!(deletions.allows(&other_interface, 9 * S, 12 * S));
    }

    #[test]
    fn a_del_without_network_counts_for_all_networks() {
        let mut deletions = Deletions::default();
        deletions.note(Target { network: None, ..target("a") }, 10 * S, 10 * S);
        assert!(!deletions.allows(&key("a"), 9 * S, 12 * S));
        assert!(!deletions.allows(&Key { network: "other".into(), ..key("a") }, 9 * S, 12 * S));
        assert!(deletions.allows(&key("a"), 11 * S, 12 * S));
    }

    #[test]
    fn an_older_del_that_arrives_later_takes_nothing_back() {
        let mut deletions = Deletions::default();
        deletions.note(target("a"), 10 * S, 11 * S);
        deletions.note(target("a"), 5 * S, 12 * S);
        assert!(!deletions.allows(&key("a"), 9 * S, 13 * S));
    }

    #[test]
    fn dels_are_forgotten_after_ten_minutes_and_adds_older_than_that_refused() {
        let mut deletions = Deletions::default();
        deletions.note(target("a"), 10 * S, 10 * S);
        let later = 10 * S + DEL_REMEMBERED_MS * 1_000_000;
        assert_eq!(deletions.len(), 1);
        assert!(!deletions.allows(&key("a"), 9 * S, later + 1));
        assert!(deletions.is_empty());
        assert!(!deletions.allows(&key("b"), 9 * S, later + 1), "it took longer than ten minutes");
        assert!(deletions.allows(&key("a"), later, later + 1));
    }

    #[test]
    fn a_repeated_del_is_remembered_from_its_last_time_on() {
        let mut deletions = Deletions::default();
        deletions.note(target("a"), 10 * S, 10 * S);
        deletions.note(target("a"), 500 * S, 500 * S);
        assert!(!deletions.allows(&key("a"), 499 * S, 700 * S));
        assert_eq!(deletions.len(), 1);
    }

    #[test]
    fn a_del_from_the_future_bans_nothing_for_longer_than_now() {
        let mut deletions = Deletions::default();
        deletions.note(target("a"), u64::MAX, 10 * S);
        assert!(!deletions.allows(&key("a"), 10 * S, 11 * S));
        assert!(deletions.allows(&key("a"), 11 * S, 11 * S));
    }

    #[test]
    fn a_full_register_refuses_old_adds_instead_of_forgetting_dels() {
        let mut deletions = Deletions::with_limit(2);
        for (second, name) in [(10, "a"), (11, "b"), (12, "c")] {
            deletions.note(target(name), second * S, second * S);
        }
        assert_eq!(deletions.len(), 2);
        assert!(!deletions.allows(&key("a"), 9 * S, 13 * S));
        assert!(!deletions.allows(&key("z"), 9 * S, 13 * S));
        assert!(deletions.allows(&key("a"), 10 * S + 1, 13 * S));
        assert!(!deletions.allows(&key("b"), 10 * S + 1, 13 * S));
    }

    proptest! {
        #[test]
        fn no_late_add_ever_wins(
            steps in prop::collection::vec((0..4_u8, 0..2_000_u64, 0..300_u64, any::<bool>()), 1..80),
            limit in 1..6_usize,
        ) {
            let mut deletions = Deletions::with_limit(limit);
            let (mut now, mut dels) = (1_000 * S, Vec::new());
            for (name, age, pause, is_del) in steps {
                now += pause * S;
                let (container, started) = (name.to_string(), now.saturating_sub(age * S));
                if is_del {
                    deletions.note(target(&container), started, now);
                    dels.push((container, started));
                } else if deletions.allows(&key(&container), started, now) {
                    prop_assert!(!dels.iter().any(|(of, del)| *of == container && *del >= started));
                }
                prop_assert!(deletions.len() <= limit && deletions.order.len() <= limit);
            }
        }
    }
}
