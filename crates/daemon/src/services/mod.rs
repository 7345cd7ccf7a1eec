//! Services beside the core: each reads the state that the core publishes and sends it requests.

pub(crate) mod attach;
pub(crate) mod cni;
pub(crate) mod docker;
pub(crate) mod gateway;
pub(crate) mod names;
pub(crate) mod networks;
pub(crate) mod resolved;
pub(crate) mod supervisor;
