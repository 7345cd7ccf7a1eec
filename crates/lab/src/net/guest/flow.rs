//! A stream of numbered datagrams between two containers: lost and duplicate datagrams, and the longest gap.

use std::collections::BTreeMap;
use std::net::{IpAddr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use weft_bench::sandbox::{Container, slowness};

use crate::net::{namespace, probe};

/// In every datagram: long enough never to occur by chance on a wire.
pub const MARKER: &[u8] = b"this sentence must never be readable on the wire between two hosts";
/// Time that the receiver goes on after the sender has ended, for copies. On real hardware it also waits for the
/// last datagram, and for those that are still on their way.
const DRAIN_MS: u64 = 1_500;
/// How often a thread looks whether it is to end.
const LOOK_MS: u64 = 100;
/// The sender's number stands behind the marker.
const NUMBER_BYTES: usize = 4;

/// A stream that runs until [`Flow::stop`].
pub struct Flow {
    stop: Arc<AtomicBool>,
    counts: Arc<Counts>,
    sender: Option<JoinHandle<Vec<Instant>>>,
    receiver: Option<JoinHandle<Vec<(u32, Instant)>>>,
}

/// Counters shared by both threads.
#[derive(Default)]
struct Counts {
    sent: AtomicU32,
    arrived: AtomicU32,
    /// The highest number that has arrived, plus one.
    newest: AtomicU32,
}

/// The fate of a stream.
pub struct FlowReport {
    /// When each datagram was sent.
    pub sent: Vec<Instant>,
    /// The datagrams in order of arrival.
    pub arrived: Vec<(u32, Instant)>,
}

impl Flow {
    /// Starts a stream over IPv4 with one datagram each `every`.
    ///
    /// # Errors
    /// As [`probe::udp_in`].
    pub fn start(from: &Container, to: &Container, every: Duration) -> anyhow::Result<Self> {
        Self::start_between(
            (from, from.ipv4()?.into()),
            (to, to.ipv4()?.into()),
            every,
            MARKER.len() + NUMBER_BYTES,
        )
    }

    /// As [`Flow::start`], between these addresses, with this many bytes in each datagram.
    ///
    /// # Errors
    /// As [`probe::udp_in`].
    pub fn start_between(
        from: (&Container, IpAddr),
        to: (&Container, IpAddr),
        every: Duration,
        length: usize,
    ) -> anyhow::Result<Self> {
        let receiver = probe::udp_in(&namespace(to.0), (to.1, 0).into())?;
        let sender = probe::udp_in(&namespace(from.0), (from.1, 0).into())?;
        receiver.set_read_timeout(Some(Duration::from_millis(LOOK_MS)))?;
        sender.connect(receiver.local_addr()?)?;
        let stop = Arc::new(AtomicBool::new(false));
        let counts = Arc::new(Counts::default());
        let (told, counted) = (Arc::clone(&stop), Arc::clone(&counts));
        let receiver = std::thread::spawn(move || receive(&receiver, &told, &counted));
        let (told, counted) = (Arc::clone(&stop), Arc::clone(&counts));
        let sender = std::thread::spawn(move || send(&sender, &told, &counted, every, length));
        Ok(Self { stop, counts, sender: Some(sender), receiver: Some(receiver) })
    }

    /// How many datagrams have come so far.
    #[must_use]
    pub fn arrived(&self) -> u32 {
        self.counts.arrived.load(Ordering::Relaxed)
    }

    /// Waits until this many more datagrams have arrived.
    ///
    /// # Errors
    /// They do not arrive in time.
    pub fn wait_more(&self, count: u32, limit: Duration) -> anyhow::Result<Duration> {
        let wanted = self.arrived() + count;
        let what = format!("{count} more datagrams");
        Ok(weft_bench::sandbox::wait_until(&what, limit, || self.arrived() >= wanted)?)
    }

    /// Ends the stream.
    ///
    /// # Errors
    /// A thread panicked.
    pub fn stop(mut self) -> anyhow::Result<FlowReport> {
        self.stop.store(true, Ordering::Relaxed);
        let panicked = || anyhow::anyhow!("a thread of the stream panicked");
        let sent = self.sender.take().map_or(Ok(Vec::new()), |it| it.join());
        let arrived = self.receiver.take().map_or(Ok(Vec::new()), |it| it.join());
        Ok(FlowReport {
            sent: sent.map_err(|_| panicked())?,
            arrived: arrived.map_err(|_| panicked())?,
        })
    }
}

impl Drop for Flow {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

impl FlowReport {
    /// Numbers that never came.
    #[must_use]
    pub fn lost(&self) -> Vec<u32> {
        let counts = self.counts();
        let sent = u32::try_from(self.sent.len()).unwrap_or(u32::MAX);
        (0..sent).filter(|number| !counts.contains_key(number)).collect()
    }

    /// Numbers that came more than once.
    #[must_use]
    pub fn doubled(&self) -> Vec<u32> {
        self.counts()
            .into_iter()
            .filter(|(_, count)| *count > 1)
            .map(|(number, _)| number)
            .collect()
    }

    /// That nothing was lost.
    ///
    /// # Errors
    /// Returns an error with the lost datagrams, and when they were sent, counted back from the last datagram.
    pub fn ensure_no_loss(&self) -> anyhow::Result<()> {
        let lost = self.lost();
        let (Some(first), Some(last)) = (lost.first(), lost.last()) else { return Ok(()) };
        let end = self.sent.last().copied();
        let before_end = |number: &u32| {
            let at = usize::try_from(*number).ok().and_then(|number| self.sent.get(number));
            end.zip(at).map_or(0, |(end, at)| (end - *at).as_millis())
        };
        let (sent, from, to) = (self.sent.len(), before_end(first), before_end(last));
        anyhow::bail!("of {sent} datagrams were lost {lost:?}, {from} to {to} ms before the end")
    }

    /// Whether a datagram arrived before another that was sent earlier.
    #[must_use]
    pub fn is_reordered(&self) -> bool {
        self.arrived.windows(2).any(|two| two[1].0 < two[0].0)
    }

    /// The longest time in which nothing came, of those that ended after `after`; the stream's end
    /// counts as an arrival.
    #[must_use]
    pub fn longest_gap(&self, after: Instant) -> Duration {
        let end = self.sent.last().copied();
        let mut times: Vec<Instant> = self.arrived.iter().map(|(_, at)| *at).chain(end).collect();
        times.sort_unstable();
        let gaps = times.windows(2).filter(|two| two[1] > after);
        gaps.map(|two| two[1] - two[0]).max().unwrap_or_default()
    }

    fn counts(&self) -> BTreeMap<u32, usize> {
        let mut counts = BTreeMap::new();
        for (number, _) in &self.arrived {
            *counts.entry(*number).or_default() += 1;
        }
        counts
    }
}

fn send(
    socket: &UdpSocket,
    stop: &AtomicBool,
    counts: &Counts,
    every: Duration,
    length: usize,
) -> Vec<Instant> {
    let mut datagram = vec![0; length.max(MARKER.len() + NUMBER_BYTES)];
    datagram[..MARKER.len()].copy_from_slice(MARKER);
    let mut sent: Vec<Instant> = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        let number = u32::try_from(sent.len()).unwrap_or(u32::MAX).to_be_bytes();
        datagram[MARKER.len()..MARKER.len() + NUMBER_BYTES].copy_from_slice(&number);
        sent.push(Instant::now());
        counts.sent.fetch_add(1, Ordering::Relaxed);
        // A refusal is a loss, and shows as one.
        let _ = socket.send(&datagram);
        std::thread::sleep(every);
    }
    sent
}

fn receive(socket: &UdpSocket, stop: &AtomicBool, counts: &Counts) -> Vec<(u32, Instant)> {
    let mut arrived = Vec::new();
    let mut buffer = vec![0; 65_536];
    let mut ended = None;
    loop {
        if stop.load(Ordering::Relaxed) {
            let ended = *ended.get_or_insert_with(Instant::now);
            let newest = counts.newest.load(Ordering::Relaxed);
            let on_its_way = newest < counts.sent.load(Ordering::Relaxed);
            let longer = if on_its_way { slowness() } else { 1 };
            if ended.elapsed() >= Duration::from_millis(DRAIN_MS) * longer {
                return arrived;
            }
        }
        let Ok(length) = socket.recv(&mut buffer) else { continue };
        let number = buffer[..length].strip_prefix(MARKER).and_then(|rest| rest.first_chunk());
        if let Some(number) = number {
            let number = u32::from_be_bytes(*number);
            arrived.push((number, Instant::now()));
            counts.newest.fetch_max(number + 1, Ordering::Relaxed);
            counts.arrived.fetch_add(1, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_tells_losses_doubles_and_the_longest_gap() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let sent = [0, 10, 20, 30, 40].map(at).to_vec();
        let arrived = vec![(0, at(1)), (2, at(21)), (1, at(22)), (1, at(23))];
        let report = FlowReport { sent, arrived };
        assert_eq!(report.lost(), [3, 4]);
        assert_eq!(report.doubled(), [1]);
        assert!(report.is_reordered());
        let words = report.ensure_no_loss().map_err(|error| error.to_string());
        let expected = "of 5 datagrams were lost [3, 4], 10 to 0 ms before the end";
        assert_eq!(words, Err(expected.to_owned()));
        assert_eq!(report.longest_gap(start), Duration::from_millis(20));
        assert_eq!(report.longest_gap(at(22)), Duration::from_millis(17));
    }
}
