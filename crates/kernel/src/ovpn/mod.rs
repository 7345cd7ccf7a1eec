//! The kernel's `ovpn` device (OpenVPN data channel offload, Linux 6.16), by generic netlink (reference
//! `openvpn`, sections 1.1 to 1.10).
//!
//! [`OvpnClient`] sends requests and [`OvpnWatch`] receives notices. Each has a separate socket, so that no
//! answer is taken for a notice. [`Kernel`](crate::Kernel) makes and lists devices. Requests and notices use
//! the types of [`weft_openvpn::device`], as for a device in userspace.
//!
//! A device is named by its interface index in the network namespace of the socket that sends the request.
//! Notices arrive in the namespace of the peer's own socket, which may be another.

mod client;
mod codec;
mod device;
mod error;
mod resync;
mod watch;

#[cfg(test)]
mod tests;

pub use self::{
    client::OvpnClient,
    device::{DATA_CHANNEL_DEVICE, OvpnDevice, OvpnDeviceSpec},
    error::{OvpnError, Refusal},
    resync::{KnownPeer, Missed},
    watch::{OvpnWatch, Watched},
};

use self::codec::FAMILY;
use crate::netlink::generic::{FamilyInfo, Requests};

/// Whether this kernel has data channel devices; asking makes it load the module, if it can.
///
/// # Errors
/// [`OvpnError::Missing`] with the reason where it has none; [`OvpnError::Socket`] and
/// [`OvpnError::TimedOut`] where it cannot be asked.
pub async fn support() -> Result<(), OvpnError> {
    look_up(&mut open()?).await.map(|_| ())
}

/// Opens a socket for requests in the calling thread's network namespace.
fn open() -> Result<Requests, OvpnError> {
    let doing = "open a generic netlink socket".to_owned();
    Requests::open().map_err(|source| OvpnError::Socket { doing, source })
}

async fn look_up(requests: &mut Requests) -> Result<FamilyInfo, OvpnError> {
    let found = requests.family(FAMILY).await;
    let found = found.map_err(|error| OvpnError::new(error, "look up the family ovpn".into()))?;
    found.ok_or(OvpnError::Missing)
}
