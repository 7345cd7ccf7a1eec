//! Accept rules where iptables filters what this host passes on.
//!
//! Docker's policy in the FORWARD chain is DROP. With `bridge-nf-call-iptables` on (Docker and Kubernetes switch it
//! on), frames between two ports of a bridge pass that chain. So do packets that leave the network through this
//! host. This is the only place where Weft writes into other programs' tables. It adds rules, identified by their
//! comment, in `DOCKER-USER` where that exists, else in `FORWARD`.

use std::{path::Path, time::Duration};

use serde_json::{Value, json};
use weft_io::namespace;

use super::{
    nft::{Listing, Table, run_program},
    nft_watch::NftWatch,
};
use crate::{error::KernelError, handle::Kernel, net::link::check_name};

/// The comment of the rule for a bridge.
pub const FORWARD_COMMENT: &str = "weft";
/// The comment of the rules for a way out of the network.
const THROUGH_COMMENT: &str = "weft-through";
/// The comment of the rules between clients and the network.
const CLIENTS_COMMENT: &str = "weft-clients";
const COMMENTS: [&str; 3] = [FORWARD_COMMENT, THROUGH_COMMENT, CLIENTS_COMMENT];
/// How often to check whether br_netfilter became active or the legacy iptables tables changed, neither of
/// which sends a notice; in milliseconds.
const POLL_MS: u64 = 3_000;
/// The chain that Docker leaves to the host's administrator and never empties.
const CHAIN_USER: &str = "DOCKER-USER";
const CHAIN_FORWARD: &str = "FORWARD";

/// One address family of iptables.
struct Family {
    /// Its table in nftables, which iptables-nft writes.
    table: Table,
    /// The switch of br_netfilter.
    switch: &'static str,
    /// The file in which the kernel lists the legacy tables.
    legacy_names: &'static str,
    /// The program for these.
    legacy_program: &'static str,
}

const FAMILIES: [Family; 2] = [
    Family {
        table: Table { family: "ip", name: "filter" },
        switch: "/proc/sys/net/bridge/bridge-nf-call-iptables",
        legacy_names: "/proc/thread-self/net/ip_tables_names",
        legacy_program: "iptables-legacy",
    },
    Family {
        table: Table { family: "ip6", name: "filter" },
        switch: "/proc/sys/net/bridge/bridge-nf-call-ip6tables",
        legacy_names: "/proc/thread-self/net/ip6_tables_names",
        legacy_program: "ip6tables-legacy",
    },
];

/// Whether iptables sees bridged frames, and by which kind of tables. Cheap to read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Situation {
    /// By family: br_netfilter is active.
    active: [bool; 2],
    /// By family: there is a table of the older kind.
    legacy: [bool; 2],
}

/// The rules that may filter the frames of bridges in the calling thread's namespace, by family.
pub(crate) fn judges() -> [Judge; 2] {
    FAMILIES.each_ref().map(|family| Judge {
        family: family.table.family,
        active: is_active(family),
        legacy: !text(family.legacy_names).trim().is_empty(),
    })
}

/// The rules of one family.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Judge {
    pub(crate) family: &'static str,
    /// br_netfilter hands it the frames of all bridges.
    pub(crate) active: bool,
    /// Whether legacy iptables has a table of this family.
    pub(crate) legacy: bool,
}

fn is_active(family: &Family) -> bool {
    text(family.switch).trim() == "1"
}

fn text(path: &str) -> String {
    std::fs::read_to_string(path).unwrap_or_default()
}

/// Keeps accept rules, where they are needed.
pub struct ForwardRule {
    kernel: Kernel,
    comment: &'static str,
    accepted: Vec<Accepted>,
    /// For routed packets, which iptables sees without br_netfilter.
    routed: bool,
    last: Option<Situation>,
}

/// The packets that one rule accepts, by their interfaces.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Accepted {
    from: Option<String>,
    to: Option<String>,
}

impl ForwardRule {
    /// For the bridge of this name. Nothing is changed.
    ///
    /// # Errors
    /// [`KernelError::InvalidName`].
    pub fn new(kernel: Kernel, bridge: &str) -> Result<Self, KernelError> {
        let (comment, accepted) = (FORWARD_COMMENT, Vec::new());
        let mut rule = Self { kernel, comment, accepted, routed: false, last: None };
        rule.set_bridges(&[bridge.to_owned()])?;
        Ok(rule)
    }

    /// Makes `bridges` the whole list of bridges, each for frames within it. The next [`Self::ensure`] writes their
    /// rules.
    ///
    /// # Errors
    /// [`KernelError::InvalidName`]; the list stays as it was.
    pub fn set_bridges(&mut self, bridges: &[String]) -> Result<(), KernelError> {
        bridges.iter().try_for_each(|bridge| check_name(bridge))?;
        let frames = |bridge: &String| {
            let bridge = Some(bridge.clone());
            Accepted { from: bridge.clone(), to: bridge }
        };
        self.accepted = bridges.iter().map(frames).collect();
        self.last = None;
        Ok(())
    }

    /// For packets that this host passes on, from no interface yet. Nothing is changed.
    #[must_use]
    pub fn through(kernel: Kernel) -> Self {
        let (comment, accepted) = (THROUGH_COMMENT, Vec::new());
        Self { kernel, comment, accepted, routed: true, last: None }
    }

    /// Makes `interfaces` the whole list of those from which and to which this host passes packets on. The next
    /// [`Self::ensure`] writes their rules.
    ///
    /// # Errors
    /// [`KernelError::InvalidName`]; the list stays as it was.
    pub fn set_through(&mut self, interfaces: &[String]) -> Result<(), KernelError> {
        interfaces.iter().try_for_each(|interface| check_name(interface))?;
        let ways = |interface: &String| {
            let interface = Some(interface.clone());
            let out = Accepted { from: interface.clone(), to: None };
            [out, Accepted { from: None, to: interface }]
        };
        self.accepted = interfaces.iter().flat_map(ways).collect();
        self.last = None;
        Ok(())
    }

    /// For packets of clients, between no interfaces yet. Nothing is changed.
    pub(crate) fn clients(kernel: Kernel) -> Self {
        let (comment, accepted) = (CLIENTS_COMMENT, Vec::new());
        Self { kernel, comment, accepted, routed: true, last: None }
    }

    /// Has packets accepted between the clients of a device, and between them and another interface, or all. The next
    /// [`Self::ensure`] writes the rules.
    ///
    /// # Errors
    /// [`KernelError::InvalidName`]; the rules stay as they were.
    pub(crate) fn set_clients(
        &mut self,
        device: &str,
        exposed: &str,
        go_elsewhere: bool,
    ) -> Result<(), KernelError> {
        [device, exposed].into_iter().try_for_each(check_name)?;
        let ways = [(device, exposed), (exposed, device), (device, device)];
        let way = |(from, to): (&str, &str)| Accepted {
            from: Some(from.to_owned()),
            to: Some(to.to_owned()),
        };
        self.accepted = ways.into_iter().map(way).collect();
        if go_elsewhere {
            let device = Some(device.to_owned());
            self.accepted = vec![
                Accepted { from: device.clone(), to: None },
                Accepted { from: None, to: device },
            ];
        }
        self.last = None;
        Ok(())
    }

    /// Adds rules where they are needed and missing, and removes them where they are not needed any more. They
    /// are needed where iptables sees the packets, and its FORWARD chain has the policy DROP or any rule. True if
    /// something was changed.
    ///
    /// # Errors
    /// [`KernelError::NftMissing`], [`KernelError::NftRefused`], [`KernelError::Program`],
    /// [`KernelError::NotPermitted`].
    pub async fn ensure(&mut self) -> Result<bool, KernelError> {
        let situation = self.look()?;
        let kernel = self.kernel.clone();
        let _one = kernel.inner.filters.lock().await;
        let mut changed = false;
        for (index, family) in FAMILIES.iter().enumerate() {
            let active = situation.active[index];
            // Before br_netfilter was first seen active, only an earlier run's rule can be there.
            changed |= self.reconcile_nft(family, active).await?;
            if situation.legacy[index] {
                changed |= self.reconcile_legacy(family, active).await?;
            }
        }
        self.last = Some(situation);
        Ok(changed)
    }

    /// Takes the rule away everywhere. True if there was one.
    ///
    /// # Errors
    /// See [`Self::ensure`].
    pub async fn remove(&mut self) -> Result<bool, KernelError> {
        let situation = self.look()?;
        let kernel = self.kernel.clone();
        let _one = kernel.inner.filters.lock().await;
        self.last = None;
        let mut changed = false;
        for (index, family) in FAMILIES.iter().enumerate() {
            changed |= self.reconcile_nft(family, false).await?;
            if situation.legacy[index] {
                changed |= self.reconcile_legacy(family, false).await?;
            }
        }
        Ok(changed)
    }

    /// Watches the tables that the rule may be in. Open it before [`Self::ensure`].
    ///
    /// # Errors
    /// [`KernelError::Socket`] if the kernel gives no socket.
    pub fn watch(&self) -> Result<NftWatch, KernelError> {
        self.kernel.nft_watch(self.tables().collect(), None)
    }

    /// The tables that the rules may be in.
    pub(crate) fn tables(&self) -> impl Iterator<Item = Table> + use<> {
        FAMILIES.iter().map(|family| family.table)
    }

    /// Waits until the rule had to be added or removed, and returns when that is done. Causes: another
    /// program removed it, Docker recreated its chains, or br_netfilter became active.
    ///
    /// # Errors
    /// See [`Self::ensure`].
    pub async fn keep(&mut self, watch: &mut NftWatch) -> Result<(), KernelError> {
        loop {
            let poll = tokio::time::sleep(Duration::from_millis(POLL_MS));
            let announced = tokio::select! {
                result = watch.changed() => result.map(|()| true)?,
                () = poll => false,
            };
            let situation = self.look()?;
            let unannounced = (0..2).any(|n| situation.active[n] && situation.legacy[n]);
            let due = announced || unannounced || self.last != Some(situation);
            if due && self.ensure().await? {
                return Ok(());
            }
        }
    }

    fn look(&self) -> Result<Situation, KernelError> {
        let home = &self.kernel.inner.home;
        let path = Path::new("/proc/sys/net/bridge");
        let routed = self.routed;
        namespace::run_in(home, || {
            let has_filter =
                |family: &Family| text(family.legacy_names).lines().any(|n| n == "filter");
            Situation {
                active: FAMILIES.each_ref().map(|family| routed || is_active(family)),
                legacy: FAMILIES.each_ref().map(has_filter),
            }
        })
        .map_err(|source| crate::error::namespace_error(path, source))
    }

    async fn reconcile_nft(&self, family: &Family, active: bool) -> Result<bool, KernelError> {
        let listing = match self.kernel.nft_list(family.table).await {
            Ok(Some(listing)) => listing,
            Ok(None) => return Ok(false),
            // Without nft there is no rule of ours, and none is needed unless br_netfilter is active.
            Err(KernelError::NftMissing { .. }) if !active => return Ok(false),
            Err(error) => return Err(error),
        };
        let wanted = if active { chain_for_rule(&listing) } else { None };
        let mut surplus: Vec<&Value> =
            listing.of("rule").filter(|rule| rule["comment"] == self.comment).collect();
        let mut commands = Vec::new();
        for accepted in &self.accepted {
            let is_wanted = |rule: &&Value| {
                wanted.is_some_and(|chain| rule["chain"] == chain)
                    && accepted.is_rule(&rule["expr"])
            };
            match (wanted, surplus.iter().position(is_wanted)) {
                (_, Some(kept)) => drop(surplus.remove(kept)),
                (Some(chain), None) => {
                    let (comment, expr) = (self.comment, accepted.expression());
                    let fields = json!({ "chain": chain, "comment": comment, "expr": expr });
                    commands.push(json!({ "insert": family.table.part("rule", fields) }));
                }
                (None, None) => {}
            }
        }
        for rule in surplus {
            let fields = json!({ "chain": rule["chain"], "handle": rule["handle"] });
            commands.push(json!({ "delete": family.table.part("rule", fields) }));
        }
        if commands.is_empty() {
            return Ok(false);
        }
        let doing = format!("write the accept rules of Weft into {}", family.table.family);
        self.kernel.nft_apply(commands, &doing).await.map(|()| true)
    }

    async fn reconcile_legacy(&self, family: &Family, active: bool) -> Result<bool, KernelError> {
        let Some(rules) = self.run_legacy(family, &["-S"]).await? else {
            tracing::warn!(
                program = family.legacy_program,
                "not installed; its table is left alone"
            );
            return Ok(false);
        };
        let wanted = if active { legacy_chain_for_rule(&rules) } else { None };
        let mut changed = false;
        for (chain, former) in self.former_legacy(&rules) {
            let former: Vec<&str> = former.iter().map(String::as_str).collect();
            self.change_legacy(family, &["-D", chain], &former).await?;
            changed = true;
        }
        for accepted in &self.accepted {
            let rule = accepted.legacy(self.comment);
            let mut present = false;
            for chain in [CHAIN_USER, CHAIN_FORWARD] {
                let line = format!("-A {chain} {}", rule.join(" "));
                for _ in rules.lines().filter(|found| found.trim() == line) {
                    if wanted == Some(chain) && !present {
                        present = true;
                        continue;
                    }
                    self.change_legacy(family, &["-D", chain], &rule).await?;
                    changed = true;
                }
            }
            if let (Some(chain), false) = (wanted, present) {
                self.change_legacy(family, &["-I", chain], &rule).await?;
                changed = true;
            }
        }
        Ok(changed)
    }

    /// The chains and arguments of our rules for interfaces that are no longer accepted.
    fn former_legacy(&self, rules: &str) -> Vec<(&'static str, Vec<String>)> {
        let accepted: Vec<String> =
            self.accepted.iter().map(|it| it.legacy(self.comment).join(" ")).collect();
        let ours = format!("--comment {} ", self.comment);
        let mut former = Vec::new();
        for line in rules.lines().map(str::trim).filter(|line| line.contains(&ours)) {
            for chain in [CHAIN_USER, CHAIN_FORWARD] {
                let rule = line.strip_prefix("-A ").and_then(|rest| rest.strip_prefix(chain));
                if let Some(rule) = rule.and_then(|rest| rest.strip_prefix(' '))
                    && !accepted.iter().any(|accepted| accepted == rule)
                {
                    former.push((chain, rule.split(' ').map(str::to_owned).collect()));
                }
            }
        }
        former
    }

    async fn change_legacy(
        &self,
        family: &Family,
        command: &[&str],
        rule: &[&str],
    ) -> Result<(), KernelError> {
        self.kernel.count_change();
        self.run_legacy(family, &[command, rule].concat()).await.map(|_| ())
    }

    /// Runs the program and returns its output, or `None` if it is not installed.
    async fn run_legacy(
        &self,
        family: &Family,
        arguments: &[&str],
    ) -> Result<Option<String>, KernelError> {
        const WAIT_FOR_LOCK_S: &str = "5";
        let arguments = [&["-w", WAIT_FOR_LOCK_S, "-t", "filter"], arguments].concat();
        let program = family.legacy_program;
        let doing = "read or write the accept rules of Weft";
        let home = &self.kernel.inner.home;
        let Some(output) = run_program(home, program, &arguments, None, doing).await? else {
            return Ok(None);
        };
        if output.status.success() {
            return Ok(Some(String::from_utf8_lossy(&output.stdout).into_owned()));
        }
        let complaint = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        let source = std::io::Error::other(complaint);
        Err(KernelError::Program { program: program.into(), doing: doing.into(), source })
    }
}

impl Accepted {
    /// As iptables-nft writes it, so that `iptables -S` shows it.
    fn expression(&self) -> Value {
        let ends = [("iifname", &self.from), ("oifname", &self.to)];
        let ends = ends.into_iter().filter_map(|(key, name)| Some((key, name.as_ref()?)));
        let matches = ends.map(|(key, name)| {
            let left = json!({ "meta": { "key": key } });
            json!({ "match": { "op": "==", "left": left, "right": name } })
        });
        let counter = json!({ "counter": { "packets": 0, "bytes": 0 } });
        matches.chain([counter, json!({ "accept": null })]).collect()
    }

    /// Whether this is the rule's expression; ignores its counter.
    fn is_rule(&self, expression: &Value) -> bool {
        let without_counter = |expression: &Value| -> Vec<Value> {
            let parts = expression.as_array().into_iter().flatten();
            parts.filter(|part| part.get("counter").is_none()).cloned().collect()
        };
        without_counter(expression) == without_counter(&self.expression())
    }

    fn legacy<'a>(&'a self, comment: &'a str) -> Vec<&'a str> {
        let ends = [("-i", &self.from), ("-o", &self.to)];
        let ends = ends.into_iter().filter_map(|(key, name)| Some([key, name.as_deref()?]));
        let accept = ["-m", "comment", "--comment", comment, "-j", "ACCEPT"];
        ends.flatten().chain(accept).collect()
    }
}

/// The chain of an iptables-nft table that the rule belongs in, if FORWARD has any rules.
fn chain_for_rule(listing: &Listing) -> Option<&'static str> {
    let forward = listing.of("chain").find(|chain| chain["name"] == CHAIN_FORWARD)?;
    let is_foreign = |rule: &Value| COMMENTS.iter().all(|ours| rule["comment"] != *ours);
    let mut rules = listing.of("rule").filter(|rule| rule["chain"] == CHAIN_FORWARD);
    if forward["hook"] != "forward" || (forward["policy"] != "drop" && !rules.any(is_foreign)) {
        return None;
    }
    let has_user = listing.of("chain").any(|chain| chain["name"] == CHAIN_USER);
    Some(if has_user { CHAIN_USER } else { CHAIN_FORWARD })
}

/// The same for the output of `iptables-legacy -S`.
fn legacy_chain_for_rule(rules: &str) -> Option<&'static str> {
    let comments = COMMENTS.map(|comment| format!("--comment {comment} "));
    let is_ours = |line: &str| comments.iter().any(|comment| line.contains(comment));
    let judges = |line: &str| {
        line == "-P FORWARD DROP" || (line.starts_with("-A FORWARD ") && !is_ours(line))
    };
    if !rules.lines().map(str::trim).any(judges) {
        return None;
    }
    let has_user = rules.lines().any(|line| line.trim() == "-N DOCKER-USER");
    Some(if has_user { CHAIN_USER } else { CHAIN_FORWARD })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_forward_chain_that_accepts_needs_no_rule() {
        let cases = [
            ("-P FORWARD ACCEPT\n", None),
            ("-P FORWARD DROP\n", Some(CHAIN_FORWARD)),
            ("-P FORWARD DROP\n-N DOCKER-USER\n", Some(CHAIN_USER)),
            ("-P FORWARD ACCEPT\n-A FORWARD -j REJECT\n", Some(CHAIN_FORWARD)),
            (
                "-P FORWARD ACCEPT\n-A FORWARD -i weft -o weft -m comment --comment weft -j ACCEPT\n",
                None,
            ),
            ("-P FORWARD ACCEPT\n-N DOCKER-USER\n", None),
            ("", None),
        ];
        for (rules, wanted) in cases {
            assert_eq!(legacy_chain_for_rule(rules), wanted, "{rules}");
        }
    }

    #[test]
    fn the_chain_of_an_nft_table_is_found_and_odd_listings_are_none() {
        let chain = |name: &str, policy: &str| json!({ "chain": { "name": name, "hook": "forward", "policy": policy } });
        let user = json!({ "chain": { "name": CHAIN_USER } });
        let rule = json!({ "rule": { "chain": CHAIN_FORWARD, "expr": [] } });
        let cases = [
            (vec![], None),
            (vec![json!({ "chain": 7 }), json!(null), json!([])], None),
            (vec![json!({ "chain": { "name": CHAIN_FORWARD, "policy": "drop" } })], None),
            (vec![chain(CHAIN_FORWARD, "accept"), user.clone()], None),
            (vec![chain(CHAIN_FORWARD, "accept"), rule], Some(CHAIN_FORWARD)),
            (vec![chain(CHAIN_FORWARD, "drop"), user], Some(CHAIN_USER)),
        ];
        for (objects, wanted) in cases {
            assert_eq!(chain_for_rule(&Listing(objects.clone())), wanted, "{objects:?}");
        }
    }
}
