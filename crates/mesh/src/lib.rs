//! pure: membership, topology and routes, address ring, names: what hosts agree on.
#![forbid(unsafe_code)]
