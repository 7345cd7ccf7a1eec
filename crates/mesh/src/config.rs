//! The user's configuration of a host.

use std::net::{Ipv4Addr, SocketAddr};

use ipnet::{Ipv4Net, Ipv6Net};
use weft_crypto::PeerId;

use crate::error::MeshError;
use crate::limits::{NICKNAME_BYTES_MAX, RANGE_PREFIX_MAX_BITS};

/// Whether a host without saved state founds a mesh or looks for one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Founding {
    /// Launched without naming another host: it founds a mesh at once.
    Found,
    /// Launched with the names of other hosts: it joins their mesh. If none of them has one either, the one
    /// of them with the lowest peer id founds it.
    Join,
}

/// The origin of the saved state, as far as the caller can tell.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Origin {
    /// The [generation](crate::Mesh::generation) that the run before had at its end; `None`: not known. It comes from a
    /// place that no backup and no copy of a disk brings back.
    pub last_generation: Option<u64>,
    /// The state was written elsewhere: on another machine, or into another file.
    pub copied: bool,
}

/// The configuration of a [`crate::Mesh`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// This host.
    pub local: PeerId,
    /// Its host name.
    pub nickname: String,
    /// The port on which it takes links.
    pub port: u16,
    /// Addresses at which it knows it can be dialled, if any.
    pub addresses: Vec<SocketAddr>,
    /// `--ipalloc-range`: all automatic addresses of the mesh; a /29 or larger.
    pub range: Ipv4Net,
    /// The part of `range` that automatic addresses come from, with its prefix length; `None`: all of `range`.
    pub subnet: Option<Ipv4Net>,
    /// A /64 for IPv6 addresses; `None`: an RFC 4193 one made from the network id.
    pub range6: Option<Ipv6Net>,
    /// Whether to found or to join, without saved state.
    pub founding: Founding,
    /// Dial members that other hosts name.
    pub discovery: bool,
    /// The origin of the saved state.
    pub origin: Origin,
}

impl Config {
    /// A configuration with the defaults: range 10.32.0.0/12, joining, discovery on.
    pub fn new(local: PeerId, nickname: impl Into<String>, port: u16) -> Self {
        Self {
            local,
            nickname: nickname.into(),
            port,
            addresses: Vec::new(),
            range: Ipv4Net::new_assert(Ipv4Addr::new(10, 32, 0, 0), 12),
            subnet: None,
            range6: None,
            founding: Founding::Join,
            discovery: true,
            origin: Origin::default(),
        }
    }

    /// The subnet of automatic addresses.
    pub fn subnet(&self) -> Ipv4Net {
        self.subnet.unwrap_or(self.range)
    }

    pub(crate) fn check(&self) -> Result<(), MeshError> {
        if self.range.prefix_len() > RANGE_PREFIX_MAX_BITS || self.range.trunc() != self.range {
            return Err(MeshError::BadRange(self.range));
        }
        let subnet = self.subnet();
        if !self.range.contains(&subnet) || subnet.prefix_len() > 30 || subnet.trunc() != subnet {
            return Err(MeshError::BadSubnet { subnet, range: self.range });
        }
        match self.range6 {
            Some(range6) if range6.prefix_len() != 64 || range6.trunc() != range6 => {
                return Err(MeshError::BadRange6(range6));
            }
            _ => {}
        }
        if self.nickname.is_empty()
            || self.nickname.len() > NICKNAME_BYTES_MAX
            || self.nickname.chars().any(char::is_control)
        {
            return Err(MeshError::BadNickname);
        }
        Ok(())
    }
}

/// A host named by the user, and the peer that answered there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// As the user wrote it.
    pub name: String,
    /// The peer, once a link with it was up.
    pub peer: Option<PeerId>,
}
