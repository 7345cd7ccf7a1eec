//! The sockets of the service: queries come in by UDP and TCP, questions go out to upstream servers.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ipnet::IpNet;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::{timeout, timeout_at};

use super::answer::{QUERY_BYTES_MAX, STREAM_BYTES_MAX};
use super::cache::Said;
use super::counters::{Counter, Counters};
use super::exchange::{EXCHANGE_LIMIT_MS, Exchange, Try, Verdict};
use super::throttle::{Throttle, client_of};
use super::zone::{Scope, Zone};

/// Connections of all clients to one listener.
pub(crate) const CONNECTIONS_MAX: usize = 256;
/// Connections of one client.
pub(crate) const CONNECTIONS_PER_CLIENT_MAX: usize = 16;
/// How long a connection may be silent between two queries or in the middle of one, in milliseconds.
const CONNECTION_IDLE_MS: u64 = 10_000;
/// How long a client may take to read an answer, in milliseconds.
const WRITE_LIMIT_MS: u64 = 5_000;
/// Pause after an error of a socket that may pass, in milliseconds.
const ERROR_PAUSE_MS: u64 = 100;
/// The longest answer of an upstream server by UDP that is read, in bytes; it is asked for less.
const REPLY_BYTES_MAX: usize = 4_096;
/// Answers of one server that do not belong to the question, after which the server counts as silent: somebody
/// may be guessing.
const MISMATCHES_MAX: usize = 64;

/// An address on which queries are answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Listener {
    /// The address and port.
    pub(crate) address: SocketAddr,
    /// The names that its clients see.
    pub(crate) scope: Scope,
    /// Sources that are served besides those in the ranges of the scope.
    pub(crate) clients: Vec<IpNet>,
    /// Whether names of others are looked up for its clients; not on an internal network.
    pub(crate) forwards: bool,
    /// Whether `weft expose` gave the host this address.
    pub(crate) is_exposed: bool,
}

impl Listener {
    /// The warning that it cannot be opened.
    pub(crate) fn refused(&self, error: &io::Error) -> String {
        let Self { address, is_exposed, .. } = self;
        let port = address.port();
        let remedy = match is_exposed {
            true => format!(
                "another program answers there (ss -lunp sport = :{port}): keep it from {} (dnsmasq: except-interface, named: listen-on), or weft hide",
                address.ip()
            ),
            false => format!(
                "give --dns-listen an address of this host whose port is free (ss -lunp sport = :{port})"
            ),
        };
        format!("cannot answer DNS on {address}: {error}; {remedy}")
    }
}

/// The source of a query.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Client {
    /// Its name in tables of clients.
    pub(crate) key: IpAddr,
    /// Whether the listener serves it.
    pub(crate) is_served: bool,
}

/// A query that came in.
#[derive(Debug)]
pub(crate) struct Incoming {
    pub(crate) bytes: Vec<u8>,
    pub(crate) client: Client,
    pub(crate) listener: Arc<Listener>,
    pub(crate) back: Back,
}

/// The way back to a client.
#[derive(Debug)]
pub(crate) enum Back {
    /// A datagram.
    Udp(Arc<UdpSocket>, SocketAddr),
    /// A connection, which ends if no answer comes.
    Tcp(oneshot::Sender<Vec<u8>>),
}

impl Back {
    /// Sends an answer. One that a full socket does not take is lost, as any datagram may be.
    pub(crate) fn send(self, bytes: Vec<u8>, counters: &Counters) {
        let sent = match self {
            Self::Udp(socket, to) => socket.try_send_to(&bytes, to).is_ok(),
            Self::Tcp(back) => back.send(bytes).is_ok(),
        };
        if !sent {
            counters.count(Counter::Unsent);
        }
    }
}

/// The state that listeners share.
#[derive(Clone, Debug)]
pub(crate) struct Intake {
    pub(crate) queue: mpsc::Sender<Incoming>,
    pub(crate) throttle: Arc<Mutex<Throttle>>,
    pub(crate) counters: Counters,
    pub(crate) zone: watch::Receiver<Arc<Zone>>,
}

impl Intake {
    fn client(&self, listener: &Listener, source: IpAddr) -> Client {
        let source = source.to_canonical();
        let zone = self.zone.borrow();
        let is_served = listener.clients.iter().any(|net| net.contains(&source))
            || zone.has_in_range(&listener.scope, source);
        Client { key: client_of(source, zone.is_container(source)), is_served }
    }

    fn admits(&self, client: Client) -> bool {
        let mut throttle = self.throttle.lock().unwrap_or_else(PoisonError::into_inner);
        let admitted = throttle.admit(Instant::now(), client.key);
        if !admitted {
            self.counters.count(Counter::RateLimited);
        }
        admitted
    }
}

/// Both sockets of a listener.
pub(crate) async fn bind(address: SocketAddr) -> io::Result<(UdpSocket, TcpListener)> {
    let tcp = TcpListener::bind(address).await?;
    // A test asks for any port: both have the same.
    let udp = UdpSocket::bind(tcp.local_addr()?).await?;
    Ok((udp, tcp))
}

/// A listener as it is now. All but its address may change.
type Current = watch::Receiver<Arc<Listener>>;

/// Receives queries until a socket fails.
pub(crate) async fn listen(
    (udp, tcp): (UdpSocket, TcpListener),
    current: Current,
    intake: Intake,
) -> io::Error {
    tokio::select! {
        error = receive(Arc::new(udp), current.clone(), intake.clone()) => error,
        error = accept(tcp, current, intake) => error,
    }
}

async fn receive(socket: Arc<UdpSocket>, current: Current, intake: Intake) -> io::Error {
    let mut buffer = vec![0; QUERY_BYTES_MAX + 1];
    loop {
        let (length, from) = match socket.recv_from(&mut buffer).await {
            Ok(received) => received,
            Err(error) if passes(&error) => {
                tokio::time::sleep(Duration::from_millis(ERROR_PAUSE_MS)).await;
                continue;
            }
            Err(error) => return error,
        };
        let listener = Arc::clone(&current.borrow());
        let client = intake.client(&listener, from.ip());
        let Some(bytes) = buffer.get(..length).filter(|_| length <= QUERY_BYTES_MAX) else {
            intake.counters.count(Counter::Malformed);
            continue;
        };
        // A port of 0 cannot be answered.
        if from.port() == 0 || !intake.admits(client) {
            continue;
        }
        let back = Back::Udp(Arc::clone(&socket), from);
        let incoming = Incoming { bytes: bytes.to_vec(), client, listener, back };
        if intake.queue.try_send(incoming).is_err() {
            intake.counters.count(Counter::Overloaded);
        }
    }
}

async fn accept(socket: TcpListener, current: Current, intake: Intake) -> io::Error {
    let mut open: JoinSet<IpAddr> = JoinSet::new();
    let mut clients: BTreeMap<IpAddr, usize> = BTreeMap::new();
    loop {
        let accepted = tokio::select! {
            Some(ended) = open.join_next() => {
                if let Ok(client) = ended
                    && let Some(count) = clients.get_mut(&client)
                {
                    *count -= 1;
                    if *count == 0 {
                        clients.remove(&client);
                    }
                }
                continue;
            }
            accepted = socket.accept() => accepted,
        };
        let (stream, from) = match accepted {
            Ok(accepted) => accepted,
            Err(error) if passes(&error) => {
                tokio::time::sleep(Duration::from_millis(ERROR_PAUSE_MS)).await;
                continue;
            }
            Err(error) => return error,
        };
        let client = intake.client(&current.borrow(), from.ip());
        // Strangers take no place of a client.
        if !client.is_served {
            intake.counters.count(Counter::Strangers);
            continue;
        }
        let count = clients.get(&client.key).copied().unwrap_or_default();
        if open.len() >= CONNECTIONS_MAX || count >= CONNECTIONS_PER_CLIENT_MAX {
            intake.counters.count(Counter::Overloaded);
            continue;
        }
        clients.insert(client.key, count + 1);
        let (current, intake) = (current.clone(), intake.clone());
        open.spawn(async move {
            // A client that ends its connection is no error.
            let _ = converse(stream, from.ip(), current, intake).await;
            client.key
        });
    }
}

/// Answers the queries of one connection, one after the other.
async fn converse(
    mut stream: TcpStream,
    source: IpAddr,
    current: Current,
    intake: Intake,
) -> io::Result<()> {
    let idle = Duration::from_millis(CONNECTION_IDLE_MS);
    loop {
        let bytes = timeout(idle, read_message(&mut stream, QUERY_BYTES_MAX)).await??;
        let listener = Arc::clone(&current.borrow());
        let client = intake.client(&listener, source);
        if !client.is_served {
            intake.counters.count(Counter::Strangers);
            return Ok(());
        }
        if !intake.admits(client) {
            return Ok(());
        }
        let (back, answer) = oneshot::channel();
        let incoming = Incoming { bytes, client, listener, back: Back::Tcp(back) };
        if intake.queue.try_send(incoming).is_err() {
            intake.counters.count(Counter::Overloaded);
            return Ok(());
        }
        let limit = Duration::from_millis(EXCHANGE_LIMIT_MS * 2);
        let Ok(Ok(answer)) = timeout(limit, answer).await else { return Ok(()) };
        let limit = Duration::from_millis(WRITE_LIMIT_MS);
        timeout(limit, write_message(&mut stream, &answer)).await??;
    }
}

/// The answer of an upstream server.
#[derive(Debug)]
pub(crate) struct Heard {
    pub(crate) said: Said,
    pub(crate) server: SocketAddr,
    /// Whether another server was silent before.
    pub(crate) after_silence: bool,
}

/// Asks servers until one answers.
pub(crate) async fn ask(mut exchange: Exchange, counters: Counters) -> Option<Heard> {
    while let Some(attempt) = exchange.next(Instant::now()) {
        let until = attempt.until.into();
        match timeout_at(until, ask_once(&mut exchange, &attempt, &counters)).await {
            Ok(Ok(Some(said))) => {
                let after_silence = exchange.has_silent_server();
                return Some(Heard { said, server: attempt.to, after_silence });
            }
            Ok(Ok(None)) => {}
            Ok(Err(_)) | Err(_) => exchange.handle_failure(),
        }
    }
    None
}

/// Asks one server; `None`: the exchange says how to go on.
async fn ask_once(
    exchange: &mut Exchange,
    attempt: &Try,
    counters: &Counters,
) -> io::Result<Option<Said>> {
    if attempt.tcp {
        let mut stream = TcpStream::connect(attempt.to).await?;
        write_message(&mut stream, &attempt.bytes).await?;
        let bytes = read_message(&mut stream, STREAM_BYTES_MAX).await?;
        return match exchange.handle_answer(&bytes) {
            Verdict::Done(said) => Ok(Some(*said)),
            Verdict::Again => Ok(None),
            Verdict::Mismatch => Err(mismatch(counters)),
        };
    }
    // A socket for each question has a random port, and a connected one takes answers of that server alone.
    let any: IpAddr = match attempt.to {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let socket = UdpSocket::bind((any, 0)).await?;
    socket.connect(attempt.to).await?;
    socket.send(&attempt.bytes).await?;
    let mut buffer = vec![0; REPLY_BYTES_MAX];
    for _ in 0..MISMATCHES_MAX {
        let length = socket.recv(&mut buffer).await?;
        match exchange.handle_answer(buffer.get(..length).unwrap_or_default()) {
            Verdict::Done(said) => return Ok(Some(*said)),
            Verdict::Again => return Ok(None),
            Verdict::Mismatch => {
                mismatch(counters);
            }
        }
    }
    Err(io::ErrorKind::InvalidData.into())
}

fn mismatch(counters: &Counters) -> io::Error {
    counters.count(Counter::Mismatched);
    io::ErrorKind::InvalidData.into()
}

/// Reads one message with its length before it (RFC 1035 section 4.2.2).
async fn read_message(stream: &mut TcpStream, most: usize) -> io::Result<Vec<u8>> {
    let length = usize::from(stream.read_u16().await?);
    if length > most {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut bytes = vec![0; length];
    stream.read_exact(&mut bytes).await?;
    Ok(bytes)
}

async fn write_message(stream: &mut TcpStream, message: &[u8]) -> io::Result<()> {
    let length = u16::try_from(message.len()).map_err(|_| io::ErrorKind::InvalidData)?;
    let framed = [&length.to_be_bytes(), message].concat();
    stream.write_all(&framed).await
}

/// Whether a socket works on after an error: one client's, or a lack of something for now.
fn passes(error: &io::Error) -> bool {
    use rustix::io::Errno;
    let lasting = [Errno::BADF, Errno::NOTSOCK, Errno::INVAL, Errno::NOTCONN, Errno::OPNOTSUPP];
    !error.raw_os_error().is_some_and(|code| lasting.contains(&Errno::from_raw_os_error(code)))
}
