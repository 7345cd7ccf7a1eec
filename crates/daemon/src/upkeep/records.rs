//! Many records of one kind that survive a restart: a file for each in a directory of the state directory. A change
//! writes the records that it changes, however many there are.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::store::{Store, StoreError, make_private_dir};

/// The records of one directory, by key.
#[derive(Clone)]
pub(crate) struct Records {
    store: Store,
    directory: &'static str,
    /// The one file of all records that an earlier version wrote. While it is there, it alone counts.
    earlier: &'static str,
    known: Arc<Mutex<Known>>,
}

/// What the disk holds, or will hold once it can be written.
#[derive(Default)]
struct Known {
    /// The content of each record's file.
    files: BTreeMap<String, Vec<u8>>,
    /// Records whose files may be older than that, as their last write failed.
    unsure: BTreeSet<String>,
    /// The file of an earlier version is still there.
    is_earlier: bool,
}

/// A record as stored. The name of its file is made from the key, which may be a path or long.
#[derive(Serialize, Deserialize)]
struct Stored<K, T> {
    key: K,
    value: T,
}

impl Records {
    /// Reads all records of a directory, which is made if it does not exist. Records in the file of an earlier
    /// version are moved to it.
    ///
    /// # Errors
    /// A file cannot be read.
    pub(crate) fn load<T: Serialize + DeserializeOwned>(
        store: &Store,
        directory: &'static str,
        earlier: &'static str,
    ) -> Result<(Self, BTreeMap<String, T>), StoreError> {
        let all = read_all(store, directory)?;
        remove_unfinished(&store.path(directory));
        let mut known = Known::default();
        let mut records = BTreeMap::new();
        for (Stored { key, value }, bytes) in all {
            known.files.insert(String::clone(&key), bytes);
            records.insert(key, value);
        }
        if let Some(before) = store.load::<BTreeMap<String, T>>(earlier)? {
            known.is_earlier = true;
            known.unsure = known.files.keys().cloned().collect();
            records = before;
        }
        let is_earlier = known.is_earlier;
        let known = Arc::new(Mutex::new(known));
        let loaded = Self { store: store.clone(), directory, earlier, known };
        // A full disk does not keep the daemon from starting: the next change tries again.
        if is_earlier && let Err(error) = loaded.save(&records) {
            tracing::warn!(%error, "cannot write each attachment to its own file yet");
        }
        Ok((loaded, records))
    }

    /// Reads the records of a directory that another daemon has written, and changes nothing.
    ///
    /// # Errors
    /// A file cannot be read.
    pub(crate) fn read<T: DeserializeOwned>(
        store: &Store,
        directory: &str,
        earlier: &str,
    ) -> Result<Vec<T>, StoreError> {
        if let Some(before) = store.load::<BTreeMap<String, T>>(earlier)? {
            return Ok(before.into_values().collect());
        }
        let all = read_all::<T>(store, directory)?;
        Ok(all.into_iter().map(|(stored, _)| stored.value).collect())
    }

    /// Writes the records that have changed, and removes those that are gone.
    ///
    /// # Errors
    /// One cannot be written; then the disk keeps all that was there before.
    pub(crate) fn save<T: Serialize>(&self, all: &BTreeMap<String, T>) -> Result<(), StoreError> {
        let mut known = self.lock();
        let changes = self.changes(&known, all)?;
        for (at, (key, bytes)) in changes.iter().enumerate() {
            let written = self.write(key, bytes.as_deref(), false);
            if let Err(error) = written {
                // The one that failed may be half done.
                self.take_back(&mut known, &changes[..=at]);
                let len = bytes.as_ref().map_or(0, Vec::len);
                self.store.note_refused(&self.name_of(key), &error, len);
                return Err(error);
            }
        }
        if known.is_earlier {
            if let Err(error) = self.store.write(self.earlier, None, false) {
                self.take_back(&mut known, &changes);
                return Err(error);
            }
            known.is_earlier = false;
        }
        for (key, bytes) in changes {
            known.note(key, bytes, true);
        }
        Ok(())
    }

    /// Like [`Self::save`], for a change that has already happened: writes that fail are repeated later.
    pub(crate) fn save_or_later<T: Serialize>(&self, all: &BTreeMap<String, T>) {
        let mut known = self.lock();
        let changes = match self.changes(&known, all) {
            Ok(changes) => changes,
            Err(error) => return tracing::error!(%error, "cannot save the records"),
        };
        let mut is_whole = true;
        for (key, bytes) in changes {
            let written = self.write(&key, bytes.as_deref(), true);
            if let Err(error) = &written {
                tracing::warn!(%error, "not saved; trying again");
            }
            is_whole &= written.is_ok();
            known.note(key, bytes, written.is_ok());
        }
        // The earlier file stays as long as it alone is whole.
        if known.is_earlier && is_whole && self.store.write(self.earlier, None, true).is_ok() {
            known.is_earlier = false;
        }
    }

    /// The files to write, and to remove (`None`).
    fn changes<T: Serialize>(
        &self,
        known: &Known,
        all: &BTreeMap<String, T>,
    ) -> Result<Vec<Change>, StoreError> {
        let mut changes = Vec::new();
        for (key, value) in all {
            let bytes = serde_json::to_vec(&Stored { key, value }).map_err(|error| {
                StoreError::Malformed { path: self.store.path(&self.name_of(key)), error }
            })?;
            if known.files.get(key) != Some(&bytes) || known.unsure.contains(key) {
                changes.push((key.clone(), Some(bytes)));
            }
        }
        let before = known.files.keys().chain(&known.unsure).collect::<BTreeSet<_>>();
        let gone = before.into_iter().filter(|key| !all.contains_key(*key));
        changes.extend(gone.map(|key| (key.clone(), None)));
        Ok(changes)
    }

    /// Undoes changes of a state that could not be written whole.
    fn take_back(&self, known: &mut Known, changes: &[Change]) {
        for (key, _) in changes {
            let before = known.files.get(key).cloned();
            let is_written = self.write(key, before.as_deref(), true).is_ok();
            known.note(key.clone(), before, is_written);
        }
    }

    fn write(&self, key: &str, bytes: Option<&[u8]>, later: bool) -> Result<(), StoreError> {
        self.store.write(&self.name_of(key), bytes, later)
    }

    fn name_of(&self, key: &str) -> String {
        let digest = weft_crypto::fingerprint(&[key.as_bytes()]);
        let name: String = digest[..NAME_BYTES].iter().map(|byte| format!("{byte:02x}")).collect();
        format!("{}/{name}.{EXTENSION}", self.directory)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Known {
    fn note(&mut self, key: String, bytes: Option<Vec<u8>>, is_written: bool) {
        match is_written {
            true => drop(self.unsure.remove(&key)),
            false => drop(self.unsure.insert(key.clone())),
        }
        match bytes {
            Some(bytes) => drop(self.files.insert(key, bytes)),
            None => drop(self.files.remove(&key)),
        }
    }
}

/// A record, with its file's content.
type Found<T> = (Stored<String, T>, Vec<u8>);

/// A record's key and the new content of its file; `None`: the record is gone.
type Change = (String, Option<Vec<u8>>);

/// The records of a directory, each with its file's content.
fn read_all<T: DeserializeOwned>(
    store: &Store,
    directory: &str,
) -> Result<Vec<Found<T>>, StoreError> {
    let path = store.path(directory);
    make_private_dir(&path)?;
    let unreadable = |path: &Path| {
        let path = path.to_path_buf();
        |error: io::Error| StoreError::Io { action: "read", path, error }
    };
    let entries = fs::read_dir(&path).map_err(unreadable(&path))?;
    let files: io::Result<Vec<PathBuf>> = entries.map(|it| it.map(|it| it.path())).collect();
    let mut found = Vec::new();
    // A write that a crash has cut short leaves a file with another extension.
    for file in files.map_err(unreadable(&path))? {
        if file.extension() != Some(OsStr::new(EXTENSION)) {
            continue;
        }
        let bytes = fs::read(&file).map_err(unreadable(&file))?;
        let stored = serde_json::from_slice(&bytes)
            .map_err(|error| StoreError::Malformed { path: file, error })?;
        found.push((stored, bytes));
    }
    Ok(found)
}

/// Removes files that a killed daemon had not finished. A later write need not replace them.
fn remove_unfinished(directory: &Path) {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    for file in entries.map(|entry| entry.path()) {
        if file.extension() != Some(OsStr::new(EXTENSION))
            && let Err(error) = fs::remove_file(&file)
        {
            tracing::debug!(%error, file = %file.display(), "cannot remove an unfinished file");
        }
    }
}

/// Bytes of a key's hash in the name of its file.
const NAME_BYTES: usize = 16;
const EXTENSION: &str = "json";

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    const DIRECTORY: &str = "numbers";
    const EARLIER: &str = "numbers.json";

    type Numbers = BTreeMap<String, u32>;

    fn open(dir: &Path) -> (Store, Records, Numbers) {
        let store = Store::open(dir).unwrap();
        let (records, numbers) = Records::load(&store, DIRECTORY, EARLIER).unwrap();
        (store, records, numbers)
    }

    fn numbers(all: &[(&str, u32)]) -> Numbers {
        all.iter().map(|(key, value)| ((*key).to_owned(), *value)).collect()
    }

    fn on_disk(dir: &Path) -> Numbers {
        open(dir).2
    }

    /// The inode of each file: a file that is replaced gets another one.
    fn inodes(dir: &Path) -> BTreeMap<PathBuf, u64> {
        use std::os::unix::fs::MetadataExt;
        let entries = fs::read_dir(dir.join(DIRECTORY)).unwrap().map(Result::unwrap);
        entries.map(|it| (it.path(), it.metadata().unwrap().ino())).collect()
    }

    /// A directory in place of the file that is written first: there is no disk to fill up in a test.
    fn obstacle(store: &Store, records: &Records, key: &str) -> PathBuf {
        store.path(&format!("{}.new", records.name_of(key)))
    }

    #[test]
    fn a_change_writes_the_record_that_it_changes_alone() {
        let dir = tempfile::tempdir().unwrap();
        let (_, records, none) = open(dir.path());
        assert!(none.is_empty());
        let long = "/".repeat(4_000);
        records.save(&numbers(&[("a", 1), ("b", 2), (&long, 3)])).unwrap();
        let before = inodes(dir.path());
        records.save(&numbers(&[("a", 1), ("b", 7), (&long, 3)])).unwrap();
        let after = inodes(dir.path());
        assert_eq!((before.len(), after.len()), (3, 3));
        let same = before.iter().filter(|(path, inode)| after.get(*path) == Some(inode)).count();
        assert_eq!(same, 2, "{before:?} {after:?}");
        records.save_or_later(&numbers(&[("b", 7), (&long, 3)]));
        assert_eq!(on_disk(dir.path()), numbers(&[("b", 7), (&long, 3)]));
    }

    #[test]
    fn what_a_killed_daemon_was_about_to_write_goes() {
        let dir = tempfile::tempdir().unwrap();
        let (store, records, _) = open(dir.path());
        records.save(&numbers(&[("a", 1)])).unwrap();
        let unfinished = store.path(&format!("{}.new", records.name_of("b")));
        fs::write(&unfinished, "{").unwrap();
        assert_eq!(on_disk(dir.path()), numbers(&[("a", 1)]));
        assert!(!unfinished.exists());
    }

    #[test]
    fn a_change_that_cannot_be_written_changes_nothing_on_the_disk() {
        let dir = tempfile::tempdir().unwrap();
        let (store, records, _) = open(dir.path());
        let before = numbers(&[("a", 1), ("b", 2), ("c", 3)]);
        records.save(&before).unwrap();
        let obstacle = obstacle(&store, &records, "d");
        fs::create_dir_all(obstacle.join("x")).unwrap();
        // The record before the one that fails is written already.
        let wanted = numbers(&[("a", 9), ("aa", 9), ("b", 2), ("d", 4)]);
        records.save(&wanted).unwrap_err();
        assert_eq!(on_disk(dir.path()), before);
        assert!(store.fault().is_some(), "nobody is told of the disk");
        fs::remove_dir_all(obstacle).unwrap();
        records.save(&wanted).unwrap();
        assert_eq!(on_disk(dir.path()), wanted);
    }

    /// A record must not stay on the disk that nobody knows: the next daemon would take it for true.
    #[test]
    fn a_write_that_fails_at_its_last_step_is_taken_back_too() {
        use std::sync::atomic::Ordering;
        let dir = tempfile::tempdir().unwrap();
        let (store, records, _) = open(dir.path());
        let before = numbers(&[("a", 1)]);
        records.save(&before).unwrap();
        for wanted in [numbers(&[("a", 1), ("b", 2)]), numbers(&[("a", 7)]), numbers(&[])] {
            store.sync_fails.store(true, Ordering::Relaxed);
            records.save(&wanted).unwrap_err();
            store.sync_fails.store(false, Ordering::Relaxed);
            assert!(store.try_all());
            assert_eq!(on_disk(dir.path()), before, "{wanted:?}");
        }
    }

    #[test]
    fn a_change_that_has_happened_is_written_once_that_is_possible() {
        let dir = tempfile::tempdir().unwrap();
        let (store, records, _) = open(dir.path());
        records.save(&numbers(&[("a", 1)])).unwrap();
        let obstacle = obstacle(&store, &records, "a");
        fs::create_dir_all(obstacle.join("x")).unwrap();
        let wanted = numbers(&[("a", 2), ("b", 3)]);
        records.save_or_later(&wanted);
        assert_eq!(on_disk(dir.path()), numbers(&[("a", 1), ("b", 3)]));
        // An answer does not promise what is still to be written.
        records.save(&wanted).unwrap_err();
        fs::remove_dir_all(obstacle).unwrap();
        assert!(store.try_all());
        assert_eq!(on_disk(dir.path()), wanted);
    }

    #[test]
    fn records_of_an_earlier_version_move_to_their_own_files() {
        let dir = tempfile::tempdir().unwrap();
        let (store, records, _) = open(dir.path());
        records.save(&numbers(&[("stale", 0), ("a", 0)])).unwrap();
        let before = numbers(&[("a", 1), ("b", 2)]);
        store.save(EARLIER, &before).unwrap();
        // While one record cannot be written, the earlier file counts.
        let obstacle = obstacle(&store, &records, "b");
        fs::create_dir_all(obstacle.join("x")).unwrap();
        let (_, records, loaded) = open(dir.path());
        assert_eq!((loaded, store.path(EARLIER).exists()), (before.clone(), true));
        fs::remove_dir_all(obstacle).unwrap();
        records.save_or_later(&before);
        assert!(!store.path(EARLIER).exists());
        assert_eq!(on_disk(dir.path()), before);
        assert_eq!(inodes(dir.path()).len(), 2);
    }

    #[test]
    fn a_damaged_record_is_named_and_a_write_cut_short_is_none() {
        let dir = tempfile::tempdir().unwrap();
        let (store, records, _) = open(dir.path());
        records.save(&numbers(&[("a", 1)])).unwrap();
        let name = records.name_of("a");
        fs::write(store.path(&format!("{name}.new")), "{").unwrap();
        assert_eq!(on_disk(dir.path()), numbers(&[("a", 1)]));
        fs::write(store.path(&name), "{").unwrap();
        let loaded = Records::load::<u32>(&store, DIRECTORY, EARLIER).map(|_| ());
        assert!(loaded.unwrap_err().to_string().contains(&name));
    }
}
