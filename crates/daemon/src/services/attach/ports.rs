//! Container ports: by the switch alone, or by a direct port beside it.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

use weft_engine::{Engine, PortTraffic};
use weft_io::redirect::MacSet;
use weft_io::tap::{Tap, TapOptions};
use weft_kernel::engine::Support;
use weft_kernel::{AttachSpec, Attached, DirectTap, Kernel, KernelError};
use weft_path::{Mac, Vni};

use super::bypass::Bypass;
use super::kept_ports::KeptPorts;
use super::sources;
use crate::config::{EngineChoice, PortChoice, Settings};
use crate::devices::HOST_INTERFACE;
use crate::holder::PortKeeper;

/// The kind of a container's port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PortKind {
    /// A port of the switch.
    Bridge,
    /// A device of the vector engine, with a port of the switch beside it.
    Direct,
}

impl PortKind {
    /// The value in the CLI and in JSON.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Bridge => "bridge",
            Self::Direct => "direct",
        }
    }
}

/// Makes and serves direct ports.
pub(crate) struct DirectPorts {
    choice: PortChoice,
    engine_choice: EngineChoice,
    /// Weak: the part of the daemon that stops the engine owns it.
    engine: Weak<Engine>,
    /// The address set, or the reason why there are no direct ports.
    macs: Result<Arc<MacSet>, String>,
    kept: Arc<KeptPorts>,
    bypass: Bypass,
}

impl DirectPorts {
    /// Finds out whether this kernel supports direct ports, if they may be wanted.
    pub(crate) fn new(
        settings: &Settings,
        engine: &Arc<Engine>,
        macs: &Result<Arc<MacSet>, String>,
        kept: KeptPorts,
    ) -> Self {
        let macs = match settings.port_mode {
            PortChoice::Shortcut => Err("--port-mode shortcut".to_owned()),
            PortChoice::Auto | PortChoice::Bridge | PortChoice::Direct => macs.clone(),
        };
        if let (PortChoice::Direct, Err(reason)) = (settings.port_mode, &macs) {
            tracing::warn!(reason, "no direct ports; containers get ports of the switch");
        }
        let (choice, engine_choice) = (settings.port_mode, settings.engine);
        let (kept, bypass) = (Arc::new(kept), Bypass::default());
        Self { choice, engine_choice, engine: Arc::downgrade(engine), macs, kept, bypass }
    }

    /// Whether direct ports are possible.
    pub(crate) const fn possible(&self) -> bool {
        self.macs.is_ok()
    }

    /// The rules and limits they bypass.
    pub(crate) const fn bypass(&self) -> &Bypass {
        &self.bypass
    }

    /// The port kind for a container attached now, and why it is not a direct port.
    pub(crate) fn kind(&self, support: &Support) -> (PortKind, Option<String>) {
        match (self.wanted(support), self.choice) {
            ((PortKind::Direct, _), PortChoice::Auto) => match self.bypass.known() {
                None => (PortKind::Direct, None),
                reason => (PortKind::Bridge, reason),
            },
            (wanted, _) => wanted,
        }
    }

    /// Like [`Self::kind`], regardless of rules on the bridge.
    fn wanted(&self, support: &Support) -> (PortKind, Option<String>) {
        if let Err(reason) = &self.macs {
            return (PortKind::Bridge, Some(reason.clone()));
        }
        let only_vector = self.engine_choice == EngineChoice::Userspace
            || !matches!(support, Support::Ready { .. });
        match self.choice {
            PortChoice::Auto if !only_vector => {
                (PortKind::Bridge, Some("the kernel engine moves frames too".to_owned()))
            }
            PortChoice::Bridge | PortChoice::Shortcut => (PortKind::Bridge, None),
            PortChoice::Auto | PortChoice::Direct => (PortKind::Direct, None),
        }
    }

    /// The port kind for a container that may already have a port, and why it is not a direct one. With
    /// automatic choice a direct port stays, even if new ones would now be ports of the switch.
    pub(crate) async fn kind_of(
        &self,
        kernel: &Kernel,
        spec: &AttachSpec,
        support: &Support,
    ) -> (PortKind, Option<String>) {
        let is_auto = self.choice == PortChoice::Auto && self.macs.is_ok();
        if is_auto && self.has_one(spec) {
            return (PortKind::Direct, None);
        }
        match self.wanted(support) {
            (PortKind::Direct, _) if is_auto && spec.bridge.is_some() => {
                match self.bypass.objection(kernel).await {
                    None => (PortKind::Direct, None),
                    reason => (PortKind::Bridge, reason),
                }
            }
            wanted => wanted,
        }
    }

    fn has_one(&self, spec: &AttachSpec) -> bool {
        let engine = self.engine.upgrade();
        engine.is_some_and(|engine| engine.has_port(Vni::WEFT, Mac(spec.mac)))
            || self.kept.has(&spec.namespace)
    }

    /// Whether the vector engine runs. It ends before the services do when the daemon stops.
    pub(crate) fn has_engine(&self) -> bool {
        self.engine.strong_count() > 0
    }

    /// Gives a container its direct port, or restores the missing parts.
    pub(crate) async fn plug_in(
        &self,
        kernel: &Kernel,
        spec: &AttachSpec,
    ) -> Result<Attached, KernelError> {
        let no_port = |why: String| KernelError::NoDirectPort { why };
        let macs = self.macs.as_ref().map_err(|why| no_port(why.clone()))?;
        let engine = self.engine.upgrade().ok_or_else(|| no_port("weft is stopping".into()))?;
        let mac = Mac(spec.mac);
        if engine.has_port(Vni::WEFT, mac)
            && let Some(attached) =
                kernel.attach_direct(spec, &DirectTap { fresh: None, macs }).await?
        {
            return Ok(attached);
        }
        engine.remove_port(Vni::WEFT, mac);
        let may_offload = engine.offloads().tap_tso.usable();
        let mut queues = self.kept.queues(&spec.namespace, &spec.name);
        if !queues.is_empty()
            && let Some(attached) =
                kernel.attach_direct(spec, &DirectTap { fresh: None, macs }).await?
        {
            limit(&mut queues, may_offload)?;
            engine.add_port(Vni::WEFT, mac, queues).map_err(|error| no_port(error.to_string()))?;
            return Ok(attached);
        }
        let options = TapOptions::new(tap_name(&spec.host_name));
        let queues: Result<Vec<Tap>, _> =
            (0..number_of_queues(engine.workers())).map(|_| Tap::open(&options)).collect();
        let mut queues = queues.map_err(|error| no_port(error.to_string()))?;
        limit(&mut queues, may_offload)?;
        let fresh = DirectTap { fresh: Some(&options.name), macs };
        let attached = kernel.attach_direct(spec, &fresh).await?;
        let attached = attached.ok_or_else(|| no_port("its device is gone".into()))?;
        // From here on the device persists while no daemon runs, like the switch.
        if let Some(queue) = queues.first() {
            queue.set_persist(true).map_err(|error| no_port(error.to_string()))?;
        }
        let (kept, macs) = (Arc::clone(&self.kept), Arc::clone(macs));
        let keeping = tokio::task::spawn_blocking(move || {
            kept.keep(&queues, &macs);
            queues
        });
        let queues = keeping.await.map_err(|error| no_port(error.to_string()))?;
        engine.add_port(Vni::WEFT, mac, queues).map_err(|error| no_port(error.to_string()))?;
        Ok(attached)
    }

    /// A container with a direct port is attached entirely: frames from its addresses may bypass the switch.
    pub(crate) fn plugged_in(&self, spec: &AttachSpec) {
        if let Ok(macs) = &self.macs {
            sources::allow(macs, spec);
        }
    }

    /// Drops unused leftovers of an earlier run, once all its containers are attached again.
    pub(crate) fn all_restored(&self) {
        self.kept.forget();
    }

    /// Releases a container's direct port, if it has one, and removes its device.
    pub(crate) async fn unplug(&self, kernel: &Kernel, spec: &AttachSpec) {
        self.let_go(Mac(spec.mac));
        remove_device(kernel, spec).await;
    }

    /// The engine stops serving a container's direct port.
    pub(crate) fn let_go(&self, mac: Mac) {
        if let Ok(macs) = &self.macs {
            sources::forbid(macs, mac);
        }
        if let Some(engine) = self.engine.upgrade() {
            engine.remove_port(Vni::WEFT, mac);
        }
    }

    /// No daemon will read the queues: all frames take the switch, where they are dropped.
    pub(crate) fn rest(&self) {
        if let Ok(macs) = &self.macs
            && let Err(error) = macs.clear()
        {
            tracing::warn!(%error, "queues of direct ports may fill up while no daemon runs");
        }
    }

    /// The engine's device on the switch is gone: the engine creates another one.
    pub(crate) async fn renew_tap(&self) {
        for _ in 0..RENEW_TRIES_MAX {
            let Some(engine) = self.engine.upgrade() else { return };
            // This waits for the engine's threads.
            let renewed = tokio::task::spawn_blocking(move || engine.renew_tap()).await;
            match renewed.map_err(|error| error.to_string()) {
                Ok(Ok(())) => {
                    tracing::warn!("the vector engine's device was removed; created a new one");
                    return;
                }
                Ok(Err(error)) => {
                    tracing::error!(%error, "cannot create a new device for the vector engine");
                }
                Err(error) => {
                    tracing::error!(error, "cannot create a new device for the vector engine");
                }
            }
            tokio::time::sleep(RENEW_PAUSE).await;
        }
    }

    /// Number of looping group frames, and the sender of the last, with its network.
    pub(crate) fn going_round(&self) -> (u64, Option<(Vni, Mac)>) {
        self.engine.upgrade().map_or((0, None), |it| it.going_round())
    }

    /// Traffic of direct ports, by the containers' addresses.
    pub(crate) fn traffic(&self) -> BTreeMap<Mac, PortTraffic> {
        let engine = self.engine.upgrade();
        let of_ports = engine.map(|engine| engine.port_traffic()).unwrap_or_default();
        let weft = of_ports.into_iter().filter(|(vni, ..)| *vni == Vni::WEFT);
        weft.map(|(_, mac, traffic)| (mac, traffic)).collect()
    }
}

fn limit(queues: &mut [Tap], may_offload: bool) -> Result<(), KernelError> {
    if may_offload {
        return Ok(());
    }
    let stopped = queues.iter_mut().try_for_each(Tap::stop_offloads);
    stopped.map_err(|error| KernelError::NoDirectPort { why: error.to_string() })
}

/// Removes the device of a direct port from a container that still runs.
pub(crate) async fn remove_device(kernel: &Kernel, spec: &AttachSpec) {
    match kernel.remove_direct(&spec.namespace, &spec.name, &spec.id).await {
        Ok(_) | Err(KernelError::NamespaceGone { .. } | KernelError::Namespace { .. }) => {}
        Err(error) => {
            tracing::warn!(%error, container = spec.id, "cannot remove the device of a direct port");
        }
    }
}

/// Queues of a direct port. None can be added once its device is in the container, so there are spare ones for
/// later workers. Until then, the other workers serve them.
fn number_of_queues(workers: usize) -> usize {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    workers.max(processors.clamp(QUEUES_MIN, weft_engine::DEFAULT_WORKERS_MAX))
}

/// Attempts to give the vector engine a new device on the switch, and the pause between them.
const RENEW_TRIES_MAX: usize = 10;
const RENEW_PAUSE: Duration = Duration::from_secs(1);

/// Fewest queues of a direct port: each costs a descriptor and 32 KiB of kernel memory.
const QUEUES_MIN: usize = 4;

/// The set of addresses to which frames leave by direct ports and shortcuts, initially empty, or why there is
/// none. Also returns the ports that `keeper` holds from an earlier run.
pub(crate) fn remote_set(
    settings: &Settings,
    keeper: Arc<dyn PortKeeper>,
) -> (Result<Arc<MacSet>, String>, KeptPorts) {
    let (kept, set) = KeptPorts::take(keeper);
    match (set_for(settings, set), settings.port_mode) {
        (Ok(set), mode) => {
            // Their containers get other ports from now on.
            if mode == PortChoice::Shortcut {
                kept.forget();
            }
            (Ok(set), kept)
        }
        (Err(reason), _) => {
            kept.forget();
            (Err(reason), kept)
        }
    }
}

fn set_for(settings: &Settings, left: Option<MacSet>) -> Result<Arc<MacSet>, String> {
    if settings.port_mode == PortChoice::Bridge {
        return Err("--port-mode bridge".to_owned());
    }
    if settings.engine == EngineChoice::Kernel {
        return Err("--engine kernel".to_owned());
    }
    match left {
        Some(set) => Ok(Arc::new(set)),
        None => new_set().map_err(|error| error.to_string()),
    }
}

fn new_set() -> Result<Arc<MacSet>, weft_io::IoError> {
    let macs = MacSet::new()?;
    macs.self_test()?;
    Ok(Arc::new(macs))
}

/// The name of the device on the host, until it moves into the container.
fn tap_name(host_interface: &str) -> String {
    let digits = host_interface.strip_prefix(HOST_INTERFACE);
    format!("{TAP}{}", digits.unwrap_or(host_interface))
}

/// Whether a device's name says that it is not in its container yet.
pub(crate) fn is_on_its_way(device: &str) -> bool {
    device.starts_with(TAP)
}

/// Prefix of such a name.
const TAP: &str = "weftt";

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::path::Path;
    use std::thread;

    use weft_engine::EngineConfig;
    use weft_io::namespace::unshare_network;

    use super::*;
    use crate::config::LaunchOptions;

    struct Nobody;

    impl PortKeeper for Nobody {
        fn take_ports(&self) -> Vec<std::os::fd::OwnedFd> {
            Vec::new()
        }

        fn keep_ports(&self, _: Vec<std::os::fd::OwnedFd>) {}
    }

    fn launched(engine: &Arc<Engine>, mode: PortChoice, choice: EngineChoice) -> DirectPorts {
        let options = LaunchOptions {
            port_mode: Some(mode),
            engine: Some(choice),
            ..LaunchOptions::default()
        };
        let settings = options.settings(None, Path::new("/run/weft")).unwrap();
        let (set, kept) = remote_set(&settings, Arc::new(Nobody));
        DirectPorts::new(&settings, engine, &set, kept)
    }

    /// A port of the switch, and why.
    fn because(reason: &str) -> (PortKind, Option<String>) {
        (PortKind::Bridge, Some(reason.to_owned()))
    }

    const DIRECT: (PortKind, Option<String>) = (PortKind::Direct, None);

    fn auto_follows_the_engines(engine: &Arc<Engine>, ready: &Support, lacking: &[Support]) {
        let auto = launched(engine, PortChoice::Auto, EngineChoice::Auto);
        assert_eq!(auto.kind(ready), because("the kernel engine moves frames too"));
        let vector = launched(engine, PortChoice::Auto, EngineChoice::Userspace);
        assert_eq!(vector.kind(ready), DIRECT);
        for support in lacking {
            assert_eq!(auto.kind(support), DIRECT);
        }
    }

    fn check_chosen_port_kinds(engine: &Arc<Engine>, support: &Support) {
        for choice in [EngineChoice::Auto, EngineChoice::Userspace] {
            let direct = launched(engine, PortChoice::Direct, choice);
            assert_eq!(direct.kind(support), DIRECT);
            let bridge = launched(engine, PortChoice::Bridge, choice);
            assert_eq!(bridge.kind(support), because("--port-mode bridge"));
            let shortcut = launched(engine, PortChoice::Shortcut, choice);
            assert_eq!(shortcut.kind(support), because("--port-mode shortcut"));
        }
        // Without the vector engine there are no ports of it.
        for mode in [PortChoice::Auto, PortChoice::Direct] {
            let kernel = launched(engine, mode, EngineChoice::Kernel);
            assert_eq!(kernel.kind(support), because("--engine kernel"));
        }
        let mut old = launched(engine, PortChoice::Direct, EngineChoice::Auto);
        old.macs = Err("no tcx".to_owned());
        assert_eq!(old.kind(support), because("no tcx"));
    }

    #[test]
    fn a_port_is_direct_where_the_vector_engine_alone_moves_frames_unless_told_otherwise() {
        let thread = thread::spawn(|| {
            unshare_network().expect("this test needs root");
            let config = EngineConfig {
                port: 0,
                offloads: false,
                ..EngineConfig::new("weft0", Vni(7), 1_388)
            };
            let engine = Arc::new(Engine::start(&config, |_| {}).unwrap());
            let ready = Support::Ready { esp: Ok(Vec::new()), ovpn: Ok(Vec::new()), lanes_max: 1 };
            let lacking = [Support::NoVxlan, Support::NoEsp("no XFRM".into()), Support::Forbidden];
            auto_follows_the_engines(&engine, &ready, &lacking);
            lacking.iter().chain([&ready]).for_each(|it| check_chosen_port_kinds(&engine, it));
        });
        thread.join().unwrap();
    }
}
