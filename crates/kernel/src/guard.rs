//! The guard: netfilter rules that drop every overlay packet which leaves, or has arrived, without
//! IPsec (DESIGN section 8).
//!
//! One table of ours, `inet weft-guard`, set in one transaction by the `nft` program, whose language
//! is the one that users read and write themselves. The rules name no peer: they hold for whoever
//! sends. Trusted peers are elements of two sets. Counters are named, and outlive a change of the
//! sets.

use std::{
    collections::BTreeSet, fmt::Write as _, io, net::IpAddr, process::Stdio, time::Duration,
};

use netlink_sys::{AsyncSocket, AsyncSocketExt, TokioSocket, protocols::NETLINK_NETFILTER};
use serde_json::Value;
use tokio::io::AsyncWriteExt;

use crate::error::KernelError;

/// The guard's table, of family `inet`.
const GUARD_TABLE: &str = "weft-guard";
/// How long one call of `nft` may take, in milliseconds.
const NFT_TIMEOUT_MS: u64 = 10_000;
/// The multicast group of changes to nftables (Linux NFNLGRP_NFTABLES).
const GROUP_NFTABLES: u32 = 7;
/// The mark on the table by which it is known as ours.
const COMMENT: &str = "Weft: drops overlay packets that are not protected by IPsec";
/// Name of the counter, and of the rule that it belongs to.
const COUNTERS: [&str; 3] = ["output", "postrouting", "input"];

/// Packets that the guard dropped since it was set, by rule.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GuardCounters {
    /// About to leave, made on this host.
    pub output: u64,
    /// About to leave, at the last hook.
    pub postrouting: u64,
    /// Arrived.
    pub input: u64,
}

impl GuardCounters {
    /// Each counter with its name.
    pub fn named(&self) -> impl Iterator<Item = (&'static str, u64)> {
        COUNTERS.into_iter().zip([self.output, self.postrouting, self.input])
    }
}

/// The guard of the network namespace of the thread that calls.
#[derive(Clone, Copy, Debug, Default)]
pub struct Guard;

impl Guard {
    /// A handle; nothing is changed.
    #[must_use]
    pub const fn new() -> Self {
        Self
    }

    /// Sets the guard with exceptions for these peers. One that stands as wanted is left as it is.
    ///
    /// # Errors
    /// [`KernelError::NftMissing`], [`KernelError::NftRefused`]; [`KernelError::GuardTaken`]
    /// if a table of somebody else has the name.
    pub async fn ensure(&self, trusted: &BTreeSet<IpAddr>) -> Result<(), KernelError> {
        if self.is_whole(trusted).await? {
            return Ok(());
        }
        nft(&["-f", "-"], Some(&script(trusted)), "set the guard").await.map(|_| ())
    }

    /// Whether it stands, complete and with exactly these exceptions.
    ///
    /// # Errors
    /// As [`Self::ensure`].
    pub async fn is_whole(&self, trusted: &BTreeSet<IpAddr>) -> Result<bool, KernelError> {
        let Some(found) = self.list().await? else { return Ok(false) };
        let found = Found::read(&found);
        if !found.ours {
            return Err(KernelError::GuardTaken { table: GUARD_TABLE });
        }
        Ok(found.rules == RULES.len() && found.drops == COUNTERS.len() && found.trusted == *trusted)
    }

    /// What it dropped.
    ///
    /// # Errors
    /// As [`Self::ensure`].
    pub async fn counters(&self) -> Result<GuardCounters, KernelError> {
        let listed = self.list().await?.unwrap_or_default();
        let count = |name: &str| {
            let mut counters = items(&listed, "counter");
            let counter = counters.find(|counter| counter["name"] == name);
            counter.and_then(|counter| counter["packets"].as_u64()).unwrap_or(0)
        };
        let [output, postrouting, input] = COUNTERS.map(count);
        Ok(GuardCounters { output, postrouting, input })
    }

    /// Takes the guard away; none, or somebody else's table of that name, is left as it is.
    ///
    /// # Errors
    /// As [`Self::ensure`].
    pub async fn remove(&self) -> Result<(), KernelError> {
        match self.list().await? {
            Some(found) if Found::read(&found).ours => {
                let words = ["delete", "table", "inet", GUARD_TABLE];
                nft(&words, None, "remove the guard").await.map(|_| ())
            }
            _ => Ok(()),
        }
    }

    /// Watches the tables of this namespace.
    ///
    /// # Errors
    /// [`KernelError::Socket`] if the kernel gives no socket.
    pub fn watch(&self) -> Result<GuardWatch, KernelError> {
        let failed = |source| KernelError::Socket { doing: "watch nftables".into(), source };
        let mut socket = TokioSocket::new(NETLINK_NETFILTER).map_err(failed)?;
        socket.socket_mut().bind_auto().map_err(failed)?;
        socket.socket_mut().add_membership(GROUP_NFTABLES).map_err(failed)?;
        Ok(GuardWatch { socket })
    }

    async fn list(&self) -> Result<Option<Value>, KernelError> {
        const DOING: &str = "list the guard";
        match nft(&["-j", "list", "table", "inet", GUARD_TABLE], None, DOING).await {
            Ok(text) => serde_json::from_str(&text)
                .map(Some)
                .map_err(|error| KernelError::NftRefused { doing: DOING, why: error.to_string() }),
            Err(KernelError::NftRefused { why, .. }) if why.contains("No such file") => Ok(None),
            Err(error) => Err(error),
        }
    }
}

/// Tells when somebody has changed a table of nftables.
pub struct GuardWatch {
    socket: TokioSocket,
}

impl GuardWatch {
    /// Waits for a change, whosever table it was.
    ///
    /// # Errors
    /// [`KernelError::Socket`] if the socket fails.
    pub async fn changed(&mut self) -> Result<(), KernelError> {
        match self.socket.recv_from_full().await {
            Ok(_) => Ok(()),
            // Too much has changed for the socket's buffer: it is looked at anyway.
            Err(error) if error.raw_os_error() == Some(105) => Ok(()),
            Err(source) => Err(KernelError::Socket { doing: "watch nftables".into(), source }),
        }
    }
}

/// Chain and rule, in order. An exception goes before the drop.
const RULES: [(&str, &str); 9] = [
    ("output", "udp dport { 6787, 6788 } ip daddr @trusted4 accept"),
    ("output", "udp dport { 6787, 6788 } ip6 daddr @trusted6 accept"),
    ("output", "udp dport { 6787, 6788 } rt ipsec missing counter name output drop"),
    ("postrouting", "udp dport { 6787, 6788 } ip daddr @trusted4 accept"),
    ("postrouting", "udp dport { 6787, 6788 } ip6 daddr @trusted6 accept"),
    ("postrouting", "udp dport { 6787, 6788 } rt ipsec missing counter name postrouting drop"),
    ("input", "udp dport { 6787, 6788 } ip saddr @trusted4 accept"),
    ("input", "udp dport { 6787, 6788 } ip6 saddr @trusted6 accept"),
    ("input", "udp dport { 6787, 6788 } meta ipsec missing counter name input drop"),
];

/// The whole table in one transaction; counters that are there go on.
fn script(trusted: &BTreeSet<IpAddr>) -> String {
    let table = format!("inet {GUARD_TABLE}");
    let mut text = format!("add table {table} {{ comment \"{COMMENT}\"; }}\n");
    for counter in COUNTERS {
        let _ = writeln!(text, "add counter {table} {counter}");
    }
    for (set, kind) in [("trusted4", "ipv4_addr"), ("trusted6", "ipv6_addr")] {
        let _ = writeln!(text, "add set {table} {set} {{ type {kind}; }}\nflush set {table} {set}");
    }
    for address in trusted {
        let set = if address.is_ipv4() { "trusted4" } else { "trusted6" };
        let _ = writeln!(text, "add element {table} {set} {{ {address} }}");
    }
    for chain in COUNTERS {
        let hook = format!("type filter hook {chain} priority 0; policy accept;");
        let _ =
            writeln!(text, "add chain {table} {chain} {{ {hook} }}\nflush chain {table} {chain}");
    }
    for (chain, rule) in RULES {
        let _ = writeln!(text, "add rule {table} {chain} {rule}");
    }
    text
}

/// What a listing shows.
#[derive(Default)]
struct Found {
    ours: bool,
    rules: usize,
    /// Rules that drop and count.
    drops: usize,
    trusted: BTreeSet<IpAddr>,
}

impl Found {
    fn read(listed: &Value) -> Self {
        let mut found = Self {
            ours: items(listed, "table").any(|table| table["comment"] == COMMENT)
                // nft before 1.0.3 does not tell comments; the counters' names do.
                || COUNTERS.iter().all(|name| items(listed, "counter").any(|c| c["name"] == *name)),
            ..Self::default()
        };
        for rule in items(listed, "rule") {
            found.rules += 1;
            let statements = rule["expr"].as_array().map(Vec::as_slice).unwrap_or_default();
            let drops = statements.iter().any(|statement| statement.get("drop").is_some());
            let counts = statements.iter().any(|statement| statement.get("counter").is_some());
            found.drops += usize::from(drops && counts);
        }
        for set in items(listed, "set") {
            let elements = set["elem"].as_array().map(Vec::as_slice).unwrap_or_default();
            let addresses = elements.iter().filter_map(|element| element.as_str()?.parse().ok());
            found.trusted.extend(addresses.collect::<Vec<IpAddr>>());
        }
        found
    }
}

/// The objects of one kind in a listing.
fn items<'a>(listed: &'a Value, kind: &'static str) -> impl Iterator<Item = &'a Value> {
    let all = listed["nftables"].as_array().map(Vec::as_slice).unwrap_or_default();
    all.iter().filter_map(move |item| item.get(kind))
}

async fn nft(
    words: &[&str],
    input: Option<&str>,
    doing: &'static str,
) -> Result<String, KernelError> {
    let refused = |why: String| KernelError::NftRefused { doing, why };
    let mut child = tokio::process::Command::new("nft")
        .args(words)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => KernelError::NftMissing,
            _ => refused(error.to_string()),
        })?;
    if let Some(mut stdin) = child.stdin.take() {
        let text = input.unwrap_or_default().as_bytes();
        stdin.write_all(text).await.map_err(|error| refused(error.to_string()))?;
    }
    let limit = Duration::from_millis(NFT_TIMEOUT_MS);
    let output = tokio::time::timeout(limit, child.wait_with_output())
        .await
        .map_err(|_| refused(format!("no answer within {NFT_TIMEOUT_MS} ms")))?
        .map_err(|error| refused(error.to_string()))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    Err(refused(String::from_utf8_lossy(&output.stderr).trim().to_owned()))
}
