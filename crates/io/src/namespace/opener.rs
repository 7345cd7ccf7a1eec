//! Another process that opens network namespaces for this one.
//!
//! A process under Landlock may not open the namespace of a process outside its domain
//! (`/proc/PID/ns/net`), whatever its rules and capabilities are. A process that was started before
//! does so instead, and opens nothing but network namespaces.

use std::ffi::OsStr;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Duration;

use rustix::fs::{Mode, OFlags};
use rustix::io::{Errno, retry_on_intr};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
};

use super::Namespace;

/// Longest path that is asked for, in bytes (PATH_MAX).
const PATH_BYTES_MAX: usize = 4_096;
/// How long an answer is waited for, in milliseconds.
const ANSWER_LIMIT_MS: u64 = 5_000;
/// Question and answer begin with the question's number, so that a late answer is not taken for the next.
const NUMBER_BYTES: usize = size_of::<u64>();
/// After it, an answer has 0 or an error's number.
const ANSWER_BYTES: usize = NUMBER_BYTES + size_of::<i32>();
const SPACE_BYTES: usize = rustix::cmsg_space!(ScmRights(1));

static OPENER: OnceLock<Mutex<Opener>> = OnceLock::new();

/// The two ends for [`set`] and [`serve`].
///
/// # Errors
/// The kernel's.
pub fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let flags = SocketFlags::CLOEXEC;
    Ok(rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?)
}

/// From now on the process at the other end opens files that this one may not. Only the first call counts.
///
/// # Errors
/// The kernel's: it is not a socket.
pub fn set(socket: OwnedFd) -> io::Result<()> {
    for side in [Timeout::Recv, Timeout::Send] {
        set_socket_timeout(&socket, side, Some(Duration::from_millis(ANSWER_LIMIT_MS)))?;
    }
    let _ = OPENER.set(Mutex::new(Opener { socket, asked: 0 }));
    Ok(())
}

/// Checks that the other process answers: it opens the namespace of this one.
///
/// # Errors
/// Its answer, or that it has ended or gives none.
pub fn works() -> io::Result<()> {
    let own = format!("/proc/{}/ns/net", std::process::id());
    open(Path::new(&own)).unwrap_or(Err(io::ErrorKind::NotConnected.into())).map(drop)
}

/// Answers until the other end is closed.
///
/// # Errors
/// The kernel's.
pub fn serve(socket: impl AsFd) -> io::Result<()> {
    let mut room = [0; NUMBER_BYTES + PATH_BYTES_MAX];
    loop {
        let (len, _) =
            retry_on_intr(|| rustix::net::recv(&socket, &mut room[..], RecvFlags::empty()))?;
        if len == 0 {
            return Ok(());
        }
        let Some((number, path)) = room.get(..len).and_then(<[u8]>::split_first_chunk) else {
            continue;
        };
        let opened = look_and_open(Path::new(OsStr::from_bytes(path)));
        let sent = answer(&socket, *number, &opened);
        // The kernel may refuse to pass a descriptor now and allow it later.
        let sent = sent.or_else(|error| match error.kind() {
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => Err(error),
            _ => answer(&socket, *number, &Err(error)),
        });
        match sent {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return Ok(()),
            result => result?,
        }
    }
}

/// Opens a file only if it is a namespace: to open a device or a pipe may have effects.
fn look_and_open(path: &Path) -> io::Result<OwnedFd> {
    let found = rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    // The type's width differs by processor, and the number fits in each.
    if rustix::fs::fstatfs(&found)?.f_type as u64 != libc::NSFS_MAGIC as u64 {
        return Err(Errno::INVAL.into());
    }
    let again = format!("/proc/self/fd/{}", found.as_raw_fd());
    Ok(Namespace::open(Path::new(&again)).map_err(|_| Errno::INVAL)?.fd)
}

fn answer(
    socket: impl AsFd,
    number: [u8; NUMBER_BYTES],
    opened: &io::Result<OwnedFd>,
) -> io::Result<()> {
    let error = opened
        .as_ref()
        .err()
        .map_or(0, |error| error.raw_os_error().filter(|number| *number != 0).unwrap_or(libc::EIO));
    let fds: Vec<BorrowedFd<'_>> = opened.iter().map(AsFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); SPACE_BYTES];
    let mut rights = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        rights.push(SendAncillaryMessage::ScmRights(&fds));
    }
    let error = error.to_le_bytes();
    let bytes = [IoSlice::new(&number), IoSlice::new(&error)];
    retry_on_intr(|| rustix::net::sendmsg(&socket, &bytes, &mut rights, SendFlags::NOSIGNAL))?;
    Ok(())
}

/// Opens a network namespace by way of the other process; `None` if there is none.
pub(super) fn open(path: &Path) -> Option<io::Result<OwnedFd>> {
    let opener = OPENER.get()?;
    Some(opener.lock().unwrap_or_else(PoisonError::into_inner).ask(path))
}

fn ended(error: io::Error) -> io::Error {
    match error.kind() {
        io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => io::Error::new(
            io::ErrorKind::BrokenPipe,
            "the process that opens containers' namespaces for weft has exited; restart weft",
        ),
        io::ErrorKind::WouldBlock => io::Error::new(
            io::ErrorKind::TimedOut,
            "the process that opens containers' namespaces for weft does not answer; try again, or restart weft",
        ),
        _ => error,
    }
}

#[derive(Debug)]
struct Opener {
    socket: OwnedFd,
    asked: u64,
}

impl Opener {
    fn ask(&mut self, path: &Path) -> io::Result<OwnedFd> {
        let path = path.as_os_str().as_bytes();
        if path.len() > PATH_BYTES_MAX {
            return Err(Errno::NAMETOOLONG.into());
        }
        self.asked += 1;
        let number = self.asked.to_le_bytes();
        let question = [&number[..], path].concat();
        retry_on_intr(|| rustix::net::send(&self.socket, &question, SendFlags::NOSIGNAL))
            .map_err(|error| ended(error.into()))?;
        loop {
            let (answered, error, opened) = self.receive().map_err(ended)?;
            match (answered == number, error, opened) {
                (false, ..) => {}
                (true, 0, Some(fd)) => return Ok(fd),
                (true, 0, None) => return Err(Errno::PROTO.into()),
                (true, error, _) => return Err(io::Error::from_raw_os_error(error)),
            }
        }
    }

    fn receive(&self) -> io::Result<([u8; NUMBER_BYTES], i32, Option<OwnedFd>)> {
        let mut bytes = [0; ANSWER_BYTES];
        let mut space = [MaybeUninit::uninit(); SPACE_BYTES];
        let mut rights = RecvAncillaryBuffer::new(&mut space);
        let mut room = [IoSliceMut::new(&mut bytes)];
        let flags = RecvFlags::CMSG_CLOEXEC;
        let received =
            retry_on_intr(|| rustix::net::recvmsg(&self.socket, &mut room, &mut rights, flags))?;
        let opened = rights
            .drain()
            .filter_map(|message| match message {
                RecvAncillaryMessage::ScmRights(fds) => Some(fds),
                _ => None,
            })
            .flatten()
            .next();
        let whole = bytes.split_first_chunk().filter(|_| received.bytes == ANSWER_BYTES);
        match whole.and_then(|(number, error)| Some((*number, error.try_into().ok()?))) {
            Some((number, error)) => Ok((number, i32::from_le_bytes(error), opened)),
            None => Err(io::ErrorKind::BrokenPipe.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::process::{Child, Command};
    use std::thread;

    use super::*;

    /// A process in a separate network namespace.
    struct Other(Child);

    impl Other {
        fn start() -> Self {
            let child = Command::new("unshare").args(["--net", "sleep", "60"]).spawn().unwrap();
            let this = Self(child);
            let own = std::fs::metadata("/proc/self/ns/net").unwrap();
            let is_own = || {
                use std::os::unix::fs::MetadataExt;
                let found = std::fs::metadata(this.namespace());
                found.is_ok_and(|found| found.ino() == own.ino())
            };
            while is_own() {
                thread::sleep(Duration::from_millis(5));
            }
            this
        }

        fn namespace(&self) -> std::path::PathBuf {
            format!("/proc/{}/ns/net", self.0.id()).into()
        }
    }

    impl Drop for Other {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    #[test]
    fn a_namespace_is_handed_over_and_nothing_else_is() {
        let (here, there) = pair().unwrap();
        let serving = thread::spawn(move || serve(there));
        let mut opener = Opener { socket: here, asked: 0 };
        let other = Other::start();
        let wanted = Namespace::open(&other.namespace()).unwrap().identity().unwrap();
        let opened = Namespace::of(opener.ask(&other.namespace()).unwrap());
        assert_eq!(opened.identity().unwrap(), wanted);
        let refused = |opener: &mut Opener, path: &str| {
            opener.ask(Path::new(path)).unwrap_err().raw_os_error()
        };
        for path in ["/dev/null", "/etc/passwd", "/proc/self/ns/mnt", "/proc"] {
            assert_eq!(refused(&mut opener, path), Some(libc::EINVAL), "{path}");
        }
        assert_eq!(refused(&mut opener, "/no/such"), Some(libc::ENOENT));
        assert_eq!(refused(&mut opener, &"x".repeat(5_000)), Some(libc::ENAMETOOLONG));
        assert!(opener.ask(&other.namespace()).is_ok(), "it goes on");
        drop(opener);
        serving.join().unwrap().unwrap();
    }

    #[test]
    fn a_late_answer_is_not_taken_for_the_next() {
        let (here, there) = pair().unwrap();
        let mut opener = Opener { socket: here, asked: 7 };
        let null: io::Result<OwnedFd> = Ok(std::fs::File::open("/dev/null").unwrap().into());
        answer(&there, 7_u64.to_le_bytes(), &null).unwrap();
        answer(&there, 8_u64.to_le_bytes(), &Err(Errno::NOENT.into())).unwrap();
        let error = opener.ask(Path::new("/proc/1/ns/net")).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENOENT));
        drop(there);
        let error = opener.ask(Path::new("/proc/1/ns/net")).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
    }
}
