//! The first byte of every packet, and session ids.

use std::fmt;

use crate::PacketError;

/// The kind of a packet: the upper five bits of the first byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Opcode {
    /// P_CONTROL_HARD_RESET_CLIENT_V1; obsolete.
    HardResetClientV1 = 1,
    /// P_CONTROL_HARD_RESET_SERVER_V1; obsolete.
    HardResetServerV1 = 2,
    /// P_CONTROL_SOFT_RESET_V1: a new key, under the next key id.
    SoftResetV1 = 3,
    /// P_CONTROL_V1: a piece of the TLS stream.
    ControlV1 = 4,
    /// P_ACK_V1: acknowledgements only.
    AckV1 = 5,
    /// P_DATA_V1: a data packet without peer id.
    DataV1 = 6,
    /// P_CONTROL_HARD_RESET_CLIENT_V2: a client begins.
    HardResetClientV2 = 7,
    /// P_CONTROL_HARD_RESET_SERVER_V2: the server's answer.
    HardResetServerV2 = 8,
    /// P_DATA_V2: a data packet with peer id.
    DataV2 = 9,
    /// P_CONTROL_HARD_RESET_CLIENT_V3: a client begins, with tls-crypt-v2.
    HardResetClientV3 = 10,
    /// P_CONTROL_WKC_V1: like [`Self::ControlV1`], with the client's wrapped key behind it once more.
    ControlWkcV1 = 11,
}

impl Opcode {
    /// Opcode and key id of a first byte.
    ///
    /// # Errors
    /// [`PacketError::UnknownOpcode`].
    pub const fn parse(first: u8) -> Result<(Self, KeyId), PacketError> {
        let opcode = match first >> 3 {
            1 => Self::HardResetClientV1,
            2 => Self::HardResetServerV1,
            3 => Self::SoftResetV1,
            4 => Self::ControlV1,
            5 => Self::AckV1,
            6 => Self::DataV1,
            7 => Self::HardResetClientV2,
            8 => Self::HardResetServerV2,
            9 => Self::DataV2,
            10 => Self::HardResetClientV3,
            11 => Self::ControlWkcV1,
            other => return Err(PacketError::UnknownOpcode(other)),
        };
        Ok((opcode, KeyId(first & 7)))
    }

    /// The first byte of a packet.
    pub const fn first_byte(self, key_id: KeyId) -> u8 {
        (self as u8) << 3 | key_id.0
    }

    /// Whether it belongs to the data channel.
    pub const fn is_data(self) -> bool {
        matches!(self, Self::DataV1 | Self::DataV2)
    }

    /// Whether it begins a session; such a packet has key id 0.
    pub const fn is_hard_reset(self) -> bool {
        matches!(
            self,
            Self::HardResetClientV1
                | Self::HardResetServerV1
                | Self::HardResetClientV2
                | Self::HardResetServerV2
                | Self::HardResetClientV3
        )
    }

    /// Whether a tls-crypt-v2 client key in clear is behind the packet.
    pub const fn has_client_key(self) -> bool {
        matches!(self, Self::HardResetClientV3 | Self::ControlWkcV1)
    }
}

/// The key of a session that a packet belongs to: 0 to 7.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct KeyId(u8);

impl KeyId {
    /// The key of the first handshake.
    pub const FIRST: Self = Self(0);

    /// A key id; `None` above 7.
    pub const fn new(id: u8) -> Option<Self> {
        if id < 8 { Some(Self(id)) } else { None }
    }

    /// Its number.
    pub const fn get(self) -> u8 {
        self.0
    }

    /// The id of the next renegotiation: 1 to 7 in turn, never 0 again.
    pub const fn next(self) -> Self {
        Self(if self.0 == 7 { 1 } else { self.0 + 1 })
    }
}

/// One end's name for a session: eight bytes, not all zero.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionId([u8; 8]);

impl SessionId {
    /// A session id of eight random bytes.
    ///
    /// # Errors
    /// [`PacketError::ZeroSession`].
    pub const fn new(bytes: [u8; 8]) -> Result<Self, PacketError> {
        if u64::from_be_bytes(bytes) == 0 {
            return Err(PacketError::ZeroSession);
        }
        Ok(Self(bytes))
    }

    /// The bytes as they travel.
    pub const fn as_bytes(&self) -> &[u8; 8] {
        &self.0
    }
}

impl fmt::Debug for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", u64::from_be_bytes(self.0))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn first_bytes_are_those_of_the_protocol() {
        for (opcode, first) in [
            (Opcode::SoftResetV1, 0x18),
            (Opcode::ControlV1, 0x20),
            (Opcode::AckV1, 0x28),
            (Opcode::DataV1, 0x30),
            (Opcode::HardResetClientV2, 0x38),
            (Opcode::HardResetServerV2, 0x40),
            (Opcode::DataV2, 0x48),
            (Opcode::HardResetClientV3, 0x50),
            (Opcode::ControlWkcV1, 0x58),
        ] {
            assert_eq!(opcode.first_byte(KeyId::FIRST), first);
            assert_eq!(Opcode::parse(first), Ok((opcode, KeyId::FIRST)));
        }
        assert_eq!(Opcode::DataV2.first_byte(KeyId::new(7).unwrap()), 0x4f);
    }

    #[test]
    fn each_first_byte_is_refused_or_comes_back() {
        for first in 0..=u8::MAX {
            match Opcode::parse(first) {
                Ok((opcode, key_id)) => assert_eq!(opcode.first_byte(key_id), first),
                Err(error) => {
                    assert_eq!(error, PacketError::UnknownOpcode(first >> 3));
                    assert!(first >> 3 == 0 || first >> 3 > 11);
                }
            }
        }
    }

    #[test]
    fn key_ids_never_come_back_to_zero() {
        let mut key_id = KeyId::FIRST;
        for expected in [1, 2, 3, 4, 5, 6, 7, 1, 2] {
            key_id = key_id.next();
            assert_eq!(key_id.get(), expected);
        }
        assert_eq!(KeyId::new(8), None);
        assert_eq!(SessionId::new([0; 8]), Err(PacketError::ZeroSession));
    }
}
