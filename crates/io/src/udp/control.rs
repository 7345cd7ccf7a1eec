//! Control messages beside datagrams, and the header that `sendmsg` takes.

use std::io;
use std::mem;
use std::net::{IpAddr, SocketAddr};
use std::ptr;

use super::Remote;

/// Room for two control messages with a number in each and one with an address of either family, aligned
/// as `cmsghdr` must be.
#[derive(Clone, Copy)]
#[repr(C, align(8))]
pub(super) struct Control(pub(super) [u8; 96]);

impl Control {
    pub(super) const EMPTY: Self = Self([0; 96]);

    /// The control message by which UDP_GRO tells a segment size, and its length in bytes.
    pub(super) fn of_segment(segment: i32) -> (Self, usize) {
        let mut control = Self::EMPTY;
        let len = control.put(0, libc::SOL_UDP, libc::UDP_GRO, &segment.to_ne_bytes());
        (control, len)
    }

    /// Reads the kernel's messages in the first `len` bytes. They give the segment size of a run merged by
    /// UDP_GRO, and the TOS or traffic class (0 if absent).
    pub(super) fn read(&self, len: usize) -> (Option<usize>, u8) {
        let (mut segment, mut tos) = (None, 0);
        self.each(len, |level, kind, data| match (level, kind, data) {
            (libc::SOL_UDP, libc::UDP_GRO, &[a, b, c, d, ..]) => {
                let size = usize::try_from(i32::from_ne_bytes([a, b, c, d])).ok();
                segment = size.filter(|size| *size > 0);
            }
            (libc::IPPROTO_IP, libc::IP_TOS, &[byte, ..]) => tos = byte,
            (libc::IPPROTO_IPV6, libc::IPV6_TCLASS, &[a, b, c, d, ..]) => {
                tos = i32::from_ne_bytes([a, b, c, d]) as u8;
            }
            _ => {}
        });
        (segment, tos)
    }

    /// Reads the address that a message came to from the first `len` bytes. The kernel tells it where it was
    /// asked to (ip(7), RFC 3542 section 6.1).
    pub(super) fn destination(&self, len: usize) -> Option<IpAddr> {
        let mut destination = None;
        self.each(len, |level, kind, data| match (level, kind) {
            (libc::IPPROTO_IP, libc::IP_PKTINFO) => {
                let at = mem::offset_of!(libc::in_pktinfo, ipi_spec_dst);
                let octets = data.get(at..).and_then(<[u8]>::first_chunk::<4>);
                destination = octets.map(|octets| IpAddr::from(*octets));
            }
            (libc::IPPROTO_IPV6, libc::IPV6_PKTINFO) => {
                let at = mem::offset_of!(libc::in6_pktinfo, ipi6_addr);
                let octets = data.get(at..).and_then(<[u8]>::first_chunk::<16>);
                destination = octets.map(|octets| IpAddr::from(*octets).to_canonical());
            }
            _ => {}
        });
        destination
    }

    /// Level, kind and data of each control message in the first `len` bytes.
    #[inline]
    fn each(&self, len: usize, mut take: impl FnMut(libc::c_int, libc::c_int, &[u8])) {
        let told = &self.0[..len.min(self.0.len())];
        let mut at = 0;
        while let Some(head) = told.get(at..at + mem::size_of::<libc::cmsghdr>()) {
            // SAFETY: `head` has the bytes of a `cmsghdr`, for which all values are valid.
            let head: libc::cmsghdr =
                unsafe { head.as_ptr().cast::<libc::cmsghdr>().read_unaligned() };
            // SAFETY: CMSG_LEN only computes.
            let data_at = at + unsafe { libc::CMSG_LEN(0) } as usize;
            let Some(data) = told.get(data_at..at.saturating_add(head.cmsg_len as _)) else {
                break;
            };
            take(head.cmsg_level, head.cmsg_type, data);
            // SAFETY: CMSG_SPACE only computes.
            at += unsafe { libc::CMSG_SPACE(data.len() as libc::c_uint) } as usize;
        }
    }

    /// Writes one control message at `at`, which is 0 or the result of an earlier call, and returns where it
    /// ends.
    #[inline]
    pub(super) fn put(
        &mut self,
        at: usize,
        level: libc::c_int,
        kind: libc::c_int,
        data: &[u8],
    ) -> usize {
        let data_len = data.len() as libc::c_uint;
        // SAFETY: both only compute.
        let (space, len) = unsafe { (libc::CMSG_SPACE(data_len), libc::CMSG_LEN(data_len)) };
        let end = at + space as usize;
        let room = &mut self.0[at..end];
        // SAFETY: `room` is borrowed exclusively and holds a `cmsghdr` with `data_len` bytes behind it. The buffer
        // is aligned for one, and `at` is a sum of CMSG_SPACEs, which keep that.
        unsafe {
            let message = room.as_mut_ptr().cast::<libc::cmsghdr>();
            (*message).cmsg_level = level;
            (*message).cmsg_type = kind;
            (*message).cmsg_len = len as _;
            ptr::copy_nonoverlapping(data.as_ptr(), libc::CMSG_DATA(message), data.len());
        }
        end
    }
}

/// A header for `sendmsg` that points to the arguments; it must not outlive them.
#[inline]
pub(super) fn send_header(
    iovec: &libc::iovec,
    to: &Remote,
    segment: Option<usize>,
    control: &mut Control,
) -> io::Result<libc::msghdr> {
    // SAFETY: a `msghdr` is a C struct of integers and pointers, for which zero is valid.
    let mut header: libc::msghdr = unsafe { mem::zeroed() };
    let (name, len) = to.raw.as_ptr();
    header.msg_name = name.cast_mut().cast();
    header.msg_namelen = len;
    header.msg_iov = ptr::from_ref(iovec).cast_mut();
    header.msg_iovlen = 1;
    let mut used = 0;
    if let Some(segment) = segment {
        let segment = u16::try_from(segment).map_err(|_| io::ErrorKind::InvalidInput)?;
        used = control.put(used, libc::SOL_UDP, libc::UDP_SEGMENT, &segment.to_ne_bytes());
    }
    if to.tos != 0 {
        // To IPv4 an IPv6 socket sends as an IPv4 one, by the options of IPv4.
        let (level, kind) = match to.address {
            SocketAddr::V4(_) => (libc::IPPROTO_IP, libc::IP_TOS),
            SocketAddr::V6(_) => (libc::IPPROTO_IPV6, libc::IPV6_TCLASS),
        };
        used = control.put(used, level, kind, &libc::c_int::from(to.tos).to_ne_bytes());
    }
    if let Some(source) = to.source {
        used = put_source(control, used, source);
    }
    if used > 0 {
        header.msg_control = control.0.as_mut_ptr().cast();
        header.msg_controllen = used as _;
    }
    Ok(header)
}

/// The address to send from, in the options that tell a receiver a datagram's destination (ip(7), RFC 3542 section
/// 6.2). The route still chooses the device.
#[cold]
fn put_source(control: &mut Control, at: usize, source: IpAddr) -> usize {
    match source {
        IpAddr::V4(v4) => {
            let mut info = [0; mem::size_of::<libc::in_pktinfo>()];
            let place = mem::offset_of!(libc::in_pktinfo, ipi_spec_dst);
            info[place..place + 4].copy_from_slice(&v4.octets());
            control.put(at, libc::IPPROTO_IP, libc::IP_PKTINFO, &info)
        }
        IpAddr::V6(v6) => {
            let mut info = [0; mem::size_of::<libc::in6_pktinfo>()];
            let place = mem::offset_of!(libc::in6_pktinfo, ipi6_addr);
            info[place..place + 16].copy_from_slice(&v6.octets());
            control.put(at, libc::IPPROTO_IPV6, libc::IPV6_PKTINFO, &info)
        }
    }
}
