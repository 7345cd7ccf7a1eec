//! What threads count: for the world, and for the kernel that hands flows out by load.

pub(crate) mod counters;
pub(crate) mod worker_load;
