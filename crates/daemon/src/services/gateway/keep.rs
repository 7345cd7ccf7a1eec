//! The service: serves while that is wanted, and tidies up behind.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use ipnet::IpNet;
use tokio::sync::{mpsc, watch};
use weft_api::{ApiError, ErrorKind};
use weft_path::Vni;

use super::journal::Weight;
use super::serving::{Inputs, Serving};
use super::{BEGIN_LIMIT, Gateway, State, Wanted, device, late, way_out};
use crate::devices::{NETWORK, exposed_on};
use crate::services::supervisor::Pulse;

/// The pause before the gateway is tried again after a failure.
const RETRY: Duration = Duration::from_secs(5);
/// Requests that wait for the task.
const COMMANDS_MAX: usize = 64;

/// Serves while that is wanted, for as long as it is polled.
pub(crate) async fn keep(gateway: Arc<Gateway>, pulse: Pulse) {
    let mut wanted = gateway.wanted.subscribe();
    let mut last = None;
    pulse.wait(gateway.attachments.wait_restored()).await;
    loop {
        let now = wanted.borrow_and_update().clone();
        tidy(&gateway, last.take()).await;
        let Some(now) = now else {
            gateway.state.send_replace(State::Off);
            if pulse.wait(wanted.changed()).await.is_err() {
                return pulse.wait(std::future::pending()).await;
            }
            continue;
        };
        let ended = serve_once(&gateway, &now, &mut wanted, &pulse).await;
        last = Some(now.network().to_owned());
        gateway.note_end(ended.as_ref().err());
        if let Err(error) = ended {
            tracing::warn!(reason = error.error, "the OpenVPN gateway does not serve");
            let reason = Some(error.error);
            gateway.state.send_replace(State::Waiting { wanted: now, reason });
            let _ = pulse.wait(tokio::time::timeout(RETRY, wanted.changed())).await;
        }
    }
}

impl Gateway {
    /// The network that was served, or all that this host holds. On one that it holds no more it has no interface.
    fn to_tidy(&self, served: Option<&str>) -> Vec<Vni> {
        let held = self.networks.held();
        let held = held.borrow();
        let others = held.iter().map(|held| (held.definition.name.as_str(), held.definition.vni));
        let all = std::iter::once((NETWORK, Vni::WEFT)).chain(others);
        let wanted = all.filter(|(name, _)| served.is_none_or(|served| served == *name));
        wanted.map(|(_, vni)| vni).collect()
    }

    /// Tells those who watch that the gateway serves no more, or not for now.
    fn note_end(&self, error: Option<&ApiError>) {
        match error {
            Some(error) => {
                self.journal.line(Weight::Fault, &format!("the gateway ends: {}", error.error));
                self.journal.state("RECONNECTING", &error.error, &[]);
            }
            None => self.journal.state("EXITING", "", &[]),
        }
    }
}

async fn serve_once(
    gateway: &Arc<Gateway>,
    now: &Wanted,
    wanted: &mut watch::Receiver<Option<Wanted>>,
    pulse: &Pulse,
) -> Result<(), ApiError> {
    gateway.state.send_replace(State::Waiting { wanted: now.clone(), reason: None });
    gateway.journal.state("CONNECTING", "", &[]);
    let begin = tokio::time::timeout(BEGIN_LIMIT, gateway.begin(now));
    let (begun, events) = pulse.wait(begin).await.map_err(|_| {
        late("this host's interface on the network was not made in time; weft status says more")
    })??;
    let tools = gateway.open_tools(&now.request.tools).await?;
    let (status_file, management) = gateway.shown_tools(&now.request.tools);
    let own = begun.inside.own.iter().map(IpNet::addr);
    let own: Vec<IpAddr> = own.filter(|it| begun.has_ipv6 || it.is_ipv4()).collect();
    let (sender, commands) = mpsc::channel(COMMANDS_MAX);
    let shown = weft_api::Gateway {
        state: "serving".into(),
        listen: begun.listens(),
        network: now.network().to_owned(),
        addresses: begun.inside.own.clone(),
        engine: begun.channel.engine().into(),
        engine_reason: begun.channel.reason().cloned(),
        auth: now.request.login.auth,
        status_file,
        management,
        way_out: way_out::families(&begun.ways),
        client_up: now.request.client_up,
        client_down: now.request.client_down,
        ..weft_api::Gateway::default()
    };
    let mut serving = Serving::new(Arc::clone(gateway), begun);
    gateway.state.send_replace(State::Serving {
        wanted: now.clone(),
        shown: Box::new(shown),
        commands: sender,
    });
    gateway.journal.state("CONNECTED", "SUCCESS", &own);
    let mut tools = tools.start(gateway);
    let run = serving.run(Inputs { events, commands, wanted }, pulse);
    let ended = gateway.turns.watch(run).await;
    serving.farewell().await;
    // Their socket and their file are free before the gateway serves again.
    tools.shutdown().await;
    ended.map_err(|error| ApiError::new(ErrorKind::Unavailable, error))
}

/// Ends what the gateway has set up on the host: on its interface on the network that was served, or on those on all
/// networks, where the last daemon may have left it. Weft's own device has gone with its owner; the kernel's is removed
/// here.
async fn tidy(gateway: &Gateway, served: Option<String>) {
    gateway.unname_all();
    device::remove_leftover(&gateway.kernel).await;
    if let Err(error) = gateway.rules.lock().await.remove().await {
        tracing::debug!(%error, "no rules for OpenVPN clients to remove");
    }
    for vni in gateway.to_tidy(served.as_deref()) {
        if let Err(error) = gateway.kernel.forget_clients(&exposed_on(vni)).await {
            tracing::warn!(%error, "cannot remove what answered for OpenVPN clients");
        }
    }
}
