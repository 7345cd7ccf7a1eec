//! Detects whether a host's own firewall stops or translates Weft's packets: reads its rules and evaluates
//! them for such packets. A rule that it cannot evaluate counts as letting the packet pass.

mod packet;

use std::net::IpAddr;
use std::path::Path;

use ipnet::IpNet;
use serde_json::Value;
use weft_io::namespace;

use self::packet::{Fit, Packet};
use super::{forward, nft::Listing};
use crate::{error::KernelError, handle::Kernel};

/// Our own tables' names begin so.
const OWN_TABLES: &str = "weft-";
/// Jumps from chain to chain that are followed (nftables itself allows as many).
const JUMPS_MAX: usize = 16;
/// The most obstacles to report.
const OBSTACLES_MAX: usize = 16;
/// Ports on which Weft receives packets: links, both engines' data.
const OUTER_PORTS: [u16; 4] = [6783, 6784, 6785, 6786];
/// The inner ports of overlay packets, which pass the input chains again after they are opened.
const INNER_PORTS: [u16; 2] = crate::firewall::guard::GUARDED_PORTS;

/// A host rule that stops or changes Weft's packets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Obstacle {
    /// The base chain: `FAMILY TABLE CHAIN`.
    pub chain: String,
    /// The effect, and the packets concerned.
    pub effect: &'static str,
    /// The command that removes the obstacle.
    pub remedy: String,
}

/// A bridge that frames of containers cross.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CarriedBridge {
    /// Its name.
    pub name: String,
    /// The ranges of its network; without one of a family, addresses are not known.
    pub ranges: Vec<IpNet>,
}

/// The traffic to check against the host's rules.
#[derive(Debug, Clone, Default)]
pub struct Carried {
    /// The bridges of all networks, if the switch is one.
    pub bridges: Vec<CarriedBridge>,
    /// The kernel opens packets of format `esp`.
    pub ipsec: bool,
}

impl Kernel {
    /// Looks for rules in nftables that stop or translate Weft's packets.
    ///
    /// # Errors
    /// [`KernelError::NftMissing`], [`KernelError::NftRefused`], [`KernelError::Program`].
    pub async fn obstacles(&self, carried: &Carried) -> Result<Vec<Obstacle>, KernelError> {
        let rules = self.nft_ruleset().await?;
        let judges = namespace::run_in(&self.inner.home, forward::judges).map_err(|source| {
            crate::error::namespace_error(Path::new("/proc/sys/net/bridge"), source)
        })?;
        let handed = judges.map(|judge| judge.active);
        Ok(obstacles(&rules, carried, handed))
    }
}

/// `handed`: whether br_netfilter hands bridged frames to rules of IPv4 and IPv6.
fn obstacles(rules: &Listing, carried: &Carried, handed: [bool; 2]) -> Vec<Obstacle> {
    let mut found = Vec::new();
    // One of many bridges must not keep these out of the list.
    for ipv6 in [false, true] {
        at_input(rules, carried.ipsec, ipv6, &mut found);
    }
    for bridge in &carried.bridges {
        if found.len() >= OBSTACLES_MAX {
            break;
        }
        for way in [false, true].into_iter().zip(handed) {
            at_bridge(rules, bridge, way, &mut found);
        }
    }
    found.truncate(OBSTACLES_MAX);
    found
}

fn at_bridge(
    rules: &Listing,
    CarriedBridge { name: bridge, ranges }: &CarriedBridge,
    (ipv6, handed): (bool, bool),
    found: &mut Vec<Obstacle>,
) {
    let range = ranges.iter().find(|range| range.addr().is_ipv6() == ipv6);
    let mut hosts = range.into_iter().flat_map(IpNet::hosts);
    let (source, destination): (Option<IpAddr>, Option<IpAddr>) = (hosts.next(), hosts.next());
    let bridge_name = Some(bridge.clone());
    let frame = Packet { ipv6, bridge: bridge_name, source, destination, ..Packet::default() };
    let ip = if ipv6 { "ip6" } else { "ip" };
    let judging = ["inet", ip];
    let families = if handed { &judging[..] } else { &[] };
    for (hook, ways) in [
        ("prerouting", format!("iifname \"{bridge}\"")),
        ("forward", format!("iifname \"{bridge}\" oifname \"{bridge}\"")),
        ("postrouting", format!("oifname \"{bridge}\"")),
    ] {
        for chain in base_chains(rules, families, hook) {
            let (effect, ways) = match judge(rules, chain, &frame) {
                Verdict::Drops => ("drops frames between containers (br_netfilter)", ways.clone()),
                Verdict::Translates => {
                    let only = range.filter(|_| hook == "postrouting");
                    let only = only.map(|range| format!("{ip} saddr {range} "));
                    let effect = "translates frames between containers (br_netfilter)";
                    (effect, format!("{}{ways}", only.unwrap_or_default()))
                }
                Verdict::Passes => continue,
            };
            add(found, chain, effect, &ways);
        }
        for chain in base_chains(rules, &["bridge"], hook) {
            if judge(rules, chain, &frame) == Verdict::Drops {
                let key = if hook == "postrouting" { "obrname" } else { "ibrname" };
                let ways = format!("meta {key} \"{bridge}\"");
                add(found, chain, "drops frames between containers", &ways);
            }
        }
    }
}

/// Checks packets from other hosts, as they arrive and after they are opened.
fn at_input(rules: &Listing, ipsec: bool, ipv6: bool, found: &mut Vec<Obstacle>) {
    let families = ["inet", if ipv6 { "ip6" } else { "ip" }];
    let datagram =
        |port| Packet { ipv6, protocol: Some("udp"), port: Some(port), ..Packet::default() };
    let packets = [
        (
            OUTER_PORTS.map(datagram).to_vec(),
            "drops Weft's packets (UDP 6783 to 6786)",
            "udp dport 6783-6786",
        ),
        (
            vec![Packet { ipv6, protocol: Some("esp"), ..Packet::default() }],
            "drops Weft's packets (IP protocol 50)",
            "meta l4proto esp",
        ),
        (
            INNER_PORTS.map(|port| Packet { ipsec, ..datagram(port) }).to_vec(),
            "drops Weft's packets once IPsec has opened them (UDP 6787 and 6788)",
            "udp dport { 6787, 6788 } meta ipsec exists",
        ),
    ];
    let asked = if ipsec { &packets[..] } else { &packets[..1] };
    for (packets, effect, what) in asked {
        for chain in base_chains(rules, &families, "input") {
            if packets.iter().any(|packet| judge(rules, chain, packet) == Verdict::Drops) {
                add(found, chain, effect, what);
            }
        }
    }
}

fn add(found: &mut Vec<Obstacle>, chain: &Value, effect: &'static str, matches: &str) {
    let chain = ["family", "table", "name"].map(|it| text(chain, it)).join(" ");
    let remedy = format!("nft insert rule {chain} {matches} accept");
    let obstacle = Obstacle { chain, effect, remedy };
    if !found.contains(&obstacle) {
        found.push(obstacle);
    }
}

fn base_chains<'a>(
    rules: &'a Listing,
    families: &'a [&str],
    hook: &'a str,
) -> impl Iterator<Item = &'a Value> {
    rules.of("chain").filter(move |chain| {
        text(chain, "hook") == hook
            && families.contains(&text(chain, "family"))
            && !text(chain, "table").starts_with(OWN_TABLES)
    })
}

fn text<'a>(object: &'a Value, field: &str) -> &'a str {
    object.get(field).and_then(Value::as_str).unwrap_or_default()
}

/// The fate of a packet, where it is certain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Drops,
    Translates,
    Passes,
}

/// Evaluates a base chain for a packet.
fn judge(rules: &Listing, chain: &Value, packet: &Packet) -> Verdict {
    let policy = if text(chain, "policy") == "drop" { Verdict::Drops } else { Verdict::Passes };
    let mut chains = Chains { rules, packet, of: chain, may_pass: false };
    let verdict = chains.walk(text(chain, "name"), JUMPS_MAX).unwrap_or(policy);
    // A rule before that, which cannot be judged, may have let it pass.
    if chains.may_pass { Verdict::Passes } else { verdict }
}

/// One packet's way through the chains of a table.
struct Chains<'a> {
    rules: &'a Listing,
    packet: &'a Packet,
    /// The base chain.
    of: &'a Value,
    may_pass: bool,
}

impl Chains<'_> {
    /// `None`: the packet comes out of the chain at its end.
    fn walk(&mut self, name: &str, jumps: usize) -> Option<Verdict> {
        let (family, table) = (text(self.of, "family"), text(self.of, "table"));
        let rules = self.rules.of("rule").filter(|rule| {
            (text(rule, "family"), text(rule, "table"), text(rule, "chain"))
                == (family, table, name)
        });
        for rule in rules {
            let mut fit = Fit::Yes;
            for statement in rule["expr"].as_array().into_iter().flatten() {
                let Some((kind, it)) = statement.as_object().and_then(|it| it.iter().next()) else {
                    continue;
                };
                match kind.as_str() {
                    "match" => fit = fit.and(self.packet.fits(it)),
                    // A target is carried out, a match of iptables is not understood.
                    "xt" if it["type"] != "target" => fit = fit.and(Fit::Unknown),
                    "limit" | "quota" | "ct count" => fit = fit.and(Fit::Unknown),
                    "vmap" => {
                        if let Some(verdict) = self.by_map(it, fit, jumps) {
                            return Some(verdict);
                        }
                    }
                    "goto" if fit == Fit::Yes => {
                        return self.walk(text(it, "target"), jumps.checked_sub(1)?);
                    }
                    "return" if fit == Fit::Yes => return None,
                    // It may be judged no further here.
                    "return" => self.may_pass |= fit == Fit::Unknown,
                    _ => {
                        if let Some(verdict) = self.carry_out((kind.as_str(), it), fit, jumps) {
                            return Some(verdict);
                        }
                    }
                }
                if fit == Fit::No {
                    break;
                }
            }
        }
        None
    }

    fn carry_out(&mut self, (kind, it): (&str, &Value), fit: Fit, jumps: usize) -> Option<Verdict> {
        let verdict = match kind {
            "accept" | "queue" => Verdict::Passes,
            "drop" | "reject" => Verdict::Drops,
            "masquerade" | "snat" | "dnat" | "redirect" => Verdict::Translates,
            "xt" => match text(it, "name") {
                "MASQUERADE" | "SNAT" | "DNAT" | "REDIRECT" => Verdict::Translates,
                "REJECT" => Verdict::Drops,
                _ => return None,
            },
            "jump" | "goto" => {
                let target = text(it, "target");
                let verdict = self.walk(target, jumps.checked_sub(1)?)?;
                return self.certain(verdict, fit);
            }
            _ => return None,
        };
        self.certain(verdict, fit)
    }

    fn by_map(&mut self, map: &Value, fit: Fit, jumps: usize) -> Option<Verdict> {
        let entries = map["data"]["set"].as_array();
        let Some(entries) = entries else {
            self.may_pass = true;
            return None;
        };
        for entry in entries.iter().filter_map(Value::as_array) {
            let [key, verdict] = entry.as_slice() else { continue };
            let fit = fit.and(self.packet.holds(&map["key"], key));
            let verdict = verdict.as_object().and_then(|it| it.iter().next());
            if fit != Fit::No
                && let Some((kind, it)) = verdict
                && let Some(verdict) = self.carry_out((kind.as_str(), it), fit, jumps)
            {
                return Some(verdict);
            }
        }
        None
    }

    /// A verdict counts only if its rule certainly fits.
    fn certain(&mut self, verdict: Verdict, fit: Fit) -> Option<Verdict> {
        self.may_pass |= fit == Fit::Unknown && verdict == Verdict::Passes;
        (fit == Fit::Yes).then_some(verdict)
    }
}

#[cfg(test)]
mod tests;
