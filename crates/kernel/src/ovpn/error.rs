//! How the kernel's `ovpn` device refuses, and other ways in which a request ends badly.

use std::{fmt, io};

use rustix::io::Errno;

use crate::netlink::error::{REQUEST_TIMEOUT_MS, RequestError};

/// Why a request to the kernel's `ovpn` device failed. The handle remains usable after any of them.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OvpnError {
    /// The host's: a kernel without the module.
    #[error(
        "kernel does not support data channel offload, or may not load its module: boot Linux 6.16 or later with the module ovpn (CONFIG_OVPN), or use a userspace device"
    )]
    Missing,
    /// The kernel refused; the device is unchanged.
    #[error("the kernel refused to {doing}: {refusal}{}", said(reason.as_ref(), *errno))]
    Refused {
        /// The step, in the infinitive.
        doing: String,
        /// The meaning of the error number.
        refusal: Refusal,
        /// The kernel's error number (errno(3)).
        errno: i32,
        /// The kernel's own explanation, if it gave one.
        reason: Option<String>,
    },
    /// A kernel newer than this program, or a fault of ours.
    #[error(
        "cannot parse the kernel's answer while trying to {doing}: update Weft, or report this"
    )]
    Unreadable {
        /// The step, in the infinitive.
        doing: String,
    },
    /// The kernel did not answer.
    #[error(
        "no answer from the kernel within {REQUEST_TIMEOUT_MS} ms while trying to {doing}; the host may be overloaded: try again"
    )]
    TimedOut {
        /// The step, in the infinitive.
        doing: String,
    },
    /// The netlink socket itself failed.
    #[error(
        "the netlink socket failed while trying to {doing}: {source}; the host may be short of memory or descriptors"
    )]
    Socket {
        /// The step, in the infinitive.
        doing: String,
        /// The error of the socket call.
        source: io::Error,
    },
}

/// The meaning of a refusal, its cause, and the remedy (`docs/design/ovpn.md`, kernel device).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Refusal {
    /// ENOENT, by the race with a peer's end, or the caller.
    Absent,
    /// EEXIST: the caller.
    Exists,
    /// EADDRINUSE: the caller.
    AddressTaken,
    /// EBUSY: the caller.
    Busy,
    /// ENODEV: the caller, or the device was removed.
    NoDevice,
    /// ENOTSOCK, for every unsuitable socket: the caller.
    NotASocket,
    /// EOPNOTSUPP: the caller.
    NotSupported,
    /// EPERM or EACCES: how the program was started.
    NotPermitted,
    /// ERANGE: the caller.
    OutOfRange,
    /// EINVAL: the caller.
    Invalid,
    /// Another number.
    Other,
}

impl OvpnError {
    /// Converts a request's failure; `doing` names the action in the infinitive.
    pub(super) fn new(error: RequestError, doing: String) -> Self {
        match error {
            RequestError::Kernel { errno, reason } => {
                Self::Refused { doing, refusal: Refusal::of(errno), errno, reason }
            }
            RequestError::Socket(source) => Self::Socket { doing, source },
            RequestError::TimedOut => Self::TimedOut { doing },
        }
    }

    /// The kernel's error number, or that of the socket call, if there is one.
    #[must_use]
    pub fn errno(&self) -> Option<i32> {
        match self {
            Self::Refused { errno, .. } => Some(*errno),
            Self::Socket { source, .. } => source.raw_os_error(),
            Self::Missing | Self::Unreadable { .. } | Self::TimedOut { .. } => None,
        }
    }

    /// The meaning of the kernel's refusal, if it was one.
    #[must_use]
    pub const fn refusal(&self) -> Option<Refusal> {
        match self {
            Self::Refused { refusal, .. } => Some(*refusal),
            _ => None,
        }
    }
}

impl Refusal {
    /// The meaning of an error number.
    fn of(errno: i32) -> Self {
        match Errno::from_raw_os_error(errno) {
            Errno::NOENT => Self::Absent,
            Errno::EXIST => Self::Exists,
            Errno::ADDRINUSE => Self::AddressTaken,
            Errno::BUSY => Self::Busy,
            Errno::NODEV => Self::NoDevice,
            Errno::NOTSOCK => Self::NotASocket,
            Errno::OPNOTSUPP => Self::NotSupported,
            Errno::PERM | Errno::ACCESS => Self::NotPermitted,
            Errno::RANGE => Self::OutOfRange,
            Errno::INVAL => Self::Invalid,
            _ => Self::Other,
        }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Absent => "there is no such peer or key: it was never created, or is gone",
            Self::Exists => "it already exists: change it, or delete it first",
            Self::AddressTaken => {
                "another peer has one of the addresses: give another, or delete that peer"
            }
            Self::Busy => {
                "the socket serves another device or encapsulation: use a separate socket"
            }
            Self::NoDevice => "there is no such device: it was never created, or was removed",
            Self::NotASocket => {
                "the descriptor is neither a UDP socket nor a connected TCP socket, or serves another device or encapsulation: use a separate socket"
            }
            Self::NotSupported => "the device or its socket cannot do that: use another",
            Self::NotPermitted => "the request needs CAP_NET_ADMIN in the device's network namespace",
            Self::OutOfRange => "a number or a length is out of range: correct it",
            Self::Invalid => "attributes are missing or contradict each other: correct them",
            Self::Other => "see its error number",
        })
    }
}

/// The kernel's explanation, or else the name of its error number.
fn said(reason: Option<&String>, errno: i32) -> String {
    match reason {
        Some(reason) => format!(" (the kernel says: {reason})"),
        None => format!(" ({})", io::Error::from_raw_os_error(errno)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_has_number_meaning_and_the_kernels_words() {
        let kernel = |errno, reason: Option<String>| RequestError::Kernel { errno, reason };
        let error =
            OvpnError::new(kernel(2, Some("cannot find peer with id 7".into())), "x".into());
        assert_eq!((error.errno(), error.refusal()), (Some(2), Some(Refusal::Absent)));
        let text = error.to_string();
        for part in ["refused to x", "no such peer or key", "cannot find peer with id 7"] {
            assert!(text.contains(part), "{text}");
        }
        let other = OvpnError::new(kernel(75, None), "x".into());
        assert_eq!((other.errno(), other.refusal()), (Some(75), Some(Refusal::Other)));
        assert!(other.to_string().contains("os error 75"), "{other}");
        let socket =
            OvpnError::new(RequestError::Socket(io::Error::from_raw_os_error(105)), "x".into());
        assert_eq!((socket.errno(), socket.refusal()), (Some(105), None));
        let late = OvpnError::new(RequestError::TimedOut, "x".into());
        assert_eq!((late.errno(), late.refusal()), (None, None));
    }

    #[test]
    fn every_number_of_a_refusal_has_its_meaning_and_says_what_to_do() {
        // Error numbers of Linux (errno(3)).
        for (errno, refusal, says) in [
            (1, Refusal::NotPermitted, "needs CAP_NET_ADMIN"),
            (2, Refusal::Absent, "no such peer or key"),
            (13, Refusal::NotPermitted, "needs CAP_NET_ADMIN"),
            (16, Refusal::Busy, "use a separate socket"),
            (17, Refusal::Exists, "delete it first"),
            (19, Refusal::NoDevice, "no such device"),
            (22, Refusal::Invalid, "correct them"),
            (34, Refusal::OutOfRange, "correct it"),
            (88, Refusal::NotASocket, "nor a connected TCP socket"),
            (95, Refusal::NotSupported, "use another"),
            (98, Refusal::AddressTaken, "give another"),
            (5, Refusal::Other, "see its error number"),
        ] {
            let error = OvpnError::new(RequestError::Kernel { errno, reason: None }, "x".into());
            assert_eq!((error.errno(), error.refusal()), (Some(errno), Some(refusal)));
            let text = error.to_string();
            let number = format!("(os error {errno})");
            assert!(text.contains(says) && text.contains(&number), "{text}");
        }
    }
}
