//! Generic-netlink sockets: one for requests with one in flight, those that upcalls come to, one for
//! notices, one that a listing of all flows is read from bit by bit.

use std::{
    future::poll_fn,
    io,
    task::{Context, Poll},
    time::Duration,
};

use netlink_packet_core::NLM_F_DUMP_INTR;
use netlink_sys::{
    AsyncSocket, AsyncSocketExt, SocketAddr, TokioSocket, protocols::NETLINK_GENERIC,
};
use rustix::io::Errno;

use super::{
    codec::{FamilyInfo, Received, Writer, family_info, get_family, message},
    codec_flow::{FLOW_FAMILY, FlowEntry, flow_entry},
    codec_packet::PACKET_FAMILY,
    codec_port::{DATAPATH_FAMILY, DATAPATH_GROUP, VPORT_FAMILY, VPORT_GROUP},
};
use crate::{
    error::{KernelError, RequestError},
    link::DEVICE_GROUP,
    socket::{REQUEST_TIMEOUT_MS, explanation, messages},
};

/// How many sockets upcalls are spread over: a port that floods its own leaves the others alone.
pub const UPCALL_SOCKETS: usize = 8;
/// Receive buffer of each upcall socket, in bytes: about 400 full packets as the kernel counts them.
pub const UPCALL_BUFFER_BYTES: usize = 1 << 20;
/// The netlink port number of the first upcall socket; the others follow. It is the tag of what is
/// ours: the kernel shows it on every port, from the moment that the datapath is made.
const UPCALL_PORT_FIRST: u32 = DEVICE_GROUP;

/// The longest message that the kernel sends, in bytes: a packet of 64 KiB and its key.
const MESSAGE_BYTES_MAX: usize = 128 * 1024;
/// Receive buffer of the other sockets, in bytes.
const RECEIVE_BUFFER_BYTES: usize = 1 << 20;
/// How often an interrupted listing is read again.
const DUMP_ATTEMPTS_MAX: u32 = 8;

/// The numbers of the OVS families and groups in this kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Families {
    pub(super) datapath: u16,
    pub(super) vport: u16,
    pub(super) flow: u16,
    pub(super) packet: u16,
    pub(super) datapath_group: u32,
    pub(super) vport_group: u32,
}

/// A socket for requests.
pub(super) struct Requests {
    socket: TokioSocket,
    sequence: u32,
    /// The last exchange was abandoned: the kernel may still be answering it.
    unfinished: bool,
    buffer: Vec<u8>,
}

impl Requests {
    /// Opens a socket in the calling thread's network namespace.
    pub(super) fn open() -> Result<Self, KernelError> {
        let open = || -> io::Result<TokioSocket> {
            let socket = TokioSocket::new(NETLINK_GENERIC)?;
            socket.socket_ref().set_rx_buf_sz(size(RECEIVE_BUFFER_BYTES))?;
            socket.socket_ref().set_ext_ack(true)?;
            socket.socket_ref().set_cap_ack(true)?;
            Ok(socket)
        };
        let doing = "open a generic netlink socket".to_owned();
        let socket = open().map_err(|source| KernelError::Socket { doing, source })?;
        let buffer = Vec::with_capacity(MESSAGE_BYTES_MAX);
        Ok(Self { socket, sequence: 0, unfinished: false, buffer })
    }

    /// Looks the OVS families up, upon which the kernel loads the module if it can.
    pub(super) async fn families(&mut self) -> Result<Families, KernelError> {
        let datapath = self.family(DATAPATH_FAMILY).await?;
        let vport = self.family(VPORT_FAMILY).await?;
        let group = |info: &FamilyInfo, wanted: &str| {
            let found = info.groups.iter().find(|(name, _)| name == wanted);
            found.map(|(_, id)| *id).unwrap_or_default()
        };
        Ok(Families {
            datapath: datapath.id,
            vport: vport.id,
            flow: self.family(FLOW_FAMILY).await?.id,
            packet: self.family(PACKET_FAMILY).await?.id,
            datapath_group: group(&datapath, DATAPATH_GROUP),
            vport_group: group(&vport, VPORT_GROUP),
        })
    }

    async fn family(&mut self, name: &str) -> Result<FamilyInfo, KernelError> {
        let answer = match self.run(get_family(name)).await {
            Err(error) if error.is(Errno::NOENT) => return Err(KernelError::OdpMissing),
            other => other.map_err(|error| error.while_doing(format!("look up {name}")))?,
        };
        answer.first().and_then(|body| family_info(body)).ok_or(KernelError::OdpMissing)
    }

    /// One request and the bodies of its answer.
    pub(super) async fn run(&mut self, request: Writer) -> Result<Vec<Vec<u8>>, RequestError> {
        self.exchange(request).await.map(|(found, _)| found)
    }

    /// A listing, read again if it changed meanwhile.
    pub(super) async fn dump(&mut self, request: Writer) -> Result<Vec<Vec<u8>>, RequestError> {
        let mut last = Vec::new();
        for _ in 0..DUMP_ATTEMPTS_MAX {
            let (found, whole) = self.exchange(request.clone()).await?;
            last = found;
            if whole {
                break;
            }
        }
        Ok(last)
    }

    async fn exchange(&mut self, request: Writer) -> Result<(Vec<Vec<u8>>, bool), RequestError> {
        let limit = Duration::from_millis(REQUEST_TIMEOUT_MS);
        let unbounded = async {
            if self.unfinished {
                let _ = self.collect(self.sequence).await;
                self.unfinished = false;
            }
            self.sequence = self.sequence.wrapping_add(1).max(1);
            let bytes = request.finish(self.sequence);
            self.socket.send(&bytes).await.map_err(RequestError::Socket)?;
            self.unfinished = true;
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

/// The sockets that upcalls come to.
pub(super) struct Upcalls {
    sockets: Vec<TokioSocket>,
    next: usize,
    buffer: Vec<u8>,
}

impl Upcalls {
    /// Opens the sockets under their fixed port numbers, which only one switch of a namespace can
    /// have at a time.
    pub(super) fn open() -> Result<Self, KernelError> {
        let open = |index: usize| -> io::Result<TokioSocket> {
            let mut socket = TokioSocket::new(NETLINK_GENERIC)?;
            socket.socket_ref().set_rx_buf_sz(size(UPCALL_BUFFER_BYTES))?;
            let port = UPCALL_PORT_FIRST + u32::try_from(index).unwrap_or_default();
            socket.socket_mut().bind(&SocketAddr::new(port, 0))?;
            Ok(socket)
        };
        let sockets: io::Result<Vec<_>> = (0..UPCALL_SOCKETS).map(open).collect();
        let sockets = sockets.map_err(|source| match source.kind() {
            io::ErrorKind::AddrInUse => KernelError::SwitchTaken,
            _ => KernelError::Socket { doing: "open the sockets for upcalls".into(), source },
        })?;
        Ok(Self { sockets, next: 0, buffer: Vec::with_capacity(MESSAGE_BYTES_MAX) })
    }

    /// Waits for a datagram from any of the sockets, in turn.
    ///
    /// # Errors
    /// `ENOBUFS` if the kernel had to drop upcalls.
    pub(super) async fn receive(&mut self) -> io::Result<&[u8]> {
        let Self { sockets, next, buffer } = self;
        poll_fn(|context| poll_any(context, sockets, next, buffer)).await?;
        Ok(&self.buffer)
    }
}

fn poll_any(
    context: &mut Context<'_>,
    sockets: &[TokioSocket],
    next: &mut usize,
    buffer: &mut Vec<u8>,
) -> Poll<io::Result<()>> {
    for offset in 0..sockets.len() {
        let index = (*next + offset) % sockets.len();
        buffer.clear();
        if let Some(socket) = sockets.get(index)
            && let Poll::Ready(result) = socket.poll_recv(context, buffer)
        {
            *next = index + 1;
            return Poll::Ready(result);
        }
    }
    Poll::Pending
}

/// The port number of the socket that the upcalls of the port of this name go to. The internal
/// port's is the tag by which the datapath is known as ours.
pub(super) fn upcall_port(name: &str, internal: bool) -> u32 {
    // FNV-1a: spreads names, and says the same after a restart.
    let hash = name
        .bytes()
        .fold(0x811c_9dc5_u32, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
    let sockets = u32::try_from(UPCALL_SOCKETS).unwrap_or(1);
    if internal { UPCALL_PORT_FIRST } else { UPCALL_PORT_FIRST + hash % sockets }
}

/// The socket that notices of datapaths and ports come to.
pub(super) struct Notices {
    socket: TokioSocket,
    buffer: Vec<u8>,
}

impl Notices {
    /// Opens the socket in the calling thread's network namespace.
    pub(super) fn open() -> Result<Self, KernelError> {
        let open = || -> io::Result<TokioSocket> {
            let mut socket = TokioSocket::new(NETLINK_GENERIC)?;
            socket.socket_ref().set_rx_buf_sz(size(RECEIVE_BUFFER_BYTES))?;
            socket.socket_mut().bind(&SocketAddr::new(0, 0))?;
            Ok(socket)
        };
        let doing = "watch the ports of datapaths".to_owned();
        let socket = open().map_err(|source| KernelError::Socket { doing, source })?;
        Ok(Self { socket, buffer: Vec::with_capacity(MESSAGE_BYTES_MAX) })
    }

    /// Asks for the notices.
    pub(super) fn join(&self, families: &Families) -> Result<(), KernelError> {
        for group in [families.datapath_group, families.vport_group] {
            self.socket.socket_ref().add_membership(group).map_err(|source| {
                KernelError::Socket { doing: "watch the ports of datapaths".into(), source }
            })?;
        }
        Ok(())
    }

    /// Waits for a datagram of notices.
    ///
    /// # Errors
    /// `ENOBUFS` if the kernel had to drop notices.
    pub(super) async fn receive(&mut self) -> io::Result<&[u8]> {
        self.buffer.clear();
        self.socket.recv(&mut self.buffer).await?;
        Ok(&self.buffer)
    }
}

/// The socket that a listing of flows comes to, in pieces, while other work goes on.
pub(super) struct Sweep {
    socket: TokioSocket,
    buffer: Vec<u8>,
    sequence: u32,
    running: bool,
    entries: Vec<FlowEntry>,
}

impl Sweep {
    /// Opens the socket in the calling thread's network namespace.
    pub(super) fn open() -> Result<Self, KernelError> {
        let open = || -> io::Result<TokioSocket> {
            let socket = TokioSocket::new(NETLINK_GENERIC)?;
            socket.socket_ref().set_rx_buf_sz(size(RECEIVE_BUFFER_BYTES))?;
            Ok(socket)
        };
        let doing = "open a generic netlink socket".to_owned();
        let socket = open().map_err(|source| KernelError::Socket { doing, source })?;
        let buffer = Vec::with_capacity(MESSAGE_BYTES_MAX);
        Ok(Self { socket, buffer, sequence: 0, running: false, entries: Vec::new() })
    }

    /// Whether a listing is being read.
    pub(super) fn is_running(&self) -> bool {
        self.running
    }

    /// Asks for a listing, unless one is being read.
    pub(super) async fn begin(&mut self, request: Writer) -> io::Result<()> {
        if self.running {
            return Ok(());
        }
        self.sequence = self.sequence.wrapping_add(1).max(1);
        self.entries.clear();
        self.socket.send(&request.finish(self.sequence)).await?;
        self.running = true;
        Ok(())
    }

    /// Waits for the next piece, and returns the whole listing after the last. For ever, if none was
    /// asked for.
    ///
    /// # Errors
    /// The socket's, or the kernel's refusal; the listing is abandoned then.
    pub(super) async fn receive(&mut self) -> io::Result<Option<Vec<FlowEntry>>> {
        if !self.running {
            return std::future::pending().await;
        }
        self.buffer.clear();
        let received = self.socket.recv(&mut self.buffer).await;
        if let Err(error) = received {
            self.running = false;
            return Err(error);
        }
        for bytes in messages(&self.buffer) {
            let Some(message) = message(bytes).filter(|found| found.sequence == self.sequence)
            else {
                continue;
            };
            match message.what {
                Received::Data { body, .. } => self.entries.extend(flow_entry(body)),
                Received::Done { errno: 0 } => {
                    self.running = false;
                    return Ok(Some(std::mem::take(&mut self.entries)));
                }
                Received::Done { errno } | Received::Error { errno, .. } => {
                    self.running = false;
                    return Err(io::Error::from_raw_os_error(errno));
                }
                Received::Other => {}
            }
        }
        Ok(None)
    }
}

fn size(bytes: usize) -> i32 {
    i32::try_from(bytes).unwrap_or(i32::MAX)
}
