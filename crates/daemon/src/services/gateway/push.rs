//! The options that a client is pushed. The session adds those of the data channel.

use std::net::{IpAddr, Ipv4Addr};

use ipnet::IpNet;
use weft_openvpn::config::check_push;
use weft_openvpn::messages::{PUSH_OPTION_BYTES_MAX, PUSH_OPTIONS_MAX, PushOption, RouteHost};

/// Refuses options that cannot be pushed to all clients, or are the gateway's own.
///
/// # Errors
/// Why, for the user.
pub(super) fn check(options: &[String]) -> Result<(), String> {
    if options.len() > PUSH_OPTIONS_MAX {
        return Err(format!("more than {PUSH_OPTIONS_MAX} pushed options: leave some out"));
    }
    for option in options {
        if option.contains(',') || option.chars().any(char::is_control) {
            return Err(format!(
                "{option:?} has a comma or a control character: it cannot be pushed"
            ));
        }
        if option.len() > PUSH_OPTION_BYTES_MAX {
            return Err(format!(
                "{option:?} is longer than {PUSH_OPTION_BYTES_MAX} bytes: shorten it"
            ));
        }
        match check_push(option).map_err(|error| error.to_string())? {
            PushOption::Compression(_)
            | PushOption::Topology(_)
            | PushOption::RouteGateway(_)
            | PushOption::Cipher(_)
            | PushOption::PeerId(_)
            | PushOption::ProtocolFlags(_)
            | PushOption::KeyDerivationExporter
            | PushOption::TunMtu(_)
            | PushOption::AuthToken(_)
            | PushOption::Ifconfig(..)
            | PushOption::IfconfigIpv6(..) => {
                return Err(format!("{option:?} is the gateway's own to push: leave it out"));
            }
            _ if redirects(option) => {
                return Err(format!(
                    "{option:?}: leave it out, and give --redirect-gateway, which lets clients out as well"
                ));
            }
            _ => {}
        }
    }
    Ok(())
}

/// The destination of a pushed route through the tunnel.
pub(super) fn route_of(option: &str) -> Option<IpNet> {
    match PushOption::parse(option).ok()? {
        PushOption::Route(
            RouteHost::Address(network),
            mask,
            None | Some(RouteHost::VpnGateway),
            _,
        ) => IpNet::with_netmask(network.into(), mask.into()).ok().map(|net| net.trunc()),
        PushOption::RouteIpv6(network, bits, None | Some(RouteHost::VpnGateway), _) => {
            IpNet::new(network.into(), bits).ok().map(|net| net.trunc())
        }
        _ => None,
    }
}

/// Whether a route leads to nearly everywhere, as those do that stand for a default route.
pub(super) const fn is_everywhere(route: &IpNet) -> bool {
    match route {
        IpNet::V4(route) => route.prefix_len() <= 1,
        IpNet::V6(route) => route.prefix_len() <= 3,
    }
}

/// Whether an option leads all that a client sends through the host.
pub(super) fn redirects(option: &str) -> bool {
    matches!(PushOption::parse(option), Ok(PushOption::RedirectGateway(_)))
        || route_of(option).is_some_and(|route| is_everywhere(&route))
}

/// The network as a client gets to see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Inside {
    /// This host's addresses on it, with the ranges' prefixes.
    pub(super) own: Vec<IpNet>,
    /// The domain of containers' names.
    pub(super) domain: String,
    pub(super) ping_s: u32,
    pub(super) ping_restart_s: u32,
    /// All that clients send goes through this host.
    pub(super) redirect_gateway: bool,
    /// Further options for all clients.
    pub(super) pushes: Vec<String>,
}

impl Inside {
    /// This host's first address of a family.
    pub(super) fn own(&self, is_ipv4: bool) -> Option<IpNet> {
        self.own.iter().copied().find(|net| net.addr().is_ipv4() == is_ipv4)
    }

    /// This host's first IPv4 address.
    pub(super) fn own_ipv4(&self) -> Option<Ipv4Addr> {
        match self.own(true)?.addr() {
            IpAddr::V4(address) => Some(address),
            IpAddr::V6(_) => None,
        }
    }

    /// The options for a client with these addresses. The range is the client's subnet, so that it needs no route.
    pub(super) fn options(&self, addresses: &[IpAddr]) -> Vec<String> {
        let mut names = Vec::new();
        if let Some(own) = self.own(true) {
            names.push(format!("dhcp-option DNS {}", own.addr()));
            names.push(format!("dhcp-option DOMAIN {}", self.domain));
        }
        self.options_with(addresses, &names)
    }

    /// The same with these options in the place of those that tell of names.
    pub(super) fn options_with(&self, addresses: &[IpAddr], more: &[String]) -> Vec<String> {
        let mut options = vec!["topology subnet".to_owned()];
        for address in addresses {
            let Some(own) = self.own(address.is_ipv4()) else { continue };
            match address {
                IpAddr::V4(address) => {
                    options.push(format!("ifconfig {address} {}", own.netmask()));
                    options.push(format!("route-gateway {}", own.addr()));
                }
                IpAddr::V6(address) => {
                    let bits = own.prefix_len();
                    options.push(format!("ifconfig-ipv6 {address}/{bits} {}", own.addr()));
                }
            }
        }
        options.extend(more.iter().chain(&self.pushes).cloned());
        // What an administrator says of these comes first.
        if self.redirect_gateway && !options.iter().any(|it| it.starts_with("redirect-gateway")) {
            // Without an address of the family, the client could not follow.
            let ipv6 = options.iter().any(|option| option.starts_with("ifconfig-ipv6 "));
            options.push(format!("redirect-gateway def1{}", if ipv6 { " ipv6" } else { "" }));
        }
        // A client that leaves says so.
        let (ping, restart) = (self.ping_s, self.ping_restart_s);
        for (name, value) in
            [("ping", ping), ("ping-restart", restart), ("explicit-exit-notify", 1)]
        {
            let is_it = |option: &String| option.split_whitespace().next() == Some(name);
            if !options.iter().any(is_it) {
                options.push(format!("{name} {value}"));
            }
        }
        options
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn inside(own: &[&str]) -> Inside {
        let own = own.iter().map(|net| net.parse().unwrap()).collect();
        Inside {
            own,
            domain: "weft.local".into(),
            ping_s: 10,
            ping_restart_s: 60,
            redirect_gateway: false,
            pushes: Vec::new(),
        }
    }

    #[test]
    fn a_client_is_told_its_subnet_the_gateway_and_dns() {
        let addresses = ["10.32.0.9".parse().unwrap(), "fd00::9".parse().unwrap()];
        let both = inside(&["10.32.0.1/12", "fd00::1/64"]);
        let options = both.options(&addresses);
        for expected in [
            "topology subnet",
            "ifconfig 10.32.0.9 255.240.0.0",
            "route-gateway 10.32.0.1",
            "ifconfig-ipv6 fd00::9/64 fd00::1",
            "dhcp-option DNS 10.32.0.1",
            "dhcp-option DOMAIN weft.local",
            "ping 10",
            "ping-restart 60",
        ] {
            assert!(options.iter().any(|option| option == expected), "{expected}: {options:?}");
        }
    }

    #[test]
    fn a_family_that_the_host_lacks_is_left_out() {
        let addresses = ["10.32.0.9".parse().unwrap(), "fd00::9".parse().unwrap()];
        let options = inside(&["10.32.0.1/12"]).options(&addresses);
        assert!(!options.iter().any(|option| option.starts_with("ifconfig-ipv6")), "{options:?}");
    }

    #[test]
    fn all_traffic_is_redirected_in_the_families_that_the_client_has() {
        let addresses = ["10.32.0.9".parse().unwrap(), "fd00::9".parse().unwrap()];
        let redirect = |own: &[&str], more: &[String]| {
            let inside = Inside { redirect_gateway: true, ..inside(own) };
            let options = inside.options_with(&addresses, more).into_iter();
            options.filter(|option| redirects(option)).collect::<Vec<_>>()
        };
        assert_eq!(redirect(&["10.32.0.1/12", "fd00::1/64"], &[]), ["redirect-gateway def1 ipv6"]);
        assert_eq!(redirect(&["10.32.0.1/12"], &[]), ["redirect-gateway def1"]);
        let by_hand = ["redirect-gateway local".to_owned()];
        assert_eq!(redirect(&["10.32.0.1/12"], &by_hand), by_hand);
    }

    #[test]
    fn what_an_administrator_pushes_comes_before_the_gateways_own() {
        let mut inside = inside(&["10.8.0.1/24"]);
        inside.pushes = vec!["route 192.0.2.0 255.255.255.0".into()];
        let addresses = ["10.8.0.9".parse().unwrap()];
        let more = ["ping 3".to_owned(), "dhcp-option DNS 192.0.2.53".to_owned()];
        let options = inside.options_with(&addresses, &more);
        let count = |start: &str| options.iter().filter(|it| it.starts_with(start)).count();
        assert_eq!((count("ping "), count("ping-restart "), count("route ")), (1, 1, 1));
        assert_eq!((count("dhcp-option"), count("topology"), count("explicit-exit")), (1, 1, 1));
        assert!(options.contains(&"ping 3".to_owned()), "{options:?}");
    }

    #[test]
    fn options_that_are_the_gateways_own_or_break_the_list_are_refused() {
        let refused = |option: &str| check(&[option.to_owned()]).is_err();
        for option in ["route 192.0.2.0 255.255.255.0", "dhcp-option DNS 192.0.2.1", "inactive 60"]
        {
            assert!(!refused(option), "{option}");
        }
        for option in [
            "topology net30",
            "ifconfig 10.8.0.2 10.8.0.1",
            "a,b",
            "a\nb",
            "comp-lzo no",
            "route x",
            "redirect-gateway def1",
            "route 0.0.0.0 128.0.0.0",
            "route-ipv6 2000::/3",
        ] {
            assert!(refused(option), "{option}");
        }
        assert!(check(&vec!["inactive 1".to_owned(); PUSH_OPTIONS_MAX + 1]).is_err());
    }
}
