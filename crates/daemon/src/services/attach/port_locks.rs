//! The port lock: a container sends only from its own Ethernet address and IP addresses, unless the user allows
//! others (`--allow-macs`). The host's own port is not locked.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Notify;
use weft_api::PortLockStatus;
use weft_kernel::engine::{KernelEngine, SwitchKind};
use weft_kernel::{Kernel, LockCounts, NftWatch, PortLock, PortLocks};

use super::maker::Maker;
use super::{Attachments, Saved, mac_of};
use crate::devices::HOST_INTERFACE;
use crate::services::supervisor::Pulse;
use crate::upkeep::warnings::Warnings;

/// The interval between looks at the locks, without a notice of a change.
const LOOK: Duration = Duration::from_secs(10);
/// A status is no older than this if one was asked for before.
const FRESH: Duration = Duration::from_secs(1);
/// The key of the warnings.
const WARNINGS: &str = "port lock";

/// The locks of this host's ports.
pub(crate) struct Locks {
    /// Those of bridges. A datapath has its own.
    bridges: Option<PortLocks>,
    engine: KernelEngine,
    seen: Mutex<(PortLockStatus, Option<Instant>)>,
    asked: Notify,
}

impl Locks {
    /// The locks of the ports that the last run has left. Nothing is written yet.
    pub(super) fn new<'a>(
        kernel: &Kernel,
        engine: &KernelEngine,
        saved: impl Iterator<Item = &'a Saved>,
    ) -> Self {
        let wanted = saved.map(|saved| (saved.host_interface.clone(), lock_of(saved))).collect();
        let bridges = (engine.switch() == SwitchKind::Bridge)
            .then(|| PortLocks::new(kernel.clone(), HOST_INTERFACE, wanted).ok())
            .flatten();
        let (seen, asked) = (Mutex::default(), Notify::new());
        Self { bridges, engine: engine.clone(), seen, asked }
    }

    /// The state for `weft status` at the last look. If that was not just now, there is another one soon.
    pub(crate) fn status(&self) -> PortLockStatus {
        let (status, at) = self.seen.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if at.is_none_or(|at| at.elapsed() >= FRESH) {
            self.asked.notify_one();
        }
        status
    }

    /// Sets what an attachment may send from. Call it before its port carries frames. A failure is tried again by
    /// [`keep`], which also warns of it.
    pub(super) async fn set(&self, saved: &Saved) {
        let (port, lock) = (&saved.host_interface, lock_of(saved));
        let set = match &self.bridges {
            Some(locks) => locks.set(port, lock).await,
            None => self.engine.lock_port(port, lock).await,
        };
        if let Err(error) = set {
            tracing::debug!(%error, port, "cannot lock a port yet");
        }
    }

    /// The attachment has ended.
    pub(super) async fn forget(&self, saved: &Saved) {
        let port = &saved.host_interface;
        let forgotten = match &self.bridges {
            Some(locks) => locks.forget(port).await,
            None => self.engine.lock_port(port, None).await,
        };
        if let Err(error) = forgotten {
            tracing::debug!(%error, port, "cannot forget a port's lock yet");
        }
    }

    async fn look(&self) -> Result<LockCounts, String> {
        match &self.bridges {
            Some(locks) => locks.ensure().await.map_err(|error| error.to_string()),
            None => Ok(self.engine.lock_counts().await),
        }
    }
}

/// The addresses that an attachment may send from; `None`: any.
fn lock_of(saved: &Saved) -> Option<PortLock> {
    if saved.maker == Maker::Host || saved.attachment.allow_macs {
        return None;
    }
    let addresses = saved.attachment.addresses.iter().map(ipnet::IpNet::addr).collect();
    Some(PortLock { mac: mac_of(&saved.attachment).0, addresses })
}

/// Keeps the locks, and warns while they do not stand or drop frames, for as long as it is polled.
pub(crate) async fn keep(attachments: Arc<Attachments>, warnings: Warnings, pulse: Pulse) {
    let locks = attachments.locks();
    let mut watch: Option<NftWatch> = None;
    loop {
        if watch.is_none() {
            watch = locks.bridges.as_ref().and_then(|locks| locks.watch().ok());
        }
        let looked = locks.look().await;
        let ports = looked.as_ref().map(|counts| counts.ports.clone()).unwrap_or_default();
        let containers = attachments.containers_of(&ports).await;
        warnings.set(WARNINGS, warnings_of(&looked, &containers));
        let status = match looked {
            Ok(LockCounts { dropped, .. }) => {
                PortLockStatus { on: true, reason: None, dropped, containers }
            }
            Err(reason) => PortLockStatus { reason: Some(reason), ..PortLockStatus::default() },
        };
        let seen = (status, Some(Instant::now()));
        *locks.seen.lock().unwrap_or_else(PoisonError::into_inner) = seen;
        let changed = async {
            match &mut watch {
                Some(watch) => tokio::select! {
                    changed = watch.changed() => changed,
                    () = locks.asked.notified() => Ok(()),
                },
                None => {
                    locks.asked.notified().await;
                    Ok(())
                }
            }
        };
        let waited = pulse.wait(tokio::time::timeout(LOOK, changed)).await;
        if matches!(waited, Ok(Err(_))) {
            watch = None;
        }
    }
}

fn warnings_of(looked: &Result<LockCounts, String>, containers: &[String]) -> Vec<String> {
    match looked {
        Err(reason) => vec![format!(
            "port lock: off, so a container can send under another's addresses: {reason}"
        )],
        Ok(_) if containers.is_empty() => Vec::new(),
        Ok(_) => vec![format!(
            "port lock: dropped frames of {} under addresses that are not the container's own; if it may send from others, attach it by weft attach --allow-macs",
            containers.join(", ")
        )],
    }
}

impl Attachments {
    /// The locks of ports.
    pub(crate) const fn locks(&self) -> &Locks {
        &self.locks
    }

    /// The names of the containers behind these ports, or the ports' own.
    async fn containers_of(&self, ports: &[String]) -> Vec<String> {
        if ports.is_empty() {
            return Vec::new();
        }
        let inner = self.lock().await;
        let names: BTreeMap<&str, &str> = inner
            .saved
            .values()
            .map(|saved| (saved.host_interface.as_str(), saved.attachment.name.as_str()))
            .collect();
        let name = |port: &String| (*names.get(port.as_str()).unwrap_or(&port.as_str())).to_owned();
        ports.iter().map(name).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_warning_names_the_container_or_the_reason_and_a_remedy() {
        let quiet = Ok(LockCounts::default());
        assert_eq!(warnings_of(&quiet, &[]), Vec::<String>::new());
        let [dropped] = &warnings_of(&quiet, &["web".into(), "db".into()])[..] else { panic!() };
        assert!(dropped.contains("frames of web, db ") && dropped.contains("--allow-macs"));
        let [off] = &warnings_of(&Err("no nft".into()), &[])[..] else { panic!() };
        assert!(off.starts_with("port lock: off, ") && off.ends_with(": no nft"), "{off}");
    }
}
