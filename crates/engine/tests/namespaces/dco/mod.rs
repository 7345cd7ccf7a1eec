//! Data channel devices in userspace, two and more, with real traffic between them.

mod carry;
mod crowd;
mod ends;
mod epochs;
mod fuzzed;
mod host;
mod routes;
mod sizes;
