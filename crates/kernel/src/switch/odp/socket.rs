//! The switch's generic netlink sockets: one for requests, those for upcalls, one for notices, and one that
//! lists all flows piece by piece.

use std::{
    future::poll_fn,
    io,
    task::{Context, Poll},
};

use netlink_sys::{AsyncSocket, TokioSocket, protocols::NETLINK_GENERIC};

use super::{
    codec_flow::{FLOW_FAMILY, FlowEntry, flow_entry},
    codec_meter::METER_FAMILY,
    codec_packet::PACKET_FAMILY,
    codec_port::{DATAPATH_FAMILY, DATAPATH_GROUP, VPORT_FAMILY, VPORT_GROUP},
};
use crate::{
    error::KernelError,
    net::link::DEVICE_GROUP,
    netlink::{
        error::RequestError,
        exchange::Exchange,
        generic::{self, FamilyInfo, Requests},
        notices::Notices,
        reader::Message,
        socket::{DATAGRAM_BYTES_MAX, RECEIVE_BUFFER_BYTES, open},
        writer::Writer,
    },
};

/// How many sockets upcalls are spread over: a port that floods its own leaves the others alone.
pub const UPCALL_SOCKETS: usize = 8;
/// Receive buffer of each upcall socket, in bytes: about 400 full packets as the kernel counts them.
pub const UPCALL_BUFFER_BYTES: usize = 1 << 20;
/// The netlink port number of the first upcall socket; the others follow. It identifies our objects: the
/// kernel shows it on every port, from the moment that the datapath is made.
const UPCALL_PORT_FIRST: u32 = DEVICE_GROUP;

/// The numbers of the OVS families and groups in this kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Families {
    pub(super) datapath: u16,
    pub(super) vport: u16,
    pub(super) flow: u16,
    pub(super) packet: u16,
    /// `None` before Linux 4.15; they work since 4.18.
    pub(super) meter: Option<u16>,
    pub(super) datapath_group: u32,
    pub(super) vport_group: u32,
}

impl Requests {
    /// Looks the OVS families up, upon which the kernel loads the module if it can.
    pub(super) async fn families(&mut self) -> Result<Families, KernelError> {
        let datapath = self.ovs_family(DATAPATH_FAMILY).await?;
        let vport = self.ovs_family(VPORT_FAMILY).await?;
        let group = |info: &FamilyInfo, wanted: &str| {
            let found = info.groups.iter().find(|(name, _)| name == wanted);
            found.map(|(_, id)| *id).unwrap_or_default()
        };
        Ok(Families {
            datapath: datapath.id,
            vport: vport.id,
            flow: self.ovs_family(FLOW_FAMILY).await?.id,
            packet: self.ovs_family(PACKET_FAMILY).await?.id,
            meter: self.family(METER_FAMILY).await.ok().flatten().map(|info| info.id),
            datapath_group: group(&datapath, DATAPATH_GROUP),
            vport_group: group(&vport, VPORT_GROUP),
        })
    }

    async fn ovs_family(&mut self, name: &str) -> Result<FamilyInfo, KernelError> {
        let answer = self.family(name).await;
        let found = answer.map_err(|error| error.while_doing(format!("look up {name}")))?;
        found.ok_or(KernelError::OdpMissing)
    }
}

/// The sockets that upcalls come to. Unlike other sockets for notices they have fixed port numbers, which identify
/// our objects, and are several.
pub(super) struct Upcalls {
    sockets: Vec<TokioSocket>,
    next: usize,
    buffer: Vec<u8>,
}

impl Upcalls {
    /// Opens the sockets under their fixed port numbers, which only one switch of a namespace can
    /// have at a time.
    pub(super) fn open() -> Result<Self, KernelError> {
        let open_one = |index: usize| {
            let port = UPCALL_PORT_FIRST + u32::try_from(index).unwrap_or_default();
            open(NETLINK_GENERIC, port, 0, UPCALL_BUFFER_BYTES)
        };
        let sockets: io::Result<Vec<_>> = (0..UPCALL_SOCKETS).map(open_one).collect();
        let sockets = sockets.map_err(|source| match source.kind() {
            io::ErrorKind::AddrInUse => KernelError::SwitchTaken,
            _ => KernelError::Socket { doing: "open the sockets for upcalls".into(), source },
        })?;
        Ok(Self { sockets, next: 0, buffer: Vec::with_capacity(DATAGRAM_BYTES_MAX) })
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

/// The port number of the socket for upcalls of the port of this name. The internal port's number identifies
/// the datapath as ours.
pub(super) fn upcall_port(name: &str, internal: bool) -> u32 {
    // FNV-1a: spreads names, and is stable across restarts.
    let hash = name
        .bytes()
        .fold(0x811c_9dc5_u32, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
    let sockets = u32::try_from(UPCALL_SOCKETS).unwrap_or(1);
    if internal { UPCALL_PORT_FIRST } else { UPCALL_PORT_FIRST + hash % sockets }
}

/// Opens the socket for requests in the calling thread's network namespace.
pub(super) fn open_requests() -> Result<Requests, KernelError> {
    let doing = "open a generic netlink socket".to_owned();
    Requests::open().map_err(|source| KernelError::Socket { doing, source })
}

/// Opens the socket that notices of datapaths and ports come to, in the same namespace.
pub(super) fn open_notices() -> Result<Notices, KernelError> {
    generic::notices().map_err(cannot_watch)
}

/// Asks for the notices.
pub(super) fn join(notices: &Notices, families: &Families) -> Result<(), KernelError> {
    let groups = [families.datapath_group, families.vport_group];
    groups.into_iter().try_for_each(|group| notices.join(group)).map_err(cannot_watch)
}

fn cannot_watch(source: io::Error) -> KernelError {
    KernelError::Socket { doing: "watch the ports of datapaths".into(), source }
}

/// The socket that a listing of flows comes to, in pieces, while other work goes on.
pub(super) struct Sweep {
    exchange: Exchange,
    running: bool,
    entries: Vec<FlowEntry>,
}

impl Sweep {
    /// Opens the socket in the calling thread's network namespace.
    pub(super) fn open() -> Result<Self, KernelError> {
        let exchange = Exchange::open(NETLINK_GENERIC, RECEIVE_BUFFER_BYTES);
        let exchange = exchange.map_err(|source| KernelError::Socket {
            doing: "open a generic netlink socket".to_owned(),
            source,
        })?;
        Ok(Self { exchange, running: false, entries: Vec::new() })
    }

    /// Whether a listing is being read.
    pub(super) fn is_running(&self) -> bool {
        self.running
    }

    /// Requests a listing, unless one is being read.
    pub(super) async fn begin(&mut self, request: Writer) -> Result<(), RequestError> {
        if self.running {
            return Ok(());
        }
        self.entries.clear();
        self.exchange.begin(request).await?;
        self.running = true;
        Ok(())
    }

    /// Waits for the next piece, and returns the whole listing after the last. Pends if no listing was
    /// requested.
    ///
    /// # Errors
    /// The socket's, or the kernel's refusal; the listing is abandoned then.
    pub(super) async fn receive(&mut self) -> Result<Option<Vec<FlowEntry>>, RequestError> {
        if !self.running {
            return std::future::pending().await;
        }
        let Self { exchange, entries, .. } = self;
        let entry = |message: &Message<'_>| flow_entry(generic::command(message)?.1);
        let piece = exchange.piece(|message| entries.extend(entry(message))).await;
        self.running = matches!(piece, Ok(false));
        Ok(piece?.then(|| std::mem::take(&mut self.entries)))
    }
}
