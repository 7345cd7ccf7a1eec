//! A host of the guest: its daemon's counters, its processor time, the kernel's modules.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde_json::Value;
use weft_bench::sandbox::Host;

/// One counter of a host's kernel engine.
///
/// # Errors
/// The report has no such counter: a renamed counter must not make a test pass.
pub fn kernel_counter(host: &Host, name: &str) -> anyhow::Result<u64> {
    let report = host.weft_json(&["report"])?;
    let counters = &report["kernel_counters"];
    counters[name].as_u64().ok_or_else(|| anyhow::anyhow!("no counter {name} in {counters}"))
}

/// The time for a late reading of nft's counters to end.
const COUNTED: Duration = Duration::from_secs(1);
/// Counters of the guard that do not count packets.
const NO_DROPS: [&str; 2] = ["guard_age_ms", "guard_restored"];

/// Packets that the guard's rules of this direction (`input`, `output`, …) have dropped.
///
/// # Errors
/// There is no such rule.
pub fn guard_dropped(host: &Host, direction: &str) -> anyhow::Result<u64> {
    // The daemon answers with the last known counters while nft is slow. The first request makes it read them, the
    // second gets the result.
    host.weft_json(&["report"])?;
    std::thread::sleep(COUNTED);
    let report = host.weft_json(&["report"])?;
    let prefix = format!("guard_{direction}");
    let counters = report["kernel_counters"].as_object().cloned().unwrap_or_default();
    let found: Vec<u64> = counters
        .iter()
        .filter(|(name, _)| name.starts_with(&prefix) && !NO_DROPS.contains(&name.as_str()))
        .filter_map(|(_, count)| count.as_u64())
        .collect();
    anyhow::ensure!(!found.is_empty(), "no counter {prefix} in {counters:?}");
    Ok(found.iter().sum())
}

/// All packets that the guard has dropped, in either direction.
///
/// # Errors
/// There is no guard.
pub fn guard_dropped_all(host: &Host) -> anyhow::Result<u64> {
    guard_dropped(host, "")
}

/// The output of `weft status --json`.
///
/// # Errors
/// As [`Host::weft_json`].
pub fn status(host: &Host) -> anyhow::Result<Value> {
    Ok(host.weft_json(&["status"])?)
}

/// A daemon's process, as the kernel accounts for it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Work {
    /// User and system time in clock ticks of 10 ms (proc(5), stat, fields 14 and 15).
    pub ticks: u64,
    /// How often its threads have waited for something: once or more for each thing they do.
    pub waits: u64,
}

impl Work {
    /// The daemon's work so far.
    ///
    /// # Errors
    /// It is gone.
    pub fn of(host: &Host) -> anyhow::Result<Self> {
        let pid = host.daemon_pid().ok_or_else(|| anyhow::anyhow!("no daemon runs"))?;
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
        let fields: Vec<&str> = stat.rsplit(") ").next().unwrap_or_default().split(' ').collect();
        let mut waits = 0;
        for task in std::fs::read_dir(format!("/proc/{pid}/task"))?.flatten() {
            let status = std::fs::read_to_string(task.path().join("status")).unwrap_or_default();
            let line = status.lines().find_map(|l| l.strip_prefix("voluntary_ctxt_switches:"));
            waits += line.and_then(|line| line.trim().parse::<u64>().ok()).unwrap_or_default();
        }
        Ok(Self { ticks: fields[11].parse::<u64>()? + fields[12].parse::<u64>()?, waits })
    }

    /// The work since `before`.
    #[must_use]
    pub fn since(self, before: Self) -> Self {
        Self {
            ticks: self.ticks.saturating_sub(before.ticks),
            waits: self.waits.saturating_sub(before.waits),
        }
    }
}

/// Modules that the kernel cannot load, until this is dropped: their files are hidden, and those
/// that are loaded are removed.
pub struct HiddenModules(Vec<(PathBuf, PathBuf)>);

impl HiddenModules {
    /// Hides modules, and unloads those of them that are loaded, in this order.
    ///
    /// # Errors
    /// One is in use, has no file, or is built in.
    pub fn hide(names: &[&str]) -> anyhow::Result<Self> {
        let mut hidden = Self(Vec::new());
        for name in names {
            let file = module_file(name)?;
            let place = file.with_extension("hidden");
            std::fs::rename(&file, &place)?;
            hidden.0.push((file, place));
        }
        unload(names)?;
        Ok(hidden)
    }
}

impl Drop for HiddenModules {
    fn drop(&mut self) {
        for (file, place) in &self.0 {
            let _ = std::fs::rename(place, file);
        }
    }
}

/// Whether the kernel has a module for this, loaded or not, that is not built in.
#[must_use]
pub fn has_module(name: &str) -> bool {
    module_file(name).is_ok()
}

fn module_file(name: &str) -> anyhow::Result<PathBuf> {
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    let mut folders = vec![PathBuf::from(format!("/lib/modules/{release}/kernel"))];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder)?.flatten() {
            let path = entry.path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let file = entry.file_name().to_string_lossy().replace('-', "_");
            let stem = file.split(".ko").next().unwrap_or_default();
            if stem == name.replace('-', "_") && file.contains(".ko") {
                return Ok(path);
            }
        }
    }
    anyhow::bail!("kernel {release} has no file for the module {name}")
}

/// Unloads modules in this order; a module that is not loaded is not an error.
///
/// # Errors
/// A module stays in use for too long: namespaces that are being removed hold on to it.
pub fn unload(names: &[&str]) -> anyhow::Result<()> {
    const UNLOAD_LIMIT: Duration = Duration::from_secs(5);
    for name in names {
        let what = format!("module {name} to be unloaded");
        let mut said = String::new();
        let result = weft_bench::sandbox::wait_until(&what, UNLOAD_LIMIT, || {
            if is_loaded(name) {
                said = run_kmod("rmmod", name).err().map_or_else(String::new, |it| it.to_string());
            }
            !is_loaded(name)
        });
        result.map_err(|error| anyhow::anyhow!("{error}: {said}"))?;
    }
    Ok(())
}

/// Loads a module.
///
/// # Errors
/// Returns an error if modprobe fails.
pub fn load(name: &str) -> anyhow::Result<()> {
    run_kmod("modprobe", name)
}

/// Whether the kernel has a module loaded.
#[must_use]
pub fn is_loaded(name: &str) -> bool {
    Path::new("/sys/module").join(name.replace('-', "_")).join("refcnt").exists()
}

/// kmod is each of its programs, by the name that it is started with.
fn run_kmod(program: &str, module: &str) -> anyhow::Result<()> {
    use std::os::unix::process::CommandExt;
    let output = Command::new("kmod").arg0(program).arg(module).output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    anyhow::ensure!(output.status.success(), "{program} {module}: {said}");
    Ok(())
}
