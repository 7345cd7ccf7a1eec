//! IP packets as frames. Cutting and merging work on frames. So a packet of a TUN device has an Ethernet header
//! without addresses while it is in the engine.

use std::array;
use std::io::{self, IoSlice};

use weft_io::tun::{PACKET_LEN_MAX, Tun};
use weft_packet::ethernet;
use weft_packet::vnet::{self, VnetHeader};

use crate::ports::device::FrameSink;
use crate::rx::merger::SLICES_MAX;

/// Room for one read: virtio net header, Ethernet header, packet.
pub(crate) const ROOM: usize = vnet::LEN + ethernet::LEN + PACKET_LEN_MAX;

/// Reads one packet or super-packet as a frame behind its virtio net header. Returns the length of both, or 0
/// if it is not an IP packet.
///
/// # Errors
/// As [`Tun::recv`].
#[inline]
pub(crate) fn read(tun: &Tun, buffer: &mut [u8; ROOM]) -> io::Result<usize> {
    let (head, packet) = buffer.split_at_mut(vnet::LEN + ethernet::LEN);
    let (vnet, ether) = head.split_at_mut(vnet::LEN);
    let vnet = vnet.first_chunk_mut().ok_or(io::ErrorKind::InvalidInput)?;
    let len = tun.recv(vnet, packet)?;
    if !write_ethernet(ether, &packet[..len]) {
        return Ok(0);
    }
    shift(vnet, u16::wrapping_add);
    Ok(vnet::LEN + ethernet::LEN + len)
}

/// Puts the Ethernet header of `packet` into `room`; false if it is not an IP packet.
#[inline]
pub(crate) fn write_ethernet(room: &mut [u8], packet: &[u8]) -> bool {
    let kind = match packet.first().map(|first| first >> 4) {
        Some(4) => ethernet::TYPE_IPV4,
        Some(6) => ethernet::TYPE_IPV6,
        _ => return false,
    };
    let Some(room) = room.first_chunk_mut::<{ ethernet::LEN }>() else { return false };
    *room = [0; ethernet::LEN];
    room[ethernet::LEN - 2..].copy_from_slice(&kind.to_be_bytes());
    true
}

impl FrameSink for Tun {
    /// Writes a frame, or a super-packet, as the packet in it.
    #[inline]
    fn send(&self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        let (vnet, parts) = slices.split_first().ok_or(io::ErrorKind::InvalidInput)?;
        let mut vnet = *vnet.first_chunk().ok_or(io::ErrorKind::InvalidInput)?;
        shift(&mut vnet, u16::wrapping_sub);
        let mut packet: [IoSlice<'_>; SLICES_MAX] = array::from_fn(|_| IoSlice::new(&[]));
        packet[0] = IoSlice::new(&vnet);
        // The Ethernet header is the first part of a rewritten header, else of the only frame.
        let mut ether = ethernet::LEN;
        for (room, part) in packet[1..].iter_mut().zip(parts) {
            let (skipped, part) = part.split_at(ether.min(part.len()));
            ether -= skipped.len();
            *room = IoSlice::new(part);
        }
        Self::send(self, &packet[..slices.len().min(SLICES_MAX)])
    }
}

/// Moves the offsets in a virtio net header by the length of an Ethernet header.
#[inline]
fn shift(bytes: &mut [u8; vnet::LEN], by: impl Fn(u16, u16) -> u16) {
    const LEN: u16 = ethernet::LEN as u16;
    let Some(mut header) = VnetHeader::parse(bytes) else { return };
    if header.needs_checksum() {
        header.csum_start = by(header.csum_start, LEN);
    }
    if header.gso_type & !vnet::GSO_ECN != vnet::GSO_NONE {
        header.hdr_len = by(header.hdr_len, LEN);
    }
    *bytes = header.to_bytes();
}
