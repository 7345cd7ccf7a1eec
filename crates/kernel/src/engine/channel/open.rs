//! The data channel's device while it is there.

use std::collections::VecDeque;
use std::net::Ipv6Addr;
use std::time::Instant;

use weft_crypto::Cipher;
use weft_io::encap::EncapSocket;
use weft_path::Reason;

use super::change::PeerSpec;
use crate::ovpn::{OvpnClient, OvpnError, OvpnWatch, Watched};

/// The device, and the sockets that its peers are reached by.
#[derive(Default)]
pub(in crate::engine) struct Channel {
    /// They outlive the device, and the daemon.
    pub(in crate::engine) sockets: Option<EncapSocket>,
    pub(super) open: Option<Open>,
    /// Notices were lost; the next reading makes up for them.
    pub(super) notices_lost: bool,
    /// The result of the last trial of the kernel, and when it ran.
    pub(super) tried: Option<(Instant, Result<Vec<Cipher>, Reason>)>,
}

/// The device while it is there.
pub(super) struct Open {
    pub(super) index: u32,
    pub(super) client: OvpnClient,
    pub(super) watch: OvpnWatch,
    pub(super) leaving: Leaving,
}

/// Peers without keys that wait for deletion. The kernel's deletion waits for all processors and takes tens
/// of milliseconds. So peers are deleted one at a time, and hundreds of deletions do not delay probes. A new
/// peer with the id or the address of one of them waits for its deletion.
pub(super) struct Leaving {
    /// The peer that has waited longest comes first.
    peers: VecDeque<(u32, Ipv6Addr)>,
    /// When the next deletion is due.
    next: Instant,
}

impl Channel {
    /// Waits for the next notice of the device; pends while there is no device. Cancel safe.
    pub(in crate::engine) async fn next(&mut self) -> Result<Watched, OvpnError> {
        match &mut self.open {
            Some(open) => open.watch.next().await,
            None => std::future::pending().await,
        }
    }

    pub(in crate::engine) const fn is_open(&self) -> bool {
        self.open.is_some()
    }

    /// When the next peer is due for deletion.
    pub(in crate::engine) fn deletion_due(&self) -> Option<Instant> {
        self.open.as_ref().and_then(|open| open.leaving.due())
    }
}

impl Leaving {
    /// Starts empty; the first deletion is due at `now`.
    pub(super) const fn new(now: Instant) -> Self {
        Self { peers: VecDeque::new(), next: now }
    }

    pub(super) fn push(&mut self, id: u32, address: Ipv6Addr) {
        self.peers.push_back((id, address));
    }

    /// When the next deletion is due. Only a deletion changes this time. If each call computed it, a stream
    /// of events could defer the deletion indefinitely.
    fn due(&self) -> Option<Instant> {
        (!self.peers.is_empty()).then_some(self.next)
    }

    /// Takes the peer that has waited longest.
    pub(super) fn take(&mut self) -> Option<(u32, Ipv6Addr)> {
        self.peers.pop_front()
    }

    /// Records a deletion; the next one is due now.
    pub(super) const fn deleted(&mut self, now: Instant) {
        self.next = now;
    }

    /// Takes those out that have the id or the address of a new peer.
    pub(super) fn make_way_for(&mut self, new: &PeerSpec) -> Vec<(u32, Ipv6Addr)> {
        let in_the_way = |(id, address): &(u32, Ipv6Addr)| *id == new.id || *address == new.address;
        let (now, later): (Vec<_>, Vec<_>) = self.peers.drain(..).partition(in_the_way);
        self.peers = later.into();
        now
    }

    pub(super) fn has(&self, id: u32) -> bool {
        self.peers.iter().any(|(leaving, _)| *leaving == id)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const ADDRESS: Ipv6Addr = Ipv6Addr::LOCALHOST;

    #[test]
    fn a_deletion_that_is_due_stays_due_until_it_is_done() {
        let begun = Instant::now() - Duration::from_secs(1);
        let mut leaving = Leaving::new(begun);
        assert_eq!(leaving.due(), None);
        for id in [1, 2] {
            leaving.push(id, ADDRESS);
            assert_eq!(leaving.due(), Some(begun), "however often it is asked");
        }
        assert_eq!(leaving.take(), Some((1, ADDRESS)));
        assert_eq!(leaving.due(), Some(begun));
        let deleted = begun + Duration::from_millis(30);
        leaving.deleted(deleted);
        assert_eq!(leaving.due(), Some(deleted));
        assert!(leaving.has(2) && !leaving.has(1));
        let remote = (std::net::Ipv4Addr::LOCALHOST, 6786).into();
        let new = PeerSpec { id: 3, tx_id: None, address: ADDRESS, remote };
        assert_eq!(leaving.make_way_for(&new), [(2, ADDRESS)]);
        assert_eq!(leaving.due(), None);
    }
}
