//! The guard: no overlay packet leaves or arrives unprotected, regardless of its sender
//! (`docs/design/kernel-engine.md`). No packet but Weft's is sealed, and nothing but overlay packets takes
//! the data channel's device.
//!
//! Weft's packets carry [`SENT_PRIORITY`] until they pass the guard: unprivileged users cannot set a priority
//! above 6. A mark (`skb->mark`) would work as well. But for packets with a mark, a VXLAN device looks up
//! route and policy each time; it caches them for packets without one.

use std::{collections::BTreeSet, net::IpAddr};

use serde_json::{Value, json};

use super::{
    nft::{Listing, Table},
    nft_watch::NftWatch,
    senders::{self, Senders},
};
use crate::{error::KernelError, handle::Kernel, ovpn::DATA_CHANNEL_DEVICE};

/// The inner UDP ports of overlay packets: data and probes, and probes of candidates.
pub const GUARDED_PORTS: [u16; 2] = [6787, 6788];
/// Most addresses that may be trusted.
pub const TRUSTED_MAX: usize = 4096;

/// The priority (`skb->priority`, SO_PRIORITY) of overlay packets on their way from Weft to the guard.
/// Packets from containers have none: the kernel takes it off where they leave a network namespace.
pub const SENT_PRIORITY: u32 = 0x5745_4650;

const TABLE: Table = Table { family: "inet", name: senders::TABLE };
/// Sets that priority on packets that leave by the overlay ports of a bridge, and checks frames that arrive
/// by them.
const MARKING: Table = Table { family: "bridge", name: senders::TABLE };
/// The priority, and the default priority, as `nft` shows them.
const SENT: &str = "5745:4650";
const USUAL: &str = "none";
/// The reqid of inbound states.
const REQID: u32 = crate::xfrm::REQID;
/// The most transformations that the kernel takes off one packet (XFRM_MAX_DEPTH).
const TRANSFORMATIONS_MAX: u8 = 6;
/// After all other changes of address, mark or route on the way out, because the packet's final route
/// decides.
const PRIORITY_LAST: i32 = 300;
/// Before all others on the way in, so that everything is counted.
const PRIORITY_FIRST: i32 = -300;
/// Before fragments are put together: before any program that changes marks.
const PRIORITY_BEFORE_MARKS: i32 = -450;

/// How often one rule dropped.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GuardCount {
    /// Packets.
    pub packets: u64,
    /// Bytes, IP header included.
    pub bytes: u64,
}

/// Counts of packets that the guard dropped since it was created, by rule.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GuardCounters {
    /// Packets of this host that would have left unprotected.
    pub output: GuardCount,
    /// Packets of this host that IPsec would have sealed, and that Weft did not send.
    pub forged: GuardCount,
    /// Packets of others that this host would have passed on.
    pub forward: GuardCount,
    /// Packets that would have left unprotected and were caught neither as this host's own nor as passed on.
    pub postrouting: GuardCount,
    /// Packets for this host that arrived unprotected, or protected by another program's IPsec.
    pub input: GuardCount,
    /// First fragments over IPv6 that do not contain the destination port.
    pub fragments: GuardCount,
    /// Packets other than the overlay's that left the data channel's device or would have entered it. So a
    /// peer's key opens nothing else on the host.
    pub channel: GuardCount,
    /// Frames from a peer whose source Ethernet address is not one of the peer's.
    pub foreign_source: GuardCount,
}

impl GuardCounters {
    /// Each count of packets without protection, or under a false one, under its rule's name.
    #[must_use]
    pub const fn named(&self) -> [(&'static str, GuardCount); 7] {
        [
            ("output", self.output),
            ("forged", self.forged),
            ("forward", self.forward),
            ("postrouting", self.postrouting),
            ("input", self.input),
            ("fragments", self.fragments),
            ("channel", self.channel),
        ]
    }
}

/// The guard of a host: the nftables table `inet weft-guard`, and where a bridge is the switch
/// `bridge weft-guard`. It does not depend on any SA or policy, and stays when the daemon is killed.
pub struct Guard {
    kernel: Kernel,
    ports: Vec<String>,
    /// The addresses that each peer may send from, if the guard checks that.
    senders: Option<Senders>,
    trusted: BTreeSet<IpAddr>,
    /// How this host's `nft` shows the table as it was written, should that differ from the words
    /// it was written in.
    as_written: Option<Vec<Value>>,
}

impl Guard {
    /// The guard of the kernel's namespace. Marks packets that leave by `ports` of bridges as Weft's. They are names,
    /// or one pattern that ends in `*`, and need not exist yet. Any other switch sets the priority itself. Nothing is
    /// changed.
    #[must_use]
    pub fn new(kernel: Kernel, ports: &[&str]) -> Self {
        let ports = ports.iter().map(|port| (*port).to_owned()).collect();
        Self { kernel, ports, senders: None, trusted: BTreeSet::new(), as_written: None }
    }

    /// The same, with a check of frames that arrive by these ports: a peer may send only from its own
    /// Ethernet addresses.
    #[must_use]
    pub fn with_senders(kernel: Kernel, ports: &[&str], senders: Senders) -> Self {
        Self { senders: Some(senders), ..Self::new(kernel, ports) }
    }

    /// Creates or restores the guard, with `trusted` as the addresses of peers that overlay packets may go to
    /// and come from in plain. True if something had to be changed. Counts survive, except those of a table
    /// that another program deleted.
    ///
    /// # Errors
    /// [`KernelError::TableTaken`] if another program's table has the name,
    /// [`KernelError::NftMissing`], [`KernelError::NftRefused`], [`KernelError::Program`],
    /// [`KernelError::TableFull`] if there are more than [`TRUSTED_MAX`] addresses (nothing is
    /// changed), [`KernelError::NotPermitted`].
    pub async fn ensure(&mut self, trusted: &[IpAddr]) -> Result<bool, KernelError> {
        let trusted: BTreeSet<IpAddr> = trusted.iter().copied().collect();
        if trusted.len() > TRUSTED_MAX {
            let table = "trusted addresses".into();
            return Err(KernelError::TableFull { table, limit: TRUSTED_MAX });
        }
        self.trusted = trusted;
        let kernel = self.kernel.clone();
        let _one = kernel.inner.filters.lock().await;
        let found = self.list(true).await?;
        let counts = counters(&found);
        if !self.has_shape(&found) {
            let mut commands = TABLE.replacement(&self.objects(&self.trusted, counts));
            if !self.ports.is_empty() {
                commands.extend(MARKING.replacement(&self.marking(counts)));
            }
            kernel.nft_apply(commands, "write the guard").await?;
            self.stand_senders(true).await?;
            let written = self.list(true).await?;
            self.as_written = Some(written.shape());
            return Ok(true);
        }
        let written = self.stand_senders(false).await?;
        if trusted_in(&found).as_ref() == Some(&self.trusted) {
            return Ok(written);
        }
        let mut commands = Vec::new();
        for (set, is_family) in SETS {
            let set_object = json!({ "family": TABLE.family, "table": TABLE.name, "name": set });
            commands.push(json!({ "flush": { "set": set_object } }));
            let members = members(&self.trusted, is_family);
            if !members.is_empty() {
                let element = TABLE.part("element", json!({ "name": set, "elem": members }));
                commands.push(json!({ "add": element }));
            }
        }
        kernel.nft_apply(commands, "write the guard's exceptions").await.map(|()| true)
    }

    /// Whether the guard stands as [`Self::ensure`] last set it.
    ///
    /// # Errors
    /// See [`Self::ensure`].
    pub async fn is_whole(&self) -> Result<bool, KernelError> {
        Ok(self.look().await?.0)
    }

    /// Whether the guard stands as [`Self::ensure`] last set it, and its counts.
    ///
    /// # Errors
    /// See [`Self::counters`].
    pub async fn look(&self) -> Result<(bool, GuardCounters), KernelError> {
        let found = self.list(false).await?;
        let whole = self.is_it(&found)
            && match &self.senders {
                Some(senders) => senders.are_whole().await?,
                None => true,
            };
        Ok((whole, counters(&found)))
    }

    /// Counts of dropped packets so far; zero if there is no guard.
    ///
    /// # Errors
    /// [`KernelError::NftMissing`], [`KernelError::NftRefused`], [`KernelError::Program`].
    pub async fn counters(&self) -> Result<GuardCounters, KernelError> {
        Ok(counters(&self.list(false).await?))
    }

    /// Removes the guard. False if there was none.
    ///
    /// # Errors
    /// See [`Self::ensure`]; another program's table stays.
    pub async fn remove(&mut self) -> Result<bool, KernelError> {
        let kernel = self.kernel.clone();
        let _one = kernel.inner.filters.lock().await;
        self.as_written = None;
        if let Some(senders) = &self.senders {
            senders.fall().await;
        }
        // Remove each separately: a table that is not ours must not prevent the removal of the other.
        let [guard, marking] = [kernel.nft_remove(TABLE).await, kernel.nft_remove(MARKING).await];
        let (guard, marking) = (guard?, marking?);
        Ok(guard || marking)
    }

    /// Watches the guard's table. Open it before [`Self::ensure`], so that no change is missed.
    ///
    /// # Errors
    /// [`KernelError::Socket`] if the kernel gives no socket.
    pub fn watch(&self) -> Result<NftWatch, KernelError> {
        let own = self.senders.as_ref().map(Senders::own_changes);
        self.kernel.nft_watch(vec![TABLE, MARKING], own)
    }

    /// Waits until another program damages the guard, and returns after it is restored.
    ///
    /// # Errors
    /// See [`Self::ensure`]: the guard is damaged then and could not be restored.
    pub async fn restore(&mut self, watch: &mut NftWatch) -> Result<(), KernelError> {
        loop {
            watch.changed().await?;
            if !self.is_whole().await? {
                let trusted: Vec<IpAddr> = self.trusted.iter().copied().collect();
                self.ensure(&trusted).await?;
                return Ok(());
            }
        }
    }

    /// Lists the guard's tables. With `own_alone`, a table that is not ours is an error; otherwise it is read
    /// as it is.
    async fn list(&self, own_alone: bool) -> Result<Listing, KernelError> {
        let mut all = Listing::default();
        let marking = (!self.ports.is_empty()).then_some(MARKING);
        for table in [TABLE].into_iter().chain(marking) {
            // There may be many Ethernet addresses of senders, and `nft` need not list them.
            let found = match table {
                MARKING => self.kernel.nft_list_without_members(table).await?,
                _ => self.kernel.nft_list(table).await?,
            };
            let Some(found) = found else { continue };
            if own_alone && !found.is_ours() {
                return Err(table.taken());
            }
            all.0.extend(found.0);
        }
        Ok(all)
    }

    fn is_it(&self, found: &Listing) -> bool {
        self.has_shape(found) && trusted_in(found).as_ref() == Some(&self.trusted)
    }

    fn has_shape(&self, found: &Listing) -> bool {
        let shape = found.shape();
        let mut wanted = self.objects(&BTreeSet::new(), GuardCounters::default());
        if !self.ports.is_empty() {
            wanted.extend(self.marking(GuardCounters::default()));
        }
        shape == Listing(wanted).shape() || self.as_written.as_ref() == Some(&shape)
    }

    async fn stand_senders(&self, anew: bool) -> Result<bool, KernelError> {
        match &self.senders {
            Some(senders) => senders.stand(anew).await,
            None => Ok(false),
        }
    }

    /// Everything in the table.
    fn objects(&self, trusted: &BTreeSet<IpAddr>, counts: GuardCounters) -> Vec<Value> {
        let mut objects = vec![TABLE.tag()];
        objects.extend(counts.named().map(|(name, count)| counter(TABLE, name, count)));
        for ((name, is_family), kind) in SETS.into_iter().zip(["ipv4_addr", "ipv6_addr"]) {
            let mut fields = json!({ "name": name, "type": kind });
            let members = members(trusted, is_family);
            if !members.is_empty() {
                fields["elem"] = members.into();
            }
            objects.push(TABLE.part("set", fields));
        }
        for (name, rules) in [(FORGED, forged_rules()), (FRAGMENTS, fragment_rules())] {
            objects.push(TABLE.part("chain", json!({ "name": name })));
            objects.extend(rules);
        }
        let mut chains = vec![
            ("output", PRIORITY_LAST, output_rules()),
            ("postrouting", PRIORITY_LAST, leaving_rules("postrouting")),
            ("input", PRIORITY_FIRST, input_rules()),
            ("forward", PRIORITY_FIRST, forward_rules()),
        ];
        if self.senders.is_some() {
            for (name, key) in senders::MAPS {
                let fields = json!({ "name": name, "type": key, "map": "classid" });
                objects.push(TABLE.part("map", fields));
            }
            chains.push(("prerouting", PRIORITY_BEFORE_MARKS, number_rules()));
        }
        for (hook, priority, rules) in chains {
            objects.push(base_chain(TABLE, hook, priority));
            objects.extend(rules);
        }
        objects
    }

    /// Everything in the table of the bridge's ports.
    fn marking(&self, counts: GuardCounters) -> Vec<Value> {
        let by_ports = |key| match self.ports.as_slice() {
            // A pattern is no member of a set.
            [pattern] => equal(&meta(key), pattern.as_str()),
            ports => equal(&meta(key), json!({ "set": ports })),
        };
        let rule = |chain: &str, comment: &str, expr: Vec<Value>| {
            MARKING.part("rule", json!({ "chain": chain, "comment": comment, "expr": expr }))
        };
        let comment = "weft: what leaves by the overlay ports is Weft's";
        let mut objects = vec![
            MARKING.tag(),
            base_chain(MARKING, "postrouting", PRIORITY_LAST),
            rule("postrouting", comment, vec![by_ports("oifname"), set_priority(SENT)]),
        ];
        if self.senders.is_some() {
            let parts = [meta("priority"), meta("iifname"), field("ether", "saddr")];
            let is_own = equal(&json!({ "concat": parts }), format!("@{}", senders::MACS));
            let own = vec![by_ports("iifname"), is_own, set_priority(USUAL), accept()];
            // It makes the packet itself into the answer, with all that it has.
            let sent = equal(&meta("priority"), SENT);
            let answer = vec![by_ports("iifname"), sent, set_priority(USUAL), accept()];
            let foreign = dropped(vec![by_ports("iifname")], FOREIGN_SOURCE);
            let kind = json!(["classid", "ifname", "ether_addr"]);
            objects.extend([
                counter(MARKING, FOREIGN_SOURCE, counts.foreign_source),
                MARKING.part("set", json!({ "name": senders::MACS, "type": kind })),
                base_chain(MARKING, "prerouting", PRIORITY_FIRST),
                rule("prerouting", "weft: an address of the peer's own", own),
                rule("prerouting", "weft: the device's own word that a packet is too big", answer),
                rule("prerouting", "weft: not its own", foreign),
            ]);
        }
        objects
    }
}

type IsFamily = fn(&IpAddr) -> bool;
const SETS: [(&str, IsFamily); 2] = [("trusted4", IpAddr::is_ipv4), ("trusted6", IpAddr::is_ipv6)];

fn members(trusted: &BTreeSet<IpAddr>, is_family: IsFamily) -> Vec<String> {
    trusted.iter().filter(|address| is_family(address)).map(ToString::to_string).collect()
}

/// The name of the one counter in the table of the bridge's ports.
const FOREIGN_SOURCE: &str = "foreign_source";

fn counter(table: Table, name: &str, count: GuardCount) -> Value {
    let fields = json!({ "name": name, "packets": count.packets, "bytes": count.bytes });
    table.part("counter", fields)
}

fn base_chain(table: Table, hook: &str, priority: i32) -> Value {
    let fields = json!({
        "name": hook, "type": "filter", "hook": hook, "prio": priority, "policy": "accept",
    });
    table.part("chain", fields)
}

/// Gives packets the numbers of their senders. A state's mark is for this chain alone.
fn number_rules() -> Vec<Value> {
    const HOOK: &str = "prerouting";
    let [(marks, _), (v4, _), (v6, _)] = senders::MAPS;
    let number = json!({ "&": [meta("mark"), senders::NUMBERS_MASK] });
    let marked = || equal(&number, senders::NUMBERS);
    let priority = |key: Value, map: &str| {
        let data = json!({ "map": { "key": key, "data": format!("@{map}") } });
        json!({ "mangle": { "key": meta("priority"), "value": data } })
    };
    let unmarked = json!({ "mangle": { "key": meta("mark"), "value": 0 } });
    let comment = "weft: the number of a peer";
    vec![
        rule(HOOK, comment, vec![marked(), priority(meta("mark"), marks)]),
        rule(HOOK, "weft: the mark is nobody else's", vec![marked(), unmarked, accept()]),
        rule(HOOK, comment, vec![overlay(), priority(field("ip", "saddr"), v4)]),
        rule(HOOK, comment, vec![overlay(), priority(field("ip6", "saddr"), v6)]),
    ]
}

fn output_rules() -> Vec<Value> {
    let foreign = differs(&meta("priority"), SENT);
    let mut rules = vec![
        rule("output", "weft: Weft did not send it", vec![overlay(), foreign, jump(FORGED)]),
        rule(
            "output",
            "weft: seen, and as any other from here on",
            vec![overlay(), set_priority(USUAL)],
        ),
    ];
    rules.extend(leaving_rules("output"));
    rules
}

const FORGED: &str = "not-sent-by-weft";

fn forged_rules() -> Vec<Value> {
    let comment = "weft: the overlay's ports are for Weft";
    vec![
        rule(FORGED, NOTHING_ELSE, dropped(vec![by_channel("oifname")], "channel")),
        rule(FORGED, UNPROTECTED, dropped(vec![unprotected("rt")], "output")),
        rule(FORGED, comment, dropped(Vec::new(), "forged")),
    ]
}

/// The exceptions, then the drops. The route that a packet takes knows whether IPsec will wrap it.
fn leaving_rules(hook: &str) -> Vec<Value> {
    vec![
        exception(hook, "ip", "daddr", "trusted4"),
        exception(hook, "ip6", "daddr", "trusted6"),
        rule(hook, SEALED, vec![by_channel("oifname"), overlay(), accept()]),
        rule(hook, NOTHING_ELSE, dropped(vec![by_channel("oifname")], "channel")),
        rule(hook, UNPROTECTED, dropped(vec![overlay(), unprotected("rt")], hook)),
    ]
}

/// An arrived packet records its former wrappings, the outermost first. A state of ours opens only overlay
/// packets, so any one of them suffices: Weft may run inside another VPN.
fn input_rules() -> Vec<Value> {
    const HOOK: &str = "input";
    let fragment = equal(&json!({ "exthdr": { "name": "frag" } }), true);
    let mut rules = vec![
        rule(HOOK, "weft: fragments over IPv6", vec![fragment, jump(FRAGMENTS)]),
        exception(HOOK, "ip", "saddr", "trusted4"),
        exception(HOOK, "ip6", "saddr", "trusted6"),
        rule(HOOK, SEALED, vec![by_channel("iifname"), overlay(), accept()]),
        rule(HOOK, NOTHING_ELSE, dropped(vec![by_channel("iifname")], "channel")),
    ];
    rules.extend((0..TRANSFORMATIONS_MAX).map(|number| {
        let reqid = json!({ "ipsec": { "key": "reqid", "dir": "in", "spnum": number } });
        rule(HOOK, "weft: sealed by a peer", vec![overlay(), equal(&reqid, REQID), accept()])
    }));
    rules.push(rule(HOOK, UNPROTECTED, dropped(vec![overlay()], HOOK)));
    rules
}

const FRAGMENTS: &str = "fragments";

/// Over IPv6 the guard sees fragments before reassembly. The first fragment must contain the upper-layer
/// header (RFC 7112). A match on a missing field fails, so a packet that reaches the last rule is dropped.
fn fragment_rules() -> Vec<Value> {
    let offset = json!({ "exthdr": { "name": "frag", "field": "frag-off" } });
    let go_on = || json!({ "return": null });
    let [port, ..] = GUARDED_PORTS;
    let shown = "weft: the port can be read";
    vec![
        rule(FRAGMENTS, "weft: not the first", vec![differs(&offset, 0), go_on()]),
        rule(FRAGMENTS, "weft: not UDP", vec![differs(&meta("l4proto"), "udp"), go_on()]),
        rule(FRAGMENTS, shown, vec![equal(&field("udp", "dport"), port), go_on()]),
        rule(FRAGMENTS, shown, vec![differs(&field("udp", "dport"), port), go_on()]),
        rule(FRAGMENTS, "weft: may be the overlay's", dropped(Vec::new(), "fragments")),
    ]
}

const UNPROTECTED: &str = "weft: no overlay packet without protection";
const SEALED: &str = "weft: the data channel seals and opens what takes its device";
const NOTHING_ELSE: &str = "weft: nothing but the overlay takes the data channel";

/// Forwarded packets never take the data channel, nor the overlay's ports.
fn forward_rules() -> Vec<Value> {
    const HOOK: &str = "forward";
    let channel = |key| rule(HOOK, NOTHING_ELSE, dropped(vec![by_channel(key)], "channel"));
    let comment = "weft: the overlay's ports are for Weft";
    vec![
        channel("iifname"),
        channel("oifname"),
        rule(HOOK, comment, dropped(vec![overlay()], "forward")),
    ]
}

fn exception(hook: &str, protocol: &str, side: &str, set: &str) -> Value {
    let peer = equal(&field(protocol, side), format!("@{set}"));
    rule(hook, "weft: peers trusted in plain", vec![peer, overlay(), accept()])
}

fn overlay() -> Value {
    equal(&field("udp", "dport"), json!({ "set": GUARDED_PORTS }))
}

fn unprotected(knows: &str) -> Value {
    equal(&json!({ knows: { "key": "ipsec" } }), false)
}

fn field(protocol: &str, field: &str) -> Value {
    json!({ "payload": { "protocol": protocol, "field": field } })
}

fn meta(key: &str) -> Value {
    json!({ "meta": { "key": key } })
}

fn set_priority(value: &str) -> Value {
    json!({ "mangle": { "key": meta("priority"), "value": value } })
}

fn jump(chain: &str) -> Value {
    json!({ "jump": { "target": chain } })
}

fn rule(chain: &str, comment: &str, expr: Vec<Value>) -> Value {
    TABLE.part("rule", json!({ "chain": chain, "comment": comment, "expr": Value::from(expr) }))
}

fn equal(left: &Value, right: impl Into<Value>) -> Value {
    let right: Value = right.into();
    json!({ "match": { "op": "==", "left": left, "right": right } })
}

fn differs(left: &Value, right: impl Into<Value>) -> Value {
    let right: Value = right.into();
    json!({ "match": { "op": "!=", "left": left, "right": right } })
}

fn by_channel(key: &str) -> Value {
    equal(&meta(key), DATA_CHANNEL_DEVICE)
}

fn accept() -> Value {
    json!({ "accept": null })
}

fn dropped(mut expr: Vec<Value>, counter: &str) -> Vec<Value> {
    expr.extend([json!({ "counter": counter }), json!({ "drop": null })]);
    expr
}

fn counters(listing: &Listing) -> GuardCounters {
    let count = |name: &str| {
        let counter = listing.of("counter").find(|counter| counter["name"] == name);
        let number = |key: &str| counter.and_then(|c| c[key].as_u64()).unwrap_or_default();
        GuardCount { packets: number("packets"), bytes: number("bytes") }
    };
    GuardCounters {
        output: count("output"),
        forged: count("forged"),
        forward: count("forward"),
        postrouting: count("postrouting"),
        input: count("input"),
        fragments: count("fragments"),
        channel: count("channel"),
        foreign_source: count(FOREIGN_SOURCE),
    }
}

/// The members of both sets; `None` if a member is not a single address.
fn trusted_in(listing: &Listing) -> Option<BTreeSet<IpAddr>> {
    let sets = listing.of("set").filter(|set| SETS.iter().any(|(name, _)| set["name"] == *name));
    let members = sets.filter_map(|set| set["elem"].as_array()).flatten();
    members.map(|member| member.as_str()?.parse().ok()).collect()
}
