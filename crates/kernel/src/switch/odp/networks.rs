//! The networks of a switch: they come and go with their ports.

use weft_packet::vxlan::VNI_MAX;
use weft_path::Vni;

use super::{
    state::Core,
    tables::{NETWORKS_MAX, PortKind},
};
use crate::error::KernelError;

impl Core {
    /// The network of this number, if the switch carries it.
    pub(super) fn network(&self, vni: u32) -> Result<Vni, KernelError> {
        let known = Some(Vni(vni)).filter(|network| self.tables.has_network(*network));
        known.ok_or(KernelError::NoNetwork { vni })
    }

    pub(super) async fn add_network(&mut self, vni: u32, tap: &str) -> Result<(), KernelError> {
        let network = Vni(vni);
        if vni == 0 || vni >= VNI_MAX {
            return Err(KernelError::NoNetwork { vni });
        }
        let kind = PortKind::Tap(network);
        if self.wanted.get(tap).is_some_and(|other| *other != kind) {
            return Err(self.port_taken(tap));
        }
        if !self.tables.has_network(network) && self.tables.networks_len() >= NETWORKS_MAX {
            return Err(KernelError::TableFull { table: "networks".into(), limit: NETWORKS_MAX });
        }
        self.tables.add_network(network);
        let of_it = |(name, of): &(&String, &PortKind)| **of == kind && *name != tap;
        let before = self.wanted.iter().find(of_it).map(|(name, _)| name.clone());
        if let Some(before) = before {
            self.take_out(&before).await?;
        }
        self.wanted.insert(tap.to_owned(), kind);
        // A TAP that was made again since the last notice is found here too.
        self.reconcile().await?;
        if self.tables.port_number(tap).is_none() {
            // Once more, for the reason.
            self.plug(tap).await?;
            self.missing.remove(tap);
            self.refresh().await;
        }
        Ok(())
    }

    pub(super) async fn remove_network(&mut self, vni: u32) -> Result<bool, KernelError> {
        let network = Vni(vni);
        if vni == self.spec.vni || !self.tables.has_network(network) {
            return Ok(false);
        }
        let wanted = self.wanted.iter().filter(|(_, kind)| kind.network() == Some(network));
        let wanted = wanted.map(|(name, _)| name.clone());
        let there = self.tables.ports_of(network).into_iter().map(|(_, name)| name);
        for name in wanted.chain(there).collect::<Vec<_>>() {
            self.take_out(&name).await?;
        }
        self.tables.remove_network(network);
        self.refresh().await;
        Ok(true)
    }

    /// Takes a port out of the datapath; it does not come back.
    async fn take_out(&mut self, name: &str) -> Result<(), KernelError> {
        if let Some(number) = self.tables.port_number(name) {
            self.unplug(number, name).await?;
        }
        self.wanted.remove(name);
        self.missing.remove(name);
        Ok(())
    }

    /// This switch has the port for another purpose.
    pub(super) fn port_taken(&self, name: &str) -> KernelError {
        KernelError::PortTaken { port: name.to_owned(), bridge: self.spec.name.clone() }
    }
}
