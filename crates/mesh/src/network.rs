//! Definitions of networks, and the VNI that follows from a name (`docs/design/networks.md`).

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{self, Write as _};

use ipnet::{Ipv4Net, Ipv6Net};
use serde::de::IgnoredAny;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use weft_crypto::{PeerId, fingerprint};
use weft_packet::vxlan::Vni;

use crate::limits::{
    LATER_OPTION_BYTES_MAX, LATER_OPTIONS_MAX, NETWORK_MTU_MIN_BYTES, NETWORK_NAME_BYTES_MAX,
    RANGE_PREFIX_MAX_BITS,
};

/// The name of the network that every host has.
pub const WEFT: &str = "weft";

/// The choices of a network's creator.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct NetworkOptions {
    /// No way out of the network.
    #[serde(default, skip_serializing_if = "is_false")]
    pub internal: bool,
    /// MTU of its containers in bytes; `None`: that of `weft`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mtu: Option<u16>,
    /// Its ports reach no other port, only the way out.
    #[serde(default, skip_serializing_if = "is_false")]
    pub isolated: bool,
    /// Options of a later release. A host holds no network that has any: it does not know what they ask of it.
    #[serde(flatten)]
    pub later: BTreeMap<String, OptionValue>,
}

/// The value of an option that this release does not know.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(untagged)]
pub enum OptionValue {
    /// A choice.
    Flag(bool),
    /// A number.
    Number(i64),
    /// A text.
    Text(String),
    /// Anything else.
    Other(OtherValue),
}

/// A value that is kept as a mark alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OtherValue;

/// A network as its creator wants it. It never changes; hosts share a network if they have equal definitions.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct NetworkDefinition {
    /// Its name; a label in DNS.
    pub name: String,
    /// Its VXLAN network identifier.
    pub vni: Vni,
    /// Its IPv4 range; `None`: addresses come from the ranges of `weft`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub range: Option<Ipv4Net>,
    /// Its IPv6 range, a /64; only with `range`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub range6: Option<Ipv6Net>,
    /// The creator's choices.
    #[serde(default)]
    pub options: NetworkOptions,
}

impl NetworkDefinition {
    /// A network of which all follows from its name.
    pub fn new(name: impl Into<String>) -> Self {
        let name = name.into();
        let vni = vni_of(&name);
        Self { name, vni, range: None, range6: None, options: NetworkOptions::default() }
    }

    /// Why no host would take it, if so.
    #[must_use]
    pub fn fault(&self) -> Option<&'static str> {
        if let Some(fault) = self.key_fault() {
            return Some(fault);
        }
        if let Some(range) = self.range
            && (range.prefix_len() > RANGE_PREFIX_MAX_BITS || range.trunc() != range)
        {
            return Some("the address range is too small or not a network address");
        }
        if let Some(range6) = self.range6
            && (range6.prefix_len() != 64 || range6.trunc() != range6 || self.range.is_none())
        {
            return Some("an IPv6 range is a /64, and comes with an IPv4 range");
        }
        let small = |mtu: u16| mtu < NETWORK_MTU_MIN_BYTES;
        self.options.mtu.is_some_and(small).then_some("the MTU is below 1,280 bytes")
    }

    /// Why no network has its name and VNI, if so.
    pub(crate) fn key_fault(&self) -> Option<&'static str> {
        if !is_network_name(&self.name) {
            return Some(
                "a network's name has 1 to 63 lower-case letters, digits, - and _, and starts with a letter or digit",
            );
        }
        if self.name == WEFT || is_reserved(self.vni) {
            return Some("network weft and the VNIs 0, 1 and 16777215 are reserved");
        }
        (self.vni > Vni::PROBE).then_some("a VNI has 24 bits")
    }

    /// Each field that differs, with the values `there` (of `theirs`) and `here`, for a user.
    fn differences(&self, theirs: &Self) -> String {
        let mut text = String::new();
        let mut differ = |field: &str, here: String, there: String| {
            if here != there {
                let comma = if text.is_empty() { "" } else { ", " };
                let _ = write!(text, "{comma}{field} is {there} there and {here} here");
            }
        };
        differ("VNI", self.vni.0.to_string(), theirs.vni.0.to_string());
        differ("range", or_none(self.range), or_none(theirs.range));
        differ("IPv6 range", or_none(self.range6), or_none(theirs.range6));
        let (ours, theirs) = (&self.options, &theirs.options);
        differ("internal", ours.internal.to_string(), theirs.internal.to_string());
        differ("MTU", or_none(ours.mtu), or_none(theirs.mtu));
        differ("isolated", ours.isolated.to_string(), theirs.isolated.to_string());
        let later: BTreeSet<&String> = ours.later.keys().chain(theirs.later.keys()).collect();
        for name in later {
            let value = |of: &NetworkOptions| or_none(of.later.get(name));
            differ(&format!("{name} (of a later release)"), value(ours), value(theirs));
        }
        text
    }
}

impl NetworkOptions {
    /// The name of an option that this release does not know, if there is one.
    #[must_use]
    pub fn unknown(&self) -> Option<&str> {
        self.later.keys().next().map(String::as_str)
    }

    /// Whether those of a later release are few, and short and plain enough to be shown.
    pub(crate) fn may_be_kept(&self) -> bool {
        let plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
        let short = |text: &str| text.len() <= LATER_OPTION_BYTES_MAX;
        let fits = |(name, value): (&String, &OptionValue)| {
            let value_fits = match value {
                OptionValue::Text(text) => short(text),
                _ => true,
            };
            short(name) && name.chars().all(plain) && value_fits
        };
        self.later.len() <= LATER_OPTIONS_MAX && self.later.iter().all(fits)
    }
}

impl fmt::Display for OptionValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Flag(value) => write!(f, "{value}"),
            Self::Number(value) => write!(f, "{value}"),
            Self::Text(value) => write!(f, "{value:?}"),
            Self::Other(OtherValue) => write!(f, "a value that this host cannot read"),
        }
    }
}

impl Serialize for OtherValue {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_unit()
    }
}

impl<'de> Deserialize<'de> for OtherValue {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        IgnoredAny::deserialize(deserializer).map(|IgnoredAny| Self)
    }
}

/// Why two hosts carry nothing of a network between them. The text is for the users of both.
#[derive(
    Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, thiserror::Error,
)]
#[serde(tag = "clash", rename_all = "snake_case")]
pub enum NetworkClash {
    /// One name, two definitions.
    #[error(
        "network {} of {host} is not that of this host: {}. Nothing of it passes between the two hosts: remove it on one of them, then create it as on the other",
        .ours.name,
        .ours.differences(.theirs)
    )]
    Definition {
        /// The other host.
        peer: PeerId,
        /// The other host, as users know it.
        host: String,
        /// This host's definition.
        ours: Box<NetworkDefinition>,
        /// The other host's.
        theirs: Box<NetworkDefinition>,
    },
    /// One network, whose ranges were founded twice.
    #[error(
        "network {network} of {host} was founded apart from that of this host: their addresses may clash. Nothing of it passes between the two hosts: detach the containers of one founding and remove the network on its hosts, then create or join it again"
    )]
    Founding {
        /// The other host.
        peer: PeerId,
        /// The other host, as users know it.
        host: String,
        /// The network's name.
        network: String,
    },
    /// One VNI, two names.
    #[error(
        "network {theirs} of {host} has VNI {}, as network {ours} of this host. Nothing of either passes between the two hosts: remove one of them on all hosts, then create it with another --vni",
        .vni.0
    )]
    Vni {
        /// The other host.
        peer: PeerId,
        /// The other host, as users know it.
        host: String,
        /// The VNI.
        vni: Vni,
        /// The name of this host's network.
        ours: String,
        /// The name of the other host's.
        theirs: String,
    },
}

impl NetworkClash {
    /// The other host.
    pub(crate) const fn peer(&self) -> PeerId {
        match self {
            Self::Definition { peer, .. }
            | Self::Founding { peer, .. }
            | Self::Vni { peer, .. } => *peer,
        }
    }

    /// The clash of a network of this host with one of a peer; `None`: they are equal, or unlike in name and VNI.
    pub(crate) fn between(
        ours: &NetworkDefinition,
        theirs: &NetworkDefinition,
        peer: PeerId,
        host: impl Fn() -> String,
    ) -> Option<Self> {
        if ours.name != theirs.name {
            return (ours.vni == theirs.vni).then(|| Self::Vni {
                peer,
                host: host(),
                vni: ours.vni,
                ours: ours.name.clone(),
                theirs: theirs.name.clone(),
            });
        }
        (ours != theirs).then(|| Self::Definition {
            peer,
            host: host(),
            ours: Box::new(ours.clone()),
            theirs: Box::new(theirs.clone()),
        })
    }
}

/// The VNI that follows from a name: the first three bytes of the name's SHA-256, as a big-endian number. While that
/// is reserved, the next three count.
#[must_use]
pub fn vni_of(name: &str) -> Vni {
    let hash = fingerprint(&[name.as_bytes()]);
    let numbers = hash
        .chunks_exact(3)
        .map(|bytes| Vni(bytes.iter().fold(0, |number, byte| (number << 8) | u32::from(*byte))));
    numbers.into_iter().find(|vni| !is_reserved(*vni)).unwrap_or(Vni(2))
}

/// Whether no network of a user may have this VNI.
fn is_reserved(vni: Vni) -> bool {
    vni.0 == 0 || vni == Vni::WEFT || vni == Vni::PROBE
}

fn is_network_name(text: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let fits = |byte: u8| plain(byte) || byte == b'-' || byte == b'_';
    text.len() <= NETWORK_NAME_BYTES_MAX
        && text.bytes().next().is_some_and(plain)
        && text.bytes().all(fits)
}

fn or_none<T: ToString>(value: Option<T>) -> String {
    value.map_or_else(|| "none".to_owned(), |value| value.to_string())
}

fn is_false(value: &bool) -> bool {
    !*value
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_vni_is_the_first_three_bytes_of_the_names_sha_256() {
        // From `printf NAME | sha256sum`.
        assert_eq!(vni_of(""), Vni(0xe3_b0c4));
        assert_eq!(vni_of("abc"), Vni(0xba_7816));
        assert_eq!(NetworkDefinition::new("abc").vni, vni_of("abc"));
        // No name is known whose hash begins with a reserved number, so only the rule is tested.
        assert!(is_reserved(Vni(0)) && is_reserved(Vni(1)) && is_reserved(Vni(0xff_ffff)));
        assert!(!is_reserved(Vni(2)) && !is_reserved(Vni(0xff_fffe)));
    }

    #[test]
    fn each_field_of_a_definition_is_checked() {
        let fit = NetworkDefinition {
            range: Some("10.5.0.0/16".parse().unwrap()),
            range6: Some("fd00:5::/64".parse().unwrap()),
            options: NetworkOptions { mtu: Some(1_280), ..NetworkOptions::default() },
            ..NetworkDefinition::new("shop-1_a")
        };
        assert_eq!(fit.fault(), None);
        assert_eq!(NetworkDefinition::new("0").fault(), None);
        let faulty = |change: &dyn Fn(&mut NetworkDefinition)| {
            let mut definition = fit.clone();
            change(&mut definition);
            assert!(definition.fault().is_some(), "{definition:?}");
        };
        for name in ["", "-a", "_a", "A", "a.b", "a b", "w\u{e4}b", WEFT, &"l".repeat(64)] {
            faulty(&|it| it.name = name.to_owned());
        }
        for vni in [0, 1, 0xff_ffff, 0x100_0000, u32::MAX] {
            faulty(&|it| it.vni = Vni(vni));
        }
        for range in ["10.5.0.0/30", "10.5.0.1/16"] {
            faulty(&|it| it.range = Some(range.parse().unwrap()));
        }
        faulty(&|it| it.range = None);
        for range6 in ["fd00:5::/48", "fd00:5::1/64"] {
            faulty(&|it| it.range6 = Some(range6.parse().unwrap()));
        }
        faulty(&|it| it.options.mtu = Some(1_279));
    }

    #[test]
    fn a_definition_is_short_and_older_and_newer_hosts_read_it() {
        let plain = NetworkDefinition::new("abc");
        let text = serde_json::to_string(&plain).unwrap();
        assert_eq!(text, r#"{"name":"abc","vni":12220438,"options":{}}"#);
        let newer = r#"{"name":"abc","vni":12220438,"later":[1]}"#;
        assert_eq!(serde_json::from_str::<NetworkDefinition>(newer).unwrap(), plain);
    }

    #[test]
    fn options_of_a_later_release_are_kept_and_written_as_they_came() {
        let text =
            r#"{"name":"abc","vni":12220438,"options":{"mtu":1400,"a":true,"b":-5,"c":"x"}}"#;
        let newer: NetworkDefinition = serde_json::from_str(text).unwrap();
        assert_eq!(newer.options.mtu, Some(1_400));
        assert_eq!(newer.options.unknown(), Some("a"));
        assert_eq!(serde_json::to_string(&newer).unwrap(), text);
        for odd in ["null", "[1]", "{\"x\":1}", "1.5", "18446744073709551615"] {
            let text = format!(r#"{{"a":{odd}}}"#);
            let options: NetworkOptions = serde_json::from_str(&text).unwrap();
            assert_eq!(options.later["a"], OptionValue::Other(OtherValue), "{odd}");
        }
        let fits = |name: &str, value: &str, count: usize| {
            let name = |n: usize| format!("{name}{n}");
            let value = || OptionValue::Text(value.to_owned());
            let later = (0..count).map(|n| (name(n), value())).collect();
            NetworkOptions { later, ..NetworkOptions::default() }.may_be_kept()
        };
        let long = "l".repeat(LATER_OPTION_BYTES_MAX + 1);
        assert!(fits("a-B_", &long[1..], LATER_OPTIONS_MAX));
        assert!(!fits("a", "x", LATER_OPTIONS_MAX + 1));
        assert!(!fits("a", &long, 1) && !fits(&long, "x", 1) && !fits("a\u{1b}", "x", 1));
    }

    #[test]
    fn a_clash_says_every_difference_with_both_values() {
        let peer = PeerId::from_bytes([7; 32]);
        let ours = NetworkDefinition::new("shop");
        let clash = |theirs: &NetworkDefinition| {
            NetworkClash::between(&ours, theirs, peer, || "h7".into()).map(|it| it.to_string())
        };
        assert_eq!(clash(&ours), None);
        assert_eq!(clash(&NetworkDefinition::new("other")), None);
        let theirs = NetworkDefinition {
            vni: Vni(5),
            range: Some("10.5.0.0/16".parse().unwrap()),
            range6: Some("fd00:5::/64".parse().unwrap()),
            options: NetworkOptions {
                internal: true,
                mtu: Some(1_400),
                isolated: true,
                later: [("colour".to_owned(), OptionValue::Text("red\u{1b}".to_owned()))].into(),
            },
            ..ours.clone()
        };
        let text = clash(&theirs).unwrap();
        let parts = [
            "network shop of h7",
            "VNI is 5 there",
            "range is 10.5.0.0/16 there and none here",
            "IPv6 range is fd00:5::/64 there",
            "internal is true there and false here",
            "MTU is 1400 there and none here",
            "isolated is true there",
            "colour (of a later release) is \"red\\u{1b}\" there and none here",
        ];
        parts.iter().for_each(|part| assert!(text.contains(part), "{text}"));
        let text = clash(&NetworkDefinition { vni: ours.vni, ..NetworkDefinition::new("web") });
        let text = text.unwrap();
        assert!(text.contains("network web of h7") && text.contains("--vni"), "{text}");
    }
}
