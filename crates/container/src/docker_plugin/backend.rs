//! The rest of the daemon, as the plugin needs it.

use std::collections::BTreeMap;
use std::net::IpAddr;

use super::names::NetworkName;
use super::requests::{
    AddressRequest, BackendError, Link, LinkRequest, NetworkInfo, NetworkRequest,
};
use super::state::State;

/// The rest of the daemon.
///
/// A future may be dropped before it is ready. The plugin then calls the verb that takes back
/// ([`release`](Self::release), [`remove_link`](Self::remove_link),
/// [`close_network`](Self::close_network)), and the dropped call must have no effect after that.
/// None of them may ask Docker: Docker waits for the plugin.
pub trait Backend: Send + Sync + 'static {
    /// Waits until networks, addresses and links can be had. The plugin limits the wait.
    ///
    /// # Errors
    /// [`BackendError::NotReady`] if waiting is of no use.
    fn wait_ready(&self) -> impl Future<Output = Result<(), BackendError>> + Send;

    /// Looks a network up, or creates it.
    ///
    /// # Errors
    /// The network exists with other ranges, or cannot be created.
    fn open_network(
        &self,
        request: NetworkRequest,
    ) -> impl Future<Output = Result<NetworkInfo, BackendError>> + Send;

    /// Docker uses a network no longer on this host. Succeeds for one that is unknown.
    ///
    /// # Errors
    /// It is to be tried again.
    fn close_network(
        &self,
        network: NetworkName,
    ) -> impl Future<Output = Result<(), BackendError>> + Send;

    /// Allocates an address. An owner that has one gets the same again.
    ///
    /// # Errors
    /// The range is exhausted, or the address is taken or outside the network's ranges.
    fn allocate(
        &self,
        request: AddressRequest,
    ) -> impl Future<Output = Result<IpAddr, BackendError>> + Send;

    /// Returns an owner's address. Succeeds for an owner that is unknown.
    ///
    /// # Errors
    /// It is to be tried again.
    fn release(
        &self,
        allocator: NetworkName,
        owner: String,
    ) -> impl Future<Output = Result<(), BackendError>> + Send;

    /// Makes the pair of links of an endpoint, with its MTU on both ends, and makes the endpoint
    /// known to the other hosts. Succeeds if it stands already.
    ///
    /// # Errors
    /// The link cannot be made; nothing of it is left.
    fn prepare_link(
        &self,
        request: LinkRequest,
    ) -> impl Future<Output = Result<Link, BackendError>> + Send;

    /// Removes an endpoint's links, wherever the engine has moved them, and withdraws the endpoint
    /// from the other hosts. Succeeds for an endpoint that has none.
    ///
    /// # Errors
    /// It is to be tried again.
    fn remove_link(
        &self,
        endpoint: String,
    ) -> impl Future<Output = Result<(), BackendError>> + Send;

    /// Waits until the engine has set up an endpoint's link in its container. The plugin limits the wait: a container
    /// may end before, and its link may be made later or never.
    fn wait_set_up(&self, endpoint: String) -> impl Future<Output = ()> + Send;

    /// Facts about an endpoint's link for `docker network inspect`.
    ///
    /// # Errors
    /// There is no such link.
    fn link_facts(
        &self,
        endpoint: String,
    ) -> impl Future<Output = Result<BTreeMap<String, String>, BackendError>> + Send;

    /// Stores the state on disk, so that it outlives a kill at any time after this call.
    ///
    /// # Errors
    /// It is not stored.
    fn save(&self, state: State) -> impl Future<Output = Result<(), BackendError>> + Send;
}
