//! The unit under a separate systemd in separate namespaces: its restrictions keep nothing from working.

use std::path::PathBuf;
use std::process::Command;

use anyhow::Context;

/// Runs as the first process's child of fresh namespaces, becomes systemd, and ends it after the questions.
const SCRIPT: &str = r#"
set -eu
mount --make-rprivate /
mount -t tmpfs run /run
mount -t proc proc /proc
mount -t cgroup2 cgroup /sys/fs/cgroup
mkdir -p /run/lock /run/bin /run/systemd/system/weft.service.d
cp "$WEFT_BIN" /run/bin/weft
sed -e 's#/usr/bin/weft#/run/bin/weft#' -e '/^\(Wants\|After\|Before\)=/d' \
  -e 's#^\[Unit\]#&\nDefaultDependencies=no#' "$UNIT" > /run/systemd/system/weft.service
cat > /run/systemd/system/weft.service.d/place.conf <<'END'
[Service]
StateDirectory=
ConfigurationDirectory=
ExecStart=
ExecStart=/run/bin/weft launch --foreground --state-dir /run/state
END
printf '[Unit]\nDescription=the test\nDefaultDependencies=no\nWants=weft.service\n' \
  > /run/systemd/system/lab.target
ip link set lo up
weft() { /run/bin/weft --runtime-dir /run/weft "$@"; }
asked() {
  tries=0
  until weft status > /dev/null 2>&1 || [ $tries -ge 100 ]; do sleep 0.2; tries=$((tries + 1)); done
  ip netns add c1
  ip netns add c2
  weft attach c1
  to=$(weft attach c2 | cut -d/ -f1)
  ip netns exec c1 ping -n -c 2 -W 5 "$to"
  pid=$(systemctl show -p MainPID --value weft.service)
  grep -E '^(CapEff|NoNewPrivs|Seccomp):' "/proc/$pid/status"
  systemctl show -p ActiveState -p NRestarts weft.service
}
{ asked > /run/asked 2>&1 || true; echo 'asked'; cat /run/asked; systemctl exit 0; } &
export container=lxc
exec /lib/systemd/systemd --system --unit=lab.target --log-target=console --log-level=warning
"#;

#[test]
fn containers_reach_each_other_under_the_unit() -> anyhow::Result<()> {
    let weft = PathBuf::from(std::env::var_os("WEFT_BIN").context("WEFT_BIN names no program")?);
    let unit = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../packaging/weft.service");
    let namespaces = ["--mount", "--pid", "--fork", "--uts", "--ipc", "--cgroup", "--net"];
    let output = Command::new("timeout")
        .args(["--kill-after=5", "90", "unshare"])
        .args(namespaces)
        .args(["--kill-child", "bash", "-c", SCRIPT])
        .envs([("WEFT_BIN", &weft), ("UNIT", &unit)])
        .output()?;
    let told = format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    for line in ["2 received", "NoNewPrivs:\t1", "Seccomp:\t2", "ActiveState=active", "NRestarts=0"]
    {
        assert!(told.contains(line), "{line:?} is missing: {told}");
    }
    let held = told.lines().find_map(|line| line.strip_prefix("CapEff:\t"));
    assert_eq!(held, Some("0000000000283c06"), "{told}");
    Ok(())
}
