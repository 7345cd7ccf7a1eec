//! Docker's network and IPAM driver: serves the plugin's socket, and compares its record with Docker's lists.
//!
//! A request of Docker's is never answered by asking Docker: the engine waits for the plugin. The comparison runs
//! in a separate service, and begins while no request of Docker's is open.

mod backend;
mod events;
mod listing;
mod made;
mod part;
mod socket;

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use weft_api::{ApiListener, DockerStatus};
use weft_container::docker_plugin::{Plugin, Reconciled, State, router};
use weft_path::Vni;

use self::backend::{DaemonBackend, FILE};
use self::events::{Changes, Events};
use self::listing::Lists;
pub(crate) use self::socket::{plugin_socket, prepare};
use super::attach::Attachments;
use super::networks::Networks;
use super::supervisor::{self, Pulse};
use crate::config::Settings;
use crate::upkeep::store::{Store, StoreError};
use crate::upkeep::warnings::Warnings;

/// The interval between two comparisons with Docker's lists, in seconds.
const COMPARE_EVERY_S: u64 = 30;
/// The same until an engine has the ready network, in seconds.
const OFFER_EVERY_S: u64 = 2;
/// From a change in Docker until it is looked at, in milliseconds: a container that starts has several.
const LISTED_MS: u64 = 300;
/// The longest wait for Docker to have no request open, in milliseconds. Each of its requests is answered sooner, but
/// one may follow the other for minutes. Nothing that answers them waits for Docker.
const QUIET_LIMIT_MS: u64 = 10_000;
/// The pause after which a socket that cannot be bound is tried again, in seconds.
const BIND_RETRY_S: u64 = 30;
/// The source of this service's warnings.
const WARNINGS: &str = "docker";

/// The state of Docker's plugin, which outlives restarts of its services.
pub(crate) struct Docker {
    /// The plugin's socket; `None` if it is not served on this host.
    socket: Option<PathBuf>,
    /// A listener that systemd has passed.
    passed: Mutex<Option<OwnedFd>>,
    plugin: Plugin<DaemonBackend>,
    attachments: Arc<Attachments>,
    networks: Arc<Networks>,
    lists: Lists,
    events: Events,
    /// The driver's name in Docker.
    driver: String,
    /// Whether Docker has, or has had, the ready network in this run.
    offered: AtomicBool,
    warnings: Warnings,
}

impl Docker {
    /// Prepares the plugin.
    ///
    /// # Errors
    /// The record of an earlier run cannot be read.
    pub(crate) fn new(
        settings: &Settings,
        store: &Store,
        (attachments, networks): (Arc<Attachments>, Arc<Networks>),
        passed: Option<OwnedFd>,
        warnings: Warnings,
    ) -> Result<Self, StoreError> {
        let state: Option<State> = store.load(FILE)?;
        let state = state.unwrap_or_else(|| State::new(rand::random()));
        let backend = DaemonBackend::new(Arc::clone(&attachments), Arc::clone(&networks), store)?;
        let socket = plugin_socket(settings);
        let driver = socket.as_deref().and_then(|path| path.file_stem()).and_then(|it| it.to_str());
        let driver = driver.unwrap_or(DRIVER).to_owned();
        let lists = Lists::new(&attachments.resolve.docker_socket, &driver);
        Ok(Self {
            socket,
            passed: Mutex::new(passed),
            plugin: Plugin::new(backend, state),
            attachments,
            networks,
            lists,
            events: Events::default(),
            driver,
            offered: AtomicBool::new(false),
            warnings,
        })
    }

    /// The listener for this run of the service.
    fn listen(&self) -> std::io::Result<Option<ApiListener>> {
        let passed = self.passed.lock().unwrap_or_else(PoisonError::into_inner);
        match (&*passed, &self.socket) {
            // The descriptor stays open for the next run.
            (Some(passed), _) => ApiListener::adopt(passed.try_clone()?).map(Some),
            (None, Some(path)) => socket::bind(path).map(Some),
            (None, None) => Ok(None),
        }
    }

    async fn plugin_is_ready(&self) {
        self.attachments.wait_restored().await;
        while self
            .attachments
            .ranges(Vni::WEFT)
            .await
            .is_some_and(|ranges| ranges.waiting.is_some())
        {
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    }

    fn is_served(&self) -> bool {
        let passed = self.passed.lock().unwrap_or_else(PoisonError::into_inner);
        passed.is_some() || self.socket.is_some()
    }

    /// Whether Docker's events are followed; `None` where Docker is of no concern.
    pub(crate) fn status(&self) -> Option<DockerStatus> {
        self.events.status()
    }

    /// Waits until Docker is of concern: its plugin is served, or `weft attach` has attached a container of it.
    async fn concerns(&self) {
        if !self.is_served() {
            self.attachments.a_docker_container().await;
        }
    }

    /// Waits until Docker has no request open, or that has lasted too long.
    async fn quiet(&self) {
        let limit = Duration::from_millis(QUIET_LIMIT_MS);
        let _ = tokio::time::timeout(limit, self.plugin.quiet()).await;
    }

    /// Looks at containers of `weft attach` that have changed in Docker.
    async fn look_again(&self, changes: &Changes) {
        let ours = self.attachments.docker_containers();
        for container in ours.iter().filter(|id| changes.all || changes.containers.contains(*id)) {
            supervisor::beat();
            self.quiet().await;
            if !self.attachments.look_again(container).await {
                self.events.keep(container);
            }
        }
    }

    /// Compares the plugin's record with the lists of Docker and of this host.
    async fn compare(&self) {
        self.quiet().await;
        let read = self.lists.read().await;
        let (read, unreadable) = match read {
            Ok(read) => (read, None),
            Err(why) => (None, Some(format!("cannot read Docker's networks: {why}"))),
        };
        let has_ready = read.as_ref().map(|read| read.has_ready);
        if let Some(read) = &read {
            self.attachments.name_endpoints(&read.names).await;
        }
        let networks = read.map(|read| read.ours);
        let listing = self.attachments.docker_listing(networks, &self.networks).await;
        let Reconciled { unknown_networks, missing_links } = self.plugin.reconcile(&listing).await;
        let mut warnings: Vec<String> = unreadable.into_iter().collect();
        warnings.extend(unknown_networks.iter().map(|network| {
            format!(
                "Docker's network {network} has the driver weft, and Weft has no record of it: remove and create it again"
            )
        }));
        warnings.extend(missing_links.iter().map(|endpoint| {
            format!("Docker's endpoint {endpoint} has lost its interface: restart its container")
        }));
        warnings.extend(self.offer(has_ready).await);
        self.warnings.set(WARNINGS, warnings);
    }

    /// Creates the ready network in Docker, once for each run of the daemon. Returns a warning.
    async fn offer(&self, has_ready: Option<bool>) -> Option<String> {
        let is_offered = self.offered.load(Ordering::Relaxed);
        match has_ready {
            None => return None,
            Some(false) if !is_offered => {}
            Some(_) => {
                self.offered.store(true, Ordering::Relaxed);
                return None;
            }
        }
        let range = self.attachments.ranges(Vni::WEFT).await?.v4;
        match self.lists.create_ready(range).await {
            Ok(()) => {
                tracing::info!("created the network weft in Docker");
                self.offered.store(true, Ordering::Relaxed);
                None
            }
            Err(why) => Some(format!(
                "Docker does not take the network weft: {why}; docker network create -d weft --ipam-driver weft --subnet {range} weft makes it"
            )),
        }
    }
}

impl Drop for Docker {
    fn drop(&mut self) {
        // Systemd's socket stays, and starts the daemon again.
        let passed = self.passed.lock().unwrap_or_else(PoisonError::into_inner);
        if let (None, Some(path)) = (&*passed, &self.socket) {
            socket::remove(path);
        }
    }
}

/// Serves the plugin's socket, for as long as it is polled.
pub(crate) async fn serve(docker: Arc<Docker>, pulse: Pulse) {
    loop {
        match docker.listen() {
            Ok(None) => return,
            Ok(Some(listener)) => {
                let serving = weft_api::serve(listener, router(docker.plugin.clone()));
                let ended = pulse.wait(serving).await;
                tracing::error!(?ended, "Docker's plugin no longer listens");
            }
            Err(error) => {
                let path = docker.socket.as_deref().unwrap_or_else(|| "-".as_ref()).display();
                let text = format!(
                    "Docker's plugin is not served at {path}: {error}; end the other program, or launch with --docker-plugin off"
                );
                docker.warnings.set("docker plugin", vec![text]);
            }
        }
        pulse.wait(tokio::time::sleep(Duration::from_secs(BIND_RETRY_S))).await;
        docker.warnings.set("docker plugin", Vec::new());
    }
}

/// Follows Docker's events, for as long as it is polled.
pub(crate) async fn follow_events(docker: Arc<Docker>, pulse: Pulse) {
    pulse.wait(docker.concerns()).await;
    let engine = &docker.attachments.resolve.docker_socket;
    let is_attached = |id: &str| docker.attachments.has_docker_container(id);
    docker.events.follow(engine, &docker.driver, is_attached, &pulse).await;
}

/// Keeps the plugin's record and the names of containers in order, for as long as it is polled.
pub(crate) async fn keep_comparing(docker: Arc<Docker>, pulse: Pulse) {
    pulse.wait(docker.concerns()).await;
    // Addresses and interfaces can be had from then on.
    pulse.wait(docker.plugin_is_ready()).await;
    loop {
        docker.look_again(&docker.events.take()).await;
        if docker.is_served() {
            docker.compare().await;
        }
        let is_offered = docker.offered.load(Ordering::Relaxed) || !docker.is_served();
        let pause = Duration::from_secs(if is_offered { COMPARE_EVERY_S } else { OFFER_EVERY_S });
        let change = async {
            tokio::select! {
                () = docker.attachments.new_endpoint() => {}
                () = docker.events.changed() => {}
            }
        };
        if pulse.wait(tokio::time::timeout(pause, change)).await.is_ok() {
            // The engine lists it once its request has been answered.
            pulse.wait(tokio::time::sleep(Duration::from_millis(LISTED_MS))).await;
        }
    }
}

/// The driver's name in Docker: that of the socket.
const DRIVER: &str = "weft";
