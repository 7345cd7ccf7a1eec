//! Frames to groups that go round. If two ports reach each other outside of Weft, each broadcast comes back and is
//! sent again, endlessly and as fast as all can. Bridges in two containers on another shared network do this. Such
//! copies are the same to the last byte; an application's repeats seldom are, and come at its pace.

use weft_io::steer::TICK_NS;

use crate::tables::networks::NetworkNumber;

/// Copies of one frame to a group that a thread sends in one second; all further ones are dropped until
/// there was none for [`REPEATS_PAUSE_S`].
pub const REPEATS_PER_S_MAX: u32 = 200;
/// How long no copy of a frame may have come, in seconds, until it is sent again.
pub const REPEATS_PAUSE_S: u32 = 5;
/// Bytes of a frame that are compared.
const COMPARED_BYTES_MAX: usize = 2_048;
/// Frames that are kept in mind; others take the place of those with the same remainder.
const SLOTS: usize = 512;
const TICKS_PER_S: u32 = 1_000_000_000 / TICK_NS;

/// The frames to groups that a thread has sent lately.
#[derive(Debug)]
pub(crate) struct Repeats {
    slots: Vec<Slot>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Slot {
    digest: u64,
    /// When its copies began to be counted, in ticks.
    begun: u32,
    last: u32,
    copies: u32,
}

impl Repeats {
    pub(crate) fn new() -> Self {
        Self { slots: vec![Slot::default(); SLOTS] }
    }

    /// Whether a frame to a group has come so often in its network that it goes round.
    pub(crate) fn goes_round(&mut self, network: NetworkNumber, frame: &[u8], tick: u32) -> bool {
        let digest = digest(network, frame);
        let Some(slot) = self.slots.get_mut(digest as usize % SLOTS) else { return false };
        if slot.digest != digest {
            *slot = Slot { digest, begun: tick, last: tick, copies: 1 };
            return false;
        }
        let since = |then: u32| tick.wrapping_sub(then);
        let is_round = slot.copies > REPEATS_PER_S_MAX;
        let is_over = if is_round {
            since(slot.last) >= REPEATS_PAUSE_S * TICKS_PER_S
        } else {
            since(slot.begun) >= TICKS_PER_S
        };
        slot.last = tick;
        if is_over {
            (slot.begun, slot.copies) = (tick, 1);
            return false;
        }
        slot.copies = slot.copies.saturating_add(1);
        slot.copies > REPEATS_PER_S_MAX
    }
}

/// Never the digest of an empty slot.
fn digest(network: NetworkNumber, frame: &[u8]) -> u64 {
    let compared = &frame[..frame.len().min(COMPARED_BYTES_MAX)];
    let (words, rest) = compared.as_chunks::<8>();
    let mut digest = frame.len() as u64 | u64::from(network.get()) << 48;
    let mut mix =
        |word: u64| digest = (digest.rotate_left(5) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    words.iter().for_each(|word| mix(u64::from_le_bytes(*word)));
    rest.iter().for_each(|byte| mix(u64::from(*byte)));
    (digest ^ digest >> 32) | 1 << 63
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: NetworkNumber = NetworkNumber::new(1);

    /// A frame to all with this number in its payload.
    fn frame(number: u32) -> Vec<u8> {
        [&[0xff; 6][..], &[2, 0, 0, 0, 0, 1], &[8, 6], &number.to_be_bytes(), &[0; 41]].concat()
    }

    #[test]
    fn a_frame_that_comes_again_and_again_is_dropped_until_it_rests() {
        let mut repeats = Repeats::new();
        let mut tick = u32::MAX - 10;
        let passed = |repeats: &mut Repeats, tick, times: u32| {
            (0..times).filter(|_| !repeats.goes_round(ONE, &frame(1), tick)).count()
        };
        assert_eq!(passed(&mut repeats, tick, 100_000), REPEATS_PER_S_MAX as usize);
        // Its copies keep it away for as long as they come.
        for _ in 0..20 {
            tick = tick.wrapping_add(TICKS_PER_S);
            assert_eq!(passed(&mut repeats, tick, 10), 0);
        }
        tick = tick.wrapping_add(REPEATS_PAUSE_S * TICKS_PER_S);
        assert_eq!(passed(&mut repeats, tick, 10), 10);
    }

    #[test]
    fn copies_are_counted_by_network() {
        let mut repeats = Repeats::new();
        let two = NetworkNumber::new(2);
        (0..10_000).for_each(|_| _ = repeats.goes_round(ONE, &frame(1), 7));
        assert!(repeats.goes_round(ONE, &frame(1), 7));
        assert!(!repeats.goes_round(two, &frame(1), 7) && repeats.goes_round(ONE, &frame(1), 7));
    }

    #[test]
    fn frames_that_differ_and_those_that_take_their_time_all_pass() {
        let mut repeats = Repeats::new();
        // A stream to a group, and 150 equal frames in each second.
        for number in 0..100_000 {
            assert!(!repeats.goes_round(ONE, &frame(number), 7), "{number}");
        }
        let mut repeats = Repeats::new();
        for number in 0..10_000_u32 {
            let tick = number * TICKS_PER_S / 150;
            assert!(!repeats.goes_round(ONE, &frame(1), tick), "{number}");
        }
    }
}
