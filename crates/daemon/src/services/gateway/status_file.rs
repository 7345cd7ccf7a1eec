//! The status file, which other programs read.

use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::Gateway;
use super::journal::Weight;
use super::roster::Format;

/// The file is root's alone, as OpenVPN's is.
const MODE: u32 = 0o600;

/// A status file that is to be written.
#[derive(Clone, Debug)]
pub(super) struct StatusFile {
    pub(super) path: PathBuf,
    /// Between two writings.
    pub(super) interval: Duration,
    pub(super) format: Format,
}

/// The file while the gateway serves: it goes with its end, so that nobody takes old clients for new ones.
struct Kept {
    path: PathBuf,
    /// No more is written.
    is_over: AtomicBool,
}

/// Ends the file.
struct Guard(Arc<Kept>);

impl Drop for Guard {
    fn drop(&mut self) {
        // A writing that is under way removes the file behind itself: nobody waits for the disk here.
        self.0.is_over.store(true, Ordering::SeqCst);
        let _ = std::fs::remove_file(&self.0.path);
    }
}

impl Kept {
    /// Replaces the file's content as a whole.
    fn write(&self, text: &str) -> io::Result<()> {
        if self.is_over.load(Ordering::SeqCst) {
            return Ok(());
        }
        replace(&self.path, text)?;
        if self.is_over.load(Ordering::SeqCst) {
            std::fs::remove_file(&self.path)?;
        }
        Ok(())
    }
}

/// Writes the file again and again, for as long as it is polled.
pub(super) async fn keep(gateway: Arc<Gateway>, file: StatusFile) {
    let kept = Arc::new(Kept { path: file.path.clone(), is_over: AtomicBool::new(false) });
    let _guard = Guard(Arc::clone(&kept));
    let mut has_failed = false;
    loop {
        if let Some(roster) = gateway.roster().await {
            let kept = Arc::clone(&kept);
            let format = file.format;
            // The disk may be slow.
            let written =
                tokio::task::spawn_blocking(move || kept.write(&roster.text(format, "\n"))).await;
            let written = written.unwrap_or_else(|error| Err(io::Error::other(error)));
            if let Err(error) = &written
                && !has_failed
            {
                let path = file.path.display();
                tracing::warn!(%error, %path, "cannot write the status file; trying again");
                let text = format!("cannot write the status file {path}: {error}");
                gateway.journal.line(Weight::Fault, &text);
            }
            has_failed = written.is_err();
        }
        tokio::time::sleep(file.interval).await;
    }
}

/// Replaces a file: a reader sees the old content or the new one. A power cut may leave none, as the file is that of a
/// service that runs.
fn replace(path: &Path, text: &str) -> io::Result<()> {
    let mut new = path.as_os_str().to_owned();
    new.push(".new");
    let new = PathBuf::from(new);
    let options =
        std::fs::OpenOptions::new().write(true).create(true).truncate(true).mode(MODE).clone();
    let written = options.open(&new).and_then(|mut file| file.write_all(text.as_bytes()));
    let moved = written.and_then(|()| std::fs::rename(&new, path));
    if moved.is_err() {
        let _ = std::fs::remove_file(&new);
    }
    moved
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_file_is_replaced_as_a_whole_and_goes_with_its_gateway() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("status.log");
        let kept = Arc::new(Kept { path: path.clone(), is_over: AtomicBool::new(false) });
        let guard = Guard(Arc::clone(&kept));
        kept.write("one\n").unwrap();
        let reader = std::fs::File::open(&path).unwrap();
        kept.write("two\n").unwrap();
        assert_eq!(io::read_to_string(reader).unwrap(), "one\n");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "two\n");
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, MODE);
        drop(guard);
        // A writing that comes too late makes no file.
        kept.write("three\n").unwrap();
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
