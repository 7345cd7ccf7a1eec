//! Networks for people: a table, a block for each, and a line after a change.

use std::fmt::Write as _;

use weft_api::{Network, NetworkHost};

use super::{WEFT, ipam_owners, named, table, with_age};

pub(crate) fn networks(networks: &[Network]) -> String {
    let mut table = table(&["NAME", "SUBNET", "VNI", "STATE", "CONTAINERS", "HOSTS", "NOTES"]);
    for network in networks {
        let hosts = network.hosts.len() + usize::from(network.here);
        table.add_row([
            network.name.clone(),
            or_dash(subnets(network)),
            network.vni.to_string(),
            network.state.clone(),
            network.containers.to_string(),
            hosts.to_string(),
            or_dash(notes(network)),
        ]);
    }
    let mut text = table.to_string();
    let clashes = networks.iter().flat_map(|network| &network.clashes);
    clashes.for_each(|clash| _ = write!(text, "\nclash: {clash}"));
    text
}

/// A block of lines for each network.
pub(crate) fn networks_in_full(networks: &[Network]) -> String {
    networks.iter().map(in_full).collect::<Vec<_>>().join("\n")
}

fn in_full(network: &Network) -> String {
    let mut text = String::new();
    let mut line = |label: &str, value: &str| _ = writeln!(text, "{label:>14}: {value}");
    line("Network", &network.name);
    line("State", &state(network));
    network.since.iter().for_each(|since| line("Since", &with_age(since)));
    line("VNI", &network.vni.to_string());
    let whose = if network.own_range { "its own" } else { "shared with network weft" };
    let subnets = subnets(network);
    line("Subnet", &if subnets.is_empty() { whose.into() } else { format!("{subnets}, {whose}") });
    line("MTU", &network.mtu.to_string());
    line("Options", &or_dash(options(network).join(", ")));
    line("This host", held(network));
    line("Containers", &network.containers.to_string());
    let hosts: Vec<String> = network.hosts.iter().map(host).collect();
    line("Other hosts", &or_dash(hosts.join(", ")));
    network.clashes.iter().for_each(|clash| line("Clash", clash));
    if let Some(ipam) = &network.ipam {
        if let Some(reason) = &ipam.reason {
            line("Addresses", reason);
        }
        let _ = writeln!(text, "{}", ipam_owners(ipam));
    }
    text
}

pub(crate) fn network_created(network: &Network) -> String {
    let subnets = match subnets(network) {
        subnets if subnets.is_empty() => String::new(),
        subnets => format!(", {subnets}"),
    };
    format!("network {}: VNI {}{subnets}, {}", network.name, network.vni, state(network))
}

/// A line for each; other hosts may still hold a network that this host let go of.
pub(crate) fn networks_removed(networks: &[Network]) -> String {
    let line = |network: &Network| {
        let hosts: Vec<&str> = network.hosts.iter().map(|host| host.nickname.as_str()).collect();
        let left = match hosts.is_empty() {
            true => String::new(),
            false => format!(" from this host; still on {}", hosts.join(", ")),
        };
        format!("network {} removed{left}\n", network.name)
    };
    networks.iter().map(line).collect()
}

/// Both ranges, or none.
fn subnets(network: &Network) -> String {
    let ranges: Vec<&str> =
        [&network.subnet, &network.subnet6].into_iter().flatten().map(String::as_str).collect();
    ranges.join(" ")
}

fn notes(network: &Network) -> String {
    let shared = (!network.own_range).then_some("shares the range of weft");
    let reason = network.reason.as_deref();
    options(network).into_iter().chain(shared).chain(reason).collect::<Vec<_>>().join("; ")
}

fn options(network: &Network) -> Vec<&'static str> {
    let options = [(network.internal, "internal"), (network.isolated, "isolated")];
    options.into_iter().filter_map(|(is_set, name)| is_set.then_some(name)).collect()
}

fn state(network: &Network) -> String {
    let reason = network.reason.as_ref().map(|reason| format!(": {reason}"));
    format!("{}{}", network.state, reason.unwrap_or_default())
}

fn held(network: &Network) -> &'static str {
    match (network.here, network.created) {
        (true, true) => "holds it until weft network rm",
        (true, false) if network.name == WEFT => "holds it always",
        (true, false) => "holds it for its containers",
        (false, _) => "does not hold it",
    }
}

fn host(host: &NetworkHost) -> String {
    named(Some(&host.peer), Some(&host.nickname))
}

fn or_dash(text: String) -> String {
    if text.is_empty() { "-".into() } else { text }
}

#[cfg(test)]
mod tests {
    use weft_api::{HostRange, Ipam};

    use super::*;

    const PEER: &str = "00112233445566778899aabbccddeeff";

    fn shop() -> Network {
        Network {
            name: "shop".into(),
            vni: 5,
            subnet: Some("10.130.0.0/16".into()),
            subnet6: Some("fd00:5::/64".into()),
            own_range: true,
            isolated: true,
            mtu: 1388,
            here: true,
            created: true,
            state: "waiting".into(),
            reason: Some("no host has answered".into()),
            containers: 7,
            hosts: vec![NetworkHost { peer: PEER.into(), nickname: "beta".into() }],
            clashes: vec!["network shop of gamma is not that of this host".into()],
            ..Network::default()
        }
    }

    #[test]
    fn the_list_has_a_row_for_each_network_and_clashes_below() {
        let shared = Network { name: "till".into(), state: "ready".into(), ..Network::default() };
        let text = networks(&[shop(), shared]);
        let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split("  ").collect()).collect();
        let words = |line: usize| -> Vec<&str> {
            lines[line].iter().map(|word| word.trim()).filter(|word| !word.is_empty()).collect()
        };
        assert_eq!(words(0), ["NAME", "SUBNET", "VNI", "STATE", "CONTAINERS", "HOSTS", "NOTES"]);
        let notes = "isolated; no host has answered";
        let subnets = "10.130.0.0/16 fd00:5::/64";
        assert_eq!(words(1), ["shop", subnets, "5", "waiting", "7", "2", notes]);
        assert_eq!(words(2), ["till", "-", "0", "ready", "0", "0", "shares the range of weft"]);
        assert_eq!(words(3), ["clash: network shop of gamma is not that of this host"]);
    }

    #[test]
    fn a_block_has_the_hosts_and_the_owners_of_the_ranges() {
        let owner = HostRange {
            peer: PEER.into(),
            nickname: "beta".into(),
            addresses: 65_536,
            percent: 100.0,
            used: None,
            reachable: false,
        };
        let ipam = Ipam {
            state: "ready".into(),
            reason: None,
            range: "10.130.0.0/16".into(),
            range6: None,
            hosts: vec![owner],
        };
        let text = networks_in_full(&[Network { ipam: Some(ipam), ..shop() }, shop()]);
        for part in [
            "Network: shop\n",
            "State: waiting: no host has answered\n",
            "VNI: 5\n",
            "Subnet: 10.130.0.0/16 fd00:5::/64, its own\n",
            "MTU: 1388\n",
            "Options: isolated\n",
            "This host: holds it until weft network rm\n",
            "Containers: 7\n",
            "Other hosts: 0011223344556677 (beta)\n",
            "Clash: network shop of gamma",
            "65536",
            "100.0 %",
            "not linked",
            "\n\n       Network: shop",
        ] {
            assert!(text.contains(part), "{part} is missing in {text}");
        }
    }

    #[test]
    fn a_change_is_told_in_one_line() {
        assert_eq!(
            network_created(&shop()),
            "network shop: VNI 5, 10.130.0.0/16 fd00:5::/64, waiting: no host has answered"
        );
        let alone = Network { name: "till".into(), ..Network::default() };
        assert_eq!(
            networks_removed(&[shop(), alone]),
            "network shop removed from this host; still on beta\nnetwork till removed\n"
        );
    }
}
