//! Devices of the host and of containers, with their addresses, routes and neighbour entries, and the watches
//! over them.

pub(crate) mod addresses;
pub(crate) mod attach;
pub(crate) mod belongings;
pub(crate) mod bridge;
pub(crate) mod clients;
pub(crate) mod devices;
pub(crate) mod expose;
pub(crate) mod ipv6;
pub(crate) mod link;
pub(crate) mod link_watch;
pub(crate) mod neighbours;
pub(crate) mod pair;
pub(crate) mod port_watch;
pub(crate) mod route;
pub(crate) mod route_watch;
pub(crate) mod traffic;
pub(crate) mod tunnel;
pub(crate) mod vpn;
pub(crate) mod vxlan;
