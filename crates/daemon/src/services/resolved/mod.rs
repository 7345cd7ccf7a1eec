//! The host's own resolver: where systemd-resolved runs, it learns at which addresses Weft answers for the names of
//! containers, those of each network that the host is exposed to. Elsewhere nothing happens, and `weft status` says so.
//!
//! systemd-resolved forgets the settings when the interface goes or it is restarted itself; both are followed.

mod bus;
mod plan;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Duration;

use tokio::sync::watch;

use self::bus::{Bus, BusError};
pub(crate) use self::plan::Interfaces;
use self::plan::{Setting, wanted};
use crate::services::supervisor::Pulse;
use crate::upkeep::warnings::Warnings;

/// The interval between looks at the interface, in milliseconds.
const LOOK_MS: u64 = 2_000;
/// The pause before a bus that is not there, or a refused call, is tried again, in milliseconds.
const RETRY_MS: u64 = 15_000;
/// The time to take the settings back when the daemon ends, in milliseconds.
const REVERT_LIMIT_MS: u64 = 1_000;
/// The bus of a host (D-Bus specification, section "Well-known Message Bus Instances").
const SYSTEM_BUS: &str = "unix:path=/run/dbus/system_bus_socket";
const SYSTEM_BUS_VARIABLE: &str = "DBUS_SYSTEM_BUS_ADDRESS";

/// The address of the bus, if it is that of this host's network.
static ADDRESS: OnceLock<Option<String>> = OnceLock::new();

/// Finds the bus. Call it before the daemon gives up the right to look at other processes.
///
/// A daemon in a separate network namespace does not use the bus of the machine: systemd-resolved there means other
/// interfaces by the same numbers.
pub(crate) fn find_bus() {
    let named = std::env::var(SYSTEM_BUS_VARIABLE).ok().filter(|address| !address.is_empty());
    let network = |process: &str| {
        let found = std::fs::metadata(format!("/proc/{process}/ns/net")).ok()?;
        Some((found.dev(), found.ino()))
    };
    let is_hosts = network("self").is_some() && network("self") == network("1");
    let _ = ADDRESS.set(named.or_else(|| is_hosts.then(|| SYSTEM_BUS.to_owned())));
}

/// How the host itself resolves names of containers.
pub(crate) struct Resolved {
    /// The domain of the names.
    domain: String,
    bus: Option<String>,
    served: watch::Receiver<BTreeSet<SocketAddr>>,
    state: Mutex<State>,
    /// The settings that systemd-resolved has, and where it was told.
    told: tokio::sync::Mutex<Option<Told>>,
    warnings: Warnings,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum State {
    /// DNS is not answered.
    Off,
    /// DNS is answered.
    On {
        /// What systemd-resolved knows.
        told: Vec<Setting>,
        /// The reason why the host does not resolve the names of network `weft`, or of any.
        lack: Option<String>,
    },
}

#[derive(Clone, Debug)]
struct Told {
    bus: Bus,
    owner: String,
    settings: Vec<Setting>,
}

impl Resolved {
    /// `served` are the addresses at which DNS is answered.
    pub(crate) fn new(
        domain: String,
        served: watch::Receiver<BTreeSet<SocketAddr>>,
        warnings: Warnings,
    ) -> Self {
        let bus = ADDRESS.get().cloned().flatten();
        Self::with_bus(domain, bus, served, warnings)
    }

    fn with_bus(
        domain: String,
        bus: Option<String>,
        served: watch::Receiver<BTreeSet<SocketAddr>>,
        warnings: Warnings,
    ) -> Self {
        let (state, told) = (Mutex::new(State::Off), tokio::sync::Mutex::default());
        Self { domain, bus, served, state, told, warnings }
    }

    /// How programs of this host resolve names of containers, for people; `None`: DNS is not answered.
    pub(crate) fn state(&self) -> Option<String> {
        match &*self.state.lock().unwrap_or_else(PoisonError::into_inner) {
            State::Off => None,
            State::On { told, lack } => {
                let asked = |it: &Setting| {
                    let servers: Vec<String> = it.servers.iter().map(ToString::to_string).collect();
                    format!("{} for {}", servers.join(" and "), it.domain)
                };
                let asked: Vec<String> = told.iter().map(asked).collect();
                let told = Some(asked).filter(|asked| !asked.is_empty());
                let told = told.map(|asked| format!("systemd-resolved asks {}", asked.join(", ")));
                let lack = lack.as_ref();
                let lack = lack.map(|why| format!("does not resolve {}: {why}", self.domain));
                Some(told.into_iter().chain(lack).collect::<Vec<_>>().join("; "))
            }
        }
    }

    /// Takes the settings back, since the daemon ends.
    pub(crate) async fn end(&self) {
        let limit = Duration::from_millis(REVERT_LIMIT_MS);
        if tokio::time::timeout(limit, self.revert()).await.is_err() {
            tracing::warn!("systemd-resolved does not take the settings back in time");
        }
    }

    async fn revert(&self) {
        let Some(Told { bus, owner, settings }) = self.told.lock().await.take() else { return };
        for setting in settings {
            revert(&bus, &owner, &setting).await;
        }
    }

    /// Notes which settings systemd-resolved has, or is about to have.
    async fn note(&self, bus: &Bus, owner: &str, settings: Vec<Setting>) {
        let (bus, owner) = (bus.clone(), owner.to_owned());
        *self.told.lock().await = Some(Told { bus, owner, settings });
    }

    /// The settings that this systemd-resolved has.
    async fn told(&self, owner: &str) -> Vec<Setting> {
        let told = self.told.lock().await;
        let own = told.as_ref().filter(|told| told.owner == owner);
        own.map(|told| told.settings.clone()).unwrap_or_default()
    }

    fn set_state(&self, state: State) {
        *self.state.lock().unwrap_or_else(PoisonError::into_inner) = state;
    }

    fn lacks(&self, why: &str) {
        self.set_state(State::On { told: Vec::new(), lack: Some(why.to_owned()) });
    }
}

/// Takes the settings of an interface back.
async fn revert(bus: &Bus, owner: &str, setting: &Setting) {
    // Whatever is gone has no settings any more.
    if let Err(error) = bus.revert(owner, setting.index).await {
        tracing::debug!(%error, "the settings of systemd-resolved are gone already");
    }
}

/// Keeps systemd-resolved informed. `look` finds this host's interfaces on networks.
pub(crate) async fn keep<F>(
    resolved: std::sync::Arc<Resolved>,
    look: impl Fn() -> F + Send + Sync + 'static,
    pulse: Pulse,
) where
    F: Future<Output = Vec<Interfaces>> + Send,
{
    let mut served = resolved.served.clone();
    loop {
        // The guard of the value must not outlive the wait.
        let answers = async { served.wait_for(|served| !served.is_empty()).await.map(drop) };
        if pulse.wait(answers).await.is_err() {
            return pulse.wait(std::future::pending()).await;
        }
        let retry = Duration::from_millis(RETRY_MS);
        match &resolved.bus {
            None => resolved.lacks("weft runs in a separate network namespace"),
            Some(address) => {
                if let Err(error) = follow(&resolved, address, &look, &pulse).await {
                    tracing::debug!(%error, "no systemd-resolved");
                }
                *resolved.told.lock().await = None;
                resolved.warnings.set("systemd-resolved", Vec::new());
                resolved.lacks("systemd-resolved does not run");
            }
        }
        pulse.wait(tokio::time::sleep(retry)).await;
    }
}

/// Follows systemd-resolved and the interface until the connection to the bus ends.
async fn follow<F>(
    resolved: &Resolved,
    address: &str,
    look: &(impl Fn() -> F + Send + Sync),
    pulse: &Pulse,
) -> Result<(), BusError>
where
    F: Future<Output = Vec<Interfaces>> + Send,
{
    let bus = Bus::connect(address).await?;
    let mut owners = bus.owners().await?;
    let mut owner = bus.owner().await?;
    let mut served = resolved.served.clone();
    loop {
        let addresses = served.borrow_and_update().clone();
        let pause = match &owner {
            // Its settings ended with it.
            None => {
                *resolved.told.lock().await = None;
                resolved.warnings.set("systemd-resolved", Vec::new());
                resolved.lacks("systemd-resolved does not run");
                RETRY_MS
            }
            Some(owner) => tell(resolved, &bus, owner, &look().await, &addresses).await,
        };
        let event = async {
            tokio::select! {
                next = owners.next() => Some(next),
                Ok(()) = served.changed() => None,
                () = tokio::time::sleep(Duration::from_millis(pause)) => None,
            }
        };
        match pulse.wait(event).await {
            Some(Some(next)) => owner = next,
            // The bus has ended, and with it all that was told.
            Some(None) => return Ok(()),
            None => {}
        }
    }
}

/// Tells systemd-resolved what has changed. Returns the pause before the next look, in milliseconds.
async fn tell(
    resolved: &Resolved,
    bus: &Bus,
    owner: &str,
    networks: &[Interfaces],
    served: &BTreeSet<SocketAddr>,
) -> u64 {
    let (wanted, lack) = wanted(networks, &resolved.domain, served);
    let (mut told, over): (Vec<Setting>, Vec<Setting>) =
        resolved.told(owner).await.into_iter().partition(|setting| wanted.contains(setting));
    for setting in over {
        revert(bus, owner, &setting).await;
    }
    let mut failures = Vec::new();
    for setting in wanted {
        if told.contains(&setting) {
            continue;
        }
        // Noted before: a daemon that ends half-way takes back what was set.
        told.push(setting.clone());
        resolved.note(bus, owner, told.clone()).await;
        match bus.set(owner, &setting).await {
            Ok(()) => {
                let Setting { domain, servers, .. } = &setting;
                tracing::info!(?servers, domain, "systemd-resolved knows the names");
            }
            Err(error) => {
                told.pop();
                revert(bus, owner, &setting).await;
                failures.push((setting.domain, error.to_string()));
            }
        }
    }
    resolved.note(bus, owner, told.clone()).await;
    let warning = |(domain, error): &(String, String)| {
        format!(
            "this host does not resolve {domain}: {error}; if systemd-networkd manages Weft's interfaces, exclude them there (Unmanaged=yes)"
        )
    };
    resolved.warnings.set("systemd-resolved", failures.iter().map(warning).collect());
    let of_weft = failures.iter().find(|(domain, _)| *domain == resolved.domain);
    let lack = of_weft.map(|(_, error)| error.clone()).or(lack.map(|lack| lack.to_string()));
    resolved.set_state(State::On { told, lack });
    if failures.is_empty() { LOOK_MS } else { RETRY_MS }
}
