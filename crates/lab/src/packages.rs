//! Programs of Debian packages that are unpacked and not installed: an engine that is installed starts by itself and
//! changes the machine's firewall.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail};
use weft_bench::sandbox::progress::step;

use crate::vm::{cache_directory, locked, make_directory, run};

/// Directories of programs in a package.
const PROGRAM_DIRS: [&str; 4] = ["usr/sbin", "usr/bin", "sbin", "bin"];

/// Unpacked packages.
#[derive(Debug, Clone)]
pub(crate) struct Unpacked {
    root: PathBuf,
}

impl Unpacked {
    /// Packages with all that they need, from the machine's own apt sources. They are kept for later runs.
    ///
    /// # Errors
    /// apt cannot fetch one of them.
    pub(crate) fn of(packages: &[&str]) -> anyhow::Result<Self> {
        let place = cache_directory()?.join("packages");
        make_directory(&place)?;
        let _lock = locked(&place)?;
        let root = place.join(packages.join("+"));
        let done = root.join(".done");
        if done.exists() {
            return Ok(Self { root });
        }
        step(&format!("fetching {}", packages.join(", ")));
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
        std::fs::write(done, "")?;
        Ok(Self { root })
    }

    /// The path of a program.
    ///
    /// # Errors
    /// No package has it.
    pub(crate) fn program(&self, name: &str) -> anyhow::Result<PathBuf> {
        let mut files = PROGRAM_DIRS.iter().map(|dir| self.root.join(dir).join(name));
        match files.find(|file| file.exists()) {
            Some(file) => Ok(file),
            None => bail!("no program {name} in {}", self.root.display()),
        }
    }

    /// A directory of the packages.
    pub(crate) fn directory(&self, path: &str) -> PathBuf {
        self.root.join(path)
    }

    /// Words for `env` in front of a command that runs these programs.
    pub(crate) fn environment(&self) -> Vec<String> {
        let mut dirs: Vec<String> =
            PROGRAM_DIRS.iter().map(|dir| self.root.join(dir).display().to_string()).collect();
        dirs.extend(std::env::var("PATH"));
        let arch = format!("usr/lib/{}-linux-gnu", std::env::consts::ARCH);
        let libraries: &Path = &self.root.join(arch);
        vec![
            "env".to_owned(),
            format!("PATH={}", dirs.join(":")),
            format!("LD_LIBRARY_PATH={}", libraries.display()),
        ]
    }
}
