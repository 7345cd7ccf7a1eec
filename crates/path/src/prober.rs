//! Proving that a path carries packets, how large they may be (RFC 8899), and how long they take.
//!
//! One prober watches the sending direction of one path. Every interval it sends a probe of the
//! path's full MTU. While the last one is unanswered, it also sends one of the smallest size. This
//! tells a black hole for large packets from a dead path, and from random loss at any size.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use rand::Rng;

use crate::config::{
    CLEAN_BEFORE_MOVE_MS, MTU_FLOOR, MTU_RAISE_NARROW_S, MTU_RAISE_S, PROBES_UNANSWERED_MAX,
    RETRY_FIRST_MS, RETRY_MAX_MS, ms,
};
use crate::engine_api::{EngineCommand, PathId};
use crate::relapse::Relapses;
use crate::shared::Shared;

/// Milliseconds after which a probe counts as unanswered: at least ...
const PROBE_TIMEOUT_MIN_MS: u64 = 500;
/// ... and at most, for any round trip.
pub(crate) const PROBE_TIMEOUT_MAX_MS: u64 = 1_000;
/// Milliseconds after which an answer is ignored.
const PROBE_FORGET_MS: u64 = 5_000;
/// Probes remembered at once.
const PROBES_OUTSTANDING_MAX: usize = 64;
/// Answered small probes in a row after which the MTU is lowered, while [`PROBES_UNANSWERED_MAX`] of full size are
/// not answered. Random loss of a tenth of all packets looks like that for a moment every two hours.
const SMALL_ANSWERED_TO_LOWER: u32 = 3;
/// Probes after which a size counts as too large (MAX_PROBES of RFC 8899 section 5.1.2).
const SEARCH_PROBES_MAX: u32 = 3;

/// The result of a step of the prober.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Nothing,
    /// The path carries packets now and did not before.
    Alive,
    /// The path carries another MTU than before.
    MtuChanged,
    /// The path does not carry packets.
    Dead {
        mtu_not_carried: bool,
    },
}

/// How often a path is probed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    Active,
    /// Better than the active path, or the active path is in doubt: probed as often, so that it can
    /// prove itself.
    Contender,
    Standby,
}

/// Bounds of the MTU search, in bytes of the inner IP packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sizes {
    floor: u16,
    /// The first size to try: the containers' MTU within the bounds.
    start: u16,
    ceiling: u16,
    /// The containers' MTU, whether the links carry it or not.
    wanted: u16,
}

impl Sizes {
    pub(crate) fn new(container_mtu: u16, ceiling: u16) -> Self {
        let ceiling = ceiling & !3;
        let floor = MTU_FLOOR.min(ceiling);
        let wanted = container_mtu & !3;
        Self { floor, start: wanted.clamp(floor, ceiling), ceiling, wanted }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Idle,
    Proving { round: u32 },
    Alive,
    Dead { tries: u32 },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Purpose {
    Full,
    Small,
    Search,
}

#[derive(Clone, Copy, Debug)]
struct Sent {
    at: Instant,
    mtu: u16,
    purpose: Purpose,
    lost: bool,
    /// It was a probe of the active path, which goes to the same inner port as frames.
    active: bool,
}

#[derive(Clone, Copy, Debug)]
struct Search {
    size: u16,
    high: u16,
    probes: u32,
    /// A size larger than `high` has failed: halve the interval instead of trying `high`.
    bounded: bool,
}

pub(crate) struct Prober {
    path: PathId,
    sizes: Sizes,
    phase: Phase,
    next: Option<Instant>,
    /// The next step of the search for a larger MTU, where it does not wait for `next`.
    search_at: Option<Instant>,
    number: u64,
    outstanding: BTreeMap<u64, Sent>,
    unanswered: u32,
    /// Small probes answered in a row, none of full size between them.
    small_answered: u32,
    clean_since: Option<Instant>,
    /// When the last answer to a probe of full size came.
    answered: Option<Instant>,
    rtt: Option<Duration>,
    mtu: Option<u16>,
    search: Option<Search>,
    raise_at: Option<Instant>,
    floor_refused: bool,
    /// The containers' MTU is known not to get through.
    narrow: bool,
    /// The path is in use, and its probes are marked accordingly.
    active: bool,
    relapses: Relapses,
}

impl Prober {
    pub(crate) fn new(path: PathId, sizes: Sizes, shared: &mut Shared) -> Self {
        Self {
            path,
            sizes,
            phase: Phase::Idle,
            next: None,
            search_at: None,
            number: shared.rng.next_u64(),
            outstanding: BTreeMap::new(),
            unanswered: 0,
            small_answered: 0,
            clean_since: None,
            answered: None,
            rtt: None,
            mtu: None,
            search: None,
            raise_at: None,
            floor_refused: false,
            narrow: false,
            active: false,
            relapses: Relapses::default(),
        }
    }

    pub(crate) fn is_alive(&self) -> bool {
        self.phase == Phase::Alive
    }

    /// The path did not carry packets when it was last tried.
    pub(crate) fn is_dead(&self) -> bool {
        matches!(self.phase, Phase::Dead { .. })
    }

    /// See [`Relapses`].
    pub(crate) fn relapses(&self) -> &Relapses {
        &self.relapses
    }

    pub(crate) fn mtu(&self) -> Option<u16> {
        self.mtu
    }

    pub(crate) fn rtt(&self) -> Option<Duration> {
        self.rtt
    }

    pub(crate) fn next(&self) -> Option<Instant> {
        [self.next, self.search_at].into_iter().flatten().min()
    }

    /// Packets as large as the containers' MTU do not get through; smaller ones do.
    pub(crate) fn is_narrow(&self) -> bool {
        self.is_alive() && self.narrow
    }

    /// The last probes are unanswered, but too few for a verdict.
    pub(crate) fn is_in_doubt(&self) -> bool {
        self.is_alive() && self.unanswered > 0
    }

    /// A probe was answered since then.
    pub(crate) fn is_answered_since(&self, since: Instant) -> bool {
        self.answered.is_some_and(|at| at >= since)
    }

    /// A probe is due.
    pub(crate) fn is_due(&self, now: Instant) -> bool {
        self.next().is_some_and(|at| now >= at)
    }

    /// Sends nothing before `at`.
    pub(crate) fn delay(&mut self, at: Instant) {
        self.next = self.next.map(|next| next.max(at));
        self.search_at = self.search_at.map(|search| search.max(at));
    }

    /// Something makes it urgent to learn whether a proven path still works.
    pub(crate) fn hasten(&mut self, now: Instant) {
        if self.is_alive() {
            self.next = self.next.map(|next| next.min(now));
        }
    }

    /// No probe was lost for long enough that traffic may move to this path.
    pub(crate) fn is_clean(&self, now: Instant) -> bool {
        self.clean_since.is_some_and(|since| now >= since + ms(CLEAN_BEFORE_MOVE_MS))
    }

    /// Starts to prove the path from scratch.
    pub(crate) fn start(&mut self, now: Instant) {
        self.stop();
        self.phase = Phase::Proving { round: 0 };
        self.next = Some(now);
    }

    /// Sends nothing until [`Self::start`].
    pub(crate) fn stop(&mut self) {
        self.phase = Phase::Idle;
        self.next = None;
        self.search_at = None;
        self.mtu = None;
        self.search = None;
        self.clean_since = None;
        self.narrow = false;
        self.relapses = Relapses::default();
        self.forget();
    }

    /// Answers cannot come back: sends and concludes nothing until [`Self::resume`].
    pub(crate) fn pause(&mut self) {
        self.next = None;
        self.search_at = None;
        self.forget();
    }

    pub(crate) fn resume(&mut self, now: Instant) {
        self.forget();
        self.next = (self.phase != Phase::Idle).then_some(now);
    }

    /// The network may have healed: retries a dead path at once.
    pub(crate) fn hint(&mut self, now: Instant) {
        if self.is_dead() && self.next.is_some() {
            self.next = Some(now);
        }
    }

    /// Probes at the new role's rate from now on.
    pub(crate) fn role_changed(&mut self, now: Instant, role: Role) {
        self.set_role(role);
        if self.is_alive() {
            self.next = self.next.map(|_| now);
        }
    }

    /// The smallest and largest size may have changed.
    pub(crate) fn set_sizes(&mut self, now: Instant, sizes: Sizes) -> Verdict {
        if self.sizes == sizes {
            return Verdict::Nothing;
        }
        let raised = sizes.ceiling > self.sizes.ceiling;
        self.sizes = sizes;
        self.outstanding.retain(|_, sent| sent.mtu <= sizes.ceiling);
        let Some(mtu) = self.mtu else { return Verdict::Nothing };
        if raised {
            self.begin_search(now, sizes.ceiling, sizes.ceiling, false);
        } else if let Some(search) = self.search {
            self.begin_search(now, search.size, search.high, search.bounded);
        }
        let lowered = mtu > sizes.ceiling;
        if lowered {
            self.mtu = Some(sizes.ceiling);
            self.search = None;
        }
        self.judge_width();
        if lowered { Verdict::MtuChanged } else { Verdict::Nothing }
    }

    /// Sends the probes that are due and evaluates overdue ones.
    pub(crate) fn handle_timeout(
        &mut self,
        now: Instant,
        role: Role,
        shared: &mut Shared,
    ) -> Verdict {
        if !self.is_due(now) {
            return Verdict::Nothing;
        }
        self.set_role(role);
        let searches = self.search_at.take_if(|at| now >= *at).is_some();
        if self.next.is_none_or(|next| now < next) {
            if searches && self.is_alive() {
                self.search_send(now, shared);
            }
            return Verdict::Nothing;
        }
        self.expire(now);
        let verdict = match self.phase {
            Phase::Idle => {
                self.next = None;
                Verdict::Nothing
            }
            Phase::Proving { round } => self.prove(now, round, shared),
            Phase::Alive => self.watch(now, role, shared),
            Phase::Dead { tries } => {
                self.send_large_and_small(now, shared);
                self.phase = Phase::Dead { tries: tries.saturating_add(1) };
                self.next = Some(now + retry_after(tries, shared));
                Verdict::Nothing
            }
        };
        self.judge_width();
        verdict
    }

    /// A probe's answer came over the link.
    pub(crate) fn handle_answer(
        &mut self,
        now: Instant,
        probe: u64,
        mtu: u16,
        shared: &Shared,
    ) -> Option<Verdict> {
        let sent = *self.outstanding.get(&probe).filter(|sent| sent.mtu == mtu)?;
        self.outstanding.remove(&probe);
        let sample = now.saturating_duration_since(sent.at);
        self.rtt = Some(self.rtt.map_or(sample, |rtt| (rtt * 7 + sample) / 8));
        if sent.active {
            self.relapses.was_answered_in_use();
        }
        let verdict = match self.phase {
            Phase::Idle => Verdict::Nothing,
            Phase::Proving { .. } | Phase::Dead { .. } => self.revive(now, sent.mtu, shared),
            Phase::Alive => self.confirm(now, sent),
        };
        self.judge_width();
        Some(verdict)
    }

    /// The kernel refused a datagram of this inner size.
    pub(crate) fn handle_too_long(
        &mut self,
        now: Instant,
        size: u16,
        shared: &mut Shared,
    ) -> Verdict {
        let largest = size.saturating_sub(1) & !3;
        self.floor_refused |= size <= self.sizes.floor;
        self.outstanding.retain(|_, sent| sent.mtu < size);
        let verdict = match (self.phase, self.mtu) {
            (Phase::Proving { .. }, _) => {
                let small_is_out =
                    self.outstanding.values().any(|sent| sent.purpose == Purpose::Small);
                if !small_is_out && self.sizes.floor < size {
                    self.send(now, self.sizes.floor, Purpose::Small, shared);
                }
                Verdict::Nothing
            }
            (Phase::Alive, Some(mtu)) if size <= mtu && mtu > self.sizes.floor => {
                self.lower(now, largest, true);
                Verdict::MtuChanged
            }
            (Phase::Alive, Some(_)) => {
                if let Some(search) = self.search.filter(|search| search.high >= size) {
                    let low = self.mtu.unwrap_or(self.sizes.floor);
                    let refused = search.size >= size;
                    let next = if refused { middle(low, largest) } else { search.size };
                    self.begin_search(now, next, largest, true);
                }
                Verdict::Nothing
            }
            _ => Verdict::Nothing,
        };
        self.judge_width();
        verdict
    }

    fn prove(&mut self, now: Instant, round: u32, shared: &mut Shared) -> Verdict {
        if round >= PROBES_UNANSWERED_MAX {
            return self.die(now, shared);
        }
        if round == 0 {
            self.send(now, self.sizes.start, Purpose::Full, shared);
        } else {
            self.send_large_and_small(now, shared);
        }
        self.phase = Phase::Proving { round: round + 1 };
        self.next = Some(now + shared.config.probe_interval);
        Verdict::Nothing
    }

    fn watch(&mut self, now: Instant, role: Role, shared: &mut Shared) -> Verdict {
        let mut verdict = Verdict::Nothing;
        if self.unanswered >= PROBES_UNANSWERED_MAX {
            if self.small_answered == 0 {
                return self.die(now, shared);
            }
            if self.small_answered >= SMALL_ANSWERED_TO_LOWER {
                // It is sought again up to where it was: mere loss must not cost four bytes.
                self.lower(now, self.mtu.unwrap_or(self.sizes.floor), false);
                verdict = Verdict::MtuChanged;
            }
        }
        let mtu = self.mtu.unwrap_or(self.sizes.floor);
        self.send(now, mtu, Purpose::Full, shared);
        if self.unanswered > 0 && self.sizes.floor < mtu {
            self.send(now, self.sizes.floor, Purpose::Small, shared);
        }
        if self.unanswered == 0 {
            self.search_step(now, shared);
        }
        let quiet = role == Role::Standby && self.unanswered == 0 && self.search.is_none();
        // A lone unanswered probe of a standby path shows only at its next turn.
        let interval =
            if quiet { shared.config.standby_interval } else { shared.config.probe_interval };
        self.next = Some(now + interval);
        verdict
    }

    fn revive(&mut self, now: Instant, mtu: u16, shared: &Shared) -> Verdict {
        self.relapses.came_back(now);
        let mtu = mtu.min(self.sizes.ceiling);
        self.phase = Phase::Alive;
        self.mtu = Some(mtu);
        self.floor_refused = false;
        self.unanswered = 0;
        self.small_answered = 0;
        self.clean_since = Some(now);
        self.answered = Some(now);
        let first = if mtu < self.sizes.start { self.sizes.start } else { self.sizes.ceiling };
        self.begin_search(now, first, self.sizes.ceiling, false);
        self.next = Some(now + shared.config.probe_interval);
        self.search_at = self.search.map(|_| now);
        Verdict::Alive
    }

    fn confirm(&mut self, now: Instant, sent: Sent) -> Verdict {
        let mtu = self.mtu.unwrap_or(0);
        if sent.mtu >= mtu {
            self.unanswered = 0;
            self.small_answered = 0;
            self.answered = Some(now);
            self.clean_since.get_or_insert(now);
        } else if sent.purpose == Purpose::Small {
            self.small_answered += 1;
        }
        if sent.mtu <= mtu || sent.mtu > self.sizes.ceiling {
            return Verdict::Nothing;
        }
        self.mtu = Some(sent.mtu);
        if let Some(search) = self.search {
            let next = if search.bounded { middle(sent.mtu, search.high) } else { search.high };
            self.begin_search(now, next, search.high, search.bounded);
            self.search_at = self.search.and(self.next).map(|_| now);
        }
        Verdict::MtuChanged
    }

    fn set_role(&mut self, role: Role) {
        let active = role == Role::Active;
        if active && !std::mem::replace(&mut self.active, active) {
            self.relapses.came_into_use();
        }
        self.active = active;
    }

    fn die(&mut self, now: Instant, shared: &mut Shared) -> Verdict {
        if self.active {
            self.relapses.failed_in_use(now);
        }
        self.phase = Phase::Dead { tries: 1 };
        self.mtu = None;
        self.search = None;
        self.search_at = None;
        self.clean_since = None;
        self.unanswered = 0;
        self.small_answered = 0;
        self.narrow = false;
        self.next = Some(now + retry_after(0, shared));
        Verdict::Dead { mtu_not_carried: std::mem::take(&mut self.floor_refused) }
    }

    /// Falls to the floor at once and searches upwards again, to `high` at most.
    fn lower(&mut self, now: Instant, high: u16, bounded: bool) {
        self.mtu = Some(self.sizes.floor);
        self.unanswered = 0;
        self.small_answered = 0;
        let first = if bounded { self.sizes.start } else { high };
        self.begin_search(now, first, high, bounded);
    }

    /// Marks overdue probes as lost.
    fn expire(&mut self, now: Instant) {
        let round_trips = self.rtt.map_or(Duration::ZERO, |rtt| rtt * 2);
        let timeout = round_trips.clamp(ms(PROBE_TIMEOUT_MIN_MS), ms(PROBE_TIMEOUT_MAX_MS));
        let full = self.mtu.unwrap_or(0);
        for sent in self.outstanding.values_mut() {
            if sent.lost || now < sent.at + timeout {
                continue;
            }
            sent.lost = true;
            match sent.purpose {
                Purpose::Full if sent.mtu <= full => {
                    self.unanswered += 1;
                    self.clean_since = None;
                }
                Purpose::Small => self.small_answered = 0,
                Purpose::Full | Purpose::Search => {}
            }
        }
        self.outstanding.retain(|_, sent| now < sent.at + ms(PROBE_FORGET_MS));
    }

    fn begin_search(&mut self, now: Instant, first: u16, high: u16, bounded: bool) {
        let low = self.mtu.unwrap_or(self.sizes.floor);
        let high = high.min(self.sizes.ceiling);
        if high < low.saturating_add(4) {
            self.search = None;
            let narrow = low < self.sizes.wanted.min(self.sizes.ceiling);
            let seconds = if narrow { MTU_RAISE_NARROW_S } else { MTU_RAISE_S };
            self.raise_at = Some(now + Duration::from_secs(seconds));
        } else {
            let size = first.clamp(low + 4, high);
            self.search = Some(Search { size, high, probes: 0, bounded });
        }
    }

    /// Judges whether the containers' MTU gets through. This is known once that size was answered or
    /// given up. A size given up stays so during a search for larger ones.
    fn judge_width(&mut self) {
        let Some(mtu) = self.mtu else { return };
        if mtu >= self.sizes.wanted {
            self.narrow = false;
        } else if self.search.is_none_or(|search| search.high < self.sizes.wanted) {
            self.narrow = true;
        }
    }

    fn search_step(&mut self, now: Instant, shared: &mut Shared) {
        if self.search.is_none() && self.raise_at.is_some_and(|at| now >= at) {
            self.begin_search(now, self.sizes.ceiling, self.sizes.ceiling, false);
        }
        let low = self.mtu.unwrap_or(self.sizes.floor);
        if let Some(search) = self.search
            && search.probes >= SEARCH_PROBES_MAX
        {
            let high = search.size.saturating_sub(4);
            self.begin_search(now, middle(low, high), high, true);
        }
        self.search_send(now, shared);
    }

    fn search_send(&mut self, now: Instant, shared: &mut Shared) {
        if let Some(search) = &mut self.search {
            search.probes += 1;
            let size = search.size;
            self.send(now, size, Purpose::Search, shared);
        }
    }

    fn send_large_and_small(&mut self, now: Instant, shared: &mut Shared) {
        self.send(now, self.sizes.start, Purpose::Full, shared);
        if self.sizes.floor < self.sizes.start {
            self.send(now, self.sizes.floor, Purpose::Small, shared);
        }
    }

    fn send(&mut self, now: Instant, mtu: u16, purpose: Purpose, shared: &mut Shared) {
        while self.outstanding.len() >= PROBES_OUTSTANDING_MAX {
            self.outstanding.pop_first();
        }
        self.number = self.number.wrapping_add(1);
        let sent = Sent { at: now, mtu, purpose, lost: false, active: self.active };
        self.outstanding.insert(self.number, sent);
        shared.command(EngineCommand::SendProbe {
            path: self.path,
            probe: self.number,
            mtu,
            candidate: !self.active,
        });
    }

    fn forget(&mut self) {
        self.outstanding.clear();
        self.unanswered = 0;
        self.small_answered = 0;
    }
}

/// The delay doubles from one second to a minute, less up to a quarter at random.
pub(crate) fn retry_after(tries: u32, shared: &mut Shared) -> Duration {
    let longest = RETRY_FIRST_MS.saturating_mul(1 << tries.min(16)).min(RETRY_MAX_MS);
    ms(longest - shared.rng.next_u64() % (longest / 4 + 1))
}

/// Half-way between two sizes, a multiple of four.
fn middle(low: u16, high: u16) -> u16 {
    (low + high.saturating_sub(low) / 2).saturating_add(3) & !3
}
