//! linux: the vector engine: workers, lanes, flow tables, sealing, coalescing.
//!
//! An [`Engine`] carries out [`EngineCommand`]s and reports [`EngineEvent`]s (DESIGN sections 3 and
//! 9). Between them its workers move super-packets between the TAP device and the wire, each batch
//! run to completion by one thread, without an allocation, lock or log line per packet.
#![forbid(unsafe_code)]

mod counters;
mod device;
mod error;
mod limit;
mod receive;
mod run;
mod state;
mod table;
#[cfg(test)]
mod tests;
mod transmit;
mod worker;

use std::net::IpAddr;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};
use std::thread::{self, JoinHandle};

use weft_io::keylog::KeyLog;
use weft_io::offload::{self, Offloads};
use weft_io::poller::Waker;
use weft_io::tap::{Tap, TapOptions};
use weft_io::udp::UdpSocket;
use weft_path::{EngineCommand, EngineEvent, EngineKind, Mac, Vni};

pub use crate::counters::{Counters, Direction, DropReason, PeerTraffic, SaTraffic, Traffic, Work};
pub use crate::error::EngineError;
pub use crate::run::{EVENT_INTERVAL_MS, RUNS_RETRY_S, SEND_TRIES_MAX};
pub use crate::state::{ENDPOINTS_MAX, INBOUND_SAS_MAX, LANES_MAX, PEERS_MAX};
pub use crate::transmit::TOO_LONG_ANSWERS_PER_S;
pub use crate::worker::{COMMANDS_MAX, TAP_BYTES_MAX, TAP_READS_MAX, UDP_BATCHES_MAX};

use crate::counters::{Registry, WorkerCounters};
use crate::state::State;
use crate::transmit::Transmitter;
use crate::worker::Worker;

/// The UDP port of the vector engine (DESIGN section 11).
pub const PORT: u16 = 6784;
/// Commands that wait at most.
pub const COMMANDS_QUEUED_MAX: usize = 4_096;
/// Workers that an engine can have.
pub const WORKERS_MAX: usize = 1;

/// How an engine is set up.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// The TAP device, made if it is not there. Someone else sets it up and puts it in the bridge.
    pub tap_name: String,
    /// The TAP device stays when the engine is gone, so that the bridge keeps its port.
    pub tap_persist: bool,
    /// The network on the TAP device.
    pub vni: Vni,
    /// The address to receive on; `None`: all of the host.
    pub bind: Option<IpAddr>,
    /// The UDP port, [`PORT`] by default; 0: any free one.
    pub port: u16,
    /// Threads: 1 to [`WORKERS_MAX`].
    pub workers: usize,
    /// The Ethernet address that probes come from; their IPv6 address follows from it.
    pub probe_mac: Mac,
    /// MTU of the containers in bytes: what a path carries until `SetPathMtu` says more or less.
    pub container_mtu: u16,
    /// Pin each worker to a CPU.
    pub pin: bool,
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
            bind: None,
            port: PORT,
            workers: 1,
            probe_mac: Mac([0x02, 0x57, 0x45, 0x46, 0x54, 0x00]),
            container_mtu,
            pin: false,
            keylog: None,
        }
    }
}

/// A running engine. Dropping it stops it.
pub struct Engine {
    commands: SyncSender<EngineCommand>,
    waker: Waker,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
    registry: Arc<Registry>,
    workers: Vec<Arc<WorkerCounters>>,
    socket: Arc<UdpSocket>,
    offloads: Offloads,
    tap_name: String,
}

impl Engine {
    /// Tries the offloads, opens the TAP device and the socket in the calling thread's network
    /// namespace, and starts the workers. `events` is called on their threads and must be quick.
    ///
    /// # Errors
    /// [`EngineError`]
    pub fn start(
        config: &EngineConfig,
        events: impl Fn(EngineEvent) + Send + Sync + 'static,
    ) -> Result<Self, EngineError> {
        check(config)?;
        let offloads = offload::self_test()?;
        let tap =
            Tap::open(&TapOptions { name: config.tap_name.clone(), persist: config.tap_persist })?;
        let socket = Arc::new(UdpSocket::bind(config.bind, config.port)?);
        let kernel = |what| move |source| EngineError::Kernel { what, source };
        let waker = Waker::new().map_err(kernel("make an event descriptor"))?;
        let (commands, queue) = sync_channel(COMMANDS_QUEUED_MAX);
        let registry = Arc::new(Registry::default());
        let counters = Arc::new(WorkerCounters::default());
        let stop = Arc::new(AtomicBool::new(false));
        let keylog = KeyLog::open(config.keylog.as_deref())
            .map_err(|source| EngineError::Kernel { what: "open the key log", source })?;
        let segments = if offloads.udp_segment.usable() { offloads.run_segments_max } else { 1 };
        let tap_name = tap.name().to_owned();
        let worker = Worker {
            merge: (
                tap.offloads().tso && offloads.tap_tso.usable(),
                tap.offloads().uso && offloads.tap_uso.usable(),
            ),
            tap,
            socket: Arc::clone(&socket),
            state: State::new(config.vni, config.container_mtu, Arc::clone(&registry), keylog),
            transmitter: Transmitter::new(segments, config.probe_mac),
            commands: queue,
            waker: waker.clone(),
            stop: Arc::clone(&stop),
            counters: Arc::clone(&counters),
            events: Arc::new(events),
        };
        let pin = config.pin;
        let thread = thread::Builder::new()
            .name("weft-engine0".to_owned())
            .spawn(move || supervise(worker, pin))
            .map_err(kernel("start a thread"))?;
        Ok(Self {
            commands,
            waker,
            stop,
            thread: Some(thread),
            registry,
            workers: vec![counters],
            socket,
            offloads,
            tap_name,
        })
    }

    /// Gives the engine a command; commands are carried out in order.
    ///
    /// # Errors
    /// [`EngineError::Busy`] if too many wait, [`EngineError::Stopped`] if nobody carries them out.
    pub fn command(&self, command: EngineCommand) -> Result<(), EngineError> {
        self.commands.try_send(command).map_err(|error| match error {
            TrySendError::Full(_) => EngineError::Busy,
            TrySendError::Disconnected(_) => EngineError::Stopped,
        })?;
        self.waker.wake();
        Ok(())
    }

    /// All counters, read without stopping anyone.
    pub fn counters(&self) -> Counters {
        let mut counters = self.registry.read(&self.workers);
        let overflows = u64::from(self.socket.overflows());
        for (work, count) in &mut counters.work {
            if *work == Work::SocketOverflows {
                *count = overflows;
            }
        }
        counters
    }

    /// What the self-test at start found.
    pub const fn offloads(&self) -> &Offloads {
        &self.offloads
    }

    /// The UDP port it receives on.
    pub fn port(&self) -> u16 {
        self.socket.port()
    }

    /// The name of the TAP device.
    pub fn tap_name(&self) -> &str {
        &self.tap_name
    }

    /// Stops the workers and waits for them.
    pub fn stop(self) {
        drop(self);
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.waker.wake();
        if let Some(thread) = self.thread.take() {
            // A panic was caught and reported by the thread itself.
            let _ = thread.join();
        }
    }
}

const fn shared_between_threads<T: Send + Sync>() {}
const _: () = shared_between_threads::<Engine>();

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine")
            .field("tap", &self.tap_name)
            .field("port", &self.socket.port())
            .finish_non_exhaustive()
    }
}

fn check(config: &EngineConfig) -> Result<(), EngineError> {
    let wrong = |what, allowed, given: String| EngineError::Configuration { what, allowed, given };
    if !(1..=WORKERS_MAX).contains(&config.workers) {
        return Err(wrong("the number of workers", "1", config.workers.to_string()));
    }
    if config.vni.0 >= Vni::PROBE.0 {
        return Err(wrong(
            "a network identifier",
            "under 0xffffff",
            format!("{:#x}", config.vni.0),
        ));
    }
    Ok(())
}

/// Runs a worker and turns its end by error or panic into an event.
fn supervise(worker: Worker, pin: bool) {
    if pin && let Err(error) = pin_first() {
        tracing::warn!(%error, "the engine's worker could not be pinned to a CPU");
    }
    let events = Arc::clone(&worker.events);
    // Nothing of the worker is used after a panic.
    let reason = match catch_unwind(AssertUnwindSafe(|| worker.run())) {
        Ok(Ok(())) => return,
        Ok(Err(error)) => format!("the engine's worker failed: {error}"),
        Err(panic) => {
            let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
            let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
            format!("the engine's worker panicked: {}", text.unwrap_or_default())
        }
    };
    tracing::error!(reason, "the engine has failed");
    events(EngineEvent::EngineFailed { engine: EngineKind::Userspace, reason });
}

fn pin_first() -> std::io::Result<()> {
    match weft_io::cpu::allowed()?.first() {
        Some(cpu) => weft_io::cpu::pin_to(*cpu),
        None => Ok(()),
    }
}
