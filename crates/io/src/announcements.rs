//! A classic BPF program that takes frames by which hosts announce addresses, or check that one is free. A bridge
//! keeps these from ports with `neigh_suppress`.

use std::io;
use std::mem;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Offsets in an untagged frame, in bytes.
const DESTINATION: u32 = 0;
const ETHERTYPE: u32 = 12;
const ARP_OPERATION: u32 = 20;
const ARP_SENDER: u32 = 28;
const ARP_TARGET: u32 = 38;
const NEXT_HEADER: u32 = 20;
const IPV6_SOURCE: u32 = 22;
const ICMP_TYPE: u32 = 54;
const ADVERTISEMENT_FLAGS: u32 = 58;
/// Neighbour solicitation and advertisement.
const SOLICITATION: u32 = 135;
const ADVERTISEMENT: u32 = 136;
const SOLICITED: u32 = 0x40;
/// Whether the frame has a VLAN tag that the device took out of it (`SKF_AD_VLAN_TAG_PRESENT`).
const VLAN_TAG_PRESENT: u32 = (libc::SKF_AD_OFF + 48) as u32;

const LOAD_BYTE: u32 = libc::BPF_LD | libc::BPF_B | libc::BPF_ABS;
const LOAD_HALF: u32 = libc::BPF_LD | libc::BPF_H | libc::BPF_ABS;
const LOAD_WORD: u32 = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
const IS_VALUE: u32 = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
const IS_X: u32 = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_X;
const HAS_BITS: u32 = libc::BPF_JMP | libc::BPF_JSET | libc::BPF_K;
const TO_X: u32 = libc::BPF_MISC | libc::BPF_TAX;
const RETURN: u32 = libc::BPF_RET | libc::BPF_K;

/// Takes of a TAP device's frames those alone.
pub(crate) fn attach_to_tap(queue: BorrowedFd<'_>) -> io::Result<()> {
    with_program(&program(), |filter| {
        // SAFETY: TUNATTACHFILTER reads one `sock_fprog`, and through it the instructions, whose number it tells;
        // both outlive the call.
        unsafe { libc::ioctl(queue.as_raw_fd(), libc::TUNATTACHFILTER, &raw const *filter) }
    })
}

/// Takes of a packet socket's frames those alone that had no VLAN tag.
pub(crate) fn attach_to_socket(socket: BorrowedFd<'_>) -> io::Result<()> {
    let untagged =
        [statement(LOAD_WORD, VLAN_TAG_PRESENT), jump(IS_VALUE, 0, 1, 0), statement(RETURN, 0)];
    with_program(&[&untagged[..], &program()].concat(), |filter| {
        // SAFETY: the kernel reads one `sock_fprog` of the length given, and through it the instructions, whose
        // number it tells; both outlive the call.
        unsafe {
            libc::setsockopt(
                socket.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_ATTACH_FILTER,
                (&raw const *filter).cast(),
                mem::size_of_val(filter) as libc::socklen_t,
            )
        }
    })
}

fn with_program(
    program: &[libc::sock_filter],
    attach: impl FnOnce(&libc::sock_fprog) -> libc::c_int,
) -> io::Result<()> {
    let mut program = program.to_vec();
    let filter =
        libc::sock_fprog { len: program.len() as libc::c_ushort, filter: program.as_mut_ptr() };
    if attach(&filter) < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Takes frames to a group: ARP whose sender address is zero or the target, unsolicited neighbour
/// advertisements, and neighbour solicitations from the unspecified address.
fn program() -> Vec<libc::sock_filter> {
    let take = statement(RETURN, u32::MAX);
    let leave = statement(RETURN, 0);
    let nobody = [
        statement(LOAD_WORD, IPV6_SOURCE),
        jump(IS_VALUE, 0, 0, 7),
        statement(LOAD_WORD, IPV6_SOURCE + 4),
        jump(IS_VALUE, 0, 0, 5),
        statement(LOAD_WORD, IPV6_SOURCE + 8),
        jump(IS_VALUE, 0, 0, 3),
        statement(LOAD_WORD, IPV6_SOURCE + 12),
        jump(IS_VALUE, 0, 0, 1),
        take,
        leave,
    ];
    let unsolicited =
        [statement(LOAD_BYTE, ADVERTISEMENT_FLAGS), jump(HAS_BITS, SOLICITED, 1, 0), take, leave];
    let ipv6 = [
        &[
            statement(LOAD_BYTE, NEXT_HEADER),
            jump(IS_VALUE, libc::IPPROTO_ICMPV6 as u32, 0, 3),
            statement(LOAD_HALF, ICMP_TYPE),
            // The code is 0.
            jump(IS_VALUE, ADVERTISEMENT << 8, 2, 0),
            jump(IS_VALUE, SOLICITATION << 8, 1 + unsolicited.len() as u8, 0),
            leave,
        ][..],
        &unsolicited,
        &nobody,
    ]
    .concat();
    let arp = [
        statement(LOAD_HALF, ARP_OPERATION),
        jump(IS_VALUE, 1, 1, 0),
        jump(IS_VALUE, 2, 0, 6),
        statement(LOAD_WORD, ARP_TARGET),
        statement(TO_X, 0),
        statement(LOAD_WORD, ARP_SENDER),
        jump(IS_VALUE, 0, 1, 0),
        jump(IS_X, 0, 0, 1),
        take,
        leave,
    ];
    [
        &[
            statement(LOAD_BYTE, DESTINATION),
            jump(HAS_BITS, 1, 1, 0),
            leave,
            statement(LOAD_HALF, ETHERTYPE),
            jump(IS_VALUE, libc::ETH_P_ARP as u32, 2, 0),
            jump(IS_VALUE, libc::ETH_P_IPV6 as u32, 1 + arp.len() as u8, 0),
            leave,
        ][..],
        &arp,
        &ipv6,
    ]
    .concat()
}

const fn statement(code: u32, k: u32) -> libc::sock_filter {
    jump(code, k, 0, 0)
}

const fn jump(code: u32, k: u32, jt: u8, jf: u8) -> libc::sock_filter {
    libc::sock_filter { code: code as u16, jt, jf, k }
}
