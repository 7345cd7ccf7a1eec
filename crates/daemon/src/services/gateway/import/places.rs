//! The network that clients of an imported server join, and their addresses on it.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use weft_api::{ApiError, ErrorKind, ExposeRequest, Network, NetworkCreateRequest};
use weft_path::Vni;

use super::reading::{DEFAULT_FILE, Reading};
use crate::core::control::Request;
use crate::services::attach::AttachError;
use crate::services::gateway::peers::Held;
use crate::services::gateway::{Gateway, owner_of};

/// The network that is made for the clients' range, if no network of this host has it.
const NETWORK_MADE: &str = "openvpn";

/// The network and range of an imported server's clients.
#[derive(Clone, Debug)]
pub(super) struct Place {
    pub(super) name: String,
    pub(super) range: Ipv4Net,
    pub(super) range6: Option<Ipv6Net>,
    /// This host's own address, as the server had it, where the range has it.
    pub(super) own: Option<IpNet>,
    /// It is to be made.
    new: Option<NetworkCreateRequest>,
}

/// What became of the clients' addresses.
#[derive(Debug, Default)]
pub(super) struct Kept {
    /// Addresses that clients have from now on.
    pub(super) count: usize,
    /// Those of them that they did not have before.
    pub(super) new: Vec<Held>,
    /// Those that they had, and have no more.
    pub(super) stale: Vec<Held>,
    /// The addresses that clients without a fixed one had last.
    pub(super) last: BTreeMap<String, Ipv4Addr>,
}

impl Place {
    pub(super) fn own_ipv4(&self) -> Option<Ipv4Addr> {
        match self.own?.addr() {
            IpAddr::V4(address) => Some(address),
            IpAddr::V6(_) => None,
        }
    }
}

impl Gateway {
    /// The network for a configuration: the one that is named; else one of this host whose range has the clients'
    /// range in it; else a new one with that range.
    ///
    /// # Errors
    /// There is none: why, and what to do.
    pub(super) async fn place_for(
        &self,
        reading: &Reading,
        name: Option<&str>,
    ) -> Result<Place, String> {
        let range = reading.range().ok_or("the clients' range is not known: correct server")?;
        let networks = self.networks.list().await.map_err(|error| error.error)?;
        let ranges = networks.iter().filter_map(|network| {
            let range = network.subnet.as_ref()?.parse::<Ipv4Net>().ok()?;
            Some((network, range))
        });
        let ranges: Vec<(&Network, Ipv4Net)> = ranges.collect();
        let fits = |of: &&(&Network, Ipv4Net)| of.1.contains(&range);
        let wanted = name.unwrap_or(NETWORK_MADE);
        let named = ranges.iter().find(|(known, _)| known.name == wanted);
        let found = match name {
            Some(_) => named,
            None => ranges.iter().filter(|it| it.0.here).find(fits).or(named.filter(fits)),
        };
        let own = reading.settings.server_ipv4();
        if let Some((network, range)) = found {
            let own = own.filter(|own| range.contains(own));
            let own = own.and_then(|own| IpNet::new(own.into(), range.prefix_len()).ok());
            let range6 = network.subnet6.as_ref().and_then(|range| range.parse().ok());
            return Ok(Place { name: network.name.clone(), range: *range, range6, own, new: None });
        }
        if let Some((_, other)) = named {
            return Err(format!(
                "network {wanted} has the range {other}, not {range} of the clients: name another by --network"
            ));
        }
        let subnet6 = reading.range6().filter(|range| range.prefix_len() == 64);
        let new = NetworkCreateRequest {
            name: wanted.to_owned(),
            subnet: Some(range),
            subnet6,
            ..NetworkCreateRequest::default()
        };
        let own = own.and_then(|own| IpNet::new(own.into(), range.prefix_len()).ok());
        Ok(Place { name: wanted.to_owned(), range, range6: subnet6, own, new: Some(new) })
    }

    /// Makes the network, gives this host its address there, and claims the clients' addresses, or changes nothing but
    /// the network.
    pub(super) async fn move_in(
        &self,
        place: &Place,
        reading: &Reading,
        pool: &[(String, Ipv4Addr)],
    ) -> Result<Kept, ApiError> {
        if let Some(new) = &place.new {
            let free = self.kernel.check_range(IpNet::V4(place.range)).await;
            free.map_err(|error| {
                let text = format!(
                    "{error}: stop the OpenVPN server first, as by systemctl stop openvpn-server@NAME"
                );
                ApiError::new(ErrorKind::Conflict, text)
            })?;
            self.networks.create(new.clone()).await?;
        }
        let network = self.networks.join(Some(&place.name)).await?;
        let request = ExposeRequest {
            network: Some(network.name.clone()),
            addresses: self.own_addresses(network.vni, place.own).await,
            ..ExposeRequest::default()
        };
        self.attachments.expose(request).await?;
        let before = self.attachments.allocations().await;
        let held = |owner: &str| -> Vec<IpAddr> {
            let its = before.iter().filter(|it| it.owner == owner && it.vni == network.vni);
            its.map(|it| it.address).collect()
        };
        let mut kept = Kept::default();
        for (name, address) in wanted(reading, pool) {
            let owner = owner_of(&network.name, name);
            let had = held(&owner);
            let net = IpNet::new(address.address.into(), place.range.prefix_len());
            let net = net.map_err(|error| ApiError::new(ErrorKind::Internal, error))?;
            if !address.is_fixed && !had.is_empty() {
                continue;
            }
            match self.attachments.addresses_for((&owner, network.vni), Some(net)).await {
                Ok(_) => {
                    kept.count += 1;
                    if !address.is_fixed {
                        kept.last.insert(name.to_owned(), address.address);
                    }
                    let now = (owner.clone(), network.vni, net.addr());
                    kept.new.extend(Some(now).filter(|_| !had.contains(&net.addr())));
                    let stale = had.into_iter().filter(|it| it.is_ipv4() && *it != net.addr());
                    kept.stale.extend(stale.map(|it| (owner.clone(), network.vni, it)));
                }
                // The last address of a client is a convenience.
                Err(error) if !address.is_fixed => {
                    tracing::info!(client = name, %error, "a client gets another address than before");
                }
                Err(error) => {
                    self.release(&kept.new).await;
                    let text = format!("the address of client {name} cannot be kept: {error}");
                    return Err(ApiError::new(ApiError::from(error).kind, text));
                }
            }
        }
        Ok(kept)
    }

    /// The addresses of a client: a fixed one, or that which is kept for it, or the next free one.
    pub(in crate::services::gateway) async fn imported_addresses(
        &self,
        (owner, vni): (&str, Vni),
        (fixed, last): (Option<Ipv4Addr>, Option<Ipv4Addr>),
        wants_ipv6: bool,
    ) -> Result<Vec<IpNet>, String> {
        let words = |error: AttachError| error.to_string();
        if let Some(fixed) = fixed {
            return self.claim((owner, vni), fixed, wants_ipv6).await.map_err(words);
        }
        if let Some(last) = last {
            match self.claim((owner, vni), last, wants_ipv6).await {
                Ok(given) => return Ok(given),
                Err(error) => tracing::info!(owner, %error, "a client gets a new address"),
            }
        }
        self.attachments.addresses_for((owner, vni), None).await.map_err(words)
    }

    /// An address for an owner, with the IPv6 address that ends in it.
    async fn claim(
        &self,
        (owner, vni): (&str, Vni),
        address: Ipv4Addr,
        wants_ipv6: bool,
    ) -> Result<Vec<IpNet>, AttachError> {
        let ranges = self.attachments.ranges(vni).await;
        let bits = ranges.as_ref().map_or(32, |ranges| ranges.v4.prefix_len());
        let net = Ipv4Net::new_assert(address, bits).into();
        let mut given = self.attachments.addresses_for((owner, vni), Some(net)).await?;
        let range6 = ranges.and_then(|ranges| ranges.v6).filter(|_| wants_ipv6);
        if let Some(twin) = range6.and_then(|range6| twin_of(range6, address)) {
            given.extend(self.attachments.addresses_for((owner, vni), Some(twin)).await?);
        }
        Ok(given)
    }

    /// This host's address on a network, with the IPv6 address that ends in it.
    pub(in crate::services::gateway) async fn own_addresses(
        &self,
        vni: Vni,
        own: Option<IpNet>,
    ) -> Vec<IpNet> {
        let Some(IpNet::V4(own)) = own else { return Vec::new() };
        let has_ipv6 = std::path::Path::new("/proc/net/if_inet6").exists();
        let ranges = self.attachments.ranges(vni).await.filter(|_| has_ipv6);
        let twin = ranges.and_then(|ranges| twin_of(ranges.v6?, own.addr()));
        std::iter::once(IpNet::V4(own)).chain(twin).collect()
    }

    /// Gives addresses of clients back.
    pub(super) async fn release(&self, held: &[Held]) {
        for (owner, vni, address) in held {
            let addresses = vec![IpNet::from(*address)];
            let (owner, vni, kept) = (owner.clone(), *vni, Vec::new());
            self.attachments.tell(Request::ReleaseSome { owner, vni, addresses, kept }).await;
        }
    }
}

/// The IPv6 address of a range that goes with an IPv4 address: it ends in it.
fn twin_of(range6: Ipv6Net, address: Ipv4Addr) -> Option<IpNet> {
    let bits = range6.trunc().addr().to_bits() | u128::from(address.to_bits());
    IpNet::new(IpAddr::V6(bits.into()), range6.prefix_len()).ok()
}

/// A client's address.
#[derive(Clone, Copy)]
struct Wish {
    address: Ipv4Addr,
    /// By the client's file, not only the last one.
    is_fixed: bool,
}

/// The addresses to claim: first the fixed ones, then the last ones of other clients that nobody is given.
fn wanted<'a>(
    reading: &'a Reading,
    pool: &'a [(String, Ipv4Addr)],
) -> impl Iterator<Item = (&'a str, Wish)> {
    let mut all: BTreeMap<&str, Wish> = BTreeMap::new();
    let fixed = reading.fixed().filter(|(name, _)| *name != DEFAULT_FILE);
    all.extend(fixed.map(|(name, address)| (name, Wish { address, is_fixed: true })));
    let mut taken: std::collections::BTreeSet<Ipv4Addr> =
        all.values().map(|wish| wish.address).collect();
    let mut last = Vec::new();
    for (name, address) in pool {
        if !all.contains_key(name.as_str()) && taken.insert(*address) {
            last.push((name.as_str(), Wish { address: *address, is_fixed: false }));
        }
    }
    all.into_iter().chain(last)
}
