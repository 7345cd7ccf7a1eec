//! A socket that the notices of multicast groups come to. It is apart from sockets for requests, so that no answer is
//! taken for a notice.

use std::io;

use netlink_sys::{AsyncSocket, TokioSocket};
use rustix::io::Errno;

use super::socket::{self, Datagram};

/// Datagrams read at most before an overrun is told: more than the largest receive buffer holds. A message takes at
/// least 768 bytes of it, and the kernel doubles the 8 MiB that the watch of IPsec states asks for.
const REST_DATAGRAMS_MAX: usize = (16 << 20) / 768;

/// A socket for notices.
pub(crate) struct Notices {
    socket: TokioSocket,
    buffer: Vec<u8>,
    /// One more than the datagrams that may still be read before an overrun is told; 0: there is none to tell.
    rest: usize,
}

impl Notices {
    /// Opens the socket in the calling thread's network namespace, for the groups of these bits.
    pub(crate) fn open(protocol: isize, groups: u32, receive_buffer: usize) -> io::Result<Self> {
        let socket = socket::open(protocol, 0, groups, receive_buffer)?;
        Ok(Self { socket, buffer: socket::buffer(), rest: 0 })
    }

    /// Sets the receive buffer to this many bytes, even above the sysctl limit if permitted.
    pub(crate) fn enlarge(&self, receive_buffer: usize) {
        socket::enlarge(&self.socket, receive_buffer);
    }

    /// Asks for the notices of a group by its number.
    pub(crate) fn join(&self, group: u32) -> io::Result<()> {
        self.socket.socket_ref().add_membership(group)
    }

    /// Asks for the notices of all namespaces that devices here lead to (Linux 4.2).
    pub(crate) fn listen_to_all_namespaces(&self) -> io::Result<()> {
        self.socket.socket_ref().set_listen_all_namespaces(true)
    }

    /// Waits for a datagram of notices. Dropping the future loses none.
    ///
    /// The kernel reports an overrun once, before the notices that the socket still holds. It then drops all further
    /// ones, without a word, until the socket is empty. So the error comes when the socket is empty: a listing after
    /// it misses no change, and no older notice follows.
    ///
    /// # Errors
    /// One of which [`is_overrun`] is true, if the kernel had to drop notices.
    pub(crate) async fn receive(&mut self) -> io::Result<Datagram<'_>> {
        if self.rest == 0 {
            match socket::read(&self.socket, &mut self.buffer).await {
                Err(error) if is_overrun(&error) => self.rest = REST_DATAGRAMS_MAX,
                read => return read.map(|()| Datagram::of(&mut self.buffer)),
            }
        }
        while self.rest > 1 {
            self.rest -= 1;
            match socket::read_now(&self.socket, &mut self.buffer) {
                Ok(()) => return Ok(Datagram::of(&mut self.buffer)),
                Err(error) if is_overrun(&error) => {}
                // The socket is empty; or it has failed, which will recur.
                Err(_) => self.rest = 1,
            }
        }
        self.rest = 0;
        Err(Errno::NOBUFS.into())
    }
}

/// Whether the kernel had to drop notices because they were not read in time.
pub(crate) fn is_overrun(error: &io::Error) -> bool {
    Errno::from_io_error(error) == Some(Errno::NOBUFS)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::io::Write;
    use std::process::{Command, Stdio};
    use std::time::Duration;

    use netlink_sys::protocols::NETLINK_ROUTE;
    use weft_io::namespace::unshare_network;

    use super::*;

    /// RTMGRP_LINK, and the type of a notice of a device that is there (RTM_NEWLINK).
    const GROUP_LINK: u32 = 1;
    const NEW_LINK: u16 = 16;
    const RECEIVE_BUFFER_BYTES: usize = 64 << 10;
    /// More than the buffer holds.
    const CHANGES: usize = 1_000;

    fn change_loopback(times: usize) {
        let lines: String =
            (0..times).map(|n| format!("link set lo mtu {}\n", 2_000 + n)).collect();
        let mut ip =
            Command::new("ip").args(["-batch", "-"]).stdin(Stdio::piped()).spawn().unwrap();
        ip.stdin.take().unwrap().write_all(lines.as_bytes()).unwrap();
        assert!(ip.wait().unwrap().success());
    }

    #[test]
    fn an_overrun_is_told_when_the_socket_is_empty_and_hears_again() {
        let work = async {
            let mut notices =
                Notices::open(NETLINK_ROUTE, GROUP_LINK, RECEIVE_BUFFER_BYTES).unwrap();
            change_loopback(CHANGES);
            let mut kept = 0;
            let error = loop {
                match notices.receive().await {
                    Ok(datagram) => kept += datagram.messages().count(),
                    Err(error) => break error,
                }
            };
            assert!(is_overrun(&error), "{error}");
            assert!((1..CHANGES).contains(&kept), "{kept} of {CHANGES} notices were kept");
            let quiet = tokio::time::timeout(Duration::from_millis(50), notices.receive()).await;
            assert!(quiet.is_err(), "an older notice came after the overrun was told");
            drop(quiet);
            change_loopback(1);
            let heard = tokio::time::timeout(Duration::from_secs(20), notices.receive()).await;
            let kinds: Vec<u16> = heard.unwrap().unwrap().messages().map(|it| it.kind).collect();
            assert_eq!(kinds, [NEW_LINK]);
            // An overrun is told as well where the socket is never found empty.
            change_loopback(4);
            notices.rest = 2;
            assert!(notices.receive().await.is_ok());
            assert!(is_overrun(&notices.receive().await.map(drop).unwrap_err()));
        };
        let in_its_namespace = || {
            unshare_network().expect("this test makes a network namespace and must run as root");
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.unwrap().block_on(work);
        };
        std::thread::spawn(in_its_namespace).join().unwrap();
    }
}
