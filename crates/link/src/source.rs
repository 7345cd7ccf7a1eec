//! The possible owners of a connection: an address, and the networks that one party is likely to
//! control.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// A network, from that of a single host to all addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Network {
    /// An IPv4 address, or the /64 of an IPv6 address.
    Host(IpAddr),
    /// The /56 of an IPv6 address: a typical household.
    Site(IpAddr),
    /// The /24 of an IPv4 address, the /48 of an IPv6 address.
    Provider(IpAddr),
    /// All addresses.
    All,
}

/// An IPv4 address, or the /64 of an IPv6 address.
pub(crate) fn source_of(address: IpAddr) -> IpAddr {
    prefix(address, 32, 64)
}

/// The networks that contain an address, the narrowest first.
pub(crate) fn networks_of(address: IpAddr) -> Vec<Network> {
    let address = address.to_canonical();
    let site = address.is_ipv6().then(|| Network::Site(prefix(address, 32, 56)));
    let narrow = [Network::Host(source_of(address))].into_iter().chain(site);
    narrow.chain([provider_of(address), Network::All]).collect()
}

pub(crate) fn provider_of(address: IpAddr) -> Network {
    Network::Provider(prefix(address, 24, 48))
}

fn prefix(address: IpAddr, v4: u32, v6: u32) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V4(address) => {
            Ipv4Addr::from_bits(address.to_bits() & (u32::MAX << (32 - v4))).into()
        }
        IpAddr::V6(address) => {
            Ipv6Addr::from_bits(address.to_bits() & (u128::MAX << (128 - v6))).into()
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn an_address_counts_for_each_network_that_it_is_in() {
        let at = |text: &str| text.parse::<IpAddr>().unwrap();
        assert_eq!(
            networks_of(at("2001:db8:1:2345::9")),
            [
                Network::Host(at("2001:db8:1:2345::")),
                Network::Site(at("2001:db8:1:2300::")),
                Network::Provider(at("2001:db8:1::")),
                Network::All,
            ]
        );
        let v4 = [Network::Host(at("192.0.2.7")), Network::Provider(at("192.0.2.0")), Network::All];
        assert_eq!(networks_of(at("192.0.2.7")), v4);
        assert_eq!(networks_of(at("::ffff:192.0.2.7")), v4);
    }
}
