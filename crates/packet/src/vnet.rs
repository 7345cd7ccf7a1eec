//! The virtio net header in front of each frame of a TAP device (virtio 1.2 section 5.1.6, Linux `IFF_VNET_HDR`).
//! It has 10 bytes and little-endian fields (`TUNSETVNETLE`).

/// Bytes of the header without the count of merged buffers.
pub const LEN: usize = 10;

/// Flag: the checksum at `csum_start + csum_offset` holds the pseudo-header's sum only.
pub const F_NEEDS_CSUM: u8 = 1;

/// No super-packet.
pub const GSO_NONE: u8 = 0;
/// A TCP super-packet over IPv4.
pub const GSO_TCPV4: u8 = 1;
/// A TCP super-packet over IPv6.
pub const GSO_TCPV6: u8 = 4;
/// A UDP super-packet (USO): equal datagrams, the last may be shorter.
pub const GSO_UDP_L4: u8 = 5;
/// Or-ed to the type: the first segment alone carries CWR.
pub const GSO_ECN: u8 = 0x80;

/// The virtio net header: the state of a frame's checksum and segments, on its way from or to the kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VnetHeader {
    /// [`F_NEEDS_CSUM`] or 0; other flags have no meaning here.
    pub flags: u8,
    /// One of the `GSO_` constants, perhaps with [`GSO_ECN`].
    pub gso_type: u8,
    /// Bytes of all headers. A hint only: the kernel's value is wrong on forwarded packets.
    pub hdr_len: u16,
    /// Payload bytes of each segment.
    pub gso_size: u16,
    /// Offset in the frame at which the checksummed bytes begin.
    pub csum_start: u16,
    /// Offset of the checksum field from `csum_start`.
    pub csum_offset: u16,
}

impl VnetHeader {
    /// Reads the header at the start of `bytes`; `None` if there are fewer than [`LEN`].
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; LEN] = bytes.first_chunk()?;
        let field = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        Some(Self {
            flags: bytes[0],
            gso_type: bytes[1],
            hdr_len: field(2),
            gso_size: field(4),
            csum_start: field(6),
            csum_offset: field(8),
        })
    }

    /// Writes the header to the first [`LEN`] bytes of `out`.
    ///
    /// # Panics
    /// If `out` is shorter than [`LEN`].
    pub fn write(&self, out: &mut [u8]) {
        out[..LEN].copy_from_slice(&self.to_bytes());
    }

    /// The header's bytes.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; LEN] {
        let [h0, h1] = self.hdr_len.to_le_bytes();
        let [g0, g1] = self.gso_size.to_le_bytes();
        let [s0, s1] = self.csum_start.to_le_bytes();
        let [o0, o1] = self.csum_offset.to_le_bytes();
        [self.flags, self.gso_type, h0, h1, g0, g1, s0, s1, o0, o1]
    }

    /// Whether the frame's checksum is still partial.
    #[must_use]
    pub const fn needs_checksum(&self) -> bool {
        self.flags & F_NEEDS_CSUM != 0
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn bytes_of_the_virtio_specification() {
        let header = VnetHeader {
            flags: F_NEEDS_CSUM,
            gso_type: GSO_TCPV4 | GSO_ECN,
            hdr_len: 0x0102,
            gso_size: 0x0304,
            csum_start: 0x0506,
            csum_offset: 16,
        };
        let bytes = header.to_bytes();
        assert_eq!(bytes, [1, 0x81, 2, 1, 4, 3, 6, 5, 16, 0]);
        assert_eq!(VnetHeader::parse(&bytes).unwrap(), header);
        assert_eq!(VnetHeader::parse(&bytes[..9]), None);
    }
}
