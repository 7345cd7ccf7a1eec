#![allow(clippy::unwrap_used)]

use hickory_proto::rr::rdata::{A, CNAME};
use hickory_proto::rr::{RData, Record, RecordType};
use proptest::prelude::*;

use super::*;

fn servers(count: u8) -> Vec<SocketAddr> {
    (1..=count).map(|n| SocketAddr::from(([192, 0, 2, n], 53))).collect()
}

fn name(text: &str) -> Name {
    Name::from_ascii(text).unwrap()
}

fn exchange(now: Instant, count: u8, seed: u64) -> Exchange {
    let query = Query::query(name("www.Example.org."), RecordType::A);
    Exchange::new(now, query, (false, false), servers(count), [7; 8], seed)
}

/// An honest answer to a try, changed by `change`.
fn reply(to: &Try, change: impl FnOnce(&mut Message)) -> Vec<u8> {
    let query = Message::from_vec(&to.bytes).unwrap();
    let mut answer = Message::response(query.metadata.id, OpCode::Query);
    answer.add_query(query.queries[0].clone());
    let record =
        Record::from_rdata(query.queries[0].name.clone(), 60, RData::A(A::new(1, 2, 3, 4)));
    answer.add_answer(record);
    change(&mut answer);
    answer.to_vec().unwrap()
}

#[test]
fn an_honest_answer_is_taken() {
    let now = Instant::now();
    let mut exchange = exchange(now, 2, 1);
    let first = exchange.next(now).unwrap();
    assert_eq!((first.to, first.tcp), (servers(2)[0], false));
    let query = Message::from_vec(&first.bytes).unwrap();
    assert!(query.metadata.recursion_desired);
    let edns = query.edns.as_ref().unwrap();
    assert_eq!(edns.max_payload(), DATAGRAM_BYTES_MAX);
    assert!(
        edns.options()
            .options
            .iter()
            .any(|(code, _)| u16::from(*code) == super::super::answer::MARKER_CODE)
    );
    let Verdict::Done(said) = exchange.handle_answer(&reply(&first, |_| {})) else { panic!() };
    let asked = name("www.Example.org.");
    let told = super::super::cache::told(&said.answers[0], 0, &asked);
    assert!(told.name.eq_case(&asked));
}

#[test]
fn names_in_an_answer_do_not_keep_the_random_letters_that_they_point_to() {
    let now = Instant::now();
    for seed in 0..16 {
        let mut exchange = exchange(now, 1, seed);
        let sent = exchange.next(now).unwrap();
        let bytes = reply(&sent, |it| {
            let asked = it.queries[0].name.clone();
            let target = asked.base_name().prepend_label("web").unwrap();
            it.answers = vec![Record::from_rdata(asked, 60, RData::CNAME(CNAME(target)))];
        });
        let Verdict::Done(said) = exchange.handle_answer(&bytes) else { panic!() };
        let RData::CNAME(CNAME(target)) = &said.answers[0].data else { panic!("{said:?}") };
        assert!(target.eq_case(&name("web.example.org.")), "{target}");
    }
}

#[test]
fn a_silent_server_is_asked_without_edns_and_the_last_one_has_all_the_time() {
    let now = Instant::now();
    let edns = |sent: &Try| Message::from_vec(&sent.bytes).unwrap().edns.is_some();
    for dnssec in [false, true] {
        let query = Query::query(name("a."), RecordType::A);
        let mut exchange = Exchange::new(now, query, (dnssec, false), servers(1), [7; 8], 1);
        let first = exchange.next(now).unwrap();
        assert!(edns(&first) && !exchange.has_silent_server());
        assert_eq!(first.until, now + Duration::from_millis(SERVER_WAIT_MS));
        exchange.handle_failure();
        let last = exchange.next(first.until).unwrap();
        assert_eq!((edns(&last), exchange.has_silent_server()), (dnssec, true));
        assert_eq!(last.until, now + Duration::from_millis(EXCHANGE_LIMIT_MS));
    }
}

#[test]
fn ids_and_letter_cases_are_random_and_new_for_each_try() {
    let now = Instant::now();
    let (mut ids, mut cases) =
        (std::collections::BTreeSet::new(), std::collections::BTreeSet::new());
    for seed in 0..64 {
        let sent = exchange(now, 1, seed).next(now).unwrap();
        let query = Message::from_vec(&sent.bytes).unwrap();
        ids.insert(query.metadata.id);
        cases.insert(query.queries[0].name.to_ascii());
    }
    assert!(ids.len() > 60 && cases.len() > 50, "{} {}", ids.len(), cases.len());
}

#[test]
fn answers_to_other_questions_are_ignored() {
    let now = Instant::now();
    let mut exchange = exchange(now, 1, 1);
    let sent = exchange.next(now).unwrap();
    let mut mismatched = |change: &dyn Fn(&mut Message)| {
        assert_eq!(exchange.handle_answer(&reply(&sent, change)), Verdict::Mismatch);
    };
    mismatched(&|it| it.metadata.id ^= 1);
    mismatched(&|it| it.metadata.message_type = MessageType::Query);
    mismatched(&|it| it.metadata.op_code = OpCode::Status);
    mismatched(&|it| it.queries.clear());
    mismatched(&|it| it.queries.push(it.queries[0].clone()));
    mismatched(&|it| it.queries[0].query_type = RecordType::AAAA);
    mismatched(&|it| it.queries[0].name = name("www.example.com."));
    assert_eq!(exchange.handle_answer(b"no message"), Verdict::Mismatch);
    assert!(matches!(exchange.handle_answer(&reply(&sent, |_| {})), Verdict::Done(_)));
}

#[test]
fn a_changed_case_and_a_cut_answer_lead_to_tcp_with_the_same_server() {
    let now = Instant::now();
    for change in [
        (|it: &mut Message| it.queries[0].name = it.queries[0].name.to_lowercase())
            as fn(&mut Message),
        |it| it.metadata.truncation = true,
    ] {
        let mut exchange = exchange(now, 2, 3);
        let sent = exchange.next(now).unwrap();
        assert_eq!(exchange.handle_answer(&reply(&sent, change)), Verdict::Again);
        let again = exchange.next(now).unwrap();
        assert_eq!((again.to, again.tcp), (sent.to, true));
        let answer = reply(&again, |it| it.queries[0].name = it.queries[0].name.to_lowercase());
        assert!(matches!(exchange.handle_answer(&answer), Verdict::Done(_)));
    }
}

#[test]
fn a_server_without_edns_is_asked_without_it() {
    let now = Instant::now();
    for no_question in [false, true] {
        let mut exchange = exchange(now, 1, 4);
        let sent = exchange.next(now).unwrap();
        let refusal = reply(&sent, |it| {
            it.answers.clear();
            it.metadata.response_code = ResponseCode::FormErr;
            if no_question {
                it.queries.clear();
            }
        });
        assert_eq!(exchange.handle_answer(&refusal), Verdict::Again);
        let again = exchange.next(now).unwrap();
        assert!(Message::from_vec(&again.bytes).unwrap().edns.is_none());
        assert_eq!(again.to, sent.to);
    }
}

#[test]
fn servfail_refused_and_silence_lead_to_the_next_server_and_an_end() {
    let now = Instant::now();
    let mut exchange = exchange(now, 3, 5);
    let mut asked = Vec::new();
    while let Some(sent) = exchange.next(now) {
        asked.push(sent.to);
        match asked.len() % 3 {
            0 => exchange.handle_failure(),
            1 => {
                let code = ResponseCode::ServFail;
                let bytes = reply(&sent, |it| it.metadata.response_code = code);
                assert_eq!(exchange.handle_answer(&bytes), Verdict::Again);
            }
            _ => {
                let code = ResponseCode::Refused;
                let bytes = reply(&sent, |it| it.metadata.response_code = code);
                assert_eq!(exchange.handle_answer(&bytes), Verdict::Again);
            }
        }
        assert!(asked.len() < 100);
    }
    assert_eq!(asked, [servers(3), servers(3)].concat());
    assert_eq!(
        super::Exchange::new(
            now,
            Query::query(name("a."), RecordType::A),
            (false, false),
            Vec::new(),
            [0; 8],
            1
        )
        .next(now),
        None
    );
}

#[test]
fn all_servers_together_have_a_limit() {
    let now = Instant::now();
    let mut exchange = exchange(now, 8, 6);
    let late = now + Duration::from_millis(EXCHANGE_LIMIT_MS - 100);
    let sent = exchange.next(late).unwrap();
    assert_eq!(sent.until, now + Duration::from_millis(EXCHANGE_LIMIT_MS));
    assert_eq!(exchange.next(now + Duration::from_millis(EXCHANGE_LIMIT_MS)), None);
}

proptest! {
    #[test]
    fn no_bytes_of_a_server_make_it_panic_or_pass(bytes in proptest::collection::vec(any::<u8>(), 0..1_500), seed: u64) {
        let now = Instant::now();
        let mut exchange = exchange(now, 1, seed);
        exchange.next(now).unwrap();
        prop_assert_eq!(exchange.handle_answer(&bytes), Verdict::Mismatch);
    }

    #[test]
    fn damaged_answers_never_make_it_panic(place in any::<prop::sample::Index>(), value: u8, cut in any::<prop::sample::Index>()) {
        let now = Instant::now();
        let mut exchange = exchange(now, 1, 9);
        let sent = exchange.next(now).unwrap();
        let mut bytes = reply(&sent, |_| {});
        let index = place.index(bytes.len());
        bytes[index] = value;
        exchange.handle_answer(&bytes);
        bytes.truncate(cut.index(bytes.len()));
        exchange.handle_answer(&bytes);
    }
}
