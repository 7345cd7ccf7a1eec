//! Attaching a container, for whichever face asks.

use std::time::SystemTime;

use ipnet::IpNet;
use weft_api::Attachment;
use weft_container::Sandbox;
use weft_path::Mac;

use super::condition::Condition;
use super::error::AttachError;
use super::maker::Maker;
use super::ports::PortKind;
use super::{Attachments, Inner, Saved, announce, kept, spec_of};
use crate::core::control::Request;
use crate::devices::{HANDED_INTERFACE, HOST_INTERFACE, NETWORK};
use crate::timestamp;

/// An attachment as a face asks for it.
pub(super) struct Wanted {
    /// The namespace, and the key of the attachment.
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
        let id = wanted.sandbox.id.clone();
        let before = inner.saved.get(&id).cloned();
        let (addresses, new) =
            self.addresses(inner, &id, &wanted.addresses, before.as_ref()).await?;
        let gateways = match wanted.default_route {
            true => self.gateways(inner, &addresses),
            false => {
                Ok(before.as_ref().map(|it| it.attachment.gateways.clone()).unwrap_or_default())
            }
        };
        let gateways = match gateways {
            Ok(gateways) => gateways,
            Err(error) => {
                self.give_back(&id, before.as_ref(), new).await;
                return Err(error);
            }
        };
        let mut saved = self.describe(wanted, addresses, before.as_ref());
        saved.attachment.gateways = gateways;
        // Nothing is attached that could not be saved.
        inner.saved.insert(id.clone(), saved.clone());
        if let Err(error) = self.saving.save(inner.saved.clone()).await {
            self.put_back(inner, &id, before, new).await;
            return Err(error.into());
        }
        let plugged_in = match self.look_at_routes(&mut saved, before.is_some()).await {
            Ok(()) => self.plug_in(&mut saved).await.map_err(AttachError::from),
            Err(error) => Err(error),
        };
        if let Err(error) = plugged_in {
            match &before {
                Some(before) if before.is_attached() => self.take_addresses(before, &new).await,
                _ => self.take_out(&saved).await,
            }
            self.put_back(inner, &id, before, new).await;
            self.save_or_later(inner);
            return Err(error);
        }
        let written = inner.saved.insert(id.clone(), saved.clone());
        inner.retries.forget(&id);
        if written.is_none_or(|written| written.attachment != saved.attachment) {
            self.save_or_later(inner);
        }
        self.tell(Request::Announce { attachment: saved.shown().into() }).await;
        tokio::spawn(announce(self.kernel.clone(), spec_of(&saved)));
        tracing::info!(container = %saved.attachment.name, id, by = saved.maker.name(), "attached");
        Ok(saved)
    }

    /// Restores an attachment to its earlier state, and releases the addresses it got since.
    async fn put_back(&self, inner: &mut Inner, id: &str, before: Option<Saved>, new: Vec<IpNet>) {
        self.give_back(id, before.as_ref(), new).await;
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
        let Wanted { sandbox, maker, name, aliases, interface, mac, .. } = wanted;
        let Wanted { enable_ipv6, multicast_route, masquerade, .. } = wanted;
        let derived = self.derived(&sandbox.id);
        let since = before.filter(|before| before.is_attached()).map_or_else(
            || timestamp::format(SystemTime::now()),
            |before| before.attachment.since.clone(),
        );
        let attachment = Attachment {
            id: sandbox.id.clone(),
            name,
            aliases,
            interface,
            mac: mac.unwrap_or(derived.mac).to_string(),
            addresses,
            gateways: Vec::new(),
            masquerade,
            mtu: before.map_or(self.mtu, |before| before.attachment.mtu),
            port: PortKind::Bridge.name().into(),
            port_reason: None,
            network: NETWORK.into(),
            vni: 1,
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
            condition: Condition::wanted(enable_ipv6, before.map(|before| &before.condition)),
            maker,
        }
    }
}
