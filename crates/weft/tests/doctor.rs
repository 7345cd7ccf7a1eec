//! `weft doctor` from the view of a script.
#![allow(clippy::unwrap_used, missing_docs)]

use std::collections::BTreeSet;
use std::process::{Command, Output};

use serde_json::Value;

const WEFT: &str = env!("CARGO_BIN_EXE_weft");

fn diagnosis(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&output.stderr)))
}

fn state<'a>(diagnosis: &'a Value, name: &str) -> &'a str {
    let findings = diagnosis["findings"].as_array().unwrap();
    let finding = findings.iter().find(|finding| finding["name"] == name);
    finding.and_then(|finding| finding["state"].as_str()).unwrap_or("no such finding")
}

/// Needs root, like every test of devices.
#[test]
fn a_host_that_runs_the_labs_can_run_weft() {
    let output = Command::new(WEFT).args(["doctor", "--json"]).output().unwrap();
    let diagnosis = diagnosis(&output);
    assert_eq!(diagnosis["ready"], true, "{diagnosis:#}");
    assert!(output.status.success());
    for needed in ["kernel", "permission", "TAP device", "bridge", "veth", "UDP_SEGMENT"] {
        assert_eq!(state(&diagnosis, needed), "ok", "{needed}: {diagnosis:#}");
    }
    let figures = diagnosis["aead"].as_array().unwrap();
    for cipher in ["aes-256-gcm", "chacha20-poly1305"] {
        let its = || figures.iter().filter(|figure| figure["cipher"] == cipher);
        assert!(its().count() >= 2, "{cipher}: {figures:?}");
        for way in ["seals", "opens"] {
            // One library handles each size.
            let chosen: Vec<_> =
                its().filter(|it| it[way] == true).map(|it| it["bytes"].as_u64()).collect();
            let sizes: BTreeSet<_> = its().map(|it| it["bytes"].as_u64()).collect();
            assert_eq!(chosen.len(), sizes.len(), "{cipher} {way}: {figures:?}");
            assert_eq!(BTreeSet::from_iter(chosen), sizes, "{cipher} {way}");
        }
    }
    for figure in figures {
        assert!(figure["sealed_gbps"].as_f64().unwrap() > 0.0, "{figure}");
        assert!(figure["opened_gbps"].as_f64().unwrap() > 0.0, "{figure}");
    }
}

#[test]
fn without_the_right_to_change_networks_it_fails_and_says_what_to_do() {
    let output = Command::new("setpriv")
        .args(["--bounding-set=-net_admin", "--inh-caps=-net_admin", WEFT, "doctor", "--json"])
        .output()
        .expect("this test needs setpriv (util-linux)");
    let diagnosis = diagnosis(&output);
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(diagnosis["ready"], false);
    assert_eq!(state(&diagnosis, "permission"), "missing", "{diagnosis:#}");
    let findings = diagnosis["findings"].as_array().unwrap();
    let lacking = findings.iter().filter(|finding| finding["state"] == "missing");
    for finding in lacking {
        assert!(finding["advice"].is_string(), "{finding}");
    }
}
