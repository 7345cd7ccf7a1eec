//! Shortcuts: frames from containers with bridge ports to hosts on the vector engine go to that engine
//! directly. They are checked and repaired at intervals.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use weft_io::redirect::{MacSet, Shortcut};
use weft_kernel::engine::SwitchKind;
use weft_kernel::{AttachSpec, BridgePorts, Kernel};
use weft_path::Mac;

use super::{Attachments, sources};
use crate::config::{PortChoice, Settings};
use crate::devices::TAP;
use crate::services::supervisor::Pulse;

/// The interval between checks for changes to the ports: a new limit may be evaded for so long.
const KEEP_EVERY: Duration = Duration::from_secs(10);

/// All shortcuts of this host.
pub(crate) struct Shortcuts {
    /// The address set, or why there are no shortcuts; `None`: none are wanted.
    macs: Result<Arc<MacSet>, Option<String>>,
    /// The shortcuts by container port, or why a port has none.
    ports: Mutex<BTreeMap<String, Result<Open, String>>>,
    /// Notified when a port was added.
    due: Notify,
}

/// A shortcut in place.
struct Open {
    place: Place,
    /// The container's.
    mac: Mac,
    _shortcut: Shortcut,
}

/// The port it comes from and the device it goes to, by index.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Place {
    port: u32,
    tap: u32,
}

impl Shortcuts {
    /// No shortcuts yet; they share the address set of direct ports.
    pub(crate) fn new(
        settings: &Settings,
        switch: SwitchKind,
        macs: &Result<Arc<MacSet>, String>,
    ) -> Self {
        let macs = match (settings.port_mode, switch) {
            (PortChoice::Auto | PortChoice::Bridge | PortChoice::Direct, _) => Err(None),
            (PortChoice::Shortcut, SwitchKind::Odp) => Err(Some("--switch odp".to_owned())),
            (PortChoice::Shortcut, SwitchKind::Bridge) => macs.clone().map_err(Some),
        };
        if let Err(Some(reason)) = &macs {
            tracing::warn!(reason, "no shortcuts; all frames take the switch");
        }
        Self { macs, ports: Mutex::default(), due: Notify::new() }
    }

    /// Whether shortcuts are possible.
    pub(crate) const fn possible(&self) -> bool {
        self.macs.is_ok()
    }

    /// A container was attached, or has other addresses: it is checked soon.
    pub(crate) fn plugged_in(&self) {
        self.due.notify_one();
    }

    /// A container's port is removed or changes its kind.
    pub(crate) fn close(&self, port: &str) {
        let closed = self.ports().remove(port);
        // Dropped after the lock is released, since the kernel is slow here.
        self.end(closed);
    }

    /// Opens, moves and closes shortcuts so that exactly those of these containers that may have one do. `seen`
    /// is the state of the bridge, or why it is unknown.
    pub(crate) fn apply(
        &self,
        kernel: &Kernel,
        specs: &[AttachSpec],
        seen: &Result<BridgePorts, String>,
    ) {
        let Ok(macs) = &self.macs else { return };
        for spec in specs {
            let name = &spec.host_name;
            let old = self.ports().remove(name);
            let told = old.as_ref().and_then(|old| old.as_ref().err()).cloned();
            let mac = Mac(spec.mac);
            let new = match (place(name, seen), old) {
                (Ok(place), Some(Ok(open))) if open.place == place && open.mac == mac => Ok(open),
                (Ok(place), old) => {
                    self.end(old);
                    kernel
                        .shorten(place.port, spec.mac, place.tap, macs)
                        .map(|shortcut| Open { place, mac, _shortcut: shortcut })
                        .map_err(|error| error.to_string())
                }
                (Err(reason), old) => {
                    self.end(old);
                    Err(reason)
                }
            };
            match &new {
                Ok(_) => sources::allow(macs, spec),
                Err(reason) if told.as_ref() != Some(reason) => {
                    tracing::info!(container = spec.id, reason, "all its frames take the bridge");
                }
                Err(_) => {}
            }
            self.ports().insert(name.clone(), new);
        }
        let is_gone = |name: &String| !specs.iter().any(|spec| spec.host_name == *name);
        let gone: Vec<String> = self.ports().keys().filter(|name| is_gone(name)).cloned().collect();
        gone.iter().for_each(|name| self.close(name));
    }

    /// How many there are, and why there are no more.
    pub(crate) fn state(&self) -> (usize, Option<String>) {
        if let Err(reason) = &self.macs {
            return (0, reason.clone());
        }
        let ports = self.ports();
        let reason = ports.values().find_map(|port| port.as_ref().err()).cloned();
        (ports.values().flatten().count(), reason)
    }

    /// Closes a shortcut, if it is one. Its container sends from no address past the bridge then.
    fn end(&self, old: Option<Result<Open, String>>) {
        if let (Ok(macs), Some(Ok(open))) = (&self.macs, old) {
            sources::forbid(macs, open.mac);
        }
    }

    fn ports(&self) -> MutexGuard<'_, BTreeMap<String, Result<Open, String>>> {
        self.ports.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The ends of a port's shortcut, or why it has none.
fn place(name: &str, seen: &Result<BridgePorts, String>) -> Result<Place, String> {
    let seen = seen.as_ref().map_err(Clone::clone)?;
    if let Some(judge) = &seen.judge {
        return Err(format!("rules may see its frames on the bridge: {judge}"));
    }
    let port = seen.ports.get(name).ok_or_else(|| format!("{name} is not a port of the bridge"))?;
    if port.limited {
        return Err(format!("the ingress of {name} may be limited: tc qdisc show dev {name}"));
    }
    if port.cut_off {
        return Err(format!(
            "{name} is isolated, locked or not forwarding: bridge -d link show dev {name}"
        ));
    }
    let tap = seen.tap.ok_or_else(|| format!("{TAP} is not a port of the bridge"))?;
    Ok(Place { port: port.index, tap })
}

/// Keeps the shortcuts of all attachments in order, for as long as it is polled.
pub(crate) async fn keep_all(attachments: Arc<Attachments>, pulse: Pulse) {
    let shortcuts = attachments.shortcuts();
    let mut told = None;
    while shortcuts.possible() {
        let error = attachments.keep_shortcuts().await.err().map(|error| error.to_string());
        if error.is_some() && error != told {
            tracing::warn!(error, "no shortcuts: cannot list the bridge's ports");
        }
        told = error;
        let _ = pulse.wait(tokio::time::timeout(KEEP_EVERY, shortcuts.due.notified())).await;
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use weft_kernel::BridgePort;

    use super::*;

    const PORT: BridgePort =
        BridgePort { index: 4, limited: false, shaped: None, cut_off: false, captured: false };

    fn seen(port: BridgePort) -> BridgePorts {
        BridgePorts { tap: Some(3), ports: [("weftv1".to_owned(), port)].into(), judge: None }
    }

    #[test]
    fn a_port_has_a_shortcut_unless_something_on_the_bridge_is_meant_to_see_its_frames() {
        let found = place("weftv1", &Ok(seen(PORT)));
        assert!(found == Ok(Place { port: 4, tap: 3 }));
        let without: [(&str, Result<BridgePorts, String>); 6] = [
            ("ip nat x", Ok(BridgePorts { judge: Some("ip nat x".to_owned()), ..seen(PORT) })),
            ("may be limited", Ok(seen(BridgePort { limited: true, ..PORT }))),
            ("is isolated", Ok(seen(BridgePort { cut_off: true, ..PORT }))),
            ("weftv1 is not a port", Ok(BridgePorts { tap: Some(3), ..BridgePorts::default() })),
            ("weft-tap is not a port", Ok(BridgePorts { tap: None, ..seen(PORT) })),
            ("the kernel is busy", Err("the kernel is busy".to_owned())),
        ];
        for (reason, seen) in without {
            let said = place("weftv1", &seen).err().unwrap();
            assert!(said.contains(reason), "{said}");
        }
    }
}
