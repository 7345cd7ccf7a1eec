//! State that all workers of an engine share.

use std::sync::{PoisonError, RwLock, RwLockReadGuard};

use weft_io::poller::Poller;
use weft_path::PathId;

use crate::ports::device::{GsoSink, LaneSockets};
use crate::ports::direct::{Port, Ports};
use crate::ports::port_reader::{PortReader, is_own};
use crate::rx::receiver::Receiver;
use crate::tables::networks::Network;
use crate::tables::state::State;

/// State that all workers of an engine share. A worker reads it for one batch at a time. A command that
/// changes it waits for the batches in hand and holds up the next ones for as long as it takes.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) state: State,
    pub(crate) sockets: LaneSockets,
    pub(crate) ports: Ports,
}

/// A packet that a command asks to send.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Sending {
    Probe { path: PathId, probe: u64, mtu: u16, candidate: bool },
    Keepalive { path: PathId },
}

/// A command that panicked has changed a table in part at worst, and each entry is whole.
#[inline]
pub(crate) fn read(shared: &RwLock<Shared>) -> RwLockReadGuard<'_, Shared> {
    shared.read().unwrap_or_else(PoisonError::into_inner)
}

/// A peer's lane port is new or has changed: rare enough to hold up the others for.
pub(crate) fn note_moved_lane(shared: &RwLock<Shared>, receiver: &mut Receiver) {
    let Some((path, lane, source)) = receiver.take_moved_lane() else { return };
    let mut shared = shared.write().unwrap_or_else(PoisonError::into_inner);
    if let Ok(source) = shared.sockets.remote(source) {
        shared.state.set_lane_source(path, lane, source);
    }
}

/// The network of a port, if the queue with this number is this worker's now, or its helpers', and the network is
/// there. A reader asks while it holds the shared state. So when workers come or go, no two of them read one queue,
/// and the previous reader's frames are on their way. When a network goes, nobody reads its ports any more.
#[inline]
pub(crate) fn serves<'a>(
    shared: &'a Shared,
    worker: usize,
    port: &Port,
    queue: usize,
) -> Option<&'a Network> {
    if !is_own(worker, shared.sockets.sockets(), queue) {
        return None;
    }
    shared.state.networks.of(port.network())
}

/// Watches the queues of the ports that this worker has now, and stops watching those that it has lost.
pub(crate) fn sync_ports(reader: &mut PortReader, poller: &Poller, shared: &RwLock<Shared>) {
    let shared = read(shared);
    let wanted = reader.wanted(&shared.ports, shared.sockets.sockets());
    drop(shared);
    if let Some(wanted) = wanted {
        reader.wait_for(poller, wanted);
    }
}
