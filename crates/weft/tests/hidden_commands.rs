//! Commands that only the daemon runs, as a user sees them.
#![allow(clippy::unwrap_used, missing_docs)]

use std::process::{Command, Stdio};

#[test]
fn a_user_who_starts_a_process_of_the_daemons_is_told_that_it_is_not_for_users() {
    let help = Command::new(env!("CARGO_BIN_EXE_weft")).arg("--help").output().unwrap();
    let help = String::from_utf8_lossy(&help.stdout);
    for command in ["hold-sockets", "open-namespaces"] {
        let output = Command::new(env!("CARGO_BIN_EXE_weft"))
            .arg(command)
            .stdin(Stdio::null())
            .output()
            .unwrap();
        assert!(!output.status.success(), "{command}");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(said.contains("the daemon"), "{command}: {said}");
        assert!(!help.contains(command));
    }
}
