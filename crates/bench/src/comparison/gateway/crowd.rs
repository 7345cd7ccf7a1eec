//! Clients of the benchmark's own, many in one thread: whole handshakes up to the pushed options, one after the other,
//! or clients that stay connected and do nothing but ping.

use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde::{Deserialize, Serialize};
use weft_crypto::DataCipher;
use weft_crypto::ovpn::SealingKey;
use weft_io::poller::Poller;
use weft_openvpn::data::{self, FIRST_WORD_BYTES, OVERHEAD_BYTES, PING};
use weft_openvpn::device::Slot;
use weft_openvpn::key_method::PeerInfo;
use weft_openvpn::session::{ClientOptions, DataKeys, Event, Session, Timing, session_of};

use super::super::stats;
use super::credentials::Crowd;

/// Descriptors beside those of the clients' sockets.
const DESCRIPTORS_SPARE: u64 = 64;
/// The longest datagram that is read, in bytes.
const DATAGRAM_BYTES_MAX: usize = 2_048;
/// How often all clients are looked at.
const LOOK: Duration = Duration::from_millis(100);
/// How often a client that stays pings, in seconds: the interval that both servers ask for.
const PING_S: f64 = 10.0;
/// A handshake that takes longer has failed.
const HANDSHAKE_MAX: Duration = Duration::from_secs(20);
/// The longest time without any client that gets its options.
const STALL_MAX: Duration = Duration::from_secs(30);

/// How handshakes went.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct HandshakesResult {
    /// Clients that got their options.
    pub done: u64,
    /// Clients that were refused or got no answer.
    pub failed: u64,
    /// Time taken.
    pub seconds: f64,
    /// The median from the first packet to the options, in milliseconds.
    pub p50_ms: f64,
}

/// How clients that stay fared.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct StayResult {
    /// Clients that are connected.
    pub connected: usize,
    /// Handshakes that had to be tried again.
    pub failed: u64,
    /// Time since the first packet.
    pub seconds: f64,
    /// Data packets that came from the server, as its pings are.
    pub data_packets: u64,
}

/// Connects clients one after the other, some at a time, for so long. A name that comes again has the servers end its
/// session before.
///
/// # Errors
/// Returns an error if no client can connect.
pub(super) fn handshakes(
    directory: &Path,
    server: SocketAddr,
    (clients, in_flight): (usize, usize),
    length: Duration,
) -> anyhow::Result<HandshakesResult> {
    let crowd = Crowd::read(directory, 0, clients)?;
    let mut ends = Ends::new(&crowd, server, in_flight.min(clients))?;
    let mut numbers = (0..clients).cycle();
    let (mut result, mut times) = (HandshakesResult::default(), Vec::new());
    let begun = Instant::now();
    let mut last_end = begun;
    for token in 0..ends.all.len() {
        ends.begin(token, numbers.next().unwrap_or_default())?;
    }
    while begun.elapsed() < length {
        for token in ends.turn()? {
            match ends.take_outcome(token) {
                Some(Outcome::Connected(took)) => {
                    (result.done, last_end) = (result.done + 1, Instant::now());
                    times.push(took.as_secs_f64() * 1e3);
                }
                Some(Outcome::Failed) => result.failed += 1,
                None => continue,
            }
            ends.begin(token, numbers.next().unwrap_or_default())?;
        }
        anyhow::ensure!(last_end.elapsed() < STALL_MAX, "no client gets its options of {server}");
    }
    result.seconds = begun.elapsed().as_secs_f64();
    result.p50_ms = stats::median(&times).unwrap_or_default();
    Ok(result)
}

/// Connects clients, tells that they are, lets them ping for so long, and tells how many are connected still.
///
/// # Errors
/// Returns an error if a client cannot connect.
pub(super) fn stay(
    directory: &Path,
    server: SocketAddr,
    (clients, in_flight): (usize, usize),
    length: Duration,
    tell: impl Fn(&StayResult) -> io::Result<()>,
) -> anyhow::Result<()> {
    let crowd = Crowd::read(directory, 0, clients)?;
    let mut ends = Ends::new(&crowd, server, clients)?;
    let begun = Instant::now();
    let mut result = StayResult::default();
    let (mut next, mut last_end) = (0, begun);
    while result.connected < clients {
        while next < clients && next - result.connected < in_flight {
            ends.begin(next, next)?;
            next += 1;
        }
        ends.ping_some(begun.elapsed());
        for token in ends.turn()? {
            match ends.take_outcome(token) {
                Some(Outcome::Connected(_)) => {
                    (result.connected, last_end) = (result.connected + 1, Instant::now());
                }
                Some(Outcome::Failed) => {
                    result.failed += 1;
                    ends.begin(token, token)?;
                }
                None => {}
            }
        }
        anyhow::ensure!(last_end.elapsed() < STALL_MAX, "no client gets its options of {server}");
    }
    result.seconds = begun.elapsed().as_secs_f64();
    tell(&result)?;
    let connected = Instant::now();
    while connected.elapsed() < length {
        ends.turn()?;
        ends.ping_some(begun.elapsed());
    }
    result.seconds = begun.elapsed().as_secs_f64();
    result.connected = ends.all.iter().flatten().filter(|end| end.is_connected()).count();
    result.data_packets = ends.data_packets;
    Ok(tell(&result)?)
}

/// The clients, by token.
struct Ends<'a> {
    crowd: &'a Crowd,
    server: SocketAddr,
    poller: Poller,
    all: Vec<Option<End>>,
    looked_at: Instant,
    /// Pings that have been due in all.
    pinged: usize,
    data_packets: u64,
}

/// One client.
struct End {
    session: Session,
    socket: UdpSocket,
    begun: Instant,
    sealing: Option<(SealingKey, [u8; FIRST_WORD_BYTES])>,
    state: State,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum State {
    UnderWay,
    /// The options came after this time.
    Connected(Duration),
    /// The same, and it was told.
    Told,
    Over,
}

/// How a handshake ended.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Outcome {
    Connected(Duration),
    Failed,
}

impl<'a> Ends<'a> {
    fn new(crowd: &'a Crowd, server: SocketAddr, max: usize) -> anyhow::Result<Self> {
        let wanted = max as u64 + DESCRIPTORS_SPARE;
        let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
        if current.is_some_and(|current| current < wanted) {
            let maximum = maximum.map(|maximum| maximum.max(wanted));
            setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), maximum })?;
        }
        Ok(Self {
            crowd,
            server,
            poller: Poller::new()?,
            all: (0..max).map(|_| None).collect(),
            looked_at: Instant::now(),
            pinged: 0,
            data_packets: 0,
        })
    }

    /// Begins a client from a new port, in the place of the one before, whose socket is closed.
    fn begin(&mut self, token: usize, number: usize) -> anyhow::Result<()> {
        let (now, unix_s) = (Instant::now(), SystemTime::now().duration_since(UNIX_EPOCH)?);
        let (options, seed) = (options(self.crowd, number), rand::random());
        let session = Session::connect(now, unix_s.as_secs(), options, self.server, &seed)?;
        let any = if self.server.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
        let socket = UdpSocket::bind(any)?;
        socket.connect(self.server)?;
        socket.set_nonblocking(true)?;
        self.poller.add(&socket, token as u64)?;
        let mut end = End { session, socket, begun: now, sealing: None, state: State::UnderWay };
        end.send(now);
        self.all[token] = Some(end);
        Ok(())
    }

    /// Waits for datagrams and handles what came. Returns the clients that may have got further.
    fn turn(&mut self) -> io::Result<Vec<usize>> {
        let ready = self.poller.wait(Some(LOOK))?;
        let ready: Vec<usize> = ready.map(|token| token as usize).collect();
        for token in &ready {
            if let Some(end) = self.all.get_mut(*token).and_then(Option::as_mut) {
                self.data_packets += end.receive();
            }
        }
        if self.looked_at.elapsed() < LOOK {
            return Ok(ready);
        }
        self.looked_at = Instant::now();
        self.all.iter_mut().flatten().for_each(End::look);
        Ok((0..self.all.len()).collect())
    }

    /// How a client's handshake ended, once.
    fn take_outcome(&mut self, token: usize) -> Option<Outcome> {
        let end = self.all.get_mut(token)?.as_mut()?;
        match end.state {
            State::UnderWay | State::Told => None,
            State::Connected(took) => {
                end.state = State::Told;
                Some(Outcome::Connected(took))
            }
            State::Over => {
                self.all[token] = None;
                Some(Outcome::Failed)
            }
        }
    }

    /// Sends the pings that are due, evenly over the interval.
    fn ping_some(&mut self, since: Duration) {
        let due = since.as_secs_f64() / PING_S * self.all.len() as f64;
        while self.pinged < due as usize {
            let token = self.pinged % self.all.len();
            if let Some(end) = self.all.get_mut(token).and_then(Option::as_mut) {
                end.ping();
            }
            self.pinged += 1;
        }
    }
}

impl End {
    const fn is_connected(&self) -> bool {
        matches!(self.state, State::Connected(_) | State::Told)
    }

    /// Handles all datagrams that have come. Returns how many were data packets.
    fn receive(&mut self) -> u64 {
        let mut buffer = [0; DATAGRAM_BYTES_MAX];
        let mut data = 0;
        loop {
            let length = match self.socket.recv(&mut buffer) {
                Ok(length) => length,
                // The answer to an earlier datagram.
                Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => continue,
                Err(_) => break,
            };
            let bytes = &buffer[..length];
            if session_of(bytes).is_none() {
                data += 1;
                continue;
            }
            let now = Instant::now();
            // A packet that is dropped comes again.
            let _ = self.session.handle_datagram(now, bytes);
            self.follow(now);
        }
        data
    }

    /// Looks after a client that may have waited too long.
    fn look(&mut self) {
        let now = Instant::now();
        if self.state == State::UnderWay && self.begun.elapsed() > HANDSHAKE_MAX {
            self.state = State::Over;
        }
        if self.session.poll_timeout(now).is_some_and(|at| at <= now) {
            self.session.handle_timeout(now);
            self.follow(now);
        }
    }

    /// Does what the session asks for.
    fn follow(&mut self, now: Instant) {
        while let Some(event) = self.session.poll_event() {
            match event {
                Event::InstallKey(Slot::Primary, keys) => self.sealing = sealing(&keys),
                Event::Connected => self.state = State::Connected(now - self.begun),
                Event::Ended(_) => self.state = State::Over,
                _ => {}
            }
        }
        self.send(now);
    }

    fn send(&mut self, now: Instant) {
        while let Some(transmit) = self.session.poll_transmit(now) {
            // The session sends lost packets again.
            let _ = self.socket.send(&transmit.bytes);
        }
    }

    fn ping(&mut self) {
        let Some((key, first_word)) = &self.sealing else { return };
        let mut packet = [0; OVERHEAD_BYTES + PING.len()];
        packet[OVERHEAD_BYTES..].copy_from_slice(&PING);
        let reserved = key.reserve(1, *first_word);
        let sealed = reserved.and_then(|mut one| one.seal_in_place(&mut packet, PING.len()));
        if sealed.is_ok() {
            let _ = self.socket.send(&packet);
        }
    }
}

/// The key that seals pings, with the beginning of their packets.
fn sealing(keys: &DataKeys) -> Option<(SealingKey, [u8; FIRST_WORD_BYTES])> {
    let direction = keys.attributes(keys.peer.get(), Slot::Primary).encrypt?;
    let key = SealingKey::new(keys.cipher, &direction.cipher_key, direction.nonce_tail).ok()?;
    Some((key, data::first_word(keys.key_id, Some(keys.peer))))
}

/// What a client offers: the same as a stock one, but for its one cipher.
pub(super) fn options(crowd: &Crowd, number: usize) -> ClientOptions {
    let (tls, wrap) = (crowd.tls[number].clone(), crowd.wrap.clone());
    ClientOptions {
        timing: Timing { renegotiate_after: None, ..Timing::default() },
        ciphers: vec![DataCipher::Aes256Gcm],
        peer_info: PeerInfo::parse("IV_VER=2.6.14\nIV_PLAT=linux\nIV_MTU=1600\n"),
        client_key: Some(crowd.client_key.clone()),
        ..ClientOptions::new(tls, crowd.server_name.clone(), wrap)
    }
}
