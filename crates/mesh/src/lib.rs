//! pure: membership, topology and routes, address ring, names: all that hosts agree on.
//!
//! A [`Mesh`] is the state machine of one host. Links, files and clocks are the caller's. It feeds in links,
//! messages, requests for addresses and the time. It carries out the outputs of [`Mesh::poll_output`] strictly in
//! order. In this version: membership from one address, networks with a table of endpoints each, names, and
//! address ranges that their owners split (`docs/design/mesh.md`, `docs/design/networks.md`). Relays and the recovery
//! of a dead host's ranges are not here yet.
//!
//! # Why no address is given twice
//!
//! - The founder of a mesh owns the whole range; every other host owns only the ranges granted to it. Only the
//!   owner of a range splits it, and [`Output::Persist`] comes before the grant. An owner that crashes never
//!   comes back as the owner of a range that it gave away.
//! - A grant answers a random request number that the asker has stored. The same number gets the same grant
//!   again, so a lost message loses nothing. An asker that lost its disk asks with a new number and gets
//!   another range. So no address that its former self used is given out.
//! - An explicit address inside the range is asked of its owner, which stores it as taken before it answers.
//! - A host's stored state says which ranges it owns; it ignores what others say about them. If the state may
//!   be old or a copy, the host gives nothing until others have said that they know no later one.
//! - While the state cannot be saved ([`Mesh::handle_saved`]), no address is given and no range changes hands.
//!
//! Admitted hosts are trusted not to lie about ranges of others, but none can take what this host owns.
#![forbid(unsafe_code)]

mod config;
mod endpoint;
mod error;
mod ledger;
pub mod limits;
mod members;
mod mesh;
mod message;
mod names;
mod network;
mod range;
mod state;

pub use config::{Config, Founding, Origin, Target};
pub use endpoint::{Conflict, EndpointInfo, HostNames};
pub use error::{AddressError, MeshError, NetworkError, Refusal};
pub use mesh::{
    Allocation, Change, IpamStatus, Mesh, NetworkStatus, Output, OwnerStatus, PeerStatus, Ticket,
};
pub use message::{
    ClaimResult, FEATURE_BARRIER, FEATURE_NETWORKS, FEATURE_SERVICES, Hello, Holding, MemberInfo,
    Message, Naming, Network, NetworkId, RangeAnnouncement,
};
pub use names::{NamePort, NameRecord, Transport, is_dns_label, is_dns_name};
pub use network::{
    NetworkClash, NetworkDefinition, NetworkOptions, OptionValue, OtherValue, WEFT, vni_of,
};
pub use range::AddressRange;
pub use state::State;
pub use weft_packet::ethernet::{Mac, ParseMacError};
pub use weft_packet::vxlan::Vni;
