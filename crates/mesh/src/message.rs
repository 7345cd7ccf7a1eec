//! Messages about the mesh, which hosts exchange over their links.

use std::collections::BTreeMap;
use std::fmt;
use std::net::{Ipv4Addr, SocketAddr};

use ipnet::{Ipv4Net, Ipv6Net};
use serde::{Deserialize, Deserializer, Serialize};
use weft_crypto::PeerId;
use weft_packet::ethernet::Mac;
use weft_packet::vxlan::Vni;

use crate::endpoint::EndpointInfo;
use crate::names::NameRecord;
use crate::network::{NetworkDefinition, NetworkOptions, OptionValue};
use crate::range::AddressRange;

/// Names one mesh, or one founding of a network's ranges: 16 random bytes of the founder, shown in hex.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct NetworkId(pub [u8; 16]);

impl fmt::Display for NetworkId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for NetworkId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl From<NetworkId> for String {
    fn from(id: NetworkId) -> Self {
        id.to_string()
    }
}

impl TryFrom<String> for NetworkId {
    type Error = &'static str;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        let fault = "a network id is 32 hexadecimal digits";
        if text.len() != 32 || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(fault);
        }
        u128::from_str_radix(&text, 16).map(|n| Self(n.to_be_bytes())).map_err(|_| fault)
    }
}

/// The mesh that a host belongs to, or the founding that its ranges of a network come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Network {
    /// Its id.
    pub id: NetworkId,
    /// The range of its containers' IPv6 addresses; a /64.
    pub range6: Ipv6Net,
}

/// Feature of hosts that know more networks than `weft`: [`Message::Networks`] and [`Message::On`].
pub const FEATURE_NETWORKS: &str = "networks";
/// Feature of hosts whose services talk to each other, by messages beside those about the mesh.
pub const FEATURE_SERVICES: &str = "services";

/// Feature of hosts that answer a [`Message::BarrierRequest`].
pub const FEATURE_BARRIER: &str = "barrier";

/// The greeting of a host when a link comes up, before any other message.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// [`crate::limits::PROTOCOL_VERSION`] of the sender.
    pub protocol: u16,
    /// Names of optional protocol features, such as [`FEATURE_NETWORKS`]; unknown ones are ignored.
    #[serde(default)]
    pub features: Vec<String>,
    /// The host name.
    pub nickname: String,
    /// The port on which the sender takes links.
    pub port: u16,
    /// Addresses at which the sender believes it can be dialled.
    #[serde(default)]
    pub addresses: Vec<SocketAddr>,
    /// `--ipalloc-range`.
    pub range: Ipv4Net,
    /// The IPv6 range asked for by configuration, if any; a /64.
    #[serde(default)]
    pub range6: Option<Ipv6Net>,
    /// The mesh that the sender belongs to, once it does.
    #[serde(default)]
    pub network: Option<Network>,
}

/// A member of the mesh, as one host tells another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemberInfo {
    /// The member's peer id.
    pub peer: PeerId,
    /// Its host name.
    pub nickname: String,
    /// Addresses at which it may be dialled.
    pub addresses: Vec<SocketAddr>,
    /// Addresses at which a linked host saw the member before, and where it no longer is.
    #[serde(default)]
    pub gone: Vec<SocketAddr>,
    /// Seconds since anyone the sender heard of had a link with it.
    pub age_s: u64,
}

/// The ranges that a host owns. Only the owner makes new versions; others pass them on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RangeAnnouncement {
    /// The mesh, or the founding of the network's ranges.
    pub network: NetworkId,
    /// The host.
    pub owner: PeerId,
    /// Grows with each change.
    pub version: u64,
    /// All that it owns.
    pub ranges: Vec<AddressRange>,
}

/// The hosts that a host's user named. Only that host makes new versions; others pass them on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Naming {
    /// The host.
    pub host: PeerId,
    /// Grows with each change.
    pub version: u64,
    /// `names` is all, and the host is in no mesh.
    pub complete: bool,
    /// Hosts that its user named and that have answered.
    pub names: Vec<PeerId>,
}

/// A network besides `weft`, as a host says that it has it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holding {
    /// The network.
    #[serde(flatten)]
    pub definition: NetworkDefinition,
    /// The founding that the host's ranges of it come from, once it has any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub founding: Option<Network>,
    /// Something of the founding is given to a container or another host.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub used: bool,
    /// The host does not hold the network; it has ranges of it still.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub resting: bool,
    /// The host does not know that its state is the newest: the founding may be over, and nobody yields to it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub unsure: bool,
}

impl Holding {
    /// Whether it may be kept: to be shared or joined, or to be told as a clash.
    pub(crate) fn may_be_kept(&self) -> bool {
        let definition = &self.definition;
        let fits = |founding: &Network| {
            let range6 = founding.range6;
            let plain = range6.prefix_len() == 64 && range6.trunc() == range6;
            plain
                && definition.range.is_some()
                && definition.range6.is_none_or(|wanted| wanted == range6)
        };
        self.founding.as_ref().is_none_or(fits) && definition.options.may_be_kept()
    }
}

/// An entry of a list of networks, as far as this release can read it.
#[derive(Deserialize)]
#[serde(untagged)]
enum Listed {
    Whole(Holding),
    /// Of a later release: a field has a value that is none here.
    Part(Part),
}

#[derive(Deserialize)]
struct Part {
    name: String,
    vni: Vni,
    #[serde(flatten)]
    fields: BTreeMap<String, OptionValue>,
}

impl From<Listed> for Holding {
    fn from(listed: Listed) -> Self {
        let Part { name, vni, fields } = match listed {
            Listed::Whole(holding) => return holding,
            Listed::Part(part) => part,
        };
        let resting = fields.get("resting") == Some(&OptionValue::Flag(true));
        // No host holds a network with options that it does not know, so nothing is equal to this one.
        let options = NetworkOptions { later: fields, ..NetworkOptions::default() };
        let definition = NetworkDefinition { name, vni, range: None, range6: None, options };
        Self { definition, founding: None, used: false, resting, unsure: false }
    }
}

/// Reads a list of networks of which a later release may have written some: they must have a name and a VNI.
fn read_networks<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<Holding>, D::Error> {
    let all = Vec::<Listed>::deserialize(deserializer)?;
    Ok(all.into_iter().map(Holding::from).collect())
}

/// The answer of a range's owner to a [`Message::Claim`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "snake_case")]
pub enum ClaimResult {
    /// The address is the asker's; the owner has stored the claim.
    Given,
    /// A container has it.
    Taken {
        /// The container that has it.
        container: String,
        /// The host on which that container is.
        host: PeerId,
    },
    /// The address is in no range of the host that was asked.
    NotMine,
    /// The asker holds [`crate::limits::CLAIMS_PER_PEER_MAX`] addresses of this host already.
    TooMany,
    /// The owner cannot store the claim.
    NotSaved,
}

/// One message between two linked hosts. Links keep the order of messages.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Message {
    /// The sender belongs to a mesh.
    Network {
        /// The mesh.
        network: Network,
    },
    /// Members that the sender knows: all of them after link-up, then changes.
    Members {
        /// The members.
        members: Vec<MemberInfo>,
    },
    /// The peers that the sender is linked with: all after link-up, then changes.
    Connections {
        /// Forget what was said before.
        full: bool,
        /// Newly linked.
        add: Vec<PeerId>,
        /// No longer linked.
        remove: Vec<PeerId>,
    },
    /// The ranges of some host.
    Ranges {
        /// The announcement.
        announcement: RangeAnnouncement,
    },
    /// How many addresses of its ranges the sender has given out.
    Usage {
        /// The number.
        used: u64,
    },
    /// The sender wants a range.
    RangeRequest {
        /// A random number that the sender has stored; repeated until answered.
        request: u64,
        /// The subnet in which the range should lie.
        within: Ipv4Net,
    },
    /// The receiver owns these ranges from now on; the sender has stored that it no longer does.
    RangeGrant {
        /// The request that this answers.
        request: u64,
        /// The mesh, or the founding of the network's ranges.
        network: Network,
        /// The ranges.
        ranges: Vec<AddressRange>,
    },
    /// The sender has stored the ranges of a grant as its own.
    RangeAccepted {
        /// The request that was granted.
        request: u64,
    },
    /// The host has no range to give.
    RangeRefused {
        /// The request that this answers.
        request: u64,
        /// The reason, for the user.
        reason: String,
        /// The host that seems to have the most free addresses.
        ask: Option<PeerId>,
    },
    /// The sender wants one address out of the receiver's ranges.
    Claim {
        /// Comes back in the answer.
        id: u64,
        /// The address.
        address: Ipv4Addr,
        /// The container that claims it.
        container: String,
    },
    /// The answer to a claim.
    ClaimAnswer {
        /// The claim's id.
        id: u64,
        /// The address.
        address: Ipv4Addr,
        /// The answer.
        result: ClaimResult,
    },
    /// The sender gives a claimed address back.
    ClaimRelease {
        /// The address.
        address: Ipv4Addr,
    },
    /// All addresses of the receiver's ranges that the sender holds; others are given back.
    ClaimsHeld {
        /// The addresses.
        addresses: Vec<Ipv4Addr>,
        /// The list goes on in the next message.
        more: bool,
    },
    /// The sender's endpoints: all after link-up, then changes.
    Endpoints {
        /// Grows by one with each change.
        version: u64,
        /// Part of the whole set, not a change.
        full: bool,
        /// The whole set goes on in the next message.
        more: bool,
        /// New or changed.
        add: Vec<EndpointInfo>,
        /// Gone.
        remove: Vec<Mac>,
    },
    /// The sender missed a change and wants the whole set of endpoints.
    EndpointsRequest,
    /// The sender wants a [`Message::BarrierReply`] once the receiver has told its engines all that came before.
    BarrierRequest {
        /// A random number.
        number: u64,
    },
    /// The sender's engines know all that came before the request.
    BarrierReply {
        /// The number of the request.
        number: u64,
    },
    /// Names that the sender's user gave, and those of its gateway's clients: all of them, after link-up and after each
    /// change.
    Names {
        /// The whole set begins here; forget parts of an earlier one.
        first: bool,
        /// It goes on in the next message.
        more: bool,
        /// The names.
        names: Vec<NameRecord>,
    },
    /// The highest generation of the receiver's state that it has told the sender; 0: none.
    Known {
        /// The generation.
        generation: u64,
    },
    /// The sender wants a [`Message::Known`].
    KnownAsked,
    /// The generation of the sender's state.
    Generation {
        /// The generation.
        generation: u64,
    },
    /// The hosts named at some host's launch; they decide which host founds the mesh.
    Naming {
        /// The statement.
        naming: Naming,
    },
    /// Networks besides `weft` that the sender has: all of them, after link-up and after each change.
    Networks {
        /// The whole set begins here; forget parts of an earlier one.
        first: bool,
        /// It goes on in the next message.
        more: bool,
        /// The networks.
        #[serde(deserialize_with = "read_networks")]
        networks: Vec<Holding>,
        /// Foundings of which the receiver had given nothing when the sender heard of them from it.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        heard: Vec<NetworkId>,
    },
    /// A message about endpoints, ranges or addresses of another network than `weft`. The receiver ignores it unless
    /// both hosts have equal networks of this VNI, and their ranges do not come from two foundings.
    On {
        /// The network.
        vni: Vni,
        /// The message.
        message: Box<Message>,
    },
}

impl Message {
    /// Whether it is a [`Message::BarrierReply`], on any network. The engines come first.
    #[must_use]
    pub fn is_barrier_reply(&self) -> bool {
        match self {
            Self::BarrierReply { .. } => true,
            Self::On { message, .. } => message.is_barrier_reply(),
            _ => false,
        }
    }

    /// Whether it is about endpoints, ranges or addresses of one network.
    pub(crate) fn is_on_network(&self) -> bool {
        matches!(
            self,
            Self::Ranges { .. }
                | Self::Usage { .. }
                | Self::RangeRequest { .. }
                | Self::RangeGrant { .. }
                | Self::RangeAccepted { .. }
                | Self::RangeRefused { .. }
                | Self::Claim { .. }
                | Self::ClaimAnswer { .. }
                | Self::ClaimRelease { .. }
                | Self::ClaimsHeld { .. }
                | Self::Endpoints { .. }
                | Self::EndpointsRequest
                | Self::BarrierRequest { .. }
                | Self::BarrierReply { .. }
        )
    }

    /// The same message, about this network.
    pub(crate) fn on(self, vni: Vni) -> Self {
        if vni == Vni::WEFT { self } else { Self::On { vni, message: Box::new(self) } }
    }
}
