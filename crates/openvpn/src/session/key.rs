//! One key of a session: its packets, its TLS session, and how far it has come.

use std::time::{Duration, Instant};

use zeroize::Zeroizing;

use super::tls::Tls;
use crate::control::{ACKS_MAX, Acks, ControlPacket};
use crate::key_derivation::{ClientKeySource, ServerKeySource};
use crate::opcode::{KeyId, Opcode, SessionId};
use crate::reliability::{PIGGYBACK_ACKS_MAX, Receipt, Received, Reliability};
use crate::wrap::HEAD_BYTES;

/// The longest control packet with all that wraps it, in bytes; OpenVPN's `max-packet-size` is 1,250.
pub const CONTROL_BYTES_MAX: usize = 1_250;
/// The most payload bytes of packets that wait for acknowledgements of others: two of the largest TLS records.
pub(super) const OUTPUT_BYTES_MAX: usize = 64 * 1_024;
/// The payload bytes from which on messages wait for acknowledgements. rustls refuses more than 64 KiB at once.
const OUTPUT_FULL_BYTES: usize = 16 * 1_024;
/// What a packet has beside its payload, at most: number of acknowledgements, these, session id, packet id.
const FIELDS_BYTES: usize = HEAD_BYTES + 1 + PIGGYBACK_ACKS_MAX * 4 + 8 + 4;

/// How far a key has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Stage {
    /// Resets and TLS.
    Handshake,
    /// TLS is up; the peer's key method message is to come.
    KeyMessage,
    /// Messages may travel. At the server the caller's decision is to come, at the client the pushed options.
    Decision,
    /// There are data keys.
    Established,
}

/// A key.
pub(super) struct KeyState {
    pub(super) id: KeyId,
    pub(super) stage: Stage,
    pub(super) began: Instant,
    /// When the peer must have come so far that there are data keys.
    pub(super) deadline: Instant,
    pub(super) tls: Tls,
    /// The random bytes of both ends.
    pub(super) sources: Sources,
    /// Plaintext that was not understood yet.
    pub(super) plain: Zeroizing<Vec<u8>>,
    reliable: Reliability,
    /// Bytes of TLS that are in no packet yet.
    output: Vec<u8>,
    /// Whether the peer has this key id, so that bytes of TLS make sense to it.
    is_released: bool,
    /// The first bytes of TLS travel with the client's wrapped key.
    pub(super) brings_client_key: bool,
}

/// The random bytes of both ends for one key, until there are data keys.
#[derive(Debug, Default)]
pub(super) struct Sources {
    pub(super) client: Option<Box<ClientKeySource>>,
    pub(super) server: Option<Box<ServerKeySource>>,
}

/// How a key's packets begin.
pub(super) struct Begin {
    pub(super) id: KeyId,
    pub(super) next_id: u32,
    pub(super) expected: u32,
    /// The reset to be sent.
    pub(super) reset: Option<Opcode>,
    pub(super) retransmit: Duration,
    pub(super) hand_window: Duration,
}

impl KeyState {
    pub(super) fn new(now: Instant, tls: Tls, begin: &Begin) -> Self {
        let mut reliable = Reliability::new(begin.next_id, begin.expected, begin.retransmit);
        if let Some(reset) = begin.reset {
            reliable.push(now, reset, Vec::new());
        }
        Self {
            id: begin.id,
            stage: Stage::Handshake,
            began: now,
            deadline: now + begin.hand_window,
            tls,
            sources: Sources::default(),
            plain: Zeroizing::default(),
            reliable,
            output: Vec::new(),
            is_released: begin.reset.is_none(),
            brings_client_key: false,
        }
    }

    /// Takes a packet of this key id, but for its payload.
    pub(super) fn handle_packet(&mut self, packet: &ControlPacket<'_>) -> Receipt {
        self.reliable.handle_acks(packet.acks.ids());
        // A reset that was acknowledged has reached the peer.
        self.is_released |= self.reliable.is_idle();
        let Some(id) = packet.packet_id else { return Receipt::Duplicate };
        let payload = packet.payload.to_vec();
        self.reliable.handle_packet(id, Received { opcode: packet.opcode, payload })
    }

    /// The next packet in order.
    pub(super) fn pop_in_order(&mut self) -> Option<Received> {
        self.reliable.pop_in_order()
    }

    /// Bytes of TLS out of a packet.
    pub(super) fn receive(&mut self, bytes: &[u8]) -> Result<(), rustls::Error> {
        self.tls.receive(bytes, &mut self.plain)
    }

    /// Whether TLS is given another message.
    pub(super) fn takes_messages(&mut self) -> bool {
        self.tls.take_output(&mut self.output);
        self.output.len() < OUTPUT_FULL_BYTES
    }

    /// Puts what TLS has to say into packets, as far as the window has room. `overhead` is what wraps a packet.
    pub(super) fn flush(&mut self, now: Instant, overhead: usize, client_key_bytes: usize) {
        self.tls.take_output(&mut self.output);
        let mut taken = 0;
        while self.is_released && self.reliable.has_room() && taken < self.output.len() {
            let is_first = self.brings_client_key && self.reliable.next_id() == 1;
            let (opcode, behind) = match is_first {
                true => (Opcode::ControlWkcV1, client_key_bytes),
                false => (Opcode::ControlV1, 0),
            };
            let room = CONTROL_BYTES_MAX.saturating_sub(FIELDS_BYTES + overhead + behind).max(1);
            let end = self.output.len().min(taken + room);
            self.reliable.push(now, opcode, self.output[taken..end].to_vec());
            taken = end;
        }
        self.output.drain(..taken);
        // Most of its life a session is idle, with many others.
        if self.output.is_empty() {
            self.output = Vec::new();
        }
        if self.plain.is_empty() {
            self.plain = Zeroizing::default();
        }
    }

    /// Whether more waits than a peer that acknowledges lets wait.
    pub(super) const fn is_clogged(&self) -> bool {
        self.output.len() > OUTPUT_BYTES_MAX
    }

    /// Appends the next packet that is due, in plain layout, and returns its opcode.
    pub(super) fn poll_transmit(
        &mut self,
        now: Instant,
        own: SessionId,
        remote: Option<SessionId>,
        out: &mut Vec<u8>,
    ) -> Option<Opcode> {
        let due = self.reliable.poll_transmit(now);
        let due = due.map(|due| (due.opcode, due.id, due.payload.to_vec()));
        let max = if due.is_some() { PIGGYBACK_ACKS_MAX } else { ACKS_MAX };
        if due.is_none() && !self.reliable.owes_acks() {
            return None;
        }
        let remote = remote.filter(|_| self.reliable.may_ack());
        let acks = remote.map(|_| self.reliable.take_acks(max)).unwrap_or_default();
        let (opcode, packet_id, payload) = match due {
            Some((opcode, id, payload)) => (opcode, Some(id), payload),
            None => (Opcode::AckV1, None, Vec::new()),
        };
        let packet = ControlPacket {
            opcode,
            key_id: self.id,
            session: own,
            acks: Acks::new(&acks).ok()?,
            remote_session: remote,
            packet_id,
            payload: &payload,
        };
        packet.write(out).ok().map(|()| opcode)
    }

    /// When [`Self::poll_transmit`] has something next.
    pub(super) fn poll_timeout(&self, now: Instant) -> Option<Instant> {
        if self.reliable.owes_acks() {
            return Some(now);
        }
        self.reliable.poll_timeout()
    }

    /// Whether all that was to be said has been, and was acknowledged.
    pub(super) fn is_idle(&self) -> bool {
        self.reliable.is_idle() && self.output.is_empty()
    }
}
