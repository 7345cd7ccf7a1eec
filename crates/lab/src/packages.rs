//! Debian packages that are unpacked and not installed.

use std::process::Command;

use anyhow::Context;
use weft_bench::sandbox::Programs;
use weft_bench::sandbox::progress::step;

use crate::vm::{cache_directory, locked, make_directory, run};

/// The programs of packages with all that they need, from the machine's own apt sources. They are kept for later runs.
///
/// # Errors
/// apt cannot fetch one of them.
pub(crate) fn unpacked(packages: &[&str]) -> anyhow::Result<Programs> {
    let place = cache_directory()?.join("packages");
    let _lock = locked(&place)?;
    if let Some(programs) = Programs::unpacked(packages) {
        return Ok(programs);
    }
    step(&format!("fetching {}", packages.join(", ")));
    let root = place.join(packages.join("+"));
    let archives = place.join("archives");
    make_directory(&archives.join("partial"))?;
    let cache = format!("Dir::Cache::archives={}", archives.display());
    let fetch =
        ["install", "-qq", "-y", "--reinstall", "--no-install-recommends", "--download-only"];
    let options = ["-o", "Debug::NoLocking=1", "-o", &cache];
    run(Command::new("apt-get").args(fetch).args(options).args(packages))
        .with_context(|| format!("apt-get cannot fetch {packages:?}"))?;
    for entry in std::fs::read_dir(&archives)?.flatten() {
        let file = entry.path();
        if file.extension().is_some_and(|extension| extension == "deb") {
            run(Command::new("dpkg-deb").arg("--extract").arg(&file).arg(&root))?;
        }
    }
    std::fs::remove_dir_all(&archives)?;
    Ok(Programs::mark_unpacked(&root)?)
}
