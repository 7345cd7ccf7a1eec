//! Clamps TCP's segment size where a peer's path is smaller than the containers' MTU.
//!
//! Containers would find the size by themselves (the VXLAN device answers packets that are too big), but some
//! hosts drop these answers. One nftables table lowers the announced segment size in both directions of the
//! handshake, by the remote endpoint's MAC. Its family is bridge where a bridge is the switch, and netdev at
//! the tunnel's device where a datapath is.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::nft::Table;
use crate::{
    error::KernelError,
    handle::Kernel,
    net::{
        link::check_name,
        neighbours::{MacAddress, mac_text},
    },
};

const AT_BRIDGE: Table = Table { family: "bridge", name: "weft-mss" };
const AT_DEVICE: Table = Table { family: "netdev", name: "weft-mss" };
/// Headers of a TCP segment without options, in bytes: IP and TCP (RFC 6691).
const HEADERS: [(&str, u16); 2] = [("ip", 40), ("ip6", 60)];
/// The smallest MTU to clamp to, in bytes: IPv4's minimum reassembly size (RFC 791). It is less than the MTU
/// of any path that carries frames.
const MTU_MIN: u16 = 576;

/// Clamps the segment size of TCP connections through the overlay ports.
pub struct MssClamp {
    kernel: Kernel,
    table: Table,
    ports: Vec<String>,
    wanted: Option<BTreeMap<MacAddress, u16>>,
}

impl MssClamp {
    /// For connections through these ports of bridges, which need not be there yet: names, or one pattern that ends
    /// in `*`. Nothing is changed.
    ///
    /// # Errors
    /// [`KernelError::InvalidName`].
    pub fn at_bridge(kernel: Kernel, ports: &[&str]) -> Result<Self, KernelError> {
        ports.iter().try_for_each(|port| check_name(port.trim_end_matches('*')))?;
        let ports = ports.iter().map(|port| (*port).to_owned()).collect();
        Ok(Self { kernel, table: AT_BRIDGE, ports, wanted: None })
    }

    /// For connections through this device, on any kind of switch. The device must exist whenever segment
    /// sizes are set, and the clamp is lost with it: see [`Self::forget`]. Nothing is changed.
    ///
    /// # Errors
    /// [`KernelError::InvalidName`].
    pub fn at_device(kernel: Kernel, device: &str) -> Result<Self, KernelError> {
        check_name(device)?;
        Ok(Self { kernel, table: AT_DEVICE, ports: vec![device.to_owned()], wanted: None })
    }

    /// Marks the clamp as possibly lost: the next [`Self::set`] writes it again.
    pub fn forget(&mut self) {
        self.wanted = None;
    }

    /// Makes `wanted` the whole list of remote endpoints (MAC address) whose path limits the IP packet size
    /// (MTU in bytes, at least 576). Leave out endpoints that accept the containers' full MTU. True if
    /// something was changed.
    ///
    /// # Errors
    /// [`KernelError::TableTaken`] if another program's table has the name,
    /// [`KernelError::NftRefused`] also where the kernel cannot do it,
    /// [`KernelError::NftMissing`], [`KernelError::Program`], [`KernelError::NotPermitted`].
    pub async fn set(&mut self, wanted: &[(MacAddress, u16)]) -> Result<bool, KernelError> {
        let wanted: BTreeMap<MacAddress, u16> =
            wanted.iter().map(|(mac, mtu)| (*mac, (*mtu).max(MTU_MIN))).collect();
        if self.wanted.as_ref() == Some(&wanted) {
            return Ok(false);
        }
        let kernel = self.kernel.clone();
        let _one = kernel.inner.filters.lock().await;
        let found = kernel.nft_list(self.table).await?;
        if found.as_ref().is_some_and(|listing| !listing.is_ours()) {
            return Err(self.table.taken());
        }
        let changed = match (found.is_some(), wanted.is_empty()) {
            (false, true) => false,
            (true, true) => kernel.nft_remove(self.table).await?,
            (_, false) => {
                let commands = self.table.replacement(&self.objects(&wanted));
                kernel.nft_apply(commands, "write the segment sizes").await?;
                true
            }
        };
        self.wanted = Some(wanted);
        Ok(changed)
    }

    /// Takes the table away. False if there was none.
    ///
    /// # Errors
    /// See [`Self::set`].
    pub async fn remove(&mut self) -> Result<bool, KernelError> {
        self.wanted = None;
        self.set(&[]).await
    }

    fn objects(&self, wanted: &BTreeMap<MacAddress, u16>) -> Vec<Value> {
        let mut by_mtu: BTreeMap<u16, Vec<String>> = BTreeMap::new();
        for (mac, mtu) in wanted {
            by_mtu.entry(*mtu).or_default().push(mac_text(mac));
        }
        let mut objects = vec![self.table.tag()];
        for (mtu, macs) in &by_mtu {
            let fields = json!({ "name": set_name(*mtu), "type": "ether_addr", "elem": macs });
            objects.push(self.table.part("set", fields));
        }
        let at_device = self.table == AT_DEVICE;
        let hooks = if at_device { ["ingress", "egress"] } else { ["prerouting", "postrouting"] };
        for (hook, port, side) in [(hooks[0], "iifname", "saddr"), (hooks[1], "oifname", "daddr")] {
            let mut fields = json!({
                "name": hook, "type": "filter", "hook": hook, "prio": 0, "policy": "accept",
            });
            if at_device {
                fields["dev"] = json!(self.ports.first());
            }
            objects.push(self.table.part("chain", fields));
            for mtu in by_mtu.keys() {
                let rules = HEADERS.map(|header| self.rule(hook, port, side, *mtu, header));
                objects.extend(rules);
            }
        }
        objects
    }

    fn rule(
        &self,
        hook: &str,
        port: &str,
        side: &str,
        mtu: u16,
        (protocol, headers): (&str, u16),
    ) -> Value {
        let matches = |op: &str, left: Value, right: Value| json!({ "match": { "op": op, "left": left, "right": right } });
        let field = |protocol: &str, field: &str| json!({ "payload": { "protocol": protocol, "field": field } });
        let handshake = json!({ "&": [field("tcp", "flags"), ["syn", "rst"]] });
        let size = || json!({ "tcp option": { "name": "maxseg", "field": "size" } });
        let mss = mtu.saturating_sub(headers);
        let expr = json!([
            matches("==", json!({ "meta": { "key": port } }), self.ports_value()),
            matches("==", field("ether", side), format!("@{}", set_name(mtu)).into()),
            matches("==", json!({ "meta": { "key": "protocol" } }), protocol.into()),
            matches("==", handshake, "syn".into()),
            matches(">", size(), mss.into()),
            json!({ "mangle": { "key": size(), "value": mss } }),
        ]);
        let comment = "weft: the way carries no more";
        self.table.part("rule", json!({ "chain": hook, "comment": comment, "expr": expr }))
    }

    fn ports_value(&self) -> Value {
        match self.ports.as_slice() {
            // A pattern is no member of a set.
            [one] => json!(one),
            ports => json!({ "set": ports }),
        }
    }
}

fn set_name(mtu: u16) -> String {
    format!("mtu{mtu}")
}
