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
use tokio::sync::{Notify, broadcast};

use super::args::NewIface;
use super::held::{Held, LINES_MAX, Lines};
use super::requests::Request;
use crate::api::{self, ApiError};

/// How long an answer may take to leave before the process ends.
const FAREWELL: Duration = Duration::from_millis(100);

struct Holder {
    held: Held,
    lines: Lines,
    ended: Notify,
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
    let holder = Arc::new(Holder { held, lines, ended: Notify::new() });
    ready(&holder.held.show());
    tokio::select! {
        served = api::serve_router(listener, router(Arc::clone(&holder))) => served?,
        never = holder.held.follow_routes() => match never {},
        () = holder.ended.notified() => tokio::time::sleep(FAREWELL).await,
    }
    let _ = std::fs::remove_dir_all(&directory);
    Ok(())
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
            Request::NewPeer { peer, carrier } => held.new_peer(&peer, &carrier).await,
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
    let receiver = holder.lines.subscribe();
    let lines = futures_util::stream::unfold(receiver, move |mut receiver| async move {
        loop {
            let text = match receiver.recv().await {
                Ok(line) if line.is_packet && !packets => continue,
                Ok(line) => format!("{}\n", line.text),
                Err(broadcast::error::RecvError::Lagged(missed)) => {
                    format!("{}\n", json!({"name": "missed", "msg": {"lines": missed}}))
                }
                Err(broadcast::error::RecvError::Closed) => return None,
            };
            return Some((Ok::<_, Infallible>(Bytes::from(text)), receiver));
        }
    });
    Response::new(Body::from_stream(lines))
}
