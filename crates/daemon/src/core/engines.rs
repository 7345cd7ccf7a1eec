//! Both engines behind the engine API: routes commands to them, and orders the steps when a peer moves from
//! one to the other.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use weft_crypto::{Cipher, Format, PeerId};
use weft_engine::{Engine, EngineError};
use weft_kernel::engine::{DATA_CHANNEL_PORT, ENCAPSULATION_PORT, KernelEngine, Support};
use weft_path::{
    Endpoint, EngineCommand, EngineEvent, EngineKind, EngineOffer, PathId, Reason, Vni,
};

use super::events::Reporter;
use super::kernel_queue::{Held, KernelQueue, Queued};
use super::remote_macs::RemoteMacs;
use crate::config::{EngineChoice, FormatChoice, Settings};

/// The engines of this host.
pub(crate) struct Engines {
    vector: Arc<Engine>,
    kernel: KernelQueue<KernelEngine>,
    support: watch::Receiver<Support>,
    /// Receives the engines' events.
    events: Reporter,
    /// Paths that the kernel engine sends on, and its inbound SAs, with their peers.
    kernel_paths: BTreeMap<PathId, PeerId>,
    kernel_spis: BTreeMap<u32, PeerId>,
    /// Paths that the vector engine sends on.
    vector_paths: BTreeMap<PathId, PeerId>,
    /// Peers to which the vector engine sends broadcast frames.
    broadcast: BTreeSet<PeerId>,
    /// The networks besides `weft` that both engines carry, and the peers that share each.
    networks: BTreeMap<Vni, BTreeSet<PeerId>>,
    /// Peers' MACs for direct ports and shortcuts, which bypass the switch.
    macs: RemoteMacs,
    /// Whether it was reported since the last [`Self::flush`] that the kernel engine is stuck.
    stuck: bool,
}

/// The result of [`Engines::changed`].
#[derive(Clone, Copy)]
pub(crate) enum EnginesChange {
    /// The kernel engine can do more or less than before.
    Support,
    /// The kernel engine has carried out its batch: call [`Engines::release`].
    CarriedOut,
}

/// A message for a peer that was held back.
pub(crate) enum Released {
    Path(weft_path::Message),
    Mesh(weft_mesh::Message),
}

impl Engines {
    pub(crate) fn new(
        vector: Arc<Engine>,
        kernel: KernelEngine,
        events: Reporter,
        macs: RemoteMacs,
    ) -> Self {
        Self {
            vector,
            support: kernel.support(),
            kernel: KernelQueue::new(kernel),
            events,
            kernel_paths: BTreeMap::new(),
            kernel_spis: BTreeMap::new(),
            vector_paths: BTreeMap::new(),
            broadcast: BTreeSet::new(),
            networks: BTreeMap::new(),
            macs,
            stuck: false,
        }
    }

    /// Waits for news of the kernel engine. Cancel safe.
    pub(crate) async fn changed(&mut self) -> EnginesChange {
        tokio::select! {
            Ok(()) = self.support.changed() => EnginesChange::Support,
            () = self.kernel.batch_done() => EnginesChange::CarriedOut,
        }
    }

    /// The offers of this host to its peers now, and reasons for the missing ones.
    pub(crate) fn offers(&mut self, settings: &Settings) -> Offers {
        offers(settings, &self.support.borrow_and_update())
    }

    pub(crate) fn vector(&self) -> &Engine {
        &self.vector
    }

    pub(crate) const fn kernel(&self) -> &KernelEngine {
        self.kernel.engine()
    }

    /// How long the kernel engine has been busy with its last batch.
    pub(crate) fn kernel_busy(&self) -> Option<Duration> {
        self.kernel.busy()
    }

    /// Passes a command to the engines it concerns. Commands for the kernel engine wait for [`Self::flush`].
    pub(crate) fn command(&mut self, command: EngineCommand) {
        match command {
            EngineCommand::InstallInbound { engine: EngineKind::Kernel, peer, ref sa, .. } => {
                self.kernel_spis.insert(sa.spi, peer);
                self.tell_kernel(Some(peer), command);
            }
            EngineCommand::InstallOutbound { engine: EngineKind::Kernel, peer, path, .. }
            | EngineCommand::InstallPlain { peer, path, .. } => {
                self.kernel_paths.insert(path, peer);
                self.tell_kernel(Some(peer), command);
            }
            EngineCommand::InstallOutbound { peer, path, .. } => {
                self.stay_with_vector_on(peer, path);
                self.vector_paths.insert(path, peer);
                self.tell_vector(command);
            }
            EngineCommand::RemoveInbound { spi } => match self.kernel_spis.remove(&spi) {
                peer @ Some(_) => self.tell_kernel(peer, command),
                None => self.tell_vector(command),
            },
            EngineCommand::RemoveOutbound { path } => match self.kernel_paths.remove(&path) {
                peer @ Some(_) => self.tell_kernel(peer, command),
                None => self.remove_vector_path(path),
            },
            EngineCommand::SetPathMtu { path, .. }
            | EngineCommand::SetRemote { path, .. }
            | EngineCommand::SendProbe { path, .. }
            | EngineCommand::SendKeepalive { path } => {
                match self.kernel_paths.get(&path).copied() {
                    peer @ Some(_) => self.tell_kernel(peer, command),
                    None => self.tell_vector(command),
                }
            }
            EngineCommand::BindPath { peer, path } => self.bind(peer, path),
            // They are told everything once they carry the network.
            EngineCommand::SetEndpoints { vni, .. } if !self.carries(vni) => {}
            EngineCommand::SetEndpoints { vni, .. } if vni != Vni::WEFT => {
                self.tell_kernel(None, command.clone());
                self.tell_vector(command);
            }
            EngineCommand::SetEndpoints { ref add, ref remove, .. } => {
                self.tell_kernel(None, command.clone());
                self.macs.remove(remove);
                self.tell_vector(command.clone());
                self.macs.add(add);
            }
            EngineCommand::SetSource { peer, .. } => {
                self.tell_kernel(Some(peer), command.clone());
                self.tell_vector(command);
            }
            EngineCommand::RemovePeer { peer } => {
                self.kernel_paths.retain(|_, of| *of != peer);
                self.vector_paths.retain(|_, of| *of != peer);
                self.kernel.stay_with_vector(peer);
                self.kernel.forget_messages(peer);
                self.tell_kernel(Some(peer), command.clone());
                self.set_broadcast(peer, false);
                self.macs.forget(peer);
                self.tell_vector(command);
            }
            command => self.tell_vector(command),
        }
    }

    /// Both engines carry a network from now on, with these endpoints on other hosts. Its group frames go to these
    /// peers.
    pub(crate) fn carry_network(
        &mut self,
        vni: Vni,
        peers: Vec<PeerId>,
        add: Vec<(Endpoint, PeerId)>,
    ) {
        self.networks.insert(vni, BTreeSet::new());
        self.command(EngineCommand::SetEndpoints { vni, add, remove: Vec::new() });
        self.set_network_peers(vni, peers);
    }

    /// Sets the peers that share a network, if the engines carry it.
    pub(crate) fn set_network_peers(&mut self, vni: Vni, peers: Vec<PeerId>) {
        let Some(known) = self.networks.get_mut(&vni) else { return };
        *known = peers.iter().copied().collect();
        self.tell_kernel(None, EngineCommand::SetBroadcast { vni, peers });
        self.tell_broadcast(vni);
    }

    /// The engines are about to leave a network.
    pub(crate) fn end_network(&mut self, vni: Vni) {
        self.networks.remove(&vni);
    }

    fn carries(&self, vni: Vni) -> bool {
        vni == Vni::WEFT || self.networks.contains_key(&vni)
    }

    /// Starts the next batch of the kernel engine, unless one is under way.
    pub(crate) fn flush(&mut self) {
        self.stuck = false;
        self.kernel.start();
    }

    /// Returns a message for a peer if it may go now. Otherwise [`Self::release`] returns it once the kernel
    /// engine has carried out the commands it may rely on.
    pub(crate) fn hold_message(
        &mut self,
        peer: PeerId,
        message: weft_path::Message,
    ) -> Option<weft_path::Message> {
        // A path that works does not wait for another that is being made.
        if matches!(message, weft_path::Message::ProbeAnswer(_) | weft_path::Message::Unheard(_)) {
            return Some(message);
        }
        match self.kernel.hold(peer, Held::Message(message))? {
            Held::Message(message) => Some(message),
            Held::Reply(_) | Held::LeaveVector | Held::RemoveOutbound(_) => None,
        }
    }

    /// The same for a reply to a peer's barrier: the engine that takes the peer's frames must know its endpoints.
    pub(crate) fn hold_reply(
        &mut self,
        peer: PeerId,
        message: weft_mesh::Message,
    ) -> Option<weft_mesh::Message> {
        let mut by_kernel = self.kernel_paths.values().chain(self.kernel_spis.values());
        if !by_kernel.any(|of| *of == peer) {
            return Some(message);
        }
        match self.kernel.hold(peer, Held::Reply(message))? {
            Held::Reply(message) => Some(message),
            Held::Message(_) | Held::LeaveVector | Held::RemoveOutbound(_) => None,
        }
    }

    /// Runs held steps whose time has come, up to the next message that may go.
    pub(crate) fn release(&mut self) -> Option<(PeerId, Released)> {
        while let Some((peer, step)) = self.kernel.release() {
            match step {
                Held::Message(message) => return Some((peer, Released::Path(message))),
                Held::Reply(message) => return Some((peer, Released::Mesh(message))),
                Held::LeaveVector => self.leave_vector(peer),
                Held::RemoveOutbound(path) => self.remove_outbound(path),
            }
        }
        None
    }

    /// Drops the messages held back for a peer's link.
    pub(crate) fn forget_messages(&mut self, peer: PeerId) {
        self.kernel.forget_messages(peer);
    }

    /// Moves a peer. The new engine is ready before it gets frames, and the other one still sends the packets
    /// it has taken.
    fn bind(&mut self, peer: PeerId, path: Option<PathId>) {
        let command = EngineCommand::BindPath { peer, path };
        let to_kernel = path.is_some_and(|path| self.kernel_paths.contains_key(&path));
        if to_kernel {
            self.tell_kernel(Some(peer), command);
            if self.kernel.hold(peer, Held::LeaveVector).is_some() {
                self.leave_vector(peer);
            }
        } else {
            let removed = self.kernel.stay_with_vector(peer);
            self.tell_vector(command.clone());
            removed.into_iter().for_each(|path| self.remove_outbound(path));
            self.set_broadcast(peer, path.is_some());
            self.macs.carry(peer, path.is_some());
            self.tell_kernel(Some(peer), command);
        }
    }

    fn leave_vector(&mut self, peer: PeerId) {
        self.macs.carry(peer, false);
        self.set_broadcast(peer, false);
    }

    /// The vector engine sends on a path until the kernel engine has taken its peer over.
    fn remove_vector_path(&mut self, path: PathId) {
        let leaving = self.vector_paths.get(&path).copied();
        let leaving = leaving.filter(|peer| self.kernel.is_leaving_vector(*peer));
        let held = leaving.map(|peer| self.kernel.hold(peer, Held::RemoveOutbound(path)));
        if !matches!(held, Some(None)) {
            self.remove_outbound(path);
        }
    }

    fn remove_outbound(&mut self, path: PathId) {
        self.vector_paths.remove(&path);
        self.tell_vector(EngineCommand::RemoveOutbound { path });
    }

    /// A path is installed again while its removal is held back.
    fn stay_with_vector_on(&mut self, peer: PeerId, path: PathId) {
        if self.kernel.take_removal(peer, path) {
            self.remove_outbound(path);
        }
    }

    fn set_broadcast(&mut self, peer: PeerId, wanted: bool) {
        let changed =
            if wanted { self.broadcast.insert(peer) } else { self.broadcast.remove(&peer) };
        if !changed {
            return;
        }
        let shared = self.networks.iter().filter(|(_, peers)| peers.contains(&peer));
        let shared: Vec<Vni> = shared.map(|(vni, _)| *vni).collect();
        for vni in [Vni::WEFT].into_iter().chain(shared) {
            self.tell_broadcast(vni);
        }
    }

    /// Tells the vector engine who gets the group frames of a network from it.
    fn tell_broadcast(&self, vni: Vni) {
        let shares = |peer: &&PeerId| {
            vni == Vni::WEFT || self.networks.get(&vni).is_some_and(|all| all.contains(*peer))
        };
        let peers = self.broadcast.iter().filter(shares).copied().collect();
        self.tell_vector(EngineCommand::SetBroadcast { vni, peers });
    }

    fn tell_kernel(&mut self, peer: Option<PeerId>, command: EngineCommand) {
        let stuck = self.kernel.push(peer, command) == Queued::Stuck;
        if stuck && !self.stuck {
            self.stuck = true;
            let reason = "the kernel does not complete requests".to_owned();
            self.events.report(EngineEvent::EngineFailed { engine: EngineKind::Kernel, reason });
        }
    }

    fn tell_vector(&self, command: EngineCommand) {
        let network = further_network(&command);
        if let Err(error) = self.vector.command(command) {
            // Its devices may just have been lost. The engine itself goes on.
            if let Some(vni) = network {
                return tracing::warn!(%vni, %error, "the vector engine does not carry a network");
            }
            let event = match error {
                EngineError::Path { path, reason } => EngineEvent::PathFailed { path, reason },
                error => {
                    let engine = EngineKind::Userspace;
                    EngineEvent::EngineFailed { engine, reason: error.to_string() }
                }
            };
            self.events.report(event);
        }
    }
}

/// The network besides `weft` that a command is about.
const fn further_network(command: &EngineCommand) -> Option<Vni> {
    match command {
        EngineCommand::SetEndpoints { vni, .. } | EngineCommand::SetBroadcast { vni, .. }
            if vni.0 != Vni::WEFT.0 =>
        {
            Some(*vni)
        }
        _ => None,
    }
}

/// The offers of a host to its peers, and reasons for the missing ones.
pub(crate) struct Offers {
    pub(crate) engines: Vec<EngineOffer>,
    pub(crate) missing: Vec<(EngineKind, Reason)>,
}

/// The offers that follow from the configuration and the kernel's abilities.
pub(crate) fn offers(settings: &Settings, support: &Support) -> Offers {
    let (mut engines, mut missing) = (Vec::new(), Vec::new());
    let (offers, lacking) = kernel_offers(settings, support);
    engines.extend(offers);
    missing.extend(lacking.map(|reason| (EngineKind::Kernel, reason)));
    if settings.engine == EngineChoice::Kernel {
        missing.push((EngineKind::Userspace, Reason::Forced));
    } else {
        let formats: &[Format] = match settings.format {
            FormatChoice::Auto => &[Format::Esp, Format::Ovpn],
            FormatChoice::Esp => &[Format::Esp],
            FormatChoice::Ovpn => &[Format::Ovpn],
        };
        engines.extend(formats.iter().map(|format| EngineOffer {
            kind: EngineKind::Userspace,
            format: *format,
            // One port for both: the first word of a packet tells which SA it belongs to.
            port: settings.data_port,
            // A lane for each worker.
            lanes_max: u16::try_from(settings.workers).unwrap_or(u16::MAX),
            rco: true,
            ciphers: settings.ciphers.clone(),
        }));
    }
    Offers { engines, missing }
}

/// The offers of the kernel engine, and the reason for a missing one. A missing `esp` is reported even if the
/// kernel has `ovpn`, since a peer may lack that.
fn kernel_offers(settings: &Settings, support: &Support) -> (Vec<EngineOffer>, Option<Reason>) {
    let (esp, ovpn, lanes_max) = match support {
        Support::Ready { esp, ovpn, lanes_max } => (esp, ovpn, *lanes_max),
        support => return (Vec::new(), Some(why_none(support))),
    };
    let offer = |format, port, lanes_max, ciphers| EngineOffer {
        kind: EngineKind::Kernel,
        format,
        port,
        lanes_max,
        // Its VXLAN devices take the marks, and the checksum stays partial up to the container
        // (`vm_matrix`).
        rco: true,
        ciphers,
    };
    let wanted = |had: &Result<Vec<Cipher>, Reason>| match had {
        Ok(ciphers) => {
            let both = ciphers.iter().filter(|cipher| settings.ciphers.contains(cipher));
            let both: Vec<Cipher> = both.copied().collect();
            if both.is_empty() { Err(Reason::CipherMissing) } else { Ok(both) }
        }
        Err(reason) => Err(reason.clone()),
    };
    let (esp, ovpn) = (wanted(esp), wanted(ovpn));
    let mut offers = Vec::new();
    let asked_for = if settings.format == FormatChoice::Ovpn { &ovpn } else { &esp };
    let lacking = asked_for.as_ref().err().cloned();
    match esp {
        Ok(ciphers) => offers.push(offer(Format::Esp, ENCAPSULATION_PORT, lanes_max, ciphers)),
        // Trusted peers need no ESP.
        Err(_) if !settings.trusted_subnets.is_empty() => {
            offers.push(offer(Format::Plain, ENCAPSULATION_PORT, lanes_max, Vec::new()));
        }
        Err(_) => {}
    }
    if let Ok(ciphers) = ovpn {
        // The device takes one key for each direction at a time.
        offers.push(offer(Format::Ovpn, DATA_CHANNEL_PORT, 1, ciphers));
    }
    (offers, lacking)
}

/// The reason why the kernel engine offers nothing.
fn why_none(support: &Support) -> Reason {
    match support {
        Support::Ready { .. } => Reason::NotOffered,
        Support::Forbidden => Reason::Forced,
        Support::NoVxlan => Reason::KernelWithoutVxlan,
        Support::Guarding => Reason::AwaitingGuard,
        Support::NoNft => Reason::NftMissing,
        Support::NoEsp(_) => Reason::KernelWithoutEsp,
        Support::NoOvpn(reason) => reason.clone(),
        Support::NoCipher => Reason::CipherMissing,
        Support::NoGuard(reason) | Support::Failed(reason) => Reason::EngineError(reason.clone()),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::path::Path;

    use super::*;
    use crate::config::LaunchOptions;

    fn settings(format: FormatChoice, trusted: &[&str]) -> Settings {
        let trusted_subnets = trusted.iter().map(|subnet| subnet.parse().unwrap()).collect();
        let options =
            LaunchOptions { format: Some(format), trusted_subnets, ..LaunchOptions::default() };
        options.settings(None, Path::new("/run/weft")).unwrap()
    }

    fn had(esp: bool, ovpn: bool) -> Support {
        let both = vec![Cipher::Aes256Gcm, Cipher::ChaCha20Poly1305];
        let of = |had: bool, why| if had { Ok(both.clone()) } else { Err(why) };
        let esp = of(esp, Reason::KernelWithoutEsp);
        Support::Ready { esp, ovpn: of(ovpn, Reason::KernelWithoutOvpn), lanes_max: 3 }
    }

    fn offered(
        settings: &Settings,
        support: &Support,
    ) -> (Vec<(Format, u16, u16)>, Option<Reason>) {
        let (offers, lacking) = kernel_offers(settings, support);
        let of = |offer: &EngineOffer| (offer.format, offer.port, offer.lanes_max);
        (offers.iter().map(of).collect(), lacking)
    }

    #[test]
    fn a_refusal_of_a_further_networks_command_is_no_failure_of_the_engine() {
        let endpoints =
            |vni| EngineCommand::SetEndpoints { vni, add: Vec::new(), remove: Vec::new() };
        let broadcast = |vni| EngineCommand::SetBroadcast { vni, peers: Vec::new() };
        for command in [endpoints(Vni(7)), broadcast(Vni(7))] {
            assert_eq!(further_network(&command), Some(Vni(7)));
        }
        for command in [endpoints(Vni::WEFT), broadcast(Vni::WEFT)] {
            assert_eq!(further_network(&command), None);
        }
        let keepalive = EngineCommand::SendKeepalive { path: PathId(1) };
        assert_eq!(further_network(&keepalive), None);
    }

    #[test]
    fn the_kernel_offers_what_it_has_of_what_was_asked_for() {
        let auto = settings(FormatChoice::Auto, &[]);
        let (esp, ovpn) = ((Format::Esp, 6785, 3), (Format::Ovpn, 6786, 1));
        assert_eq!(offered(&auto, &had(true, true)), (vec![esp, ovpn], None));
        assert_eq!(offered(&auto, &had(true, false)), (vec![esp], None));
        let without_esp = Some(Reason::KernelWithoutEsp);
        assert_eq!(offered(&auto, &had(false, true)), (vec![ovpn], without_esp.clone()));
        let trusting = settings(FormatChoice::Esp, &["192.0.2.0/24"]);
        let plain = (Format::Plain, 6785, 3);
        assert_eq!(offered(&trusting, &had(false, false)), (vec![plain], without_esp));
        let narrow = settings(FormatChoice::Ovpn, &[]);
        assert_eq!(offered(&narrow, &had(false, true)), (vec![ovpn], None));
        let none = Support::NoOvpn;
        let reasons = [Reason::KernelWithoutOvpn, Reason::EngineError("no IPv6".to_owned())];
        for reason in reasons {
            assert_eq!(offered(&narrow, &none(reason.clone())), (vec![], Some(reason)));
        }
    }
}
