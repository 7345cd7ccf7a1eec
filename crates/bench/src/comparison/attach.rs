//! How long an attach and a detach take on a host that has few containers, and on one that has many.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use weft_api::call::{self, Call};
use weft_api::{AttachRequest, Client, DetachRequest};

use super::rows::CONNECT_LIMIT;
use super::stats;
use crate::sandbox::{Host, Netns, Sandbox, SandboxError, SandboxOptions, progress, run};

/// Containers that the host has already.
pub(crate) const HELD: [usize; 3] = [0, 100, 1_000];
/// Repetitions where nothing else is asked for.
pub(crate) const ROUNDS: usize = 20;
/// Repetitions of a quick run.
pub(crate) const QUICK_ROUNDS: usize = 3;
/// The daemon announces a new container for some seconds, which is over before anything is measured.
const SETTLE: Duration = Duration::from_secs(10);
/// The arguments of both daemons.
const LAUNCH: [&str; 4] = ["--engine", "userspace", "--port-mode", "bridge"];
/// The bridge of network `weft`.
const BRIDGE: &str = "weft";
/// The pair that is made by hand: its end on the host, and the one in the container.
const BY_HAND: [&str; 2] = ["byhand", "byhand0"];

/// Times of one step, in milliseconds.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Times {
    /// The median.
    pub median: f64,
    /// The least.
    pub least: f64,
    /// The greatest.
    pub greatest: f64,
}

impl Times {
    fn of(times: &[Duration]) -> Self {
        let ms: Vec<f64> = times.iter().map(|time| time.as_secs_f64() * 1e3).collect();
        let tenths = |value: f64| (value * 10.0).round() / 10.0;
        let (least, greatest) = stats::spread(&ms).unwrap_or_default();
        let median = stats::median(&ms).unwrap_or_default();
        Self { median: tenths(median), least: tenths(least), greatest: tenths(greatest) }
    }

    /// The median, with the least and the greatest.
    #[must_use]
    pub fn text(&self) -> String {
        format!("{:.1} ({:.1} to {:.1})", self.median, self.least, self.greatest)
    }
}

/// One more container on a host that has some already.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct AttachRow {
    /// Containers that the host has.
    pub held: usize,
    /// The daemon's answer to a request to attach one more.
    pub attach_ms: Times,
    /// Its answer to a request to detach that one.
    pub detach_ms: Times,
    /// `weft attach` as a whole, with the start of the program.
    pub attach_command_ms: Times,
    /// `weft detach` as a whole.
    pub detach_command_ms: Times,
    /// The same devices, port and addresses by `ip`: the share of the kernel, with the start of two programs.
    pub by_hand_ms: Times,
    /// Repetitions.
    pub rounds: usize,
}

/// Measures on hosts with ever more containers.
///
/// # Errors
/// Returns an error if a daemon or a command fails.
pub(crate) fn measure(held: &[usize], rounds: usize) -> Result<Vec<AttachRow>, SandboxError> {
    let sandbox = Sandbox::new(&SandboxOptions::default())?;
    sandbox.launch_all(&LAUNCH)?;
    let host = sandbox.host(0);
    host.wait_connected(1, CONNECT_LIMIT)?;
    let stand = Stand::new(&sandbox)?;
    let mut rows = Vec::new();
    let mut there = 0;
    for &held in held {
        progress::step(&format!("attaching containers, until there are {held}"));
        for number in there..held {
            stand.attach(&sandbox.add_netns(&format!("held{number}"))?)?;
        }
        there = held;
        std::thread::sleep(SETTLE);
        rows.push(stand.row(held, rounds)?);
    }
    Ok(rows)
}

/// A host, its daemon's API, and the namespace of the container that comes and goes.
struct Stand<'a> {
    host: &'a Host,
    container: Netns,
    runtime: tokio::runtime::Runtime,
    client: Client,
    batch: PathBuf,
}

impl<'a> Stand<'a> {
    fn new(sandbox: &'a Sandbox) -> Result<Self, SandboxError> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(SandboxError::io("start a runtime"))?;
        let host = sandbox.host(0);
        Ok(Self {
            host,
            container: sandbox.add_netns("one")?,
            runtime,
            client: Client::new(&host.runtime_directory()),
            batch: sandbox.directory().join("by-hand"),
        })
    }

    fn row(&self, held: usize, rounds: usize) -> Result<AttachRow, SandboxError> {
        let mut times: [Vec<Duration>; 5] = Default::default();
        for round in 1..=rounds {
            progress::step(&format!("{held} containers and one more: round {round} of {rounds}"));
            let measured = [
                self.attach(&self.container)?,
                self.detach(&self.container)?,
                self.command("attach")?,
                self.command("detach")?,
                self.by_hand()?,
            ];
            for (times, time) in times.iter_mut().zip(measured) {
                times.push(time);
            }
        }
        let [attach, detach, attach_command, detach_command, by_hand] =
            times.map(|times| Times::of(&times));
        Ok(AttachRow {
            held,
            attach_ms: attach,
            detach_ms: detach,
            attach_command_ms: attach_command,
            detach_command_ms: detach_command,
            by_hand_ms: by_hand,
            rounds,
        })
    }

    fn attach(&self, container: &Netns) -> Result<Duration, SandboxError> {
        let request = AttachRequest { container: container.path(), ..AttachRequest::default() };
        self.call::<call::Attach>(&request)
    }

    fn detach(&self, container: &Netns) -> Result<Duration, SandboxError> {
        let request = DetachRequest { container: container.path(), ..DetachRequest::default() };
        self.call::<call::Detach>(&request)
    }

    fn call<C: Call>(&self, request: &C::Request) -> Result<Duration, SandboxError> {
        let begun = Instant::now();
        let answer = self.runtime.block_on(self.client.call::<C>(request));
        let took = begun.elapsed();
        answer.map(|_| took).map_err(|error| SandboxError::UnexpectedOutput {
            command: C::PATH.to_owned(),
            why: error.to_string(),
        })
    }

    fn command(&self, verb: &str) -> Result<Duration, SandboxError> {
        let program = self.host.binary();
        let mut command = Command::new(program);
        command.arg("--runtime-dir").arg(self.host.runtime_directory());
        command.args([verb, &self.container.path()]);
        let begun = Instant::now();
        run(&mut command)?;
        Ok(begun.elapsed())
    }

    /// Makes and sets up a pair as Weft does, by one `ip` on the host and one in the container. Its removal is not
    /// measured.
    fn by_hand(&self) -> Result<Duration, SandboxError> {
        let ([outer, inner], container) = (BY_HAND, self.container.name());
        let outside = format!(
            "link add {outer} mtu 1388 type veth peer name {inner} mtu 1388 netns {container}\n\
             link set {outer} master {BRIDGE}\nlink set {outer} up\n"
        );
        let inside = format!(
            "link set {inner} up\naddr add 10.32.255.250/12 dev {inner}\n\
             addr add fd00:32::fa/64 dev {inner}\nroute add 224.0.0.0/4 dev {inner}\n"
        );
        let mut took = Duration::ZERO;
        for (namespace, lines) in [(self.host.netns().name(), outside), (container, inside)] {
            fs::write(&self.batch, lines).map_err(SandboxError::io("write a batch of ip"))?;
            let begun = Instant::now();
            run(Command::new("ip").args(["-n", namespace, "-batch"]).arg(&self.batch))?;
            took += begun.elapsed();
        }
        self.host.netns().ip(&format!("link del {outer}"))?;
        Ok(took)
    }
}

/// The exact commands, by measurement.
pub(crate) fn commands() -> BTreeMap<String, String> {
    let command = |(name, text): (&str, String)| (name.to_owned(), text);
    BTreeMap::from(
        [
            ("hosts", format!("weft launch {} on two", LAUNCH.join(" "))),
            ("attach", format!("POST {}, then {}", call::Attach::PATH, call::Detach::PATH)),
            ("command", "weft attach /run/netns/NAME, then weft detach /run/netns/NAME".to_owned()),
            ("by hand", "ip -n HOST -batch FILE, then ip -n CONTAINER -batch FILE".to_owned()),
        ]
        .map(command),
    )
}

/// The table in Markdown.
#[must_use]
pub fn table(rows: &[AttachRow]) -> String {
    let head = ["containers", "attach", "detach", "weft attach", "weft detach", "by hand"];
    let cells = rows.iter().map(|row| {
        let times = [
            &row.attach_ms,
            &row.detach_ms,
            &row.attach_command_ms,
            &row.detach_command_ms,
            &row.by_hand_ms,
        ];
        let mut cells = vec![row.held.to_string()];
        cells.extend(times.iter().map(|times| times.text()));
        cells
    });
    let mut text = format!("| {:>10} |", head[0]);
    let _ = head[1..].iter().try_for_each(|name| write!(text, " {:>24} |", format!("{name}, ms")));
    text += "\n| ---------: |";
    text += &" -----------------------: |".repeat(head.len() - 1);
    text.push('\n');
    for row in cells {
        let _ = write!(text, "| {:>10} |", row[0]);
        let _ = row[1..].iter().try_for_each(|cell| write!(text, " {cell:>24} |"));
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_has_the_median_and_the_spread_of_each_step() {
        let ms = |ms: u64| Duration::from_micros(ms * 1_000 + 40);
        let times = Times::of(&[ms(9), ms(11), ms(30)]);
        let row = AttachRow { held: 100, attach_ms: times, rounds: 3, ..AttachRow::default() };
        let table = table(&[row]);
        assert!(table.contains("|        100 |       11.0 (9.0 to 30.0) |"), "{table}");
        let widths: Vec<usize> = table.lines().map(str::len).collect();
        assert_eq!(widths, [widths[0]; 3], "{table}");
    }
}
