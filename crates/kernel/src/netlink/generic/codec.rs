//! Generic netlink: messages, attributes, and the controller that reports a family's number
//! (`linux/netlink.h`, `linux/genetlink.h`). Pure: bytes in, bytes out.
//!
//! Unknown, short or truncated attributes are skipped, never errors.

use netlink_packet_core::{NLM_F_ACK, NLM_F_DUMP, NLM_F_ECHO, NLM_F_REQUEST};
use zeroize::Zeroize;

/// Length of `struct nlmsghdr`.
const NETLINK_HEADER_LEN: usize = 16;
/// Length of `struct genlmsghdr`.
const GENERIC_HEADER_LEN: usize = 4;
/// Length of `struct nlattr`.
const ATTRIBUTE_HEADER_LEN: usize = 4;
/// The bits of an attribute's type that are its type (NLA_TYPE_MASK).
const TYPE_MASK: u16 = 0x3fff;

const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
/// The lowest message type that is a family's number (NLMSG_MIN_TYPE).
const NLMSG_MIN_TYPE: u16 = 16;

/// The controller's own, fixed family number (GENL_ID_CTRL).
const CONTROLLER: u16 = 0x10;
const CTRL_CMD_GETFAMILY: u8 = 3;
const CTRL_ATTR_FAMILY_ID: u16 = 1;
const CTRL_ATTR_FAMILY_NAME: u16 = 2;
const CTRL_ATTR_MCAST_GROUPS: u16 = 7;
const CTRL_ATTR_MCAST_GRP_NAME: u16 = 1;
const CTRL_ATTR_MCAST_GRP_ID: u16 = 2;

/// The kind of answer that a request expects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Answer {
    /// An acknowledgement that it was done.
    Acknowledgement,
    /// Also the object as it is after the change.
    Echo,
    /// All objects.
    Dump,
}

impl Answer {
    fn flags(self) -> u16 {
        NLM_F_REQUEST
            | match self {
                Self::Acknowledgement => NLM_F_ACK,
                Self::Echo => NLM_F_ACK | NLM_F_ECHO,
                Self::Dump => NLM_F_DUMP,
            }
    }
}

/// A request, or a list of attributes within one, as it is written.
#[derive(Default)]
pub(crate) struct Writer {
    bytes: Vec<u8>,
    /// It holds keys and is erased when dropped: the capacity that it began with.
    secret: Option<usize>,
}

impl Writer {
    /// Begins a request to a family.
    pub(crate) fn request(family: u16, version: u8, command: u8, answer: Answer) -> Self {
        Self::begin(family, version, command, answer, 256)
    }

    /// Begins a request that contains keys and is erased when dropped. It must not grow beyond `capacity`
    /// bytes, since growth would leave a copy that is not erased.
    pub(crate) fn secret_request(
        family: u16,
        version: u8,
        command: u8,
        answer: Answer,
        capacity: usize,
    ) -> Self {
        let mut request = Self::begin(family, version, command, answer, capacity);
        request.secret = Some(request.bytes.capacity());
        request
    }

    fn begin(family: u16, version: u8, command: u8, answer: Answer, capacity: usize) -> Self {
        let mut bytes = Vec::with_capacity(capacity);
        bytes.extend_from_slice(&0_u32.to_ne_bytes()); // length, by `finish`
        bytes.extend_from_slice(&family.to_ne_bytes());
        bytes.extend_from_slice(&answer.flags().to_ne_bytes());
        bytes.extend_from_slice(&[0; 8]); // sequence number, by `finish`; port number, by the kernel
        bytes.extend_from_slice(&[command, version, 0, 0]);
        Self { bytes, secret: None }
    }

    /// Appends a family's header between the generic header and the attributes; a multiple of 4 bytes.
    pub(crate) fn header(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// An attribute with these bytes. One too long for its length field is refused by the kernel.
    pub(crate) fn bytes(&mut self, kind: u16, value: &[u8]) {
        let length = u16::try_from(ATTRIBUTE_HEADER_LEN + value.len()).unwrap_or(u16::MAX);
        self.bytes.extend_from_slice(&length.to_ne_bytes());
        self.bytes.extend_from_slice(&kind.to_ne_bytes());
        self.bytes.extend_from_slice(value);
        self.pad();
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

    /// An attribute with the attributes that `inside` writes.
    pub(crate) fn nest(&mut self, kind: u16, inside: impl FnOnce(&mut Self)) {
        let start = self.bytes.len();
        self.bytes(kind, &[]);
        inside(self);
        let length = u16::try_from(self.bytes.len() - start).unwrap_or(u16::MAX);
        if let Some(field) = self.bytes.get_mut(start..start + 2) {
            field.copy_from_slice(&length.to_ne_bytes());
        }
    }

    /// How many bytes are written.
    pub(crate) fn len(&self) -> usize {
        self.bytes.len()
    }

    /// The whole message, under a sequence number.
    pub(crate) fn finish(&mut self, sequence: u32) -> &[u8] {
        let length = u32::try_from(self.bytes.len()).unwrap_or(u32::MAX);
        if let Some(header) = self.bytes.get_mut(..NETLINK_HEADER_LEN) {
            header[..4].copy_from_slice(&length.to_ne_bytes());
            header[8..12].copy_from_slice(&sequence.to_ne_bytes());
        }
        &self.bytes
    }

    /// Whether it is erased when dropped, with every copy of it.
    #[cfg(test)]
    pub(crate) fn is_erased(&self) -> bool {
        self.secret == Some(self.bytes.capacity())
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        if self.secret.is_some() {
            self.bytes.zeroize();
        }
    }
}

/// One message of the kernel, without its netlink header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Received<'a> {
    /// A message of a family.
    Data { family: u16, command: u8, body: &'a [u8] },
    /// The end of a dump, with an error number or 0.
    Done { errno: i32 },
    /// An acknowledgement (error number 0) or a refusal, with the bytes after the number.
    Error { errno: i32, rest: &'a [u8] },
    /// Anything else.
    Other,
}

/// A received message with the sequence number of the request that it answers (0: a notice).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Message<'a> {
    pub(crate) sequence: u32,
    pub(crate) flags: u16,
    pub(crate) what: Received<'a>,
}

/// Reads one message as [`crate::netlink::socket::messages`] cuts them.
pub(crate) fn message(bytes: &[u8]) -> Option<Message<'_>> {
    let family = u16_at(bytes, 4)?;
    let flags = u16_at(bytes, 6)?;
    let sequence = u32_at(bytes, 8)?;
    let payload = bytes.get(NETLINK_HEADER_LEN..)?;
    let errno = || u32_at(payload, 0).map(|code| code.cast_signed().saturating_neg());
    let what = match family {
        NLMSG_ERROR => Received::Error { errno: errno()?, rest: payload.get(4..)? },
        NLMSG_DONE => Received::Done { errno: errno().unwrap_or_default() },
        NLMSG_MIN_TYPE.. => Received::Data {
            family,
            command: *payload.first()?,
            body: payload.get(GENERIC_HEADER_LEN..)?,
        },
        _ => Received::Other,
    };
    Some(Message { sequence, flags, what })
}

/// The attributes in `bytes` with their types. A truncated attribute ends the list.
pub(crate) fn attributes(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let length = usize::from(u16_at(bytes, 0)?);
        let kind = u16_at(bytes, 2)? & TYPE_MASK;
        let value = bytes.get(ATTRIBUTE_HEADER_LEN..length)?;
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, value))
    })
}

/// The value of the first attribute of this type.
pub(crate) fn attribute(bytes: &[u8], wanted: u16) -> Option<&[u8]> {
    attributes(bytes).find(|(kind, _)| *kind == wanted).map(|(_, value)| value)
}

pub(crate) fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..at + 2)?.try_into().ok().map(u16::from_ne_bytes)
}

pub(crate) fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..at + 4)?.try_into().ok().map(u32::from_ne_bytes)
}

pub(crate) fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    bytes.get(at..at + 8)?.try_into().ok().map(u64::from_ne_bytes)
}

/// A text attribute without its final zero.
pub(crate) fn text(value: &[u8]) -> String {
    let end = value.iter().position(|byte| *byte == 0).unwrap_or(value.len());
    String::from_utf8_lossy(&value[..end]).into_owned()
}

/// A family's number and groups, as the controller reports them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct FamilyInfo {
    /// Its number, which is the type of its messages.
    pub(crate) id: u16,
    /// Its multicast groups by name.
    pub(crate) groups: Vec<(String, u32)>,
}

/// Asks for a family by name.
pub(crate) fn get_family(name: &str) -> Writer {
    let answer = Answer::Acknowledgement;
    let mut request = Writer::request(CONTROLLER, 2, CTRL_CMD_GETFAMILY, answer);
    request.text(CTRL_ATTR_FAMILY_NAME, name);
    request
}

/// Reads the controller's answer (the attributes after the generic header).
pub(crate) fn family_info(body: &[u8]) -> Option<FamilyInfo> {
    let id = u16_at(attribute(body, CTRL_ATTR_FAMILY_ID)?, 0)?;
    let list = attribute(body, CTRL_ATTR_MCAST_GROUPS).unwrap_or_default();
    let group = |(_, entry)| {
        let name = text(attribute(entry, CTRL_ATTR_MCAST_GRP_NAME)?);
        Some((name, u32_at(attribute(entry, CTRL_ATTR_MCAST_GRP_ID)?, 0)?))
    };
    Some(FamilyInfo { id, groups: attributes(list).filter_map(group).collect() })
}
