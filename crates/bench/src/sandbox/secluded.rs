//! Daemons of container runtimes on hosts. Each has its own mount namespace, and so its own directories of sockets,
//! plugins and configurations.

use std::fs::File;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use super::gate::gate;
use super::netns::{Running, last_lines, run};
use super::programs::Programs;
use super::progress::try_wait_until;
use super::{Host, SandboxError};

/// The most lines of a daemon's log that an error quotes.
const LOG_LINES_MAX: usize = 5;

/// Precedes the script of a daemon. Its arguments: the daemon's directory and its control group. `/run` is empty but
/// for the sandbox. `/etc`, `/opt` and `/var` are copies on write, since runtimes write there, and the machine's own
/// notes of CNI are hidden. Without securityfs, a runtime loads no profile of AppArmor into the machine's kernel.
const SECLUDE: &str = r#"set -e
directory=$1
group=$2
mount -t tmpfs -o mode=755 tmpfs "$directory/scratch"
for place in etc opt var; do
  [ -d "/$place" ] || continue
  upper=$directory/scratch/$place
  mkdir "$upper" "$upper.work"
  mount -t overlay -o "lowerdir=/$place,upperdir=$upper,workdir=$upper.work" overlay "/$place"
done
for place in /sys/kernel/security /var/lib/cni; do
  [ ! -d "$place" ] || mount -t tmpfs tmpfs "$place"
done
sandbox=${directory%/*}
mount --rbind "$sandbox" /mnt
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p "$sandbox"
mount --move /mnt "$sandbox"
"#;

/// Makes the root file system of an image with busybox alone, and packs it. Its arguments: a directory, the archive
/// and busybox, which may be linked with libraries.
const PACK: &str = r#"set -e
mkdir -p "$1/bin" "$1/etc" "$1/tmp" "$1/proc" "$1/sys" "$1/dev"
cp "$3" "$1/bin/busybox"
for library in $(ldd "$3" 2>/dev/null | grep -o '/[^ :]*'); do cp -L --parents "$library" "$1"; done
for name in $("$3" --list); do [ "$name" = busybox ] || ln -sf busybox "$1/bin/$name"; done
echo root:x:0:0::/:/bin/sh >"$1/etc/passwd"
tar -C "$1" -cf "$2" .
"#;

/// A daemon to start.
#[derive(Debug)]
pub struct Secluded<'a> {
    /// Its name in error texts.
    pub what: &'a str,
    /// Its directory, directly in that of the sandbox. [`make_directories`] has made it.
    pub directory: &'a Path,
    /// Its programs.
    pub programs: &'a Programs,
    /// Shell commands, of which the last becomes the daemon. `$directory` is its directory, and `$group` the control
    /// group that is removed with the sandbox.
    pub script: &'a str,
    /// It has its own process namespace, and ends with all that it has started.
    pub has_own_processes: bool,
    /// How long it may take until it answers.
    pub limit: Duration,
}

impl Secluded<'_> {
    /// Starts it on a host and waits until it answers.
    ///
    /// # Errors
    /// [`SandboxError::DaemonEnded`] with the end of its log, or [`SandboxError::WaitTimedOut`].
    pub fn start(&self, host: &Host, answers: impl Fn() -> bool) -> Result<Running, SandboxError> {
        let path = self.directory.join("log");
        let opened = File::options().create(true).append(true).open(&path);
        let log = opened.map_err(SandboxError::io(format!("open {}", path.display())))?;
        let words = self.words(host);
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let mut running = host.netns().spawn_logged(&words, &log)?;
        try_wait_until(self.what, self.limit, || match running.ended()? {
            None => Ok(answers()),
            Some(status) => Err(SandboxError::DaemonEnded {
                host: format!("{} ({})", host.nickname(), self.what),
                status: status.to_string(),
                log: last_lines(&std::fs::read_to_string(&path).unwrap_or_default(), LOG_LINES_MAX),
            }),
        })?;
        Ok(running)
    }

    fn words(&self, host: &Host) -> Vec<String> {
        let mut words = self.programs.environment();
        // `ip netns exec` hides the control groups: back into the mount namespace of this process.
        let own = std::process::id().to_string();
        let net = format!("--net={}", host.netns().path());
        let enter = ["nsenter", "--target", &own, "--mount", &net, "unshare", "--mount"];
        words.extend(enter.map(str::to_owned));
        if self.has_own_processes {
            words.extend(["--pid", "--fork", "--kill-child"].map(str::to_owned));
        }
        let script = format!("{SECLUDE}{}", self.script);
        let directory = self.directory.to_string_lossy();
        let shell = ["--propagation", "private", "sh", "-c", &script, "sh", &directory];
        words.extend(shell.map(str::to_owned));
        words.push(host.netns().name().to_owned());
        words
    }
}

/// Makes the directory of a daemon with the parts that its script wants.
///
/// # Errors
/// A part cannot be made.
pub fn make_directories(directory: &Path, parts: &[&str]) -> Result<(), SandboxError> {
    let _gate = gate();
    for part in ["scratch"].iter().chain(parts) {
        let path = directory.join(part);
        std::fs::create_dir_all(&path)
            .map_err(SandboxError::io(format!("make {}", path.display())))?;
    }
    Ok(())
}

/// Makes a root file system with busybox alone, and packs it.
///
/// # Errors
/// A program of it fails.
pub fn pack(programs: &Programs, root: &Path, archive: &Path) -> Result<(), SandboxError> {
    let busybox = programs.program("busybox")?;
    let _gate = gate();
    let words = [root, archive, &busybox];
    run(Command::new("sh").args(["-c", PACK, "sh"]).args(words))?;
    Ok(())
}
