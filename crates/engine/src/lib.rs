//! linux: the vector engine: workers, lanes, flow tables, sealing, coalescing.
//!
//! An [`Engine`] carries out [`EngineCommand`]s and reports [`EngineEvent`]s (`docs/design/vector-engine.md`). Its
//! workers move super-packets between the TAP device and the wire. One thread runs each batch to completion,
//! without an allocation, lock or log line per packet.
#![forbid(unsafe_code)]

#[cfg(any(test, feature = "alone"))]
pub mod alone;
mod config;
pub mod dco;
mod error;
mod limits;
mod ports;
pub mod race;
mod rate_limit;
mod rx;
#[cfg(any(test, feature = "alone"))]
mod sample_sas;
mod stats;
mod tables;
#[cfg(test)]
mod tests;
mod tx;
mod workers;

use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};

use weft_io::IoError;
use weft_io::keylog::KeyLog;
use weft_io::offload::{self, Offloads};
use weft_io::poller::Waker;
use weft_io::tap::Tap;
use weft_path::{EngineCommand, EngineEvent, Mac, Vni};

pub use crate::config::{EngineConfig, NetworkConfig, PORT, default_workers};
pub use crate::error::EngineError;
pub use crate::limits::{
    BUSY_POLL_MAX, COMMANDS_QUEUED_MAX, DEFAULT_WORKERS_MAX, DEFAULT_WORKERS_MIN, WORKERS_MAX,
};
pub use crate::ports::direct::{PORTS_MAX, PortTraffic};
pub use crate::rate_limit::EVENT_INTERVAL_MS;
pub use crate::stats::counters::{
    Counters, Direction, DropReason, LaneTraffic, PeerTraffic, SaTraffic, Traffic, Work,
    WorkerTotals,
};
pub use crate::tables::lane::{
    LANE_ASK_MS, LANE_ASKS_MAX, LANE_IDLE_LOOKS, LANE_LOOK_MS, LANE_MISSES_MAX,
};
pub use crate::tables::networks::NETWORKS_MAX;
pub use crate::tables::state::{ENDPOINTS_MAX, INBOUND_SAS_MAX, LANES_MAX, PEERS_MAX};
pub use crate::tx::gso_batch::{RUNS_RETRY_S, SEND_TRIES_MAX};
pub use crate::tx::repeats::{REPEATS_PAUSE_S, REPEATS_PER_S_MAX};
pub use crate::tx::too_long::TOO_LONG_ANSWERS_PER_S;
pub use crate::workers::busy_poll::BUSY_POLL_US;
pub use crate::workers::scaling_policy::{HELP_LOOK_MS, HELP_QUIET_LOOK_MS, HELPERS_MAX};
pub use crate::workers::turn::{
    SENDINGS_MAX, TAP_BYTES_MAX, TAP_READS_MAX, UDP_BATCHES_MAX, UNITS_MAX,
};

use crate::config::{check, check_vni, check_workers};
use crate::limits::{PORTS_CLOSE_LOOK_MS, PORTS_CLOSE_MS};
use crate::ports::device::LaneSockets;
use crate::ports::direct::{Port, Ports};
use crate::stats::counters::Registry;
use crate::tables::state::State;
use crate::workers::pool::WorkerPool;
use crate::workers::shared::{Sending, Shared, read};

/// Tries to bind the port again once its sockets were closed, and the pause between them in milliseconds.
const RENEW_TRIES_MAX: u32 = 20;
const RENEW_PAUSE_MS: u64 = 50;

/// A running engine. Dropping it stops it.
pub struct Engine {
    shared: Arc<RwLock<Shared>>,
    pool: Mutex<WorkerPool>,
    first: Mutex<First>,
    registry: Arc<Registry>,
    port: u16,
    offloads: Offloads,
    tap_name: String,
}

/// The way to the first worker, which sends packets by command.
struct First {
    sendings: SyncSender<Sending>,
    waker: Waker,
}

impl Engine {
    /// Tries the offloads, opens the TAP device and the sockets in the calling thread's network
    /// namespace, and starts the workers. `events` is called on their threads, must be quick, and must
    /// give the engine no command.
    ///
    /// # Errors
    /// [`EngineError`]
    pub fn start(
        config: &EngineConfig,
        events: impl Fn(EngineEvent) + Send + Sync + 'static,
    ) -> Result<Self, EngineError> {
        check(config)?;
        let offloads = if config.offloads { offload::self_test()? } else { Offloads::NONE };
        let registry = Arc::new(Registry::default());
        let keylog = KeyLog::open(config.keylog.as_deref())
            .map_err(|source| EngineError::Kernel { what: "open the key log", source })?;
        let (vni, mtu) = (config.vni, config.container_mtu);
        let state = State::of_host(config.local, vni, mtu, Arc::clone(&registry), keylog);
        let shared = Arc::new(RwLock::new(Shared {
            state,
            sockets: LaneSockets::default(),
            ports: Ports::new(),
        }));
        let (sendings, queue) = sync_channel(COMMANDS_QUEUED_MAX);
        let mut pool = WorkerPool::new(config, &offloads, Arc::clone(&shared), Arc::new(events));
        pool.add(queue)?;
        pool.resize(config.workers)?;
        let (waker, port, tap_name) = pool.first()?;
        let engine = Self {
            shared,
            pool: Mutex::new(pool),
            first: Mutex::new(First { sendings, waker }),
            registry,
            port,
            offloads,
            tap_name,
        };
        for network in &config.networks {
            engine.add_network(network)?;
        }
        Ok(engine)
    }

    /// Gives the engine a command; commands are carried out in order. A change of the tables is done on
    /// return. A command that contradicts them changes nothing and is logged.
    ///
    /// # Errors
    /// [`EngineError::Busy`] if too many wait, [`EngineError::Stopped`] if the worker is gone.
    pub fn command(&self, command: EngineCommand) -> Result<(), EngineError> {
        let sending = match command {
            EngineCommand::SendProbe { path, probe, mtu, candidate } => {
                Sending::Probe { path, probe, mtu, candidate }
            }
            EngineCommand::SendKeepalive { path } => Sending::Keepalive { path },
            command => return self.apply(command),
        };
        let first = self.first.lock().unwrap_or_else(PoisonError::into_inner);
        first.sendings.try_send(sending).map_err(|error| match error {
            TrySendError::Full(_) => EngineError::Busy,
            TrySendError::Disconnected(_) => EngineError::Stopped,
        })?;
        first.waker.wake();
        Ok(())
    }

    fn apply(&self, command: EngineCommand) -> Result<(), EngineError> {
        let name = name_of(&command);
        let needed_by = match &command {
            EngineCommand::InstallOutbound { path, .. } | EngineCommand::SetRemote { path, .. } => {
                Some(*path)
            }
            _ => None,
        };
        let mut shared = self.shared.write().unwrap_or_else(PoisonError::into_inner);
        let Shared { state, sockets, .. } = &mut *shared;
        let lanes = state.lanes_begun();
        let mut result = Ok(());
        if let Err(error) = state.apply(command, |address| sockets.remote(address)) {
            match needed_by {
                Some(path) => result = Err(EngineError::Path { path, reason: error.to_string() }),
                None => {
                    tracing::warn!(command = name, %error, "the engine could not carry out a command");
                }
            }
        }
        let is_to_prove = state.lanes_begun() != lanes;
        drop(shared);
        if is_to_prove {
            self.lock().wake();
        }
        result
    }

    /// How many workers there are.
    pub fn workers(&self) -> usize {
        self.lock().len()
    }

    /// Adds or removes workers, the last ones, until there are `workers`; to be called in the network
    /// namespace in which the engine was started. Lanes that peers have taken go on: fewer workers
    /// serve them together.
    ///
    /// # Errors
    /// [`EngineError::Configuration`]: not 1 to [`WORKERS_MAX`]. Else a worker could not start; those before
    /// it stay.
    pub fn set_workers(&self, workers: usize) -> Result<(), EngineError> {
        check_workers(workers)?;
        self.lock().resize(workers)
    }

    /// Makes the TAP device again after it was deleted, and starts as many workers as before: those had ended
    /// without the device. Call it in the network namespace in which the engine was started. Peers, SAs, direct
    /// ports and further networks stay as before. It takes as long as a worker takes to end.
    ///
    /// # Errors
    /// A worker could not start; the call may be repeated.
    pub fn renew_tap(&self) -> Result<(), EngineError> {
        let mut pool = self.lock();
        let mut tries = 1;
        loop {
            let (sendings, queue) = sync_channel(COMMANDS_QUEUED_MAX);
            match pool.renew(queue) {
                // A program that this process is just starting still has the old sockets.
                Err(EngineError::Io(IoError::PortInUse { .. })) if tries < RENEW_TRIES_MAX => {
                    tries += 1;
                    std::thread::sleep(Duration::from_millis(RENEW_PAUSE_MS));
                }
                renewed => {
                    renewed?;
                    let (waker, ..) = pool.first()?;
                    let mut first = self.first.lock().unwrap_or_else(PoisonError::into_inner);
                    *first = First { sendings, waker };
                    return Ok(());
                }
            }
        }
    }

    /// Joins one more network, or gives one that the engine is in another TAP device in place of the one before,
    /// for instance when that was deleted. Returns the device's name. Call it in the network namespace in which the
    /// engine was started. The network has neither endpoints nor peers for its groups yet.
    ///
    /// # Errors
    /// [`EngineError::Configuration`]: there are [`NETWORKS_MAX`] of them, or the VNI is that of probes.
    /// [`EngineError::FirstNetwork`]. Else the device could not be opened. Nothing has changed then.
    pub fn add_network(&self, network: &NetworkConfig) -> Result<String, EngineError> {
        let NetworkConfig { vni, ref tap_name } = *network;
        check_vni(vni)?;
        if read(&self.shared).state.networks.first().vni == vni {
            return Err(EngineError::FirstNetwork { vni });
        }
        let mut queues = self.lock().open_network(tap_name)?;
        let name = queues.first().map_or_else(String::new, |queue| queue.name().to_owned());
        let before = self.change_ports(|state, ports| {
            let id = state.networks.add(vni)?;
            let network = state.networks.of(id);
            Ok::<_, EngineError>(
                network.and_then(|network| ports.set_switch(network, std::mem::take(&mut queues))),
            )
        })?;
        await_release(before.as_slice());
        Ok(name)
    }

    /// Leaves a network: forgets its endpoints, its peers for groups, its direct ports and its TAP device. Waits
    /// until the workers have let the devices go; those that are not persistent are gone then. Frames of the network
    /// that come yet are dropped ([`DropReason::UnknownNetwork`]).
    ///
    /// # Errors
    /// [`EngineError::UnknownNetwork`], [`EngineError::FirstNetwork`]
    pub fn remove_network(&self, vni: Vni) -> Result<(), EngineError> {
        let gone = self.change_ports(|state, ports| {
            Ok::<_, EngineError>(ports.remove_network(state.remove_network(vni)?))
        })?;
        await_release(&gone);
        Ok(())
    }

    /// The VNIs of the networks that it is in, the one that it was started with first.
    pub fn networks(&self) -> Vec<Vni> {
        read(&self.shared).state.networks.vnis().collect()
    }

    /// All counters, read without stopping anyone.
    pub fn counters(&self) -> Counters {
        let (workers, overflows) = {
            let mut pool = self.lock();
            pool.reap();
            (pool.counters(), pool.overflows())
        };
        let mut counters = self.registry.read(&workers);
        for (work, count) in &mut counters.work {
            if *work == Work::SocketOverflows {
                *count = overflows;
            }
        }
        counters
    }

    /// Frames to groups that were dropped since they go round, and the network and the address inside that the
    /// last of them came from.
    pub fn going_round(&self) -> (u64, Option<(Vni, Mac)>) {
        let workers = self.lock().counters();
        let dropped = workers.iter().map(|worker| worker.drops_of(DropReason::GoesRound)).sum();
        let last = workers.iter().find_map(|worker| worker.went_round());
        let shared = read(&self.shared);
        let of = |(network, mac)| Some((shared.state.networks.get(network)?.vni, mac));
        (dropped, last.and_then(of))
    }

    /// Serves a direct port of a network from now on. Its queues are those of a TAP device that is, or will be, the
    /// interface of the container with this address. A port that has the address in this network already is let go.
    ///
    /// # Errors
    /// There are [`PORTS_MAX`] of them, it has no queue, or the engine is not in the network.
    pub fn add_port(&self, vni: Vni, mac: Mac, queues: Vec<Tap>) -> Result<(), EngineError> {
        self.change_ports(|state, ports| {
            let unknown = |_| EngineError::UnknownNetwork { vni };
            ports.add(state.networks.by_vni(vni).map_err(unknown)?, mac, queues)
        })
    }

    /// Lets a direct port go: its device stays if it is persistent. False if there was none.
    pub fn remove_port(&self, vni: Vni, mac: Mac) -> bool {
        self.change_ports(|state, ports| {
            state.networks.number_of(vni.0).is_some_and(|network| ports.remove(network, mac))
        })
    }

    /// Whether there is a direct port for this address in a network whose device is there, as far as is known.
    pub fn has_port(&self, vni: Vni, mac: Mac) -> bool {
        let shared = read(&self.shared);
        let network = shared.state.networks.number_of(vni.0);
        let port = network.and_then(|network| shared.ports.of(network, mac.0));
        port.is_some_and(|port| !port.is_gone())
    }

    /// Frames and bytes of each direct port since it was added.
    pub fn port_traffic(&self) -> Vec<(Vni, Mac, PortTraffic)> {
        let shared = read(&self.shared);
        let traffic = |port: &Arc<Port>| {
            let name = port.name();
            Some((name.vni, name.mac?, port.traffic()))
        };
        shared.ports.iter().filter_map(traffic).collect()
    }

    fn change_ports<T>(&self, change: impl FnOnce(&mut State, &mut Ports) -> T) -> T {
        let result = {
            let mut shared = self.shared.write().unwrap_or_else(PoisonError::into_inner);
            let Shared { state, ports, .. } = &mut *shared;
            change(state, ports)
        };
        self.lock().wake();
        result
    }

    /// The offloads that the self-test at start found.
    pub const fn offloads(&self) -> &Offloads {
        &self.offloads
    }

    /// The UDP port it receives on.
    pub const fn port(&self) -> u16 {
        self.port
    }

    /// The name of the TAP device.
    pub fn tap_name(&self) -> &str {
        &self.tap_name
    }

    /// Stops the workers and waits for them.
    pub fn stop(self) {
        drop(self);
    }

    fn lock(&self) -> MutexGuard<'_, WorkerPool> {
        self.pool.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

const fn shared_between_threads<T: Send + Sync>() {}
const _: () = shared_between_threads::<Engine>();

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine")
            .field("tap", &self.tap_name)
            .field("port", &self.port)
            .finish_non_exhaustive()
    }
}

/// Waits until no worker has these ports any more. So their queues are closed by the caller: the kernel takes its
/// time to remove a device.
fn await_release(ports: &[Arc<Port>]) {
    let until = Instant::now() + Duration::from_millis(PORTS_CLOSE_MS);
    while ports.iter().any(|port| Arc::strong_count(port) > 1) && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(PORTS_CLOSE_LOOK_MS));
    }
}

const fn name_of(command: &EngineCommand) -> &'static str {
    match command {
        EngineCommand::InstallInbound { .. } => "install inbound",
        EngineCommand::RemoveInbound { .. } => "remove inbound",
        EngineCommand::InstallOutbound { .. } => "install outbound",
        EngineCommand::InstallPlain { .. } => "install plain",
        EngineCommand::RemoveOutbound { .. } => "remove outbound",
        EngineCommand::BindPath { .. } => "bind path",
        EngineCommand::SetPathMtu { .. } => "set path MTU",
        EngineCommand::SetRemote { .. } => "set remote",
        EngineCommand::SetSource { .. } => "set source",
        EngineCommand::OpenLanes { .. } => "open lanes",
        EngineCommand::SendProbe { .. } => "send probe",
        EngineCommand::SendKeepalive { .. } => "send keepalive",
        EngineCommand::SetEndpoints { .. } => "set endpoints",
        EngineCommand::SetBroadcast { .. } => "set broadcast",
        EngineCommand::RemovePeer { .. } => "remove peer",
    }
}
