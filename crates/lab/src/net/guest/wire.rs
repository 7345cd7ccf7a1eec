//! The network between the hosts: blocks, losses and delays there, and whether traffic is readable.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use rustix::process::Signal;
use weft_bench::sandbox::{Netns, Running};

use super::Stage;
use super::flow::MARKER;
use crate::net::capture::contains;
use crate::net::probe;

/// The table of the tests, in the namespace between the hosts.
const TABLE: &str = "bridge weft-lab";
/// Cleartext that the watch sends, to show that it would see others'.
const CONTROL: &[u8] = b"sent in the clear to show that it is seen";
/// The address between the hosts that it comes from.
const CONTROL_ADDRESS: &str = "192.0.2.251";
/// Bytes kept of each packet: all headers and the marker.
const SNAP_BYTES: &str = "320";
/// The kernel passes packets to tcpdump in blocks, after a second at the latest. A wake-up for each packet
/// would take most of an emulated machine's time.
const HELD_BACK: Duration = Duration::from_secs(2);
/// A pcap file's header and that of each packet (libpcap's format, little endian here).
const FILE_HEADER_BYTES: usize = 24;
const PACKET_HEADER_BYTES: usize = 16;

/// Traffic to block between the hosts, as nftables rules that drop silently.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Blocked {
    /// IP protocol 50, ESP outside of UDP.
    Protocol50,
    /// The UDP ports of both engines, as source or destination.
    DataPorts,
    /// The vector engine's port alone.
    VectorPort,
    /// The kernel engine's ports alone.
    KernelPort,
    /// Everything between the hosts, links included.
    All,
}

impl Blocked {
    const fn rules(self) -> &'static [&'static str] {
        match self {
            Self::Protocol50 => &["meta l4proto esp"],
            Self::DataPorts => &["udp dport 6784-6786", "udp sport 6784-6786"],
            Self::VectorPort => &["udp dport 6784", "udp sport 6784"],
            Self::KernelPort => &["udp dport 6785-6786", "udp sport 6785-6786"],
            Self::All => &["meta protocol { ip, ip6 }"],
        }
    }
}

/// Rules between the hosts; gone when dropped.
pub struct Block<'a> {
    middle: &'a Netns,
}

impl<'a> Block<'a> {
    /// Blocks between all hosts.
    ///
    /// # Errors
    /// Returns an error if nft fails.
    pub fn all(stage: &'a Stage, what: &[Blocked]) -> anyhow::Result<Self> {
        Self::with_prefix(stage, what, &[""])
    }

    /// Blocks between two hosts, counted from 0.
    ///
    /// # Errors
    /// Returns an error if nft fails.
    pub fn between(
        stage: &'a Stage,
        one: usize,
        other: usize,
        what: &[Blocked],
    ) -> anyhow::Result<Self> {
        let way = |from: usize, to: usize| {
            format!("iifname \"port{}\" oifname \"port{}\" ", from + 1, to + 1)
        };
        let ways = [way(one, other), way(other, one)];
        Self::with_prefix(stage, what, &[&ways[0], &ways[1]])
    }

    fn with_prefix(stage: &'a Stage, what: &[Blocked], prefixes: &[&str]) -> anyhow::Result<Self> {
        let middle = stage.middle()?;
        let mut script = format!(
            "add table {TABLE}; add chain {TABLE} c {{ type filter hook forward priority 0 ; }}; \
             flush chain {TABLE} c;"
        );
        for prefix in prefixes {
            for rule in what.iter().flat_map(|blocked| blocked.rules()) {
                script.push_str(&format!(" add rule {TABLE} c {prefix}{rule} counter drop;"));
            }
        }
        middle.exec(&["nft", &script])?.success()?;
        Ok(Self { middle })
    }

    /// Packets that were dropped so far.
    ///
    /// # Errors
    /// Returns an error if nft fails.
    pub fn dropped(&self) -> anyhow::Result<u64> {
        let words = ["nft", "-j", "list", "table", "bridge", "weft-lab"];
        let table = self.middle.exec(&words)?.success()?.json()?;
        let items = table["nftables"].as_array().cloned().unwrap_or_default();
        let rules = items.iter().filter_map(|item| item["rule"]["expr"].as_array()).flatten();
        Ok(rules.filter_map(|expression| expression["counter"]["packets"].as_u64()).sum())
    }
}

impl Drop for Block<'_> {
    fn drop(&mut self) {
        let _ = self.middle.exec(&["nft", "delete", "table", "bridge", "weft-lab"]);
    }
}

/// Disturbances on the ways to the hosts, by the kernel's netem; gone when dropped.
pub struct Netem<'a> {
    middle: &'a Netns,
    ports: Vec<String>,
}

impl<'a> Netem<'a> {
    /// Disturbs what goes to each of the first `hosts` hosts; `words` are those of tc-netem(8).
    ///
    /// # Errors
    /// Returns an error if tc fails: the kernel has no netem.
    pub fn on(stage: &'a Stage, hosts: usize, words: &str) -> anyhow::Result<Self> {
        let middle = stage.middle()?;
        let ports: Vec<String> = (1..=hosts).map(|number| format!("port{number}")).collect();
        for port in &ports {
            let mut command = vec!["tc", "qdisc", "replace", "dev", port, "root", "netem"];
            command.extend_from_slice(&["limit", "20000"]);
            command.extend(words.split_whitespace());
            middle.exec(&command)?.success()?;
        }
        Ok(Self { middle, ports })
    }
}

impl Drop for Netem<'_> {
    fn drop(&mut self) {
        for port in &self.ports {
            let _ = self.middle.exec(&["tc", "qdisc", "del", "dev", port, "root"]);
        }
    }
}

/// Watches the wire between the hosts for overlay packets that can be read.
pub struct LeakWatch<'a> {
    stage: &'a Stage,
    /// Overlay packets outside of IPsec, by port or address; and the heads of all packets.
    captures: [(Running, PathBuf); 2],
}

/// The result of a watch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// Overlay packets that could be read.
    pub readable: usize,
    /// All packets.
    pub packets: usize,
}

impl<'a> LeakWatch<'a> {
    /// Begins to watch.
    ///
    /// # Errors
    /// tcpdump does not start.
    pub fn start(stage: &'a Stage) -> anyhow::Result<Self> {
        let number: u32 = rand::random();
        // Containers' addresses must not be on the wire either.
        let filters = ["udp port 6787 or udp port 6788 or net 10.32.0.0/12", ""];
        let middle = stage.middle()?;
        let start = |name: &str, filter: &str| -> anyhow::Result<(Running, PathBuf)> {
            let file = stage.directory().join(format!("{name}-{number:08x}.pcap"));
            let path = file.to_string_lossy().into_owned();
            let mut words = vec!["tcpdump", "-n", "-Z", "root", "-B", "32768", "-s", SNAP_BYTES];
            words.extend_from_slice(&["-i", "any", "-w", &path]);
            words.extend(filter.split_whitespace());
            let mut tcpdump = middle.spawn(&words)?;
            tcpdump.line_with("listening on", Duration::from_secs(5))?;
            Ok((tcpdump, file))
        };
        let captures = [start("plain", filters[0])?, start("heads", filters[1])?];
        Ok(Self { stage, captures })
    }

    /// Ends the watch, after a test that it sees cleartext.
    ///
    /// # Errors
    /// A capture failed, or it did not see a packet that was sent in the clear on purpose.
    pub fn finish(self) -> anyhow::Result<Seen> {
        let middle = self.stage.middle()?;
        let address = format!("{CONTROL_ADDRESS}/24");
        middle.exec(&["ip", "addr", "replace", &address, "dev", "br0"])?.success()?;
        let source: IpAddr = CONTROL_ADDRESS.parse()?;
        let place = PathBuf::from(middle.path());
        let socket = probe::udp_in(&place, SocketAddr::new(source, 0))?;
        socket.send_to(&[CONTROL, MARKER].concat(), (self.stage.host(0).ipv4(), 6787))?;
        std::thread::sleep(HELD_BACK);
        let mut seen = Seen::default();
        for (mut tcpdump, file) in self.captures {
            tcpdump.signal(Signal::INT);
            tcpdump.wait(Duration::from_secs(8))?;
            let bytes = std::fs::read(&file)?;
            let all = packets(&bytes);
            let is_control = |packet: &&&[u8]| contains(packet, CONTROL);
            anyhow::ensure!(
                all.iter().any(|packet| is_control(&packet)),
                "{} has not seen what was sent in the clear on purpose",
                file.display()
            );
            let others = all.iter().filter(|packet| !is_control(packet));
            if file.to_string_lossy().contains("plain-") {
                seen.readable += others.count();
            } else {
                seen.packets = all.len();
                seen.readable += others.filter(|packet| contains(packet, &MARKER[..24])).count();
            }
        }
        middle.exec(&["ip", "addr", "del", &address, "dev", "br0"])?.success()?;
        Ok(seen)
    }
}

/// The packets of a pcap file.
#[must_use]
pub fn packets(file: &[u8]) -> Vec<&[u8]> {
    let mut rest = file.get(FILE_HEADER_BYTES..).unwrap_or_default();
    let mut found = Vec::new();
    while let Some((header, behind)) = rest.split_at_checked(PACKET_HEADER_BYTES) {
        let Some(length) = header[8..].first_chunk().map(|length| u32::from_le_bytes(*length))
        else {
            break;
        };
        let Some((packet, behind)) = behind.split_at_checked(length as usize) else { break };
        found.push(packet);
        rest = behind;
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_of_a_capture_are_cut_at_their_lengths() {
        let mut file = vec![0; FILE_HEADER_BYTES];
        for packet in [&b"one"[..], b"second"] {
            file.extend([0; 8]);
            file.extend((packet.len() as u32).to_le_bytes());
            file.extend([9; 4]);
            file.extend(packet);
        }
        assert_eq!(packets(&file), [&b"one"[..], b"second"]);
        file.pop();
        assert_eq!(packets(&file), [&b"one"[..]]);
        assert!(packets(b"short").is_empty());
    }
}
