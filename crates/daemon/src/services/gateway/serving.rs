//! The gateway while it serves: packets of the control channel to sessions, what sessions ask for to the device, the
//! host's routes and the mesh.
//!
//! One task has all state. The public-key work of TLS happens in `handle_datagram` of a session, which a thread gets
//! with its session: as many at a time as the host has cores, one for each session.

mod elsewhere;
mod events;
mod login;
mod routes;
mod streams;

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::{JoinError, JoinSet};
use weft_api::{Listen, LoginSettings, Protocol, VpnClient};
use weft_engine::dco::{DEVICE_PEERS_MAX, Event};
use weft_kernel::{CLIENTS_DEVICE, ClientWays};
use weft_openvpn::device::{DeletionReason, Notification};
use weft_openvpn::gate::{Admission, Gate, Gated};
use weft_openvpn::messages::{AuthFailure, Message};
use weft_openvpn::session::{Acceptance, Dropped, ServerOptions, Session, session_of};

use self::routes::{Routed, Routes, Routing};
use super::client::{Client, Known, Stage, Todo};
use super::device::{DataChannel, KeyChange, NewPeer};
use super::login::Verdict;
use super::named::dns_name;
use super::push::Inside;
use super::sockets::Transport;
use super::streams::{StreamEvent, Streams};
use super::{Gateway, Wanted};
use crate::services::networks::OnNetwork;
use crate::services::supervisor::Pulse;
use crate::timestamp;

pub(super) use self::login::Whom;

/// Sessions at most, those of clients that have not shown who they are included: as many as the device has peers. They
/// take about 250 MiB then.
const CLIENTS_MAX: usize = DEVICE_PEERS_MAX;
/// The highest number of a client, which is its number in data packets.
const NUMBER_MAX: u32 = 0xff_fffe;
/// How often a ping may fail to arrive before the host gives a client up: in the time after which clients connect
/// again, times this.
const TIMEOUTS: u32 = 2;

/// A request of the API.
pub(super) enum Command {
    /// Lists the connected clients.
    List { reply: oneshot::Sender<Vec<VpnClient>> },
    /// Ends sessions with a last word. Replies whether one of them was connected.
    End { whom: Whom, farewell: Message, reply: oneshot::Sender<bool> },
    /// Ends the sessions of a client that another gateway has let in.
    Elsewhere { name: String },
    /// Has a client connect again if it has other addresses than it is to have.
    Readdress { network: String, name: String },
    /// Ends the sessions of all whose certificates are revoked by now.
    Judge,
    /// Ends the sessions of revoked certificates. Replies how many there were.
    EndRevoked { reply: oneshot::Sender<usize> },
    /// Tells what it has to do now.
    Look { reply: oneshot::Sender<Look> },
}

/// What a gateway that serves has to do.
pub(super) struct Look {
    /// Packets dropped, by reason.
    pub(super) drops: BTreeMap<String, u64>,
    /// Clients that are connected.
    pub(super) connected: usize,
    pub(super) sessions: usize,
}

/// What the task waits for.
pub(super) struct Inputs<'a> {
    pub(super) events: mpsc::Receiver<Event>,
    pub(super) commands: mpsc::Receiver<Command>,
    pub(super) wanted: &'a mut watch::Receiver<Option<Wanted>>,
}

/// The parts that are made before the first packet.
pub(super) struct Begun {
    pub(super) channel: Arc<DataChannel>,
    pub(super) streams: Streams,
    pub(super) gate: Gate,
    /// Of sessions over UDP.
    pub(super) options: ServerOptions,
    pub(super) network: OnNetwork,
    /// The host's interface on it.
    pub(super) exposed: String,
    pub(super) inside: Inside,
    /// How clients show who they are.
    pub(super) login: LoginSettings,
    /// Where clients may go beside the network.
    pub(super) ways: ClientWays,
    /// Whether the host passes IPv6 packets on.
    pub(super) has_ipv6: bool,
    pub(super) threads_max: usize,
}

impl Begun {
    /// Where clients come in.
    pub(super) fn listens(&self) -> Vec<Listen> {
        let on =
            |protocol, at: SocketAddr| Listen { protocol, address: Some(at.ip()), port: at.port() };
        let udp = self.channel.listens().into_iter().map(|at| on(Protocol::Udp, at));
        udp.chain(self.streams.listens().iter().map(|at| on(Protocol::Tcp, *at))).collect()
    }
}

/// A session that comes back from a thread, or after the device has done what it asked for.
struct Done {
    number: u32,
    /// `None`: it could not begin.
    session: Option<Box<Session>>,
    then: Then,
}

/// What became of a session meanwhile.
enum Then {
    /// It took a datagram, or began.
    Ran,
    /// The datagram was dropped, for this reason.
    Dropped(&'static str),
    /// Its client is the device's peer: it is to be let in so.
    Joined(Acceptance),
    /// The device does not take its client.
    NotJoined,
    /// The device has its keys.
    Keyed,
    /// The device does not take its keys.
    NotKeyed,
}

impl Then {
    fn dropped(error: Dropped) -> Self {
        tracing::debug!(%error, "dropped a packet of the control channel");
        Self::Dropped("control_packet_refused")
    }
}

/// One input.
enum Input {
    Event(Event),
    Stream(StreamEvent),
    DeviceGone,
    Command(Command),
    Changed,
    Done(Result<Done, JoinError>),
    Judged(Result<(u32, Verdict), JoinError>),
    Given(Result<(u32, Result<Vec<IpAddr>, String>), JoinError>),
    Routed(Routed),
    Timer,
}

/// All state of a gateway that serves.
pub(super) struct Serving {
    gateway: Arc<Gateway>,
    begun: Begun,
    options: Arc<ServerOptions>,
    /// Of sessions over TCP.
    stream_options: Arc<ServerOptions>,
    clients: BTreeMap<u32, Client>,
    /// The clients at a transport and an address: one, and for a moment its next session.
    places: HashMap<(Transport, SocketAddr), Vec<u32>>,
    timers: BTreeSet<(Instant, u32)>,
    /// Clients that wait for a thread.
    ready: VecDeque<u32>,
    jobs: JoinSet<Done>,
    /// Sessions whose device is being asked.
    changes: JoinSet<Done>,
    /// Logins whose password or code is being checked.
    judged: JoinSet<(u32, Verdict)>,
    given: JoinSet<(u32, Result<Vec<IpAddr>, String>)>,
    routing: JoinSet<Routing>,
    routes: Routes,
    /// The clients that have shown who they are, by name.
    names: HashMap<String, Vec<u32>>,
    next: u32,
    drops: BTreeMap<&'static str, u64>,
}

impl Serving {
    pub(super) fn new(gateway: Arc<Gateway>, begun: Begun) -> Self {
        let options = Arc::new(begun.options.clone());
        let mut over_streams = begun.options.clone();
        over_streams.link.is_tcp = true;
        Self {
            gateway,
            begun,
            options,
            stream_options: Arc::new(over_streams),
            clients: BTreeMap::new(),
            places: HashMap::new(),
            timers: BTreeSet::new(),
            ready: VecDeque::new(),
            jobs: JoinSet::new(),
            changes: JoinSet::new(),
            judged: JoinSet::new(),
            given: JoinSet::new(),
            routing: JoinSet::new(),
            routes: Routes::new(Instant::now()),
            names: HashMap::new(),
            next: 0,
            drops: BTreeMap::new(),
        }
    }

    /// Serves until something else is wanted.
    ///
    /// # Errors
    /// The device is gone, or a session failed: in words.
    pub(super) async fn run(
        &mut self,
        mut inputs: Inputs<'_>,
        pulse: &Pulse,
    ) -> Result<(), String> {
        loop {
            self.route();
            match pulse.wait(self.next(&mut inputs)).await {
                Input::Changed => return Ok(()),
                Input::DeviceGone => return Err(device_gone()),
                Input::Event(event) => self.handle_event(event)?,
                Input::Stream(event) => self.handle_stream(event),
                Input::Command(command) => self.handle_command(command),
                Input::Done(done) => self.take_back(done.map_err(|error| failed(&error))?),
                Input::Judged(judged) => {
                    let (number, verdict) = judged.map_err(|error| failed(&error))?;
                    self.handle_verdict(number, verdict);
                }
                Input::Given(given) => {
                    let (number, addresses) = given.map_err(|error| failed(&error))?;
                    self.handle_addresses(number, addresses);
                }
                Input::Routed(routed) => self.handle_routed(routed)?,
                Input::Timer => self.handle_timers(),
            }
        }
    }

    async fn next(&mut self, inputs: &mut Inputs<'_>) -> Input {
        let first = self.timers.first().map(|(at, _)| *at);
        let routes_at = self.routes.next_at();
        let at = first.into_iter().chain([routes_at]).min().unwrap_or(routes_at);
        tokio::select! {
            event = inputs.events.recv() => event.map_or(Input::DeviceGone, Input::Event),
            event = self.begun.streams.next() => Input::Stream(event),
            Some(command) = inputs.commands.recv() => Input::Command(command),
            _ = inputs.wanted.changed() => Input::Changed,
            Some(done) = self.jobs.join_next() => Input::Done(done),
            Some(done) = self.changes.join_next() => Input::Done(done),
            Some(judged) = self.judged.join_next() => Input::Judged(judged),
            Some(given) = self.given.join_next() => Input::Given(given),
            Some(routed) = self.routing.join_next() => Input::Routed(routed),
            () = tokio::time::sleep_until(at.into()) => Input::Timer,
        }
    }

    /// Tells all clients to connect again, as the gateway ends.
    pub(super) fn farewell(&mut self) {
        let text = "the gateway ends".to_owned();
        let restart = Message::Restart { preserve: true, next_remote: true, text };
        let numbers: Vec<u32> = self.clients.keys().copied().collect();
        for number in numbers {
            self.ask(number, Todo::Close(restart.clone()));
        }
    }

    fn handle_event(&mut self, event: Event) -> Result<(), String> {
        match event {
            Event::Packet { source, transport, packet } => {
                let transport = self.begun.channel.transport(transport);
                self.handle_packet(transport, source, packet);
            }
            Event::Notification(Notification::PeerDeleted { peer_id, reason }) => match reason {
                DeletionReason::Userspace => {}
                DeletionReason::Teardown => return Err(device_gone()),
                reason => {
                    let reason = match reason {
                        DeletionReason::TransportDisconnect => "its connection was closed",
                        DeletionReason::TransportError => "its connection is broken",
                        _ => "nothing came from it for too long",
                    };
                    self.told(peer_id, reason);
                    self.forget(peer_id);
                }
            },
            Event::Notification(Notification::KeySwap { peer_id, .. }) => {
                self.ask(peer_id, Todo::Renegotiate);
            }
            Event::Notification(Notification::PeerFloat { peer_id, remote }) => {
                self.handle_moved(peer_id, remote);
            }
        }
        Ok(())
    }

    /// A packet of the control channel.
    fn handle_packet(&mut self, at: Transport, source: SocketAddr, packet: Vec<u8>) {
        let session = session_of(&packet);
        let mut here = self.places.get(&(at, source)).into_iter().flatten().copied();
        let is_its = |client: &Client| Some(client.remote) == session;
        if let Some(number) = here.find(|number| self.clients.get(number).is_some_and(is_its)) {
            return self.ask(number, Todo::Datagram(packet));
        }
        // A connection that the device has serves one session.
        let Transport::Udp(transport) = at else { return self.count("other_session") };
        // Before the door, which opens once for each client.
        if self.clients.len() >= CLIENTS_MAX {
            return self.count("too_many_clients");
        }
        let (now, unix_s) = (Instant::now(), unix_s());
        match self.begun.gate.handle_datagram(now, unix_s, source, &packet) {
            Ok(Gated::Answer(answer)) => self.begun.channel.send(transport, source, &answer),
            Ok(Gated::Admit(admission)) => _ = self.admit(at, source, *admission),
            Err(refusal) => {
                tracing::debug!(%source, %refusal, "dropped a first packet");
                self.count("first_packet_refused");
            }
        }
    }

    /// Opens a session, on a thread: its first packet may have TLS's public-key work.
    fn admit(&mut self, transport: Transport, source: SocketAddr, admission: Admission) -> u32 {
        let number = self.free_number();
        let client = Client::new(admission.remote(), transport, source);
        self.clients.insert(number, client);
        self.places.entry((transport, source)).or_default().push(number);
        let options = match transport {
            Transport::Udp(_) => Arc::clone(&self.options),
            Transport::Tcp => Arc::clone(&self.stream_options),
        };
        let seed: [u8; 32] = rand::random();
        self.jobs.spawn_blocking(move || {
            let (now, unix_s) = (Instant::now(), unix_s());
            let session = Session::admit(now, unix_s, admission, options, source, &seed);
            let session = session.inspect_err(|error| tracing::warn!(%error, "no session"));
            Done { number, session: session.ok().map(Box::new), then: Then::Ran }
        });
        number
    }

    fn free_number(&mut self) -> u32 {
        loop {
            let number = self.next;
            self.next = if number == NUMBER_MAX { 0 } else { number + 1 };
            if !self.clients.contains_key(&number) {
                return number;
            }
        }
    }

    /// Has something done with a client's session, as soon as no thread has it.
    fn ask(&mut self, number: u32, todo: Todo) {
        let Some(client) = self.clients.get_mut(&number) else { return };
        if !client.push(todo) {
            return self.count("queue_full");
        }
        self.work(number);
    }

    /// Does what waits for a client, or gives its session to a thread.
    fn work(&mut self, number: u32) {
        loop {
            let is_free = self.jobs.len() < self.begun.threads_max;
            let Some(client) = self.clients.get_mut(&number) else { return };
            let Some(needs_thread) = client.needs_thread() else { return };
            let Some(mut session) = client.session.take() else { return };
            if needs_thread && !is_free {
                client.session = Some(session);
                if !std::mem::replace(&mut client.is_ready, true) {
                    self.ready.push_back(number);
                }
                return;
            }
            match client.pop() {
                Some(Todo::Datagram(packet)) if needs_thread => {
                    self.took(number);
                    self.jobs.spawn_blocking(move || {
                        let handled = session.handle_datagram(Instant::now(), &packet);
                        let then = handled.map_or_else(Then::dropped, |()| Then::Ran);
                        Done { number, session: Some(session), then }
                    });
                    return;
                }
                Some(Todo::Join(new, acceptance)) => {
                    return self.join(number, session, new, acceptance);
                }
                Some(todo) => self.do_now(number, session, todo),
                None => client.session = Some(session),
            }
        }
    }

    fn do_now(&mut self, number: u32, mut session: Box<Session>, todo: Todo) {
        let now = Instant::now();
        match todo {
            // The device's part.
            Todo::Join(..) => {}
            Todo::Datagram(packet) => {
                self.took(number);
                let handled = session.handle_datagram(now, &packet);
                self.go_on(&mut session, handled.map_or_else(Then::dropped, |()| Then::Ran));
            }
            Todo::Timeout => session.handle_timeout(now),
            Todo::Deny(failure) => {
                // One that is over by now needs no answer.
                let _ = session.deny(now, failure);
            }
            Todo::Renew(token) => login::renew(&mut session, now, number, token),
            Todo::AskCode => login::ask_code(&mut session, now),
            Todo::Close(message) => _ = session.close(now, &message),
            Todo::Moved(address) => session.set_address(address),
            Todo::Renegotiate => {
                if let Err(error) = session.renegotiate(now) {
                    tracing::debug!(%error, "no new key now");
                }
            }
        }
        self.settle(number, session);
    }

    /// Makes a client a peer of the device.
    fn join(
        &mut self,
        number: u32,
        session: Box<Session>,
        new: Box<NewPeer>,
        acceptance: Acceptance,
    ) {
        let channel = Arc::clone(&self.begun.channel);
        self.changes.spawn(async move {
            let then = match channel.new_peer(&new).await {
                Ok(()) => Then::Joined(acceptance),
                Err(error) => {
                    tracing::warn!(%error, "the device does not take a client");
                    Then::NotJoined
                }
            };
            Done { number, session: Some(session), then }
        });
    }

    /// A thread, or the device, is done with a session.
    fn take_back(&mut self, done: Done) {
        let Done { number, session, then } = done;
        let client = self.clients.get(&number);
        match (session, client) {
            (Some(mut session), Some(client)) => {
                // It may have been ended while the device made it a peer.
                if matches!(then, Then::Joined(_)) && !client.is_peer() {
                    self.begun.channel.remove_peer(number);
                }
                self.go_on(&mut session, then);
                self.settle(number, session);
                self.work(number);
            }
            // It was ended meanwhile.
            (Some(_), None) if matches!(then, Then::Joined(_)) => {
                self.begun.channel.remove_peer(number);
            }
            (Some(_), None) => {}
            (None, _) => self.forget(number),
        }
        while self.jobs.len() < self.begun.threads_max
            && let Some(next) = self.ready.pop_front()
        {
            if let Some(client) = self.clients.get_mut(&next) {
                client.is_ready = false;
                self.work(next);
            }
        }
    }

    /// Tells a session what became of what it had asked for.
    fn go_on(&mut self, session: &mut Session, then: Then) {
        let now = Instant::now();
        match then {
            Then::Ran | Then::Keyed => {}
            Then::Dropped(reason) => self.count(reason),
            Then::Joined(acceptance) => {
                if let Err(error) = session.accept(now, acceptance) {
                    tracing::debug!(%error, "a client left before it was let in");
                }
            }
            Then::NotJoined => {
                let text = "The gateway cannot take more clients".to_owned();
                // One that is over by now needs no answer.
                let _ = session.deny(now, AuthFailure::Text(text));
            }
            // A client whose keys the device does not take is told to connect again.
            Then::NotKeyed => {
                let text = "the gateway lost the key".to_owned();
                let restart = Message::Restart { preserve: true, next_remote: false, text };
                session.close(now, &restart);
            }
        }
    }

    /// Carries out what a session asks for, sends what it has to send, and notes when it wants to be called.
    fn settle(&mut self, number: u32, mut session: Box<Session>) {
        let mut changes = Vec::new();
        while let Some(event) = session.poll_event() {
            changes.extend(self.handle_session_event(number, &mut session, event));
        }
        if !changes.is_empty() && self.clients.contains_key(&number) {
            return self.change_keys(number, session, changes);
        }
        self.note_proven(number);
        let now = Instant::now();
        while let Some(transmit) = session.poll_transmit(now) {
            self.transmit(number, transmit.address, &transmit.bytes);
        }
        let Some(client) = self.clients.get_mut(&number) else { return };
        if session.is_drained(now) {
            return self.forget(number);
        }
        let timer = session.poll_timeout(now);
        client.session = Some(session);
        let before = std::mem::replace(&mut client.timer, timer);
        if let Some(before) = before {
            self.timers.remove(&(before, number));
        }
        if let Some(timer) = timer {
            self.timers.insert((timer, number));
        }
    }

    /// Has the device change a client's keys. The session's packets wait for that: with them the other end begins to use
    /// a key.
    fn change_keys(&mut self, number: u32, session: Box<Session>, changes: Vec<KeyChange>) {
        let channel = Arc::clone(&self.begun.channel);
        self.changes.spawn(async move {
            let then = match channel.change_keys(number, &changes).await {
                Ok(()) => Then::Keyed,
                // Its peer has ended meanwhile.
                Err(error) if error.is_gone() => Then::NotKeyed,
                Err(error) => {
                    let from = session.address();
                    tracing::warn!(%error, %from, "the device does not take a client's key");
                    Then::NotKeyed
                }
            };
            Done { number, session: Some(session), then }
        });
    }

    fn handle_timers(&mut self) {
        let now = Instant::now();
        while let Some((at, number)) = self.timers.first().copied().filter(|(at, _)| *at <= now) {
            self.timers.remove(&(at, number));
            if let Some(client) = self.clients.get_mut(&number) {
                client.timer = None;
            }
            self.ask(number, Todo::Timeout);
        }
    }

    /// A client's authentic data comes from another address.
    fn handle_moved(&mut self, number: u32, remote: SocketAddr) {
        let Some(client) = self.clients.get_mut(&number) else { return };
        let (before, transport) = (client.address, client.transport);
        client.address = remote;
        self.leave_place(number, transport, before);
        self.places.entry((transport, remote)).or_default().push(number);
        self.ask(number, Todo::Moved(remote));
    }

    /// Makes a client that the host is set up for a peer of the device, and lets it in.
    fn let_in(&mut self, number: u32) {
        let client = self.clients.get_mut(&number);
        let Some(client) = client.filter(|it| matches!(it.stage, Stage::Routing(_))) else {
            return;
        };
        let Stage::Routing(known) = std::mem::replace(&mut client.stage, Stage::Over) else {
            return;
        };
        let connection = client.connection.map(|it| self.begun.streams.give(it));
        if matches!(connection, Some(None)) {
            // It is let in once its connection is at the end of a frame.
            client.stage = Stage::Routing(known);
            return;
        }
        let Inside { ping_s, ping_restart_s, .. } = self.begun.inside;
        let new = NewPeer {
            id: number,
            transport: client.transport,
            connection: connection.flatten(),
            remote: client.address,
            addresses: known.addresses.clone(),
            ping_s,
            timeout_s: ping_restart_s.saturating_mul(TIMEOUTS),
        };
        let name = known.login.name.clone();
        let inside = &self.begun.inside;
        let mut options = match self.gateway.imported_now() {
            Some(import) => import.pushes(&name, inside, &known.addresses),
            None => inside.options(&known.addresses),
        };
        options.extend(self.gateway.logins.token_option(&self.begun.login, &known.login));
        client.stage = Stage::Peer { known, is_connected: false };
        // One session for each name: the newest.
        if !self.allows_duplicates() {
            self.forget_others(number, &name);
        }
        if self.gateway.imported_now().is_none() {
            self.gateway.peers.let_in(&name);
        }
        let Some(peer) = weft_openvpn::data::PeerNumber::new(number) else { return };
        self.ask(number, Todo::Join(Box::new(new), Acceptance { peer, options }));
    }

    fn forget_others(&mut self, number: u32, name: &str) {
        for other in self.named(name) {
            if other != number && self.clients.get(&other).is_some_and(Client::is_peer) {
                self.told(other, "it has connected again");
                self.forget(other);
            }
        }
    }

    /// The clients of a name.
    fn named(&self, name: &str) -> Vec<u32> {
        self.names.get(name).cloned().unwrap_or_default()
    }

    /// A client is no more the one of a name.
    fn unname(&mut self, number: u32, name: &str) {
        let Some(numbers) = self.names.get_mut(name) else { return };
        numbers.retain(|other| *other != number);
        if numbers.is_empty() {
            self.names.remove(name);
        }
    }

    /// Says that a client is gone.
    fn told(&self, number: u32, reason: &str) {
        let client = self.clients.get(&number).filter(|client| client.is_connected());
        if let Some((client, known)) = client.and_then(|it| Some((it, it.known()?))) {
            let (name, from) = (&known.login.name, client.address);
            tracing::info!(client = name, %from, reason, "an OpenVPN client is gone");
        }
    }

    /// Ends a client's traffic; its session still repeats its last words.
    fn leave(&mut self, number: u32) {
        let Some(client) = self.clients.get_mut(&number) else { return };
        let stage = std::mem::replace(&mut client.stage, Stage::Over);
        if let Stage::Peer { known, .. } = &stage {
            self.begun.channel.remove_peer(number);
            self.gateway.unname(number);
            self.gateway.peers.left(&known.login.name);
            if let Some(connection) = client.connection {
                self.begun.streams.take_back(connection);
            }
        }
        match stage {
            Stage::Asked(known) => self.unname(number, &known.login.name),
            Stage::Routing(known) | Stage::Peer { known, .. } => {
                self.unname(number, &known.login.name);
                self.routes.remove(&known.addresses);
                self.look_if_behind(&known.login.name);
            }
            Stage::Handshake | Stage::Over => {}
        }
    }

    /// Ends all of a client.
    fn forget(&mut self, number: u32) {
        self.leave(number);
        let Some(client) = self.clients.remove(&number) else { return };
        if let Some(timer) = client.timer {
            self.timers.remove(&(timer, number));
        }
        if let Some(connection) = client.connection {
            self.begun.streams.close(connection);
        }
        self.leave_place(number, client.transport, client.address);
    }

    fn leave_place(&mut self, number: u32, transport: Transport, address: SocketAddr) {
        let Some(here) = self.places.get_mut(&(transport, address)) else { return };
        here.retain(|other| *other != number);
        if here.is_empty() {
            self.places.remove(&(transport, address));
        }
    }

    fn count(&mut self, reason: &'static str) {
        *self.drops.entry(reason).or_default() += 1;
    }

    fn handle_command(&mut self, command: Command) {
        match command {
            Command::List { reply } => self.list(reply),
            Command::End { whom, farewell, reply } => {
                let ended = self.end(|known| whom.is(known), &farewell);
                let _ = reply.send(ended.contains(&true));
            }
            Command::EndRevoked { reply } => {
                let gateway = Arc::clone(&self.gateway);
                let is_revoked = |known: &Known| {
                    let certificate = known.certificate.as_ref();
                    certificate.is_some_and(|holder| gateway.is_revoked(holder))
                };
                let ended = self.end(is_revoked, &Message::Halt("certificate revoked".into()));
                let _ = reply.send(ended.len());
            }
            Command::Elsewhere { name } => self.end_elsewhere(&name),
            Command::Readdress { network, name } => self.readdress(network, name),
            Command::Judge => self.end_revoked(),
            Command::Look { reply } => {
                let own = self.drops.iter().map(|(reason, count)| (*reason, *count));
                let all = own.chain(self.begun.channel.drops()).filter(|(_, count)| *count > 0);
                let drops = all.map(|(reason, count)| (reason.to_owned(), count)).collect();
                let connected = self.clients.values().filter(|it| it.is_connected()).count();
                let _ = reply.send(Look { drops, connected, sessions: self.clients.len() });
            }
        }
    }

    /// Ends sessions with a last word. Returns for each whether it was connected.
    fn end(&mut self, is_it: impl Fn(&Known) -> bool, farewell: &Message) -> Vec<bool> {
        let is_its = |client: &Client| client.known().is_some_and(&is_it);
        let its = self.clients.iter().filter(|(_, client)| is_its(client));
        let its: Vec<(u32, bool)> = its.map(|(number, it)| (*number, it.is_connected())).collect();
        for (number, _) in &its {
            self.told(*number, "its certificate was revoked, or its user was removed or changed");
            // At once, also where a thread has the session.
            self.leave(*number);
            self.ask(*number, Todo::Close(farewell.clone()));
        }
        its.into_iter().map(|(_, was_connected)| was_connected).collect()
    }

    /// Lists the connected clients, once the device has told its counters.
    fn list(&self, reply: oneshot::Sender<Vec<VpnClient>>) {
        let connected = self.clients.iter().filter(|(_, client)| client.is_connected());
        let engine = self.begun.channel.engine();
        let line = |(number, client): (&u32, &Client)| {
            let known = client.known()?;
            let shown = VpnClient {
                name: known.login.name.clone(),
                user: known.login.user.clone(),
                dns_name: dns_name(&known.login.name),
                addresses: known.addresses.clone(),
                real_address: client.address,
                protocol: client.transport.protocol(),
                cipher: known.cipher.to_owned(),
                engine: engine.to_owned(),
                bytes_in: 0,
                bytes_out: 0,
                since: timestamp::format(known.since),
                last_handshake: timestamp::format(known.last_handshake),
                version: known.info.version().map(str::to_owned),
                platform: known.info.platform().map(str::to_owned),
            };
            Some((*number, shown))
        };
        let mut shown: BTreeMap<u32, VpnClient> = connected.filter_map(line).collect();
        let channel = Arc::clone(&self.begun.channel);
        tokio::spawn(async move {
            for peer in channel.peers().await {
                if let Some(line) = shown.get_mut(&peer.id) {
                    (line.bytes_in, line.bytes_out) = (peer.vpn.rx_bytes, peer.vpn.tx_bytes);
                }
            }
            let mut list: Vec<VpnClient> = shown.into_values().collect();
            list.sort_by(|one, other| one.name.cmp(&other.name));
            let _ = reply.send(list);
        });
    }
}

fn device_gone() -> String {
    format!("the device {CLIENTS_DEVICE} was removed")
}

fn failed(error: &JoinError) -> String {
    format!("a session failed ({error}); this is a bug in weft")
}

fn unix_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}
