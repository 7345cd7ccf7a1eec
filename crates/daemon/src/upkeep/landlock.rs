//! Landlock: the daemon and all its children write only to files in Weft's own places.
//!
//! Reading and executing stay unrestricted: a namespace may have any path, and programs such as `nft` have
//! different places on each system.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use anyhow::{Context, bail};
use landlock::{
    ABI, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible, LandlockStatus, NetPort,
    PathBeneath, Ruleset, RulesetAttr, RulesetCreated, RulesetCreatedAttr, RulesetStatus, Scope,
    make_bitflags,
};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use weft_io::namespace::opener;

use super::opener as process;
use crate::config::Settings;

/// The newest Landlock version whose rights the rules name; an older kernel supports a subset.
const FILES: ABI = ABI::V5;
/// Where the daemon connects by TCP: long answers of name servers come so, and identity providers are HTTPS. One with
/// another port is in [`Places`].
const DNS_PORT: u16 = 53;
const HTTPS_PORT: u16 = 443;
/// Settings of devices, both Weft's and the containers'.
const SETTINGS: &str = "/proc/sys/net";
/// The same in [`weft_kernel::settings_mount`].
const SETTINGS_IN_MOUNT: &str = "sys/net";
const TUN: &str = "/dev/net/tun";
const NULL: &str = "/dev/null";
/// The lock file that iptables-legacy creates if missing, and the files that show whether it may be called.
const LEGACY_LOCK: &str = "/run/xtables.lock";
const LEGACY_TABLES: [&str; 2] =
    ["/proc/thread-self/net/ip_tables_names", "/proc/thread-self/net/ip6_tables_names"];

/// The mounts of this process (proc_pid_mountinfo(5)).
const MOUNTS: &str = "/proc/self/mountinfo";

/// Rights on files in Weft's own directories: no devices, links or subdirectories.
const OWN: BitFlags<AccessFs> = make_bitflags!(AccessFs::{
    WriteFile | Truncate | MakeReg | MakeSock | RemoveFile
});
const SET: BitFlags<AccessFs> = make_bitflags!(AccessFs::{WriteFile | Truncate});
const DRIVE: BitFlags<AccessFs> = make_bitflags!(AccessFs::{WriteFile | IoctlDev});

/// Keeps the places of the rules open. An unused place in `/proc` may be dropped and recreated, and the rule
/// would not apply to the new one.
static PLACES: OnceLock<Vec<OwnedFd>> = OnceLock::new();

/// The places where the daemon may write.
pub(super) struct Places {
    /// Weft's own directories.
    own: Vec<PathBuf>,
    settings: Option<BorrowedFd<'static>>,
    /// The port of the identity provider that OpenVPN's users log in at.
    provider_port: Option<u16>,
    /// Whether systemd's notification socket is an abstract socket.
    needs_abstract_sockets: bool,
}

impl Places {
    pub(super) fn of(settings: &Settings) -> Self {
        let mut own = vec![settings.state_dir.clone(), settings.runtime_dir.clone()];
        let keylog = crate::config::keylog();
        own.extend(crate::services::docker::prepare(settings));
        crate::services::attach::prepare(settings);
        crate::services::gateway::prepare(&settings.runtime_dir);
        own.extend(keylog.iter().filter_map(|file| file.parent()).map(Path::to_owned));
        let notify = std::env::var_os("NOTIFY_SOCKET");
        Self {
            own,
            settings: weft_kernel::settings_mount(),
            provider_port: crate::services::gateway::provider_port_of(settings),
            needs_abstract_sockets: notify
                .is_some_and(|name| name.as_encoded_bytes().starts_with(b"@")),
        }
    }
}

/// Whether this kernel supports Landlock.
///
/// # Errors
/// The reason why it does not, or that it is switched off.
pub fn has_landlock() -> Result<(), &'static str> {
    let probe = Ruleset::default().set_compatibility(CompatLevel::HardRequirement);
    if probe.handle_access(AccessFs::WriteFile).and_then(Ruleset::create).is_ok() {
        return Ok(());
    }
    // On a kernel without Landlock this changes nothing, and yields the reason.
    let nothing = Ruleset::default()
        .handle_access(AccessFs::WriteFile)
        .and_then(Ruleset::create)
        .and_then(|rules| rules.no_new_privs(false).restrict_self());
    match nothing.map(|status| status.landlock) {
        Ok(LandlockStatus::NotEnabled) => {
            Err("Landlock is disabled in the kernel; add landlock to lsm= on its command line")
        }
        _ => Err("the kernel lacks Landlock (CONFIG_SECURITY_LANDLOCK)"),
    }
}

/// Restricts this process and all its later children by Landlock. Call it while there is one thread, once the
/// directories exist, and before capabilities and system calls are dropped. Returns the kernel's Landlock
/// version.
pub(super) fn restrict(places: &Places) -> anyhow::Result<ABI> {
    has_landlock().map_err(anyhow::Error::msg)?;
    let threads = std::fs::read_dir("/proc/self/task").context("cannot count threads")?.count();
    if threads != 1 {
        bail!("{threads} threads are already running");
    }
    if LEGACY_TABLES.iter().any(|tables| Path::new(tables).exists()) {
        let flags = OFlags::CREATE | OFlags::RDONLY | OFlags::CLOEXEC;
        // With the mode that iptables itself uses. Without the file the accept rule cannot be maintained,
        // which is reported.
        let _ = rustix::fs::open(LEGACY_LOCK, flags, Mode::RUSR | Mode::WUSR);
    }
    let mounts = std::fs::read_to_string(MOUNTS).context(MOUNTS)?;
    if hides_processes(&mounts) {
        bail!("/proc is mounted with hidepid, and hides containers from a daemon under Landlock");
    }
    let socket = process::start().context("cannot start the process that opens namespaces")?;
    opener::set(socket)?;
    opener::works().context("the process that opens namespaces does not work")?;
    enforce(places)
}

/// Whether the process file system shows a process only to those who may trace it, which Landlock forbids.
fn hides_processes(mounts: &str) -> bool {
    let mut of_proc = mounts.lines().rev().filter_map(|line| {
        let (mount, system) = line.split_once(" - ")?;
        let is_it = mount.split(' ').nth(4) == Some("/proc") && system.starts_with("proc ");
        is_it.then_some(system)
    });
    // The last mount hides those before it.
    let options = of_proc.next().and_then(|system| system.split(' ').nth(2)).unwrap_or_default();
    let mut hidepid = options.split(',').filter_map(|option| option.strip_prefix("hidepid="));
    hidepid.any(|value| !["0", "off"].contains(&value))
}

fn enforce(places: &Places) -> anyhow::Result<ABI> {
    let mut kept = Vec::new();
    let mut rules = empty(places.needs_abstract_sockets)?;
    let own = places.own.iter().map(|dir| (dir.as_path(), OWN));
    let others = [(SETTINGS, SET), (NULL, AccessFs::WriteFile.into()), (TUN, DRIVE)];
    for (path, access) in own.chain(others.map(|(path, access)| (Path::new(path), access))) {
        match rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()) {
            Ok(place) => {
                rules = rules.add_rule(PathBeneath::new(&place, access))?;
                kept.push(place);
            }
            Err(Errno::NOENT) => {}
            Err(error) => return Err(error).with_context(|| path.display().to_string()),
        }
    }
    if let Some(mount) = places.settings {
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let place = rustix::fs::openat(mount, SETTINGS_IN_MOUNT, flags, Mode::empty())?;
        rules = rules.add_rule(PathBeneath::new(&place, SET))?;
        kept.push(place);
    }
    for port in [DNS_PORT, HTTPS_PORT].into_iter().chain(places.provider_port) {
        rules = rules.add_rule(NetPort::new(port, AccessNet::ConnectTcp))?;
    }
    let status = rules.restrict_self()?;
    let _ = PLACES.set(kept);
    match (status.ruleset, status.landlock) {
        (RulesetStatus::NotEnforced, _) => bail!("the kernel does not enforce the rules"),
        (_, LandlockStatus::Available { effective_abi, .. }) => Ok(effective_abi),
        _ => bail!("the kernel does not tell its Landlock version"),
    }
}

/// A ruleset that denies everything it handles.
fn empty(abstract_sockets: bool) -> anyhow::Result<RulesetCreated> {
    let scopes = match abstract_sockets {
        true => Scope::Signal.into(),
        false => Scope::Signal | Scope::AbstractUnixSocket,
    };
    let rules = Ruleset::default()
        .handle_access(AccessFs::from_write(FILES))?
        .handle_access(AccessNet::ConnectTcp)?
        .scope(scopes)?;
    Ok(rules.create()?)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::print_stderr)]

    use std::fs;
    use std::io::ErrorKind;
    use std::net::{TcpListener, TcpStream, UdpSocket};
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::{SocketAddr, UnixDatagram, UnixListener};
    use std::process::Command;

    use super::*;

    /// Of an identity provider. Nothing listens there.
    const PROVIDER_PORT: u16 = 8_447;

    /// Runs on a separate thread, which alone is under Landlock; `false` if the kernel has none.
    fn under_landlock(own: &Path, test: impl FnOnce(ABI) + Send) -> bool {
        if let Err(why) = has_landlock() {
            eprintln!("not tested here: {why}");
            return false;
        }
        let own = vec![own.to_owned()];
        let provider_port = Some(PROVIDER_PORT);
        let places = Places { own, settings: None, provider_port, needs_abstract_sockets: false };
        let within = move || test(enforce(&places).unwrap());
        std::thread::scope(|scope| scope.spawn(within).join().unwrap());
        true
    }

    #[test]
    fn a_proc_that_hides_processes_is_found_by_its_mount() {
        let proc =
            |options: &str| format!("22 1 0:20 / /proc rw,nosuid shared:5 - proc proc {options}\n");
        let other = "23 1 0:21 / /x rw - proc proc rw,hidepid=2\n";
        assert!(!hides_processes(&(proc("rw") + other)));
        assert!(!hides_processes(&proc("rw,hidepid=off")));
        for value in ["1", "2", "4", "noaccess", "invisible", "ptraceable"] {
            assert!(hides_processes(&proc(&format!("rw,gid=4,hidepid={value}"))), "{value}");
        }
        assert!(!hides_processes(&(proc("rw,hidepid=2") + &proc("rw"))));
        assert!(!hides_processes(""));
    }

    fn denied<T: std::fmt::Debug>(result: std::io::Result<T>) {
        assert_eq!(result.unwrap_err().kind(), ErrorKind::PermissionDenied);
    }

    #[test]
    fn files_are_written_made_and_removed_in_directories_of_wefts_alone() {
        let (inside, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (own, other) = (inside.path().to_owned(), outside.path().to_owned());
        fs::write(other.join("there"), "as it was").unwrap();
        under_landlock(inside.path(), |abi| {
            fs::write(own.join("a.new"), "state").unwrap();
            fs::rename(own.join("a.new"), own.join("a")).unwrap();
            drop(UnixListener::bind(own.join("api.sock")).unwrap());
            fs::remove_file(own.join("api.sock")).unwrap();
            fs::write(NULL, "nothing").unwrap();

            assert_eq!(fs::read_to_string(other.join("there")).unwrap(), "as it was");
            denied(fs::OpenOptions::new().append(true).open(other.join("there")));
            denied(fs::write(other.join("new"), "x"));
            denied(fs::remove_file(other.join("there")));
            denied(fs::create_dir(other.join("dir")));
            denied(std::os::unix::fs::symlink("a", own.join("link")));
            let moved = fs::rename(own.join("a"), other.join("a")).unwrap_err().kind();
            assert!([ErrorKind::PermissionDenied, ErrorKind::CrossesDevices].contains(&moved));
            if abi >= ABI::V3 {
                denied(
                    rustix::fs::open(other.join("there"), OFlags::TRUNC, Mode::empty())
                        .map_err(Into::into),
                );
            }
        });
        assert_eq!(fs::read_to_string(outside.path().join("there")).unwrap(), "as it was");
    }

    #[test]
    fn a_link_that_leads_out_is_not_followed_to_a_write() {
        let (inside, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let target = outside.path().join("target");
        std::os::unix::fs::symlink(&target, inside.path().join("state.new")).unwrap();
        let way = inside.path().join("state.new");
        let tested = under_landlock(inside.path(), |_| denied(fs::write(way, "x")));
        assert!(!tested || !target.exists());
    }

    #[test]
    fn settings_of_the_network_are_written_and_those_of_the_system_are_not() {
        let inside = tempfile::tempdir().unwrap();
        under_landlock(inside.path(), |_| {
            let setting = "/proc/sys/net/ipv4/conf/lo/send_redirects";
            let present = fs::read_to_string(setting).unwrap();
            fs::write(setting, present).unwrap();
            let other = "/proc/sys/kernel/hostname";
            denied(fs::OpenOptions::new().write(true).open(other));
        });
    }

    #[test]
    fn programs_that_it_starts_are_bound_as_well() {
        let (inside, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (own, other) = (inside.path().join("made"), outside.path().join("made"));
        let made = |path: &Path| Command::new("touch").arg(path).output().unwrap().status.success();
        under_landlock(inside.path(), |_| {
            assert!(made(&own));
            assert!(!made(&other));
        });
    }

    #[test]
    fn there_is_no_tcp_connection_signal_or_abstract_socket_outwards() {
        let inside = tempfile::tempdir().unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = listener.local_addr().unwrap();
        let name = format!("weft-test-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(name).unwrap();
        let _abstract = UnixDatagram::bind_addr(&address).unwrap();
        let mut other = Command::new("sleep").arg("60").spawn().unwrap();
        let pid = other.id();
        under_landlock(inside.path(), |abi| {
            let udp = UdpSocket::bind("127.0.0.1:0").unwrap();
            udp.send_to(&[0], udp.local_addr().unwrap()).unwrap();
            if abi >= ABI::V4 {
                denied(TcpStream::connect(at));
                // DNS and HTTPS: nothing listens there, or another program does.
                for port in [DNS_PORT, HTTPS_PORT, PROVIDER_PORT] {
                    let opened = TcpStream::connect(("127.0.0.93", port)).map(drop);
                    let why = opened.map_err(|error| error.kind());
                    let is_free = matches!(why, Ok(()) | Err(ErrorKind::ConnectionRefused));
                    assert!(is_free, "{port}: {why:?}");
                }
                // Clients of OpenVPN come in by any port.
                TcpListener::bind("127.0.0.1:0").unwrap();
            }
            if abi >= ABI::V6 {
                denied(UnixDatagram::unbound().unwrap().connect_addr(&address));
                let pid = rustix::process::Pid::from_raw(i32::try_from(pid).unwrap()).unwrap();
                let sent = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
                assert_eq!(sent, Err(Errno::PERM));
                let mut own = Command::new("sleep").arg("60").spawn().unwrap();
                own.kill().unwrap();
                own.wait().unwrap();
            }
        });
        other.kill().unwrap();
        other.wait().unwrap();
    }
}
