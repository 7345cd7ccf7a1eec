//! Inbound connections, few at a time until they are admitted.

use std::sync::Arc;
use std::time::Duration;

use quinn::Incoming;
use tokio::time::timeout;

use crate::error::{CloseCode, Failure};
use crate::limits::HANDSHAKE_TIMEOUT_MS;
use crate::session::conclude;
use crate::shared::Shared;
use crate::throttle::{Entry, Pass};
use crate::{admission, tls};

/// Serves inbound connections until the endpoint is closed.
pub(crate) async fn run(shared: Arc<Shared>) {
    while let Some(incoming) = shared.endpoint.accept().await {
        let source = incoming.remote_address().ip();
        match shared.gate.enter(source, incoming.remote_address_validated()) {
            Entry::Pass(pass) => {
                tokio::spawn(serve(shared.clone(), incoming, pass));
            }
            Entry::Retry => {
                // Fails only for a validated address, which is never asked to retry.
                let _ = incoming.retry();
            }
            Entry::Full => incoming.refuse(),
        }
    }
}

/// One inbound connection, until it is admitted or refused.
async fn serve(shared: Arc<Shared>, incoming: Incoming, _pass: Pass) {
    let handshake = async { incoming.accept()?.await };
    let limit = Duration::from_millis(HANDSHAKE_TIMEOUT_MS);
    let Ok(Ok(conn)) = timeout(limit, handshake).await else {
        // Nobody has shown a key: there is nobody to tell or to name.
        return;
    };
    let result = match admission::accepted(&shared, conn.clone()).await {
        Ok(admitted) => conclude(&shared, admitted, false, shared.timing.admission_timeout)
            .await
            .inspect_err(|failure| admission::tell(&shared, &conn, failure)),
        Err(failure) => Err(failure),
    };
    if let (Err(failure), Some((peer, _))) = (result, tls::peer_of(&conn))
        && is_worth_noting(&failure)
    {
        shared.note_refusal(conn.remote_address(), peer, &failure);
    }
}

/// Hosts that went away by themselves, and this host's own attempts, were not refused.
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
