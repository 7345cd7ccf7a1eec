//! One question to the upstream servers: which server is asked next, and whether an answer is to be believed.
//!
//! An answer must come from the server's address to the port of the question (the socket is connected), have its
//! random id, and repeat the question in its random letter case. A server that changes the case is asked again
//! by TCP.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use hickory_proto::op::{Edns, Message, MessageType, OpCode, Query, ResponseCode};
use hickory_proto::rr::Name;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::answer::{DATAGRAM_BYTES_MAX, mark};
use super::cache::Said;

/// How long one server has for one answer, in milliseconds.
pub(crate) const SERVER_WAIT_MS: u64 = 1_200;
/// How long all servers have together, in milliseconds; less than the 5 s after which clients ask again.
pub(crate) const EXCHANGE_LIMIT_MS: u64 = 4_500;
/// How often each server is asked.
const ROUNDS: usize = 2;
/// Bytes of a message before its question (RFC 1035 section 4.1.1).
const HEADER_BYTES: usize = 12;
/// The longest label of a name, in bytes.
const LABEL_BYTES_MAX: u8 = 63;

/// A question as it goes to one server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Try {
    /// The server.
    pub(crate) to: SocketAddr,
    /// Over a connection.
    pub(crate) tcp: bool,
    /// The query.
    pub(crate) bytes: Vec<u8>,
    /// Until when its answer is awaited.
    pub(crate) until: Instant,
}

/// The worth of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// It answers the question.
    Done(Box<Said>),
    /// Ask again: [`Exchange::next`].
    Again,
    /// It does not belong to the question; wait on.
    Mismatch,
}

/// How one server is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Manner {
    edns: bool,
    tcp: bool,
}

/// A question under way.
#[derive(Debug)]
pub(crate) struct Exchange {
    query: Query,
    dnssec: bool,
    unchecked: bool,
    marker: [u8; 8],
    servers: Vec<SocketAddr>,
    until: Instant,
    /// Servers asked so far, each round anew.
    turn: usize,
    manner: Manner,
    /// Servers that did not answer, or cannot be reached.
    silent: BTreeSet<SocketAddr>,
    id: u16,
    /// The name as sent.
    sent: Name,
    rng: StdRng,
}

impl Exchange {
    /// Begins with the first of the servers. `unchecked` is the CD bit.
    pub(crate) fn new(
        now: Instant,
        query: Query,
        (dnssec, unchecked): (bool, bool),
        servers: Vec<SocketAddr>,
        marker: [u8; 8],
        seed: u64,
    ) -> Self {
        let sent = query.name.clone();
        Self {
            query,
            dnssec,
            unchecked,
            marker,
            servers,
            until: now + Duration::from_millis(EXCHANGE_LIMIT_MS),
            turn: 0,
            manner: Manner { edns: true, tcp: false },
            silent: BTreeSet::new(),
            id: 0,
            sent,
            rng: StdRng::seed_from_u64(seed),
        }
    }

    /// The next try; `None`: there is nobody left to ask.
    pub(crate) fn next(&mut self, now: Instant) -> Option<Try> {
        if self.turn >= self.servers.len() * ROUNDS || now >= self.until {
            return None;
        }
        let to = *self.servers.get(self.turn % self.servers.len())?;
        // Some old servers and firewalls drop queries with EDNS. A client of DNSSEC needs it.
        self.manner.edns &= self.dnssec || !self.silent.contains(&to);
        let [high, low, ..] = self.rng.next_u32().to_be_bytes();
        self.id = u16::from_be_bytes([high, low]);
        self.sent = random_case(&self.query.name, &mut self.rng)?;
        let mut message = Message::new(self.id, MessageType::Query, OpCode::Query);
        message.metadata.recursion_desired = true;
        message.metadata.checking_disabled = self.unchecked;
        let mut query = Query::query(self.sent.clone(), self.query.query_type);
        query.set_query_class(self.query.query_class);
        message.add_query(query);
        if self.manner.edns {
            let mut edns = Edns::new();
            edns.set_max_payload(DATAGRAM_BYTES_MAX);
            edns.set_dnssec_ok(self.dnssec);
            mark(&mut edns, &self.marker);
            message.set_edns(edns);
        }
        // The last server that is asked has all the time that is left.
        let is_last = self.turn + 1 == self.servers.len() * ROUNDS;
        let wait = now + Duration::from_millis(SERVER_WAIT_MS);
        let until = if is_last { self.until } else { self.until.min(wait) };
        Some(Try { to, tcp: self.manner.tcp, bytes: message.to_vec().ok()?, until })
    }

    /// A server has not answered, or cannot be reached.
    pub(crate) fn handle_failure(&mut self) {
        let count = self.servers.len().max(1);
        self.silent.extend(self.servers.get(self.turn % count));
        self.turn_to_next();
    }

    /// Whether a server has not answered or cannot be reached.
    pub(crate) fn has_silent_server(&self) -> bool {
        !self.silent.is_empty()
    }

    const fn turn_to_next(&mut self) {
        self.turn += 1;
        self.manner = Manner { edns: true, tcp: false };
    }

    /// Bytes came from the server.
    pub(crate) fn handle_answer(&mut self, bytes: &[u8]) -> Verdict {
        let Ok(message) = Message::from_vec(bytes) else { return Verdict::Mismatch };
        let metadata = message.metadata;
        if metadata.id != self.id
            || metadata.message_type != MessageType::Response
            || metadata.op_code != OpCode::Query
        {
            return Verdict::Mismatch;
        }
        let formed =
            !matches!(metadata.response_code, ResponseCode::FormErr | ResponseCode::NotImp);
        let question = match message.queries.as_slice() {
            [question] => question,
            // An old server that does not know EDNS may return the header alone.
            [] if !formed && self.manner.edns => {
                self.manner.edns = false;
                return Verdict::Again;
            }
            _ => return Verdict::Mismatch,
        };
        let is_same = question.query_type == self.query.query_type
            && question.query_class == self.query.query_class
            && question.name.eq_ignore_root(&self.sent);
        if !is_same {
            return Verdict::Mismatch;
        }
        if !self.manner.tcp
            && (metadata.truncation || !question.name.eq_ignore_root_case(&self.sent))
        {
            self.manner.tcp = true;
            return Verdict::Again;
        }
        match metadata.response_code {
            ResponseCode::NoError | ResponseCode::NXDomain => {
                // The names in it may point into the question, whose case is random.
                let message = Message::from_vec(&with_plain_question(bytes)).unwrap_or(message);
                Verdict::Done(Box::new(Said::new(message, bytes.len())))
            }
            // BADVERS is read as BADSIG, which has the same number.
            ResponseCode::FormErr
            | ResponseCode::NotImp
            | ResponseCode::BADVERS
            | ResponseCode::BADSIG
                if self.manner.edns =>
            {
                self.manner.edns = false;
                Verdict::Again
            }
            _ => {
                self.turn_to_next();
                Verdict::Again
            }
        }
    }
}

/// The message with the name of its question in lower case.
fn with_plain_question(bytes: &[u8]) -> Vec<u8> {
    let mut plain = bytes.to_vec();
    let mut at = HEADER_BYTES;
    while let Some(length) = plain.get(at).filter(|it| (1..=LABEL_BYTES_MAX).contains(*it)) {
        let label = at + 1..at + 1 + usize::from(*length);
        at = label.end;
        if let Some(label) = plain.get_mut(label) {
            label.make_ascii_lowercase();
        }
    }
    plain
}

/// The name with the case of each letter chosen at random (draft-vixie-dnsext-dns0x20).
fn random_case(name: &Name, rng: &mut StdRng) -> Option<Name> {
    let label = |label: &[u8]| -> Vec<u8> {
        let letter = |byte: &u8| match rng.next_u32() & 1 {
            0 => byte.to_ascii_lowercase(),
            _ => byte.to_ascii_uppercase(),
        };
        label.iter().map(letter).collect()
    };
    let labels: Vec<Vec<u8>> = name.iter().map(label).collect();
    let mut mixed = Name::new();
    for label in &labels {
        mixed = mixed.append_label(label.as_slice()).ok()?;
    }
    mixed.set_fqdn(true);
    Some(mixed)
}

#[cfg(test)]
#[path = "exchange_tests.rs"]
mod tests;
