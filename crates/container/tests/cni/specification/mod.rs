//! The CNI specification's obligations of a plugin, one a row, for each version that has them.

mod add;
mod del;
mod environment;

use std::collections::BTreeSet;

use serde_json::Value;
use weft_container::cni::{DaemonError, Key, Refusal, Version, Version::*};

use crate::lab::{Fake, Machine, Mood, Run, Unlink, config, variables};

const ALL: &[Version] = &Version::ALL;
const SINCE_0_4_0: &[Version] = &[V0_4_0, V1_0_0, V1_1_0];
const BEFORE_0_4_0: &[Version] = &[V0_3_0, V0_3_1];
const BEFORE_1_0_0: &[Version] = &[V0_3_0, V0_3_1, V0_4_0];
const SINCE_1_0_0: &[Version] = &[V1_0_0, V1_1_0];
const BEFORE_1_1_0: &[Version] = &[V0_3_0, V0_3_1, V0_4_0, V1_0_0];
const SINCE_1_1_0: &[Version] = &[V1_1_0];

/// An obligation.
struct Row {
    name: &'static str,
    versions: &'static [Version],
    command: &'static str,
    /// Variables that differ from [`variables`]; an empty one is unset.
    variables: &'static [(&'static str, &'static str)],
    /// Changes the smallest configuration.
    config: fn(Version, &mut Value),
    daemon: fn() -> Fake,
    unlink: Unlink,
    wanted: Wanted,
}

enum Wanted {
    /// Exit code 0, an object at ADD and VERSION, else nothing on standard output, and this.
    Success(fn(&Run, Version)),
    /// Another exit code, an error object with this code, which has this text; and this.
    Error(u64, &'static str, fn(&Run)),
}

use Wanted::{Error, Success};

fn row(name: &'static str, versions: &'static [Version], command: &'static str) -> Row {
    Row {
        name,
        versions,
        command,
        variables: &[],
        config: |_, _| {},
        daemon: Fake::working,
        unlink: Unlink::Works,
        wanted: Success(|_, _| {}),
    }
}

const UNASKED: fn(&Run) = |run| assert!(run.calls.is_empty(), "{:?}", run.calls);

#[tokio::test(start_paused = true)]
async fn every_obligation_holds_in_every_version_that_has_it() {
    let rows: Vec<Row> =
        [environment::rows(), add::rows(), del::rows()].into_iter().flatten().collect();
    let names: BTreeSet<&str> = rows.iter().map(|row| row.name).collect();
    assert_eq!(names.len(), rows.len(), "two rows have one name");
    for row in &rows {
        for version in row.versions {
            let context = format!("{} ({}, {version})", row.name, row.command);
            let run = call(row, *version).await;
            judge(row, *version, &run, &context);
        }
    }
}

async fn call(row: &Row, version: Version) -> Run {
    let mut variables = variables(row.command);
    for (name, value) in row.variables {
        variables.retain(|(known, _)| known != name);
        variables.push((name, value));
    }
    let mut config = config(version);
    (row.config)(version, &mut config);
    let mut machine = Machine::new();
    machine.unlink = row.unlink;
    let environment = machine.environment(&variables);
    let start = tokio::time::Instant::now();
    let run = machine.run(&environment, config.to_string().as_bytes(), &(row.daemon)()).await;
    let limit_s = if row.command == "GC" { 31 } else { 10 };
    assert!(start.elapsed().as_secs() < limit_s, "{} took {:?}", row.name, start.elapsed());
    run
}

fn judge(row: &Row, version: Version, run: &Run, context: &str) {
    let outcome = &run.outcome;
    match row.wanted {
        Success(more) => {
            assert_eq!(outcome.exit_code, 0, "{context}: {outcome:?}");
            if matches!(row.command, "ADD" | "VERSION") {
                assert_eq!(run.json()["cniVersion"], version.as_str(), "{context}");
            } else {
                assert_eq!(outcome.stdout, "", "{context}");
            }
            more(run, version);
        }
        Error(code, text, more) => {
            assert_ne!(outcome.exit_code, 0, "{context}: {outcome:?}");
            let error = run.json();
            assert_eq!(error["code"], code, "{context}: {error}");
            let said = format!("{} {}", error["msg"].as_str().unwrap(), error["details"]);
            assert!(said.contains(text), "{context}: {said}");
            let known = Version::ALL.iter().any(|known| error["cniVersion"] == known.as_str());
            assert!(known, "{context}: {error}");
            assert!(!outcome.notes.is_empty(), "{context}");
            more(run);
        }
    }
}

fn key(container: &str, interface: &str) -> Key {
    let [network, container, interface] = ["shop", container, interface].map(str::to_owned);
    Key { network, container, interface }
}

fn refusing(refusal: Refusal, why: &str) -> Fake {
    Fake::in_mood(Mood::Fails(DaemonError::Refused(refusal, why.to_owned())))
}
