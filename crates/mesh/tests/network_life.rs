//! What `docs/design/networks.md` promises of the life of a network: who holds it, who founds its ranges, who is heard.
#![allow(clippy::unwrap_used, clippy::print_stderr)]

mod common;
mod net;

use std::time::{Duration, Instant};

use common::{drain, founder, hold, holding, id, link, on, sent, shop, tell};
use net::{Net, RANGE, lan, network_box};
use weft_mesh::{
    AddressRange, EndpointInfo, Holding, Mac, Mesh, MeshError, Message, Network, NetworkDefinition,
    NetworkError, NetworkId, NetworkOptions, Output, RangeAnnouncement, Vni, limits,
};

fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

fn known(mesh: &Mesh) -> Vec<String> {
    let others = mesh.networks().into_iter().filter(|it| it.definition.vni != Vni::WEFT);
    others.map(|it| it.definition.name).collect()
}

fn founding_of(mesh: &Mesh) -> Option<Network> {
    mesh.ipam_on(lan().vni)?.network
}

#[test]
fn a_removal_is_refused_while_a_container_awaits_an_address_or_has_one_outside_the_ranges() {
    let now = Instant::now();
    let mut mesh = founder(now, RANGE);
    mesh.create_network(now, lan()).unwrap();
    let in_use = Err(NetworkError::InUse { name: "lan".into(), containers: 1 });
    mesh.allocate(now, lan().vni, "waits");
    assert_eq!(mesh.remove_network(now, "lan"), in_use);
    mesh.release(now, "waits");
    mesh.claim(now, lan().vni, "outside", "192.0.2.1/24".parse().unwrap());
    let given = |it: &Output| matches!(it, Output::Answer { result: Ok(_), .. });
    assert!(drain(&mut mesh).iter().any(given));
    assert_eq!(mesh.remove_network(now, "lan"), in_use);
    mesh.release(now, "outside");
    mesh.remove_network(now, "lan").unwrap();
}

#[test]
fn no_network_is_created_or_joined_while_the_state_cannot_be_saved() {
    let now = Instant::now();
    let mut mesh = founder(now, RANGE);
    link(&mut mesh, now, 7);
    hold(&mut mesh, now, 7, &[shop()]);
    while !matches!(mesh.poll_output(), Some(Output::Persist(_))) {}
    mesh.handle_saved(now, Err("no space left".to_owned()));
    let not_saved = NetworkError::NotSaved { why: "no space left".into() };
    assert_eq!(mesh.create_network(now, lan()), Err(not_saved.clone()));
    assert_eq!(mesh.join_network(now, "shop"), Err(not_saved));
    assert_eq!(mesh.held_networks().count(), 0);
    drain(&mut mesh);
    mesh.handle_timeout(now + ms(limits::SAVE_RETRY_FIRST_MS));
    assert!(matches!(mesh.poll_output(), Some(Output::Persist(_))));
    mesh.handle_saved(now, Ok(()));
    mesh.create_network(now, lan()).unwrap();
    assert_eq!(mesh.join_network(now, "shop"), Ok(shop().vni));
}

/// One message of each kind that could change something, or is answered.
fn requests(founding: NetworkId) -> Vec<Message> {
    let (container, ranges) =
        ("theirs".to_owned(), vec![AddressRange::of_net(lan().range.unwrap())]);
    let announcement = RangeAnnouncement { network: founding, owner: id(7), version: 1, ranges };
    let (add, remove) = (vec![network_box(7, 1)], Vec::new());
    vec![
        Message::Endpoints { version: 1, full: true, more: false, add, remove },
        Message::EndpointsRequest,
        Message::Ranges { announcement },
        Message::RangeRequest { request: 1, within: lan().range.unwrap() },
        Message::Claim { id: 1, address: "10.9.0.9".parse().unwrap(), container },
    ]
}

#[test]
fn messages_about_a_network_count_only_between_hosts_that_have_it_alike() {
    let mut now = Instant::now();
    let mut mesh = founder(now, RANGE);
    mesh.create_network(now, lan()).unwrap();
    now += ms(limits::RANGE_FOUND_SETTLE_MS);
    mesh.handle_timeout(now);
    mesh.allocate(now, lan().vni, "mine");
    let ours = founding_of(&mesh).unwrap();
    let whole = mesh.ipam_on(lan().vni).unwrap().owners[0].addresses;
    let range = Some("10.8.0.0/26".parse().unwrap());
    let other_range = holding(NetworkDefinition { range, ..lan() });
    let other_vni = holding(NetworkDefinition { vni: Vni(9), ..lan() });
    let other_founding = Network { id: NetworkId([9; 16]), ..ours };
    let used = Holding { founding: Some(other_founding), used: true, ..holding(lan()) };
    let unlike = [vec![], vec![other_range], vec![other_vni], vec![used]];
    let lists = [None].into_iter().chain(unlike.map(Some));
    for list in lists {
        link(&mut mesh, now, 7);
        if let Some(list) = &list {
            tell(&mut mesh, now, 7, list.clone());
        }
        drain(&mut mesh);
        for message in requests(ours.id) {
            mesh.handle_message(now, id(7), on(lan().vni, message)).unwrap();
        }
        assert_eq!(sent(&drain(&mut mesh), 7), [], "{list:?}");
        assert_eq!(mesh.endpoints(lan().vni), [], "{list:?}");
        let owners = mesh.ipam_on(lan().vni).unwrap().owners;
        assert_eq!((owners.len(), owners[0].addresses), (1, whole), "{list:?}");
    }
    tell(&mut mesh, now, 7, vec![Holding { founding: Some(ours), ..holding(lan()) }]);
    drain(&mut mesh);
    for message in requests(ours.id) {
        mesh.handle_message(now, id(7), on(lan().vni, message)).unwrap();
    }
    let sent = sent(&drain(&mut mesh), 7);
    let answers = |wanted: fn(&Message) -> bool| {
        let is = |it: &&Message| matches!(it, Message::On { message, .. } if wanted(message));
        sent.iter().filter(is).count()
    };
    assert_eq!(answers(|it| matches!(it, Message::Endpoints { .. })), 1);
    assert_eq!(answers(|it| matches!(it, Message::RangeGrant { .. })), 1);
    assert_eq!(answers(|it| matches!(it, Message::ClaimAnswer { .. })), 1);
    assert_eq!(mesh.endpoints(lan().vni).len(), 1);
    assert_eq!(mesh.ipam_on(lan().vni).unwrap().owners.len(), 2);
}

#[test]
fn a_network_is_carried_between_hosts_whose_definitions_are_equal_in_every_field() {
    let now = Instant::now();
    let ours = NetworkDefinition { range6: Some("fd00:1::/64".parse().unwrap()), ..lan() };
    let plain = NetworkOptions::default;
    let with = |options: NetworkOptions| NetworkDefinition { options, ..ours.clone() };
    let unlike = [
        NetworkDefinition { name: "lan2".into(), ..ours.clone() },
        NetworkDefinition { vni: Vni(9), ..ours.clone() },
        NetworkDefinition { range: Some("10.9.0.0/25".parse().unwrap()), ..ours.clone() },
        NetworkDefinition { range6: None, ..ours.clone() },
        with(NetworkOptions { internal: true, ..plain() }),
        with(NetworkOptions { isolated: true, ..plain() }),
        with(NetworkOptions { mtu: Some(1_400), ..plain() }),
    ];
    for theirs in unlike.into_iter().chain([ours.clone()]) {
        let mut mesh = founder(now, RANGE);
        mesh.create_network(now, ours.clone()).unwrap();
        link(&mut mesh, now, 7);
        hold(&mut mesh, now, 7, std::slice::from_ref(&theirs));
        let status = mesh.networks().into_iter().find(|it| it.here && it.definition == ours);
        let status = status.unwrap();
        let peers = if theirs == ours { vec![id(7)] } else { Vec::new() };
        assert_eq!(mesh.network_peers(ours.vni), peers, "{theirs:?}");
        assert_eq!((&status.hosts, status.clashes.len()), (&peers, 1 - peers.len()), "{theirs:?}");
    }
}

#[test]
fn a_second_name_for_a_vni_of_another_host_is_refused_with_the_remedy() {
    let now = Instant::now();
    let mut mesh = founder(now, RANGE);
    link(&mut mesh, now, 7);
    hold(&mut mesh, now, 7, &[shop()]);
    let web = NetworkDefinition { vni: shop().vni, ..NetworkDefinition::new("web") };
    let clash = mesh.create_network(now, web).unwrap_err();
    assert!(matches!(clash, NetworkError::Clash { .. }), "{clash}");
    let text = clash.to_string();
    assert!(text.contains("network shop of host7") && text.contains("another --vni"), "{text}");
}

#[test]
fn networks_of_a_host_are_known_for_a_while_after_its_link_has_ended() {
    let now = Instant::now();
    let mut mesh = founder(now, RANGE);
    link(&mut mesh, now, 7);
    hold(&mut mesh, now, 7, &[shop()]);
    mesh.handle_link_down(now, id(7));
    let end = now + Duration::from_secs(limits::ENDPOINT_GRACE_S);
    mesh.handle_timeout(end - ms(1));
    assert_eq!(known(&mesh), ["shop"]);
    assert!(mesh.poll_timeout().unwrap() <= end);
    mesh.handle_timeout(end);
    assert_eq!(known(&mesh), [""; 0]);
    let unknown = Err(NetworkError::Unknown { name: "shop".into() });
    assert_eq!(mesh.join_network(end, "shop"), unknown);
}

#[test]
fn all_networks_are_told_when_a_link_is_up_and_after_each_change() {
    let now = Instant::now();
    let mut mesh = founder(now, RANGE);
    let said = |mesh: &mut Mesh| {
        let lists = sent(&drain(mesh), 7).into_iter().filter_map(|message| match message {
            Message::Networks { first: true, more: false, networks, .. } => Some(networks),
            _ => None,
        });
        let names = |all: Vec<Holding>| all.into_iter().map(|it| it.definition.name).collect();
        lists.map(names).collect::<Vec<Vec<String>>>()
    };
    link(&mut mesh, now, 7);
    assert_eq!(said(&mut mesh), [[""; 0]], "there are none");
    mesh.create_network(now, shop()).unwrap();
    assert_eq!(said(&mut mesh), [["shop"]]);
    mesh.create_network(now, NetworkDefinition::new("web")).unwrap();
    let mut both = [shop(), NetworkDefinition::new("web")];
    both.sort_by_key(|it| it.vni);
    let both: Vec<&str> = both.iter().map(|it| it.name.as_str()).collect();
    assert_eq!(said(&mut mesh), [both]);
    mesh.remove_network(now, "shop").unwrap();
    assert_eq!(said(&mut mesh), [["web"]]);
}

#[test]
fn a_founder_waits_for_hosts_that_are_silent_and_for_those_that_come_first() {
    let (settle, alone) = (limits::RANGE_FOUND_SETTLE_MS, limits::RANGE_FOUND_ALONE_MS);
    // The peer, whether it has said what it holds, and after how long this host founds.
    let cases = [
        (None, settle),
        (Some((7, None)), alone),
        (Some((7, Some(vec![]))), settle),
        (Some((7, Some(vec![holding(lan())]))), settle),
        (Some((3, Some(vec![]))), settle),
        (Some((3, Some(vec![holding(lan())]))), settle + alone),
        (Some((3, Some(vec![Holding { resting: true, ..holding(lan()) }]))), settle),
    ];
    for (peer, after) in cases {
        let now = Instant::now();
        let mut mesh = founder(now, RANGE);
        if let Some((peer, list)) = &peer {
            link(&mut mesh, now, *peer);
            list.iter().for_each(|list| tell(&mut mesh, now, *peer, list.clone()));
        }
        mesh.create_network(now, lan()).unwrap();
        mesh.handle_timeout(now + ms(after - 1));
        assert_eq!(founding_of(&mesh), None, "{peer:?}");
        assert!(mesh.poll_timeout().unwrap() <= now + ms(after), "{peer:?}");
        mesh.handle_timeout(now + ms(after));
        assert!(founding_of(&mesh).is_some(), "{peer:?}");
    }
}

#[test]
fn only_a_host_whose_user_created_a_network_founds_and_only_if_it_knows_of_no_founding() {
    let start = Instant::now();
    let later = |n: u64| start + Duration::from_secs(n);
    let mut mesh = founder(start, RANGE);
    link(&mut mesh, start, 7);
    hold(&mut mesh, start, 7, &[lan()]);
    mesh.join_network(start, "lan").unwrap();
    (1..60).for_each(|n| mesh.handle_timeout(later(n)));
    assert_eq!(founding_of(&mesh), None, "it has joined");
    let range6 = "fd00:7::/64".parse().unwrap();
    let theirs = Some(Network { id: NetworkId([9; 16]), range6 });
    let unsure = Holding { founding: theirs, unsure: true, ..holding(lan()) };
    tell(&mut mesh, later(60), 7, vec![unsure]);
    mesh.create_network(later(60), lan()).unwrap();
    (60..120).for_each(|n| mesh.handle_timeout(later(n)));
    assert_eq!(founding_of(&mesh), None, "a founding is known, though its host is not sure of it");
    hold(&mut mesh, later(120), 7, &[lan()]);
    mesh.handle_timeout(later(121));
    assert!(founding_of(&mesh).is_some());
}

#[test]
fn a_network_that_rests_at_another_host_neither_clashes_nor_lives_on() {
    let now = Instant::now();
    let mut mesh = founder(now, RANGE);
    link(&mut mesh, now, 7);
    let range = Some("10.8.0.0/26".parse().unwrap());
    let other = holding(NetworkDefinition { range, ..lan() });
    tell(&mut mesh, now, 7, vec![Holding { resting: true, ..other.clone() }]);
    assert_eq!(known(&mesh), [""; 0]);
    let unknown = Err(NetworkError::Unknown { name: "lan".into() });
    assert_eq!(mesh.join_network(now, "lan"), unknown);
    mesh.create_network(now, lan()).unwrap();
    let clashes =
        |mesh: &Mesh| -> usize { mesh.networks().iter().map(|it| it.clashes.len()).sum() };
    assert_eq!(clashes(&mesh), 0);
    tell(&mut mesh, now, 7, vec![other]);
    assert_eq!(clashes(&mesh), 1, "it is held again");
}

fn numbered(n: usize) -> EndpointInfo {
    let [.., a, b] = n.to_be_bytes();
    EndpointInfo {
        container: format!("box{n}"),
        name: String::new(),
        aliases: Vec::new(),
        mac: Mac([2, 9, 0, 0, a, b]),
        addresses: Vec::new(),
    }
}

#[test]
fn endpoints_of_a_host_are_limited_over_all_networks_together() {
    let now = Instant::now();
    let mut mesh = founder(now, RANGE);
    mesh.create_network(now, shop()).unwrap();
    link(&mut mesh, now, 7);
    hold(&mut mesh, now, 7, &[shop()]);
    let half = limits::ENDPOINTS_PER_PEER_MAX / 2;
    let each = limits::ENDPOINTS_PER_MESSAGE_MAX;
    for vni in [Vni::WEFT, shop().vni] {
        for part in 0..half / each {
            let add = (part * each..(part + 1) * each).map(numbered).collect();
            let (full, more, remove) = (true, part + 1 < half / each, Vec::new());
            let message = Message::Endpoints { version: 1, full, more, add, remove };
            let message = if vni == Vni::WEFT { message } else { on(vni, message) };
            mesh.handle_message(now, id(7), message).unwrap();
        }
        (0..half).for_each(|n| mesh.set_local_endpoint(now, vni, numbered(n)).unwrap());
    }
    assert_eq!(mesh.endpoints(shop().vni).len(), 2 * half);
    for vni in [Vni::WEFT, shop().vni] {
        let more = numbered(half);
        assert!(mesh.set_local_endpoint(now, vni, more.clone()).is_err());
        let (version, full, add) = (2, false, vec![more]);
        let message = Message::Endpoints { version, full, more: false, add, remove: Vec::new() };
        let message = if vni == Vni::WEFT { message } else { on(vni, message) };
        let result = mesh.handle_message(now, id(7), message);
        assert!(matches!(result, Err(MeshError::TooMany { .. })), "{result:?}");
    }
    assert_eq!(mesh.endpoints(shop().vni).len(), 2 * half);
}

#[test]
fn a_peer_has_heard_of_no_more_foundings_than_a_host_holds_networks() {
    let now = Instant::now();
    let mut mesh = founder(now, RANGE);
    link(&mut mesh, now, 7);
    let heard = |count: usize| {
        let id = |n: usize| NetworkId((n as u128).to_be_bytes());
        let heard = (0..count).map(id).collect();
        Message::Networks { first: true, more: false, networks: Vec::new(), heard }
    };
    mesh.handle_message(now, id(7), heard(limits::NETWORKS_MAX)).unwrap();
    let result = mesh.handle_message(now, id(7), heard(limits::NETWORKS_MAX + 1));
    assert!(matches!(result, Err(MeshError::Malformed { .. })), "{result:?}");
}

/// The hosts that have ranges of network `lan`, held or at rest.
fn with_ranges(net: &Net) -> Vec<usize> {
    let has =
        |host: &usize| net.hosts[*host].mesh.as_ref().is_some_and(|it| founding_of(it).is_some());
    (0..net.hosts.len()).filter(has).collect()
}

/// It was away while others removed the network.
#[test]
fn a_host_that_joined_and_has_no_container_lets_go_and_its_ranges_rest_and_then_go() {
    let mut net = Net::linked_hosts(11, 3, RANGE);
    net.create(0, lan()).unwrap();
    net.settle(1);
    let owner = net.attach_on(1, "lan", None).unwrap();
    net.settle(3);
    net.detach(1, &owner);
    net.part(1);
    net.remove(0, "lan").unwrap();
    net.settle(1);
    assert_eq!((with_ranges(&net), net.statuses(2).len()), (vec![0, 1], 1));
    net.meet();
    for host in [0, 2] {
        let status = &net.statuses(host)[0];
        assert_eq!((status.here, &status.hosts), (false, &vec![net.id(1)]), "it may be joined");
    }
    // It is gone again before the network is idle, so the ranges rest.
    net.part(1);
    net.settle(limits::NETWORK_IDLE_S);
    assert!(!net.statuses(1).iter().any(|it| it.here));
    assert_eq!(with_ranges(&net), [0, 1]);
    net.meet();
    (0..3).for_each(|host| assert_eq!(net.statuses(host), [], "h{host}"));
    assert_eq!(with_ranges(&net), [0; 0]);
}

#[test]
fn a_network_lives_on_at_a_host_that_was_away_and_whose_user_created_it() {
    let mut net = Net::linked_hosts(11, 3, RANGE);
    (0..2).for_each(|host| net.create(host, shop()).unwrap());
    net.settle(1);
    net.part(1);
    net.remove(0, "shop").unwrap();
    net.crash(1);
    net.start(1);
    net.settle(limits::NETWORK_IDLE_S + limits::ENDPOINT_GRACE_S);
    assert_eq!(net.statuses(0), []);
    net.meet();
    net.settle(limits::NETWORK_IDLE_S + 1);
    for host in [0, 2] {
        assert_eq!(net.statuses(host)[0].hosts, [net.id(1)], "h{host}");
    }
    net.attach_to(0, "shop", 1).unwrap();
    net.settle(1);
    assert_eq!(net.hosts[1].switch.len(), 1);
}
