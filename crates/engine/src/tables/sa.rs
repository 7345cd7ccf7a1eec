//! A path's packets in either wire format: the headers and trailers of a frame, and the seal
//! (`docs/design/esp.md`, `docs/design/ovpn.md`).
//!
//! The first four bytes of a packet name the receiver's SA in both formats. In `esp` they are the SPI; in `ovpn`
//! they are opcode, key id and peer id, which path choice calls the SPI.

use weft_crypto::{
    Format, OpenError, OpeningKey, PeerId, ReplayWindow, Reserved, SealingSa, TunnelEnd, TunnelWay,
    ovpn,
};
use weft_openvpn::data::PING;
use weft_packet::esp;
use weft_packet::tunnel::{self, Ends};
use weft_packet::vxlan::VxlanHeader;
use weft_path::{EngineKind, InboundSa, OutboundSa};

use crate::stats::counters::DropReason;

/// Bytes that a dummy takes at most.
pub(crate) const DUMMY_LEN_MAX: usize = ovpn::OVERHEAD_BYTES + PING.len();
const _: () = assert!(DUMMY_LEN_MAX >= esp::HEADER_LEN + esp::DUMMY_LEN + esp::ICV_LEN);

/// The SA's numbers, or its cipher's blocks, are used up.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NotSealed;

/// The sealing key of an outbound SA.
#[derive(Debug)]
pub(crate) enum Sealing {
    Esp(SealingSa),
    Ovpn(Box<OvpnSealing>),
}

#[derive(Debug)]
pub(crate) struct OvpnSealing {
    key: ovpn::SealingKey,
    spi: u32,
    ends: Ends,
}

/// The headers in front of a frame, the same for all packets of a plan.
#[derive(Clone, Copy)]
pub(crate) struct Inner {
    pub(crate) source_port: u16,
    pub(crate) port: u16,
    pub(crate) vxlan: VxlanHeader,
}

/// Makes packets of one format of frames that stand in their place.
pub(crate) trait Builder {
    /// The frame's offset in a packet.
    const FRAME_AT: usize;

    /// Length of the packet that carries a frame of this length, in bytes.
    fn packet_len(frame_len: usize) -> usize;

    /// Writes the headers and trailers of the frame, and seals.
    fn finish(
        &mut self,
        packet: &mut [u8],
        inner: Inner,
        frame_len: usize,
    ) -> Result<(), NotSealed>;
}

impl Sealing {
    /// Of an SA from `local` to `peer`.
    pub(crate) fn new(sa: &OutboundSa, local: &PeerId, peer: &PeerId) -> Self {
        match sa.key.format() {
            Format::Ovpn => Self::Ovpn(Box::new(OvpnSealing {
                key: ovpn::SealingKey::of_sa(sa.cipher, &sa.key),
                spi: sa.spi,
                ends: ends((local, EngineKind::Userspace), (peer, sa.remote_engine)),
            })),
            _ => Self::Esp(SealingSa::new(sa.cipher, sa.spi, &sa.key, sa.iv_salt)),
        }
    }

    pub(crate) fn spi(&self) -> u32 {
        match self {
            Self::Esp(sa) => sa.spi(),
            Self::Ovpn(sa) => sa.spi,
        }
    }

    /// An upper bound of the packets sealed.
    #[inline]
    pub(crate) fn packets(&self) -> u64 {
        match self {
            Self::Esp(sa) => sa.packets(),
            Self::Ovpn(sa) => sa.key.packets(),
        }
    }

    /// Seals a packet with nothing in it that the peer takes for a sign of life. Returns its length.
    pub(crate) fn seal_dummy(&self, packet: &mut [u8; DUMMY_LEN_MAX]) -> Result<usize, NotSealed> {
        match self {
            Self::Esp(sa) => {
                esp::write_dummy(&mut packet[esp::HEADER_LEN..]);
                let mut sealer = sa.reserve(1).map_err(|_| NotSealed)?;
                sealer.seal_in_place(packet, esp::DUMMY_LEN).map_err(|_| NotSealed)
            }
            Self::Ovpn(sa) => {
                packet[ovpn::OVERHEAD_BYTES..].copy_from_slice(&PING);
                let mut sealer = sa.reserve(1)?.sealer;
                sealer.seal_in_place(packet, PING.len()).map_err(|_| NotSealed)
            }
        }
    }
}

impl OvpnSealing {
    /// Takes ids for `packets` packets.
    ///
    /// # Errors
    /// Fewer ids are left.
    #[inline]
    pub(crate) fn reserve(&self, packets: u64) -> Result<OvpnBuilder<'_>, NotSealed> {
        let sealer = self.key.reserve(packets, self.spi.to_be_bytes());
        let sealer = sealer.map_err(|_| NotSealed)?;
        Ok(OvpnBuilder { sealer, ends: &self.ends })
    }
}

impl Builder for Reserved<'_> {
    const FRAME_AT: usize = esp::HEADER_LEN + esp::INNER_LEN;

    #[inline]
    fn packet_len(frame_len: usize) -> usize {
        esp::packet_len(frame_len)
    }

    #[inline]
    fn finish(
        &mut self,
        packet: &mut [u8],
        inner: Inner,
        frame_len: usize,
    ) -> Result<(), NotSealed> {
        let plain = &mut packet[esp::HEADER_LEN..];
        let Inner { source_port, port, vxlan } = inner;
        esp::write_inner_headers(plain, source_port, port, vxlan, frame_len);
        let plain_len = esp::INNER_LEN + frame_len;
        let trailer = esp::trailer_len(plain_len);
        esp::write_trailer(&mut plain[plain_len..], trailer - 2);
        self.seal_in_place(packet, plain_len + trailer).map(|_| ()).map_err(|_| NotSealed)
    }
}

/// Packet ids of an SA of format `ovpn`.
pub(crate) struct OvpnBuilder<'a> {
    sealer: ovpn::Reserved<'a>,
    ends: &'a Ends,
}

impl Builder for OvpnBuilder<'_> {
    const FRAME_AT: usize = ovpn::OVERHEAD_BYTES + tunnel::HEADERS_LEN;

    #[inline]
    fn packet_len(frame_len: usize) -> usize {
        Self::FRAME_AT + frame_len
    }

    #[inline]
    fn finish(
        &mut self,
        packet: &mut [u8],
        inner: Inner,
        frame_len: usize,
    ) -> Result<(), NotSealed> {
        let plain = &mut packet[ovpn::OVERHEAD_BYTES..];
        let ports = (inner.source_port, inner.port);
        tunnel::write_headers(plain, self.ends, ports, inner.vxlan, frame_len);
        let plain_len = tunnel::HEADERS_LEN + frame_len;
        self.sealer.seal_in_place(packet, plain_len).map(|_| ()).map_err(|_| NotSealed)
    }
}

/// The opening key of an inbound SA, without its replay window.
#[derive(Debug)]
pub(crate) enum Opening {
    Esp(OpeningKey),
    Ovpn(Box<OvpnOpening>),
}

#[derive(Debug)]
pub(crate) struct OvpnOpening {
    key: ovpn::OpeningKey,
    ends: Ends,
}

impl Opening {
    /// Of an SA from `peer` to `local`.
    pub(crate) fn new(sa: &InboundSa, local: &PeerId, peer: &PeerId) -> Self {
        match sa.key.format() {
            Format::Ovpn => Self::Ovpn(Box::new(OvpnOpening {
                key: ovpn::OpeningKey::of_sa(sa.cipher, &sa.key),
                ends: ends((peer, sa.remote_engine), (local, EngineKind::Userspace)),
            })),
            _ => Self::Esp(OpeningKey::new(sa.cipher, sa.spi, &sa.key)),
        }
    }

    /// Opens a packet in place. Returns its sequence number, or packet id, and how long its plaintext is. The
    /// packet counts as received once the SA's window is told; `window` may be an earlier state of it.
    #[inline]
    pub(crate) fn open(
        &self,
        window: &ReplayWindow,
        packet: &mut [u8],
    ) -> Result<(u64, usize), DropReason> {
        match self {
            Self::Esp(key) => {
                let opened = key.open_pipelined(window, packet).map_err(refused);
                opened.map(|(sequence, plain)| (sequence, plain.len()))
            }
            Self::Ovpn(of) => of.open(window, packet),
        }
    }

    /// Bytes of the plaintext in front of a frame.
    #[inline]
    pub(crate) const fn headers_len(&self) -> usize {
        match self {
            Self::Esp(_) => esp::INNER_LEN,
            Self::Ovpn(_) => tunnel::HEADERS_LEN,
        }
    }

    /// Looks into a packet that has been opened in place: its inner headers, with the frame's place in
    /// the packet. `None` for a dummy.
    #[inline]
    pub(crate) fn parse(&self, packet: &[u8]) -> Result<Option<esp::Inner>, DropReason> {
        if let Self::Ovpn(of) = self {
            return of.parse(packet);
        }
        let wrong = |_| DropReason::BadInner;
        let plain = packet.get(esp::HEADER_LEN..packet.len().saturating_sub(esp::ICV_LEN));
        let plain = plain.ok_or(DropReason::BadInner)?;
        let (length, next) = esp::parse_trailer(plain).map_err(wrong)?;
        match next {
            esp::NEXT_NONE => return Ok(None),
            esp::NEXT_UDP => {}
            _ => return Err(DropReason::BadInner),
        }
        let inner = esp::parse_inner_headers(&plain[..length]).map_err(wrong)?;
        Ok(Some(behind(&inner, esp::HEADER_LEN)))
    }
}

/// Out of line, so that the other format's path stays short.
impl OvpnOpening {
    #[inline(never)]
    fn open(&self, window: &ReplayWindow, packet: &mut [u8]) -> Result<(u64, usize), DropReason> {
        let opened = self.key.open_pipelined(window, packet).map_err(ovpn_refused);
        opened.map(|(number, plain)| (number, plain.len()))
    }

    #[inline(never)]
    fn parse(&self, packet: &[u8]) -> Result<Option<esp::Inner>, DropReason> {
        let plain = packet.get(ovpn::OVERHEAD_BYTES..).ok_or(DropReason::BadInner)?;
        if *plain == PING {
            return Ok(None);
        }
        let inner = tunnel::parse_headers(plain, &self.ends).map_err(|_| DropReason::BadInner)?;
        Ok(Some(behind(&inner, ovpn::OVERHEAD_BYTES)))
    }
}

/// The same headers, with the frame's place counted from `at` bytes before.
#[inline]
fn behind(inner: &esp::Inner, at: usize) -> esp::Inner {
    let frame = at + inner.frame.start..at + inner.frame.end;
    let esp::Inner { src_port, dst_port, vxlan, .. } = *inner;
    esp::Inner { src_port, dst_port, vxlan, frame }
}

/// The tunnel addresses of packets from one host's engine to another's.
fn ends(from: (&PeerId, EngineKind), to: (&PeerId, EngineKind)) -> Ends {
    let address = |(host, engine): (&PeerId, EngineKind), way| {
        host.tunnel_address(TunnelEnd { way, kernel: engine == EngineKind::Kernel })
    };
    Ends { source: address(from, TunnelWay::From), destination: address(to, TunnelWay::To) }
}

pub(crate) fn refused(error: OpenError) -> DropReason {
    match error {
        OpenError::TooShort => DropReason::Malformed,
        OpenError::Duplicate => DropReason::Replayed,
        OpenError::TooOld => DropReason::TooOld,
        OpenError::Forged => DropReason::Forged,
    }
}

pub(crate) fn ovpn_refused(error: ovpn::OpenError) -> DropReason {
    use ovpn::OpenError;
    match error {
        OpenError::TooShort | OpenError::ZeroPacketId => DropReason::Malformed,
        OpenError::Duplicate => DropReason::Replayed,
        OpenError::TooOld | OpenError::UnknownEpoch => DropReason::TooOld,
        OpenError::Forged | OpenError::TooManyFailures => DropReason::Forged,
    }
}
