//! Shared parts of the tests of the guest's kernel: hosts with a network between them, and captures there.
//! Streams of numbered datagrams, and other programs' reports of the kernel's state.

pub mod flow;
pub mod foreign;
pub mod host;
pub mod kernel_memory;
pub mod nat;
pub mod packet_ids;
pub mod stage;
pub mod wire;
pub mod xfrm;

pub use self::flow::{Flow, FlowReport};
pub use self::kernel_memory::KernelMemory;
pub use self::nat::Nat;
pub use self::packet_ids::PacketIds;
pub use self::stage::{Outer, Stage};
pub use self::wire::{Block, LeakWatch, Netem};

use std::time::Duration;

use weft_bench::sandbox::slowness;

/// A path that failed is replaced within this time (`docs/design/paths.md`).
pub const FAIL_OVER_LIMIT: Duration = Duration::from_secs(3);
/// Until hosts that were just started have found their best path, on a real machine.
pub const SETTLE_LIMIT: Duration = Duration::from_secs(15);
/// Time until the best path is back after it was blocked. It is tried again after up to a minute, and must then
/// prove itself for ten seconds (`docs/design/paths.md`).
pub const BACK_LIMIT_S: u64 = 150;

/// A limit for times that depend on the product's clocks, which an emulated machine does not slow down. It
/// divides by [`slowness`], since waits multiply limits by it.
#[must_use]
pub fn by_clock(seconds: u64) -> Duration {
    Duration::from_secs(seconds) / slowness()
}

/// Prints a figure measured in the run.
pub fn figure(name: &str, value: impl std::fmt::Display) {
    weft_bench::sandbox::progress::note(&format!("measured: {name}: {value}"));
}

/// The seed of this run: `WEFT_SEED`, or a random one. It is printed.
///
/// # Errors
/// `WEFT_SEED` is not a number.
pub fn seed() -> anyhow::Result<u64> {
    let seed = match std::env::var("WEFT_SEED") {
        Ok(text) => text.trim().parse()?,
        Err(_) => rand::random(),
    };
    weft_bench::sandbox::progress::note(&format!("seed: run again with WEFT_SEED={seed}"));
    Ok(seed)
}

/// The directory of files that leave the guest: `/out` in the VM lab, else the sandbox's own.
///
/// # Errors
/// The folder cannot be made.
pub fn artefacts(stage: &Stage) -> anyhow::Result<std::path::PathBuf> {
    let out = std::path::PathBuf::from("/out");
    Ok(if out.is_dir() { out } else { stage.directory().to_owned() })
}
