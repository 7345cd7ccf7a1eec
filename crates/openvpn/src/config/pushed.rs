//! Options that an administrator has pushed: what clients would refuse is found here, since their complaint is read by
//! nobody who could mend it.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use super::table::row;
use super::{Args, Outcome, nothing};
use crate::messages::{PUSH_OPTION_BYTES_MAX, PushOption, PushOptionError, RouteHost};
use crate::words;

/// Servers of one `dns server`, as OpenVPN 2.6 takes them.
const DNS_ADDRESSES_MAX: usize = 8;
/// The highest number of a pushed `dns server`.
const DNS_SERVER_MAX: u8 = 127;

/// An option that clients would not take: the administrator's fault.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PushFault {
    /// It has no meaning.
    #[error(transparent)]
    Option(#[from] PushOptionError),
    /// No words.
    #[error("a pushed option is empty: leave it out")]
    Empty,
    /// No option of OpenVPN's.
    #[error("OpenVPN has no option {0}: correct its name")]
    Unknown(String),
    /// More values than it takes.
    #[error("the pushed option {option} takes {most} values at most: remove the rest")]
    TooMany {
        /// The option's name.
        option: String,
        /// How many it takes.
        most: usize,
    },
    /// A route to an address within a network.
    #[error("{given} of the pushed route lies within a network: did you mean {meant}?")]
    HostBits {
        /// As it was given.
        given: String,
        /// The network, with its mask or prefix length.
        meant: String,
    },
}

/// Reads an option that all clients are to be pushed, more strictly than a client reads it.
///
/// # Errors
/// [`PushFault`]
pub fn check_push(text: &str) -> Result<PushOption, PushFault> {
    let words = words::split(text).map_err(PushOptionError::from)?;
    let (name, values) = words.split_first().ok_or(PushFault::Empty)?;
    if row(name).is_none() {
        return Err(PushFault::Unknown(name.clone()));
    }
    let option = PushOption::parse(text)?;
    if let Some(most) = values_max(&option)
        && values.len() > most
    {
        return Err(PushFault::TooMany { option: name.clone(), most });
    }
    let bad = |value: &str, expected: &'static str| PushOptionError::BadValue {
        option: name.clone(),
        value: value.to_owned(),
        expected,
    };
    match &option {
        PushOption::Route(network, mask, gateway, _) => {
            let is_foreign = gateway == &Some(RouteHost::NetGateway);
            check_route(network, *mask, is_foreign)?;
            if let Some(RouteHost::Name(name)) = gateway {
                return Err(bad(name, "an address, vpn_gateway or net_gateway as gateway").into());
            }
        }
        PushOption::RouteIpv6(network, bits, gateway, _) => {
            check_route6(*network, *bits)?;
            if let Some(gateway) = gateway
                && !matches!(gateway, RouteHost::Address(_))
            {
                return Err(bad(&gateway.to_string(), "an IPv6 address as gateway").into());
            }
        }
        PushOption::DhcpOption(kind, value) => {
            dhcp_fault(kind, value).map_or(Ok(()), |expected| Err(bad(value, expected)))?;
        }
        PushOption::Dns(words) => {
            let words: Vec<&str> = words.iter().map(String::as_str).collect();
            dns_fault(&words).map_or(Ok(()), |expected| Err(bad(&words.join(" "), expected)))?;
        }
        _ => {}
    }
    Ok(option)
}

/// A line `push`, of a server's configuration or of a client's file. `push` gets an option that clients are to have;
/// what Weft pushes itself is left out.
pub(super) fn pushed_line(args: Args<'_>, push: &mut dyn FnMut(String) -> Outcome) -> Outcome {
    args.at_most(1)?;
    let text = args.text(0, "an option in quotes")?;
    if text.contains(',') || text.chars().any(char::is_control) {
        return Err("the option has a comma or a control character: it cannot be pushed".to_owned());
    }
    if text.len() > PUSH_OPTION_BYTES_MAX {
        return Err(format!("clients take at most {PUSH_OPTION_BYTES_MAX} bytes: shorten it"));
    }
    match PushOption::parse(text).map_err(|error| error.to_string())? {
        PushOption::Compression(_) => nothing("Weft never compresses"),
        PushOption::Topology(_)
        | PushOption::RouteGateway(_)
        | PushOption::Cipher(_)
        | PushOption::PeerId(_)
        | PushOption::ProtocolFlags(_)
        | PushOption::KeyDerivationExporter
        | PushOption::Ifconfig(..)
        | PushOption::IfconfigIpv6(..) => nothing("Weft pushes its own"),
        _ => push(text.to_owned()),
    }
}

/// How many values an option takes; `None`: that differs, or is checked elsewhere.
const fn values_max(option: &PushOption) -> Option<usize> {
    Some(match option {
        PushOption::BlockOutsideDns | PushOption::BlockIpv6 | PushOption::RegisterDns => 0,
        PushOption::RouteMetric(_)
        | PushOption::Ping(_)
        | PushOption::PingRestart(_)
        | PushOption::PingExit(_)
        | PushOption::SessionTimeout(_)
        | PushOption::ExplicitExitNotify(_) => 1,
        PushOption::Inactive(..) => 2,
        PushOption::RouteIpv6(..) => 3,
        PushOption::Route(..) => 4,
        _ => return None,
    })
}

/// `is_foreign`: the route keeps something out of the tunnel, so that the gateway need not know where it leads.
fn check_route(
    network: &RouteHost<Ipv4Addr>,
    mask: Ipv4Addr,
    is_foreign: bool,
) -> Result<(), PushFault> {
    let bad = |value: String, expected| {
        let option = "route".to_owned();
        PushFault::Option(PushOptionError::BadValue { option, value, expected })
    };
    let mask_bits = u32::from(mask);
    if mask_bits.leading_ones() + mask_bits.trailing_zeros() < u32::BITS {
        return Err(bad(mask.to_string(), "a mask such as 255.255.255.0"));
    }
    match network {
        RouteHost::Address(address) => {
            let meant = Ipv4Addr::from(u32::from(*address) & mask_bits);
            if meant != *address {
                let meant = format!("{meant} {mask}");
                return Err(PushFault::HostBits { given: address.to_string(), meant });
            }
            Ok(())
        }
        RouteHost::Name(_) if is_foreign => Ok(()),
        other => Err(bad(other.to_string(), "an address: names are let through to nowhere")),
    }
}

fn check_route6(network: Ipv6Addr, bits: u8) -> Result<(), PushFault> {
    let mask = u128::MAX.checked_shl(128 - u32::from(bits)).unwrap_or_default();
    let meant = Ipv6Addr::from(u128::from(network) & mask);
    if meant == network {
        return Ok(());
    }
    Err(PushFault::HostBits { given: network.to_string(), meant: format!("{meant}/{bits}") })
}

/// What a `dhcp-option` takes that has another value. Clients have kinds of their own, which are not known here.
fn dhcp_fault(kind: &str, value: &str) -> Option<&'static str> {
    let is_word = || !value.is_empty() && !value.contains(' ');
    let (fits, expected) = match kind {
        "DNS" => (value.parse::<IpAddr>().is_ok(), "the address of a server after DNS"),
        "DNS6" => (value.parse::<Ipv6Addr>().is_ok(), "the IPv6 address of a server after DNS6"),
        "WINS" | "NBDD" | "NTP" => {
            (value.parse::<Ipv4Addr>().is_ok(), "the IPv4 address of a server after its kind")
        }
        "DOMAIN" | "DOMAIN-SEARCH" | "ADAPTER_DOMAIN_SUFFIX" => {
            (is_word(), "one domain after its kind")
        }
        "NBT" => (["1", "2", "4", "8"].contains(&value), "1, 2, 4 or 8 after NBT"),
        "DISABLE-NBT" => (value.is_empty(), "nothing after DISABLE-NBT"),
        _ => return None,
    };
    (!fits).then_some(expected)
}

/// What `dns` takes that has other values.
fn dns_fault(words: &[&str]) -> Option<&'static str> {
    let (fits, expected) = match words {
        ["search-domains", domains @ ..] => (!domains.is_empty(), "domains after search-domains"),
        ["server", number, what, values @ ..] => {
            if number.parse::<u8>().is_ok_and(|number| number <= DNS_SERVER_MAX) {
                server_fault(what, values)
            } else {
                (false, "server and a number from 0 to 127")
            }
        }
        _ => (false, "search-domains DOMAIN, or server NUMBER and what it is"),
    };
    (!fits).then_some(expected)
}

fn server_fault(what: &str, values: &[&str]) -> (bool, &'static str) {
    let is_address = |text: &&str| {
        text.parse::<IpAddr>().is_ok()
            || text.parse::<SocketAddr>().is_ok()
            || text.trim_matches(['[', ']']).parse::<Ipv6Addr>().is_ok()
    };
    let is_one_of = |all: &[&str]| values.len() == 1 && values.iter().all(|it| all.contains(it));
    match what {
        "address" => (
            (1..=DNS_ADDRESSES_MAX).contains(&values.len()) && values.iter().all(is_address),
            "one to eight addresses, each with :PORT or without, after address",
        ),
        "resolve-domains" => (!values.is_empty(), "domains after resolve-domains"),
        "dnssec" => (is_one_of(&["yes", "optional", "no"]), "yes, optional or no after dnssec"),
        "transport" => (is_one_of(&["DoH", "DoT", "plain"]), "DoH, DoT or plain after transport"),
        "sni" => (values.len() == 1, "one name after sni"),
        _ => {
            (false, "address, resolve-domains, dnssec, transport or sni after the server's number")
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn options_that_stock_clients_take_pass() {
        for option in [
            "route 192.0.2.0 255.255.255.0",
            "route 192.0.2.7",
            "route 192.0.2.0 255.255.255.0 vpn_gateway 10",
            "route vpn.example 255.255.255.255 net_gateway",
            "route-ipv6 2001:db8::/32",
            "route-ipv6 2001:db8::/32 default 5",
            "route-ipv6 ::/0",
            "route-metric 77",
            "redirect-private def1",
            "dhcp-option DNS 192.0.2.53",
            "dhcp-option DNS 2001:db8::53",
            "dhcp-option DOMAIN example.net",
            "dhcp-option DISABLE-NBT",
            "dhcp-option PROXY_AUTO_CONFIG_URL http://192.0.2.1/pac",
            "dns server 0 address 192.0.2.53 [2001:db8::53]:5353 2001:db8::54",
            "dns server 0 resolve-domains example.net example.org",
            "dns server 127 dnssec optional",
            "dns search-domains example.net",
            "block-outside-dns",
            "inactive 60 1000",
            "setenv opt something",
            "sndbuf 393216",
            "tun-ipv6",
        ] {
            assert!(check_push(option).is_ok(), "{option}: {:?}", check_push(option));
        }
    }

    #[test]
    fn faults_are_named_with_the_option() {
        for (option, text) in [
            ("", "empty"),
            ("rout 192.0.2.0 255.255.255.0", "OpenVPN has no option rout"),
            ("route x", "the pushed option route has a bad value \"x\""),
            ("route", "route has a value too few"),
            ("route 192.0.2.0 255.0.255.0", "a mask such as"),
            ("route 192.0.2.7 255.255.255.0", "did you mean 192.0.2.0 255.255.255.0?"),
            ("route 192.0.2.0 255.255.255.0 office", "vpn_gateway or net_gateway as gateway"),
            ("route 192.0.2.0 255.255.255.0 vpn_gateway 1 2", "takes 4 values at most"),
            ("route 192.0.2.0 255.255.255.0 vpn_gateway far", "a number"),
            ("route-ipv6 2001:db8::1/32", "did you mean 2001:db8::/32?"),
            ("route-ipv6 2001:db8::", "an IPv6 address with its prefix length"),
            ("route-ipv6 2001:db8::/32 vpn_gateway", "an IPv6 address as gateway"),
            ("dhcp-option", "dhcp-option has a value too few"),
            ("dhcp-option DNS dns.example", "the address of a server after DNS"),
            ("dhcp-option WINS 2001:db8::1", "the IPv4 address"),
            ("dhcp-option DOMAIN", "one domain after its kind"),
            ("dhcp-option DOMAIN a b", "one domain after its kind"),
            ("dhcp-option NBT 3", "1, 2, 4 or 8"),
            ("dns", "search-domains DOMAIN, or server NUMBER"),
            ("dns search-domains", "domains after"),
            ("dns server 128 address 192.0.2.53", "a number from 0 to 127"),
            ("dns server 1 address", "one to eight addresses"),
            ("dns server 1 address dns.example", "one to eight addresses"),
            ("dns server 1 dnssec maybe", "yes, optional or no"),
            ("dns server 1 transport DoQ", "DoH, DoT or plain"),
            ("dns server 1 port 53", "address, resolve-domains"),
            ("block-outside-dns yes", "takes 0 values at most"),
            ("inactive soon", "inactive has a bad value \"soon\""),
            ("ping 5 6", "takes 1 values at most"),
            ("route \"192.0.2.0", "close the quotation"),
        ] {
            let error = check_push(option).map(drop).unwrap_err().to_string();
            assert!(error.contains(text), "{option}: {error}");
        }
    }
}
