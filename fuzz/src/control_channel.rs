//! A session of the control channel, at either end, and packets of its peer. Input of both targets: packets. Each is
//! its length 1 byte and its content: either a datagram as it is, if its first byte is 0, or (else) what the peer makes
//! a right packet of: opcode and key id 1, packet id 1, number of acknowledgements 1, these 1 each, payload. Without
//! content, a second passes.

use std::time::{Duration, Instant};

use weft_openvpn::control::{ACKS_MAX, Acks, ControlPacket};
use weft_openvpn::session::{EVENTS_MAX, Event, Session};
use weft_openvpn::wrap::{ReplayId, WrapKeys};
use weft_openvpn::{Opcode, SessionId};

pub(crate) const UNIX_S: u64 = 1_800_000_000;
/// The most packets that a session may have to send after one call.
const TRANSMITS_MAX: usize = 64;

/// One step of an input.
pub(crate) enum Step<'a> {
    /// A datagram as it is.
    Raw(&'a [u8]),
    /// For [`Channel::made`].
    Made(&'a [u8]),
    /// A second passes.
    Later,
}

/// The steps of an input.
pub(crate) fn steps(mut rest: &[u8]) -> impl Iterator<Item = Step<'_>> {
    std::iter::from_fn(move || {
        let (length, behind) = rest.split_first()?;
        let (packet, behind) = behind.split_at(usize::from(*length).min(behind.len()));
        rest = behind;
        Some(match packet.split_first() {
            Some((0, bytes)) => Step::Raw(bytes),
            Some(_) => Step::Made(packet),
            None => Step::Later,
        })
    })
}

/// An end, whose peer proves nothing.
pub(crate) struct Channel {
    pub(crate) now: Instant,
    /// `None`: a server that has let nobody in.
    pub(crate) session: Option<Session>,
    peer_keys: WrapKeys,
    peer: SessionId,
    replay_id: ReplayId,
    is_over: bool,
}

impl Channel {
    pub(crate) fn new(now: Instant, session: Option<Session>, peer_keys: WrapKeys) -> Self {
        let peer = SessionId::new([0xc1; 8]).expect("not zero");
        let replay_id = ReplayId { time_s: 7, number: 1 };
        Self { now, session, peer_keys, peer, replay_id, is_over: false }
    }

    pub(crate) fn wait(&mut self) {
        self.now += Duration::from_secs(1);
    }

    pub(crate) fn handle(&mut self, bytes: &[u8]) {
        if let Some(session) = &mut self.session {
            let _ = session.handle_datagram(self.now, bytes);
        }
        self.poll();
    }

    /// A right packet of the peer.
    pub(crate) fn made(&mut self, packet: &[u8]) -> Option<(Opcode, Vec<u8>)> {
        let (head, rest) = packet.split_first_chunk::<3>()?;
        let (opcode, key_id) = Opcode::parse(head[0]).ok()?;
        let (ids, payload) = rest.split_at(usize::from(head[2]).min(ACKS_MAX).min(rest.len()));
        let ids: Vec<u32> = ids.iter().map(|id| u32::from(*id)).collect();
        let own = self.session.as_ref().map(Session::own);
        let acks = own.and_then(|_| Acks::new(&ids).ok()).unwrap_or_default();
        let is_ack = opcode == Opcode::AckV1;
        let made = ControlPacket {
            opcode,
            key_id,
            session: self.peer,
            acks,
            remote_session: own.filter(|_| !acks.ids().is_empty()),
            packet_id: (!is_ack).then_some(u32::from(head[1])),
            payload: if is_ack { &[] } else { payload },
        };
        let (mut plain, mut bytes) = (Vec::new(), Vec::new());
        made.write(&mut plain).ok()?;
        self.peer_keys.wrap(&plain, self.replay_id, &mut bytes);
        self.replay_id.number += 1;
        Some((opcode, bytes))
    }

    /// A session's events and packets to send come to an end, and it lets nobody in.
    fn poll(&mut self) {
        let Some(session) = &mut self.session else { return };
        session.handle_timeout(self.now);
        let mut count = 0;
        while let Some(event) = session.poll_event() {
            assert!(!self.is_over, "an event behind the last: {event:?}");
            let is_let_in = matches!(event, Event::Connected | Event::InstallKey(..));
            assert!(!is_let_in, "connected with a peer that proves nothing");
            self.is_over = matches!(event, Event::Ended(_));
            count += 1;
        }
        assert!(count <= EVENTS_MAX + 1, "{count} events at once");
        let sent = std::iter::from_fn(|| session.poll_transmit(self.now)).take(TRANSMITS_MAX);
        assert!(sent.count() < TRANSMITS_MAX, "no end of packets");
    }

    /// No handshake succeeds: the session must be over in the end.
    pub(crate) fn wait_for_the_end(&mut self) {
        self.poll();
        for _ in 0..TRANSMITS_MAX {
            let at = self.session.as_ref().and_then(|session| session.poll_timeout(self.now));
            let Some(at) = at else { break };
            self.now = self.now.max(at);
            self.poll();
        }
        let Some(session) = &self.session else { return };
        assert!(self.is_over && session.is_drained(self.now), "the session never ends");
    }
}
