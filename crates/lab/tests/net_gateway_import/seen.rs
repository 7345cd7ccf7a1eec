//! tshark reads every packet of the control channel: with no key, and with what it can know of a wrapping.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use anyhow::{Context, ensure};
use weft_bench::sandbox::require;
use weft_lab::net::capture::{Capture, tshark};
use weft_lab::net::gateway::LIMIT;

use crate::pki::{Keys, run};
use crate::stage::{SERVER, Stage};

/// Opcodes.
const SOFT_RESET: u8 = 3;
const CONTROL: u8 = 4;
const ACK: u8 = 5;
const CLIENT_RESET: u8 = 7;
const SERVER_RESET: u8 = 8;
const DATA: u8 = 9;
const CLIENT_RESET_V3: u8 = 10;
const CONTROL_WITH_KEY: u8 = 11;

/// The id of a session's first key.
const FIRST_KEY: &str = "0";

/// Packets of later keys are wrapped by a key from the first, whatever wraps those of the first.
const DYNAMIC: &[&str] = &["openvpn.tls_auth_detection_override:TRUE", "openvpn.tls_crypt:TRUE"];

/// What tshark is told of a wrapping.
struct Told {
    /// The server's line.
    server: &'static str,
    /// The client's line, the block of its key and the file.
    client: Option<(&'static str, &'static str, &'static str)>,
    preferences: &'static [&'static str],
    /// What is behind the wrapping is readable.
    is_open: bool,
    reset: u8,
}

const WRAPPINGS: [Told; 4] = [
    Told { server: "", client: None, preferences: &[], is_open: true, reset: CLIENT_RESET },
    Told {
        server: "tls-auth ta.key 0",
        client: Some(("key-direction 1", "tls-auth", "ta.key")),
        preferences: &[
            "openvpn.tls_auth_detection_override:TRUE",
            "openvpn.tls_auth:TRUE",
            "openvpn.tls_auth_hmac_size:32",
        ],
        is_open: true,
        reset: CLIENT_RESET,
    },
    Told {
        server: "tls-crypt ta.key",
        client: Some(("", "tls-crypt", "ta.key")),
        preferences: &["openvpn.tls_crypt:TRUE"],
        is_open: false,
        reset: CLIENT_RESET,
    },
    Told {
        server: "tls-crypt-v2 v2.key",
        client: Some(("", "tls-crypt-v2", "client-v2.key")),
        preferences: &["openvpn.tls_crypt:TRUE"],
        is_open: false,
        reset: CLIENT_RESET_V3,
    },
];

/// What tshark reads in the packets of one end.
#[derive(Debug, Default)]
struct End {
    opcodes: BTreeMap<u8, usize>,
    sessions: BTreeSet<String>,
    /// Those of the other end that it names.
    named: BTreeSet<String>,
    /// Numbers of messages in datagrams of the first key.
    messages: BTreeSet<u64>,
}

/// Reads a capture; the first is the client's end.
fn read(file: &Path, preferences: &[&'static str]) -> anyhow::Result<[End; 2]> {
    let ports = ["-d", "udp.port==1194,openvpn", "-d", "tcp.port==1194,openvpn"];
    let with = |more: &[&'static str]| -> Vec<&'static str> {
        let more = more.iter().flat_map(|preference| ["-o", preference]);
        ports.into_iter().chain(more).collect()
    };
    let mut words = with(preferences);
    let of_first = "!openvpn.keyid || openvpn.keyid == 0";
    for (words, which) in [(&words, of_first), (&with(DYNAMIC), "openvpn.keyid > 0")] {
        let bad = format!(
            "({which}) && (_ws.malformed || _ws.expert.group == \"Malformed\" || \
             ((udp.port == 1194 || tcp.len > 0) && !openvpn))"
        );
        let bad = tshark(file, &[&words[..], &["-Y", &bad, "-V"]].concat())?;
        ensure!(bad.is_empty(), "tshark cannot read this: {bad}");
    }
    words.extend(["-Y", "openvpn", "-T", "fields", "-E", "separator=|"]);
    for field in ["srcport", "opcode", "sessionid", "rsessionid", "keyid", "mpid"] {
        match field {
            "srcport" => words.extend(["-e", "udp.srcport", "-e", "tcp.srcport"]),
            "opcode" => words.extend(["-e", "openvpn.opcode"]),
            "sessionid" => words.extend(["-e", "openvpn.sessionid"]),
            "rsessionid" => words.extend(["-e", "openvpn.rsessionid"]),
            "keyid" => words.extend(["-e", "openvpn.keyid"]),
            _ => words.extend(["-e", "openvpn.mpid"]),
        }
    }
    let mut ends = [End::default(), End::default()];
    for line in tshark(file, &words)?.lines() {
        let fields: Vec<&str> = line.split('|').collect();
        let [udp, tcp, opcodes, sessions, named, keys, messages] = fields[..] else {
            anyhow::bail!("other fields: {line}");
        };
        let end = &mut ends[usize::from(udp == "1194" || tcp == "1194")];
        for opcode in opcodes.split(',') {
            *end.opcodes.entry(number(opcode)? as u8).or_default() += 1;
        }
        let all = |of: &str| -> Vec<String> {
            of.split(',').filter(|it| !it.is_empty()).map(str::to_owned).collect()
        };
        end.sessions.extend(all(sessions));
        // What is behind the wrapping of a later key is not readable.
        if all(keys).iter().any(|key| key != FIRST_KEY) {
            continue;
        }
        end.named.extend(all(named));
        if let [message] = &all(messages)[..] {
            end.messages.insert(number(message)?);
        }
    }
    Ok(ends)
}

fn number(text: &str) -> anyhow::Result<u64> {
    let parsed = match text.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16),
        None => text.parse(),
    };
    parsed.with_context(|| text.to_owned())
}

#[test]
fn tshark_reads_every_packet_of_the_control_channel() -> anyhow::Result<()> {
    for (program, package) in [("tshark", "tshark"), ("tcpdump", "tcpdump")] {
        require(program, package)?;
    }
    let stage = Stage::new(Keys::Ecdsa)?;
    let words = ["--tls-crypt-v2", "v2.key", "--genkey", "tls-crypt-v2-client", "client-v2.key"];
    run(&stage.folder, "openvpn", &words)?;
    let mut machine = stage.machine(1)?;
    for (number, told) in WRAPPINGS.iter().enumerate() {
        let key = match told.client {
            None => String::new(),
            Some((line, block, file)) => {
                format!("{line}\n<{block}>\n{}</{block}>", stage.pki.text(file)?)
            }
        };
        let profile = stage.profile("alice", &format!("reneg-sec 4\n{key}"))?;
        stage.imported(&format!("{SERVER}{}\n", told.server), &[])?;
        if number == 0 {
            stage.serve(&["--listen", "1194", "--listen", "tcp:1194"])?;
        }
        for is_tcp in [false, true] {
            let what = format!("{:?}, tcp: {is_tcp}", told.server);
            machine.is_tcp = is_tcp;
            let file = stage.folder.join(format!("seen{number}{is_tcp}.pcap"));
            let capture = Capture::start(&machine.netns, "wan", &file, "port 1194")?;
            let mut client = machine.connect(&profile).with_context(|| what.clone())?;
            machine.wait_ping("10.8.0.1".parse()?)?;
            client.process.line_with("Control Channel: TLS", LIMIT)?;
            client.process.terminate(LIMIT)?;
            capture.finish()?;
            seen(&file, told, is_tcp).with_context(|| what)?;
        }
    }
    Ok(())
}

/// Checks a capture of a connection whose key was renewed once.
fn seen(file: &Path, told: &Told, is_tcp: bool) -> anyhow::Result<()> {
    let [client, server] = read(file, told.preferences)?;
    let count = |end: &End, opcode: u8| end.opcodes.get(&opcode).copied().unwrap_or_default();
    let both = [CONTROL, ACK, DATA, SOFT_RESET];
    // Over UDP the client shows its key once more, with the proof of its address.
    let with_key = [told.reset, CONTROL_WITH_KEY];
    let shows_it_again = told.reset == CLIENT_RESET_V3 && !is_tcp;
    let clients = if shows_it_again { &with_key[..] } else { &with_key[..1] };
    for (end, own) in [(&client, clients), (&server, &[SERVER_RESET][..])] {
        let all: BTreeSet<u8> = both.iter().chain(own).copied().collect();
        let seen: BTreeSet<u8> = end.opcodes.keys().copied().collect();
        // Who begins the renewal sends a soft reset, and gets one.
        ensure!(seen == all, "{own:?}: {end:?}");
        for opcode in own {
            ensure!(count(end, *opcode) > 0, "{opcode}: {end:?}");
        }
        ensure!(end.sessions.len() == 1, "an end has one session: {end:?}");
    }
    if !told.is_open {
        return Ok(());
    }
    for (end, other) in [(&client, &server), (&server, &client)] {
        ensure!(end.named == other.sessions, "{end:?} names not {other:?}");
        if !is_tcp {
            let numbers = &end.messages;
            let last = numbers.last().copied().context("no messages")?;
            ensure!(numbers.len() as u64 == last + 1, "there are gaps: {numbers:?}");
            ensure!(last > 2, "{numbers:?}");
        }
    }
    Ok(())
}
