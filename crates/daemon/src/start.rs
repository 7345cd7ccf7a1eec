//! Starting and stopping: the order in which the daemon's parts come up and go down.

mod services;

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::{Duration, SystemTime};

use ipnet::IpNet;
use tokio::runtime::Handle;
use tokio::sync::{Semaphore, mpsc, watch};
use tokio::task::JoinHandle;
use weft_api::{ApiListener, Invitation};
use weft_crypto::PeerId;
use weft_engine::{Engine, EngineConfig};
use weft_kernel::Kernel;
use weft_kernel::engine::{
    DATA_CHANNEL_PORT, ENCAPSULATION_PORT, KernelEngine, KernelEngineConfig, SocketKeeper,
    probe_mac,
};
use weft_link::{Admission, Identity, Links, Secret, Target};
use weft_mesh::{Founding, Mesh};
use weft_path::{Mac, Paths, Vni};
use zeroize::Zeroizing;

use crate::StartError;
use crate::config::{EngineChoice, FormatChoice, Settings, keylog};
use crate::core::barriers::Barriers;
use crate::core::control::{Control, Request};
use crate::core::engines::{Engines, Offers};
use crate::core::events::{self, Events, Lost};
use crate::core::networks;
use crate::core::remote_macs::RemoteMacs;
use crate::core::saving::Saving;
use crate::core::service_messages::{Service, ServiceMessages};
use crate::core::targets::{TARGETS_FILE, Targets};
use crate::core::turns::Turns;
use crate::core::unheard::Unheard;
use crate::devices::{SWITCH, TAP};
use crate::http::daemon::{CHANGES_MAX, Daemon};
use crate::services::attach::ports::{DirectPorts, remote_set};
use crate::services::attach::shortcuts::Shortcuts;
use crate::services::attach::{Attachments, SavedAttachments};
use crate::services::cni::Cni;
use crate::services::docker::Docker;
use crate::services::gateway::{Gateway, Peers};
use crate::services::names::Names;
use crate::services::names::announced::Announcer;
use crate::services::networks::Networks;
use crate::services::resolved::Resolved;
use crate::services::supervisor::Health;
use crate::upkeep::firewall::Firewall;
use crate::upkeep::forward::remove_accepted;
use crate::upkeep::mtu::{container_mtu, link_mtu, widest_format};
use crate::upkeep::origin::Notes;
use crate::upkeep::store::{IDENTITY_FILE, Lock, MESH_FILE, Store};

/// Runs the daemon until the API, SIGTERM or SIGINT stops it. Calls `ready` once it answers requests.
///
/// # Errors
/// See [`StartError`]; in that case nothing keeps running.
pub fn run(settings: Settings, ready: impl FnOnce(&Invitation)) -> Result<(), StartError> {
    weft_io::heap::keep_compact();
    crate::check_host(&settings, tell)?;
    crate::services::resolved::find_bus();
    weft_kernel::open_settings();
    crate::upkeep::hardening::harden(&settings);
    let runtime = |name: &str, threads| {
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        builder.worker_threads(threads).thread_name(name).enable_all();
        builder.build().map_err(StartError::Runtime)
    };
    // The kernel blocks a thread whose request waits for the lock of its configuration. The core, links and the
    // API run on threads that send it no such requests.
    let (core, services) =
        (runtime("weft-control", CORE_THREADS)?, runtime("weft-services", SERVICE_THREADS)?);
    let result = core.block_on(run_async(settings, services.handle().clone(), ready));
    core.shutdown_timeout(Duration::from_millis(SHUTDOWN_TIMEOUT_MS));
    services.shutdown_timeout(Duration::from_millis(SHUTDOWN_TIMEOUT_MS));
    result
}

async fn run_async(
    settings: Settings,
    services: Handle,
    ready: impl FnOnce(&Invitation),
) -> Result<(), StartError> {
    crate::raise_descriptor_limit();
    for dir in [&settings.runtime_dir, &settings.state_dir] {
        lock(dir)?.keep();
    }
    crate::upkeep::host::note_state_dir(&settings);
    let kernel = Kernel::new()?;
    check_range(&settings, &kernel).await?;
    let (listener, socket) = listen(&settings.runtime_dir)?;
    let prepared = prepare(&settings, &kernel).await?;
    let (daemon, control, kernel_engine) = start(settings, services, &kernel, prepared).await?;
    let supervisor = services::start(&daemon, &kernel, &kernel_engine);
    tokio::spawn(stop_on_signal(Arc::clone(&daemon.stop)));
    serve(listener, Arc::clone(&daemon), control, ready).await;
    daemon.gateway.end().await;
    drop(supervisor);
    daemon.resolved.end().await;
    remove_accepted(&kernel).await;
    drop(socket);
    tracing::info!("weft has stopped");
    Ok(())
}

/// Checks the range against the host's routes. A host that was on the network before already has containers in
/// it: it starts despite newer routes, and warns of them.
async fn check_range(settings: &Settings, kernel: &Kernel) -> Result<(), StartError> {
    if settings.state_dir.join(MESH_FILE).exists() {
        return Ok(());
    }
    Ok(kernel.check_range(IpNet::V4(settings.range)).await?)
}

/// The file of the API's socket, removed on drop.
struct SocketFile(PathBuf);

impl Drop for SocketFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Binds the API's socket. Replaces a leftover of an earlier run, but not a socket that a program listens on.
fn listen(runtime_dir: &Path) -> Result<(ApiListener, SocketFile), StartError> {
    let path = weft_api::socket_path(runtime_dir);
    let listened = match weft_api::is_answered(&path) {
        true => Err(io::Error::new(io::ErrorKind::AddrInUse, "another program listens there")),
        false => weft_api::listen(&path),
    };
    match listened {
        Ok(listener) => Ok((listener, SocketFile(path))),
        Err(error) => Err(StartError::Api { path, error }),
    }
}

/// Everything that can make a launch fail before any device exists, so that a failed launch leaves none behind.
struct Prepared {
    store: Store,
    notes: Notes,
    local: PeerId,
    link_mtu: u16,
    mtu: u16,
    saved: SavedAttachments,
    names: Arc<Names>,
    mesh: Mesh,
    targets: Vec<Target>,
    links: Links,
    link_events: weft_link::Events,
}

async fn prepare(settings: &Settings, kernel: &Kernel) -> Result<Prepared, StartError> {
    let store = Store::open(&settings.state_dir)?;
    let identity = Identity::load_or_create(&store.path(IDENTITY_FILE))?;
    let local = identity.peer_id();
    let link_mtu = link_mtu(settings, kernel).await?;
    let mtu = match settings.mtu {
        Some(mtu) => mtu,
        None => container_mtu(link_mtu, widest_format(settings).await),
    };
    let saved = SavedAttachments::load(settings, &store)?;
    let names = Arc::new(Names::new(settings, local, store.clone())?);
    let secret = secret(settings, &store)?;
    let targets = targets(settings, &store)?;
    let founding = if targets.is_empty() { Founding::Found } else { Founding::Join };
    let instance = rand::random();
    let (notes, before) = Notes::begin(settings, local, instance);
    let mesh = start_mesh(settings, &store, (local, founding), before.origin)?;
    let mut config = link_config(settings, identity, secret, &mesh)?;
    (config.instance, config.succeeds) = (instance, before.instance);
    let (links, link_events) = Links::start(config)?;
    Ok(Prepared {
        store,
        notes,
        local,
        link_mtu,
        mtu,
        saved,
        names,
        mesh,
        targets,
        links,
        link_events,
    })
}

/// Starts the engines, the control loop, which ends when told to stop, and the state for answering requests.
async fn start(
    settings: Settings,
    services: Handle,
    kernel: &Kernel,
    prepared: Prepared,
) -> Result<(Arc<Daemon>, JoinHandle<()>, KernelEngine), StartError> {
    let Prepared { store, notes, local, link_mtu, mtu, saved, names, mesh, .. } = prepared;
    let Prepared { targets, links, link_events, .. } = prepared;
    let started = start_engines(&settings, &services, kernel, local, mtu).await?;
    let Started { engines, kernel_engine, ports, shortcuts, offloads, vector, .. } = started;
    let Started { events, events_lost, docker_socket, .. } = started;
    for target in &targets {
        links.connect(target.clone());
    }
    let (sender, requests) = mpsc::channel(REQUESTS_QUEUED_MAX);
    let held = networks::Networks::new(local, mesh.held_networks());
    let (attachments, networks) = attachments_of(
        saved,
        (kernel, &kernel_engine, vector),
        (ports, shortcuts),
        (&held, &sender),
        (local, mtu),
    );
    let both = (Arc::clone(&attachments), Arc::clone(&networks));
    let warnings = names.warnings().clone();
    let docker = Docker::new(&settings, &store, both.clone(), docker_socket, warnings)?;
    let mut messages = ServiceMessages::default();
    let announcer = Announcer::new(Arc::clone(&names), sender.clone());
    let parts = (&settings, &store, kernel);
    let gateway = gateway_of(parts, both, announcer, (local, &*names), &mut messages)?;
    let (stop_sender, stop) = watch::channel(false);
    let daemon = Daemon {
        local,
        mtu,
        link_mtu,
        offloads,
        events_lost,
        kernel: kernel.clone(),
        since: SystemTime::now(),
        links,
        targets: Arc::new(Targets::new(targets)),
        store,
        control: sender,
        cni: Arc::new(Cni::new(&settings, Arc::clone(&attachments))),
        docker: Arc::new(docker),
        gateway: Arc::new(gateway),
        attachments,
        networks,
        firewall: Firewall::default(),
        stop: Arc::new(stop_sender),
        warnings: names.warnings().clone(),
        resolved: Arc::new(Resolved::new(names.domain(), names.served(), names.warnings().clone())),
        names,
        health: Health::default(),
        turns: Turns::default(),
        services,
        changes: Arc::new(Semaphore::new(CHANGES_MAX)),
        settings,
    };
    let control = control_of(&daemon, (mesh, engines), (held, messages), notes);
    let (halt_sender, halt) = watch::channel(false);
    tokio::spawn(halt_in_order(stop, Arc::clone(&daemon.attachments), halt_sender));
    let turns = daemon.turns.clone();
    let control = control.run(link_events, events, requests, halt);
    let control = tokio::spawn(async move { turns.watch(control).await });
    Ok((Arc::new(daemon), control, kernel_engine))
}

fn attachments_of(
    saved: SavedAttachments,
    (kernel, engine, vector): (&Kernel, &KernelEngine, Weak<Engine>),
    ports: (DirectPorts, Shortcuts),
    (held, control): (&networks::Networks, &mpsc::Sender<Request>),
    (local, mtu): (PeerId, u16),
) -> (Arc<Attachments>, Arc<Networks>) {
    let (engine, kernel) = (engine.clone(), kernel.clone());
    let networks = Arc::new(Networks::new(
        held.held(),
        vector,
        engine.clone(),
        kernel.clone(),
        control.clone(),
        mtu,
    ));
    let of_networks = Arc::clone(&networks);
    let attachments =
        Attachments::new(saved, kernel, engine, control.clone(), ports, of_networks, local);
    (Arc::new(attachments), networks)
}

fn gateway_of(
    (settings, store, kernel): (&Settings, &Store, &Kernel),
    both: (Arc<Attachments>, Arc<Networks>),
    announcer: Announcer,
    (local, names): (PeerId, &Names),
    messages: &mut ServiceMessages,
) -> Result<Gateway, StartError> {
    let place = (local, settings.host);
    let mailbox = messages.mailbox(Service::Gateway);
    let peers = Peers::new(place, mailbox, store, names.warnings().clone())?;
    let told = (names.domain(), announcer);
    Ok(Gateway::new(store.clone(), kernel.clone(), both, told, settings, peers)?)
}

fn control_of(
    daemon: &Daemon,
    (mesh, mut engines): (Mesh, Engines),
    (networks, services): (networks::Networks, ServiceMessages),
    notes: Notes,
) -> Control {
    let (settings, local) = (daemon.settings.clone(), daemon.local);
    let paths = path_config(&settings, engines.offers(&settings), daemon.link_mtu, daemon.mtu);
    Control {
        store: daemon.store.clone(),
        links: daemon.links.clone(),
        mesh,
        paths: Paths::new(local, paths, rand::random()),
        engines,
        settings,
        waiting: BTreeMap::new(),
        local,
        targets: Arc::clone(&daemon.targets),
        told_targets: Vec::new(),
        seen: BTreeMap::new(),
        sources: BTreeMap::new(),
        lost: BTreeMap::new(),
        unheard: Unheard::default(),
        barriers: Barriers::default(),
        saving: Saving::new(notes),
        networks,
        services,
        names: daemon.names.bell(),
        turns: daemon.turns.clone(),
    }
}

/// Stops the control loop, and with it the engines, once no container is being attached.
async fn halt_in_order(
    mut stop: watch::Receiver<bool>,
    attachments: Arc<Attachments>,
    halt: watch::Sender<bool>,
) {
    let _ = stop.wait_for(|stopped| *stopped).await;
    attachments.close().await;
    halt.send_replace(true);
}

/// Answers requests until the control loop ends.
async fn serve(
    listener: ApiListener,
    daemon: Arc<Daemon>,
    control: JoinHandle<()>,
    ready: impl FnOnce(&Invitation),
) {
    let api = tokio::spawn(serve_api(listener, Arc::clone(&daemon)));
    let attachments = Arc::clone(&daemon.attachments);
    let restoring = daemon.services.spawn(async move { attachments.restore().await });
    let mut control = control;
    let stopped = tokio::select! {
        restored = restoring => {
            if let Err(error) = restored {
                tracing::error!(%error, "cannot restore the containers of the last run; this is a bug in weft");
            }
            false
        }
        _ = &mut control => true,
    };
    if !stopped {
        daemon.attachments.set_restored();
        daemon.names.set_restored();
        ready(&daemon.invitation().await);
        let (peer, nickname, mtu) = (daemon.local, &daemon.settings.nickname, daemon.mtu);
        tracing::info!(%peer, nickname, mtu, "weft is running");
        let _ = control.await;
    }
    api.abort();
    daemon.attachments.rest().await;
}

/// Both engines, running.
struct Started {
    engines: Engines,
    kernel_engine: KernelEngine,
    vector: Weak<Engine>,
    ports: DirectPorts,
    shortcuts: Shortcuts,
    /// The kernel offloads that the vector engine uses.
    offloads: BTreeMap<String, bool>,
    events: Events,
    events_lost: Lost,
    /// The socket of Docker's plugin that systemd has passed.
    docker_socket: Option<OwnedFd>,
}

async fn start_engines(
    settings: &Settings,
    services: &Handle,
    kernel: &Kernel,
    local: PeerId,
    mtu: u16,
) -> Result<Started, StartError> {
    let (reporter, events, events_lost) = events::queue();
    let report = {
        let reporter = reporter.clone();
        move |event| reporter.report(event)
    };
    crate::choose_libraries();
    let engine = Engine::start(&engine_config(settings, local, mtu), report.clone())?;
    let offloads = offloads(&engine);
    let mut keepers = crate::holder::keepers(&settings.runtime_dir);
    let docker_socket = keepers.docker_socket.take();
    let (macs, kept) = remote_set(settings, keepers.ports);
    let kernel_config = kernel_config(settings, local, mtu, keepers.sockets);
    let kernel_engine = KernelEngine::start(kernel.clone(), kernel_config, report);
    let kernel_engine = services.spawn(kernel_engine).await.map_err(StartError::Panicked)??;
    let engine = Arc::new(engine);
    let vector = Arc::downgrade(&engine);
    let ports = DirectPorts::new(settings, &engine, &macs, kept);
    let shortcuts = Shortcuts::new(settings, kernel_engine.switch(), &macs);
    let engines = Engines::new(engine, kernel_engine.clone(), reporter, RemoteMacs::new(macs.ok()));
    Ok(Started {
        engines,
        kernel_engine,
        vector,
        ports,
        shortcuts,
        offloads,
        events,
        events_lost,
        docker_socket,
    })
}

/// The mesh as it was when the daemon ended, or a new one.
fn start_mesh(
    settings: &Settings,
    store: &Store,
    (local, founding): (PeerId, Founding),
    origin: weft_mesh::Origin,
) -> Result<Mesh, StartError> {
    let saved = store.load(MESH_FILE)?;
    let mut config = weft_mesh::Config::new(local, settings.nickname.clone(), settings.port);
    config.range = settings.range;
    config.range6 = settings.range6;
    config.discovery = settings.discovery;
    config.founding = founding;
    config.origin = origin;
    Ok(Mesh::new(std::time::Instant::now(), config, saved, rand::random())?)
}

fn offloads(engine: &Engine) -> BTreeMap<String, bool> {
    let found = engine.offloads();
    BTreeMap::from([
        ("tap-tso".into(), found.tap_tso.usable()),
        ("tap-uso".into(), found.tap_uso.usable()),
        ("udp-segment".into(), found.udp_segment.usable()),
        ("udp-gro".into(), found.udp_gro.usable()),
    ])
}

fn lock(dir: &Path) -> Result<Lock, StartError> {
    Lock::take_soon(dir, tell)?.ok_or_else(|| StartError::AlreadyRunning(dir.into()))
}

fn tell(text: &str) {
    tracing::info!("{text}");
}

fn kernel_config(
    settings: &Settings,
    local: PeerId,
    mtu: u16,
    keeper: Arc<dyn SocketKeeper>,
) -> KernelEngineConfig {
    KernelEngineConfig {
        local,
        vni: Vni::WEFT,
        device: SWITCH.into(),
        tap: TAP.into(),
        mac: probe_mac(&local),
        mtu,
        host: settings.host,
        encapsulation_port: ENCAPSULATION_PORT,
        data_channel_port: DATA_CHANNEL_PORT,
        keeper: Some(keeper),
        switch: settings.switch.kind(),
        moves: settings.engine != EngineChoice::Userspace,
        esp: settings.format != FormatChoice::Ovpn,
        ovpn: settings.format != FormatChoice::Esp,
        plain: !settings.trusted_subnets.is_empty(),
        copy_dscp: settings.copy_dscp,
        keylog: keylog(),
    }
}

fn engine_config(settings: &Settings, local: PeerId, mtu: u16) -> EngineConfig {
    let mut config = EngineConfig::new(TAP, Vni::WEFT, mtu);
    config.local = local;
    config.probe_mac = Mac(probe_mac(&local));
    config.bind = settings.host;
    config.port = settings.data_port;
    config.workers = settings.workers;
    config.helpers = settings.helpers;
    config.pin = settings.pin_workers;
    config.busy_poll = settings.busy_poll;
    config.copy_dscp = settings.copy_dscp;
    config.offloads = settings.offloads;
    config.keylog = keylog();
    config
}

fn path_config(settings: &Settings, offers: Offers, link_mtu: u16, mtu: u16) -> weft_path::Config {
    let default = weft_path::Config::default();
    weft_path::Config {
        ciphers: settings.ciphers.clone(),
        engines: offers.engines,
        missing: offers.missing,
        trusted_subnets: settings.trusted_subnets.clone(),
        rekey_after: settings.rekey_after,
        link_mtu,
        container_mtu: mtu,
        ..default
    }
}

/// The network's secret: the configured one, the one learnt at an earlier start, or a new one if this host
/// founds a network. `None` if it joins by a token.
fn secret(settings: &Settings, store: &Store) -> Result<Option<Zeroizing<Vec<u8>>>, StartError> {
    if let Some(password) = &settings.password {
        if let Err(error) = store.save_secret(password.as_bytes()) {
            // The next launch gets it again, or finds it once it could be saved.
            let _ = store.save_secret_or_later(password.as_bytes());
            tracing::warn!(%error, "cannot save the password; trying again");
        }
        return Ok(Some(Zeroizing::new(password.as_bytes().to_vec())));
    }
    if let Some(secret) = store.load_secret()? {
        return Ok(Some(secret));
    }
    if !settings.hosts.is_empty() {
        return Ok(None);
    }
    let random: [u8; 32] = rand::random();
    let secret: String = random.iter().map(|byte| format!("{byte:02x}")).collect();
    store.save_secret(secret.as_bytes())?;
    Ok(Some(Zeroizing::new(secret.into_bytes())))
}

fn link_config(
    settings: &Settings,
    identity: Identity,
    secret: Option<Zeroizing<Vec<u8>>>,
    mesh: &Mesh,
) -> Result<weft_link::Config, StartError> {
    let admission = match (secret, &settings.token) {
        (Some(secret), _) => Admission::Secret(Secret::new(secret.to_vec())?),
        (None, Some(token)) => Admission::Token(token.parse()?),
        (None, None) => return Err(StartError::NoAdmission),
    };
    let mut config = weft_link::Config::new(identity, settings.nickname.clone(), admission);
    config.host = settings.host;
    config.port = settings.port;
    config.hello = serde_json::to_value(mesh.hello()).unwrap_or_default();
    Ok(config)
}

/// The hosts to dial: the configured ones, else those of the last start.
fn targets(settings: &Settings, store: &Store) -> Result<Vec<Target>, StartError> {
    let known = store.load::<Vec<String>>(TARGETS_FILE)?.unwrap_or_default();
    let texts = if settings.hosts.is_empty() {
        known
    } else {
        // The same list needs no write, and so no space.
        if known != settings.hosts {
            store.save_or_later(TARGETS_FILE, &settings.hosts);
        }
        settings.hosts.clone()
    };
    Ok(texts.iter().map(|text| text.parse()).collect::<Result<_, _>>()?)
}

async fn serve_api(listener: ApiListener, daemon: Arc<Daemon>) {
    if let Err(error) = weft_api::serve(listener, crate::http::router(daemon)).await {
        tracing::error!(%error, "the API server has stopped");
    }
}

async fn stop_on_signal(stop: Arc<watch::Sender<bool>>) {
    use tokio::signal::unix::{SignalKind, signal};
    let (Ok(mut terminate), Ok(mut interrupt)) =
        (signal(SignalKind::terminate()), signal(SignalKind::interrupt()))
    else {
        return tracing::error!("cannot watch signals; stop with weft stop");
    };
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    stop.send_replace(true);
}

/// Threads of the core, links and the API.
const CORE_THREADS: usize = 2;
/// Threads of everything that the kernel or the disk may hold up.
const SERVICE_THREADS: usize = 4;
const SHUTDOWN_TIMEOUT_MS: u64 = 2_000;
const REQUESTS_QUEUED_MAX: usize = 1_024;

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::config::LaunchOptions;

    #[test]
    fn settings_reach_the_vector_engine() {
        let options = LaunchOptions {
            host: Some([192, 0, 2, 1].into()),
            data_port: Some(7_001),
            workers: Some(3),
            helpers: Some(2),
            pin_workers: true,
            busy_poll: Some(7),
            no_offloads: true,
            copy_dscp: true,
            ..LaunchOptions::default()
        };
        let file = tempfile::NamedTempFile::new().unwrap();
        let settings = options.settings(Some(file.path()), Path::new("/run/weft")).unwrap();
        let config = engine_config(&settings, PeerId::from_bytes([5; 32]), 1_300);
        assert_eq!((config.bind, config.port), (Some([192, 0, 2, 1].into()), 7_001));
        assert_eq!((config.workers, config.helpers), (3, Some(2)));
        assert_eq!(config.busy_poll, Some(Duration::from_micros(7)));
        assert!(config.pin && config.copy_dscp && !config.offloads);
        assert_eq!((config.local, config.container_mtu), (PeerId::from_bytes([5; 32]), 1_300));
    }
}
