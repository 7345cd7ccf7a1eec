//! Answers to packets that are longer than is carried.

use std::io::IoSlice;
use std::time::Instant;

use weft_packet::toobig::{self, NoAnswer};
use weft_packet::vnet;

use crate::ports::device::{Env, FrameSink};
use crate::rate_limit::PerSecond;
use crate::stats::counters::Work;

/// Over-long packets that are answered with ICMP in one second.
pub const TOO_LONG_ANSWERS_PER_S: u32 = 1_000;

/// Tells senders the size that fits, within a rate limit.
#[derive(Debug)]
pub(crate) struct TooLongAnswers(PerSecond);

impl TooLongAnswers {
    pub(crate) const fn new() -> Self {
        Self(PerSecond::new(TOO_LONG_ANSWERS_PER_S))
    }

    /// Tells the sender of a frame that packets of at most `mtu` bytes fit, and counts that.
    ///
    /// # Errors
    /// The frame is none that may be answered.
    pub(crate) fn answer<F: FrameSink, R>(
        &mut self,
        env: &Env<'_, F, R>,
        frame: &[u8],
        mtu: usize,
    ) -> Result<(), NoAnswer> {
        let mut answer = [0; toobig::FRAME_LEN_MAX];
        let told = u16::try_from(mtu).unwrap_or(u16::MAX);
        let len = toobig::write(&mut answer, frame, told)?;
        if !self.0.allow(Instant::now()) {
            env.counters.did(Work::TooLongUnanswered, 1);
            return Ok(());
        }
        let vnet = [0; vnet::LEN];
        if env.tap.send(&[IoSlice::new(&vnet), IoSlice::new(&answer[..len])]).is_ok() {
            env.counters.did(Work::TooLongAnswered, 1);
        }
        Ok(())
    }
}
