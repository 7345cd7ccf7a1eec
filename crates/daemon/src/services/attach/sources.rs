//! The addresses from which a container's frames may bypass the switch by a direct port or shortcut. All other frames
//! take the switch, whose rules judge their senders.

use std::net::IpAddr;

use weft_io::redirect::MacSet;
use weft_kernel::AttachSpec;
use weft_path::Mac;

/// Makes them the addresses that a container has now: its own, and the link-local one of its Ethernet address.
pub(super) fn allow(macs: &MacSet, spec: &AttachSpec) {
    let mut addresses: Vec<IpAddr> = spec.addresses.iter().map(|net| net.addr()).collect();
    addresses.push(Mac(spec.mac).link_local().into());
    match macs.set_sources(spec.mac, &addresses) {
        Ok(true) => {}
        Ok(false) => tracing::warn!(
            container = spec.id,
            "no room for its addresses past the switch; its frames take the switch"
        ),
        Err(error) => tracing::warn!(
            %error, container = spec.id,
            "cannot update its addresses past the switch; its frames may take the switch"
        ),
    }
}

/// Of a container with this Ethernet address all frames take the switch.
pub(super) fn forbid(macs: &MacSet, mac: Mac) {
    if let Err(error) = macs.set_sources(mac.0, &[]) {
        tracing::warn!(%error, %mac, "cannot remove a container's addresses past the switch");
    }
}
