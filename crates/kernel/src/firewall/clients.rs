//! The rules for packets of clients ([`Kernel::ensure_clients`]): where they may go, and how many. The host forwards
//! them among clients, to and from their network, and where [`ClientWays`] allows. It drops all others, although
//! forwarding is on for their device.

use ipnet::IpNet;

use super::{
    forward::ForwardRule,
    masquerade::{EXPOSED_PATTERN, PRIORITY},
    nft::Table,
    own_table::OwnTable,
};
use crate::{error::KernelError, handle::Kernel, net::link::check_name};

const TABLE: Table = Table { family: "inet", name: "weft-clients" };
/// The priority of the limits: before the decision which way a packet goes, and before its translation (nft(8),
/// "mangle").
const PRIORITY_LIMITS: i32 = -150;
/// Addresses whose traffic is counted, of each family and direction: more than clients have, with networks behind them.
const COUNTED_MAX: u32 = 65_536;
/// For how long a silent address is remembered, in seconds: longer than its burst takes to be free again.
const COUNTED_S: u32 = 60;
/// How long the limit may be exceeded by as much again, in milliseconds.
const BURST_MS: u64 = 100;
/// The smallest burst, in bytes: two super-packets.
const BURST_BYTES_MIN: u64 = 2 * 65_536;

/// Where clients may go beside their network, and how much may go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientWays {
    /// Clients reach each other.
    pub connects_clients: bool,
    /// Other networks that clients reach, and that reach them.
    pub networks: Vec<IpNet>,
    /// The ranges whose clients reach all that this host reaches, with the host's address. Only answers come back.
    /// None: no client does.
    pub way_out: Vec<IpNet>,
    /// Bytes a second that come from each address of a client at most; more is dropped. `None`: no limit.
    pub up: Option<u64>,
    /// The same for what goes to it.
    pub down: Option<u64>,
}

impl ClientWays {
    /// Whether clients go anywhere but to their network.
    fn go_elsewhere(&self) -> bool {
        !self.networks.is_empty() || !self.way_out.is_empty()
    }
}

impl Default for ClientWays {
    fn default() -> Self {
        let (networks, way_out) = (Vec::new(), Vec::new());
        Self { connects_clients: true, networks, way_out, up: None, down: None }
    }
}

/// Keeps the rules: the nftables table `inet weft-clients`, and accept rules where iptables filters what the host
/// passes on.
pub struct ClientRules {
    accept: ForwardRule,
    table: OwnTable,
}

impl ClientRules {
    /// Begins without any. Nothing is changed.
    #[must_use]
    pub fn new(kernel: Kernel) -> Self {
        let accept = ForwardRule::clients(kernel.clone());
        Self { accept, table: OwnTable::new(kernel, TABLE, "write the rules for clients") }
    }

    /// Makes the rules for clients behind `device`, whose network the host is on by `exposed`. True if something was
    /// changed.
    ///
    /// # Errors
    /// [`KernelError::InvalidName`], [`KernelError::TableTaken`] if another program's table has the name,
    /// [`KernelError::NftMissing`], [`KernelError::NftRefused`], [`KernelError::Program`],
    /// [`KernelError::NotPermitted`].
    pub async fn set(
        &mut self,
        device: &str,
        exposed: &str,
        ways: &ClientWays,
    ) -> Result<bool, KernelError> {
        [device, exposed].into_iter().try_for_each(check_name)?;
        self.accept.set_clients(device, exposed, ways.go_elsewhere())?;
        // Nothing is accepted before all else is refused.
        let table = self.table.set(chains(device, exposed, ways)).await?;
        Ok(self.accept.ensure().await? | table)
    }

    /// Removes all rules. False if there were none.
    ///
    /// # Errors
    /// See [`Self::set`]; another program's table stays.
    pub async fn remove(&mut self) -> Result<bool, KernelError> {
        let table = self.table.remove().await;
        Ok(self.accept.remove().await? | table?)
    }
}

/// The table's chains in nft's language.
fn chains(device: &str, exposed: &str, ways: &ClientWays) -> Vec<String> {
    let between = format!("iifname \"{device}\" oifname \"{device}\" accept");
    let between = Some(between).filter(|_| ways.connects_clients);
    let networks = ways.networks.iter().flat_map(|network| {
        let (ip, network) = (family(network), network.trunc());
        [
            format!("iifname \"{device}\" oifname != \"{device}\" {ip} daddr {network} accept"),
            format!("oifname \"{device}\" iifname != \"{device}\" {ip} saddr {network} accept"),
        ]
    });
    let head = [
        "counter refused { packets 0 bytes 0 }".into(),
        "chain forward { type filter hook forward priority 0; policy accept;".into(),
        format!("iifname \"{device}\" oifname \"{exposed}\" accept"),
        format!("iifname \"{exposed}\" oifname \"{device}\" accept"),
    ];
    let tail = [
        format!("iifname \"{device}\" counter name refused drop"),
        format!("oifname \"{device}\" counter name refused drop"),
        "}".into(),
    ];
    let mut lines: Vec<String> = head.into_iter().chain(between).chain(networks).collect();
    lines.extend(ways_out(device, &ways.way_out));
    lines.extend(tail);
    lines.extend(translation(device, exposed, ways));
    lines.extend(limits(device, ways));
    lines
}

fn family(network: &IpNet) -> &'static str {
    if network.addr().is_ipv4() { "ip" } else { "ip6" }
}

/// Clients go out, but to no other network of Weft; answers come back.
fn ways_out(device: &str, ranges: &[IpNet]) -> Vec<String> {
    if ranges.is_empty() {
        return Vec::new();
    }
    let others =
        format!("iifname \"{device}\" oifname \"{EXPOSED_PATTERN}\" counter name refused drop");
    let out = ranges.iter().map(|range| {
        let (ip, range) = (family(range), range.trunc());
        format!("iifname \"{device}\" oifname != \"{device}\" {ip} saddr {range} accept")
    });
    let answers =
        format!("oifname \"{device}\" iifname != \"{device}\" ct state established,related accept");
    [others].into_iter().chain(out).chain([answers]).collect()
}

/// Clients have this host's address outside. Where they are known, they keep their own: on their network, and on those
/// that are named.
fn translation(device: &str, exposed: &str, ways: &ClientWays) -> Vec<String> {
    if ways.way_out.is_empty() {
        return Vec::new();
    }
    let head =
        format!("chain translate {{ type nat hook postrouting priority {PRIORITY}; policy accept;");
    let kept = ways.networks.iter().map(|network| {
        let (ip, network) = (family(network), network.trunc());
        format!("iifname \"{device}\" {ip} daddr {network} return")
    });
    let out = ways.way_out.iter().map(|range| {
        let (ip, range) = (family(range), range.trunc());
        format!(
            "iifname \"{device}\" oifname != {{ \"{device}\", \"{exposed}\" }} {ip} saddr {range} masquerade"
        )
    });
    [head].into_iter().chain(kept).chain(out).chain(["}".into()]).collect()
}

/// What each address has too much of is dropped: on its way in at once, on its way out where its own address stands
/// again.
fn limits(device: &str, ways: &ClientWays) -> Vec<String> {
    let limits = [
        ("up", "prerouting", "iifname", "saddr", ways.up),
        ("down", "postrouting", "oifname", "daddr", ways.down),
    ];
    let mut lines = Vec::new();
    for (name, hook, way, field, rate) in limits {
        let Some(rate) = rate else { continue };
        let burst = (rate * BURST_MS / 1_000).max(BURST_BYTES_MIN);
        let families = [("ip", "ipv4_addr"), ("ip6", "ipv6_addr")];
        lines.push(format!("counter {name} {{ packets 0 bytes 0 }}"));
        lines.extend(families.map(|(ip, kind)| {
            format!(
                "set {name}-{ip} {{ type {kind}; size {COUNTED_MAX}; flags dynamic,timeout; timeout {COUNTED_S}s; }}"
            )
        }));
        lines.push(format!(
            "chain {name} {{ type filter hook {hook} priority {PRIORITY_LIMITS}; policy accept;"
        ));
        lines.extend(families.map(|(ip, _)| {
            format!(
                "{way} \"{device}\" update @{name}-{ip} {{ {ip} {field} limit rate over {rate} bytes/second burst {burst} bytes }} counter name {name} drop"
            )
        }));
        lines.push("}".into());
    }
    lines
}
