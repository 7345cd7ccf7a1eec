#![allow(clippy::unwrap_used)]

use std::time::Duration;

use weft_mesh::{EndpointInfo, Mac, NameRecord};

use super::*;

const LOCAL: u8 = 1;

fn peer(n: u8) -> PeerId {
    PeerId::from_bytes([n; 32])
}

fn name(text: &str) -> Name {
    Name::from_ascii(text).unwrap()
}

fn on(network: &str) -> Scope {
    Scope::Network(network.to_owned())
}

fn endpoint(name: &str, aliases: &[&str], addresses: &[&str]) -> EndpointInfo {
    EndpointInfo {
        container: format!("id-{name}"),
        name: name.to_owned(),
        aliases: aliases.iter().map(|it| (*it).to_owned()).collect(),
        mac: Mac([2, 0, 0, 0, 0, 1]),
        addresses: addresses.iter().map(|it| it.parse().unwrap()).collect(),
    }
}

fn record(network: &str, name: &str, addresses: &[&str]) -> NameRecord {
    NameRecord {
        name: name.to_owned(),
        network: network.to_owned(),
        addresses: addresses.iter().map(|it| it.parse().unwrap()).collect(),
        ports: Vec::new(),
    }
}

fn host(n: u8, endpoints: Vec<EndpointInfo>, names: Vec<NameRecord>) -> HostNames {
    HostNames { peer: peer(n), unlinked_since: None, endpoints, names }
}

fn feed(hosts: Vec<HostNames>) -> Feed {
    let network = |name: &str, ranges: &[&str]| NetworkInfo {
        name: name.to_owned(),
        ranges: ranges.iter().map(|it| it.parse().unwrap()).collect(),
    };
    // Two networks with the same IPv4 range.
    let networks = vec![
        network("weft", &["10.32.0.0/12", "fd00:1::/64"]),
        network("shop", &["10.32.0.0/12", "fd00:2::/64"]),
    ];
    Feed { local: peer(LOCAL), hosts, networks, revision: 7 }
}

fn built(hosts: Vec<HostNames>) -> Zone {
    Zone::build(Instant::now(), &name("weft.local."), &feed(hosts))
}

/// The addresses of a name, or what it is instead.
fn found(zone: &Zone, scope: &Scope, text: &str) -> Result<Vec<String>, &'static str> {
    match zone.find(scope, &name(text)) {
        None => Err("foreign"),
        Some(Found::Apex) => Err("apex"),
        Some(Found::Empty) => Err("empty"),
        Some(Found::Nothing) => Err("nothing"),
        Some(Found::Service(..)) => Err("service"),
        Some(Found::Entry(entry)) => {
            Ok(entry.held().iter().map(|it| it.address.to_string()).collect())
        }
    }
}

#[test]
fn a_name_is_found_in_each_of_its_forms_whatever_the_case() {
    let zone = built(vec![host(LOCAL, vec![endpoint("Web", &["www"], &["10.32.0.1/12"])], vec![])]);
    let weft = on("weft");
    for text in [
        "web.",
        "WEB.",
        "web.weft.local.",
        "wEb.WEFT.LocaL.",
        "web.weft.weft.local.",
        "www.weft.local.",
    ] {
        assert_eq!(found(&zone, &weft, text), Ok(vec!["10.32.0.1".to_owned()]), "{text}");
    }
    assert_eq!(found(&zone, &weft, "weft.local."), Err("apex"));
    assert_eq!(found(&zone, &weft, "weft.weft.local."), Err("empty"));
    assert_eq!(found(&zone, &weft, "other.weft.local."), Err("nothing"));
    assert_eq!(found(&zone, &weft, "other."), Err("foreign"));
    assert_eq!(found(&zone, &weft, "web.example.org."), Err("foreign"));
    assert_eq!(found(&zone, &weft, "local."), Err("foreign"));
    assert_eq!(found(&zone, &weft, "."), Err("foreign"));
}

#[test]
fn no_network_sees_a_name_or_an_address_of_another() {
    let names = vec![record("shop", "web", &["10.32.0.2"]), record("shop", "till", &["10.32.0.3"])];
    let zone = built(vec![host(LOCAL, vec![endpoint("web", &[], &["10.32.0.1/12"])], names)]);
    let (weft, shop) = (on("weft"), on("shop"));
    assert_eq!(found(&zone, &weft, "web.weft.local."), Ok(vec!["10.32.0.1".to_owned()]));
    assert_eq!(found(&zone, &shop, "web.weft.local."), Ok(vec!["10.32.0.2".to_owned()]));
    assert_eq!(found(&zone, &shop, "till.shop.weft.local."), Ok(vec!["10.32.0.3".to_owned()]));
    for text in
        ["till.weft.local.", "till.shop.weft.local.", "web.shop.weft.local.", "shop.weft.local."]
    {
        assert_eq!(found(&zone, &weft, text), Err("nothing"), "{text}");
    }
    assert_eq!(found(&zone, &weft, "till."), Err("foreign"));
    let reverse = |scope: &Scope, address: &str| {
        zone.find_reverse(scope, format!("{address}/32").parse().unwrap())
    };
    assert_eq!(reverse(&weft, "10.32.0.1"), Reverse::Names(vec![name("web.weft.local.")]));
    assert_eq!(reverse(&weft, "10.32.0.3"), Reverse::Nothing);
    assert_eq!(reverse(&shop, "10.32.0.3"), Reverse::Names(vec![name("till.shop.weft.local.")]));
    assert_eq!(reverse(&shop, "10.32.0.1"), Reverse::Nothing);
    // The host sees all, each by its full name.
    assert_eq!(
        found(&zone, &Scope::Host, "till.shop.weft.local."),
        Ok(vec!["10.32.0.3".to_owned()])
    );
    assert_eq!(found(&zone, &Scope::Host, "till.weft.local."), Err("nothing"));
    assert_eq!(zone.list(&weft, None).len(), 1);
    assert_eq!(zone.list(&Scope::Host, None).len(), 3);
    // A network that this host is not on has no names here.
    assert_eq!(found(&zone, &on("none"), "web."), Err("foreign"));
    assert_eq!(found(&zone, &on("none"), "web.weft.local."), Err("nothing"));
}

#[test]
fn reverse_names_are_those_of_the_ranges_alone() {
    let names = vec![record("weft", "dns", &["192.0.2.53"])];
    let zone = built(vec![host(
        LOCAL,
        vec![endpoint("web", &["www"], &["10.32.0.1/12", "fd00:1::1/64"])],
        names,
    )]);
    let at = |net: &str| zone.find_reverse(&on("weft"), net.parse().unwrap());
    let both = Reverse::Names(vec![name("web.weft.local."), name("www.weft.local.")]);
    assert_eq!((at("10.32.0.1/32"), at("fd00:1::1/128")), (both, at("10.32.0.1/32")));
    assert_eq!((at("10.32.0.9/32"), at("fd00:1::9/128")), (Reverse::Nothing, Reverse::Nothing));
    assert_eq!((at("10.32.0.0/16"), at("fd00:1::/100")), (Reverse::Empty, Reverse::Empty));
    // The range has only part of 10.0.0.0/8.
    assert_eq!((at("10.0.0.0/8"), at("10.1.0.1/32")), (Reverse::Foreign, Reverse::Foreign));
    // A name given to an address of the Internet does not take that address from its owner.
    assert_eq!(at("192.0.2.53/32"), Reverse::Foreign);
    assert_eq!(found(&zone, &on("weft"), "dns.weft.local."), Ok(vec!["192.0.2.53".to_owned()]));
}

#[test]
fn names_that_dns_cannot_have_are_left_out_and_counted() {
    let bad = ["", "a b", "\u{e4}", "a..b", ".a", "localhost", "LOCALHOST"];
    let mut endpoints: Vec<_> = bad.iter().map(|it| endpoint(it, &[], &["10.32.0.1/12"])).collect();
    endpoints.push(endpoint(&"l".repeat(64), &[], &["10.32.0.1/12"]));
    endpoints.push(endpoint("under_score", &[], &["10.32.0.1/12"]));
    let zone = built(vec![host(LOCAL, endpoints, vec![])]);
    assert_eq!(zone.left_out(), (7, 0));
    assert_eq!(zone.list(&Scope::Host, None).len(), 1);
}

#[test]
fn a_name_with_dots_leaves_no_hole_above_it_and_takes_no_name_of_the_internet() {
    let endpoints = vec![
        endpoint("db.shop", &[], &["10.32.0.1/12"]),
        endpoint("www.example.org", &[], &["10.32.0.2/12"]),
    ];
    let zone = built(vec![host(LOCAL, endpoints, vec![record("shop", "db", &["10.32.0.3"])])]);
    let weft = on("weft");
    assert_eq!(found(&zone, &weft, "db.shop.weft.local."), Ok(vec!["10.32.0.1".to_owned()]));
    assert_eq!(found(&zone, &weft, "shop.weft.local."), Err("empty"));
    assert_eq!(found(&zone, &weft, "example.org.weft.local."), Err("empty"));
    assert_eq!(found(&zone, &weft, "www.example.org."), Err("foreign"));
    assert_eq!(found(&zone, &on("shop"), "db.shop.weft.local."), Ok(vec!["10.32.0.3".to_owned()]));
    // If a text could mean a name or a network, the host gets the name of its own network.
    assert_eq!(found(&zone, &Scope::Host, "db.shop.weft.local."), Ok(vec!["10.32.0.1".to_owned()]));
}

#[test]
fn services_are_found_by_name_and_number() {
    let mut web = record("weft", "web", &["10.32.0.1"]);
    let port =
        |service: &str, transport, port| NamePort { service: service.into(), transport, port };
    web.ports = vec![
        port("HTTP", Transport::Tcp, 80),
        port("http", Transport::Tcp, 8_080),
        port("dns", Transport::Udp, 53),
    ];
    let zone = built(vec![host(LOCAL, vec![], vec![web])]);
    let ports = |text: &str| match zone.find(&on("weft"), &name(text)) {
        Some(Found::Service(ports, target, _)) => {
            assert_eq!(target, name("web.weft.local."));
            ports
        }
        Some(Found::Empty) => vec![1],
        other => panic!("{other:?}"),
    };
    assert_eq!(ports("_http._tcp.web.weft.local."), [80, 8_080]);
    assert_eq!(ports("_80._tcp.web.weft.weft.local."), [80]);
    assert_eq!(ports("_DNS._udp.web.weft.local."), [53]);
    assert_eq!(ports("_tcp.web.weft.local."), [1]);
    for none in ["_http._udp.web", "_x._tcp.web", "_sctp.web", "http._tcp.web", "_http._tcp.other"]
    {
        assert_eq!(
            found(&zone, &on("weft"), &format!("{none}.weft.local.")),
            Err("nothing"),
            "{none}"
        );
    }
}

#[test]
fn a_host_that_died_gives_way_to_others_at_once_and_its_names_end_soon() {
    let now = Instant::now();
    let web = |n: u8| endpoint("web", &[], &[&format!("10.32.0.{n}/12")]);
    let mut dead = host(3, vec![web(3), endpoint("db", &[], &["10.32.0.9/12"])], vec![]);
    dead.unlinked_since = Some(now);
    let feed = feed(vec![host(2, vec![web(2)], vec![]), dead]);
    let at = |seconds| Zone::build(now + Duration::from_secs(seconds), &name("weft.local."), &feed);
    let zone = at(1);
    assert_eq!(found(&zone, &on("weft"), "web."), Ok(vec!["10.32.0.2".to_owned()]));
    assert_eq!(found(&zone, &on("weft"), "db."), Ok(vec!["10.32.0.9".to_owned()]));
    let grace = Duration::from_secs(NAME_GRACE_S);
    assert_eq!(zone.next_expiry(), Some(now + grace));
    let zone = at(NAME_GRACE_S);
    assert_eq!(found(&zone, &on("weft"), "db.weft.local."), Err("nothing"));
    assert_eq!(zone.find_reverse(&on("weft"), "10.32.0.9/32".parse().unwrap()), Reverse::Nothing);
    assert_eq!(zone.next_expiry(), None);
}

#[test]
fn one_address_counts_once_and_addresses_of_all_hosts_belong_to_a_name() {
    let names = vec![record("weft", "web", &["10.32.0.1", "10.32.0.8"])];
    let hosts = vec![
        host(LOCAL, vec![endpoint("web", &[], &["10.32.0.1/12"])], names),
        host(2, vec![endpoint("web", &["web"], &["10.32.0.2/12", "fd00:1::2/64"])], vec![]),
    ];
    let zone = built(hosts);
    let all = ["10.32.0.1", "10.32.0.2", "10.32.0.8", "fd00:1::2"].map(str::to_owned);
    assert_eq!(found(&zone, &on("weft"), "web."), Ok(all.to_vec()));
}

#[test]
fn a_name_without_addresses_takes_room_too() {
    let aliases: Vec<String> = (0..8).map(|n| format!("a{n}")).collect();
    let aliases: Vec<&str> = aliases.iter().map(String::as_str).collect();
    let endpoints = (0..4_096).map(|n| endpoint(&format!("c{n}"), &aliases, &[])).collect();
    let zone = built(vec![host(LOCAL, endpoints, vec![])]);
    assert_eq!(zone.left_out(), (0, 9 * 4_096 - ADDRESSES_PER_OWNER_MAX as u64));
}

#[test]
fn a_name_of_many_labels_takes_one_place() {
    let deep = vec!["a"; 60].join(".");
    let zone = built(vec![host(LOCAL, vec![endpoint(&deep, &[], &["10.32.0.1/12"])], vec![])]);
    assert_eq!(zone.networks["weft"].nested.len(), 1);
    for count in 1..60 {
        let above = format!("{}.weft.local.", vec!["a"; count].join("."));
        assert_eq!(found(&zone, &on("weft"), &above), Err("empty"), "{above}");
    }
    assert_eq!(found(&zone, &on("weft"), "b.a.weft.local."), Err("nothing"));
}

#[test]
fn a_container_is_known_by_its_address_even_without_a_name() {
    let endpoints = vec![endpoint("", &[], &["10.32.0.1/12", "fd00:1::1/64"])];
    let zone = built(vec![host(2, endpoints, vec![record("weft", "db", &["fd00:1::2"])])]);
    let is_container = |text: &str| zone.is_container(text.parse().unwrap());
    assert!(is_container("fd00:1::1"));
    assert!(!is_container("fd00:1::2"), "a name given by hand is no container");
}

#[test]
fn one_host_cannot_fill_the_zone() {
    let many = |n: u8| {
        let one = |k: usize| endpoint(&format!("c{n}-{k}"), &[], &["10.32.0.1/12", "10.32.0.2/12"]);
        host(n, (0..ADDRESSES_PER_OWNER_MAX).map(one).collect(), vec![])
    };
    let zone = built(vec![many(2), host(3, vec![endpoint("web", &[], &["10.32.0.3/12"])], vec![])]);
    assert_eq!(zone.left_out(), (0, ADDRESSES_PER_OWNER_MAX as u64));
    assert_eq!(found(&zone, &on("weft"), "web."), Ok(vec!["10.32.0.3".to_owned()]));
}
