//! Pipelined open of a batch before its turn. Packets are opened, inspected and filed for merging at once. The
//! replay check, and all that follows from acceptance, happens in turn.

use weft_crypto::ReplayWindow;
use weft_packet::esp;

use super::Receiver;
use crate::ports::device::{Env, FrameSink};
use crate::rx::inspect::{Inside, accepted, carried, inspect, note_refused, noted};
use crate::rx::merger::OpenedFrame;
use crate::stats::counters::{DropReason, Work};
use crate::tables::sa::refused;
use crate::tables::state::{Inbound, State};

/// Authentic packets of one batch, and the window by which they were opened.
#[derive(Debug, Default)]
pub(crate) struct OpenedBatch {
    opened: Vec<Opened>,
    /// As it was when the batch met its SA.
    window: ReplayWindow,
    messages: usize,
    datagrams: u64,
    /// The number of `opened` that are filed for merging, or hold no frame.
    filed: usize,
}

/// A packet that has proven authentic.
#[derive(Debug)]
struct Opened {
    /// The message that it came in.
    message: usize,
    /// The inbound SA's number.
    inbound: u32,
    sequence: u64,
    plain_len: usize,
    inside: Result<Inside, DropReason>,
    is_repeated: bool,
}

impl Opened {
    fn frame(&self) -> Option<&OpenedFrame> {
        match &self.inside {
            Ok(Inside::Frame(frame)) if !self.is_repeated => Some(frame),
            _ => None,
        }
    }
}

impl Receiver {
    /// Opens the batch's packets. Nothing is written and no window told: [`Self::commit`] does it.
    pub(crate) fn open_pipelined<F, R>(&mut self, state: &State, env: &Env<'_, F, R>) {
        // Made by the first batch, for a thread that opens none opened_batch needs none.
        let mut opened_batch = self.opened_batch.take().unwrap_or_default();
        opened_batch.opened.clear();
        (opened_batch.messages, opened_batch.datagrams) = (self.batch.len(), 0);
        let mut of = None;
        for index in 0..opened_batch.messages {
            let Some(message) = self.batch.message(index) else { break };
            if message.truncated {
                env.counters.dropped(DropReason::Truncated, 1);
                continue;
            }
            if message.range.is_empty() {
                opened_batch.datagrams += 1;
                env.counters.dropped(DropReason::Malformed, 1);
                continue;
            }
            for start in message.range.clone().step_by(message.segment) {
                opened_batch.datagrams += 1;
                let range = start..(start + message.segment).min(message.range.end);
                let datagram = (&mut self.batch.buffer_mut()[range], start);
                let opened =
                    open(state, env, datagram, message.tos, &mut of, &mut opened_batch.window);
                match opened {
                    Ok(Some(mut opened)) => {
                        opened.message = index;
                        opened_batch.opened.push(opened);
                    }
                    Ok(None) => {}
                    Err(reason) => note_refused(state, env, of.map(|(_, inbound)| inbound), reason),
                }
            }
        }
        opened_batch.filed = 0;
        for opened in &opened_batch.opened {
            if let Some(frame) = opened.frame()
                && !self.merger.file(self.batch.buffer_mut(), frame)
            {
                break;
            }
            opened_batch.filed += 1;
        }
        self.opened_batch = Some(opened_batch);
    }

    /// In turn: tells the windows, and writes what they accept to the TAP device.
    pub(crate) fn commit<F: FrameSink, R>(&mut self, state: &State, env: &Env<'_, F, R>) {
        let Some(mut opened_batch) = self.opened_batch.take() else { return };
        env.counters.did(Work::MessagesReceived, opened_batch.messages as u64);
        env.counters.did(Work::DatagramsReceived, opened_batch.datagrams);
        if self.accept(state, env, &mut opened_batch.opened) {
            // Some of the filed frames must not be written.
            self.merger.forget();
            opened_batch.filed = 0;
        }
        for opened in &opened_batch.opened[opened_batch.filed..] {
            if let Some(frame) = opened.frame() {
                self.merger.push(self.batch.buffer_mut(), frame, env);
            }
        }
        self.merger.flush(self.batch.buffer(), env);
        self.batch_size.note(opened_batch.messages as u64, opened_batch.datagrams);
        self.opened_batch = Some(opened_batch);
    }

    /// Asks the windows; whether any frame is a repetition.
    fn accept<F, R>(&mut self, state: &State, env: &Env<'_, F, R>, all: &mut [Opened]) -> bool {
        let mut is_any_repeated = false;
        let mut held: Option<(u32, &Inbound, _)> = None;
        let (mut message, mut newest) = (0, None);
        for opened in all {
            if opened.message != message {
                self.check_message(state, env, message, newest.take());
                message = opened.message;
            }
            if held.as_ref().is_none_or(|(number, ..)| *number != opened.inbound) {
                // Never two at once.
                held = None;
                // It stays while the state is read.
                let Some(inbound) = state.inbound.get(opened.inbound) else { continue };
                held = Some((opened.inbound, inbound, inbound.hold()));
            }
            let Some((_, inbound, window)) = &mut held else { continue };
            let before = window.highest();
            if let Err(replay) = window.accept(opened.sequence) {
                note_refused(state, env, Some(*inbound), refused(replay.into()));
                opened.is_repeated = true;
                is_any_repeated |= opened.inside.is_ok();
                continue;
            }
            if window.highest() > before {
                newest = Some((inbound.path, inbound.lane));
            }
            accepted(state, env, inbound, opened.plain_len);
            let settled = match &opened.inside {
                Ok(Inside::Frame(..)) => {
                    carried(state, inbound);
                    Ok(())
                }
                Ok(inside) => noted(state, env, inbound, inside),
                Err(reason) => Err(*reason),
            };
            if let Err(reason) = settled {
                note_refused(state, env, Some(*inbound), reason);
            }
        }
        self.check_message(state, env, message, newest);
        is_any_repeated
    }

    fn check_message<F, R>(
        &mut self,
        state: &State,
        env: &Env<'_, F, R>,
        message: usize,
        newest: Option<(u32, u16)>,
    ) {
        if let Some(lane) = newest
            && let Some(message) = self.batch.message(message)
        {
            self.check_source(state, env, lane, message.source);
        }
    }
}

/// Opens one datagram. `of` is the SA of the last one, `window` its window as it was then.
#[inline]
fn open<'a, F, R>(
    state: &'a State,
    env: &Env<'_, F, R>,
    (datagram, start): (&mut [u8], usize),
    tos: u8,
    of: &mut Option<(u32, &'a Inbound)>,
    window: &mut ReplayWindow,
) -> Result<Option<Opened>, DropReason> {
    if *datagram == [esp::KEEPALIVE] {
        env.counters.did(Work::Keepalives, 1);
        return Ok(None);
    }
    let header = esp::Header::parse(datagram).map_err(|_| DropReason::Malformed)?;
    let (number, inbound) = match *of {
        Some(same) if same.1.spi == header.spi => same,
        _ => {
            let number = state.inbound_of(header.spi).ok_or(DropReason::UnknownSpi)?;
            let inbound = state.inbound.get(number).ok_or(DropReason::UnknownSpi)?;
            window.clone_from(&inbound.hold());
            *of = Some((number, inbound));
            (number, inbound)
        }
    };
    let (sequence, plain_len) = inbound.key.open_pipelined(window, datagram)?;
    let inside = inspect(state, inbound, (datagram, start), tos);
    Ok(Some(Opened {
        message: 0,
        inbound: number,
        sequence,
        plain_len,
        inside,
        is_repeated: false,
    }))
}
