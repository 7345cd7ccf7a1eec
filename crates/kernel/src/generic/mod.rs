//! Generic netlink: what the families openvswitch and ovpn are spoken to by.

pub(crate) mod codec;
pub(crate) mod socket;
