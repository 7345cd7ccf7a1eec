//! The admission of hosts, and the answers that a refused host gets.

use std::time::{Duration, Instant};

use weft_bench::sandbox::{Host, Sandbox, SandboxOptions, try_wait_until};
use weft_lab::net::{Lab, counter, wait_connection};

/// The longest until a refusal shows, on a machine that builds beside.
const REFUSED: Duration = Duration::from_secs(20);

fn sandbox() -> anyhow::Result<Sandbox> {
    Ok(Sandbox::new(&SandboxOptions::default())?)
}

fn password(sandbox: &Sandbox, name: &str, text: &str) -> anyhow::Result<String> {
    let path = sandbox.directory().join(name);
    std::fs::write(&path, text)?;
    Ok(path.to_string_lossy().into_owned())
}

#[test]
fn a_wrong_password_is_refused_with_the_reason_on_both_sides() -> anyhow::Result<()> {
    let sandbox = sandbox()?;
    let right = password(&sandbox, "right", "correct horse battery staple\n")?;
    let wrong = password(&sandbox, "wrong", "incorrect horse battery staple\n")?;
    let (one, two) = (sandbox.host(0), sandbox.host(1));
    one.start_daemon(&["--password-file", &right])?;
    two.start_daemon(&["--password-file", &wrong, &one.ipv4().to_string()])?;
    for host in [one, two] {
        let refused = |c: &serde_json::Value| {
            c["state"] == "failed"
                && c["reason"].as_str().is_some_and(|reason| reason.contains("wrong password"))
        };
        let connection = wait_connection(host, "a refusal", REFUSED, refused)?;
        assert!(connection["cipher"].is_null(), "{connection}");
    }
    assert_eq!(counter(one, "sas")?, 0, "key material was tried");
    assert_eq!(counter(two, "sas")?, 0, "key material was tried");
    let text = two.weft(&["status"])?.success()?.stdout;
    assert!(text.contains("Ready: no"), "{text}");
    Ok(())
}

#[test]
fn a_launch_says_what_the_first_host_answered() -> anyhow::Result<()> {
    let sandbox = sandbox()?;
    let right = password(&sandbox, "right", "correct horse battery staple\n")?;
    let wrong = password(&sandbox, "wrong", "incorrect horse battery staple\n")?;
    let (one, two) = (sandbox.host(0), sandbox.host(1));
    let to = one.ipv4().to_string();
    one.start_daemon(&["--password-file", &right])?;
    for (file, code, word) in [(&wrong, 1, "wrong password"), (&right, 0, "joined")] {
        let launched = two.weft(&["launch", "--password-file", file, &to])?;
        two.weft(&["stop"])?.success()?;
        let told = &launched.stderr;
        assert!(launched.status.code() == Some(code) && told.contains(word), "{file}: {told}");
    }
    Ok(())
}

#[test]
fn a_token_lets_one_host_in_once_and_the_secret_it_learns_lets_it_come_back() -> anyhow::Result<()>
{
    let options = SandboxOptions { hosts: 3, ..SandboxOptions::default() };
    let sandbox = Sandbox::new(&options)?;
    let (one, two, three) = (sandbox.host(0), sandbox.host(1), sandbox.host(2));
    one.start_daemon(&[])?;
    let invitation = one.weft_json(&["token"])?;
    let join = invitation["join"].as_str().unwrap_or_default().to_owned();
    let token = invitation["token"].as_str().unwrap_or_default().to_owned();
    let target = join.split_whitespace().last().unwrap_or_default().to_owned();
    assert!(target.starts_with(&format!("{}#", one.ipv4())), "{join}");
    assert!(!join.contains(&token), "the token stands on the command line: {join}");

    two.start_daemon_with(&[&target], &[("WEFT_TOKEN", &token)])?;
    two.wait_connected(1, Duration::from_secs(15))?;
    three.start_daemon_with(&[&target], &[("WEFT_TOKEN", &token)])?;
    let refused = |c: &serde_json::Value| c["state"] == "failed" && c["reason"].is_string();
    wait_connection(three, "a refusal of the used token", REFUSED, refused)?;

    two.kill_daemon();
    two.start_daemon(&[])?;
    two.wait_connected(1, Duration::from_secs(15))?;

    three.stop_daemon()?;
    let wrong_key = format!("{}#{}", one.ipv4(), "ab".repeat(16));
    three.start_daemon_with(&[&wrong_key], &[("WEFT_TOKEN", &token)])?;
    wait_connection(three, "a refusal of another key", REFUSED, refused)?;
    Ok(())
}

#[test]
fn hosts_founded_apart_refuse_each_other_and_say_so() -> anyhow::Result<()> {
    let lab = Lab { sandbox: sandbox()? };
    let file = lab.password_file();
    let file = file.to_string_lossy();
    let (one, two) = (lab.host(0), lab.host(1));
    one.start_daemon(&["--password-file", &file])?;
    two.start_daemon(&["--password-file", &file])?;
    two.weft(&["connect", &one.ipv4().to_string()])?.success()?;
    for host in [one, two] {
        let refused = |c: &serde_json::Value| {
            c["reason"].as_str().is_some_and(|reason| reason.contains("weft reset"))
        };
        wait_connection(host, "a refusal", REFUSED, refused)?;
    }
    Ok(())
}

/// A host that is gone is shown with the reason, however often it is dialled again meanwhile.
fn reason_stays(host: &Host, gone: &Host, limit: Duration) -> anyhow::Result<()> {
    let at_gone = |line: &serde_json::Value| {
        let waits = ["connecting", "retrying", "failed", "pending"];
        let address = line["address"].as_str().unwrap_or_default();
        address.starts_with(&gone.ipv4().to_string())
            && waits.contains(&line["state"].as_str().unwrap_or_default())
    };
    let end = Instant::now() + limit;
    let mut looks = 0;
    while Instant::now() < end {
        let connections = host.weft_json(&["status", "connections"])?;
        for line in connections.as_array().into_iter().flatten().filter(|line| at_gone(line)) {
            anyhow::ensure!(line["reason"].is_string(), "no reason: {connections}");
            looks += 1;
        }
        std::thread::sleep(Duration::from_millis(200));
    }
    anyhow::ensure!(looks > 0, "never shown");
    Ok(())
}

#[test]
fn a_reinstalled_host_is_named_joins_again_and_its_old_self_can_be_forgotten() -> anyhow::Result<()>
{
    let lab = Lab::launched(3, &[])?;
    let (one, two, three) = (lab.host(0), lab.host(1), lab.host(2));
    let id = |host: &Host| -> anyhow::Result<String> {
        Ok(host.weft_json(&["status"])?["peer"].as_str().unwrap_or_default().to_owned())
    };
    let before = id(three)?;
    three.stop_daemon()?;
    reason_stays(two, three, Duration::from_secs(5))?;

    std::fs::remove_dir_all(three.state_directory())?;
    let file = lab.password_file();
    let file = file.to_string_lossy();
    let first = one.ipv4().to_string();
    three.start_daemon(&["--password-file", &file, &first])?;
    three.wait_connected(2, Duration::from_secs(30))?;
    let after = id(three)?;
    assert_ne!(before, after);
    let limit = Duration::from_secs(20);
    for host in [one, two, three] {
        let says = |word: &str| {
            let word = word.to_owned();
            move |c: &serde_json::Value| {
                c["reason"].as_str().is_some_and(|reason| reason.contains(&word))
            }
        };
        let named = wait_connection(host, "the old key", limit, says("another key"))?;
        let advice = format!("weft forget {}:6783", three.ipv4());
        assert!(says(&advice)(&named), "{named}");
        let itself = says("this host itself")(&named);
        assert_eq!(itself, id(host)? == after, "nobody dials itself to find out: {named}");
    }
    reason_stays(one, three, Duration::from_secs(3))?;

    fails(one, &["forget", &two.nickname()], "is linked")?;
    one.weft(&["forget", &three.ipv4().to_string()])?.success()?;
    two.weft(&["forget", &three.nickname()])?.success()?;
    // Hosts that hear of it again do not take it up again.
    three.kill_daemon();
    three.start_daemon(&["--password-file", &file, &first])?;
    three.wait_connected(2, Duration::from_secs(30))?;
    for host in [one, two] {
        let known = host.weft_json(&["status", "peers"])?.to_string();
        assert!(known.contains(&after) && !known.contains(&before), "{known}");
        assert!(!host.weft(&["status", "connections"])?.success()?.stdout.contains("weft forget"));
        let lines = host.log().lines().filter(|line| line.contains("another key")).count();
        assert!((1..=2).contains(&lines), "{lines} lines in the log: {}", host.log());
    }
    three.weft(&["forget", &before])?.success()?;
    let connections = three.weft_json(&["status", "connections"])?;
    assert!(!connections.to_string().contains(&before), "{connections}");
    // A target whose attempt met a link is a line of its own for a moment.
    try_wait_until("two connections", Duration::from_secs(10), || {
        let connections = three.weft_json(&["status", "connections"])?;
        Ok(connections.as_array().map(Vec::len) == Some(2))
    })?;
    Ok(())
}

fn fails(host: &Host, arguments: &[&str], word: &str) -> anyhow::Result<()> {
    let output = host.weft(arguments)?;
    let text = format!("{}{}", output.stdout, output.stderr);
    anyhow::ensure!(!output.status.success() && text.contains(word), "weft {arguments:?}: {text}");
    Ok(())
}

#[test]
fn a_clock_an_hour_off_does_not_matter() -> anyhow::Result<()> {
    let lab = Lab { sandbox: sandbox()? };
    let library = faketime()?;
    let file = lab.password_file();
    let file = file.to_string_lossy();
    let first = lab.host(0).ipv4().to_string();
    lab.host(0).start_daemon(&["--password-file", &file])?;
    let environment = [("LD_PRELOAD", library.as_str()), ("FAKETIME", "-61m")];
    lab.host(1).start_daemon_with(&["--password-file", &file, &first], &environment)?;
    lab.wait_active()?;
    let (one, two) = lab.containers()?;
    one.ping(two.ipv4()?.into())?;
    let since = |host: usize| -> anyhow::Result<String> {
        let status = lab.host(host).weft_json(&["status"])?;
        Ok(status["since"].as_str().unwrap_or_default().to_owned())
    };
    assert_ne!(since(0)?.get(..13), since(1)?.get(..13), "the clock was not changed");
    Ok(())
}

fn faketime() -> anyhow::Result<String> {
    let places = ["/usr/lib/x86_64-linux-gnu/faketime", "/usr/lib/aarch64-linux-gnu/faketime"];
    let files = places.iter().map(|place| format!("{place}/libfaketimeMT.so.1"));
    files
        .into_iter()
        .find(|file| std::path::Path::new(file).exists())
        .ok_or_else(|| anyhow::anyhow!("libfaketime is missing: apt-get install libfaketime"))
}
