//! Files of the administrator's whose first line is a secret.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use zeroize::Zeroizing;

/// The longest first line, in bytes.
const LINE_BYTES_MAX: usize = 1_024;

/// The first line of a file that its owner alone may read; else why there is none, in words for the administrator.
pub(super) fn secret_in(path: &Path) -> Result<Zeroizing<Vec<u8>>, String> {
    let file = File::open(path).map_err(|error| error.to_string())?;
    let about = file.metadata().map_err(|error| error.to_string())?;
    if !about.is_file() || about.mode() & 0o077 != 0 {
        return Err("it is no file that its owner alone may read: chmod 600 it".into());
    }
    let read_max = LINE_BYTES_MAX + 1;
    // One reservation, so that no copy stays behind.
    let mut content = Zeroizing::new(Vec::with_capacity(read_max + 1));
    let read = file.take(u64::try_from(read_max).unwrap_or_default()).read_to_end(&mut content);
    read.map_err(|error| error.to_string())?;
    match first_line(&content) {
        None => Err("its first line is empty: the secret belongs there".into()),
        Some(line) if line.len() > LINE_BYTES_MAX => {
            Err(format!("its first line has more than {LINE_BYTES_MAX} bytes"))
        }
        Some(line) => Ok(line),
    }
}

/// The first line of a file's content; `None`: it is empty.
pub(super) fn first_line(content: &[u8]) -> Option<Zeroizing<Vec<u8>>> {
    let line = content.split(|byte| matches!(byte, b'\n' | b'\r')).next().unwrap_or_default();
    (!line.is_empty()).then(|| Zeroizing::new(line.to_vec()))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_secret_is_the_first_line_of_a_private_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("secret");
        let write = |text: &str, mode: u32| {
            std::fs::write(&path, text).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            secret_in(&path)
        };
        assert_eq!(write("sesame\r\nmore\n", 0o600).unwrap().as_slice(), b"sesame");
        let longest = "s".repeat(LINE_BYTES_MAX);
        assert_eq!(write(&longest, 0o400).unwrap().as_slice(), longest.as_bytes());
        assert!(write(&format!("{longest}s"), 0o600).unwrap_err().contains("more than 1024"));
        assert!(write("sesame\n", 0o640).unwrap_err().contains("chmod 600"));
        assert!(write("\nsesame\n", 0o600).unwrap_err().contains("empty"));
        assert!(secret_in(&dir.path().join("none")).is_err());
        assert!(secret_in(dir.path()).unwrap_err().contains("no file"));
    }
}
