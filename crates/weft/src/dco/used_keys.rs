//! Static keys that this host has sealed with. The packet ids of a key start at 1 each time it is installed
//! on a device. A key installed twice would seal two packets under one nonce, which breaks AES-GCM and
//! ChaCha20-Poly1305 for both.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};

use weft_api::{ApiError, ErrorKind};

/// The most keys that a host records.
pub(super) const USED_KEYS_MAX: usize = 65_536;

/// One line each, in hexadecimal digits: the fingerprint of the half of a key file that was sealed with.
const USED_KEYS: &str = "dco-used-keys";
/// Bytes of a line.
const LINE_BYTES: usize = 65;

/// The record of one key, already written. It is removed on drop unless the key is kept.
pub(super) struct Recorded {
    file: File,
    /// The offset of the line; `None`: the record stays.
    begins: Option<u64>,
}

/// Records that this host seals with a key from now on, in a state directory that is created if needed.
/// Other processes wait until the result is dropped.
///
/// # Errors
/// [`ErrorKind::Conflict`] if it has done so before; [`ErrorKind::Unavailable`] if that cannot be recorded.
pub(super) fn record(state_dir: &Path, fingerprint: &[u8; 32]) -> Result<Recorded, ApiError> {
    let path = state_dir.join(USED_KEYS);
    let failed = |error: io::Error| {
        let text = format!(
            "cannot record the used key in {}: {error}; free disk space, or give another directory with --state-dir",
            path.display()
        );
        ApiError::new(ErrorKind::Unavailable, text)
    };
    weft_daemon::make_private_dir(state_dir)
        .map_err(|error| ApiError::new(ErrorKind::Unavailable, error))?;
    let (mut file, known) = read(&path).map_err(failed)?;
    let line: String = fingerprint.iter().map(|byte| format!("{byte:02x}")).collect();
    if known.lines().any(|known| known == line) {
        let text = "this host has sealed with this half of the key file before, and would repeat nonces; make a new key with openvpn --genkey secret FILE";
        return Err(ApiError::new(ErrorKind::Conflict, text));
    }
    // A line that a power cut left unfinished is overwritten.
    let whole = known.len() - known.len() % LINE_BYTES;
    if whole / LINE_BYTES >= USED_KEYS_MAX {
        let text = format!(
            "{} lists {USED_KEYS_MAX} used keys, which is the maximum; destroy those keys, then delete it",
            path.display()
        );
        return Err(ApiError::new(ErrorKind::Unavailable, text));
    }
    let begins = whole as u64;
    let mut recorded = Recorded { file: file.try_clone().map_err(failed)?, begins: Some(begins) };
    let mut write = || {
        file.set_len(begins)?;
        file.seek(SeekFrom::Start(begins))?;
        file.write_all(format!("{line}\n").as_bytes())?;
        file.sync_all()?;
        File::open(state_dir)?.sync_all()
    };
    match write() {
        Ok(()) => Ok(recorded),
        Err(error) => {
            recorded.take_back();
            Err(failed(error))
        }
    }
}

impl Recorded {
    /// The device has the key: the record stays.
    pub(super) fn keep(mut self) {
        self.begins = None;
    }

    fn take_back(&mut self) {
        if let Some(begins) = self.begins.take() {
            // If this fails, the record refuses an unused key, which does no harm.
            let _ = self.file.set_len(begins);
        }
    }
}

impl Drop for Recorded {
    fn drop(&mut self) {
        self.take_back();
    }
}

/// The file, locked, and its content.
fn read(path: &PathBuf) -> io::Result<(File, String)> {
    let mut file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(path)?;
    flock(&file, FlockOperation::LockExclusive)?;
    let mut bytes = Vec::new();
    let limit = (USED_KEYS_MAX * LINE_BYTES) as u64;
    (&mut file).take(limit).read_to_end(&mut bytes)?;
    String::from_utf8(bytes)
        .map(|known| (file, known))
        .map_err(|_| io::Error::new(io::ErrorKind::InvalidData, "it has another format"))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_key_is_used_once_unless_it_was_taken_back() {
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("state");
        // The device refused it, so it may be used again.
        drop(record(&state, &[1; 32]).unwrap());
        record(&state, &[1; 32]).unwrap().keep();
        record(&state, &[2; 32]).unwrap().keep();
        for used in [[1; 32], [2; 32]] {
            let error = record(&state, &used).err().unwrap();
            assert_eq!(error.kind, ErrorKind::Conflict);
            assert!(error.to_string().contains("genkey"), "{error}");
        }
        record(&state, &[3; 32]).unwrap().keep();
        let text = std::fs::read_to_string(state.join(USED_KEYS)).unwrap();
        assert_eq!(text.lines().count(), 3);
    }

    #[test]
    fn half_a_line_is_written_over_and_a_full_record_is_named() {
        let dir = tempfile::tempdir().unwrap();
        record(dir.path(), &[1; 32]).unwrap().keep();
        let path = dir.path().join(USED_KEYS);
        OpenOptions::new().append(true).open(&path).unwrap().write_all(b"0202").unwrap();
        record(dir.path(), &[2; 32]).unwrap().keep();
        assert!(record(dir.path(), &[2; 32]).is_err());
        std::fs::write(&path, format!("{}\n", "0".repeat(64)).repeat(USED_KEYS_MAX)).unwrap();
        let error = record(dir.path(), &[3; 32]).err().unwrap();
        assert_eq!(error.kind, ErrorKind::Unavailable);
        assert!(error.to_string().contains("65536"), "{error}");
    }

    #[test]
    fn without_a_record_no_key_is_used() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        std::fs::write(&file, "").unwrap();
        let error = record(&file, &[1; 32]).err().unwrap();
        assert_eq!(error.kind, ErrorKind::Unavailable);
    }
}
