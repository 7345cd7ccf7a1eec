//! Control packets in plain layout: without tls-auth and tls-crypt, or with these taken off.
//!
//! opcode and key id 1 | own session id 8 | n 1 | n acknowledged packet ids, 4 each | peer's session id 8, if n > 0 |
//! own packet id 4, not in P_ACK_V1 | payload. Numbers are big-endian.

use crate::opcode::{KeyId, Opcode, SessionId};
use crate::{PacketError, take};

/// Acknowledgements in one packet.
pub const ACKS_MAX: usize = 8;
/// Length of the longest wrapped client key of tls-crypt-v2 in bytes.
pub const CLIENT_KEY_BYTES_MAX: usize = 1024;
/// Length of the shortest one: tag 32, client key 256, one byte of metadata, length 2.
pub const CLIENT_KEY_BYTES_MIN: usize = 32 + 256 + 1 + 2;

/// Packet ids that a packet acknowledges.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Acks {
    ids: [u32; ACKS_MAX],
    count: usize,
}

impl Acks {
    /// These acknowledgements, in this order.
    ///
    /// # Errors
    /// [`PacketError::TooManyAcks`].
    pub fn new(ids: &[u32]) -> Result<Self, PacketError> {
        let mut acks = Self { ids: [0; ACKS_MAX], count: ids.len() };
        let places = acks.ids.get_mut(..ids.len()).ok_or(PacketError::TooManyAcks(ids.len()))?;
        places.copy_from_slice(ids);
        Ok(acks)
    }

    /// The packet ids.
    pub fn ids(&self) -> &[u32] {
        self.ids.get(..self.count).unwrap_or_default()
    }
}

/// A control packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ControlPacket<'a> {
    /// Its kind; neither of the two data opcodes.
    pub opcode: Opcode,
    /// The key that is being agreed on.
    pub key_id: KeyId,
    /// The sender's session.
    pub session: SessionId,
    /// The packet ids that the sender has received.
    pub acks: Acks,
    /// The receiver's session; there if and only if there are acknowledgements. The receiver must compare it.
    pub remote_session: Option<SessionId>,
    /// From 0 up by one with each packet of a key id; there in all but P_ACK_V1.
    pub packet_id: Option<u32>,
    /// A piece of the TLS stream; may be empty.
    pub payload: &'a [u8],
}

impl<'a> ControlPacket<'a> {
    /// Reads a control packet.
    ///
    /// # Errors
    /// The bytes are none.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, PacketError> {
        let (mut rest, whole) = (bytes, bytes.len());
        let [first] = take(&mut rest, whole)?;
        let (opcode, key_id) = Opcode::parse(first)?;
        if opcode.is_data() {
            return Err(PacketError::WrongOpcode(opcode));
        }
        let session = SessionId::new(take(&mut rest, whole)?)?;
        let [count] = take(&mut rest, whole)?;
        let mut acks = Acks { ids: [0; ACKS_MAX], count: count.into() };
        let places = acks.ids.get_mut(..acks.count);
        for place in places.ok_or(PacketError::TooManyAcks(count.into()))? {
            *place = u32::from_be_bytes(take(&mut rest, whole)?);
        }
        let remote_session = match count {
            0 => None,
            _ => Some(SessionId::new(take(&mut rest, whole)?)?),
        };
        let packet_id = match opcode {
            Opcode::AckV1 if count == 0 => return Err(PacketError::NoAcks),
            Opcode::AckV1 if !rest.is_empty() => return Err(PacketError::Trailing(rest.len())),
            Opcode::AckV1 => None,
            _ => Some(u32::from_be_bytes(take(&mut rest, whole)?)),
        };
        Ok(Self { opcode, key_id, session, acks, remote_session, packet_id, payload: rest })
    }

    /// How many bytes [`Self::write`] appends.
    pub fn encoded_len(&self) -> usize {
        let acks = 4 * self.acks.count + self.remote_session.map_or(0, |_| 8);
        1 + 8 + 1 + acks + self.packet_id.map_or(0, |_| 4) + self.payload.len()
    }

    /// Appends the packet to a buffer.
    ///
    /// # Errors
    /// The fields contradict each other; nothing is appended.
    pub fn write(&self, out: &mut Vec<u8>) -> Result<(), PacketError> {
        let is_ack = self.opcode == Opcode::AckV1;
        if self.opcode.is_data() {
            return Err(PacketError::WrongOpcode(self.opcode));
        }
        if self.remote_session.is_some() != (self.acks.count > 0) {
            let what = "acknowledgements and the peer's session id go together";
            return Err(PacketError::Contradiction(what));
        }
        if is_ack == self.packet_id.is_some() {
            let what = "all packets but P_ACK_V1 have a packet id";
            return Err(PacketError::Contradiction(what));
        }
        if is_ack && (self.acks.count == 0 || !self.payload.is_empty()) {
            let what = "P_ACK_V1 has acknowledgements and no payload";
            return Err(PacketError::Contradiction(what));
        }
        out.reserve(self.encoded_len());
        out.push(self.opcode.first_byte(self.key_id));
        out.extend_from_slice(self.session.as_bytes());
        out.push(u8::try_from(self.acks.count).unwrap_or(0));
        for id in self.acks.ids() {
            out.extend_from_slice(&id.to_be_bytes());
        }
        if let Some(session) = &self.remote_session {
            out.extend_from_slice(session.as_bytes());
        }
        if let Some(id) = self.packet_id {
            out.extend_from_slice(&id.to_be_bytes());
        }
        out.extend_from_slice(self.payload);
        Ok(())
    }
}

/// Splits a tls-crypt-v2 packet into the tls-crypt packet and the client's wrapped key (WKc) behind it, whose last
/// two bytes are its own length.
///
/// # Errors
/// The packet has no such key, by its opcode or by its length.
pub fn split_client_key(bytes: &[u8]) -> Result<(&[u8], &[u8]), PacketError> {
    let have = bytes.len();
    let first = *bytes.first().ok_or(PacketError::Truncated { need: 1, have })?;
    let (opcode, _) = Opcode::parse(first)?;
    if !opcode.has_client_key() {
        return Err(PacketError::WrongOpcode(opcode));
    }
    let length = bytes.last_chunk::<2>().map_or(0, |last| u16::from_be_bytes(*last).into());
    if !(CLIENT_KEY_BYTES_MIN..=CLIENT_KEY_BYTES_MAX).contains(&length) {
        return Err(PacketError::BadClientKey(length));
    }
    let at = have.checked_sub(length).filter(|at| *at > 0);
    at.and_then(|at| bytes.split_at_checked(at))
        .ok_or(PacketError::Truncated { need: length + 1, have })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use proptest::prelude::*;

    use super::*;
    use crate::testing::hex;

    fn session(text: &str) -> SessionId {
        SessionId::new(hex(text).try_into().unwrap()).unwrap()
    }

    /// Real packets of OpenVPN's own unit tests (tests/unit_tests/openvpn/test_pkt.c).
    #[test]
    fn the_first_packet_of_a_real_client() {
        let bytes = hex("38 6891923fa3103437 00 00000000");
        let packet = ControlPacket::parse(&bytes).unwrap();
        assert_eq!(packet.opcode, Opcode::HardResetClientV2);
        assert_eq!((packet.key_id, packet.session), (KeyId::FIRST, session("6891923fa3103437")));
        assert_eq!((packet.acks.ids(), packet.remote_session), (&[][..], None));
        assert_eq!((packet.packet_id, packet.payload), (Some(0), &[][..]));
        let mut again = Vec::new();
        packet.write(&mut again).unwrap();
        assert_eq!(again, bytes);
    }

    #[test]
    fn a_real_control_packet_with_an_acknowledgement() {
        let bytes = hex("20 7819bf2ebcd19a45 01 00000000 eafebfa4418ae31b 00000001 160301");
        let packet = ControlPacket::parse(&bytes).unwrap();
        assert_eq!((packet.opcode, packet.acks.ids()), (Opcode::ControlV1, &[0][..]));
        assert_eq!(packet.remote_session, Some(session("eafebfa4418ae31b")));
        assert_eq!((packet.packet_id, packet.payload), (Some(1), &[0x16, 3, 1][..]));
        let mut again = Vec::new();
        packet.write(&mut again).unwrap();
        assert_eq!((again.len(), again), (packet.encoded_len(), bytes));
    }

    #[test]
    fn real_acknowledgements() {
        let bytes = hex("28 aeb9afe1f01d79c8 01 00000000 dd85db535623b02e");
        let packet = ControlPacket::parse(&bytes).unwrap();
        assert_eq!((packet.opcode, packet.packet_id), (Opcode::AckV1, None));
        assert_eq!(packet.acks.ids(), [0]);
        let bytes = hex("28 aeb9afe1f01d79c8 03 00000000 00000001 00000002 dd85db535623b02e");
        assert_eq!(ControlPacket::parse(&bytes).unwrap().acks.ids(), [0, 1, 2]);
    }

    #[test]
    fn the_servers_answer_is_26_bytes() {
        let packet = ControlPacket {
            opcode: Opcode::HardResetServerV2,
            key_id: KeyId::FIRST,
            session: session("0102030405060708"),
            acks: Acks::new(&[0]).unwrap(),
            remote_session: Some(session("6891923fa3103437")),
            packet_id: Some(0),
            payload: &[],
        };
        let mut bytes = Vec::new();
        packet.write(&mut bytes).unwrap();
        assert_eq!(bytes, hex("40 0102030405060708 01 00000000 6891923fa3103437 00000000"));
    }

    #[test]
    fn impossible_packets_are_refused() {
        let refused = |text: &str| ControlPacket::parse(&hex(text)).unwrap_err();
        assert_eq!(refused("38 0000000000000000 00 00000000"), PacketError::ZeroSession);
        assert_eq!(refused("28 aeb9afe1f01d79c8 00"), PacketError::NoAcks);
        let nine =
            format!("20 7819bf2ebcd19a45 09 {} eafebfa4418ae31b 00000001", "00000000".repeat(9));
        assert_eq!(refused(&nine), PacketError::TooManyAcks(9));
        let trailing = "28 aeb9afe1f01d79c8 01 00000000 dd85db535623b02e ff";
        assert_eq!(refused(trailing), PacketError::Trailing(1));
        assert_eq!(refused("48 000017"), PacketError::WrongOpcode(Opcode::DataV2));
        assert_eq!(refused("20 7819bf2e"), PacketError::Truncated { need: 9, have: 5 });
        let whole = hex("20 7819bf2ebcd19a45 01 00000000 eafebfa4418ae31b 00000001");
        for cut in 0..whole.len() {
            let error = ControlPacket::parse(&whole[..cut]).unwrap_err();
            assert!(
                matches!(error, PacketError::Truncated { have, need } if have == cut && need > cut)
            );
        }
    }

    #[test]
    fn contradictions_are_not_written() {
        let fit = ControlPacket {
            opcode: Opcode::ControlV1,
            key_id: KeyId::FIRST,
            session: session("0102030405060708"),
            acks: Acks::default(),
            remote_session: None,
            packet_id: Some(1),
            payload: b"x",
        };
        let acks = Acks::new(&[1]).unwrap();
        let remote_session = Some(fit.session);
        let ack = ControlPacket { opcode: Opcode::AckV1, packet_id: None, ..fit };
        for bad in [
            ControlPacket { acks, ..fit },
            ControlPacket { remote_session, ..fit },
            ControlPacket { packet_id: None, ..fit },
            ControlPacket { opcode: Opcode::DataV2, ..fit },
            ack,
            ControlPacket { acks, remote_session, ..ack },
            ControlPacket { payload: &[], ..ack },
        ] {
            let mut out = Vec::new();
            assert!(bad.write(&mut out).is_err(), "{bad:?}");
            assert!(out.is_empty());
        }
        assert_eq!(Acks::new(&[0; 9]), Err(PacketError::TooManyAcks(9)));
    }

    #[test]
    fn a_client_key_is_found_by_its_last_two_bytes() {
        let mut bytes = hex("50 f419cb12d1f9e48f");
        let head = bytes.len();
        bytes.extend([0xee; 297]);
        bytes.extend([0x01, 0x2b]);
        let (packet, key) = split_client_key(&bytes).unwrap();
        assert_eq!((packet.len(), key.len()), (head, 299));
        assert_eq!(
            split_client_key(&bytes[head..]).unwrap_err(),
            PacketError::UnknownOpcode(0xee >> 3)
        );
        for (length, error) in [
            ([0x01, 0x22], PacketError::BadClientKey(0x122)),
            ([0x04, 0x01], PacketError::BadClientKey(1025)),
            ([0x01, 0x34], PacketError::Truncated { need: 309, have: 308 }),
        ] {
            let end = bytes.len();
            bytes[end - 2..].copy_from_slice(&length);
            assert_eq!(split_client_key(&bytes), Err(error));
        }
        bytes[0] = 0x38;
        let error = PacketError::WrongOpcode(Opcode::HardResetClientV2);
        assert_eq!(split_client_key(&bytes), Err(error));
    }

    fn any_control() -> impl Strategy<Value = (Opcode, u8, [u8; 8], Vec<u32>, u32, Vec<u8>)> {
        let opcodes = [1, 2, 3, 4, 5, 7, 8, 10, 11];
        let opcode = prop::sample::select(opcodes.to_vec());
        let opcode = opcode.prop_map(|code: u8| Opcode::parse(code << 3).unwrap().0);
        let session = any::<[u8; 8]>().prop_filter("zero", |bytes| *bytes != [0; 8]);
        let acks = prop::collection::vec(any::<u32>(), 0..=ACKS_MAX);
        (opcode, 0_u8..8, session, acks, any::<u32>(), prop::collection::vec(any::<u8>(), 0..40))
    }

    proptest! {
        #[test]
        fn every_control_packet_comes_back(
            (opcode, key_id, id, mut acks, packet_id, mut payload) in any_control()
        ) {
            let is_ack = opcode == Opcode::AckV1;
            if is_ack {
                acks.push(7);
                acks.truncate(ACKS_MAX);
                payload.clear();
            }
            let session = SessionId::new(id).unwrap();
            let packet = ControlPacket {
                opcode,
                key_id: KeyId::new(key_id).unwrap(),
                session,
                acks: Acks::new(&acks).unwrap(),
                remote_session: (!acks.is_empty()).then_some(session),
                packet_id: (!is_ack).then_some(packet_id),
                payload: &payload,
            };
            let mut bytes = Vec::new();
            packet.write(&mut bytes).unwrap();
            prop_assert_eq!(bytes.len(), packet.encoded_len());
            prop_assert_eq!(ControlPacket::parse(&bytes), Ok(packet));
        }

        #[test]
        fn any_bytes_that_parse_are_written_the_same(
            first in prop::sample::select(vec![0x08_u8, 0x1b, 0x20, 0x28, 0x38, 0x40, 0x50, 0x5f, 0xff]),
            session in any::<[u8; 8]>(),
            count in 0_u8..12,
            rest in prop::collection::vec(any::<u8>(), 0..80),
        ) {
            let bytes = [&[first][..], &session, &[count], &rest].concat();
            let _ = split_client_key(&bytes);
            if let Ok(packet) = ControlPacket::parse(&bytes) {
                let mut again = Vec::new();
                packet.write(&mut again).unwrap();
                prop_assert_eq!(again, bytes);
            }
        }

        #[test]
        fn no_bytes_make_a_reader_panic(bytes in prop::collection::vec(any::<u8>(), 0..120)) {
            let _ = crate::Packet::parse(&bytes);
            let _ = ControlPacket::parse(&bytes);
            let _ = split_client_key(&bytes);
        }
    }
}
