#![allow(clippy::unwrap_used, clippy::print_stdout)]

use std::time::UNIX_EPOCH;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use weft_openvpn::device::Traffic;

use super::*;
use crate::services::gateway::roster::Entry;

fn facts() -> Facts {
    Facts { pid: 4711, format: Format::Two }
}

fn session(now: Instant) -> Session {
    let mut session = Session::new(now, facts(), None);
    assert_eq!(session.poll_output(), format!("{GREETING}\r\n"));
    session
}

/// Sends lines, and returns what is asked for; what is said to them waits.
fn send(session: &mut Session, text: &str) -> Option<Ask> {
    let now = Instant::now();
    session.handle_bytes(now, text.as_bytes());
    while session.step(now) {}
    session.poll_ask()
}

/// The answer to a line that needs nobody.
fn said(session: &mut Session, line: &str) -> String {
    assert_eq!(send(session, &format!("{line}\n")), None, "{line}");
    session.poll_output()
}

fn end(whom: Whom) -> Option<Ask> {
    let text = commands::RESTART.to_owned();
    let farewell = Message::Restart { preserve: true, next_remote: false, text };
    Some(Ask::End { whom, farewell })
}

fn roster(bytes: &[(u32, u64)]) -> Answer {
    let entry = |(number, bytes): &(u32, u64)| Entry {
        number: *number,
        name: format!("client{number}"),
        user: None,
        addresses: Vec::new(),
        networks: Vec::new(),
        real_address: "192.0.2.1:1194".parse().unwrap(),
        link: Traffic { rx_bytes: *bytes, tx_bytes: *bytes + 1, ..Traffic::default() },
        since: UNIX_EPOCH,
        cipher: "AES-256-GCM",
    };
    let entries = bytes.iter().map(entry).collect();
    let roster = Roster { at: UNIX_EPOCH, is_kernel: false, entries, total: (50, 60) };
    Answer::Roster(Box::new(roster))
}

/// What Debian's OpenVPN 2.6.14 answered to the same lines.
#[test]
fn answers_are_in_openvpns_words() {
    let mut session = session(Instant::now());
    for (line, answer) in [
        ("pid", "SUCCESS: pid=4711"),
        ("\"pid\"", "SUCCESS: pid=4711"),
        ("status 4", "ERROR: bad status format version number"),
        ("state on", "SUCCESS: real-time state notification set to ON"),
        ("state off", "SUCCESS: real-time state notification set to OFF"),
        ("state x", "ERROR: state parameter must be 'on' or 'off' or some number n or 'all'"),
        ("log on", "SUCCESS: real-time log notification set to ON"),
        ("log off", "SUCCESS: real-time log notification set to OFF"),
        ("log", "ERROR: the 'log' command requires at least 1 parameter"),
        ("echo", "ERROR: the 'echo' command requires at least 1 parameter"),
        ("echo all", "END"),
        ("echo on all", "SUCCESS: real-time echo notification set to ON\r\nEND"),
        ("verb 99", "ERROR: verb level is out of range"),
        ("mute", "SUCCESS: mute=0"),
        ("hold", "SUCCESS: hold=0"),
        ("hold off", "SUCCESS: hold flag set to OFF"),
        ("hold release", "SUCCESS: hold release succeeded"),
        ("hold x", "ERROR: bad hold command parameter"),
        ("foo bar", "ERROR: unknown command, enter 'help' for more options"),
        ("STATUS 2", "ERROR: unknown command, enter 'help' for more options"),
        ("kill", "ERROR: the 'kill' command requires 1 parameter"),
        ("kill 1.2.3.4:x", "ERROR: port number is out of range: x"),
        ("kill [::1]:70000", "ERROR: port number is out of range: 70000"),
        ("kill host:5", "ERROR: error parsing IP address: host"),
        ("client-kill", "ERROR: the 'client-kill' command requires at least 1 parameter"),
        ("client-kill x", "ERROR: cannot parse CID"),
        ("client-kill 99999999999", "ERROR: client-kill command failed"),
        ("client-kill 1 AUTH_FAILED", "ERROR: client-kill command failed"),
        ("bytecount", "ERROR: the 'bytecount' command requires 1 parameter"),
        ("bytecount x", "SUCCESS: bytecount interval changed"),
        (
            "remote-entry-count",
            "ERROR: The 'remote-entry-count' command is not supported by the current daemon mode",
        ),
        ("hold on", "ERROR: The 'hold' command is not supported by the current daemon mode"),
    ] {
        assert_eq!(said(&mut session, line), format!("{answer}\r\n"), "{line}");
    }
    assert_eq!(said(&mut session, ""), "");
    assert!(said(&mut session, "\"pid").starts_with("ERROR: Options error: "));
    let version = said(&mut session, "version");
    assert!(version.starts_with("OpenVPN Version: OpenVPN 2.6.0 "), "{version}");
    assert!(version.ends_with("\r\nManagement Version: 5\r\nEND\r\n"), "{version}");
    let help = said(&mut session, "help");
    assert!(help.starts_with("Management Interface for OpenVPN ") && help.ends_with("\r\nEND\r\n"));
    assert!(!session.is_over());
    said(&mut session, "quit");
    assert!(session.is_over());
}

#[test]
fn lines_are_answered_one_after_the_other_whatever_their_pieces() {
    let mut session = session(Instant::now());
    assert_eq!(send(&mut session, "pi"), None);
    // A status waits for the gateway, and what follows waits for the status.
    assert_eq!(send(&mut session, "d\r\nstatus 2\nload-stats\npid\n"), Some(Ask::Roster));
    assert_eq!(session.poll_output(), "SUCCESS: pid=4711\r\n");
    assert!(!session.step(Instant::now()));
    session.handle_answer(roster(&[(3, 7)]));
    let status = session.poll_output();
    assert!(status.starts_with("TITLE,OpenVPN ") && status.ends_with("\r\nEND\r\n"), "{status}");
    assert!(status.contains("\r\nCLIENT_LIST,client3,192.0.2.1:1194,,,7,8,"), "{status}");
    assert_eq!(send(&mut session, ""), Some(Ask::Roster));
    session.handle_answer(roster(&[(3, 7)]));
    assert_eq!(send(&mut session, ""), None);
    let rest = "SUCCESS: nclients=1,bytesin=50,bytesout=60\r\nSUCCESS: pid=4711\r\n";
    assert_eq!(session.poll_output(), rest);
    assert_eq!(send(&mut session, "status x\n"), Some(Ask::Roster));
    session.handle_answer(roster(&[(3, 7)]));
    assert_eq!(session.poll_output(), status, "what is no number is the format that is set");
    // The gateway may have ended meanwhile.
    assert_eq!(send(&mut session, "status\n"), Some(Ask::Roster));
    session.handle_answer(Answer::Away);
    assert!(session.poll_output().starts_with("ERROR: "));
}

#[test]
fn sessions_are_named_by_client_by_place_or_by_number() {
    let mut session = session(Instant::now());
    let at = |is_tcp, address: &str, port| {
        end(Whom::At { is_tcp, address: address.parse().unwrap(), port })
    };
    for (line, ask) in [
        ("kill alice", end(Whom::Name("alice".into()))),
        ("kill \"anna b\"", end(Whom::Name("anna b".into()))),
        ("kill 1.2.3.4:5", at(None, "1.2.3.4", Some(5))),
        ("kill tcp4:1.2.3.4:5", at(Some(true), "1.2.3.4", Some(5))),
        ("kill udp:[::1]:5", at(Some(false), "::1", Some(5))),
        ("kill 2001:db8::1", at(None, "2001:db8::1", None)),
        (
            "client-kill 7",
            Some(Ask::End {
                whom: Whom::Number(7),
                farewell: Message::Restart {
                    preserve: false,
                    next_remote: false,
                    text: String::new(),
                },
            }),
        ),
        (
            "client-kill 7 \"HALT,bye bye\"",
            Some(Ask::End { whom: Whom::Number(7), farewell: Message::Halt("bye bye".into()) }),
        ),
    ] {
        assert_eq!(send(&mut session, &format!("{line}\n")), ask, "{line}");
        session.handle_answer(Answer::Ended(0));
    }
    session.poll_output();
    for (line, ended, answer) in [
        ("kill a", 0, "ERROR: common name 'a' not found"),
        ("kill a", 2, "SUCCESS: common name 'a' found, 2 client(s) killed"),
        ("kill 1.2.3.4:5", 0, "ERROR: client at address 1.2.3.4:5 not found"),
        ("kill 1.2.3.4:5", 1, "SUCCESS: 1 client(s) at address 1.2.3.4:5 killed"),
        ("client-kill 1", 0, "ERROR: client-kill command failed"),
        ("client-kill 1", 1, "SUCCESS: client-kill command succeeded"),
    ] {
        assert!(send(&mut session, &format!("{line}\n")).is_some());
        session.handle_answer(Answer::Ended(ended));
        assert_eq!(session.poll_output(), format!("{answer}\r\n"));
    }
}

#[test]
fn notices_come_to_those_who_asked() {
    let mut session = session(Instant::now());
    let line = Told::Line("1,I,hello".into());
    let state = Told::State("1,CONNECTED,SUCCESS,10.0.0.1,,,,".into());
    session.handle_told(&line);
    session.handle_told(&state);
    session.handle_lost(UNIX_EPOCH, 3);
    assert_eq!(session.poll_output(), "");
    said(&mut session, "state on");
    assert_eq!(send(&mut session, "log on all\n"), Some(Ask::Lines(usize::MAX)));
    session.handle_answer(Answer::Texts(vec!["0,I,before".into()]));
    let answer = "SUCCESS: real-time log notification set to ON\r\n0,I,before\r\nEND\r\n";
    assert_eq!(session.poll_output(), answer);
    session.handle_told(&line);
    session.handle_told(&state);
    let notices = ">LOG:1,I,hello\r\n>STATE:1,CONNECTED,SUCCESS,10.0.0.1,,,,\r\n";
    assert_eq!(session.poll_output(), notices);
    session.handle_lost(UNIX_EPOCH, 3);
    assert!(session.poll_output().starts_with(">LOG:0,W,3 notices are lost"));
    said(&mut session, "log off");
    session.handle_told(&line);
    assert_eq!(session.poll_output(), "");
    assert_eq!(send(&mut session, "state\n"), Some(Ask::States(1)));
    session.handle_answer(Answer::Texts(Vec::new()));
    assert_eq!(session.poll_output(), "END\r\n");
    session.handle_told(&Told::Established(Established {
        number: 2,
        name: "a\nb".into(),
        user: None,
        real_address: "[2001:db8::2]:5".parse().unwrap(),
        addresses: vec!["10.0.0.2".parse().unwrap()],
        version: Some("2.6.14".into()),
        platform: None,
        at: UNIX_EPOCH,
    }));
    let expected = [
        ">CLIENT:ESTABLISHED,2",
        ">CLIENT:ENV,time_unix=0",
        ">CLIENT:ENV,time_ascii=1970-01-01 00:00:00",
        ">CLIENT:ENV,ifconfig_pool_remote_ip=10.0.0.2",
        ">CLIENT:ENV,trusted_ip6=2001:db8::2",
        ">CLIENT:ENV,trusted_port=5",
        ">CLIENT:ENV,untrusted_ip6=2001:db8::2",
        ">CLIENT:ENV,untrusted_port=5",
        ">CLIENT:ENV,common_name=a_b",
        ">CLIENT:ENV,IV_VER=2.6.14",
        ">CLIENT:ENV,END",
        "",
    ];
    assert_eq!(session.poll_output(), expected.join("\r\n"));
}

#[test]
fn bytes_are_told_of_clients_that_moved_some() {
    let now = Instant::now();
    let mut session = session(now);
    session.handle_bytes(now, b"bytecount 5\n");
    assert!(session.step(now));
    session.poll_output();
    let due = now + Duration::from_secs(5);
    assert_eq!(session.poll_timeout(), due);
    session.handle_timeout(now);
    assert_eq!(session.poll_ask(), None);
    session.handle_timeout(due);
    assert_eq!(session.poll_ask(), Some(Ask::Roster));
    // Commands wait as long, and the next notice, too.
    assert!(session.poll_timeout() > due);
    session.handle_answer(roster(&[(1, 10), (2, 20)]));
    assert_eq!(session.poll_output(), ">BYTECOUNT_CLI:1,10,11\r\n>BYTECOUNT_CLI:2,20,21\r\n");
    session.handle_timeout(due + Duration::from_secs(5));
    assert_eq!(session.poll_ask(), Some(Ask::Roster));
    session.handle_answer(roster(&[(1, 10), (2, 25)]));
    assert_eq!(session.poll_output(), ">BYTECOUNT_CLI:2,25,26\r\n");
    said(&mut session, "bytecount 0");
    session.handle_timeout(due + Duration::from_secs(60));
    assert_eq!(session.poll_ask(), None);
}

#[test]
fn nothing_is_told_before_the_password_and_guesses_end() {
    let now = Instant::now();
    let new = || Session::new(now, facts(), Some(Zeroizing::new(b"sesame".to_vec())));
    let mut session = new();
    assert_eq!(session.poll_output(), "ENTER PASSWORD:");
    session.handle_told(&Told::Established(Established {
        number: 2,
        name: "a".into(),
        user: None,
        real_address: "192.0.2.1:5".parse().unwrap(),
        addresses: Vec::new(),
        version: None,
        platform: None,
        at: UNIX_EPOCH,
    }));
    assert_eq!(said(&mut session, "status 2"), "ENTER PASSWORD:");
    assert_eq!(said(&mut session, "sesam"), "ENTER PASSWORD:");
    let welcome = format!("SUCCESS: password is correct\r\n{GREETING}\r\n");
    assert_eq!(said(&mut session, "sesame\r"), welcome);
    assert_eq!(said(&mut session, "pid"), "SUCCESS: pid=4711\r\n");
    let mut session = new();
    for _ in 0..ATTEMPTS_MAX {
        assert!(!session.is_over());
        said(&mut session, "wrong");
    }
    assert!(session.is_over());
    // The right one is too late, and so is one that does not come.
    assert!(!session.step(now));
    let mut session = new();
    session.handle_timeout(now + LOGIN_LIMIT - Duration::from_millis(1));
    assert!(!session.is_over());
    session.handle_timeout(session.poll_timeout());
    assert!(session.is_over());
}

#[test]
fn whatever_comes_is_answered_within_limits() {
    let seed: u64 = rand::random();
    println!("seed {seed}");
    let mut rng = StdRng::seed_from_u64(seed);
    let now = Instant::now();
    let mut session = session(now);
    let words = ["kill", "status", "state", "log on all", "client-kill", "verb", "1:", "[::", "\""];
    for _ in 0..20_000 {
        let [kind, word, ..] = rng.next_u32().to_be_bytes();
        let mut bytes = [0; 16];
        rng.fill_bytes(&mut bytes);
        match kind % 4 {
            0 => session.handle_bytes(now, words[usize::from(word) % words.len()].as_bytes()),
            1 => session.handle_bytes(now, b"\n"),
            _ => session.handle_bytes(now, &bytes),
        }
        while session.step(now) {}
        if session.poll_ask().is_some() {
            session.handle_answer(Answer::Ended(usize::from(kind)));
        }
        assert!(session.input.len() <= LINE_BYTES_MAX + 16);
        assert!(session.poll_output().len() < 4 * LINE_BYTES_MAX);
        if session.is_over() {
            return;
        }
    }
}

#[test]
fn what_is_too_long_and_who_is_idle_ends() {
    let now = Instant::now();
    let mut session = session(now);
    let long = "x".repeat(LINE_BYTES_MAX + 1);
    assert_eq!(send(&mut session, &long), None);
    assert!(session.poll_output().starts_with("ERROR: the line is longer than "));
    assert_eq!(send(&mut session, &long), None);
    assert_eq!(session.poll_output(), "", "said once for each line");
    assert!(session.input.is_empty());
    assert_eq!(said(&mut session, "kill x\npid"), "SUCCESS: pid=4711\r\n");
    let idle = session.poll_timeout();
    assert!(idle >= now + IDLE_LIMIT);
    // One that wants notices may be silent.
    said(&mut session, "log on");
    session.handle_timeout(idle);
    assert!(!session.is_over());
    said(&mut session, "log off");
    session.handle_timeout(session.poll_timeout());
    assert!(session.is_over());
}
