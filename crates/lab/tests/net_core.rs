//! A core that never waits. When a part beside it is slow, panics or hangs, a peer's path fails over in the usual
//! time and the local API answers.

use std::os::unix::fs::{MetadataExt, PermissionsExt};
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
/// The API answers in this time; a quarter of the answers must, since a busy machine delays others.
const ANSWER: Duration = Duration::from_millis(100);
/// Limit for the slowest answer. Any fault here takes longer.
const ANSWER_MAX: Duration = Duration::from_secs(1);
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
        wait_path(lab.host(0), "path of the kernel", SETTLE, |path| path["engine"] == "kernel")?;
        let (near, far) = lab.containers()?;
        wait_ping(&near, far.ipv4()?.into(), SETTLE)?;
        Ok(Self { lab, faults, near, far })
    }

    fn ask_for(&self, faults: &str) -> anyhow::Result<()> {
        Ok(std::fs::write(&self.faults, faults)?)
    }

    /// Blocks the path in use, and says how long it took until the hosts were on another one and the containers
    /// reached each other. This kernel may have IPsec or not. Meanwhile the API answers.
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
                wait_path(one, "sealed path", SETTLE, |path| path["encrypted"] == true)?;
                wait_ping(&self.near, self.far.ipv4()?.into(), SETTLE)?;
                Ok(begun.elapsed())
            })();
            over.store(true, Ordering::Relaxed);
            let answers = answers.join().map_err(|_| anyhow::anyhow!("the client panicked"))??;
            check_answers(answers)?;
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
        all.push(begun.elapsed());
        let begun = Instant::now();
        runtime.block_on(client.ask::<call::Attachments>())?;
        all.push(begun.elapsed());
        thread::sleep(Duration::from_millis(20));
    }
    Ok(all)
}

/// Checks how long answers took while something was slow.
fn check_answers(mut answers: Vec<Duration>) -> anyhow::Result<()> {
    answers.sort_unstable();
    let slowest = answers.last().ok_or_else(|| anyhow::anyhow!("no answers"))?;
    let quarter = answers[answers.len() / 4];
    let (text, count) = (format!("{quarter:?} and at most {slowest:?}"), answers.len());
    note(&format!("{count} answers took {text}"));
    anyhow::ensure!(quarter < ANSWER * slowness(), "a quarter of the API's answers took {text}");
    anyhow::ensure!(*slowest < ANSWER_MAX * slowness(), "the API's answers took {text}");
    Ok(())
}

/// Waits until the path in use is one that is wanted.
fn wait_path(
    host: &Host,
    what: &str,
    limit: Duration,
    wanted: impl Fn(&Value) -> bool,
) -> anyhow::Result<()> {
    try_wait_until(&format!("a {what}"), limit, || {
        Ok(host.active_connections()?.first().is_some_and(&wanted))
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

/// Writes last so long while the disk is slow. A daemon that ends waits less.
const SLOW_WRITES: &str = "disk-write-ms 3500\n";

#[test]
fn a_slow_disk_holds_up_the_answer_that_relies_on_it_and_nothing_else() -> anyhow::Result<()> {
    let stage = Stage::new("bridge", None)?;
    let one = stage.lab.host(0);
    stage.ask_for(SLOW_WRITES)?;
    let taken = thread::scope(|scope| {
        let attached = scope.spawn(|| -> anyhow::Result<()> {
            let begun = Instant::now();
            one.add_container("late")?;
            anyhow::ensure!(begun.elapsed() > ANSWER_MAX, "attached after {:?}", begun.elapsed());
            let saved = attachments(one)?.iter().any(|(_, text)| text.contains("late"));
            anyhow::ensure!(saved, "attached, and not saved");
            Ok(())
        });
        let taken = stage.fails_over();
        attached.join().map_err(|_| anyhow::anyhow!("the attach panicked"))??;
        taken
    })?;
    in_time(taken);
    stage.ask_for("")?;
    Ok(())
}

/// Two hosts of the vector engine with a container each. Faults are on the first host.
fn vector_pair() -> anyhow::Result<(Lab, PathBuf, Container)> {
    let sandbox = Sandbox::new(&SandboxOptions { hosts: 2, ..SandboxOptions::default() })?;
    let faults = sandbox.directory().join("faults");
    std::fs::write(&faults, "")?;
    let password = sandbox.password_file();
    let password = ["--password-file", &password.to_string_lossy()];
    let (one, two) = (sandbox.host(0), sandbox.host(1));
    one.start_daemon_with(&password, &[("WEFT_FAULTS", &faults.display().to_string())])?;
    two.start_daemon(&[&password[..], &[&one.ipv4().to_string()]].concat())?;
    let lab = Lab { sandbox };
    lab.wait_active()?;
    let (near, far) = lab.containers()?;
    wait_ping(&near, far.ipv4()?.into(), SETTLE)?;
    Ok((lab, faults, near))
}

#[test]
fn a_slow_disk_keeps_no_host_from_hearing_of_containers() -> anyhow::Result<()> {
    let (lab, faults, near) = vector_pair()?;
    let (one, two, to) = (lab.host(0), lab.host(1), near.ipv4()?.to_string());
    std::fs::write(&faults, SLOW_WRITES)?;
    thread::scope(|scope| {
        let late = scope.spawn(|| one.add_container("late").map(drop));
        let written = one.state_directory().join("mesh.json.new");
        try_wait_until("a write of the state", SETTLE, || Ok(written.exists()))?;
        two.weft(&["run", "--", "ping", "-n", "-c", "1", "-W", "2", &to])?.success()?;
        Ok(late.join().map_err(|_| anyhow::anyhow!("the attach panicked"))??)
    })
}

/// The engine of the first host, which drops frames of strangers, hears late of the second's containers.
#[test]
fn a_command_starts_once_other_hosts_take_its_frames() -> anyhow::Result<()> {
    let (lab, faults, near) = vector_pair()?;
    std::fs::write(&faults, "endpoints-ms 600\n")?;
    let ping = ["run", "--", "ping", "-n", "-c", "1", "-W", "2", &near.ipv4()?.to_string()];
    lab.host(1).weft(&ping)?.success()?;
    Ok(())
}

/// The files of a host's attachments, each with its text. One that goes meanwhile is left out.
fn attachments(host: &Host) -> anyhow::Result<Vec<(PathBuf, String)>> {
    let entries = std::fs::read_dir(host.state_directory().join("attachments"))?;
    let mut files = entries.map(|it| Ok(it?.path())).collect::<anyhow::Result<Vec<_>>>()?;
    files.sort();
    let read = |path: PathBuf| std::fs::read_to_string(&path).ok().map(|text| (path, text));
    Ok(files.into_iter().filter_map(read).collect())
}

#[test]
fn no_write_of_a_daemon_follows_its_end() -> anyhow::Result<()> {
    let stage = Stage::new("bridge", None)?;
    let one = stage.lab.host(0);
    let directory = one.state_directory();
    let late = stage.lab.sandbox.add_netns("late")?;
    stage.ask_for(SLOW_WRITES)?;
    let mut attach = one.spawn_weft(&["attach", &late.path()])?;
    try_wait_until("a write that takes long", SETTLE, || {
        let is_new = |(path, _): &(PathBuf, String)| path.extension().is_some_and(|it| it == "new");
        Ok(directory.join("mesh.json.new").exists()
            || attachments(one).is_ok_and(|all| all.iter().any(is_new)))
    })?;
    let files = || -> anyhow::Result<_> {
        let mesh = std::fs::metadata(directory.join("mesh.json")).ok().map(|it| it.ino());
        let is_whole =
            |(path, _): &(PathBuf, String)| path.extension().is_some_and(|it| it == "json");
        let whole: Vec<_> = attachments(one)?.into_iter().filter(is_whole).collect();
        Ok((mesh, whole))
    };
    one.weft(&["stop"])?.success()?;
    // From here on a successor may write.
    let then = files()?;
    one.wait_daemon(SETTLE)?;
    assert_eq!(files()?, then, "the daemon replaced a file after it gave the directory free");
    attach.kill();
    Ok(())
}
