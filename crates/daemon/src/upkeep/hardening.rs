//! Sandboxing of the daemon, however it was started: the rights it drops at start, and the state it
//! reports.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use super::landlock::{self, Places};
use super::privileges;
use crate::config::Settings;

/// The state by mechanism: `on`, or `off: ` and the reason. It holds for the life of the process.
static STATE: OnceLock<BTreeMap<String, String>> = OnceLock::new();

/// The sandboxing of this process, by mechanism.
pub(crate) fn state() -> BTreeMap<String, String> {
    STATE.get().cloned().unwrap_or_default()
}

/// Drops the rights that this process and its children do not need. Call it while there is one thread, once
/// the state and runtime directories exist, and after [`weft_kernel::open_settings`], which mounts. If a
/// kernel lacks a mechanism, the daemon still works.
pub(crate) fn harden(settings: &Settings) {
    let landlock = landlock::restrict(&Places::of(settings)).map(|abi| format!("on (ABI {abi})"));
    let on = |result: anyhow::Result<()>| result.map(|()| "on".to_owned());
    let state = [
        ("landlock", landlock),
        ("capabilities", on(privileges::drop_capabilities())),
        ("seccomp", on(privileges::refuse_system_calls())),
    ]
    .into_iter()
    .map(|(means, result)| {
        let told = result.unwrap_or_else(|error| {
            tracing::warn!("{means} does not restrict the daemon: {error:#}");
            format!("off: {error:#}")
        });
        (means.to_owned(), told)
    })
    .collect();
    let _ = STATE.set(state);
}
