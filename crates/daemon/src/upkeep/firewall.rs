//! Whether this host's own firewall blocks Weft's traffic, for status. The rules are read when they change.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use weft_kernel::engine::{KernelEngine, Support, SwitchKind};
use weft_kernel::{Carried, Kernel, KernelError, NftWatch, Obstacle};

use crate::config::Settings;
use crate::devices::SWITCH;
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

    /// Checks repeatedly, for as long as it is polled.
    pub(crate) async fn keep(
        self,
        kernel: Kernel,
        engine: KernelEngine,
        settings: Settings,
        pulse: Pulse,
    ) {
        let mut told = None;
        loop {
            let Err(error) = self.follow(&kernel, &engine, &settings, &pulse).await;
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
        pulse: &Pulse,
    ) -> Result<std::convert::Infallible, KernelError> {
        let mut watch = kernel.watch_foreign_rules()?;
        let mut support = engine.support();
        loop {
            let ipsec = matches!(&*support.borrow_and_update(), Support::Ready { esp: Ok(_), .. });
            let bridge = (engine.switch() == SwitchKind::Bridge).then(|| SWITCH.to_owned());
            let ranges = std::iter::once(settings.range.into());
            let ranges = ranges.chain(settings.range6.map(Into::into)).collect();
            self.set(kernel.obstacles(&Carried { bridge, ranges, ipsec }).await?);
            let next = async {
                tokio::select! {
                    changed = support.changed() => match changed {
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

/// Waits until rules have changed and a short time has passed.
async fn settled(watch: &mut NftWatch) -> Result<(), KernelError> {
    watch.changed().await?;
    tokio::time::sleep(Duration::from_millis(SETTLE_MS)).await;
    Ok(())
}
