//! The way out of the network through this host: default routes of containers, and translation of their addresses
//! (`weft expose --masquerade`). Some of its rules stand wherever the host is exposed, for ports that it publishes.

use std::convert::Infallible;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use ipnet::IpNet;
use tokio::sync::watch;
use weft_api::{ApiError, Attachment, ErrorKind};
use weft_kernel::{ExposedInterface, Forwarding, Kernel, KernelError, Masquerade};
use weft_path::Vni;

use super::error::AttachError;
use super::maker::{EXPOSE, Maker, host_id};
use super::{Attachments, Inner, Saved, kept, mac_of};
use crate::devices::NETWORK;
use crate::services::networks::OnNetwork;
use crate::services::supervisor::Pulse;

/// The interval between checks of the host's switches of forwarding, which no notice reports.
const LOOK: Duration = Duration::from_secs(30);
const FORWARDS_NOTHING: &str = "this host forwards no packets; run sysctl -w net.ipv4.ip_forward=1, and set it in /etc/sysctl.d";
/// The pause before the rules are tried again after a failure.
const RETRY: Duration = Duration::from_secs(5);

impl Attachments {
    /// The addresses of this host that a container's default routes lead to.
    ///
    /// # Errors
    /// The host has none, or none in the container's networks.
    pub(super) fn gateways(
        &self,
        inner: &Inner,
        network: &OnNetwork,
        addresses: &[IpNet],
    ) -> Result<Vec<IpAddr>, AttachError> {
        check_has_way_out(network)?;
        let name = &network.name;
        let host = inner.saved.get(&host_id(name)).filter(|host| host.is_attached());
        let Some(host) = host.map(Saved::shown) else {
            let expose = match name.as_str() {
                NETWORK => "weft expose --masquerade".to_owned(),
                name => format!("weft expose --network {name} --masquerade"),
            };
            let text = format!("this host has no address on network {name}; run {expose} first");
            return Err(AttachError::NoWayOut(text));
        };
        let forwarding = self.kernel.forwarding()?;
        gateways_among(&host.addresses, addresses, forwarding).map_err(AttachError::NoWayOut)
    }

    /// Makes the rules of the way out fit the host's attachments, before containers need them.
    pub(super) async fn open_rules(&self, inner: &Inner) -> Result<(), KernelError> {
        let hosts = inner.saved.values().map(|saved| &saved.attachment);
        let wanted = self.exposed(hosts);
        Masquerade::new(self.kernel.clone()).set(&wanted).await.map(drop)
    }

    /// The host's interfaces, as [`exposed`] finds them.
    fn exposed<'a>(&self, all: impl Iterator<Item = &'a Attachment>) -> Vec<ExposedInterface> {
        exposed(all, |vni| self.networks.is_internal(vni))
    }

    /// Refuses a network that has no way out, and a host that passes nothing on.
    pub(crate) fn check_way_out(&self, network: &OnNetwork) -> Result<(), AttachError> {
        check_has_way_out(network)?;
        self.check_forwarding()
    }

    /// Refuses a host that passes nothing on. Weft does not switch that on: it would make the host a router
    /// between all its networks.
    pub(crate) fn check_forwarding(&self) -> Result<(), AttachError> {
        if self.kernel.forwarding()?.ipv4 {
            return Ok(());
        }
        Err(AttachError::NoWayOut(FORWARDS_NOTHING.into()))
    }

    /// Records whether this host passes on what its rules translate.
    async fn note_forwarding(&self, forwarding: Forwarding) {
        let mut inner = self.lock().await;
        let differs = |(id, saved): (&String, &Saved)| {
            let notes = missing(&saved.attachment, forwarding);
            let is_new = saved.maker == Maker::Host && saved.condition.way_out != notes;
            is_new.then(|| (id.clone(), notes))
        };
        let new: Vec<_> = inner.inner.saved.iter().filter_map(differs).collect();
        for (id, notes) in new {
            if let Some(saved) = inner.saved.get_mut(&id) {
                saved.condition.way_out = notes;
            }
        }
    }
}

impl Inner {
    /// Refuses to take back addresses that default routes of containers lead to.
    pub(super) fn check_no_gateway(&self, hidden: &[IpNet]) -> Result<(), ApiError> {
        let leads = |gateway: &IpAddr| hidden.iter().any(|net| net.addr() == *gateway);
        let mut users = self.saved.values().filter(|saved| !saved.is_gone());
        let user = users.find_map(|saved| {
            let gateway = saved.attachment.gateways.iter().find(|gateway| leads(gateway))?;
            Some((&saved.attachment.name, gateway))
        });
        let Some((name, gateway)) = user else { return Ok(()) };
        let text =
            format!("the default route of {name} leads to {gateway}: end that container first");
        Err(ApiError::new(ErrorKind::Conflict, text))
    }
}

/// Refuses a network that has no way out.
fn check_has_way_out(network: &OnNetwork) -> Result<(), AttachError> {
    let name = &network.name;
    if network.internal {
        let text = format!("network {name} is internal: there is no way out of it");
        return Err(AttachError::NoWayOut(text));
    }
    Ok(())
}

/// At most one address of each family that the host passes on, out of those in the container's networks.
fn gateways_among(
    of_host: &[IpNet],
    of_container: &[IpNet],
    forwarding: Forwarding,
) -> Result<Vec<IpAddr>, String> {
    let in_network = |gateway: &IpAddr| of_container.iter().any(|net| net.contains(gateway));
    let first = |is_ipv4: bool| {
        let mut all = of_host.iter().map(IpNet::addr);
        all.find(|address| address.is_ipv4() == is_ipv4 && in_network(address))
    };
    let passed = [(true, forwarding.ipv4), (false, forwarding.ipv6)];
    let families = passed.into_iter().filter(|(_, passes)| *passes);
    let found: Vec<IpAddr> = families.filter_map(|(is_ipv4, _)| first(is_ipv4)).collect();
    if !found.is_empty() {
        return Ok(found);
    }
    if !forwarding.ipv4 && !forwarding.ipv6 {
        return Err(FORWARDS_NOTHING.into());
    }
    let list = |all: &[IpNet]| all.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ");
    let (host, container) = (list(of_host), list(of_container));
    Err(format!(
        "no address of this host ({host}) is in the container's network ({container}); weft expose ADDRESS/LENGTH adds one"
    ))
}

/// The host's interfaces among all attachments, with the ranges whose addresses it translates. `is_internal` tells
/// whether a network has no way out.
fn exposed<'a>(
    all: impl Iterator<Item = &'a Attachment>,
    is_internal: impl Fn(Vni) -> bool,
) -> Vec<ExposedInterface> {
    let is_exposed = |it: &&Attachment| it.made_by == EXPOSE && it.state == kept::ATTACHED;
    let interface = |host: &Attachment| {
        let addresses = host.addresses.iter().filter(|_| host.masquerade);
        let mut translated: Vec<IpNet> = addresses.map(IpNet::trunc).collect();
        translated.sort();
        translated.dedup();
        let (name, mac) = (host.interface.clone(), mac_of(host).0);
        ExposedInterface { name, mac, translated, internal: is_internal(Vni(host.vni)) }
    };
    all.filter(is_exposed).map(interface).collect()
}

/// What a host that translates addresses does not pass on, with the remedy.
pub(super) fn missing(host: &Attachment, forwarding: Forwarding) -> Vec<String> {
    let has = |is_ipv4: bool| host.addresses.iter().any(|net| net.addr().is_ipv4() == is_ipv4);
    let families = [
        ("IPv4", "net.ipv4.ip_forward", forwarding.ipv4, has(true)),
        ("IPv6", "net.ipv6.conf.all.forwarding", forwarding.ipv6, has(false)),
    ];
    let off = families.into_iter().filter(|(_, _, on, has)| host.masquerade && *has && !on);
    let text = |(family, switch, ..): (&str, &str, bool, bool)| {
        format!(
            "no way out by {family}: this host does not forward it; sysctl -w {switch}=1 switches that on"
        )
    };
    off.map(text).collect()
}

/// Keeps the rules of the way out, for as long as it is polled.
pub(crate) async fn keep(kernel: Kernel, attachments: Arc<Attachments>, pulse: Pulse) {
    let mut rules = Masquerade::new(kernel.clone());
    let mut shown = attachments.shown();
    let mut told = None;
    loop {
        let kept = follow(&kernel, &mut rules, &mut shown, &attachments, &pulse).await;
        let Err(error) = kept;
        let error = error.to_string();
        if told.as_ref() != Some(&error) {
            tracing::warn!(error, "cannot keep the rules of weft expose");
            told = Some(error);
        }
        pulse.wait(tokio::time::sleep(RETRY)).await;
    }
}

async fn follow(
    kernel: &Kernel,
    rules: &mut Masquerade,
    shown: &mut watch::Receiver<Arc<Vec<Attachment>>>,
    attachments: &Attachments,
    pulse: &Pulse,
) -> Result<Infallible, KernelError> {
    let mut watch = rules.watch()?;
    let mut last = None;
    loop {
        let wanted = attachments.exposed(shown.borrow_and_update().iter());
        let is_needed = wanted.iter().any(|it| it.internal || !it.translated.is_empty());
        let is_over = wanted.is_empty() && last.as_ref() == Some(&wanted);
        if !is_over {
            match rules.set(&wanted).await {
                // Without the program there never was a rule.
                Err(KernelError::NftMissing { .. }) if !is_needed => {}
                Ok(true) if last.as_ref() == Some(&wanted) => {
                    tracing::warn!(
                        "another program changed the rules of weft expose; restored them"
                    );
                }
                result => _ = result?,
            }
            attachments.note_forwarding(kernel.forwarding()?).await;
        }
        let on = !wanted.is_empty();
        last = Some(wanted);
        let next = async {
            tokio::select! {
                changed = watch.changed() => changed,
                changed = shown.changed() => match changed {
                    Ok(()) => Ok(()),
                    Err(_) => std::future::pending().await,
                },
                () = tokio::time::sleep(LOOK), if on => Ok(()),
            }
        };
        pulse.wait(next).await?;
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    const BOTH: Forwarding = Forwarding { ipv4: true, ipv6: true };

    fn nets(texts: &[&str]) -> Vec<IpNet> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    fn host(masquerade: bool, state: &str) -> Attachment {
        let text = format!(
            r#"{{"id":"host:expose","name":"one","made_by":"expose","interface":"weft-host","mac":"02:00:00:00:00:07",
            "masquerade":{masquerade},"state":"{state}","mtu":1388,"since":"",
            "addresses":["10.32.0.5/12","fd00::a20:5/64","10.40.0.5/12"]}}"#
        );
        serde_json::from_str(&text).unwrap()
    }

    #[test]
    fn default_routes_lead_to_addresses_in_the_containers_networks_that_the_host_passes_on() {
        let of_host = nets(&["192.0.2.1/24", "10.32.0.5/12", "fd00::a20:5/64"]);
        let of_container = nets(&["10.32.0.9/12", "fd00::a20:9/64"]);
        let found = |forwarding| {
            let found = gateways_among(&of_host, &of_container, forwarding)?;
            Ok::<_, String>(found.iter().map(ToString::to_string).collect::<Vec<_>>())
        };
        assert_eq!(found(BOTH).unwrap(), ["10.32.0.5", "fd00::a20:5"]);
        assert_eq!(found(Forwarding { ipv6: false, ..BOTH }).unwrap(), ["10.32.0.5"]);
        let none = found(Forwarding { ipv4: false, ipv6: false }).unwrap_err();
        assert!(none.contains("net.ipv4.ip_forward=1"), "{none}");
        let apart = gateways_among(&of_host, &nets(&["198.51.100.9/24"]), BOTH).unwrap_err();
        assert!(apart.contains("198.51.100.9/24") && apart.contains("10.32.0.5/12"), "{apart}");
    }

    #[test]
    fn a_host_translates_its_networks_while_it_is_exposed() {
        let wanted = nets(&["10.32.0.0/12", "fd00::/64"]);
        let found = |host: &Attachment| {
            let all = exposed([host].into_iter(), |_| false);
            all.into_iter().map(|it| (it.name, it.translated)).collect::<Vec<_>>()
        };
        let shut = exposed([&host(false, kept::ATTACHED)].into_iter(), |vni| vni == Vni::WEFT);
        assert!(shut[0].internal);
        let name = || "weft-host".to_owned();
        assert_eq!(found(&host(true, kept::ATTACHED)), [(name(), wanted)]);
        assert_eq!(found(&host(false, kept::ATTACHED)), [(name(), Vec::new())]);
        assert_eq!(found(&host(true, kept::FAILED)), []);
        let container = Attachment { made_by: "attach".into(), ..host(true, kept::ATTACHED) };
        assert_eq!(found(&container), []);
    }

    #[test]
    fn families_that_the_host_does_not_pass_on_are_named() {
        let host = host(true, kept::ATTACHED);
        assert_eq!(missing(&host, BOTH), Vec::<String>::new());
        let notes = missing(&host, Forwarding { ipv6: false, ..BOTH });
        assert!(notes.len() == 1 && notes[0].contains("IPv6"), "{notes:?}");
        assert_eq!(missing(&host, Forwarding { ipv4: false, ipv6: false }).len(), 2);
    }
}
