//! The place of an SA in the mesh.

use weft_crypto::PeerId;

/// The direction in which an SA carries packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// From the peer.
    In,
    /// To the peer.
    Out,
}

/// The direction of an SA, and its peer.
pub(super) type SaOf = (PeerId, Way);
