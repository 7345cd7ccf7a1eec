//! Round robin among queues that one thread reads.

use std::io;
use std::mem;

/// Queues that have their turn before other work is done; the other ready queues wait for the next pass, in
/// which they come first.
const TURNS_MAX: usize = 2;

/// The order in which at most `N` queues with input take turns.
#[derive(Debug)]
pub(crate) struct RoundRobin<const N: usize> {
    ready: [bool; N],
    count: usize,
    /// Of the first queue; those of the others follow.
    first_token: u64,
    /// The queue whose turn is first.
    next: usize,
}

impl<const N: usize> RoundRobin<N> {
    /// For `count` empty queues, known to the poller by this token and the next ones.
    pub(crate) fn new(count: usize, first_token: u64) -> Self {
        debug_assert!(count <= N);
        Self { ready: [false; N], count: count.min(N), first_token, next: 0 }
    }

    /// Notes that the queue with this token has something; false if it is none's.
    #[inline]
    pub(crate) fn note_token(&mut self, token: u64) -> bool {
        let number = token.checked_sub(self.first_token).and_then(|it| usize::try_from(it).ok());
        number.is_some_and(|number| self.note_ready(number))
    }

    /// Notes that the queue with this number has something; false if there is none.
    #[inline]
    pub(crate) fn note_ready(&mut self, number: usize) -> bool {
        let ready = self.ready[..self.count].get_mut(number);
        ready.map(|ready| *ready = true).is_some()
    }

    /// As if all had something.
    pub(crate) fn note_all_ready(&mut self) {
        self.ready[..self.count].fill(true);
    }

    /// Whether one has something.
    #[inline]
    pub(crate) fn is_ready(&self) -> bool {
        self.ready.contains(&true)
    }

    /// Forgets which queues are ready: the poller reports them again.
    pub(crate) const fn forget_ready(&mut self) {
        self.ready = [false; N];
    }

    /// Gives [`TURNS_MAX`] of those that have something their turns; the others have theirs when this is
    /// called again. `take` is told the number, and whether no other has anything.
    ///
    /// # Errors
    /// The first that is met.
    #[inline]
    pub(crate) fn take(
        &mut self,
        mut take: impl FnMut(usize, bool) -> io::Result<()>,
    ) -> io::Result<()> {
        let is_alone = self.ready.iter().filter(|ready| **ready).count() <= 1;
        let (first, count) = (self.next, self.count);
        let mut turns = 0;
        for number in (first..count).chain(0..first) {
            if mem::take(&mut self.ready[number]) {
                take(number, is_alone)?;
                self.next = (number + 1) % count;
                turns += 1;
            }
            if turns == TURNS_MAX {
                break;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    const FIRST: u64 = 5;

    #[test]
    fn all_have_had_their_turn_before_any_has_another() {
        let mut round_robin = RoundRobin::<16>::new(16, FIRST);
        round_robin.note_all_ready();
        let mut order = Vec::new();
        while round_robin.is_ready() {
            let mut taken = Vec::new();
            let take = |number, is_alone: bool| {
                assert!(!is_alone);
                taken.push(number);
                Ok(())
            };
            round_robin.take(take).unwrap();
            assert_eq!(taken.len(), TURNS_MAX);
            // These have more.
            if order.len() < 8 {
                assert!(taken.iter().all(|number| round_robin.note_ready(*number)));
            }
            order.extend(taken);
        }
        let mut firsts = order[..16].to_vec();
        firsts.sort_unstable();
        assert_eq!(firsts, (0..16).collect::<Vec<_>>(), "{order:?}");
    }

    #[test]
    fn tokens_are_told_apart_and_who_is_alone_is_told_so() {
        let mut round_robin = RoundRobin::<16>::new(3, FIRST);
        assert!(!round_robin.note_token(FIRST - 1) && !round_robin.note_token(FIRST + 3));
        assert!(!round_robin.is_ready());
        assert!(round_robin.note_token(FIRST + 2) && round_robin.is_ready());
        let mut taken = Vec::new();
        let take = |number, is_alone: bool| {
            taken.push((number, is_alone));
            Ok(())
        };
        round_robin.take(take).unwrap();
        assert!(taken == [(2, true)] && !round_robin.is_ready());
        assert!(round_robin.note_token(FIRST));
        round_robin.forget_ready();
        assert!(!round_robin.is_ready());
        assert!(round_robin.note_token(FIRST));
        let broken = round_robin.take(|_, _| Err(io::ErrorKind::BrokenPipe.into()));
        assert_eq!(broken.unwrap_err().kind(), io::ErrorKind::BrokenPipe);
    }
}
