//! Answers to queries from the zone: bytes in, bytes out.
//!
//! A name of the zone is answered here and never with SERVFAIL, since some resolvers (musl) then end the search.
//! Everything else goes to the upstream servers, for known clients alone. A stranger gets no answer that is
//! longer than its query.

use std::net::IpAddr;

use hickory_proto::op::{
    Edns, Header, Message, MessageType, Metadata, OpCode, Query, ResponseCode,
};
use hickory_proto::rr::rdata::opt::{EdnsCode, EdnsOption};
use hickory_proto::rr::rdata::{A, AAAA, HINFO, NS, PTR, SOA, SRV};
use hickory_proto::rr::{DNSClass, Name, RData, Record, RecordType};
use hickory_proto::serialize::binary::{BinDecodable, BinDecoder};
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};

use super::cache::{Key, Said, told};
use super::counters::Counter;
use super::zone::{Entry, Found, NEGATIVE_TTL_S, Reverse, Scope, TTL_S, Zone};

/// The longest answer by UDP to a client without EDNS, in bytes (RFC 1035).
pub(crate) const PLAIN_BYTES_MAX: usize = 512;
/// The longest datagram that is sent or asked for, in bytes: no fragments on any link (DNS flag day 2020).
pub(crate) const DATAGRAM_BYTES_MAX: u16 = 1_232;
/// The longest query that is read, in bytes.
pub(crate) const QUERY_BYTES_MAX: usize = 4_096;
/// The longest answer by TCP, in bytes.
pub(crate) const STREAM_BYTES_MAX: usize = 65_535;
/// Records in one answer.
pub(crate) const ANSWERS_MAX: usize = 1_000;
/// The fewest bytes of a record: a name of one byte, and ten (RFC 1035 section 4.1.3).
const RECORD_BYTES_MIN: usize = 11;
/// Records behind the question in one query: EDNS and a signature.
const ADDITIONALS_MAX: u16 = 2;
/// The EDNS option that marks this daemon's own queries (RFC 6891: 65001 to 65534 are for local use).
pub(crate) const MARKER_CODE: u16 = 65_313;
/// Bytes that a stranger gets for each byte of its query.
pub(crate) const STRANGERS_FACTOR_MAX: usize = 1;

/// How a query came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Carrier {
    /// In a datagram.
    Udp,
    /// Over a connection.
    Tcp,
}

/// A query and where it came from.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Asked<'a> {
    /// The query as received.
    pub(crate) bytes: &'a [u8],
    pub(crate) carrier: Carrier,
    /// Whether the source is one that this server serves.
    pub(crate) is_client: bool,
    /// Whether the zone has had time to learn the names of all hosts.
    pub(crate) is_settled: bool,
    /// The names that the client may see.
    pub(crate) scope: &'a Scope,
    /// The address of this server that the client asked.
    pub(crate) server: IpAddr,
}

/// A question for the upstream servers, and the form of the answer that the client wants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Forward {
    /// The question, with the client's letter case.
    pub(crate) query: Query,
    /// How to answer.
    pub(crate) form: Form,
}

/// The form of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Form {
    /// The header of the answer, before anything is known.
    metadata: Metadata,
    /// Whether the client spoke EDNS.
    edns: bool,
    /// Whether it wants records of DNSSEC.
    pub(crate) dnssec: bool,
    /// The longest answer, in bytes.
    limit: usize,
}

/// The outcome of a query.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Reply {
    /// Send these bytes.
    Answer(Vec<u8>, Counter),
    /// Ask the upstream servers.
    Forward(Box<Forward>),
    /// Ask the zone again once it is settled: no host has told of the name yet.
    Hold,
    /// Send nothing.
    Drop(Counter),
}

/// Answers a query, or says what becomes of it. `seed` orders the addresses of a name.
pub(crate) fn answer(zone: &Zone, marker: &[u8], asked: &Asked<'_>, seed: u64) -> Reply {
    let request = match read(asked.bytes) {
        Ok(request) => request,
        Err(reply) if asked.is_client || matches!(reply, Reply::Drop(_)) => return reply,
        Err(_) => return Reply::Drop(Counter::Strangers),
    };
    let Some(query) = request.queries.first() else { return Reply::Drop(Counter::Malformed) };
    let form = Form::of(&request, asked.carrier);
    let say = |code, counter| Reply::Answer(form.empty(query, code), counter);
    if !asked.is_client {
        let refusal = form.empty(query, ResponseCode::Refused);
        return match refusal.len() <= asked.bytes.len() * STRANGERS_FACTOR_MAX {
            true => Reply::Answer(refusal, Counter::Strangers),
            false => Reply::Drop(Counter::Strangers),
        };
    }
    if request.edns.as_ref().is_some_and(|edns| edns.version() > 0) {
        return say(ResponseCode::BADVERS, Counter::Malformed);
    }
    if query.query_class != DNSClass::IN || is_transfer(query.query_type) {
        return say(ResponseCode::Refused, Counter::Refused);
    }
    if is_marked(&request, marker) {
        return say(ResponseCode::Refused, Counter::Loops);
    }
    let mut rng = StdRng::seed_from_u64(seed);
    let found = find(zone, asked, query, &mut rng);
    if !asked.is_settled && may_come(query, found.as_ref()) {
        return Reply::Hold;
    }
    let Some(found) = found else {
        if !request.metadata.recursion_desired {
            return say(ResponseCode::Refused, Counter::Refused);
        }
        return Reply::Forward(Box::new(Forward { query: query.clone(), form }));
    };
    Reply::Answer(found.into_bytes(zone, asked, &form, query), Counter::Answered)
}

/// Reads a query; in the error case the answer to it.
fn read(bytes: &[u8]) -> Result<Message, Reply> {
    let mut decoder = BinDecoder::new(bytes);
    let header = Header::read(&mut decoder).map_err(|_| Reply::Drop(Counter::Malformed))?;
    let metadata = header.metadata;
    if metadata.message_type != MessageType::Query {
        return Err(Reply::Drop(Counter::Responses));
    }
    // The counts are judged before anything is allocated by them.
    let refusal = if metadata.op_code != OpCode::Query {
        Some(ResponseCode::NotImp)
    } else if header.counts.queries != 1
        || header.counts.answers != 0
        || header.counts.authorities != 0
        || header.counts.additionals > ADDITIONALS_MAX
    {
        Some(ResponseCode::FormErr)
    } else {
        None
    };
    let refuse = |code| Reply::Answer(only_header(&metadata, code), Counter::Malformed);
    match refusal {
        Some(code) => Err(refuse(code)),
        None => Message::from_vec(bytes).map_err(|_| refuse(ResponseCode::FormErr)),
    }
}

/// An answer of a header alone.
fn only_header(request: &Metadata, code: ResponseCode) -> Vec<u8> {
    let mut answer = Message::response(request.id, request.op_code);
    answer.metadata = Metadata::response_from_request(request);
    answer.metadata.response_code = code;
    answer.to_vec().unwrap_or_default()
}

/// Whether a name that is not known may be that of a container whose host has not told of it yet.
fn may_come(query: &Query, found: Option<&Records>) -> bool {
    match found {
        Some(records) => records.code == ResponseCode::NXDomain,
        None => query.name.num_labels() == 1,
    }
}

fn is_transfer(kind: RecordType) -> bool {
    matches!(kind, RecordType::AXFR | RecordType::IXFR)
}

/// Whether this daemon itself sent the query upstream.
fn is_marked(request: &Message, marker: &[u8]) -> bool {
    let options = request.edns.iter().flat_map(|edns| &edns.options().options);
    options.into_iter().any(|(code, option)| match option {
        EdnsOption::Unknown(_, data) => {
            *code == EdnsCode::Unknown(MARKER_CODE) && data.as_slice() == marker
        }
        _ => false,
    })
}

impl Form {
    pub(super) fn of(request: &Message, carrier: Carrier) -> Self {
        let edns = request.edns.as_ref();
        let limit = match carrier {
            Carrier::Tcp => STREAM_BYTES_MAX,
            Carrier::Udp => edns.map_or(PLAIN_BYTES_MAX, |edns| {
                usize::from(edns.max_payload().min(DATAGRAM_BYTES_MAX)).max(PLAIN_BYTES_MAX)
            }),
        };
        let mut metadata = Metadata::response_from_request(&request.metadata);
        metadata.recursion_available = true;
        Self {
            metadata,
            edns: edns.is_some(),
            dnssec: edns.is_some_and(|edns| edns.flags().dnssec_ok),
            limit,
        }
    }

    /// A message to fill, with the question as it came.
    pub(crate) fn start(&self, query: &Query) -> Message {
        let mut answer = Message::response(self.metadata.id, self.metadata.op_code);
        answer.metadata = self.metadata;
        answer.add_query(query.clone());
        if self.edns {
            let mut edns = Edns::new();
            edns.set_max_payload(DATAGRAM_BYTES_MAX);
            edns.set_dnssec_ok(self.dnssec);
            answer.set_edns(edns);
        }
        answer
    }

    /// An answer that says no more than a code.
    pub(crate) fn empty(&self, query: &Query, code: ResponseCode) -> Vec<u8> {
        let mut answer = self.start(query);
        answer.metadata.response_code = code;
        self.finish(answer)
    }

    /// Whether the client wants data that the server has not verified (CD).
    pub(crate) const fn is_unchecked(&self) -> bool {
        self.metadata.checking_disabled
    }

    /// The fields by which two questions are the same.
    pub(crate) fn key(&self, query: &Query) -> Key {
        Key::new(query, self.dnssec, self.is_unchecked())
    }

    /// An answer with an upstream server's records of `age_s` seconds ago.
    pub(crate) fn of_others(&self, query: &Query, said: &Said, age_s: u32) -> Vec<u8> {
        let mut answer = self.start(query);
        answer.metadata.response_code = said.code;
        answer.metadata.authentic_data = said.authentic && self.dnssec;
        // One more than can fit shows that the answer is cut.
        let most = self.records_max() + 1;
        let some = |records: &[Record]| -> Vec<Record> {
            records.iter().take(most).map(|it| told(it, age_s, &query.name)).collect()
        };
        answer.add_answers(some(&said.answers));
        answer.add_authorities(some(&said.authorities));
        answer.add_additionals(some(&said.additionals));
        self.finish(answer)
    }

    /// The records that an answer cannot exceed, however short they are.
    const fn records_max(&self) -> usize {
        self.limit / RECORD_BYTES_MIN
    }

    /// The bytes of an answer, cut to what the client can take. A cut answer has TC set and holds as many records
    /// as fit: some resolvers use these, others ask again by TCP.
    pub(crate) fn finish(&self, mut answer: Message) -> Vec<u8> {
        // Records beyond those that can fit are not even written: an answer may have thousands.
        let fits = |answer: &Message| {
            let can_fit = answer.all_sections().count() <= self.records_max();
            let bytes = can_fit.then(|| answer.to_vec().ok()).flatten();
            bytes.filter(|bytes| bytes.len() <= self.limit)
        };
        if let Some(bytes) = fits(&answer) {
            return bytes;
        }
        answer.additionals.clear();
        if let Some(bytes) = fits(&answer) {
            return bytes;
        }
        answer.metadata.truncation = true;
        answer.authorities.clear();
        let all = std::mem::take(&mut answer.answers);
        let (mut least, mut most) = (0, all.len().min(self.records_max()));
        let mut best = fits(&answer).unwrap_or_default();
        while least < most {
            let middle = (least + most).div_ceil(2);
            answer.answers = all.iter().take(middle).cloned().collect();
            match fits(&answer) {
                Some(bytes) => {
                    best = bytes;
                    least = middle;
                }
                None => most = middle - 1,
            }
        }
        best
    }
}

/// Records for an answer.
#[derive(Debug, Default)]
struct Records {
    answers: Vec<Record>,
    additionals: Vec<Record>,
    code: ResponseCode,
    /// The zone that says that there are none; `None`: the zone itself.
    authority: Option<Name>,
}

impl Records {
    fn nothing(code: ResponseCode, authority: Option<Name>) -> Self {
        Self { code, authority, ..Self::default() }
    }

    fn into_bytes(self, zone: &Zone, asked: &Asked<'_>, form: &Form, query: &Query) -> Vec<u8> {
        let mut answer = form.start(query);
        answer.metadata.authoritative = true;
        answer.metadata.response_code = self.code;
        if self.answers.is_empty() {
            let owner = self.authority.unwrap_or_else(|| zone.domain().clone());
            answer.add_authority(Record::from_rdata(owner, NEGATIVE_TTL_S, soa(zone)));
        }
        answer.add_answers(self.answers);
        answer.add_additionals(self.additionals);
        let bytes = form.finish(answer);
        debug_assert!(asked.carrier == Carrier::Tcp || bytes.len() <= form.limit);
        bytes
    }
}

/// Records of the zone for a question; `None`: the zone does not have the name.
fn find(zone: &Zone, asked: &Asked<'_>, query: &Query, rng: &mut StdRng) -> Option<Records> {
    let name = &query.name;
    if let Ok(prefix) = name.parse_arpa_name() {
        return find_reverse(zone, asked.scope, query, zone.find_reverse(asked.scope, prefix));
    }
    let found = zone.find(asked.scope, name)?;
    // The zone of a name without a domain is that name.
    let authority = (!zone.domain().zone_of(name)).then(|| name.clone());
    let any = query.query_type == RecordType::ANY;
    Some(match found {
        Found::Nothing => Records::nothing(ResponseCode::NXDomain, authority),
        _ if any => minimal(name),
        Found::Apex => apex(zone, asked.server, query),
        Found::Empty => Records::nothing(ResponseCode::NoError, authority),
        Found::Entry(entry) => {
            let answers = addresses(name, entry, query.query_type, rng);
            Records { answers, authority, ..Records::default() }
        }
        Found::Service(ports, target, entry) => {
            if query.query_type != RecordType::SRV {
                return Some(Records::nothing(ResponseCode::NoError, authority));
            }
            let record = |port: &u16| {
                let srv = SRV::new(0, 0, *port, target.clone());
                Record::from_rdata(name.clone(), TTL_S, RData::SRV(srv))
            };
            let mut additionals = addresses(&target, entry, RecordType::A, rng);
            additionals.extend(addresses(&target, entry, RecordType::AAAA, rng));
            let answers = ports.iter().map(record).collect();
            Records { answers, additionals, ..Records::default() }
        }
    })
}

fn find_reverse(zone: &Zone, scope: &Scope, query: &Query, found: Reverse) -> Option<Records> {
    let name = &query.name;
    let authority = Some(name.base_name());
    Some(match found {
        Reverse::Foreign => return None,
        Reverse::Nothing => Records::nothing(ResponseCode::NXDomain, authority),
        Reverse::Names(_) | Reverse::Empty if query.query_type == RecordType::ANY => minimal(name),
        Reverse::Names(names) if query.query_type == RecordType::PTR => {
            debug_assert!(names.iter().all(|it| zone.find(scope, it).is_some()));
            let record = |target| Record::from_rdata(name.clone(), TTL_S, RData::PTR(PTR(target)));
            Records { answers: names.into_iter().map(record).collect(), ..Records::default() }
        }
        Reverse::Names(_) | Reverse::Empty => Records::nothing(ResponseCode::NoError, authority),
    })
}

/// The answer to a question for everything (RFC 8482).
fn minimal(name: &Name) -> Records {
    let hinfo = RData::HINFO(HINFO::new("RFC8482".into(), String::new()));
    let answers = vec![Record::from_rdata(name.clone(), TTL_S, hinfo)];
    Records { answers, ..Records::default() }
}

fn apex(zone: &Zone, server: IpAddr, query: &Query) -> Records {
    let record = |data| Record::from_rdata(query.name.clone(), TTL_S, data);
    let own = data_of(server);
    match query.query_type {
        RecordType::SOA => Records { answers: vec![record(soa(zone))], ..Records::default() },
        RecordType::NS => Records {
            answers: vec![record(RData::NS(NS(zone.domain().clone())))],
            additionals: vec![Record::from_rdata(zone.domain().clone(), TTL_S, own)],
            ..Records::default()
        },
        kind if kind == own.record_type() => {
            Records { answers: vec![record(own)], ..Records::default() }
        }
        _ => Records::default(),
    }
}

fn soa(zone: &Zone) -> RData {
    let domain = zone.domain();
    let mailbox = domain.prepend_label("hostmaster").unwrap_or_else(|_| domain.clone());
    RData::SOA(SOA::new(domain.clone(), mailbox, zone.serial(), 60, 60, 60, NEGATIVE_TTL_S))
}

/// Address records of one type: those of this host first, each group in random order.
fn addresses(name: &Name, entry: &Entry, kind: RecordType, rng: &mut StdRng) -> Vec<Record> {
    let mut found: Vec<(IpAddr, bool)> = match kind {
        RecordType::A => entry.v4().map(|(it, local)| (it.into(), local)).collect(),
        RecordType::AAAA => entry.v6().map(|(it, local)| (it.into(), local)).collect(),
        _ => Vec::new(),
    };
    found.shuffle(rng);
    found.sort_by_key(|(_, local)| !local);
    let record = |(address, _)| Record::from_rdata(name.clone(), TTL_S, data_of(address));
    found.into_iter().take(ANSWERS_MAX).map(record).collect()
}

const fn data_of(address: IpAddr) -> RData {
    match address {
        IpAddr::V4(address) => RData::A(A(address)),
        IpAddr::V6(address) => RData::AAAA(AAAA(address)),
    }
}

/// Marks a query as this daemon's own.
pub(crate) fn mark(edns: &mut Edns, marker: &[u8]) {
    edns.options_mut().insert(EdnsOption::Unknown(MARKER_CODE, marker.to_vec()));
}

/// A random marker.
pub(crate) fn new_marker(rng: &mut StdRng) -> [u8; 8] {
    let mut marker = [0; 8];
    rng.fill_bytes(&mut marker);
    marker
}

#[cfg(test)]
#[path = "answer_tests.rs"]
mod tests;
