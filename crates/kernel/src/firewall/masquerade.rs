//! The way out of networks through this host: translation of containers' addresses, and its protection.
//!
//! Containers whose default route leads to this host's own interface on their network get its address outside. In the
//! other direction this host passes on answers and ports that another program publishes, nothing else. It passes
//! nothing from one network to another, and nothing at all into or out of a network that has no way out.
//!
//! With br_netfilter the packets between a container and an interface of this host are seen twice: as frames of the
//! bridge, then as packets of the host. The first look would settle their translation, by this table or by a program
//! that publishes ports. So it does not track them, on any network that this host is exposed to.

use ipnet::IpNet;
use weft_io::namespace;

use super::{forward::ForwardRule, nft::Table, nft_watch::NftWatch, own_table::OwnTable};
use crate::{
    error::{KernelError, namespace_error},
    handle::Kernel,
    net::{
        devices::CLIENTS_DEVICE,
        ipv6::this_host,
        link::check_name,
        neighbours::{MacAddress, mac_text},
    },
};

const TABLE: Table = Table { family: "inet", name: "weft-masquerade" };
/// Matches the host's own interfaces on all networks, in nftables.
pub(super) const EXPOSED_PATTERN: &str = "weft-h*";
/// The priority of source translation, after other programs' filters (nft(8), "srcnat").
pub(super) const PRIORITY: i32 = 100;
/// The priority of a decision not to track a packet (nft(8), "raw").
const PRIORITY_RAW: i32 = -300;
/// The switches of forwarding, IPv4 and IPv6.
const SWITCHES: [&str; 2] =
    ["/proc/sys/net/ipv4/ip_forward", "/proc/sys/net/ipv6/conf/all/forwarding"];

/// Whether a host passes packets on that are not its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Forwarding {
    /// `net.ipv4.ip_forward` is on.
    pub ipv4: bool,
    /// `net.ipv6.conf.all.forwarding` is on.
    pub ipv6: bool,
}

impl Kernel {
    /// Whether this host passes packets on.
    ///
    /// # Errors
    /// The kernel does not let this process into the host's namespace.
    pub fn forwarding(&self) -> Result<Forwarding, KernelError> {
        let is_on = |path| std::fs::read_to_string(path).is_ok_and(|text| text.trim() != "0");
        let [ipv4, ipv6] = namespace::run_in(&self.inner.home, || SWITCHES.map(is_on))
            .map_err(|source| namespace_error(this_host(), source))?;
        Ok(Forwarding { ipv4, ipv6 })
    }
}

/// Keeps the rules of the way out: the nftables table `inet weft-masquerade`, and, where this host translates
/// addresses, accept rules where iptables filters what it passes on.
pub struct Masquerade {
    kernel: Kernel,
    accept: ForwardRule,
    table: OwnTable,
}

/// An interface of the host on a network, which need not be there yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExposedInterface {
    /// Its name.
    pub name: String,
    /// Its Ethernet address.
    pub mac: MacAddress,
    /// The ranges whose addresses are translated where packets leave the network through it; none: it lets nothing out.
    pub translated: Vec<IpNet>,
    /// Its network has no way out: nothing passes through it, whatever the host's own routes say.
    pub internal: bool,
}

impl Masquerade {
    /// Begins without any. Nothing is changed.
    #[must_use]
    pub fn new(kernel: Kernel) -> Self {
        let accept = ForwardRule::through(kernel.clone());
        let table = OwnTable::new(kernel.clone(), TABLE, "write the rules of the way out");
        Self { kernel, accept, table }
    }

    /// Makes the rules fit these interfaces, and no others; with none all rules are removed. True if something was
    /// changed.
    ///
    /// # Errors
    /// [`KernelError::InvalidName`], [`KernelError::TableTaken`] if another program's table has the name, [`KernelError::NftMissing`],
    /// [`KernelError::NftRefused`], [`KernelError::Program`], [`KernelError::NotPermitted`].
    pub async fn set(&mut self, wanted: &[ExposedInterface]) -> Result<bool, KernelError> {
        if wanted.is_empty() {
            return self.remove().await;
        }
        wanted.iter().try_for_each(|it| check_name(&it.name))?;
        let open: Vec<String> = translating(wanted).map(|it| it.name.clone()).collect();
        self.accept.set_through(&open)?;
        let table = self.table.set(chains(wanted)).await?;
        let accept = match open.is_empty() {
            true => self.accept.remove().await?,
            false => self.accept.ensure().await?,
        };
        Ok(accept | table)
    }

    /// Removes the translation and all its rules. False if there were none.
    ///
    /// # Errors
    /// See [`Self::set`]; another program's table stays.
    pub async fn remove(&mut self) -> Result<bool, KernelError> {
        let table = self.table.remove().await;
        Ok(self.accept.remove().await? | table?)
    }

    /// Watches the tables that the rules are in.
    ///
    /// # Errors
    /// [`KernelError::Socket`] if the kernel gives no socket.
    pub fn watch(&self) -> Result<NftWatch, KernelError> {
        let tables = self.accept.tables().chain([TABLE]).collect();
        self.kernel.nft_watch(tables, None)
    }
}

/// The interfaces that let containers out.
fn translating(wanted: &[ExposedInterface]) -> impl Iterator<Item = &ExposedInterface> {
    wanted.iter().filter(|it| !it.translated.is_empty())
}

/// The table's chains in nft's language.
fn chains(wanted: &[ExposedInterface]) -> Vec<String> {
    let chain = |name: &str, kind: &str, hook: &str, priority: i32| {
        format!("chain {name} {{ type {kind} hook {hook} priority {priority}; policy accept;")
    };
    let mut lines = vec![chain("frames", "filter", "prerouting", PRIORITY_RAW)];
    lines.extend(wanted.iter().flat_map(untracked));
    lines.push("}".into());
    if translating(wanted).next().is_some() {
        lines.push(chain("translate", "nat", "postrouting", PRIORITY));
        lines.extend(translating(wanted).flat_map(translations));
        lines.push("}".into());
    }
    let internal = || wanted.iter().filter(|it| it.internal);
    if translating(wanted).chain(internal()).next().is_some() {
        lines.push("counter refused { packets 0 bytes 0 }".into());
        lines.push(chain("forward", "filter", "forward", 0));
        lines.extend(internal().flat_map(closures));
        lines.extend(translating(wanted).flat_map(refusals));
        lines.push("}".into());
    }
    lines
}

fn untracked(ExposedInterface { name, mac, .. }: &ExposedInterface) -> Vec<String> {
    let mac = mac_text(mac);
    vec![
        format!("iifname != \"{name}\" ether daddr {mac} notrack"),
        format!("ether saddr {mac} notrack"),
    ]
}

/// Only what came by the interface: two networks may have the same addresses.
fn translations(ExposedInterface { name, translated, .. }: &ExposedInterface) -> Vec<String> {
    let rule = |range: &IpNet| {
        let (ip, groups) = match range {
            IpNet::V4(_) => ("ip", "224.0.0.0/4"),
            IpNet::V6(_) => ("ip6", "ff00::/8"),
        };
        format!(
            "iifname \"{name}\" {ip} saddr {range} {ip} daddr != {range} {ip} daddr != {groups} oifname != \"{name}\" masquerade"
        )
    };
    translated.iter().map(rule).collect()
}

/// Nothing passes to another network of Weft. From elsewhere come answers, published ports, and clients' packets, which
/// [`super::clients`] keeps to their own network.
fn refusals(ExposedInterface { name, .. }: &ExposedInterface) -> Vec<String> {
    let into = format!("iifname != \"{name}\" oifname \"{name}\"");
    vec![
        format!(
            "iifname \"{name}\" oifname \"{EXPOSED_PATTERN}\" oifname != \"{name}\" counter name refused drop"
        ),
        format!("{into} ct state established,related accept"),
        format!("{into} iifname \"{CLIENTS_DEVICE}\" accept comment \"clients of OpenVPN\""),
        format!("{into} ct status dnat accept comment \"a published port\""),
        format!("{into} counter name refused drop"),
    ]
}

/// Nothing passes through the interface of a network that has no way out.
fn closures(ExposedInterface { name, .. }: &ExposedInterface) -> Vec<String> {
    ["iifname", "oifname"].map(|way| format!("{way} \"{name}\" counter name refused drop")).into()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn interface(name: &str, translated: &[&str]) -> ExposedInterface {
        let translated = translated.iter().map(|net| net.parse().unwrap()).collect();
        let (name, mac) = (name.to_owned(), [2, 0, 0, 0, 0, 7]);
        ExposedInterface { name, mac, translated, internal: false }
    }

    fn text(wanted: &[ExposedInterface]) -> String {
        chains(wanted).join("\n")
    }

    #[test]
    fn nothing_passes_through_a_network_without_a_way_out() {
        let shut = ExposedInterface { internal: true, ..interface("weft-hst-2a1d94", &[]) };
        let text = text(&[interface("weft-host", &["10.32.0.0/12"]), shut.clone()]);
        let forward = text.split("chain forward").nth(1).unwrap();
        let rules: Vec<&str> = forward.lines().skip(1).take(2).collect();
        let closed = ["iifname", "oifname"]
            .map(|way| format!("{way} \"weft-hst-2a1d94\" counter name refused drop"));
        assert_eq!(rules, closed, "before all others");
        let alone = chains(&[shut]).join("\n");
        assert!(alone.contains("counter refused {") && !alone.contains("nat hook"), "{alone}");
    }

    #[test]
    fn each_network_is_translated_but_not_within_itself() {
        let text = text(&[
            interface("weft-host", &["10.32.0.0/12", "fd00:1::/64"]),
            interface("other", &["10.9.0.0/16"]),
        ]);
        for (name, ip, range) in [
            ("weft-host", "ip", "10.32.0.0/12"),
            ("weft-host", "ip6", "fd00:1::/64"),
            ("other", "ip", "10.9.0.0/16"),
        ] {
            let wanted = format!("iifname \"{name}\" {ip} saddr {range} {ip} daddr != {range}");
            assert!(text.contains(&wanted), "{text}");
        }
        assert_eq!(text.matches("\" masquerade").count(), 3, "{text}");
    }

    #[tokio::test]
    async fn a_host_that_translates_nothing_has_its_frames_untracked_alone() {
        let text = text(&[interface("weft-host", &[]), interface("weft-hst-000010", &[])]);
        assert_eq!(text.matches("notrack").count(), 4, "{text}");
        assert!(!text.contains("nat hook") && !text.contains("forward"), "{text}");
        let wrong = interface("a name", &[]);
        assert!(Masquerade::new(Kernel::new().unwrap()).set(&[wrong]).await.is_err());
    }
}
