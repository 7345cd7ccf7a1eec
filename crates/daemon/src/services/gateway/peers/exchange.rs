//! What a host tells the gateways of its mesh, and hears from them: a state machine without sockets and files.
//!
//! Addresses and sessions are passed on by each host that they are new to. Whose authority a host serves with, and its
//! documents, come over a link with the authority's home alone.

use std::collections::{BTreeMap, VecDeque};
use std::net::IpAddr;

use weft_api::{ApiError, ErrorKind};
use weft_crypto::PeerId;

use super::addresses::{Key, Mapping, Mappings, Merged};
use super::documents::Content;
use super::handover::Handover;
use super::homes::{Fetch, Fetched, Home, Homes, Replica, Taken};
use super::message::{About, Answered, Forwarded, Message, Serves};
use super::sessions::{Clock, Heard, SESSIONS_PER_MESSAGE, Session, Sessions};
use crate::services::gateway::login::TakenCode;

/// Other gateways remembered at most.
const GATEWAYS_MAX: usize = 1_024;
/// Places that one gateway tells.
const REMOTES_MAX: usize = 64;

/// What is to be done.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Output {
    /// A message for a linked host.
    Send { peer: PeerId, message: Message },
    /// A client is let in elsewhere: its session here ends.
    End { name: String },
    /// A client has other addresses from now on: it is to connect again.
    Readdress { key: Key },
    /// This host gives addresses of its range back.
    Release { key: Key, addresses: Vec<IpAddr> },
    /// A document of the authority's home is complete. Answered by [`Exchange::handle_taken`].
    Take(Box<Taken>),
    /// Something that outlives the daemon has changed.
    Save,
    /// Another host has taken these one-time codes.
    Codes(Vec<TakenCode>),
    /// The authority's home gives the authority to this host. Answered by [`Exchange::answer`].
    Handed { peer: PeerId, id: u64, content: Content },
    /// A replica asks the home, which is this host.
    Requested { peer: PeerId, id: u64, request: Forwarded },
    /// The home has answered.
    Answered { id: u64, answer: Answered },
}

/// Another gateway, linked or not.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct OtherGateway {
    pub(crate) peer: PeerId,
    pub(crate) nickname: String,
    pub(crate) serves: Serves,
    #[serde(skip)]
    pub(crate) is_linked: bool,
}

struct Linked {
    nickname: String,
    about: Option<About>,
}

/// The state of one host.
pub(super) struct Exchange {
    local: PeerId,
    clock: Clock,
    linked: BTreeMap<PeerId, Linked>,
    gateways: BTreeMap<PeerId, OtherGateway>,
    own: About,
    homes: Homes,
    handover: Handover,
    mappings: Mappings,
    sessions: Sessions,
    outputs: VecDeque<Output>,
}

impl Exchange {
    /// The state of an earlier run. `documents` are the names of what serving needs, in the order of their use.
    pub(super) fn new(
        local: PeerId,
        documents: &'static [&'static str],
        replica: Option<Replica>,
        (mappings, gateways): (Vec<Mapping>, Vec<OtherGateway>),
    ) -> Self {
        Self {
            local,
            clock: Clock::default(),
            linked: BTreeMap::new(),
            gateways: gateways.into_iter().map(|it| (it.peer, it)).collect(),
            own: About::default(),
            homes: Homes::new(documents, replica),
            handover: Handover::default(),
            mappings: Mappings::restore(mappings),
            sessions: Sessions::default(),
            outputs: VecDeque::new(),
        }
    }

    pub(super) fn poll_output(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    /// A link is up, maybe in the place of another.
    pub(super) fn handle_link_up(&mut self, peer: PeerId, nickname: String) {
        if let Some(gateway) = self.gateways.get_mut(&peer) {
            gateway.is_linked = true;
        }
        self.linked.insert(peer, Linked { nickname, about: None });
        self.homes.handle_link_down(peer);
        self.greet(peer);
    }

    pub(super) fn handle_link_down(&mut self, peer: PeerId, unix_s: u64) {
        if let Some(home) = self.homes.choose(&self.other_homes()).ok().flatten()
            && home.peer == peer
            && self.homes.handle_home_gone(&home.clone(), unix_s)
        {
            self.outputs.push_back(Output::Save);
        }
        self.linked.remove(&peer);
        if let Some(gateway) = self.gateways.get_mut(&peer) {
            gateway.is_linked = false;
        }
        self.homes.handle_link_down(peer);
        self.handover.handle_link_down(peer);
        self.follow_home();
    }

    /// Messages of a peer were dropped: it is to tell all again.
    pub(super) fn handle_lost(&mut self, peer: PeerId) {
        self.homes.handle_link_down(peer);
        self.send(peer, Message::Again);
    }

    pub(super) fn handle_message(&mut self, peer: PeerId, message: Message) {
        if !self.linked.contains_key(&peer) {
            return;
        }
        match message {
            Message::About(about) => self.handle_about(peer, about),
            Message::Again => self.greet(peer),
            Message::Want { document, version, offset } => {
                // A version that is gone: what the sender heard of it is on its way.
                if let Some(part) = self.homes.part(&document, &version, offset) {
                    self.send(peer, part);
                }
            }
            Message::Part { document, version, offset, total, text } => {
                let fetch = Fetch { home: peer, document, version };
                let Some(home) = self.home_at(peer) else { return };
                match self.homes.handle_part((&home, &fetch), (offset, total), &text.0) {
                    Some(Fetched::Whole(taken)) => {
                        self.outputs.push_back(Output::Take(Box::new(taken)));
                    }
                    Some(Fetched::Part(want)) => self.send(peer, want),
                    None => {}
                }
            }
            Message::Addresses { mappings, more } => self.handle_addresses(peer, mappings, more),
            Message::More { after } => self.send_addresses(peer, Some(&after)),
            Message::Sessions { sessions } => self.handle_sessions(peer, sessions),
            Message::Codes { codes } => self.outputs.push_back(Output::Codes(codes)),
            Message::Hand { id, version, total, fingerprint } => {
                self.handle_hand((peer, id), (version, total), &fingerprint);
            }
            Message::WantHanded { id, offset } => {
                if let Some(part) = self.handover.part(peer, id, offset) {
                    self.send(peer, part);
                }
            }
            Message::HandedPart { id, offset, text } => {
                match self.handover.handle_part((peer, id), offset, &text.0) {
                    Some(Fetched::Whole(content)) => {
                        self.outputs.push_back(Output::Handed { peer, id, content });
                    }
                    Some(Fetched::Part(want)) => self.send(peer, want),
                    None => {}
                }
            }
            Message::Request { id, request } => match self.own.home {
                Some(_) => self.outputs.push_back(Output::Requested { peer, id, request }),
                None => {
                    let text = "this host is no longer the authority's home";
                    let answer = Answered::Refused(ApiError::new(ErrorKind::Conflict, text));
                    self.send(peer, Message::Answer { id, answer });
                }
            },
            Message::Answer { id, answer } => {
                self.handover.end_giving();
                self.outputs.push_back(Output::Answered { id, answer });
            }
        }
    }

    /// This host is the home of an authority, or no longer; these are its documents.
    pub(super) fn set_home(&mut self, home: Option<super::documents::Documents>) {
        self.own.home = self.homes.set_own(home);
        self.tell_about();
        self.follow_home();
    }

    /// This host is to serve clients, or no longer.
    pub(super) fn set_serves(&mut self, serves: Option<Serves>) {
        if self.own.serves != serves {
            self.own.serves = serves;
            self.tell_about();
        }
    }

    /// This host serves no clients now, and will again.
    pub(super) fn set_not_serving(&mut self) {
        let serves = self.own.serves.clone();
        self.set_serves(serves.map(|serves| Serves { is_serving: false, ..serves }));
    }

    /// This host needs an authority or a configuration: it takes the one that it hears of. Of several it takes the one
    /// whose home serves on this network.
    pub(super) fn want_authority(&mut self, network: Option<String>) {
        self.homes.want(network);
        self.follow_home();
    }

    /// A document was taken, or could not be.
    pub(super) fn handle_taken(&mut self, taken: &Taken, is_taken: bool, unix_s: u64) {
        self.homes.handle_taken(taken, is_taken, unix_s);
        if is_taken {
            self.outputs.push_back(Output::Save);
            self.follow_home();
        }
    }

    /// Tries again after a document could not be taken.
    pub(super) fn handle_retry(&mut self) {
        self.follow_home();
    }

    /// How often each name was revoked, by the newest list.
    pub(super) fn set_revocations(&mut self, epochs: BTreeMap<String, u32>) {
        for void in self.mappings.set_epochs(epochs) {
            self.outputs.push_back(Output::Save);
            self.drop_mapping(void);
        }
    }

    /// The addresses of a client, and the host that gave them.
    pub(super) fn addresses(&self, key: &Key) -> Option<(PeerId, Vec<IpAddr>)> {
        self.mappings.get(key).map(|mapping| (mapping.by, mapping.addresses.clone()))
    }

    /// This host has got addresses for a client from the mesh, when it knew of these addresses. False: it knows others
    /// meanwhile.
    pub(super) fn give(
        &mut self,
        key: Key,
        addresses: Vec<IpAddr>,
        before: Option<&(PeerId, Vec<IpAddr>)>,
        unix_ms: u64,
    ) -> bool {
        if self.addresses(&key).as_ref() != before {
            return false;
        }
        let now = self.clock.tick(unix_ms);
        if let Some(new) = self.mappings.give(key, addresses, (self.local, now)) {
            self.outputs.push_back(Output::Save);
            self.send_all(&Message::Addresses { mappings: vec![new], more: false }, None);
        }
        true
    }

    /// This gateway lets a client in.
    pub(super) fn let_in(&mut self, name: String, unix_ms: u64) {
        let session = Session { name, gateway: self.local, at: self.clock.tick(unix_ms) };
        self.sessions.let_in(session.clone());
        self.send_all(&Message::Sessions { sessions: vec![session] }, None);
    }

    /// Whether the newest session of a name is this gateway's.
    pub(super) fn is_here(&self, name: &str) -> bool {
        self.sessions.is_own(name, self.local)
    }

    /// A session of this gateway is over.
    pub(super) fn left(&mut self, name: &str) {
        self.sessions.end(name, self.local);
    }

    /// This host has taken these one-time codes.
    pub(super) fn tell_codes(&mut self, codes: Vec<TakenCode>) {
        self.send_all(&Message::Codes { codes }, None);
    }

    /// Asks the home of the authority that this host serves with. False: it is not linked.
    pub(super) fn ask_home(&mut self, id: u64, request: Forwarded) -> bool {
        let Some(home) = self.home() else { return false };
        self.send(home, Message::Request { id, request });
        true
    }

    /// Gives the authority to a peer, which is its home from now on. False: it is not linked.
    pub(super) fn hand(&mut self, peer: PeerId, id: u64, content: Content) -> bool {
        if !self.linked.contains_key(&peer) {
            return false;
        }
        // The old home follows the new one already.
        let replica = self.homes.replica();
        let fingerprint = replica.map(|it| it.fingerprint.clone()).unwrap_or_default();
        let message = self.handover.give((peer, id), fingerprint, content);
        self.send(peer, message);
        true
    }

    /// This host follows another home from now on.
    pub(super) fn follow(&mut self, replica: Replica) {
        self.homes.set_replica(replica);
        self.outputs.push_back(Output::Save);
        self.follow_home();
    }

    /// This host has neither an authority nor a configuration.
    pub(super) fn forget_home(&mut self) {
        self.homes.forget_home();
    }

    /// The fingerprint of what this host serves by.
    pub(super) fn fingerprint(&self) -> Option<&str> {
        let own = self.own.home.as_ref().map(|home| home.fingerprint.as_str());
        own.or_else(|| Some(self.homes.replica()?.fingerprint.as_str()))
    }

    /// A linked host that tells that it is the home of this authority.
    pub(super) fn home_of(&self, fingerprint: &str) -> Option<String> {
        let mut homes = self.other_homes().into_iter();
        homes.find(|home| home.fingerprint == fingerprint).map(|home| home.nickname)
    }

    /// Answers a request of a peer.
    pub(super) fn answer(&mut self, peer: PeerId, id: u64, answer: Answered) {
        self.send(peer, Message::Answer { id, answer });
    }

    /// The other gateways that are known.
    pub(super) fn gateways(&self) -> impl Iterator<Item = &OtherGateway> {
        self.gateways.values()
    }

    pub(super) fn mappings(&self) -> impl Iterator<Item = &Mapping> {
        self.mappings.all()
    }

    pub(super) const fn replica(&self) -> Option<&Replica> {
        self.homes.replica()
    }

    /// The home of the authority that this host serves with, while it is linked.
    pub(super) fn home(&self) -> Option<PeerId> {
        self.homes.choose(&self.other_homes()).ok().flatten().map(|home| home.peer)
    }

    /// Whether all linked hosts have told about themselves.
    pub(super) fn is_told(&self) -> bool {
        self.linked.values().all(|linked| linked.about.is_some())
    }

    /// Homes of other authorities than this host's, in words.
    pub(super) fn conflicts(&self) -> Vec<String> {
        self.homes.conflicts(&self.other_homes())
    }
}

impl Exchange {
    /// Tells a peer all.
    fn greet(&mut self, peer: PeerId) {
        self.send(peer, Message::About(self.own.clone()));
        self.send_addresses(peer, None);
        let all = self.sessions.all();
        for some in all.chunks(SESSIONS_PER_MESSAGE) {
            self.send(peer, Message::Sessions { sessions: some.to_vec() });
        }
    }

    fn tell_about(&mut self) {
        self.send_all(&Message::About(self.own.clone()), None);
    }

    fn send_addresses(&mut self, peer: PeerId, after: Option<&Key>) {
        let (mappings, more) = self.mappings.page(after);
        if !mappings.is_empty() {
            self.send(peer, Message::Addresses { mappings, more });
        }
    }

    fn handle_about(&mut self, peer: PeerId, mut about: About) {
        let Some(linked) = self.linked.get_mut(&peer) else { return };
        if let Some(serves) = &mut about.serves {
            serves.remotes.truncate(REMOTES_MAX);
        }
        linked.about = Some(about.clone());
        let nickname = linked.nickname.clone();
        let before = self.gateways.get(&peer).cloned();
        let is_place = before.is_some() || self.gateways.len() < GATEWAYS_MAX;
        let after = about.serves.filter(|_| is_place).map(|serves| OtherGateway {
            peer,
            nickname,
            serves,
            is_linked: true,
        });
        if before != after {
            match after {
                Some(gateway) => _ = self.gateways.insert(peer, gateway),
                None => _ = self.gateways.remove(&peer),
            }
            self.outputs.push_back(Output::Save);
        }
        self.follow_home();
    }

    /// The home gives the authority to this host.
    fn handle_hand(
        &mut self,
        (peer, id): (PeerId, u64),
        (version, total): (String, usize),
        fingerprint: &str,
    ) {
        let answer = match (&self.own.home, self.homes.replica()) {
            // It has it already, and that was not heard.
            (Some(own), _) if own.fingerprint == fingerprint => {
                Answered::Done(serde_json::Value::Null)
            }
            (Some(_), _) => refused("it has an authority or a configuration of its own"),
            (None, Some(replica)) if replica.home == peer => {
                match self.handover.take((peer, id), version, total) {
                    Some(want) => return self.send(peer, want),
                    None => refused("the authority is too long"),
                }
            }
            _ => refused("it does not serve by this authority: run weft openvpn serve there first"),
        };
        self.send(peer, Message::Answer { id, answer });
    }

    fn home_at(&self, peer: PeerId) -> Option<Home> {
        self.other_homes().into_iter().find(|home| home.peer == peer)
    }

    fn other_homes(&self) -> Vec<Home> {
        let home = |(peer, linked): (&PeerId, &Linked)| {
            let home = linked.about.as_ref()?.home.as_ref()?;
            let nickname = linked.nickname.clone();
            let (fingerprint, versions) = (home.fingerprint.clone(), home.documents.clone());
            let network = linked.about.as_ref()?.serves.as_ref().map(|it| it.network.clone());
            Some(Home { peer: *peer, nickname, fingerprint, versions, network })
        };
        self.linked.iter().filter_map(home).collect()
    }

    /// Asks the home for what this host does not have yet.
    fn follow_home(&mut self) {
        let homes = self.other_homes();
        if let Some((peer, want)) = self.homes.follow(&homes) {
            self.send(peer, want);
        }
    }

    fn handle_addresses(&mut self, peer: PeerId, mappings: Vec<Mapping>, more: bool) {
        let last = mappings.last().map(Mapping::key);
        let mut passed_on = Vec::new();
        for mapping in mappings {
            if let Merged::New(before) = self.mappings.merge(mapping.clone()) {
                if let Some(before) = before.filter(|it| it.addresses != mapping.addresses) {
                    self.drop_mapping(before);
                }
                passed_on.push(mapping);
            }
        }
        if !passed_on.is_empty() {
            self.outputs.push_back(Output::Save);
            let message = Message::Addresses { mappings: passed_on, more: false };
            self.send_all(&message, Some(peer));
        }
        if let Some(after) = last.filter(|_| more) {
            self.send(peer, Message::More { after });
        }
    }

    /// A mapping holds no longer.
    fn drop_mapping(&mut self, mapping: Mapping) {
        let key = mapping.key();
        if mapping.by == self.local {
            let addresses = mapping.addresses;
            self.outputs.push_back(Output::Release { key: key.clone(), addresses });
        }
        self.outputs.push_back(Output::Readdress { key });
    }

    fn handle_sessions(&mut self, peer: PeerId, sessions: Vec<Session>) {
        let mut passed_on = Vec::new();
        for session in sessions {
            self.clock.hear(session.at);
            if let Heard::New { ends } = self.sessions.hear(session.clone(), self.local) {
                if ends {
                    self.outputs.push_back(Output::End { name: session.name.clone() });
                }
                passed_on.push(session);
            }
        }
        if !passed_on.is_empty() {
            self.send_all(&Message::Sessions { sessions: passed_on }, Some(peer));
        }
    }

    fn send(&mut self, peer: PeerId, message: Message) {
        self.outputs.push_back(Output::Send { peer, message });
    }

    fn send_all(&mut self, message: &Message, except: Option<PeerId>) {
        let peers = self.linked.keys().filter(|peer| Some(**peer) != except);
        let sends = peers.map(|peer| Output::Send { peer: *peer, message: message.clone() });
        self.outputs.extend(sends);
    }
}

fn refused(text: &str) -> Answered {
    Answered::Refused(ApiError::new(ErrorKind::Conflict, text))
}
