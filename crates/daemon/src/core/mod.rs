//! The core: the control loop, both engines behind one interface, and the queue of their events.

pub(crate) mod control;
pub(crate) mod engines;
pub(crate) mod events;
pub(crate) mod unheard;
