//! Keeps each remote endpoint behind its overlay port of the bridge: the kernel engine's VXLAN devices or the
//! vector engine's TAP.

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    fmt,
    hash::Hash,
    net::IpAddr,
};

use netlink_packet_route::{RouteNetlinkMessage, link::InfoKind};
use rustix::io::Errno;

use crate::{
    error::KernelError,
    handle::Kernel,
    net::{
        link::Link,
        neighbours::{self, Devices, Entries, Key, MacAddress, Port, Value},
        vxlan::OuterFamily,
    },
    netlink::error::RequestError,
};

/// Most endpoints on other hosts in one overlay.
pub const ENDPOINTS_MAX: usize = 1 << 17;
/// Most addresses of one endpoint that the bridge answers for.
pub const ENDPOINT_ADDRESSES_MAX: usize = 64;

/// The devices of an overlay, by name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OverlaySpec {
    /// The bridge, made by [`Kernel::ensure_bridge`].
    pub bridge: String,
    /// The vector engine's port, put there by [`Kernel::ensure_port`].
    pub tap: String,
    /// The VXLAN device for IPv4 remotes ([`Kernel::ensure_vxlan`]); need not exist while no peer
    /// is on it.
    pub vxlan: String,
    /// The VXLAN device for IPv6 remotes; need not exist while no peer is on it.
    pub vxlan6: String,
}

/// The engine that carries a peer's frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Via {
    /// The vector engine.
    Tap,
    /// The kernel engine.
    Vxlan {
        /// The peer's outer address.
        remote: IpAddr,
    },
    /// Nothing yet. Unicast frames go to the vector engine, which drops and counts them; there is
    /// no copy of broadcast frames.
    #[default]
    None,
}

/// All devices and entries of this host, read once for the overlays of all networks.
pub(crate) struct Listing {
    links: Vec<Link>,
    entries: Entries,
}

impl Listing {
    pub(crate) async fn read(kernel: &Kernel) -> Result<Self, KernelError> {
        let socket = kernel.socket();
        Ok(Self { links: socket.links().await?, entries: socket.entries().await? })
    }
}

/// The overlay's forwarding and neighbour entries, as wanted and as last written. `P` names a peer.
///
/// Each MAC has a static, sticky entry of the bridge on the port that carries its peer. For a peer on the
/// kernel engine it also has an entry of the VXLAN device. Each address has a permanent neighbour entry on
/// the bridge, from which the bridge answers ARP and neighbour discovery itself. Each peer on the kernel
/// engine gets copies of broadcast and multicast frames.
///
/// Calls send only what differs. A peer is moved make-before-break. First the entries that the new way needs
/// are written. Then the bridge's entry is changed in one step, and then the old entries are removed. Old
/// tunnel entries stay until the next call of any kind, since frames may be on their way to them. The first
/// call, and each call after a failed or dropped one, reads the kernel's tables and corrects all differences
/// ([`Overlay::resync`]).
pub struct Overlay<P> {
    kernel: Kernel,
    spec: OverlaySpec,
    peers: HashMap<P, Peer>,
    endpoints: HashMap<MacAddress, Endpoint<P>>,
    /// The MACs that claim an address; the last claim holds.
    claims: HashMap<IpAddr, Vec<MacAddress>>,
    /// Addresses that another host has announced, with the MAC that claimed them then. The bridge no longer
    /// answers for them, so that queries reach their holder.
    yielded: HashMap<IpAddr, MacAddress>,
    /// The peers that are reached at an outer address.
    remotes: HashMap<IpAddr, HashSet<P>>,
    /// The peers that get copies of broadcast frames; `None`: every peer.
    broadcast: Option<HashSet<P>>,
    present: HashMap<Key, Value>,
    /// Tunnel entries of MACs that moved away. A frame that the bridge had already sent their way
    /// may still look for them, so they go with the next call.
    leaving: BTreeSet<Key>,
    /// `None`: the kernel's entries are unknown and must be read.
    devices: Option<Devices>,
}

#[derive(Debug, Default)]
struct Peer {
    via: Via,
    macs: HashSet<MacAddress>,
}

#[derive(Debug)]
struct Endpoint<P> {
    peer: P,
    addresses: Vec<IpAddr>,
}

impl<P> fmt::Debug for Overlay<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Overlay")
            .field("spec", &self.spec)
            .field("peers", &self.peers.len())
            .field("endpoints", &self.endpoints.len())
            .finish_non_exhaustive()
    }
}

impl<P: Copy + Eq + Hash> Overlay<P> {
    /// An overlay without peers and endpoints. Nothing is sent to the kernel.
    #[must_use]
    pub fn new(kernel: Kernel, spec: OverlaySpec) -> Self {
        Self {
            kernel,
            spec,
            peers: HashMap::new(),
            endpoints: HashMap::new(),
            claims: HashMap::new(),
            yielded: HashMap::new(),
            remotes: HashMap::new(),
            broadcast: None,
            present: HashMap::new(),
            leaving: BTreeSet::new(),
            devices: None,
        }
    }

    /// The same for a network whose broadcast and multicast frames go to no peer, until [`Self::set_broadcast`].
    #[must_use]
    pub fn without_broadcast(kernel: Kernel, spec: OverlaySpec) -> Self {
        Self { broadcast: Some(HashSet::new()), ..Self::new(kernel, spec) }
    }

    /// Each peer that is not reached by nothing, and the engine that should carry its frames.
    #[must_use]
    pub fn vias(&self) -> Vec<(P, Via)> {
        let peers = self.peers.iter().map(|(name, peer)| (*name, peer.via));
        peers.filter(|(_, via)| *via != Via::None).collect()
    }

    /// The engine that should carry a peer's frames.
    #[must_use]
    pub fn via(&self, peer: P) -> Via {
        self.peers.get(&peer).map(|peer| peer.via).unwrap_or_default()
    }

    /// Moves peers to the given engines.
    ///
    /// # Errors
    /// [`KernelError::LinkMissing`] if the bridge is not there, or a port that an entry needs, or the
    /// kernel's first refusal. All other entries are written even then. The wanted state is kept: the next
    /// call or [`Self::resync`] tries again.
    pub async fn set_peers(&mut self, peers: &[(P, Via)]) -> Result<(), KernelError> {
        let mut touched = BTreeSet::new();
        for (name, via) in peers {
            let peer = self.peers.entry(*name).or_default();
            let before = std::mem::replace(&mut peer.via, *via);
            if before == *via {
                continue;
            }
            touched.extend(peer.macs.iter().flat_map(keys_of_mac));
            if let Via::Vxlan { remote } = before {
                touched.insert(Key::Copy(remote));
                self.leave_remote(remote, *name);
            }
            if let Via::Vxlan { remote } = *via {
                touched.insert(Key::Copy(remote));
                self.remotes.entry(remote).or_default().insert(*name);
            }
        }
        self.apply(touched).await
    }

    /// Moves one peer. See [`Self::set_peers`].
    ///
    /// # Errors
    /// See [`Self::set_peers`].
    pub async fn set_peer(&mut self, peer: P, via: Via) -> Result<(), KernelError> {
        self.set_peers(&[(peer, via)]).await
    }

    /// Forgets a peer and its endpoints.
    ///
    /// # Errors
    /// See [`Self::set_peers`].
    pub async fn remove_peer(&mut self, peer: P) -> Result<(), KernelError> {
        let Some(gone) = self.peers.get(&peer) else { return Ok(()) };
        let (via, macs): (Via, Vec<MacAddress>) = (gone.via, gone.macs.iter().copied().collect());
        let mut touched = BTreeSet::new();
        for mac in macs {
            self.forget(mac, &mut touched);
        }
        if let Via::Vxlan { remote } = via {
            touched.insert(Key::Copy(remote));
            self.leave_remote(remote, peer);
        }
        self.peers.remove(&peer);
        self.apply(touched).await
    }

    /// Adds endpoints (MAC, addresses, the peer that holds it) and takes others away. An endpoint
    /// replaces the one with its MAC; an address named by two goes to the last. MACs that cannot be
    /// an endpoint's (zero, multicast), addresses that cannot be (unspecified, multicast) and
    /// addresses beyond [`ENDPOINT_ADDRESSES_MAX`] are left out.
    ///
    /// # Errors
    /// [`KernelError::TableFull`] if there are more than [`ENDPOINTS_MAX`]; else see
    /// [`Self::set_peers`].
    pub async fn set_endpoints(
        &mut self,
        add: &[(MacAddress, Vec<IpAddr>, P)],
        remove: &[MacAddress],
    ) -> Result<(), KernelError> {
        let mut touched = BTreeSet::new();
        let mut full = Ok(());
        for mac in remove {
            self.forget(*mac, &mut touched);
        }
        for (mac, addresses, peer) in add {
            if !can_be_endpoint(mac) {
                continue;
            }
            self.forget(*mac, &mut touched);
            if self.endpoints.len() >= ENDPOINTS_MAX {
                full = Err(KernelError::TableFull {
                    table: "endpoints on other hosts".into(),
                    limit: ENDPOINTS_MAX,
                });
                break;
            }
            self.learn(*mac, addresses, *peer, &mut touched);
        }
        let claims = &self.claims;
        self.yielded
            .retain(|address, mac| claims.get(address).and_then(|it| it.last()) == Some(mac));
        self.apply(touched).await.and(full)
    }

    /// Handles an announcement on the network that `mac` has an address. If an endpoint with another MAC
    /// claims the address, the bridge stops answering for it. It answers again after the endpoint announces
    /// it, or after another endpoint claims it. True if this changes the bridge's answers.
    ///
    /// # Errors
    /// See [`Self::set_peers`].
    pub async fn handle_announcement(
        &mut self,
        address: IpAddr,
        mac: [u8; 6],
    ) -> Result<bool, KernelError> {
        let Some(claim) = self.claims.get(&address).and_then(|macs| macs.last()).copied() else {
            return Ok(false);
        };
        let yields = self.yielded.get(&address) == Some(&claim);
        if yields == (claim != mac) {
            return Ok(false);
        }
        match yields {
            true => self.yielded.remove(&address),
            false => self.yielded.insert(address, claim),
        };
        self.apply([Key::Neighbour(address)].into()).await.map(|()| true)
    }

    /// Makes `wanted` the whole set of endpoints. See [`Self::set_endpoints`].
    ///
    /// # Errors
    /// See [`Self::set_endpoints`].
    pub async fn replace_endpoints(
        &mut self,
        wanted: &[(MacAddress, Vec<IpAddr>, P)],
    ) -> Result<(), KernelError> {
        let kept: HashSet<MacAddress> = wanted.iter().map(|(mac, _, _)| *mac).collect();
        let gone: Vec<_> =
            self.endpoints.keys().filter(|mac| !kept.contains(*mac)).copied().collect();
        self.set_endpoints(wanted, &gone).await
    }

    /// Sets the peers on the kernel engine that get copies of broadcast and multicast frames; until the first call
    /// all do.
    ///
    /// # Errors
    /// See [`Self::set_peers`].
    pub async fn set_broadcast(&mut self, peers: &[P]) -> Result<(), KernelError> {
        self.broadcast = Some(peers.iter().copied().collect());
        let touched = self.remotes.keys().map(|remote| Key::Copy(*remote)).collect();
        self.apply(touched).await
    }

    /// Reads the kernel's tables and corrects all differences: entries deleted by hand, recreated devices,
    /// leftovers of an earlier run. Returns how many entries it had to change.
    ///
    /// # Errors
    /// See [`Self::set_peers`].
    pub async fn resync(&mut self) -> Result<usize, KernelError> {
        let listing = Listing::read(&self.kernel).await?;
        self.resync_with(&listing).await
    }

    /// As [`Self::resync`], by what the kernel listed.
    pub(crate) async fn resync_with(&mut self, listing: &Listing) -> Result<usize, KernelError> {
        let kernel = self.kernel.clone();
        let _one = kernel.inner.reconcile.lock().await;
        self.devices = None;
        let devices = self.find_devices(&listing.links).await?;
        let tables = listing.entries.tables(&devices);
        self.present = tables.entries;
        let mut touched: BTreeSet<Key> = self.present.keys().copied().collect();
        touched.extend(self.wanted_keys());
        self.leaving.clear();
        let mut plan = self.plan(&devices, &touched, &BTreeSet::new());
        for (family, mac, remote) in tables.surplus {
            plan.drop_surplus(self, &devices, (family, mac, remote));
        }
        let changes = plan.steps.len();
        self.run(devices, plan).await?;
        Ok(changes)
    }

    async fn apply(&mut self, mut touched: BTreeSet<Key>) -> Result<(), KernelError> {
        let Some(devices) = self.devices else { return self.resync().await.map(|_| ()) };
        let kernel = self.kernel.clone();
        let one = kernel.inner.reconcile.lock().await;
        let due = std::mem::take(&mut self.leaving);
        let postponed: BTreeSet<Key> = touched
            .iter()
            .filter(|key| !due.contains(key) && self.moves_away(key))
            .copied()
            .collect();
        touched.extend(due);
        let plan = self.plan(&devices, &touched, &postponed);
        self.leaving = postponed;
        let result = self.run(devices, plan).await;
        drop(one);
        match result {
            // A device or an entry has changed: read everything again, once.
            Err(_) if self.devices.is_none() => self.resync().await.map(|_| ()),
            result => result,
        }
    }

    /// Sends a plan. If a refusal shows that the tables differ from the recorded state, or this future is
    /// dropped, `devices` is `None` after it.
    async fn run(&mut self, devices: Devices, plan: Plan) -> Result<(), KernelError> {
        let mut failed = plan.missing.map_or(Ok(()), |name| Err(KernelError::LinkMissing { name }));
        // A device that was missing may be there at the next call.
        let mut stale = failed.is_err();
        self.devices = None;
        let (steps, requests): (Vec<_>, Vec<_>) = plan.steps.into_iter().unzip();
        let answers = self
            .kernel
            .socket()
            .change_all(requests)
            .await
            .map_err(|error| error.while_doing("write the forwarding entries"))?;
        for (step, answer) in steps.into_iter().zip(answers) {
            match answer {
                Ok(()) => step.done(&mut self.present),
                Err(error) if step.value.is_none() && is_gone(&error) => {
                    step.done(&mut self.present);
                }
                Err(error) => {
                    stale |= is_gone(&error) || error.is(Errno::OPNOTSUPP);
                    let verb = if step.value.is_some() { "write" } else { "remove" };
                    let doing = format!("{verb} {}", neighbours::text(step.key));
                    failed = failed.and(Err(error.while_doing(doing)));
                }
            }
        }
        self.devices = (!stale).then_some(devices);
        failed
    }

    async fn find_devices(&self, links: &[Link]) -> Result<Devices, KernelError> {
        let bridge = self.kernel.own_bridge(&self.spec.bridge).await?.index;
        let port = |name: &str, fits: &dyn Fn(&Link) -> bool| {
            let port = links.iter().find(|link| link.name == name)?;
            (port.master == Some(bridge) && fits(port)).then_some(port.index)
        };
        let is_vxlan = |link: &Link| link.is_own() && link.kind == Some(InfoKind::Vxlan);
        Ok(Devices {
            bridge,
            tap: port(&self.spec.tap, &|_| true),
            v4: port(&self.spec.vxlan, &is_vxlan),
            v6: port(&self.spec.vxlan6, &is_vxlan),
        })
    }

    /// Whether this is the tunnel entry of an endpoint that is carried by something else by now.
    fn moves_away(&self, key: &Key) -> bool {
        let Key::Tunnel(_, mac) = key else { return false };
        self.endpoints.contains_key(mac)
            && self.present.contains_key(key)
            && self.wanted(*key).is_none()
    }

    /// The requests that bring these entries to the wanted state, in an order that breaks nothing.
    fn plan(&self, devices: &Devices, touched: &BTreeSet<Key>, postponed: &BTreeSet<Key>) -> Plan {
        let mut plan = Plan::default();
        for key in touched {
            let Some(value) = self.wanted(*key) else { continue };
            if self.present.get(key) == Some(&value) {
                continue;
            }
            match neighbours::set(devices, *key, value) {
                Some(request) => plan.steps.push((Step { key: *key, value: Some(value) }, request)),
                None => plan.missing = plan.missing.or_else(|| self.device_name(*key, value)),
            }
        }
        for key in touched.difference(postponed) {
            if self.wanted(*key).is_none()
                && let Some(value) = self.present.get(key)
                && let Some(request) = neighbours::unset(devices, *key, *value)
            {
                plan.steps.push((Step { key: *key, value: None }, request));
            }
        }
        plan
    }

    fn wanted(&self, key: Key) -> Option<Value> {
        match key {
            Key::Copy(remote) => {
                let gets = |peer| self.broadcast.as_ref().is_none_or(|all| all.contains(peer));
                let peers = self.remotes.get(&remote)?;
                peers.iter().any(gets).then_some(Value::Present)
            }
            Key::Tunnel(family, mac) => match self.via(self.endpoints.get(&mac)?.peer) {
                Via::Vxlan { remote } if OuterFamily::of(remote) == family => {
                    Some(Value::Remote(remote))
                }
                _ => None,
            },
            Key::Forward(mac) => match self.via(self.endpoints.get(&mac)?.peer) {
                Via::Vxlan { remote } => Some(Value::Port(Port::Vxlan(OuterFamily::of(remote)))),
                Via::Tap | Via::None => Some(Value::Port(Port::Tap)),
            },
            Key::Neighbour(address) => {
                let claim = self.claims.get(&address).and_then(|macs| macs.last())?;
                (self.yielded.get(&address) != Some(claim)).then_some(Value::Mac(*claim))
            }
        }
    }

    fn wanted_keys(&self) -> impl Iterator<Item = Key> {
        let copies = self.remotes.keys().map(|remote| Key::Copy(*remote));
        let macs = self.endpoints.keys().flat_map(keys_of_mac);
        copies.chain(macs).chain(self.claims.keys().map(|address| Key::Neighbour(*address)))
    }

    fn device_name(&self, key: Key, value: Value) -> Option<String> {
        let name = match neighbours::port_of(key, value)? {
            Port::Tap => &self.spec.tap,
            Port::Vxlan(OuterFamily::V4) => &self.spec.vxlan,
            Port::Vxlan(OuterFamily::V6) => &self.spec.vxlan6,
        };
        Some(format!("{name} in {}", self.spec.bridge))
    }

    fn learn(
        &mut self,
        mac: MacAddress,
        addresses: &[IpAddr],
        peer: P,
        touched: &mut BTreeSet<Key>,
    ) {
        let mut kept: Vec<IpAddr> = Vec::new();
        for address in addresses.iter().take(ENDPOINT_ADDRESSES_MAX) {
            if !address.is_unspecified() && !address.is_multicast() && !kept.contains(address) {
                kept.push(*address);
                self.claims.entry(*address).or_default().push(mac);
                touched.insert(Key::Neighbour(*address));
            }
        }
        touched.extend(keys_of_mac(&mac));
        self.peers.entry(peer).or_default().macs.insert(mac);
        self.endpoints.insert(mac, Endpoint { peer, addresses: kept });
    }

    fn forget(&mut self, mac: MacAddress, touched: &mut BTreeSet<Key>) {
        let Some(endpoint) = self.endpoints.remove(&mac) else { return };
        touched.extend(keys_of_mac(&mac));
        if let Some(peer) = self.peers.get_mut(&endpoint.peer) {
            peer.macs.remove(&mac);
        }
        for address in endpoint.addresses {
            touched.insert(Key::Neighbour(address));
            if let Some(claims) = self.claims.get_mut(&address) {
                claims.retain(|claim| *claim != mac);
                if claims.is_empty() {
                    self.claims.remove(&address);
                }
            }
        }
    }

    fn leave_remote(&mut self, remote: IpAddr, peer: P) {
        if let Some(peers) = self.remotes.get_mut(&remote) {
            peers.remove(&peer);
            if peers.is_empty() {
                self.remotes.remove(&remote);
            }
        }
    }
}

impl Kernel {
    /// Makes `wanted` the whole set of entries of a VXLAN device outside the bridge (a probe device): frames
    /// for each MAC go to that remote. Only differences are sent.
    ///
    /// # Errors
    /// [`KernelError::LinkMissing`] if there is no such device of ours, or the kernel's first refusal; all
    /// other entries are written even then.
    pub async fn set_tunnel_entries(
        &self,
        device: &str,
        wanted: &[(MacAddress, IpAddr)],
    ) -> Result<(), KernelError> {
        let index = self.vxlan_index(device).await?;
        let wanted: HashMap<MacAddress, IpAddr> = wanted.iter().copied().collect();
        // The family only separates two devices in one table; here there is one.
        let tables = self.socket().tunnel_entries(index, OuterFamily::V4).await?;
        let mut present = HashMap::new();
        let mut remove = tables.surplus.iter().map(|(_, m, r)| (*m, *r)).collect::<Vec<_>>();
        for (key, value) in tables.entries {
            match (key, value) {
                (Key::Tunnel(_, mac), Value::Remote(remote)) => {
                    present.insert(mac, remote);
                }
                (Key::Copy(remote), _) => remove.push((neighbours::ALL_ZERO, remote)),
                _ => {}
            }
        }
        remove.extend(
            present.iter().filter(|(mac, _)| !wanted.contains_key(*mac)).map(|(m, r)| (*m, *r)),
        );
        // A MAC with several remotes is replaced.
        let odd: HashSet<MacAddress> = tables.surplus.iter().map(|(_, mac, _)| *mac).collect();
        let add: Vec<_> = wanted
            .into_iter()
            .filter(|(mac, remote)| odd.contains(mac) || present.get(mac) != Some(remote))
            .collect();
        self.send_tunnel_entries(index, &add, &remove).await
    }

    /// Adds and removes single entries of such a device; an entry replaces the one with its MAC.
    ///
    /// # Errors
    /// See [`Self::set_tunnel_entries`].
    pub async fn change_tunnel_entries(
        &self,
        device: &str,
        add: &[(MacAddress, IpAddr)],
        remove: &[(MacAddress, IpAddr)],
    ) -> Result<(), KernelError> {
        let index = self.vxlan_index(device).await?;
        self.send_tunnel_entries(index, add, remove).await
    }

    async fn vxlan_index(&self, device: &str) -> Result<u32, KernelError> {
        let link = self.socket().need_link(device).await?;
        if link.is_own() && link.kind == Some(InfoKind::Vxlan) {
            Ok(link.index)
        } else {
            Err(link.name_taken("on this host"))
        }
    }

    async fn send_tunnel_entries(
        &self,
        index: u32,
        add: &[(MacAddress, IpAddr)],
        remove: &[(MacAddress, IpAddr)],
    ) -> Result<(), KernelError> {
        use netlink_packet_core::{NLM_F_CREATE, NLM_F_REPLACE};
        let entry =
            |(mac, remote): &(MacAddress, IpAddr)| neighbours::tunnel_entry(index, *mac, *remote);
        let removals = remove.iter().map(|e| (RouteNetlinkMessage::DelNeighbour(entry(e)), 0));
        let flags = NLM_F_CREATE | NLM_F_REPLACE;
        let additions = add.iter().map(|e| (RouteNetlinkMessage::NewNeighbour(entry(e)), flags));
        let answers = self
            .socket()
            .change_all(removals.chain(additions).collect())
            .await
            .map_err(|error| error.while_doing("write the tunnel entries"))?;
        for (answer, (mac, _)) in answers.into_iter().zip(remove.iter().chain(add)) {
            match answer {
                Err(error) if !error.is(Errno::NOENT) => {
                    let doing = format!("write tunnel entry {}", neighbours::mac_text(mac));
                    return Err(error.while_doing(doing));
                }
                _ => {}
            }
        }
        Ok(())
    }
}

/// A change to send; without a value it is a removal.
#[derive(Debug)]
struct Step {
    key: Key,
    value: Option<Value>,
}

impl Step {
    fn done(self, present: &mut HashMap<Key, Value>) {
        match self.value {
            Some(value) => present.insert(self.key, value),
            None => present.remove(&self.key),
        };
    }
}

#[derive(Debug, Default)]
struct Plan {
    steps: Vec<(Step, (RouteNetlinkMessage, u16))>,
    /// A device that a wanted entry needs and that is not there.
    missing: Option<String>,
}

impl Plan {
    /// Handles a MAC with a second remote on a VXLAN device: both entries are removed, and the wanted one is
    /// written again.
    fn drop_surplus<P: Copy + Eq + Hash>(
        &mut self,
        overlay: &Overlay<P>,
        devices: &Devices,
        (family, mac, remote): (OuterFamily, MacAddress, IpAddr),
    ) {
        let key = Key::Tunnel(family, mac);
        if let Some(request) = neighbours::unset(devices, key, Value::Remote(remote)) {
            self.steps.push((Step { key, value: None }, request));
        }
        if let Some(value) = overlay.wanted(key)
            && let Some(request) = neighbours::set(devices, key, value)
        {
            self.steps.push((Step { key, value: Some(value) }, request));
        }
    }
}

fn keys_of_mac(mac: &MacAddress) -> [Key; 3] {
    let tunnel = |family| Key::Tunnel(family, *mac);
    [tunnel(OuterFamily::V4), tunnel(OuterFamily::V6), Key::Forward(*mac)]
}

fn can_be_endpoint(mac: &MacAddress) -> bool {
    *mac != neighbours::ALL_ZERO && mac[0] & 1 == 0
}

/// The entry or its device is not there.
fn is_gone(error: &RequestError) -> bool {
    [Errno::NOENT, Errno::NODEV, Errno::NXIO].into_iter().any(|errno| error.is(errno))
}
