//! A NAT between one host and the others.

use weft_bench::sandbox::Netns;

use super::Stage;

const INSIDE: &str = "10.99.0.1";
const HOST: &str = "10.99.0.2";
/// The ports that it gives flows: none that a host has itself.
const PORTS: &str = "20000-40000";

/// A router that hides one host behind a separate address, with other UDP ports.
pub struct Nat {
    netns: Netns,
    address: String,
}

impl Nat {
    /// Puts a host behind a NAT with this address on the underlay; its daemon must not run yet.
    ///
    /// # Errors
    /// There is nothing between the hosts, or the kernel refused.
    pub fn before(stage: &Stage, index: usize, address: &str) -> anyhow::Result<Self> {
        let (middle, host) = (stage.middle()?, stage.host(index).netns());
        let netns = stage.sandbox().add_netns("nat")?;
        let port = format!("port{}", index + 1);
        middle.ip(&format!("link set {port} netns {}", netns.name()))?;
        netns.ip(&format!("link set {port} name inside"))?;
        netns.ip(&format!("addr add {INSIDE}/24 dev inside"))?;
        netns.ip("link set inside up")?;
        netns
            .ip(&format!("link add outside type veth peer name {port} netns {}", middle.name()))?;
        middle.ip(&format!("link set {port} master br0 up"))?;
        netns.ip("link set outside up")?;
        host.ip("addr flush dev eth0")?;
        host.ip(&format!("addr add {HOST}/24 dev eth0"))?;
        host.ip(&format!("route add default via {INSIDE}"))?;
        let script = format!(
            "echo 1 > /proc/sys/net/ipv4/ip_forward
             nft add table ip nat
             nft 'add chain ip nat out {{ type nat hook postrouting priority srcnat; }}'
             nft 'add rule ip nat out oifname outside meta l4proto udp masquerade to :{PORTS}'
             nft 'add rule ip nat out oifname outside masquerade'"
        );
        netns.exec(&["bash", "-ec", &script])?.success()?;
        netns.ip(&format!("addr add {address}/24 dev outside"))?;
        Ok(Self { netns, address: address.into() })
    }

    /// Gives it another address: every mapping is another then.
    ///
    /// # Errors
    /// The kernel refused.
    pub fn set_address(&mut self, address: &str) -> anyhow::Result<()> {
        self.netns.ip(&format!("addr del {}/24 dev outside", self.address))?;
        self.netns.ip(&format!("addr add {address}/24 dev outside"))?;
        self.address = address.into();
        Ok(())
    }
}
