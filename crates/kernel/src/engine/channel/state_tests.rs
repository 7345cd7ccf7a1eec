//! Tests which device peers and keys follow from commands, notices and readings.
#![allow(clippy::unwrap_used)]

use std::net::Ipv4Addr;
use std::time::Duration;

use weft_crypto::{Cipher, SaKey};
use weft_openvpn::device::Traffic;
use weft_path::Encapsulation;

use super::*;

const PEER: PeerId = PeerId::from_bytes([7; 32]);
const PATH: PathId = PathId(1);
const NEXT: PathId = PathId(2);
const LINK: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 2));
/// The peer id in packets of both directions; each end chooses its value independently.
const ID: u32 = 0x0012_3400;
const SENDER: u32 = 0xff;

fn spi(id: u32, key: u32) -> u32 {
    0x4800_0000 | key << 24 | id
}

fn at(port: u16) -> SocketAddr {
    SocketAddr::new(LINK, port)
}

fn from() -> Ipv6Addr {
    address(&PEER, EngineKind::Kernel, TunnelWay::From)
}

fn to() -> Ipv6Addr {
    address(&PEER, EngineKind::Kernel, TunnelWay::To)
}

fn key(way: Way) -> SaKey {
    SaKey::for_ovpn([if way == Way::In { 2 } else { 1 }; 40])
}

fn inbound(spi: u32) -> InboundSa {
    InboundSa {
        spi,
        lane: 0,
        cipher: Cipher::Aes256Gcm,
        key: key(Way::In),
        encapsulation: Encapsulation::Udp,
        remote_engine: EngineKind::Kernel,
        lifetime: Duration::from_secs(60),
    }
}

fn outbound(spi: u32) -> OutboundSa {
    OutboundSa {
        spi,
        lane: 0,
        cipher: Cipher::Aes256Gcm,
        key: key(Way::Out),
        rco: false,
        iv_salt: 0,
        packets_soft: 3,
        packets_hard: 4,
        bytes_soft: 16_000,
        bytes_hard: 32_000,
        encapsulation: Encapsulation::Udp,
        remote_engine: EngineKind::Kernel,
        lifetime: Duration::from_secs(60),
    }
}

fn acted(act: impl FnOnce(&mut Vec<Action>)) -> Vec<Action> {
    let mut actions = Vec::new();
    act(&mut actions);
    actions
}

fn receive(state: &mut ChannelState, path: PathId, spi: u32) -> Vec<Action> {
    acted(|actions| state.install_inbound(PEER, path, &inbound(spi), LINK, actions))
}

fn stop_receiving(state: &mut ChannelState, spi: u32) -> Vec<Action> {
    acted(|actions| state.remove_inbound(spi, actions))
}

fn send(state: &mut ChannelState, path: PathId, spi: u32, remote: SocketAddr) -> Vec<Action> {
    acted(|actions| state.install_outbound(PEER, path, &outbound(spi), remote, actions))
}

fn set_remote(state: &mut ChannelState, remote: SocketAddr) -> Vec<Action> {
    acted(|actions| state.set_remote(PATH, remote, actions))
}

fn new_receiver(path: PathId, id: u32, port: u16) -> Action {
    let spec = PeerSpec { id, tx_id: None, address: from(), remote: at(port) };
    Action::Channel(Change::NewPeer(path, spec))
}

fn new_sender(path: PathId, id: u32, tx_id: u32, remote: SocketAddr) -> Action {
    let spec = PeerSpec { id, tx_id: Some(tx_id), address: to(), remote };
    Action::Channel(Change::NewPeer(path, spec))
}

fn opens(path: PathId, peer: u32, slot: Slot, spi: u32) -> Action {
    let (way, cipher) = (Way::In, Cipher::Aes256Gcm);
    Action::Channel(Change::NewKey(path, KeySpec { peer, slot, way, spi, cipher, key: key(way) }))
}

fn seals(path: PathId, peer: u32, spi: u32) -> Action {
    let (way, slot, cipher) = (Way::Out, Slot::Primary, Cipher::Aes256Gcm);
    Action::Channel(Change::NewKey(path, KeySpec { peer, slot, way, spi, cipher, key: key(way) }))
}

fn delete_key(id: u32, slot: Slot) -> Action {
    Action::Channel(Change::DeleteKey { id, slot })
}

fn moved_to(path: PathId, remote: SocketAddr) -> EngineEvent {
    EngineEvent::RemoteMoved { path, remote }
}

/// The receiver by a reading.
fn heard(packets: u64, remote: SocketAddr) -> PeerState {
    let vpn = Traffic { rx_packets: packets, ..Traffic::default() };
    PeerState { id: ID, remote: Some(remote), vpn, ..PeerState::default() }
}

/// The sender by a reading.
fn sealed(tx_packets: u64, tx_bytes: u64) -> PeerState {
    let link = Traffic { tx_packets, tx_bytes, ..Traffic::default() };
    PeerState { id: SENDER, link, ..PeerState::default() }
}

#[test]
fn a_receiver_has_two_keys_and_a_third_takes_the_place_of_the_oldest() {
    let mut state = ChannelState::new(6786);
    assert_eq!(
        receive(&mut state, PATH, spi(ID, 0)),
        [new_receiver(PATH, ID, 6786), opens(PATH, ID, Slot::Primary, spi(ID, 0))]
    );
    let second = [opens(PATH, ID, Slot::Secondary, spi(ID, 1))];
    assert_eq!(receive(&mut state, PATH, spi(ID, 1)), second);
    let third = [opens(PATH, ID, Slot::Primary, spi(ID, 2))];
    assert_eq!(receive(&mut state, PATH, spi(ID, 2)), third);
    assert!(!state.has_inbound(spi(ID, 0)) && state.has_inbound(spi(ID, 1)));
    assert_eq!(stop_receiving(&mut state, spi(ID, 0)), [], "its slot is another's");
    assert_eq!(stop_receiving(&mut state, spi(ID, 1)), [delete_key(ID, Slot::Secondary)]);
    let free = [opens(PATH, ID, Slot::Secondary, spi(ID, 3))];
    assert_eq!(receive(&mut state, PATH, spi(ID, 3)), free);
    assert_eq!(stop_receiving(&mut state, spi(ID, 2)), [delete_key(ID, Slot::Primary)]);
    assert_eq!(stop_receiving(&mut state, spi(ID, 3)), [delete(ID, from())]);
    assert!(!state.has(PATH) && !state.knows(&PEER));
}

#[test]
fn two_keys_of_one_id_never_stand_beside_each_other() {
    let mut state = ChannelState::new(6786);
    receive(&mut state, PATH, spi(ID, 0));
    receive(&mut state, PATH, spi(ID, 1));
    let again = [opens(PATH, ID, Slot::Secondary, spi(ID, 1))];
    assert_eq!(receive(&mut state, PATH, spi(ID, 1)), again);
    assert!(state.has_inbound(spi(ID, 0)));
    // Another id: the tunnel address can be of one peer alone.
    let other = ID + 0x100;
    assert_eq!(
        receive(&mut state, PATH, spi(other, 2)),
        [
            delete(ID, from()),
            new_receiver(PATH, other, 6786),
            opens(PATH, other, Slot::Primary, spi(other, 2)),
        ]
    );
    assert!(!state.has_inbound(spi(ID, 0)) && !state.has_id(ID) && state.has_id(other));
}

#[test]
fn a_sender_is_rekeyed_in_place_and_made_anew_for_another_id() {
    let mut state = ChannelState::new(6786);
    assert_eq!(
        send(&mut state, PATH, spi(ID, 0), at(6784)),
        [new_sender(PATH, SENDER, ID, at(6784)), seals(PATH, SENDER, spi(ID, 0))]
    );
    let rekeyed = [seals(PATH, SENDER, spi(ID, 1))];
    assert_eq!(send(&mut state, PATH, spi(ID, 1), at(6784)), rekeyed);
    let change = Action::Channel(Change::SetRemote(PATH, SENDER, at(9)));
    assert_eq!(
        send(&mut state, PATH, spi(ID, 2), at(9)),
        [change, seals(PATH, SENDER, spi(ID, 2))]
    );
    // The peer expects packets from where it sends to.
    let port = receive(&mut state, PATH, spi(ID, 5));
    assert_eq!(port[0], new_receiver(PATH, ID, 9));
    let (other, next) = (ID + 0x100, SENDER + 0x100);
    assert_eq!(
        send(&mut state, PATH, spi(other, 3), at(9)),
        [
            delete(SENDER, to()),
            new_sender(PATH, next, other, at(9)),
            seals(PATH, next, spi(other, 3)),
        ]
    );
    // The socket of one family cannot send to the other.
    let six: SocketAddr = "[2001:db8::2]:6786".parse().unwrap();
    let last = next + 0x100;
    assert_eq!(
        send(&mut state, PATH, spi(other, 4), six),
        [delete(next, to()), new_sender(PATH, last, other, six), seals(PATH, last, spi(other, 4)),]
    );
    assert_eq!(state.outer_remote(PATH), Some(six));
    assert_eq!(state.remote(PATH), Some(to().into()));
    assert_eq!(acted(|actions| state.remove_outbound(PATH, actions)), [delete(last, to())]);
    assert!(state.remote(PATH).is_none() && state.has(PATH) && !state.has_senders());
}

#[test]
fn to_the_other_address_family_there_is_no_way_but_another_key() {
    let mut state = ChannelState::new(6786);
    send(&mut state, PATH, spi(ID, 0), at(6784));
    let six: SocketAddr = "[2001:db8::2]:6786".parse().unwrap();
    let exhausted = EngineEvent::OutboundExhausted { path: PATH, spi: spi(ID, 0) };
    assert_eq!(set_remote(&mut state, six), [delete(SENDER, to()), Action::Tell(exhausted)]);
    assert!(!state.has_senders() && !state.has(PATH));
    assert_eq!(set_remote(&mut state, six), []);
    let next = SENDER + 0x100;
    assert_eq!(
        send(&mut state, PATH, spi(ID, 1), six),
        [new_sender(PATH, next, ID, six), seals(PATH, next, spi(ID, 1))]
    );
    // A receiver stays: it takes packets of both families.
    receive(&mut state, PATH, spi(ID, 5));
    assert_eq!(set_remote(&mut state, at(9)).len(), 2);
    assert!(state.has_inbound(spi(ID, 5)) && !state.has_senders());
}

#[test]
fn a_float_is_told_and_again_when_the_path_sends_elsewhere() {
    let mut state = ChannelState::new(6786);
    receive(&mut state, PATH, spi(ID, 0));
    assert_eq!(state.floated(ID, at(9)), None, "nothing is sent yet");
    let actions = send(&mut state, PATH, spi(ID, 0), at(6784));
    assert_eq!(actions.last(), Some(&Action::Tell(moved_to(PATH, at(9)))));
    let change = |port| [Action::Channel(Change::SetRemote(PATH, SENDER, at(port)))];
    assert_eq!(set_remote(&mut state, at(9)), change(9));
    assert_eq!(set_remote(&mut state, at(9)), []);
    assert_eq!(state.floated(ID, at(9)), None);
    let mapped = SocketAddr::new("::ffff:192.0.2.2".parse().unwrap(), 10);
    assert_eq!(state.floated(ID, mapped), Some(moved_to(PATH, at(10))));
    assert_eq!(state.floated(SENDER, at(11)), None);
    // Path choice doubts the address and tries the one that the peer has named.
    assert_eq!(set_remote(&mut state, at(6784)), change(6784));
    let reading =
        |state: &mut ChannelState, packets| state.read(&[heard(packets, at(10)), sealed(0, 0)]);
    let told = [Action::Tell(moved_to(PATH, at(10)))];
    assert_eq!(reading(&mut state, 0), [], "nothing came");
    assert_eq!(reading(&mut state, 5), told, "packets still come from there");
    assert_eq!(reading(&mut state, 5), []);
    assert_eq!(reading(&mut state, 6), told);
    set_remote(&mut state, at(10));
    assert_eq!(reading(&mut state, 7), []);
}

#[test]
fn limits_are_told_once_and_a_key_that_is_used_up_goes() {
    let mut state = ChannelState::new(6786);
    send(&mut state, PATH, spi(ID, 0), at(6784));
    state.key_began(PATH, spi(ID, 0), Sealed::of(&sealed(10, 500)));
    state.key_began(PATH, spi(ID, 7), Sealed::of(&sealed(0, 0)));
    let reading = |state: &mut ChannelState, packets| state.read(&[sealed(packets, 500)]);
    let near = |key| Action::Tell(EngineEvent::OutboundNearLimit { path: PATH, spi: spi(ID, key) });
    let gone = |key| EngineEvent::OutboundExhausted { path: PATH, spi: spi(ID, key) };
    assert_eq!(reading(&mut state, 12), []);
    assert_eq!(reading(&mut state, 13), [near(0)]);
    assert_eq!(reading(&mut state, 13), []);
    let exhausted = |key| [delete_key(SENDER, Slot::Primary), Action::Tell(gone(key))];
    assert_eq!(reading(&mut state, 14), exhausted(0));
    assert_eq!(reading(&mut state, 20), []);
    assert_eq!(state.key_gone(SENDER, 0), None, "told before");
    assert_eq!(state.sender_keys().count(), 0);
    // Packets sealed earlier do not count for the next key.
    send(&mut state, PATH, spi(ID, 1), at(6784));
    assert_eq!(state.sender_keys().collect::<Vec<_>>(), [(SENDER, 1)]);
    assert_eq!(reading(&mut state, 22), []);
    assert_eq!(reading(&mut state, 24), exhausted(1));
    // The device itself ends a key whose packet ids are used up.
    send(&mut state, PATH, spi(ID, 2), at(6784));
    assert_eq!(state.key_gone(SENDER, 1), None, "of the key before");
    assert_eq!(state.key_gone(SENDER, 2), Some(gone(2)));
    assert_eq!(state.key_gone(SENDER, 2), None);
}

#[test]
fn bytes_are_judged_by_the_blocks_that_they_may_cost() {
    let mut state = ChannelState::new(6786);
    let sa = OutboundSa { packets_soft: u64::MAX, packets_hard: u64::MAX, ..outbound(spi(ID, 0)) };
    state.install_outbound(PEER, PATH, &sa, at(6784), &mut Vec::new());
    // One block for the packet, 938 for its contents.
    assert_eq!(state.read(&[sealed(1, 15_000)]), []);
    let spi = sa.spi;
    let near = Action::Tell(EngineEvent::OutboundNearLimit { path: PATH, spi });
    assert_eq!(state.read(&[sealed(1, 16_000)]), [near]);
    let gone = Action::Tell(EngineEvent::OutboundExhausted { path: PATH, spi });
    assert_eq!(state.read(&[sealed(1_001, 16_000)]), [delete_key(SENDER, Slot::Primary), gone]);
}

#[test]
fn ids_of_senders_and_of_receivers_never_meet() {
    let mut state = ChannelState::new(6786);
    let mut ids = BTreeSet::new();
    let mut add = |state: &mut ChannelState, number: u32| {
        let mut bytes = [0; 32];
        bytes[..4].copy_from_slice(&number.to_be_bytes());
        let (peer, path) = (PeerId::from_bytes(bytes), PathId(number));
        let sa = outbound(spi(ID, 0));
        let actions = acted(|actions| {
            state.install_outbound(peer, path, &sa, at(6784), actions);
        });
        let Action::Channel(Change::NewPeer(_, spec)) = &actions[0] else { panic!("{actions:?}") };
        assert!(ids.insert(spec.id), "{:x} is given twice", spec.id);
        assert!(spec.id & 0xff == 0xff && spec.id < 0xff_ffff, "{:x}", spec.id);
    };
    for number in 10..310 {
        add(&mut state, number);
    }
    // At the end of the numbers it begins again, with those that are free.
    state.next = SENDERS_MAX - 1;
    add(&mut state, 310);
    add(&mut state, 311);
    let refused = failed(PATH, "the id of its inbound SA is a sender's");
    assert_eq!(receive(&mut state, PATH, spi(ID | 0xff, 0)), [refused]);
    assert!(!state.has(PATH));
}

#[test]
fn a_path_takes_the_place_of_the_one_that_it_follows() {
    let mut state = ChannelState::new(6786);
    receive(&mut state, PATH, spi(ID, 0));
    send(&mut state, PATH, spi(ID, 0), at(6784));
    // Another engine of the peer's has other addresses.
    let vector = InboundSa { remote_engine: EngineKind::Userspace, ..inbound(spi(ID + 0x100, 0)) };
    let beside = acted(|it| state.install_inbound(PEER, PathId(3), &vector, LINK, it));
    assert_eq!(beside.len(), 2);
    let other = ID + 0x200;
    assert_eq!(
        receive(&mut state, NEXT, spi(other, 0)),
        [
            delete(ID, from()),
            new_receiver(NEXT, other, 6786),
            opens(NEXT, other, Slot::Primary, spi(other, 0)),
        ]
    );
    let next = SENDER + 0x100;
    assert_eq!(
        send(&mut state, NEXT, spi(other, 0), at(6784)),
        [
            delete(SENDER, to()),
            new_sender(NEXT, next, other, at(6784)),
            seals(NEXT, next, spi(other, 0)),
        ]
    );
    assert!(!state.has(PATH) && state.has(NEXT) && state.has(PathId(3)));
    assert_eq!(stop_receiving(&mut state, spi(ID, 0)), []);
    let vector = address(&PEER, EngineKind::Userspace, TunnelWay::From);
    let sources: Vec<IpAddr> = state.sources(PEER).into_iter().collect();
    assert_eq!(sources, [IpAddr::V6(vector), IpAddr::V6(from())]);
}

#[test]
fn a_peer_that_is_gone_is_its_paths_failure_once() {
    let mut state = ChannelState::new(6786);
    receive(&mut state, PATH, spi(ID, 0));
    send(&mut state, PATH, spi(ID, 0), at(6784));
    let found = [heard(0, at(6784)), sealed(0, 0), PeerState { id: 99, ..PeerState::default() }];
    assert_eq!((state.read(&found), state.surplus(&found)), (vec![], vec![99]));
    let gone = failed(PATH, "one of its peers in the data channel is gone");
    assert_eq!(state.read(&found[1..]), [gone]);
    assert_eq!(state.read(&found[1..]), []);
    assert_eq!(stop_receiving(&mut state, spi(ID, 0)), []);
    assert_eq!(acted(|actions| state.remove_outbound(PATH, actions)), [delete(SENDER, to())]);
    assert!(!state.has(PATH));
    // By a notice.
    receive(&mut state, PATH, spi(ID, 0));
    assert_eq!(state.peer_gone(SENDER), None);
    assert_eq!(state.peer_gone(ID), Some(PATH));
    assert_eq!(state.peer_gone(ID), None);
}

#[test]
fn a_forgotten_peer_and_a_lost_device_leave_nothing() {
    let mut state = ChannelState::new(6786);
    receive(&mut state, PATH, spi(ID, 0));
    send(&mut state, PATH, spi(ID, 0), at(6784));
    state.set_mtu(PATH, 1_300);
    assert_eq!(state.mtu(PATH), Some(1_300));
    assert_eq!(state.paths().collect::<Vec<_>>(), [(PEER, PATH)]);
    let name = |address: Ipv6Addr, spi| StateId { destination: address.into(), spi };
    let sas: Vec<_> = state.sas().collect();
    let expected = [(name(from(), ID), (PEER, Way::In)), (name(to(), SENDER), (PEER, Way::Out))];
    assert_eq!(sas, expected);
    assert_eq!(
        acted(|actions| state.remove_peer(PEER, actions)),
        [delete(SENDER, to()), delete(ID, from())]
    );
    assert_eq!((state.knows(&PEER), state.sas().count()), (false, 0));
    receive(&mut state, PATH, spi(ID, 0));
    assert_eq!(state.lost(), [PATH]);
    assert_eq!((state.lost(), stop_receiving(&mut state, spi(ID, 0))), (vec![], vec![]));
}
