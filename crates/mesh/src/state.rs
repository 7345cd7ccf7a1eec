//! The durable state of a host, and the only changes that it goes through.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::{IpAddr, SocketAddr};

use serde::{Deserialize, Serialize};
use weft_crypto::PeerId;
use weft_packet::vxlan::Vni;

use crate::config::Config;
use crate::error::MeshError;
use crate::ledger::Ledger;
use crate::limits::{NETWORKS_MAX, STATE_VERSION};
use crate::network::NetworkDefinition;

/// State that must be on disk before the caller acts on the outputs that follow it.
///
/// Opaque: serialise it, store it in one atomic step, and hand it to [`crate::Mesh::new`] at the next start.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    version: u16,
    local: PeerId,
    /// Counts changes of owned ranges and given addresses.
    #[serde(default)]
    pub(crate) generation: u64,
    /// How often this host was started without a mesh.
    starts: u32,
    /// The addresses of `weft`.
    #[serde(flatten)]
    pub(crate) weft: Ledger,
    /// Addresses outside the range of `weft` that own containers have there.
    pub(crate) outside: BTreeMap<IpAddr, String>,
    /// Networks besides `weft` that this host holds, and those of which it has ranges still.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) networks: BTreeMap<Vni, SavedNetwork>,
    pub(crate) members: Vec<SavedMember>,
    /// Hosts that the user told this host to forget, the oldest first.
    #[serde(default)]
    pub(crate) forgotten: Vec<PeerId>,
}

/// A network that this host holds, or of which it has ranges still.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SavedNetwork {
    pub(crate) definition: NetworkDefinition,
    /// Created on this host: it stays without containers.
    pub(crate) created: bool,
    /// This host does not hold it and has ranges of it still.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) resting: bool,
    /// Its addresses; `None`: they are from the ranges of `weft`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) ledger: Option<Ledger>,
    /// Addresses outside its ranges that own containers have on it.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) outside: BTreeMap<IpAddr, String>,
}

impl SavedNetwork {
    pub(crate) fn new(definition: NetworkDefinition) -> Self {
        let ledger = definition.range.map(Ledger::new);
        let (created, resting) = (false, false);
        Self { definition, created, resting, ledger, outside: BTreeMap::new() }
    }

    fn check(&self, vni: Vni) -> Result<(), MeshError> {
        let definition = &self.definition;
        let same_range = self.ledger.as_ref().map(|ledger| ledger.range) == definition.range;
        if definition.vni != vni || definition.fault().is_some() || !same_range {
            return Err(MeshError::SavedDamaged("a network that cannot be"));
        }
        self.ledger.as_ref().map_or(Ok(()), Ledger::check)
    }
}

/// A member as it is remembered over a restart.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SavedMember {
    pub(crate) peer: PeerId,
    pub(crate) nickname: String,
    pub(crate) addresses: Vec<SocketAddr>,
    #[serde(default)]
    pub(crate) generation: u64,
}

impl State {
    pub(crate) fn new(config: &Config) -> Self {
        Self {
            version: STATE_VERSION,
            local: config.local,
            generation: 0,
            starts: 0,
            weft: Ledger::new(config.range),
            outside: BTreeMap::new(),
            networks: BTreeMap::new(),
            members: Vec::new(),
            forgotten: Vec::new(),
        }
    }

    /// Drops the networks with options that only a later release knows, which wrote the state.
    pub(crate) fn drop_unknown(&mut self) -> Vec<NetworkDefinition> {
        let unknown = |saved: &SavedNetwork| saved.definition.options.unknown().is_some();
        let all = std::mem::take(&mut self.networks);
        let (dropped, kept) = all.into_iter().partition(|(_, saved)| unknown(saved));
        self.networks = kept;
        let dropped: BTreeMap<Vni, SavedNetwork> = dropped;
        dropped.into_values().map(|saved| saved.definition).collect()
    }

    /// Counts changes of owned ranges and given addresses ([`crate::Mesh::generation`]).
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// A hash of the owned ranges and the given addresses: it differs whenever these do.
    pub(crate) fn mark(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.weft.mark(&mut hasher);
        self.outside.hash(&mut hasher);
        let bare = |network: &SavedNetwork| network.ledger.is_none() && network.outside.is_empty();
        for (vni, network) in self.networks.iter().filter(|(_, network)| !bare(network)) {
            (vni, &network.outside).hash(&mut hasher);
            network.ledger.iter().for_each(|ledger| ledger.mark(&mut hasher));
        }
        hasher.finish()
    }

    /// Whether this host may continue from a saved state.
    pub(crate) fn check(&self, config: &Config) -> Result<(), MeshError> {
        if self.version != STATE_VERSION {
            return Err(MeshError::SavedVersion(self.version));
        }
        if self.local != config.local {
            return Err(MeshError::SavedIdentity { saved: self.local, local: config.local });
        }
        let weft = &self.weft;
        let in_use = weft.network.is_some() || !weft.taken.is_empty();
        if weft.range != config.range && in_use {
            let (saved, configured) = (weft.range, config.range);
            return Err(MeshError::SavedRange { saved, configured });
        }
        if let (Some(network), Some(configured)) = (&weft.network, config.range6)
            && network.range6 != configured
        {
            return Err(MeshError::SavedRange6 { saved: network.range6, configured });
        }
        let names = self.networks.values().map(|saved| saved.definition.name.as_str());
        let distinct = names.collect::<BTreeSet<&str>>().len() == self.networks.len();
        if !distinct || self.networks.len() > NETWORKS_MAX {
            return Err(MeshError::SavedDamaged("too many networks, or two of one name"));
        }
        self.networks.iter().try_for_each(|(vni, saved)| saved.check(*vni))?;
        weft.check()
    }

    /// The network whose ranges a network's addresses are from; `None`: this host does not have the network.
    pub(crate) fn allocator(&self, vni: Vni) -> Option<Vni> {
        if vni == Vni::WEFT {
            return Some(vni);
        }
        self.networks.get(&vni).map(|saved| if saved.ledger.is_some() { vni } else { Vni::WEFT })
    }

    /// The addresses of a network that has its own ranges.
    pub(crate) fn ledger(&self, vni: Vni) -> Option<&Ledger> {
        if vni == Vni::WEFT {
            return Some(&self.weft);
        }
        self.networks.get(&vni)?.ledger.as_ref()
    }

    pub(crate) fn ledger_mut(&mut self, vni: Vni) -> Option<&mut Ledger> {
        if vni == Vni::WEFT {
            return Some(&mut self.weft);
        }
        self.networks.get_mut(&vni)?.ledger.as_mut()
    }

    /// The networks with ranges of their own.
    pub(crate) fn ledgers(&self) -> impl Iterator<Item = (Vni, &Ledger)> {
        let others = self.networks.iter();
        let others = others.filter_map(|(vni, saved)| Some((*vni, saved.ledger.as_ref()?)));
        [(Vni::WEFT, &self.weft)].into_iter().chain(others)
    }

    /// Addresses outside a network's ranges that own containers have on it.
    pub(crate) fn outside(&self, vni: Vni) -> Option<&BTreeMap<IpAddr, String>> {
        if vni == Vni::WEFT {
            return Some(&self.outside);
        }
        self.networks.get(&vni).map(|saved| &saved.outside)
    }

    pub(crate) fn outside_mut(&mut self, vni: Vni) -> Option<&mut BTreeMap<IpAddr, String>> {
        if vni == Vni::WEFT {
            return Some(&mut self.outside);
        }
        self.networks.get_mut(&vni).map(|saved| &mut saved.outside)
    }

    /// Counts one more start without a mesh.
    pub(crate) fn count_start(&mut self) -> u64 {
        self.starts = self.starts.saturating_add(1);
        self.starts.into()
    }
}
