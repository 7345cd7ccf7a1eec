//! Messages received with one call.

use std::mem;
use std::net::{IpAddr, SocketAddr};
use std::ops::Range;
use std::ptr;

use super::{Control, MESSAGE_ROOM, MESSAGES_MAX, Remote, address_of, zeroed_storage};

/// Received messages, each in its own room of one buffer. Belongs to one thread at a time.
pub struct RecvBatch {
    buffer: Vec<u8>,
    pub(super) headers: Vec<libc::mmsghdr>,
    iovecs: Vec<libc::iovec>,
    names: Vec<libc::sockaddr_storage>,
    controls: Vec<Control>,
    pub(super) filled: usize,
}

// SAFETY: the pointers in `headers` and `iovecs` are to memory that the batch owns alone and that does
// not move with it. Only receiving calls use them, which set all of them again and hold the batch by `&mut`.
// Nothing of it is bound to a thread.
unsafe impl Send for RecvBatch {}

/// One received message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// Its range in [`RecvBatch::buffer`].
    pub range: Range<usize>,
    /// Bytes of each datagram in it; the last may be shorter. At least 1.
    pub segment: usize,
    /// Its source, IPv4 as IPv4.
    pub source: SocketAddr,
    /// IPv4 TOS or IPv6 traffic class of its datagrams: UDP_GRO joins only datagrams that have the same.
    /// Kernels before 6.9 without that fix did not look; it is the first datagram's then.
    pub tos: u8,
    /// It was longer than [`MESSAGE_ROOM`] and is cut.
    pub truncated: bool,
}

impl RecvBatch {
    /// Room for [`MESSAGES_MAX`] messages. Memory that was never filled takes no space.
    #[expect(clippy::new_without_default, reason = "4 MiB are no default")]
    pub fn new() -> Self {
        // SAFETY: an `mmsghdr` is a C struct of integers and pointers, for which zero is valid.
        let header: libc::mmsghdr = unsafe { mem::zeroed() };
        let iovec = libc::iovec { iov_base: ptr::null_mut(), iov_len: 0 };
        Self {
            buffer: vec![0; MESSAGES_MAX * MESSAGE_ROOM],
            headers: vec![header; MESSAGES_MAX],
            iovecs: vec![iovec; MESSAGES_MAX],
            names: vec![zeroed_storage(); MESSAGES_MAX],
            controls: vec![Control::EMPTY; MESSAGES_MAX],
            filled: 0,
        }
    }

    /// Messages in it.
    pub const fn len(&self) -> usize {
        self.filled
    }

    /// Whether it has no message.
    pub const fn is_empty(&self) -> bool {
        self.filled == 0
    }

    /// Bytes of all messages.
    pub fn bytes(&self) -> usize {
        self.headers[..self.filled].iter().map(|header| header.msg_len as usize).sum()
    }

    /// The message at `index`, if there is one.
    pub fn message(&self, index: usize) -> Option<Message> {
        let header = self.headers[..self.filled].get(index)?;
        let start = index * MESSAGE_ROOM;
        let len = (header.msg_len as usize).min(MESSAGE_ROOM);
        let (segment, tos) = self.controls[index].read(header.msg_hdr.msg_controllen as _);
        Some(Message {
            range: start..start + len,
            segment: segment.unwrap_or(len).max(1),
            source: address_of(&self.names[index]),
            tos,
            truncated: header.msg_hdr.msg_flags & libc::MSG_TRUNC != 0,
        })
    }

    /// The address of this host that the message at `index` came to, IPv4 as IPv4. Only sockets of
    /// [`super::Adopted`] ask the kernel for it.
    pub fn destination(&self, index: usize) -> Option<IpAddr> {
        let header = self.headers[..self.filled].get(index)?;
        self.controls[index].destination(header.msg_hdr.msg_controllen as _)
    }

    /// Forgets all messages.
    pub fn clear(&mut self) {
        self.filled = 0;
    }

    /// Appends a message as if it had come from `source` in datagrams of `segment` bytes. For measurements and
    /// tests without a socket. A message longer than [`MESSAGE_ROOM`] is cut, as the kernel would. False if there
    /// is no room for one more message.
    pub fn push(&mut self, run: &[u8], segment: usize, source: &Remote) -> bool {
        let index = self.filled;
        let Some(room) = self.buffer.chunks_exact_mut(MESSAGE_ROOM).nth(index) else {
            return false;
        };
        let Ok(segment) = i32::try_from(segment) else { return false };
        let kept = &run[..run.len().min(room.len())];
        room[..kept.len()].copy_from_slice(kept);
        let (control, control_len) = Control::of_segment(segment);
        let header = &mut self.headers[index];
        header.msg_len = kept.len() as libc::c_uint;
        header.msg_hdr.msg_controllen = control_len as _;
        let is_cut = kept.len() < run.len();
        header.msg_hdr.msg_flags = if is_cut { libc::MSG_TRUNC } else { 0 };
        self.controls[index] = control;
        self.names[index] = source.raw.storage();
        self.filled += 1;
        true
    }

    /// The buffer that [`Message::range`] points into.
    pub fn buffer(&self) -> &[u8] {
        &self.buffer
    }

    /// The buffer, for opening packets in place.
    pub fn buffer_mut(&mut self) -> &mut [u8] {
        &mut self.buffer
    }

    /// Points the first `max` headers at their rooms. The kernel overwrites lengths on each call.
    pub(super) fn prepare(&mut self, max: usize) {
        let rooms = self.buffer.chunks_exact_mut(MESSAGE_ROOM);
        let parts = rooms.zip(&mut self.iovecs).zip(&mut self.names).zip(&mut self.controls);
        for ((((room, iovec), name), control), header) in parts.zip(&mut self.headers).take(max) {
            *iovec = libc::iovec { iov_base: room.as_mut_ptr().cast(), iov_len: room.len() };
            header.msg_len = 0;
            let message = &mut header.msg_hdr;
            message.msg_name = ptr::from_mut(name).cast();
            message.msg_namelen = mem::size_of_val(name) as libc::socklen_t;
            message.msg_iov = iovec;
            message.msg_iovlen = 1;
            message.msg_control = control.0.as_mut_ptr().cast();
            message.msg_controllen = mem::size_of_val(&control.0) as _;
            message.msg_flags = 0;
        }
    }
}

impl std::fmt::Debug for RecvBatch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RecvBatch").field("filled", &self.filled).finish_non_exhaustive()
    }
}
