//! Threads: workers, their helpers, and how many of these there are.

pub(crate) mod autoscaler;
pub(crate) mod busy_poll;
pub(crate) mod context;
pub(crate) mod event_loop;
pub(crate) mod helper;
pub(crate) mod pool;
pub(crate) mod scaling_policy;
pub(crate) mod shared;
pub(crate) mod thread;
pub(crate) mod turn;
pub(crate) mod worker;
