//! Each answer is read back by hickory, as a client would.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::time::Instant;

use hickory_proto::rr::rdata::TXT;
use hickory_proto::rr::rdata::opt::ClientSubnet;
use proptest::prelude::*;
use weft_crypto::PeerId;
use weft_mesh::{HostNames, NamePort, NameRecord, Transport};

use super::*;
use crate::services::names::zone::{Feed, NetworkInfo};

const MARKER: [u8; 8] = *b"mymarker";

fn name(text: &str) -> Name {
    Name::from_ascii(text).unwrap()
}

fn weft() -> Scope {
    Scope::Network("weft".to_owned())
}

fn peer(n: u8) -> PeerId {
    PeerId::from_bytes([n; 32])
}

fn record(network: &str, name: &str, addresses: Vec<IpAddr>) -> NameRecord {
    NameRecord {
        name: name.into(),
        network: network.into(),
        addresses,
        ports: Vec::new(),
        is_client: false,
    }
}

fn addresses_at(third: u8, count: u8) -> Vec<IpAddr> {
    (1..=count).map(|n| IpAddr::from([10, 32, third, n])).collect()
}

/// `web` (IPv4 alone, here and elsewhere), `many` (200 addresses), `v6`, and `secret` of another network.
fn zone() -> Zone {
    let mut srv = record("weft", "srv", addresses_at(9, 2));
    srv.ports = vec![NamePort { service: "http".into(), transport: Transport::Tcp, port: 80 }];
    let own = vec![
        record("weft", "web", addresses_at(0, 2)),
        record("weft", "v6", vec!["fd00::6".parse().unwrap()]),
        record("shop", "secret", addresses_at(200, 1)),
        srv,
    ];
    let many = (0..20).map(|k| record("weft", "many", addresses_at(100 + k, 16)));
    let others = [record("weft", "web", addresses_at(1, 3))].into_iter().chain(many).collect();
    let host =
        |n, names| HostNames { peer: peer(n), unlinked_since: None, endpoints: Vec::new(), names };
    let ranges = |texts: &[&str]| texts.iter().map(|it| it.parse().unwrap()).collect();
    let hosts = vec![host(1, own), host(2, others)];
    let on = |name: &str, texts: &[&str]| {
        let info = NetworkInfo { name: name.into(), ranges: ranges(texts), is_internal: false };
        (info, hosts.clone())
    };
    let networks = vec![on("weft", &["10.32.0.0/12", "fd00::/64"]), on("shop", &["10.32.0.0/12"])];
    let feed = Feed { local: peer(1), networks, revision: 5 };
    Zone::build(Instant::now(), &name("weft.local."), &feed)
}

fn query(text: &str, kind: RecordType) -> Message {
    let mut message = Message::new(77, MessageType::Query, OpCode::Query);
    message.metadata.recursion_desired = true;
    message.add_query(Query::query(name(text), kind));
    message
}

fn with_edns(mut message: Message, payload: u16) -> Message {
    let mut edns = Edns::new();
    edns.set_max_payload(payload);
    message.set_edns(edns);
    message
}

fn ask_as(
    zone: &Zone,
    scope: &Scope,
    carrier: Carrier,
    is_client: bool,
    bytes: &[u8],
    seed: u64,
) -> Reply {
    let server = [172, 17, 0, 1].into();
    let asked = Asked { bytes, carrier, is_client, is_settled: true, scope, server };
    answer(zone, &MARKER, &asked, seed)
}

fn ask(message: &Message, carrier: Carrier, seed: u64) -> Message {
    match ask_as(&zone(), &weft(), carrier, true, &message.to_vec().unwrap(), seed) {
        Reply::Answer(bytes, _) => Message::from_vec(&bytes).unwrap(),
        other => panic!("{other:?}"),
    }
}

fn udp(text: &str, kind: RecordType) -> Message {
    ask(&query(text, kind), Carrier::Udp, 1)
}

fn ips(message: &Message) -> Vec<IpAddr> {
    let ip = |record: &Record| match &record.data {
        RData::A(it) => IpAddr::from(it.0),
        RData::AAAA(it) => IpAddr::from(it.0),
        other => panic!("{other:?}"),
    };
    message.answers.iter().map(ip).collect()
}

fn has_soa(message: &Message) -> bool {
    matches!(message.authorities.as_slice(), [record] if matches!(record.data, RData::SOA(_)) && record.ttl == NEGATIVE_TTL_S)
}

#[test]
fn a_known_name_is_answered_with_the_clients_letter_case_and_a_short_ttl() {
    let answer = udp("WeB.wEFt.LOCAL.", RecordType::A);
    assert_eq!((answer.metadata.id, answer.metadata.response_code), (77, ResponseCode::NoError));
    assert!(answer.metadata.authoritative && answer.metadata.recursion_available);
    assert!(answer.metadata.recursion_desired && !answer.metadata.truncation);
    assert_eq!(answer.answers.len(), 5);
    for record in &answer.answers {
        assert!(record.name.eq_case(&name("WeB.wEFt.LOCAL.")), "{}", record.name);
        assert_eq!(record.ttl, TTL_S);
    }
    assert!(answer.queries[0].name.eq_case(&name("WeB.wEFt.LOCAL.")));
    assert!(answer.edns.is_none(), "a client without EDNS gets none");
}

#[test]
fn addresses_of_this_host_come_first_and_each_group_rotates() {
    let local: BTreeSet<IpAddr> = addresses_at(0, 2).into_iter().collect();
    let mut orders = BTreeSet::new();
    for seed in 0..200 {
        let all = ips(&ask(&query("web.weft.local.", RecordType::A), Carrier::Udp, seed));
        assert_eq!(all.iter().take(2).copied().collect::<BTreeSet<_>>(), local);
        orders.insert(all);
    }
    assert_eq!(orders.len(), 12, "two orders of two, six of three");
}

#[test]
fn a_known_name_of_another_type_has_no_data_and_an_unknown_one_does_not_exist() {
    for kind in [
        RecordType::AAAA,
        RecordType::MX,
        RecordType::TXT,
        RecordType::HTTPS,
        RecordType::Unknown(999),
    ] {
        for text in ["web.weft.local.", "web."] {
            let answer = udp(text, kind);
            assert_eq!(answer.metadata.response_code, ResponseCode::NoError, "{text} {kind}");
            assert!(answer.answers.is_empty() && has_soa(&answer), "{text} {kind}");
            assert!(answer.authorities[0].name.zone_of(&name(text)), "{}", answer.authorities[0]);
        }
    }
    assert_eq!(
        ips(&udp("v6.weft.local.", RecordType::AAAA)),
        ["fd00::6".parse::<IpAddr>().unwrap()]
    );
    assert!(has_soa(&udp("v6.weft.local.", RecordType::A)));
    for text in ["none.weft.local.", "secret.weft.local.", "secret.shop.weft.local."] {
        for kind in [RecordType::A, RecordType::AAAA, RecordType::ANY, RecordType::SRV] {
            let answer = udp(text, kind);
            assert_eq!(answer.metadata.response_code, ResponseCode::NXDomain, "{text} {kind}");
            assert!(answer.answers.is_empty() && has_soa(&answer));
        }
    }
}

#[test]
fn a_label_of_any_bytes_is_no_name_here() {
    for label in [&b"a b"[..], b"web.weft", b"\xff", b"\0", b"*", &[b'l'; 63]] {
        let labels = [label, b"weft", b"local"];
        let mut message = query("web.", RecordType::A);
        message.queries[0].name = Name::from_labels(labels).unwrap();
        message.queries[0].name.set_fqdn(true);
        let answer = ask(&message, Carrier::Udp, 1);
        assert_eq!(answer.metadata.response_code, ResponseCode::NXDomain, "{label:?}");
    }
}

#[test]
fn the_zone_itself_has_soa_ns_and_the_servers_address() {
    let soa = udp("weft.local.", RecordType::SOA);
    let RData::SOA(data) = &soa.answers[0].data else { panic!("{soa}") };
    assert_eq!((data.serial, data.minimum), (5, NEGATIVE_TTL_S));
    let ns = udp("weft.local.", RecordType::NS);
    assert_eq!(ns.answers[0].data, RData::NS(NS(name("weft.local."))));
    assert_eq!(ns.additionals.len(), 1);
    assert_eq!(ips(&udp("weft.local.", RecordType::A)), [IpAddr::from([172, 17, 0, 1])]);
    assert!(has_soa(&udp("weft.local.", RecordType::AAAA)));
    assert!(has_soa(&udp("weft.weft.local.", RecordType::A)));
}

#[test]
fn a_question_for_everything_gets_one_small_record() {
    for text in ["web.weft.local.", "many.weft.local.", "weft.local.", "1.0.32.10.in-addr.arpa."] {
        let answer = udp(text, RecordType::ANY);
        assert_eq!(answer.answers.len(), 1);
        assert!(
            matches!(&answer.answers[0].data, RData::HINFO(it) if &*it.cpu == b"RFC8482"),
            "{answer}"
        );
    }
}

#[test]
fn reverse_names_of_both_families() {
    let ptr = |text: &str| {
        let answer = udp(text, RecordType::PTR);
        let names = answer.answers.iter().map(|record| match &record.data {
            RData::PTR(it) => it.0.to_ascii(),
            other => panic!("{other:?}"),
        });
        (answer.metadata.response_code, names.collect::<Vec<_>>())
    };
    let web = vec!["web.weft.local.".to_owned()];
    assert_eq!(ptr("1.0.32.10.in-addr.ARPA."), (ResponseCode::NoError, web));
    let v6 = "6.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.d.f.ip6.arpa.";
    assert_eq!(ptr(v6), (ResponseCode::NoError, vec!["v6.weft.local.".to_owned()]));
    assert_eq!(ptr("9.0.32.10.in-addr.arpa."), (ResponseCode::NXDomain, vec![]));
    assert_eq!(
        ptr("1.200.32.10.in-addr.arpa."),
        (ResponseCode::NXDomain, vec![]),
        "of another network"
    );
    assert!(has_soa(&udp("9.0.32.10.in-addr.arpa.", RecordType::PTR)));
    assert!(has_soa(&udp("1.0.32.10.in-addr.arpa.", RecordType::A)));
    assert!(has_soa(&udp("0.32.10.in-addr.arpa.", RecordType::PTR)));
    let foreign = query("1.2.0.192.in-addr.arpa.", RecordType::PTR).to_vec().unwrap();
    assert!(matches!(ask_as(&zone(), &weft(), Carrier::Udp, true, &foreign, 1), Reply::Forward(_)));
}

#[test]
fn a_client_of_each_network_is_told_of_its_own_alone() {
    let code = |scope: &Scope, text: &str, kind| {
        let bytes = query(text, kind).to_vec().unwrap();
        match ask_as(&zone(), scope, Carrier::Udp, true, &bytes, 1) {
            Reply::Answer(bytes, _) => {
                let answer = Message::from_vec(&bytes).unwrap();
                (answer.metadata.response_code, answer.answers.len())
            }
            Reply::Forward(_) => (ResponseCode::Refused, 0),
            other => panic!("{other:?}"),
        }
    };
    let (shop, here, none) =
        (Scope::Network("shop".to_owned()), ResponseCode::NoError, ResponseCode::NXDomain);
    let secret = "secret.shop.weft.local.";
    assert_eq!(code(&shop, secret, RecordType::A), (here, 1));
    assert_eq!(code(&shop, "secret.weft.local.", RecordType::A), (here, 1));
    assert_eq!(code(&shop, "1.200.32.10.in-addr.arpa.", RecordType::PTR), (here, 1));
    assert_eq!(code(&Scope::Host, secret, RecordType::A), (here, 1));
    assert_eq!(code(&weft(), secret, RecordType::A), (none, 0));
    for text in ["web.weft.local.", "web.weft.weft.local.", "_http._tcp.srv.weft.local."] {
        for kind in [RecordType::A, RecordType::SRV] {
            assert_eq!(code(&shop, text, kind), (none, 0), "{text}");
        }
    }
    assert_eq!(code(&shop, "1.0.32.10.in-addr.arpa.", RecordType::PTR), (none, 0));
    assert_eq!(code(&shop, "web.", RecordType::A), (ResponseCode::Refused, 0), "goes upstream");
}

#[test]
fn services_come_with_the_addresses_of_their_target() {
    let answer = udp("_http._tcp.srv.weft.local.", RecordType::SRV);
    let RData::SRV(srv) = &answer.answers[0].data else { panic!("{answer}") };
    assert_eq!((srv.port, &srv.target), (80, &name("srv.weft.local.")));
    assert_eq!(answer.additionals.len(), 2);
    assert!(has_soa(&udp("_http._tcp.srv.weft.local.", RecordType::A)));
    assert!(has_soa(&udp("_tcp.srv.weft.local.", RecordType::SRV)));
    assert_eq!(
        udp("_x._tcp.srv.weft.local.", RecordType::SRV).metadata.response_code,
        ResponseCode::NXDomain
    );
}

#[test]
fn many_addresses_are_cut_to_the_clients_limit_with_tc_and_complete_by_tcp() {
    let size = |message: &Message| match ask_as(
        &zone(),
        &weft(),
        Carrier::Udp,
        true,
        &message.to_vec().unwrap(),
        3,
    ) {
        Reply::Answer(bytes, _) => bytes.len(),
        other => panic!("{other:?}"),
    };
    let many = || query("many.weft.local.", RecordType::A);
    for (message, least, most) in [
        (many(), 25, PLAIN_BYTES_MAX),
        (with_edns(many(), 100), 25, PLAIN_BYTES_MAX),
        (with_edns(many(), 600), 30, 600),
        (with_edns(many(), 4_096), 70, DATAGRAM_BYTES_MAX.into()),
        (with_edns(many(), 65_535), 70, DATAGRAM_BYTES_MAX.into()),
    ] {
        let answer = ask(&message, Carrier::Udp, 3);
        assert!(
            answer.metadata.truncation && answer.answers.len() >= least,
            "{}",
            answer.answers.len()
        );
        assert!(size(&message) <= most, "{}", size(&message));
        assert_eq!(answer.edns.is_some(), message.edns.is_some());
    }
    let first = |seed| ips(&ask(&many(), Carrier::Udp, seed)).into_iter().collect::<BTreeSet<_>>();
    assert_ne!(first(1), first(2), "each client gets others");
    let all = ask(&many(), Carrier::Tcp, 1);
    assert_eq!((all.answers.len(), all.metadata.truncation), (320, false));
}

#[test]
fn edns_is_spoken_as_far_as_it_goes() {
    let answer = ask(&with_edns(query("web.", RecordType::A), 4_096), Carrier::Udp, 1);
    let edns = answer.edns.as_ref().unwrap();
    assert_eq!((edns.max_payload(), edns.version()), (DATAGRAM_BYTES_MAX, 0));
    assert!(edns.options().options.is_empty());

    let mut odd = with_edns(query("web.", RecordType::A), 1_232);
    let options = odd.edns.as_mut().unwrap().options_mut();
    options.insert(EdnsOption::Unknown(65_001, vec![1; 40]));
    options.insert(EdnsOption::Subnet(ClientSubnet::new([192, 0, 2, 0].into(), 24, 0)));
    odd.edns.as_mut().unwrap().set_dnssec_ok(true);
    let answer = ask(&odd, Carrier::Udp, 1);
    assert_eq!(answer.answers.len(), 5);
    assert!(answer.edns.unwrap().flags().dnssec_ok);

    let mut newer = with_edns(query("web.", RecordType::A), 1_232);
    newer.edns.as_mut().unwrap().set_version(1);
    let answer = ask(&newer, Carrier::Udp, 1);
    // The codes BADVERS and BADSIG are one number.
    assert_eq!(u16::from(answer.metadata.response_code), u16::from(ResponseCode::BADVERS));
    assert_eq!(answer.edns.unwrap().version(), 0);
    assert!(answer.answers.is_empty());
}

#[test]
fn other_names_are_forwarded_for_those_who_ask_for_recursion() {
    let reply = |message: &Message| {
        ask_as(&zone(), &weft(), Carrier::Udp, true, &message.to_vec().unwrap(), 1)
    };
    let foreign = query("www.Example.org.", RecordType::MX);
    let Reply::Forward(forward) = reply(&foreign) else { panic!() };
    assert_eq!(forward.query, foreign.queries[0]);
    assert!(forward.query.name.eq_case(&name("www.Example.org.")));
    assert!(matches!(reply(&query("unknown.", RecordType::A)), Reply::Forward(_)));
    let mut without = foreign;
    without.metadata.recursion_desired = false;
    let Reply::Answer(bytes, Counter::Refused) = reply(&without) else { panic!() };
    assert_eq!(Message::from_vec(&bytes).unwrap().metadata.response_code, ResponseCode::Refused);
}

#[test]
fn until_all_hosts_have_told_their_names_an_unknown_one_is_not_denied() {
    let reply = |text: &str, kind, is_client| {
        let bytes = query(text, kind).to_vec().unwrap();
        let (scope, server) = (&weft(), [172, 17, 0, 1].into());
        let carrier = Carrier::Udp;
        let asked = Asked { bytes: &bytes, carrier, is_client, is_settled: false, scope, server };
        answer(&zone(), &MARKER, &asked, 1)
    };
    let unknown = [
        ("none.weft.local.", RecordType::A),
        ("none.", RecordType::AAAA),
        ("9.0.32.10.in-addr.arpa.", RecordType::PTR),
        ("_x._tcp.srv.weft.local.", RecordType::SRV),
    ];
    for (text, kind) in unknown {
        assert_eq!(reply(text, kind, true), Reply::Hold, "{text}");
        assert!(!matches!(reply(text, kind, false), Reply::Hold), "a stranger waits for nothing");
    }
    let known = [
        ("web.weft.local.", RecordType::A),
        ("web.", RecordType::AAAA),
        ("weft.local.", RecordType::SOA),
        ("1.0.32.10.in-addr.arpa.", RecordType::PTR),
    ];
    for (text, kind) in known {
        assert!(matches!(reply(text, kind, true), Reply::Answer(..)), "{text}");
    }
    assert!(matches!(reply("www.example.org.", RecordType::A, true), Reply::Forward(_)));
}

/// An answer of an upstream server with `count` addresses.
fn said_of(count: u16) -> Said {
    let mut message = Message::response(1, OpCode::Query);
    for n in 0..count {
        let [high, low] = n.to_be_bytes();
        let data = RData::A(A::new(192, 0, high, low));
        message.add_answer(Record::from_rdata(name("big.example."), 60, data));
    }
    Said::new(message, 0)
}

#[test]
fn a_huge_answer_of_others_is_cut_without_being_copied_or_written_whole() {
    let asked = query("big.example.", RecordType::A);
    let said = said_of(4_000);
    let form = Form::of(&asked, Carrier::Udp);
    let mut bytes = Vec::new();
    let memory = allocation_counter::measure(|| {
        bytes = form.of_others(&asked.queries[0], &said, 0);
    });
    let answer = Message::from_vec(&bytes).unwrap();
    assert!(answer.metadata.truncation && answer.answers.len() >= 25, "{}", answer.answers.len());
    assert!(bytes.len() <= PLAIN_BYTES_MAX);
    let all = 4_000 * size_of::<Record>() as u64;
    assert!(memory.bytes_total < all / 4, "{} of {all}", memory.bytes_total);
    // By TCP it has as many as its length of 16 bits allows.
    let (form, said) = (Form::of(&asked, Carrier::Tcp), said_of(2_000));
    let whole = Message::from_vec(&form.of_others(&asked.queries[0], &said, 0)).unwrap();
    assert_eq!((whole.answers.len(), whole.metadata.truncation), (2_000, false));
}

#[test]
fn each_kind_of_bad_query_has_its_answer_and_counter() {
    let reply = |bytes: &[u8]| ask_as(&zone(), &weft(), Carrier::Udp, true, bytes, 1);
    let code = |message: &Message| match reply(&message.to_vec().unwrap()) {
        Reply::Answer(bytes, counter) => {
            (Message::from_vec(&bytes).unwrap().metadata.response_code, counter)
        }
        other => panic!("{other:?}"),
    };
    let good = || query("web.", RecordType::A);
    assert_eq!(reply(&[]), Reply::Drop(Counter::Malformed));
    assert_eq!(reply(&[0; 11]), Reply::Drop(Counter::Malformed));
    let mut response = good();
    response.metadata.message_type = MessageType::Response;
    assert_eq!(reply(&response.to_vec().unwrap()), Reply::Drop(Counter::Responses));
    for op_code in [OpCode::Status, OpCode::Notify, OpCode::Update] {
        let mut other = good();
        other.metadata.op_code = op_code;
        assert_eq!(code(&other), (ResponseCode::NotImp, Counter::Malformed), "{op_code:?}");
    }
    let mut none = good();
    none.queries.clear();
    assert_eq!(code(&none), (ResponseCode::FormErr, Counter::Malformed));
    let mut two = good();
    two.add_query(Query::query(name("v6."), RecordType::A));
    assert_eq!(code(&two), (ResponseCode::FormErr, Counter::Malformed));
    let extra = Record::from_rdata(name("x."), 1, RData::TXT(TXT::new(vec!["x".into()])));
    let mut answers = good();
    answers.add_answer(extra.clone());
    assert_eq!(code(&answers), (ResponseCode::FormErr, Counter::Malformed));
    let mut additionals = good();
    (0..3).for_each(|_| _ = additionals.add_additional(extra.clone()));
    assert_eq!(code(&additionals), (ResponseCode::FormErr, Counter::Malformed));
    let mut cut = good().to_vec().unwrap();
    cut.truncate(14);
    assert!(matches!(reply(&cut), Reply::Answer(_, Counter::Malformed)));
    // 65,535 questions announced, none there: no memory is taken for them.
    let mut many = good().to_vec().unwrap();
    many[4..6].copy_from_slice(&[0xff, 0xff]);
    assert!(matches!(reply(&many), Reply::Answer(bytes, Counter::Malformed) if bytes.len() == 12));
    let mut chaos = query("version.bind.", RecordType::TXT);
    chaos.queries[0].set_query_class(DNSClass::CH);
    assert_eq!(code(&chaos), (ResponseCode::Refused, Counter::Refused));
    for kind in [RecordType::AXFR, RecordType::IXFR] {
        assert_eq!(code(&query("weft.local.", kind)), (ResponseCode::Refused, Counter::Refused));
    }
    let mut marked = with_edns(query("www.example.org.", RecordType::A), 1_232);
    mark(marked.edns.as_mut().unwrap(), &MARKER);
    assert_eq!(code(&marked), (ResponseCode::Refused, Counter::Loops));
    let mut others = with_edns(query("www.example.org.", RecordType::A), 1_232);
    mark(others.edns.as_mut().unwrap(), b"another1");
    assert!(matches!(reply(&others.to_vec().unwrap()), Reply::Forward(_)));
}

/// Bytes of a query that may be damaged.
fn any_query() -> impl Strategy<Value = Vec<u8>> {
    let texts = prop::sample::select(vec![
        "web.",
        "many.weft.local.",
        "none.weft.local.",
        "weft.local.",
        "secret.shop.weft.local.",
        "example.org.",
        "1.0.32.10.in-addr.arpa.",
        "_http._tcp.srv.weft.local.",
        "secret.",
        "1.200.32.10.in-addr.arpa.",
        ".",
    ]);
    let damage = prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4);
    (texts, any::<u16>(), any::<Option<u16>>(), damage).prop_map(|(text, kind, payload, damage)| {
        let mut message = query(text, kind.into());
        if let Some(payload) = payload {
            message = with_edns(message, payload);
        }
        let mut bytes = message.to_vec().unwrap();
        for (place, value) in damage {
            let index = place.index(bytes.len());
            bytes[index] = value;
        }
        bytes
    })
}

proptest! {
    #[test]
    fn arbitrary_bytes_never_panic_and_answers_keep_the_limit(bytes in prop::collection::vec(any::<u8>(), 0..600), is_client: bool, seed: u64) {
        if let Reply::Answer(answer, _) = ask_as(&zone(), &weft(), Carrier::Udp, is_client, &bytes, seed) {
            prop_assert!(answer.len() <= DATAGRAM_BYTES_MAX.into());
            prop_assert!(is_client || answer.len() <= bytes.len() * STRANGERS_FACTOR_MAX);
        }
    }

    #[test]
    fn an_answer_is_readable_keeps_the_limit_and_names_nothing_foreign(bytes in any_query(), seed: u64) {
        let limit = Message::from_vec(&bytes).ok().and_then(|it| it.edns).map_or(PLAIN_BYTES_MAX, |edns| {
            usize::from(edns.max_payload()).clamp(PLAIN_BYTES_MAX, DATAGRAM_BYTES_MAX.into())
        });
        if let Reply::Answer(answer, _) = ask_as(&zone(), &weft(), Carrier::Udp, true, &bytes, seed) {
            prop_assert!(answer.len() <= limit, "{} of {limit}", answer.len());
            prop_assert_eq!(&answer[..2], &bytes[..2]);
            let message = Message::from_vec(&answer).unwrap();
            prop_assert_ne!(message.metadata.response_code, ResponseCode::ServFail);
            for record in message.all_sections() {
                let text = record.to_string();
                prop_assert!(!text.contains("10.32.200."), "{text}");
                prop_assert!(!record.data.to_string().contains("secret"), "{text}");
            }
        }
    }

    #[test]
    fn a_stranger_never_gets_more_than_it_sent_and_no_data(bytes in any_query(), seed: u64) {
        match ask_as(&zone(), &weft(), Carrier::Udp, false, &bytes, seed) {
            Reply::Answer(answer, counter) => {
                prop_assert!(answer.len() <= bytes.len() * STRANGERS_FACTOR_MAX);
                prop_assert_eq!(counter, Counter::Strangers);
                let message = Message::from_vec(&answer).unwrap();
                prop_assert_eq!(message.all_sections().count(), 0);
            }
            Reply::Drop(_) => {}
            other => prop_assert!(false, "{other:?}"),
        }
    }
}
