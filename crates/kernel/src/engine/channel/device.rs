//! The data channel's device: found out about, made with the first path that needs it, changed, removed.

use std::collections::BTreeSet;
use std::fmt::Display;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::{Duration, Instant};

use rustix::io::retry_on_intr;
use rustix::rand::{GetRandomFlags, getrandom};
use weft_crypto::{Cipher, DataCipher, SaKey, TUNNEL_PREFIX, TunnelEnd, TunnelWay};
use weft_io::IoError;
use weft_io::encap::{EncapSocket, Taker};
use weft_openvpn::device::{
    KeyAttributes, KeyDirection, Mode, NONCE_TAIL_BYTES, PeerAttributes, Slot,
};
use weft_path::Reason;

use super::change::{Change, KeySpec, PeerSpec, key_id};
use super::open::{Leaving, Open};
use super::state::Sealed;
use crate::engine::sa::Way;
use crate::engine::worker::Worker;
use crate::error::KernelError;
use crate::net::tunnel::TunnelSpec;
use crate::ovpn::{
    DATA_CHANNEL_DEVICE, OvpnClient, OvpnDevice, OvpnDeviceSpec, OvpnError, OvpnWatch, Refusal,
};

/// The largest MTU of the device, in bytes. Containers' MTUs limit data packets, but a probe may be as long
/// as any path carries.
const MTU_BYTES: u32 = 65_535 - 84;
/// How long a trial's result stays valid, in milliseconds. Other programs notice each device that comes and
/// goes.
const TRIED_MS: u64 = 60_000;
/// The peer of the trial that finds out which ciphers the kernel supports. Nothing is sent to it: the device
/// is off, and the addresses are for documentation (RFC 5737, RFC 3849).
const TRIAL: PeerSpec = PeerSpec {
    id: 1,
    tx_id: Some(2),
    address: Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1),
    remote: SocketAddr::new(IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)), 6786),
};
/// An SPI of no SA.
const TRIAL_SPI: u32 = 0x4800_0001;
const NO_TX_IDS: &str = "kernel does not support transmit ids of ovpn peers: boot a newer one";
const HOST_FIXED: &str = "--host sets the source address, but probes leave from another";
const NO_IPV6: &str = "the host has no IPv6, which tunnel addresses need";
const NOT_RUNNING: &str = "the kernel engine is not running";
const NO_DEVICE: &str = "the data channel's device is gone";

impl Worker {
    /// AEADs with which the kernel moves format `ovpn` between hosts, or why it does not.
    pub(in crate::engine) async fn channel_support(&mut self) -> Result<Vec<Cipher>, Reason> {
        if !self.config.ovpn {
            return Err(Reason::Forced);
        }
        if self.config.host.is_some() {
            return Err(Reason::EngineError(HOST_FIXED.into()));
        }
        // To try again would take the device away from the paths that have it.
        let open = self.channel.is_open();
        let stands = |at: &Instant| open || at.elapsed() < Duration::from_millis(TRIED_MS);
        let tried = self.channel.tried.as_ref().filter(|(at, _)| stands(at));
        let ciphers = match tried.map(|(_, found)| found.clone()) {
            Some(found) => found,
            // A module that is loaded later is found as soon as an IPsec module would be.
            None => self.try_channel().await,
        }?;
        // With another format in use, this is not checked again. A path that needs the port reports the
        // failure and is tried again.
        if !self.config.esp {
            self.try_port().map_err(failed)?;
        }
        Ok(ciphers)
    }

    /// Finds out by trying, with a device that is never switched on.
    async fn try_channel(&mut self) -> Result<Vec<Cipher>, Reason> {
        let client = OvpnClient::open().await.map_err(|error| match error {
            OvpnError::Missing => Reason::KernelWithoutOvpn,
            error => failed(error),
        })?;
        let sockets = EncapSocket::bind(Taker::DataChannel, None, 0).map_err(failed)?;
        if !sockets.ipv6() {
            return Err(failed(NO_IPV6));
        }
        let device = self.make_device().await.map_err(failed)?;
        let found = try_peer(&client, device.index, &sockets).await.map_err(failed);
        self.remove_channel_device().await;
        self.channel.tried = Some((Instant::now(), found.clone()));
        found
    }

    /// Whether the port is free or already ours.
    fn try_port(&self) -> Result<(), IoError> {
        match self.channel.sockets {
            Some(_) => Ok(()),
            None => {
                EncapSocket::bind(Taker::DataChannel, None, self.config.data_channel_port).map(drop)
            }
        }
    }

    /// Applies changes in order. A refused change fails its path, and the path's later changes are skipped.
    pub(in crate::engine) async fn change_channel(&mut self, changes: Vec<Change>) {
        if changes.iter().any(|change| matches!(change, Change::NewPeer(..)))
            && let Err(reason) = self.open_channel().await
        {
            self.counters.channel.devices_refused += 1;
            let paths: BTreeSet<_> = changes.iter().filter_map(Change::path).collect();
            return paths.into_iter().for_each(|path| self.path_failed(path, &reason));
        }
        let mut failed = BTreeSet::new();
        for change in changes {
            let path = change.path();
            if path.is_some_and(|path| failed.contains(&path)) {
                continue;
            }
            let Err(reason) = self.change(change).await else { continue };
            match path {
                Some(path) => {
                    self.path_failed(path, &reason);
                    failed.insert(path);
                }
                None => {
                    tracing::warn!(%reason, "cannot remove everything from the data channel's device");
                }
            }
        }
    }

    async fn change(&mut self, change: Change) -> Result<(), String> {
        if let Change::NewPeer(_, spec) = &change {
            self.make_way_for(spec).await;
        }
        let (Some(open), Some(sockets)) = (&mut self.channel.open, &self.channel.sockets) else {
            // With the device went all that it had.
            return change.path().map_or(Ok(()), |_| Err(NO_DEVICE.into()));
        };
        let (client, device) = (&open.client, open.index);
        let counters = &mut self.counters.channel;
        match change {
            Change::NewPeer(_, spec) => {
                let Some(socket) = sockets.fd_for(spec.remote.ip()) else {
                    counters.peers_refused += 1;
                    return Err(format!("the host has no socket that reaches {}", spec.remote));
                };
                let made = client.new_peer(device, socket, &attributes(&spec)).await;
                match &made {
                    Ok(()) => counters.peers_made += 1,
                    Err(_) => counters.peers_refused += 1,
                }
                made.map_err(text)
            }
            Change::SetRemote(_, id, remote) => {
                let id = PeerAttributes { id: Some(id), ..PeerAttributes::default() };
                let set = client.set_peer(device, &at(id, remote)).await;
                counters.remotes_refused += u64::from(set.is_err());
                set.map_err(text)
            }
            Change::NewKey(path, key) => {
                let way = if key.way == Way::Out { "out" } else { "in" };
                self.keylog.note(way, key.spi, key.cipher, &key.key);
                // Packets sealed before the key is set count twice rather than not at all.
                let sealed = match key.way {
                    Way::Out => client.peer(device, key.peer).await.ok(),
                    Way::In => None,
                };
                let set = match key_attributes(&key) {
                    Ok(attributes) => client.new_key(device, &attributes).await.map_err(text),
                    Err(error) => Err(format!("no random bytes from the kernel: {error}")),
                };
                match &set {
                    Ok(()) => counters.keys_set += 1,
                    Err(_) => counters.keys_refused += 1,
                }
                if let Some(state) = sealed {
                    self.state.channel.key_began(path, key.spi, Sealed::of(&state));
                }
                set
            }
            Change::DeleteKey { id, slot } => {
                let deleted = unless_gone(client.delete_key(device, id, slot).await);
                counters.deletions_refused += u64::from(deleted.is_err());
                deleted
            }
            Change::DeletePeer { id, address } => {
                open.leaving.push(id, address);
                // Without keys it carries nothing any more.
                let (refused, deleted) =
                    empty_slots(|slot| open.client.delete_key(device, id, slot)).await;
                counters.deletions_refused += refused;
                deleted
            }
        }
    }

    /// Deletes peers that are leaving and have the id or the address of a new one.
    async fn make_way_for(&mut self, new: &PeerSpec) {
        let Some(open) = &mut self.channel.open else { return };
        for (id, address) in open.leaving.make_way_for(new) {
            self.delete_peer(id, address).await;
        }
    }

    /// Deletes the peer that has been leaving for longest.
    pub(in crate::engine) async fn delete_leaving_peer(&mut self) {
        let leaving = self.channel.open.as_mut().and_then(|open| open.leaving.take());
        if let Some((id, address)) = leaving {
            self.delete_peer(id, address).await;
        }
        if let Some(open) = &mut self.channel.open {
            open.leaving.deleted(Instant::now());
        }
    }

    async fn delete_peer(&mut self, id: u32, address: Ipv6Addr) {
        self.read_last_of_channel(id, address).await;
        let Some(open) = &self.channel.open else { return };
        if let Err(reason) = unless_gone(open.client.delete_peer(open.index, id).await) {
            self.counters.channel.deletions_refused += 1;
            tracing::warn!(%reason, "cannot remove a peer from the data channel's device");
        }
    }

    /// Makes the device, if it is not there.
    async fn open_channel(&mut self) -> Result<(), String> {
        if self.channel.is_open() {
            return Ok(());
        }
        // Nothing of the overlay may be there without the guard, which stays in place while IPsec is in use.
        let Some(ipsec) = &self.ipsec else { return Err(NOT_RUNNING.into()) };
        if self.channel.sockets.is_none() {
            let (host, port) = (self.config.host, self.config.data_channel_port);
            let sockets = EncapSocket::bind(Taker::DataChannel, host, port).map_err(text)?;
            self.channel.sockets = Some(sockets);
        }
        self.keep_sockets(&ipsec.encapsulation).await;
        match self.open_device().await {
            Ok(open) => {
                tracing::info!(device = DATA_CHANNEL_DEVICE, "the kernel's data channel is in use");
                self.channel.open = Some(open);
                self.counters.channel.devices_made += 1;
                Ok(())
            }
            Err(reason) => {
                self.remove_channel_device().await;
                Err(reason)
            }
        }
    }

    async fn open_device(&self) -> Result<Open, String> {
        let client = OvpnClient::open().await.map_err(text)?;
        // Before there is a peer that it could miss something of.
        let watch = OvpnWatch::open().await.map_err(text)?;
        let device = self.make_device().await.map_err(text)?;
        self.kernel.ensure_tunnel(&self.tunnel()).await.map_err(text)?;
        let leaving = Leaving::new(Instant::now());
        Ok(Open { index: device.index, client, watch, leaving })
    }

    async fn make_device(&self) -> Result<OvpnDevice, KernelError> {
        // Remove a device that an earlier attempt left.
        self.kernel.remove_device(DATA_CHANNEL_DEVICE).await?;
        let name = DATA_CHANNEL_DEVICE.to_owned();
        let spec = OvpnDeviceSpec { name, mode: Mode::Mp, own: true };
        self.kernel.create_ovpn_device(&spec).await
    }

    /// The tunnel configuration that the host needs for the device.
    pub(super) fn tunnel(&self) -> TunnelSpec {
        let end = |way| self.config.local.tunnel_address(TunnelEnd { way, kernel: true });
        TunnelSpec {
            device: DATA_CHANNEL_DEVICE.to_owned(),
            mtu: MTU_BYTES,
            source: end(TunnelWay::From),
            local: end(TunnelWay::To),
            // The kernel also looks up sources, and would take the gateway's address for one behind another
            // route.
            destination: TUNNEL_PREFIX,
        }
    }

    /// The device is not needed any more, and neither are its sockets. False if it is still there.
    pub(in crate::engine) async fn close_channel(&mut self) -> bool {
        let gone = self.remove_channel_device().await;
        self.state.channel.lost();
        self.channel.open = None;
        self.channel.sockets = None;
        gone
    }

    /// False if it is still there.
    pub(super) async fn remove_channel_device(&self) -> bool {
        let removed = self.kernel.remove_device(DATA_CHANNEL_DEVICE).await;
        if let Err(error) = &removed {
            tracing::warn!(%error, "cannot remove the data channel's device");
        }
        removed.is_ok()
    }
}

/// Makes a peer with an id for each way, and gives it a key of each cipher.
async fn try_peer(
    client: &OvpnClient,
    device: u32,
    sockets: &EncapSocket,
) -> Result<Vec<Cipher>, String> {
    let socket = sockets.fd_for(TRIAL.remote.ip()).ok_or("the host has no IPv4")?;
    match client.new_peer(device, socket, &attributes(&TRIAL)).await {
        // Of an attribute that it does not know.
        Err(error) if error.refusal() == Some(Refusal::Invalid) => return Err(NO_TX_IDS.into()),
        made => made.map_err(text)?,
    }
    if client.peer(device, TRIAL.id).await.map_err(text)?.tx_id != TRIAL.tx_id {
        return Err(NO_TX_IDS.into());
    }
    let (mut ciphers, mut refused) = (Vec::new(), None);
    for cipher in [Cipher::Aes256Gcm, Cipher::ChaCha20Poly1305] {
        let (slot, key) = (Slot::Primary, SaKey::for_ovpn([0; 40]));
        let key = KeySpec { peer: TRIAL.id, slot, way: Way::In, spi: TRIAL_SPI, cipher, key };
        match client.new_key(device, &key_attributes(&key).map_err(text)?).await {
            Ok(()) => ciphers.push(cipher),
            Err(error) => refused = Some(error.to_string()),
        }
    }
    match refused {
        Some(reason) if ciphers.is_empty() => Err(reason),
        _ => Ok(ciphers),
    }
}

fn attributes(spec: &PeerSpec) -> PeerAttributes {
    let attributes = PeerAttributes {
        id: Some(spec.id),
        tx_id: spec.tx_id,
        vpn_ipv6: Some(spec.address),
        ..PeerAttributes::default()
    };
    at(attributes, spec.remote)
}

fn at(mut attributes: PeerAttributes, remote: SocketAddr) -> PeerAttributes {
    attributes.remote_port = Some(remote.port());
    match remote.ip() {
        IpAddr::V4(ipv4) => attributes.remote_ipv4 = Some(ipv4),
        IpAddr::V6(ipv6) => attributes.remote_ipv6 = Some(ipv6),
    }
    attributes
}

/// The key of one direction. The other direction's key is random and discarded here.
fn key_attributes(key: &KeySpec) -> io::Result<KeyAttributes> {
    let used = KeyDirection {
        cipher_key: key.key.cipher_key().to_vec(),
        nonce_tail: *key.key.nonce_tail(),
    };
    let mut unused = KeyDirection {
        cipher_key: vec![0; used.cipher_key.len()],
        nonce_tail: [0; NONCE_TAIL_BYTES],
    };
    fill(&mut unused.cipher_key)?;
    fill(&mut unused.nonce_tail)?;
    let (encrypt, decrypt) = match key.way {
        Way::In => (unused, used),
        Way::Out => (used, unused),
    };
    Ok(KeyAttributes {
        peer_id: Some(key.peer),
        slot: Some(key.slot),
        key_id: Some(key_id(key.spi)),
        cipher: Some(DataCipher::from(key.cipher).into()),
        encrypt: Some(encrypt),
        decrypt: Some(decrypt),
    })
}

fn fill(room: &mut [u8]) -> io::Result<()> {
    let filled = retry_on_intr(|| getrandom(&mut *room, GetRandomFlags::empty()))?;
    // The kernel gives so few bytes at once.
    if filled < room.len() { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(()) }
}

/// Empties both slots of a peer, the second one even if the first is refused. Returns the number of refusals
/// and the first one's reason.
async fn empty_slots<F>(delete: impl Fn(Slot) -> F) -> (u64, Result<(), String>)
where
    F: Future<Output = Result<(), OvpnError>>,
{
    let (mut refused, mut deleted) = (0, Ok(()));
    for slot in [Slot::Primary, Slot::Secondary] {
        let of_slot = unless_gone(delete(slot).await);
        refused += u64::from(of_slot.is_err());
        deleted = deleted.and(of_slot);
    }
    (refused, deleted)
}

/// Treats an object that is already gone as deleted.
fn unless_gone(deleted: Result<(), OvpnError>) -> Result<(), String> {
    match deleted {
        Err(error) if is_gone(&error) => Ok(()),
        deleted => deleted.map_err(text),
    }
}

/// It, or the whole device, is not there.
pub(super) fn is_gone(error: &OvpnError) -> bool {
    matches!(error.refusal(), Some(Refusal::Absent | Refusal::NoDevice))
}

fn text(error: impl Display) -> String {
    error.to_string()
}

fn failed(error: impl Display) -> Reason {
    Reason::EngineError(error.to_string())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use rustix::io::Errno;
    use weft_openvpn::device::CipherAlgorithm;

    use super::*;

    fn spec(way: Way) -> KeySpec {
        let (slot, cipher) = (Slot::Secondary, Cipher::ChaCha20Poly1305);
        KeySpec { peer: 7, slot, way, spi: 0x4d00_0007, cipher, key: SaKey::for_ovpn([3; 40]) }
    }

    #[test]
    fn the_other_half_of_a_key_is_nobodys() {
        let known = KeyDirection { cipher_key: vec![3; 32], nonce_tail: [3; 8] };
        let mut others = Vec::new();
        for way in [Way::In, Way::Out, Way::In] {
            let key = key_attributes(&spec(way)).unwrap();
            assert_eq!(
                (key.peer_id, key.slot, key.key_id),
                (Some(7), Some(Slot::Secondary), Some(5))
            );
            assert_eq!(key.cipher, Some(CipherAlgorithm::ChaCha20Poly1305));
            let (encrypt, decrypt) = (key.encrypt.unwrap(), key.decrypt.unwrap());
            let (used, unused) = match way {
                Way::In => (decrypt, encrypt),
                Way::Out => (encrypt, decrypt),
            };
            assert!(used == known, "{way:?}");
            assert_eq!(unused.cipher_key.len(), 32);
            assert!(!others.contains(&unused) && unused != known, "{way:?}");
            others.push(unused);
        }
    }

    fn refusal(errno: Errno) -> OvpnError {
        OvpnError::Refused {
            doing: "delete a key".into(),
            refusal: match errno {
                Errno::NOENT => Refusal::Absent,
                _ => Refusal::Other,
            },
            errno: errno.raw_os_error(),
            reason: None,
        }
    }

    #[tokio::test]
    async fn the_second_slot_is_emptied_where_the_first_is_refused() {
        for (first, second, refused) in [
            (Ok(()), Err(Errno::NOENT), 0),
            (Err(Errno::NOENT), Ok(()), 0),
            (Err(Errno::NOMEM), Ok(()), 1),
            (Err(Errno::NOMEM), Err(Errno::NOENT), 1),
            (Ok(()), Err(Errno::NOMEM), 1),
            (Err(Errno::NOMEM), Err(Errno::NOMEM), 2),
        ] {
            let asked = std::cell::RefCell::new(Vec::new());
            let delete = |slot| {
                asked.borrow_mut().push(slot);
                let answer = if slot == Slot::Primary { first } else { second };
                std::future::ready(answer.map_err(refusal))
            };
            let (count, deleted) = empty_slots(delete).await;
            assert_eq!((count, deleted.is_err()), (refused, refused > 0), "{first:?}, {second:?}");
            assert_eq!(*asked.borrow(), [Slot::Primary, Slot::Secondary], "{first:?}");
        }
    }

    #[test]
    fn a_peer_is_said_with_its_address_of_either_family() {
        let six = PeerSpec { tx_id: None, remote: "[2001:db8::9]:5".parse().unwrap(), ..TRIAL };
        let six = attributes(&six);
        assert_eq!((six.tx_id, six.remote_ipv4, six.remote_port), (None, None, Some(5)));
        assert_eq!(six.remote_ipv6, Some("2001:db8::9".parse().unwrap()));
        let four = attributes(&TRIAL);
        assert_eq!((four.id, four.tx_id, four.remote_ipv6), (Some(1), Some(2), None));
        assert_eq!(four.remote_ipv4, Some(Ipv4Addr::new(192, 0, 2, 1)));
        assert_eq!((four.vpn_ipv6, four.vpn_ipv4), (Some(TRIAL.address), None));
    }
}
