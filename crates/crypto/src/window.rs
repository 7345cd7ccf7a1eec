//! The replay window of an inbound SA, with extended (64-bit) sequence numbers. A key of OpenVPN's data channel
//! has one too; its packet ids need no inference.

/// How far behind the highest accepted sequence number a packet may still be accepted, in packets.
///
/// A power of two; covers the reordering of helpers and NIC queues at tens of gigabits per second.
pub const WINDOW_PACKETS: u64 = 8192;

const WORD_BITS: u64 = 64;
const WORDS: usize = (WINDOW_PACKETS / WORD_BITS) as usize;
/// The size of a fresh window, in words. Most SAs of a large network carry a few probes in their hour.
const FIRST_WORDS: usize = 4;
const _: () = assert!(WORDS.is_power_of_two() && FIRST_WORDS.is_power_of_two());
const _: () = assert!(WORDS > FIRST_WORDS);

/// Why a sequence number is refused. Both are the network's or an attacker's doing; drop and count.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Replay {
    /// A packet with this sequence number has been accepted before, or it is zero, which no
    /// sender uses (RFC 4303 section 3.3.3).
    #[error("a packet with this sequence number was accepted before")]
    Duplicate,
    /// Further than [`WINDOW_PACKETS`] behind the highest accepted sequence number.
    #[error("the sequence number is too far behind")]
    TooOld,
}

/// The sequence numbers that have been accepted (RFC 4303 section 3.4.3 and appendix A2).
///
/// One writer: [`check`](Self::check) before a packet is opened, [`mark`](Self::mark) once it has
/// proven authentic. It takes room as its numbers grow, in a few steps up to 1 KiB.
#[derive(Debug)]
pub struct ReplayWindow {
    highest: u64,
    /// A power of two of words, at most [`WORDS`]. Bit `s % (64 * words)` belongs to sequence number
    /// `s` of the window's current span. Fewer words than [`WORDS`] have room for all numbers
    /// from 0 to the highest.
    accepted: Box<[u64]>,
}

impl Default for ReplayWindow {
    fn default() -> Self {
        Self::new()
    }
}

impl Clone for ReplayWindow {
    fn clone(&self) -> Self {
        Self { highest: self.highest, accepted: self.accepted.clone() }
    }

    /// Takes no new room where this window has as much as `source`.
    #[inline]
    fn clone_from(&mut self, source: &Self) {
        self.highest = source.highest;
        self.accepted.clone_from(&source.accepted);
    }
}

impl ReplayWindow {
    /// Nothing accepted yet; sequence number zero counts as used.
    pub fn new() -> Self {
        let mut accepted = [0; FIRST_WORDS];
        accepted[0] = 1;
        Self { highest: 0, accepted: Box::new(accepted) }
    }

    /// The highest accepted sequence number; 0 before the first.
    pub const fn highest(&self) -> u64 {
        self.highest
    }

    /// Whether a packet with this sequence number may be opened. Changes nothing.
    ///
    /// # Errors
    /// The peer or the network repeated the packet, or it came too late.
    #[inline]
    pub fn check(&self, sequence: u64) -> Result<(), Replay> {
        if sequence > self.highest {
            return Ok(());
        }
        if self.highest - sequence >= WINDOW_PACKETS {
            return Err(Replay::TooOld);
        }
        let (word, bit) = self.place(sequence);
        if self.accepted[word] & bit == 0 { Ok(()) } else { Err(Replay::Duplicate) }
    }

    /// Records an authentic packet, and moves the window up if it is the highest.
    ///
    /// A sequence number behind the window leaves it as it is.
    #[inline]
    pub fn mark(&mut self, sequence: u64) {
        if sequence > self.highest {
            let words = self.accepted.len();
            if words < WORDS && sequence / WORD_BITS >= words as u64 {
                self.grow(sequence);
            }
            // Packets in order leave no gap behind them whose bits would have to be cleared.
            if sequence - self.highest > 1 {
                self.forget_span(sequence);
            }
            self.highest = sequence;
        } else if self.highest - sequence >= WINDOW_PACKETS {
            return;
        }
        let (word, bit) = self.place(sequence);
        self.accepted[word] |= bit;
    }

    /// [`Self::check`] and [`Self::mark`] of an authentic packet in one.
    ///
    /// # Errors
    /// As [`Self::check`]; then nothing has changed.
    #[inline]
    pub fn accept(&mut self, sequence: u64) -> Result<(), Replay> {
        self.check(sequence)?;
        self.mark(sequence);
        Ok(())
    }

    /// Counts all up to the highest as accepted: missing ones are refused from now on.
    pub fn close_gaps(&mut self) {
        self.accepted.fill(u64::MAX);
    }

    /// The 64-bit sequence number of a packet that carries only the low half (RFC 4303 appendix A2). It is the one
    /// candidate within the window, or else ahead of it.
    #[inline]
    pub const fn infer(&self, low: u32) -> u64 {
        const WINDOW: u32 = WINDOW_PACKETS as u32;
        let highest_low = self.highest as u32;
        let highest_high = (self.highest >> 32) as u32;
        let bottom_low = highest_low.wrapping_sub(WINDOW - 1);
        let high = if highest_low >= WINDOW - 1 {
            // The window lies within one span of 2^32.
            if low >= bottom_low { highest_high } else { highest_high.wrapping_add(1) }
        } else if low >= bottom_low {
            // It straddles two, and this one is of the lower; below zero there is none.
            highest_high.saturating_sub(1)
        } else {
            highest_high
        };
        (high as u64) << 32 | low as u64
    }

    /// Clears the bits that `highest + 1 ..= new` take over from sequence numbers that leave.
    fn forget_span(&mut self, new: u64) {
        let first = self.highest + 1;
        if new - self.highest >= WINDOW_PACKETS {
            self.accepted.fill(0);
            return;
        }
        let words = self.accepted.len() - 1;
        let last_word = new / WORD_BITS;
        let mut word = first / WORD_BITS;
        let mut mask = u64::MAX << (first % WORD_BITS);
        while word < last_word {
            self.accepted[word as usize & words] &= !mask;
            mask = u64::MAX;
            word += 1;
        }
        mask &= u64::MAX >> (WORD_BITS - 1 - new % WORD_BITS);
        self.accepted[word as usize & words] &= !mask;
    }

    /// Makes room for the numbers up to `new`: in a window of few words each number has its own bit.
    #[cold]
    fn grow(&mut self, new: u64) {
        let needed = usize::try_from(new / WORD_BITS + 1).unwrap_or(WORDS).min(WORDS);
        let mut accepted = vec![0; needed.next_power_of_two()].into_boxed_slice();
        accepted[..self.accepted.len()].copy_from_slice(&self.accepted);
        self.accepted = accepted;
    }

    /// The word and the bit of a sequence number.
    #[inline]
    fn place(&self, sequence: u64) -> (usize, u64) {
        let words = self.accepted.len() - 1;
        ((sequence / WORD_BITS) as usize & words, 1 << (sequence % WORD_BITS))
    }
}

#[cfg(test)]
impl ReplayWindow {
    /// A window as if `highest` alone had been accepted.
    pub(crate) fn at(highest: u64) -> Self {
        let mut window = Self::new();
        window.mark(highest);
        window
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    /// The definition, as slow and plain as it gets.
    struct Model {
        accepted: HashSet<u64>,
        highest: u64,
    }

    impl Model {
        fn check(&self, sequence: u64) -> Result<(), Replay> {
            if sequence.checked_add(WINDOW_PACKETS).is_some_and(|end| end <= self.highest) {
                Err(Replay::TooOld)
            } else if self.accepted.contains(&sequence) {
                Err(Replay::Duplicate)
            } else {
                Ok(())
            }
        }
    }

    /// How far from the highest the next packet is: mostly near, sometimes at the window's edge,
    /// rarely far ahead.
    fn step() -> impl Strategy<Value = i64> {
        let width = WINDOW_PACKETS as i64;
        prop_oneof![
            8 => -70_i64..70,
            4 => -width - 70..-width + 70,
            2 => -2 * width..2 * width,
            1 => width - 70..width + 70,
            1 => 1_i64 << 31..1_i64 << 33,
        ]
    }

    fn start() -> impl Strategy<Value = u64> {
        prop_oneof![
            Just(0_u64),
            0..WORD_BITS * 2 * FIRST_WORDS as u64,
            0..3 * WINDOW_PACKETS,
            (1_u64 << 32) - 2 * WINDOW_PACKETS..(1 << 32) + 2 * WINDOW_PACKETS,
            any::<u64>().prop_map(|start| start / 2),
        ]
    }

    proptest! {
        #[test]
        fn agrees_with_a_set(start in start(), steps in prop::collection::vec(step(), 1..400)) {
            let mut window = ReplayWindow::at(start);
            let mut model = Model { accepted: HashSet::from([0, start]), highest: start };
            for step in steps {
                let sequence = model.highest.saturating_add_signed(step);
                let verdict = window.check(sequence);
                prop_assert_eq!(verdict, model.check(sequence), "sequence {}", sequence);
                if verdict.is_ok() {
                    window.mark(sequence);
                    model.accepted.insert(sequence);
                    model.highest = model.highest.max(sequence);
                }
                prop_assert_eq!(window.highest(), model.highest);
            }
        }

        /// Any number within the window, or ahead of it by less than the rest of 2^32, is found.
        #[test]
        fn infers_the_high_half(
            highest in start(),
            offset in prop_oneof![
                Just(0),
                Just((1_u64 << 32) - 1),
                0..3 * WINDOW_PACKETS,
                0_u64..1 << 32,
                (1_u64 << 32) - 3 * WINDOW_PACKETS..1 << 32,
            ],
        ) {
            let bottom = i128::from(highest) - i128::from(WINDOW_PACKETS) + 1;
            let sequence = bottom + i128::from(offset);
            prop_assume!(sequence >= 0);
            let sequence = sequence as u64;
            prop_assert_eq!(ReplayWindow::at(highest).infer(sequence as u32), sequence);
        }
    }

    #[test]
    fn zero_is_never_accepted_and_a_sequence_number_only_once() {
        let mut window = ReplayWindow::new();
        assert_eq!(window.check(0), Err(Replay::Duplicate));
        assert_eq!(window.check(1), Ok(()));
        window.mark(1);
        assert_eq!(window.check(1), Err(Replay::Duplicate));
        window.mark(WINDOW_PACKETS);
        assert_eq!(window.check(0), Err(Replay::TooOld));
        assert_eq!(window.check(1), Err(Replay::Duplicate));
        window.mark(WINDOW_PACKETS + 1);
        assert_eq!(window.check(1), Err(Replay::TooOld));
        assert_eq!(window.check(2), Ok(()));
    }

    #[test]
    fn a_window_takes_room_as_it_needs_it() {
        let mut window = ReplayWindow::new();
        let mut words = vec![window.accepted.len()];
        for sequence in 1..=2 * WINDOW_PACKETS {
            window.mark(sequence);
            if words.last() != Some(&window.accepted.len()) {
                words.push(window.accepted.len());
            }
        }
        assert_eq!(words, [4, 8, 16, 32, 64, 128]);
        assert_eq!(ReplayWindow::at(255).accepted.len(), FIRST_WORDS);
        assert_eq!(ReplayWindow::at(u64::MAX).accepted.len(), WORDS);
    }

    #[test]
    fn a_mark_behind_the_window_changes_nothing() {
        let mut window = ReplayWindow::at(3 * WINDOW_PACKETS);
        window.mark(WINDOW_PACKETS + 1);
        assert_eq!(window.check(2 * WINDOW_PACKETS + 1), Ok(()), "the same bit, one window later");
    }

    #[test]
    fn the_high_half_changes_where_the_low_half_wraps() {
        const SPAN: u64 = 1 << 32;
        let before = ReplayWindow::at(SPAN - 2);
        assert_eq!(before.infer(u32::MAX), SPAN - 1);
        assert_eq!(before.infer(0), SPAN);
        assert_eq!(before.infer((SPAN - 1 - WINDOW_PACKETS) as u32), SPAN - 1 - WINDOW_PACKETS);
        let after = ReplayWindow::at(SPAN + 1);
        assert_eq!(after.infer(u32::MAX), SPAN - 1);
        assert_eq!(after.infer(2), SPAN + 2);
        let aligned = ReplayWindow::at(SPAN + WINDOW_PACKETS - 1);
        assert_eq!(aligned.infer(0), SPAN, "the window's first is the span's first");
        assert_eq!(aligned.infer(u32::MAX), 2 * SPAN - 1);
        let fresh = ReplayWindow::new();
        assert_eq!(fresh.infer(u32::MAX), SPAN - 1, "there is nothing below zero");
        let last = ReplayWindow::at(u64::MAX);
        assert_eq!(last.check(last.infer(0)), Err(Replay::TooOld), "nor above the last");
    }
}
