//! Carrying actions out: batched, in the order in which no packet finds half of a change.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use weft_crypto::PeerId;
use weft_io::encap::EncapSocket;
use weft_path::{EngineEvent, PathId};

use super::SwitchKind;
use super::action::{Action, Probe};
use super::channel::{
    self,
    change::{self, Change},
};
use super::probes::{Received, SendError};
use super::worker::{RETIRE_MS, Worker};
use crate::error::KernelError;
use crate::xfrm::{Direction, PolicyId, PolicySpec, StateId, StateSpec};

/// Actions of one batch by kind; within a kind the order is kept.
#[derive(Default)]
struct Batch {
    states: Vec<(PathId, StateSpec)>,
    /// The last word on each policy; `None`: removed.
    policies: BTreeMap<PolicyId, Option<PolicySpec>>,
    removed: Vec<StateId>,
    retired: Vec<StateId>,
    channel: Vec<Change>,
    distrusted: Vec<IpAddr>,
    sources: Vec<(PeerId, Vec<IpAddr>)>,
    refused: Vec<PeerId>,
}

impl Worker {
    /// SAs of both formats and exceptions first, then the policies that lead to them, then the forwarding
    /// entries. Removals go in the reverse order.
    pub(super) async fn carry_out(&mut self, actions: &mut Vec<Action>) {
        if actions.is_empty() {
            return;
        }
        let (mut batch, mut vias, mut last) = (Batch::default(), Vec::new(), Vec::new());
        let mut trusts = false;
        for action in actions.drain(..) {
            match action {
                Action::AddState(path, spec) => batch.states.push((path, spec)),
                Action::SetPolicy(policy) => _ = batch.policies.insert(policy.id, Some(policy)),
                Action::RemovePolicy(id) => _ = batch.policies.insert(id, None),
                Action::RemoveState(id) => batch.removed.push(id),
                Action::RetireState(id) => batch.retired.push(id),
                Action::Channel(change) => batch.channel.push(change),
                Action::Trust(address) => trusts |= self.trusted.insert(address),
                Action::Distrust(address) => batch.distrusted.push(address),
                Action::SetVia(peer, via) => vias.push((peer, via)),
                Action::AcceptFrom(peer, addresses) => batch.sources.push((peer, addresses)),
                Action::RefuseFrom(peer) => batch.refused.push(peer),
                Action::Probe(_)
                | Action::Keepalive(_)
                | Action::ChannelKeepalive(_)
                | Action::Tell(_) => last.push(action),
            }
        }
        let (changes, deletions) = change::split(batch.channel);
        self.add_states(batch.states).await;
        self.change_channel(changes).await;
        if trusts {
            self.filters.trust(&self.trusted);
            self.ensure_entries().await;
        }
        let (set, gone): (Vec<_>, Vec<_>) =
            batch.policies.into_iter().partition(|(_, policy)| policy.is_some());
        self.set_policies(set.into_iter().filter_map(|(_, policy)| policy).collect()).await;
        let accepted = self.accept_from(batch.sources).await;
        if let Err(error) = accepted.and(self.switch.set_peers(&vias).await) {
            tracing::warn!(%error, "cannot write forwarding entries");
        }
        self.remove_policies(gone.into_iter().map(|(id, _)| id).collect()).await;
        self.remove_states(&batch.removed).await;
        self.change_channel(deletions).await;
        for peer in batch.refused {
            let refused = self.switch.refuse_from(peer).await;
            self.note_senders(refused);
        }
        let at = Instant::now() + Duration::from_millis(RETIRE_MS);
        self.retired.extend(batch.retired.into_iter().map(|id| (at, id)));
        if !batch.distrusted.is_empty() {
            batch.distrusted.iter().for_each(|address| _ = self.trusted.remove(address));
            self.filters.trust(&self.trusted);
            self.ensure_entries().await;
        }
        for action in last {
            match action {
                Action::Probe(probe) => self.send_probe(&probe),
                Action::Keepalive(remote) => {
                    send_keepalive(self.ipsec.as_ref().map(|ipsec| &ipsec.encapsulation), remote);
                }
                Action::ChannelKeepalive(remote) => {
                    send_keepalive(self.channel.sockets.as_ref(), remote);
                }
                Action::Tell(event) => (self.events)(event),
                _ => {}
            }
        }
    }

    /// Peers' packets come from these addresses, or by SAs that give them the peers' numbers.
    async fn accept_from(
        &mut self,
        sources: Vec<(PeerId, Vec<IpAddr>)>,
    ) -> Result<(), KernelError> {
        if self.switch.kind() != SwitchKind::Bridge {
            return self.switch.accept_from(sources).await;
        }
        for (peer, mut addresses) in sources {
            let Some(number) = self.state.number_of(&peer) else { continue };
            // Packets from other addresses carry the number of their SA.
            addresses.retain(|it| self.trusted.contains(it) || channel::is_tunnel(*it));
            let written = self.switch.number_sender(peer, number, addresses).await;
            self.note_senders(written);
        }
        Ok(())
    }

    /// Logs a failed write and schedules a look at the guard, which writes everything again.
    pub(super) fn note_senders(&self, result: Result<(), KernelError>) {
        if let Err(error) = result {
            tracing::warn!(%error, "cannot update the guard's list of senders; setting it again");
            self.filters.look();
        }
    }

    async fn add_states(&mut self, states: Vec<(PathId, StateSpec)>) {
        if states.is_empty() {
            return;
        }
        let (paths, specs): (Vec<PathId>, Vec<StateSpec>) = states.into_iter().unzip();
        let Some(ipsec) = &self.ipsec else {
            for path in paths {
                self.path_failed(path, "the kernel engine is not running");
            }
            return;
        };
        for spec in &specs {
            let way = if spec.direction == Direction::In { "in" } else { "out" };
            self.keylog.note(way, spec.spi, spec.cipher, &spec.key);
        }
        let results = ipsec.xfrm.add_states(&specs).await;
        for (path, result) in paths.into_iter().zip(results) {
            match result {
                Ok(()) => self.counters.states_added += 1,
                Err(error) => {
                    self.counters.states_refused += 1;
                    self.path_failed(path, &error.to_string());
                }
            }
        }
    }

    pub(super) async fn set_policies(&mut self, policies: Vec<PolicySpec>) {
        let Some(ipsec) = self.ipsec.as_ref().filter(|_| !policies.is_empty()) else { return };
        let results = ipsec.xfrm.set_policies(&policies).await;
        let mut refused = Vec::new();
        for (policy, result) in policies.iter().zip(results) {
            match result {
                Ok(()) => self.counters.policies_set += 1,
                Err(error) => refused.push((policy.id, error.to_string())),
            }
        }
        for (id, reason) in refused {
            if let Some(path) = self.state.path_to(id.destination) {
                self.path_failed(path, &reason);
            }
        }
    }

    pub(super) async fn remove_policies(&mut self, policies: Vec<PolicyId>) {
        let Some(ipsec) = self.ipsec.as_ref().filter(|_| !policies.is_empty()) else { return };
        for error in ipsec.xfrm.remove_policies(&policies).await.into_iter().filter_map(Result::err)
        {
            tracing::warn!(%error, "cannot remove an IPsec policy");
        }
    }

    pub(super) async fn remove_states(&mut self, states: &[StateId]) {
        self.read_last(states).await;
        let Some(ipsec) = self.ipsec.as_ref().filter(|_| !states.is_empty()) else { return };
        for error in ipsec.xfrm.remove_states(states).await.into_iter().filter_map(Result::err) {
            tracing::warn!(%error, "cannot remove an IPsec state");
        }
    }

    fn send_probe(&mut self, probe: &Probe) {
        let Some(ipsec) = &mut self.ipsec else { return };
        let (path, mtu) = (probe.path, probe.mtu);
        match ipsec.probes.send(probe) {
            Ok(()) => self.counters.probes_sent += 1,
            Err(SendError::TooLong) => {
                self.counters.probes_too_long += 1;
                (self.events)(EngineEvent::MessageTooLong { path, mtu });
            }
            // Counts as unanswered, like a probe lost on the network.
            Err(SendError::Refused(error)) => {
                self.counters.probes_refused += 1;
                tracing::debug!(%error, remote = %probe.remote, "cannot send a probe");
            }
        }
    }

    pub(super) fn handle_probe(&mut self, received: &Received) {
        let Received { mac, probe, mtu, candidate } = *received;
        match self.state.probed_by(mac) {
            Some((peer, path)) => {
                self.counters.probes_received += 1;
                self.unheard.hear(Instant::now(), peer);
                (self.events)(EngineEvent::ProbeReceived { peer, path, probe, mtu, candidate });
            }
            None => self.counters.probes_unknown += 1,
        }
    }

    pub(super) fn path_failed(&self, path: PathId, reason: &str) {
        tracing::warn!(path = path.0, reason, "a kernel path has failed");
        (self.events)(EngineEvent::PathFailed { path, reason: reason.to_owned() });
    }
}

fn send_keepalive(socket: Option<&EncapSocket>, remote: SocketAddr) {
    if let Some(socket) = socket
        && let Err(error) = socket.send_keepalive(remote)
    {
        tracing::debug!(%error, %remote, "cannot send a keepalive");
    }
}

/// The address from which this host reaches `remote`: the configured `host` if it has the same family, else the
/// route's choice. `None` without a route.
#[must_use]
pub fn local_address(remote: IpAddr, host: Option<IpAddr>) -> Option<IpAddr> {
    if let Some(host) = host.filter(|host| host.is_ipv4() == remote.is_ipv4()) {
        return Some(host);
    }
    let any: IpAddr = match remote {
        IpAddr::V4(_) => std::net::Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => std::net::Ipv6Addr::UNSPECIFIED.into(),
    };
    // Connecting a UDP socket sends nothing; it only looks the route up.
    let socket = UdpSocket::bind((any, 0)).ok()?;
    socket.connect((remote, weft_packet::vxlan::PORT)).ok()?;
    socket.local_addr().ok().map(|address| address.ip())
}
