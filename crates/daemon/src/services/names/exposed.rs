//! DNS on the addresses that `weft expose` gives the host.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;
use tokio::sync::watch;
use weft_api::Attachment;

use super::sockets::Listener;
use super::{Names, listener_on};
use crate::services::attach::{EXPOSE, kept::ATTACHED};
use crate::services::supervisor::Pulse;

/// Has DNS answered on the host's addresses on the network, as they come and go.
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

/// The addresses of the host on the network.
fn exposed(attachments: &[Attachment]) -> BTreeSet<IpNet> {
    let is_host = |it: &&Attachment| it.made_by == EXPOSE && it.state == ATTACHED;
    attachments.iter().filter(is_host).flat_map(|it| &it.addresses).copied().collect()
}

/// The listeners on addresses of the configuration and on those of the host on the network. Nobody chose the latter for
/// others: they serve the network alone.
fn listeners(given: &[IpAddr], exposed: &BTreeSet<IpNet>) -> Vec<Listener> {
    let mut all: Vec<Listener> = given.iter().map(|address| listener_on(*address)).collect();
    let networks: Vec<IpNet> = exposed.iter().map(IpNet::trunc).collect();
    let further = exposed.iter().filter(|net| !given.contains(&net.addr()));
    all.extend(further.map(|net| Listener {
        clients: networks.clone(),
        is_exposed: true,
        ..listener_on(net.addr())
    }));
    all
}

impl Names {
    /// Answers on these addresses, besides those of the configuration.
    fn listen_on(&self, exposed: &BTreeSet<IpNet>) {
        let wanted = listeners(&self.listen, exposed);
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

    fn attachment(made_by: &str, state: &str, address: &str) -> Attachment {
        let text = format!(
            r#"{{"id":"x","name":"x","interface":"weft-host","mac":"02:00:00:00:00:07","made_by":"{made_by}",
            "state":"{state}","addresses":["{address}"],"mtu":1388,"since":""}}"#
        );
        serde_json::from_str(&text).unwrap()
    }

    #[test]
    fn only_addresses_that_the_host_has_now_count() {
        let all = [
            attachment(EXPOSE, ATTACHED, "10.32.0.1/12"),
            attachment(EXPOSE, "failed", "10.32.0.2/12"),
            attachment("attach", ATTACHED, "10.32.0.3/12"),
        ];
        let only = BTreeSet::from(["10.32.0.1/12".parse().unwrap()]);
        assert_eq!(exposed(&all), only);
    }

    #[test]
    fn an_exposed_address_serves_its_networks_and_one_of_the_configuration_its_neighbours() {
        let given: Vec<IpAddr> = vec!["192.168.1.1".parse().unwrap(), "10.32.0.2".parse().unwrap()];
        let exposed = ["10.32.0.1/12", "10.32.0.2/12"].map(|text| text.parse().unwrap());
        let all = listeners(&given, &BTreeSet::from(exposed));
        let addresses: Vec<String> = all.iter().map(|it| it.address.to_string()).collect();
        assert_eq!(addresses, ["192.168.1.1:53", "10.32.0.2:53", "10.32.0.1:53"]);
        let serves = |at: usize, text: &str| {
            let client: IpAddr = text.parse().unwrap();
            all[at].clients.iter().any(|net| net.contains(&client))
        };
        assert!(serves(0, "192.168.1.7") && serves(1, "192.168.1.7"));
        assert!(serves(2, "10.47.0.1") && !serves(2, "192.168.1.7") && !serves(2, "127.0.0.1"));
        assert!(all[2].is_exposed && !all[1].is_exposed);
        assert_eq!(listeners(&given, &BTreeSet::new()).len(), 2, "a hidden one is closed");
    }
}
