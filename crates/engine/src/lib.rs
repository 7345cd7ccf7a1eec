//! linux: the vector engine: workers, lanes, flow tables, sealing, coalescing.
//!
//! An [`Engine`] carries out [`EngineCommand`]s and reports [`EngineEvent`]s
//! (`docs/design/vector-engine.md`). Between them its workers move super-packets between the TAP device
//! and the wire, each batch run to completion by one thread, without an allocation, lock or log line per
//! packet.
#![forbid(unsafe_code)]

mod ahead;
#[cfg(any(test, feature = "alone"))]
pub mod alone;
mod awake;
mod buckets;
mod control;
mod counters;
mod crew;
pub mod dco;
mod decide;
mod device;
mod error;
mod flows;
mod format;
mod gate;
mod helper;
mod lane;
mod limit;
mod load;
mod ports;
mod queues;
pub mod race;
mod receive;
mod repeats;
mod run;
mod state;
mod table;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod tests_ecn;
mod transmit;
mod turns;
mod worker;

use std::net::IpAddr;
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use weft_crypto::PeerId;
use weft_io::IoError;
use weft_io::keylog::KeyLog;
use weft_io::offload::{self, Offloads};
use weft_io::poller::Waker;
use weft_path::{EngineCommand, EngineEvent, Mac, Vni};

pub use crate::awake::AWAKE_US;
pub use crate::counters::{
    Counters, Direction, DropReason, LaneTraffic, PeerTraffic, SaTraffic, Traffic, Work,
    WorkerTotals,
};
pub use crate::decide::{HELP_LOOK_MS, HELP_QUIET_LOOK_MS, HELPERS_MAX};
pub use crate::error::EngineError;
pub use crate::lane::{LANE_ASK_MS, LANE_ASKS_MAX, LANE_IDLE_LOOKS, LANE_LOOK_MS, LANE_MISSES_MAX};
pub use crate::ports::{PORTS_MAX, PortTraffic};
pub use crate::repeats::{REPEATS_PAUSE_S, REPEATS_PER_S_MAX};
pub use crate::run::{EVENT_INTERVAL_MS, RUNS_RETRY_S, SEND_TRIES_MAX};
pub use crate::state::{ENDPOINTS_MAX, INBOUND_SAS_MAX, LANES_MAX, PEERS_MAX};
pub use crate::transmit::TOO_LONG_ANSWERS_PER_S;
pub use crate::worker::{SENDINGS_MAX, TAP_BYTES_MAX, TAP_READS_MAX, UDP_BATCHES_MAX, UNITS_MAX};

use crate::counters::Registry;
use crate::crew::Crew;
use crate::device::LaneSockets;
use crate::ports::Ports;
use crate::state::State;
use crate::worker::{Sending, Shared};

/// The UDP port of the vector engine.
pub const PORT: u16 = 6784;
/// Probes and keepalives that wait to be sent at most.
pub const COMMANDS_QUEUED_MAX: usize = 4_096;
/// Workers that an engine can have; each takes eight TAP queues, sixteen sockets and some 4 MiB;
/// what peers send while it stands still waits in the kernel, at most 16 MiB in each socket, and what
/// containers send, at most 128 MiB in each queue.
pub const WORKERS_MAX: usize = weft_io::steer::TAP_WORKERS_MAX;

/// The longest that a worker stays awake with nothing to do.
pub const BUSY_POLL_MAX: Duration = Duration::from_millis(10);

/// Workers that there are by default at most.
pub const DEFAULT_WORKERS_MAX: usize = 8;
/// Workers by default at least, where there are as many processors.
pub const DEFAULT_WORKERS_MIN: usize = 2;

/// As many workers as leave the other half of the processors, that this thread may use, to the
/// containers: 1 to [`DEFAULT_WORKERS_MAX`], and two where there are two or three processors, so that
/// requests do not wait for the thread that has a stream.
pub fn default_workers() -> usize {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    (processors / 2).max(processors.min(DEFAULT_WORKERS_MIN)).min(DEFAULT_WORKERS_MAX)
}

/// Tries to bind the port again once its sockets were closed, and the pause between them in milliseconds.
const RENEW_TRIES_MAX: u32 = 20;
const RENEW_PAUSE_MS: u64 = 50;

/// How an engine is set up.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// The TAP device, made if it is not there. Someone else sets it up and puts it in the bridge.
    pub tap_name: String,
    /// The TAP device stays when the engine is gone, so that the bridge keeps its port.
    pub tap_persist: bool,
    /// The network on the TAP device.
    pub vni: Vni,
    /// This host's peer id: of two hosts the one with the lower id begins on lanes beyond the first.
    pub local: PeerId,
    /// The address to receive on; `None`: all of the host.
    pub bind: Option<IpAddr>,
    /// The UDP port, [`PORT`] by default; 0: any free one. Workers share it.
    pub port: u16,
    /// Threads: 1 to [`WORKERS_MAX`].
    pub workers: usize,
    /// Helpers of each worker, at most [`HELPERS_MAX`]: threads that seal and open beside it, so that
    /// one flow uses several cores. `None`: as many as help, while cores idle.
    pub helpers: Option<usize>,
    /// The Ethernet address that probes come from; their IPv6 address follows from it.
    pub probe_mac: Mac,
    /// MTU of the containers in bytes: what a path carries until `SetPathMtu` says more or less.
    pub container_mtu: u16,
    /// Pin each worker to a CPU, in the order of the CPUs that the starting thread may use.
    pub pin: bool,
    /// How long a worker stays awake when there is nothing to do, at most [`BUSY_POLL_MAX`]; zero: it
    /// sleeps at once. It saves a wake-up for each answer that comes in time, and costs processor time
    /// that nobody else wants. `None`: [`AWAKE_US`] while it pays.
    pub busy_poll: Option<Duration>,
    /// Copy the DSCP of the packets inside to the outer header, where an observer sees it.
    pub copy_dscp: bool,
    /// Move super-packets where the kernel has them; else every frame and every datagram goes alone.
    pub offloads: bool,
    /// Append each SA's keys to this file, for tests with an outside referee.
    pub keylog: Option<std::path::PathBuf>,
}

impl EngineConfig {
    /// The usual settings for the network `vni` on the TAP device `tap_name`.
    pub fn new(tap_name: impl Into<String>, vni: Vni, container_mtu: u16) -> Self {
        Self {
            tap_name: tap_name.into(),
            tap_persist: false,
            vni,
            local: PeerId::from_bytes([0; 32]),
            bind: None,
            port: PORT,
            workers: 1,
            helpers: None,
            probe_mac: Mac([0x02, 0x57, 0x45, 0x46, 0x54, 0x00]),
            container_mtu,
            pin: false,
            busy_poll: None,
            copy_dscp: false,
            offloads: true,
            keylog: None,
        }
    }
}

/// A running engine. Dropping it stops it.
pub struct Engine {
    shared: Arc<RwLock<Shared>>,
    crew: Mutex<Crew>,
    first: Mutex<First>,
    registry: Arc<Registry>,
    port: u16,
    offloads: Offloads,
    tap_name: String,
}

/// The way to the first worker, which sends what is sent by command.
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
        let mut crew = Crew::new(config, &offloads, Arc::clone(&shared), Arc::new(events));
        crew.add(queue)?;
        crew.resize(config.workers)?;
        let (waker, port, tap_name) = crew.first()?;
        Ok(Self {
            shared,
            crew: Mutex::new(crew),
            first: Mutex::new(First { sendings, waker }),
            registry,
            port,
            offloads,
            tap_name,
        })
    }

    /// Gives the engine a command; commands are carried out in order. What changes what is known is
    /// done on return; a command that contradicts what is known changes nothing and is logged.
    ///
    /// # Errors
    /// [`EngineError::Busy`] if too many wait, [`EngineError::Stopped`] if nobody carries them out.
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
    /// [`EngineError::Configuration`]: not 1 to [`WORKERS_MAX`]. Else what kept a worker from starting;
    /// those before it stay.
    pub fn set_workers(&self, workers: usize) -> Result<(), EngineError> {
        check_workers(workers)?;
        self.lock().resize(workers)
    }

    /// Makes the TAP device anew, after somebody has deleted it, and as many workers as there were, which
    /// had ended for want of it; to be called in the network namespace in which the engine was started.
    /// Peers, SAs and direct ports are as before. It takes as long as a worker takes to end.
    ///
    /// # Errors
    /// What kept a worker from starting; it may be tried again.
    pub fn renew_tap(&self) -> Result<(), EngineError> {
        let mut crew = self.lock();
        let mut tries = 1;
        loop {
            let (sendings, queue) = sync_channel(COMMANDS_QUEUED_MAX);
            match crew.renew(queue) {
                // A program that this process is just starting still has the old sockets.
                Err(EngineError::Io(IoError::PortInUse { .. })) if tries < RENEW_TRIES_MAX => {
                    tries += 1;
                    std::thread::sleep(Duration::from_millis(RENEW_PAUSE_MS));
                }
                renewed => {
                    renewed?;
                    let (waker, ..) = crew.first()?;
                    let mut first = self.first.lock().unwrap_or_else(PoisonError::into_inner);
                    *first = First { sendings, waker };
                    return Ok(());
                }
            }
        }
    }

    /// All counters, read without stopping anyone.
    pub fn counters(&self) -> Counters {
        let (workers, overflows) = {
            let mut crew = self.lock();
            crew.bury();
            (crew.counters(), crew.overflows())
        };
        let mut counters = self.registry.read(&workers);
        for (work, count) in &mut counters.work {
            if *work == Work::SocketOverflows {
                *count = overflows;
            }
        }
        counters
    }

    /// Frames to groups that were dropped since they go round, and the address inside that the last of
    /// them came from.
    pub fn going_round(&self) -> (u64, Option<Mac>) {
        let workers = self.lock().counters();
        let dropped = workers.iter().map(|worker| worker.drops_of(DropReason::GoesRound)).sum();
        (dropped, workers.iter().find_map(|worker| worker.went_round()))
    }

    /// What the self-test at start found.
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

    fn lock(&self) -> MutexGuard<'_, Crew> {
        self.crew.lock().unwrap_or_else(PoisonError::into_inner)
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

fn check(config: &EngineConfig) -> Result<(), EngineError> {
    check_workers(config.workers)?;
    if let Some(given) = config.helpers.filter(|given| *given > HELPERS_MAX) {
        return Err(EngineError::Configuration {
            what: "the number of helpers of each worker",
            allowed: "0 to 7",
            given: given.to_string(),
        });
    }
    if config.vni.0 >= Vni::PROBE.0 {
        return Err(EngineError::Configuration {
            what: "a network identifier",
            allowed: "under 0xffffff",
            given: format!("{:#x}", config.vni.0),
        });
    }
    Ok(())
}

fn check_workers(workers: usize) -> Result<(), EngineError> {
    if (1..=WORKERS_MAX).contains(&workers) {
        return Ok(());
    }
    Err(EngineError::Configuration {
        what: "the number of workers",
        allowed: "1 to 32",
        given: workers.to_string(),
    })
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
