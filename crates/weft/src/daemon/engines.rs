//! Both engines behind the seam: which command goes to which, and in which order a peer moves from
//! one to the other.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use tokio::sync::{mpsc, watch};
use weft_crypto::{Format, PeerId};
use weft_engine::Engine;
use weft_kernel::engine::{KernelEngine, Support};
use weft_path::{EngineCommand, EngineEvent, EngineKind, EngineOffer, PathId, Reason};

use super::control::VNI;
use super::ports::RemoteMacs;
use crate::config::{EngineChoice, FormatChoice, Settings};

/// The engines of this host.
pub(super) struct Engines {
    vector: Arc<Engine>,
    kernel: KernelEngine,
    support: watch::Receiver<Support>,
    /// What the engines report.
    events: mpsc::Sender<EngineEvent>,
    /// Paths and inbound SAs that the kernel engine has.
    kernel_paths: BTreeMap<PathId, PeerId>,
    kernel_spis: BTreeSet<u32>,
    /// Peers to which the vector engine sends broadcast frames.
    broadcast: BTreeSet<PeerId>,
    /// Where direct ports send past the switch.
    macs: RemoteMacs,
    /// Commands that the kernel engine has not been given yet.
    waiting: Vec<EngineCommand>,
}

impl Engines {
    pub(super) fn new(
        vector: Arc<Engine>,
        kernel: KernelEngine,
        events: mpsc::Sender<EngineEvent>,
        macs: RemoteMacs,
    ) -> Self {
        Self {
            vector,
            support: kernel.support(),
            kernel,
            events,
            kernel_paths: BTreeMap::new(),
            kernel_spis: BTreeSet::new(),
            broadcast: BTreeSet::new(),
            macs,
            waiting: Vec::new(),
        }
    }

    /// Waits until the kernel engine can do more or less than before.
    pub(super) async fn support_changed(&mut self) {
        if self.support.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// What this host offers its peers now, and why not the rest.
    pub(super) fn offers(&mut self, settings: &Settings) -> Offers {
        offers(settings, &self.support.borrow_and_update())
    }

    pub(super) fn vector(&self) -> &Engine {
        &self.vector
    }

    pub(super) fn kernel(&self) -> &KernelEngine {
        &self.kernel
    }

    /// Carries a command out on the engines that it concerns. Those of the kernel engine are done
    /// after [`Self::flush`].
    pub(super) async fn command(&mut self, command: EngineCommand) {
        match command {
            EngineCommand::InstallInbound {
                engine: EngineKind::Kernel,
                peer,
                path,
                ref sa,
                ..
            } => {
                self.kernel_paths.insert(path, peer);
                self.kernel_spis.insert(sa.spi);
                self.waiting.push(command);
            }
            EngineCommand::InstallOutbound { engine: EngineKind::Kernel, peer, path, .. }
            | EngineCommand::InstallPlain { peer, path, .. } => {
                self.kernel_paths.insert(path, peer);
                self.waiting.push(command);
            }
            EngineCommand::RemoveInbound { spi } if self.kernel_spis.remove(&spi) => {
                self.waiting.push(command);
            }
            EngineCommand::RemoveOutbound { path }
            | EngineCommand::SetPathMtu { path, .. }
            | EngineCommand::SendProbe { path, .. }
            | EngineCommand::SendKeepalive { path }
                if self.kernel_paths.contains_key(&path) =>
            {
                self.waiting.push(command);
            }
            EngineCommand::BindPath { peer, path } => self.bind(peer, path).await,
            EngineCommand::SetEndpoints { ref add, ref remove, .. } => {
                self.waiting.push(command.clone());
                self.macs.remove(remove);
                self.tell_vector(command.clone());
                self.macs.add(add);
            }
            EngineCommand::RemovePeer { peer } => {
                self.kernel_paths.retain(|_, of| *of != peer);
                self.waiting.push(command.clone());
                self.set_broadcast(peer, false);
                self.macs.forget(peer);
                self.tell_vector(command);
            }
            command => self.tell_vector(command),
        }
    }

    /// The kernel engine carries out what it was given: before messages are sent that rely on it.
    pub(super) async fn flush(&mut self) {
        if !self.waiting.is_empty() {
            self.kernel.apply(std::mem::take(&mut self.waiting)).await;
        }
    }

    /// Moves a peer. The engine that it goes to is ready before frames are led there, and the other
    /// one still sends what it has taken.
    async fn bind(&mut self, peer: PeerId, path: Option<PathId>) {
        let command = EngineCommand::BindPath { peer, path };
        let to_kernel = path.is_some_and(|path| self.kernel_paths.contains_key(&path));
        if to_kernel {
            self.waiting.push(command);
            self.flush().await;
            self.macs.carry(peer, false);
            self.set_broadcast(peer, false);
        } else {
            self.tell_vector(command.clone());
            self.set_broadcast(peer, path.is_some());
            self.macs.carry(peer, path.is_some());
            self.waiting.push(command);
            self.flush().await;
        }
    }

    fn set_broadcast(&mut self, peer: PeerId, wanted: bool) {
        let changed =
            if wanted { self.broadcast.insert(peer) } else { self.broadcast.remove(&peer) };
        if changed {
            let peers = self.broadcast.iter().copied().collect();
            self.tell_vector(EngineCommand::SetBroadcast { vni: VNI, peers });
        }
    }

    fn tell_vector(&self, command: EngineCommand) {
        if let Err(error) = self.vector.command(command) {
            let engine = EngineKind::Userspace;
            let event = EngineEvent::EngineFailed { engine, reason: error.to_string() };
            // A full queue holds events enough of the same failure.
            let _ = self.events.try_send(event);
        }
    }
}

/// What a host offers its peers, and why not the rest.
pub(super) struct Offers {
    pub(super) engines: Vec<EngineOffer>,
    pub(super) missing: Vec<(EngineKind, Reason)>,
}

/// The offers that follow from the configuration and from what the kernel can do.
pub(super) fn offers(settings: &Settings, support: &Support) -> Offers {
    let (mut engines, mut missing) = (Vec::new(), Vec::new());
    match kernel_offers(settings, support) {
        Ok(offers) => engines.extend(offers),
        Err(reason) => missing.push((EngineKind::Kernel, reason)),
    }
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
            // One port for both: the first word of a packet says which SA it is of.
            port: settings.data_port,
            // A lane for each worker.
            lanes_max: u16::try_from(settings.workers).unwrap_or(u16::MAX),
            rco: true,
            ciphers: settings.ciphers.clone(),
        }));
    }
    Offers { engines, missing }
}

fn kernel_offers(settings: &Settings, support: &Support) -> Result<Vec<EngineOffer>, Reason> {
    let (esp, lanes_max) = match support {
        Support::Ready { esp, lanes_max } => (esp, *lanes_max),
        Support::Forbidden => return Err(Reason::Forced),
        Support::NoVxlan => return Err(Reason::KernelWithoutVxlan),
        Support::NoNft => return Err(Reason::NftMissing),
        Support::NoEsp(_) => return Err(Reason::KernelWithoutEsp),
        Support::NoCipher => return Err(Reason::CipherMissing),
        Support::NoGuard(reason) | Support::Failed(reason) => {
            return Err(Reason::EngineError(reason.clone()));
        }
    };
    let offer = |format, ciphers: &[_]| EngineOffer {
        kind: EngineKind::Kernel,
        format,
        port: weft_kernel::engine::ENCAPSULATION_PORT,
        lanes_max,
        // Its VXLAN devices take the marks, and the checksum stays partial up to the container
        // (`vm_matrix`).
        rco: true,
        ciphers: ciphers.to_vec(),
    };
    let wanted = |cipher: &&_| settings.ciphers.contains(*cipher);
    let esp = esp.as_ref().map_err(|_| Reason::KernelWithoutEsp);
    let esp: Result<Vec<_>, _> = esp.map(|esp| esp.iter().filter(wanted).copied().collect());
    match esp.and_then(|it| if it.is_empty() { Err(Reason::CipherMissing) } else { Ok(it) }) {
        Ok(ciphers) => Ok(vec![offer(Format::Esp, &ciphers)]),
        // Trusted peers need no ESP.
        Err(_) if !settings.trusted_subnets.is_empty() => Ok(vec![offer(Format::Plain, &[])]),
        Err(reason) => Err(reason),
    }
}
