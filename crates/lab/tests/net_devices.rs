//! Devices of Weft's in containers and on hosts. Nothing that containers send changes routes or addresses of
//! others. IPv6 that is off stays off, and Weft repairs damage that others do.

use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use weft_bench::sandbox::{Container, Host, Netns, Running, wait_until};
use weft_lab::net::devices::{self, notes};
use weft_lab::net::{Lab, close_loop, wait_ping};

const SETTLE: Duration = Duration::from_secs(15);
const MODES: [&[&str]; 2] = [
    &["--engine", "userspace", "--port-mode", "bridge"],
    &["--engine", "userspace", "--port-mode", "direct"],
];
/// The prefix that a container announces as if it were a router.
const PREFIX: &str = "2001:db8:bad::";

/// Sends router advertisements with a default route and a prefix, as a router that runs in a container would.
fn announce_router(container: &Container) -> anyhow::Result<()> {
    // Hop limit 64, lifetime 1,800 s; prefix /64, on link and for addresses (RFC 4861 sections 4.2 and 4.6.2).
    let announcement: String = [
        &[134, 0, 0, 0, 64, 0, 7, 8][..],
        &[0; 8],
        &[3, 4, 64, 0xc0, 0, 1, 0x51, 0x80, 0, 0, 0x38, 0x40, 0, 0, 0, 0],
    ]
    .concat()
    .iter()
    .chain(&[0x20, 0x01, 0x0d, 0xb8, 0x0b, 0xad, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0])
    .map(|byte| format!("\\{byte:03o}"))
    .collect();
    // Receivers ignore routers without a link-local address (RFC 4861 section 6.1.2).
    wait_until("a link-local address of weft0", SETTLE, || {
        container
            .netns()
            .ip("-6 -o addr show dev weft0 scope link -tentative")
            .is_ok_and(|output| output.status.success() && output.stdout.contains("fe80:"))
    })?;
    // The hop limit of groups must be 255 (IPV6_MULTICAST_HOPS).
    let to = "IP6-SENDTO:[ff02::1%weft0]:58,setsockopt=41:18:xff000000";
    for _ in 0..3 {
        let send = format!("printf '{announcement}' | socat -u - '{to}'");
        container.exec(&["sh", "-ec", &send])?.success()?;
        std::thread::sleep(Duration::from_millis(200));
    }
    Ok(())
}

/// Routes and addresses that the container took from the announcement.
fn taken(netns: &Netns) -> anyhow::Result<String> {
    let routes = netns.ip("-6 route show")?.success()?.stdout;
    let addresses = netns.ip("-6 -o addr show")?.success()?.stdout;
    let bad = |line: &&str| line.contains("proto ra") || line.contains("2001:db8:bad");
    Ok(routes.lines().chain(addresses.lines()).filter(bad).collect())
}

#[test]
fn a_router_in_a_container_gives_nobody_routes_or_addresses() -> anyhow::Result<()> {
    for mode in MODES {
        let lab = Lab::pair(mode)?;
        // The port lock would drop them at once.
        let one = lab.host(0).add_container_with("c1", &["--allow-macs"])?;
        let two = lab.host(1).add_container("c2")?;
        let near = lab.host(0).add_container("near")?;
        wait_ping(&one, two.ipv6()?.into(), SETTLE)?;
        wait_ping(&one, near.ipv6()?.into(), SETTLE)?;
        // It does arrive, at the container of this host and at that of the other.
        let mut seen = Vec::new();
        for container in [&two, &near] {
            let mut capture = container.spawn(&[
                "tcpdump",
                "-l",
                "-n",
                "-c",
                "1",
                "-i",
                "weft0",
                "icmp6 and ip6[40] == 134",
            ])?;
            capture.line_with("listening", SETTLE)?;
            seen.push(capture);
        }
        announce_router(&one)?;
        for capture in &mut seen {
            capture.line_with("router advertisement", SETTLE)?;
        }
        let hosts = [lab.host(0).netns(), lab.host(1).netns()];
        for netns in [near.netns(), two.netns()].into_iter().chain(hosts) {
            assert_eq!(taken(netns)?, "", "{mode:?}: {} took of {PREFIX}", netns.name());
        }
    }
    Ok(())
}

/// Starts a daemon that finds `/proc/sys` read-only, as one in a container does.
fn start_with_read_only_sysctls(host: &Host, arguments: &[&str]) -> anyhow::Result<Running> {
    let script = format!(
        "mount --bind /proc/sys /proc/sys; mount -o remount,ro,bind /proc/sys; \
         exec {} launch --foreground --nickname {} {}",
        std::env::var("WEFT_BIN")?,
        host.nickname(),
        arguments.join(" "),
    );
    let variables = [
        ("WEFT_RUNTIME_DIR", host.runtime_directory()),
        ("WEFT_STATE_DIR", host.state_directory()),
    ];
    let set: Vec<String> =
        variables.iter().map(|(name, dir)| format!("{name}={}", dir.display())).collect();
    let mut words = vec!["env"];
    words.extend(set.iter().map(String::as_str));
    words.extend(["unshare", "-m", "--propagation", "slave", "sh", "-ec", &script]);
    let daemon = host.netns().spawn(&words)?;
    wait_until("the daemon to answer", SETTLE, || {
        host.weft(&["status"]).is_ok_and(|output| output.status.success())
    })?;
    Ok(daemon)
}

#[test]
fn where_sysctls_are_read_only_containers_get_all_and_the_host_takes_nothing() -> anyhow::Result<()>
{
    let lab = Lab::launched(1, MODES[0])?;
    let (host, password) = (lab.host(0), lab.password_file().display().to_string());
    host.stop_daemon()?;
    let arguments = [MODES[0], &["--password-file", &password]].concat();
    let mut daemon = start_with_read_only_sysctls(host, &arguments)?;
    let (one, two) = (host.add_container("one")?, host.add_container("two")?);
    wait_ping(&one, two.ipv4()?.into(), SETTLE)?;
    wait_ping(&one, two.ipv6()?.into(), SETTLE)?;
    announce_router(&one)?;
    for netns in [two.netns(), host.netns()] {
        assert_eq!(taken(netns)?, "", "{} took of {PREFIX}", netns.name());
    }
    host.weft(&["stop"])?.success()?;
    daemon.wait(SETTLE)?;
    Ok(())
}

/// The addresses that `weft attach` has printed, without their prefix lengths.
fn printed(attached: &str) -> Vec<IpAddr> {
    let words = attached.split_whitespace().filter_map(|word| word.split('/').next());
    words.filter_map(|word| word.parse().ok()).collect()
}

#[test]
fn ipv6_that_is_off_in_a_container_stays_off_and_ipv4_works_over_restarts() -> anyhow::Result<()> {
    let lab = Lab::pair(MODES[0])?;
    let (here, there) = (lab.host(0), lab.host(1));
    let far = there.add_container("far")?;
    let off = lab.sandbox.add_netns("off")?;
    for which in ["all", "default"] {
        let set = format!("net.ipv6.conf.{which}.disable_ipv6=1");
        off.exec(&["sysctl", "-qw", &set])?.success()?;
    }
    let attached = here.weft(&["attach", &off.path()])?.success()?;
    assert!(attached.stderr.contains("no IPv6: it is disabled"), "{}", attached.stderr);
    let [ipv4] = printed(&attached.stdout)[..] else { panic!("{}", attached.stdout) };
    wait_ping(&far, ipv4, SETTLE)?;
    assert!(notes(here, &off)?.contains("disabled"), "{}", notes(here, &off)?);

    here.stop_daemon()?;
    let (password, peer) = (lab.password_file().display().to_string(), there.ipv4().to_string());
    let arguments = [MODES[0], &["--password-file", &password, &peer]].concat();
    let mut daemon = start_with_read_only_sysctls(here, &arguments)?;
    wait_ping(&far, ipv4, SETTLE)?;
    let addresses = off.ip("-6 -o addr show")?.success()?.stdout;
    assert_eq!(addresses, "", "IPv6 was switched on");
    assert!(notes(here, &off)?.contains("disabled"), "{}", notes(here, &off)?);

    let asked = here.weft(&["attach", "--ipv6", &off.path()])?.success()?;
    let [_, ipv6] = printed(&asked.stdout)[..] else { panic!("{}", asked.stdout) };
    assert_eq!(notes(here, &off)?, "null");
    wait_ping(&far, ipv6, SETTLE)?;
    here.weft(&["stop"])?.success()?;
    daemon.wait(SETTLE)?;
    Ok(())
}

#[test]
fn damage_to_containers_interfaces_is_mended() -> anyhow::Result<()> {
    for mode in MODES {
        let lab = Lab::pair(mode)?;
        let far = lab.host(1).add_container("far")?;
        devices::wreck_and_wait(lab.host(0), &far, SETTLE)?;
    }
    Ok(())
}

#[test]
fn damage_that_cannot_be_mended_is_shown() -> anyhow::Result<()> {
    let lab = Lab::launched(1, MODES[0])?;
    let host = lab.host(0);
    let one = host.add_container("one")?;
    // A foreign device has the name.
    let rename = "ip link set weft0 name mine && ip link add weft0 type bridge";
    one.exec(&["sh", "-ec", rename])?.success()?;
    wait_until("the damage to be shown", SETTLE, || {
        notes(host, one.netns()).is_ok_and(|notes| notes.contains("weft0 (bridge)"))
    })?;
    let listed = host.weft(&["ps"])?.success()?.stdout;
    assert!(listed.contains("cannot repair it"), "{listed}");
    Ok(())
}

#[test]
fn the_switchs_devices_come_back_whatever_is_done_to_them() -> anyhow::Result<()> {
    // A new device restarts the engine's paths.
    const LIMIT: Duration = Duration::from_secs(30);
    for mode in MODES {
        let lab = Lab::pair(mode)?;
        let (one, two) = lab.containers()?;
        wait_ping(&one, two.ipv4()?.into(), SETTLE)?;
        for wreck in [
            "link delete weft-tap",
            "link set weft-tap down",
            "link set weft-tap nomaster",
            "link set weft-tap name other",
            "link set weft down",
            "link set weft name other",
            "link delete weft",
            "link delete weft-tap",
        ] {
            lab.host(0).netns().ip(wreck)?.success()?;
            let both = || -> anyhow::Result<()> {
                for (from, to) in [(&one, &two), (&two, &one)] {
                    // A broadcast finds the neighbour again, through all devices.
                    let _ = from.netns().ip("neigh flush dev weft0");
                    from.ping(to.ipv4()?.into())?;
                }
                Ok(())
            };
            std::thread::sleep(Duration::from_millis(500));
            wait_until(&format!("{wreck}, mended"), LIMIT, || both().is_ok())?;
        }
    }
    Ok(())
}

#[test]
fn routes_of_a_container_that_take_the_network_away_are_refused_by_name() -> anyhow::Result<()> {
    let lab = Lab::launched(1, MODES[0])?;
    let host = lab.host(0);
    let attach = |name: &str, address: &str| -> anyhow::Result<_> {
        let netns = lab.sandbox.add_netns(name)?;
        let add = format!(
            "ip link add eth0 type bridge; ip link set eth0 up; ip addr add {address} dev eth0"
        );
        netns.exec(&["sh", "-ec", &add])?.success()?;
        let attached = host.weft(&["attach", &netns.path()])?;
        Ok((netns, attached))
    };
    for (number, address) in ["10.33.1.1/16", "10.32.0.9/12"].iter().enumerate() {
        let (netns, refused) = attach(&format!("inside{number}"), address)?;
        let said = format!("{}{}", refused.stdout, refused.stderr);
        let names = ["10.3", "eth0", "10.32.0.0/12", "--ipalloc-range"];
        assert!(!refused.status.success() && names.iter().all(|it| said.contains(it)), "{said}");
        assert!(netns.ip("link show weft0").is_err(), "{address}: it has an interface");
    }
    assert_eq!(host.weft_json(&["ps"])?, serde_json::json!([]));
    // A wider network loses part of itself, which is reported.
    let (netns, attached) = attach("around", "10.1.1.1/8")?;
    let attached = attached.success()?;
    assert!(attached.stderr.contains("10.0.0.0/8 via eth0"), "{}", attached.stderr);
    assert!(notes(host, &netns)?.contains("10.0.0.0/8"), "{}", notes(host, &netns)?);
    // An attached container stays so, and reports the new route.
    netns.ip("route add 10.34.0.0/16 dev eth0")?.success()?;
    host.weft(&["attach", &netns.path()])?.success()?;
    assert!(notes(host, &netns)?.contains("10.34.0.0/16"), "{}", notes(host, &netns)?);
    // A network outside the range causes no report.
    let (netns, attached) = attach("beside", "172.17.0.2/16")?;
    assert_eq!(attached.success()?.stderr, "");
    assert_eq!(notes(host, &netns)?, "null");
    Ok(())
}

#[test]
fn a_loop_between_ports_of_two_hosts_dies_down_and_is_named() -> anyhow::Result<()> {
    for mode in MODES {
        let lab = Lab::pair(mode)?;
        let (one, two) = lab.containers()?;
        let third = lab.host(0).add_container("third")?;
        let far = lab.host(1).add_container("far")?;
        wait_ping(&third, far.ipv4()?.into(), SETTLE)?;
        close_loop(&one, &two)?;
        // One broadcast is enough: no container has the address.
        let _ = third.exec(&["ping", "-c", "1", "-W", "1", "10.47.255.1"])?;
        wait_until("the loop to be named", SETTLE, || {
            [0, 1].iter().any(|host| {
                let status = lab.host(*host).weft(&["status"]);
                status.is_ok_and(|output| output.stdout.contains("loop: broadcasts"))
            })
        })?;
        // It has died down: its frames are dropped, and nothing goes on.
        let count = || -> anyhow::Result<u64> {
            let link =
                one.exec(&["cat", "/sys/class/net/weft0/statistics/rx_packets"])?.success()?;
            Ok(link.stdout.trim().parse()?)
        };
        let before = count()?;
        std::thread::sleep(Duration::from_secs(2));
        let more = count()? - before;
        assert!(more < 3_000, "{mode:?}: {more} frames in two seconds");
        one.netns().ip("link delete cable")?.success()?;
        wait_ping(&third, far.ipv4()?.into(), SETTLE)?;
    }
    Ok(())
}

/// They differ, as many that circle do. A bridge keeps them from all other limits.
#[test]
fn of_announcements_no_more_than_the_limit_cross_and_their_sender_is_named() -> anyhow::Result<()> {
    const FRAMES: u32 = 3_000;
    const EVERY: Duration = Duration::from_millis(1);
    /// `ANNOUNCEMENTS_OF_SENDER_PER_S_MAX`.
    const LIMIT: u64 = 256;
    let lab = Lab::pair(MODES[0])?;
    let one = lab.host(0).add_container_with("c1", &["--allow-macs"])?;
    let two = lab.host(1).add_container("c2")?;
    wait_ping(&one, two.ipv4()?.into(), SETTLE)?;
    let taken = || -> anyhow::Result<u64> {
        let count = two.exec(&["cat", "/sys/class/net/weft0/statistics/rx_packets"])?.success()?;
        Ok(count.stdout.trim().parse()?)
    };
    let address = |number: u32| {
        let [_, _, a, b] = number.to_be_bytes();
        IpAddr::from(Ipv4Addr::new(10, 47, a, b))
    };
    let addresses: Vec<IpAddr> = (0..FRAMES).map(address).collect();
    let before = taken()?;
    let elapsed = devices::announce(&one, &addresses, EVERY)?;
    // Windows of a second, the last of which has only begun.
    let seconds = elapsed.as_secs() + 2;
    let crossed = taken()? - before;
    assert!(
        u64::from(FRAMES) > seconds * LIMIT * 3 / 2,
        "{FRAMES} in {seconds} s are not too many"
    );
    assert!((LIMIT..seconds * LIMIT + 300).contains(&crossed), "{crossed} crossed in {seconds} s");
    let name = format!("(container {}), more than {LIMIT} a second", one.netns().name());
    wait_until("the sender to be named", SETTLE, || {
        let status = lab.host(0).weft(&["status"]);
        let is_it = |line: &str| {
            line.contains("loop: announcements of addresses from") && line.contains(&name)
        };
        status.is_ok_and(|output| output.stdout.lines().any(is_it))
    })?;
    Ok(())
}
