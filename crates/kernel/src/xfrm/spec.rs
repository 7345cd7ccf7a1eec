//! States and policies of the kernel's IPsec, as wanted and as found.

use std::{net::IpAddr, time::Duration};

use weft_crypto::{Cipher, SaKey};

use crate::error::KernelError;

/// The tag of everything of ours: the reqid of the states and templates of paths with one lane.
pub const REQID: u32 = 0x5745_4654;
/// Packets that the replay window of an inbound state spans: the most that Linux takes.
pub const REPLAY_WINDOW_PACKETS: u32 = 4096;
/// The priority of our outbound policies: they name two hosts and one port, so that none should go before.
pub(super) const POLICY_PRIORITY: u32 = 0;
/// SPIs below are reserved (RFC 4303 section 2.1).
const SPI_MIN: u32 = 256;

/// The reqids whose high half is that of [`REQID`] are ours.
pub(super) const fn is_own(reqid: u32) -> bool {
    reqid >> 16 == REQID >> 16
}

/// The outbound states among which the kernel chooses by CPU (RFC 9611): one path's lanes.
///
/// A policy over such a group names no SPI, and the kernel takes any state with the group's reqid between the
/// two hosts. So each set of keys of each path has a group that no other set has at that time. A rekey
/// installs the new lanes under a new group, moves the policy, and removes the old lanes.
///
/// The reqid is the high half of [`REQID`] with the group's number as the low half.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LaneGroup(u16);

impl LaneGroup {
    /// The group with this number; `None` for the one number whose reqid is [`REQID`] itself.
    #[must_use]
    pub const fn new(number: u16) -> Option<Self> {
        if number == REQID as u16 { None } else { Some(Self(number)) }
    }

    pub(super) fn reqid(self) -> u32 {
        (REQID & 0xffff_0000) | u32::from(self.0)
    }

    pub(super) const fn of_reqid(reqid: u32) -> Option<Self> {
        if is_own(reqid) { Self::new(reqid as u16) } else { None }
    }
}

/// The direction of a state's packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Direction {
    /// To this host.
    In,
    /// From this host.
    Out,
}

/// The ports of ESP in UDP (RFC 3948), as the packets of the state carry them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct UdpPorts {
    /// The packets' source: for an outbound state, this host's port.
    pub source: u16,
    /// Their destination.
    pub destination: u16,
}

/// Limits on the traffic of a state. At a soft limit the kernel reports it once; at a hard one it removes the
/// state. `u64::MAX` means no limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Packets after which [`super::XfrmEvent::Expired`] comes, not hard.
    pub packets_soft: u64,
    /// Packets that the state carries at most.
    pub packets_hard: u64,
    /// Bytes until a soft [`super::XfrmEvent::Expired`]. The kernel counts the bytes that it seals: from the
    /// inner UDP header on.
    pub bytes_soft: u64,
    /// Bytes that the state carries, but for a last packet.
    pub bytes_hard: u64,
}

impl Limits {
    /// No limit.
    pub const NONE: Self = Self {
        packets_soft: u64::MAX,
        packets_hard: u64::MAX,
        bytes_soft: u64::MAX,
        bytes_hard: u64::MAX,
    };
}

/// A security association for the kernel: ESP in transport mode with extended sequence numbers.
///
/// The kernel drops packets out of an inbound one unless they are UDP to a port of Weft's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateSpec {
    /// The direction of its packets.
    pub direction: Direction,
    /// The sender's address. An inbound state accepts packets from any address. If it is in UDP and they come
    /// from another address, it reports [`super::XfrmEvent::RemoteMoved`].
    pub source: IpAddr,
    /// The receiver's address, of the same family.
    pub destination: IpAddr,
    /// Chosen by the receiver, at least 256.
    pub spi: u32,
    /// The AEAD.
    pub cipher: Cipher,
    /// Key and salt.
    pub key: SaKey,
    /// In UDP with these ports, or as IP protocol 50. The kernel drops packets that come the other way.
    pub encapsulation: Option<UdpPorts>,
    /// How much it carries.
    pub limits: Limits,
    /// The kernel removes it at this age, in whole seconds; zero is never. It ends by this also when
    /// the daemon is gone.
    pub lifetime: Duration,
    /// The group of lanes that an outbound state belongs to; `None`: it is a path's only lane.
    pub group: Option<LaneGroup>,
    /// The one CPU (from 0) whose packets an outbound state in a group takes. `None`: packets of CPUs without
    /// a state. Add that state first: the kernel prefers the younger of several usable states.
    pub cpu: Option<u32>,
    /// The mark (`skb->mark`) of packets out of an inbound state.
    pub mark: Option<u32>,
}

impl StateSpec {
    /// The kernel's identifier of the state.
    #[must_use]
    pub const fn id(&self) -> StateId {
        StateId { destination: self.destination, spi: self.spi }
    }

    pub(super) fn check(&self) -> Result<(), KernelError> {
        let invalid = |what| Err(KernelError::InvalidXfrm { what });
        if self.spi < SPI_MIN {
            return invalid("an SPI below 256");
        }
        if self.cpu.is_some() && (self.group.is_none() || self.direction == Direction::In) {
            return invalid("a CPU, unless it is in a group of outbound lanes");
        }
        check_hosts(self.source, self.destination)
    }
}

/// Names a state of this host's namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StateId {
    /// The receiver's address.
    pub destination: IpAddr,
    /// The receiver's number for it.
    pub spi: u32,
}

/// The kernel's counters of a state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StateUsage {
    /// Packets sealed, or opened and found authentic and new.
    pub packets: u64,
    /// Their bytes, as [`Limits`] counts them.
    pub bytes: u64,
    /// Packets dropped because they were seen before or are older than the window; it wraps.
    pub replays: u64,
    /// Packets dropped because they were not authentic; it wraps.
    pub integrity_failures: u64,
}

/// A state of ours that the kernel has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OwnState {
    /// Its name.
    pub id: StateId,
    /// The sender's address.
    pub source: IpAddr,
    /// The group of lanes it belongs to.
    pub group: Option<LaneGroup>,
    /// The direction of its packets; `None` if this kernel does not report it.
    pub direction: Option<Direction>,
    /// Its ports, if it is in UDP.
    pub encapsulation: Option<UdpPorts>,
    /// The CPU that it serves.
    pub cpu: Option<u32>,
    /// Its counters.
    pub usage: StateUsage,
}

/// The states that seal the packets that a policy selects. If none of them exists, the packets are dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Template {
    /// The state with this SPI at the policy's destination.
    State {
        /// The SPI.
        spi: u32,
    },
    /// The group's state for the sending CPU, else the group's state for none.
    Lanes(LaneGroup),
}

/// An outbound policy: UDP from one host to another, to one port, is sealed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PolicySpec {
    /// The packets that it selects.
    pub id: PolicyId,
    /// The states that seal them.
    pub template: Template,
}

impl PolicySpec {
    pub(super) fn check(&self) -> Result<(), KernelError> {
        check_hosts(self.id.source, self.id.destination)
    }
}

/// Names an outbound policy: no two have the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PolicyId {
    /// This host's address.
    pub source: IpAddr,
    /// The peer's address, of the same family.
    pub destination: IpAddr,
    /// The UDP port that the packets go to.
    pub port: u16,
}

/// A policy of ours that the kernel has.
pub type OwnPolicy = PolicySpec;

/// An inbound policy: how UDP to one port of any address of this host must have arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EntryPolicy {
    /// The network that the packets come from: its address.
    pub source: IpAddr,
    /// Length of its prefix in bits; 0 is any address of the family.
    pub prefix: u8,
    /// The UDP port that the packets go to.
    pub port: u16,
    /// Whether packets may come outside IPsec. Otherwise a state of ours must have opened them, and one
    /// tunnel of another program's IPsec may have been around it. Among two policies for a packet, the plain
    /// one comes first.
    pub plain: bool,
}

impl EntryPolicy {
    pub(super) fn check(&self) -> Result<(), KernelError> {
        let bits = if self.source.is_ipv4() { 32 } else { 128 };
        if self.prefix > bits {
            return Err(KernelError::InvalidXfrm { what: "a prefix longer than an address" });
        }
        Ok(())
    }

    /// Those with exceptions go before those without.
    pub(super) const fn priority(&self) -> u32 {
        if self.plain { POLICY_PRIORITY } else { POLICY_PRIORITY + 1 }
    }
}

fn check_hosts(source: IpAddr, destination: IpAddr) -> Result<(), KernelError> {
    let invalid = |what| Err(KernelError::InvalidXfrm { what });
    let unusable = |address: IpAddr| {
        address.is_unspecified()
            || address.is_multicast()
            || matches!(address, IpAddr::V6(v6) if v6.to_ipv4_mapped().is_some())
    };
    if source.is_ipv4() != destination.is_ipv4() {
        return invalid("addresses of two families");
    }
    if unusable(source) || unusable(destination) {
        return invalid("an address that names no host");
    }
    Ok(())
}
