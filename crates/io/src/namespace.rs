//! Network namespaces: opening one by path, and running code inside one.
//!
//! A network namespace belongs to a thread, not to a process. So [`run_in`] never moves the calling thread, which
//! might be a runtime's worker that other tasks use next. It starts a fresh thread, moves that one, and returns
//! its result.

pub mod opener;

use std::{
    fs::File,
    io,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
        unix::fs::MetadataExt,
    },
    path::Path,
    thread,
};

use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space, unshare_unsafe};

/// The network namespace of the calling thread.
const CURRENT_PATH: &str = "/proc/thread-self/ns/net";

/// An open network namespace. It lives at least as long as this value, also when its last process
/// has ended and its name is gone.
#[derive(Debug)]
pub struct Namespace {
    fd: OwnedFd,
}

impl Namespace {
    /// Opens the network namespace at `path`, such as `/run/netns/NAME` or `/proc/PID/ns/net`.
    ///
    /// # Errors
    /// The error of `open` (or the answer of [`opener`] where this process may not), or `InvalidInput` when
    /// the file is not a network namespace. A plain file, as an unmounted name in `/run/netns` is, and a
    /// namespace of another kind are not.
    pub fn open(path: &Path) -> io::Result<Self> {
        let fd = match File::open(path) {
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                opener::open(path).unwrap_or(Err(error))?
            }
            file => file?.into(),
        };
        if !is_network_namespace(fd.as_fd()) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("{} is not a network namespace", path.display()),
            ));
        }
        Ok(Self { fd })
    }

    /// A descriptor that is known to be one.
    pub(crate) const fn of(fd: OwnedFd) -> Self {
        Self { fd }
    }

    /// Opens the network namespace of the calling thread.
    ///
    /// # Errors
    /// The error of `open`: `/proc` is not mounted.
    pub fn current() -> io::Result<Self> {
        Self::open(Path::new(CURRENT_PATH))
    }

    /// The device and inode of the namespace: equal for two paths to one namespace. An inode is
    /// given again after its namespace has ended, so compare it only with namespaces that are open.
    ///
    /// # Errors
    /// The error of `fstat`.
    pub fn identity(&self) -> io::Result<(u64, u64)> {
        let metadata = File::from(self.fd.try_clone()?).metadata()?;
        Ok((metadata.dev(), metadata.ino()))
    }

    /// The namespace's cookie (socket option `SO_NETNS_COOKIE`, Linux 5.14). It is unique as long as the host
    /// runs, so a namespace replaced under one name is noticed.
    ///
    /// # Errors
    /// As [`run_in`], or the error of `socket` or `getsockopt`.
    pub fn cookie(&self) -> io::Result<u64> {
        run_in(self, current_cookie)?
    }
}

impl AsFd for Namespace {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Device and inode of the file at `path`, as [`Namespace::identity`] tells them of an open namespace.
///
/// # Errors
/// The error of `stat`, or the answer of [`opener`] where this process may not look.
pub fn identity_at(path: &Path) -> io::Result<(u64, u64)> {
    match std::fs::metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => match opener::open(path) {
            Some(opened) => Namespace::of(opened?).identity(),
            None => Err(error),
        },
        found => found.map(|found| (found.dev(), found.ino())),
    }
}

/// Runs `f` on a fresh thread that has been moved into the network namespace `ns`, waits for it
/// and returns its result. A panic in `f` is passed on to the caller.
///
/// It blocks for as long as `f` runs, so `f` must be short: open a socket or a device, set a sysctl.
///
/// # Errors
/// The error of starting a thread or of `setns` (not permitted without `CAP_SYS_ADMIN`; the
/// descriptor is not a network namespace). `f` has not run then.
pub fn run_in<T, F>(ns: impl AsFd, f: F) -> io::Result<T>
where
    F: FnOnce() -> T + Send,
    T: Send,
{
    let ns = ns.as_fd();
    thread::scope(|scope| {
        let inside = move || -> io::Result<T> {
            move_into_link_name_space(ns, Some(LinkNameSpaceType::Network))?;
            Ok(f())
        };
        let running =
            thread::Builder::new().name("weft-netns".into()).spawn_scoped(scope, inside)?;
        running.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Moves the calling thread, and its later children, into a new network namespace that holds nothing but a
/// loopback device that is down. For a process with one thread (`weft run` before it starts the command):
/// other threads stay where they are.
///
/// # Errors
/// The error of `unshare`: not permitted without `CAP_SYS_ADMIN`.
pub fn unshare_network() -> io::Result<()> {
    // SAFETY: the danger of `unshare` is `UnshareFlags::FILES`, which can leave a thread unable to
    // use descriptors that another one opened. Only the network namespace is unshared here, and no
    // descriptor, memory or lock depends on it.
    unsafe { unshare_unsafe(UnshareFlags::NEWNET) }?;
    Ok(())
}

/// Whether `fd` is a namespace (`NS_GET_NSTYPE` answers at all) of the network kind.
fn is_network_namespace(fd: BorrowedFd<'_>) -> bool {
    // SAFETY: NS_GET_NSTYPE takes no argument and only returns an integer; on a descriptor that is
    // no namespace it fails with ENOTTY. `fd` is open for the length of the borrow.
    let kind = unsafe { libc::ioctl(fd.as_raw_fd(), libc::NS_GET_NSTYPE) };
    kind == libc::CLONE_NEWNET
}

/// The cookie of the calling thread's network namespace.
fn current_cookie() -> io::Result<u64> {
    // SAFETY: `socket` takes plain integers and returns a descriptor or -1.
    let raw = unsafe { libc::socket(libc::AF_UNIX, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) };
    if raw < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: `raw` was just opened by this thread and nothing else knows it, so it has one owner.
    let socket = unsafe { OwnedFd::from_raw_fd(raw) };
    let mut cookie = 0u64;
    let mut len = size_of::<u64>() as libc::socklen_t;
    // SAFETY: the option writes at most `len` bytes to `cookie`, which holds exactly that many; both
    // pointers are to live locals.
    let rc = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_NETNS_COOKIE,
            (&raw mut cookie).cast(),
            &raw mut len,
        )
    };
    if rc < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(cookie)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::testing::fresh_namespace;

    #[test]
    fn code_runs_inside_and_the_caller_stays_where_it_is() {
        let before = Namespace::current().unwrap().identity().unwrap();
        let other = fresh_namespace();
        let inside = run_in(&other, || Namespace::current().unwrap().identity().unwrap()).unwrap();
        assert_eq!(inside, other.identity().unwrap());
        assert_ne!(inside, before);
        assert_eq!(Namespace::current().unwrap().identity().unwrap(), before);
    }

    #[test]
    fn a_new_namespace_holds_only_loopback() {
        let other = fresh_namespace();
        let devices =
            run_in(&other, || std::fs::read_to_string("/proc/thread-self/net/dev").unwrap())
                .unwrap();
        let names: Vec<&str> = devices
            .lines()
            .filter_map(|line| line.split_once(':'))
            .map(|(n, _)| n.trim())
            .collect();
        assert_eq!(names, ["lo"]);
    }

    #[test]
    fn cookies_tell_namespaces_apart_and_are_stable() {
        let (one, two) = (fresh_namespace(), fresh_namespace());
        assert_ne!(one.cookie().unwrap(), two.cookie().unwrap());
        assert_eq!(one.cookie().unwrap(), one.cookie().unwrap());
    }

    #[test]
    fn other_files_are_refused_as_network_namespaces() {
        for path in ["/dev/null", "/proc/self/ns/uts", "/etc/hostname"] {
            let error = Namespace::open(Path::new(path)).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{path}");
        }
        let error = Namespace::open(Path::new("/run/netns/weft-no-such")).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn setns_to_something_else_fails_and_runs_nothing() {
        let null = File::open("/dev/null").unwrap();
        let mut ran = false;
        assert!(run_in(&null, || ran = true).is_err());
        assert!(!ran);
    }

    #[test]
    fn a_panic_inside_reaches_the_caller() {
        let here = Namespace::current().unwrap();
        let caught = std::panic::catch_unwind(|| run_in(&here, || panic!("inside")));
        assert!(caught.is_err());
    }
}
