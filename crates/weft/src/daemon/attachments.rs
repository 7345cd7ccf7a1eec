//! Attach and detach: from what the user named to an interface with addresses, and back; kept over
//! restarts of the daemon.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use tokio::sync::{Mutex, mpsc, oneshot};
use weft_container::{ContainerError, ResolveOptions, Sandbox};
use weft_crypto::PeerId;
use weft_engine::PortTraffic;
use weft_kernel::engine::{KernelEngine, SwitchKind};
use weft_kernel::{AttachSpec, Kernel, KernelError};

use super::control::Request;
use super::ports::{self, DirectPorts, PortKind};
use super::shortcuts::Shortcuts;
use super::start::{SWITCH, TAP};
use super::store::{Store, StoreError};
use crate::api::{
    ApiError, AttachRequest, Attachment, ContainerTraffic, Detached, ErrorKind, Volume,
};
use crate::timestamp;

/// All attachments of this host. One attach or detach runs at a time.
pub(super) struct Attachments {
    inner: Mutex<Inner>,
    kernel: Kernel,
    engine: KernelEngine,
    control: mpsc::Sender<Request>,
    ports: DirectPorts,
    shortcuts: Shortcuts,
    store: Store,
    resolve: ResolveOptions,
    local: PeerId,
    mtu: u16,
}

struct Inner {
    saved: BTreeMap<String, Saved>,
}

/// One attachment as it stands in the state directory.
#[derive(Clone, Serialize, Deserialize)]
struct Saved {
    sandbox: Sandbox,
    attachment: Attachment,
    host_interface: String,
    multicast_route: bool,
}

/// The attachments that the daemon before has saved.
pub(super) struct SavedAttachments {
    store: Store,
    saved: BTreeMap<String, Saved>,
}

impl SavedAttachments {
    pub(super) fn load(store: &Store) -> Result<Self, StoreError> {
        let saved = store.load(FILE)?.unwrap_or_default();
        Ok(Self { store: store.clone(), saved })
    }
}

impl Attachments {
    /// Those that were saved; nothing is restored yet.
    pub(super) fn new(
        saved: SavedAttachments,
        kernel: Kernel,
        engine: KernelEngine,
        control: mpsc::Sender<Request>,
        (ports, shortcuts): (DirectPorts, Shortcuts),
        local: PeerId,
        mtu: u16,
    ) -> Self {
        let SavedAttachments { store, saved } = saved;
        let resolve = ResolveOptions::default();
        let inner = Mutex::new(Inner { saved });
        Self { inner, kernel, engine, control, ports, shortcuts, store, resolve, local, mtu }
    }

    /// Plugs every saved container that still lives back in, and gives the addresses of the others back.
    pub(super) async fn restore(&self) {
        let mut inner = self.inner.lock().await;
        for (id, mut saved) in inner.saved.clone() {
            let restored = match weft_container::is_alive(&saved.sandbox) {
                true => self.plug_in(&mut saved).await.map_err(|error| error.to_string()),
                false => Err("its network namespace is gone".into()),
            };
            match restored {
                Ok(()) => {
                    tracing::info!(container = %saved.attachment.name, "attachment restored");
                    self.tell(Request::Announce { attachment: saved.attachment.clone() }).await;
                    inner.saved.insert(id, saved);
                }
                Err(reason) => {
                    tracing::info!(container = %saved.attachment.name, reason, "attachment dropped");
                    inner.saved.remove(&id);
                    self.unplug(&id, &saved).await;
                }
            }
        }
        self.ports.all_restored();
        if let Err(error) = self.save(&inner) {
            tracing::error!(error = %error.error, "attachments not saved");
        }
        self.tell(Request::KeepOnly { owners: inner.saved.keys().cloned().collect() }).await;
    }

    /// Plugs every container back in whose switch was taken away and made again.
    pub(super) async fn plug_in_all(&self) {
        let mut inner = self.inner.lock().await;
        for saved in inner.saved.values_mut() {
            if let Err(error) = self.plug_in(saved).await {
                let container = &saved.attachment.name;
                tracing::warn!(container, %error, "container not plugged in again");
            }
        }
    }

    /// The daemon stops: what is attached stays so.
    pub(super) fn rest(&self) {
        self.ports.rest();
    }

    /// `weft ps`.
    pub(super) async fn list(&self) -> Vec<Attachment> {
        let inner = self.inner.lock().await;
        inner.saved.values().map(|saved| saved.attachment.clone()).collect()
    }

    /// What crossed each container's interface, without those that are gone, and what the kernel dropped
    /// on its way from the switch to the vector engine.
    pub(super) async fn traffic(&self) -> Result<(Vec<ContainerTraffic>, u64), ApiError> {
        let links = self.kernel.link_traffic().await.map_err(kernel_refusal)?;
        let direct = self.ports.traffic();
        let saved: Vec<Saved> = self.inner.lock().await.saved.values().cloned().collect();
        let mut all = Vec::with_capacity(saved.len());
        for Saved { sandbox, attachment, host_interface, .. } in saved {
            let Some(link) = links.get(&host_interface) else { continue };
            let (direct, dropped) = match direct.get(&mac_of(&attachment)) {
                None => (PortTraffic::default(), 0),
                Some(direct) => (*direct, self.dropped_inside(&sandbox).await),
            };
            all.push(ContainerTraffic {
                id: attachment.id,
                name: attachment.name,
                host_interface,
                // The host's end receives what the container sends.
                volume: Volume {
                    packets_received: link.packets_sent + direct.received.packets,
                    bytes_received: link.bytes_sent + direct.received.bytes,
                    packets_sent: link.packets_received + direct.sent.packets,
                    bytes_sent: link.bytes_received + direct.sent.bytes,
                },
                dropped: link.dropped_received + link.dropped_sent + dropped,
            });
        }
        Ok((all, links.get(TAP).map_or(0, |tap| tap.dropped_sent)))
    }

    /// What the kernel dropped at a direct port, whose device is the container's: most of all what
    /// the container sent while the engine's queue was full.
    async fn dropped_inside(&self, sandbox: &Sandbox) -> u64 {
        let links = self.kernel.link_traffic_in(&sandbox.namespace).await;
        // A container that ends has nothing more to tell.
        let link = links.ok().and_then(|links| links.get(INTERFACE).copied()).unwrap_or_default();
        link.dropped_received + link.dropped_sent
    }

    /// `weft attach`. Attaching again adds explicit addresses, or changes nothing.
    pub(super) async fn attach(&self, request: AttachRequest) -> Result<Attachment, ApiError> {
        let sandbox = weft_container::resolve(&request.container, &self.resolve)
            .await
            .map_err(|error| ApiError::new(error_kind(&error), error))?;
        let mut inner = self.inner.lock().await;
        let id = sandbox.id.clone();
        let before = inner.saved.get(&id).cloned();
        let addresses = self.addresses(&id, &request.addresses, before.as_ref()).await?;
        let mut saved = self.describe(sandbox, addresses, &request, before.as_ref());
        if let Err(error) = self.plug_in(&mut saved).await {
            if before.is_none() {
                self.unplug(&id, &saved).await;
            }
            return Err(kernel_refusal(error));
        }
        inner.saved.insert(id, saved.clone());
        self.save(&inner)?;
        self.tell(Request::Announce { attachment: saved.attachment.clone() }).await;
        tokio::spawn(announce(self.kernel.clone(), spec_of(&saved)));
        tracing::info!(container = %saved.attachment.name, id = %saved.attachment.id, "attached");
        Ok(saved.attachment)
    }

    /// `weft detach`, by whatever name `attach` or `ps` knows the container.
    pub(super) async fn detach(&self, container: &str) -> Result<Detached, ApiError> {
        let resolved = weft_container::resolve(container, &self.resolve).await.ok();
        let mut inner = self.inner.lock().await;
        let by_name = |saved: &&Saved| {
            resolved.as_ref().is_some_and(|sandbox| sandbox.id == saved.attachment.id)
                || saved.attachment.id == container
                || saved.attachment.name == container
        };
        let Some(saved) = inner.saved.values().find(by_name).cloned() else {
            let text = format!("{container} is not attached; weft ps lists what is");
            return Err(ApiError::new(ErrorKind::NotFound, text));
        };
        let id = saved.attachment.id.clone();
        inner.saved.remove(&id);
        self.save(&inner)?;
        self.unplug(&id, &saved).await;
        tracing::info!(container = %saved.attachment.name, id, "detached");
        Ok(Detached { id, addresses: saved.attachment.addresses })
    }

    /// A host-side interface is gone: if its container is gone too, its addresses come back.
    pub(super) async fn interface_removed(&self, interface: &str) {
        let mut inner = self.inner.lock().await;
        let gone = inner.saved.iter().find(|(_, saved)| {
            saved.host_interface == interface && !weft_container::is_alive(&saved.sandbox)
        });
        let Some((id, saved)) = gone.map(|(id, saved)| (id.clone(), saved.clone())) else { return };
        inner.saved.remove(&id);
        if let Err(error) = self.save(&inner) {
            tracing::error!(error = %error.error, "attachments not saved");
        }
        self.unplug(&id, &saved).await;
        tracing::info!(container = %saved.attachment.name, id, "container ended, detached");
    }

    /// Addresses for a container that is attached first, or gets more.
    async fn addresses(
        &self,
        id: &str,
        request: &[IpNet],
        before: Option<&Saved>,
    ) -> Result<Vec<IpNet>, ApiError> {
        let mut addresses = before.map(|b| b.attachment.addresses.clone()).unwrap_or_default();
        if request.is_empty() && addresses.is_empty() {
            return self.ask_for_addresses(id, None).await;
        }
        for explicit in request {
            if addresses.contains(explicit) {
                continue;
            }
            match self.ask_for_addresses(id, Some(*explicit)).await {
                Ok(given) => addresses.extend(given),
                Err(error) => {
                    if before.is_none() {
                        self.tell(Request::Release { owner: id.into() }).await;
                    }
                    return Err(error);
                }
            }
        }
        Ok(addresses)
    }

    async fn ask_for_addresses(
        &self,
        id: &str,
        explicit: Option<IpNet>,
    ) -> Result<Vec<IpNet>, ApiError> {
        let (reply, answer) = oneshot::channel();
        self.tell(Request::Addresses { owner: id.into(), explicit, reply }).await;
        answer.await.unwrap_or_else(|_| {
            Err(ApiError::new(ErrorKind::Unavailable, "weft is stopping; launch it again"))
        })
    }

    fn describe(
        &self,
        sandbox: Sandbox,
        addresses: Vec<IpNet>,
        request: &AttachRequest,
        before: Option<&Saved>,
    ) -> Saved {
        let digest = weft_crypto::fingerprint(&[self.local.as_bytes(), sandbox.id.as_bytes()]);
        let [a, b, c, d, e, ..] = digest;
        // Locally administered, unicast (IEEE 802).
        let mac = weft_path::Mac([0x02, a, b, c, d, e]);
        let since = before.map_or_else(
            || timestamp::format(SystemTime::now()),
            |before| before.attachment.since.clone(),
        );
        let attachment = Attachment {
            id: sandbox.id.clone(),
            name: request.name.clone().unwrap_or_else(|| sandbox.name.clone()),
            interface: INTERFACE.into(),
            mac: mac.to_string(),
            addresses,
            mtu: before.map_or(self.mtu, |before| before.attachment.mtu),
            port: PortKind::Bridge.name().into(),
            port_reason: None,
            since,
        };
        let host_interface = format!("{HOST_INTERFACE}{a:02x}{b:02x}{c:02x}{d:02x}{e:02x}");
        let multicast_route = !request.no_multicast_route;
        Saved { sandbox, attachment, host_interface, multicast_route }
    }

    /// A container that cannot have a direct port gets one of the switch.
    async fn plug_in(&self, saved: &mut Saved) -> Result<(), KernelError> {
        let mut spec = spec_of(saved);
        let is_bridge = self.engine.switch() == SwitchKind::Bridge;
        spec.bridge = is_bridge.then(|| SWITCH.into());
        let support = self.engine.support().borrow().clone();
        let (mut kind, mut reason) = self.ports.kind_of(&self.kernel, &spec, &support).await;
        if kind == PortKind::Direct
            && let Err(error) = self.ports.plug_in(&self.kernel, &spec).await
        {
            if !matches!(error, KernelError::NoDirectPort { .. }) {
                return Err(error);
            }
            tracing::warn!(container = saved.attachment.name, %error, "it gets a port of the switch");
            (kind, reason) = (PortKind::Bridge, Some(error.to_string()));
        }
        if kind == PortKind::Bridge {
            self.ports.let_go(mac_of(&saved.attachment));
            self.kernel.attach(&spec).await?;
        }
        saved.attachment.port_reason = reason;
        saved.attachment.port = kind.name().into();
        self.engine.add_port(&saved.host_interface).await?;
        match kind {
            PortKind::Bridge => self.shortcuts.plugged_in(),
            PortKind::Direct => self.shortcuts.close(&saved.host_interface),
        }
        Ok(())
    }

    /// Gives each container with a port of the bridge a shortcut, where it may have one.
    ///
    /// # Errors
    /// The kernel does not say what the bridge is like; then no container has one.
    pub(super) async fn keep_shortcuts(&self) -> Result<(), KernelError> {
        let is_bridge = |saved: &&Saved| saved.attachment.port == PortKind::Bridge.name();
        if !self.inner.lock().await.saved.values().any(|saved| is_bridge(&saved)) {
            return Ok(());
        }
        let seen = self.kernel.bridge_ports(SWITCH, TAP).await;
        // Nothing is plugged in or out meanwhile.
        let inner = self.inner.lock().await;
        let specs: Vec<_> = inner.saved.values().filter(is_bridge).map(spec_of).collect();
        let known = seen.as_ref().map_err(ToString::to_string);
        self.shortcuts.apply(&self.kernel, &specs, &known.cloned());
        seen.map(drop)
    }

    /// The ways past the bridge.
    pub(super) const fn shortcuts(&self) -> &Shortcuts {
        &self.shortcuts
    }

    /// Finds out what direct ports pass by.
    pub(super) async fn look_at_bypass(&self) {
        if !self.ports.possible() || self.engine.switch() != SwitchKind::Bridge {
            return;
        }
        let is_direct = |saved: &&Saved| saved.attachment.port == PortKind::Direct.name();
        let named = |saved: &Saved| (saved.attachment.name.clone(), spec_of(saved));
        let direct: Vec<_> =
            self.inner.lock().await.saved.values().filter(is_direct).map(named).collect();
        match self.ports.bypass().look(&self.kernel).await {
            Ok(seen) => self.ports.bypass().say(super::bypass::passed_by(&seen, &direct)),
            Err(error) => tracing::debug!(%error, "what direct ports pass by is not known"),
        }
    }

    /// What does not see frames of direct ports, line by line.
    pub(super) fn passed_by(&self) -> Vec<String> {
        self.ports.bypass().said()
    }

    /// What a container attached now gets, and why not a direct port.
    pub(super) fn port_kind(&self) -> (PortKind, Option<String>) {
        self.ports.kind(&self.engine.support().borrow())
    }

    /// Takes the interface away and gives the addresses back; what is gone already is no error.
    async fn unplug(&self, id: &str, saved: &Saved) {
        if let Ok(mac) = saved.attachment.mac.parse() {
            self.tell(Request::Withdraw { mac }).await;
        }
        self.shortcuts.close(&saved.host_interface);
        self.engine.remove_port(&saved.host_interface).await;
        self.ports.unplug(&self.kernel, &spec_of(saved)).await;
        if let Err(error) = self.kernel.detach(&saved.host_interface).await {
            tracing::warn!(%error, interface = saved.host_interface, "interface not removed");
        }
        self.tell(Request::Release { owner: id.into() }).await;
    }

    fn save(&self, inner: &Inner) -> Result<(), ApiError> {
        self.store
            .save(FILE, &inner.saved)
            .map_err(|error| ApiError::new(ErrorKind::Internal, error))
    }

    async fn tell(&self, request: Request) {
        // The control loop ends only when the daemon stops; then nobody needs to know.
        let _ = self.control.send(request).await;
    }
}

/// Removes the devices of direct ports from all containers that a daemon has left attached.
pub(super) async fn remove_direct_ports(store: &Store, kernel: &Kernel) -> Result<(), StoreError> {
    let saved: BTreeMap<String, Saved> = store.load(FILE)?.unwrap_or_default();
    for saved in saved.values() {
        ports::remove_device(kernel, &spec_of(saved)).await;
    }
    Ok(())
}

/// Tells the network whose a container's addresses are now, again for the case that a path is only just coming up.
async fn announce(kernel: Kernel, spec: AttachSpec) {
    for pause in ANNOUNCE_AFTER_MS {
        tokio::time::sleep(Duration::from_millis(pause)).await;
        if let Err(error) = kernel.announce(&spec) {
            tracing::debug!(%error, container = spec.id, "addresses not announced");
            return;
        }
    }
}

/// The pauses before each announcement of an attached container's addresses, in milliseconds.
const ANNOUNCE_AFTER_MS: [u64; 5] = [0, 250, 750, 2_000, 5_000];

/// What the container is to have, but for the switch.
fn spec_of(saved: &Saved) -> AttachSpec {
    let Attachment { id, interface, addresses, mtu, .. } = &saved.attachment;
    AttachSpec {
        id: id.clone(),
        namespace: saved.sandbox.namespace.clone(),
        host_name: saved.host_interface.clone(),
        name: interface.clone(),
        mac: mac_of(&saved.attachment).0,
        addresses: addresses.clone(),
        mtu: u32::from(*mtu),
        gso_max_segs: Some(super::start::run_segments(*mtu)),
        multicast_route: saved.multicast_route,
        bridge: None,
    }
}

fn mac_of(attachment: &Attachment) -> weft_path::Mac {
    attachment.mac.parse().unwrap_or(weft_path::Mac([0x02, 0, 0, 0, 0, 1]))
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

fn kernel_refusal(error: KernelError) -> ApiError {
    ApiError::new(ErrorKind::Internal, error)
}

const FILE: &str = "attachments.json";
/// The interface inside a container.
const INTERFACE: &str = "weft0";
/// Prefix of the interface outside it.
pub(super) const HOST_INTERFACE: &str = "weftv";
