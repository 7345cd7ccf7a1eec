//! The referee: Debian's `openvpn` 2.6 talks to our state machines, over the loopback interface. Its log and the pings
//! of the data channel are the evidence. Without `openvpn` the tests say so and pass.
#![allow(clippy::unwrap_used, clippy::print_stderr, missing_docs)]

mod referee;

use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustls::version::{TLS12, TLS13};
use weft_crypto::DataCipher;
use weft_openvpn::device::{KeyBlock, Side};
use weft_openvpn::gate::{GateConfig, Refusal};
use weft_openvpn::key_method::{Credentials, PeerInfo};
use weft_openvpn::messages::{AuthFailure, Message};
use weft_openvpn::negotiation::DEFAULT_CIPHERS;
use weft_openvpn::session::{ClientOptions, EndReason, ServerOptions, Timing};
use weft_openvpn::static_key::{ClientKeyV2, ServerKeyV2, read_static_key};
use weft_openvpn::wrap::{AuthDigest, AuthDirection, ServerKey, WrapError, WrapKeys};
use zeroize::Zeroizing;

use referee::ends::{Client, Decision, Server, link};
use referee::pki::server_name;
use referee::{Folder, Stock, is_openvpn_here, openvpn};

const DONE: &str = "Initialization Sequence Completed";
/// What each client is pushed: it ends itself if our pings do not come, or cannot be opened.
const OPTIONS: [&str; 4] =
    ["ifconfig 10.8.0.2 255.255.255.0", "topology subnet", "ping 1", "ping-restart 15"];
/// Words of a client's log that must never be in it.
const FAULTS: [&str; 4] = ["decrypt packet error", "TLS Error", "out of sync", "Options error"];

fn accept() -> Decision {
    Decision::Accept(OPTIONS.map(str::to_owned).to_vec())
}

fn options(folder: &Folder, is_tcp: bool) -> ServerOptions {
    let tls = folder.pki.server_tls(&[&TLS12, &TLS13]);
    ServerOptions { link: link(is_tcp), ..ServerOptions::new(tls, DEFAULT_CIPHERS.to_vec()) }
}

/// Waits until the client is connected and pings have come, opened, both ways.
fn run_connected(server: &mut Server, stock: &Stock, what: &str) {
    server.run(stock, what, |server| {
        stock.has(DONE) && server.end.as_ref().is_some_and(|end| end.pings >= 2)
    });
    let end = server.end();
    assert!(end.is_connected, "{what}");
    assert_eq!((end.unopened, &end.ended), (0, &None), "{what}");
    let log = stock.log();
    for fault in FAULTS {
        assert!(!log.contains(fault), "{what}: {fault:?} in the log:\n{log}");
    }
}

/// A key that `openvpn` made.
fn static_key(folder: &Folder) -> KeyBlock {
    openvpn(&["--genkey", "secret"], &folder.path("static.key"));
    read_static_key(&folder.read("static.key")).unwrap()
}

/// A way to wrap: our gate's configuration, and the client's words for it.
fn wrapping(folder: &Folder, kind: &str) -> (GateConfig, Vec<String>) {
    let mut gate = GateConfig::default();
    let path = |name: &str| folder.path(name).display().to_string();
    let words: Vec<String> = match kind {
        "none" => vec![],
        "tls-auth" => {
            let key = static_key(folder);
            let end = WrapKeys::tls_auth(&key, AuthDigest::Sha1, AuthDirection::Zero);
            gate.wrap = Some(end);
            ["--tls-auth", &path("static.key"), "1"].map(str::to_owned).to_vec()
        }
        "tls-auth sha512" => {
            let key = static_key(folder);
            let end = WrapKeys::tls_auth(&key, AuthDigest::Sha512, AuthDirection::Both);
            gate.wrap = Some(end);
            ["--tls-auth", &path("static.key"), "--auth", "SHA512"].map(str::to_owned).to_vec()
        }
        "tls-crypt" => {
            gate.wrap = Some(WrapKeys::tls_crypt(&static_key(folder), Side::Server));
            ["--tls-crypt", &path("static.key")].map(str::to_owned).to_vec()
        }
        _ => {
            let (server, client) = (path("server.v2"), path("client.v2"));
            openvpn(&["--genkey", "tls-crypt-v2-server"], server.as_ref());
            let words = ["--tls-crypt-v2", &server, "--genkey", "tls-crypt-v2-client"];
            openvpn(&words, client.as_ref());
            let key = ServerKeyV2::parse(&folder.read("server.v2")).unwrap();
            gate.client_keys = Some(Arc::new(ServerKey::new(key.expose())));
            (gate.wrap, gate.always_cookie) = (None, true);
            ["--tls-crypt-v2", &client].map(str::to_owned).to_vec()
        }
    };
    (gate, words)
}

#[test]
fn a_stock_client_connects_over_each_wrapping_transport_version_and_cipher() {
    if !is_openvpn_here("a stock client connects") {
        return;
    }
    let ciphers = ["AES-256-GCM", "AES-128-GCM", "CHACHA20-POLY1305"];
    let wrappings = ["none", "tls-auth", "tls-auth sha512", "tls-crypt", "tls-crypt-v2"];
    let folder = Folder::new();
    let mut round = 0;
    for proto in ["udp", "tcp"] {
        for kind in wrappings {
            let (gate, mut words) = wrapping(&folder, kind);
            let cipher = ciphers[round % ciphers.len()];
            let version = match round % 2 {
                0 => ["--tls-version-min", "1.3"],
                _ => ["--tls-version-max", "1.2"],
            };
            round += 1;
            words.extend(version.map(str::to_owned));
            words.extend(["--data-ciphers", cipher].map(str::to_owned));
            let words: Vec<&str> = words.iter().map(String::as_str).collect();
            let mut server = Server::new(gate, options(&folder, proto == "tcp"), accept());
            let stock = Stock::client(&folder, proto, server.port(proto), &words);
            let what = format!("{proto}, {kind}, {version:?}, {cipher}");
            run_connected(&mut server, &stock, &what);
            assert!(stock.has("PUSH_REPLY") && stock.has(cipher), "{what}");
            assert_eq!(server.sessions, 1, "{what}");
        }
    }
}

#[test]
fn keys_are_renewed_by_a_client_without_a_lost_ping() {
    keys_are_renewed("tls-crypt", false, false);
}

#[test]
fn keys_are_renewed_by_our_server_without_a_lost_ping() {
    keys_are_renewed("tls-crypt-v2", false, true);
}

#[test]
fn keys_are_renewed_by_openvpns_own_derivation_without_a_lost_ping() {
    keys_are_renewed("none", true, false);
}

/// `is_old`: the server has neither the exporter nor dynamic tls-crypt.
fn keys_are_renewed(kind: &str, is_old: bool, by_server: bool) {
    if !is_openvpn_here("keys are renewed") {
        return;
    }
    let folder = Folder::new();
    let (gate, mut words) = wrapping(&folder, kind);
    let mut options = options(&folder, false);
    options.has_exporter = !is_old;
    options.policy.has_dynamic_tls_crypt = !is_old;
    let age = if by_server {
        options.timing.renegotiate_after = Some(Duration::from_secs(4));
        "0"
    } else {
        "4"
    };
    words.extend(["--reneg-sec", age].map(str::to_owned));
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let mut server = Server::new(gate, options, accept());
    let stock = Stock::client(&folder, "udp", server.port("udp"), &words);
    run_connected(&mut server, &stock, kind);
    server.run(&stock, kind, |server| {
        server.end.as_ref().is_some_and(|end| end.key_ids.contains(&2))
    });
    let end = server.end();
    assert_eq!((end.unopened, &end.ended), (0, &None), "{kind}");
    assert_eq!(end.key_ids[..3], [0, 1, 2], "{kind}");
    let log = stock.log();
    for fault in FAULTS {
        assert!(!log.contains(fault), "{kind}: {fault:?} in the log:\n{log}");
    }
    assert_eq!(log.contains("dynamic tls-crypt"), !is_old, "{kind}");
    assert_eq!(server.sessions, 1, "{kind}");
}

#[test]
fn a_denied_client_shows_the_reason() {
    if !is_openvpn_here("a denied client") {
        return;
    }
    let folder = Folder::new();
    let login = folder.write("login", "anna\nsecret word\n").display().to_string();
    for proto in ["udp", "tcp"] {
        let options = options(&folder, proto == "tcp");
        let mut server = Server::new(GateConfig::default(), options, Decision::ByHand);
        let words = ["--auth-user-pass", &login];
        let stock = Stock::client(&folder, proto, server.port(proto), &words);
        server.run(&stock, "asks", |server| {
            server.end.as_ref().is_some_and(|end| !end.asked.is_empty())
        });
        let end = server.end();
        let request = end.asked.pop_front().unwrap();
        let Credentials::Given { user, password } = &request.credentials else {
            panic!("{:?}", request.credentials);
        };
        assert_eq!((user.as_str(), password.as_str()), ("anna", "secret word"));
        assert_eq!(request.certificates.first(), Some(&folder.pki.client.certificate));
        assert_eq!(request.peer_info.platform(), Some("linux"));
        let failure = AuthFailure::Text("come back on Monday".to_owned());
        end.session.deny(Instant::now(), failure).unwrap();
        server.run(&stock, "is told", |_| stock.has("AUTH_FAILED,come back on Monday"));
        assert_eq!(server.end().ended, Some(EndReason::Denied));
    }
}

#[test]
fn a_client_waits_for_a_decision_and_is_asked_a_question() {
    if !is_openvpn_here("a client waits") {
        return;
    }
    let folder = Folder::new();
    let options = options(&folder, false);
    let mut server = Server::new(GateConfig::default(), options, Decision::ByHand);
    let stock = Stock::client(&folder, "udp", server.port("udp"), &[]);
    server
        .run(&stock, "asks", |server| server.end.as_ref().is_some_and(|end| !end.asked.is_empty()));
    let (now, minutes) = (Instant::now(), Duration::from_secs(300));
    let session = &mut server.end().session;
    session.pend(now, minutes).unwrap();
    session.send(now, &Message::InfoPre("OPEN_URL:https://login.example".to_owned())).unwrap();
    server.run(&stock, "waits", |_| {
        stock.has("extending handshake timeout from 20s to 300s")
            && stock.has("OPEN_URL:https://login.example")
    });
    let peer = weft_openvpn::data::PeerNumber::new(1).unwrap();
    let options = OPTIONS.map(str::to_owned).to_vec();
    let acceptance = weft_openvpn::session::Acceptance { peer, options };
    server.end().session.accept(Instant::now(), acceptance).unwrap();
    run_connected(&mut server, &stock, "is let in");
}

#[test]
fn a_client_with_another_key_gets_no_state() {
    if !is_openvpn_here("a client with another key") {
        return;
    }
    let folder = Folder::new();
    for kind in ["tls-crypt", "tls-auth", "tls-crypt-v2"] {
        let (gate, words) = wrapping(&folder, kind);
        // The same files anew: the client has these.
        let _ = wrapping(&folder, kind);
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let mut server = Server::new(gate, options(&folder, false), accept());
        let stock = Stock::client(&folder, "udp", server.port("udp"), &words);
        server.run(&stock, kind, |server| server.refused.len() >= 2);
        let expected = match kind {
            "tls-crypt-v2" => Refusal::Wrap(WrapError::ForeignClientKey),
            _ => Refusal::Wrap(WrapError::BadMac),
        };
        assert!(server.refused.iter().all(|refused| *refused == expected), "{kind}");
        assert_eq!(server.sessions, 0, "{kind}");
    }
}

#[test]
fn a_client_of_another_authority_is_refused_by_tls() {
    if !is_openvpn_here("a client of another authority") {
        return;
    }
    let (folder, other) = (Folder::new(), Folder::new());
    folder.write("client.pem", &other.pki.client.certificate_pem);
    folder.write("client.key", &other.pki.client.key_pem);
    let mut server = Server::new(GateConfig::default(), options(&folder, false), accept());
    let stock = Stock::client(&folder, "udp", server.port("udp"), &[]);
    server.run(&stock, "ends", |server| server.end.as_ref().is_some_and(|end| end.ended.is_some()));
    assert!(matches!(server.end().ended, Some(EndReason::Tls(_))), "{:?}", server.end().ended);
    server.run(&stock, "is told", |_| stock.has("fatal SSL alert"));
    assert!(!stock.has(DONE));
}

#[test]
fn a_client_without_a_common_cipher_is_told_so() {
    if !is_openvpn_here("a client without a common cipher") {
        return;
    }
    let folder = Folder::new();
    let mut server = Server::new(GateConfig::default(), options(&folder, false), accept());
    let words = ["--data-ciphers", "AES-256-CBC"];
    let stock = Stock::client(&folder, "udp", server.port("udp"), &words);
    server.run(&stock, "is told", |_| {
        stock.has("AUTH_FAILED,Data channel cipher negotiation failed (no shared cipher)")
    });
}

#[test]
fn goodbyes_are_heard_by_both_ends() {
    if !is_openvpn_here("goodbyes") {
        return;
    }
    let folder = Folder::new();
    let options = || options(&folder, false);
    let mut server = Server::new(GateConfig::default(), options(), accept());
    let words = ["--explicit-exit-notify", "1"];
    let stock = Stock::client(&folder, "udp", server.port("udp"), &words);
    run_connected(&mut server, &stock, "exit");
    stock.signal("TERM");
    server.run(&stock, "exit", |server| {
        server.end.as_ref().is_some_and(|end| end.ended == Some(EndReason::PeerExit))
    });

    let mut server = Server::new(GateConfig::default(), options(), accept());
    let stock = Stock::client(&folder, "udp", server.port("udp"), &[]);
    run_connected(&mut server, &stock, "restart");
    let text = "back soon".to_owned();
    let restart = Message::Restart { preserve: true, next_remote: false, text };
    assert!(server.end().session.close(Instant::now(), &restart));
    server.run(&stock, "restart", |server| server.sessions == 2);
    assert!(stock.has("RESTART") || stock.has("server-pushed-connection-reset"));
    run_connected(&mut server, &stock, "again");
}

#[test]
fn a_client_that_starts_anew_on_its_port_gets_a_new_session() {
    if !is_openvpn_here("a client that starts anew") {
        return;
    }
    let folder = Folder::new();
    let (gate, words) = wrapping(&folder, "tls-crypt");
    let mut server = Server::new(gate, options(&folder, false), accept());
    let port = std::net::UdpSocket::bind("127.0.0.96:0").unwrap().local_addr().unwrap().port();
    let port = port.to_string();
    let mut words: Vec<&str> = words.iter().map(String::as_str).collect();
    words.extend(["--local", "127.0.0.96", "--lport", &port]);
    let stock = Stock::client(&folder, "udp", server.port("udp"), &words);
    run_connected(&mut server, &stock, "first");
    stock.signal("USR1");
    server.run(&stock, "second", |server| server.sessions == 2);
    run_connected(&mut server, &stock, "second");
}

/// The name of the test that runs once more in a network namespace of its own.
const OWN_NAMESPACE: &str = "our_client_connects_to_a_stock_server";
const IN_NAMESPACE: &str = "WEFT_REFEREE_NAMESPACE";

#[test]
fn our_client_connects_to_a_stock_server() {
    if !is_openvpn_here(OWN_NAMESPACE) {
        return;
    }
    if std::env::var_os(IN_NAMESPACE).is_some() {
        return serve_our_client();
    }
    // A stock server needs a device of its own, which must not be on this host.
    let is_able = |words: &[&str]| {
        Command::new("unshare").args(words).status().is_ok_and(|status| status.success())
    };
    let needs = "test -c /dev/net/tun && ip link set lo up";
    if !is_able(&["--net", "sh", "-c", needs]) {
        eprintln!("{OWN_NAMESPACE}: skipped, as it needs root, /dev/net/tun and iproute2");
        return;
    }
    let own = std::env::current_exe().unwrap();
    let words = ["--net", own.to_str().unwrap(), "--exact", OWN_NAMESPACE, "--nocapture"];
    let run = Command::new("unshare").args(words).env(IN_NAMESPACE, "1").output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(run.status.success(), "{}{}", text(&run.stdout), text(&run.stderr));
}

fn serve_our_client() {
    assert!(Command::new("ip").args(["link", "set", "lo", "up"]).status().unwrap().success());
    let folder = Folder::new();
    for (round, (proto, kind)) in [
        ("udp", "none"),
        ("udp", "tls-auth"),
        ("udp", "tls-crypt"),
        ("udp", "tls-crypt-v2"),
        ("tcp", "tls-crypt"),
        ("tcp", "tls-crypt-v2"),
    ]
    .into_iter()
    .enumerate()
    {
        let what = format!("{proto}, {kind}");
        let (wrap, client_key, words) = client_wrapping(&folder, kind);
        let mut more: Vec<&str> = words.iter().map(String::as_str).collect();
        more.extend(["--reneg-sec", if round < 2 { "5" } else { "0" }]);
        let stock = Stock::server(&folder, proto, &more);
        let mut options = client_options(&folder, proto == "tcp");
        (options.wrap, options.client_key) = (wrap, client_key);
        if round >= 2 {
            options.timing.renegotiate_after = Some(Duration::from_secs(3));
        }
        let mut client = Client::connect(proto, options, &stock);
        client.run(&stock, &what, |end| end.is_connected && end.pings >= 2);
        assert!(client.end.pushed.iter().any(|option| option.starts_with("ifconfig 10.9.0.")));
        client.run(&stock, &what, |end| end.key_ids.contains(&1));
        assert_eq!((client.end.unopened, &client.end.ended), (0, &None), "{what}");
        let log = stock.log();
        for fault in FAULTS {
            assert!(!log.contains(fault), "{what}: {fault:?} in the log:\n{log}");
        }
        assert!(client.end.session.close(Instant::now(), &Message::Exit));
        client.run(&stock, &what, |_| stock.has("exit message received"));
    }
    let words = ["--auth-user-pass-verify", "/bin/false", "via-env", "--script-security", "3"];
    let stock = Stock::server(&folder, "udp", &words);
    let mut client = Client::connect("udp", client_options(&folder, false), &stock);
    client.run(&stock, "is denied", |end| {
        matches!(end.ended, Some(EndReason::AuthFailed(AuthFailure::Plain)))
    });
}

/// A way to wrap: our client's keys, and a stock server's words for it.
fn client_wrapping(folder: &Folder, kind: &str) -> (WrapKeys, Option<Vec<u8>>, Vec<String>) {
    let (_, words) = wrapping(folder, kind);
    let path = |name: &str| folder.path(name).display().to_string();
    let key = || read_static_key(&folder.read("static.key")).unwrap();
    match kind {
        "none" => (WrapKeys::None, None, words),
        "tls-auth" => {
            let keys = WrapKeys::tls_auth(&key(), AuthDigest::Sha1, AuthDirection::One);
            (keys, None, ["--tls-auth", &path("static.key"), "0"].map(str::to_owned).to_vec())
        }
        "tls-crypt" => (WrapKeys::tls_crypt(&key(), Side::Client), None, words),
        _ => {
            let client = ClientKeyV2::parse(&folder.read("client.v2")).unwrap();
            let words = ["--tls-crypt-v2", &path("server.v2")].map(str::to_owned).to_vec();
            (WrapKeys::tls_crypt(&client.key, Side::Client), Some(client.wrapped), words)
        }
    }
}

fn client_options(folder: &Folder, is_stream: bool) -> ClientOptions {
    let tls = folder.pki.client_tls(&[&TLS12, &TLS13]);
    ClientOptions {
        timing: Timing { renegotiate_after: None, ..Timing::default() },
        ciphers: vec![DataCipher::Aes256Gcm, DataCipher::ChaCha20Poly1305],
        link: link(is_stream),
        credentials: Credentials::Given {
            user: "anna".to_owned(),
            password: Zeroizing::new("secret".to_owned()),
        },
        peer_info: PeerInfo::parse("IV_VER=2.6.0\nIV_PLAT=linux\n"),
        is_stream,
        ..ClientOptions::new(tls, server_name(), WrapKeys::None)
    }
}

#[test]
fn many_routes_are_pushed_in_several_messages() {
    if !is_openvpn_here("many routes") {
        return;
    }
    let folder = Folder::new();
    let mut pushed = OPTIONS.map(str::to_owned).to_vec();
    pushed.extend((0..200).map(|n| format!("route 10.9.{n}.0 255.255.255.0")));
    let decision = Decision::Accept(pushed);
    let mut server = Server::new(GateConfig::default(), options(&folder, false), decision);
    let stock = Stock::client(&folder, "udp", server.port("udp"), &[]);
    run_connected(&mut server, &stock, "routes");
    assert!(stock.has("push-continuation 1") && stock.has("route 10.9.199.0"));
}
