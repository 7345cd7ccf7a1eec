//! Networks besides `weft`: created, joined, told, in clash, and gone with the last host that holds them.
#![allow(clippy::unwrap_used, clippy::print_stderr)]

mod common;
mod net;

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use common::{
    config, drain, drain_with, founder, hold, holding, id, link, link_older, list, on, restored,
    saved, sent, shop, with_mtu,
};
use net::{Net, RANGE, for_seeds, network_box};
use weft_crypto::PeerId;
use weft_mesh::{
    Change, FEATURE_BARRIER, FEATURE_NETWORKS, FEATURE_SERVICES, Holding, Mesh, MeshError, Message,
    NameRecord, Network, NetworkDefinition, NetworkError, NetworkId, NetworkOptions, NetworkStatus,
    Output, State, Vni, limits,
};

/// The messages to a peer about networks besides `weft`.
fn told(outputs: &[Output], to: u8) -> Vec<Message> {
    let about = |it: &Message| matches!(it, Message::Networks { .. } | Message::On { .. });
    sent(outputs, to).into_iter().filter(about).collect()
}

/// As a list has them that hold these networks and have no ranges of them.
fn plain(networks: &[NetworkDefinition]) -> Message {
    list(networks.iter().cloned().map(holding).collect())
}

fn of(mesh: &Mesh, name: &str) -> Vec<NetworkStatus> {
    mesh.networks().into_iter().filter(|it| it.definition.name == name).collect()
}

fn endpoints(version: u64, full: bool, number: u8) -> Message {
    let (more, add, remove) = (false, vec![network_box(7, number)], Vec::new());
    Message::Endpoints { version, full, more, add, remove }
}

#[test]
fn a_network_that_both_hosts_hold_is_shared_and_carries_endpoints_both_ways() {
    let now = Instant::now();
    let mut mesh = founder(now, RANGE);
    mesh.create_network(now, shop()).unwrap();
    let vni = shop().vni;
    mesh.set_local_endpoint(now, vni, network_box(5, 1)).unwrap();
    drain(&mut mesh);
    link(&mut mesh, now, 7);
    assert_eq!(told(&drain(&mut mesh), 7), [plain(&[shop()])], "no endpoint yet");

    // Messages that come before the peer has said that it holds the network count for nothing.
    mesh.handle_message(now, id(7), on(vni, endpoints(1, true, 1))).unwrap();
    assert_eq!(mesh.endpoints(vni).len(), 1);
    drain(&mut mesh);
    hold(&mut mesh, now, 7, &[shop()]);
    let outputs = drain(&mut mesh);
    assert!(outputs.contains(&Output::NetworkPeers { vni, peers: vec![id(7)] }), "{outputs:?}");
    let own = Message::Endpoints {
        version: 1,
        full: true,
        more: false,
        add: vec![network_box(5, 1)],
        remove: Vec::new(),
    };
    assert_eq!(told(&outputs, 7), [on(vni, own)]);
    mesh.handle_message(now, id(7), on(vni, endpoints(1, true, 1))).unwrap();
    let add = vec![(network_box(7, 1), id(7))];
    assert_eq!(drain(&mut mesh), [Output::Endpoints { vni, add, remove: Vec::new() }]);
    assert_eq!(mesh.endpoints(vni).len(), 2);
    assert_eq!(mesh.endpoints(Vni::WEFT), []);

    // A missed change leads to a question about that network alone.
    mesh.handle_message(now, id(7), on(vni, endpoints(3, false, 2))).unwrap();
    assert_eq!(told(&drain(&mut mesh), 7), [on(vni, Message::EndpointsRequest)]);

    // The peer lets go of it.
    hold(&mut mesh, now, 7, &[]);
    let remove = vec![(network_box(7, 1).mac, id(7))];
    let outputs = drain(&mut mesh);
    assert!(outputs.contains(&Output::Endpoints { vni, add: Vec::new(), remove }), "{outputs:?}");
    assert!(outputs.contains(&Output::NetworkPeers { vni, peers: Vec::new() }));
    mesh.set_local_endpoint(now, vni, network_box(5, 2)).unwrap();
    assert_eq!(told(&drain(&mut mesh), 7), []);
}

/// The kinds of messages to a peer about networks besides `weft`, as they are on the wire.
fn kinds(outputs: &[Output], to: u8) -> Vec<String> {
    let kind = |message: &Message| {
        let value = serde_json::to_value(message).unwrap();
        let kind = |value: &serde_json::Value| value["kind"].as_str().unwrap().to_owned();
        if value["kind"] == "on" { format!("on {}", kind(&value["message"])) } else { kind(&value) }
    };
    told(outputs, to).iter().map(kind).collect()
}

#[test]
fn a_host_says_its_networks_first_on_a_link_and_then_ranges_before_endpoints() {
    let mut now = Instant::now();
    let mut mesh = founder(now, RANGE);
    let lan = net::lan();
    mesh.create_network(now, lan.clone()).unwrap();
    now += Duration::from_millis(limits::RANGE_FOUND_SETTLE_MS);
    mesh.handle_timeout(now);
    mesh.allocate(now, lan.vni, "box1");
    mesh.set_local_endpoint(now, lan.vni, network_box(5, 1)).unwrap();
    drain(&mut mesh);
    link(&mut mesh, now, 7);
    hold(&mut mesh, now, 7, std::slice::from_ref(&lan));
    let greeting = ["networks", "on ranges", "on usage", "on claims_held", "on endpoints"];
    assert_eq!(kinds(&drain(&mut mesh), 7), greeting);

    // What the host had still to say when the link was replaced is not said on the new one.
    mesh.set_local_endpoint(now, lan.vni, network_box(5, 2)).unwrap();
    link(&mut mesh, now, 7);
    hold(&mut mesh, now, 7, std::slice::from_ref(&lan));
    assert_eq!(kinds(&drain(&mut mesh), 7), greeting);

    // Nor is what waited for the state to be saved.
    let request = Message::RangeRequest { request: 1, within: lan.range.unwrap() };
    mesh.handle_message(now, id(7), on(lan.vni, request)).unwrap();
    assert!(matches!(mesh.poll_output(), Some(Output::Persist(_))));
    mesh.handle_saved(now, Err("no space left".to_owned()));
    assert_eq!(told(&drain(&mut mesh), 7), [], "the grant waits");
    now += Duration::from_millis(limits::SAVE_RETRY_MAX_MS);
    mesh.handle_timeout(now);
    link(&mut mesh, now, 7);
    let mut outputs = drain_with(&mut mesh, now, false);
    hold(&mut mesh, now, 7, std::slice::from_ref(&lan));
    outputs.extend(drain(&mut mesh));
    let kinds = kinds(&outputs, 7);
    assert_eq!(kinds[0], "networks", "{kinds:?}");
    assert!(kinds.contains(&"on range_grant".to_owned()), "{kinds:?}");
}

#[test]
fn networks_have_the_same_addresses_without_conflict_and_each_its_own_key() {
    let now = Instant::now();
    let mut mesh = founder(now, RANGE);
    link(&mut mesh, now, 7);
    let web = NetworkDefinition::new("web");
    for network in [shop(), web.clone()] {
        mesh.create_network(now, network.clone()).unwrap();
        mesh.set_local_endpoint(now, network.vni, network_box(5, 1)).unwrap();
    }
    mesh.set_local_endpoint(now, Vni::WEFT, network_box(5, 1)).unwrap();
    hold(&mut mesh, now, 7, &[shop(), web.clone()]);
    mesh.handle_message(now, id(7), endpoints(1, true, 1)).unwrap();
    for vni in [shop().vni, web.vni] {
        mesh.handle_message(now, id(7), on(vni, endpoints(1, true, 1))).unwrap();
    }
    let outputs = drain(&mut mesh);
    assert_eq!(mesh.conflicts(), []);
    let added = outputs.iter().filter_map(|output| match output {
        Output::Endpoints { vni, add, .. } => Some((*vni, add.clone())),
        _ => None,
    });
    let added: Vec<_> = added.collect();
    let all = [Vni::WEFT, shop().vni, web.vni];
    let sorted: BTreeSet<Vni> = added.iter().map(|(vni, _)| *vni).collect();
    assert_eq!((sorted, added.len()), (all.into(), 3));
    let one = vec![(network_box(7, 1), id(7))];
    assert!(added.iter().all(|(_, add)| *add == one), "{added:?}");
    mesh.handle_link_down(now, id(7));
    mesh.handle_timeout(now + Duration::from_secs(limits::ENDPOINT_GRACE_S));
    let gone = drain(&mut mesh).into_iter().filter_map(|output| match output {
        Output::Endpoints { vni, remove, .. } => Some((vni, remove)),
        _ => None,
    });
    let gone: Vec<_> = gone.collect();
    let sorted: BTreeSet<Vni> = gone.iter().map(|(vni, _)| *vni).collect();
    assert_eq!((sorted, gone.len()), (all.into(), 3));
    let one = vec![(network_box(7, 1).mac, id(7))];
    assert!(gone.iter().all(|(_, remove)| *remove == one), "{gone:?}");
}

#[test]
fn a_network_known_from_others_is_joined_by_name_and_goes_after_its_last_container() {
    let now = Instant::now();
    let mut mesh = founder(now, RANGE);
    let unknown = mesh.join_network(now, "shop").unwrap_err();
    assert!(unknown.to_string().contains("weft network create shop"), "{unknown}");
    assert_eq!(mesh.join_network(now, "weft"), Ok(Vni::WEFT));
    link(&mut mesh, now, 7);
    hold(&mut mesh, now, 7, &[with_mtu(1_400)]);
    let status = of(&mesh, "shop");
    assert_eq!((status[0].here, &status[0].hosts), (false, &vec![id(7)]));
    drain(&mut mesh);
    let vni = mesh.join_network(now, "shop").unwrap();
    let outputs = drain(&mut mesh);
    assert!(matches!(outputs[0], Output::Persist(_)), "{outputs:?}");
    assert_eq!(told(&outputs, 7)[0], plain(&[with_mtu(1_400)]), "as the other host defines it");
    mesh.set_local_endpoint(now, vni, network_box(5, 1)).unwrap();
    let used = mesh.remove_network(now, "shop").unwrap_err();
    assert_eq!(used, NetworkError::InUse { name: "shop".into(), containers: 1 });

    let later = now + Duration::from_secs(3_600);
    mesh.handle_timeout(later);
    assert!(of(&mesh, "shop")[0].here, "a container is on it");
    mesh.remove_local_endpoint(later, vni, network_box(5, 1).mac);
    let idle = later + Duration::from_secs(limits::NETWORK_IDLE_S);
    assert!(mesh.poll_timeout().unwrap() <= idle);
    mesh.handle_timeout(idle - Duration::from_secs(1));
    assert!(of(&mesh, "shop")[0].here, "a container may be back in a moment");
    drain(&mut mesh);
    mesh.handle_timeout(idle);
    let outputs = drain(&mut mesh);
    let ended = Change::NetworkEnded { name: "shop".into(), vni };
    assert!(outputs.contains(&Output::Changed(ended)), "{outputs:?}");
    assert_eq!(told(&outputs, 7), [plain(&[])]);
    assert!(!of(&mesh, "shop")[0].here);
    hold(&mut mesh, idle, 7, &[]);
    assert_eq!(of(&mesh, "shop"), [], "it was the last one that held it");
}

#[test]
fn a_created_network_outlives_its_containers_and_restarts_but_not_its_removal() {
    let mut now = Instant::now();
    let mut mesh = founder(now, RANGE);
    mesh.create_network(now, shop()).unwrap();
    mesh.create_network(now, shop()).unwrap();
    let mut mesh = restored(now, RANGE, &saved(&mut mesh));
    now += Duration::from_secs(3 * limits::NETWORK_IDLE_S);
    mesh.handle_timeout(now);
    let status = of(&mesh, "shop");
    assert_eq!((status[0].here, status[0].created), (true, true));
    mesh.remove_network(now, "shop").unwrap();
    assert_eq!(of(&mesh, "shop"), []);
    let again = mesh.remove_network(now, "shop").unwrap_err();
    assert_eq!(again, NetworkError::Unknown { name: "shop".into() });
    assert_eq!(mesh.remove_network(now, "weft"), Err(NetworkError::Weft));
}

#[test]
fn a_creation_that_would_clash_is_refused_with_the_remedy() {
    let now = Instant::now();
    let mut mesh = founder(now, RANGE);
    let weft = NetworkDefinition { vni: Vni(9), ..NetworkDefinition::new("weft") };
    assert_eq!(mesh.create_network(now, weft), Err(NetworkError::Weft));
    let unfit = mesh.create_network(now, NetworkDefinition::new("Shop")).unwrap_err();
    assert!(unfit.to_string().contains("lower-case"), "{unfit}");
    mesh.create_network(now, shop()).unwrap();
    let exists = mesh.create_network(now, with_mtu(1_400)).unwrap_err();
    assert_eq!(exists, NetworkError::Exists { name: "shop".into() });
    let web = NetworkDefinition { vni: shop().vni, ..NetworkDefinition::new("web") };
    let taken = mesh.create_network(now, web).unwrap_err();
    assert!(taken.to_string().contains("another --vni"), "{taken}");

    link(&mut mesh, now, 7);
    link(&mut mesh, now, 8);
    let theirs = NetworkDefinition { vni: Vni(77), ..NetworkDefinition::new("db") };
    hold(&mut mesh, now, 7, std::slice::from_ref(&theirs));
    let ours = NetworkDefinition::new("db");
    let clash = mesh.create_network(now, ours.clone()).unwrap_err().to_string();
    assert!(clash.contains("host7") && clash.contains("VNI is 77 there"), "{clash}");
    hold(&mut mesh, now, 8, std::slice::from_ref(&ours));
    let ambiguous = mesh.join_network(now, "db").unwrap_err().to_string();
    assert!(ambiguous.contains("host7") && ambiguous.contains("host8"), "{ambiguous}");
}

#[test]
fn as_many_networks_as_there_may_be_are_told_in_parts_and_taken() {
    let now = Instant::now();
    let (mut mesh, mut other) = (founder(now, RANGE), founder(now, RANGE));
    let many = |n: usize| NetworkDefinition {
        range: Some("255.255.128.0/17".parse().unwrap()),
        range6: Some("fd00:1234:5678:9abc::/64".parse().unwrap()),
        options: NetworkOptions {
            internal: true,
            mtu: Some(65_535),
            isolated: true,
            ..NetworkOptions::default()
        },
        ..NetworkDefinition::new(format!("{}{n:03}", "n".repeat(60)))
    };
    for n in 0..limits::NETWORKS_MAX {
        let plain = NetworkDefinition { range: None, range6: None, ..many(n) };
        mesh.create_network(now, plain).unwrap();
    }
    assert_eq!(mesh.create_network(now, shop()), Err(NetworkError::TooMany));
    link(&mut mesh, now, 7);
    link(&mut other, now, 7);
    let parts = told(&drain(&mut mesh), 7);
    assert_eq!(parts.len(), limits::NETWORKS_MAX.div_ceil(limits::NETWORKS_PER_MESSAGE_MAX));
    for part in parts {
        other.handle_message(now, id(7), part).unwrap();
    }
    assert_eq!(other.networks().len(), 1 + limits::NETWORKS_MAX);
    let range6 = many(0).range6.unwrap();
    let founding = Some(Network { id: NetworkId([255; 16]), range6 });
    let full =
        |n| Holding { definition: many(n), founding, used: true, resting: true, unsure: true };
    let networks: Vec<_> = (0..limits::NETWORKS_PER_MESSAGE_MAX).map(full).collect();
    let bytes = serde_json::to_vec(&list(networks)).unwrap().len();
    assert!(bytes <= limits::MESSAGE_BYTES_MAX, "{bytes} bytes");
}

#[test]
fn a_saved_state_with_more_networks_than_there_may_be_is_refused() {
    let now = Instant::now();
    let mut mesh = founder(now, RANGE);
    let numbered = |n: usize| NetworkDefinition::new(format!("n{n}"));
    (0..limits::NETWORKS_MAX).for_each(|n| mesh.create_network(now, numbered(n)).unwrap());
    let most = saved(&mut mesh);
    assert_eq!(restored(now, RANGE, &most).held_networks().count(), limits::NETWORKS_MAX);
    let mut state: serde_json::Value = serde_json::from_str(&most).unwrap();
    let definition = numbered(limits::NETWORKS_MAX);
    let vni = definition.vni.0.to_string();
    state["networks"][vni] = serde_json::json!({ "definition": definition, "created": true });
    let state: State = serde_json::from_value(state).unwrap();
    let error = Mesh::new(now, config(RANGE), Some(state), [2; 32]).unwrap_err();
    assert!(matches!(error, MeshError::SavedDamaged(why) if why.contains("too many networks")));
}

#[test]
fn lists_that_no_correct_host_sends_are_refused_and_change_nothing() {
    let now = Instant::now();
    let mut mesh = founder(now, RANGE);
    link(&mut mesh, now, 7);
    hold(&mut mesh, now, 7, &[shop()]);
    let mut refuse = |networks: Vec<NetworkDefinition>| {
        let error = mesh.handle_message(now, id(7), plain(&networks)).unwrap_err();
        assert_eq!(of(&mesh, "shop").len(), 1, "{error}");
        error
    };
    let web = NetworkDefinition { vni: shop().vni, ..NetworkDefinition::new("web") };
    let twice = [vec![shop(), shop()], vec![shop(), with_mtu(1_400)], vec![shop(), web]];
    for networks in twice {
        assert!(matches!(refuse(networks), MeshError::Malformed { .. }));
    }
    let unfit = NetworkDefinition { vni: Vni::WEFT, ..shop() };
    assert!(matches!(refuse(vec![unfit]), MeshError::Malformed { .. }));
    let many = |from: usize| {
        let all = from..from + limits::NETWORKS_PER_MESSAGE_MAX;
        all.map(|n| NetworkDefinition::new(format!("n{n}"))).collect::<Vec<_>>()
    };
    let one_more = [many(0), vec![shop()]].concat();
    assert!(matches!(refuse(one_more), MeshError::Malformed { .. }));
    let mut results = (0..5).map(|part| {
        let networks = many(part * limits::NETWORKS_PER_MESSAGE_MAX);
        let (first, networks) = (part == 0, networks.into_iter().map(holding).collect());
        mesh.handle_message(
            now,
            id(7),
            Message::Networks { first, more: true, networks, heard: Vec::new() },
        )
    });
    assert!(results.by_ref().take(3).all(|result| result.is_ok()));
    assert!(matches!(results.next().unwrap(), Err(MeshError::TooMany { .. })));
    for inner in [Message::KnownAsked, on(shop().vni, Message::EndpointsRequest)] {
        let error = mesh.handle_message(now, id(7), on(shop().vni, inner)).unwrap_err();
        assert!(matches!(error, MeshError::Malformed { .. }));
    }
    let weft = mesh.handle_message(now, id(7), on(Vni::WEFT, Message::EndpointsRequest));
    assert!(matches!(weft, Err(MeshError::Malformed { .. })));
}

/// A host of an earlier release: it has no features, and knows `weft` alone.
#[test]
fn an_older_host_is_told_nothing_of_networks() {
    let now = Instant::now();
    let mut mesh = founder(now, RANGE);
    assert_eq!(mesh.hello().features, [FEATURE_NETWORKS, FEATURE_SERVICES, FEATURE_BARRIER]);
    mesh.create_network(now, shop()).unwrap();
    link_older(&mut mesh, now, 7);
    mesh.set_local_endpoint(now, shop().vni, network_box(5, 1)).unwrap();
    mesh.remove_local_endpoint(now, shop().vni, network_box(5, 1).mac);
    mesh.remove_network(now, "shop").unwrap();
    assert_eq!(told(&drain(&mut mesh), 7), []);
}

#[test]
fn messages_of_weft_are_what_they_were_and_those_of_others_say_their_vni() {
    let about_weft = serde_json::to_string(&Message::EndpointsRequest).unwrap();
    assert_eq!(about_weft, r#"{"kind":"endpoints_request"}"#);
    let about_shop = on(Vni(5), Message::EndpointsRequest);
    let text = serde_json::to_string(&about_shop).unwrap();
    assert_eq!(text, r#"{"kind":"on","vni":5,"message":{"kind":"endpoints_request"}}"#);
    assert_eq!(serde_json::from_str::<Message>(&text).unwrap(), about_shop);
    let text = serde_json::to_string(&plain(&[with_mtu(1_400)])).unwrap();
    let network = r#"{"name":"shop","vni":9277441,"options":{"mtu":1400}}"#;
    let whole =
        format!(r#"{{"kind":"networks","first":true,"more":false,"networks":[{network}]}}"#);
    assert_eq!(text, whole);
}

#[test]
fn names_of_a_network_are_those_of_hosts_that_share_it() {
    let now = Instant::now();
    let mut mesh = founder(now, RANGE);
    let revision = mesh.names_revision();
    mesh.create_network(now, shop()).unwrap();
    assert!(mesh.names_revision() > revision, "there is a zone of it now");
    let vni = shop().vni;
    let name = |name: &str, network: &str| NameRecord {
        name: name.into(),
        network: network.into(),
        addresses: vec!["192.0.2.1".parse().unwrap()],
        ports: Vec::new(),
        is_client: false,
    };
    let revision = mesh.names_revision();
    mesh.set_local_endpoint(now, vni, network_box(5, 1)).unwrap();
    mesh.set_local_names(vec![name("a", "weft"), name("b", "shop")]).unwrap();
    for (peer, network) in [(7, shop()), (8, with_mtu(1_400))] {
        link(&mut mesh, now, peer);
        hold(&mut mesh, now, peer, &[network]);
        let names = vec![name("c", "shop"), name("d", "web")];
        let names = Message::Names { first: true, more: false, names };
        mesh.handle_message(now, id(peer), names).unwrap();
        mesh.handle_message(now, id(peer), endpoints(1, true, 2)).unwrap();
        mesh.handle_message(now, id(peer), on(vni, endpoints(1, true, 1))).unwrap();
    }
    assert!(mesh.names_revision() > revision);
    let on_shop = mesh.host_names_on(vni);
    let seen = on_shop.iter().map(|host| {
        let names: Vec<&str> = host.names.iter().map(|record| record.name.as_str()).collect();
        (host.peer, host.endpoints.len(), names)
    });
    assert_eq!(seen.collect::<Vec<_>>(), [(id(5), 1, vec!["b"]), (id(7), 1, vec!["c"])]);
    assert_eq!(mesh.host_names_on(Vni(9)), []);
    let on_weft = mesh.host_names_on(Vni::WEFT);
    assert_eq!(on_weft.iter().map(|host| host.endpoints.len()).collect::<Vec<_>>(), [0, 1, 1]);
    let revision = mesh.names_revision();
    mesh.remove_local_endpoint(now, vni, network_box(5, 1).mac);
    mesh.remove_network(now, "shop").unwrap();
    assert!(mesh.names_revision() > revision);
}

#[test]
fn hosts_that_could_not_talk_agree_on_a_network_of_one_name() {
    let mut net = Net::linked_hosts(1, 3, RANGE);
    net.part(1);
    for host in 0..2 {
        net.create(host, shop()).unwrap();
        net.attach_to(host, "shop", 1).unwrap();
    }
    net.blocked.clear();
    net.settle(130);
    for (host, other) in [(0, 1), (1, 0)] {
        let status = &net.statuses(host)[0];
        assert_eq!((status.hosts.as_slice(), status.clashes.len()), (&[net.id(other)][..], 0));
        let key = (shop().vni, network_box(other, 1).mac);
        assert_eq!(net.hosts[host].switch[&key].0, net.id(other));
        assert_eq!(net.hosts[host].broadcasts[&shop().vni], [net.id(other)].into());
    }
    assert_eq!(net.hosts[2].switch.len(), 0, "it does not hold the network");
}

#[test]
fn a_clash_is_named_on_both_sides_and_the_network_carries_nothing_between_the_two() {
    let web = NetworkDefinition { vni: shop().vni, ..NetworkDefinition::new("web") };
    for theirs in [with_mtu(1_400), NetworkDefinition { vni: Vni(9), ..shop() }, web] {
        let mut net = Net::linked_hosts(2, 3, RANGE);
        net.part(1);
        net.create(0, shop()).unwrap();
        net.attach_to(0, "shop", 1).unwrap();
        net.settle(1);
        net.attach_to(2, "shop", 1).unwrap();
        net.create(1, theirs.clone()).unwrap();
        net.attach_to(1, &theirs.name, 1).unwrap();
        net.blocked.clear();
        net.settle(130);
        for (host, others) in [(0, vec![1]), (1, vec![0, 2]), (2, vec![1])] {
            let status = net.statuses(host).into_iter().find(|it| it.here).unwrap();
            assert_eq!(status.clashes.len(), others.len(), "h{host}: {status:?}");
            let texts = &net.hosts[host].clashes;
            for other in others {
                let name = format!("h{other} ");
                assert!(texts.iter().any(|text| text.contains(&name)), "h{host}: {texts:?}");
                let of_other = |(peer, _): &(PeerId, _)| *peer == net.id(other);
                assert!(!net.hosts[host].switch.values().any(of_other), "h{host} has h{other}");
            }
        }
        assert_eq!(net.hosts[0].broadcasts[&shop().vni], [net.id(2)].into());
        assert!(!net.hosts[1].broadcasts.values().any(|peers| !peers.is_empty()));
        // Changes are not sent either.
        for (host, name) in [(0, "shop"), (1, &theirs.name)] {
            net.attach_to(host, name, 2).unwrap();
            net.detach_from(host, name, 2);
        }
        net.settle(1);
        assert_eq!(net.spoken, [(0, 2), (2, 0)].into());
        // One side gives way.
        net.detach_from(1, &theirs.name, 1);
        net.remove(1, &theirs.name).unwrap();
        net.settle(2);
        net.attach_to(1, "shop", 1).unwrap();
        net.settle(2);
        for host in 0..3 {
            assert_eq!(net.statuses(host)[0].clashes, [], "h{host}");
            assert_eq!(net.hosts[host].broadcasts[&shop().vni].len(), 2, "h{host}");
            assert_eq!(net.hosts[host].switch.len(), 2, "h{host}");
        }
    }
}

#[test]
fn a_host_that_was_away_does_not_bring_back_what_it_does_not_hold() {
    for restarted in [false, true] {
        let mut net = Net::linked_hosts(3, 3, RANGE);
        net.create(0, shop()).unwrap();
        net.settle(1);
        net.attach_to(1, "shop", 1).unwrap();
        net.settle(1);
        net.detach_from(1, "shop", 1);
        assert!(net.statuses(1)[0].here && net.statuses(2)[0].hosts.len() == 2);
        net.part(1);
        net.part(2);
        if restarted {
            net.crash(1);
            net.start(1);
        }
        net.settle(limits::NETWORK_IDLE_S + 1);
        assert!((1..3).all(|host| !net.statuses(host).iter().any(|it| it.here)));
        net.remove(0, "shop").unwrap();
        net.meet();
        // At once: what a host held without a container would go by itself after a while.
        for host in 0..3 {
            assert_eq!(net.statuses(host), [], "h{host}, restarted: {restarted}");
        }
    }
}

#[test]
fn a_host_that_was_away_with_a_container_still_has_its_network() {
    let mut net = Net::linked_hosts(4, 3, RANGE);
    net.create(0, shop()).unwrap();
    net.settle(1);
    net.attach_to(1, "shop", 1).unwrap();
    net.settle(1);
    net.part(1);
    net.remove(0, "shop").unwrap();
    net.crash(1);
    net.start(1);
    net.settle(limits::NETWORK_IDLE_S + limits::ENDPOINT_GRACE_S);
    assert_eq!(net.statuses(0), [], "its endpoints have expired, and what it holds");
    net.blocked.clear();
    net.settle(130);
    assert_eq!(net.statuses(0)[0].hosts, [net.id(1)]);
    net.attach_to(0, "shop", 1).unwrap();
    net.settle(1);
    assert_eq!(net.hosts[1].switch.len(), 1);
}

/// Definitions of few names and VNIs, so that they clash now and then.
fn random_network(net: &mut Net) -> NetworkDefinition {
    let name = ["shop", "web", "db"][net.below(3)];
    let mut definition = NetworkDefinition::new(name);
    match net.below(8) {
        0 => definition.options.internal = true,
        1 => definition.vni = shop().vni,
        _ => {}
    }
    definition
}

fn random_event(net: &mut Net) {
    let host = net.below(net.hosts.len());
    let name = ["shop", "web", "db"][net.below(3)];
    match net.below(40) {
        0..=15 => drop(net.deliver()),
        16..=19 if net.hosts[host].mesh.is_some() => {
            let definition = random_network(net);
            let _ = net.create(host, definition);
        }
        20..=25 => {
            let number = net.below(3) as u8;
            let _ = net.attach_to(host, name, number);
        }
        26..=28 => {
            let number = net.below(3) as u8;
            net.detach_from(host, name, number);
        }
        29..=30 if net.hosts[host].mesh.is_some() => {
            let _ = net.remove(host, name);
        }
        31..=33 => {
            let ms = net.below(60_000) as u64;
            net.pass(Duration::from_millis(ms));
        }
        34..=35 => net.cut_random(),
        36 => net.crash(host),
        37 => net.hosts[host].full ^= true,
        _ => net.start(host),
    }
}

/// For each pair of hosts and each network: both have the same and exchange it, or differ, say so and exchange nothing.
fn assert_agreed(net: &Net) -> (usize, usize) {
    let (mut shared, mut clashing) = (0, 0);
    let held = |host: usize| net.statuses(host).into_iter().filter(|it| it.here);
    for host in 0..net.hosts.len() {
        for other in (0..net.hosts.len()).filter(|other| *other != host) {
            let theirs: Vec<NetworkStatus> = held(other).collect();
            let mut wanted = BTreeSet::new();
            for ours in held(host) {
                let vni = ours.definition.vni;
                let same = theirs.iter().any(|it| it.definition == ours.definition);
                assert_eq!(
                    ours.hosts.contains(&net.id(other)),
                    same,
                    "h{host}, h{other}: {ours:?}"
                );
                let broadcasts = net.hosts[host].broadcasts.get(&vni);
                let told = broadcasts.is_some_and(|peers| peers.contains(&net.id(other)));
                assert_eq!(told, same, "h{host}, h{other}: broadcasts of {ours:?}");
                let clash = theirs.iter().any(|it| {
                    let (a, b) = (&it.definition, &ours.definition);
                    a != b && (a.name == b.name || a.vni == b.vni)
                });
                let name = format!("h{other} ");
                let named = ours.clashes.iter().any(|clash| clash.to_string().contains(&name));
                assert_eq!(named, clash, "h{host}, h{other}: {:?}", ours.clashes);
                shared += usize::from(same);
                clashing += usize::from(clash);
                let boxes = net.hosts[other].boxes.iter().filter(|_| same);
                let boxes = boxes.filter(|(name, _)| *name == ours.definition.name);
                wanted.extend(boxes.map(|(_, number)| (vni, network_box(other, *number).mac)));
            }
            let has = net.hosts[host].switch.iter().filter(|(_, (peer, _))| *peer == net.id(other));
            let has: BTreeSet<_> = has.map(|(key, _)| *key).collect();
            assert_eq!(has, wanted, "h{host} has of h{other}");
        }
    }
    (shared, clashing)
}

#[test]
fn after_any_events_hosts_that_agree_share_and_others_name_the_clash() {
    let sum = std::cell::Cell::new((0, 0));
    for_seeds(400, |seed| {
        let mut net = Net::new(seed);
        let hosts = 2 + net.below(3);
        net.add(RANGE, &[]);
        for _ in 1..hosts {
            net.add(RANGE, &[0]);
        }
        net.start_all();
        net.settle(5);
        net.crash_one_in = 200;
        for _ in 0..250 {
            random_event(&mut net);
        }
        net.crash_one_in = 0;
        net.hosts.iter_mut().for_each(|host| host.full = false);
        net.start_all();
        net.settle(130);
        let (shared, clashing) = assert_agreed(&net);
        sum.set((sum.get().0 + shared, sum.get().1 + clashing));
    });
    let (shared, clashing) = sum.get();
    eprintln!("shared {shared}, clashing {clashing}");
    assert!(shared.min(clashing) > 0);
}
