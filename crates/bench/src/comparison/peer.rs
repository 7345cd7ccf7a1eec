//! The benchmark's own traffic: one-byte requests and answers over TCP, and floods of equal UDP datagrams. Each
//! part is a hidden subcommand, so that it can run inside a namespace. Each result is one line of JSON on standard
//! output.

use std::io::{self, IoSlice, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::time::{Duration, Instant};

use rustix::net::{MMsgHdr, SendAncillaryBuffer, SendFlags};
use serde::{Deserialize, Serialize};
use weft_io::uninterrupted;

use super::gateway::{self, CrowdCommand};
use super::stats::Histogram;

/// Datagrams given to the kernel in one call; a burst of the paced sender is never longer.
const BURST_MAX: usize = 32;
/// How far a paced sender may fall behind before it forgets the debt instead of bursting.
const DEBT_MAX_US: u64 = 500;
/// A trial of the sink ends when no datagram came for so long.
const SINK_IDLE_MS: u64 = 150;
/// The sink's socket buffer, in bytes: the same for every row.
const SINK_BUFFER_BYTES: usize = 4 * 1024 * 1024;
/// The largest datagram that the flood sends, in bytes.
const DATAGRAM_BYTES_MAX: usize = 60_000;
/// The longest run of a client, in seconds.
const RUN_SECONDS_MAX: f64 = 3_600.0;
/// How long the client waits for an answer before it gives up.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);
/// Round trips that warm the connection and are not counted.
const WARM_UP_ROUNDS: u32 = 200;

/// One end of a measurement (used by `./dev bench`, inside its namespaces).
#[derive(Debug, Clone, clap::Subcommand)]
pub enum PeerCommand {
    /// Answers each byte received over TCP with one byte
    RrServer {
        /// Address and port to listen on
        #[arg(long)]
        bind: SocketAddr,
    },
    /// Sends one byte, waits for the answer, and counts the round trips
    RrClient {
        /// The server's address and port
        #[arg(long)]
        connect: SocketAddr,
        /// Duration in seconds
        #[arg(long, default_value_t = 2.0)]
        seconds: f64,
    },
    /// Counts datagrams and prints one line per run
    UdpSink {
        /// Address and port to listen on
        #[arg(long)]
        bind: SocketAddr,
    },
    /// Sends equal datagrams as fast as possible or at a given rate
    UdpFlood {
        /// The sink's address and port
        #[arg(long)]
        connect: SocketAddr,
        /// Payload of a datagram in bytes
        #[arg(long, default_value_t = 64)]
        size: usize,
        /// Duration in seconds
        #[arg(long, default_value_t = 1.0)]
        seconds: f64,
        /// Datagrams per second; 0 for no limit
        #[arg(long, default_value_t = 0.0)]
        rate: f64,
    },
    /// Clients of an OpenVPN server
    #[command(flatten)]
    Crowd(CrowdCommand),
}

/// The result of an `rr-client`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RrResult {
    /// Requests answered.
    pub transactions: u64,
    /// Time taken.
    pub seconds: f64,
    /// Median round-trip time in microseconds.
    pub p50_us: f64,
    /// The 99th percentile in microseconds.
    pub p99_us: f64,
}

impl RrResult {
    /// Transactions a second.
    #[must_use]
    pub fn per_second(&self) -> f64 {
        self.transactions as f64 / self.seconds
    }
}

/// The result of a `udp-flood`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FloodResult {
    /// Datagrams that the kernel took.
    pub sent: u64,
    /// Time taken.
    pub seconds: f64,
}

/// The result of a `udp-sink` for one run of datagrams.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SinkResult {
    /// Datagrams that arrived.
    pub received: u64,
    /// Their payload in bytes.
    pub bytes: u64,
    /// Time from the first to the last.
    pub seconds: f64,
}

/// Runs one end of a measurement. The servers run until they are killed.
///
/// # Errors
/// The operating system's error.
pub fn run(command: &PeerCommand) -> anyhow::Result<()> {
    match *command {
        PeerCommand::RrServer { bind } => serve_requests(bind)?,
        PeerCommand::RrClient { connect, seconds } => {
            emit(&send_requests(connect, limit(seconds))?)?;
        }
        PeerCommand::UdpSink { bind } => sink(bind)?,
        PeerCommand::UdpFlood { connect, size, seconds, rate } => {
            emit(&flood(connect, size, limit(seconds), rate)?)?;
        }
        PeerCommand::Crowd(ref command) => gateway::run(command)?,
    }
    Ok(())
}

fn limit(seconds: f64) -> Duration {
    Duration::from_secs_f64(seconds.clamp(0.01, RUN_SECONDS_MAX))
}

fn emit(value: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_string(value)?;
    line.push('\n');
    let mut out = io::stdout().lock();
    out.write_all(line.as_bytes())?;
    out.flush()
}

fn say(line: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "{line}")?;
    out.flush()
}

fn serve_requests(bind: SocketAddr) -> io::Result<()> {
    let listener = TcpListener::bind(bind)?;
    say("ready")?;
    for stream in listener.incoming() {
        // One connection at a time; a broken connection ends only itself.
        let _ = answer(&mut stream?);
    }
    Ok(())
}

fn answer(stream: &mut TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut byte = [0_u8];
    loop {
        stream.read_exact(&mut byte)?;
        stream.write_all(&byte)?;
    }
}

fn send_requests(connect: SocketAddr, run: Duration) -> io::Result<RrResult> {
    let mut stream = TcpStream::connect_timeout(&connect, ANSWER_LIMIT)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(ANSWER_LIMIT))?;
    let mut byte = [0_u8];
    for _ in 0..WARM_UP_ROUNDS {
        stream.write_all(&byte)?;
        stream.read_exact(&mut byte)?;
    }
    let mut histogram = Histogram::default();
    let start = Instant::now();
    let mut last = start;
    while last.duration_since(start) < run {
        stream.write_all(&byte)?;
        stream.read_exact(&mut byte)?;
        let now = Instant::now();
        histogram.record(now.duration_since(last));
        last = now;
    }
    let quantile = |share| {
        histogram.quantile_us(share).ok_or_else(|| io::Error::from(io::ErrorKind::UnexpectedEof))
    };
    Ok(RrResult {
        transactions: histogram.count(),
        seconds: last.duration_since(start).as_secs_f64(),
        p50_us: quantile(0.50)?,
        p99_us: quantile(0.99)?,
    })
}

fn sink(bind: SocketAddr) -> io::Result<()> {
    let socket = UdpSocket::bind(bind)?;
    rustix::net::sockopt::set_socket_recv_buffer_size(&socket, SINK_BUFFER_BYTES)?;
    say("ready")?;
    let mut buffer = vec![0_u8; usize::from(u16::MAX)];
    loop {
        let run = receive_run(&socket, &mut buffer, Duration::from_millis(SINK_IDLE_MS))?;
        emit(&run)?;
    }
}

fn receive_run(socket: &UdpSocket, buffer: &mut [u8], idle: Duration) -> io::Result<SinkResult> {
    socket.set_read_timeout(None)?;
    let length = receive(socket, buffer)?;
    let start = Instant::now();
    let mut last = start;
    let (mut received, mut bytes) = (1_u64, length as u64);
    socket.set_read_timeout(Some(idle))?;
    loop {
        match receive(socket, buffer) {
            Ok(length) => {
                received += 1;
                bytes += length as u64;
                last = Instant::now();
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
            Err(error) => return Err(error),
        }
    }
    Ok(SinkResult { received, bytes, seconds: last.duration_since(start).as_secs_f64() })
}

fn receive(socket: &UdpSocket, buffer: &mut [u8]) -> io::Result<usize> {
    loop {
        match uninterrupted(|| socket.recv(buffer)) {
            // The answer to an earlier send says nothing of this run.
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {}
            other => return other,
        }
    }
}

fn flood(connect: SocketAddr, size: usize, run: Duration, rate: f64) -> io::Result<FloodResult> {
    let any: SocketAddr = if connect.is_ipv4() {
        SocketAddr::from(([0, 0, 0, 0], 0))
    } else {
        SocketAddr::from(([0_u16; 8], 0))
    };
    let socket = UdpSocket::bind(any)?;
    socket.connect(connect)?;
    let payload = vec![0x5a_u8; size.clamp(1, DATAGRAM_BYTES_MAX)];
    let mut pace = Pace::new(rate, Instant::now());
    let start = Instant::now();
    let mut sent = 0_u64;
    loop {
        let now = Instant::now();
        if now.duration_since(start) >= run {
            let seconds = now.duration_since(start).as_secs_f64();
            return Ok(FloodResult { sent, seconds });
        }
        match pace.due(now) {
            0 => std::thread::sleep(pace.pause(now)),
            count => {
                let taken = send_burst(&socket, &payload, count)?;
                pace.took(count);
                sent += taken as u64;
            }
        }
    }
}

/// Gives up to [`BURST_MAX`] copies of a datagram to the kernel; returns how many it took.
fn send_burst(socket: &UdpSocket, payload: &[u8], count: usize) -> io::Result<usize> {
    let slices = [IoSlice::new(payload)];
    let mut controls: [SendAncillaryBuffer<'_, '_, '_>; BURST_MAX] =
        std::array::from_fn(|_| SendAncillaryBuffer::default());
    let mut messages: Vec<MMsgHdr<'_>> =
        controls.iter_mut().take(count).map(|control| MMsgHdr::new(&slices, control)).collect();
    match rustix::net::sendmmsg(socket, &mut messages, SendFlags::empty()) {
        Ok(taken) => Ok(taken),
        // A full queue on the way is a loss of this sender's, counted as not sent.
        Err(rustix::io::Errno::NOBUFS | rustix::io::Errno::CONNREFUSED) => Ok(0),
        Err(error) => Err(error.into()),
    }
}

/// Spreads datagrams evenly: says how many are due, and how long to sleep until a burst is.
#[derive(Debug)]
struct Pace {
    /// Datagrams per second; 0 is without limit.
    rate: f64,
    /// When the next datagram is due.
    next: Instant,
}

impl Pace {
    fn new(rate: f64, now: Instant) -> Self {
        Self { rate, next: now }
    }

    fn due(&mut self, now: Instant) -> usize {
        if self.rate <= 0.0 {
            return BURST_MAX;
        }
        let debt = now.saturating_duration_since(self.next);
        if debt > Duration::from_micros(DEBT_MAX_US) {
            self.next = now.checked_sub(Duration::from_micros(DEBT_MAX_US)).unwrap_or(now);
        }
        if now < self.next {
            return 0;
        }
        let behind = now.duration_since(self.next).as_secs_f64();
        ((behind * self.rate) as usize).clamp(1, BURST_MAX)
    }

    fn pause(&self, now: Instant) -> Duration {
        self.next.saturating_duration_since(now)
    }

    fn took(&mut self, count: usize) {
        if self.rate > 0.0 {
            self.next += Duration::from_secs_f64(count as f64 / self.rate);
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn requests_over_loopback_are_answered_and_counted() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        std::thread::spawn(move || answer(&mut listener.accept().unwrap().0));
        let result = send_requests(address, Duration::from_millis(50)).unwrap();
        assert!(result.transactions > 0);
        assert!(result.p50_us > 0.0 && result.p50_us <= result.p99_us, "{result:?}");
    }

    #[test]
    fn a_paced_flood_arrives_whole() {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let address = socket.local_addr().unwrap();
        // A busy machine lets a thread wait: all of it has room in the socket.
        let idle = Duration::from_secs(2);
        let counter =
            std::thread::spawn(move || receive_run(&socket, &mut [0_u8; 2048], idle).unwrap());
        let sent = flood(address, 100, Duration::from_millis(200), 1_000.0).unwrap();
        let got = counter.join().unwrap();
        assert!(sent.sent > 0);
        assert_eq!((got.received, got.bytes), (sent.sent, sent.sent * 100));
    }

    #[test]
    fn the_pace_is_the_rate_and_forgets_old_debt() {
        let start = Instant::now();
        let mut pace = Pace::new(10_000.0, start);
        assert_eq!(pace.due(start), 1);
        pace.took(1);
        assert_eq!(pace.due(start), 0);
        assert_eq!(pace.pause(start), Duration::from_micros(100));
        // A second late is 10,000 datagrams of debt; all but half a millisecond's is forgotten.
        let late = start + Duration::from_secs(1);
        let due = pace.due(late);
        assert!((4..=5).contains(&due), "{due}");
        pace.took(due);
        assert!(pace.due(late) <= 1);
    }

    #[test]
    fn without_a_rate_bursts_are_full() {
        let mut pace = Pace::new(0.0, Instant::now());
        assert_eq!(pace.due(Instant::now()), BURST_MAX);
    }
}
