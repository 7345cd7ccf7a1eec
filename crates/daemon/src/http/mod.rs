//! The local API: each call and the method of [`Daemon`] that answers it.

pub(crate) mod requests;
mod views;

use std::sync::Arc;

use axum::Router;
use weft_api::call::{self, Nothing};
use weft_api::{Routes, WorkersRequest};

use self::requests::Daemon;

type State = Arc<Daemon>;

/// The routes of a daemon.
pub(crate) fn router(daemon: Arc<Daemon>) -> Router {
    Routes::new()
        .on(call::Status, async |d: State, Nothing {}| Ok(d.report().await?.status))
        .on(call::Connections, async |d: State, Nothing {}| Ok(d.report().await?.connections))
        .on(call::Paths, async |d: State, Nothing {}| Ok(d.report().await?.paths))
        .on(call::Peers, async |d: State, Nothing {}| Ok(d.report().await?.peers))
        .on(call::Targets, async |d: State, Nothing {}| Ok(d.target_list()))
        .on(call::Ipam, async |d: State, Nothing {}| d.ipam().await)
        .on(call::Attachments, async |d: State, Nothing {}| Ok(d.attachments.list().await))
        .on(call::Report, async |d: State, Nothing {}| d.report().await)
        .on(call::Traffic, async |d: State, Nothing {}| d.traffic().await)
        .on(call::Workers, async |d: State, Nothing {}| d.ask_workers(None).await)
        .on(call::SetWorkers, async |d: State, wanted: WorkersRequest| {
            d.ask_workers(Some(wanted.workers)).await
        })
        .on(call::Attach, async |d: State, request| d.attachments.attach(request).await)
        .on(call::Detach, async |d: State, request| d.detach(request).await)
        .on(call::Connect, async |d: State, request| d.connect(request).await)
        .on(call::Forget, async |d: State, request| d.forget(request).await)
        .on(call::Token, async |d: State, Nothing {}| Ok(d.invitation().await))
        .on(call::Stop, async |d: State, Nothing {}| {
            d.stop();
            Ok(Nothing {})
        })
        .with_state(daemon)
}
