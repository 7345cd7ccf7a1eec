//! The forwarding decision: one pure function over the tables.
//!
//! Each frame belongs to one network, by the port that it came in by or by its tunnel. All that is read
//! afterwards is of this network, so no copy leaves it.
//!
//! Split horizon: frames from the overlay (tunnel or TAP) go to local ports alone. Each engine replicates
//! broadcasts to its own peers only. So a broadcast from here is one copy for each peer on the tunnel, and
//! one for the TAP if any peer is on it. Group frames from a port pass a meter before they enter tunnels
//! (`limits`). A frame from a locked port must pass the lock first (`lock`).

use std::{collections::BTreeSet, net::IpAddr};

use weft_path::Vni;

use super::{
    codec_flow::{ACTIONS_BYTES_MAX, actions_len},
    codec_port::PORT_INTERNAL,
    drops::OdpDrop,
    flow::{FlowKey, Frame, Output, Tag, TunnelKey},
    limits::{Class, is_report_group},
    lock,
    tables::{Change, Place, PortKind, Tables, Via, is_group},
};

/// The decision about a frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Copies of it leave.
    Forward(Vec<Output>),
    /// Copies go to ports of this host alone: the frame is an IGMP or MLD report of the host itself. Each
    /// peer sends this host all multicast anyway, and drops frames from an address that no container has.
    Keep(Vec<Output>),
    /// Copies go everywhere that its destination may be.
    Flood(Vec<Output>),
    /// It is dropped.
    Drop(OdpDrop),
    /// It is a probe from this host, for the daemon.
    Probe(IpAddr),
}

/// The verdict on a frame, and the entries that it depends on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Decision {
    pub(super) verdict: Verdict,
    /// The flow that does the same in the kernel; `None` if the daemon must see each such frame.
    pub(super) flow: Option<FlowKey>,
    /// The entries that were read.
    pub(super) depends: Vec<Change>,
}

/// Decides a frame's fate.
pub(super) fn decide(tables: &Tables, frame: &Frame) -> Decision {
    let mut depends = vec![Change::Port(frame.port)];
    let flowless = |verdict, depends| Decision { verdict, flow: None, depends };
    let arrived = match (tables.port_kind(frame.port), frame.tunnel) {
        (None | Some(PortKind::Unclaimed), _) => {
            return flowless(Verdict::Drop(OdpDrop::UnknownPort), depends);
        }
        (Some(PortKind::Local(vni)), _) => Arrived { vni, by: By::Local },
        (Some(PortKind::Tap(vni)), _) => Arrived { vni, by: By::Tap },
        (Some(PortKind::Tunnel), None) => {
            return flowless(Verdict::Drop(OdpDrop::UnknownSource), depends);
        }
        (Some(PortKind::Tunnel), Some(tunnel)) if tunnel.id == u64::from(Vni::PROBE.0) => {
            return flowless(Verdict::Probe(tunnel.remote), depends);
        }
        (Some(PortKind::Tunnel), Some(tunnel)) => {
            match tunnel_network(tables, &tunnel, &mut depends) {
                Ok(vni) => Arrived { vni, by: By::Tunnel(tunnel) },
                Err(reason) => {
                    let flow = Some(FlowKey::Tunnel { port: frame.port, tunnel });
                    return Decision { verdict: Verdict::Drop(reason), flow, depends };
                }
            }
        }
    };
    let (locked, mut key) = match arrived.by {
        By::Local => check_lock(tables, frame, &mut depends),
        By::Tap | By::Tunnel(_) => (None, pair(frame)),
    };
    let refused = locked.or_else(|| refuse_frame(tables, frame, arrived, &mut key, &mut depends));
    let verdict = match refused {
        Some(reason) => Verdict::Drop(reason),
        None => forward(tables, frame, arrived, &mut depends),
    };
    let flow = match &verdict {
        Verdict::Flood(_) | Verdict::Probe(_) => None,
        Verdict::Forward(outputs) if actions_len(outputs) > ACTIONS_BYTES_MAX => None,
        Verdict::Forward(_) | Verdict::Keep(_) | Verdict::Drop(_) => key,
    };
    Decision { verdict, flow, depends }
}

/// How a frame came in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum By {
    Local,
    Tap,
    Tunnel(TunnelKey),
}

/// The network of a frame, and how it came in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Arrived {
    vni: Vni,
    by: By,
}

/// The network of a tunnel's frames, or why no frame is taken from it.
fn tunnel_network(
    tables: &Tables,
    tunnel: &TunnelKey,
    depends: &mut Vec<Change>,
) -> Result<Vni, OdpDrop> {
    depends.push(Change::Source(tunnel.remote));
    if !tables.is_source(tunnel.remote) {
        return Err(OdpDrop::UnknownSource);
    }
    // The datapath has room for more bits than VXLAN.
    let vni = u32::try_from(tunnel.id).map(Vni).map_err(|_| OdpDrop::UnknownNetwork)?;
    depends.push(Change::Network(vni));
    if tables.has_network(vni) { Ok(vni) } else { Err(OdpDrop::UnknownNetwork) }
}

/// The match of a flow for all frames of this pair of MACs.
fn pair(frame: &Frame) -> Option<FlowKey> {
    (frame.tag != Tag::Deep).then(|| FlowKey::pair(frame))
}

/// Why the lock of the frame's port refuses it, and the match of a flow for frames with the same fate.
fn check_lock(
    tables: &Tables,
    frame: &Frame,
    depends: &mut Vec<Change>,
) -> (Option<OdpDrop>, Option<FlowKey>) {
    depends.push(Change::Lock(frame.port));
    match tables.lock_of(frame.port) {
        Some(lock) => lock::check(lock, frame),
        None => (None, pair(frame)),
    }
}

/// Frames that no port gets. Takes the flow away where the sender is not known to be where it is,
/// so that it can still be learned.
fn refuse_frame(
    tables: &Tables,
    frame: &Frame,
    arrived: Arrived,
    flow: &mut Option<FlowKey>,
    depends: &mut Vec<Change>,
) -> Option<OdpDrop> {
    if is_link_local(frame) {
        return Some(OdpDrop::LinkLocal);
    }
    if is_group(frame.source) {
        return Some(OdpDrop::ForeignSource);
    }
    depends.push(Change::Mac(arrived.vni, frame.source));
    match (arrived.by, tables.place(arrived.vni, frame.source)) {
        (By::Local, Place::Pinned(at)) if at != Some(frame.port) => Some(OdpDrop::ForeignSource),
        (By::Local, Place::Remote(_)) | (By::Tap | By::Tunnel(_), Place::Pinned(_)) => {
            Some(OdpDrop::ForeignSource)
        }
        // The vector engine has already checked frames that arrive by the TAP.
        (By::Tunnel(tunnel), Place::Remote(peer)) => {
            (!tables.sends_from(peer, tunnel.remote)).then_some(OdpDrop::ForeignSource)
        }
        (By::Tunnel(_), Place::Learned(_)) => Some(OdpDrop::ForeignSource),
        (By::Tunnel(_), Place::Unknown) => Some(OdpDrop::UnannouncedSource),
        (By::Local, Place::Unknown) => {
            *flow = None;
            None
        }
        (By::Local, Place::Learned(at)) if at != frame.port => {
            *flow = None;
            None
        }
        _ => None,
    }
}

fn forward(tables: &Tables, frame: &Frame, arrived: Arrived, depends: &mut Vec<Change>) -> Verdict {
    let vni = arrived.vni;
    let from_overlay = arrived.by != By::Local;
    if frame.port == PORT_INTERNAL && is_report_group(frame.destination) {
        return Verdict::Keep(everywhere(tables, frame, vni, true, depends));
    }
    if is_group(frame.destination) {
        return match everywhere(tables, frame, vni, from_overlay, depends) {
            outputs if outputs.is_empty() => Verdict::Drop(OdpDrop::NoReceiver),
            outputs => Verdict::Forward(outputs),
        };
    }
    depends.push(Change::Mac(vni, frame.destination));
    match tables.place(vni, frame.destination) {
        Place::Pinned(Some(port)) | Place::Learned(port) if port == frame.port => {
            Verdict::Drop(OdpDrop::SamePort)
        }
        Place::Pinned(Some(port)) | Place::Learned(port) => {
            Verdict::Forward(vec![Output::Port(port)])
        }
        Place::Pinned(None) => Verdict::Drop(OdpDrop::NoPath),
        Place::Remote(_) if from_overlay => Verdict::Drop(OdpDrop::NotHere),
        Place::Remote(peer) => {
            depends.extend([Change::Peer(peer), Change::Tap(vni), Change::Tunnel]);
            match leave(tables, vni, tables.via(peer)) {
                Some(output) => Verdict::Forward(vec![output]),
                None => Verdict::Drop(OdpDrop::NoPath),
            }
        }
        Place::Unknown => match everywhere(tables, frame, vni, from_overlay, depends) {
            outputs if outputs.is_empty() => Verdict::Drop(OdpDrop::NoReceiver),
            outputs => Verdict::Flood(outputs),
        },
    }
}

/// One copy for each place that a broadcast of this network goes to.
fn everywhere(
    tables: &Tables,
    frame: &Frame,
    vni: Vni,
    from_overlay: bool,
    depends: &mut Vec<Change>,
) -> Vec<Output> {
    depends.push(Change::LocalPorts(vni));
    let others = tables.local_ports(vni).filter(|port| *port != frame.port);
    let mut outputs: Vec<Output> = others.map(Output::Port).collect();
    if from_overlay {
        return outputs;
    }
    depends.extend([Change::Broadcast(vni), Change::Tap(vni), Change::Tunnel]);
    let copies = tables.vias(vni).filter_map(|via| leave(tables, vni, via));
    let mut copies: BTreeSet<Output> = copies.collect();
    if is_group(frame.destination) {
        limit(tables, frame, &mut copies, depends);
    }
    outputs.extend(copies);
    outputs
}

/// Limits the group frames that a port sends into tunnels.
fn limit(tables: &Tables, frame: &Frame, copies: &mut BTreeSet<Output>, depends: &mut Vec<Change>) {
    depends.push(Change::Limit(frame.port));
    let is_tunnel = |output: &Output| matches!(output, Output::Tunnel { .. });
    if tables.limits().is_paused(frame.port) {
        copies.retain(|output| !is_tunnel(output));
    } else if copies.iter().any(is_tunnel) {
        let meter = tables.limits().meter(frame.port, Class::of(frame.destination));
        copies.extend(meter.map(Output::Meter));
    }
}

/// The copy of a network's frame for a peer.
fn leave(tables: &Tables, vni: Vni, via: Via) -> Option<Output> {
    match via {
        Via::None => None,
        Via::Tap => tables.tap(vni).map(Output::Port),
        Via::Tunnel { remote, local } => {
            let output = |port| Output::Tunnel { port, id: u64::from(vni.0), remote, local };
            tables.tunnel().map(output)
        }
    }
}

fn is_link_local(frame: &Frame) -> bool {
    let bytes = frame.destination.0;
    bytes[..5] == [0x01, 0x80, 0xc2, 0, 0] && bytes[5] & 0xf0 == 0
}
