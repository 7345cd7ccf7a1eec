//! One host, seen from outside: addresses, endpoints, members, status, saved state.
#![allow(clippy::unwrap_used)]

mod common;

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use common::{
    allocate, answer, claim, config, drain, drain_with, founder, id, link, restored, saved, sent,
};
use weft_mesh::{
    AddressError, Change, ClaimResult, Config, EndpointInfo, Founding, Hello, Mac, MemberInfo,
    Mesh, MeshError, Message, NamePort, NameRecord, Output, RangeAnnouncement, Refusal, State,
    Transport, Vni, limits,
};

fn endpoint(mac: u8, address: &str) -> EndpointInfo {
    EndpointInfo {
        container: format!("box{mac}"),
        name: String::new(),
        aliases: Vec::new(),
        mac: Mac([2, 0, 0, 0, 0, mac]),
        addresses: vec![address.parse().unwrap()],
    }
}

fn announce(mesh: &mut Mesh, now: Instant, peer: u8, version: u64, add: Vec<EndpointInfo>) {
    let remove = Vec::new();
    let message = Message::Endpoints { version, full: true, more: false, add, remove };
    mesh.handle_message(now, id(peer), message).unwrap();
}

#[test]
fn an_allocation_gives_both_families_and_the_same_again() {
    let now = Instant::now();
    let mut mesh = founder(now, "10.32.0.0/12");
    let first = allocate(&mut mesh, now, Vni::WEFT, "a").unwrap();
    assert_eq!(first[0], "10.32.0.1/12");
    assert!(first[1].starts_with("fd") && first[1].ends_with("::a20:1/64"), "{first:?}");
    assert_eq!(allocate(&mut mesh, now, Vni::WEFT, "a").unwrap(), first);
    assert_eq!(allocate(&mut mesh, now, Vni::WEFT, "b").unwrap()[0], "10.32.0.2/12");
    let freed = mesh.release(now, "a");
    assert_eq!(freed, ["10.32.0.1".parse::<IpAddr>().unwrap()]);
    assert_eq!(
        allocate(&mut mesh, now, Vni::WEFT, "c").unwrap()[0],
        "10.32.0.3/12",
        "a freed address rests"
    );
}

#[test]
fn the_answer_comes_behind_the_state_that_holds_it() {
    let now = Instant::now();
    let mut mesh = founder(now, "10.32.0.0/12");
    drain(&mut mesh);
    let ticket = mesh.allocate(now, Vni::WEFT, "a");
    let outputs = drain(&mut mesh);
    let Output::Persist(state) = &outputs[0] else { panic!("{outputs:?}") };
    assert!(matches!(&outputs[1], Output::Answer { ticket: t, .. } if *t == ticket));
    let again = restored(now, "10.32.0.0/12", &serde_json::to_string(state).unwrap());
    assert_eq!(again.allocated(Vni::WEFT, "a").unwrap()[0].to_string(), "10.32.0.1/12");
    assert_eq!(again.network(), mesh.network());
}

#[test]
fn the_subnets_ends_are_never_given_and_all_else_is() {
    let now = Instant::now();
    let mut mesh = founder(now, "10.9.0.0/29");
    for n in 1..=6 {
        let address = allocate(&mut mesh, now, Vni::WEFT, &format!("box{n}")).unwrap();
        assert_eq!(address[0], format!("10.9.0.{n}/29"));
    }
    let error = allocate(&mut mesh, now, Vni::WEFT, "one more").unwrap_err().to_string();
    assert!(error.contains("10.9.0.0/29") && error.contains("full"), "{error}");
    mesh.release(now, "box4");
    assert_eq!(allocate(&mut mesh, now, Vni::WEFT, "one more").unwrap()[0], "10.9.0.4/29");
}

#[test]
fn automatic_addresses_come_from_the_default_subnet() {
    let now = Instant::now();
    let mut config = config("10.32.0.0/12");
    config.subnet = Some("10.33.7.0/24".parse().unwrap());
    let mut mesh = Mesh::new(now, config.clone(), None, [1; 32]).unwrap();
    assert_eq!(allocate(&mut mesh, now, Vni::WEFT, "a").unwrap()[0], "10.33.7.1/24");
    config.subnet = Some("10.64.0.0/24".parse().unwrap());
    let error = Mesh::new(now, config, None, [1; 32]).unwrap_err();
    assert!(error.to_string().contains("not inside"), "{error}");
}

#[test]
fn explicit_addresses_inside_the_range() {
    let now = Instant::now();
    let mut mesh = founder(now, "10.9.0.0/24");
    assert_eq!(claim(&mut mesh, now, Vni::WEFT, "a", "10.9.0.1/24").unwrap(), ["10.9.0.1/24"]);
    assert_eq!(claim(&mut mesh, now, Vni::WEFT, "a", "10.9.0.1/24").unwrap(), ["10.9.0.1/24"]);
    assert_eq!(allocate(&mut mesh, now, Vni::WEFT, "b").unwrap()[0], "10.9.0.2/24");
    let error = claim(&mut mesh, now, Vni::WEFT, "c", "10.9.0.2/24").unwrap_err().to_string();
    assert!(error.contains("container b") && error.contains("me ("), "{error}");
    let twin = mesh.ipv6_of(Vni::WEFT, "10.9.0.2".parse().unwrap()).unwrap().to_string();
    let error = claim(&mut mesh, now, Vni::WEFT, "c", &twin).unwrap_err();
    assert!(matches!(error, AddressError::Taken { .. }), "the pair is one: {error}");
    let free = mesh.ipv6_of(Vni::WEFT, "10.9.0.9".parse().unwrap()).unwrap().to_string();
    assert_eq!(claim(&mut mesh, now, Vni::WEFT, "c", &free).unwrap(), [free]);
    let error = claim(&mut mesh, now, Vni::WEFT, "d", "10.9.0.9/24").unwrap_err();
    assert!(matches!(error, AddressError::Taken { .. }), "the pair is one: {error}");
    let odd = mesh.network().unwrap().range6.to_string().replace("::/", "::1:2:3/");
    let error = claim(&mut mesh, now, Vni::WEFT, "d", &odd).unwrap_err();
    assert!(matches!(error, AddressError::NotMapped { .. }), "{error}");
    for reserved in ["10.9.0.0/24", "10.9.0.255/24", "10.9.0.255/16", "10.9.0.64/26", "0.0.0.0/0"] {
        let error = claim(&mut mesh, now, Vni::WEFT, "d", reserved).unwrap_err();
        assert!(matches!(error, AddressError::Reserved { .. }), "{reserved}: {error}");
    }
}

#[test]
fn explicit_addresses_outside_the_range_are_checked_against_all_endpoints() {
    let now = Instant::now();
    let mut mesh = founder(now, "10.9.0.0/24");
    link(&mut mesh, now, 7);
    announce(&mut mesh, now, 7, 1, vec![endpoint(1, "192.168.7.1/24")]);
    drain(&mut mesh);
    let error = claim(&mut mesh, now, Vni::WEFT, "a", "192.168.7.1/24").unwrap_err().to_string();
    assert!(error.contains("container box1") && error.contains("host7"), "{error}");
    assert_eq!(
        claim(&mut mesh, now, Vni::WEFT, "a", "192.168.7.2/24").unwrap(),
        ["192.168.7.2/24"]
    );
    assert_eq!(
        claim(&mut mesh, now, Vni::WEFT, "a", "2001:db8::2/64").unwrap(),
        ["2001:db8::2/64"]
    );
    let error = claim(&mut mesh, now, Vni::WEFT, "b", "192.168.7.2/24").unwrap_err();
    assert!(matches!(error, AddressError::Taken { .. }), "{error}");
    assert_eq!(mesh.release(now, "a").len(), 2);
    assert_eq!(
        claim(&mut mesh, now, Vni::WEFT, "b", "192.168.7.2/24").unwrap(),
        ["192.168.7.2/24"]
    );
}

#[test]
fn an_allocation_before_there_is_a_range_waits_and_then_says_for_what() {
    let now = Instant::now();
    let mut config = config("10.9.0.0/24");
    config.founding = Founding::Join;
    let mut mesh = Mesh::new(now, config, None, [1; 32]).unwrap();
    let ticket = mesh.allocate(now, Vni::WEFT, "a");
    assert!(drain(&mut mesh).iter().all(|output| !matches!(output, Output::Answer { .. })));
    let late = now + Duration::from_secs(limits::ALLOCATION_WAIT_S);
    assert!(mesh.poll_timeout().unwrap() <= late);
    mesh.handle_timeout(late);
    let error = answer(&mut mesh, ticket).unwrap_err();
    assert_eq!(error.to_string(), "no address yet: waiting for a link with another host");
}

#[test]
fn a_release_cancels_what_waits() {
    let now = Instant::now();
    let mut config = config("10.9.0.0/24");
    config.founding = Founding::Join;
    let mut mesh = Mesh::new(now, config, None, [1; 32]).unwrap();
    let ticket = mesh.allocate(now, Vni::WEFT, "a");
    mesh.release(now, "a");
    assert_eq!(answer(&mut mesh, ticket), Err(AddressError::Cancelled));
    let ticket = mesh.allocate(now, Vni::WEFT, "");
    assert_eq!(answer(&mut mesh, ticket), Err(AddressError::BadOwner));
}

#[test]
fn a_claim_that_nobody_answers_ends_with_the_hosts_name() {
    let now = Instant::now();
    let mut mesh = founder(now, "10.9.0.0/24");
    link(&mut mesh, now, 7);
    let request = Message::RangeRequest { request: 1, within: "10.9.0.0/24".parse().unwrap() };
    mesh.handle_message(now, id(7), request).unwrap();
    let granted = drain(&mut mesh).into_iter().find_map(|output| match output {
        Output::Send { message: Message::RangeGrant { ranges, .. }, .. } => Some(ranges),
        _ => None,
    });
    let (network, owner) = (mesh.network().unwrap().id, id(7));
    let announcement = RangeAnnouncement { network, owner, version: 1, ranges: granted.unwrap() };
    mesh.handle_message(now, owner, Message::Ranges { announcement }).unwrap();
    let ticket = mesh.claim(now, Vni::WEFT, "a", "10.9.0.200/24".parse().unwrap());
    mesh.handle_timeout(now + Duration::from_secs(limits::CLAIM_WAIT_S));
    let error = answer(&mut mesh, ticket).unwrap_err();
    assert!(matches!(&error, AddressError::NoAnswer { host, .. } if host.contains("host7")));
    let ticket = mesh.claim(now, Vni::WEFT, "a", "10.9.0.201/24".parse().unwrap());
    mesh.handle_link_down(now, owner);
    let error = answer(&mut mesh, ticket).unwrap_err();
    assert!(
        matches!(&error, AddressError::OwnerUnreachable { host, .. } if host.contains("host7"))
    );
}

#[test]
fn endpoints_outlive_a_link_for_the_grace_period() {
    let now = Instant::now();
    let mut mesh = founder(now, "10.9.0.0/24");
    link(&mut mesh, now, 7);
    announce(&mut mesh, now, 7, 1, vec![endpoint(1, "10.9.0.7/24"), endpoint(2, "10.9.0.8/24")]);
    let told = |outputs: &[Output]| {
        let ends = outputs.iter().filter_map(|output| match output {
            Output::Endpoints { add, remove, .. } => Some((add.len(), remove.len())),
            _ => None,
        });
        ends.collect::<Vec<_>>()
    };
    assert_eq!(told(&drain(&mut mesh)), [(2, 0)]);
    mesh.handle_link_down(now, id(7));
    let later = now + Duration::from_secs(limits::ENDPOINT_GRACE_S - 1);
    mesh.handle_timeout(later);
    assert_eq!(told(&drain(&mut mesh)), [], "data goes on");
    link(&mut mesh, later, 7);
    announce(&mut mesh, later, 7, 1, vec![endpoint(1, "10.9.0.7/24")]);
    assert_eq!(told(&drain(&mut mesh)), [(0, 1)], "only what changed");
    mesh.handle_link_down(later, id(7));
    let grace = Duration::from_secs(limits::ENDPOINT_GRACE_S);
    assert!(mesh.poll_timeout().unwrap() <= later + grace);
    mesh.handle_timeout(later + grace);
    assert_eq!(told(&drain(&mut mesh)), [(0, 1)]);
    assert_eq!(mesh.endpoints(Vni::WEFT), []);
}

#[test]
fn a_missed_change_of_endpoints_makes_the_host_ask_for_all() {
    let now = Instant::now();
    let mut mesh = founder(now, "10.9.0.0/24");
    link(&mut mesh, now, 7);
    announce(&mut mesh, now, 7, 3, vec![endpoint(1, "10.9.0.7/24")]);
    drain(&mut mesh);
    let change = |version, mac| Message::Endpoints {
        version,
        full: false,
        more: false,
        add: vec![endpoint(mac, "10.9.0.9/24")],
        remove: Vec::new(),
    };
    mesh.handle_message(now, id(7), change(4, 2)).unwrap();
    assert_eq!(mesh.endpoints(Vni::WEFT).len(), 2);
    drain(&mut mesh);
    mesh.handle_message(now, id(7), change(6, 3)).unwrap();
    let asks = Output::Send { peer: id(7), message: Message::EndpointsRequest };
    assert_eq!(drain(&mut mesh), [asks]);
    assert_eq!(mesh.endpoints(Vni::WEFT).len(), 2);
}

#[test]
fn two_hosts_with_one_mac_are_reported_once() {
    let now = Instant::now();
    let mut mesh = founder(now, "10.9.0.0/24");
    link(&mut mesh, now, 7);
    link(&mut mesh, now, 8);
    announce(&mut mesh, now, 8, 1, vec![endpoint(1, "192.168.0.8/24")]);
    announce(&mut mesh, now, 7, 1, vec![endpoint(1, "192.168.0.7/24")]);
    announce(&mut mesh, now, 8, 2, vec![endpoint(1, "192.168.0.9/24")]);
    let outputs = drain(&mut mesh);
    let conflicts = outputs.iter().filter_map(|output| match output {
        Output::Changed(Change::Conflict(conflict)) => Some((conflict.winner, conflict.loser)),
        _ => None,
    });
    assert_eq!(conflicts.collect::<Vec<_>>(), [(id(7), id(8))]);
    assert_eq!(mesh.conflicts().len(), 1);
}

#[test]
fn members_heard_of_are_dialled_with_growing_pauses_until_linked() {
    let mut now = Instant::now();
    let mut mesh = founder(now, "10.9.0.0/24");
    link(&mut mesh, now, 7);
    let address: SocketAddr = "192.0.2.8:6783".parse().unwrap();
    let unfit = ["0.0.0.0:6783", "192.0.2.8:0", "224.0.0.1:1", "[fe80::1]:1"];
    let all = unfit.iter().map(|text| text.parse().unwrap()).chain([address]);
    let addresses = all.collect();
    let info = MemberInfo {
        peer: id(8),
        nickname: "h8".to_owned(),
        addresses,
        gone: Vec::new(),
        age_s: 0,
    };
    let members = vec![info];
    mesh.handle_message(now, id(7), Message::Members { members: members.clone() }).unwrap();
    let dial = Output::Dial { peer: id(8), addresses: vec![address] };
    assert!(drain(&mut mesh).contains(&dial));
    let start = now;
    let mut dials = 0;
    while now < start + Duration::from_secs(600) {
        now = mesh.poll_timeout().unwrap();
        mesh.handle_timeout(now);
        dials += drain(&mut mesh).iter().filter(|output| **output == dial).count();
    }
    assert!((10..40).contains(&dials), "{dials} attempts in ten minutes");
    let status = mesh.peers().into_iter().find(|peer| peer.peer == id(8)).unwrap();
    assert_eq!((status.nickname.as_str(), status.linked), ("h8", false));
    link(&mut mesh, now, 8);
    drain(&mut mesh);
    mesh.handle_timeout(now + Duration::from_secs(100));
    assert!(!drain(&mut mesh).contains(&dial), "linked hosts are not dialled");
    let mut quiet = config("10.9.0.0/24");
    quiet.discovery = false;
    let mut mesh = Mesh::new(now, quiet, None, [1; 32]).unwrap();
    link(&mut mesh, now, 7);
    mesh.handle_message(now, id(7), Message::Members { members }).unwrap();
    assert!(!drain(&mut mesh).contains(&dial), "discovery is off");
}

#[test]
fn a_member_without_a_sign_of_life_is_forgotten() {
    let now = Instant::now();
    let mut mesh = founder(now, "10.9.0.0/24");
    link(&mut mesh, now, 7);
    link(&mut mesh, now, 8);
    mesh.handle_link_down(now, id(8));
    drain(&mut mesh);
    let check = Duration::from_secs(limits::FORGET_CHECK_S);
    let limit = Duration::from_secs(limits::MEMBER_FORGET_S);
    mesh.handle_timeout(now + limit - check);
    assert_eq!(mesh.peers().len(), 3);
    mesh.handle_timeout(now + limit + check);
    let forgotten = Output::Changed(Change::MemberForgotten { peer: id(8) });
    assert!(drain(&mut mesh).contains(&forgotten));
    assert_eq!(mesh.peers().len(), 2, "the linked one stays");
    mesh.handle_link_down(now + limit, id(7));
    assert!(mesh.forget_member(id(7)));
    assert!(!mesh.forget_member(id(7)));
}

#[test]
fn what_peers_tell_of_their_states_is_saved_within_a_minute() {
    let now = Instant::now();
    let mut mesh = founder(now, "10.9.0.0/24");
    link(&mut mesh, now, 7);
    drain(&mut mesh);
    let is_save = |output: &Output| matches!(output, Output::Persist(_));
    for generation in 40..50 {
        mesh.handle_message(now, id(7), Message::Generation { generation }).unwrap();
        assert!(!drain(&mut mesh).iter().any(is_save), "each change of a peer is no write here");
    }
    let due = now + Duration::from_secs(limits::GENERATION_SAVE_S);
    assert!(mesh.poll_timeout().unwrap() <= due);
    mesh.handle_timeout(due);
    assert!(saved(&mut mesh).contains("\"generation\":49"));
    mesh.handle_message(due, id(7), Message::Generation { generation: 49 }).unwrap();
    mesh.handle_timeout(due + Duration::from_secs(limits::GENERATION_SAVE_S));
    assert!(!drain(&mut mesh).iter().any(is_save), "it is no news");
}

#[test]
fn a_host_that_the_user_forgot_stays_so_whatever_others_tell_until_somebody_is_linked_with_it() {
    let now = Instant::now();
    let mut mesh = founder(now, "10.9.0.0/24");
    link(&mut mesh, now, 7);
    let address: SocketAddr = "192.0.2.8:6783".parse().unwrap();
    let info = MemberInfo {
        peer: id(8),
        nickname: "h8".into(),
        addresses: vec![address],
        gone: vec![],
        age_s: 0,
    };
    let told = Message::Members { members: vec![info] };
    let dials = |outputs: &[Output]| {
        outputs.iter().any(|output| matches!(output, Output::Dial { peer, .. } if *peer == id(8)))
    };
    mesh.handle_message(now, id(7), told.clone()).unwrap();
    assert!(dials(&drain(&mut mesh)));

    assert!(mesh.forget_member(id(8)));
    let saved = drain(&mut mesh).into_iter().find_map(|output| match output {
        Output::Persist(state) => Some(*state),
        _ => None,
    });
    mesh.handle_message(now, id(7), told.clone()).unwrap();
    assert!(!dials(&drain(&mut mesh)));
    // Nor after a restart.
    let mut mesh = Mesh::new(now, config("10.9.0.0/24"), saved, [2; 32]).unwrap();
    link(&mut mesh, now, 7);
    mesh.handle_message(now, id(7), told.clone()).unwrap();
    assert!(!dials(&drain(&mut mesh)));
    assert_eq!(mesh.peers().len(), 2);

    let linked = Message::Connections { full: false, add: vec![id(8)], remove: Vec::new() };
    mesh.handle_message(now, id(7), linked).unwrap();
    mesh.handle_message(now, id(7), told).unwrap();
    assert!(dials(&drain(&mut mesh)), "it is back");
}

#[test]
fn a_state_of_another_range_identity_or_version_is_refused_with_advice() {
    let now = Instant::now();
    let mut mesh = founder(now, "10.9.0.0/24");
    allocate(&mut mesh, now, Vni::WEFT, "a").unwrap();
    mesh.allocate(now, Vni::WEFT, "b");
    let state: State = serde_json::from_str(&saved(&mut mesh)).unwrap();
    let new = |config: Config, state: &State| Mesh::new(now, config, Some(state.clone()), [1; 32]);
    let error = new(config("10.8.0.0/24"), &state).unwrap_err();
    assert!(matches!(error, MeshError::SavedRange { .. }));
    assert!(error.to_string().contains("weft reset"), "{error}");
    let mut other = config("10.9.0.0/24");
    other.local = id(6);
    assert!(matches!(new(other, &state).unwrap_err(), MeshError::SavedIdentity { .. }));
    let mut other = config("10.9.0.0/24");
    other.range6 = Some("fd01::/64".parse().unwrap());
    assert!(matches!(new(other, &state).unwrap_err(), MeshError::SavedRange6 { .. }));
    let mut json = serde_json::to_value(&state).unwrap();
    json["version"] = 99.into();
    let newer: State = serde_json::from_value(json.clone()).unwrap();
    assert!(matches!(new(config("10.9.0.0/24"), &newer).unwrap_err(), MeshError::SavedVersion(99)));
    json["version"] = limits::STATE_VERSION.into();
    json["owned"] = serde_json::json!([{ "first": "10.9.0.9", "last": "10.9.0.2" }]);
    let damaged: State = serde_json::from_value(json).unwrap();
    let error = new(config("10.9.0.0/24"), &damaged).unwrap_err();
    assert!(matches!(error, MeshError::SavedDamaged(_)));
}

#[test]
fn greetings_that_do_not_fit_are_refused() {
    let now = Instant::now();
    let mut mesh = founder(now, "10.9.0.0/24");
    let remote = "192.0.2.9:1".parse().unwrap();
    let fit = Hello { nickname: "other".to_owned(), ..mesh.hello() };
    let mut refuse = |peer, change: &dyn Fn(&mut Hello)| {
        let mut hello = fit.clone();
        change(&mut hello);
        mesh.handle_link_up(now, peer, hello, remote).unwrap_err()
    };
    assert!(matches!(refuse(id(5), &|_| {}), Refusal::SameIdentity { .. }));
    assert!(matches!(refuse(id(1), &|h| h.protocol = 9), Refusal::Protocol { theirs: 9, .. }));
    assert!(matches!(refuse(id(1), &|h| h.nickname.clear()), Refusal::BadHello { .. }));
    let range = "10.0.0.0/8".parse().unwrap();
    assert!(matches!(refuse(id(1), &|h| h.range = range), Refusal::Range { .. }));
    let range6 = "fd01::/64".parse().unwrap();
    let other = refuse(id(1), &|h| {
        h.network = None;
        h.range6 = Some(range6);
    });
    assert!(matches!(other, Refusal::Range6 { .. }));
    let text = serde_json::to_string(&other).unwrap();
    assert_eq!(serde_json::from_str::<Refusal>(&text).unwrap(), other);
}

#[test]
fn a_full_table_fits_its_messages() {
    let now = Instant::now();
    let mut mesh = founder(now, "10.9.0.0/24");
    for n in 0..200_u16 {
        let [high, low] = n.to_be_bytes();
        let address = |k: u16| format!("2001:db8:ffff:ffff:ffff:ffff:{:x}:{n:x}/128", 0xfff0 + k);
        let info = EndpointInfo {
            container: "\"".repeat(limits::NAME_BYTES_MAX),
            name: "\\".repeat(limits::NAME_BYTES_MAX),
            aliases: vec![
                ["a".repeat(63), "a".repeat(62)].join(".");
                limits::ALIASES_PER_ENDPOINT_MAX
            ],
            mac: Mac([2, 0, 0, 0, high, low]),
            addresses: (0..8).map(|k| address(k).parse().unwrap()).collect(),
        };
        mesh.set_local_endpoint(now, Vni::WEFT, info).unwrap();
    }
    let names = (0..100).map(longest_name).collect();
    mesh.set_local_names(names).unwrap();
    for n in 100..200_u8 {
        let at = |k: u8| format!("[2001:db8:ffff:ffff:ffff:ffff:ff{k:02x}:ff{n:02x}]:65535");
        let addresses = (0..8).map(|k| at(k).parse().unwrap()).collect();
        let nickname = "\"".repeat(limits::NICKNAME_BYTES_MAX);
        let hello = Hello { nickname, addresses, ..mesh.hello() };
        mesh.handle_link_up(now, id(n), hello, "[2001:db8::1]:1".parse().unwrap()).unwrap();
    }
    let mut largest = 0;
    for output in drain(&mut mesh) {
        if let Output::Send { message, .. } = output {
            let text = serde_json::to_string(&message).unwrap();
            assert_eq!(serde_json::from_str::<Message>(&text).unwrap(), message);
            largest = largest.max(text.len());
        }
    }
    assert!((limits::MESSAGE_BYTES_MAX / 2..=limits::MESSAGE_BYTES_MAX).contains(&largest));
}

fn longest_name(n: u16) -> NameRecord {
    let port = NamePort { service: "s".repeat(63), transport: Transport::Sctp, port: 65_535 };
    NameRecord {
        name: ["n".repeat(63), "n".repeat(62)].join("."),
        network: "w".repeat(63),
        addresses: (0..16)
            .map(|k| {
                format!("2001:db8:ffff:ffff:ffff:ffff:{:x}:{n:x}", 0xfff0 + k).parse().unwrap()
            })
            .collect(),
        ports: vec![port; limits::PORTS_PER_NAME_MAX],
        is_client: true,
    }
}

#[test]
fn news_lost_on_a_broken_link_elsewhere_is_sent_again() {
    let now = Instant::now();
    let mut mesh = founder(now, "10.9.0.0/24");
    link(&mut mesh, now, 7);
    link(&mut mesh, now, 8);
    let mut hear = |message| {
        mesh.handle_message(now, id(7), message).unwrap();
        drain(&mut mesh)
    };
    let tells = |outputs: &[Output]| {
        outputs.iter().any(|output| match output {
            Output::Send { peer, message: Message::Members { members } } => {
                *peer == id(8) && members.iter().any(|info| info.peer == id(9))
            }
            _ => false,
        })
    };
    let connections = |add: &[u8], remove: &[u8]| Message::Connections {
        full: false,
        add: add.iter().map(|n| id(*n)).collect(),
        remove: remove.iter().map(|n| id(*n)).collect(),
    };
    hear(connections(&[8], &[]));
    let addresses = vec!["192.0.2.9:6783".parse().unwrap()];
    let info = MemberInfo {
        peer: id(9),
        nickname: "h9".to_owned(),
        addresses,
        gone: Vec::new(),
        age_s: 0,
    };
    let outputs = hear(Message::Members { members: vec![info] });
    assert!(!tells(&outputs), "host 7 tells host 8 itself");
    hear(connections(&[], &[8]));
    let later = now + Duration::from_millis(limits::RESYNC_DELAY_MS);
    assert!(mesh.poll_timeout().unwrap() <= later);
    mesh.handle_timeout(later);
    assert!(tells(&drain(&mut mesh)), "host 7 may not have got round to it");
}

/// The addresses of a member, in the messages of a host to another that is not linked with the member.
fn members_told(outputs: &[Output], to: u8, of: u8) -> Vec<(Vec<SocketAddr>, Vec<SocketAddr>)> {
    let infos = outputs.iter().filter_map(|output| match output {
        Output::Send { peer, message: Message::Members { members } } if *peer == id(to) => {
            Some(members)
        }
        _ => None,
    });
    let infos = infos.flatten().filter(|info| info.peer == id(of));
    infos.map(|info| (info.addresses.clone(), info.gone.clone())).collect()
}

fn addresses_of(mesh: &Mesh, peer: u8) -> Vec<SocketAddr> {
    let peers = mesh.peers();
    peers.into_iter().find(|known| known.peer == id(peer)).unwrap().addresses
}

/// Two of three hosts get new addresses at once: each learns the other's from the third, which sees both.
#[test]
fn members_addresses_follow_what_a_link_sees_and_others_are_told() {
    let now = Instant::now();
    let mut third = founder(now, "10.9.0.0/24");
    link(&mut third, now, 1);
    link(&mut third, now, 2);
    drain(&mut third);
    let before = addresses_of(&third, 1);
    let new: SocketAddr = "198.51.100.1:6783".parse().unwrap();
    third.handle_remote(now, id(1), before[0]);
    assert_eq!(drain(&mut third), [], "no news");
    // A port that a NAT or the dialling gave is not where links are taken.
    third.handle_remote(now, id(1), "198.51.100.1:40000".parse().unwrap());
    assert_eq!(addresses_of(&third, 1), [new]);
    let outputs = drain(&mut third);
    assert_eq!(members_told(&outputs, 2, 1), [(vec![new], before.clone())]);
    assert!(outputs.iter().any(|output| matches!(output, Output::Persist(_))));

    // The other one, which knew it at the old address and has lost the link.
    let mut other = founder(now, "10.9.0.0/24");
    link(&mut other, now, 1);
    link(&mut other, now, 3);
    other.handle_link_down(now, id(1));
    drain(&mut other);
    assert_eq!(addresses_of(&other, 1), before);
    let message = outputs.into_iter().find_map(|output| match output {
        Output::Send { peer, message: message @ Message::Members { .. } } if peer == id(2) => {
            Some(message)
        }
        _ => None,
    });
    other.handle_message(now, id(3), message.unwrap()).unwrap();
    assert_eq!(addresses_of(&other, 1), [new], "the old one is gone");
    let dials = |output: &Output| matches!(output, Output::Dial { peer, addresses } if *peer == id(1) && *addresses == [new]);
    assert!(drain(&mut other).iter().any(dials), "at once");

    // A stale report of a departed address does not remove the current one. Nor does it override a host's live
    // link.
    let info = MemberInfo {
        peer: id(1),
        nickname: "host1".to_owned(),
        addresses: vec![new],
        gone: vec![new],
        age_s: 0,
    };
    other.handle_message(now, id(3), Message::Members { members: vec![info.clone()] }).unwrap();
    assert_eq!(addresses_of(&other, 1), [new]);
    let lie = MemberInfo { addresses: vec![before[0]], ..info };
    third.handle_message(now, id(2), Message::Members { members: vec![lie] }).unwrap();
    assert_eq!(addresses_of(&third, 1), [new]);
}

/// A member that returns under a new address is no longer dialled at the old one.
#[test]
fn a_member_that_comes_back_from_elsewhere_is_told_with_the_address_it_has_left() {
    let now = Instant::now();
    let mut mesh = founder(now, "10.9.0.0/24");
    link(&mut mesh, now, 1);
    link(&mut mesh, now, 2);
    let before = addresses_of(&mesh, 1);
    mesh.handle_link_down(now, id(1));
    drain(&mut mesh);
    let hello = Hello { nickname: "host1".to_owned(), ..mesh.hello() };
    let new: SocketAddr = "198.51.100.1:6783".parse().unwrap();
    mesh.handle_link_up(now, id(1), hello, new).unwrap();
    assert_eq!(members_told(&drain(&mut mesh), 2, 1), [(vec![new], before)]);
}

#[test]
fn without_a_saved_state_no_address_is_given_and_no_range_but_all_else_goes_on() {
    let mut now = Instant::now();
    let mut mesh = founder(now, "10.9.0.0/24");
    mesh.allocate(now, Vni::WEFT, "a");
    drain_with(&mut mesh, now, false);
    let answer = |mesh: &mut Mesh, now, full, owner: &str| {
        let wanted = mesh.allocate(now, Vni::WEFT, owner);
        let mut outputs = drain_with(mesh, now, full).into_iter();
        outputs.find_map(|output| match output {
            Output::Answer { ticket, result, .. } if ticket == wanted => Some(result),
            _ => None,
        })
    };
    let refused = answer(&mut mesh, now, true, "b").unwrap().unwrap_err();
    assert_eq!(refused, AddressError::NotSaved { why: "the disk is full".into() });
    assert_eq!(mesh.save_failure(), Some("the disk is full"));
    assert_eq!(mesh.ipam().owners[0].used, Some(1), "it was taken back");
    assert!(answer(&mut mesh, now, true, "a").unwrap().is_ok(), "it has that already");

    // A host joins: it is greeted, told of endpoints, and told why it gets no range.
    mesh.set_local_endpoint(now, Vni::WEFT, endpoint(1, "10.9.0.1/24")).unwrap();
    link(&mut mesh, now, 7);
    let within = "10.9.0.0/24".parse().unwrap();
    mesh.handle_message(now, id(7), Message::RangeRequest { request: 1, within }).unwrap();
    let sent = sent(&drain_with(&mut mesh, now, true), 7);
    assert!(sent.iter().any(|message| matches!(message, Message::Endpoints { .. })), "{sent:?}");
    let why = |message: &Message| matches!(message, Message::RangeRefused { reason, .. } if reason.contains("the disk is full"));
    assert!(sent.iter().any(why), "{sent:?}");

    // The save is retried, and all that waited is done.
    for _ in 0..5 {
        now = mesh.poll_timeout().unwrap();
        mesh.handle_timeout(now);
        drain_with(&mut mesh, now, true);
    }
    let pause = mesh.poll_timeout().unwrap().saturating_duration_since(now);
    assert!(pause <= Duration::from_millis(limits::SAVE_RETRY_MAX_MS), "{pause:?}");
    while mesh.save_failure().is_some() {
        now = mesh.poll_timeout().unwrap();
        mesh.handle_timeout(now);
        drain_with(&mut mesh, now, false);
    }
    assert!(answer(&mut mesh, now, false, "b").unwrap().is_ok());
    mesh.handle_message(now, id(7), Message::RangeRequest { request: 1, within }).unwrap();
    let granted = drain_with(&mut mesh, now, false);
    let grant = |output: &Output| {
        matches!(output, Output::Send { message: Message::RangeGrant { .. }, .. })
    };
    assert!(granted.iter().any(grant), "{granted:?}");
}

#[test]
fn a_grant_that_could_not_be_saved_is_sent_once_it_could_be() {
    let mut now = Instant::now();
    let mut mesh = founder(now, "10.9.0.0/24");
    link(&mut mesh, now, 7);
    drain_with(&mut mesh, now, false);
    let within = "10.9.0.0/24".parse().unwrap();
    mesh.handle_message(now, id(7), Message::RangeRequest { request: 1, within }).unwrap();
    let grant = |output: &Output| {
        matches!(output, Output::Send { message: Message::RangeGrant { .. }, .. })
    };
    assert!(!drain_with(&mut mesh, now, true).iter().any(grant));
    let mut sent = Vec::new();
    while mesh.save_failure().is_some() {
        now = mesh.poll_timeout().unwrap();
        mesh.handle_timeout(now);
        sent.extend(drain_with(&mut mesh, now, false));
    }
    let saved = sent.iter().position(|output| matches!(output, Output::Persist(_)));
    assert!(saved < sent.iter().position(grant), "{sent:?}");
}

/// A container of this host gets an address that a peer has just given back.
#[test]
fn a_claim_that_could_not_be_saved_takes_nothing_from_the_next_holder() {
    let now = Instant::now();
    let mut mesh = founder(now, "10.9.0.0/24");
    link(&mut mesh, now, 7);
    mesh.allocate(now, Vni::WEFT, "a");
    drain_with(&mut mesh, now, true);
    let (address, container) = ("10.9.0.9".parse().unwrap(), "theirs".to_owned());
    mesh.handle_message(now, id(7), Message::Claim { id: 1, address, container }).unwrap();
    mesh.handle_message(now, id(7), Message::ClaimRelease { address }).unwrap();
    let wanted = mesh.claim(now, Vni::WEFT, "mine", "10.9.0.9/24".parse().unwrap());
    let outputs = drain_with(&mut mesh, now, false);
    let given = |it: &Output| matches!(it, Output::Answer { ticket, result: Ok(_), .. } if *ticket == wanted);
    assert!(outputs.iter().any(given), "{outputs:?}");
    let (id, result) = (1, ClaimResult::NotSaved);
    assert!(sent(&outputs, 7).contains(&Message::ClaimAnswer { id, address, result }));
    let owners: Vec<String> = mesh.allocations().into_iter().map(|it| it.owner).collect();
    assert_eq!(owners, ["mine"]);
}

/// A host linked with host 7, during the first save after one that failed.
fn saving_after_a_failure() -> (Instant, Mesh) {
    let mut now = Instant::now();
    let mut mesh = founder(now, "10.9.0.0/24");
    link(&mut mesh, now, 7);
    drain_with(&mut mesh, now, false);
    mesh.allocate(now, Vni::WEFT, "a");
    drain_with(&mut mesh, now, true);
    now += Duration::from_millis(limits::SAVE_RETRY_FIRST_MS);
    mesh.handle_timeout(now);
    assert!(matches!(mesh.poll_output(), Some(Output::Persist(_))));
    (now, mesh)
}

/// A claim is given during the first save after a failure, and a user's request then asks for the next save.
#[test]
fn what_is_given_during_a_save_is_said_after_the_next_one() {
    let (now, mut mesh) = saving_after_a_failure();
    let (address, container) = ("10.9.0.9".parse().unwrap(), "theirs".to_owned());
    mesh.handle_message(now, id(7), Message::Claim { id: 1, address, container }).unwrap();
    mesh.allocate(now, Vni::WEFT, "b");
    mesh.handle_saved(now, Ok(()));
    let outputs = drain_with(&mut mesh, now, false);
    let answer = Message::ClaimAnswer { id: 1, address, result: ClaimResult::Given };
    let said = |it: &Output| matches!(it, Output::Send { message, .. } if *message == answer);
    let said = outputs.iter().position(said);
    let saved = outputs.iter().position(|it| matches!(it, Output::Persist(_)));
    assert!(saved.is_some() && saved < said, "{outputs:?}");
}

/// Addresses are given while the first save after a failure is under way.
#[test]
fn no_earlier_state_is_saved_over_a_later_one_when_saving_works_again() {
    let (now, mut mesh) = saving_after_a_failure();
    mesh.allocate(now, Vni::WEFT, "b");
    let (address, container) = ("10.9.0.9".parse().unwrap(), "theirs".to_owned());
    mesh.handle_message(now, id(7), Message::Claim { id: 1, address, container }).unwrap();
    mesh.handle_saved(now, Ok(()));
    let (mut disk, mut given) = (None, Vec::new());
    for output in drain_with(&mut mesh, now, false) {
        match output {
            Output::Persist(state) => disk = Some(*state),
            Output::Answer { result: Ok(_), .. } => given.push("b"),
            Output::Send { message: Message::ClaimAnswer { result, .. }, .. } => {
                assert_eq!(result, ClaimResult::Given);
                given.push("theirs");
            }
            _ => {}
        }
    }
    assert_eq!(given, ["b", "theirs"]);
    let saved = Mesh::new(now, config("10.9.0.0/24"), disk, [2; 32]).unwrap();
    assert_eq!(saved.ipam().owners[0].used, Some(2));
}
