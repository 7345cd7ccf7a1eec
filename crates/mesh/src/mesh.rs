//! The state machine of one host: its inputs, its outputs, and their order.

mod doubt;
mod forgotten;
mod founding;
mod gossip;
mod ranges;
mod status;
mod storage;
mod tickets;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use ipnet::{IpNet, Ipv6Net};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha12Rng;
use serde::{Deserialize, Serialize};
use weft_crypto::PeerId;
use weft_packet::ethernet::Mac;

use self::doubt::Standing;
use self::ranges::RangeAsk;
use self::storage::Storage;
use self::tickets::Pending;
use crate::config::{Config, Founding, Target};
use crate::endpoint::{Conflict, EndpointInfo, EndpointTable};
use crate::error::{AddressError, MeshError, Refusal};
use crate::limits::{
    ENDPOINT_GRACE_S, FORGET_CHECK_S, NICKNAME_BYTES_MAX, PROTOCOL_VERSION, RESYNC_DELAY_MS,
};
use crate::members::{Members, clip};
use crate::message::{Hello, Message, Naming, Network, NetworkId, RangeAnnouncement};
use crate::names::NameRecord;
use crate::range::{AddressRange, RangeSet};
use crate::state::State;

pub use self::status::{Allocation, IpamStatus, OwnerStatus, PeerStatus};

/// Names a request for an address until its answer; never used twice in the life of a [`Mesh`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(pub u64);

/// An action for the caller, which carries outputs out strictly in the order of [`Mesh::poll_output`].
#[derive(Clone, Debug, PartialEq)]
pub enum Output {
    /// Store this in one atomic and durable step, and poll for the next output only afterwards. If that fails,
    /// call [`Mesh::handle_saved`] with the error.
    Persist(Box<State>),
    /// Send a message over the link. May be dropped if the link is down by now.
    Send {
        /// The receiver.
        peer: PeerId,
        /// The message.
        message: Message,
    },
    /// Try once to link with the peer, at any of these addresses. The output repeats, with growing pauses,
    /// until the link is up or the peer is forgotten.
    Dial {
        /// The peer to dial.
        peer: PeerId,
        /// Its candidate addresses.
        addresses: Vec<SocketAddr>,
    },
    /// Endpoints of other hosts changed: first `remove`, then `add`; an added one replaces an older one
    /// with the same Ethernet address.
    Endpoints {
        /// New or changed, with the hosts that they are on.
        add: Vec<(EndpointInfo, PeerId)>,
        /// Gone from this host.
        remove: Vec<(Mac, PeerId)>,
    },
    /// Close the link; show the reason to both ends. The mesh has forgotten the link already.
    Refuse {
        /// With whom.
        peer: PeerId,
        /// The reason.
        reason: Refusal,
    },
    /// The answer to [`Mesh::allocate`] or [`Mesh::claim`]: the addresses, with the length of the prefix.
    Answer {
        /// The request.
        ticket: Ticket,
        /// The addresses belong to the owner until [`Mesh::release`].
        result: Result<Vec<IpNet>, AddressError>,
    },
    /// Something that is worth one line in the log.
    Changed(Change),
}

/// A change that the user may want to know of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "change", rename_all = "snake_case")]
pub enum Change {
    /// This host founded a mesh and owns the whole range.
    Founded {
        /// The mesh.
        network: Network,
    },
    /// This host was granted its first ranges.
    Joined {
        /// The mesh.
        network: Network,
        /// The grantor.
        from: PeerId,
        /// The granted ranges.
        ranges: Vec<AddressRange>,
    },
    /// This host was granted more ranges.
    RangesReceived {
        /// The grantor.
        from: PeerId,
        /// The granted ranges.
        ranges: Vec<AddressRange>,
    },
    /// This host granted ranges.
    RangesGiven {
        /// The receiver.
        to: PeerId,
        /// The granted ranges.
        ranges: Vec<AddressRange>,
    },
    /// A host became known.
    MemberAdded {
        /// The host's peer id.
        peer: PeerId,
        /// Its host name.
        nickname: String,
    },
    /// The host may not act on its saved state, or no longer: it gives nothing.
    StateDoubted {
        /// The reason and the remedy.
        why: String,
    },
    /// The saved state turned out to be the newest, as far as others say.
    StateBelieved,
    /// A host without a sign of life for [`crate::limits::MEMBER_FORGET_S`] was forgotten, or the user asked for it.
    MemberForgotten {
        /// The host's peer id.
        peer: PeerId,
    },
    /// Two hosts announce the same address.
    Conflict(Conflict),
    /// A peer sent something that cannot be true; this host ignored it.
    Ignored {
        /// The sender.
        peer: PeerId,
        /// A description of the contents.
        what: String,
    },
}

/// A link that is up.
#[derive(Debug)]
struct Link {
    network: Option<Network>,
    /// The port on which it accepts links.
    port: u16,
    since: Instant,
    /// Peers that the peer reports links with.
    connections: BTreeSet<PeerId>,
    used: Option<u64>,
    /// Parts of a whole set of endpoints that is still coming.
    new_endpoints: Option<BTreeMap<Mac, EndpointInfo>>,
    /// The peer was asked for its whole set of endpoints.
    endpoints_asked: bool,
    /// Parts of a whole set of names that is still coming.
    new_names: Vec<NameRecord>,
    /// Parts of a list of held claims that is still coming.
    new_claims: BTreeSet<Ipv4Addr>,
    /// When to send the peer everything again, after another host lost its link with it.
    resync_at: Option<Instant>,
}

/// The view that one host has of the mesh. See the crate's documentation.
#[derive(Debug)]
pub struct Mesh {
    config: Config,
    rng: ChaCha12Rng,
    state: State,
    /// The state has changed since the last [`Output::Persist`].
    dirty: bool,
    /// Whether the state may be acted on.
    standing: Standing,
    /// [`State::mark`] at the last change of the generation.
    mark: u64,
    /// The generation that peers were told.
    generation_told: u64,
    outputs: VecDeque<Output>,
    storage: Storage,
    links: BTreeMap<PeerId, Link>,
    members: Members,
    /// Ranges of other hosts, as they or others told.
    announced: BTreeMap<PeerId, (RangeAnnouncement, RangeSet)>,
    endpoints: EndpointTable,
    pending: BTreeMap<Ticket, Pending>,
    next_ticket: u64,
    targets: Vec<Target>,
    /// The hosts named by each other host, until there is a mesh.
    namings: BTreeMap<PeerId, Naming>,
    naming_version: u64,
    range_ask: RangeAsk,
    usage_told: u64,
    usage_at: Option<Instant>,
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
        state.check(&config)?;
        state.set_range(config.range);
        let members = Members::restore(now, &state.members, config.discovery);
        let standing = Standing::at_start(now, config.origin, &state, &members);
        let mut mesh = Self {
            rng: ChaCha12Rng::from_seed(seed),
            dirty: false,
            standing,
            mark: state.mark(),
            generation_told: state.generation,
            outputs: VecDeque::new(),
            storage: Storage::new(state.clone()),
            links: BTreeMap::new(),
            members,
            announced: BTreeMap::new(),
            endpoints: EndpointTable::new(config.local),
            pending: BTreeMap::new(),
            next_ticket: 0,
            targets: Vec::new(),
            namings: BTreeMap::new(),
            naming_version: 0,
            range_ask: RangeAsk::default(),
            usage_told: state.used(),
            usage_at: None,
            forget_at: now + Duration::from_secs(FORGET_CHECK_S),
            state,
            config,
        };
        if mesh.state.network.is_none() {
            mesh.naming_version = mesh.state.count_start() << 16;
            mesh.dirty = true;
            if mesh.config.founding == Founding::Found {
                mesh.found(now);
            }
        }
        if let Some(why) = mesh.unsure() {
            mesh.emit(Output::Changed(Change::StateDoubted { why }));
        }
        Ok(mesh)
    }

    /// The hello that this host sends when a link comes up.
    pub fn hello(&self) -> Hello {
        Hello {
            protocol: PROTOCOL_VERSION,
            features: Vec::new(),
            nickname: self.config.nickname.clone(),
            port: self.config.port,
            addresses: self.config.addresses.clone(),
            range: self.config.range,
            range6: self.config.range6,
            network: self.state.network,
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
        self.is_back(peer);
        self.drop_link(now, peer);
        let link = Link {
            network: hello.network,
            port: hello.port,
            since: now,
            connections: BTreeSet::new(),
            used: None,
            new_endpoints: None,
            endpoints_asked: false,
            new_names: Vec::new(),
            new_claims: BTreeSet::new(),
            resync_at: None,
        };
        self.links.insert(peer, link);
        self.endpoints.set_expiry(peer, None);
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
        self.endpoints.expire(now);
        self.drive_storage(now);
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
            self.endpoints.next_expiry(),
            self.members.next_dial(),
            self.standing.next(),
            resync,
            self.range_ask.next(),
            self.usage_at,
            self.next_ticket_time(),
            self.storage.next(),
        ];
        times.into_iter().flatten().min()
    }

    /// Returns the next output. Call it after every other call, until it returns `None`.
    pub fn poll_output(&mut self) -> Option<Output> {
        loop {
            if self.outputs.is_empty() {
                self.flush();
            }
            if self.outputs.is_empty() && self.generation_told != self.state.generation {
                let generation = self.state.generation;
                self.generation_told = generation;
                self.send_all(&Message::Generation { generation });
            }
            let output = self.outputs.pop_front()?;
            if let Output::Persist(state) = &output {
                self.storage.saving(state);
            }
            if let Some(output) = self.sift(output) {
                return Some(output);
            }
        }
    }

    /// Announces a container of this host, or a change of it.
    ///
    /// # Errors
    /// [`MeshError::BadEndpoint`]: names, Ethernet address or addresses that no host would take.
    pub fn set_local_endpoint(&mut self, info: EndpointInfo) -> Result<(), MeshError> {
        if let Some(fault) = info.fault() {
            return Err(MeshError::BadEndpoint(fault));
        }
        let (version, all) = self.endpoints.local();
        let max = crate::limits::ENDPOINTS_PER_PEER_MAX;
        if all.len() >= max && all.iter().all(|known| known.mac != info.mac) {
            return Err(MeshError::BadEndpoint("this host has the maximum number of endpoints"));
        }
        if let Some(version) = self.endpoints.set_local(&info).filter(|new| *new != version) {
            let (add, remove) = (vec![info], Vec::new());
            self.send_all(&Message::Endpoints { version, full: false, more: false, add, remove });
            self.tell_endpoints();
        }
        Ok(())
    }

    /// A container of this host is gone.
    pub fn remove_local_endpoint(&mut self, mac: Mac) {
        if let Some(version) = self.endpoints.remove_local(mac) {
            let (add, remove) = (Vec::new(), vec![mac]);
            self.send_all(&Message::Endpoints { version, full: false, more: false, add, remove });
            self.tell_endpoints();
        }
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
            // While it is in doubt which generation this is, it is not a later one.
            let mark = self.state.mark();
            if self.standing.is_sure() && mark != self.mark {
                self.mark = mark;
                self.state.generation += 1;
            }
            self.state.members = self.members.saved();
            self.outputs.push_back(Output::Persist(Box::new(self.state.clone())));
        }
    }

    fn send(&mut self, peer: PeerId, message: Message) {
        self.emit(Output::Send { peer, message });
    }

    fn send_all(&mut self, message: &Message) {
        for peer in self.linked() {
            self.send(peer, message.clone());
        }
    }

    /// Forwards a peer's message to the hosts that the peer is not linked with itself.
    fn relay(&mut self, from: PeerId, message: &Message) {
        let told = self.links.get(&from).map(|link| link.connections.clone()).unwrap_or_default();
        for peer in self.linked() {
            if peer != from && !told.contains(&peer) {
                self.send(peer, message.clone());
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

    /// Whether a peer is linked and in this host's mesh.
    fn shares_network(&self, peer: PeerId) -> bool {
        let theirs = self.links.get(&peer).and_then(|link| link.network);
        theirs.is_some() && theirs == self.state.network
    }

    /// Takes every step that has become possible.
    fn drive(&mut self, now: Instant) {
        self.drive_doubt(now);
        self.drive_founding(now);
        self.drive_range_ask(now);
        self.drive_tickets(now);
        self.drive_usage(now);
        self.tell_endpoints();
        for (peer, addresses) in self.members.take_due(now, &mut self.rng) {
            self.emit(Output::Dial { peer, addresses });
        }
    }

    /// This host has become part of a mesh.
    fn on_network(&mut self, now: Instant) {
        let Some(network) = self.state.network else { return };
        self.announced.retain(|_, (announcement, _)| announcement.network == network.id);
        self.namings.clear();
        self.tell_naming();
        for peer in self.linked() {
            self.check_network(now, peer);
        }
        self.send_all(&Message::Network { network });
        for peer in self.linked() {
            self.send_ranges(peer);
        }
    }

    /// Refuses a linked peer that turns out to be in another mesh.
    fn check_network(&mut self, now: Instant, peer: PeerId) {
        let theirs = self.links.get(&peer).and_then(|link| link.network);
        let Some(reason) = theirs.and_then(|theirs| self.refuse_network(peer, theirs, "")) else {
            return;
        };
        self.drop_link(now, peer);
        self.endpoints.drop_peer(peer);
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
        let ours = self.state.network.filter(|ours| *ours != theirs)?;
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
        let ours = self.state.network.map(|network| network.range6).or(self.config.range6);
        if let (Some(theirs), Some(ours)) = (hello.range6, ours)
            && theirs != ours
        {
            return Err(Refusal::Range6 { host, theirs, ours });
        }
        if !self.members.has_room_for(peer) {
            return Err(Refusal::TooManyMembers);
        }
        Ok(())
    }

    /// Tells a peer that has just been linked all that it must know.
    fn greet(&mut self, now: Instant, peer: PeerId) {
        if let Some(network) = self.state.network {
            self.send(peer, Message::Network { network });
        }
        self.send_generations(peer);
        self.send_connections(peer);
        self.send_namings(peer);
        self.send_members(now, peer);
        self.send_ranges(peer);
        if self.state.network.is_some() {
            self.send(peer, Message::Usage { used: self.state.used() });
        }
        self.send_held(peer);
        self.send_endpoints(peer);
        self.send_names(peer);
        self.send_open_grants(peer);
    }

    /// Sends a peer everything again that a host without a link to it any more may have left unsent.
    fn resync(&mut self, now: Instant, peer: PeerId) {
        if let Some(link) = self.links.get_mut(&peer) {
            link.resync_at = None;
        }
        self.send_namings(peer);
        self.send_members(now, peer);
        self.send_ranges(peer);
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
        let grace = Duration::from_secs(ENDPOINT_GRACE_S);
        self.endpoints.set_expiry(peer, Some(now + grace));
        self.members.unlinked(now, peer, self.config.discovery, &mut self.rng);
        self.range_ask.peer_gone(peer);
        self.unask_claims(peer);
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
            Message::Ranges { announcement } => self.handle_ranges(peer, announcement)?,
            Message::Usage { used } => self.link_mut(peer, |link| link.used = Some(used)),
            Message::RangeRequest { request, within } => {
                self.handle_range_request(peer, request, within);
            }
            Message::RangeGrant { request, network, ranges } => {
                self.handle_range_grant(now, peer, request, network, &ranges)?;
            }
            Message::RangeAccepted { request } => {
                self.dirty |= self.state.close_grant(peer, request);
            }
            Message::RangeRefused { request, reason, ask } => {
                self.handle_range_refused(peer, request, &reason, ask);
            }
            Message::Claim { id, address, container } => {
                self.handle_claim(peer, id, address, container)?;
            }
            Message::ClaimAnswer { id, address, result } => {
                self.handle_claim_answer(now, peer, id, address, result);
            }
            Message::ClaimRelease { address } => self.handle_claim_release(peer, address),
            Message::ClaimsHeld { addresses, more } => {
                self.handle_claims_held(peer, &addresses, more)?;
            }
            Message::Endpoints { version, full, more, add, remove } => {
                self.handle_endpoints(peer, version, (full, more), add, &remove)?;
            }
            Message::EndpointsRequest => self.send_endpoints(peer),
            Message::Names { first, more, names } => {
                self.handle_names(peer, (first, more), names)?;
            }
            Message::Known { generation } => self.handle_known(now, peer, generation)?,
            Message::KnownAsked => self.send_known(peer),
            Message::Generation { generation } => self.handle_generation(peer, generation)?,
            Message::Naming { naming } => self.handle_naming(peer, &naming)?,
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

    /// Makes the name of a new mesh.
    fn new_network(&mut self) -> Network {
        let mut id = [0; 16];
        self.rng.fill_bytes(&mut id);
        let range6 = self.config.range6.unwrap_or_else(|| unique_local(id));
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
