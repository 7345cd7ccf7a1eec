//! Which way packets of clients go ([`Kernel::ensure_clients`]): between them, and between them and their network. The
//! host passes them nowhere else but to the networks that [`ClientWays`] names, and nothing else to them, though its
//! switches of forwarding are on for their device.

use ipnet::IpNet;

use super::{forward::ForwardRule, nft::Table, own_table::OwnTable};
use crate::{error::KernelError, handle::Kernel, net::link::check_name};

const TABLE: Table = Table { family: "inet", name: "weft-clients" };

/// Where clients may go beside their network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientWays {
    /// Clients reach each other.
    pub connects_clients: bool,
    /// Other networks that clients reach, and that reach them.
    pub networks: Vec<IpNet>,
}

impl Default for ClientWays {
    fn default() -> Self {
        Self { connects_clients: true, networks: Vec::new() }
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
        self.accept.set_clients(device, exposed, !ways.networks.is_empty())?;
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
    let ways = ways.networks.iter().flat_map(|network| {
        let family = if network.addr().is_ipv4() { "ip" } else { "ip6" };
        let network = network.trunc();
        [
            format!("iifname \"{device}\" oifname != \"{device}\" {family} daddr {network} accept"),
            format!("oifname \"{device}\" iifname != \"{device}\" {family} saddr {network} accept"),
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
    head.into_iter().chain(between).chain(ways).chain(tail).collect()
}
