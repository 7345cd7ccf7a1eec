//! Docker's network driver and IPAM driver (remote drivers, plugin protocol 1.2).
//!
//! [`router`] answers the engine's requests over the socket that the caller serves, and reaches the
//! rest of the daemon through [`Backend`]. [`State`] decides everything, without sockets: it holds
//! the promises made to Docker, and it is stored before each of them. [`Plugin`] carries its
//! decisions out, each within [`ANSWER_LIMIT_MS`].
//!
//! Docker never tells the name of a network, and it asks for addresses before it tells that a
//! network exists. So a network of Weft's is named twice: `-o network=NAME` for the network driver
//! and, where its addresses are to come from the network's own range, `--ipam-opt network=NAME` for the
//! IPAM driver. A `--subnet` stands for the second where no network has that range yet.

mod backend;
mod changes;
mod error;
mod http;
#[cfg(test)]
mod http_tests;
#[cfg(test)]
mod model;
mod names;
mod options;
mod plugin;
mod requests;
mod state;
mod wire;

pub use self::backend::Backend;
pub use self::error::PluginError;
pub use self::http::{BODY_BYTES_MAX, router, serve};
pub use self::names::{ENGINE_ID_BYTES_MAX, NETWORK_NAME_BYTES_MAX, NetworkName, NetworkNameError};
pub use self::options::OPTIONS_MAX;
pub use self::plugin::{
    ACTION_LIMIT_MS, ANSWER_LIMIT_MS, CALLS_MAX, FACTS_LIMIT_MS, Plugin, SETUP_LIMIT_MS,
    SETUPS_PER_PROCESSOR, UNDO_LIMIT_MS,
};
pub use self::requests::{
    AddressRequest, BackendError, Link, LinkRequest, NetworkInfo, NetworkRequest,
};
pub use self::state::{
    ADDRESS_SPACE, Action, CREATION_S, ENDPOINTS_MAX, LEASES_MAX, ListedNetwork, ListedPool,
    Listing, NETWORKS_MAX, Outcome, POOL_RETRY_S, POOLS_MAX, Pending, Reconciled, SUSPECT_S, State,
    Step, UNDO_MAX, Undo,
};
pub use self::wire::{
    Answer, Call, CreateEndpoint, CreateNetwork, EndpointRef, Interface, InterfaceName, IpamData,
    NetworkRef, ReleaseAddress, ReleasePool, RequestAddress, RequestPool, StaticRoute,
};
