//! The ranges of containers' addresses.

use std::net::Ipv4Addr;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use weft_mesh::IpamStatus;

/// The ranges of containers' addresses, and whether this host can give some.
#[derive(Clone, Debug)]
pub(crate) struct Ranges {
    pub(crate) v4: Ipv4Net,
    /// A /64, once this host is in a mesh.
    pub(crate) v6: Option<Ipv6Net>,
    /// Why no address can be given now.
    pub(crate) waiting: Option<String>,
    /// Whether that may pass while a request waits.
    pub(crate) may_pass: bool,
}

impl Ranges {
    pub(super) fn of(ipam: &IpamStatus) -> Self {
        let waiting = match (&ipam.waiting, ipam.network) {
            (None, None) => Some("this host is not in a network yet".to_owned()),
            (waiting, _) => waiting.clone(),
        };
        Self { v4: ipam.range, v6: ipam.range6, waiting, may_pass: ipam.may_pass }
    }

    /// What a request for these addresses waits for, or without any one for the next free address.
    pub(crate) fn delay(&self, asked: &[IpNet]) -> Option<&str> {
        let is_own = |net: &IpNet| self.all().any(|range| range.contains(&net.addr()));
        // One outside the ranges is given without any.
        let waits = self.may_pass && (asked.is_empty() || asked.iter().any(is_own));
        self.waiting.as_deref().filter(|_| waits)
    }

    /// All ranges.
    pub(crate) fn all(&self) -> impl Iterator<Item = IpNet> {
        [IpNet::V4(self.v4)].into_iter().chain(self.v6.map(IpNet::V6))
    }

    /// The IPv6 address that belongs to an IPv4 address of the range: it ends in it.
    pub(crate) fn partner_of(&self, address: Ipv4Addr) -> Option<IpNet> {
        let v6 = self.v6.filter(|_| self.v4.contains(&address))?;
        let partner = u128::from(v6.network()) | u128::from(u32::from(address));
        Ipv6Net::new(partner.into(), v6.prefix_len()).ok().map(IpNet::V6)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_request_waits_for_ranges_that_may_come_and_only_for_addresses_of_them() {
        let why = Some("waiting for a link with another host");
        let waiting = why.map(str::to_owned);
        let (v4, v6) = ("10.32.0.0/12".parse().unwrap(), "fd00:1::/64".parse().ok());
        let ranges = Ranges { v4, v6, waiting, may_pass: true };
        let net = |text: &str| -> IpNet { text.parse().unwrap() };
        assert_eq!(ranges.delay(&[]), why);
        assert_eq!(ranges.delay(&[net("192.0.2.9/24"), net("10.32.0.9/12")]), why);
        assert_eq!(ranges.delay(&[net("fd00:1::a20:9/64")]), why);
        assert_eq!(ranges.delay(&[net("192.0.2.9/24"), net("fd00:2::9/64")]), None);
        assert_eq!(Ranges { may_pass: false, ..ranges.clone() }.delay(&[]), None);
        assert_eq!(Ranges { waiting: None, ..ranges }.delay(&[]), None);
    }
}
