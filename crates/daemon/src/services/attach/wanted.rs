//! Attaching a container, for whichever face asks.

use std::time::SystemTime;

use ipnet::IpNet;
use weft_api::{ApiError, Attachment, ErrorKind};
use weft_container::Sandbox;
use weft_path::{Mac, Vni};

use super::condition::Condition;
use super::error::AttachError;
use super::maker::Maker;
use super::ports::PortKind;
use super::{Attachments, Inner, Saved, announce, kept, look, spec_of};
use crate::core::control::Request;
use crate::devices::{HANDED_INTERFACE, HOST_INTERFACE};
use crate::services::networks::OnNetwork;
use crate::timestamp;

/// An attachment as a face asks for it.
pub(super) struct Wanted {
    /// The key of the attachment.
    pub(super) id: String,
    pub(super) network: OnNetwork,
    /// The namespace.
    pub(super) sandbox: Sandbox,
    pub(super) maker: Maker,
    /// The container's name as its users know it.
    pub(super) name: String,
    /// Further names in DNS.
    pub(super) aliases: Vec<String>,
    /// The interface in the container; for Docker its name before the engine takes it.
    pub(super) interface: String,
    /// The Ethernet address asked for.
    pub(super) mac: Option<Mac>,
    /// The addresses asked for; none: the next free ones.
    pub(super) addresses: Vec<IpNet>,
    /// Switch IPv6 on where the container has it off.
    pub(super) enable_ipv6: bool,
    pub(super) multicast_route: bool,
    /// The default routes of the container lead to this host.
    pub(super) default_route: bool,
    /// Of the host itself: it translates the addresses of containers that leave the network through it.
    pub(super) masquerade: bool,
    /// It may send from other addresses than its own.
    pub(super) allow_macs: bool,
}

/// Names on this host that follow from an attachment's key.
pub(super) struct Derived {
    /// Locally administered, unicast (IEEE 802).
    pub(super) mac: Mac,
    /// The host's end of the pair.
    pub(super) host_interface: String,
    /// The container's end while Docker's engine has not taken it yet.
    pub(super) handed_interface: String,
}

impl Attachments {
    /// Attaches a container, entirely or not at all. A container that is attached already gets further
    /// addresses.
    pub(super) async fn put_in(
        &self,
        inner: &mut Inner,
        wanted: Wanted,
    ) -> Result<Saved, AttachError> {
        let id = wanted.id.clone();
        inner.check_network(&wanted)?;
        let before = inner.saved.get(&id).cloned();
        let (addresses, new) = self
            .addresses(inner, (&id, wanted.network.vni), &wanted.addresses, before.as_ref())
            .await?;
        let gateways = match wanted.default_route {
            true => self.gateways(inner, &wanted.network, &addresses),
            false => {
                Ok(before.as_ref().map(|it| it.attachment.gateways.clone()).unwrap_or_default())
            }
        };
        let gateways = match gateways {
            Ok(gateways) => gateways,
            Err(error) => {
                self.give_back((&id, wanted.network.vni), before.as_ref(), new).await;
                return Err(error);
            }
        };
        let vni = wanted.network.vni;
        let mut saved = self.describe(wanted, addresses, before.as_ref());
        saved.attachment.gateways = gateways;
        let apart = inner.check_apart(&saved);
        if let Err(error) = apart {
            self.give_back((&id, vni), before.as_ref(), new).await;
            return Err(error);
        }
        // Nothing is attached that could not be saved.
        inner.saved.insert(id.clone(), saved.clone());
        if let Err(error) = self.saving.save(inner.saved.clone()).await {
            self.put_back(inner, (&id, vni), before, new).await;
            return Err(error.into());
        }
        let plugged_in = match self.look_at_routes(&mut saved, before.is_some()).await {
            Ok(()) => self.plug_in(&mut saved).await.map_err(AttachError::from),
            Err(error) => Err(error),
        };
        if let Err(error) = plugged_in {
            match &before {
                Some(before) if before.is_attached() => {
                    self.take_addresses(before, &new).await;
                    self.locks.set(before).await;
                }
                _ => self.take_out(&saved).await,
            }
            self.put_back(inner, (&id, vni), before, new).await;
            self.save_or_later(inner);
            return Err(error);
        }
        let written = inner.saved.insert(id.clone(), saved.clone());
        inner.retries.forget(&id);
        if written.is_none_or(|written| written.attachment != saved.attachment) {
            self.save_or_later(inner);
        }
        self.tell(Request::Announce { attachment: saved.shown().into() }).await;
        tokio::spawn(announce(self.kernel.clone(), vni, spec_of(&saved)));
        tracing::info!(container = %saved.attachment.name, id, by = saved.maker.name(), "attached");
        Ok(saved)
    }

    /// Restores an attachment to its earlier state, and releases the addresses it got since.
    async fn put_back(
        &self,
        inner: &mut Inner,
        (id, vni): (&str, Vni),
        before: Option<Saved>,
        new: Vec<IpNet>,
    ) {
        self.give_back((id, vni), before.as_ref(), new).await;
        match before {
            Some(before) => drop(inner.saved.insert(id.into(), before)),
            None => drop(inner.saved.remove(id)),
        }
    }

    pub(super) async fn take_addresses(&self, saved: &Saved, addresses: &[IpNet]) {
        let (namespace, interface) = (&saved.sandbox.namespace, &saved.attachment.interface);
        let taken = match saved.maker {
            Maker::Host => self.kernel.remove_host_addresses(interface, addresses).await,
            _ => self.kernel.remove_addresses(namespace, interface, addresses).await,
        };
        if let Err(error) = taken {
            tracing::debug!(%error, container = saved.attachment.name, "cannot take back addresses");
        }
    }

    /// The names that follow from a key; the same on this host each time.
    pub(super) fn derived(&self, id: &str) -> Derived {
        let digest = weft_crypto::fingerprint(&[self.local.as_bytes(), id.as_bytes()]);
        let [a, b, c, d, e, ..] = digest;
        let digits = format!("{a:02x}{b:02x}{c:02x}{d:02x}{e:02x}");
        Derived {
            mac: Mac([0x02, a, b, c, d, e]),
            host_interface: format!("{HOST_INTERFACE}{digits}"),
            handed_interface: format!("{HANDED_INTERFACE}{digits}"),
        }
    }

    pub(super) fn describe(
        &self,
        wanted: Wanted,
        addresses: Vec<IpNet>,
        before: Option<&Saved>,
    ) -> Saved {
        let Wanted { id, network, sandbox, maker, name, aliases, interface, mac, .. } = wanted;
        let Wanted { enable_ipv6, multicast_route, masquerade, allow_macs, .. } = wanted;
        // Containers reach the host.
        let isolated = network.isolated && maker != Maker::Host;
        let derived = self.derived(&id);
        let since = before.filter(|before| before.is_attached()).map_or_else(
            || timestamp::format(SystemTime::now()),
            |before| before.attachment.since.clone(),
        );
        let attachment = Attachment {
            id,
            name,
            aliases,
            interface,
            mac: mac.unwrap_or(derived.mac).to_string(),
            addresses,
            gateways: Vec::new(),
            masquerade,
            allow_macs: allow_macs || before.is_some_and(|it| it.attachment.allow_macs),
            mtu: before.map_or(network.mtu, |before| before.attachment.mtu),
            port: PortKind::Bridge.name().into(),
            port_reason: None,
            vni: network.vni.0,
            network: network.name,
            made_by: maker.name().into(),
            since,
            state: kept::ATTACHED.into(),
            reason: None,
            state_since: None,
            notes: Vec::new(),
        };
        Saved {
            sandbox,
            attachment,
            host_interface: derived.host_interface,
            multicast_route,
            isolated,
            condition: Condition::wanted(enable_ipv6, before.map(|before| &before.condition)),
            maker,
        }
    }
}

impl Inner {
    /// Refuses to move an attachment to another network.
    fn check_network(&self, wanted: &Wanted) -> Result<(), AttachError> {
        let before = self.saved.get(&wanted.id).map(|saved| &saved.attachment);
        let Some(before) = before.filter(|it| it.vni != wanted.network.vni.0) else {
            return Ok(());
        };
        let text = format!(
            "{} is attached to network {}: detach it first to attach it to network {}",
            before.name, before.network, wanted.network.name
        );
        Err(ApiError::new(ErrorKind::Conflict, text).into())
    }

    /// Refuses a container that another face has attached to the network, or whose other network leads to the same
    /// addresses: it would reach them on one of the two. Docker's plugin itself compares Docker's networks, and knows
    /// first which one a container has left.
    pub(super) fn check_apart(&self, new: &Saved) -> Result<(), AttachError> {
        let is_beside = |saved: &&Saved| {
            saved.is_attached()
                && saved.attachment.id != new.attachment.id
                && !(saved.maker.is_docker() && new.maker.is_docker())
                && look::is_in(&saved.sandbox, &new.sandbox)
        };
        let name = match new.maker.is_docker() {
            true => "the container",
            false => &new.attachment.name,
        };
        let conflict = |text: String| Err(ApiError::new(ErrorKind::Conflict, text).into());
        let is_same =
            |saved: &&Saved| saved.vni() == new.vni() && saved.maker.name() != new.maker.name();
        if let Some(other) = self.saved.values().filter(is_beside).find(is_same) {
            let (maker, network) = (other.maker.name(), &other.attachment.network);
            let remedy = match other.maker.is_command() {
                // Without a network it ends the one on `weft`.
                true => format!("weft detach --network {network}"),
                false => other.maker.remedy().to_owned(),
            };
            return conflict(format!(
                "{name} is on network {network} already, attached by {maker}: {remedy} first"
            ));
        }
        let nets = |saved: &Saved| saved.attachment.addresses.clone();
        let overlaps = |saved: &Saved| {
            let (own, others) = (nets(new), nets(saved));
            own.iter().any(|net| {
                others.iter().any(|it| it.contains(&net.network()) || net.contains(&it.network()))
            })
        };
        let mut others = self.saved.values().filter(is_beside);
        let Some(other) = others.find(|it| it.vni() != new.vni() && overlaps(it)) else {
            return Ok(());
        };
        let (first, second) = (&other.attachment.network, &new.attachment.network);
        conflict(format!(
            "{name} is on network {first} already, whose addresses overlap with those of network {second}: create one of them with another --subnet"
        ))
    }
}
