//! The traffic on the wire, as seen by tcpdump and tshark.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use weft_bench::sandbox::try_wait_until;
use weft_lab::net::capture::{Capture, contains, tshark};
use weft_lab::net::iperf::{self, Server};
use weft_lab::net::{Lab, attainable_bps, namespace, probe, read};

/// The traffic is the vector engine's; `vm_wire` does the same with the kernel's.
const VECTOR: [&str; 2] = ["--engine", "userspace"];
/// Long enough never to occur by chance, short enough to stand in one packet.
const PATTERN: &[u8] = b"this sentence must never be readable on the wire between two hosts";

#[test]
fn no_byte_of_the_traffic_is_readable_on_the_wire() -> anyhow::Result<()> {
    let lab = Lab::pair(&VECTOR)?;
    let (one, two) = lab.containers()?;
    let file = lab.sandbox.directory().join("wire.pcap");
    let capture = Capture::start(lab.host(0).netns(), "eth0", &file, "")?;
    let receiver = probe::udp_in(&namespace(&two), (two.ipv4()?, 5001).into())?;
    let sender = probe::udp_in(&namespace(&one), (one.ipv4()?, 0).into())?;
    for _ in 0..10 {
        sender.send_to(PATTERN, receiver.local_addr()?)?;
        probe::expect_datagram(&receiver, PATTERN)?;
    }
    one.ping(two.ipv4()?.into())?;
    let bytes = capture.finish()?;
    let ports = tshark(&file, &["-Y", "udp.port == 6784", "-T", "fields", "-e", "frame.number"])?;
    assert!(ports.lines().count() >= 10, "the traffic is not in the capture");
    assert!(!contains(&bytes, PATTERN), "the traffic is readable");
    assert!(!contains(&bytes, &PATTERN[..16]), "a part of the traffic is readable");
    let addresses = tshark(&file, &["-Y", &format!("ip.addr == {}", two.ipv4()?)])?;
    assert_eq!(addresses, "", "a container's address is readable");
    let password = read(&lab.password_file())?;
    assert!(!contains(&bytes, password.trim().as_bytes()), "the password is readable");
    Ok(())
}

#[test]
fn tshark_with_the_keys_decrypts_esp_and_sees_the_vxlan_frames() -> anyhow::Result<()> {
    let sandbox =
        weft_bench::sandbox::Sandbox::new(&weft_bench::sandbox::SandboxOptions::default())?;
    let keys = sandbox.directory().join("keys");
    let environment = [("WEFT_SA_KEYLOG", keys.to_string_lossy().into_owned())];
    let environment: Vec<(&str, &str)> =
        environment.iter().map(|(name, value)| (*name, value.as_str())).collect();
    let password = sandbox.password_file();
    let password = password.to_string_lossy();
    let first = sandbox.host(0).ipv4().to_string();
    let arguments = [&VECTOR[..], &["--password-file", &password]].concat();
    sandbox.host(0).start_daemon_with(&arguments, &environment)?;
    sandbox.host(1).start_daemon_with(&[&arguments[..], &[&first]].concat(), &environment)?;
    let lab = Lab { sandbox };
    lab.wait_active()?;
    let (one, two) = lab.containers()?;
    let file = lab.sandbox.directory().join("wire.pcap");
    let capture = Capture::start(lab.host(0).netns(), "eth0", &file, "udp port 6784")?;
    one.ping(two.ipv4()?.into())?;
    let receiver = probe::udp_in(&namespace(&two), (two.ipv4()?, 5001).into())?;
    let sender = probe::udp_in(&namespace(&one), (one.ipv4()?, 0).into())?;
    sender.send_to(PATTERN, receiver.local_addr()?)?;
    probe::expect_datagram(&receiver, PATTERN)?;
    capture.finish()?;

    let options = decryption_options(&read(&keys)?, &file)?;
    let mut words: Vec<&str> = options.iter().map(String::as_str).collect();
    words.extend_from_slice(&["-Y", "vxlan && icmp.type == 8", "-T", "fields"]);
    words.extend_from_slice(&["-e", "vxlan.vni", "-e", "ip.dst", "-e", "udp.dstport"]);
    let seen = tshark(&file, &words)?;
    assert_eq!(seen.lines().count(), 3, "pings seen by tshark: {seen:?}");
    assert!(seen.contains(&two.ipv4()?.to_string()), "{seen}");
    assert!(seen.contains("6787"), "the inner VXLAN port: {seen}");
    let mut words: Vec<&str> = options.iter().map(String::as_str).collect();
    let text = "frame contains \"never be readable\" || data.data contains \"never be readable\" || udp contains \"never be readable\"";
    words.extend_from_slice(&["-Y", text]);
    assert!(!tshark(&file, &words)?.is_empty(), "the datagram's text is not seen ");
    Ok(())
}

/// tshark's options for the keys of a log. Its lines have direction, SPI, cipher, key with salt. Its ESP
/// dissector knows AES-GCM; for ChaCha20-Poly1305 the RFC's vectors are the referee.
fn decryption_options(keys: &str, file: &Path) -> anyhow::Result<Vec<String>> {
    let name = "AES-GCM with 16 octet ICV [RFC4106]";
    // Wireshark 4.2 and later also want the length of the sequence number and its high half.
    for more in ["", ",\"64-bit\",\"0x00000000\""] {
        let mut options: Vec<String> = [
            "-d",
            "udp.port==6784,udpencap",
            "-d",
            "udp.port==6787,vxlan",
            "-o",
            "esp.enable_encryption_decode:TRUE",
        ]
        .map(String::from)
        .into();
        let mut found = 0;
        for line in keys.lines() {
            let words: Vec<&str> = line.split_whitespace().collect();
            let [_, spi, _, key] = words[..] else { anyhow::bail!("key log line {line:?}") };
            options.push("-o".into());
            options.push(format!(
                "uat:esp_sa:\"IPv4\",\"*\",\"*\",\"{spi}\",\"{name}\",\"{key}\",\"NULL\",\"\"{more}"
            ));
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
fn replayed_truncated_and_forged_packets_are_dropped_and_counted() -> anyhow::Result<()> {
    let lab = Lab::pair(&VECTOR)?;
    let (one, two) = lab.containers()?;
    one.ping(two.ipv4()?.into())?;
    let (here, there) = (lab.host(0), lab.host(1));
    let file = lab.sandbox.directory().join("wire.pcap");
    let filter = format!("udp port 6784 and src host {}", here.ipv4());
    let capture = Capture::start(there.netns(), "eth0", &file, &filter)?;
    one.ping(two.ipv4()?.into())?;
    capture.finish()?;
    let payloads = tshark(&file, &["-T", "fields", "-e", "udp.payload"])?;
    let captured: Vec<Vec<u8>> =
        payloads.lines().filter_map(hex).filter(|p| p.len() > 32).collect();
    assert!(captured.len() >= 3, "{} packets captured", captured.len());

    let before = Drops::read(there)?;
    let injector =
        probe::udp_in(&std::path::PathBuf::from(here.netns().path()), (here.ipv4(), 0).into())?;
    for packet in &captured {
        let target = (there.ipv4(), 6784);
        injector.send_to(packet, target)?;
        injector.send_to(&packet[..20], target)?;
        let mut forged = packet.clone();
        // A sequence number not seen yet, so that the window lets it pass to the cipher.
        forged[6] ^= 0x40;
        injector.send_to(&forged, target)?;
        let mut stranger = packet.clone();
        stranger[..4].copy_from_slice(&[0x7f, 1, 2, 3]);
        injector.send_to(&stranger, target)?;
    }
    let sent = captured.len() as u64;
    // Of each four the stranger comes last.
    let strangers = |now: Drops| now.of("drop_unknown_spi") - before.of("drop_unknown_spi");
    let all_came = || Ok(Drops::read(there).is_ok_and(|now| strangers(now) >= sent));
    try_wait_until("the last packet", Duration::from_secs(20), all_came)?;
    let after = Drops::read(there)?;
    let more = |reason: &str| after.of(reason) - before.of(reason);
    assert_eq!(more("drop_replayed"), sent, "replayed");
    assert_eq!(more("drop_forged"), sent, "forged");
    assert_eq!(more("drop_unknown_spi"), sent, "unknown SPI");
    assert!(more("drop_malformed") >= sent, "truncated");
    // A frame that overtook the announcement of its source may be among the peer's, for other reasons.
    let of_peers = after.of_peers() - before.of_peers();
    let others = after.of_others() - before.of_others();
    assert!((2 * sent..=2 * sent + others).contains(&of_peers), "{of_peers} of peers: {after:?}");
    let top = there.weft_json(&["top", "--count", "1"])?;
    assert!(top["peers"][0]["dropped_pps"].is_number(), "{top}");
    one.ping(two.ipv4()?.into())?;
    Ok(())
}

/// One report of the daemon's: its counters are of one moment.
#[derive(Debug)]
struct Drops {
    by_reason: BTreeMap<String, u64>,
    by_peer: BTreeMap<String, BTreeMap<String, u64>>,
}

impl Drops {
    fn read(host: &weft_bench::sandbox::Host) -> anyhow::Result<Self> {
        let mut report = host.weft_json(&["report"])?;
        let mut by_reason: BTreeMap<String, u64> =
            serde_json::from_value(report["counters"].take())?;
        by_reason.retain(|name, _| name.starts_with("drop_"));
        Ok(Self { by_reason, by_peer: serde_json::from_value(report["peer_counters"].take())? })
    }

    fn of(&self, reason: &str) -> u64 {
        self.by_reason[reason]
    }

    fn of_peers(&self) -> u64 {
        self.by_peer.values().map(|peer| peer["dropped"]).sum()
    }

    /// For other reasons than those that the test gives.
    fn of_others(&self) -> u64 {
        let given = ["drop_replayed", "drop_forged", "drop_unknown_spi", "drop_malformed"];
        let others = self.by_reason.iter().filter(|(name, _)| !given.contains(&name.as_str()));
        others.map(|(_, drops)| drops).sum()
    }
}

fn hex(line: &str) -> Option<Vec<u8>> {
    let digits = line.trim().replace(':', "");
    (0..digits.len() / 2).map(|i| u8::from_str_radix(&digits[2 * i..2 * i + 2], 16).ok()).collect()
}

#[test]
fn floods_of_random_datagrams_on_every_port_leave_running_flows_alone() -> anyhow::Result<()> {
    let lab = Lab::pair(&[])?;
    let (one, two) = lab.containers()?;
    let _server = Server::start(&two)?;
    let target = lab.host(1).ipv4();
    let source = std::path::PathBuf::from(lab.host(0).netns().path());
    let flooder = probe::udp_in(&source, (lab.host(0).ipv4(), 0).into())?;
    let seed: u64 = rand::random();
    let flood = std::thread::spawn(move || {
        use rand::{Rng, SeedableRng};
        let mut rng = rand_chacha::ChaCha12Rng::seed_from_u64(seed);
        let mut datagram = [0; 1400];
        for _ in 0..20_000 {
            rng.fill_bytes(&mut datagram);
            let length = 1 + rng.next_u32() as usize % 1400;
            for port in [6783, 6784] {
                let _ = flooder.send_to(&datagram[..length], (target, port));
            }
            std::thread::sleep(Duration::from_micros(50));
        }
    });
    let report = iperf::run(&one, two.ipv4()?.into(), &["-t", "2"])?;
    let calm = flood.join();
    assert!(calm.is_ok(), "the flood failed, seed {seed}");
    assert!(iperf::received_bps(&report) > attainable_bps(1e8), "seed {seed}: {report}");
    one.ping(two.ipv4()?.into())?;
    lab.wait_active()?;
    let connections = lab.host(0).weft_json(&["status", "connections"])?;
    assert_eq!(connections.as_array().map(Vec::len), Some(1), "seed {seed}: {connections}");
    Ok(())
}
