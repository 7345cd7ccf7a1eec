//! From the wire to the TUN device: find peer and key, open in place, merge, write. Other packets than data
//! are handed on.

use std::net::{IpAddr, SocketAddr};
use std::ops::Range;

use weft_crypto::ovpn::OpenError;
use weft_io::udp::RecvBatch;
use weft_openvpn::data::{self, Payload, PeerNumber};
use weft_openvpn::{KeyId, Opcode};
use weft_packet::ethernet;
use weft_packet::split::FrameChecksum;

use super::framed;
use super::keys::{Key, Opening};
use super::peers::{Peer, Received};
use super::transmitter::{DeviceEnv, Field, address};
use super::transport::FRAME_PREFIX_LEN;
use super::{Event, Shared, Telling};
use crate::ports::socket_buckets::RUN_MESSAGES_MAX;
use crate::rx::batch::{datagrams, each_message};
use crate::rx::merger::{Merger, OpenedFrame};
use crate::stats::counters::{DropReason, Work};
use crate::tables::networks::NetworkNumber;
use crate::tables::sa::ovpn_refused;

/// The receiving half of a device's worker.
#[derive(Debug)]
pub(super) struct Receiver {
    pub(super) batch: RecvBatch,
    merger: Merger,
    moves: Moves,
}

/// Peers of one batch that have moved, at most: one for each message. The next packet of others tells of them.
pub(super) const MOVES_MAX: usize = RUN_MESSAGES_MAX;

/// The peers of a batch that have moved: their packets come from another address than packets to them go to, or to
/// another address of ours than they leave from.
#[derive(Debug, Default)]
struct Moves {
    count: usize,
    list: [Option<Moved>; MOVES_MAX],
}

impl Moves {
    /// The last packet of a peer says where it is.
    #[cold]
    fn note(&mut self, moved: Moved) {
        let is_its = |known: &&mut Option<Moved>| known.is_some_and(|it| it.number == moved.number);
        if let Some(known) = self.list[..self.count].iter_mut().find(is_its) {
            *known = Some(moved);
        } else if let Some(free) = self.list.get_mut(self.count) {
            *free = Some(moved);
            self.count += 1;
        }
    }

    fn take(&mut self) -> Option<Moved> {
        self.count = self.count.checked_sub(1)?;
        self.list[self.count].take()
    }
}

/// A peer that is elsewhere.
#[derive(Clone, Copy, Debug)]
pub(super) struct Moved {
    pub(super) index: u32,
    /// The peer's own: its index may be another's by the time that this is looked at.
    pub(super) number: u64,
    /// Its address.
    pub(super) source: SocketAddr,
    /// The address of ours that it sends to, if the socket tells.
    pub(super) local: Option<IpAddr>,
}

/// A received packet's metadata.
#[derive(Clone, Copy)]
pub(super) struct Arrival {
    /// The sender's address, over UDP.
    pub(super) source: SocketAddr,
    /// The address of ours that it came to, if the socket tells.
    pub(super) local: Option<IpAddr>,
    /// The transport's number.
    pub(super) transport: u16,
    /// Over a connection, whose other end cannot move.
    pub(super) connected: bool,
    /// By the device's clock.
    pub(super) now_ms: u64,
}

/// The key of the last packet: most packets come many on one key. It is released before any write, so that
/// the reader of a packet finds it counted.
struct Held<'a> {
    index: u32,
    peer: &'a Peer,
    key: &'a Key,
    opening: Opening<'a>,
    /// An address inside that its packets may come from, as was found before.
    allowed: Option<IpAddr>,
    /// From the peer since it is held.
    received: Received,
}

impl Drop for Held<'_> {
    /// Counts once for all packets.
    fn drop(&mut self) {
        self.peer.counts.received(self.received);
    }
}

/// The kind of an accepted packet.
enum Opened {
    /// An IP packet: the range of the frame made of it, and the longest IP packet to its sender, in bytes.
    Frame(Range<usize>, u16),
    /// A sign of life.
    Ping,
    /// Its sender leaves.
    Exit,
    /// Of the control channel.
    Control,
}

impl Receiver {
    pub(super) fn new(tcp: bool, udp: bool) -> Self {
        let mut merger = Merger::new();
        merger.set_merging(tcp, udp);
        Self { batch: RecvBatch::new(), merger, moves: Moves::default() }
    }

    /// How many messages the next batch may have.
    pub(super) const fn messages_max() -> usize {
        RUN_MESSAGES_MAX
    }

    /// Whether a peer of the batch has moved.
    #[inline]
    pub(super) const fn has_moves(&self) -> bool {
        self.moves.count > 0
    }

    /// A peer that has moved, and where to: the worker is to write it down before it writes the packets.
    pub(super) fn take_moved(&mut self) -> Option<Moved> {
        self.moves.take()
    }

    /// Works through the batch. Its packets wait for [`Self::write`], but for those that leave no room for others.
    pub(super) fn handle_batch(
        &mut self,
        shared: &Shared,
        env: &DeviceEnv<'_>,
        telling: &Telling,
        (transport, now_ms): (u16, u64),
    ) {
        let Self { batch, merger, moves } = self;
        let mut held = None;
        let (messages, datagrams) = each_message(batch, env.counters, |batch, index, message| {
            let arrival = Arrival {
                source: message.source,
                local: batch.destination(index),
                transport,
                connected: false,
                now_ms,
            };
            for range in datagrams(message) {
                let arena = batch.buffer_mut();
                take(shared, env, telling, arrival, (arena, range), &mut held, merger, moves);
            }
        });
        env.counters.did(Work::MessagesReceived, messages);
        env.counters.did(Work::DatagramsReceived, datagrams);
    }

    /// Writes the batch to the TUN device.
    pub(super) fn write(&mut self, env: &DeviceEnv<'_>) {
        self.merger.flush(self.batch.buffer(), env);
    }

    /// Works through the whole packets among the bytes from a connection. Returns how many bytes that is;
    /// `None` if it is not our framing.
    pub(super) fn handle_stream(
        &mut self,
        shared: &Shared,
        env: &DeviceEnv<'_>,
        telling: &Telling,
        arrival: Arrival,
        arena: &mut [u8],
    ) -> Option<usize> {
        let Self { merger, moves, .. } = self;
        let (mut at, mut count, mut held) = (0, 0, None);
        let mut is_whole = true;
        while let Some(length) = arena[at..].first_chunk().map(|length| u16::from_be_bytes(*length))
        {
            let start = at + FRAME_PREFIX_LEN;
            let range = start..start + usize::from(length);
            is_whole = length > 0;
            if !is_whole || arena.len() < range.end {
                break;
            }
            if is_data_v1(arena[start]) {
                is_whole = false;
                break;
            }
            at = range.end;
            count += 1;
            take(shared, env, telling, arrival, (arena, range), &mut held, merger, moves);
        }
        env.counters.did(Work::DatagramsReceived, count);
        drop(held);
        merger.flush(arena, env);
        is_whole.then_some(at)
    }
}

/// Data without a peer id, which no device takes.
fn is_data_v1(first: u8) -> bool {
    matches!(Opcode::parse(first), Ok((Opcode::DataV1, _)))
}

/// One packet.
#[expect(clippy::too_many_arguments, reason = "a worker's parts, borrowed apart")]
#[inline]
fn take<'a>(
    shared: &'a Shared,
    env: &DeviceEnv<'_>,
    telling: &Telling,
    arrival: Arrival,
    (arena, range): (&mut [u8], Range<usize>),
    held: &mut Option<Held<'a>>,
    merger: &mut Merger,
    moves: &mut Moves,
) {
    let start = range.start;
    match open(shared, telling, &mut arena[range.clone()], arrival, held, moves) {
        Ok(Opened::Frame(at, room)) => {
            let frame = OpenedFrame {
                at: (start + at.start) as u32..(start + at.end) as u32,
                network: NetworkNumber::FIRST,
                checksum: FrameChecksum::Complete,
                told_mtu: Some(room),
            };
            if !merger.file(arena, &frame) {
                *held = None;
                merger.flush_for(arena, &frame, env);
            }
        }
        Ok(Opened::Ping) => env.counters.did(Work::Keepalives, 1),
        Ok(Opened::Exit) => {}
        Ok(Opened::Control) => {
            let Arrival { source, local, transport, .. } = arrival;
            let packet = arena[range].to_vec();
            telling.tell(Event::Packet { source, local, transport, packet });
        }
        Err(reason) => env.counters.dropped(reason, 1),
    }
}

/// Opens one packet in place.
#[inline]
fn open<'a>(
    shared: &'a Shared,
    telling: &Telling,
    packet: &mut [u8],
    arrival: Arrival,
    held: &mut Option<Held<'a>>,
    moves: &mut Moves,
) -> Result<Opened, DropReason> {
    let word = *packet.first_chunk::<4>().ok_or(DropReason::Malformed)?;
    let key_id = match Opcode::parse(word[0]) {
        Ok((Opcode::DataV2, key_id)) => key_id,
        _ if is_data_v1(word[0]) => return Err(DropReason::Malformed),
        // The reader of the control channel interprets opcodes.
        _ => return Ok(Opened::Control),
    };
    let id = u32::from_be_bytes([0, word[1], word[2], word[3]]);
    let index = match (PeerNumber::new(id), &*held) {
        (Some(_), Some(held)) if held.peer.id == id => Some(held.index),
        (Some(number), _) => shared.peers.with_id(number.get()),
        (None, _) => shared.peers.at(arrival.source),
    };
    let index = index.ok_or(DropReason::UnknownSpi)?;
    let Held { peer, key, opening, allowed, received, .. } =
        hold(shared, telling, held, (index, key_id), arrival.now_ms)
            .ok_or(DropReason::UnknownSpi)?;
    let plain = opening.open(packet).map_err(|error| refused(telling, peer, key, error))?;
    peer.heard(arrival.now_ms);
    if !arrival.connected && is_elsewhere(peer, &arrival) {
        let Arrival { source, local, .. } = arrival;
        moves.note(Moved { index, number: peer.number, source, local });
    }
    let inside = &packet[plain.clone()];
    received.outside.count(packet.len());
    if *inside == data::PING {
        return Ok(Opened::Ping);
    }
    received.inside.count(inside.len());
    let Some(frame_at) = frame_of(packet, plain.clone()) else {
        let start = plain.start.max(ethernet::LEN);
        let inside = packet.get(start..start + plain.len()).unwrap_or_default();
        return no_frame(telling, peer, inside);
    };
    let frame = &packet[frame_at.clone()];
    let source = address(frame, Field::Source).ok_or(DropReason::BadInner)?;
    if *allowed != Some(source) {
        if !shared.peers.may_come_from(index, source) {
            return Err(DropReason::ForeignSource);
        }
        *allowed = Some(source);
    }
    let over_ipv6 = !arrival.connected && arrival.source.is_ipv6();
    Ok(Opened::Frame(frame_at, shared.room(over_ipv6)))
}

/// Whether a peer has moved: packets to it go to another address than this packet came from, or leave from another
/// address of ours than it came to. The kernel's device follows both, and reports the first.
#[inline]
fn is_elsewhere(peer: &Peer, arrival: &Arrival) -> bool {
    let Some(known) = peer.remote else { return true };
    let local = arrival.local.filter(|local| local.is_ipv4() == arrival.source.is_ipv4());
    known.address() != arrival.source || local.is_some_and(|local| known.source() != Some(local))
}

/// Why a packet was not opened. Of a key that has been tried with too many forgeries it is told that it is
/// used up: it opens nothing more.
#[cold]
pub(super) fn refused(telling: &Telling, peer: &Peer, key: &Key, error: OpenError) -> DropReason {
    if error == OpenError::TooManyFailures {
        telling.used_up(peer.id, key);
    }
    ovpn_refused(error)
}

/// Makes a frame of an opened packet. The Ethernet header overwrites the packet's header and, in the classic
/// layout, its tag. `None` if it is not an IP packet.
#[inline]
fn frame_of(packet: &mut [u8], plain: Range<usize>) -> Option<Range<usize>> {
    // The header of an epoch's packet is a little short; behind the plaintext is the tag's place.
    let start = plain.start.max(ethernet::LEN);
    let end = start + plain.len();
    if start > plain.start {
        packet.copy_within(plain, start);
    }
    let (room, inside) = packet.split_at_mut_checked(start)?;
    let room = &mut room[start - ethernet::LEN..];
    framed::write_ethernet(room, inside).then_some(start - ethernet::LEN..end)
}

/// What an authentic packet says that is no IP packet. Clients of OpenVPN before 2.6 say so that they leave.
#[cold]
fn no_frame(telling: &Telling, peer: &Peer, inside: &[u8]) -> Result<Opened, DropReason> {
    match Payload::of(inside) {
        Payload::Occ(data::OCC_EXIT) => {
            telling.leaves(peer);
            Ok(Opened::Exit)
        }
        _ => Err(DropReason::BadInner),
    }
}

/// The key with this id, its window for this thread alone.
#[inline]
fn hold<'h, 'a>(
    shared: &'a Shared,
    telling: &Telling,
    held: &'h mut Option<Held<'a>>,
    (index, key_id): (u32, KeyId),
    now_ms: u64,
) -> Option<&'h mut Held<'a>> {
    if held.as_ref().is_none_or(|held| held.index != index || held.key.id != key_id) {
        // Never two at once: another worker may want them the other way round.
        *held = None;
        let peer = shared.peers.get(index)?;
        let key = peer.keys.opening(key_id)?;
        if key.is_opened_out() {
            telling.used_up(peer.id, key);
        }
        let (opening, received) = (key.hold(now_ms), Received::default());
        *held = Some(Held { index, peer, key, opening, allowed: None, received });
    }
    held.as_mut()
}
