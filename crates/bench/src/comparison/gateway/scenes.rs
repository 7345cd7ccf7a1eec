//! What is measured: handshakes, traffic, a flood, and clients that are idle.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::thread;
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;
use weft_api::Client;
use weft_api::call::{self, Call};

use super::super::measure::{self, TcpResult, resident_mib};
use super::crowd::{HandshakesResult, StayResult};
use super::flood::ForgedResult;
use super::rows::{self, GatewayRow};
use super::stand::{Clients, STOCK, Servers, System, busy_seconds, pin, stock};
use super::{Samples, rows::add};
use crate::sandbox::{Netns, Running, SandboxError, progress, require};

/// Names that clients of handshakes have in turn: a name that comes again ends its session before, so that both
/// servers keep as many.
const NAMES: usize = 64;
/// Handshakes under way at once.
const IN_FLIGHT: usize = 32;
/// Forged first packets a second.
const FLOOD_PER_S: u64 = 10_000;
/// How long a flood lasts beyond what is measured in it.
const FLOOD_LEAD: Duration = Duration::from_millis(500);
/// Pause between pings, as ping takes it, in seconds.
const PING_INTERVAL: &str = "0.01";
const PINGS_PER_S: u64 = 100;
/// The cores of the server and of the generator, where there are two.
const SERVER_CORE: usize = 0;
const GENERATOR_CORE: usize = 1;
/// iperf3's servers, one for each stock client, from this port on.
const IPERF_PORT: u16 = 5_201;
/// Limit of a server's start until it listens.
const SERVER_LIMIT: Duration = Duration::from_secs(10);
/// Limit of a process beyond the length of its run.
const GRACE: Duration = Duration::from_secs(40);
/// Limit of the handshakes of all idle clients.
const IDLE_CONNECT_LIMIT: Duration = Duration::from_secs(300);
/// How long idle clients are left alone before they are measured.
const IDLE_SETTLE: Duration = Duration::from_secs(3);
/// Pause between two requests of the API.
const ASK_PAUSE: Duration = Duration::from_millis(200);
/// A turn of a loop that took longer is late; the daemon counts those.
const LOOPS: [(&str, &str); 2] = [("core", rows::IDLE_LATE), ("gateway", rows::IDLE_LATE_GATEWAY)];

/// How long and how often each is measured.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Lengths {
    rounds: usize,
    tcp_seconds: u64,
    handshake_seconds: u64,
    /// Idle clients of each system.
    idle: [(System, usize); 2],
    idle_seconds: u64,
}

impl Lengths {
    /// About eight minutes.
    const USUAL: Self = Self {
        rounds: 5,
        tcp_seconds: 3,
        handshake_seconds: 4,
        idle: [(System::Weft, 10_000), (System::OpenVpn, 2_000)],
        idle_seconds: 30,
    };
    /// About a minute and a half, for a look.
    const QUICK: Self = Self {
        rounds: 1,
        tcp_seconds: 1,
        handshake_seconds: 1,
        idle: [(System::Weft, 300), (System::OpenVpn, 100)],
        idle_seconds: 12,
    };

    /// The usual ones or those for a look, with rounds and seconds of TCP runs of the caller's.
    pub(crate) fn of(is_quick: bool, rounds: Option<u32>, seconds: Option<u64>) -> Self {
        let usual = if is_quick { Self::QUICK } else { Self::USUAL };
        Self {
            rounds: rounds.map_or(usual.rounds, |rounds| rounds as usize),
            tcp_seconds: seconds.unwrap_or(usual.tcp_seconds),
            ..usual
        }
    }
}

/// Measures everything.
///
/// # Errors
/// Returns an error if a server, a client or a command fails.
pub(crate) fn measure(lengths: &Lengths, binary: &str) -> Result<Vec<GatewayRow>, SandboxError> {
    for (program, package) in [
        ("openvpn", "openvpn"),
        ("taskset", "util-linux"),
        ("iperf3", "iperf3"),
        ("ping", "iputils-ping"),
    ] {
        require(program, package)?;
    }
    let mut samples = Samples::new();
    idle(lengths, binary, &mut samples)?;
    let servers = Servers::start(NAMES)?;
    let _clients = Clients::start(&servers)?;
    let _iperf = iperf_servers(&servers)?;
    for round in 1..=lengths.rounds {
        let mut round = Round { servers: &servers, lengths, binary, round, samples: &mut samples };
        round.handshakes()?;
        round.one()?;
        round.four()?;
        round.own()?;
        round.flood()?;
    }
    Ok(rows::of(&samples))
}

/// The exact commands, by measurement.
pub(crate) fn commands(lengths: &Lengths) -> BTreeMap<String, String> {
    let Lengths { tcp_seconds, handshake_seconds, idle_seconds, .. } = lengths;
    let idle = lengths.idle.map(|(system, clients)| format!("{clients} of {}", system.name()));
    let command = |(name, text): (&str, String)| (name.to_owned(), text);
    BTreeMap::from(
        [
            (
                "servers",
                "weft launch --engine userspace; weft openvpn serve; openvpn --config FILE with disable-dco, fast-io, \
                 keepalive 10 60, tun-mtu 1416, TLS 1.3, tls-crypt-v2 and the same certificates"
                    .to_owned(),
            ),
            (
                "handshakes",
                format!(
                    "taskset -c {GENERATOR_CORE} weft-bench peer vpn-handshakes --connect SERVER --clients {NAMES} \
                     --in-flight {IN_FLIGHT} --seconds {handshake_seconds}; all threads of the server on core \
                     {SERVER_CORE}"
                ),
            ),
            ("traffic", format!("iperf3 -J -c SERVER -C cubic -t {tcp_seconds}, with -R from the server")),
            ("processor time", "utime, stime, cutime and cstime of the server's process".to_owned()),
            ("own client", "weft openvpn connect FILE; OpenVPN's is a stock client".to_owned()),
            (
                "flood",
                format!(
                    "weft-bench peer vpn-forge --connect SERVER --rate {FLOOD_PER_S}, beside iperf3 and beside \
                     ping -i {PING_INTERVAL}"
                ),
            ),
            (
                "idle",
                format!(
                    "weft-bench peer vpn-stay --connect SERVER --clients N --seconds {idle_seconds} ({}), each with a \
                     ping in 10 s; memory is VmRSS less that without clients",
                    idle.join(", ")
                ),
            ),
        ]
        .map(command),
    )
}

fn iperf_servers(servers: &Servers) -> Result<Vec<Running>, SandboxError> {
    let start = |index: usize| {
        let port = (IPERF_PORT + index as u16).to_string();
        let words = ["iperf3", "-s", "--forceflush", "-p", &port];
        let mut server = servers.host().netns().spawn(&words)?;
        server.line_with("listening", SERVER_LIMIT)?;
        Ok(server)
    };
    (0..STOCK).map(start).collect()
}

/// One round.
struct Round<'a> {
    servers: &'a Servers,
    lengths: &'a Lengths,
    binary: &'a str,
    round: usize,
    samples: &'a mut Samples,
}

/// Which way TCP goes.
#[derive(Clone, Copy)]
enum Way {
    Up,
    Down,
}

impl Way {
    const BOTH: [Self; 2] = [Self::Up, Self::Down];

    const fn options(self) -> &'static [&'static str] {
        match self {
            Self::Up => &[],
            Self::Down => &["-R"],
        }
    }
}

impl Round<'_> {
    fn step(&self, what: &str, system: System) {
        let Self { round, lengths, .. } = self;
        progress::step(&format!("round {round} of {}: {what}, {}", lengths.rounds, system.name()));
    }

    fn handshakes(&mut self) -> Result<(), SandboxError> {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let core = GENERATOR_CORE.min(cores - 1).to_string();
        for system in System::BOTH {
            self.step("handshakes", system);
            let (pid, seconds) = (self.servers.pid(system), self.lengths.handshake_seconds);
            let generator = self.generator("vpn-handshakes", system, NAMES, seconds);
            let words: Vec<String> =
                ["taskset", "-c", &core].map(str::to_owned).into_iter().chain(generator).collect();
            pin(pid, Some(SERVER_CORE))?;
            let before = busy_seconds(pid)?;
            let result = run::<HandshakesResult>(self.servers.far(), &words, seconds);
            let busy = busy_seconds(pid)? - before;
            pin(pid, None)?;
            let HandshakesResult { done, failed, seconds, p50_ms } = result?;
            progress::note(&format!(
                "{:.0} handshakes a second, {p50_ms:.1} ms each, {failed} failed, {:.0} a core-second",
                done as f64 / seconds,
                done as f64 / busy
            ));
            add(self.samples, rows::HANDSHAKES, system, done as f64 / seconds);
            add(self.samples, rows::HANDSHAKES_CORE, system, done as f64 / busy.max(0.01));
        }
        Ok(())
    }

    /// The words of a part of the generator.
    fn generator(&self, part: &str, system: System, clients: usize, seconds: u64) -> Vec<String> {
        generator(self.servers, self.binary, part, system, (clients, seconds))
    }

    fn one(&mut self) -> Result<(), SandboxError> {
        for system in System::BOTH {
            for (way, rate, cpu) in [
                (Way::Up, rows::ONE_UP, rows::ONE_UP_CPU),
                (Way::Down, rows::ONE_DOWN, rows::ONE_DOWN_CPU),
            ] {
                self.step("one stock client", system);
                let from = [stock(self.servers, 0)];
                let (gbps, core_s) = self.traffic(&from, system, way)?;
                add(self.samples, rate, system, gbps);
                add(self.samples, cpu, system, core_s);
            }
        }
        Ok(())
    }

    fn four(&mut self) -> Result<(), SandboxError> {
        for system in System::BOTH {
            for (way, rate, cpu) in [
                (Way::Up, rows::FOUR_UP, rows::FOUR_UP_CPU),
                (Way::Down, rows::FOUR_DOWN, rows::FOUR_DOWN_CPU),
            ] {
                self.step("four stock clients", system);
                let from: [&Netns; STOCK] = std::array::from_fn(|index| stock(self.servers, index));
                let (gbps, core_s) = self.traffic(&from, system, way)?;
                add(self.samples, rate, system, gbps);
                add(self.samples, cpu, system, core_s);
            }
        }
        Ok(())
    }

    fn own(&mut self) -> Result<(), SandboxError> {
        let ways = [(rows::ONE_UP, rows::OWN_UP), (rows::ONE_DOWN, rows::OWN_DOWN)];
        for (way, (one, own)) in Way::BOTH.into_iter().zip(ways) {
            self.step("its own client", System::Weft);
            let far = self.servers.far();
            let (gbps, _) = self.traffic(&[far], System::Weft, way)?;
            add(self.samples, own, System::Weft, gbps);
            // OpenVPN's own client is the stock one, measured in this round.
            let stock = self.samples.get(one).and_then(|[openvpn, _]| openvpn.last().copied());
            stock.into_iter().for_each(|gbps| add(self.samples, own, System::OpenVpn, gbps));
        }
        Ok(())
    }

    /// One stream of each of these at once: Gbit/s of all together, and the server's core-seconds for a gigabit.
    fn traffic(
        &self,
        from: &[&Netns],
        system: System,
        way: Way,
    ) -> Result<(f64, f64), SandboxError> {
        let (pid, to) = (self.servers.pid(system), self.servers.inside(system));
        let seconds = self.lengths.tcp_seconds;
        let before = busy_seconds(pid)?;
        let results: Vec<TcpResult> = thread::scope(|scope| {
            let stream = |(index, client): (usize, &&Netns)| {
                let (client, port) = ((*client).clone(), IPERF_PORT + index as u16);
                scope.spawn(move || measure::tcp_on(&client, (to, port), way.options(), seconds))
            };
            let streams: Vec<_> = from.iter().enumerate().map(stream).collect();
            let join = |it: thread::ScopedJoinHandle<'_, _>| {
                it.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            };
            streams.into_iter().map(join).collect::<Result<_, SandboxError>>()
        })?;
        let busy = busy_seconds(pid)? - before;
        let gbps = results.iter().map(|result| result.gbps).sum::<f64>();
        let gigabits = results.iter().map(|result| result.gigabits).sum::<f64>();
        let core_s = busy / gigabits.max(f64::MIN_POSITIVE);
        progress::note(&format!("{gbps:.2} Gbit/s, {core_s:.3} core-s/Gbit of the server"));
        Ok((gbps, core_s))
    }

    fn flood(&mut self) -> Result<(), SandboxError> {
        for system in System::BOTH {
            let to = self.servers.inside(system);
            let seconds = self.lengths.tcp_seconds;
            let client = stock(self.servers, 0);
            self.step("no flood", system);
            let calm = (self.traffic(&[client], system, Way::Up)?.0, ping_ms(client, to, seconds)?);
            self.step("a flood of forged first packets", system);
            let before = (self.sessions(system)?, resident_mib(self.servers.pid(system)));
            let length = 2 * seconds + 2 * FLOOD_LEAD.as_secs().max(1);
            let mut words = self.generator("vpn-forge", system, 1, length);
            words.extend(["--rate".to_owned(), FLOOD_PER_S.to_string()]);
            let words: Vec<&str> = words.iter().map(String::as_str).collect();
            let mut flood = self.servers.far().spawn(&words)?;
            thread::sleep(FLOOD_LEAD);
            let rate = self.traffic(&[client], system, Way::Up)?.0;
            let ping = ping_ms(client, to, seconds)?;
            let after = (self.sessions(system)?, resident_mib(self.servers.pid(system)));
            let line = flood.line(Duration::from_secs(length) + GRACE)?;
            let forged: ForgedResult = measure::parse_line("vpn-forge", &line)?;
            progress::note(&format!(
                "{:.0} forged packets a second: {rate:.2} of {:.2} Gbit/s, {ping:.3} after {:.3} ms",
                forged.sent as f64 / forged.seconds,
                calm.0,
                calm.1
            ));
            add(self.samples, rows::FLOOD_TCP, system, rate / calm.0.max(f64::MIN_POSITIVE));
            add(self.samples, rows::FLOOD_PING, system, ping / calm.1.max(f64::MIN_POSITIVE));
            if let Some((before, after)) = before.0.zip(after.0) {
                add(self.samples, rows::FLOOD_CLIENTS, system, after - before);
            }
            if let Some((before, after)) = before.1.zip(after.1) {
                add(self.samples, rows::FLOOD_MEMORY, system, after - before);
            }
        }
        Ok(())
    }

    /// All sessions that Weft's server keeps; OpenVPN's tells only those that are connected.
    fn sessions(&self, system: System) -> Result<Option<f64>, SandboxError> {
        if system == System::OpenVpn {
            return Ok(None);
        }
        let status = self.servers.host().weft_json(&["status"])?;
        Ok(status["gateway"]["sessions"].as_f64())
    }
}

/// The words that run a part of the generator.
fn generator(
    servers: &Servers,
    binary: &str,
    part: &str,
    system: System,
    (clients, seconds): (usize, u64),
) -> Vec<String> {
    let (files, connect) = (servers.files.display(), servers.outside(system));
    let text =
        format!("{binary} peer {part} --files {files} --connect {connect} --clients {clients}");
    let more = format!("--in-flight {IN_FLIGHT} --seconds {seconds}");
    text.split(' ').chain(more.split(' ')).map(str::to_owned).collect()
}

fn run<T: DeserializeOwned>(
    netns: &Netns,
    words: &[String],
    seconds: u64,
) -> Result<T, SandboxError> {
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let output = netns.exec_within(Duration::from_secs(seconds) + GRACE, &words)?.success()?;
    measure::parse_line(&output.command, &output.stdout)
}

/// The mean round trip in milliseconds.
fn ping_ms(client: &Netns, to: IpAddr, seconds: u64) -> Result<f64, SandboxError> {
    let (count, to) = ((seconds * PINGS_PER_S).to_string(), to.to_string());
    let words = ["ping", "-n", "-q", "-i", PING_INTERVAL, "-c", &count, &to];
    let output = client.exec_within(Duration::from_secs(seconds) + GRACE, &words)?.success()?;
    parse_ping(&output.stdout)
        .ok_or(SandboxError::UnexpectedOutput { command: output.command, why: output.stdout })
}

fn parse_ping(text: &str) -> Option<f64> {
    let (_, times) = text.lines().find_map(|line| line.strip_prefix("rtt")?.split_once('='))?;
    times.split('/').nth(1)?.trim().parse().ok()
}

/// Clients that do nothing but ping, on a host that has just been started.
fn idle(lengths: &Lengths, binary: &str, samples: &mut Samples) -> Result<(), SandboxError> {
    let most = lengths.idle.iter().map(|(_, clients)| *clients).max().unwrap_or_default();
    let servers = Servers::start(most)?;
    for (system, clients) in lengths.idle {
        let pid = servers.pid(system);
        let without = resident_mib(pid).unwrap_or_default();
        progress::step(&format!("connecting {clients} clients that stay, {}", system.name()));
        let seconds = lengths.idle_seconds;
        let words = generator(&servers, binary, "vpn-stay", system, (clients, seconds + 2));
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let mut crowd = servers.far().spawn(&words)?;
        let connected: StayResult =
            measure::parse_line("vpn-stay", &crowd.line(IDLE_CONNECT_LIMIT)?)?;
        thread::sleep(IDLE_SETTLE);
        let watch = Duration::from_secs(seconds).saturating_sub(IDLE_SETTLE);
        let before = busy_seconds(pid)?;
        let begun = Instant::now();
        match system {
            System::Weft => watch_loops(&servers, watch, samples)?,
            System::OpenVpn => thread::sleep(watch),
        }
        let busy = (busy_seconds(pid)? - before) / begun.elapsed().as_secs_f64();
        let with = resident_mib(pid).unwrap_or_default();
        let line = crowd.line(Duration::from_secs(seconds) + GRACE)?;
        let stayed: StayResult = measure::parse_line("vpn-stay", &line)?;
        if stayed.connected != clients || stayed.data_packets == 0 {
            let why = format!("{clients} clients were connected, then: {line}");
            return Err(SandboxError::UnexpectedOutput { command: "vpn-stay".to_owned(), why });
        }
        let each = (with - without) * 1_024.0 / clients as f64;
        progress::note(&format!(
            "{clients} clients in {:.1} s, {} tried again: {without:.0} MiB before, {with:.0} MiB with them",
            connected.seconds, connected.failed
        ));
        add(samples, rows::IDLE_CLIENTS, system, clients as f64);
        add(samples, rows::IDLE_CONNECT, system, clients as f64 / connected.seconds);
        add(samples, rows::IDLE_MEMORY, system, with);
        add(samples, rows::IDLE_CLIENT, system, each);
        add(samples, rows::IDLE_CPU, system, busy);
    }
    Ok(())
}

/// Asks the daemon again and again, and counts the turns of its loops that took too long meanwhile.
fn watch_loops(
    servers: &Servers,
    length: Duration,
    samples: &mut Samples,
) -> Result<(), SandboxError> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(SandboxError::io("start a runtime"))?;
    let client = Client::new(&servers.host().runtime_directory());
    let late = || -> Result<[f64; 2], SandboxError> {
        let status = servers.host().weft_json(&["status"])?;
        let of = |name: &str| status["loops"][name]["late"].as_f64();
        let late = LOOPS.map(|(name, _)| of(name));
        let [Some(core), Some(gateway)] = late else {
            let why = format!("no loops in {}", status["loops"]);
            return Err(SandboxError::UnexpectedOutput { command: "weft status".to_owned(), why });
        };
        Ok([core, gateway])
    };
    let before = late()?;
    let (begun, mut slowest) = (Instant::now(), Duration::ZERO);
    while begun.elapsed() < length {
        let asked = Instant::now();
        let answer = runtime.block_on(client.call::<call::Status>(&call::Nothing {}));
        answer.map_err(|error| SandboxError::UnexpectedOutput {
            command: call::Status::PATH.to_owned(),
            why: error.to_string(),
        })?;
        slowest = slowest.max(asked.elapsed());
        thread::sleep(ASK_PAUSE);
    }
    for ((_, row), (after, before)) in LOOPS.into_iter().zip(late()?.into_iter().zip(before)) {
        add(samples, row, System::Weft, after - before);
    }
    add(samples, rows::IDLE_ANSWER, System::Weft, slowest.as_secs_f64() * 1e3);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mean_of_pings_is_read() {
        let text = "300 packets transmitted\nrtt min/avg/max/mdev = 0.080/0.125/0.912/0.044 ms\n";
        assert_eq!(parse_ping(text), Some(0.125));
        assert_eq!(parse_ping("300 packets transmitted, 0 received"), None);
    }
}
