//! Limits on group frames (broadcast and multicast) from this host to peers of the kernel engine, on a
//! bridge. They limit frames by port, and keep some frames on this host. A datapath has the same limits
//! ([`super::odp`]).
//!
//! Two containers on different hosts that also reach each other outside Weft close a loop, in which each
//! broadcast circulates indefinitely. The vector engine recognizes copies of a frame. nftables does not, so
//! it counts broadcasts by port instead. A low limit covers frames to all, to the groups of neighbour
//! discovery and to those of local network control (224.0.0.0/24, ff00::/120 and the like). A high limit
//! covers all other multicast, of which a legitimate stream may have much. A port over its limit sends no
//! broadcasts to other hosts for a while, in which the loop ends.

use std::collections::BTreeSet;

use serde_json::Value;

use crate::{
    error::KernelError,
    firewall::nft::{Listing, TAG, Table},
    handle::Kernel,
    net::link::check_name,
};

const TABLE: Table = Table { family: "bridge", name: "weft-groups" };
/// Broadcasts of one port in a second that go to peers of the kernel engine...
pub const BROADCASTS_PER_S_MAX: u32 = 200;
/// ... and how many of them may come at once.
pub(crate) const BROADCASTS_AT_ONCE_MAX: u32 = 2_000;
/// Likewise for all group frames.
pub(crate) const GROUP_FRAMES_PER_S_MAX: u32 = 20_000;
pub(crate) const GROUP_FRAMES_AT_ONCE_MAX: u32 = 20_000;
/// How long a port with more sends none, in seconds.
pub(crate) const LOOP_PAUSE_S: u32 = 5;
/// How long it is kept in mind which port that was, in seconds.
pub(crate) const LOOP_KNOWN_S: u32 = 60;
/// The most ports, of all bridges, that the table distinguishes.
const PORTS_MAX: usize = 16 * crate::net::bridge::BRIDGE_PORTS_MAX;
/// Overlay ports of a bridge.
const OVERLAY_PORTS_OF_BRIDGE: usize = 2;

/// Counts of frames that did not go to peers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GroupCounts {
    /// Broadcasts dropped on ports over the limit, once for each overlay port of a bridge. On a datapath,
    /// those that arrived before the port paused.
    pub limited: u64,
    /// Ports over the limit in the last minute.
    pub ports: Vec<String>,
    /// The switch's IGMP and MLD reports. They stay here: each peer sends this host all multicast anyway, and
    /// drops frames from an address that no container has.
    pub reports: u64,
    /// Announcements of addresses that a bridge did not pass to peers because one sender, or all together,
    /// exceeded the limit.
    pub announcements: u64,
    /// The sender of the last of these.
    pub announcer: Option<[u8; 6]>,
}

/// The nftables table that limits them.
pub struct GroupLimit {
    kernel: Kernel,
    /// The overlay's ports of the bridge.
    ports: Vec<String>,
    counts: GroupCounts,
    /// How `nft` shows the table as it was written.
    written: Option<Vec<Value>>,
}

impl GroupLimit {
    /// Limits frames that leave by these ports of bridges, which need not exist yet: names, or one pattern that ends
    /// in `*`. Without ports there is nothing to limit. Nothing is changed.
    ///
    /// # Errors
    /// [`KernelError::InvalidName`].
    pub fn new(kernel: Kernel, ports: &[&str]) -> Result<Self, KernelError> {
        ports.iter().try_for_each(|port| check_name(port.trim_end_matches('*')))?;
        let ports = ports.iter().map(|port| (*port).to_owned()).collect();
        Ok(Self { kernel, ports, counts: GroupCounts::default(), written: None })
    }

    /// Creates or restores the table and returns its counts. Counts survive, except those of the moment
    /// before another program changed it.
    ///
    /// # Errors
    /// [`KernelError::TableTaken`] if another program's table has the name, [`KernelError::NftRefused`] also
    /// where
    /// the kernel cannot do it, [`KernelError::NftMissing`], [`KernelError::Program`],
    /// [`KernelError::NotPermitted`].
    pub async fn ensure(&mut self) -> Result<GroupCounts, KernelError> {
        if self.ports.is_empty() {
            return Ok(GroupCounts::default());
        }
        let kernel = self.kernel.clone();
        let _one = kernel.inner.filters.lock().await;
        let found = kernel.nft_list(TABLE).await?;
        if found.as_ref().is_some_and(|found| !found.is_ours()) {
            return Err(TABLE.taken());
        }
        match found.filter(|found| self.written.as_ref() == Some(&found.shape())) {
            Some(found) => self.counts = counts(&found),
            None => {
                let doing = "write the limits of broadcasts";
                kernel.nft_write(&self.text(), doing).await?;
                self.written = kernel.nft_list(TABLE).await?.map(|found| found.shape());
            }
        }
        Ok(self.counts.clone())
    }

    /// Removes the table. False if there was none.
    ///
    /// # Errors
    /// See [`Self::ensure`]; another program's table stays.
    pub async fn remove(&mut self) -> Result<bool, KernelError> {
        self.written = None;
        let kernel = self.kernel.clone();
        let _one = kernel.inner.filters.lock().await;
        kernel.nft_remove(TABLE).await
    }

    /// The whole table in nft's language: JSON has no word for sets that rules fill, in older versions.
    fn text(&self) -> String {
        let Table { family, name } = TABLE;
        let quoted: Vec<String> = self.ports.iter().map(|port| format!("\"{port}\"")).collect();
        let overlay = match quoted.as_slice() {
            // A pattern is no member of a set.
            [one] => format!("oifname {one}"),
            ports => format!("oifname {{ {} }}", ports.join(", ")),
        };
        let GroupCounts { limited, reports, .. } = self.counts;
        let set = |name: &str, key: &str, size: usize, seconds: u32| {
            format!(
                "set {name} {{ type {key}; size {size}; flags dynamic, timeout; timeout {seconds}s; }}"
            )
        };
        let counted =
            |name| set(name, "ifname . ifname", PORTS_MAX * OVERLAY_PORTS_OF_BRIDGE, LOOP_KNOWN_S);
        let drop = "counter name limited drop";
        // A bridge gives each of these ports a copy.
        let over = |set: &str, rate: u32, burst: u32| {
            format!(
                "update @{set} {{ iifname . oifname limit rate over {rate}/second burst {burst} packets }} \
                 add @looping {{ iifname }} update @known {{ iifname }} {drop}"
            )
        };
        [
            format!("table {family} {name}"),
            format!("delete table {family} {name}"),
            format!("table {family} {name} {{"),
            format!("chain {TAG} {{ }}"),
            format!("counter limited {{ packets {limited} bytes 0 }}"),
            format!("counter reports {{ packets {reports} bytes 0 }}"),
            counted("senders"),
            counted("streams"),
            set("looping", "ifname", PORTS_MAX, LOOP_PAUSE_S),
            set("known", "ifname", PORTS_MAX, LOOP_KNOWN_S),
            "chain broadcasts {".into(),
            over("senders", BROADCASTS_PER_S_MAX, BROADCASTS_AT_ONCE_MAX) + "; }",
            "chain forward { type filter hook forward priority 300; policy accept;".into(),
            format!("ether daddr & 01:00:00:00:00:00 == 01:00:00:00:00:00 {overlay} jump limits; }}"),
            "chain limits {".into(),
            format!("iifname @looping {drop}"),
            over("streams", GROUP_FRAMES_PER_S_MAX, GROUP_FRAMES_AT_ONCE_MAX),
            "ether daddr ff:ff:ff:ff:ff:ff jump broadcasts".into(),
            "ether daddr 33:33:ff:00:00:00-33:33:ff:ff:ff:ff jump broadcasts".into(),
            "ether daddr 33:33:00:00:00:00-33:33:00:00:00:ff jump broadcasts".into(),
            "ether daddr 01:00:5e:00:00:00-01:00:5e:00:00:ff jump broadcasts; }".into(),
            // Frames that the bridge itself originates, not its ports.
            "chain output { type filter hook output priority 300; policy accept;".into(),
            format!("{overlay} ip protocol igmp counter name reports drop"),
            format!(
                "{overlay} icmpv6 type {{ mld-listener-report, mld-listener-done, mld2-listener-report }} \
                 counter name reports drop; }}; }}\n"
            ),
        ]
        .join("\n")
    }
}

fn counts(found: &Listing) -> GroupCounts {
    let packets = |name: &str| {
        let counter = found.of("counter").find(|counter| counter["name"] == name);
        counter.and_then(|counter| counter["packets"].as_u64()).unwrap_or_default()
    };
    let known = found.of("set").find(|set| set["name"] == "known");
    let elements = known.and_then(|set| set["elem"].as_array()).into_iter().flatten();
    // `nft` shows an element with a timeout as an object.
    let name = |element: &Value| {
        let value = element.get("elem").map_or(element, |it| &it["val"]);
        value.as_str().map(str::to_owned)
    };
    let ports: BTreeSet<String> = elements.filter_map(name).collect();
    GroupCounts {
        limited: packets("limited"),
        ports: ports.into_iter().collect(),
        reports: packets("reports"),
        ..GroupCounts::default()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn ports_are_known_in_both_ways_that_nft_shows_them() {
        let timed = json!({ "elem": { "val": "weftv2", "timeout": 60, "expires": 58 } });
        let listing = Listing(vec![
            json!({ "counter": { "name": "limited", "packets": 7, "bytes": 1 } }),
            json!({ "counter": { "name": "reports", "packets": 3, "bytes": 1 } }),
            json!({ "set": { "name": "senders", "elem": ["weftv9"] } }),
            json!({ "set": { "name": "known", "elem": [timed, "weftv1"] } }),
        ]);
        let ports = vec!["weftv1".to_owned(), "weftv2".to_owned()];
        assert_eq!(
            counts(&listing),
            GroupCounts { limited: 7, ports, reports: 3, ..GroupCounts::default() }
        );
        assert_eq!(counts(&Listing::default()), GroupCounts::default());
    }
}
