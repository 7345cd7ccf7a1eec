//! IPv4 fragmentation (RFC 791 section 3.2), for packets that are longer than their path and whose
//! sender allows it.

use crate::bytes::{be16, put16};
use crate::{ethernet, ipv4};

/// Why a frame cannot be fragmented. The fault is the sender's: answer with ICMP, or drop and count.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FragmentError {
    /// No IPv4 packet, or one whose header is wrong.
    #[error("not a valid IPv4 packet; drop it")]
    NotIpv4,
    /// The sender forbids it.
    #[error("the packet may not be fragmented; answer with ICMP")]
    DontFragment,
    /// The MTU does not leave room for a header and 8 bytes.
    #[error("an MTU of {0} bytes is too small for a fragment; drop the packet")]
    MtuTooSmall(usize),
}

/// Cuts the IPv4 packet in `frame` into fragments of at most `mtu` bytes; a VLAN tag takes its 4 bytes from them.
/// Gives each, as a frame, to `emit`, and returns their number. A packet that fits is given as it is. Options that
/// are not to be copied (RFC 791 section 3.1) stay with the first fragment. The transport checksum must be
/// complete ([`super::split::finish_checksum`]).
///
/// Allocates one buffer: this is the slow path.
///
/// # Errors
/// [`FragmentError`], before anything was given to `emit`.
pub fn fragment_ipv4(
    frame: &[u8],
    mtu: usize,
    mut emit: impl FnMut(&[u8]),
) -> Result<usize, FragmentError> {
    let ethernet = ethernet::Header::parse(frame).map_err(|_| FragmentError::NotIpv4)?;
    let l3 = ethernet.header_len();
    if ethernet.ethertype() != ethernet::TYPE_IPV4 {
        return Err(FragmentError::NotIpv4);
    }
    let header = ipv4::Header::parse(&frame[l3..]).map_err(|_| FragmentError::NotIpv4)?;
    let end = l3 + header.total_len();
    let limit = mtu.saturating_add(ethernet::LEN);
    if end <= limit {
        emit(&frame[..limit.min(frame.len())]);
        return Ok(1);
    }
    if header.dont_fragment() {
        return Err(FragmentError::DontFragment);
    }
    let payload = l3 + header.header_len();
    let room = limit.saturating_sub(payload) / 8 * 8;
    if room == 0 {
        return Err(FragmentError::MtuTooSmall(mtu));
    }
    let mut cutter = Cutter {
        buffer: Vec::with_capacity(limit),
        l3,
        first_offset: header.fragment_offset(),
        more: header.more_fragments(),
    };
    cutter.buffer.extend_from_slice(&frame[..payload]);
    let (mut done, mut count) = (0, 0);
    let data = &frame[payload..end];
    while done < data.len() {
        let piece = &data[done..data.len().min(done + room)];
        cutter.finish(piece, done, done + piece.len() == data.len());
        emit(&cutter.buffer);
        cutter.next_header(payload);
        done += piece.len();
        count += 1;
    }
    Ok(count)
}

/// The frame of one fragment after the other.
struct Cutter {
    buffer: Vec<u8>,
    l3: usize,
    first_offset: usize,
    more: bool,
}

impl Cutter {
    /// Puts `piece` behind the headers, which stand in the buffer, and makes these its own.
    fn finish(&mut self, piece: &[u8], offset: usize, last: bool) {
        let header_end = self.buffer.len();
        let total = header_end - self.l3 + piece.len();
        let mut word = ((self.first_offset + offset) / 8) as u16 & ipv4::OFFSET_MASK;
        if !last || self.more {
            word |= ipv4::MORE_FRAGMENTS;
        }
        word |= be16(&self.buffer, self.l3 + 6) & 0x8000;
        put16(&mut self.buffer, self.l3 + 2, total as u16);
        put16(&mut self.buffer, self.l3 + 6, word);
        ipv4::set_checksum(&mut self.buffer[self.l3..header_end]);
        self.buffer.extend_from_slice(piece);
    }

    /// Leaves the headers for the next fragment: those of the first, less options not to be copied.
    fn next_header(&mut self, payload: usize) {
        let header_len = usize::from(self.buffer[self.l3] & 15) * 4;
        self.buffer.truncate(payload.min(self.l3 + header_len));
        let (start, len) = (self.l3 + ipv4::LEN, self.buffer.len());
        let kept = keep_copied(&mut self.buffer[start..len]);
        self.buffer.truncate(start + kept);
        self.buffer[self.l3] = 0x40 | ((ipv4::LEN + kept) / 4) as u8;
    }
}

/// Moves the options with the "copied" bit to the front, pads them with "end of options" to a
/// multiple of 4, and returns their length.
fn keep_copied(options: &mut [u8]) -> usize {
    const COPIED: u8 = 0x80;
    let (mut read, mut kept) = (0, 0);
    while read < options.len() {
        let len = match options[read] {
            0 => break,
            1 => 1,
            _ => match options.get(read + 1) {
                Some(&len) if len >= 2 && read + usize::from(len) <= options.len() => {
                    usize::from(len)
                }
                _ => break,
            },
        };
        if options[read] & COPIED != 0 {
            options.copy_within(read..read + len, kept);
            kept += len;
        }
        read += len;
    }
    let padded = kept.next_multiple_of(4);
    options[kept..padded].fill(0);
    padded
}
