//! Probes of kernel paths (`docs/design/paths.md`).
//!
//! They are sent from an ordinary UDP socket that writes the VXLAN header itself. So the kernel seals them by
//! the same policy as the frames of the VXLAN device, and reports a datagram that is too long. Probes of
//! candidates arrive on another socket. Those of the active path arrive on a separate VXLAN device, which
//! shares the data's UDP port.
//!
//! Nothing is ever sent to the port that they leave from. If two hosts sent probes from one port to the same
//! port, a stateful firewall would take each for an answer to the other. It would then let them in where it
//! drops frames.

use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::Arc;

use tokio::sync::mpsc;
use weft_crypto::PeerId;
use weft_io::packet::PacketSocket;
use weft_io::poller::{Poller, Waker};
use weft_io::udp::UdpSocket;
use weft_packet::vxlan::{self, VxlanHeader};
use weft_packet::{ethernet, probe};

use super::action::Probe;
use super::probe_mac;
use crate::error::KernelError;
use crate::firewall::guard::SENT_PRIORITY;

/// All hosts on the link, so that any device of the peer accepts the probe.
const MAC_ALL: [u8; 6] = [0x33, 0x33, 0, 0, 0, 1];
const IP_ALL: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
/// The kernel chooses a free port.
const ANY_PORT: u16 = 0;
/// Room for one frame in bytes: the longest UDP payload.
const FRAME_ROOM_BYTES: usize = 65_536;
/// Datagrams taken from the candidates' socket between two looks at the other sockets.
const BATCH_MAX: usize = 64;
/// Probes that wait for the engine's task; more are lost, as on the network.
const RECEIVED_QUEUED_MAX: usize = 1_024;

/// A probe that came in.
pub(super) struct Received {
    /// The Ethernet address that it comes from.
    pub(super) mac: [u8; 6],
    pub(super) probe: u64,
    /// Length of the inner IP packet in bytes.
    pub(super) mtu: u16,
    pub(super) candidate: bool,
}

/// Why a probe did not leave.
#[derive(Debug)]
pub(super) enum SendError {
    /// The route's MTU is smaller.
    TooLong,
    /// The kernel's refusal.
    Refused(io::Error),
}

/// The sockets for probes. A thread reads them, so that waiting needs nothing of the runtime.
pub(super) struct Probes {
    mac: [u8; 6],
    /// Receives probes of candidates.
    socket: Arc<UdpSocket>,
    sender: UdpSocket,
    frame: Vec<u8>,
    indices: Vec<u32>,
    reader: Reader,
}

/// The thread that reads; it ends when this is dropped.
struct Reader {
    received: mpsc::Receiver<Received>,
    waker: Waker,
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.received.close();
        self.waker.wake();
    }
}

impl Probes {
    /// Opens the sockets; `devices` are the indices of the probes' VXLAN devices.
    pub(super) fn open(
        local: &PeerId,
        host: Option<IpAddr>,
        devices: &[u32],
    ) -> Result<Self, KernelError> {
        let open = |port| {
            let mut socket = UdpSocket::bind(host, port)
                .map_err(|error| failed("open the probes' port", other(&error)))?;
            // As the VXLAN devices do: a NAT between the hosts would break checksums inside ESP.
            socket
                .leave_out_checksums()
                .and_then(|()| socket.stop_merging())
                .and_then(|()| socket.set_priority(SENT_PRIORITY.cast_signed()))
                .map_err(|source| failed("set up the probes' port", source))?;
            Ok(socket)
        };
        let (socket, sender) = (Arc::new(open(vxlan::PROBE_PORT)?), open(ANY_PORT)?);
        sender
            .receive_nothing()
            .map_err(|source| failed("close the probes' own port to others", source))?;
        let reader = Reader::start(Arc::clone(&socket), devices)?;
        let (mac, frame) = (probe_mac(local), vec![0; FRAME_ROOM_BYTES]);
        Ok(Self { mac, socket, sender, frame, indices: devices.to_vec(), reader })
    }

    /// Listens on these devices, where it does not already.
    pub(super) fn reopen(&mut self, devices: &[u32]) -> Result<(), KernelError> {
        if self.indices != devices {
            self.reader = Reader::start(Arc::clone(&self.socket), devices)?;
            self.indices = devices.to_vec();
        }
        Ok(())
    }

    /// Sends one probe.
    pub(super) fn send(&mut self, wanted: &Probe) -> Result<(), SendError> {
        let header = VxlanHeader { vni: vxlan::VNI_MAX, rco: None };
        self.frame[..vxlan::LEN].copy_from_slice(&header.to_bytes());
        let room = &mut self.frame[vxlan::LEN..];
        let source = ethernet::Mac(self.mac).link_local();
        let (number, mtu) = (wanted.number, wanted.mtu);
        let written = probe::write(room, self.mac, MAC_ALL, source, IP_ALL, number, mtu);
        let length = vxlan::LEN + written.map_err(|error| refused(error.to_string()))?;
        let socket = &self.sender;
        let to = SocketAddr::new(wanted.remote, wanted.port);
        let remote = socket.remote(to).map_err(SendError::Refused)?;
        match socket.send_run(&self.frame[..length], length, &remote) {
            Err(error)
                if error.raw_os_error() == Some(rustix::io::Errno::MSGSIZE.raw_os_error()) =>
            {
                Err(SendError::TooLong)
            }
            result => result.map_err(SendError::Refused),
        }
    }

    /// Waits for the next probe. Cancel safe.
    pub(super) async fn receive(&mut self) -> io::Result<Received> {
        let received = self.reader.received.recv().await;
        received.ok_or_else(|| io::Error::other("the thread that reads probes has ended"))
    }
}

impl Reader {
    fn start(socket: Arc<UdpSocket>, devices: &[u32]) -> Result<Self, KernelError> {
        const DOING: &str = "listen for probes";
        let (sender, received) = mpsc::channel(RECEIVED_QUEUED_MAX);
        let waker = Waker::new().map_err(|source| failed(DOING, source))?;
        let open = |index: &u32| PacketSocket::open(*index);
        let devices: Result<Vec<_>, _> = devices.iter().map(open).collect();
        let devices = devices.map_err(|error| failed(DOING, other(&error)))?;
        let stop = waker.clone();
        std::thread::Builder::new()
            .name("weft-probes".into())
            .spawn(move || {
                if let Err(error) = read(&stop, &socket, devices, &sender) {
                    tracing::error!(%error, "probes are no longer read");
                }
            })
            .map_err(|source| failed(DOING, source))?;
        Ok(Self { received, waker })
    }
}

/// Reads until the receiver is gone or `stop` wakes it.
fn read(
    stop: &Waker,
    socket: &UdpSocket,
    mut devices: Vec<PacketSocket>,
    sender: &mpsc::Sender<Received>,
) -> io::Result<()> {
    let mut poller = Poller::new()?;
    devices.iter().try_for_each(|device| poller.add(device, 0))?;
    poller.add(socket, 0)?;
    poller.add(stop, 0)?;
    let mut frame = vec![0; FRAME_ROOM_BYTES];
    while !sender.is_closed() {
        let _ready = poller.wait(None)?;
        stop.clear();
        // A device that is gone reports an error on every read; the worker opens a new one.
        devices.retain(|device| {
            loop {
                match device.recv(&mut frame) {
                    // A full queue loses a probe as the network may.
                    Ok(length) => parse(&frame[..length], false)
                        .into_iter()
                        .for_each(|received| _ = sender.try_send(received)),
                    Err(error) => return error.kind() == io::ErrorKind::WouldBlock,
                }
            }
        });
        for _ in 0..BATCH_MAX {
            match socket.recv_datagram(&mut frame) {
                Ok(length) => {
                    let received = candidate(&frame[..length]);
                    received.into_iter().for_each(|received| _ = sender.try_send(received));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                // Errors of earlier sends come here too, one by one, and leave the socket as it is.
                Err(_) => {}
            }
        }
    }
    Ok(())
}

fn failed(doing: &str, source: io::Error) -> KernelError {
    KernelError::Socket { doing: doing.into(), source }
}

fn other(error: &weft_io::IoError) -> io::Error {
    io::Error::other(error.to_string())
}

/// A datagram on the candidates' port.
fn candidate(datagram: &[u8]) -> Option<Received> {
    let header = VxlanHeader::parse(datagram).ok()?;
    (header.vni == vxlan::VNI_MAX).then(|| parse(datagram.get(vxlan::LEN..)?, true))?
}

/// A probe's whole frame.
pub(super) fn parse(frame: &[u8], candidate: bool) -> Option<Received> {
    let (probe, mtu) = probe::parse(frame)?;
    let mac = ethernet::Header::parse(frame).ok()?.source();
    Some(Received { mac, probe, mtu, candidate })
}

fn refused(text: String) -> SendError {
    SendError::Refused(io::Error::other(text))
}
