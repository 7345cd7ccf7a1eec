//! Clients come and go by the hundred, ours and stock ones; at the end all is accounted for, and nothing is left of them.

use std::collections::BTreeMap;
use std::io::{self, BufRead, BufReader, Write};
use std::net::{IpAddr, SocketAddr};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use rustix::process::Signal;
use serde_json::Value;
use weft_bench::sandbox::progress::note;
use weft_bench::sandbox::{Host, Running, try_wait_until};
use weft_lab::net::gateway::crowd::{Crowd, Stayed};
use weft_lab::net::gateway::{CONNECTED as CLIENT_CONNECTED, Machine, Stage};
use weft_lab::net::is_soak;

/// Clients in one thread: as many of stock's processes would fill two cores by their handshakes alone.
const CLIENTS: usize = 200;
/// Stock clients beside them.
const STOCK: u8 = 4;
/// How long they come and go.
const SHORT: Duration = Duration::from_secs(120);
const LONG: Duration = Duration::from_secs(30 * 60);
/// Pings are so rare that none is missed on a busy machine: no session ends unless its client wants so.
const SERVE: [&str; 8] =
    ["openvpn", "serve", "--ping", "2", "--ping-restart", "30", "--management", "management.sock"];
/// Sessions of silent clients end within this time: twice their ping-restart, and some for the machine.
const GONE: Duration = Duration::from_secs(180);
/// A stock client may wait for its turn among the others: it sends its first packet again after 2, 4, 8 and more
/// seconds.
const PATIENCE: Duration = Duration::from_secs(180);
/// Echo requests of each client that stays at the end.
const ECHOES: u64 = 3;

/// The notices of the management interface. It tells of every client; the daemon's log limits its lines a minute.
#[derive(Debug, Default)]
struct Watched {
    came: AtomicU64,
    went: AtomicU64,
    lost: AtomicU64,
}

impl Watched {
    /// Watches from now on, for as long as the gateway serves.
    fn begin(socket: &Path) -> anyhow::Result<Arc<Self>> {
        let stream = UnixStream::connect(socket)?;
        let mut lines = BufReader::new(stream.try_clone()?).lines();
        (&stream).write_all(b"log on\n")?;
        let is_on = |line: &io::Result<String>| line.as_ref().is_ok_and(|it| it.ends_with(" ON"));
        lines.find(is_on).context("it tells nothing")??;
        let watched = Arc::new(Self::default());
        let counts = Arc::clone(&watched);
        thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                let count = match &line {
                    it if it.starts_with(">CLIENT:ESTABLISHED,") => &counts.came,
                    it if it.starts_with(">LOG:") && it.contains(" is gone: ") => &counts.went,
                    it if it.contains(" notices are lost: ") => &counts.lost,
                    _ => continue,
                };
                count.fetch_add(1, Ordering::Relaxed);
            }
        });
        Ok(watched)
    }

    /// Waits until as many have come as the clients say, and as many have gone.
    fn wait(&self, wanted: u64) -> anyhow::Result<()> {
        let are = |count: &AtomicU64, number: u64| count.load(Ordering::Relaxed) == number;
        let is_all = || are(&self.came, wanted) && are(&self.went, wanted) && are(&self.lost, 0);
        let waited = try_wait_until("all to be told", GONE, || Ok(is_all()));
        ensure!(waited.is_ok(), "{wanted} were connected: {self:?}");
        Ok(())
    }
}

/// The state of a host that clients change.
#[derive(Debug, PartialEq, Eq)]
struct Traces {
    routes: String,
    neighbours: String,
    rules: String,
    descriptors: usize,
    /// Sessions, connected or not.
    sessions: u64,
}

impl Traces {
    fn of(host: &Host) -> anyhow::Result<Self> {
        let told = |words: &[&str]| -> anyhow::Result<String> {
            Ok(host.netns().exec(words)?.success()?.stdout)
        };
        let pid = host.daemon_pid().context("no daemon")?;
        Ok(Self {
            // The kernel's own come with the device, a moment later.
            routes: told(&["ip", "route", "show", "table", "all", "dev", "weft-vpn"])?
                .lines()
                .filter(|line| !line.contains("proto kernel"))
                .collect(),
            neighbours: told(&["ip", "neigh", "show", "proxy"])?
                + &told(&["ip", "-6", "neigh", "show", "proxy"])?,
            rules: told(&["nft", "-s", "list", "ruleset"])?,
            descriptors: std::fs::read_dir(format!("/proc/{pid}/fd"))?.count(),
            sessions: host.weft_json(&["status"])?["gateway"]["sessions"].as_u64().unwrap_or(0),
        })
    }
}

/// Waits until a host has no other traces of clients than these. Descriptors may be fewer: the connection of an earlier
/// request was among them.
fn wait_traces(host: &Host, wanted: &Traces) -> anyhow::Result<()> {
    let waited = try_wait_until("all traces of the clients to be gone", GONE, || {
        let traces = Traces::of(host);
        Ok(traces.is_ok_and(|traces| {
            let descriptors = traces.descriptors.max(wanted.descriptors);
            Traces { descriptors, ..traces } == *wanted
        }))
    });
    ensure!(waited.is_ok(), "{wanted:#?} became {:#?}", Traces::of(host)?);
    Ok(())
}

/// Addresses that the host has given out.
fn used(host: &Host) -> anyhow::Result<u64> {
    let ipam = host.weft_json(&["status", "ipam"])?;
    let hosts = ipam["hosts"].as_array().context("no hosts")?;
    let own = hosts.iter().find(|it| it["nickname"] == host.nickname());
    own.and_then(|own| own["used"].as_u64()).with_context(|| format!("{ipam}"))
}

/// A stock client that comes and goes until then, in each of the ways that it has. Returns how often it was connected.
fn stock(machine: &Machine, profile: &Path, to: IpAddr, end: Instant) -> anyhow::Result<u64> {
    let reaches = |process: &mut Running| -> anyhow::Result<()> {
        process.line_with(CLIENT_CONNECTED, PATIENCE)?;
        let what = format!("an answer from {to} to {}", profile.display());
        try_wait_until(&what, PATIENCE, || Ok(machine.pings(to).unwrap_or_default()))?;
        Ok(())
    };
    let mut connected = 0;
    while Instant::now() < end {
        let mut client = machine.start(profile)?;
        reaches(&mut client)?;
        connected += 1;
        match connected % 4 {
            0 => client.kill(),
            1 => {
                client.signal(Signal::USR1);
                reaches(&mut client)?;
                connected += 1;
                client.terminate(GONE)?;
            }
            _ => _ = client.terminate(GONE)?,
        }
        thread::sleep(Duration::from_millis(300 * connected % 2_000));
    }
    Ok(connected)
}

/// The gateway has counted for each client what that has sent and got.
fn counters_agree(clients: &[Value], stayed: &[Stayed]) -> anyhow::Result<()> {
    let shown: BTreeMap<&str, &Value> =
        clients.iter().filter_map(|it| Some((it["name"].as_str()?, it))).collect();
    ensure!(shown.len() == stayed.len(), "{} of {}", shown.len(), stayed.len());
    for Stayed { name, address, sent_bytes, received_bytes } in stayed {
        let own = shown.get(name.as_str()).with_context(|| format!("{name} is not listed"))?;
        ensure!(own["addresses"][0] == address.to_string(), "{name}: {own}");
        ensure!(own["bytes_in"] == *sent_bytes, "{name} sent {sent_bytes}: {own}");
        ensure!(own["bytes_out"] == *received_bytes, "{name} got {received_bytes}: {own}");
    }
    Ok(())
}

#[test]
fn two_hundred_clients_come_and_go_and_nothing_is_left_of_them() -> anyhow::Result<()> {
    let length = if is_soak() { LONG } else { SHORT };
    let seed: u64 = rand::random();
    note(&format!("seed {seed}"));
    let stage = Stage::new()?;
    let host = stage.host();
    let served = host.weft_json(&SERVE)?;
    let watched = Watched::begin(Path::new(served["management"].as_str().context("no socket")?))?;
    let (addresses, traces) = (used(host)?, Traces::of(host)?);
    ensure!(traces.sessions == 0 && traces.neighbours.is_empty(), "{traces:?}");
    let far = stage.machine(1)?;
    let machines: Vec<Machine> =
        (2..2 + STOCK).map(|number| stage.machine(number)).collect::<anyhow::Result<_>>()?;
    let profiles = |prefix: &str, count: usize| -> anyhow::Result<Vec<PathBuf>> {
        (0..count).map(|number| stage.profile(host, &format!("{prefix}{number}"))).collect()
    };
    let (ours, theirs) = (profiles("ours", CLIENTS)?, profiles("stock", STOCK.into())?);
    let server = SocketAddr::new(far.gateway(), 1194);
    let mut crowd = Crowd::new(Path::new(&far.netns.path()), server, &ours, seed)?;
    let (end, to) = (Instant::now() + length, stage.two.ipv4()?.into());
    let (tally, others) = thread::scope(|scope| -> anyhow::Result<_> {
        let others = machines.iter().zip(&theirs);
        let others: Vec<_> =
            others.map(|(it, profile)| scope.spawn(move || stock(it, profile, to, end))).collect();
        let tally = crowd.come_and_go(length)?;
        let mut connected = 0;
        for other in others {
            connected += other.join().map_err(|_| anyhow::anyhow!("a thread panicked"))??;
        }
        Ok((tally, connected))
    })?;
    note(&format!("{tally:?}, and {others} of stock clients"));
    ensure!(tally.failed == 0 && tally.ended == 0 && tally.lost.is_empty(), "{tally:?}");
    ensure!(tally.answers == tally.echoes && tally.moved > 0, "{tally:?}");
    ensure!(tally.connected > CLIENTS as u64 * 2 && others > STOCK.into(), "{tally:?}, {others}");
    wait_traces(host, &traces)?;
    watched.wait(tally.connected + others)?;
    ensure!(stage.clients()?.is_empty(), "{:?}", stage.clients()?);
    let names = CLIENTS as u64 + u64::from(STOCK);
    ensure!(used(host)? == addresses + names, "clients have not kept their addresses");

    // All at once: each has its address and its own count of bytes.
    let stayed = crowd.stay(ECHOES)?;
    counters_agree(&stage.clients()?, &stayed)?;
    crowd.vanish();
    wait_traces(host, &traces)?;
    watched.wait(tally.connected + others + CLIENTS as u64)?;
    // Names and addresses go with the certificates.
    for name in (0..CLIENTS).map(|number| format!("ours{number}")) {
        host.weft_json(&["openvpn", "revoke", &name])?;
    }
    for name in (0..STOCK).map(|number| format!("stock{number}")) {
        host.weft_json(&["openvpn", "revoke", &name])?;
    }
    try_wait_until("all addresses to be free", GONE, || {
        Ok(used(host).is_ok_and(|used| used == addresses))
    })?;
    let authority = host.weft_json(&["ca", "init"])?;
    ensure!(authority["clients"] == 0 && authority["revoked"] == names, "{authority}");
    ensure!(!host.log().contains("this is a bug"), "the log has a bug in it");
    wait_traces(host, &traces)
}
