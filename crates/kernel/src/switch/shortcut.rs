//! Shortcuts past the bridge: frames from a container's bridge port to hosts on the vector engine go directly
//! to the engine's TAP device.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

use netlink_packet_route::{
    RouteNetlinkMessage,
    link::{BridgePortState, InfoBridge, InfoBridgePort, InfoKind},
    tc::{TcAttribute, TcMessage},
};
use serde_json::Value;
use weft_io::{
    namespace,
    redirect::{MacSet, Shortcut},
};

use crate::{
    error::KernelError,
    firewall::{forward, nft::Listing},
    handle::Kernel,
    net::link::Link,
    netlink::route::Socket,
};

/// Modules of legacy ebtables, which has rules where one of them is loaded.
const EBTABLES: [&str; 3] =
    ["/sys/module/ebtable_broute", "/sys/module/ebtable_filter", "/sys/module/ebtable_nat"];
/// Our own tables' names begin so.
const OWN_TABLES: &str = "weft-";
/// Queueing disciplines of a device's incoming frames, by their kinds (tc(8)).
const INGRESS_KINDS: [&str; 2] = ["ingress", "clsact"];
/// Default queueing disciplines of outgoing frames, which do not limit the rate.
const PLAIN_KINDS: [&str; 7] = ["noqueue", "noop", "mq", "pfifo", "pfifo_fast", "fq", "fq_codel"];

/// The packet sockets of the calling thread's network namespace.
const PACKET_SOCKETS: &str = "/proc/thread-self/net/packet";

/// The state of the bridge that matters to shortcuts.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct BridgePorts {
    /// The index of the engine's TAP device, if it is a port.
    pub tap: Option<u32>,
    /// Containers' ports, by name.
    pub ports: BTreeMap<String, BridgePort>,
    /// Another program's base chain in nftables that may see the frames of the bridge or of its ports. Either
    /// `FAMILY TABLE CHAIN`, or `iptables` or `ebtables`.
    pub judge: Option<String>,
}

/// A container's port of the bridge.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BridgePort {
    /// Its index.
    pub index: u32,
    /// Whether it has a queueing discipline of incoming frames, by which tools limit the container's sending.
    pub limited: bool,
    /// The kind of another program's queueing discipline of the container's incoming traffic, if it has one.
    pub shaped: Option<String>,
    /// Whether it is cut off: it is isolated like the TAP device, locked, or not forwarding.
    pub cut_off: bool,
    /// Whether a packet capture listens on it.
    pub captured: bool,
}

impl Kernel {
    /// Reads the state of the bridge's ports.
    ///
    /// # Errors
    /// [`KernelError::LinkMissing`] if the bridge is not there, or the kernel's refusal.
    pub async fn bridge_ports(&self, bridge: &str, tap: &str) -> Result<BridgePorts, KernelError> {
        let chains = self.nft_chains().await?;
        self.ports_judged_by(bridge, tap, &chains).await
    }

    /// As [`Self::bridge_ports`] for a host without the program nft: rules of the older kinds alone are looked for.
    ///
    /// # Errors
    /// As there.
    pub async fn bridge_ports_without_nft(
        &self,
        bridge: &str,
        tap: &str,
    ) -> Result<BridgePorts, KernelError> {
        self.ports_judged_by(bridge, tap, &Listing(Vec::new())).await
    }

    async fn ports_judged_by(
        &self,
        bridge: &str,
        tap: &str,
        chains: &Listing,
    ) -> Result<BridgePorts, KernelError> {
        let bridge = self.own_bridge(bridge).await?;
        let socket = self.socket();
        let disciplines = socket.queueing_disciplines().await?;
        let links = socket.links().await?;
        let captured = namespace::run_in(&self.inner.home, captured_devices)
            .map_err(|source| crate::error::namespace_error(Path::new(PACKET_SOCKETS), source))?;
        let mut seen = BridgePorts::default();
        for link in links.into_iter().filter(|link| link.master == Some(bridge.index)) {
            if link.name == tap {
                seen.tap = Some(link.index);
            } else if link.is_own() && link.kind == Some(InfoKind::Veth) {
                let kinds = disciplines.get(&link.index).map(Vec::as_slice).unwrap_or_default();
                let is_ingress = |kind: &str| INGRESS_KINDS.contains(&kind);
                let shapes = |kind: &str| !PLAIN_KINDS.contains(&kind) && !is_ingress(kind);
                let port = BridgePort {
                    index: link.index,
                    limited: kinds.iter().any(|kind| is_ingress(kind)),
                    shaped: kinds.iter().find(|kind| shapes(kind)).cloned(),
                    cut_off: is_cut_off(&link),
                    captured: captured.contains(&link.index),
                };
                seen.ports.insert(link.name, port);
            }
        }
        seen.judge = self.judge_of(&bridge, chains)?;
        Ok(seen)
    }

    /// The rules that may see the bridge's frames: chains of the bridge's own family and of devices. If
    /// br_netfilter passes frames on, also chains of IP.
    fn judge_of(&self, bridge: &Link, chains: &Listing) -> Result<Option<String>, KernelError> {
        let handed = |family| match family {
            "ip" => bridge.bridge.contains(&InfoBridge::NfCallIpTables(true)),
            _ => bridge.bridge.contains(&InfoBridge::NfCallIp6Tables(true)),
        };
        let judges = namespace::run_in(&self.inner.home, forward::judges).map_err(|source| {
            crate::error::namespace_error(Path::new("/proc/sys/net/bridge"), source)
        })?;
        let judges: Vec<_> =
            judges.into_iter().filter(|it| it.active || handed(it.family)).collect();
        if judges.iter().any(|it| it.legacy) {
            return Ok(Some("iptables".to_owned()));
        }
        if EBTABLES.iter().any(|module| Path::new(module).exists()) {
            return Ok(Some("ebtables".to_owned()));
        }
        let families: Vec<&str> = judges.into_iter().map(|it| it.family).collect();
        Ok(judging_chain(chains, &families))
    }

    /// Lets frames bypass the bridge for as long as the shortcut is kept. It concerns frames that arrive by
    /// `port` from a container with this address, and whose destination and sender are in the set. They go to the
    /// device `tap`. Both devices are given by index.
    ///
    /// # Errors
    /// [`KernelError::NoShortcut`] if the kernel does not accept the program.
    pub fn shorten(
        &self,
        port: u32,
        mac: [u8; 6],
        tap: u32,
        macs: &MacSet,
    ) -> Result<Shortcut, KernelError> {
        namespace::run_in(&self.inner.home, || macs.shorten(port, mac, tap))
            .map_err(|error| KernelError::NoShortcut { why: error.to_string() })?
            .map_err(|error| KernelError::NoShortcut { why: error.to_string() })
    }
}

/// Devices that packet sockets of this network namespace are bound to, by index.
fn captured_devices() -> BTreeSet<u32> {
    // Without the file the kernel has no packet sockets.
    devices_of_sockets(&std::fs::read_to_string(PACKET_SOCKETS).unwrap_or_default())
}

/// The column `Iface` of the kernel's list, whose first line has the names of the columns.
fn devices_of_sockets(list: &str) -> BTreeSet<u32> {
    let lines = list.lines().skip(1);
    lines.filter_map(|line| line.split_whitespace().nth(4)?.parse().ok()).collect()
}

fn is_cut_off(port: &Link) -> bool {
    let has = |option| port.port.contains(&option);
    has(InfoBridgePort::Isolated(true))
        || has(InfoBridgePort::Locked(true))
        || !has(InfoBridgePort::State(BridgePortState::Forwarding))
}

/// The first foreign base chain that may see the frames of a bridge or of its ports. `families` are the
/// families that br_netfilter passes the bridge's frames to. nft before 1.1 does not list the devices of a
/// chain.
fn judging_chain(chains: &Listing, families: &[&str]) -> Option<String> {
    let sees = |chain: &&Value| {
        let (family, hook) = (text(chain, "family"), text(chain, "hook"));
        let by_ip = ["prerouting", "forward", "postrouting"].contains(&hook)
            && (families.contains(&family) || family == "inet" && !families.is_empty());
        let is_near =
            ["bridge", "netdev"].contains(&family) || ["ingress", "egress"].contains(&hook);
        is_foreign(chain) && (is_near || by_ip)
    };
    let name = |chain: &Value| ["family", "table", "name"].map(|it| text(chain, it)).join(" ");
    chains.of("chain").find(sees).map(name)
}

fn is_foreign(chain: &Value) -> bool {
    chain.get("hook").is_some() && !text(chain, "table").starts_with(OWN_TABLES)
}

fn text<'a>(chain: &'a Value, field: &str) -> &'a str {
    chain.get(field).and_then(Value::as_str).unwrap_or_default()
}

impl Socket {
    /// The kinds of the devices' queueing disciplines.
    async fn queueing_disciplines(&self) -> Result<BTreeMap<u32, Vec<String>>, KernelError> {
        let found = self
            .dump(RouteNetlinkMessage::GetQueueDiscipline(TcMessage::default()))
            .await
            .map_err(|error| error.while_doing("list the queueing disciplines"))?;
        let mut kinds: BTreeMap<u32, Vec<String>> = BTreeMap::new();
        for message in found {
            let RouteNetlinkMessage::NewQueueDiscipline(message) = message else { continue };
            let Ok(index) = u32::try_from(message.header.index) else { continue };
            let kind = message.attributes.iter().find_map(|attribute| match attribute {
                TcAttribute::Kind(kind) => Some(kind.clone()),
                _ => None,
            });
            kinds.entry(index).or_default().extend(kind);
        }
        Ok(kinds)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn judge(family: &str, table: &str, hook: Option<&str>, families: &[&str]) -> Option<String> {
        let mut chain = json!({ "family": family, "table": table, "name": "x", "handle": 1 });
        if let Some(hook) = hook {
            chain["hook"] = hook.into();
        }
        judging_chain(&Listing(vec![json!({ "chain": chain })]), families)
    }

    #[test]
    fn devices_are_read_from_the_kernels_list_of_packet_sockets() {
        let list = "sk               RefCnt Type Proto  Iface R Rmem   User   Inode\n\
                    ffff888006ba4000 3      3    0003   12    1 0      0      21423\n\
                    ffff888006ba5000 3      3    0003   0     1 0      0      21424\n";
        assert_eq!(devices_of_sockets(list), BTreeSet::from([0, 12]));
        assert_eq!(devices_of_sockets(""), BTreeSet::new());
    }

    #[test]
    fn a_base_chain_that_may_see_the_bridges_frames_is_named() {
        let nat = |families| judge("ip", "nat", Some("postrouting"), families);
        assert_eq!(nat(&["ip", "ip6"]), Some("ip nat x".to_owned()));
        assert_eq!((nat(&["ip6"]), nat(&[])), (None, None));
        let inet = |hook, families| judge("inet", "filter", Some(hook), families);
        assert_eq!(inet("forward", &["ip6"]), Some("inet filter x".to_owned()));
        assert_eq!(inet("ingress", &[]), Some("inet filter x".to_owned()));
        assert_eq!((inet("input", &["ip6"]), inet("forward", &[])), (None, None));
        assert_eq!(judge("bridge", "t", Some("forward"), &[]), Some("bridge t x".to_owned()));
        assert_eq!(judge("netdev", "t", Some("egress"), &[]), Some("netdev t x".to_owned()));
        assert_eq!(
            (judge("bridge", "t", None, &[]), judge("netdev", "t", None, &[])),
            (None, None)
        );
        assert_eq!(judge("bridge", "weft-mss", Some("forward"), &["ip"]), None);
        assert_eq!(judge("inet", "weft-guard", Some("postrouting"), &["ip"]), None);
    }
}
