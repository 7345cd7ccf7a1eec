//! Both sides of the process; here it is a thread with its own limits.
#![allow(clippy::unwrap_used)]

use std::net::UdpSocket;
use std::thread::JoinHandle;

use weft_kernel::engine::SocketKeeper;

use super::super::PortKeeper;
use super::super::client::Holder;
use super::*;

struct Stage {
    dir: tempfile::TempDir,
    thread: JoinHandle<io::Result<()>>,
}

impl Stage {
    fn new(limit: Duration) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = socket_path(dir.path());
        let listener = UnixListener::bind(&path).unwrap();
        let thread = std::thread::spawn(move || hold(&listener, &path, limit));
        Self { dir, thread }
    }

    fn daemon(&self) -> Holder {
        Holder::new(self.dir.path())
    }

    fn ended(self) {
        self.thread.join().unwrap().unwrap();
        assert!(!socket_path(self.dir.path()).exists());
    }
}

fn sockets() -> (Vec<OwnedFd>, Vec<u16>) {
    let sockets = ["127.0.0.1:0", "[::1]:0"].map(|address| UdpSocket::bind(address).unwrap());
    let ports = sockets.iter().map(|socket| socket.local_addr().unwrap().port()).collect();
    (sockets.into_iter().map(OwnedFd::from).collect(), ports)
}

fn ports(sockets: Vec<OwnedFd>) -> Vec<u16> {
    let port = |fd| UdpSocket::from(fd).local_addr().unwrap().port();
    sockets.into_iter().map(port).collect()
}

fn is_free(port: u16) -> bool {
    UdpSocket::bind(("127.0.0.1", port)).is_ok()
}

/// Whether the port becomes free soon. A child that another test starts holds copies of this process's sockets
/// until it runs its program.
fn gets_free(port: u16) -> bool {
    let until = Instant::now() + Duration::from_secs(5);
    while !is_free(port) && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(5));
    }
    is_free(port)
}

const LONG: Duration = Duration::from_secs(600);

#[test]
fn sockets_outlive_each_daemon_until_they_are_released() {
    let stage = Stage::new(LONG);
    let (first, wanted) = sockets();
    let daemon = stage.daemon();
    assert!(daemon.take().is_empty());
    daemon.keep(first);
    drop(daemon);
    for _ in 0..2 {
        let next = stage.daemon();
        assert_eq!(ports(next.take()), wanted);
        assert!(!is_free(wanted[0]), "taken back and held still");
    }
    // Sockets kept later replace those kept before.
    let (second, others) = sockets();
    let daemon = stage.daemon();
    daemon.keep(second);
    assert!(gets_free(wanted[0]));
    assert_eq!(ports(stage.daemon().take()), others);
    daemon.release();
    assert!(gets_free(others[0]));
    stage.ended();
}

/// Pipes in place of queues: when the writer is dropped, poll(2) reports it like the end of a device.
fn queues(count: usize) -> (Vec<OwnedFd>, Vec<io::PipeWriter>) {
    let pipes = (0..count).map(|_| io::pipe().unwrap());
    pipes.map(|(reader, writer)| (OwnedFd::from(reader), writer)).unzip()
}

#[test]
fn sockets_of_direct_ports_outlive_daemons_until_their_device_is_gone() {
    let stage = Stage::new(LONG);
    let (held, wanted) = sockets();
    let (readers, mut writers) = queues(150);
    let daemon = stage.daemon();
    daemon.keep(held);
    daemon.keep_ports(readers);
    let set = weft_io::redirect::MacSet::new().expect("this test makes an eBPF map, as root");
    daemon.keep_ports(vec![set.as_fd().try_clone_to_owned().unwrap()]);
    daemon.release();
    assert!(gets_free(wanted[0]), "its sockets are held still");
    drop(daemon);
    let next = stage.daemon();
    assert!(next.take().is_empty());
    let taken = next.take_ports();
    assert_eq!(taken.len(), 151);
    assert_eq!(taken.iter().filter(|fd| weft_io::redirect::is_set(fd)).count(), 1);
    // Sockets come and go beside them.
    let (held, wanted) = sockets();
    next.keep(held);
    let (more, further) = queues(1);
    next.keep_ports(more);
    writers.truncate(100);
    let until = Instant::now() + Duration::from_secs(5);
    let mut left = next.take_ports().len();
    while left != 102 && Instant::now() < until {
        left = stage.daemon().take_ports().len();
    }
    assert_eq!(left, 102);
    drop((next, writers, further));
    let last = stage.daemon();
    assert_eq!(ports(last.take()), wanted);
    while last.take_ports().len() > 1 && Instant::now() < until {}
    last.release();
    stage.ended();
}

#[test]
fn nobody_need_run_for_a_release() {
    let dir = tempfile::tempdir().unwrap();
    super::super::release(dir.path());
    // A socket's file without a process, as `kill -9` leaves it.
    drop(UnixListener::bind(socket_path(dir.path())).unwrap());
    super::super::release(dir.path());
    assert!(Holder::new(dir.path()).take().is_empty());
}

#[test]
fn without_a_daemon_it_ends_by_itself_and_with_one_it_does_not() {
    let stage = Stage::new(Duration::from_millis(50));
    let (held, wanted) = sockets();
    let daemon = stage.daemon();
    daemon.keep(held);
    std::thread::sleep(Duration::from_millis(200));
    assert!(!stage.thread.is_finished() && !is_free(wanted[0]));
    drop(daemon);
    stage.ended();
    assert!(gets_free(wanted[0]));
}

#[test]
fn a_client_that_sends_nonsense_is_disconnected_and_nothing_is_lost() {
    use std::io::{Read, Write};
    let stage = Stage::new(LONG);
    let (held, wanted) = sockets();
    stage.daemon().keep(held);
    for _ in 0..CLIENTS_MAX * 2 {
        let mut client = UnixStream::connect(socket_path(stage.dir.path())).unwrap();
        client.write_all(b"?").unwrap();
        assert!(!matches!(client.read(&mut [0]), Ok(1..)));
    }
    let daemon = stage.daemon();
    assert_eq!(ports(daemon.take()), wanted);
    daemon.release();
    stage.ended();
}

#[test]
fn another_users_process_gets_nothing() {
    use std::fs::{Permissions, set_permissions};
    use std::io::{Read, Write};
    use std::os::unix::fs::PermissionsExt;

    use weft_io::uninterrupted;

    let stage = Stage::new(LONG);
    let (held, wanted) = sockets();
    let daemon = stage.daemon();
    daemon.keep(held);
    // As if the file's mode were no obstacle.
    let path = socket_path(stage.dir.path());
    set_permissions(stage.dir.path(), Permissions::from_mode(0o755)).unwrap();
    set_permissions(&path, Permissions::from_mode(0o666)).unwrap();
    let stranger = std::thread::spawn(move || {
        let nobody = rustix::process::Uid::from_raw(65_534);
        rustix::thread::set_thread_res_uid(nobody, nobody, nobody)
            .expect("this test changes its user and must run as root");
        let mut stream = UnixStream::connect(path).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        let _ = stream.write_all(b"R");
        uninterrupted(|| stream.read(&mut [0])).map_err(|error| error.kind())
    });
    let answer = stranger.join().unwrap();
    assert!(matches!(answer, Ok(0) | Err(io::ErrorKind::ConnectionReset)), "{answer:?}");
    assert_eq!(ports(stage.daemon().take()), wanted);
    daemon.release();
    stage.ended();
}

#[test]
fn root_and_its_own_user_are_trusted() {
    let own = rustix::process::geteuid().as_raw();
    assert!(is_trusted(0) && is_trusted(own) && !is_trusted(own + 1));
}
