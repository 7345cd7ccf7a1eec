//! DNS on the addresses that `weft expose` gives the host on networks.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;
use tokio::sync::watch;
use weft_api::Attachment;

use super::sockets::Listener;
use super::zone::{DEFAULT_NETWORK, Scope};
use super::{Names, listener_on};
use crate::services::attach::{EXPOSE, kept::ATTACHED};
use crate::services::supervisor::Pulse;

/// An address of the host on a network.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Exposed {
    network: String,
    net: IpNet,
}

/// Has DNS answered on the host's addresses on networks, as they come and go.
pub(crate) async fn follow(
    names: Arc<Names>,
    mut attachments: watch::Receiver<Arc<Vec<Attachment>>>,
    pulse: Pulse,
) {
    loop {
        let exposed = exposed(&attachments.borrow_and_update());
        names.listen_on(&exposed);
        if pulse.wait(attachments.changed()).await.is_err() {
            return pulse.wait(std::future::pending()).await;
        }
    }
}

/// The addresses of the host on networks, those on `weft` first.
fn exposed(attachments: &[Attachment]) -> Vec<Exposed> {
    let is_host = |it: &&Attachment| it.made_by == EXPOSE && it.state == ATTACHED;
    let on = |it: &Attachment, net: &IpNet| Exposed { network: it.network.clone(), net: *net };
    let all = attachments.iter().filter(is_host);
    let mut all: Vec<Exposed> =
        all.flat_map(|it| it.addresses.iter().map(move |net| on(it, net))).collect();
    all.sort_by_key(|it| it.network != DEFAULT_NETWORK);
    all
}

/// The listeners on addresses of the configuration and on those of the host on networks, and what is wrong. Nobody
/// chose the latter for others: they serve their network alone.
fn listeners(given: &[IpAddr], exposed: &[Exposed]) -> (Vec<Listener>, Vec<String>) {
    let first = |address: IpAddr| exposed.iter().find(|it| it.net.addr() == address);
    let scope = |it: &Exposed| Scope::Network(it.network.clone());
    let mut all: Vec<Listener> = given.iter().map(|address| listener_on(*address)).collect();
    for listener in &mut all {
        if let Some(own) = first(listener.address.ip()) {
            listener.scope = scope(own);
        }
    }
    let mut warnings = Vec::new();
    for it in exposed {
        let address = it.net.addr();
        if let Some(other) = first(address).filter(|other| other.network != it.network) {
            warnings.push(format!(
                "{address} is this host's address on networks {} and {}, and DNS there answers for {} alone; weft expose another address on {}",
                other.network, it.network, other.network, it.network
            ));
        }
        if all.iter().any(|listener| listener.address.ip() == address) {
            continue;
        }
        let neighbours = exposed.iter().filter(|other| other.network == it.network);
        let clients: BTreeSet<IpNet> = neighbours.map(|other| other.net.trunc()).collect();
        all.push(Listener {
            scope: scope(it),
            clients: clients.into_iter().collect(),
            is_exposed: true,
            ..listener_on(address)
        });
    }
    (all, warnings)
}

impl Names {
    /// Answers on these addresses, besides those of the configuration.
    fn listen_on(&self, exposed: &[Exposed]) {
        let (wanted, warnings) = listeners(&self.listen, exposed);
        self.warnings.set("dns networks", warnings);
        self.listeners.send_if_modified(|listeners| {
            let is_new = *listeners != wanted;
            *listeners = wanted;
            is_new
        });
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn attachment(made_by: &str, state: &str, network: &str, address: &str) -> Attachment {
        let text = format!(
            r#"{{"id":"x","name":"x","interface":"weft-host","mac":"02:00:00:00:00:07","made_by":"{made_by}",
            "state":"{state}","network":"{network}","addresses":["{address}"],"mtu":1388,"since":""}}"#
        );
        serde_json::from_str(&text).unwrap()
    }

    fn on(network: &str, net: &str) -> Exposed {
        Exposed { network: network.to_owned(), net: net.parse().unwrap() }
    }

    fn addresses(all: &[Listener]) -> Vec<String> {
        all.iter().map(|it| it.address.to_string()).collect()
    }

    fn serves(listener: &Listener, text: &str) -> bool {
        let client: IpAddr = text.parse().unwrap();
        listener.clients.iter().any(|net| net.contains(&client))
    }

    #[test]
    fn only_addresses_that_the_host_has_now_count() {
        let all = [
            attachment(EXPOSE, ATTACHED, "shop", "10.64.0.1/16"),
            attachment(EXPOSE, ATTACHED, "weft", "10.32.0.1/12"),
            attachment(EXPOSE, "failed", "weft", "10.32.0.2/12"),
            attachment("attach", ATTACHED, "weft", "10.32.0.3/12"),
        ];
        assert_eq!(exposed(&all), [on("weft", "10.32.0.1/12"), on("shop", "10.64.0.1/16")]);
    }

    #[test]
    fn an_exposed_address_serves_its_network_and_one_of_the_configuration_its_neighbours() {
        let given: Vec<IpAddr> = vec!["192.168.1.1".parse().unwrap(), "10.32.0.2".parse().unwrap()];
        let exposed =
            [on("weft", "10.32.0.1/12"), on("weft", "10.32.0.2/12"), on("weft", "fd00:1::1/64")];
        let (all, warnings) = listeners(&given, &exposed);
        let expected = ["192.168.1.1:53", "10.32.0.2:53", "10.32.0.1:53", "[fd00:1::1]:53"];
        assert_eq!(addresses(&all), expected);
        assert!(serves(&all[0], "192.168.1.7") && serves(&all[1], "192.168.1.7"));
        assert!(serves(&all[2], "10.47.0.1") && serves(&all[2], "fd00:1::7"));
        assert!(!serves(&all[2], "192.168.1.7") && !serves(&all[2], "127.0.0.1"));
        assert!(all[2].is_exposed && !all[1].is_exposed);
        assert_eq!(warnings, Vec::<String>::new());
        assert_eq!(listeners(&given, &[]).0.len(), 2, "a hidden one is closed");
    }

    #[test]
    fn each_network_has_its_own_listener_names_and_clients() {
        let given: Vec<IpAddr> = vec!["127.0.0.1".parse().unwrap(), "10.64.0.2".parse().unwrap()];
        let exposed =
            [on("weft", "10.32.0.1/12"), on("shop", "10.64.0.1/16"), on("shop", "10.64.0.2/16")];
        let (all, warnings) = listeners(&given, &exposed);
        let expected = ["127.0.0.1:53", "10.64.0.2:53", "10.32.0.1:53", "10.64.0.1:53"];
        assert_eq!(addresses(&all), expected);
        let scopes: Vec<&Scope> = all.iter().map(|it| &it.scope).collect();
        let (weft, shop) = (Scope::Network("weft".into()), Scope::Network("shop".into()));
        // So has an address that the configuration names, too.
        assert_eq!(scopes, [&Scope::Host, &shop, &weft, &shop]);
        assert!(serves(&all[2], "10.32.0.9") && !serves(&all[2], "10.64.0.9"));
        assert!(serves(&all[3], "10.64.0.9") && !serves(&all[3], "10.32.0.9"));
        assert_eq!(warnings, Vec::<String>::new());
    }

    #[test]
    fn one_address_on_two_networks_answers_for_the_first_and_is_told() {
        let same = [on("weft", "10.32.0.1/12"), on("shop", "10.32.0.1/16")];
        for given in [vec![], vec!["10.32.0.1".parse().unwrap()]] {
            let (all, warnings) = listeners(&given, &same);
            assert_eq!(addresses(&all), ["10.32.0.1:53"]);
            assert_eq!(all[0].scope, Scope::Network("weft".into()));
            let [warning] = warnings.as_slice() else { panic!("{warnings:?}") };
            assert!(warning.contains("10.32.0.1") && warning.contains("shop"), "{warning}");
        }
    }
}
