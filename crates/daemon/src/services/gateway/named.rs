//! Names of connected clients, which DNS on all hosts answers for: `NAME.clients` below the domain.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use weft_mesh::{NameRecord, is_dns_name};

use super::Gateway;
use crate::services::supervisor::Pulse;

/// The label below which clients have their names.
const LABEL: &str = "clients";
/// How long a change waits for more, in milliseconds: a client that connects again has its name all the time.
const GATHER_MS: u64 = 200;
/// How much longer for each name, in microseconds: all names go to all hosts with each change.
const GATHER_PER_NAME_US: u64 = 200;
/// The pause after the core has refused the names.
const RETRY: Duration = Duration::from_secs(5);

/// The connected clients by their numbers, as DNS is to know them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Named(BTreeMap<u32, NamedClient>);

#[derive(Clone, Debug, PartialEq, Eq)]
struct NamedClient {
    name: String,
    network: String,
    addresses: Vec<IpAddr>,
}

impl Named {
    fn records(&self) -> Arc<[NameRecord]> {
        let record = |client: &NamedClient| NameRecord {
            name: client.name.clone(),
            network: client.network.clone(),
            addresses: client.addresses.clone(),
            ports: Vec::new(),
            is_client: true,
        };
        let mut all: Vec<NameRecord> = self.0.values().map(record).collect();
        all.retain(|record| record.fault().is_none());
        all.sort_unstable();
        all.into()
    }

    fn gather(&self) -> Duration {
        let names = Duration::from_micros(GATHER_PER_NAME_US * self.0.len() as u64);
        Duration::from_millis(GATHER_MS) + names
    }
}

impl Gateway {
    /// A client is connected.
    pub(super) fn name(&self, number: u32, name: &str, network: &str, addresses: &[IpAddr]) {
        let Some(name) = dns_name(name) else { return };
        let client = NamedClient { name, network: network.into(), addresses: addresses.into() };
        self.named.send_modify(|named| _ = named.0.insert(number, client));
    }

    /// A client is gone.
    pub(super) fn unname(&self, number: u32) {
        self.named.send_if_modified(|named| named.0.remove(&number).is_some());
    }

    /// All clients are gone.
    pub(super) fn unname_all(&self) {
        self.named.send_if_modified(|named| !std::mem::take(&mut named.0).is_empty());
    }
}

/// The name of a client below the domain, if DNS can have it.
pub(super) fn dns_name(client: &str) -> Option<String> {
    let name = format!("{client}.{LABEL}").to_ascii_lowercase();
    is_dns_name(&name).then_some(name)
}

/// Announces the names of connected clients, for as long as it is polled.
pub(crate) async fn keep_names(gateway: Arc<Gateway>, pulse: Pulse) {
    let mut named = gateway.named.subscribe();
    let mut told = None;
    loop {
        let gather = named.borrow().gather();
        pulse.wait(tokio::time::sleep(gather)).await;
        let records = named.borrow_and_update().records();
        if told.as_ref() != Some(&records) {
            match pulse.wait(gateway.announcer.set(Arc::clone(&records))).await {
                Ok(()) => told = Some(records),
                Err(error) => {
                    tracing::warn!(error, "cannot announce the names of OpenVPN clients");
                    pulse.wait(tokio::time::sleep(RETRY)).await;
                    continue;
                }
            }
        }
        if pulse.wait(named.changed()).await.is_err() {
            return pulse.wait(std::future::pending()).await;
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_client_has_a_name_that_dns_can_have_or_none() {
        assert_eq!(dns_name("alice").unwrap(), "alice.clients");
        assert_eq!(dns_name("Alice.Smith-2").unwrap(), "alice.smith-2.clients");
        for none in ["", "Alice Smith", "alice@example.com", "a..b", "\u{e4}", &"a".repeat(64)] {
            assert_eq!(dns_name(none), None, "{none}");
        }
    }

    #[test]
    fn each_connected_client_has_a_record_and_a_change_waits_about_a_second_at_most() {
        let client = |name: &str, last: u8| NamedClient {
            name: name.into(),
            network: "weft".into(),
            addresses: vec![[10, 32, 0, last].into()],
        };
        let mut named = Named::default();
        named.0.insert(7, client("bob.clients", 2));
        named.0.insert(9, client("alice.clients", 1));
        // No host would take a record without an address.
        named.0.insert(10, NamedClient { addresses: Vec::new(), ..client("eve.clients", 3) });
        let records = named.records();
        let names: Vec<&str> = records.iter().map(|record| record.name.as_str()).collect();
        assert_eq!(names, ["alice.clients", "bob.clients"]);
        assert!(records.iter().all(|record| record.is_client));
        for number in 0..4_096 {
            named.0.insert(number, client("x.clients", 1));
        }
        assert!(named.gather() < Duration::from_millis(1_100), "{:?}", named.gather());
    }
}
