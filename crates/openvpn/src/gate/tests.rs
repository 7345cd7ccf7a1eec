//! Who gets in, who gets an answer, and who gets neither.
#![allow(clippy::unwrap_used)]

use proptest::prelude::*;

use super::*;
use crate::device::KeyBlock;
use crate::testing::hex;
use crate::wrap::SERVER_KEY_BYTES;

const UNIX_S: u64 = 1_800_000_000;

fn remote() -> SocketAddr {
    "192.0.2.7:40000".parse().unwrap()
}

fn gate(now: Instant, config: GateConfig) -> Gate {
    Gate::new(now, config, &[9; 32])
}

fn client_session() -> SessionId {
    SessionId::new(*b"client!!").unwrap()
}

fn plain(opcode: Opcode, packet_id: Option<u32>, own: Option<(SessionId, u32)>) -> Vec<u8> {
    let packet = ControlPacket {
        opcode,
        key_id: KeyId::FIRST,
        session: client_session(),
        acks: Acks::new(own.map(|(_, id)| id).as_slice()).unwrap(),
        remote_session: own.map(|(session, _)| session),
        packet_id,
        payload: &[],
    };
    let mut bytes = Vec::new();
    packet.write(&mut bytes).unwrap();
    bytes
}

fn reset() -> Vec<u8> {
    plain(Opcode::HardResetClientV2, Some(0), None)
}

/// The session id in the answer to a reset.
fn answered(gate: &mut Gate, now: Instant) -> SessionId {
    match gate.handle_datagram(now, UNIX_S, remote(), &reset()).unwrap() {
        Gated::Answer(bytes) => ControlPacket::parse(&bytes).unwrap().session,
        other => panic!("{other:?}"),
    }
}

fn admitted(result: Result<Gated, Refusal>) -> Box<Admission> {
    match result {
        Ok(Gated::Admit(admission)) => admission,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_reset_is_answered_as_openvpn_answers_it() {
    let now = Instant::now();
    let mut gate = gate(now, GateConfig::default());
    let bytes = hex("38 6891923fa3103437 00 00000000");
    let Gated::Answer(answer) = gate.handle_datagram(now, UNIX_S, remote(), &bytes).unwrap() else {
        panic!("no answer");
    };
    assert_eq!((answer.len(), answer[0]), (26, 0x40));
    assert_eq!(answer[9..], hex("01 00000000 6891923fa3103437 00000000"));
}

#[test]
fn who_brings_the_cookie_back_is_admitted() {
    let now = Instant::now();
    let mut gate = gate(now, GateConfig::default());
    for (opcode, id) in [(Opcode::AckV1, None), (Opcode::ControlV1, Some(1))] {
        let mut gate = self::gate(now, GateConfig::default());
        let own = answered(&mut gate, now);
        let bytes = plain(opcode, id, Some((own, 0)));
        let admission = admitted(gate.handle_datagram(now, UNIX_S, remote(), &bytes));
        assert_eq!((admission.own, admission.remote()), (own, client_session()));
        assert_eq!(admission.next_replay_id.number, 2, "the answer had the first");
        assert!(!admission.must_reset);
    }
    let own = answered(&mut gate, now);
    let refused = |gate: &mut Gate, remote, bytes: &[u8]| {
        gate.handle_datagram(now, UNIX_S, remote, bytes).unwrap_err()
    };
    let ack = plain(Opcode::AckV1, None, Some((own, 0)));
    let other = "192.0.2.7:40001".parse().unwrap();
    assert_eq!(refused(&mut gate, other, &ack), Refusal::BadCookie);
    let forged = SessionId::new([3; 8]).unwrap();
    let ack = plain(Opcode::AckV1, None, Some((forged, 0)));
    assert_eq!(refused(&mut gate, remote(), &ack), Refusal::BadCookie);
    let late = plain(Opcode::ControlV1, Some(2), Some((own, 0)));
    assert_eq!(refused(&mut gate, remote(), &late), Refusal::NotFirst(Opcode::ControlV1));
    let without = plain(Opcode::ControlV1, Some(1), None);
    assert_eq!(refused(&mut gate, remote(), &without), Refusal::BadCookie);
    // A real packet that must open no session.
    let bytes = hex("28 aeb9afe1f01d79c8 03 00000000 00000001 00000002 dd85db535623b02e");
    assert_eq!(refused(&mut gate, remote(), &bytes), Refusal::NotFirst(Opcode::AckV1));
}

#[test]
fn a_cookie_is_good_for_a_handshake_and_no_longer() {
    let started = Instant::now();
    let config = GateConfig { hand_window: Duration::from_secs(30), ..GateConfig::default() };
    // The known answers of OpenVPN's unit test, which has slots of 15 s.
    let at = |time_s: u64| started + Duration::from_secs(time_s);
    for (time_s, is_good) in
        [(1_002, true), (1_010, true), (1_022, true), (980, false), (1_040, false)]
    {
        let mut gate = gate(started, config.clone());
        let own = answered(&mut gate, at(1_000));
        let ack = plain(Opcode::AckV1, None, Some((own, 0)));
        let result = gate.handle_datagram(at(time_s), UNIX_S, remote(), &ack);
        assert_eq!(result.is_ok(), is_good, "{time_s}");
    }
}

#[test]
fn a_cookie_opens_one_session_however_often_its_packet_comes() {
    let started = Instant::now();
    let mut gate = gate(started, GateConfig::default());
    let at = |time_s: u64| started + Duration::from_secs(time_s);
    let own = answered(&mut gate, at(0));
    let control = plain(Opcode::ControlV1, Some(1), Some((own, 0)));
    let _ = admitted(gate.handle_datagram(at(0), UNIX_S, remote(), &control));
    let ack = plain(Opcode::AckV1, None, Some((own, 0)));
    for time_s in [0, 1, 30, 59, 89] {
        for bytes in [&control, &ack] {
            let refused = gate.handle_datagram(at(time_s), UNIX_S, remote(), bytes);
            assert_eq!(refused.unwrap_err(), Refusal::Repeated, "{time_s}");
        }
    }
    // The same client that begins anew is another matter, and what is over is forgotten.
    let again = answered(&mut gate, at(100));
    let control = plain(Opcode::ControlV1, Some(1), Some((again, 0)));
    let _ = admitted(gate.handle_datagram(at(100), UNIX_S, remote(), &control));
    assert_eq!(gate.admitted.len(), 1);
}

#[test]
fn a_flood_of_resets_is_answered_up_to_the_rate() {
    let now = Instant::now();
    let mut gate = gate(now, GateConfig { resets_max: 3, ..GateConfig::default() });
    let answers = |gate: &mut Gate, now| {
        (0..1_000_u64)
            .filter(|number| {
                let mut bytes = reset();
                bytes[1..9].copy_from_slice(&(number + 1).to_be_bytes());
                gate.handle_datagram(now, UNIX_S, remote(), &bytes).is_ok()
            })
            .count()
    };
    assert_eq!(gate.shut_until(now), None);
    assert_eq!(answers(&mut gate, now), 3);
    let end = now + Duration::from_secs(10);
    assert_eq!(gate.shut_until(now), Some(end));
    gate.handle_connected();
    assert_eq!(gate.shut_until(now), None);
    assert_eq!(answers(&mut gate, now), 1);
    assert_eq!((gate.shut_until(now), gate.shut_until(end)), (Some(end), None));
    assert_eq!(answers(&mut gate, end), 3);
    let refused = gate.handle_datagram(now, UNIX_S, remote(), &reset()).unwrap_err();
    assert_eq!(refused, Refusal::Rate);
}

fn crypt_v2(always_cookie: bool) -> (GateConfig, WrapKeys, Vec<u8>) {
    let server_key = ServerKey::new(&[5; SERVER_KEY_BYTES]);
    let key = KeyBlock::new(std::array::from_fn(|at| at as u8));
    let wrapped = server_key.wrap(&key, &Metadata::User(b"phone".to_vec())).unwrap();
    let client_keys = Some(Arc::new(server_key));
    let config = GateConfig { wrap: None, client_keys, always_cookie, ..GateConfig::default() };
    (config, WrapKeys::tls_crypt(&key, Side::Client), wrapped)
}

fn wrapped(keys: &WrapKeys, plain: &[u8], number: u32, client_key: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    keys.wrap(plain, ReplayId { time_s: 1, number }, &mut out);
    out.extend_from_slice(client_key);
    out
}

#[test]
fn a_client_key_is_asked_for_again_and_the_second_packet_is_admitted() {
    let now = Instant::now();
    let (config, keys, wkc) = crypt_v2(true);
    let mut gate = gate(now, config);
    let first = plain(Opcode::HardResetClientV3, Some(0), None);
    let bytes = wrapped(&keys, &first, EARLY_NEGOTIATION + 1, &wkc);
    let Ok(Gated::Answer(answer)) = gate.handle_datagram(now, UNIX_S, remote(), &bytes) else {
        panic!("no answer");
    };
    let mut opened = Vec::new();
    keys.unwrap(&answer, &mut opened).unwrap();
    let reset = ControlPacket::parse(&opened).unwrap();
    assert_eq!(reset.payload, RESEND_CLIENT_KEY);
    let second = plain(Opcode::ControlWkcV1, Some(1), Some((reset.session, 0)));
    let bytes = wrapped(&keys, &second, EARLY_NEGOTIATION + 2, &wkc);
    let admission = admitted(gate.handle_datagram(now, UNIX_S, remote(), &bytes));
    assert_eq!(admission.metadata, Some(Metadata::User(b"phone".to_vec())));
    assert!(!admission.must_reset);
    let old = wrapped(&keys, &first, 1, &wkc);
    let refused = gate.handle_datagram(now, UNIX_S, remote(), &old).unwrap_err();
    assert_eq!(refused, Refusal::NoEarlyNegotiation);
}

#[test]
fn an_older_client_with_a_client_key_gets_its_session_at_once() {
    let now = Instant::now();
    let (config, keys, wkc) = crypt_v2(false);
    let mut gate = gate(now, config);
    let first = plain(Opcode::HardResetClientV3, Some(0), None);
    let bytes = wrapped(&keys, &first, 1, &wkc);
    let admission = admitted(gate.handle_datagram(now, UNIX_S, remote(), &bytes));
    assert!(admission.must_reset);
    assert_eq!(admission.next_replay_id.number, 1);
    let mut foreign = bytes.clone();
    let end = foreign.len();
    foreign[end - 20] ^= 1;
    let refused = gate.handle_datagram(now, UNIX_S, remote(), &foreign).unwrap_err();
    assert_eq!(refused, Refusal::Wrap(WrapError::ForeignClientKey));
    let refused = gate.handle_datagram(now, UNIX_S, remote(), &reset()).unwrap_err();
    assert!(matches!(refused, Refusal::OtherWrapping(_)));
}

#[test]
fn a_connection_is_admitted_by_its_reset_alone() {
    let now = Instant::now();
    let mut gate = gate(now, GateConfig { resets_max: 1, ..GateConfig::default() });
    let admission = gate.handle_stream(now, UNIX_S, [4; 8], &reset()).unwrap();
    assert!(admission.must_reset);
    let second = gate.handle_stream(now, UNIX_S, [4; 8], &reset());
    assert_eq!(second.unwrap_err(), Refusal::Rate);
    let ack = plain(Opcode::AckV1, None, Some((client_session(), 0)));
    let other = gate.handle_stream(now, UNIX_S, [4; 8], &ack);
    assert_eq!(other.unwrap_err(), Refusal::NotFirst(Opcode::AckV1));
}

proptest! {
    #[test]
    fn no_bytes_get_in_by_themselves(
        first in prop::sample::select(vec![0x20_u8, 0x28, 0x38, 0x40, 0x50, 0x58, 0x48, 0x19]),
        rest in prop::collection::vec(any::<u8>(), 0..400),
    ) {
        let now = Instant::now();
        let (config, ..) = crypt_v2(false);
        let mut gate = gate(now, GateConfig { wrap: Some(WrapKeys::None), ..config });
        let bytes = [&[first], &rest[..]].concat();
        let admitted = gate.handle_datagram(now, UNIX_S, remote(), &bytes);
        prop_assert!(!matches!(admitted, Ok(Gated::Admit(_))));
        let _ = gate.handle_stream(now, UNIX_S, [1; 8], &bytes);
    }
}
