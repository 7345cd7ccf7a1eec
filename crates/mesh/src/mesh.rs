//! The state machine of one host: its inputs, its outputs, and their order.

mod announced;
mod barrier;
mod doubt;
mod forgotten;
mod founding;
mod gossip;
mod networks;
mod output;
mod range_founding;
mod ranges;
mod status;
mod storage;
mod tickets;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use ipnet::Ipv6Net;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha12Rng;
use weft_crypto::PeerId;
use weft_packet::ethernet::Mac;
use weft_packet::vxlan::Vni;

use self::barrier::{BarrierLink, Barriers};
use self::doubt::Standing;
use self::networks::{Networks, NetworksLink};
use self::ranges::Space;
use self::storage::Storage;
use self::tickets::Pending;
use crate::config::{Config, Founding, Target};
use crate::endpoint::{EndpointInfo, EndpointTable};
use crate::error::{MeshError, Refusal};
use crate::limits::{
    ENDPOINT_GRACE_S, ENDPOINTS_PER_PEER_MAX, FORGET_CHECK_S, NICKNAME_BYTES_MAX, PROTOCOL_VERSION,
    RESYNC_DELAY_MS,
};
use crate::members::{Members, clip};
use crate::message::{
    FEATURE_BARRIER, FEATURE_NETWORKS, FEATURE_SERVICES, Hello, Message, Naming, Network, NetworkId,
};
use crate::names::NameRecord;
use crate::state::State;

pub use self::networks::NetworkStatus;
pub use self::output::{Change, Output, Ticket};
pub use self::status::{Allocation, IpamStatus, OwnerStatus, PeerStatus};

/// A link that is up.
#[derive(Debug)]
struct Link {
    network: Option<Network>,
    /// The port on which it accepts links.
    port: u16,
    since: Instant,
    /// Peers that the peer reports links with.
    connections: BTreeSet<PeerId>,
    networks: NetworksLink,
    /// The progress of hearing of each network that the hosts share.
    incoming: BTreeMap<Vni, Incoming>,
    /// Parts of a whole set of names that is still coming.
    new_names: Vec<NameRecord>,
    barrier: BarrierLink,
    /// When to send the peer everything again, after another host lost its link with it.
    resync_at: Option<Instant>,
}

/// The progress of hearing of a network on a link.
#[derive(Debug, Default)]
struct Incoming {
    /// How many addresses of its ranges the peer has given out.
    used: Option<u64>,
    /// Parts of a list of held claims that is still coming.
    new_claims: BTreeSet<Ipv4Addr>,
    /// Parts of a whole set of endpoints that is still coming.
    new_endpoints: Option<BTreeMap<Mac, EndpointInfo>>,
    /// The peer was asked for its whole set of endpoints.
    endpoints_asked: bool,
}

/// The view that one host has of the mesh. See the crate's documentation.
#[derive(Debug)]
pub struct Mesh {
    config: Config,
    rng: ChaCha12Rng,
    state: State,
    /// The [`Output::Persist`] that waits is to have a newer state.
    is_behind: bool,
    /// The state has changed since the last [`Output::Persist`].
    dirty: bool,
    /// Whether the state may be acted on.
    standing: Standing,
    /// [`State::mark`] at the last change of the generation.
    mark: u64,
    /// The generation that peers were told.
    generation_told: u64,
    /// When to save what peers told of theirs; `None`: all of it is saved.
    generations_at: Option<Instant>,
    outputs: VecDeque<Output>,
    storage: Storage,
    links: BTreeMap<PeerId, Link>,
    members: Members,
    /// The ranges of `weft`, and of each network that has its own ranges.
    spaces: BTreeMap<Vni, Space>,
    /// Endpoints on `weft`.
    endpoints: EndpointTable,
    networks: Networks,
    barriers: Barriers,
    pending: BTreeMap<Ticket, Pending>,
    next_ticket: u64,
    targets: Vec<Target>,
    /// The hosts named by each other host, until there is a mesh.
    namings: BTreeMap<PeerId, Naming>,
    naming_version: u64,
    forget_at: Instant,
}

impl Mesh {
    /// Creates the state machine at start, from the last stored state if there is one.
    ///
    /// `seed` must be 32 random bytes, new at each start.
    ///
    /// # Errors
    /// A configuration that makes no sense, or a state that does not go with it.
    pub fn new(
        now: Instant,
        config: Config,
        saved: Option<State>,
        seed: [u8; 32],
    ) -> Result<Self, MeshError> {
        config.check()?;
        let mut state = saved.unwrap_or_else(|| State::new(&config));
        let unknown = state.drop_unknown();
        state.check(&config)?;
        state.weft.set_range(config.range);
        let members = Members::restore(now, &state.members, config.discovery);
        let standing = Standing::at_start(now, config.origin, &state, &members);
        let mut mesh = Self {
            rng: ChaCha12Rng::from_seed(seed),
            dirty: false,
            standing,
            mark: state.mark(),
            generation_told: state.generation,
            generations_at: None,
            outputs: VecDeque::new(),
            storage: Storage::new(state.clone()),
            is_behind: false,
            links: BTreeMap::new(),
            members,
            spaces: state
                .ledgers()
                .map(|(vni, ledger)| (vni, Space::restore(now, ledger.used())))
                .collect(),
            endpoints: EndpointTable::new(config.local, Vni::WEFT),
            networks: Networks::restore(now, config.local, &state.networks),
            barriers: Barriers::default(),
            pending: BTreeMap::new(),
            next_ticket: 0,
            targets: Vec::new(),
            namings: BTreeMap::new(),
            naming_version: 0,
            forget_at: now + Duration::from_secs(FORGET_CHECK_S),
            state,
            config,
        };
        if mesh.state.weft.network.is_none() {
            mesh.naming_version = mesh.state.count_start() << 16;
            mesh.dirty = true;
            if mesh.config.founding == Founding::Found {
                mesh.found(now);
            }
        }
        if let Some(why) = mesh.unsure() {
            mesh.emit(Output::Changed(Change::StateDoubted { why }));
        }
        mesh.tell_unknown_networks(unknown);
        Ok(mesh)
    }

    /// The hello that this host sends when a link comes up.
    pub fn hello(&self) -> Hello {
        Hello {
            protocol: PROTOCOL_VERSION,
            features: [FEATURE_NETWORKS, FEATURE_SERVICES, FEATURE_BARRIER]
                .map(str::to_owned)
                .into(),
            nickname: self.config.nickname.clone(),
            port: self.config.port,
            addresses: self.config.addresses.clone(),
            range: self.config.range,
            range6: self.config.range6,
            network: self.state.weft.network,
        }
    }

    /// A link with an authenticated peer is up; `remote` is the far end's address. It replaces an earlier link;
    /// messages still in flight on that link count as lost.
    ///
    /// # Errors
    /// The two hosts cannot be in one mesh: close the link and show the text at both ends.
    pub fn handle_link_up(
        &mut self,
        now: Instant,
        peer: PeerId,
        hello: Hello,
        remote: SocketAddr,
    ) -> Result<(), Refusal> {
        self.check_hello(peer, &hello)?;
        self.make_room_for_member(now, peer)?;
        self.is_back(peer);
        self.drop_link(now, peer);
        let link = Link {
            network: hello.network,
            port: hello.port,
            since: now,
            connections: BTreeSet::new(),
            networks: NetworksLink::new(&hello),
            incoming: BTreeMap::new(),
            new_names: Vec::new(),
            barrier: BarrierLink::new(&hello),
            resync_at: None,
        };
        self.links.insert(peer, link);
        self.tables_mut().for_each(|(_, table)| table.set_expiry(peer, None));
        self.networks_link_up(peer);
        let seen_at = SocketAddr::new(remote.ip().to_canonical(), hello.port);
        let known = self.members.get(peer).is_some();
        let addresses: Vec<SocketAddr> = [seen_at].into_iter().chain(hello.addresses).collect();
        let news = self.members.linked(now, peer, &hello.nickname, &addresses);
        if !known {
            let nickname = clip(&hello.nickname);
            self.emit(Output::Changed(Change::MemberAdded { peer, nickname }));
        }
        self.greet(now, peer);
        self.tell_connection(peer, true);
        if let Some(gone) = news {
            self.dirty = true;
            self.tell_moved(now, peer, gone, peer);
        }
        self.drive(now);
        Ok(())
    }

    /// The link with a peer now comes from another address, as when the host moves.
    pub fn handle_remote(&mut self, now: Instant, peer: PeerId, remote: SocketAddr) {
        let Some(link) = self.links.get(&peer) else { return };
        let seen_at = SocketAddr::new(remote.ip().to_canonical(), link.port);
        if let Some(gone) = self.members.moved(peer, seen_at) {
            self.dirty = true;
            self.tell_moved(now, peer, gone, peer);
            self.drive(now);
        }
    }

    /// The link with a peer is down, and no other took its place.
    pub fn handle_link_down(&mut self, now: Instant, peer: PeerId) {
        if self.drop_link(now, peer) {
            self.drive(now);
        }
    }

    /// A message came over a link.
    ///
    /// # Errors
    /// [`MeshError::NotLinked`]; for messages that no correct host sends, [`MeshError::Malformed`] and
    /// [`MeshError::TooMany`].
    pub fn handle_message(
        &mut self,
        now: Instant,
        peer: PeerId,
        message: Message,
    ) -> Result<(), MeshError> {
        if !self.links.contains_key(&peer) {
            return Err(MeshError::NotLinked(peer));
        }
        let result = self.dispatch(now, peer, message);
        self.drive(now);
        result
    }

    /// Time has passed.
    pub fn handle_timeout(&mut self, now: Instant) {
        self.expire_endpoints(now);
        self.drive_storage(now);
        self.dirty |= self.generations_at.take_if(|at| *at <= now).is_some();
        if self.forget_at <= now {
            self.forget_at = now + Duration::from_secs(FORGET_CHECK_S);
            self.forget_old(now);
        }
        let due = |link: &Link| link.resync_at.is_some_and(|at| at <= now);
        let resync: Vec<PeerId> =
            self.links.iter().filter(|(_, link)| due(link)).map(|(peer, _)| *peer).collect();
        for peer in resync {
            self.resync(now, peer);
        }
        self.drive(now);
    }

    /// When to call [`Self::handle_timeout`] next, at the latest.
    pub fn poll_timeout(&self) -> Option<Instant> {
        let resync = self.links.values().filter_map(|link| link.resync_at).min();
        let times = [
            Some(self.forget_at),
            self.generations_at,
            self.next_network_time(),
            self.members.next_dial(),
            self.standing.next(),
            resync,
            self.spaces.values().filter_map(Space::next).min(),
            self.next_ticket_time(),
            self.storage.next(),
        ];
        times.into_iter().flatten().min()
    }

    /// Returns the next output. Call it after every other call, until it returns `None`.
    pub fn poll_output(&mut self) -> Option<Output> {
        self.storage.look_anew();
        loop {
            if self.outputs.is_empty() {
                self.flush();
            }
            if self.outputs.is_empty() && self.generation_told != self.state.generation {
                let generation = self.state.generation;
                self.generation_told = generation;
                self.send_all(&Message::Generation { generation });
            }
            let mut output = self.outputs.pop_front()?;
            if let Output::Persist(state) = &mut output {
                if std::mem::take(&mut self.is_behind) {
                    **state = self.state_to_save();
                }
                self.storage.saving(state);
            }
            if let Some(output) = self.sift(output) {
                return Some(output);
            }
        }
    }

    /// Announces a container of this host on a network, or a change of it.
    ///
    /// # Errors
    /// [`MeshError::BadEndpoint`]: names, Ethernet address or addresses that no host would take; a network that this
    /// host does not hold.
    pub fn set_local_endpoint(
        &mut self,
        now: Instant,
        vni: Vni,
        info: EndpointInfo,
    ) -> Result<(), MeshError> {
        if let Some(fault) = info.fault() {
            return Err(MeshError::BadEndpoint(fault));
        }
        let count: usize = self.tables().map(|(_, table)| table.local_count()).sum();
        let Some(table) = self.table_mut(vni) else {
            return Err(MeshError::BadEndpoint("this host does not hold the network"));
        };
        if count >= ENDPOINTS_PER_PEER_MAX && !table.has_local(info.mac) {
            return Err(MeshError::BadEndpoint("this host has the maximum number of endpoints"));
        }
        if let Some(version) = table.set_local(&info) {
            self.tell_endpoint(now, vni, version, vec![info], Vec::new());
        }
        Ok(())
    }

    /// A container of this host is no longer on a network.
    pub fn remove_local_endpoint(&mut self, now: Instant, vni: Vni, mac: Mac) {
        if let Some(version) = self.table_mut(vni).and_then(|table| table.remove_local(mac)) {
            self.tell_endpoint(now, vni, version, Vec::new(), vec![mac]);
        }
    }

    fn tell_endpoint(
        &mut self,
        now: Instant,
        vni: Vni,
        version: u64,
        add: Vec<EndpointInfo>,
        remove: Vec<Mac>,
    ) {
        let message = Message::Endpoints { version, full: false, more: false, add, remove };
        self.send_on(vni, &message);
        self.tell_endpoints();
        self.drive_networks(now);
    }
}

impl Mesh {
    /// Queues an output, behind the state that it may depend on.
    fn emit(&mut self, output: Output) {
        self.flush();
        self.outputs.push_back(output);
    }

    fn flush(&mut self) {
        if self.dirty && self.storage.may_save() {
            self.dirty = false;
            // Many changes at once, as of a thousand clients, are one write: what follows may rely on more than it needs.
            if self.outputs.iter().any(|output| matches!(output, Output::Persist(_))) {
                self.is_behind = true;
                return;
            }
            let state = self.state_to_save();
            self.outputs.push_back(Output::Persist(Box::new(state)));
        }
    }

    fn state_to_save(&mut self) -> State {
        // While it is in doubt which generation this is, it is not a later one.
        let mark = self.state.mark();
        if self.standing.is_sure() && mark != self.mark {
            self.mark = mark;
            self.state.generation += 1;
        }
        self.state.members = self.members.saved();
        self.generations_at = None;
        self.state.clone()
    }

    fn send(&mut self, peer: PeerId, message: Message) {
        self.emit(Output::Send { peer, message });
    }

    fn send_all(&mut self, message: &Message) {
        for peer in self.linked() {
            self.send(peer, message.clone());
        }
    }

    /// Sends a message about a network to all that share it.
    fn send_on(&mut self, vni: Vni, message: &Message) {
        for peer in self.sharers(vni) {
            self.send(peer, message.clone().on(vni));
        }
    }

    /// Forwards a peer's message to the hosts that the peer is not linked with itself.
    fn relay(&mut self, from: PeerId, message: &Message) {
        self.relay_on(Vni::WEFT, from, message);
    }

    /// Forwards a peer's message about a network to those that share it.
    fn relay_on(&mut self, vni: Vni, from: PeerId, message: &Message) {
        let told = self.links.get(&from).map(|link| link.connections.clone()).unwrap_or_default();
        for peer in self.sharers(vni) {
            if peer != from && !told.contains(&peer) {
                self.send(peer, message.clone().on(vni));
            }
        }
    }

    fn linked(&self) -> Vec<PeerId> {
        self.links.keys().copied().collect()
    }

    fn new_ticket(&mut self) -> Ticket {
        self.next_ticket += 1;
        Ticket(self.next_ticket)
    }

    /// A host as a user knows it: its nickname, and enough of its id to tell it from a namesake.
    fn name_of(&self, peer: PeerId) -> String {
        if peer == self.config.local {
            return format!("{} ({peer}, this host)", self.config.nickname);
        }
        match self.members.get(peer) {
            Some(member) => format!("{} ({peer})", member.nickname),
            None => format!("peer {peer}"),
        }
    }

    /// Takes every step that has become possible.
    fn drive(&mut self, now: Instant) {
        self.drive_doubt(now);
        self.drive_founding(now);
        self.tell_networks(now);
        self.drive_ranges(now);
        self.tell_networks(now);
        self.drive_tickets(now);
        self.drive_usages(now);
        self.drive_networks(now);
        self.tell_endpoints();
        for (peer, addresses) in self.members.take_due(now, &mut self.rng) {
            self.emit(Output::Dial { peer, addresses });
        }
    }

    /// This host has become part of a mesh.
    fn on_network(&mut self, now: Instant) {
        let Some(network) = self.state.weft.network else { return };
        self.space(Vni::WEFT).announced.retain_founding(network.id);
        self.namings.clear();
        self.tell_naming();
        for peer in self.linked() {
            self.check_network(now, peer);
        }
        self.send_all(&Message::Network { network });
        for peer in self.linked() {
            self.send_ranges(peer, Vni::WEFT);
        }
    }

    /// Refuses a linked peer that turns out to be in another mesh.
    fn check_network(&mut self, now: Instant, peer: PeerId) {
        let theirs = self.links.get(&peer).and_then(|link| link.network);
        let Some(reason) = theirs.and_then(|theirs| self.refuse_network(peer, theirs, "")) else {
            return;
        };
        self.drop_link(now, peer);
        self.drop_endpoints_of(peer);
        self.emit(Output::Refuse { peer, reason });
    }

    fn refuse_network(&self, peer: PeerId, theirs: Network, nickname: &str) -> Option<Refusal> {
        let host =
            if nickname.is_empty() { self.name_of(peer) } else { format!("{nickname} ({peer})") };
        if let Some(range6) = self.config.range6
            && range6 != theirs.range6
        {
            return Some(Refusal::Range6 { host, theirs: theirs.range6, ours: range6 });
        }
        let ours = self.state.weft.network.filter(|ours| *ours != theirs)?;
        Some(Refusal::FoundedApart { host, theirs: theirs.id, ours: ours.id })
    }

    fn check_hello(&self, peer: PeerId, hello: &Hello) -> Result<(), Refusal> {
        let fit = hello.nickname.len() <= NICKNAME_BYTES_MAX && !hello.nickname.is_empty();
        let nickname = if fit { clip(&hello.nickname) } else { "peer".to_owned() };
        let host = format!("{nickname} ({peer})");
        if peer == self.config.local {
            return Err(Refusal::SameIdentity { host });
        }
        if hello.protocol != PROTOCOL_VERSION {
            let (theirs, ours) = (hello.protocol, PROTOCOL_VERSION);
            return Err(Refusal::Protocol { host, theirs, ours });
        }
        let bad_range6 = |net: Ipv6Net| net.prefix_len() != 64 || net.trunc() != net;
        let networks = hello.network.map(|network| network.range6);
        if !fit || hello.range6.into_iter().chain(networks).any(bad_range6) {
            let what = if fit { "its IPv6 range is not a /64" } else { "its nickname is unfit" };
            return Err(Refusal::BadHello { host, what: what.to_owned() });
        }
        if hello.range != self.config.range {
            let (theirs, ours) = (hello.range, self.config.range);
            return Err(Refusal::Range { host, theirs, ours });
        }
        if let Some(theirs) = hello.network
            && let Some(refusal) = self.refuse_network(peer, theirs, &nickname)
        {
            return Err(refusal);
        }
        let ours = self.state.weft.network.map(|network| network.range6).or(self.config.range6);
        if let (Some(theirs), Some(ours)) = (hello.range6, ours)
            && theirs != ours
        {
            return Err(Refusal::Range6 { host, theirs, ours });
        }
        Ok(())
    }

    /// Tells a peer that has just been linked all that it must know.
    fn greet(&mut self, now: Instant, peer: PeerId) {
        if let Some(network) = self.state.weft.network {
            self.send(peer, Message::Network { network });
        }
        self.send_generations(peer);
        self.send_connections(peer);
        self.send_namings(peer);
        self.send_members(now, peer);
        self.send_ranges(peer, Vni::WEFT);
        if self.state.weft.network.is_some() {
            self.send(peer, Message::Usage { used: self.state.weft.used() });
        }
        self.send_held(peer, Vni::WEFT);
        self.send_networks(peer);
        self.send_endpoints(peer, Vni::WEFT);
        self.send_names(peer);
        self.send_open_grants(peer, Vni::WEFT);
    }

    /// Sends a peer everything again that a host without a link to it any more may have left unsent.
    fn resync(&mut self, now: Instant, peer: PeerId) {
        if let Some(link) = self.links.get_mut(&peer) {
            link.resync_at = None;
        }
        self.send_namings(peer);
        self.send_members(now, peer);
        for vni in self.allocators() {
            if self.shares(peer, vni) {
                self.send_ranges(peer, vni);
            }
        }
    }

    fn resync_later(&mut self, now: Instant, peer: PeerId) {
        if let Some(link) = self.links.get_mut(&peer) {
            let at = now + Duration::from_millis(RESYNC_DELAY_MS);
            link.resync_at.get_or_insert(at);
        }
    }

    /// Forgets a link; whether there was one.
    fn drop_link(&mut self, now: Instant, peer: PeerId) -> bool {
        if self.links.remove(&peer).is_none() {
            return false;
        }
        // On the next link they would come before the greeting.
        let is_lost = |it: &Output| matches!(it, Output::Send { peer: to, .. } if *to == peer);
        self.outputs.retain(|output| !is_lost(output));
        self.storage.look_anew();
        self.storage.retain_held(|output| !is_lost(output));
        let grace = Duration::from_secs(ENDPOINT_GRACE_S);
        self.tables_mut().for_each(|(_, table)| table.set_expiry(peer, Some(now + grace)));
        self.networks_link_down(now, peer);
        self.members.unlinked(now, peer, self.config.discovery, &mut self.rng);
        self.spaces.values_mut().for_each(|space| space.peer_gone(peer));
        self.unask_claims(peer);
        self.pass_barriers(peer);
        self.tell_connection(peer, false);
        true
    }

    fn dispatch(&mut self, now: Instant, peer: PeerId, message: Message) -> Result<(), MeshError> {
        match message {
            Message::Network { network } => self.handle_network(now, peer, network)?,
            Message::Members { members } => self.handle_members(now, peer, &members)?,
            Message::Connections { full, add, remove } => {
                self.handle_connections(now, peer, full, &add, &remove)?;
            }
            Message::On { vni, message } => {
                if vni == Vni::WEFT {
                    let what = "a message about network weft as if about another";
                    return Err(MeshError::Malformed { peer, what });
                }
                self.dispatch_on(now, (peer, vni), *message)?;
            }
            Message::Networks { first, more, networks, heard } => {
                self.handle_networks(peer, (first, more), networks, &heard)?;
            }
            Message::Names { first, more, names } => {
                self.handle_names(peer, (first, more), names)?;
            }
            Message::Known { generation } => self.handle_known(now, peer, generation)?,
            Message::KnownAsked => self.send_known(peer),
            Message::Generation { generation } => self.handle_generation(now, peer, generation)?,
            Message::Naming { naming } => self.handle_naming(peer, &naming)?,
            about_a_network => self.dispatch_on(now, (peer, Vni::WEFT), about_a_network)?,
        }
        Ok(())
    }

    /// A message about one network.
    fn dispatch_on(
        &mut self,
        now: Instant,
        on: (PeerId, Vni),
        message: Message,
    ) -> Result<(), MeshError> {
        let (peer, vni) = on;
        match message {
            // Sent before one of the hosts let go of the network: void.
            message if message.is_on_network() && !self.shares(peer, vni) => drop(message),
            Message::Ranges { announcement } => self.handle_ranges(on, announcement)?,
            Message::Usage { used } => {
                self.link_mut(peer, |link| link.incoming.entry(vni).or_default().used = Some(used));
            }
            Message::RangeRequest { request, within } => {
                self.handle_range_request(now, on, request, within);
            }
            Message::RangeGrant { request, network, ranges } => {
                self.handle_range_grant(now, on, request, network, &ranges)?;
            }
            Message::RangeAccepted { request } => self.handle_range_accepted(on, request),
            Message::RangeRefused { request, reason, ask } => {
                self.handle_range_refused(on, request, &reason, ask);
            }
            Message::Claim { id, address, container } => {
                self.handle_claim(on, id, address, container)?;
            }
            Message::ClaimAnswer { id, address, result } => {
                self.handle_claim_answer(now, on, id, address, result);
            }
            Message::ClaimRelease { address } => self.handle_claim_release(on, address),
            Message::ClaimsHeld { addresses, more } => {
                self.handle_claims_held(on, &addresses, more)?;
            }
            Message::Endpoints { version, full, more, add, remove } => {
                self.handle_endpoints(on, version, (full, more), add, &remove)?;
            }
            Message::EndpointsRequest => self.send_endpoints(peer, vni),
            Message::BarrierRequest { number } => self.handle_barrier_request(on, number),
            Message::BarrierReply { number } => self.handle_barrier_reply(peer, number),
            _ => {
                let what = "a message about a network that is about none";
                return Err(MeshError::Malformed { peer, what });
            }
        }
        Ok(())
    }

    fn link_mut(&mut self, peer: PeerId, change: impl FnOnce(&mut Link)) {
        if let Some(link) = self.links.get_mut(&peer) {
            change(link);
        }
    }

    fn handle_network(
        &mut self,
        now: Instant,
        peer: PeerId,
        network: Network,
    ) -> Result<(), MeshError> {
        if network.range6.prefix_len() != 64 || network.range6.trunc() != network.range6 {
            return Err(MeshError::Malformed { peer, what: "an IPv6 range that is not a /64" });
        }
        self.link_mut(peer, |link| link.network = Some(network));
        self.check_network(now, peer);
        Ok(())
    }

    /// Makes the id of a new mesh or founding.
    fn new_network_with(&mut self, range6: Option<Ipv6Net>) -> Network {
        let mut id = [0; 16];
        self.rng.fill_bytes(&mut id);
        let range6 = range6.unwrap_or_else(|| unique_local(id));
        Network { id: NetworkId(id), range6 }
    }
}

/// The /64 of a mesh: fd, a global id of 40 bits, subnet 0 (RFC 4193 section 3.1).
fn unique_local(id: [u8; 16]) -> Ipv6Net {
    let mut bytes = [0; 16];
    bytes[0] = 0xfd;
    bytes[1..6].copy_from_slice(&id[..5]);
    Ipv6Net::new_assert(bytes.into(), 64)
}
