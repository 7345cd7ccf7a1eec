//! UDP headers (RFC 768).

use crate::ParseError;
use crate::bytes::{be16, need, put16};

/// Bytes of the header.
pub const LEN: usize = 8;
/// Offset of the checksum in the header.
pub const CHECKSUM_OFFSET: u16 = 6;

/// A UDP header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Source port.
    pub source_port: u16,
    /// Destination port.
    pub destination_port: u16,
    /// Bytes of header and payload.
    pub length: u16,
    /// Checksum; 0 means none (over IPv4).
    pub checksum: u16,
}

impl Header {
    /// Reads the header at the start of a datagram, behind which more bytes may follow.
    ///
    /// # Errors
    /// [`ParseError`] if the length is under 8 bytes or beyond the bytes.
    pub fn parse(datagram: &[u8]) -> Result<Self, ParseError> {
        need("UDP", datagram, LEN)?;
        let length = be16(datagram, 4);
        if usize::from(length) < LEN {
            return Err(ParseError::Invalid { header: "UDP", field: "length" });
        }
        need("UDP", datagram, usize::from(length))?;
        Ok(Self {
            source_port: be16(datagram, 0),
            destination_port: be16(datagram, 2),
            length,
            checksum: be16(datagram, 6),
        })
    }

    /// Writes the header to the first [`LEN`] bytes of `out`.
    ///
    /// # Panics
    /// If `out` is shorter than [`LEN`].
    pub fn write(&self, out: &mut [u8]) {
        put16(out, 0, self.source_port);
        put16(out, 2, self.destination_port);
        put16(out, 4, self.length);
        put16(out, 6, self.checksum);
    }
}
