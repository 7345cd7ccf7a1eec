//! Why a device refuses a request, in the kernel's numbers.

use super::Slot;

/// Error numbers of Linux (errno(3)) that a device answers with.
mod errno {
    pub(super) const ENOENT: i32 = 2;
    pub(super) const EAGAIN: i32 = 11;
    pub(super) const EBUSY: i32 = 16;
    pub(super) const EEXIST: i32 = 17;
    pub(super) const ENODEV: i32 = 19;
    pub(super) const EINVAL: i32 = 22;
    pub(super) const ERANGE: i32 = 34;
    pub(super) const ENOTSOCK: i32 = 88;
    pub(super) const EADDRINUSE: i32 = 98;
}

/// Why a device refused. It is as it was before. Every fault is the caller's, but for
/// [`Self::NoPeer`] and [`Self::NoKey`], which a race with a peer's end brings about too.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// An attribute that the command needs.
    #[error("missing attribute: {0}")]
    Missing(&'static str),
    /// A number that is too large for the field.
    #[error("{what} {value} is too large: at most {max}")]
    TooLarge {
        /// The number's name.
        what: &'static str,
        /// The given value.
        value: u32,
        /// The largest possible.
        max: u32,
    },
    /// Remote port 0.
    #[error("invalid remote port 0: give the peer's UDP port")]
    PortZero,
    /// Two remote addresses.
    #[error("both a remote IPv4 and a remote IPv6 address: give one of them")]
    TwoRemotes,
    /// A remote port by itself.
    #[error("a remote port without a remote address: give both or neither")]
    PortWithoutAddress,
    /// A remote address by itself.
    #[error("a remote address without a remote port: give both or neither")]
    AddressWithoutPort,
    /// A local address that cannot be sent from to the remote one.
    #[error("a local address without a remote address of its family: give both of one family")]
    LocalWithoutRemote,
    /// A scope id without its address.
    #[error("a scope id without a remote IPv6 address: give both or neither")]
    ScopeWithoutAddress,
    /// One of the two times.
    #[error("keepalive needs both interval and timeout: give both (0 and 0 for none)")]
    HalfKeepalive,
    /// A peer of a device that has only one.
    #[error("the peer of a p2p device has no VPN address: leave it out")]
    UnexpectedVpnAddress,
    /// A peer that nothing would ever be sent to.
    #[error("no VPN address for a peer of an mp device: give an IPv4 or IPv6 address, or both")]
    NoVpnAddress,
    /// A peer over UDP without its address.
    #[error("no remote address for a peer over UDP: give address and port")]
    NoRemote,
    /// A peer over TCP with an address, which its connection has.
    #[error("a peer over TCP has the remote address of its connection: leave it out")]
    UnexpectedRemote,
    /// IPv6 over a socket that has IPv4 only, or the reverse.
    #[error("the socket's address family cannot reach the remote address: open one of that family")]
    WrongFamily,
    /// A cipher that no device has.
    #[error("no such cipher: give aes-gcm or chacha20-poly1305")]
    UnknownCipher,
    /// A key of a length that its cipher has not.
    #[error(
        "invalid cipher key of {bytes} bytes: AES-GCM takes 16, 24 or 32, ChaCha20-Poly1305 32"
    )]
    KeyLength {
        /// The given length, in bytes.
        bytes: usize,
    },
    /// Not there (any more).
    #[error("no peer {0} on this device: it was never created, or is gone")]
    NoPeer(u32),
    /// Not there (any more).
    #[error("no key in the {slot} slot of peer {peer_id}: it was never installed, or is gone")]
    NoKey {
        /// Whose.
        peer_id: u32,
        /// The key's slot.
        slot: Slot,
    },
    /// Already there.
    #[error("peer {0} already exists on this device: change it, or delete it first")]
    PeerExists(u32),
    /// Another peer has the VPN address.
    #[error(
        "another peer of this device has one of the VPN addresses: give another, or delete that peer"
    )]
    VpnAddressTaken,
    /// No such device.
    #[error("no device has this number: it was never created, or was removed")]
    NoDevice,
    /// Somebody else's device.
    #[error("the device is not a data channel device: name another")]
    WrongDevice,
    /// The descriptor cannot carry packets.
    #[error("the descriptor is neither a UDP socket nor a connected TCP socket")]
    NotASocket,
    /// The socket serves something else.
    #[error("the socket serves another device, or carries another encapsulation: open another")]
    SocketTaken,
    /// The transport did not take a packet of the control channel.
    #[error("the packet was not sent ({0}): send it again later")]
    NotSent(std::io::ErrorKind),
    /// No room.
    #[error("the device has its maximum of {0} peers: delete some first")]
    TooManyPeers(usize),
}

impl DeviceError {
    /// The number that the kernel's device answers the same request with (`docs/design/ovpn.md`).
    pub const fn errno(&self) -> i32 {
        match self {
            Self::NoPeer(_) | Self::NoKey { .. } => errno::ENOENT,
            Self::PeerExists(_) => errno::EEXIST,
            Self::VpnAddressTaken => errno::EADDRINUSE,
            Self::NoDevice => errno::ENODEV,
            // The kernel has one number for whatever it cannot take over.
            Self::NotASocket | Self::SocketTaken => errno::ENOTSOCK,
            Self::TooManyPeers(_) => errno::EBUSY,
            Self::NotSent(_) => errno::EAGAIN,
            Self::TooLarge { .. } | Self::PortZero => errno::ERANGE,
            Self::Missing(_)
            | Self::TwoRemotes
            | Self::PortWithoutAddress
            | Self::AddressWithoutPort
            | Self::LocalWithoutRemote
            | Self::ScopeWithoutAddress
            | Self::HalfKeepalive
            | Self::UnexpectedVpnAddress
            | Self::NoVpnAddress
            | Self::NoRemote
            | Self::UnexpectedRemote
            | Self::WrongFamily
            | Self::UnknownCipher
            | Self::KeyLength { .. }
            | Self::WrongDevice => errno::EINVAL,
        }
    }
}
