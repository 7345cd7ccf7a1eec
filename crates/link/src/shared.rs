//! The state that all tasks of a [`Links`](crate::Links) share.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::{Notify, watch};
use tokio::task::AbortHandle;
use weft_crypto::PeerId;

use crate::error::{Cause, CloseCode, Failure};
use crate::event::{Event, EventSender};
use crate::gate::{Gate, Standing};
use crate::identity::Identity;
use crate::known::Known;
use crate::limits::{ADDRESSES_MAX, LINKS_MAX, REFUSALS_MAX, REFUSALS_TOLD_PER_MINUTE, Timing};
use crate::link::Link;
use crate::secret::Secret;
use crate::socket::canonical;
use crate::source::source_of;
use crate::status::{Direction, LinkState, LinkStatus};
use crate::target::Target;
use crate::throttle::Throttle;
use crate::token::{Token, TokenBook};

/// A refusal is reported and logged again after this.
const REFUSAL_REPEAT: Duration = Duration::from_secs(60);

/// The pause between two reported refusals once the burst is used up.
const TELLING_PAUSE: Duration = Duration::from_millis(60_000 / REFUSALS_TOLD_PER_MINUTE as u64);

pub(crate) struct Shared {
    pub(crate) endpoint: quinn::Endpoint,
    pub(crate) identity: Identity,
    pub(crate) me: PeerId,
    pub(crate) nickname: String,
    pub(crate) instance: u64,
    pub(crate) succeeds: Option<u64>,
    pub(crate) versions: RangeInclusive<u16>,
    pub(crate) timing: Timing,
    pub(crate) events: EventSender,
    pub(crate) gate: Arc<Gate>,
    /// Counts the changes of `State::links`.
    pub(crate) changed: watch::Sender<u64>,
    state: Mutex<State>,
}

pub(crate) struct State {
    pub(crate) secret: Option<Secret>,
    /// Counts password changes: a peer that proved an older password must prove the new one.
    pub(crate) epoch: u64,
    /// The token with which this host joins.
    pub(crate) join_token: Option<Token>,
    pub(crate) tokens: TokenBook,
    pub(crate) hello: Vec<u8>,
    pub(crate) links: HashMap<PeerId, Link>,
    pub(crate) dials: BTreeMap<DialKey, Dial>,
    pub(crate) throttle: Throttle,
    pub(crate) known: Known,
    pub(crate) refusals: VecDeque<Refusal>,
    /// When the budget of reported refusals is full again.
    refusals_paid_off: Option<Instant>,
    /// Refusals that were not reported, since too many were.
    refusals_untold: u64,
    /// Peers that the application refuses, with reasons.
    pub(crate) refused: HashMap<PeerId, String>,
    /// Ends of connections whose other end has this host's own key: the connection's exported name, and which
    /// end.
    pub(crate) own_ends: VecDeque<([u8; 16], Direction)>,
    /// The order number of the last `Use` and of the last link.
    pub(crate) order: u64,
    pub(crate) closed: bool,
}

impl State {
    /// Whether the owner of a key has been admitted, or is dialled.
    pub(crate) fn knows(&self, peer: PeerId) -> bool {
        !self.refused.contains_key(&peer)
            && (self.known.contains(peer)
                || self.links.contains_key(&peer)
                || self.dials.values().any(|dial| dial.is_for(peer)))
    }

    /// How well an address is known.
    pub(crate) fn standing(&self, remote: SocketAddr) -> Standing {
        let met = self.known.addresses();
        let linked = self.links.values().map(Link::remote);
        let dialled = self.dials.values().flat_map(Dial::known_addresses);
        let mut standing = Standing::Stranger;
        for known in met.chain(linked).chain(dialled) {
            if known == remote {
                return Standing::Socket;
            }
            if known.ip() == remote.ip() {
                standing = Standing::Host;
            }
        }
        standing
    }

    /// Whether this host wants a link with a peer that has proven itself. Checked before this host
    /// identifies itself, so that an unwanted peer never sees a link come up.
    pub(crate) fn check_wanted(&self, peer: PeerId) -> Result<(), Failure> {
        if self.closed {
            return Err(Failure::refused(CloseCode::Shutdown, "this host was stopped"));
        }
        if let Some(reason) = self.refused.get(&peer) {
            return Err(Failure::refused(CloseCode::Application, reason.clone()));
        }
        if self.links.len() >= LINKS_MAX && !self.links.contains_key(&peer) {
            return Err(Failure::refused(CloseCode::Busy, "too many links"));
        }
        Ok(())
    }

    /// Whether one more refusal may be reported. A source with many addresses causes no more lines than one
    /// address.
    fn may_tell_refusal(&mut self, now: Instant) -> bool {
        let paid_off = self.refusals_paid_off.map_or(now, |at| at.max(now)) + TELLING_PAUSE;
        let fits = paid_off - now <= TELLING_PAUSE * REFUSALS_TOLD_PER_MINUTE;
        if fits {
            self.refusals_paid_off = Some(paid_off);
        }
        fits
    }
}

/// The object of a dial: a given target, or a peer that was up.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum DialKey {
    Target(String),
    Peer(PeerId),
}

pub(crate) struct Dial {
    pub(crate) target: Target,
    /// The addresses of a peer; a target is resolved each time.
    pub(crate) addresses: Vec<SocketAddr>,
    /// The address where a peer was last linked.
    met_at: Option<SocketAddr>,
    pub(crate) state: LinkState,
    pub(crate) reason: Option<String>,
    is_itself: bool,
    pub(crate) since: Instant,
    pub(crate) next_try: Option<Instant>,
    /// The peer that answered last.
    pub(crate) peer: Option<PeerId>,
    /// Dial at once.
    pub(crate) kick: Arc<Notify>,
    pub(crate) task: AbortHandle,
    /// The state reported last; nothing is reported while connecting.
    told: Option<(LinkState, Option<Cause>)>,
}

impl Dial {
    pub(crate) fn new(target: Target, kick: Arc<Notify>, task: AbortHandle) -> Self {
        Self {
            target,
            addresses: Vec::new(),
            met_at: None,
            state: LinkState::Connecting,
            reason: None,
            is_itself: false,
            since: Instant::now(),
            next_try: None,
            peer: None,
            kick,
            task,
            told: None,
        }
    }

    /// Sets the addresses to dial a peer at, and adds the last linked one. Returns whether any is new.
    pub(crate) fn look_at(&mut self, peer: PeerId, mut addresses: Vec<SocketAddr>) -> bool {
        if let Some(met) = self.met_at.filter(|met| !addresses.contains(met)) {
            addresses.truncate(ADDRESSES_MAX - 1);
            addresses.push(met);
        }
        let news = addresses.iter().any(|address| !self.addresses.contains(address));
        if let Some(first) = addresses.first() {
            self.target = Target::of_peer(peer, *first);
            self.addresses = addresses;
        }
        news
    }

    /// Records that a peer is linked at this address.
    pub(crate) fn met_at(&mut self, peer: PeerId, remote: SocketAddr) {
        self.met_at = Some(remote);
        let rest = std::mem::take(&mut self.addresses).into_iter().filter(|at| *at != remote);
        self.addresses = [remote].into_iter().chain(rest).take(ADDRESSES_MAX).collect();
        self.target = Target::of_peer(peer, remote);
    }

    /// Whether a link with this peer satisfies this dial.
    pub(crate) fn is_for(&self, peer: PeerId) -> bool {
        match &self.target.key_hash {
            Some(key_hash) => key_hash.matches(peer),
            None => self.peer == Some(peer),
        }
    }

    /// The addresses that need no lookup.
    fn known_addresses(&self) -> Vec<SocketAddr> {
        let named = self.target.host.parse::<IpAddr>().ok();
        let named = named.map(|ip| SocketAddr::new(ip.to_canonical(), self.target.port));
        self.addresses.iter().copied().chain(named).collect()
    }

    pub(crate) fn status(&self, now: Instant) -> LinkStatus {
        LinkStatus {
            address: self.target.address(),
            direction: Direction::Outbound,
            peer: self.peer,
            nickname: None,
            state: self.state,
            reason: self.reason.clone(),
            is_itself: self.is_itself,
            since: self.since,
            next_try: self.next_try.map(|at| at.saturating_duration_since(now)),
            refusals: 0,
            rtt: None,
        }
    }
}

/// Hosts refused here, counted by source and cause. The last reason may be in the host's own words.
pub(crate) struct Refusal {
    remote: SocketAddr,
    peer: PeerId,
    cause: Cause,
    reason: String,
    count: u64,
    last: Instant,
    told: Option<Instant>,
}

impl Refusal {
    pub(crate) fn is_of(&self, peer: PeerId) -> bool {
        self.peer == peer
    }

    pub(crate) fn status(&self) -> LinkStatus {
        LinkStatus {
            address: self.remote.to_string(),
            direction: Direction::Inbound,
            peer: Some(self.peer),
            nickname: None,
            state: LinkState::Failed,
            reason: Some(self.reason.clone()),
            is_itself: false,
            since: self.last,
            next_try: None,
            refusals: self.count,
            rtt: None,
        }
    }
}

/// The parts that make a [`Shared`].
pub(crate) struct Parts {
    pub(crate) endpoint: quinn::Endpoint,
    pub(crate) identity: Identity,
    pub(crate) nickname: String,
    pub(crate) instance: u64,
    pub(crate) succeeds: Option<u64>,
    pub(crate) versions: RangeInclusive<u16>,
    pub(crate) timing: Timing,
    pub(crate) events: EventSender,
    pub(crate) secret: Option<Secret>,
    pub(crate) join_token: Option<Token>,
    pub(crate) hello: Vec<u8>,
}

impl Shared {
    pub(crate) fn new(parts: Parts) -> Self {
        Self {
            endpoint: parts.endpoint,
            me: parts.identity.peer_id(),
            identity: parts.identity,
            nickname: parts.nickname,
            instance: parts.instance,
            succeeds: parts.succeeds,
            versions: parts.versions,
            timing: parts.timing,
            events: parts.events,
            gate: Arc::default(),
            changed: watch::Sender::new(0),
            state: Mutex::new(State {
                secret: parts.secret,
                epoch: 0,
                join_token: parts.join_token,
                tokens: TokenBook::default(),
                hello: parts.hello,
                links: HashMap::new(),
                dials: BTreeMap::new(),
                throttle: Throttle::default(),
                known: Known::default(),
                refusals: VecDeque::new(),
                refusals_paid_off: None,
                refusals_untold: 0,
                refused: HashMap::new(),
                own_ends: VecDeque::new(),
                order: 0,
                closed: false,
            }),
        }
    }

    /// Locks the state. Hold it only briefly, never across an await.
    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn links_changed(&self) {
        self.changed.send_modify(|count| *count = count.wrapping_add(1));
    }

    /// A join token has given this host the network's secret.
    pub(crate) fn learn_secret(&self, secret: &Secret) {
        let mut state = self.lock();
        state.secret = Some(secret.clone());
        state.join_token = None;
        self.events.send(Event::SecretLearned { secret: secret.clone() });
        for dial in state.dials.values() {
            if dial.state == LinkState::Failed {
                dial.kick.notify_one();
            }
        }
        drop(state);
        tracing::info!("joined the network: received its secret by join token");
    }

    /// Notifies the application if a peer takes this host for a copy of another.
    pub(crate) fn tell_same_identity(&self, failure: &Failure) {
        if let Failure::SameIdentity { reason } = failure {
            self.events.notice(Event::SameIdentity { reason: reason.clone() });
        }
    }

    /// Sets the state of a target; reports and logs it if it is new.
    pub(crate) fn set_dial(
        &self,
        key: &DialKey,
        to: LinkState,
        failure: Option<&Failure>,
        wait: Option<Duration>,
    ) {
        let now = Instant::now();
        let mut state = self.lock();
        let Some(dial) = state.dials.get_mut(key) else { return };
        dial.change(to, failure, wait, now, &self.events);
    }

    /// Records a host that was refused here.
    pub(crate) fn note_refusal(&self, remote: SocketAddr, peer: PeerId, failure: &Failure) {
        let (remote, now) = (canonical(remote), Instant::now());
        let reason = failure.reason();
        let mut state = self.lock();
        let (source, cause) = (source_of(remote.ip()), failure.cause());
        let same = |known: &Refusal| source_of(known.remote.ip()) == source && known.cause == cause;
        let at = state.refusals.iter().position(same);
        let mut refusal = at.and_then(|at| state.refusals.remove(at)).unwrap_or(Refusal {
            remote,
            peer,
            cause,
            reason: String::new(),
            count: 0,
            last: now,
            told: None,
        });
        refusal.count += 1;
        (refusal.remote, refusal.peer, refusal.last) = (remote, peer, now);
        reason.clone_into(&mut refusal.reason);
        let due = refusal.told.is_none_or(|told| now - told >= REFUSAL_REPEAT);
        if due && state.may_tell_refusal(now) {
            refusal.told = Some(now);
            let left_out = std::mem::take(&mut state.refusals_untold);
            tracing::warn!(%remote, %peer, reason, count = refusal.count, left_out, "host refused");
            self.events.notice(Event::Refused { remote, peer, reason: reason.to_owned() });
        } else if due {
            state.refusals_untold += 1;
        }
        if state.refusals.len() >= REFUSALS_MAX {
            state.refusals.pop_front();
        }
        state.refusals.push_back(refusal);
    }

    /// A refused host has been admitted: drops its refusals from the status.
    pub(crate) fn forget_refusals(state: &mut State, source: IpAddr, peer: PeerId) {
        state.refusals.retain(|known| known.peer != peer || known.remote.ip() != source);
    }
}

impl Dial {
    pub(crate) fn change(
        &mut self,
        to: LinkState,
        failure: Option<&Failure>,
        wait: Option<Duration>,
        now: Instant,
        events: &EventSender,
    ) {
        if self.state != to {
            self.since = now;
        }
        (self.state, self.next_try) = (to, wait.map(|wait| now + wait));
        // During a retry, the reason of the last failure stays visible.
        if !matches!(to, LinkState::Connecting | LinkState::Pending) {
            self.reason = failure.map(|failure| failure.reason().to_owned());
            self.is_itself = matches!(failure, Some(Failure::Itself));
            let told = Some((to, failure.map(Failure::cause)));
            if self.told != told {
                self.told = told;
                let status = self.status(now);
                let reason = self.reason.as_deref().unwrap_or_default();
                tracing::info!(target = %status.address, state = to.name(), reason, "target");
                events.notice(Event::TargetChanged { status });
            }
        }
    }
}
