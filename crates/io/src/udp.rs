//! UDP sockets that send and receive runs: many equal datagrams in one call.

mod adopt;
mod batch;
mod control;
mod cut;
mod deaf;
mod told;

use std::io;
use std::mem;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;

pub use self::adopt::Adopted;
pub use self::batch::{Message, RecvBatch};
use self::control::{Control, send_header};
pub use self::cut::IPV6_MTU_MIN;
pub use self::told::{is_unroutable, recv_told, send_from, tell_destinations};
use crate::IoError;

/// Bytes that one call to [`UdpSocket::send_run`] sends at most: the payload of an IPv4 datagram.
pub const RUN_BYTES_MAX: usize = 65_507;
/// Datagrams in a run that every kernel with UDP_SEGMENT takes.
pub const RUN_SEGMENTS_MIN: usize = 64;
/// Datagrams in a run since Linux 6.9.
pub const RUN_SEGMENTS_MAX: usize = 128;
/// Messages that one call to [`UdpSocket::recv`] takes at most.
pub const MESSAGES_MAX: usize = 64;
/// Room for one message in bytes: the longest UDP payload and a little more. So the starts of neighbouring
/// messages do not fall on the same cache sets.
pub const MESSAGE_ROOM: usize = 65_536 + 320;
/// Bytes asked for in a socket's send and receive buffers.
pub const SOCKET_BUFFER_BYTES: libc::c_int = 8 << 20;

/// The number of values in an answer of `SO_MEMINFO` (Linux `SK_MEMINFO_VARS`).
const MEMINFO_VARS: usize = 9;

/// A UDP socket for IPv4 and IPv6, non-blocking, with UDP_GRO on where the kernel has it. Fragmentation of
/// its datagrams is off (path MTU is the caller's affair) unless [`Self::allow_fragments`] turns it on.
#[derive(Debug)]
pub struct UdpSocket {
    fd: OwnedFd,
    ipv6: bool,
    gro: bool,
    port: u16,
}

/// A destination in the form that the socket's kernel calls take, and the TOS of datagrams to it.
#[derive(Clone, Copy)]
pub struct Remote {
    address: SocketAddr,
    raw: RawAddress,
    tos: u8,
    /// The address to send from; else the system's choice.
    source: Option<IpAddr>,
}

#[derive(Clone, Copy)]
enum RawAddress {
    V4(libc::sockaddr_in),
    V6(libc::sockaddr_in6),
}

impl UdpSocket {
    /// Binds `port` (0: any free one) on `address`, or on all addresses of the host, IPv6 and IPv4,
    /// in the calling thread's network namespace.
    ///
    /// # Errors
    /// [`IoError::PortInUse`], or the kernel's error.
    pub fn bind(address: Option<IpAddr>, port: u16) -> Result<Self, IoError> {
        Self::bind_any(address, port, false)
    }

    /// As [`Self::bind`], but other sockets that the same user binds by this call may have the same port. Each
    /// takes a share of the datagrams ([`crate::steer`]).
    ///
    /// # Errors
    /// As [`Self::bind`].
    pub fn bind_shared(address: Option<IpAddr>, port: u16) -> Result<Self, IoError> {
        Self::bind_any(address, port, true)
    }

    /// Shares the port of a socket that was bound by [`Self::bind`], and hence had it alone. Sockets of the
    /// same user may then be bound to it by [`Self::bind_shared`].
    ///
    /// # Errors
    /// The kernel refused to share the port.
    pub fn share(&self) -> Result<(), IoError> {
        self.set(libc::SOL_SOCKET, libc::SO_REUSEPORT, 1)
            .map_err(|error| IoError::of("let UDP sockets share a port", error))
    }

    fn bind_any(address: Option<IpAddr>, port: u16, shared: bool) -> Result<Self, IoError> {
        match address {
            Some(address) => Self::bind_to(address, port, shared),
            None => match Self::bind_to(Ipv6Addr::UNSPECIFIED.into(), port, shared) {
                // A kernel without IPv6, or with it switched off.
                Err(IoError::Kernel { .. }) => {
                    Self::bind_to(Ipv4Addr::UNSPECIFIED.into(), port, shared)
                }
                bound => bound,
            },
        }
    }

    /// Sends datagrams without a checksum, and takes them over IPv6 as well (RFC 6936); over IPv4 they
    /// always come. Datagrams go one by one then: the kernel splits no runs without checksums.
    ///
    /// # Errors
    /// The kernel refused an option.
    pub fn leave_out_checksums(&self) -> io::Result<()> {
        self.set(libc::SOL_SOCKET, libc::SO_NO_CHECK, 1)?;
        if self.ipv6 {
            self.set(libc::SOL_UDP, libc::UDP_NO_CHECK6_TX, 1)?;
            self.set(libc::SOL_UDP, libc::UDP_NO_CHECK6_RX, 1)?;
        }
        Ok(())
    }

    /// Sets the priority of later sends inside the host (SO_PRIORITY). A priority above 6 takes CAP_NET_ADMIN
    /// or CAP_NET_RAW.
    ///
    /// # Errors
    /// The kernel refused the priority.
    pub fn set_priority(&self, priority: i32) -> io::Result<()> {
        self.set(libc::SOL_SOCKET, libc::SO_PRIORITY, priority)
    }

    /// From now on every datagram comes alone, for [`Self::recv_datagram`].
    ///
    /// # Errors
    /// The kernel refused the change.
    pub fn stop_merging(&mut self) -> io::Result<()> {
        if self.gro {
            self.set(libc::SOL_UDP, libc::UDP_GRO, 0)?;
        }
        self.gro = false;
        Ok(())
    }

    /// Receives one datagram and returns its length; a datagram longer than `buffer` is cut off.
    ///
    /// # Errors
    /// `WouldBlock` if there is none; an error of an earlier send.
    pub fn recv_datagram(&self, buffer: &mut [u8]) -> io::Result<usize> {
        rustix::io::read(&self.fd, buffer).map_err(io::Error::from)
    }

    /// The port it is bound to.
    pub const fn port(&self) -> u16 {
        self.port
    }

    /// Whether the kernel puts datagrams together on receipt.
    pub const fn gro(&self) -> bool {
        self.gro
    }

    /// A destination for [`Self::send_run`].
    ///
    /// # Errors
    /// `AddrNotAvailable`: an IPv6 address on a socket that was bound to an IPv4 address.
    pub fn remote(&self, address: SocketAddr) -> io::Result<Remote> {
        let address = canonical(address);
        let raw = match (self.ipv6, address) {
            (false, SocketAddr::V4(v4)) => RawAddress::V4(raw_v4(v4)),
            (true, SocketAddr::V4(v4)) => RawAddress::V6(raw_v6(&SocketAddrV6::new(
                v4.ip().to_ipv6_mapped(),
                v4.port(),
                0,
                0,
            ))),
            (true, SocketAddr::V6(v6)) => RawAddress::V6(raw_v6(&v6)),
            (false, SocketAddr::V6(_)) => return Err(io::ErrorKind::AddrNotAvailable.into()),
        };
        Ok(Remote { address, raw, tos: 0, source: None })
    }

    /// Sends `run` as datagrams of `segment` bytes each; the last one may be shorter. `run` has at most
    /// [`RUN_BYTES_MAX`] bytes, and all datagrams have the TOS of `to`. One datagram goes without UDP_SEGMENT.
    ///
    /// # Errors
    /// `WouldBlock` or ENOBUFS: no room now. EMSGSIZE: a datagram is longer than the route takes.
    /// EINVAL or EIO: the route takes no runs of this kind; send the datagrams singly.
    #[inline]
    pub fn send_run(&self, run: &[u8], segment: usize, to: &Remote) -> io::Result<()> {
        let iovec = libc::iovec { iov_base: run.as_ptr().cast_mut().cast(), iov_len: run.len() };
        let mut control = Control::EMPTY;
        let header =
            send_header(&iovec, to, (run.len() > segment).then_some(segment), &mut control)?;
        // SAFETY: `header` points to `to`, `iovec` and `control`, which outlive the call, with their
        // lengths; `iovec` points to `run`, which the call only reads.
        let sent = unsafe { libc::sendmsg(self.fd.as_raw_fd(), &raw const header, 0) };
        if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Takes up to `max` messages, each of one datagram or of a run put together by UDP_GRO, into `batch`,
    /// whose old content is gone.
    ///
    /// # Errors
    /// `WouldBlock` if there is none.
    #[inline]
    pub fn recv(&self, batch: &mut RecvBatch, max: usize) -> io::Result<usize> {
        let max = max.min(MESSAGES_MAX);
        batch.filled = 0;
        batch.prepare(max);
        // SAFETY: the first `max` headers were just pointed at parts of `batch`'s own heap buffers, with the right
        // lengths. Nothing else uses them during the call.
        let got = unsafe {
            libc::recvmmsg(
                self.fd.as_raw_fd(),
                batch.headers.as_mut_ptr(),
                max as libc::c_uint,
                libc::MSG_DONTWAIT,
                ptr::null_mut(),
            )
        };
        batch.filled = usize::try_from(got).map_err(|_| io::Error::last_os_error())?;
        Ok(batch.filled)
    }

    /// Datagrams that the kernel has dropped since the socket was made, for want of a reader in time; it
    /// wraps at 2^32. 0 if the kernel does not tell.
    pub fn overflows(&self) -> u32 {
        let mut info = [0_u32; MEMINFO_VARS];
        let mut len = mem::size_of_val(&info) as libc::socklen_t;
        // SAFETY: the kernel writes at most `len` bytes to `info` and the length to `len`.
        let rc = unsafe {
            libc::getsockopt(
                self.fd.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_MEMINFO,
                info.as_mut_ptr().cast(),
                &raw mut len,
            )
        };
        if rc < 0 { 0 } else { info[libc::SK_MEMINFO_DROPS as usize] }
    }

    fn bind_to(address: IpAddr, port: u16, shared: bool) -> Result<Self, IoError> {
        const WHAT: &str = "open a UDP socket";
        let family = if address.is_ipv6() { libc::AF_INET6 } else { libc::AF_INET };
        let kind = libc::SOCK_DGRAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        // SAFETY: `socket` takes plain integers and returns a descriptor or -1.
        let raw = unsafe { libc::socket(family, kind, 0) };
        if raw < 0 {
            return Err(IoError::last(WHAT));
        }
        // SAFETY: `raw` was just opened by this thread and nothing else knows it, so it has one owner.
        let fd = unsafe { OwnedFd::from_raw_fd(raw) };
        let mut socket = Self { fd, ipv6: address.is_ipv6(), gro: false, port };
        socket.configure(address).map_err(|error| IoError::of("set up a UDP socket", error))?;
        if shared {
            socket.share()?;
        }
        let local = socket
            .remote(SocketAddr::new(address, port))
            .map_err(|error| IoError::of("bind a UDP socket", error))?;
        let (name, len) = local.raw.as_ptr();
        // SAFETY: `name` points to the `len` bytes of `local`'s address.
        if unsafe { libc::bind(socket.fd.as_raw_fd(), name, len) } < 0 {
            let error = io::Error::last_os_error();
            return Err(match error.raw_os_error() {
                Some(libc::EADDRINUSE) => IoError::PortInUse { port },
                _ => IoError::of("bind a UDP socket", error),
            });
        }
        socket.port = socket.local_port().map_err(|error| IoError::of(WHAT, error))?;
        Ok(socket)
    }

    fn configure(&mut self, address: IpAddr) -> io::Result<()> {
        if self.ipv6 {
            self.set(libc::IPPROTO_IPV6, libc::IPV6_V6ONLY, i32::from(!address.is_unspecified()))?;
            self.set(libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER, libc::IPV6_PMTUDISC_PROBE)?;
            self.set(libc::IPPROTO_IPV6, libc::IPV6_RECVTCLASS, 1)?;
        }
        if !self.ipv6 || address.is_unspecified() {
            self.set(libc::IPPROTO_IP, libc::IP_MTU_DISCOVER, libc::IP_PMTUDISC_PROBE)?;
            self.set(libc::IPPROTO_IP, libc::IP_RECVTOS, 1)?;
        }
        for (force, plain) in
            [(libc::SO_RCVBUFFORCE, libc::SO_RCVBUF), (libc::SO_SNDBUFFORCE, libc::SO_SNDBUF)]
        {
            // Without CAP_NET_ADMIN the kernel grants as much as the sysctl allows.
            if self.set(libc::SOL_SOCKET, force, SOCKET_BUFFER_BYTES).is_err() {
                self.set(libc::SOL_SOCKET, plain, SOCKET_BUFFER_BYTES)?;
            }
        }
        self.gro = self.set(libc::SOL_UDP, libc::UDP_GRO, 1).is_ok();
        Ok(())
    }

    fn set(&self, level: libc::c_int, option: libc::c_int, value: libc::c_int) -> io::Result<()> {
        set_option(self.fd.as_fd(), level, option, value)
    }

    fn local_port(&self) -> io::Result<u16> {
        let mut name = zeroed_storage();
        let mut len = mem::size_of_val(&name) as libc::socklen_t;
        // SAFETY: the kernel writes at most `len` bytes to `name` and the length to `len`.
        let rc =
            unsafe { libc::getsockname(self.fd.as_raw_fd(), (&raw mut name).cast(), &raw mut len) };
        if rc < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(address_of(&name).port())
    }
}

/// Marks all that a socket sends from now on (SO_MARK), for the host's packet filter and routes. Needs
/// CAP_NET_ADMIN.
///
/// # Errors
/// The kernel refused the mark.
pub fn set_mark(socket: impl AsFd, mark: u32) -> io::Result<()> {
    set_option(socket.as_fd(), libc::SOL_SOCKET, libc::SO_MARK, mark as libc::c_int)
}

fn set_option(
    socket: BorrowedFd<'_>,
    level: libc::c_int,
    option: libc::c_int,
    value: libc::c_int,
) -> io::Result<()> {
    // SAFETY: the option's value is read from `value`, an int of the length given.
    let rc = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            level,
            option,
            (&raw const value).cast(),
            mem::size_of_val(&value) as libc::socklen_t,
        )
    };
    if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// The first int of a socket option.
fn option(
    socket: BorrowedFd<'_>,
    level: libc::c_int,
    option: libc::c_int,
) -> io::Result<libc::c_int> {
    let mut value: libc::c_int = 0;
    let mut len = mem::size_of_val(&value) as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes to `value`, for which all are valid, and the length
    // to `len`.
    let rc = unsafe {
        libc::getsockopt(socket.as_raw_fd(), level, option, (&raw mut value).cast(), &raw mut len)
    };
    if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(value) }
}

impl AsFd for UdpSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Remote {
    /// A destination in the form of its own family, for identification and for [`send_from`]: Linux takes an IPv4
    /// address on a socket of IPv6, too. [`UdpSocket::remote`] makes those that [`UdpSocket::send_run`] takes.
    pub fn of(address: SocketAddr) -> Self {
        let address = canonical(address);
        let raw = match address {
            SocketAddr::V4(v4) => RawAddress::V4(raw_v4(v4)),
            SocketAddr::V6(v6) => RawAddress::V6(raw_v6(&v6)),
        };
        Self { address, raw, tos: 0, source: None }
    }

    /// The address, IPv4 as IPv4 on any socket.
    pub const fn address(&self) -> SocketAddr {
        self.address
    }

    /// Whether it is reached over IPv6.
    #[inline]
    pub const fn is_ipv6(&self) -> bool {
        self.address.is_ipv6()
    }

    /// The same place for datagrams with this IPv4 TOS or IPv6 traffic class; 0 unless said.
    #[must_use]
    pub const fn with_tos(self, tos: u8) -> Self {
        Self { tos, ..self }
    }

    /// The same place, sent to from this address of the host, which is of the same family.
    #[must_use]
    pub const fn with_source(self, source: Option<IpAddr>) -> Self {
        Self { source, ..self }
    }

    /// The address that is sent from, if it is not the system's choice.
    pub const fn source(&self) -> Option<IpAddr> {
        self.source
    }

    /// IPv4 TOS or IPv6 traffic class of datagrams to it.
    pub const fn tos(&self) -> u8 {
        self.tos
    }
}

impl std::fmt::Debug for Remote {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.address.fmt(f)
    }
}

impl RawAddress {
    fn as_ptr(&self) -> (*const libc::sockaddr, libc::socklen_t) {
        match self {
            Self::V4(v4) => (ptr::from_ref(v4).cast(), mem::size_of_val(v4) as libc::socklen_t),
            Self::V6(v6) => (ptr::from_ref(v6).cast(), mem::size_of_val(v6) as libc::socklen_t),
        }
    }

    fn storage(&self) -> libc::sockaddr_storage {
        let mut storage = zeroed_storage();
        let (name, len) = self.as_ptr();
        // SAFETY: `name` points to the `len` bytes of this address. A `sockaddr_storage` has room for every kind
        // of address, and any bytes are valid for it. It is not part of `self`.
        unsafe {
            ptr::copy_nonoverlapping(
                name.cast::<u8>(),
                (&raw mut storage).cast::<u8>(),
                len as usize,
            );
        }
        storage
    }
}

/// A source address as the kernel tells it: IPv4 as IPv4, and a scope only if the address alone does not identify
/// the host.
fn canonical(address: SocketAddr) -> SocketAddr {
    let port = address.port();
    match (address.ip().to_canonical(), address) {
        (IpAddr::V6(ip), SocketAddr::V6(v6)) if ip.is_unicast_link_local() => {
            SocketAddrV6::new(ip, port, 0, v6.scope_id()).into()
        }
        (ip, _) => SocketAddr::new(ip, port),
    }
}

fn raw_v4(v4: SocketAddrV4) -> libc::sockaddr_in {
    libc::sockaddr_in {
        sin_family: libc::AF_INET as libc::sa_family_t,
        sin_port: v4.port().to_be(),
        sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(v4.ip().octets()) },
        sin_zero: [0; 8],
    }
}

fn raw_v6(address: &SocketAddrV6) -> libc::sockaddr_in6 {
    libc::sockaddr_in6 {
        sin6_family: libc::AF_INET6 as libc::sa_family_t,
        sin6_port: address.port().to_be(),
        sin6_flowinfo: address.flowinfo(),
        sin6_addr: libc::in6_addr { s6_addr: address.ip().octets() },
        sin6_scope_id: address.scope_id(),
    }
}

fn zeroed_storage() -> libc::sockaddr_storage {
    // SAFETY: a `sockaddr_storage` is a C struct of integers, for which zero bytes are valid.
    unsafe { mem::zeroed() }
}

/// The address that the kernel wrote, IPv4 as IPv4; unspecified if it is of neither family.
fn address_of(storage: &libc::sockaddr_storage) -> SocketAddr {
    match libc::c_int::from(storage.ss_family) {
        libc::AF_INET => {
            // SAFETY: `sockaddr_storage` is large enough and aligned for every address kind, and the
            // family says that it holds a `sockaddr_in`.
            let v4 = unsafe { &*ptr::from_ref(storage).cast::<libc::sockaddr_in>() };
            let ip = Ipv4Addr::from(v4.sin_addr.s_addr.to_ne_bytes());
            SocketAddr::new(ip.into(), u16::from_be(v4.sin_port))
        }
        libc::AF_INET6 => {
            // SAFETY: as above, the family says that it holds a `sockaddr_in6`.
            let v6 = unsafe { &*ptr::from_ref(storage).cast::<libc::sockaddr_in6>() };
            let ip = Ipv6Addr::from(v6.sin6_addr.s6_addr);
            let port = u16::from_be(v6.sin6_port);
            match ip.to_ipv4_mapped() {
                Some(v4) => SocketAddr::new(v4.into(), port),
                None => SocketAddrV6::new(ip, port, 0, v6.sin6_scope_id).into(),
            }
        }
        _ => SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 0),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::poller::Poller;

    const LOOPBACK: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

    /// From any address of the host that is asked for, on a socket that is bound to none.
    #[test]
    fn the_source_is_the_address_that_was_asked_for() {
        let to = UdpSocket::bind(Some(LOOPBACK), 0).unwrap();
        let from = UdpSocket::bind(None, 0).unwrap();
        let remote = from.remote(SocketAddr::new(LOOPBACK, to.port())).unwrap();
        let mut batch = RecvBatch::new();
        let mut source = |remote: &Remote, run: &[u8]| {
            from.send_run(run, 100, remote).unwrap();
            to.recv(&mut batch, 1).unwrap();
            batch.message(0).unwrap().source.ip()
        };
        assert_eq!(source(&remote, &[1; 100]), LOOPBACK);
        let other: IpAddr = "127.0.0.9".parse().unwrap();
        let remote = remote.with_source(Some(other)).with_tos(2);
        assert_eq!(remote.source(), Some(other));
        assert_eq!(source(&remote, &[1; 100]), other);
        assert_eq!(source(&remote, &[1; 250]), other, "a run");
        assert_eq!(source(&remote.with_source(None), &[1; 100]), LOOPBACK);
        let to = UdpSocket::bind(Some(Ipv6Addr::LOCALHOST.into()), 0).unwrap();
        let remote = from.remote(SocketAddr::new(Ipv6Addr::LOCALHOST.into(), to.port())).unwrap();
        let remote = remote.with_source(Some(Ipv6Addr::LOCALHOST.into()));
        from.send_run(&[1; 250], 100, &remote).unwrap();
        to.recv(&mut batch, 1).unwrap();
        assert!(batch.message(0).unwrap().source.is_ipv6());
        let nobodys = remote.with_source("2001:db8::1".parse().ok());
        assert!(from.send_run(&[1; 10], 10, &nobodys).is_err(), "an address of somebody else");
    }

    fn pair() -> (UdpSocket, UdpSocket, Remote) {
        let from = UdpSocket::bind(Some(LOOPBACK), 0).unwrap();
        let to = UdpSocket::bind(Some(LOOPBACK), 0).unwrap();
        let remote = from.remote(SocketAddr::new(LOOPBACK, to.port())).unwrap();
        (from, to, remote)
    }

    /// All datagrams that have arrived, in order, and how many messages they took.
    fn datagrams(socket: &UdpSocket, count: usize) -> (Vec<Vec<u8>>, usize) {
        let mut batch = RecvBatch::new();
        let mut poller = Poller::new().unwrap();
        poller.add(socket, 0).unwrap();
        let (mut all, mut messages) = (Vec::new(), 0);
        while all.len() < count {
            let wait = std::time::Duration::from_secs(5);
            assert!(poller.wait(Some(wait)).unwrap().count() > 0, "{} of {count}", all.len());
            for index in 0..socket.recv(&mut batch, 8).unwrap() {
                let message = batch.message(index).unwrap();
                assert!(!message.truncated);
                all.extend(
                    batch.buffer()[message.range].chunks(message.segment).map(<[u8]>::to_vec),
                );
                messages += 1;
            }
        }
        assert_eq!(socket.recv(&mut batch, 8).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        assert!(batch.is_empty() && batch.message(0).is_none());
        (all, messages)
    }

    #[test]
    fn a_batch_goes_from_thread_to_thread() {
        let (from, to, remote) = pair();
        let mut batch = RecvBatch::new();
        for turn in 0..3_u8 {
            from.send_run(&[turn; 900], 400, &remote).unwrap();
            batch = std::thread::scope(|scope| {
                let received = scope.spawn(|| {
                    // Loopback delivers within the send call. The batch's old content is overwritten.
                    assert_eq!(to.recv(&mut batch, 8).unwrap(), if to.gro() { 1 } else { 3 });
                    batch
                });
                received.join().unwrap()
            });
            let message = batch.message(0).unwrap();
            assert_eq!((message.segment, message.source.port()), (400, from.port()));
            assert!(batch.buffer()[message.range].iter().all(|byte| *byte == turn));
        }
    }

    #[test]
    fn a_checksum_can_be_left_out_where_the_receiver_agrees() {
        let localhost = IpAddr::V6(Ipv6Addr::LOCALHOST);
        let [from, to, strict] = [(); 3].map(|()| UdpSocket::bind(Some(localhost), 0).unwrap());
        from.leave_out_checksums().unwrap();
        to.leave_out_checksums().unwrap();
        for socket in [&strict, &to] {
            let address = SocketAddr::new(localhost, socket.port());
            from.send_run(b"bare", 4, &from.remote(address).unwrap()).unwrap();
        }
        assert_eq!(datagrams(&to, 1).0, [b"bare"]);
        // It came by the same queue before.
        let error = strict.recv_datagram(&mut [0; 8]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
    }

    #[test]
    fn a_run_arrives_as_equal_datagrams() {
        let (from, to, remote) = pair();
        let run: Vec<u8> = (0..64 * 1000 - 400).map(|i| (i / 100) as u8).collect();
        from.send_run(&run, 1000, &remote).unwrap();
        let (got, messages) = datagrams(&to, 64);
        assert_eq!(got.concat(), run);
        assert!(got[..63].iter().all(|datagram| datagram.len() == 1000));
        assert_eq!(got[63].len(), 600);
        assert!(messages == 1 || !to.gro(), "{messages} messages with UDP_GRO");
    }

    #[test]
    fn single_datagrams_come_in_one_batch_with_their_source() {
        let (from, to, remote) = pair();
        for byte in 1..=5 {
            from.send_run(&[byte; 32], 32, &remote).unwrap();
        }
        let mut batch = RecvBatch::new();
        assert_eq!(to.recv(&mut batch, MESSAGES_MAX).unwrap(), 5);
        let last = batch.message(4).unwrap();
        assert_eq!(last.source, SocketAddr::new(LOOPBACK, from.port()));
        assert_eq!((last.segment, &batch.buffer()[last.range]), (32, &[5; 32][..]));
    }

    #[test]
    fn a_message_put_in_is_what_the_kernel_would_have_given() {
        let run: Vec<u8> = (0..3 * 700 - 9).map(|at| at as u8).collect();
        let dual = UdpSocket::bind(None, 0).unwrap();
        for (to, ip) in [("127.0.0.1", LOOPBACK), ("::1", Ipv6Addr::LOCALHOST.into())] {
            let to = UdpSocket::bind(Some(to.parse().unwrap()), 0).unwrap();
            let there = dual.remote(SocketAddr::new(ip, to.port())).unwrap();
            dual.send_run(&run, 700, &there).unwrap();
            let (mut received, mut made) = (RecvBatch::new(), RecvBatch::new());
            assert_eq!(to.recv(&mut received, 1).unwrap(), 1);
            let from = to.remote(SocketAddr::new(ip, dual.port())).unwrap();
            assert!(made.push(&run, 700, &from));
            assert_eq!(made.message(0), received.message(0));
            let range = made.message(0).unwrap().range;
            assert_eq!(made.buffer()[range.clone()], received.buffer()[range]);
        }
        let mut batch = RecvBatch::new();
        let from = dual.remote(SocketAddr::new(LOOPBACK, 9)).unwrap();
        assert!(batch.push(&vec![0; MESSAGE_ROOM + 1], 1000, &from));
        let cut = batch.message(0).unwrap();
        assert_eq!((cut.truncated, cut.range.len()), (true, MESSAGE_ROOM));
        batch.clear();
        for number in 1..=MESSAGES_MAX {
            assert!(batch.push(&[number as u8; 40], 20, &from));
        }
        assert!(!batch.push(&[0; 40], 20, &from));
        let last = batch.message(MESSAGES_MAX - 1).unwrap();
        assert_eq!(
            (last.segment, &batch.buffer()[last.range]),
            (20, &[MESSAGES_MAX as u8; 40][..])
        );
        batch.clear();
        assert!(batch.is_empty() && batch.message(0).is_none());
    }

    #[test]
    fn the_longest_datagram_fits_and_an_empty_one_is_harmless() {
        let (from, to, remote) = pair();
        from.send_run(&[7; RUN_BYTES_MAX], RUN_BYTES_MAX, &remote).unwrap();
        from.send_run(&[], 1, &remote).unwrap();
        let mut batch = RecvBatch::new();
        assert_eq!(to.recv(&mut batch, 8).unwrap(), 2);
        assert_eq!(batch.message(0).unwrap().range.len(), RUN_BYTES_MAX);
        let empty = batch.message(1).unwrap();
        assert_eq!((empty.range.len(), empty.segment), (0, 1));
    }

    #[test]
    fn too_long_datagrams_are_refused() {
        let (from, _to, remote) = pair();
        let long = vec![0; RUN_BYTES_MAX + 1];
        let error = from.send_run(&long, long.len(), &remote).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EMSGSIZE));
    }

    #[test]
    fn one_socket_serves_both_families() {
        let dual = UdpSocket::bind(None, 0).unwrap();
        let v4 = UdpSocket::bind(Some(LOOPBACK), 0).unwrap();
        let v6 = UdpSocket::bind(Some(Ipv6Addr::LOCALHOST.into()), 0).unwrap();
        for (socket, ip) in [(&v4, LOOPBACK), (&v6, Ipv6Addr::LOCALHOST.into())] {
            let there = dual.remote(SocketAddr::new(ip, socket.port())).unwrap();
            dual.send_run(b"ping", 4, &there).unwrap();
            let mut batch = RecvBatch::new();
            assert_eq!(socket.recv(&mut batch, 1).unwrap(), 1);
            assert_eq!(batch.message(0).unwrap().source, SocketAddr::new(ip, dual.port()));
            let back = socket.remote(SocketAddr::new(ip, dual.port())).unwrap();
            socket.send_run(b"pong", 4, &back).unwrap();
            assert_eq!(dual.recv(&mut batch, 1).unwrap(), 1);
            assert_eq!(batch.message(0).unwrap().source, SocketAddr::new(ip, socket.port()));
        }
        assert!(v4.remote("[::1]:1".parse().unwrap()).is_err());
    }

    #[test]
    fn the_tos_goes_with_each_message_in_every_pair_of_families() {
        let localhost = IpAddr::V6(Ipv6Addr::LOCALHOST);
        let bind = |address| UdpSocket::bind(address, 0).unwrap();
        // From, to, by which address.
        let pairs = [
            (bind(Some(LOOPBACK)), bind(Some(LOOPBACK)), LOOPBACK),
            (bind(Some(localhost)), bind(Some(localhost)), localhost),
            (bind(None), bind(None), LOOPBACK),
            (bind(None), bind(None), localhost),
            (bind(None), bind(Some(LOOPBACK)), LOOPBACK),
            (bind(Some(localhost)), bind(None), localhost),
        ];
        for (from, to, address) in pairs {
            let remote = from.remote(SocketAddr::new(address, to.port())).unwrap();
            // ECN alone, DSCP alone, both, all bits, and none after some.
            for tos in [0, 1, 2, 3, 0xb8, 0x2a, 0xff, 0] {
                for (run, segment) in [(&[7_u8; 100][..], 100), (&[7; 1900], 1000)] {
                    from.send_run(run, segment, &remote.with_tos(tos)).unwrap();
                    let mut batch = RecvBatch::new();
                    let messages = to.recv(&mut batch, 8).unwrap();
                    let got: Vec<_> = (0..messages).filter_map(|i| batch.message(i)).collect();
                    assert_eq!(got.iter().map(|got| got.range.len()).sum::<usize>(), run.len());
                    for message in got {
                        assert_eq!(message.tos, tos, "{segment} bytes to {address}");
                        assert!(message.segment == segment || !to.gro());
                    }
                }
            }
        }
    }

    #[test]
    fn a_scope_stays_where_the_address_needs_one() {
        let socket = UdpSocket::bind(None, 0).unwrap();
        let addresses = [
            ("[fe80::1%7]:9", "[fe80::1%7]:9"),
            ("[2001:db8::1%7]:9", "[2001:db8::1]:9"),
            ("[::ffff:192.0.2.1]:9", "192.0.2.1:9"),
            ("192.0.2.1:9", "192.0.2.1:9"),
        ];
        for (given, expected) in addresses {
            let given: SocketAddr = given.parse().unwrap();
            let remote = socket.remote(given).unwrap();
            assert_eq!(remote.address().to_string(), expected);
            assert_eq!(Remote::of(given).address(), remote.address());
            let RawAddress::V6(raw) = remote.raw else { panic!("the socket is of IPv6") };
            assert_eq!(raw.sin6_scope_id, if expected.contains('%') { 7 } else { 0 }, "{given}");
        }
    }

    #[test]
    fn a_control_message_cut_short_says_nothing() {
        let mut control = Control::EMPTY;
        let end = control.put(0, libc::SOL_UDP, libc::UDP_GRO, &1200_i32.to_ne_bytes());
        let end = control.put(end, libc::IPPROTO_IP, libc::IP_TOS, &[3]);
        assert_eq!(control.read(end), (Some(1200), 3));
        for len in 0..end {
            let (segment, tos) = control.read(len);
            assert!(segment.is_none_or(|segment| segment == 1200) && (tos == 0 || tos == 3));
        }
        // A length beyond the buffer, and one under a header's.
        for wrong in [1_usize, 15, 17, 4096, usize::MAX] {
            let mut bad = control;
            bad.0[..size_of::<usize>()].copy_from_slice(&wrong.to_ne_bytes());
            assert_eq!(bad.read(end).0, None, "{wrong}");
        }
        assert_eq!(control.read(usize::MAX).0, Some(1200));
    }

    #[test]
    fn a_taken_port_is_named() {
        let first = UdpSocket::bind(None, 0).unwrap();
        let error = UdpSocket::bind(None, first.port()).unwrap_err();
        assert!(matches!(error, IoError::PortInUse { port } if port == first.port()));
    }

    #[test]
    fn overflows_are_counted_by_the_kernel() {
        let (from, to, remote) = pair();
        to.set(libc::SOL_SOCKET, libc::SO_RCVBUF, 4096).unwrap();
        assert_eq!(to.overflows(), 0);
        for _ in 0..64 {
            from.send_run(&[0; 1024], 1024, &remote).unwrap();
        }
        assert!(to.overflows() > 0);
    }
}
