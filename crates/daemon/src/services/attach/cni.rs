//! Attachments of CNI runtimes.

use std::net::IpAddr;

use ipnet::IpNet;
use weft_api::ExposeRequest;
use weft_container::cni::{self, Attach, Attached, Checked, Detach, Listed, Refusal, Wishes};
use weft_container::{Sandbox, SandboxKind};
use weft_kernel::KernelError;

use super::error::AttachError;
use super::look;
use super::maker::{Maker, cni_id, host_id};
use super::names::{check_name, fit_aliases};
use super::wanted::Wanted;
use super::{Attachments, Inner, Saved, mac_of, spec_of};
use crate::core::ranges::Ranges;
use crate::services::networks::OnNetwork;

/// Why an attachment is refused, for the plugin.
pub(crate) type Refused = (Refusal, String);

impl Attachments {
    /// Attaches a container for a CNI runtime. `may` says, once it is this attachment's turn, whether no DEL has
    /// come after it.
    pub(crate) async fn attach_cni(
        &self,
        attach: Attach,
        (network, ranges): (OnNetwork, &Ranges),
        may: impl FnOnce() -> bool + Send,
    ) -> Result<Attached, Refused> {
        let Attach { key, started_ns, namespace, wishes } = attach;
        check(&wishes)?;
        let id = cni_id(&key);
        let name = name_of(&key, &wishes);
        for (what, text) in [("name", &name), ("key", &id)] {
            check_name(what, text).map_err(|error| (Refusal::Invalid, error.error))?;
        }
        let addresses = addresses_of(&wishes, &network.name, ranges)?;
        self.wait_restored().await;
        let refused = |error: AttachError| (error.refusal(), error.to_string());
        let needs = |inner: &Inner| inner.needs_addresses(&id, &addresses);
        let locked = self.lock_for_addresses(network.vni, &addresses, needs).await;
        let mut inner = locked.map_err(refused)?;
        if !may() {
            let text = format!("a DEL of {key} came while this ADD was under way");
            return Err((Refusal::Deleted, text));
        }
        let sandbox = Sandbox {
            id: id.clone(),
            name: name.clone(),
            namespace: namespace.path,
            kind: SandboxKind::Path,
            pid: None,
            pid_start: None,
            device: namespace.device,
            inode: namespace.inode,
            engine_key: None,
        };
        self.open_way_out(&mut inner, &network, &wishes).await?;
        let wanted = Wanted {
            id,
            network,
            sandbox,
            name,
            interface: key.interface.clone(),
            maker: Maker::Cni { key, started_ns },
            aliases: fit_aliases(&[pod_names(&wishes), wishes.aliases].concat()),
            mac: wishes.mac,
            addresses,
            enable_ipv6: false,
            multicast_route: false,
            default_route: wishes.default_route,
            masquerade: false,
            allow_macs: wishes.allow_macs,
        };
        let saved = self.put_in(&mut inner, wanted).await;
        let saved = saved.map_err(refused)?;
        let servers = name_servers(&inner, &saved);
        drop(inner);
        self.wait_known(saved.vni()).await;
        Ok(self.attached(&saved, servers).await)
    }

    /// Ends attachments for a CNI runtime; those by an ADD that started after this DEL stay.
    pub(crate) async fn detach_cni(&self, detach: &Detach) -> Result<(), Refused> {
        self.wait_restored().await;
        let refused = |error: AttachError| (error.refusal(), error.to_string());
        let locked = self.lock_for_request().await;
        let mut inner = locked.map_err(|error| refused(error.into()))?;
        let is_meant = |saved: &&Saved| match &saved.maker {
            Maker::Cni { key, started_ns } => {
                detach.target.covers(key) && *started_ns <= detach.started_ns
            }
            _ => false,
        };
        let meant = inner.saved.values().filter(is_meant);
        let meant: Vec<String> = meant.map(|saved| saved.attachment.id.clone()).collect();
        for id in meant {
            self.end(&mut inner, &id).await.map_err(|error| refused(error.into()))?;
        }
        Ok(())
    }

    /// The state of an attachment of a CNI runtime.
    pub(crate) async fn check_cni(&self, key: &cni::Key) -> Result<Checked, Refused> {
        self.wait_restored().await;
        let found = match self.lock_for_request().await {
            Ok(inner) => inner.saved.get(&cni_id(key)).cloned(),
            Err(error) => return Err((Refusal::Busy, error.error)),
        };
        let Some(saved) = found else {
            return Err((Refusal::Unknown, format!("Weft has no attachment {key}")));
        };
        let spec = spec_of(&Saved { attachment: saved.shown(), ..saved });
        match self.kernel.inspect_attachment(&spec).await {
            Ok(found) => {
                Ok(Checked { interface_is_whole: found.is_whole, addresses: found.addresses })
            }
            Err(KernelError::NamespaceGone { path } | KernelError::NamespaceReplaced { path }) => {
                let text = format!("the namespace {} of {key} is gone", path.display());
                Err((Refusal::Unknown, text))
            }
            Err(error) => Err((Refusal::Internal, error.to_string())),
        }
    }

    /// The attachments of CNI runtimes.
    pub(crate) async fn list_cni(&self) -> Vec<Listed> {
        self.wait_restored().await;
        let Ok(inner) = self.lock_for_request().await else { return Vec::new() };
        let listed = |saved: &Saved| match &saved.maker {
            Maker::Cni { key, started_ns } => {
                Some(Listed { key: key.clone(), started_ns: *started_ns })
            }
            _ => None,
        };
        inner.saved.values().filter_map(listed).collect()
    }

    /// Each attachment of a CNI runtime, and whether its namespace is there.
    pub(crate) async fn look_at_cni(&self) -> Vec<((cni::Key, u64), cni::Presence)> {
        let inner = self.lock().await;
        let look = |saved: &Saved| match &saved.maker {
            Maker::Cni { key, started_ns } => {
                let Sandbox { namespace, device, inode, .. } = &saved.sandbox;
                let presence = cni::presence(namespace, (*device, *inode), look::identify);
                Some(((key.clone(), *started_ns), presence))
            }
            _ => None,
        };
        inner.saved.values().filter_map(look).collect()
    }

    /// Exposes this host if a container needs it: as its gateway, or to translate its address.
    async fn open_way_out(
        &self,
        inner: &mut Inner,
        network: &OnNetwork,
        wishes: &Wishes,
    ) -> Result<(), Refused> {
        let host = inner.saved.get(&host_id(&network.name));
        let is_open = host.is_some_and(|host| {
            host.is_attached() && (host.attachment.masquerade || !wishes.masquerade)
        });
        if is_open || !(wishes.default_route || wishes.masquerade) {
            return Ok(());
        }
        let masquerade = wishes.masquerade.then_some(true);
        let request = ExposeRequest { masquerade, ..ExposeRequest::default() };
        let exposed = self.put_host_in(inner, network.clone(), request).await;
        exposed.map(drop).map_err(|error| (error.refusal(), error.to_string()))
    }

    async fn attached(&self, saved: &Saved, servers: Vec<IpAddr>) -> Attached {
        let name = saved.host_interface.clone();
        let mac = self.kernel.mac_of(&name).await.ok().flatten();
        let shown = saved.shown();
        Attached {
            host_interface: mac.map(|mac| (name, weft_path::Mac(mac))),
            mac: Some(mac_of(&shown)),
            mtu: shown.mtu.into(),
            addresses: shown.addresses,
            routes: shown.gateways.iter().map(default_route).collect(),
            gateways: shown.gateways,
            dns: dns(&servers, &self.domain),
        }
    }
}

/// The host's addresses in a container's networks, which answer DNS.
fn name_servers(inner: &Inner, saved: &Saved) -> Vec<IpAddr> {
    let host = inner.saved.get(&host_id(&saved.attachment.network));
    let host = host.filter(|host| host.is_attached()).map(Saved::shown);
    let addresses = host.into_iter().flat_map(|host| host.addresses);
    let own = saved.shown().addresses;
    let is_near = |address: &IpAddr| own.iter().any(|net| net.contains(address));
    addresses.map(|net| net.addr()).filter(is_near).collect()
}

/// A resolver's settings; empty without a server, so that a runtime's own stay.
fn dns(servers: &[IpAddr], domain: &str) -> cni::Dns {
    if servers.is_empty() {
        return cni::Dns::default();
    }
    let domain = domain.trim_end_matches('.').to_owned();
    cni::Dns {
        nameservers: servers.iter().map(ToString::to_string).collect(),
        search: vec![domain.clone()],
        domain,
        ..cni::Dns::default()
    }
}

fn default_route(gateway: &IpAddr) -> cni::Route {
    let dst = if gateway.is_ipv4() { "0.0.0.0/0" } else { "::/0" };
    cni::Route { dst: dst.to_owned(), gw: Some(gateway.to_string()), ..cni::Route::default() }
}

/// Refuses wishes that this version cannot fulfil.
fn check(wishes: &Wishes) -> Result<(), Refused> {
    let unsupported = |field: &str, value: &str, why: &str| {
        let (field, value) = (field.to_owned(), value.to_owned());
        Err((Refusal::Unsupported { field, value }, why.to_owned()))
    };
    if let Some(port) = wishes.port_mappings.first() {
        let why = "chain the plugin portmap behind weft-cni";
        return unsupported("portMappings", &port.host_port.to_string(), why);
    }
    Ok(())
}

/// The name of a container for people: its pod's, or the beginning of its id.
fn name_of(key: &cni::Key, wishes: &Wishes) -> String {
    match (&wishes.owner.namespace, &wishes.owner.name) {
        (Some(namespace), Some(name)) => format!("{namespace}/{name}"),
        (None, Some(name)) => name.clone(),
        _ => key.container.chars().take(SHOWN_DIGITS).collect(),
    }
}

/// The names of a pod in DNS: `POD.NAMESPACE`, which no pod of another namespace has, and `POD`. A container that is in
/// no namespace has its own name.
fn pod_names(wishes: &Wishes) -> Vec<String> {
    match (&wishes.owner.namespace, &wishes.owner.name) {
        (Some(namespace), Some(name)) => vec![format!("{name}.{namespace}"), name.clone()],
        _ => Vec::new(),
    }
}

/// The addresses asked for, each with the length of its network's prefix, and with an IPv4 address the IPv6 address
/// that belongs to it.
fn addresses_of(wishes: &Wishes, network: &str, ranges: &Ranges) -> Result<Vec<IpNet>, Refused> {
    let mut addresses = Vec::with_capacity(wishes.addresses.len() + 1);
    for asked in &wishes.addresses {
        let range = ranges.all().find(|range| range.contains(&asked.address));
        let prefix = asked.prefix.or(range.map(|range| range.prefix_len()));
        let Some(prefix) = prefix else {
            let text = format!(
                "{} is outside the ranges of network {network}: give it with a prefix length, as {}/24",
                asked.address, asked.address
            );
            return Err((Refusal::Invalid, text));
        };
        let net = IpNet::new(asked.address, prefix);
        addresses.push(net.map_err(|error| (Refusal::Invalid, error.to_string()))?);
    }
    let is_v6 = |net: &IpNet| net.addr().is_ipv6();
    let first_v4 = addresses.iter().find(|net| !is_v6(net)).map(IpNet::addr);
    if let (Some(IpAddr::V4(v4)), false) = (first_v4, addresses.iter().any(is_v6)) {
        addresses.extend(ranges.partner_of(v4));
    }
    Ok(addresses)
}

/// Digits of a container's id in its name, as runtimes show ids.
const SHOWN_DIGITS: usize = 12;

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use ipnet::{Ipv4Net, Ipv6Net};
    use weft_container::cni::{PortMapping, RequestedAddress};

    use super::*;

    fn ranges() -> Ranges {
        let v6: Ipv6Net = "fd00:1::/64".parse().unwrap();
        let v4: Ipv4Net = "10.32.0.0/12".parse().unwrap();
        Ranges { v4, v6: Some(v6), waiting: None, may_pass: true }
    }

    fn asked(addresses: &[&str]) -> Result<Vec<String>, Refused> {
        let parse = |text: &&str| match text.split_once('/') {
            Some((address, prefix)) => RequestedAddress {
                address: address.parse().unwrap(),
                prefix: Some(prefix.parse().unwrap()),
            },
            None => RequestedAddress { address: text.parse().unwrap(), prefix: None },
        };
        let addresses = addresses.iter().map(parse).collect();
        let wishes = Wishes { network: "weft".into(), addresses, ..Wishes::default() };
        let given = addresses_of(&wishes, "weft", &ranges())?;
        Ok(given.iter().map(ToString::to_string).collect())
    }

    #[test]
    fn an_address_gets_its_networks_prefix_and_its_partner_of_the_other_family() {
        assert_eq!(asked(&[]).unwrap(), Vec::<String>::new());
        assert_eq!(asked(&["10.32.0.9"]).unwrap(), ["10.32.0.9/12", "fd00:1::a20:9/64"]);
        assert_eq!(asked(&["10.32.0.9/16"]).unwrap(), ["10.32.0.9/16", "fd00:1::a20:9/64"]);
        assert_eq!(asked(&["fd00:1::a20:9"]).unwrap(), ["fd00:1::a20:9/64"]);
        assert_eq!(asked(&["192.0.2.9/24"]).unwrap(), ["192.0.2.9/24"]);
        let (refusal, text) = asked(&["192.0.2.9"]).unwrap_err();
        assert!(refusal == Refusal::Invalid && text.contains("192.0.2.9/24"), "{text}");
    }

    #[test]
    fn a_pod_has_names_with_and_without_its_namespace() {
        let of = |name: Option<&str>, namespace: Option<&str>| {
            let (name, namespace) = (name.map(str::to_owned), namespace.map(str::to_owned));
            let owner = cni::Owner { name, namespace, uid: None };
            pod_names(&Wishes { network: "weft".into(), owner, ..Wishes::default() })
        };
        assert_eq!(of(Some("web"), Some("shop")), ["web.shop", "web"]);
        // Podman gives a container's name alone, which is one in DNS already.
        assert_eq!(of(Some("web"), None), Vec::<String>::new());
        assert_eq!(of(None, Some("shop")), Vec::<String>::new());
    }

    #[test]
    fn a_runtime_is_told_the_name_servers_that_there_are() {
        assert_eq!(dns(&[], "weft.local."), cni::Dns::default());
        let told = dns(&["10.32.0.5".parse().unwrap()], "weft.local.");
        assert_eq!(
            (told.nameservers, told.domain),
            (vec!["10.32.0.5".into()], "weft.local".into())
        );
        assert_eq!(told.search, ["weft.local"]);
    }

    #[test]
    fn wishes_that_cannot_be_fulfilled_are_refused_by_name() {
        let wishes = Wishes { network: "weft".into(), ..Wishes::default() };
        assert_eq!(check(&wishes), Ok(()));
        let port = PortMapping {
            host_port: 80,
            container_port: 80,
            protocol: "tcp".into(),
            host_ip: String::new(),
        };
        let wishes = Wishes { port_mappings: vec![port], ..wishes };
        let (refusal, _) = check(&wishes).unwrap_err();
        let of = |field: &str| field == "portMappings";
        assert!(matches!(refusal, Refusal::Unsupported { field, .. } if of(&field)));
    }
}
