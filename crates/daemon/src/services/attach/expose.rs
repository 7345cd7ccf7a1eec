//! `weft expose` and `weft hide`: the host's own interface in the network. It is an attachment like those of
//! containers, whose two ends are both on the host.

use std::net::IpAddr;

use ipnet::IpNet;
use weft_api::{ApiError, Attachment, ErrorKind, ExposeRequest, Hidden, HideRequest};
use weft_kernel::{AttachSpec, KernelError};

use super::endpoints::nowhere;
use super::error::AttachError;
use super::maker::{Maker, host_id};
use super::names::{check_name, printable};
use super::wanted::Wanted;
use super::{Attachments, Inner, Saved, kernel_refusal, spec_of, way_out};
use crate::core::control::Request;
use crate::core::ranges::Ranges;
use crate::devices::{NETWORK, exposed_on, is_exposed};
use crate::services::networks::OnNetwork;

impl Attachments {
    /// Serves `weft expose`. Exposing again adds explicit addresses, or changes nothing. The host's name in DNS is
    /// its nickname unless the request has one.
    pub(crate) async fn expose(&self, request: ExposeRequest) -> Result<Attachment, ApiError> {
        self.wait_restored().await;
        let network = self.networks.join(request.network.as_deref()).await?;
        if let Some(ranges) = self.ranges(network.vni).await {
            check_prefixes(&request.addresses, &ranges)?;
        }
        let (id, asked) = (host_id(&network.name), &request.addresses);
        let needs = |inner: &Inner| inner.needs_addresses(&id, asked);
        let mut inner = self.lock_for_addresses(network.vni, asked, needs).await?;
        let saved = self.put_host_in(&mut inner, network, request).await?;
        drop(inner);
        self.wait_known(saved.vni()).await;
        Ok(saved.shown())
    }

    /// Exposes the host to a network, entirely or not at all.
    pub(super) async fn put_host_in(
        &self,
        inner: &mut Inner,
        network: OnNetwork,
        request: ExposeRequest,
    ) -> Result<Saved, AttachError> {
        let id = host_id(&network.name);
        let before = inner.saved.get(&id).map(|saved| saved.attachment.clone());
        let translated = before.as_ref().is_some_and(|before| before.masquerade);
        let masquerade = request.masquerade.unwrap_or(translated);
        if masquerade && !translated {
            self.check_way_out(&network)?;
        }
        let was = before.as_ref().map(|before| before.name.clone());
        let name = request.name.or(was).unwrap_or_else(|| printable(&self.nickname));
        check_name("name", &name)?;
        let needs_rules = masquerade || network.internal;
        let wanted = Wanted {
            sandbox: nowhere(id.clone(), name.clone()),
            id: id.clone(),
            maker: Maker::Host,
            aliases: Vec::new(),
            name,
            interface: exposed_on(network.vni),
            network,
            mac: None,
            addresses: request.addresses,
            enable_ipv6: request.ipv6,
            multicast_route: false,
            default_route: false,
            masquerade,
            allow_macs: false,
        };
        let saved = self.put_in(inner, wanted).await?;
        if !needs_rules {
            return Ok(saved);
        }
        let Err(error) = self.open_rules(inner).await else { return Ok(saved) };
        match before {
            Some(before) => {
                if let Some(saved) = inner.saved.get_mut(&id) {
                    saved.attachment.masquerade = before.masquerade;
                }
                self.save_or_later(inner);
            }
            None => self.end(inner, &id).await?,
        }
        Err(error.into())
    }

    /// Serves `weft hide`: takes back these addresses, or all. A host that is not exposed has nothing to hide.
    ///
    /// The kernel comes first: an address that is free for others is on no device of this host.
    pub(crate) async fn hide(&self, request: HideRequest) -> Result<Hidden, ApiError> {
        self.wait_restored().await;
        let mut inner = self.lock_for_request().await?;
        let id = host_id(request.network.as_deref().unwrap_or(NETWORK));
        let Some(saved) = inner.saved.get(&id).cloned() else { return hidden_none(&request) };
        let (hidden, kept) = divided(&saved.attachment.addresses, &request.addresses)?;
        inner.check_no_gateway(&hidden)?;
        if kept.is_empty() {
            self.end_exposure(&mut inner, saved).await?;
        } else {
            self.hide_some(&mut inner, saved, &hidden, kept).await?;
        }
        Ok(Hidden { addresses: hidden })
    }

    async fn hide_some(
        &self,
        inner: &mut Inner,
        before: Saved,
        hidden: &[IpNet],
        kept: Vec<IpNet>,
    ) -> Result<(), ApiError> {
        let (id, vni) = (before.attachment.id.clone(), before.vni());
        let interface = &before.attachment.interface;
        let removed = self.kernel.remove_host_addresses(interface, hidden).await;
        removed.map_err(kernel_refusal)?;
        let mut after = before.clone();
        after.attachment.addresses.clone_from(&kept);
        let mut all = inner.saved.clone();
        all.insert(id.clone(), after.clone());
        if let Err(error) = self.saving.save(all).await {
            self.put_in_again(inner, before).await;
            return Err(error);
        }
        inner.saved.insert(id.clone(), after.clone());
        self.shortcuts.plugged_in();
        let (owner, addresses) = (id, hidden.to_vec());
        self.tell(Request::ReleaseSome { owner, vni, addresses, kept }).await;
        if after.is_attached() {
            self.tell(Request::Announce { attachment: after.shown().into() }).await;
        }
        Ok(())
    }

    async fn end_exposure(&self, inner: &mut Inner, saved: Saved) -> Result<(), ApiError> {
        let ends = [&saved.host_interface, &saved.attachment.interface];
        let removed = self.remove_both_ends(ends).await;
        let ended = match removed.map_err(kernel_refusal) {
            Ok(()) => self.end(inner, &saved.attachment.id).await,
            Err(error) => Err(error),
        };
        if ended.is_err() {
            self.put_in_again(inner, saved).await;
        }
        ended
    }

    async fn remove_both_ends(&self, ends: [&String; 2]) -> Result<(), KernelError> {
        for end in ends {
            match self.kernel.detach(end).await {
                // Another program's device of that name was never ours.
                Ok(_) | Err(KernelError::NameTaken { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Exposes the host as before, since a change of it failed.
    async fn put_in_again(&self, inner: &mut Inner, mut saved: Saved) {
        self.plug_in_or_say(&mut saved).await;
        inner.saved.insert(saved.attachment.id.clone(), saved);
    }

    /// A daemon that was killed while it ended the exposure may have left the interface.
    pub(super) async fn end_lost_exposure(&self, inner: &Inner) {
        let Ok(links) = self.kernel.link_traffic().await else { return };
        let known: Vec<&str> = inner.exposed().map(|it| it.attachment.interface.as_str()).collect();
        let is_lost = |name: &&String| is_exposed(name) && !known.contains(&name.as_str());
        for interface in links.keys().filter(is_lost) {
            if let Err(error) = self.kernel.detach(interface).await {
                tracing::debug!(%error, "an interface of that name is not Weft's");
            }
        }
    }

    /// Makes the host's pair, or restores it.
    pub(super) async fn plug_in_host(
        &self,
        saved: &mut Saved,
        spec: &AttachSpec,
    ) -> Result<(), KernelError> {
        saved.note(self.kernel.expose(spec).await?);
        saved.condition.way_out = way_out::missing(&saved.attachment, self.kernel.forwarding()?);
        self.engine.add_port(saved.vni(), &saved.host_interface).await?;
        self.shortcuts.plugged_in();
        Ok(())
    }

    /// Refuses addresses whose networks and this host's routes lead to the same addresses: the host would lose these,
    /// or its peers.
    pub(super) async fn look_at_host_routes(&self, saved: &Saved) -> Result<(), AttachError> {
        let overlaps = self.kernel.host_overlaps(&spec_of(saved)).await?;
        let Some(overlap) = overlaps.first() else { return Ok(()) };
        let (network, route) = (overlap.network, &overlap.route);
        let interface = &saved.attachment.interface;
        Err(AttachError::HostRoute(format!(
            "this host reaches {} by a route via {}, and would reach {network} by {interface}",
            route.destination, route.interface
        )))
    }
}

impl Inner {
    /// The host's own attachments.
    fn exposed(&self) -> impl Iterator<Item = &Saved> {
        self.saved.values().filter(|saved| saved.maker == Maker::Host)
    }
}

/// Refuses a prefix that is shorter than its range's: the host would reach foreign addresses by the network.
fn check_prefixes(addresses: &[IpNet], ranges: &Ranges) -> Result<(), ApiError> {
    for address in addresses {
        let range = ranges.all().find(|range| range.contains(&address.addr()));
        if let Some(range) = range.filter(|range| address.prefix_len() < range.prefix_len()) {
            let (ip, fit) = (address.addr(), range.prefix_len());
            let text = format!("{address} is wider than the range {range}: give {ip}/{fit}");
            return Err(ApiError::new(ErrorKind::BadRequest, text));
        }
    }
    Ok(())
}

/// Those of a host's addresses that are to be hidden, and the others. Nothing asked for means all.
fn divided(has: &[IpNet], asked: &[IpAddr]) -> Result<(Vec<IpNet>, Vec<IpNet>), ApiError> {
    let is_known = |address: &&IpAddr| has.iter().any(|net| net.addr() == **address);
    if let Some(other) = asked.iter().find(|address| !is_known(address)) {
        return Err(not_exposed(*other));
    }
    Ok(has.iter().partition(|net| asked.is_empty() || asked.contains(&net.addr())))
}

fn hidden_none(request: &HideRequest) -> Result<Hidden, ApiError> {
    match request.addresses.first() {
        Some(address) => Err(not_exposed(*address)),
        None => Ok(Hidden { addresses: Vec::new() }),
    }
}

fn not_exposed(address: IpAddr) -> ApiError {
    let text = format!(
        "{address} is not an address that weft expose gave this host; weft ps lists those (made by expose)"
    );
    ApiError::new(ErrorKind::NotFound, text)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn nets(texts: &[&str]) -> Vec<IpNet> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    #[test]
    fn all_addresses_are_hidden_or_those_named_and_no_others() {
        let has = nets(&["10.32.0.5/12", "fd00::a20:5/64"]);
        assert_eq!(divided(&has, &[]).unwrap(), (has.clone(), Vec::new()));
        let (hidden, kept) = divided(&has, &["fd00::a20:5".parse().unwrap()]).unwrap();
        assert_eq!((hidden, kept), (nets(&["fd00::a20:5/64"]), nets(&["10.32.0.5/12"])));
        let refused = divided(&has, &["10.32.0.6".parse().unwrap()]).unwrap_err();
        assert!(refused.kind == ErrorKind::NotFound && refused.error.contains("10.32.0.6"));
    }

    #[test]
    fn a_prefix_wider_than_the_range_is_refused() {
        let (v4, v6) = ("10.32.0.0/12".parse().unwrap(), "fd00:1::/64".parse().unwrap());
        let ranges = Ranges { v4, v6: Some(v6), waiting: None, may_pass: true };
        check_prefixes(&nets(&["10.32.0.5/12", "10.32.0.5/24", "192.0.2.1/8"]), &ranges).unwrap();
        let refused = check_prefixes(&nets(&["10.32.0.5/8"]), &ranges).unwrap_err();
        assert!(refused.error.contains("10.32.0.5/12"), "{}", refused.error);
    }
}
