//! linux: TUN/TAP and UDP in batches, offloads, namespaces: the only crate with unsafe.

pub mod namespace;
