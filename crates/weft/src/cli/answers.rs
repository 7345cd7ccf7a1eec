//! `weft launch` waits until one of the hosts it joins has answered. A wrong password or address is thus
//! reported where it was typed.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use weft_api::call;
use weft_api::{Client, Connection};

use super::output;

/// The combined answer of the dialled hosts so far.
#[derive(Debug, PartialEq, Eq)]
enum Answer {
    /// No host to wait for, or a link is up; the line reports the link.
    Joined(Option<String>),
    /// All of them refuse this host, or are not the expected hosts.
    Refused(String),
    /// Some have not answered.
    Waiting(String),
}

/// Waits for the first answer, at most [`ANSWER_LIMIT`], and reports it. A host that is not up yet is no
/// failure: the daemon keeps dialling it.
pub(super) fn wait(runtime_dir: &Path) -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let client = Client::new(runtime_dir);
    let begun = Instant::now();
    let mut told = false;
    loop {
        let connections: Vec<Connection> = runtime.block_on(client.ask::<call::Connections>())?;
        match answer(&connections) {
            Answer::Joined(line) => {
                line.iter().for_each(|line| output::progress(line));
                return Ok(ExitCode::SUCCESS);
            }
            Answer::Refused(line) if begun.elapsed() >= REFUSAL_SETTLES => {
                output::progress(&format!(
                    "weft: not joined: {line}; weft keeps trying; to start over: weft stop, then weft launch"
                ));
                return Ok(ExitCode::FAILURE);
            }
            Answer::Waiting(line) if begun.elapsed() >= ANSWER_LIMIT => {
                output::progress(&format!(
                    "no answer yet from {line}; weft keeps trying, see weft status connections"
                ));
                return Ok(ExitCode::SUCCESS);
            }
            Answer::Waiting(line) if !told && begun.elapsed() >= PROGRESS_AFTER => {
                output::progress(&format!("waiting for an answer from {line} ..."));
                told = true;
            }
            Answer::Refused(_) | Answer::Waiting(_) => {}
        }
        std::thread::sleep(POLL);
    }
}

fn answer(connections: &[Connection]) -> Answer {
    let is_itself = |c: &&Connection| c.reason.as_deref() != Some(weft_link::REASON_ITSELF);
    let dialled: Vec<_> =
        connections.iter().filter(|c| c.direction == "outbound").filter(is_itself).collect();
    let is_up = |c: &&&Connection| c.nickname.is_some();
    if let Some(up) = dialled.iter().find(is_up) {
        let name = up.nickname.as_deref().unwrap_or_default();
        return Answer::Joined(Some(format!("joined {name} ({})", up.address)));
    }
    let named = |c: &&Connection| match &c.reason {
        Some(reason) => format!("{} ({reason})", c.address),
        None => c.address.clone(),
    };
    let (refusing, waiting): (Vec<_>, Vec<_>) = dialled.iter().partition(|c| c.state == "failed");
    // A host may be dialled by its address and by a name that resolves to it.
    let list = |of: Vec<&&Connection>| {
        let all: BTreeSet<String> = of.into_iter().map(named).collect();
        all.into_iter().collect::<Vec<_>>().join(", ")
    };
    match (refusing.is_empty(), waiting.is_empty()) {
        (true, true) => Answer::Joined(None),
        (false, true) => Answer::Refused(list(refusing)),
        (_, false) => Answer::Waiting(list(waiting)),
    }
}

/// The longest wait for an answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);
/// A refusal counts if it still stands this long after the start: a target may have several addresses.
const REFUSAL_SETTLES: Duration = Duration::from_secs(2);
/// A wait longer than this is reported.
const PROGRESS_AFTER: Duration = Duration::from_secs(1);
/// The interval between two checks.
const POLL: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn dialled(address: &str, state: &str, reason: Option<&str>) -> Connection {
        Connection {
            address: address.into(),
            direction: "outbound".into(),
            state: state.into(),
            reason: reason.map(Into::into),
            ..Connection::default()
        }
    }

    #[test]
    fn one_link_is_an_answer_and_all_refusals_together_are_one() {
        let refused = dialled("a:6783", "failed", Some("wrong password"));
        let silent = dialled("b:6783", "retrying", Some("no answer"));
        let itself = dialled("c:6783", "failed", Some(weft_link::REASON_ITSELF));
        let inbound = Connection { direction: "inbound".into(), ..refused.clone() };
        let mut up = dialled("d:6783", "probing", None);
        up.nickname = Some("delta".into());
        assert_eq!(answer(&[]), Answer::Joined(None));
        assert_eq!(answer(&[itself.clone(), inbound]), Answer::Joined(None));
        let text = "a:6783 (wrong password)".to_owned();
        let twice = [itself, refused.clone(), refused.clone()];
        assert_eq!(answer(&twice), Answer::Refused(text));
        let text = "b:6783 (no answer)".to_owned();
        assert_eq!(answer(&[refused.clone(), silent.clone()]), Answer::Waiting(text));
        let text = "joined delta (d:6783)".to_owned();
        assert_eq!(answer(&[refused, silent, up]), Answer::Joined(Some(text)));
    }
}
