//! Endpoints of Docker's networks: veth pairs that the engine moves into containers and sets up.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::Duration;

use weft_container::docker_plugin::{LinkRequest, ListedNetwork, Listing, NetworkName};
use weft_container::{Sandbox, SandboxKind};
use weft_kernel::engine::SwitchKind;
use weft_kernel::{AttachSpec, KernelError};

use super::error::AttachError;
use super::look;
use super::maker::{Maker, docker_id};
use super::names::{fit_aliases, printable};
use super::wanted::Wanted;
use super::{Attachments, Saved, announce, spec_of};
use crate::core::control::Request;
use crate::devices::bridge_of;
use crate::services::networks::{Networks, OnNetwork};

/// Digits of an endpoint's id in its name, as Docker shows ids.
const SHOWN_DIGITS: usize = 12;
/// The interval between two looks at a pair that the engine sets up.
const UP_POLL: Duration = Duration::from_millis(25);

/// The names of an endpoint's container.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct EndpointNames {
    /// The container's own.
    pub(crate) name: String,
    /// Those of `--network-alias`, and Compose's services.
    pub(crate) aliases: Vec<String>,
}

/// Whether an owner of addresses is of Docker's plugin, which keeps its own record: `docker:`, the plugin's
/// instance and a number. Containers attached by `weft attach` have one colon only.
pub(crate) fn is_plugin_owner(owner: &str) -> bool {
    let rest = owner.strip_prefix("docker:").and_then(|rest| rest.split_once(':'));
    rest.is_some_and(|(instance, number)| {
        instance.len() == 16
            && instance.bytes().all(|byte| byte.is_ascii_hexdigit())
            && number.bytes().all(|byte| byte.is_ascii_digit())
    })
}

impl Attachments {
    /// Makes the pair of an endpoint and announces it. Returns the name of the end for the container, and the MTU
    /// of both ends in bytes. Succeeds if the pair stands already.
    pub(crate) async fn prepare_endpoint(
        &self,
        network: OnNetwork,
        request: LinkRequest,
    ) -> Result<(String, u16), AttachError> {
        self.wait_restored().await;
        let mut inner = self.lock_for_request().await?;
        let LinkRequest { endpoint, mac, addresses, sandbox: key, .. } = request;
        let id = docker_id(&endpoint);
        let before = inner.saved.get(&id).cloned();
        let name: String = endpoint.chars().take(SHOWN_DIGITS).collect();
        let interface = self.derived(&id).handed_interface;
        let wanted = Wanted {
            id: id.clone(),
            network,
            sandbox: in_engine(nowhere(id.clone(), name.clone()), key),
            maker: Maker::Docker { endpoint },
            aliases: Vec::new(),
            name,
            interface: interface.clone(),
            mac: Some(mac),
            addresses: Vec::new(),
            enable_ipv6: false,
            multicast_route: false,
            default_route: false,
            masquerade: false,
            allow_macs: false,
        };
        let saved = self.describe(wanted, addresses, before.as_ref());
        inner.check_apart(&saved)?;
        // Stored first, so that the pair of a daemon that was killed is found again.
        inner.saved.insert(id.clone(), saved.clone());
        let made = match self.saving.save(inner.saved.clone()).await {
            Ok(()) => self.make_pair(&saved).await.map_err(AttachError::from),
            Err(error) => Err(error.into()),
        };
        if let Err(error) = made {
            let is_new = before.is_none();
            match before {
                Some(before) => drop(inner.saved.insert(id, before)),
                None => drop(inner.saved.remove(&id)),
            }
            // Before the kernel, since the caller may leave meanwhile.
            self.save_or_later(&inner);
            // The container of one that is not new may run already.
            if is_new {
                self.take_out(&saved).await;
            }
            return Err(error);
        }
        inner.retries.forget(&id);
        self.tell(Request::Announce { attachment: saved.shown().into() }).await;
        tokio::spawn(announce(self.kernel.clone(), saved.vni(), spec_of(&saved)));
        tracing::info!(endpoint = %saved.attachment.name, "made the interface of a Docker endpoint");
        self.endpoint_made.notify_one();
        drop(inner);
        self.wait_known(saved.vni()).await;
        Ok((interface, saved.attachment.mtu))
    }

    /// Removes an endpoint's pair, wherever the engine has moved its end. Succeeds if there is none.
    pub(crate) async fn remove_endpoint(&self, endpoint: &str) -> Result<(), AttachError> {
        self.wait_restored().await;
        let mut inner = self.lock_for_request().await?;
        let id = docker_id(endpoint);
        if inner.saved.contains_key(&id) {
            return Ok(self.end(&mut inner, &id).await?);
        }
        // A record that was never written leaves a device at most.
        self.kernel.detach(&self.derived(&id).host_interface).await.map(drop).map_err(Into::into)
    }

    /// Waits until an endpoint has got its pair, whose container's name is not known.
    pub(crate) async fn new_endpoint(&self) {
        self.endpoint_made.notified().await;
    }

    /// Gives endpoints the names of their containers, and tells the other hosts.
    pub(crate) async fn name_endpoints(&self, names: &BTreeMap<String, EndpointNames>) {
        let mut inner = self.lock().await;
        let mut told = Vec::new();
        let mut renamed = Vec::new();
        for (id, saved) in &inner.saved {
            let Maker::Docker { endpoint } = &saved.maker else { continue };
            let Some(EndpointNames { name, aliases }) = names.get(endpoint) else { continue };
            let (name, aliases) = (printable(name), fit_aliases(aliases));
            if (&name, &aliases) != (&saved.attachment.name, &saved.attachment.aliases) {
                renamed.push((id.clone(), name, aliases));
            }
        }
        if renamed.is_empty() {
            return;
        }
        for (id, name, aliases) in renamed {
            let Some(saved) = inner.saved.get_mut(&id) else { continue };
            (saved.attachment.name, saved.attachment.aliases) = (name, aliases);
            if saved.is_attached() {
                told.push(saved.shown());
            }
        }
        self.save_or_later(&inner);
        for attachment in told {
            self.tell(Request::Announce { attachment: attachment.into() }).await;
        }
    }

    /// Waits until the engine has raised an endpoint's interface in the container, which it does last, or the pair is
    /// gone again.
    pub(crate) async fn wait_endpoint_up(&self, endpoint: &str) {
        let interface = self.derived(&docker_id(endpoint)).host_interface;
        // Unlike a request for the device, this waits for no lock of the kernel's.
        let file = format!("/sys/class/net/{interface}/operstate");
        let mut was_there = false;
        loop {
            match std::fs::read_to_string(&file) {
                Ok(state) if state.trim() == "up" => return,
                Ok(_) => was_there = true,
                Err(_) if was_there => return,
                Err(_) => {}
            }
            tokio::time::sleep(UP_POLL).await;
        }
    }

    /// Facts about an endpoint's pair, by name, for people. They wait for no attachment under way.
    pub(crate) fn endpoint_facts(&self, endpoint: &str) -> Option<BTreeMap<String, String>> {
        let id = docker_id(endpoint);
        let shown = self.shown.borrow();
        let attachment = shown.iter().find(|attachment| attachment.id == id)?;
        let facts = [
            ("weft.host-interface", self.derived(&id).host_interface),
            ("weft.mac", attachment.mac.clone()),
            ("weft.mtu", attachment.mtu.to_string()),
            ("weft.state", attachment.state.clone()),
        ];
        Some(facts.into_iter().map(|(name, value)| (name.to_owned(), value)).collect())
    }

    /// The endpoints that have a pair, by Docker's ids.
    async fn endpoints(&self) -> BTreeSet<String> {
        let Ok(inner) = self.lock_for_request().await else { return BTreeSet::new() };
        let endpoint = |saved: &Saved| match &saved.maker {
            Maker::Docker { endpoint } if saved.is_attached() => Some(endpoint.clone()),
            _ => None,
        };
        inner.saved.values().filter_map(endpoint).collect()
    }

    /// The lists of Docker and of this host, to be compared.
    pub(crate) async fn docker_listing(
        &self,
        networks: Option<BTreeMap<String, ListedNetwork>>,
        all: &Networks,
    ) -> Listing {
        let held = self.allocations().await.into_iter();
        let held = held.filter(|held| is_plugin_owner(&held.owner));
        // That of a network that has just ended goes with it.
        let owners = held.filter_map(|held| Some((all.name_of(held.vni)?, held.owner)));
        Listing {
            networks,
            links: self.endpoints().await,
            owners: owners
                .filter_map(|(name, owner)| Some((name.parse::<NetworkName>().ok()?, owner)))
                .collect(),
        }
    }

    async fn make_pair(&self, saved: &Saved) -> Result<(), KernelError> {
        let mut spec = spec_of(saved);
        let is_bridge = self.engine.switch() == SwitchKind::Bridge;
        spec.bridge = is_bridge.then(|| bridge_of(saved.vni()));
        self.locks.set(saved).await;
        self.kernel.prepare_pair(&spec).await?;
        self.engine.add_port(saved.vni(), &saved.host_interface).await?;
        self.shortcuts.plugged_in();
        Ok(())
    }

    /// Plugs the host's end of an endpoint's pair back in.
    ///
    /// # Errors
    /// [`KernelError::LinkMissing`] if the pair is gone.
    pub(super) async fn plug_in_endpoint(
        &self,
        saved: &Saved,
        spec: &AttachSpec,
    ) -> Result<(), KernelError> {
        self.kernel.restore_host_end(spec).await?;
        self.engine.add_port(saved.vni(), &saved.host_interface).await?;
        self.shortcuts.plugged_in();
        Ok(())
    }
}

/// The same where Docker's engine has a name for the namespace. That may be a file which this process sees.
fn in_engine(sandbox: Sandbox, key: String) -> Sandbox {
    if key.is_empty() {
        return sandbox;
    }
    let (device, inode) = look::identify(Path::new(&key)).unwrap_or_default();
    Sandbox { device, inode, engine_key: Some(key), ..sandbox }
}

/// The place of an attachment without a namespace that Weft looks into.
pub(super) fn nowhere(id: String, name: String) -> Sandbox {
    Sandbox {
        id,
        name,
        namespace: PathBuf::new(),
        kind: SandboxKind::Path,
        pid: None,
        pid_start: None,
        device: 0,
        inode: 0,
        engine_key: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owners_of_the_plugin_are_told_from_containers_of_docker() {
        let container = format!("docker:{}", "a".repeat(64));
        for (owner, is_plugins) in [
            ("docker:00000000000000ff:17", true),
            (container.as_str(), false),
            ("docker:web", false),
            ("docker:00000000000000ff:", true),
            ("docker:ff:17", false),
            ("netns:docker:00000000000000ff:17", false),
        ] {
            assert_eq!(is_plugin_owner(owner), is_plugins, "{owner}");
        }
    }
}
