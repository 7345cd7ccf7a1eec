//! Networks behind peers.

use std::net::{IpAddr, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use weft_engine::DropReason;
use weft_engine::dco::Route;
use weft_openvpn::device::Mode;

use super::host::{AES_256, arrives, connect_udp, does_not_arrive, strangers};
use crate::common::{PATIENCE, flows_between, ip, pattern};

#[test]
fn networks_behind_peers_are_reached_by_routes_and_foreign_sources_are_not() {
    let (a, b) = strangers((Mode::Mp, Mode::P2p));
    let _sockets = connect_udp(&a, &b, false, AES_256);
    let behind: IpAddr = "172.20.0.1".parse().unwrap();
    b.run(|| ip("addr add 172.20.0.1/32 dev lo"));
    a.run(|| ip("route add 172.20.0.0/16 via 10.8.0.2 dev ovpn0"));
    let here = a.run(|| UdpSocket::bind((a.inner_v4(), 0)).unwrap());
    let there = b.run(|| UdpSocket::bind((behind, 0)).unwrap());
    here.connect(there.local_addr().unwrap()).unwrap();
    there.connect(here.local_addr().unwrap()).unwrap();
    for socket in [&here, &there] {
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
    }
    let pair = (here, there);
    does_not_arrive(&pair, b"no route yet");
    a.wait_dropped(DropReason::NoEndpoint, 1);
    let back = (pair.1, pair.0);
    does_not_arrive(&back, b"from where nobody lives");
    a.wait_dropped(DropReason::ForeignSource, 1);
    let route = Route {
        destination: ("172.20.0.0".parse().unwrap(), 16),
        gateway: Some(b.inner_v4()),
        metric: 0,
    };
    a.device.set_routes(&[route]);
    arrives(&back, b"back");
    arrives(&(back.1, back.0), b"there");
}

#[test]
fn routes_that_come_and_go_under_traffic_lose_nothing_of_the_others() {
    const OTHERS: u8 = 250;
    let (a, b) = strangers((Mode::Mp, Mode::P2p));
    let _sockets = connect_udp(&a, &b, false, AES_256);
    b.run(|| ip("addr add 172.20.0.1/32 dev lo"));
    a.run(|| ip("route add 172.20.0.0/16 via 10.8.0.2 dev ovpn0"));
    let to = |network: &str, bits, gateway: IpAddr| Route {
        destination: (network.parse().unwrap(), bits),
        gateway: Some(gateway),
        metric: 0,
    };
    let steady = to("172.20.0.0", 16, b.inner_v4());
    a.device.set_routes(&[steady]);
    let nobody: IpAddr = "10.8.0.99".parse().unwrap();
    let (done, bytes) = (AtomicBool::new(false), pattern(6, 8 << 20));
    let mut changes = 0;
    thread::scope(|scope| {
        scope.spawn(|| {
            let behind = "172.20.0.1".parse().unwrap();
            flows_between(&a.namespace, &b.namespace, behind, 2, &bytes);
            done.store(true, Ordering::Relaxed);
        });
        while !done.load(Ordering::Relaxed) || changes < 100 {
            // Longer and shorter ones, of which none is the way to the address.
            let others =
                (0..changes % OTHERS).map(|nth| to(&format!("172.20.{nth}.128"), 25, nobody));
            let default = (changes % 2 == 0).then(|| to("0.0.0.0", 0, nobody));
            let all: Vec<Route> = others.chain(default).chain([steady]).collect();
            assert_eq!(a.device.set_routes(&all), 0);
            changes = changes.wrapping_add(1);
        }
    });
    assert_eq!([a.drops(), b.drops()], [[], []]);
    let many = vec![steady; weft_engine::dco::ROUTES_MAX + 3];
    assert_eq!(a.device.set_routes(&many), 3, "left out");
}
