//! Decides whether a worker has helpers. It gets them when it is saturated while cores idle, keeps them only if
//! more gets through, and loses them when fewer threads suffice.

use std::time::{Duration, Instant};

/// Helpers that one worker may have.
pub const HELPERS_MAX: usize = 7;
/// Time between two looks at the workers, in milliseconds.
pub const HELP_LOOK_MS: u64 = 50;
/// The same while all workers are quiet and none has a helper, in milliseconds: looks cost, too.
pub const HELP_QUIET_LOOK_MS: u64 = 250;
/// A worker is quiet below this share of its thread's time.
const QUIET: f64 = 0.05;
/// A worker is saturated from this share of its thread's time on.
const SATURATED: f64 = 0.9;
/// How long it has been so before a helper is tried, in milliseconds.
const SATURATED_MS: u64 = 50;
/// Cores that must idle for each helper that is tried.
const IDLE_CORES_MIN: f64 = 0.75;
/// How long a helper is tried, in milliseconds; the first look is not counted.
const TRIAL_MS: u64 = 150;
/// The share by which more must get through with a helper than without.
const GAIN_MIN: f64 = 1.1;
/// A helper is given up when the threads could do with one less at this share of their time.
const CALM: f64 = 0.8;
/// How long it has been so before, in milliseconds.
const CALM_MS: u64 = 1_000;
/// How long a helper that did not help is not tried again, in seconds; doubled each time.
const PAUSE_MIN_S: u64 = 1;
/// The most that it is doubled to, in seconds.
const PAUSE_MAX_S: u64 = 60;
/// How long helpers work on a machine without idle cores before one is taken away as a trial, in
/// seconds.
const DOUBT_S: u64 = 10;

/// Looks whose rates are compared.
const RATES: usize = 3;

/// Measurements of one worker since the last look.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Look {
    /// The worker's processor time, as a share of the time.
    pub(crate) busy: f64,
    /// That of its helpers together.
    pub(crate) helpers_busy: f64,
    /// Cores of the machine that idled.
    pub(crate) idle_cores: f64,
    /// Datagrams a second, both ways.
    pub(crate) rate: f64,
}

/// One helper more or less, as a trial.
#[derive(Clone, Copy, Debug)]
struct Trial {
    /// How many there were before.
    before: usize,
    /// The throughput then, in datagrams a second.
    rate: f64,
    /// So little came meanwhile that fewer threads would have done.
    has_rested: bool,
}

/// Decides on the helpers of one worker.
#[derive(Debug)]
pub(crate) struct ScalingPolicy {
    helpers: usize,
    helpers_max: usize,
    /// A change that is on trial.
    trial: Option<Trial>,
    /// Since when it is as it is.
    since: Option<Instant>,
    rates: Mean,
    saturated_since: Option<Instant>,
    calm_since: Option<Instant>,
    /// No helper is tried before.
    next_try: Option<Instant>,
    pause: Duration,
}

impl ScalingPolicy {
    /// Of a worker without helpers, which may have at most `helpers_max`.
    pub(crate) const fn new(helpers_max: usize) -> Self {
        Self {
            helpers: 0,
            helpers_max: if helpers_max < HELPERS_MAX { helpers_max } else { HELPERS_MAX },
            trial: None,
            since: None,
            rates: Mean::NONE,
            saturated_since: None,
            calm_since: None,
            next_try: None,
            pause: Duration::from_secs(PAUSE_MIN_S),
        }
    }

    /// Whether the idle cores are of interest before the next look.
    pub(crate) const fn needs_idle_cores(&self) -> bool {
        self.helpers > 0 || self.saturated_since.is_some()
    }

    /// Whether the worker, as it was seen last, need not be looked at soon.
    pub(crate) fn is_quiet(&self, look: &Look) -> bool {
        self.helpers == 0 && look.busy < QUIET
    }

    /// A look at the worker. Returns how many helpers it is to have from now on, if that changes.
    pub(crate) fn handle_look(&mut self, now: Instant, look: &Look) -> Option<usize> {
        let before = self.helpers;
        match self.trial {
            Some(trial) => self.judge(now, look, trial),
            None => self.consider(now, look),
        }
        (self.helpers != before).then_some(self.helpers)
    }

    fn judge(&mut self, now: Instant, look: &Look, trial: Trial) {
        let since = *self.since.get_or_insert(now);
        if lasted(since, now) > Duration::from_millis(HELP_LOOK_MS * 3 / 2) {
            self.rates.add(look.rate);
        }
        let fewer = trial.before.min(self.helpers);
        let rests = is_calm(look, fewer + 1);
        let trial = Trial { has_rested: trial.has_rested || rests, ..trial };
        if lasted(since, now) < Duration::from_millis(TRIAL_MS) {
            self.trial = Some(trial);
            return;
        }
        let (rate_of_fewer, rate_of_more) = if trial.before < self.helpers {
            (trial.rate, self.rates.get())
        } else {
            (self.rates.get(), trial.rate)
        };
        self.trial = None;
        if rate_of_more >= rate_of_fewer * GAIN_MIN {
            self.set(now, fewer + 1);
            self.pause = Duration::from_secs(PAUSE_MIN_S);
        } else {
            self.set(now, fewer);
            // A flow that ended meanwhile says nothing about helpers.
            if !trial.has_rested {
                self.next_try = Some(now + self.pause);
                self.pause = (self.pause * 2).min(Duration::from_secs(PAUSE_MAX_S));
            }
        }
    }

    fn consider(&mut self, now: Instant, look: &Look) {
        let since = *self.since.get_or_insert(now);
        let threads = (self.helpers + 1) as f64;
        let busy = look.busy + look.helpers_busy;
        let is_saturated = busy >= SATURATED * threads;
        let had_idle_cores = self.needs_idle_cores();
        let saturated_for = held(&mut self.saturated_since, is_saturated, now);
        let needs_fewer = self.helpers > 0 && is_calm(look, self.helpers);
        let calm_for = held(&mut self.calm_since, needs_fewer, now);
        if is_saturated {
            self.rates.add(look.rate);
        } else {
            self.rates = Mean::NONE;
        }
        let has_idle_core = look.idle_cores >= IDLE_CORES_MIN;
        if calm_for.is_some_and(|time| time >= Duration::from_millis(CALM_MS)) {
            self.set(now, self.helpers - 1);
        } else if saturated_for.is_some_and(|time| time >= Duration::from_millis(SATURATED_MS))
            && had_idle_cores
            && has_idle_core
            && self.helpers < self.helpers_max
            && self.next_try.is_none_or(|next| now >= next)
        {
            self.try_with(now, self.helpers + 1);
        } else if self.helpers > 0
            && is_saturated
            && !has_idle_core
            && lasted(since, now) >= Duration::from_secs(DOUBT_S)
        {
            self.try_with(now, self.helpers - 1);
        }
    }

    fn try_with(&mut self, now: Instant, helpers: usize) {
        let (before, rate) = (self.helpers, self.rates.get());
        self.trial = Some(Trial { before, rate, has_rested: false });
        self.set(now, helpers);
    }

    fn set(&mut self, now: Instant, helpers: usize) {
        self.helpers = helpers;
        self.since = Some(now);
        self.rates = Mean::NONE;
        (self.saturated_since, self.calm_since) = (None, None);
    }
}

/// The mean of the last rates.
#[derive(Clone, Copy, Debug)]
struct Mean {
    rates: [f64; RATES],
    count: usize,
}

impl Mean {
    const NONE: Self = Self { rates: [0.0; RATES], count: 0 };

    fn add(&mut self, rate: f64) {
        self.rates[self.count % RATES] = rate;
        self.count += 1;
    }

    fn get(self) -> f64 {
        let count = self.count.clamp(1, RATES);
        self.rates[..count].iter().sum::<f64>() / count as f64
    }
}

/// Whether `threads` threads would have done all the work.
fn is_calm(look: &Look, threads: usize) -> bool {
    look.busy + look.helpers_busy < CALM * threads as f64
}

fn lasted(since: Instant, now: Instant) -> Duration {
    now.saturating_duration_since(since)
}

/// How long something has been so.
fn held(since: &mut Option<Instant>, is_so: bool, now: Instant) -> Option<Duration> {
    if !is_so {
        *since = None;
        return None;
    }
    Some(lasted(*since.get_or_insert(now), now))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    /// A worker that one core carries `rate` datagrams a second for, and `demand` of them asked for.
    struct World {
        decider: ScalingPolicy,
        now: Instant,
        start: Instant,
        /// The gain of each helper, as a share of the worker's own throughput.
        gain: f64,
        demand: f64,
        idle_cores: f64,
        changes: Vec<(u64, usize)>,
    }

    const ALONE: f64 = 100_000.0;

    impl World {
        fn new(gain: f64, demand: f64, idle_cores: f64) -> Self {
            let now = Instant::now();
            let decider = ScalingPolicy::new(3);
            Self { decider, now, start: now, gain, demand, idle_cores, changes: Vec::new() }
        }

        /// Looks for `ms` milliseconds.
        fn run(&mut self, ms: u64) -> &[(u64, usize)] {
            self.changes.clear();
            for _ in 0..ms / HELP_LOOK_MS {
                self.now += Duration::from_millis(HELP_LOOK_MS);
                let helpers = self.decider.helpers as f64;
                let able = ALONE * (1.0 + helpers * self.gain);
                let rate = able.min(self.demand);
                let threads = helpers + 1.0;
                let busy = (rate / able).min(1.0);
                let look = Look {
                    busy,
                    helpers_busy: busy * helpers,
                    idle_cores: (self.idle_cores - busy * threads).max(0.0),
                    rate,
                };
                if let Some(helpers) = self.decider.handle_look(self.now, &look) {
                    self.changes.push((lasted(self.start, self.now).as_millis() as u64, helpers));
                }
            }
            &self.changes
        }
    }

    #[test]
    fn a_saturated_worker_gets_helpers_while_cores_idle_and_they_help() {
        let mut world = World::new(0.9, 2.5 * ALONE, 8.0);
        assert_eq!(world.run(150), [(100, 1)], "soon");
        assert_eq!(world.run(500).last().map(|(_, helpers)| *helpers), Some(2), "no more needed");
        assert_eq!(world.run(60_000), [], "and it stays so");
        // A load that one thread carries needs no helper.
        world.demand = 0.5 * ALONE;
        assert_eq!(world.run(900), [], "not at once");
        assert_eq!(world.run(2_000).last().map(|(_, helpers)| *helpers), Some(0));
        assert_eq!(world.run(60_000), []);
    }

    #[test]
    fn no_helper_without_an_idle_core_or_without_need() {
        assert_eq!(World::new(0.9, 9.0 * ALONE, 1.5).run(60_000), []);
        assert_eq!(World::new(0.9, 0.85 * ALONE, 8.0).run(60_000), []);
    }

    #[test]
    fn one_that_does_not_help_goes_and_is_tried_ever_more_rarely() {
        let mut world = World::new(0.02, 9.0 * ALONE, 8.0);
        let tries = |changes: &[(u64, usize)]| {
            assert!(changes.iter().all(|(_, helpers)| *helpers <= 1), "{changes:?}");
            changes.iter().filter(|(_, helpers)| *helpers == 1).count()
        };
        let first = tries(world.run(60_000));
        assert!((4..=7).contains(&first), "{first}");
        let later = tries(world.run(600_000));
        assert!((8..=11).contains(&later), "{later}: each minute");
        assert_eq!(world.decider.helpers, 0);
    }

    #[test]
    fn a_flow_that_ends_in_a_trial_does_not_keep_the_next_one_from_having_a_helper() {
        let mut world = World::new(0.9, 9.0 * ALONE, 8.0);
        world.decider = ScalingPolicy::new(1);
        for flow in 0..20 {
            world.demand = 9.0 * ALONE;
            let changes = world.run(200).to_vec();
            assert!(
                changes.first().is_some_and(|change| change.1 == 1),
                "flow {flow}: {changes:?}"
            );
            world.demand = 0.0;
            world.run(5_000);
            assert_eq!(world.decider.helpers, 0, "flow {flow}");
        }
    }

    #[test]
    fn where_all_cores_are_taken_a_helper_has_to_prove_itself_again() {
        // It takes the last core, and gains by it.
        let mut world = World::new(0.9, 9.0 * ALONE, 2.0);
        assert_eq!(world.run(9_000), [(100, 1)]);
        let changes = world.run(60_000).to_vec();
        assert!((8..=12).contains(&changes.len()), "taken away and given back: {changes:?}");
        assert_eq!(world.decider.helpers, 1);
        // Now others need it more.
        world.gain = 0.0;
        let changes = world.run(60_000).to_vec();
        let trials = changes.split_first().unwrap().1.chunks_exact(2);
        assert!(trials.len() > 2 && trials.clone().all(|trial| trial[1].0 - trial[0].0 <= 200));
        assert!(changes[0].1 == 0 && trials.clone().all(|trial| trial[1].1 == 0), "{changes:?}");
    }
}
