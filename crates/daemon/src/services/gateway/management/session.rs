//! One connection to the management interface, without its socket: lines in, lines out, and questions to the gateway.
//!
//! Commands, answers and notices are those of OpenVPN 2.6's management interface, version 5.

mod commands;
#[cfg(feature = "faults")]
mod fuzzed;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::fmt::Write as _;
use std::time::{Duration, Instant, SystemTime};

use aws_lc_rs::constant_time::verify_slices_are_equal;
use weft_openvpn::messages::Message;
use zeroize::Zeroizing;

#[cfg(feature = "faults")]
pub use self::fuzzed::gateway_management;
use crate::services::gateway::journal::{Established, Told, plain};
use crate::services::gateway::roster::{Format, Roster, ascii_time, title, unix_time};
use crate::services::gateway::serving::Whom;

/// The longest line, in bytes.
pub(super) const LINE_BYTES_MAX: usize = 1_024;
/// How often a password may be wrong.
const ATTEMPTS_MAX: u32 = 3;
/// How long a connection may take to show its password.
const LOGIN_LIMIT: Duration = Duration::from_secs(30);
/// How long a connection may say nothing that wants no notices.
const IDLE_LIMIT: Duration = Duration::from_secs(3_600);
/// The end of each line.
const LINE_END: &str = "\r\n";
const PROMPT: &str = "ENTER PASSWORD:";
const GREETING: &str = ">INFO:OpenVPN Management Interface Version 5 -- type 'help' for more info";

/// What does not change while a connection lasts.
#[derive(Clone, Debug)]
pub(super) struct Facts {
    /// The daemon's process.
    pub(super) pid: u32,
    /// The format of `status` without a number.
    pub(super) format: Format,
}

/// The password of the interface. It is never shown.
pub(in super::super) type Password = Zeroizing<Vec<u8>>;

/// What a command asks the gateway for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Ask {
    /// Who is connected.
    Roster,
    /// End sessions with a last word.
    End { whom: Whom, farewell: Message },
    /// The last states, at most so many.
    States(usize),
    /// The last lines of the log, at most so many.
    Lines(usize),
    /// How much the log says.
    Verb,
    /// Have it say more or less.
    SetVerb(u8),
}

/// The gateway's answer.
#[derive(Debug)]
pub(super) enum Answer {
    Roster(Box<Roster>),
    /// So many sessions have ended.
    Ended(usize),
    Texts(Vec<String>),
    Verb(u8),
    /// It does not serve now.
    Away,
}

/// Why an answer is awaited.
#[derive(Clone, Debug)]
enum Purpose {
    Status(Format),
    LoadStats,
    Bytecount,
    KillName(String),
    KillAt(String),
    ClientKill,
    Texts,
    Verb,
    SetVerb,
}

/// A connection.
pub(super) struct Session {
    facts: Facts,
    /// It is still to be shown.
    password: Option<Password>,
    attempts: u32,
    /// What has come of lines that are not handled yet.
    input: Zeroizing<Vec<u8>>,
    /// The line that comes is too long, and is left out up to its end.
    is_skipping: bool,
    output: String,
    ask: Option<Ask>,
    awaited: Option<Purpose>,
    has_states: bool,
    has_log: bool,
    bytecount: Option<Bytecount>,
    begun: Instant,
    heard: Instant,
    is_over: bool,
}

/// Notices of clients' traffic.
struct Bytecount {
    interval: Duration,
    next: Instant,
    /// What was told last, by the client's number.
    told: HashMap<u32, (u64, u64)>,
}

impl Session {
    /// A new connection, which shows the password first where there is one.
    pub(super) fn new(now: Instant, facts: Facts, password: Option<Password>) -> Self {
        let mut session = Self {
            facts,
            password,
            attempts: 0,
            input: Zeroizing::default(),
            is_skipping: false,
            output: String::new(),
            ask: None,
            awaited: None,
            has_states: false,
            has_log: false,
            bytecount: None,
            begun: now,
            heard: now,
            is_over: false,
        };
        match session.password {
            Some(_) => session.output.push_str(PROMPT),
            None => session.say(GREETING),
        }
        session
    }

    /// Takes what has come. Call [`Self::step`] until it has no more to do, then give more.
    pub(super) fn handle_bytes(&mut self, now: Instant, bytes: &[u8]) {
        self.heard = now;
        self.input.extend_from_slice(bytes);
    }

    /// Handles the next line, if one has come and no answer is awaited. False: there is nothing to do.
    pub(super) fn step(&mut self, now: Instant) -> bool {
        if self.awaited.is_some() || self.is_over {
            return false;
        }
        let Some(end) = self.input.iter().position(|byte| *byte == b'\n') else {
            if self.input.len() > LINE_BYTES_MAX {
                self.input.clear();
                if !std::mem::replace(&mut self.is_skipping, true) {
                    self.say(&format!("ERROR: the line is longer than {LINE_BYTES_MAX} bytes"));
                }
            }
            return false;
        };
        let line: Zeroizing<Vec<u8>> = self.input.drain(..=end).collect::<Vec<u8>>().into();
        if std::mem::take(&mut self.is_skipping) {
            return true;
        }
        let line = line.strip_suffix(b"\n").unwrap_or(&line);
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        match &self.password {
            Some(_) => self.handle_password(line),
            None => self.handle_line(now, &String::from_utf8_lossy(line)),
        }
        true
    }

    /// The question that waits for an answer, once.
    pub(super) fn poll_ask(&mut self) -> Option<Ask> {
        self.ask.take()
    }

    /// The answer to the last question.
    pub(super) fn handle_answer(&mut self, answer: Answer) {
        let Some(purpose) = self.awaited.take() else { return };
        match (purpose, answer) {
            (Purpose::Status(format), Answer::Roster(roster)) => {
                self.output.push_str(&roster.text(format, LINE_END));
            }
            (Purpose::LoadStats, Answer::Roster(roster)) => {
                let (count, (received, sent)) = (roster.entries.len(), roster.total);
                self.say(&format!("SUCCESS: nclients={count},bytesin={received},bytesout={sent}"));
            }
            (Purpose::Bytecount, Answer::Roster(roster)) => self.tell_bytes(&roster),
            // The next one may do.
            (Purpose::Bytecount, _) => {}
            (Purpose::KillName(name), Answer::Ended(0)) => {
                self.say(&format!("ERROR: common name '{name}' not found"));
            }
            (Purpose::KillName(name), Answer::Ended(count)) => {
                self.say(&format!("SUCCESS: common name '{name}' found, {count} client(s) killed"));
            }
            (Purpose::KillAt(place), Answer::Ended(0)) => {
                self.say(&format!("ERROR: client at address {place} not found"));
            }
            (Purpose::KillAt(place), Answer::Ended(count)) => {
                self.say(&format!("SUCCESS: {count} client(s) at address {place} killed"));
            }
            (Purpose::ClientKill, Answer::Ended(0)) => {
                self.say("ERROR: client-kill command failed");
            }
            (Purpose::ClientKill, Answer::Ended(_)) => {
                self.say("SUCCESS: client-kill command succeeded");
            }
            (Purpose::Texts, Answer::Texts(texts)) => {
                texts.iter().for_each(|text| self.say(text));
                self.say("END");
            }
            (Purpose::Verb, Answer::Verb(verb)) => self.say(&format!("SUCCESS: verb={verb}")),
            (Purpose::SetVerb, Answer::Verb(_)) => self.say("SUCCESS: verb level changed"),
            (_, _) => self.say("ERROR: the gateway does not serve now; weft status says why"),
        }
    }

    /// Something was told to all who watch.
    pub(super) fn handle_told(&mut self, told: &Told) {
        if self.password.is_some() {
            return;
        }
        match told {
            Told::State(state) if self.has_states => self.say(&format!(">STATE:{state}")),
            Told::Line(line) if self.has_log => self.say(&format!(">LOG:{line}")),
            Told::State(_) | Told::Line(_) => {}
            Told::Established(client) => self.tell_established(client),
        }
    }

    /// So many notices are lost, since this connection did not take them in time.
    pub(super) fn handle_lost(&mut self, at: SystemTime, lost: u64) {
        if self.has_log {
            self.say(&format!(">LOG:{},W,{lost} notices are lost: read faster", unix_time(at)));
        }
    }

    /// When it wants to be called.
    pub(super) fn poll_timeout(&self) -> Instant {
        let count = self.bytecount.as_ref().filter(|_| self.awaited.is_none());
        let count = count.map(|count| count.next);
        count.into_iter().fold(self.ends_at(), Instant::min)
    }

    /// Does what is due.
    pub(super) fn handle_timeout(&mut self, now: Instant) {
        if now >= self.ends_at() {
            self.is_over = true;
        }
        let Some(count) = self.bytecount.as_mut().filter(|count| now >= count.next) else { return };
        if self.awaited.is_none() {
            count.next = now + count.interval;
            self.ask_for(Ask::Roster, Purpose::Bytecount);
        }
    }

    /// What is to be sent.
    pub(super) fn poll_output(&mut self) -> String {
        std::mem::take(&mut self.output)
    }

    /// Whether the connection ends, once all is sent.
    pub(super) const fn is_over(&self) -> bool {
        self.is_over
    }

    /// When the connection ends if nothing comes.
    fn ends_at(&self) -> Instant {
        let wants_notices = self.has_states || self.has_log || self.bytecount.is_some();
        match (&self.password, wants_notices) {
            (Some(_), _) => self.begun + LOGIN_LIMIT,
            (None, false) => self.heard + IDLE_LIMIT,
            // One that only listens may be silent for long.
            (None, true) => self.heard + IDLE_LIMIT * 24 * 365,
        }
    }

    fn handle_password(&mut self, line: &[u8]) {
        let is_it = |password: &Password| verify_slices_are_equal(line, password).is_ok();
        if self.password.as_ref().is_some_and(is_it) {
            self.password = None;
            self.say("SUCCESS: password is correct");
            return self.say(GREETING);
        }
        self.attempts += 1;
        match self.attempts < ATTEMPTS_MAX {
            true => self.output.push_str(PROMPT),
            false => self.is_over = true,
        }
    }

    fn tell_bytes(&mut self, roster: &Roster) {
        let Some(mut count) = self.bytecount.take() else { return };
        let told: HashMap<u32, (u64, u64)> = roster
            .entries
            .iter()
            .map(|entry| (entry.number, (entry.link.rx_bytes, entry.link.tx_bytes)))
            .collect();
        for entry in &roster.entries {
            let now = (entry.link.rx_bytes, entry.link.tx_bytes);
            if count.told.get(&entry.number) != Some(&now) {
                self.say(&format!(">BYTECOUNT_CLI:{},{},{}", entry.number, now.0, now.1));
            }
        }
        count.told = told;
        self.bytecount = Some(count);
    }

    fn tell_established(&mut self, client: &Established) {
        let Established { number, name, user, real_address, addresses, version, platform, at } =
            client;
        let mut text = format!(">CLIENT:ESTABLISHED,{number}{LINE_END}");
        let mut put = |name: &str, value: &str| {
            let _ = write!(text, ">CLIENT:ENV,{name}={}{LINE_END}", plain(value, '\0'));
        };
        put("time_unix", &unix_time(*at));
        put("time_ascii", &ascii_time(*at));
        for address in addresses {
            let of = if address.is_ipv4() {
                "ifconfig_pool_remote_ip"
            } else {
                "ifconfig_pool_remote_ip6"
            };
            put(of, &address.to_string());
        }
        for kind in ["trusted", "untrusted"] {
            let six = if real_address.is_ipv4() { "" } else { "6" };
            put(&format!("{kind}_ip{six}"), &real_address.ip().to_canonical().to_string());
            put(&format!("{kind}_port"), &real_address.port().to_string());
        }
        put("common_name", name);
        let more = [("username", user), ("IV_VER", version), ("IV_PLAT", platform)];
        for (name, value) in more {
            value.iter().for_each(|value| put(name, value));
        }
        text.push_str(">CLIENT:ENV,END");
        self.say(&text);
    }

    fn ask_for(&mut self, ask: Ask, purpose: Purpose) {
        self.ask = Some(ask);
        self.awaited = Some(purpose);
    }

    fn say(&mut self, text: &str) {
        self.output.push_str(text);
        self.output.push_str(LINE_END);
    }

    fn say_version(&mut self) {
        self.say(&format!("OpenVPN Version: {}", title()));
        self.say("Management Version: 5");
        self.say("END");
    }
}
