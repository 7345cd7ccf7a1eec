//! One round of measurements of one row: TCP by iperf3, datagrams and requests by the benchmark's own ends.
//! Processor time of the whole machine comes from `/proc/stat`.

use std::net::{IpAddr, SocketAddr};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::cpu::CpuTime;
use super::peer::{FloodResult, RrResult, SinkResult};
use super::rows::Row;
use crate::sandbox::{Netns, Running, SandboxError};

/// Payload of the large datagrams, in bytes: fits every row's MTU in one packet.
pub const UDP_PAYLOAD_BYTES: usize = 1350;
/// Payload of the small datagrams, in bytes.
pub const SMALL_PAYLOAD_BYTES: usize = 64;
/// A rate counts as carried if not more than this share of the datagrams is lost.
pub const LOSS_MAX: f64 = 0.005;

/// Steps of the search for the greatest rate that is carried.
const SEARCH_STEPS: usize = 6;
/// Limit of a server's start until it listens.
const SERVER_LIMIT: Duration = Duration::from_secs(10);
/// Pause before a server that does not listen yet is tried again.
const SERVER_PAUSE: Duration = Duration::from_millis(200);
/// Limit of a client beyond the length of its run.
const CLIENT_GRACE: Duration = Duration::from_secs(20);
/// A datagram run that lost everything is known after this time.
const SINK_LIMIT: Duration = Duration::from_secs(2);

/// How much longer the stream beside the requests runs than they do, in seconds. It begins half of this
/// before them.
const LOAD_LEAD_S: u64 = 1;

const IPERF_PORT: u16 = 5201;
const RR_PORT: u16 = 7001;
const UDP_PORT: u16 = 7002;

/// How long each measurement runs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Lengths {
    /// Seconds of each TCP run.
    pub tcp_seconds: u64,
    /// Seconds of the request/response run.
    pub rr_seconds: f64,
    /// Seconds of each datagram trial; the search takes up to seven.
    pub trial_seconds: f64,
    /// Whether the 64-byte rate is measured.
    pub small_datagrams: bool,
    /// Whether eight streams, both directions at once and requests beside a stream are measured.
    pub more: bool,
}

/// The figures of one round of one row.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Sample {
    /// TCP, one stream, Gbit/s of payload.
    pub tcp1_gbps: f64,
    /// TCP, four streams, Gbit/s of payload.
    pub tcp4_gbps: f64,
    /// TCP, eight streams, Gbit/s of payload.
    pub tcp8_gbps: Option<f64>,
    /// TCP, one stream each way at once, Gbit/s of payload of both together.
    pub tcp_both_gbps: Option<f64>,
    /// Datagrams of 1,350 B at the greatest rate carried, Gbit/s of payload.
    pub udp_gbps: f64,
    /// Share of these that was lost at that rate, 0 to 1.
    pub udp_loss: f64,
    /// 64-byte datagrams a second at the greatest rate carried.
    pub pps64: Option<f64>,
    /// One byte there and back, times a second.
    pub rr_tps: f64,
    /// Median of these in microseconds.
    pub rr_p50_us: f64,
    /// 99th percentile of these in microseconds.
    pub rr_p99_us: f64,
    /// One byte there and back, times a second, while one TCP stream runs beside.
    pub load_tps: Option<f64>,
    /// Median in microseconds while one TCP stream runs beside.
    pub load_p50_us: Option<f64>,
    /// 99th percentile in microseconds while one TCP stream runs beside.
    pub load_p99_us: Option<f64>,
    /// Busy processor seconds of the whole machine per gigabit, during the run with one stream.
    pub core_s_per_gbit: f64,
    /// Resident memory of the daemon of one end (the larger), MiB.
    pub rss_mib: Option<f64>,
}

/// The servers of one row. They run until dropped.
#[derive(Debug)]
pub struct Servers {
    pub(super) sink: Running,
    _others: [Running; 2],
}

impl Servers {
    /// Starts the servers in the row's server namespace and waits until they listen.
    ///
    /// # Errors
    /// Returns an error if a server fails.
    pub fn start(row: &Row, binary: &str) -> Result<Self, SandboxError> {
        Self::start_in(&row.server, row.server_address, binary)
    }

    /// As [`Self::start`], in a namespace that has this address.
    pub(super) fn start_in(
        server: &Netns,
        address: IpAddr,
        binary: &str,
    ) -> Result<Self, SandboxError> {
        let port = IPERF_PORT.to_string();
        let mut iperf = server.spawn(&["iperf3", "-s", "--forceflush", "-p", &port])?;
        let start = |part: &str, port: u16| -> Result<Running, SandboxError> {
            let bind = SocketAddr::new(address, port).to_string();
            let mut server = server.spawn(&[binary, "peer", part, "--bind", &bind])?;
            server.line_with("ready", SERVER_LIMIT)?;
            Ok(server)
        };
        let requests = start("rr-server", RR_PORT)?;
        let sink = start("udp-sink", UDP_PORT)?;
        iperf.line_with("listening", SERVER_LIMIT)?;
        Ok(Self { sink, _others: [iperf, requests] })
    }
}

/// Measures one row once.
///
/// # Errors
/// Returns an error if a client fails.
pub fn measure(
    row: &Row,
    servers: &mut Servers,
    binary: &str,
    lengths: Lengths,
) -> Result<Sample, SandboxError> {
    let before = CpuTime::now()?;
    let one = tcp(&row.client, row.server_address, 1, lengths.tcp_seconds)?;
    let busy_seconds = CpuTime::now()?.busy_since(before);
    let rss_mib = row.daemons.iter().filter_map(|pid| resident_mib(*pid)).reduce(f64::max);
    let four = tcp(&row.client, row.server_address, 4, lengths.tcp_seconds)?;
    let (mut eight, mut both, mut loaded) = (None, None, None);
    if lengths.more {
        eight = Some(tcp(&row.client, row.server_address, 8, lengths.tcp_seconds)?);
        both = Some(tcp_both(&row.client, row.server_address, lengths.tcp_seconds)?);
        loaded = Some(requests_beside_a_stream(row, binary, lengths.rr_seconds)?);
    }
    let (client, server) = (&row.client, row.server_address);
    let (sink, seconds) = (&mut servers.sink, lengths.trial_seconds);
    let mut datagrams = Datagrams { client, server, binary, sink, seconds };
    let large = datagrams.greatest_rate(UDP_PAYLOAD_BYTES)?;
    let small = match lengths.small_datagrams {
        true => Some(datagrams.greatest_rate(SMALL_PAYLOAD_BYTES)?),
        false => None,
    };
    let requests = requests(row, binary, lengths.rr_seconds)?;
    Ok(Sample {
        tcp1_gbps: one.gbps,
        tcp4_gbps: four.gbps,
        tcp8_gbps: eight.map(|eight| eight.gbps),
        tcp_both_gbps: both.map(|both| both.gbps),
        udp_gbps: large.received_per_s * UDP_PAYLOAD_BYTES as f64 * 8.0 / 1e9,
        udp_loss: large.loss,
        pps64: small.map(|trial| trial.received_per_s),
        rr_tps: requests.per_second(),
        rr_p50_us: requests.p50_us,
        rr_p99_us: requests.p99_us,
        load_tps: loaded.as_ref().map(RrResult::per_second),
        load_p50_us: loaded.as_ref().map(|loaded| loaded.p50_us),
        load_p99_us: loaded.as_ref().map(|loaded| loaded.p99_us),
        core_s_per_gbit: busy_seconds / one.gigabits.max(f64::MIN_POSITIVE),
        rss_mib,
    })
}

/// The result of an iperf3 client.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TcpResult {
    /// Gbit/s that the server got.
    pub gbps: f64,
    /// Gigabits that the server got in all.
    pub gigabits: f64,
    /// Segments that were sent again.
    pub retransmits: u64,
}

/// Runs iperf3 with TCP from a namespace to a server on iperf3's port.
///
/// # Errors
/// Returns an error if iperf3 fails.
pub fn tcp(
    client: &Netns,
    server: IpAddr,
    streams: u32,
    seconds: u64,
) -> Result<TcpResult, SandboxError> {
    tcp_on(client, (server, IPERF_PORT), &["-P", &streams.to_string()], seconds)
}

/// As [`tcp`], with one stream each way at once; the figures are of both together.
///
/// # Errors
/// Returns an error if iperf3 fails.
pub fn tcp_both(client: &Netns, server: IpAddr, seconds: u64) -> Result<TcpResult, SandboxError> {
    tcp_on(client, (server, IPERF_PORT), &["--bidir"], seconds)
}

/// As [`tcp`], for each stream separately: Gbit/s that the server got of it.
///
/// # Errors
/// Returns an error if iperf3 fails.
pub fn tcp_streams(
    client: &Netns,
    server: IpAddr,
    streams: u32,
    seconds: u64,
) -> Result<Vec<f64>, SandboxError> {
    let to = (server, IPERF_PORT);
    let (command, json) = iperf_json(client, to, &["-P", &streams.to_string()], seconds)?;
    let rates = parse_streams(&json).filter(|rates| rates.len() == streams as usize);
    rates.ok_or_else(|| SandboxError::UnexpectedOutput {
        command,
        why: "no end.streams.receiver.bits_per_second of each".to_owned(),
    })
}

/// TCP's measurements of a path that it filled.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct TcpPressure {
    /// Gbit/s that the server got, of all streams together.
    pub(super) gbps: f64,
    /// Segments sent again of a million.
    pub(super) resent_ppm: f64,
    /// The smoothed round-trip time, mean over time and streams, microseconds.
    pub(super) rtt_us: f64,
    /// The greatest of them, microseconds.
    pub(super) rtt_max_us: f64,
}

/// As [`tcp`], with the state of the sender's sockets ten times a second.
///
/// # Errors
/// Returns an error if iperf3 fails.
pub(super) fn tcp_pressure(
    client: &Netns,
    server: IpAddr,
    streams: u32,
    seconds: u64,
) -> Result<TcpPressure, SandboxError> {
    let options = ["-P", &streams.to_string(), "-i", "0.1"];
    let (command, json) = iperf_json(client, (server, IPERF_PORT), &options, seconds)?;
    parse_pressure(&json).ok_or_else(|| SandboxError::UnexpectedOutput {
        command,
        why: "no end.streams.sender.mean_rtt of each".to_owned(),
    })
}

fn parse_pressure(json: &Value) -> Option<TcpPressure> {
    let all = parse_iperf(json)?;
    let senders = json.pointer("/end/streams")?.as_array()?.iter();
    let senders: Vec<&Value> = senders.map(|stream| stream.get("sender")).collect::<Option<_>>()?;
    let values = |name: &str| {
        let values = senders.iter().map(|sender| sender.get(name)?.as_f64());
        values.collect::<Option<Vec<f64>>>()
    };
    let (mean, max) = (values("mean_rtt")?, values("max_rtt")?);
    let mss = json.pointer("/start/tcp_mss_default")?.as_f64()?;
    let segments = values("bytes")?.iter().sum::<f64>() / mss;
    Some(TcpPressure {
        gbps: all.gbps,
        resent_ppm: all.retransmits as f64 * 1e6 / segments.max(1.0),
        rtt_us: mean.iter().sum::<f64>() / mean.len().max(1) as f64,
        rtt_max_us: max.iter().copied().fold(0.0, f64::max),
    })
}

fn parse_streams(json: &Value) -> Option<Vec<f64>> {
    let streams = json.pointer("/end/streams")?.as_array()?.iter();
    let rate = |stream: &Value| Some(stream.pointer("/receiver/bits_per_second")?.as_f64()? / 1e9);
    streams.map(rate).collect()
}

/// As [`tcp`], to any port, with options of iperf3.
///
/// # Errors
/// Returns an error if iperf3 fails.
pub(super) fn tcp_on(
    client: &Netns,
    to: (IpAddr, u16),
    options: &[&str],
    seconds: u64,
) -> Result<TcpResult, SandboxError> {
    let (command, json) = iperf_json(client, to, options, seconds)?;
    parse_iperf(&json).ok_or_else(|| SandboxError::UnexpectedOutput {
        command,
        why: "no end.sum_received.bits_per_second".to_owned(),
    })
}

/// The command and its report.
fn iperf_json(
    client: &Netns,
    (server, port): (IpAddr, u16),
    options: &[&str],
    seconds: u64,
) -> Result<(String, Value), SandboxError> {
    let (address, port, time) = (server.to_string(), port.to_string(), seconds.to_string());
    let words = ["iperf3", "-J", "-c", &address, "-p", &port, "-C", "cubic", "-t", &time];
    let words = [&words[..], options, &["--connect-timeout", "5000"]].concat();
    let limit = Duration::from_secs(seconds) + CLIENT_GRACE;
    let deadline = Instant::now() + SERVER_LIMIT;
    loop {
        let output = client.exec_within(limit, &words)?;
        let json = output.json();
        match json.as_ref().ok().and_then(|json| json.get("error")?.as_str()) {
            Some(error) if is_not_ready(error) && Instant::now() < deadline => {
                thread::sleep(SERVER_PAUSE);
            }
            Some(error) => {
                let why = error.to_owned();
                return Err(SandboxError::UnexpectedOutput { command: output.command, why });
            }
            None => {
                let json = output.clone().success().and(json)?;
                return Ok((output.command, json));
            }
        }
    }
}

/// Whether iperf3's server is not ready for the next test. After each test it says that it is busy until it
/// listens again. On a busy machine both take a moment.
#[must_use]
pub fn is_not_ready(error: &str) -> bool {
    error.ends_with("Connection refused") || error.contains("server is busy")
}

fn parse_iperf(json: &Value) -> Option<TcpResult> {
    let end = json.get("end")?;
    let forward = parse_direction(end, "sum_received", "/sum_sent/retransmits")?;
    let reverse = "/sum_sent_bidir_reverse/retransmits";
    let Some(back) = parse_direction(end, "sum_received_bidir_reverse", reverse) else {
        return Some(forward);
    };
    Some(TcpResult {
        gbps: forward.gbps + back.gbps,
        gigabits: forward.gigabits + back.gigabits,
        retransmits: forward.retransmits + back.retransmits,
    })
}

fn parse_direction(end: &Value, received: &str, retransmits: &str) -> Option<TcpResult> {
    let received = end.get(received)?;
    Some(TcpResult {
        gbps: received.get("bits_per_second")?.as_f64()? / 1e9,
        gigabits: received.get("bytes")?.as_f64()? * 8.0 / 1e9,
        retransmits: end.pointer(retransmits).and_then(Value::as_u64).unwrap_or(0),
    })
}

/// Runs one request/response client.
///
/// # Errors
/// Returns an error if the client fails.
pub fn requests(row: &Row, binary: &str, seconds: f64) -> Result<RrResult, SandboxError> {
    let connect = SocketAddr::new(row.server_address, RR_PORT).to_string();
    let time = seconds.to_string();
    let words = [binary, "peer", "rr-client", "--connect", &connect, "--seconds", &time];
    let limit = Duration::from_secs_f64(seconds) + CLIENT_GRACE;
    let output = row.client.exec_within(limit, &words)?.success()?;
    parse_line(&output.command, &output.stdout)
}

/// As [`requests`], while one TCP stream takes all that the path carries.
fn requests_beside_a_stream(
    row: &Row,
    binary: &str,
    seconds: f64,
) -> Result<RrResult, SandboxError> {
    thread::scope(|scope| {
        let stream_seconds = seconds.ceil() as u64 + LOAD_LEAD_S;
        let (client, server) = (&row.client, row.server_address);
        let stream = scope.spawn(move || tcp(client, server, 1, stream_seconds));
        thread::sleep(Duration::from_secs(LOAD_LEAD_S) / 2);
        let result = requests(row, binary, seconds);
        stream.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        result
    })
}

/// One trial of datagrams at one rate.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Trial {
    sent_per_s: f64,
    pub(super) received_per_s: f64,
    loss: f64,
}

/// One sender of datagrams and the sink that counts them.
#[derive(Debug)]
pub(super) struct Datagrams<'a> {
    pub(super) client: &'a Netns,
    pub(super) server: IpAddr,
    pub(super) binary: &'a str,
    pub(super) sink: &'a mut Running,
    /// Seconds of a trial.
    pub(super) seconds: f64,
}

impl Datagrams<'_> {
    fn greatest_rate(&mut self, size: usize) -> Result<Trial, SandboxError> {
        greatest_rate(|rate| self.trial(size, rate))
    }

    /// Datagrams of one size at one rate; 0: as fast as it goes.
    pub(super) fn trial(&mut self, size: usize, rate: f64) -> Result<Trial, SandboxError> {
        let connect = SocketAddr::new(self.server, UDP_PORT).to_string();
        let (size_text, rate_text) = (size.to_string(), rate.to_string());
        let time = self.seconds.to_string();
        let words = [
            self.binary,
            "peer",
            "udp-flood",
            "--connect",
            &connect,
            "--size",
            &size_text,
            "--seconds",
            &time,
            "--rate",
            &rate_text,
        ];
        let limit = Duration::from_secs_f64(self.seconds) + CLIENT_GRACE;
        let output = self.client.exec_within(limit, &words)?.success()?;
        let flood: FloodResult = parse_line(&output.command, &output.stdout)?;
        let received = self.received()?;
        Ok(Trial {
            sent_per_s: flood.sent as f64 / flood.seconds,
            received_per_s: received as f64 / flood.seconds,
            loss: 1.0 - (received as f64 / (flood.sent as f64).max(1.0)).min(1.0),
        })
    }

    /// Sums the sink's lines: a pause in a run of datagrams makes it print more than one.
    fn received(&mut self) -> Result<u64, SandboxError> {
        let mut sum = 0;
        let mut limit = SINK_LIMIT;
        loop {
            match self.sink.line(limit) {
                Ok(line) => {
                    let run: SinkResult = parse_line("weft-bench peer udp-sink", &line)?;
                    sum += run.received;
                    limit = SINK_LIMIT / 8;
                }
                Err(SandboxError::WaitTimedOut { .. }) => return Ok(sum),
                Err(error) => return Err(error),
            }
        }
    }
}

/// Searches the greatest rate at which not more than [`LOSS_MAX`] is lost. The first trial has no
/// limit of rate; where that loses too much, the rate is halved in on by bisection. Rate 0 in a
/// trial means no limit.
fn greatest_rate(
    mut trial: impl FnMut(f64) -> Result<Trial, SandboxError>,
) -> Result<Trial, SandboxError> {
    let free = trial(0.0)?;
    if free.loss <= LOSS_MAX {
        return Ok(free);
    }
    // An overloaded receiver lacks the sender's share of the processor. So the carried rate may exceed the
    // arrivals under overload, but never the sent rate.
    let (mut carried, mut too_much) = (0.0, free.sent_per_s);
    let mut rate = free.received_per_s.max(free.sent_per_s / 64.0);
    let mut best: Option<Trial> = None;
    for _ in 0..SEARCH_STEPS {
        let result = trial(rate)?;
        if result.loss <= LOSS_MAX {
            carried = rate;
            if best.is_none_or(|best| result.received_per_s > best.received_per_s) {
                best = Some(result);
            }
        } else {
            too_much = rate;
        }
        rate = f64::midpoint(carried, too_much);
    }
    // Nothing was carried: the figure is what arrived under overload, with its loss beside it.
    Ok(best.unwrap_or(free))
}

pub(super) fn parse_line<T: serde::de::DeserializeOwned>(
    command: &str,
    text: &str,
) -> Result<T, SandboxError> {
    serde_json::from_str(text.trim()).map_err(|error| SandboxError::UnexpectedOutput {
        command: command.to_owned(),
        why: format!("{error}: {text}"),
    })
}

/// Resident memory of a process, MiB.
pub(super) fn resident_mib(pid: u32) -> Option<f64> {
    resident_of_status(&std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?)
}

fn resident_of_status(status: &str) -> Option<f64> {
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kib: f64 = line.split_whitespace().next()?.parse().ok()?;
    Some(kib / 1024.0)
}

/// Sends pings and wants them answered, before anything is measured.
///
/// # Errors
/// Returns an error if `ping` fails.
pub fn reach(row: &Row, address: IpAddr) -> Result<(), SandboxError> {
    let address = address.to_string();
    row.client.exec(&["ping", "-n", "-c", "2", "-i", "0.2", "-W", "2", &address])?.success()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_server_that_is_not_ready_yet_is_told_from_one_that_is_lost() {
        assert!(is_not_ready("unable to connect to server: Connection refused"));
        assert!(is_not_ready("the server is busy running a test. try again later"));
        assert!(!is_not_ready("control socket has closed unexpectedly"));
    }

    #[test]
    fn iperf3_json_gives_rate_volume_and_retransmissions() {
        let json = serde_json::json!({"end": {
            "sum_sent": {"bytes": 12_600_000_000_u64, "bits_per_second": 10.08e9, "retransmits": 3},
            "sum_received": {"bytes": 12_500_000_000_u64, "bits_per_second": 1e10}
        }});
        let result = parse_iperf(&json).unwrap();
        assert_eq!(result, TcpResult { gbps: 10.0, gigabits: 100.0, retransmits: 3 });
        assert_eq!(parse_iperf(&serde_json::json!({"error": "unable to connect"})), None);
    }

    #[test]
    fn each_stream_has_its_own_rate() {
        let stream = |rate: f64| serde_json::json!({"receiver": {"bits_per_second": rate}});
        let json = serde_json::json!({"end": {"streams": [stream(2e9), stream(5e8)]}});
        assert_eq!(parse_streams(&json), Some(vec![2.0, 0.5]));
        assert_eq!(parse_streams(&serde_json::json!({"end": {"streams": [{}]}})), None);
    }

    #[test]
    fn tcp_counters_under_pressure_cover_all_streams() {
        let sender = |mean: u64, max: u64, bytes: u64| serde_json::json!({"sender": {"mean_rtt": mean, "max_rtt": max, "bytes": bytes}});
        let mut json = serde_json::json!({"start": {"tcp_mss_default": 1_000}, "end": {
            "streams": [sender(300, 900, 1_500_000), sender(500, 700, 500_000)],
            "sum_sent": {"retransmits": 4},
            "sum_received": {"bytes": 2_000_000, "bits_per_second": 2e9}
        }});
        let seen = parse_pressure(&json).unwrap();
        let wanted =
            TcpPressure { gbps: 2.0, resent_ppm: 2_000.0, rtt_us: 400.0, rtt_max_us: 900.0 };
        assert_eq!(seen, wanted);
        json["end"]["streams"][1]["sender"] = serde_json::json!({});
        assert_eq!(parse_pressure(&json), None);
    }

    #[test]
    fn of_both_directions_at_once_the_sum_counts() {
        let sum =
            |bytes: u64, rate: f64| serde_json::json!({"bytes": bytes, "bits_per_second": rate});
        let json = serde_json::json!({"end": {
            "sum_sent": {"retransmits": 3}, "sum_received": sum(2_500_000_000, 2e9),
            "sum_sent_bidir_reverse": {"retransmits": 4},
            "sum_received_bidir_reverse": sum(1_250_000_000, 1e9)
        }});
        let result = parse_iperf(&json).unwrap();
        assert_eq!(result, TcpResult { gbps: 3.0, gigabits: 30.0, retransmits: 7 });
    }

    #[test]
    fn resident_memory_is_read_in_mebibytes() {
        assert_eq!(resident_of_status("Name:\tweft\nVmRSS:\t   20480 kB\n"), Some(20.0));
        assert_eq!(resident_of_status("Name:\tkthread\n"), None);
    }

    /// A path that carries `capacity` datagrams a second from a sender that can do `ability`.
    fn path(ability: f64, capacity: f64) -> impl FnMut(f64) -> Result<Trial, SandboxError> {
        move |rate| {
            let sent_per_s = if rate == 0.0 { ability } else { rate.min(ability) };
            let received_per_s = sent_per_s.min(capacity);
            Ok(Trial { sent_per_s, received_per_s, loss: 1.0 - received_per_s / sent_per_s })
        }
    }

    #[test]
    fn a_path_that_loses_nothing_needs_one_trial() {
        let mut trials = 0;
        let mut path = path(500_000.0, 900_000.0);
        let best = greatest_rate(|rate| {
            trials += 1;
            path(rate)
        });
        assert_eq!((best.unwrap().received_per_s, trials), (500_000.0, 1));
    }

    #[test]
    fn the_search_finds_the_capacity() {
        for capacity in [20_000.0, 111_111.0, 444_000.0] {
            let best = greatest_rate(path(500_000.0, capacity)).unwrap();
            assert!(best.loss <= LOSS_MAX, "{best:?}");
            assert!((best.received_per_s / capacity - 1.0).abs() < 0.05, "{capacity}: {best:?}");
        }
    }

    #[test]
    fn a_path_that_always_loses_shows_its_loss() {
        let lossy = |rate: f64| {
            let sent_per_s = if rate == 0.0 { 100_000.0 } else { rate };
            Ok(Trial { sent_per_s, received_per_s: sent_per_s / 2.0, loss: 0.5 })
        };
        let result = greatest_rate(lossy).unwrap();
        assert_eq!((result.loss, result.received_per_s), (0.5, 50_000.0));
    }
}
