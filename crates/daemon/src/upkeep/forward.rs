//! The accept rules for frames of the networks' bridges, where br_netfilter passes them to a firewall such as Docker's.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use weft_kernel::engine::SwitchKind;
use weft_kernel::{ForwardRule, Kernel, KernelError};

use crate::core::networks::HeldList;
use crate::devices::{SWITCH, bridge_of};
use crate::services::supervisor::Pulse;

/// Pause after the accept rules could not be maintained.
const RETRY: Duration = Duration::from_secs(10);

/// Keeps the accept rules, for as long as it is polled.
pub(crate) async fn keep_accepted(
    kernel: Kernel,
    switch: SwitchKind,
    mut held: watch::Receiver<HeldList>,
    pulse: Pulse,
) {
    if switch != SwitchKind::Bridge {
        return;
    }
    let Ok(mut rule) = ForwardRule::new(kernel, SWITCH) else { return };
    let mut told = None;
    loop {
        let reason = follow(&mut rule, &mut held, &pulse).await.err().map(|it| it.to_string());
        if reason != told {
            tracing::warn!(reason, "this host's firewall may drop bridged frames");
            told = reason;
        }
        pulse.wait(tokio::time::sleep(RETRY)).await;
    }
}

/// Removes the accept rules.
pub(crate) async fn remove_accepted(kernel: &Kernel) {
    let Ok(mut rule) = ForwardRule::new(kernel.clone(), SWITCH) else { return };
    if let Err(error) = rule.remove().await {
        tracing::debug!(%error, "no accept rule to remove");
    }
}

async fn follow(
    rule: &mut ForwardRule,
    held: &mut watch::Receiver<HeldList>,
    pulse: &Pulse,
) -> Result<(), KernelError> {
    let mut watch = rule.watch()?;
    loop {
        let networks = Arc::clone(&held.borrow_and_update());
        let others = networks.iter().map(|held| bridge_of(held.definition.vni));
        let bridges: Vec<String> = [SWITCH.to_owned()].into_iter().chain(others).collect();
        rule.set_bridges(&bridges)?;
        rule.ensure().await?;
        let kept = async {
            tokio::select! {
                kept = rule.keep(&mut watch) => kept.map(|()| true),
                changed = held.changed() => match changed {
                    Ok(()) => Ok(false),
                    Err(_) => std::future::pending().await,
                },
            }
        };
        if pulse.wait(kept).await? {
            tracing::info!("updated the accept rules for bridged frames");
        }
    }
}
