//! Forwarding of frames between containers and peers. On a bridge: the overlay's entries, limits on group frames,
//! announcements, and the view of ports that shortcuts are chosen by. Instead of a bridge: the datapath (`odp`).
//! Beside either: direct ports, and what a locked port may send from.

pub(crate) mod announce;
pub(crate) mod announcements;
pub(crate) mod direct;
pub(crate) mod groups;
pub mod odp;
pub(crate) mod overlay;
pub(crate) mod port_lock;
pub(crate) mod shortcut;
