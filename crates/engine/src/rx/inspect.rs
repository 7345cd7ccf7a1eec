//! The contents of an opened packet, and the decisions that follow.

use weft_packet::{ecn, ethernet, probe, vxlan};
use weft_path::{EngineEvent, Vni};

use super::merger::OpenedFrame;
use crate::ports::device::Env;
use crate::stats::counters::{DropReason, Work};
use crate::tables::state::{Inbound, State};

/// Counts a datagram that is dropped: of the peer whose SA `inbound` is too, unless it bears no SA's SPI.
#[cold]
pub(crate) fn note_refused<F, R>(
    state: &State,
    env: &Env<'_, F, R>,
    inbound: Option<&Inbound>,
    reason: DropReason,
) {
    env.counters.dropped(reason, 1);
    let is_its = !matches!(reason, DropReason::Malformed | DropReason::UnknownSpi);
    if let Some(inbound) = inbound.filter(|_| is_its) {
        state.note_dropped(inbound.peer, 1);
    }
}

/// The contents of an authentic packet.
#[derive(Debug)]
pub(crate) enum Inside {
    /// A frame for the TAP device.
    Frame(OpenedFrame),
    /// A probe: its number, its MTU in bytes, whether it is of a candidate.
    Probe(u64, u16, bool),
    /// Nothing: a dummy.
    Nothing,
}

/// Looks into a packet that has been opened in place, from `start` of the arena on, and brings the frame's
/// congestion mark up to the outer header's. Says nothing to anybody: the packet may yet turn out to be a
/// repetition.
#[inline(always)]
pub(crate) fn inspect(
    state: &State,
    inbound: &Inbound,
    (datagram, start): (&mut [u8], usize),
    tos: u8,
) -> Result<Inside, DropReason> {
    let Some(inner) = inbound.key.parse(datagram)? else { return Ok(Inside::Nothing) };
    let frame = &datagram[inner.frame.clone()];
    if inner.vxlan.vni == Vni::PROBE.0 {
        return probe_inside(inner.dst_port, frame);
    }
    if inner.dst_port != vxlan::PORT {
        return Err(DropReason::BadInner);
    }
    let network = state.networks.number_of(inner.vxlan.vni).ok_or(DropReason::UnknownNetwork)?;
    let source = frame.get(6..12).and_then(<[u8]>::first_chunk).ok_or(DropReason::BadInner)?;
    if frame.len() < ethernet::LEN {
        return Err(DropReason::BadInner);
    }
    // An endpoint of another network counts as nothing here.
    let owner = state.peer_of(network.key(*source));
    if owner != Some(inbound.peer) {
        return Err(source_refused(owner));
    }
    ecn::decapsulate(&mut datagram[inner.frame.clone()], tos)
        .map_err(|_| DropReason::CeOverNotEct)?;
    Ok(Inside::Frame(OpenedFrame {
        at: (start + inner.frame.start) as u32..(start + inner.frame.end) as u32,
        network,
        checksum: inner.vxlan.rco.into(),
        told_mtu: state.narrow_mtu(inbound.peer),
    }))
}

/// Why a frame is refused whose sender does not live at the peer that sealed it. One that lives at no
/// peer may be this host's own container by its address, and nothing could be sent back to it.
#[cold]
const fn source_refused(owner: Option<u32>) -> DropReason {
    if owner.is_some() { DropReason::ForeignSource } else { DropReason::UnannouncedSource }
}

#[cold]
fn probe_inside(port: u16, frame: &[u8]) -> Result<Inside, DropReason> {
    let candidate = match port {
        vxlan::PORT => false,
        vxlan::PROBE_PORT => true,
        _ => return Err(DropReason::BadInner),
    };
    let (probe, mtu) = probe::parse(frame).ok_or(DropReason::BadInner)?;
    Ok(Inside::Probe(probe, mtu, candidate))
}

/// Counts and reports a packet without a frame.
#[cold]
pub(crate) fn noted<F, R>(
    state: &State,
    env: &Env<'_, F, R>,
    inbound: &Inbound,
    inside: &Inside,
) -> Result<(), DropReason> {
    let &Inside::Probe(probe, mtu, candidate) = inside else {
        env.counters.did(Work::Dummies, 1);
        return Ok(());
    };
    let peer = state.peers.get(inbound.peer).ok_or(DropReason::UnknownSpi)?.id;
    let path = state.paths.get(inbound.path).ok_or(DropReason::UnknownSpi)?.id;
    env.counters.did(Work::ProbesReceived, 1);
    (env.events)(EngineEvent::ProbeReceived { peer, path, probe, mtu, candidate });
    Ok(())
}
