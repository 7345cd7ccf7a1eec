//! How an engine is set up.

use std::net::IpAddr;
use std::time::Duration;

use weft_crypto::PeerId;
use weft_path::{Mac, Vni};

use crate::error::EngineError;
use crate::limits::{DEFAULT_WORKERS_MAX, DEFAULT_WORKERS_MIN, WORKERS_MAX};
use crate::tables::networks::NETWORKS_MAX;
use crate::workers::scaling_policy::HELPERS_MAX;

/// The UDP port of the vector engine.
pub const PORT: u16 = 6784;

/// Workers for half of the processors that this thread may use; the other half is for the containers. There are 1
/// to [`DEFAULT_WORKERS_MAX`]. With two or three processors there are two, so that requests do not wait for the
/// thread that has a stream.
pub fn default_workers() -> usize {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    (processors / 2).max(processors.min(DEFAULT_WORKERS_MIN)).min(DEFAULT_WORKERS_MAX)
}

/// A network beside the one that the engine is started with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NetworkConfig {
    /// The network.
    pub vni: Vni,
    /// Its TAP device, made if it is not there. Someone else sets it up and puts it in the network's bridge.
    pub tap_name: String,
}

/// How an engine is set up.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// The TAP device, made if it is not there. Someone else sets it up and puts it in the bridge.
    pub tap_name: String,
    /// The TAP device stays when the engine is gone, so that the bridge keeps its port.
    pub tap_persist: bool,
    /// The network on the TAP device, which the engine keeps.
    pub vni: Vni,
    /// The networks that it begins with besides; others may come ([`Engine::add_network`](crate::Engine::add_network)).
    pub networks: Vec<NetworkConfig>,
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
    /// MTU of the containers in bytes; a path carries as much until `SetPathMtu` changes it.
    pub container_mtu: u16,
    /// Pin each worker to a CPU, in the order of the CPUs that the starting thread may use.
    pub pin: bool,
    /// How long a worker stays awake when there is nothing to do, at most
    /// [`BUSY_POLL_MAX`](crate::BUSY_POLL_MAX); zero: it sleeps at once. It saves a wake-up for each answer
    /// that comes in time, and uses otherwise idle processor time. `None`:
    /// [`BUSY_POLL_US`](crate::BUSY_POLL_US) while it pays.
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
            networks: Vec::new(),
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

/// Checks that the host can do all that the configuration asks for.
///
/// # Errors
/// [`EngineError::Configuration`]
pub(crate) fn check(config: &EngineConfig) -> Result<(), EngineError> {
    check_workers(config.workers)?;
    if let Some(given) = config.helpers.filter(|given| *given > HELPERS_MAX) {
        return Err(EngineError::Configuration {
            what: "the number of helpers of each worker",
            allowed: "0 to 7",
            given: given.to_string(),
        });
    }
    check_vni(config.vni)?;
    let mut vnis = vec![config.vni];
    for network in &config.networks {
        check_vni(network.vni)?;
        if vnis.contains(&network.vni) {
            return Err(EngineError::Configuration {
                what: "the identifier of each network",
                allowed: "one that no other has",
                given: network.vni.to_string(),
            });
        }
        vnis.push(network.vni);
    }
    if vnis.len() > NETWORKS_MAX {
        return Err(EngineError::Configuration {
            what: "the number of networks",
            allowed: "at most 256",
            given: vnis.len().to_string(),
        });
    }
    Ok(())
}

/// The identifier of a network, but for that of probes.
///
/// # Errors
/// [`EngineError::Configuration`]
pub(crate) fn check_vni(vni: Vni) -> Result<(), EngineError> {
    if vni.0 < Vni::PROBE.0 {
        return Ok(());
    }
    Err(EngineError::Configuration {
        what: "a network identifier",
        allowed: "under 0xffffff",
        given: format!("{:#x}", vni.0),
    })
}

/// The maximum number of workers.
///
/// # Errors
/// [`EngineError::Configuration`]
pub(crate) fn check_workers(workers: usize) -> Result<(), EngineError> {
    if (1..=WORKERS_MAX).contains(&workers) {
        return Ok(());
    }
    Err(EngineError::Configuration {
        what: "the number of workers",
        allowed: "1 to 32",
        given: workers.to_string(),
    })
}
