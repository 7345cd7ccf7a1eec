//! Two networks on one datapath, whose containers have the same MACs and addresses.

use weft_kernel::{
    KernelError,
    odp::{OdpDrop, OdpEdit},
};

use crate::{
    broadcast::open_tap,
    lab::{Container, Host, Outer, Space, Underlay, attach_spec, capture, join, peer, until, wait},
};

const SHOP: u32 = 5;
const SHOP_TAP: &str = "shop-tap";

/// A container on the other network with the MAC and the addresses of this one.
fn twin(host: &Host, of: &Container) -> Container {
    let space = Space::new();
    let mut spec = attach_spec(host.number, of.number, &space);
    let port = format!("weft-shop{}", of.number);
    spec.id = format!("netns:shop{}", of.number);
    spec.host_name.clone_from(&port);
    wait(host.kernel.attach(&spec)).unwrap();
    wait(host.switch.add_port(SHOP, &port)).unwrap();
    wait(host.switch.set_local(SHOP, of.mac, &port)).unwrap();
    Container { host: host.number, number: of.number, space, port, mac: of.mac }
}

#[test]
fn two_networks_with_the_same_addresses_stay_apart() {
    let underlay = Underlay::new();
    let (one, two) = (Host::new(1, &underlay), Host::new(2, &underlay));
    let (a, b, c) = (one.container(1), one.container(2), two.container(3));
    join(&[&one, &two], &[&a, &b, &c], Outer::Ipv4);
    let refused = wait(one.switch.add_port(SHOP, &a.port)).unwrap_err();
    assert!(matches!(refused, KernelError::NoNetwork { vni: SHOP }), "{refused}");
    let taps = [&one, &two].map(|host| {
        let tap = open_tap(&host.space, SHOP_TAP);
        wait(host.switch.add_network(SHOP, SHOP_TAP.into())).unwrap();
        assert!(host.space.run(&format!("ip link show {SHOP_TAP}")).contains("master weft"));
        tap
    });
    let (a2, b2, c2) = (twin(&one, &a), twin(&one, &b), twin(&two, &c));
    for (host, other, there) in [(&one, 2, &[&c][..]), (&two, 1, &[&a, &b])] {
        let there: Vec<_> = there.iter().map(|container| (container.mac, peer(other))).collect();
        wait(host.switch.set_endpoints(SHOP, &there, &[])).unwrap();
        let told = OdpEdit::Broadcast(SHOP, Some([peer(other)].into()));
        wait(host.switch.apply(vec![told])).unwrap();
    }
    for (from, here, there) in [(&a, &b, &c), (&a2, &b2, &c2)] {
        from.pings(here);
        from.pings(there);
    }
    let seen = [&b, &c].map(|container| capture(&container.space, "weft0", "icmp or icmp6"));
    a2.pings(&b2);
    a2.pings(&c2);
    for seen in seen {
        let seen = seen.end();
        assert!(!seen.contains("echo"), "{seen}");
    }
    for host in [&one, &two] {
        host.audit();
    }
    // The TAP is made anew.
    let [tap, _kept] = taps;
    drop(tap);
    let _tap = open_tap(&one.space, SHOP_TAP);
    wait(one.switch.add_network(SHOP, SHOP_TAP.into())).unwrap();
    assert!(one.space.run(&format!("ip link show {SHOP_TAP}")).contains("master weft"));
    // One host leaves the network.
    assert!(wait(two.switch.remove_network(SHOP)).unwrap());
    assert!(!wait(two.switch.remove_network(SHOP)).unwrap());
    assert!(!a2.space.succeeds(&format!("ping -c 1 -W 2 {}", c2.ipv4())));
    a.pings(&c);
    a2.pings(&b2);
    until("the drop is counted", || two.counters().drops.contains_key(&OdpDrop::UnknownNetwork));
    for host in [&one, &two] {
        host.audit();
    }
}
