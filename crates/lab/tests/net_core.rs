//! A core that never waits. When a part beside it is slow, panics or hangs, a peer's path fails over in the usual
//! time and the local API answers.

use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;
use weft_api::{Client, call};
use weft_bench::sandbox::progress::note;
use weft_bench::sandbox::{Container, Host, Sandbox, SandboxOptions, try_wait_until};
use weft_lab::net::{Lab, slowness, wait_ping};

/// A fail-over takes the usual 2 to 3 s, and more on a busy machine; any fault here takes longer than this
/// limit.
const FAIL_OVER: Duration = Duration::from_millis(4_500);
/// Limit for an answer of the API.
const ANSWER: Duration = Duration::from_millis(100);
/// Answers in a row of which at least one must come in that time, since a busy machine delays some.
const ANSWERS: usize = 5;
/// How long a path takes to be proven, and a service to be restarted.
const SETTLE: Duration = Duration::from_secs(60);

/// Two hosts that trust each other, so that this kernel moves their packets, and a container on each. Faults
/// are on the first host.
struct Stage {
    lab: Lab,
    faults: PathBuf,
    near: Container,
    far: Container,
}

impl Stage {
    fn new(port_mode: &str, path: Option<&str>) -> anyhow::Result<Self> {
        let sandbox = Sandbox::new(&SandboxOptions { hosts: 2, ..SandboxOptions::default() })?;
        let (one, two) = (sandbox.host(0), sandbox.host(1));
        let faults = sandbox.directory().join("faults");
        std::fs::write(&faults, "")?;
        let named = faults.display().to_string();
        let mut environment = vec![("WEFT_FAULTS", named.as_str())];
        environment.extend(path.map(|path| ("PATH", path)));
        let password = sandbox.password_file();
        let password = password.to_string_lossy();
        let trusted = format!("{}/32,{}/32", one.ipv4(), two.ipv4());
        let common = ["--password-file", &password, "--trusted-subnets", &trusted];
        let common = [&common[..], &["--port-mode", port_mode]].concat();
        one.start_daemon_with(&common, &environment)?;
        let first = one.ipv4().to_string();
        two.start_daemon(&[&common[..], &[&first]].concat())?;
        let lab = Lab { sandbox };
        lab.wait_active()?;
        on(lab.host(0), "kernel", SETTLE)?;
        let (near, far) = lab.containers()?;
        wait_ping(&near, far.ipv4()?.into(), SETTLE)?;
        Ok(Self { lab, faults, near, far })
    }

    fn ask_for(&self, faults: &str) -> anyhow::Result<()> {
        Ok(std::fs::write(&self.faults, faults)?)
    }

    /// Blocks the path in use, and says how long it took until the hosts were on the other engine and the containers
    /// reached each other. Meanwhile the API answers.
    fn fails_over(&self) -> anyhow::Result<Duration> {
        let (one, two) = (self.lab.host(0), self.lab.host(1));
        let over = AtomicBool::new(false);
        thread::scope(|scope| {
            let answers = scope.spawn(|| answers(one, &over));
            let taken = (|| {
                for command in [
                    "nft add table inet block",
                    "nft add chain inet block in { type filter hook input priority -400 ; }",
                    "nft add rule inet block in udp dport 6787 drop",
                ] {
                    two.netns().exec(&command.split(' ').collect::<Vec<_>>())?.success()?;
                }
                let begun = Instant::now();
                on(one, "userspace", SETTLE)?;
                wait_ping(&self.near, self.far.ipv4()?.into(), SETTLE)?;
                Ok(begun.elapsed())
            })();
            over.store(true, Ordering::Relaxed);
            let answers = answers.join().map_err(|_| anyhow::anyhow!("the client panicked"))??;
            let best = |run: &[Duration]| run.iter().min().copied().unwrap_or_default();
            let worst = answers.chunks_exact(ANSWERS).map(best).max();
            let worst = worst.ok_or_else(|| anyhow::anyhow!("{} answers", answers.len()))?;
            anyhow::ensure!(worst < ANSWER * slowness(), "the API took {worst:?}: {answers:?}");
            taken
        })
    }

    fn service(&self, name: &str) -> anyhow::Result<Value> {
        let status = self.lab.host(0).weft_json(&["status"])?;
        let services = status["services"].as_array().cloned().unwrap_or_default();
        let found = services.into_iter().find(|service| service["name"] == name);
        found.ok_or_else(|| anyhow::anyhow!("no service {name} in {status}"))
    }
}

/// How long each answer of a daemon takes, until that is over.
fn answers(host: &Host, over: &AtomicBool) -> anyhow::Result<Vec<Duration>> {
    let client = Client::new(&host.runtime_directory());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut all = Vec::new();
    while !over.load(Ordering::Relaxed) {
        let begun = Instant::now();
        runtime.block_on(client.ask::<call::Report>())?;
        runtime.block_on(client.ask::<call::Attachments>())?;
        all.push(begun.elapsed() / 2);
        thread::sleep(Duration::from_millis(20));
    }
    Ok(all)
}

/// Waits until the only path in use is this engine's.
fn on(host: &Host, wanted: &str, limit: Duration) -> anyhow::Result<()> {
    try_wait_until(&format!("a path of {wanted}"), limit, || {
        let active = host.active_connections()?;
        Ok(active.first().is_some_and(|it| it["engine"] == wanted))
    })?;
    Ok(())
}

fn in_time(taken: Duration) {
    note(&format!("failed over after {} ms", taken.as_millis()));
    assert!(taken < FAIL_OVER * slowness(), "{taken:?}");
}

#[test]
fn an_nft_that_sleeps_holds_nothing_up() -> anyhow::Result<()> {
    let directory = tempfile::tempdir()?;
    let (program, slow) = (directory.path().join("nft"), directory.path().join("slow"));
    let path = std::env::var("PATH")?;
    let script =
        format!("#!/bin/sh\n[ -e {} ] && sleep 10\nPATH={path}\nexec nft \"$@\"\n", slow.display());
    std::fs::write(&program, script)?;
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755))?;
    let path = format!("{}:{path}", directory.path().display());
    let stage = Stage::new("bridge", Some(&path))?;
    std::fs::write(&slow, "")?;
    in_time(stage.fails_over()?);
    Ok(())
}

#[test]
fn a_kernel_that_answers_late_holds_nothing_up() -> anyhow::Result<()> {
    let stage = Stage::new("direct", None)?;
    stage.ask_for("netlink-answer-ms 5000\n")?;
    in_time(stage.fails_over()?);
    // An operator at three in the morning sees why things take their time.
    try_wait_until("a word of the kernel", SETTLE, || {
        let status = stage.lab.host(0).weft_json(&["status"])?;
        let warnings = status["warnings"].as_array().cloned().unwrap_or_default();
        let told =
            |text: &Value| text.as_str().is_some_and(|text| text.starts_with("the kernel has not"));
        Ok(warnings.iter().any(told))
    })?;
    stage.ask_for("")?;
    Ok(())
}

#[test]
fn a_service_that_panics_is_restarted_and_named() -> anyhow::Result<()> {
    let stage = Stage::new("bridge", None)?;
    stage.ask_for("panic retries\n")?;
    try_wait_until("a restart", SETTLE, || {
        Ok(stage.service("retries").is_ok_and(|it| it["restarts"].as_u64() > Some(1)))
    })?;
    in_time(stage.fails_over()?);
    let fared = stage.service("retries")?;
    assert_eq!(fared["reason"], "panicked: a test asked for it", "{fared}");
    stage.ask_for("")?;
    try_wait_until("a service that runs", SETTLE, || {
        Ok(stage.service("retries").is_ok_and(|it| it["state"] == "running"))
    })?;
    Ok(())
}

#[test]
fn a_service_that_hangs_is_restarted_or_named() -> anyhow::Result<()> {
    let stage = Stage::new("bridge", None)?;
    stage.ask_for("hang retries\nhang-limit-ms 2000\n")?;
    try_wait_until("a restart", SETTLE, || {
        Ok(stage.service("retries").is_ok_and(|it| it["restarts"].as_u64() > Some(0)))
    })?;
    // A service that blocks its thread cannot be ended.
    stage.ask_for("block retries\nhang-limit-ms 2000\n")?;
    let hangs = |it: Value| it["state"] == "hangs";
    try_wait_until("a service that hangs", SETTLE, || {
        Ok(stage.service("retries").is_ok_and(hangs))
    })?;
    in_time(stage.fails_over()?);
    let text = stage.lab.host(0).weft(&["status"])?.success()?.stdout;
    assert!(text.contains("service retries has hung since"), "{text}");
    stage.ask_for("")?;
    Ok(())
}
