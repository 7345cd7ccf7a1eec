//! The authority moves from its home to another host, which gets it in parts.
//!
//! The old home stops writing before it gives anything. It forgets the private key once the new one tells that it is
//! the home. So two hosts never write, and the key is always somewhere.

use weft_crypto::PeerId;
use zeroize::Zeroizing;

use super::documents::{Content, DOCUMENT_MAX_BYTES};
use super::homes::Fetched;
use super::message::{Message, Text};

/// What the old home gives, and what the new one has got.
#[derive(Default)]
pub(super) struct Handover {
    giving: Option<(PeerId, u64, Content)>,
    taking: Option<Taking>,
}

struct Taking {
    peer: PeerId,
    id: u64,
    version: String,
    total: usize,
    got: Zeroizing<String>,
}

impl Handover {
    /// Gives the authority with this fingerprint to a peer, which asks for the parts.
    pub(super) fn give(
        &mut self,
        (peer, id): (PeerId, u64),
        fingerprint: String,
        content: Content,
    ) -> Message {
        let (version, total) = (content.version(), content.0.len());
        self.giving = Some((peer, id, content));
        Message::Hand { id, version, total, fingerprint }
    }

    /// The peer has said what became of it.
    pub(super) fn end_giving(&mut self) {
        self.giving = None;
    }

    /// A part of what is given to this peer.
    pub(super) fn part(&self, to: PeerId, id: u64, offset: usize) -> Option<Message> {
        let is_its = |(peer, given, _): &&(PeerId, u64, Content)| *peer == to && *given == id;
        let (_, _, content) = self.giving.as_ref().filter(is_its)?;
        Some(Message::HandedPart { id, offset, text: Text(content.part(offset)?.to_owned()) })
    }

    /// Begins to take the authority from its home. `None`: it is too long.
    pub(super) fn take(
        &mut self,
        (peer, id): (PeerId, u64),
        version: String,
        total: usize,
    ) -> Option<Message> {
        if total > DOCUMENT_MAX_BYTES {
            return None;
        }
        self.taking = Some(Taking { peer, id, version, total, got: Zeroizing::default() });
        Some(Message::WantHanded { id, offset: 0 })
    }

    /// Takes a part. Returns the whole once it is complete, or what to ask for next.
    pub(super) fn handle_part(
        &mut self,
        (peer, id): (PeerId, u64),
        offset: usize,
        text: &str,
    ) -> Option<Fetched<Content>> {
        let taking = self.taking.as_mut().filter(|it| (it.peer, it.id) == (peer, id))?;
        let is_next = taking.got.len() == offset && text.len() <= taking.total - offset;
        if !is_next || text.is_empty() {
            return None;
        }
        taking.got.push_str(text);
        if taking.got.len() < taking.total {
            return Some(Fetched::Part(Message::WantHanded { id, offset: taking.got.len() }));
        }
        let taking = self.taking.take()?;
        let content = Content(taking.got);
        (content.version() == taking.version).then_some(Fetched::Whole(content))
    }

    /// What was under way over a link is void.
    pub(super) fn handle_link_down(&mut self, peer: PeerId) {
        self.giving.take_if(|(to, ..)| *to == peer);
        self.taking.take_if(|taking| taking.peer == peer);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn the_authority_goes_in_parts_to_the_host_that_it_is_for_alone() {
        let [home, new, other] = [1, 2, 3].map(|number| PeerId::from_bytes([number; 32]));
        let content = Content(Zeroizing::new("x".repeat(200_000)));
        let (mut gives, mut takes) = (Handover::default(), Handover::default());
        let hand = gives.give((new, 7), "f".into(), content.clone());
        let Message::Hand { id, version, total, .. } = hand else { panic!() };
        assert!(takes.take((home, 7), version.clone(), DOCUMENT_MAX_BYTES + 1).is_none());
        let mut next = takes.take((home, 7), version, total);
        let got = loop {
            let Some(Message::WantHanded { id: 7, offset }) = next else { panic!("{next:?}") };
            assert!(
                gives.part(other, id, offset).is_none() && gives.part(new, 8, offset).is_none()
            );
            let Some(Message::HandedPart { text, .. }) = gives.part(new, id, offset) else {
                panic!()
            };
            assert!(takes.handle_part((other, 7), offset, &text.0).is_none());
            match takes.handle_part((home, 7), offset, &text.0).unwrap() {
                Fetched::Whole(content) => break content,
                Fetched::Part(want) => next = Some(want),
            }
        };
        assert_eq!(got.version(), content.version());
        gives.handle_link_down(new);
        assert!(gives.part(new, 7, 0).is_none(), "it is given over another link");
    }
}
