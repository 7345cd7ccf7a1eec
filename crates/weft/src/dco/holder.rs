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

/// How long it may take at the end until all peers have ended, and again until all is told.
const FAREWELL_LIMIT: Duration = Duration::from_secs(2);

struct Holder {
    held: Held,
    lines: Arc<Lines>,
    directory: PathBuf,
    /// The device is removed, and its directory is somebody else's from now on.
    is_over: AtomicBool,
    /// Told when that is so.
    ended: Notify,
}

/// Where the directories and logs of devices are, in the runtime directory.
pub(super) const DEVICES: &str = "dco";

/// The directory of a device's process.
pub(super) fn directory(runtime_dir: &Path, device: &str) -> PathBuf {
    runtime_dir.join(DEVICES).join(device)
}

/// Holds a device until it is asked to end, by the verb or by a signal; `ready` is called once it answers.
/// The device is removed then. Where the process is killed, the kernel's stays.
pub(super) async fn hold(
    words: &NewIface,
    runtime_dir: &Path,
    ready: impl FnOnce(&Value),
) -> anyhow::Result<()> {
    weft_daemon::raise_descriptor_limit();
    // Before there is a device, so that no signal leaves one behind.
    let mut signals = Signals::new().context("cannot watch for signals")?;
    let directory = directory(runtime_dir, &words.device);
    let lines = Arc::new(Lines::new());
    // First the device: a name that no device can have makes no directory either.
    let held = Held::new(words, Arc::clone(&lines)).await?;
    let listener = match listen_in(&directory) {
        Ok(listener) => listener,
        Err(error) => {
            held.end_or_warn().await;
            // What is in it is somebody else's.
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
    served.context("the device's process cannot answer any more")
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

    /// Removes the device. Where that fails, all goes on as before.
    async fn end(&self) -> Result<(), ApiError> {
        self.held.end().await?;
        // Before the answer: whoever has it may make a device of this name, which another process holds.
        if !self.is_over.swap(true, Relaxed) {
            let _ = std::fs::remove_dir_all(&self.directory);
            self.ended.notify_one();
        }
        Ok(())
    }

    /// Waits until the device is removed and all is said.
    async fn farewell(&self, signals: &mut Signals) {
        loop {
            tokio::select! {
                () = self.ended.notified() => break,
                () = signals.next() => if let Err(error) = self.end().await {
                    tracing::error!(error = %error.error, "asked to end by a signal, in vain");
                },
            }
        }
        // What is not told in time is told to nobody.
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

    /// Waits for the next one.
    async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

/// One line for each thing that happens from now on.
fn listen(lines: &Lines, with_packets: bool) -> Response {
    Response::new(Body::from_stream(lines.listen(with_packets)))
}
