//! A packet to evaluate against rules, and the match results that are known for it.

use std::net::IpAddr;

use serde_json::Value;

/// Whether something matches, as far as it is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fit {
    Yes,
    No,
    Unknown,
}

impl Fit {
    fn of(known: bool) -> Self {
        if known { Self::Yes } else { Self::No }
    }

    pub(super) fn and(self, other: Self) -> Self {
        match (self, other) {
            (Self::No, _) | (_, Self::No) => Self::No,
            (Self::Yes, Self::Yes) => Self::Yes,
            _ => Self::Unknown,
        }
    }

    fn any(all: impl Iterator<Item = Self>) -> Self {
        all.fold(Self::No, |sum, one| match (sum, one) {
            (Self::Yes, _) | (_, Self::Yes) => Self::Yes,
            (Self::No, Self::No) => Self::No,
            _ => Self::Unknown,
        })
    }

    fn not(self) -> Self {
        match self {
            Self::Yes => Self::No,
            Self::No => Self::Yes,
            Self::Unknown => Self::Unknown,
        }
    }
}

/// The first packet of a connection. A field is `None` if it is unknown or has several values.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Packet {
    pub(super) ipv6: bool,
    /// The bridge that it crosses, which is then the device on its way in and out.
    pub(super) bridge: Option<String>,
    pub(super) protocol: Option<&'static str>,
    pub(super) port: Option<u16>,
    pub(super) source: Option<IpAddr>,
    pub(super) destination: Option<IpAddr>,
    /// It was opened by IPsec.
    pub(super) ipsec: bool,
}

impl Packet {
    /// Whether a `match` of a rule in JSON holds.
    pub(super) fn fits(&self, condition: &Value) -> Fit {
        let fit = self.holds(&condition["left"], &condition["right"]);
        match condition["op"].as_str() {
            Some("==" | "in") => fit,
            Some("!=") => fit.not(),
            _ => Fit::Unknown,
        }
    }

    /// Whether the field that `left` names equals `right` or is among it.
    pub(super) fn holds(&self, left: &Value, right: &Value) -> Fit {
        match right {
            Value::Array(any) => return Fit::any(any.iter().map(|one| self.holds(left, one))),
            Value::Object(it) => {
                let sets = ["set", "|"].into_iter().find_map(|key| it.get(key));
                if let Some(set) = sets {
                    return self.holds(left, set);
                }
            }
            Value::String(name) if name.starts_with('@') => return Fit::Unknown,
            _ => {}
        }
        if let Some(key) = left["meta"]["key"].as_str() {
            return self.meta(key, right);
        }
        if left["ct"]["key"] == "state" {
            return text(Some("new"), right);
        }
        if left["fib"]["flags"].as_array().is_some_and(|flags| flags.iter().any(|it| it == "saddr"))
        {
            // The host has no route to containers by the bridge, which has no address.
            let missing = right == &Value::Bool(false);
            return if self.bridge.is_some() && missing { Fit::Yes } else { Fit::Unknown };
        }
        let payload = &left["payload"];
        match (payload["protocol"].as_str(), payload["field"].as_str()) {
            (Some(protocol), Some(field)) => self.field(protocol, field, right),
            _ => Fit::Unknown,
        }
    }

    fn meta(&self, key: &str, right: &Value) -> Fit {
        let family = if self.ipv6 { "ipv6" } else { "ipv4" };
        match key {
            "iif" | "iifname" if self.bridge.is_none() => {
                // Packets from other hosts never arrive by the loopback device.
                if right == "lo" { Fit::No } else { Fit::Unknown }
            }
            "iif" | "iifname" | "oif" | "oifname" => text(self.bridge.as_deref(), right),
            "ibrname" | "obrname" => text(self.bridge.as_deref(), right),
            "nfproto" => text(Some(family), right),
            "protocol" => text(Some(if self.ipv6 { "ip6" } else { "ip" }), right),
            "l4proto" => text(self.protocol, right),
            "ipsec" => right.as_bool().map_or(Fit::Unknown, |it| Fit::of(it == self.ipsec)),
            _ => Fit::Unknown,
        }
    }

    fn field(&self, protocol: &str, field: &str, right: &Value) -> Fit {
        let fit = match (protocol, field) {
            ("ip", _) if self.ipv6 => return Fit::No,
            ("ip6", _) if !self.ipv6 => return Fit::No,
            ("ip" | "ip6", "saddr") => return within(self.source, right),
            ("ip" | "ip6", "daddr") => return within(self.destination, right),
            ("ip", "protocol") | ("ip6", "nexthdr") => return text(self.protocol, right),
            ("ether", "type") => {
                return text(Some(if self.ipv6 { "ip6" } else { "ip" }), right);
            }
            ("udp" | "tcp" | "th" | "udplite" | "sctp" | "dccp", "dport") => {
                number(self.port, right)
            }
            _ => Fit::Unknown,
        };
        match self.protocol {
            Some(of) if protocol != "th" && protocol != of => Fit::No,
            _ => fit,
        }
    }
}

fn text(known: Option<&str>, right: &Value) -> Fit {
    match (known, right.as_str()) {
        (Some(known), Some(right)) => Fit::of(match right.strip_suffix('*') {
            Some(beginning) => known.starts_with(beginning),
            None => known == right,
        }),
        _ => Fit::Unknown,
    }
}

fn number(known: Option<u16>, right: &Value) -> Fit {
    let Some(known) = known.map(u64::from) else { return Fit::Unknown };
    if let Some([first, last]) = right["range"].as_array().map(Vec::as_slice) {
        return match (first.as_u64(), last.as_u64()) {
            (Some(first), Some(last)) => Fit::of((first..=last).contains(&known)),
            _ => Fit::Unknown,
        };
    }
    right.as_u64().map_or(Fit::Unknown, |right| Fit::of(right == known))
}

fn within(known: Option<IpAddr>, right: &Value) -> Fit {
    let Some(known) = known else { return Fit::Unknown };
    let address = |it: &Value| it.as_str()?.parse::<IpAddr>().ok();
    if let Some(address) = address(right) {
        return Fit::of(address == known);
    }
    if let Some([first, last]) = right["range"].as_array().map(Vec::as_slice) {
        return match (address(first), address(last)) {
            (Some(first), Some(last)) => Fit::of((first..=last).contains(&known)),
            _ => Fit::Unknown,
        };
    }
    let prefix = &right["prefix"];
    let length = prefix["len"].as_u64().and_then(|length| u8::try_from(length).ok());
    let net = address(&prefix["addr"]).zip(length);
    match net.and_then(|(address, length)| ipnet::IpNet::new(address, length).ok()) {
        Some(net) => Fit::of(net.contains(&known)),
        None => Fit::Unknown,
    }
}
