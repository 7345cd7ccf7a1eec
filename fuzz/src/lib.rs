//! What the fuzz targets do with any bytes: each panics if a property does not hold. No code of these
//! needs libFuzzer; `crates/lab/tests/corpus.rs` runs them over `fuzz/corpus` with each test run.

pub mod coalesce;
pub mod esp_open;
#[expect(dead_code, reason = "the tests of the engine use all of it")]
#[path = "../../crates/engine/src/tests/referee.rs"]
mod referee;
pub mod split;
pub mod vnet;
pub mod vxlan;
