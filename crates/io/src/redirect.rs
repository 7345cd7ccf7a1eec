//! Small eBPF programs by which the kernel sends frames of a container to the vector engine past the switch. They
//! look each frame's destination and sender up in a [`MacSet`].
//!
//! A container with a direct port has two devices: the TAP that is its interface, and one end of a veth pair. The
//! pair's other end is a port of the switch. On the TAP's way out a program lets frames for the MAC addresses in
//! the set pass, to the vector engine. All others (for this host, groups or unknown addresses) leave by the veth
//! pair. On the veth end's way in another program makes frames the TAP's. So the switch sees the same frames as
//! without a direct port, but for those between this container and the addresses of the set.
//!
//! A container with a port of a bridge alone may have a [`Shortcut`]. On the port's way in, a program hands frames
//! for addresses of the set to the engine's TAP device. It leaves all others to the bridge.
//!
//! Nobody checks the sender of a frame that passes the switch by. So only frames do that whose sender is surely the
//! container: of its MAC address, from one of its IP addresses, and of no protocol that speaks for a network. The
//! others take the switch, whose rules judge them.

mod keys;
mod programs;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use self::keys::{KEY_LEN, Key, destination, source};
use crate::IoError;
use crate::bpf::{self, Array, Instruction, Map};

/// Destinations that a [`MacSet`] has room for. The kernel takes 2 MiB for its table, and more for each entry
/// that is in it.
pub const MACS_MAX: usize = 65_536;
/// Addresses of this host's containers that it has room for beside them.
pub const SOURCES_MAX: usize = 16_384;

const BPF_PROG_ATTACH: libc::c_int = 8;
const BPF_LINK_CREATE: libc::c_int = 28;
const BPF_LINK_DETACH: libc::c_int = 34;
const BPF_PROG_TYPE_SCHED_CLS: u32 = 3;
/// Linux 6.6.
const BPF_TCX_INGRESS: u32 = 46;
const BPF_TCX_EGRESS: u32 = 47;

/// The set's name, with a number that changes with the programs that read it. The next daemon takes over only a
/// set of the same name, and with it the programs.
const NAME: [u8; 16] = *b"weft_macs_2\0\0\0\0\0";
/// The value under each key of a set.
const IN_THE_SET: [u8; 1] = [1];

/// MAC addresses that the kernel looks up for each frame, and the senders that it believes. It ends with the last
/// program that reads it.
#[derive(Debug)]
pub struct MacSet {
    map: Map<KEY_LEN, { IN_THE_SET.len() }>,
    /// The keys of senders in the map, by their MAC addresses.
    sources: Mutex<BTreeMap<[u8; 6], BTreeSet<Key>>>,
}

impl MacSet {
    /// An empty set.
    ///
    /// # Errors
    /// A kernel without eBPF, or without the right to use it.
    pub fn new() -> Result<Self, IoError> {
        let map = Map::hash(MACS_MAX + SOURCES_MAX, NAME)
            .map_err(|error| IoError::of("create an eBPF map of MAC addresses", error))?;
        Ok(Self { map, sources: Mutex::default() })
    }

    /// Takes over the set that another process has made and kept, with the programs that read it. It is empty from
    /// then on.
    ///
    /// # Errors
    /// It is not such a set.
    pub fn adopt(fd: OwnedFd) -> Result<Self, IoError> {
        const WHAT: &str = "take over an eBPF map of MAC addresses";
        let map = Map::adopt(fd, MACS_MAX + SOURCES_MAX, NAME)
            .map_err(|error| IoError::of(WHAT, error))?;
        let set = Self { map, sources: Mutex::default() };
        set.clear()?;
        Ok(set)
    }

    /// Adds an address; false if the set is full.
    ///
    /// # Errors
    /// The kernel has no memory for it.
    pub fn insert(&self, mac: [u8; 6]) -> Result<bool, IoError> {
        self.insert_key(destination(mac))
    }

    /// Removes an address, if it is in the set.
    ///
    /// # Errors
    /// The kernel refused the change.
    pub fn remove(&self, mac: [u8; 6]) -> Result<(), IoError> {
        self.remove_key(destination(mac))
    }

    /// Makes these IP addresses the ones from which a container with this MAC address sends past the switch, and no
    /// others. False if the set is full: frames from those that found no room take the switch.
    ///
    /// # Errors
    /// The kernel refused a change.
    pub fn set_sources(&self, mac: [u8; 6], addresses: &[IpAddr]) -> Result<bool, IoError> {
        let wanted: BTreeSet<Key> = addresses.iter().map(|address| source(mac, *address)).collect();
        let mut sources = self.sources();
        let held = sources.entry(mac).or_default();
        for key in held.difference(&wanted).copied().collect::<Vec<_>>() {
            self.remove_key(key)?;
            held.remove(&key);
        }
        let mut have_room = true;
        for key in wanted {
            if !held.contains(&key) {
                match self.insert_key(key)? {
                    true => drop(held.insert(key)),
                    false => have_room = false,
                }
            }
        }
        if held.is_empty() {
            sources.remove(&mac);
        }
        Ok(have_room)
    }

    /// Removes all addresses, those of senders too.
    ///
    /// # Errors
    /// The kernel refused the change.
    pub fn clear(&self) -> Result<(), IoError> {
        let mut sources = self.sources();
        self.map
            .clear()
            .map_err(|error| IoError::of("clear an eBPF map of MAC addresses", error))?;
        sources.clear();
        Ok(())
    }

    /// Whether an address is in the set.
    ///
    /// # Errors
    /// The kernel refused the look-up.
    pub fn contains(&self, mac: [u8; 6]) -> Result<bool, IoError> {
        match self.map.get(destination(mac)) {
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
        load(DIRECT, &programs::outward(self.map.number(), [0; 6], 1))?;
        let inward = load(DIRECT, &programs::inward(1))?;
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

    /// Puts the programs on a direct port of a container with this address. Its devices, `tap` and the veth end
    /// `local` (by index), are new and in the calling thread's network namespace. The programs stay as long as the
    /// devices, also when this process is gone.
    ///
    /// # Errors
    /// The kernel refused: a kernel before 6.6, no right, a device that is gone.
    pub fn join(&self, mac: [u8; 6], tap: u32, local: u32) -> Result<(), IoError> {
        let failed = |error| IoError::of(ATTACH, error);
        let outward = programs::outward(self.map.number(), mac, local);
        attach(&load(DIRECT, &programs::inward(tap))?, local, BPF_TCX_INGRESS).map_err(failed)?;
        attach(&load(DIRECT, &outward)?, tap, BPF_TCX_EGRESS).map_err(failed)
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
        let program = programs::past_the_bridge(self.map.number(), mac, tap, bridged.number());
        let program = load(SHORTCUT, &program)?;
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

    /// False if the set is full.
    fn insert_key(&self, key: Key) -> Result<bool, IoError> {
        match self.map.set(key, IN_THE_SET) {
            Ok(()) => Ok(true),
            Err(error) if error.raw_os_error() == Some(libc::E2BIG) => Ok(false),
            Err(error) => Err(IoError::of("add an address to an eBPF map", error)),
        }
    }

    fn remove_key(&self, key: Key) -> Result<(), IoError> {
        match self.map.remove(key) {
            Err(error) if error.raw_os_error() != Some(libc::ENOENT) => {
                Err(IoError::of("remove an address from an eBPF map", error))
            }
            _ => Ok(()),
        }
    }

    fn sources(&self) -> MutexGuard<'_, BTreeMap<[u8; 6], BTreeSet<Key>>> {
        self.sources.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether a descriptor is of a [`MacSet`].
pub fn is_set(fd: &OwnedFd) -> bool {
    Map::<KEY_LEN, { IN_THE_SET.len() }>::is_like(fd.as_fd(), MACS_MAX + SOURCES_MAX, NAME)
        .unwrap_or(false)
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

/// Names of the programs, for lists of programs.
const DIRECT: &[u8] = b"weft_direct";
const SHORTCUT: &[u8] = b"weft_shortcut";

const ATTACH: &str = "attach an eBPF program to a network device (needs Linux 6.6)";

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
