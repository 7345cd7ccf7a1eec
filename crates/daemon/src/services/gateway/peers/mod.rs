//! The gateways of a mesh agree: on the authority and who is revoked, on clients' addresses, and on one session a name.
//!
//! `exchange` has the state, without sockets and files. This module carries its outputs out, beside the core.

mod addresses;
mod carry;
mod documents;
mod exchange;
#[cfg(feature = "faults")]
mod fuzzed;
mod handover;
mod homes;
mod message;
mod sessions;
mod shared;
#[cfg(test)]
mod simulation;

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::sync::{Notify, RwLock, Semaphore, oneshot, watch};
use weft_api::{ApiError, ErrorKind};
use weft_crypto::PeerId;
use zeroize::Zeroizing;

use self::addresses::{Key, Mapping};
use self::carry::Inputs;
pub(crate) use self::carry::keep;
use self::documents::Content;
use self::exchange::{Exchange, OtherGateway};
#[cfg(feature = "faults")]
pub use self::fuzzed::gateway_peers;
pub(super) use self::homes::IMPORT as IMPORT_FINGERPRINT;
use self::homes::Replica;
use self::message::Answered;
pub(super) use self::message::Forwarded as ToHome;
pub(super) use self::shared::{Held, Kept, REPLICA_FILE};
use crate::core::service_messages::Mailbox;
use crate::upkeep::store::{Store, StoreError};
use crate::upkeep::warnings::Warnings;

/// The file of what other gateways have told.
const PEERS_FILE: &str = "openvpn-peers.json";
/// The file of clients' addresses, by whomever they were given.
const ADDRESSES_FILE: &str = "openvpn-addresses.json";
/// How long a request waits for the answer of the authority's home.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);
/// How long the old home of an authority waits for the new one to take it.
const HAND_LIMIT: Duration = Duration::from_secs(30);
/// Requests of replicas under way at the home.
const FORWARDED_MAX: usize = 16;

/// What other gateways have told, as it is saved.
#[derive(Default, Serialize, Deserialize)]
#[serde(default)]
struct SavedPeers {
    replica: Option<Replica>,
    gateways: Vec<OtherGateway>,
}

/// The other gateways.
pub(crate) struct Peers {
    local: PeerId,
    /// The address that this host's user configured.
    host: Option<IpAddr>,
    warnings: Warnings,
    store: Store,
    state: Mutex<Exchange>,
    /// The state has outputs.
    bell: Notify,
    /// Counts what was carried out, for those who wait for it.
    news: watch::Sender<u64>,
    requests: AtomicU64,
    waiting: Mutex<BTreeMap<u64, oneshot::Sender<Answered>>>,
    inputs: tokio::sync::Mutex<Inputs>,
    forwarded: Arc<Semaphore>,
    /// Held to read while the mesh gives addresses, and to write while they are given back.
    giving: RwLock<()>,
    is_ending: AtomicBool,
}

impl Peers {
    /// The state of an earlier run.
    ///
    /// # Errors
    /// A file cannot be read.
    pub(crate) fn new(
        (local, host): (PeerId, Option<IpAddr>),
        mailbox: Mailbox,
        store: &Store,
        warnings: Warnings,
    ) -> Result<Self, StoreError> {
        let saved: SavedPeers = store.load(PEERS_FILE)?.unwrap_or_default();
        let mappings: Vec<Mapping> = store.load(ADDRESSES_FILE)?.unwrap_or_default();
        let before = (mappings, saved.gateways);
        Ok(Self {
            local,
            host,
            warnings,
            store: store.clone(),
            state: Mutex::new(Exchange::new(local, &shared::NAMES, saved.replica, before)),
            bell: Notify::new(),
            news: watch::Sender::default(),
            requests: AtomicU64::new(0),
            waiting: Mutex::default(),
            inputs: tokio::sync::Mutex::new(Inputs::new(mailbox)),
            forwarded: Arc::new(Semaphore::new(FORWARDED_MAX)),
            giving: RwLock::new(()),
            is_ending: AtomicBool::new(false),
        })
    }

    /// This gateway lets a client in: others end their sessions of the name.
    pub(super) fn let_in(&self, name: &str) {
        self.with(|state| state.let_in(name.to_owned(), unix_ms()));
    }

    /// A session of this gateway is over.
    pub(super) fn left(&self, name: &str) {
        self.with(|state| state.left(name));
    }

    /// Whether the newest session of a name is this gateway's.
    pub(super) fn is_here(&self, name: &str) -> bool {
        self.with(|state| state.is_here(name))
    }

    /// The addresses of a client, as all gateways know them.
    pub(super) fn addresses(&self, key: &Key) -> Option<Vec<IpAddr>> {
        self.with(|state| state.addresses(key)).map(|(_, addresses)| addresses)
    }

    /// The daemon ends: that other gateways know of this one stays.
    pub(super) fn close(&self) {
        self.is_ending.store(true, Ordering::Relaxed);
    }

    /// Whether the daemon ends.
    pub(super) fn is_ending(&self) -> bool {
        self.is_ending.load(Ordering::Relaxed)
    }

    /// Asks the authority's home, and waits for its answer.
    ///
    /// # Errors
    /// The home's refusal; or it is not linked, or does not answer in time.
    pub(super) async fn ask_home<T: DeserializeOwned>(
        &self,
        request: ToHome,
    ) -> Result<T, ApiError> {
        let id = self.requests.fetch_add(1, Ordering::Relaxed);
        let (reply, answer) = oneshot::channel();
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner).insert(id, reply);
        let (is_asked, home) = self.with(|state| {
            let home = state.replica().map(|replica| replica.nickname.clone());
            (state.ask_home(id, request), home.unwrap_or_default())
        });
        let answered = match is_asked {
            true => Some(tokio::time::timeout(ANSWER_LIMIT, answer).await),
            false => None,
        };
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner).remove(&id);
        let unavailable = |text: String| Err(ApiError::new(ErrorKind::Unavailable, text));
        match answered {
            None => unavailable(format!(
                "host {home} issues and revokes, and is not linked with this host now; nothing was changed: try again when weft status connections shows it, or run this there"
            )),
            Some(Ok(Ok(Answered::Done(body)))) => serde_json::from_value(body)
                .map_err(|error| ApiError::new(ErrorKind::Internal, format!("{home}: {error}"))),
            Some(Ok(Ok(Answered::Refused(error)))) => Err(error),
            Some(Ok(Err(_)) | Err(_)) => unavailable(format!(
                "host {home} issues and revokes, and has not answered within {} s: it may still do what was asked; run this there",
                ANSWER_LIMIT.as_secs()
            )),
        }
    }

    /// Gives the authority to a peer. `None`: it has not said what became of it.
    ///
    /// # Errors
    /// It does not take it, and this host may go on.
    pub(super) async fn hand(
        &self,
        to: PeerId,
        content: Zeroizing<String>,
    ) -> Result<Option<()>, ApiError> {
        let id = self.requests.fetch_add(1, Ordering::Relaxed);
        let (reply, answer) = oneshot::channel();
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner).insert(id, reply);
        let is_begun = self.with(|state| state.hand(to, id, Content(content)));
        let answered = match is_begun {
            true => Some(tokio::time::timeout(HAND_LIMIT, answer).await),
            false => None,
        };
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner).remove(&id);
        match answered {
            None => {
                Err(ApiError::new(ErrorKind::Unavailable, "it is not linked with this host now"))
            }
            Some(Ok(Ok(Answered::Done(_)))) => Ok(Some(())),
            Some(Ok(Ok(Answered::Refused(error)))) => Err(error),
            Some(Ok(Err(_)) | Err(_)) => Ok(None),
        }
    }

    /// Works on the state, and has what follows carried out.
    fn with<T>(&self, work: impl FnOnce(&mut Exchange) -> T) -> T {
        let done = work(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner));
        self.bell.notify_one();
        done
    }
}

/// Milliseconds since 1970.
fn unix_ms() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_millis()).unwrap_or(u64::MAX)
}
