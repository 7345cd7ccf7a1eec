//! A log of SA keys for tests that look at the wire with another program. Only with the cargo
//! feature `keylog`, which no released binary has.

use weft_crypto::{Cipher, SaKey};

use crate::counters::Direction;

/// Where keys are written, if anywhere.
#[derive(Debug, Default)]
pub(crate) struct KeyLog {
    #[cfg(feature = "keylog")]
    file: Option<std::fs::File>,
}

#[cfg(not(feature = "keylog"))]
impl KeyLog {
    #[expect(clippy::unused_self, reason = "with the feature it has a file")]
    pub(crate) const fn note(&self, _: Direction, _: u32, _: Cipher, _: &SaKey) {}
}

#[cfg(feature = "keylog")]
impl KeyLog {
    /// Appends to the file at `path`, which only root can read.
    pub(crate) fn open(path: &std::path::Path) -> std::io::Result<Self> {
        use std::os::unix::fs::OpenOptionsExt;
        let file = std::fs::OpenOptions::new().append(true).create(true).mode(0o600).open(path)?;
        Ok(Self { file: Some(file) })
    }

    /// One line: direction, SPI, cipher, key and salt in hex.
    pub(crate) fn note(&mut self, direction: Direction, spi: u32, cipher: Cipher, key: &SaKey) {
        use std::fmt::Write as _;
        use std::io::Write as _;
        let Some(file) = &mut self.file else { return };
        let way = match direction {
            Direction::Inbound => "in",
            Direction::Outbound => "out",
        };
        let mut line = format!("{way} {spi:#010x} {cipher} 0x");
        for byte in key.expose() {
            let _ = write!(line, "{byte:02x}");
        }
        line.push('\n');
        // A test that reads the file notices what is missing.
        let _ = file.write_all(line.as_bytes());
    }
}
