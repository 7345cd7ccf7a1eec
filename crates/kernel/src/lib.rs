//! linux: wanted state -> kernel state: links, bridge, addresses, routes, neighbours.
#![forbid(unsafe_code)]
