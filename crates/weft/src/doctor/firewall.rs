//! Whether this host's own firewall blocks or changes Weft's traffic.

use weft_daemon::SWITCH;
use weft_kernel::{Carried, CarriedBridge, Kernel, KernelError, NetworkDevices, Obstacle};

use super::{Finding, State};

const NAME: &str = "firewall";

/// Reads the nftables rules; `ipsec`: the kernel can open packets of format `esp`.
pub(super) fn look(ipsec: bool) -> Vec<Finding> {
    match read(ipsec) {
        Ok(found) => findings(found),
        Err(error) => vec![Finding::new(NAME, State::Unknown, error)],
    }
}

fn read(ipsec: bool) -> Result<Vec<Obstacle>, String> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| error.to_string())?;
    let ranges = vec![ipnet::IpNet::V4(weft_daemon::config::DEFAULT_RANGE)];
    let weft = CarriedBridge { name: SWITCH.to_owned(), ranges };
    // Their ranges are known to the daemon alone.
    let other = |vni| CarriedBridge { name: NetworkDevices::of(vni).bridge, ranges: Vec::new() };
    let read = async {
        let kernel = Kernel::new()?;
        let others = kernel.network_bridges().await?.into_iter().map(other);
        let bridges = std::iter::once(weft).chain(others).collect();
        kernel.obstacles(&Carried { bridges, ipsec }).await
    };
    runtime.block_on(read).map_err(|error: KernelError| error.to_string())
}

fn findings(found: Vec<Obstacle>) -> Vec<Finding> {
    if found.is_empty() {
        let detail = "no nftables rule found that blocks Weft";
        return vec![Finding::new(NAME, State::Ok, detail)];
    }
    let finding = |Obstacle { chain, effect, remedy }| {
        Finding::new(NAME, State::Without, format!("{chain} {effect}")).advise(remedy)
    };
    found.into_iter().map(finding).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_rule_in_the_way_is_a_finding_with_its_remedy() {
        let obstacle = Obstacle {
            chain: "inet fw input".to_owned(),
            effect: "drops Weft's packets",
            remedy: "nft insert rule inet fw input udp dport 6783-6786 accept".to_owned(),
        };
        let found = findings(vec![obstacle.clone()]);
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].state, State::Without);
        assert_eq!(found[0].detail, "inet fw input drops Weft's packets");
        assert_eq!(found[0].advice, Some(obstacle.remedy));
        assert_eq!(findings(Vec::new())[0].state, State::Ok);
    }
}
