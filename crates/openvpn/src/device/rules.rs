//! The checks of a device in userspace: attributes in, their meaning out. The refusals are those of the kernel's
//! device, in the same order (`docs/design/ovpn.md`, kernel device).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};

use weft_crypto::DataCipher;

use super::{
    CIPHER_KEY_BYTES_MAX, CONTROL_PACKET_BYTES_MAX, CipherAlgorithm, DeviceError, KEEPALIVE_MAX_S,
    KEY_ID_MAX, Keepalive, KeyAttributes, KeyDirection, Mode, PEER_ID_MAX, PeerAttributes, Slot,
};
use crate::KeyId;

/// How a peer is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// A UDP socket, which many peers may share, and the families that it has.
    Udp {
        /// It sends to IPv4 addresses.
        ipv4: bool,
        /// It sends to IPv6 addresses.
        ipv6: bool,
    },
    /// A TCP connection of the peer's own.
    Tcp,
}

/// A peer as it is made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewPeer {
    /// The peer id in packets from it.
    pub id: u32,
    /// The peer id in packets to it.
    pub tx_id: u32,
    /// Its address; over TCP the connection knows.
    pub remote: Option<SocketAddr>,
    /// The address of ours to send from.
    pub local: Option<IpAddr>,
    /// Its address inside the VPN.
    pub vpn_ipv4: Option<Ipv4Addr>,
    /// Its address inside the VPN.
    pub vpn_ipv6: Option<Ipv6Addr>,
    /// Its signs of life.
    pub keepalive: Keepalive,
}

/// The change of a peer; an absent attribute stays.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PeerChange {
    /// The peer id in packets to it.
    pub tx_id: Option<u32>,
    /// Its address.
    pub remote: Option<SocketAddr>,
    /// The address of ours to send from.
    pub local: Option<IpAddr>,
    /// Its address inside the VPN.
    pub vpn_ipv4: Option<Ipv4Addr>,
    /// Its address inside the VPN.
    pub vpn_ipv6: Option<Ipv6Addr>,
    /// Its signs of life.
    pub keepalive: Option<Keepalive>,
}

/// A key as it is installed.
#[derive(Debug, PartialEq, Eq)]
pub struct NewKey<'a> {
    /// Whose it is.
    pub peer_id: u32,
    /// The slot that it goes to.
    pub slot: Slot,
    /// The key id in its packets.
    pub key_id: KeyId,
    /// The AEAD.
    pub cipher: CipherAlgorithm,
    /// The direction that seals.
    pub encrypt: &'a KeyDirection,
    /// The direction that opens.
    pub decrypt: &'a KeyDirection,
}

/// Checks the attributes of a new peer on a device of this mode.
///
/// # Errors
/// [`DeviceError`], as the kernel's device refuses it; [`DeviceError::WrongFamily`] is userspace's own,
/// as the kernel takes a peer that nothing can come back from.
pub fn new_peer(
    mode: Mode,
    transport: Transport,
    attributes: &PeerAttributes,
) -> Result<NewPeer, DeviceError> {
    let id = common(mode, attributes)?;
    if mode == Mode::Mp && attributes.vpn_ipv4.is_none() && attributes.vpn_ipv6.is_none() {
        return Err(DeviceError::NoVpnAddress);
    }
    let remote = remote(attributes);
    match (transport, remote) {
        (Transport::Udp { .. }, None) => return Err(DeviceError::NoRemote),
        (Transport::Tcp, Some(_)) => return Err(DeviceError::UnexpectedRemote),
        (Transport::Udp { ipv4, ipv6 }, Some(remote)) => {
            let has = if remote.is_ipv4() { ipv4 } else { ipv6 };
            if !has {
                return Err(DeviceError::WrongFamily);
            }
        }
        (Transport::Tcp, None) => {}
    }
    Ok(NewPeer {
        id,
        tx_id: attributes.tx_id.unwrap_or(id),
        remote,
        local: local(attributes),
        vpn_ipv4: attributes.vpn_ipv4,
        vpn_ipv6: attributes.vpn_ipv6,
        keepalive: keepalive(attributes).unwrap_or_default(),
    })
}

/// Checks the changes of a peer, but not whether the peer exists. Returns its id and the change.
///
/// # Errors
/// [`DeviceError`], as the kernel's device refuses it.
pub fn peer_change(
    mode: Mode,
    attributes: &PeerAttributes,
) -> Result<(u32, PeerChange), DeviceError> {
    let id = common(mode, attributes)?;
    let change = PeerChange {
        tx_id: attributes.tx_id,
        remote: remote(attributes),
        local: local(attributes),
        vpn_ipv4: attributes.vpn_ipv4,
        vpn_ipv6: attributes.vpn_ipv6,
        keepalive: keepalive(attributes),
    };
    Ok((id, change))
}

/// Checks a change against how the peer is reached, once it is found that there is one. A family that a
/// UDP socket lacks is taken, and nothing reaches the peer then.
///
/// # Errors
/// [`DeviceError::UnexpectedRemote`], as the kernel's device refuses it.
pub const fn change_fits(transport: Transport, change: &PeerChange) -> Result<(), DeviceError> {
    match (transport, change.remote) {
        (Transport::Tcp, Some(_)) => Err(DeviceError::UnexpectedRemote),
        _ => Ok(()),
    }
}

/// Checks a packet of the control channel before it is sent. Returns its length, which goes in front of it on
/// a connection.
///
/// # Errors
/// It is empty, or longer than [`CONTROL_PACKET_BYTES_MAX`].
pub fn control_packet(packet: &[u8]) -> Result<u16, DeviceError> {
    match u16::try_from(packet.len()) {
        Ok(0) => Err(DeviceError::Missing("the packet's bytes")),
        Ok(length) => Ok(length),
        Err(_) => Err(DeviceError::TooLarge {
            what: "a packet's length",
            value: u32::try_from(packet.len()).unwrap_or(u32::MAX),
            max: CONTROL_PACKET_BYTES_MAX as u32,
        }),
    }
}

/// Checks a key before it is installed, but not whether the peer exists. The kernel looks for the peer before
/// it checks the key lengths of the cipher, so those are left to [`NewKey::ciphers`].
///
/// # Errors
/// [`DeviceError`], as the kernel's device refuses it.
pub fn new_key(attributes: &KeyAttributes) -> Result<NewKey<'_>, DeviceError> {
    // The kernel looks at each attribute by itself first, and then at all of them together.
    in_range("peer id", attributes.peer_id, PEER_ID_MAX)?;
    in_range("key id", attributes.key_id, KEY_ID_MAX)?;
    for direction in [&attributes.encrypt, &attributes.decrypt].into_iter().flatten() {
        let bytes = u32::try_from(direction.cipher_key.len()).unwrap_or(u32::MAX);
        in_range("length of a cipher key in bytes", Some(bytes), CIPHER_KEY_BYTES_MAX as u32)?;
    }
    let peer_id = peer_id(attributes.peer_id)?;
    let slot = attributes.slot.ok_or(DeviceError::Missing("the key's slot"))?;
    let key_id = key_id(attributes.key_id.ok_or(DeviceError::Missing("the key's id"))?)?;
    let cipher = attributes.cipher.ok_or(DeviceError::Missing("the key's cipher"))?;
    let encrypt = attributes.encrypt.as_ref();
    let encrypt = encrypt.ok_or(DeviceError::Missing("the direction that encrypts"))?;
    let decrypt = attributes.decrypt.as_ref();
    let decrypt = decrypt.ok_or(DeviceError::Missing("the direction that decrypts"))?;
    if cipher == CipherAlgorithm::None {
        return Err(DeviceError::UnknownCipher);
    }
    Ok(NewKey { peer_id, slot, key_id, cipher, encrypt, decrypt })
}

impl NewKey<'_> {
    /// The ciphers of sent and of received packets, by the lengths of their keys. The caller asks for them
    /// once it has found the peer.
    ///
    /// # Errors
    /// [`DeviceError::KeyLength`], as the kernel's device refuses it.
    pub fn ciphers(&self) -> Result<(DataCipher, DataCipher), DeviceError> {
        let of = |direction: &KeyDirection| {
            let bytes = direction.cipher_key.len();
            self.cipher.with_key_bytes(bytes).ok_or(DeviceError::KeyLength { bytes })
        };
        Ok((of(self.encrypt)?, of(self.decrypt)?))
    }
}

/// Checks the key id that a key's packets bear.
///
/// # Errors
/// It is larger than [`KEY_ID_MAX`].
pub fn key_id(id: u32) -> Result<KeyId, DeviceError> {
    let too_large = DeviceError::TooLarge { what: "key id", value: id, max: KEY_ID_MAX };
    u8::try_from(id).ok().and_then(KeyId::new).ok_or(too_large)
}

/// The id of a peer that is asked for.
///
/// # Errors
/// It is missing or too large.
pub fn peer_id(id: Option<u32>) -> Result<u32, DeviceError> {
    in_range("peer id", id, PEER_ID_MAX)?;
    id.ok_or(DeviceError::Missing("the peer's id"))
}

/// Checks each attribute of a peer by itself, which the kernel does before all else: before the socket, and
/// before the attributes together. [`new_peer`] and [`peer_change`] do it too.
///
/// # Errors
/// [`DeviceError::TooLarge`] or [`DeviceError::PortZero`], as the kernel's device refuses it.
pub fn in_ranges(attributes: &PeerAttributes) -> Result<(), DeviceError> {
    in_range("peer id", attributes.id, PEER_ID_MAX)?;
    in_range("transmit id", attributes.tx_id, PEER_ID_MAX)?;
    for time in [attributes.keepalive_interval_s, attributes.keepalive_timeout_s] {
        in_range("keepalive time in seconds", time, KEEPALIVE_MAX_S)?;
    }
    if attributes.remote_port == Some(0) { Err(DeviceError::PortZero) } else { Ok(()) }
}

/// Checks the rules that a new peer and a changed peer share. Returns the peer's id.
fn common(mode: Mode, attributes: &PeerAttributes) -> Result<u32, DeviceError> {
    in_ranges(attributes)?;
    let id = peer_id(attributes.id)?;
    let PeerAttributes { remote_ipv4, remote_ipv6, remote_port, .. } = attributes;
    let has_remote = remote_ipv4.is_some() || remote_ipv6.is_some();
    if remote_ipv4.is_some() && remote_ipv6.is_some() {
        return Err(DeviceError::TwoRemotes);
    }
    if !has_remote && remote_port.is_some() {
        return Err(DeviceError::PortWithoutAddress);
    }
    if has_remote && remote_port.is_none() {
        return Err(DeviceError::AddressWithoutPort);
    }
    let lone_ipv4 = remote_ipv4.is_none() && attributes.local_ipv4.is_some();
    let lone_ipv6 = remote_ipv6.is_none() && attributes.local_ipv6.is_some();
    let families = (remote(attributes), local(attributes));
    let differ = matches!(families, (Some(r), Some(l)) if r.is_ipv4() != l.is_ipv4());
    if lone_ipv4 || lone_ipv6 || differ {
        return Err(DeviceError::LocalWithoutRemote);
    }
    // An IPv4 address that is mapped into IPv6 has no scope.
    let has_ipv6 = remote_ipv6.is_some_and(|ipv6| ipv6.to_ipv4_mapped().is_none());
    if !has_ipv6 && attributes.remote_ipv6_scope_id.is_some() {
        return Err(DeviceError::ScopeWithoutAddress);
    }
    if mode == Mode::P2p && (attributes.vpn_ipv4.is_some() || attributes.vpn_ipv6.is_some()) {
        return Err(DeviceError::UnexpectedVpnAddress);
    }
    if attributes.keepalive_interval_s.is_some() != attributes.keepalive_timeout_s.is_some() {
        return Err(DeviceError::HalfKeepalive);
    }
    Ok(id)
}

fn in_range(what: &'static str, value: Option<u32>, max: u32) -> Result<(), DeviceError> {
    match value {
        Some(value) if value > max => Err(DeviceError::TooLarge { what, value, max }),
        _ => Ok(()),
    }
}

/// The remote address, an IPv4 one as such even where it is mapped into IPv6.
fn remote(attributes: &PeerAttributes) -> Option<SocketAddr> {
    let port = attributes.remote_port?;
    if let Some(ipv4) = attributes.remote_ipv4 {
        return Some((ipv4, port).into());
    }
    let ipv6 = attributes.remote_ipv6?;
    let scope_id = attributes.remote_ipv6_scope_id.unwrap_or_default();
    Some(match ipv6.to_ipv4_mapped() {
        Some(ipv4) => (ipv4, port).into(),
        None => SocketAddrV6::new(ipv6, port, 0, scope_id).into(),
    })
}

fn local(attributes: &PeerAttributes) -> Option<IpAddr> {
    let ipv6 = attributes.local_ipv6.map(|ipv6| IpAddr::V6(ipv6).to_canonical());
    attributes.local_ipv4.map(IpAddr::V4).or(ipv6)
}

fn keepalive(attributes: &PeerAttributes) -> Option<Keepalive> {
    let interval_s = attributes.keepalive_interval_s?;
    Some(Keepalive { interval_s, timeout_s: attributes.keepalive_timeout_s? })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    const UDP: Transport = Transport::Udp { ipv4: true, ipv6: true };

    /// The least attributes of a peer on a device in mode `mp`.
    fn whole() -> PeerAttributes {
        PeerAttributes {
            id: Some(3),
            remote_ipv4: Some(Ipv4Addr::new(192, 0, 2, 1)),
            remote_port: Some(1194),
            vpn_ipv4: Some(Ipv4Addr::new(10, 8, 0, 3)),
            ..PeerAttributes::default()
        }
    }

    fn refused(mode: Mode, change: impl FnOnce(&mut PeerAttributes)) -> DeviceError {
        let mut attributes = whole();
        if mode == Mode::P2p {
            attributes.vpn_ipv4 = None;
        }
        new_peer(mode, UDP, &attributes).unwrap();
        change(&mut attributes);
        new_peer(mode, UDP, &attributes).unwrap_err()
    }

    #[test]
    fn a_control_packet_has_a_length_of_16_bits() {
        assert_eq!(control_packet(&[0; 65_535]), Ok(65_535));
        let (value, max) = (65_536, 65_535);
        let long = DeviceError::TooLarge { what: "a packet's length", value, max };
        assert_eq!(control_packet(&[0; 65_536]), Err(long));
        assert!(matches!(control_packet(&[]), Err(DeviceError::Missing(_))));
    }

    #[test]
    fn a_whole_peer_is_taken_as_it_is_said() {
        let peer = new_peer(Mode::Mp, UDP, &whole()).unwrap();
        assert_eq!((peer.id, peer.tx_id), (3, 3));
        assert_eq!(peer.remote, Some("192.0.2.1:1194".parse().unwrap()));
        assert_eq!(peer.keepalive, Keepalive::default());
        let mapped = PeerAttributes {
            remote_ipv4: None,
            remote_ipv6: Some("::ffff:192.0.2.1".parse().unwrap()),
            local_ipv6: Some("::ffff:192.0.2.9".parse().unwrap()),
            tx_id: Some(12),
            ..whole()
        };
        let peer = new_peer(Mode::Mp, UDP, &mapped).unwrap();
        assert_eq!(peer.remote, Some("192.0.2.1:1194".parse().unwrap()));
        assert_eq!((peer.local, peer.tx_id), (Some("192.0.2.9".parse().unwrap()), 12));
    }

    #[test]
    fn contradictions_are_refused_by_name() {
        let v6 = Some(Ipv6Addr::LOCALHOST);
        let v4 = Some(Ipv4Addr::LOCALHOST);
        let mp = |change: fn(&mut PeerAttributes)| refused(Mode::Mp, change);
        assert_eq!(mp(|peer| peer.id = None), DeviceError::Missing("the peer's id"));
        assert_eq!(mp(|peer| peer.id = Some(1 << 24)).errno(), 34);
        assert_eq!(mp(|peer| peer.tx_id = Some(1 << 24)).errno(), 34);
        assert_eq!(mp(|peer| (peer.id, peer.tx_id) = (None, Some(1 << 24))).errno(), 34);
        assert_eq!(mp(|peer| peer.remote_port = Some(0)), DeviceError::PortZero);
        assert_eq!(refused(Mode::Mp, |peer| peer.remote_ipv6 = v6), DeviceError::TwoRemotes);
        assert_eq!(mp(|peer| peer.remote_ipv4 = None), DeviceError::PortWithoutAddress);
        assert_eq!(mp(|peer| peer.remote_port = None), DeviceError::AddressWithoutPort);
        assert_eq!(refused(Mode::Mp, |peer| peer.local_ipv6 = v6), DeviceError::LocalWithoutRemote);
        let lone = |peer: &mut PeerAttributes| {
            (peer.remote_ipv4, peer.remote_port, peer.local_ipv4) = (None, None, v4);
        };
        assert_eq!(refused(Mode::Mp, lone), DeviceError::LocalWithoutRemote);
        assert_eq!(
            mp(|peer| peer.remote_ipv6_scope_id = Some(2)),
            DeviceError::ScopeWithoutAddress
        );
        let mapped = |peer: &mut PeerAttributes| {
            peer.remote_ipv4 = None;
            peer.remote_ipv6 = Some(Ipv4Addr::LOCALHOST.to_ipv6_mapped());
            peer.remote_ipv6_scope_id = Some(2);
        };
        assert_eq!(refused(Mode::Mp, mapped), DeviceError::ScopeWithoutAddress);
        assert_eq!(mp(|peer| peer.keepalive_interval_s = Some(5)), DeviceError::HalfKeepalive);
        assert_eq!(mp(|peer| peer.keepalive_timeout_s = Some(86_401)).errno(), 34);
        assert_eq!(mp(|peer| peer.vpn_ipv4 = None), DeviceError::NoVpnAddress);
        let unexpected = refused(Mode::P2p, |peer| peer.vpn_ipv4 = v4);
        assert_eq!(unexpected, DeviceError::UnexpectedVpnAddress);
        let bare = |peer: &mut PeerAttributes| (peer.remote_ipv4, peer.remote_port) = (None, None);
        assert_eq!(refused(Mode::P2p, bare), DeviceError::NoRemote);
    }

    #[test]
    fn transports_take_the_addresses_that_they_can_use() {
        let only_ipv6 = Transport::Udp { ipv4: false, ipv6: true };
        assert_eq!(new_peer(Mode::Mp, only_ipv6, &whole()), Err(DeviceError::WrongFamily));
        assert_eq!(
            new_peer(Mode::Mp, Transport::Tcp, &whole()),
            Err(DeviceError::UnexpectedRemote)
        );
        let bare = PeerAttributes { remote_ipv4: None, remote_port: None, ..whole() };
        assert_eq!(new_peer(Mode::Mp, Transport::Tcp, &bare).unwrap().remote, None);
    }

    #[test]
    fn a_change_says_only_what_changes() {
        let attributes = PeerAttributes {
            id: Some(9),
            keepalive_interval_s: Some(0),
            keepalive_timeout_s: Some(0),
            ..PeerAttributes::default()
        };
        let (id, change) = peer_change(Mode::P2p, &attributes).unwrap();
        let expected =
            PeerChange { keepalive: Some(Keepalive::default()), ..PeerChange::default() };
        assert_eq!((id, change), (9, expected));
        let attributes = PeerAttributes { id: None, ..attributes };
        assert_eq!(peer_change(Mode::P2p, &attributes).unwrap_err().errno(), 22);
        let (_, change) = peer_change(Mode::Mp, &whole()).unwrap();
        assert_eq!(change_fits(Transport::Tcp, &change), Err(DeviceError::UnexpectedRemote));
        assert_eq!(change_fits(UDP, &change), Ok(()));
        let stays = PeerChange { remote: None, ..change };
        assert_eq!(change_fits(Transport::Tcp, &stays), Ok(()));
    }

    #[test]
    fn a_key_needs_all_of_its_parts_and_a_length_of_its_cipher() {
        let direction =
            |bytes| Some(KeyDirection { cipher_key: vec![1; bytes], nonce_tail: [2; 8] });
        let whole = KeyAttributes {
            peer_id: Some(3),
            slot: Some(Slot::Primary),
            key_id: Some(7),
            cipher: Some(CipherAlgorithm::AesGcm),
            encrypt: direction(24),
            decrypt: direction(24),
        };
        assert_eq!(new_key(&whole).unwrap().key_id, KeyId::new(7).unwrap());
        for part in 0..6 {
            let mut key = whole.clone();
            match part {
                0 => key.peer_id = None,
                1 => key.slot = None,
                2 => key.key_id = None,
                3 => key.cipher = None,
                4 => key.encrypt = None,
                _ => key.decrypt = None,
            }
            assert!(matches!(new_key(&key), Err(DeviceError::Missing(_))), "part {part}");
        }
        let with = |change: &dyn Fn(&mut KeyAttributes)| {
            let mut key = whole.clone();
            change(&mut key);
            new_key(&key).and_then(|new| new.ciphers()).unwrap_err()
        };
        assert_eq!(with(&|key| key.key_id = Some(8)).errno(), 34);
        assert_eq!(
            with(&|key| key.cipher = Some(CipherAlgorithm::None)),
            DeviceError::UnknownCipher
        );
        let length = DeviceError::KeyLength { bytes: 24 };
        let chacha = Some(CipherAlgorithm::ChaCha20Poly1305);
        assert_eq!(with(&|key| key.cipher = chacha), length);
        assert_eq!(with(&|key| key.decrypt = direction(31)).errno(), 22);
        assert_eq!(with(&|key| key.decrypt = direction(256)).errno(), 22);
        // A value beyond its limit is reported before a missing attribute.
        assert_eq!(with(&|key| key.decrypt = direction(257)).errno(), 34);
        assert_eq!(with(&|key| (key.slot, key.key_id) = (None, Some(8))).errno(), 34);
    }
}
