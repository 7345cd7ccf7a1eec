//! Events of network devices.

use std::time::Duration;

use weft_kernel::{Kernel, LinkEvent, LinkWatch};

use crate::lab::{make_device, on_a_host, run, switch_on};

/// Longer than any event takes; a test that waits this long has failed.
const PATIENCE: Duration = Duration::from_secs(20);

/// The time without an event after which none is expected.
const QUIET: Duration = Duration::from_millis(300);

async fn wait_for(watch: &mut LinkWatch, wanted: &LinkEvent) -> Vec<LinkEvent> {
    let mut seen = Vec::new();
    while seen.last() != Some(wanted) {
        let next = tokio::time::timeout(PATIENCE, watch.next()).await;
        let next = next.unwrap_or_else(|_| panic!("no {wanted:?} among {seen:?}"));
        seen.push(next.unwrap());
    }
    seen
}

#[test]
fn events_of_a_device_are_told_in_order() {
    on_a_host(|| async {
        make_device("before");
        let kernel = Kernel::new().unwrap();
        let mut watch = kernel.watch().await.unwrap();
        let name = || "d0".to_owned();
        // A bridge without a fixed address takes that of its port, which is an event.
        run("ip", &["link", "add", "d0", "address", "02:00:00:00:00:01", "type", "bridge"]);
        run("ip", &["link", "set", "before", "master", "d0"]);
        switch_on("before");
        let steps: [(&[&str], LinkEvent); 4] = [
            (&["link", "set", "d0", "up"], LinkEvent::Up { name: name() }),
            (
                &["link", "set", "d0", "mtu", "1400"],
                LinkEvent::MtuChanged { name: name(), mtu: 1400 },
            ),
            (&["link", "set", "d0", "down"], LinkEvent::Down { name: name() }),
            (&["link", "delete", "d0"], LinkEvent::Removed { name: name() }),
        ];
        let mut events = Vec::new();
        for (step, event) in steps {
            run("ip", step);
            events.extend(wait_for(&mut watch, &event).await);
        }
        let expected = [
            LinkEvent::Added { name: name() },
            LinkEvent::Up { name: name() },
            LinkEvent::MtuChanged { name: name(), mtu: 1400 },
            LinkEvent::Down { name: name() },
            LinkEvent::Removed { name: name() },
        ];
        let of_d0 = events.into_iter().filter(|event| format!("{event:?}").contains("d0"));
        assert_eq!(of_d0.collect::<Vec<_>>(), expected);
    });
}

#[test]
fn leaving_a_bridge_or_losing_the_other_end_is_told_as_what_it_is() {
    on_a_host(|| async {
        run("ip", &["link", "add", "br0", "type", "bridge"]);
        run("ip", &["link", "add", "one", "type", "veth", "peer", "name", "two"]);
        for device in ["one", "two"] {
            run("ip", &["link", "set", device, "up"]);
        }
        run("ip", &["link", "set", "one", "master", "br0"]);
        let mut watch = Kernel::new().unwrap().watch().await.unwrap();
        run("ip", &["link", "set", "one", "nomaster"]);
        run("ip", &["link", "set", "two", "down"]);
        let events = wait_for(&mut watch, &LinkEvent::Down { name: "one".into() }).await;
        assert!(
            !events.iter().any(|event| matches!(event, LinkEvent::Removed { .. })),
            "{events:?}"
        );
        run("ip", &["link", "delete", "two"]);
        wait_for(&mut watch, &LinkEvent::Removed { name: "one".into() }).await;
        run("ip", &["link", "set", "br0", "name", "br1"]);
        let events = wait_for(&mut watch, &LinkEvent::Added { name: "br1".into() }).await;
        assert!(events.contains(&LinkEvent::Removed { name: "br0".into() }), "{events:?}");
    });
}

#[test]
fn lost_notices_are_made_up_for_and_older_ones_do_not_come_after() {
    on_a_host(|| async {
        let mut watch = Kernel::new().unwrap().watch().await.unwrap();
        run("ip", &["link", "add", "doomed", "type", "bridge"]);
        wait_for(&mut watch, &LinkEvent::Added { name: "doomed".into() }).await;
        // More notices than the socket holds, none of them read: the last ones are lost, also that `brief`, which the
        // first ones tell of, is gone.
        run("ip", &["link", "add", "brief", "type", "bridge"]);
        let directory = std::env::temp_dir().join(format!("weft-watch-{}", std::process::id()));
        let flood: String = (0..4000)
            .map(|n| format!("link set doomed mtu {}\n", 1300 + n % 2))
            .chain(["doomed", "brief"].map(|device| format!("link delete {device}\n")))
            .chain(["link add late type bridge\n".into()])
            .collect();
        std::fs::write(&directory, flood).unwrap();
        run("ip", &["-batch", directory.to_str().unwrap()]);
        std::fs::remove_file(&directory).unwrap();
        let mut events = vec![watch.next().await.unwrap()];
        // The socket is full still, and the kernel drops this notice, too.
        run("ip", &["link", "set", "late", "mtu", "1400"]);
        run("ip", &["link", "add", "last", "type", "bridge"]);
        events.extend(wait_for(&mut watch, &LinkEvent::Added { name: "last".into() }).await);
        while let Ok(event) = tokio::time::timeout(QUIET, watch.next()).await {
            events.push(event.unwrap());
        }
        for device in ["doomed", "brief"] {
            let mut its = events.iter().filter(|event| event.device() == device);
            let last = its.next_back().unwrap_or_else(|| panic!("no word of {device}: {events:?}"));
            assert_eq!(last, &LinkEvent::Removed { name: device.into() });
        }
        assert!(events.len() < 4000, "nothing was lost, so nothing was shown: {}", events.len());
        run("ip", &["link", "set", "late", "mtu", "1300"]);
        wait_for(&mut watch, &LinkEvent::MtuChanged { name: "late".into(), mtu: 1300 }).await;
    });
}
