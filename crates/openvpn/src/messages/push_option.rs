//! Pushed options by their meaning. An option that no stock client knows, or that has no meaning for a tunnel of IP
//! packets, stays as its words.

use std::fmt;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;

use super::Secret;
use crate::data::PeerNumber;
use crate::words::{self, WordsError};

/// A pushed option that has no meaning: the server's fault; the client leaves it out and says so.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PushOptionError {
    /// It cannot be cut into words.
    #[error("pushed option: {0}")]
    Words(#[from] WordsError),
    /// A value that its option does not take.
    #[error("the pushed option {option} has a bad value {value:?}: it takes {expected}")]
    BadValue {
        /// The option's name.
        option: String,
        /// The value.
        value: String,
        /// What it takes.
        expected: &'static str,
    },
    /// A value too few.
    #[error("the pushed option {option} has a value too few: it takes {expected}")]
    Missing {
        /// The option's name.
        option: String,
        /// What it takes.
        expected: &'static str,
    },
}

/// How the addresses of a tunnel lie.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Topology {
    /// One subnet.
    #[default]
    Subnet,
    /// A subnet of four addresses for each client.
    Net30,
    /// Pairs of addresses.
    P2p,
}

impl Topology {
    /// Its name in a configuration.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Subnet => "subnet",
            Self::Net30 => "net30",
            Self::P2p => "p2p",
        }
    }
}

impl FromStr for Topology {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let all = [Self::Subnet, Self::Net30, Self::P2p];
        let expected = "subnet, net30 or p2p";
        all.into_iter().find(|topology| topology.name() == text).ok_or(expected)
    }
}

/// A network, or a gateway, in a route.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RouteHost<A> {
    /// An address.
    Address(A),
    /// The tunnel's own gateway.
    VpnGateway,
    /// The gateway that the client had before.
    NetGateway,
    /// The server's address.
    RemoteHost,
    /// A name to be looked up.
    Name(String),
}

impl<A: FromStr> FromStr for RouteHost<A> {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b".-_".contains(&byte);
        Ok(match text {
            "vpn_gateway" => Self::VpnGateway,
            "net_gateway" => Self::NetGateway,
            "remote_host" => Self::RemoteHost,
            _ => match text.parse() {
                Ok(address) => Self::Address(address),
                Err(_) if !text.is_empty() && text.bytes().all(is_plain) => {
                    Self::Name(text.to_owned())
                }
                Err(_) => return Err("an address or a name"),
            },
        })
    }
}

impl<A: fmt::Display> fmt::Display for RouteHost<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address(address) => write!(f, "{address}"),
            Self::VpnGateway => f.write_str("vpn_gateway"),
            Self::NetGateway => f.write_str("net_gateway"),
            Self::RemoteHost => f.write_str("remote_host"),
            Self::Name(name) => f.write_str(name),
        }
    }
}

/// The value of `route-gateway`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Gateway {
    /// An address.
    Address(Ipv4Addr),
    /// From the DHCP server of a TAP tunnel.
    Dhcp,
}

/// The words of `protocol-flags`. Those that are unknown are left out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProtocolFlags {
    /// `cc-exit`: a session ends by a message of the control channel.
    pub cc_exit: bool,
    /// `tls-ekm`: data keys from the TLS exporter.
    pub tls_ekm: bool,
    /// `dyn-tls-crypt`: later handshakes have a key from the first.
    pub dyn_tls_crypt: bool,
    /// `aead-epoch`: data keys of epochs.
    pub aead_epoch: bool,
}

impl ProtocolFlags {
    fn of<'a>(words: impl Iterator<Item = &'a str>) -> Self {
        let mut flags = Self::default();
        for word in words {
            match word {
                "cc-exit" => flags.cc_exit = true,
                "tls-ekm" => flags.tls_ekm = true,
                "dyn-tls-crypt" => flags.dyn_tls_crypt = true,
                "aead-epoch" => flags.aead_epoch = true,
                _ => {}
            }
        }
        flags
    }

    fn words(self) -> impl Iterator<Item = &'static str> {
        let all = [
            (self.cc_exit, "cc-exit"),
            (self.tls_ekm, "tls-ekm"),
            (self.dyn_tls_crypt, "dyn-tls-crypt"),
            (self.aead_epoch, "aead-epoch"),
        ];
        all.into_iter().filter(|(is_set, _)| *is_set).map(|(_, word)| word)
    }
}

/// A pushed option.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PushOption {
    /// The client's address; the second is the mask, or the other end under net30 and p2p.
    Ifconfig(Ipv4Addr, Ipv4Addr),
    /// The client's address, the prefix length, the other end.
    IfconfigIpv6(Ipv6Addr, u8, Option<Ipv6Addr>),
    /// How the addresses lie.
    Topology(Topology),
    /// A route: network, mask, gateway, metric.
    Route(RouteHost<Ipv4Addr>, Ipv4Addr, Option<RouteHost<Ipv4Addr>>, Option<u32>),
    /// A route: network, prefix length, gateway, metric.
    RouteIpv6(Ipv6Addr, u8, Option<RouteHost<Ipv6Addr>>, Option<u32>),
    /// The gateway of routes without one.
    RouteGateway(Gateway),
    /// The metric of routes without one.
    RouteMetric(u32),
    /// All traffic goes through the tunnel: `def1`, `local`, `ipv6`, `!ipv4`, `block-local` and others.
    RedirectGateway(Vec<String>),
    /// As [`Self::RedirectGateway`], without the default route.
    RedirectPrivate(Vec<String>),
    /// `dhcp-option`: DNS, DOMAIN, DOMAIN-SEARCH and others, with their value.
    DhcpOption(String, String),
    /// `dns`: its words.
    Dns(Vec<String>),
    /// `block-outside-dns`
    BlockOutsideDns,
    /// `block-ipv6`
    BlockIpv6,
    /// `register-dns`
    RegisterDns,
    /// Seconds without anything sent until a ping.
    Ping(u32),
    /// Seconds without anything received until a new connection.
    PingRestart(u32),
    /// Seconds without anything received until the end.
    PingExit(u32),
    /// Seconds, and bytes, of idleness until the end.
    Inactive(u32, Option<u64>),
    /// Seconds until the end.
    SessionTimeout(u32),
    /// How often a client that leaves says so.
    ExplicitExitNotify(u32),
    /// The client's number in DATA_V2 packets.
    PeerId(PeerNumber),
    /// The data cipher.
    Cipher(String),
    /// Words of what both ends can do.
    ProtocolFlags(ProtocolFlags),
    /// `key-derivation tls-ekm`, for clients that do not know protocol-flags.
    KeyDerivationExporter,
    /// The tunnel's MTU, in bytes.
    TunMtu(u32),
    /// A token in the place of the password from now on.
    AuthToken(Secret),
    /// The user name that goes with the token.
    AuthTokenUser(String),
    /// `compress` or `comp-lzo` and its words.
    Compression(Vec<String>),
    /// Anything else: its words.
    Other(Vec<String>),
}

const ADDRESS: &str = "an IPv4 address";
const ADDRESS_PAIR: &str = "an IPv4 address and a mask or another one";
const NUMBER: &str = "a number";
const PREFIX: &str = "an IPv6 address with its prefix length";

impl PushOption {
    /// Reads an option.
    ///
    /// # Errors
    /// [`PushOptionError`]
    pub fn parse(text: &str) -> Result<Self, PushOptionError> {
        let words = words::split(text)?;
        let Some((name, values)) = words.split_first() else { return Ok(Self::Other(words)) };
        let values = Values { option: name, values };
        Ok(match name.as_str() {
            "ifconfig" => {
                Self::Ifconfig(values.get(0, ADDRESS_PAIR)?, values.get(1, ADDRESS_PAIR)?)
            }
            "ifconfig-ipv6" => {
                let (address, bits) = values.prefix()?;
                Self::IfconfigIpv6(address, bits, values.optional(1, "an IPv6 address")?)
            }
            "topology" => Self::Topology(values.get(0, "subnet, net30 or p2p")?),
            "route" | "route-ipv6" | "route-gateway" | "route-metric" => values.route()?,
            "redirect-gateway" => Self::RedirectGateway(values.values.to_vec()),
            "redirect-private" => Self::RedirectPrivate(values.values.to_vec()),
            "dhcp-option" => {
                let expected = "the option's name and value";
                let kind = values.text(0, expected)?.to_owned();
                Self::DhcpOption(kind, values.values[1..].join(" "))
            }
            "dns" => Self::Dns(values.values.to_vec()),
            "block-outside-dns" => Self::BlockOutsideDns,
            "block-ipv6" => Self::BlockIpv6,
            "register-dns" => Self::RegisterDns,
            "ping" => Self::Ping(values.get(0, NUMBER)?),
            "ping-restart" => Self::PingRestart(values.get(0, NUMBER)?),
            "ping-exit" => Self::PingExit(values.get(0, NUMBER)?),
            "inactive" => Self::Inactive(values.get(0, NUMBER)?, values.optional(1, NUMBER)?),
            "session-timeout" => Self::SessionTimeout(values.get(0, NUMBER)?),
            "explicit-exit-notify" => {
                Self::ExplicitExitNotify(values.optional(0, NUMBER)?.unwrap_or(1))
            }
            "peer-id" => {
                let expected = "a number below 16777215";
                let number = values.get(0, expected)?;
                Self::PeerId(PeerNumber::new(number).ok_or_else(|| values.bad(0, expected))?)
            }
            "cipher" => Self::Cipher(values.text(0, "a cipher's name")?.to_ascii_uppercase()),
            "protocol-flags" => {
                Self::ProtocolFlags(ProtocolFlags::of(values.values.iter().map(String::as_str)))
            }
            "key-derivation" => match values.text(0, "tls-ekm")? {
                "tls-ekm" => Self::KeyDerivationExporter,
                _ => return Err(values.bad(0, "tls-ekm")),
            },
            "tun-mtu" => Self::TunMtu(values.get(0, NUMBER)?),
            "auth-token" => Self::AuthToken(Secret::new(values.text(0, "a token")?)),
            "auth-token-user" => {
                let expected = "a name in base64";
                let bytes = STANDARD.decode(values.text(0, expected)?).ok();
                let name = bytes.and_then(|bytes| String::from_utf8(bytes).ok());
                Self::AuthTokenUser(name.ok_or_else(|| values.bad(0, expected))?)
            }
            "compress" | "comp-lzo" => Self::Compression(words.clone()),
            _ => Self::Other(words.clone()),
        })
    }

    /// The option as it is pushed.
    ///
    /// # Errors
    /// [`WordsError::Unwritable`]: a word that no line can hold.
    pub fn to_text(&self) -> Result<String, WordsError> {
        Ok(match self {
            Self::Ifconfig(address, other) => format!("ifconfig {address} {other}"),
            Self::IfconfigIpv6(address, bits, other) => {
                format!("ifconfig-ipv6 {address}/{bits}{}", tail(other.as_ref()))
            }
            Self::Topology(topology) => format!("topology {}", topology.name()),
            Self::Route(network, mask, gateway, metric) => {
                let default = RouteHost::VpnGateway;
                let gateway = gateway.as_ref().or(metric.is_some().then_some(&default));
                format!("route {network} {mask}{}{}", tail(gateway), tail(metric.as_ref()))
            }
            Self::RouteIpv6(network, bits, gateway, metric) => {
                // OpenVPN has no word for the tunnel's own gateway here.
                let default = RouteHost::Name("default".to_owned());
                let gateway = gateway.as_ref().or(metric.is_some().then_some(&default));
                format!("route-ipv6 {network}/{bits}{}{}", tail(gateway), tail(metric.as_ref()))
            }
            Self::RouteGateway(Gateway::Address(address)) => format!("route-gateway {address}"),
            Self::RouteGateway(Gateway::Dhcp) => "route-gateway dhcp".to_owned(),
            Self::RouteMetric(metric) => format!("route-metric {metric}"),
            Self::RedirectGateway(flags) => line("redirect-gateway", flags)?,
            Self::RedirectPrivate(flags) => line("redirect-private", flags)?,
            Self::DhcpOption(kind, value) => {
                let value = value.split(' ').filter(|word| !word.is_empty());
                let words: Vec<String> =
                    [kind.as_str()].into_iter().chain(value).map(str::to_owned).collect();
                line("dhcp-option", &words)?
            }
            Self::Dns(words) => line("dns", words)?,
            Self::BlockOutsideDns => "block-outside-dns".to_owned(),
            Self::BlockIpv6 => "block-ipv6".to_owned(),
            Self::RegisterDns => "register-dns".to_owned(),
            Self::Ping(seconds) => format!("ping {seconds}"),
            Self::PingRestart(seconds) => format!("ping-restart {seconds}"),
            Self::PingExit(seconds) => format!("ping-exit {seconds}"),
            Self::Inactive(seconds, bytes) => format!("inactive {seconds}{}", tail(bytes.as_ref())),
            Self::SessionTimeout(seconds) => format!("session-timeout {seconds}"),
            Self::ExplicitExitNotify(times) => format!("explicit-exit-notify {times}"),
            Self::PeerId(number) => format!("peer-id {}", number.get()),
            Self::Cipher(name) => format!("cipher {}", words::quote(name)?),
            Self::ProtocolFlags(flags) => {
                flags.words().fold("protocol-flags".to_owned(), |line, word| line + " " + word)
            }
            Self::KeyDerivationExporter => "key-derivation tls-ekm".to_owned(),
            Self::TunMtu(bytes) => format!("tun-mtu {bytes}"),
            Self::AuthToken(token) => format!("auth-token {}", words::quote(token.expose())?),
            Self::AuthTokenUser(name) => format!("auth-token-user {}", STANDARD.encode(name)),
            Self::Compression(words) | Self::Other(words) => match words.split_first() {
                Some((name, values)) => line(name, values)?,
                None => String::new(),
            },
        })
    }
}

fn tail<T: fmt::Display>(value: Option<&T>) -> String {
    value.map(|value| format!(" {value}")).unwrap_or_default()
}

fn line(name: &str, values: &[String]) -> Result<String, WordsError> {
    let mut line = words::quote(name)?;
    for value in values {
        line.push(' ');
        line.push_str(&words::quote(value)?);
    }
    Ok(line)
}

struct Values<'a> {
    option: &'a str,
    values: &'a [String],
}

impl<'a> Values<'a> {
    fn bad(&self, at: usize, expected: &'static str) -> PushOptionError {
        PushOptionError::BadValue {
            option: self.option.to_owned(),
            value: self.values.get(at).cloned().unwrap_or_default(),
            expected,
        }
    }

    fn text(&self, at: usize, expected: &'static str) -> Result<&'a str, PushOptionError> {
        let missing = || PushOptionError::Missing { option: self.option.to_owned(), expected };
        self.values.get(at).map(String::as_str).ok_or_else(missing)
    }

    fn get<T: FromStr>(&self, at: usize, expected: &'static str) -> Result<T, PushOptionError> {
        self.text(at, expected)?.parse().map_err(|_| self.bad(at, expected))
    }

    fn optional<T: FromStr>(
        &self,
        at: usize,
        expected: &'static str,
    ) -> Result<Option<T>, PushOptionError> {
        if self.values.len() > at { self.get(at, expected).map(Some) } else { Ok(None) }
    }

    fn prefix(&self) -> Result<(Ipv6Addr, u8), PushOptionError> {
        let bad = || self.bad(0, PREFIX);
        let (address, bits) = self.text(0, PREFIX)?.split_once('/').ok_or_else(bad)?;
        let bits = bits.parse().ok().filter(|bits| *bits <= 128).ok_or_else(bad)?;
        Ok((address.parse().map_err(|_| bad())?, bits))
    }

    fn route(&self) -> Result<PushOption, PushOptionError> {
        let is_default = |at: usize| self.values.get(at).is_none_or(|word| word == "default");
        Ok(match self.option {
            "route" => {
                let network = self.get(0, "a network")?;
                let mask = if is_default(1) { Ipv4Addr::BROADCAST } else { self.get(1, ADDRESS)? };
                let gateway = if is_default(2) { None } else { Some(self.get(2, ADDRESS)?) };
                let metric = if is_default(3) { None } else { Some(self.get(3, NUMBER)?) };
                PushOption::Route(network, mask, gateway, metric)
            }
            "route-ipv6" => {
                let (network, bits) = self.prefix()?;
                let gateway = if is_default(1) { None } else { Some(self.get(1, PREFIX)?) };
                let metric = if is_default(2) { None } else { Some(self.get(2, NUMBER)?) };
                PushOption::RouteIpv6(network, bits, gateway, metric)
            }
            "route-metric" => PushOption::RouteMetric(self.get(0, NUMBER)?),
            _ => PushOption::RouteGateway(match self.text(0, ADDRESS)? {
                "dhcp" => Gateway::Dhcp,
                _ => Gateway::Address(self.get(0, ADDRESS)?),
            }),
        })
    }
}
