//! The descriptor store that systemd has for a unit (FileDescriptorStoreMax= in its file).

use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixDatagram;
use std::sync::{Mutex, PoisonError};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::retry_on_intr;
use rustix::net::SocketAddrUnix;
use weft_io::handover::{PASSED_MAX, passed_fds};
use weft_kernel::engine::SocketKeeper;

use super::{ANSWER_LIMIT, PortKeeper, rights};

/// The name of our sockets in the store.
const NAME: &str = "weft-esp-udp";
/// The name of direct ports' descriptors. All have the same short name: one environment variable holds all
/// names, and the kernel limits it to 128 KiB.
const PORTS: &str = "p";
/// The name of the socket of Docker's plugin (`FileDescriptorName=` of its unit).
const DOCKER: &str = "weft-docker";

/// Keeps sockets in the descriptor store of the unit whose main process this is.
#[derive(Debug)]
pub(super) struct FdStore {
    manager: SocketAddrUnix,
    /// The store's contents when this process was started: sockets, and descriptors of direct ports.
    passed: Mutex<Vec<OwnedFd>>,
    ports: Mutex<Vec<OwnedFd>>,
    /// The listening socket of Docker's plugin.
    docker: Mutex<Option<OwnedFd>>,
}

impl FdStore {
    /// Takes the descriptors that systemd has passed; `None` if this is not a unit's main process.
    pub(super) fn from_environment() -> Option<Self> {
        let variable = |name: &str| std::env::var_os(name);
        let own = std::process::id();
        let manager = manager(variable, own)?;
        let text = |name: &str| variable(name)?.into_string().ok();
        let (mut passed, mut ports, mut docker) = (Vec::new(), Vec::new(), None);
        let names = listed(text, own).unwrap_or_default();
        for (fd, name) in passed_fds(names.len()).into_iter().zip(names) {
            match name.as_str() {
                NAME => passed.extend(fd),
                PORTS => ports.extend(fd),
                DOCKER => docker = fd,
                _ => {}
            }
        }
        let (passed, ports) = (Mutex::new(passed), Mutex::new(ports));
        Some(Self { manager, passed, ports, docker: Mutex::new(docker) })
    }

    /// The listening socket of Docker's plugin; `None` on a second call.
    pub(super) fn take_docker_socket(&self) -> Option<OwnedFd> {
        self.docker.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn tell(&self, message: &str, fds: &[OwnedFd]) -> io::Result<()> {
        let socket = UnixDatagram::unbound()?;
        socket.set_write_timeout(Some(ANSWER_LIMIT))?;
        rights::send_to(&socket, &self.manager, message.as_bytes(), fds)
    }

    fn remove(&self) -> io::Result<()> {
        self.tell(&format!("FDSTOREREMOVE=1\nFDNAME={NAME}"), &[])?;
        // Systemd closes this descriptor once it has processed the earlier messages.
        let (reader, writer) = io::pipe()?;
        self.tell("BARRIER=1", &[writer.into()])?;
        let limit = Timespec::try_from(ANSWER_LIMIT).ok();
        let mut waiting = [PollFd::new(&reader, PollFlags::IN)];
        retry_on_intr(|| poll(&mut waiting, limit.as_ref()))?;
        Ok(())
    }
}

impl SocketKeeper for FdStore {
    fn take(&self) -> Vec<OwnedFd> {
        std::mem::take(&mut *self.passed.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn keep(&self, sockets: Vec<OwnedFd>) {
        // An error on a UDP socket does not make it useless, so systemd must not drop it for one.
        let message = format!("FDSTORE=1\nFDNAME={NAME}\nFDPOLL=0");
        // Systemd does not store a descriptor twice.
        if let Err(error) = self.tell(&message, &sockets) {
            tracing::warn!(%error, "systemd does not keep the sockets for ESP in UDP");
        }
    }

    fn release(&self) {
        drop(self.take());
        if let Err(error) = self.remove() {
            tracing::warn!(%error, "systemd still keeps the sockets for ESP in UDP");
        }
    }
}

impl PortKeeper for FdStore {
    fn take_ports(&self) -> Vec<OwnedFd> {
        std::mem::take(&mut *self.ports.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn keep_ports(&self, fds: Vec<OwnedFd>) {
        let (sets, queues): (Vec<_>, Vec<_>) = fds.into_iter().partition(weft_io::redirect::is_set);
        // Systemd closes a queue itself once its device is gone, since that is an error. A set always has one.
        let queue = format!("FDSTORE=1\nFDNAME={PORTS}");
        let set = format!("{queue}\nFDPOLL=0");
        for (message, fds) in [(&queue, &queues), (&set, &sets)] {
            for some in fds.chunks(rights::FDS_MAX) {
                if let Err(error) = self.tell(message, some) {
                    tracing::warn!(%error, "systemd does not keep direct ports");
                    return;
                }
            }
        }
    }
}

/// The manager's socket, if it manages this very process; children inherit the variable.
fn manager(variable: impl Fn(&str) -> Option<OsString>, own: u32) -> Option<SocketAddrUnix> {
    if variable("SYSTEMD_EXEC_PID").is_some_and(|pid| pid.to_str() != Some(&own.to_string())) {
        return None;
    }
    let socket = variable("NOTIFY_SOCKET")?;
    match socket.as_bytes() {
        [b'@', name @ ..] => SocketAddrUnix::new_abstract_name(name).ok(),
        path @ [b'/', ..] => SocketAddrUnix::new(path).ok(),
        _ => None,
    }
}

/// The names of the descriptors passed to this process, in order.
fn listed(text: impl Fn(&str) -> Option<String>, own: u32) -> Option<Vec<String>> {
    if text("LISTEN_PID")?.parse() != Ok(own) {
        return None;
    }
    let count = text("LISTEN_FDS")?.parse::<usize>().ok()?.min(PASSED_MAX);
    let mut names: Vec<String> =
        text("LISTEN_FDNAMES")?.split(':').take(count).map(str::to_owned).collect();
    names.resize(count, String::new());
    Some(names)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::collections::BTreeMap;
    use std::io::IoSliceMut;
    use std::mem::MaybeUninit;
    use std::net::UdpSocket;
    use std::os::fd::AsFd;
    use std::process::Command;
    use std::time::Duration;

    use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};

    use super::*;

    /// One message to the manager, with its descriptors.
    fn next(manager: &UnixDatagram) -> (String, Vec<OwnedFd>) {
        let (mut bytes, mut space) = ([0; 256], [MaybeUninit::uninit(); 256]);
        let mut rights = RecvAncillaryBuffer::new(&mut space);
        let mut room = [IoSliceMut::new(&mut bytes)];
        let flags = RecvFlags::CMSG_CLOEXEC;
        let received =
            retry_on_intr(|| rustix::net::recvmsg(manager, &mut room, &mut rights, flags));
        let length = received.unwrap().bytes;
        let fds = rights.drain().filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(fds) => Some(fds.collect::<Vec<OwnedFd>>()),
            _ => None,
        });
        let fds = fds.flatten().collect();
        (String::from_utf8_lossy(&bytes[..length]).into_owned(), fds)
    }

    #[test]
    fn systemd_is_given_the_sockets_and_told_to_close_them() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notify");
        let systemd = UnixDatagram::bind(&path).unwrap();
        systemd.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        let environment = |name: &str| (name == "NOTIFY_SOCKET").then(|| path.clone().into());
        let manager = manager(environment, 7).unwrap();
        let store = FdStore {
            manager,
            passed: Mutex::default(),
            ports: Mutex::default(),
            docker: Mutex::default(),
        };
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let port = socket.local_addr().unwrap();
        store.keep(vec![socket.into()]);
        let (message, mut fds) = next(&systemd);
        let lines: Vec<&str> = message.lines().collect();
        assert_eq!(lines, ["FDSTORE=1", "FDNAME=weft-esp-udp", "FDPOLL=0"]);
        assert_eq!(UdpSocket::from(fds.pop().unwrap()).local_addr().unwrap(), port);
        assert!(fds.is_empty());

        std::thread::scope(|scope| {
            let released = scope.spawn(|| store.release());
            let (message, fds) = next(&systemd);
            let lines: Vec<&str> = message.lines().collect();
            assert_eq!(lines, ["FDSTOREREMOVE=1", "FDNAME=weft-esp-udp"]);
            assert!(fds.is_empty());
            let (message, barrier) = next(&systemd);
            assert_eq!((message.as_str(), barrier.len()), ("BARRIER=1", 1));
            assert!(!released.is_finished(), "release waits for systemd");
            drop(barrier);
            released.join().unwrap();
        });
    }

    #[test]
    fn systemd_is_given_what_belongs_to_direct_ports_and_closes_it_by_itself() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notify");
        let systemd = UnixDatagram::bind(&path).unwrap();
        systemd.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        let environment = |name: &str| (name == "NOTIFY_SOCKET").then(|| path.clone().into());
        let manager = manager(environment, 7).unwrap();
        let store = FdStore {
            manager,
            passed: Mutex::default(),
            ports: Mutex::default(),
            docker: Mutex::default(),
        };
        let queues = (0..3).map(|_| UdpSocket::bind("127.0.0.1:0").unwrap().into());
        let set = weft_io::redirect::MacSet::new().expect("this test makes an eBPF map, as root");
        let set = set.as_fd().try_clone_to_owned().unwrap();
        store.keep_ports(queues.chain([set]).collect());
        let (message, fds) = next(&systemd);
        assert_eq!((message.as_str(), fds.len()), ("FDSTORE=1\nFDNAME=p", 3));
        let (message, fds) = next(&systemd);
        assert_eq!((message.as_str(), fds.len()), ("FDSTORE=1\nFDNAME=p\nFDPOLL=0", 1));
    }

    /// Names the port of the stored socket; set in the process that finds the socket in the store.
    const PORT: &str = "WEFT_TEST_STORED_PORT";

    /// Runs this very test again, started as systemd starts a unit's process.
    #[test]
    fn a_unit_that_is_started_again_finds_its_sockets() {
        if let Ok(port) = std::env::var(PORT) {
            let store = FdStore::from_environment().unwrap();
            let [socket] = <[OwnedFd; 1]>::try_from(store.take()).unwrap();
            let found = UdpSocket::from(socket).local_addr().unwrap().port();
            assert_eq!(found.to_string(), port);
            assert!(store.take().is_empty(), "given back once");
            return;
        }
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let port = socket.local_addr().unwrap().port().to_string();
        let test = "holder::systemd::tests::a_unit_that_is_started_again_finds_its_sockets";
        let script = "exec 3</dev/null 4<&0 </dev/null; export LISTEN_PID=$$; exec \"$@\"";
        let output = Command::new("sh")
            .args(["-c", script, "sh"])
            .arg(std::env::current_exe().unwrap())
            .args(["--exact", test, "--nocapture", "--test-threads", "1"])
            .envs([("NOTIFY_SOCKET", "/run/no/systemd"), ("LISTEN_FDS", "2"), (PORT, &port)])
            .env("LISTEN_FDNAMES", "other:weft-esp-udp")
            .env_remove("SYSTEMD_EXEC_PID")
            .stdin(OwnedFd::from(socket))
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && said.contains("1 passed"), "{output:?}");
    }

    #[test]
    fn only_the_main_process_of_a_unit_has_a_store() {
        let of = |exec: Option<&'static str>, socket: Option<&'static str>| {
            move |name: &str| match name {
                "SYSTEMD_EXEC_PID" => exec.map(OsString::from),
                "NOTIFY_SOCKET" => socket.map(OsString::from),
                _ => None,
            }
        };
        assert!(manager(of(Some("7"), Some("/run/systemd/notify")), 7).is_some());
        assert!(manager(of(None, Some("/run/systemd/notify")), 7).is_some());
        let by_name = manager(of(None, Some("@weft")), 7).unwrap();
        assert_eq!(by_name.abstract_name(), Some(&b"weft"[..]));
        assert!(manager(of(Some("8"), Some("/run/systemd/notify")), 7).is_none());
        assert!(manager(of(Some("7"), None), 7).is_none());
        assert!(manager(of(None, Some("vsock:2:1234")), 7).is_none());
    }

    #[test]
    fn only_what_was_passed_to_this_process_under_our_name_is_taken() {
        let read = |pid: &str, count: &str, names: &str| {
            let all = BTreeMap::from([
                ("LISTEN_PID", pid.to_owned()),
                ("LISTEN_FDS", count.to_owned()),
                ("LISTEN_FDNAMES", names.to_owned()),
            ]);
            listed(|name| all.get(name).cloned(), 7)
        };
        let names = |list: &[&str]| Some(list.iter().map(|name| (*name).to_owned()).collect());
        assert_eq!(read("7", "2", "weft-esp-udp:p"), names(&["weft-esp-udp", "p"]));
        assert_eq!(read("7", "3", "other::p"), names(&["other", "", "p"]));
        assert_eq!(read("7", "1", "x:weft-esp-udp"), names(&["x"]));
        assert_eq!(read("7", "2", "p"), names(&["p", ""]));
        assert_eq!(read("7", "99999999", "p").map(|names| names.len()), Some(PASSED_MAX));
        assert_eq!(read("8", "1", "weft-esp-udp"), None);
        assert_eq!(read("7", "-1", "weft-esp-udp"), None);
        assert_eq!(read("", "", ""), None);
        assert_eq!(listed(|_| None, 7), None);
    }
}
