//! The data channel: the DATA_V2 AEAD layout and the payloads that are no packets.
//!
//! opcode and key id 1 | peer id 3 | packet id 4 | tag 16 | ciphertext. Numbers are big-endian.
//! [`weft_crypto::ovpn`] seals and opens such packets, from the packet id on.

use crate::opcode::{KeyId, Opcode};
use crate::{PacketError, take};

pub use weft_crypto::ovpn::{FIRST_WORD_BYTES, HEADER_BYTES, OVERHEAD_BYTES, TAG_BYTES};

/// The payload of a keepalive, to be compared whole; it is never delivered.
pub const PING: [u8; 16] = [
    0x2a, 0x18, 0x7b, 0xf3, 0x64, 0x1e, 0xb4, 0xcb, 0x07, 0xed, 0x2d, 0x0a, 0x98, 0x1f, 0xc7, 0x48,
];
/// The first bytes of an OCC payload; a type byte follows.
pub const OCC_MAGIC: [u8; 16] = [
    0x28, 0x7f, 0x34, 0x6b, 0xd4, 0xef, 0x7a, 0x81, 0x2d, 0x56, 0xb8, 0xd3, 0xaf, 0xc5, 0x45, 0x9c,
];
/// The OCC type by which a peer says that it leaves.
pub const OCC_EXIT: u8 = 6;

/// The number by which the receiver of DATA_V2 packets finds the peer: 24 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PeerNumber(u32);

impl PeerNumber {
    /// On the wire: no number was agreed on.
    const UNSET: u32 = 0xff_ffff;

    /// A number; `None` for 0xffffff, which means none, and above.
    pub const fn new(number: u32) -> Option<Self> {
        if number < Self::UNSET { Some(Self(number)) } else { None }
    }

    /// The number.
    pub const fn get(self) -> u32 {
        self.0
    }
}

/// A DATA_V2 packet with an AEAD cipher, not opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataPacket<'a> {
    /// Under which key it is sealed.
    pub key_id: KeyId,
    /// The peer's number; `None`: not set.
    pub peer: Option<PeerNumber>,
    /// Never 0; never twice under a key.
    pub packet_id: u32,
    /// The associated data.
    pub associated: &'a [u8; HEADER_BYTES],
    /// The tag.
    pub tag: &'a [u8; TAG_BYTES],
    /// As long as the plaintext.
    pub ciphertext: &'a [u8],
}

impl<'a> DataPacket<'a> {
    /// Reads a packet, no more: it does not check which peer may send under which key.
    ///
    /// # Errors
    /// The bytes are no DATA_V2 packet.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, PacketError> {
        let short = PacketError::Truncated { need: OVERHEAD_BYTES, have: bytes.len() };
        let first = *bytes.first().ok_or(short)?;
        let (opcode, key_id) = Opcode::parse(first)?;
        if opcode != Opcode::DataV2 {
            return Err(PacketError::WrongOpcode(opcode));
        }
        let (associated, rest) = bytes.split_first_chunk::<HEADER_BYTES>().ok_or(short)?;
        let (tag, ciphertext) = rest.split_first_chunk::<TAG_BYTES>().ok_or(short)?;
        let mut fields = &associated[..];
        let word = u32::from_be_bytes(take(&mut fields, HEADER_BYTES)?);
        let packet_id = u32::from_be_bytes(take(&mut fields, HEADER_BYTES)?);
        if packet_id == 0 {
            return Err(PacketError::ZeroPacketId);
        }
        let peer = PeerNumber::new(word & PeerNumber::UNSET);
        Ok(Self { key_id, peer, packet_id, associated, tag, ciphertext })
    }
}

/// How a packet to be sealed begins: its opcode, the key's id and the peer's number.
pub const fn first_word(key_id: KeyId, peer: Option<PeerNumber>) -> [u8; FIRST_WORD_BYTES] {
    let number = match peer {
        Some(peer) => peer.get(),
        None => PeerNumber::UNSET,
    };
    ((Opcode::DataV2.first_byte(key_id) as u32) << 24 | number).to_be_bytes()
}

/// The kind of an opened payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Payload<'a> {
    /// [`PING`]: counts as a sign of life.
    Ping,
    /// An OCC message of this type.
    Occ(u8),
    /// An IP packet or Ethernet frame.
    Packet(&'a [u8]),
}

impl<'a> Payload<'a> {
    /// Tells payloads apart.
    pub fn of(plaintext: &'a [u8]) -> Self {
        if plaintext == PING {
            return Self::Ping;
        }
        match plaintext.strip_prefix(&OCC_MAGIC).and_then(<[u8]>::first) {
            Some(kind) => Self::Occ(*kind),
            None => Self::Packet(plaintext),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use proptest::prelude::*;
    use weft_crypto::ovpn::{OpeningKey, SealingKey};
    use weft_crypto::{DataCipher, ReplayWindow};

    use super::*;

    /// The associated data of a packet.
    fn header(key_id: KeyId, peer: Option<PeerNumber>, packet_id: u32) -> [u8; HEADER_BYTES] {
        let parts = [first_word(key_id, peer), packet_id.to_be_bytes()].concat();
        parts.try_into().unwrap()
    }

    #[test]
    fn a_packet_begins_as_openvpn_begins_it() {
        let peer = PeerNumber::new(0x17);
        assert_eq!(first_word(KeyId::new(3).unwrap(), peer), [0x4b, 0, 0, 0x17]);
        assert_eq!(first_word(KeyId::FIRST, None), [0x48, 0xff, 0xff, 0xff]);
        assert_eq!(PeerNumber::new(0xff_ffff), None);
    }

    /// The parser reads the bytes that the sealing key writes behind the first word.
    #[test]
    fn a_sealed_packet_is_one_to_be_read() {
        let key = SealingKey::new(DataCipher::Aes128Gcm, &[1; 16], [2; 8]).unwrap();
        let (key_id, peer) = (KeyId::new(5).unwrap(), PeerNumber::new(9));
        let mut bytes = [0; OVERHEAD_BYTES + 3];
        let mut reserved = key.reserve(1, first_word(key_id, peer)).unwrap();
        bytes[OVERHEAD_BYTES..].copy_from_slice(b"abc");
        assert_eq!(reserved.seal_in_place(&mut bytes, 3), Ok(bytes.len()));
        let packet = DataPacket::parse(&bytes).unwrap();
        assert_eq!((packet.key_id, packet.peer, packet.packet_id), (key_id, peer, 1));
        assert_eq!(packet.ciphertext.len(), 3);
        let opening = OpeningKey::new(DataCipher::Aes128Gcm, &[1; 16], [2; 8]).unwrap();
        let plain = opening.open(&mut ReplayWindow::new(), &mut bytes).unwrap();
        assert_eq!(bytes[plain], *b"abc");
    }

    #[test]
    fn short_packets_and_packet_id_zero_are_refused() {
        let mut bytes = [header(KeyId::FIRST, None, 1).as_slice(), &[9; 16]].concat();
        assert_eq!(DataPacket::parse(&bytes).unwrap().ciphertext, []);
        for cut in 0..bytes.len() {
            let error = PacketError::Truncated { need: 24, have: cut };
            assert_eq!(DataPacket::parse(&bytes[..cut]), Err(error));
        }
        bytes[7] = 0;
        assert_eq!(DataPacket::parse(&bytes), Err(PacketError::ZeroPacketId));
        bytes[0] = 0x30;
        assert_eq!(DataPacket::parse(&bytes), Err(PacketError::WrongOpcode(Opcode::DataV1)));
        assert_eq!(crate::Packet::parse(&bytes), Err(PacketError::WrongOpcode(Opcode::DataV1)));
    }

    #[test]
    fn special_payloads_are_told_from_packets() {
        assert_eq!(Payload::of(&PING), Payload::Ping);
        let longer = [&PING[..], &[0]].concat();
        assert_eq!(Payload::of(&longer), Payload::Packet(&longer), "only the exact bytes");
        let exit = [&OCC_MAGIC[..], &[OCC_EXIT]].concat();
        assert_eq!(Payload::of(&exit), Payload::Occ(OCC_EXIT));
        assert_eq!(Payload::of(&OCC_MAGIC), Payload::Packet(&OCC_MAGIC));
        assert_eq!(Payload::of(&[]), Payload::Packet(&[]));
    }

    proptest! {
        #[test]
        fn every_data_packet_comes_back(
            key_id in 0_u8..8,
            number in 0_u32..=0xff_ffff,
            packet_id in 1_u32..,
            tag in any::<[u8; 16]>(),
            ciphertext in prop::collection::vec(any::<u8>(), 0..60),
        ) {
            let (key_id, peer) = (KeyId::new(key_id).unwrap(), PeerNumber::new(number));
            let associated = header(key_id, peer, packet_id);
            let bytes = [&associated[..], &tag, &ciphertext].concat();
            let packet = DataPacket::parse(&bytes).unwrap();
            let expected = DataPacket {
                key_id,
                peer,
                packet_id,
                associated: &associated,
                tag: &tag,
                ciphertext: &ciphertext,
            };
            prop_assert_eq!(packet, expected);
            prop_assert_eq!(crate::Packet::parse(&bytes), Ok(crate::Packet::Data(packet)));
        }
    }
}
