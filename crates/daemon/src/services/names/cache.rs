//! Answers of upstream servers, for as long as they hold (RFC 2308 for negative ones).

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use hickory_proto::op::{Message, Query, ResponseCode};
use hickory_proto::rr::{Name, RData, Record, RecordType};

/// Questions whose answers are remembered.
pub(crate) const ENTRIES_MAX: usize = 4_096;
/// Memory of answers that are remembered, in bytes.
pub(crate) const BYTES_MAX: usize = 16 * 1024 * 1024;
/// The longest time that an answer is remembered, in seconds.
pub(crate) const TTL_MAX_S: u32 = 3_600;
/// The longest time that the lack of an answer is remembered, in seconds.
pub(crate) const NEGATIVE_TTL_MAX_S: u32 = 300;

/// A question, whatever its letter case.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key {
    name: Name,
    kind: u16,
    /// Whether records of DNSSEC are wanted.
    dnssec: bool,
    /// Whether unverified data is wanted.
    unchecked: bool,
}

impl Key {
    pub(crate) fn new(query: &Query, dnssec: bool, unchecked: bool) -> Self {
        let (name, kind) = (query.name.to_lowercase(), query.query_type.into());
        Self { name, kind, dnssec, unchecked }
    }
}

/// The answer of an upstream server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Said {
    pub(crate) code: ResponseCode,
    pub(crate) answers: Vec<Record>,
    pub(crate) authorities: Vec<Record>,
    pub(crate) additionals: Vec<Record>,
    /// Whether the server has verified it.
    pub(crate) authentic: bool,
    /// The memory that it takes, in bytes.
    bytes: usize,
}

impl Said {
    /// `wire_bytes` is its length on the wire.
    pub(crate) fn new(message: Message, wire_bytes: usize) -> Self {
        // A short record may take much more memory than it has bytes: its name may be a pointer to a long one.
        let memory = |record: &Record| size_of::<Record>() + record.name.len();
        let bytes = wire_bytes + message.all_sections().map(memory).sum::<usize>();
        Self {
            code: message.metadata.response_code,
            authentic: message.metadata.authentic_data,
            answers: message.answers,
            authorities: message.authorities,
            additionals: message.additionals,
            bytes,
        }
    }

    /// How long it holds, in seconds; `None`: it may not be remembered.
    fn lifetime_s(&self, kind: RecordType) -> Option<u32> {
        let has_answer = self.answers.iter().any(|it| it.record_type() == kind)
            || (kind == RecordType::ANY && !self.answers.is_empty());
        let positive = self.code == ResponseCode::NoError && has_answer;
        if !positive && !matches!(self.code, ResponseCode::NoError | ResponseCode::NXDomain) {
            return None;
        }
        let records =
            self.answers.iter().chain(positive.then_some(&self.authorities).into_iter().flatten());
        let shortest = records.map(|record| record.ttl).min();
        if positive {
            return shortest.map(|ttl| ttl.min(TTL_MAX_S));
        }
        let soa = self.authorities.iter().find_map(|record| match &record.data {
            RData::SOA(soa) => Some(record.ttl.min(soa.minimum)),
            _ => None,
        })?;
        Some(shortest.map_or(soa, |ttl| ttl.min(soa)).min(NEGATIVE_TTL_MAX_S))
    }
}

/// A record that is `age_s` seconds old, for a client that asked for a name: with the client's letter case.
pub(crate) fn told(record: &Record, age_s: u32, asked: &Name) -> Record {
    let mut told = record.clone();
    told.ttl = told.ttl.min(TTL_MAX_S).saturating_sub(age_s);
    if told.name.eq_ignore_root(asked) {
        told.name = asked.clone();
    }
    told
}

#[derive(Debug)]
struct Entry {
    said: Said,
    since: Instant,
    until: Instant,
    number: u64,
}

/// Remembered answers, the oldest forgotten first.
#[derive(Debug, Default)]
pub(crate) struct Cache {
    entries: BTreeMap<Key, Entry>,
    /// Keys in the order in which they came.
    order: BTreeMap<u64, Key>,
    /// Keys in the order in which they end.
    ends: BTreeSet<(Instant, u64)>,
    bytes: usize,
    next: u64,
}

impl Cache {
    /// An answer that still holds, and its age in seconds.
    pub(crate) fn get(&self, now: Instant, key: &Key) -> Option<(&Said, u32)> {
        let entry = self.entries.get(key).filter(|entry| entry.until > now)?;
        let age = now.saturating_duration_since(entry.since).as_secs();
        Some((&entry.said, u32::try_from(age).unwrap_or(u32::MAX)))
    }

    /// Remembers an answer, if it may be.
    pub(crate) fn put(&mut self, now: Instant, key: Key, said: Said) {
        let lifetime = said.lifetime_s(key.kind.into()).filter(|seconds| *seconds > 0);
        let Some(lifetime) = lifetime.filter(|_| said.bytes <= BYTES_MAX) else { return };
        self.remove(&key);
        while let Some((_, number)) = self.ends.first().copied().filter(|(until, _)| *until <= now)
        {
            self.remove_number(number);
        }
        while self.entries.len() >= ENTRIES_MAX || self.bytes + said.bytes > BYTES_MAX {
            let Some((number, _)) = self.order.first_key_value() else { break };
            let number = *number;
            self.remove_number(number);
        }
        let until = now + Duration::from_secs(lifetime.into());
        self.bytes += said.bytes;
        let number = self.next;
        self.next += 1;
        self.order.insert(number, key.clone());
        self.ends.insert((until, number));
        self.entries.insert(key, Entry { said, since: now, until, number });
    }

    /// Forgets everything, as when the upstream servers change.
    pub(crate) fn clear(&mut self) {
        let next = self.next;
        *self = Self { next, ..Self::default() };
    }

    fn remove_number(&mut self, number: u64) {
        if let Some(key) = self.order.get(&number).cloned() {
            self.remove(&key);
        }
    }

    fn remove(&mut self, key: &Key) {
        if let Some(entry) = self.entries.remove(key) {
            self.bytes = self.bytes.saturating_sub(entry.said.bytes);
            self.order.remove(&entry.number);
            self.ends.remove(&(entry.until, entry.number));
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use hickory_proto::op::OpCode;
    use hickory_proto::rr::rdata::{A, SOA};

    use super::*;

    fn name(text: &str) -> Name {
        Name::from_ascii(text).unwrap()
    }

    fn key(text: &str) -> Key {
        Key::new(&Query::query(name(text), RecordType::A), false, false)
    }

    fn message(code: ResponseCode) -> Message {
        let mut message = Message::response(1, OpCode::Query);
        message.metadata.response_code = code;
        message
    }

    fn positive(text: &str, ttl: u32, bytes: usize) -> Said {
        let mut message = message(ResponseCode::NoError);
        message.add_answer(Record::from_rdata(name(text), ttl, RData::A(A::new(192, 0, 2, 1))));
        Said { bytes, ..Said::new(message, 0) }
    }

    fn ttl(found: Option<(&Said, u32)>) -> Option<u32> {
        found.map(|(said, age_s)| told(&said.answers[0], age_s, &name("x.")).ttl)
    }

    fn negative(code: ResponseCode, soa: Option<(u32, u32)>) -> Said {
        let mut message = message(code);
        if let Some((ttl, minimum)) = soa {
            let soa = SOA::new(name("ns."), name("h."), 1, 1, 1, 1, minimum);
            message.add_authority(Record::from_rdata(name("example."), ttl, RData::SOA(soa)));
        }
        Said::new(message, 100)
    }

    #[test]
    fn an_answer_holds_for_its_ttl_which_counts_down_whatever_the_case() {
        let (now, mut cache) = (Instant::now(), Cache::default());
        cache.put(now, key("a.example."), positive("a.example.", 30, 50));
        let at = |seconds| now + Duration::from_secs(seconds);
        assert_eq!(ttl(cache.get(at(10), &key("A.eXample."))), Some(20));
        assert_eq!(ttl(cache.get(at(29), &key("a.example."))), Some(1));
        assert_eq!(cache.get(at(30), &key("a.example.")), None);
        let other = Key::new(&Query::query(name("a.example."), RecordType::AAAA), false, false);
        assert_eq!(cache.get(now, &other), None);
    }

    #[test]
    fn a_long_ttl_is_capped_and_none_is_not_remembered() {
        let (now, mut cache) = (Instant::now(), Cache::default());
        cache.put(now, key("a."), positive("a.", u32::MAX, 50));
        cache.put(now, key("b."), positive("b.", 0, 50));
        assert_eq!(ttl(cache.get(now, &key("a."))), Some(TTL_MAX_S));
        let end = now + Duration::from_secs(TTL_MAX_S.into());
        assert_eq!((cache.get(end, &key("a.")), cache.get(now, &key("b."))), (None, None));
    }

    #[test]
    fn a_negative_answer_holds_as_its_soa_says_and_not_without_one() {
        let now = Instant::now();
        let holds = |said: Said, seconds| {
            let mut cache = Cache::default();
            cache.put(now, key("a."), said);
            cache.get(now + Duration::from_secs(seconds), &key("a.")).is_some()
        };
        for code in [ResponseCode::NoError, ResponseCode::NXDomain] {
            assert!(holds(negative(code, Some((60, 20))), 19));
            assert!(!holds(negative(code, Some((60, 20))), 20));
            assert!(!holds(negative(code, Some((10, 20))), 10));
            assert!(!holds(negative(code, Some((u32::MAX, u32::MAX))), NEGATIVE_TTL_MAX_S.into()));
            assert!(!holds(negative(code, None), 0));
        }
        for code in [ResponseCode::ServFail, ResponseCode::Refused] {
            assert!(!holds(negative(code, Some((60, 20))), 0));
        }
    }

    #[test]
    fn entries_and_bytes_are_bounded_and_the_oldest_goes_first() {
        let (now, mut cache) = (Instant::now(), Cache::default());
        for n in 0..ENTRIES_MAX + 10 {
            let text = format!("n{n}.");
            cache.put(now, key(&text), positive(&text, 60, 10));
        }
        assert_eq!(
            (cache.entries.len(), cache.order.len(), cache.ends.len()),
            (ENTRIES_MAX, ENTRIES_MAX, ENTRIES_MAX)
        );
        assert_eq!(cache.get(now, &key("n9.")), None);
        assert!(cache.get(now, &key("n10.")).is_some());
        for n in 0..600 {
            let text = format!("big{n}.");
            cache.put(now, key(&text), positive(&text, 60, 65_535));
        }
        assert!(cache.bytes <= BYTES_MAX && cache.entries.len() <= 256, "{}", cache.bytes);
        cache.put(now, key("huge."), positive("huge.", 60, BYTES_MAX + 1));
        assert_eq!(cache.get(now, &key("huge.")), None);
        let bytes = cache.bytes;
        cache.put(now, key("big599."), positive("big599.", 60, 65_535));
        assert_eq!(cache.bytes, bytes, "the same question takes the same place");
        cache.put(now + Duration::from_secs(60), key("x."), positive("x.", 60, 10));
        assert_eq!((cache.entries.len(), cache.bytes), (1, 10), "what has ended makes room");
        cache.clear();
        assert_eq!((cache.entries.len(), cache.bytes), (0, 0));
    }

    #[test]
    fn records_count_by_their_memory_and_not_by_what_is_left_of_them_on_the_wire() {
        let long = name(&format!("{}.", ["l".repeat(62).as_str(); 4].join(".")));
        let mut message = message(ResponseCode::NoError);
        for n in 0..200 {
            let data = RData::A(A::new(192, 0, 2, n));
            message.add_answer(Record::from_rdata(long.clone(), 60, data));
        }
        // Most names are pointers there.
        let wire = message.to_vec().unwrap().len();
        assert!(wire < 100 * long.len(), "{wire}");
        assert!(Said::new(message, wire).bytes > 200 * long.len());
    }
}
