//! A device in mode `mp` with two peers.

use std::net::Ipv4Addr;

use weft_kernel::ovpn::Refusal;
use weft_openvpn::device::{Mode, PeerAttributes, Slot};

use crate::lab::{CIPHERS, Carrier, Host, Outer, address, hosts, key, peer, wait};

/// The peer that the host `number` is on the server.
fn at_server(number: u8) -> PeerAttributes {
    PeerAttributes {
        vpn_ipv4: Some(Ipv4Addr::new(10, 8, 0, number)),
        vpn_ipv6: Some(format!("fd08::{number}").parse().unwrap()),
        // Packets to it carry a different id than packets from it.
        tx_id: Some(100 + u32::from(number)),
        ..peer(u32::from(number), Some(address(number, Outer::Udp4)))
    }
}

fn connect(server: (&Host, u32, &Carrier), client: &Host) -> Carrier {
    let (host, device, carrier) = server;
    let (id, number) = (u32::from(client.number), client.number);
    wait(host.client.new_peer(device, carrier.fd(), &at_server(number))).unwrap();
    let primary = |id, other_end| key(id, Slot::Primary, 0, CIPHERS[2], other_end);
    wait(host.client.new_key(device, &primary(id, false))).unwrap();
    let own = client.device(Mode::P2p);
    let socket = Carrier::Udp(client.udp("0.0.0.0:1194"));
    let here = PeerAttributes { tx_id: Some(id), ..peer(100 + id, Some(address(1, Outer::Udp4))) };
    wait(client.client.new_peer(own, socket.fd(), &here)).unwrap();
    wait(client.client.new_key(own, &primary(100 + id, true))).unwrap();
    socket
}

#[test]
fn two_peers_reach_the_server_and_each_other() {
    let [server, b, c] = hosts();
    let device = server.device(Mode::Mp);
    let carrier = Carrier::Udp(server.udp("0.0.0.0:1194"));
    let _sockets = [&b, &c].map(|client| connect((&server, device, &carrier), client));
    for client in [&b, &c] {
        server.pings(client.number);
        client.pings(1);
    }
    server.space.run("sysctl -q -w net.ipv4.ip_forward=1");
    server.space.run("sysctl -q -w net.ipv6.conf.all.forwarding=1");
    b.pings(3);
    let mut peers = wait(server.client.peers(device)).unwrap();
    peers.sort_by_key(|peer| peer.id);
    assert_eq!(peers.iter().map(|peer| peer.id).collect::<Vec<_>>(), [2, 3]);
    for (peer, number) in peers.iter().zip([2, 3]) {
        assert_eq!(peer.vpn_ipv4, at_server(number).vpn_ipv4);
        assert_eq!(peer.vpn_ipv6, at_server(number).vpn_ipv6);
        assert_eq!(peer.tx_id, at_server(number).tx_id);
        assert_eq!(peer.remote, Some(address(number, Outer::Udp4)));
        assert!(peer.vpn.rx_packets >= 16 && peer.vpn.tx_packets >= 16, "{peer:?}");
    }
    let refused = |attributes: &PeerAttributes| {
        let error = wait(server.client.new_peer(device, carrier.fd(), attributes)).unwrap_err();
        println!("{error}");
        (error.errno(), error.refusal())
    };
    assert_eq!(refused(&at_server(2)), (Some(17), Some(Refusal::Exists)));
    let same_address = PeerAttributes { id: Some(9), ..at_server(2) };
    assert_eq!(refused(&same_address), (Some(98), Some(Refusal::AddressTaken)));
    wait(server.client.delete_peer(device, 2)).unwrap();
    assert!(!b.space.succeeds("ping -c 2 -i 0.1 -W 2 10.8.0.1"));
    c.pings(1);
}
