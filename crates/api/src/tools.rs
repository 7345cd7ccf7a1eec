//! What programs of other projects watch an OpenVPN gateway by.

use std::convert::Infallible;
use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The status file and the management interface, as OpenVPN has them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ToolSettings {
    /// The status file: a name, or a path in the gateway's folder; `None`: none is written.
    pub status_file: Option<PathBuf>,
    /// Seconds between two writings of it, 1 to 86,400; `None`: 60.
    pub status_interval_s: Option<u32>,
    /// The format of a status: 1, 2 or 3; `None`: 1.
    pub status_version: Option<u8>,
    /// Where the management interface listens; `None`: there is none.
    pub management: Option<ManagementPlace>,
    /// A file with the password of an interface on TCP.
    pub management_password: Option<PathBuf>,
}

/// Where a management interface listens: `ADDRESS:PORT`, or the name of a socket.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", from = "String")]
pub enum ManagementPlace {
    /// A socket of the file system: a name, or a path in the gateway's folder.
    Unix(PathBuf),
    /// A TCP port of the loopback.
    Tcp(SocketAddr),
}

impl From<String> for ManagementPlace {
    fn from(text: String) -> Self {
        text.parse().map_or_else(|_| Self::Unix(text.into()), Self::Tcp)
    }
}

impl FromStr for ManagementPlace {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        Ok(Self::from(text.to_owned()))
    }
}

impl fmt::Display for ManagementPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => path.display().fmt(f),
            Self::Tcp(address) => address.fmt(f),
        }
    }
}

impl From<ManagementPlace> for String {
    fn from(place: ManagementPlace) -> Self {
        place.to_string()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_place_is_the_same_as_text_and_in_json() {
        let tcp = ["127.0.0.1:7505", "[::1]:7505"];
        let unix = ["management.sock", "/run/weft/openvpn/m", "localhost:7505"];
        for text in tcp.into_iter().chain(unix) {
            let place: ManagementPlace = text.parse().unwrap();
            assert_eq!(matches!(place, ManagementPlace::Tcp(_)), tcp.contains(&text), "{text}");
            assert_eq!(place.to_string(), text);
            let json = serde_json::to_string(&place).unwrap();
            assert_eq!(json, format!("\"{text}\""));
            assert_eq!(serde_json::from_str::<ManagementPlace>(&json).unwrap(), place);
        }
    }
}
