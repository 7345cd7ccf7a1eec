//! The layer that makes a reliable, ordered stream out of control packets, as OpenVPN has it: one for each key id.
//!
//! It sends packets again until they are acknowledged, each time after twice the wait, and at once if enough later
//! packets were acknowledged. Acknowledgements travel with packets, or by themselves when there is nothing to send.
//! Recent ones are repeated where there is room, since no one acknowledges an acknowledgement.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::control::ACKS_MAX;
use crate::opcode::Opcode;

/// Packets on the way, from the oldest that is not acknowledged: as many as OpenVPN's.
pub(crate) const SEND_WINDOW_PACKETS: u32 = 6;
/// Packets that a receiver holds, from the one that it waits for. A peer never has more on the way than the window.
pub(crate) const RECEIVE_WINDOW_PACKETS: u32 = 12;
/// Acknowledgements in a packet that has something else to say, as OpenVPN limits them.
pub(crate) const PIGGYBACK_ACKS_MAX: usize = 4;
/// Acknowledgements of later packets after which one counts as lost.
pub(crate) const FAST_RETRANSMIT_ACKS: u32 = 3;
/// The first wait for an acknowledgement in seconds; each further one is twice as long.
pub(crate) const RETRANSMIT_S: u64 = 2;
/// The longest wait in seconds.
pub(crate) const RETRANSMIT_S_MAX: u64 = 60;

/// Packets sent and received under one key id.
#[derive(Debug)]
pub(crate) struct Reliability {
    /// The first wait for an acknowledgement.
    wait: Duration,
    next_id: u32,
    /// Packets without acknowledgement, the oldest first.
    sent: VecDeque<Sent>,
    /// The packet id that is delivered next.
    expected: u32,
    /// Place n: packet `expected + n`, if it came already.
    held: VecDeque<Option<Received>>,
    /// Acknowledgements to be sent, the oldest first.
    acks: VecDeque<u32>,
    /// Acknowledgements that were sent, the last one first.
    recent: VecDeque<u32>,
}

/// A packet on the way.
#[derive(Debug)]
struct Sent {
    id: u32,
    opcode: Opcode,
    payload: Vec<u8>,
    /// When it is sent next.
    due: Instant,
    /// The wait behind that.
    wait: Duration,
    /// How many later packets were acknowledged since it was sent; `None`: it was not sent yet.
    overtaken: Option<u32>,
}

/// A packet that was received.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Received {
    pub(crate) opcode: Opcode,
    pub(crate) payload: Vec<u8>,
}

/// What becomes of a packet that was received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Receipt {
    /// It is held, and will be acknowledged.
    New,
    /// It came before; it will be acknowledged again.
    Duplicate,
    /// It is beyond the window, or there is no room for its acknowledgement: the peer will send it again.
    Refused,
}

/// A packet to be sent.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Outgoing<'a> {
    pub(crate) opcode: Opcode,
    pub(crate) id: u32,
    pub(crate) payload: &'a [u8],
}

impl Reliability {
    /// Begins with these packet ids. A transport that loses nothing has a long `wait` for acknowledgements.
    pub(crate) fn new(next_id: u32, expected: u32, wait: Duration) -> Self {
        Self {
            wait,
            next_id,
            sent: VecDeque::new(),
            expected,
            held: VecDeque::new(),
            acks: VecDeque::new(),
            recent: VecDeque::new(),
        }
    }

    /// Whether [`Self::push`] may be called.
    pub(crate) fn has_room(&self) -> bool {
        let oldest = self.sent.front().map_or(self.next_id, |sent| sent.id);
        self.next_id.wrapping_sub(oldest) < SEND_WINDOW_PACKETS
    }

    /// Whether all that was sent is acknowledged.
    pub(crate) fn is_idle(&self) -> bool {
        self.sent.is_empty()
    }

    /// Whether the next packet to be pushed is the first.
    pub(crate) const fn next_id(&self) -> u32 {
        self.next_id
    }

    /// Takes a packet to be sent as soon as possible.
    pub(crate) fn push(&mut self, now: Instant, opcode: Opcode, payload: Vec<u8>) {
        let id = self.next_id;
        self.next_id = self.next_id.wrapping_add(1);
        let wait = self.wait;
        self.sent.push_back(Sent { id, opcode, payload, due: now, wait, overtaken: None });
    }

    /// Takes acknowledgements. Those of packets that were never sent, or long ago, mean nothing.
    pub(crate) fn handle_acks(&mut self, ids: &[u32]) {
        for id in ids {
            let Some(at) = self.sent.iter().position(|sent| sent.id == *id) else { continue };
            let Some(Sent { overtaken: Some(_), .. }) = self.sent.get(at) else { continue };
            self.sent.remove(at);
            for earlier in self.sent.iter_mut().take(at) {
                earlier.overtaken = earlier.overtaken.map(|count| count.saturating_add(1));
            }
        }
        // Idle for most of its life, with many others.
        if self.sent.is_empty() {
            self.sent = VecDeque::new();
            self.held.shrink_to_fit();
        }
    }

    /// Takes a packet that was received.
    pub(crate) fn handle_packet(&mut self, id: u32, received: Received) -> Receipt {
        let ahead = id.wrapping_sub(self.expected);
        let is_old = ahead > u32::MAX / 2;
        if !is_old && ahead >= RECEIVE_WINDOW_PACKETS || !self.note(id) {
            return Receipt::Refused;
        }
        if is_old {
            return Receipt::Duplicate;
        }
        let at = ahead as usize;
        if self.held.len() <= at {
            self.held.resize(at + 1, None);
        }
        match self.held.get_mut(at) {
            Some(place @ None) => {
                *place = Some(received);
                Receipt::New
            }
            _ => Receipt::Duplicate,
        }
    }

    /// Notes an acknowledgement to be sent. False: there are too many already.
    pub(crate) fn note(&mut self, id: u32) -> bool {
        if self.acks.contains(&id) {
            return true;
        }
        let has_room = self.acks.len() < ACKS_MAX;
        if has_room {
            self.acks.push_back(id);
        }
        has_room
    }

    /// The next packet in order.
    pub(crate) fn pop_in_order(&mut self) -> Option<Received> {
        let received = self.held.front_mut()?.take()?;
        self.held.pop_front();
        self.expected = self.expected.wrapping_add(1);
        Some(received)
    }

    /// Whether acknowledgements wait to be sent.
    pub(crate) fn owes_acks(&self) -> bool {
        !self.acks.is_empty()
    }

    /// Whether there is anything to acknowledge, or to acknowledge again.
    pub(crate) fn may_ack(&self) -> bool {
        self.owes_acks() || !self.recent.is_empty()
    }

    /// Acknowledgements for a packet that is sent now, at most `max`: what waits, and then recent ones again.
    pub(crate) fn take_acks(&mut self, max: usize) -> Vec<u32> {
        for _ in 0..max.min(self.acks.len()) {
            let Some(id) = self.acks.pop_front() else { break };
            self.recent.retain(|recent| *recent != id);
            self.recent.push_front(id);
        }
        self.recent.truncate(ACKS_MAX);
        self.recent.iter().take(max).copied().collect()
    }

    /// The oldest packet that is due, which is then taken to be sent.
    pub(crate) fn poll_transmit(&mut self, now: Instant) -> Option<Outgoing<'_>> {
        let sent = self.sent.iter_mut().find(|sent| sent.is_due(now))?;
        sent.due = now + sent.wait;
        sent.wait = (sent.wait * 2).min(Duration::from_secs(RETRANSMIT_S_MAX).max(sent.wait));
        sent.overtaken = Some(0);
        Some(Outgoing { opcode: sent.opcode, id: sent.id, payload: &sent.payload })
    }

    /// When [`Self::poll_transmit`] has something to send next.
    pub(crate) fn poll_timeout(&self) -> Option<Instant> {
        self.sent.iter().map(|sent| sent.due).min()
    }
}

impl Sent {
    fn is_due(&self, now: Instant) -> bool {
        self.due <= now || self.overtaken.is_some_and(|count| count >= FAST_RETRANSMIT_ACKS)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use proptest::prelude::*;

    use super::*;

    const WAIT: Duration = Duration::from_secs(RETRANSMIT_S);

    fn layer() -> Reliability {
        Reliability::new(0, 0, WAIT)
    }

    fn packet(byte: u8) -> Received {
        Received { opcode: Opcode::ControlV1, payload: vec![byte] }
    }

    fn sent_now(layer: &mut Reliability, now: Instant) -> Vec<u32> {
        std::iter::from_fn(|| layer.poll_transmit(now).map(|packet| packet.id)).collect()
    }

    #[test]
    fn the_send_window_is_six_from_the_oldest_without_acknowledgement() {
        let (mut layer, now) = (layer(), Instant::now());
        while layer.has_room() {
            layer.push(now, Opcode::ControlV1, vec![]);
        }
        assert_eq!(sent_now(&mut layer, now), [0, 1, 2, 3, 4, 5]);
        layer.handle_acks(&[1, 2, 9]);
        assert!(!layer.has_room(), "packet 0 is still on the way");
        layer.handle_acks(&[0]);
        assert!(layer.has_room());
        assert_eq!(layer.next_id(), 6);
    }

    #[test]
    fn waits_double_up_to_a_minute() {
        let (mut layer, mut now) = (layer(), Instant::now());
        layer.push(now, Opcode::ControlV1, vec![]);
        for wait in [2, 4, 8, 16, 32, 60, 60] {
            assert_eq!(sent_now(&mut layer, now), [0]);
            assert_eq!(sent_now(&mut layer, now), [0_u32; 0]);
            assert_eq!(layer.poll_timeout(), Some(now + Duration::from_secs(wait)));
            now += Duration::from_secs(wait);
        }
        layer.handle_acks(&[0]);
        assert!(layer.is_idle());
        assert_eq!(layer.poll_timeout(), None);
    }

    #[test]
    fn three_later_acknowledgements_mean_a_loss() {
        let (mut layer, now) = (layer(), Instant::now());
        (0..4).for_each(|_| layer.push(now, Opcode::ControlV1, vec![]));
        assert_eq!(sent_now(&mut layer, now), [0, 1, 2, 3]);
        layer.handle_acks(&[1, 2]);
        assert_eq!(sent_now(&mut layer, now), [0_u32; 0]);
        layer.handle_acks(&[3]);
        assert_eq!(sent_now(&mut layer, now), [0]);
        assert_eq!(sent_now(&mut layer, now), [0_u32; 0], "it counts anew");
    }

    #[test]
    fn an_acknowledgement_of_what_was_not_sent_means_nothing() {
        let (mut layer, now) = (layer(), Instant::now());
        layer.push(now, Opcode::ControlV1, vec![]);
        layer.handle_acks(&[0]);
        assert_eq!(sent_now(&mut layer, now), [0]);
    }

    #[test]
    fn packets_are_delivered_in_order_once_and_acknowledged_each_time() {
        let mut layer = layer();
        assert_eq!(layer.handle_packet(1, packet(1)), Receipt::New);
        assert_eq!(layer.pop_in_order(), None);
        assert_eq!(layer.handle_packet(0, packet(0)), Receipt::New);
        assert_eq!(layer.handle_packet(1, packet(9)), Receipt::Duplicate);
        assert_eq!(layer.pop_in_order(), Some(packet(0)));
        assert_eq!(layer.pop_in_order(), Some(packet(1)));
        assert_eq!(layer.pop_in_order(), None);
        assert_eq!(layer.handle_packet(0, packet(0)), Receipt::Duplicate);
        assert_eq!(layer.take_acks(ACKS_MAX), [0, 1]);
        assert!(!layer.owes_acks());
    }

    #[test]
    fn what_is_beyond_the_window_is_refused_without_acknowledgement() {
        let mut layer = layer();
        assert_eq!(layer.handle_packet(RECEIVE_WINDOW_PACKETS, packet(0)), Receipt::Refused);
        assert!(!layer.owes_acks());
        let last = RECEIVE_WINDOW_PACKETS - 1;
        assert_eq!(layer.handle_packet(last, packet(0)), Receipt::New);
        for id in 0..7 {
            assert_eq!(layer.handle_packet(id, packet(0)), Receipt::New);
        }
        assert_eq!(layer.handle_packet(7, packet(0)), Receipt::Refused, "no room to acknowledge");
        assert_eq!(layer.take_acks(PIGGYBACK_ACKS_MAX).len(), PIGGYBACK_ACKS_MAX);
        assert_eq!(layer.handle_packet(7, packet(0)), Receipt::New);
    }

    #[test]
    fn recent_acknowledgements_are_repeated() {
        let mut layer = layer();
        (0..3).for_each(|id| assert!(layer.note(id)));
        assert_eq!(layer.take_acks(2), [1, 0]);
        assert!(layer.owes_acks());
        assert_eq!(layer.take_acks(4), [2, 1, 0]);
        assert!(layer.note(3) && layer.note(3));
        assert_eq!(layer.take_acks(2), [3, 2]);
        assert_eq!(layer.take_acks(8), [3, 2, 1, 0]);
    }

    proptest! {
        #[test]
        fn a_stream_survives_loss_repetition_and_reordering(
            choices in prop::collection::vec(0_u8..6, 100..400),
            count in 1_u8..60,
        ) {
            let (mut now, mut a, mut b) = (Instant::now(), layer(), layer());
            let (mut next, mut got) = (0_u8, Vec::new());
            let mut forth: Vec<(u32, Vec<u8>)> = Vec::new();
            let mut back: Vec<Vec<u32>> = Vec::new();
            // Fair behind the choices, so that it ends.
            for choice in choices.into_iter().chain(std::iter::repeat_n(9, 500)) {
                while next < count && a.has_room() {
                    a.push(now, Opcode::ControlV1, vec![next]);
                    next += 1;
                }
                while let Some(out) = a.poll_transmit(now) {
                    forth.push((out.id, out.payload.to_vec()));
                }
                match choice {
                    0 => { forth.pop(); }
                    1 => { back.pop(); }
                    2 => forth.reverse(),
                    3 => forth.extend(forth.last().cloned()),
                    4 => back.extend(back.last().cloned()),
                    _ => {}
                }
                if let Some((id, payload)) = forth.pop() {
                    b.handle_packet(id, Received { opcode: Opcode::ControlV1, payload });
                    got.extend(std::iter::from_fn(|| b.pop_in_order()).map(|got| got.payload[0]));
                    back.push(b.take_acks(ACKS_MAX));
                }
                if let Some(acks) = back.pop() {
                    a.handle_acks(&acks);
                }
                now += Duration::from_secs(7);
            }
            prop_assert_eq!(got, (0..count).collect::<Vec<u8>>());
            prop_assert!(a.is_idle());
        }
    }
}
