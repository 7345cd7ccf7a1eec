//! Relays address announcements, and probes for duplicate addresses, across hosts.
//!
//! A port with `neigh_suppress`, such as the overlay's, gets no gratuitous ARP, ARP probes, unsolicited
//! neighbour advertisements or duplicate address detection from the bridge. So a TAP device is a port of the
//! bridge without that option, and receives only those frames. It is isolated like the overlay's ports, and
//! so receives frames from this host only. A task sends each frame out of the overlay's devices. It also
//! listens to announcements from anywhere, since the bridge must stop answering for an address that has
//! moved.

use std::collections::{BTreeMap, HashMap};
use std::convert::Infallible;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use weft_io::namespace;
use weft_io::packet::PacketSocket;
use weft_io::poller::{Poller, Waker};
use weft_io::tap::{Tap, TapOptions, VNET_LEN};
use weft_packet::announcement::Announcement;
use weft_packet::ethernet;
use weft_path::Vni;

use crate::{
    error::KernelError,
    firewall::guard::SENT_PRIORITY,
    handle::Kernel,
    net::{bridge::PortSpec, devices::NetworkDevices},
};

/// Frames of this host that go to other hosts in a second at most.
pub const ANNOUNCEMENTS_PER_S_MAX: u32 = 1_024;
/// Likewise of one sender.
pub const ANNOUNCEMENTS_OF_SENDER_PER_S_MAX: u32 = 256;
/// Announcements from anywhere that are looked into in a second at most.
const HEARD_PER_S_MAX: u32 = 256;
const WINDOW: Duration = Duration::from_secs(1);
/// Frames that wait in the port's queue.
const QUEUE_FRAMES: u32 = 1_024;
/// The longest frame that is passed on, in bytes.
const FRAME_LEN_MAX: usize = 2_048;
/// Announcements that wait for the engine's task; more are lost, as on the network.
const HEARD_QUEUED_MAX: usize = 256;
/// Frames read from one device before the other gets its turn.
const BATCH_FRAMES: usize = 64;
/// The pause after a batch of which frames were dropped, in milliseconds.
const OVERLOAD_PAUSE_MS: u64 = 10;
/// Delay before a retry after a failure, in milliseconds.
const RETRY_MS: u64 = 1_000;
/// Interval of checks of the port, in milliseconds.
const CHECK_MS: u64 = 10_000;

/// The tasks from outside, one for each network. They end when this is dropped.
pub(crate) struct Announcements {
    heard: mpsc::Receiver<(Vni, Announcement)>,
    sender: mpsc::Sender<(Vni, Announcement)>,
    counts: Arc<Counts>,
    tasks: BTreeMap<Vni, JoinHandle<Infallible>>,
}

#[derive(Default)]
struct Counts {
    relayed: AtomicU64,
    dropped: AtomicU64,
    /// The dropped frames that exceeded a limit per second.
    too_many: AtomicU64,
    /// The sender of the last of these, in the low six bytes; 0 if there is none.
    sender: AtomicU64,
}

/// Reads the counts of excess frames.
#[derive(Clone)]
pub(crate) struct TooMany(Arc<Counts>);

impl TooMany {
    /// The number of excess frames and the last sender.
    pub(crate) fn read(&self) -> (u64, Option<[u8; 6]>) {
        let [_, _, sender @ ..] = self.0.sender.load(Relaxed).to_be_bytes();
        (self.0.too_many.load(Relaxed), Some(sender).filter(|sender| *sender != [0; 6]))
    }
}

impl Drop for Announcements {
    fn drop(&mut self) {
        self.tasks.values().for_each(JoinHandle::abort);
    }
}

impl Announcements {
    /// Starts without networks.
    pub(crate) fn new() -> Self {
        let (sender, heard) = mpsc::channel(HEARD_QUEUED_MAX);
        Self { heard, sender, counts: Arc::default(), tasks: BTreeMap::new() }
    }

    /// Starts the task of a network whose containers have this MTU, unless there is one.
    pub(crate) fn add(&mut self, kernel: &Kernel, vni: Vni, devices: &NetworkDevices, mtu: u16) {
        if self.tasks.contains_key(&vni) {
            return;
        }
        let port = PortSpec {
            name: devices.announcements.clone(),
            bridge: devices.bridge.clone(),
            isolated: true,
            learning: false,
            neigh_suppress: false,
            flood: false,
            mtu: u32::from(mtu),
            gso_max_size: None,
            gso_max_segs: None,
        };
        let [v4, v6] = devices.overlay.clone();
        let relay = Relay {
            kernel: kernel.clone(),
            vni,
            port,
            overlay: [devices.tap.clone(), v4, v6],
            heard: self.sender.clone(),
            counts: Arc::clone(&self.counts),
        };
        self.tasks.insert(vni, tokio::spawn(relay.run()));
    }

    /// Ends the task of a network. Its port goes with it.
    pub(crate) fn remove(&mut self, vni: Vni) {
        if let Some(task) = self.tasks.remove(&vni) {
            task.abort();
        }
    }

    /// Waits for the next announcement of a host on a network. Cancel safe.
    pub(crate) async fn next(&mut self) -> (Vni, Announcement) {
        match self.heard.recv().await {
            Some(announcement) => announcement,
            None => std::future::pending().await,
        }
    }

    pub(crate) fn too_many(&self) -> TooMany {
        TooMany(Arc::clone(&self.counts))
    }

    pub(crate) fn counters(&self) -> Vec<(&'static str, u64)> {
        vec![
            ("announcements_relayed", self.counts.relayed.load(Relaxed)),
            ("announcements_dropped", self.counts.dropped.load(Relaxed)),
        ]
    }
}

/// The state of the relay task of a network.
struct Relay {
    kernel: Kernel,
    vni: Vni,
    port: PortSpec,
    /// The overlay's devices by name; those that are not there have no peers.
    overlay: [String; 3],
    heard: mpsc::Sender<(Vni, Announcement)>,
    counts: Arc<Counts>,
}

impl Relay {
    async fn run(self) -> Infallible {
        let mut told = None;
        loop {
            let error = match self.open().await {
                Ok(reader) => self.watch(reader).await,
                Err(error) => error,
            };
            let text = error.to_string();
            if told.as_ref() != Some(&text) {
                tracing::warn!(error = text, "announcements of addresses do not reach other hosts");
                told = Some(text);
            }
            tokio::time::sleep(Duration::from_millis(RETRY_MS)).await;
        }
    }

    async fn open(&self) -> Result<Reader, KernelError> {
        let refused = |error: weft_io::IoError| failed(io::Error::other(error.to_string()));
        let bridge = self.kernel.own_bridge(&self.port.bridge).await?.index;
        let options =
            TapOptions { queue_packets: QUEUE_FRAMES, ..TapOptions::new(&self.port.name) };
        let open = || {
            let mut port = Tap::open(&options)?;
            port.take_announcements()?;
            // Each frame comes with its whole checksum.
            port.stop_offloads().map_err(|source| weft_io::IoError::Kernel {
                what: "set the offloads of a TAP device",
                source,
            })?;
            Ok((port, PacketSocket::announcements(bridge)?, PacketSocket::sender()?))
        };
        let (port, bridge, sender) =
            namespace::run_in(&self.kernel.inner.home, open).map_err(failed)?.map_err(refused)?;
        // The frames bypass the bridge's output hook, where the guard marks Weft's packets.
        sender.set_priority(SENT_PRIORITY.cast_signed()).map_err(failed)?;
        self.kernel.ensure_port(&self.port).await?;
        let (stop, (ended, end)) = (Waker::new().map_err(failed)?, oneshot::channel());
        let mut work = Work {
            vni: self.vni,
            sender,
            overlay: self.overlay.clone(),
            heard: self.heard.clone(),
            counts: Arc::clone(&self.counts),
            windows: Default::default(),
            stop: stop.clone(),
        };
        thread::Builder::new()
            .name("weft-announce".into())
            .spawn(move || _ = ended.send(work.serve(&port, &bridge)))
            .map_err(failed)?;
        Ok(Reader { stop, end })
    }

    /// Keeps the port as it should be until its reader ends.
    async fn watch(&self, mut reader: Reader) -> KernelError {
        let mut check = tokio::time::interval(Duration::from_millis(CHECK_MS));
        loop {
            tokio::select! {
                ended = &mut reader.end => {
                    return failed(ended.unwrap_or_else(|_| io::Error::other("its reader has ended")));
                }
                _ = check.tick() => {
                    if let Err(error) = self.kernel.ensure_port(&self.port).await {
                        return error;
                    }
                }
            }
        }
    }
}

fn failed(source: io::Error) -> KernelError {
    KernelError::Socket { doing: "listen for announcements of addresses".into(), source }
}

/// The thread that reads; it ends when this is dropped.
struct Reader {
    stop: Waker,
    /// Why it has ended.
    end: oneshot::Receiver<io::Error>,
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.end.close();
        self.stop.wake();
    }
}

/// The state of the relay thread.
struct Work {
    vni: Vni,
    sender: PacketSocket,
    overlay: [String; 3],
    heard: mpsc::Sender<(Vni, Announcement)>,
    counts: Arc<Counts>,
    /// Rate limits for relayed and for received announcements.
    windows: [Window; 2],
    stop: Waker,
}

impl Work {
    /// Passes on until it is stopped or a device is gone.
    fn serve(&mut self, port: &Tap, bridge: &PacketSocket) -> io::Error {
        self.try_serve(port, bridge).err().unwrap_or_else(|| io::Error::other("stopped"))
    }

    fn try_serve(&mut self, port: &Tap, bridge: &PacketSocket) -> io::Result<()> {
        const STOP: u64 = 0;
        let mut poller = Poller::new()?;
        poller.add(&self.stop, STOP)?;
        poller.add(port, STOP + 1)?;
        poller.add(bridge, STOP + 2)?;
        let mut frame = [0; VNET_LEN + FRAME_LEN_MAX];
        loop {
            if poller.wait(None)?.any(|token| token == STOP) {
                return Ok(());
            }
            let dropped = self.counts.dropped.load(Relaxed);
            for _ in 0..BATCH_FRAMES {
                let Some(len) = unless_empty(port.recv(&mut frame))? else { break };
                self.pass_on(frame.get(VNET_LEN..len).unwrap_or_default());
            }
            for _ in 0..BATCH_FRAMES {
                let Some(len) = unless_empty(bridge.recv(&mut frame))? else { break };
                self.hear(&frame[..len]);
            }
            if self.counts.dropped.load(Relaxed) != dropped {
                thread::sleep(Duration::from_millis(OVERLOAD_PAUSE_MS));
            }
        }
    }

    fn pass_on(&mut self, frame: &[u8]) {
        let [window, _] = &mut self.windows;
        let source = ethernet::Header::parse(frame).map(|header| header.source());
        let Ok(source) = source else {
            self.counts.dropped.fetch_add(1, Relaxed);
            return;
        };
        let (all_max, own_max) = (ANNOUNCEMENTS_PER_S_MAX, ANNOUNCEMENTS_OF_SENDER_PER_S_MAX);
        let is_due = window.admits(Instant::now(), source, all_max, own_max);
        if !is_due {
            let [a, b, c, d, e, f] = source;
            self.counts.sender.store(u64::from_be_bytes([0, 0, a, b, c, d, e, f]), Relaxed);
            self.counts.too_many.fetch_add(1, Relaxed);
        }
        // A frame that fills the buffer may be truncated.
        if !is_due || frame.len() >= FRAME_LEN_MAX {
            self.counts.dropped.fetch_add(1, Relaxed);
            return;
        }
        for device in &self.overlay {
            // Skip an overlay device that does not exist.
            let Ok(index) = self.sender.index_of(device) else { continue };
            match self.sender.send(frame, index) {
                Ok(()) => self.counts.relayed.fetch_add(1, Relaxed),
                Err(_) => self.counts.dropped.fetch_add(1, Relaxed),
            };
        }
    }

    fn hear(&mut self, frame: &[u8]) {
        let Some(heard) = Announcement::parse(frame) else { return };
        let [_, window] = &mut self.windows;
        let is_due = window.admits(Instant::now(), heard.mac, HEARD_PER_S_MAX, HEARD_PER_S_MAX);
        if !is_due || self.heard.try_send((self.vni, heard)).is_err() {
            self.counts.dropped.fetch_add(1, Relaxed);
        }
    }
}

fn unless_empty(read: io::Result<usize>) -> io::Result<Option<usize>> {
    match read {
        Ok(len) => Ok(Some(len)),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
        Err(error) => Err(error),
    }
}

/// The frames admitted in the current one-second window.
#[derive(Default)]
struct Window {
    begun: Option<Instant>,
    all: u32,
    /// Frames admitted by sender. `all` limits the number of entries.
    of: HashMap<[u8; 6], u32>,
}

impl Window {
    fn admits(&mut self, now: Instant, source: [u8; 6], all_max: u32, own_max: u32) -> bool {
        if self.begun.is_none_or(|begun| now.saturating_duration_since(begun) >= WINDOW) {
            self.begun = Some(now);
            self.all = 0;
            self.of.clear();
        }
        if self.all >= all_max {
            return false;
        }
        let own = self.of.entry(source).or_default();
        if *own >= own_max {
            return false;
        }
        *own += 1;
        self.all += 1;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_sender_leaves_room_for_others_and_all_get_a_new_second() {
        let (mut window, begun) = (Window::default(), Instant::now());
        let mut admitted = |now, source: u8, times: u32| {
            (0..times).filter(|_| window.admits(now, [2, 0, 0, 0, 0, source], 10, 4)).count()
        };
        assert_eq!(admitted(begun, 1, 100), 4);
        assert_eq!((admitted(begun, 2, 100), admitted(begun, 3, 100)), (4, 2));
        let later = begun + WINDOW;
        assert_eq!(
            (admitted(later - Duration::from_millis(1), 4, 1), admitted(later, 1, 5)),
            (0, 4)
        );
    }
}
