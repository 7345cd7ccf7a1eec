//! Which of the sockets that share a UDP port gets an ESP datagram: that of its lane.

use std::io;
use std::mem;
use std::os::fd::{AsFd, AsRawFd};

use crate::udp::UdpSocket;

/// Sockets that can share a port and be told apart by lane.
pub const SOCKETS_MAX: usize = 256;

/// Has the kernel hand each datagram to the socket that its lane belongs to: of `sockets` that share
/// the port of `member`, in the order in which they were bound, the one whose number is the lane
/// modulo `sockets`. The lane is the last byte of the SPI, which the datagram begins with. What is
/// shorter goes to the first socket.
///
/// Called again after a socket was bound, and before the last one is closed.
///
/// # Errors
/// `InvalidInput`: not 1 to [`SOCKETS_MAX`] sockets. Else what the kernel refused: then it picks the
/// socket by addresses and ports, which is slower but no less right.
pub fn by_lane(member: &UdpSocket, sockets: usize) -> io::Result<()> {
    if !(1..=SOCKETS_MAX).contains(&sockets) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let mut program = [
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0),
        statement(libc::BPF_ALU | libc::BPF_AND | libc::BPF_K, 0xff),
        statement(libc::BPF_ALU | BPF_MOD | libc::BPF_K, sockets as u32),
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

/// The remainder, which Linux has since 3.7.
const BPF_MOD: u32 = 0x90;

const fn statement(code: u32, k: u32) -> libc::sock_filter {
    libc::sock_filter { code: code as u16, jt: 0, jf: 0, k }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

    use super::*;
    use crate::poller::Poller;
    use crate::udp::{MESSAGES_MAX, RecvBatch};

    /// The last bytes of the SPIs of what has arrived.
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

    #[test]
    fn datagrams_go_to_the_socket_of_their_lane() {
        for ip in [IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)] {
            let mut sockets = vec![UdpSocket::bind_shared(None, 0).unwrap()];
            let port = sockets[0].port();
            for count in [1, 2, 3, 2] {
                if count < sockets.len() {
                    by_lane(&sockets[0], count).unwrap();
                    sockets.truncate(count);
                } else if count > sockets.len() {
                    sockets.push(UdpSocket::bind_shared(None, port).unwrap());
                }
                by_lane(&sockets[0], count).unwrap();
                let from = UdpSocket::bind(Some(ip), 0).unwrap();
                let to = from.remote(SocketAddr::new(ip, port)).unwrap();
                for lane in 0..12_u8 {
                    from.send_run(&[lane ^ 7, 1, 2, lane, 9], 5, &to).unwrap();
                }
                for (index, socket) in sockets.iter().enumerate() {
                    let expected: Vec<u8> =
                        (0..12).filter(|lane| usize::from(*lane) % count == index).collect();
                    assert_eq!(lanes(socket), expected, "socket {index} of {count}");
                }
                // A keepalive has no SPI.
                from.send_run(&[0xff], 1, &to).unwrap();
                let mut poller = Poller::new().unwrap();
                poller.add(&sockets[0], 0).unwrap();
                assert_eq!(poller.wait(None).unwrap().count(), 1);
                assert_eq!(lanes(&sockets[0]), [0xff]);
            }
        }
        let single = UdpSocket::bind_shared(None, 0).unwrap();
        assert!(by_lane(&single, 0).is_err() && by_lane(&single, SOCKETS_MAX + 1).is_err());
        // Who does not share a port is refused one that is shared, and the other way round.
        assert!(UdpSocket::bind(None, single.port()).is_err());
        let alone = UdpSocket::bind(None, 0).unwrap();
        assert!(UdpSocket::bind_shared(None, alone.port()).is_err());
    }
}
