//! Requests that wait until the engines of linked hosts know this host's containers.

use tokio::sync::oneshot;
use weft_mesh::{Mesh, Ticket};
use weft_path::Vni;

/// The requests that wait, at most [`weft_mesh::limits::BARRIERS_MAX`].
#[derive(Default)]
pub(crate) struct Barriers {
    waiting: Vec<(Ticket, oneshot::Sender<()>)>,
}

impl Barriers {
    /// Replies once all linked hosts that hold a network know the endpoints announced so far. Requests that were given
    /// up meanwhile end.
    pub(super) fn start(&mut self, mesh: &mut Mesh, vni: Vni, reply: oneshot::Sender<()>) {
        for (ticket, _) in self.waiting.extract_if(.., |(_, reply)| reply.is_closed()) {
            for peer in mesh.end_barrier(ticket) {
                tracing::info!(%peer, "attaches wait for this host no more until it answers: it hears late of containers");
            }
        }
        self.waiting.push((mesh.start_barrier(vni), reply));
    }

    /// A barrier has been passed.
    pub(super) fn passed(&mut self, ticket: Ticket) {
        for (_, reply) in self.waiting.extract_if(.., |(waits, _)| *waits == ticket) {
            let _ = reply.send(());
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::time::Instant;

    use weft_crypto::PeerId;
    use weft_mesh::{Config, Founding, Hello, Message, Output};

    use super::*;

    fn linked(now: Instant, peer: PeerId) -> Mesh {
        let mut config = Config::new(PeerId::from_bytes([1; 32]), "one", 6783);
        config.founding = Founding::Found;
        let mut mesh = Mesh::new(now, config, None, [0; 32]).unwrap();
        let hello = Hello { nickname: "two".to_owned(), ..mesh.hello() };
        mesh.handle_link_up(now, peer, hello, ([192, 0, 2, 2], 6783).into()).unwrap();
        mesh
    }

    /// Carries out the mesh's outputs; returns the numbers of the requests to the peer.
    fn settle(mesh: &mut Mesh, barriers: &mut Barriers) -> Vec<u64> {
        let mut asked = Vec::new();
        while let Some(output) = mesh.poll_output() {
            match output {
                Output::BarrierPassed { ticket } => barriers.passed(ticket),
                Output::Send { message: Message::BarrierRequest { number }, .. } => {
                    asked.push(number);
                }
                _ => {}
            }
        }
        asked
    }

    #[test]
    fn each_request_is_answered_at_its_own_time_and_one_given_up_ends() {
        let (now, peer) = (Instant::now(), PeerId::from_bytes([2; 32]));
        let mut mesh = linked(now, peer);
        let mut barriers = Barriers::default();
        let ask = |mesh: &mut Mesh, barriers: &mut Barriers| {
            let (reply, answer) = oneshot::channel();
            barriers.start(mesh, Vni::WEFT, reply);
            answer
        };
        let [mut first, mut second] = [(); 2].map(|()| ask(&mut mesh, &mut barriers));
        let asked = settle(&mut mesh, &mut barriers);
        let reply = |number| Message::BarrierReply { number };
        mesh.handle_message(now, peer, reply(asked[1])).unwrap();
        settle(&mut mesh, &mut barriers);
        assert!(first.try_recv().is_err() && second.try_recv().is_ok());
        drop(first);
        // The peer was late, so this one waits for nobody.
        let mut third = ask(&mut mesh, &mut barriers);
        assert_eq!(barriers.waiting.len(), 1);
        settle(&mut mesh, &mut barriers);
        assert!(third.try_recv().is_ok());
        assert!(barriers.waiting.is_empty());
    }
}
