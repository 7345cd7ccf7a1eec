//! What the referee's tests stand on: Debian's `openvpn` as a process, our ends on sockets of the loopback interface.
#![allow(clippy::unwrap_used, clippy::print_stderr)]

pub(crate) mod ends;
#[path = "../pki/mod.rs"]
pub(crate) mod pki;

use std::fmt::Write as _;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use ends::LIMIT;
use pki::{Identity, Pki};

/// The port of a stock server.
pub(crate) const STOCK_PORT: u16 = 1_194;

/// Whether `openvpn` is there; else the reason is printed, and the test passes without having tested anything.
pub(crate) fn is_openvpn_here(test: &str) -> bool {
    let is_here = Command::new("openvpn").arg("--version").stdout(Stdio::null()).status().is_ok();
    if !is_here {
        eprintln!("{test}: skipped, as openvpn is not installed (Debian: apt-get install openvpn)");
    }
    is_here
}

/// A folder with certificates, which goes away with it.
pub(crate) struct Folder {
    pub(crate) pki: Pki,
    folder: TempDir,
}

impl Folder {
    pub(crate) fn new() -> Self {
        let folder = Self { pki: Pki::new(), folder: tempfile::tempdir().unwrap() };
        folder.write("ca.pem", &folder.pki.ca_pem);
        for (name, identity) in [("client", &folder.pki.client), ("server", &folder.pki.server)] {
            let Identity { certificate_pem, key_pem, .. } = identity;
            folder.write(&format!("{name}.pem"), certificate_pem);
            folder.write(&format!("{name}.key"), key_pem);
        }
        folder
    }

    pub(crate) fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.path(name);
        std::fs::write(&path, text).unwrap();
        path
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.path(name)).unwrap()
    }

    /// The words by which a stock end shows who it is.
    pub(crate) fn identity(&self, name: &str) -> Vec<String> {
        let path = |name: String| self.path(&name).display().to_string();
        let words = [
            ("--ca", path("ca.pem".to_owned())),
            ("--cert", path(format!("{name}.pem"))),
            ("--key", path(format!("{name}.key"))),
        ];
        words.into_iter().flat_map(|(word, path)| [word.to_owned(), path]).collect()
    }
}

/// A running `openvpn`, and what it logs. It ends with its test.
pub(crate) struct Stock {
    child: Child,
    log: Arc<Mutex<String>>,
}

impl Stock {
    /// A client that connects to a port of the loopback interface and makes no device.
    pub(crate) fn client(folder: &Folder, proto: &str, port: u16, more: &[&str]) -> Self {
        let mut words = folder.identity("client");
        let fixed = "--client --dev null --ifconfig-noexec --route-noexec --verb 4 \
                     --remote-cert-tls server --connect-retry 1 --hand-window 20";
        words.extend(fixed.split_whitespace().map(str::to_owned));
        let port = port.to_string();
        words.extend(["--proto", proto, "--remote", "127.0.0.1", &port].map(str::to_owned));
        if !more.contains(&"--lport") {
            words.push("--nobind".to_owned());
        }
        words.extend(more.iter().map(|word| (*word).to_owned()));
        Self::start(&words)
    }

    /// A server on [`STOCK_PORT`]. It makes a device, so it runs in a network namespace of the test's own.
    pub(crate) fn server(folder: &Folder, proto: &str, more: &[&str]) -> Self {
        let mut words = folder.identity("server");
        let fixed = "--dev tun --topology subnet --server 10.9.0.0 255.255.255.0 --dh none \
                     --local 127.0.0.1 --verb 4 --keepalive 1 15 --disable-dco";
        words.extend(fixed.split_whitespace().map(str::to_owned));
        let port = STOCK_PORT.to_string();
        words.extend(["--proto", proto, "--port", &port].map(str::to_owned));
        words.extend(more.iter().map(|word| (*word).to_owned()));
        let stock = Self::start(&words);
        let began = Instant::now();
        while !stock.has("Initialization Sequence Completed") {
            assert!(began.elapsed() < LIMIT, "{}", stock.log());
            std::thread::sleep(Duration::from_millis(20));
        }
        stock
    }

    fn start(words: &[String]) -> Self {
        let mut command = Command::new("openvpn");
        let command = command.args(words).stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let log = Arc::new(Mutex::new(String::new()));
        let (lines, kept) = (BufReader::new(child.stdout.take().unwrap()), Arc::clone(&log));
        std::thread::spawn(move || {
            for line in lines.lines().map_while(Result::ok) {
                let _ = writeln!(kept.lock().unwrap(), "{line}");
            }
        });
        Self { child, log }
    }

    pub(crate) fn has(&self, text: &str) -> bool {
        self.log.lock().unwrap().contains(text)
    }

    pub(crate) fn log(&self) -> String {
        self.log.lock().unwrap().clone()
    }

    pub(crate) fn signal(&self, name: &str) {
        let id = self.child.id().to_string();
        assert!(Command::new("kill").args([&format!("-{name}"), &id]).status().unwrap().success());
    }
}

impl Drop for Stock {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Runs `openvpn` to its end, as to make a key.
pub(crate) fn openvpn(words: &[&str], file: &Path) {
    let status = Command::new("openvpn").args(words).arg(file).stdout(Stdio::null()).status();
    assert!(status.unwrap().success(), "openvpn {words:?}");
}
