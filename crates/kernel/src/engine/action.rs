//! Actions on the kernel, which a command leads to.

use std::net::{IpAddr, SocketAddr};

use weft_crypto::PeerId;
use weft_path::{EngineEvent, PathId};

use super::channel::change::Change;
use crate::switch::overlay::Via;
use crate::xfrm::{PolicyId, PolicySpec, StateId, StateSpec};

/// An action on the kernel. Actions apply in order.
#[derive(Debug, PartialEq)]
pub(super) enum Action {
    /// Install an SA of a path.
    AddState(PathId, StateSpec),
    /// Remove an SA at once.
    RemoveState(StateId),
    /// Remove an SA once no packet can be on its way through it any more.
    RetireState(StateId),
    /// Install or replace a policy.
    SetPolicy(PolicySpec),
    /// Remove a policy.
    RemovePolicy(PolicyId),
    /// Change something on the data channel's device.
    Channel(Change),
    /// The guard lets plain packets to and from this peer pass.
    Trust(IpAddr),
    /// It does no longer.
    Distrust(IpAddr),
    /// The route of frames for a peer.
    SetVia(PeerId, Via),
    /// A peer's tunnel packets come from these addresses.
    AcceptFrom(PeerId, Vec<IpAddr>),
    /// Nothing comes from a peer any more, which had a number.
    RefuseFrom(PeerId),
    /// Send a probe of a path.
    Probe(Probe),
    /// Send a NAT keepalive from the port of ESP in UDP.
    Keepalive(SocketAddr),
    /// Send one from the data channel's port.
    ChannelKeepalive(SocketAddr),
    /// Tell path choice.
    Tell(EngineEvent),
}

/// A probe to be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Probe {
    pub(super) path: PathId,
    pub(super) remote: IpAddr,
    /// Inner UDP port: the one whose policy names the path's SA.
    pub(super) port: u16,
    pub(super) number: u64,
    /// Length of the inner IP packet in bytes.
    pub(super) mtu: u16,
}
