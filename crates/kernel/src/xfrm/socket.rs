//! A NETLINK_XFRM socket that carries many requests in few calls.
//!
//! It follows [`crate::netlink::socket`]: the lock is held for a whole exchange, and unreadable messages are skipped.
//! Two things differ. A batch of requests goes out at once, as a thousand peers' states must be there in
//! seconds. Everything sent and received may hold keys and is erased.

use std::{io, os::fd::AsFd, time::Duration};

use netlink_packet_core::{NLM_F_ACK, NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_REQUEST};
use netlink_sys::{AsyncSocket, AsyncSocketExt, SocketAddr, TokioSocket};
use rustix::io::Errno;
use tokio::sync::Mutex;
use zeroize::Zeroizing;

use super::codec::Body;
use crate::netlink::{
    error::{REQUEST_TIMEOUT_MS, RequestError},
    socket::{DUMP_ATTEMPTS_MAX, HEADER_LEN, explanation, messages},
};

/// NETLINK_XFRM.
const PROTOCOL: isize = 6;
/// Requests sent in one call. Their answers must fit into the receive buffer.
const BATCH_REQUESTS_MAX: usize = 64;
/// How long the rest of an abandoned answer is waited for, in milliseconds.
const DRAIN_TIMEOUT_MS: u64 = REQUEST_TIMEOUT_MS / 2;
/// Receive buffer of a socket, in bytes. A watch that falls further behind gets an error.
const RECEIVE_BUFFER_BYTES: usize = 8 << 20;

const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const NLMSG_OVERRUN: u16 = 4;
/// Below are netlink's own messages.
const NLMSG_MIN_TYPE: u16 = 0x10;

/// One request.
pub(super) struct Request {
    pub(super) kind: u16,
    pub(super) body: Body,
}

/// One message received. Erased when dropped.
pub(super) struct Message {
    pub(super) kind: u16,
    pub(super) body: Zeroizing<Vec<u8>>,
}

/// The outcome of one request: the requested object, if any.
pub(super) type Outcome = Result<Option<Message>, RequestError>;

pub(super) struct Socket {
    exchange: Mutex<Exchange>,
    port: u32,
}

struct Exchange {
    socket: TokioSocket,
    port: u32,
    sequence: u32,
    /// The sequence number that ends an exchange which was abandoned: its future was dropped, or it
    /// timed out, and the kernel may still be answering.
    unfinished: Option<u32>,
}

/// A header of a received message, and the bytes after it.
pub(super) struct Received<'a> {
    pub(super) kind: u16,
    pub(super) flags: u16,
    pub(super) sequence: u32,
    /// For a notice: the port of the request that made the change, as its sender stated it.
    pub(super) port: u32,
    pub(super) body: &'a [u8],
}

/// The meaning of a received message for an exchange.
enum Step {
    Data(Message),
    End(Result<(), RequestError>),
    Skip,
}

impl Socket {
    /// Opens a socket in the calling thread's network namespace.
    pub(super) fn open() -> io::Result<Self> {
        let (socket, port) = open(0)?;
        socket.socket_ref().set_ext_ack(true)?;
        // An acknowledgement then does not carry the request, with its key, back.
        socket.socket_ref().set_cap_ack(true)?;
        let exchange = Exchange { socket, port, sequence: 0, unfinished: None };
        Ok(Self { exchange: Mutex::new(exchange), port })
    }

    /// The port number that the kernel's notices of our changes carry.
    pub(super) const fn port(&self) -> u32 {
        self.port
    }

    /// Sends all requests, a batch at a time, and returns their outcomes in order. A failure of the socket
    /// counts for every request without a known outcome.
    pub(super) async fn run(&self, requests: &[Request]) -> Vec<Outcome> {
        let mut exchange = self.exchange.lock().await;
        let mut outcomes = Vec::with_capacity(requests.len());
        for batch in requests.chunks(BATCH_REQUESTS_MAX) {
            outcomes.extend(exchange.batch(batch).await);
        }
        outcomes
    }

    /// Reads a whole table.
    pub(super) async fn dump(&self, request: &Request) -> Result<Vec<Message>, RequestError> {
        let mut exchange = self.exchange.lock().await;
        let mut found = Vec::new();
        for _ in 0..DUMP_ATTEMPTS_MAX {
            let whole;
            (found, whole) = exchange.dump(request).await?;
            if whole {
                break;
            }
        }
        Ok(found)
    }
}

/// A socket that receives the notices of some groups; its port number is the second.
pub(super) fn open(groups: u32) -> io::Result<(TokioSocket, u32)> {
    let mut socket = TokioSocket::new(PROTOCOL)?;
    let fd = socket.socket_ref().as_fd();
    if rustix::net::sockopt::set_socket_recv_buffer_size_force(fd, RECEIVE_BUFFER_BYTES).is_err() {
        // Without CAP_NET_ADMIN the kernel grants as much as the sysctl allows.
        socket.socket_ref().set_rx_buf_sz(RECEIVE_BUFFER_BYTES as i32)?;
    }
    socket.socket_mut().bind(&SocketAddr::new(0, groups))?;
    let mut address = SocketAddr::new(0, 0);
    socket.socket_ref().get_address(&mut address)?;
    Ok((socket, address.port_number()))
}

/// The next datagram. Erased when dropped.
pub(super) async fn receive(socket: &TokioSocket) -> io::Result<Zeroizing<Vec<u8>>> {
    let (datagram, _) = socket.recv_from_full().await?;
    Ok(Zeroizing::new(datagram))
}

/// The messages in a datagram.
pub(super) fn received(datagram: &[u8]) -> impl Iterator<Item = Received<'_>> {
    messages(datagram).filter_map(|message| {
        let at = |at: usize| message.get(at..at + 4)?.try_into().ok().map(u32::from_ne_bytes);
        let short = |at: usize| message.get(at..at + 2)?.try_into().ok().map(u16::from_ne_bytes);
        Some(Received {
            kind: short(4)?,
            flags: short(6)?,
            sequence: at(8)?,
            port: at(12)?,
            body: message.get(HEADER_LEN..)?,
        })
    })
}

impl Exchange {
    async fn batch(&mut self, requests: &[Request]) -> Vec<Outcome> {
        let mut outcomes: Vec<Option<Outcome>> = Vec::new();
        outcomes.resize_with(requests.len(), || None);
        let limit = Duration::from_millis(REQUEST_TIMEOUT_MS);
        let work = self.send_and_collect(requests, &mut outcomes);
        let result = tokio::time::timeout(limit, work).await.unwrap_or(Err(RequestError::TimedOut));
        let unknown = || match &result {
            // All that were not refused were done.
            Ok(()) => Ok(None),
            Err(RequestError::Socket(error)) => Err(RequestError::Socket(copy_of(error))),
            Err(_) => Err(RequestError::TimedOut),
        };
        outcomes.into_iter().map(|outcome| outcome.unwrap_or_else(unknown)).collect()
    }

    /// Sends requests and collects the messages before the acknowledgement of the last one. The kernel
    /// carries requests out in order, and sends requested objects and refusals without an acknowledgement
    /// flag.
    async fn send_and_collect(
        &mut self,
        requests: &[Request],
        outcomes: &mut [Option<Outcome>],
    ) -> Result<(), RequestError> {
        self.drain().await;
        let first = self.send(requests, 0, NLM_F_ACK).await?;
        let last = requests.len() - 1;
        loop {
            let datagram = self.receive().await?;
            for message in received(&datagram) {
                let index = message.sequence.wrapping_sub(first) as usize;
                let Some(outcome) = outcomes.get_mut(index) else { continue };
                match step(&message) {
                    Step::Data(message) => *outcome = Some(Ok(Some(message))),
                    Step::End(result) => {
                        if let Err(error) = result {
                            *outcome = Some(Err(error));
                        }
                        if index == last {
                            self.unfinished = None;
                            return Ok(());
                        }
                    }
                    Step::Skip => {}
                }
            }
        }
    }

    /// A whole table; the flag is false when it changed while it was read.
    async fn dump(&mut self, request: &Request) -> Result<(Vec<Message>, bool), RequestError> {
        let work = async {
            self.drain().await;
            let first = self.send(std::slice::from_ref(request), NLM_F_DUMP, 0).await?;
            let (mut found, mut whole) = (Vec::new(), true);
            loop {
                let datagram = self.receive().await?;
                for message in received(&datagram).filter(|message| message.sequence == first) {
                    whole &= message.flags & NLM_F_DUMP_INTR == 0;
                    match step(&message) {
                        Step::Data(message) => found.push(message),
                        Step::End(result) => {
                            self.unfinished = None;
                            return result.map(|()| (found, whole));
                        }
                        Step::Skip => {}
                    }
                }
            }
        };
        let limit = Duration::from_millis(REQUEST_TIMEOUT_MS);
        tokio::time::timeout(limit, work).await.unwrap_or(Err(RequestError::TimedOut))
    }

    /// Sends requests in one call, with more flags for the last one, and returns the first's sequence
    /// number.
    async fn send(
        &mut self,
        requests: &[Request],
        flags: u16,
        last_flags: u16,
    ) -> Result<u32, RequestError> {
        let first = self.sequence.wrapping_add(1);
        let length = requests.iter().map(|request| request.length().next_multiple_of(4)).sum();
        let mut bytes = Zeroizing::new(Vec::with_capacity(length));
        for (index, request) in requests.iter().enumerate() {
            let more = if index + 1 == requests.len() { last_flags } else { 0 };
            self.sequence = self.sequence.wrapping_add(1);
            bytes.extend_from_slice(&(request.length() as u32).to_ne_bytes());
            bytes.extend_from_slice(&request.kind.to_ne_bytes());
            bytes.extend_from_slice(&(NLM_F_REQUEST | flags | more).to_ne_bytes());
            bytes.extend_from_slice(&self.sequence.to_ne_bytes());
            bytes.extend_from_slice(&self.port.to_ne_bytes());
            bytes.extend_from_slice(request.body.bytes());
            let padded = bytes.len().next_multiple_of(4);
            bytes.resize(padded, 0);
        }
        debug_assert_eq!(bytes.len(), length);
        let sent = self.socket.send(&bytes).await;
        sent.map_err(|error| self.failed(error))?;
        self.unfinished = Some(self.sequence);
        crate::netlink::late::answer().await;
        Ok(first)
    }

    async fn receive(&mut self) -> Result<Zeroizing<Vec<u8>>, RequestError> {
        let result = receive(&self.socket).await;
        result.map_err(|error| self.failed(error))
    }

    /// After an error of the socket nothing more is known to come.
    fn failed(&mut self, error: io::Error) -> RequestError {
        self.unfinished = None;
        RequestError::Socket(error)
    }

    /// Reads an abandoned answer to its end, else a dump still running on the socket would make the
    /// next one fail. An answer that does not come is given up.
    async fn drain(&mut self) {
        let limit = Duration::from_millis(DRAIN_TIMEOUT_MS);
        let _ = tokio::time::timeout(limit, self.drain_unbounded()).await;
        self.unfinished = None;
    }

    async fn drain_unbounded(&mut self) {
        while let Some(last) = self.unfinished {
            let Ok(datagram) = self.receive().await else { return };
            let ended = received(&datagram)
                .filter(|message| message.sequence == last)
                .any(|message| matches!(step(&message), Step::End(_)));
            if ended {
                self.unfinished = None;
            }
        }
    }
}

impl Request {
    pub(super) const fn new(kind: u16, body: Body) -> Self {
        Self { kind, body }
    }

    fn length(&self) -> usize {
        HEADER_LEN + self.body.bytes().len()
    }
}

fn copy_of(error: &io::Error) -> io::Error {
    let number = error.raw_os_error();
    number.map_or_else(|| error.kind().into(), io::Error::from_raw_os_error)
}

fn step(message: &Received<'_>) -> Step {
    let code = || Some(i32::from_ne_bytes(message.body.get(..4)?.try_into().ok()?));
    match message.kind {
        NLMSG_DONE | NLMSG_ERROR => match code() {
            Some(0) => Step::End(Ok(())),
            // A dump with nothing in it may end with no code at all.
            None if message.kind == NLMSG_DONE => Step::End(Ok(())),
            None => Step::Skip,
            Some(code) => Step::End(Err(RequestError::Kernel {
                errno: code.saturating_neg(),
                reason: explanation(message.flags, message.body.get(4..).unwrap_or_default()),
            })),
        },
        NLMSG_OVERRUN => {
            let lost = io::Error::from_raw_os_error(Errno::NOBUFS.raw_os_error());
            Step::End(Err(RequestError::Socket(lost)))
        }
        kind if kind < NLMSG_MIN_TYPE => Step::Skip,
        kind => Step::Data(Message { kind, body: Zeroizing::new(message.body.to_vec()) }),
    }
}
