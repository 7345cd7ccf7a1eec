//! A daemon for tests: networks, addresses, links and the stored state, in memory.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use ipnet::IpNet;

use super::backend::Backend;
use super::names::NetworkName;
use super::options;
use super::requests::{
    AddressRequest, BackendError, Link, LinkRequest, NetworkInfo, NetworkRequest,
};
use super::state::{Action, Listing, Outcome, State, Undo};

pub(super) const READY_V4: &str = "10.32.0.0/12";
pub(super) const READY_V6: &str = "fd57::/64";

/// An address that is held.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Held {
    pub(super) address: IpAddr,
    pub(super) shared: bool,
}

#[derive(Clone, Debug)]
pub(super) struct World {
    pub(super) networks: BTreeMap<NetworkName, NetworkInfo>,
    pub(super) held: BTreeMap<(NetworkName, String), Held>,
    pub(super) links: BTreeMap<String, LinkRequest>,
    /// The state on the disk, as JSON.
    pub(super) disk: String,
    /// The networks that were opened, as they were asked for.
    pub(super) opened: Vec<NetworkRequest>,
    pub(super) disk_is_full: bool,
    /// How long a write takes.
    pub(super) disk_delay: Duration,
    /// The writes that still succeed before the disk is full.
    pub(super) writes_left: Option<u32>,
    /// Why every verb fails.
    pub(super) broken: Option<BackendError>,
    /// Why no link can be removed.
    pub(super) stuck: Option<BackendError>,
    pub(super) is_ready: bool,
    /// The engine has set up all links that it was given.
    pub(super) is_set_up: bool,
    /// How long each verb takes.
    pub(super) delay: Duration,
}

impl World {
    pub(super) fn new() -> Self {
        let ranges = vec![net(READY_V4), net(READY_V6)];
        let weft = NetworkInfo {
            allocator: NetworkName::ready(),
            gateways: ranges.iter().copied().map(options::first_host).collect(),
            ranges,
            exists: true,
        };
        Self {
            networks: [(NetworkName::ready(), weft)].into(),
            held: BTreeMap::new(),
            links: BTreeMap::new(),
            disk: serde_json::to_string(&State::new(7)).unwrap(),
            opened: Vec::new(),
            disk_is_full: false,
            disk_delay: Duration::ZERO,
            writes_left: None,
            broken: None,
            stuck: None,
            is_ready: true,
            is_set_up: true,
            delay: Duration::ZERO,
        }
    }

    /// Nothing but the ready network.
    pub(super) fn is_clean(&self) -> bool {
        self.held.is_empty() && self.links.is_empty() && self.networks.len() == 1
    }

    pub(super) fn load(&self) -> State {
        serde_json::from_str(&self.disk).unwrap()
    }

    pub(super) fn save(&mut self, state: &State) -> Result<(), BackendError> {
        if let Some(left) = &mut self.writes_left {
            self.disk_is_full |= *left == 0;
            *left = left.saturating_sub(1);
        }
        if self.disk_is_full {
            let (what, why) = ("write docker.json".to_owned(), "no space left".to_owned());
            return Err(BackendError::Failed { what, why });
        }
        self.disk = serde_json::to_string(state).unwrap();
        Ok(())
    }

    /// The daemon's half of a listing.
    pub(super) fn listing(&self) -> Listing {
        Listing {
            networks: None,
            links: self.links.keys().cloned().collect(),
            owners: self.held.keys().cloned().collect(),
        }
    }

    pub(super) fn act(&mut self, action: Action) -> Result<Outcome, BackendError> {
        if let Some(error) = &self.broken {
            return Err(error.clone());
        }
        Ok(match action {
            Action::OpenNetwork(request) => Outcome::Network(self.open(request)?),
            Action::Allocate(request) => Outcome::Address(self.allocate(request)?),
            Action::PrepareLink(request) => {
                let short: String = request.endpoint.chars().take(8).collect();
                let interface = format!("vwd{short}");
                let ranges = self.networks.get(&request.network).unwrap().ranges.clone();
                self.links.insert(request.endpoint.clone(), request);
                Outcome::Link(Link { interface, ranges })
            }
            Action::LinkFacts { endpoint } => {
                let (what, why) = ("read the link".to_owned(), "there is none".to_owned());
                let link = self.links.get(&endpoint);
                let link = link.ok_or(BackendError::Failed { what, why })?;
                Outcome::Facts([("mac".to_owned(), link.mac.to_string())].into())
            }
        })
    }

    pub(super) fn undo(&mut self, undo: Undo) -> Result<(), BackendError> {
        if let Some(error) = &self.broken {
            return Err(error.clone());
        }
        if let (Undo::RemoveLink { .. }, Some(error)) = (&undo, &self.stuck) {
            return Err(error.clone());
        }
        match undo {
            Undo::RemoveLink { endpoint } => drop(self.links.remove(&endpoint)),
            Undo::Release { allocator, owner } => drop(self.held.remove(&(allocator, owner))),
            Undo::CloseNetwork { network } => drop(self.networks.remove(&network)),
        }
        Ok(())
    }

    fn open(&mut self, request: NetworkRequest) -> Result<NetworkInfo, BackendError> {
        self.opened.push(request.clone());
        let NetworkRequest { name, ranges, internal, .. } = request;
        let ready = self.networks.get(&NetworkName::ready()).unwrap().clone();
        let new = match ranges.iter().all(|range| ready.ranges.contains(range)) {
            true => ready,
            false => NetworkInfo {
                allocator: name.clone(),
                gateways: ranges.iter().copied().map(options::first_host).collect(),
                ranges: ranges.clone(),
                exists: true,
            },
        };
        let info = match internal {
            Some(_) => self.networks.entry(name.clone()).or_insert(new).clone(),
            None => {
                let planned = NetworkInfo { exists: false, gateways: Vec::new(), ..new };
                self.networks.get(&name).cloned().unwrap_or(planned)
            }
        };
        match ranges.iter().find(|range| !info.ranges.contains(range)) {
            Some(range) => {
                let why = format!("it has not the range {range}");
                Err(BackendError::Clash { network: name, why })
            }
            None => Ok(info),
        }
    }

    fn allocate(&mut self, request: AddressRequest) -> Result<IpAddr, BackendError> {
        let AddressRequest { allocator, range, address, owner, shared } = request;
        let gateways = self.networks.get(&allocator).map(|info| info.gateways.clone());
        let gateways = gateways.unwrap_or_default();
        if let Some(held) = self.held.get(&(allocator.clone(), owner.clone())) {
            return Ok(held.address);
        }
        let taken = |address: IpAddr| {
            let of = self.held.iter().filter(|((of, _), _)| *of == allocator);
            let mut same = of.filter(|(_, held)| held.address == address);
            gateways.contains(&address) || same.any(|(_, held)| !(held.shared && shared))
        };
        let address = match address {
            Some(address) if taken(address) => {
                return Err(BackendError::Taken { address, by: "another".to_owned() });
            }
            Some(address) => address,
            None => {
                let mut hosts = range.hosts().filter(|address| options::is_host(*address, range));
                let free = hosts.find(|address| !taken(*address));
                let network = allocator.clone();
                free.ok_or(BackendError::Exhausted { network, range })?
            }
        };
        self.held.insert((allocator, owner), Held { address, shared });
        Ok(address)
    }
}

/// The world, shared between a test and its plugin.
#[derive(Clone, Debug)]
pub(super) struct Daemon(Arc<Mutex<World>>);

impl Daemon {
    pub(super) fn new() -> Self {
        Self(Arc::new(Mutex::new(World::new())))
    }

    pub(super) fn world(&self) -> MutexGuard<'_, World> {
        self.0.lock().unwrap()
    }

    async fn take_time(&self) {
        let delay = self.world().delay;
        tokio::time::sleep(delay).await;
    }

    async fn act(&self, action: Action) -> Result<Outcome, BackendError> {
        self.take_time().await;
        self.world().act(action)
    }

    async fn undo(&self, undo: Undo) -> Result<(), BackendError> {
        self.take_time().await;
        self.world().undo(undo)
    }
}

impl Backend for Daemon {
    async fn wait_ready(&self) -> Result<(), BackendError> {
        while !self.world().is_ready {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        Ok(())
    }

    async fn open_network(&self, request: NetworkRequest) -> Result<NetworkInfo, BackendError> {
        let Outcome::Network(info) = self.act(Action::OpenNetwork(request)).await? else {
            unreachable!()
        };
        Ok(info)
    }

    async fn close_network(&self, network: NetworkName) -> Result<(), BackendError> {
        self.undo(Undo::CloseNetwork { network }).await
    }

    async fn allocate(&self, request: AddressRequest) -> Result<IpAddr, BackendError> {
        let Outcome::Address(address) = self.act(Action::Allocate(request)).await? else {
            unreachable!()
        };
        Ok(address)
    }

    async fn release(&self, allocator: NetworkName, owner: String) -> Result<(), BackendError> {
        self.undo(Undo::Release { allocator, owner }).await
    }

    async fn prepare_link(&self, request: LinkRequest) -> Result<Link, BackendError> {
        let Outcome::Link(link) = self.act(Action::PrepareLink(request)).await? else {
            unreachable!()
        };
        Ok(link)
    }

    async fn remove_link(&self, endpoint: String) -> Result<(), BackendError> {
        self.undo(Undo::RemoveLink { endpoint }).await
    }

    async fn wait_set_up(&self, _: String) {
        while !self.world().is_set_up {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    async fn link_facts(&self, endpoint: String) -> Result<BTreeMap<String, String>, BackendError> {
        let Outcome::Facts(facts) = self.act(Action::LinkFacts { endpoint }).await? else {
            unreachable!()
        };
        Ok(facts)
    }

    async fn save(&self, state: State) -> Result<(), BackendError> {
        let delay = self.world().disk_delay;
        tokio::time::sleep(delay).await;
        self.world().save(&state)
    }
}

pub(super) fn net(text: &str) -> IpNet {
    text.parse().unwrap()
}
