//! The local API: each call and the method of [`Daemon`] that answers it.

pub(crate) mod daemon;
mod requests;
pub(crate) mod views;

use std::future::Future;
use std::sync::Arc;

use axum::Router;
use tokio::runtime::Handle;
use weft_api::call::{self, Nothing};
use weft_api::{ApiError, ClientRequest, ErrorKind, Routes, WorkersRequest};
use weft_container::cni::{
    CniAttach, CniAttachments, CniCheck, CniDetach, CniStatus, StatusRequest,
};

use self::daemon::{CHANGES_MAX, Daemon};
use crate::services::supervisor::Aborted;

type State = Arc<Daemon>;

/// The routes of a daemon.
pub(crate) fn router(daemon: Arc<Daemon>) -> Router {
    let routes = Routes::new();
    let routes = of_containers(of_host(routes));
    of_users(of_gateway(routes)).with_state(daemon)
}

/// The host: its state, peers, networks and names.
fn of_host(routes: Routes<Daemon>) -> Routes<Daemon> {
    routes
        .on(call::Status, async |d: State, Nothing {}| Ok(d.report().await?.status))
        .on(call::Connections, async |d: State, Nothing {}| Ok(d.report().await?.connections))
        .on(call::Paths, async |d: State, Nothing {}| Ok(d.report().await?.paths))
        .on(call::Peers, async |d: State, Nothing {}| Ok(d.report().await?.peers))
        .on(call::Targets, async |d: State, Nothing {}| Ok(d.target_list()))
        .on(call::Ipam, async |d: State, Nothing {}| d.ipam().await)
        .on(call::Attachments, async |d: State, Nothing {}| Ok(d.attachments.list().await))
        .on(call::Report, async |d: State, Nothing {}| d.report().await)
        .on(call::Networks, async |d: State, Nothing {}| d.networks.list().await)
        .on(call::NetworkCreate, async |d: State, request| {
            change(&d.clone(), async move { d.networks.create(request).await }).await
        })
        .on(call::NetworkRemove, async |d: State, request| {
            change(&d.clone(), async move { d.networks.remove(request).await }).await
        })
        .on(call::Traffic, async |d: State, Nothing {}| {
            aside(&d.services.clone(), async move { d.traffic().await }).await
        })
        .on(call::Workers, async |d: State, Nothing {}| d.ask_workers(None).await)
        .on(call::SetWorkers, async |d: State, wanted: WorkersRequest| {
            d.ask_workers(Some(wanted.workers)).await
        })
        .on(call::Connect, async |d: State, request| {
            change(&d.clone(), async move { d.connect(request).await }).await
        })
        .on(call::Forget, async |d: State, request| {
            change(&d.clone(), async move { d.forget(request).await }).await
        })
        .on(call::DnsLookup, async |d: State, request| d.dns_lookup(request).await)
        .on(call::DnsAdd, async |d: State, request| {
            Arc::clone(&d.names).add(d.control.clone(), request).await
        })
        .on(call::DnsRemove, async |d: State, request| {
            Arc::clone(&d.names).remove(d.control.clone(), request).await
        })
        .on(call::Token, async |d: State, Nothing {}| {
            aside(&d.services.clone(), async move { Ok(d.invitation().await) }).await
        })
        .on(call::Stop, async |d: State, Nothing {}| {
            d.stop();
            Ok(Nothing {})
        })
}

/// Containers, by hand and by CNI.
fn of_containers(routes: Routes<Daemon>) -> Routes<Daemon> {
    routes
        .on(call::Attach, async |d: State, request| {
            change(&d.clone(), async move { d.attachments.attach(request).await }).await
        })
        .on(call::Detach, async |d: State, request| {
            change(&d.clone(), async move { d.detach(request).await }).await
        })
        .on(call::Expose, async |d: State, request| {
            let daemon = Arc::clone(&d);
            let expose = async move { d.attachments.expose(request).await };
            change(&daemon, expose).await
        })
        .on(call::Hide, async |d: State, request| {
            change(&d.clone(), async move { d.attachments.hide(request).await }).await
        })
        .on(CniAttach, async |d: State, request| {
            change(&d.clone(), async move { Ok(d.cni.attach(request).await) }).await
        })
        .on(CniDetach, async |d: State, request| {
            change(&d.clone(), async move { Ok(d.cni.detach(request).await) }).await
        })
        .on(CniCheck, async |d: State, key| {
            aside(&d.services.clone(), async move { Ok(d.cni.check(key).await) }).await
        })
        .on(CniAttachments, async |d: State, Nothing {}| Ok(d.cni.list().await))
        .on(CniStatus, async |d: State, StatusRequest { network }| Ok(d.cni.status(&network).await))
}

/// The gateway: its authority, its settings and its clients.
fn of_gateway(routes: Routes<Daemon>) -> Routes<Daemon> {
    routes
        .on(call::AuthorityInit, async |d: State, Nothing {}| {
            change(&d.clone(), async move { d.gateway.clone().init_authority().await }).await
        })
        .on(call::AuthorityMove, async |d: State, request| {
            change(&d.clone(), async move { d.gateway.clone().move_authority(request).await }).await
        })
        .on(call::AuthorityRestore, async |d: State, request| {
            let gateway = d.gateway.clone();
            change(&d, async move { gateway.restore_authority(request).await }).await
        })
        .on(call::Serve, async |d: State, request| {
            change(&d.clone(), async move { d.gateway.clone().serve(request).await }).await
        })
        .on(call::ServeStop, async |d: State, Nothing {}| {
            change(&d.clone(), async move { d.gateway.clone().stop().await }).await
        })
        .on(call::Import, async |d: State, request| {
            change(&d.clone(), async move { d.gateway.clone().import(request).await }).await
        })
        .on(call::ImportCrl, async |d: State, request| {
            change(&d.clone(), async move { d.gateway.clone().import_crl(request).await }).await
        })
        .on(call::ClientIssue, async |d: State, request: ClientRequest| {
            change(&d.clone(), async move { d.gateway.clone().issue(request.name).await }).await
        })
        .on(call::ClientRevoke, async |d: State, request: ClientRequest| {
            change(&d.clone(), async move { d.gateway.clone().revoke(request.name).await }).await
        })
        .on(call::ClientShared, async |d: State, request| {
            change(&d.clone(), async move { d.gateway.clone().shared_profile(request).await }).await
        })
        .on(call::Clients, async |d: State, Nothing {}| Ok(d.gateway.clients().await))
}

/// Users of the gateway who log in with passwords.
fn of_users(routes: Routes<Daemon>) -> Routes<Daemon> {
    routes
        .on(call::UserAdd, async |d: State, request| {
            change(&d.clone(), async move { d.gateway.clone().add_user(request).await }).await
        })
        .on(call::UserPassword, async |d: State, request| {
            change(&d.clone(), async move { d.gateway.clone().set_password(request).await }).await
        })
        .on(call::UserTotp, async |d: State, request| {
            change(&d.clone(), async move { d.gateway.clone().set_totp(request).await }).await
        })
        .on(call::UserRemove, async |d: State, request| {
            change(&d.clone(), async move { d.gateway.clone().remove_user(request).await }).await
        })
        .on(call::Users, async |d: State, Nothing {}| Ok(d.gateway.users()))
}

/// Makes a change on the services' runtime. It goes on to its end if its caller leaves: half of it would be neither
/// the state before nor the one asked for.
async fn change<T: Send + 'static>(
    daemon: &Daemon,
    change: impl Future<Output = Result<T, ApiError>> + Send + 'static,
) -> Result<T, ApiError> {
    let Ok(permit) = Arc::clone(&daemon.changes).try_acquire_owned() else {
        let text = format!("{CHANGES_MAX} changes wait for their turn already; try again later");
        return Err(ApiError::new(ErrorKind::Unavailable, text));
    };
    let task = daemon.services.spawn(async move {
        let _permit = permit;
        change.await
    });
    task.await.map_err(|_| failed())?
}

/// Answers a request on the services' runtime, since the kernel may block the caller. The task ends with its
/// caller.
async fn aside<T: Send + 'static>(
    services: &Handle,
    answer: impl Future<Output = Result<T, ApiError>> + Send + 'static,
) -> Result<T, ApiError> {
    Aborted::new(services.spawn(answer)).await.map_err(|_| failed())?
}

fn failed() -> ApiError {
    ApiError::new(ErrorKind::Internal, "the request failed; weft.log says why")
}
