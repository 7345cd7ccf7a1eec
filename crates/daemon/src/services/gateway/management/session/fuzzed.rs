//! The fuzz target for what programs say to the management interface.

use std::time::{Duration, Instant, UNIX_EPOCH};

use weft_openvpn::device::Traffic;

use super::{Answer, Ask, Facts, LINE_BYTES_MAX, LINE_END, PROMPT, Session};
use crate::services::gateway::journal::{Established, Told};
use crate::services::gateway::roster::{Entry, Format, Roster};

/// The longest answer to one line, with few clients, in bytes.
const ANSWER_BYTES_MAX: usize = 16 * 1_024;
/// A name that a certificate may have.
const NAME: &str = "al,ice\u{7}\r\nx";

/// Input: 1 byte, of which the lowest bit says whether there is a password, and the next two how the gateway answers;
/// then pieces of the lines, each after its length 1 byte. Without content, a minute passes and things are told.
///
/// # Panics
/// A property does not hold: more is kept than a line, an answer has no end, what is shown breaks a line, or something
/// is shown before the password.
pub fn gateway_management(data: &[u8]) {
    let Some((kind, mut rest)) = data.split_first() else { return };
    let mut now = Instant::now();
    let password = (kind % 2 == 1).then(|| b"secret".to_vec().into());
    let mut session = Session::new(now, Facts { pid: 7, format: Format::One }, password);
    check(&mut session);
    while let Some((length, behind)) = rest.split_first() {
        let (piece, behind) = behind.split_at(usize::from(*length).min(behind.len()));
        rest = behind;
        if piece.is_empty() {
            now += Duration::from_secs(60);
            session.handle_timeout(now);
            told().iter().for_each(|told| session.handle_told(told));
            session.handle_lost(UNIX_EPOCH, 3);
        }
        session.handle_bytes(now, piece);
        loop {
            let has_more = session.step(now);
            if let Some(ask) = session.poll_ask() {
                assert!(session.password.is_none(), "{ask:?} before the password");
                session.handle_answer(answer(kind / 2, &ask));
            }
            check(&mut session);
            if session.is_over() {
                return;
            }
            if !has_more {
                break;
            }
        }
        assert!(session.input.len() <= LINE_BYTES_MAX, "more than a line is kept");
        assert!(session.poll_timeout() > now, "it wants to be called again and again");
    }
}

fn check(session: &mut Session) {
    let shown = session.poll_output();
    assert!(shown.len() <= ANSWER_BYTES_MAX, "{} bytes", shown.len());
    let mut lines: Vec<&str> = shown.split(LINE_END).collect();
    let last = lines.pop().unwrap_or_default();
    assert!(last.is_empty() || last == PROMPT, "not a whole line: {last:?}");
    for line in lines {
        let breaks = |char: char| char.is_control() && char != '\t';
        assert!(!line.contains(breaks), "a line within a line: {line:?}");
    }
    assert!(
        session.password.is_none()
            || shown.is_empty()
            || last == PROMPT
            || shown.starts_with("ERROR: the line")
    );
}

fn answer(kind: u8, ask: &Ask) -> Answer {
    match (kind % 4, ask) {
        (0, _) => Answer::Away,
        (1, Ask::Roster) => Answer::Roster(Box::new(roster(kind))),
        (1, Ask::End { .. }) => Answer::Ended(0),
        (1, Ask::States(max) | Ask::Lines(max)) => {
            Answer::Texts(vec!["1,I,x".to_owned(); (*max).min(3)])
        }
        (_, Ask::Roster) => Answer::Roster(Box::new(roster(0))),
        (_, Ask::End { .. }) => Answer::Ended(2),
        (_, Ask::States(_) | Ask::Lines(_)) => Answer::Texts(Vec::new()),
        (_, Ask::Verb) => Answer::Verb(3),
        (_, Ask::SetVerb(verb)) => Answer::Verb(*verb),
    }
}

fn roster(count: u8) -> Roster {
    let entry = |number: u8| Entry {
        number: number.into(),
        name: NAME.to_owned(),
        user: Some(NAME.to_owned()),
        addresses: vec![[10, 32, 0, number].into()],
        networks: vec![],
        real_address: ([192, 0, 2, number], 1_194).into(),
        link: Traffic { rx_bytes: u64::MAX, tx_bytes: number.into(), ..Traffic::default() },
        since: UNIX_EPOCH,
        cipher: "AES-256-GCM",
    };
    let entries = (0..count % 4).map(entry).collect();
    Roster { at: UNIX_EPOCH, is_kernel: false, entries, total: (u64::MAX, 0) }
}

fn told() -> [Told; 3] {
    let client = Established {
        number: 7,
        name: NAME.to_owned(),
        user: Some(NAME.to_owned()),
        real_address: ([192, 0, 2, 1], 1_194).into(),
        addresses: vec![[10, 32, 0, 7].into()],
        version: Some(NAME.to_owned()),
        platform: None,
        at: UNIX_EPOCH,
    };
    [
        Told::State("1,CONNECTED,SUCCESS,,,,,".to_owned()),
        Told::Line("1,I,x".to_owned()),
        Told::Established(client),
    ]
}
