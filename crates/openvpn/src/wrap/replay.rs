//! Replay ids of wrapped packets: a number and the time when the sender began to count.

use std::fmt;

/// How many packets behind the newest one an older one is still accepted.
pub const REPLAY_WINDOW_PACKETS: u32 = 64;

/// The replay id of a wrapped packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ReplayId {
    /// Unix time in seconds when the sender began to count.
    pub time_s: u32,
    /// From 1 up by one with each packet, also with one that is sent again.
    pub number: u32,
}

impl ReplayId {
    /// The length on the wire.
    pub(crate) const BYTES: usize = 8;

    /// As it travels: the number before the time.
    pub(crate) fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        let (number, time) = bytes.split_at_mut(4);
        number.copy_from_slice(&self.number.to_be_bytes());
        time.copy_from_slice(&self.time_s.to_be_bytes());
        bytes
    }

    /// As it travels.
    pub(crate) fn from_bytes(bytes: [u8; Self::BYTES]) -> Self {
        let both = u64::from_be_bytes(bytes);
        Self { number: (both >> 32) as u32, time_s: both as u32 }
    }

    /// The id behind this one. When the numbers are used up, the time goes on by a second.
    pub(crate) const fn next(self) -> Self {
        match self.number.checked_add(1) {
            Some(number) => Self { number, ..self },
            None => Self { time_s: self.time_s.wrapping_add(1), number: 1 },
        }
    }
}

impl fmt::Display for ReplayId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of time {}", self.number, self.time_s)
    }
}

/// The replay ids that one session has received.
#[derive(Clone, Debug, Default)]
pub struct ReplayWindow {
    /// The newest; `None` before the first.
    newest: Option<ReplayId>,
    /// Bit n: the one n numbers before the newest was received.
    seen: u64,
}

const _: () = assert!(REPLAY_WINDOW_PACKETS == u64::BITS);

impl ReplayWindow {
    /// Notes a packet that has proven authentic. False: it was noted before, or is too old.
    pub fn accept(&mut self, id: ReplayId) -> bool {
        if id.number == 0 {
            return false;
        }
        let Some(newest) = self.newest.filter(|newest| newest.time_s >= id.time_s) else {
            // A later time is a sender that counts anew.
            self.newest = Some(id);
            self.seen = 1;
            return true;
        };
        if newest.time_s > id.time_s {
            return false;
        }
        if let Some(ahead) = id.number.checked_sub(newest.number).filter(|ahead| *ahead > 0) {
            self.seen = self.seen.checked_shl(ahead).unwrap_or(0) | 1;
            self.newest = Some(id);
            return true;
        }
        let behind = newest.number - id.number;
        let Some(bit) = 1_u64.checked_shl(behind) else { return false };
        let is_new = self.seen & bit == 0;
        self.seen |= bit;
        is_new
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn id(time_s: u32, number: u32) -> ReplayId {
        ReplayId { time_s, number }
    }

    #[test]
    fn each_id_is_accepted_once_within_the_window() {
        let mut window = ReplayWindow::default();
        for (at, number, accepted) in [
            (9, 0, false),
            (9, 1, true),
            (9, 1, false),
            (9, 3, true),
            (9, 2, true),
            (9, 2, false),
            (9, 66, true),
            (9, 2, false),
            (9, 4, true),
            (8, 200, false),
            (9, 4_000, true),
            (10, 1, true),
            (9, 4_001, false),
            (10, 2, true),
        ] {
            assert_eq!(window.accept(id(at, number)), accepted, "{number} of {at}");
        }
    }

    #[test]
    fn an_id_comes_back_and_is_never_repeated() {
        let last = id(7, u32::MAX);
        assert_eq!(ReplayId::from_bytes(last.to_bytes()), last);
        assert_eq!(id(2, 1).to_bytes(), [0, 0, 0, 1, 0, 0, 0, 2]);
        assert_eq!(last.next(), id(8, 1));
        assert_eq!(id(7, 1).next(), id(7, 2));
    }
}
