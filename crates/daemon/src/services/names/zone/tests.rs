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
        is_client: false,
    }
}

fn host(n: u8, endpoints: Vec<EndpointInfo>, names: Vec<NameRecord>) -> HostNames {
    HostNames { peer: peer(n), unlinked_since: None, endpoints, names }
}

fn network(name: &str, ranges: &[&str], hosts: Vec<HostNames>) -> (NetworkInfo, Vec<HostNames>) {
    let ranges = ranges.iter().map(|it| it.parse().unwrap()).collect();
    (NetworkInfo { name: name.to_owned(), ranges, is_internal: false }, hosts)
}

/// Two networks with the same IPv4 range.
fn feed_of(weft: Vec<HostNames>, shop: Vec<HostNames>) -> Feed {
    let networks = vec![
        network("weft", &["10.32.0.0/12", "fd00:1::/64"], weft),
        network("shop", &["10.32.0.0/12", "fd00:2::/64"], shop),
    ];
    Feed { local: peer(LOCAL), networks, revision: 7 }
}

/// All endpoints are on `weft`; as in the mesh, each network has all names given by hand.
fn feed(hosts: Vec<HostNames>) -> Feed {
    let named = hosts.iter().map(|host| HostNames { endpoints: Vec::new(), ..host.clone() });
    let named = named.collect();
    feed_of(hosts, named)
}

fn built_of(weft: Vec<HostNames>, shop: Vec<HostNames>) -> Zone {
    Zone::build(Instant::now(), &name("weft.local."), &feed_of(weft, shop))
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
fn containers_of_two_networks_may_have_the_same_name_and_the_same_address() {
    let both = ["10.32.0.1/12"];
    let weft = vec![host(LOCAL, vec![endpoint("web", &["www"], &both)], vec![])];
    let shop = vec![
        host(LOCAL, vec![endpoint("web", &[], &both), endpoint("till", &[], &both)], vec![]),
        host(2, vec![endpoint("web", &[], &["10.32.0.2/12", "fd00:2::2/64"])], vec![]),
    ];
    let zone = built_of(weft, shop);
    let (on_weft, on_shop) = (on("weft"), on("shop"));
    let one = || Ok(vec!["10.32.0.1".to_owned()]);
    let all = || Ok(["10.32.0.1", "10.32.0.2", "fd00:2::2"].map(str::to_owned).to_vec());
    for text in ["web.", "web.weft.local.", "web.weft.weft.local."] {
        assert_eq!(found(&zone, &on_weft, text), one(), "{text}");
    }
    for text in ["web.", "web.weft.local.", "web.shop.weft.local."] {
        assert_eq!(found(&zone, &on_shop, text), all(), "{text}");
    }
    for text in ["web.weft.weft.local.", "www.weft.local.", "weft.weft.local."] {
        assert_eq!(found(&zone, &on_shop, text), Err("nothing"), "{text}");
    }
    assert_eq!(found(&zone, &on_weft, "till.shop.weft.local."), Err("nothing"));
    assert_eq!(found(&zone, &Scope::Host, "web."), one());
    assert_eq!(found(&zone, &Scope::Host, "web.weft.weft.local."), one());
    assert_eq!(found(&zone, &Scope::Host, "web.shop.weft.local."), all());

    let names = |texts: &[&str]| Reverse::Names(texts.iter().map(|it| name(it)).collect());
    let at = |scope: &Scope, net: &str| zone.find_reverse(scope, net.parse().unwrap());
    let of_shop = ["till.shop.weft.local.", "web.shop.weft.local."];
    let of_weft = ["web.weft.local.", "www.weft.local."];
    assert_eq!(at(&on_weft, "10.32.0.1/32"), names(&of_weft));
    assert_eq!(at(&on_shop, "10.32.0.1/32"), names(&of_shop));
    assert_eq!(at(&Scope::Host, "10.32.0.1/32"), names(&[of_shop, of_weft].concat()));
    assert_eq!(at(&on_weft, "10.32.0.2/32"), Reverse::Nothing);
    // Ranges of another network are others'.
    assert_eq!(at(&on_weft, "fd00:2::2/128"), Reverse::Foreign);
    assert_eq!(at(&on_weft, "fd00:2::/64"), Reverse::Foreign);
    assert_eq!(at(&Scope::Host, "fd00:2::2/128"), names(&["web.shop.weft.local."]));
    assert_eq!(at(&Scope::Host, "fd00:2::/64"), Reverse::Empty);
    assert_eq!(zone.list(&Scope::Host, Some([10, 32, 0, 1].into())).len(), 4);
    assert_eq!(zone.list(&on_shop, Some([10, 32, 0, 1].into())).len(), 2);
    let has = |scope: &Scope, text: &str| zone.has_in_range(scope, text.parse().unwrap());
    assert!(has(&on_shop, "fd00:2::9") && has(&Scope::Host, "fd00:2::9"));
    assert!(!has(&on_weft, "fd00:2::9") && !has(&on_shop, "fd00:1::9"));
}

#[test]
fn a_network_that_ends_takes_its_names_away() {
    let names = || vec![record("shop", "db", &["10.32.0.9"])];
    let of = |name: &str| host(LOCAL, vec![endpoint(name, &[], &["10.32.0.1/12"])], names());
    let mut feed = feed_of(vec![of("web")], vec![of("till")]);
    let build = |feed: &Feed| Zone::build(Instant::now(), &name("weft.local."), feed);
    let zone = build(&feed);
    let (full, given) = ("till.shop.weft.local.", "db.shop.weft.local.");
    assert!(found(&zone, &Scope::Host, full).is_ok() && found(&zone, &on("shop"), given).is_ok());
    assert!(zone.has_network("shop") && zone.asks_others(&on("shop")));
    feed.networks.truncate(1);
    let zone = build(&feed);
    for text in [full, given, "till.weft.local."] {
        for scope in [Scope::Host, on("shop"), on("weft")] {
            assert_eq!(found(&zone, &scope, text), Err("nothing"), "{text}");
        }
    }
    assert_eq!(zone.list(&Scope::Host, None).len(), 1);
    let reverse = zone.find_reverse(&on("shop"), "10.32.0.1/32".parse().unwrap());
    assert_eq!(reverse, Reverse::Foreign);
    assert!(!zone.has_network("shop") && zone.has_network("weft"));
    assert!(!zone.asks_others(&on("shop")) && zone.asks_others(&on("weft")));
}

#[test]
fn an_internal_network_asks_nobody() {
    let mut feed = feed_of(vec![], vec![]);
    feed.networks[1].0.is_internal = true;
    let zone = Zone::build(Instant::now(), &name("weft.local."), &feed);
    let asks = [Scope::Host, on("weft"), on("shop")].map(|scope| zone.asks_others(&scope));
    assert_eq!(asks, [true, true, false]);
}

#[test]
fn limits_hold_over_all_networks_together_and_a_name_given_by_hand_counts_once() {
    let half = ADDRESSES_PER_OWNER_MAX / 2;
    let many = |n: u8, count: usize| {
        let one = |k: usize| endpoint(&format!("c{k}"), &[], &["10.32.0.1/12"]);
        host(n, (0..count).map(one).collect(), vec![])
    };
    let mut weft = many(2, half);
    weft.names = vec![record("shop", "db", &["10.32.0.5"]), record("weft", "a b", &["10.32.0.6"])];
    let mut shop = many(2, half + 10);
    shop.names = weft.names.clone();
    let other = host(3, vec![endpoint("web", &[], &["10.32.0.3/12"])], vec![]);
    let zone = built_of(vec![weft], vec![shop, other]);
    // Of the two names, one is on `shop`, where there is no more room; the other is unfit.
    assert_eq!(zone.left_out(), (1, 12));
    assert_eq!(zone.list(&on("weft"), None).len(), half);
    assert_eq!(zone.list(&on("shop"), None).len(), half);
    assert_eq!(found(&zone, &on("shop"), "web."), Ok(vec!["10.32.0.3".to_owned()]));
}

#[test]
fn limits_in_all_hold_over_all_networks_together() {
    let full = ADDRESSES_MAX / ADDRESSES_PER_OWNER_MAX;
    let many = |n: u8| {
        let one = |k: usize| endpoint(&format!("c{n}-{k}"), &[], &["10.32.0.1/12"]);
        host(n, (0..ADDRESSES_PER_OWNER_MAX).map(one).collect(), vec![])
    };
    let hosts = |from: usize, to: usize| (from..to).map(|n| many(n as u8)).collect::<Vec<_>>();
    let zone = built_of(hosts(0, full / 2), hosts(full / 2, full + 1));
    assert_eq!(zone.left_out(), (0, ADDRESSES_PER_OWNER_MAX as u64));
}

#[test]
fn each_reverse_name_leads_back_to_its_address() {
    let texts = ["web", "shop", "weft", "a.shop", "a.weft", "a.b", "shop.weft"];
    let here = |third: u8| {
        let one =
            |(n, text): (usize, &&str)| endpoint(text, &[], &[&format!("10.32.{third}.{n}/12")]);
        vec![host(LOCAL, texts.iter().enumerate().map(one).collect(), vec![])]
    };
    let zone = built_of(here(1), here(2));
    for (scope, thirds) in [(on("weft"), &[1_u8][..]), (on("shop"), &[2]), (Scope::Host, &[1, 2])] {
        for third in thirds {
            for n in 0..texts.len() {
                let address = format!("10.32.{third}.{n}");
                let prefix = format!("{address}/32").parse().unwrap();
                let Reverse::Names(names) = zone.find_reverse(&scope, prefix) else { panic!() };
                let [full] = names.as_slice() else { panic!("{names:?}") };
                let back = found(&zone, &scope, &full.to_ascii());
                assert_eq!(back, Ok(vec![address]), "{full} in {scope:?}");
            }
        }
    }
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
fn a_pod_has_its_aliases_in_dns_and_its_name_for_people_is_not_counted() {
    let pod = endpoint("shop/web", &["web.shop", "web"], &["10.32.0.1/12"]);
    let zone = built(vec![host(LOCAL, vec![pod], vec![])]);
    assert_eq!(zone.left_out(), (0, 0));
    let weft = on("weft");
    for name in ["web.", "web.shop.weft.local."] {
        assert_eq!(found(&zone, &weft, name), Ok(vec!["10.32.0.1".to_owned()]), "{name}");
    }
    let alone = endpoint("shop/web", &[], &["10.32.0.1/12"]);
    assert_eq!(built(vec![host(LOCAL, vec![alone], vec![])]).left_out(), (1, 0));
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
    // If a text could mean a name with dots or one on a network, the host gets the latter.
    assert_eq!(found(&zone, &Scope::Host, "db.shop.weft.local."), Ok(vec!["10.32.0.3".to_owned()]));
    let full = "db.shop.weft.weft.local.";
    assert_eq!(found(&zone, &Scope::Host, full), Ok(vec!["10.32.0.1".to_owned()]));
}

#[test]
fn a_name_on_a_network_comes_before_a_name_with_dots() {
    let at = |name: &str, n: u8| endpoint(name, &[], &[&format!("10.32.0.{n}/12")]);
    let weft = vec![at("db.shop", 1), at("a.weft", 2), at("a", 3), at("b.weft", 4), at("shop", 5)];
    let shop = vec![at("db.shop", 6), at("x.shop", 7), at("x", 8)];
    let zone = built_of(vec![host(LOCAL, weft, vec![])], vec![host(LOCAL, shop, vec![])]);
    let is = |scope: &Scope, text: &str, n: u8| {
        let text = format!("{text}.weft.local.");
        assert_eq!(found(&zone, scope, &text), Ok(vec![format!("10.32.0.{n}")]), "{text}");
    };
    let (weft, shop) = (on("weft"), on("shop"));
    is(&weft, "a.weft", 3);
    is(&weft, "a.weft.weft", 2);
    is(&weft, "shop", 5);
    is(&shop, "x.shop", 8);
    is(&shop, "x.shop.shop", 7);
    // A client's own network may have only the name with dots.
    is(&weft, "b.weft", 4);
    is(&weft, "db.shop", 1);
    is(&shop, "db.shop", 6);
    // The host is not led from `shop` to `weft`.
    assert_eq!(found(&zone, &Scope::Host, "db.shop.weft.local."), Err("nothing"));
    is(&Scope::Host, "db.shop.shop", 6);
    is(&Scope::Host, "db.shop.weft", 1);
    is(&Scope::Host, "shop", 5);
    assert_eq!(found(&zone, &shop, "shop.weft.local."), Err("empty"));
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
fn a_host_that_died_gives_way_on_each_network_by_itself() {
    let now = Instant::now();
    let web = |n: u8| vec![endpoint("web", &[], &[&format!("10.32.0.{n}/12")])];
    let dead = |n: u8| HostNames { unlinked_since: Some(now), ..host(3, web(n), vec![]) };
    // On `weft` another host has the name.
    let feed = feed_of(vec![host(2, web(2), vec![]), dead(3)], vec![dead(4)]);
    let at = |seconds| Zone::build(now + Duration::from_secs(seconds), &name("weft.local."), &feed);
    let zone = at(1);
    assert_eq!(found(&zone, &on("weft"), "web."), Ok(vec!["10.32.0.2".to_owned()]));
    assert_eq!(found(&zone, &on("shop"), "web."), Ok(vec!["10.32.0.4".to_owned()]));
    assert_eq!(zone.next_expiry(), Some(now + Duration::from_secs(NAME_GRACE_S)));
    let zone = at(NAME_GRACE_S);
    assert_eq!(found(&zone, &on("weft"), "web."), Ok(vec!["10.32.0.2".to_owned()]));
    assert_eq!(found(&zone, &on("shop"), "web.weft.local."), Err("nothing"));
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

#[test]
fn a_client_of_a_gateway_has_a_name_below_a_label_of_its_own() {
    let client = |name: &str, addresses: &[&str]| NameRecord {
        is_client: true,
        ..record("weft", name, addresses)
    };
    let alice = client("alice.clients", &["10.32.0.9", "fd00:1::9"]);
    // Nobody gives an address outside of the network a name by saying that it is a client's.
    let names = vec![alice, client("eve.clients", &["192.0.2.1"])];
    let zone = built(vec![host(2, vec![endpoint("web", &[], &["10.32.0.1/12"])], names)]);
    let addresses = Ok(vec!["10.32.0.9".to_owned(), "fd00:1::9".to_owned()]);
    for text in ["alice.clients.weft.local.", "Alice.Clients.weft.weft.local."] {
        assert_eq!(found(&zone, &on("weft"), text), addresses, "{text}");
    }
    assert_eq!(found(&zone, &on("weft"), "clients.weft.local."), Err("empty"));
    let names = |text: &str| zone.find_reverse(&on("weft"), text.parse().unwrap());
    assert_eq!(names("10.32.0.9/32"), Reverse::Names(vec![name("alice.clients.weft.local.")]));
    assert_eq!(names("192.0.2.1/32"), Reverse::Foreign);
    let sources: Vec<Source> = zone
        .list(&Scope::Host, None)
        .iter()
        .flat_map(|(_, _, entry)| entry.held().iter().map(|held| held.source))
        .collect();
    assert_eq!(sources.iter().filter(|source| **source == Source::Client).count(), 3);
}
