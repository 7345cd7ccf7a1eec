//! The meaning of device and socket errors.

use std::io;

use rustix::io::Errno;

use crate::stats::counters::DropReason;

pub(crate) const EINVAL: i32 = Errno::INVAL.raw_os_error();
pub(crate) const EIO: i32 = Errno::IO.raw_os_error();
/// The device of a TAP queue is gone.
pub(crate) const EBADFD: i32 = Errno::BADFD.raw_os_error();
pub(crate) const EMSGSIZE: i32 = Errno::MSGSIZE.raw_os_error();
pub(crate) const EAGAIN: i32 = Errno::AGAIN.raw_os_error();
pub(crate) const ENOBUFS: i32 = Errno::NOBUFS.raw_os_error();
pub(crate) const ENOMEM: i32 = Errno::NOMEM.raw_os_error();
pub(crate) const EINTR: i32 = Errno::INTR.raw_os_error();

/// Errors of a read that say nothing about the next one: empty, interrupted, no memory, or an ICMP
/// error that some earlier datagram met.
pub(crate) fn nothing_now(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionRefused, HostUnreachable, NetworkUnreachable};
    matches!(error.kind(), ConnectionRefused | HostUnreachable | NetworkUnreachable)
        || matches!(error.raw_os_error(), Some(EAGAIN | EINTR | ENOMEM | ENOBUFS | EMSGSIZE))
}

/// Whether there is no room just now.
pub(crate) fn is_full(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(EAGAIN | ENOBUFS | EINTR))
}

/// The reason to count for packets that could not be sent.
pub(crate) fn drop_reason(error: &io::Error) -> DropReason {
    match error.raw_os_error() {
        Some(EMSGSIZE) => DropReason::MessageTooLong,
        // A connection's own queue says it without a number.
        _ if is_full(error) || error.kind() == io::ErrorKind::WouldBlock => DropReason::SendFull,
        _ => DropReason::SendFailed,
    }
}
