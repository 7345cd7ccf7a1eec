//! The options that a client is pushed. The session adds those of the data channel.

use std::net::IpAddr;

use ipnet::IpNet;

/// The network as a client gets to see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Inside {
    /// This host's addresses on it, with the ranges' prefixes.
    pub(super) own: Vec<IpNet>,
    /// The domain of containers' names.
    pub(super) domain: String,
    pub(super) ping_s: u32,
    pub(super) ping_restart_s: u32,
}

impl Inside {
    /// This host's first address of a family.
    pub(super) fn own(&self, is_ipv4: bool) -> Option<IpNet> {
        self.own.iter().copied().find(|net| net.addr().is_ipv4() == is_ipv4)
    }

    /// The options for a client with these addresses. The range is the client's subnet, so that it needs no route.
    pub(super) fn options(&self, addresses: &[IpAddr]) -> Vec<String> {
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
        if let Some(own) = self.own(true) {
            options.push(format!("dhcp-option DNS {}", own.addr()));
            options.push(format!("dhcp-option DOMAIN {}", self.domain));
        }
        options.push(format!("ping {}", self.ping_s));
        options.push(format!("ping-restart {}", self.ping_restart_s));
        // A client that leaves says so.
        options.push("explicit-exit-notify 1".to_owned());
        options
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn inside(own: &[&str]) -> Inside {
        let own = own.iter().map(|net| net.parse().unwrap()).collect();
        Inside { own, domain: "weft.local".into(), ping_s: 10, ping_restart_s: 60 }
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
}
