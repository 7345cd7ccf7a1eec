//! What survives a restart: small JSON files in the state directory, replaced atomically.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use serde::Serialize;
use serde::de::DeserializeOwned;
use zeroize::Zeroizing;

/// The state directory of one daemon.
#[derive(Clone)]
pub(super) struct Store {
    dir: PathBuf,
}

/// The state directory cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// A file cannot be read or written (the disk, permissions).
    #[error("cannot {action} {path}: {error}")]
    Io {
        /// Read, write, create.
        action: &'static str,
        /// Which file.
        path: PathBuf,
        /// Why.
        error: io::Error,
    },
    /// A file holds something else than this version of Weft wrote.
    #[error(
        "{path} is not readable by this version of weft ({error}); restore it from a backup, or weft reset"
    )]
    Malformed {
        /// Which file.
        path: PathBuf,
        /// What is wrong.
        error: serde_json::Error,
    },
}

impl Store {
    /// Opens the directory, making it for root alone where there is none.
    pub(super) fn open(dir: &Path) -> Result<Self, StoreError> {
        make_private_dir(dir)?;
        Ok(Self { dir: dir.into() })
    }

    /// The path of a file in it.
    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Reads a file; `None` if there is none.
    pub(super) fn load<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>, StoreError> {
        let path = self.path(name);
        let Some(text) = self.read(name)? else { return Ok(None) };
        serde_json::from_slice(&text)
            .map(Some)
            .map_err(|error| StoreError::Malformed { path, error })
    }

    /// Replaces a file so that after a power cut either the old or the new one is there whole.
    pub(super) fn save<T: Serialize>(&self, name: &str, value: &T) -> Result<(), StoreError> {
        let text = serde_json::to_vec_pretty(value)
            .map_err(|error| StoreError::Malformed { path: self.path(name), error })?;
        self.write(name, &text)
    }

    /// The network's secret, once one is known.
    pub(super) fn load_secret(&self) -> Result<Option<Zeroizing<String>>, StoreError> {
        let Some(bytes) = self.read(SECRET)? else { return Ok(None) };
        let text = String::from_utf8_lossy(&bytes);
        Ok(Some(Zeroizing::new(text.trim_end().to_owned())))
    }

    /// Keeps the network's secret, readable by root alone.
    pub(super) fn save_secret(&self, secret: &[u8]) -> Result<(), StoreError> {
        self.write(SECRET, secret)
    }

    fn read(&self, name: &str) -> Result<Option<Zeroizing<Vec<u8>>>, StoreError> {
        match fs::read(self.path(name)) {
            Ok(bytes) => Ok(Some(Zeroizing::new(bytes))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(StoreError::Io { action: "read", path: self.path(name), error }),
        }
    }

    fn write(&self, name: &str, bytes: &[u8]) -> Result<(), StoreError> {
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
            file.sync_all()?;
            fs::rename(&temporary, &path)?;
            File::open(&self.dir)?.sync_all()
        };
        replace().map_err(|error| StoreError::Io { action: "write", path: path.clone(), error })
    }
}

/// Makes a directory that only root may enter, with its parents.
pub(crate) fn make_private_dir(dir: &Path) -> Result<(), StoreError> {
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

/// Held as long as the daemon lives; the kernel lets go of it even after `kill -9`.
pub(super) struct Lock {
    _file: File,
}

impl Lock {
    /// Takes the lock of a directory; `None` if another daemon holds it.
    pub(super) fn take(dir: &Path) -> Result<Option<Self>, StoreError> {
        make_private_dir(dir)?;
        let path = dir.join(LOCK);
        let open = || {
            let options = &mut OpenOptions::new();
            options.write(true).create(true).truncate(false).mode(0o600).open(&path)
        };
        let file =
            open().map_err(|error| StoreError::Io { action: "open", path: path.clone(), error })?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Some(Self { _file: file })),
            Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
            Err(error) => Err(StoreError::Io { action: "lock", path, error: error.into() }),
        }
    }
}

const SECRET: &str = "secret";
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
        store.save_secret(b"hunter2").unwrap();
        assert_eq!(store.load_secret().unwrap().unwrap().as_str(), "hunter2");
    }

    #[test]
    fn a_damaged_file_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        fs::write(store.path("numbers.json"), "{").unwrap();
        let error = store.load::<Vec<u8>>("numbers.json").unwrap_err().to_string();
        assert!(error.contains("numbers.json") && error.contains("weft reset"), "{error}");
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
}
