//! All kinds of traffic at once over several workers and lanes, while SAs are replaced and containers come and
//! go. Only overflows of named queues lose packets, and the daemons do not grow.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use weft_bench::sandbox::progress::note;
use weft_bench::sandbox::{Container, Host, try_wait_until};
use weft_io::uninterrupted;
use weft_lab::net::guest::seed;
use weft_lab::net::iperf::{self, Server};
use weft_lab::net::losses::{drops, tap_overflows};
use weft_lab::net::memory::{ensure_flat, resident_kib};
use weft_lab::net::{
    Lab, counter, is_soak, keep_order, namespace, probe, resend_on_loss_alone, slowness,
    tcp_counter,
};

/// The launch options of both hosts, with two workers each: direct ports if possible; ports of the switch with
/// helpers at work all the time; the other format.
const MODES: [&[&str]; 3] = [
    &["--engine", "userspace"],
    &["--engine", "userspace", "--port-mode", "bridge", "--helpers", "1"],
    &["--engine", "userspace", "--format", "ovpn"],
];
/// An hour where there is time, a minute with the load that fills buffers and tables for the first time.
const SECONDS_SOAK: u64 = 3_600;
const SECONDS: u64 = 48;
const SECONDS_FIRST: u64 = 12;
/// The longest run of one iperf3 client, in seconds; then the next one connects.
const TCP_SECONDS_MAX: u64 = 10;
/// Streams of each family, and the rate of each in Mbit/s. Packets are under way at each rekey, but no queue of
/// this machine overflows.
const STREAMS: &str = "4";
const STREAM_MBIT_S: u32 = 10;
/// Parts of it, with a look at the daemons' resources after each.
const PARTS: u64 = 4;
/// Limit for the release of a container's resources.
const SETTLE_LIMIT: Duration = Duration::from_secs(10);
/// Datagrams under way at once.
const BURST: usize = 16;
const GROUP: (Ipv4Addr, u16) = (Ipv4Addr::new(239, 1, 2, 3), 5002);
/// The most datagrams that are lost with one place of an overflowing queue: a super-packet's.
const LOST_PER_OVERFLOW: u64 = 64;

/// The reasons for which the vector engine may drop packets in this test. A queue of the kernel is full, or the
/// destination visitor has just gone. Or a visitor sends before the other host has heard of it, or after it has
/// heard that the visitor goes.
const ALLOWED_DROPS: [&str; 5] = [
    "drop_tap_full",
    "drop_send_full",
    "socket_overflows",
    "drop_no_endpoint",
    "drop_unannounced_source",
];
/// Those of them, and of the kernel's UDP, that mean a full queue.
const OVERFLOWS: [&str; 3] = ["drop_tap_full", "drop_send_full", "socket_overflows"];

/// Counts of one kind of load.
#[derive(Default)]
struct Tally {
    done: AtomicU64,
    lost: AtomicU64,
    overtaken: AtomicU64,
    late: AtomicU64,
}

impl Tally {
    fn add(&self, done: u64, lost: u64) {
        self.done.fetch_add(done, Ordering::Relaxed);
        self.lost.fetch_add(lost, Ordering::Relaxed);
    }

    fn both(&self) -> (u64, u64) {
        (self.done.load(Ordering::Relaxed), self.lost.load(Ordering::Relaxed))
    }
}

/// The resources of a host's daemon.
#[derive(Debug)]
struct Held {
    resident_kib: u64,
    descriptors: usize,
    threads: usize,
}

impl Held {
    fn by(host: &Host) -> anyhow::Result<Self> {
        let pid = host.daemon_pid().ok_or_else(|| anyhow::anyhow!("no daemon runs"))?;
        let entries = |part: &str| -> anyhow::Result<usize> {
            Ok(std::fs::read_dir(format!("/proc/{pid}/{part}"))?.count())
        };
        Ok(Self {
            resident_kib: resident_kib(pid)?,
            descriptors: entries("fd")?,
            threads: entries("task")?,
        })
    }
}

/// TCP streams, one run after another.
fn streams(from: &Container, to: IpAddr, until: Instant, tally: &Tally) -> anyhow::Result<()> {
    let rate = format!("{}M", STREAM_MBIT_S / slowness().min(STREAM_MBIT_S));
    loop {
        let left = until.saturating_duration_since(Instant::now()).as_secs();
        if left == 0 {
            return Ok(());
        }
        let time = left.min(TCP_SECONDS_MAX).to_string();
        let words = ["-t", &time, "-P", STREAMS, "-b", &rate, "-l", "32K", "-C", "cubic"];
        let report = iperf::run(from, to, &words)?;
        let again = iperf::retransmits(&report);
        let again = again.ok_or_else(|| anyhow::anyhow!("no retransmits in {report}"))?;
        tally.add(1, again);
    }
}

/// Bursts of datagrams of a known pattern, small and larger than the path carries, in turn.
fn datagrams(
    (sender, receiver): &(UdpSocket, UdpSocket),
    until: Instant,
    tally: &Tally,
) -> anyhow::Result<()> {
    let target = receiver.local_addr()?;
    let mut got = vec![0; 1 << 16];
    for round in 0_u32.. {
        if Instant::now() >= until {
            break;
        }
        let (size, count) = match round % 4 {
            0 => (12_000, 2),
            1 => (1_300, BURST),
            _ => (17 + round as usize % 183, BURST),
        };
        for number in 0..count {
            sender.send_to(&pattern(round, number, size), target)?;
        }
        let mut seen = [false; BURST];
        while seen[..count].contains(&false) {
            let Ok(length) = uninterrupted(|| receiver.recv(&mut got)) else {
                let missing = seen[..count].iter().filter(|seen| !**seen).count();
                tally.add(0, missing as u64);
                note(&format!(
                    "{missing} of {count} datagrams of {size} bytes missing, round {round}"
                ));
                break;
            };
            let (of, number) = named(&got[..length])?;
            if of != round {
                // Given up when a busy machine kept it waiting: late is not lost.
                tally.late.fetch_add(1, Ordering::Relaxed);
                note(&format!("datagram {number} of round {of} came in round {round}"));
                continue;
            }
            anyhow::ensure!(!seen[number], "datagram {number} of {size} bytes arrived twice");
            // An overtaken datagram changed its lane on the way, as UDP may.
            if seen[number..].contains(&true) {
                tally.overtaken.fetch_add(1, Ordering::Relaxed);
            }
            seen[number] = true;
            tally.add(1, 0);
        }
        thread::sleep(Duration::from_millis(3));
    }
    Ok(())
}

/// Bytes in front of a datagram's pattern: its round, its number.
const NAME_LEN: usize = 5;

/// A datagram of at least [`NAME_LEN`] bytes, each of which depends on its round and number.
fn pattern(round: u32, number: usize, size: usize) -> Vec<u8> {
    let rest = (NAME_LEN..size).map(|at| ((at * 31 + number * 7 + round as usize) % 251) as u8);
    round.to_be_bytes().into_iter().chain([number as u8]).chain(rest).collect()
}

/// Round and number of a datagram, after a check of all its bytes.
fn named(datagram: &[u8]) -> anyhow::Result<(u32, usize)> {
    let (name, _) = datagram
        .split_first_chunk::<NAME_LEN>()
        .ok_or_else(|| anyhow::anyhow!("a datagram of {} bytes", datagram.len()))?;
    let [a, b, c, d, number] = *name;
    let (round, number) = (u32::from_be_bytes([a, b, c, d]), usize::from(number));
    let whole = pattern(round, number, datagram.len());
    let wrong = datagram.iter().zip(&whole).position(|(is, should)| is != should);
    anyhow::ensure!(
        wrong.is_none() && number < BURST,
        "datagram {number} of round {round}, {} bytes, is wrong from byte {wrong:?} on",
        datagram.len()
    );
    Ok((round, number))
}

/// Pings, small and fragmented.
fn pings(from: &Container, to: &[IpAddr], until: Instant, tally: &Tally) -> anyhow::Result<()> {
    let mut turn = to.iter().flat_map(|to| [("56", to), ("3000", to)]).cycle();
    while let Some((size, to)) = turn.next().filter(|_| Instant::now() < until) {
        let to = to.to_string();
        // All at once, since ping waits for the last answer no longer than one interval. When its send buffer is
        // full, which is small by default, it sends one an interval.
        let few = ["ping", "-n", "-q", "-l", "10", "-c", "10", "-i", "10", "-S", "1000000"];
        let words = [&few[..], &["-s", size, &to]].concat();
        let output = from.exec(&words)?;
        let answered = output.stdout.split(", ").find_map(|part| part.strip_suffix(" received"));
        let answered = answered.and_then(|count| count.parse::<u64>().ok());
        let answered = answered.ok_or_else(|| anyhow::anyhow!("ping said {}", output.stdout))?;
        tally.add(answered, 10 - answered);
    }
    Ok(())
}

/// Datagrams to a group that a container of the other host is in.
fn multicast(
    (sender, receiver): &(UdpSocket, UdpSocket),
    until: Instant,
    tally: &Tally,
) -> anyhow::Result<()> {
    for number in 0_u32.. {
        if Instant::now() >= until {
            break;
        }
        sender.send_to(&number.to_be_bytes(), GROUP)?;
        match probe::expect_datagram(receiver, &number.to_be_bytes()) {
            Ok(()) => tally.add(1, 0),
            Err(_) => tally.add(0, 1),
        }
        thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// Containers that come, speak to one of the other host, and go.
fn visitors(lab: &Lab, to: [IpAddr; 2], until: Instant, tally: &Tally) -> anyhow::Result<()> {
    for number in 0_usize.. {
        if Instant::now() >= until {
            break;
        }
        let host = lab.host(number % 2);
        let visitor = host.add_container(&format!("v{number}"))?;
        visitor.ping(to[number % 2])?;
        host.weft(&["detach", &visitor.netns().path()])?.success()?;
        lab.sandbox.remove_netns(visitor.netns())?;
        tally.add(1, 0);
    }
    Ok(())
}

/// Two hosts with a container each, and the traffic between them.
struct Mixed {
    lab: Lab,
    one: Container,
    two: Container,
    datagrams: [(UdpSocket, UdpSocket); 2],
    multicast: (UdpSocket, UdpSocket),
    tallies: BTreeMap<&'static str, Tally>,
}

impl Mixed {
    fn new(mode: &[&str]) -> anyhow::Result<Self> {
        let lab = Lab::pair(&[mode, &["--workers", "2", "--rekey-seconds", "3"]].concat())?;
        let (one, two) = lab.containers()?;
        keep_order([lab.host(0).netns(), lab.host(1).netns(), one.netns(), two.netns()])?;
        let (here, there) = (namespace(&one), namespace(&two));
        let socket = |place: &std::path::Path, address: IpAddr| {
            probe::udp_in(place, SocketAddr::new(address, 0))
        };
        let receiver = probe::multicast_receiver(&there, two.ipv4()?, GROUP.0, GROUP.1)?;
        for container in [&one, &two] {
            resend_on_loss_alone(container)?;
        }
        let kinds = ["streams", "datagrams", "pings", "multicast", "visitors"];
        Ok(Self {
            datagrams: [
                (socket(&here, one.ipv4()?.into())?, socket(&there, two.ipv4()?.into())?),
                (socket(&there, two.ipv6()?.into())?, socket(&here, one.ipv6()?.into())?),
            ],
            multicast: (socket(&here, one.ipv4()?.into())?, receiver),
            tallies: kinds.map(|kind| (kind, Tally::default())).into(),
            lab,
            one,
            two,
        })
    }

    /// All loads at once.
    fn run(&self, seconds: u64) -> anyhow::Result<()> {
        let until = Instant::now() + Duration::from_secs(seconds);
        let (v4, v6) = (self.two.ipv4()?.into(), self.one.ipv6()?.into());
        let to_two = [v4, self.two.ipv6()?.into()];
        let visited = [v4, self.one.ipv4()?.into()];
        let tally = |kind: &str| &self.tallies[kind];
        thread::scope(|scope| {
            let loads = [
                scope.spawn(|| streams(&self.one, v4, until, tally("streams"))),
                scope.spawn(|| streams(&self.two, v6, until, tally("streams"))),
                scope.spawn(|| datagrams(&self.datagrams[0], until, tally("datagrams"))),
                scope.spawn(|| datagrams(&self.datagrams[1], until, tally("datagrams"))),
                scope.spawn(|| pings(&self.one, &to_two, until, tally("pings"))),
                scope.spawn(|| multicast(&self.multicast, until, tally("multicast"))),
                scope.spawn(|| visitors(&self.lab, visited, until, tally("visitors"))),
            ];
            loads
                .into_iter()
                .try_for_each(|load| load.join().map_err(|_| anyhow::anyhow!("a load panicked"))?)
        })
    }

    fn held(&self) -> anyhow::Result<Vec<Held>> {
        self.lab.sandbox.hosts().iter().map(Held::by).collect()
    }

    /// Waits until each daemon holds no more than before, and returns its resources.
    fn settled(&self, before: &[Held]) -> anyhow::Result<Vec<Held>> {
        let mut held = Vec::new();
        let what = "descriptors and threads to be as few as before";
        let result = try_wait_until(what, SETTLE_LIMIT, || {
            held = self.held().unwrap_or_default();
            let few = |(now, then): (&Held, &Held)| {
                now.descriptors <= then.descriptors && now.threads <= then.threads
            };
            Ok(held.len() == before.len() && held.iter().zip(before).all(few))
        });
        result.map_err(|error| anyhow::anyhow!("{error}: {before:?} before, {held:?} after"))?;
        Ok(held)
    }

    /// Only full queues may have cost a packet.
    fn check_losses(&self) -> anyhow::Result<()> {
        let mut overflows = 0;
        for host in self.lab.sandbox.hosts() {
            let drops = drops(host)?;
            let others = drops.keys().filter(|name| !ALLOWED_DROPS.contains(&name.as_str()));
            assert_eq!(others.count(), 0, "{}: {drops:?}", host.nickname());
            overflows += OVERFLOWS.iter().filter_map(|name| drops.get(*name)).sum::<u64>();
            overflows += tap_overflows(host)?;
        }
        let tallies: Vec<_> = self.tallies.iter().map(|(kind, t)| (*kind, t.both())).collect();
        let lost: u64 = tallies.iter().map(|(_, (_, lost))| lost).sum();
        note(&format!("done and lost: {tallies:?}; {overflows} overflows of queues"));
        let datagrams = &self.tallies["datagrams"];
        let (overtaken, late) =
            (datagrams.overtaken.load(Ordering::Relaxed), datagrams.late.load(Ordering::Relaxed));
        note(&format!("{overtaken} datagrams were overtaken by the next ones, {late} were late"));
        let mut again = 0;
        for container in [&self.one, &self.two] {
            let sent_again = tcp_counter(container, "TcpRetransSegs")?;
            // A busy machine may delay a timer, so TCP resends a segment that was not lost. The receiver
            // reports each such duplicate.
            let needless = tcp_counter(container, "TcpExtTCPDSACKRecvSegs")?;
            let name = container.name();
            note(&format!("{name}: {sent_again} sent again, {needless} of them twice there"));
            again += sent_again.saturating_sub(needless);
            for name in ["TcpExtTCPSACKReorder", "TcpExtTCPRenoReorder", "TcpExtTCPTSReorder"] {
                assert_eq!(tcp_counter(container, name)?, 0, "{name} of {}", container.name());
            }
        }
        let explained = overflows * LOST_PER_OVERFLOW;
        assert!(again <= explained, "{again} segments sent again, {overflows} overflows");
        // Losses of the streams are in `again`, without segments that were only presumed lost.
        let lost = lost - self.tallies["streams"].both().1 - late;
        assert!(lost <= explained, "{tallies:?}, {overflows} overflows");
        Ok(())
    }
}

/// In one mode, which differs from run to run; in all of them in a soak.
#[test]
fn all_kinds_of_traffic_at_once_lose_nothing_and_the_daemons_do_not_grow() -> anyhow::Result<()> {
    if is_soak() {
        return MODES.iter().try_for_each(|mode| in_mode(mode, SECONDS_SOAK));
    }
    in_mode(MODES[seed()? as usize % MODES.len()], SECONDS)
}

fn in_mode(mode: &[&str], seconds: u64) -> anyhow::Result<()> {
    note(&format!("launched with {mode:?}"));
    let mixed = Mixed::new(mode)?;
    let _servers = (Server::start(&mixed.one)?, Server::start(&mixed.two)?);
    // Each kind of load fills its buffers and tables once.
    mixed.run(SECONDS_FIRST)?;
    let before = mixed.held()?;
    let mut looks: Vec<_> = before.iter().map(|held| vec![held.resident_kib]).collect();
    let rekeys = counter(mixed.lab.host(1), "rekeys")?;
    for _ in 0..PARTS {
        mixed.run(seconds / PARTS)?;
        for (held, looks) in mixed.settled(&before)?.iter().zip(&mut looks) {
            looks.push(held.resident_kib);
        }
    }
    let rekeys = counter(mixed.lab.host(1), "rekeys")? - rekeys;
    assert!(rekeys >= seconds / 4, "{rekeys} rekeys in {seconds} s");
    for (before, looks) in before.iter().zip(&looks) {
        note(&format!("{before:?} before; {looks:?} KiB with the parts of {seconds} s"));
        ensure_flat(looks)?;
    }
    for (kind, tally) in &mixed.tallies {
        assert!(tally.both().0 > 1, "no {kind}");
    }
    mixed.check_losses()
}
