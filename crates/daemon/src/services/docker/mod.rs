//! Docker's network and IPAM driver: serves the plugin's socket, and compares its record with Docker's lists.
//!
//! A request of Docker's is never answered by asking Docker: the engine waits for the plugin. The comparison runs
//! in a separate service.

mod backend;
mod listing;
mod socket;

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use weft_api::ApiListener;
use weft_container::docker_plugin::{Plugin, Reconciled, State, router};
use weft_path::Vni;

use self::backend::{DaemonBackend, FILE};
use self::listing::Lists;
pub(crate) use self::socket::{plugin_socket, prepare};
use super::attach::Attachments;
use super::networks::Networks;
use super::supervisor::Pulse;
use crate::config::Settings;
use crate::upkeep::store::{Store, StoreError};
use crate::upkeep::warnings::Warnings;

/// The interval between two comparisons with Docker's lists, in seconds.
const COMPARE_EVERY_S: u64 = 30;
/// The same until an engine has the ready network, in seconds.
const OFFER_EVERY_S: u64 = 2;
/// From a container's start until its name is read, in milliseconds.
const LISTED_MS: u64 = 300;
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
        let lists = Lists::new(&attachments.resolve.docker_socket, driver.unwrap_or(DRIVER));
        Ok(Self {
            socket,
            passed: Mutex::new(passed),
            plugin: Plugin::new(backend, state),
            attachments,
            networks,
            lists,
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

    /// Compares the plugin's record with the lists of Docker and of this host.
    async fn compare(&self) {
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

/// Keeps the plugin's record in order, for as long as it is polled.
pub(crate) async fn keep_comparing(docker: Arc<Docker>, pulse: Pulse) {
    if !docker.is_served() {
        return;
    }
    // Addresses and interfaces can be had from then on.
    pulse.wait(docker.plugin_is_ready()).await;
    loop {
        docker.compare().await;
        let pause = match docker.offered.load(Ordering::Relaxed) {
            true => COMPARE_EVERY_S,
            false => OFFER_EVERY_S,
        };
        let pause = Duration::from_secs(pause);
        let new = pulse.wait(tokio::time::timeout(pause, docker.attachments.new_endpoint())).await;
        if new.is_ok() {
            // The engine lists it once its request has been answered.
            pulse.wait(tokio::time::sleep(Duration::from_millis(LISTED_MS))).await;
        }
    }
}

/// The driver's name in Docker: that of the socket.
const DRIVER: &str = "weft";
