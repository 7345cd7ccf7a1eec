//! The names of one moment: an immutable table, built from what the mesh knows.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::{Duration, Instant};

use hickory_proto::rr::Name;
use ipnet::IpNet;
use weft_crypto::PeerId;
use weft_mesh::{EndpointInfo, HostNames, NamePort, Transport, is_dns_label, is_dns_name};

/// The network of containers that name none.
pub(crate) const DEFAULT_NETWORK: &str = "weft";
/// How long names of a host outlive its link, in seconds, where no other host has the name: its daemon may be
/// restarting under traffic.
pub(crate) const NAME_GRACE_S: u64 = 15;
/// Addresses of names of one host.
pub(crate) const ADDRESSES_PER_OWNER_MAX: usize = 16_384;
/// Addresses of names in all.
pub(crate) const ADDRESSES_MAX: usize = 262_144;
/// Lifetime of an answer in caches, in seconds.
pub(crate) const TTL_S: u32 = 1;
/// Lifetime of the news that there is no such name or record, in seconds.
pub(crate) const NEGATIVE_TTL_S: u32 = 1;
/// Names that mean this very machine everywhere (RFC 6761) and are never another's.
const RESERVED: [&str; 1] = ["localhost"];

/// Whether no container can have this name, though DNS allows it.
pub(crate) fn is_reserved(name: &str) -> bool {
    RESERVED.iter().any(|reserved| name.eq_ignore_ascii_case(reserved))
}

/// The names that a client may see.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Scope {
    /// Those of one network.
    Network(String),
    /// All of them, as the host itself does.
    Host,
}

/// A network as the zone needs it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NetworkInfo {
    /// Its name, in lower case.
    pub(crate) name: String,
    /// Its ranges, for which this zone alone answers reverse queries.
    pub(crate) ranges: Vec<IpNet>,
    /// Whether it has no way out: names of others are not looked up for it.
    pub(crate) is_internal: bool,
}

/// All that a zone is built from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Feed {
    /// This host.
    pub(crate) local: PeerId,
    /// The networks on this host, each with the names of all hosts. Those that are no endpoint's say their own network,
    /// and count if it is this one.
    pub(crate) networks: Vec<(NetworkInfo, Vec<HostNames>)>,
    /// Grows with each change.
    pub(crate) revision: u64,
}

/// One address of a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Held {
    /// The address.
    pub(crate) address: IpAddr,
    /// The host that announces it.
    pub(crate) owner: PeerId,
    /// Whether that is this host.
    pub(crate) local: bool,
    pub(crate) source: Source,
}

/// Where a name comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Source {
    /// It is a container's.
    Container,
    /// It is that of a gateway's client.
    Client,
    /// A user gave it by hand.
    Added,
}

/// The data of a name.
#[derive(Clone, Debug, Default)]
pub(crate) struct Entry {
    held: Vec<Held>,
    ports: BTreeSet<NamePort>,
}

impl Entry {
    /// Its addresses.
    pub(crate) fn held(&self) -> &[Held] {
        &self.held
    }

    pub(crate) fn v4(&self) -> impl Iterator<Item = (Ipv4Addr, bool)> {
        self.held.iter().filter_map(|held| match held.address {
            IpAddr::V4(address) => Some((address, held.local)),
            IpAddr::V6(_) => None,
        })
    }

    pub(crate) fn v6(&self) -> impl Iterator<Item = (Ipv6Addr, bool)> {
        self.held.iter().filter_map(|held| match held.address {
            IpAddr::V6(address) => Some((address, held.local)),
            IpAddr::V4(_) => None,
        })
    }

    /// The ports of a service, named or by number.
    pub(crate) fn ports(&self, service: &str, transport: Transport) -> Vec<u16> {
        let fits = |port: &&NamePort| {
            port.transport == transport
                && (port.service == service || service.parse() == Ok(port.port))
        };
        let ports: BTreeSet<u16> = self.ports.iter().filter(fits).map(|port| port.port).collect();
        ports.into_iter().collect()
    }

    fn has_transport(&self, transport: Transport) -> bool {
        self.ports.iter().any(|port| port.transport == transport)
    }
}

/// The names of one network.
#[derive(Clone, Debug, Default)]
struct Names {
    ranges: Vec<IpNet>,
    is_internal: bool,
    entries: BTreeMap<String, Entry>,
    /// Names of several labels, the last label first. A name above one exists, without data (RFC 8020).
    nested: BTreeSet<String>,
    /// The names of each address: nearly all have one.
    reverse: BTreeSet<(IpAddr, String)>,
}

/// The kinds of names in the zone.
#[derive(Debug)]
pub(crate) enum Found<'a> {
    /// The zone's own name.
    Apex,
    /// A name with records.
    Entry(&'a Entry),
    /// A service at a name: its ports, and the name.
    Service(Vec<u16>, Name, &'a Entry),
    /// It exists and has no data.
    Empty,
    /// There is no such name.
    Nothing,
}

/// The kinds of addresses in the zone.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Reverse {
    /// Full names of the address.
    Names(Vec<Name>),
    /// Part of a range, without a name.
    Empty,
    /// In a range, and no one's.
    Nothing,
    /// In no range: others may know it.
    Foreign,
}

/// All names of one moment.
#[derive(Clone, Debug)]
pub(crate) struct Zone {
    domain: Name,
    serial: u32,
    networks: BTreeMap<String, Names>,
    /// Addresses of IPv6 that containers have, with names or without.
    containers: BTreeSet<Ipv6Addr>,
    /// Names of containers that cannot be names in DNS.
    unfit: u64,
    /// Addresses beyond the limits.
    overflow: u64,
    /// When names of a host without a link end.
    next_expiry: Option<Instant>,
}

impl Zone {
    /// Builds the zone. `domain` is absolute.
    pub(crate) fn build(now: Instant, domain: &Name, feed: &Feed) -> Self {
        let mut zone = Self {
            domain: domain.to_lowercase(),
            serial: u32::try_from(feed.revision & u64::from(u32::MAX)).unwrap_or_default(),
            networks: BTreeMap::new(),
            containers: BTreeSet::new(),
            unfit: 0,
            overflow: 0,
            next_expiry: None,
        };
        for (NetworkInfo { name, ranges, is_internal }, _) in &feed.networks {
            let (ranges, is_internal) = (ranges.clone(), *is_internal);
            let names = Names { ranges, is_internal, ..Names::default() };
            zone.networks.insert(name.clone(), names);
        }
        let mut taken = Taken::default();
        let grace = Duration::from_secs(NAME_GRACE_S);
        let all = feed.networks.iter().flat_map(|(network, hosts)| {
            hosts.iter().map(move |host| (network.name.as_str(), host))
        });
        let (linked, unlinked): (Vec<_>, Vec<_>) =
            all.partition(|(_, host)| host.unlinked_since.is_none());
        for (network, host) in linked {
            zone.take(network, host, feed.local, &mut taken, &BTreeSet::new());
        }
        // A host without a link answers for a name that no other host has.
        let alive = if unlinked.is_empty() { BTreeSet::new() } else { zone.taken() };
        for (network, host) in unlinked {
            let ends = host.unlinked_since.map(|since| since + grace);
            if let Some(ends) = ends.filter(|ends| *ends > now) {
                zone.next_expiry = Some(zone.next_expiry.map_or(ends, |next| next.min(ends)));
                zone.take(network, host, feed.local, &mut taken, &alive);
            }
        }
        zone.finish();
        zone
    }

    /// The zone's own name.
    pub(crate) const fn domain(&self) -> &Name {
        &self.domain
    }

    /// Its version.
    pub(crate) const fn serial(&self) -> u32 {
        self.serial
    }

    /// Names of containers that cannot be names in DNS, and addresses beyond the limits.
    pub(crate) const fn left_out(&self) -> (u64, u64) {
        (self.unfit, self.overflow)
    }

    /// When the zone has to be built again, though nothing changes in the mesh.
    pub(crate) const fn next_expiry(&self) -> Option<Instant> {
        self.next_expiry
    }

    /// Whether this host was on a network when the zone was built.
    pub(crate) fn has_network(&self, network: &str) -> bool {
        self.networks.contains_key(network)
    }

    /// Whether names of others are looked up for those who see this scope: not on an internal network, nor before it
    /// is known whether a network is one.
    pub(crate) fn asks_others(&self, scope: &Scope) -> bool {
        match scope {
            Scope::Host => true,
            Scope::Network(network) if network == DEFAULT_NETWORK => true,
            Scope::Network(own) => self.networks.get(own).is_some_and(|names| !names.is_internal),
        }
    }

    /// Whether an address is in a range of a network that the scope sees.
    pub(crate) fn has_in_range(&self, scope: &Scope, address: IpAddr) -> bool {
        self.seen(scope).any(|(_, names)| names.has_in_range(address))
    }

    /// Whether a container has this address. Those of IPv4 are not looked up: each is a client anyway.
    pub(crate) fn is_container(&self, address: IpAddr) -> bool {
        match address {
            IpAddr::V4(_) => false,
            IpAddr::V6(address) => self.containers.contains(&address),
        }
    }

    /// Looks a name up; `None`: it is not in this zone.
    pub(crate) fn find(&self, scope: &Scope, name: &Name) -> Option<Found<'_>> {
        let labels: Vec<&[u8]> = name.iter().collect();
        let own = usize::from(self.domain.num_labels());
        if self.domain.zone_of(name) && own > 0 {
            let Some(relative) = labels.len().checked_sub(own).filter(|count| *count > 0) else {
                return Some(Found::Apex);
            };
            let texts: Option<Vec<String>> =
                labels.iter().take(relative).map(|it| text(it)).collect();
            return Some(texts.map_or(Found::Nothing, |texts| self.find_below(scope, &texts)));
        }
        // A single label is a name of the client's network or belongs to others; a longer one never is: a
        // container cannot take a name of the Internet.
        let [label] = labels.as_slice() else { return None };
        let names = self.networks.get(home(scope))?;
        names.entries.get(&text(label)?).map(Found::Entry)
    }

    /// Looks an address up by the network that it may be in, given as the prefix of a name in `arpa`.
    pub(crate) fn find_reverse(&self, scope: &Scope, prefix: IpNet) -> Reverse {
        if prefix.prefix_len() < prefix.max_prefix_len() {
            let has = |names: &Names| names.ranges.iter().any(|range| range.contains(&prefix));
            let within = self.seen(scope).any(|(_, names)| has(names));
            return if within { Reverse::Empty } else { Reverse::Foreign };
        }
        let address = prefix.addr();
        // Several networks may have the same address.
        let mut found = None;
        for (network, names) in self.seen(scope) {
            let mut here = names.named(address).peekable();
            if here.peek().is_some() {
                let full = here.filter_map(|name| self.full_name(scope, network, name));
                found.get_or_insert_with(Vec::new).extend(full);
            }
        }
        match found {
            Some(names) => Reverse::Names(names),
            None if self.has_in_range(scope, address) => Reverse::Nothing,
            None => Reverse::Foreign,
        }
    }

    /// Each name with that address or of that name that a scope sees: network, name, and its addresses.
    pub(crate) fn list(&self, scope: &Scope, wanted: Option<IpAddr>) -> Vec<(&str, &str, &Entry)> {
        let all = self.seen(scope).flat_map(|(network, names)| {
            names.entries.iter().map(move |(name, entry)| (network, name.as_str(), entry))
        });
        let has = |entry: &Entry| match wanted {
            Some(address) => entry.held.iter().any(|held| held.address == address),
            None => true,
        };
        all.filter(|(_, _, entry)| has(entry)).collect()
    }

    /// The absolute name of a name on a network, as PTR records give it. It leads back to that name in the same scope:
    /// one of `weft` that ends like a name on a network has its own network behind it.
    pub(crate) fn full_name(&self, scope: &Scope, network: &str, name: &str) -> Option<Name> {
        let is_plain = network == DEFAULT_NETWORK
            && name.rsplit_once('.').is_none_or(|(_, last)| self.sees(scope, last).is_none());
        let labels = name.split('.').chain((!is_plain).then_some(network));
        let relative = Name::from_labels(labels.map(str::as_bytes)).ok()?;
        let mut name = relative.append_domain(&self.domain).ok()?;
        name.set_fqdn(true);
        Some(name)
    }
}

/// Whether an endpoint's own name is `NAMESPACE/POD`, which is for people. A pod's names in DNS are its aliases.
fn is_pod(endpoint: &EndpointInfo) -> bool {
    endpoint.name.contains('/') && !endpoint.aliases.is_empty()
}

/// The addresses taken, on all networks together.
#[derive(Default)]
struct Taken {
    total: usize,
    by_owner: BTreeMap<PeerId, usize>,
}

impl Zone {
    /// The networks that a scope sees.
    fn seen<'a>(&'a self, scope: &Scope) -> impl Iterator<Item = (&'a str, &'a Names)> {
        let all = self.networks.iter().map(|(network, names)| (network.as_str(), names));
        all.filter(move |(network, _)| match scope {
            Scope::Host => true,
            Scope::Network(own) => own == network,
        })
    }

    /// A network, if the scope sees it.
    fn sees(&self, scope: &Scope, network: &str) -> Option<&Names> {
        let is_seen = *scope == Scope::Host || home(scope) == network;
        self.networks.get(network).filter(|_| is_seen)
    }

    /// Takes the names of one host on a network, but for those that others are alive for.
    fn take(
        &mut self,
        network: &str,
        host: &HostNames,
        local: PeerId,
        taken: &mut Taken,
        alive: &BTreeSet<(String, String)>,
    ) {
        let held =
            |address, source| Held { address, owner: host.peer, local: host.peer == local, source };
        for endpoint in &host.endpoints {
            self.note_container(endpoint);
            let addresses: Vec<Held> =
                endpoint.addresses.iter().map(|net| held(net.addr(), Source::Container)).collect();
            let own = Some(&endpoint.name).filter(|name| !name.is_empty() && !is_pod(endpoint));
            for name in own.into_iter().chain(&endpoint.aliases) {
                let room = self.room(taken, host.peer, addresses.len());
                if room && !self.put(network, name, &addresses, &[], alive) {
                    self.unfit += 1;
                }
            }
        }
        let here = host.names.iter().filter(|it| it.network.eq_ignore_ascii_case(network));
        for record in here {
            let source = if record.is_client { Source::Client } else { Source::Added };
            let addresses: Vec<Held> =
                record.addresses.iter().map(|it| held(*it, source)).collect();
            if self.room(taken, host.peer, addresses.len())
                && !self.put(network, &record.name, &addresses, &record.ports, alive)
            {
                self.unfit += 1;
            }
        }
    }

    fn note_container(&mut self, endpoint: &EndpointInfo) {
        for net in &endpoint.addresses {
            if let IpAddr::V6(address) = net.addr()
                && self.containers.len() < ADDRESSES_MAX
            {
                self.containers.insert(address);
            }
        }
    }

    /// Whether there is room for a name with this number of addresses; one without takes the room of one.
    fn room(&mut self, taken: &mut Taken, owner: PeerId, addresses: usize) -> bool {
        let more = addresses.max(1);
        let own = taken.by_owner.entry(owner).or_default();
        let fits = *own + more <= ADDRESSES_PER_OWNER_MAX && taken.total + more <= ADDRESSES_MAX;
        if fits {
            *own += more;
            taken.total += more;
        } else {
            self.overflow += more as u64;
        }
        fits
    }

    /// Adds addresses to a name on a network; `false` if it cannot be one in DNS.
    fn put(
        &mut self,
        network: &str,
        name: &str,
        addresses: &[Held],
        ports: &[NamePort],
        alive: &BTreeSet<(String, String)>,
    ) -> bool {
        let name = name.to_ascii_lowercase();
        if !is_dns_name(&name) || is_reserved(&name) {
            return false;
        }
        let Some(names) = self.networks.get_mut(network) else { return true };
        let key = (network.to_owned(), name);
        if alive.contains(&key) {
            return true;
        }
        // Nobody gives public addresses a name for everyone.
        let is_own =
            |held: &&Held| held.source == Source::Container || names.has_in_range(held.address);
        let own: Vec<IpAddr> = addresses.iter().filter(is_own).map(|held| held.address).collect();
        for address in own {
            names.reverse.insert((address, key.1.clone()));
        }
        let entry = names.entries.entry(key.1).or_default();
        // Most names have one address, and there are many names.
        entry.held.reserve_exact(addresses.len());
        entry.held.extend(addresses);
        let lower = |port: &NamePort| NamePort {
            service: port.service.to_ascii_lowercase(),
            transport: port.transport,
            port: port.port,
        };
        entry.ports.extend(ports.iter().map(lower));
        true
    }

    fn taken(&self) -> BTreeSet<(String, String)> {
        let names = |(network, names): (&String, &Names)| {
            names.entries.keys().map(|name| (network.clone(), name.clone())).collect::<Vec<_>>()
        };
        self.networks.iter().flat_map(names).collect()
    }

    fn finish(&mut self) {
        for names in self.networks.values_mut() {
            for entry in names.entries.values_mut() {
                // A container and a name given by hand may be one address of one host.
                entry.held.sort_unstable();
                entry.held.dedup_by_key(|held| held.address);
            }
            let nested = names.entries.keys().filter(|name| name.contains('.'));
            names.nested = nested.map(|name| reversed(name)).collect();
        }
    }

    /// Looks up `NAME` or `NAME.NETWORK`. A name on a network comes before one of several labels.
    fn find_below(&self, scope: &Scope, labels: &[String]) -> Found<'_> {
        let home = home(scope);
        let in_home = self.networks.get(home).map_or(Hit::Nothing, |names| names.find(labels));
        let Some((network, rest)) = labels.split_last() else { return Found::Apex };
        let Some(names) = self.sees(scope, network) else {
            return self.found(scope, home, in_home);
        };
        if rest.is_empty() {
            // A container may have the name of a network.
            return match in_home {
                Hit::Nothing => Found::Empty,
                hit => self.found(scope, home, hit),
            };
        }
        let in_network = names.find(rest);
        let is_home = match (&in_network, &in_home) {
            (Hit::Entry(_) | Hit::Service(..), _) => false,
            (_, Hit::Service(_, name, _)) => home == network || name == network,
            // The host is not answered with a name of `weft` that ends like one on another network.
            (_, Hit::Entry(_)) => home == network,
            (Hit::Nothing, Hit::Empty) => true,
            (Hit::Nothing | Hit::Empty, _) => false,
        };
        match is_home {
            true => self.found(scope, home, in_home),
            false => self.found(scope, network, in_network),
        }
    }

    fn found<'a>(&self, scope: &Scope, network: &str, hit: Hit<'a>) -> Found<'a> {
        match hit {
            Hit::Entry(entry) => Found::Entry(entry),
            Hit::Service(ports, name, entry) => match self.full_name(scope, network, &name) {
                Some(name) => Found::Service(ports, name, entry),
                None => Found::Nothing,
            },
            Hit::Empty => Found::Empty,
            Hit::Nothing => Found::Nothing,
        }
    }
}

/// The meaning of a name in one network.
enum Hit<'a> {
    Entry(&'a Entry),
    Service(Vec<u16>, String, &'a Entry),
    Empty,
    Nothing,
}

impl Names {
    /// The names of an address.
    fn named(&self, address: IpAddr) -> impl Iterator<Item = &str> {
        let from = self.reverse.range((address, String::new())..);
        from.take_while(move |(at, _)| *at == address).map(|(_, name)| name.as_str())
    }

    fn has_in_range(&self, address: IpAddr) -> bool {
        self.ranges.iter().any(|range| range.contains(&address))
    }

    fn find(&self, labels: &[String]) -> Hit<'_> {
        let name = labels.join(".");
        if let Some(entry) = self.entries.get(&name) {
            return Hit::Entry(entry);
        }
        if let Some(hit) = self.find_service(labels) {
            return hit;
        }
        if self.has_below(&name) { Hit::Empty } else { Hit::Nothing }
    }

    /// Whether there are names below this one.
    fn has_below(&self, name: &str) -> bool {
        let above = reversed(name) + ".";
        let first = self.nested.range(above.clone()..).next();
        first.is_some_and(|nested| nested.starts_with(&above))
    }

    /// `_http._tcp.web` (RFC 2782), or `_tcp.web` above it.
    fn find_service(&self, labels: &[String]) -> Option<Hit<'_>> {
        let (service, rest) = match labels {
            [transport, rest @ ..] if transport_of(transport).is_some() => {
                (None, (transport, rest))
            }
            [service, transport, rest @ ..] => {
                (Some(service.strip_prefix('_')?), (transport, rest))
            }
            _ => return None,
        };
        let (transport, rest) = (transport_of(rest.0)?, rest.1.join("."));
        let entry = self.entries.get(&rest)?;
        let Some(service) = service else {
            return entry.has_transport(transport).then_some(Hit::Empty);
        };
        let ports = entry.ports(service, transport);
        (!ports.is_empty()).then_some(Hit::Service(ports, rest, entry))
    }
}

/// The labels of a name, the last first.
fn reversed(name: &str) -> String {
    name.rsplit('.').collect::<Vec<_>>().join(".")
}

fn transport_of(label: &str) -> Option<Transport> {
    match label {
        "_tcp" => Some(Transport::Tcp),
        "_udp" => Some(Transport::Udp),
        "_sctp" => Some(Transport::Sctp),
        _ => None,
    }
}

/// The network whose names need no network.
fn home(scope: &Scope) -> &str {
    match scope {
        Scope::Network(network) => network,
        Scope::Host => DEFAULT_NETWORK,
    }
}

/// A label that may be part of a name here, in lower case.
fn text(label: &[u8]) -> Option<String> {
    let text = std::str::from_utf8(label).ok().filter(|text| is_dns_label(text))?;
    Some(text.to_ascii_lowercase())
}

#[cfg(test)]
mod tests;
