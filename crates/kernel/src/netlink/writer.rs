//! Writes messages and their attributes (`linux/netlink.h`). Pure.

use netlink_packet_core::{NLM_F_ACK, NLM_F_DUMP, NLM_F_ECHO, NLM_F_REQUEST};
use zeroize::Zeroize;

use super::reader::{ATTRIBUTE_HEADER_LEN, HEADER_LEN};

/// The bit of an attribute's type that marks it as nested (NLA_F_NESTED).
pub(crate) const NESTED: u16 = 0x8000;
/// The capacity that a message begins with, in bytes.
const CAPACITY: usize = 256;

/// The kind of answer that a request expects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Answer {
    /// None but a refusal, or the object asked for.
    Nothing,
    /// An acknowledgement that it was done.
    Acknowledgement,
    /// Also the object as it is after the change.
    Echo,
    /// All objects.
    Dump,
}

impl Answer {
    const fn flags(self) -> u16 {
        NLM_F_REQUEST
            | match self {
                Self::Nothing => 0,
                Self::Acknowledgement => NLM_F_ACK,
                Self::Echo => NLM_F_ACK | NLM_F_ECHO,
                Self::Dump => NLM_F_DUMP,
            }
    }
}

/// A request, or a list of attributes, as it is written.
#[derive(Default)]
pub(crate) struct Writer {
    bytes: Vec<u8>,
    /// It holds keys and is erased when dropped: the capacity that it began with.
    secret: Option<usize>,
}

impl Writer {
    /// Begins a request of a type.
    pub(crate) fn request(kind: u16, answer: Answer) -> Self {
        Self::begin(kind, answer.flags(), CAPACITY)
    }

    /// Begins a request with further flags.
    pub(crate) fn request_with(kind: u16, answer: Answer, flags: u16) -> Self {
        Self::begin(kind, answer.flags() | flags, CAPACITY)
    }

    /// Begins a request that contains keys and is erased when dropped. It must not grow beyond `capacity`
    /// bytes, since growth would leave a copy that is not erased.
    pub(crate) fn secret_request(kind: u16, answer: Answer, capacity: usize) -> Self {
        let mut request = Self::begin(kind, answer.flags(), capacity);
        request.secret = Some(request.bytes.capacity());
        request
    }

    fn begin(kind: u16, flags: u16, capacity: usize) -> Self {
        let mut bytes = Vec::with_capacity(capacity);
        bytes.extend_from_slice(&0_u32.to_ne_bytes()); // length, by `finish`
        bytes.extend_from_slice(&kind.to_ne_bytes());
        bytes.extend_from_slice(&flags.to_ne_bytes());
        bytes.extend_from_slice(&[0; 8]); // sequence and port number, by `finish`
        Self { bytes, secret: None }
    }

    /// Appends bytes as they are: a family's structure before the attributes, or a part of one.
    pub(crate) fn raw(&mut self, bytes: &[u8]) {
        debug_assert!(self.secret.is_none_or(|room| self.bytes.len() + bytes.len() <= room));
        self.bytes.extend_from_slice(bytes);
    }

    /// Appends zeros up to a length of the whole.
    pub(crate) fn pad_to(&mut self, length: usize) {
        debug_assert!(self.secret.is_none_or(|room| length <= room));
        debug_assert!(self.bytes.len() <= length);
        self.bytes.resize(length, 0);
    }

    /// An attribute with these bytes. One too long for its length field is refused by the kernel.
    pub(crate) fn bytes(&mut self, kind: u16, value: &[u8]) {
        self.nest(kind, |it| it.raw(value));
    }

    pub(crate) fn u8(&mut self, kind: u16, value: u8) {
        self.bytes(kind, &[value]);
    }

    pub(crate) fn u32(&mut self, kind: u16, value: u32) {
        self.bytes(kind, &value.to_ne_bytes());
    }

    pub(crate) fn flag(&mut self, kind: u16) {
        self.bytes(kind, &[]);
    }

    /// A text with its final zero.
    pub(crate) fn text(&mut self, kind: u16, value: &str) {
        self.bytes(kind, &[value.as_bytes(), &[0]].concat());
    }

    /// An attribute with the contents that `inside` writes: attributes, or a structure.
    pub(crate) fn nest(&mut self, kind: u16, inside: impl FnOnce(&mut Self)) {
        let start = self.open(kind);
        inside(self);
        self.close(start);
    }

    /// Begins an attribute, for [`Self::close`].
    pub(crate) fn open(&mut self, kind: u16) -> usize {
        let start = self.bytes.len();
        let length = ATTRIBUTE_HEADER_LEN as u16;
        self.raw(&length.to_ne_bytes());
        self.raw(&kind.to_ne_bytes());
        start
    }

    /// Ends the attribute that begins at `start`.
    pub(crate) fn close(&mut self, start: usize) {
        let length = u16::try_from(self.bytes.len() - start).unwrap_or(u16::MAX);
        if let Some(field) = self.bytes.get_mut(start..start + 2) {
            field.copy_from_slice(&length.to_ne_bytes());
        }
        self.pad_to(self.bytes.len().next_multiple_of(4));
    }

    pub(crate) fn len(&self) -> usize {
        self.bytes.len()
    }

    /// The bytes written, with a header that is not finished.
    pub(crate) fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Sets the type of a request.
    pub(crate) fn set_kind(&mut self, kind: u16) {
        if let Some(field) = self.bytes.get_mut(4..6) {
            field.copy_from_slice(&kind.to_ne_bytes());
        }
    }

    /// Adds flags to those of a request.
    pub(crate) fn add_flags(&mut self, flags: u16) {
        let flags = self.flags() | flags;
        if let Some(field) = self.bytes.get_mut(6..8) {
            field.copy_from_slice(&flags.to_ne_bytes());
        }
    }

    pub(crate) fn flags(&self) -> u16 {
        super::reader::u16_at(&self.bytes, 6).unwrap_or_default()
    }

    /// The whole message, under a sequence number, from a port (0: the kernel knows it).
    pub(crate) fn finish(&mut self, sequence: u32, port: u32) -> &[u8] {
        let length = u32::try_from(self.bytes.len()).unwrap_or(u32::MAX);
        if let Some(header) = self.bytes.get_mut(..HEADER_LEN) {
            header[..4].copy_from_slice(&length.to_ne_bytes());
            header[8..12].copy_from_slice(&sequence.to_ne_bytes());
            header[12..].copy_from_slice(&port.to_ne_bytes());
        }
        &self.bytes
    }

    /// Whether it is erased when dropped, with every copy of it.
    #[cfg(test)]
    pub(crate) fn is_erased(&self) -> bool {
        self.secret == Some(self.bytes.capacity())
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        if self.secret.is_some() {
            self.bytes.zeroize();
        }
    }
}
