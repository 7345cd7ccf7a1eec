//! DNS for containers and the host: answers for the names of all hosts, and asks others for the rest.
//!
//! The pure part takes bytes, times and seeds: [`zone`] (the names of one moment), [`answer`], [`cache`],
//! [`exchange`] (one question upstream), [`throttle`], [`upstream`]. The service has the sockets. It builds a new
//! zone when the core says that names have changed, at most ten times a second.

pub(crate) mod announced;
mod answer;
mod cache;
mod counters;
mod exchange;
pub(crate) mod exposed;
mod requests;
mod server;
mod sockets;
mod throttle;
mod upstream;
mod waiting;
mod zone;

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use hickory_proto::rr::Name;
use ipnet::IpNet;
use tokio::sync::watch;
use weft_crypto::PeerId;
use weft_mesh::NameRecord;

pub(crate) use self::counters::Counters;
pub(crate) use self::server::serve;
use self::sockets::Listener;
use self::upstream::DNS_PORT;
use self::zone::{DEFAULT_NETWORK, Feed, Scope, Zone};
use crate::config::Settings;
use crate::upkeep::store::{Store, StoreError};
use crate::upkeep::warnings::Warnings;

/// The file of names given by hand.
const NAMES_FILE: &str = "names.json";
/// How long after the start a query for an unknown name may wait for hosts to tell their names, in milliseconds.
/// Less than the 5 s after which clients ask again.
const START_HOLD_MS: u64 = 3_000;
/// Sources that a listener on an address of the host serves: its own and neighbouring networks, not the Internet.
const PRIVATE: [&str; 9] = [
    "127.0.0.0/8",
    "10.0.0.0/8",
    "172.16.0.0/12",
    "192.168.0.0/16",
    "169.254.0.0/16",
    "100.64.0.0/10",
    "::1/128",
    "fc00::/7",
    "fe80::/10",
];

/// The state of the names service, which outlives its restarts.
pub(crate) struct Names {
    local: PeerId,
    domain: Name,
    /// Servers of the configuration; empty: those of the host's resolv.conf.
    upstreams: Vec<SocketAddr>,
    /// Addresses of the configuration on which queries are answered.
    listen: Vec<IpAddr>,
    /// All such addresses.
    listeners: watch::Sender<Vec<Listener>>,
    /// Those that are open.
    served: watch::Sender<BTreeSet<SocketAddr>>,
    zone: watch::Sender<Arc<Zone>>,
    /// The core's count of changes.
    changed: watch::Sender<u64>,
    /// Names given by hand, as saved.
    added: Mutex<Vec<NameRecord>>,
    /// Names that a service of this host announces.
    announced: Mutex<Arc<[NameRecord]>>,
    /// When the names of hosts that are still silent are waited for no longer.
    settles_by: Instant,
    /// Whether the containers of the last run are attached again.
    restored: AtomicBool,
    /// Held during a change of names by hand or announced ones, which waits for the disk or the core.
    changing: Mutex<()>,
    store: Store,
    warnings: Warnings,
    counters: Counters,
}

impl Names {
    /// Prepares the service.
    ///
    /// # Errors
    /// The file of names given by hand cannot be read.
    pub(crate) fn new(
        settings: &Settings,
        local: PeerId,
        store: Store,
    ) -> Result<Self, StoreError> {
        let saved: Vec<NameRecord> = store.load(NAMES_FILE)?.unwrap_or_default();
        // The settings have been checked.
        let mut domain = Name::from_ascii(&settings.dns_domain).unwrap_or_default();
        domain.set_fqdn(true);
        let feed = Feed { local, networks: Vec::new(), revision: 0 };
        let zone = Arc::new(Zone::build(Instant::now(), &domain, &feed));
        let listeners = settings.dns_listen.iter().map(|address| listener_on(*address)).collect();
        let upstreams =
            settings.dns_upstreams.iter().map(|it| SocketAddr::new(*it, DNS_PORT)).collect();
        Ok(Self {
            local,
            domain,
            upstreams,
            listen: settings.dns_listen.clone(),
            listeners: watch::Sender::new(listeners),
            served: watch::Sender::default(),
            zone: watch::Sender::new(zone),
            changed: watch::Sender::new(0),
            added: Mutex::new(saved.into_iter().filter(|it| it.fault().is_none()).collect()),
            announced: Mutex::default(),
            settles_by: Instant::now() + Duration::from_millis(START_HOLD_MS),
            restored: AtomicBool::new(false),
            changing: Mutex::default(),
            store,
            warnings: Warnings::default(),
            counters: Counters::default(),
        })
    }

    /// By this the core says that names have changed.
    pub(crate) fn bell(&self) -> watch::Sender<u64> {
        self.changed.clone()
    }

    /// The addresses at which queries are answered now.
    pub(crate) fn served(&self) -> watch::Receiver<BTreeSet<SocketAddr>> {
        self.served.subscribe()
    }

    /// The containers of the last run are attached again, as far as they can be.
    pub(crate) fn set_restored(&self) {
        self.restored.store(true, Ordering::Relaxed);
    }

    fn is_restored(&self) -> bool {
        self.restored.load(Ordering::Relaxed)
    }

    /// The domain of the names, without the final dot.
    pub(crate) fn domain(&self) -> String {
        self.domain.to_ascii().trim_end_matches('.').to_owned()
    }

    /// Problems of this host, which all parts of the daemon share.
    pub(crate) const fn warnings(&self) -> &Warnings {
        &self.warnings
    }

    /// Counters by name.
    pub(crate) const fn counters(&self) -> &Counters {
        &self.counters
    }

    fn zone_now(&self) -> Arc<Zone> {
        Arc::clone(&self.zone.borrow())
    }

    fn added_now(&self) -> Vec<NameRecord> {
        self.added.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// All names of this host but those of its endpoints.
    fn own_now(&self) -> Vec<NameRecord> {
        let mut all = self.added_now();
        all.extend_from_slice(&self.announced.lock().unwrap_or_else(PoisonError::into_inner));
        all
    }
}

/// A listener on an address of the host. Over loopback the host itself asks, and sees all networks.
fn listener_on(address: IpAddr) -> Listener {
    let scope = match address.to_canonical().is_loopback() {
        true => Scope::Host,
        false => Scope::Network(DEFAULT_NETWORK.to_owned()),
    };
    let clients = PRIVATE.iter().filter_map(|net| net.parse::<IpNet>().ok()).collect();
    let address = SocketAddr::new(address, DNS_PORT);
    Listener { address, scope, clients, forwards: true, is_exposed: false }
}
