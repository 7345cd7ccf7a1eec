//! A flood of forged first packets: the right client's key, sources that are nobody's.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use weft_io::udp::{Remote, UdpSocket};
use weft_openvpn::session::Session;

use super::credentials::Crowd;
use super::crowd::options;

/// Different resets that are sent in turn: an attacker who has one client's key can make any number.
const RESETS: usize = 256;
/// The resets of one step of the pace, so that a step takes a millisecond or more.
const STEPS_PER_S: u64 = 200;
/// The network of the forged sources, a benchmark range (RFC 2544), in the sandbox's namespaces only.
pub(super) const SOURCES: (Ipv4Addr, u8) = (Ipv4Addr::new(198, 19, 0, 0), 16);
/// How many sources there are.
const SOURCES_MAX: u32 = 1 << (32 - SOURCES.1 as u32);

/// What was sent.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct ForgedResult {
    /// Resets that the kernel took.
    pub sent: u64,
    /// Time taken.
    pub seconds: f64,
}

/// Sends resets at a rate for so long, each from another address of [`SOURCES`], all of which are this namespace's.
///
/// # Errors
/// Returns an error if the socket cannot be made or the files cannot be read.
pub(super) fn forge(
    directory: &Path,
    server: SocketAddr,
    rate: u64,
    length: Duration,
) -> anyhow::Result<ForgedResult> {
    let resets = resets(directory, server)?;
    let socket = UdpSocket::bind(Some(Ipv4Addr::UNSPECIFIED.into()), 0)?;
    let remote = socket.remote(server)?;
    let begun = Instant::now();
    let mut result = ForgedResult::default();
    let step = rate.div_ceil(STEPS_PER_S);
    let mut tried = 0_u64;
    while begun.elapsed() < length {
        for _ in 0..step {
            let reset = &resets[tried as usize % resets.len()];
            result.sent += u64::from(send(&socket, &remote, tried, reset)?);
            tried += 1;
        }
        let due = Duration::from_secs_f64(tried as f64 / rate.max(1) as f64);
        std::thread::sleep(due.saturating_sub(begun.elapsed()));
    }
    result.seconds = begun.elapsed().as_secs_f64();
    Ok(result)
}

/// Whether the kernel had room for it.
fn send(socket: &UdpSocket, remote: &Remote, number: u64, reset: &[u8]) -> io::Result<bool> {
    let last = u32::try_from(number % u64::from(SOURCES_MAX - 2)).unwrap_or_default() + 1;
    let source = IpAddr::V4(Ipv4Addr::from_bits(SOURCES.0.to_bits() + last));
    match socket.send_run(reset, reset.len(), &remote.with_source(Some(source))) {
        Ok(()) => Ok(true),
        Err(error) if is_full(&error) => Ok(false),
        Err(error) => Err(error),
    }
}

fn is_full(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::WouldBlock
        || error.raw_os_error() == Some(libc::ENOBUFS)
        || error.kind() == io::ErrorKind::ConnectionRefused
}

/// First packets as clients send them, with one client's key of tls-crypt-v2.
fn resets(directory: &Path, server: SocketAddr) -> anyhow::Result<Vec<Vec<u8>>> {
    let crowd = Crowd::read(directory, 0, 1)?;
    let unix_s = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs();
    let mut resets = Vec::with_capacity(RESETS);
    for _ in 0..RESETS {
        let now = Instant::now();
        let options = options(&crowd, 0);
        let mut session = Session::connect(now, unix_s, options, server, &rand::random())?;
        resets.extend(session.poll_transmit(now).map(|transmit| transmit.bytes));
    }
    anyhow::ensure!(!resets.is_empty(), "a client has no first packet");
    Ok(resets)
}
