//! Merging received frames into super-packets without copying them.
//!
//! All frames of a batch lie in one arena and are named by ranges of it. [`Coalescer::push`] files them,
//! [`Coalescer::flush`] gives each result as a patched header and a list of payload ranges, for one gathering
//! write. The rules are those of Linux's GRO for TCP and of its UDP fraglist-free GRO, and three of Weft's own. A
//! frame whose checksum is complete is merged only once it is verified. Nothing of one flow ever overtakes
//! anything of the same flow. Frames of different networks are never merged, even if all their headers are equal.

use std::ops::Range;

use crate::bytes::{be16, be32, put16};
use crate::checksum::Sum;
use crate::layout::{self, Headers, Layout, Network, Opaque, Transport};
use crate::split::{FrameChecksum, marks};
use crate::vnet::{self, VnetHeader};
use crate::{ethernet, ipv4, ipv6, tcp};

/// Results (super-packets or frames) that one batch can have before it must be flushed.
pub const RESULTS_MAX: usize = 64;
/// Frames in one super-packet; Linux cuts no UDP super-packet into more (`UDP_MAX_SEGMENTS`).
pub const FRAMES_MAX: usize = 64;
/// Bytes of the IP packet of a super-packet.
pub const PACKET_LEN_MAX: usize = 65_535;
/// Bytes of headers that a super-packet can have.
pub const HEADER_LEN_MAX: usize =
    ethernet::LEN + ethernet::VLAN_TAGS_MAX * ethernet::VLAN_LEN + ipv4::LEN_MAX + tcp::LEN_MAX;

const BUCKETS: usize = 256;

/// There is no room: flush, then push the same frame again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the coalescer is full; flush it and push again")]
pub struct Full;

/// Frames that [`Coalescer::push`] took and dropped, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rejected {
    /// The mark of a partial checksum is not at the checksum of the frame's TCP or UDP header: the
    /// peer is at fault.
    pub bad_mark: u64,
    /// The range is not in the arena: the caller is at fault.
    pub bad_range: u64,
}

/// One frame to write to the TAP device: [`Self::vnet`], [`Self::header`], then the slices.
#[derive(Debug)]
pub struct Merged<'a> {
    /// The virtio net header's bytes.
    pub vnet: [u8; vnet::LEN],
    /// The headers, patched; empty for a frame that is written as it came.
    pub header: &'a [u8],
    /// Pieces of payload in the arena, in order; or the one whole frame.
    pub slices: &'a [Range<u32>],
    /// How many received frames this is.
    pub frames: u32,
    /// The number of the network that they are of.
    pub network: u16,
    /// Bytes of header and slices.
    pub frame_len: usize,
}

/// Collects the frames of one batch. Holds nothing over a [`Self::flush`].
pub struct Coalescer {
    items: Box<[Item; RESULTS_MAX]>,
    slices: Box<[[Range<u32>; FRAMES_MAX]; RESULTS_MAX]>,
    len: usize,
    /// The item that took the last frame of a known flow, and so is the newest of that flow. In a run of one flow
    /// this is the only look-up.
    last: Option<u8>,
    /// By flow hash: the newest item of a flow. A flow that another pushes out loses a merge, not its order: its
    /// next frame opens a new item behind all others.
    buckets: Box<[u8; BUCKETS]>,
    header: [u8; HEADER_LEN_MAX],
    rejected: Rejected,
    merge_tcp: bool,
    merge_udp: bool,
}

/// One result in the making.
#[derive(Clone, Debug)]
struct Item {
    /// The whole first frame.
    first: Range<u32>,
    /// The layout of its headers; `None` if they were not found.
    layout: Option<Layout>,
    kind: Kind,
    /// Whether frames may still be appended.
    open: bool,
    /// Whether the first frame's checksum needs no more look.
    verified: bool,
    frames: u8,
    hash: u32,
    segment_len: usize,
    payload_len: usize,
    /// TCP: the sequence number that continues this item.
    next_sequence: u32,
    /// IPv4: the identification that continues this item.
    next_id: u16,
    /// TCP: flags of the last frame, which tell whether to push.
    last_flags: u8,
}

/// Two of the conditions that all frames of a super-packet share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Kind {
    network: u16,
    /// Whether the checksum is partial.
    partial: bool,
}

const EMPTY: u8 = u8::MAX;

impl Default for Coalescer {
    fn default() -> Self {
        Self::new()
    }
}

impl Coalescer {
    /// Allocates all the memory that will ever be used.
    #[must_use]
    pub fn new() -> Self {
        Self {
            items: Box::new(std::array::from_fn(|_| Item::NONE)),
            slices: Box::new(std::array::from_fn(|_| std::array::from_fn(|_| 0..0))),
            len: 0,
            last: None,
            buckets: Box::new([EMPTY; BUCKETS]),
            header: [0; HEADER_LEN_MAX],
            rejected: Rejected::default(),
            merge_tcp: true,
            merge_udp: true,
        }
    }

    /// Says which super-packets the TAP device takes; both, to begin with. Frames of a kind that is off are
    /// written one by one.
    pub fn set_merging(&mut self, tcp: bool, udp: bool) {
        self.merge_tcp = tcp;
        self.merge_udp = udp;
    }

    /// Takes the frame at `frame` in `arena`, with its headers; between flushes, `arena` is the same one. A
    /// frame whose `checksum` cannot be as it says is dropped and counted in [`Self::take_rejected`]. All frames
    /// are of one network, number 0.
    ///
    /// # Errors
    /// [`Full`] if the frame was not taken.
    ///
    /// # Panics
    /// If `headers` are not the frame's.
    #[inline]
    pub fn push(
        &mut self,
        arena: &[u8],
        frame: Range<u32>,
        headers: &Headers,
        checksum: FrameChecksum,
    ) -> Result<(), Full> {
        self.push_of(0, arena, frame, headers, checksum)
    }

    /// As [`Self::push`], a frame of the network with this number.
    ///
    /// # Errors
    /// [`Full`] if the frame was not taken.
    ///
    /// # Panics
    /// If `headers` are not the frame's.
    pub fn push_of(
        &mut self,
        network: u16,
        arena: &[u8],
        frame: Range<u32>,
        headers: &Headers,
        checksum: FrameChecksum,
    ) -> Result<(), Full> {
        let Some(bytes) = slice(arena, &frame) else {
            self.rejected.bad_range += 1;
            return Ok(());
        };
        let partial = match checksum {
            FrameChecksum::Complete => false,
            FrameChecksum::Partial { start, offset } => {
                if !headers.as_ref().is_ok_and(|layout| marks(layout, start, offset)) {
                    self.rejected.bad_mark += 1;
                    return Ok(());
                }
                true
            }
        };
        let kind = Kind { network, partial };
        match headers {
            Ok(layout) => self.push_flow(arena, frame, bytes, layout, kind),
            Err(opaque) => {
                self.open(Item { first: frame, kind, ..Item::NONE })?;
                if let Opaque::Hidden { l3, network: family } = *opaque {
                    let addresses = layout::addresses(bytes, l3, family);
                    self.close_between(arena, addresses, family, network);
                }
                Ok(())
            }
        }
    }

    /// Gives every result to `write`, in the order of their first frames, and is empty then.
    pub fn flush(&mut self, arena: &[u8], mut write: impl FnMut(Merged<'_>)) {
        for (item, slices) in self.items[..self.len].iter().zip(self.slices.iter_mut()) {
            let frames = usize::from(item.frames);
            let first = slice(arena, &item.first).unwrap_or_default();
            let (vnet, header_len) = match &item.layout {
                Some(layout) if frames > 1 && first.len() >= layout.payload => {
                    item.merged_header(first, layout, &mut self.header)
                }
                layout => {
                    slices[0] = item.first.clone();
                    (item.whole_vnet(layout.as_ref()), 0)
                }
            };
            let slices = &slices[..frames];
            let payload: usize = slices.iter().map(|slice| slice.len()).sum();
            write(Merged {
                vnet: vnet.to_bytes(),
                header: &self.header[..header_len],
                slices,
                frames: u32::from(item.frames),
                network: item.kind.network,
                frame_len: header_len + payload,
            });
        }
        self.len = 0;
        self.last = None;
        self.buckets.fill(EMPTY);
    }

    /// How many results a flush would give now.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether a flush would give nothing.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The frames dropped since the last call.
    pub fn take_rejected(&mut self) -> Rejected {
        std::mem::take(&mut self.rejected)
    }

    fn push_flow(
        &mut self,
        arena: &[u8],
        frame: Range<u32>,
        bytes: &[u8],
        layout: &Layout,
        kind: Kind,
    ) -> Result<(), Full> {
        let mergeable = self.mergeable(bytes, layout);
        let last = self.last.map(usize::from);
        if mergeable && last.is_some_and(|last| self.join(last, arena, &frame, bytes, layout, kind))
        {
            return Ok(());
        }
        // Flows of two networks with the same addresses do not push each other out.
        let hash = layout::hash(bytes, layout).wrapping_add(kind.network.into());
        if mergeable
            && let Some(newest) = self.newest(hash).filter(|newest| Some(*newest) != last)
            && self.join(newest, arena, &frame, bytes, layout, kind)
        {
            return Ok(());
        }
        let payload = frame.start + layout.payload as u32..frame.end;
        let item = Item::begin(frame, bytes, *layout, kind, mergeable, hash);
        let index = self.open(item)?;
        self.slices[index][0] = payload;
        self.last = Some(index as u8);
        self.buckets[hash as usize % BUCKETS] = index as u8;
        Ok(())
    }

    /// Appends the frame to an item that is the newest of its flow, if it continues it.
    #[inline]
    fn join(
        &mut self,
        index: usize,
        arena: &[u8],
        frame: &Range<u32>,
        bytes: &[u8],
        layout: &Layout,
        kind: Kind,
    ) -> bool {
        let item = &mut self.items[index];
        if !item.append(arena, bytes, layout, kind) {
            return false;
        }
        let start = frame.start + layout.payload as u32;
        self.slices[index][usize::from(item.frames) - 1] = start..frame.end;
        self.last = Some(index as u8);
        true
    }

    /// The newest item of the flow with this hash; perhaps of another flow with the same.
    fn newest(&self, hash: u32) -> Option<usize> {
        let index = usize::from(self.buckets[hash as usize % BUCKETS]);
        self.items.get(index).filter(|item| item.hash == hash).map(|_| index)
    }

    fn open(&mut self, item: Item) -> Result<usize, Full> {
        let index = self.len;
        *self.items.get_mut(index).ok_or(Full)? = item;
        self.len += 1;
        Ok(index)
    }

    /// Closes a network's items between these addresses to later frames: a frame that may be of the same flow
    /// stands behind them.
    fn close_between(&mut self, arena: &[u8], addresses: &[u8], family: Network, network: u16) {
        let may_grow = |item: &&mut Item| item.open && item.kind.network == network;
        for item in self.items[..self.len].iter_mut().filter(may_grow) {
            let (Some(layout), Some(first)) = (&item.layout, slice(arena, &item.first)) else {
                continue;
            };
            if layout.network == family
                && first.len() >= layout.payload
                && layout.addresses(first) == addresses
            {
                item.open = false;
            }
        }
    }

    /// Whether a frame may be part of a super-packet, as far as it alone can tell.
    fn mergeable(&self, frame: &[u8], layout: &Layout) -> bool {
        let payload = layout.end - layout.payload;
        if !layout.plain || layout.end != frame.len() || payload == 0 {
            return false;
        }
        let network_ok = match layout.network {
            Network::V6 => true,
            Network::V4 => Sum::default().bytes(&frame[layout.l3..layout.l4]).checksum() == 0,
        };
        network_ok
            && match layout.transport {
                Transport::Tcp => {
                    let flags = be16(frame, layout.l4 + 12) & 0x0fff;
                    self.merge_tcp && flags & !u16::from(tcp::PSH) == u16::from(tcp::ACK)
                }
                Transport::Udp => {
                    let length = usize::from(be16(frame, layout.l4 + 4));
                    self.merge_udp && length == layout.end - layout.l4
                }
            }
    }
}

impl std::fmt::Debug for Coalescer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Coalescer").field("results", &self.len).finish_non_exhaustive()
    }
}

impl Item {
    const NONE: Self = Self {
        first: 0..0,
        layout: None,
        kind: Kind { network: 0, partial: false },
        open: false,
        verified: false,
        frames: 1,
        hash: 0,
        segment_len: 0,
        payload_len: 0,
        next_sequence: 0,
        next_id: 0,
        last_flags: 0,
    };

    fn begin(
        first: Range<u32>,
        bytes: &[u8],
        layout: Layout,
        kind: Kind,
        mergeable: bool,
        hash: u32,
    ) -> Self {
        let verified = kind.partial;
        let mut item = Self { first, layout: Some(layout), kind, verified, hash, ..Self::NONE };
        item.segment_len = layout.end - layout.payload;
        item.payload_len = item.segment_len;
        item.open = mergeable;
        item.follow(bytes, &layout);
        item
    }

    /// Notes which frame must come next, and closes the item if none may.
    fn follow(&mut self, frame: &[u8], layout: &Layout) {
        let payload = layout.end - layout.payload;
        if layout.network == Network::V4 {
            self.next_id = be16(frame, layout.l3 + 4).wrapping_add(1);
        }
        if layout.transport == Transport::Tcp {
            self.next_sequence = be32(frame, layout.l4 + 4).wrapping_add(payload as u32);
            self.last_flags = frame[layout.l4 + 13];
        }
        let pushed = self.last_flags & tcp::PSH != 0;
        if pushed || payload < self.segment_len || usize::from(self.frames) == FRAMES_MAX {
            self.open = false;
        }
    }

    /// Appends the frame if it continues this item.
    fn append(&mut self, arena: &[u8], frame: &[u8], layout: &Layout, kind: Kind) -> bool {
        let (Some(mine), Some(first)) = (self.layout, slice(arena, &self.first)) else {
            return false;
        };
        let payload = layout.end - layout.payload;
        if !self.open
            || self.kind != kind
            || payload > self.segment_len
            || mine.payload - mine.l3 + self.payload_len + payload > PACKET_LEN_MAX
            || mine.l3 != layout.l3
            || mine.payload != layout.payload
            || mine.network != layout.network
            || mine.transport != layout.transport
            || first.len() < mine.payload
            || !same_headers(first, frame, layout)
        {
            return false;
        }
        if layout.transport == Transport::Tcp && be32(frame, layout.l4 + 4) != self.next_sequence {
            return false;
        }
        if layout.network == Network::V4
            && be16(frame, layout.l3 + 6) & ipv4::DONT_FRAGMENT == 0
            && be16(frame, layout.l3 + 4) != self.next_id
        {
            return false;
        }
        if !kind.partial && !self.verify(first, frame, layout) {
            return false;
        }
        self.frames += 1;
        self.payload_len += payload;
        self.follow(frame, layout);
        true
    }

    /// Whether this frame's checksum, and that of the first, are right.
    fn verify(&mut self, first: &[u8], frame: &[u8], layout: &Layout) -> bool {
        if !self.verified {
            self.verified = self.layout.is_some_and(|layout| layout.checksum_ok(first));
            self.open = self.verified;
        }
        self.verified && layout.checksum_ok(frame)
    }

    /// The virtio net header of a frame that is written as it came.
    fn whole_vnet(&self, layout: Option<&Layout>) -> VnetHeader {
        match layout.filter(|_| self.kind.partial) {
            None => VnetHeader::default(),
            Some(layout) => VnetHeader {
                flags: vnet::F_NEEDS_CSUM,
                csum_start: layout.l4 as u16,
                csum_offset: layout.transport.checksum_offset(),
                ..VnetHeader::default()
            },
        }
    }

    /// Writes the super-packet's headers to `out`; returns the virtio net header, and their length.
    fn merged_header(
        &self,
        first: &[u8],
        layout: &Layout,
        out: &mut [u8; HEADER_LEN_MAX],
    ) -> (VnetHeader, usize) {
        let header = &mut out[..layout.payload];
        header.copy_from_slice(&first[..layout.payload]);
        let packet_len = layout.payload - layout.l3 + self.payload_len;
        let transport_len = layout.payload - layout.l4 + self.payload_len;
        match layout.network {
            Network::V4 => {
                put16(header, layout.l3 + 2, packet_len as u16);
                ipv4::set_checksum(&mut header[layout.l3..layout.l4]);
            }
            Network::V6 => put16(header, layout.l3 + 4, (packet_len - ipv6::LEN) as u16),
        }
        match layout.transport {
            Transport::Tcp => header[layout.l4 + 13] |= self.last_flags & tcp::PSH,
            Transport::Udp => put16(header, layout.l4 + 4, transport_len as u16),
        }
        let pseudo = layout.pseudo(first, transport_len as u32).partial();
        put16(header, layout.checksum_field(), pseudo);
        let vnet = VnetHeader {
            flags: vnet::F_NEEDS_CSUM,
            gso_type: match (layout.transport, layout.network) {
                (Transport::Tcp, Network::V4) => vnet::GSO_TCPV4,
                (Transport::Tcp, Network::V6) => vnet::GSO_TCPV6,
                (Transport::Udp, _) => vnet::GSO_UDP_L4,
            },
            hdr_len: layout.payload as u16,
            gso_size: self.segment_len as u16,
            csum_start: layout.l4 as u16,
            csum_offset: layout.transport.checksum_offset(),
        };
        (vnet, layout.payload)
    }
}

/// Whether all header bytes are equal that segments of one super-packet have in common. Both frames
/// have the same layout.
fn same_headers(a: &[u8], b: &[u8], layout: &Layout) -> bool {
    let same = |range: Range<usize>| a[range.clone()] == b[range];
    let (l3, l4) = (layout.l3, layout.l4);
    let network = match layout.network {
        // All but total length, identification and checksum; the word of the flags without offset.
        Network::V4 => same(0..l3 + 2) && same(l3 + 6..l3 + 10) && same(l3 + 12..l4),
        Network::V6 => same(0..l3 + 4) && same(l3 + 6..l4),
    };
    network
        && match layout.transport {
            // All but sequence number, PSH and checksum. The window too, as Linux's GRO has it.
            Transport::Tcp => {
                same(l4..l4 + 4)
                    && same(l4 + 8..l4 + 13)
                    && same(l4 + 14..l4 + 16)
                    && same(l4 + 18..layout.payload)
            }
            Transport::Udp => same(l4..l4 + 4),
        }
}

fn slice<'a>(arena: &'a [u8], range: &Range<u32>) -> Option<&'a [u8]> {
    arena.get(range.start as usize..range.end as usize)
}
