//! Names of the devices of each network.

use weft_path::Vni;

use super::vxlan::{VXLAN, VXLAN6};

/// Matches the overlay ports of all networks in nftables.
pub(crate) const OVERLAY_PORTS: &str = "weft-vx*";
/// The port of network `weft` that takes announcements of addresses.
const ANNOUNCEMENTS: &str = "weft-announce";
/// The routed device of OpenVPN clients.
pub const CLIENTS_DEVICE: &str = "weft-vpn";
const BRIDGE_PREFIX: &str = "weft-br-";
const TAP_PREFIX: &str = "weft-tap-";
const ANNOUNCEMENTS_PREFIX: &str = "weft-ann-";

/// The devices of one network, by name. Those of network `weft` have fixed names; those of others end in the VNI in
/// hexadecimal digits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NetworkDevices {
    /// The bridge.
    pub bridge: String,
    /// The vector engine's port on it.
    pub tap: String,
    /// The kernel engine's ports on it: for IPv4 and for IPv6 outside.
    pub overlay: [String; 2],
    /// The port that takes announcements of addresses.
    pub announcements: String,
}

impl NetworkDevices {
    /// Those of network `weft`, whose bridge and TAP device have these names.
    #[must_use]
    pub fn of_weft(bridge: &str, tap: &str) -> Self {
        Self {
            bridge: bridge.to_owned(),
            tap: tap.to_owned(),
            overlay: overlay_ports(Vni::WEFT),
            announcements: ANNOUNCEMENTS.to_owned(),
        }
    }

    /// Those of a network besides `weft`.
    #[must_use]
    pub fn of(vni: Vni) -> Self {
        let named = |prefix: &str| format!("{prefix}{:06x}", vni.0);
        Self {
            bridge: named(BRIDGE_PREFIX),
            tap: named(TAP_PREFIX),
            overlay: overlay_ports(vni),
            announcements: named(ANNOUNCEMENTS_PREFIX),
        }
    }

    /// The network besides `weft` whose bridge or TAP device has this name.
    #[must_use]
    pub fn network_of(device: &str) -> Option<Vni> {
        let digits = device.strip_prefix(BRIDGE_PREFIX).or(device.strip_prefix(TAP_PREFIX))?;
        let vni = Vni(u32::from_str_radix(digits, 16).ok()?);
        let devices = Self::of(vni);
        (devices.bridge == device || devices.tap == device).then_some(vni)
    }
}

/// The overlay ports of a network's bridge.
pub(crate) fn overlay_ports(vni: Vni) -> [String; 2] {
    match vni {
        Vni::WEFT => [VXLAN.to_owned(), VXLAN6.to_owned()],
        Vni(number) => [4, 6].map(|family| format!("weft-vx{family}-{number:06x}")),
    }
}

/// Whether a TAP or TUN device of this name is in its place: the vector engine's port of a further network, a port that
/// takes announcements, or the clients' device.
pub(crate) fn is_known_tap(name: &str) -> bool {
    [ANNOUNCEMENTS, CLIENTS_DEVICE].contains(&name)
        || name.starts_with(TAP_PREFIX)
        || name.starts_with(ANNOUNCEMENTS_PREFIX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_device_has_a_name_of_its_own_that_the_kernel_takes() {
        let weft = NetworkDevices::of_weft("weft", "weft-tap");
        let prefix = OVERLAY_PORTS.trim_end_matches('*');
        let mut names = Vec::new();
        for devices in
            [weft, NetworkDevices::of(Vni(0x00_000a)), NetworkDevices::of(Vni(0xff_fffe))]
        {
            for port in &devices.overlay {
                assert!(port.starts_with(prefix), "{port}");
            }
            let NetworkDevices { bridge, tap, overlay, announcements } = devices;
            let others = [bridge, tap, announcements];
            for name in &others {
                assert!(!name.starts_with(prefix), "{name}");
            }
            names.extend(others.into_iter().chain(overlay));
        }
        assert!(names.iter().all(|name| name.len() <= 15), "{names:?}");
        let all: std::collections::BTreeSet<&String> = names.iter().collect();
        assert_eq!(all.len(), names.len(), "{names:?}");
    }

    #[test]
    fn a_network_is_known_by_its_devices() {
        let devices = NetworkDevices::of(Vni(0xa_bcde));
        assert_eq!(NetworkDevices::network_of(&devices.bridge), Some(Vni(0xa_bcde)));
        assert_eq!(NetworkDevices::network_of(&devices.tap), Some(Vni(0xa_bcde)));
        for other in ["weft", "weft-tap", "weft-br-", "weft-br-xyz", "weft-br-0ABCDE", "weft-br-a"]
        {
            assert_eq!(NetworkDevices::network_of(other), None, "{other}");
        }
    }
}
