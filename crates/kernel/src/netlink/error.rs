//! How a netlink request ends.

use std::io;

use rustix::io::Errno;

use crate::error::KernelError;

/// How long one exchange may take, in milliseconds. The kernel answers at once unless another
/// process holds its configuration lock.
pub(crate) const REQUEST_TIMEOUT_MS: u64 = 10_000;

/// How one netlink request ended, before its purpose is known.
#[derive(Debug)]
pub(crate) enum RequestError {
    /// The kernel's error number and its explanation.
    Kernel { errno: i32, reason: Option<String> },
    /// The socket failed.
    Socket(io::Error),
    /// No answer in time.
    TimedOut,
}

impl RequestError {
    /// Whether the kernel answered with this error number.
    pub(crate) fn is(&self, wanted: Errno) -> bool {
        matches!(self, Self::Kernel { errno, .. } if *errno == wanted.raw_os_error())
    }

    /// The public error; `doing` names the action in the infinitive ("add address 10.32.0.1/12").
    pub(crate) fn while_doing(self, doing: impl Into<String>) -> KernelError {
        let doing = doing.into();
        if self.is(Errno::PERM) {
            return KernelError::NotPermitted { doing };
        }
        match self {
            Self::Kernel { errno, reason } => {
                KernelError::Refused { doing, source: io::Error::from_raw_os_error(errno), reason }
            }
            Self::Socket(source) => KernelError::Socket { doing, source },
            Self::TimedOut => KernelError::TimedOut { doing, limit_ms: REQUEST_TIMEOUT_MS },
        }
    }
}
