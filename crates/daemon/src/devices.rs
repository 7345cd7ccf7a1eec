//! Names of the devices of networks, and the size of containers' packets.

use weft_kernel::NetworkDevices;
use weft_path::Vni;

/// The network that every host has.
pub(crate) const NETWORK: &str = "weft";
/// The device of that network's switch.
pub const SWITCH: &str = "weft";
/// The vector engine's port on it.
pub(crate) const TAP: &str = "weft-tap";
/// The name of the interface inside a container, before its number: 0 for the first network.
const CONTAINER_INTERFACE: &str = "weft";
/// The interface of the host itself on network `weft`, by `weft expose`.
pub(crate) const EXPOSED_INTERFACE: &str = "weft-host";
/// Prefix of such an interface on other networks; the VNI follows.
const EXPOSED_PREFIX: &str = "weft-hst-";
/// Prefix of the interface outside it.
pub(crate) const HOST_INTERFACE: &str = "weftv";
/// Prefix of an interface that Docker's engine has not moved into its container yet.
pub(crate) const HANDED_INTERFACE: &str = "weftc";

/// The bridge of a network.
pub(crate) fn bridge_of(vni: Vni) -> String {
    match vni {
        Vni::WEFT => SWITCH.to_owned(),
        vni => NetworkDevices::of(vni).bridge,
    }
}

/// The interface of the host itself on a network.
pub(crate) fn exposed_on(vni: Vni) -> String {
    match vni {
        Vni::WEFT => EXPOSED_INTERFACE.to_owned(),
        Vni(number) => format!("{EXPOSED_PREFIX}{number:06x}"),
    }
}

/// Whether this is the name of the host's own interface on a network.
pub(crate) fn is_exposed(interface: &str) -> bool {
    interface == EXPOSED_INTERFACE || interface.starts_with(EXPOSED_PREFIX)
}

/// The first name of an interface inside a container that is not taken.
pub(crate) fn container_interface(is_taken: impl Fn(&str) -> bool) -> String {
    let mut names = (0_u32..).map(|number| format!("{CONTAINER_INTERFACE}{number}"));
    names.find(|name| !is_taken(name)).unwrap_or_default()
}

/// Overhead in a datagram of one full segment: ESP in UDP without the outer IP and UDP headers.
const DATAGRAM_OVERHEAD_BYTES: usize = weft_packet::esp::packet_len(weft_packet::ethernet::LEN);

/// Segments of a container's super-packet that fill one GSO batch, so that the super-packet makes one full
/// batch.
pub(crate) fn run_segments(mtu: u16) -> u32 {
    let datagram = usize::from(mtu) + DATAGRAM_OVERHEAD_BYTES;
    let segments = weft_io::udp::RUN_BYTES_MAX / datagram;
    u32::try_from(segments.clamp(1, weft_io::udp::RUN_SEGMENTS_MAX)).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_super_packet_of_a_container_is_one_run() {
        assert_eq!(run_segments(1388), 45);
        assert!(usize::try_from(run_segments(8888)).is_ok_and(|n| n * 8952 <= 65_507));
    }
}
