//! Networks besides `weft`: makes their devices while this host holds them, and answers users' requests.
//!
//! The core says which networks this host holds. This service has both engines carry them, and tells the core when
//! they do. Only then does the core send endpoints. A network that ends is first left by the core.

mod default_range;
mod requests;

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::{Arc, Weak};
use std::time::{Duration, SystemTime};

use tokio::sync::{mpsc, oneshot, watch};
use weft_api::{ApiError, ErrorKind};
use weft_engine::{Engine, EngineError, NetworkConfig};
use weft_kernel::engine::{KernelEngine, NetworkSpec};
use weft_kernel::{Kernel, KernelError, LinkEvent, LinkWatch, NetworkDevices};
use weft_mesh::{NetworkDefinition, NetworkError};
use weft_path::Vni;

use super::supervisor::Pulse;
use crate::core::control::Request;
use crate::core::networks::{HeldList, HeldNetwork, NetworkRequest};
use crate::devices::NETWORK;

/// How long a request waits for the devices of a network.
const READY_LIMIT: Duration = Duration::from_secs(10);
/// The pause before a network's devices are tried again after a failure.
const RETRY: Duration = Duration::from_secs(5);

/// The networks of this host, with the state of their devices.
pub(crate) struct Networks {
    held: watch::Receiver<HeldList>,
    standing: watch::Sender<BTreeMap<Vni, Standing>>,
    /// Weak: the part of the daemon that stops the engine owns it.
    vector: Weak<Engine>,
    engine: KernelEngine,
    kernel: Kernel,
    control: mpsc::Sender<Request>,
    /// MTU of network `weft` in bytes.
    mtu: u16,
}

/// The state of a network's devices.
#[derive(Clone, Debug)]
struct Standing {
    held: HeldNetwork,
    /// Why there are none.
    failure: Option<String>,
    since: SystemTime,
}

/// A network as an attachment needs it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct OnNetwork {
    pub(crate) name: String,
    pub(crate) vni: Vni,
    /// MTU of its containers in bytes.
    pub(crate) mtu: u16,
    /// There is no way out of it.
    pub(crate) internal: bool,
    /// Its ports reach no other port of this host.
    pub(crate) isolated: bool,
}

impl Networks {
    pub(crate) fn new(
        held: watch::Receiver<HeldList>,
        vector: Weak<Engine>,
        engine: KernelEngine,
        kernel: Kernel,
        control: mpsc::Sender<Request>,
        mtu: u16,
    ) -> Self {
        let standing = watch::Sender::new(BTreeMap::new());
        Self { held, standing, vector, engine, kernel, control, mtu }
    }

    /// Network `weft`, which is always there.
    pub(crate) fn weft(&self) -> OnNetwork {
        let (vni, mtu) = (Vni::WEFT, self.mtu);
        OnNetwork { name: NETWORK.into(), vni, mtu, internal: false, isolated: false }
    }

    /// The networks besides `weft` that this host holds.
    pub(crate) fn held(&self) -> watch::Receiver<HeldList> {
        self.held.clone()
    }

    /// A network that a container is about to be attached to; `None` means `weft`. Joins one that only other hosts
    /// hold, and waits for its devices.
    ///
    /// # Errors
    /// No known host holds it, hosts hold different ones, or its devices cannot be made.
    pub(crate) async fn join(&self, name: Option<&str>) -> Result<OnNetwork, ApiError> {
        let name = name.unwrap_or(NETWORK);
        if name == NETWORK {
            return Ok(self.weft());
        }
        let (reply, answer) = oneshot::channel();
        let name = name.to_owned();
        self.tell(NetworkRequest::Join { name, reply }).await;
        let held = answer.await.map_err(|_| stopping())?.map_err(|error| refusal(&error))?;
        self.wait_for(&held).await?;
        Ok(self.on(&held.definition))
    }

    /// The name of a held network.
    pub(crate) fn name_of(&self, vni: Vni) -> Option<String> {
        if vni == Vni::WEFT {
            return Some(NETWORK.to_owned());
        }
        let held = self.held.borrow();
        let found = held.iter().find(|held| held.definition.vni == vni);
        found.map(|held| held.definition.name.clone())
    }

    /// Whether a held network has no way out.
    pub(crate) fn is_internal(&self, vni: Vni) -> bool {
        let held = self.held.borrow();
        held.iter().any(|held| held.definition.vni == vni && held.definition.options.internal)
    }

    /// Waits a while until the devices of all held networks stand, or cannot be made.
    pub(crate) async fn settled(&self) {
        let held = Arc::clone(&self.held.borrow());
        let stands = |all: &BTreeMap<Vni, Standing>| {
            let known = |it: &HeldNetwork| {
                all.get(&it.definition.vni).is_some_and(|standing| standing.held == *it)
            };
            held.iter().all(known)
        };
        let mut standing = self.standing.subscribe();
        let _ = tokio::time::timeout(READY_LIMIT, standing.wait_for(stands)).await;
    }

    fn on(&self, definition: &NetworkDefinition) -> OnNetwork {
        let options = &definition.options;
        OnNetwork {
            name: definition.name.clone(),
            vni: definition.vni,
            mtu: self.mtu_of(definition),
            internal: options.internal,
            isolated: options.isolated,
        }
    }

    /// MTU of a network's containers: no larger than what fits this host's link.
    fn mtu_of(&self, definition: &NetworkDefinition) -> u16 {
        definition.options.mtu.map_or(self.mtu, |mtu| mtu.min(self.mtu))
    }

    async fn wait_for(&self, held: &HeldNetwork) -> Result<(), ApiError> {
        let vni = held.definition.vni;
        let mut standing = self.standing.subscribe();
        let is_known = |all: &BTreeMap<Vni, Standing>| {
            all.get(&vni).is_some_and(|standing| standing.held == *held)
        };
        let waited = tokio::time::timeout(READY_LIMIT, standing.wait_for(is_known)).await;
        let failure = match waited {
            Ok(Ok(all)) => all.get(&vni).and_then(|standing| standing.failure.clone()),
            Ok(Err(_)) => return Err(stopping()),
            Err(_) => Some(format!("not made within {} s", READY_LIMIT.as_secs())),
        };
        let Some(why) = failure else { return Ok(()) };
        let name = &held.definition.name;
        let text = format!(
            "the devices of network {name} are not there: {why}; Weft tries again, and weft network ls shows the state"
        );
        Err(ApiError::new(ErrorKind::Unavailable, text))
    }

    async fn tell(&self, request: NetworkRequest) {
        // The control loop ends only when the daemon stops.
        let _ = self.control.send(Request::Network(request)).await;
    }
}

/// Keeps the devices of the held networks, for as long as it is polled. `plug_in` plugs the containers of a network
/// into its new devices.
pub(crate) async fn keep<F, T>(networks: Arc<Networks>, plug_in: F, pulse: Pulse)
where
    F: Fn(Vni) -> T + Send + Sync,
    T: Future<Output = ()> + Send,
{
    if let Err(error) = networks.remove_leftovers().await {
        tracing::warn!(%error, "bridges of networks of an earlier run may be left");
    }
    loop {
        let Err(error) = networks.follow(&plug_in, &pulse).await;
        tracing::warn!(%error, "cannot watch the devices of networks");
        pulse.wait(tokio::time::sleep(RETRY)).await;
    }
}

impl Networks {
    async fn follow<T: Future<Output = ()>>(
        &self,
        plug_in: &impl Fn(Vni) -> T,
        pulse: &Pulse,
    ) -> Result<Infallible, KernelError> {
        let mut links = self.kernel.watch().await?;
        let mut held = self.held.clone();
        loop {
            let wanted = Arc::clone(&held.borrow_and_update());
            self.bring_in_line(&wanted, pulse).await;
            let failed = self.standing.borrow().values().any(|it| it.failure.is_some());
            let next = async {
                tokio::select! {
                    changed = held.changed() => match changed {
                        Ok(()) => Ok(None),
                        Err(_) => std::future::pending().await,
                    },
                    lost = next_lost(&mut links) => lost.map(Some),
                    () = tokio::time::sleep(RETRY), if failed => Ok(None),
                }
            };
            if let Some(vni) = pulse.wait(next).await?
                && self.restore(vni).await
            {
                plug_in(vni).await;
            }
        }
    }

    /// Makes the devices of networks that are new, and removes those of networks that are over.
    async fn bring_in_line(&self, wanted: &HeldList, pulse: &Pulse) {
        let is_wanted = |standing: &Standing| wanted.contains(&standing.held);
        let over: Vec<Vni> = {
            let standing = self.standing.borrow();
            let over = standing.iter().filter(|(_, standing)| !is_wanted(standing));
            over.map(|(vni, _)| *vni).collect()
        };
        for vni in over {
            pulse.wait(self.take_down(vni)).await;
            self.standing.send_modify(|all| _ = all.remove(&vni));
        }
        for held in wanted.iter() {
            let vni = held.definition.vni;
            let stands =
                self.standing.borrow().get(&vni).is_some_and(|standing| standing.failure.is_none());
            if !stands {
                pulse.wait(self.put_up_or_say(held)).await;
            }
        }
    }

    async fn put_up_or_say(&self, held: &HeldNetwork) {
        let (vni, name) = (held.definition.vni, &held.definition.name);
        let failure = self.put_up(held).await.err();
        let before = self.standing.borrow().get(&vni).cloned();
        let same = before.filter(|before| before.held == *held && before.failure == failure);
        match (&failure, &same) {
            (None, _) => tracing::info!(network = name, %vni, "network carried"),
            (Some(why), None) => tracing::warn!(network = name, %vni, why, "network not carried"),
            (Some(_), Some(_)) => {}
        }
        let since = same.map_or_else(SystemTime::now, |same| same.since);
        let standing = Standing { held: held.clone(), failure, since };
        self.standing.send_modify(|all| _ = all.insert(vni, standing));
    }

    /// Has both engines carry a network.
    async fn put_up(&self, held: &HeldNetwork) -> Result<(), String> {
        let (vni, serial) = (held.definition.vni, held.serial);
        let config = NetworkConfig { vni, tap_name: NetworkDevices::of(vni).tap };
        let vector = self.vector.upgrade().ok_or("weft is stopping")?;
        // The kernel may block the caller.
        let added = tokio::task::spawn_blocking(move || vector.add_network(&config)).await;
        added.map_err(|error| error.to_string())?.map_err(|error| error.to_string())?;
        let OnNetwork { mtu, isolated, .. } = self.on(&held.definition);
        let spec = NetworkSpec { vni, mtu, isolated };
        if let Err(error) = self.engine.add_network(spec).await {
            self.tell(NetworkRequest::Fell { vni, serial }).await;
            self.take_down(vni).await;
            return Err(error.to_string());
        }
        self.tell(NetworkRequest::Stands { vni, serial }).await;
        Ok(())
    }

    /// Has both engines leave a network.
    async fn take_down(&self, vni: Vni) {
        if let Some(vector) = self.vector.upgrade() {
            let removed = tokio::task::spawn_blocking(move || vector.remove_network(vni)).await;
            match removed {
                Ok(Ok(()) | Err(EngineError::UnknownNetwork { .. })) => {}
                result => tracing::warn!(?result, %vni, "the vector engine keeps a network"),
            }
        }
        self.engine.remove_network(vni).await;
    }

    /// Another program removed the bridge or the TAP device of a network. False if Weft itself did.
    async fn restore(&self, vni: Vni) -> bool {
        let standing = self.standing.borrow().get(&vni).cloned();
        let Some(held) = standing.filter(|it| it.failure.is_none()).map(|it| it.held) else {
            return false;
        };
        tracing::warn!(
            network = held.definition.name,
            "a device of it was removed; making it again"
        );
        self.put_up_or_say(&held).await;
        true
    }

    /// Removes bridges that a killed daemon left of networks that are held no longer.
    async fn remove_leftovers(&self) -> Result<(), KernelError> {
        let held = Arc::clone(&self.held.borrow());
        for vni in self.kernel.network_bridges().await? {
            if held.iter().all(|it| it.definition.vni != vni) {
                tracing::info!(%vni, "removing the bridge of a network that this host does not hold");
                self.engine.remove_network(vni).await;
            }
        }
        Ok(())
    }
}

/// Waits until a device of a network is gone.
async fn next_lost(links: &mut LinkWatch) -> Result<Vni, KernelError> {
    loop {
        if let LinkEvent::Removed { name } = links.next().await?
            && let Some(vni) = NetworkDevices::network_of(&name)
        {
            return Ok(vni);
        }
    }
}

/// A refusal of the mesh, for a user.
fn refusal(error: &NetworkError) -> ApiError {
    let kind = match error {
        NetworkError::Unfit { .. } | NetworkError::Weft => ErrorKind::BadRequest,
        NetworkError::Unknown { .. } => ErrorKind::NotFound,
        NetworkError::NotSaved { .. } => ErrorKind::Unavailable,
        _ => ErrorKind::Conflict,
    };
    ApiError::new(kind, error)
}

fn stopping() -> ApiError {
    ApiError::new(ErrorKind::Unavailable, "weft is stopping; launch it again")
}
