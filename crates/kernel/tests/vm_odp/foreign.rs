//! Other programs' objects stay, and damage by other programs is repaired.

use std::time::Duration;

use weft_kernel::{
    BridgeSpec, KernelError,
    odp::{OdpEvent, OdpSwitch, remove_datapath},
};

use crate::{
    broadcast::open_tap,
    lab::{
        Host, Outer, SWITCH, Space, TAP, TUNNEL, Underlay, join, peer, spec, start, tunnel, until,
        wait,
    },
    theirs::Theirs,
};

#[test]
fn another_datapath_beside_survives() {
    let underlay = Underlay::new();
    let one = Host::new(1, &underlay);
    let a = one.container(1);
    let theirs = Theirs::new(&one.space);
    let other = theirs.new_datapath("br-int");
    one.space.run("ip link add foreign type veth peer name foreign-x");
    theirs.new_port(other, "foreign");
    theirs.new_flow(other, 1);
    let ports = theirs.ports(other);
    assert_eq!((ports.len(), theirs.flows(other)), (2, 1));
    // Its port is not ours to take.
    let taken = wait(one.switch.add_port(1, "foreign")).unwrap_err();
    assert!(matches!(taken, KernelError::PortTaken { .. }), "{taken}");
    drop(a);
    wait(one.switch.stop()).unwrap();
    let (_, switch, _inbox) = start(&one.space, spec(1));
    assert!(wait(switch.remove()).unwrap() >= 2);
    assert_eq!((theirs.ports(other), theirs.flows(other)), (ports, 1));
    assert_eq!(theirs.datapath(SWITCH), None);
}

#[test]
fn a_datapath_or_device_under_our_name_is_not_touched() {
    let space = Space::new();
    let theirs = Theirs::new(&space);
    let other = theirs.new_datapath(SWITCH);
    let before = space.run("ip -o link show");
    space.enter(async {
        let kernel = weft_kernel::Kernel::new().unwrap();
        let refused = OdpSwitch::start(&kernel, spec(1)).await.unwrap_err();
        assert!(matches!(refused, KernelError::NameTaken { .. }), "{refused}");
        let refused = remove_datapath(&kernel, SWITCH, TUNNEL).await.unwrap_err();
        assert!(matches!(refused, KernelError::NameTaken { .. }), "{refused}");
    });
    assert_eq!(theirs.datapath(SWITCH), Some(other));
    assert_eq!(space.run("ip -o link show"), before);
    theirs.delete_datapath(other);
    // Another program's VXLAN device on the UDP port.
    space.run("ip link add theirs type vxlan id 5 dstport 6787");
    space.run("ip link set theirs up");
    space.enter(async {
        let kernel = weft_kernel::Kernel::new().unwrap();
        let refused = OdpSwitch::start(&kernel, spec(1)).await.unwrap_err();
        assert!(matches!(refused, KernelError::UdpPortTaken { port: 6787, .. }), "{refused}");
        remove_datapath(&kernel, SWITCH, TUNNEL).await.unwrap();
    });
    assert!(space.run("ip -o link show").contains("theirs"));
    assert!(!space.run("ip -o link show").contains("weft"));
}

#[test]
fn a_bridge_of_ours_makes_way() {
    let underlay = Underlay::new();
    let space = Space::new();
    let inside = Space::new();
    space.enter(async {
        let kernel = weft_kernel::Kernel::new().unwrap();
        let bridge = BridgeSpec { name: SWITCH.into(), mac: [2, 0, 0, 1, 1, 0xff], mtu: 1388 };
        kernel.ensure_bridge(&bridge).await.unwrap();
        let mut attach = crate::lab::attach_spec(1, 1, &inside);
        attach.bridge = Some(SWITCH.into());
        kernel.attach(&attach).await.unwrap();
    });
    space.run("ip link add weft-probe group 0x57454654 type vxlan id 0xffffff dstport 6787");
    space.run("ip link set weft-probe up");
    let (_kernel, switch, _inbox) = start(&space, spec(1));
    wait(switch.add_port(1, "weft-box1")).unwrap();
    let shown = space.run("ip -o -d link show");
    assert!(shown.contains("master weft") && shown.contains("openvswitch"), "{shown}");
    assert!(!shown.contains("weft-probe"));
    drop(underlay);
    assert_eq!(wait(switch.remove()).unwrap(), 3);
    assert!(!space.run("ip -o link show").contains("weft"));
}

#[test]
fn only_one_switch_drives_a_namespace() {
    let underlay = Underlay::new();
    let one = Host::new(1, &underlay);
    one.space.enter(async {
        let kernel = weft_kernel::Kernel::new().unwrap();
        let refused = OdpSwitch::start(&kernel, spec(1)).await.unwrap_err();
        assert!(matches!(refused, KernelError::SwitchTaken), "{refused}");
    });
    one.audit();
}

#[test]
fn deletions_by_hand_are_restored() {
    let underlay = Underlay::new();
    let (mut one, two) = (Host::new(1, &underlay), Host::new(2, &underlay));
    let (a, c) = (one.container(1), two.container(3));
    join(&[&one, &two], &[&a, &c], Outer::Ipv4);
    a.pings(&c);
    let theirs = Theirs::new(&one.space);
    let datapath = theirs.datapath(SWITCH).unwrap();
    let number = |name: &str| {
        let ports = theirs.ports(datapath);
        ports.into_iter().find(|(_, of)| of == name).map(|(number, _)| number)
    };
    // A container's port.
    theirs.delete_port(datapath, number(&a.port).unwrap());
    until("the port is back", || number(&a.port).is_some());
    a.pings(&c);
    // All flows.
    theirs.flush_flows(datapath);
    a.pings(&c);
    wait(one.switch.sweep()).unwrap();
    until("the loss is noticed", || one.counters().flows_vanished > 0);
    // The tunnel's port, then its device, then its settings.
    theirs.delete_port(datapath, number(TUNNEL).unwrap());
    until("the tunnel's port is back", || number(TUNNEL).is_some());
    a.pings(&c);
    one.space.run(&format!("ip link delete {TUNNEL}"));
    until("the tunnel's device is back", || number(TUNNEL).is_some());
    a.pings(&c);
    one.space.run(&format!("ip link set {TUNNEL} down"));
    one.space.run(&format!("ip link set {SWITCH} mtu 1400 address 02:00:00:00:00:77"));
    wait(one.switch.reconcile()).unwrap();
    let shown = one.space.run(&format!("ip link show {SWITCH}"));
    assert!(shown.contains("mtu 1388") && shown.contains("02:00:00:01:01:ff"), "{shown}");
    a.pings(&c);
    // The vector engine ends and comes back.
    let tap = open_tap(&one.space, TAP);
    until("the TAP is a port", || number(TAP).is_some());
    drop(tap);
    until("the TAP is none", || number(TAP).is_none());
    let _tap = open_tap(&one.space, TAP);
    until("the TAP is a port again", || number(TAP).is_some());
    until("the TAP's news", || {
        let mut seen = Vec::new();
        while let Ok(event) = one.inbox.events.try_recv() {
            seen.push(event);
        }
        seen.contains(&OdpEvent::PortAdded { name: TAP.into() })
    });
    // An administrator's own device.
    one.space.run("ip link add extra type veth peer name extra-x");
    one.space.run("ip link set extra up");
    theirs.new_port(datapath, "extra");
    wait(one.switch.add_port(1, "extra")).unwrap();
    assert_eq!(wait(one.switch.retain_ports(std::slice::from_ref(&a.port))).unwrap(), 0);
    one.audit();
    // A name that is not there.
    let missing = wait(one.switch.add_port(1, "weft-none")).unwrap_err();
    assert!(matches!(missing, KernelError::LinkMissing { .. }), "{missing}");
}

#[test]
fn a_deleted_datapath_is_reported() {
    let underlay = Underlay::new();
    let mut one = Host::new(1, &underlay);
    let theirs = Theirs::new(&one.space);
    theirs.delete_datapath(theirs.datapath(SWITCH).unwrap());
    let failed = wait(async {
        let next = async {
            loop {
                match one.inbox.events.recv().await {
                    Some(OdpEvent::Failed { reason }) => return reason,
                    Some(_) => {}
                    None => panic!("no word of the end"),
                }
            }
        };
        tokio::time::timeout(Duration::from_secs(10), next).await.unwrap()
    });
    assert!(failed.contains(SWITCH), "{failed}");
    let refused = wait(one.switch.set_peer(peer(2), tunnel(2, Outer::Ipv4))).unwrap_err();
    assert!(matches!(refused, KernelError::SwitchStopped { .. }), "{refused}");
    assert!(refused.to_string().contains("deleted"), "{refused}");
    let (_, switch, _inbox) = start(&one.space, spec(1));
    wait(switch.counters()).unwrap();
}
