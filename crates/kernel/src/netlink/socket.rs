//! Sockets, and datagrams on them.

use std::{io, os::fd::AsFd};

use netlink_sys::{AsyncSocket, AsyncSocketExt, SocketAddr, TokioSocket};
use rustix::io::Errno;
use rustix::net::sockopt::set_socket_recv_buffer_size_force;
use zeroize::Zeroize;

use super::reader::{Message, messages};

/// The longest datagram that the kernel sends, in bytes: a packet of 64 KiB and its key.
pub(crate) const DATAGRAM_BYTES_MAX: usize = 128 * 1024;
/// Receive buffer of most sockets, in bytes: one batch of a large dump and then some.
pub(crate) const RECEIVE_BUFFER_BYTES: usize = 1 << 20;

/// Opens a socket in the calling thread's network namespace, under a port number (0: one that the kernel
/// chooses), for the notices of some groups. Its receive buffer has this many bytes, or as many as the sysctl
/// allows.
pub(crate) fn open(
    protocol: isize,
    port: u32,
    groups: u32,
    receive_buffer: usize,
) -> io::Result<TokioSocket> {
    let mut socket = TokioSocket::new(protocol)?;
    socket.socket_ref().set_rx_buf_sz(i32::try_from(receive_buffer).unwrap_or(i32::MAX))?;
    socket.socket_mut().bind(&SocketAddr::new(port, groups))?;
    Ok(socket)
}

/// Sets a receive buffer beyond the sysctl's limit. Without CAP_NET_ADMIN the buffer stays as it is.
pub(super) fn enlarge(socket: &TokioSocket, receive_buffer: usize) {
    let socket = socket.socket_ref().as_fd();
    if let Err(error) = set_socket_recv_buffer_size_force(socket, receive_buffer) {
        tracing::debug!(%error, "a netlink socket has the receive buffer that the sysctl allows");
    }
}

/// The port number of a socket, which the kernel's notices of its changes carry.
pub(super) fn port_of(socket: &TokioSocket) -> io::Result<u32> {
    let mut address = SocketAddr::new(0, 0);
    socket.socket_ref().get_address(&mut address)?;
    Ok(address.port_number())
}

/// Room for a datagram.
pub(super) fn buffer() -> Vec<u8> {
    Vec::with_capacity(DATAGRAM_BYTES_MAX)
}

/// A datagram that was received. It is erased when dropped, since it may hold keys.
pub(crate) struct Datagram<'a>(&'a mut Vec<u8>);

/// Waits for the next datagram. Dropping the future loses none.
///
/// # Errors
/// The kernel's; as after an overrun (ENOBUFS) if a datagram was longer than the buffer and has lost its end.
pub(super) async fn receive<'a>(
    socket: &TokioSocket,
    buffer: &'a mut Vec<u8>,
) -> io::Result<Datagram<'a>> {
    read(socket, buffer).await?;
    Ok(Datagram(buffer))
}

/// Waits for the next datagram as [`receive`], and leaves it in the buffer, for [`Datagram::of`].
pub(super) async fn read(socket: &TokioSocket, buffer: &mut Vec<u8>) -> io::Result<()> {
    socket.recv(buffer).await?;
    whole(buffer)
}

/// Takes a datagram that is there already.
///
/// # Errors
/// As [`receive`]; [`io::ErrorKind::WouldBlock`]: there is none.
pub(super) fn read_now(socket: &TokioSocket, buffer: &mut Vec<u8>) -> io::Result<()> {
    // The socket does not block (tokio).
    socket.socket_ref().recv(buffer, 0)?;
    whole(buffer)
}

/// Refuses a datagram that has lost its end.
fn whole(buffer: &mut Vec<u8>) -> io::Result<()> {
    if buffer.len() >= DATAGRAM_BYTES_MAX {
        drop(Datagram(buffer));
        return Err(Errno::NOBUFS.into());
    }
    Ok(())
}

impl<'a> Datagram<'a> {
    /// The datagram that was read into the buffer.
    pub(super) const fn of(buffer: &'a mut Vec<u8>) -> Self {
        Self(buffer)
    }
}

impl Datagram<'_> {
    pub(crate) fn messages(&self) -> impl Iterator<Item = Message<'_>> {
        messages(self.0)
    }
}

impl Drop for Datagram<'_> {
    fn drop(&mut self) {
        self.0.as_mut_slice().zeroize();
        self.0.clear();
    }
}
