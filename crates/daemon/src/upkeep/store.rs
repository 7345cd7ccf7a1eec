//! State that survives a restart: small JSON files in the state directory, replaced atomically.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::convert::Infallible;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use rustix::fs::{FlockOperation, flock, major, minor};
use serde::Serialize;
use serde::de::DeserializeOwned;
use weft_io::faults;
use zeroize::Zeroizing;

use crate::services::supervisor::Pulse;

/// The host's key.
pub(crate) const IDENTITY_FILE: &str = "identity.pem";
/// Ranges, members and addresses given out, as the mesh wants them kept.
pub(crate) const MESH_FILE: &str = "mesh.json";

/// How long a daemon that starts waits for its directories' locks.
const LOCK_LIMIT: Duration = Duration::from_secs(1);
/// How long it waits for the lock of a process that has ended.
const LEFTOVER_LIMIT: Duration = Duration::from_secs(30);
/// How often it says so.
const LOCK_WORD: Duration = Duration::from_secs(3);
/// How often it tries.
const LOCK_POLL: Duration = Duration::from_millis(20);

/// The state directory of one daemon.
#[derive(Clone)]
pub(crate) struct Store {
    dir: PathBuf,
    /// Held during a write, which a slow disk may delay.
    faults: Arc<Mutex<Faults>>,
    /// The text for [`Self::fault`].
    told: Arc<Mutex<Option<String>>>,
    /// Stands for a disk that fails at the last step, when names have changed already.
    #[cfg(test)]
    pub(super) sync_fails: Arc<std::sync::atomic::AtomicBool>,
}

/// Files that could not be written, by name.
type Faults = BTreeMap<String, Fault>;

/// A file that could not be written.
struct Fault {
    reason: String,
    since: SystemTime,
    bytes: usize,
    /// The change to make once that is possible; `None`: the write was refused.
    pending: Option<Pending>,
}

/// A change of a file that could not be made.
enum Pending {
    Write(Zeroizing<Vec<u8>>),
    Remove,
}

/// The state directory cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// A file cannot be read or written (the disk, permissions).
    #[error("cannot {action} {path}: {error}{}", advice(error))]
    Io {
        /// The action: read, write, remove or create.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        error: io::Error,
    },
    /// A file that this version of Weft cannot parse.
    #[error(
        "this version of weft cannot read {path} ({error}); restore it from a backup, or run weft reset"
    )]
    Malformed {
        /// The file.
        path: PathBuf,
        /// The parse error.
        error: serde_json::Error,
    },
}

impl Store {
    /// Opens the directory; creates it for root alone if it does not exist.
    pub(crate) fn open(dir: &Path) -> Result<Self, StoreError> {
        make_private_dir(dir)?;
        Ok(Self {
            dir: dir.into(),
            faults: Arc::default(),
            told: Arc::default(),
            #[cfg(test)]
            sync_fails: Arc::default(),
        })
    }

    /// The path of a file in it.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Reads a file; `None` if there is none.
    pub(crate) fn load<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>, StoreError> {
        let path = self.path(name);
        let Some(text) = self.read(name)? else { return Ok(None) };
        serde_json::from_slice(&text)
            .map(Some)
            .map_err(|error| StoreError::Malformed { path, error })
    }

    /// Replaces a file atomically: after a power cut either the old or the new one is complete. After an
    /// error the old one remains, unless the disk failed at the very last step.
    pub(crate) fn save<T: Serialize>(&self, name: &str, value: &T) -> Result<(), StoreError> {
        let text = self.text(name, value)?;
        self.write(name, Some(&text), false)
    }

    /// Like [`Self::save`], for a change that has already happened: if the write fails, it is repeated
    /// later.
    pub(crate) fn save_or_later<T: Serialize>(&self, name: &str, value: &T) {
        let saved = self.text(name, value).and_then(|text| self.write(name, Some(&text), true));
        if let Err(error) = saved {
            tracing::warn!(%error, "not saved; trying again");
        }
    }

    /// Removes a file; there may be none.
    pub(crate) fn remove(&self, name: &str) -> Result<(), StoreError> {
        self.write(name, None, false)
    }

    fn text<T: Serialize>(&self, name: &str, value: &T) -> Result<Vec<u8>, StoreError> {
        serde_json::to_vec_pretty(value)
            .map_err(|error| StoreError::Malformed { path: self.path(name), error })
    }

    /// The network's secret, once one is known: the bytes as stored.
    pub(crate) fn load_secret(&self) -> Result<Option<Zeroizing<Vec<u8>>>, StoreError> {
        self.read(SECRET)
    }

    /// Stores the network's secret, readable by root alone. A secret already stored is not rewritten, so
    /// a full disk does not keep the daemon from starting.
    pub(crate) fn save_secret(&self, secret: &[u8]) -> Result<(), StoreError> {
        match self.read(SECRET)? {
            Some(known) if known.as_slice() == secret => Ok(()),
            _ => self.write(SECRET, Some(secret), false),
        }
    }

    /// Like [`Self::save_secret`]; if the write fails, it is repeated later.
    pub(crate) fn save_secret_or_later(&self, secret: &[u8]) -> Result<(), StoreError> {
        self.write(SECRET, Some(secret), true)
    }

    /// The reason why writes fail, and since when, if they do.
    pub(crate) fn fault(&self) -> Option<String> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Repeats failed writes until they succeed.
    pub(crate) async fn keep_trying(&self, pulse: &Pulse) -> Infallible {
        let mut pause_ms = RETRY_FIRST_MS;
        loop {
            pulse.wait(tokio::time::sleep(Duration::from_millis(pause_ms))).await;
            pause_ms = match self.try_again().await {
                true => RETRY_FIRST_MS,
                false => (pause_ms * 2).min(RETRY_MAX_MS),
            };
        }
    }

    /// Whether all writes succeed again.
    async fn try_again(&self) -> bool {
        let store = self.clone();
        tokio::task::spawn_blocking(move || store.try_all()).await.unwrap_or(false)
    }

    pub(crate) fn try_all(&self) -> bool {
        let mut faults = self.lock();
        let before = faults.len();
        faults.retain(|name, fault| {
            let written = match &fault.pending {
                Some(Pending::Write(bytes)) => self.replace(name, bytes),
                Some(Pending::Remove) => self.erase(name),
                None => self.probe(fault.bytes),
            };
            if let Err(error) = &written {
                fault.reason = error.to_string();
            }
            written.is_err()
        });
        if before > 0 && faults.is_empty() {
            tracing::info!("the state directory can be written again");
        }
        self.tell(&faults);
        faults.is_empty()
    }

    fn tell(&self, faults: &Faults) {
        let first = faults.values().min_by_key(|fault| fault.since);
        let text = first.map(|Fault { reason, since, .. }| {
            let since = crate::timestamp::format(*since);
            format!(
                "the state directory cannot be written since {since}: {reason}; requests whose result must be saved are refused"
            )
        });
        *self.told.lock().unwrap_or_else(PoisonError::into_inner) = text;
    }

    /// Stands for a disk that does nothing, until the guard is dropped.
    #[cfg(test)]
    pub(crate) fn stall(&self) -> impl Drop + '_ {
        self.lock()
    }

    fn lock(&self) -> MutexGuard<'_, Faults> {
        self.faults.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn read(&self, name: &str) -> Result<Option<Zeroizing<Vec<u8>>>, StoreError> {
        match fs::read(self.path(name)) {
            Ok(bytes) => Ok(Some(Zeroizing::new(bytes))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(StoreError::Io { action: "read", path: self.path(name), error }),
        }
    }

    /// Replaces a file, or removes it without `bytes`. One file is written at a time, so that no older content
    /// follows a newer one. If it fails and may be done `later`, it is repeated until it succeeds.
    pub(super) fn write(
        &self,
        name: &str,
        bytes: Option<&[u8]>,
        later: bool,
    ) -> Result<(), StoreError> {
        let mut faults = self.lock();
        let result = match bytes {
            Some(bytes) => self.replace(name, bytes),
            None => self.erase(name),
        };
        match &result {
            Ok(()) => drop(faults.remove(name)),
            Err(error) => {
                let (reason, since) = (error.to_string(), SystemTime::now());
                let bytes_len = bytes.map_or(0, <[u8]>::len);
                let fault = Fault { reason, since, bytes: bytes_len, pending: None };
                let fault = match faults.entry(name.to_owned()) {
                    Entry::Vacant(entry) => entry.insert(fault),
                    Entry::Occupied(entry) => {
                        let known = entry.into_mut();
                        (known.reason, known.bytes) = (fault.reason, fault.bytes);
                        known
                    }
                };
                if later {
                    let write = |bytes: &[u8]| Pending::Write(Zeroizing::new(bytes.to_vec()));
                    fault.pending = Some(bytes.map_or(Pending::Remove, write));
                }
            }
        }
        self.tell(&faults);
        result
    }

    /// Tells of a write of `bytes` bytes that was refused, and taken back since, until one is possible.
    pub(super) fn note_refused(&self, name: &str, error: &StoreError, bytes: usize) {
        let mut faults = self.lock();
        faults.entry(name.to_owned()).or_insert_with(|| Fault {
            reason: error.to_string(),
            since: SystemTime::now(),
            bytes,
            pending: None,
        });
        self.tell(&faults);
    }

    /// Whether a file of `bytes` bytes can be written.
    fn probe(&self, bytes: usize) -> Result<(), StoreError> {
        self.replace(PROBE, &vec![0; bytes.max(1)])?;
        let _ = fs::remove_file(self.path(PROBE));
        Ok(())
    }

    fn replace(&self, name: &str, bytes: &[u8]) -> Result<(), StoreError> {
        let path = self.path(name);
        let temporary = self.path(&format!("{name}.new"));
        let replace = || {
            let mut file = OpenOptions::new()
                .write(true)
                .create(true)
                .truncate(true)
                .mode(0o600)
                .open(&temporary)?;
            file.write_all(bytes)?;
            if !faults::no_power_cut() {
                file.sync_all()?;
            }
            // A slow disk, in builds for tests only.
            if let Some(ms) = faults::asked("disk-write-ms").and_then(|ms| ms.parse().ok()) {
                std::thread::sleep(Duration::from_millis(ms));
            }
            // Opened first: without a descriptor, nothing changes.
            let directory = self.directory_of(&path)?;
            fs::rename(&temporary, &path)?;
            self.sync(&directory)
        };
        replace().map_err(|error| {
            // The partial file takes space.
            let _ = fs::remove_file(&temporary);
            StoreError::Io { action: "write", path: path.clone(), error }
        })
    }

    fn directory_of(&self, path: &Path) -> io::Result<File> {
        File::open(path.parent().unwrap_or(&self.dir))
    }

    /// Has a change of names outlast a power cut.
    fn sync(&self, directory: &File) -> io::Result<()> {
        #[cfg(test)]
        if self.sync_fails.load(std::sync::atomic::Ordering::Relaxed) {
            return Err(io::ErrorKind::Other.into());
        }
        if faults::no_power_cut() {
            return Ok(());
        }
        directory.sync_all()
    }

    fn erase(&self, name: &str) -> Result<(), StoreError> {
        let path = self.path(name);
        let erase = || {
            let directory = self.directory_of(&path)?;
            match fs::remove_file(&path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
                removed => removed.and_then(|()| self.sync(&directory)),
            }
        };
        erase().map_err(|error| StoreError::Io { action: "remove", path: path.clone(), error })
    }
}

/// Creates a directory that only root may enter, with its parents.
pub fn make_private_dir(dir: &Path) -> Result<(), StoreError> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(|error| StoreError::Io {
        action: "create",
        path: dir.into(),
        error,
    })
}

/// Whether a state directory holds a network's secret.
pub fn has_secret(state_dir: &Path) -> bool {
    state_dir.join(SECRET).exists()
}

/// A lock of a directory; the kernel releases it even after `kill -9`.
pub(crate) struct Lock {
    _file: File,
}

impl Lock {
    /// Takes the lock of a directory; `None` if another daemon holds it.
    pub(crate) fn take(dir: &Path) -> Result<Option<Self>, StoreError> {
        make_private_dir(dir)?;
        let path = dir.join(LOCK);
        // Opened read-only: an open writable file would keep the file system from being remounted
        // read-only.
        let open = || match File::open(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let options = &mut OpenOptions::new();
                drop(options.write(true).create(true).truncate(false).mode(0o600).open(&path)?);
                File::open(&path)
            }
            opened => opened,
        };
        let file =
            open().map_err(|error| StoreError::Io { action: "open", path: path.clone(), error })?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Some(Self { _file: file })),
            Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
            Err(error) => Err(StoreError::Io { action: "lock", path, error: error.into() }),
        }
    }

    /// As [`Self::take`], once others have let go of it: a command that looks whether a daemon runs does so within a
    /// moment, and a program that a killed daemon was about to start once it is read from the disk. Reports a long
    /// wait to `progress`.
    pub(crate) fn take_soon(
        dir: &Path,
        progress: impl Fn(&str),
    ) -> Result<Option<Self>, StoreError> {
        let begun = Instant::now();
        let mut next_word = LOCK_WORD;
        loop {
            let taken = Self::take(dir)?;
            let waited = begun.elapsed();
            if taken.is_some() || waited >= LEFTOVER_LIMIT {
                return Ok(taken);
            }
            if waited >= LOCK_LIMIT && !is_leftover(&dir.join(LOCK)).unwrap_or(false) {
                // It may have been let go since.
                return Self::take(dir);
            }
            if waited >= next_word {
                next_word += LOCK_WORD;
                progress(&format!(
                    "waiting for what a killed daemon left to end ({} s) ...",
                    waited.as_secs()
                ));
            }
            std::thread::sleep(LOCK_POLL);
        }
    }

    /// Holds the lock until the process ends. A write that waits for the disk may outlast everything else of a
    /// daemon. The kernel releases the lock only after the last thread, so no such write follows one of the
    /// successor.
    pub(crate) fn keep(self) {
        std::mem::forget(self);
    }
}

/// Whether the process that locked a file has ended, so that others have the lock from it. `None`: the kernel does not
/// tell (proc_locks(5)).
fn is_leftover(file: &Path) -> Option<bool> {
    let found = fs::metadata(file).ok()?;
    let (device, inode) = (found.dev(), found.ino());
    let place = format!("{:02x}:{:02x}:{inode}", major(device), minor(device));
    let locks = fs::read_to_string("/proc/locks").ok()?;
    let locker = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let [_, "FLOCK", _, _, process, at, ..] = fields[..] else { return None };
        (at == place).then(|| process.parse().ok())?
    };
    let process: u32 = locks.lines().find_map(locker)?;
    Some(!Path::new("/proc").join(process.to_string()).exists())
}

/// Advice for a disk error.
fn advice(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => "; make room on that disk",
        io::ErrorKind::ReadOnlyFilesystem => "; mount that file system writable",
        _ => "",
    }
}

const SECRET: &str = "secret";
/// A file that tests whether there is space.
const PROBE: &str = "probe";
/// First pause before a failed write is repeated, in milliseconds; doubles each time.
const RETRY_FIRST_MS: u64 = 1_000;
/// Longest such pause, in milliseconds.
const RETRY_MAX_MS: u64 = 8_000;
const LOCK: &str = "lock";

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_saved_value_is_loaded_again_and_only_root_reads_it() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(&dir.path().join("state")).unwrap();
        assert_eq!(store.load::<Vec<u8>>("numbers.json").unwrap(), None);
        store.save("numbers.json", &vec![1, 2, 3]).unwrap();
        assert_eq!(store.load("numbers.json").unwrap(), Some(vec![1, 2, 3]));
        let mode = fs::metadata(store.path("numbers.json")).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        // A secret is bytes: it need not be text, and white space at its end is a part of it.
        for secret in [&b"hunter2"[..], b"ends in space \n", b"\xff\x00\xfe"] {
            store.save_secret(secret).unwrap();
            assert_eq!(store.load_secret().unwrap().unwrap().as_slice(), secret);
        }
    }

    #[test]
    fn a_damaged_file_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        fs::write(store.path("numbers.json"), "{").unwrap();
        let error = store.load::<Vec<u8>>("numbers.json").unwrap_err().to_string();
        assert!(error.contains("numbers.json") && error.contains("weft reset"), "{error}");
    }

    /// A directory in place of the file that is written first: there is no disk to fill up in a test.
    fn break_writing(store: &Store, name: &str) {
        fs::create_dir_all(store.path(&format!("{name}.new/x"))).unwrap();
    }

    fn mend_writing(store: &Store, name: &str) {
        fs::remove_dir_all(store.path(&format!("{name}.new"))).unwrap();
    }

    #[test]
    fn a_failed_write_is_reported_and_repeated() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        store.save("numbers.json", &vec![1]).unwrap();
        assert_eq!(store.fault(), None);
        break_writing(&store, "numbers.json");
        store.save_or_later("numbers.json", &vec![2]);
        store.save("numbers.json", &vec![3]).unwrap_err();
        let fault = store.fault().unwrap();
        assert!(
            fault.contains("cannot be written since") && fault.contains("numbers.json"),
            "{fault}"
        );
        assert!(!store.try_all());
        assert_eq!(store.load("numbers.json").unwrap(), Some(vec![1]));
        mend_writing(&store, "numbers.json");
        assert!(store.try_all());
        // A refused write is not repeated, a completed change is.
        assert_eq!(store.load("numbers.json").unwrap(), Some(vec![2]));
        assert_eq!(store.fault(), None);
    }

    #[test]
    fn a_refused_file_is_no_fault_any_more_once_there_is_room() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        break_writing(&store, "numbers.json");
        break_writing(&store, PROBE);
        store.save("numbers.json", &vec![1]).unwrap_err();
        assert!(!store.try_all());
        mend_writing(&store, PROBE);
        assert!(store.try_all());
        assert_eq!((store.fault(), store.load::<Vec<u8>>("numbers.json").unwrap()), (None, None));
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "the probe is gone");
    }

    #[test]
    fn the_error_of_a_full_or_read_only_disk_says_what_to_do() {
        for (errno, what) in [(28, "make room"), (30, "writable")] {
            let (action, path) = ("write", "/x/mesh.json".into());
            let error = io::Error::from_raw_os_error(errno);
            let text = StoreError::Io { action, path, error }.to_string();
            assert!(text.contains("/x/mesh.json") && text.contains(what), "{text}");
        }
    }

    #[test]
    fn a_directory_has_one_daemon() {
        let dir = tempfile::tempdir().unwrap();
        let first = Lock::take(dir.path()).unwrap();
        assert!(first.is_some());
        assert!(Lock::take(dir.path()).unwrap().is_none());
        drop(first);
        assert!(Lock::take(dir.path()).unwrap().is_some());
    }

    #[test]
    fn a_lock_that_is_let_go_in_a_moment_is_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let first = Lock::take(dir.path()).unwrap().unwrap();
        let letting_go = std::thread::spawn(move || {
            std::thread::sleep(LOCK_POLL);
            drop(first);
        });
        let second = Lock::take_soon(dir.path(), |_| {}).unwrap();
        assert!(second.is_some());
        letting_go.join().unwrap();
        assert!(Lock::take_soon(dir.path(), |_| {}).unwrap().is_none(), "it ends");
    }

    #[test]
    fn a_lock_is_waited_for_longer_if_the_process_that_took_it_has_ended() {
        let dir = tempfile::tempdir().unwrap();
        drop(Lock::take(dir.path()).unwrap());
        let seconds = LOCK_LIMIT.as_secs() + 1;
        let script = format!("exec 9<{LOCK} && flock 9 && sleep {seconds} >/dev/null 2>&1 &");
        let mut shell = std::process::Command::new("sh");
        assert!(shell.args(["-c", &script]).current_dir(dir.path()).status().unwrap().success());
        let begun = Instant::now();
        while Lock::take(dir.path()).unwrap().is_some() {
            assert!(begun.elapsed() < Duration::from_secs(20), "flock has not taken it");
            std::thread::sleep(LOCK_POLL);
        }
        assert!(Lock::take_soon(dir.path(), |_| {}).unwrap().is_some());
    }
}
