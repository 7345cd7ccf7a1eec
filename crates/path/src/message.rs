//! The control messages that two hosts exchange over their link about the paths between them.
//!
//! They are self-describing (JSON on the link), so that a newer host can talk to an older one. This version
//! ignores unknown fields and omits unknown ciphers, formats and engines from lists. An unknown message is
//! [`Message::Unknown`].

use std::net::IpAddr;

use serde::{Deserialize, Deserializer, Serialize};
use weft_crypto::{Cipher, Format};

use crate::config::{ENGINES_MAX, LANES_MAX, LINK_MTU_MIN};
use crate::engine_api::{Encapsulation, EngineKind};
use crate::spi::is_spi;

/// One control message. Holds no secret: the nonces of an offer are public (`docs/design/keys.md`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Message {
    /// A host's abilities: the first message on each connection, sent again when they change.
    Hello(Hello),
    /// The receiver wants packets on these SAs.
    Offer(Offer),
    /// The sender sends on the offered SAs from now on.
    Accept(Accept),
    /// A probe came in.
    ProbeAnswer(ProbeAnswer),
    /// The sender needs a new SA in place of this one.
    RekeyRequest(RekeyRequest),
    /// The receiver's SAs of a path are gone.
    Withdraw(Withdraw),
    /// The sender opens the packets of a path and hears no probe.
    Unheard(Unheard),
    /// A message of a later version; ignored.
    #[serde(other)]
    Unknown,
}

/// The abilities of a host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// Identifies the sender's current session key without telling the key.
    pub session: u64,
    /// Random for each start of the daemon: a change means that all earlier SAs are gone.
    pub instance: u64,
    /// AEADs the sender takes, the preferred first.
    #[serde(deserialize_with = "known_only")]
    pub ciphers: Vec<Cipher>,
    /// Engines the sender sends and receives with.
    #[serde(deserialize_with = "known_only")]
    pub engines: Vec<EngineAbility>,
    /// Reasons why the sender has no path on an engine, or none with the receiver.
    #[serde(default, deserialize_with = "known_only")]
    pub missing: Vec<MissingEngine>,
    /// The sender's own address on this link, as it sees it; absent: not known.
    #[serde(default)]
    pub address: Option<IpAddr>,
    /// The receiver's address on this link, as the sender sees it. With a NAT between the hosts, one of the two
    /// addresses differs from the one the other host sees. Both hosts learn of the NAT from the two hellos.
    #[serde(default)]
    pub peer_address: Option<IpAddr>,
    /// The sender needs no encryption towards the receiver's address.
    #[serde(default)]
    pub trusted: bool,
    /// Outer IP MTU of the sender's link in bytes.
    pub mtu: u16,
    /// Inner MTU of the sender's containers in bytes; absent: an older host does not say.
    #[serde(default)]
    pub container_mtu: Option<u16>,
    /// The sender opens the lanes beyond the first, each from a separate port. The word of the lower peer id counts.
    /// Absent: an older host does not say, and the lower peer id opens them.
    #[serde(default)]
    pub opens_lanes: Option<bool>,
    /// The sender lacks the receiver's hello.
    #[serde(default)]
    pub reply_wanted: bool,
}

/// An engine of a host, as the peer needs to know it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineAbility {
    /// The engine.
    pub engine: EngineKind,
    /// The wire format.
    pub format: Format,
    /// Lanes it sends on at most.
    pub lanes_max: u16,
    /// AEADs it takes; empty: those of the hello.
    #[serde(default, deserialize_with = "known_only")]
    pub ciphers: Vec<Cipher>,
}

/// An engine that a host does not offer to the receiver of its hello.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MissingEngine {
    /// The engine.
    pub engine: EngineKind,
    /// A [`crate::Reason`]'s text, for the other host's status.
    pub reason: String,
}

/// The SAs that a host wants to receive on. They are installed before the offer is sent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Offer {
    /// The session key that the SA keys come from.
    pub session: u64,
    /// Names the offer; grows with every new offer of one host.
    pub offer: u64,
    /// The wire format.
    pub format: Format,
    /// The receiving engine.
    pub engine: EngineKind,
    /// The sending engine. An SA has one sequence-number space, so it has one sender.
    pub sender_engine: EngineKind,
    /// How the packets travel.
    #[serde(default)]
    pub encapsulation: Encapsulation,
    /// The address for the packets; absent: the link's address.
    #[serde(default)]
    pub address: Option<IpAddr>,
    /// The UDP port where they are wanted; a raw SA does not use it.
    pub port: u16,
    /// The AEAD.
    pub cipher: Cipher,
    /// The receiver takes remote checksum offload marks.
    #[serde(default)]
    pub rco: bool,
    /// Outer IP MTU of the receiver's link in bytes.
    pub mtu: u16,
    /// One SA each.
    pub lanes: Vec<LaneOffer>,
}

/// One SA of an offer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LaneOffer {
    /// The lane, from 0.
    pub lane: u16,
    /// The SPI, at least 256; in format `ovpn` the first word of its packets. It may come again with
    /// another nonce once its SA is gone.
    pub spi: u32,
    /// Salt of the key derivation (`docs/design/keys.md`).
    #[serde(with = "hex32")]
    pub nonce: [u8; 32],
}

/// The answer to an offer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Accept {
    /// The session of the offer.
    pub session: u64,
    /// The offer.
    pub offer: u64,
    /// Lanes that are sent on; the SAs of the others can go.
    pub lanes: Vec<u16>,
}

/// The answer to a probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProbeAnswer {
    /// The probe's number, as its sender chose it.
    pub probe: u64,
    /// Length in bytes of the inner IP packet that came in.
    pub mtu: u16,
}

/// A wish for a new SA.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RekeyRequest {
    /// The SA that is nearly used up.
    pub spi: u32,
}

/// The SAs of a path that the sender of this message received on are gone: its engine lost them.
/// The other host stops sending on them at once instead of finding out by probes; the next offer
/// brings the path back.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Withdraw {
    /// The session key that the SA keys came from.
    pub session: u64,
    /// The wire format.
    pub format: Format,
    /// The receiving engine.
    pub engine: EngineKind,
    /// The engine that sent.
    pub sender_engine: EngineKind,
    /// How the packets travelled.
    pub encapsulation: Encapsulation,
    /// The cause, for the other host's status.
    pub reason: String,
}

/// The sender of this message opens packets on its SAs of a path, but no probe reaches its engine. Something on
/// its host drops them, such as a firewall. An older host does not send this message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unheard {
    /// The session key that the SA keys come from.
    pub session: u64,
    /// The wire format.
    pub format: Format,
    /// The receiving engine.
    pub engine: EngineKind,
    /// The engine that sends.
    pub sender_engine: EngineKind,
    /// How the packets travel.
    pub encapsulation: Encapsulation,
}

/// A control message is invalid. The fault is the peer's; the link and every path stay as they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MessageError {
    /// The caller's fault: the link of this peer was never reported.
    #[error("a path message from a peer without a link: report the link first")]
    UnknownPeer,
    /// The peer names a path that no two hosts can have, such as a raw one to a userspace engine.
    #[error("the peer offered an unknown kind of path: update the older host")]
    NoSuchPath,
    /// The peer wants packets of an address-bound kernel SA at another address than its link's, which is
    /// proven.
    #[error("the peer asked for packets at an address that is not its link's")]
    ForeignAddress,
    /// The peer chose a cipher that this host does not take.
    #[error("the peer chose a cipher that this host did not offer: update the older host")]
    WrongCipher,
    /// The peer's offer has no lane, too many lanes, or a lane twice.
    #[error("the peer's offer has no lanes, more than {LANES_MAX}, or a duplicate")]
    WrongLanes,
    /// An SPI is reserved, named twice, or was already offered with the same nonce in this session.
    #[error("the peer offered a reserved SPI, or an SA that it offered before")]
    WrongSpi,
    /// Packets cannot be sent to the offered address or port.
    #[error("the peer asked for packets at an invalid address or port")]
    WrongAddress,
    /// The MTU is below the minimum that every IP host takes.
    #[error("the peer named a link MTU below {LINK_MTU_MIN}")]
    WrongMtu,
    /// The peer offered more SAs in one session than this host remembers; a new session starts from zero.
    #[error("the peer offered too many SAs in one session")]
    TooManySas,
}

impl Hello {
    pub(crate) fn check(&self) -> Result<(), MessageError> {
        (self.mtu >= LINK_MTU_MIN).then_some(()).ok_or(MessageError::WrongMtu)
    }
}

impl Offer {
    pub(crate) fn check(&self) -> Result<(), MessageError> {
        if self.lanes.is_empty() || self.lanes.len() > LANES_MAX {
            return Err(MessageError::WrongLanes);
        }
        for (index, lane) in self.lanes.iter().enumerate() {
            if !is_spi(self.format, lane.spi) {
                return Err(MessageError::WrongSpi);
            }
            for earlier in &self.lanes[..index] {
                if earlier.lane == lane.lane {
                    return Err(MessageError::WrongLanes);
                }
                if earlier.spi == lane.spi {
                    return Err(MessageError::WrongSpi);
                }
            }
        }
        if self.port == 0 || self.address.is_some_and(|address| !is_unicast(address)) {
            return Err(MessageError::WrongAddress);
        }
        (self.mtu >= LINK_MTU_MIN).then_some(()).ok_or(MessageError::WrongMtu)
    }
}

fn is_unicast(address: IpAddr) -> bool {
    let broadcast = matches!(address, IpAddr::V4(address) if address.is_broadcast());
    !(address.is_unspecified() || address.is_multicast() || broadcast)
}

/// Takes the items of a list that this version knows.
fn known_only<'de, D, T>(deserializer: D) -> Result<Vec<T>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Item<T> {
        Known(T),
        Unknown(serde::de::IgnoredAny),
    }
    let items = Vec::<Item<T>>::deserialize(deserializer)?;
    let known = items.into_iter().filter_map(|item| match item {
        Item::Known(item) => Some(item),
        Item::Unknown(_) => None,
    });
    Ok(known.take(ENGINES_MAX).collect())
}

mod hex32 {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub(super) fn serialize<S: Serializer>(bytes: &[u8; 32], s: S) -> Result<S::Ok, S::Error> {
        let text: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        s.serialize_str(&text)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<[u8; 32], D::Error> {
        let wrong = || D::Error::custom("a nonce is 64 hexadecimal digits");
        let text = <std::borrow::Cow<'de, str>>::deserialize(d)?;
        if text.len() != 64 || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(wrong());
        }
        let mut nonce = [0; 32];
        for (byte, digits) in nonce.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
            let digits = std::str::from_utf8(digits).map_err(|_| wrong())?;
            *byte = u8::from_str_radix(digits, 16).map_err(|_| wrong())?;
        }
        Ok(nonce)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn offer() -> Offer {
        Offer {
            session: 1,
            offer: 2,
            format: Format::Esp,
            engine: EngineKind::Userspace,
            sender_engine: EngineKind::Userspace,
            encapsulation: Encapsulation::Udp,
            address: None,
            port: 6784,
            cipher: Cipher::Aes256Gcm,
            rco: true,
            mtu: 1500,
            lanes: vec![LaneOffer { lane: 0, spi: 256, nonce: [0xab; 32] }],
        }
    }

    #[test]
    fn every_message_survives_json() {
        let hello = Hello {
            session: u64::MAX,
            instance: 3,
            ciphers: vec![Cipher::ChaCha20Poly1305],
            engines: vec![EngineAbility {
                engine: EngineKind::Userspace,
                format: Format::Esp,
                lanes_max: 4,
                ciphers: vec![Cipher::Aes256Gcm],
            }],
            missing: vec![MissingEngine { engine: EngineKind::Kernel, reason: "NAT".to_owned() }],
            address: Some([10, 0, 0, 1].into()),
            peer_address: Some([10, 0, 0, 2].into()),
            trusted: true,
            mtu: 1500,
            container_mtu: Some(1388),
            opens_lanes: Some(false),
            reply_wanted: true,
        };
        let messages = [
            Message::Hello(hello),
            Message::Offer(offer()),
            Message::Accept(Accept { session: 1, offer: 2, lanes: vec![0] }),
            Message::ProbeAnswer(ProbeAnswer { probe: u64::MAX, mtu: 1388 }),
            Message::RekeyRequest(RekeyRequest { spi: 256 }),
            Message::Withdraw(Withdraw {
                session: 1,
                format: Format::Esp,
                engine: EngineKind::Kernel,
                sender_engine: EngineKind::Kernel,
                encapsulation: Encapsulation::Raw,
                reason: "flushed".to_owned(),
            }),
            Message::Unheard(Unheard {
                session: 1,
                format: Format::Ovpn,
                engine: EngineKind::Kernel,
                sender_engine: EngineKind::Userspace,
                encapsulation: Encapsulation::Udp,
            }),
        ];
        for message in messages {
            let text = serde_json::to_string(&message).unwrap();
            assert_eq!(serde_json::from_str::<Message>(&text).unwrap(), message, "{text}");
        }
    }

    #[test]
    fn additions_of_later_versions_are_skipped() {
        let unknown = r#"{"type":"relay_hint","hops":[1,2,{"x":null}]}"#;
        assert_eq!(serde_json::from_str::<Message>(unknown).unwrap(), Message::Unknown);
        let hello = r#"{"type":"hello","session":1,"instance":2,"mtu":1500,"colour":"red",
            "ciphers":["aegis-256","aes-256-gcm"],
            "engines":[{"engine":"asic","format":"esp","lanes_max":1},
                       {"engine":"userspace","format":"esp","lanes_max":1,"extra":{}}]}"#;
        let Message::Hello(hello) = serde_json::from_str(hello).unwrap() else { panic!() };
        assert_eq!(hello.ciphers, [Cipher::Aes256Gcm]);
        assert_eq!(hello.engines.len(), 1);
    }

    #[test]
    fn fields_that_earlier_versions_lack_have_a_meaning() {
        let hello = r#"{"type":"hello","session":1,"instance":2,"mtu":1500,
            "ciphers":["aes-256-gcm"],
            "engines":[{"engine":"userspace","format":"esp","lanes_max":1}]}"#;
        let Message::Hello(hello) = serde_json::from_str(hello).unwrap() else { panic!() };
        assert!(hello.engines[0].ciphers.is_empty() && hello.missing.is_empty());
        assert_eq!((hello.address, hello.peer_address, hello.trusted), (None, None, false));
        assert_eq!(hello.opens_lanes, None);
        let mut text = serde_json::to_value(offer()).unwrap();
        text.as_object_mut().unwrap().remove("encapsulation");
        let offer: Offer = serde_json::from_value(text).unwrap();
        assert_eq!(offer.encapsulation, Encapsulation::Udp);
    }

    #[test]
    fn offers_that_cannot_work_are_refused() {
        assert_eq!(offer().check(), Ok(()));
        let change = |change: &dyn Fn(&mut Offer)| {
            let mut offer = offer();
            change(&mut offer);
            offer.check()
        };
        assert_eq!(change(&|offer| offer.lanes.clear()), Err(MessageError::WrongLanes));
        assert_eq!(change(&|o| o.lanes.push(o.lanes[0])), Err(MessageError::WrongLanes));
        assert_eq!(change(&|offer| offer.lanes[0].spi = 255), Err(MessageError::WrongSpi));
        let ovpn = |spi| change(&|offer| (offer.format, offer.lanes[0].spi) = (Format::Ovpn, spi));
        assert_eq!(ovpn(0x4a01_0200), Ok(()));
        assert_eq!(ovpn(0x0a01_0200), Err(MessageError::WrongSpi));
        assert_eq!(change(&|offer| offer.port = 0), Err(MessageError::WrongAddress));
        assert_eq!(change(&|offer| offer.mtu = 100), Err(MessageError::WrongMtu));
        for address in ["0.0.0.0", "255.255.255.255", "224.0.0.1", "ff02::1", "::"] {
            let address = Some(address.parse().unwrap());
            assert_eq!(change(&|offer| offer.address = address), Err(MessageError::WrongAddress));
        }
    }
}
