//! The task of the service: one loop over queries, answers of upstream servers, and changes.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use hickory_proto::op::ResponseCode;
use hickory_proto::rr::Name;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::{AbortHandle, JoinSet};

use super::Names;
use super::answer::{Asked, Carrier, Forward, Reply, answer, new_marker};
use super::cache::{Cache, Key};
use super::counters::Counter;
use super::exchange::Exchange;
use super::sockets::{Back, Heard, Incoming, Intake, Listener, ask, bind, listen};
use super::throttle::{Rate, Throttle};
use super::upstream::{RESOLV_CONF, ResolvConf, usable};
use super::waiting::{Waiter, Waiting};
use super::zone::{Feed, NetworkInfo, Zone};
use crate::core::control::{NamesSnapshot, NetworkNames, Request, sleep_until};
use crate::services::supervisor::Pulse;

/// Queries that wait for the service.
const QUEUE_MAX: usize = 1_024;
/// Queries for names that a host may tell of soon after the start.
const HELD_MAX: usize = 1_024;
/// Queries of one client.
const RATE: Rate = Rate { per_s: 5_000, burst: 10_000 };
/// Questions of one client that go upstream.
const UPSTREAM_RATE: Rate = Rate { per_s: 200, burst: 400 };
/// The shortest time between two looks at the names of the mesh, in milliseconds.
const FEED_PAUSE_MS: u64 = 100;
/// The longest such time, in milliseconds, where a look takes long.
const FEED_PAUSE_MAX_MS: u64 = 5_000;
/// The pause after a look, as a multiple of the time that it took: it takes the core's time, too.
const FEED_PAUSE_FACTOR: u32 = 10;
/// The time that the core has to tell the names, in milliseconds.
const FEED_LIMIT_MS: u64 = 5_000;
/// The interval between looks at resolv.conf, in milliseconds.
const RESOLV_CONF_LOOK_MS: u64 = 5_000;
/// How long the server that answered is asked first, in milliseconds, where one before it has failed.
const PREFERENCE_MS: u64 = 60_000;
/// Pause before an address that cannot be bound is tried again, in milliseconds.
const BIND_RETRY_MS: u64 = 1_000;

/// Runs the service until the daemon ends.
pub(crate) async fn serve(names: Arc<Names>, control: mpsc::Sender<Request>, pulse: Pulse) {
    let mut server = Server::new(names, control);
    server.announce_own().await;
    loop {
        let event = pulse.wait(server.next()).await;
        server.handle(event).await;
    }
}

enum Event {
    Query(Incoming),
    Ended(Ended),
    NamesChanged,
    ListenersChanged,
    Time,
}

/// A task that has ended.
enum Ended {
    Listener(SocketAddr, io::Error),
    Exchange(Key, Option<Heard>),
    Built(Option<Built>),
}

/// A new zone.
struct Built {
    feed: Arc<Feed>,
    zone: Arc<Zone>,
    /// Whether the mesh had told all names.
    is_complete: bool,
    took: Duration,
}

struct Server {
    names: Arc<Names>,
    control: mpsc::Sender<Request>,
    zone: Arc<Zone>,
    changed: watch::Receiver<u64>,
    listeners: watch::Receiver<Vec<Listener>>,
    queries: mpsc::Receiver<Incoming>,
    intake: Intake,
    /// Listeners that receive, by their addresses.
    open: BTreeMap<SocketAddr, (watch::Sender<Arc<Listener>>, AbortHandle)>,
    tasks: JoinSet<Ended>,
    cache: Cache,
    waiting: Waiting,
    /// Queries that wait until the zone is settled; nobody asks for that then.
    held: Vec<Incoming>,
    is_settled: bool,
    upstream_throttle: Throttle,
    rng: StdRng,
    marker: [u8; 8],
    upstreams: Vec<SocketAddr>,
    /// The server to ask first, and until when.
    preferred: Option<(SocketAddr, Instant)>,
    resolv_conf: ResolvConf,
    /// The input of the choice of servers: the configured ones, and this daemon's addresses.
    chosen_from: Option<(Vec<SocketAddr>, BTreeSet<SocketAddr>)>,
    /// A new zone is under way.
    building: bool,
    /// They have changed since.
    is_stale: bool,
    feed_at: Instant,
    look_at: Instant,
    bind_at: Option<Instant>,
    /// The last feed, to build from again when a host has been gone for long enough; `None` where none is gone.
    feed: Option<Arc<Feed>>,
}

impl Server {
    fn new(names: Arc<Names>, control: mpsc::Sender<Request>) -> Self {
        let now = Instant::now();
        let (sender, queries) = mpsc::channel(QUEUE_MAX);
        let throttle = Arc::new(Mutex::new(Throttle::new(now, RATE)));
        let (counters, zone) = (names.counters.clone(), names.zone.subscribe());
        let intake = Intake { queue: sender, throttle, counters, zone };
        let mut rng = StdRng::from_seed(rand::random());
        let marker = new_marker(&mut rng);
        let mut listeners = names.listeners.subscribe();
        listeners.mark_changed();
        Self {
            zone: names.zone_now(),
            changed: names.changed.subscribe(),
            listeners,
            queries,
            intake,
            open: BTreeMap::new(),
            tasks: JoinSet::new(),
            cache: Cache::default(),
            waiting: Waiting::default(),
            held: Vec::new(),
            is_settled: false,
            upstream_throttle: Throttle::new(now, UPSTREAM_RATE),
            rng,
            marker,
            upstreams: Vec::new(),
            preferred: None,
            resolv_conf: ResolvConf::default(),
            chosen_from: None,
            building: false,
            is_stale: true,
            feed_at: now,
            look_at: now,
            bind_at: None,
            feed: None,
            names,
            control,
        }
    }

    /// Tells the core of this host's names, which it forgot if the daemon was restarted.
    async fn announce_own(&self) {
        let (names, control) = (Arc::clone(&self.names), self.control.clone());
        let _ = tokio::task::spawn_blocking(move || names.announce_again(&control)).await;
    }

    async fn next(&mut self) -> Event {
        let feed_at = self.is_stale.then_some(self.feed_at);
        let expiry = self.feed.as_ref().and(self.zone.next_expiry());
        let built = [feed_at, expiry].into_iter().flatten().min();
        let built = built.filter(|_| !self.building);
        let settled = (!self.is_settled).then_some(self.names.settles_by);
        let times = [built, settled, Some(self.look_at), self.bind_at];
        let next = times.into_iter().flatten().min();
        tokio::select! {
            Some(incoming) = self.queries.recv() => Event::Query(incoming),
            Some(ended) = self.tasks.join_next() => match ended {
                Ok(ended) => Event::Ended(ended),
                Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
                Err(_) => Event::Time,
            },
            Ok(()) = self.changed.changed() => Event::NamesChanged,
            Ok(()) = self.listeners.changed() => Event::ListenersChanged,
            () = sleep_until(next) => Event::Time,
        }
    }

    async fn handle(&mut self, event: Event) {
        match event {
            Event::Query(incoming) => self.handle_query(incoming),
            Event::Ended(Ended::Exchange(key, said)) => self.handle_said(key, said),
            Event::Ended(Ended::Built(built)) => self.handle_built(built),
            Event::Ended(Ended::Listener(address, error)) => {
                self.open.remove(&address);
                self.tell_served();
                tracing::warn!(%address, %error, "DNS is not answered for a moment");
                self.bind_at = Some(Instant::now() + Duration::from_millis(BIND_RETRY_MS));
            }
            Event::NamesChanged => self.is_stale = true,
            Event::ListenersChanged => self.open_listeners().await,
            Event::Time => self.handle_time().await,
        }
    }

    async fn handle_time(&mut self) {
        let now = Instant::now();
        if self.is_stale && !self.building && self.feed_at <= now {
            (self.is_stale, self.building) = (false, true);
            self.tasks.spawn(look(Arc::clone(&self.names), self.control.clone()));
        } else if !self.building
            && self.zone.next_expiry().is_some_and(|at| at <= now)
            && let Some(feed) = self.feed.clone()
        {
            self.building = true;
            let domain = self.names.domain.clone();
            self.tasks.spawn(async move { Ended::Built(build(domain, feed, false).await) });
        }
        if !self.is_settled && self.names.settles_by <= now {
            self.settle();
        }
        if self.look_at <= now {
            self.look_at = now + Duration::from_millis(RESOLV_CONF_LOOK_MS);
            self.choose_upstreams();
        }
        if self.bind_at.is_some_and(|at| at <= now) {
            self.open_listeners().await;
        }
    }
}

impl Server {
    fn handle_query(&mut self, incoming: Incoming) {
        let Incoming { bytes, client, listener, back } = incoming;
        let asked = Asked {
            bytes: &bytes,
            carrier: match back {
                Back::Udp(..) => Carrier::Udp,
                Back::Tcp(_) => Carrier::Tcp,
            },
            is_client: client.is_served,
            is_settled: self.is_settled,
            scope: &listener.scope,
            server: listener.address.ip(),
        };
        match answer(&self.zone, &self.marker, &asked, self.rng.next_u64()) {
            Reply::Answer(bytes, counter) => {
                self.names.counters.count(counter);
                back.send(bytes, &self.names.counters);
            }
            Reply::Drop(counter) => self.names.counters.count(counter),
            Reply::Hold if self.held.len() < HELD_MAX => {
                self.held.push(Incoming { bytes, client, listener, back });
            }
            Reply::Hold => self.names.counters.count(Counter::Overloaded),
            Reply::Forward(forward) => {
                let Forward { query, form } = *forward;
                let waiter = Waiter { query, form, back, client: client.key };
                if !listener.forwards || !self.zone.asks_others(&listener.scope) {
                    return self.refuse(waiter, Counter::Refused);
                }
                self.forward(waiter);
            }
        }
    }

    /// The zone has the names of all hosts, or has waited long enough.
    fn settle(&mut self) {
        self.is_settled = true;
        for incoming in std::mem::take(&mut self.held) {
            self.handle_query(incoming);
        }
    }

    fn refuse(&self, waiter: Waiter, counter: Counter) {
        self.names.counters.count(counter);
        let bytes = waiter.form.empty(&waiter.query, ResponseCode::Refused);
        waiter.back.send(bytes, &self.names.counters);
    }

    /// Answers from the cache, or asks the upstream servers. A question that is under way already is not asked
    /// again: so a query that comes back to this daemon, unseen by its marker, makes no other.
    fn forward(&mut self, waiter: Waiter) {
        let now = Instant::now();
        let key = waiter.form.key(&waiter.query);
        if let Some((said, age_s)) = self.cache.get(now, &key) {
            self.names.counters.count(Counter::Cached);
            let bytes = waiter.form.of_others(&waiter.query, said, age_s);
            return waiter.back.send(bytes, &self.names.counters);
        }
        let is_new = !self.waiting.has(&key);
        if is_new && !self.upstream_throttle.admit(now, waiter.client) {
            return self.refuse(waiter, Counter::RateLimited);
        }
        let (query, form) = (waiter.query.clone(), waiter.form);
        if let Err(waiter) = self.waiting.add(&key, waiter) {
            return self.refuse(*waiter, Counter::Busy);
        }
        if !is_new {
            return self.names.counters.count(Counter::Joined);
        }
        self.names.counters.count(Counter::Forwarded);
        let exchange = Exchange::new(
            now,
            query,
            (form.dnssec, form.is_unchecked()),
            self.servers(now),
            self.marker,
            self.rng.next_u64(),
        );
        let counters = self.names.counters.clone();
        self.tasks.spawn(async move { Ended::Exchange(key, ask(exchange, counters).await) });
    }

    /// The servers in the order in which they are asked.
    fn servers(&self, now: Instant) -> Vec<SocketAddr> {
        let preferred = self.preferred.filter(|(_, until)| *until > now).map(|(server, _)| server);
        let mut servers = self.upstreams.clone();
        servers.sort_by_key(|server| Some(*server) != preferred);
        servers
    }

    fn handle_said(&mut self, key: Key, heard: Option<Heard>) {
        let now = Instant::now();
        for waiter in self.waiting.take(&key) {
            self.tell(waiter, heard.as_ref());
        }
        let Some(Heard { said, server, after_silence }) = heard else { return };
        // A server that refuses one name may be the only one that knows others: it stays the first.
        if after_silence && self.servers(now).first() != Some(&server) {
            self.preferred = Some((server, now + Duration::from_millis(PREFERENCE_MS)));
        }
        self.cache.put(now, key, said);
    }

    fn tell(&self, waiter: Waiter, heard: Option<&Heard>) {
        let Waiter { query, form, back, .. } = waiter;
        let bytes = match heard {
            Some(heard) => form.of_others(&query, &heard.said, 0),
            None => {
                self.names.counters.count(Counter::Failed);
                form.empty(&query, ResponseCode::ServFail)
            }
        };
        back.send(bytes, &self.names.counters);
    }
}

impl Server {
    fn handle_built(&mut self, built: Option<Built>) {
        self.building = false;
        // Without an answer, the core is busy or ends.
        let took = built.as_ref().map_or(Duration::ZERO, |built| built.took);
        self.feed_at = Instant::now() + pause_after(took);
        let Some(Built { feed, zone, is_complete, .. }) = built else {
            self.is_stale = true;
            return;
        };
        self.feed = zone.next_expiry().map(|_| feed);
        self.show(zone);
        if self.is_settled {
            return;
        }
        match is_complete && self.names.is_restored() {
            true => self.settle(),
            // No bell rings for that.
            false => self.is_stale = true,
        }
    }

    fn show(&mut self, zone: Arc<Zone>) {
        let (unfit, overflow) = zone.left_out();
        let mut warnings = Vec::new();
        if unfit > 0 {
            warnings.push(format!("{unfit} names of containers are not in DNS: a name has letters, digits, hyphens and underscores, with dots between, and is not localhost"));
        }
        if overflow > 0 {
            warnings.push(format!(
                "{overflow} addresses are not in DNS: one host can have {}, all hosts {}",
                super::zone::ADDRESSES_PER_OWNER_MAX,
                super::zone::ADDRESSES_MAX
            ));
        }
        self.names.warnings.set("names", warnings);
        self.names.zone.send_replace(Arc::clone(&zone));
        self.zone = zone;
    }

    /// Opens listeners that are new or failed before, changes those that stay, and closes those that are gone.
    async fn open_listeners(&mut self) {
        let wanted = self.listeners.borrow_and_update().clone();
        self.open.retain(|address, (_, task)| {
            let stays = wanted.iter().any(|listener| listener.address == *address);
            if !stays {
                task.abort();
            }
            stays
        });
        self.bind_at = None;
        let mut failed = Vec::new();
        for listener in wanted {
            let address = listener.address;
            // It keeps its sockets: queries under way hold them, so that others could not be bound.
            if let Some((current, _)) = self.open.get(&address) {
                current.send_replace(Arc::new(listener));
                continue;
            }
            match bind(address).await {
                Ok(sockets) => {
                    let (current, own) = watch::channel(Arc::new(listener));
                    let intake = self.intake.clone();
                    let task = self.tasks.spawn(async move {
                        Ended::Listener(address, listen(sockets, own, intake).await)
                    });
                    self.open.insert(address, (current, task));
                }
                Err(error) => failed.push(listener.refused(&error)),
            }
        }
        if !failed.is_empty() {
            self.bind_at = Some(Instant::now() + Duration::from_millis(BIND_RETRY_MS));
        }
        self.names.warnings.set("dns addresses", failed);
        self.tell_served();
        self.choose_upstreams();
    }

    fn tell_served(&self) {
        let open: BTreeSet<SocketAddr> = self.open.keys().copied().collect();
        self.names.served.send_if_modified(|served| {
            let is_new = *served != open;
            *served = open;
            is_new
        });
    }

    /// Chooses the upstream servers anew if the file or this daemon's own addresses have changed.
    fn choose_upstreams(&mut self) {
        let servers = match self.names.upstreams.is_empty() {
            true => self.resolv_conf.look(interface_index),
            false => Some(self.names.upstreams.clone()),
        };
        let own: BTreeSet<SocketAddr> = self.open.keys().copied().collect();
        let before = self.chosen_from.as_ref();
        let servers =
            servers.or_else(|| before.map(|(servers, _)| servers.clone())).unwrap_or_default();
        if before == Some(&(servers.clone(), own.clone())) {
            return;
        }
        let (kept, loops) = usable(&servers, &own);
        let warn = |server: SocketAddr| {
            format!(
                "the name server {server} is weft itself and is not asked; name others in {RESOLV_CONF} or by --dns-upstream"
            )
        };
        let mut warnings: Vec<String> = loops.into_iter().map(warn).collect();
        if kept.is_empty() && !self.open.is_empty() {
            warnings.push(format!("containers get no answer for names outside the network: {RESOLV_CONF} names no name server; name one by --dns-upstream"));
        }
        self.names.warnings.set("dns upstream", warnings);
        if kept != self.upstreams {
            tracing::info!(servers = ?kept, "name servers for all other names");
            self.cache.clear();
            self.upstreams = kept;
            self.preferred = None;
        }
        self.chosen_from = Some((servers, own));
    }
}

/// Asks the core for all names, and builds the zone of them.
async fn look(names: Arc<Names>, control: mpsc::Sender<Request>) -> Ended {
    let begun = Instant::now();
    let (reply, answer) = oneshot::channel();
    let fed = async {
        control.send(Request::Names { reply }).await.ok()?;
        answer.await.ok()
    };
    let limit = Duration::from_millis(FEED_LIMIT_MS);
    let fed = tokio::time::timeout(limit, fed).await.ok().flatten();
    let Some(NamesSnapshot { networks, revision, is_complete }) = fed else {
        return Ended::Built(None);
    };
    let info = |NetworkNames { name, ranges, is_internal, hosts }| {
        (NetworkInfo { name, ranges, is_internal }, hosts)
    };
    let networks = networks.into_iter().map(info).collect();
    let feed = Arc::new(Feed { local: names.local, networks, revision });
    let built = build(names.domain.clone(), feed, is_complete).await;
    Ended::Built(built.map(|built| Built { took: begun.elapsed(), ..built }))
}

/// Builds a zone on a separate thread: in a large mesh it takes longer than queries can wait.
async fn build(domain: Name, feed: Arc<Feed>, is_complete: bool) -> Option<Built> {
    let begun = Instant::now();
    let work = move || {
        let zone = Arc::new(Zone::build(begun, &domain, &feed));
        Built { feed, zone, is_complete, took: begun.elapsed() }
    };
    match tokio::task::spawn_blocking(work).await {
        Ok(built) => Some(built),
        Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
        Err(_) => None,
    }
}

/// The pause before the next look at the names, after one that took so long.
fn pause_after(took: Duration) -> Duration {
    let (least, most) = (FEED_PAUSE_MS, FEED_PAUSE_MAX_MS);
    took.saturating_mul(FEED_PAUSE_FACTOR)
        .clamp(Duration::from_millis(least), Duration::from_millis(most))
}

/// The index of an interface of the host.
fn interface_index(name: &str) -> Option<u32> {
    if name.is_empty() || name.contains('/') || name.starts_with('.') {
        return None;
    }
    let text = std::fs::read_to_string(format!("/sys/class/net/{name}/ifindex")).ok()?;
    text.trim().parse().ok()
}

#[cfg(test)]
#[path = "server_tests.rs"]
mod tests;
