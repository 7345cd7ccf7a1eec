//! The eBPF programs of the vector engine before the verifiers of the guests' kernels, the oldest of which gives up
//! soonest.

use weft_io::steer::{FrameSteering, TAP_WORKERS_MAX};
use weft_io::tap::{Tap, TapOptions};

#[test]
fn frames_are_shared_out_among_any_number_of_workers() -> anyhow::Result<()> {
    let tap = Tap::open(&TapOptions::new("tap0"))?;
    let steering = FrameSteering::new()?;
    for workers in 1..=TAP_WORKERS_MAX {
        let steered = steering.steer(&tap, workers);
        steered.map_err(|error| anyhow::anyhow!("{workers} workers: {error}"))?;
    }
    Ok(())
}
