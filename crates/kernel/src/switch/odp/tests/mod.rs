//! Tests of the pure parts.
#![allow(clippy::unwrap_used)]

mod codec;
mod datapath;
mod flows;
mod limits;
mod locks;
mod networks;
mod world;
