//! Traffic that the tests make themselves, from inside a container's namespace.

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::path::Path;
use std::time::Duration;
use std::{io, mem, thread};

use rustix::net::sockopt::set_socket_recv_buffer_size_force;
use weft_bench::sandbox::Container;
use weft_io::namespace::{Namespace, run_in};
use weft_io::uninterrupted;

use super::{address_pairs, namespace, slowness};

/// How long a datagram may take within a laboratory on a real machine.
pub const ARRIVAL_TIMEOUT_MS: u64 = 3_000;

/// A stream of datagrams: how many, how long each is in bytes, and how many are sent a millisecond.
pub const STREAM_DATAGRAMS: usize = 4_800;
const STREAM_BYTES: usize = 1_300;
const STREAM_BURST: usize = 5;
/// Bytes over a connection.
pub const CONNECTION_BYTES: usize = 1 << 20;

/// A UDP socket inside a namespace. It stays there whichever thread uses it.
///
/// # Errors
/// The namespace is gone, or the address cannot be bound.
pub fn udp_in(namespace: &Path, address: SocketAddr) -> io::Result<UdpSocket> {
    let socket = run_in(Namespace::open(namespace)?, move || UdpSocket::bind(address))??;
    socket.set_read_timeout(Some(Duration::from_millis(ARRIVAL_TIMEOUT_MS) * slowness()))?;
    Ok(socket)
}

/// Sends `length` bytes of a known pattern and checks that the very same arrive.
///
/// # Errors
/// Nothing, or something else, arrived.
pub fn datagram_arrives(
    from: (&Path, IpAddr),
    to: (&Path, IpAddr),
    length: usize,
) -> io::Result<()> {
    let receiver = udp_in(to.0, SocketAddr::new(to.1, 0))?;
    let sender = udp_in(from.0, SocketAddr::new(from.1, 0))?;
    let sent: Vec<u8> = (0..length).map(|i| (i * 31 % 251) as u8).collect();
    sender.send_to(&sent, receiver.local_addr()?)?;
    let mut received = vec![0; length + 1];
    let (count, _) = uninterrupted(|| receiver.recv_from(&mut received))?;
    if received[..count] == sent[..] {
        return Ok(());
    }
    Err(io::Error::other(format!("{count} bytes arrived instead of the {length} sent")))
}

/// Sends [`CONNECTION_BYTES`] of a known pattern over TCP and checks that the very same arrive.
///
/// # Errors
/// The system's error, or something else arrived.
pub fn connection_arrives(from: (&Path, IpAddr), to: (&Path, IpAddr)) -> io::Result<()> {
    let (own, address) = (Namespace::open(from.0)?, SocketAddr::new(to.1, 0));
    let listener = run_in(Namespace::open(to.0)?, move || TcpListener::bind(address))??;
    let address = listener.local_addr()?;
    let limit = Some(Duration::from_millis(ARRIVAL_TIMEOUT_MS) * slowness());
    let mut sender = run_in(own, move || TcpStream::connect(address))??;
    sender.set_write_timeout(limit)?;
    let (mut receiver, source) = listener.accept()?;
    receiver.set_read_timeout(limit)?;
    if source.ip() != from.1 {
        return Err(io::Error::other(format!("it comes from {source}, not {}", from.1)));
    }
    let sent: Vec<u8> = (0..CONNECTION_BYTES).map(|i| (i * 31 % 251) as u8).collect();
    let all = sent.clone();
    let sending = thread::spawn(move || sender.write_all(&all));
    let mut received = Vec::new();
    receiver.read_to_end(&mut received)?;
    sending.join().map_err(|_| io::Error::other("the sender panicked"))??;
    if received == sent {
        return Ok(());
    }
    Err(io::Error::other(format!("{} bytes arrived, or others", received.len())))
}

/// Sends [`STREAM_DATAGRAMS`] datagrams of [`STREAM_BYTES`], 50 Mbit/s for a second, slower on a slow machine.
/// Returns how many arrive. The receiving socket holds them all, so none is lost while the receiver waits for a
/// processor.
///
/// # Errors
/// The system's error, a datagram that was not sent, or a duplicate.
pub fn stream_arrives(from: (&Path, IpAddr), to: (&Path, IpAddr)) -> io::Result<usize> {
    let receiver = udp_in(to.0, SocketAddr::new(to.1, 0))?;
    set_socket_recv_buffer_size_force(&receiver, 2 * STREAM_DATAGRAMS * STREAM_BYTES)?;
    let sender = udp_in(from.0, SocketAddr::new(from.1, 0))?;
    sender.connect(receiver.local_addr()?)?;
    let mut datagram = [0x5a; STREAM_BYTES];
    for number in 0..STREAM_DATAGRAMS {
        datagram[..8].copy_from_slice(&number.to_be_bytes());
        sender.send(&datagram)?;
        if number % STREAM_BURST == 0 {
            thread::sleep(Duration::from_millis(1) * slowness());
        }
    }
    let mut arrived = vec![false; STREAM_DATAGRAMS];
    for _ in 0..STREAM_DATAGRAMS {
        match uninterrupted(|| receiver.recv(&mut datagram)) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
            Err(error) => return Err(error),
            Ok(length) => {
                let number = datagram.first_chunk().map(|bytes| usize::from_be_bytes(*bytes));
                let seen = number.and_then(|number| arrived.get_mut(number));
                let known = seen.is_some_and(|seen| !mem::replace(seen, true));
                if length != STREAM_BYTES || !known {
                    return Err(io::Error::other(format!("{length} bytes, number {number:?}")));
                }
            }
        }
    }
    Ok(arrived.iter().filter(|seen| **seen).count())
}

/// Sends such a stream between two containers both ways, over IPv4 and IPv6.
///
/// # Errors
/// As [`stream_arrives`], or a datagram was lost.
pub fn streams_arrive_whole(one: &Container, two: &Container) -> anyhow::Result<()> {
    for (from, to) in [(one, two), (two, one)] {
        let (here, there) = (namespace(from), namespace(to));
        for (source, address) in address_pairs(from, to)? {
            let arrived = stream_arrives((&here, source), (&there, address))?;
            let lost = STREAM_DATAGRAMS - arrived;
            anyhow::ensure!(lost == 0, "{lost} datagrams from {source} to {address} were lost");
        }
    }
    Ok(())
}

/// Joins an IPv4 multicast group on the interface that has `address`.
///
/// # Errors
/// As [`udp_in`], or the group cannot be joined.
pub fn multicast_receiver(
    namespace: &Path,
    address: Ipv4Addr,
    group: Ipv4Addr,
    port: u16,
) -> io::Result<UdpSocket> {
    let socket = udp_in(namespace, SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), port))?;
    socket.join_multicast_v4(&group, &address)?;
    Ok(socket)
}

/// Joins an IPv6 multicast group on an interface.
///
/// # Errors
/// As [`udp_in`], or the group cannot be joined.
pub fn multicast_receiver6(
    namespace: &Path,
    interface_index: u32,
    group: Ipv6Addr,
    port: u16,
) -> io::Result<UdpSocket> {
    let socket = udp_in(namespace, SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), port))?;
    socket.join_multicast_v6(&group, interface_index)?;
    Ok(socket)
}

/// Waits for one datagram and compares it.
///
/// # Errors
/// Nothing came in time, or something else.
pub fn expect_datagram(socket: &UdpSocket, wanted: &[u8]) -> io::Result<()> {
    let mut received = [0; 2048];
    let (count, from) = uninterrupted(|| socket.recv_from(&mut received))?;
    if &received[..count] == wanted {
        return Ok(());
    }
    Err(io::Error::other(format!("{count} other bytes arrived from {from}")))
}

/// The index of a container's interface on the network.
///
/// # Errors
/// It has none.
pub fn interface_index(container: &Container) -> anyhow::Result<u32> {
    let links = container.exec(&["ip", "-j", "link", "show", "weft0"])?.success()?.json()?;
    let index = links[0]["ifindex"].as_u64().and_then(|index| u32::try_from(index).ok());
    index.ok_or_else(|| anyhow::anyhow!("no index in {links}"))
}
