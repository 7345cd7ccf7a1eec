//! The daemon as Docker's plugin sees it.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use ipnet::IpNet;
use weft_container::docker_plugin::{
    AddressRequest, Backend, BackendError, Link, LinkRequest, NetworkInfo, NetworkName,
    NetworkRequest, State,
};
use weft_kernel::KernelError;
use weft_mesh::AddressError;

use crate::core::control::Request;
use crate::core::ranges::Ranges;
use crate::services::attach::endpoints::is_plugin_owner;
use crate::services::attach::saving::Saving;
use crate::services::attach::{AttachError, Attachments};

/// The interval between two questions whether addresses can be given, in milliseconds.
const READY_POLL_MS: u64 = 100;
/// Addresses of a part of a range (`--ip-range`) that are claimed in turn before it counts as full.
const CLAIMS_MAX: usize = 64;

pub(super) struct DaemonBackend {
    attachments: Arc<Attachments>,
    saving: Saving<State>,
}

impl DaemonBackend {
    pub(super) const fn new(attachments: Arc<Attachments>, saving: Saving<State>) -> Self {
        Self { attachments, saving }
    }

    async fn ranges(&self) -> Result<Ranges, BackendError> {
        self.attachments.ranges().await.ok_or_else(stopping)
    }

    /// Claims an address of a part of the network's range.
    async fn allocate_within(&self, request: &AddressRequest) -> Result<IpAddr, BackendError> {
        let held = self.attachments.allocations().await.into_iter();
        let taken: BTreeSet<IpAddr> = held.map(|held| held.address).collect();
        let free = request.range.hosts().filter(|address| !taken.contains(address));
        let mut last = None;
        for address in free.take(CLAIMS_MAX) {
            match self.claim(request, address).await {
                Err(BackendError::Taken { .. }) => {}
                Err(error @ BackendError::Failed { .. }) => last = Some(error),
                other => return other,
            }
        }
        let (network, range) = (request.allocator.clone(), request.range);
        Err(last.unwrap_or(BackendError::Exhausted { network, range }))
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
        let given = match self.attachments.addresses_for(&request.owner, explicit).await {
            Ok(given) => given,
            // A gateway or another address that Docker on another host keeps from its containers too.
            Err(AttachError::Address(AddressError::Taken { address, container, .. }))
                if request.shared && is_plugin_owner(&container) =>
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
        while self.ranges().await?.waiting.is_some() {
            tokio::time::sleep(Duration::from_millis(READY_POLL_MS)).await;
        }
        Ok(())
    }

    async fn open_network(&self, request: NetworkRequest) -> Result<NetworkInfo, BackendError> {
        let NetworkRequest { name, ranges, external, .. } = request;
        let clash = |why: String| BackendError::Clash { network: name.clone(), why };
        if !name.is_ready() {
            return Err(clash("this version of Weft has the network weft only".to_owned()));
        }
        if external {
            return Err(clash(
                "Weft gives its addresses: leave out -o weft.ipam=external".to_owned(),
            ));
        }
        let own: Vec<IpNet> = self.ranges().await?.all().collect();
        if let Some(range) = ranges.iter().find(|range| !own.contains(range)) {
            let own: Vec<String> = own.iter().map(ToString::to_string).collect();
            return Err(clash(format!("it has the ranges {}, and not {range}", own.join(", "))));
        }
        Ok(NetworkInfo { allocator: name, ranges: own, gateways: Vec::new() })
    }

    async fn close_network(&self, _: NetworkName) -> Result<(), BackendError> {
        // The network weft is there by itself.
        Ok(())
    }

    async fn allocate(&self, request: AddressRequest) -> Result<IpAddr, BackendError> {
        match request.address {
            Some(address) => self.claim(&request, address).await,
            None if self.ranges().await?.all().any(|range| range == request.range) => {
                self.ask(&request, None).await
            }
            None => self.allocate_within(&request).await,
        }
    }

    async fn release(&self, _: NetworkName, owner: String) -> Result<(), BackendError> {
        self.attachments.tell(Request::Release { owner }).await;
        Ok(())
    }

    async fn prepare_link(&self, request: LinkRequest) -> Result<Link, BackendError> {
        let ranges = self.ranges().await?.all().collect();
        let what = "make the interface of a container";
        let made = self.attachments.prepare_endpoint(request).await;
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

    async fn link_facts(&self, endpoint: String) -> Result<BTreeMap<String, String>, BackendError> {
        let facts = self.attachments.endpoint_facts(&endpoint).await;
        facts.ok_or_else(|| failed("read an interface", &"the endpoint has none"))
    }

    async fn save(&self, state: State) -> Result<(), BackendError> {
        let saved = self.saving.save(state).await;
        saved.map_err(|error| failed("save the record of Docker's networks", &error.error))
    }
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

fn failed(what: &str, why: &dyn std::fmt::Display) -> BackendError {
    BackendError::Failed { what: what.to_owned(), why: why.to_string() }
}

fn stopping() -> BackendError {
    BackendError::NotReady { why: "it is stopping".to_owned() }
}
