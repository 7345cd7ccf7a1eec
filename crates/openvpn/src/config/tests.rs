#![allow(clippy::unwrap_used, clippy::print_stdout)]

use proptest::prelude::*;
use weft_crypto::DataCipher;

use super::table::{ROWS, Rule};
use super::*;
use crate::device::KeyBlock;
use crate::messages::{Secret, Topology};
use crate::static_key::{AuthTokenKey, ClientKeyV2, ServerKeyV2};

const CERT: &str = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
const KEY: &str = "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n";

/// The folder of a server.
fn files(path: &str) -> Result<String, String> {
    match path {
        "ca.crt" | "keys/ca.crt" | "/etc/ca.crt" | "server.crt" => Ok(CERT.to_owned()),
        "server.key" => Ok(KEY.to_owned()),
        "locked.key" => Ok("-----BEGIN ENCRYPTED PRIVATE KEY-----\n".to_owned()),
        "ta.key" => Ok(KeyBlock::new([7; 256]).to_text().to_string()),
        "v2.key" => Ok(ServerKeyV2::new([7; 128]).to_text().to_string()),
        "token.key" => Ok(AuthTokenKey::new([7; 128]).to_text().to_string()),
        "more.conf" => Ok("max-clients 7\nup /etc/up.sh\nconfig more.conf\n".to_owned()),
        "pass" => Ok("anna\nsecret\n".to_owned()),
        _ => Err("no such file".to_owned()),
    }
}

fn server(text: &str) -> ServerImport {
    read_server_config(text, &mut files)
}

/// The lines that are refused, with the reasons.
fn refused(lines: &[ImportLine]) -> Vec<String> {
    let refused = lines.iter().filter_map(|line| match &line.verdict {
        Verdict::Refused(why) => Some(format!("{}: {why}", line.line)),
        _ => None,
    });
    refused.collect()
}

/// OpenVPN's sample server.conf without its comments, and what else is common.
const SERVER: &str = "port 1195
proto udp6
dev tun
ca ca.crt
cert server.crt
key server.key  # This file should be kept secret
dh dh2048.pem
topology subnet
server 10.8.0.0 255.255.255.0
server-ipv6 fd00:8::/64
ifconfig-pool-persist ipp.txt
push \"route 192.168.10.0 255.255.255.0\"
push \"dhcp-option DNS 10.8.0.1\"
push \"topology subnet\"
client-config-dir ccd
route 192.168.40.128 255.255.255.248
client-to-client
duplicate-cn
keepalive 10 120
tls-auth ta.key 0
tls-crypt-v2 v2.key force-cookie
cipher AES-256-CBC
data-ciphers AES-128-GCM:AES-256-GCM:AES-256-CBC
auth SHA256
tls-version-min 1.2
max-clients 100
user openvpn
group openvpn
persist-key
persist-tun
status openvpn-status.log 30
status-version 2
log-append openvpn.log
verb 3
mute 20
explicit-exit-notify 1
plugin /usr/lib/openvpn/openvpn-plugin-auth-pam.so openvpn
verify-client-cert optional
username-as-common-name
auth-gen-token 36000 600 external-auth
auth-gen-token-secret token.key
management 127.0.0.1 7505
reneg-sec 7200
remote-cert-tls client
";

#[test]
fn a_usual_server_is_taken_over() {
    let import = server(SERVER);
    assert_eq!(refused(&import.lines), [""; 0]);
    assert_eq!((import.lines.len(), import.missing.len()), (SERVER.lines().count(), 0));
    let nothing = |line: &&ImportLine| matches!(line.verdict, Verdict::NoMeaning(_));
    let names: Vec<&str> = import
        .lines
        .iter()
        .filter(nothing)
        .map(|line| line.text.split(' ').next().unwrap())
        .collect();
    let expected = [
        "dh",
        "push",
        "cipher",
        "user",
        "group",
        "persist-key",
        "persist-tun",
        "log-append",
        "verb",
        "mute",
    ];
    assert_eq!(names, expected);
    let settings = import.settings;
    assert_eq!((settings.port, settings.proto.name()), (1195, "udp6"));
    assert_eq!(settings.ipv4.unwrap().0.to_string(), "10.8.0.0");
    assert_eq!(settings.ipv6.unwrap().1, 64);
    assert_eq!(settings.topology, Topology::Subnet);
    assert_eq!(
        settings.pushes,
        [
            "route 192.168.10.0 255.255.255.0",
            "dhcp-option DNS 10.8.0.1",
            "ping 10",
            "ping-restart 120"
        ]
    );
    assert_eq!((settings.ping_s, settings.ping_restart_s), (10, 240));
    let tls = &settings.tls;
    assert_eq!(tls.ciphers, [DataCipher::Aes128Gcm, DataCipher::Aes256Gcm]);
    assert_eq!((tls.key_direction, tls.auth_digest.as_str()), (Some(0), "SHA256"));
    assert!(tls.tls_auth.is_some() && tls.checks_usage && settings.forces_cookie);
    assert_eq!(settings.pam_service.as_deref(), Some("openvpn"));
    assert_eq!(settings.client_cert, VerifyClientCert::Optional);
    let tokens = settings.tokens.unwrap();
    assert_eq!((tokens.lifetime_s, tokens.renewal_s), (Some(36_000), Some(600)));
    assert!(tokens.is_external && settings.token_key.is_some());
    assert_eq!(settings.management.unwrap().port, Some(7505));
    assert_eq!((settings.tls.renew_s, settings.clients_max), (7_200, 100));
    let status = StatusFile { path: "openvpn-status.log".to_owned(), interval_s: 30 };
    assert_eq!(settings.status, Some(status));
}

#[test]
fn what_is_lost_is_refused_with_line_and_reason() {
    let text = "dev tap\nclient-connect /bin/true\nsecret s.key\nca gone.crt\ncert ta.key\nkey locked.key\n\
        tls-auth server.key\ntls-crypt-v2 ta.key\nserver 10.8.0.0 255.255.0.255\nport 70000\nfragment 1300\n\
        keepalive 10 10\nfrobnicate 1\nauth frob\npush \"a,b\"\nplugin /x/ldap.so cfg\nremote a.example\n\
        push \"route 10\nconfig more.conf\ncrl-verify crl dir\n";
    let import = server(text);
    let reasons = refused(&import.lines);
    let parts = [
        "1: Weft carries IP packets",
        "2: it runs a program",
        "3: a static key protects",
        "4: gone.crt cannot be read (no such file)",
        "5: cert holds no \"CERTIFICATE\"",
        "6: the key is encrypted",
        "7: not a static key file",
        "8: no \"OpenVPN tls-crypt-v2 server key\"",
        "9: server has a bad value \"255.255.0.255\"",
        "10: port has a bad value \"70000\"",
        "11: packets are not cut",
        "12: keepalive has a bad value \"10\"",
        "13: OpenVPN has no directive \"frobnicate\"",
        "14: auth has a bad value \"frob\"",
        "15: the option has a comma",
        "16: plugins are not run",
        "17: this is a client's profile",
        "18: a \" has no second one",
        "20: a folder of revoked",
    ];
    for part in parts {
        assert!(reasons.iter().any(|reason| reason.starts_with(part)), "{part}: {reasons:#?}");
    }
    let nested: Vec<&ImportLine> = import.lines.iter().filter(|line| line.file.is_some()).collect();
    assert_eq!(nested.len(), 3 * (CONFIG_DEPTH_MAX - 1), "a file that names itself ends");
    assert_eq!(nested[0].file.as_deref(), Some("more.conf"));
    assert_eq!(import.settings.clients_max, 7);
    assert_eq!(import.missing.len(), 4);
}

#[test]
fn addresses_follow_from_the_network() {
    let settings = |text: &str| server(text).settings;
    let usual = settings("server 10.8.0.0 255.255.255.0\nserver-ipv6 fd00:8::/64\n");
    let pool = usual.client_pool_ipv4().map(|(first, last)| format!("{first} {last}"));
    assert_eq!(pool.as_deref(), Some("10.8.0.2 10.8.0.254"));
    assert_eq!(usual.server_ipv4(), "10.8.0.1".parse().ok());
    assert_eq!(usual.server_ipv6(), "fd00:8::1".parse().ok());
    assert_eq!(usual.client_pool_ipv6().unwrap().0.to_string(), "fd00:8::1000");
    let small = settings("server-ipv6 fd00:8::/112\nserver 10.8.0.0 255.255.255.0 nopool\n");
    assert_eq!(small.client_pool_ipv4(), None);
    assert!(settings("server-ipv6 fd00:8::/112\n").client_pool_ipv6().is_some());
    let by_hand =
        settings("mode server\nifconfig 10.9.0.1 255.255.255.0\nifconfig-pool 10.9.0.5 10.9.0.9\n");
    assert_eq!(by_hand.server_ipv4(), "10.9.0.1".parse().ok());
    assert_eq!(by_hand.client_pool_ipv4().unwrap().1.to_string(), "10.9.0.9");
    let outside = server("server 10.8.0.0 255.255.255.0\nifconfig-pool 10.9.0.5 10.9.0.9\n");
    assert!(outside.missing.iter().any(|what| what.contains("the pool is outside")));
    assert_eq!(refused(&server("server 10.8.0.1 255.255.255.0").lines).len(), 1);
    let text =
        "key-direction 2\ntls-auth ta.key 2\nstatus-version 4\ntls-version-max 1.1\nport x\n";
    assert_eq!(refused(&server(text).lines).len(), 5);
}

#[test]
fn a_report_is_for_people() {
    let import = server("port 1194\nfragment 1300\npush \"x\nverb 3\nconfig more.conf\n");
    let shown: Vec<String> = import.lines.iter().map(ImportLine::to_string).collect();
    assert_eq!(shown[0], "1: port 1194: taken over");
    assert!(shown[1].starts_with("2: fragment 1300: refused: packets are not cut"));
    assert!(shown[2].starts_with("3: refused: a \" has no second one"));
    assert_eq!(shown[3], "4: verb 3: means nothing here: messages go to the journal");
    assert_eq!(shown[4], "more.conf:1: max-clients 7: taken over");
}

#[test]
fn words_that_change_other_lines_are_obeyed() {
    let text = "cd keys\nca ca.crt\nca /etc/ca.crt\nca /ca.crt\nignore-unknown-option new-thing\nnew-thing 1\n\
        setenv opt newer-thing 2\nsetenv opt block-outside-dns\nsetenv FRIENDLY name\n\
        setenv-safe ROOM 7\nsetenv A=B 1\ndh [inline]\n--verb 3\n";
    let import = server(text);
    assert_eq!(
        refused(&import.lines),
        [
            "4: /ca.crt cannot be read (no such file): restore it, or correct the path",
            "11: setenv has a bad value \"A=B\": it takes a name, and a value",
        ]
    );
    assert!(import.settings.tls.ca.is_some());
    let variables = [("FRIENDLY", "name"), ("OPENVPN_ROOM", "7")];
    let variables = variables.map(|(name, value)| (name.to_owned(), value.to_owned()));
    assert_eq!(import.settings.environment, variables);
}

#[test]
fn every_directive_that_is_taken_over_has_a_reader() {
    // Values for the directives that need them; what matters is that somebody reads them.
    for (name, server_rule, client_rule) in ROWS {
        let text = format!("{name} 1 1\n");
        if *server_rule == Rule::Take {
            let reasons = refused(&server(&text).lines);
            assert!(!reasons.iter().any(|why| why.contains("not read here")), "{reasons:?}");
        }
        if *client_rule == Rule::Take {
            let reasons = refused(&read_client_profile(&text, &mut files).lines);
            assert!(!reasons.iter().any(|why| why.contains("not read here")), "{reasons:?}");
        }
    }
}

/// The directives that OpenVPN's own help names; `None`: it is not installed.
fn directives_of_openvpn() -> Option<Vec<String>> {
    let help = std::process::Command::new("openvpn").arg("--help").output().ok()?;
    let help = String::from_utf8_lossy(&help.stdout).into_owned();
    let first = |line: &str| {
        let word = line.trim_start().strip_prefix("--")?.split([' ', '\t', ':', ',']).next()?;
        (!word.is_empty() && !word.contains('*')).then(|| word.to_owned())
    };
    Some(help.lines().filter_map(first).collect())
}

#[test]
fn every_directive_of_the_installed_openvpn_has_a_row() {
    let Some(names) = directives_of_openvpn() else {
        println!("not run: openvpn is not installed");
        return;
    };
    assert!(names.len() > 200, "{names:?}");
    let unknown: Vec<&String> = names.iter().filter(|name| table::row(name).is_none()).collect();
    assert!(unknown.is_empty(), "{unknown:?}");
}

fn remotes() -> Vec<(String, u16, bool)> {
    vec![("a.example".to_owned(), 1194, false), ("2001:db8::1".to_owned(), 443, true)]
}

#[test]
fn a_written_profile_is_read_again() {
    let (key, wrapped) = (KeyBlock::new([9; 256]), [&[1; 297][..], &[1, 43]].concat());
    let v2 = ClientKeyV2 { key: key.clone(), wrapped };
    let (remotes, secret) = (remotes(), Secret::new(KEY));
    let profile = NewProfile {
        comment: "anna\nclient",
        remotes: &remotes,
        is_random: true,
        ca: CERT,
        cert: Some((CERT, &secret)),
        wrapping: Wrapping::None,
        server_name: Some("gateway \"one\""),
        asks_password: true,
        challenge: Some(("Code of the phone?", true)),
    };
    for wrapping in [
        Wrapping::None,
        Wrapping::TlsAuth(&key, Some(1), "SHA256"),
        Wrapping::TlsCrypt(&key),
        Wrapping::TlsCryptV2(&v2),
    ] {
        let text = NewProfile { wrapping, ..profile }.to_text().unwrap();
        let import = read_client_profile(&text, &mut files);
        assert_eq!((refused(&import.lines), import.missing.len()), (vec![], 0), "{wrapping:?}");
        let read = import.profile;
        assert_eq!(read.remotes.len(), 2);
        assert_eq!(read.target(&read.remotes[1]).0, 443);
        assert!(read.target(&read.remotes[1]).1.is_tcp && read.is_random && read.pulls);
        let name = NameCheck { kind: NameKind::Name, name: "gateway \"one\"".to_owned() };
        assert_eq!(read.tls.name_check, Some(name));
        assert_eq!(read.tls.key.unwrap().expose(), KEY);
        assert_eq!(read.login, Some(Login::default()));
        assert_eq!(read.challenge.unwrap().text, "Code of the phone?");
        match wrapping {
            Wrapping::None => assert!(read.tls.tls_auth.is_none() && read.tls.tls_crypt.is_none()),
            Wrapping::TlsAuth(..) => {
                assert_eq!(read.tls.tls_auth.unwrap().expose(), key.expose());
                assert_eq!((read.tls.key_direction, &*read.tls.auth_digest), (Some(1), "SHA256"));
            }
            Wrapping::TlsCrypt(_) => {
                assert_eq!(read.tls.tls_crypt.unwrap().expose(), key.expose());
            }
            Wrapping::TlsCryptV2(_) => {
                assert_eq!(read.tls_crypt_v2.unwrap().wrapped, v2.wrapped);
            }
        }
    }
    let text = profile.to_text().unwrap();
    assert!(text.starts_with("# anna client\nclient\n"));
    let bad = [("a b".to_owned(), 1, false)];
    let error = NewProfile { remotes: &bad, ..profile }.to_text().unwrap_err();
    assert_eq!(error, ProfileError::Host("a b".to_owned()));
    let sly = format!("{CERT}</ca>\nup /bin/sh\n");
    let error = NewProfile { ca: &sly, ..profile }.to_text().unwrap_err();
    assert_eq!(error, ProfileError::NotPem("ca"));
    let error = NewProfile { remotes: &[], ..profile }.to_text().unwrap_err();
    assert_eq!(error, ProfileError::Remotes(0));
}

#[test]
fn a_usual_profile_is_read() {
    let text = "client\ndev tun0\nproto tcp-client\nremote a.example 443\n<connection>\nremote b.example\n\
        port 1195\nproto udp\n</connection>\nnobind\nca ca.crt\nauth-user-pass pass\nstatic-challenge \"PIN\" 0\n\
        remote-cert-tls server\npull-filter ignore \"dhcp-option DNS\"\npull-filter accept \"\"\nroute-nopull\n\
        route 10.1.0.0 255.255.0.0\nredirect-gateway def1\nsetenv UV_ROOM 7\nsetenv CLIENT_CERT 0\ncomp-lzo\n\
        keepalive 10 60\nconnect-retry 5 300\npeer-fingerprint 00:11:22:33:44:55:66:77:88:99:aa:bb:cc:dd:ee:ff:\
        00:11:22:33:44:55:66:77:88:99:AA:BB:CC:DD:EE:FF\ntopology subnet\n";
    let import = read_client_profile(text, &mut files);
    assert_eq!((refused(&import.lines), &import.missing[..]), (vec![], &[][..]));
    let profile = import.profile;
    let targets: Vec<(u16, bool)> = profile
        .remotes
        .iter()
        .map(|remote| profile.target(remote))
        .map(|(port, proto)| (port, proto.is_tcp))
        .collect();
    assert_eq!(targets, [(443, true), (1195, false)]);
    let login = profile.login.unwrap();
    assert_eq!((login.user.as_deref(), login.password.unwrap().expose()), (Some("anna"), "secret"));
    assert_eq!(profile.pull_filters[1], PullFilter::Accept(String::new()));
    assert_eq!(profile.variables, [("UV_ROOM".to_owned(), "7".to_owned())]);
    assert_eq!((profile.options.len(), profile.ignores_routes), (2, true));
    assert_eq!(profile.tls.fingerprints[0][31], 0xff);
    assert_eq!((profile.ping_s, profile.connect_retry_s), (Some(10), Some(5)));
    let bad = read_client_profile(
        "server 10.8.0.0 255.255.255.0\nhttp-proxy a 1\nup x\n<connection>\n</connection>\n",
        &mut files,
    );
    assert_eq!(refused(&bad.lines).len(), 4);
    assert_eq!(bad.missing.len(), 4);
}

proptest! {
    #[test]
    fn no_text_makes_a_reader_panic(
        lines in prop::collection::vec(
            (prop::sample::select(ROWS.iter().map(|(name, ..)| *name).collect::<Vec<_>>()), "[ -~]{0,30}"), 0..12,
        ),
        junk in "[ -~\n<>]{0,60}",
    ) {
        let mut text: String = lines.iter().map(|(name, values)| format!("{name} {values}\n")).collect();
        text.push_str(&junk);
        let import = server(&text);
        prop_assert!(import.lines.iter().all(|line| line.line > 0));
        let _ = read_client_profile(&text, &mut files);
    }
}
