//! DELs that the daemon has not heard of, as files in its runtime directory.
//!
//! A DEL succeeds with the daemon down, or a node could not be drained. The plugin then leaves a
//! tombstone, and asks the daemon once more. The daemon listens first, then reads the tombstones, then
//! serves its first ADD: so each DEL reaches it by one way or the other. It reads them again every
//! minute, since a daemon that hangs listens too.
//!
//! A tombstone is a small JSON file. Its name has a hash of the attachment and the time of the DEL. A
//! later DEL removes the files of earlier ones. An earlier one that comes late leaves it alone, and so
//! does a daemon that has obeyed only the earlier one. The directory's entries are bounded; a DEL beyond
//! that is left to the daemon's own search for dead attachments ([`super::Reaper`]).

use std::{
    fs::{self, File},
    hash::{DefaultHasher, Hash, Hasher},
    io::{self, Read},
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use super::{
    daemon::Target,
    environment::{check_container, check_interface},
    files,
};

/// Most tombstones in the directory.
pub const TOMBSTONES_MAX: usize = 4_096;
/// The longest tombstone, in bytes.
pub const TOMBSTONE_BYTES_MAX: usize = 8_192;
/// The directory of tombstones in the daemon's runtime directory.
pub const TOMBSTONES_DIR: &str = "cni-deleted";

/// Mode of the runtime directory, if the plugin makes it; the daemon's unit has the same.
const RUNTIME_DIR_MODE: u32 = 0o755;
const DIR_MODE: u32 = 0o700;
const FILE_MODE: u32 = 0o600;
const SUFFIX: &str = ".json";
/// Temporary and foreign files that are looked at besides tombstones.
const OTHER_ENTRIES_MAX: usize = 1_024;

/// A DEL that the daemon has not heard of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tombstone {
    /// The attachments.
    pub target: Target,
    /// When the DEL's plugin started, in nanoseconds after the machine's start.
    pub started_ns: u64,
    /// The start of the machine that the time counts from (`/proc/sys/kernel/random/boot_id`).
    pub boot: String,
}

/// The directory of tombstones.
#[derive(Debug, Clone)]
pub struct Tombstones {
    directory: PathBuf,
}

/// The content of the directory.
#[derive(Debug, Default)]
pub struct Found {
    /// Tombstones of this start of the machine, each with its file: detach, then [`Tombstones::remove`].
    pub tombstones: Vec<(PathBuf, Tombstone)>,
    /// Unusable entries, for the log. Malformed and outdated files are already removed; those that
    /// cannot be read now stay for the next time.
    pub notes: Vec<String>,
}

impl Tombstones {
    /// The tombstones in this runtime directory.
    #[must_use]
    pub fn of(runtime_dir: &Path) -> Self {
        Self { directory: runtime_dir.join(TOMBSTONES_DIR) }
    }

    /// Leaves a tombstone. Returns its file.
    ///
    /// # Errors
    /// Of the file system; or the directory is full.
    pub fn leave(&self, tombstone: &Tombstone) -> io::Result<PathBuf> {
        if let Some(runtime_dir) = self.directory.parent() {
            files::make_dir(runtime_dir, RUNTIME_DIR_MODE)?;
        }
        files::make_dir(&self.directory, DIR_MODE)?;
        let (of_attachment, name) = file_name(tombstone);
        let (mut count, mut outdated) = (0_usize, Vec::new());
        for entry in fs::read_dir(&self.directory)? {
            let other = entry?.file_name();
            count += 1;
            if let Some(other) = other.to_str().filter(|other| other.starts_with(&of_attachment))
                && other <= name.as_str()
            {
                outdated.push(self.directory.join(other));
            }
        }
        if outdated.is_empty() && count >= TOMBSTONES_MAX {
            return Err(io::Error::other(format!(
                "{} has {TOMBSTONES_MAX} entries already; start the daemon, which clears it",
                self.directory.display()
            )));
        }
        let path = self.directory.join(&name);
        let bytes = serde_json::to_vec(tombstone)?;
        files::replace_bytes(&self.directory, &name, FILE_MODE, &bytes)?;
        for old in outdated.iter().filter(|old| **old != path) {
            // One that remains costs only space.
            let _ = fs::remove_file(old);
        }
        Ok(path)
    }

    /// Reads all tombstones of this start of the machine.
    ///
    /// # Errors
    /// Of the file system. A missing directory is an empty one.
    pub fn read(&self, boot: &str) -> io::Result<Found> {
        self.read_by(boot, |path| File::open(path))
    }

    fn read_by(&self, boot: &str, open: impl Fn(&Path) -> io::Result<File>) -> io::Result<Found> {
        let entries = match fs::read_dir(&self.directory) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Found::default()),
            other => other?,
        };
        files::sweep(&self.directory);
        let mut found = Found::default();
        for entry in entries.take(TOMBSTONES_MAX + OTHER_ENTRIES_MAX) {
            let path = entry?.path();
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            if files::is_temporary(name) {
                continue;
            }
            match read_one(&path, boot, &open) {
                Ok(Some(tombstone)) => found.tombstones.push((path, tombstone)),
                // Another plugin's process has replaced or removed it.
                Ok(None) => {}
                Err(Unusable::Unreadable(error)) => {
                    found.notes.push(format!("tombstone {}: {error}; it stays", path.display()));
                }
                Err(Unusable::Malformed(why)) => {
                    let fate = match fs::remove_file(&path) {
                        Ok(()) => "removed".to_owned(),
                        Err(error) => format!("cannot be removed: {error}"),
                    };
                    found.notes.push(format!("tombstone {}: {why}; {fate}", path.display()));
                }
            }
        }
        Ok(found)
    }

    /// Removes a tombstone's file. It succeeds if there is none.
    ///
    /// # Errors
    /// Of the file system.
    pub fn remove(&self, file: &Path) -> io::Result<()> {
        match fs::remove_file(file) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }
}

/// The reason why an entry is no tombstone.
enum Unusable {
    /// It cannot be read. The reason may pass, as the lack of file descriptors does.
    Unreadable(io::Error),
    /// It will never be one.
    Malformed(String),
}

impl From<String> for Unusable {
    fn from(why: String) -> Self {
        Self::Malformed(why)
    }
}

/// `None` if the file is gone.
fn read_one(
    path: &Path,
    boot: &str,
    open: impl Fn(&Path) -> io::Result<File>,
) -> Result<Option<Tombstone>, Unusable> {
    let gone = |error: io::Error| match error.kind() {
        io::ErrorKind::NotFound => Ok(None),
        _ => Err(Unusable::Unreadable(error)),
    };
    match fs::symlink_metadata(path) {
        Err(error) => return gone(error),
        Ok(found) if !found.is_file() => return Err("it is no regular file".to_owned().into()),
        Ok(_) => {}
    }
    let file = match open(path) {
        Err(error) => return gone(error),
        Ok(file) => file,
    };
    let mut bytes = Vec::new();
    let limit = u64::try_from(TOMBSTONE_BYTES_MAX).unwrap_or(u64::MAX).saturating_add(1);
    file.take(limit).read_to_end(&mut bytes).map_err(Unusable::Unreadable)?;
    if bytes.len() > TOMBSTONE_BYTES_MAX {
        return Err(format!("it has more than {TOMBSTONE_BYTES_MAX} bytes").into());
    }
    let tombstone: Tombstone = serde_json::from_slice(&bytes).map_err(|error| error.to_string())?;
    let Target { network, container, interface } = &tombstone.target;
    check_container(container)?;
    check_interface(interface)?;
    network.as_deref().map_or(Ok(()), check_container)?;
    if tombstone.boot != boot {
        return Err("it is from an earlier start of the machine".to_owned().into());
    }
    Ok(Some(tombstone))
}

/// The beginning of the names of an attachment's files, and the name of this tombstone's. Names of one
/// attachment are in the order of their times.
///
/// Another hash in another build of the plugin only means a second file for the same attachment.
fn file_name(tombstone: &Tombstone) -> (String, String) {
    let mut hasher = DefaultHasher::new();
    tombstone.target.hash(&mut hasher);
    let of_attachment = format!("{:016x}-", hasher.finish());
    let name = format!("{of_attachment}{:020}{SUFFIX}", tombstone.started_ns);
    (of_attachment, name)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::os::unix::fs::PermissionsExt;

    use super::*;

    const BOOT: &str = "boot-1";

    fn tombstone(container: &str) -> Tombstone {
        let (network, interface) = (Some("shop".to_owned()), "eth0".to_owned());
        let target = Target { network, container: container.to_owned(), interface };
        Tombstone { target, started_ns: 7, boot: BOOT.to_owned() }
    }

    #[test]
    fn a_tombstone_is_read_as_it_was_left() {
        let runtime = tempfile::tempdir().unwrap();
        let tombstones = Tombstones::of(&runtime.path().join("weft"));
        assert!(tombstones.read(BOOT).unwrap().tombstones.is_empty(), "no directory yet");
        let unnamed = Tombstone {
            target: Target { network: None, ..tombstone("b").target },
            ..tombstone("b")
        };
        let files = [tombstone("a"), unnamed.clone()].map(|one| tombstones.leave(&one).unwrap());
        let mut found = tombstones.read(BOOT).unwrap();
        found.tombstones.sort_by(|one, other| one.1.target.cmp(&other.1.target));
        let expected = [(files[1].clone(), unnamed), (files[0].clone(), tombstone("a"))];
        assert_eq!(found.tombstones, expected);
        assert!(found.notes.is_empty());
        let mode = fs::metadata(&files[0]).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, FILE_MODE);
        for file in &files {
            tombstones.remove(file).unwrap();
            tombstones.remove(file).unwrap();
        }
        assert!(tombstones.read(BOOT).unwrap().tombstones.is_empty());
    }

    #[test]
    fn a_repeated_del_leaves_one_tombstone_the_latest() {
        let runtime = tempfile::tempdir().unwrap();
        let tombstones = Tombstones::of(runtime.path());
        tombstones.leave(&tombstone("a")).unwrap();
        tombstones.leave(&Tombstone { started_ns: 9, ..tombstone("a") }).unwrap();
        let found = tombstones.read(BOOT).unwrap().tombstones;
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].1.started_ns, 9);
    }

    #[test]
    fn an_earlier_del_that_comes_late_replaces_no_later_one() {
        let runtime = tempfile::tempdir().unwrap();
        let tombstones = Tombstones::of(runtime.path());
        tombstones.leave(&Tombstone { started_ns: 1_000, ..tombstone("a") }).unwrap();
        tombstones.leave(&Tombstone { started_ns: 9, ..tombstone("a") }).unwrap();
        let found = tombstones.read(BOOT).unwrap().tombstones;
        assert_eq!(found.iter().map(|(_, found)| found.started_ns).max(), Some(1_000));
    }

    #[test]
    fn a_del_that_comes_while_an_earlier_one_is_obeyed_stays() {
        let runtime = tempfile::tempdir().unwrap();
        let tombstones = Tombstones::of(runtime.path());
        tombstones.leave(&tombstone("a")).unwrap();
        let (obeyed, _) = tombstones.read(BOOT).unwrap().tombstones.pop().unwrap();
        let later = Tombstone { started_ns: 9, ..tombstone("a") };
        let file = tombstones.leave(&later).unwrap();
        tombstones.remove(&obeyed).unwrap();
        assert_eq!(tombstones.read(BOOT).unwrap().tombstones, [(file, later)]);
    }

    #[test]
    fn a_file_that_cannot_be_read_now_stays() {
        let runtime = tempfile::tempdir().unwrap();
        let tombstones = Tombstones::of(runtime.path());
        let file = tombstones.leave(&tombstone("a")).unwrap();
        let too_many = |_: &Path| Err(io::Error::from(rustix::io::Errno::MFILE));
        let found = tombstones.read_by(BOOT, too_many).unwrap();
        assert!(found.tombstones.is_empty());
        assert!(found.notes[0].contains("it stays"), "{:?}", found.notes);
        assert_eq!(tombstones.read(BOOT).unwrap().tombstones, [(file, tombstone("a"))]);
    }

    #[test]
    fn unusable_files_are_removed_and_named() {
        let runtime = tempfile::tempdir().unwrap();
        let tombstones = Tombstones::of(runtime.path());
        let good = tombstones.leave(&tombstone("a")).unwrap();
        let directory = good.parent().unwrap();
        let with = |change: &dyn Fn(&mut serde_json::Value)| {
            let mut value = serde_json::to_value(tombstone("x")).unwrap();
            change(&mut value);
            value.to_string()
        };
        let bad = [
            ("empty", String::new()),
            ("text", "no JSON".into()),
            ("null", "null".into()),
            ("no-target", with(&|value| value["target"] = serde_json::Value::Null)),
            ("bad-id", with(&|value| value["target"]["container"] = "../x".into())),
            ("bad-name", with(&|value| value["target"]["network"] = "a/b".into())),
            ("bad-interface", with(&|value| value["target"]["interface"] = "a/b".into())),
            ("bad-time", with(&|value| value["started_ns"] = (-1).into())),
            ("old-boot", with(&|value| value["boot"] = "boot-0".into())),
            ("huge", with(&|value| value["more"] = "x".repeat(TOMBSTONE_BYTES_MAX).into())),
        ];
        for (name, text) in &bad {
            fs::write(directory.join(name), text).unwrap();
        }
        std::os::unix::fs::symlink("/dev/zero", directory.join("link")).unwrap();
        let found = tombstones.read(BOOT).unwrap();
        assert_eq!(found.tombstones, [(good.clone(), tombstone("a"))]);
        assert_eq!(found.notes.len(), bad.len() + 1, "{:#?}", found.notes);
        assert_eq!(fs::read_dir(directory).unwrap().count(), 1);
        fs::create_dir(directory.join("directory")).unwrap();
        let notes = tombstones.read(BOOT).unwrap().notes;
        assert!(notes.len() == 1 && notes[0].contains("cannot be removed"), "{notes:?}");
    }

    #[test]
    fn a_temporary_file_is_no_tombstone() {
        let runtime = tempfile::tempdir().unwrap();
        let tombstones = Tombstones::of(runtime.path());
        let good = tombstones.leave(&tombstone("a")).unwrap();
        let directory = good.parent().unwrap();
        fs::write(files::temporary(directory, "x.json"), "half").unwrap();
        let found = tombstones.read(BOOT).unwrap();
        assert_eq!((found.tombstones.len(), found.notes.len()), (1, 0));
        assert_eq!(fs::read_dir(directory).unwrap().count(), 2, "its writer may still be at work");
    }

    #[test]
    fn a_full_directory_takes_no_more_but_replaces() {
        let runtime = tempfile::tempdir().unwrap();
        let tombstones = Tombstones::of(runtime.path());
        let first = tombstones.leave(&tombstone("a")).unwrap();
        for number in 1..TOMBSTONES_MAX {
            fs::write(first.with_file_name(format!("{number}.json")), "").unwrap();
        }
        tombstones.leave(&tombstone("a")).unwrap();
        tombstones.leave(&Tombstone { started_ns: 8, ..tombstone("a") }).unwrap();
        let error = tombstones.leave(&tombstone("b")).unwrap_err();
        assert!(error.to_string().contains("4096 entries"), "{error}");
    }
}
