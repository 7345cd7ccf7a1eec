//! The next key: how it begins, and what becomes of the session if it fails.

use std::time::{Duration, Instant};

use super::event::{Dropped, EndReason, SessionError};
use super::key::{Begin, KeyState, Stage};
use super::{LINGER_S, Session, retransmit};
use crate::opcode::{KeyId, Opcode};

/// The shortest time between two keys that the peer begins, in seconds: each costs public-key work. Its reset comes
/// again, so that an eager peer only waits.
pub const SOFT_RESET_INTERVAL_S: u64 = 1;

/// The shortest time until a new key seals, where an older one can: until then the peer may not have it.
pub(super) const SETTLING_MIN: Duration = Duration::from_secs(2);

/// The last renewal failed: the session lives by the key before it.
pub(super) struct Failing {
    /// When that key ends, and the session with it, unless another renewal succeeds.
    pub(super) until: Instant,
    /// Why the last one failed.
    pub(super) reason: EndReason,
}

impl Session {
    /// The peer begins the next key, if it is time for one.
    pub(super) fn answer_soft_reset(&mut self, now: Instant, id: KeyId) -> Result<(), Dropped> {
        let pause = Duration::from_secs(SOFT_RESET_INTERVAL_S);
        if self.peer_began_at.is_some_and(|at| now < at + pause) {
            return Err(Dropped::TooSoon(id));
        }
        self.begin_key(now, id).map_err(|_| Dropped::OtherKey(id))?;
        self.peer_began_at = Some(now);
        Ok(())
    }

    /// The id of the next key that this end begins. It passes over ids of attempts that came to nothing: what the peer
    /// still has of them must not mix with the next. An id that the peer never answered is taken again, since OpenVPN
    /// expects no other.
    pub(super) fn next_id(&self) -> KeyId {
        let used = [Some(self.current.id), self.previous.as_ref().map(|key| key.id)];
        let mut id = self.last_id.next();
        while used.contains(&Some(id)) {
            id = id.next();
        }
        id
    }

    /// Begins the next key by a soft reset; the current one becomes the previous one. It seals from now on: the peer
    /// has it, and forgets the one before it by now.
    pub(super) fn begin_key(&mut self, now: Instant, id: KeyId) -> Result<(), SessionError> {
        let timing = self.role.timing();
        let begin = Begin {
            id,
            next_id: 0,
            expected: 0,
            reset: Some(Opcode::SoftResetV1),
            retransmit: retransmit(self.is_stream, timing.hand_window),
            hand_window: timing.hand_window,
        };
        let next = KeyState::new(now, self.role.tls()?, &begin);
        let mut old = std::mem::replace(&mut self.current, next);
        let end = now + timing.transition_window;
        // Another attempt does not make the old key live longer.
        old.deadline = self.failing.as_ref().map_or(end, |failing| end.min(failing.until));
        self.previous = Some(Box::new(old));
        self.slots.settle(&mut self.events);
        self.renegotiates_at = None;
        Ok(())
    }

    /// The current key comes to nothing. Where the peer cannot have it yet, and the key before it is good, that one
    /// is current again, as OpenVPN keeps it (its lame duck). Otherwise the session ends.
    pub(super) fn fail(&mut self, now: Instant, reason: EndReason) {
        let is_early = self.current.stage < Stage::Decision && self.over_at.is_none();
        let good = self
            .previous
            .take_if(|key| is_early && key.stage == Stage::Established && key.deadline > now);
        let Some(good) = good else { return self.end(now, reason) };
        // The peer still gets an alert of the key that failed.
        self.flush(now);
        let until = good.deadline;
        let mut failed = std::mem::replace(&mut self.current, *good);
        failed.deadline = now + Duration::from_secs(LINGER_S);
        self.previous = Some(Box::new(failed));
        // By then the peer, too, has given up.
        self.renegotiates_at = Some(now + self.role.timing().hand_window);
        self.failing = Some(Failing { until, reason });
    }
}
