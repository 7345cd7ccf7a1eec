//! Every bound of this crate, with its unit in its name.

/// Protocol version, which two hosts must share to form a mesh; a host refuses any other with an explanation.
pub const PROTOCOL_VERSION: u16 = 1;
/// Version of [`crate::State`] on disk.
pub const STATE_VERSION: u16 = 1;

/// Members that a host remembers, linked or not.
pub const MEMBERS_MAX: usize = 4096;
/// Addresses remembered of one member.
pub const ADDRESSES_PER_MEMBER_MAX: usize = 8;
/// First pause before a failed save of the state is repeated, in milliseconds; doubles each time.
pub const SAVE_RETRY_FIRST_MS: u64 = 1_000;
/// Longest such pause, in milliseconds.
pub const SAVE_RETRY_MAX_MS: u64 = 8_000;
/// Outputs that wait for the state to be saved; further ones are dropped, as if the links had lost them.
pub const HELD_OUTPUTS_MAX: usize = 1024;

/// Length of a nickname in bytes (a host name has at most 253).
pub const NICKNAME_BYTES_MAX: usize = 255;
/// Length of a container id, a container name or an allocation's owner in bytes.
pub const NAME_BYTES_MAX: usize = 255;
/// Networks, besides `weft`, that one host may hold. With `weft` as many as an engine takes.
pub const NETWORKS_MAX: usize = 255;
/// Networks in one message.
pub const NETWORKS_PER_MESSAGE_MAX: usize = 64;
/// Options of a network that a host keeps though it does not know them, to show them in a clash.
pub const LATER_OPTIONS_MAX: usize = 16;
/// Length of the name of such an option, and of its value if that is a text, in bytes.
pub const LATER_OPTION_BYTES_MAX: usize = 128;
/// Clashes of networks with one peer that are outputs within [`CLASHES_TOLD_PERIOD_S`]; the status lists all.
pub const CLASHES_TOLD_PER_PEER_MAX: usize = 64;
/// The time in which clashes that are told are counted, in seconds.
pub const CLASHES_TOLD_PERIOD_S: u64 = 3600;
/// Length of a network's name in bytes: a label in DNS.
pub const NETWORK_NAME_BYTES_MAX: usize = 63;
/// Smallest MTU of a network in bytes (RFC 8200 section 5).
pub const NETWORK_MTU_MIN_BYTES: u16 = 1_280;
/// How long a host holds a network that it joined while no container of it is there, in seconds. An attach, and a
/// restart of a container or daemon, take less.
pub const NETWORK_IDLE_S: u64 = 120;
/// How long a host waits before it founds the ranges of a network, in milliseconds: another may be about to.
pub const RANGE_FOUND_SETTLE_MS: u64 = 500;
/// How long it waits for members that have not said which networks they hold, in milliseconds. It waits as long again
/// for a host with a lower id to found. Requests are answered all the same: twice this and [`RANGE_HEARD_MS`] are
/// together less than [`ALLOCATION_WAIT_S`].
pub const RANGE_FOUND_ALONE_MS: u64 = 4_000;
/// How long a founder that has given nothing waits for a linked host to say that it has heard of the founding, in
/// milliseconds. Less than [`RANGE_ANSWER_S`]: hosts that ask the founder for a range meanwhile still get it.
pub const RANGE_HEARD_MS: u64 = 1_500;
/// Longest prefix of a range of addresses in bits.
pub const RANGE_PREFIX_MAX_BITS: u8 = 29;
/// Ranges that one host may own.
pub const RANGES_PER_PEER_MAX: usize = 1024;
/// Ranges of other hosts that are remembered over all networks together; each announcement counts as one more.
pub const ANNOUNCED_RANGES_MAX: usize = 262_144;
/// Endpoints that one host may announce, over all networks.
pub const ENDPOINTS_PER_PEER_MAX: usize = 4096;
/// Addresses of one endpoint.
pub const ADDRESSES_PER_ENDPOINT_MAX: usize = 8;
/// Further names of one endpoint.
pub const ALIASES_PER_ENDPOINT_MAX: usize = 8;
/// Length of a label of a name in DNS, in bytes (RFC 1035).
pub const DNS_LABEL_BYTES_MAX: usize = 63;
/// Length of a name below a network in bytes; with network and domain it stays below the 255 of RFC 1035.
pub const DNS_NAME_BYTES_MAX: usize = 126;
/// Names that one host may announce beside those of its endpoints: those that its user gives to addresses, and those of
/// its gateway's clients.
pub const NAMES_PER_PEER_MAX: usize = NAMES_BY_HAND_MAX + 16_384;
/// Names that the user of one host may give to addresses.
pub const NAMES_BY_HAND_MAX: usize = 1024;
/// Addresses of one such name.
pub const ADDRESSES_PER_NAME_MAX: usize = 16;
/// Services at one such name.
pub const PORTS_PER_NAME_MAX: usize = 8;
/// Conflicts of endpoints that are remembered, so that each is reported once.
pub const CONFLICTS_MAX: usize = 1024;
/// Allocations and claims that may wait at once.
pub const TICKETS_MAX: usize = 1024;
/// Barriers that may wait at once; further ones wait for nobody.
pub const BARRIERS_MAX: usize = 1024;
/// Addresses of this host's ranges that one other host may hold.
pub const CLAIMS_PER_PEER_MAX: usize = 4096;
/// Grants to one host that it has not acknowledged as stored.
pub const GRANTS_PER_PEER_MAX: usize = 4;
/// Grants in all that are not yet acknowledged.
pub const GRANTS_MAX: usize = 4096;
/// Own range requests that are remembered, so that a late grant is still taken, once.
pub const REQUESTS_MAX: usize = 16;
/// Version of a host's statement up to which it is believed from that host itself.
pub const ANNOUNCEMENT_VERSION_MAX: u64 = 1 << 48;
/// The same from any other host. It leaves the host versions above all that others say of it, so that none can run
/// another's out.
pub const RELAYED_VERSION_MAX: u64 = ANNOUNCEMENT_VERSION_MAX / 2;

/// Version up to which a statement is believed; `direct`: from the host that it is of.
pub(crate) const fn version_max(direct: bool) -> u64 {
    if direct { ANNOUNCEMENT_VERSION_MAX } else { RELAYED_VERSION_MAX }
}

/// Hosts named by the user of one host that count when the founder is chosen.
pub const TARGETS_MAX: usize = 64;
/// Hosts whose lists of named hosts are kept, until there is a mesh.
pub const NAMINGS_MAX: usize = 1024;

/// Members in one message.
pub const MEMBERS_PER_MESSAGE_MAX: usize = 48;
/// Connections in one message.
pub const CONNECTIONS_PER_MESSAGE_MAX: usize = 512;
/// Endpoints in one message.
pub const ENDPOINTS_PER_MESSAGE_MAX: usize = 32;
/// Endpoints that this version puts into one message, so that it fits [`MESSAGE_BYTES_MAX`].
pub const ENDPOINTS_PER_MESSAGE_SENT: usize = 24;
/// Names in one message.
pub const NAMES_PER_MESSAGE_MAX: usize = 32;
/// Addresses in one list of held claims.
pub const CLAIMS_PER_MESSAGE_MAX: usize = 1024;
/// No [`crate::Message`] that this crate sends is longer than this as JSON.
pub const MESSAGE_BYTES_MAX: usize = 64 * 1024;

/// How long an allocation waits for this host to get a range, in seconds.
pub const ALLOCATION_WAIT_S: u64 = 10;
/// How long a claim waits for an answer of the address's owner, in seconds.
pub const CLAIM_WAIT_S: u64 = 5;
/// After how long a claim looks for the address's owner again, in milliseconds.
pub const CLAIM_RETRY_MS: u64 = 250;
/// How long a host waits for another's answer to a range request before it asks the next, in seconds.
pub const RANGE_ANSWER_S: u64 = 2;
/// After how long all hosts are asked for a range again, in seconds.
pub const RANGE_RETRY_S: u64 = 5;
/// How long a host in doubt that reaches no other waits before it takes its saved state for the newest, in
/// seconds. Less than [`ALLOCATION_WAIT_S`]: requests made at the start are still answered.
pub const DOUBT_ALONE_S: u64 = 8;
/// How long a host whose state may be old waits for further members once one has answered, in seconds.
pub const DOUBT_LINGER_S: u64 = 3;
/// How long a host that was refused as a copy takes itself for one, in seconds; longer than until its next
/// refusal.
pub const COPY_HOLD_S: u64 = 90;
/// How long a generation that a peer has told may wait for a save that has another reason, in seconds.
pub const GENERATION_SAVE_S: u64 = 60;
/// How long the endpoints of a host outlive its link, in seconds: a daemon may restart under traffic.
pub const ENDPOINT_GRACE_S: u64 = 300;
/// After how long without a sign of life a member is forgotten, in seconds.
pub const MEMBER_FORGET_S: u64 = 24 * 3600;
/// First pause between two attempts to dial a member, in milliseconds; grows by half each time.
pub const DIAL_FIRST_MS: u64 = 2_000;
/// Longest pause between two attempts to dial a member, in milliseconds.
pub const DIAL_PAUSE_MAX_MS: u64 = 60_000;
/// How long members wait to be told again after a link elsewhere broke, in milliseconds.
pub const RESYNC_DELAY_MS: u64 = 2_000;
/// Shortest pause between two reports of this host's use of its ranges, in milliseconds.
pub const USAGE_INTERVAL_MS: u64 = 5_000;
/// Hosts that the user had forgotten and of which nothing is believed; the oldest is dropped first.
pub const FORGOTTEN_MAX: usize = 1024;
/// How often the table of members is looked through for those to forget, in seconds.
pub const FORGET_CHECK_S: u64 = 600;
