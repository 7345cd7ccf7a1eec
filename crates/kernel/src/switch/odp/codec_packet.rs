//! Messages of the family ovs_packet: upcalls, and packets to be executed (`linux/openvswitch.h`).

use super::{
    codec::{ovs_body, ovs_header},
    codec_flow::{read_frame, write_actions, write_metadata},
    flow::{Frame, Output},
};
use crate::netlink::{
    generic,
    reader::{Message, attributes},
    writer::{Answer, Writer},
};

/// The family's name.
pub(super) const PACKET_FAMILY: &str = "ovs_packet";
const PACKET_VERSION: u8 = 1;
const CMD_MISS: u8 = 1;
const CMD_EXECUTE: u8 = 3;

const PACKET_ATTR_PACKET: u16 = 1;
const PACKET_ATTR_KEY: u16 = 2;
const PACKET_ATTR_ACTIONS: u16 = 3;
const PACKET_ATTR_HASH: u16 = 11;

/// A packet that no flow matched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Upcall<'a> {
    pub(super) datapath: u32,
    pub(super) frame: Frame,
    /// The packet from its Ethernet header on.
    pub(super) packet: &'a [u8],
    /// The hash of its flow, from which the outer source port of a tunnel is made (Linux 5.5).
    pub(super) hash: Option<&'a [u8]>,
}

/// Reads an upcall; `None` if the message is something else.
pub(super) fn upcall<'a>(family: u16, message: &Message<'a>) -> Option<Upcall<'a>> {
    let (CMD_MISS, body) = generic::command(message)? else { return None };
    let (datapath, list) = ovs_body(body).filter(|_| message.kind == family)?;
    let (mut packet, mut frame, mut hash) = (None, None, None);
    for (kind, value) in attributes(list) {
        match kind {
            PACKET_ATTR_PACKET => packet = Some(value),
            PACKET_ATTR_KEY => frame = read_frame(value),
            PACKET_ATTR_HASH => hash = Some(value),
            _ => {}
        }
    }
    Some(Upcall { datapath, frame: frame?, packet: packet?, hash })
}

/// Sends a packet as if it had come in by `port` and a flow with these actions had matched it.
pub(super) fn execute(
    family: u16,
    datapath: u32,
    port: u32,
    packet: &[u8],
    hash: Option<&[u8]>,
    outputs: &[Output],
) -> Writer {
    let mut request =
        generic::request(family, PACKET_VERSION, CMD_EXECUTE, Answer::Acknowledgement);
    ovs_header(&mut request, datapath);
    request.bytes(PACKET_ATTR_PACKET, packet);
    request.nest(PACKET_ATTR_KEY, |list| write_metadata(list, port));
    if let Some(hash) = hash {
        request.bytes(PACKET_ATTR_HASH, hash);
    }
    request.nest(PACKET_ATTR_ACTIONS, |list| write_actions(list, outputs));
    request
}
