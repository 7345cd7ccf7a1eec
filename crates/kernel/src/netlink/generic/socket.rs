//! A generic netlink socket with one request in flight, and a socket for notices.

use std::{io, os::fd::AsFd, time::Duration};

use netlink_packet_core::NLM_F_DUMP_INTR;
use netlink_sys::{
    AsyncSocket, AsyncSocketExt, SocketAddr, TokioSocket, protocols::NETLINK_GENERIC,
};
use rustix::{io::Errno, net::sockopt::set_socket_recv_buffer_size_force};

use super::codec::{FamilyInfo, Received, Writer, family_info, get_family, message};
use crate::netlink::{
    error::{REQUEST_TIMEOUT_MS, RequestError},
    socket::{DUMP_ATTEMPTS_MAX, explanation, messages},
};

/// The longest message that the kernel sends, in bytes: a packet of 64 KiB and its key.
pub(crate) const MESSAGE_BYTES_MAX: usize = 128 * 1024;
/// Receive buffer of a socket for requests or notices, in bytes.
pub(crate) const RECEIVE_BUFFER_BYTES: usize = 1 << 20;

/// A socket for requests.
pub(crate) struct Requests {
    socket: TokioSocket,
    sequence: u32,
    /// The last exchange was abandoned: the kernel may still be answering it.
    unfinished: bool,
    buffer: Vec<u8>,
}

impl Requests {
    /// Opens a socket in the calling thread's network namespace.
    pub(crate) fn open() -> io::Result<Self> {
        let socket = open(RECEIVE_BUFFER_BYTES)?;
        socket.socket_ref().set_ext_ack(true)?;
        // An acknowledgement then does not carry the request back.
        socket.socket_ref().set_cap_ack(true)?;
        let buffer = Vec::with_capacity(MESSAGE_BYTES_MAX);
        Ok(Self { socket, sequence: 0, unfinished: false, buffer })
    }

    /// Looks a family up, which makes the kernel load its module if it can. `None` if it has no such family.
    pub(crate) async fn family(&mut self, name: &str) -> Result<Option<FamilyInfo>, RequestError> {
        match self.run(get_family(name)).await {
            Err(error) if error.is(Errno::NOENT) => Ok(None),
            answer => Ok(answer?.first().and_then(|body| family_info(body))),
        }
    }

    /// One request and the bodies of its answer.
    pub(crate) async fn run(&mut self, mut request: Writer) -> Result<Vec<Vec<u8>>, RequestError> {
        self.exchange(&mut request).await.map(|(found, _)| found)
    }

    /// Reads a listing, and reads it again if it changed meanwhile.
    pub(crate) async fn dump(&mut self, mut request: Writer) -> Result<Vec<Vec<u8>>, RequestError> {
        let mut last = Vec::new();
        for _ in 0..DUMP_ATTEMPTS_MAX {
            let (found, whole) = self.exchange(&mut request).await?;
            last = found;
            if whole {
                break;
            }
        }
        Ok(last)
    }

    async fn exchange(
        &mut self,
        request: &mut Writer,
    ) -> Result<(Vec<Vec<u8>>, bool), RequestError> {
        let limit = Duration::from_millis(REQUEST_TIMEOUT_MS);
        let unbounded = async {
            if self.unfinished {
                let _ = self.collect(self.sequence).await;
                self.unfinished = false;
            }
            self.sequence = self.sequence.wrapping_add(1).max(1);
            let bytes = request.finish(self.sequence);
            self.socket.send(bytes).await.map_err(RequestError::Socket)?;
            self.unfinished = true;
            crate::netlink::late::answer().await;
            let result = self.collect(self.sequence).await;
            self.unfinished = false;
            result
        };
        tokio::time::timeout(limit, unbounded).await.unwrap_or(Err(RequestError::TimedOut))
    }

    async fn collect(&mut self, sequence: u32) -> Result<(Vec<Vec<u8>>, bool), RequestError> {
        let mut found = Vec::new();
        let mut whole = true;
        loop {
            self.buffer.clear();
            self.socket.recv(&mut self.buffer).await.map_err(RequestError::Socket)?;
            for bytes in messages(&self.buffer) {
                let Some(message) = message(bytes).filter(|found| found.sequence == sequence)
                else {
                    continue;
                };
                whole &= message.flags & NLM_F_DUMP_INTR == 0;
                match message.what {
                    Received::Data { body, .. } => found.push(body.to_vec()),
                    Received::Done { errno: 0 } | Received::Error { errno: 0, .. } => {
                        return Ok((found, whole));
                    }
                    Received::Done { errno } => {
                        return Err(RequestError::Kernel { errno, reason: None });
                    }
                    Received::Error { errno, rest } => {
                        let reason = explanation(message.flags, rest);
                        return Err(RequestError::Kernel { errno, reason });
                    }
                    Received::Other => {}
                }
            }
        }
    }
}

/// A socket that the notices of multicast groups come to.
pub(crate) struct Notices {
    socket: TokioSocket,
    buffer: Vec<u8>,
}

impl Notices {
    /// Opens the socket in the calling thread's network namespace.
    pub(crate) fn open() -> io::Result<Self> {
        let mut socket = open(RECEIVE_BUFFER_BYTES)?;
        socket.socket_mut().bind(&SocketAddr::new(0, 0))?;
        Ok(Self { socket, buffer: Vec::with_capacity(MESSAGE_BYTES_MAX) })
    }

    /// Sets the receive buffer of the watch to this many bytes, even above the sysctl limit if permitted.
    pub(crate) fn enlarge(&self, bytes: usize) -> io::Result<()> {
        let socket = self.socket.socket_ref().as_fd();
        Ok(set_socket_recv_buffer_size_force(socket, bytes)?)
    }

    /// Asks for the notices of a group.
    pub(crate) fn join(&self, group: u32) -> io::Result<()> {
        self.socket.socket_ref().add_membership(group)
    }

    /// Waits for a datagram of notices.
    ///
    /// # Errors
    /// `ENOBUFS` if the kernel had to drop notices.
    pub(crate) async fn receive(&mut self) -> io::Result<&[u8]> {
        self.buffer.clear();
        self.socket.recv(&mut self.buffer).await?;
        Ok(&self.buffer)
    }
}

/// A socket in the calling thread's network namespace with a receive buffer of this many bytes.
pub(crate) fn open(receive_buffer: usize) -> io::Result<TokioSocket> {
    let socket = TokioSocket::new(NETLINK_GENERIC)?;
    socket.socket_ref().set_rx_buf_sz(i32::try_from(receive_buffer).unwrap_or(i32::MAX))?;
    Ok(socket)
}
