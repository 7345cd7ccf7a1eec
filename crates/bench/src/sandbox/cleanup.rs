//! Removal of a sandbox: when it is dropped, on an error, on Ctrl-C, and, after a `kill -9`, at the start
//! of the next run.
//!
//! Each run has a random tag. Its namespaces and control groups are named `weft-TAG-…`. All its processes run inside
//! these, or end with one that does. Its files are in `/run/weft-sandbox/TAG`. The file `owner` there names
//! the process in charge: its id and start time, since ids are used again.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use rustix::process::Signal;

use super::SandboxError;
use super::gate::{gate, signal};
use super::netns::{Netns, output_of};
use super::progress;

/// The directory of all sandboxes' files; only root can write here.
const ROOT: &str = "/run/weft-sandbox";
/// The directory of the names of `ip netns`.
const NETNS_DIRECTORY: &str = "/run/netns";
/// The place of control groups: the one hierarchy of version 2, or the directory of version 1's hierarchies.
const CONTROL_GROUPS: &str = "/sys/fs/cgroup";
/// Time between SIGTERM and SIGKILL.
const TERM_GRACE_MS: u64 = 3_000;
/// The most time from SIGKILL until a process has ended.
const KILL_GRACE_MS: u64 = 2_000;
/// The most time until the processes of a control group have ended.
const CONTROL_GROUPS_LIMIT_MS: u64 = 5_000;
/// Limit of each removal command.
const REMOVE_COMMAND_LIMIT: Duration = Duration::from_secs(30);
/// How many tags are tried before giving up: a tag has 16 bits.
const TAG_ATTEMPTS_MAX: usize = 64;

/// Tags of the sandboxes that this process must remove, also when a signal ends it.
static LIVE: Mutex<Vec<String>> = Mutex::new(Vec::new());
static SIGNALS: OnceLock<()> = OnceLock::new();

/// Whether a sandbox found on the machine may be removed by someone else.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Owner {
    /// Its process lives.
    Alive,
    /// Its process is gone.
    Gone,
    /// It was kept on purpose (`./dev demo --keep`).
    Kept,
}

/// Takes a fresh tag, with its directory, for this process, and makes sure that signals remove it.
pub(crate) fn claim() -> Result<(String, PathBuf), SandboxError> {
    watch_signals();
    let _gate = gate();
    fs::create_dir_all(ROOT).map_err(SandboxError::io(format!("make {ROOT}")))?;
    for _ in 0..TAG_ATTEMPTS_MAX {
        let tag = format!("{:04x}", rand::random::<u16>());
        if let Some(directory) = take(&tag)? {
            live().push(tag.clone());
            return Ok((tag, directory));
        }
    }
    let source = io::Error::from(io::ErrorKind::AlreadyExists);
    Err(SandboxError::Io { what: format!("find a free name in {ROOT}"), source })
}

/// Takes a tag for this process, and makes its directory. `None`: the tag is in use, or a namespace of it could
/// not be removed entirely.
fn take(tag: &str) -> Result<Option<PathBuf>, SandboxError> {
    if !namespaces_of(tag).is_empty() {
        return Ok(None);
    }
    let directory = Path::new(ROOT).join(tag);
    let fresh = Path::new(ROOT).join(format!(".{tag}-{}", std::process::id()));
    fs::create_dir_all(&fresh).map_err(SandboxError::io(format!("make {}", fresh.display())))?;
    write_owner(&fresh, &own_mark())?;
    // A directory that exists and is not empty refuses the rename, so a tag has one owner.
    if fs::rename(&fresh, &directory).is_err() {
        let _ = fs::remove_dir_all(&fresh);
        return Ok(None);
    }
    Ok(Some(directory))
}

/// Removes all that carries the tag. Errors are shown and do not stop the rest.
pub(crate) fn remove(tag: &str) {
    let _gate = gate();
    remove_unguarded(tag);
    live().retain(|other| other != tag);
}

/// Leaves the sandbox to the user: neither the end of this process nor a sweep removes it.
pub(crate) fn keep(tag: &str) -> Result<(), SandboxError> {
    write_owner(&Path::new(ROOT).join(tag), "kept\n")?;
    live().retain(|other| other != tag);
    Ok(())
}

/// Removes sandboxes of processes that were killed before they could; returns the tags.
pub fn sweep() -> Vec<String> {
    remove_where(|owner| owner == Owner::Gone)
}

/// Removes sandboxes that `--keep` or a killed run left; returns the tags.
pub fn remove_kept() -> Vec<String> {
    remove_where(|owner| owner != Owner::Alive)
}

fn live() -> MutexGuard<'static, Vec<String>> {
    LIVE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn remove_where(judge: impl Fn(Owner) -> bool) -> Vec<String> {
    let _gate = gate();
    let Ok(entries) = fs::read_dir(ROOT) else { return Vec::new() };
    let mut removed = Vec::new();
    for entry in entries.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let owner = owner_of(&entry.path());
        if !judge(owner) {
            continue;
        }
        if name.starts_with('.') {
            let _ = fs::remove_dir_all(entry.path());
        } else {
            if remove_unguarded(&name) {
                removed.push(name);
            }
        }
    }
    removed
}

/// Removes the sandbox. Returns false if part of it is left.
fn remove_unguarded(tag: &str) -> bool {
    let directory = Path::new(ROOT).join(tag);
    let names = namespaces_of(tag);
    end_processes(&names);
    for name in &names {
        attempt(Command::new("ip").args(["netns", "del", name]));
    }
    remove_control_groups(tag);
    // The next sweep finds what remains by the directory.
    if !namespaces_of(tag).is_empty() || !control_groups_of(tag).is_empty() {
        return false;
    }
    match fs::remove_dir_all(&directory) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            progress::note(&format!("could not remove {}: {error}", directory.display()));
            false
        }
        _ => true,
    }
}

fn attempt(command: &mut Command) {
    if let Err(error) = output_of(command, REMOVE_COMMAND_LIMIT).and_then(super::Output::success) {
        progress::note(&format!("left behind: {error}"));
    }
}

fn namespaces_of(tag: &str) -> Vec<String> {
    let names = entries_of(Path::new(NETNS_DIRECTORY), &format!("weft-{tag}-"));
    let names = names.iter().filter_map(|path| path.file_name());
    names.map(|name| name.to_string_lossy().into_owned()).collect()
}

fn control_groups_of(tag: &str) -> Vec<PathBuf> {
    let place = Path::new(CONTROL_GROUPS);
    let mut hierarchies = entries_of(place, "");
    hierarchies.push(place.to_owned());
    let prefix = format!("weft-{tag}-");
    hierarchies.iter().flat_map(|hierarchy| entries_of(hierarchy, &prefix)).collect()
}

/// The entries of a directory whose names begin with this prefix; empty if the directory cannot be read.
fn entries_of(directory: &Path, prefix: &str) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(directory) else { return Vec::new() };
    let named =
        entries.flatten().filter(|entry| entry.file_name().to_string_lossy().starts_with(prefix));
    named.map(|entry| entry.path()).collect()
}

/// Removes the control groups of containers, and ends the processes in them.
fn remove_control_groups(tag: &str) {
    let deadline = Instant::now() + Duration::from_millis(CONTROL_GROUPS_LIMIT_MS);
    loop {
        let groups = control_groups_of(tag);
        groups.iter().for_each(|group| end_processes_in(group));
        let left = groups.iter().find_map(|group| remove_control_group(group).err());
        match left {
            Some(_) if Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(20));
            }
            Some(error) => return progress::note(&format!("left behind: control groups: {error}")),
            None => return,
        }
    }
}

/// Kills the processes in a control group and those in it: containers of an engine that was killed live on.
fn end_processes_in(group: &Path) {
    let pids = fs::read_to_string(group.join("cgroup.procs")).unwrap_or_default();
    pids.lines().filter_map(|pid| pid.parse().ok()).for_each(|pid| signal(pid, Signal::KILL));
    let Ok(entries) = fs::read_dir(group) else { return };
    let inner = entries.flatten().filter(|entry| entry.file_type().is_ok_and(|it| it.is_dir()));
    inner.for_each(|entry| end_processes_in(&entry.path()));
}

/// Removes a control group and those in it. The files in it are the kernel's, and go with it.
fn remove_control_group(group: &Path) -> io::Result<()> {
    for inner in fs::read_dir(group)?.flatten() {
        if inner.file_type()?.is_dir() {
            remove_control_group(&inner.path())?;
        }
    }
    fs::remove_dir(group)
}

/// Ends every process in the namespaces: asked first, killed after a grace time.
fn end_processes(names: &[String]) {
    let deadline = Instant::now() + Duration::from_millis(TERM_GRACE_MS);
    let last = deadline + Duration::from_millis(KILL_GRACE_MS);
    let mut asked = Vec::new();
    loop {
        let pids: Vec<u32> = names.iter().flat_map(|name| Netns::pids(name)).collect();
        if pids.is_empty() || Instant::now() >= last {
            return;
        }
        let is_late = Instant::now() >= deadline;
        for pid in pids {
            if is_late {
                signal(pid, Signal::KILL);
            } else if !asked.contains(&pid) {
                signal(pid, Signal::TERM);
                asked.push(pid);
            }
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Writes the mark whole: a sweep that reads a part of it would take the owner for gone.
fn write_owner(directory: &Path, mark: &str) -> Result<(), SandboxError> {
    let (file, fresh) = (directory.join("owner"), directory.join("owner.new"));
    fs::write(&fresh, mark)
        .and_then(|()| fs::rename(&fresh, &file))
        .map_err(SandboxError::io(format!("write {}", file.display())))
}

fn own_mark() -> String {
    let pid = std::process::id();
    format!("{pid} {}\n", start_time_of(pid).unwrap_or_default())
}

fn owner_of(directory: &Path) -> Owner {
    // While its maker lives, nobody touches it: a removal would go on after the directory has its name.
    if let Some(pid) = maker_of(directory) {
        return if start_time_of(pid).is_some() { Owner::Alive } else { Owner::Gone };
    }
    match fs::read_to_string(directory.join("owner")) {
        Ok(mark) => judge_mark(&mark, start_time_of),
        // Another failure says nothing of the owner.
        Err(error) if error.kind() != io::ErrorKind::NotFound => Owner::Alive,
        Err(_) => Owner::Gone,
    }
}

/// The process that makes the directory, if that is one of [`take`]'s and has no tag for its name yet.
fn maker_of(directory: &Path) -> Option<u32> {
    let name = directory.file_name()?.to_string_lossy();
    let (_, pid) = name.strip_prefix('.')?.rsplit_once('-')?;
    pid.parse().ok()
}

fn judge_mark(mark: &str, start_time_of: impl Fn(u32) -> Option<u64>) -> Owner {
    if mark.trim() == "kept" {
        return Owner::Kept;
    }
    let mut words = mark.split_whitespace();
    let pid = words.next().and_then(|word| word.parse().ok());
    let started: Option<u64> = words.next().and_then(|word| word.parse().ok());
    match pid.and_then(start_time_of) {
        now @ Some(_) if now == started => Owner::Alive,
        _ => Owner::Gone,
    }
}

/// When a process started, in clock ticks since boot: field 22 of `/proc/PID/stat`.
fn start_time_of(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name, field 2, stands in parentheses and may itself hold spaces and parentheses.
    let (_, rest) = stat.rsplit_once(')')?;
    rest.split_whitespace().nth(19)?.parse().ok()
}

/// Removes everything and ends the process on SIGINT, SIGTERM and SIGHUP.
fn watch_signals() {
    SIGNALS.get_or_init(|| {
        let (ready, wait) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build()
            else {
                return;
            };
            let code = runtime.block_on(first_signal(&ready));
            if let Some(code) = code {
                let _gate = gate();
                let tags = live().clone();
                if !tags.is_empty() {
                    progress::step("interrupted: removing all that was made");
                }
                for tag in tags {
                    remove_unguarded(&tag);
                }
                std::process::exit(code);
            }
        });
        let _ = wait.recv_timeout(Duration::from_secs(5));
    });
}

async fn first_signal(ready: &std::sync::mpsc::Sender<()>) -> Option<i32> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut interrupt = signal(SignalKind::interrupt()).ok()?;
    let mut terminate = signal(SignalKind::terminate()).ok()?;
    let mut hangup = signal(SignalKind::hangup()).ok()?;
    let _ = ready.send(());
    tokio::select! {
        _ = interrupt.recv() => Some(130),
        _ = terminate.recv() => Some(143),
        _ = hangup.recv() => Some(129),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_is_alive_only_with_the_same_start_time() {
        let clock = |pid| (pid == 7).then_some(1000);
        assert_eq!(judge_mark("7 1000\n", clock), Owner::Alive);
        assert_eq!(judge_mark("7 999\n", clock), Owner::Gone);
        assert_eq!(judge_mark("8 1000\n", clock), Owner::Gone);
        assert_eq!(judge_mark("kept\n", clock), Owner::Kept);
        assert_eq!(judge_mark("", clock), Owner::Gone);
        assert_eq!(judge_mark("7\n", clock), Owner::Gone);
    }

    #[test]
    fn a_tag_is_taken_once_and_not_while_a_namespace_has_it()
    -> Result<(), Box<dyn std::error::Error>> {
        // No random tag is like it.
        let tag = format!("once{}", std::process::id());
        let directory = Path::new(ROOT).join(&tag);
        fs::create_dir_all(ROOT)?;
        let (first, second) = (take(&tag)?, take(&tag)?);
        // `ip netns del` fails on a directory.
        let stuck = Path::new(NETNS_DIRECTORY).join(format!("weft-{tag}-stuck"));
        fs::create_dir_all(&stuck)?;
        let while_stuck = (remove_unguarded(&tag), directory.exists(), take(&tag)?);
        fs::remove_dir(&stuck)?;
        let after = (remove_unguarded(&tag), directory.exists());
        assert_eq!((first, second), (Some(directory.clone()), None));
        assert_eq!(while_stuck, (false, true, None));
        assert_eq!(after, (true, false));
        // No sweep removes a namespace without a directory, and no run takes its tag.
        let netns = Netns::create(format!("weft-{tag}-left"))?;
        let while_left = take(&tag)?;
        attempt(Command::new("ip").args(["netns", "del", netns.name()]));
        assert_eq!(while_left, None);
        assert_eq!(take(&tag)?, Some(directory));
        assert!(remove_unguarded(&tag));
        Ok(())
    }

    #[test]
    fn a_sandbox_of_a_living_process_is_not_swept() -> Result<(), Box<dyn std::error::Error>> {
        let root = tempfile::tempdir()?;
        let of = |name: String| {
            let directory = root.path().join(name);
            fs::create_dir(&directory).map(|()| owner_of(&directory))
        };
        let made = format!(".0a1b-{}", std::process::id());
        assert_eq!(of(made.clone())?, Owner::Alive);
        // Its file is there, and the mark is not in it yet.
        fs::write(root.path().join(&made).join("owner"), "")?;
        assert_eq!(owner_of(&root.path().join(&made)), Owner::Alive);
        // Beyond the largest process id that Linux gives.
        assert_eq!(of(".0a1b-4194305".to_owned())?, Owner::Gone);
        assert_eq!(of("0a1b".to_owned())?, Owner::Gone);
        Ok(())
    }

    #[test]
    fn this_process_is_alive() {
        assert_eq!(judge_mark(&own_mark(), start_time_of), Owner::Alive);
    }
}
