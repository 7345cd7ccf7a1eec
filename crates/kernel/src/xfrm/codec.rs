//! The messages of NETLINK_XFRM that Weft speaks, byte for byte (`linux/xfrm.h`).
//!
//! Written here instead of using `netlink-packet-xfrm` 0.5 for three reasons. The kernel puts the keys into
//! every answer and every notice about a state. That crate copies them into plain vectors with a `Debug` that
//! prints them; here they stay in buffers that are erased. An attribute that it cannot read makes it reject
//! the whole message; here the rest is used. And it does not support the direction of a state, nor states of
//! one CPU. The tests use it as a second decoder.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use netlink_packet_core::NLM_F_DUMP;
use weft_crypto::{Cipher, SaKey};

use super::spec::{
    Direction, EntryPolicy, LaneGroup, OwnPolicy, OwnState, POLICY_PRIORITY, PolicyId, PolicySpec,
    REPLAY_WINDOW_PACKETS, StateId, StateSpec, StateUsage, Template, UdpPorts, is_own,
};
use crate::netlink::{
    reader::{HEADER_LEN, array_at, attribute, attributes, u16_at, u32_at, u64_at},
    writer::{Answer, Writer},
};

// Messages.
pub(super) const NEWSA: u16 = 0x10;
pub(super) const DELSA: u16 = 0x11;
pub(super) const GETSA: u16 = 0x12;
pub(super) const NEWPOLICY: u16 = 0x13;
pub(super) const DELPOLICY: u16 = 0x14;
pub(super) const GETPOLICY: u16 = 0x15;
pub(super) const EXPIRE: u16 = 0x18;
pub(super) const UPDPOLICY: u16 = 0x19;
pub(super) const FLUSHSA: u16 = 0x1c;
pub(super) const FLUSHPOLICY: u16 = 0x1d;
pub(super) const MAPPING: u16 = 0x26;

// Attributes.
const ENCAP: u16 = 4;
const TMPL: u16 = 5;
const SA: u16 = 6;
const POLICY: u16 = 7;
const ALG_AEAD: u16 = 18;
const REPLAY_ESN_VAL: u16 = 23;
const PROTO: u16 = 25;
const SET_MARK: u16 = 29;
const MTIMER_THRESH: u16 = 32;
const SA_DIR: u16 = 33;
const SA_PCPU: u16 = 35;

const AF_INET: u16 = 2;
const AF_INET6: u16 = 10;
const ESP: u8 = 50;
const UDP: u8 = 17;
/// The protocol in a flush of all of IPsec.
const ANY_PROTOCOL: [u8; 2] = [0, 255];
const MODE_TRANSPORT: u8 = 0;
const MODE_TUNNEL: u8 = 1;
const STATE_ESN: u8 = 128;
const POLICY_IN: u8 = 0;
const POLICY_OUT: u8 = 1;
const POLICY_ALLOW: u8 = 0;
const ENCAP_ESP_IN_UDP: u16 = 2;
const DIRECTION_IN: u8 = 1;
const DIRECTION_OUT: u8 = 2;
/// No limit of bytes or packets.
const UNLIMITED: u64 = u64::MAX;

const ICV_BITS: u32 = 128;
const ALGORITHM_NAME_LEN: usize = 64;
/// Packets out of an inbound state may only go to ports that share these bits with the VXLAN device's port:
/// 6784 to 6791. So a peer's key opens nothing else on this host.
const INNER_PORTS: (u16, u16) = (weft_packet::vxlan::PORT, 0xfff8);
/// The shortest interval in seconds between the kernel's notices that a peer's packets come from another
/// address.
const MAPPING_NOTICE_SECONDS: u32 = 5;

// Lengths of the kernel's structures.
const SELECTOR_LEN: usize = 56;
const STATE_LEN: usize = 224;
const STATE_ID_LEN: usize = 24;
const POLICY_LEN: usize = 168;
const POLICY_ID_LEN: usize = 64;
const TEMPLATE_LEN: usize = 64;
/// Room for any request of ours, so that a buffer with a key in it never grows and leaves a copy.
const REQUEST_BYTES_MAX: usize = 512;

/// Features of the running kernel beyond the oldest supported one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Abilities {
    /// States have a direction (Linux 6.10).
    pub(super) direction: bool,
    /// States can belong to one CPU (Linux 6.13).
    pub(super) per_cpu: bool,
}

/// A message's body as it is written: the kernel's structures, and attributes. Erased when dropped.
pub(super) struct Body(Writer);

impl Body {
    fn new() -> Self {
        let capacity = HEADER_LEN + REQUEST_BYTES_MAX;
        Self(Writer::secret_request(0, Answer::Nothing, capacity))
    }

    /// The request of a type with this body.
    pub(super) fn request(self, kind: u16) -> Writer {
        let mut request = self.0;
        request.set_kind(kind);
        request
    }

    /// The request for a listing of a type, with this body.
    pub(super) fn listing(self, kind: u16) -> Writer {
        let mut request = self.request(kind);
        request.add_flags(NLM_F_DUMP);
        request
    }

    pub(super) fn bytes(&self) -> &[u8] {
        self.0.as_bytes().get(HEADER_LEN..).unwrap_or_default()
    }

    fn len(&self) -> usize {
        self.bytes().len()
    }

    fn put(&mut self, bytes: &[u8]) -> &mut Self {
        self.0.raw(bytes);
        self
    }

    fn zeros(&mut self, count: usize) -> &mut Self {
        self.pad_to(self.len() + count)
    }

    fn pad_to(&mut self, length: usize) -> &mut Self {
        self.0.pad_to(HEADER_LEN + length);
        self
    }

    fn u8(&mut self, value: u8) -> &mut Self {
        self.put(&[value])
    }

    fn u16(&mut self, value: u16) -> &mut Self {
        self.put(&value.to_ne_bytes())
    }

    fn u32(&mut self, value: u32) -> &mut Self {
        self.put(&value.to_ne_bytes())
    }

    fn u64(&mut self, value: u64) -> &mut Self {
        self.put(&value.to_ne_bytes())
    }

    fn be16(&mut self, value: u16) -> &mut Self {
        self.put(&value.to_be_bytes())
    }

    fn be32(&mut self, value: u32) -> &mut Self {
        self.put(&value.to_be_bytes())
    }

    fn address(&mut self, address: IpAddr) -> &mut Self {
        match address {
            IpAddr::V4(v4) => self.put(&v4.octets()).zeros(12),
            IpAddr::V6(v6) => self.put(&v6.octets()),
        }
    }

    fn attribute(&mut self, kind: u16, write: impl FnOnce(&mut Self)) -> &mut Self {
        let start = self.0.open(kind);
        write(self);
        self.0.close(start);
        self
    }
}

/// XFRM_MSG_NEWSA.
pub(super) fn new_state(spec: &StateSpec, can: Abilities) -> Body {
    let mut body = Body::new();
    let inbound = spec.direction == Direction::In;
    let family = family_of(spec.destination);
    if inbound {
        let (port, mask) = INNER_PORTS;
        body.zeros(32).be16(port & mask).be16(mask).zeros(4);
        body.u16(family).u8(0).u8(0).u8(UDP).pad_to(SELECTOR_LEN);
    } else {
        body.zeros(SELECTOR_LEN);
    }
    body.address(spec.destination).be32(spec.spi).u8(ESP).zeros(3);
    body.address(spec.source);
    let limits = &spec.limits;
    body.u64(limits.bytes_soft).u64(limits.bytes_hard);
    body.u64(limits.packets_soft).u64(limits.packets_hard);
    let seconds = spec.lifetime.as_secs() + u64::from(spec.lifetime.subsec_nanos() > 0);
    body.u64(0).u64(seconds).u64(0).u64(0);
    // Current lifetime, statistics, sequence number.
    body.zeros(32 + 12 + 4);
    body.u32(reqid_of(spec.group)).u16(family).u8(MODE_TRANSPORT).u8(0).u8(STATE_ESN);
    body.pad_to(STATE_LEN);
    aead(&mut body, spec.cipher, &spec.key);
    if let Some(ports) = spec.encapsulation {
        body.attribute(ENCAP, |body| {
            body.u16(ENCAP_ESP_IN_UDP).be16(ports.source).be16(ports.destination).zeros(18);
        });
    }
    // Kernels without directions refuse an empty window, those with them refuse any outbound one.
    let window = match spec.direction {
        Direction::In => REPLAY_WINDOW_PACKETS,
        Direction::Out if can.direction => 0,
        Direction::Out => u32::BITS,
    };
    body.attribute(REPLAY_ESN_VAL, |body| {
        // The kernel allocates a zeroed bitmap of that many words itself.
        body.u32(window / u32::BITS).zeros(16).u32(window);
    });
    if inbound && spec.encapsulation.is_some() {
        body.attribute(MTIMER_THRESH, |body| {
            body.u32(MAPPING_NOTICE_SECONDS);
        });
    }
    if can.direction {
        let direction = if inbound { DIRECTION_IN } else { DIRECTION_OUT };
        body.attribute(SA_DIR, |body| {
            body.u8(direction);
        });
    }
    if let Some(mark) = spec.mark {
        body.attribute(SET_MARK, |body| {
            body.u32(mark);
        });
    }
    if let Some(cpu) = spec.cpu {
        body.attribute(SA_PCPU, |body| {
            body.u32(cpu);
        });
    }
    body
}

fn aead(body: &mut Body, cipher: Cipher, key: &SaKey) {
    body.attribute(ALG_AEAD, |body| {
        let end = body.len() + ALGORITHM_NAME_LEN;
        body.put(algorithm_of(cipher).as_bytes()).pad_to(end);
        let key = key.expose();
        body.u32(key.len() as u32 * u8::BITS).u32(ICV_BITS).put(key);
    });
}

/// The kernel's name of a cipher with the explicit IV that ESP has.
pub(super) const fn algorithm_of(cipher: Cipher) -> &'static str {
    match cipher {
        Cipher::Aes256Gcm => "rfc4106(gcm(aes))",
        Cipher::ChaCha20Poly1305 => "rfc7539esp(chacha20,poly1305)",
    }
}

/// The body of XFRM_MSG_GETSA and XFRM_MSG_DELSA.
pub(super) fn state_id(id: StateId) -> Body {
    let mut body = Body::new();
    body.address(id.destination).be32(id.spi).u16(family_of(id.destination)).u8(ESP);
    body.pad_to(STATE_ID_LEN);
    body
}

/// The body of XFRM_MSG_GETSA as a dump of the ESP states.
pub(super) fn all_states() -> Body {
    let mut body = Body::new();
    body.attribute(PROTO, |body| {
        body.u8(ESP);
    });
    body
}

/// The body of XFRM_MSG_GETPOLICY as a dump.
pub(super) fn all_policies() -> Body {
    Body::new()
}

/// XFRM_MSG_NEWPOLICY, or XFRM_MSG_UPDPOLICY with the same body.
pub(super) fn policy(spec: &PolicySpec) -> Body {
    let mut body = Body::new();
    selector(&mut body, &spec.id);
    body.u64(UNLIMITED).u64(UNLIMITED).u64(UNLIMITED).u64(UNLIMITED).zeros(32);
    // Current lifetime; the kernel chooses the index.
    body.zeros(32).u32(POLICY_PRIORITY).u32(0);
    body.u8(POLICY_OUT).u8(POLICY_ALLOW);
    body.pad_to(POLICY_LEN);
    let family = family_of(spec.id.destination);
    let (spi, reqid) = match spec.template {
        Template::State { spi } => (spi, reqid_of(None)),
        Template::Lanes(group) => (0, reqid_of(Some(group))),
    };
    body.attribute(TMPL, |body| {
        body.address(spec.id.destination).be32(spi).u8(ESP).zeros(3);
        body.u16(family).zeros(2).address(spec.id.source).u32(reqid);
        template_rest(body, MODE_TRANSPORT, false);
    });
    body
}

/// XFRM_MSG_NEWPOLICY of an inbound policy, or XFRM_MSG_UPDPOLICY with the same body.
pub(super) fn entry_policy(spec: &EntryPolicy) -> Body {
    let mut body = Body::new();
    let (family, any) = (family_of(spec.source), unspecified(spec.source));
    body.address(any).address(spec.source).be16(spec.port).be16(u16::MAX).zeros(4);
    body.u16(family).u8(0).u8(spec.prefix).u8(UDP).pad_to(SELECTOR_LEN);
    body.u64(UNLIMITED).u64(UNLIMITED).u64(UNLIMITED).u64(UNLIMITED).zeros(32);
    body.zeros(32).u32(spec.priority()).u32(0);
    body.u8(POLICY_IN).u8(POLICY_ALLOW);
    body.pad_to(POLICY_LEN);
    // The kernel compares the outermost state with the last template first. An optional transport template
    // requires nothing: it only identifies the policy as ours.
    let around = (0, MODE_TUNNEL, true);
    let ours = (super::REQID, MODE_TRANSPORT, spec.plain);
    let templates: &[_] = if spec.plain { &[ours] } else { &[ours, around] };
    body.attribute(TMPL, |body| {
        for &(reqid, mode, optional) in templates {
            body.address(any).be32(0).u8(ESP).zeros(3);
            body.u16(family).zeros(2).address(any).u32(reqid);
            template_rest(body, mode, optional);
        }
    });
    body
}

fn template_rest(body: &mut Body, mode: u8, optional: bool) {
    body.u8(mode).u8(0).u8(optional.into()).u8(0);
    // Any algorithm: the state decides.
    body.u32(u32::MAX).u32(u32::MAX).u32(u32::MAX);
}

const fn unspecified(like: IpAddr) -> IpAddr {
    match like {
        IpAddr::V4(_) => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        IpAddr::V6(_) => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
    }
}

/// The body of XFRM_MSG_GETPOLICY for one policy.
pub(super) fn policy_by_selector(id: &PolicyId) -> Body {
    let mut body = Body::new();
    selector(&mut body, id);
    body.u32(0).u8(POLICY_OUT).pad_to(POLICY_ID_LEN);
    body
}

/// The body of XFRM_MSG_DELPOLICY for the policy that was seen under this index, so that another one
/// with the same selector stays.
pub(super) fn policy_by_index(policy: &Policy) -> Body {
    let mut body = Body::new();
    body.zeros(SELECTOR_LEN).u32(policy.index).u8(policy.direction).pad_to(POLICY_ID_LEN);
    body
}

fn selector(body: &mut Body, id: &PolicyId) {
    let start = body.len();
    let prefix = if id.destination.is_ipv4() { 32 } else { 128 };
    body.address(id.destination).address(id.source);
    body.be16(id.port).be16(u16::MAX).zeros(4);
    body.u16(family_of(id.destination)).u8(prefix).u8(prefix).u8(UDP);
    body.pad_to(start + SELECTOR_LEN);
}

const fn family_of(address: IpAddr) -> u16 {
    match address {
        IpAddr::V4(_) => AF_INET,
        IpAddr::V6(_) => AF_INET6,
    }
}

fn reqid_of(group: Option<LaneGroup>) -> u32 {
    group.map_or(super::REQID, LaneGroup::reqid)
}

/// A state as the kernel reports it. Its key is not read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct State {
    pub(super) own: OwnState,
    pub(super) reqid: u32,
    /// Whether it has keys. A "larval" state, which the kernel makes because a policy found none, has no
    /// keys.
    pub(super) keyed: bool,
    pub(super) told: Abilities,
}

impl State {
    pub(super) fn is_own(&self) -> bool {
        is_own(self.reqid)
    }
}

/// A policy as the kernel reports it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Policy {
    /// `None`: its selector or template has a form that Weft does not write.
    pub(super) own: Option<OwnPolicy>,
    pub(super) id: Option<PolicyId>,
    pub(super) reqid: u32,
    pub(super) index: u32,
    direction: u8,
    /// Set for an inbound policy that accepts UDP to one port from one network.
    pub(super) entry: Option<EntryPolicy>,
}

impl Policy {
    pub(super) fn is_own(&self) -> bool {
        is_own(self.reqid)
    }

    pub(super) const fn is_outbound(&self) -> bool {
        self.direction == POLICY_OUT
    }

    /// Whether it is for arriving packets, and not for those that are passed on.
    pub(super) const fn is_inbound(&self) -> bool {
        self.direction == POLICY_IN
    }
}

/// XFRM_MSG_NEWSA in an answer or a notice.
pub(super) fn read_state(body: &[u8]) -> Option<State> {
    let mut state = read_state_info(body)?;
    for (kind, value) in attributes(body.get(STATE_LEN..)?) {
        read_state_attribute(&mut state, kind, value);
    }
    Some(state)
}

fn read_state_attribute(state: &mut State, kind: u16, value: &[u8]) {
    match kind {
        ALG_AEAD => state.keyed = true,
        ENCAP => {
            let source = be16_at(value, 2);
            let destination = be16_at(value, 4);
            state.own.encapsulation = source
                .zip(destination)
                .map(|(source, destination)| UdpPorts { source, destination });
        }
        SA_DIR => {
            state.told.direction = true;
            state.own.direction = match value.first() {
                Some(&DIRECTION_IN) => Some(Direction::In),
                Some(&DIRECTION_OUT) => Some(Direction::Out),
                _ => None,
            };
        }
        SA_PCPU => {
            state.told.per_cpu = true;
            state.own.cpu = u32_at(value, 0);
        }
        _ => {}
    }
}

fn read_state_info(body: &[u8]) -> Option<State> {
    let info = body.get(..STATE_LEN)?;
    if info[76] != ESP {
        return None;
    }
    let family = u16_at(info, 212)?;
    let reqid = u32_at(info, 208)?;
    let own = OwnState {
        id: StateId { destination: address_at(info, 56, family)?, spi: be32_at(info, 72)? },
        source: address_at(info, 80, family)?,
        group: LaneGroup::of_reqid(reqid),
        direction: None,
        encapsulation: None,
        cpu: None,
        usage: StateUsage {
            bytes: u64_at(info, 160)?,
            packets: u64_at(info, 168)?,
            replays: u64::from(u32_at(info, 192)?) + u64::from(u32_at(info, 196)?),
            integrity_failures: u32_at(info, 200)?.into(),
        },
    };
    Some(State { own, reqid, keyed: false, told: Abilities::default() })
}

/// The notice of XFRM_MSG_DELSA: the identity, with the state itself as an attribute.
pub(super) fn read_deleted_state(body: &[u8]) -> Option<State> {
    let info = attribute(body.get(STATE_ID_LEN..)?, SA)?;
    read_state_info(info)
}

/// XFRM_MSG_EXPIRE: the state, and whether it is gone.
pub(super) fn read_expired(body: &[u8]) -> Option<(State, bool)> {
    Some((read_state_info(body)?, *body.get(STATE_LEN)? != 0))
}

/// XFRM_MSG_MAPPING of a state of ours: the state, and the new source of its packets.
pub(super) fn read_mapping(body: &[u8]) -> Option<(StateId, SocketAddr)> {
    if !is_own(u32_at(body, 24)?) || *body.get(22)? != ESP {
        return None;
    }
    let family = u16_at(body, 20)?;
    let id = StateId { destination: address_at(body, 0, family)?, spi: be32_at(body, 16)? };
    Some((id, SocketAddr::new(address_at(body, 44, family)?, be16_at(body, 62)?)))
}

/// XFRM_MSG_FLUSHSA: whether it takes ESP states.
pub(super) fn read_flush(body: &[u8]) -> bool {
    body.first().is_some_and(|protocol| *protocol == ESP || ANY_PROTOCOL.contains(protocol))
}

/// XFRM_MSG_NEWPOLICY in an answer, and it or XFRM_MSG_UPDPOLICY in a notice.
pub(super) fn read_policy(body: &[u8]) -> Option<Policy> {
    read_policy_parts(body.get(..POLICY_LEN)?, body.get(POLICY_LEN..)?)
}

/// The notice of XFRM_MSG_DELPOLICY: the identity, with the policy itself as an attribute.
pub(super) fn read_deleted_policy(body: &[u8]) -> Option<Policy> {
    let rest = body.get(POLICY_ID_LEN..)?;
    read_policy_parts(attribute(rest, POLICY)?.get(..POLICY_LEN)?, rest)
}

fn read_policy_parts(info: &[u8], rest: &[u8]) -> Option<Policy> {
    let direction = info[160];
    let outbound = direction == POLICY_OUT;
    let templates = attribute(rest, TMPL).unwrap_or_default();
    let reqid = u32_at(templates, 44).unwrap_or_default();
    let id = read_selector(info).filter(|_| outbound);
    let spi = be32_at(templates, 16);
    let template = match (LaneGroup::of_reqid(reqid), spi) {
        (Some(group), Some(0)) => Some(Template::Lanes(group)),
        (None, Some(spi)) if is_own(reqid) => Some(Template::State { spi }),
        _ => None,
    };
    let single = templates.len() == TEMPLATE_LEN && u32_at(info, 152)? == POLICY_PRIORITY;
    let own = id.zip(template).filter(|_| single);
    Some(Policy {
        own: own.map(|(id, template)| OwnPolicy { id, template }),
        id,
        reqid,
        index: u32_at(info, 156)?,
        direction,
        entry: read_entry(info, templates).filter(|_| direction == POLICY_IN),
    })
}

/// Reads an inbound policy. `None` unless it is exactly as [`entry_policy`] writes it.
fn read_entry(info: &[u8], templates: &[u8]) -> Option<EntryPolicy> {
    let source = address_at(info, 16, u16_at(info, 40)?)?;
    let (prefix, port) = (info[43], be16_at(info, 32)?);
    let plain = templates.len() == TEMPLATE_LEN;
    let entry = EntryPolicy { source, prefix, port, plain };
    entry.check().ok()?;
    let wanted = entry_policy(&entry);
    let same = |from: usize, to: usize| info[from..to] == wanted.bytes()[from..to];
    // Compare selector, limits, priority, and everything from the direction on, but not counters or the
    // index.
    let alike = same(0, 120) && same(152, 156) && same(160, 164);
    (alike && attribute(wanted.bytes().get(POLICY_LEN..)?, TMPL)? == templates).then_some(entry)
}

/// A selector of the form that Weft writes: one host to another, one UDP port.
fn read_selector(info: &[u8]) -> Option<PolicyId> {
    let family = u16_at(info, 40)?;
    let whole = if family == AF_INET { 32 } else { 128 };
    let hosts = info[42] == whole && info[43] == whole;
    let ports = be16_at(info, 34)? == u16::MAX && be16_at(info, 38)? == 0;
    if !hosts || !ports || info[44] != UDP {
        return None;
    }
    Some(PolicyId {
        destination: address_at(info, 0, family)?,
        source: address_at(info, 16, family)?,
        port: be16_at(info, 32)?,
    })
}

fn be16_at(bytes: &[u8], at: usize) -> Option<u16> {
    array_at(bytes, at).map(u16::from_be_bytes)
}

fn be32_at(bytes: &[u8], at: usize) -> Option<u32> {
    array_at(bytes, at).map(u32::from_be_bytes)
}

fn address_at(bytes: &[u8], at: usize, family: u16) -> Option<IpAddr> {
    match family {
        AF_INET => array_at::<4>(bytes, at).map(|octets| Ipv4Addr::from(octets).into()),
        AF_INET6 => array_at::<16>(bytes, at).map(|octets| Ipv6Addr::from(octets).into()),
        _ => None,
    }
}

#[cfg(test)]
#[path = "codec_tests.rs"]
mod tests;
