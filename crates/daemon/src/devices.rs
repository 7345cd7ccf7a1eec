//! The network of a host: its number, the names of its devices, and the size of its containers' packets.

use weft_path::Vni;

/// The network that containers are on: one per mesh today.
pub(crate) const VNI: Vni = Vni(1);
/// The name of that network.
pub(crate) const NETWORK: &str = "weft";
/// The switch's device.
pub const SWITCH: &str = "weft";
/// The vector engine's port on it.
pub(crate) const TAP: &str = "weft-tap";
/// The name of the interface inside a container.
pub(crate) const CONTAINER_INTERFACE: &str = "weft0";
/// The interface of the host itself, by `weft expose`.
pub(crate) const EXPOSED_INTERFACE: &str = "weft-host";
/// Prefix of the interface outside it.
pub(crate) const HOST_INTERFACE: &str = "weftv";
/// Prefix of an interface that Docker's engine has not moved into its container yet.
pub(crate) const HANDED_INTERFACE: &str = "weftc";

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
