//! What two ends make of each other.

use std::time::Duration;

use rustls::version::{TLS12, TLS13};
use weft_crypto::DataCipher;

use super::net::{Net, Setup};
use crate::control::{Acks, ControlPacket};
use crate::data::PeerNumber;
use crate::device::{KeyBlock, Side};
use crate::messages::{
    AuthFailure, Challenge, Message, MessageReader, PasswordForm, PushUpdateOption, Secret,
    push_reply,
};
use crate::negotiation::Refusal;
use crate::opcode::{KeyId, Opcode, SessionId};
use crate::session::{
    Acceptance, Dropped, EndReason, Event, Features, MESSAGES_TAKEN_MAX, SOFT_RESET_INTERVAL_S,
    SessionError, Timing,
};
use crate::wrap::{AuthDigest, AuthDirection, Metadata, WrapKeys};

const MINUTE: Duration = Duration::from_secs(60);

fn key(byte: u8) -> KeyBlock {
    KeyBlock::new(std::array::from_fn(|at| at as u8 ^ byte))
}

fn crypt() -> Setup {
    let (server, client) =
        (WrapKeys::tls_crypt(&key(0), Side::Server), WrapKeys::tls_crypt(&key(0), Side::Client));
    Setup::with_wrap(server, client)
}

fn auth() -> Setup {
    let end = |direction| WrapKeys::tls_auth(&key(0), AuthDigest::Sha1, direction);
    Setup::with_wrap(end(AuthDirection::Zero), end(AuthDirection::One))
}

fn no_features() -> Features {
    Features { exporter: false, dynamic_wrap: false, epochs: false }
}

fn acceptance() -> Acceptance {
    Acceptance { peer: PeerNumber::new(3).unwrap(), options: vec!["ping 10".to_owned()] }
}

#[test]
fn two_ends_connect_with_each_wrapping_transport_and_version_of_tls() {
    for is_stream in [false, true] {
        for version in [&TLS12, &TLS13] {
            for mut setup in [Setup::default(), auth(), crypt(), Setup::with_crypt_v2()] {
                setup.client_versions = vec![version];
                setup.is_stream = is_stream;
                let mut net = Net::new(setup);
                net.run_until_connected();
                assert!(net.agree_on(0), "stream {is_stream}, {version:?}");
                assert_eq!(net.client_said.pushed, ["ifconfig 10.8.0.2 255.255.255.0"]);
                let keys = net.client_said.primary.as_ref().unwrap();
                assert_eq!((keys.cipher, keys.peer.get()), (DataCipher::Aes128Gcm, 7));
                assert_eq!(net.client.remote(), Some(net.server().own()));
            }
        }
    }
}

#[test]
fn ends_without_the_exporter_agree_by_openvpns_derivation() {
    for (client, server) in
        [(no_features(), Features::default()), (Features::default(), no_features())]
    {
        let mut net = Net::new(Setup {
            client_features: client,
            server_features: server,
            ..Setup::default()
        });
        net.run_until_connected();
        assert!(net.agree_on(0));
    }
    let mut net = Net::new(Setup {
        client_features: Features { epochs: true, ..Features::default() },
        server_features: Features { epochs: true, ..Features::default() },
        ..Setup::default()
    });
    net.run_until_connected();
    assert!(net.server_said.primary.as_ref().unwrap().has_epochs);
}

#[test]
fn the_caller_learns_who_the_client_is() {
    let mut net = Net::new(Setup { accepts: false, ..Setup::with_crypt_v2() });
    assert!(net.run(MINUTE, |net| !net.server_said.asked.is_empty()));
    let request = net.server_said.asked.pop().unwrap();
    assert_eq!(request.certificates.len(), 1);
    assert!(!request.is_renewal);
    assert_eq!(request.metadata, Some(Metadata::User(b"phone".to_vec())));
    assert_eq!(request.peer_info.version(), Some("2.6.0"));
    assert!(format!("{:?}", request.credentials).contains("anna"));
    let now = net.now;
    net.server().accept(now, acceptance()).unwrap();
    let again = net.server().accept(now, acceptance());
    assert_eq!(again, Err(SessionError::NothingToDecide));
    net.run_until_connected();
    assert_eq!(net.client_said.pushed, ["ping 10"]);
}

#[test]
fn a_denied_client_is_told_why() {
    let mut net = Net::new(Setup { accepts: false, ..crypt() });
    assert!(net.run(MINUTE, |net| !net.server_said.asked.is_empty()));
    let (now, failure) = (net.now, AuthFailure::Text("not today".to_owned()));
    net.server().deny(now, failure.clone()).unwrap();
    assert!(net.run(MINUTE, |net| net.client_said.ended.is_some()));
    assert_eq!(net.client_said.ended, Some(EndReason::AuthFailed(failure)));
    assert_eq!(net.server_said.ended, Some(EndReason::Denied));
    let now = net.now + MINUTE;
    assert!(net.server().is_drained(now) && net.client.is_drained(now));
    assert_eq!(net.server().poll_timeout(now), None);
}

#[test]
fn a_client_waits_while_its_user_proves_himself() {
    let mut net = Net::new(Setup { accepts: false, ..Setup::default() });
    assert!(net.run(MINUTE, |net| !net.server_said.asked.is_empty()));
    let now = net.now;
    net.server().pend(now, MINUTE * 5).unwrap();
    net.server().send(now, &Message::InfoPre("CR_TEXT:R:code?".to_owned())).unwrap();
    assert!(net.run(MINUTE, |net| net.client_said.messages.len() == 2));
    assert_eq!(net.client_said.messages[0], Message::AuthPending { timeout_s: Some(300) });
    net.run(MINUTE * 3, |_| false);
    let now = net.now;
    net.client.send(now, &Message::ChallengeResponse(Secret::new("1234"))).unwrap();
    assert!(net.run(MINUTE, |net| !net.server_said.messages.is_empty()));
    assert_eq!(net.server_said.messages, [Message::ChallengeResponse(Secret::new("1234"))]);
    let now = net.now;
    net.server().accept(now, acceptance()).unwrap();
    net.run_until_connected();
}

#[test]
fn a_client_that_reads_no_keywords_is_told_no_time() {
    let mut net = Net::new(Setup { accepts: false, ..Setup::default() });
    assert!(net.run(MINUTE, |net| !net.server_said.asked.is_empty()));
    let agreed = net.server().agreed.as_mut().unwrap();
    agreed.server.as_mut().unwrap().takes_keywords = false;
    let now = net.now;
    net.server().pend(now, MINUTE * 5).unwrap();
    assert!(net.run(MINUTE, |net| !net.client_said.messages.is_empty()));
    assert_eq!(net.client_said.messages, [Message::AuthPending { timeout_s: None }]);
}

#[test]
fn either_end_renews_keys_and_their_ids_go_round() {
    for setup in [Setup::default(), crypt(), Setup::with_crypt_v2()] {
        let mut net = Net::new(setup);
        net.run_until_connected();
        for round in 1..=9_u8 {
            let now = net.now;
            match round % 2 {
                0 => net.server().renegotiate(now).unwrap(),
                _ => net.client.renegotiate(now).unwrap(),
            }
            let id = (round - 1) % 7 + 1;
            assert!(net.run(MINUTE, |net| net.agree_on(id)), "round {round}");
            let sealing = net.server_said.primary.as_ref().unwrap().key_id.get();
            assert_ne!(sealing, id, "the new key has not settled");
            net.run(MINUTE + MINUTE / 6, |_| false);
            for said in [&net.client_said, &net.server_said] {
                assert_eq!(said.primary.as_ref().unwrap().key_id.get(), id);
                assert!(said.secondary.is_some(), "the old key is still received");
            }
        }
        let seven = Duration::from_secs(3_000);
        net.run(seven, |_| false);
        assert!(net.client_said.ended.is_none() && net.server_said.ended.is_none());
    }
}

#[test]
fn a_peer_that_renews_often_gets_nothing_sealed_by_a_key_that_it_has_forgotten() {
    let mut net = Net::new(Setup::default());
    net.run_until_connected();
    for id in 1..=6_u8 {
        net.run(MINUTE / 12, |_| false);
        // OpenVPN keeps one key before the current one; it forgets that with the reset.
        let sealing = net.server_said.primary.as_ref().unwrap().key_id.get();
        assert_eq!(sealing, id - 1, "half of the time between two keys has settled it");
        let now = net.now;
        net.client.renegotiate(now).unwrap();
        assert!(net.run(MINUTE, |net| net.agree_on(id)), "key {id}");
    }
    // At once, too, the next key begins.
    let now = net.now;
    net.client.renegotiate(now).unwrap();
    assert!(net.run(MINUTE, |net| net.agree_on(7)));
    assert_eq!(net.server_said.primary.as_ref().unwrap().key_id.get(), 6);
}

#[test]
fn both_ends_may_begin_a_new_key_at_once() {
    let mut net = Net::new(crypt());
    net.run_until_connected();
    let now = net.now;
    net.client.renegotiate(now).unwrap();
    net.server().renegotiate(now).unwrap();
    assert_eq!(net.client.renegotiate(now), Err(SessionError::NoKey));
    assert!(net.run(MINUTE, |net| net.agree_on(1)));
}

#[test]
fn keys_are_renewed_by_age_and_old_ones_go() {
    let timing = Timing {
        renegotiate_after: Some(MINUTE * 10),
        transition_window: MINUTE * 5,
        ..Timing::default()
    };
    let mut net =
        Net::new(Setup { server_timing: timing, client_timing: timing, ..Setup::default() });
    net.run_until_connected();
    let began = net.now;
    assert!(net.run(MINUTE * 11, |net| net.agree_on(1)));
    let after = net.now - began;
    assert!((MINUTE * 9..=MINUTE * 10).contains(&after), "{after:?}");
    net.run(MINUTE * 6, |_| false);
    assert!(net.client_said.secondary.is_none() && net.server_said.secondary.is_none());
    assert!(net.run(MINUTE * 11, |net| net.agree_on(2)));
}

#[test]
fn a_client_is_asked_about_and_can_be_denied_with_each_new_key() {
    let mut net = Net::new(Setup::default());
    net.run_until_connected();
    net.decide_by_hand();
    let now = net.now;
    net.client.renegotiate(now).unwrap();
    assert!(net.run(MINUTE, |net| !net.server_said.asked.is_empty()));
    assert!(net.server_said.asked[0].is_renewal);
    assert_eq!(net.server_said.asked[0].key_id.get(), 1);
    let now = net.now;
    net.server().deny(now, AuthFailure::Session("expired".to_owned())).unwrap();
    assert!(net.run(MINUTE, |net| net.client_said.ended.is_some()));
    let failed = AuthFailure::Session("expired".to_owned());
    assert_eq!(net.client_said.ended, Some(EndReason::AuthFailed(failed)));
    assert!(net.server_said.secondary.is_none());
}

#[test]
fn each_end_says_goodbye() {
    let restart =
        Message::Restart { preserve: true, next_remote: false, text: "maintenance".to_owned() };
    for (farewell, by_server, expected) in [
        (Message::Exit, false, EndReason::PeerExit),
        (Message::Exit, true, EndReason::PeerExit),
        (Message::Halt("gone".to_owned()), true, EndReason::Halt("gone".to_owned())),
        (
            restart,
            true,
            EndReason::Restart {
                preserve: true,
                next_remote: false,
                text: "maintenance".to_owned(),
            },
        ),
    ] {
        let mut net = Net::new(crypt());
        net.run_until_connected();
        let now = net.now;
        if by_server {
            assert!(net.server().close(now, &farewell));
        } else {
            assert!(net.client.close(now, &farewell));
        }
        net.run(MINUTE, |net| net.client_said.ended.is_some() && net.server_said.ended.is_some());
        let (teller, told) = match by_server {
            true => (&net.server_said.ended, &net.client_said.ended),
            false => (&net.client_said.ended, &net.server_said.ended),
        };
        assert_eq!((teller, told), (&Some(EndReason::Closed), &Some(expected)));
    }
}

#[test]
fn a_message_waits_for_the_key_that_is_being_agreed_on() {
    let mut net = Net::new(Setup::default());
    net.run_until_connected();
    let now = net.now;
    net.server().renegotiate(now).unwrap();
    let update = Message::Info("hello".to_owned());
    net.server().send(now, &update).unwrap();
    assert!(net.run(MINUTE, |net| !net.client_said.messages.is_empty()));
    assert_eq!(net.client_said.messages, [update]);
    for _ in 0..=super::super::MESSAGES_MAX {
        let now = net.now;
        if net.server().renegotiate(now).is_ok() {
            continue;
        }
        let _ = net.server().send(now, &Message::Exit);
    }
    let error = net.server().send(now, &Message::Exit).unwrap_err();
    assert!(matches!(error, SessionError::TooManyMessages(_)), "{error}");
}

#[test]
fn a_client_of_another_authority_ends_by_tls_at_both_ends() {
    for version in [&TLS12, &TLS13] {
        let setup = Setup { is_foreign: true, client_versions: vec![version], ..Setup::default() };
        let mut net = Net::new(setup);
        let is_over = net.run(MINUTE * 2, |net| {
            net.client_said.ended.is_some() && net.server_said.ended.is_some()
        });
        assert!(is_over);
        assert!(matches!(net.client_said.ended, Some(EndReason::Tls(_))));
        assert!(matches!(net.server_said.ended, Some(EndReason::Tls(_))));
        assert!(net.client_said.primary.is_none() && net.server_said.primary.is_none());
    }
}

#[test]
fn a_client_with_another_tls_crypt_key_never_gets_state() {
    let server = WrapKeys::tls_crypt(&key(0), Side::Server);
    let client = WrapKeys::tls_crypt(&key(1), Side::Client);
    let mut net = Net::new(Setup::with_wrap(server, client));
    assert!(net.run(MINUTE * 2, |net| net.client_said.ended.is_some()));
    assert!(net.server.is_none());
    assert_eq!(net.client_said.ended, Some(EndReason::HandshakeTimeout(MINUTE)));
}

#[test]
fn ends_without_a_common_cipher_say_so() {
    let mut net =
        Net::new(Setup { client_ciphers: vec![DataCipher::Aes192Gcm], ..Setup::default() });
    assert!(net.run(MINUTE, |net| net.client_said.ended.is_some()));
    let text = "Data channel cipher negotiation failed (no shared cipher)".to_owned();
    let failed = EndReason::AuthFailed(AuthFailure::Text(text));
    assert_eq!(net.client_said.ended, Some(failed));
    assert!(matches!(
        net.server_said.ended,
        Some(EndReason::Refused(Refusal::NoSharedCipher { .. }))
    ));
}

#[test]
fn a_peer_that_falls_silent_ends_the_handshake() {
    let mut net = Net::new(Setup { accepts: false, ..Setup::default() });
    assert!(net.run(MINUTE, |net| !net.server_said.asked.is_empty()));
    net.is_cut = true;
    let began = net.now;
    assert!(net.run(MINUTE * 2, |net| net.server_said.ended.is_some()));
    assert!(matches!(net.server_said.ended, Some(EndReason::HandshakeTimeout(_))));
    assert!(net.now - began <= MINUTE);
    assert!(net.run(MINUTE * 2, |net| net.client_said.ended.is_some()));
    let now = net.now;
    assert_eq!(net.client.renegotiate(now), Err(SessionError::Over));
}

#[test]
fn a_renewal_that_fails_ends_the_session_with_the_old_keys_window() {
    let timing = Timing { transition_window: MINUTE * 10, ..Timing::default() };
    let setup = Setup { client_timing: timing, server_timing: timing, ..Setup::default() };
    let mut net = Net::new(setup);
    net.run_until_connected();
    let began = net.now;
    net.client.renegotiate(began).unwrap();
    net.is_cut = true;
    net.run(MINUTE * 9, |_| false);
    assert!(net.client_said.ended.is_none(), "the old key is good");
    assert_eq!(net.client_said.primary.as_ref().unwrap().key_id.get(), 0);
    assert!(net.run(MINUTE * 5, |net| net.client_said.ended.is_some()));
    assert!(matches!(net.client_said.ended, Some(EndReason::HandshakeTimeout(_))));
    assert_eq!(net.now - began, timing.transition_window);
    assert!(net.server_said.ended.is_none(), "its key is as good as before");
}

#[test]
fn a_renewal_that_fails_is_tried_again() {
    for setup in [Setup::default(), crypt(), Setup::with_crypt_v2()] {
        let mut net = Net::new(setup);
        net.run_until_connected();
        let now = net.now;
        net.client.renegotiate(now).unwrap();
        net.is_cut = true;
        net.run(MINUTE + MINUTE / 2, |_| false);
        net.is_cut = false;
        let hello = Message::Info("by the old key".to_owned());
        let now = net.now;
        net.server().send(now, &hello).unwrap();
        assert!(net.run(MINUTE / 3, |net| !net.client_said.messages.is_empty()));
        assert!(net.run(MINUTE * 3, |net| net.agree_on(1)));
        net.run(MINUTE * 70, |_| false);
        assert!(net.client_said.ended.is_none() && net.server_said.ended.is_none());
    }
}

#[test]
fn junk_in_the_tls_of_a_new_key_costs_no_session() {
    let mut net = Net::new(Setup { server_features: no_features(), ..Setup::default() });
    net.run_until_connected();
    let now = net.now;
    net.client.renegotiate(now).unwrap();
    let next = KeyId::FIRST.next();
    assert!(net.run(MINUTE, |net| net.server.as_ref().unwrap().current.id == next));
    let now = net.now;
    let junk = ControlPacket {
        opcode: Opcode::ControlV1,
        key_id: next,
        session: net.client.own(),
        acks: Acks::default(),
        remote_session: None,
        packet_id: Some(1),
        payload: &[0xff; 40],
    };
    let mut bytes = Vec::new();
    junk.write(&mut bytes).unwrap();
    net.server().handle_datagram(now, &bytes).unwrap();
    assert!(!net.run(MINUTE / 2, |net| net.agree_on(1)));
    assert!(net.run(MINUTE * 4, |net| net.agree_on(2)));
    assert!(net.client_said.ended.is_none() && net.server_said.ended.is_none());
}

#[test]
fn what_only_a_handshake_needs_is_dropped_after_it() {
    let mut net = Net::new(Setup { server_features: no_features(), ..Setup::default() });
    net.run_until_connected();
    let now = net.now;
    net.client.renegotiate(now).unwrap();
    assert!(net.run(MINUTE, |net| net.agree_on(1)));
    net.run(MINUTE * 2, |_| false);
    for end in [net.server.as_ref().unwrap(), &net.client] {
        let sources = &end.current.sources;
        assert!(sources.client.is_none() && sources.server.is_none());
        assert!(end.previous.is_none(), "the old TLS session");
    }
    assert!(net.server_said.secondary.is_some(), "the device still has the old key");
}

#[test]
fn an_attempt_at_a_new_key_that_the_peer_knows_of_uses_up_its_key_id() {
    for by_client in [true, false] {
        let mut net = Net::new(Setup::default());
        net.run_until_connected();
        let now = net.now;
        match by_client {
            true => net.client.renegotiate(now).unwrap(),
            false => net.server().renegotiate(now).unwrap(),
        }
        let next = KeyId::FIRST.next();
        let both_begin =
            |net: &Net| net.client.last_id == next && net.server.as_ref().unwrap().last_id == next;
        assert!(net.run(MINUTE, both_begin));
        net.is_cut = true;
        net.run(MINUTE + MINUTE / 2, |_| false);
        net.is_cut = false;
        assert!(net.run(MINUTE * 3, |net| net.agree_on(2)), "by client: {by_client}");
        assert!(!net.agree_on(1));
        net.run(MINUTE * 70, |_| false);
        assert!(net.client_said.ended.is_none() && net.server_said.ended.is_none());
    }
}

#[test]
fn a_peer_may_pass_over_key_ids_but_never_takes_the_first_again() {
    let mut net = Net::new(Setup { server_features: no_features(), ..Setup::default() });
    net.run_until_connected();
    let now = net.now;
    let first = soft_reset(&net, KeyId::FIRST, 0);
    // A packet of the key that there is; it begins none.
    let _ = net.server().handle_datagram(now, &first);
    assert_eq!(net.server().current.id, KeyId::FIRST);
    let third = KeyId::new(3).unwrap();
    let bytes = soft_reset(&net, third, 0);
    net.server().handle_datagram(now, &bytes).unwrap();
    assert_eq!(net.server().current.id, third);
}

#[test]
fn a_servers_first_answer_counts_under_the_first_key_id_alone() {
    let mut net = Net::new(Setup::default());
    let now = net.now;
    assert!(net.client.poll_transmit(now).is_some());
    let answer = |key_id, own| {
        let packet = ControlPacket {
            opcode: Opcode::HardResetServerV2,
            key_id,
            session: SessionId::new([7; 8]).unwrap(),
            acks: Acks::new(&[0]).unwrap(),
            remote_session: Some(own),
            packet_id: Some(0),
            payload: &[],
        };
        let mut bytes = Vec::new();
        packet.write(&mut bytes).unwrap();
        bytes
    };
    let own = net.client.own();
    for id in 1..=7 {
        let bytes = answer(KeyId::new(id).unwrap(), own);
        let dropped = net.client.handle_datagram(now, &bytes);
        assert_eq!(dropped, Err(Dropped::OtherSession), "{id}");
        assert_eq!(net.client.remote(), None, "{id}");
    }
    let bytes = answer(KeyId::FIRST, own);
    net.client.handle_datagram(now, &bytes).unwrap();
    assert!(net.client.remote().is_some());
}

#[test]
fn no_token_and_no_password_shows_in_debug_output() {
    let secret = "SESS_ID_AT_secret";
    let options = vec!["ping 10".to_owned(), format!("auth-token {secret}")];
    let peer = PeerNumber::new(3).unwrap();
    let long = [format!("auth-token {secret}{}", "x".repeat(300))];
    let challenge = Challenge {
        echo: true,
        has_response: true,
        state: secret.to_owned(),
        user: "anna".to_owned(),
        text: "code?".to_owned(),
    };
    let mut reader = MessageReader::default();
    reader.handle_bytes(b"PUSH_REPLY,auth-token SESS_ID_AT_secret").unwrap();
    let texts = [
        format!("{:?}", Event::Pushed(options.clone())),
        format!("{:?}", Acceptance { peer, options: options.clone() }),
        format!("{:?}", PushUpdateOption::parse(&options[1])),
        format!("{:?}", push_reply(&options)),
        format!("{:?} {}", push_reply(&long), push_reply(&long).unwrap_err()),
        format!("{:?}", push_reply(&[format!("auth-token {secret},")])),
        format!("{:?}", EndReason::AuthFailed(AuthFailure::Challenge(challenge.clone()))),
        EndReason::AuthFailed(AuthFailure::Challenge(challenge.clone())).to_string(),
        format!("{:?}", PasswordForm::parse(challenge.answer("1").expose())),
        format!("{reader:?} {:?}", reader.handle_bytes(b"").unwrap()),
    ];
    for text in texts {
        assert!(
            !text.contains(secret) && !text.contains(&format!("{:?}", secret.as_bytes())),
            "{text}"
        );
    }
}

fn soft_reset(net: &Net, id: KeyId, packet_id: u32) -> Vec<u8> {
    let packet = ControlPacket {
        opcode: Opcode::SoftResetV1,
        key_id: id,
        session: net.client.own(),
        acks: Acks::default(),
        remote_session: None,
        packet_id: Some(packet_id),
        payload: &[],
    };
    let mut bytes = Vec::new();
    packet.write(&mut bytes).unwrap();
    bytes
}

#[test]
fn a_peer_begins_keys_no_faster_than_the_interval() {
    let mut net = Net::new(Setup { server_features: no_features(), ..Setup::default() });
    net.run_until_connected();
    let (now, first) = (net.now, KeyId::FIRST.next());
    let late = soft_reset(&net, first, 1);
    let dropped = net.server().handle_datagram(now, &late);
    assert_eq!(dropped, Err(Dropped::OtherKey(first)), "a new key begins with packet 0");
    net.client.renegotiate(now).unwrap();
    assert!(net.run(Duration::from_secs(1), |net| net.agree_on(1)));
    let (now, second) = (net.now, first.next());
    let early = soft_reset(&net, second, 0);
    let dropped = net.server().handle_datagram(now, &early);
    assert_eq!(dropped, Err(Dropped::TooSoon(second)));
    net.client.renegotiate(now).unwrap();
    assert!(net.run(MINUTE, |net| net.agree_on(2)), "its reset comes again");
    assert!(net.now - now >= Duration::from_secs(SOFT_RESET_INTERVAL_S));
}

#[test]
fn a_flood_of_messages_is_passed_over_and_counted() {
    let mut net = Net::new(Setup::default());
    net.run_until_connected();
    let max = u64::from(MESSAGES_TAKEN_MAX);
    let answer = Message::ChallengeResponse(Secret::new("1"));
    for _ in 0..max + 50 {
        let now = net.now;
        net.client.send(now, &answer).unwrap();
        net.run(Duration::ZERO, |_| false);
    }
    let (taken, passed) = (net.server_said.messages.len(), net.server().messages_passed_over());
    assert_eq!(taken as u64 + passed, max + 50);
    assert!(passed >= 50 && taken > 0, "{taken}, {passed}");
    net.run(MINUTE, |_| false);
    let now = net.now;
    net.client.send(now, &answer).unwrap();
    net.run(MINUTE, |_| false);
    assert_eq!(net.server_said.messages.len(), taken + 1);
}

#[test]
fn two_hundred_options_come_in_several_messages() {
    let options: Vec<String> = (0..200).map(|n| format!("route 10.{n}.0.0 255.255.0.0")).collect();
    let mut net = Net::new(Setup { options: options.clone(), ..crypt() });
    net.run_until_connected();
    assert_eq!(net.client_said.pushed, options);
}

/// More than TLS takes at once.
fn many_options() -> Vec<String> {
    let route = |n: u32| format!("route 10.{}.{}.0 255.255.255.0", n / 256, n % 256);
    (0..4_000).map(route).collect()
}

#[test]
fn four_thousand_options_arrive_as_acknowledgements_come() {
    for is_stream in [false, true] {
        let mut net = Net::new(Setup { options: many_options(), is_stream, ..crypt() });
        net.run_until_connected();
        assert_eq!(net.client_said.pushed, many_options());
        // What comes behind them is not passed over.
        let (now, hello) = (net.now, Message::Info("hello".to_owned()));
        net.server().send(now, &hello).unwrap();
        assert!(net.run(MINUTE, |net| !net.client_said.messages.is_empty()));
        assert_eq!(net.client_said.messages, [hello]);
    }
    for seed in 1..=4 {
        let mut setup = Setup { options: many_options(), seed, mischief: 5, ..crypt() };
        // Only the retransmissions count here, not the time that they may take.
        for timing in [&mut setup.client_timing, &mut setup.server_timing] {
            timing.hand_window = MINUTE * 60;
            timing.renegotiate_after = None;
        }
        setup.gate.hand_window = MINUTE * 60;
        let mut net = Net::new(setup);
        assert!(net.run(MINUTE * 60, |net| net.client_said.is_connected), "seed {seed}");
        assert_eq!(net.client_said.pushed, many_options(), "seed {seed}");
    }
}

#[test]
fn last_words_do_not_wait_behind_options() {
    let mut net = Net::new(Setup { accepts: false, ..crypt() });
    assert!(net.run(MINUTE, |net| !net.server_said.asked.is_empty()));
    let now = net.now;
    let accepted = Acceptance { options: many_options(), ..acceptance() };
    net.server().accept(now, accepted).unwrap();
    let halt = Message::Halt("gone".to_owned());
    assert!(net.server().close(now, &halt));
    assert!(net.run(MINUTE, |net| net.client_said.ended.is_some()));
    assert_eq!(net.client_said.ended, Some(EndReason::Halt("gone".to_owned())));
    assert!(!net.client_said.is_connected);
}

#[test]
fn a_connected_session_is_quiet() {
    let mut net = Net::new(crypt());
    net.run_until_connected();
    net.run(Duration::from_secs(10), |_| false);
    let datagrams = net.datagrams;
    net.run(MINUTE * 20, |_| false);
    assert_eq!(net.datagrams, datagrams);
    assert!(net.server().poll_event().is_none());
}

#[test]
fn a_session_can_move_to_another_thread() {
    fn is_send<T: Send>() {}
    is_send::<crate::session::Session>();
    is_send::<Event>();
}
