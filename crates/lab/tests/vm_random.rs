//! Random sequences of events on hosts. At the end every pair is connected and traffic passes; no overlay
//! packet was ever readable on the wire.

use std::time::{Duration, Instant};

use rand::seq::IndexedRandom;
use rand::{Rng, RngExt, SeedableRng};
use rand_chacha::ChaCha12Rng;
use weft_bench::sandbox::{Container, progress};
use weft_lab::net::guest::wire::Blocked;
use weft_lab::net::guest::{Block, LeakWatch, Stage, figure, seed};
use weft_lab::net::{is_soak, wait_ping};

const HOSTS: usize = 3;
const SEQUENCES: u64 = 5;
const SEQUENCES_SOAK: u64 = 50;
const STEPS_MAX: u32 = 8;
/// Between two steps, at most.
const PAUSE_MAX_MS: u64 = 1_500;
/// From the last step until every pair carries traffic again: a failed path is tried again after up
/// to a minute.
const HEAL_LIMIT_S: u64 = 200;

/// An event on a host.
#[derive(Debug)]
enum Step {
    Connect(usize, usize),
    Forget(usize, usize),
    KillAndLaunch(usize, &'static str),
    Kill(usize),
    StopAndLaunch(usize, &'static str),
    Block(usize, usize, Vec<Blocked>),
    Unblock,
    Pause(u64),
}

/// The hosts as the sequence has left them.
struct World<'a> {
    stage: &'a Stage,
    block: Option<Block<'a>>,
    running: [bool; HOSTS],
}

impl<'a> World<'a> {
    fn carry_out(&mut self, step: &Step) -> anyhow::Result<()> {
        match step {
            Step::Connect(at, to) | Step::Forget(at, to) if self.running[*at] => {
                let verb = if matches!(step, Step::Connect(..)) { "connect" } else { "forget" };
                let target = self.stage.outer().target(self.stage.host(*to));
                // Forgetting a host that was never a target is refused, and that is right.
                self.stage.host(*at).weft(&[verb, &target])?;
            }
            Step::KillAndLaunch(host, engine) => {
                self.kill(*host);
                self.launch(*host, engine)?;
            }
            Step::Kill(host) => self.kill(*host),
            Step::StopAndLaunch(host, engine) => {
                if self.running[*host] {
                    self.stage.host(*host).stop_daemon()?;
                }
                self.launch(*host, engine)?;
            }
            Step::Block(one, other, what) => {
                self.block = None;
                self.block = Some(Block::between(self.stage, *one, *other, what)?);
            }
            Step::Unblock => self.block = None,
            Step::Pause(ms) => std::thread::sleep(Duration::from_millis(*ms)),
            Step::Connect(..) | Step::Forget(..) => {}
        }
        Ok(())
    }

    fn kill(&mut self, host: usize) {
        self.stage.host(host).kill_daemon();
        self.running[host] = false;
    }

    fn launch(&mut self, host: usize, engine: &str) -> anyhow::Result<()> {
        self.running[host] = true;
        self.stage.launch(host, &["--engine", engine])
    }

    /// Restores the network, starts every daemon, and connects each host to the others.
    fn mend(&mut self) -> anyhow::Result<()> {
        self.block = None;
        for host in 0..HOSTS {
            if !self.running[host] {
                self.launch(host, "auto")?;
            }
        }
        for host in 0..HOSTS {
            for other in (0..HOSTS).filter(|other| *other != host) {
                self.carry_out(&Step::Connect(host, other))?;
            }
        }
        Ok(())
    }
}

/// Engines that can all talk to each other. Each pair of `kernel` and `userspace` in one network has a path, since
/// ESP in UDP joins them.
const ENGINES: [&str; 3] = ["auto", "kernel", "userspace"];

fn random_step(rng: &mut ChaCha12Rng) -> Step {
    let host = rng.random_range(0..HOSTS);
    let other = (host + rng.random_range(1..HOSTS)) % HOSTS;
    let engine = ENGINES.choose(rng).copied().unwrap_or("auto");
    match rng.random_range(0..14) {
        0 | 1 => Step::Connect(host, other),
        2 | 3 => Step::Forget(host, other),
        4 | 5 => Step::KillAndLaunch(host, engine),
        6 => Step::Kill(host),
        7 => Step::StopAndLaunch(host, engine),
        8..=10 => {
            let kinds = [
                vec![Blocked::Protocol50],
                vec![Blocked::DataPorts],
                vec![Blocked::Protocol50, Blocked::DataPorts],
                vec![Blocked::VectorPort],
                vec![Blocked::All],
            ];
            let index = rng.random_range(0..kinds.len());
            Step::Block(host, other, kinds.into_iter().nth(index).unwrap_or_default())
        }
        11 => Step::Unblock,
        _ => Step::Pause(rng.next_u64() % PAUSE_MAX_MS),
    }
}

#[test]
fn random_sequences_end_with_every_pair_connected_and_nothing_readable() -> anyhow::Result<()> {
    let seed = seed()?;
    let stage = Stage::new(HOSTS)?.launched(&[&[], &[], &[]])?;
    let containers: Vec<Container> =
        (0..HOSTS).map(|host| stage.host(host).add_container("c")).collect::<Result<_, _>>()?;
    let count = if is_soak() { SEQUENCES_SOAK } else { SEQUENCES };
    for number in 0..count {
        // Each sequence can be run alone: the first of a run is that of its seed.
        let seed = seed.wrapping_add(number);
        progress::step(&format!("sequence {} of {count}, seed {seed}", number + 1));
        let mut told = Vec::new();
        sequence(&stage, &containers, seed, &mut told)
            .map_err(|error| error.context(stage.diagnosis()))
            .map_err(|error| error.context(format!("seed {seed}: {told:?}")))?;
    }
    Ok(())
}

fn sequence(
    stage: &Stage,
    containers: &[Container],
    seed: u64,
    told: &mut Vec<String>,
) -> anyhow::Result<()> {
    let mut rng = ChaCha12Rng::seed_from_u64(seed);
    let watch = LeakWatch::start(stage)?;
    let mut load = Vec::new();
    for (from, to) in [(0, 1), (1, 2), (2, 0)] {
        let to = containers[to].ipv4()?.to_string();
        let pattern = "7468697320736e6e6576657220626520"; // "this s…never be "
        let words = ["ping", "-n", "-q", "-i", "0.05", "-p", pattern, &to];
        load.push(containers[from].spawn(&words)?);
    }
    let mut world = World { stage, block: None, running: [true; HOSTS] };
    for _ in 0..rng.random_range(3..=STEPS_MAX) {
        let step = random_step(&mut rng);
        told.push(format!("{step:?}"));
        progress::note(&format!("{step:?}"));
        world.carry_out(&step)?;
    }
    world.mend()?;
    let start = Instant::now();
    let end = start + Duration::from_secs(HEAL_LIMIT_S);
    let left = || end.saturating_duration_since(Instant::now()) / weft_bench::sandbox::slowness();
    for from in containers {
        for to in containers {
            wait_ping(from, to.ipv4()?.into(), left())?;
        }
    }
    for host in stage.sandbox().hosts() {
        host.wait_connected(HOSTS - 1, left())?;
    }
    figure("whole again after", format!("{:.1} s", start.elapsed().as_secs_f64()));
    drop(load);
    let seen = watch.finish()?;
    anyhow::ensure!(seen.readable == 0, "{} overlay packets could be read", seen.readable);
    Ok(())
}
