//! Devices come and go.

use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities};
use weft_kernel::{
    Kernel, KernelError,
    ovpn::{OvpnClient, OvpnDeviceSpec, OvpnError, OvpnWatch, Refusal, support},
};
use weft_openvpn::device::{MTU_DEFAULT, Mode};

use crate::lab::{Carrier, Outer, Space, address, hosts, peer, wait};

#[test]
fn devices_are_made_listed_and_removed() {
    let [host] = hosts();
    let kernel = &host.kernel;
    wait(support()).unwrap();
    let spec = |name: &str, mode, own| OvpnDeviceSpec { name: name.into(), mode, own };
    let all = [
        spec("tun0", Mode::P2p, false),
        spec("tun1", Mode::Mp, true),
        spec("tun2", Mode::Mp, false),
    ];
    for spec in &all {
        let made = wait(kernel.create_ovpn_device(spec)).unwrap();
        assert_eq!((&made.name, made.mode, made.own), (&spec.name, spec.mode, spec.own));
        assert_eq!(made.mtu, MTU_DEFAULT);
        assert_eq!(wait(kernel.ovpn_device(&spec.name)).unwrap(), Some(made.clone()));
        let told = host.space.run(&format!("ip -details link show {}", spec.name));
        assert!(told.contains("ovpn"), "{told}");
        assert_eq!(told.contains("alias weft"), spec.own, "{told}");
        assert!(!told.contains(",UP"), "{told}");
        let error = wait(kernel.create_ovpn_device(spec)).unwrap_err();
        assert!(matches!(error, KernelError::NameTaken { .. }), "{error}");
    }
    let mut listed = wait(kernel.ovpn_devices()).unwrap();
    listed.sort_by(|a, b| a.name.cmp(&b.name));
    let names: Vec<_> = listed.iter().map(|device| (device.name.as_str(), device.mode)).collect();
    assert_eq!(names, [("tun0", Mode::P2p), ("tun1", Mode::Mp), ("tun2", Mode::Mp)]);
    assert_eq!(wait(kernel.ovpn_device("eth0")).unwrap(), None);
    assert!(!wait(kernel.remove_ovpn_device("eth0")).unwrap());
    assert!(!wait(kernel.remove_ovpn_device("tun9")).unwrap());
    for spec in &all {
        assert!(wait(kernel.remove_ovpn_device(&spec.name)).unwrap());
    }
    assert_eq!(wait(kernel.ovpn_devices()).unwrap(), []);
}

#[test]
fn a_caller_without_the_right_is_refused() {
    let [host] = hosts();
    let device = host.device(Mode::P2p);
    let error = host.space.within(|| {
        // Only this thread loses the capability, and it ends with the request.
        let all = capabilities(None).unwrap();
        let effective = all.effective.difference(CapabilitySet::NET_ADMIN);
        set_capabilities(None, CapabilitySets { effective, ..all }).unwrap();
        wait(async {
            let client = OvpnClient::open().await.unwrap();
            client.delete_peer(device, 1).await.unwrap_err()
        })
    });
    assert_eq!((error.errno(), error.refusal()), (Some(1), Some(Refusal::NotPermitted)), "{error}");
    // With the capability, the error names the actual problem.
    let error = wait(host.client.delete_peer(device, 1)).unwrap_err();
    assert_eq!(error.refusal(), Some(Refusal::Absent), "{error}");
}

#[test]
fn the_namespace_of_a_peers_socket_is_told_where_it_is_another() {
    let [a, b] = hosts();
    let device = a.device(Mode::P2p);
    for (host, is_told) in [(&a, false), (&b, true)] {
        let carrier = Carrier::Udp(host.udp("0.0.0.0:1194"));
        let new = peer(1, Some(address(2, Outer::Udp4)));
        wait(a.client.new_peer(device, carrier.fd(), &new)).unwrap();
        let found = wait(a.client.peer(device, 1)).unwrap();
        assert_eq!(found.socket_netns.is_some_and(|number| number >= 0), is_told, "{found:?}");
    }
}

/// On a kernel without the module this is the only test that can pass.
#[test]
fn a_kernel_that_lacks_the_module_says_so() {
    let space = Space::new();
    let has = space.succeeds("modprobe --dry-run ovpn");
    // Made first, so that where no test before this one has loaded the module this one does.
    space.succeeds("modprobe --remove ovpn");
    let kernel = space.enter(async { Kernel::new().unwrap() });
    let spec = OvpnDeviceSpec { name: "tun0".into(), mode: Mode::P2p, own: false };
    let made = wait(kernel.create_ovpn_device(&spec));
    let (support, client, watch) =
        space.enter(async { (support().await, OvpnClient::open().await, OvpnWatch::open().await) });
    println!("{has}: {support:?} {made:?}, {} requests", kernel.changes());
    if has {
        assert!(support.is_ok() && client.is_ok() && watch.is_ok() && made.is_ok());
        return;
    }
    for error in [support.unwrap_err(), client.err().unwrap(), watch.err().unwrap()] {
        assert!(matches!(error, OvpnError::Missing), "{error}");
    }
    assert!(matches!(made, Err(KernelError::NoOvpn { .. })), "{made:?}");
    assert_eq!(wait(kernel.ovpn_devices()).unwrap(), []);
}
