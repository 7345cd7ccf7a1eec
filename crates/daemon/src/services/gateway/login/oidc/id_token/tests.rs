#![allow(clippy::unwrap_used)]

use data_encoding::BASE64URL_NOPAD as BASE64;
use jsonwebtoken::{EncodingKey, Header, encode, get_current_timestamp};
use rcgen::{KeyPair, PublicKeyData};
use serde_json::json;

use super::*;

const ISSUER: &str = "https://id.example.com";
const EXPECTED: Expected<'static> = Expected { issuer: ISSUER, client_id: "weft", nonce: "once" };

/// A provider's key, and the set in which it is published.
struct Signer {
    key: KeyPair,
    published: JwkSet,
}

impl Signer {
    fn new() -> Self {
        let key = KeyPair::generate().unwrap();
        // SEC 1: 4, and two coordinates.
        let point = key.der_bytes().to_vec();
        let (x, y) = (BASE64.encode(&point[1..33]), BASE64.encode(&point[33..]));
        let key_of = |name: &str, usage: &str| json!({ "kty": "EC", "crv": "P-256", "kid": name, "use": usage, "x": x, "y": y });
        let keys = [key_of("one", "sig"), key_of("sealing", "enc")];
        Self { key, published: serde_json::from_value(json!({ "keys": keys })).unwrap() }
    }

    fn signed(&self, name: Option<&str>, claims: &Value) -> String {
        let mut header = Header::new(Algorithm::ES256);
        header.kid = name.map(str::to_owned);
        encode(&header, claims, &EncodingKey::from_ec_der(&self.key.serialize_der())).unwrap()
    }
}

fn good() -> Value {
    let now = get_current_timestamp();
    json!({ "iss": ISSUER, "aud": "weft", "sub": "u1", "nonce": "once", "exp": now + 300, "iat": now })
}

/// The good claims with one of them changed, or without it.
fn with(name: &str, value: Value) -> Value {
    let mut claims = good();
    match value {
        Value::Null => _ = claims.as_object_mut().unwrap().remove(name),
        value => claims[name] = value,
    }
    claims
}

fn judge(signer: &Signer, claims: &Value) -> Result<Claims, TokenFault> {
    verify(&signer.signed(Some("one"), claims), &signer.published, &EXPECTED)
}

#[test]
fn a_token_of_the_provider_for_this_login_is_good() {
    let signer = Signer::new();
    assert_eq!(judge(&signer, &good()).unwrap()["sub"], "u1");
    assert!(judge(&signer, &with("aud", json!(["weft"]))).is_ok());
    assert!(judge(&signer, &with("azp", json!("weft"))).is_ok());
    let mut for_two = with("aud", json!(["other", "weft"]));
    assert_eq!(judge(&signer, &for_two), Err(TokenFault::Audience));
    for_two["azp"] = json!("weft");
    assert!(judge(&signer, &for_two).is_ok());
    // A provider with one key need not name it.
    assert!(verify(&signer.signed(None, &good()), &signer.published, &EXPECTED).is_ok());
}

#[test]
fn a_token_of_another_provider_client_or_login_is_not() {
    let signer = Signer::new();
    let missing = |name: &str| TokenFault::Missing(name.into());
    let cases = [
        ("iss", json!("https://id.example.net"), TokenFault::Issuer),
        ("iss", json!([ISSUER, "https://id.example.net"]), TokenFault::Issuer),
        ("iss", json!("https://id.example.com/"), TokenFault::Issuer),
        ("iss", json!(null), missing("iss")),
        ("aud", json!("other"), TokenFault::Audience),
        ("aud", json!([]), TokenFault::Audience),
        ("aud", json!(null), missing("aud")),
        ("azp", json!("other"), TokenFault::Audience),
        ("azp", json!(7), TokenFault::Audience),
        ("nonce", json!("twice"), TokenFault::Nonce),
        ("nonce", json!(""), TokenFault::Nonce),
        ("nonce", json!(null), TokenFault::Nonce),
        ("sub", json!(""), missing("sub")),
        ("sub", json!(null), missing("sub")),
    ];
    for (name, value, expected) in cases {
        assert_eq!(judge(&signer, &with(name, value.clone())), Err(expected), "{name}: {value}");
    }
}

#[test]
fn a_token_is_good_for_its_time() {
    let (signer, now) = (Signer::new(), get_current_timestamp());
    // Clocks may be a minute apart.
    assert!(judge(&signer, &with("exp", json!(now - 30))).is_ok());
    assert_eq!(judge(&signer, &with("exp", json!(now - 120))), Err(TokenFault::Time));
    assert_eq!(judge(&signer, &with("nbf", json!(now + 120))), Err(TokenFault::Time));
    let missing = Err(TokenFault::Missing("exp".into()));
    assert_eq!(judge(&signer, &with("exp", json!(null))), missing);
    assert_eq!(judge(&signer, &with("exp", json!("soon"))), missing);
}

#[test]
fn a_token_is_signed_by_a_key_of_the_provider() {
    let (signer, other) = (Signer::new(), Signer::new());
    let token = signer.signed(Some("one"), &good());
    assert!(verify(&token, &signer.published, &EXPECTED).is_ok());
    let forged = verify(&token, &other.published, &EXPECTED);
    assert_eq!(forged, Err(TokenFault::Signature));
    for name in ["two", "sealing"] {
        let token = signer.signed(Some(name), &good());
        let unknown = verify(&token, &signer.published, &EXPECTED);
        assert_eq!(unknown, Err(TokenFault::UnknownKey), "{name}");
    }
    // Other keys may have been published meanwhile, also by the same name.
    assert!(TokenFault::Signature.may_be_of_other_keys());
    assert!(TokenFault::UnknownKey.may_be_of_other_keys());
    assert!(!TokenFault::Nonce.may_be_of_other_keys());
    // Other words under a good signature.
    let parts: Vec<&str> = token.split('.').collect();
    let words = BASE64.encode(with("sub", json!("u2")).to_string().as_bytes());
    let altered = [parts[0], &words, parts[2]].join(".");
    assert_eq!(verify(&altered, &signer.published, &EXPECTED), Err(TokenFault::Signature));
    for text in ["", "a.b", "a.b.c", &format!("{}.{}.", parts[0], parts[1])] {
        assert!(verify(text, &signer.published, &EXPECTED).is_err(), "{text}");
    }
}

#[test]
fn a_token_without_a_signature_or_with_a_shared_secret_is_refused() {
    let signer = Signer::new();
    let body = BASE64.encode(good().to_string().as_bytes());
    let none = BASE64.encode(br#"{"alg":"none","kid":"one"}"#);
    assert!(verify(&format!("{none}.{body}."), &signer.published, &EXPECTED).is_err());
    // The public key as the secret of a symmetric algorithm; the set says that it is one.
    let secret = signer.key.der_bytes();
    let mut header = Header::new(Algorithm::HS256);
    header.kid = Some("shared".into());
    let token = encode(&header, &good(), &EncodingKey::from_secret(secret).unwrap()).unwrap();
    let shared = json!({ "kty": "oct", "kid": "shared", "k": BASE64.encode(secret) });
    let set = serde_json::from_value(json!({ "keys": [shared] })).unwrap();
    let refused = verify(&token, &set, &EXPECTED);
    assert_eq!(refused, Err(TokenFault::Algorithm("HS256".into())));
}
