//! Networks of other hosts that clash with this host's, or that this release cannot read: found, listed and told.
#![allow(clippy::unwrap_used)]

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use weft_crypto::PeerId;
use weft_mesh::{
    Change, Config, Founding, Hello, Holding, Mesh, Message, NetworkClash, NetworkDefinition,
    NetworkOptions, Output, Vni, limits,
};

fn id(n: u8) -> PeerId {
    PeerId::from_bytes([n; 32])
}

fn founder(now: Instant) -> Mesh {
    let mut config = Config::new(id(5), "me", 6783);
    config.founding = Founding::Found;
    Mesh::new(now, config, None, [1; 32]).unwrap()
}

fn link(mesh: &mut Mesh, now: Instant, peer: u8) {
    let hello = Hello { nickname: format!("host{peer}"), ..mesh.hello() };
    let remote = SocketAddr::from(([192, 0, 2, peer], 40_000));
    mesh.handle_link_up(now, id(peer), hello, remote).unwrap();
}

fn drain(mesh: &mut Mesh) -> Vec<Output> {
    std::iter::from_fn(|| mesh.poll_output()).collect()
}

fn shop() -> NetworkDefinition {
    NetworkDefinition::new("shop")
}

fn with_mtu(mtu: u16) -> NetworkDefinition {
    let options = NetworkOptions { mtu: Some(mtu), ..NetworkOptions::default() };
    NetworkDefinition { options, ..shop() }
}

fn hold(mesh: &mut Mesh, now: Instant, peer: u8, networks: &[NetworkDefinition]) {
    let holding = |definition: &NetworkDefinition| Holding {
        definition: definition.clone(),
        founding: None,
        used: false,
        resting: false,
        unsure: false,
    };
    let networks = networks.iter().map(holding).collect();
    let message = Message::Networks { first: true, more: false, networks, heard: Vec::new() };
    mesh.handle_message(now, id(peer), message).unwrap();
}

/// The clashes of a network of this host, as the status lists them.
fn listed(mesh: &Mesh, name: &str) -> Vec<NetworkClash> {
    let networks = mesh.networks().into_iter();
    let held = networks.filter(|it| it.here && it.definition.name == name);
    held.flat_map(|it| it.clashes).collect()
}

/// The clashes that are worth a line in the log.
fn told(mesh: &mut Mesh) -> Vec<NetworkClash> {
    let outputs = drain(mesh).into_iter();
    let clashes = outputs.filter_map(|output| match output {
        Output::Changed(Change::NetworkClash(clash)) => Some(clash),
        _ => None,
    });
    clashes.collect()
}

#[test]
fn a_network_clashes_with_one_of_its_name_and_with_one_of_its_vni_on_one_host() {
    let now = Instant::now();
    let mut mesh = founder(now);
    link(&mut mesh, now, 7);
    for network in [shop(), NetworkDefinition::new("web")] {
        mesh.create_network(now, network).unwrap();
    }
    let named = NetworkDefinition { vni: Vni(9), ..shop() };
    let numbered = NetworkDefinition { vni: shop().vni, ..NetworkDefinition::new("db") };
    hold(&mut mesh, now, 7, &[named, numbered, NetworkDefinition::new("other")]);
    let clashes = listed(&mesh, "shop");
    let one_name = |it: &&NetworkClash| matches!(it, NetworkClash::Definition { .. });
    let one_vni = |it: &&NetworkClash| matches!(it, NetworkClash::Vni { .. });
    assert_eq!(clashes.len(), 2, "{clashes:?}");
    assert!(clashes.iter().any(|it| one_name(&it)) && clashes.iter().any(|it| one_vni(&it)));
    assert_eq!(told(&mut mesh), clashes);
    assert_eq!(listed(&mesh, "web"), []);
}

#[test]
fn a_peer_causes_few_lines_about_clashes_however_often_its_list_changes() {
    let mut now = Instant::now();
    let mut mesh = founder(now);
    for peer in [7, 8] {
        link(&mut mesh, now, peer);
    }
    mesh.create_network(now, shop()).unwrap();
    drain(&mut mesh);
    let mut lines = 0;
    for n in 0..3 * limits::CLASHES_TOLD_PER_PEER_MAX {
        let theirs = with_mtu(1_300 + n as u16);
        if n % 10 == 0 {
            // A new link is no new account.
            link(&mut mesh, now, 7);
        }
        hold(&mut mesh, now, 7, std::slice::from_ref(&theirs));
        lines += told(&mut mesh).len();
        let clashes = listed(&mesh, "shop");
        let [NetworkClash::Definition { theirs: said, .. }] = &clashes[..] else {
            panic!("{clashes:?}")
        };
        assert_eq!(**said, theirs, "the status has the clash of now");
    }
    assert_eq!(lines, limits::CLASHES_TOLD_PER_PEER_MAX);
    hold(&mut mesh, now, 8, &[with_mtu(1_400)]);
    assert_eq!(told(&mut mesh).len(), 1, "another peer has its own account");
    hold(&mut mesh, now, 8, &[with_mtu(1_400)]);
    assert_eq!(told(&mut mesh), [], "a clash that lasts is told once");
    now += Duration::from_secs(limits::CLASHES_TOLD_PERIOD_S);
    hold(&mut mesh, now, 7, &[with_mtu(1_400)]);
    assert_eq!(told(&mut mesh).len(), 1);
}
