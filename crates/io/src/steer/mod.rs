//! Steering: how the kernel shares packets out to several sockets or queues. A flow stays with one worker,
//! and a sender that sends too much fills its own queue.

mod datagrams;
mod frames;
mod load;

pub use self::datagrams::{bucket_of, by_lane_and_source};
pub use self::frames::{FLOW_PAUSE_NS, FrameSteering, bucket_of_mac};
pub use self::load::{Load, TICK_NS, tick};

/// Workers that can share a port and be told apart by lane.
pub const STEERED_WORKERS_MAX: usize = 256;
/// Workers that can share a TAP device: the kernel gives it 256 queues at most.
pub const TAP_WORKERS_MAX: usize = 256 / BUCKETS;
/// Sockets of each, among which the peers are shared out, and TAP queues, among which the containers are.
pub const BUCKETS: usize = 1 << BUCKET_BITS;
const BUCKET_BITS: u32 = 3;

/// 2^32 / phi: neighbouring addresses fall far from each other (Knuth, volume 3, section 6.4), five in a
/// row into five buckets.
pub const SPREAD: u32 = 0x9e37_79b9;
