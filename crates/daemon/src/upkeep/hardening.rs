//! Bounds of the daemon, whoever starts it: what it gives up at start, and what it tells of that.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use super::landlock::{self, Places};
use super::privileges;
use crate::config::Settings;

/// By the name of each means: `on`, or `off: ` and why. It is the process's, for good.
static STATE: OnceLock<BTreeMap<String, String>> = OnceLock::new();

/// What bounds this process.
pub(crate) fn state() -> BTreeMap<String, String> {
    STATE.get().cloned().unwrap_or_default()
}

/// Gives up what is not needed, for this process and all that it starts. Call it while there is one thread,
/// once the state and runtime directories are there, and after what mounts something
/// ([`weft_kernel::open_settings`]). A kernel that lacks one of the means leaves a daemon that works.
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
            tracing::warn!("{means} does not bound the daemon: {error:#}");
            format!("off: {error:#}")
        });
        (means.to_owned(), told)
    })
    .collect();
    let _ = STATE.set(state);
}
