//! The announced TCP segment size where a peer's path is smaller than the containers' MTU.

use std::net::{TcpListener, TcpStream};

use weft_kernel::{Kernel, KernelError, MssClamp, OuterFamily};

use crate::{
    lab::{Container, on_a_host, run},
    switch::hosts,
};

const REMOTE: [u8; 6] = [0x02, 0, 0, 0, 1, 2];

/// The segment sizes of both ends of a new connection from the first container to the second.
fn segment_sizes(containers: &[Container], to: &str) -> [u32; 2] {
    let listener = containers[1].inside(|| TcpListener::bind(to).unwrap());
    let client = containers[0].inside(|| TcpStream::connect(to).unwrap());
    let server = listener.accept().unwrap().0;
    let port = client.local_addr().unwrap().port();
    let shown = |container: &Container, filter: String| -> u32 {
        let text = container.run("ss", &["-tinH", &filter]);
        let found = text.split(" mss:").nth(1).unwrap_or_else(|| panic!("no mss: {text}"));
        found.split(' ').next().unwrap().parse().unwrap()
    };
    let sizes = [
        shown(&containers[0], format!("sport = :{port}")),
        shown(&containers[1], format!("dport = :{port}")),
    ];
    drop(server);
    sizes
}

#[test]
fn both_ends_send_no_more_than_the_way_carries() {
    clamped(|kernel| MssClamp::at_bridge(kernel, &["weft-vxlan", "weft-vxlan6"]));
}

#[test]
fn both_ends_send_no_more_than_the_way_behind_a_device_carries() {
    clamped(|kernel| MssClamp::at_device(kernel, "weft-vxlan"));
}

fn clamped(clamp: fn(Kernel) -> Result<MssClamp, KernelError>) {
    on_a_host(move || async move {
        let (hosts, containers) = hosts(OuterFamily::V4, 2).await;
        let mut clamp = clamp(hosts[0].kernel.clone()).unwrap();
        assert!(!clamp.set(&[]).await.unwrap());
        // Twelve bytes of each segment are time stamps.
        assert_eq!(segment_sizes(&containers, "10.32.0.2:5001"), [1336, 1336]);
        assert!(clamp.set(&[(REMOTE, 1300), ([2, 0, 0, 0, 1, 9], 1280)]).await.unwrap());
        assert_eq!(segment_sizes(&containers, "10.32.0.2:5002"), [1248, 1248]);
        assert_eq!(segment_sizes(&containers, "[fd32::2]:5003"), [1228, 1228]);
        let before = hosts[0].namespace.run("nft", &["-a", "list", "ruleset"]);
        let wanted = [([2, 0, 0, 0, 1, 9], 1280), (REMOTE, 1300)];
        assert!(!clamp.set(&wanted).await.unwrap());
        assert_eq!(hosts[0].namespace.run("nft", &["-a", "list", "ruleset"]), before);
        // Another endpoint's path does not affect this one.
        assert!(clamp.set(&[([2, 0, 0, 0, 1, 9], 1280)]).await.unwrap());
        assert_eq!(segment_sizes(&containers, "10.32.0.2:5004"), [1336, 1336]);
        assert!(clamp.remove().await.unwrap());
        assert!(!clamp.remove().await.unwrap());
        assert_eq!(hosts[0].namespace.run("nft", &["list", "ruleset"]).trim(), "");
    });
}

#[test]
fn a_table_of_that_name_that_is_not_ours_is_left_alone() {
    on_a_host(|| async {
        run("nft", &["add table bridge weft-mss"]);
        let kernel = weft_kernel::Kernel::new().unwrap();
        let mut clamp = MssClamp::at_bridge(kernel, &["weft-vxlan"]).unwrap();
        let error = clamp.set(&[(REMOTE, 1300)]).await.unwrap_err();
        assert!(matches!(error, KernelError::TableTaken { .. }), "{error}");
    });
}
