//! A socket that the notices of multicast groups come to. It is apart from sockets for requests, so that no answer is
//! taken for a notice.

use std::io;

use netlink_sys::{AsyncSocket, TokioSocket};
use rustix::io::Errno;

use super::socket::{self, Datagram};

/// A socket for notices.
pub(crate) struct Notices {
    socket: TokioSocket,
    buffer: Vec<u8>,
}

impl Notices {
    /// Opens the socket in the calling thread's network namespace, for the groups of these bits.
    pub(crate) fn open(protocol: isize, groups: u32, receive_buffer: usize) -> io::Result<Self> {
        let socket = socket::open(protocol, 0, groups, receive_buffer)?;
        Ok(Self { socket, buffer: socket::buffer() })
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
    /// # Errors
    /// One of which [`is_overrun`] is true, if the kernel had to drop notices.
    pub(crate) async fn receive(&mut self) -> io::Result<Datagram<'_>> {
        socket::receive(&self.socket, &mut self.buffer).await
    }
}

/// Whether the kernel had to drop notices because they were not read in time.
pub(crate) fn is_overrun(error: &io::Error) -> bool {
    Errno::from_io_error(error) == Some(Errno::NOBUFS)
}
