//! Peer info: what a client can do, as lines `NAME=value`.

use std::fmt;
use std::ops::Range;

/// Most lines that are kept.
pub const PEER_INFO_LINES_MAX: usize = 128;
/// The longest value of a line, in bytes.
pub const PEER_INFO_VALUE_BYTES_MAX: usize = 1024;

/// The longest name of a line, in bytes.
const NAME_BYTES_MAX: usize = 64;
/// Most ciphers that a client names.
const CIPHERS_MAX: usize = 64;

/// The bits of `IV_PROTO`.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct IvProto(pub u32);

impl IvProto {
    /// DATA_V2 packets, which have a peer id.
    pub const DATA_V2: Self = Self(1 << 1);
    /// The client waits for PUSH_REPLY, and sends PUSH_REQUEST only if none comes.
    pub const REQUEST_PUSH: Self = Self(1 << 2);
    /// Data keys from the TLS exporter.
    pub const TLS_KEY_EXPORT: Self = Self(1 << 3);
    /// Keywords behind AUTH_PENDING.
    pub const AUTH_PENDING_KEYWORDS: Self = Self(1 << 4);
    /// Negotiation without a push, between equals.
    pub const NCP_P2P: Self = Self(1 << 5);
    /// The option `dns`, first form.
    pub const DNS_OPTION: Self = Self(1 << 6);
    /// The control channel's EXIT, and `protocol-flags`.
    pub const CC_EXIT: Self = Self(1 << 7);
    /// AUTH_FAILED,TEMP.
    pub const AUTH_FAIL_TEMP: Self = Self(1 << 8);
    /// A key of later handshakes that comes from the first.
    pub const DYNAMIC_TLS_CRYPT: Self = Self(1 << 9);
    /// Data keys of epochs.
    pub const DATA_EPOCH: Self = Self(1 << 10);
    /// The option `dns`, second form.
    pub const DNS_OPTION_V2: Self = Self(1 << 11);
    /// PUSH_UPDATE.
    pub const PUSH_UPDATE: Self = Self(1 << 12);

    const NAMES: [(Self, &'static str); 12] = [
        (Self::DATA_V2, "data-v2"),
        (Self::REQUEST_PUSH, "request-push"),
        (Self::TLS_KEY_EXPORT, "tls-key-export"),
        (Self::AUTH_PENDING_KEYWORDS, "auth-pending-keywords"),
        (Self::NCP_P2P, "ncp-p2p"),
        (Self::DNS_OPTION, "dns-option"),
        (Self::CC_EXIT, "cc-exit"),
        (Self::AUTH_FAIL_TEMP, "auth-fail-temp"),
        (Self::DYNAMIC_TLS_CRYPT, "dynamic-tls-crypt"),
        (Self::DATA_EPOCH, "data-epoch"),
        (Self::DNS_OPTION_V2, "dns-option-v2"),
        (Self::PUSH_UPDATE, "push-update"),
    ];

    /// Whether it has all bits of another.
    pub const fn has(self, bits: Self) -> bool {
        self.0 & bits.0 == bits.0
    }

    /// The bits of both.
    pub const fn with(self, bits: Self) -> Self {
        Self(self.0 | bits.0)
    }
}

impl fmt::Debug for IvProto {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = Self::NAMES.iter().filter(|(bit, _)| self.has(*bit)).map(|(_, name)| name);
        f.debug_list().entries(names).finish()
    }
}

/// The lines of a peer, in their order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PeerInfo {
    /// As it travels: a server keeps it for each client, and two strings for each line would take ten times as much.
    text: String,
    skipped: usize,
}

impl PeerInfo {
    /// Reads a peer's text. Lines that are none, or beyond the limits, are left out and counted. Control characters of
    /// values become `_`.
    pub fn parse(text: &str) -> Self {
        let (mut info, mut lines) = (Self::default(), 0);
        for line in text.split('\n').filter(|line| !line.is_empty()) {
            let pair = line
                .split_once('=')
                .filter(|(name, value)| is_name(name) && value.len() <= PEER_INFO_VALUE_BYTES_MAX);
            match pair {
                Some((name, value)) if lines < PEER_INFO_LINES_MAX => {
                    let printable = |char: char| if char.is_control() { '_' } else { char };
                    info.text.extend([name, "="]);
                    info.text.extend(value.chars().map(printable).chain(['\n']));
                    lines += 1;
                }
                _ => info.skipped += 1,
            }
        }
        info
    }

    /// The text to send.
    pub fn to_text(&self) -> String {
        self.text.clone()
    }

    /// Sets a line, in the place of an earlier one of this name. A name or value that [`Self::parse`] would not take
    /// is left out.
    pub fn set(&mut self, name: &str, value: &str) {
        let is_plain = !value.chars().any(char::is_control);
        if !is_name(name) || !is_plain || value.len() > PEER_INFO_VALUE_BYTES_MAX {
            return;
        }
        let line = format!("{name}={value}\n");
        if let Some(place) = self.place_of(name) {
            self.text.replace_range(place, &line);
        } else if self.lines().count() < PEER_INFO_LINES_MAX {
            self.text.push_str(&line);
        }
    }

    /// The value of a line; of the first, if there are several.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.lines().find(|(known, _)| *known == name).map(|(_, value)| value)
    }

    /// All lines.
    pub fn lines(&self) -> impl Iterator<Item = (&str, &str)> {
        self.text.split('\n').filter_map(|line| line.split_once('='))
    }

    /// How many lines were left out.
    pub const fn skipped(&self) -> usize {
        self.skipped
    }

    /// `IV_VER`: the version of the peer's OpenVPN.
    pub fn version(&self) -> Option<&str> {
        self.get("IV_VER")
    }

    /// `IV_PLAT`: linux, win, mac, android, ios and others.
    pub fn platform(&self) -> Option<&str> {
        self.get("IV_PLAT")
    }

    /// `IV_PROTO`; no bits where the line is missing or no number.
    pub fn proto(&self) -> IvProto {
        IvProto(self.number("IV_PROTO").unwrap_or(0))
    }

    /// `IV_CIPHERS`: the data ciphers, in the client's order; `None`: it says nothing.
    pub fn ciphers(&self) -> Option<Vec<&str>> {
        let list = self.get("IV_CIPHERS")?;
        Some(list.split(':').filter(|name| !name.is_empty()).take(CIPHERS_MAX).collect())
    }

    /// `IV_NCP`: 2 for OpenVPN 2.4, which can do AES-GCM of 128 and 256 bits.
    pub fn ncp(&self) -> Option<u32> {
        self.number("IV_NCP")
    }

    /// `IV_MTU`: the largest MTU that can be pushed, in bytes.
    pub fn mtu(&self) -> Option<u32> {
        self.number("IV_MTU")
    }

    /// `IV_SSO`: the ways of a login outside of the tunnel: `webauth`, `openurl`, `crtext`.
    pub fn has_sso(&self, way: &str) -> bool {
        self.get("IV_SSO").is_some_and(|ways| ways.split(',').any(|known| known.trim() == way))
    }

    /// `UV_…`: what the user's own profile says about him.
    pub fn user_variables(&self) -> impl Iterator<Item = (&str, &str)> {
        self.lines().filter(|(name, _)| name.starts_with("UV_"))
    }

    /// The range of a name's line, with its line end.
    fn place_of(&self, name: &str) -> Option<Range<usize>> {
        let mut start = 0;
        self.text.split_inclusive('\n').find_map(|line| {
            let place = start..start + line.len();
            start = place.end;
            let (known, _) = line.split_once('=')?;
            (known == name).then_some(place)
        })
    }

    fn number(&self, name: &str) -> Option<u32> {
        self.get(name).and_then(|value| value.trim().parse().ok())
    }
}

/// A letter or `_`, then letters, digits and `_`.
fn is_name(name: &str) -> bool {
    let first = name.bytes().next();
    name.len() <= NAME_BYTES_MAX
        && first.is_some_and(|byte| byte.is_ascii_alphabetic() || byte == b'_')
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What OpenVPN 2.6 on Linux sends.
    const STOCK: &str = "IV_VER=2.6.14\nIV_PLAT=linux\nIV_TCPNL=1\nIV_MTU=1600\nIV_NCP=2\n\
        IV_CIPHERS=AES-256-GCM:AES-128-GCM:CHACHA20-POLY1305\nIV_PROTO=990\n\
        IV_LZO_STUB=1\nIV_COMP_STUB=1\nIV_COMP_STUBv2=1\nIV_SSO=webauth,crtext\nUV_ROOM=7\n";

    #[test]
    fn a_stock_client_is_understood() {
        let info = PeerInfo::parse(STOCK);
        assert_eq!((info.version(), info.platform()), (Some("2.6.14"), Some("linux")));
        assert_eq!((info.mtu(), info.ncp(), info.skipped()), (Some(1600), Some(2), 0));
        let ciphers = info.ciphers();
        assert_eq!(ciphers.as_deref().map(<[&str]>::len), Some(3));
        let proto = info.proto();
        assert!(proto.has(IvProto::DATA_V2.with(IvProto::TLS_KEY_EXPORT).with(IvProto::CC_EXIT)));
        assert!(!proto.has(IvProto::DATA_EPOCH) && !proto.has(IvProto::NCP_P2P));
        assert!(info.has_sso("crtext") && !info.has_sso("openurl"));
        assert_eq!(info.user_variables().collect::<Vec<_>>(), [("UV_ROOM", "7")]);
        assert_eq!(info.to_text(), STOCK);
        assert!(format!("{proto:?}").contains("auth-fail-temp"));
    }

    #[test]
    fn bad_lines_are_left_out_and_counted() {
        let long = format!("IV_LONG={}\n", "x".repeat(PEER_INFO_VALUE_BYTES_MAX + 1));
        let text = format!("9A=1\nIV-X=2\n=3\nnothing\nIV_OK=a\x07b=c\n{long}IV_PROTO=-1");
        let info = PeerInfo::parse(&text);
        assert_eq!(info.skipped(), 5);
        assert_eq!(info.get("IV_OK"), Some("a_b=c"));
        assert_eq!(info.proto(), IvProto(0));
        let many = "A=1\n".repeat(PEER_INFO_LINES_MAX + 2);
        assert_eq!(PeerInfo::parse(&many).skipped(), 2);
        let mut ours = PeerInfo::default();
        ours.set("IV_VER", "one");
        ours.set("IV_PLAT", "linux");
        ours.set("IV_VER", "two more");
        ours.set("IV_EVIL", "a\nIV_PROTO=1");
        assert_eq!(ours.to_text(), "IV_VER=two more\nIV_PLAT=linux\n");
    }
}
