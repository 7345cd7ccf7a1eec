//! Containers on the bridge.

use std::os::unix::fs::MetadataExt;

use weft_kernel::{AttachSpec, Kernel, KernelError, NoIpv6};

use crate::lab::{
    BRIDGE, Container, MTU, assert_same, attach_spec, bridge_spec, has_link, host_with_bridge,
    link, net, on_a_host, run, snapshot, wait_until_up,
};

/// The output of iproute2 inside a container, without parts that change by themselves.
fn inside(container: &Container) -> Vec<serde_json::Value> {
    vec![
        container.json("ip", &["-j", "-d", "link", "show"]),
        container.json("ip", &["-j", "-4", "address", "show"]),
        container.json("ip", &["-j", "-6", "address", "show", "scope", "global"]),
        container.json("ip", &["-j", "route", "show", "table", "main"]),
        container.json("ip", &["-j", "-6", "route", "show", "root", "ff00::/8", "table", "local"]),
    ]
}

fn addresses(container: &Container) -> Vec<String> {
    let found = container.json("ip", &["-j", "address", "show", "dev", "weft0"]);
    let list = found[0]["addr_info"].as_array().unwrap().iter();
    list.filter(|a| a["scope"] == "global")
        .map(|a| format!("{}/{}", a["local"].as_str().unwrap(), a["prefixlen"]))
        .collect()
}

#[test]
fn a_container_gets_all_it_needs() {
    on_a_host(|| async {
        let kernel = host_with_bridge().await;
        let container = Container::new();
        kernel.attach(&attach_spec(5, &container)).await.unwrap();
        let host = link("weft-box5");
        assert_eq!((&host["master"], &host["mtu"]), (&BRIDGE.into(), &MTU.into()));
        assert_eq!(host["ifalias"], "weft netns:box5");
        assert_eq!(host["inet6_addr_gen_mode"], "none");
        let end = &container.json("ip", &["-j", "-d", "link", "show", "dev", "weft0"])[0];
        assert_eq!(end["address"], "02:00:00:00:01:05");
        assert_eq!((&end["mtu"], &end["operstate"]), (&MTU.into(), &"UP".into()));
        assert_eq!(end["gso_max_segs"], 42);
        assert_eq!(addresses(&container), ["10.32.0.5/12", "fd32::5/64"]);
        let ipv6 = container.json("ip", &["-j", "-6", "address", "show", "to", "fd32::/64"]);
        assert!(ipv6[0]["addr_info"][0]["tentative"].is_null(), "{ipv6}");
        let multicast = container.json("ip", &["-j", "route", "show", "224.0.0.0/4"]);
        assert_eq!(multicast[0]["dev"], "weft0");
    });
}

#[test]
fn attaching_again_changes_nothing() {
    on_a_host(|| async {
        let kernel = host_with_bridge().await;
        let container = Container::new();
        let spec = attach_spec(5, &container);
        kernel.attach(&spec).await.unwrap();
        wait_until_up(BRIDGE);
        let (before, before_inside, changes) = (snapshot(), inside(&container), kernel.changes());
        kernel.attach(&spec).await.unwrap();
        assert_eq!(kernel.changes(), changes);
        let restarted = Kernel::new().unwrap();
        restarted.attach(&spec).await.unwrap();
        assert_eq!(restarted.changes(), 0);
        assert_same(&snapshot(), &before);
        assert_same(&inside(&container), &before_inside);
    });
}

#[test]
fn attaching_again_only_adds_what_is_missing() {
    on_a_host(|| async {
        let kernel = host_with_bridge().await;
        let container = Container::new();
        let spec = attach_spec(5, &container);
        kernel.attach(&AttachSpec { multicast_route: false, ..spec.clone() }).await.unwrap();
        container.run("ip", &["address", "add", "192.0.2.1/24", "dev", "weft0"]);
        let changes = kernel.changes();
        let mut more = spec.clone();
        more.addresses = vec![net("10.32.0.6/12")];
        more.multicast_route = false;
        kernel.attach(&more).await.unwrap();
        assert_eq!(kernel.changes(), changes + 1);
        let mut found = addresses(&container);
        found.sort();
        assert_eq!(found, ["10.32.0.5/12", "10.32.0.6/12", "192.0.2.1/24", "fd32::5/64"]);
    });
}

type Wreck = fn(&Container);

#[test]
fn deleted_parts_are_restored() {
    // One at a time, each as `kill -9`, an administrator or another program may leave it.
    let wrecks: [(&str, Wreck); 9] = [
        ("host end", |_| _ = run("ip", &["link", "delete", "weft-box5"])),
        ("container end", |c| _ = c.run("ip", &["link", "delete", "weft0"])),
        ("an address", |c| _ = c.run("ip", &["address", "delete", "10.32.0.5/12", "dev", "weft0"])),
        ("all addresses", |c| _ = c.run("ip", &["address", "flush", "dev", "weft0"])),
        ("multicast route", |c| _ = c.run("ip", &["route", "delete", "224.0.0.0/4"])),
        ("container end down", |c| _ = c.run("ip", &["link", "set", "weft0", "down"])),
        ("bridge membership", |_| _ = run("ip", &["link", "set", "weft-box5", "nomaster", "down"])),
        ("alias and settings", |c| {
            run("ip", &["link", "set", "weft-box5", "alias", ""]);
            c.run("ip", &["link", "set", "weft0", "alias", "", "mtu", "1300", "gso_max_segs", "9"]);
            c.run("ip", &["link", "set", "weft0", "address", "02:00:00:00:09:09"]);
        }),
        ("bridge", |_| _ = run("ip", &["link", "delete", BRIDGE])),
    ];
    for (what, wreck) in wrecks {
        on_a_host(move || async move {
            let kernel = host_with_bridge().await;
            let container = Container::new();
            let spec = attach_spec(5, &container);
            kernel.attach(&spec).await.unwrap();
            let before = addresses(&container);
            wreck(&container);
            let restarted = Kernel::new().unwrap();
            restarted.ensure_bridge(&bridge_spec()).await.unwrap();
            restarted.attach(&spec).await.unwrap();
            assert!(restarted.changes() > 0, "{what}");
            let mut after = addresses(&container);
            after.sort();
            assert_eq!(after, before, "{what}");
            let end = &container.json("ip", &["-j", "-d", "link", "show", "dev", "weft0"])[0];
            assert_eq!(end["gso_max_segs"], 42, "{what}");
            assert_eq!(end["address"], "02:00:00:00:01:05", "{what}");
            assert_eq!((&end["mtu"], &end["operstate"]), (&MTU.into(), &"UP".into()), "{what}");
            assert_eq!(link("weft-box5")["master"], BRIDGE, "{what}");
            assert_eq!(link("weft-box5")["ifalias"], "weft netns:box5", "{what}");
            let multicast = container.json("ip", &["-j", "route", "show", "224.0.0.0/4"]);
            assert_eq!(multicast[0]["dev"], "weft0", "{what}");
            let changes = restarted.changes();
            restarted.attach(&spec).await.unwrap();
            assert_eq!(restarted.changes(), changes, "{what}");
        });
    }
}

#[test]
fn a_container_that_was_replaced_is_attached_anew() {
    on_a_host(|| async {
        let kernel = host_with_bridge().await;
        let (old, new) = (Container::new(), Container::new());
        kernel.attach(&attach_spec(5, &old)).await.unwrap();
        kernel.attach(&attach_spec(5, &new)).await.unwrap();
        assert_eq!(addresses(&new), ["10.32.0.5/12", "fd32::5/64"]);
        assert_eq!(old.json("ip", &["-j", "link", "show"]).as_array().unwrap().len(), 1);
    });
}

#[test]
fn an_attachment_under_an_old_device_name_is_taken_over() {
    on_a_host(|| async {
        let kernel = host_with_bridge().await;
        let container = Container::new();
        let spec = attach_spec(5, &container);
        kernel.attach(&AttachSpec { host_name: "weft-old".into(), ..spec.clone() }).await.unwrap();
        kernel.attach(&spec).await.unwrap();
        assert!(!has_link("weft-old"));
        assert_eq!(link("weft-box5")["master"], BRIDGE);
    });
}

#[test]
fn containers_of_one_host_reach_each_other_in_the_kernel() {
    on_a_host(|| async {
        let kernel = host_with_bridge().await;
        let (one, two) = (Container::new(), Container::new());
        kernel.attach(&attach_spec(1, &one)).await.unwrap();
        kernel.attach(&attach_spec(2, &two)).await.unwrap();
        one.run("ping", &["-c", "1", "-W", "5", "10.32.0.2"]);
        two.run("ping", &["-c", "1", "-W", "5", "fd32::1"]);
        // A full packet passes whole; one byte more does not.
        let full = (MTU - 28).to_string();
        one.run("ping", &["-c", "1", "-W", "5", "-M", "do", "-s", &full, "10.32.0.2"]);
        let more = (MTU - 27).to_string();
        assert!(
            !one.succeeds("ping", &["-c", "1", "-W", "1", "-M", "do", "-s", &more, "10.32.0.2"])
        );
    });
}

#[test]
fn a_neighbour_that_sends_with_a_containers_mac_does_not_draw_its_traffic() {
    on_a_host(|| async {
        let kernel = host_with_bridge().await;
        let [silent, thief, third] = [1, 2, 3].map(|n| (n, Container::new()));
        for (n, container) in [&silent, &thief, &third] {
            kernel.attach(&attach_spec(*n, container)).await.unwrap();
        }
        third.1.run("ping", &["-c", "1", "-W", "5", "10.32.0.1"]);
        let thief = &thief.1;
        let mac = ["address", "02:00:00:00:01:01", "type", "macvlan"];
        thief.run("ip", &[&["link", "add", "link", "weft0", "name", "fake"][..], &mac].concat());
        thief.run("ip", &["address", "add", "10.32.0.99/12", "dev", "fake"]);
        thief.run("ip", &["link", "set", "fake", "up"]);
        // Its questions carry the address, whether or not an answer comes.
        thief.succeeds("ping", &["-c", "2", "-W", "1", "-I", "fake", "10.32.0.3"]);
        third.1.run("ping", &["-c", "1", "-W", "5", "10.32.0.1"]);
    });
}

#[test]
fn multicast_leaves_by_the_network_even_beside_another_device() {
    on_a_host(|| async {
        let kernel = host_with_bridge().await;
        let container = Container::new();
        container.run("ip", &["link", "add", "eth0", "type", "veth", "peer", "name", "eth0-x"]);
        container.run("ip", &["link", "set", "eth0-x", "up"]);
        container.run("ip", &["address", "add", "172.17.0.2/16", "dev", "eth0"]);
        container.run("ip", &["address", "add", "fd17::2/64", "dev", "eth0", "nodad"]);
        container.run("ip", &["link", "set", "eth0", "up"]);
        container.run("ip", &["route", "add", "default", "dev", "eth0"]);
        kernel.attach(&attach_spec(5, &container)).await.unwrap();
        let ipv4 = container.json("ip", &["-j", "route", "get", "239.1.2.3"]);
        assert_eq!(ipv4[0]["dev"], "weft0", "{ipv4}");
        let ipv6 = container.json("ip", &["-j", "-6", "route", "get", "ff05::1234"]);
        assert_eq!(ipv6[0]["dev"], "weft0", "{ipv6}");
    });
}

/// A container with IPv6 off for all devices, also those that come.
fn without_ipv6() -> Container {
    let container = Container::new();
    for which in ["all", "default"] {
        container.run("sysctl", &["-q", "-w", &format!("net.ipv6.conf.{which}.disable_ipv6=1")]);
    }
    container
}

#[test]
fn ipv6_is_switched_on_where_the_container_has_it_off() {
    on_a_host(|| async {
        let kernel = host_with_bridge().await;
        let container = without_ipv6();
        let spec = AttachSpec { enable_ipv6: true, ..attach_spec(5, &container) };
        assert_eq!(kernel.attach(&spec).await.unwrap().ipv6, Ok(()));
        assert_eq!(addresses(&container), ["10.32.0.5/12", "fd32::5/64"]);
    });
}

#[test]
fn ipv6_that_is_off_stays_off_unless_it_is_asked_for() {
    on_a_host(|| async {
        let kernel = host_with_bridge().await;
        let container = without_ipv6();
        let spec = attach_spec(5, &container);
        for _ in 0..2 {
            let attached = kernel.attach(&spec).await.unwrap();
            assert_eq!(attached.ipv6, Err(NoIpv6::SwitchedOff));
            assert_eq!(addresses(&container), ["10.32.0.5/12"]);
        }
        // No IPv6 address was requested, so none is missing.
        let ipv4 = spec.addresses.iter().copied().filter(|it| it.addr().is_ipv4()).collect();
        let spec = AttachSpec { addresses: ipv4, ..spec };
        assert_eq!(kernel.attach(&spec).await.unwrap().ipv6, Ok(()));
        let off = container.run("sysctl", &["-n", "net.ipv6.conf.weft0.disable_ipv6"]);
        assert_eq!(off.trim(), "1");
    });
}

/// The settings that decide what a device accepts from routers.
fn taken(container: &Container) -> Vec<String> {
    let keys = ["accept_ra", "autoconf", "accept_redirects"];
    let value = |key| {
        container.run("sysctl", &["-n", &format!("net.ipv6.conf.weft0.{key}")]).trim().to_owned()
    };
    keys.map(value).to_vec()
}

#[test]
fn a_container_takes_nothing_from_routers_whatever_its_defaults() {
    on_a_host(|| async {
        let kernel = host_with_bridge().await;
        let container = Container::new();
        container.run("sysctl", &["-q", "-w", "net.ipv6.conf.default.accept_ra=2"]);
        let spec = attach_spec(5, &container);
        kernel.attach(&spec).await.unwrap();
        assert_eq!(taken(&container), ["0", "0", "0"]);
        container.run("sysctl", &["-q", "-w", "net.ipv6.conf.weft0.accept_ra=1"]);
        kernel.attach(&spec).await.unwrap();
        assert_eq!(taken(&container), ["0", "0", "0"]);
    });
}

#[test]
fn a_path_that_leads_to_another_namespace_by_now_is_refused() {
    on_a_host(|| async {
        let kernel = host_with_bridge().await;
        let [meant, other] = [Container::new(), Container::new()];
        let of = |container: &Container| {
            let found = std::fs::metadata(container.path()).unwrap();
            (found.dev(), found.ino())
        };
        let spec = AttachSpec { identity: Some(of(&meant)), ..attach_spec(5, &other) };
        let error = kernel.attach(&spec).await.unwrap_err();
        assert!(matches!(error, KernelError::NamespaceReplaced { .. }), "{error}");
        assert!(!has_link("weft-box5"));
        let spec = AttachSpec { namespace: meant.path(), ..spec };
        kernel.attach(&spec).await.unwrap();
    });
}

#[test]
fn somebody_elses_devices_are_left_alone() {
    on_a_host(|| async {
        let kernel = host_with_bridge().await;
        let container = Container::new();
        let spec = attach_spec(5, &container);

        run("ip", &["link", "add", "weft-box5", "type", "veth", "peer", "name", "far"]);
        let before = snapshot();
        let error = kernel.attach(&spec).await.unwrap_err();
        assert!(matches!(error, KernelError::NameTaken { .. }), "{error}");
        let error = kernel.detach("weft-box5").await.unwrap_err();
        assert!(matches!(error, KernelError::NameTaken { .. }), "{error}");
        assert_same(&snapshot(), &before);
        run("ip", &["link", "delete", "weft-box5"]);

        container.run("ip", &["link", "add", "weft0", "type", "bridge"]);
        let before = inside(&container);
        let error = kernel.attach(&spec).await.unwrap_err();
        assert!(matches!(error, KernelError::NameTaken { .. }), "{error}");
        assert!(error.to_string().contains("weft0 (bridge)"), "{error}");
        let gone = [net("10.32.0.5/12")];
        let error = kernel.remove_addresses(&container.path(), "weft0", &gone).await.unwrap_err();
        assert!(matches!(error, KernelError::NameTaken { .. }), "{error}");
        assert_same(&inside(&container), &before);
        assert!(!has_link("weft-box5"));
    });
}

#[test]
fn one_container_on_two_daemons_keeps_its_first_network() {
    // Two daemons in two namespaces of one machine, as in the demo.
    let container = Container::new();
    let path = container.path();
    on_a_host(move || async move {
        let kernel = host_with_bridge().await;
        kernel.attach(&attach_spec(5, &container)).await.unwrap();
        wait_until_up(BRIDGE);
        let before = inside(&container);
        let other = Container::new();
        let spec = AttachSpec { namespace: path, ..attach_spec(5, &other) };
        let error = std::thread::spawn(move || {
            weft_io::namespace::unshare_network().unwrap();
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async { host_with_bridge().await.attach(&spec).await.unwrap_err() })
        })
        .join()
        .unwrap();
        assert!(matches!(error, KernelError::NameTaken { .. }), "{error}");
        assert_same(&inside(&container), &before);
    });
}

#[test]
fn clashes_are_named() {
    on_a_host(|| async {
        let kernel = host_with_bridge().await;
        let (one, two) = (Container::new(), Container::new());
        kernel.attach(&attach_spec(5, &one)).await.unwrap();
        let same_name = AttachSpec { id: "netns:else".into(), ..attach_spec(5, &two) };
        let error = kernel.attach(&same_name).await.unwrap_err();
        assert!(matches!(error, KernelError::AttachmentTaken { .. }), "{error}");
        assert_eq!(addresses(&one), ["10.32.0.5/12", "fd32::5/64"]);

        two.run("ip", &["address", "add", "10.32.0.7/32", "dev", "lo"]);
        let error = kernel.attach(&attach_spec(7, &two)).await.unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, KernelError::AddressInUse { .. }), "{text}");
        assert!(text.contains("10.32.0.7") && text.contains("lo"), "{text}");
    });
}

#[test]
fn namespaces_that_cannot_be_used_are_named() {
    on_a_host(|| async {
        let kernel = host_with_bridge().await;
        let container = Container::new();
        let at = |path: &str| AttachSpec { namespace: path.into(), ..attach_spec(5, &container) };
        let error = kernel.attach(&at("/run/netns/weft-no-such")).await.unwrap_err();
        assert!(matches!(error, KernelError::NamespaceGone { .. }), "{error}");
        let error = kernel.attach(&at("/dev/null")).await.unwrap_err();
        assert!(matches!(error, KernelError::Namespace { .. }), "{error}");
        let error = kernel.attach(&at("/proc/thread-self/ns/net")).await.unwrap_err();
        assert!(matches!(error, KernelError::NamespaceIsHost { .. }), "{error}");
        assert!(!has_link("weft-box5"));
    });
}

#[test]
fn detaching_takes_both_ends_and_says_whether_there_were_any() {
    on_a_host(|| async {
        let kernel = host_with_bridge().await;
        let container = Container::new();
        kernel.attach(&attach_spec(5, &container)).await.unwrap();
        let found = kernel.attachments(BRIDGE).await.unwrap();
        let found: Vec<_> = found.iter().map(|a| (a.host_name.as_str(), a.id.as_deref())).collect();
        assert_eq!(found, [("weft-box5", Some("netns:box5"))]);
        assert!(kernel.detach("weft-box5").await.unwrap());
        assert!(!kernel.detach("weft-box5").await.unwrap());
        assert_eq!(container.json("ip", &["-j", "link", "show"]).as_array().unwrap().len(), 1);
        assert!(kernel.attachments(BRIDGE).await.unwrap().is_empty());
    });
}

#[test]
fn removing_one_address_keeps_the_others() {
    on_a_host(|| async {
        let kernel = host_with_bridge().await;
        let container = Container::new();
        let mut spec = attach_spec(5, &container);
        spec.addresses.push(net("10.32.0.6/12"));
        spec.addresses.push(net("10.32.0.7/12"));
        kernel.attach(&spec).await.unwrap();
        // 10.32.0.5 is the primary address: the kernel drops its secondaries with it.
        let gone = [net("10.32.0.5/12"), net("10.32.0.99/12")];
        kernel.remove_addresses(&container.path(), "weft0", &gone).await.unwrap();
        let mut left = addresses(&container);
        left.sort();
        assert_eq!(left, ["10.32.0.6/12", "10.32.0.7/12", "fd32::5/64"]);
        let changes = kernel.changes();
        kernel.remove_addresses(&container.path(), "weft0", &gone).await.unwrap();
        assert_eq!(kernel.changes(), changes);
    });
}

#[test]
fn many_tasks_may_attach_at_once() {
    on_a_host(|| async {
        let kernel = host_with_bridge().await;
        let containers: Vec<Container> = (0..8).map(|_| Container::new()).collect();
        let mut tasks = Vec::new();
        for (n, container) in containers.iter().enumerate() {
            // Each one twice.
            for _ in 0..2 {
                let spec = attach_spec(n as u8 + 1, container);
                let kernel = kernel.clone();
                tasks.push(tokio::spawn(async move { kernel.attach(&spec).await }));
            }
        }
        for task in tasks {
            task.await.unwrap().unwrap();
        }
        assert_eq!(kernel.attachments(BRIDGE).await.unwrap().len(), 8);
        containers[0].run("ping", &["-c", "1", "-W", "5", "10.32.0.8"]);
    });
}

#[test]
fn giving_up_in_the_middle_leaves_nothing_stuck() {
    on_a_host(|| async {
        let kernel = host_with_bridge().await;
        let container = Container::new();
        let spec = attach_spec(5, &container);
        // Drop the call after each number of polls, until it once runs through.
        for polls in 1.. {
            let mut call = Box::pin(kernel.attach(&spec));
            let mut done = false;
            for _ in 0..polls {
                let poll = futures_poll(call.as_mut()).await;
                if let std::task::Poll::Ready(result) = poll {
                    result.unwrap();
                    done = true;
                    break;
                }
                tokio::task::yield_now().await;
            }
            if done {
                break;
            }
            drop(call);
            kernel.host_routes().await.unwrap();
        }
        kernel.attach(&spec).await.unwrap();
        assert_eq!(addresses(&container), ["10.32.0.5/12", "fd32::5/64"]);
    });
}

/// Polls a future once.
async fn futures_poll<F: Future + Unpin>(mut future: F) -> std::task::Poll<F::Output> {
    std::future::poll_fn(|cx| std::task::Poll::Ready(std::pin::Pin::new(&mut future).poll(cx)))
        .await
}
