//! Fair shares: three hosts that send to a fourth at once, alike and unlike; two containers of one host;
//! and the flows of one container.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::net::IpAddr;
use std::thread;

use serde::{Deserialize, Serialize};

use super::measure::{self, Datagrams, SMALL_PAYLOAD_BYTES, Servers};
use super::rows::CONNECT_LIMIT;
use super::{Plan, engine, stats};
use crate::sandbox::{Container, Sandbox, SandboxError, SandboxOptions, Underlay, progress};

/// Hosts that send.
const SENDERS: usize = 3;
/// Streams of the sender that has many.
const MANY: u32 = 8;

/// The traffic of one sender.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Load {
    /// TCP with this many streams.
    Streams(u32),
    /// Datagrams of 64 B, as many as it can.
    Datagrams,
}

impl Load {
    fn name(self) -> String {
        match self {
            Self::Streams(1) => "1 stream".to_owned(),
            Self::Streams(count) => format!("{count} streams"),
            Self::Datagrams => format!("UDP, {SMALL_PAYLOAD_BYTES} B"),
        }
    }

    const fn unit(self) -> &'static str {
        match self {
            Self::Streams(_) => "Gbit/s",
            Self::Datagrams => "kpps",
        }
    }
}

/// Loads that run at once: one for each host, then one for a second container beside the first host's.
const SCENES: [(&str, [Option<Load>; SENDERS + 1]); 3] = [
    ("alike", [Some(Load::Streams(1)), Some(Load::Streams(1)), Some(Load::Streams(1)), None]),
    ("unlike", [Some(Load::Streams(1)), Some(Load::Streams(MANY)), Some(Load::Datagrams), None]),
    ("neighbours", [Some(Load::Streams(1)), None, None, Some(Load::Datagrams)]),
];
/// The scene of one sender's streams.
const FLOWS: &str = "flows of one host";

/// Senders side by side on one underlay: medians over the rounds.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct FairScene {
    /// Its name in the table.
    pub scene: String,
    /// `veth` or `wire`.
    pub underlay: String,
    /// Jain's index: 1 at best, 1 / senders where one gets everything. It covers the share of its rate
    /// alone that each sender keeps. For the flows of one host, it covers their rates.
    pub jain: Option<f64>,
    /// Its least and greatest value over the rounds.
    pub jain_spread: Option<(f64, f64)>,
    /// Each sender.
    pub shares: Vec<Share>,
    /// How many rounds the medians are of.
    pub rounds: usize,
}

/// The rates of one sender.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Share {
    /// Its name.
    pub sender: String,
    /// Its load.
    pub load: String,
    /// `Gbit/s` or `kpps` (thousands of datagrams a second), as they arrive.
    pub unit: String,
    /// Alone.
    pub alone: Option<f64>,
    /// While all senders send.
    pub together: Option<f64>,
    /// Least and greatest value of that over the rounds.
    #[serde(default)]
    pub together_spread: Option<(f64, f64)>,
}

/// One round of a scene: each sender's rate alone and together.
type Round = Vec<(f64, f64)>;

/// Jain's fairness index: (sum of x)^2 / (n times the sum of x^2); `None` if all are 0, or there are none.
#[must_use]
pub fn jain(rates: &[f64]) -> Option<f64> {
    let sum: f64 = rates.iter().sum();
    let squares: f64 = rates.iter().map(|rate| rate * rate).sum();
    (squares > 0.0).then(|| sum * sum / (rates.len() as f64 * squares))
}

/// A sending container, and the container on the first host that receives from it.
struct Pair {
    client: Container,
    address: IpAddr,
    servers: Servers,
}

impl Pair {
    fn rate(&mut self, load: Load, binary: &str, seconds: u64) -> Result<f64, SandboxError> {
        let (client, server) = (self.client.netns(), self.address);
        match load {
            Load::Streams(count) => Ok(measure::tcp(client, server, count, seconds)?.gbps),
            Load::Datagrams => {
                let (sink, seconds) = (&mut self.servers.sink, seconds as f64);
                let mut datagrams = Datagrams { client, server, binary, sink, seconds };
                Ok(datagrams.trial(SMALL_PAYLOAD_BYTES, 0.0)?.received_per_s / 1e3)
            }
        }
    }
}

fn start(plan: &Plan, binary: &str) -> Result<(Sandbox, Vec<Pair>), SandboxError> {
    progress::step(&format!("starting {SENDERS} hosts that send, and one that receives"));
    let hosts = 1 + SENDERS;
    let options = SandboxOptions { hosts, mtu: plan.link_mtu, ..SandboxOptions::default() };
    let sandbox = Sandbox::new(&options)?;
    sandbox.launch_all(&["--engine", "userspace"])?;
    for host in sandbox.hosts() {
        host.wait_connected(SENDERS, CONNECT_LIMIT)?;
    }
    let mut pairs = Vec::new();
    // The last sender is the first one's neighbour.
    for (number, host) in (1..hosts).chain([1]).enumerate() {
        let server = sandbox.host(0).add_container(&format!("to{number}"))?;
        let client = sandbox.host(host).add_container(&format!("from{number}"))?;
        let address = server.ipv4()?.into();
        client.ping(address)?;
        let servers = Servers::start_in(server.netns(), address, binary)?;
        pairs.push(Pair { client, address, servers });
    }
    Ok((sandbox, pairs))
}

/// Measures all scenes in turns.
///
/// # Errors
/// Returns an error if a daemon or a client fails.
pub(crate) fn measure(plan: &Plan, binary: &str) -> Result<Vec<FairScene>, SandboxError> {
    let (sandbox, mut pairs) = start(plan, binary)?;
    let seconds = plan.lengths.tcp_seconds;
    let mut scenes = Vec::new();
    for underlay in plan.underlays {
        sandbox.set_underlay(*underlay)?;
        let mut rounds: [Vec<Round>; SCENES.len()] = Default::default();
        let mut flows = Vec::new();
        for round in 1..=plan.rounds {
            for ((name, loads), rounds) in SCENES.iter().zip(&mut rounds) {
                let of = plan.rounds;
                progress::step(&format!("{}: round {round} of {of}, {name}", underlay.name()));
                rounds.push(scene(&mut pairs, loads, binary, seconds)?);
            }
            let Some(first) = pairs.first() else { continue };
            let client = first.client.netns();
            flows.push(measure::tcp_streams(client, first.address, MANY, seconds)?);
        }
        let of = SCENES.iter().zip(&rounds);
        scenes.extend(of.map(|((name, loads), rounds)| scene_of(name, *underlay, loads, rounds)));
        scenes.push(flows_of(*underlay, &flows));
    }
    Ok(scenes)
}

/// Each sender alone, then all at once.
fn scene(
    pairs: &mut [Pair],
    loads: &[Option<Load>],
    binary: &str,
    seconds: u64,
) -> Result<Round, SandboxError> {
    let senders = pairs.iter_mut().zip(loads);
    let mut senders: Vec<_> = senders.filter_map(|(pair, load)| Some((pair, (*load)?))).collect();
    let mut alone = Vec::new();
    for (pair, load) in &mut senders {
        alone.push(pair.rate(*load, binary, seconds)?);
    }
    let together: Result<Vec<f64>, SandboxError> = thread::scope(|scope| {
        let senders: Vec<_> = senders
            .into_iter()
            .map(|(pair, load)| scope.spawn(move || pair.rate(load, binary, seconds)))
            .collect();
        let join = |sender: thread::ScopedJoinHandle<'_, _>| {
            sender.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        senders.into_iter().map(join).collect()
    });
    Ok(alone.into_iter().zip(together?).collect())
}

fn scene_of(name: &str, underlay: Underlay, loads: &[Option<Load>], rounds: &[Round]) -> FairScene {
    let kept = |round: &Round| {
        let kept = round.iter().map(|(alone, together)| together / alone.max(f64::MIN_POSITIVE));
        jain(&kept.collect::<Vec<f64>>())
    };
    let indices: Vec<f64> = rounds.iter().filter_map(kept).collect();
    let values = |sender: usize, pick: fn(&(f64, f64)) -> f64| -> Vec<f64> {
        rounds.iter().filter_map(|round| round.get(sender).map(pick)).collect()
    };
    let alone = |sender: usize| stats::median(&values(sender, |rates| rates.0));
    let loads = loads.iter().enumerate().filter_map(|(place, load)| Some((place, (*load)?)));
    let shares = loads.enumerate().map(|(sender, (place, load))| Share {
        sender: match place < SENDERS {
            true => format!("host {}", place + 2),
            false => "its neighbour".to_owned(),
        },
        load: load.name(),
        unit: load.unit().to_owned(),
        alone: alone(sender).map(engine::hundredths),
        ..together(&values(sender, |rates| rates.1))
    });
    FairScene { shares: shares.collect(), ..named(name, underlay, &indices) }
}

fn flows_of(underlay: Underlay, rounds: &[Vec<f64>]) -> FairScene {
    let indices: Vec<f64> = rounds.iter().filter_map(|rates| jain(rates)).collect();
    let values = |flow: usize| -> Vec<f64> {
        rounds.iter().filter_map(|rates| rates.get(flow).copied()).collect()
    };
    let shares = (0..MANY as usize).map(|flow| Share {
        sender: format!("stream {}", flow + 1),
        load: Load::Streams(1).name(),
        unit: Load::Streams(1).unit().to_owned(),
        ..together(&values(flow))
    });
    FairScene { shares: shares.collect(), ..named(FLOWS, underlay, &indices) }
}

/// A share with the rates while all send.
fn together(rates: &[f64]) -> Share {
    let spread = stats::spread(rates);
    Share {
        together: stats::median(rates).map(engine::hundredths),
        together_spread: spread.map(|(a, b)| (engine::hundredths(a), engine::hundredths(b))),
        ..Share::default()
    }
}

fn named(name: &str, underlay: Underlay, indices: &[f64]) -> FairScene {
    let thousandths = |value: f64| (value * 1e3).round() / 1e3;
    FairScene {
        scene: name.to_owned(),
        underlay: underlay.name().to_owned(),
        jain: stats::median(indices).map(thousandths),
        jain_spread: stats::spread(indices).map(|(a, b)| (thousandths(a), thousandths(b))),
        shares: Vec::new(),
        rounds: indices.len(),
    }
}

/// The exact commands, by measurement.
pub(crate) fn commands(plan: &Plan) -> BTreeMap<String, String> {
    let seconds = plan.lengths.tcp_seconds;
    let size = SMALL_PAYLOAD_BYTES;
    let flood = "weft-bench peer udp-flood --connect SERVER:7002";
    BTreeMap::from([
        ("hosts".to_owned(), "weft launch --engine userspace on each of four".to_owned()),
        ("streams".to_owned(), format!("iperf3 -J -c SERVER -p 5201 -C cubic -P N -t {seconds}")),
        ("datagrams".to_owned(), format!("{flood} --size {size} --seconds {seconds} --rate 0")),
        (
            "jain".to_owned(),
            "of the rate together / the rate alone of each sender; of flows: of their rates"
                .to_owned(),
        ),
    ])
}

/// The table in Markdown.
#[must_use]
pub fn table(scenes: &[FairScene]) -> String {
    let mut text = String::from(
        "| scene             | underlay | sender        | load      | unit   |  alone | together | kept % | Jain (min to max)      |\n\
         | ----------------- | -------- | ------------- | --------- | ------ | -----: | -------: | -----: | ---------------------: |\n",
    );
    let cell = |value: Option<f64>, digits: usize| {
        value.map_or_else(|| "–".to_owned(), |value| format!("{value:.digits$}"))
    };
    for scene in scenes {
        for (number, share) in scene.shares.iter().enumerate() {
            let kept = share.together.zip(share.alone).filter(|(_, alone)| *alone > 0.0);
            let kept = kept.map(|(together, alone)| together / alone * 100.0);
            let jain = match scene.jain.zip(scene.jain_spread).filter(|_| number == 0) {
                Some((jain, (least, most))) => format!("{jain:.3} ({least:.3} to {most:.3})"),
                None => String::new(),
            };
            let _ = writeln!(
                text,
                "| {:<17} | {:<8} | {:<13} | {:<9} | {:<6} | {:>6} | {:>8} | {:>6} | {jain:>22} |",
                scene.scene,
                scene.underlay,
                share.sender,
                share.load,
                share.unit,
                cell(share.alone, 2),
                cell(share.together, 2),
                cell(kept, 0),
            );
        }
    }
    text
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn jains_index_is_one_of_equals_and_a_share_where_one_takes_all() {
        let near = |a: Option<f64>, b: f64| (a.unwrap() - b).abs() < 1e-9;
        assert!(near(jain(&[2.0, 2.0, 2.0]), 1.0));
        assert!(near(jain(&[5.0, 0.0, 0.0]), 1.0 / 3.0));
        assert!(near(jain(&[1.0, 2.0, 3.0]), 36.0 / 42.0));
        assert_eq!((jain(&[]), jain(&[0.0])), (None, None));
    }

    #[test]
    fn a_scene_judges_what_each_keeps_of_its_rate_alone() {
        let (name, loads) = &SCENES[1];
        // Each sender keeps a third of its rate.
        let rounds = vec![vec![(6.0, 2.0), (9.0, 3.0), (300.0, 100.0)]; 3];
        let scene = scene_of(name, Underlay::Veth, loads, &rounds);
        assert_eq!((scene.jain, scene.rounds), (Some(1.0), 3));
        assert_eq!(scene.shares[2].unit, "kpps");
        let starved = vec![vec![(6.0, 0.0), (9.0, 9.0), (300.0, 0.0)]];
        assert_eq!(scene_of(name, Underlay::Veth, loads, &starved).jain, Some(0.333));
    }

    #[test]
    fn the_table_has_a_line_for_each_sender_and_flow() {
        let rounds = vec![vec![(6.0, 2.0), (9.0, 3.0), (300.0, 100.0)]];
        let (name, loads) = &SCENES[1];
        let scenes = [
            scene_of(name, Underlay::Veth, loads, &rounds),
            scene_of(
                SCENES[2].0,
                Underlay::Veth,
                &SCENES[2].1,
                &[vec![(6.0, 3.0), (300.0, 200.0)]],
            ),
            flows_of(Underlay::Veth, &[vec![1.0; 8]]),
        ];
        let table = table(&scenes);
        let widths: Vec<usize> = table.lines().map(|line| line.chars().count()).collect();
        assert_eq!(widths.len(), 2 + 3 + 2 + 8);
        assert!(widths.iter().all(|width| *width == widths[0]), "{table}");
        assert!(
            table.contains("its neighbour | UDP, 64 B | kpps   | 300.00 |   200.00 |     67 |"),
            "{table}"
        );
        assert!(table.contains("33 |") && table.contains("1.000 (1.000 to 1.000)"), "{table}");
    }
}
