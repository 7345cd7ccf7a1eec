//! Tests which SAs, policies and forwarding entries follow from commands.
#![allow(clippy::unwrap_used)]

use std::time::Duration;

use weft_crypto::{Cipher, SaKey, TunnelEnd, TunnelWay};
use weft_path::{EngineKind, Vni};

use super::*;
use crate::engine::channel::change::Change;

const PEER: PeerId = PeerId::from_bytes([7; 32]);
const REMOTE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 2));
const LOCAL: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 1));
const RAW: PathId = PathId(1);
const UDP: PathId = PathId(2);
const VECTOR: PathId = PathId(3);
const CHANNEL: PathId = PathId(4);
/// An SPI of format `ovpn`.
const FIRST_WORD: u32 = 0x4812_3400;

fn apply(state: &mut State, command: EngineCommand) -> Vec<Action> {
    state.apply(command, |_| Some(LOCAL))
}

fn outbound(path: PathId, spi: u32, encapsulation: Encapsulation) -> EngineCommand {
    let sa = OutboundSa {
        spi,
        lane: 0,
        cipher: Cipher::Aes256Gcm,
        key: SaKey::from_bytes([1; 36]),
        rco: false,
        iv_salt: 0,
        packets_soft: 3,
        packets_hard: 4,
        bytes_soft: 5,
        bytes_hard: 6,
        encapsulation,
        remote_engine: EngineKind::Kernel,
        lifetime: Duration::from_secs(60),
    };
    let remote = SocketAddr::new(REMOTE, 6784);
    EngineCommand::InstallOutbound { engine: EngineKind::Kernel, peer: PEER, path, sa, remote }
}

fn inbound(path: PathId, spi: u32, encapsulation: Encapsulation) -> EngineCommand {
    let sa = InboundSa {
        spi,
        lane: 0,
        cipher: Cipher::Aes256Gcm,
        key: SaKey::from_bytes([2; 36]),
        encapsulation,
        remote_engine: EngineKind::Kernel,
        lifetime: Duration::from_secs(60),
    };
    let (engine, peer, remote) = (EngineKind::Kernel, PEER, REMOTE);
    EngineCommand::InstallInbound { engine, peer, path, sa, remote }
}

/// The same command for an SA of format `ovpn`.
fn in_channel(mut command: EngineCommand) -> EngineCommand {
    match &mut command {
        EngineCommand::InstallInbound { sa, .. } => sa.key = SaKey::for_ovpn([2; 40]),
        EngineCommand::InstallOutbound { sa, .. } => sa.key = SaKey::for_ovpn([1; 40]),
        other => panic!("no SA: {other:?}"),
    }
    command
}

fn tunnel(way: TunnelWay) -> IpAddr {
    PEER.tunnel_address(TunnelEnd { way, kernel: true }).into()
}

fn policy(port: u16, spi: u32) -> PolicySpec {
    let id = PolicyId { source: LOCAL, destination: REMOTE, port };
    PolicySpec { id, template: Template::State { spi } }
}

fn added(actions: &[Action]) -> &StateSpec {
    match &actions[0] {
        Action::AddState(_, spec) => spec,
        other => panic!("not an SA: {other:?}"),
    }
}

#[test]
fn a_path_carries_frames_only_once_it_is_bound() {
    let mut state = State::new(6785, 6786);
    let actions = apply(&mut state, outbound(RAW, 300, Encapsulation::Raw));
    let spec = added(&actions);
    assert_eq!((spec.source, spec.destination, spec.encapsulation), (LOCAL, REMOTE, None));
    assert_eq!(spec.limits.packets_soft, 3);
    assert_eq!(actions.len(), 1, "no policy leads to it yet: {actions:?}");
    let bind = EngineCommand::BindPath { peer: PEER, path: Some(RAW) };
    assert_eq!(
        apply(&mut state, bind),
        [Action::SetPolicy(policy(6787, 300)), Action::SetVia(PEER, Via::Vxlan { remote: REMOTE }),],
        "the policy stands before frames are led to it"
    );
}

#[test]
fn a_rekey_installs_leads_over_and_only_then_retires() {
    let mut state = State::new(6785, 6786);
    apply(&mut state, outbound(RAW, 300, Encapsulation::Raw));
    apply(&mut state, EngineCommand::BindPath { peer: PEER, path: Some(RAW) });
    let actions = apply(&mut state, outbound(RAW, 301, Encapsulation::Raw));
    assert_eq!(added(&actions).spi, 301);
    let old = StateId { destination: REMOTE, spi: 300 };
    assert_eq!(actions[1..], [Action::SetPolicy(policy(6787, 301)), Action::RetireState(old)]);
}

#[test]
fn lanes_are_one_for_each_cpu_and_a_rekey_moves_them_together() {
    let mut state = State::new(6785, 6786);
    state.set_per_cpu(true);
    let install = |state: &mut State, spi: u32| -> Vec<Action> {
        let lanes = (0..3).flat_map(|lane: u16| {
            let mut command = outbound(RAW, spi + u32::from(lane), Encapsulation::Raw);
            if let EngineCommand::InstallOutbound { sa, .. } = &mut command {
                sa.lane = lane;
            }
            apply(state, command)
        });
        lanes.collect()
    };
    let added = |actions: &[Action]| -> Vec<_> {
        let of = |action: &Action| match action {
            Action::AddState(_, spec) => Some((spec.spi, spec.group.unwrap(), spec.cpu)),
            _ => None,
        };
        actions.iter().filter_map(of).collect()
    };
    let first = added(&install(&mut state, 300));
    let group = first[0].1;
    assert_eq!(first, [(300, group, None), (301, group, Some(0)), (302, group, Some(1))]);
    let bind = EngineCommand::BindPath { peer: PEER, path: Some(RAW) };
    let led = |group| PolicySpec { template: Template::Lanes(group), ..policy(6787, 0) };
    assert_eq!(apply(&mut state, bind)[0], Action::SetPolicy(led(group)));

    let actions = install(&mut state, 400);
    let second = added(&actions);
    let next = second[0].1;
    assert_ne!(next, group, "two sets of keys must not share a group");
    assert_eq!(second, [(400, next, None), (401, next, Some(0)), (402, next, Some(1))]);
    let of = |action: &Action| match action {
        Action::SetPolicy(policy) => Some(*policy),
        _ => None,
    };
    assert_eq!(actions.iter().filter_map(of).collect::<Vec<_>>(), [led(next)]);
    for spi in 300..303 {
        let old = StateId { destination: REMOTE, spi };
        assert!(actions.contains(&Action::RetireState(old)), "{spi}: {actions:?}");
    }
    // Another path to the same host gets a different group, however often the numbers wrap.
    state.group = 1;
    let other = apply(&mut state, outbound(UDP, 500, Encapsulation::Udp));
    assert_ne!(self::added(&other).group, Some(next));
    state.group = state.group.wrapping_sub(1);
    let again = apply(&mut state, outbound(VECTOR, 600, Encapsulation::Udp));
    assert_ne!(self::added(&again).group, self::added(&other).group);
}

#[test]
fn each_candidate_is_probed_on_its_own_sa_and_the_active_path_on_its_own() {
    let mut state = State::new(6785, 6786);
    apply(&mut state, outbound(RAW, 300, Encapsulation::Raw));
    apply(&mut state, outbound(UDP, 400, Encapsulation::Udp));
    apply(&mut state, EngineCommand::BindPath { peer: PEER, path: Some(UDP) });
    let probe = |path, candidate| EngineCommand::SendProbe { path, probe: 9, mtu: 1400, candidate };
    let sent =
        |path, port| Action::Probe(Probe { path, remote: REMOTE, port, number: 9, mtu: 1400 });
    assert_eq!(
        apply(&mut state, probe(RAW, true)),
        [Action::SetPolicy(policy(6788, 300)), sent(RAW, 6788)]
    );
    assert_eq!(apply(&mut state, probe(RAW, true)), [sent(RAW, 6788)]);
    assert_eq!(apply(&mut state, probe(UDP, false)), [sent(UDP, 6787)]);
    assert_eq!(
        apply(&mut state, probe(UDP, true)),
        [Action::SetPolicy(policy(6788, 400)), sent(UDP, 6788)]
    );
}

#[test]
fn moving_to_the_other_engine_leaves_the_sa_for_what_is_on_its_way() {
    let mut state = State::new(6785, 6786);
    apply(&mut state, outbound(RAW, 300, Encapsulation::Raw));
    apply(&mut state, EngineCommand::BindPath { peer: PEER, path: Some(RAW) });
    let bind = EngineCommand::BindPath { peer: PEER, path: Some(VECTOR) };
    assert_eq!(apply(&mut state, bind), [Action::SetVia(PEER, Via::Tap)]);
    assert_eq!(
        apply(&mut state, EngineCommand::RemoveOutbound { path: RAW }),
        [
            Action::RemovePolicy(PolicyId { source: LOCAL, destination: REMOTE, port: 6787 }),
            Action::RemoveState(StateId { destination: REMOTE, spi: 300 }),
        ]
    );
}

#[test]
fn a_plain_path_has_an_exception_and_no_policy() {
    let mut state = State::new(6785, 6786);
    apply(&mut state, outbound(RAW, 300, Encapsulation::Raw));
    apply(&mut state, EngineCommand::BindPath { peer: PEER, path: Some(RAW) });
    let plain = EngineCommand::InstallPlain { peer: PEER, path: UDP, remote: REMOTE };
    assert_eq!(
        apply(&mut state, plain),
        [Action::Trust(REMOTE), Action::AcceptFrom(PEER, vec![REMOTE])]
    );
    let bind = EngineCommand::BindPath { peer: PEER, path: Some(UDP) };
    assert_eq!(
        apply(&mut state, bind),
        [
            Action::RemovePolicy(PolicyId { source: LOCAL, destination: REMOTE, port: 6787 }),
            Action::SetVia(PEER, Via::Vxlan { remote: REMOTE }),
        ]
    );
    assert_eq!(
        apply(&mut state, EngineCommand::RemoveOutbound { path: UDP }),
        [Action::Distrust(REMOTE)]
    );
}

#[test]
fn inbound_sas_take_udp_where_the_kernel_listens_and_know_their_path() {
    let mut state = State::new(6785, 6786);
    apply(&mut state, outbound(UDP, 400, Encapsulation::Udp));
    let actions = apply(&mut state, inbound(UDP, 500, Encapsulation::Udp));
    let spec = added(&actions);
    let ports = UdpPorts { source: 6784, destination: 6785 };
    assert_eq!((spec.source, spec.destination, spec.encapsulation), (REMOTE, LOCAL, Some(ports)));
    assert_eq!(state.path_of(500), Some((UDP, false)));
    assert_eq!(state.path_of(400), Some((UDP, true)));
    assert_eq!(state.probed_by(probe_mac(&PEER)), Some((PEER, UDP)));
    assert_eq!(state.moved(500, SocketAddr::new(REMOTE, 6784)), None);
    assert_eq!(state.moved(500, SocketAddr::new(REMOTE, 9)), Some(UDP));
    for (engine, path) in [(EngineKind::Kernel, Some(UDP)), (EngineKind::Userspace, None)] {
        let mut second = inbound(UDP, 501, Encapsulation::Udp);
        if let EngineCommand::InstallInbound { sa, .. } = &mut second {
            (sa.lane, sa.remote_engine) = (1, engine);
        }
        apply(&mut state, second);
        assert_eq!(state.moved(501, SocketAddr::new(REMOTE, 9)), path, "{engine:?}'s second lane");
    }
    let id = StateId { destination: LOCAL, spi: 500 };
    let remove = EngineCommand::RemoveInbound { spi: 500 };
    assert_eq!(apply(&mut state, remove), [Action::RemoveState(id)]);
    assert_eq!(apply(&mut state, EngineCommand::RemoveInbound { spi: 500 }), []);
}

#[test]
fn a_forgotten_peer_leaves_nothing() {
    let mut state = State::new(6785, 6786);
    apply(&mut state, outbound(RAW, 300, Encapsulation::Raw));
    apply(&mut state, inbound(RAW, 500, Encapsulation::Raw));
    apply(&mut state, EngineCommand::BindPath { peer: PEER, path: Some(RAW) });
    let actions = apply(&mut state, EngineCommand::RemovePeer { peer: PEER });
    for spi in [300, 500] {
        let removed = |action: &Action| matches!(action, Action::RemoveState(id) if id.spi == spi);
        assert!(actions.iter().any(removed), "{spi} stays: {actions:?}");
    }
    assert!(actions.contains(&Action::SetVia(PEER, Via::None)));
    assert_eq!((state.policies().count(), state.states().count()), (0, 0));
    let endpoints =
        EngineCommand::SetEndpoints { vni: Vni::WEFT, add: Vec::new(), remove: Vec::new() };
    assert_eq!(apply(&mut state, endpoints), []);
}

#[test]
fn a_peer_without_a_route_is_a_failed_path() {
    let mut state = State::new(6785, 6786);
    let actions = state.apply(outbound(RAW, 300, Encapsulation::Raw), |_| None);
    let failed = |action: &Action| {
        matches!(action, Action::Tell(EngineEvent::PathFailed { path: RAW, reason })
            if reason == "no route to 192.0.2.2")
    };
    assert!(actions.iter().all(failed) && actions.len() == 1, "{actions:?}");
}

#[test]
fn a_path_of_the_data_channel_leads_to_the_peers_tunnel_address() {
    let mut state = State::new(6785, 6786);
    let actions = apply(&mut state, in_channel(inbound(CHANNEL, FIRST_WORD, Encapsulation::Udp)));
    let accepted = Action::AcceptFrom(PEER, vec![tunnel(TunnelWay::From)]);
    assert_eq!(actions.last(), Some(&accepted));
    assert_eq!(state.probed_by(probe_mac(&PEER)), Some((PEER, CHANNEL)), "it only receives");
    let install = || in_channel(outbound(CHANNEL, FIRST_WORD, Encapsulation::Udp));
    let actions = apply(&mut state, install());
    assert!(actions.iter().all(|action| matches!(action, Action::Channel(_))), "{actions:?}");
    let remote = tunnel(TunnelWay::To);
    let led = Action::SetVia(PEER, Via::Vxlan { remote });
    let bind = EngineCommand::BindPath { peer: PEER, path: Some(CHANNEL) };
    assert_eq!(apply(&mut state, bind), [led]);
    for (candidate, port) in [(true, 6788), (false, 6787)] {
        let (path, mtu) = (CHANNEL, 1300);
        let probe = EngineCommand::SendProbe { path, probe: 9, mtu, candidate };
        let sent = Action::Probe(Probe { path, remote, port, number: 9, mtu });
        assert_eq!(apply(&mut state, probe), [sent]);
    }
    let keepalive = EngineCommand::SendKeepalive { path: CHANNEL };
    let kept = Action::ChannelKeepalive(SocketAddr::new(REMOTE, 6784));
    assert_eq!(apply(&mut state, keepalive), [kept]);
    let elsewhere = SocketAddr::new(REMOTE, 9);
    let moved = EngineCommand::SetRemote { path: CHANNEL, remote: elsewhere };
    let change = Action::Channel(Change::SetRemote(CHANNEL, 255, elsewhere));
    assert_eq!(apply(&mut state, moved), [change]);
    let mtu = EngineCommand::SetPathMtu { path: CHANNEL, mtu: 1300 };
    assert_eq!(apply(&mut state, mtu), []);
    assert_eq!(state.narrow(1356), BTreeMap::from([(PEER, 1300)]));
    assert_eq!((state.policies().count(), state.states().count()), (0, 0), "IPsec knows nothing");
    assert_eq!((state.path_of(FIRST_WORD), state.path_to(REMOTE)), (None, None));
    // Away and back while frames are led there.
    let remove = EngineCommand::RemoveOutbound { path: CHANNEL };
    let gone = matches!(
        apply(&mut state, remove)[..],
        [Action::Channel(Change::DeletePeer { id: 255, .. })]
    );
    assert!(gone);
    let led = Action::SetVia(PEER, Via::Vxlan { remote });
    assert_eq!(apply(&mut state, install()).last(), Some(&led));
    let remove = EngineCommand::RemoveInbound { spi: FIRST_WORD };
    assert_eq!(apply(&mut state, remove).len(), 1);
    let actions = apply(&mut state, EngineCommand::RemovePeer { peer: PEER });
    assert_eq!(actions.last(), Some(&Action::SetVia(PEER, Via::None)));
    assert!(actions.len() == 2 && !state.knows(&PEER), "{actions:?}");
}

#[test]
fn frames_are_accepted_from_each_path_of_a_peer() {
    let mut state = State::new(6785, 6786);
    let accepted = |actions: &[Action]| match actions.last() {
        Some(Action::AcceptFrom(PEER, sources)) => sources.clone(),
        other => panic!("no sources: {other:?}"),
    };
    let actions = apply(&mut state, in_channel(inbound(CHANNEL, FIRST_WORD, Encapsulation::Udp)));
    assert_eq!(accepted(&actions), [tunnel(TunnelWay::From)]);
    let actions = apply(&mut state, inbound(RAW, 500, Encapsulation::Raw));
    assert_eq!(accepted(&actions), [REMOTE, tunnel(TunnelWay::From)]);
    let again = in_channel(inbound(CHANNEL, FIRST_WORD + (1 << 24), Encapsulation::Udp));
    assert_eq!(accepted(&apply(&mut state, again)), [REMOTE, tunnel(TunnelWay::From)]);
}

/// If the policy moved to a second peer that claims the same address, the first peer's frames would be sealed
/// for the second.
#[test]
fn a_second_peer_takes_no_policy_from_the_one_that_has_it() {
    let other = PeerId::from_bytes([8; 32]);
    let of_other = |mut command: EngineCommand| {
        if let EngineCommand::InstallOutbound { peer, .. } | EngineCommand::BindPath { peer, .. } =
            &mut command
        {
            *peer = other;
        }
        command
    };
    let bind = |path| EngineCommand::BindPath { peer: PEER, path: Some(path) };
    let probe = |path| EngineCommand::SendProbe { path, probe: 1, mtu: 1_388, candidate: true };
    let mut state = State::new(6785, 6786);
    apply(&mut state, outbound(RAW, 300, Encapsulation::Raw));
    apply(&mut state, bind(RAW));
    apply(&mut state, probe(RAW));
    let policies: Vec<PolicySpec> = state.policies().copied().collect();
    assert_eq!(policies.len(), 2);
    let second = PathId(9);
    let mut actions = apply(&mut state, of_other(outbound(second, 301, Encapsulation::Raw)));
    actions.extend(apply(&mut state, of_other(bind(second))));
    actions.extend(apply(&mut state, probe(second)));
    assert_eq!(state.policies().copied().collect::<Vec<_>>(), policies);
    let takes = |action: &Action| matches!(action, Action::SetPolicy(_) | Action::RemovePolicy(_));
    assert!(!actions.iter().any(takes), "{actions:?}");
    let told = |action: &Action| matches!(action, Action::Tell(EngineEvent::PathFailed { path, .. }) if *path == second);
    assert!(actions.iter().any(told), "{actions:?}");
    // Once the first has gone, it is the second's.
    apply(&mut state, EngineCommand::RemovePeer { peer: PEER });
    let actions = apply(&mut state, of_other(bind(second)));
    assert!(actions.iter().any(takes), "{actions:?}");
}

/// Packets arrive at the address that the peer dialled. Packets leave from the address that the routes
/// select, as those of the VXLAN device do.
#[test]
fn a_peers_packets_are_accepted_at_the_address_that_it_dialled() {
    let mut state = State::new(6785, 6786);
    let dialled: IpAddr = [192, 0, 2, 101].into();
    let set = |source| EngineCommand::SetSource { peer: PEER, source };
    apply(&mut state, set(Some(dialled)));
    let ends = |actions: Vec<Action>| {
        let mut specs = actions.into_iter().filter_map(|action| match action {
            Action::AddState(_, spec) => Some((spec.source, spec.destination)),
            _ => None,
        });
        specs.next().unwrap()
    };
    let first = ends(apply(&mut state, inbound(UDP, 300, Encapsulation::Udp)));
    assert_eq!(first, (REMOTE, dialled));
    let out = ends(apply(&mut state, outbound(UDP, 301, Encapsulation::Udp)));
    assert_eq!(out, (LOCAL, REMOTE));
    apply(&mut state, set(None));
    let later = ends(apply(&mut state, inbound(UDP, 302, Encapsulation::Udp)));
    assert_eq!(later, (REMOTE, LOCAL));
}

#[test]
fn each_peer_has_a_number_of_its_own_by_which_what_its_sas_open_is_known() {
    const OTHER: PeerId = PeerId::from_bytes([8; 32]);
    let mut state = State::new(6785, 6786);
    let of = |peer, command| match command {
        EngineCommand::InstallInbound { engine, path, sa, remote, .. } => {
            EngineCommand::InstallInbound { engine, peer, path, sa, remote }
        }
        command => command,
    };
    let mark = |state: &mut State, peer, spi| {
        let command = of(peer, inbound(RAW, spi, Encapsulation::Raw));
        added(&apply(state, command)).mark
    };
    assert_eq!(mark(&mut state, PEER, 300), None, "a datapath looks at addresses");
    state.give_numbers();
    let number = mark(&mut state, PEER, 301);
    assert_eq!(number, Some(SENDER_NUMBERS + 1));
    assert_eq!(mark(&mut state, PEER, 302), number, "a rekey changes no number");
    // Allocation skips the last number and the number that is taken.
    state.number = Some(SENDER_NUMBERS | !SENDER_NUMBERS_MASK);
    let other = mark(&mut state, OTHER, 303);
    assert_eq!(other, Some(SENDER_NUMBERS + 2));
    assert_eq!(state.number_of(&OTHER), other);
    assert_eq!(added(&apply(&mut state, outbound(RAW, 304, Encapsulation::Raw))).mark, None);
    let gone = apply(&mut state, EngineCommand::RemovePeer { peer: OTHER });
    assert!(gone.contains(&Action::RefuseFrom(OTHER)), "{gone:?}");
    assert_eq!(state.number_of(&OTHER), None);
    // A peer in the data channel or in plain has one, too.
    apply(&mut state, EngineCommand::RemovePeer { peer: PEER });
    apply(&mut state, in_channel(inbound(CHANNEL, FIRST_WORD, Encapsulation::Raw)));
    assert!(state.number_of(&PEER).is_some());
    apply(&mut state, EngineCommand::RemovePeer { peer: PEER });
    apply(&mut state, EngineCommand::InstallPlain { peer: PEER, path: RAW, remote: REMOTE });
    assert!(state.number_of(&PEER).is_some());
}
