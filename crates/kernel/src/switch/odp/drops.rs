//! The reasons to drop a frame.

/// Why a frame is dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum OdpDrop {
    /// It came in by a port that the switch does not know (yet), or whose network it does not know.
    UnknownPort,
    /// A tunnel packet from an address that is not a peer's.
    UnknownSource,
    /// A tunnel packet of a network that the switch does not carry.
    UnknownNetwork,
    /// Its source MAC is a group, or belongs to another port or another host.
    ForeignSource,
    /// A tunnel packet whose source MAC no peer has announced: nothing could be sent back to it.
    UnannouncedSource,
    /// To 01:80:c2:00:00:00 to 0f, which no switch passes on (IEEE 802.1Q, table 8-1).
    LinkLocal,
    /// Its destination is behind the port that it came from.
    SamePort,
    /// From the overlay to another host (split horizon).
    NotHere,
    /// To a peer without a path, or to an attachment whose port is missing.
    NoPath,
    /// No port or peer would get a copy.
    NoReceiver,
    /// From a locked port, with a source MAC that is not its own.
    LockedMac,
    /// From a locked port, with a VLAN tag, which could hide anything.
    LockedVlan,
    /// From a locked port: ARP with a sender that is not its own.
    LockedArp,
    /// From a locked port: IP from an address that is not its own.
    LockedIp,
    /// From a locked port: what only a DHCP server sends.
    LockedDhcp,
    /// From a locked port: what only a router sends.
    LockedRouter,
    /// From a locked port: it claims an IPv6 address that is not its own.
    LockedNd,
    /// From a locked port: a first fragment that hides what it carries in the next one.
    LockedFragment,
}

impl OdpDrop {
    /// All reasons.
    pub const ALL: [Self; 18] = [
        Self::UnknownPort,
        Self::UnknownSource,
        Self::UnknownNetwork,
        Self::ForeignSource,
        Self::UnannouncedSource,
        Self::LinkLocal,
        Self::SamePort,
        Self::NotHere,
        Self::NoPath,
        Self::NoReceiver,
        Self::LockedMac,
        Self::LockedVlan,
        Self::LockedArp,
        Self::LockedIp,
        Self::LockedDhcp,
        Self::LockedRouter,
        Self::LockedNd,
        Self::LockedFragment,
    ];

    /// The name in counters.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::UnknownPort => "unknown port",
            Self::UnknownSource => "unknown source",
            Self::UnknownNetwork => "unknown network",
            Self::ForeignSource => "foreign source MAC",
            Self::UnannouncedSource => "unannounced source MAC",
            Self::LinkLocal => "link-local group",
            Self::SamePort => "same port",
            Self::NotHere => "not here",
            Self::NoPath => "no path",
            Self::NoReceiver => "no receiver",
            Self::LockedMac => "locked: MAC",
            Self::LockedVlan => "locked: VLAN",
            Self::LockedArp => "locked: ARP",
            Self::LockedIp => "locked: IP",
            Self::LockedDhcp => "locked: DHCP",
            Self::LockedRouter => "locked: router",
            Self::LockedNd => "locked: ND",
            Self::LockedFragment => "locked: fragment",
        }
    }
}
