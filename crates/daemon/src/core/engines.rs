//! Both engines behind the engine API: which command goes to which, and in which order a peer moves from
//! one to the other.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use tokio::sync::watch;
use weft_crypto::{Cipher, Format, PeerId};
use weft_engine::{Engine, EngineError};
use weft_kernel::engine::{DATA_CHANNEL_PORT, ENCAPSULATION_PORT, KernelEngine, Support};
use weft_path::{EngineCommand, EngineEvent, EngineKind, EngineOffer, PathId, Reason};

use super::control::VNI;
use super::events::Reporter;
use crate::config::{EngineChoice, FormatChoice, Settings};
use crate::services::attach::ports::RemoteMacs;

/// The engines of this host.
pub(crate) struct Engines {
    vector: Arc<Engine>,
    kernel: KernelEngine,
    support: watch::Receiver<Support>,
    /// What the engines report.
    events: Reporter,
    /// Paths that the kernel engine sends on, and its inbound SAs.
    kernel_paths: BTreeMap<PathId, PeerId>,
    kernel_spis: BTreeSet<u32>,
    /// Peers to which the vector engine sends broadcast frames.
    broadcast: BTreeSet<PeerId>,
    /// Where direct ports and shortcuts send past the switch.
    macs: RemoteMacs,
    /// Commands that the kernel engine has not been given yet.
    waiting: Vec<EngineCommand>,
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
    pub(crate) async fn support_changed(&mut self) {
        if self.support.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// What this host offers its peers now, and why not the rest.
    pub(crate) fn offers(&mut self, settings: &Settings) -> Offers {
        offers(settings, &self.support.borrow_and_update())
    }

    pub(crate) fn vector(&self) -> &Engine {
        &self.vector
    }

    pub(crate) fn kernel(&self) -> &KernelEngine {
        &self.kernel
    }

    /// Carries a command out on the engines that it concerns. Those of the kernel engine are done
    /// after [`Self::flush`].
    pub(crate) async fn command(&mut self, command: EngineCommand) {
        match command {
            EngineCommand::InstallInbound { engine: EngineKind::Kernel, ref sa, .. } => {
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
            EngineCommand::RemoveOutbound { path } if self.kernel_paths.remove(&path).is_some() => {
                self.waiting.push(command);
            }
            EngineCommand::SetPathMtu { path, .. }
            | EngineCommand::SetRemote { path, .. }
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
            EngineCommand::SetSource { .. } => {
                self.waiting.push(command.clone());
                self.tell_vector(command);
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
    pub(crate) async fn flush(&mut self) {
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

/// What a host offers its peers, and why not the rest.
pub(crate) struct Offers {
    pub(crate) engines: Vec<EngineOffer>,
    pub(crate) missing: Vec<(EngineKind, Reason)>,
}

/// The offers that follow from the configuration and from what the kernel can do.
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

/// What the kernel engine offers, and what it lacks; without `esp` that is told even where it has
/// `ovpn`, which a peer may not have.
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

/// Why there is nothing that the kernel could move.
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
