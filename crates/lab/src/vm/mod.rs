//! The VM lab: stock Debian kernels under QEMU, for features that this machine's kernel lacks.
//!
//! A guest is emulated (TCG), so it needs no `/dev/kvm`; it has no disk and no network card. Its root file
//! system is two archives. The base holds the usual tools and the kernel's modules, and is made once for a
//! kernel. The other holds the additions of this run (Weft, test programs, files). A command's output comes out
//! on a virtio port, its files under `/out` on a virtio disk.

mod apt;
mod guest;
mod image;
pub mod interrupt;
pub mod kernel;
mod libraries;
mod newer;
mod report;
mod shell;
pub mod suite;
mod tools;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use anyhow::{Context, bail};
use rustix::fs::{FlockOperation, flock};
use weft_bench::sandbox::programs;

pub use guest::{Clock, Ending, Guest, Job, place_of};
pub use shell::script_of;

/// The folder of kernels and base images: `$XDG_CACHE_HOME/weft`, else `~/.cache/weft`.
///
/// # Errors
/// Neither variable is set.
pub fn cache_directory() -> anyhow::Result<PathBuf> {
    programs::cache_directory().context("HOME is not set: where is the cache to be?")
}

/// Runs a program to its end and returns its output; a failure is an error with the output.
pub(crate) fn run(command: &mut Command) -> anyhow::Result<Output> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.output().with_context(|| format!("cannot start {name}"))?;
    interrupt::check()?;
    if output.status.success() {
        return Ok(output);
    }
    let said = String::from_utf8_lossy(&output.stderr);
    bail!("{name} failed ({}): {}", output.status, last_lines(&said, 12))
}

/// The end of a text.
pub(crate) fn last_lines(text: &str, count: usize) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(count)..].join("\n")
}

/// Makes a folder and those above it.
pub(crate) fn make_directory(path: &Path) -> anyhow::Result<()> {
    std::fs::create_dir_all(path).with_context(|| format!("cannot make {}", path.display()))
}

/// Holds a folder of the cache until the lock is dropped. Concurrent guests and runs must not make the same thing
/// twice.
pub(crate) fn locked(place: &Path) -> anyhow::Result<File> {
    make_directory(place)?;
    let lock = File::create(place.join("lock")).context("cannot make the cache's lock")?;
    flock(&lock, FlockOperation::LockExclusive).context("cannot lock the cache")?;
    Ok(lock)
}

/// A temporary folder of this run; folders of killed runs are removed first.
pub(crate) fn scratch() -> anyhow::Result<tempfile::TempDir> {
    const PREFIX: &str = "weft-vm-";
    let place = std::env::temp_dir();
    for entry in std::fs::read_dir(&place).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let owner = name.strip_prefix(PREFIX).and_then(|rest| rest.split('-').next());
        let gone = owner
            .and_then(|pid| pid.parse::<u32>().ok())
            .is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists());
        if gone {
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
    let prefix = format!("{PREFIX}{}-", std::process::id());
    tempfile::Builder::new().prefix(&prefix).tempdir_in(&place).context("cannot make a folder")
}
