//! What pushed options mean on this host: addresses, routes, MTU, signs of life, DNS. It sees no socket and no clock.

use std::net::{IpAddr, Ipv4Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use serde::Serialize;
use weft_openvpn::config::{ClientProfile, PullFilter};
use weft_openvpn::data::OVERHEAD_BYTES;
use weft_openvpn::device::{KEEPALIVE_MAX_S, Keepalive};
use weft_openvpn::messages::{PushOption, PushUpdateOption, RouteHost, Topology};

/// Seconds without anything received until a new connection, unless somebody says otherwise: OpenVPN's for a client
/// that pulls.
const PING_RESTART_DEFAULT_S: u32 = 120;
/// The tunnel's MTU unless somebody says otherwise, in bytes: OpenVPN's.
const TUN_MTU_DEFAULT: u32 = 1_500;
/// The smallest MTU of IPv6, in bytes (RFC 8200, section 5).
const TUN_MTU_MIN: u32 = 1_280;
/// Most routes that are set.
const PLANNED_ROUTES_MAX: usize = 4_096;
/// Most servers and domains of DNS that are set.
const DNS_ITEMS_MAX: usize = 64;
/// Together all IPv4 addresses, each half more specific than a default route.
const ALL_IPV4: [&str; 2] = ["0.0.0.0/1", "128.0.0.0/1"];
/// The same for the IPv6 addresses that are in use, as OpenVPN has them.
const ALL_IPV6: [&str; 4] = ["::/3", "2000::/4", "3000::/4", "fc00::/7"];

/// Where a route leads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Way {
    /// Into the tunnel.
    Inside,
    /// Past it, by the gateway that the host has without the tunnel.
    Around,
}

/// A route that is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct PlannedRoute {
    pub(super) destination: IpNet,
    pub(super) way: Way,
    pub(super) metric: Option<u32>,
}

/// DNS servers of the tunnel, and what they are asked for.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct Dns {
    pub(super) servers: Vec<IpAddr>,
    /// The servers know these domains; they are searched, too.
    pub(super) domains: Vec<String>,
    /// All names are asked of them.
    pub(super) is_for_all: bool,
}

/// What is wanted on this host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Plan {
    pub(super) addresses: Vec<IpNet>,
    /// Without duplicates.
    pub(super) routes: Vec<PlannedRoute>,
    /// The largest MTU that is wanted, in bytes.
    pub(super) mtu: u32,
    pub(super) keepalive: Keepalive,
    /// A server that falls silent ends the client rather than making it connect again.
    pub(super) ends_on_silence: bool,
    pub(super) dns: Dns,
    /// What is left out, and why.
    pub(super) notes: Vec<String>,
}

/// Options that cannot be obeyed, so that the connection ends.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum PlanError {
    /// Configuration: the profile refuses the option.
    #[error(
        "the server pushes {0:?}, which a pull-filter of the profile rejects: talk to its administrator"
    )]
    Rejected(String),
    /// Server: an address that none can have.
    #[error(
        "the server pushes {0:?}, which is no address with a mask: its administrator must correct it"
    )]
    BadAddress(String),
    /// Server: packets that this client cannot read.
    #[error(
        "the server compresses packets ({0}), which Weft never does: remove compression at the server"
    )]
    Compression(String),
    /// Server: an option of a PUSH_UPDATE that only a new connection takes over.
    #[error("the server changes {0}, which needs a new connection")]
    NeedsNewConnection(String),
}

impl Plan {
    /// The meaning of pushed options with what the profile says itself. `remote` is the server's address.
    ///
    /// # Errors
    /// [`PlanError`]
    pub(super) fn new(
        profile: &ClientProfile,
        pushed: &[String],
        remote: IpAddr,
    ) -> Result<Self, PlanError> {
        let mut draft = Draft::default();
        for option in &profile.options {
            draft.take(option);
        }
        for text in pushed {
            match judge(&profile.pull_filters, text) {
                Judgement::Taken => {}
                Judgement::Ignored => continue,
                Judgement::Rejected => return Err(PlanError::Rejected(text.clone())),
            }
            match PushOption::parse(text) {
                Ok(option) if profile.ignores_routes && is_routing(&option) => {}
                Ok(PushOption::Compression(words)) if compresses(&words) => {
                    return Err(PlanError::Compression(words.join(" ")));
                }
                Ok(option) => draft.take(&option),
                Err(error) => draft.plan.notes.push(error.to_string()),
            }
        }
        draft.finish(profile, remote)
    }
}

/// Applies a PUSH_UPDATE to the options that stood before. The first option of a name replaces all earlier ones.
///
/// # Errors
/// [`PlanError::NeedsNewConnection`]
pub(super) fn update(before: &mut Vec<String>, changes: &[String]) -> Result<(), PlanError> {
    const UPDATABLE: [&str; 17] = [
        "block-ipv6",
        "block-outside-dns",
        "dhcp-option",
        "dns",
        "ifconfig",
        "ifconfig-ipv6",
        "ping",
        "ping-exit",
        "ping-restart",
        "redirect-gateway",
        "redirect-private",
        "route",
        "route-gateway",
        "route-ipv6",
        "route-metric",
        "topology",
        "tun-mtu",
    ];
    let mut replaced: Vec<String> = Vec::new();
    for change in changes.iter().map(|text| PushUpdateOption::parse(text)) {
        let name = name_of(&change.option).to_owned();
        if !UPDATABLE.contains(&name.as_str()) {
            if change.optional {
                continue;
            }
            return Err(PlanError::NeedsNewConnection(name));
        }
        if change.removes || !replaced.contains(&name) {
            before.retain(|option| name_of(option) != name);
            replaced.push(name);
        }
        if !change.removes {
            before.push(change.option);
        }
    }
    Ok(())
}

/// The MTU inside that fits a path, in bytes: at most `wanted`, and not less than IPv6 needs.
pub(super) fn fitting_mtu(wanted: u32, path_mtu: u32, remote: IpAddr, is_tcp: bool) -> u32 {
    let ip = if remote.is_ipv4() { 20 } else { 40 };
    // Over TCP the length of a packet stands before it.
    let transport = if is_tcp { 20 + 12 + 2 } else { 8 };
    let overhead = u32::try_from(OVERHEAD_BYTES).unwrap_or_default() + ip + transport;
    wanted.min(path_mtu.saturating_sub(overhead)).max(TUN_MTU_MIN.min(wanted))
}

enum Judgement {
    Taken,
    Ignored,
    Rejected,
}

fn judge(filters: &[PullFilter], option: &str) -> Judgement {
    let found = filters.iter().find_map(|filter| match filter {
        PullFilter::Accept(start) => option.starts_with(start).then_some(Judgement::Taken),
        PullFilter::Ignore(start) => option.starts_with(start).then_some(Judgement::Ignored),
        PullFilter::Reject(start) => option.starts_with(start).then_some(Judgement::Rejected),
    });
    found.unwrap_or(Judgement::Taken)
}

fn name_of(option: &str) -> &str {
    option.split_whitespace().next().unwrap_or_default()
}

/// What `route-nopull` leaves out.
fn is_routing(option: &PushOption) -> bool {
    matches!(
        option,
        PushOption::Route(..)
            | PushOption::RouteIpv6(..)
            | PushOption::RedirectGateway(_)
            | PushOption::RedirectPrivate(_)
            | PushOption::DhcpOption(..)
            | PushOption::Dns(_)
            | PushOption::BlockOutsideDns
            | PushOption::BlockIpv6
    )
}

/// Whether `compress` or `comp-lzo` with these words puts compressed packets, or a byte before others, on the wire.
fn compresses(words: &[String]) -> bool {
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    !matches!(words[..], ["compress", "migrate"])
}

/// Options, as far as they were read.
#[derive(Default)]
struct Draft {
    plan: Plan,
    topology: Option<Topology>,
    ifconfig: Option<(Ipv4Addr, Ipv4Addr)>,
    ping: (Option<u32>, Option<u32>, Option<u32>),
    mtu: Option<u32>,
    metric: Option<u32>,
    /// Leaves the server's own address out of the tunnel; false by the flag `local`.
    is_local: bool,
    /// Routes before the default metric and the server's address are known.
    routes: Vec<(Destination, Way, Option<u32>)>,
}

enum Destination {
    Net(IpNet),
    Server,
}

impl Draft {
    fn note(&mut self, text: String) {
        self.plan.notes.push(text);
    }

    fn take(&mut self, option: &PushOption) {
        match option {
            PushOption::Ifconfig(address, other) => self.ifconfig = Some((*address, *other)),
            PushOption::IfconfigIpv6(address, bits, _) => {
                self.plan.addresses.retain(|address| address.addr().is_ipv4());
                let net = Ipv6Net::new(*address, *bits);
                self.plan.addresses.extend(net.map(IpNet::V6));
            }
            PushOption::Topology(topology) => self.topology = Some(*topology),
            PushOption::Route(host, mask, gateway, metric) => {
                self.route_ipv4(host, *mask, gateway.as_ref(), *metric);
            }
            PushOption::RouteIpv6(network, bits, gateway, metric) => {
                let way = way_of(gateway.as_ref());
                if let Ok(net) = Ipv6Net::new(*network, *bits) {
                    self.routes.push((Destination::Net(net.into()), way, *metric));
                }
            }
            PushOption::RouteMetric(metric) => self.metric = Some(*metric),
            PushOption::RedirectGateway(flags) => self.redirect(flags, true),
            PushOption::RedirectPrivate(flags) => self.redirect(flags, false),
            PushOption::DhcpOption(kind, value) => self.dhcp(kind, value),
            PushOption::Dns(words) => self.dns(words),
            PushOption::Ping(seconds) => self.ping.0 = Some(*seconds),
            PushOption::PingRestart(seconds) => self.ping.1 = Some(*seconds),
            PushOption::PingExit(seconds) => self.ping.2 = Some(*seconds),
            PushOption::TunMtu(bytes) => self.mtu = Some(*bytes),
            PushOption::BlockIpv6 | PushOption::Inactive(..) | PushOption::SessionTimeout(_) => {
                let text = option.to_text().unwrap_or_default();
                self.note(format!("{text} is not obeyed: Weft does not do so"));
            }
            PushOption::Other(words) => {
                self.note(format!("{} is not known here, and left out", words.join(" ")));
            }
            // These mean nothing on Linux, or the session has obeyed them.
            _ => {}
        }
    }

    fn route_ipv4(
        &mut self,
        host: &RouteHost<Ipv4Addr>,
        mask: Ipv4Addr,
        gateway: Option<&RouteHost<Ipv4Addr>>,
        metric: Option<u32>,
    ) {
        let way = way_of(gateway);
        match host {
            RouteHost::Address(address) => match Ipv4Net::with_netmask(*address, mask) {
                Ok(net) => self.routes.push((Destination::Net(net.into()), way, metric)),
                Err(_) => self.note(format!("route {address} {mask} has no mask, and is left out")),
            },
            RouteHost::RemoteHost => self.routes.push((Destination::Server, way, metric)),
            RouteHost::VpnGateway | RouteHost::NetGateway | RouteHost::Name(_) => {
                self.note(format!("route {host} has no address, and is left out"));
            }
        }
    }

    fn redirect(&mut self, flags: &[String], is_all: bool) {
        let has = |flag: &str| flags.iter().any(|known| known == flag);
        self.is_local |= has("local");
        if !is_all {
            return;
        }
        let ipv4: &[&str] = if has("!ipv4") { &[] } else { &ALL_IPV4 };
        let ipv6: &[&str] = if has("ipv6") { &ALL_IPV6 } else { &[] };
        let nets = ipv4.iter().chain(ipv6).filter_map(|net| net.parse().ok());
        self.routes.extend(nets.map(|net| (Destination::Net(net), Way::Inside, None)));
        self.plan.dns.is_for_all = true;
        if has("block-local") {
            self.note("block-local is not obeyed: the local network stays reachable".to_owned());
        }
    }

    fn dhcp(&mut self, kind: &str, value: &str) {
        match kind.to_ascii_uppercase().as_str() {
            "DNS" | "DNS6" => match value.parse() {
                Ok(server) => self.server(server),
                Err(_) => self.note(format!("DNS server {value:?} is no address: left out")),
            },
            "DOMAIN" | "DOMAIN-SEARCH" | "ADAPTER_DOMAIN_SUFFIX" => self.domain(value),
            // Of Windows alone.
            _ => {}
        }
    }

    /// `dns server N address A…`, `dns server N resolve-domains D…`, `dns search-domains D…`.
    fn dns(&mut self, words: &[String]) {
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        match words[..] {
            ["server", _, "address", ref addresses @ ..] => {
                for address in addresses {
                    match address.trim_matches(['[', ']']).parse() {
                        Ok(server) => self.server(server),
                        Err(_) => self.note(format!("DNS server {address:?} has a port: left out")),
                    }
                }
            }
            ["server", _, "resolve-domains", ref domains @ ..]
            | ["search-domains", ref domains @ ..] => {
                domains.iter().for_each(|domain| self.domain(domain));
            }
            _ => self.note(format!("dns {} is not obeyed", words.join(" "))),
        }
    }

    fn server(&mut self, server: IpAddr) {
        let servers = &mut self.plan.dns.servers;
        if !servers.contains(&server) && servers.len() < DNS_ITEMS_MAX {
            servers.push(server);
        }
    }

    fn domain(&mut self, domain: &str) {
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b".-_".contains(&byte);
        if domain.is_empty() || domain.starts_with('-') || !domain.bytes().all(is_plain) {
            return self.note(format!("domain {domain:?} is none: left out"));
        }
        let domains = &mut self.plan.dns.domains;
        if !domains.iter().any(|known| known == domain) && domains.len() < DNS_ITEMS_MAX {
            domains.push(domain.to_owned());
        }
    }

    fn finish(mut self, profile: &ClientProfile, remote: IpAddr) -> Result<Plan, PlanError> {
        self.address()?;
        let (ping, restart, exit) = self.ping;
        let exit = exit.or(profile.ping_exit_s).filter(|seconds| *seconds > 0);
        let restart = restart.or(profile.ping_restart_s).unwrap_or(PING_RESTART_DEFAULT_S);
        let interval_s = ping.or(profile.ping_s).unwrap_or(0).min(KEEPALIVE_MAX_S);
        let timeout_s = exit.unwrap_or(restart).min(KEEPALIVE_MAX_S);
        self.plan.keepalive = Keepalive { interval_s, timeout_s };
        self.plan.ends_on_silence = exit.is_some();
        self.plan.mtu = self.mtu.or(profile.tun_mtu).unwrap_or(TUN_MTU_DEFAULT);
        if profile.sets_no_routes {
            self.routes.clear();
        }
        let server = IpNet::from(remote);
        for (destination, way, metric) in std::mem::take(&mut self.routes) {
            let destination = match destination {
                Destination::Net(net) => net.trunc(),
                Destination::Server => server,
            };
            let metric = metric.or(self.metric);
            self.add(PlannedRoute { destination, way, metric });
        }
        let inside = |route: &&PlannedRoute| route.way == Way::Inside;
        let is_hidden = |route: &PlannedRoute| route.destination.contains(&remote);
        if self.plan.routes.iter().filter(inside).any(is_hidden) && !self.is_local {
            self.plan.routes.retain(|route| route.destination != server);
            let way = Way::Around;
            self.plan.routes.insert(0, PlannedRoute { destination: server, way, metric: None });
        }
        Ok(self.plan)
    }

    fn address(&mut self) -> Result<(), PlanError> {
        let Some((address, other)) = self.ifconfig else { return Ok(()) };
        let masked = Ipv4Net::with_netmask(address, other).ok().filter(|net| net.prefix_len() > 7);
        let is_subnet = match self.topology {
            Some(topology) => topology == Topology::Subnet,
            None => masked.is_some(),
        };
        if is_subnet {
            let bad = || PlanError::BadAddress(format!("ifconfig {address} {other}"));
            self.plan.addresses.push(masked.ok_or_else(bad)?.into());
        } else {
            self.plan.addresses.push(IpNet::from(IpAddr::V4(address)));
            let end = Destination::Net(IpNet::from(IpAddr::V4(other)));
            self.routes.push((end, Way::Inside, None));
        }
        Ok(())
    }

    fn add(&mut self, route: PlannedRoute) {
        if self.plan.routes.contains(&route) {
            return;
        }
        if self.plan.routes.len() == PLANNED_ROUTES_MAX {
            let text =
                format!("more than {PLANNED_ROUTES_MAX} routes: {} is left out", route.destination);
            return self.note(text);
        }
        self.plan.routes.push(route);
    }
}

/// A gateway inside is of no consequence: the tunnel has one other end.
fn way_of<A>(gateway: Option<&RouteHost<A>>) -> Way {
    match gateway {
        Some(RouteHost::NetGateway) => Way::Around,
        _ => Way::Inside,
    }
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
