//! The commands of the management interface.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use weft_openvpn::messages::Message;
use weft_openvpn::words;

use super::{Ask, Bytecount, Purpose, Session};
use crate::services::gateway::journal::{VERB_MAX, plain};
use crate::services::gateway::roster::{Format, title};
use crate::services::gateway::serving::Whom;

/// The longest interval of `bytecount`, in seconds.
const INTERVAL_MAX_S: u64 = 86_400;
const UNKNOWN: &str = "ERROR: unknown command, enter 'help' for more options";
/// What a client is told that is to come back.
pub(super) const RESTART: &str = "the session was ended by the administrator";
const HELP: [&str; 21] = [
    "Commands:",
    "bytecount n            : Show bytes in/out, update every n secs (0=off).",
    "client-kill CID [M]    : Kill client instance CID with message M (def=RESTART)",
    "echo [on|off] [N|all]  : Like log, but only show messages in echo buffer.",
    "exit|quit              : Close management session.",
    "help                   : Print this message.",
    "hold [off|release]     : Show hold flag, which is never set.",
    "kill cn                : Kill the client instance(s) having common name cn.",
    "kill [PROTO:]IP:port   : Kill the client instance connecting from IP:port.",
    "load-stats             : Show global server load stats.",
    "log [on|off] [N|all]   : Turn on/off realtime log display",
    "                         + show last N lines or 'all' for entire history.",
    "mute                   : Show log mute level, which is always 0.",
    "pid                    : Show process ID of the current process.",
    "state [on|off] [N|all] : Like log, but show state history.",
    "status [n]             : Show current daemon status info using format #n.",
    "verb [n]               : Set log verbosity level to n, or show if n is absent.",
    "version                : Show current version of daemon.",
    "Commands of OpenVPN's that are not listed here are not supported, since logins are decided",
    "by the gateway itself, and weft openvpn serve and stop begin and end it.",
    "END",
];
/// Commands of OpenVPN 2.6 and 2.7 that this interface does not have.
const NOT_HERE: [&str; 28] = [
    "auth-retry",
    "certificate",
    "client-auth",
    "client-auth-nt",
    "client-deny",
    "client-pending-auth",
    "cr-response",
    "env-filter",
    "forget-passwords",
    "needok",
    "needstr",
    "net",
    "password",
    "pk-sig",
    "pkcs11-id-count",
    "pkcs11-id-get",
    "proxy",
    "push-update-broad",
    "push-update-cid",
    "remote",
    "remote-entry-count",
    "remote-entry-get",
    "rsa-sig",
    "signal",
    "test",
    "username",
    "client-pf",
    "http-proxy-fallback",
];

/// What notices a command switches.
#[derive(Clone, Copy)]
enum Notices {
    State,
    Log,
    /// There are none: no configuration has `echo` lines here.
    Echo,
}

impl Session {
    pub(super) fn handle_line(&mut self, now: Instant, line: &str) {
        let words = match words::split(line) {
            Ok(words) => words,
            Err(error) => return self.say(&format!("ERROR: Options error: {error}")),
        };
        let mut words = words.iter().map(String::as_str);
        let Some(command) = words.next() else { return };
        let args: Vec<&str> = words.collect();
        match (command, args.as_slice()) {
            ("help", _) => {
                self.say(&format!("Management Interface for {}", title()));
                HELP.iter().for_each(|line| self.say(line));
            }
            ("version", _) => self.say_version(),
            ("exit" | "quit", _) => self.is_over = true,
            ("pid", _) => self.say(&format!("SUCCESS: pid={}", self.facts.pid)),
            ("status", args) => self.status(args.first().copied()),
            ("load-stats", _) => self.ask_for(Ask::Roster, Purpose::LoadStats),
            ("state", []) => self.ask_for(Ask::States(1), Purpose::Texts),
            ("state", args) => self.notices(Notices::State, args),
            ("log", args) => self.notices(Notices::Log, args),
            ("echo", args) => self.notices(Notices::Echo, args),
            ("bytecount", args) => self.bytecount(now, args.first().copied()),
            ("kill", args) => self.kill(args.first().copied()),
            ("client-kill", args) => self.client_kill(args),
            ("hold", args) => self.hold(args.first().copied()),
            ("verb", []) => self.ask_for(Ask::Verb, Purpose::Verb),
            ("verb", [level, ..]) => self.verb(level),
            ("mute", []) => self.say("SUCCESS: mute=0"),
            ("mute", _) => self.not_here("mute"),
            (command, _) if NOT_HERE.contains(&command) => self.not_here(command),
            _ => self.say(UNKNOWN),
        }
    }

    fn not_here(&mut self, command: &str) {
        self.say(&format!(
            "ERROR: The '{command}' command is not supported by the current daemon mode"
        ));
    }

    fn missing(&mut self, command: &str, at_least: &str) {
        self.say(&format!("ERROR: the '{command}' command requires {at_least}1 parameter"));
    }

    fn status(&mut self, format: Option<&str>) {
        // As with OpenVPN, whatever is no number is 0, and 0 is what is set.
        let format = match format.map_or(0, |number| number.parse().unwrap_or_default()) {
            0 => Some(self.facts.format),
            number => Format::of(number),
        };
        match format {
            Some(format) => self.ask_for(Ask::Roster, Purpose::Status(format)),
            None => self.say("ERROR: bad status format version number"),
        }
    }

    /// `on`, `off`, a number, `all`; or a number or `all` behind `on` or `off`.
    fn notices(&mut self, notices: Notices, args: &[&str]) {
        let name = match notices {
            Notices::State => "state",
            Notices::Log => "log",
            Notices::Echo => "echo",
        };
        let (switch, count) = match args {
            [] => return self.missing(name, "at least "),
            [word @ ("on" | "off"), rest @ ..] => (Some(*word == "on"), rest.first().copied()),
            [count, ..] => (None, Some(*count)),
        };
        let max = match count {
            None => None,
            Some("all") => Some(usize::MAX),
            Some(count) => match count.parse() {
                Ok(count @ 1..) => Some(count),
                _ => {
                    return self.say(&format!(
                        "ERROR: {name} parameter must be 'on' or 'off' or some number n or 'all'"
                    ));
                }
            },
        };
        if let Some(is_on) = switch {
            let word = if is_on { "ON" } else { "OFF" };
            self.say(&format!("SUCCESS: real-time {name} notification set to {word}"));
            match notices {
                Notices::State => self.has_states = is_on,
                Notices::Log => self.has_log = is_on,
                Notices::Echo => {}
            }
        }
        match (max, notices) {
            (None, _) => {}
            (Some(_), Notices::Echo) => self.say("END"),
            (Some(max), Notices::State) => self.ask_for(Ask::States(max), Purpose::Texts),
            (Some(max), Notices::Log) => self.ask_for(Ask::Lines(max), Purpose::Texts),
        }
    }

    fn bytecount(&mut self, now: Instant, interval: Option<&str>) {
        let Some(interval) = interval else { return self.missing("bytecount", "") };
        // As with OpenVPN, whatever is no number is 0.
        let seconds = interval.parse().unwrap_or(0).min(INTERVAL_MAX_S);
        let interval = Duration::from_secs(seconds);
        let new = Bytecount { interval, next: now + interval, told: HashMap::new() };
        self.bytecount = (seconds > 0).then_some(new);
        self.say("SUCCESS: bytecount interval changed");
    }

    fn kill(&mut self, whom: Option<&str>) {
        let Some(text) = whom else { return self.missing("kill", "") };
        let shown = plain(text, '\0');
        let farewell =
            Message::Restart { preserve: true, next_remote: false, text: RESTART.to_owned() };
        if !text.contains(':') {
            let ask = Ask::End { whom: Whom::Name(text.to_owned()), farewell };
            return self.ask_for(ask, Purpose::KillName(shown));
        }
        match place(text) {
            Ok(whom) => self.ask_for(Ask::End { whom, farewell }, Purpose::KillAt(shown)),
            Err(error) => self.say(&error),
        }
    }

    fn client_kill(&mut self, args: &[&str]) {
        let [number, rest @ ..] = args else { return self.missing("client-kill", "at least ") };
        let Ok(number) = number.parse::<u64>() else {
            return self.say("ERROR: cannot parse CID");
        };
        let message = rest.first().map_or("RESTART", |message| *message);
        // Others say nothing that ends a client's session.
        let farewell = match Message::parse(message) {
            Ok(farewell @ (Message::Restart { .. } | Message::Halt(_))) => Some(farewell),
            _ => None,
        };
        match (u32::try_from(number), farewell) {
            (Ok(number), Some(farewell)) => {
                let ask = Ask::End { whom: Whom::Number(number), farewell };
                self.ask_for(ask, Purpose::ClientKill);
            }
            _ => self.say("ERROR: client-kill command failed"),
        }
    }

    /// Nothing is ever held: what is to be released is running.
    fn hold(&mut self, word: Option<&str>) {
        match word {
            None => self.say("SUCCESS: hold=0"),
            Some("off") => self.say("SUCCESS: hold flag set to OFF"),
            Some("release") => self.say("SUCCESS: hold release succeeded"),
            Some("on") => self.not_here("hold"),
            Some(_) => self.say("ERROR: bad hold command parameter"),
        }
    }

    fn verb(&mut self, level: &str) {
        match level.parse() {
            Ok(level @ 0..=VERB_MAX) => self.ask_for(Ask::SetVerb(level), Purpose::SetVerb),
            _ => self.say("ERROR: verb level is out of range"),
        }
    }
}

/// A client's place: `[PROTO:]IP:PORT`, with IPv6 addresses in brackets, or as `status` shows them, without a port.
fn place(text: &str) -> Result<Whom, String> {
    let protocols = [("udp", false), ("tcp", true)];
    let (is_tcp, rest) = protocols
        .iter()
        .find_map(|(name, is_tcp)| {
            let (protocol, rest) = text.split_once(':')?;
            let is_it = protocol.trim_end_matches(['4', '6']) == *name;
            is_it.then_some((Some(*is_tcp), rest))
        })
        .unwrap_or((None, text));
    let at = |address: IpAddr, port| Whom::At { is_tcp, address, port };
    if let Ok(place) = rest.parse::<SocketAddr>() {
        return Ok(at(place.ip(), Some(place.port())));
    }
    if let Ok(address) = rest.parse::<IpAddr>()
        && address.is_ipv6()
    {
        return Ok(at(address, None));
    }
    let (address, port) = rest.rsplit_once(':').unwrap_or((rest, ""));
    let is_address = address.trim_matches(['[', ']']).parse::<IpAddr>().is_ok();
    Err(match is_address {
        true => format!("ERROR: port number is out of range: {}", plain(port, '\0')),
        false => format!("ERROR: error parsing IP address: {}", plain(address, '\0')),
    })
}
