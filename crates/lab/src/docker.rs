//! Docker engines of Debian's packages on hosts of the lab.

use std::time::Duration;

use weft_bench::sandbox::docker::PACKAGES;
pub use weft_bench::sandbox::docker::{Engine, IMAGE};
use weft_bench::sandbox::{Host, Programs, Sandbox};

use crate::packages::unpacked;

/// How long an engine may take to start.
const START_LIMIT: Duration = Duration::from_secs(60);

/// The programs of an engine.
///
/// # Errors
/// A package cannot be fetched.
pub fn programs() -> anyhow::Result<Programs> {
    unpacked(&PACKAGES)
}

/// Starts an engine on a host and waits until it answers.
///
/// # Errors
/// As [`programs`], or the engine does not start.
pub fn start(sandbox: &Sandbox, host: &Host) -> anyhow::Result<Engine> {
    Ok(Engine::start(sandbox, host, programs()?, START_LIMIT)?)
}
