//! Sending descriptors over unix sockets (SCM_RIGHTS).

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::retry_on_intr;
use rustix::net::addr::SocketAddrArg;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};

/// Descriptors per message at most; the kernel takes 253 (SCM_MAX_FD).
pub(super) const FDS_MAX: usize = 64;

const SPACE_BYTES: usize = rustix::cmsg_space!(ScmRights(FDS_MAX));

/// A request and its answer, by the same word. It is one byte, so that it never arrives in parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Word {
    /// Hold the attached descriptors instead of those before.
    Keep = b'K',
    /// The answer brings the held descriptors; they stay held.
    Take = b'T',
    /// The attached descriptors belong to direct ports: hold them in addition, until their device is gone.
    KeepPorts = b'P',
    /// The answers bring the held descriptors of direct ports; they stay held. An empty answer is the
    /// last.
    TakePorts = b'Q',
    /// Close all held descriptors but those of direct ports; without any of those, the process ends.
    Rest = b'S',
    /// Close all held descriptors and end the process. The byte is the same in every version of Weft, so
    /// that each can end the holder of another.
    Release = b'R',
}

impl Word {
    fn of(byte: u8) -> Option<Self> {
        let all =
            [Self::Keep, Self::Take, Self::KeepPorts, Self::TakePorts, Self::Rest, Self::Release];
        all.into_iter().find(|word| *word as u8 == byte)
    }
}

/// Sends a word with descriptors, at most [`FDS_MAX`].
pub(super) fn send(socket: impl AsFd, word: Word, fds: &[OwnedFd]) -> io::Result<()> {
    let bytes = [word as u8];
    with_rights(fds, |rights| {
        let flags = SendFlags::NOSIGNAL;
        let bytes = [IoSlice::new(&bytes)];
        Ok(retry_on_intr(|| rustix::net::sendmsg(&socket, &bytes, rights, flags))?)
    })
}

/// Sends a datagram with descriptors, at most [`FDS_MAX`], to an address.
pub(super) fn send_to(
    socket: impl AsFd,
    to: &impl SocketAddrArg,
    bytes: &[u8],
    fds: &[OwnedFd],
) -> io::Result<()> {
    with_rights(fds, |rights| {
        let flags = SendFlags::NOSIGNAL;
        let bytes = [IoSlice::new(bytes)];
        Ok(retry_on_intr(|| rustix::net::sendmsg_addr(&socket, to, &bytes, rights, flags))?)
    })
}

fn with_rights(
    fds: &[OwnedFd],
    send: impl FnOnce(&mut SendAncillaryBuffer<'_, '_, '_>) -> io::Result<usize>,
) -> io::Result<()> {
    let borrowed: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); SPACE_BYTES];
    let mut rights = SendAncillaryBuffer::new(&mut space);
    let fits = borrowed.len() <= FDS_MAX
        && (borrowed.is_empty() || rights.push(SendAncillaryMessage::ScmRights(&borrowed)));
    if !fits {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "too many descriptors"));
    }
    send(&mut rights).map(|_| ())
}

/// Waits for a word; `None` if the other end has closed the connection.
pub(super) fn receive(socket: impl AsFd) -> io::Result<Option<(Word, Vec<OwnedFd>)>> {
    let mut byte = [0];
    let mut space = [MaybeUninit::uninit(); SPACE_BYTES];
    let mut rights = RecvAncillaryBuffer::new(&mut space);
    let mut room = [IoSliceMut::new(&mut byte)];
    let flags = RecvFlags::CMSG_CLOEXEC;
    // On a socket with a timeout, even signals without a handler interrupt the call (signal(7)). One such
    // signal is the end of a child that another thread waits for.
    let received = retry_on_intr(|| rustix::net::recvmsg(&socket, &mut room, &mut rights, flags))?;
    let mut fds = Vec::new();
    for message in rights.drain() {
        if let RecvAncillaryMessage::ScmRights(sent) = message {
            fds.extend(sent);
        }
    }
    if received.bytes == 0 {
        return Ok(None);
    }
    // The kernel has closed the descriptors that did not fit.
    if fds.len() > FDS_MAX || received.flags.contains(ReturnFlags::CTRUNC) {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "too many descriptors"));
    }
    let word = Word::of(byte[0]);
    let word = word.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "unknown message"))?;
    Ok(Some((word, fds)))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::io::Write;
    use std::net::UdpSocket;
    use std::os::unix::net::UnixStream;
    use std::process::Command;
    use std::time::Duration;

    use super::*;

    fn sockets(count: usize) -> Vec<OwnedFd> {
        (0..count).map(|_| UdpSocket::bind("127.0.0.1:0").unwrap().into()).collect()
    }

    #[test]
    fn descriptors_arrive_with_their_word_and_are_closed_on_exec() {
        let (here, there) = UnixStream::pair().unwrap();
        let sent = sockets(FDS_MAX);
        send(&here, Word::Keep, &sent).unwrap();
        send(&here, Word::Release, &[]).unwrap();
        let (word, arrived) = receive(&there).unwrap().unwrap();
        assert_eq!((word, arrived.len()), (Word::Keep, FDS_MAX));
        for (sent, arrived) in sent.into_iter().zip(arrived) {
            let flags = rustix::io::fcntl_getfd(&arrived).unwrap();
            assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
            let port = |fd| UdpSocket::from(fd).local_addr().unwrap();
            assert_eq!(port(sent), port(arrived));
        }
        assert!(matches!(receive(&there).unwrap(), Some((Word::Release, fds)) if fds.is_empty()));
        drop(here);
        assert!(receive(&there).unwrap().is_none());
    }

    #[test]
    fn an_interrupted_wait_goes_on() {
        let (here, there) = UnixStream::pair().unwrap();
        there.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let waiting = std::thread::spawn(move || receive(&there));
        // Being stopped interrupts a wait that has a limit, without any handler.
        let script = "for i in 1 2 3 4 5; do sleep 0.01; kill -STOP $0; kill -CONT $0; done";
        let pid = std::process::id().to_string();
        assert!(Command::new("sh").args(["-c", script, &pid]).status().unwrap().success());
        send(&here, Word::Keep, &sockets(1)).unwrap();
        let (word, arrived) = waiting.join().unwrap().unwrap().unwrap();
        assert_eq!((word, arrived.len()), (Word::Keep, 1));
    }

    #[test]
    fn unknown_words_and_surplus_descriptors_are_refused() {
        let (mut here, there) = UnixStream::pair().unwrap();
        here.write_all(b"?").unwrap();
        assert_eq!(receive(&there).unwrap_err().kind(), io::ErrorKind::InvalidData);
        assert!(send(&here, Word::Keep, &sockets(FDS_MAX + 1)).is_err());
        for count in [FDS_MAX + 1, FDS_MAX + 9] {
            let many = sockets(count);
            let borrowed: Vec<BorrowedFd<'_>> = many.iter().map(AsFd::as_fd).collect();
            let mut space = [MaybeUninit::uninit(); 1_024];
            let mut rights = SendAncillaryBuffer::new(&mut space);
            assert!(rights.push(SendAncillaryMessage::ScmRights(&borrowed)));
            let bytes = [IoSlice::new(b"K")];
            rustix::net::sendmsg(&here, &bytes, &mut rights, SendFlags::empty()).unwrap();
            assert_eq!(receive(&there).unwrap_err().kind(), io::ErrorKind::InvalidData);
        }
    }
}
