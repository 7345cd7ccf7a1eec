//! Ethernet addresses, and Ethernet II frames with up to two VLAN tags (IEEE 802.3, 802.1Q).

use std::borrow::Cow;
use std::fmt;
use std::net::Ipv6Addr;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::ParseError;
use crate::bytes::{array, be16, need, put16};

/// Bytes of the header without a VLAN tag.
pub const LEN: usize = 14;
/// Bytes of one VLAN tag.
pub const VLAN_LEN: usize = 4;
/// VLAN tags that are looked through; a frame with more is opaque.
pub const VLAN_TAGS_MAX: usize = 2;
/// EtherType of IPv4.
pub const TYPE_IPV4: u16 = 0x0800;
/// EtherType of ARP.
pub const TYPE_ARP: u16 = 0x0806;
/// EtherType of IPv6.
pub const TYPE_IPV6: u16 = 0x86dd;
/// EtherType of a VLAN tag.
pub const TYPE_VLAN: u16 = 0x8100;
/// EtherType of a service VLAN tag.
pub const TYPE_SERVICE_VLAN: u16 = 0x88a8;
/// The broadcast address.
pub const BROADCAST: [u8; 6] = [0xff; 6];

/// An Ethernet address, written as six pairs of hexadecimal digits with colons.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Mac(pub [u8; 6]);

impl Mac {
    /// The link-local IPv6 address that belongs to it (RFC 4291 appendix A).
    pub fn link_local(self) -> Ipv6Addr {
        let [a, b, c, d, e, f] = self.0;
        Ipv6Addr::from([0xfe, 0x80, 0, 0, 0, 0, 0, 0, a ^ 2, b, c, 0xff, 0xfe, d, e, f])
    }
}

impl fmt::Display for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

impl fmt::Debug for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A text is not an Ethernet address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("an Ethernet address is six pairs of hexadecimal digits, such as 02:00:5e:10:00:01")]
pub struct ParseMacError;

impl FromStr for Mac {
    type Err = ParseMacError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut bytes = [0; 6];
        let mut parts = text.split(':');
        for byte in &mut bytes {
            let digits = |part: &&str| part.len() == 2 && !part.starts_with('+');
            let part = parts.next().filter(digits).ok_or(ParseMacError)?;
            *byte = u8::from_str_radix(part, 16).map_err(|_| ParseMacError)?;
        }
        parts.next().is_none().then_some(Self(bytes)).ok_or(ParseMacError)
    }
}

impl Serialize for Mac {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Mac {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = Cow::<'de, str>::deserialize(deserializer)?;
        text.parse().map_err(de::Error::custom)
    }
}

/// A frame's header, tags included.
#[derive(Clone, Copy, Debug)]
pub struct Header<'a> {
    bytes: &'a [u8],
}

impl<'a> Header<'a> {
    /// Reads the header at the start of a frame.
    ///
    /// # Errors
    /// [`ParseError::Truncated`] if the frame ends in it.
    pub fn parse(frame: &'a [u8]) -> Result<Self, ParseError> {
        need("Ethernet", frame, LEN)?;
        let mut len = LEN;
        while is_tag(be16(frame, len - 2)) && len < LEN + VLAN_TAGS_MAX * VLAN_LEN {
            len += VLAN_LEN;
            need("VLAN", frame, len)?;
        }
        Ok(Self { bytes: &frame[..len] })
    }

    /// Destination address.
    #[must_use]
    pub fn destination(&self) -> [u8; 6] {
        array(self.bytes, 0)
    }

    /// Source address.
    #[must_use]
    pub fn source(&self) -> [u8; 6] {
        array(self.bytes, 6)
    }

    /// The type of the bytes behind the last tag that was looked through.
    #[must_use]
    pub fn ethertype(&self) -> u16 {
        be16(self.bytes, self.bytes.len() - 2)
    }

    /// The outermost VLAN identifier, if the frame is tagged.
    #[must_use]
    pub fn vlan(&self) -> Option<u16> {
        (self.bytes.len() > LEN).then(|| be16(self.bytes, LEN) & 0x0fff)
    }

    /// Bytes of the header with its tags: where the payload begins.
    #[must_use]
    pub const fn header_len(&self) -> usize {
        self.bytes.len()
    }
}

/// Writes an untagged header to the first [`LEN`] bytes of `out`.
///
/// # Panics
/// If `out` is shorter than [`LEN`].
pub fn write(out: &mut [u8], destination: [u8; 6], source: [u8; 6], ethertype: u16) {
    out[..6].copy_from_slice(&destination);
    out[6..12].copy_from_slice(&source);
    put16(out, 12, ethertype);
}

/// Whether an address names a group: multicast or broadcast.
#[must_use]
pub const fn is_group(address: [u8; 6]) -> bool {
    address[0] & 1 != 0
}

const fn is_tag(ethertype: u16) -> bool {
    matches!(ethertype, TYPE_VLAN | TYPE_SERVICE_VLAN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mac_survives_its_text() {
        let mac = Mac([2, 0, 0x5e, 0x10, 0, 1]);
        assert_eq!(mac.to_string().parse(), Ok(mac));
        for bad in ["", "02:00", "02:00:5e:10:00:01:02", "+2:00:5e:10:00:01", "2:0:5e:10:0:1"] {
            assert_eq!(bad.parse::<Mac>(), Err(ParseMacError), "{bad}");
        }
    }

    #[test]
    fn a_macs_link_local_address_has_it_with_the_universal_bit_turned() {
        let address = Mac([2, 0, 0x5e, 0x10, 0, 1]).link_local();
        assert_eq!(address.to_string(), "fe80::5eff:fe10:1");
    }
}
