//! Opening of a datagram, in place, by the SA that it names.
//!
//! It is the same for packets that are settled at once and for those that are opened before their turn. These
//! differ in the window by which they are opened ([`Windows`]). A data channel device finds keys by peers and
//! not by SAs, and some of its packets are not data: it opens them itself (`dco/receiver.rs`).

use weft_crypto::ReplayWindow;
use weft_packet::esp;
use weft_path::EngineEvent;

use super::inspect::{Inside, inspect, noted};
use crate::ports::device::Env;
use crate::stats::counters::{DropReason, Work};
use crate::tables::state::{Inbound, State};

/// The inbound SAs of a batch. Most packets come many on one, so the last one is kept.
pub(crate) trait Windows<'a> {
    /// The SA with this SPI, and the window by which its packets are opened.
    fn find(&mut self, state: &'a State, spi: u32) -> Option<(&'a Inbound, &ReplayWindow)>;
}

/// A packet that has proven authentic.
#[derive(Debug)]
pub(crate) struct Opened {
    /// Its sequence number, or packet id. Whether it repeats another one is for its SA's window to say.
    pub(crate) sequence: u64,
    /// Bytes of its plaintext.
    pub(crate) plain_len: usize,
    pub(crate) inside: Result<Inside, DropReason>,
}

/// Opens the datagram that begins at `start` of the batch's buffer. `tos` is that of the outer header. `None`
/// for a keepalive.
#[inline]
pub(crate) fn open<'a, F, R>(
    state: &'a State,
    env: &Env<'_, F, R>,
    (datagram, start): (&mut [u8], usize),
    tos: u8,
    windows: &mut impl Windows<'a>,
) -> Result<Option<Opened>, DropReason> {
    if *datagram == [esp::KEEPALIVE] {
        env.counters.did(Work::Keepalives, 1);
        return Ok(None);
    }
    let header = esp::Header::parse(datagram).map_err(|_| DropReason::Malformed)?;
    let (inbound, window) = windows.find(state, header.spi).ok_or(DropReason::UnknownSpi)?;
    let (sequence, plain_len) = inbound.key.open(window, datagram)?;
    let inside = inspect(state, inbound, (datagram, start), tos);
    Ok(Some(Opened { sequence, plain_len, inside }))
}

/// All that follows from a packet that its SA's window, which is held, has accepted: counts and events. Its
/// frame is still to be written.
#[inline]
pub(crate) fn settle<F, R>(
    state: &State,
    env: &Env<'_, F, R>,
    inbound: &Inbound,
    opened: &Opened,
) -> Result<(), DropReason> {
    let lane = state.lane(inbound.path, inbound.lane);
    if let Some(lane) = lane {
        lane.hear();
    }
    let headers_len = inbound.key.headers_len();
    inbound.counters.add(1, opened.plain_len.saturating_sub(headers_len) as u64);
    if inbound.is_first_use() {
        (env.events)(EngineEvent::InboundFirstUse { spi: inbound.spi });
    }
    match &opened.inside {
        Ok(Inside::Frame(_)) => {
            if let Some(lane) = lane {
                lane.carry();
            }
            Ok(())
        }
        Ok(inside) => noted(state, env, inbound, inside),
        Err(reason) => Err(*reason),
    }
}
