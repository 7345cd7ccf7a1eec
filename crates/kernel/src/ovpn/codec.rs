//! Messages of the family ovpn (`linux/ovpn.h`). Pure: bytes in, bytes out.
//!
//! Addresses and ports are in network byte order, all other numbers in the host's. Numbers are read by their
//! length. Counters have 4 or 8 bytes, and the key id of a notice has 2 where the specification says 4.
//! Unknown, short or truncated attributes are skipped.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};

use weft_openvpn::device::{
    CipherAlgorithm, DeletionReason, KeyAttributes, KeyDirection, KeyState, Notice, Notification,
    PeerAttributes, PeerState, Slot,
};

use crate::netlink::{
    generic,
    reader::{attribute, attributes},
    writer::{Answer, NESTED, Writer},
};

/// The family's name.
pub(super) const FAMILY: &str = "ovpn";
/// Its multicast group, in which peers' notices come.
pub(super) const GROUP: &str = "peers";
const VERSION: u8 = 1;

const CMD_PEER_NEW: u8 = 1;
const CMD_PEER_SET: u8 = 2;
const CMD_PEER_GET: u8 = 3;
const CMD_PEER_DEL: u8 = 4;
const CMD_PEER_DEL_NTF: u8 = 5;
const CMD_KEY_NEW: u8 = 6;
const CMD_KEY_GET: u8 = 7;
const CMD_KEY_SWAP: u8 = 8;
const CMD_KEY_SWAP_NTF: u8 = 9;
const CMD_KEY_DEL: u8 = 10;
const CMD_PEER_FLOAT_NTF: u8 = 11;

const ATTR_IFINDEX: u16 = 1;
const ATTR_PEER: u16 = 2;
const ATTR_KEYCONF: u16 = 3;

const PEER_ID: u16 = 1;
const PEER_REMOTE_IPV4: u16 = 2;
const PEER_REMOTE_IPV6: u16 = 3;
const PEER_REMOTE_IPV6_SCOPE_ID: u16 = 4;
const PEER_REMOTE_PORT: u16 = 5;
const PEER_SOCKET: u16 = 6;
const PEER_SOCKET_NETNSID: u16 = 7;
const PEER_VPN_IPV4: u16 = 8;
const PEER_VPN_IPV6: u16 = 9;
const PEER_LOCAL_IPV4: u16 = 10;
const PEER_LOCAL_IPV6: u16 = 11;
const PEER_LOCAL_PORT: u16 = 12;
const PEER_KEEPALIVE_INTERVAL: u16 = 13;
const PEER_KEEPALIVE_TIMEOUT: u16 = 14;
const PEER_DEL_REASON: u16 = 15;
const PEER_VPN_RX_BYTES: u16 = 16;
const PEER_VPN_TX_BYTES: u16 = 17;
const PEER_VPN_RX_PACKETS: u16 = 18;
const PEER_VPN_TX_PACKETS: u16 = 19;
const PEER_LINK_RX_BYTES: u16 = 20;
const PEER_LINK_TX_BYTES: u16 = 21;
const PEER_LINK_RX_PACKETS: u16 = 22;
const PEER_LINK_TX_PACKETS: u16 = 23;
const PEER_TX_ID: u16 = 24;

const KEYCONF_PEER_ID: u16 = 1;
const KEYCONF_SLOT: u16 = 2;
const KEYCONF_KEY_ID: u16 = 3;
const KEYCONF_CIPHER_ALG: u16 = 4;
const KEYCONF_ENCRYPT_DIR: u16 = 5;
const KEYCONF_DECRYPT_DIR: u16 = 6;

const KEYDIR_CIPHER_KEY: u16 = 1;
const KEYDIR_NONCE_TAIL: u16 = 2;

/// The size of a message with a key without the two cipher keys, in bytes, with some margin.
const KEY_MESSAGE_BYTES: usize = 192;

/// Makes a peer whose packets go by the descriptor `socket` of this process.
pub(super) fn new_peer(
    family: u16,
    device: u32,
    socket: u32,
    attributes: &PeerAttributes,
) -> Writer {
    let mut request = request(family, CMD_PEER_NEW, Answer::Acknowledgement, device);
    request.nest(ATTR_PEER | NESTED, |list| {
        list.u32(PEER_SOCKET, socket);
        write_peer(list, attributes);
    });
    request
}

/// Changes a peer's attributes.
pub(super) fn set_peer(family: u16, device: u32, attributes: &PeerAttributes) -> Writer {
    let mut request = request(family, CMD_PEER_SET, Answer::Acknowledgement, device);
    request.nest(ATTR_PEER | NESTED, |list| write_peer(list, attributes));
    request
}

/// Asks for one peer.
pub(super) fn get_peer(family: u16, device: u32, id: u32) -> Writer {
    let mut request = request(family, CMD_PEER_GET, Answer::Acknowledgement, device);
    request.nest(ATTR_PEER | NESTED, |list| list.u32(PEER_ID, id));
    request
}

/// Asks for all peers of a device.
pub(super) fn dump_peers(family: u16, device: u32) -> Writer {
    request(family, CMD_PEER_GET, Answer::Dump, device)
}

/// Deletes a peer.
pub(super) fn delete_peer(family: u16, device: u32, id: u32) -> Writer {
    let mut request = request(family, CMD_PEER_DEL, Answer::Acknowledgement, device);
    request.nest(ATTR_PEER | NESTED, |list| list.u32(PEER_ID, id));
    request
}

/// Puts a key into a slot. The request is erased when dropped.
pub(super) fn new_key(family: u16, device: u32, attributes: &KeyAttributes) -> Writer {
    let bytes = |direction: &Option<KeyDirection>| {
        direction.as_ref().map_or(0, |direction| direction.cipher_key.len())
    };
    let capacity = KEY_MESSAGE_BYTES + bytes(&attributes.encrypt) + bytes(&attributes.decrypt);
    let answer = Answer::Acknowledgement;
    let mut request = generic::secret_request(family, VERSION, CMD_KEY_NEW, answer, capacity);
    request.u32(ATTR_IFINDEX, device);
    request.nest(ATTR_KEYCONF | NESTED, |list| {
        put(list, KEYCONF_PEER_ID, attributes.peer_id);
        put(list, KEYCONF_SLOT, attributes.slot.map(slot_number));
        put(list, KEYCONF_KEY_ID, attributes.key_id);
        put(list, KEYCONF_CIPHER_ALG, attributes.cipher.map(cipher_number));
        write_direction(list, KEYCONF_ENCRYPT_DIR, attributes.encrypt.as_ref());
        write_direction(list, KEYCONF_DECRYPT_DIR, attributes.decrypt.as_ref());
    });
    request
}

/// Asks which key is in a slot.
pub(super) fn get_key(family: u16, device: u32, peer_id: u32, slot: Slot) -> Writer {
    slot_request(family, CMD_KEY_GET, device, peer_id, slot)
}

/// Exchanges the keys in a peer's two slots.
pub(super) fn swap_keys(family: u16, device: u32, peer_id: u32) -> Writer {
    let mut request = request(family, CMD_KEY_SWAP, Answer::Acknowledgement, device);
    request.nest(ATTR_KEYCONF | NESTED, |list| list.u32(KEYCONF_PEER_ID, peer_id));
    request
}

/// Empties a slot.
pub(super) fn delete_key(family: u16, device: u32, peer_id: u32, slot: Slot) -> Writer {
    slot_request(family, CMD_KEY_DEL, device, peer_id, slot)
}

/// Reads a peer (the attributes of an answer, which does not name the device).
pub(super) fn peer(body: &[u8]) -> Option<PeerState> {
    let list = attribute(body, ATTR_PEER)?;
    let id = u32_of(attribute(list, PEER_ID)?)?;
    let mut state =
        PeerState { id, remote: remote(list), local: local(list), ..PeerState::default() };
    for (kind, value) in attributes(list) {
        match kind {
            PEER_TX_ID => state.tx_id = u32_of(value),
            PEER_SOCKET_NETNSID => state.socket_netns = i32_of(value),
            PEER_VPN_IPV4 => state.vpn_ipv4 = ipv4_of(value),
            PEER_VPN_IPV6 => state.vpn_ipv6 = ipv6_of(value),
            PEER_KEEPALIVE_INTERVAL => {
                state.keepalive.interval_s = u32_of(value).unwrap_or_default();
            }
            PEER_KEEPALIVE_TIMEOUT => {
                state.keepalive.timeout_s = u32_of(value).unwrap_or_default();
            }
            PEER_VPN_RX_BYTES => state.vpn.rx_bytes = counter(value),
            PEER_VPN_TX_BYTES => state.vpn.tx_bytes = counter(value),
            PEER_VPN_RX_PACKETS => state.vpn.rx_packets = counter(value),
            PEER_VPN_TX_PACKETS => state.vpn.tx_packets = counter(value),
            PEER_LINK_RX_BYTES => state.link.rx_bytes = counter(value),
            PEER_LINK_TX_BYTES => state.link.tx_bytes = counter(value),
            PEER_LINK_RX_PACKETS => state.link.rx_packets = counter(value),
            PEER_LINK_TX_PACKETS => state.link.tx_packets = counter(value),
            _ => {}
        }
    }
    Some(state)
}

/// Reads the description of a key. `None` also if its cipher is unknown.
pub(super) fn key(body: &[u8]) -> Option<KeyState> {
    let list = attribute(body, ATTR_KEYCONF)?;
    let cipher = match u32_of(attribute(list, KEYCONF_CIPHER_ALG)?)? {
        0 => CipherAlgorithm::None,
        1 => CipherAlgorithm::AesGcm,
        2 => CipherAlgorithm::ChaCha20Poly1305,
        _ => return None,
    };
    Some(KeyState { key_id: u32_of(attribute(list, KEYCONF_KEY_ID)?)?, cipher, epoch: None })
}

/// Whether messages of this command are notices that [`notice`] is to read.
pub(super) fn is_notice(command: u8) -> bool {
    matches!(command, CMD_PEER_DEL_NTF | CMD_KEY_SWAP_NTF | CMD_PEER_FLOAT_NTF)
}

/// Reads a notice. None if it is something else, lacks a part, or has a reason that is not known.
pub(super) fn notice(command: u8, body: &[u8]) -> Option<Notice> {
    let device = u32_of(attribute(body, ATTR_IFINDEX)?)?;
    let what = match command {
        CMD_PEER_DEL_NTF => {
            let list = attribute(body, ATTR_PEER)?;
            let number = u32_of(attribute(list, PEER_DEL_REASON)?)?;
            let reason = *DeletionReason::ALL.get(usize::try_from(number).ok()?)?;
            Notification::PeerDeleted { peer_id: u32_of(attribute(list, PEER_ID)?)?, reason }
        }
        CMD_KEY_SWAP_NTF => {
            let list = attribute(body, ATTR_KEYCONF)?;
            Notification::KeySwap {
                peer_id: u32_of(attribute(list, KEYCONF_PEER_ID)?)?,
                key_id: u32_of(attribute(list, KEYCONF_KEY_ID)?)?,
            }
        }
        CMD_PEER_FLOAT_NTF => {
            let list = attribute(body, ATTR_PEER)?;
            let peer_id = u32_of(attribute(list, PEER_ID)?)?;
            Notification::PeerFloat { peer_id, remote: remote(list)? }
        }
        _ => return None,
    };
    Some(Notice { device, what })
}

fn request(family: u16, command: u8, answer: Answer, device: u32) -> Writer {
    let mut request = generic::request(family, VERSION, command, answer);
    request.u32(ATTR_IFINDEX, device);
    request
}

fn slot_request(family: u16, command: u8, device: u32, peer_id: u32, slot: Slot) -> Writer {
    let mut request = request(family, command, Answer::Acknowledgement, device);
    request.nest(ATTR_KEYCONF | NESTED, |list| {
        list.u32(KEYCONF_PEER_ID, peer_id);
        list.u32(KEYCONF_SLOT, slot_number(slot));
    });
    request
}

fn write_peer(list: &mut Writer, attributes: &PeerAttributes) {
    put(list, PEER_ID, attributes.id);
    put_bytes(list, PEER_REMOTE_IPV4, attributes.remote_ipv4.map(|it| it.octets()));
    put_bytes(list, PEER_REMOTE_IPV6, attributes.remote_ipv6.map(|it| it.octets()));
    put(list, PEER_REMOTE_IPV6_SCOPE_ID, attributes.remote_ipv6_scope_id);
    put_bytes(list, PEER_REMOTE_PORT, attributes.remote_port.map(u16::to_be_bytes));
    put_bytes(list, PEER_VPN_IPV4, attributes.vpn_ipv4.map(|it| it.octets()));
    put_bytes(list, PEER_VPN_IPV6, attributes.vpn_ipv6.map(|it| it.octets()));
    put_bytes(list, PEER_LOCAL_IPV4, attributes.local_ipv4.map(|it| it.octets()));
    put_bytes(list, PEER_LOCAL_IPV6, attributes.local_ipv6.map(|it| it.octets()));
    put(list, PEER_KEEPALIVE_INTERVAL, attributes.keepalive_interval_s);
    put(list, PEER_KEEPALIVE_TIMEOUT, attributes.keepalive_timeout_s);
    put(list, PEER_TX_ID, attributes.tx_id);
}

fn write_direction(list: &mut Writer, kind: u16, direction: Option<&KeyDirection>) {
    if let Some(direction) = direction {
        list.nest(kind | NESTED, |list| {
            list.bytes(KEYDIR_CIPHER_KEY, &direction.cipher_key);
            list.bytes(KEYDIR_NONCE_TAIL, &direction.nonce_tail);
        });
    }
}

fn put(list: &mut Writer, kind: u16, value: Option<u32>) {
    if let Some(value) = value {
        list.u32(kind, value);
    }
}

fn put_bytes<const N: usize>(list: &mut Writer, kind: u16, value: Option<[u8; N]>) {
    if let Some(value) = value {
        list.bytes(kind, &value);
    }
}

const fn slot_number(slot: Slot) -> u32 {
    match slot {
        Slot::Primary => 0,
        Slot::Secondary => 1,
    }
}

const fn cipher_number(cipher: CipherAlgorithm) -> u32 {
    match cipher {
        CipherAlgorithm::None => 0,
        CipherAlgorithm::AesGcm => 1,
        CipherAlgorithm::ChaCha20Poly1305 => 2,
    }
}

/// A peer's remote address; over TCP the kernel does not report it.
fn remote(list: &[u8]) -> Option<SocketAddr> {
    let port = port_of(attribute(list, PEER_REMOTE_PORT)?)?;
    if let Some(address) = attribute(list, PEER_REMOTE_IPV4).and_then(ipv4_of) {
        return Some((address, port).into());
    }
    let address = attribute(list, PEER_REMOTE_IPV6).and_then(ipv6_of)?;
    let scope = attribute(list, PEER_REMOTE_IPV6_SCOPE_ID).and_then(u32_of).unwrap_or_default();
    Some(match address.to_ipv4_mapped() {
        Some(ipv4) => (ipv4, port).into(),
        None => SocketAddrV6::new(address, port, 0, scope).into(),
    })
}

/// The source address of packets to a peer. No address: any will do.
fn local(list: &[u8]) -> Option<SocketAddr> {
    let port = port_of(attribute(list, PEER_LOCAL_PORT)?)?;
    let ipv4 = attribute(list, PEER_LOCAL_IPV4).and_then(ipv4_of).map(IpAddr::V4);
    let ipv6 = attribute(list, PEER_LOCAL_IPV6).and_then(ipv6_of);
    let any = match remote(list) {
        Some(SocketAddr::V6(_)) => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
        _ => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
    };
    let address = ipv4.or(ipv6.map(|ipv6| IpAddr::V6(ipv6).to_canonical())).unwrap_or(any);
    Some((address, port).into())
}

fn counter(value: &[u8]) -> u64 {
    number(value).unwrap_or_default()
}

fn u32_of(value: &[u8]) -> Option<u32> {
    number(value).and_then(|number| number.try_into().ok())
}

fn i32_of(value: &[u8]) -> Option<i32> {
    value.try_into().ok().map(i32::from_ne_bytes)
}

/// Reads a number of 2, 4 or 8 bytes in the host's byte order.
fn number(value: &[u8]) -> Option<u64> {
    match value.len() {
        2 => value.try_into().ok().map(u16::from_ne_bytes).map(u64::from),
        4 => value.try_into().ok().map(u32::from_ne_bytes).map(u64::from),
        8 => value.try_into().ok().map(u64::from_ne_bytes),
        _ => None,
    }
}

fn port_of(value: &[u8]) -> Option<u16> {
    value.try_into().ok().map(u16::from_be_bytes)
}

fn ipv4_of(value: &[u8]) -> Option<Ipv4Addr> {
    <[u8; 4]>::try_from(value).ok().map(Ipv4Addr::from)
}

fn ipv6_of(value: &[u8]) -> Option<Ipv6Addr> {
    <[u8; 16]>::try_from(value).ok().map(Ipv6Addr::from)
}
