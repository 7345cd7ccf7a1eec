//! Descriptors that another process hands over, and the identity of that process.

use std::io;
use std::mem;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::{Mutex, PoisonError};

/// The first descriptor that a service manager passes (sd_listen_fds(3)).
const PASSED_FIRST: RawFd = 3;
/// Descriptors that are taken from a service manager at most; more are left alone.
pub const PASSED_MAX: usize = 32_768;

/// One thread at a time looks at a descriptor's flag and takes it.
static TAKING: Mutex<()> = Mutex::new(());

/// Takes over the descriptors that a service manager has passed to this process: `count` of them,
/// as its environment says, at most [`PASSED_MAX`]. They are in its order; `None` stands for one
/// that is not there or was taken before. They are closed on exec from here on.
pub fn passed_fds(count: usize) -> Vec<Option<OwnedFd>> {
    let _one = TAKING.lock().unwrap_or_else(PoisonError::into_inner);
    (PASSED_FIRST..).take(count.min(PASSED_MAX)).map(take).collect()
}

/// Closes the descriptors that came to this process by exec, except its standard input and outputs. Otherwise
/// another process may wait for the end of a pipe that this one does not use.
///
/// # Errors
/// `/proc` is not there.
pub fn close_inherited() -> io::Result<()> {
    let _one = TAKING.lock().unwrap_or_else(PoisonError::into_inner);
    for entry in std::fs::read_dir("/proc/self/fd")?.flatten() {
        let number = entry.file_name().to_str().and_then(|name| name.parse().ok());
        drop(number.filter(|fd| *fd >= PASSED_FIRST).and_then(take));
    }
    Ok(())
}

fn take(fd: RawFd) -> Option<OwnedFd> {
    // SAFETY: fcntl reads and writes the flags of a number, whatever it stands for; no memory.
    let flags = unsafe { libc::fcntl(fd, libc::F_GETFD) };
    if flags < 0 || flags & libc::FD_CLOEXEC != 0 {
        return None;
    }
    // SAFETY: as above.
    if unsafe { libc::fcntl(fd, libc::F_SETFD, flags | libc::FD_CLOEXEC) } < 0 {
        return None;
    }
    // SAFETY: it is open, and it came by exec, since this program opens everything close-on-exec. So no code in it
    // owns the number. It is closed on exec now and is not taken again.
    Some(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// The user id of the process at the other end of a unix socket.
///
/// # Errors
/// The kernel's: it is not a connected unix socket.
pub fn peer_uid(socket: impl AsFd) -> io::Result<u32> {
    let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut length = mem::size_of_val(&peer) as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes to `peer`, which are plain integers.
    let rc = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut peer).cast(),
            &raw mut length,
        )
    };
    match rc {
        0 if length as usize == mem::size_of_val(&peer) => Ok(peer.uid),
        0 => Err(io::ErrorKind::InvalidData.into()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::net::UdpSocket;
    use std::os::unix::net::UnixStream;
    use std::path::Path;
    use std::process::{Command, Stdio};

    use super::*;

    /// Names the port that the child process must find behind its descriptor 3.
    const PORT: &str = "WEFT_TEST_PASSED_PORT";

    /// Runs this very test again, alone in a process that has descriptor 3 and no 4.
    #[test]
    fn passed_descriptors_are_taken_once_and_others_never() {
        if let Ok(port) = std::env::var(PORT) {
            return as_child(port.parse().unwrap());
        }
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let port = socket.local_addr().unwrap().port();
        let test = "handover::tests::passed_descriptors_are_taken_once_and_others_never";
        let output = Command::new("sh")
            .args(["-c", "exec 3<&0 4<&- 9</dev/null </dev/null; exec \"$@\"", "sh"])
            .arg(std::env::current_exe().unwrap())
            .args(["--exact", test, "--nocapture", "--test-threads", "1"])
            .env(PORT, port.to_string())
            .stdin(Stdio::from(OwnedFd::from(socket)))
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success() && text.contains("1 passed"), "{output:?}");
    }

    fn as_child(port: u16) {
        // A descriptor that this process opens itself is never taken, whatever its number.
        let own: Vec<UdpSocket> =
            (0..16).map(|_| UdpSocket::bind("127.0.0.1:0").unwrap()).collect();
        let mut taken = passed_fds(2).into_iter();
        let socket = UdpSocket::from(taken.next().unwrap().unwrap());
        assert_eq!(socket.local_addr().unwrap().port(), port);
        let flags = rustix::io::fcntl_getfd(&socket).unwrap();
        assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
        assert!(taken.all(|fd| fd.is_none()), "one of its own was taken");
        assert!(passed_fds(1)[0].is_none(), "taken twice");
        let ninth = || std::fs::read_link("/proc/self/fd/9").ok();
        assert_eq!(ninth().as_deref(), Some(Path::new("/dev/null")));
        close_inherited().unwrap();
        assert_eq!(ninth(), None, "still open");
        assert!(own.iter().all(|socket| socket.local_addr().is_ok()), "its own were closed");
    }

    #[test]
    fn the_peer_of_a_unix_socket_is_known() {
        let (here, _there) = UnixStream::pair().unwrap();
        assert_eq!(peer_uid(&here).unwrap(), rustix::process::geteuid().as_raw());
        let file = tempfile::tempfile().unwrap();
        assert!(peer_uid(&file).is_err());
    }
}
