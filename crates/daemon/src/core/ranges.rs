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
}

impl Ranges {
    pub(super) fn of(ipam: &IpamStatus) -> Self {
        let waiting = match (&ipam.waiting, ipam.network) {
            (None, None) => Some("this host is not in a network yet".to_owned()),
            (waiting, _) => waiting.clone(),
        };
        Self { v4: ipam.range, v6: ipam.range6, waiting }
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
