//! Programs of a container runtime: the machine's own, or those of Debian packages that are unpacked and not
//! installed. A runtime that is installed starts by itself and changes the machine's firewall.

use std::io;
use std::path::{Path, PathBuf};

use super::{SandboxError, find_program};

/// Directories of programs in a package.
const PROGRAM_DIRS: [&str; 4] = ["usr/sbin", "usr/bin", "sbin", "bin"];
/// The mark in a folder of unpacked packages that it is complete.
const DONE: &str = ".done";

/// The place of programs.
#[derive(Debug, Clone)]
pub struct Programs {
    /// The folder of unpacked packages; `None` for the machine's own programs.
    root: Option<PathBuf>,
}

impl Programs {
    /// The machine's own.
    #[must_use]
    pub fn installed() -> Self {
        Self { root: None }
    }

    /// Those of packages that a lab has unpacked, under `packages` of [`cache_directory`]; `None` if it has not.
    #[must_use]
    pub fn unpacked(packages: &[&str]) -> Option<Self> {
        Self::in_folder(&cache_directory()?.join("packages").join(packages.join("+")))
    }

    /// Those of a folder that is marked as complete.
    #[must_use]
    pub fn in_folder(root: &Path) -> Option<Self> {
        root.join(DONE).exists().then(|| Self { root: Some(root.to_owned()) })
    }

    /// Marks a folder of programs as complete.
    ///
    /// # Errors
    /// The mark cannot be written.
    pub fn mark_unpacked(root: &Path) -> Result<Self, SandboxError> {
        let mark = root.join(DONE);
        std::fs::write(&mark, "").map_err(SandboxError::io(format!("write {}", mark.display())))?;
        Ok(Self { root: Some(root.to_owned()) })
    }

    /// The path of a program.
    ///
    /// # Errors
    /// [`SandboxError::Io`] if it is not there.
    pub fn program(&self, name: &str) -> Result<PathBuf, SandboxError> {
        let found = match &self.root {
            Some(root) => directories(root).map(|dir| dir.join(name)).find(|file| file.exists()),
            None => find_program(name),
        };
        let missing = || io::Error::from(io::ErrorKind::NotFound);
        found.ok_or_else(missing).map_err(SandboxError::io(format!("find the program {name}")))
    }

    /// A folder of unpacked packages; `None` for the machine's own programs.
    #[must_use]
    pub fn folder(&self, path: &str) -> Option<PathBuf> {
        self.root.as_ref().map(|root| root.join(path))
    }

    /// Words in front of a command that runs these programs.
    pub(super) fn environment(&self) -> Vec<String> {
        let mut words = vec!["env".to_owned()];
        if let Some(root) = &self.root {
            let mut dirs: Vec<String> =
                directories(root).map(|dir| dir.display().to_string()).collect();
            dirs.extend(std::env::var("PATH"));
            words.push(format!("PATH={}", dirs.join(":")));
            let libraries = root.join(format!("usr/lib/{}-linux-gnu", std::env::consts::ARCH));
            words.push(format!("LD_LIBRARY_PATH={}", libraries.display()));
        }
        words
    }
}

/// The cache of `./dev`; `None` without a home.
#[must_use]
pub fn cache_directory() -> Option<PathBuf> {
    if let Some(cache) = std::env::var_os("XDG_CACHE_HOME").filter(|value| !value.is_empty()) {
        return Some(PathBuf::from(cache).join("weft"));
    }
    Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache/weft"))
}

fn directories(root: &Path) -> impl Iterator<Item = PathBuf> {
    PROGRAM_DIRS.iter().map(|dir| root.join(dir))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn unpacked_programs_come_before_the_machines_own() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(folder.path().join("usr/bin")).unwrap();
        std::fs::write(folder.path().join("usr/bin/sh"), "").unwrap();
        let programs = Programs::mark_unpacked(folder.path()).unwrap();
        assert_eq!(programs.program("sh").unwrap(), folder.path().join("usr/bin/sh"));
        let first = format!("PATH={}/usr/sbin:", folder.path().display());
        assert!(programs.environment().iter().any(|word| word.starts_with(&first)));
        // One that is not unpacked is not taken from elsewhere.
        assert!(programs.program("cat").is_err());
        assert!(Programs::installed().program("cat").is_ok());
    }
}
