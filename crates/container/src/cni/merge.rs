//! Builds the result of ADD out of the previous plugin's result and Weft's own attachment.

use std::path::Path;

use super::{
    daemon::Attached,
    result::{Address, CniResult, Dns, Interface, Route},
    version::Version,
};

/// The result in the form of `version`. Entries of the previous plugin come first and stay as they are,
/// so that their indexes remain valid. `dns` replaces the network's own settings.
pub(super) fn merge(
    version: Version,
    previous: Option<CniResult>,
    attached: &Attached,
    dns: Option<&Dns>,
    (namespace, interface): (&Path, &str),
) -> CniResult {
    let mut result = previous.unwrap_or_default();
    version.as_str().clone_into(&mut result.cni_version);
    let mtu = version.has_mtu().then_some(attached.mtu).filter(|mtu| *mtu > 0);
    // Runtimes look up the container's interface by its name, so the host's must not have the same.
    if let Some((name, mac)) = &attached.host_interface
        && name != interface
    {
        let mac = mac.to_string();
        result.interfaces.push(Interface { name: name.clone(), mac, mtu, ..Interface::default() });
    }
    let index = result.interfaces.len();
    result.interfaces.push(Interface {
        name: interface.to_owned(),
        mac: attached.mac.map(|mac| mac.to_string()).unwrap_or_default(),
        mtu,
        sandbox: namespace.display().to_string(),
        ..Interface::default()
    });
    for address in &attached.addresses {
        let is_ipv4 = address.addr().is_ipv4();
        let gateway = attached.gateways.iter().find(|gateway| gateway.is_ipv4() == is_ipv4);
        result.ips.push(Address {
            interface: Some(index),
            address: address.to_string(),
            gateway: gateway.map(ToString::to_string),
            ..Address::default()
        });
    }
    for ip in &mut result.ips {
        ip.version = version.states_family().then(|| family(&ip.address).to_owned());
    }
    for route in &attached.routes {
        let is_same = |other: &Route| other.dst == route.dst && other.gw == route.gw;
        if !result.routes.iter().any(is_same) {
            result.routes.push(route.clone());
        }
    }
    add_dns(&mut result.dns, dns.unwrap_or(&attached.dns));
    result
}

fn family(address: &str) -> &'static str {
    if address.contains(':') { "6" } else { "4" }
}

/// Adds settings that the previous plugin did not make.
fn add_dns(dns: &mut Dns, ours: &Dns) {
    let lists = [
        (&mut dns.nameservers, &ours.nameservers),
        (&mut dns.search, &ours.search),
        (&mut dns.options, &ours.options),
    ];
    for (list, added) in lists {
        for text in added {
            if !list.contains(text) {
                list.push(text.clone());
            }
        }
    }
    if dns.domain.is_empty() {
        dns.domain.clone_from(&ours.domain);
    }
}
