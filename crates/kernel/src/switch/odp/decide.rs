//! The forwarding decision: one pure function over the tables.
//!
//! Split horizon: frames from the overlay (tunnel or TAP) go to local ports alone. Each engine replicates
//! broadcasts to its own peers only. So a broadcast from here is one copy for each peer on the tunnel, and
//! one for the TAP if any peer is on it. Group frames from a port pass a meter before they enter tunnels
//! (`limits`).

use std::{collections::BTreeSet, net::IpAddr};

use weft_path::Vni;

use super::{
    codec_flow::{ACTIONS_BYTES_MAX, actions_len},
    codec_port::PORT_INTERNAL,
    flow::{FlowKey, Frame, Output, Tag, TunnelKey},
    limits::{Class, is_report_group},
    tables::{Change, Place, PortKind, Tables, Via, is_group},
};

/// Why a frame is dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum OdpDrop {
    /// It came in by a port that the switch does not know (yet).
    UnknownPort,
    /// A tunnel packet from an address that is not a peer's.
    UnknownSource,
    /// A tunnel packet with another VXLAN network identifier than the network's.
    WrongNetwork,
    /// Its source MAC is a group, or belongs to another port or another host.
    ForeignSource,
    /// A tunnel packet whose source MAC no peer has announced: nothing could be sent back to it.
    UnannouncedSource,
    /// To 01:80:c2:00:00:00 to 0f, which no switch passes on (IEEE 802.1Q, table 8-1).
    LinkLocal,
    /// Its destination is behind the port that it came from.
    SamePort,
    /// From the overlay to another host (split horizon).
    NotHere,
    /// To a peer without a path, or to an attachment whose port is missing.
    NoPath,
    /// No port or peer would get a copy.
    NoReceiver,
}

impl OdpDrop {
    /// All reasons.
    pub const ALL: [Self; 10] = [
        Self::UnknownPort,
        Self::UnknownSource,
        Self::WrongNetwork,
        Self::ForeignSource,
        Self::UnannouncedSource,
        Self::LinkLocal,
        Self::SamePort,
        Self::NotHere,
        Self::NoPath,
        Self::NoReceiver,
    ];

    /// The name in counters.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::UnknownPort => "unknown port",
            Self::UnknownSource => "unknown source",
            Self::WrongNetwork => "wrong network",
            Self::ForeignSource => "foreign source MAC",
            Self::UnannouncedSource => "unannounced source MAC",
            Self::LinkLocal => "link-local group",
            Self::SamePort => "same port",
            Self::NotHere => "not here",
            Self::NoPath => "no path",
            Self::NoReceiver => "no receiver",
        }
    }
}

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
    let mut pair = Some(FlowKey::Pair(*frame)).filter(|_| frame.tag != Tag::Deep);
    let Some(kind) = tables.port_kind(frame.port) else {
        return Decision { verdict: Verdict::Drop(OdpDrop::UnknownPort), flow: None, depends };
    };
    if kind == PortKind::Tunnel {
        let Some(tunnel) = frame.tunnel else {
            return Decision {
                verdict: Verdict::Drop(OdpDrop::UnknownSource),
                flow: None,
                depends,
            };
        };
        if let Some(decision) = refuse_tunnel(tables, frame, &tunnel, &mut depends) {
            return decision;
        }
    }
    let refused = refuse_frame(tables, frame, kind, &mut pair, &mut depends);
    let verdict = match refused {
        Some(reason) => Verdict::Drop(reason),
        None => forward(tables, frame, kind, &mut depends),
    };
    let flow = match &verdict {
        Verdict::Flood(_) | Verdict::Probe(_) => None,
        Verdict::Forward(outputs) if actions_len(outputs) > ACTIONS_BYTES_MAX => None,
        Verdict::Forward(_) | Verdict::Keep(_) | Verdict::Drop(_) => pair,
    };
    Decision { verdict, flow, depends }
}

/// Probes, and tunnels that no frame is taken from.
fn refuse_tunnel(
    tables: &Tables,
    frame: &Frame,
    tunnel: &TunnelKey,
    depends: &mut Vec<Change>,
) -> Option<Decision> {
    if tunnel.id == u64::from(Vni::PROBE.0) {
        let verdict = Verdict::Probe(tunnel.remote);
        return Some(Decision { verdict, flow: None, depends: std::mem::take(depends) });
    }
    depends.push(Change::Source(tunnel.remote));
    let reason = if !tables.is_source(tunnel.remote) {
        OdpDrop::UnknownSource
    } else if tunnel.id != tables.vni {
        OdpDrop::WrongNetwork
    } else {
        return None;
    };
    let flow = Some(FlowKey::Tunnel { port: frame.port, tunnel: *tunnel });
    let depends = std::mem::take(depends);
    Some(Decision { verdict: Verdict::Drop(reason), flow, depends })
}

/// Frames that no port gets. Takes the flow away where the sender is not known to be where it is,
/// so that it can still be learned.
fn refuse_frame(
    tables: &Tables,
    frame: &Frame,
    kind: PortKind,
    flow: &mut Option<FlowKey>,
    depends: &mut Vec<Change>,
) -> Option<OdpDrop> {
    if is_link_local(frame) {
        return Some(OdpDrop::LinkLocal);
    }
    if is_group(frame.source) {
        return Some(OdpDrop::ForeignSource);
    }
    depends.push(Change::Mac(frame.source));
    match (kind, tables.place(frame.source)) {
        (PortKind::Local, Place::Pinned(at)) if at != Some(frame.port) => {
            Some(OdpDrop::ForeignSource)
        }
        (PortKind::Local, Place::Remote(_))
        | (PortKind::Tap | PortKind::Tunnel, Place::Pinned(_)) => Some(OdpDrop::ForeignSource),
        // The vector engine has already checked frames that arrive by the TAP.
        (PortKind::Tunnel, Place::Remote(peer)) => {
            let its = frame.tunnel.is_some_and(|tunnel| tables.sends_from(peer, tunnel.remote));
            (!its).then_some(OdpDrop::ForeignSource)
        }
        (PortKind::Tunnel, Place::Learned(_)) => Some(OdpDrop::ForeignSource),
        (PortKind::Tunnel, Place::Unknown) => Some(OdpDrop::UnannouncedSource),
        (PortKind::Local, Place::Unknown) => {
            *flow = None;
            None
        }
        (PortKind::Local, Place::Learned(at)) if at != frame.port => {
            *flow = None;
            None
        }
        _ => None,
    }
}

fn forward(tables: &Tables, frame: &Frame, kind: PortKind, depends: &mut Vec<Change>) -> Verdict {
    let from_overlay = kind != PortKind::Local;
    if frame.port == PORT_INTERNAL && is_report_group(frame.destination) {
        return Verdict::Keep(everywhere(tables, frame, true, depends));
    }
    if is_group(frame.destination) {
        return match everywhere(tables, frame, from_overlay, depends) {
            outputs if outputs.is_empty() => Verdict::Drop(OdpDrop::NoReceiver),
            outputs => Verdict::Forward(outputs),
        };
    }
    depends.push(Change::Mac(frame.destination));
    match tables.place(frame.destination) {
        Place::Pinned(Some(port)) | Place::Learned(port) if port == frame.port => {
            Verdict::Drop(OdpDrop::SamePort)
        }
        Place::Pinned(Some(port)) | Place::Learned(port) => {
            Verdict::Forward(vec![Output::Port(port)])
        }
        Place::Pinned(None) => Verdict::Drop(OdpDrop::NoPath),
        Place::Remote(_) if from_overlay => Verdict::Drop(OdpDrop::NotHere),
        Place::Remote(peer) => {
            depends.extend([Change::Peer(peer), Change::Overlay]);
            match leave(tables, tables.via(peer)) {
                Some(output) => Verdict::Forward(vec![output]),
                None => Verdict::Drop(OdpDrop::NoPath),
            }
        }
        Place::Unknown => match everywhere(tables, frame, from_overlay, depends) {
            outputs if outputs.is_empty() => Verdict::Drop(OdpDrop::NoReceiver),
            outputs => Verdict::Flood(outputs),
        },
    }
}

/// One copy for each place that a broadcast goes to.
fn everywhere(
    tables: &Tables,
    frame: &Frame,
    from_overlay: bool,
    depends: &mut Vec<Change>,
) -> Vec<Output> {
    depends.push(Change::LocalPorts);
    let others = tables.local_ports().filter(|port| *port != frame.port);
    let mut outputs: Vec<Output> = others.map(Output::Port).collect();
    if from_overlay {
        return outputs;
    }
    depends.extend([Change::Broadcast, Change::Overlay]);
    let mut copies: BTreeSet<Output> = tables.vias().filter_map(|via| leave(tables, via)).collect();
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

/// The copy for a peer.
fn leave(tables: &Tables, via: Via) -> Option<Output> {
    match via {
        Via::None => None,
        Via::Tap => tables.tap().map(Output::Port),
        Via::Tunnel { remote, local } => {
            let output = |port| Output::Tunnel { port, id: tables.vni, remote, local };
            tables.tunnel().map(output)
        }
    }
}

fn is_link_local(frame: &Frame) -> bool {
    let bytes = frame.destination.0;
    bytes[..5] == [0x01, 0x80, 0xc2, 0, 0] && bytes[5] & 0xf0 == 0
}
