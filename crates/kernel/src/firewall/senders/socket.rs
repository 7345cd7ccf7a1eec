//! A NETLINK_NETFILTER socket that carries out transactions of nftables.

use std::{io, time::Duration};

use netlink_packet_core::NLM_F_DUMP_INTR;
use netlink_sys::{
    AsyncSocket, AsyncSocketExt, SocketAddr, TokioSocket, protocols::NETLINK_NETFILTER,
};

use super::{
    Member,
    codec::{self, Set, Step},
};
use crate::netlink::{
    error::{REQUEST_TIMEOUT_MS, RequestError},
    generic::codec::{Received, message},
    socket::{DUMP_ATTEMPTS_MAX, explanation, messages},
};

/// The longest message that the kernel sends, in bytes.
const MESSAGE_BYTES_MAX: usize = 64 * 1024;
/// Receive buffer, in bytes.
const RECEIVE_BUFFER_BYTES: i32 = 1 << 20;

pub(super) struct Socket {
    socket: TokioSocket,
    sequence: u32,
    buffer: Vec<u8>,
}

impl Socket {
    /// Opens a socket in the calling thread's network namespace.
    pub(super) fn open() -> io::Result<Self> {
        let mut socket = TokioSocket::new(NETLINK_NETFILTER)?;
        socket.socket_ref().set_rx_buf_sz(RECEIVE_BUFFER_BYTES)?;
        socket.socket_ref().set_ext_ack(true)?;
        socket.socket_ref().set_cap_ack(true)?;
        socket.socket_mut().bind(&SocketAddr::new(0, 0))?;
        Ok(Self { socket, sequence: 0, buffer: Vec::with_capacity(MESSAGE_BYTES_MAX) })
    }

    /// The port number that the kernel's notices of our changes carry.
    pub(super) fn port(&self) -> io::Result<u32> {
        let mut address = SocketAddr::new(0, 0);
        self.socket.socket_ref().get_address(&mut address)?;
        Ok(address.port_number())
    }

    /// Carries out all steps or none.
    pub(super) async fn change(&mut self, steps: &[Step<'_>]) -> Result<(), RequestError> {
        let first = self.sequence.wrapping_add(1).max(1);
        let (bytes, last) = codec::transaction(steps, first);
        self.sequence = last.wrapping_add(1);
        let work = async {
            self.socket.send(&bytes).await.map_err(RequestError::Socket)?;
            crate::netlink::late::answer().await;
            self.collect(first, last, |_| {}).await.map(|_| ())
        };
        within_limit(work).await
    }

    /// All members of a set; `None` for each that cannot be Weft's.
    pub(super) async fn members(&mut self, set: Set) -> Result<Vec<Option<Member>>, RequestError> {
        let mut found = Vec::new();
        for _ in 0..DUMP_ATTEMPTS_MAX {
            found.clear();
            self.sequence = self.sequence.wrapping_add(1).max(1);
            let sequence = self.sequence;
            let work = async {
                let mut request = codec::listing(set);
                let sent = self.socket.send(request.finish(sequence)).await;
                sent.map_err(RequestError::Socket)?;
                crate::netlink::late::answer().await;
                let read = |body: &[u8]| found.extend(codec::members(set, body));
                self.collect(sequence, sequence, read).await
            };
            if within_limit(work).await? {
                break;
            }
        }
        Ok(found)
    }

    /// Reads the answers to the messages from `first` through `last`; false if the listing changed meanwhile.
    async fn collect(
        &mut self,
        first: u32,
        last: u32,
        mut read: impl FnMut(&[u8]),
    ) -> Result<bool, RequestError> {
        let mut whole = true;
        loop {
            self.buffer.clear();
            self.socket.recv(&mut self.buffer).await.map_err(RequestError::Socket)?;
            for message in messages(&self.buffer).filter_map(message) {
                if message.sequence.wrapping_sub(first) > last.wrapping_sub(first) {
                    continue;
                }
                whole &= message.flags & NLM_F_DUMP_INTR == 0;
                match message.what {
                    Received::Data { body, .. } => read(body),
                    Received::Done { errno: 0 } | Received::Error { errno: 0, .. } => {
                        if message.sequence == last {
                            return Ok(whole);
                        }
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

async fn within_limit<T>(
    work: impl Future<Output = Result<T, RequestError>>,
) -> Result<T, RequestError> {
    let limit = Duration::from_millis(REQUEST_TIMEOUT_MS);
    tokio::time::timeout(limit, work).await.unwrap_or(Err(RequestError::TimedOut))
}
