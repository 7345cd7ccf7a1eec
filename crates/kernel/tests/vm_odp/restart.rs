//! Restarts after `kill -9`; and hosts of the other kind.

use std::{thread::sleep, time::Duration};

use weft_io::namespace::run_in;
use weft_kernel::Kernel;

use crate::{
    lab::{
        Container, Host, Outer, Running, SWITCH, Space, TUNNEL, Underlay, attach_spec, join, peer,
        run, spec, start, tunnel, until, wait,
    },
    theirs::Theirs,
};

/// Set in the process that `a_killed_switch_is_taken_over` starts and kills: this program once more.
const CHILD: &str = "WEFT_TEST_CHILD";

/// Runs host 1's switch with container 1 until the process's end.
fn child() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let kernel = Kernel::new().unwrap();
        let (switch, _inbox) = weft_kernel::odp::OdpSwitch::start(&kernel, spec(1)).await.unwrap();
        let mac = weft_path::Mac([0x02, 0, 0, 1, 1, 1]);
        switch.add_port(1, "weft-box1").await.unwrap();
        switch.add_port(1, "weft-old").await.unwrap();
        switch.set_local(1, mac, "weft-box1").await.unwrap();
        switch.set_peer(peer(2), tunnel(2, Outer::Ipv4)).await.unwrap();
        let remote = weft_path::Mac([0x02, 0, 0, 1, 2, 3]);
        switch.set_endpoints(1, &[(remote, peer(2))], &[]).await.unwrap();
        std::future::pending::<()>().await;
    });
}

fn start_child(space: &Space) -> Running {
    let program = std::env::current_exe().unwrap();
    let arguments = "--exact restart::a_killed_switch_is_taken_over --nocapture";
    space.spawn(&format!("env {CHILD}=1 {} {arguments}", program.display()))
}

#[test]
fn a_killed_switch_is_taken_over() {
    if std::env::var_os(CHILD).is_some() {
        return child();
    }
    let underlay = Underlay::new();
    let two = Host::new(2, &underlay);
    let c = two.container(3);
    two.reaches(1, tunnel(1, Outer::Ipv4));
    let space = Space::new();
    underlay.connect(1, &space);
    let before = space.run("ip -o link show");
    let inside = Space::new();
    let kernel = space.enter(async {
        let kernel = Kernel::new().unwrap();
        kernel.attach(&attach_spec(1, 1, &inside)).await.unwrap();
        kernel
    });
    // A container that ends while no daemon runs that could remove its port.
    let ended = Space::new();
    let mut old = attach_spec(1, 9, &ended);
    old.host_name = "weft-old".into();
    wait(kernel.attach(&old)).unwrap();
    let mac = weft_path::Mac([0x02, 0, 0, 1, 1, 1]);
    let a = Container { host: 1, number: 1, space: inside, port: "weft-box1".into(), mac };
    two.knows(&a);
    let running = start_child(&space);
    until("the switch runs", || a.space.succeeds(&format!("ping -c 1 -W 1 {}", c.ipv4())));
    a.pings(&c);
    let theirs = Theirs::new(&space);
    let datapath = theirs.datapath(SWITCH).unwrap();
    running.kill_9();
    // Traffic with flows continues without a daemon.
    sleep(Duration::from_millis(300));
    a.space.run(&format!("ping -c 5 -i 0.2 -W 2 {}", c.ipv4()));
    assert!(theirs.flows(datapath) > 0);
    let (kernel, switch, _inbox) = start(&space, spec(1));
    assert_eq!(theirs.datapath(SWITCH), Some(datapath), "the datapath is the same");
    assert_eq!(theirs.ports(datapath).len(), 4, "its ports too");
    wait(switch.add_port(1, "weft-box1")).unwrap();
    wait(switch.set_local(1, mac, "weft-box1")).unwrap();
    wait(switch.set_peer(peer(2), tunnel(2, Outer::Ipv4))).unwrap();
    wait(switch.set_endpoints(1, &[(c.mac, peer(2))], &[])).unwrap();
    a.pings(&c);
    assert_eq!(wait(switch.retain_ports(&["weft-box1".into()])).unwrap(), 1);
    let audit = wait(switch.audit()).unwrap();
    assert_eq!((audit.unknown, audit.missing, audit.differing, audit.outdated), (0, 0, 0, 0));
    wait(kernel.detach("weft-old")).unwrap();
    // A second start of the same changes nothing that iproute2 shows.
    let shown = space.run("ip -o -d link show");
    wait(switch.stop()).unwrap();
    let (_, switch, _inbox) = start(&space, spec(1));
    assert_eq!(space.run("ip -o -d link show"), shown);
    assert_eq!(wait(switch.remove()).unwrap(), 3);
    assert_eq!(space.run("ip -o link show"), before);
    assert_eq!(theirs.datapath(SWITCH), None);
}

#[test]
fn a_host_with_a_bridge_and_a_vxlan_device_is_a_peer() {
    for outer in [Outer::Ipv4, Outer::Ipv6] {
        let underlay = Underlay::new();
        let one = Host::new(1, &underlay);
        let a = one.container(1);
        one.reaches(2, tunnel(2, outer));
        // Host 2 by iproute2 alone, with the VXLAN options of bridge mode.
        let host = Space::new();
        underlay.connect(2, &host);
        let (local, remote) = match outer {
            Outer::Ipv4 => ("192.0.2.2", "192.0.2.1"),
            Outer::Ipv6 => ("2001:db8::2", "2001:db8::1"),
        };
        host.run("ip link add name sw type bridge");
        host.run("ip link set dev sw up mtu 1388 addrgenmode none");
        // A device for IPv6 has no DF to set, but Linux 6.1 accepts the option.
        host.run(&format!(
            "ip link add vx mtu 1388 type vxlan id 1 local {local} dstport 6787 noudpcsum \
             udp6zerocsumtx udp6zerocsumrx nolearning ttl 64"
        ));
        host.run("ip link set vx master sw up addrgenmode none");
        host.run(&format!("bridge fdb append 00:00:00:00:00:00 dev vx dst {remote}"));
        host.run(&format!("bridge fdb append {} dev vx dst {remote}", a.mac));
        let inside = Space::new();
        let target = format!("/proc/{}/fd/{}", std::process::id(), {
            use std::os::fd::{AsFd, AsRawFd};
            inside.0.as_fd().as_raw_fd()
        });
        host.run("ip link add box type veth peer name weft0");
        host.run(&format!("ip link set weft0 netns {target}"));
        host.run("ip link set box master sw up addrgenmode none");
        inside.run("ip link set weft0 address 02:00:00:01:02:03 mtu 1388 up");
        inside.run("ip address add 10.32.2.3/12 dev weft0");
        inside.run("ip address add fd32::2:3/64 dev weft0 nodad");
        let mac = weft_path::Mac([0x02, 0, 0, 1, 2, 3]);
        let c = Container { host: 2, number: 3, space: inside, port: "box".into(), mac };
        one.knows(&c);
        a.pings(&c);
        c.pings(&a);
        a.space.run("ping -c 2 -M do -s 1360 -W 20 10.32.2.3");
        one.audit();
    }
}

#[test]
fn a_switch_without_its_handle_stops_and_leaves_the_datapath() {
    let underlay = Underlay::new();
    let one = Host::new(1, &underlay);
    let (a, b) = (one.container(1), one.container(2));
    join(&[&one], &[&a, &b], Outer::Ipv4);
    a.pings(&b);
    let Host { space, kernel, switch, inbox, .. } = one;
    drop((switch, inbox));
    sleep(Duration::from_millis(300));
    a.space.run(&format!("ping -c 2 -W 2 {}", b.ipv4()));
    run_in(&space.0, || run(&format!("ip link show {TUNNEL}"))).unwrap();
    let removed = space.enter(weft_kernel::odp::remove_datapath(&kernel, SWITCH, TUNNEL));
    assert_eq!(removed.unwrap(), 4);
    assert!(!space.run("ip -o link show").contains("weft"));
}
