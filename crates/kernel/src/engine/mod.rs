//! The kernel engine: applies the engine API's commands to XFRM, the data channel, the switch and the guard,
//! and reports the results.
//!
//! It runs as one task. It also owns the switch, which both engines share: a peer on the vector engine is a
//! set of forwarding entries too. So it runs on a host without IPsec as well, and checks from time to time
//! whether the kernel supports it by now.

mod action;
mod bridge;
mod carry_out;
mod channel;
mod filters;
mod keeper;
mod ledger;
mod lifecycle;
mod listen;
mod probes;
mod run;
mod sa;
mod state;
mod switch;
mod traffic;
mod unheard;
mod worker;

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, oneshot, watch};
use weft_crypto::{Cipher, PeerId};
use weft_path::{EngineCommand, EngineEvent, Reason, Vni};

pub use self::carry_out::local_address;
pub use self::keeper::SocketKeeper;
pub use self::ledger::{Carried, PeerTraffic};
pub use self::switch::SwitchKind;
use crate::error::KernelError;
pub use crate::ovpn::DATA_CHANNEL_DEVICE;
use crate::switch::announcements::TooMany;
pub use crate::switch::announcements::{
    ANNOUNCEMENTS_OF_SENDER_PER_S_MAX, ANNOUNCEMENTS_PER_S_MAX,
};
use crate::xfrm::Xfrm;
use crate::{
    firewall::guard::{Guard, GuardCounters},
    firewall::port_locks::{LockCounts, PortLocks},
    handle::Kernel,
    net::devices::CLIENTS_DEVICE,
    switch::groups::{GroupCounts, GroupLimit},
    switch::port_lock::PortLock,
};

/// The UDP port on which the kernel takes ESP.
pub const ENCAPSULATION_PORT: u16 = 6785;
/// The UDP port on which the kernel's data channel takes packets of format `ovpn`.
pub const DATA_CHANNEL_PORT: u16 = 6786;
/// Orders that wait for the engine's task; a sender waits when there are more.
const ORDERS_QUEUED_MAX: usize = 64;

/// The least and the most time that a reader of the counters waits for current ones, in milliseconds.
const PATIENCE_MIN_MS: u64 = 25;
const PATIENCE_MAX_MS: u64 = 500;

/// Settings of [`KernelEngine::start`].
#[derive(Clone, Debug)]
pub struct KernelEngineConfig {
    /// This host.
    pub local: PeerId,
    /// The network that it starts with, and keeps.
    pub vni: Vni,
    /// The switch's device.
    pub device: String,
    /// The vector engine's port on the switch.
    pub tap: String,
    /// The switch's own Ethernet address.
    pub mac: [u8; 6],
    /// MTU of the containers, bytes.
    pub mtu: u16,
    /// The address that SAs use on this host. `None` selects the source address of the route to each peer.
    pub host: Option<IpAddr>,
    /// UDP port for ESP in UDP.
    pub encapsulation_port: u16,
    /// UDP port of the data channel.
    pub data_channel_port: u16,
    /// Keeps the sockets of these two ports open while no daemon runs; `None` if nothing does.
    pub keeper: Option<Arc<dyn SocketKeeper>>,
    /// The switch that moves frames.
    pub switch: SwitchKind,
    /// The file that the keys of SAs are written to, in a build with the feature `keylog`.
    pub keylog: Option<std::path::PathBuf>,
    /// Whether the kernel may move packets to peers at all.
    pub moves: bool,
    /// Whether it may do so in format `esp`.
    pub esp: bool,
    /// Whether it may do so in format `ovpn`.
    pub ovpn: bool,
    /// Whether there may be peers that need no encryption.
    pub plain: bool,
    /// The DSCP of frames goes to the outer header too: on a bridge; an ODP tunnel takes one TOS for
    /// all.
    pub copy_dscp: bool,
}

/// A network besides the first, for [`KernelEngine::add_network`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NetworkSpec {
    /// The network.
    pub vni: Vni,
    /// MTU of its containers, bytes.
    pub mtu: u16,
    /// Its ports reach no other port of this host ([`crate::AttachSpec::isolated`]).
    pub isolated: bool,
}

/// The kernel engine's capabilities on this host, or the reason that it is unavailable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Support {
    /// Packets can be moved by the kernel.
    Ready {
        /// AEADs that the kernel has for format `esp`, or why it does not move that.
        esp: Result<Vec<Cipher>, Reason>,
        /// AEADs that it has for format `ovpn`, or why it does not move that. Without either there is
        /// only the plain path, for trusted peers.
        ovpn: Result<Vec<Cipher>, Reason>,
        /// Lanes to a peer in format `esp` at most: more than one where the kernel chooses among them by
        /// CPU. In format `ovpn` there is one.
        lanes_max: u16,
    },
    /// The configuration forbids it.
    Forbidden,
    /// The kernel lacks IPsec, or a part of it.
    NoEsp(String),
    /// Only format `ovpn` is wanted, and the kernel does not move it.
    NoOvpn(Reason),
    /// It has ESP, but none of the AEADs.
    NoCipher,
    /// The kernel has no VXLAN devices.
    NoVxlan,
    /// The guard is being set; nothing is moved without it.
    Guarding,
    /// The guard cannot be set without the program nft, and nothing is moved without it.
    NoNft,
    /// The guard cannot be set for another reason.
    NoGuard(String),
    /// Something else failed; it is tried again.
    Failed(String),
}

impl Support {
    fn no_guard(error: &KernelError) -> Self {
        match error {
            KernelError::NftMissing { .. } => Self::NoNft,
            error => Self::NoGuard(error.to_string()),
        }
    }
}

/// Counters of the kernel engine.
#[derive(Clone, Debug, Default)]
pub struct KernelCounters {
    /// Packets that the guard dropped, by rule; `None` while there is no guard.
    pub guard: Option<GuardCounters>,
    /// How old these counts are: they come from `nft`, which may be slow.
    pub guard_age: Option<Duration>,
    /// The switch in use.
    pub switch: SwitchKind,
    /// Why it is not the one asked for.
    pub switch_reason: Option<String>,
    /// By name, for `weft report`.
    pub named: Vec<(&'static str, u64)>,
}

/// A handle to the running engine; clones share it.
#[derive(Clone)]
pub struct KernelEngine {
    orders: mpsc::Sender<Order>,
    support: watch::Receiver<Support>,
    switch: SwitchKind,
    guard: filters::GuardReader,
    announcements: Option<TooMany>,
    counted: Arc<Counted>,
}

/// The counters of the engine's task, for readers.
struct Counted {
    told: watch::Sender<Told>,
    /// The task was asked and has not answered yet.
    asked: AtomicBool,
}

/// The last counters, and how long the answer took.
struct Told {
    counters: KernelCounters,
    took: Duration,
}

/// A request to the task.
enum Order {
    Apply {
        commands: Vec<EngineCommand>,
        done: oneshot::Sender<()>,
    },
    RemovePort {
        name: String,
        done: oneshot::Sender<()>,
    },
    AddPort {
        vni: Vni,
        name: String,
        reply: oneshot::Sender<Result<(), KernelError>>,
    },
    LockPort {
        name: String,
        lock: Option<PortLock>,
        reply: oneshot::Sender<Result<(), KernelError>>,
    },
    LockCounts {
        reply: oneshot::Sender<LockCounts>,
    },
    AddNetwork {
        network: NetworkSpec,
        reply: oneshot::Sender<Result<(), KernelError>>,
    },
    RemoveNetwork {
        vni: Vni,
        done: oneshot::Sender<()>,
    },
    Repair {
        done: oneshot::Sender<()>,
    },
    Counters {
        reply: oneshot::Sender<KernelCounters>,
    },
    Traffic {
        reply: oneshot::Sender<Vec<(PeerId, PeerTraffic)>>,
    },
    Stop {
        done: oneshot::Sender<()>,
    },
}

impl KernelEngine {
    /// Removes leftovers of an earlier run, prepares the switch for `config.tap`, which exists, and spawns
    /// the engine's task. Calls `events` for each report.
    ///
    /// # Errors
    /// The switch cannot be made. That IPsec is missing is not an error: see [`Self::support`].
    pub async fn start(
        kernel: Kernel,
        config: KernelEngineConfig,
        events: impl Fn(EngineEvent) + Send + Sync + 'static,
    ) -> Result<Self, KernelError> {
        let (orders, received) = mpsc::channel(ORDERS_QUEUED_MAX);
        let (told, support) = watch::channel(Support::Forbidden);
        let worker = worker::Worker::start(kernel, config, told, Box::new(events)).await?;
        let (switch, guard) = (worker.switch_kind(), worker.filters.reader());
        let announcements = worker.announcements();
        tokio::spawn(worker.run(received));
        let counters = KernelCounters { switch, ..KernelCounters::default() };
        let (told, _) = watch::channel(Told { counters, took: Duration::ZERO });
        let counted = Arc::new(Counted { told, asked: AtomicBool::new(false) });
        Ok(Self { orders, support, switch, guard, announcements, counted })
    }

    /// Applies commands in order and returns when they are done. Failures are reported as events.
    pub async fn apply(&self, commands: Vec<EngineCommand>) {
        let (done, carried_out) = oneshot::channel();
        self.order(Order::Apply { commands, done }, carried_out).await;
    }

    /// The capabilities of this host's kernel. They change when a module is loaded or the guard breaks.
    #[must_use]
    pub fn support(&self) -> watch::Receiver<Support> {
        self.support.clone()
    }

    /// Carries one more network, or restores its devices. The vector engine has made its TAP device before
    /// ([`crate::NetworkDevices::tap`]). No endpoints are known on it yet, and group frames go to no peer.
    ///
    /// # Errors
    /// The kernel's refusal, [`KernelError::TableFull`], [`KernelError::NoIsolation`] on a datapath, or
    /// [`KernelError::EngineGone`]. A new network has left
    /// nothing then.
    pub async fn add_network(&self, network: NetworkSpec) -> Result<(), KernelError> {
        let (reply, answer) = oneshot::channel();
        let order = Order::AddNetwork { network, reply };
        self.order(order, answer).await.unwrap_or(Err(KernelError::EngineGone))
    }

    /// Carries a network no longer: removes its bridge with all devices of ours in it, also those that an earlier
    /// run has left.
    pub async fn remove_network(&self, vni: Vni) {
        let (done, removed) = oneshot::channel();
        self.order(Order::RemoveNetwork { vni, done }, removed).await;
    }

    /// Plugs a container's device into the switch of a network. [`Kernel::attach`] has put it into a bridge.
    ///
    /// # Errors
    /// The kernel's refusal, or [`KernelError::EngineGone`].
    pub async fn add_port(&self, vni: Vni, name: &str) -> Result<(), KernelError> {
        // The engine's task may be busy with endpoints for seconds.
        if self.switch == SwitchKind::Bridge {
            return Ok(());
        }
        let (reply, answer) = oneshot::channel();
        let order = Order::AddPort { vni, name: name.to_owned(), reply };
        self.order(order, answer).await.unwrap_or(Err(KernelError::EngineGone))
    }

    /// Takes a container's device out of the switch, or does nothing if it is already gone. A device in a bridge leaves
    /// it by its own end.
    pub async fn remove_port(&self, name: &str) {
        if self.switch == SwitchKind::Bridge {
            return;
        }
        let (done, removed) = oneshot::channel();
        self.order(Order::RemovePort { name: name.to_owned(), done }, removed).await;
    }

    /// Sets what a port of a datapath may send from; `None`: any address. It need not exist yet. On a bridge,
    /// [`crate::PortLocks`] do this.
    ///
    /// # Errors
    /// The datapath's refusal, or [`KernelError::EngineGone`].
    pub async fn lock_port(&self, name: &str, lock: Option<PortLock>) -> Result<(), KernelError> {
        let (reply, answer) = oneshot::channel();
        let order = Order::LockPort { name: name.to_owned(), lock, reply };
        self.order(order, answer).await.unwrap_or(Err(KernelError::EngineGone))
    }

    /// Frames that a datapath's locks have dropped; nothing on a bridge.
    pub async fn lock_counts(&self) -> LockCounts {
        let (reply, answer) = oneshot::channel();
        self.order(Order::LockCounts { reply }, answer).await.unwrap_or_default()
    }

    /// The switch in use; it does not change while the engine runs.
    #[must_use]
    pub const fn switch(&self) -> SwitchKind {
        self.switch
    }

    /// Checks everything in the kernel and repairs differences.
    pub async fn repair(&self) {
        let (done, mended) = oneshot::channel();
        self.order(Order::Repair { done }, mended).await;
    }

    /// Recent counts of frames that did not go to peers: group frames to the kernel engine's peers, and
    /// announcements to all peers.
    #[must_use]
    pub fn groups(&self) -> GroupCounts {
        let read = self.announcements.as_ref().map(TooMany::read);
        let (announcements, announcer) = read.unwrap_or_default();
        GroupCounts { announcements, announcer, ..self.guard.groups() }
    }

    /// The current counters, or the last known ones if the kernel or `nft` is slower than usual. A status
    /// must not wait for the slow part that it is meant to show.
    pub async fn counters(&self) -> KernelCounters {
        self.guard.clone().refresh().await;
        let mut told = self.counted.told.subscribe();
        let took = told.borrow_and_update().took;
        // One reader asks at a time; a late answer is kept for the next reader.
        if !self.counted.asked.swap(true, Ordering::Relaxed) {
            tokio::spawn(self.clone().count());
        }
        let _ = tokio::time::timeout(patience(took), told.changed()).await;
        let mut counters = told.borrow().counters.clone();
        (counters.guard, counters.guard_age) = match counters.guard {
            Some(_) => self.guard.last().unzip(),
            None => (None, None),
        };
        counters
    }

    async fn count(self) {
        let begun = Instant::now();
        let (reply, answer) = oneshot::channel();
        if let Some(counters) = self.order(Order::Counters { reply }, answer).await {
            self.counted.told.send_replace(Told { counters, took: begun.elapsed() });
        }
        self.counted.asked.store(false, Ordering::Relaxed);
    }

    /// Traffic of each peer's SAs since the engine first looked, in both formats. Plain paths have no SAs and
    /// are not included.
    pub async fn traffic(&self) -> Vec<(PeerId, PeerTraffic)> {
        let (reply, answer) = oneshot::channel();
        self.order(Order::Traffic { reply }, answer).await.unwrap_or_default()
    }

    /// Removes SAs, policies, overlay devices, the data channel's and, last, the guard; the local
    /// switch stays.
    pub async fn stop(&self) {
        let (done, stopped) = oneshot::channel();
        self.order(Order::Stop { done }, stopped).await;
    }

    /// `None` if the task is gone.
    async fn order<T>(&self, order: Order, answer: oneshot::Receiver<T>) -> Option<T> {
        self.orders.send(order).await.ok()?;
        answer.await.ok()
    }
}

/// How long a reader waits for counts of now, by how long they took the last time.
fn patience(took: Duration) -> Duration {
    let (least, most) =
        (Duration::from_millis(PATIENCE_MIN_MS), Duration::from_millis(PATIENCE_MAX_MS));
    (took * 4).clamp(least, most)
}

/// Removes all that Weft made in this kernel, whether a daemon ran before or not. It begins with SAs and policies,
/// the switch with its devices and the containers' interfaces, and the data channels' devices. The guard is last.
///
/// # Errors
/// The kernel's first refusal; the rest of Weft's objects is removed as far as possible.
pub async fn remove_all(kernel: &Kernel, device: &str) -> Result<(), KernelError> {
    let ipsec = match Xfrm::open() {
        Ok(xfrm) => xfrm.remove_own().await.map(|_| ()),
        Err(_) => Ok(()),
    };
    let switch = switch::remove(kernel, device).await;
    let channel = kernel.remove_device(DATA_CHANNEL_DEVICE).await.map(|_| ());
    let clients = kernel.remove_device(CLIENTS_DEVICE).await.map(|_| ());
    let locks = unless_missing(PortLocks::remove(kernel).await);
    let limit = unless_missing(GroupLimit::new(kernel.clone(), &[])?.remove().await);
    // A device that is still there stays guarded.
    let guard = match (&switch, &channel) {
        (Ok(()), Ok(())) => unless_missing(Guard::new(kernel.clone(), &[]).remove().await),
        _ => Ok(()),
    };
    [ipsec, switch, channel, clients, locks, limit, guard].into_iter().collect()
}

/// Without the program there never was a table.
fn unless_missing(removed: Result<bool, KernelError>) -> Result<(), KernelError> {
    match removed {
        Err(KernelError::NftMissing { .. }) => Ok(()),
        result => result.map(|_| ()),
    }
}

/// The source Ethernet address of a host's probes, by which the kernel engine identifies the sender.
#[must_use]
pub const fn probe_mac(peer: &PeerId) -> [u8; 6] {
    let [a, b, c, d, e, ..] = *peer.as_bytes();
    [0x02, a, b, c, d, e]
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    /// An engine whose task takes no order.
    fn busy(switch: SwitchKind) -> (KernelEngine, mpsc::Receiver<Order>) {
        let (orders, received) = mpsc::channel(ORDERS_QUEUED_MAX);
        let (_, support) = watch::channel(Support::Forbidden);
        let (counters, took) = (KernelCounters::default(), Duration::ZERO);
        let told = watch::Sender::new(Told { counters, took });
        let counted = Arc::new(Counted { told, asked: AtomicBool::new(false) });
        let (guard, announcements) = (filters::GuardReader::idle(), None);
        (KernelEngine { orders, support, switch, guard, announcements, counted }, received)
    }

    #[tokio::test(start_paused = true)]
    async fn ports_of_a_bridge_do_not_wait_for_the_engine_and_those_of_a_datapath_do() {
        const LIMIT: Duration = Duration::from_secs(60);
        for (switch, waits) in [(SwitchKind::Bridge, false), (SwitchKind::Odp, true)] {
            let (engine, mut orders) = busy(switch);
            let added = tokio::time::timeout(LIMIT, engine.add_port(Vni::WEFT, "weftv1")).await;
            assert_eq!(added.is_err(), waits, "{switch:?}");
            let removed = tokio::time::timeout(LIMIT, engine.remove_port("weftv1")).await;
            assert_eq!(removed.is_err(), waits, "{switch:?}");
            let ordered = std::iter::from_fn(|| orders.try_recv().ok()).count();
            assert_eq!(ordered, if waits { 2 } else { 0 });
            assert!(!matches!(added, Ok(Err(_))));
        }
    }
}
