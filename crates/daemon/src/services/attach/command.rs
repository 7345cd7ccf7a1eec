//! `weft attach` and `weft detach`.

use weft_api::{ApiError, AttachRequest, Attachment, DetachRequest, Detached, ErrorKind};
use weft_container::{ContainerError, Sandbox};

use super::maker::{Maker, command_id};
use super::names::check_name;
use super::wanted::Wanted;
use super::{Attachments, Inner, Saved};
use crate::devices::{NETWORK, container_interface};

impl Attachments {
    /// Serves `weft attach`. Attaching again adds explicit addresses, or changes nothing. A container that has
    /// come back gets the addresses kept for it.
    pub(crate) async fn attach(&self, request: AttachRequest) -> Result<Attachment, ApiError> {
        let sandbox = weft_container::resolve(&request.container, &self.resolve)
            .await
            .map_err(|error| ApiError::new(error_kind(&error), error))?;
        check_name("name", request.name.as_deref().unwrap_or(&sandbox.name))?;
        check_name("key", &sandbox.id)?;
        self.wait_restored().await;
        let network = self.networks.join(request.network.as_deref()).await?;
        let asked = &request.addresses;
        let needs = |inner: &Inner| {
            let known = inner.known_as(sandbox.clone(), &network);
            inner.needs_addresses(&command_id(&known, &network.name), asked)
        };
        let mut inner = self.lock_for_addresses(network.vni, asked, needs).await?;
        let sandbox = inner.known_as(sandbox, &network);
        let id = command_id(&sandbox, &network.name);
        let interface = inner.interface_for(&id, &sandbox);
        let wanted = Wanted {
            id,
            network,
            name: request.name.unwrap_or_else(|| sandbox.name.clone()),
            sandbox,
            maker: Maker::Command,
            aliases: Vec::new(),
            multicast_route: !request.no_multicast_route && is_first(&interface),
            interface,
            mac: None,
            addresses: request.addresses,
            enable_ipv6: request.ipv6,
            default_route: request.default_route,
            masquerade: false,
            allow_macs: request.allow_macs,
        };
        let saved = self.put_in(&mut inner, wanted).await?;
        drop(inner);
        self.wait_known(saved.vni()).await;
        Ok(saved.shown())
    }

    /// Serves `weft detach`, by any name that `attach` or `ps` knows the container by.
    pub(crate) async fn detach(&self, request: DetachRequest) -> Result<Detached, ApiError> {
        let DetachRequest { container, network } = &request;
        let resolved = weft_container::resolve(container, &self.resolve).await.ok();
        self.wait_restored().await;
        let mut inner = self.lock_for_request().await?;
        let Some(saved) = inner.meant(container, resolved.as_ref(), network.as_deref()).cloned()
        else {
            let on = network.as_ref().map(|it| format!(" to network {it}")).unwrap_or_default();
            let text =
                format!("{container} is not attached{on}; weft ps lists attached containers");
            return Err(ApiError::new(ErrorKind::NotFound, text));
        };
        if !saved.maker.is_command() {
            let (maker, remedy) = (saved.maker.name(), saved.maker.remedy());
            let text = format!("{container} was attached by {maker}: {remedy}");
            return Err(ApiError::new(ErrorKind::Conflict, text));
        }
        let id = saved.attachment.id.clone();
        self.end(&mut inner, &id).await?;
        Ok(Detached { id, addresses: saved.attachment.addresses })
    }
}

impl Inner {
    /// The attachment that a user means: by key, namespace or name, on the network given. Without one, that on `weft`
    /// comes first.
    fn meant(
        &self,
        container: &str,
        resolved: Option<&Sandbox>,
        network: Option<&str>,
    ) -> Option<&Saved> {
        let fits = |saved: &&Saved| network.is_none_or(|name| saved.attachment.network == name);
        let named = |is_meant: &dyn Fn(&Saved) -> bool| {
            let mut all = self.saved.values().filter(fits);
            all.find(|saved| saved.attachment.name == container && is_meant(saved))
        };
        let by_key = |key: &str| self.saved.get(key).filter(fits);
        let at = network.unwrap_or(NETWORK);
        let found = resolved.and_then(|sandbox| by_key(&command_id(sandbox, at)));
        let found = found.or_else(|| self.of_namespace(resolved?).find(fits));
        let found = found.or_else(|| by_key(container));
        let found = found.or_else(|| named(&|it| it.maker.is_command() && !it.is_gone()));
        let found = found.or_else(|| named(&|it| it.maker.is_command()));
        found.or_else(|| named(&|_| true))
    }

    /// The interface for an attachment in its container: the one that it has, or the next free one.
    fn interface_for(&self, id: &str, sandbox: &Sandbox) -> String {
        if let Some(known) = self.saved.get(id) {
            return known.attachment.interface.clone();
        }
        // One that is gone may come back.
        let same = |it: &&Saved| it.maker.is_command() && it.sandbox.id == sandbox.id;
        let others = self.saved.values().filter(same).chain(self.of_namespace(sandbox));
        let others: Vec<&str> = others.map(|it| it.attachment.interface.as_str()).collect();
        container_interface(|name| others.contains(&name))
    }
}

/// Whether this is the first interface that Weft makes in a container: its multicast goes there.
fn is_first(interface: &str) -> bool {
    interface == container_interface(|_| false)
}

fn error_kind(error: &ContainerError) -> ErrorKind {
    match error {
        ContainerError::Invalid { .. } | ContainerError::HostNetwork { .. } => {
            ErrorKind::BadRequest
        }
        ContainerError::NotRunning { .. } => ErrorKind::Unavailable,
        _ => ErrorKind::NotFound,
    }
}
