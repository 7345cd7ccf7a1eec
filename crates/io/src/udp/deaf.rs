//! A socket that only sends.

use std::io;
use std::mem;
use std::os::fd::AsRawFd;

use super::UdpSocket;

impl UdpSocket {
    /// From now on nothing comes in: the kernel drops datagrams to the port, which it would otherwise keep
    /// until a reader takes them.
    ///
    /// # Errors
    /// The kernel refused the filter.
    pub fn receive_nothing(&self) -> io::Result<()> {
        // Bytes of each datagram that are kept.
        let mut program =
            [libc::sock_filter { code: (libc::BPF_RET | libc::BPF_K) as u16, jt: 0, jf: 0, k: 0 }];
        let filter =
            libc::sock_fprog { len: program.len() as libc::c_ushort, filter: program.as_mut_ptr() };
        // SAFETY: the kernel reads one `sock_fprog` of the length given, and through it the instructions, whose
        // number it tells; both outlive the call.
        let attached = unsafe {
            libc::setsockopt(
                self.fd.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_ATTACH_FILTER,
                (&raw const filter).cast(),
                mem::size_of_val(&filter) as libc::socklen_t,
            )
        };
        if attached < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::net::{IpAddr, Ipv4Addr, SocketAddr};

    use super::*;

    #[test]
    fn nothing_is_kept_of_what_comes_and_it_sends_as_ever() {
        const LOOPBACK: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
        let bind = || UdpSocket::bind(Some(LOOPBACK), 0).unwrap();
        let (deaf, other) = (bind(), bind());
        let to = |of: &UdpSocket| SocketAddr::new(LOOPBACK, of.port());
        let (there, back) = (deaf.remote(to(&other)).unwrap(), other.remote(to(&deaf)).unwrap());
        let mut buffer = [0; 8];
        other.send_run(b"heard", 5, &back).unwrap();
        assert_eq!(deaf.recv_datagram(&mut buffer).unwrap(), 5);
        deaf.receive_nothing().unwrap();
        other.send_run(b"unheard", 7, &back).unwrap();
        let error = deaf.recv_datagram(&mut buffer).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
        deaf.send_run(b"told", 4, &there).unwrap();
        assert_eq!(other.recv_datagram(&mut buffer).unwrap(), 4);
    }
}
