//! The programs, instruction by instruction.

use weft_packet::ethernet::{self, TYPE_IPV4, TYPE_IPV6};
use weft_packet::{ipv4, ipv6};

use super::keys::{KEY_LEN, head};
use crate::bpf::{
    EXIT, Instruction, KTIME_GET_COARSE_NS, MAP_LOOKUP_ELEM, SECOND_HALF, TO_END, add_value, call,
    fetch_byte, fetch_half, fetch_long, fetch_word, jump, jump_if, jump_if_above, jump_if_least,
    jump_if_same, jump_unless, jump_unless_same, jump_unless_zero, landed, load_long, load_map,
    move_register, move_value, over, shift_right, store_half, store_long, store_word, store_zero,
    subtract_register,
};

/// The interval at which a shortcut lets one frame take the bridge, in units of 2^30 ns (1.07 s). So the bridge keeps
/// knowing the sender's port. It forgets that after 300 s (`ageing_time`, unless somebody sets it lower).
pub(super) const BRIDGE_EVERY: i32 = 10;
pub(super) const SECOND_SHIFT: u32 = 30;

/// A helper by number (bpf-helpers(7)).
const REDIRECT: i32 = 23;
/// Its flag: into the device, as if the frame had come in there.
const BPF_F_INGRESS: i32 = 1;
/// A program's return value that lets the next one decide, and in the end lets the frame pass.
const TCX_NEXT: i32 = -1;
/// Of a program's `struct __sk_buff`: whether a VLAN tag is kept beside the frame, and where the frame's linear part
/// begins and ends. All headers are there, but with rings of packet sockets, whose frames take the switch.
const VLAN_PRESENT_AT: i16 = 20;
const DATA_AT: i16 = 76;
const DATA_END_AT: i16 = 80;

/// Places in a frame; both kinds of IP begin at the same one.
const SENDER_AT: i16 = 6;
const IP_AT: i16 = ethernet::LEN as i16;
const IPV4_UDP_AT: i16 = IP_AT + ipv4::LEN as i16;
const IPV6_UDP_AT: i16 = IP_AT + ipv6::LEN as i16;
/// Bytes of a UDP header that are read: the source port.
const PORT_LEN: i16 = 2;
/// The first byte of an IPv4 header without options.
const IPV4_PLAIN: i32 = 0x45;
const TCP: i32 = ipv4::PROTOCOL_TCP as i32;
const UDP: i32 = ipv4::PROTOCOL_UDP as i32;
/// Source ports of servers that give addresses: their answers take the switch.
const DHCP_SERVER: u16 = 67;
const DHCPV6_SERVER: u16 = 547;

/// The place of a key on a program's stack, which ends at 0.
const KEY_AT: i16 = -(KEY_LEN as i16);

/// The program of the veth end's way in: frames become the TAP's.
pub(super) fn inward(tap: u32) -> Vec<Instruction> {
    vec![move_value(1, tap as i32), move_value(2, BPF_F_INGRESS), call(REDIRECT), EXIT]
}

/// The program of the TAP's way out: frames that may pass the switch by pass, the others go to `local`.
pub(super) fn outward(macs: libc::c_int, mac: [u8; 6], local: u32) -> Vec<Instruction> {
    let pass = [move_value(0, TCX_NEXT), EXIT];
    let to_switch = [move_value(1, local as i32), move_value(2, 0), call(REDIRECT), EXIT];
    [landed([&check(macs, mac)[..], &pass].concat()), to_switch.to_vec()].concat()
}

/// The program of a port's way in: frames that may pass the switch by go to `tap`, but for one now and then.
pub(super) fn past_the_bridge(
    macs: libc::c_int,
    mac: [u8; 6],
    tap: u32,
    bridged: libc::c_int,
) -> Vec<Instruction> {
    let find_time = [
        store_zero(10, -8),
        load_map(1, bridged),
        SECOND_HALF,
        move_register(2, 10),
        add_value(2, -8),
        call(MAP_LOOKUP_ELEM),
        // An array has all its elements.
        jump_if(0, 0, TO_END),
        move_register(6, 0),
    ];
    let redirect = [move_value(1, tap as i32), move_value(2, 0), call(REDIRECT), EXIT];
    let is_due = [
        call(KTIME_GET_COARSE_NS),
        fetch_long(1, 6, 0),
        move_register(2, 0),
        subtract_register(2, 1),
        shift_right(2, SECOND_SHIFT),
        jump_if_least(2, BRIDGE_EVERY, over(&redirect)),
    ];
    let to_bridge = [store_long(6, 0, 0)];
    let all = [&check(macs, mac)[..], &find_time, &is_due, &redirect, &to_bridge].concat();
    [landed(all), vec![move_value(0, TCX_NEXT), EXIT]].concat()
}

/// Goes to the end with a frame that takes the switch. The map `macs` must have its destination, and its sender with
/// this MAC address.
fn check(macs: libc::c_int, mac: [u8; 6]) -> Vec<Instruction> {
    let find = [
        load_map(1, macs),
        SECOND_HALF,
        move_register(2, 10),
        add_value(2, KEY_AT.into()),
        call(MAP_LOOKUP_ELEM),
        jump_if(0, 0, TO_END),
    ];
    let begin = [
        fetch_word(2, 1, VLAN_PRESENT_AT),
        jump_unless_zero(2, TO_END),
        fetch_word(7, 1, DATA_AT),
        fetch_word(8, 1, DATA_END_AT),
        move_register(2, 7),
        add_value(2, (IPV4_UDP_AT + PORT_LEN).into()),
        jump_if_above(2, 8, TO_END),
    ];
    let destination = [
        store_zero(10, KEY_AT),
        store_zero(10, KEY_AT + 8),
        store_zero(10, KEY_AT + 16),
        fetch_word(2, 7, 0),
        store_word(10, KEY_AT, 2),
        fetch_half(2, 7, 4),
        store_half(10, KEY_AT + 4, 2),
    ];
    let [is_ipv4, is_ipv4_too] = load_long(3, head(mac, TYPE_IPV4));
    let ipv4 = of_ipv4();
    let ipv6 = [of_ipv6(mac), vec![jump(over(&ipv4))]].concat();
    let sender = [
        fetch_long(2, 7, SENDER_AT),
        store_long(10, KEY_AT, 2),
        is_ipv4,
        is_ipv4_too,
        jump_if_same(2, 3, over(&ipv6)),
    ];
    [&begin[..], &destination, &find, &sender, &ipv6, &ipv4, &find].concat()
}

/// A packet without options, and from no DHCP server. Its source goes into the key, where zeros follow. Fragments
/// without a port pass: no receiver takes one for the beginning of a packet.
fn of_ipv4() -> Vec<Instruction> {
    vec![
        fetch_byte(2, 7, IP_AT),
        jump_unless(2, IPV4_PLAIN, TO_END),
        fetch_byte(2, 7, IP_AT + 9),
        jump_unless(2, UDP, 2),
        fetch_half(2, 7, IPV4_UDP_AT),
        jump_if(2, DHCP_SERVER.to_be().into(), TO_END),
        fetch_word(2, 7, IP_AT + 12),
        store_word(10, KEY_AT + 8, 2),
    ]
}

/// TCP, or UDP from no DHCP server, and directly behind the header. The rest takes the switch, neighbour discovery
/// in it.
fn of_ipv6(mac: [u8; 6]) -> Vec<Instruction> {
    let [is_ipv6, is_ipv6_too] = load_long(3, head(mac, TYPE_IPV6));
    vec![
        is_ipv6,
        is_ipv6_too,
        jump_unless_same(2, 3, TO_END),
        move_register(2, 7),
        add_value(2, (IPV6_UDP_AT + PORT_LEN).into()),
        jump_if_above(2, 8, TO_END),
        fetch_byte(2, 7, IP_AT + 6),
        jump_if(2, TCP, 3),
        jump_unless(2, UDP, TO_END),
        fetch_half(2, 7, IPV6_UDP_AT),
        jump_if(2, DHCPV6_SERVER.to_be().into(), TO_END),
        fetch_long(2, 7, IP_AT + 8),
        store_long(10, KEY_AT + 8, 2),
        fetch_long(2, 7, IP_AT + 16),
        store_long(10, KEY_AT + 16, 2),
    ]
}
