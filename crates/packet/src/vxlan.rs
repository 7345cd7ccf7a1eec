//! VXLAN (RFC 7348) with Linux's remote checksum offload (draft-herbert-vxlan-rco, `vxlan.h`).

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::ParseError;
use crate::bytes::{be32, need};

/// Bytes of the header.
pub const LEN: usize = 8;
/// Inner UDP port of data and of the active path's probes.
pub const PORT: u16 = 6787;
/// Inner UDP port of a candidate path's probes.
pub const PROBE_PORT: u16 = 6788;
/// Flag of the first word: the low byte of the second word says where a partial checksum is.
pub const RCO_FLAG: u32 = 0x0020_0000;
/// The largest start that remote checksum offload can name, in bytes.
pub const RCO_START_MAX: u16 = 254;
/// The largest network identifier: 24 bits.
pub const VNI_MAX: u32 = 0xff_ffff;

const VNI_FLAG: u32 = 0x0800_0000;
const RCO_UDP: u8 = 0x80;

/// A VXLAN network identifier: 24 bits, host byte order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Vni(pub u32);

impl Vni {
    /// Network `weft`, which is on every host.
    pub const WEFT: Self = Self(1);
    /// The network on which probes travel and no container ever lives.
    pub const PROBE: Self = Self(VNI_MAX);
}

impl fmt::Display for Vni {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// One VXLAN header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VxlanHeader {
    /// The network: 0 to [`VNI_MAX`].
    pub vni: u32,
    /// The position of the checksum in the frame that the receiver must take as partial.
    pub rco: Option<Rco>,
}

/// A mark of remote checksum offload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rco {
    /// Offset in the Ethernet frame at which the checksummed bytes begin: even, at most 254.
    pub start: u8,
    /// Whether the field lies as in UDP (6 bytes on) and not as in TCP (16 bytes on).
    pub udp: bool,
}

impl Rco {
    /// The mark for a partial checksum, if it can be said: `start` even and at most
    /// [`RCO_START_MAX`], `offset` that of TCP (16) or UDP (6).
    #[must_use]
    pub fn new(start: u16, offset: u16) -> Option<Self> {
        let udp = match offset {
            crate::udp::CHECKSUM_OFFSET => true,
            crate::tcp::CHECKSUM_OFFSET => false,
            _ => return None,
        };
        let start = u8::try_from(start).ok().filter(|start| start % 2 == 0)?;
        Some(Self { start, udp })
    }

    /// Offset of the checksum field from [`Self::start`].
    #[must_use]
    pub const fn offset(self) -> u16 {
        if self.udp { crate::udp::CHECKSUM_OFFSET } else { crate::tcp::CHECKSUM_OFFSET }
    }
}

impl VxlanHeader {
    /// Reads the header at the start of `bytes`.
    ///
    /// # Errors
    /// [`ParseError`] if it is short, has no network identifier, or has an unknown flag that changes the
    /// meaning of the bytes behind it; Linux drops the same.
    pub fn parse(bytes: &[u8]) -> Result<Self, ParseError> {
        need("VXLAN", bytes, LEN)?;
        let (flags, word) = (be32(bytes, 0), be32(bytes, 4));
        let low = word as u8;
        let rco = match flags {
            VNI_FLAG if low == 0 => None,
            VNI_FLAG => {
                return Err(ParseError::Invalid { header: "VXLAN", field: "reserved byte" });
            }
            flags if flags == VNI_FLAG | RCO_FLAG => {
                Some(Rco { start: low << 1, udp: low & RCO_UDP != 0 })
            }
            _ => return Err(ParseError::Invalid { header: "VXLAN", field: "flags" }),
        };
        Ok(Self { vni: word >> 8, rco })
    }

    /// Writes the header to `out`. Bits of the network identifier over 24 are cut off.
    pub fn write(&self, out: &mut [u8; LEN]) {
        *out = self.to_bytes();
    }

    /// The header's bytes.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; LEN] {
        let (flags, low) = match self.rco {
            None => (VNI_FLAG, 0),
            Some(rco) => {
                (VNI_FLAG | RCO_FLAG, (rco.start >> 1) | if rco.udp { RCO_UDP } else { 0 })
            }
        };
        let [a, b, c, d] = flags.to_be_bytes();
        let [_, e, f, g] = self.vni.to_be_bytes();
        [a, b, c, d, e, f, g, low]
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn bytes_as_linux_writes_them() {
        let plain = VxlanHeader { vni: 0x12_3456, rco: None };
        assert_eq!(plain.to_bytes(), [8, 0, 0, 0, 0x12, 0x34, 0x56, 0]);
        let udp = VxlanHeader { vni: 0x12_3456, rco: Rco::new(34, 6) };
        assert_eq!(udp.to_bytes(), [8, 0x20, 0, 0, 0x12, 0x34, 0x56, 0x80 | 17]);
        let tcp = VxlanHeader { vni: 1, rco: Rco::new(254, 16) };
        assert_eq!(tcp.to_bytes(), [8, 0x20, 0, 0, 0, 0, 1, 0x7f]);
    }

    #[test]
    fn marks_that_cannot_be_said() {
        assert_eq!(Rco::new(35, 6), None);
        assert_eq!(Rco::new(256, 6), None);
        assert_eq!(Rco::new(34, 2), None);
    }

    #[test]
    fn unknown_flags_are_refused() {
        for bytes in [[0; 8], [0x88, 0, 0, 0, 0, 0, 1, 0], [8, 0, 0, 0, 0, 0, 1, 7], [12; 8]] {
            assert!(VxlanHeader::parse(&bytes).is_err(), "{bytes:?}");
        }
        assert!(VxlanHeader::parse(&[8, 0, 0, 0, 0, 0, 1]).is_err());
    }

    proptest! {
        #[test]
        fn round_trip(vni in 0..=VNI_MAX, half in 0_u8..128, udp: bool, marked: bool) {
            let rco = marked.then_some(Rco { start: half * 2, udp });
            let header = VxlanHeader { vni, rco };
            prop_assert_eq!(VxlanHeader::parse(&header.to_bytes()).unwrap(), header);
        }
    }
}
