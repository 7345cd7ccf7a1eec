//! Events of the data channel's device: notices, counters near a limit, and changes by other programs.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr};
use std::time::{Duration, Instant};

use weft_openvpn::device::{DeletionReason, Notice, Notification, PeerState, Slot};
use weft_path::EngineEvent;

use super::device::is_gone;
use crate::engine::action::Action;
use crate::engine::sa::{SaOf, Way};
use crate::engine::worker::Worker;
use crate::ovpn::DATA_CHANNEL_DEVICE;
use crate::ovpn::{OvpnError, OvpnWatch, Refusal, Watched};
use crate::xfrm::{StateId, StateUsage};

/// Interval of readings of the device's counters while the engine sends by it, in milliseconds. The device
/// itself has no limits.
const READING_MS: u64 = 2_000;
const REMOVED: &str = "the data channel's device was removed by another program";

impl Worker {
    pub(in crate::engine) async fn handle_channel(&mut self, event: Result<Watched, OvpnError>) {
        match event {
            Ok(Watched::Notice(notice)) => self.handle_notice(&notice).await,
            Ok(Watched::Lost) => {
                self.counters.channel.notices_lost += 1;
                self.channel.notices_lost = true;
            }
            Err(error) => {
                tracing::warn!(%error, "cannot watch the data channel; opening the watch again");
                let watch = match OvpnWatch::open().await {
                    Ok(watch) => watch,
                    Err(error) => {
                        self.remove_channel_device().await;
                        return self.lose_channel(&error.to_string());
                    }
                };
                if let Some(open) = &mut self.channel.open {
                    open.watch = watch;
                }
                self.channel.notices_lost = true;
            }
        }
    }

    /// A device of this name was removed, or renamed: perhaps one before this.
    pub(in crate::engine) async fn handle_channel_removed(&mut self) {
        let Some(index) = self.channel.open.as_ref().map(|open| open.index) else { return };
        let found = self.kernel.ovpn_device(DATA_CHANNEL_DEVICE).await;
        if matches!(found, Ok(Some(device)) if device.index == index) {
            return;
        }
        // Under another name it would still have the sockets.
        if let Err(error) = self.kernel.remove_ovpn_device_by_index(index).await {
            tracing::warn!(%error, "cannot remove the data channel's device");
        }
        self.lose_channel(REMOVED);
    }

    /// When the next reading of counters is due, which also makes up for lost notices. The interval limits
    /// readings for a peer that floats with each packet.
    pub(in crate::engine) fn reading_due(&self) -> Option<Instant> {
        let wanted = self.state.channel.has_senders() || self.channel.notices_lost;
        (self.channel.is_open() && wanted).then_some(self.next_reading)
    }

    /// Reads the counters of all peers and acts on them.
    pub(in crate::engine) async fn read_channel(&mut self) {
        self.next_reading = Instant::now() + Duration::from_millis(READING_MS);
        if let Some(found) = self.channel_peers().await {
            self.take_reading(&found).await;
        }
        if std::mem::take(&mut self.channel.notices_lost) {
            self.make_up_for_notices().await;
        }
    }

    /// Compares the device with its wanted state. A missing peer cannot be restored, since its packet ids
    /// would begin again; its path is replaced.
    pub(in crate::engine) async fn reconcile_channel(&mut self) {
        if !self.channel.is_open() {
            return;
        }
        if let Err(error) = self.kernel.ensure_tunnel(&self.tunnel()).await {
            tracing::warn!(%error, "cannot restore the data channel's device");
        }
        let Some(found) = self.channel_peers().await else { return };
        self.take_reading(&found).await;
        let Some(open) = &self.channel.open else { return };
        let mut surplus = self.state.channel.surplus(&found);
        surplus.retain(|id| !open.leaving.has(*id));
        self.counters.channel.peers_surplus += surplus.len() as u64;
        for id in surplus {
            match open.client.delete_peer(open.index, id).await {
                Err(error) if !is_gone(&error) => {
                    tracing::warn!(%error, "cannot remove an unknown peer from the data channel");
                }
                _ => {}
            }
        }
    }

    /// Reads the peers' traffic for the ledger.
    pub(in crate::engine) async fn note_channel_traffic(&mut self) {
        let seen = self.ledger.seen().filter(|(id, _)| is_channels(id));
        let mut sas: BTreeMap<StateId, SaOf> = seen.collect();
        sas.extend(self.state.channel.sas());
        if sas.is_empty() {
            return;
        }
        let found = match self.channel.is_open() {
            true => self.channel_peers().await,
            false => Some(Vec::new()),
        };
        let Some(found) = found else { return };
        let found: BTreeMap<u32, &PeerState> = found.iter().map(|peer| (peer.id, peer)).collect();
        for (id, of) in sas {
            let address = |peer: &PeerState| peer.vpn_ipv6.map(IpAddr::V6);
            let its = found.get(&id.spi).filter(|peer| address(peer) == Some(id.destination));
            self.ledger.note(id, of, its.map(|peer| usage(peer, of.1)));
        }
    }

    /// Reads the traffic of a peer that is about to go, if traffic was ever requested. Another peer may get
    /// its id at once.
    pub(super) async fn read_last_of_channel(&mut self, id: u32, address: Ipv6Addr) {
        let sa = StateId { destination: address.into(), spi: id };
        let Some(of) = self.ledger.of(&sa) else { return };
        if let Some(open) = &self.channel.open {
            match open.client.peer(open.index, id).await {
                Ok(state) => self.ledger.note(sa, of, Some(usage(&state, of.1))),
                Err(error) => tracing::debug!(%error, "cannot read a peer's counters"),
            }
        }
        self.ledger.note(sa, of, None);
    }
}

impl Worker {
    async fn handle_notice(&mut self, notice: &Notice) {
        if self.channel.open.as_ref().is_none_or(|open| open.index != notice.device) {
            return;
        }
        let event = match notice.what {
            Notification::PeerDeleted { peer_id, reason } => {
                return self.handle_deletion(peer_id, reason).await;
            }
            Notification::KeySwap { peer_id, key_id } => {
                self.state.channel.key_gone(peer_id, key_id)
            }
            Notification::PeerFloat { peer_id, remote } => {
                self.counters.channel.floats += 1;
                self.state.channel.floated(peer_id, remote)
            }
        };
        event.into_iter().for_each(|event| (self.events)(event));
    }

    /// A peer was deleted: by this engine, which does not know it any more; or it is lost. The notice
    /// may be late, and the id another's by now.
    async fn handle_deletion(&mut self, id: u32, reason: DeletionReason) {
        let Some(open) = self.channel.open.as_ref().filter(|_| self.state.channel.has_id(id))
        else {
            return;
        };
        match open.client.peer(open.index, id).await {
            Err(error) if is_gone(&error) => {}
            _ => return,
        }
        if let Some(path) = self.state.channel.peer_gone(id) {
            self.counters.channel.peers_lost += 1;
            let reason = reason.name();
            self.path_failed(path, &format!("its peer in the data channel is gone: {reason}"));
        }
    }

    /// After lost notices and a reading: recovers the other changes that they reported.
    async fn make_up_for_notices(&mut self) {
        let senders: Vec<(u32, u32)> = self.state.channel.sender_keys().collect();
        for (id, key) in senders {
            let Some(open) = &self.channel.open else { return };
            let found = open.client.key(open.index, id, Slot::Primary).await;
            if matches!(&found, Err(error) if error.refusal() == Some(Refusal::Absent)) {
                let event = self.state.channel.key_gone(id, key);
                event.into_iter().for_each(|event| (self.events)(event));
            }
        }
    }

    /// All peers of the device; it is lost if it is not there.
    async fn channel_peers(&mut self) -> Option<Vec<PeerState>> {
        let open = self.channel.open.as_ref()?;
        match open.client.peers(open.index).await {
            Ok(found) => Some(found),
            Err(error) if error.refusal() == Some(Refusal::NoDevice) => {
                self.lose_channel(REMOVED);
                None
            }
            Err(error) => {
                self.counters.channel.readings_failed += 1;
                tracing::warn!(%error, "cannot list the data channel's peers");
                None
            }
        }
    }

    async fn take_reading(&mut self, found: &[PeerState]) {
        let mut actions = self.state.channel.read(found);
        let is_failure =
            |action: &&Action| matches!(action, Action::Tell(EngineEvent::PathFailed { .. }));
        self.counters.channel.peers_lost += actions.iter().filter(is_failure).count() as u64;
        self.carry_out(&mut actions).await;
    }

    /// The next command that needs the device makes it again.
    fn lose_channel(&mut self, reason: &str) {
        self.channel.open = None;
        self.counters.channel.devices_lost += 1;
        for path in self.state.channel.lost() {
            self.path_failed(path, reason);
        }
    }
}

/// Whether this names a peer of the data channel, and no IPsec state.
pub(in crate::engine) fn is_channels(id: &StateId) -> bool {
    is_tunnel(id.destination)
}

/// Whether this is an address of some host's inside the data channel.
pub(in crate::engine) fn is_tunnel(address: IpAddr) -> bool {
    let (prefix, bits) = weft_crypto::TUNNEL_PREFIX;
    let high = |address: Ipv6Addr| address.to_bits() >> (128 - u32::from(bits));
    matches!(address, IpAddr::V6(address) if high(address) == high(prefix))
}

/// Packets and bytes that a receiver has opened (except keepalives) or a sender has sealed.
fn usage(state: &PeerState, way: Way) -> StateUsage {
    let (packets, bytes) = match way {
        Way::In => (state.vpn.rx_packets, state.vpn.rx_bytes),
        // On the inside a super-packet is one.
        Way::Out => (state.link.tx_packets, state.vpn.tx_bytes),
    };
    StateUsage { packets, bytes, ..StateUsage::default() }
}

#[cfg(test)]
mod tests {
    use weft_crypto::{PeerId, TunnelEnd, TunnelWay};
    use weft_openvpn::device::Traffic;

    use super::*;
    use crate::engine::ledger::Ledger;

    const PEER: PeerId = PeerId::from_bytes([7; 32]);

    #[test]
    fn tunnel_addresses_name_peers_and_others_name_states() {
        let name = |destination| is_channels(&StateId { destination, spi: 1 });
        for way in [TunnelWay::From, TunnelWay::To] {
            for kernel in [false, true] {
                assert!(name(PEER.tunnel_address(TunnelEnd { way, kernel }).into()));
            }
        }
        assert!(!name(Ipv6Addr::new(0xfd77, 0x6566, 0x7500, 0, 0, 0, 0, 1).into()));
        assert!(!name(Ipv6Addr::LOCALHOST.into()));
        assert!(!name(IpAddr::V4(std::net::Ipv4Addr::LOCALHOST)));
    }

    #[test]
    fn traffic_of_receivers_and_senders_is_in_the_ledger() {
        let mut ledger = Ledger::default();
        let link = Traffic { rx_packets: 12, rx_bytes: 1_500, tx_packets: 40, tx_bytes: 5_000 };
        let vpn = Traffic { rx_packets: 10, rx_bytes: 1_000, tx_packets: 2, tx_bytes: 4_000 };
        let state = PeerState { id: 255, link, vpn, ..PeerState::default() };
        let ends = [(Way::In, TunnelWay::From, 1), (Way::Out, TunnelWay::To, 255)];
        for (way, end, spi) in ends {
            let destination = PEER.tunnel_address(TunnelEnd { way: end, kernel: true }).into();
            ledger.note(StateId { destination, spi }, (PEER, way), Some(usage(&state, way)));
        }
        assert!(ledger.seen().all(|(id, _)| is_channels(&id)));
        let sums = ledger.sums(|_| true);
        let of = |carried: crate::engine::Carried| (carried.packets, carried.bytes);
        assert_eq!((of(sums[0].1.received), of(sums[0].1.sent)), ((10, 1_000), (40, 4_000)));
    }
}
