//! Probes of kernel paths (DESIGN section 7).
//!
//! They are sent from an ordinary UDP socket that writes the VXLAN header itself, so that the kernel
//! seals them by the same policy as the frames of the VXLAN device and reports a datagram that is
//! too long. Those of candidates come back in on the same socket; those of the active path on a VXLAN
//! device of their own, which shares the data's UDP port.

use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::task::Poll;

use tokio::io::unix::AsyncFd;
use weft_crypto::PeerId;
use weft_io::packet::PacketSocket;
use weft_io::udp::UdpSocket;
use weft_packet::vxlan::{self, VxlanHeader};
use weft_packet::{ethernet, probe};

use super::probe_mac;
use super::state::Probe;
use crate::error::KernelError;

/// All hosts on the link: whatever device the peer takes probes on.
const MAC_ALL: [u8; 6] = [0x33, 0x33, 0, 0, 0, 1];
const IP_ALL: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
/// Room for one frame in bytes: the longest UDP payload.
const FRAME_ROOM_BYTES: usize = 65_536;
/// Probes taken from one socket in one go.
const BATCH_MAX: usize = 64;

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

/// The sockets for probes.
pub(super) struct Probes {
    mac: [u8; 6],
    socket: AsyncFd<Raw<UdpSocket>>,
    /// With their indices.
    devices: Vec<(u32, AsyncFd<PacketSocket>)>,
    frame: Vec<u8>,
}

/// Gives a socket the trait that tokio asks for.
pub(super) struct Raw<T>(T);

impl<T: AsFd> AsRawFd for Raw<T> {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_fd().as_raw_fd()
    }
}

impl Probes {
    /// Opens the sockets; `devices` are the indices of the probes' VXLAN devices.
    pub(super) fn open(
        local: PeerId,
        host: Option<IpAddr>,
        devices: &[u32],
    ) -> Result<Self, KernelError> {
        let failed = |doing: &str, source| KernelError::Socket { doing: doing.into(), source };
        let other = |doing: &'static str| {
            move |error: weft_io::IoError| failed(doing, io::Error::other(error.to_string()))
        };
        let mut socket =
            UdpSocket::bind(host, vxlan::PROBE_PORT).map_err(other("open the probes' port"))?;
        socket
            .accept_no_checksum()
            .and_then(|()| socket.stop_merging())
            .map_err(|source| failed("set up the probes' port", source))?;
        let mut probes = Self {
            mac: probe_mac(local),
            socket: AsyncFd::new(Raw(socket))
                .map_err(|source| failed("watch the probes' port", source))?,
            devices: Vec::new(),
            frame: vec![0; FRAME_ROOM_BYTES],
        };
        probes.reopen(devices)?;
        Ok(probes)
    }

    /// Listens on these devices, where it does not already.
    pub(super) fn reopen(&mut self, indices: &[u32]) -> Result<(), KernelError> {
        self.devices.retain(|(index, _)| indices.contains(index));
        for index in indices {
            if self.devices.iter().any(|(open, _)| open == index) {
                continue;
            }
            let failed = |source| KernelError::Socket {
                doing: "listen on the probes' device".into(),
                source,
            };
            let socket = PacketSocket::open(*index)
                .map_err(|error| failed(io::Error::other(error.to_string())))?;
            self.devices.push((*index, AsyncFd::new(socket).map_err(failed)?));
        }
        Ok(())
    }

    /// Sends one probe.
    pub(super) fn send(&mut self, wanted: &Probe) -> Result<(), SendError> {
        let header = VxlanHeader { vni: vxlan::VNI_MAX, rco: None };
        self.frame[..vxlan::LEN].copy_from_slice(&header.to_bytes());
        let room = &mut self.frame[vxlan::LEN..];
        let source = link_local(self.mac);
        let (number, mtu) = (wanted.number, wanted.mtu);
        let written = probe::write(room, self.mac, MAC_ALL, source, IP_ALL, number, mtu);
        let length = vxlan::LEN + written.map_err(|error| refused(error.to_string()))?;
        let socket = &self.socket.get_ref().0;
        let to = SocketAddr::new(wanted.remote, wanted.port);
        let remote = socket.remote(to).map_err(SendError::Refused)?;
        match socket.send_run(&self.frame[..length], length, &remote) {
            Err(error) if error.raw_os_error() == Some(rustix::io::Errno::MSGSIZE.raw_os_error()) => {
                Err(SendError::TooLong)
            }
            result => result.map_err(SendError::Refused),
        }
    }

    /// Waits for the next probes. Cancel safe: what was read is returned at once.
    pub(super) async fn receive(&mut self) -> io::Result<Vec<Received>> {
        loop {
            let (received, more) = self.drain();
            if !received.is_empty() {
                return Ok(received);
            }
            if !more {
                self.ready().await?;
            }
        }
    }

    /// Waits until a socket may have something, and forgets that it has.
    async fn ready(&self) -> io::Result<()> {
        std::future::poll_fn(|context| {
            let mut any = false;
            for (_, device) in &self.devices {
                if let Poll::Ready(guard) = device.poll_read_ready(context) {
                    guard?.clear_ready();
                    any = true;
                }
            }
            if let Poll::Ready(guard) = self.socket.poll_read_ready(context) {
                guard?.clear_ready();
                any = true;
            }
            if any { Poll::Ready(Ok(())) } else { Poll::Pending }
        })
        .await
    }

    /// The flag says that there may be more.
    fn drain(&mut self) -> (Vec<Received>, bool) {
        let (mut received, mut more) = (Vec::new(), false);
        for (_, device) in &self.devices {
            let mut taken = 0;
            while taken < BATCH_MAX
                && let Ok(length) = device.get_ref().recv(&mut self.frame)
            {
                taken += 1;
                received.extend(parse(&self.frame[..length], false));
            }
            more |= taken == BATCH_MAX;
        }
        let mut taken = 0;
        while taken < BATCH_MAX
            && let Ok(length) = self.socket.get_ref().0.recv_datagram(&mut self.frame)
        {
            taken += 1;
            received.extend(candidate(&self.frame[..length]));
        }
        (received, more || taken == BATCH_MAX)
    }
}

/// A datagram on the candidates' port.
fn candidate(datagram: &[u8]) -> Option<Received> {
    let header = VxlanHeader::parse(datagram).ok()?;
    (header.vni == vxlan::VNI_MAX).then(|| parse(datagram.get(vxlan::LEN..)?, true))?
}

fn parse(frame: &[u8], candidate: bool) -> Option<Received> {
    let (probe, mtu) = probe::parse(frame)?;
    let mac = ethernet::Header::parse(frame).ok()?.source();
    Some(Received { mac, probe, mtu, candidate })
}

fn refused(text: String) -> SendError {
    SendError::Refused(io::Error::other(text))
}

/// The link-local address of a MAC (RFC 4291 appendix A).
fn link_local([a, b, c, d, e, f]: [u8; 6]) -> Ipv6Addr {
    let high = |left: u8, right: u8| u16::from_be_bytes([left, right]);
    Ipv6Addr::new(0xfe80, 0, 0, 0, high(a ^ 2, b), high(c, 0xff), high(0xfe, d), high(e, f))
}
