//! Drops first packets before the service for a time: in a flood of them nearly all are in vain, and each would wake
//! the service's task.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use weft_openvpn::Opcode;

/// Drops resets while the service's gate would refuse them for their rate.
pub(super) struct ResetFilter {
    began: Instant,
    /// In milliseconds since then; 0: none is dropped.
    drop_until_ms: AtomicU64,
    dropped: AtomicU64,
}

impl ResetFilter {
    /// One that drops nothing yet.
    pub(super) fn new(now: Instant) -> Self {
        Self { began: now, drop_until_ms: AtomicU64::new(0), dropped: AtomicU64::new(0) }
    }

    pub(super) fn drop_until(&self, until: Instant) {
        let until_ms = self.since(until).as_millis() as u64;
        self.drop_until_ms.store(until_ms, Ordering::Relaxed);
    }

    pub(super) fn pass_all(&self) {
        self.drop_until_ms.store(0, Ordering::Relaxed);
    }

    /// Whether a packet goes no further. A reset of a session that there is goes too: its client has the answer
    /// already, or gets it again without asking.
    pub(super) fn drops(&self, packet: &[u8]) -> bool {
        let until_ms = self.drop_until_ms.load(Ordering::Relaxed);
        let is_dropped = until_ms > 0
            && is_reset(packet)
            && self.since(Instant::now()).as_millis() < u128::from(until_ms);
        if is_dropped {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
        is_dropped
    }

    /// How many packets went no further.
    pub(super) fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }

    fn since(&self, at: Instant) -> Duration {
        at.saturating_duration_since(self.began)
    }
}

fn is_reset(packet: &[u8]) -> bool {
    let opcode = packet.first().and_then(|first| Opcode::parse(*first).ok());
    opcode.is_some_and(|(opcode, _)| opcode.is_hard_reset())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use weft_openvpn::KeyId;

    use super::*;

    #[test]
    fn resets_alone_are_dropped_until_the_time_is_over() {
        let now = Instant::now();
        let filter = ResetFilter::new(now.checked_sub(Duration::from_secs(5)).unwrap_or(now));
        let reset = [Opcode::HardResetClientV3.first_byte(KeyId::FIRST), 1, 2];
        let control = [Opcode::ControlV1.first_byte(KeyId::FIRST), 1, 2];
        assert!(!filter.drops(&reset), "nobody has asked for it");
        filter.drop_until(now + Duration::from_secs(600));
        assert!(filter.drops(&reset) && filter.drops(&reset));
        assert!(!filter.drops(&control) && !filter.drops(&[]));
        filter.pass_all();
        assert!(!filter.drops(&reset), "a client has connected");
        filter.drop_until(now);
        assert!(!filter.drops(&reset), "its time is over");
        assert_eq!(filter.dropped(), 2);
    }
}
