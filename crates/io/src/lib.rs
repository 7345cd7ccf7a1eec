//! linux: TUN/TAP and UDP in batches, offloads, namespaces: the only crate with unsafe.

mod announcements;
mod bpf;
pub mod cpu;
pub mod encap;
pub mod faults;
pub mod handover;
pub mod heap;
pub mod keylog;
pub mod namespace;
pub mod offload;
pub mod packet;
pub mod poller;
pub mod redirect;
#[cfg(any(test, feature = "registers"))]
pub mod registers;
pub mod steer;
pub mod tap;
#[cfg(test)]
mod testing;
pub mod tun;
pub mod udp;

use std::io;

/// Repeats the call if a signal interrupted it. A socket with a time limit answers so even without any
/// handler, when its process was stopped and goes on (signal(7)); its limit restarts then.
///
/// # Errors
/// As `call`, but for [`io::ErrorKind::Interrupted`].
pub fn uninterrupted<T>(mut call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match call() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            other => return other,
        }
    }
}

/// Why a device or socket could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum IoError {
    /// The host's: the kernel has no TUN driver, or the container hides its device node.
    #[error(
        "/dev/net/tun is missing: load the kernel module `tun`, or pass the device to this container"
    )]
    NoTunDevice,
    /// The host's: not root, or without the capability.
    #[error("not permitted to {what}: run as root or with CAP_NET_ADMIN")]
    NotPermitted {
        /// The operation that was tried.
        what: &'static str,
    },
    /// The configuration's or another program's: the device is in use, or of another kind.
    #[error("the device {name} is in use by another program or is of another kind")]
    DeviceBusy {
        /// Its name.
        name: String,
    },
    /// The configuration's: a device name has 1 to 15 bytes, none of them `/`, `:`, `%` or space.
    #[error("invalid device name `{name}`: use 1 to 15 bytes without `/`, `:`, `%`")]
    BadName {
        /// The name.
        name: String,
    },
    /// Another program's: the UDP port is taken.
    #[error("UDP port {port} is in use by another program: stop it or set another port")]
    PortInUse {
        /// The port.
        port: u16,
    },
    /// The host's: a kernel that was built without IPsec.
    #[error("kernel does not support ESP in UDP on a socket (CONFIG_XFRM): {source}")]
    NoEspInUdp {
        /// Its answer.
        source: io::Error,
    },
    /// The kernel refused something that it should grant.
    #[error("the kernel refused to {what}: {source}")]
    Kernel {
        /// The operation that was tried.
        what: &'static str,
        /// Its answer.
        source: io::Error,
    },
}

impl IoError {
    /// The error of the last system call, which was to do `what`.
    fn last(what: &'static str) -> Self {
        Self::of(what, io::Error::last_os_error())
    }

    fn of(what: &'static str, source: io::Error) -> Self {
        match source.raw_os_error() {
            Some(libc::EPERM | libc::EACCES) => Self::NotPermitted { what },
            _ => Self::Kernel { what, source },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interrupted_calls_are_repeated_and_failed_ones_are_not() {
        let mut answers = [
            Err(io::ErrorKind::Interrupted.into()),
            Err(io::ErrorKind::Interrupted.into()),
            Ok(7),
            Err(io::ErrorKind::WouldBlock.into()),
        ]
        .into_iter();
        let mut call = || uninterrupted(|| answers.next().unwrap_or(Ok(0)));
        assert!(matches!(call(), Ok(7)));
        assert!(call().is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock));
        assert!(matches!(call(), Ok(0)), "the last answer was asked for again");
    }
}
