//! A log of SA keys for tests that look at the wire with another program. Only with the cargo
//! feature `keylog`, which no released binary has.

use std::io;
use std::path::Path;

use weft_crypto::{Cipher, SaKey};

/// The file that keys are written to, if any.
#[derive(Debug, Default)]
pub struct KeyLog {
    #[cfg(feature = "keylog")]
    file: Option<std::fs::File>,
}

#[cfg(not(feature = "keylog"))]
impl KeyLog {
    /// Writes nothing: this build has no key log.
    ///
    /// # Errors
    /// None.
    pub fn open(_: Option<&Path>) -> io::Result<Self> {
        Ok(Self {})
    }

    /// Writes nothing.
    pub const fn note(&self, _: &'static str, _: u32, _: Cipher, _: &SaKey) {}
}

#[cfg(feature = "keylog")]
impl KeyLog {
    /// Appends to the file at `path`, which only root can read; `None`: nothing is written.
    ///
    /// # Errors
    /// The file cannot be opened.
    pub fn open(path: Option<&Path>) -> io::Result<Self> {
        use std::os::unix::fs::OpenOptionsExt;
        let open =
            |path| std::fs::OpenOptions::new().append(true).create(true).mode(0o600).open(path);
        Ok(Self { file: path.map(open).transpose()? })
    }

    /// One line: way (`in` or `out`), SPI, cipher, key and salt (format `ovpn`: nonce tail) in hex.
    pub fn note(&self, way: &'static str, spi: u32, cipher: Cipher, key: &SaKey) {
        use std::fmt::Write as _;
        use std::io::Write as _;
        use weft_crypto::Format;
        let Some(mut file) = self.file.as_ref() else { return };
        let mut line = format!("{way} {spi:#010x} {cipher} 0x");
        let secret = match key.format() {
            Format::Esp | Format::Plain => key.expose().to_vec(),
            Format::Ovpn => [&key.cipher_key()[..], key.nonce_tail()].concat(),
        };
        for byte in secret {
            let _ = write!(line, "{byte:02x}");
        }
        line.push('\n');
        // A test that reads the file notices missing lines.
        let _ = file.write_all(line.as_bytes());
    }
}
