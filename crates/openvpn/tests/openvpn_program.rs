//! The installed `openvpn` as the referee of files and texts: its key files are read, its profiles are ours, its
//! options string is ours. Where it is not installed, the tests say so and end.
#![allow(clippy::unwrap_used, clippy::print_stdout, missing_docs)]

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

use aws_lc_rs::cipher::{AES_256, DecryptingKey, DecryptionContext, UnboundCipherKey};
use aws_lc_rs::hmac;
use weft_crypto::DataCipher;
use weft_openvpn::config::{
    ImportLine, NewProfile, Verdict, Wrapping, read_client_profile, read_server_config,
};
use weft_openvpn::device::{KeyBlock, Side};
use weft_openvpn::key_method::LinkOptions;
use weft_openvpn::messages::Secret;
use weft_openvpn::static_key::{AuthTokenKey, ClientKeyV2, ServerKeyV2, read_static_key};
use weft_openvpn::words;

/// Whether a program runs; says so if not.
fn is_installed(program: &str) -> bool {
    let found = Command::new(program).arg("--version").output().is_ok();
    if !found {
        println!("not run: {program} is not installed");
    }
    found
}

/// Runs a program that must succeed.
fn run(program: &str, folder: &Path, args: &[&str]) {
    let output = Command::new(program).args(args).current_dir(folder).output().unwrap();
    assert!(output.status.success(), "{program} {args:?}: {output:?}");
}

fn read(folder: &Path, name: &str) -> String {
    std::fs::read_to_string(folder.join(name)).unwrap()
}

#[test]
fn key_files_of_openvpn_are_read_and_written_alike() {
    if !is_installed("openvpn") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    run("openvpn", folder, &["--genkey", "secret", "ta.key"]);
    run("openvpn", folder, &["--genkey", "tls-crypt-v2-server", "server.key"]);
    let client = ["--tls-crypt-v2", "server.key", "--genkey", "tls-crypt-v2-client", "client.key"];
    run("openvpn", folder, &client);
    run("openvpn", folder, &["--genkey", "auth-token", "token.key"]);
    let text = read(folder, "ta.key");
    assert_eq!(*read_static_key(&text).unwrap().to_text(), text);
    let text = read(folder, "token.key");
    assert_eq!(*AuthTokenKey::parse(&text).unwrap().to_text(), text);
    let text = read(folder, "server.key");
    let server = ServerKeyV2::parse(&text).unwrap();
    assert_eq!(*server.to_text(), text);
    let text = read(folder, "client.key");
    let client = ClientKeyV2::parse(&text).unwrap();
    assert_eq!(*client.to_text(), text);
    // The wrapped key is the client's own, so the two parts were cut at the right place.
    let unwrapped = unwrap(&server, &client.wrapped);
    assert_eq!(unwrapped[..256], client.key.expose()[..]);
    assert_eq!(unwrapped[256], 1, "a time follows, as openvpn writes it");
}

/// tls-crypt-v2 by its definition: tag 32, then AES-256-CTR, then a length of 2 bytes.
fn unwrap(server: &ServerKeyV2, wrapped: &[u8]) -> Vec<u8> {
    let (tag, rest) = wrapped.split_at(32);
    let (ciphertext, length) = rest.split_at(rest.len() - 2);
    let key = UnboundCipherKey::new(&AES_256, &server.cipher_key()[..32]).unwrap();
    let iv: [u8; 16] = tag[..16].try_into().unwrap();
    let mut plaintext = ciphertext.to_vec();
    let key = DecryptingKey::ctr(key).unwrap();
    key.decrypt(&mut plaintext, DecryptionContext::Iv128(iv.into())).unwrap();
    let key = hmac::Key::new(hmac::HMAC_SHA256, &server.hmac_key()[..32]);
    hmac::verify(&key, &[length, &plaintext].concat(), tag).unwrap();
    plaintext
}

/// A certificate that has itself as its authority, and its key.
fn certificate(folder: &Path) -> (String, Secret) {
    let args = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=anna \
        -keyout key.pem -out cert.pem";
    run("openssl", folder, &args.split_whitespace().collect::<Vec<_>>());
    (read(folder, "cert.pem"), Secret::new(read(folder, "key.pem")))
}

/// Starts a client until it goes to the server, or ends; returns what it said until then.
fn start(folder: &Path, args: &[&str]) -> Vec<String> {
    let mut child = Command::new("openvpn")
        .args(args)
        .current_dir(folder)
        .stdout(Stdio::piped())
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    let mut said = Vec::new();
    for line in BufReader::new(child.stdout.take().unwrap()).lines() {
        said.push(line.unwrap());
        let last = said.last().unwrap();
        if last.contains("link remote") || last.contains("Attempting to establish TCP") {
            break;
        }
    }
    let _ = child.kill();
    child.wait().unwrap();
    said
}

#[test]
fn profiles_start_the_stock_client() {
    if !is_installed("openvpn") || !is_installed("openssl") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let (cert, key) = certificate(folder);
    run("openvpn", folder, &["--genkey", "tls-crypt-v2-server", "server.key"]);
    let client = ["--tls-crypt-v2", "server.key", "--genkey", "tls-crypt-v2-client", "client.key"];
    run("openvpn", folder, &client);
    let v2 = ClientKeyV2::parse(&read(folder, "client.key")).unwrap();
    let fixed = KeyBlock::new([0x5a; 256]);
    std::fs::write(folder.join("pass"), "anna\nsecret\n").unwrap();
    // The discard port of this host: nobody answers.
    for (is_tcp, wrapping) in [
        (false, Wrapping::None),
        (true, Wrapping::TlsAuth(&fixed, Some(1), "SHA256")),
        (false, Wrapping::TlsCrypt(&fixed)),
        (true, Wrapping::TlsCryptV2(&v2)),
    ] {
        let remotes = [("127.0.0.1".to_owned(), 9, is_tcp)];
        let profile = NewProfile {
            comment: "for a test",
            remotes: &remotes,
            is_random: true,
            ca: &cert,
            cert: Some((&cert, &key)),
            wrapping,
            server_name: Some("a \"quoted\" \\ name"),
            asks_password: true,
            challenge: None,
        };
        let text = profile.to_text().unwrap();
        std::fs::write(folder.join("p.ovpn"), &*text).unwrap();
        let said =
            start(folder, &["--config", "p.ovpn", "--auth-user-pass", "pass", "--verb", "4"]);
        let last = said.last().unwrap();
        let reached = if is_tcp { "Attempting to establish TCP" } else { "link remote" };
        assert!(last.contains(reached), "{wrapping:?}: {said:#?}");
        let name = "verify_x509_name = 'a \"quoted\" \\ name'";
        assert!(said.iter().any(|line| line.contains(name)), "{said:#?}");
    }
}

#[test]
fn what_openvpn_refuses_in_a_file_is_refused() {
    if !is_installed("openvpn") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("bad.ovpn");
    for line in [
        "setenv A \"x",
        "setenv A 'x",
        "setenv A x\\y",
        "no-such-directive 1",
        "<ca>\nx",
        "remote a 0",
    ] {
        let text = format!("client\ndev null\n{line}\n");
        std::fs::write(&path, &text).unwrap();
        let said = start(folder.path(), &["--config", "bad.ovpn"]);
        assert!(
            said.iter().any(|said| said.contains("ptions error")
                || said.contains("ERROR")
                || said.contains("Options warning")),
            "{line}: {said:#?}"
        );
        let import = read_client_profile(&text, &mut |_: &str| Err("no file".to_owned()));
        let reasons: Vec<_> = import
            .lines
            .iter()
            .filter(|read| matches!(read.verdict, Verdict::Refused(_)))
            .map(|read| read.line)
            .collect();
        assert_eq!(reasons, [3], "{line}");
    }
}

/// How many odd lines are tried.
const LINES: usize = 200;

/// Lines of the characters that mean something, always the same ones.
fn odd_lines() -> Vec<String> {
    let chars = ['a', 'b', ' ', '"', '\'', '\\', '\\', '#', ';', 'c'];
    let mut state = 0x2545_f491_u32;
    let mut next = |below: usize| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 16) as usize % below
    };
    (0..LINES).map(|_| (0..1 + next(8)).map(|_| chars[next(chars.len())]).collect()).collect()
}

#[test]
fn lines_are_cut_as_openvpn_cuts_them() {
    if !is_installed("openvpn") || !is_installed("openssl") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    certificate(folder);
    let common =
        "client\ndev null\nremote 127.0.0.1 9\nca cert.pem\ncert cert.pem\nkey key.pem\nverb 4\n";
    let (mut taken, mut refused) = (0, 0);
    for odd in odd_lines() {
        let line = format!("verify-x509-name {odd} name");
        std::fs::write(folder.join("odd.conf"), format!("{common}{line}\n")).unwrap();
        match words::split(&line) {
            Ok(words) if words.len() == 3 && words[2] == "name" && !words[1].is_empty() => {
                let said = start(folder, &["--config", "odd.conf"]);
                let wanted = format!("verify_x509_name = '{}'", words[1]);
                assert!(said.iter().any(|said| said.contains(&wanted)), "{line}: {said:#?}");
                taken += 1;
            }
            Ok(_) => {}
            Err(error) => {
                let said = start(folder, &["--config", "odd.conf"]);
                let is_refused = |said: &String| {
                    said.contains("Options error") || said.contains("Bad backslash")
                };
                assert!(said.iter().any(is_refused), "{line}: {error}: {said:#?}");
                refused += 1;
            }
        }
    }
    assert!(taken > 20 && refused > 20, "{taken} taken, {refused} refused");
}

/// The sample files of Debian's package, with every directive that is commented out there.
#[test]
fn the_sample_files_have_a_verdict_for_every_line() {
    let folder = Path::new("/usr/share/doc/openvpn/examples");
    let Ok(server) = std::fs::read_to_string(folder.join("sample-config-files/server.conf")) else {
        println!("not run: the sample files of openvpn are not installed");
        return;
    };
    let client = read(folder, "sample-config-files/client.conf");
    let mut files = |path: &str| {
        let path = folder.join("sample-keys").join(path);
        std::fs::read_to_string(path).map_err(|error| error.to_string())
    };
    let refused = |lines: Vec<ImportLine>| -> Vec<String> {
        let refused = lines.iter().filter(|line| matches!(line.verdict, Verdict::Refused(_)));
        refused.map(ImportLine::to_string).collect()
    };
    let import = read_server_config(&server, &mut files);
    assert_eq!((refused(import.lines), import.missing), (vec![], vec![]));
    assert!(import.settings.tls.ca.is_some() && import.settings.ipv4.is_some());
    let import = read_client_profile(&client, &mut files);
    assert_eq!((refused(import.lines), import.missing), (vec![], vec![]));
    assert_eq!(import.profile.remotes.len(), 1);
    for text in [server, client] {
        let all = text.replace("\n;", "\n");
        assert_ne!(all, text);
        let import = read_server_config(&all, &mut files);
        assert!(import.settings.tls.tls_auth.is_some());
        let server = refused(import.lines);
        let client = refused(read_client_profile(&all, &mut files).lines);
        for line in server.iter().chain(&client) {
            assert!(!line.contains("no directive") && !line.contains("not read here"), "{line}");
        }
    }
}

#[test]
fn options_strings_are_those_of_the_stock_client() {
    if !is_installed("openvpn") || !is_installed("openssl") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    certificate(folder);
    run("openvpn", folder, &["--genkey", "secret", "ta.key"]);
    let plain = LinkOptions { auth_digest: "SHA256".to_owned(), ..LinkOptions::default() };
    let fixed = LinkOptions {
        tun_mtu: 1400,
        is_tcp: true,
        cipher: Some(DataCipher::Aes256Gcm),
        has_tls_auth: true,
        key_direction: Some(1),
        ..plain.clone()
    };
    for (options, more) in [
        (plain, "--proto udp"),
        (fixed, "--proto tcp-client --cipher AES-256-GCM --tls-auth ta.key 1 --tun-mtu 1400"),
    ] {
        let common = "--client --dev tun --remote 127.0.0.1 9 --ca cert.pem --cert cert.pem --key key.pem \
            --nobind --auth SHA256 --verb 7";
        let args: Vec<&str> = common.split_whitespace().chain(more.split_whitespace()).collect();
        let said = start(folder, &args);
        for (what, text) in [
            ("Local Options String (VER=V4)", options.to_text(Side::Client)),
            ("Expected Remote Options String (VER=V4)", options.expected_of_peer(Side::Client)),
        ] {
            let wanted = format!("{what}: '{text}'");
            assert!(said.iter().any(|line| line.contains(&wanted)), "{wanted}: {said:#?}");
        }
    }
}
