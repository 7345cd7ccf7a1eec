//! Whether this host's own firewall blocks Weft's traffic, for status. The rules are read when they change.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use tokio::sync::watch;
use weft_kernel::engine::{KernelEngine, Support, SwitchKind};
use weft_kernel::{Carried, CarriedBridge, Kernel, KernelError, NftWatch, Obstacle};
use weft_path::Vni;

use crate::config::Settings;
use crate::core::networks::{HeldList, HeldNetwork};
use crate::devices::bridge_of;
use crate::services::supervisor::Pulse;

/// How long after a change the rules are read, in milliseconds: changes come in bursts.
const SETTLE_MS: u64 = 500;
/// How often the rules are read even without a change, in milliseconds: the kernel does not report when
/// br_netfilter is switched on.
const LOOK_MS: u64 = 60_000;

/// The obstacles found last.
#[derive(Clone, Default)]
pub(crate) struct Firewall(Arc<Mutex<Vec<Obstacle>>>);

impl Firewall {
    pub(crate) fn found(&self) -> Vec<Obstacle> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set(&self, found: Vec<Obstacle>) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if *known != found {
            for Obstacle { chain, effect, remedy } in &found {
                tracing::warn!(chain, effect, remedy, "this host's firewall");
            }
            *known = found;
        }
    }

    /// Checks repeatedly, for as long as it is polled. `held` are the networks besides `weft`.
    pub(crate) async fn keep(
        self,
        (kernel, engine): (Kernel, KernelEngine),
        settings: Settings,
        mut held: watch::Receiver<HeldList>,
        pulse: Pulse,
    ) {
        let mut told = None;
        loop {
            let followed = self.follow(&kernel, &engine, &settings, &mut held, &pulse);
            let Err(error) = followed.await;
            let error = error.to_string();
            if told.as_ref() != Some(&error) {
                tracing::info!(error, "cannot find out whether this host's firewall blocks Weft");
                told = Some(error);
            }
            pulse.wait(tokio::time::sleep(Duration::from_millis(LOOK_MS))).await;
        }
    }

    async fn follow(
        &self,
        kernel: &Kernel,
        engine: &KernelEngine,
        settings: &Settings,
        held: &mut watch::Receiver<HeldList>,
        pulse: &Pulse,
    ) -> Result<std::convert::Infallible, KernelError> {
        let mut watch = kernel.watch_foreign_rules()?;
        let mut support = engine.support();
        loop {
            let ipsec = matches!(&*support.borrow_and_update(), Support::Ready { esp: Ok(_), .. });
            let networks = Arc::clone(&held.borrow_and_update());
            let bridges = match engine.switch() {
                SwitchKind::Bridge => bridges(settings, &networks),
                SwitchKind::Odp => Vec::new(),
            };
            self.set(kernel.obstacles(&Carried { bridges, ipsec }).await?);
            let next = async {
                tokio::select! {
                    changed = support.changed() => match changed {
                        Ok(()) => Ok(()),
                        Err(_) => std::future::pending().await,
                    },
                    changed = held.changed() => match changed {
                        Ok(()) => Ok(()),
                        Err(_) => std::future::pending().await,
                    },
                    changed = settled(&mut watch) => changed,
                    () = tokio::time::sleep(Duration::from_millis(LOOK_MS)) => Ok(()),
                }
            };
            pulse.wait(next).await?;
        }
    }
}

/// The bridges of all networks, that of `weft` first. A network without a range has that of `weft`.
fn bridges(settings: &Settings, networks: &[HeldNetwork]) -> Vec<CarriedBridge> {
    let ranges_of = |range: Ipv4Net, range6: Option<Ipv6Net>| {
        std::iter::once(IpNet::V4(range)).chain(range6.map(IpNet::V6)).collect()
    };
    let weft = CarriedBridge {
        name: bridge_of(Vni::WEFT),
        ranges: ranges_of(settings.range, settings.range6),
    };
    let others = networks.iter().map(|HeldNetwork { definition, .. }| CarriedBridge {
        name: bridge_of(definition.vni),
        ranges: match definition.range {
            Some(range) => ranges_of(range, definition.range6),
            None => weft.ranges.clone(),
        },
    });
    let others: Vec<CarriedBridge> = others.collect();
    std::iter::once(weft).chain(others).collect()
}

/// Waits until rules have changed and a short time has passed.
async fn settled(watch: &mut NftWatch) -> Result<(), KernelError> {
    watch.changed().await?;
    tokio::time::sleep(Duration::from_millis(SETTLE_MS)).await;
    Ok(())
}
