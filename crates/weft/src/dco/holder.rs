//! The process that holds a device and its sockets, and answers the verbs.

use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::response::Response;
use axum::routing::{get, post};
use axum::{Json, Router};
use serde_json::{Value, json};
use tokio::sync::{Notify, broadcast, watch};

use super::args::NewIface;
use super::held::{Held, LINES_MAX, Lines};
use super::requests::Request;
use crate::api::{self, ApiError};

/// How long notices about the end, and then answers, may take to leave before the process ends.
const FAREWELL: Duration = Duration::from_millis(100);

struct Holder {
    held: Held,
    lines: Lines,
    /// The device is removed.
    ended: Notify,
    /// Whether who listens has been told all.
    told_all: watch::Sender<bool>,
}

/// Where the directories and logs of devices are, in the runtime directory.
pub(super) const DEVICES: &str = "dco";

/// The directory of a device's process.
pub(super) fn directory(runtime_dir: &Path, device: &str) -> PathBuf {
    runtime_dir.join(DEVICES).join(device)
}

/// Holds a device until it is asked to end; `ready` is called once it answers.
pub(super) async fn hold(
    words: &NewIface,
    runtime_dir: &Path,
    ready: impl FnOnce(&Value),
) -> anyhow::Result<()> {
    let directory = directory(runtime_dir, &words.device);
    let (lines, _) = broadcast::channel(LINES_MAX);
    // First the device: a name that no device can have makes no directory either.
    let held = Held::new(words, lines.clone()).await?;
    crate::daemon::make_private_dir(&directory)?;
    let listener = api::listen(&api::socket_path(&directory))
        .with_context(|| format!("cannot listen in {}", directory.display()))?;
    let told_all = watch::Sender::new(false);
    let holder = Arc::new(Holder { held, lines, ended: Notify::new(), told_all });
    ready(&holder.held.show());
    tokio::select! {
        served = api::serve_router(listener, router(Arc::clone(&holder))) => served?,
        never = holder.held.follow_routes() => match never {},
        () = farewell(&holder) => {}
    }
    let _ = std::fs::remove_dir_all(&directory);
    Ok(())
}

/// Waits until the device is removed and all is said.
async fn farewell(holder: &Holder) {
    holder.ended.notified().await;
    tokio::time::sleep(FAREWELL).await;
    holder.told_all.send_replace(true);
    tokio::time::sleep(FAREWELL).await;
}

fn router(holder: Arc<Holder>) -> Router {
    Router::new()
        .route(
            "/v1/dco",
            post(|State(holder): State<Arc<Holder>>, Json(request): Json<Request>| async move {
                api::reply(holder.answer(request).await)
            }),
        )
        .route(
            "/v1/notices",
            get(|State(holder): State<Arc<Holder>>| async move { listen(&holder, false) }),
        )
        .route(
            "/v1/packets",
            get(|State(holder): State<Arc<Holder>>| async move { listen(&holder, true) }),
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
            Request::End => {
                let answer = held.end().await;
                self.ended.notify_one();
                answer
            }
        }
    }
}

/// One line for each thing that happens from now on.
fn listen(holder: &Holder, packets: bool) -> Response {
    let receivers = (holder.lines.subscribe(), holder.told_all.subscribe());
    let lines =
        futures_util::stream::unfold(receivers, move |(mut receiver, mut end)| async move {
            loop {
                let line = tokio::select! {
                    biased;
                    line = receiver.recv() => line,
                    _ = end.wait_for(|told_all| *told_all) => return None,
                };
                let text = match line {
                    Ok(line) if line.is_packet && !packets => continue,
                    Ok(line) => format!("{}\n", line.text),
                    Err(broadcast::error::RecvError::Lagged(missed)) => {
                        format!("{}\n", json!({"name": "missed", "msg": {"lines": missed}}))
                    }
                    Err(broadcast::error::RecvError::Closed) => return None,
                };
                return Some((Ok::<_, Infallible>(Bytes::from(text)), (receiver, end)));
            }
        });
    Response::new(Body::from_stream(lines))
}
