//! Whether the saved state is the one that this machine wrote last, and which run preceded this one.
//!
//! Two notes answer that. One lies beside the API's socket, where no backup or machine image restores it. It
//! names the run of the daemon and how far its state had come. The other lies beside the state and names the
//! file it is about: a copied state is another file, or on another machine.

use std::fs;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use weft_crypto::PeerId;

use super::store::MESH_FILE;
use crate::config::Settings;

/// The note of a run for the next one on this machine, until the machine reboots.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct LastRun {
    /// Identifies the boot of the machine.
    boot: String,
    peer: PeerId,
    instance: u64,
    /// The generation of the saved state, if it was the newest.
    generation: Option<u64>,
}

/// Identifies a file on a machine.
#[derive(Debug, Serialize, Deserialize)]
struct Place {
    /// When the file was created, in nanoseconds since 1970; a copy has a later time.
    made_ns: u64,
    /// The machine's serial number from its firmware; copies of virtual machines differ.
    machine: Option<String>,
}

/// The paths of both notes, and the contents of this run's note.
pub(crate) struct Notes {
    state: PathBuf,
    place: PathBuf,
    last_run: PathBuf,
    /// This machine's [`Place::machine`].
    machine: Option<String>,
    run: LastRun,
}

/// The contents of the previous run's notes.
pub(crate) struct Before {
    pub(crate) origin: weft_mesh::Origin,
    /// The instance that ran here and is known to have ended.
    pub(crate) instance: Option<u64>,
}

impl Notes {
    /// Reads the notes of the previous run, and records that this one runs now.
    pub(crate) fn begin(settings: &Settings, peer: PeerId, instance: u64) -> (Self, Before) {
        let boot = fs::read_to_string(BOOT_ID).unwrap_or_default().trim().to_owned();
        Self::begin_at(&settings.state_dir, &settings.runtime_dir, (boot, peer, instance))
    }

    fn begin_at(
        state_dir: &Path,
        runtime_dir: &Path,
        (boot, peer, instance): (String, PeerId, u64),
    ) -> (Self, Before) {
        let run = LastRun { boot, peer, instance, generation: None };
        let mut notes = Self {
            state: state_dir.join(MESH_FILE),
            place: state_dir.join(PLACE_FILE),
            last_run: runtime_dir.join(LAST_RUN_FILE),
            machine: fs::read_to_string(MACHINE_ID).ok().map(|id| id.trim().to_owned()),
            run,
        };
        let last: Option<LastRun> = read(&notes.last_run);
        let last = last.filter(|last| (&last.boot, last.peer) == (&notes.run.boot, peer));
        let last_generation = last.as_ref().and_then(|last| last.generation);
        // A state from before these notes existed has none.
        let noted: Option<Place> = read(&notes.place);
        let copied = noted.zip(notes.place()).is_some_and(|(noted, now)| noted.is_another(&now));
        notes.run.generation = last_generation;
        notes.tell_run();
        let origin = weft_mesh::Origin { last_generation, copied };
        (notes, Before { origin, instance: last.map(|last| last.instance) })
    }

    /// Records that the state was saved, with its generation if it is the newest. With `None` the notes stay as
    /// they are: a copied state stays marked as a copy.
    pub(crate) fn saved(&mut self, generation: Option<u64>) {
        if generation.is_none() {
            return;
        }
        if let Some(place) = self.place() {
            note(&self.place, &place);
        }
        if generation != self.run.generation {
            self.run.generation = generation;
            self.tell_run();
        }
    }

    /// `None` if the file system or the kernel does not provide it.
    fn place(&self) -> Option<Place> {
        let made = fs::metadata(&self.state).and_then(|file| file.created()).ok()?;
        let made_ns = u64::try_from(made.duration_since(UNIX_EPOCH).ok()?.as_nanos()).ok()?;
        Some(Place { made_ns, machine: self.machine.clone() })
    }

    fn tell_run(&self) {
        note(&self.last_run, &self.run);
    }
}

impl Place {
    /// Without an identity, a machine counts as the same.
    fn is_another(&self, now: &Self) -> bool {
        let machines = self.machine.as_ref().zip(now.machine.as_ref());
        self.made_ns != now.made_ns || machines.is_some_and(|(noted, now)| noted != now)
    }
}

fn read<T: DeserializeOwned>(path: &Path) -> Option<T> {
    serde_json::from_slice(&fs::read(path).ok()?).ok()
}

/// Replaces a note without forcing it to disk: a lost note costs only a question to other hosts.
fn note<T: Serialize>(path: &Path, value: &T) {
    let temporary = path.with_extension("new");
    let write = || -> io::Result<()> {
        let mut options = fs::OpenOptions::new();
        let file = options.write(true).create(true).truncate(true).mode(0o600).open(&temporary)?;
        serde_json::to_writer(&file, value)?;
        fs::rename(&temporary, path)
    };
    if let Err(error) = write() {
        tracing::debug!(path = %path.display(), %error, "cannot write the note");
    }
}

const LAST_RUN_FILE: &str = "last-run.json";
const PLACE_FILE: &str = "place.json";
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
const MACHINE_ID: &str = "/sys/class/dmi/id/product_uuid";

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn run(boot: &str, instance: u64) -> (String, PeerId, u64) {
        (boot.into(), PeerId::from_bytes([7; 32]), instance)
    }

    fn save(dir: &Path, notes: &mut Notes, generation: u64) {
        fs::write(dir.join("new"), "{}").unwrap();
        fs::rename(dir.join("new"), dir.join(MESH_FILE)).unwrap();
        notes.saved(Some(generation));
    }

    #[test]
    fn a_run_knows_the_one_before_on_the_same_start_of_the_machine_alone() {
        let (state, runtime) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (mut notes, before) = Notes::begin_at(state.path(), runtime.path(), run("boot", 1));
        assert_eq!((before.origin, before.instance), (weft_mesh::Origin::default(), None));
        save(state.path(), &mut notes, 5);
        // A daemon that was killed at once leaves the knowledge of its predecessor.
        for instance in [2, 3] {
            let (_, before) = Notes::begin_at(state.path(), runtime.path(), run("boot", instance));
            assert_eq!(before.instance, Some(instance - 1));
            assert_eq!(before.origin.last_generation, Some(5));
            assert!(!before.origin.copied);
        }
        let (_, before) = Notes::begin_at(state.path(), runtime.path(), run("another", 4));
        assert_eq!((before.origin, before.instance), (weft_mesh::Origin::default(), None));
        let mut other = run("another", 5);
        other.1 = PeerId::from_bytes([8; 32]);
        let (_, before) = Notes::begin_at(state.path(), runtime.path(), other);
        assert_eq!(before.instance, None);
    }

    /// Waits until a new file gets a later time than earlier ones. The kernel's clock for files advances with
    /// its timer, at least a hundred times a second.
    fn tick() {
        std::thread::sleep(std::time::Duration::from_millis(30));
    }

    #[test]
    fn a_copied_or_restored_state_is_known_as_such() {
        let (state, runtime) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (mut notes, _) = Notes::begin_at(state.path(), runtime.path(), run("boot", 1));
        save(state.path(), &mut notes, 5);
        tick();
        let copy = tempfile::tempdir().unwrap();
        for name in [MESH_FILE, PLACE_FILE] {
            fs::copy(state.path().join(name), copy.path().join(name)).unwrap();
        }
        let copied = |state: &Path| {
            let runtime = tempfile::tempdir().unwrap();
            Notes::begin_at(state, runtime.path(), run("another", 2)).1.origin.copied
        };
        assert!(!copied(state.path()));
        assert!(copied(copy.path()));
        // Restored over the existing file.
        tick();
        fs::remove_file(state.path().join(MESH_FILE)).unwrap();
        fs::copy(copy.path().join(MESH_FILE), state.path().join(MESH_FILE)).unwrap();
        assert!(copied(state.path()));
    }
}
