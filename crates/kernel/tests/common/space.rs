//! A network namespace of a test, and the programs that are run in it.

use std::process::Command;

use weft_io::namespace::{Namespace, run_in, unshare_network};

/// A network namespace. It ends with this value.
pub(crate) struct Space(pub(crate) Namespace);

impl Space {
    pub(crate) fn new() -> Self {
        let made = std::thread::spawn(|| {
            unshare_network().expect("this test makes network namespaces and must run as root");
            run("ip link set lo up");
            Namespace::current().unwrap()
        });
        Self(made.join().unwrap())
    }

    /// Runs one program that must succeed, and returns its output.
    pub(crate) fn run(&self, line: &str) -> String {
        run_in(&self.0, || run(line)).unwrap()
    }

    pub(crate) fn succeeds(&self, line: &str) -> bool {
        run_in(&self.0, || command(line).output().unwrap().status.success()).unwrap()
    }
}

/// A program with its words, as a shell reads them.
pub(crate) fn command(line: &str) -> Command {
    let mut command = Command::new("bash");
    command.args(["-c", &format!("exec {line}")]);
    command
}

/// Runs one program that must succeed, in the calling thread's namespace.
pub(crate) fn run(line: &str) -> String {
    let output = command(line).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{line}: {errors}{}", String::from_utf8_lossy(&output.stdout));
    String::from_utf8(output.stdout).unwrap()
}
