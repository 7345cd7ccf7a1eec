//! pure: the OpenVPN control channel, as a state machine.
//!
//! From the wire up, as stock OpenVPN speaks it:
//!
//! - checked views and builders of packets: [`control`], [`data`], the framing over TCP ([`frame`]);
//! - what protects control packets outside of TLS: tls-auth, tls-crypt, tls-crypt-v2 ([`wrap`]);
//! - a server's door, which keeps no state for who has not proven his address ([`gate`]);
//! - the control channel with one peer, at either end: retransmission, TLS, keys and their renewal, who the peer is,
//!   and what is pushed ([`session`]);
//! - the texts inside TLS ([`key_method`], [`messages`]), what both ends choose by them ([`negotiation`]), keys from
//!   them ([`key_derivation`]), tokens in the place of passwords ([`auth_token`]), and key files ([`static_key`]);
//! - configurations of servers and clients, as files of OpenVPN's, and what Weft makes of each line ([`config`]);
//! - the requests and answers of a data channel device, the kernel's or userspace's ([`device`]).
//!
//! Packets of the data channel are sealed and opened in `weft-crypto`; sockets, threads, addresses and logins are the
//! caller's.
#![forbid(unsafe_code)]

pub mod auth_token;
pub mod config;
pub mod control;
pub mod data;
pub mod device;
pub mod frame;
pub mod gate;
pub mod key_derivation;
pub mod key_method;
pub mod messages;
pub mod negotiation;
mod opcode;
mod reliability;
pub mod session;
pub mod static_key;
#[cfg(test)]
mod testing;
pub mod words;
pub mod wrap;

pub use opcode::{KeyId, Opcode, SessionId};

use control::ControlPacket;
use data::DataPacket;

/// Bytes are not the packet that they were to be, or a packet cannot be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PacketError {
    /// Peer: the packet ends too early; drop it.
    #[error("packet cut short: {have} bytes where {need} are needed; drop it")]
    Truncated {
        /// Bytes needed.
        need: usize,
        /// Bytes there.
        have: usize,
    },
    /// Peer: no such opcode; drop the packet.
    #[error("unknown opcode {0}; drop the packet")]
    UnknownOpcode(u8),
    /// Peer or caller: the packet is of another kind than the one to be read or written here.
    #[error("unexpected opcode {0:?}; drop the packet")]
    WrongOpcode(Opcode),
    /// Peer: a session id of eight zero bytes; drop the packet.
    #[error("session id is all zero; drop the packet")]
    ZeroSession,
    /// Peer: more acknowledgements than [`control::ACKS_MAX`]; drop the packet.
    #[error("{0} acknowledgements, at most 8 are allowed; drop the packet")]
    TooManyAcks(usize),
    /// Peer: an acknowledgement packet that acknowledges nothing; drop it.
    #[error("acknowledgement without packet ids; drop the packet")]
    NoAcks,
    /// Peer: bytes behind the end of a packet that has no payload; drop it.
    #[error("{0} trailing bytes; drop the packet")]
    Trailing(usize),
    /// Peer: packet id 0 is never sent in the data channel; drop the packet.
    #[error("invalid data packet id 0; drop the packet")]
    ZeroPacketId,
    /// Peer: the length of the trailing client key cannot be; drop the packet.
    #[error("invalid wrapped client key length {0}; drop the packet")]
    BadClientKey(usize),
    /// Peer: a frame of length 0 or longer than can be on a TCP connection; close it.
    #[error("invalid TCP frame length {0}; close the connection")]
    BadFrame(usize),
    /// Caller: the fields contradict each other and no packet can say that.
    #[error("packet fields contradict each other: {0}")]
    Contradiction(&'static str),
}

/// A datagram, or the content of a TCP frame, by its first byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Packet<'a> {
    /// A control packet without tls-auth and tls-crypt, or one from which these were taken off.
    Control(ControlPacket<'a>),
    /// A DATA_V2 packet.
    Data(DataPacket<'a>),
}

impl<'a> Packet<'a> {
    /// Reads a packet. DATA_V1, which has no peer id, is refused with [`PacketError::WrongOpcode`].
    ///
    /// # Errors
    /// The bytes are no such packet.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, PacketError> {
        let first = *bytes.first().ok_or(PacketError::Truncated { need: 1, have: 0 })?;
        match Opcode::parse(first)?.0 {
            Opcode::DataV2 => DataPacket::parse(bytes).map(Self::Data),
            Opcode::DataV1 => Err(PacketError::WrongOpcode(Opcode::DataV1)),
            _ => ControlPacket::parse(bytes).map(Self::Control),
        }
    }
}

/// Splits off the first `N` bytes.
pub(crate) fn take<const N: usize>(
    bytes: &mut &[u8],
    whole: usize,
) -> Result<[u8; N], PacketError> {
    let at = whole - bytes.len();
    let short = PacketError::Truncated { need: at + N, have: whole };
    let (head, rest) = bytes.split_first_chunk::<N>().ok_or(short)?;
    *bytes = rest;
    Ok(*head)
}
