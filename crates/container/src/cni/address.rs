//! Addresses that a user asks for.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr},
    str::FromStr,
};

use serde::{Deserialize, Serialize};
use weft_packet::ethernet::Mac;

/// An address that a user asks for, with or without the length of its network's prefix.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct RequestedAddress {
    /// The address.
    pub address: IpAddr,
    /// The prefix length, if the user gave one.
    pub prefix: Option<u8>,
}

impl fmt::Display for RequestedAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.prefix {
            Some(prefix) => write!(f, "{}/{prefix}", self.address),
            None => self.address.fmt(f),
        }
    }
}

/// An address that an interface can have, with an optional prefix length.
pub(super) fn parse_address(text: &str) -> Result<RequestedAddress, String> {
    let wrong = || format!("{text:?} is no IP address, such as 10.32.0.9 or 10.32.0.9/12");
    let text = text.trim();
    let (address, prefix) = match text.split_once('/') {
        Some((address, prefix)) => (address, Some(prefix)),
        None => (text, None),
    };
    let address = IpAddr::from_str(address).map_err(|_| wrong())?;
    let longest = if address.is_ipv4() { 32 } else { 128 };
    let prefix = match prefix.map(str::parse::<u8>) {
        Some(Ok(prefix)) if (1..=longest).contains(&prefix) => Some(prefix),
        None => None,
        Some(_) => return Err(wrong()),
    };
    let is_unusable = address.is_unspecified()
        || address.is_loopback()
        || address.is_multicast()
        || address == IpAddr::V4(Ipv4Addr::BROADCAST);
    if is_unusable {
        return Err(format!("no container can have the address {address}"));
    }
    Ok(RequestedAddress { address, prefix })
}

/// An Ethernet address that an interface can have.
pub(super) fn parse_mac(text: &str) -> Result<Mac, String> {
    let mac = Mac::from_str(text.trim()).map_err(|error| format!("{text:?}: {error}"))?;
    if mac.0 == [0; 6] || mac.0[0] & 1 == 1 {
        return Err(format!("no interface can have the Ethernet address {mac}"));
    }
    Ok(mac)
}

/// Takes the addresses of each family from the first list that has any, since runtimes split a request:
/// nerdctl gives IPv4 in `CNI_ARGS`, and IPv6 as a capability.
pub(super) fn first_of_each_family(sources: &[Vec<RequestedAddress>]) -> Vec<RequestedAddress> {
    let mut chosen = Vec::new();
    for is_ipv4 in [true, false] {
        let of_family = sources.iter().map(|list| {
            list.iter().filter(|wanted| wanted.address.is_ipv4() == is_ipv4).collect::<Vec<_>>()
        });
        for wanted in of_family.into_iter().find(|list| !list.is_empty()).unwrap_or_default() {
            if !chosen.contains(wanted) {
                chosen.push(*wanted);
            }
        }
    }
    chosen
}
