//! What a host believes of peers that have a network too: at rest, away, of an older release, founded apart.
#![allow(clippy::unwrap_used)]

mod common;
mod net;

use std::time::{Duration, Instant};

use common::{drain, drain_with, founder, holding, id, link, link_older, on, sent, shop, tell};
use net::{RANGE, lan, network_box};
use weft_mesh::{
    AddressRange, EndpointInfo, Holding, Mesh, Message, Network, NetworkDefinition, NetworkId,
    Output, RangeAnnouncement, Vni, limits,
};

fn founding(n: u8) -> Network {
    Network { id: NetworkId([n; 16]), range6: "fd00:7::/64".parse().unwrap() }
}

/// Network `lan` as a host has it that gave of a founding.
fn lan_of(n: u8) -> Holding {
    Holding { founding: Some(founding(n)), used: true, ..holding(lan()) }
}

fn on_lan(mesh: &mut Mesh, now: Instant, peer: u8, message: Message) {
    mesh.handle_message(now, id(peer), on(lan().vni, message)).unwrap();
}

/// All endpoints of a peer, or a part of them.
fn endpoints(add: Vec<EndpointInfo>, more: bool) -> Message {
    Message::Endpoints { version: 1, full: true, more, add, remove: Vec::new() }
}

/// A host that holds `lan`, with a peer that holds it by a founding and has a container on it.
fn with_peer(now: Instant) -> Mesh {
    let mut mesh = founder(now, RANGE);
    link(&mut mesh, now, 7);
    tell(&mut mesh, now, 7, vec![lan_of(1)]);
    mesh.create_network(now, lan()).unwrap();
    on_lan(&mut mesh, now, 7, endpoints(vec![network_box(7, 1)], false));
    assert_eq!(mesh.endpoints(lan().vni).len(), 1);
    drain(&mut mesh);
    mesh
}

/// The endpoints of a peer are gone, and broadcasts of the network no longer go there.
fn assert_gone(mesh: &mut Mesh, peer: u8) {
    let (vni, add, peer) = (lan().vni, Vec::new(), id(peer));
    let outputs = drain(mesh);
    let remove = vec![(network_box(7, 1).mac, peer)];
    assert!(outputs.contains(&Output::Endpoints { vni, add, remove }), "{outputs:?}");
    let peers = outputs.iter().rev().find_map(|output| match output {
        Output::NetworkPeers { vni, peers } if *vni == lan().vni => Some(peers),
        _ => None,
    });
    assert!(!peers.unwrap().contains(&peer), "{outputs:?}");
    assert!(!mesh.endpoints(vni).iter().any(|(_, of)| *of == peer));
}

/// The messages about `lan` to a peer, and the lists of networks.
fn said(outputs: &[Output], to: u8) -> Vec<Message> {
    let about_lan = sent(outputs, to).into_iter().filter_map(|message| match message {
        Message::On { vni, message } if vni == lan().vni => Some(*message),
        list @ Message::Networks { .. } => Some(list),
        _ => None,
    });
    about_lan.collect()
}

fn held(addresses: &[&str]) -> Message {
    let addresses = addresses.iter().map(|address| address.parse().unwrap()).collect();
    Message::ClaimsHeld { addresses, more: false }
}

/// The number of the range request that a host sends to a peer, if it does.
fn request(outputs: &[Output], to: u8) -> Option<u64> {
    said(outputs, to).into_iter().find_map(|message| match message {
        Message::RangeRequest { request, .. } => Some(request),
        _ => None,
    })
}

fn grant(request: u64, n: u8) -> Message {
    let ranges = vec![AddressRange::of_net("10.9.0.32/27".parse().unwrap())];
    Message::RangeGrant { request, network: founding(n), ranges }
}

#[test]
fn the_held_networks_and_the_hosts_that_share_each_can_be_asked_for() {
    let now = Instant::now();
    let mut mesh = with_peer(now);
    mesh.create_network(now, shop()).unwrap();
    let held = |mesh: &Mesh| mesh.held_networks().cloned().collect::<Vec<_>>();
    let mut both = vec![lan(), shop()];
    both.sort_by_key(|it| it.vni);
    assert_eq!(held(&mesh), both, "by VNI");
    assert_eq!(mesh.network_peers(lan().vni), [id(7)]);
    for none in [shop().vni, Vni::WEFT, Vni(9)] {
        assert_eq!(mesh.network_peers(none), []);
    }
    // A host without a link stays for a while, as in the output.
    mesh.handle_link_down(now, id(7));
    assert_eq!(mesh.network_peers(lan().vni), [id(7)]);
    mesh.remove_network(now, "lan").unwrap();
    assert!(mesh.ipam_on(lan().vni).is_some(), "it rests");
    assert_eq!((held(&mesh), mesh.network_peers(lan().vni)), (vec![shop()], Vec::new()));
}

#[test]
fn endpoints_of_a_host_that_let_go_of_a_network_while_away_are_dropped_and_no_more_are_taken() {
    let now = Instant::now();
    let mut mesh = with_peer(now);
    mesh.handle_link_down(now, id(7));
    link(&mut mesh, now, 7);
    assert_eq!(mesh.endpoints(lan().vni).len(), 1, "it may hold the network still");
    drain(&mut mesh);
    let resting = Holding { resting: true, ..lan_of(1) };
    tell(&mut mesh, now, 7, vec![resting]);
    assert_gone(&mut mesh, 7);
    on_lan(&mut mesh, now, 7, endpoints(vec![network_box(7, 1)], false));
    assert_eq!(mesh.endpoints(lan().vni), []);
    tell(&mut mesh, now, 7, vec![lan_of(1)]);
    on_lan(&mut mesh, now, 7, endpoints(vec![network_box(7, 1)], false));
    assert_eq!(mesh.endpoints(lan().vni).len(), 1, "it holds the network again");
}

#[test]
fn a_host_that_comes_back_with_an_older_release_holds_nothing() {
    let now = Instant::now();
    let mut mesh = with_peer(now);
    mesh.handle_link_down(now, id(7));
    link_older(&mut mesh, now, 7);
    assert_gone(&mut mesh, 7);
    let lan = mesh.networks().into_iter().find(|it| it.definition == lan()).unwrap();
    assert_eq!(lan.hosts, []);
}

#[test]
fn half_a_set_of_endpoints_goes_with_the_network() {
    let now = Instant::now();
    let mut mesh = with_peer(now);
    on_lan(&mut mesh, now, 7, endpoints(vec![network_box(7, 2)], true));
    mesh.remove_network(now, "lan").unwrap();
    assert!(mesh.ipam_on(lan().vni).is_some(), "it rests");
    mesh.create_network(now, lan()).unwrap();
    on_lan(&mut mesh, now, 7, endpoints(vec![network_box(7, 3)], false));
    let all: Vec<EndpointInfo> =
        mesh.endpoints(lan().vni).into_iter().map(|(info, _)| info).collect();
    assert_eq!(all, [network_box(7, 3)]);
}

#[test]
fn endpoints_of_a_host_that_is_away_go_when_this_host_takes_ranges_of_another_founding() {
    let now = Instant::now();
    let mut mesh = with_peer(now);
    mesh.handle_link_down(now, id(7));
    link(&mut mesh, now, 8);
    tell(&mut mesh, now, 8, vec![lan_of(2)]);
    let number = request(&drain(&mut mesh), 8).unwrap();
    on_lan(&mut mesh, now, 8, endpoints(vec![network_box(8, 1)], false));
    on_lan(&mut mesh, now, 8, grant(number, 2));
    assert_gone(&mut mesh, 7);
    assert_eq!(mesh.endpoints(lan().vni), [(network_box(8, 1), id(8))]);
}

#[test]
fn a_network_whose_ranges_rest_here_needs_no_room() {
    let mut now = Instant::now();
    let mut mesh = founder(now, RANGE);
    // It never says which networks it has: so ranges rest.
    link(&mut mesh, now, 7);
    let other = NetworkDefinition { range: lan().range, ..NetworkDefinition::new("lan2") };
    for network in [lan(), other.clone()] {
        mesh.create_network(now, network).unwrap();
    }
    now += Duration::from_millis(limits::RANGE_FOUND_ALONE_MS);
    mesh.handle_timeout(now);
    for name in ["lan", "lan2"] {
        mesh.remove_network(now, name).unwrap();
    }
    for n in 2..limits::NETWORKS_MAX {
        mesh.create_network(now, NetworkDefinition::new(format!("n{n}"))).unwrap();
    }
    mesh.create_network(now, lan()).unwrap();
    assert!(mesh.ipam_on(other.vni).is_some(), "its ranges rest still");
    mesh.create_network(now, NetworkDefinition::new("more")).unwrap();
    assert!(mesh.ipam_on(other.vni).is_none(), "they made room");
}

#[test]
fn a_host_that_joins_asks_no_resting_host_while_another_holds_the_network_by_another_founding() {
    let now = Instant::now();
    let mut mesh = founder(now, RANGE);
    for peer in [7, 8] {
        link(&mut mesh, now, peer);
    }
    let resting = Holding { resting: true, ..lan_of(2) };
    tell(&mut mesh, now, 8, vec![resting]);
    tell(&mut mesh, now, 7, vec![lan_of(1)]);
    drain(&mut mesh);
    mesh.join_network(now, "lan").unwrap();
    let outputs = drain(&mut mesh);
    let number = request(&outputs, 7).unwrap();
    assert_eq!(request(&outputs, 8), None);
    let refused = Message::RangeRefused { request: number, reason: "no".into(), ask: None };
    on_lan(&mut mesh, now, 7, refused);
    assert_eq!(request(&drain(&mut mesh), 8), None);
    on_lan(&mut mesh, now, 8, grant(number, 2));
    assert_eq!(mesh.ipam_on(lan().vni).unwrap().network, None);
    on_lan(&mut mesh, now, 7, grant(number, 1));
    assert_eq!(mesh.ipam_on(lan().vni).unwrap().network, Some(founding(1)));
}

#[test]
fn the_names_of_all_are_there_once_each_host_has_told_them_on_each_network() {
    let now = Instant::now();
    let mut mesh = founder(now, RANGE);
    mesh.create_network(now, lan()).unwrap();
    link(&mut mesh, now, 7);
    mesh.handle_message(now, id(7), endpoints(Vec::new(), false)).unwrap();
    assert!(!mesh.has_names_of_all(), "it may have networks");
    tell(&mut mesh, now, 7, vec![lan_of(1)]);
    assert!(!mesh.has_names_of_all(), "it has told none of its names on the network");
    on_lan(&mut mesh, now, 7, endpoints(Vec::new(), false));
    assert!(mesh.has_names_of_all());
}

/// The owner may have given an address to this host when it had dropped its ranges: it is free again.
#[test]
fn a_host_that_gets_ranges_says_what_it_holds_once_their_owner_knows_the_founding() {
    let now = Instant::now();
    let mut mesh = founder(now, RANGE);
    link(&mut mesh, now, 7);
    tell(&mut mesh, now, 7, vec![lan_of(1)]);
    mesh.join_network(now, "lan").unwrap();
    let outputs = drain(&mut mesh);
    assert!(!said(&outputs, 7).contains(&held(&[])), "it has no founding: {outputs:?}");
    on_lan(&mut mesh, now, 7, grant(request(&outputs, 7).unwrap(), 1));
    let said = said(&drain(&mut mesh), 7);
    let of_founding = |it: &Message| match it {
        Message::Networks { networks, .. } => networks[0].founding == Some(founding(1)),
        _ => false,
    };
    let told = said.iter().position(of_founding);
    let listed = said.iter().position(|it| *it == held(&[]));
    assert!(told.is_some() && told < listed, "{said:?}");
    assert_eq!(said.iter().filter(|it| **it == held(&[])).count(), 1, "{said:?}");
}

/// After a crash this host would not know the founding, nor that it has asked for an address of it.
#[test]
fn a_claim_waits_until_the_founding_of_the_ranges_is_saved() {
    let mut now = Instant::now();
    let mut mesh = founder(now, RANGE);
    link(&mut mesh, now, 7);
    tell(&mut mesh, now, 7, vec![lan_of(1)]);
    mesh.join_network(now, "lan").unwrap();
    let number = request(&drain(&mut mesh), 7).unwrap();
    let ranges = vec![AddressRange::of_net("10.9.0.0/27".parse().unwrap())];
    let (network, owner) = (founding(1).id, id(7));
    let announcement = RangeAnnouncement { network, owner, version: 1, ranges };
    on_lan(&mut mesh, now, 7, Message::Ranges { announcement });
    on_lan(&mut mesh, now, 7, grant(number, 1));
    drain_with(&mut mesh, now, true);
    mesh.claim(now, lan().vni, "a", "10.9.0.9/26".parse().unwrap());
    let asks = |outputs: &[Output]| {
        let claim = |it: &Message| matches!(it, Message::Claim { .. });
        said(outputs, 7).iter().any(claim)
    };
    assert!(!asks(&drain_with(&mut mesh, now, true)));
    now += Duration::from_millis(limits::SAVE_RETRY_MAX_MS);
    mesh.handle_timeout(now);
    assert!(asks(&drain_with(&mut mesh, now, false)));
}

#[test]
fn a_list_of_claims_that_comes_before_the_founding_is_not_part_of_the_next() {
    let mut now = Instant::now();
    let mut mesh = founder(now, RANGE);
    mesh.create_network(now, lan()).unwrap();
    now += Duration::from_millis(limits::RANGE_FOUND_SETTLE_MS);
    mesh.handle_timeout(now);
    let ours = mesh.ipam_on(lan().vni).unwrap().network;
    link(&mut mesh, now, 7);
    let used = |mesh: &Mesh| mesh.ipam_on(lan().vni).unwrap().owners[0].used;
    tell(&mut mesh, now, 7, vec![Holding { founding: None, used: false, ..lan_of(1) }]);
    on_lan(&mut mesh, now, 7, held(&["10.9.0.9", "10.9.0.10"]));
    assert_eq!(used(&mesh), Some(0));
    tell(&mut mesh, now, 7, vec![Holding { founding: ours, ..lan_of(1) }]);
    on_lan(&mut mesh, now, 7, held(&["10.9.0.10"]));
    assert_eq!(used(&mesh), Some(1));
}
