//! The Internet checksum (RFC 1071): ones-complement sums of 16-bit words. Also the pseudo-headers of TCP and UDP
//! (RFC 9293 section 3.1, RFC 768, RFC 8200 section 8.1).

use std::net::{Ipv4Addr, Ipv6Addr};

/// A ones-complement sum that is not yet folded to 16 bits.
///
/// Every part that is added must begin at an even offset of the summed bytes; only the last may
/// have an odd length.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sum(u64);

impl Sum {
    /// Adds `bytes`, of which the first is the high half of a word; an odd end is padded with 0.
    #[must_use]
    pub fn bytes(self, bytes: &[u8]) -> Self {
        Self(self.0 + u64::from(fold(raw(bytes)).to_be()))
    }

    /// Adds one 16-bit word.
    #[must_use]
    pub const fn word(self, word: u16) -> Self {
        Self(self.0 + word as u64)
    }

    /// Adds a 32-bit number as its two words.
    #[must_use]
    pub const fn long(self, long: u32) -> Self {
        Self(self.0 + (long >> 16) as u64 + (long & 0xffff) as u64)
    }

    /// Adds another sum.
    #[must_use]
    pub const fn sum(self, other: Self) -> Self {
        Self(self.0 + other.0)
    }

    /// The sum in 16 bits, not complemented, as a checksum field holds it while it is partial.
    #[must_use]
    pub const fn partial(self) -> u16 {
        fold(self.0)
    }

    /// The checksum: the complement of the folded sum. Over bytes that hold a correct checksum it
    /// is 0.
    #[must_use]
    pub const fn checksum(self) -> u16 {
        !fold(self.0)
    }
}

/// The sum of the IPv4 pseudo-header: addresses, protocol, length of the TCP or UDP packet.
#[must_use]
pub fn pseudo_v4(source: Ipv4Addr, destination: Ipv4Addr, protocol: u8, length: u32) -> Sum {
    Sum::default()
        .long(source.to_bits())
        .long(destination.to_bits())
        .word(u16::from(protocol))
        .long(length)
}

/// The sum of the IPv6 pseudo-header: addresses, length of the upper packet, next header.
#[must_use]
pub fn pseudo_v6(source: Ipv6Addr, destination: Ipv6Addr, next_header: u8, length: u32) -> Sum {
    Sum::default()
        .bytes(&source.octets())
        .bytes(&destination.octets())
        .word(u16::from(next_header))
        .long(length)
}

/// The checksum after one word under it changed from `old` to `new` (RFC 1624, equation 3).
#[must_use]
pub const fn update(checksum: u16, old: u16, new: u16) -> u16 {
    !fold(!checksum as u64 + !old as u64 + new as u64)
}

/// A UDP checksum as it is sent: a computed 0 goes as 0xFFFF, since 0 means "none" (RFC 768).
#[must_use]
pub const fn udp_nonzero(checksum: u16) -> u16 {
    if checksum == 0 { 0xffff } else { checksum }
}

const fn fold(mut sum: u64) -> u16 {
    sum = (sum & 0xffff_ffff) + (sum >> 32);
    sum = (sum & 0xffff_ffff) + (sum >> 32);
    sum = (sum & 0xffff) + (sum >> 16);
    sum = (sum & 0xffff) + (sum >> 16);
    sum = (sum & 0xffff) + (sum >> 16);
    sum as u16
}

/// Sums words in machine order: the order of bytes in a word commutes with the sum (RFC 1071 section 2). The
/// halves of 64-bit words go to separate lanes that cannot overflow, so that the compiler uses vectors.
fn raw(bytes: &[u8]) -> u64 {
    let (mut low, mut high) = ([0_u64; 4], [0_u64; 4]);
    let (blocks, rest) = bytes.as_chunks::<32>();
    for block in blocks {
        let (words, _) = block.as_chunks::<8>();
        for lane in 0..4 {
            let word = u64::from_ne_bytes(words[lane]);
            low[lane] += word & 0xffff_ffff;
            high[lane] += word >> 32;
        }
    }
    let mut sum = low.iter().sum::<u64>() + high.iter().sum::<u64>();
    let (words, rest) = rest.as_chunks::<4>();
    for word in words {
        sum += u64::from(u32::from_ne_bytes(*word));
    }
    let mut last = [0; 4];
    last[..rest.len()].copy_from_slice(rest);
    sum + u64::from(u32::from_ne_bytes(last))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The sum as RFC 1071 words it, one big-endian word at a time.
    fn slow(bytes: &[u8]) -> u16 {
        let mut sum = 0_u32;
        for pair in bytes.chunks(2) {
            sum += u32::from(u16::from_be_bytes([pair[0], *pair.get(1).unwrap_or(&0)]));
            sum = (sum & 0xffff) + (sum >> 16);
        }
        sum as u16
    }

    #[test]
    fn rfc_1071_example() {
        let bytes = [0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7];
        assert_eq!(Sum::default().bytes(&bytes).partial(), 0xddf2);
    }

    #[test]
    fn the_largest_sum_folds() {
        assert_eq!(fold(u64::MAX), 0xffff);
        assert_eq!(Sum::default().bytes(&[0xff; 70_000]).partial(), 0xffff);
    }

    proptest! {
        #[test]
        fn fast_sum_is_the_plain_sum(bytes: Vec<u8>, cut in 0_usize..200) {
            prop_assert_eq!(Sum::default().bytes(&bytes).partial(), slow(&bytes));
            let cut = (cut * 2).min(bytes.len() & !1);
            let (a, b) = bytes.split_at(cut);
            prop_assert_eq!(Sum::default().bytes(a).bytes(b).partial(), slow(&bytes));
        }

        #[test]
        fn update_is_a_new_sum(mut bytes in prop::collection::vec(1_u8.., 40), at in 0_usize..20, new: u16) {
            let before = Sum::default().bytes(&bytes).checksum();
            let old = u16::from_be_bytes([bytes[at * 2], bytes[at * 2 + 1]]);
            bytes[at * 2..at * 2 + 2].copy_from_slice(&new.to_be_bytes());
            prop_assert_eq!(update(before, old, new), Sum::default().bytes(&bytes).checksum());
        }
    }
}
