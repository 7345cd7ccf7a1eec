//! Congestion marks through the tunnel (RFC 6040): the outer header of a frame, and the effect on the frame of a
//! mark that the outer header gets on its way.
//!
//! An inner packet is IPv4 or IPv6, perhaps behind VLAN tags. Every other frame counts as Not-ECT with DSCP
//! 0: its endpoints would not understand a mark.

use crate::bytes::{be16, put16};
use crate::checksum;
use crate::layout::{self, Headers, Layout, Network};
use crate::{ipv4, ipv6};

/// The bits of an IPv4 TOS or IPv6 traffic class that are ECN (RFC 3168 section 5); the others are
/// DSCP (RFC 2474).
pub const MASK: u8 = 0b11;

/// A value of the ECN field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ecn {
    /// The transport does not understand marks.
    NotEct,
    /// The transport understands marks.
    Ect0,
    /// The same; experiments tell it apart (RFC 8311).
    Ect1,
    /// Congestion was experienced.
    Ce,
}

impl Ecn {
    /// All values, by their bits.
    pub const ALL: [Self; 4] = [Self::NotEct, Self::Ect1, Self::Ect0, Self::Ce];

    /// The value in a TOS or traffic class.
    #[must_use]
    pub const fn of(tos: u8) -> Self {
        Self::ALL[(tos & MASK) as usize]
    }

    /// Its bits.
    #[must_use]
    pub const fn bits(self) -> u8 {
        match self {
            Self::NotEct => 0b00,
            Self::Ect1 => 0b01,
            Self::Ect0 => 0b10,
            Self::Ce => 0b11,
        }
    }
}

/// Congestion was marked on a packet whose sender does not understand marks: that it is dropped is
/// how the sender learns of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("marked CE around a packet that is not ECN-capable; drop it")]
pub struct CeOverNotEct;

/// The TOS or traffic class of the IP packet in a frame with these headers; 0 if there is none.
#[inline]
#[must_use]
pub fn tos(frame: &[u8], headers: &Headers) -> u8 {
    match find(frame, headers) {
        Some((l3, Network::V4)) => frame[l3 + 1],
        Some((l3, Network::V6)) => (be16(frame, l3) >> 4) as u8,
        None => 0,
    }
}

/// The outer TOS or traffic class around an inner one: the same ECN (RFC 6040 section 4.1, normal
/// mode). DSCP is 0 unless `copy_dscp`, since it tells an observer about the traffic inside.
#[inline]
#[must_use]
pub const fn outer_tos(inner: u8, copy_dscp: bool) -> u8 {
    if copy_dscp { inner } else { inner & MASK }
}

/// The inner ECN field after decapsulation (RFC 6040 section 4.2, figure 4).
///
/// # Errors
/// [`CeOverNotEct`]
#[inline]
pub const fn decapsulated(inner: Ecn, outer: Ecn) -> Result<Ecn, CeOverNotEct> {
    match (inner, outer) {
        (Ecn::NotEct, Ecn::Ce) => Err(CeOverNotEct),
        (Ecn::Ect0 | Ecn::Ect1, Ecn::Ce) => Ok(Ecn::Ce),
        (Ecn::Ect0, Ecn::Ect1) => Ok(Ecn::Ect1),
        _ => Ok(inner),
    }
}

/// Brings the mark of an outer header into the frame that came in it. An IPv4 header's checksum changes along,
/// right or wrong as it was (RFC 1624). DSCP stays as the sender set it.
///
/// # Errors
/// [`CeOverNotEct`]
#[inline]
pub fn decapsulate(frame: &mut [u8], outer_tos: u8) -> Result<(), CeOverNotEct> {
    let outer = Ecn::of(outer_tos);
    if matches!(outer, Ecn::NotEct | Ecn::Ect0) {
        return Ok(());
    }
    mark(frame, outer)
}

/// Applies the mark of an outer header to a frame. It looks for the headers itself: marks are rare, and a
/// refused frame is not looked at any more.
#[cold]
fn mark(frame: &mut [u8], outer: Ecn) -> Result<(), CeOverNotEct> {
    let headers = Layout::parse(frame);
    let found = find(frame, &headers);
    let before = Ecn::of(tos(frame, &headers));
    let after = decapsulated(before, outer)?;
    let change = u16::from(before.bits() ^ after.bits());
    match found {
        _ if change == 0 => {}
        Some((l3, Network::V4)) => {
            let old = be16(frame, l3);
            let sum = checksum::update(be16(frame, l3 + 10), old, old ^ change);
            put16(frame, l3, old ^ change);
            put16(frame, l3 + 10, sum);
        }
        Some((l3, Network::V6)) => {
            let old = be16(frame, l3);
            put16(frame, l3, old ^ change << 4);
        }
        None => {}
    }
    Ok(())
}

/// The offset and version of the IP header.
#[inline]
fn find(frame: &[u8], headers: &Headers) -> Option<(usize, Network)> {
    let (l3, network) = layout::network(headers)?;
    let network = network?;
    let (version, len) = match network {
        Network::V4 => (4, ipv4::LEN),
        Network::V6 => (6, ipv6::LEN),
    };
    (frame.len() >= l3 + len && frame[l3] >> 4 == version).then_some((l3, network))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// RFC 6040 figure 4; rows are the inner field, columns the outer: Not-ECT, ECT(0), ECT(1), CE.
    #[test]
    fn the_whole_table_of_decapsulation() {
        use Ecn::{Ce, Ect0, Ect1, NotEct};
        let columns = [NotEct, Ect0, Ect1, Ce];
        let table = [
            (NotEct, [Ok(NotEct), Ok(NotEct), Ok(NotEct), Err(CeOverNotEct)]),
            (Ect0, [Ok(Ect0), Ok(Ect0), Ok(Ect1), Ok(Ce)]),
            (Ect1, [Ok(Ect1), Ok(Ect1), Ok(Ect1), Ok(Ce)]),
            (Ce, [Ok(Ce), Ok(Ce), Ok(Ce), Ok(Ce)]),
        ];
        for (inner, row) in table {
            for (outer, wanted) in columns.into_iter().zip(row) {
                assert_eq!(decapsulated(inner, outer), wanted, "{inner:?} in {outer:?}");
            }
        }
    }

    /// RFC 6040 figure 3, column "normal mode".
    #[test]
    fn the_whole_table_of_encapsulation() {
        for inner in 0..=u8::MAX {
            assert_eq!(Ecn::of(outer_tos(inner, false)), Ecn::of(inner));
            assert_eq!(outer_tos(inner, false) & !MASK, 0);
            assert_eq!(outer_tos(inner, true), inner);
        }
    }

    #[test]
    fn values_have_the_bits_of_rfc_3168() {
        for ecn in Ecn::ALL {
            assert_eq!(Ecn::of(ecn.bits() | 0xb8), ecn);
        }
        assert_eq!((Ecn::of(1), Ecn::of(2)), (Ecn::Ect1, Ecn::Ect0));
    }
}
