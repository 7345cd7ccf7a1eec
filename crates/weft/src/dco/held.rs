//! A device with its sockets, the kernel's or one in userspace, behind one interface.

use std::io::{self, Write};
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, OnceLock};

use serde_json::{Value, json};
use tokio::sync::Notify;
use weft_api::{ApiError, ErrorKind};
use weft_daemon::dco::{DataDevice, DataDeviceError, KernelDevice};
use weft_engine::dco::{Device, DeviceConfig, Event, MTU_MAX};
use weft_engine::{DropReason, Work};
use weft_io::udp::IPV6_MTU_MIN;
use weft_kernel::ovpn::{OvpnDeviceSpec, OvpnWatch};
use weft_kernel::{Kernel, KernelError};
use weft_openvpn::device::{
    DeletionReason, DeviceError, Mode, Notice, Notification, PeerAttributes, Slot, rules,
};

use super::args::{Carrier, Engine, KeyWords, NewIface, PeerWords};
use super::json;
use super::lines::Lines;
use super::peers::{Book, Way};
use super::sockets::{self, Connection, Reading, Socket, Sockets};
use super::task::lock;
use super::{used_keys, words};

/// The device.
pub(super) struct Held {
    pub(super) name: String,
    pub(super) index: u32,
    engine: Engine,
    mode: Mode,
    pub(super) device: DataDevice,
    pub(super) follows: Follows,
    sockets: Sockets,
    /// Not held across an await.
    pub(super) book: Mutex<Book>,
    /// Allows one change of peers and keys at a time, so that the book matches the device.
    pub(super) changes: tokio::sync::Mutex<()>,
    pub(super) lines: Arc<Lines>,
}

/// Whence news of the device come.
pub(super) enum Follows {
    /// The kernel's notices.
    Watch(tokio::sync::Mutex<OvpnWatch>),
    /// Weft's own device, which notifies when peers have gone without the verb.
    Gone(Arc<Notify>),
}

/// The transport of a new peer.
enum Carried {
    Udp(Arc<Socket>),
    Tcp(TcpStream),
}

impl Held {
    /// Creates the device in the calling thread's network namespace.
    pub(super) async fn new(words: &NewIface, lines: Arc<Lines>) -> Result<Self, ApiError> {
        let mtu = fitting(words.mtu)?;
        let supported = weft_kernel::ovpn::support().await;
        let engine = match (words.engine, &supported) {
            (Some(engine), _) => engine,
            (None, Ok(())) => Engine::Kernel,
            (None, Err(_)) => Engine::Userspace,
        };
        let (device, follows, index) = match engine {
            Engine::Kernel if words.path_mtu.is_some() => {
                let text = "the kernel's device has no --path-mtu: give an --mtu that leaves room, or --engine userspace";
                return Err(ApiError::new(ErrorKind::BadRequest, text));
            }
            Engine::Kernel => Self::new_kernel(words).await?,
            Engine::Userspace => Self::new_userspace(words, mtu, &lines)?,
        };
        let held = Self {
            name: words.device.clone(),
            index,
            engine,
            mode: words.mode,
            device,
            follows,
            sockets: Sockets::default(),
            book: Mutex::default(),
            changes: tokio::sync::Mutex::default(),
            lines,
        };
        if let Err(error) = weft_io::tun::set_mtu(&words.device, words.mtu) {
            held.end_or_warn().await;
            let text = format!("cannot set an MTU of {} on {}: {error}", words.mtu, words.device);
            return Err(ApiError::new(ErrorKind::BadRequest, text));
        }
        Ok(held)
    }

    async fn new_kernel(words: &NewIface) -> Result<(DataDevice, Follows, u32), ApiError> {
        let unasked = |error| refused(DataDeviceError::Kernel(error));
        let watch = tokio::sync::Mutex::new(OvpnWatch::open().await.map_err(unasked)?);
        let kernel = Kernel::new().map_err(internal)?;
        let spec = OvpnDeviceSpec { name: words.device.clone(), mode: words.mode, own: false };
        let made = kernel.create_ovpn_device(&spec).await.map_err(|error| match error {
            KernelError::NameTaken { name, .. } => name_taken(&name),
            error => conflict(error),
        })?;
        let device = DataDevice::Kernel(KernelDevice::new(&made).await.map_err(unasked)?);
        Ok((device, Follows::Watch(watch), made.index))
    }

    fn new_userspace(
        words: &NewIface,
        mtu: u16,
        lines: &Arc<Lines>,
    ) -> Result<(DataDevice, Follows, u32), ApiError> {
        if weft_io::tun::index(&words.device).is_ok() {
            return Err(name_taken(&words.device));
        }
        let config = DeviceConfig {
            name: words.device.clone(),
            mode: words.mode,
            mtu,
            path_mtu: words.path_mtu.unwrap_or(IPV6_MTU_MIN),
            offloads: true,
        };
        let (index, gone) = (Arc::new(OnceLock::new()), Arc::new(Notify::new()));
        let (of, told, ends) = (Arc::clone(&index), Arc::clone(lines), Arc::clone(&gone));
        let events = move |event| {
            let device = of.get().copied().unwrap_or_default();
            match event {
                Event::Notification(what) => {
                    let is_deleted = matches!(what, Notification::PeerDeleted { reason, .. }
                        if reason != DeletionReason::Userspace);
                    told.tell(&Notice { device, what });
                    if is_deleted {
                        ends.notify_one();
                    }
                }
                Event::Packet { source, packet, .. } => {
                    told.packet(|| json::packet(device, Some(source), &packet));
                }
            }
        };
        weft_daemon::choose_libraries();
        let device = Device::open(&config, Arc::new(events)).map_err(internal)?;
        let number = weft_io::tun::index(&words.device).map_err(internal)?;
        let _ = index.set(number);
        Ok((DataDevice::Userspace(device), Follows::Gone(gone), number))
    }

    /// The description of the device itself.
    pub(super) fn show(&self) -> Value {
        let mut shown = json!({"name": self.name, "ifindex": self.index, "engine": self.engine});
        if let DataDevice::Userspace(device) = &self.device {
            let counts = DropReason::ALL.iter().map(|why| (why.name(), device.dropped(*why)));
            shown["drops"] = json::drops(counts);
            shown["long-over-ipv6"] = json!(device.done(Work::LongOverIpv6));
        }
        shown
    }

    /// Removes the device; its peers' ends are reported as they go.
    pub(super) async fn end(&self) -> Result<(), ApiError> {
        let remove = async { Kernel::new()?.remove_ovpn_device_by_index(self.index).await };
        // A device that is already gone is fine.
        remove
            .await
            .map(|_| ())
            .map_err(|error| internal(format!("cannot remove {}: {error}; try again", self.name)))
    }

    /// Removes the device, and logs a failure that no caller can receive.
    pub(super) async fn end_or_warn(&self) {
        if let Err(error) = self.end().await {
            tracing::error!(error = %error.error, "cannot remove a leftover device: remove it with ip link");
        }
    }

    pub(super) async fn new_peer(
        &self,
        words: &PeerWords,
        carrier: &Carrier,
        mark: Option<u32>,
    ) -> Result<Value, ApiError> {
        let carried = match carrier.udp {
            Some(local) => Carried::Udp(self.sockets.open(local, self.reading().as_ref()).await?),
            None => {
                let stream = sockets::connect(carrier).await.map_err(|error| {
                    let text = format!("no connection to the peer: {error}");
                    ApiError::new(ErrorKind::Unavailable, text)
                })?;
                sockets::set_mark(&stream, mark)?;
                Carried::Tcp(stream)
            }
        };
        let _one = self.changes.lock().await;
        // The only peer is replaced; then data that the kernel leaves on its connection has no
        // reader.
        self.stop_reading(|_| self.mode == Mode::P2p);
        let made = self.make(&words::attributes(words), carried).await;
        let way = made.inspect_err(|_| self.read_again())?;
        self.lines.peer_made();
        if self.mode == Mode::P2p {
            lock(&self.book).clear();
        }
        // Other peers may share the socket: it is marked only once this peer exists.
        if let Way::Udp(socket) = &way
            && let Err(error) = sockets::set_mark(socket.as_fd(), mark)
        {
            self.unmake(words.peer).await;
            return Err(error);
        }
        lock(&self.book).insert(words.peer, way);
        Ok(json!({}))
    }

    /// Creates a peer on the device. Returns its transport.
    async fn make(&self, attributes: &PeerAttributes, carried: Carried) -> Result<Way, ApiError> {
        let socket = match &carried {
            Carried::Udp(socket) => socket.as_fd(),
            Carried::Tcp(stream) => stream.as_fd(),
        };
        self.device.new_peer(socket, attributes).await.map_err(refused)?;
        match (carried, self.reading()) {
            (Carried::Udp(socket), _) => Ok(Way::Udp(socket)),
            // Without its connection the kernel deletes the peer again.
            (Carried::Tcp(stream), Some(reading)) => {
                Ok(Way::Tcp(Connection::new(stream, &reading).map_err(internal)?))
            }
            (Carried::Tcp(_), None) => Ok(Way::Device),
        }
    }

    /// Deletes a peer that was just created.
    async fn unmake(&self, id: u32) {
        if let Err(error) = self.device.delete_peer(id).await {
            tracing::warn!(peer = id, %error, "cannot remove a refused peer");
        }
    }

    /// The reader for packets that the kernel device leaves on sockets.
    fn reading(&self) -> Option<Reading> {
        let reading = || Reading { lines: Arc::clone(&self.lines), index: self.index };
        self.device.is_kernel().then(reading)
    }

    fn stop_reading(&self, stops: impl Fn(u32) -> bool) {
        lock(&self.book).stop_reading(stops);
    }

    fn read_again(&self) {
        if let Some(reading) = self.reading() {
            lock(&self.book).read_again(&reading);
        }
    }

    pub(super) async fn set_peer(&self, words: &PeerWords) -> Result<Value, ApiError> {
        let attributes = words::attributes(words);
        let _one = self.changes.lock().await;
        self.device.set_peer(&attributes).await.map_err(refused)?;
        Ok(json!({}))
    }

    pub(super) async fn peers(&self, id: Option<u32>) -> Result<Value, ApiError> {
        let found = match id {
            Some(id) => self.device.peer(id).await.map(|peer| vec![peer]),
            None => self.device.peers().await,
        };
        Ok(found.map_err(refused)?.iter().map(json::peer).collect())
    }

    pub(super) async fn delete_peer(&self, id: u32) -> Result<Value, ApiError> {
        let _one = self.changes.lock().await;
        // Without its peer the kernel also leaves data on a connection, which nothing must read.
        self.stop_reading(|peer| peer == id);
        if let Err(error) = self.device.delete_peer(id).await {
            if !error.is_gone() {
                self.read_again();
            }
            return Err(refused(error));
        }
        lock(&self.book).remove(id);
        Ok(json!({}))
    }

    pub(super) async fn new_key(&self, words: &KeyWords) -> Result<Value, ApiError> {
        let block = words::read_key_block(&words.key_file)?;
        let _one = self.changes.lock().await;
        let recorded = match words.allow_reused_key {
            true => None,
            false => Some(used_keys::record(&words.state_dir, &words::fingerprint(words, &block))?),
        };
        let installed = match words.epoch {
            true => self.device.new_epochs(words::epochs(words, &block)),
            false => self.device.new_key(&words::key(words, &block)).await,
        };
        installed.map_err(|error| match error {
            DataDeviceError::NoEpochs => {
                let text = "the kernel's device has no epochs: leave --epoch out, or make a device \
                            with --engine userspace";
                ApiError::new(ErrorKind::BadRequest, text)
            }
            error => refused(error),
        })?;
        if let Some(recorded) = recorded {
            recorded.keep();
        }
        Ok(json!({}))
    }

    pub(super) async fn key(&self, peer: u32, slot: Slot) -> Result<Value, ApiError> {
        let state = self.device.key(peer, slot).await.map_err(refused)?;
        Ok(json::key(peer, slot.name(), state))
    }

    pub(super) async fn swap_keys(&self, peer: u32) -> Result<Value, ApiError> {
        let _one = self.changes.lock().await;
        self.device.swap_keys(peer).await.map_err(refused)?;
        Ok(json!({}))
    }

    pub(super) async fn delete_key(&self, peer: u32, slot: Slot) -> Result<Value, ApiError> {
        let _one = self.changes.lock().await;
        self.device.delete_key(peer, slot).await.map_err(refused)?;
        Ok(json!({}))
    }

    /// Sends a packet of the control channel.
    pub(super) async fn packet(&self, peer: u32, packet: &[u8]) -> Result<Value, ApiError> {
        match &self.device {
            DataDevice::Kernel(_) => {
                let length = rules::control_packet(packet).map_err(device_refused)?;
                let remote = self.device.peer(peer).await.map_err(refused)?.remote;
                let (connection, socket) = {
                    let book = lock(&self.book);
                    (book.stream(peer), book.socket(peer))
                };
                let sent = match (connection, socket, remote) {
                    (Some(stream), ..) => {
                        let frame = [&length.to_be_bytes(), packet].concat();
                        // Entire or not at all: the kernel takes one packet a call.
                        stream.and_then(|stream| (&stream).write(&frame))
                    }
                    (None, Some(socket), Some(remote)) => socket.send_to(packet, remote),
                    _ => Err(io::ErrorKind::NotConnected.into()),
                };
                sent.map_err(|error| {
                    let text = format!("the packet was not sent: {error}");
                    ApiError::new(ErrorKind::Unavailable, text)
                })?;
            }
            DataDevice::Userspace(device) => {
                device.send_packet(peer, packet).map_err(device_refused)?;
            }
        }
        Ok(json!({}))
    }
}

/// Checks that sealed packets of this MTU fit a datagram with any transport and key, since neither
/// is known when the device is created.
fn fitting(mtu: u32) -> Result<u16, ApiError> {
    let fitting = u16::try_from(mtu).ok().filter(|mtu| *mtu <= MTU_MAX);
    fitting.ok_or_else(|| {
        let text = format!(
            "packets of an MTU of {mtu} do not fit into a datagram: give at most {MTU_MAX}"
        );
        ApiError::new(ErrorKind::BadRequest, text)
    })
}

fn refused(error: DataDeviceError) -> ApiError {
    ApiError::new(kind(error.errno()), error)
}

fn device_refused(error: DeviceError) -> ApiError {
    refused(error.into())
}

/// The meaning of a device's error number for the caller.
fn kind(errno: Option<i32>) -> ErrorKind {
    use rustix::io::Errno;
    match errno.map(Errno::from_raw_os_error) {
        Some(Errno::NOENT | Errno::NODEV) => ErrorKind::NotFound,
        Some(Errno::EXIST | Errno::ADDRINUSE | Errno::BUSY) => ErrorKind::Conflict,
        Some(Errno::INVAL | Errno::RANGE | Errno::NOTSOCK | Errno::OPNOTSUPP) => {
            ErrorKind::BadRequest
        }
        Some(Errno::AGAIN) | None => ErrorKind::Unavailable,
        Some(_) => ErrorKind::Internal,
    }
}

fn internal(error: impl std::fmt::Display) -> ApiError {
    ApiError::new(ErrorKind::Internal, error)
}

fn conflict(error: impl std::fmt::Display) -> ApiError {
    ApiError::new(ErrorKind::Conflict, error)
}

/// Another program's device, or the kernel device that a killed process has left.
fn name_taken(device: &str) -> ApiError {
    conflict(format!(
        "device {device} already exists, and no process holds it: give another name, or remove it (ip link del {device})"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_mtu_that_leaves_no_room_is_refused_with_the_largest() {
        assert_eq!(fitting(1_416).ok(), Some(1_416));
        assert_eq!(fitting(65_477).ok(), Some(65_477));
        for mtu in [65_478, 65_535, 65_536, u32::MAX] {
            let text = fitting(mtu).err().map(|error| error.error).unwrap_or_default();
            assert!(text.contains(&mtu.to_string()) && text.contains("65477"), "{text}");
        }
    }
}
