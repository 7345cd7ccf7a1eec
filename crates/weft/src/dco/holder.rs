//! The process that holds a device and its sockets, and answers the verbs.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use anyhow::Context;
use axum::body::Body;
use axum::extract::State;
use axum::response::Response;
use axum::routing::{get, post};
use axum::{Json, Router};
use serde_json::{Value, json};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::Notify;
use tokio::time::timeout;
use weft_api::{ApiError, ApiListener};

use super::args::NewIface;
use super::held::Held;
use super::lines::Lines;
use super::requests::Request;

/// Time limit at the end until all peers have ended, and again until all lines are sent.
const FAREWELL_LIMIT: Duration = Duration::from_secs(2);

struct Holder {
    held: Held,
    lines: Arc<Lines>,
    directory: PathBuf,
    /// The device is removed; another process may own its directory from now on.
    is_over: AtomicBool,
    /// Notified when that is so.
    ended: Notify,
}

/// The directory of devices and logs in the runtime directory.
pub(super) const DEVICES: &str = "dco";

/// The directory of a device's process.
pub(super) fn directory(runtime_dir: &Path, device: &str) -> PathBuf {
    runtime_dir.join(DEVICES).join(device)
}

/// Holds a device until the verb or a signal ends it; calls `ready` once it answers. Then it removes the
/// device. If the process is killed, the kernel's device stays.
pub(super) async fn hold(
    words: &NewIface,
    runtime_dir: &Path,
    ready: impl FnOnce(&Value),
) -> anyhow::Result<()> {
    weft_daemon::raise_descriptor_limit();
    // Registered before there is a device, so that no signal leaves one behind.
    let mut signals = Signals::new().context("cannot watch for signals")?;
    let directory = directory(runtime_dir, &words.device);
    let lines = Arc::new(Lines::new());
    // The device comes first: an invalid device name then creates no directory.
    let held = Held::new(words, Arc::clone(&lines)).await?;
    let listener = match listen_in(&directory) {
        Ok(listener) => listener,
        Err(error) => {
            held.end_or_warn().await;
            // Files in it belong to another process.
            let _ = std::fs::remove_dir(&directory);
            return Err(error);
        }
    };
    let (is_over, ended) = (AtomicBool::new(false), Notify::new());
    let holder = Arc::new(Holder { held, lines, directory, is_over, ended });
    ready(&holder.held.show());
    let served = tokio::select! {
        served = weft_api::serve(listener, router(Arc::clone(&holder))) => served,
        never = holder.held.follow() => match never {},
        () = holder.farewell(&mut signals) => return Ok(()),
    };
    holder.held.end_or_warn().await;
    let _ = std::fs::remove_dir_all(&holder.directory);
    served.context("the device's process can no longer answer")
}

fn listen_in(directory: &Path) -> anyhow::Result<ApiListener> {
    weft_daemon::make_private_dir(directory)?;
    weft_api::listen(&weft_api::socket_path(directory))
        .with_context(|| format!("cannot listen in {}", directory.display()))
}

fn router(holder: Arc<Holder>) -> Router {
    Router::new()
        .route(
            "/v1/dco",
            post(|State(holder): State<Arc<Holder>>, Json(request): Json<Request>| async move {
                let on_its_way = holder.lines.on_its_way();
                let mut response = weft_api::reply(holder.answer(request).await);
                response.extensions_mut().insert(on_its_way);
                response
            }),
        )
        .route(
            "/v1/notices",
            get(|State(holder): State<Arc<Holder>>| async move { listen(&holder.lines, false) }),
        )
        .route(
            "/v1/packets",
            get(|State(holder): State<Arc<Holder>>| async move { listen(&holder.lines, true) }),
        )
        .with_state(holder)
}

impl Holder {
    async fn answer(&self, request: Request) -> Result<Value, ApiError> {
        let held = &self.held;
        match request {
            Request::Show => Ok(held.show()),
            Request::NewPeer { peer, carrier, mark } => held.new_peer(&peer, &carrier, mark).await,
            Request::SetPeer { peer } => held.set_peer(&peer).await,
            Request::GetPeer { id } => held.peers(id).await,
            Request::DelPeer { id } => held.delete_peer(id).await,
            Request::NewKey { key } => held.new_key(&key).await,
            Request::GetKey { peer, slot } => held.key(peer, slot).await,
            Request::SwapKeys { peer } => held.swap_keys(peer).await,
            Request::DelKey { peer, slot } => held.delete_key(peer, slot).await,
            Request::Packet { peer, bytes } => held.packet(peer, &bytes).await,
            Request::End => self.end().await.map(|()| json!({})),
        }
    }

    /// Removes the device. If that fails, everything continues as before.
    async fn end(&self) -> Result<(), ApiError> {
        self.held.end().await?;
        // Before the answer: the caller may then create a device of this name, held by another process.
        if !self.is_over.swap(true, Relaxed) {
            let _ = std::fs::remove_dir_all(&self.directory);
            self.ended.notify_one();
        }
        Ok(())
    }

    /// Waits until the device is removed and all lines are sent.
    async fn farewell(&self, signals: &mut Signals) {
        loop {
            tokio::select! {
                () = self.ended.notified() => break,
                () = signals.next() => if let Err(error) = self.end().await {
                    tracing::error!(error = %error.error, "cannot stop after a signal");
                },
            }
        }
        // Lines that are not sent in time are lost.
        let _ = timeout(FAREWELL_LIMIT, self.lines.ends_told()).await;
        let _ = timeout(FAREWELL_LIMIT, self.lines.finish()).await;
    }
}

/// The signals that ask a process to end.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn new() -> io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
        })
    }

    /// Waits for the next signal.
    async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

/// Streams one line for each event from now on.
fn listen(lines: &Lines, with_packets: bool) -> Response {
    Response::new(Body::from_stream(lines.listen(with_packets)))
}
