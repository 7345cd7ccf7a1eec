//! What the gateway tells programs that watch it: its state, its log, and clients that have come. The last of it is kept.

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use tokio::sync::broadcast;

use super::roster::{real, unix_time};

/// States that are kept.
const STATES_MAX: usize = 100;
/// Lines of the log that are kept: as many as OpenVPN keeps.
const LINES_MAX: usize = 250;
/// What a watcher may not have taken yet. It loses what is older.
const TOLD_MAX: usize = 1_024;
/// How much is said where nobody says otherwise, as OpenVPN counts it.
const VERB: u8 = 3;
/// The highest that OpenVPN knows.
pub(super) const VERB_MAX: u8 = 15;

/// How grave a line of the log is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Weight {
    /// Something did not work.
    Fault,
    /// Somebody was refused.
    Warning,
    /// All else.
    Info,
    /// A command of a watcher.
    Command,
}

/// Something that was told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Told {
    /// A state, as OpenVPN's management interface writes it.
    State(String),
    /// A line of the log, as OpenVPN's management interface writes it.
    Line(String),
    /// A client is connected.
    Established(Established),
}

/// A client that is connected now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Established {
    pub(super) number: u32,
    pub(super) name: String,
    pub(super) user: Option<String>,
    pub(super) real_address: SocketAddr,
    pub(super) addresses: Vec<IpAddr>,
    pub(super) version: Option<String>,
    pub(super) platform: Option<String>,
    pub(super) at: SystemTime,
}

/// The last of what was told, and who is told more.
pub(super) struct Journal {
    kept: Mutex<Kept>,
    watchers: broadcast::Sender<Arc<Told>>,
    verb: AtomicU8,
    /// Notices that watchers did not take in time.
    lost: AtomicU64,
}

#[derive(Default)]
struct Kept {
    states: VecDeque<String>,
    lines: VecDeque<String>,
}

impl Weight {
    /// From which level on it is told.
    const fn level(self) -> u8 {
        match self {
            Self::Fault | Self::Warning | Self::Info => 1,
            Self::Command => 3,
        }
    }

    /// OpenVPN's letter.
    const fn letter(self) -> &'static str {
        match self {
            Self::Fault => "N",
            Self::Warning => "W",
            Self::Info => "I",
            Self::Command => "D",
        }
    }
}

impl Default for Journal {
    fn default() -> Self {
        Self {
            kept: Mutex::default(),
            watchers: broadcast::Sender::new(TOLD_MAX),
            verb: AtomicU8::new(VERB),
            lost: AtomicU64::new(0),
        }
    }
}

impl Journal {
    /// Notes a state: its name, more about it, and this host's addresses on the network.
    pub(super) fn state(&self, name: &str, text: &str, own: &[IpAddr]) {
        let of = |is_ipv4: bool| own.iter().find(|address| address.is_ipv4() == is_ipv4);
        let ipv4 = of(true).map(ToString::to_string).unwrap_or_default();
        let ipv6 = of(false).map(|address| format!(",{address}")).unwrap_or_default();
        let (at, text) = (unix_time(SystemTime::now()), plain(text, ','));
        let state = format!("{at},{name},{text},{ipv4},,,,{ipv6}");
        keep(&mut self.lock().states, STATES_MAX, &state);
        self.tell(Told::State(state));
    }

    /// Notes a line of the log.
    pub(super) fn line(&self, weight: Weight, text: &str) {
        if self.verb() < weight.level() {
            return;
        }
        let (at, letter) = (unix_time(SystemTime::now()), weight.letter());
        let line = format!("{at},{letter},{}", plain(text, '\0'));
        keep(&mut self.lock().lines, LINES_MAX, &line);
        self.tell(Told::Line(line));
    }

    /// Notes a line of the log about a client.
    pub(super) fn line_of(&self, weight: Weight, name: &str, from: SocketAddr, text: &str) {
        self.line(weight, &format!("{name}/{} {text}", real(from)));
    }

    /// Tells that a client is connected.
    pub(super) fn established(&self, client: Established) {
        self.tell(Told::Established(client));
    }

    /// The last states, at most so many, the oldest first.
    pub(super) fn states(&self, max: usize) -> Vec<String> {
        last(&self.lock().states, max)
    }

    /// The last lines of the log, at most so many, the oldest first.
    pub(super) fn lines(&self, max: usize) -> Vec<String> {
        last(&self.lock().lines, max)
    }

    /// What is told from now on.
    pub(super) fn watch(&self) -> broadcast::Receiver<Arc<Told>> {
        self.watchers.subscribe()
    }

    /// Notices that watchers did not take in time.
    pub(super) fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }

    /// A watcher has lost so many.
    pub(super) fn count_lost(&self, count: u64) {
        self.lost.fetch_add(count, Ordering::Relaxed);
    }

    /// How much is said.
    pub(super) fn verb(&self) -> u8 {
        self.verb.load(Ordering::Relaxed)
    }

    /// Has more or less said.
    pub(super) fn set_verb(&self, verb: u8) {
        self.verb.store(verb, Ordering::Relaxed);
    }

    fn tell(&self, told: Told) {
        // Nobody may watch.
        let _ = self.watchers.send(Arc::new(told));
    }

    fn lock(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn keep(kept: &mut VecDeque<String>, max: usize, text: &str) {
    if kept.len() >= max {
        kept.pop_front();
    }
    kept.push_back(text.to_owned());
}

fn last(kept: &VecDeque<String>, max: usize) -> Vec<String> {
    kept.iter().skip(kept.len().saturating_sub(max)).cloned().collect()
}

/// A text that makes no line and no column of its own.
pub(super) fn plain(text: &str, separator: char) -> String {
    let is_bad = |char: char| char.is_control() || char == separator;
    text.chars().map(|char| if is_bad(char) { '_' } else { char }).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn the_last_lines_are_kept_and_all_are_told() {
        let journal = Journal::default();
        let mut watcher = journal.watch();
        for number in 0..LINES_MAX + 5 {
            journal.line(Weight::Info, &format!("line {number}"));
        }
        assert_eq!(journal.lines(usize::MAX).len(), LINES_MAX);
        let last = journal.lines(2);
        assert!(last[0].ends_with(",I,line 253") && last[1].ends_with(",I,line 254"), "{last:?}");
        let told = watcher.try_recv().unwrap();
        assert!(matches!(&*told, Told::Line(line) if line.ends_with(",I,line 0")), "{told:?}");
    }

    #[test]
    fn a_state_has_openvpns_columns_and_a_text_makes_none() {
        let journal = Journal::default();
        journal.state("CONNECTING", "", &[]);
        let own = ["10.77.0.1".parse().unwrap(), "fd00:77::1".parse().unwrap()];
        journal.state("CONNECTED", "SUCCESS", &own);
        journal.state("RECONNECTING", "a,b\nc", &[]);
        let states = journal.states(usize::MAX);
        let rest: Vec<&str> =
            states.iter().map(|state| &state[state.find(',').unwrap()..]).collect();
        let expected = [
            ",CONNECTING,,,,,,",
            ",CONNECTED,SUCCESS,10.77.0.1,,,,,fd00:77::1",
            ",RECONNECTING,a_b_c,,,,,",
        ];
        assert_eq!(rest, expected);
    }

    #[test]
    fn less_is_said_where_somebody_wants_less() {
        let journal = Journal::default();
        journal.line(Weight::Command, "shown");
        journal.set_verb(2);
        journal.line(Weight::Command, "not shown");
        journal.line(Weight::Warning, "a\nb");
        let lines = journal.lines(usize::MAX);
        assert!(lines.len() == 2 && lines[1].ends_with(",W,a_b"), "{lines:?}");
        journal.set_verb(0);
        journal.line(Weight::Fault, "not shown either");
        assert_eq!(journal.lines(usize::MAX).len(), 2);
    }
}
