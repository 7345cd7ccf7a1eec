//! The ranges of a network whose user names none. They follow from the network's name, so that hosts that cannot talk
//! choose the same.

use std::net::{Ipv4Addr, Ipv6Addr};

use ipnet::{Ipv4Net, Ipv6Net};

/// Length of the prefix of a network's IPv4 range: one of 128 in 10.128.0.0/9.
const PREFIX_BITS: u8 = 16;
/// Length of the prefix of its IPv6 range, in fd00::/8 (RFC 4193).
const PREFIX6_BITS: u8 = 64;

/// The ranges of IPv4 and IPv6.
pub(super) fn default_ranges(name: &str) -> (Ipv4Net, Ipv6Net) {
    // The first bytes of this hash are not those that the VNI is made of.
    let hash = weft_crypto::fingerprint(&[b"weft network range", name.as_bytes()]);
    let [number, a, b, c, d, e, ..] = hash;
    let v4 = Ipv4Addr::new(10, 128 | number, 0, 0);
    let global = u128::from_be_bytes([0xfd, a, b, c, d, e, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    let v4 = Ipv4Net::new_assert(v4, PREFIX_BITS);
    (v4, Ipv6Net::new_assert(Ipv6Addr::from(global), PREFIX6_BITS))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn ranges_follow_from_the_name_alone_and_are_what_a_network_may_have() {
        assert_eq!(default_ranges("shop"), default_ranges("shop"));
        let names: Vec<String> = (0..1_000).map(|n| format!("net{n}")).collect();
        let all: Vec<_> = names.iter().map(|name| default_ranges(name)).collect();
        for (v4, v6) in &all {
            assert!("10.128.0.0/9".parse::<Ipv4Net>().is_ok_and(|whole| whole.contains(v4)));
            assert_eq!((v4.trunc(), v6.trunc()), (*v4, *v6));
            assert_eq!((v4.prefix_len(), v6.prefix_len(), v6.addr().octets()[0]), (16, 64, 0xfd));
        }
        let v4: BTreeSet<_> = all.iter().map(|(v4, _)| v4).collect();
        let v6: BTreeSet<_> = all.iter().map(|(_, v6)| v6).collect();
        assert_eq!((v4.len(), v6.len()), (128, 1_000), "each range is in use, and IPv6's differ");
    }
}
