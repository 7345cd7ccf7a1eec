//! The gateway while it serves: packets of the control channel to sessions, what sessions ask for to the device, the
//! host's routes and the mesh.
//!
//! One task has all state. The public-key work of TLS happens in `handle_datagram` of a session, which a thread gets
//! with its session: as many at a time as the host has cores, one for each session.

mod admission;
mod commands;
mod elsewhere;
mod ends;
mod events;
mod login;
mod roster;
mod routes;
mod sessions;
mod streams;

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use tokio::sync::{mpsc, watch};
use tokio::task::{JoinError, JoinSet};
use weft_api::{Listen, LoginSettings, Protocol};
use weft_engine::dco::{DEVICE_PEERS_MAX, Event};
use weft_kernel::{CLIENTS_DEVICE, ClientWays};
use weft_openvpn::device::{DeletionReason, Notification};
use weft_openvpn::gate::Gate;
use weft_openvpn::messages::Message;
use weft_openvpn::session::{Acceptance, ServerOptions};

use self::routes::{Routed, Routes, Routing};
use self::sessions::Done;
use super::client::{Client, Stage, Todo};
use super::device::{DataChannel, NewPeer};
use super::login::{Logins, Oidc, Verdict};
use super::push::Inside;
use super::sockets::Transport;
use super::streams::{StreamEvent, Streams};
use super::{Gateway, Wanted};
use crate::services::networks::OnNetwork;
use crate::services::supervisor::Pulse;

pub(super) use self::commands::Command;
pub(super) use self::login::Whom;

/// Sessions at most, those of clients that have not shown who they are included: as many as the device has peers. They
/// take about 270 MiB then.
const CLIENTS_MAX: usize = DEVICE_PEERS_MAX;
/// How often a ping may fail to arrive before the host gives a client up: in the time after which clients connect
/// again, times this.
const TIMEOUTS: u32 = 2;

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
    /// Where users log in by a web page.
    pub(super) oidc: Option<Oidc>,
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
    /// When clients get their next tokens.
    token_timers: BTreeSet<(Instant, u32)>,
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
    /// The clients that have shown who they are, by name, the newest last.
    names: HashMap<String, Vec<u32>>,
    next: u32,
    /// Addresses of clients that are announced to the network in a moment.
    unannounced: Arc<Mutex<Vec<IpAddr>>>,
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
            token_timers: BTreeSet::new(),
            ready: VecDeque::new(),
            jobs: JoinSet::new(),
            changes: JoinSet::new(),
            judged: JoinSet::new(),
            given: JoinSet::new(),
            routing: JoinSet::new(),
            routes: Routes::new(Instant::now()),
            names: HashMap::new(),
            next: 0,
            unannounced: Arc::default(),
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
                Input::Timer => {
                    self.handle_timers();
                    self.handle_token_timers();
                }
            }
        }
    }

    async fn next(&mut self, inputs: &mut Inputs<'_>) -> Input {
        let firsts = [&self.timers, &self.token_timers].into_iter().filter_map(BTreeSet::first);
        let at = firsts.map(|(at, _)| *at).chain(self.routes_at()).min();
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
            () = sleep_until(at) => Input::Timer,
        }
    }

    /// Tells all clients to connect again, as the gateway ends. Waits a moment until connections have taken that.
    pub(super) async fn farewell(&mut self) {
        let text = "the gateway ends".to_owned();
        let restart = Message::Restart { preserve: true, next_remote: true, text };
        let numbers: Vec<u32> = self.clients.keys().copied().collect();
        for number in numbers {
            self.ask(number, Todo::Close(restart.clone()));
        }
        self.begun.streams.finish().await;
    }

    fn handle_event(&mut self, event: Event) -> Result<(), String> {
        match event {
            Event::Packet { source, local, transport, packet } => {
                let transport = self.begun.channel.transport(transport);
                self.handle_packet(transport, (source, local), packet);
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
            local: client.local,
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
        options.extend(Logins::user_option(&self.begun.login, &known.login));
        options.extend(self.gateway.logins.token_option(&self.begun.login, &known.login));
        client.stage = Stage::Peer { known, is_connected: false };
        self.plan_token(number);
        // One session for each name: the newest.
        if !self.allows_duplicates() {
            self.forget_others(number, &name);
            self.gateway.peers.let_in(&self.session_of(&name));
        }
        let Some(peer) = weft_openvpn::data::PeerNumber::new(number) else { return };
        self.ask(number, Todo::Join(Box::new(new), Acceptance { peer, options }));
    }

    fn count(&mut self, reason: &'static str) {
        *self.drops.entry(reason).or_default() += 1;
    }
}

/// Waits until then; `None`: for ever.
async fn sleep_until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at.into()).await,
        None => std::future::pending().await,
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
