//! The choice of what systemd-resolved is told of Weft's interfaces.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};

use weft_kernel::DeviceAddresses;

/// Name servers of the interface. One is enough: all of them are this daemon.
pub(super) const SERVERS_MAX: usize = 2;
/// The port of name servers; only newer versions of systemd-resolved take another.
const DNS_PORT: u16 = 53;

/// This host's interfaces on a network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Interfaces {
    /// The network's name; `None`: `weft`, whose names stand right below the domain.
    pub(crate) network: Option<String>,
    /// The first that can have settings gets some.
    pub(crate) devices: Vec<DeviceAddresses>,
}

/// The settings of an interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Setting {
    /// The index of the interface.
    pub(super) index: u32,
    /// The domain that is asked for there: the network's own, below that of all.
    pub(super) domain: String,
    /// The addresses at which this daemon answers.
    pub(super) servers: Vec<IpAddr>,
}

/// The reasons why there is nothing to tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Lack {
    /// There is no interface.
    #[error("this host has no interface on the network")]
    Device,
    /// systemd-resolved asks no servers of it.
    #[error("this host's interface on the network is down")]
    Up,
    /// Nor of one without an address beyond the link.
    #[error("this host has no address on the network: give it one by weft expose")]
    Address,
    /// DNS is answered elsewhere.
    #[error(
        "weft answers DNS on no address that this host has on the network: name one by --dns-listen"
    )]
    Server,
}

/// The settings for all networks, with the addresses at which DNS is answered; and what is lacking for those of `weft`.
pub(super) fn wanted(
    networks: &[Interfaces],
    domain: &str,
    served: &BTreeSet<SocketAddr>,
) -> (Vec<Setting>, Option<Lack>) {
    let (mut settings, mut lacking) = (Vec::new(), Some(Lack::Device));
    for Interfaces { network, devices } in networks {
        let domain = match network {
            Some(network) => format!("{network}.{domain}"),
            None => domain.to_owned(),
        };
        let found = of_first(devices, &domain, served);
        if network.is_none() {
            lacking = found.as_ref().err().copied();
        }
        settings.extend(found);
    }
    (settings, lacking)
}

/// The settings of the first device that can have some.
fn of_first(
    devices: &[DeviceAddresses],
    domain: &str,
    served: &BTreeSet<SocketAddr>,
) -> Result<Setting, Lack> {
    let mut first = None;
    for device in devices {
        match setting_of(device, domain, served) {
            Ok(setting) => return Ok(setting),
            Err(lack) => _ = first.get_or_insert(lack),
        }
    }
    Err(first.unwrap_or(Lack::Device))
}

fn setting_of(
    device: &DeviceAddresses,
    domain: &str,
    served: &BTreeSet<SocketAddr>,
) -> Result<Setting, Lack> {
    if !device.is_up {
        return Err(Lack::Up);
    }
    let own: Vec<IpAddr> = device.addresses.iter().copied().filter(reaches_beyond_link).collect();
    if own.is_empty() {
        return Err(Lack::Address);
    }
    let is_served = |address: &IpAddr| served.contains(&SocketAddr::new(*address, DNS_PORT));
    let mut servers: Vec<IpAddr> = own.into_iter().filter(is_served).collect();
    // The same order each time; IPv4 first.
    servers.sort_unstable();
    servers.dedup();
    servers.truncate(SERVERS_MAX);
    if servers.is_empty() {
        return Err(Lack::Server);
    }
    Ok(Setting { index: device.index, domain: domain.to_owned(), servers })
}

fn reaches_beyond_link(address: &IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => !address.is_link_local() && !address.is_loopback(),
        IpAddr::V6(address) => !address.is_unicast_link_local() && !address.is_loopback(),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn device(is_up: bool, addresses: &[&str]) -> DeviceAddresses {
        let addresses = addresses.iter().map(|text| text.parse().unwrap()).collect();
        DeviceAddresses { index: 7, is_up, addresses }
    }

    const DOMAIN: &str = "weft.local";

    /// Of network `weft` alone.
    fn wanted_on(
        devices: &[DeviceAddresses],
        served: &BTreeSet<SocketAddr>,
    ) -> Result<Setting, Lack> {
        let weft = Interfaces { network: None, devices: devices.to_vec() };
        match wanted(&[weft], DOMAIN, served) {
            (mut settings, None) => Ok(settings.remove(0)),
            (_, Some(lack)) => Err(lack),
        }
    }

    fn at(texts: &[&str]) -> BTreeSet<SocketAddr> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    #[test]
    fn the_servers_are_those_of_the_interface_itself() {
        let device = device(true, &["fe80::1", "fd00::1", "10.47.255.1", "10.47.255.2"]);
        let served = at(&["10.47.255.1:53", "172.17.0.1:53", "[fd00::1]:53", "10.47.255.2:5353"]);
        let servers = ["10.47.255.1", "fd00::1"].map(|text| text.parse().unwrap()).to_vec();
        let domain = DOMAIN.to_owned();
        assert_eq!(wanted_on(&[device], &served), Ok(Setting { index: 7, domain, servers }));
    }

    #[test]
    fn each_lack_has_its_reason() {
        let served = at(&["10.47.255.1:53", "[fe80::1]:53"]);
        let lack = |device: DeviceAddresses| wanted_on(&[device], &served).unwrap_err();
        assert_eq!(wanted_on(&[], &served), Err(Lack::Device));
        assert_eq!(wanted(&[], DOMAIN, &served), (Vec::new(), Some(Lack::Device)));
        assert_eq!(lack(device(false, &["10.47.255.1"])), Lack::Up);
        assert_eq!(lack(device(true, &["fe80::1", "169.254.0.1"])), Lack::Address);
        assert_eq!(lack(device(true, &["10.47.255.9"])), Lack::Server);
        assert!(Lack::Server.to_string().contains("--dns-listen"));
    }

    #[test]
    fn the_first_device_that_serves_is_taken() {
        let served = at(&["10.47.255.1:53"]);
        let exposed = DeviceAddresses { index: 8, ..device(true, &["10.47.255.2"]) };
        let setting = wanted_on(&[exposed.clone(), device(true, &["10.47.255.1"])], &served);
        assert_eq!(setting.map(|it| it.index), Ok(7));
        assert_eq!(wanted_on(&[exposed, device(true, &[])], &served), Err(Lack::Server));
    }

    #[test]
    fn each_network_has_its_own_domain_also_where_weft_has_no_address() {
        let served = at(&["10.47.255.1:53", "10.134.0.1:53"]);
        let weft = |address| Interfaces { network: None, devices: vec![device(true, &[address])] };
        let on_shop = DeviceAddresses { index: 8, ..device(true, &["10.134.0.1"]) };
        let shop = Interfaces { network: Some("shop".to_owned()), devices: vec![on_shop] };
        let named = |networks: &[Interfaces]| {
            let (settings, lack) = wanted(networks, DOMAIN, &served);
            let pairs: Vec<(u32, String)> =
                settings.into_iter().map(|it| (it.index, it.domain)).collect();
            (pairs, lack)
        };
        let of_shop = (8, "shop.weft.local".to_owned());
        let both = vec![(7, DOMAIN.to_owned()), of_shop.clone()];
        assert_eq!(named(&[weft("10.47.255.1"), shop.clone()]), (both, None));
        let lack = Some(Lack::Server);
        assert_eq!(named(&[weft("10.47.255.9"), shop]), (vec![of_shop], lack));
    }

    #[test]
    fn the_list_is_bounded() {
        let texts: Vec<String> = (1..100).map(|n| format!("10.47.255.{n}")).collect();
        let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
        let served = texts.iter().map(|text| SocketAddr::new(text.parse().unwrap(), 53)).collect();
        let servers = wanted_on(&[device(true, &texts)], &served).unwrap().servers;
        assert_eq!(servers.len(), SERVERS_MAX);
    }
}
