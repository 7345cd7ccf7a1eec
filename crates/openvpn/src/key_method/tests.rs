#![allow(clippy::unwrap_used)]

use proptest::prelude::*;

use super::*;

fn client() -> ClientMessage {
    ClientMessage {
        source: ClientKeySource { pre_master: [1; 48], random1: [2; 32], random2: [3; 32] },
        options: "V4,dev-type tun,tls-client".to_owned(),
        credentials: Credentials::Given {
            user: "anna".to_owned(),
            password: Zeroizing::new("pa ss".to_owned()),
        },
        peer_info: PeerInfo::parse("IV_VER=2.6.14\nIV_PROTO=990\n"),
    }
}

fn bytes_of(message: &ClientMessage) -> Vec<u8> {
    let mut bytes = Vec::new();
    message.write(&mut bytes).unwrap();
    bytes
}

#[test]
fn the_layout_is_that_of_openvpn() {
    let bytes = bytes_of(&client());
    assert_eq!(bytes[..5], [0, 0, 0, 0, 2]);
    assert_eq!((bytes[5], bytes[53], bytes[85]), (1, 2, 3));
    assert_eq!(bytes[117..119], [0, 27]);
    assert_eq!(&bytes[119..146], b"V4,dev-type tun,tls-client\0");
    assert_eq!(&bytes[146..153], b"\0\x05anna\0");
    assert_eq!(&bytes[153..161], b"\0\x06pa ss\0");
    let server = ServerMessage {
        source: ServerKeySource { random1: [4; 32], random2: [5; 32] },
        options: "V4".to_owned(),
        peer_info: PeerInfo::default(),
    };
    let mut bytes = Vec::new();
    server.write(&mut bytes).unwrap();
    let tail = [b"\0\x03V4\0".as_slice(), &[0; 6]].concat();
    assert_eq!(bytes, [&[0, 0, 0, 0, 2][..], &[4; 32], &[5; 32], &tail].concat());
    assert_eq!(ServerMessage::read(&bytes).unwrap().unwrap(), (server, bytes.len()));
}

#[test]
fn a_message_cut_inside_a_field_is_awaited() {
    let bytes = bytes_of(&client());
    let ends = [146, 153, 161];
    for cut in 0..bytes.len() {
        let read = ClientMessage::read(&bytes[..cut]).unwrap();
        assert_eq!(read.is_some(), ends.contains(&cut), "cut to {cut} bytes");
    }
    let (message, _) = ClientMessage::read(&bytes[..146]).unwrap().unwrap();
    assert_eq!(message.credentials, Credentials::Missing);
    assert_eq!(message.peer_info, PeerInfo::default());
}

#[test]
fn messages_behind_the_first_are_left() {
    let mut bytes = bytes_of(&client());
    let whole = bytes.len();
    bytes.extend_from_slice(b"PUSH_REQUEST\0");
    assert_eq!(ClientMessage::read(&bytes).unwrap().unwrap(), (client(), whole));
    // An old server says nothing behind its options.
    let head = [&[0, 0, 0, 0, 2][..], &[0; 64], b"\0\x03V4\0"].concat();
    let bytes = [&head[..], b"PUSH_REPLY,ping 10\0"].concat();
    let (message, consumed) = ServerMessage::read(&bytes).unwrap().unwrap();
    assert_eq!((message.options.as_str(), consumed), ("V4", head.len()));
}

#[test]
fn an_empty_text_is_no_text() {
    let mut bytes = bytes_of(&ClientMessage { credentials: Credentials::Missing, ..client() });
    let (message, _) = ClientMessage::read(&bytes).unwrap().unwrap();
    assert_eq!(message.credentials, Credentials::Missing);
    bytes.splice(146..150, [0, 1, 0, 0, 1, 0]);
    let (message, _) = ClientMessage::read(&bytes).unwrap().unwrap();
    assert_eq!(message.credentials, Credentials::Missing);
}

#[test]
fn what_is_too_long_is_refused_where_it_must_be() {
    let mut bytes = bytes_of(&client());
    bytes.truncate(146);
    let long = vec![b'x'; USER_BYTES_MAX + 1];
    bytes.extend_from_slice(&u16::try_from(long.len() + 1).unwrap().to_be_bytes());
    bytes.extend_from_slice(&long);
    bytes.extend_from_slice(b"\0\0\x02p\0\0\x06A=\x01b\0\0");
    let (message, _) = ClientMessage::read(&bytes).unwrap().unwrap();
    assert_eq!(message.credentials, Credentials::TooLong);
    assert_eq!(message.peer_info.get("A"), Some("_b"));
    let mut bad = client();
    bad.options = "x".repeat(OPTIONS_BYTES_MAX + 1);
    let mut out = Vec::new();
    let error = bad.write(&mut out).unwrap_err();
    assert!(matches!(error, KeyMethodError::Unwritable { field: "options string", .. }), "{error}");
    assert_eq!(out, []);
    let other = [[0, 0, 0, 0, 1], [0, 1, 0, 0, 2]];
    for bytes in other {
        assert_eq!(ClientMessage::read(&bytes), Err(KeyMethodError::OtherMethod));
        assert_eq!(ServerMessage::read(&bytes), Err(KeyMethodError::OtherMethod));
    }
    assert_eq!(ClientMessage::read(b"PUSH"), Err(KeyMethodError::OtherMethod));
    let huge = [&[0, 0, 0, 0, 2][..], &[0; 112], &[0xff; 2]].concat();
    assert!(matches!(ClientMessage::read(&huge), Err(KeyMethodError::TooLong { .. })));
}

#[test]
fn control_characters_leave_a_name_but_not_a_password() {
    let mut message = client();
    message.credentials =
        Credentials::Given { user: "a\nb".to_owned(), password: Zeroizing::new("c\nd".to_owned()) };
    let (read, _) = ClientMessage::read(&bytes_of(&message)).unwrap().unwrap();
    let Credentials::Given { user, password } = &read.credentials else { panic!("{read:?}") };
    assert_eq!((user.as_str(), password.as_str()), ("a_b", "c\nd"));
    assert!(!format!("{read:?}").contains("c\\nd"));
}

proptest! {
    #[test]
    fn every_client_message_comes_back(
        user in "[ -~]{1,20}", password in "[^\0]{0,20}", options in "[ -~]{0,40}", value in "[ -~]{0,20}",
        keys in any::<[u8; 32]>(),
    ) {
        let mut message = client();
        message.source.random1 = keys;
        message.options = options;
        message.credentials = Credentials::Given { user, password: Zeroizing::new(password) };
        message.peer_info.set("UV_X", &value);
        let bytes = bytes_of(&message);
        prop_assert_eq!(ClientMessage::read(&bytes), Ok(Some((message, bytes.len()))));
    }

    #[test]
    fn no_bytes_make_a_reader_panic(
        head in any::<bool>(), bytes in prop::collection::vec(any::<u8>(), 0..300),
    ) {
        let bytes = if head { [&[0, 0, 0, 0, 2][..], &bytes].concat() } else { bytes };
        if let Ok(Some((_, consumed))) = ClientMessage::read(&bytes) {
            prop_assert!(consumed <= bytes.len());
        }
        if let Ok(Some((_, consumed))) = ServerMessage::read(&bytes) {
            prop_assert!(consumed <= bytes.len());
        }
    }
}
