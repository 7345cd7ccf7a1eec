//! Commands that the daemon alone gives, as a user sees them.
#![allow(clippy::unwrap_used, missing_docs)]

use std::process::{Command, Stdio};

#[test]
fn a_user_who_starts_the_holder_is_told_that_it_is_not_for_users() {
    let output = Command::new(env!("CARGO_BIN_EXE_weft"))
        .arg("hold-sockets")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    assert!(!output.status.success());
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("the daemon"), "{said}");
    let help = Command::new(env!("CARGO_BIN_EXE_weft")).arg("--help").output().unwrap();
    assert!(!String::from_utf8_lossy(&help.stdout).contains("hold-sockets"));
}
