//! Hosts that the user told this host to forget. It ignores them even if others still report them, as after a
//! reinstallation with a new key.

use weft_crypto::PeerId;

use super::{Change, Mesh, Output};
use crate::limits::FORGOTTEN_MAX;

impl Mesh {
    /// Forgets a host that is not linked (`weft forget`). This host neither dials nor announces it until a host
    /// is linked with it again. It keeps its ranges. Returns whether it was known.
    pub fn forget_member(&mut self, peer: PeerId) -> bool {
        let forgotten = !self.links.contains_key(&peer) && self.members.forget(peer);
        if forgotten {
            self.state.forgotten.retain(|known| *known != peer);
            self.state.forgotten.push(peer);
            let surplus = self.state.forgotten.len().saturating_sub(FORGOTTEN_MAX);
            self.state.forgotten.drain(..surplus);
            self.drop_endpoints_of(peer);
            self.tell_endpoints();
            self.dirty = true;
            self.emit(Output::Changed(Change::MemberForgotten { peer }));
        }
        forgotten
    }

    /// Whether the user told this host to forget that one: statements about it are ignored, and it is not dialled.
    #[must_use]
    pub fn is_forgotten(&self, peer: PeerId) -> bool {
        self.state.forgotten.contains(&peer)
    }

    /// A host is linked somewhere: it exists after all.
    pub(crate) fn is_back(&mut self, peer: PeerId) {
        let before = self.state.forgotten.len();
        self.state.forgotten.retain(|known| *known != peer);
        self.dirty |= self.state.forgotten.len() != before;
    }
}
