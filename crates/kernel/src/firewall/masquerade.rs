//! The way out of the network through this host: translation of containers' addresses, and its protection.
//!
//! Containers whose default route leads to this host's own interface get its address outside. In the other
//! direction this host passes on answers and ports that another program publishes, nothing else.
//!
//! With br_netfilter the packets between a container and this host's interface are seen twice: as frames of the bridge,
//! then as packets of the host. The first look would settle their translation, so it does not track them.

use ipnet::IpNet;
use serde_json::Value;
use weft_io::namespace;

use super::{
    forward::ForwardRule,
    nft::{TAG, Table},
    nft_watch::NftWatch,
};
use crate::{
    error::{KernelError, namespace_error},
    handle::Kernel,
    net::{
        ipv6::this_host,
        link::check_name,
        neighbours::{MacAddress, mac_text},
    },
};

const TABLE: Table = Table { family: "inet", name: "weft-masquerade" };
/// The priority of source translation, after other programs' filters (nft(8), "srcnat").
const PRIORITY: i32 = 100;
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

/// Keeps the translation of containers' addresses: the nftables table `inet weft-masquerade`, and accept rules
/// where iptables filters what this host passes on.
pub struct Masquerade {
    kernel: Kernel,
    interface: String,
    accept: ForwardRule,
    /// How `nft` shows the table as it was written, and for what.
    written: Option<(Translated, Vec<Value>)>,
}

/// The packets to translate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Translated {
    /// The networks whose addresses are translated; with none all rules are removed.
    pub networks: Vec<IpNet>,
    /// The Ethernet address of the host's interface.
    pub mac: MacAddress,
}

impl Masquerade {
    /// For the networks behind this interface of the host, which need not be there yet. Nothing is changed.
    ///
    /// # Errors
    /// [`KernelError::InvalidName`].
    pub fn new(kernel: Kernel, interface: &str) -> Result<Self, KernelError> {
        check_name(interface)?;
        let accept = ForwardRule::through(kernel.clone(), interface)?;
        Ok(Self { kernel, interface: interface.to_owned(), accept, written: None })
    }

    /// Translates the addresses of these networks, and of no others. True if something was changed.
    ///
    /// # Errors
    /// [`KernelError::TableTaken`] if another program's table has the name, [`KernelError::NftMissing`],
    /// [`KernelError::NftRefused`], [`KernelError::Program`], [`KernelError::NotPermitted`].
    pub async fn set(&mut self, wanted: &Translated) -> Result<bool, KernelError> {
        if wanted.networks.is_empty() {
            return self.remove().await;
        }
        let table = self.write(wanted).await?;
        Ok(self.accept.ensure().await? | table)
    }

    async fn write(&mut self, wanted: &Translated) -> Result<bool, KernelError> {
        let kernel = self.kernel.clone();
        let _one = kernel.inner.filters.lock().await;
        let found = kernel.nft_list(TABLE).await?;
        if found.as_ref().is_some_and(|found| !found.is_ours()) {
            return Err(TABLE.taken());
        }
        let is_whole = self.written.as_ref().is_some_and(|(of, shape)| {
            of == wanted && found.as_ref().is_some_and(|found| found.shape() == *shape)
        });
        if is_whole {
            return Ok(false);
        }
        self.written = None;
        kernel.nft_write(&self.text(wanted), "write the translation of addresses").await?;
        let shape = kernel.nft_list(TABLE).await?.map(|found| found.shape());
        self.written = shape.map(|shape| (wanted.clone(), shape));
        Ok(true)
    }

    /// Removes the translation and all its rules. False if there were none.
    ///
    /// # Errors
    /// See [`Self::set`]; another program's table stays.
    pub async fn remove(&mut self) -> Result<bool, KernelError> {
        self.written = None;
        let kernel = self.kernel.clone();
        let table = {
            let _one = kernel.inner.filters.lock().await;
            kernel.nft_remove(TABLE).await
        };
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

    fn text(&self, wanted: &Translated) -> String {
        let Table { family, name } = TABLE;
        let interface = &self.interface;
        let translated = wanted.networks.iter().map(|network| {
            let (ip, groups) = match network {
                IpNet::V4(_) => ("ip", "224.0.0.0/4"),
                IpNet::V6(_) => ("ip6", "ff00::/8"),
            };
            format!(
                "{ip} saddr {network} {ip} daddr != {network} {ip} daddr != {groups} oifname != \"{interface}\" masquerade"
            )
        });
        let mac = mac_text(&wanted.mac);
        let into = format!("iifname != \"{interface}\" oifname \"{interface}\"");
        let head = [
            format!("table {family} {name}"),
            format!("delete table {family} {name}"),
            format!("table {family} {name} {{"),
            format!("chain {TAG} {{ }}"),
            "counter refused { packets 0 bytes 0 }".into(),
            format!(
                "chain frames {{ type filter hook prerouting priority {PRIORITY_RAW}; policy accept;"
            ),
            format!("iifname != \"{interface}\" ether daddr {mac} notrack"),
            format!("ether saddr {mac} notrack; }}"),
            format!(
                "chain translate {{ type nat hook postrouting priority {PRIORITY}; policy accept;"
            ),
        ];
        let tail = [
            "}".into(),
            "chain forward { type filter hook forward priority 0; policy accept;".into(),
            format!("{into} ct state established,related accept"),
            format!("{into} ct status dnat accept comment \"a published port\""),
            format!("{into} counter name refused drop; }}; }}\n"),
        ];
        head.into_iter().chain(translated).chain(tail).collect::<Vec<_>>().join("\n")
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[tokio::test]
    async fn each_network_is_translated_but_not_within_itself() {
        let masquerade = Masquerade::new(Kernel::new().unwrap(), "weft-host").unwrap();
        let networks = ["10.32.0.0/12", "fd00:1::/64"].map(|net| net.parse().unwrap()).into();
        let text = masquerade.text(&Translated { networks, mac: [2, 0, 0, 0, 0, 7] });
        for (ip, network) in [("ip", "10.32.0.0/12"), ("ip6", "fd00:1::/64")] {
            let wanted = format!("{ip} saddr {network} {ip} daddr != {network}");
            assert!(text.contains(&wanted), "{text}");
        }
        assert_eq!(text.matches("\" masquerade").count(), 2, "{text}");
        assert!(Masquerade::new(Kernel::new().unwrap(), "a name").is_err());
    }
}
