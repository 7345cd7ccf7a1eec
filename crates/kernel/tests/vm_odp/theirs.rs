//! Another program that works on datapaths: requests made by `netlink-bindings`, sent on a plain socket. It
//! plays the administrator, and the owner of a foreign datapath.

use netlink_bindings::{
    nlctrl, ovs_datapath, ovs_flow, ovs_vport,
    traits::{NetlinkRequest, Protocol},
};
use netlink_sys::{Socket, protocols::NETLINK_GENERIC};
use weft_io::namespace::run_in;

use crate::lab::Space;

const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;

/// A socket in a namespace.
pub(crate) struct Theirs(Socket);

impl Theirs {
    pub(crate) fn new(space: &Space) -> Self {
        Self(run_in(&space.0, || Socket::new(NETLINK_GENERIC).unwrap()).unwrap())
    }

    /// Sends a request, whose payload begins with the generic header if `whole`, and returns the
    /// bodies of the answer.
    fn exchange(&self, family: u16, flags: u16, payload: &[u8]) -> Result<Vec<Vec<u8>>, i32> {
        let mut bytes = Vec::new();
        bytes.extend(u32::try_from(16 + payload.len()).unwrap().to_ne_bytes());
        bytes.extend(family.to_ne_bytes());
        bytes.extend((flags | 5).to_ne_bytes());
        bytes.extend([7, 0, 0, 0, 0, 0, 0, 0]);
        bytes.extend(payload);
        self.0.send(&bytes, 0).unwrap();
        let mut found = Vec::new();
        loop {
            let (datagram, _) = self.0.recv_from_full().unwrap();
            let mut rest = &datagram[..];
            while rest.len() >= 16 {
                let length = u32::from_ne_bytes(rest[..4].try_into().unwrap()) as usize;
                let kind = u16::from_ne_bytes(rest[4..6].try_into().unwrap());
                match kind {
                    NLMSG_ERROR => {
                        let code = i32::from_ne_bytes(rest[16..20].try_into().unwrap());
                        return if code == 0 { Ok(found) } else { Err(-code) };
                    }
                    NLMSG_DONE => return Ok(found),
                    _ => found.push(rest[20..length].to_vec()),
                }
                rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
            }
        }
    }

    fn family(&self, name: &[u8]) -> u16 {
        let mut body = vec![3, 2, 0, 0];
        nlctrl::PushCtrlAttrs::new(&mut body).push_family_name_bytes(name).end_nested();
        body.resize(body.len().next_multiple_of(4), 0);
        let found = self.exchange(0x10, 0, &body).unwrap();
        nlctrl::CtrlAttrs::new(&found[0]).get_family_id().unwrap()
    }

    /// `payload` without its generic header.
    fn run(&self, request: &impl NetlinkRequest, command: u8) -> Result<Vec<Vec<u8>>, i32> {
        let Protocol::Generic(name) = request.protocol() else { panic!("not generic") };
        let version = if name == b"ovs_datapath" { 2 } else { 1 };
        let mut payload = request.payload().to_vec();
        // Whether the bindings put the generic header in front is seen by the command.
        if payload.first() != Some(&command) || payload.get(1) != Some(&version) {
            payload.splice(..0, [command, version, 0, 0]);
        }
        payload.resize(payload.len().next_multiple_of(4), 0);
        self.exchange(self.family(name), request.flags(), &payload)
    }

    /// Makes a datapath and returns its number.
    pub(crate) fn new_datapath(&self, name: &str) -> u32 {
        let header = ovs_datapath::OvsHeader::new();
        let mut request = ovs_datapath::Request::new().op_new_do(&header);
        request
            .encode()
            .push_name_bytes(name.as_bytes())
            .push_upcall_pid(0)
            .push_user_features(0)
            .end_nested();
        self.run(&request, 1).unwrap();
        self.datapath(name).unwrap()
    }

    /// The number of a datapath.
    pub(crate) fn datapath(&self, name: &str) -> Option<u32> {
        let header = ovs_datapath::OvsHeader::new();
        let mut request = ovs_datapath::Request::new().op_get_do(&header);
        request.encode().push_name_bytes(name.as_bytes()).end_nested();
        let found = self.run(&request, 3).ok()?;
        Some(ovs_datapath::OpGetDo::decode_request(&found[0]).0.dp_ifindex)
    }

    pub(crate) fn delete_datapath(&self, datapath: u32) {
        let header = ovs_datapath::OvsHeader { dp_ifindex: datapath };
        let request = ovs_datapath::Request::new().op_del_do(&header);
        self.run(&request, 2).unwrap();
    }

    pub(crate) fn new_port(&self, datapath: u32, name: &str) {
        let header = ovs_vport::OvsHeader { dp_ifindex: datapath };
        let mut request = ovs_vport::Request::new().op_new_do(&header);
        request
            .encode()
            .push_type(1)
            .push_name_bytes(name.as_bytes())
            .push_upcall_pid(&0_u32.to_ne_bytes())
            .end_nested();
        self.run(&request, 1).unwrap();
    }

    /// The ports of a datapath with their numbers.
    pub(crate) fn ports(&self, datapath: u32) -> Vec<(u32, String)> {
        let header = ovs_vport::OvsHeader { dp_ifindex: datapath };
        let request = ovs_vport::Request::new().op_get_dump(&header);
        let found = self.run(&request, 3).unwrap();
        let port = |body: &Vec<u8>| {
            let (_, list) = ovs_vport::OpGetDump::decode_request(body);
            let name = list.get_name().unwrap().to_str().unwrap().to_owned();
            (list.get_port_no().unwrap(), name)
        };
        found.iter().map(port).collect()
    }

    pub(crate) fn delete_port(&self, datapath: u32, number: u32) {
        let header = ovs_vport::OvsHeader { dp_ifindex: datapath };
        let mut request = ovs_vport::Request::new().op_del_do(&header);
        request.encode().push_port_no(number).end_nested();
        self.run(&request, 2).unwrap();
    }

    /// Makes a flow that drops frames from a port to one MAC.
    pub(crate) fn new_flow(&self, datapath: u32, port: u32) {
        let header = ovs_flow::OvsHeader { dp_ifindex: datapath };
        let mut request = ovs_flow::Request::new().op_new_do(&header);
        let ethernet = || {
            let mut ethernet = ovs_flow::OvsKeyEthernet::new();
            ethernet.eth_dst = [6, 6, 6, 6, 6, 6];
            ethernet
        };
        request
            .encode()
            .nested_key()
            .push_in_port(port)
            .push_ethernet(ethernet())
            .end_nested()
            .nested_mask()
            .push_in_port(u32::MAX)
            .push_ethernet(ovs_flow::OvsKeyEthernet { eth_src: [0xff; 6], eth_dst: [0xff; 6] })
            .end_nested()
            .nested_actions()
            .end_nested()
            .end_nested();
        self.run(&request, 1).unwrap();
    }

    /// How many flows a datapath has, by a listing.
    pub(crate) fn flows(&self, datapath: u32) -> usize {
        let header = ovs_flow::OvsHeader { dp_ifindex: datapath };
        let request = ovs_flow::Request::new().op_get_dump(&header);
        self.run(&request, 3).unwrap().len()
    }

    /// Deletes all flows of a datapath (a command that the bindings do not have).
    pub(crate) fn flush_flows(&self, datapath: u32) {
        let payload = [&[2, 1, 0, 0][..], &datapath.to_ne_bytes()].concat();
        self.exchange(self.family(b"ovs_flow"), 0, &payload).unwrap();
    }
}
