//! Known answers of OpenVPN's own unit tests, and what must be refused.
#![allow(clippy::unwrap_used)]

use proptest::prelude::*;

use super::crypt::Half;
use super::*;
use crate::control::ControlPacket;
use crate::testing::hex;

const STATIC_KEY: &str = "37268ea8f95d7f71f9fb8fc03770c460 daf714a483d815c013ce0a537efc18f2
    8f4f172669d9e6a413bac6741d8ea054 00f49b7fd6326470f23798c606bf53d4
    de63ebc64ec59d57ce5d04d5b62e68b5 3ca6e5354351097fa370446c4d269f18
    7bb6ae54af2dc70ff7317fe2f8754b82 82aad4202f9fa42c8640245d883e2c54
    a0c1c489a036cf3a8964d8d289c1583b 9447c262b1da5fd167a5d27bd5ac5143
    17bc2343a31a2efc38dd920d910375f5 1c2e27f3afd36c49269da079f7ce466e
    bb0f9ad13e9bbb4665974e6bc24b513c 5700393bf4a3e7f967e2f384069ac8a8
    e78b18b15604993fd16515cce9c0f3e4 2b4126b999005ade802797b0eeb8b9e6";
const PLAIN_RESET: &str = "38 6891923fa3103437 00 00000000";
const AUTH_RESET: &str = "38 de694c5c7bfba274 93537c1ded4e781529ae7cfe4b8c6d6b2b51f05a 00000001
    61d3bf6c 00 00000000";
const CRYPT_RESET: &str = "38 f419cb12d1f9e48f 00000001 61d3f8e1
    330206f56802be44fbed905064e3db43416bec5e526719462b7eb90c96defc9b 05c44879f7";

fn static_key() -> KeyBlock {
    KeyBlock::new(hex(STATIC_KEY).try_into().unwrap())
}

fn unwrap(keys: &WrapKeys, bytes: &[u8]) -> Result<(Vec<u8>, Option<ReplayId>), WrapError> {
    let mut plain = Vec::new();
    keys.unwrap(bytes, &mut plain).map(|id| (plain, id))
}

#[test]
fn the_tls_auth_reset_of_a_real_client_opens_and_comes_back() {
    let server = WrapKeys::tls_auth(&static_key(), AuthDigest::Sha1, AuthDirection::Zero);
    let client = WrapKeys::tls_auth(&static_key(), AuthDigest::Sha1, AuthDirection::One);
    let wire = hex(AUTH_RESET);
    let (plain, id) = unwrap(&server, &wire).unwrap();
    assert_eq!(plain, hex("38 de694c5c7bfba274 00 00000000"));
    let expected = ReplayId { number: 1, time_s: 0x61d3_bf6c };
    assert_eq!(id, Some(expected));
    let mut again = Vec::new();
    client.wrap(&plain, expected, &mut again);
    assert_eq!(again, wire);
    assert_eq!(server.overhead(), wire.len() - plain.len());
    assert_eq!(unwrap(&client, &wire), Err(WrapError::BadMac), "the other direction");
}

#[test]
fn the_tls_crypt_reset_of_a_real_client_opens_and_comes_back() {
    let server = WrapKeys::tls_crypt(&static_key(), Side::Server);
    let client = WrapKeys::tls_crypt(&static_key(), Side::Client);
    let wire = hex(CRYPT_RESET);
    let (plain, id) = unwrap(&server, &wire).unwrap();
    assert_eq!(plain, hex("38 f419cb12d1f9e48f 00 00000000"));
    let mut again = Vec::new();
    client.wrap(&plain, id.unwrap(), &mut again);
    assert_eq!(again, wire);
    assert_eq!(server.overhead(), wire.len() - plain.len());
    assert_eq!(unwrap(&client, &wire), Err(WrapError::BadMac), "its own packets");
}

#[test]
fn altered_packets_and_those_of_another_wrapping_are_refused() {
    let auth = WrapKeys::tls_auth(&static_key(), AuthDigest::Sha1, AuthDirection::Zero);
    let crypt = WrapKeys::tls_crypt(&static_key(), Side::Server);
    for (keys, text) in [(&auth, AUTH_RESET), (&crypt, CRYPT_RESET)] {
        let wire = hex(text);
        for at in 0..wire.len() {
            let mut altered = wire.clone();
            altered[at] ^= 0x10;
            assert_eq!(unwrap(keys, &altered), Err(WrapError::BadMac), "byte {at}");
        }
        for cut in 0..wire.len() {
            assert!(unwrap(keys, &wire[..cut]).is_err(), "{cut} bytes");
        }
        let plain = hex(PLAIN_RESET);
        assert!(matches!(unwrap(keys, &plain), Err(WrapError::Truncated { have: 14, .. })));
    }
    assert!(unwrap(&crypt, &hex(AUTH_RESET)).is_err());
    assert_eq!(unwrap(&auth, &hex(CRYPT_RESET)), Err(WrapError::BadMac));
}

#[test]
fn every_digest_of_tls_auth_has_its_length_and_both_ends_agree() {
    for (name, bytes) in
        [("MD5", 16), ("sha1", 20), ("SHA224", 28), ("SHA256", 32), ("sha384", 48), ("SHA512", 64)]
    {
        let digest: AuthDigest = name.parse().unwrap();
        assert_eq!(digest.bytes(), bytes);
        for (sends, receives) in [
            (AuthDirection::Zero, AuthDirection::One),
            (AuthDirection::One, AuthDirection::Zero),
            (AuthDirection::Both, AuthDirection::Both),
        ] {
            let [from, to] =
                [sends, receives].map(|end| WrapKeys::tls_auth(&static_key(), digest, end));
            let mut wire = Vec::new();
            from.wrap(&hex(PLAIN_RESET), ReplayId { time_s: 5, number: 9 }, &mut wire);
            assert_eq!(wire.len(), 14 + bytes + 8);
            assert_eq!(unwrap(&to, &wire).unwrap().0, hex(PLAIN_RESET));
        }
    }
    assert!("MD4".parse::<AuthDigest>().unwrap_err().contains("give SHA1"));
}

#[test]
fn dynamic_tls_crypt_is_the_known_answer() {
    let exported = KeyBlock::new([0xba; 256]);
    let keys = |original: &WrapKeys| match original.dynamic(&exported, Side::Server) {
        WrapKeys::Crypt(keys) => keys,
        other => panic!("{other:?}"),
    };
    let seal = |original: &WrapKeys| {
        // The known answer has nothing before the replay id.
        let key = keys(original).original().clone();
        let id = ReplayId { number: 1, time_s: 0 }.to_bytes();
        let mut out = id.to_vec();
        Half::new(&key.expose()[..128]).seal(&[&id], b"1234567890", &mut out);
        out
    };
    let known = hex("00000001 00000000
        e319277f1c8d6e6a7796a855337b9cfb56e1f13a870e6647dfa195c92c17a015 ba4967a11d55ea1a06a7");
    assert_eq!(seal(&WrapKeys::None), known);
    let with = |byte| WrapKeys::tls_crypt(&KeyBlock::new([byte; 256]), Side::Server);
    assert_eq!(seal(&with(0)), known);
    assert_ne!(seal(&with(0x42)), known);
    let auth = |byte| {
        let key = KeyBlock::new([byte; 256]);
        WrapKeys::tls_auth(&key, AuthDigest::Sha256, AuthDirection::Both)
    };
    assert_eq!(seal(&auth(0)), known);
    assert_eq!(seal(&auth(0x42)), seal(&with(0x42)));
}

fn server_key() -> ServerKey {
    ServerKey::new(&std::array::from_fn(|at| at as u8))
}

fn client_key() -> KeyBlock {
    KeyBlock::new(std::array::from_fn(|at| at as u8))
}

#[test]
fn wrapped_client_keys_are_the_known_answers() {
    for (metadata, length, tag, next, last) in [
        (
            Metadata::Timestamp(0),
            299,
            "177da5c074a94619b16be4acb71f1a6ccf24f33c6bbaf498459d5f06c369d495",
            "2c78396efd93c2598f4771e068cafca3",
            "4b4ece3e08b5323bedf04e6114df11acb31e012b",
        ),
        (
            Metadata::User(hex("0000410820c3")),
            297,
            "69eda75582aa170b8c9418fe28248cdb7761bea2d277aa1647eb3a9d94083733",
            "e91489b4f2d96ef38e2941e4daac313d",
            "1d068fb595cb230c2255400e9753296d6ace0129",
        ),
    ] {
        let wrapped = server_key().wrap(&client_key(), &metadata).unwrap();
        assert_eq!(wrapped.len(), length);
        assert_eq!(wrapped[..32], hex(tag));
        assert_eq!(wrapped[32..48], hex(next));
        assert_eq!(wrapped[length - 20..], hex(last));
        let unwrapped = server_key().unwrap(&wrapped).unwrap();
        assert_eq!(unwrapped.metadata, metadata);
        assert_eq!(unwrapped.key.expose(), client_key().expose());
    }
}

#[test]
fn a_wrapped_client_key_that_was_altered_or_is_anothers_is_refused() {
    let wrapped = server_key().wrap(&client_key(), &Metadata::Timestamp(7)).unwrap();
    for at in 0..wrapped.len() {
        let mut altered = wrapped.clone();
        altered[at] ^= 1;
        assert!(server_key().unwrap(&altered).is_err(), "byte {at}");
        assert!(server_key().unwrap(&wrapped[..at]).is_err(), "{at} bytes");
    }
    let other = ServerKey::new(&[7; SERVER_KEY_BYTES]);
    assert_eq!(other.unwrap(&wrapped).unwrap_err(), WrapError::ForeignClientKey);
    let largest = Metadata::User(vec![0; METADATA_BYTES_MAX]);
    let wrapped = server_key().wrap(&client_key(), &largest).unwrap();
    assert_eq!((wrapped.len(), METADATA_BYTES_MAX), (1024, 733));
    assert_eq!(server_key().unwrap(&wrapped).unwrap().metadata, largest);
    let larger = Metadata::User(vec![0; METADATA_BYTES_MAX + 1]);
    let error = server_key().wrap(&client_key(), &larger).unwrap_err();
    assert_eq!(error, WrapError::MetadataTooLong(METADATA_BYTES_MAX + 1));
}

#[test]
fn a_session_refuses_what_came_before() {
    let first = ReplayId { time_s: 100, number: 1 };
    let mut client = Wrap::new(WrapKeys::tls_crypt(&static_key(), Side::Client), first);
    let mut server = Wrap::new(WrapKeys::tls_crypt(&static_key(), Side::Server), first);
    let [mut one, mut two, mut plain] = [const { Vec::new() }; 3];
    client.wrap(&hex(PLAIN_RESET), &mut one);
    client.wrap(&hex(PLAIN_RESET), &mut two);
    assert_ne!(one, two);
    server.unwrap(&two, &mut plain).unwrap();
    server.unwrap(&one, &mut plain).unwrap();
    let before = plain.clone();
    assert_eq!(server.unwrap(&one, &mut plain), Err(WrapError::Replay(first)));
    assert_eq!(plain, before);
    assert!(ControlPacket::parse(&plain[..14]).is_ok());
}

proptest! {
    #[test]
    fn no_bytes_make_a_wrapping_panic(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        for keys in [
            WrapKeys::None,
            WrapKeys::tls_auth(&static_key(), AuthDigest::Sha512, AuthDirection::Both),
            WrapKeys::tls_crypt(&static_key(), Side::Client),
        ] {
            let mut out = Vec::new();
            let opened = keys.unwrap(&bytes, &mut out);
            prop_assert_eq!(opened.is_ok(), matches!(keys, WrapKeys::None));
            prop_assert!(opened.is_ok() || out.is_empty());
        }
        prop_assert!(server_key().unwrap(&bytes).is_err());
    }
}
