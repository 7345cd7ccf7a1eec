//! TCP headers (RFC 9293).

use crate::ParseError;
use crate::bytes::{be16, be32, need};

/// Bytes of a header without options.
pub const LEN: usize = 20;
/// Bytes of the longest header.
pub const LEN_MAX: usize = 60;
/// Offset of the checksum in the header.
pub const CHECKSUM_OFFSET: u16 = 16;
/// Flag: no more data from the sender.
pub const FIN: u8 = 0x01;
/// Flag: synchronise sequence numbers.
pub const SYN: u8 = 0x02;
/// Flag: reset.
pub const RST: u8 = 0x04;
/// Flag: push.
pub const PSH: u8 = 0x08;
/// Flag: the acknowledgement number counts.
pub const ACK: u8 = 0x10;
/// Flag: the urgent pointer counts.
pub const URG: u8 = 0x20;
/// Flag: congestion was experienced (RFC 3168).
pub const ECE: u8 = 0x40;
/// Flag: the congestion window was reduced (RFC 3168).
pub const CWR: u8 = 0x80;

/// A header whose length is right; the checksum is not verified.
#[derive(Clone, Copy, Debug)]
pub struct Header<'a> {
    bytes: &'a [u8],
}

impl<'a> Header<'a> {
    /// Reads the header at the start of a segment.
    ///
    /// # Errors
    /// [`ParseError`] if the data offset is under 20 bytes or beyond the segment.
    pub fn parse(segment: &'a [u8]) -> Result<Self, ParseError> {
        need("TCP", segment, LEN)?;
        let len = usize::from(segment[12] >> 4) * 4;
        if len < LEN {
            return Err(ParseError::Invalid { header: "TCP", field: "data offset" });
        }
        need("TCP", segment, len)?;
        Ok(Self { bytes: &segment[..len] })
    }

    /// Bytes of the header with its options: 20 to 60.
    #[must_use]
    pub const fn header_len(&self) -> usize {
        self.bytes.len()
    }

    /// Source port.
    #[must_use]
    pub fn source_port(&self) -> u16 {
        be16(self.bytes, 0)
    }

    /// Destination port.
    #[must_use]
    pub fn destination_port(&self) -> u16 {
        be16(self.bytes, 2)
    }

    /// Sequence number of the first payload byte.
    #[must_use]
    pub fn sequence(&self) -> u32 {
        be32(self.bytes, 4)
    }

    /// Acknowledgement number.
    #[must_use]
    pub fn acknowledgement(&self) -> u32 {
        be32(self.bytes, 8)
    }

    /// The flags from CWR down to FIN.
    #[must_use]
    pub const fn flags(&self) -> u8 {
        self.bytes[13]
    }

    /// Window, not scaled.
    #[must_use]
    pub fn window(&self) -> u16 {
        be16(self.bytes, 14)
    }

    /// The checksum field.
    #[must_use]
    pub fn checksum(&self) -> u16 {
        be16(self.bytes, 16)
    }

    /// The options' bytes: 0 to 40.
    #[must_use]
    pub fn options(&self) -> &'a [u8] {
        &self.bytes[LEN..]
    }
}
