//! Pipelined open of a batch before its turn. Packets are opened, inspected and filed for merging at once. The
//! replay check, and all that follows from acceptance, happens in turn.

use weft_crypto::ReplayWindow;

use super::Receiver;
use crate::ports::device::{Env, FrameSink};
use crate::rx::batch::{datagrams, each_message};
use crate::rx::inspect::{Inside, note_refused};
use crate::rx::merger::OpenedFrame;
use crate::rx::open::{Opened, Windows, open, settle};
use crate::stats::counters::Work;
use crate::tables::sa::refused;
use crate::tables::state::{Inbound, State};

/// Authentic packets of one batch, and the window by which they were opened.
#[derive(Debug, Default)]
pub(crate) struct OpenedBatch {
    packets: Vec<Packet>,
    /// As it was when the batch met its SA.
    window: ReplayWindow,
    messages: u64,
    datagrams: u64,
    /// The number of `packets` that are filed for merging, or hold no frame.
    filed: usize,
}

#[derive(Debug)]
struct Packet {
    /// The message that it came in.
    message: usize,
    /// The inbound SA's number.
    inbound: u32,
    opened: Opened,
    is_repeated: bool,
}

impl Packet {
    fn frame(&self) -> Option<&OpenedFrame> {
        match &self.opened.inside {
            Ok(Inside::Frame(frame)) if !self.is_repeated => Some(frame),
            _ => None,
        }
    }
}

/// The inbound SA of the last datagram, with its number, and the window that it had when the batch met it.
struct Met<'a, 'w> {
    of: Option<(u32, &'a Inbound)>,
    window: &'w mut ReplayWindow,
}

impl<'a> Windows<'a> for Met<'a, '_> {
    #[inline]
    fn find(&mut self, state: &'a State, spi: u32) -> Option<(&'a Inbound, &ReplayWindow)> {
        let inbound = match self.of {
            Some((_, same)) if same.spi == spi => same,
            _ => {
                let number = state.inbound_of(spi)?;
                let inbound = state.inbound.get(number)?;
                self.window.clone_from(&inbound.hold());
                self.of = Some((number, inbound));
                inbound
            }
        };
        Some((inbound, &*self.window))
    }
}

impl Receiver {
    /// Opens the batch's packets. Nothing is written and no window told: [`Self::commit`] does it.
    pub(crate) fn open_pipelined<F, R>(&mut self, state: &State, env: &Env<'_, F, R>) {
        // Made by the first batch, for a thread that opens none before its turn needs none.
        let mut opened_batch = self.opened_batch.take().unwrap_or_default();
        let OpenedBatch { packets, window, .. } = &mut *opened_batch;
        packets.clear();
        let mut met = Met { of: None, window };
        let counted = each_message(&mut self.batch, env.counters, |batch, index, message| {
            for range in datagrams(message) {
                let start = range.start;
                let datagram = (&mut batch.buffer_mut()[range], start);
                let opened = open(state, env, datagram, message.tos, &mut met);
                match (opened, met.of) {
                    (Ok(Some(opened)), Some((number, _))) => {
                        let (message, inbound) = (index, number);
                        packets.push(Packet { message, inbound, opened, is_repeated: false });
                    }
                    (Ok(_), _) => {}
                    (Err(reason), of) => {
                        note_refused(state, env, of.map(|(_, inbound)| inbound), reason);
                    }
                }
            }
        });
        (opened_batch.messages, opened_batch.datagrams) = counted;
        opened_batch.filed = 0;
        for packet in &opened_batch.packets {
            if let Some(frame) = packet.frame()
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
        env.counters.did(Work::MessagesReceived, opened_batch.messages);
        env.counters.did(Work::DatagramsReceived, opened_batch.datagrams);
        if self.accept(state, env, &mut opened_batch.packets) {
            // Some of the filed frames must not be written.
            self.merger.forget();
            opened_batch.filed = 0;
        }
        for packet in &opened_batch.packets[opened_batch.filed..] {
            if let Some(frame) = packet.frame() {
                self.merger.push(self.batch.buffer_mut(), frame, env);
            }
        }
        self.merger.flush(self.batch.buffer(), env);
        self.batch_size.note(opened_batch.messages, opened_batch.datagrams);
        self.opened_batch = Some(opened_batch);
    }

    /// Asks the windows; whether any frame is a repetition.
    fn accept<F, R>(&mut self, state: &State, env: &Env<'_, F, R>, packets: &mut [Packet]) -> bool {
        let mut is_any_repeated = false;
        let mut held: Option<(u32, &Inbound, _)> = None;
        let (mut message, mut newest) = (0, None);
        for packet in packets {
            if packet.message != message {
                self.check_message(state, env, message, newest.take());
                message = packet.message;
            }
            if held.as_ref().is_none_or(|(number, ..)| *number != packet.inbound) {
                // Never two at once.
                held = None;
                // It stays while the state is read.
                let Some(inbound) = state.inbound.get(packet.inbound) else { continue };
                held = Some((packet.inbound, inbound, inbound.hold()));
            }
            let Some((_, inbound, window)) = &mut held else { continue };
            let before = window.highest();
            if let Err(replay) = window.accept(packet.opened.sequence) {
                note_refused(state, env, Some(*inbound), refused(replay.into()));
                packet.is_repeated = true;
                is_any_repeated |= packet.opened.inside.is_ok();
                continue;
            }
            if window.highest() > before {
                newest = Some((inbound.path, inbound.lane));
            }
            if let Err(reason) = settle(state, env, inbound, &packet.opened) {
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
            self.sources.check(state, env, lane, message.source);
        }
    }
}
