//! Devices of Weft's where the kernel moves the frames. Weft repairs damage that others do, and a loop between
//! ports of two hosts dies down and is named.

use std::net::{Ipv4Addr, UdpSocket};
use std::time::{Duration, Instant};

use weft_bench::sandbox::{Container, wait_until};
use weft_io::namespace::{Namespace, run_in};
use weft_io::packet::PacketSocket;
use weft_lab::net::guest::stage::{is_on, wait_path};
use weft_lab::net::guest::{SETTLE_LIMIT, Stage, by_clock, figure, host};
use weft_lab::net::{close_loop, devices, namespace};

const KERNEL: [&str; 2] = ["--engine", "kernel"];

/// Two hosts whose kernels move the frames.
fn pair(options: &[&str]) -> anyhow::Result<Stage> {
    let stage = Stage::pair(options, options)?;
    on_kernel(&stage)?;
    Ok(stage)
}

fn on_kernel(stage: &Stage) -> anyhow::Result<()> {
    let (here, there) = (stage.host(0), stage.host(1));
    for (host, peer) in [(here, there), (there, here)] {
        wait_path(host, peer, "the kernel's path", by_clock(90), is_on("kernel", "kernel"))?;
    }
    Ok(())
}

#[test]
fn damage_to_containers_interfaces_is_mended_on_the_bridge() -> anyhow::Result<()> {
    damaged("bridge")
}

#[test]
fn damage_to_containers_interfaces_is_mended_on_odp() -> anyhow::Result<()> {
    damaged("odp")
}

fn damaged(switch: &str) -> anyhow::Result<()> {
    let stage = pair(&[&KERNEL[..], &["--switch", switch]].concat())?;
    let far = stage.host(1).add_container("far")?;
    let mended = devices::wreck_and_wait(stage.host(0), &far, SETTLE_LIMIT);
    mended.map_err(|error| error.context(stage.diagnosis()))?;
    on_kernel(&stage)
}

#[test]
fn the_engines_devices_come_back_whatever_is_done_to_them() -> anyhow::Result<()> {
    let stage = pair(&KERNEL)?;
    let (one, two) = stage.containers()?;
    stage.reach(&one, &two)?;
    for wreck in [
        "link set weft-vxlan down",
        "link set weft-vxlan nomaster",
        "link set weft-vxlan name other",
        "link set weft-vxlan address 02:00:00:00:09:09",
        "link set weft-probe down",
        "link set weft-probe name other",
        "link set weft down",
        "link set weft name other",
    ] {
        devices::damage(stage.host(0).netns(), wreck)?;
        std::thread::sleep(Duration::from_millis(500));
        let taken = wait_until(&format!("{wreck}, mended"), by_clock(60), || {
            [(&one, &two), (&two, &one)].iter().all(|(from, to)| {
                // A broadcast finds the neighbour again, through all devices.
                let _ = from.netns().ip("neigh flush dev weft0");
                to.ipv4().is_ok_and(|to| from.ping(to.into()).is_ok())
            })
        });
        let taken = taken.map_err(|error| anyhow::anyhow!("{error}: {}", stage.diagnosis()))?;
        figure(&format!("{wreck}, mended after"), format!("{taken:?}"));
        on_kernel(&stage).map_err(|error| error.context(wreck))?;
    }
    Ok(())
}

/// Frames that a container's interface has taken.
fn taken(container: &Container) -> anyhow::Result<u64> {
    let count =
        container.exec(&["cat", "/sys/class/net/weft0/statistics/rx_packets"])?.success()?;
    Ok(count.stdout.trim().parse()?)
}

/// The kernel engine's limits are looked at every ten seconds, and status after that.
const NAMED_LIMIT_S: u64 = 40;

/// Waits until the status of one of these hosts names a loop in these words.
fn wait_named(stage: &Stage, indices: &[usize], words: &[&str]) -> anyhow::Result<Duration> {
    let is_it =
        |line: &str| line.contains("loop: ") && words.iter().all(|word| line.contains(word));
    let named = || {
        indices.iter().any(|index| {
            let text = stage.host(*index).weft(&["status"]).map(|output| output.stdout);
            text.is_ok_and(|text| text.lines().any(is_it))
        })
    };
    let waited = wait_until("the loop to be named", by_clock(NAMED_LIMIT_S), named);
    waited.map_err(|error| anyhow::anyhow!("{error}: {}", stage.diagnosis()))
}

#[test]
fn a_loop_between_ports_of_two_hosts_dies_down_and_is_named() -> anyhow::Result<()> {
    circles("bridge")
}

#[test]
fn a_loop_between_ports_of_two_datapaths_dies_down_and_is_named() -> anyhow::Result<()> {
    circles("odp")
}

fn circles(switch: &str) -> anyhow::Result<()> {
    let stage = pair(&[&KERNEL[..], &["--switch", switch]].concat())?;
    // A port whose lock is closed takes nothing that others have sent, so that no loop is closed through it.
    let open = |index: usize| stage.host(index).add_container_with("open", &["--allow-macs"]);
    let (one, two) = (open(0)?, open(1)?);
    let third = stage.host(0).add_container("third")?;
    let far = stage.host(1).add_container("far")?;
    stage.reach(&third, &far)?;
    close_loop(&one, &two)?;
    let before = taken(&one)?;
    // No container has the address.
    let _ = third.exec(&["ping", "-c", "1", "-W", "1", "10.47.255.1"])?;
    let waited = wait_named(&stage, &[0, 1], &["broadcasts from container weft-"])?;
    figure("the loop was named after", format!("{waited:?}, {} frames", taken(&one)? - before));
    // It dies down, except for occasional traffic of the containers.
    let calm = || -> anyhow::Result<bool> {
        let before = taken(&one)?;
        std::thread::sleep(Duration::from_secs(3));
        Ok(taken(&one)? - before < 100)
    };
    let waited = wait_until("the loop to die down", by_clock(60), || calm().unwrap_or(false));
    let waited = waited.map_err(|error| anyhow::anyhow!("{error}: {}", stage.diagnosis()))?;
    figure("it had died down after", format!("{waited:?}, {} frames", taken(&one)? - before));
    one.netns().ip("link delete cable")?.success()?;
    stage.reach(&third, &far)?;
    Ok(())
}

/// Frames that differ, as many that go round at once do: no engine knows them by their copies.
#[test]
fn of_broadcasts_no_more_than_the_limit_cross_and_their_port_is_named() -> anyhow::Result<()> {
    too_many("bridge")
}

#[test]
fn of_broadcasts_no_more_than_the_limit_cross_a_datapath_and_their_port_is_named()
-> anyhow::Result<()> {
    too_many("odp")
}

fn too_many(switch: &str) -> anyhow::Result<()> {
    const FRAMES: u32 = 10_000;
    const EVERY: Duration = Duration::from_millis(1);
    /// `BROADCASTS_AT_ONCE_MAX` and `BROADCASTS_PER_S_MAX` of the kernel engine.
    const LIMITS: (u64, u64) = (2_000, 200);
    let stage = pair(&[&KERNEL[..], &["--switch", switch]].concat())?;
    let (one, two) = stage.containers()?;
    let third = stage.host(0).add_container("third")?;
    stage.reach(&third, &two)?;
    let mac = devices::mac(&one)?;
    let before = taken(&two)?;
    let start = Instant::now();
    run_in(Namespace::open(&namespace(&one))?, || -> anyhow::Result<()> {
        let sender = PacketSocket::sender()?;
        let index = sender.index_of("weft0")?;
        for number in 0..FRAMES {
            // Their type is for experiments (IEEE 802), so no container answers.
            let number_bytes = number.to_be_bytes();
            let frame = [&[0xff; 6][..], &mac, &[0x88, 0xb5], &number_bytes, &[7; 50]].concat();
            sender.send(&frame, index)?;
            std::thread::sleep((EVERY * number).saturating_sub(start.elapsed()));
        }
        Ok(())
    })??;
    let elapsed = start.elapsed();
    let crossed = taken(&two)? - before;
    figure("broadcasts", format!("{crossed} of {FRAMES} crossed in {elapsed:.1?}"));
    let most = LIMITS.0 + LIMITS.1 * elapsed.as_secs();
    assert!(u64::from(FRAMES) > most * 3 / 2, "{FRAMES} in {elapsed:?} are not too many");
    assert!(crossed < most + 300, "{crossed} of {FRAMES} crossed in {elapsed:?}");
    assert!(crossed >= LIMITS.0, "{crossed} crossed, less than may come at once");
    let name = format!("broadcasts from container {}", one.netns().name());
    let waited = wait_named(&stage, &[0], &[&name, "more than 200 a second"])?;
    figure("they were named after", format!("{waited:?}"));
    assert!(host::kernel_counter(stage.host(0), "broadcasts_limited")? > 0);
    // Another container's broadcasts cross all the while, and this one's after a pause.
    for from in [&third, &one] {
        from.netns().ip("neigh flush dev weft0")?.success()?;
        stage.reach(from, &two)?;
    }
    Ok(())
}

/// The device of the datapath itself has no announced address, so that peers count what it sends as foreign.
#[test]
fn multicast_groups_of_a_datapaths_host_are_told_to_no_peer() -> anyhow::Result<()> {
    const HOST: Ipv4Addr = Ipv4Addr::new(10, 47, 250, 1);
    let stage = pair(&[&KERNEL[..], &["--switch", "odp"]].concat())?;
    let (one, two) = stage.containers()?;
    let rules = "table ip t { counter host { }; counter container { }; chain in { \
                 type filter hook prerouting priority 0; \
                 ip protocol igmp ip saddr 10.47.250.1 counter name host; \
                 ip protocol igmp ip saddr != 10.47.250.1 counter name container; }; }";
    two.exec(&["nft", rules])?.success()?;
    let heard = |of: &str| -> anyhow::Result<u64> {
        let shown = two.exec(&["nft", "list", "counter", "ip", "t", of])?.success()?.stdout;
        let packets = shown.split("packets ").nth(1).and_then(|rest| rest.split(' ').next());
        Ok(packets.unwrap_or_default().parse()?)
    };
    let host = stage.host(0);
    host.netns().ip(&format!("addr add {HOST}/12 dev weft"))?.success()?;
    let before = host::kernel_counter(host, "bridge_reports_kept")?;
    let join = |namespace: std::path::PathBuf, address: Ipv4Addr| -> anyhow::Result<UdpSocket> {
        let socket = run_in(Namespace::open(&namespace)?, || UdpSocket::bind("0.0.0.0:0"))??;
        socket.join_multicast_v4(&Ipv4Addr::new(239, 7, 7, 7), &address)?;
        Ok(socket)
    };
    let _listens = join(host.netns().path().into(), HOST)?;
    let kept = || host::kernel_counter(host, "bridge_reports_kept").is_ok_and(|it| it > before);
    wait_until("the host's report to be kept", by_clock(40), kept)
        .map_err(|error| anyhow::anyhow!("{error}: {}", stage.diagnosis()))?;
    let _listens = join(namespace(&one), one.ipv4()?)?;
    wait_until("a container's report to cross", by_clock(20), || {
        heard("container").is_ok_and(|packets| packets > 0)
    })?;
    assert_eq!(heard("host")?, 0, "reports of the other host");
    Ok(())
}
