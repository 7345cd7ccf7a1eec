//! The common parts of messages of all OVS families (`linux/openvswitch.h`).

use crate::netlink::{reader::u32_at, writer::Writer};

/// Length of `struct ovs_header`: the datapath's number, which is its own device's.
const OVS_HEADER_LEN: usize = 4;

/// Writes the header that every message of the OVS families has before its attributes.
pub(super) fn ovs_header(request: &mut Writer, datapath: u32) {
    request.raw(&datapath.to_ne_bytes());
}

/// The datapath's number and the attributes of a message of an OVS family.
pub(super) fn ovs_body(body: &[u8]) -> Option<(u32, &[u8])> {
    Some((u32_at(body, 0)?, body.get(OVS_HEADER_LEN..)?))
}
