//! Small eBPF programs by which the kernel sends frames of a container to the vector engine past the switch. They
//! look each frame's destination up in a [`MacSet`].
//!
//! A container with a direct port has two devices: the TAP that is its interface, and one end of a veth pair. The
//! pair's other end is a port of the switch. On the TAP's way out a program lets frames for the MAC addresses in
//! the set pass, to the vector engine. All others (for this host, groups or unknown addresses) leave by the veth
//! pair. On the veth end's way in another program makes frames the TAP's. So the switch sees the same frames as
//! without a direct port, but for those between this container and the addresses of the set.
//!
//! A container with a port of a bridge alone may have a [`Shortcut`]. On the port's way in, a program hands frames
//! for addresses of the set to the engine's TAP device. It leaves all others to the bridge.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use crate::IoError;
use crate::bpf::{
    self, Array, EXIT, Instruction, KTIME_GET_COARSE_NS, MAP_LOOKUP_ELEM, Map, SECOND_HALF,
    add_value, call, fetch_half, fetch_long, fetch_word, jump, jump_if, jump_if_least,
    jump_unless_32, jump_unless_below, jump_unless_zero, load_map, move_register, move_value, over,
    shift_right, store_half, store_long, store_word, store_zero, subtract_register,
};

/// Addresses that a [`MacSet`] holds at most. The kernel takes 1 MiB for its table, and more for
/// each address that is in it.
pub const MACS_MAX: usize = 65_536;

/// The interval at which a shortcut lets one frame take the bridge, in units of 2^30 ns (1.07 s). So the bridge keeps
/// knowing the sender's port. It forgets that after 300 s (`ageing_time`, unless somebody sets it lower).
const BRIDGE_EVERY: i32 = 10;
const SECOND_SHIFT: u32 = 30;

const BPF_PROG_ATTACH: libc::c_int = 8;
const BPF_LINK_CREATE: libc::c_int = 28;
const BPF_LINK_DETACH: libc::c_int = 34;
const BPF_PROG_TYPE_SCHED_CLS: u32 = 3;
/// Linux 6.6.
const BPF_TCX_INGRESS: u32 = 46;
const BPF_TCX_EGRESS: u32 = 47;
/// bpf_redirect: into the device, as if the frame had come in there.
const BPF_F_INGRESS: i32 = 1;

/// Helpers by number (bpf-helpers(7)).
const REDIRECT: i32 = 23;
const SKB_LOAD_BYTES: i32 = 26;
/// Of a program's `struct __sk_buff`: where the frame begins and ends.
const DATA_AT: i16 = 76;
const DATA_END_AT: i16 = 80;
/// The two addresses of a frame.
const ADDRESSES_LEN: i32 = 12;
/// A program's return value that lets the next one decide, and in the end lets the frame pass.
const TCX_NEXT: i32 = -1;

/// The set's name, with a number that changes with the programs that read it. The next daemon takes over only a
/// set of the same name, and with it the programs.
const NAME: [u8; 16] = *b"weft_macs_1\0\0\0\0\0";
/// A key is an address and two bytes of zero.
const KEY_LEN: usize = 8;
/// The value under each address of a set.
const IN_THE_SET: [u8; 1] = [1];

/// MAC addresses that the kernel looks up for each frame. It ends with the last program that reads it.
#[derive(Debug)]
pub struct MacSet {
    map: Map<KEY_LEN, { IN_THE_SET.len() }>,
}

impl MacSet {
    /// An empty set.
    ///
    /// # Errors
    /// A kernel without eBPF, or without the right to use it.
    pub fn new() -> Result<Self, IoError> {
        let map = Map::hash(MACS_MAX, NAME)
            .map_err(|error| IoError::of("create an eBPF map of MAC addresses", error))?;
        Ok(Self { map })
    }

    /// Takes over the set that another process has made and kept, with the programs that read it. It is empty from
    /// then on.
    ///
    /// # Errors
    /// It is not such a set.
    pub fn adopt(fd: OwnedFd) -> Result<Self, IoError> {
        const WHAT: &str = "take over an eBPF map of MAC addresses";
        let map = Map::adopt(fd, MACS_MAX, NAME).map_err(|error| IoError::of(WHAT, error))?;
        let set = Self { map };
        set.clear()?;
        Ok(set)
    }

    /// Adds an address; false if the set is full.
    ///
    /// # Errors
    /// The kernel has no memory for it.
    pub fn insert(&self, mac: [u8; 6]) -> Result<bool, IoError> {
        match self.map.set(key(mac), IN_THE_SET) {
            Ok(()) => Ok(true),
            Err(error) if error.raw_os_error() == Some(libc::E2BIG) => Ok(false),
            Err(error) => Err(IoError::of("add a MAC address to an eBPF map", error)),
        }
    }

    /// Removes an address, if it is in the set.
    ///
    /// # Errors
    /// The kernel refused the change.
    pub fn remove(&self, mac: [u8; 6]) -> Result<(), IoError> {
        match self.map.remove(key(mac)) {
            Err(error) if error.raw_os_error() != Some(libc::ENOENT) => {
                Err(IoError::of("remove a MAC address from an eBPF map", error))
            }
            _ => Ok(()),
        }
    }

    /// Removes all addresses.
    ///
    /// # Errors
    /// The kernel refused the change.
    pub fn clear(&self) -> Result<(), IoError> {
        self.map.clear().map_err(|error| IoError::of("clear an eBPF map of MAC addresses", error))
    }

    /// Whether an address is in the set.
    ///
    /// # Errors
    /// The kernel refused the look-up.
    pub fn contains(&self, mac: [u8; 6]) -> Result<bool, IoError> {
        match self.map.get(key(mac)) {
            Ok(_) => Ok(true),
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(false),
            Err(error) => Err(IoError::of("look up a MAC address in an eBPF map", error)),
        }
    }

    /// Finds out whether the kernel takes the programs and knows where to put them, on no device.
    ///
    /// # Errors
    /// The kernel lacks support for them.
    pub fn self_test(&self) -> Result<(), IoError> {
        load(DIRECT, &self.outward(1))?;
        let inward = load(DIRECT, &inward(1))?;
        // A kernel that knows this attach point reports the missing device.
        match attach(&inward, 0, BPF_TCX_EGRESS) {
            Err(error) if error.raw_os_error() != Some(libc::ENODEV) => {
                return Err(IoError::of(ATTACH, error));
            }
            _ => {}
        }
        match self.shorten(0, [0; 6], 1) {
            Err(IoError::Kernel { source, .. }) if source.raw_os_error() == Some(libc::ENODEV) => {
                Ok(())
            }
            result => result.map(drop),
        }
    }

    /// Puts the programs on a direct port. Its devices, `tap` and the veth end `local` (by index), are new and in
    /// the calling thread's network namespace. They stay as long as the devices, also when this process is gone.
    ///
    /// # Errors
    /// The kernel refused: a kernel before 6.6, no right, a device that is gone.
    pub fn join(&self, tap: u32, local: u32) -> Result<(), IoError> {
        let failed = |error| IoError::of(ATTACH, error);
        attach(&load(DIRECT, &inward(tap))?, local, BPF_TCX_INGRESS).map_err(failed)?;
        attach(&load(DIRECT, &self.outward(local))?, tap, BPF_TCX_EGRESS).map_err(failed)
    }

    /// Frames of a container with this address that come in by `port`, for addresses of the set, go to the device
    /// `tap` instead of the bridge. Both are indexes in the calling thread's network namespace. Of those one in
    /// ten seconds goes to the bridge, which learns by it where the container is.
    ///
    /// # Errors
    /// The kernel refused: a kernel before 6.6, no right, a device that is gone.
    pub fn shorten(&self, port: u32, mac: [u8; 6], tap: u32) -> Result<Shortcut, IoError> {
        let bridged = Array::new(1)
            .map_err(|error| IoError::of("make a table of one time for eBPF", error))?;
        self.shorten_since(port, mac, tap, &bridged)
    }

    /// As [`Self::shorten`]; `bridged` has the time at which a frame last went to the bridge.
    fn shorten_since(
        &self,
        port: u32,
        mac: [u8; 6],
        tap: u32,
        bridged: &Array<8>,
    ) -> Result<Shortcut, IoError> {
        let program = load(SHORTCUT, &self.past_the_bridge(mac, tap, bridged))?;
        let attributes = LinkCreate {
            program: program.as_raw_fd() as u32,
            ifindex: port,
            kind: BPF_TCX_INGRESS,
            ..LinkCreate::default()
        };
        // SAFETY: the fields of the command, without a pointer; it returns a new descriptor.
        let link = unsafe { bpf::descriptor(BPF_LINK_CREATE, &attributes) }
            .map_err(|error| IoError::of(ATTACH, error))?;
        Ok(Shortcut { link })
    }

    /// The program of a port's way in: frames from `mac` for addresses of the set go to `tap`, but for one
    /// now and then.
    fn past_the_bridge(&self, mac: [u8; 6], tap: u32, bridged: &Array<8>) -> Vec<Instruction> {
        let [a, b, c, d, e, f] = mac;
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
        let find_time = [
            store_zero(10, -16),
            load_map(1, bridged.number()),
            SECOND_HALF,
            move_register(2, 10),
            add_value(2, -16),
            call(MAP_LOOKUP_ELEM),
            // An array has all its elements.
            jump_if(0, 0, 1 + over(&is_due) + over(&redirect) + over(&to_bridge)),
            move_register(6, 0),
        ];
        let rest = [&find_time[..], &is_due, &redirect, &to_bridge].concat();
        let find_address = [
            fetch_word(1, 7, 0),
            store_word(10, -8, 1),
            fetch_half(1, 7, 4),
            store_half(10, -4, 1),
            load_map(1, self.map.number()),
            SECOND_HALF,
            move_register(2, 10),
            add_value(2, -8),
            call(MAP_LOOKUP_ELEM),
            jump_if(0, 0, over(&rest)),
        ];
        let rest = [&find_address[..], &rest].concat();
        // Of another sender the bridge would not learn.
        let is_of_mac = [
            fetch_word(1, 7, 6),
            jump_unless_32(1, u32::from_ne_bytes([a, b, c, d]), 2 + over(&rest)),
            fetch_half(1, 7, 10),
            jump_unless_32(1, u32::from(u16::from_ne_bytes([e, f])), over(&rest)),
        ];
        let rest = [&is_of_mac[..], &rest].concat();
        let begin = [
            store_zero(10, -8),
            fetch_word(7, 1, DATA_AT),
            fetch_word(8, 1, DATA_END_AT),
            move_register(2, 7),
            add_value(2, ADDRESSES_LEN),
            jump_unless_below(8, 2, 1),
            jump(over(&rest)),
        ];
        [&begin[..], &rest, &[move_value(0, TCX_NEXT), EXIT]].concat()
    }

    /// The program of the TAP's way out: frames for addresses of the set pass; the others go to `local`.
    fn outward(&self, local: u32) -> Vec<Instruction> {
        vec![
            // The key: six bytes of MAC address, two of zero.
            store_zero(10, -8),
            move_value(2, 0),
            move_register(3, 10),
            add_value(3, -8),
            move_value(4, 6),
            call(SKB_LOAD_BYTES),
            // Too short for an address: to the switch, which drops it.
            jump_unless_zero(0, 6),
            load_map(1, self.map.number()),
            SECOND_HALF,
            move_register(2, 10),
            add_value(2, -8),
            call(MAP_LOOKUP_ELEM),
            jump_unless_zero(0, 4),
            move_value(1, local as i32),
            move_value(2, 0),
            call(REDIRECT),
            EXIT,
            move_value(0, TCX_NEXT),
            EXIT,
        ]
    }
}

/// Whether a descriptor is of a [`MacSet`].
pub fn is_set(fd: &OwnedFd) -> bool {
    Map::<KEY_LEN, { IN_THE_SET.len() }>::is_like(fd.as_fd(), MACS_MAX, NAME).unwrap_or(false)
}

impl AsFd for MacSet {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.map.as_fd()
    }
}

/// A container's way past the bridge; it ends with this, and with the device.
#[derive(Debug)]
pub struct Shortcut {
    link: OwnedFd,
}

impl Drop for Shortcut {
    /// Not by the descriptor's end alone: a program that another thread starts has a copy of it for a moment.
    fn drop(&mut self) {
        let attributes = LinkDetach { link: self.link.as_raw_fd() as u32 };
        // SAFETY: the field of the command, without a pointer. If it fails, the device has gone.
        let _ = unsafe { bpf::bpf(BPF_LINK_DETACH, &attributes) };
    }
}

const fn key([a, b, c, d, e, f]: [u8; 6]) -> [u8; KEY_LEN] {
    [a, b, c, d, e, f, 0, 0]
}

/// Names of the programs, for lists of programs.
const DIRECT: &[u8] = b"weft_direct";
const SHORTCUT: &[u8] = b"weft_shortcut";

const ATTACH: &str = "attach an eBPF program to a network device (needs Linux 6.6)";

/// The program of the veth end's way in: frames become the TAP's.
fn inward(tap: u32) -> Vec<Instruction> {
    vec![move_value(1, tap as i32), move_value(2, BPF_F_INGRESS), call(REDIRECT), EXIT]
}

/// `union bpf_attr` of BPF_PROG_ATTACH.
#[repr(C)]
#[derive(Default)]
struct ProgramAttach {
    ifindex: u32,
    program: u32,
    kind: u32,
    flags: u32,
    replaced: u32,
    relative: u32,
    revision: u64,
}

/// That of BPF_LINK_CREATE.
#[repr(C)]
#[derive(Default)]
struct LinkCreate {
    program: u32,
    ifindex: u32,
    kind: u32,
    flags: u32,
    relative: u32,
    /// The kernel's struct aligns the next field.
    unused: u32,
    revision: u64,
}

/// That of BPF_LINK_DETACH.
#[repr(C)]
struct LinkDetach {
    link: u32,
}

fn load(name: &[u8], program: &[Instruction]) -> Result<OwnedFd, IoError> {
    bpf::load_program(BPF_PROG_TYPE_SCHED_CLS, name, program)
        .map_err(|error| IoError::of("load an eBPF program", error))
}

fn attach(program: &OwnedFd, ifindex: u32, kind: u32) -> io::Result<()> {
    let program = program.as_raw_fd() as u32;
    let attributes = ProgramAttach { ifindex, program, kind, ..ProgramAttach::default() };
    // SAFETY: the fields of the command, without a pointer.
    unsafe { bpf::bpf(BPF_PROG_ATTACH, &attributes) }.map(|_| ())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::process::Command;

    use super::*;
    use crate::namespace::run_in;
    use crate::steer::{TICK_NS, tick};
    use crate::tap::{FRAME_LEN_MAX, Tap, TapOptions, VNET_LEN};
    use crate::testing::{FrameSender, fresh_namespace, index_of, ip};

    const REMOTE: [u8; 6] = [2, 0, 0, 0, 0, 1];
    const OTHER: [u8; 6] = [2, 0, 0, 0, 0, 2];

    /// Packets that a device has received and sent.
    fn packets(device: &str) -> (u64, u64) {
        let all = std::fs::read_to_string("/proc/thread-self/net/dev").unwrap();
        let line = all.lines().find(|line| line.trim().starts_with(device)).unwrap();
        let words: Vec<_> = line.split(':').nth(1).unwrap().split_whitespace().collect();
        (words[1].parse().unwrap(), words[9].parse().unwrap())
    }

    #[test]
    fn frames_for_the_set_go_up_the_tap_and_the_others_to_the_switch() {
        run_in(fresh_namespace(), || {
            for path in ["all", "default"] {
                let path = format!("/proc/sys/net/ipv6/conf/{path}/disable_ipv6");
                std::fs::write(path, "1").unwrap();
            }
            let tap = Tap::open(&TapOptions::new("tap0")).unwrap();
            ip("link add local0 type veth peer name switch0");
            let macs = MacSet::new().unwrap();
            macs.self_test().unwrap();
            macs.join(index_of("tap0"), index_of("local0")).unwrap();
            ip("link set local0 arp off up");
            ip("link set switch0 arp off up");
            ip("link set tap0 up");
            ip("addr add 10.9.0.1/24 dev tap0");
            for (host, mac) in
                [("10.9.0.2", "02:00:00:00:00:01"), ("10.9.0.3", "02:00:00:00:00:02")]
            {
                ip(&format!("neigh add {host} lladdr {mac} dev tap0"));
            }
            let socket = std::net::UdpSocket::bind("10.9.0.1:0").unwrap();
            let mut buffer = vec![0; FRAME_LEN_MAX];
            let mut reads = || {
                let mut to = Vec::new();
                while let Ok(len) = tap.recv(&mut buffer) {
                    to.push(<[u8; 6]>::try_from(&buffer[VNET_LEN..len][..6]).unwrap());
                }
                to
            };
            reads();
            let mut switched = packets("switch0").0;
            let mut crosses = |expected: &[[u8; 6]]| {
                socket.send_to(b"x", "10.9.0.2:9").unwrap();
                socket.send_to(b"x", "10.9.0.3:9").unwrap();
                assert_eq!(reads(), expected);
                let now = packets("switch0").0;
                assert_eq!(now - switched, 2 - expected.len() as u64);
                switched = now;
            };
            crosses(&[]);
            assert!(macs.insert(REMOTE).unwrap());
            assert!(macs.insert(REMOTE).unwrap());
            assert!(macs.contains(REMOTE).unwrap() && !macs.contains(OTHER).unwrap());
            crosses(&[REMOTE]);
            assert!(macs.insert(OTHER).unwrap());
            crosses(&[REMOTE, OTHER]);
            macs.remove(REMOTE).unwrap();
            macs.remove(REMOTE).unwrap();
            crosses(&[OTHER]);
            // Frames that come in by the veth end are the TAP's, and its owner answers them.
            let from = packets("tap0");
            ip("addr add 10.9.1.1/24 dev switch0");
            ip("neigh add 10.9.1.2 lladdr 02:00:00:00:00:05 dev switch0");
            let sender = std::net::UdpSocket::bind("10.9.1.1:0").unwrap();
            sender.send_to(b"y", "10.9.1.2:9").unwrap();
            // The set outlives its owner as long as a program reads it, and the next owner may have kept it.
            let kept = macs.as_fd().try_clone_to_owned().unwrap();
            drop(macs);
            crosses(&[OTHER]);
            assert!(is_set(&kept));
            let other = sender.as_fd().try_clone_to_owned().unwrap();
            assert!(!is_set(&other));
            let macs = MacSet::adopt(kept).unwrap();
            crosses(&[]);
            assert!(macs.insert(REMOTE).unwrap());
            crosses(&[REMOTE]);
            assert_eq!(packets("tap0").1, from.1 + 2);
        })
        .unwrap();
    }

    const CONTAINER: [u8; 6] = [0x82, 0, 0, 0, 0x90, 0xa3];
    const UNLIKE: [[u8; 6]; 2] = [[0x82, 0, 0, 1, 0x90, 0xa3], [0x82, 0, 0, 0, 0x90, 0xa4]];

    /// A port of a bridge, the device beyond that it may have a shortcut to, and another port of the bridge.
    struct Ports {
        macs: MacSet,
        bridged: Array<8>,
        tap: Tap,
        sender: FrameSender,
        buffer: Vec<u8>,
    }

    impl Ports {
        fn new() -> Self {
            for path in ["all", "default"] {
                let path = format!("/proc/sys/net/ipv6/conf/{path}/disable_ipv6");
                std::fs::write(path, "1").unwrap();
            }
            let tap = Tap::open(&TapOptions::new("tap0")).unwrap();
            ip("link set tap0 arp off up");
            ip("link add br0 up type bridge mcast_snooping 0");
            for name in ["port", "other"] {
                ip(&format!("link add {name}0 type veth peer name {name}1"));
                ip(&format!("link set {name}0 master br0 up"));
                ip(&format!("link set {name}1 arp off up"));
            }
            let (macs, bridged) = (MacSet::new().unwrap(), Array::new(1).unwrap());
            let sender = FrameSender::open("port1");
            Self { macs, bridged, tap, sender, buffer: vec![0; FRAME_LEN_MAX] }
        }

        fn shorten(&self) -> Shortcut {
            let [port, tap] = ["port0", "tap0"].map(index_of);
            self.macs.shorten_since(port, CONTAINER, tap, &self.bridged).unwrap()
        }

        /// So many nanoseconds ago, and a few ticks of the coarse clock, a frame went to the bridge.
        fn bridged(&self, ago_ns: u64) {
            let ticks = u64::from(tick() - 2);
            self.bridged.set([0; 4], (ticks * u64::from(TICK_NS) - ago_ns).to_ne_bytes()).unwrap();
        }

        /// Whether a frame takes the shortcut; else it goes to the bridge.
        fn is_short(&mut self, from: [u8; 6], to: [u8; 6]) -> bool {
            let before = packets("other1").0;
            let frame = [&to[..], &from, &[0x88, 0xb5], &[7; 46]].concat();
            self.sender.send(&frame).unwrap();
            let is_short = match self.tap.recv(&mut self.buffer) {
                Ok(len) => {
                    assert_eq!(self.buffer[VNET_LEN..len], frame);
                    true
                }
                Err(_) => false,
            };
            assert!(self.tap.recv(&mut self.buffer).is_err());
            assert_eq!(packets("other1").0, before + u64::from(!is_short));
            is_short
        }
    }

    #[test]
    fn a_containers_frames_for_the_set_pass_the_bridge_by_and_no_others() {
        run_in(fresh_namespace(), || {
            let mut ports = Ports::new();
            let shortcut = ports.shorten();
            ports.bridged(0);
            assert!(!ports.is_short(CONTAINER, REMOTE));
            ports.macs.insert(REMOTE).unwrap();
            assert!(ports.is_short(CONTAINER, REMOTE));
            assert!(!ports.is_short(CONTAINER, OTHER));
            assert!(!ports.is_short(CONTAINER, [0xff; 6]));
            for from in UNLIKE {
                assert!(!ports.is_short(from, REMOTE), "{from:x?}");
            }
            ports.macs.remove(REMOTE).unwrap();
            assert!(!ports.is_short(CONTAINER, REMOTE));
            ports.macs.insert(REMOTE).unwrap();
            assert!(ports.is_short(CONTAINER, REMOTE));
            drop(shortcut);
            assert!(!ports.is_short(CONTAINER, REMOTE));
        })
        .unwrap();
    }

    #[test]
    fn every_ten_seconds_the_bridge_learns_where_the_container_is() {
        run_in(fresh_namespace(), || {
            let mut ports = Ports::new();
            let _shortcut = ports.shorten();
            ports.macs.insert(REMOTE).unwrap();
            let unit = 1 << SECOND_SHIFT;
            let due = u64::from(BRIDGE_EVERY.cast_unsigned()) * unit;
            assert!(!ports.is_short(CONTAINER, REMOTE), "of all frames the first");
            assert!((0..3).all(|_| ports.is_short(CONTAINER, REMOTE)));
            ports.bridged(due - unit);
            assert!((0..3).all(|_| ports.is_short(CONTAINER, REMOTE)));
            ports.bridged(due + unit / 10);
            assert!(!ports.is_short(CONTAINER, REMOTE));
            assert!((0..3).all(|_| ports.is_short(CONTAINER, REMOTE)));
            let known = Command::new("bridge").args(["fdb", "show", "br", "br0"]).output().unwrap();
            let known = String::from_utf8(known.stdout).unwrap();
            assert!(known.contains("82:00:00:00:90:a3 dev port0"), "{known}");
        })
        .unwrap();
    }

    #[test]
    fn a_device_that_is_not_there_is_refused() {
        run_in(fresh_namespace(), || {
            let macs = MacSet::new().unwrap();
            assert!(macs.join(77, 78).is_err());
            assert!(macs.shorten(77, OTHER, 78).is_err());
        })
        .unwrap();
    }
}
