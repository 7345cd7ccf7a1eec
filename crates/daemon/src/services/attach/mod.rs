//! Attach and detach: from the user's name for a container to an interface with addresses, and back.
//! Attachments survive restarts of the daemon.

mod addresses;
pub(crate) mod bypass;
mod changes;
mod cni;
mod command;
pub(crate) mod condition;
mod docker;
pub(crate) mod endpoints;
mod error;
pub(crate) mod expose;
pub(crate) mod kept;
mod kept_ports;
pub(crate) mod learned;
mod look;
pub(crate) mod loops;
mod maker;
pub(crate) mod mend;
mod names;
pub(crate) mod port_locks;
pub(crate) mod ports;
pub(crate) mod saving;
pub(crate) mod shortcuts;
mod sources;
mod traffic;
mod wanted;
pub(crate) mod way_out;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tokio::sync::{MutexGuard, Notify, mpsc, oneshot, watch};
use weft_api::{ApiError, Attachment, ErrorKind};
use weft_container::{ResolveOptions, Sandbox};
use weft_crypto::PeerId;
use weft_kernel::engine::{KernelEngine, SwitchKind};
use weft_kernel::{AttachSpec, Kernel, KernelError};
use weft_path::Vni;

pub(crate) use self::addresses::CLIENT_OWNER;
use self::changes::Changes;
use self::condition::Condition;
pub(crate) use self::error::AttachError;
use self::kept::Retries;
pub(crate) use self::maker::EXPOSE;
use self::maker::Maker;
use self::names::printable;
use self::port_locks::Locks;
use self::ports::{DirectPorts, PortKind};
use self::saving::Saving;
use self::shortcuts::Shortcuts;
use crate::config::Settings;
use crate::core::control::Request;
use crate::devices::{SWITCH, TAP, bridge_of, is_exposed, run_segments};
use crate::services::networks::{Networks, OnNetwork};
use crate::services::supervisor;
use crate::upkeep::records::Records;
use crate::upkeep::store::{Store, StoreError, make_private_dir};

/// All attachments of this host. One attach or detach runs at a time.
pub(crate) struct Attachments {
    inner: Changes<Inner>,
    /// The list that `weft ps` shows while the kernel delays an attach.
    shown: watch::Sender<Arc<Vec<Attachment>>>,
    /// Whether the containers of the last run are attached again, as far as possible.
    restored: watch::Sender<bool>,
    pub(crate) kernel: Kernel,
    pub(crate) engine: KernelEngine,
    control: mpsc::Sender<Request>,
    pub(crate) ports: DirectPorts,
    pub(crate) shortcuts: Shortcuts,
    locks: Locks,
    saving: Saving<BTreeMap<String, Saved>>,
    /// A pair was made for an endpoint of Docker's.
    endpoint_made: Notify,
    pub(crate) resolve: ResolveOptions,
    /// This host's name for people.
    nickname: String,
    /// The domain of containers' names.
    domain: String,
    local: PeerId,
    networks: Arc<Networks>,
}

pub(crate) struct Inner {
    pub(crate) saved: BTreeMap<String, Saved>,
    pub(crate) retries: Retries,
}

/// All attachments, locked for one change. The published list is updated on drop.
pub(super) struct Locked<'a> {
    inner: MutexGuard<'a, Inner>,
    shown: &'a watch::Sender<Arc<Vec<Attachment>>>,
    changed: bool,
}

impl Deref for Locked<'_> {
    type Target = Inner;

    fn deref(&self) -> &Inner {
        &self.inner
    }
}

impl DerefMut for Locked<'_> {
    fn deref_mut(&mut self) -> &mut Inner {
        self.changed = true;
        &mut self.inner
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        if self.changed {
            self.shown
                .send_replace(Arc::new(self.inner.saved.values().map(Saved::shown).collect()));
        }
    }
}

/// How long `weft ps` waits for a change under way.
const LIST_PATIENCE: Duration = Duration::from_millis(20);
/// How long it waits at the start for the containers of the last run.
const START_PATIENCE: Duration = Duration::from_secs(5);
/// How long a stop waits for a change under way.
const CLOSE_LIMIT: Duration = Duration::from_secs(5);

/// One attachment as stored in the state directory.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct Saved {
    pub(crate) sandbox: Sandbox,
    pub(crate) attachment: Attachment,
    pub(crate) host_interface: String,
    multicast_route: bool,
    /// Its network's ports reach no other port of this host.
    #[serde(default)]
    isolated: bool,
    #[serde(default)]
    pub(crate) condition: Condition,
    #[serde(default)]
    maker: Maker,
}

impl Saved {
    /// Its network.
    pub(crate) fn vni(&self) -> Vni {
        Vni(self.attachment.vni)
    }
}

/// The attachments that the previous daemon saved.
pub(crate) struct SavedAttachments {
    records: Records,
    saved: BTreeMap<String, Saved>,
    resolve: ResolveOptions,
    nickname: String,
    domain: String,
}

impl SavedAttachments {
    pub(crate) fn load(settings: &Settings, store: &Store) -> Result<Self, StoreError> {
        let (records, mut saved) = Records::load::<Saved>(store, DIRECTORY, EARLIER_FILE)?;
        for saved in saved.values_mut() {
            // Earlier versions did not check names.
            saved.attachment.name = printable(&saved.attachment.name);
        }
        let resolve = look::options(settings.docker_socket.clone());
        let (nickname, domain) = (settings.nickname.clone(), settings.dns_domain.clone());
        Ok(Self { records, saved, resolve, nickname, domain })
    }
}

/// Makes the directory of attachments, which the daemon may not once it is restricted. [`SavedAttachments::load`]
/// reports a failure.
pub(crate) fn prepare(settings: &Settings) {
    if let Err(error) = make_private_dir(&settings.state_dir.join(DIRECTORY)) {
        tracing::debug!(%error, "cannot make the directory of attachments");
    }
}

impl Attachments {
    /// Takes the saved attachments; restores nothing yet.
    pub(crate) fn new(
        saved: SavedAttachments,
        kernel: Kernel,
        engine: KernelEngine,
        control: mpsc::Sender<Request>,
        (ports, shortcuts): (DirectPorts, Shortcuts),
        networks: Arc<Networks>,
        local: PeerId,
    ) -> Self {
        let SavedAttachments { records, saved, resolve, nickname, domain } = saved;
        let (shown, _) = watch::channel(Arc::new(saved.values().map(Saved::shown).collect()));
        let locks = Locks::new(&kernel, &engine, saved.values());
        let inner = Changes::new(Inner { saved, retries: Retries::default() });
        let (restored, _) = watch::channel(false);
        Self {
            inner,
            shown,
            restored,
            kernel,
            engine,
            control,
            ports,
            shortcuts,
            locks,
            saving: Saving::on(records),
            endpoint_made: Notify::new(),
            resolve,
            nickname,
            domain,
            local,
            networks,
        }
    }

    /// Plugs every saved container that is still alive back in; keeps the addresses of the others for a while. Those of
    /// Docker's that have another namespace now are looked for right after that.
    pub(crate) async fn restore(&self) {
        let elsewhere = |it: &Attachment| it.vni != Vni::WEFT.0;
        if self.shown.borrow().iter().any(elsewhere) {
            self.networks.settled().await;
        }
        let Some(mut inner) = self.begin().await else { return };
        for (id, mut saved) in inner.saved.clone() {
            if self.inner.is_closed() {
                // The next daemon goes on.
                return;
            }
            // A container restarted meanwhile has another namespace under the same key.
            let mut is_new = !saved.is_attached();
            if !saved.is_alive()
                && saved.is_sought_at_start()
                && let Ok(found) = weft_container::resolve(&saved.sandbox.id, &self.resolve).await
                && found.id == saved.sandbox.id
            {
                saved.found_again(found);
                is_new = true;
            }
            if !saved.is_alive() {
                tracing::info!(container = %saved.attachment.name, "its network namespace is gone");
                self.keep(&mut inner, &id).await;
                if inner.saved.contains_key(&id) && !saved.is_sought_at_start() {
                    inner.retries.at_once(&id, Instant::now());
                }
                continue;
            }
            match is_new {
                true => self.plug_in_apart(&inner, &mut saved).await,
                false => self.plug_in_or_say(&mut saved).await,
            }
            if saved.is_attached() {
                tracing::info!(container = %saved.attachment.name, "attachment restored");
            }
            inner.saved.insert(id, saved);
        }
        self.ports.all_restored();
        self.end_lost_exposure(&inner).await;
        self.save_or_later(&inner);
        let mut owners: BTreeSet<String> = inner.saved.keys().cloned().collect();
        // The plugin's reconciliation releases those that no engine has; OpenVPN clients keep theirs while away.
        let held = self.allocations().await.into_iter().map(|held| held.owner);
        let is_kept =
            |owner: &String| endpoints::is_plugin_owner(owner) || owner.starts_with(CLIENT_OWNER);
        owners.extend(held.filter(is_kept));
        self.tell(Request::KeepOnly { owners }).await;
    }

    /// Plugs every container back in after its switch was removed and created again.
    pub(crate) async fn plug_in_all(&self) {
        self.plug_in_where(|_| true).await;
    }

    /// The same for the containers of one network.
    pub(crate) async fn plug_in_on(&self, vni: Vni) {
        self.plug_in_where(|saved| saved.vni() == vni).await;
    }

    async fn plug_in_where(&self, is_meant: impl Fn(&Saved) -> bool) {
        let mut inner = self.lock().await;
        for (id, mut saved) in inner.saved.clone() {
            if saved.is_gone() || !is_meant(&saved) {
                continue;
            }
            if self.inner.is_closed() {
                return;
            }
            match saved.is_attached() {
                true => self.plug_in_or_say(&mut saved).await,
                false => self.plug_in_apart(&inner, &mut saved).await,
            }
            inner.saved.insert(id, saved);
        }
    }

    /// The daemon stops: waits for the change under way, and lets no other begin. A change whose engine stops
    /// before it is complete would leave its container without an interface.
    pub(crate) async fn close(&self) {
        if !self.inner.close(CLOSE_LIMIT).await {
            let limit_s = CLOSE_LIMIT.as_secs();
            tracing::warn!(limit_s, "weft stops although a container is still being attached");
        }
    }

    /// The daemon has stopped: attached containers stay attached. Waits for the disk, but not for long.
    pub(crate) async fn rest(&self) {
        self.ports.rest();
        let limit = Duration::from_millis(SAVE_LIMIT_MS);
        if tokio::time::timeout(limit, self.saving.settle()).await.is_err() {
            tracing::error!("the disk is slow: the last changes of attachments may not be saved");
        }
    }

    /// This host.
    pub(crate) const fn local(&self) -> PeerId {
        self.local
    }

    /// `weft ps`.
    pub(crate) async fn list(&self) -> Vec<Attachment> {
        let _ = tokio::time::timeout(START_PATIENCE, self.wait_restored()).await;
        // Includes a change under way if it completes soon.
        let _ = tokio::time::timeout(LIST_PATIENCE, self.inner.settled()).await;
        self.shown.borrow().to_vec()
    }

    /// What `weft ps` shows, each time that it has changed.
    pub(crate) fn shown(&self) -> watch::Receiver<Arc<Vec<Attachment>>> {
        self.shown.subscribe()
    }

    /// The containers of the last run are attached again, as far as they can be.
    pub(crate) fn set_restored(&self) {
        self.restored.send_replace(true);
    }

    /// Whether that is so.
    pub(crate) fn is_restored(&self) -> bool {
        *self.restored.borrow()
    }

    /// A network that a container is about to be attached to: see [`Networks::join`].
    pub(crate) async fn network(&self, name: Option<&str>) -> Result<OnNetwork, ApiError> {
        self.networks.join(name).await
    }

    pub(crate) async fn wait_restored(&self) {
        let _ = self.restored.subscribe().wait_for(|restored| *restored).await;
    }

    /// Locks the attachments: one attach, detach or change at a time; `None` once the daemon stops.
    async fn begin(&self) -> Option<Locked<'_>> {
        let inner = supervisor::wait(self.inner.begin()).await?;
        Some(Locked { inner, shown: &self.shown, changed: false })
    }

    /// Locks the attachments for a service, which waits for its end once the daemon stops.
    pub(super) async fn lock(&self) -> Locked<'_> {
        match self.begin().await {
            Some(locked) => locked,
            None => supervisor::wait(std::future::pending()).await,
        }
    }

    /// Locks the attachments for a request.
    ///
    /// # Errors
    /// The daemon stops.
    async fn lock_for_request(&self) -> Result<Locked<'_>, ApiError> {
        self.begin().await.ok_or_else(is_stopping)
    }

    /// Ends an attachment. It stays attached until that is written, also if the caller leaves meanwhile.
    ///
    /// # Errors
    /// The disk; nothing has changed.
    async fn end(&self, inner: &mut Inner, id: &str) -> Result<(), ApiError> {
        let mut after = inner.saved.clone();
        let Some(saved) = after.remove(id) else { return Ok(()) };
        self.saving.save(after).await?;
        inner.saved.remove(id);
        inner.retries.forget(id);
        self.unplug(id, &saved).await;
        tracing::info!(container = %saved.attachment.name, id, by = saved.maker.name(), "detached");
        Ok(())
    }

    /// A host-side interface is gone. If its container is gone too, the container's addresses are kept for a
    /// while.
    pub(crate) async fn interface_removed(&self, interface: &str) {
        let mut inner = self.lock().await;
        let gone = inner
            .saved
            .iter()
            .find(|(_, saved)| saved.host_interface == interface && saved.is_attached());
        let Some((id, saved)) = gone.map(|(id, saved)| (id.clone(), saved.clone())) else { return };
        let has_ended = match saved.maker.is_docker() {
            true => matches!(self.kernel.mac_of(interface).await, Ok(None)),
            false => !saved.is_alive(),
        };
        if !has_ended {
            return;
        }
        self.keep(&mut inner, &id).await;
        self.save_or_later(&inner);
        let kept = inner.saved.contains_key(&id);
        tracing::info!(container = %saved.attachment.name, id, kept, "container ended");
    }

    /// Plugs a container in. It gets a port of the switch if it cannot have a direct port.
    pub(crate) async fn plug_in(&self, saved: &mut Saved) -> Result<(), KernelError> {
        let mut spec = spec_of(saved);
        let is_bridge = self.engine.switch() == SwitchKind::Bridge;
        spec.bridge = is_bridge.then(|| bridge_of(saved.vni()));
        // Its first frame finds the lock closed.
        self.locks.set(saved).await;
        match saved.maker {
            Maker::Docker { .. } => return self.plug_in_endpoint(saved, &spec).await,
            Maker::Host => return self.plug_in_host(saved, &spec).await,
            Maker::Command | Maker::Cni { .. } => {}
        }
        let support = self.engine.support().borrow().clone();
        let (mut kind, mut reason) = match saved.maker {
            _ if saved.vni() != Vni::WEFT => (PortKind::Bridge, Some(OTHER_NETWORK.to_owned())),
            _ if saved.attachment.allow_macs => (PortKind::Bridge, Some(SWITCH_LEARNS.to_owned())),
            Maker::Command => self.ports.kind_of(&self.kernel, &spec, &support).await,
            // Plugins chained behind Weft's work on the pair's end on the host.
            _ => (PortKind::Bridge, Some(RUNTIMES_NEED_PAIRS.to_owned())),
        };
        let mut attached = None;
        if kind == PortKind::Direct {
            match self.ports.plug_in(&self.kernel, &spec).await {
                Ok(direct) => attached = Some(direct),
                Err(error @ KernelError::NoDirectPort { .. }) if self.ports.has_engine() => {
                    tracing::warn!(container = saved.attachment.name, %error, "it gets a port of the switch");
                    (kind, reason) = (PortKind::Bridge, Some(error.to_string()));
                }
                Err(error) => return Err(error),
            }
        }
        let attached = match attached {
            Some(attached) => attached,
            None => {
                self.ports.let_go(mac_of(&saved.attachment));
                self.kernel.attach(&spec).await?
            }
        };
        self.check_place(saved, &spec).await?;
        saved.note(attached);
        saved.attachment.port_reason = reason;
        saved.attachment.port = kind.name().into();
        self.engine.add_port(saved.vni(), &saved.host_interface).await?;
        match kind {
            PortKind::Bridge => self.shortcuts.plugged_in(),
            PortKind::Direct => {
                self.shortcuts.close(&saved.host_interface);
                self.ports.plugged_in(&spec);
            }
        }
        Ok(())
    }

    /// Confirms that the namespace was the right one: it was opened by path, so its process or name must still
    /// exist. Otherwise removes everything from it.
    async fn check_place(&self, saved: &Saved, spec: &AttachSpec) -> Result<(), KernelError> {
        if saved.is_alive() {
            return Ok(());
        }
        self.ports.unplug(&self.kernel, spec).await;
        let _ = self.kernel.detach(&spec.host_name).await;
        Err(KernelError::NamespaceReplaced { path: spec.namespace.clone() })
    }

    /// Opens a shortcut for each container with a bridge port that may have one.
    ///
    /// # Errors
    /// The kernel does not report the bridge's ports; then no container has a shortcut.
    pub(crate) async fn keep_shortcuts(&self) -> Result<(), KernelError> {
        let is_bridge = |saved: &&Saved| {
            saved.attachment.port == PortKind::Bridge.name()
                && saved.is_attached()
                && saved.vni() == Vni::WEFT
        };
        if !self.lock().await.saved.values().any(|saved| is_bridge(&saved)) {
            return Ok(());
        }
        let seen = self.kernel.bridge_ports(SWITCH, TAP).await;
        // Nothing is attached or detached while the lock is held.
        let inner = self.lock().await;
        let specs: Vec<_> = inner.saved.values().filter(is_bridge).map(spec_of).collect();
        let known = seen.as_ref().map_err(ToString::to_string);
        self.shortcuts.apply(&self.kernel, &specs, &known.cloned());
        seen.map(drop)
    }

    /// The shortcuts that bypass the bridge.
    pub(crate) const fn shortcuts(&self) -> &Shortcuts {
        &self.shortcuts
    }

    /// Finds out which rules and limits direct ports bypass.
    pub(crate) async fn look_at_bypass(&self) {
        if !self.ports.possible() || self.engine.switch() != SwitchKind::Bridge {
            return;
        }
        let is_direct = |saved: &&Saved| {
            saved.attachment.port == PortKind::Direct.name() && saved.is_attached()
        };
        let named = |saved: &Saved| (saved.attachment.name.clone(), spec_of(saved));
        let direct: Vec<_> =
            self.lock().await.saved.values().filter(is_direct).map(named).collect();
        match self.ports.bypass().look(&self.kernel).await {
            Ok(seen) => self.ports.bypass().say(bypass::passed_by(&seen, &direct)),
            Err(error) => {
                tracing::debug!(%error, "cannot find out which rules direct ports bypass");
            }
        }
    }

    /// The rules and limits that do not see frames of direct ports, one a line.
    pub(crate) fn passed_by(&self) -> Vec<String> {
        self.ports.bypass().said()
    }

    /// The port kind for a container attached now, and why it is not a direct port.
    pub(crate) fn port_kind(&self) -> (PortKind, Option<String>) {
        self.ports.kind(&self.engine.support().borrow())
    }

    /// Removes the interface and releases the addresses; parts already gone are no error.
    pub(crate) async fn unplug(&self, id: &str, saved: &Saved) {
        self.take_out(saved).await;
        self.tell(Request::Release { owner: id.into() }).await;
    }

    /// Removes the interface; the addresses stay.
    pub(crate) async fn take_out(&self, saved: &Saved) {
        self.withdraw(saved).await;
        self.shortcuts.close(&saved.host_interface);
        self.engine.remove_port(&saved.host_interface).await;
        if saved.maker.is_command() {
            self.ports.unplug(&self.kernel, &spec_of(saved)).await;
        }
        let mut ends = vec![saved.host_interface.as_str()];
        // The other end goes with it, unless somebody renamed it.
        let is_host = matches!(saved.maker, Maker::Host);
        ends.extend(is_host.then_some(saved.attachment.interface.as_str()));
        for interface in ends {
            if let Err(error) = self.kernel.detach(interface).await {
                tracing::warn!(%error, interface, "cannot remove an interface");
            }
        }
        self.locks.forget(saved).await;
    }

    /// Tells the other hosts that a container is unreachable.
    pub(crate) async fn withdraw(&self, saved: &Saved) {
        if let Ok(mac) = saved.attachment.mac.parse() {
            self.tell(Request::Withdraw { vni: saved.vni(), mac }).await;
        }
    }

    /// Saves a change that has already happened.
    pub(crate) fn save_or_later(&self, inner: &Inner) {
        self.saving.save_or_later(inner.saved.clone());
    }

    /// Waits until the linked hosts take the frames of the containers announced so far, but not for long. A frame that
    /// comes before its sender's announcement is lost.
    pub(crate) async fn wait_known(&self, vni: Vni) {
        let (reply, passed) = oneshot::channel();
        self.tell(Request::Barrier { vni, reply }).await;
        let _ = tokio::time::timeout(Duration::from_millis(KNOWN_LIMIT_MS), passed).await;
    }

    pub(crate) async fn tell(&self, request: Request) {
        // The control loop ends only when the daemon stops; then the request is moot.
        let _ = self.control.send(request).await;
    }
}

/// Removes the devices of direct ports from all containers that a daemon has left attached.
pub(crate) async fn remove_direct_ports(store: &Store, kernel: &Kernel) -> Result<(), StoreError> {
    for saved in Records::read::<Saved>(store, DIRECTORY, EARLIER_FILE)? {
        ports::remove_device(kernel, &spec_of(&saved)).await;
    }
    Ok(())
}

/// Announces a container's addresses to the network, and repeats it in case a path is only just coming up.
pub(crate) async fn announce(kernel: Kernel, vni: Vni, spec: AttachSpec) {
    for pause in ANNOUNCE_AFTER_MS {
        tokio::time::sleep(Duration::from_millis(pause)).await;
        let announced = match spec.namespace.as_os_str().is_empty() {
            true if is_exposed(&spec.name) => kernel.announce_from_switch(&spec.name, &spec),
            true => kernel.announce_from_switch(&bridge_of(vni), &spec),
            false => kernel.announce(&spec).await,
        };
        if let Err(error) = announced {
            tracing::debug!(%error, container = spec.id, "cannot announce addresses");
            return;
        }
    }
}

/// The pauses before each announcement of an attached container's addresses, in milliseconds. Other hosts
/// accept none before they have learned of the container over their links.
const ANNOUNCE_AFTER_MS: [u64; 5] = [100, 250, 650, 2_000, 5_000];

/// The container's attachment settings, except for the switch.
pub(crate) fn spec_of(saved: &Saved) -> AttachSpec {
    let Attachment { id, interface, addresses, gateways, mtu, .. } = &saved.attachment;
    AttachSpec {
        id: id.clone(),
        namespace: saved.sandbox.namespace.clone(),
        identity: Some((saved.sandbox.device, saved.sandbox.inode)),
        host_name: saved.host_interface.clone(),
        name: interface.clone(),
        mac: mac_of(&saved.attachment).0,
        addresses: addresses.clone(),
        mtu: u32::from(*mtu),
        gso_max_segs: Some(run_segments(*mtu)),
        enable_ipv6: saved.condition.enable_ipv6,
        gateways: gateways.clone(),
        multicast_route: saved.multicast_route,
        isolated: saved.isolated,
        bridge: None,
    }
}

pub(crate) fn mac_of(attachment: &Attachment) -> weft_path::Mac {
    attachment.mac.parse().unwrap_or(weft_path::Mac([0x02, 0, 0, 0, 0, 1]))
}

/// The refusal of a request while the daemon stops.
pub(super) fn is_stopping() -> ApiError {
    ApiError::new(ErrorKind::Unavailable, "weft is stopping; launch it again")
}

pub(crate) fn kernel_refusal(error: KernelError) -> ApiError {
    AttachError::from(error).into()
}

/// The directory with a file for each attachment.
const DIRECTORY: &str = "attachments";
/// The one file of all attachments that earlier versions wrote.
const EARLIER_FILE: &str = "attachments.json";
/// Why a container on another network than `weft` has a port of the switch.
const OTHER_NETWORK: &str = "only network weft has direct ports";
/// Why a container that may send from any address has a port of the switch.
const SWITCH_LEARNS: &str = "--allow-macs: the switch learns the addresses behind the port";
/// Why a container of a runtime has a port of the switch.
const RUNTIMES_NEED_PAIRS: &str = "container runtimes need the veth pair";
/// How long an attach waits for linked hosts to know its container, in milliseconds. One that has hung is unlinked
/// after more.
const KNOWN_LIMIT_MS: u64 = 1_000;
/// How long a daemon that ends waits for the disk, in milliseconds.
const SAVE_LIMIT_MS: u64 = 2_000;
