//! A device with its sockets, the kernel's or one in userspace, asked alike.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::io::{self, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::sync::broadcast;
use weft_crypto::DataCipher;
use weft_engine::dco::{Device, DeviceConfig, Event, Route};
use weft_kernel::ovpn::{OvpnClient, OvpnDeviceSpec, OvpnError, OvpnWatch, Watched};
use weft_kernel::{DeviceRoute, Kernel, KernelError};
use weft_openvpn::device::{
    CONTROL_PACKET_BYTES_MAX, DeletionReason, DeviceError, EpochAttributes, KeyAttributes,
    KeyBlock, Notice, Notification, PeerAttributes, PeerState, Side, Slot, rules,
};
use zeroize::Zeroizing;

use super::args::{Carrier, CipherWord, Engine, KeyWords, NewIface, PeerWords, SideWord};
use super::json;
use crate::api::{ApiError, ErrorKind};
use crate::task::OwnedTask;

/// Lines that wait for each listener at most; a slower one misses some and is told so.
pub(super) const LINES_MAX: usize = 4_096;
/// How long the other end of a connection may take.
const CONNECT_LIMIT: Duration = Duration::from_secs(30);
/// Pause before routes that could not be watched are watched again.
const WATCH_RETRY: Duration = Duration::from_secs(2);
const ACCEPT_PAUSE: Duration = Duration::from_millis(20);
/// Bytes of the length in front of a packet on a connection.
const LENGTH_BYTES: usize = 2;

/// A line for who listens.
#[derive(Clone, Debug)]
pub(super) struct Line {
    pub(super) is_packet: bool,
    pub(super) text: Arc<str>,
}

/// TCP connections by the peer that is reached by them.
type Connections = Arc<Mutex<BTreeMap<u32, Connection>>>;

/// A connection that the kernel's device has taken.
struct Connection {
    stream: TcpStream,
    /// Tells of the packets of the control channel that the device leaves on it.
    reader: Option<OwnedTask>,
}

pub(super) type Lines = broadcast::Sender<Line>;

/// The device.
pub(super) struct Held {
    name: String,
    index: u32,
    engine: Engine,
    device: Either,
    /// UDP sockets by the address that they were asked for; peers share them.
    sockets: Mutex<BTreeMap<SocketAddr, UdpSocket>>,
    /// Which of them each peer is reached by.
    carriers: Mutex<BTreeMap<u32, SocketAddr>>,
    lines: Lines,
}

enum Either {
    Kernel {
        client: OvpnClient,
        /// Open for as long as their peers are to live.
        connections: Connections,
    },
    Userspace(Device),
}

impl Held {
    /// Makes the device in the calling thread's network namespace.
    pub(super) async fn new(words: &NewIface, lines: Lines) -> Result<Self, ApiError> {
        let supported = weft_kernel::ovpn::support().await;
        let engine = match (words.engine, &supported) {
            (Some(engine), _) => engine,
            (None, Ok(())) => Engine::Kernel,
            (None, Err(_)) => Engine::Userspace,
        };
        let (device, index) = match engine {
            Engine::Kernel => Self::new_kernel(words, &lines).await?,
            Engine::Userspace => Self::new_userspace(words, &lines)?,
        };
        let held = Self {
            name: words.device.clone(),
            index,
            engine,
            device,
            sockets: Mutex::default(),
            carriers: Mutex::default(),
            lines,
        };
        if let Err(error) = weft_io::tun::set_mtu(&words.device, words.mtu) {
            held.end().await?;
            let text = format!("{} takes no MTU of {}: {error}", words.device, words.mtu);
            return Err(ApiError::new(ErrorKind::BadRequest, text));
        }
        Ok(held)
    }

    async fn new_kernel(words: &NewIface, lines: &Lines) -> Result<(Either, u32), ApiError> {
        let client = OvpnClient::open().await.map_err(refused)?;
        let watch = OvpnWatch::open().await.map_err(refused)?;
        let kernel = Kernel::new().map_err(internal)?;
        let spec = OvpnDeviceSpec { name: words.device.clone(), mode: words.mode, own: false };
        let device = kernel.create_ovpn_device(&spec).await.map_err(conflict)?;
        let connections = Connections::default();
        tokio::spawn(tell(watch, device.index, lines.clone(), Arc::clone(&connections)));
        Ok((Either::Kernel { client, connections }, device.index))
    }

    fn new_userspace(words: &NewIface, lines: &Lines) -> Result<(Either, u32), ApiError> {
        if weft_io::tun::index(&words.device).is_ok() {
            return Err(conflict(format!("there is a device {} already", words.device)));
        }
        let mtu = u16::try_from(words.mtu)
            .map_err(|_| ApiError::new(ErrorKind::BadRequest, "an MTU has at most 65535 bytes"))?;
        let config =
            DeviceConfig { name: words.device.clone(), mode: words.mode, mtu, offloads: true };
        let index = Arc::new(std::sync::OnceLock::new());
        let (told, of) = (lines.clone(), Arc::clone(&index));
        let events = move |event| {
            let device = of.get().copied().unwrap_or_default();
            let line = match event {
                Event::Notification(what) => line(false, &json::notice(&Notice { device, what })),
                Event::Packet { source, packet, .. } => {
                    line(true, &json::packet(device, Some(source), &packet))
                }
            };
            // Nobody may be listening.
            let _ = told.send(line);
        };
        let device = Device::open(&config, Arc::new(events)).map_err(internal)?;
        let number = weft_io::tun::index(&words.device).map_err(internal)?;
        let _ = index.set(number);
        Ok((Either::Userspace(device), number))
    }

    /// Follows the system's routes, where the device does not ask the system itself, for ever.
    pub(super) async fn follow_routes(&self) -> Infallible {
        let Either::Userspace(device) = &self.device else {
            return std::future::pending().await;
        };
        loop {
            let Err(error) = self.follow(device).await;
            tracing::warn!(%error, device = %self.name, "its routes are not followed for a moment");
            tokio::time::sleep(WATCH_RETRY).await;
        }
    }

    async fn follow(&self, device: &Device) -> Result<Infallible, KernelError> {
        let mut watch = Kernel::new()?.watch_routes(self.index)?;
        loop {
            let routes = watch.next().await?;
            let route = |route: &DeviceRoute| Route {
                destination: (route.destination.addr(), route.destination.prefix_len()),
                gateway: route.gateway,
                metric: route.metric,
            };
            device.set_routes(&routes.iter().map(route).collect::<Vec<_>>());
        }
    }

    pub(super) fn show(&self) -> Value {
        json!({"name": self.name, "ifindex": self.index, "engine": self.engine})
    }

    pub(super) async fn new_peer(
        &self,
        words: &PeerWords,
        carrier: &Carrier,
        mark: Option<u32>,
    ) -> Result<Value, ApiError> {
        let attributes = attributes(words);
        let carrier = carrier.clone();
        if let Some(local) = carrier.udp {
            let socket = self.udp(local)?;
            set_mark(&socket, mark)?;
            self.give(socket.into(), &attributes).await?;
            lock(&self.carriers).insert(words.peer, local);
            return Ok(json!({}));
        }
        let connect = move || match (carrier.tcp_connect, carrier.tcp_listen) {
            (Some(remote), _) => TcpStream::connect_timeout(&remote, CONNECT_LIMIT),
            (None, Some(local)) => accept(local),
            (None, None) => Err(io::ErrorKind::InvalidInput.into()),
        };
        let stream = tokio::task::spawn_blocking(connect).await.map_err(internal)?;
        let stream = stream.map_err(|error| {
            ApiError::new(ErrorKind::Unavailable, format!("no connection to the peer: {error}"))
        })?;
        set_mark(&stream, mark)?;
        match &self.device {
            Either::Kernel { client, connections } => {
                let made = client.new_peer(self.index, stream.as_fd(), &attributes).await;
                made.map_err(refused)?;
                let reader = Some(self.read_tcp(&stream).map_err(internal)?);
                lock(connections).insert(words.peer, Connection { stream, reader });
            }
            Either::Userspace(device) => {
                device.new_peer(stream.into(), &attributes).map_err(device_refused)?;
            }
        }
        Ok(json!({}))
    }

    /// The UDP socket that a peer is reached by.
    fn socket_of(&self, peer: u32) -> Option<UdpSocket> {
        let local = lock(&self.carriers).get(&peer).copied()?;
        lock(&self.sockets).get(&local)?.try_clone().ok()
    }

    async fn give(&self, socket: OwnedFd, attributes: &PeerAttributes) -> Result<(), ApiError> {
        match &self.device {
            Either::Kernel { client, .. } => {
                client.new_peer(self.index, socket.as_fd(), attributes).await.map_err(refused)
            }
            Either::Userspace(device) => {
                device.new_peer(socket, attributes).map_err(device_refused)
            }
        }
    }

    pub(super) async fn set_peer(&self, words: &PeerWords) -> Result<Value, ApiError> {
        let attributes = attributes(words);
        match &self.device {
            Either::Kernel { client, .. } => {
                client.set_peer(self.index, &attributes).await.map_err(refused)?;
            }
            Either::Userspace(device) => {
                device.set_peer(&attributes).map_err(device_refused)?;
            }
        }
        Ok(json!({}))
    }

    pub(super) async fn peers(&self, id: Option<u32>) -> Result<Value, ApiError> {
        let found: Vec<PeerState> = match (&self.device, id) {
            (Either::Kernel { client, .. }, Some(id)) => {
                vec![client.peer(self.index, id).await.map_err(refused)?]
            }
            (Either::Kernel { client, .. }, None) => {
                client.peers(self.index).await.map_err(refused)?
            }
            (Either::Userspace(device), Some(id)) => vec![device.peer(id).map_err(device_refused)?],
            (Either::Userspace(device), None) => device.peers(),
        };
        Ok(found.iter().map(json::peer).collect())
    }

    pub(super) async fn delete_peer(&self, id: u32) -> Result<Value, ApiError> {
        match &self.device {
            Either::Kernel { client, connections } => {
                // Without its peer the kernel leaves data on a connection, too: it is for nobody.
                let reader = lock(connections).get_mut(&id).and_then(|one| one.reader.take());
                drop(reader);
                client.delete_peer(self.index, id).await.map_err(refused)?;
                lock(connections).remove(&id);
            }
            Either::Userspace(device) => device.delete_peer(id).map_err(device_refused)?,
        }
        lock(&self.carriers).remove(&id);
        Ok(json!({}))
    }

    pub(super) async fn new_key(&self, words: &KeyWords) -> Result<Value, ApiError> {
        let block = read_key_block(&words.key_file)?;
        match (&self.device, words.epoch) {
            (Either::Kernel { client, .. }, false) => {
                client.new_key(self.index, &key(words, &block)).await.map_err(refused)?;
            }
            (Either::Userspace(device), false) => {
                device.new_key(&key(words, &block)).map_err(device_refused)?;
            }
            (Either::Userspace(device), true) => {
                device.new_epochs(epochs(words, &block)).map_err(device_refused)?;
            }
            (Either::Kernel { .. }, true) => {
                let text = "the kernel's device has no epochs: leave --epoch out, or make a device \
                            with --engine userspace";
                return Err(ApiError::new(ErrorKind::BadRequest, text));
            }
        }
        Ok(json!({}))
    }

    pub(super) async fn key(&self, peer: u32, slot: Slot) -> Result<Value, ApiError> {
        let state = match &self.device {
            Either::Kernel { client, .. } => {
                client.key(self.index, peer, slot).await.map_err(refused)?
            }
            Either::Userspace(device) => device.key(peer, slot).map_err(device_refused)?,
        };
        Ok(json::key(peer, slot.name(), state))
    }

    pub(super) async fn swap_keys(&self, peer: u32) -> Result<Value, ApiError> {
        match &self.device {
            Either::Kernel { client, .. } => {
                client.swap_keys(self.index, peer).await.map_err(refused)?;
            }
            Either::Userspace(device) => device.swap_keys(peer).map_err(device_refused)?,
        }
        Ok(json!({}))
    }

    pub(super) async fn delete_key(&self, peer: u32, slot: Slot) -> Result<Value, ApiError> {
        match &self.device {
            Either::Kernel { client, .. } => {
                client.delete_key(self.index, peer, slot).await.map_err(refused)?;
            }
            Either::Userspace(device) => device.delete_key(peer, slot).map_err(device_refused)?,
        }
        Ok(json!({}))
    }

    /// Sends a packet of the control channel.
    pub(super) async fn packet(&self, peer: u32, packet: &[u8]) -> Result<Value, ApiError> {
        match &self.device {
            Either::Kernel { client, connections } => {
                let length = rules::control_packet(packet).map_err(device_refused)?;
                let remote = client.peer(self.index, peer).await.map_err(refused)?.remote;
                let connection = lock(connections).get(&peer).map(|one| one.stream.try_clone());
                let sent = match (connection, self.socket_of(peer), remote) {
                    (Some(stream), ..) => {
                        let frame = [&length.to_be_bytes(), packet].concat();
                        // Whole or not at all: the kernel takes one packet a call.
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
            Either::Userspace(device) => {
                device.send_packet(peer, packet).map_err(device_refused)?;
            }
        }
        Ok(json!({}))
    }

    /// Removes the device; its peers are told of as they go.
    pub(super) async fn end(&self) -> Result<Value, ApiError> {
        let kernel = Kernel::new().map_err(internal)?;
        kernel.remove_ovpn_device(&self.name).await.map_err(internal)?;
        Ok(json!({}))
    }

    /// The socket with this address, opened if it is not there.
    fn udp(&self, local: SocketAddr) -> Result<UdpSocket, ApiError> {
        let open = || -> io::Result<UdpSocket> {
            let mut sockets = lock(&self.sockets);
            if let Some(socket) = sockets.get(&local) {
                return socket.try_clone();
            }
            let socket = UdpSocket::bind(local)?;
            if self.engine == Engine::Kernel {
                self.read_udp(socket.try_clone()?)?;
            }
            let clone = socket.try_clone()?;
            sockets.insert(local, socket);
            Ok(clone)
        };
        open().map_err(|error| {
            ApiError::new(
                ErrorKind::Conflict,
                format!("cannot open a UDP socket on {local}: {error}"),
            )
        })
    }

    /// Tells of what the kernel's device leaves on a socket: packets of the control channel.
    fn read_udp(&self, socket: UdpSocket) -> io::Result<()> {
        socket.set_nonblocking(true)?;
        let socket = tokio::net::UdpSocket::from_std(socket)?;
        let (lines, index) = (self.lines.clone(), self.index);
        tokio::spawn(async move {
            let mut buffer = vec![0; CONTROL_PACKET_BYTES_MAX];
            while let Ok((len, source)) = socket.recv_from(&mut buffer).await {
                let _ = lines.send(line(true, &json::packet(index, Some(source), &buffer[..len])));
            }
        });
        Ok(())
    }

    /// The same for a connection, on which each packet comes behind its length.
    fn read_tcp(&self, stream: &TcpStream) -> io::Result<OwnedTask> {
        stream.set_nonblocking(true)?;
        let (lines, index) = (self.lines.clone(), self.index);
        let remote = stream.peer_addr().ok();
        let stream = tokio::net::TcpStream::from_std(stream.try_clone()?)?;
        Ok(OwnedTask::spawn(async move {
            let mut buffer = vec![0; LENGTH_BYTES + CONTROL_PACKET_BYTES_MAX];
            loop {
                if stream.readable().await.is_err() {
                    return;
                }
                match stream.try_read(&mut buffer) {
                    Ok(len) if len > LENGTH_BYTES => {
                        let packet = json::packet(index, remote, &buffer[LENGTH_BYTES..len]);
                        let _ = lines.send(line(true, &packet));
                    }
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    // Closed, or taken from its peer.
                    Ok(_) | Err(_) => return,
                }
            }
        }))
    }
}

/// Tells of the kernel's notices about a device, and closes the connections of peers that are gone.
async fn tell(mut watch: OvpnWatch, device: u32, lines: Lines, connections: Connections) {
    loop {
        let text = match watch.next().await {
            Ok(Watched::Notice(notice)) if notice.device == device => {
                // Of the others the verb has seen to it, and the id may be another peer's by now.
                use DeletionReason::{Expired, TransportDisconnect, TransportError};
                if let Notification::PeerDeleted {
                    peer_id,
                    reason: Expired | TransportDisconnect | TransportError,
                } = notice.what
                {
                    lock(&connections).remove(&peer_id);
                }
                json::notice(&notice)
            }
            Ok(Watched::Notice(_)) => continue,
            Ok(Watched::Lost) => json!({"name": "lost", "msg": {"ifindex": device}}),
            Err(error) => {
                tracing::warn!(%error, "the device's peers are not watched any more");
                return;
            }
        };
        let _ = lines.send(line(false, &text));
    }
}

fn line(is_packet: bool, text: &Value) -> Line {
    Line { is_packet, text: text.to_string().into() }
}

fn set_mark(socket: impl AsFd, mark: Option<u32>) -> Result<(), ApiError> {
    let Some(mark) = mark else { return Ok(()) };
    weft_io::udp::set_mark(socket, mark).map_err(|error| {
        let text = format!("the socket cannot be marked: {error}; marks need CAP_NET_ADMIN");
        ApiError::new(ErrorKind::Conflict, text)
    })
}

/// Waits for one connection.
fn accept(local: SocketAddr) -> io::Result<TcpStream> {
    let listener = TcpListener::bind(local)?;
    listener.set_nonblocking(true)?;
    let deadline = Instant::now() + CONNECT_LIMIT;
    loop {
        match listener.accept() {
            Ok((stream, _)) => {
                stream.set_nonblocking(false)?;
                return Ok(stream);
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                if Instant::now() >= deadline {
                    return Err(io::ErrorKind::TimedOut.into());
                }
                std::thread::sleep(ACCEPT_PAUSE);
            }
            Err(error) => return Err(error),
        }
    }
}

fn attributes(words: &PeerWords) -> PeerAttributes {
    let mut attributes = PeerAttributes {
        id: Some(words.peer),
        tx_id: words.tx_id,
        remote_port: words.remote.map(|remote| remote.port()),
        vpn_ipv4: words.vpn_ipv4,
        vpn_ipv6: words.vpn_ipv6,
        keepalive_interval_s: words.keepalive_interval,
        keepalive_timeout_s: words.keepalive_timeout,
        ..PeerAttributes::default()
    };
    match words.remote {
        Some(SocketAddr::V4(v4)) => attributes.remote_ipv4 = Some(*v4.ip()),
        Some(SocketAddr::V6(v6)) => {
            attributes.remote_ipv6 = Some(*v6.ip());
            attributes.remote_ipv6_scope_id = Some(v6.scope_id()).filter(|scope| *scope != 0);
        }
        None => {}
    }
    attributes
}

fn read_key_block(file: &Path) -> Result<KeyBlock, ApiError> {
    let bad = |text: String| ApiError::new(ErrorKind::BadRequest, text);
    let text = std::fs::read_to_string(file).map(Zeroizing::new);
    let text = text.map_err(|error| bad(format!("cannot read {}: {error}", file.display())))?;
    KeyBlock::parse(&text).map_err(|error| bad(format!("{}: {error}", file.display())))
}

fn key(words: &KeyWords, block: &KeyBlock) -> KeyAttributes {
    let cipher = data_cipher(words.cipher);
    let (encrypt, decrypt) = block.directions(side(words.side), cipher.key_bytes());
    KeyAttributes {
        peer_id: Some(words.peer),
        slot: Some(words.slot),
        key_id: Some(words.key_id),
        cipher: Some(cipher.into()),
        encrypt: Some(encrypt),
        decrypt: Some(decrypt),
    }
}

fn epochs(words: &KeyWords, block: &KeyBlock) -> EpochAttributes {
    let (encrypt, decrypt) = block.epoch_secrets(side(words.side));
    let KeyWords { peer, slot, key_id, .. } = *words;
    let cipher = data_cipher(words.cipher);
    EpochAttributes { peer_id: peer, slot, key_id, cipher, encrypt, decrypt }
}

const fn data_cipher(word: CipherWord) -> DataCipher {
    match word {
        CipherWord::Aes128Gcm => DataCipher::Aes128Gcm,
        CipherWord::Aes192Gcm => DataCipher::Aes192Gcm,
        CipherWord::Aes256Gcm => DataCipher::Aes256Gcm,
        CipherWord::ChaCha20Poly1305 => DataCipher::ChaCha20Poly1305,
    }
}

const fn side(word: SideWord) -> Side {
    match word {
        SideWord::Client => Side::Client,
        SideWord::Server => Side::Server,
    }
}

fn refused(error: OvpnError) -> ApiError {
    ApiError::new(kind(error.errno()), error)
}

fn device_refused(error: DeviceError) -> ApiError {
    ApiError::new(kind(Some(error.errno())), error)
}

/// What an error number of a device means for who asked.
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

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
