//! Datagrams that the kernel cuts.

use std::io;

use super::UdpSocket;

/// The least MTU of a link of IPv6, in bytes (RFC 8200 section 5).
pub const IPV6_MTU_MIN: u16 = 1_280;

impl UdpSocket {
    /// From now on the kernel cuts datagrams that are longer than the route takes. Over IPv6 it does so on this
    /// host, into pieces that every link takes; over IPv4 here or on the way. It still refuses runs.
    ///
    /// # Errors
    /// The kernel refused an option.
    pub fn allow_fragments(&self) -> io::Result<()> {
        if self.ipv6 {
            self.set(libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER, libc::IPV6_PMTUDISC_DONT)?;
            self.cut_ipv6_to(IPV6_MTU_MIN)?;
        }
        // An IPv6 socket may send to IPv4 addresses too.
        self.set(libc::IPPROTO_IP, libc::IP_MTU_DISCOVER, libc::IP_PMTUDISC_DONT)
    }

    /// Limits fragments over IPv6 to `mtu` bytes; a socket for IPv4 alone is not changed.
    ///
    /// # Errors
    /// `mtu` is less than [`IPV6_MTU_MIN`], or the kernel refused the option.
    fn cut_ipv6_to(&self, mtu: u16) -> io::Result<()> {
        match self.ipv6 {
            true => self.set(libc::IPPROTO_IPV6, libc::IPV6_MTU, mtu.into()),
            false => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
    use std::process::Command;
    use std::thread;

    use super::*;
    use crate::namespace::unshare_network;
    use crate::udp::RecvBatch;

    /// Loopback takes no more than an IPv6 link has to.
    fn on_a_narrow_loopback(test: impl FnOnce() + Send + 'static) {
        let alone = thread::spawn(move || {
            unshare_network().expect("this test makes a network namespace and must run as root");
            let up = ["link", "set", "lo", "mtu", "1280", "up"];
            assert!(Command::new("ip").args(up).status().unwrap().success());
            test();
        });
        alone.join().unwrap();
    }

    #[test]
    fn datagrams_longer_than_the_route_mtu_are_fragmented_where_allowed() {
        on_a_narrow_loopback(|| {
            for address in [Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()] {
                let bind = || UdpSocket::bind(None, 0).unwrap();
                let (whole, cutting, receiver) = (bind(), bind(), bind());
                cutting.allow_fragments().unwrap();
                let to = whole.remote(SocketAddr::new(address, receiver.port())).unwrap();
                let sent: Vec<u8> = (0..1_400_u32).map(|at| at as u8).collect();
                let refused = whole.send_run(&sent, sent.len(), &to).unwrap_err();
                assert_eq!(refused.raw_os_error(), Some(libc::EMSGSIZE), "{address}");
                cutting.send_run(&sent, sent.len(), &to).unwrap();
                let mut batch = RecvBatch::new();
                receiver.recv(&mut batch, 1).unwrap();
                let message = batch.message(0).unwrap();
                assert_eq!(batch.buffer()[message.range], sent, "{address}");
            }
        });
    }

    #[test]
    fn a_size_that_ipv6_does_not_know_is_refused() {
        let over_ipv6 = UdpSocket::bind(Some(Ipv6Addr::LOCALHOST.into()), 0).unwrap();
        assert!(over_ipv6.cut_ipv6_to(IPV6_MTU_MIN - 1).is_err());
        over_ipv6.cut_ipv6_to(IPV6_MTU_MIN).unwrap();
        let over_ipv4 = UdpSocket::bind(Some(Ipv4Addr::LOCALHOST.into()), 0).unwrap();
        over_ipv4.cut_ipv6_to(0).unwrap();
        over_ipv4.allow_fragments().unwrap();
    }
}
