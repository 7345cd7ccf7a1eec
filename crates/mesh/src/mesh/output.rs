//! The outputs of a [`super::Mesh`].

use std::net::SocketAddr;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use weft_crypto::PeerId;
use weft_packet::ethernet::Mac;
use weft_packet::vxlan::Vni;

use crate::endpoint::{Conflict, EndpointInfo};
use crate::error::{AddressError, Refusal};
use crate::message::{Message, Network};
use crate::network::NetworkClash;
use crate::range::AddressRange;
use crate::state::State;

/// Names a request for an address until its answer; never used twice in the life of a [`crate::Mesh`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(pub u64);

/// An action for the caller, which carries outputs out strictly in the order in which they are polled.
#[derive(Clone, Debug, PartialEq)]
pub enum Output {
    /// Store this in one atomic and durable step, and call [`crate::Mesh::handle_saved`] with the result. Poll for the
    /// next output only afterwards, and meanwhile by [`crate::Mesh::poll_output_while_saving`] if at all.
    Persist(Box<State>),
    /// Send a message over the link. May be dropped if the link is down by now.
    Send {
        /// The receiver.
        peer: PeerId,
        /// The message.
        message: Message,
    },
    /// Try once to link with the peer, at any of these addresses. The output repeats, with growing pauses,
    /// until the link is up or the peer is forgotten.
    Dial {
        /// The peer to dial.
        peer: PeerId,
        /// Its candidate addresses.
        addresses: Vec<SocketAddr>,
    },
    /// Endpoints of other hosts changed on a network: first `remove`, then `add`; an added one replaces an older one
    /// with the same Ethernet address.
    Endpoints {
        /// The network.
        vni: Vni,
        /// New or changed, with the hosts that they are on.
        add: Vec<(EndpointInfo, PeerId)>,
        /// Gone from this host.
        remove: Vec<(Mac, PeerId)>,
    },
    /// The hosts that share a network with this one, besides `weft`: broadcasts of it go to them and no others. A host
    /// that has lost its link stays for [`crate::limits::ENDPOINT_GRACE_S`], as its endpoints do.
    NetworkPeers {
        /// The network.
        vni: Vni,
        /// All of them, in place of those before.
        peers: Vec<PeerId>,
    },
    /// Close the link; show the reason to both ends. The mesh has forgotten the link already.
    Refuse {
        /// With whom.
        peer: PeerId,
        /// The reason.
        reason: Refusal,
    },
    /// The answer to [`crate::Mesh::allocate`] or [`crate::Mesh::claim`]: the addresses, with the length of the prefix.
    Answer {
        /// The request.
        ticket: Ticket,
        /// The network.
        vni: Vni,
        /// The addresses belong to the owner until [`crate::Mesh::release`].
        result: Result<Vec<IpNet>, AddressError>,
    },
    /// All hosts that were asked by [`crate::Mesh::start_barrier`] have answered, or are no longer linked.
    BarrierPassed {
        /// The barrier.
        ticket: Ticket,
    },
    /// Something that is worth one line in the log.
    Changed(Change),
}

/// A change that the user may want to know of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "change", rename_all = "snake_case")]
pub enum Change {
    /// This host founded a mesh and owns the whole range.
    Founded {
        /// The mesh.
        network: Network,
    },
    /// This host was granted its first ranges.
    Joined {
        /// The mesh.
        network: Network,
        /// The grantor.
        from: PeerId,
        /// The granted ranges.
        ranges: Vec<AddressRange>,
    },
    /// This host founded the ranges of a network besides `weft`, and owns all of them.
    RangesFounded {
        /// The network.
        vni: Vni,
        /// The founding.
        network: Network,
    },
    /// This host was granted more ranges, or its first ones of a network besides `weft`.
    RangesReceived {
        /// The network.
        vni: Vni,
        /// The grantor.
        from: PeerId,
        /// The granted ranges.
        ranges: Vec<AddressRange>,
    },
    /// This host granted ranges.
    RangesGiven {
        /// The network.
        vni: Vni,
        /// The receiver.
        to: PeerId,
        /// The granted ranges.
        ranges: Vec<AddressRange>,
    },
    /// A host became known.
    MemberAdded {
        /// The host's peer id.
        peer: PeerId,
        /// Its host name.
        nickname: String,
    },
    /// The host may not act on its saved state, or no longer: it gives nothing.
    StateDoubted {
        /// The reason and the remedy.
        why: String,
    },
    /// The saved state turned out to be the newest, as far as others say.
    StateBelieved,
    /// A host without a sign of life for [`crate::limits::MEMBER_FORGET_S`] was forgotten, or the user asked for it.
    MemberForgotten {
        /// The host's peer id.
        peer: PeerId,
    },
    /// Two hosts announce the same address.
    Conflict(Conflict),
    /// This host and another hold networks that clash: nothing of them passes between the two.
    NetworkClash(NetworkClash),
    /// This host no longer holds a network: its devices and endpoints may go.
    NetworkEnded {
        /// Its name.
        name: String,
        /// Its VNI.
        vni: Vni,
    },
    /// The saved state has a network with an option that this release does not know. This host holds it no more.
    NetworkUnknown {
        /// Its name.
        name: String,
        /// Its VNI.
        vni: Vni,
        /// The name of the option.
        option: String,
    },
    /// A peer sent something that cannot be true; this host ignored it.
    Ignored {
        /// The sender.
        peer: PeerId,
        /// A description of the contents.
        what: String,
    },
}
