//! Counters of the names service, each with a name in `weft report`.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($($(#[doc = $doc:literal])* $variant:ident = $name:literal;)*) => {
        /// The outcome of a query.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) enum Counter {
            $($(#[doc = $doc])* $variant,)*
        }

        const NAMES: &[&str] = &[$($name,)*];
    };
}

counters! {
    /// Answered from the zone.
    Answered = "dns_answered";
    /// Answered from the cache.
    Cached = "dns_cached";
    /// Sent to an upstream server.
    Forwarded = "dns_forwarded";
    /// Joined the same question, which was already under way upstream.
    Joined = "dns_joined";
    /// No upstream server answered; the client got SERVFAIL.
    Failed = "dns_upstream_failed";
    /// Not a query that can be read.
    Malformed = "dns_malformed";
    /// A response where only queries belong.
    Responses = "dns_unasked_responses";
    /// From a source that is not served.
    Strangers = "dns_strangers";
    /// Of a class, a type or a kind that is never answered.
    Refused = "dns_refused";
    /// This daemon's own query, which an upstream server has sent back.
    Loops = "dns_loops";
    /// Over the client's rate.
    RateLimited = "dns_rate_limited";
    /// Too many questions under way upstream.
    Busy = "dns_upstream_busy";
    /// The queue of the service was full, or a connection over a limit.
    Overloaded = "dns_overloaded";
    /// An answer that the socket did not take.
    Unsent = "dns_unsent";
    /// An answer of an upstream server that does not belong to the question.
    Mismatched = "dns_upstream_mismatched";
}

/// All counters of the service; they outlive its restarts.
#[derive(Clone, Debug)]
pub(crate) struct Counters(Arc<Vec<AtomicU64>>);

impl Default for Counters {
    fn default() -> Self {
        Self(Arc::new(NAMES.iter().map(|_| AtomicU64::new(0)).collect()))
    }
}

impl Counters {
    pub(crate) fn count(&self, counter: Counter) {
        if let Some(cell) = self.0.get(counter as usize) {
            cell.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[cfg(test)]
    pub(crate) fn get(&self, counter: Counter) -> u64 {
        self.0.get(counter as usize).map_or(0, |cell| cell.load(Ordering::Relaxed))
    }

    /// All of them by name.
    pub(crate) fn all(&self) -> BTreeMap<String, u64> {
        let values = self.0.iter().map(|cell| cell.load(Ordering::Relaxed));
        NAMES.iter().map(|name| (*name).to_owned()).zip(values).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_counter_has_its_own_name() {
        let counters = Counters::default();
        counters.count(Counter::Answered);
        counters.count(Counter::Mismatched);
        let all = counters.all();
        assert_eq!(all.len(), NAMES.len());
        assert_eq!((all["dns_answered"], all["dns_upstream_mismatched"]), (1, 1));
        assert_eq!(all.values().sum::<u64>(), 2);
    }
}
