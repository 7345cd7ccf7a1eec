//! The control loop. It handles every input completely before the next, so the mesh, the paths, the engines and
//! the kernel never get conflicting instructions.
//!
//! Order within one round: first the mesh's outputs, since state is written before anything that depends on it.
//! Then commands for the engines, then messages for peers. The loop awaits only its inputs: the kernel engine and
//! the disk report completions as inputs.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use tokio::sync::{mpsc, oneshot, watch};
use weft_api::{ApiError, Attachment, ErrorKind, Workers};
use weft_crypto::{PeerId, SessionKey};
use weft_io::faults;
use weft_kernel::engine::local_address;
use weft_link::Links;
use weft_mesh::{AddressError, Mesh, NetworkDefinition, Output};
use weft_path::{Endpoint, EngineCommand, EngineEvent, Mac, PathState, Paths, Vni};

use super::barriers::Barriers;
use super::engines::{Engines, EnginesChange, Released};
use super::events::Events;
use super::networks::{Networks, endpoint_of};
use super::ranges::Ranges;
pub(crate) use super::request::{
    LostLink, NamesSnapshot, NetworkNames, Readings, Request, Snapshot,
};
use super::saving::Saving;
use super::service_messages::{ServiceMessage, ServiceMessages, ToPeer};
use super::targets::Targets;
use super::turns::Turns;
use super::unheard::Unheard;
use crate::config::{ConfigError, Settings};
use crate::upkeep::store::Store;

/// The interval between two checks of the addresses of the links, in milliseconds.
const ADDRESSES_LOOK_MS: u64 = 2_000;

/// A message on a link that is up.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum ControlMessage {
    Mesh(weft_mesh::Message),
    Path(weft_path::Message),
    /// Only for hosts with the feature `services`.
    Service(ServiceMessage),
}

/// A caller that waits for an address.
pub(crate) struct Waiting {
    owner: String,
    reply: oneshot::Sender<Result<Vec<IpNet>, AddressError>>,
}

/// The control loop's state.
pub(crate) struct Control {
    pub(crate) store: Store,
    pub(crate) links: Links,
    pub(crate) mesh: Mesh,
    pub(crate) paths: Paths,
    pub(crate) engines: Engines,
    pub(crate) settings: Settings,
    pub(crate) waiting: BTreeMap<weft_mesh::Ticket, Waiting>,
    pub(crate) local: PeerId,
    /// The targets that the user named.
    pub(crate) targets: Arc<Targets>,
    /// The targets last passed to the mesh.
    pub(crate) told_targets: Vec<weft_mesh::Target>,
    /// Links that are up: nickname and address.
    pub(crate) seen: BTreeMap<PeerId, (String, SocketAddr)>,
    /// The address each peer has dialled, where the routing table would send from another one.
    pub(crate) sources: BTreeMap<PeerId, IpAddr>,
    /// Links that ended, until they are up again.
    pub(crate) lost: BTreeMap<PeerId, LostLink>,
    pub(crate) unheard: Unheard,
    pub(crate) saving: Saving,
    pub(crate) networks: Networks,
    pub(crate) services: ServiceMessages,
    pub(crate) barriers: Barriers,
    /// Says that names have changed.
    pub(crate) names: watch::Sender<u64>,
    pub(crate) turns: Turns,
}

impl Control {
    /// Runs until `stop` fires or an input queue ends.
    pub(crate) async fn run(
        mut self,
        mut links: weft_link::Events,
        mut events: Events,
        mut requests: mpsc::Receiver<Request>,
        mut stop: watch::Receiver<bool>,
    ) {
        self.tell_targets();
        let mut look = tokio::time::interval(Duration::from_millis(ADDRESSES_LOOK_MS));
        look.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            self.settle();
            let timer = self.next_timeout();
            tokio::select! {
                () = stopped(&mut stop) => break,
                event = links.recv() => match event {
                    Some(event) => {
                        // A message changes no link, and the look at all of them grows with the mesh.
                        let changes_links = !matches!(event, weft_link::Event::Message { .. });
                        self.handle_link(event);
                        if changes_links {
                            self.tell_targets();
                        }
                    }
                    None => break,
                },
                Some(event) = events.recv() => self.handle_engine(event),
                Some(request) = requests.recv() => self.handle_request(request),
                change = self.engines.changed() => self.handle_engines_change(change),
                saved = self.saving.done() => self.handle_saved(saved),
                due = look.tick() => {
                    self.turns.note(due.elapsed());
                    self.look_at_addresses();
                }
                () = sleep_until(timer) => self.handle_timeout(),
            }
        }
        self.finish_saving().await;
        self.links.shutdown().await;
        self.engines.kernel().stop().await;
    }
}

impl Control {
    /// Gets the state to the disk before the daemon ends, if that does not take long.
    async fn finish_saving(&mut self) {
        let until = tokio::time::Instant::now() + Duration::from_millis(SAVE_LIMIT_MS);
        while self.saving.is_under_way()
            && let Ok(saved) = tokio::time::timeout_at(until, self.saving.done()).await
        {
            self.handle_saved(saved);
            self.settle();
        }
    }

    fn handle_link(&mut self, event: weft_link::Event) {
        let now = Instant::now();
        match event {
            weft_link::Event::Up { peer, session, remote, direction, renewal: true, .. } => {
                self.path_link_up(peer, session, (remote, direction), true);
            }
            weft_link::Event::Up { peer, nickname, remote, direction, session, hello, .. } => {
                let hello: weft_mesh::Hello = match serde_json::from_value(hello) {
                    Ok(hello) => hello,
                    Err(error) => {
                        let reason = format!("cannot parse its greeting ({error})");
                        self.links.close(peer, &reason);
                        return;
                    }
                };
                self.seen.insert(peer, (nickname.clone(), remote));
                if let Err(refusal) = self.mesh.handle_link_up(now, peer, hello.clone(), remote) {
                    tracing::warn!(%peer, nickname, %refusal, "peer refused");
                    self.lost(peer, &refusal.to_string());
                    self.links.close(peer, &refusal.to_string());
                    return;
                }
                self.lost.remove(&peer);
                self.services.handle_link_up(peer, &nickname, &hello);
                self.path_link_up(peer, session, (remote, direction), false);
            }
            weft_link::Event::Message { peer, bytes, .. } => self.handle_message(now, peer, &bytes),
            weft_link::Event::Down { peer, reason } => {
                self.lost(peer, &reason);
                self.engines.forget_messages(peer);
                self.services.handle_link_down(peer);
                self.mesh.handle_link_down(now, peer);
                self.paths.handle_link_down(now, peer);
            }
            weft_link::Event::SameIdentity { reason } => {
                self.mesh.handle_same_identity(now, &reason);
            }
            weft_link::Event::SecretLearned { secret } => self.keep_secret(secret),
            // These were logged where they occurred.
            weft_link::Event::Refused { .. } | weft_link::Event::TargetChanged { .. } => {}
        }
    }

    fn handle_engine(&mut self, event: EngineEvent) {
        let seen = &self.seen;
        if let Some(peer) = self.unheard.handle(&event, |peer| seen.contains_key(peer)) {
            let nickname = seen.get(&peer).map(|(nickname, _)| nickname.as_str());
            tracing::warn!(
                %peer,
                nickname,
                "a firewall of this host drops a peer's packets after the kernel has decrypted them; `weft doctor` names the rule to add"
            );
        }
        self.paths.handle_event(Instant::now(), event);
    }

    fn path_link_up(
        &mut self,
        peer: PeerId,
        session: SessionKey,
        (remote, direction): (SocketAddr, weft_link::Direction),
        renewal: bool,
    ) {
        let remote = remote.ip().to_canonical();
        let (local, source) = self.own_address(peer, remote, renewal);
        self.set_source(peer, source);
        // Messages for the previous link are repeated on this one, or are void.
        self.engines.forget_messages(peer);
        let dialled = direction == weft_link::Direction::Outbound;
        self.paths.handle_link_up(Instant::now(), peer, session, local, remote, dialled);
    }

    /// Links outlive a change of address at either end; kernel paths are bound to both.
    fn look_at_addresses(&mut self) {
        let now = Instant::now();
        for (peer, remote) in self.links.remotes() {
            let address = remote.ip().to_canonical();
            let (local, source) = self.own_address(peer, address, true);
            // Without a route for a moment, the old address stays in use.
            if local.is_some() {
                self.set_source(peer, source);
                self.paths.handle_addresses(now, peer, local, address);
            }
            self.mesh.handle_remote(now, peer, remote);
            if let Some((_, seen)) = self.seen.get_mut(&peer) {
                *seen = remote;
            }
        }
    }

    /// Returns this host's address on the link with a peer. The second value repeats it where the peer dialled
    /// another address than the routing table would send from. This host may have renewed a link that
    /// continues.
    fn own_address(
        &self,
        peer: PeerId,
        remote: IpAddr,
        goes_on: bool,
    ) -> (Option<IpAddr>, Option<IpAddr>) {
        let routed = local_address(remote, self.settings.host);
        let before = self.sources.get(&peer).copied().filter(|_| goes_on);
        let dialled = self.links.local_of(peer).or(before);
        let dialled = dialled.filter(|dialled| Some(*dialled) != routed && is_here(*dialled));
        (dialled.or(routed), dialled)
    }

    fn set_source(&mut self, peer: PeerId, source: Option<IpAddr>) {
        let before = match source {
            Some(source) => self.sources.insert(peer, source),
            None => self.sources.remove(&peer),
        };
        if before != source {
            tracing::info!(%peer, ?source, "the address that the peer's data is sent from");
            self.engines.command(EngineCommand::SetSource { peer, source });
        }
    }

    fn handle_message(&mut self, now: Instant, peer: PeerId, bytes: &[u8]) {
        let problem = match serde_json::from_slice(bytes) {
            Ok(ControlMessage::Mesh(message)) => {
                self.mesh.handle_message(now, peer, message).err().map(|error| error.to_string())
            }
            Ok(ControlMessage::Path(message)) => {
                self.paths.handle_message(now, peer, message).err().map(|error| error.to_string())
            }
            Ok(ControlMessage::Service(message)) => {
                self.services.handle_message(peer, message, bytes.len());
                None
            }
            Err(error) => Some(error.to_string()),
        };
        if let Some(problem) = problem {
            tracing::debug!(%peer, problem, "message ignored");
        }
    }

    fn handle_request(&mut self, request: Request) {
        let now = Instant::now();
        match request {
            Request::Addresses { owner, vni, explicit, reply } => {
                let ticket = match explicit {
                    Some(address) => self.mesh.claim(now, vni, &owner, address),
                    None => self.mesh.allocate(now, vni, &owner),
                };
                self.waiting.insert(ticket, Waiting { owner, reply });
            }
            Request::Allocations { reply } => {
                let _ = reply.send(self.mesh.allocations());
            }
            Request::Ranges { vni, reply } => {
                if let Some(ipam) = self.mesh.ipam_on(vni) {
                    let _ = reply.send(Ranges::of(&ipam));
                }
            }
            Request::Release { owner } => {
                self.mesh.release(now, &owner);
            }
            Request::ReleaseSome { owner, vni, addresses, kept } => {
                self.mesh.release_some(now, vni, &owner, &addresses, &kept);
            }
            Request::TargetsChanged => self.tell_targets(),
            Request::Forget { text, reply } => {
                let _ = reply.send(self.forget(&text));
            }
            Request::LinkMtu { link_mtu } => self.paths.handle_link_mtu(now, link_mtu),
            Request::KeepOnly { owners } => {
                let held = self.mesh.allocations().into_iter().map(|held| held.owner);
                let gone: BTreeSet<String> = held.filter(|owner| !owners.contains(owner)).collect();
                for owner in gone {
                    self.mesh.release(now, &owner);
                }
            }
            Request::Announce { attachment } => self.announce(&attachment),
            Request::Barrier { vni, reply } => self.barriers.start(&mut self.mesh, vni, reply),
            Request::AnnounceMac { vni, mac } => self.announce_mac(vni, mac),
            Request::Conflicts { reply } => {
                let _ = reply.send(self.mesh.conflicts());
            }
            Request::Withdraw { vni, mac } => self.mesh.remove_local_endpoint(now, vni, mac),
            Request::Network(request) => {
                self.networks.handle(now, request, &mut self.mesh, &mut self.engines);
            }
            Request::Names { reply } => {
                let _ = reply.send(self.names());
            }
            Request::SetNames { names, reply } => {
                let _ = reply.send(self.mesh.set_local_names(names));
            }
            Request::Workers { wanted, reply } => {
                let _ = reply.send(self.workers(wanted));
            }
            Request::Traffic { reply } => self.traffic(now, reply),
            Request::ToPeer(message) => self.send_for_service(message),
            Request::IsMember { peer, reply } => {
                let _ = reply.send(self.mesh.knows(peer));
            }
            Request::Snapshot { reply } => self.snapshot(now, reply),
        }
    }

    fn handle_timeout(&mut self) {
        let now = Instant::now();
        self.mesh.handle_timeout(now);
        self.paths.handle_timeout(now);
    }

    fn next_timeout(&self) -> Option<Instant> {
        [self.mesh.poll_timeout(), self.paths.poll_timeout()].into_iter().flatten().min()
    }

    /// Tells the mesh which targets the user named and which peers answered there, when that has changed.
    fn tell_targets(&mut self) {
        let links = self.links.status();
        let answered = |name: &str| {
            let link = links.iter().find(|link| link.address == name)?;
            if link.is_itself { Some(self.local) } else { link.peer }
        };
        let named = self.targets.list().into_iter();
        let told: Vec<_> = named
            .map(|target| {
                let name = target.to_string();
                weft_mesh::Target { peer: answered(&target.address()), name }
            })
            .collect();
        if told != self.told_targets {
            self.told_targets.clone_from(&told);
            self.mesh.handle_targets(Instant::now(), told);
        }
    }

    /// Records why a link ended, for status; the first reason stands until the next link is up.
    fn lost(&mut self, peer: PeerId, reason: &str) {
        let Some((nickname, remote)) = self.seen.remove(&peer) else { return };
        if self.lost.len() >= LOST_LINKS_MAX
            && let Some(oldest) = self.lost.iter().min_by_key(|(_, lost)| lost.since)
        {
            let oldest = *oldest.0;
            self.lost.remove(&oldest);
        }
        let lost =
            LostLink { peer, nickname, remote, reason: reason.into(), since: Instant::now() };
        self.lost.insert(peer, lost);
    }

    /// Forgets the hosts of this name, address or key that are not linked. Returns their ids, and whether a
    /// linked host matches too.
    fn forget(&mut self, text: &str) -> (Vec<PeerId>, bool) {
        let target = text.parse::<weft_link::Target>().ok();
        let key = text.parse::<weft_link::KeyHash>().ok();
        let is_at = |target: &weft_link::Target, peer: &weft_mesh::PeerStatus| {
            let here = |at: &SocketAddr| {
                (at.ip().to_string(), at.port()) == (target.host.clone(), target.port)
            };
            peer.addresses.iter().any(here)
                && target.key_hash.as_ref().is_none_or(|key| key.matches(peer.peer))
        };
        let meant = |peer: &weft_mesh::PeerStatus| {
            peer.nickname == text
                || key.as_ref().is_some_and(|key| key.matches(peer.peer))
                || target.as_ref().is_some_and(|target| is_at(target, peer))
        };
        let meant: Vec<_> =
            self.mesh.peers().into_iter().filter(|peer| !peer.local && meant(peer)).collect();
        let linked = meant.iter().any(|peer| peer.linked);
        let gone: Vec<PeerId> = meant.into_iter().map(|peer| peer.peer).collect();
        let gone: Vec<PeerId> =
            gone.into_iter().filter(|peer| self.mesh.forget_member(*peer)).collect();
        // The mesh reports them later. The user's next look must not show them any more.
        gone.iter().for_each(|peer| self.drop_gone(*peer));
        (gone, linked)
    }

    /// Drops all that is kept for a host that is forgotten, and dials it no more.
    fn drop_gone(&mut self, peer: PeerId) {
        self.lost.remove(&peer);
        self.paths.handle_peer_gone(Instant::now(), peer);
        self.sources.remove(&peer);
        self.links.forget_peer(peer);
    }

    /// Carries out everything that follows from the last input.
    fn settle(&mut self) {
        while let Some((peer, message)) = self.engines.release() {
            self.send(
                peer,
                &match message {
                    Released::Path(message) => ControlMessage::Path(message),
                    Released::Mesh(message) => ControlMessage::Mesh(message),
                },
            );
        }
        loop {
            if let Some(output) = self.next_output() {
                self.carry_out(output);
            } else if let Some(command) = self.paths.poll_command() {
                self.engines.command(command);
            } else if let Some((peer, message)) = self.paths.poll_message() {
                if let Some(message) = self.engines.hold_message(peer, message) {
                    self.send(peer, &ControlMessage::Path(message));
                }
            } else if let Some(change) = self.paths.poll_change() {
                tracing::info!(
                    peer = %change.peer,
                    from = change.from.name(),
                    to = change.to.name(),
                    reason = change.reason.map(|reason| reason.to_string()),
                    "path"
                );
            } else {
                break;
            }
        }
        self.networks.settle(&self.mesh, self.saving.is_under_way());
        self.engines.flush();
        let revision = self.mesh.names_revision();
        self.names.send_if_modified(|told| std::mem::replace(told, revision) != revision);
    }

    /// The mesh's next output. While its state is being saved, those wait that rely on it.
    fn next_output(&mut self) -> Option<Output> {
        match self.saving.is_under_way() {
            true => self.mesh.poll_output_while_saving(),
            false => self.mesh.poll_output(),
        }
    }

    fn handle_engines_change(&mut self, change: EnginesChange) {
        match change {
            EnginesChange::Support => self.offer_again(),
            // Held messages go out when the loop settles.
            EnginesChange::CarriedOut => {}
        }
    }

    /// Changes the number of workers of the vector engine, if requested. Peers are offered a lane for each
    /// added worker. The lanes of removed workers stay, served by the others: withdrawing a lane would lose
    /// packets on their way.
    fn workers(&mut self, wanted: Option<usize>) -> Result<Workers, ApiError> {
        if let Some(wanted) = wanted {
            if !(1..=weft_engine::WORKERS_MAX).contains(&wanted) {
                return Err(ApiError::new(ErrorKind::BadRequest, ConfigError::Workers(wanted)));
            }
            let before = self.engines.vector().workers();
            let result = self.engines.vector().set_workers(wanted);
            let now = self.engines.vector().workers();
            tracing::info!(before, now, "workers of the vector engine");
            self.settings.workers = self.settings.workers.max(now);
            self.offer_again();
            result.map_err(|error| {
                let text = format!("{error}; the vector engine runs {now} of {wanted} workers");
                ApiError::new(ErrorKind::Internal, text)
            })?;
        }
        Ok(Workers {
            workers: self.engines.vector().workers(),
            workers_max: weft_engine::WORKERS_MAX,
            workers_default: weft_engine::default_workers(),
            lanes: self.settings.workers,
        })
    }

    fn traffic(&self, now: Instant, reply: oneshot::Sender<Readings>) {
        let active = |path: &weft_path::PathStatus| {
            let engine = path.engine.filter(|_| path.state == PathState::Active);
            engine.map(|engine| (path.peer, engine))
        };
        let engine = self.engines.kernel().clone();
        let readings = Readings {
            kernel: Vec::new(),
            engines: self.paths.status(now).iter().filter_map(active).collect(),
            counters: self.engines.vector().counters(),
            workers: self.engines.vector().workers(),
        };
        // Only this request waits for the kernel's counters.
        tokio::spawn(async move {
            let _ = reply.send(Readings { kernel: engine.traffic().await, ..readings });
        });
    }

    fn snapshot(&self, now: Instant, reply: oneshot::Sender<Snapshot>) {
        let engine = self.engines.kernel().clone();
        let snapshot = Snapshot {
            peers: self.mesh.peers(),
            ipam: self.mesh.ipam(),
            paths: self.paths.status(now),
            sources: self.sources.clone(),
            counters: self.engines.vector().counters(),
            workers: self.engines.vector().workers(),
            kernel: weft_kernel::engine::KernelCounters::default(),
            support: self.engines.kernel().support().borrow().clone(),
            kernel_busy: self.engines.kernel_busy(),
            lost: self.lost.values().cloned().collect(),
        };
        tokio::spawn(async move {
            let _ = reply.send(Snapshot { kernel: engine.counters().await, ..snapshot });
        });
    }

    fn names(&self) -> NamesSnapshot {
        let held = self.mesh.networks().into_iter().filter(|network| network.here);
        NamesSnapshot {
            networks: held.map(|network| self.names_on(network.definition)).collect(),
            revision: self.mesh.names_revision(),
            is_complete: self.mesh.has_names_of_all(),
        }
    }

    fn names_on(&self, definition: NetworkDefinition) -> NetworkNames {
        let NetworkDefinition { name, vni, options, .. } = definition;
        let ipam = self.mesh.ipam_on(vni);
        let ranges = ipam.map(|it| [Some(IpNet::V4(it.range)), it.range6.map(IpNet::V6)]);
        // Names that a user gave on a network count from hosts alone that share it.
        let hosts = match vni {
            Vni::WEFT => self.mesh.host_names(),
            vni => self.mesh.host_names_on(vni),
        };
        NetworkNames {
            name,
            ranges: ranges.into_iter().flatten().flatten().collect(),
            is_internal: options.internal,
            hosts,
        }
    }

    fn offer_again(&mut self) {
        let offers = self.engines.offers(&self.settings);
        self.paths.handle_engines(Instant::now(), offers.engines, offers.missing);
    }
}

impl Control {
    fn carry_out(&mut self, output: Output) {
        match output {
            Output::Persist(state) => {
                self.saving.begin(&self.store, *state, self.mesh.unsure().is_none());
            }
            Output::Send { peer, message } if message.is_barrier_reply() => {
                if let Some(message) = self.engines.hold_reply(peer, message) {
                    self.send(peer, &ControlMessage::Mesh(message));
                }
            }
            Output::Send { peer, message } => self.send(peer, &ControlMessage::Mesh(message)),
            // The host may have been forgotten since.
            Output::Dial { peer, addresses } => {
                if !self.mesh.is_forgotten(peer) {
                    self.links.connect_peer(peer, &addresses);
                }
            }
            Output::Endpoints { vni, add, remove } => self.set_endpoints(vni, add, &remove),
            Output::NetworkPeers { vni, peers } => self.engines.set_network_peers(vni, peers),
            Output::Refuse { peer, reason } => {
                tracing::warn!(%peer, %reason, "peer refused");
                self.lost(peer, &reason.to_string());
                self.links.close(peer, &reason.to_string());
                self.paths.handle_link_down(Instant::now(), peer);
            }
            Output::Answer { ticket, vni, result } => {
                if let Some(Waiting { owner, reply }) = self.waiting.remove(&ticket) {
                    // The caller gave up the attach, so its address is released.
                    if let Err(Ok(given)) = reply.send(result) {
                        self.mesh.release_some(Instant::now(), vni, &owner, &given, &[]);
                    }
                }
            }
            Output::BarrierPassed { ticket } => self.barriers.passed(ticket),
            Output::Changed(change) => {
                // It may be linked again since.
                if let weft_mesh::Change::MemberForgotten { peer } = &change
                    && self.links.session_id(*peer).is_none()
                {
                    self.drop_gone(*peer);
                }
                if let weft_mesh::Change::NetworkEnded { vni, .. } = &change {
                    self.networks.end(*vni);
                    self.engines.end_network(*vni);
                }
                if let weft_mesh::Change::StateDoubted { why } = &change {
                    tracing::warn!(why, "no addresses are given now");
                }
                tracing::info!(change = %serde_json::to_string(&change).unwrap_or_default(), "mesh");
            }
        }
    }

    /// Reports the result of a save. The mesh holds back all outputs that depend on unsaved state.
    fn handle_saved(&mut self, saved: Result<(), String>) {
        match (&saved, self.mesh.save_failure()) {
            (Err(error), None) => {
                tracing::error!(
                    error,
                    "cannot save the state; requests whose result must be saved are refused"
                );
            }
            (Ok(()), Some(_)) => tracing::info!("state is saved again"),
            _ => {}
        }
        self.mesh.handle_saved(Instant::now(), saved);
    }

    fn keep_secret(&self, secret: weft_link::Secret) {
        let store = self.store.clone();
        tokio::task::spawn_blocking(move || match store.save_secret_or_later(secret.expose()) {
            Ok(()) => tracing::info!("admitted; saved the network's secret for the next start"),
            Err(error) => tracing::error!(
                %error,
                "admitted, but cannot save the network's secret; trying again"
            ),
        });
    }

    fn announce(&mut self, attachment: &Attachment) {
        let Ok(mac) = attachment.mac.parse() else { return };
        let info = weft_mesh::EndpointInfo {
            container: attachment.id.clone(),
            name: attachment.name.clone(),
            aliases: attachment.aliases.clone(),
            mac,
            addresses: attachment.addresses.clone(),
        };
        if let Err(error) = self.mesh.set_local_endpoint(Instant::now(), Vni(attachment.vni), info)
        {
            tracing::error!(container = attachment.name, %error, "endpoint not announced");
        }
    }

    /// Announces an address behind a port, which no container of Weft's has.
    fn announce_mac(&mut self, vni: Vni, mac: Mac) {
        let info = weft_mesh::EndpointInfo {
            container: format!("behind:{mac}"),
            name: String::new(),
            aliases: Vec::new(),
            mac,
            addresses: Vec::new(),
        };
        if let Err(error) = self.mesh.set_local_endpoint(Instant::now(), vni, info) {
            tracing::warn!(%mac, %error, "an address behind a port is not announced");
        }
    }

    fn set_endpoints(
        &mut self,
        vni: Vni,
        add: Vec<(weft_mesh::EndpointInfo, PeerId)>,
        remove: &[(Mac, PeerId)],
    ) {
        // A core that is late, in builds for tests only.
        if let Some(ms) = faults::asked("endpoints-ms").and_then(|ms| ms.parse().ok()) {
            std::thread::sleep(Duration::from_millis(ms));
        }
        let remove: Vec<Mac> = remove.iter().map(|(mac, _)| *mac).collect();
        let add: Vec<(Endpoint, PeerId)> =
            add.into_iter().map(|(info, peer)| (endpoint_of(&info), peer)).collect();
        self.engines.command(EngineCommand::SetEndpoints { vni, add, remove });
    }

    fn send_for_service(&self, message: ToPeer) {
        if let Some((peer, message)) = self.services.outgoing(message) {
            self.send(peer, &ControlMessage::Service(message));
        }
    }

    fn send(&self, peer: PeerId, message: &ControlMessage) {
        match serde_json::to_vec(message) {
            Ok(bytes) => {
                let sent = self.links.send(peer, bytes);
                // A link that went down meanwhile reports itself, and everything is repeated on the next.
                if let Err(error @ weft_link::SendError::TooLong) = sent {
                    tracing::error!(%error, "a message is not sent; this is a bug in weft");
                }
            }
            Err(error) => tracing::error!(%error, "cannot write a message"),
        }
    }
}

/// Whether this host still has the address.
fn is_here(address: IpAddr) -> bool {
    UdpSocket::bind((address, 0)).is_ok()
}

/// Waits for the order to stop, or for its senders to end.
async fn stopped(stop: &mut watch::Receiver<bool>) {
    let _ = stop.wait_for(|stopped| *stopped).await;
}

pub(crate) async fn sleep_until(moment: Option<Instant>) {
    match moment {
        Some(moment) => tokio::time::sleep_until(moment.into()).await,
        None => std::future::pending().await,
    }
}

/// How long a daemon that ends waits for the disk, in milliseconds.
const SAVE_LIMIT_MS: u64 = 2_000;
/// Ended links remembered for status.
const LOST_LINKS_MAX: usize = 64;
