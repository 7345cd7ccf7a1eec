//! Barriers: this host asks its peers whether their engines know the endpoints that it has announced.
//!
//! A host takes no frame from an Ethernet address that nobody has announced. So a container's first frame is lost if it
//! overtakes its announcement. Links keep the order of messages. So a reply says that all before the request is known.

use std::collections::{BTreeMap, BTreeSet};

use rand::Rng;
use weft_crypto::PeerId;
use weft_packet::vxlan::Vni;

use super::{Mesh, Output, Ticket};
use crate::limits::BARRIERS_MAX;
use crate::message::{FEATURE_BARRIER, Hello, Message};

/// What barriers need of a link.
#[derive(Debug)]
pub(crate) struct BarrierLink {
    /// The peer answers.
    able: bool,
    /// It did not in time, and is not waited for until it does.
    late: bool,
}

impl BarrierLink {
    pub(crate) fn new(hello: &Hello) -> Self {
        let able = hello.features.iter().any(|feature| feature == FEATURE_BARRIER);
        Self { able, late: false }
    }
}

/// The barriers that have not been passed, each with the peers that have not answered.
#[derive(Debug, Default)]
pub(crate) struct Barriers(BTreeMap<Ticket, BTreeSet<PeerId>>);

impl Mesh {
    /// Asks all linked hosts that hold a network to say when their engines know the endpoints announced so far.
    /// [`Output::BarrierPassed`] follows, at once if nobody is waited for: hosts of earlier releases are not, and those
    /// that were late the last time are not until they answer.
    pub fn start_barrier(&mut self, vni: Vni) -> Ticket {
        // Replies to an earlier run of this host do not count.
        let ticket = Ticket(self.rng.next_u64());
        let takes = |peer: &PeerId| vni == Vni::WEFT || self.carries(*peer, vni);
        let asked: Vec<PeerId> = self.sharers(vni).into_iter().filter(takes).collect();
        let mut waited = BTreeSet::new();
        for peer in asked {
            let Some(link) = self.links.get(&peer).filter(|link| link.barrier.able) else {
                continue;
            };
            if !link.barrier.late {
                waited.insert(peer);
            }
            self.send(peer, Message::BarrierRequest { number: ticket.0 }.on(vni));
        }
        if waited.is_empty() || self.barriers.0.len() >= BARRIERS_MAX {
            self.emit(Output::BarrierPassed { ticket });
        } else {
            self.barriers.0.insert(ticket, waited);
        }
        ticket
    }

    /// Gives up a barrier. Returns the hosts that have not answered: later barriers do not wait for them until they do.
    pub fn end_barrier(&mut self, ticket: Ticket) -> Vec<PeerId> {
        let late = self.barriers.0.remove(&ticket).unwrap_or_default();
        for peer in &late {
            self.link_mut(*peer, |link| link.barrier.late = true);
        }
        late.into_iter().collect()
    }

    pub(super) fn handle_barrier_request(&mut self, (peer, vni): (PeerId, Vni), number: u64) {
        // The outputs of earlier messages are queued, so the reply follows them.
        self.send(peer, Message::BarrierReply { number }.on(vni));
    }

    pub(super) fn handle_barrier_reply(&mut self, peer: PeerId, number: u64) {
        self.link_mut(peer, |link| link.barrier.late = false);
        self.answered(Ticket(number), peer);
    }

    /// A peer is no longer linked: no barrier waits for it.
    pub(super) fn pass_barriers(&mut self, peer: PeerId) {
        let all: Vec<Ticket> = self.barriers.0.keys().copied().collect();
        all.into_iter().for_each(|ticket| self.answered(ticket, peer));
    }

    fn answered(&mut self, ticket: Ticket, peer: PeerId) {
        let Some(waited) = self.barriers.0.get_mut(&ticket) else { return };
        if waited.remove(&peer) && waited.is_empty() {
            self.barriers.0.remove(&ticket);
            self.emit(Output::BarrierPassed { ticket });
        }
    }
}
