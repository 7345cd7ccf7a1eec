//! Options of `docker network create`, and checks of single fields.

use std::collections::BTreeMap;
use std::net::IpAddr;

use ipnet::IpNet;
use serde_json::Value;
use weft_packet::ethernet::Mac;

use super::error::PluginError;
use super::names::{self, NetworkName};
use super::wire::{GENERIC, Interface, Options};

/// The most options of one request.
pub const OPTIONS_MAX: usize = 256;

/// Both name a network.
const NAME_KEYS: [&str; 2] = ["network", "weft.network"];
/// Says whose addresses the network has.
const IPAM_KEY: &str = "weft.ipam";
/// Another IPAM driver's, and the user keeps hosts apart.
const EXTERNAL: &str = "external";

/// The shortest and the longest prefix of a pool, by family.
const PREFIX_V4: std::ops::RangeInclusive<u8> = 8..=30;
const PREFIX_V6: std::ops::RangeInclusive<u8> = 16..=126;

/// The options of `CreateNetwork`.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct NetworkOptions {
    /// `-o network=NAME`.
    pub(super) name: Option<NetworkName>,
    /// `-o weft.ipam=external`.
    pub(super) external: bool,
    /// `--internal`.
    pub(super) internal: bool,
    /// `--ipv6`.
    pub(super) ipv6: bool,
    /// Not `--ipv4=false`.
    pub(super) ipv4: bool,
}

impl NetworkOptions {
    pub(super) fn of(options: &Options) -> Result<Self, PluginError> {
        const FLAG: &str = "-o";
        const KNOWN: &str = "network, weft.network, weft.ipam";
        count(options.len())?;
        let mut read = Self {
            internal: flag(options, "com.docker.network.internal", false)?,
            ipv6: flag(options, "com.docker.network.enable_ipv6", false)?,
            ipv4: flag(options, "com.docker.network.enable_ipv4", true)?,
            ..Self::default()
        };
        let empty = serde_json::Map::new();
        let user = match options.get(GENERIC) {
            None | Some(Value::Null) => &empty,
            Some(Value::Object(user)) => user,
            Some(other) => return Err(bad(GENERIC, &other.to_string(), "it is not an object")),
        };
        count(user.len())?;
        for (key, value) in user {
            let Some(value) = value.as_str() else {
                return Err(bad(GENERIC, key, "the option's value is not a text"));
            };
            match key.as_str() {
                key if NAME_KEYS.contains(&key) => add_name(&mut read.name, FLAG, value)?,
                IPAM_KEY if value == EXTERNAL => read.external = true,
                IPAM_KEY => return Err(bad("-o weft.ipam", value, "its only value is external")),
                _ => return Err(unknown(FLAG, key, KNOWN)),
            }
        }
        Ok(read)
    }
}

/// The network that `--ipam-opt` names.
pub(super) fn network_of_pool(
    options: &BTreeMap<String, String>,
) -> Result<Option<NetworkName>, PluginError> {
    const FLAG: &str = "--ipam-opt";
    count(options.len())?;
    let mut name = None;
    for (key, value) in options {
        match key.as_str() {
            key if NAME_KEYS.contains(&key) => add_name(&mut name, FLAG, value)?,
            _ => return Err(unknown(FLAG, key, "network, weft.network")),
        }
    }
    Ok(name)
}

/// The options of `CreateEndpoint`: the Ethernet address of `--mac-address`. Refuses the user's
/// `driver_opts`, since there are none.
pub(super) fn mac_of_endpoint(options: &Options) -> Result<Option<Mac>, PluginError> {
    const MAC: &str = "com.docker.network.endpoint.macaddress";
    count(options.len())?;
    // Options that the engine adds have its prefix. They change from version to version.
    if let Some(key) = options.keys().find(|key| !key.starts_with("com.docker.")) {
        return Err(unknown("driver_opts", key, "no options"));
    }
    let text = match options.get(MAC) {
        None | Some(Value::Null) => return Ok(None),
        Some(Value::String(text)) => text,
        Some(other) => return Err(bad(MAC, &other.to_string(), "it is not a text")),
    };
    let mac = names::mac_of_base64(text)
        .ok_or_else(|| bad(MAC, text, "it is not six bytes in base64"))?;
    usable(mac, MAC).map(Some)
}

/// The parts of an interface that the engine has chosen.
pub(super) struct Chosen {
    pub(super) mac: Option<Mac>,
    pub(super) v4: Option<IpNet>,
    pub(super) v6: Option<IpNet>,
}

impl Chosen {
    pub(super) fn of(interface: &Interface) -> Result<Self, PluginError> {
        let net = |field, text: &str, v6: bool| {
            if text.is_empty() {
                return Ok(None);
            }
            let why = if v6 { "an IPv6 address is" } else { "an IPv4 address is" };
            text.parse::<IpNet>()
                .ok()
                .filter(|net| is_v6(net.addr()) == v6)
                .map(Some)
                .ok_or_else(|| bad(field, text, &format!("{why} ADDRESS/PREFIX LENGTH")))
        };
        let mac = match interface.mac_address.as_str() {
            "" => None,
            text => {
                let mac = text
                    .parse::<Mac>()
                    .map_err(|error| bad("Interface.MacAddress", text, &error.to_string()))?;
                Some(usable(mac, "Interface.MacAddress")?)
            }
        };
        let v4 = net("Interface.Address", &interface.address, false)?;
        let v6 = net("Interface.AddressIPv6", &interface.address_ipv6, true)?;
        Ok(Self { mac, v4, v6 })
    }
}

/// Checks an id of the engine's.
pub(super) fn engine_id(field: &'static str, text: &str) -> Result<(), PluginError> {
    if names::is_engine_id(text) {
        return Ok(());
    }
    let why =
        format!("an id has 1 to {} letters, digits, dots, - and _", names::ENGINE_ID_BYTES_MAX);
    Err(bad(field, text, &why))
}

/// Reads a range of the family, in its canonical form.
pub(super) fn subnet(field: &'static str, text: &str, v6: bool) -> Result<IpNet, PluginError> {
    let lengths = if v6 { PREFIX_V6 } else { PREFIX_V4 };
    let net = range(field, text, v6)?;
    if lengths.contains(&net.prefix_len()) {
        return Ok(net);
    }
    let why = format!("its prefix length is not {} to {}", lengths.start(), lengths.end());
    Err(bad(field, text, &why))
}

/// Reads a range of the family, of any length.
pub(super) fn range(field: &'static str, text: &str, v6: bool) -> Result<IpNet, PluginError> {
    let family = if v6 { "an IPv6" } else { "an IPv4" };
    text.parse::<IpNet>()
        .ok()
        .filter(|net| is_v6(net.addr()) == v6 && net.trunc() == *net)
        .ok_or_else(|| bad(field, text, &format!("it is not {family} range such as 10.40.0.0/16")))
}

/// Reads an address without a prefix.
pub(super) fn address(field: &'static str, text: &str) -> Result<IpAddr, PluginError> {
    text.parse().map_err(|_| bad(field, text, "it is not an IP address"))
}

pub(super) fn is_v6(address: IpAddr) -> bool {
    address.is_ipv6()
}

/// The lowest address that a container or gateway may have.
pub(super) fn first_host(subnet: IpNet) -> IpAddr {
    match subnet.network() {
        IpAddr::V4(network) => IpAddr::V4(u32::from(network).wrapping_add(1).into()),
        IpAddr::V6(network) => IpAddr::V6(u128::from(network).wrapping_add(1).into()),
    }
}

/// Whether a container may have the address: in the range, and not its first or broadcast address.
pub(super) fn is_host(address: IpAddr, subnet: IpNet) -> bool {
    subnet.contains(&address)
        && address != subnet.network()
        && (is_v6(address) || address != subnet.broadcast())
}

pub(super) fn bad(field: &'static str, value: &str, why: &str) -> PluginError {
    PluginError::BadField { field, value: short(value), why: why.to_owned() }
}

/// The beginning of a value from outside, for messages.
pub(super) fn short(text: &str) -> String {
    cut(text, 80)
}

/// The beginning of a text.
pub(super) fn cut(text: &str, chars: usize) -> String {
    let mut cut: String = text.chars().take(chars).collect();
    if cut.len() < text.len() {
        cut.push('…');
    }
    cut
}

fn usable(mac: Mac, field: &'static str) -> Result<Mac, PluginError> {
    if names::is_usable(mac) {
        return Ok(mac);
    }
    Err(bad(field, &mac.to_string(), "an interface's address is unicast and not zero"))
}

fn flag(options: &Options, key: &'static str, absent: bool) -> Result<bool, PluginError> {
    match options.get(key) {
        None | Some(Value::Null) => Ok(absent),
        Some(Value::Bool(set)) => Ok(*set),
        Some(other) => Err(bad(key, &other.to_string(), "it is neither true nor false")),
    }
}

fn add_name(
    name: &mut Option<NetworkName>,
    flag: &'static str,
    text: &str,
) -> Result<(), PluginError> {
    let new: NetworkName =
        text.parse().map_err(|source| PluginError::BadName { flag, name: short(text), source })?;
    match name.replace(new.clone()) {
        Some(old) if old != new => {
            Err(PluginError::TwoNames { flag, one: old.into(), other: new.into() })
        }
        _ => Ok(()),
    }
}

fn unknown(flag: &'static str, option: &str, known: &'static str) -> PluginError {
    PluginError::UnknownOption { flag, option: short(option), known }
}

fn count(options: usize) -> Result<(), PluginError> {
    if options > OPTIONS_MAX {
        return Err(bad("Options", &options.to_string(), "there are too many options"));
    }
    Ok(())
}
