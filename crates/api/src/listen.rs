//! A place to listen on, as a text: `[udp:|tcp:][ADDRESS:]PORT`.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// What carries OpenVPN's packets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Protocol {
    /// UDP: a packet is a datagram.
    #[default]
    Udp,
    /// TCP: a packet is framed by its length.
    Tcp,
}

/// A place to listen on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Listen {
    /// UDP where the text says nothing else.
    pub protocol: Protocol,
    /// The address; `None`: all addresses of both families.
    pub address: Option<IpAddr>,
    /// The port; 0: any free one.
    pub port: u16,
}

/// A text is no place to listen on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is no place to listen on: give PORT, ADDRESS:PORT or [IPV6]:PORT, with udp: or tcp: before it"
)]
pub struct ListenError(String);

impl Protocol {
    /// Its name, in lower case.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Udp => "udp",
            Self::Tcp => "tcp",
        }
    }

    /// The protocol before a text's first colon, and the rest; `None`: it says none.
    pub fn split(text: &str) -> (Option<Self>, &str) {
        for protocol in [Self::Udp, Self::Tcp] {
            if let Some(rest) =
                text.strip_prefix(protocol.name()).and_then(|it| it.strip_prefix(':'))
            {
                return (Some(protocol), rest);
            }
        }
        (None, text)
    }
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl fmt::Display for Listen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { protocol, address, port } = self;
        match address {
            Some(address) => write!(f, "{protocol}:{}", SocketAddr::new(*address, *port)),
            None => write!(f, "{protocol}:{port}"),
        }
    }
}

impl FromStr for Listen {
    type Err = ListenError;

    fn from_str(text: &str) -> Result<Self, ListenError> {
        let (protocol, place) = Protocol::split(text);
        let protocol = protocol.unwrap_or_default();
        if let Ok(port) = place.parse() {
            return Ok(Self { protocol, address: None, port });
        }
        let place: SocketAddr = place.parse().map_err(|_| ListenError(text.to_owned()))?;
        Ok(Self { protocol, address: Some(place.ip()), port: place.port() })
    }
}

impl From<Listen> for String {
    fn from(listen: Listen) -> Self {
        listen.to_string()
    }
}

impl TryFrom<String> for Listen {
    type Error = ListenError;

    fn try_from(text: String) -> Result<Self, ListenError> {
        text.parse()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_place_is_the_same_as_text_and_in_json_and_udp_where_it_says_nothing() {
        for (text, shown) in [
            ("1194", "udp:1194"),
            ("tcp:443", "tcp:443"),
            ("192.0.2.1:1194", "udp:192.0.2.1:1194"),
            ("[2001:db8::1]:1194", "udp:[2001:db8::1]:1194"),
            ("tcp:[::]:443", "tcp:[::]:443"),
            ("udp:0.0.0.0:0", "udp:0.0.0.0:0"),
        ] {
            let listen: Listen = text.parse().unwrap();
            assert_eq!(listen.to_string(), shown);
            let json = serde_json::to_string(&listen).unwrap();
            assert_eq!(json, format!("\"{shown}\""));
            assert_eq!(serde_json::from_str::<Listen>(&json).unwrap(), listen);
        }
        let bad =
            ["", "tcp", "tcp:", "sctp:1", "192.0.2.1", "::1:1194", "65536", "host:1194", "TCP:443"];
        for bad in bad {
            let error = bad.parse::<Listen>().unwrap_err().to_string();
            assert!(error.contains("ADDRESS:PORT"), "{bad}: {error}");
        }
    }
}
