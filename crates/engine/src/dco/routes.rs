//! The system's routes over a device: by which next hop an address is reached.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};

/// Routes that a device looks at.
pub const ROUTES_MAX: usize = 65_536;

/// A route of the system whose output is the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Route {
    /// Its destination, with the prefix's length in bits.
    pub destination: (IpAddr, u8),
    /// The VPN address of the peer that it goes by; `None`: a destination's address is its peer's VPN
    /// address.
    pub gateway: Option<IpAddr>,
    /// Of two routes to one destination the lower is taken.
    pub metric: u32,
}

/// Routes for the look-up: one hash table for each length of prefix, the longest first.
#[derive(Debug, Default)]
pub(crate) struct Routes {
    ipv4: Vec<Length>,
    ipv6: Vec<Length>,
}

/// Routes with prefixes of one length.
#[derive(Debug)]
struct Length {
    bits: u8,
    hops: HashMap<u128, Hop>,
}

#[derive(Clone, Copy, Debug)]
struct Hop {
    gateway: Option<IpAddr>,
    metric: u32,
}

impl Routes {
    /// These, and no others; those beyond [`ROUTES_MAX`] and those with impossible prefixes are left
    /// out.
    pub(crate) fn of(routes: &[Route]) -> Self {
        let mut all = Self::default();
        for route in routes.iter().take(ROUTES_MAX) {
            all.insert(route);
        }
        all
    }

    /// The address by which `address` is reached: a gateway's or its own. `None`: not over this device.
    pub(crate) fn next_hop(&self, address: IpAddr) -> Option<IpAddr> {
        let (bits, lengths) = match address {
            IpAddr::V4(_) => (32, &self.ipv4),
            IpAddr::V6(_) => (128, &self.ipv6),
        };
        let number = number(address);
        let found = lengths.iter().find_map(|length| {
            let prefix = prefix(number, bits, length.bits)?;
            length.hops.get(&prefix)
        })?;
        Some(found.gateway.unwrap_or(address))
    }

    fn insert(&mut self, route: &Route) {
        let (address, bits) = route.destination;
        let (all, lengths) = match address {
            IpAddr::V4(_) => (32, &mut self.ipv4),
            IpAddr::V6(_) => (128, &mut self.ipv6),
        };
        let Some(prefix) = prefix(number(address), all, bits) else { return };
        let place = lengths.partition_point(|length| length.bits > bits);
        if lengths.get(place).is_none_or(|length| length.bits != bits) {
            lengths.insert(place, Length { bits, hops: HashMap::new() });
        }
        let hop = Hop { gateway: route.gateway, metric: route.metric };
        let known = lengths[place].hops.entry(prefix).or_insert(hop);
        if hop.metric < known.metric {
            *known = hop;
        }
    }
}

fn number(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(v4) => u128::from(v4.to_bits()),
        IpAddr::V6(v6) => Ipv6Addr::to_bits(v6),
    }
}

/// The first `bits` bits of a number of `all`; `None` if there are fewer.
fn prefix(number: u128, all: u8, bits: u8) -> Option<u128> {
    let rest = u32::from(all.checked_sub(bits)?);
    Some(number.checked_shr(rest).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn route(destination: &str, gateway: &str, metric: u32) -> Route {
        let (address, bits) = destination.split_once('/').unwrap();
        let destination = (address.parse().unwrap(), bits.parse().unwrap());
        Route { destination, gateway: gateway.parse().ok(), metric }
    }

    fn hop(routes: &Routes, address: &str) -> Option<String> {
        routes.next_hop(address.parse().unwrap()).map(|hop| hop.to_string())
    }

    #[test]
    fn the_longest_prefix_then_the_lowest_metric_says_the_next_hop() {
        let routes = Routes::of(&[
            route("10.8.0.0/24", "", 0),
            route("192.168.0.0/16", "10.8.0.2", 10),
            route("192.168.7.0/24", "10.8.0.3", 50),
            route("192.168.7.0/24", "10.8.0.4", 20),
            route("192.168.7.0/24", "10.8.0.5", 30),
            route("2001:db8::/32", "fd00::2", 0),
            route("2001:db8::9/128", "", 0),
        ]);
        assert_eq!(hop(&routes, "10.8.0.77").unwrap(), "10.8.0.77");
        assert_eq!(hop(&routes, "192.168.3.1").unwrap(), "10.8.0.2");
        assert_eq!(hop(&routes, "192.168.7.1").unwrap(), "10.8.0.4");
        assert_eq!(hop(&routes, "2001:db8:1::1").unwrap(), "fd00::2");
        assert_eq!(hop(&routes, "2001:db8::9").unwrap(), "2001:db8::9");
        assert_eq!(hop(&routes, "172.16.0.1"), None);
        assert_eq!(hop(&routes, "fd00::1"), None);
    }

    #[test]
    fn default_routes_take_the_rest_of_their_family_only() {
        let routes = Routes::of(&[route("0.0.0.0/0", "10.8.0.1", 0), route("::/0", "fd00::1", 0)]);
        assert_eq!(hop(&routes, "198.51.100.1").unwrap(), "10.8.0.1");
        assert_eq!(hop(&routes, "2001:db8::1").unwrap(), "fd00::1");
        let only_ipv4 = Routes::of(&[route("0.0.0.0/0", "10.8.0.1", 0)]);
        assert_eq!(hop(&only_ipv4, "2001:db8::1"), None);
    }

    #[test]
    fn impossible_prefixes_are_left_out() {
        let routes = Routes::of(&[route("10.0.0.0/33", "", 0), route("10.0.0.0/32", "", 0)]);
        assert_eq!(hop(&routes, "10.0.0.0").unwrap(), "10.0.0.0");
        assert_eq!(hop(&routes, "10.0.0.1"), None);
    }
}
