//! Bad input gets a clear error and its exit code, and changes nothing.

use std::os::unix::net::{UnixListener, UnixStream};
use std::process::Command;
use std::time::Duration;

use anyhow::Context;
use weft_bench::sandbox::progress::note;
use weft_bench::sandbox::{Host, Sandbox, SandboxOptions, try_wait_until};
use weft_lab::net::Lab;

/// How long a process that ends may take.
const END_LIMIT: Duration = Duration::from_secs(5);

/// Runs a command that must fail with this code and say each of these words.
fn fails(host: &Host, arguments: &[&str], code: i32, words: &[&str]) -> anyhow::Result<()> {
    let output = host.weft(arguments)?;
    let text = format!("{}{}", output.stdout, output.stderr);
    assert_eq!(output.status.code(), Some(code), "weft {arguments:?}: {text}");
    for word in words {
        assert!(text.contains(word), "weft {arguments:?} does not say {word:?}: {text}");
    }
    Ok(())
}

/// Waits for a daemon that must not start, and gives what it said.
fn refused_launch(host: &Host, arguments: &[&str]) -> anyhow::Result<(Option<i32>, String)> {
    let before = host.log().len();
    host.spawn_daemon(arguments, &[])?;
    let code = host.wait_daemon(Duration::from_secs(10))?;
    Ok((code, host.log()[before..].to_owned()))
}

#[test]
fn commands_without_a_daemon_say_how_to_start_one() -> anyhow::Result<()> {
    let sandbox = Sandbox::new(&SandboxOptions::default())?;
    for command in [&["status"][..], &["ps"], &["attach", "x"], &["stop"], &["report"]] {
        fails(sandbox.host(0), command, 3, &["not running", "weft launch"])?;
    }
    Ok(())
}

#[test]
fn mistyped_command_lines_are_explained() -> anyhow::Result<()> {
    let sandbox = Sandbox::new(&SandboxOptions::default())?;
    let host = sandbox.host(0);
    fails(host, &["launch", "--no-such-flag"], 2, &["--no-such-flag"])?;
    fails(host, &["launch", "--ipalloc-range", "10.32.0.0/99"], 2, &["10.32.0.0/99"])?;
    fails(host, &["launch", "--mtu", "9"], 2, &["9"])?;
    fails(host, &["launch", "--password-file", "/nonexistent"], 2, &["/nonexistent"])?;
    fails(host, &["launch", "--cipher", "rot13"], 2, &["rot13", "aes-256-gcm"])?;
    fails(host, &["launch", "a b"], 1, &["a b"])?;
    Ok(())
}

#[test]
fn wrong_addresses_and_containers_are_refused_by_name() -> anyhow::Result<()> {
    let lab = Lab::pair(&[])?;
    let host = lab.host(0);
    let one = host.add_container("c1")?;
    let free = lab.sandbox.add_netns("free")?;
    let taken = format!("{}/12", one.ipv4()?);
    fails(host, &["attach", "no-such-container"], 4, &["no-such-container"])?;
    fails(host, &["attach", "10.32.0.300/12", &free.path()], 2, &["10.32.0.300"])?;
    fails(host, &["attach", &taken, &free.path()], 5, &["taken", "c1"])?;
    fails(lab.host(1), &["attach", &taken, &free.path()], 5, &["taken"])?;
    fails(host, &["detach", "no-such-container"], 4, &["not attached", "weft ps"])?;
    fails(host, &["forget", "192.0.2.99"], 4, &["192.0.2.99"])?;
    let targets = host.weft_json(&["status", "targets"])?;
    for mistyped in ["not-a-host..", "192.0.2.300", "a b"] {
        fails(host, &["connect", mistyped], 2, &[mistyped])?;
    }
    fails(host, &["connect", "no-such-host.invalid"], 4, &["no-such-host.invalid", "look up"])?;
    assert_eq!(host.weft_json(&["status", "targets"])?, targets, "a mistake is no target");
    host.weft(&["attach", "10.47.1.1/12", &free.path()])?.success()?;
    let addresses = free.ip("-br addr show weft0")?.stdout;
    assert!(addresses.contains("10.47.1.1/12"), "{addresses}");
    host.weft(&["detach", &free.path()])?.success()?;
    assert!(free.ip("link show weft0").is_err(), "the interface is still there");
    Ok(())
}

#[test]
fn launches_that_cannot_work_say_why_and_change_nothing() -> anyhow::Result<()> {
    let sandbox = Sandbox::new(&SandboxOptions::default())?;
    let host = sandbox.host(0);
    host.netns().ip("route add 10.32.7.0/24 via 192.0.2.2")?;
    let (code, text) = refused_launch(host, &[])?;
    assert!(code == Some(5) && text.contains("10.32.7.0/24"), "{code:?}: {text}");
    let links = host.netns().ip("-br link")?.stdout;
    assert!(!links.contains("weft"), "{links}");
    host.netns().ip("route del 10.32.7.0/24")?;

    let socket = host.netns().spawn(&["socat", "-u", "UDP6-RECV:6784", "STDOUT"])?;
    weft_bench::sandbox::wait_until("the other program's port", Duration::from_secs(5), || {
        host.netns().exec(&["ss", "-uln"]).is_ok_and(|output| output.stdout.contains(":6784"))
    })?;
    let (code, text) = refused_launch(host, &[])?;
    assert!(
        code == Some(5) && text.contains("6784") && text.contains("--data-port"),
        "{code:?}: {text}"
    );
    drop(socket);

    host.start_daemon(&[])?;
    fails(host, &["launch"], 5, &["already", "weft stop"])?;
    Ok(())
}

/// Traces of a host beside files: devices, firewall, sockets, processes.
fn traces(host: &Host) -> anyhow::Result<String> {
    let links = host.netns().exec(&["ip", "-j", "link"])?.success()?.json()?;
    let links = links.as_array().cloned().unwrap_or_default();
    let mut text: String = links.iter().map(|link| format!("{} ", link["ifname"])).collect();
    for command in [&["nft", "list", "ruleset"][..], &["ss", "-Hanu"], &["ss", "-Hant"]] {
        text.push_str(&host.netns().exec(command)?.success()?.stdout);
    }
    let processes = Command::new("ip").args(["netns", "pids", host.netns().name()]).output()?;
    text.push_str(&String::from_utf8(processes.stdout)?);
    Ok(text)
}

/// Waits until a host has no more traces than before: a process that ends is listed a moment longer.
fn wait_untouched(host: &Host, untouched: &str) -> anyhow::Result<()> {
    let mut found = String::new();
    let waited = try_wait_until("no traces to be left", END_LIMIT, || {
        found = traces(host).unwrap_or_else(|error| error.to_string());
        Ok(found == untouched)
    });
    waited.map(drop).with_context(|| format!("{found} and not {untouched}"))
}

#[test]
fn a_launch_that_fails_at_its_socket_or_its_state_leaves_nothing_behind() -> anyhow::Result<()> {
    let sandbox = Sandbox::new(&SandboxOptions::default())?;
    let host = sandbox.host(0);
    let untouched = traces(host)?;
    let path = host.runtime_directory().join("weft.sock");

    std::fs::create_dir(&path)?;
    let (code, text) = refused_launch(host, &[])?;
    let says = |word: &str| text.contains(word);
    assert!(code == Some(1) && says("weft.sock") && says("--runtime-dir"), "{code:?}: {text}");
    wait_untouched(host, &untouched)?;
    fails(host, &["launch"], 1, &["weft.sock", "--runtime-dir"])?;
    wait_untouched(host, &untouched)?;
    std::fs::remove_dir(&path)?;

    let other = UnixListener::bind(&path)?;
    let (code, text) = refused_launch(host, &[])?;
    assert!(code == Some(1) && text.contains("another program"), "{code:?}: {text}");
    wait_untouched(host, &untouched)?;
    UnixStream::connect(&path).map_err(|error| anyhow::anyhow!("its socket is gone: {error}"))?;
    drop(other);

    // No program listens there any more. The daemon replaces the file, and removes it when a later step fails.
    let saved = host.state_directory().join("attachments/1.json");
    std::fs::create_dir_all(host.state_directory().join("attachments"))?;
    std::fs::write(&saved, "{")?;
    let (code, text) = refused_launch(host, &[])?;
    assert!(code == Some(1) && text.contains("attachments/1.json"), "{code:?}: {text}");
    assert_eq!((traces(host)?, path.exists()), (untouched, false));
    std::fs::remove_file(&saved)?;

    host.start_daemon(&[])?;
    Ok(())
}

#[test]
fn without_root_or_tun_the_launch_says_what_is_missing() -> anyhow::Result<()> {
    let sandbox = Sandbox::new(&SandboxOptions::default())?;
    let host = sandbox.host(0);
    let binary = std::env::var("WEFT_BIN")?;
    // Another user can run it from here.
    let open = tempfile::tempdir()?;
    std::fs::set_permissions(open.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755))?;
    let reach = open.path().join("weft");
    std::fs::copy(&binary, &reach)?;
    let reach = reach.to_string_lossy();
    let nobody = "setpriv --reuid 65534 --regid 65534 --clear-groups";
    let hidden = "mount -t tmpfs none /dev/net &&";
    for (before, word) in [(nobody, "root"), (hidden, "modprobe tun")] {
        let script = format!(
            "{before} {reach} launch --foreground --runtime-dir {dir}/r --state-dir {dir}/s",
            dir = sandbox.directory().display()
        );
        let output = host.netns().exec(&["unshare", "-m", "sh", "-c", &script])?;
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        assert!(output.stderr.contains(word), "{output:?}");
    }
    Ok(())
}

#[test]
fn the_daemon_keeps_of_roots_rights_what_it_needs() -> anyhow::Result<()> {
    let lab = Lab::launched(1, &[])?;
    let pid = lab.host(0).daemon_pid().context("no daemon")?;
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let of = |name: &str| {
        status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(":\t")).map(str::trim)
    };
    // CAP_DAC_OVERRIDE, DAC_READ_SEARCH, NET_BIND_SERVICE, NET_BROADCAST, NET_ADMIN, NET_RAW, SYS_PTRACE, SYS_ADMIN.
    let needed = [1, 2, 10, 11, 12, 13, 19, 21].iter().fold(0_u64, |set, bit| set | 1 << bit);
    for set in ["CapEff", "CapPrm", "CapBnd"] {
        let held = u64::from_str_radix(of(set).unwrap_or_default(), 16)?;
        assert_eq!(held & !needed, 0, "{set}: {held:x}");
    }
    assert_eq!((of("NoNewPrivs"), of("Seccomp")), (Some("1"), Some("2")), "{status}");
    Ok(())
}

#[test]
fn launch_returns_once_the_daemon_answers_and_stop_ends_it() -> anyhow::Result<()> {
    let sandbox = Sandbox::new(&SandboxOptions::default())?;
    let host = sandbox.host(0);
    let launched = host.weft(&["launch"])?.success()?;
    assert!(launched.stdout.contains("weft launch 192.0.2.1#"), "{}", launched.stdout);
    host.weft(&["status"])?.success()?;
    host.weft(&["stop"])?.success()?;
    fails(host, &["status"], 3, &["not running"])?;
    Ok(())
}

#[test]
fn an_unreachable_peer_is_retried_and_named() -> anyhow::Result<()> {
    let sandbox = Sandbox::new(&SandboxOptions::default())?;
    let file = sandbox.password_file();
    sandbox.host(0).start_daemon(&["--password-file", &file.to_string_lossy(), "192.0.2.77"])?;
    let retrying = |c: &serde_json::Value| c["reason"].is_string() && c["state"] == "retrying";
    let limit = Duration::from_secs(20);
    let connection = weft_lab::net::wait_connection(sandbox.host(0), "a retry", limit, retrying)?;
    assert!(connection["address"].as_str().is_some_and(|a| a.contains("192.0.2.77")));
    Ok(())
}

#[test]
fn run_starts_a_command_on_the_network_and_its_address_comes_back() -> anyhow::Result<()> {
    let lab = Lab::pair(&[])?;
    let one = lab.host(0).add_container("c1")?;
    let to = one.ipv4()?.to_string();
    let output = lab.host(1).weft(&["run", "--", "ping", "-n", "-c", "2", "-i", "1", &to])?;
    let output = output.success()?;
    assert!(output.stdout.contains(" 0% packet loss"), "{}", output.stdout);
    lab.host(1).weft(&["run", "--", "ping", "-c", "1", "-W", "1", "127.0.0.1"])?.success()?;
    fails(lab.host(1), &["run", "--", "/no/such/program"], 1, &["/no/such/program"])?;
    weft_bench::sandbox::wait_until("the addresses to come back", Duration::from_secs(5), || {
        lab.host(1).weft_json(&["ps"]).is_ok_and(|list| list.as_array().is_some_and(Vec::is_empty))
    })?;
    Ok(())
}

/// Whether the daemon is under Landlock; where the kernel has none, it and doctor say so.
fn is_under_landlock(host: &Host) -> anyhow::Result<bool> {
    let state = host.weft_json(&["status"])?["hardening"]["landlock"].clone();
    let state = state.as_str().context("status tells nothing of Landlock")?.to_owned();
    let line = format!("landlock {state}");
    let told = host.weft(&["status"])?.success()?.stdout;
    assert!(told.contains(&line), "{told}");
    if state.starts_with("on") {
        return Ok(true);
    }
    let doctor = host.weft(&["doctor"])?.stdout;
    assert!(doctor.contains(&line), "{doctor}");
    note(&format!("not tested here: {line}"));
    Ok(false)
}

#[test]
fn a_daemon_that_is_led_out_of_its_directories_writes_nothing() -> anyhow::Result<()> {
    let lab = Lab::launched(1, &[])?;
    let host = lab.host(0);
    if !is_under_landlock(host)? {
        return Ok(());
    }
    let outside = lab.sandbox.directory().join("outside");
    std::fs::create_dir(&outside)?;
    // Its directory of attachments leads there, and is empty so far.
    let way = host.state_directory().join("attachments");
    std::fs::remove_dir(&way)?;
    std::os::unix::fs::symlink(&outside, &way)?;
    let refused = host.add_container("c1").map(|_| ()).expect_err("what is not kept is refused");
    assert!(refused.to_string().contains("Permission denied"), "{refused}");
    let written = std::fs::read_dir(&outside)?.count();
    assert_eq!(written, 0, "it wrote out of its directories");
    std::fs::remove_file(&way)?;
    std::fs::create_dir(&way)?;
    host.add_container("c2")?.ipv4()?;
    Ok(())
}

#[test]
fn a_process_is_attached_and_kept_though_the_daemon_may_not_open_its_namespace()
-> anyhow::Result<()> {
    let lab = Lab::launched(1, &[])?;
    let host = lab.host(0);
    let other = host.add_container("c1")?;
    let [process, later] = ["c2", "c3"]
        .map(|name| lab.sandbox.add_netns(name).and_then(|netns| netns.spawn(&["sleep", "600"])));
    let (process, later) = (process?, later?);
    let id = format!("pid:{}", process.pid());
    let reaches = || -> anyhow::Result<()> {
        let shown = host.weft_json(&["ps"])?;
        let shown = shown.as_array().and_then(|all| all.iter().find(|it| it["id"] == id.as_str()));
        let shown = shown.context("not listed")?;
        assert_eq!(shown["state"], "attached", "{shown}");
        let address = shown["addresses"][0].as_str().and_then(|it| it.split('/').next());
        other.ping(address.context("no address")?.parse()?)?.success()?;
        Ok(())
    };
    host.weft(&["attach", &id])?.success()?;
    reaches()?;
    let setting = "net.ipv6.conf.weft0.accept_ra";
    let pid = process.pid().to_string();
    let read =
        Command::new("nsenter").args(["-n", "-t", &pid, "sysctl", "-n", setting]).output()?;
    assert_eq!(String::from_utf8_lossy(&read.stdout).trim(), "0", "/proc/sys was not written");
    host.kill_daemon();
    host.start_daemon(&[])?;
    reaches()?;

    let Some(opener) = opener_of(host)? else {
        assert!(!is_under_landlock(host)?);
        return Ok(());
    };
    rustix::process::kill_process(opener, rustix::process::Signal::KILL)?;
    let again = host.weft(&["attach", &format!("pid:{}", later.pid())])?;
    assert!(again.stderr.contains("restart weft"), "{}", again.stderr);
    reaches()?;
    host.kill_daemon();
    host.start_daemon(&[])?;
    reaches()?;
    let opener = opener_of(host)?.context("the new daemon has none")?;
    host.stop_daemon()?;
    weft_bench::sandbox::wait_until("the opener to end", Duration::from_secs(10), || {
        rustix::process::test_kill_process(opener).is_err()
    })?;
    Ok(())
}

/// The process that opens namespaces for a host's daemon.
fn opener_of(host: &Host) -> anyhow::Result<Option<rustix::process::Pid>> {
    let daemon = host.daemon_pid().context("no daemon")?;
    let children = std::fs::read_to_string(format!("/proc/{daemon}/task/{daemon}/children"))?;
    let is_opener = |pid: &&str| {
        std::fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|it| it == "weft-opener\n")
    };
    let opener = children.split_whitespace().find(is_opener).map(str::parse).transpose()?;
    Ok(opener.and_then(rustix::process::Pid::from_raw))
}

#[test]
fn a_container_beyond_the_ports_of_a_bridge_is_refused_and_leaves_nothing() -> anyhow::Result<()> {
    let lab = Lab::pair(&["--port-mode", "bridge"])?;
    let host = lab.host(0);
    // The kernel takes 1,023 ports; a few are Weft's.
    let pair = |n| {
        let add = format!("link add p{n} master weft type veth peer name q{n}");
        format!("{add}\nlink set q{n} master weft\n")
    };
    let file = lab.sandbox.directory().join("ports");
    std::fs::write(&file, (0..512).map(pair).collect::<String>())?;
    host.netns().exec(&["ip", "-force", "-batch", &file.to_string_lossy()])?;
    let container = lab.sandbox.add_netns("one")?;
    fails(host, &["attach", &container.path()], 6, &["1023 ports", "detach a container"])?;
    assert_eq!(host.weft_json(&["ps"])?, serde_json::json!([]));
    let links = host.netns().exec(&["ip", "-o", "link"])?.success()?.stdout;
    assert!(!links.contains("weftv"), "an interface is left: {links}");
    host.netns().ip("link del p0")?;
    host.weft(&["attach", &container.path()])?.success()?;
    Ok(())
}
