//! Inbound connections, with a limit on those not yet admitted.

use std::sync::Arc;
use std::time::Duration;

use quinn::{Connection, Incoming};
use tokio::time::timeout;

use crate::error::{CloseCode, Failure};
use crate::gate::{Entry, Pass};
use crate::limits::HANDSHAKE_TIMEOUT_MS;
use crate::session::{Outcome, conclude};
use crate::shared::Shared;
use crate::socket::canonical;
use crate::{admission, tls};

/// Serves inbound connections until the endpoint is closed.
pub(crate) async fn run(shared: Arc<Shared>) {
    while let Some(incoming) = shared.endpoint.accept().await {
        let remote = canonical(incoming.remote_address());
        let validated = incoming.remote_address_validated();
        match shared.gate.enter(remote, validated, || shared.lock().standing(remote)) {
            Entry::Pass(pass) => {
                tokio::spawn(serve(shared.clone(), incoming, pass));
            }
            Entry::Retry => {
                // This fails only for a validated address, which never gets a retry.
                let _ = incoming.retry();
            }
        }
    }
}

/// Serves one inbound connection until it is admitted or refused.
async fn serve(shared: Arc<Shared>, incoming: Incoming, pass: Pass) {
    let handshake = async { incoming.accept()?.await };
    let limit = Duration::from_millis(HANDSHAKE_TIMEOUT_MS);
    let conn = tokio::select! {
        shaken = timeout(limit, handshake) => shaken,
        () = pass.evicted() => return,
    };
    let Ok(Ok(conn)) = conn else {
        // The remote end has shown no key: there is no peer to notify or to name.
        return;
    };
    let peer = tls::peer_of(&conn).map(|(peer, _)| peer);
    pass.shook_hands(peer.filter(|peer| shared.lock().knows(*peer)));
    let admit = admit(&shared, &conn, &pass);
    tokio::pin!(admit);
    let result = tokio::select! {
        biased;
        result = &mut admit => result,
        () = pass.evicted() => {
            conn.close(CloseCode::Busy.to_wire(), b"this host is busy with other connections");
            admit.await
        }
    };
    if let Err(failure) = &result {
        shared.tell_same_identity(failure);
    }
    if let (Err(failure), Some(peer)) = (result, peer)
        && is_worth_noting(&failure)
    {
        shared.note_refusal(conn.remote_address(), peer, &failure);
    }
}

async fn admit(shared: &Arc<Shared>, conn: &Connection, pass: &Pass) -> Result<Outcome, Failure> {
    let admitted = admission::accepted(shared, conn.clone(), pass).await?;
    conclude(shared, admitted, false, shared.timing.admission_timeout)
        .await
        .inspect_err(|failure| admission::tell(shared, conn, failure))
}

/// Excludes hosts that left by themselves, and this host's own attempts: they were not refused.
fn is_worth_noting(failure: &Failure) -> bool {
    let harmless = [
        CloseCode::Itself,
        CloseCode::Duplicate,
        CloseCode::Replaced,
        CloseCode::Shutdown,
        CloseCode::Unknown,
    ];
    failure.code().is_some_and(|code| !harmless.contains(&code))
}
