//! Generic netlink, which the families openvswitch and ovpn use.

pub(crate) mod codec;
pub(crate) mod socket;
