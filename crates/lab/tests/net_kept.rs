//! The state that a host keeps, and its behaviour when it cannot: a full disk, containers that end or cannot be
//! attached, routes in the range, names.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use serde_json::Value;
use weft_bench::sandbox::{Host, try_wait_until};
use weft_lab::net::{Lab, wait_ping};

const SOON: Duration = Duration::from_secs(20);

/// A state directory on a small separate disk, which a test fills up.
struct Disk<'a>(&'a Host);

impl<'a> Disk<'a> {
    /// Moves the state of a host onto it; the host's daemon must be stopped.
    fn under(host: &'a Host) -> anyhow::Result<Self> {
        let dir = host.state_directory();
        let saved = dir.with_extension("saved");
        let _ = std::fs::rename(&dir, &saved);
        std::fs::create_dir_all(&dir)?;
        let path = dir.to_string_lossy();
        run(&["mount", "-t", "tmpfs", "-o", "size=512k,mode=700", "tmpfs", &path])?;
        run(&["cp", "-a", &format!("{}/.", saved.to_string_lossy()), &path])?;
        Ok(Self(host))
    }

    fn fill(&self) -> anyhow::Result<()> {
        let path = self.0.state_directory().join("fill");
        let full = std::fs::write(path, vec![1; 600 << 10]);
        anyhow::ensure!(full.is_err(), "the disk has room for more");
        Ok(())
    }

    fn make_room(&self) -> anyhow::Result<()> {
        Ok(std::fs::remove_file(self.0.state_directory().join("fill"))?)
    }

    fn set_writable(&self, writable: bool) -> anyhow::Result<()> {
        let options = if writable { "remount,rw" } else { "remount,ro" };
        run(&["mount", "-o", options, &self.0.state_directory().to_string_lossy()])
    }
}

impl Drop for Disk<'_> {
    fn drop(&mut self) {
        self.0.kill_daemon();
        let _ = run(&["umount", "-l", &self.0.state_directory().to_string_lossy()]);
    }
}

fn run(words: &[&str]) -> anyhow::Result<()> {
    let output = Command::new(words[0]).args(&words[1..]).output()?;
    anyhow::ensure!(
        output.status.success(),
        "{words:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}

/// Runs a command that must fail, and say these words.
fn refused(host: &Host, command: &[&str], words: &[&str]) -> anyhow::Result<()> {
    let output = host.weft(command)?;
    let text = format!("{}{}", output.stdout, output.stderr);
    assert!(!output.status.success(), "weft {command:?} must be refused: {text}");
    for word in words {
        assert!(text.contains(word), "weft {command:?} does not say {word:?}: {text}");
    }
    Ok(())
}

fn attachment(host: &Host, name: &str) -> anyhow::Result<Value> {
    let list = host.weft_json(&["ps"])?;
    let list = list.as_array().cloned().unwrap_or_default();
    Ok(list.into_iter().find(|it| it["name"] == name).unwrap_or_default())
}

fn wait_state(host: &Host, name: &str, state: &str) -> anyhow::Result<()> {
    try_wait_until(&format!("{name} to be {state}"), SOON, || {
        Ok(attachment(host, name).is_ok_and(|it| it["state"] == state))
    })?;
    Ok(())
}

fn warnings(host: &Host) -> anyhow::Result<String> {
    Ok(host.weft_json(&["status"])?["warnings"].to_string())
}

fn wait_writable(host: &Host) -> anyhow::Result<()> {
    try_wait_until("the disk to be found writable", SOON, || {
        Ok(warnings(host).is_ok_and(|text| text == "[]"))
    })?;
    Ok(())
}

/// Attach, connect and forget are refused whole while nothing can be saved, and work again afterwards.
fn refuses_and_recovers(
    lab: &Lab,
    free: &Path,
    reason: &str,
    mend: impl Fn() -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let host = lab.host(0);
    let free = free.to_string_lossy();
    let before = (host.weft_json(&["ps"])?, host.weft_json(&["status", "targets"])?);
    refused(host, &["attach", &free], &[".json", reason])?;
    refused(host, &["attach", "10.33.0.9/12", &free], &[".json", reason])?;
    refused(host, &["connect", "192.0.2.77"], &["targets.json", reason])?;
    assert_eq!((host.weft_json(&["ps"])?, host.weft_json(&["status", "targets"])?), before);
    let doctor = host.weft(&["doctor"])?.stdout;
    for text in [warnings(host)?, doctor] {
        assert!(text.contains("cannot be written since") && text.contains(reason), "{text}");
    }
    mend()?;
    wait_writable(host)?;
    host.weft(&["attach", &free])?.success()?;
    host.weft(&["detach", &free])?.success()?;
    Ok(())
}

#[test]
fn a_full_or_read_only_state_disk_stops_nothing_that_runs() -> anyhow::Result<()> {
    let lab = Lab::launched(2, &[])?;
    let host = lab.host(0);
    host.stop_daemon()?;
    let disk = Disk::under(host)?;
    let password = lab.password_file();
    let words = ["--password-file", &password.to_string_lossy()];
    host.start_daemon(&words)?;
    let (one, two) = lab.containers()?;
    let far = two.ipv4()?.into();
    wait_ping(&one, far, SOON)?;
    let free = lab.sandbox.add_netns("free")?;

    // Removing a container's record takes no room.
    let spare = host.add_container("spare")?;
    disk.fill()?;
    host.weft(&["detach", &spare.netns().path()])?.success()?;
    disk.fill()?;
    refuses_and_recovers(&lab, free.path().as_ref(), "No space left", || disk.make_room())?;
    assert!(free.ip("link show weft0").is_err(), "the interface is still there");

    // Another host's news do not stop the daemon; they are shown before they are on disk.
    disk.fill()?;
    lab.host(1).kill_daemon();
    lab.host(1).start_daemon(&[])?;
    wait_ping(&one, far, SOON)?;

    // A daemon starts on a full disk, with all that it had.
    host.kill_daemon();
    host.start_daemon(&words)?;
    wait_ping(&one, far, SOON)?;
    disk.make_room()?;
    wait_writable(host)?;

    disk.set_writable(false)?;
    refused(host, &["detach", &one.netns().path()], &["attachments/", "Read-only"])?;
    refuses_and_recovers(&lab, free.path().as_ref(), "Read-only", || disk.set_writable(true))?;
    disk.set_writable(false)?;
    host.kill_daemon();
    host.start_daemon(&words)?;
    wait_ping(&one, far, SOON)?;
    disk.set_writable(true)
}

#[test]
fn a_container_that_comes_back_has_its_addresses() -> anyhow::Result<()> {
    let lab = Lab::pair(&[])?;
    let (one, two) = lab.containers()?;
    let host = lab.host(1);
    let (name, address) = (two.netns().name().to_owned(), two.ipv4()?);
    wait_ping(&one, address.into(), SOON)?;
    lab.sandbox.remove_netns(two.netns())?;
    wait_state(host, &name, "gone")?;
    let gone = attachment(host, &name)?;
    assert!(gone["state_since"].is_string(), "{gone}");
    assert!(gone["reason"].as_str().is_some_and(|it| it.contains("24 h")), "{gone}");
    assert!(warnings(host)?.contains("weft ps"), "{}", warnings(host)?);
    // No other container gets it, and it is kept over a restart.
    let other = host.add_container("c3")?;
    assert_ne!(other.ipv4()?, address);
    host.kill_daemon();
    host.start_daemon(&[])?;
    assert_eq!(attachment(host, &name)?, gone);

    // It comes back under its name, by itself or by a command: the same addresses either way.
    let prefix = format!("weft-{}-", lab.sandbox.tag());
    let again = lab.sandbox.add_netns(name.strip_prefix(&prefix).unwrap_or(&name))?;
    host.weft(&["attach", &name])?.success()?;
    let shown = again.ip("-br addr show weft0")?.stdout;
    assert!(shown.contains(&address.to_string()), "{shown}");
    assert_eq!(attachment(host, &name)?["state"], "attached");
    wait_ping(&one, address.into(), SOON)?;

    lab.sandbox.remove_netns(&again)?;
    wait_state(host, &name, "gone")?;
    // An explicit request gets this address; a container that is gone can be detached.
    let free = lab.sandbox.add_netns("free")?;
    host.weft(&["attach", &format!("{address}/12"), &free.path()])?.success()?;
    assert_eq!(attachment(host, &name)?, Value::Null);
    lab.sandbox.remove_netns(other.netns())?;
    wait_state(host, other.netns().name(), "gone")?;
    host.weft(&["detach", other.netns().name()])?.success()?;
    assert_eq!(attachment(host, other.netns().name())?, Value::Null);
    Ok(())
}

#[test]
fn a_container_that_cannot_be_attached_at_start_is_kept_and_retried() -> anyhow::Result<()> {
    let lab = Lab::pair(&[])?;
    let (one, two) = lab.containers()?;
    let host = lab.host(1);
    let (name, address) = (two.netns().name().to_owned(), two.ipv4()?);
    host.stop_daemon()?;
    two.netns().ip("link del weft0")?;
    two.netns().ip("link add weft0 type veth peer name other")?;
    host.start_daemon(&[])?;
    let failed = attachment(host, &name)?;
    assert_eq!(failed["state"], "failed", "{failed}");
    assert!(failed["reason"].as_str().is_some_and(|it| it.contains("weft0")), "{failed}");
    two.netns().ip("link del weft0")?;
    wait_state(host, &name, "attached")?;
    assert_eq!(two.ipv4()?, address);
    wait_ping(&one, address.into(), SOON)?;
    Ok(())
}

#[test]
fn routes_in_or_around_the_range_are_warned_of_and_keep_no_host_from_coming_back()
-> anyhow::Result<()> {
    let lab = Lab::pair(&[])?;
    let (one, two) = lab.containers()?;
    let host = lab.host(0);
    for (route, how) in [("10.40.5.0/24", "lies in"), ("10.0.0.0/8", "contains")] {
        host.netns().ip(&format!("route add {route} via 192.0.2.2"))?;
        // While the daemon runs, and as it starts.
        let told = || -> anyhow::Result<bool> {
            let text = warnings(host)?;
            Ok(text.contains(route) && text.contains(how) && text.contains("--ipalloc-range"))
        };
        let what = format!("a word of {route}");
        try_wait_until(&what, SOON, || Ok(told().is_ok_and(|told| told)))?;
        host.kill_daemon();
        host.start_daemon(&[])?;
        wait_ping(&one, two.ipv4()?.into(), SOON)?;
        try_wait_until(&what, SOON, || Ok(told().is_ok_and(|told| told)))?;
        host.netns().ip(&format!("route del {route}"))?;
        try_wait_until("its end", SOON, || Ok(warnings(host).is_ok_and(|text| text == "[]")))?;
    }
    // Halves of all addresses, as VPNs make them, are a default route.
    host.netns().ip("route add 0.0.0.0/1 via 192.0.2.2")?;
    host.kill_daemon();
    host.start_daemon(&[])?;
    wait_ping(&one, two.ipv4()?.into(), SOON)?;
    assert_eq!(warnings(host)?, "[]");
    Ok(())
}

#[test]
fn one_namespace_has_one_attachment_whatever_it_is_called() -> anyhow::Result<()> {
    let lab = Lab::pair(&[])?;
    let (_, two) = lab.containers()?;
    let host = lab.host(1);
    let address = two.ipv4()?.to_string();
    let sleeper = two.spawn(&["sleep", "600"])?;
    let pid = format!("pid:{}", sleeper.pid());
    let path = format!("/proc/{}/ns/net", sleeper.pid());
    for name in [&pid, &path] {
        let given = host.weft(&["attach", name])?.success()?.stdout;
        assert!(given.contains(&address), "{given}");
    }
    let list = host.weft_json(&["ps"])?;
    assert_eq!(list.as_array().map(Vec::len), Some(1), "{list}");
    host.weft(&["detach", &pid])?.success()?;
    assert_eq!(host.weft_json(&["ps"])?, Value::Array(Vec::new()));
    Ok(())
}

#[test]
fn reset_takes_what_is_weft_s_and_says_what_it_left() -> anyhow::Result<()> {
    let lab = Lab::launched(1, &[])?;
    let host = lab.host(0);
    host.netns().ip("link add friend type veth peer name friend1")?;
    host.netns().exec(&["ip", "link", "set", "friend", "alias", "weft backup line"])?.success()?;
    let elsewhere = lab.sandbox.directory().join("elsewhere");
    let words = ["reset", "--force", "--state-dir", &elsewhere.to_string_lossy()];
    let text = host.weft(&words)?.success()?.stdout;
    let state = host.state_directory();
    assert!(
        text.contains("holds no identity") && text.contains(&*state.to_string_lossy()),
        "{text}"
    );
    assert!(state.join("mesh.json").exists());
    let links = host.netns().ip("-br link")?.stdout;
    assert!(links.contains("friend") && !links.contains("weft"), "{links}");
    let text = host.weft(&["reset", "--force"])?.success()?.stdout;
    assert!(text.contains("weft is reset") && !state.exists(), "{text}");
    Ok(())
}
