//! The engine alone: one lane's hot path between devices that cost nothing.
//!
//! The TAP device hands out one prepared super-packet and discards all that is written. The socket discards GSO
//! batches, or hands out sealed ones. One core then does nothing but seal and open, without the kernel's copies and
//! calls: this is the engine's limit on this host.

mod crowd;

use std::cell::RefCell;
use std::hint::black_box;
use std::io::{self, IoSlice};
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use weft_crypto::{Cipher, PeerId, SaKey};
use weft_io::keylog::KeyLog;
use weft_io::udp::{RUN_BYTES_MAX, RUN_SEGMENTS_MIN, RecvBatch, Remote, UdpSocket};
use weft_packet::vnet::{self, VnetHeader};
use weft_packet::{checksum, esp, ethernet, ipv4, tcp, udp};
use weft_path::{
    Endpoint, EngineCommand, EngineEvent, EngineKind, InboundSa, Mac, OutboundSa, PathId, Vni,
};

use crate::error::EngineError;
use crate::ports::device::{Env, FrameSink, GsoSink};
use crate::ports::socket_buckets::RUN_MESSAGES_MAX;
use crate::rx::receiver::Receiver;
use crate::sample_sas::{inbound_sa, outbound_sa};
use crate::stats::counters::{Registry, WorkerCounters};
use crate::tables::networks::NetworkNumber;
use crate::tables::state::State;
use crate::tx::transmitter::Transmitter;

pub use self::crowd::{measure_helped, measure_lanes};

/// Endpoints that a lane's tables know: the containers of a large network.
pub const ENDPOINTS: u32 = 1_000;
/// Parts of the given time whose median is the figure; the first part is not counted.
const PARTS: u32 = 10;

const VNI: Vni = Vni(7);
const PATH: PathId = PathId(1);
const PEER: PeerId = PeerId::from_bytes([9; 32]);
const SPI: u32 = 300;
const NEAR_IP: Ipv4Addr = Ipv4Addr::new(10, 32, 0, 1);
const FAR_IP: Ipv4Addr = Ipv4Addr::new(10, 32, 0, 2);
/// The MTUs that a link of a lane can have, in bytes: IPv6's minimum (RFC 8200) to the largest that leaves room
/// for a whole datagram.
const LINK_MTU_MIN: u16 = 1280;
const LINK_MTU_MAX: u16 = 65_000;
/// The greatest UDP payload, in bytes, of which one run takes [`RUN_SEGMENTS_MIN`].
const UDP_PAYLOAD_MAX: u16 = 900;
/// Linux's TCP header: with time stamps (RFC 7323).
const TCP_HEADER_LEN: usize = tcp::LEN + 12;

/// The traffic that a lane carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Load {
    /// TCP super-packets of containers on hosts whose link has this MTU in bytes. Each has as many
    /// segments as one run takes.
    Tcp {
        /// The link's MTU.
        link_mtu: u16,
    },
    /// Small UDP packets, each read from the TAP device by itself.
    Udp {
        /// Payload of each in bytes, at most 900.
        payload: u16,
    },
}

/// The throughput of one core in one direction.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rate {
    /// Gigabits of payload a second: of TCP or UDP, as iperf3 counts them; of the AEAD by itself,
    /// plaintext.
    pub gbps: f64,
    /// Datagrams a second.
    pub packets_per_s: f64,
}

/// The rates of one core that only seals, and of one that only opens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    /// From the TAP device to the wire.
    pub sealed: Rate,
    /// From the wire to the TAP device.
    pub opened: Rate,
}

/// Measures one lane on the calling thread, for `time` each way and a little more.
///
/// # Errors
/// [`EngineError::Io`]: there is no UDP socket to be had.
pub fn measure(cipher: Cipher, load: Load, time: Duration) -> Result<Rates, EngineError> {
    let mut lane = Lane::new(cipher, load, RUN_MESSAGES_MAX)?;
    Ok(measure_lane(&mut lane, time, || {}))
}

/// Measures this lane; `begin` is called before each way.
fn measure_lane(lane: &mut Lane, time: Duration, begin: impl Fn()) -> Rates {
    let batch = (lane.packets(), lane.payload_bytes());
    begin();
    let sealed = rate(time, batch, || timed(|| lane.seal()));
    begin();
    let opened = rate(time, batch, || {
        lane.fill();
        timed(|| lane.open())
    });
    Rates { sealed, opened }
}

fn timed(work: impl FnOnce()) -> Duration {
    let start = Instant::now();
    work();
    start.elapsed()
}

/// The rate of batches with these packets and bytes; each call returns the time of one.
fn rate(
    time: Duration,
    (packets, bytes): (usize, usize),
    mut batch: impl FnMut() -> Duration,
) -> Rate {
    let part = (time / PARTS).max(Duration::from_micros(1));
    let rates: Vec<f64> = (0..=PARTS)
        .map(|_| {
            let (mut spent, mut batches) = (Duration::ZERO, 0.0);
            while spent < part {
                spent += batch();
                batches += 1.0;
            }
            batches / spent.as_secs_f64()
        })
        .skip(1)
        .collect();
    let median = median(rates);
    Rate { gbps: median * bytes as f64 * 8.0 / 1e9, packets_per_s: median * packets as f64 }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// One lane, both ends of it, with a batch of a load. Nothing allocates once it is made.
pub struct Lane {
    state: State,
    transmitter: Transmitter,
    receiver: Receiver,
    counters: WorkerCounters,
    /// The peer's address, to and from which packets go.
    remote: Remote,
    /// One read from the TAP device, virtio net header first.
    read: Vec<u8>,
    payload_len: usize,
    segments: usize,
    reads_per_run: usize,
    runs: usize,
}

impl Lane {
    /// A lane with its SAs, a peer and [`ENDPOINTS`] endpoints; a batch has `runs` runs, at most
    /// [`MESSAGES_MAX`](weft_io::udp::MESSAGES_MAX).
    ///
    /// # Errors
    /// [`EngineError::Io`]: there is no UDP socket to be had.
    pub fn new(cipher: Cipher, load: Load, runs: usize) -> Result<Self, EngineError> {
        let link_mtu = match load {
            Load::Tcp { link_mtu } => link_mtu.clamp(LINK_MTU_MIN, LINK_MTU_MAX),
            Load::Udp { .. } => LINK_MTU_MAX,
        };
        let container_mtu = esp::inner_mtu(link_mtu.into(), esp::OVERHEAD_V6_UDP);
        let (read, payload_len, segments, reads_per_run) = match load {
            Load::Tcp { .. } => {
                let (read, segments) = tcp_read(container_mtu);
                (read, container_mtu - ipv4::LEN - TCP_HEADER_LEN, segments, 1)
            }
            Load::Udp { payload } => {
                let payload = payload.clamp(1, UDP_PAYLOAD_MAX).into();
                (udp_read(payload), payload, 1, RUN_SEGMENTS_MIN)
            }
        };
        // Its address is all that is used of it.
        let socket = UdpSocket::bind(Some(Ipv4Addr::LOCALHOST.into()), 0)?;
        let address = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), socket.port());
        let remote = socket
            .remote(address)
            .map_err(|source| EngineError::Kernel { what: "take a separate address", source })?;
        let mut state =
            State::new(VNI, container_mtu as u16, Arc::new(Registry::default()), KeyLog::default());
        for command in commands(cipher, address) {
            // They come from here: none is refused.
            let _ = state.apply(command, |_| Ok(remote));
        }
        let mut receiver = Receiver::new();
        receiver.set_merging(true, true);
        Ok(Self {
            state,
            transmitter: Transmitter::new(RUN_SEGMENTS_MIN, mac(0)),
            receiver,
            counters: WorkerCounters::default(),
            remote,
            read,
            payload_len,
            segments,
            reads_per_run,
            runs,
        })
    }

    /// Datagrams of one batch.
    pub const fn packets(&self) -> usize {
        self.runs * self.reads_per_run * self.segments
    }

    /// Bytes of payload of one batch.
    pub const fn payload_bytes(&self) -> usize {
        self.packets() * self.payload_len
    }

    /// From the TAP device to the wire, one batch.
    pub fn seal(&mut self) {
        let env = Env { tap: &Void, socket: &Void, counters: &self.counters, events: &ignore };
        for _ in 0..self.runs {
            for _ in 0..self.reads_per_run {
                let network = self.state.networks.first();
                self.transmitter.handle_read(&self.state, &env, network, &self.read);
            }
            self.transmitter.flush(&self.state, &env);
        }
    }

    /// Seals the batch that [`Self::open`] then opens.
    pub fn fill(&mut self) {
        self.receiver.batch.clear();
        let wire = Wire { batch: RefCell::new(&mut self.receiver.batch), source: self.remote };
        let env = Env { tap: &Void, socket: &wire, counters: &self.counters, events: &ignore };
        for _ in 0..self.runs {
            for _ in 0..self.reads_per_run {
                let network = self.state.networks.first();
                self.transmitter.handle_read(&self.state, &env, network, &self.read);
            }
            self.transmitter.flush(&self.state, &env);
        }
    }

    /// From the wire to the TAP device, the batch of [`Self::fill`].
    pub fn open(&mut self) {
        let env = Env { tap: &Void, socket: &Void, counters: &self.counters, events: &ignore };
        self.receiver.handle_batch(&self.state, &env);
    }

    /// Looks up an endpoint, as each frame does: whether it is known.
    pub fn knows_endpoint(&self, number: u32) -> bool {
        self.state.peer_of(NetworkNumber::FIRST.key(mac(number).0)).is_some()
    }

    /// A read from the TAP device: virtio net header, then the frame.
    pub fn read(&self) -> &[u8] {
        &self.read
    }
}

impl std::fmt::Debug for Lane {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lane").field("packets", &self.packets()).finish_non_exhaustive()
    }
}

/// A TAP device and a socket that swallow everything.
struct Void;

impl FrameSink for Void {
    #[inline]
    fn send(&self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        Ok(black_box(slices).len())
    }
}

impl GsoSink for Void {
    #[inline]
    fn send_batch(&self, batch: &[u8], segment: usize, _to: &Remote) -> io::Result<()> {
        black_box((batch, segment));
        Ok(())
    }
}

/// A socket whose GSO batches arrive in a batch at once.
struct Wire<'a> {
    batch: RefCell<&'a mut RecvBatch>,
    source: Remote,
}

impl GsoSink for Wire<'_> {
    fn send_batch(&self, batch: &[u8], segment: usize, _to: &Remote) -> io::Result<()> {
        let taken = self.batch.borrow_mut().push(batch, segment, &self.source);
        if taken { Ok(()) } else { Err(io::ErrorKind::WouldBlock.into()) }
    }
}

fn ignore(_event: EngineEvent) {}

/// The Ethernet address of an endpoint. All are the peer's, since one lane is both ends.
fn mac(number: u32) -> Mac {
    let [a, b, c, d] = number.to_be_bytes();
    Mac([0x02, 0x57, a, b, c, d])
}

/// The peer, its path with one SA each way, under a key that seals nothing else, and its endpoints.
fn commands(cipher: Cipher, remote: SocketAddr) -> [EngineCommand; 4] {
    let key = SaKey::from_bytes([3; 36]);
    let inbound = InboundSa { cipher, key: key.clone(), ..inbound_sa(SPI) };
    let outbound = OutboundSa { cipher, key, ..outbound_sa(SPI) };
    let endpoint = |number| Endpoint { mac: mac(number), addresses: Vec::new() };
    let add = (0..ENDPOINTS).map(|number| (endpoint(number), PEER)).collect();
    let engine = EngineKind::Userspace;
    [
        EngineCommand::InstallInbound {
            engine,
            remote: remote.ip(),
            peer: PEER,
            path: PATH,
            sa: inbound,
        },
        EngineCommand::InstallOutbound { engine, peer: PEER, path: PATH, sa: outbound, remote },
        EngineCommand::BindPath { peer: PEER, path: Some(PATH) },
        EngineCommand::SetEndpoints { vni: VNI, add, remove: Vec::new() },
    ]
}

/// A TCP super-packet for this MTU, as long as one run carries, and its segments.
fn tcp_read(mtu: usize) -> (Vec<u8>, usize) {
    let header_len = ethernet::LEN + ipv4::LEN + TCP_HEADER_LEN;
    let segment = mtu - ipv4::LEN - TCP_HEADER_LEN;
    let of_packet = (usize::from(u16::MAX) - ipv4::LEN - TCP_HEADER_LEN) / segment;
    let segments = (RUN_BYTES_MAX / esp::packet_len(ethernet::LEN + mtu)).min(of_packet);
    let mut read = frame(ipv4::PROTOCOL_TCP, TCP_HEADER_LEN, segments * segment);
    let header = &mut read[vnet::LEN + ethernet::LEN + ipv4::LEN..];
    header[..4].copy_from_slice(&[0xc0, 1, 0x14, 0x51]);
    header[12] = ((TCP_HEADER_LEN / 4) << 4) as u8;
    header[13] = tcp::ACK;
    header[14..16].copy_from_slice(&500_u16.to_be_bytes());
    // Two paddings, then the time stamps.
    header[20..24].copy_from_slice(&[1, 1, 8, 10]);
    let mark = VnetHeader {
        flags: vnet::F_NEEDS_CSUM,
        gso_type: vnet::GSO_TCPV4,
        hdr_len: header_len as u16,
        gso_size: segment as u16,
        csum_start: (ethernet::LEN + ipv4::LEN) as u16,
        csum_offset: tcp::CHECKSUM_OFFSET,
    };
    finish(&mut read, &mark, ipv4::PROTOCOL_TCP);
    (read, segments)
}

/// A UDP packet, its checksum still partial, as containers send them.
fn udp_read(payload: usize) -> Vec<u8> {
    let mut read = frame(ipv4::PROTOCOL_UDP, udp::LEN, payload);
    let header = &mut read[vnet::LEN + ethernet::LEN + ipv4::LEN..];
    header[..4].copy_from_slice(&[0xc0, 1, 0x14, 0x51]);
    header[4..6].copy_from_slice(&((udp::LEN + payload) as u16).to_be_bytes());
    let mark = VnetHeader {
        flags: vnet::F_NEEDS_CSUM,
        csum_start: (ethernet::LEN + ipv4::LEN) as u16,
        csum_offset: udp::CHECKSUM_OFFSET,
        ..VnetHeader::default()
    };
    finish(&mut read, &mark, ipv4::PROTOCOL_UDP);
    read
}

/// Room for the virtio net header, Ethernet and IPv4 header, room for the transport header, payload.
fn frame(protocol: u8, transport_len: usize, payload: usize) -> Vec<u8> {
    let mut read = vec![0; vnet::LEN + ethernet::LEN + ipv4::LEN + transport_len];
    ethernet::write(&mut read[vnet::LEN..], mac(1).0, mac(0).0, ethernet::TYPE_IPV4);
    let header = ipv4::Builder {
        tos: 0,
        total_len: (ipv4::LEN + transport_len + payload) as u16,
        id: 77,
        dont_fragment: true,
        ttl: 64,
        protocol,
        source: NEAR_IP,
        destination: FAR_IP,
    };
    header.write(&mut read[vnet::LEN + ethernet::LEN..]);
    read.extend((0..payload).map(|at| (at * 31 + at / 251) as u8));
    read
}

/// Writes the mark, and the pseudo-header's sum to where it says.
fn finish(read: &mut [u8], mark: &VnetHeader, protocol: u8) {
    mark.write(read);
    let start = vnet::LEN + usize::from(mark.csum_start);
    let len = (read.len() - start) as u32;
    let sum = checksum::pseudo_v4(NEAR_IP, FAR_IP, protocol, len).partial();
    let field = start + usize::from(mark.csum_offset);
    read[field..field + 2].copy_from_slice(&sum.to_be_bytes());
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::stats::counters::Work;

    const LOADS: [Load; 3] =
        [Load::Tcp { link_mtu: 1500 }, Load::Tcp { link_mtu: 9000 }, Load::Udp { payload: 64 }];

    /// All that is sealed is opened, merged and written: nothing is measured that does not happen.
    #[test]
    fn a_batch_crosses_whole() {
        for cipher in [Cipher::Aes256Gcm, Cipher::ChaCha20Poly1305] {
            for load in LOADS {
                let mut lane = Lane::new(cipher, load, 2).unwrap();
                for turn in 1..=3 {
                    lane.seal();
                    lane.fill();
                    lane.open();
                    let counters =
                        Registry::default().read(&[Arc::new(std::mem::take(&mut lane.counters))]);
                    let drops: u64 = counters.drops.iter().map(|(_, count)| count).sum();
                    assert_eq!(drops, 0, "{load:?}, turn {turn}: {:?}", counters.drops);
                    let packets = lane.packets() as u64;
                    assert_eq!(counters.done(Work::DatagramsSent), 2 * packets, "{load:?}");
                    assert_eq!(counters.done(Work::DatagramsReceived), packets, "{load:?}");
                    assert_eq!(counters.done(Work::TapWrites), 2, "{load:?}");
                }
            }
        }
    }

    #[test]
    fn a_run_is_full() {
        let lane = |load| Lane::new(Cipher::Aes256Gcm, load, 1).unwrap();
        let [near, jumbo, small] = LOADS.map(lane);
        assert_eq!((near.packets(), near.payload_bytes()), (45, 45 * 1336));
        assert_eq!((jumbo.packets(), jumbo.payload_bytes()), (7, 7 * 8836));
        assert_eq!((small.packets(), small.payload_bytes()), (64, 64 * 64));
    }

    #[test]
    fn a_lane_knows_its_endpoints_and_no_others() {
        let lane = Lane::new(Cipher::Aes256Gcm, LOADS[0], 1).unwrap();
        assert!((0..ENDPOINTS).all(|number| lane.knows_endpoint(number)));
        assert!(!lane.knows_endpoint(ENDPOINTS));
    }

    #[test]
    fn a_rate_is_the_median_of_its_parts() {
        // Every batch takes a second but one, in the fourth part, that takes an hour.
        let mut batches = 0;
        let second = Duration::from_secs(1);
        let result = rate(second * PARTS, (10, 1_000_000), || {
            batches += 1;
            if batches == 4 { second * 3_600 } else { second }
        });
        assert_eq!(batches, PARTS + 1);
        assert_eq!(result, Rate { gbps: 0.008, packets_per_s: 10.0 });
    }

    #[test]
    fn figures_are_of_both_ways() {
        let time = Duration::from_millis(5);
        let lane = measure(Cipher::Aes256Gcm, LOADS[0], time).unwrap();
        for rate in [lane.sealed, lane.opened] {
            assert!(rate.gbps > 0.0 && rate.packets_per_s > 0.0, "{rate:?}");
        }
        let payload = lane.sealed.gbps * 1e9 / 8.0 / lane.sealed.packets_per_s;
        assert!((payload - 1336.0).abs() < 0.1, "{payload}");
    }
}
