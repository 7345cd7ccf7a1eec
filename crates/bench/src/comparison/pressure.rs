//! More load than the path carries: how long TCP's segments wait, which are sent again, and where packets
//! are dropped.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use weft_api::call;
use weft_api::{Client, Traffic};

use super::measure::{self, Servers, TcpPressure};
use super::rows::{self, Row, WeftPair};
use super::{Plan, engine, stats};
use crate::sandbox::{
    FREE_MS, HELD_MS, Held, Sandbox, SandboxError, SocketQueues, Underlay, progress,
};

/// The rows that are measured unless others are named.
pub(crate) const ROWS: [&str; 3] = [rows::VXLAN, rows::WEFT, rows::WEFT_PORTS];
/// Seconds of requests and answers at rest.
const REST_SECONDS: f64 = 1.0;
/// Other programs' threads for each processor.
const SPINNERS_PER_CORE: usize = 2;
/// How often the queue of the receiver's sockets is looked at, in milliseconds.
const LOOK_MS: u64 = 5;
/// The start of the names of containers' ports on a host, and the vector engine's port: Weft reports the
/// drops of these.
const PORT_PREFIX: &str = "weftv";
const TAP: &str = "weft-tap";
/// A container's interface, which is Weft's too where it is a direct port.
const INTERFACE: &str = "weft0";
/// The name for the drops that Weft reports for them.
const PORTS_DROPPED: &str = "container_ports";

/// The reason why the path does not carry the load.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Obstacle {
    /// Its own limit.
    None,
    /// Other programs want all processors too.
    Programs,
    /// The receiving daemon stands still most of the time.
    Held,
}

/// A load, and the obstacle to it.
#[derive(Debug, Clone, Copy)]
struct Scene {
    name: &'static str,
    streams: u32,
    obstacle: Obstacle,
}

const SCENES: [Scene; 4] = [
    Scene { name: "1 stream", streams: 1, obstacle: Obstacle::None },
    Scene { name: "8 streams", streams: 8, obstacle: Obstacle::None },
    Scene { name: "8, processors busy", streams: 8, obstacle: Obstacle::Programs },
    Scene { name: "8, receiver held", streams: 8, obstacle: Obstacle::Held },
];

/// One way in one scene: medians over the rounds.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct PressureRow {
    /// The way.
    pub name: String,
    /// `veth` or `wire`.
    pub underlay: String,
    /// The load, and the obstacle to it.
    pub scene: String,
    /// Gbit/s that the receiver got, of all streams together.
    pub gbps: Option<f64>,
    /// Least and greatest value of that over the rounds.
    pub gbps_spread: Option<(f64, f64)>,
    /// A round trip while nothing else is sent: the median of requests and answers, microseconds.
    pub rest_us: Option<f64>,
    /// The smoothed round-trip time that TCP measured under load, mean over time and streams, microseconds.
    pub load_us: Option<f64>,
    /// The greatest of them, microseconds.
    pub load_max_us: Option<f64>,
    /// Segments sent again of a million.
    pub resent_ppm: Option<f64>,
    /// The most that was seen in the queue of one of the receiving engine's sockets, KiB.
    pub queue_max_kib: Option<f64>,
    /// Packets or super-packets dropped by Weft, by reason, over all rounds.
    pub dropped: BTreeMap<String, u64>,
    /// Those dropped by devices, by device, over all rounds: the underlay's, the switch's, the containers'.
    pub device_dropped: BTreeMap<String, u64>,
    /// Resident memory of the daemon of one end (the larger) at the end of the run, MiB.
    pub rss_mib: Option<f64>,
    /// How many rounds the medians are of.
    pub rounds: usize,
}

/// One round.
#[derive(Debug, Clone)]
struct Sample {
    rest_us: f64,
    tcp: TcpPressure,
    queue_max_kib: Option<f64>,
    dropped: Drops,
    rss_mib: Option<f64>,
}

/// A way, the hosts that it goes between, and the daemon that receives.
struct Stand<'a> {
    row: &'a Row,
    pair: Option<&'a WeftPair<'a>>,
    sandbox: &'a Sandbox,
}

impl<'a> Stand<'a> {
    fn new(row: &'a Row, pairs: &'a [WeftPair<'a>], sandbox: &'a Sandbox) -> Self {
        let pair = pairs.iter().find(|pair| pair.row == row.name);
        Self { row, pair, sandbox: pair.map_or(sandbox, |pair| pair.sandbox) }
    }

    fn receiver(&self) -> Option<u32> {
        self.pair.and_then(|pair| pair.sandbox.host(1).daemon_pid())
    }

    fn scenes(&self) -> impl Iterator<Item = (usize, Scene)> {
        let has_daemon = self.receiver().is_some();
        SCENES
            .into_iter()
            .enumerate()
            .filter(move |(_, scene)| has_daemon || scene.obstacle != Obstacle::Held)
    }

    fn measure(&self, scene: Scene, rest_us: f64, seconds: u64) -> Result<Sample, SandboxError> {
        let before = self.drops()?;
        let spinners = (scene.obstacle == Obstacle::Programs).then(Spinners::start);
        let held = self.receiver().filter(|_| scene.obstacle == Obstacle::Held).map(Held::process);
        let result = self.run(scene.streams, seconds);
        drop((spinners, held));
        let (tcp, queue_max_kib) = result?;
        let rss = self.row.daemons.iter().filter_map(|pid| measure::resident_mib(*pid));
        Ok(Sample {
            rest_us,
            tcp,
            queue_max_kib,
            dropped: self.drops()?.since(&before),
            rss_mib: rss.reduce(f64::max),
        })
    }

    /// A run of TCP, and the most that stood in the queue of a socket meanwhile, KiB.
    fn run(&self, streams: u32, seconds: u64) -> Result<(TcpPressure, Option<f64>), SandboxError> {
        let (is_over, most) = (AtomicBool::new(false), AtomicU64::new(0));
        let receiver = self.receiver();
        let tcp = thread::scope(|scope| {
            let look = |pid| {
                while !is_over.load(Ordering::Relaxed) {
                    most.fetch_max(SocketQueues::of(pid).fullest_bytes, Ordering::Relaxed);
                    thread::sleep(Duration::from_millis(LOOK_MS));
                }
            };
            if let Some(pid) = receiver {
                scope.spawn(move || look(pid));
            }
            let Row { client, server_address, .. } = self.row;
            let tcp = measure::tcp_pressure(client, *server_address, streams, seconds);
            is_over.store(true, Ordering::Relaxed);
            tcp
        })?;
        Ok((tcp, receiver.map(|_| most.into_inner() as f64 / 1024.0)))
    }

    fn drops(&self) -> Result<Drops, SandboxError> {
        let mut drops = Drops::default();
        if let Some(pair) = self.pair {
            for host in pair.sandbox.hosts() {
                drops.add_weft(&traffic(&host.runtime_directory())?);
            }
        }
        let has_direct_ports = self.pair.is_some_and(|pair| pair.way.ports == "direct");
        let hosts = self.sandbox.hosts().iter().map(|host| host.netns());
        for netns in hosts.chain([&self.row.client, &self.row.server]) {
            drops.add_devices(&netns.ip("-j -s link")?.json()?, has_direct_ports);
        }
        Ok(drops)
    }
}

/// Dropped packets, by place and reason.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Drops {
    weft: BTreeMap<String, u64>,
    devices: BTreeMap<String, u64>,
}

impl Drops {
    fn add_weft(&mut self, traffic: &Traffic) {
        let ports: u64 = traffic.containers.iter().map(|container| container.dropped).sum();
        let reasons = traffic.drops.iter().map(|(reason, count)| (reason.as_str(), *count));
        for (reason, count) in reasons.chain([(PORTS_DROPPED, ports)]) {
            *self.weft.entry(reason.to_owned()).or_default() += count;
        }
    }

    /// Adds the drops of devices that Weft does not report.
    fn add_devices(&mut self, links: &Value, has_direct_ports: bool) {
        for link in links.as_array().map(Vec::as_slice).unwrap_or_default() {
            let name = link["ifname"].as_str().unwrap_or_default();
            let is_told = name == TAP || name.starts_with(PORT_PREFIX);
            if is_told || (has_direct_ports && name == INTERFACE) {
                continue;
            }
            let dropped = |way: &str| link["stats64"][way]["dropped"].as_u64().unwrap_or_default();
            *self.devices.entry(name.to_owned()).or_default() += dropped("rx") + dropped("tx");
        }
    }

    /// Drops since an earlier reading, without the counters that did not grow.
    fn since(&self, earlier: &Self) -> Self {
        let since = |now: &BTreeMap<String, u64>, before: &BTreeMap<String, u64>| {
            let grown = now.iter().map(|(name, count)| {
                let before = before.get(name).copied().unwrap_or_default();
                (name.clone(), count.saturating_sub(before))
            });
            grown.filter(|(_, count)| *count > 0).collect()
        };
        Self {
            weft: since(&self.weft, &earlier.weft),
            devices: since(&self.devices, &earlier.devices),
        }
    }
}

fn traffic(runtime_directory: &Path) -> Result<Traffic, SandboxError> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(SandboxError::io("start a runtime"))?;
    let client = Client::new(runtime_directory);
    runtime.block_on(client.ask::<call::Traffic>()).map_err(|error| {
        SandboxError::UnexpectedOutput {
            command: "GET /v1/traffic".to_owned(),
            why: error.to_string(),
        }
    })
}

/// Threads that spin until this is dropped.
struct Spinners {
    is_over: Arc<AtomicBool>,
    threads: Vec<thread::JoinHandle<()>>,
}

impl Spinners {
    fn start() -> Self {
        let is_over = Arc::new(AtomicBool::new(false));
        let count = SPINNERS_PER_CORE * thread::available_parallelism().map_or(1, usize::from);
        let spinner = |_| {
            let is_over = Arc::clone(&is_over);
            thread::spawn(move || {
                while !is_over.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            })
        };
        let threads = (0..count).map(spinner).collect();
        Self { is_over, threads }
    }
}

impl Drop for Spinners {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// Measures all ways in all scenes, in turns.
///
/// # Errors
/// Returns an error if a daemon or a client fails.
pub(crate) fn measure(
    rows: &[Row],
    pairs: &[WeftPair<'_>],
    sandbox: &Sandbox,
    binary: &str,
    plan: &Plan,
) -> Result<Vec<PressureRow>, SandboxError> {
    let stands: Vec<Stand<'_>> = rows.iter().map(|row| Stand::new(row, pairs, sandbox)).collect();
    let mut measured = Vec::new();
    for underlay in plan.underlays {
        super::set_underlay(sandbox, pairs, *underlay)?;
        let mut samples = vec![[const { Vec::new() }; SCENES.len()]; stands.len()];
        for round in 1..=plan.rounds {
            for (stand, samples) in stands.iter().zip(&mut samples) {
                let (on, of, name) = (underlay.name(), plan.rounds, stand.row.name);
                progress::step(&format!("{on}: round {round} of {of}, {name}"));
                let _servers = Servers::start(stand.row, binary)?;
                let rest_us = measure::requests(stand.row, binary, REST_SECONDS)?.p50_us;
                for (number, scene) in stand.scenes() {
                    let sample = stand.measure(scene, rest_us, plan.lengths.tcp_seconds)?;
                    samples[number].push(sample);
                }
            }
        }
        for (stand, samples) in stands.iter().zip(&samples) {
            let rows = stand.scenes().map(|(number, scene)| (scene, &samples[number]));
            measured.extend(rows.map(|(scene, of)| row_of(stand.row.name, *underlay, scene, of)));
        }
    }
    super::set_underlay(sandbox, pairs, Underlay::Veth)?;
    Ok(measured)
}

fn row_of(name: &str, underlay: Underlay, scene: Scene, samples: &[Sample]) -> PressureRow {
    let values =
        |pick: fn(&Sample) -> Option<f64>| samples.iter().filter_map(pick).collect::<Vec<f64>>();
    let whole = |pick: fn(&Sample) -> Option<f64>| stats::median(&values(pick)).map(f64::round);
    let gbps = values(|sample| Some(sample.tcp.gbps));
    let spread = stats::spread(&gbps);
    let sum = |pick: fn(&Sample) -> &BTreeMap<String, u64>| {
        let mut sums = BTreeMap::new();
        for (name, count) in samples.iter().flat_map(pick) {
            *sums.entry(name.clone()).or_default() += count;
        }
        sums
    };
    PressureRow {
        name: name.to_owned(),
        underlay: underlay.name().to_owned(),
        scene: scene.name.to_owned(),
        gbps: stats::median(&gbps).map(engine::hundredths),
        gbps_spread: spread.map(|(a, b)| (engine::hundredths(a), engine::hundredths(b))),
        rest_us: whole(|sample| Some(sample.rest_us)),
        load_us: whole(|sample| Some(sample.tcp.rtt_us)),
        load_max_us: whole(|sample| Some(sample.tcp.rtt_max_us)),
        resent_ppm: whole(|sample| Some(sample.tcp.resent_ppm)),
        queue_max_kib: whole(|sample| sample.queue_max_kib),
        dropped: sum(|sample| &sample.dropped.weft),
        device_dropped: sum(|sample| &sample.dropped.devices),
        rss_mib: whole(|sample| sample.rss_mib),
        rounds: samples.len(),
    }
}

/// The exact commands, by measurement.
pub(crate) fn commands(plan: &Plan) -> BTreeMap<String, String> {
    let seconds = plan.lengths.tcp_seconds;
    let command = |(name, text): (&str, String)| (name.to_owned(), text);
    BTreeMap::from(
        [
            ("streams", format!("iperf3 -J -c SERVER -p 5201 -C cubic -P N -t {seconds} -i 0.1")),
            (
                "at rest",
                format!("weft-bench peer rr-client --connect SERVER:7001 --seconds {REST_SECONDS}"),
            ),
            (
                "under load",
                "mean_rtt and max_rtt of iperf3's streams: TCP's smoothed round-trip time"
                    .to_owned(),
            ),
            (
                "processors busy",
                format!("{SPINNERS_PER_CORE} threads for each processor that do nothing but run"),
            ),
            (
                "receiver held",
                format!(
                    "the receiving daemon is stopped (SIGSTOP) for {HELD_MS} ms of each {}",
                    HELD_MS + FREE_MS
                ),
            ),
            (
                "queue",
                "the most in one of the receiving host's UDP sockets (/proc/net/udp, udp6)"
                    .to_owned(),
            ),
            (
                "dropped",
                "GET /v1/traffic of both hosts; devices: ip -s link of hosts and containers"
                    .to_owned(),
            ),
        ]
        .map(command),
    )
}

/// The table in Markdown.
#[must_use]
pub fn table(rows: &[PressureRow]) -> String {
    let mut text = String::from(
        "| system                    | underlay | scene              | Gbit/s (min to max)    | at rest µs | under load µs | most µs | again ppm | queue KiB | dropped by Weft | by devices | RSS MiB |\n\
         | ------------------------- | -------- | ------------------ | ---------------------: | ---------: | ------------: | ------: | --------: | --------: | --------------- | ---------- | ------: |\n",
    );
    let cell = |value: Option<f64>, digits: usize| {
        value.map_or_else(|| "–".to_owned(), |value| format!("{value:.digits$}"))
    };
    for row in rows {
        let spread = row.gbps_spread;
        let spread = spread.map_or_else(String::new, |(a, b)| format!(" ({a:.2} to {b:.2})"));
        let by_weft = dropped_by_weft(row);
        let _ = writeln!(
            text,
            "| {:<25} | {:<8} | {:<18} | {:>22} | {:>10} | {:>13} | {:>7} | {:>9} | {:>9} | {by_weft:<15} | {:<10} | {:>7} |",
            row.name,
            row.underlay,
            row.scene,
            format!("{}{spread}", cell(row.gbps, 2)),
            cell(row.rest_us, 0),
            cell(row.load_us, 0),
            cell(row.load_max_us, 0),
            cell(row.resent_ppm, 0),
            cell(row.queue_max_kib, 0),
            named(&row.device_dropped),
            cell(row.rss_mib, 0),
        );
    }
    text
}

/// Weft's drops by reason; a row without a daemon has none to ask.
pub(super) fn dropped_by_weft(row: &PressureRow) -> String {
    if row.queue_max_kib.is_some() { named(&row.dropped) } else { "–".to_owned() }
}

fn named(counts: &BTreeMap<String, u64>) -> String {
    if counts.is_empty() {
        return "nothing".to_owned();
    }
    counts.iter().map(|(name, count)| format!("{name} {count}")).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use weft_api::ContainerTraffic;

    fn sample(gbps: f64, overflows: u64) -> Sample {
        let weft = match overflows {
            0 => BTreeMap::new(),
            overflows => BTreeMap::from([("socket_overflows".to_owned(), overflows)]),
        };
        Sample {
            rest_us: 60.0,
            tcp: TcpPressure { gbps, resent_ppm: 10.4, rtt_us: 900.0, rtt_max_us: 4_000.0 },
            queue_max_kib: Some(700.0),
            dropped: Drops { weft, devices: BTreeMap::new() },
            rss_mib: Some(24.0),
        }
    }

    #[test]
    fn a_row_has_the_medians_of_its_rounds_and_all_their_drops() {
        let samples = [sample(6.0, 3), sample(8.0, 0), sample(7.0, 4)];
        let row = row_of(rows::WEFT, Underlay::Veth, SCENES[1], &samples);
        assert_eq!((row.gbps, row.gbps_spread, row.rounds), (Some(7.0), Some((6.0, 8.0)), 3));
        assert_eq!(
            (row.rest_us, row.load_us, row.resent_ppm),
            (Some(60.0), Some(900.0), Some(10.0))
        );
        assert_eq!(row.dropped, BTreeMap::from([("socket_overflows".to_owned(), 7)]));
    }

    #[test]
    fn the_table_names_what_was_dropped_and_says_where_nothing_was() {
        let of =
            |overflows| row_of(rows::WEFT, Underlay::Veth, SCENES[1], &[sample(6.0, overflows)]);
        let plain = PressureRow { queue_max_kib: None, ..of(0) };
        let text = table(&[of(3), of(0), plain]);
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[2].contains("| socket_overflows 3 | nothing "), "{text}");
        assert!(lines[3].contains("| nothing         | nothing "), "{text}");
        assert!(lines[4].contains("| –               | nothing "), "{text}");
    }

    #[test]
    fn drops_are_those_since_the_reading_before() {
        let link = |name: &str, rx: u64, tx: u64| serde_json::json!({"ifname": name, "stats64": {"rx": {"dropped": rx}, "tx": {"dropped": tx}}});
        let (mut before, mut after) = (Drops::default(), Drops::default());
        let links = |rx: u64| serde_json::json!([link("eth0", rx, 2), link("weftv1", rx, 0)]);
        before.add_devices(&links(1), false);
        after.add_devices(&links(5), false);
        assert_eq!(after.since(&before).devices, BTreeMap::from([("eth0".to_owned(), 4)]));
        let interface = serde_json::json!([link("weft0", 1, 1)]);
        after.add_devices(&interface, true);
        assert_eq!(after.devices.get("weft0"), None);
        after.add_devices(&interface, false);
        assert_eq!(after.devices.get("weft0"), Some(&2));
        let container = ContainerTraffic { dropped: 3, ..ContainerTraffic::default() };
        after.add_weft(&Traffic { containers: vec![container; 2], ..Traffic::default() });
        assert_eq!(after.since(&before).weft, BTreeMap::from([(PORTS_DROPPED.to_owned(), 6)]));
    }
}
