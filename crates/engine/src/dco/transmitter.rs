//! From the TUN device to the wire: find the peer, cut, seal into the GSO batch, send.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use weft_crypto::ovpn::EPOCH_OVERHEAD_BYTES;
use weft_io::tun::Tun;
use weft_io::udp::Remote;
use weft_openvpn::KeyId;
use weft_openvpn::data::{self, PeerNumber};
use weft_packet::layout::Layout;
use weft_packet::split::{Plan, SplitError};
use weft_packet::vnet::{self, VnetHeader};
use weft_packet::{ethernet, mss};
use weft_path::PathId;

use super::keys::Key;
use super::peers::Peer;
use super::transport::{FRAME_PREFIX_LEN, Transports};
use super::{Shared, Telling};
use crate::ports::device::{Env, GsoSink};
use crate::stats::counters::{DropReason, Work};
use crate::tables::lane::Origin;
use crate::tx::gso_batch::{GsoBatch, GsoKey, GsoTarget};
use crate::tx::too_long::TooLongAnswers;

/// The environment that a device's transmitter uses.
pub(super) type DeviceEnv<'a> = Env<'a, Tun, Transports>;

/// The sending half of a device's worker.
#[derive(Debug)]
pub(super) struct Transmitter {
    gso: GsoBatch,
    answers: TooLongAnswers,
}

impl Transmitter {
    pub(super) fn new(segments_max: usize) -> Self {
        let answers = TooLongAnswers::new();
        Self { gso: GsoBatch::new(segments_max), answers }
    }

    /// Sends the datagrams that still wait; at the end of each batch.
    pub(super) fn flush(&mut self, env: &DeviceEnv<'_>) {
        self.gso.flush(env);
    }

    /// One packet or super-packet as a frame behind its virtio net header.
    pub(super) fn handle_read(
        &mut self,
        shared: &Shared,
        env: &DeviceEnv<'_>,
        telling: &Telling,
        read: &mut [u8],
        now_ms: u64,
    ) {
        env.counters.did(Work::TapReads, 1);
        let Some((vnet, frame)) = read.split_at_mut_checked(vnet::LEN) else {
            return env.counters.dropped(DropReason::BadSuperPacket, 1);
        };
        let Some(vnet) = VnetHeader::parse(vnet) else {
            return env.counters.dropped(DropReason::BadSuperPacket, 1);
        };
        let Some(destination) = address(frame, Field::Destination) else {
            return env.counters.dropped(DropReason::BadSuperPacket, 1);
        };
        let index = shared.peers.towards(destination);
        let Some((index, peer)) = index.and_then(|index| Some((index, shared.peers.get(index)?)))
        else {
            return env.counters.dropped(DropReason::NoEndpoint, 1);
        };
        let mtu = shared.mtu();
        let room = shared.room(is_over_ipv6(peer, env));
        let headers = Layout::parse(frame);
        mss::clamp(frame, &headers, room, (&vnet).into());
        let Some(key) = peer.keys.sealing() else {
            return env.counters.dropped(DropReason::NoPath, 1);
        };
        let planned = |mtu: u16| Plan::with_headers(&vnet, frame, &headers, mtu.into());
        let whole = planned(room);
        // A packet that the device carries, and not every IPv6 path, is sent all the same.
        let is_long = room < mtu && matches!(whole, Err(SplitError::TooLong { .. }));
        match if is_long { planned(mtu) } else { whole } {
            Ok(plan) => {
                let long = if is_long { plan.segments as u64 } else { 0 };
                env.counters.did(Work::LongOverIpv6, long);
                self.seal(env, telling, (index, peer), key, &plan, frame);
                peer.sent(now_ms);
            }
            Err(SplitError::TooLong { mtu, .. }) => self.answer(shared, env, frame, mtu),
            Err(_) => env.counters.dropped(DropReason::BadSuperPacket, 1),
        }
    }

    /// Seals all segments of a plan into GSO batches.
    fn seal(
        &mut self,
        env: &DeviceEnv<'_>,
        telling: &Telling,
        (index, peer): (u32, &Peer),
        key: &Key,
        plan: &Plan,
        frame: &[u8],
    ) {
        let segments = plan.segments as u64;
        let (Some(remote), Some(transport)) = (peer.remote, env.socket.get(peer.transport)) else {
            return env.counters.dropped(DropReason::NoPath, segments);
        };
        let sealing = key.sealing();
        let Ok(mut sealer) = sealing.reserve(segments, first_word(key.id, peer.tx_id)) else {
            // The drop is counted before the event, so that the event's receiver finds it counted.
            env.counters.dropped(DropReason::SaExhausted, segments);
            return telling.spent(peer.id, key);
        };
        let from = Origin { lane: peer.transport, data_port: false, may_cut: false };
        let gso_key = GsoKey { number: index, from, tos: 0 };
        let mtu = (plan.segment_frame_len(0) - ethernet::LEN) as u16;
        let path = PathId(index);
        let target = || GsoTarget { key: gso_key, path, remote, mtu, probe: false };
        let prefix = transport.prefix_len();
        let (mut sealed, mut inside, mut outside) = (0, 0, 0);
        for segment in 0..plan.segments {
            let frame_len = plan.segment_frame_len(segment);
            let packet_len = frame_len - ethernet::LEN;
            let datagram_len = sealing.overhead_len() + packet_len;
            let len = prefix + datagram_len;
            if self.gso.slot(gso_key, len).is_none() {
                self.gso.flush(env);
            }
            let Some(slot) = self.gso.slot(gso_key, len) else {
                env.counters.dropped(DropReason::TooLong, 1);
                continue;
            };
            let (length, datagram) = slot.split_at_mut(prefix);
            write_packet(plan, frame, segment, datagram, sealing.front_len());
            if sealer.seal(datagram, packet_len).is_err() {
                env.counters.dropped(DropReason::SaExhausted, 1);
                continue;
            }
            write_prefix(length, datagram_len);
            self.gso.commit(len, target);
            sealed += 1;
            inside += packet_len as u64;
            outside += datagram_len as u64;
        }
        peer.counts.sent(sealed, inside, outside);
    }

    /// Tells the sender of a packet that the device does not carry.
    #[cold]
    fn answer(&mut self, shared: &Shared, env: &DeviceEnv<'_>, frame: &[u8], mtu: usize) {
        env.counters.dropped(DropReason::TooLong, 1);
        if shared.follow_mtu() {
            // The system has let it through by the new one, and lets the next through.
            return;
        }
        // A packet that may not be answered has been counted above.
        let _ = self.answers.answer(env, frame, mtu);
    }
}

/// Whether a peer's datagrams go over IPv6; over a connection TCP cuts the stream.
#[inline]
fn is_over_ipv6(peer: &Peer, env: &DeviceEnv<'_>) -> bool {
    let by_udp = || env.socket.get(peer.transport).is_some_and(|way| way.prefix_len() == 0);
    peer.remote.as_ref().is_some_and(Remote::is_ipv6) && by_udp()
}

/// Writes a segment's packet behind `front` bytes of `datagram`, which has room for it and for a tag.
///
/// The segment's frame begins with an Ethernet header that has no place on the wire. The bytes in front,
/// which are overwritten afterwards, have room for it, but for two bytes where they are an epoch's.
#[inline]
fn write_packet(plan: &Plan, frame: &[u8], segment: usize, datagram: &mut [u8], front: usize) {
    let start = front.saturating_sub(ethernet::LEN);
    let end = start + plan.segment_frame_len(segment);
    let out = &mut datagram[start..end];
    let header_len = plan.write_header(frame, segment, true, out);
    out[header_len..].copy_from_slice(&frame[plan.payload(segment)]);
    let packet = start + ethernet::LEN..end;
    if packet.start > front {
        datagram.copy_within(packet, front);
    }
}

/// Sends a keepalive, if there is a key to seal it with.
pub(super) fn send_ping(env: &DeviceEnv<'_>, telling: &Telling, peer: &Peer, now_ms: u64) {
    let (Some(key), Some(remote), Some(transport)) =
        (peer.keys.sealing(), peer.remote, env.socket.get(peer.transport))
    else {
        return;
    };
    let mut buffer = [0; FRAME_PREFIX_LEN + EPOCH_OVERHEAD_BYTES + data::PING.len()];
    let (prefix, sealing) = (transport.prefix_len(), key.sealing());
    let datagram_len = sealing.overhead_len() + data::PING.len();
    let slot = &mut buffer[..prefix + datagram_len];
    let (length, datagram) = slot.split_at_mut(prefix);
    datagram[sealing.front_len()..][..data::PING.len()].copy_from_slice(&data::PING);
    let sealed = sealing.reserve(1, first_word(key.id, peer.tx_id));
    let sealed = sealed.and_then(|mut sealer| sealer.seal(datagram, data::PING.len()));
    if sealed.is_err() {
        env.counters.dropped(DropReason::SaExhausted, 1);
        return telling.spent(peer.id, key);
    }
    write_prefix(length, datagram_len);
    let from = Origin { lane: peer.transport, data_port: false, may_cut: false };
    match env.socket.send_from(from, slot, slot.len(), &remote) {
        Ok(()) => {
            env.counters.did(Work::DatagramsSent, 1);
            peer.counts.sent_outside(1, datagram_len as u64);
            peer.sent(now_ms);
        }
        Err(error) => env.counters.dropped(crate::ports::errno::drop_reason(&error), 1),
    }
}

/// One of a packet's addresses.
#[derive(Clone, Copy)]
pub(super) enum Field {
    Source,
    Destination,
}

/// An address of the packet in a frame without tags; `None` if it ends before. It needs no layout: in every
/// packet of a version the addresses stand in one place, and most packets are to be looked up before all else.
#[inline]
pub(super) fn address(frame: &[u8], field: Field) -> Option<IpAddr> {
    let packet = frame.get(ethernet::LEN..)?;
    let second = matches!(field, Field::Destination);
    match packet.first()? >> 4 {
        4 => {
            let at = if second { 16 } else { 12 };
            let octets: [u8; 4] = *packet.get(at..)?.first_chunk()?;
            Some(Ipv4Addr::from(octets).into())
        }
        6 => {
            let at = if second { 24 } else { 8 };
            let octets: [u8; 16] = *packet.get(at..)?.first_chunk()?;
            Some(Ipv6Addr::from(octets).into())
        }
        _ => None,
    }
}

/// Opcode, key id and peer id.
fn first_word(key_id: KeyId, tx_id: u32) -> [u8; 4] {
    data::first_word(key_id, PeerNumber::new(tx_id))
}

/// The length in front of a packet on a connection.
fn write_prefix(room: &mut [u8], datagram_len: usize) {
    if let Some(room) = room.first_chunk_mut() {
        *room = u16::try_from(datagram_len).unwrap_or(u16::MAX).to_be_bytes();
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use weft_crypto::ovpn::{EPOCH_HEADER_BYTES, OVERHEAD_BYTES};

    use super::*;
    use crate::tests::{pattern, tcp_read, udp_read};

    #[test]
    fn every_kind_of_packet_stands_behind_the_room_of_either_layout() {
        let whole = udp_read(&pattern(901), true);
        let partial = tcp_read(&pattern(700), 0, 0x10);
        let cut = tcp_read(&pattern(5_000), 1_000, 0x18);
        for (read, segments) in [(whole, 1), (partial, 1), (cut, 5)] {
            let (vnet, frame) = read.split_at(vnet::LEN);
            let plan = Plan::new(&VnetHeader::parse(vnet).unwrap(), frame, 1_400).unwrap();
            assert_eq!(plan.segments, segments);
            for segment in 0..plan.segments {
                let mut expected = vec![0; plan.segment_frame_len(segment)];
                let header_len = plan.write_header(frame, segment, true, &mut expected);
                expected[header_len..].copy_from_slice(&frame[plan.payload(segment)]);
                let expected = &expected[ethernet::LEN..];
                for (front, overhead) in
                    [(OVERHEAD_BYTES, OVERHEAD_BYTES), (EPOCH_HEADER_BYTES, EPOCH_OVERHEAD_BYTES)]
                {
                    let mut datagram = vec![0; overhead + expected.len()];
                    write_packet(&plan, frame, segment, &mut datagram, front);
                    assert_eq!(datagram[front..][..expected.len()], *expected);
                }
            }
        }
    }
}
