#![allow(clippy::unwrap_used)]

use proptest::prelude::*;

use super::*;
use crate::key_derivation::ClientKeySource;
use crate::key_method::Credentials;

fn policy() -> ServerPolicy {
    ServerPolicy {
        ciphers: DEFAULT_CIPHERS.to_vec(),
        fallback: None,
        has_epochs: true,
        has_dynamic_tls_crypt: true,
    }
}

fn client(options: &str, info: &str) -> ClientMessage {
    ClientMessage {
        source: ClientKeySource { pre_master: [0; 48], random1: [0; 32], random2: [0; 32] },
        options: options.to_owned(),
        credentials: Credentials::Missing,
        peer_info: PeerInfo::parse(info),
    }
}

const OPTIONS: &str =
    "V4,dev-type tun,link-mtu 1549,tun-mtu 1500,proto UDPv4,auth [null-digest],tls-client";

fn text_of(agreement: &Agreement) -> Vec<String> {
    let options = agreement.push_options(PeerNumber::new(3), 1420);
    options.iter().map(|option| option.to_text().unwrap()).collect()
}

#[test]
fn a_stock_client_of_2_6_gets_the_first_cipher_of_the_server() {
    let info = "IV_VER=2.6.14\nIV_MTU=1600\nIV_NCP=2\nIV_PROTO=990\n\
        IV_CIPHERS=CHACHA20-POLY1305:AES-128-GCM:AES-256-GCM\n";
    let agreement = negotiate(&policy(), &client(OPTIONS, info)).unwrap();
    assert!(agreement.pushes_unasked && agreement.takes_keywords);
    assert_eq!(
        text_of(&agreement),
        [
            "peer-id 3",
            "cipher AES-256-GCM",
            "protocol-flags cc-exit tls-ekm dyn-tls-crypt",
            "tun-mtu 1420"
        ]
    );
    let chacha = ServerPolicy { ciphers: vec![DataCipher::ChaCha20Poly1305], ..policy() };
    let agreement = negotiate(&chacha, &client(OPTIONS, info)).unwrap();
    assert_eq!(agreement.cipher, DataCipher::ChaCha20Poly1305);
    let newer = info.replace("=990", "=8094");
    let agreement = negotiate(&policy(), &client(OPTIONS, &newer)).unwrap();
    assert!(agreement.flags.aead_epoch);
}

#[test]
fn clients_before_cipher_lists_are_served() {
    let info = "IV_VER=2.4.9\nIV_PROTO=2\nIV_NCP=2\n";
    let options = format!("{OPTIONS},cipher BF-CBC");
    let agreement = negotiate(&policy(), &client(&options, info)).unwrap();
    assert_eq!(text_of(&agreement), ["peer-id 3", "cipher AES-256-GCM"]);
    let info = "IV_VER=2.4.9\nIV_PROTO=2\n";
    let fixed = client(&format!("{OPTIONS},cipher aes-128-gcm"), info);
    let agreement = negotiate(&policy(), &fixed).unwrap();
    assert_eq!(text_of(&agreement), ["peer-id 3"], "a cipher is not pushed to who has one only");
    assert_eq!(agreement.cipher, DataCipher::Aes128Gcm);
    assert_eq!(negotiate(&policy(), &client(OPTIONS, info)), Err(Refusal::NoCipherNamed));
    let fallback = ServerPolicy { fallback: Some(DataCipher::Aes256Gcm), ..policy() };
    let agreement = negotiate(&fallback, &client(OPTIONS, info)).unwrap();
    assert_eq!(agreement.cipher, DataCipher::Aes256Gcm);
    let ekm = client(OPTIONS, "IV_PROTO=14\nIV_CIPHERS=AES-256-GCM\n");
    let agreement = negotiate(&policy(), &ekm).unwrap();
    assert!(agreement.pushes_unasked && !agreement.takes_keywords);
    assert_eq!(text_of(&agreement), ["peer-id 3", "cipher AES-256-GCM", "key-derivation tls-ekm"]);
}

#[test]
fn clients_that_cannot_be_served_are_told_why() {
    let refused =
        |options: &str, info: &str| negotiate(&policy(), &client(options, info)).unwrap_err();
    let cbc = refused(
        &format!("{OPTIONS},cipher AES-256-GCM"),
        "IV_PROTO=990\nIV_NCP=2\nIV_CIPHERS=AES-256-CBC:AES-128-CBC\n",
    );
    assert_eq!(cbc.client_text(), "Data channel cipher negotiation failed (no shared cipher)");
    assert!(cbc.to_string().contains("the client AES-256-CBC:AES-128-CBC"), "{cbc}");
    assert_eq!(refused(OPTIONS, "IV_CIPHERS=AES-256-GCM\n"), Refusal::NoDataV2);
    let good = "IV_PROTO=990\nIV_CIPHERS=AES-256-GCM\n";
    assert_eq!(refused("V4,dev-type tap", good), Refusal::Tap);
    assert_eq!(refused(&format!("{OPTIONS},mtu-dynamic"), good), Refusal::Fragment);
    assert_eq!(refused(&format!("{OPTIONS},comp-lzo"), good), Refusal::Compression);
    let stub = format!("{good}IV_COMP_STUBv2=1\n");
    let agreement = negotiate(&policy(), &client(&format!("{OPTIONS},comp-lzo"), &stub)).unwrap();
    assert!(text_of(&agreement).contains(&"compress stub-v2".to_owned()));
}

#[test]
fn lists_are_read_as_openvpn_reads_them() {
    let list = parse_ciphers("aes-256-gcm:?AES-256-CBC:CHACHA20-POLY1305:AES-256-GCM").unwrap();
    assert_eq!(list_of(&list), "AES-256-GCM:CHACHA20-POLY1305");
    assert_eq!(parse_ciphers("DEFAULT").unwrap(), DEFAULT_CIPHERS);
    let unknown = CipherListError::Unknown("AES-256-CBC".to_owned());
    assert_eq!(parse_ciphers("AES-256-GCM:AES-256-CBC"), Err(unknown));
    assert_eq!(parse_ciphers("?none"), Err(CipherListError::Empty));
    assert_eq!(parse_ciphers(&":".repeat(CIPHERS_MAX)), Err(CipherListError::TooMany));
}

#[test]
fn a_client_takes_only_what_it_allows() {
    let push = |texts: &[&str]| -> Vec<PushOption> {
        texts.iter().map(|text| PushOption::parse(text).unwrap()).collect()
    };
    let accept = |texts: &[&str]| accept_push(&DEFAULT_CIPHERS, None, "V4", &push(texts));
    let agreement = accept(&["peer-id 5", "cipher aes-128-gcm", "protocol-flags tls-ekm"]).unwrap();
    assert_eq!((agreement.cipher, agreement.peer.get()), (DataCipher::Aes128Gcm, 5));
    assert!(agreement.flags.tls_ekm && !agreement.flags.cc_exit);
    let error = accept(&["peer-id 5", "cipher AES-192-GCM"]).unwrap_err();
    assert!(error.to_string().contains("wants the data cipher \"AES-192-GCM\""), "{error}");
    assert_eq!(accept(&["cipher AES-128-GCM"]), Err(ClientRefusal::NoPeerId));
    assert_eq!(accept(&["peer-id 5"]), Err(ClientRefusal::NoCipherNamed));
    let fixed = accept_push(&DEFAULT_CIPHERS, None, "V4,cipher AES-256-GCM", &push(&["peer-id 5"]));
    assert_eq!(fixed.unwrap().cipher, DataCipher::Aes256Gcm);
    let error = accept(&["peer-id 5", "cipher AES-128-GCM", "comp-lzo no"]).unwrap_err();
    assert_eq!(error, ClientRefusal::Compression("comp-lzo no".to_owned()));
    assert!(accept(&["peer-id 5", "cipher AES-128-GCM", "compress stub-v2"]).is_ok());
}

#[test]
fn our_own_client_is_understood_by_our_own_server() {
    let proto = IvProto::DATA_V2.with(IvProto::TLS_KEY_EXPORT).with(IvProto::CC_EXIT);
    let info = client_peer_info("2.6.0", "linux", &DEFAULT_CIPHERS, proto, 1600);
    let agreement = negotiate(&policy(), &client(OPTIONS, &info.to_text())).unwrap();
    let pushed = agreement.push_options(PeerNumber::new(1), 1500);
    let accepted = accept_push(&DEFAULT_CIPHERS, None, "", &pushed).unwrap();
    assert_eq!((accepted.cipher, accepted.flags), (agreement.cipher, agreement.flags));
}

proptest! {
    #[test]
    fn nothing_that_a_client_says_makes_a_server_panic(options in "[ -~]{0,60}", info in "[ -~\n]{0,80}") {
        let known = format!("IV_PROTO=990\nIV_CIPHERS={info}");
        for info in [&info, &known] {
            let _ = negotiate(&policy(), &client(&options, info));
        }
        let _ = parse_ciphers(&info);
    }
}
