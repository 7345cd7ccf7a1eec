//! TAP devices: whole Ethernet super-packets, each behind a virtio net header, one call for each.

use std::io::{self, IoSlice};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use crate::IoError;
use crate::namespace::Namespace;

/// Bytes of the virtio net header in front of each frame; little-endian fields.
pub const VNET_LEN: usize = 10;
/// The longest super-packet: virtio net header, Ethernet header with two tags, 64 KiB of packet.
pub const FRAME_LEN_MAX: usize = VNET_LEN + 22 + 65_535;
/// Super-packets that each queue of a device holds before it drops (its transmit queue length), if not
/// told otherwise.
pub const QUEUE_PACKETS: u32 = 4_096;
/// The longest name of a network device, in bytes.
pub const NAME_LEN_MAX: usize = 15;

/// The user that may open a queue without CAP_NET_ADMIN in the device's namespace: root.
const OWNER: libc::c_ulong = 0;

const OPEN_TUN: &str = "open /dev/net/tun";

/// How a device is opened.
#[derive(Clone, Debug)]
pub struct TapOptions {
    /// Its name; a `%d` in it is replaced by a free number.
    pub name: String,
    /// It stays when its last user is gone.
    pub persist: bool,
    /// Super-packets that each of its queues holds before it drops.
    pub queue_packets: u32,
}

impl TapOptions {
    /// A device of this name that goes with its last user, and holds [`QUEUE_PACKETS`].
    pub fn new(name: impl Into<String>) -> Self {
        Self { name: name.into(), persist: false, queue_packets: QUEUE_PACKETS }
    }
}

/// The super-packets that the kernel gives and takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TapOffloads {
    /// TCP super-packets and partial checksums.
    pub tso: bool,
    /// UDP super-packets (Linux 6.2).
    pub uso: bool,
}

/// One queue of a TAP device, non-blocking.
#[derive(Debug)]
pub struct Tap {
    fd: OwnedFd,
    name: String,
    offloads: TapOffloads,
}

impl Tap {
    /// Opens the device, in the calling thread's network namespace, and makes it if it is not there.
    /// It is neither given an address nor set up.
    ///
    /// # Errors
    /// [`IoError`]; the texts say what to do.
    pub fn open(options: &TapOptions) -> Result<Self, IoError> {
        Self::open_layer(options, libc::IFF_TAP)
    }

    /// A device of frames (IFF_TAP) or of packets (IFF_TUN).
    pub(crate) fn open_layer(options: &TapOptions, layer: libc::c_int) -> Result<Self, IoError> {
        check_name(&options.name)?;
        let fd = open_tun()?;
        let name = set_interface(fd.as_fd(), &options.name, layer)?;
        control_value(fd.as_raw_fd(), libc::TUNSETVNETHDRSZ, VNET_LEN as i32)
            .map_err(|error| IoError::of("set the size of a TAP device's header", error))?;
        control_value(fd.as_raw_fd(), libc::TUNSETVNETLE, 1)
            .map_err(|error| IoError::of("set the byte order of a TAP device's header", error))?;
        // A device without an owner gives a queue to any user that may open /dev/net/tun: on most hosts, to
        // all.
        control(fd.as_raw_fd(), libc::TUNSETOWNER, OWNER)
            .map_err(|error| IoError::of("set the owner of a TAP device", error))?;
        let offloads = set_offloads(fd.as_raw_fd())?;
        if options.persist {
            control(fd.as_raw_fd(), libc::TUNSETPERSIST, 1)
                .map_err(|error| IoError::of("make a TAP device persistent", error))?;
        }
        set_queue_length(&name, options.queue_packets)?;
        Ok(Self { fd, name, offloads })
    }

    /// Takes over a queue that another process has opened and kept open, wherever its device is now. It is read and
    /// written again if it was let rest ([`rest`]).
    ///
    /// # Errors
    /// It is not a queue of a TAP device of ours, or the device is gone.
    pub fn adopt(fd: OwnedFd) -> Result<Self, IoError> {
        const WHAT: &str = "take over a queue of a TAP device";
        let mut request = interface_request("");
        // SAFETY: TUNGETIFF writes one `ifreq`, which `request` is; it lives over the call.
        let rc = unsafe { libc::ioctl(fd.as_raw_fd(), libc::TUNGETIFF, &raw mut request) };
        if rc < 0 {
            return Err(IoError::last(WHAT));
        }
        let name = name_of(&request)?;
        // SAFETY: the kernel has written the flags, and zero bytes were there before.
        let flags = libc::c_int::from(unsafe { request.ifr_ifru.ifru_flags });
        let wanted = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR | libc::IFF_MULTI_QUEUE;
        if flags & wanted != wanted {
            return Err(IoError::DeviceBusy { name });
        }
        if flags & libc::IFF_DETACH_QUEUE != 0 {
            set_queue(fd.as_fd(), libc::IFF_ATTACH_QUEUE)
                .map_err(|error| IoError::of(WHAT, error))?;
        }
        let offloads = set_offloads(fd.as_raw_fd())?;
        Ok(Self { fd, name, offloads })
    }

    /// The network namespace in which the device is now (Linux 5.2).
    ///
    /// # Errors
    /// The device is gone.
    pub fn namespace(&self) -> io::Result<Namespace> {
        // SAFETY: TUNGETDEVNETNS takes no argument and returns a new descriptor or -1.
        let raw = unsafe { libc::ioctl(self.fd.as_raw_fd(), libc::TUNGETDEVNETNS) };
        if raw < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel has just opened it, closed on exec, and nothing else knows it.
        Ok(Namespace::of(unsafe { OwnedFd::from_raw_fd(raw) }))
    }

    /// Says whether the device stays when its last user is gone.
    ///
    /// # Errors
    /// The device is gone.
    pub fn set_persist(&self, persist: bool) -> Result<(), IoError> {
        control(self.fd.as_raw_fd(), libc::TUNSETPERSIST, persist.into())
            .map_err(|error| IoError::of("make a TAP device persistent", error))
    }

    /// The name under which the device was opened.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The offloads that the kernel granted. A later grant on another queue holds for the whole device.
    pub const fn offloads(&self) -> TapOffloads {
        self.offloads
    }

    /// From now on the kernel gives single frames with whole checksums, on all queues of the device.
    ///
    /// # Errors
    /// The kernel refused the change.
    pub fn stop_offloads(&mut self) -> io::Result<()> {
        control(self.fd.as_raw_fd(), libc::TUNSETOFFLOAD, 0)?;
        self.offloads = TapOffloads { tso: false, uso: false };
        Ok(())
    }

    /// From now on the device takes only the frames by which hosts announce addresses or look whether one is
    /// taken, as [`crate::packet::PacketSocket::announcements`], tagged or not.
    ///
    /// # Errors
    /// The kernel refused the filter.
    pub fn take_announcements(&self) -> Result<(), IoError> {
        crate::announcements::attach_to_tap(self.fd.as_fd())
            .map_err(|error| IoError::of("attach a filter to a TAP device", error))
    }

    /// Makes an eBPF socket filter pick the queue of each frame on all queues of the device, by its result modulo
    /// their number. It stays as long as the device.
    ///
    /// # Errors
    /// The kernel refused the program, as before Linux 4.16.
    pub(crate) fn steer(&self, program: &OwnedFd) -> io::Result<()> {
        control_value(self.fd.as_raw_fd(), libc::TUNSETSTEERINGEBPF, program.as_raw_fd())
    }

    /// Says whether the device has a carrier.
    ///
    /// # Errors
    /// The device is gone.
    pub(crate) fn set_carrier(&self, carrier: bool) -> io::Result<()> {
        control_value(self.fd.as_raw_fd(), libc::TUNSETCARRIER, carrier.into())
    }

    /// Takes one super-packet with its header. A `buffer` shorter than [`FRAME_LEN_MAX`] may cut it.
    ///
    /// # Errors
    /// `WouldBlock` if there is none; anything else means that the device is gone.
    #[inline]
    pub fn recv(&self, buffer: &mut [u8]) -> io::Result<usize> {
        Ok(rustix::io::read(&self.fd, buffer)?)
    }

    /// Gives the kernel one super-packet: header first, then the frame in any number of slices.
    ///
    /// # Errors
    /// `InvalidInput` (EINVAL): the kernel does not take this kind of super-packet. EIO: the device
    /// is down. `WouldBlock`, ENOMEM: no memory for it now.
    #[inline]
    pub fn send(&self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        Ok(rustix::io::writev(&self.fd, slices)?)
    }
}

impl AsFd for Tap {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn check_name(name: &str) -> Result<(), IoError> {
    let stem = name.strip_suffix("%d").unwrap_or(name);
    let bad = |c: char| matches!(c, '/' | ':' | '%' | '\0') || c.is_whitespace();
    let fits = (1..=NAME_LEN_MAX).contains(&name.len()) && !stem.is_empty();
    if !fits || stem == "." || stem == ".." || stem.contains(bad) {
        return Err(IoError::BadName { name: name.to_owned() });
    }
    Ok(())
}

fn open_tun() -> Result<OwnedFd, IoError> {
    use rustix::fs::{Mode, OFlags};
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK;
    rustix::fs::open("/dev/net/tun", flags, Mode::empty()).map_err(|error| match error {
        rustix::io::Errno::NOENT | rustix::io::Errno::NODEV | rustix::io::Errno::NXIO => {
            IoError::NoTunDevice
        }
        error => IoError::of(OPEN_TUN, error.into()),
    })
}

/// Binds `fd` to a queue of the device; returns the device's name.
fn set_interface(fd: BorrowedFd<'_>, name: &str, layer: libc::c_int) -> Result<String, IoError> {
    let mut request = interface_request(name);
    let flags = layer | libc::IFF_NO_PI | libc::IFF_VNET_HDR | libc::IFF_MULTI_QUEUE;
    request.ifr_ifru.ifru_flags = flags as libc::c_short;
    // SAFETY: TUNSETIFF reads and writes one `ifreq`, which `request` is; it lives over the call.
    let rc = unsafe { libc::ioctl(fd.as_raw_fd(), libc::TUNSETIFF, &raw mut request) };
    if rc < 0 {
        let error = io::Error::last_os_error();
        return Err(match error.raw_os_error() {
            Some(libc::EBUSY | libc::EINVAL) => IoError::DeviceBusy { name: name.to_owned() },
            _ => IoError::of("open a TAP device", error),
        });
    }
    name_of(&request)
}

fn name_of(request: &libc::ifreq) -> Result<String, IoError> {
    let name = request.ifr_name.iter().take_while(|c| **c != 0).map(|c| *c as u8).collect();
    String::from_utf8(name).map_err(|_| IoError::BadName { name: "(not text)".to_owned() })
}

/// Suspends a queue of a TAP device while no process reads it: it holds nothing, and the kernel drops frames
/// for it. [`Tap::adopt`] takes it up again.
///
/// # Errors
/// It is not a queue of such a device, or rests already.
pub fn rest(queue: impl AsFd) -> io::Result<()> {
    set_queue(queue.as_fd(), libc::IFF_DETACH_QUEUE)
}

fn set_queue(queue: BorrowedFd<'_>, state: libc::c_int) -> io::Result<()> {
    let mut request = interface_request("");
    request.ifr_ifru.ifru_flags = state as libc::c_short;
    // SAFETY: TUNSETQUEUE reads one `ifreq`, which `request` is; it lives over the call.
    let rc = unsafe { libc::ioctl(queue.as_raw_fd(), libc::TUNSETQUEUE, &raw const request) };
    if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Asks for all offloads, then without UDP super-packets, then for none.
fn set_offloads(fd: RawFd) -> Result<TapOffloads, IoError> {
    let tso = libc::TUN_F_CSUM | libc::TUN_F_TSO4 | libc::TUN_F_TSO6 | libc::TUN_F_TSO_ECN;
    let uso = tso | libc::TUN_F_USO4 | libc::TUN_F_USO6;
    let choices = [
        (uso, TapOffloads { tso: true, uso: true }),
        (tso, TapOffloads { tso: true, uso: false }),
        (0, TapOffloads { tso: false, uso: false }),
    ];
    for (flags, granted) in choices {
        match control(fd, libc::TUNSETOFFLOAD, flags.into()) {
            Ok(()) => return Ok(granted),
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {}
            Err(error) => return Err(IoError::of("set the offloads of a TAP device", error)),
        }
    }
    Ok(TapOffloads { tso: false, uso: false })
}

fn set_queue_length(name: &str, packets: u32) -> Result<(), IoError> {
    const WHAT: &str = "set the queue length of a TAP device";
    // `ifr_qlen` shares its place with `ifr_metric`: both are the union's int.
    let packets = i32::try_from(packets).unwrap_or(i32::MAX);
    let set = number(name, libc::SIOCSIFTXQLEN as libc::Ioctl, packets);
    set.map(|_| ()).map_err(|error| IoError::of(WHAT, error))
}

/// Sets a number of the device of this name in the calling thread's network namespace, or asks for it;
/// returns the number.
pub(crate) fn number(name: &str, request: libc::Ioctl, value: i32) -> io::Result<i32> {
    let socket = control_socket()?;
    let mut change = interface_request(name);
    change.ifr_ifru.ifru_metric = value;
    // SAFETY: called with SIOCSIFTXQLEN, SIOCSIFMTU and SIOCGIFMTU only, which read, or write, one `ifreq`
    // with the union's int set, which `change` is.
    let rc = unsafe { libc::ioctl(socket.as_raw_fd(), request, &raw mut change) };
    if rc < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the int was written above, and at most overwritten by an int.
    Ok(unsafe { change.ifr_ifru.ifru_metric })
}

/// The index of the device of this name in the network namespace of a socket.
pub(crate) fn index_of(socket: BorrowedFd<'_>, name: &str) -> io::Result<u32> {
    let mut request = interface_request(name);
    // SAFETY: SIOCGIFINDEX reads and writes one `ifreq`, which `request` is; it lives over the call.
    let rc = unsafe {
        libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFINDEX as libc::Ioctl, &raw mut request)
    };
    if rc < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has written the index, and zero bytes were there before.
    let index = unsafe { request.ifr_ifru.ifru_ifindex };
    u32::try_from(index).map_err(|_| io::ErrorKind::InvalidData.into())
}

/// Asks for the state of the link of the device of this name, in the calling thread's network namespace. If
/// the device is up, the kernel first completes a change of its carrier (Linux 6.8).
pub(crate) fn ask_link(name: &str) -> io::Result<()> {
    /// `struct ethtool_value` of linux/ethtool.h, and the command that asks for the link's state.
    #[repr(C)]
    struct EthtoolValue {
        command: u32,
        value: u32,
    }
    const ETHTOOL_GLINK: u32 = 0x0a;
    let socket = control_socket()?;
    let mut link = EthtoolValue { command: ETHTOOL_GLINK, value: 0 };
    let mut request = interface_request(name);
    request.ifr_ifru.ifru_data = (&raw mut link).cast();
    // SAFETY: SIOCETHTOOL reads, and may write, one `ifreq`, which `request` is. With ETHTOOL_GLINK it reads and
    // writes the `ethtool_value` behind `ifru_data`, which `link` is. Both live over the call.
    let rc = unsafe {
        libc::ioctl(socket.as_raw_fd(), libc::SIOCETHTOOL as libc::Ioctl, &raw mut request)
    };
    if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// A socket to ask and change devices by, in the calling thread's network namespace.
fn control_socket() -> io::Result<OwnedFd> {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
    Ok(socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?)
}

/// The flags (`IFF_`) of the device of this name, in the calling thread's network namespace.
pub(crate) fn flags(name: &str) -> io::Result<libc::c_int> {
    let socket = control_socket()?;
    let mut request = interface_request(name);
    // SAFETY: SIOCGIFFLAGS reads and writes one `ifreq`, which `request` is; it lives over the call.
    let rc = unsafe {
        libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFFLAGS as libc::Ioctl, &raw mut request)
    };
    if rc < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has written the flags, and zero bytes were there before.
    Ok(unsafe { request.ifr_ifru.ifru_flags }.into())
}

/// An `ifreq` with a name of at most [`NAME_LEN_MAX`] bytes and all else zero.
fn interface_request(name: &str) -> libc::ifreq {
    // SAFETY: `ifreq` is a C struct of integers and a union of such, for which zero bytes are valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes().take(NAME_LEN_MAX)) {
        *to = from as libc::c_char;
    }
    request
}

/// An ioctl whose argument is a number.
fn control(fd: RawFd, request: libc::Ioctl, value: libc::c_ulong) -> io::Result<()> {
    // SAFETY: called with TUNSETPERSIST, TUNSETOWNER and TUNSETOFFLOAD only, which take a number and
    // touch no memory of ours.
    let rc = unsafe { libc::ioctl(fd, request, value) };
    if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// An ioctl whose argument points to an int.
fn control_value(fd: RawFd, request: libc::Ioctl, value: libc::c_int) -> io::Result<()> {
    // SAFETY: called with TUNSETVNETHDRSZ, TUNSETVNETLE, TUNSETSTEERINGEBPF and TUNSETCARRIER only, which read
    // one int.
    let rc = unsafe { libc::ioctl(fd, request, &raw const value) };
    if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::process::Command;

    use super::*;
    use crate::namespace::run_in;
    use crate::poller::Poller;
    use crate::testing::{fresh_namespace, ip};

    fn open(name: &str) -> Result<Tap, IoError> {
        Tap::open(&TapOptions::new(name))
    }

    #[test]
    fn frames_pass_both_ways() {
        run_in(fresh_namespace(), || {
            let tap = open("weft%d").unwrap();
            assert_eq!(tap.name(), "weft0");
            assert_eq!(tap.offloads(), TapOffloads { tso: true, uso: true });
            // By itself the kernel gives it a queue of 500.
            let shown = Command::new("ip").args(["link", "show", "weft0"]).output().unwrap();
            let shown = String::from_utf8(shown.stdout).unwrap();
            assert!(shown.contains("qlen 4096"), "{shown}");
            let mut buffer = vec![0; FRAME_LEN_MAX];
            assert_eq!(tap.recv(&mut buffer).unwrap_err().kind(), io::ErrorKind::WouldBlock);
            let down = tap.send(&[IoSlice::new(&[0; VNET_LEN]), IoSlice::new(&[1; 60])]);
            assert_eq!(down.unwrap_err().raw_os_error(), Some(libc::EIO));
            ip("link set weft0 up");
            let mut poller = Poller::new().unwrap();
            poller.add(&tap, 0).unwrap();
            // The kernel says hello: router solicitation and multicast reports.
            assert_eq!(poller.wait(None).unwrap().count(), 1);
            let len = tap.recv(&mut buffer).unwrap();
            assert!(len > VNET_LEN + 14);
            let received = || {
                let all = std::fs::read_to_string("/proc/thread-self/net/dev").unwrap();
                let line = all.lines().find(|line| line.trim().starts_with("weft0:")).unwrap();
                line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap()
            };
            let before = received();
            let parts: Vec<_> = (0..64).map(|_| IoSlice::new(&[2; 1000])).collect();
            let head = [IoSlice::new(&[0; VNET_LEN]), IoSlice::new(&[2; 14])];
            let sent = tap.send(&[&head[..], &parts[..1]].concat()).unwrap();
            assert_eq!(sent, VNET_LEN + 14 + 1000);
            assert_eq!(received() - before, 1014);
        })
        .unwrap();
    }

    #[test]
    fn persistent_devices_stay_and_are_taken_again() {
        run_in(fresh_namespace(), || {
            let options = TapOptions { persist: true, ..TapOptions::new("weftstay") };
            drop(Tap::open(&options).unwrap());
            let tap = Tap::open(&options).unwrap();
            assert_eq!(tap.name(), "weftstay");
            let queues = Tap::open(&options).unwrap();
            assert_eq!(queues.name(), "weftstay");
            let shown = Command::new("ip").args(["-d", "link", "show", "weftstay"]).output();
            let shown = String::from_utf8(shown.unwrap().stdout).unwrap();
            assert!(shown.contains("persist on") && shown.contains("user root"), "{shown}");
            tap.set_persist(false).unwrap();
            drop((tap, queues));
            let shown = Command::new("ip").args(["link", "show", "weftstay"]).status().unwrap();
            assert!(!shown.success());
        })
        .unwrap();
    }

    #[test]
    fn a_queue_that_was_kept_is_taken_over_in_the_namespace_that_its_device_has_come_to() {
        run_in(fresh_namespace(), || {
            let there = fresh_namespace();
            let first = open("weftmove").unwrap();
            let kept: Vec<_> = [&first, &open("weftmove").unwrap()]
                .map(|queue| queue.as_fd().try_clone_to_owned().unwrap())
                .into();
            first.set_persist(true).unwrap();
            std::fs::write("/proc/sys/net/ipv6/conf/weftmove/disable_ipv6", "1").unwrap();
            ip("link set weftmove arp off");
            let pid = std::process::id().to_string();
            let fd = there.as_fd().as_raw_fd().to_string();
            let path = format!("/proc/{pid}/fd/{fd}");
            let words = ["link", "set", "weftmove", "netns", &path];
            assert!(Command::new("ip").args(words).status().unwrap().success());
            drop(first);
            kept.iter().for_each(|queue| rest(queue).unwrap());
            assert!(rest(&kept[0]).is_err(), "it rests already");
            let queues: Vec<_> = kept.into_iter().map(|fd| Tap::adopt(fd).unwrap()).collect();
            for queue in &queues {
                assert_eq!(queue.name(), "weftmove");
                assert_eq!(queue.offloads(), TapOffloads { tso: true, uso: true });
                let identity = queue.namespace().unwrap().identity().unwrap();
                assert_eq!(identity, there.identity().unwrap());
            }
            run_in(&there, || {
                ip("link set weftmove arp off up");
                let sender = crate::testing::FrameSender::open("weftmove");
                let frame = [&[2; 12][..], &[0x88, 0xb5], &[7; 50]].concat();
                sender.send(&frame).unwrap();
                let mut buffer = [0; 2048];
                let received = queues.iter().find_map(|queue| queue.recv(&mut buffer).ok());
                assert!(received.is_some(), "nothing came up");
                ip("link del weftmove");
            })
            .unwrap();
            assert!(queues[0].namespace().is_err(), "the device is gone");
            let fd = queues[0].as_fd().try_clone_to_owned().unwrap();
            assert!(Tap::adopt(fd).is_err());
            let other = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
            assert!(Tap::adopt(other.into()).is_err());
        })
        .unwrap();
    }

    #[test]
    fn devices_of_another_kind_and_bad_names_are_refused() {
        run_in(fresh_namespace(), || {
            ip("link add other type bridge");
            assert!(matches!(open("other").unwrap_err(), IoError::DeviceBusy { .. }));
            for name in ["", "a/b", "sixteen-bytes-xx", "%d", "..", "a b", "a%s"] {
                assert!(matches!(open(name).unwrap_err(), IoError::BadName { .. }), "{name}");
            }
        })
        .unwrap();
    }
}
