//! Names for DNS: those of endpoints with their aliases, those that users give to addresses by hand, and those of
//! clients of gateways.
//!
//! A host announces its own names alone, over its own links, and a peer keeps them beside that host's endpoints.
//! So they go whenever its endpoints go. The next whole set replaces them; a restarted daemon sends one. Without a
//! link they end after [`crate::limits::ENDPOINT_GRACE_S`]. A host that does not know the message ignores it.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use crate::limits::{
    ADDRESSES_PER_NAME_MAX, DNS_LABEL_BYTES_MAX, DNS_NAME_BYTES_MAX, PORTS_PER_NAME_MAX,
};

/// The transport protocol of a service (RFC 2782).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Transport {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
    /// SCTP.
    Sctp,
}

/// A service at a name, for SRV records.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct NamePort {
    /// The service's name without underscore, such as `http`.
    pub service: String,
    /// Its protocol.
    pub transport: Transport,
    /// Its port.
    pub port: u16,
}

/// A name that a user gave to addresses, or that a gateway gives to a client while it is connected.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct NameRecord {
    /// The name, relative to the network.
    pub name: String,
    /// The network on which it is visible.
    pub network: String,
    /// Its addresses.
    pub addresses: Vec<IpAddr>,
    /// Services there.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ports: Vec<NamePort>,
    /// Whether it is the name of a gateway's client. Older versions know no such names.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_client: bool,
}

impl NameRecord {
    /// Why no host would accept it, if so.
    #[must_use]
    pub fn fault(&self) -> Option<&'static str> {
        if !is_dns_name(&self.name) {
            return Some("the name is not one of labels of letters, digits, hyphens, underscores");
        }
        if !is_dns_label(&self.network) {
            return Some("the network's name is not a DNS label");
        }
        if self.addresses.is_empty() || self.addresses.len() > ADDRESSES_PER_NAME_MAX {
            return Some("a name has no address or too many");
        }
        if self.addresses.iter().any(|it| it.is_unspecified() || it.is_multicast()) {
            return Some("an address is not a unicast address");
        }
        if self.ports.len() > PORTS_PER_NAME_MAX {
            return Some("too many services at one name");
        }
        let unfit = |port: &NamePort| port.port == 0 || !is_dns_label(&port.service);
        self.ports.iter().any(unfit).then_some("a service has no name or no port")
    }
}

/// Whether a text can be a label of a name in DNS: letters, digits, hyphens and underscores.
#[must_use]
pub fn is_dns_label(text: &str) -> bool {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
    (1..=DNS_LABEL_BYTES_MAX).contains(&text.len()) && text.bytes().all(fits)
}

/// Whether a text can be a name below a network: labels with dots between.
#[must_use]
pub fn is_dns_name(text: &str) -> bool {
    text.len() <= DNS_NAME_BYTES_MAX && text.split('.').all(is_dns_label)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_name_is_labels_of_plain_characters() {
        for good in ["web", "a", "A-1_b", "web.shop", "x-", "_http", &"l".repeat(63)] {
            assert!(is_dns_name(good), "{good}");
        }
        let long = vec!["l".repeat(63); 4].join(".");
        for bad in
            ["", ".", "web.", ".web", "a..b", "w b", "w\u{e4}b", "a/b", "\\", &"l".repeat(64)]
        {
            assert!(!is_dns_name(bad), "{bad}");
        }
        assert!(!is_dns_name(&long));
        assert!(!is_dns_label("a.b"));
    }

    #[test]
    fn each_field_of_a_record_is_checked() {
        let fit = NameRecord {
            name: "db".into(),
            network: "weft".into(),
            addresses: vec![[192, 0, 2, 1].into()],
            ports: vec![NamePort { service: "sql".into(), transport: Transport::Tcp, port: 5_432 }],
            is_client: false,
        };
        assert_eq!(fit.fault(), None);
        // Versions that know no clients' names read it.
        assert!(!serde_json::to_string(&fit).unwrap().contains("client"));
        let faulty = |change: &dyn Fn(&mut NameRecord)| {
            let mut record = fit.clone();
            change(&mut record);
            assert!(record.fault().is_some(), "{record:?}");
        };
        faulty(&|it| it.name.clear());
        faulty(&|it| it.network = "a.b".into());
        faulty(&|it| it.addresses.clear());
        faulty(&|it| it.addresses = vec![[192, 0, 2, 1].into(); ADDRESSES_PER_NAME_MAX + 1]);
        faulty(&|it| it.addresses = vec![[224, 0, 0, 1].into()]);
        faulty(&|it| it.addresses = vec![[0, 0, 0, 0].into()]);
        faulty(&|it| it.ports[0].port = 0);
        faulty(&|it| it.ports[0].service = "_".repeat(64));
        faulty(&|it| it.ports = vec![fit.ports[0].clone(); PORTS_PER_NAME_MAX + 1]);
    }
}
