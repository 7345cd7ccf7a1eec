//! Our messages against a second encoder and decoder, `netlink-bindings`, which is generated from
//! the kernel's own YAML specifications. It has no DEL of ovs_flow; that its attributes are right is
//! checked here, that the kernel takes it, in the guest.

use netlink_bindings::{
    nlctrl, ovs_datapath as theirs_datapath, ovs_flow as theirs, ovs_packet as theirs_packet,
    ovs_vport as theirs_vport,
};
use proptest::prelude::*;
use weft_path::Mac;

use crate::{
    firewall::guard::SENT_PRIORITY,
    netlink::{generic, reader::Message, writer::Writer},
    switch::odp::{
        codec_flow::{self, FlowId, Put},
        codec_meter, codec_packet, codec_port,
        flow::{Bits, FlowKey, Frame, Output, Payload, Tag, TunnelKey},
        limits::Class,
    },
};

const FAMILY: u16 = 0x21;
const DATAPATH: u32 = 7;

/// Command and body of a request, and that its headers are right.
fn parts(mut request: Writer) -> (u8, Vec<u8>) {
    let bytes = request.finish(99, 0);
    assert_eq!(bytes.len() % 4, 0);
    let length = u32::from_ne_bytes(bytes[..4].try_into().unwrap());
    assert_eq!(length as usize, bytes.len());
    assert_eq!(u32::from_ne_bytes(bytes[8..12].try_into().unwrap()), 99);
    (bytes[16], bytes[20..].to_vec())
}

fn flow_parts(request: Writer) -> (u8, u32, Vec<u8>) {
    let (command, body) = parts(request);
    let (header, _) = theirs::OpNewDo::decode_request(&body);
    (command, header.dp_ifindex, body[4..].to_vec())
}

fn mac(last: u8) -> Mac {
    Mac([2, 0, 0, 0, 0, last])
}

fn frame() -> Frame {
    Frame {
        port: 3,
        tunnel: None,
        source: mac(1),
        destination: mac(2),
        tag: Tag::None,
        payload: Payload::default(),
    }
}

fn tunnel_key(ipv6: bool) -> TunnelKey {
    let [remote, local] =
        if ipv6 { ["2001:db8::2", "2001:db8::1"] } else { ["192.0.2.2", "192.0.2.1"] };
    TunnelKey { id: 1, remote: remote.parse().unwrap(), local: local.parse().unwrap() }
}

#[test]
fn a_put_flow_reads_back() {
    let outputs = [Output::Port(5)];
    let key = FlowKey::Pair(frame());
    let request = codec_flow::put_flow(FAMILY, DATAPATH, Put::New, FlowId(0x0102), &key, &outputs);
    let (command, datapath, list) = flow_parts(request);
    assert_eq!((command, datapath), (1, DATAPATH));
    let flow = theirs::FlowAttrs::new(&list);
    assert_eq!(flow.get_ufid().unwrap(), [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 2]);
    let key = flow.get_key().unwrap();
    assert_eq!(key.get_in_port().unwrap(), 3);
    let ethernet = key.get_ethernet().unwrap();
    assert_eq!((ethernet.eth_src, ethernet.eth_dst), (mac(1).0, mac(2).0));
    assert!(key.get_tunnel().is_err() && key.get_vlan().is_err());
    let mask = flow.get_mask().unwrap();
    assert_eq!(mask.get_in_port().unwrap(), u32::MAX);
    assert_eq!(mask.get_ethernet().unwrap().eth_dst, [0xff; 6]);
    assert!(mask.get_ethertype().is_err(), "any Ethernet type");
    let actions: Vec<_> = flow.get_actions().unwrap().map(Result::unwrap).collect();
    assert!(matches!(actions[..], [theirs::ActionAttrs::Output(5)]), "{}", actions.len());
    let request =
        codec_flow::put_flow(FAMILY, DATAPATH, Put::Set, FlowId(1), &FlowKey::Pair(frame()), &[]);
    assert_eq!(flow_parts(request).0, 4);
}

#[test]
fn a_tunnels_key_reads_back() {
    for ipv6 in [false, true] {
        let tunnel = tunnel_key(ipv6);
        let pair = FlowKey::Pair(Frame { tunnel: Some(tunnel), ..frame() });
        for key in [pair, FlowKey::Tunnel { port: 3, tunnel }] {
            let wide = key != pair;
            let request = codec_flow::put_flow(FAMILY, DATAPATH, Put::New, FlowId(1), &key, &[]);
            let (_, _, list) = flow_parts(request);
            let flow = theirs::FlowAttrs::new(&list);
            let (key, mask) = (flow.get_key().unwrap(), flow.get_mask().unwrap());
            assert_eq!((key.get_in_port().unwrap(), mask.get_in_port().unwrap()), (3, u32::MAX));
            let bits = if wide { [0; 6] } else { [0xff; 6] };
            assert_eq!(mask.get_ethernet().unwrap().eth_src, bits);
            let (key, mask) = (key.get_tunnel().unwrap(), mask.get_tunnel().unwrap());
            assert_eq!((key.get_id().unwrap(), mask.get_id().unwrap()), (1, u64::MAX));
            // The time to live is there, and not matched.
            assert_eq!((key.get_ttl().unwrap(), mask.get_ttl().unwrap()), (0, 0));
            if ipv6 {
                assert_eq!(key.get_ipv6_src().unwrap()[15], 2);
                assert_eq!(key.get_ipv6_dst().unwrap()[15], 1);
                assert_eq!(mask.get_ipv6_src().unwrap(), [0xff; 16]);
                assert!(key.get_ipv4_src().is_err());
            } else {
                assert_eq!(key.get_ipv4_src().unwrap(), 0xc000_0202);
                assert_eq!(key.get_ipv4_dst().unwrap(), 0xc000_0201);
                assert_eq!(mask.get_ipv4_dst().unwrap(), u32::MAX);
                assert!(key.get_ipv6_src().is_err());
            }
        }
    }
}

fn tunnel<'a>(action: &theirs::ActionAttrs<'a>) -> theirs::IterableTunnelKeyAttrs<'a> {
    let theirs::ActionAttrs::Set(set) = action else { panic!("a tunnel must be set here") };
    set.get_tunnel().unwrap()
}

#[test]
fn ports_come_before_tunnels() {
    let to = |remote: &str, local: Option<&str>| Output::Tunnel {
        port: 9,
        id: 1,
        remote: remote.parse().unwrap(),
        local: local.map(|local| local.parse().unwrap()),
    };
    let outputs = [
        to("192.0.2.2", Some("192.0.2.1")),
        Output::Meter(8),
        Output::Port(4),
        to("2001:db8::3", Some("192.0.2.1")),
        Output::Port(5),
    ];
    let request = codec_flow::put_flow(
        FAMILY,
        DATAPATH,
        Put::New,
        FlowId(1),
        &FlowKey::Pair(frame()),
        &outputs,
    );
    let (_, _, list) = flow_parts(request);
    let actions = theirs::FlowAttrs::new(&list).get_actions().unwrap();
    let actions: Vec<_> = actions.map(Result::unwrap).collect();
    assert!(matches!(
        actions[..2],
        [theirs::ActionAttrs::Output(4), theirs::ActionAttrs::Output(5)]
    ));
    assert!(matches!(actions[2], theirs::ActionAttrs::Meter(8)));
    let theirs::ActionAttrs::Set(set) = &actions[3] else { panic!("no priority is set") };
    assert_eq!(set.get_priority().unwrap(), SENT_PRIORITY);
    let actions = &actions[2..];
    let first = tunnel(&actions[2]);
    assert_eq!((first.get_id().unwrap(), first.get_ttl().unwrap()), (1, 64));
    assert_eq!(first.get_ipv4_dst().unwrap(), 0xc000_0202);
    assert_eq!(first.get_ipv4_src().unwrap(), 0xc000_0201);
    assert!(first.get_dont_fragment().is_ok() && first.get_csum().is_err());
    assert!(matches!(actions[3], theirs::ActionAttrs::Output(9)));
    let second = tunnel(&actions[4]);
    assert_eq!(second.get_ipv6_dst().unwrap()[15], 3);
    assert!(second.get_ipv4_src().is_err(), "a local address of the other family is left out");
    assert!(matches!(actions[5], theirs::ActionAttrs::Output(9)));
    assert_eq!(actions.len(), 6);
}

#[test]
fn a_tag_is_part_of_the_key_alone() {
    let key = FlowKey::Pair(Frame { tag: Tag::One(0x1007), ..frame() });
    let request = codec_flow::put_flow(FAMILY, DATAPATH, Put::New, FlowId(1), &key, &[]);
    let (_, _, list) = flow_parts(request);
    let flow = theirs::FlowAttrs::new(&list);
    let key = flow.get_key().unwrap();
    assert_eq!((key.get_vlan().unwrap(), key.get_ethertype().unwrap()), (0x1007, 0x8100));
    assert_eq!(key.get_encap().unwrap().count(), 0);
    assert!(flow.get_mask().unwrap().get_vlan().is_err());
}

/// The flow of a locked port for frames like this one, of which these bits were read.
fn locked(payload: Payload, bits: Bits) -> (Vec<u8>, Vec<u8>) {
    let bits = Bits { source: 48, ethertype: 16, ..bits };
    let key = FlowKey::Locked { frame: bits.of(&Frame { payload, ..frame() }), bits };
    let request = codec_flow::put_flow(FAMILY, DATAPATH, Put::New, FlowId(1), &key, &[]);
    let (_, _, list) = flow_parts(request);
    let nested = |kind| crate::netlink::reader::attribute(&list, kind).unwrap().to_vec();
    (nested(1), nested(7))
}

#[test]
fn a_locked_ports_flow_reads_back() {
    let source = [192, 0, 2, 1].into();
    let base = Payload { ethertype: 0x0800, ipv4: source, protocol: 17, ..Payload::default() };
    let udp = Payload { fragment: 1, port: 0x1234, ..base };
    let bits = Bits { ipv4: 32, protocol: 8, fragment: 8, port: 3, ..Bits::default() };
    let (key, mask) = locked(udp, bits);
    let (key, mask) = (theirs::KeyAttrs::new(&key), theirs::KeyAttrs::new(&mask));
    let ethernet = (key.get_ethernet().unwrap(), mask.get_ethernet().unwrap());
    assert_eq!((ethernet.0.eth_src, ethernet.1.eth_src), (mac(1).0, [0xff; 6]));
    assert_eq!((ethernet.0.eth_dst, ethernet.1.eth_dst), ([0; 6], [0; 6]), "not read");
    assert_eq!((key.get_ethertype().unwrap(), mask.get_ethertype().unwrap()), (0x0800, 0xffff));
    let (ip, ip_mask) = (key.get_ipv4().unwrap(), mask.get_ipv4().unwrap());
    assert_eq!((ip.ipv4_src(), ip_mask.ipv4_src()), (0xc000_0201, u32::MAX));
    assert_eq!((ip.ipv4_proto, ip_mask.ipv4_proto), (17, 0xff));
    assert_eq!((ip.ipv4_frag, ip_mask.ipv4_frag), (1, 0xff));
    assert_eq!((ip_mask.ipv4_dst(), ip_mask.ipv4_tos, ip_mask.ipv4_ttl), (0, 0, 0));
    let (udp, udp_mask) = (key.get_udp().unwrap(), mask.get_udp().unwrap());
    assert_eq!((udp.udp_src(), udp_mask.udp_src()), (0, 0xe000));
    assert_eq!((udp.udp_dst(), udp_mask.udp_dst()), (0, 0));

    let target = "fd00::7".parse().unwrap();
    let advertisement = Payload {
        ethertype: 0x86dd,
        ipv6: "fd00::1".parse().unwrap(),
        protocol: 58,
        icmp_type: 136,
        nd_target: target,
        ..Payload::default()
    };
    let bits = Bits { ipv6: 128, protocol: 8, icmp_type: 8, icmp_code: 8, ..Bits::default() };
    let (key, mask) = locked(advertisement, Bits { nd_target: 8, ..bits });
    let (key, mask) = (theirs::KeyAttrs::new(&key), theirs::KeyAttrs::new(&mask));
    let (ip, ip_mask) = (key.get_ipv6().unwrap(), mask.get_ipv6().unwrap());
    assert_eq!((ip.ipv6_src[15], ip_mask.ipv6_src), (1, [0xff; 16]));
    assert_eq!((ip.ipv6_proto, ip_mask.ipv6_proto, ip_mask.ipv6_frag), (58, 0xff, 0));
    assert_eq!((ip_mask.ipv6_dst, ip_mask.ipv6_label(), ip_mask.ipv6_hlimit), ([0; 16], 0, 0));
    let (icmp, icmp_mask) = (key.get_icmpv6().unwrap(), mask.get_icmpv6().unwrap());
    assert_eq!((icmp.icmp_type, icmp_mask.icmp_type), (136, 0xff));
    assert_eq!((icmp.icmp_code, icmp_mask.icmp_code), (0, 0xff));
    let (nd, nd_mask) = (key.get_nd().unwrap(), mask.get_nd().unwrap());
    assert_eq!((nd.nd_target[0], nd.nd_target[15]), (0xfd, 0));
    assert_eq!((nd_mask.nd_target[..2].to_vec(), nd_mask.nd_tll), (vec![0xff, 0], [0; 6]));

    let arp = Payload { ethertype: 0x0806, arp_sender: mac(9), ipv4: source, ..Payload::default() };
    let (key, mask) = locked(arp, Bits { arp_sender: 48, ipv4: 24, ..Bits::default() });
    let (key, mask) = (theirs::KeyAttrs::new(&key), theirs::KeyAttrs::new(&mask));
    let (arp, arp_mask) = (key.get_arp().unwrap(), mask.get_arp().unwrap());
    assert_eq!((arp.arp_sha, arp_mask.arp_sha), (mac(9).0, [0xff; 6]));
    assert_eq!((arp.arp_sip(), arp_mask.arp_sip()), (0xc000_0200, 0xffff_ff00));
    assert_eq!((arp_mask.arp_tip(), arp_mask.arp_op(), arp_mask.arp_tha), (0, 0, [0; 6]));
    // The datapath wants the key of a TCP flow to have ports and flags.
    let (key, _) = locked(Payload { protocol: 6, ..base }, Bits { ipv4: 32, protocol: 8, ..bits });
    let key = theirs::KeyAttrs::new(&key);
    assert!(key.get_tcp().is_ok() && key.get_tcp_flags().is_ok() && key.get_udp().is_err());
}

/// A frame without a type has none in the key, and its absence is matched.
#[test]
fn the_absence_of_a_type_is_matched() {
    let (key, mask) = locked(Payload::default(), Bits::default());
    assert!(theirs::KeyAttrs::new(&key).get_ethertype().is_err());
    assert_eq!(theirs::KeyAttrs::new(&mask).get_ethertype().unwrap(), 0xffff);
}

/// An upcall's key with these attributes beside its port and MACs, and the payload that is read.
fn payload_read(write: impl FnOnce(theirs::PushKeyAttrs<&mut Vec<u8>>)) -> Payload {
    let mut key = Vec::new();
    let ethernet = theirs::OvsKeyEthernet::new();
    let attrs = theirs::PushKeyAttrs::new(&mut key).push_in_port(3).push_ethernet(ethernet);
    write(attrs);
    codec_flow::read_frame(&key).unwrap().payload
}

#[test]
fn what_a_frame_carries_is_read() {
    let mut ipv4 = theirs::OvsKeyIpv4::new();
    ipv4.set_ipv4_src(0xc000_0201);
    ipv4.set_ipv4_dst(0xc000_0209);
    (ipv4.ipv4_proto, ipv4.ipv4_tos, ipv4.ipv4_ttl, ipv4.ipv4_frag) = (17, 3, 64, 1);
    let mut udp = theirs::OvsKeyUdp::new();
    udp.set_udp_src(547);
    udp.set_udp_dst(5);
    let read = payload_read(|key| _ = key.push_ethertype(0x0800).push_ipv4(ipv4).push_udp(udp));
    let source = [192, 0, 2, 1].into();
    let bare = Payload { ethertype: 0x0800, ipv4: source, ..Payload::default() };
    assert_eq!(read, Payload { protocol: 17, fragment: 1, port: 547, ..bare });

    let (source, target) = ("fd00::1".parse().unwrap(), "fd00::2".parse().unwrap());
    let mut ipv6 = theirs::OvsKeyIpv6::new();
    let octets = |address: std::net::Ipv6Addr| address.octets();
    (ipv6.ipv6_src, ipv6.ipv6_dst) = (octets(source), [7; 16]);
    ipv6.set_ipv6_label(0xf_1234);
    (ipv6.ipv6_proto, ipv6.ipv6_tclass, ipv6.ipv6_hlimit, ipv6.ipv6_frag) = (58, 1, 255, 2);
    let mut icmp = theirs::OvsKeyIcmp::new();
    (icmp.icmp_type, icmp.icmp_code) = (135, 4);
    let mut nd = theirs::OvsKeyNd::new();
    (nd.nd_target, nd.nd_sll, nd.nd_tll) = (octets(target), [8; 6], [9; 6]);
    let read = payload_read(|key| {
        _ = key.push_ethertype(0x86dd).push_ipv6(ipv6).push_icmpv6(icmp).push_nd(nd);
    });
    let bare = Payload { ethertype: 0x86dd, ipv6: source, ..Payload::default() };
    let ip = Payload { protocol: 58, fragment: 2, ..bare };
    assert_eq!(read, Payload { icmp_type: 135, icmp_code: 4, nd_target: target, ..ip });

    let mut arp = theirs::OvsKeyArp::new();
    arp.set_arp_sip(0xc000_0201);
    arp.set_arp_tip(0xc000_0209);
    arp.set_arp_op(1);
    (arp.arp_sha, arp.arp_tha) = (mac(5).0, mac(6).0);
    let read = payload_read(|key| _ = key.push_ethertype(0x0806).push_arp(arp));
    let ipv4 = [192, 0, 2, 1].into();
    let wanted = Payload { ethertype: 0x0806, arp_sender: mac(5), ipv4, ..Payload::default() };
    assert_eq!(read, wanted);
    assert_eq!(payload_read(|_| ()), Payload::default());
}

#[test]
fn the_other_flow_messages_read_back() {
    let (command, _, list) = flow_parts(codec_flow::delete_flow(FAMILY, DATAPATH, FlowId(5)));
    assert_eq!(command, 2);
    assert_eq!(theirs::FlowAttrs::new(&list).get_ufid().unwrap()[15], 5);
    let (command, datapath, list) = flow_parts(codec_flow::flush_flows(FAMILY, DATAPATH));
    assert_eq!((command, datapath, list.len()), (2, DATAPATH, 0));
    for (actions, flags) in [(true, 3), (false, 7)] {
        let mut request = codec_flow::dump_flows(FAMILY, DATAPATH, actions);
        assert_eq!(request.finish(1, 0)[6..8], 0x301_u16.to_ne_bytes());
        let (command, _, list) = flow_parts(request);
        assert_eq!(command, 3);
        assert_eq!(theirs::FlowAttrs::new(&list).get_ufid_flags().unwrap(), flags);
    }
}

#[test]
fn a_listed_flow_is_read() {
    let mut body = Vec::new();
    let header = theirs::OvsHeader { dp_ifindex: DATAPATH };
    let mut stats = theirs::OvsFlowStats::new();
    stats.n_packets = 42;
    let mut ufid = [0; 16];
    ufid[15] = 6;
    theirs::OpNewDo::encode_request(&mut body, &header)
        .push_ufid(&ufid)
        .push_stats(stats)
        .push_used(12)
        .nested_actions()
        .push_output(2)
        .push_meter(8)
        .nested_set()
        .push_priority(SENT_PRIORITY)
        .end_nested()
        .nested_set()
        .nested_tunnel()
        .push_id(1)
        .push_ipv4_src(0)
        .push_ipv4_dst(0xc000_0202)
        .push_tos(0)
        .push_ttl(64)
        .push_dont_fragment(())
        .end_nested()
        .end_nested()
        .push_output(9)
        .end_nested();
    let entry = codec_flow::flow_entry(&body).unwrap();
    assert_eq!((entry.id, entry.packets), (Some(FlowId(6)), 42));
    let remote = "192.0.2.2".parse().unwrap();
    let tunnel = Output::Tunnel { port: 9, id: 1, remote, local: None };
    assert_eq!(entry.outputs, Some(vec![Output::Port(2), Output::Meter(8), tunnel]));
    // Another's flow: a name of another shape, an action that we never use.
    let mut body = Vec::new();
    theirs::OpNewDo::encode_request(&mut body, &header)
        .push_ufid(&[9; 16])
        .nested_actions()
        .push_pop_vlan(())
        .end_nested();
    let entry = codec_flow::flow_entry(&body).unwrap();
    assert_eq!((entry.id, entry.outputs), (None, None));
}

#[test]
fn an_upcall_is_read() {
    for ipv6 in [false, true] {
        let mut key = Vec::new();
        let mut ethernet = theirs::OvsKeyEthernet::new();
        (ethernet.eth_src, ethernet.eth_dst) = (mac(1).0, mac(2).0);
        let tunnel = theirs::PushKeyAttrs::new(&mut key).nested_tunnel().push_id(1).push_ttl(60);
        let addresses = tunnel_key(ipv6);
        let tunnel = match (addresses.remote, addresses.local) {
            (std::net::IpAddr::V4(remote), std::net::IpAddr::V4(local)) => {
                tunnel.push_ipv4_src(remote.to_bits()).push_ipv4_dst(local.to_bits())
            }
            (std::net::IpAddr::V6(remote), std::net::IpAddr::V6(local)) => {
                tunnel.push_ipv6_src(&remote.octets()).push_ipv6_dst(&local.octets())
            }
            _ => unreachable!(),
        };
        tunnel
            .push_csum(())
            .end_nested()
            .push_skb_mark(4)
            .push_in_port(3)
            .push_ethernet(ethernet)
            .push_vlan(0x1007)
            .push_ethertype(0x8100)
            .nested_encap()
            .push_ethertype(0x0800)
            .end_nested()
            .end_nested();
        let packet = [7; 61];
        let mut body = Vec::new();
        let header = theirs_packet::OvsHeader { dp_ifindex: DATAPATH };
        theirs_packet::OpExecuteDo::encode_request(&mut body, &header)
            .push_key(&key)
            .push_hash(0x1_0000_0001)
            .push_packet(&packet)
            .end_nested();
        let message = datagram(1, &body);
        let upcall = read_upcall(FAMILY, &message).unwrap();
        let tunnel = Some(addresses);
        assert_eq!(upcall.frame, Frame { tunnel, tag: Tag::One(0x1007), ..frame() });
        assert_eq!((upcall.datapath, upcall.packet), (DATAPATH, &packet[..]));
        assert_eq!(upcall.hash, Some(&0x1_0000_0001_u64.to_ne_bytes()[..]));
        assert!(read_upcall(FAMILY + 1, &message).is_none());
        // The last attribute is unaligned here, as the kernel leaves it; it may be padded too.
        assert_ne!(message.len() % 4, 0);
        let padded = datagram(1, &[&body[..], &[0; 3]].concat());
        assert_eq!(read_upcall(FAMILY, &padded).unwrap().packet, packet);
        for length in 0..message.len() {
            let _ = read_upcall(FAMILY, &message[..length]);
        }
    }
}

fn read_upcall(family: u16, bytes: &[u8]) -> Option<codec_packet::Upcall<'_>> {
    codec_packet::upcall(family, &Message::read(bytes)?)
}

/// A message of the kernel with this body.
fn datagram(command: u8, body: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; 16];
    bytes[..4].copy_from_slice(&u32::try_from(20 + body.len()).unwrap().to_ne_bytes());
    bytes[4..6].copy_from_slice(&FAMILY.to_ne_bytes());
    bytes.extend_from_slice(&[command, 1, 0, 0]);
    bytes.extend_from_slice(body);
    bytes
}

#[test]
fn a_packet_to_be_executed_reads_back() {
    let hash = 5_u64.to_ne_bytes();
    let outputs = [Output::Port(2)];
    let request = codec_packet::execute(FAMILY, DATAPATH, 3, &[9; 33], Some(&hash), &outputs);
    let (command, body) = parts(request);
    let (header, list) = theirs_packet::OpExecuteDo::decode_request(&body);
    assert_eq!((command, header.dp_ifindex), (3, DATAPATH));
    assert_eq!((list.get_packet().unwrap(), list.get_hash().unwrap()), (&[9; 33][..], 5));
    let key = theirs::KeyAttrs::new(list.get_key().unwrap());
    assert_eq!(key.get_in_port().unwrap(), 3);
    assert!(key.get_ethernet().is_ok(), "an Ethernet frame, not a bare IP packet");
    let actions = theirs::ActionAttrs::new(list.get_actions().unwrap());
    assert_eq!(actions.get_output().unwrap(), 2);
}

#[test]
fn datapath_messages_read_back() {
    let (command, body) = parts(codec_port::new_datapath(FAMILY, "weft", 77));
    let (_, list) = theirs_datapath::OpNewDo::decode_request(&body);
    assert_eq!((command, list.get_name().unwrap()), (1, c"weft"));
    assert_eq!((list.get_upcall_pid().unwrap(), list.get_user_features().unwrap()), (77, 3));
    let (command, body) = parts(codec_port::set_datapath(FAMILY, DATAPATH));
    let (header, list) = theirs_datapath::OpNewDo::decode_request(&body);
    assert_eq!((command, header.dp_ifindex, list.get_user_features().unwrap()), (4, DATAPATH, 3));
    let (command, body) = parts(codec_port::get_datapath(FAMILY, "weft"));
    let (_, list) = theirs_datapath::OpGetDo::decode_request(&body);
    assert_eq!((command, list.get_name().unwrap()), (3, c"weft"));
    let (command, body) = parts(codec_port::delete_datapath(FAMILY, DATAPATH));
    let (header, _) = theirs_datapath::OpDelDo::decode_request(&body);
    assert_eq!((command, header.dp_ifindex), (2, DATAPATH));

    let mut body = Vec::new();
    let mut stats = theirs_datapath::OvsDpStats::new();
    (stats.n_hit, stats.n_missed, stats.n_lost, stats.n_flows) = (1, 2, 3, 4);
    let header = theirs_datapath::OvsHeader { dp_ifindex: DATAPATH };
    theirs_datapath::OpNewDo::encode_request(&mut body, &header)
        .push_masks_cache_size(256)
        .push_name(c"weft")
        .push_stats(stats)
        .push_user_features(3)
        .end_nested();
    let read = codec_port::datapath(&body).unwrap();
    assert_eq!((read.index, read.name.as_str(), read.features), (DATAPATH, "weft", 3));
    let stats = read.stats;
    assert_eq!((stats.hits, stats.misses, stats.lost, stats.flows), (1, 2, 3, 4));
}

#[test]
fn port_messages_read_back() {
    let (command, body) = parts(codec_port::new_vport(FAMILY, DATAPATH, 5, "weft-box1", 77));
    let (header, list) = theirs_vport::OpNewDo::decode_request(&body);
    assert_eq!((command, header.dp_ifindex, list.get_type().unwrap()), (1, DATAPATH, 1));
    assert_eq!((list.get_port_no().unwrap(), list.get_name().unwrap()), (5, c"weft-box1"));
    assert_eq!(list.get_upcall_pid().unwrap(), 77_u32.to_ne_bytes());
    let (command, body) = parts(codec_port::set_vport(FAMILY, DATAPATH, 4, 78));
    let (_, list) = theirs_vport::OpNewDo::decode_request(&body);
    assert_eq!((command, list.get_port_no().unwrap()), (4, 4));
    assert_eq!(list.get_upcall_pid().unwrap(), 78_u32.to_ne_bytes());
    let (command, body) = parts(codec_port::delete_vport(FAMILY, DATAPATH, 4));
    let (_, list) = theirs_vport::OpDelDo::decode_request(&body);
    assert_eq!((command, list.get_port_no().unwrap()), (2, 4));
    let (command, body) = parts(codec_port::dump_vports(FAMILY, DATAPATH));
    let (header, _) = theirs_vport::OpGetDump::decode_request(&body);
    assert_eq!((command, header.dp_ifindex), (3, DATAPATH));

    let mut body = Vec::new();
    let header = theirs_vport::OvsHeader { dp_ifindex: DATAPATH };
    let sockets = [77_u32.to_ne_bytes(), 78_u32.to_ne_bytes()].concat();
    theirs_vport::OpNewDo::encode_request(&mut body, &header)
        .push_port_no(4)
        .push_type(2)
        .push_name(c"weft")
        .push_upcall_pid(&sockets)
        .push_ifindex(12)
        .end_nested();
    let read = codec_port::vport(&body).unwrap();
    assert_eq!((read.datapath, read.number, read.kind), (DATAPATH, 4, 2));
    assert_eq!((read.name.as_str(), read.upcall_ports), ("weft", vec![77, 78]));
}

/// The other encoder's crate lacks ovs_meter: the bytes are those of `linux/openvswitch.h`.
#[test]
fn meter_messages_are_as_the_kernels_header_says() {
    let words =
        |words: &[u32]| words.iter().flat_map(|word| word.to_ne_bytes()).collect::<Vec<_>>();
    let attribute = |length: u32, kind: u32| length | kind << 16;
    let (command, body) = parts(codec_meter::get_meter(FAMILY, DATAPATH, 6));
    assert_eq!((command, body), (4, words(&[DATAPATH, attribute(8, 1), 6])));
    for (class, rate, burst) in [(Class::Broadcast, 200, 2_000), (Class::Stream, 20_000, 20_000)] {
        let (command, body) = parts(codec_meter::set_meter(FAMILY, DATAPATH, 6, class));
        let band = [attribute(8, 1), 1, attribute(8, 2), rate, attribute(8, 3), burst];
        let head = [DATAPATH, attribute(8, 1), 6, attribute(32, 4), attribute(28, 0)];
        assert_eq!((command, body), (2, words(&[&head[..], &band].concat())));
    }
    // The meter's counts, of all packets, and those of its band.
    let stats = [[attribute(20, 3), 9, 0, 900, 0], [attribute(20, 4), 5, 0, 500, 0]];
    let [all, band] = stats;
    let head = [DATAPATH, attribute(8, 1), 6];
    let bands = [attribute(28, 4), attribute(24, 0)];
    let body = words(&[&head[..], &all, &bands, &band].concat());
    assert_eq!(codec_meter::meter_dropped(&body), Some(5));
    assert_eq!(codec_meter::meter_dropped(&body[..12]), None);
}

#[test]
fn the_controllers_answer_is_read() {
    let (command, body) = parts(generic::get_family("ovs_flow"));
    assert_eq!(command, 3);
    let asked = nlctrl::CtrlAttrs::new(&body);
    assert_eq!(asked.get_family_name().unwrap(), c"ovs_flow");
    let mut body = Vec::new();
    nlctrl::PushCtrlAttrs::new(&mut body)
        .push_family_name(c"ovs_flow")
        .push_family_id(0x24)
        .push_version(1)
        .array_mcast_groups()
        .entry_nested()
        .push_id(9)
        .push_name(c"ovs_flow")
        .end_nested()
        .end_array()
        .end_nested();
    let read = generic::family_info(&body).unwrap();
    assert_eq!((read.id, read.groups), (0x24, vec![("ovs_flow".to_owned(), 9)]));
    assert_eq!(generic::family_info(&body[8..12]), None);
}

proptest! {
    #[test]
    fn any_input_is_read_without_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let mut message = datagram(1, &bytes);
        let _ = read_upcall(FAMILY, &message);
        message[4..6].copy_from_slice(&2_u16.to_ne_bytes());
        let _ = Message::read(&message).map(|message| message.meaning());
        let _ = Message::read(&bytes).map(|message| message.meaning());
        let _ = generic::family_info(&bytes);
        let _ = codec_port::datapath(&bytes);
        let _ = codec_port::vport(&bytes);
        let _ = codec_flow::flow_entry(&bytes);
        let _ = codec_flow::read_frame(&bytes);
        let _ = codec_meter::meter_dropped(&bytes);
    }
}
