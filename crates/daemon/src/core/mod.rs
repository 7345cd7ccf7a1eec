//! The core: the control loop, both engines behind one interface, and the queue of their events.

pub(crate) mod barriers;
pub(crate) mod control;
pub(crate) mod engines;
pub(crate) mod events;
mod kernel_queue;
pub(crate) mod networks;
pub(crate) mod ranges;
pub(crate) mod remote_macs;
mod request;
pub(crate) mod saving;
pub(crate) mod service_messages;
pub(crate) mod targets;
pub(crate) mod turns;
pub(crate) mod unheard;
