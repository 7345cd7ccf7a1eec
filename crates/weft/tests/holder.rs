//! The process that holds the daemon's sockets, started as the daemon does. This is the only test
//! in its file: a process started by a concurrent test would hold its sockets open until exec.
#![allow(clippy::unwrap_used, missing_docs)]

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::UdpSocket;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};

/// Kills the process if a test fails before it has ended.
struct Holder(Child);

impl Drop for Holder {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn start(dir: &Path) -> Holder {
    let listener = UnixListener::bind(dir.join("holder.sock")).unwrap();
    // With a descriptor that the daemon has inherited.
    let mut command = Command::new("sh");
    command.args(["-c", "exec 9</dev/null; exec \"$@\"", "sh", env!("CARGO_BIN_EXE_weft")]);
    command.arg("--runtime-dir").arg(dir).arg("hold-sockets");
    command.stdin(OwnedFd::from(listener)).stdout(Stdio::null()).stderr(Stdio::null());
    Holder(command.spawn().unwrap())
}

fn connect(dir: &Path) -> UnixStream {
    let stream = UnixStream::connect(dir.join("holder.sock")).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    stream
}

/// Sends a word in wire form, and returns the descriptors that come back with the same word.
fn ask(stream: &UnixStream, word: &[u8; 1], sockets: &[UdpSocket]) -> Vec<OwnedFd> {
    let fds: Vec<_> = sockets.iter().map(AsFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); 64];
    let mut rights = SendAncillaryBuffer::new(&mut space);
    assert!(rights.push(SendAncillaryMessage::ScmRights(&fds)));
    rustix::net::sendmsg(stream, &[IoSlice::new(word)], &mut rights, SendFlags::empty()).unwrap();
    let (mut answer, mut space) = ([0], [MaybeUninit::uninit(); 64]);
    let mut rights = RecvAncillaryBuffer::new(&mut space);
    let mut room = [IoSliceMut::new(&mut answer)];
    rustix::net::recvmsg(stream, &mut room, &mut rights, RecvFlags::CMSG_CLOEXEC).unwrap();
    assert_eq!(answer, *word);
    let rights = rights.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(fds) => Some(fds.collect::<Vec<_>>()),
        _ => None,
    });
    rights.flatten().collect()
}

/// A field of `/proc/PID/status`.
fn status(pid: u32, field: &str) -> String {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(field));
    line.unwrap().trim_start_matches(':').trim().to_owned()
}

#[test]
fn it_holds_sockets_with_no_rights_and_nothing_else_open_until_it_is_released() {
    let dir = tempfile::tempdir().unwrap();
    let mut holder = start(dir.path());
    let pid = holder.0.id();
    let daemon = connect(dir.path());
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    let port = socket.local_addr().unwrap().port();
    assert!(ask(&daemon, b"K", &[socket]).is_empty());

    assert_eq!(status(pid, "Name"), "weft-holder");
    for set in ["CapInh", "CapPrm", "CapEff", "CapAmb"] {
        assert_eq!(u64::from_str_radix(&status(pid, set), 16), Ok(0), "{set}");
    }
    assert_eq!(status(pid, "NoNewPrivs"), "1");
    let place = |what: &str| std::fs::read_link(format!("/proc/{pid}/{what}")).unwrap();
    assert_eq!(place("cwd"), Path::new("/"));
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let session = stat.rsplit(") ").next().unwrap().split(' ').nth(3).unwrap();
    assert_eq!(session, pid.to_string(), "a separate session");
    let open = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
    let open: Vec<String> = open
        .map(|entry| std::fs::read_link(entry.unwrap().path()).unwrap())
        .map(|to| to.to_string_lossy().into_owned())
        .collect();
    let sockets = open.iter().filter(|to| to.starts_with("socket:")).count();
    let nulls = open.iter().filter(|to| *to == "/dev/null").count();
    // The listening socket twice, the daemon's connection, and the held socket.
    assert_eq!((sockets, nulls, open.len()), (4, 2, 6), "{open:?}");

    // The daemon is killed; the next one takes the port's socket back.
    drop(daemon);
    assert!(UdpSocket::bind(("127.0.0.1", port)).is_err(), "held");
    let daemon = connect(dir.path());
    let [back] = <[OwnedFd; 1]>::try_from(ask(&daemon, b"T", &[])).unwrap();
    assert_eq!(UdpSocket::from(back).local_addr().unwrap().port(), port);
    assert!(ask(&daemon, b"R", &[]).is_empty());
    UdpSocket::bind(("127.0.0.1", port)).unwrap();
    let limit = Instant::now() + Duration::from_secs(60);
    let ended = loop {
        match holder.0.try_wait().unwrap() {
            Some(status) => break status,
            None => assert!(Instant::now() < limit, "it does not end"),
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    assert!(ended.success() && !dir.path().join("holder.sock").exists(), "{ended}");
}
