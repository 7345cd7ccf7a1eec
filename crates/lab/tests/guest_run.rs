//! The VM lab itself: input and output of a guest, and that no guest is left behind. Boots guests, so cargo
//! runs it only when it is named; `./dev test` does.
#![allow(clippy::unwrap_used, missing_docs)]

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use weft_bench::sandbox::wait_until;

/// The exit code of a guest that failed itself.
const FAILED: Option<i32> = Some(125);
/// How long QEMU may take to be gone.
const LIMIT: Duration = Duration::from_secs(10);

fn vm(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vm"));
    command.arg("run").args(arguments);
    command
}

fn output(arguments: &[&str]) -> (Output, String) {
    let output = vm(arguments).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    (output, said)
}

#[test]
fn files_go_in_and_output_files_and_the_exit_code_come_out() {
    let place = tempfile::tempdir().unwrap();
    let (file, out) = (place.path().join("some file"), place.path().join("out"));
    std::fs::write(&file, "brought along\n").unwrap();
    let script = "weft --version; cat '/some file'; echo to stderr | tee /dev/stderr >/dev/null; \
        mkdir /out/a; head -c 3000000 /dev/urandom | tee /out/a/noise | sha256sum; \
        sleep 1000 & printf 'no newline'; exit 42";
    let arguments =
        ["--file", file.to_str().unwrap(), "--out", out.to_str().unwrap(), "--", script];
    let (output, said) = output(&arguments);
    assert_eq!(output.status.code(), Some(42), "{said}");
    let text = String::from_utf8(output.stdout).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    assert!(lines[0].starts_with("weft 0."), "{text}");
    assert_eq!(lines[1..3], ["brought along", "to stderr"], "{text}");
    assert_eq!(lines[4..], ["no newline"], "{text}");
    let noise = std::fs::File::open(out.join("a/noise")).unwrap();
    let sum = Command::new("sha256sum").stdin(noise).output().unwrap().stdout;
    assert_eq!(String::from_utf8(sum).unwrap().trim_end(), lines[3]);
}

#[test]
fn several_words_are_a_program_and_its_arguments() {
    let (output, said) =
        output(&["--kernel", "6.1", "--", "printf", "%s|", "a  b", "$HOME", "it's"]);
    assert_eq!(output.status.code(), Some(0), "{said}");
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "a  b|$HOME|it's|");
}

#[test]
fn a_guest_past_its_limit_is_ended_and_the_limit_named() {
    let (output, said) = output(&["--timeout", "3", "--", "sleep 1000"]);
    assert_eq!(output.status.code(), FAILED, "{said}");
    assert!(said.contains("time limit of 3 s"), "{said}");
}

#[test]
fn a_guest_whose_clock_counts_instructions_waits_for_nothing() {
    // The hour is longer than the time limit, and no second of it is this machine's.
    let script = "date +%s; sleep 3600; date +%s";
    let (output, said) = output(&["--clock", "instructions", "--timeout", "540", "--", script]);
    assert_eq!(output.status.code(), Some(0), "{said}");
    let text = String::from_utf8(output.stdout).unwrap();
    let times: Vec<u64> = text.lines().map(|line| line.parse().unwrap()).collect();
    assert!((3_600..3_605).contains(&(times[1] - times[0])), "{text}");
}

#[test]
fn a_guest_that_crashes_shows_its_last_words() {
    let (output, said) = output(&["--", "echo c >/proc/sysrq-trigger"]);
    assert_eq!(output.status.code(), FAILED, "{said}");
    assert!(said.contains("ended before its job did") && said.contains("Kernel panic"), "{said}");
}

#[test]
fn ctrl_c_leaves_nothing() {
    let mut running = Running::start();
    running.signal(Signal::INT);
    assert_eq!(running.child.wait().unwrap().code(), Some(130));
    assert_eq!(running.machines(), Vec::<u32>::new());
    assert_eq!(running.folders(), Vec::<String>::new());
}

#[test]
fn a_killed_run_takes_its_guest_along_and_the_next_run_removes_its_files() {
    let mut running = Running::start();
    running.signal(Signal::KILL);
    running.child.wait().unwrap();
    wait_until("QEMU's end", LIMIT, || running.machines().is_empty()).unwrap();
    assert_ne!(running.folders(), Vec::<String>::new(), "nothing is left to be removed");
    output(&["--timeout", "0", "--", "true"]);
    assert_eq!(running.folders(), Vec::<String>::new());
}

/// A guest in the middle of its job.
struct Running {
    child: Child,
}

impl Running {
    fn start() -> Self {
        let mut child =
            vm(&["--", "echo ready; sleep 1000"]).stdout(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let running = Self { child };
        assert_eq!(lines.next().unwrap().unwrap(), "ready");
        assert_eq!(running.machines().len(), 1);
        running
    }

    fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(i32::try_from(self.child.id()).unwrap()).unwrap();
        kill_process(pid, signal).unwrap();
    }

    fn prefix(&self) -> String {
        format!("weft-vm-{}-", self.child.id())
    }

    /// The processes of QEMU that use files of this run.
    fn machines(&self) -> Vec<u32> {
        let pids = std::fs::read_dir("/proc").unwrap().flatten();
        let pids = pids.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        pids.filter(|pid: &u32| {
            let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            String::from_utf8_lossy(&line).contains(&self.prefix())
        })
        .collect()
    }

    fn folders(&self) -> Vec<String> {
        let entries = std::fs::read_dir(std::env::temp_dir()).unwrap().flatten();
        let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
        names.filter(|name| name.starts_with(&self.prefix())).collect()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
