//! The guard: no overlay packet leaves or arrives unprotected, whoever sent it (DESIGN section 8), and
//! nothing but overlay packets takes the data channel's device.

use std::{collections::BTreeSet, net::IpAddr};

use serde_json::{Value, json};

use crate::{
    Kernel,
    engine::DATA_CHANNEL_DEVICE,
    error::KernelError,
    nft::{Listing, Table},
    nft_watch::NftWatch,
};

/// The inner UDP ports of overlay packets: data and probes, and probes of candidates.
pub const GUARDED_PORTS: [u16; 2] = [6787, 6788];
/// Most addresses that may be trusted.
pub const TRUSTED_MAX: usize = 4096;

const TABLE: Table = Table { family: "inet", name: "weft-guard" };
/// After every change of address, mark or route by others on the way out: what decides is the
/// route that the packet takes.
const PRIORITY_LAST: i32 = 300;
/// Before all others on the way in, so that everything is counted.
const PRIORITY_FIRST: i32 = -300;

/// How often one rule dropped.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GuardCount {
    /// Packets.
    pub packets: u64,
    /// Bytes, IP header included.
    pub bytes: u64,
}

/// What the guard dropped since it was made, by rule.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GuardCounters {
    /// Packets of this host that would have left unprotected.
    pub output: GuardCount,
    /// Packets that would have left unprotected and were not caught as this host's own: forwarded.
    pub postrouting: GuardCount,
    /// Packets for this host that arrived unprotected.
    pub input: GuardCount,
    /// Packets other than the overlay's that came out of the data channel's device or would have
    /// entered it: a peer's key opens nothing else on the host.
    pub channel: GuardCount,
}

/// The guard of a host: one nftables table, `inet weft-guard`. It does not depend on any SA or
/// policy, and stays when the daemon is killed.
pub struct Guard {
    kernel: Kernel,
    trusted: BTreeSet<IpAddr>,
    /// How this host's `nft` shows the table as it was written, should that differ from the words
    /// it was written in.
    as_written: Option<Vec<Value>>,
}

impl Guard {
    /// The guard of the kernel's namespace. Nothing is changed.
    #[must_use]
    pub fn new(kernel: Kernel) -> Self {
        Self { kernel, trusted: BTreeSet::new(), as_written: None }
    }

    /// Makes the guard stand whole, with `trusted` as the addresses of peers that overlay packets
    /// may go to and come from in plain. True if something had to be changed. Counts survive,
    /// except those of a table that somebody deleted.
    ///
    /// # Errors
    /// [`KernelError::TableTaken`] if somebody else's table has the name,
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
        let _one = kernel.inner.reconcile.lock().await;
        let found = kernel.nft_list(TABLE).await?;
        if found.as_ref().is_some_and(|listing| !listing.is_ours()) {
            return Err(TABLE.taken());
        }
        let found = found.unwrap_or_default();
        let counts = counters(&found);
        if !self.has_shape(&found) {
            let commands = TABLE.replacement(&objects(&self.trusted, counts));
            kernel.nft_apply(commands, "write the guard").await?;
            let written = kernel.nft_list(TABLE).await?.unwrap_or_default();
            self.as_written = Some(written.shape());
            return Ok(true);
        }
        if trusted_in(&found).as_ref() == Some(&self.trusted) {
            return Ok(false);
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

    /// Whether the guard stands as [`Self::ensure`] last wanted it.
    ///
    /// # Errors
    /// See [`Self::ensure`].
    pub async fn is_whole(&self) -> Result<bool, KernelError> {
        let Some(found) = self.kernel.nft_list(TABLE).await? else { return Ok(false) };
        Ok(self.has_shape(&found) && trusted_in(&found).as_ref() == Some(&self.trusted))
    }

    /// What was dropped so far; zero if there is no guard.
    ///
    /// # Errors
    /// [`KernelError::NftMissing`], [`KernelError::NftRefused`], [`KernelError::Program`].
    pub async fn counters(&self) -> Result<GuardCounters, KernelError> {
        let found = self.kernel.nft_list(TABLE).await?;
        Ok(found.map(|listing| counters(&listing)).unwrap_or_default())
    }

    /// Takes the guard down. False if there was none.
    ///
    /// # Errors
    /// See [`Self::ensure`]; somebody else's table is left alone.
    pub async fn remove(&mut self) -> Result<bool, KernelError> {
        let kernel = self.kernel.clone();
        let _one = kernel.inner.reconcile.lock().await;
        self.as_written = None;
        kernel.nft_remove(TABLE).await
    }

    /// Watches the guard's table. Open it before [`Self::ensure`], so that no change is missed.
    ///
    /// # Errors
    /// [`KernelError::Socket`] if the kernel gives no socket.
    pub fn watch(&self) -> Result<NftWatch, KernelError> {
        self.kernel.nft_watch(vec![TABLE])
    }

    /// Waits until somebody damaged the guard, and returns when it stands whole again.
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

    fn has_shape(&self, found: &Listing) -> bool {
        let shape = found.shape();
        let wanted = Listing(objects(&BTreeSet::new(), GuardCounters::default())).shape();
        shape == wanted || self.as_written.as_ref() == Some(&shape)
    }
}

type IsFamily = fn(&IpAddr) -> bool;
const SETS: [(&str, IsFamily); 2] = [("trusted4", IpAddr::is_ipv4), ("trusted6", IpAddr::is_ipv6)];

fn members(trusted: &BTreeSet<IpAddr>, is_family: IsFamily) -> Vec<String> {
    trusted.iter().filter(|address| is_family(address)).map(ToString::to_string).collect()
}

/// Everything in the table.
fn objects(trusted: &BTreeSet<IpAddr>, counts: GuardCounters) -> Vec<Value> {
    let mut objects = vec![TABLE.tag()];
    for (name, count) in [
        ("output", counts.output),
        ("postrouting", counts.postrouting),
        ("input", counts.input),
        ("channel", counts.channel),
    ] {
        let fields = json!({ "name": name, "packets": count.packets, "bytes": count.bytes });
        objects.push(TABLE.part("counter", fields));
    }
    for ((name, is_family), kind) in SETS.into_iter().zip(["ipv4_addr", "ipv6_addr"]) {
        let mut fields = json!({ "name": name, "type": kind });
        let members = members(trusted, is_family);
        if !members.is_empty() {
            fields["elem"] = members.into();
        }
        objects.push(TABLE.part("set", fields));
    }
    for (hook, priority) in [
        ("output", PRIORITY_LAST),
        ("postrouting", PRIORITY_LAST),
        ("input", PRIORITY_FIRST),
        ("forward", PRIORITY_FIRST),
    ] {
        let fields = json!({
            "name": hook, "type": "filter", "hook": hook, "prio": priority, "policy": "accept",
        });
        objects.push(TABLE.part("chain", fields));
        objects.extend(if hook == "forward" { forward_rules().into() } else { rules(hook) });
    }
    objects
}

/// The rules of a chain for what enters or leaves this host: the exceptions, then the drops.
fn rules(hook: &str) -> Vec<Value> {
    let arriving = hook == "input";
    let side = if arriving { "saddr" } else { "daddr" };
    let field = |protocol: &str, field: &str| json!({ "payload": { "protocol": protocol, "field": field } });
    let overlay = || equal(&field("udp", "dport"), json!({ "set": GUARDED_PORTS }));
    let exception = |protocol: &str, set: &str| {
        let peer = equal(&field(protocol, side), format!("@{set}"));
        rule(hook, "weft: peers trusted in plain", vec![peer, overlay(), accept()])
    };
    let channel = || by_channel(if arriving { "iifname" } else { "oifname" });
    // The route that a packet takes knows whether IPsec will wrap it; an arrived packet knows what
    // it was wrapped in.
    let protection = if arriving { "meta" } else { "rt" };
    let unprotected = equal(&json!({ protection: { "key": "ipsec" } }), false);
    let sealed = "weft: the data channel seals and opens what takes its device";
    vec![
        exception("ip", "trusted4"),
        exception("ip6", "trusted6"),
        rule(hook, sealed, vec![channel(), overlay(), accept()]),
        rule(hook, NOTHING_ELSE, dropped(vec![channel()], "channel")),
        rule(
            hook,
            "weft: no overlay packet without protection",
            dropped(vec![overlay(), unprotected], hook),
        ),
    ]
}

const NOTHING_ELSE: &str = "weft: nothing but the overlay takes the data channel";

/// What this host passes on never takes the data channel.
fn forward_rules() -> [Value; 2] {
    ["iifname", "oifname"]
        .map(|key| rule("forward", NOTHING_ELSE, dropped(vec![by_channel(key)], "channel")))
}

fn rule(chain: &str, comment: &str, expr: Vec<Value>) -> Value {
    TABLE.part("rule", json!({ "chain": chain, "comment": comment, "expr": Value::from(expr) }))
}

fn equal(left: &Value, right: impl Into<Value>) -> Value {
    let right: Value = right.into();
    json!({ "match": { "op": "==", "left": left, "right": right } })
}

fn by_channel(key: &str) -> Value {
    equal(&json!({ "meta": { "key": key } }), DATA_CHANNEL_DEVICE)
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
        postrouting: count("postrouting"),
        input: count("input"),
        channel: count("channel"),
    }
}

/// The members of both sets; `None` if there is one that is no single address.
fn trusted_in(listing: &Listing) -> Option<BTreeSet<IpAddr>> {
    let members = listing.of("set").filter_map(|set| set["elem"].as_array()).flatten();
    members.map(|member| member.as_str()?.parse().ok()).collect()
}
