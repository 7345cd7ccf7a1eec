//! Counters of threads: for users, and for the kernel, which hands flows out by load.

pub(crate) mod counters;
pub(crate) mod worker_load;
