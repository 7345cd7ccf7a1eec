//! One attempt to reach a target: name, addresses, QUIC handshake, admission.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::time::Duration;

use quinn::{Connection, ConnectionError};
use tokio::net::lookup_host;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use weft_crypto::PeerId;

use super::{Outcome, conclude};
use crate::admission;
use crate::error::Failure;
use crate::limits::{ADDRESS_STAGGER_MS, ADDRESSES_MAX, HANDSHAKE_TIMEOUT_MS};
use crate::shared::Shared;
use crate::socket::canonical;
use crate::target::{KeyHash, Target};
use crate::tls::{self, SERVER_NAME};

const HANDSHAKE_TIMEOUT: Duration = Duration::from_millis(HANDSHAKE_TIMEOUT_MS);

/// Tries all addresses of a target; calls `pending` when one has answered.
pub(crate) async fn attempt(
    shared: &Arc<Shared>,
    target: &Target,
    addresses: Vec<SocketAddr>,
    pending: impl FnOnce(),
) -> Result<Outcome, Failure> {
    let conn = connect(shared, target, addresses.clone()).await?;
    pending();
    let outcome = admit(shared, conn, false).await;
    // A peer soon forgets a connection that it refused, and answers later packets of it with a reset. quinn reports
    // the reset alone if the refusal was lost or came with it. One more attempt learns the reason.
    if outcome == Err(Failure::Reset) {
        let conn = connect(shared, target, addresses).await?;
        return admit(shared, conn, false).await.map_err(Failure::after_a_guess);
    }
    outcome
}

/// Replaces the connection of a link that is up.
pub(crate) async fn renew(shared: &Arc<Shared>, target: &Target) -> Result<Outcome, Failure> {
    let conn = connect(shared, target, Vec::new()).await?;
    admit(shared, conn, true).await
}

async fn admit(shared: &Arc<Shared>, conn: Connection, renewal: bool) -> Result<Outcome, Failure> {
    let admitted = admission::dialled(shared, conn.clone()).await?;
    conclude(shared, admitted, renewal, shared.timing.admission_timeout)
        .await
        .inspect_err(|failure| admission::tell(shared, &conn, failure))
}

/// Tries all addresses of a peer, or those that a target's name resolves to.
async fn connect(
    shared: &Arc<Shared>,
    target: &Target,
    known: Vec<SocketAddr>,
) -> Result<Connection, Failure> {
    let addresses = match known.is_empty() {
        true => resolve(shared, target).await?,
        false => known,
    };
    let mut tries = JoinSet::new();
    for (index, address) in addresses.into_iter().enumerate() {
        let (shared, expected) = (shared.clone(), target.key_hash.clone());
        tries.spawn(async move {
            sleep(Duration::from_millis(ADDRESS_STAGGER_MS) * index as u32).await;
            handshake(&shared, address, expected).await
        });
    }
    let mut failure = Failure::unreachable("no address");
    while let Some(tried) = tries.join_next().await {
        match tried {
            Ok(Ok(conn)) => return Ok(conn),
            // A key mismatch is more informative than silence.
            Ok(Err(error)) if !failure.is_refusal() => failure = error,
            Ok(Err(_)) | Err(_) => {}
        }
    }
    Err(failure)
}

pub(crate) async fn resolve(shared: &Shared, target: &Target) -> Result<Vec<SocketAddr>, Failure> {
    let host = &target.host;
    let failed = |reason: String| Failure::unreachable(format!("cannot look up {host}: {reason}"));
    let lookup = lookup_host((host.as_str(), target.port));
    let found = match timeout(HANDSHAKE_TIMEOUT, lookup).await {
        Ok(Ok(found)) => found,
        Ok(Err(error)) => return Err(failed(error.to_string())),
        Err(_) => return Err(failed("no answer".to_owned())),
    };
    let only_ipv4 = shared.endpoint.local_addr().is_ok_and(|local| local.is_ipv4());
    let mut addresses: Vec<SocketAddr> = Vec::new();
    for address in found.map(canonical) {
        let usable = address.is_ipv4() || !only_ipv4;
        if usable && !addresses.contains(&address) {
            addresses.push(address);
        }
    }
    addresses.truncate(ADDRESSES_MAX);
    if addresses.is_empty() {
        return Err(failed("it has no address of a family that this host uses".to_owned()));
    }
    Ok(addresses)
}

async fn handshake(
    shared: &Shared,
    address: SocketAddr,
    expected: Option<KeyHash>,
) -> Result<Connection, Failure> {
    let wanted = expected.clone();
    if let Some(wanted) = &wanted
        && let Some(other) = who_has(shared, address, wanted)
    {
        return Err(other_key(shared, address, other, wanted));
    }
    if is_own(shared, address) {
        return Err(Failure::Itself);
    }
    let (config, verifier) = tls::client_config(&shared.identity, &shared.timing, expected)
        .map_err(|error| Failure::unreachable(error.to_string()))?;
    let connecting = shared
        .endpoint
        .connect_with(config, address, SERVER_NAME)
        .map_err(|error| Failure::unreachable(format!("cannot connect to {address}: {error}")))?;
    let silent = || {
        Failure::unreachable(format!(
            "no answer from {address}/udp: is weft running there, and is the port open?"
        ))
    };
    match timeout(HANDSHAKE_TIMEOUT, connecting).await {
        Ok(Ok(conn)) => Ok(conn),
        Ok(Err(error)) => match (verifier.mismatch(), wanted) {
            (Some(peer), Some(wanted)) => Err(other_key(shared, address, peer, &wanted)),
            _ if matches!(error, ConnectionError::TimedOut) => Err(silent()),
            _ => Err(Failure::of_stranger(&error, &shared.versions)),
        },
        Err(_) => Err(silent()),
    }
}

/// The party known to be at an address without the wanted key: this host itself, or a linked peer. This needs
/// no packets.
fn who_has(shared: &Shared, address: SocketAddr, wanted: &KeyHash) -> Option<PeerId> {
    let state = shared.lock();
    let linked = state.links.iter().find(|(_, link)| link.remote() == address);
    let linked = linked.map(|(peer, _)| *peer);
    drop(state);
    let who = linked.or_else(|| is_own(shared, address).then_some(shared.me));
    who.filter(|who| !wanted.matches(*who))
}

/// Whether an address is this host's own, with this program listening on it.
fn is_own(shared: &Shared, address: SocketAddr) -> bool {
    let Ok(local) = shared.endpoint.local_addr() else { return false };
    let local = canonical(local);
    if local.port() != address.port() || !local.ip().is_unspecified() {
        return local == address;
    }
    // The kernel selects the destination itself as the source only if the destination is local. Sends no
    // packets.
    let any: IpAddr = match address {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let from = UdpSocket::bind((any, 0)).and_then(|socket| {
        socket.connect(address)?;
        socket.local_addr()
    });
    from.is_ok_and(|from| from.ip() == address.ip())
}

fn other_key(shared: &Shared, address: SocketAddr, peer: PeerId, wanted: &KeyHash) -> Failure {
    let who = if peer == shared.me { "this host itself" } else { "a host" };
    let key = KeyHash::short(peer);
    Failure::KeyMismatch {
        reason: format!(
            "{address} is {who} with another key: {key}, expected {wanted}. If it was reinstalled: weft forget {address}, and join again. Otherwise somebody may intercept the connection"
        ),
    }
}
