//! Which frames of a container leave by a direct port, decided by the kernel: two small eBPF programs.
//!
//! A container with a direct port has two devices: the TAP that is its interface, and one end of a
//! veth pair whose other end is a port of the switch. On the TAP's way out a program lets frames for
//! the MAC addresses in a [`MacSet`] pass, to the vector engine; all others (for this host, to
//! groups, to nobody known) leave by the veth pair. On the veth end's way in another program makes
//! frames the TAP's. So the switch sees what it would see without a direct port, but for frames
//! between this container and those addresses.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use crate::IoError;
use crate::bpf::{
    self, EXIT, Instruction, MAP_LOOKUP_ELEM, Map, SECOND_HALF, add_value, call, jump_unless_zero,
    load_map, move_register, move_value, store_zero,
};

/// Addresses that a [`MacSet`] holds at most. The kernel takes 1 MiB for its table, and more for
/// each address that is in it.
pub const MACS_MAX: usize = 65_536;

const BPF_PROG_ATTACH: libc::c_int = 8;
const BPF_PROG_TYPE_SCHED_CLS: u32 = 3;
/// Linux 6.6.
const BPF_TCX_INGRESS: u32 = 46;
const BPF_TCX_EGRESS: u32 = 47;
/// bpf_redirect: into the device, as if the frame had come in there.
const BPF_F_INGRESS: i32 = 1;

/// Helpers by number (bpf-helpers(7)).
const REDIRECT: i32 = 23;
const SKB_LOAD_BYTES: i32 = 26;
/// What a program returns so that the next one decides, in the end to let the frame pass.
const TCX_NEXT: i32 = -1;

/// A key is an address and two bytes of zero.
const KEY_LEN: usize = 8;
/// What stands under each address of a set.
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
        let map = Map::hash(MACS_MAX)
            .map_err(|error| IoError::of("make a table of MAC addresses for eBPF", error))?;
        Ok(Self { map })
    }

    /// Adds an address; false if the set is full.
    ///
    /// # Errors
    /// The kernel has no memory for it.
    pub fn insert(&self, mac: [u8; 6]) -> Result<bool, IoError> {
        match self.map.set(key(mac), IN_THE_SET) {
            Ok(()) => Ok(true),
            Err(error) if error.raw_os_error() == Some(libc::E2BIG) => Ok(false),
            Err(error) => Err(IoError::of("add a MAC address to a table for eBPF", error)),
        }
    }

    /// Removes an address; one that is not there is as good.
    ///
    /// # Errors
    /// What the kernel refused.
    pub fn remove(&self, mac: [u8; 6]) -> Result<(), IoError> {
        match self.map.remove(key(mac)) {
            Err(error) if error.raw_os_error() != Some(libc::ENOENT) => {
                Err(IoError::of("remove a MAC address from a table for eBPF", error))
            }
            _ => Ok(()),
        }
    }

    /// Whether an address is in the set.
    ///
    /// # Errors
    /// What the kernel refused.
    pub fn contains(&self, mac: [u8; 6]) -> Result<bool, IoError> {
        match self.map.get(key(mac)) {
            Ok(_) => Ok(true),
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(false),
            Err(error) => Err(IoError::of("look a MAC address up in a table for eBPF", error)),
        }
    }

    /// Finds out whether the kernel takes both programs and knows where to put them, on no device.
    ///
    /// # Errors
    /// What it lacks.
    pub fn self_test(&self) -> Result<(), IoError> {
        load(&self.outward(1))?;
        let inward = load(&inward(1))?;
        // Where the kernel knows the place, it misses the device.
        match attach(&inward, 0, BPF_TCX_EGRESS) {
            Err(error) if error.raw_os_error() == Some(libc::ENODEV) => Ok(()),
            Err(error) => Err(IoError::of(ATTACH, error)),
            Ok(()) => Ok(()),
        }
    }

    /// Puts the programs on a direct port, both of whose devices are new and in the calling thread's
    /// network namespace: `tap` and the veth end `local`, by index. They stay as long as the devices,
    /// also when this process is gone.
    ///
    /// # Errors
    /// What the kernel refused: a kernel before 6.6, no right, a device that is gone.
    pub fn join(&self, tap: u32, local: u32) -> Result<(), IoError> {
        let failed = |error| IoError::of(ATTACH, error);
        attach(&load(&inward(tap))?, local, BPF_TCX_INGRESS).map_err(failed)?;
        attach(&load(&self.outward(local))?, tap, BPF_TCX_EGRESS).map_err(failed)
    }

    /// What leaves by the TAP: frames for addresses of the set; the others go to `local`.
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

const fn key([a, b, c, d, e, f]: [u8; 6]) -> [u8; KEY_LEN] {
    [a, b, c, d, e, f, 0, 0]
}

const ATTACH: &str = "put an eBPF program on a network device (Linux 6.6)";

/// What comes in by the veth end becomes the TAP's.
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

fn load(program: &[Instruction]) -> Result<OwnedFd, IoError> {
    bpf::load_program(BPF_PROG_TYPE_SCHED_CLS, b"weft_direct", program)
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

    use super::*;
    use crate::namespace::run_in;
    use crate::tap::{FRAME_LEN_MAX, Tap, TapOptions, VNET_LEN};
    use crate::testing::{fresh_namespace, index_of, ip};

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
            // What comes in by the veth end is the TAP's, and answered by its owner.
            let from = packets("tap0");
            ip("addr add 10.9.1.1/24 dev switch0");
            ip("neigh add 10.9.1.2 lladdr 02:00:00:00:00:05 dev switch0");
            let sender = std::net::UdpSocket::bind("10.9.1.1:0").unwrap();
            sender.send_to(b"y", "10.9.1.2:9").unwrap();
            // The set outlives its owner as long as a program reads it.
            drop(macs);
            crosses(&[OTHER]);
            assert_eq!(packets("tap0").1, from.1 + 1);
        })
        .unwrap();
    }

    #[test]
    fn a_device_that_is_not_there_is_refused() {
        run_in(fresh_namespace(), || {
            let macs = MacSet::new().unwrap();
            assert!(macs.join(77, 78).is_err());
        })
        .unwrap();
    }
}
