//! Replaces files so that a reader finds the old or the new one, whole.

use std::{
    fs::{self, DirBuilder, File, OpenOptions},
    io::{self, Write},
    os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

/// Temporary files begin with this. Runtimes load only names that end in `.conf`, `.conflist` or
/// `.json`, and containerd misses a file that was renamed in from another directory.
const TEMPORARY_PREFIX: &str = ".weft-new-";
/// Age from which a temporary file belongs to a process that was killed, in seconds.
const TEMPORARY_AGE_S: u64 = 600;
/// Most entries of a directory that are searched for old temporary files.
const ENTRIES_MAX: usize = 10_000;

/// Makes a directory and those above it.
pub(super) fn make_dir(directory: &Path, mode: u32) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(mode).create(directory)
}

/// Replaces `directory/name` with what `write` writes: temporary file in the same directory, fsync,
/// rename, fsync of the directory. After an error the old file remains.
pub(super) fn replace(
    directory: &Path,
    name: &str,
    mode: u32,
    write: impl FnOnce(&mut File) -> io::Result<()>,
) -> io::Result<()> {
    let temporary = temporary(directory, name);
    let written = make(&temporary, mode, write)
        .and_then(|()| fs::rename(&temporary, directory.join(name)))
        .and_then(|()| File::open(directory)?.sync_all());
    if written.is_err() {
        // The error above matters more.
        let _ = fs::remove_file(&temporary);
    }
    written
}

/// Like [`replace`], with these bytes.
pub(super) fn replace_bytes(
    directory: &Path,
    name: &str,
    mode: u32,
    bytes: &[u8],
) -> io::Result<()> {
    replace(directory, name, mode, |file| file.write_all(bytes))
}

/// The path of a temporary file that becomes `directory/name`.
pub(super) fn temporary(directory: &Path, name: &str) -> PathBuf {
    directory.join(format!("{TEMPORARY_PREFIX}{name}.{}", std::process::id()))
}

pub(super) fn is_temporary(name: &str) -> bool {
    name.starts_with(TEMPORARY_PREFIX)
}

/// Removes temporary files that a killed process left.
pub(super) fn sweep(directory: &Path) {
    let Ok(entries) = fs::read_dir(directory) else { return };
    for entry in entries.take(ENTRIES_MAX).flatten() {
        let is_old = || {
            let age = SystemTime::now().duration_since(entry.metadata().ok()?.modified().ok()?);
            Some(age.ok()? > Duration::from_secs(TEMPORARY_AGE_S))
        };
        if entry.file_name().to_str().is_some_and(is_temporary) && is_old().unwrap_or(false) {
            // It costs only space.
            let _ = fs::remove_file(entry.path());
        }
    }
}

fn make(path: &Path, mode: u32, write: impl FnOnce(&mut File) -> io::Result<()>) -> io::Result<()> {
    // A file of this name is left from a process of the same id.
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = OpenOptions::new().write(true).create_new(true).mode(mode).open(path)?;
    write(&mut file)?;
    // The mode at creation is subject to the umask.
    file.set_permissions(fs::Permissions::from_mode(mode))?;
    file.sync_all()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_failed_write_leaves_the_old_file_and_no_other() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("10-weft.conflist");
        replace_bytes(directory.path(), "10-weft.conflist", 0o644, b"old").unwrap();
        let failing = |file: &mut File| {
            file.write_all(b"half")?;
            Err(io::Error::other("disk full"))
        };
        assert!(replace(directory.path(), "10-weft.conflist", 0o644, failing).is_err());
        assert_eq!(fs::read(&path).unwrap(), b"old");
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o644);
    }

    #[test]
    fn no_runtime_loads_a_temporary_file() {
        for name in ["10-weft.conflist", "weft-cni", "x.json"] {
            let path = temporary(Path::new("/d"), name);
            let extension = path.extension().unwrap();
            assert!(!["conf", "conflist", "json"].iter().any(|loaded| extension == *loaded));
            assert_eq!(path.parent(), Some(Path::new("/d")));
            assert!(is_temporary(path.file_name().unwrap().to_str().unwrap()));
        }
    }

    #[test]
    fn a_sweep_removes_old_temporary_files_alone() {
        let directory = tempfile::tempdir().unwrap();
        let (old, new) = (temporary(directory.path(), "old"), temporary(directory.path(), "new"));
        let other = directory.path().join("other");
        let long_ago = SystemTime::now() - Duration::from_secs(TEMPORARY_AGE_S + 60);
        for path in [&old, &new, &other] {
            let file = File::create(path).unwrap();
            if path != &new {
                file.set_modified(long_ago).unwrap();
            }
        }
        sweep(directory.path());
        assert_eq!([&old, &new, &other].map(|path| path.exists()), [false, true, true]);
    }
}
