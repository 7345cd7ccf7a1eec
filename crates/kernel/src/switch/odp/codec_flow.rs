//! Messages of the family ovs_flow: keys, masks, actions, counters (`linux/openvswitch.h`).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use weft_path::Mac;

use super::{
    codec::{ovs_body, ovs_header},
    codec_payload::{KEY_ATTR_ETHERTYPE, read_payload, write_payload},
    flow::{FlowKey, Frame, Output, Payload, Tag, TunnelKey},
};
use crate::{
    firewall::guard::SENT_PRIORITY,
    netlink::{
        generic,
        reader::{attribute, attributes, u32_at, u64_at},
        writer::{Answer, Writer},
    },
};

/// The family's name.
pub(super) const FLOW_FAMILY: &str = "ovs_flow";
const FLOW_VERSION: u8 = 1;
const CMD_NEW: u8 = 1;
const CMD_DEL: u8 = 2;
const CMD_GET: u8 = 3;
const CMD_SET: u8 = 4;

const FLOW_ATTR_KEY: u16 = 1;
const FLOW_ATTR_ACTIONS: u16 = 2;
const FLOW_ATTR_STATS: u16 = 3;
const FLOW_ATTR_MASK: u16 = 7;
const FLOW_ATTR_UFID: u16 = 9;
const FLOW_ATTR_UFID_FLAGS: u16 = 10;
/// A dump without keys and masks (OVS_UFID_F_OMIT_KEY, OVS_UFID_F_OMIT_MASK).
const OMIT_KEY_AND_MASK: u32 = 1 | 2;
/// A dump without actions (OVS_UFID_F_OMIT_ACTIONS).
const OMIT_ACTIONS: u32 = 4;

const KEY_ATTR_ENCAP: u16 = 1;
const KEY_ATTR_PRIORITY: u16 = 2;
const KEY_ATTR_IN_PORT: u16 = 3;
const KEY_ATTR_ETHERNET: u16 = 4;
const KEY_ATTR_VLAN: u16 = 5;
const KEY_ATTR_TUNNEL: u16 = 16;

const TUNNEL_KEY_ID: u16 = 0;
const TUNNEL_KEY_IPV4_SRC: u16 = 1;
const TUNNEL_KEY_IPV4_DST: u16 = 2;
const TUNNEL_KEY_TTL: u16 = 4;
const TUNNEL_KEY_DONT_FRAGMENT: u16 = 5;
const TUNNEL_KEY_IPV6_SRC: u16 = 12;
const TUNNEL_KEY_IPV6_DST: u16 = 13;

const ACTION_OUTPUT: u16 = 1;
const ACTION_SET: u16 = 3;
const ACTION_METER: u16 = 19;

/// Set in a tag control word if there is a tag at all (VLAN_CFI_MASK, in network byte order).
const TAG_PRESENT: u16 = 0x1000;
/// The Ethernet type of a tag (IEEE 802.1Q).
const TAG_TYPE: u16 = 0x8100;
/// Time to live of tunnel packets.
const TUNNEL_TTL: u8 = 64;
const ETHERNET_LEN: usize = 12;

/// The largest list of actions, in bytes as they travel: older kernels refuse longer ones
/// (MAX_ACTIONS_BUFSIZE). Between 400 and 680 tunnels.
pub(super) const ACTIONS_BYTES_MAX: usize = 32 * 1024;

/// The name that we give a flow, unique in the life of a switch (OVS_FLOW_ATTR_UFID).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct FlowId(pub(super) u64);

impl FlowId {
    fn bytes(self) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[8..].copy_from_slice(&self.0.to_be_bytes());
        bytes
    }

    fn read(bytes: &[u8]) -> Option<Self> {
        let bytes: [u8; 16] = bytes.try_into().ok()?;
        let (high, low) = bytes.split_at(8);
        high.iter().all(|byte| *byte == 0).then_some(())?;
        low.try_into().ok().map(|low| Self(u64::from_be_bytes(low)))
    }
}

/// A flow in a dump.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct FlowEntry {
    /// Its name, if it is one of ours.
    pub(super) id: Option<FlowId>,
    /// Packets that it has carried.
    pub(super) packets: u64,
    /// Its outputs, in order. `None` if the request left them out or they have a form that Weft does not
    /// write.
    pub(super) outputs: Option<Vec<Output>>,
}

/// Whether a flow is new to the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Put {
    /// The flow is created.
    New,
    /// The flow of this name gets other actions. The command for new flows cannot do that: it compares the
    /// unmasked key with the existing flow's masked one, and finds no match.
    Set,
}

/// Makes or changes a flow.
pub(super) fn put_flow(
    family: u16,
    datapath: u32,
    put: Put,
    id: FlowId,
    key: &FlowKey,
    outputs: &[Output],
) -> Writer {
    let command = match put {
        Put::New => CMD_NEW,
        Put::Set => CMD_SET,
    };
    let mut request = flow_request(family, command, Answer::Acknowledgement, datapath);
    request.nest(FLOW_ATTR_KEY, |list| write_key(list, key));
    request.nest(FLOW_ATTR_MASK, |list| write_mask(list, key));
    request.bytes(FLOW_ATTR_UFID, &id.bytes());
    request.nest(FLOW_ATTR_ACTIONS, |list| write_actions(list, outputs));
    request
}

/// Deletes one flow.
pub(super) fn delete_flow(family: u16, datapath: u32, id: FlowId) -> Writer {
    let mut request = flow_request(family, CMD_DEL, Answer::Acknowledgement, datapath);
    request.bytes(FLOW_ATTR_UFID, &id.bytes());
    request
}

/// Deletes all flows of a datapath: only when it is taken over.
pub(super) fn flush_flows(family: u16, datapath: u32) -> Writer {
    flow_request(family, CMD_DEL, Answer::Acknowledgement, datapath)
}

/// Asks for the names and counters of all flows, and for their actions if wanted.
pub(super) fn dump_flows(family: u16, datapath: u32, actions: bool) -> Writer {
    let mut request = flow_request(family, CMD_GET, Answer::Dump, datapath);
    let omit = if actions { OMIT_KEY_AND_MASK } else { OMIT_KEY_AND_MASK | OMIT_ACTIONS };
    request.u32(FLOW_ATTR_UFID_FLAGS, omit);
    request
}

/// Reads a flow of a dump.
pub(super) fn flow_entry(body: &[u8]) -> Option<FlowEntry> {
    let (_, list) = ovs_body(body)?;
    let stats = attribute(list, FLOW_ATTR_STATS);
    Some(FlowEntry {
        id: attribute(list, FLOW_ATTR_UFID).and_then(FlowId::read),
        packets: stats.and_then(|stats| u64_at(stats, 0)).unwrap_or_default(),
        outputs: attribute(list, FLOW_ATTR_ACTIONS).and_then(read_actions),
    })
}

fn flow_request(family: u16, command: u8, answer: Answer, datapath: u32) -> Writer {
    let mut request = generic::request(family, FLOW_VERSION, command, answer);
    ovs_header(&mut request, datapath);
    request
}

fn write_key(list: &mut Writer, key: &FlowKey) {
    match key {
        FlowKey::Pair(frame) | FlowKey::Locked { frame, .. } => {
            if let Some(tunnel) = &frame.tunnel {
                list.nest(KEY_ATTR_TUNNEL, |list| write_tunnel_key(list, tunnel));
            }
            list.u32(KEY_ATTR_IN_PORT, frame.port);
            list.bytes(KEY_ATTR_ETHERNET, &ethernet(frame));
            match frame.tag {
                Tag::One(control) => write_tag(list, control),
                Tag::None | Tag::Deep => write_payload(list, &frame.payload, &frame.payload),
            }
        }
        FlowKey::Tunnel { port, tunnel } => {
            list.nest(KEY_ATTR_TUNNEL, |list| write_tunnel_key(list, tunnel));
            list.u32(KEY_ATTR_IN_PORT, *port);
            list.bytes(KEY_ATTR_ETHERNET, &[0; ETHERNET_LEN]);
        }
    }
}

fn write_mask(list: &mut Writer, key: &FlowKey) {
    let tunnel = match key {
        FlowKey::Pair(frame) | FlowKey::Locked { frame, .. } => frame.tunnel,
        FlowKey::Tunnel { tunnel, .. } => Some(*tunnel),
    };
    if let Some(tunnel) = tunnel {
        list.nest(KEY_ATTR_TUNNEL, |list| write_tunnel_mask(list, &tunnel));
    }
    list.u32(KEY_ATTR_IN_PORT, u32::MAX);
    match key {
        // The control word of the tag is always matched, without being in the mask.
        FlowKey::Pair(_) => list.bytes(KEY_ATTR_ETHERNET, &[0xff; ETHERNET_LEN]),
        FlowKey::Locked { frame, bits } => {
            let mask = bits.of(&Frame::ONES);
            list.bytes(KEY_ATTR_ETHERNET, &ethernet(&mask));
            write_payload(list, &frame.payload, &mask.payload);
        }
        FlowKey::Tunnel { .. } => list.bytes(KEY_ATTR_ETHERNET, &[0; ETHERNET_LEN]),
    }
}

/// A tag. Its type is not matched; the kernel wants one.
fn write_tag(list: &mut Writer, control: u16) {
    list.bytes(KEY_ATTR_ETHERTYPE, &TAG_TYPE.to_be_bytes());
    list.bytes(KEY_ATTR_VLAN, &control.to_be_bytes());
    list.flag(KEY_ATTR_ENCAP);
}

fn ethernet(frame: &Frame) -> [u8; ETHERNET_LEN] {
    let mut bytes = [0; ETHERNET_LEN];
    bytes[..6].copy_from_slice(&frame.source.0);
    bytes[6..].copy_from_slice(&frame.destination.0);
    bytes
}

fn write_tunnel_key(list: &mut Writer, tunnel: &TunnelKey) {
    list.bytes(TUNNEL_KEY_ID, &tunnel.id.to_be_bytes());
    write_address(list, TUNNEL_KEY_IPV4_SRC, TUNNEL_KEY_IPV6_SRC, tunnel.remote);
    write_address(list, TUNNEL_KEY_IPV4_DST, TUNNEL_KEY_IPV6_DST, tunnel.local);
    // Not matched, but the kernel takes no tunnel key without it.
    list.u8(TUNNEL_KEY_TTL, 0);
}

fn write_tunnel_mask(list: &mut Writer, tunnel: &TunnelKey) {
    list.bytes(TUNNEL_KEY_ID, &[0xff; 8]);
    let all: IpAddr = match tunnel.remote {
        IpAddr::V4(_) => Ipv4Addr::BROADCAST.into(),
        IpAddr::V6(_) => Ipv6Addr::from_bits(u128::MAX).into(),
    };
    write_address(list, TUNNEL_KEY_IPV4_SRC, TUNNEL_KEY_IPV6_SRC, all);
    write_address(list, TUNNEL_KEY_IPV4_DST, TUNNEL_KEY_IPV6_DST, all);
    list.u8(TUNNEL_KEY_TTL, 0);
}

fn write_address(list: &mut Writer, ipv4: u16, ipv6: u16, address: IpAddr) {
    match address {
        IpAddr::V4(address) => list.bytes(ipv4, &address.octets()),
        IpAddr::V6(address) => list.bytes(ipv6, &address.octets()),
    }
}

/// Writes actions. Copies out of ports come first, so that no port gets a frame with another copy's tunnel
/// set, and no meter drops one. A copy that leaves by a tunnel gets the priority by which the guard
/// recognizes it.
pub(super) fn write_actions(list: &mut Writer, outputs: &[Output]) {
    for output in outputs {
        if let Output::Port(port) = output {
            list.u32(ACTION_OUTPUT, *port);
        }
    }
    for output in outputs {
        if let Output::Meter(id) = output {
            list.u32(ACTION_METER, *id);
        }
    }
    if outputs.iter().any(|output| matches!(output, Output::Tunnel { .. })) {
        list.nest(ACTION_SET, |set| set.u32(KEY_ATTR_PRIORITY, SENT_PRIORITY));
    }
    for output in outputs {
        if let Output::Tunnel { port, id, remote, local } = output {
            list.nest(ACTION_SET, |set| {
                set.nest(KEY_ATTR_TUNNEL, |list| write_tunnel(list, *id, *remote, *local));
            });
            list.u32(ACTION_OUTPUT, *port);
        }
    }
}

/// The tunnel of one copy. Without OVS_TUNNEL_KEY_ATTR_CSUM the outer UDP checksum is zero.
fn write_tunnel(list: &mut Writer, id: u64, remote: IpAddr, local: Option<IpAddr>) {
    list.bytes(TUNNEL_KEY_ID, &id.to_be_bytes());
    if let Some(local) = local.filter(|local| local.is_ipv4() == remote.is_ipv4()) {
        write_address(list, TUNNEL_KEY_IPV4_SRC, TUNNEL_KEY_IPV6_SRC, local);
    }
    write_address(list, TUNNEL_KEY_IPV4_DST, TUNNEL_KEY_IPV6_DST, remote);
    list.u8(TUNNEL_KEY_TTL, TUNNEL_TTL);
    list.flag(TUNNEL_KEY_DONT_FRAGMENT);
}

/// How long these actions are as they travel, in bytes.
pub(super) fn actions_len(outputs: &[Output]) -> usize {
    let mut list = Writer::default();
    write_actions(&mut list, outputs);
    list.len()
}

/// Reads actions; `None` if there is an action that Weft never uses.
fn read_actions(list: &[u8]) -> Option<Vec<Output>> {
    let mut outputs = Vec::new();
    let mut tunnel: Option<(u64, IpAddr, Option<IpAddr>)> = None;
    let (mut metered, mut sent) = (false, false);
    for (kind, value) in attributes(list) {
        match (kind, tunnel.take()) {
            (ACTION_OUTPUT, None) if !sent && !metered => {
                outputs.push(Output::Port(u32_at(value, 0)?));
            }
            (ACTION_METER, None) if !sent && !metered => {
                metered = true;
                outputs.push(Output::Meter(u32_at(value, 0)?));
            }
            (ACTION_OUTPUT, Some((id, remote, local))) => {
                outputs.push(Output::Tunnel { port: u32_at(value, 0)?, id, remote, local });
            }
            (ACTION_SET, None) if !sent => {
                sent = u32_at(attribute(value, KEY_ATTR_PRIORITY)?, 0)? == SENT_PRIORITY;
                sent.then_some(())?;
            }
            (ACTION_SET, None) => {
                let set = read_tunnel(attribute(value, KEY_ATTR_TUNNEL)?);
                let local = set.source.filter(|address| !address.is_unspecified());
                tunnel = Some((set.id?, set.destination?, local));
            }
            _ => return None,
        }
    }
    Some(outputs)
}

#[derive(Default)]
struct ReadTunnel {
    id: Option<u64>,
    source: Option<IpAddr>,
    destination: Option<IpAddr>,
}

fn read_tunnel(list: &[u8]) -> ReadTunnel {
    let ipv4 = |value: &[u8]| <[u8; 4]>::try_from(value).ok().map(IpAddr::from);
    let ipv6 = |value: &[u8]| <[u8; 16]>::try_from(value).ok().map(IpAddr::from);
    let mut read = ReadTunnel::default();
    for (kind, value) in attributes(list) {
        match kind {
            TUNNEL_KEY_ID => read.id = value.try_into().ok().map(u64::from_be_bytes),
            TUNNEL_KEY_IPV4_SRC => read.source = ipv4(value),
            TUNNEL_KEY_IPV4_DST => read.destination = ipv4(value),
            TUNNEL_KEY_IPV6_SRC => read.source = ipv6(value),
            TUNNEL_KEY_IPV6_DST => read.destination = ipv6(value),
            _ => {}
        }
    }
    read
}

/// Reads a frame's fields from the key of an upcall. `None` if it is not an Ethernet frame.
pub(super) fn read_frame(list: &[u8]) -> Option<Frame> {
    let ethernet = attribute(list, KEY_ATTR_ETHERNET)?;
    let mac = |range: std::ops::Range<usize>| ethernet.get(range)?.try_into().ok().map(Mac);
    let tunnel = attribute(list, KEY_ATTR_TUNNEL).map(read_tunnel);
    let tunnel = match tunnel {
        None => None,
        // A tunnel without these is not a VXLAN tunnel.
        Some(read) => {
            Some(TunnelKey { id: read.id?, remote: read.source?, local: read.destination? })
        }
    };
    let tag = read_tag(list);
    Some(Frame {
        port: u32_at(attribute(list, KEY_ATTR_IN_PORT)?, 0)?,
        tunnel,
        source: mac(0..6)?,
        destination: mac(6..12)?,
        tag,
        payload: match tag {
            Tag::None => read_payload(list),
            Tag::One(_) | Tag::Deep => Payload::default(),
        },
    })
}

fn read_tag(list: &[u8]) -> Tag {
    let be16 = |list, kind| {
        attribute(list, kind).and_then(|value| value.try_into().ok()).map(u16::from_be_bytes)
    };
    let Some(control) = be16(list, KEY_ATTR_VLAN) else { return Tag::None };
    let inside = attribute(list, KEY_ATTR_ENCAP).unwrap_or_default();
    match control & TAG_PRESENT != 0 && be16(inside, KEY_ATTR_VLAN).is_none() {
        true => Tag::One(control),
        false => Tag::Deep,
    }
}

/// The key that a packet to be executed needs: where it came in, and that it is Ethernet. The
/// kernel reads the rest from the packet.
pub(super) fn write_metadata(list: &mut Writer, port: u32) {
    list.u32(KEY_ATTR_IN_PORT, port);
    list.bytes(KEY_ATTR_ETHERNET, &[0; ETHERNET_LEN]);
}
