//! Brings about on this host what a plan wants, and takes it back.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::path::Path;
use std::time::Duration;

use ipnet::IpNet;
use tokio::process::Command;
use tokio::time::timeout;
use weft_engine::dco::MTU_MAX;
use weft_kernel::{Kernel, NextHop, VpnRoute, VpnSpec};

use super::plan::{Dns, Plan, PlannedRoute, Way, fitting_mtu};
use super::report::Report;

/// The MTU of a path whose own is not known, in bytes.
const PATH_MTU_DEFAULT: u32 = 1_500;
/// Here while systemd-resolved runs.
const RESOLVED: &str = "/run/systemd/resolve/stub-resolv.conf";
/// How long resolvectl may take.
const RESOLVED_LIMIT: Duration = Duration::from_secs(5);

/// What was set up on this host for one device.
pub(super) struct HostSide {
    pub(super) kernel: Kernel,
    name: String,
    device: u32,
    report: Report,
    /// Routes that were added, and not those that were there before.
    made: BTreeSet<VpnRoute>,
    /// What DNS was set to.
    dns: Dns,
}

impl HostSide {
    pub(super) fn new(kernel: Kernel, name: &str, device: u32, report: Report) -> Self {
        let (made, dns) = (BTreeSet::new(), Dns::default());
        Self { kernel, name: name.to_owned(), device, report, made, dns }
    }

    /// Sets up what is wanted, and takes back what no longer is. Returns the MTU inside.
    ///
    /// # Errors
    /// The device's addresses cannot be set. Routes that cannot are told.
    pub(super) async fn apply(
        &mut self,
        plan: &Plan,
        remote: IpAddr,
        is_tcp: bool,
    ) -> anyhow::Result<u32> {
        let path = self.kernel.route_mtu(remote).await.map(|path| path.mtu);
        let path = path.unwrap_or(PATH_MTU_DEFAULT);
        let mtu = fitting_mtu(plan.mtu, path, remote, is_tcp).min(u32::from(MTU_MAX));
        let has_ipv6 = Path::new("/proc/sys/net/ipv6").exists();
        let is_usable = |net: &IpNet| has_ipv6 || net.addr().is_ipv4();
        if !plan.addresses.iter().all(is_usable) {
            self.report.warn("this kernel has no IPv6: the tunnel's IPv6 addresses are left out");
        }
        let addresses = plan.addresses.iter().copied().filter(is_usable).collect();
        let spec = VpnSpec { device: self.device, mtu, addresses };
        self.kernel.set_up_vpn(&spec).await?;
        let routes = plan.routes.iter().filter(|route| is_usable(&route.destination));
        self.set_routes(routes).await;
        self.set_dns(&plan.dns).await;
        Ok(mtu)
    }

    async fn set_routes(&mut self, routes: impl Iterator<Item = &PlannedRoute>) {
        let mut wanted = Vec::new();
        for route in routes {
            let destination = route.destination;
            let hop = match route.way {
                Way::Inside => NextHop { device: self.device, gateway: None },
                Way::Around => match self.around(destination.addr()).await {
                    Some(hop) => hop,
                    None => continue,
                },
            };
            wanted.push(VpnRoute { destination, hop, metric: route.metric });
        }
        let stale: Vec<VpnRoute> =
            self.made.iter().filter(|route| !wanted.contains(route)).copied().collect();
        for route in stale {
            self.remove(&route).await;
        }
        for route in wanted {
            self.add(route).await;
        }
    }

    /// Where packets to an address go without the tunnel; `None` is told.
    async fn around(&self, address: IpAddr) -> Option<NextHop> {
        match self.kernel.way_around(address, self.device).await {
            Ok(Some(hop)) => Some(hop),
            Ok(None) => {
                self.report.warn(&format!("no route to {address} outside of the tunnel"));
                None
            }
            Err(error) => {
                self.report.warn(&error.to_string());
                None
            }
        }
    }

    async fn add(&mut self, route: VpnRoute) {
        if self.made.contains(&route) {
            return;
        }
        match self.kernel.add_vpn_route(&route).await {
            Ok(true) => drop(self.made.insert(route)),
            Ok(false) => {
                let text =
                    format!("the host has a route {} already, which stays", route.destination);
                self.report.warn(&text);
            }
            Err(error) => self.report.warn(&error.to_string()),
        }
    }

    async fn remove(&mut self, route: &VpnRoute) {
        match self.kernel.remove_vpn_route(route).await {
            Ok(()) => drop(self.made.remove(route)),
            Err(error) => self.report.warn(&error.to_string()),
        }
    }

    /// Before a connection to a server: its packets must not go into the tunnel of before.
    pub(super) async fn keep_out(&mut self, server: IpAddr) {
        let destination = IpNet::from(server);
        let is_hidden = self
            .made
            .iter()
            .any(|route| route.hop.device == self.device && route.destination.contains(&server));
        let has_way = self
            .made
            .iter()
            .any(|route| route.hop.device != self.device && route.destination == destination);
        if is_hidden
            && !has_way
            && let Some(hop) = self.around(server).await
        {
            self.add(VpnRoute { destination, hop, metric: None }).await;
        }
    }

    async fn set_dns(&mut self, dns: &Dns) {
        if *dns == self.dns {
            return;
        }
        self.revert_dns().await;
        if dns.servers.is_empty() {
            return;
        }
        let servers: Vec<String> = dns.servers.iter().map(ToString::to_string).collect();
        let mut domains = dns.domains.clone();
        if dns.is_for_all || domains.is_empty() {
            domains.push("~.".to_owned());
        }
        let is_set = Path::new(RESOLVED).exists()
            && self.resolvectl("dns", &servers).await
            && self.resolvectl("domain", &domains).await;
        if is_set {
            self.dns = dns.clone();
        } else {
            let (servers, domains) = (servers.join(", "), dns.domains.join(", "));
            self.report.warn(&format!(
                "systemd-resolved does not run, so that DNS stays as it is: the server names {servers} for domains [{domains}]"
            ));
        }
    }

    async fn revert_dns(&mut self) {
        if !self.dns.servers.is_empty() {
            self.resolvectl("revert", &[]).await;
            self.dns = Dns::default();
        }
    }

    async fn resolvectl(&self, verb: &str, words: &[String]) -> bool {
        let mut command = Command::new("resolvectl");
        command.arg(verb).arg(&self.name).args(words).kill_on_drop(true);
        let ran = timeout(RESOLVED_LIMIT, command.output()).await;
        matches!(ran, Ok(Ok(output)) if output.status.success())
    }

    /// Takes all back but the device and what is on it.
    pub(super) async fn take_back(&mut self) {
        self.revert_dns().await;
        for route in self.made.clone() {
            self.remove(&route).await;
        }
    }
}
