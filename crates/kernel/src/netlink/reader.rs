//! Reads messages and their attributes (`linux/netlink.h`). Pure.
//!
//! Unknown, short or truncated messages and attributes are skipped, never errors.

use std::io;

use netlink_packet_core::NLM_F_ACK_TLVS;
use rustix::io::Errno;

use super::error::RequestError;

/// Length of `struct nlmsghdr`, which every message and every error's echo begins with.
pub(crate) const HEADER_LEN: usize = 16;
/// Length of `struct nlattr`.
pub(super) const ATTRIBUTE_HEADER_LEN: usize = 4;
/// The bits of an attribute's type that are its type (NLA_TYPE_MASK).
const TYPE_MASK: u16 = 0x3fff;

const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const NLMSG_OVERRUN: u16 = 4;
/// Below are netlink's own messages (NLMSG_MIN_TYPE).
const NLMSG_MIN_TYPE: u16 = 0x10;
/// Attribute of an extended acknowledgement that holds the kernel's explanation.
const NLMSGERR_ATTR_MSG: u16 = 1;

/// A message of the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Message<'a> {
    /// Its type; the number of a family in generic netlink.
    pub(crate) kind: u16,
    pub(crate) flags: u16,
    /// The request that it answers; 0 in a notice.
    pub(crate) sequence: u32,
    /// In a notice: the port of the request that made the change, as its sender stated it.
    pub(crate) port: u32,
    pub(crate) body: &'a [u8],
}

/// The meaning of a message.
#[derive(Debug)]
pub(crate) enum Meaning {
    /// An object.
    Object,
    /// The end of an answer: an acknowledgement, a refusal, or the end of a dump.
    End(Result<(), RequestError>),
    /// Nothing that matters here.
    Other,
}

impl<'a> Message<'a> {
    /// Reads one message as [`messages`] cuts them.
    pub(crate) fn read(bytes: &'a [u8]) -> Option<Self> {
        Some(Self {
            kind: u16_at(bytes, 4)?,
            flags: u16_at(bytes, 6)?,
            sequence: u32_at(bytes, 8)?,
            port: u32_at(bytes, 12)?,
            body: bytes.get(HEADER_LEN..)?,
        })
    }

    pub(crate) fn meaning(&self) -> Meaning {
        let code = u32_at(self.body, 0).map(u32::cast_signed);
        match (self.kind, code) {
            (NLMSG_DONE | NLMSG_ERROR, Some(0)) => Meaning::End(Ok(())),
            // A dump with nothing in it may end with no code at all.
            (NLMSG_DONE, None) => Meaning::End(Ok(())),
            (NLMSG_DONE | NLMSG_ERROR, Some(code)) => {
                let errno = code.saturating_neg();
                Meaning::End(Err(RequestError::Kernel { errno, reason: self.explanation() }))
            }
            (NLMSG_OVERRUN, _) => {
                let lost = io::Error::from_raw_os_error(Errno::NOBUFS.raw_os_error());
                Meaning::End(Err(RequestError::Socket(lost)))
            }
            (NLMSG_MIN_TYPE.., _) => Meaning::Object,
            _ => Meaning::Other,
        }
    }

    /// The kernel's own words in an extended acknowledgement, after the echo of the request's header.
    fn explanation(&self) -> Option<String> {
        if self.kind != NLMSG_ERROR || self.flags & NLM_F_ACK_TLVS == 0 {
            return None;
        }
        let reason = text(attribute(self.body.get(4 + HEADER_LEN..)?, NLMSGERR_ATTR_MSG)?);
        (!reason.is_empty()).then_some(reason)
    }
}

/// The messages in a datagram; a truncated or senseless rest is left out.
pub(crate) fn messages(mut datagram: &[u8]) -> impl Iterator<Item = Message<'_>> {
    std::iter::from_fn(move || {
        let length = usize::try_from(u32_at(datagram, 0)?).ok()?;
        let message = Message::read(datagram.get(..length)?)?;
        let next = length.next_multiple_of(4).min(datagram.len());
        datagram = datagram.get(next..)?;
        Some(message)
    })
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

/// A text attribute without its final zero.
pub(crate) fn text(value: &[u8]) -> String {
    let end = value.iter().position(|byte| *byte == 0).unwrap_or(value.len());
    String::from_utf8_lossy(&value[..end]).into_owned()
}

pub(crate) fn array_at<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at + N)?.try_into().ok()
}

pub(crate) fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    array_at(bytes, at).map(u16::from_ne_bytes)
}

pub(crate) fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    array_at(bytes, at).map(u32::from_ne_bytes)
}

pub(crate) fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    array_at(bytes, at).map(u64::from_ne_bytes)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_senseless_datagram_ends_the_cutting() {
        let whole = [16, 0, 0, 0, 3, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0];
        assert_eq!(messages(&whole).count(), 1);
        let twice = [whole, whole].concat();
        assert_eq!(messages(&twice).count(), 2);
        for length in 0..16 {
            assert_eq!(messages(&twice[..16 + length]).count(), 1, "{length}");
        }
        assert_eq!(messages(&[0; 64]).count(), 0);
        assert_eq!(messages(&[0xff; 64]).count(), 0);
        let mut odd = whole.to_vec();
        odd[0] = 17;
        odd.push(9);
        assert_eq!(messages(&odd).count(), 1);
    }
}
