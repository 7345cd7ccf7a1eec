//! The daemon as Docker's plugin sees it.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use ipnet::IpNet;
use weft_api::{ErrorKind, NetworkRemoveRequest};
use weft_container::docker_plugin::{
    AddressRequest, Backend, BackendError, Link, LinkRequest, NetworkInfo, NetworkName,
    NetworkRequest, State,
};
use weft_kernel::KernelError;
use weft_mesh::AddressError;
use weft_path::Vni;

use super::made::Made;
use super::part::{self, CLAIMS_MAX, Search, Step};
use crate::core::control::Request;
use crate::core::ranges::Ranges;
use crate::services::attach::endpoints::is_plugin_owner;
use crate::services::attach::saving::Saving;
use crate::services::attach::{AttachError, Attachments};
use crate::services::networks::{Networks, OnNetwork};
use crate::upkeep::store::{Store, StoreError};

/// The file of the promises made to Docker.
pub(super) const FILE: &str = "docker.json";

/// The interval between two questions whether addresses can be given, in milliseconds.
const READY_POLL_MS: u64 = 100;

pub(super) struct DaemonBackend {
    attachments: Arc<Attachments>,
    networks: Arc<Networks>,
    saving: Saving<State>,
    made: Made,
}

impl DaemonBackend {
    pub(super) fn new(
        attachments: Arc<Attachments>,
        networks: Arc<Networks>,
        store: &Store,
    ) -> Result<Self, StoreError> {
        let saving = Saving::new(store.clone(), FILE);
        Ok(Self { attachments, networks, saving, made: Made::load(store)? })
    }

    async fn ranges(&self, vni: Vni) -> Result<Ranges, BackendError> {
        self.attachments.ranges(vni).await.ok_or_else(stopping)
    }

    /// A network of Docker's, which this host holds.
    async fn network(&self, name: &NetworkName) -> Result<OnNetwork, BackendError> {
        let network = self.networks.join(Some(name.as_str())).await;
        network.map_err(|error| failed(&format!("use network {name}"), &error.error))
    }

    /// Creates a network for Docker, or uses the one that there is. While Docker asks for addresses alone, a new one
    /// is only described: a network never changes, and Docker says later whether it is internal.
    async fn open_other(&self, request: NetworkRequest) -> Result<NetworkInfo, BackendError> {
        let NetworkRequest { name, ranges, internal, .. } = request;
        let clash = |why: String| BackendError::Clash { network: name.clone(), why };
        let weft: Vec<IpNet> = self.ranges(Vni::WEFT).await?.all().collect();
        let mut made = self.made.lock().await;
        let known = self.networks.known(name.as_str()).await;
        let known = known.map_err(|error| clash(error.error))?;
        if known.is_none() && internal.is_none() {
            let planned = self.networks.planned(name.as_str(), &ranges, &weft).await;
            return planned
                .map(|own| info(name.clone(), own, &weft, false))
                .map_err(|error| clash(error.error));
        }
        if !known.is_some_and(|network| network.created) {
            let new = (&ranges[..], internal.unwrap_or_default());
            let create = async {
                let created = self.networks.create_as(name.as_str(), new, &weft).await;
                created.map_err(|error| clash(error.error))
            };
            made.create(&name, create, self.may_be_created(&name)).await?;
        }
        drop(made);
        let network = self.network(&name).await?;
        check_internal(&name, network.internal, internal)?;
        let vni = network.vni;
        let own: Vec<IpNet> = self.ranges(vni).await?.all().collect();
        if let Some(range) = ranges.iter().find(|range| !own.contains(range)) {
            let list: Vec<String> = own.iter().map(ToString::to_string).collect();
            return Err(clash(format!(
                "it has the ranges {}, and not {range}: create Docker's network with --ipam-opt network={name}",
                list.join(", ")
            )));
        }
        Ok(info(name, own, &weft, true))
    }

    /// Whether a network was created on this host, as far as can be told.
    async fn may_be_created(&self, name: &NetworkName) -> bool {
        match self.networks.known(name.as_str()).await {
            Ok(known) => known.is_some_and(|network| network.created),
            Err(_) => true,
        }
    }

    /// Claims an address of a part of the network's range.
    async fn allocate_within(&self, request: &AddressRequest) -> Result<IpAddr, BackendError> {
        let vni = self.network(&request.allocator).await?.vni;
        let held = self.attachments.allocations().await.into_iter();
        let own = held.filter(|held| held.vni == vni).map(|held| held.address).collect();
        let place = match request.shared {
            // Hosts keep the same one.
            true => 0,
            false => part::place_of(self.attachments.local(), request.range),
        };
        let mut search = Search::new(request.range, place, own);
        let (mut is_told, mut last) = (false, None);
        let failure = loop {
            match search.step() {
                Step::Claim(address) => match self.claim(request, address).await {
                    Err(BackendError::Taken { .. }) if !is_told => {
                        is_told = true;
                        search.leave_out(self.attachments.addresses_of_others().await);
                    }
                    Err(BackendError::Taken { .. }) => {}
                    Err(error @ BackendError::Failed { .. }) => last = Some(error),
                    other => return other,
                },
                Step::Exhausted => {
                    let (network, range) = (request.allocator.clone(), request.range);
                    break BackendError::Exhausted { network, range };
                }
                Step::GivenUp => break given_up(request),
            }
        };
        Err(last.unwrap_or(failure))
    }

    async fn claim(
        &self,
        request: &AddressRequest,
        address: IpAddr,
    ) -> Result<IpAddr, BackendError> {
        let net = IpNet::new(address, request.range.prefix_len());
        let net = net.map_err(|error| failed("allocate an address", &error))?;
        self.ask(request, Some(net)).await
    }

    async fn ask(
        &self,
        request: &AddressRequest,
        explicit: Option<IpNet>,
    ) -> Result<IpAddr, BackendError> {
        let vni = self.network(&request.allocator).await?.vni;
        let given = match self.attachments.addresses_for((&request.owner, vni), explicit).await {
            Ok(given) => given,
            // A gateway or another address that Docker on another host keeps from its containers too.
            Err(AttachError::Address(AddressError::Taken { address, container, .. }))
                if request.shared && is_plugin_owner(&container) =>
            {
                return Ok(address);
            }
            // No container ever has such an address, so that it needs no owner.
            Err(AttachError::Address(AddressError::NotMapped { address, .. }))
                if request.shared =>
            {
                return Ok(address);
            }
            Err(error) => return Err(refusal(error, request)),
        };
        let is_v6 = request.range.addr().is_ipv6();
        let found = given.iter().map(IpNet::addr).find(|address| address.is_ipv6() == is_v6);
        found.ok_or_else(|| failed("allocate an address", &"the network has none of this family"))
    }
}

impl Backend for DaemonBackend {
    async fn wait_ready(&self) -> Result<(), BackendError> {
        self.attachments.wait_restored().await;
        while self.ranges(Vni::WEFT).await?.waiting.is_some() {
            tokio::time::sleep(Duration::from_millis(READY_POLL_MS)).await;
        }
        Ok(())
    }

    async fn open_network(&self, request: NetworkRequest) -> Result<NetworkInfo, BackendError> {
        let name = request.name.clone();
        let clash = |why: String| BackendError::Clash { network: name.clone(), why };
        if request.external {
            return Err(clash(
                "Weft gives its addresses: leave out -o weft.ipam=external".to_owned(),
            ));
        }
        if !name.is_ready() {
            return self.open_other(request).await;
        }
        check_internal(&name, false, request.internal)?;
        let ranges = request.ranges;
        let own: Vec<IpNet> = self.ranges(Vni::WEFT).await?.all().collect();
        if let Some(range) = ranges.iter().find(|range| !own.contains(range)) {
            let own: Vec<String> = own.iter().map(ToString::to_string).collect();
            return Err(clash(format!("it has the ranges {}, and not {range}", own.join(", "))));
        }
        Ok(info(name, own, &[], true))
    }

    async fn close_network(&self, name: NetworkName) -> Result<(), BackendError> {
        let mut made = self.made.lock().await;
        if !made.contains(&name) {
            return Ok(());
        }
        // Containers of others may be on it: then it stays until a user removes it.
        match self.networks.remove(NetworkRemoveRequest { name: name.as_str().to_owned() }).await {
            Ok(_) => {}
            Err(error) if error.kind == ErrorKind::Unavailable => {
                return Err(failed("remove a network", &error.error));
            }
            Err(error) => tracing::info!(network = %name, error = error.error, "network kept"),
        }
        made.remove(&name).await
    }

    async fn allocate(&self, request: AddressRequest) -> Result<IpAddr, BackendError> {
        match request.address {
            Some(address) => self.claim(&request, address).await,
            None => {
                let vni = self.network(&request.allocator).await?.vni;
                let is_whole = self.ranges(vni).await?.all().any(|range| range == request.range);
                match is_whole {
                    true => self.ask(&request, None).await,
                    false => self.allocate_within(&request).await,
                }
            }
        }
    }

    async fn release(&self, _: NetworkName, owner: String) -> Result<(), BackendError> {
        self.attachments.tell(Request::Release { owner }).await;
        Ok(())
    }

    async fn prepare_link(&self, request: LinkRequest) -> Result<Link, BackendError> {
        let network = self.network(&request.network).await?;
        let ranges = self.ranges(network.vni).await?.all().collect();
        let what = "make the interface of a container";
        let made = self.attachments.prepare_endpoint(network, request).await;
        let (interface, _) = made.map_err(|error| failed(what, &error))?;
        Ok(Link { interface, ranges })
    }

    async fn remove_link(&self, endpoint: String) -> Result<(), BackendError> {
        match self.attachments.remove_endpoint(&endpoint).await {
            // It is another program's.
            Ok(()) | Err(AttachError::Kernel(KernelError::NameTaken { .. })) => Ok(()),
            Err(error) => Err(failed("remove the interface of a container", &error)),
        }
    }

    async fn wait_set_up(&self, endpoint: String) {
        self.attachments.wait_endpoint_up(&endpoint).await;
    }

    async fn link_facts(&self, endpoint: String) -> Result<BTreeMap<String, String>, BackendError> {
        let facts = self.attachments.endpoint_facts(&endpoint);
        facts.ok_or_else(|| failed("read an interface", &"the endpoint has none"))
    }

    async fn save(&self, state: State) -> Result<(), BackendError> {
        let saved = self.saving.save(state).await;
        saved.map_err(|error| failed("save the record of Docker's networks", &error.error))
    }
}

/// A network with these ranges; with those of `weft` it shares that network's addresses.
fn info(name: NetworkName, ranges: Vec<IpNet>, weft: &[IpNet], exists: bool) -> NetworkInfo {
    let shares = ranges.iter().all(|range| weft.contains(range));
    let allocator = if shares { NetworkName::ready() } else { name };
    NetworkInfo { allocator, ranges, gateways: Vec::new(), exists }
}

/// Refuses a network of Docker's that has a way out where Weft's has none, and the other way round: Docker would give
/// its containers one, or a host of Weft's could.
fn check_internal(name: &NetworkName, own: bool, asked: Option<bool>) -> Result<(), BackendError> {
    let why = match (own, asked) {
        (true, Some(false)) => "it is internal, and Docker's would have a way out: add --internal",
        (false, Some(true)) => {
            "it is not internal, so its hosts may let containers out: leave out --internal, or give the name of a new network (-o network=NAME --ipam-opt network=NAME)"
        }
        _ => return Ok(()),
    };
    Err(BackendError::Clash { network: name.clone(), why: why.to_owned() })
}

fn refusal(error: AttachError, request: &AddressRequest) -> BackendError {
    match error {
        AttachError::Address(AddressError::NoSpace { .. }) => {
            let (network, range) = (request.allocator.clone(), request.range);
            BackendError::Exhausted { network, range }
        }
        AttachError::Address(AddressError::Taken { address, container, host }) => {
            BackendError::Taken { address, by: format!("{container} on {host}") }
        }
        AttachError::Address(AddressError::NotReady { why }) => BackendError::NotReady { why },
        error => failed("allocate an address", &error),
    }
}

/// The refusal where other hosts had every address that was claimed.
fn given_up(request: &AddressRequest) -> BackendError {
    let AddressRequest { allocator, range, .. } = request;
    BackendError::Failed {
        what: format!("allocate an address in {range} of network {allocator}"),
        why: format!(
            "other hosts have the {CLAIMS_MAX} that were tried: give a free one by --ip, or create the network with another --ip-range"
        ),
    }
}

fn failed(what: &str, why: &dyn std::fmt::Display) -> BackendError {
    BackendError::Failed { what: what.to_owned(), why: why.to_string() }
}

fn stopping() -> BackendError {
    BackendError::NotReady { why: "it is stopping".to_owned() }
}
