//! Recovery from lost notices: finds the changes that they reported.

use std::{collections::HashMap, net::SocketAddr};

use weft_openvpn::device::{PeerState, Slot};

use super::{OvpnClient, OvpnError, Refusal};

/// A peer as the caller knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KnownPeer {
    /// Its id.
    pub id: u32,
    /// Its last address, over UDP.
    pub remote: Option<SocketAddr>,
    /// The id of the key in its primary slot; none if none was installed.
    pub primary_key_id: Option<u32>,
}

/// Something of which no notice came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Missed {
    /// The peer is gone. The reason is lost.
    PeerGone {
        /// Its id.
        peer_id: u32,
    },
    /// Its primary key is gone; it needs a new one.
    KeyGone {
        /// Its id.
        peer_id: u32,
        /// The id of the key.
        key_id: u32,
    },
    /// The peer's address changed, and the device sends to the new one.
    PeerMoved {
        /// Its id.
        peer_id: u32,
        /// Its address now.
        remote: SocketAddr,
    },
}

impl OvpnClient {
    /// Compares the peers that the caller knows with those that the device has. Peers that the caller does
    /// not know are ignored. A peer that was deleted and made again meanwhile looks unchanged.
    ///
    /// # Errors
    /// [`OvpnError`]; [`Refusal::NoDevice`] if the device is gone with all its peers.
    pub async fn resynchronise(
        &self,
        device: u32,
        known: &[KnownPeer],
    ) -> Result<Vec<Missed>, OvpnError> {
        let mut missed = differences(known, &self.peers(device).await?);
        let gone = |peer: &&KnownPeer| missed.contains(&Missed::PeerGone { peer_id: peer.id });
        let left: Vec<&KnownPeer> = known.iter().filter(|peer| !gone(peer)).collect();
        for peer in left {
            let Some(key_id) = peer.primary_key_id else { continue };
            match self.key(device, peer.id, Slot::Primary).await {
                Err(error) if error.refusal() == Some(Refusal::Absent) => {
                    missed.push(Missed::KeyGone { peer_id: peer.id, key_id });
                }
                other => drop(other?),
            }
        }
        Ok(missed)
    }
}

/// The peers that are gone or have another address.
fn differences(known: &[KnownPeer], found: &[PeerState]) -> Vec<Missed> {
    let found: HashMap<u32, Option<SocketAddr>> =
        found.iter().map(|peer| (peer.id, peer.remote)).collect();
    let missed = |peer: &KnownPeer| match found.get(&peer.id) {
        None => Some(Missed::PeerGone { peer_id: peer.id }),
        Some(Some(remote)) if peer.remote != Some(*remote) => {
            Some(Missed::PeerMoved { peer_id: peer.id, remote: *remote })
        }
        Some(_) => None,
    };
    known.iter().filter_map(missed).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn peers_that_went_or_moved_are_reported_and_no_others() {
        let at = |text: &str| Some(text.parse::<SocketAddr>().unwrap());
        let known = |id, remote| KnownPeer { id, remote, primary_key_id: None };
        let found = |id, remote| PeerState { id, remote, ..PeerState::default() };
        let told = differences(
            &[
                known(1, at("192.0.2.1:1")),
                known(2, at("192.0.2.2:1")),
                known(3, None),
                known(4, None),
            ],
            &[
                found(2, at("192.0.2.2:9")),
                found(1, at("192.0.2.1:1")),
                found(4, None),
                found(9, None),
            ],
        );
        let moved = Missed::PeerMoved { peer_id: 2, remote: at("192.0.2.2:9").unwrap() };
        assert_eq!(told, [moved, Missed::PeerGone { peer_id: 3 }]);
        assert_eq!(differences(&[], &[found(9, None)]), []);
    }
}
