//! Messages of the families ovs_datapath (version 2) and ovs_vport (`linux/openvswitch.h`).

use super::codec::{ovs_body, ovs_header};
use crate::netlink::{
    generic,
    reader::{attributes, text, u32_at, u64_at},
    writer::{Answer, Writer},
};

/// The datapath family's name.
pub(super) const DATAPATH_FAMILY: &str = "ovs_datapath";
/// Its multicast group, in which datapaths come and go.
pub(super) const DATAPATH_GROUP: &str = "ovs_datapath";
/// The port family's name.
pub(super) const VPORT_FAMILY: &str = "ovs_vport";
/// Its multicast group, in which ports come and go.
pub(super) const VPORT_GROUP: &str = "ovs_vport";

const DATAPATH_VERSION: u8 = 2;
const VPORT_VERSION: u8 = 1;

/// `enum ovs_datapath_cmd`, and the same numbers in `enum ovs_vport_cmd`.
pub(super) const CMD_NEW: u8 = 1;
pub(super) const CMD_DEL: u8 = 2;
const CMD_GET: u8 = 3;
const CMD_SET: u8 = 4;

const DP_ATTR_NAME: u16 = 1;
const DP_ATTR_UPCALL_PID: u16 = 2;
const DP_ATTR_STATS: u16 = 3;
const DP_ATTR_USER_FEATURES: u16 = 5;

const VPORT_ATTR_PORT_NO: u16 = 1;
const VPORT_ATTR_TYPE: u16 = 2;
const VPORT_ATTR_NAME: u16 = 3;
const VPORT_ATTR_UPCALL_PID: u16 = 5;

/// The last attribute of an upcall may be unaligned, which saves the kernel a copy.
const DP_F_UNALIGNED: u32 = 1 << 0;
/// Each port may have a list of upcall sockets.
const DP_F_VPORT_PIDS: u32 = 1 << 1;
/// The features that our datapath has.
pub(super) const USER_FEATURES: u32 = DP_F_UNALIGNED | DP_F_VPORT_PIDS;

/// The datapath's own port, whose device has the datapath's name (OVSP_LOCAL).
pub(super) const PORT_INTERNAL: u32 = 0;
/// A port that is a network device (OVS_VPORT_TYPE_NETDEV).
pub(super) const VPORT_TYPE_NETDEV: u32 = 1;
/// A port whose device the datapath makes (OVS_VPORT_TYPE_INTERNAL).
pub(super) const VPORT_TYPE_INTERNAL: u32 = 2;

/// A datapath as the kernel shows it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Datapath {
    /// Its number, which is the number of its internal port's device.
    pub(super) index: u32,
    pub(super) name: String,
    pub(super) stats: DatapathStats,
    pub(super) features: u32,
}

/// `struct ovs_dp_stats`, in packets since the datapath was made.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct DatapathStats {
    pub(super) hits: u64,
    pub(super) misses: u64,
    pub(super) lost: u64,
    pub(super) flows: u64,
}

/// A port as the kernel shows it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Vport {
    pub(super) datapath: u32,
    pub(super) number: u32,
    pub(super) kind: u32,
    pub(super) name: String,
    /// The netlink port numbers of the sockets that its upcalls go to.
    pub(super) upcall_ports: Vec<u32>,
}

fn datapath_request(family: u16, command: u8, answer: Answer, index: u32) -> Writer {
    let mut request = generic::request(family, DATAPATH_VERSION, command, answer);
    ovs_header(&mut request, index);
    request
}

fn vport_request(family: u16, command: u8, answer: Answer, datapath: u32) -> Writer {
    let mut request = generic::request(family, VPORT_VERSION, command, answer);
    ovs_header(&mut request, datapath);
    request
}

/// Makes a datapath whose internal port's upcalls go to the socket `upcall_port`.
pub(super) fn new_datapath(family: u16, name: &str, upcall_port: u32) -> Writer {
    let mut request = datapath_request(family, CMD_NEW, Answer::Echo, 0);
    request.text(DP_ATTR_NAME, name);
    request.u32(DP_ATTR_UPCALL_PID, upcall_port);
    request.u32(DP_ATTR_USER_FEATURES, USER_FEATURES);
    request
}

/// Sets the features of a datapath.
pub(super) fn set_datapath(family: u16, index: u32) -> Writer {
    let mut request = datapath_request(family, CMD_SET, Answer::Acknowledgement, index);
    request.u32(DP_ATTR_USER_FEATURES, USER_FEATURES);
    request
}

/// Asks for one datapath by name.
pub(super) fn get_datapath(family: u16, name: &str) -> Writer {
    let mut request = datapath_request(family, CMD_GET, Answer::Acknowledgement, 0);
    request.text(DP_ATTR_NAME, name);
    request
}

/// Deletes a datapath with its ports and flows.
pub(super) fn delete_datapath(family: u16, index: u32) -> Writer {
    datapath_request(family, CMD_DEL, Answer::Acknowledgement, index)
}

/// Reads a datapath.
pub(super) fn datapath(body: &[u8]) -> Option<Datapath> {
    let (index, list) = ovs_body(body)?;
    let mut datapath = Datapath { index, ..Datapath::default() };
    for (kind, value) in attributes(list) {
        match kind {
            DP_ATTR_NAME => datapath.name = text(value),
            DP_ATTR_STATS => datapath.stats = datapath_stats(value).unwrap_or_default(),
            DP_ATTR_USER_FEATURES => datapath.features = u32_at(value, 0).unwrap_or_default(),
            _ => {}
        }
    }
    Some(datapath)
}

fn datapath_stats(value: &[u8]) -> Option<DatapathStats> {
    Some(DatapathStats {
        hits: u64_at(value, 0)?,
        misses: u64_at(value, 8)?,
        lost: u64_at(value, 16)?,
        flows: u64_at(value, 24)?,
    })
}

/// Makes the network device `name` the port of this number.
pub(super) fn new_vport(
    family: u16,
    datapath: u32,
    number: u32,
    name: &str,
    upcall_port: u32,
) -> Writer {
    let mut request = vport_request(family, CMD_NEW, Answer::Echo, datapath);
    request.u32(VPORT_ATTR_PORT_NO, number);
    request.u32(VPORT_ATTR_TYPE, VPORT_TYPE_NETDEV);
    request.text(VPORT_ATTR_NAME, name);
    request.u32(VPORT_ATTR_UPCALL_PID, upcall_port);
    request
}

/// Sends a port's upcalls to another socket.
pub(super) fn set_vport(family: u16, datapath: u32, number: u32, upcall_port: u32) -> Writer {
    let mut request = vport_request(family, CMD_SET, Answer::Acknowledgement, datapath);
    request.u32(VPORT_ATTR_PORT_NO, number);
    request.u32(VPORT_ATTR_UPCALL_PID, upcall_port);
    request
}

/// Takes a port out of its datapath; the device stays.
pub(super) fn delete_vport(family: u16, datapath: u32, number: u32) -> Writer {
    let mut request = vport_request(family, CMD_DEL, Answer::Acknowledgement, datapath);
    request.u32(VPORT_ATTR_PORT_NO, number);
    request
}

/// Asks for all ports of a datapath.
pub(super) fn dump_vports(family: u16, datapath: u32) -> Writer {
    vport_request(family, CMD_GET, Answer::Dump, datapath)
}

/// Reads a port.
pub(super) fn vport(body: &[u8]) -> Option<Vport> {
    let (datapath, list) = ovs_body(body)?;
    let mut vport = Vport { datapath, ..Vport::default() };
    for (kind, value) in attributes(list) {
        match kind {
            VPORT_ATTR_PORT_NO => vport.number = u32_at(value, 0)?,
            VPORT_ATTR_TYPE => vport.kind = u32_at(value, 0)?,
            VPORT_ATTR_NAME => vport.name = text(value),
            VPORT_ATTR_UPCALL_PID => {
                let number = |at: &[u8]| u32_at(at, 0);
                vport.upcall_ports = value.chunks_exact(4).filter_map(number).collect();
            }
            _ => {}
        }
    }
    Some(vport)
}
