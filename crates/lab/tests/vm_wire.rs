//! The kernel engine's traffic on the wire, and the limits of an attacker there.

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use weft_bench::sandbox::{Container, Host};
use weft_io::uninterrupted;
use weft_lab::net::capture::{Capture, contains, tshark};
use weft_lab::net::guest::flow::MARKER;
use weft_lab::net::guest::stage::{is_on, wait_path};
use weft_lab::net::guest::xfrm::Flush;
use weft_lab::net::guest::{
    FAIL_OVER_LIMIT, Flow, LeakWatch, Outer, SETTLE_LIMIT, Stage, artefacts, figure, foreign, host,
    xfrm,
};
use weft_lab::net::iperf::Server;
use weft_lab::net::{is_soak, namespace, probe, read};

const KERNEL: [&str; 2] = ["--engine", "kernel"];
/// Between two datagrams of a stream.
const EVERY: Duration = Duration::from_millis(10);

#[test]
fn tshark_with_the_keys_decrypts_the_kernels_esp_raw() -> anyhow::Result<()> {
    decrypts(&["--engine", "kernel"], "raw", "esp", "proto 50")
}

#[test]
fn tshark_with_the_keys_decrypts_the_kernels_esp_in_udp() -> anyhow::Result<()> {
    decrypts(&["--engine", "userspace"], "udp", "udp port 6784 or udp port 6785", "in UDP")
}

/// Host 1 runs the kernel engine; `other` are the options of host 2.
fn decrypts(other: &[&str], encapsulation: &str, filter: &str, name: &str) -> anyhow::Result<()> {
    let stage = Stage::new(2)?;
    let keys = stage.directory().join("keys");
    let text = keys.to_string_lossy().into_owned();
    let environment = [("WEFT_SA_KEYLOG", text.as_str())];
    stage.launch_with(0, &KERNEL, &environment)?;
    stage.launch_with(1, other, &environment)?;
    let on = is_on("kernel", other[1]);
    let path = wait_path(stage.host(0), stage.host(1), "a path", SETTLE_LIMIT, on)?;
    assert_eq!(path["encapsulation"], encapsulation, "{path}");
    let (one, two) = stage.containers()?;
    stage.reach(&one, &two)?;

    let file = artefacts(&stage)?.join(format!("esp-{}.pcap", name.replace(' ', "-")));
    let capture = Capture::start(stage.host(0).netns(), "eth0", &file, filter)?;
    one.ping(two.ipv4()?.into())?;
    let receiver = probe::udp_in(&namespace(&two), (two.ipv4()?, 5001).into())?;
    let sender = probe::udp_in(&namespace(&one), (one.ipv4()?, 0).into())?;
    sender.send_to(MARKER, receiver.local_addr()?)?;
    probe::expect_datagram(&receiver, MARKER)?;
    let bytes = capture.finish()?;
    std::fs::copy(&keys, file.with_extension("keys"))?;
    assert!(!contains(&bytes, &MARKER[..24]), "the text is readable without the keys");

    let options = decryption_options(&read(&keys)?, &file)?;
    let options: Vec<&str> = options.iter().map(String::as_str).collect();
    let fields = ["-T", "fields", "-e", "vxlan.vni", "-e", "ip.dst", "-e", "udp.dstport"];
    let show = |filter: &str| tshark(&file, &[&options[..], &["-Y", filter], &fields[..]].concat());
    let seen = show("vxlan && icmp.type == 8")?;
    assert_eq!(seen.lines().count(), 3, "pings seen by tshark: {seen:?}");
    assert!(seen.contains(&two.ipv4()?.to_string()) && seen.contains("6787"), "{seen}");
    let answers = show("vxlan && icmp.type == 0")?;
    assert_eq!(answers.lines().count(), 3, "answers seen by tshark: {answers:?}");
    let text = "frame contains \"never be readable\" || data.data contains \"never be readable\" \
                || udp contains \"never be readable\"";
    assert!(!show(text)?.is_empty(), "tshark does not see the datagram's text");
    Ok(())
}

/// tshark's options for the keys of a log. Its lines have direction, SPI, cipher, key with salt.
fn decryption_options(keys: &str, file: &Path) -> anyhow::Result<Vec<String>> {
    let name = "AES-GCM with 16 octet ICV [RFC4106]";
    // Wireshark 4.2 and later also want the length of the sequence number and its high half.
    for more in ["", ",\"64-bit\",\"0x00000000\""] {
        let mut options: Vec<String> = Vec::new();
        for decode in ["udp.port==6784,udpencap", "udp.port==6785,udpencap", "udp.port==6787,vxlan"]
        {
            options.extend(["-d".into(), decode.into()]);
        }
        options.extend(["-o".into(), "esp.enable_encryption_decode:TRUE".into()]);
        let mut found = 0;
        for line in keys.lines() {
            let words: Vec<&str> = line.split_whitespace().collect();
            let [_, spi, _, key] = words[..] else { anyhow::bail!("key log line {line:?}") };
            let sa = format!("\"IPv4\",\"*\",\"*\",\"{spi}\",\"{name}\",\"{key}\",\"NULL\",\"\"");
            options.extend(["-o".into(), format!("uat:esp_sa:{sa}{more}")]);
            found += 1;
        }
        anyhow::ensure!(found >= 2, "the key log has {found} keys");
        let words: Vec<&str> = options.iter().map(String::as_str).collect();
        if tshark(file, &[&words[..], &["-c", "1"]].concat()).is_ok() {
            return Ok(options);
        }
    }
    anyhow::bail!("tshark takes the keys in neither form")
}

#[test]
fn flushing_ipsec_by_hand_leaks_nothing_and_the_path_heals_on_the_bridge() -> anyhow::Result<()> {
    flushes("bridge", 0)
}

#[test]
fn flushing_ipsec_by_hand_leaks_nothing_and_the_path_heals_on_odp() -> anyhow::Result<()> {
    flushes("odp", 1)
}

/// On one of the hosts, or in a soak on each in turn.
fn flushes(switch: &str, host: usize) -> anyhow::Result<()> {
    let options = ["--engine", "kernel", "--switch", switch];
    let stage = Stage::pair(&options, &options)?;
    let (one, two) = stage.containers()?;
    stage.reach(&one, &two)?;
    let _server = Server::start(&two)?;
    let server = two.ipv4()?.to_string();
    let watch = LeakWatch::start(&stage)?;
    let mut load = one.spawn(&["iperf3", "-c", &server, "-t", "600", "-b", "10M"])?;
    let hosts = if is_soak() { vec![0, 1] } else { vec![host] };
    for (flushed, what) in hosts.iter().flat_map(|host| Flush::ALL.map(|what| (*host, what))) {
        let flows = [Flow::start(&one, &two, EVERY)?, Flow::start(&two, &one, EVERY)?];
        for flow in &flows {
            flow.wait_more(100, SETTLE_LIMIT)?;
        }
        let at = Instant::now();
        what.carry_out(stage.host(flushed).netns())?;
        std::thread::sleep(FAIL_OVER_LIMIT);
        for flow in &flows {
            flow.wait_more(100, FAIL_OVER_LIMIT)?;
        }
        for (flow, way) in flows.into_iter().zip(["host1 to host2", "host2 to host1"]) {
            let report = flow.stop()?;
            let gap = report.longest_gap(at);
            figure(
                &format!("{switch}, {what:?} flushed on host{}, {way}", flushed + 1),
                format!("{} ms without a packet, {} lost", gap.as_millis(), report.lost().len()),
            );
            assert!(gap <= FAIL_OVER_LIMIT, "{what:?}: nothing came for {gap:?}");
            assert_eq!(report.doubled(), Vec::<u32>::new());
        }
        let on = is_on("kernel", "kernel");
        wait_path(stage.host(0), stage.host(1), "the path again", SETTLE_LIMIT, on)?;
        assert!(!xfrm::own_policies(stage.host(flushed).netns())?.is_empty(), "no policy is back");
    }
    assert!(load.ended()?.is_none(), "iperf3 has not outlived it");
    load.kill();
    let seen = watch.finish()?;
    figure("packets on the wire meanwhile", seen.packets);
    assert_eq!(seen.readable, 0, "overlay packets could be read");
    Ok(())
}

#[test]
fn the_guard_holds_while_ipsec_is_flushed_again_and_again_and_is_mended_when_deleted()
-> anyhow::Result<()> {
    let stage = Stage::pair(&KERNEL, &KERNEL)?;
    let (one, two) = stage.containers()?;
    stage.reach(&one, &two)?;
    let watch = LeakWatch::start(&stage)?;
    let flow = Flow::start(&one, &two, Duration::from_millis(2))?;
    let end = Instant::now() + Duration::from_secs(10);
    let mut rounds = 0;
    while Instant::now() < end {
        for index in 0..2 {
            Flush::Both.carry_out(stage.host(index).netns())?;
        }
        rounds += 1;
    }
    let dropped = host::guard_dropped(stage.host(0), "output")?
        + host::guard_dropped(stage.host(0), "postrouting")?;
    figure("rounds of flushing, packets that the guard dropped", format!("{rounds}, {dropped}"));
    flow.wait_more(100, SETTLE_LIMIT)?;

    // Without the guard there is nothing behind the policies: it must come back by itself.
    let netns = stage.host(0).netns();
    let before = host::kernel_counter(stage.host(0), "guard_restored")?;
    netns.exec(&["nft", "delete", "table", "inet", "weft-guard"])?.success()?;
    weft_bench::sandbox::wait_until("the guard's table", Duration::from_secs(5), || {
        let list = netns.exec(&["nft", "list", "table", "inet", "weft-guard"]);
        list.is_ok_and(|list| list.stdout.contains("6787"))
    })?;
    assert!(host::kernel_counter(stage.host(0), "guard_restored")? > before);
    flow.wait_more(100, SETTLE_LIMIT)?;
    flow.stop()?;
    assert_eq!(watch.finish()?.readable, 0, "overlay packets could be read");
    Ok(())
}

#[test]
fn plaintext_injected_by_a_third_host_is_dropped_and_counted_on_the_bridge() -> anyhow::Result<()> {
    injected("bridge", Outer::V4)
}

#[test]
fn plaintext_injected_by_a_third_host_is_dropped_and_counted_on_odp() -> anyhow::Result<()> {
    injected("odp", Outer::V6)
}

/// The attacker knows VNI, ports and MAC addresses, and takes the peer's address too.
fn injected(switch: &str, outer: Outer) -> anyhow::Result<()> {
    const COPIES: u64 = 20;
    let stage = Stage::with(3, outer, weft_bench::sandbox::UNDERLAY_MTU_BYTES)?;
    let options = ["--engine", "kernel", "--switch", switch];
    let stage = stage.launched(&[&options, &options])?;
    let (one, two) = stage.containers()?;
    stage.reach(&one, &two)?;
    let (target, attacker) = (stage.host(1), stage.host(2));
    let receiver = probe::udp_in(&namespace(&two), (two.ipv4()?, 5001).into())?;
    receiver.set_read_timeout(Some(Duration::from_millis(500)))?;
    let frame = udp_frame(&one, &two, 5001)?;
    let mut before = host::guard_dropped(target, "input")?;
    let before_probes = host::kernel_counter(target, "probes_unknown")?;
    for source in [outer.of(attacker), spoofed(&stage, attacker)?] {
        for vni in [1_u32, 0x00ff_ffff] {
            for port in [6787, 6788] {
                let place = PathBuf::from(attacker.netns().path());
                let socket = probe::udp_in(&place, SocketAddr::new(source, 0))?;
                let mut packet = vec![0x08, 0, 0, 0];
                packet.extend((vni << 8).to_be_bytes());
                packet.extend(&frame);
                for _ in 0..COPIES {
                    socket.send_to(&packet, SocketAddr::new(outer.of(target), port))?;
                }
                let wanted = before + COPIES;
                let count = || host::guard_dropped(target, "input").is_ok_and(|it| it >= wanted);
                let what = format!("{COPIES} drops (from {source}, VNI {vni}, port {port})");
                weft_bench::sandbox::wait_until(&what, Duration::from_secs(3), count)?;
                assert_eq!(host::guard_dropped(target, "input")?, wanted, "{what}");
                before = wanted;
            }
        }
    }
    assert_eq!(host::kernel_counter(target, "probes_unknown")?, before_probes);
    let mut room = [0; 2048];
    assert!(
        uninterrupted(|| receiver.recv_from(&mut room)).is_err(),
        "an injected frame has arrived"
    );
    one.ping(two.ipv4()?.into())?;
    Ok(())
}

/// Lets the attacker send from the first host's address; its ARP keeps the attacker's.
fn spoofed(stage: &Stage, attacker: &Host) -> anyhow::Result<IpAddr> {
    let peer = stage.outer().of(stage.host(0));
    let length = if peer.is_ipv4() { 32 } else { 128 };
    let to = stage.outer().of(stage.host(1)).to_string();
    attacker.netns().exec(&["ping", "-n", "-c", "1", "-W", "5", &to])?.success()?;
    attacker.netns().exec(&["sysctl", "-q", "-w", "net.ipv4.conf.eth0.arp_announce=2"])?;
    attacker.netns().ip(&format!("addr add {peer}/{length} dev lo"))?;
    Ok(peer)
}

/// An Ethernet frame with a datagram from one container to another.
fn udp_frame(from: &Container, to: &Container, port: u16) -> anyhow::Result<Vec<u8>> {
    let mut frame = Vec::new();
    frame.extend(mac_of(to)?);
    frame.extend(mac_of(from)?);
    frame.extend([0x08, 0x00]);
    let length = 28 + u16::try_from(MARKER.len())?;
    let mut ip = vec![0x45, 0];
    ip.extend(length.to_be_bytes());
    ip.extend([0, 1, 0x40, 0, 64, 17, 0, 0]);
    ip.extend(from.ipv4()?.octets());
    ip.extend(to.ipv4()?.octets());
    let sum: u32 = ip.chunks(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum();
    let sum = !u16::try_from((sum & 0xffff) + (sum >> 16))?;
    ip[10..12].copy_from_slice(&sum.to_be_bytes());
    frame.extend(ip);
    frame.extend(4242_u16.to_be_bytes());
    frame.extend(port.to_be_bytes());
    frame.extend((length - 20).to_be_bytes());
    frame.extend([0, 0]);
    frame.extend(MARKER);
    Ok(frame)
}

fn mac_of(container: &Container) -> anyhow::Result<[u8; 6]> {
    let links = container.exec(&["ip", "-j", "link", "show", "weft0"])?.success()?.json()?;
    let text = links[0]["address"].as_str().unwrap_or_default().to_owned();
    let bytes: Vec<u8> =
        text.split(':').map(|byte| u8::from_str_radix(byte, 16)).collect::<Result<_, _>>()?;
    bytes.try_into().map_err(|_| anyhow::anyhow!("no address in {links}"))
}

#[test]
fn foreign_packets_are_not_sealed_on_the_bridge() -> anyhow::Result<()> {
    forged("bridge", Outer::V6, "esp")
}

#[test]
fn foreign_packets_are_not_sealed_on_odp() -> anyhow::Result<()> {
    forged("odp", Outer::V4, "esp")
}

#[test]
fn foreign_packets_do_not_take_the_data_channel() -> anyhow::Result<()> {
    forged("bridge", Outer::V4, "ovpn")
}

/// The attacker is a program of the sending host that knows VNI, ports and MAC addresses. Or it is another
/// owner's container, whose packets the host masquerades.
fn forged(switch: &str, outer: Outer, format: &str) -> anyhow::Result<()> {
    let stage = Stage::with(2, outer, weft_bench::sandbox::UNDERLAY_MTU_BYTES)?;
    let options = ["--engine", "kernel", "--switch", switch, "--format", format, "--mtu", "1280"];
    let stage = stage.launched(&[&options, &options])?;
    let (one, two) = stage.containers()?;
    stage.reach(&one, &two)?;
    let (here, there) = (stage.host(0), stage.host(1));
    let (to, counter) = match format {
        "ovpn" => (channel_address(there)?, "channel"),
        _ => (outer.of(there), "forged"),
    };
    let receiver = probe::udp_in(&namespace(&two), (two.ipv4()?, 5001).into())?;
    receiver.set_read_timeout(Some(Duration::from_millis(500)))?;
    let mut packet = vec![0x08, 0, 0, 0, 0, 0, 1, 0];
    packet.extend(udp_frame(&one, &two, 5001)?);
    let before = host::guard_dropped(here, counter)?;
    let any: IpAddr = match to {
        IpAddr::V4(_) => std::net::Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => std::net::Ipv6Addr::UNSPECIFIED.into(),
    };
    let place = PathBuf::from(here.netns().path());
    let socket = probe::udp_in(&place, SocketAddr::new(any, 0))?;
    for port in [6787, 6788] {
        let sent = socket.send_to(&packet, SocketAddr::new(to, port));
        let refused =
            sent.as_ref().is_err_and(|e| e.kind() == std::io::ErrorKind::PermissionDenied);
        assert!(refused, "port {port}: {sent:?}");
    }
    assert_eq!(host::guard_dropped(here, counter)?, before + 2);

    let inside = if to.is_ipv4() { "198.51.100" } else { "fd99:" };
    let length = if to.is_ipv4() { 24 } else { 64 };
    let foreign = stage.sandbox().add_netns("foreign")?;
    here.netns()
        .ip(&format!("link add foreign type veth peer name eth0 netns {}", foreign.name()))?;
    let separator = if to.is_ipv4() { "." } else { ":" };
    for (netns, device, number) in [(here.netns(), "foreign", 1), (&foreign, "eth0", 2)] {
        netns.ip(&format!("addr add {inside}{separator}{number}/{length} dev {device}"))?;
        netns.ip(&format!("link set {device} up"))?;
    }
    foreign.ip(&format!("route add default via {inside}{separator}1"))?;
    let script = "sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1
         nft 'add table inet hide; add chain inet hide out {
             type nat hook postrouting priority srcnat; };
             add rule inet hide out iifname foreign masquerade'";
    here.netns().exec(&["bash", "-ec", script])?.success()?;
    let before = host::guard_dropped(here, "forward")? + host::guard_dropped(here, "channel")?;
    let socket = probe::udp_in(&PathBuf::from(foreign.path()), SocketAddr::new(any, 0))?;
    let dropped = || {
        let _ = socket.send_to(&packet, SocketAddr::new(to, 6787));
        let now = ["forward", "channel"].map(|rule| host::guard_dropped(here, rule).unwrap_or(0));
        now.iter().sum::<u64>() > before
    };
    weft_bench::sandbox::wait_until("a drop of what is passed on", SETTLE_LIMIT, dropped)?;
    let mut room = [0; 2048];
    assert!(uninterrupted(|| receiver.recv_from(&mut room)).is_err(), "a forged frame has arrived");
    one.ping(two.ipv4()?.into())?;
    Ok(())
}

/// The address at which a host's data channel takes the overlay's packets.
fn channel_address(host: &Host) -> anyhow::Result<IpAddr> {
    let shown = host.netns().ip("-j -6 addr show dev weft-ovpn")?.success()?.json()?;
    let all = shown[0]["addr_info"].as_array().cloned().unwrap_or_default();
    let mut texts = all.iter().filter_map(|one| one["local"].as_str());
    let text = texts.find(|text| text.starts_with("fd77:")).unwrap_or_default();
    text.parse().map_err(|error| anyhow::anyhow!("{error}: {shown}"))
}

#[test]
fn the_injected_frame_is_one_that_a_container_would_take() -> anyhow::Result<()> {
    // The check of the check: let in by hand through a VXLAN device of the test's own, it arrives.
    let stage = Stage::pair(&KERNEL, &KERNEL)?;
    let (one, two) = stage.containers()?;
    stage.reach(&one, &two)?;
    let target = stage.host(1);
    let add = "link add hole type vxlan id 9 dstport 4790 local 192.0.2.2 nolearning";
    target.netns().ip(add)?;
    target.netns().ip("link set hole master weft up")?;
    let receiver = probe::udp_in(&namespace(&two), (two.ipv4()?, 5001).into())?;
    let place = PathBuf::from(stage.host(0).netns().path());
    let socket = probe::udp_in(&place, (stage.host(0).ipv4(), 0).into())?;
    let mut packet = vec![0x08, 0, 0, 0, 0, 0, 9, 0];
    packet.extend(udp_frame(&one, &two, 5001)?);
    socket.send_to(&packet, (target.ipv4(), 4790))?;
    probe::expect_datagram(&receiver, MARKER)?;
    target.netns().ip("link del hole")?;
    Ok(())
}

#[test]
fn stop_leaves_nothing_of_ipsec_and_reset_leaves_nothing_at_all() -> anyhow::Result<()> {
    for switch in ["bridge", "odp"] {
        let stage = Stage::new(2)?;
        let netns = stage.host(0).netns();
        let clean = foreign::everything(netns)?;
        let options = ["--engine", "kernel", "--switch", switch];
        let stage = stage.launched(&[&options, &options])?;
        let (one, two) = stage.containers()?;
        stage.reach(&one, &two)?;
        let netns = stage.host(0).netns();
        assert!(!xfrm::own_states(netns)?.is_empty(), "no SA to be removed");
        stage.host(0).stop_daemon()?;
        assert_eq!(netns.ip("xfrm state")?.stdout, "", "SAs after stop on {switch}");
        assert_eq!(netns.ip("xfrm policy")?.stdout, "", "policies after stop on {switch}");
        // Containers go on without a daemon, and so does the lock of their ports.
        let tables = netns.exec(&["nft", "list", "tables"])?.success()?.stdout;
        let locks = if switch == "bridge" { "table bridge weft-ports\n" } else { "" };
        assert_eq!(tables, locks, "tables after stop on {switch}");
        let links = netns.ip("-br link")?.stdout;
        for gone in ["weft-vxlan", "weft-probe", "weft-tap"] {
            assert!(!links.contains(gone), "after stop on {switch}: {links}");
        }
        // Containers keep their interfaces, and a launch takes them up again.
        assert!(!one.addresses()?.is_empty());
        stage.launch(0, &options)?;
        stage.reach(&one, &two)?;
        stage.host(0).weft(&["reset", "--force"])?.success()?;
        stage.host(0).wait_daemon(Duration::from_secs(20))?;
        let left = foreign::difference(&clean, &foreign::everything(netns)?);
        assert_eq!(left, "", "after reset on {switch}");
    }
    Ok(())
}
