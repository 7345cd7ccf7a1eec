//! Chooses the socket for an ESP datagram among those that share a UDP port: one of its lane's sockets, by the
//! bucket of its source address.

use std::io;
use std::mem;
use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd};

use super::{BUCKET_BITS, SPREAD, STEERED_WORKERS_MAX};
use crate::udp::UdpSocket;

/// Has the kernel hand each datagram to the socket of its lane and its source. The sockets are those that
/// share the port of `member`, in the order in which they were bound, [`super::BUCKETS`] for each of the
/// `workers`. The worker's number is the lane modulo `workers`; the lane is the last byte of the SPI, which
/// the datagram begins with. [`bucket_of`] gives the number of the worker's socket. A datagram shorter than
/// an SPI goes to the first socket.
///
/// Called again after a worker's sockets were bound, and before the last worker's are closed.
///
/// # Errors
/// `InvalidInput`: not 1 to [`STEERED_WORKERS_MAX`] workers. Else the kernel's error: then it picks the
/// socket by addresses and ports, which is slower but no less right.
pub fn by_lane_and_source(member: &UdpSocket, workers: usize) -> io::Result<()> {
    if !(1..=STEERED_WORKERS_MAX).contains(&workers) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let (word, net) = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, libc::SKF_NET_OFF as u32);
    let alu = |operation| libc::BPF_ALU | operation | libc::BPF_K;
    let protocol = (libc::SKF_AD_OFF + libc::SKF_AD_PROTOCOL) as u32;
    let add = libc::BPF_ALU | libc::BPF_ADD | libc::BPF_X;
    let mut program = [
        statement(word, protocol),
        jump(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, libc::ETH_P_IPV6 as u32, 0, 5),
        // Of the IPv6 source: the end of the network's part, and the last four bytes.
        statement(word, net.wrapping_add(12)),
        statement(libc::BPF_MISC | libc::BPF_TAX, 0),
        statement(word, net.wrapping_add(20)),
        statement(add, 0),
        statement(libc::BPF_JMP | libc::BPF_JA, 1),
        // The IPv4 source.
        statement(word, net.wrapping_add(12)),
        statement(alu(libc::BPF_MUL), SPREAD),
        statement(alu(libc::BPF_RSH), u32::BITS - BUCKET_BITS),
        statement(libc::BPF_MISC | libc::BPF_TAX, 0),
        statement(word, 0),
        statement(alu(libc::BPF_AND), 0xff),
        statement(alu(BPF_MOD), workers as u32),
        statement(alu(libc::BPF_LSH), BUCKET_BITS),
        statement(add, 0),
        statement(libc::BPF_RET | libc::BPF_A, 0),
    ];
    let filter =
        libc::sock_fprog { len: program.len() as libc::c_ushort, filter: program.as_mut_ptr() };
    // SAFETY: the kernel reads one `sock_fprog` of the length given, and through it the instructions
    // of `program`, whose number it tells; both outlive the call.
    let rc = unsafe {
        libc::setsockopt(
            member.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_ATTACH_REUSEPORT_CBPF,
            (&raw const filter).cast(),
            mem::size_of_val(&filter) as libc::socklen_t,
        )
    };
    if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// The bucket of datagrams from this address, below [`super::BUCKETS`]. It depends on the last four bytes and, for
/// IPv6, on bytes 5 to 8, which tell networks of 64 bits apart.
pub fn bucket_of(source: IpAddr) -> usize {
    let sum = match source.to_canonical() {
        IpAddr::V4(v4) => v4.to_bits(),
        IpAddr::V6(v6) => (v6.to_bits() as u32).wrapping_add((v6.to_bits() >> 64) as u32),
    };
    (sum.wrapping_mul(SPREAD) >> (u32::BITS - BUCKET_BITS)) as usize
}

/// The remainder, which Linux has since 3.7.
const BPF_MOD: u32 = 0x90;

const fn statement(code: u32, k: u32) -> libc::sock_filter {
    jump(code, k, 0, 0)
}

const fn jump(code: u32, k: u32, jt: u8, jf: u8) -> libc::sock_filter {
    libc::sock_filter { code: code as u16, jt, jf, k }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::collections::BTreeSet;
    use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};

    use super::super::BUCKETS;
    use super::*;
    use crate::poller::Poller;
    use crate::udp::{MESSAGES_MAX, RecvBatch};

    /// The last bytes of the SPIs of the datagrams that have arrived.
    fn lanes(socket: &UdpSocket) -> Vec<u8> {
        let mut batch = RecvBatch::new();
        let mut lanes = Vec::new();
        while let Ok(messages) = socket.recv(&mut batch, MESSAGES_MAX) {
            for index in 0..messages {
                let message = batch.message(index).unwrap();
                let bytes = &batch.buffer()[message.range];
                lanes.extend(
                    bytes.chunks(message.segment).map(|datagram| datagram[3 % datagram.len()]),
                );
            }
        }
        lanes
    }

    /// Checks the datagrams that the sockets of a port get: twelve lanes from one address, and a keepalive.
    fn check_source(sockets: &[UdpSocket], workers: usize, source: IpAddr, to: IpAddr) {
        let from = UdpSocket::bind(Some(source), 0).unwrap();
        let to = from.remote(SocketAddr::new(to, sockets[0].port())).unwrap();
        for lane in 0..12_u8 {
            from.send_run(&[lane ^ 7, 1, 2, lane, 9], 5, &to).unwrap();
        }
        for (index, socket) in sockets.iter().enumerate() {
            let is_its =
                |lane: &u8| index == usize::from(*lane) % workers * BUCKETS + bucket_of(source);
            let expected: Vec<u8> = (0..12).filter(is_its).collect();
            assert_eq!(lanes(socket), expected, "socket {index} of {workers} workers, {source}");
        }
        // A keepalive has no SPI.
        from.send_run(&[0xff], 1, &to).unwrap();
        let mut poller = Poller::new().unwrap();
        poller.add(&sockets[0], 0).unwrap();
        assert_eq!(poller.wait(None).unwrap().count(), 1);
        assert_eq!(lanes(&sockets[0]), [0xff]);
    }

    #[test]
    fn datagrams_go_to_the_socket_of_their_lane_and_source() {
        let mut sockets = vec![UdpSocket::bind_shared(None, 0).unwrap()];
        let port = sockets[0].port();
        for workers in [1, 2, 3, 2] {
            let count = workers * BUCKETS;
            if count < sockets.len() {
                by_lane_and_source(&sockets[0], workers).unwrap();
                sockets.truncate(count);
            }
            while sockets.len() < count {
                sockets.push(UdpSocket::bind_shared(None, port).unwrap());
            }
            by_lane_and_source(&sockets[0], workers).unwrap();
            for host in 1..=9 {
                let source = Ipv4Addr::new(127, 0, 3, host).into();
                check_source(&sockets, workers, source, Ipv4Addr::LOCALHOST.into());
            }
            let v6 = Ipv6Addr::LOCALHOST.into();
            check_source(&sockets, workers, v6, v6);
        }
        let single = UdpSocket::bind_shared(None, 0).unwrap();
        for workers in [0, STEERED_WORKERS_MAX + 1] {
            assert!(by_lane_and_source(&single, workers).is_err());
        }
        // A port that is bound alone refuses shared sockets, and a shared port refuses a socket alone.
        assert!(UdpSocket::bind(None, single.port()).is_err());
        let alone = UdpSocket::bind(None, 0).unwrap();
        assert!(UdpSocket::bind_shared(None, alone.port()).is_err());
    }

    #[test]
    fn five_neighbours_have_five_buckets() {
        for first in 0..=u16::MAX {
            let address = |host| Ipv6Addr::from_bits((0xfd00 << 112) + u128::from(first) + host);
            let buckets: BTreeSet<usize> =
                (0..5).map(|host| bucket_of(address(host).into())).collect();
            assert_eq!(buckets.len(), 5, "from {}", address(0));
        }
        let first_of = |network: u128| Ipv6Addr::from_bits((0xfd00 << 112) + (network << 64) + 1);
        let buckets: BTreeSet<usize> =
            (0..5).map(|network| bucket_of(first_of(network).into())).collect();
        assert_eq!(buckets.len(), 5, "networks");
        assert_eq!(
            bucket_of(Ipv4Addr::new(192, 0, 2, 7).into()),
            bucket_of(Ipv4Addr::new(192, 0, 2, 7).to_ipv6_mapped().into())
        );
    }
}
