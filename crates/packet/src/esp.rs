//! ESP (RFC 4303) in UDP (RFC 3948) as Weft's `esp` format uses it (`docs/design/esp.md`): the bytes before,
//! inside and behind the sealed frame.

use std::ops::Range;

use crate::ParseError;
use crate::bytes::{array, be16, be32, need, put16, put32};
use crate::vxlan::{self, VxlanHeader};

/// Bytes before the sealed part: SPI 4, low half of the sequence number 4, IV 8.
pub const HEADER_LEN: usize = 16;
/// Bytes of the IV (RFC 4106 section 3.1, RFC 7634 section 2).
pub const IV_LEN: usize = 8;
/// Bytes of the integrity check value behind the sealed part.
pub const ICV_LEN: usize = 16;
/// Next header: UDP.
pub const NEXT_UDP: u8 = 17;
/// Next header of a dummy packet (RFC 4303 section 2.6): discard without a count.
pub const NEXT_NONE: u8 = 59;
/// Padding aligns the sealed part to this many bytes (RFC 4303 section 2.4).
pub const ALIGN: usize = 4;
/// Inner UDP header and VXLAN header.
pub const INNER_LEN: usize = crate::udp::LEN + vxlan::LEN;
/// The byte of a NAT keepalive datagram (RFC 3948 section 2.3).
pub const KEEPALIVE: u8 = 0xff;
/// The first four bytes of a datagram that is not ESP (RFC 3948 section 2.2).
pub const NON_ESP_MARKER: [u8; 4] = [0; 4];
/// The lowest SPI that may be allocated: 1 to 255 are reserved (RFC 4303 section 2.1).
pub const SPI_MIN: u32 = 256;

/// Outer packet less inner IP packet, in UDP over IPv4, if the inner length is a multiple of 4:
/// IPv4 20, UDP 8, ESP 16, inner UDP and VXLAN 16, Ethernet 14, trailer 2, ICV 16.
pub const OVERHEAD_V4_UDP: usize = 92;
/// As [`OVERHEAD_V4_UDP`], over IPv6.
pub const OVERHEAD_V6_UDP: usize = 112;
/// As [`OVERHEAD_V4_UDP`], without the outer UDP header.
pub const OVERHEAD_V4_RAW: usize = 84;
/// As [`OVERHEAD_V6_UDP`], without the outer UDP header.
pub const OVERHEAD_V6_RAW: usize = 104;

/// The largest inner IP packet that an outer packet of `outer_mtu` bytes carries, given one of the
/// `OVERHEAD_` constants: a multiple of 4.
#[must_use]
pub const fn inner_mtu(outer_mtu: usize, overhead: usize) -> usize {
    outer_mtu.saturating_sub(overhead) / ALIGN * ALIGN
}

/// Bytes of the whole ESP packet (the payload of the outer UDP datagram) that carries an Ethernet
/// frame of `frame_len` bytes.
#[must_use]
pub const fn packet_len(frame_len: usize) -> usize {
    let plain = INNER_LEN + frame_len;
    HEADER_LEN + plain + trailer_len(plain) + ICV_LEN
}

/// The kind of an outer UDP datagram (RFC 3948 section 2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Datagram {
    /// One byte 0xFF, to keep a NAT mapping: discard.
    Keepalive,
    /// Four zero bytes first: another protocol on the same port.
    NonEsp,
    /// An ESP packet.
    Esp(Header),
}

/// The bytes of an ESP packet that are not sealed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Names the receiver's SA.
    pub spi: u32,
    /// Low half of the 64-bit sequence number.
    pub sequence_low: u32,
    /// The explicit part of the nonce.
    pub iv: [u8; IV_LEN],
}

impl Header {
    /// Reads the header of an ESP packet; at least an ICV and a trailer must follow it.
    ///
    /// # Errors
    /// [`ParseError::Truncated`] if the packet cannot hold all of these.
    pub fn parse(packet: &[u8]) -> Result<Self, ParseError> {
        need("ESP", packet, HEADER_LEN + 2 + ICV_LEN)?;
        Ok(Self { spi: be32(packet, 0), sequence_low: be32(packet, 4), iv: array(packet, 8) })
    }

    /// Writes the header to the first [`HEADER_LEN`] bytes of `out`.
    ///
    /// # Panics
    /// If `out` is shorter than [`HEADER_LEN`].
    pub fn write(&self, out: &mut [u8]) {
        put32(out, 0, self.spi);
        put32(out, 4, self.sequence_low);
        out[8..HEADER_LEN].copy_from_slice(&self.iv);
    }
}

/// Tells apart the datagrams that may arrive on an ESP-in-UDP port.
///
/// # Errors
/// [`ParseError::Truncated`] if it is none of the three.
pub fn classify(datagram: &[u8]) -> Result<Datagram, ParseError> {
    if *datagram == [KEEPALIVE] {
        return Ok(Datagram::Keepalive);
    }
    if datagram.starts_with(&NON_ESP_MARKER) {
        return Ok(Datagram::NonEsp);
    }
    Header::parse(datagram).map(Datagram::Esp)
}

/// Bytes of the trailer (padding to a multiple of 4, pad length, next header) behind `plaintext_len`
/// bytes of inner headers and frame: 2 to 5.
#[must_use]
pub const fn trailer_len(plaintext_len: usize) -> usize {
    2 + (plaintext_len.wrapping_add(2).wrapping_neg() & (ALIGN - 1))
}

/// Writes a trailer for UDP with `pad` bytes of padding (that is `trailer_len(..) - 2`; 1, 2, 3, …
/// by RFC 4303 section 2.4) to the first `pad + 2` bytes of `out`.
///
/// # Panics
/// If `out` is shorter than `pad + 2`, or `pad` is over 255.
#[inline]
pub fn write_trailer(out: &mut [u8], pad: usize) {
    write_trailer_of(out, pad, NEXT_UDP);
}

/// Writes the plaintext of a dummy packet, which the receiver drops (RFC 4303 section 2.6), to the
/// first [`DUMMY_LEN`] bytes of `out`.
///
/// # Panics
/// If `out` is shorter than [`DUMMY_LEN`].
pub fn write_dummy(out: &mut [u8]) {
    write_trailer_of(out, DUMMY_LEN - 2, NEXT_NONE);
}

/// Bytes of the plaintext of a dummy packet.
pub const DUMMY_LEN: usize = 4;

#[inline]
fn write_trailer_of(out: &mut [u8], pad: usize, next: u8) {
    assert!(pad <= 255, "ESP padding has one byte for its length");
    for (value, byte) in (1_u8..=255).zip(&mut out[..pad]) {
        *byte = value;
    }
    out[pad] = pad as u8;
    out[pad + 1] = next;
}

/// Reads the trailer at the end of an opened plaintext: the bytes before the padding, and the next
/// header.
///
/// # Errors
/// [`ParseError`] if the plaintext is shorter than its trailer or the padding is not 1, 2, 3, ….
pub fn parse_trailer(plaintext: &[u8]) -> Result<(usize, u8), ParseError> {
    need("ESP trailer", plaintext, 2)?;
    let end = plaintext.len() - 2;
    let (pad, next) = (usize::from(plaintext[end]), plaintext[end + 1]);
    let start = end
        .checked_sub(pad)
        .ok_or(ParseError::Invalid { header: "ESP trailer", field: "pad length" })?;
    if plaintext[start..end].iter().zip(1_u8..).any(|(byte, value)| *byte != value) {
        return Err(ParseError::Invalid { header: "ESP trailer", field: "padding" });
    }
    Ok((start, next))
}

/// Writes the inner UDP header (checksum 0) and the VXLAN header that precede a frame of
/// `frame_len` bytes to the first [`INNER_LEN`] bytes of `out`.
///
/// # Panics
/// If `out` is shorter than [`INNER_LEN`], or `frame_len` does not fit a UDP datagram.
#[inline]
pub fn write_inner_headers(
    out: &mut [u8],
    src_port: u16,
    dst_port: u16,
    vxlan: VxlanHeader,
    frame_len: usize,
) {
    let length = INNER_LEN + frame_len;
    assert!(length <= usize::from(u16::MAX), "frame longer than a UDP datagram");
    put16(out, 0, src_port);
    put16(out, 2, dst_port);
    put16(out, 4, length as u16);
    put16(out, 6, 0);
    out[crate::udp::LEN..INNER_LEN].copy_from_slice(&vxlan.to_bytes());
}

/// The contents of a data packet's sealed part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Inner {
    /// Inner source port.
    pub src_port: u16,
    /// Inner destination port: [`vxlan::PORT`], or [`vxlan::PROBE_PORT`] for a candidate's probe.
    pub dst_port: u16,
    /// The VXLAN header.
    pub vxlan: VxlanHeader,
    /// The range of the Ethernet frame in the plaintext.
    pub frame: Range<usize>,
}

/// Reads the inner UDP and VXLAN headers of a plaintext from which the trailer is cut off. The inner
/// UDP checksum is ignored, and so are bytes behind the UDP datagram (RFC 4303
/// section 2.7).
///
/// # Errors
/// [`ParseError`] if a header is short or wrong, or the UDP length is not within the plaintext.
pub fn parse_inner_headers(plaintext: &[u8]) -> Result<Inner, ParseError> {
    need("inner UDP", plaintext, INNER_LEN)?;
    let length = usize::from(be16(plaintext, 4));
    if length < INNER_LEN || length > plaintext.len() {
        return Err(ParseError::Invalid { header: "inner UDP", field: "length" });
    }
    Ok(Inner {
        src_port: be16(plaintext, 0),
        dst_port: be16(plaintext, 2),
        vxlan: VxlanHeader::parse(&plaintext[crate::udp::LEN..])?,
        frame: INNER_LEN..length,
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn overheads_are_sums_of_headers() {
        for inner in (0..3000).step_by(4) {
            assert_eq!(20 + 8 + packet_len(14 + inner), inner + OVERHEAD_V4_UDP);
            assert_eq!(40 + 8 + packet_len(14 + inner), inner + OVERHEAD_V6_UDP);
            assert_eq!(20 + packet_len(14 + inner), inner + OVERHEAD_V4_RAW);
            assert_eq!(40 + packet_len(14 + inner), inner + OVERHEAD_V6_RAW);
        }
        assert_eq!(inner_mtu(1500, OVERHEAD_V6_UDP), 1388);
        for outer in 100..2000 {
            let inner = inner_mtu(outer, OVERHEAD_V4_UDP);
            assert!(20 + 8 + packet_len(14 + inner) <= outer);
            assert!(20 + 8 + packet_len(14 + inner + 4) > outer);
        }
    }

    #[test]
    fn datagrams_of_an_esp_port() {
        assert_eq!(classify(&[0xff]).unwrap(), Datagram::Keepalive);
        assert_eq!(classify(&[0; 40]).unwrap(), Datagram::NonEsp);
        assert!(classify(&[]).is_err());
        assert!(classify(&[1; HEADER_LEN + 2 + ICV_LEN - 1]).is_err());
        let header = Header { spi: 0x0102_0304, sequence_low: 5, iv: *b"abcdefgh" };
        let mut packet = [7; 40];
        header.write(&mut packet);
        assert_eq!(packet[..16], *b"\x01\x02\x03\x04\0\0\0\x05abcdefgh");
        assert_eq!(classify(&packet).unwrap(), Datagram::Esp(header));
    }

    #[test]
    fn bad_inner_lengths() {
        let mut plain = [0; INNER_LEN + 8];
        let vxlan = VxlanHeader { vni: 1, rco: None };
        write_inner_headers(&mut plain, 1, vxlan::PORT, vxlan, 8);
        for (length, good) in [(0, false), (15, false), (16, true), (24, true), (25, false)] {
            put16(&mut plain, 4, length);
            assert_eq!(parse_inner_headers(&plain).is_ok(), good, "{length}");
        }
    }

    #[test]
    fn bad_trailers() {
        assert!(parse_trailer(&[]).is_err());
        assert!(parse_trailer(&[17]).is_err());
        assert_eq!(parse_trailer(&[0, 17]).unwrap(), (0, 17));
        assert!(parse_trailer(&[1, 2, 17]).is_err());
        assert_eq!(parse_trailer(&[9, 1, 2, 2, 17]).unwrap(), (1, 17));
        assert!(parse_trailer(&[9, 2, 1, 2, 17]).is_err());
    }

    proptest! {
        #[test]
        fn trailer_round_trip(len in 0_usize..5000) {
            let trailer = trailer_len(len);
            prop_assert!((2..=5).contains(&trailer));
            prop_assert_eq!((len + trailer) % ALIGN, 0);
            let mut plain = vec![0xaa; len + trailer];
            write_trailer(&mut plain[len..], trailer - 2);
            prop_assert_eq!(parse_trailer(&plain).unwrap(), (len, NEXT_UDP));
        }

        #[test]
        fn inner_round_trip(src: u16, vni in 0_u32..0x100_0000, len in 0_usize..2000, more in 0_usize..9) {
            let mut plain = vec![0xaa; INNER_LEN + len + more];
            let vxlan = VxlanHeader { vni, rco: None };
            write_inner_headers(&mut plain, src, vxlan::PORT, vxlan, len);
            let inner = parse_inner_headers(&plain).unwrap();
            prop_assert_eq!(inner, Inner {
                src_port: src, dst_port: vxlan::PORT, vxlan, frame: INNER_LEN..INNER_LEN + len,
            });
            if more == 0 && len > 0 {
                prop_assert!(parse_inner_headers(&plain[..plain.len() - 1]).is_err());
            }
        }

        #[test]
        fn nothing_panics(bytes: Vec<u8>) {
            let _ = classify(&bytes);
            let _ = parse_trailer(&bytes);
            let _ = parse_inner_headers(&bytes);
        }
    }
}
