//! Tests of the pure parts.
#![allow(clippy::unwrap_used)]

mod codec;
mod flows;
mod limits;
mod networks;
mod world;
