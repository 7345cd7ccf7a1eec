//! Our two ends on sockets.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use weft_crypto::ReplayWindow;
use weft_crypto::ovpn::{OpeningKey, SealingKey};
use weft_openvpn::data::{DataPacket, OVERHEAD_BYTES, PING, Payload, PeerNumber, first_word};
use weft_openvpn::device::Slot;
use weft_openvpn::gate::{Gate, GateConfig, Gated, Refusal};
use weft_openvpn::key_method::LinkOptions;
use weft_openvpn::messages::Message;
use weft_openvpn::session::{
    Acceptance, AuthRequest, ClientOptions, DataKeys, EndReason, Event, ServerOptions, Session,
    session_of,
};
use weft_openvpn::{Opcode, frame};

use super::{STOCK_PORT, Stock};

/// How long a test waits for anything.
pub(crate) const LIMIT: Duration = Duration::from_secs(40);
/// How often our ends send a ping.
const PING_EVERY: Duration = Duration::from_millis(500);

pub(crate) fn unix_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs()
}

pub(crate) fn link(is_tcp: bool) -> LinkOptions {
    LinkOptions { is_tcp, ..LinkOptions::default() }
}

/// A key in a slot.
struct Key {
    keys: DataKeys,
    seals: SealingKey,
    opens: OpeningKey,
    window: ReplayWindow,
}

/// A session with its data channel, in which only pings travel.
pub(crate) struct End {
    pub(crate) session: Session,
    primary: Option<Key>,
    secondary: Option<Key>,
    pinged: Instant,
    /// Pings that came, and packets that could not be opened.
    pub(crate) pings: usize,
    pub(crate) unopened: usize,
    /// Key ids of the pings, in turn.
    pub(crate) key_ids: Vec<u8>,
    pub(crate) asked: VecDeque<AuthRequest>,
    pub(crate) is_connected: bool,
    pub(crate) pushed: Vec<String>,
    pub(crate) messages: Vec<Message>,
    pub(crate) ended: Option<EndReason>,
}

impl End {
    pub(crate) fn new(session: Session) -> Self {
        Self {
            session,
            primary: None,
            secondary: None,
            pinged: Instant::now(),
            pings: 0,
            unopened: 0,
            key_ids: Vec::new(),
            asked: VecDeque::new(),
            is_connected: false,
            pushed: Vec::new(),
            messages: Vec::new(),
            ended: None,
        }
    }

    /// Takes a datagram; control packets of others are passed over.
    pub(crate) fn handle(&mut self, bytes: &mut [u8]) {
        if bytes.first().is_some_and(|first| first >> 3 == Opcode::DataV2 as u8) {
            return self.open(bytes);
        }
        let _ = self.session.handle_datagram(Instant::now(), bytes);
    }

    fn open(&mut self, bytes: &mut [u8]) {
        let key_id = DataPacket::parse(bytes).unwrap().key_id;
        let slots = [&mut self.primary, &mut self.secondary];
        let mut keys = slots.into_iter().flatten();
        let opened = keys.find(|key| key.keys.key_id == key_id).and_then(|key| {
            let plain = key.opens.open(&mut key.window, bytes).ok()?;
            Some(Payload::of(&bytes[plain]) == Payload::Ping)
        });
        match opened {
            Some(is_ping) => self.pings += usize::from(is_ping),
            None => self.unopened += 1,
        }
        if self.key_ids.last() != Some(&key_id.get()) {
            self.key_ids.push(key_id.get());
        }
    }

    /// Does what is due, and returns what is to be sent.
    pub(crate) fn poll(&mut self) -> Vec<Vec<u8>> {
        let now = Instant::now();
        if self.session.poll_timeout(now).is_some_and(|at| at <= now) {
            self.session.handle_timeout(now);
        }
        while let Some(event) = self.session.poll_event() {
            match event {
                Event::Authenticate(request) => self.asked.push_back(*request),
                Event::InstallKey(slot, keys) => {
                    let key = Some(Key::new(*keys));
                    match slot {
                        Slot::Primary => self.primary = key,
                        Slot::Secondary => self.secondary = key,
                    }
                }
                Event::SwapKeys => std::mem::swap(&mut self.primary, &mut self.secondary),
                Event::RemoveSecondaryKey => self.secondary = None,
                Event::Pushed(options) => self.pushed = options,
                Event::Connected => self.is_connected = true,
                Event::Message(message) => self.messages.push(message),
                Event::Ended(reason) => self.ended = Some(reason),
            }
        }
        let transmits = std::iter::from_fn(|| self.session.poll_transmit(now));
        let mut out: Vec<Vec<u8>> = transmits.map(|transmit| transmit.bytes).collect();
        if self.is_connected && self.ended.is_none() && self.pinged.elapsed() >= PING_EVERY {
            self.pinged = now;
            out.extend(self.primary.as_ref().map(Key::ping));
        }
        out
    }
}

impl Key {
    fn new(keys: DataKeys) -> Self {
        let (encrypt, decrypt) = keys.block.directions(keys.side, keys.cipher.key_bytes());
        let seals = SealingKey::new(keys.cipher, &encrypt.cipher_key, encrypt.nonce_tail).unwrap();
        let opens = OpeningKey::new(keys.cipher, &decrypt.cipher_key, decrypt.nonce_tail).unwrap();
        Self { keys, seals, opens, window: ReplayWindow::new() }
    }

    fn ping(&self) -> Vec<u8> {
        let mut bytes = [&[0; OVERHEAD_BYTES][..], &PING].concat();
        let word = first_word(self.keys.key_id, Some(self.keys.peer));
        let mut reserved = self.seals.reserve(1, word).unwrap();
        reserved.seal_in_place(&mut bytes, PING.len()).unwrap();
        bytes
    }
}

/// A client.
pub(crate) struct Client {
    pub(crate) end: End,
    socket: Socket,
}

enum Socket {
    Udp(UdpSocket),
    Tcp(TcpStream, Vec<u8>),
}

impl Client {
    pub(crate) fn connect(proto: &str, options: ClientOptions, stock: &Stock) -> Self {
        let address = SocketAddr::from(([127, 0, 0, 1], STOCK_PORT));
        let pause = Some(Duration::from_millis(5));
        let socket = if proto == "udp" {
            let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
            socket.connect(address).unwrap();
            socket.set_read_timeout(pause).unwrap();
            Socket::Udp(socket)
        } else {
            let stream = TcpStream::connect(address).unwrap_or_else(|_| panic!("{}", stock.log()));
            stream.set_read_timeout(pause).unwrap();
            Socket::Tcp(stream, Vec::new())
        };
        let session = Session::connect(Instant::now(), unix_s(), options, address, &[9; 32]);
        Self { end: End::new(session.unwrap()), socket }
    }

    /// Goes on until `done`; fails with the server's log after too long.
    pub(crate) fn run(&mut self, stock: &Stock, what: &str, done: impl Fn(&End) -> bool) {
        let began = Instant::now();
        while !done(&self.end) {
            let ended = &self.end.ended;
            let log = || stock.log();
            assert!(began.elapsed() < LIMIT, "{what}: ended: {ended:?}, log:\n{}", log());
            self.step();
        }
    }

    fn step(&mut self) {
        let mut buffer = [0; 4_096];
        for bytes in self.end.poll() {
            match &mut self.socket {
                Socket::Udp(socket) => {
                    let _ = socket.send(&bytes);
                }
                Socket::Tcp(stream, _) => {
                    let mut framed = Vec::new();
                    frame::write(&bytes, &mut framed).unwrap();
                    let _ = stream.write_all(&framed);
                }
            }
        }
        match &mut self.socket {
            Socket::Udp(socket) => {
                if let Ok(length) = socket.recv(&mut buffer) {
                    self.end.handle(&mut buffer[..length]);
                }
            }
            Socket::Tcp(stream, held) => {
                if let Ok(length) = stream.read(&mut buffer) {
                    held.extend_from_slice(&buffer[..length]);
                }
                for mut packet in frames(held) {
                    self.end.handle(&mut packet);
                }
            }
        }
    }
}

/// Takes the packets that are whole out of a stream.
fn frames(held: &mut Vec<u8>) -> Vec<Vec<u8>> {
    let mut packets = Vec::new();
    while let Some((packet, rest)) = frame::split(held, 2_048).unwrap() {
        packets.push(packet.to_vec());
        *held = rest.to_vec();
    }
    packets
}

/// What our server does with a client that asks.
pub(crate) enum Decision {
    /// Lets it in, with these options.
    Accept(Vec<String>),
    /// Leaves it to the test.
    ByHand,
}

/// A server for one client at a time.
pub(crate) struct Server {
    gate: Gate,
    options: Arc<ServerOptions>,
    decision: Decision,
    udp: UdpSocket,
    tcp: TcpListener,
    stream: Option<(TcpStream, Vec<u8>)>,
    remote: Option<SocketAddr>,
    pub(crate) end: Option<End>,
    /// Sessions so far.
    pub(crate) sessions: usize,
    pub(crate) refused: Vec<Refusal>,
}

impl Server {
    pub(crate) fn new(gate: GateConfig, options: ServerOptions, decision: Decision) -> Self {
        let udp = UdpSocket::bind("127.0.0.1:0").unwrap();
        udp.set_read_timeout(Some(Duration::from_millis(5))).unwrap();
        let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
        tcp.set_nonblocking(true).unwrap();
        Self {
            gate: Gate::new(Instant::now(), gate, &[0x5a; 32]),
            options: Arc::new(options),
            decision,
            udp,
            tcp,
            stream: None,
            remote: None,
            end: None,
            sessions: 0,
            refused: Vec::new(),
        }
    }

    pub(crate) fn port(&self, proto: &str) -> u16 {
        match proto {
            "udp" => self.udp.local_addr().unwrap().port(),
            _ => self.tcp.local_addr().unwrap().port(),
        }
    }

    pub(crate) fn end(&mut self) -> &mut End {
        self.end.as_mut().unwrap()
    }

    /// Serves until `done`; fails with the client's log after too long.
    pub(crate) fn run(&mut self, stock: &Stock, what: &str, done: impl Fn(&Self) -> bool) {
        let began = Instant::now();
        while !done(self) {
            let reason = self.end.as_ref().map(|end| &end.ended);
            assert!(
                began.elapsed() < LIMIT,
                "{what}: not within {LIMIT:?}; ended: {reason:?}, refused: {:?}, log:\n{}",
                self.refused,
                stock.log()
            );
            self.step();
        }
    }

    fn step(&mut self) {
        let mut buffer = [0; 4_096];
        match self.udp.recv_from(&mut buffer) {
            Ok((length, remote)) => self.handle_datagram(remote, &mut buffer[..length]),
            Err(error) => {
                // A machine that is frozen for a moment interrupts it.
                let none = [ErrorKind::WouldBlock, ErrorKind::TimedOut, ErrorKind::Interrupted];
                assert!(none.contains(&error.kind()), "{error:?}");
            }
        }
        self.read_stream();
        self.decide();
        let Some(end) = &mut self.end else { return };
        for bytes in end.poll() {
            if let Some((stream, _)) = &mut self.stream {
                let mut framed = Vec::new();
                frame::write(&bytes, &mut framed).unwrap();
                let _ = stream.write_all(&framed);
            } else if let Some(remote) = self.remote {
                self.udp.send_to(&bytes, remote).unwrap();
            }
        }
    }

    fn decide(&mut self) {
        let Decision::Accept(options) = &self.decision else { return };
        let Some(end) = &mut self.end else { return };
        if end.asked.pop_front().is_some() {
            let peer = PeerNumber::new(7).unwrap();
            let acceptance = Acceptance { peer, options: options.clone() };
            end.session.accept(Instant::now(), acceptance).unwrap();
        }
    }

    fn handle_datagram(&mut self, remote: SocketAddr, bytes: &mut [u8]) {
        let is_data = bytes.first().is_some_and(|first| first >> 3 == Opcode::DataV2 as u8);
        if let Some(end) = self.end.as_mut().filter(|_| self.remote == Some(remote))
            && (is_data || session_of(bytes) == end.session.remote())
        {
            return end.handle(bytes);
        }
        match self.gate.handle_datagram(Instant::now(), unix_s(), remote, bytes) {
            Ok(Gated::Answer(answer)) => {
                self.udp.send_to(&answer, remote).unwrap();
            }
            Ok(Gated::Admit(admission)) => {
                self.remote = Some(remote);
                self.admit(*admission, remote);
            }
            Err(refusal) => self.refused.push(refusal),
        }
    }

    fn admit(&mut self, admission: weft_openvpn::gate::Admission, remote: SocketAddr) {
        self.sessions += 1;
        let (now, seed) = (Instant::now(), [self.sessions as u8; 32]);
        let options = self.options.clone();
        let session = Session::admit(now, unix_s(), admission, options, remote, &seed);
        self.end = Some(End::new(session.unwrap()));
    }

    fn read_stream(&mut self) {
        if let Ok((stream, remote)) = self.tcp.accept() {
            stream.set_nonblocking(true).unwrap();
            self.stream = Some((stream, Vec::new()));
            (self.remote, self.end) = (Some(remote), None);
        }
        let (Some((stream, held)), Some(remote)) = (&mut self.stream, self.remote) else { return };
        let mut buffer = [0; 4_096];
        if let Ok(length) = stream.read(&mut buffer) {
            held.extend_from_slice(&buffer[..length]);
        }
        for mut packet in frames(held) {
            if let Some(end) = &mut self.end {
                end.handle(&mut packet);
                continue;
            }
            match self.gate.handle_stream(Instant::now(), unix_s(), [6; 8], &packet) {
                Ok(admission) => self.admit(admission, remote),
                Err(refusal) => self.refused.push(refusal),
            }
        }
    }
}
