//! Captures on the underlay, by tcpdump; read by tshark.

use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::process::Signal;
use weft_bench::sandbox::{Netns, Running};

use super::slowness;

/// A running tcpdump; ended by [`Capture::finish`].
pub struct Capture {
    tcpdump: Running,
    file: PathBuf,
}

impl Capture {
    /// Captures whole packets of an interface into `file`.
    ///
    /// # Errors
    /// tcpdump is missing or does not start.
    pub fn start(
        netns: &Netns,
        interface: &str,
        file: &Path,
        filter: &str,
    ) -> anyhow::Result<Self> {
        let path = file.to_string_lossy();
        let mut words =
            vec!["tcpdump", "-U", "--immediate-mode", "-n", "-Z", "root", "-B", "65536", "-s", "0"];
        words.extend_from_slice(&["-i", interface, "-w", &path]);
        words.extend(filter.split_whitespace());
        let mut tcpdump = netns.spawn(&words)?;
        tcpdump.line_with("listening on", Duration::from_secs(5))?;
        Ok(Self { tcpdump, file: file.into() })
    }

    /// Ends the capture and gives its bytes.
    ///
    /// # Errors
    /// tcpdump does not end, or the file cannot be read.
    pub fn finish(mut self) -> anyhow::Result<Vec<u8>> {
        // tcpdump writes what the kernel still holds for it before it ends.
        std::thread::sleep(Duration::from_millis(300) * slowness());
        self.tcpdump.signal(Signal::INT);
        self.tcpdump.wait(Duration::from_secs(10))?;
        Ok(std::fs::read(&self.file)?)
    }
}

/// Whether `needle` stands anywhere in `haystack`.
#[must_use]
pub fn contains(haystack: &[u8], needle: &[u8]) -> bool {
    memchr::memmem::find(haystack, needle).is_some()
}

/// Runs tshark on a capture and gives its output.
///
/// # Errors
/// tshark is missing or failed.
pub fn tshark(file: &Path, arguments: &[&str]) -> anyhow::Result<String> {
    let output =
        std::process::Command::new("tshark").arg("-r").arg(file).args(arguments).output()?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    anyhow::bail!("tshark: {}", String::from_utf8_lossy(&output.stderr))
}
