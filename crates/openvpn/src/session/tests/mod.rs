//! Two of our ends over a channel in memory.
#![allow(clippy::unwrap_used)]

mod cases;
mod lossy;
mod net;
#[expect(dead_code, reason = "the referee uses all of it")]
#[path = "../../../tests/pki/mod.rs"]
mod pki;
