//! Set-ups that the tests of one host share: the host, its peers, and what it says and answers.
#![allow(clippy::unwrap_used, dead_code, unreachable_pub)]

use std::net::SocketAddr;
use std::time::Instant;

use ipnet::IpNet;
use weft_crypto::PeerId;
use weft_mesh::{
    AddressError, Config, EndpointInfo, Founding, Hello, Holding, Mac, Mesh, Message,
    NetworkDefinition, NetworkOptions, Output, State, Ticket, Vni,
};

pub fn id(n: u8) -> PeerId {
    PeerId::from_bytes([n; 32])
}

/// That of the host under test, number 5, which founds.
pub fn config(range: &str) -> Config {
    let mut config = Config::new(id(5), "me", 6783);
    config.range = range.parse().unwrap();
    config.founding = Founding::Found;
    config
}

pub fn founder(now: Instant, range: &str) -> Mesh {
    Mesh::new(now, config(range), None, [1; 32]).unwrap()
}

/// A link with a peer of the same mesh and release.
pub fn link(mesh: &mut Mesh, now: Instant, peer: u8) {
    link_with(mesh, now, peer, |_| {});
}

/// A link with a peer of an earlier release, which knows `weft` alone.
pub fn link_older(mesh: &mut Mesh, now: Instant, peer: u8) {
    link_with(mesh, now, peer, |hello| hello.features.clear());
}

/// A link with a peer whose greeting differs from that of one in the same mesh.
pub fn link_with(mesh: &mut Mesh, now: Instant, peer: u8, change: impl FnOnce(&mut Hello)) {
    let mut hello = Hello { nickname: format!("host{peer}"), ..mesh.hello() };
    change(&mut hello);
    let remote = SocketAddr::from(([192, 0, 2, peer], 40_000));
    mesh.handle_link_up(now, id(peer), hello, remote).unwrap();
}

pub fn drain(mesh: &mut Mesh) -> Vec<Output> {
    std::iter::from_fn(|| mesh.poll_output()).collect()
}

/// All outputs of a host whose disk is full, or is not.
pub fn drain_with(mesh: &mut Mesh, now: Instant, full: bool) -> Vec<Output> {
    let mut outputs = Vec::new();
    while let Some(output) = mesh.poll_output() {
        if matches!(output, Output::Persist(_)) {
            mesh.handle_saved(now, if full { Err("the disk is full".into()) } else { Ok(()) });
        }
        outputs.push(output);
    }
    outputs
}

/// The state that a host saved last, as it is on the disk. Its other outputs are gone.
pub fn saved(mesh: &mut Mesh) -> String {
    let saved = drain(mesh).into_iter().rev().find_map(|output| match output {
        Output::Persist(state) => Some(serde_json::to_string(&*state).unwrap()),
        _ => None,
    });
    saved.unwrap()
}

/// A host that starts with a saved state.
pub fn restored(now: Instant, range: &str, saved: &str) -> Mesh {
    let saved: State = serde_json::from_str(saved).unwrap();
    Mesh::new(now, config(range), Some(saved), [2; 32]).unwrap()
}

/// The messages to a peer.
pub fn sent(outputs: &[Output], to: u8) -> Vec<Message> {
    let messages = outputs.iter().filter_map(|output| match output {
        Output::Send { peer, message } if *peer == id(to) => Some(message.clone()),
        _ => None,
    });
    messages.collect()
}

/// A message about another network than `weft`.
pub fn on(vni: Vni, message: Message) -> Message {
    Message::On { vni, message: Box::new(message) }
}

/// The answer to a request for addresses. The other outputs are gone.
pub fn answer(mesh: &mut Mesh, ticket: Ticket) -> Result<Vec<String>, AddressError> {
    let mut answers = drain(mesh).into_iter().filter_map(|output| match output {
        Output::Answer { ticket: t, result, .. } if t == ticket => Some(result),
        _ => None,
    });
    let nets = answers.next().expect("an answer")?;
    Ok(nets.iter().map(IpNet::to_string).collect())
}

pub fn allocate(
    mesh: &mut Mesh,
    now: Instant,
    vni: Vni,
    owner: &str,
) -> Result<Vec<String>, AddressError> {
    let ticket = mesh.allocate(now, vni, owner);
    answer(mesh, ticket)
}

pub fn claim(
    mesh: &mut Mesh,
    now: Instant,
    vni: Vni,
    owner: &str,
    address: &str,
) -> Result<Vec<String>, AddressError> {
    let ticket = mesh.claim(now, vni, owner, address.parse().unwrap());
    answer(mesh, ticket)
}

/// A network without ranges of its own.
pub fn shop() -> NetworkDefinition {
    NetworkDefinition::new("shop")
}

/// Network `shop` as another host may have it.
pub fn with_mtu(mtu: u16) -> NetworkDefinition {
    let options = NetworkOptions { mtu: Some(mtu), ..NetworkOptions::default() };
    NetworkDefinition { options, ..shop() }
}

/// A network as a host holds it that has no ranges of it.
pub fn holding(definition: NetworkDefinition) -> Holding {
    Holding { definition, founding: None, used: false, resting: false, unsure: false }
}

/// The whole list of a host's networks.
pub fn list(networks: Vec<Holding>) -> Message {
    Message::Networks { first: true, more: false, networks, heard: Vec::new() }
}

/// A peer says which networks it has.
pub fn tell(mesh: &mut Mesh, now: Instant, peer: u8, networks: Vec<Holding>) {
    mesh.handle_message(now, id(peer), list(networks)).unwrap();
}

/// A peer holds these networks, and has no ranges of them.
pub fn hold(mesh: &mut Mesh, now: Instant, peer: u8, networks: &[NetworkDefinition]) {
    tell(mesh, now, peer, networks.iter().cloned().map(holding).collect());
}

/// A container of whichever host announces it.
pub fn container(number: u8) -> EndpointInfo {
    let (container, name, aliases) = (format!("c{number}"), String::new(), Vec::new());
    EndpointInfo { container, name, aliases, mac: Mac([2, 0, 0, 0, 0, number]), addresses: vec![] }
}

/// A host announces one more container.
pub fn change(version: u64, number: u8) -> Message {
    let (add, remove) = (vec![container(number)], Vec::new());
    Message::Endpoints { version, full: false, more: false, add, remove }
}

/// A host announces this container as its only one.
pub fn whole(version: u64, number: u8) -> Message {
    let (add, remove) = (vec![container(number)], Vec::new());
    Message::Endpoints { version, full: true, more: false, add, remove }
}
