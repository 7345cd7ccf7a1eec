//! Keeps first packets away from the service for a time: in a flood of them nearly all are in vain, and each would wake
//! the service's task.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use weft_openvpn::Opcode;

/// The door before the service's gate. The gate's rate alone shuts it.
pub(super) struct Door {
    began: Instant,
    /// In milliseconds since then. 0: it was never shut.
    shut_until_ms: AtomicU64,
    refused: AtomicU64,
}

impl Door {
    /// An open one.
    pub(super) fn new(now: Instant) -> Self {
        Self { began: now, shut_until_ms: AtomicU64::new(0), refused: AtomicU64::new(0) }
    }

    pub(super) fn shut_until(&self, until: Instant) {
        let until_ms = self.since(until).as_millis() as u64;
        self.shut_until_ms.store(until_ms, Ordering::Relaxed);
    }

    pub(super) fn open(&self) {
        self.shut_until_ms.store(0, Ordering::Relaxed);
    }

    /// Whether a packet goes no further: a reset, while the door is shut. One of a session that there is goes too: its
    /// client has the answer already, or gets it again without asking.
    pub(super) fn refuses(&self, packet: &[u8]) -> bool {
        let until_ms = self.shut_until_ms.load(Ordering::Relaxed);
        let is_shut = until_ms > 0
            && is_reset(packet)
            && self.since(Instant::now()).as_millis() < u128::from(until_ms);
        if is_shut {
            self.refused.fetch_add(1, Ordering::Relaxed);
        }
        is_shut
    }

    /// How many packets went no further.
    pub(super) fn refused(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
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
    fn a_shut_door_refuses_resets_alone_until_its_time() {
        let now = Instant::now();
        let door = Door::new(now.checked_sub(Duration::from_secs(5)).unwrap_or(now));
        let reset = [Opcode::HardResetClientV3.first_byte(KeyId::FIRST), 1, 2];
        let control = [Opcode::ControlV1.first_byte(KeyId::FIRST), 1, 2];
        assert!(!door.refuses(&reset), "nobody has shut it");
        door.shut_until(now + Duration::from_secs(600));
        assert!(door.refuses(&reset) && door.refuses(&reset));
        assert!(!door.refuses(&control) && !door.refuses(&[]));
        door.open();
        assert!(!door.refuses(&reset), "a client has connected");
        door.shut_until(now);
        assert!(!door.refuses(&reset), "its time is over");
        assert_eq!(door.refused(), 2);
    }
}
