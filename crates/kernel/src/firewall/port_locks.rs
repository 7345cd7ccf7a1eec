//! The port lock on a bridge: a container's port may send only from its own Ethernet address and IP addresses. A
//! datapath has the same rules in its flows (`switch::odp`).
//!
//! The table judges frames as they come in by a port, before the bridge learns from them or answers them. A port of
//! Weft's that nobody has said anything of sends nothing: so a container's first frame finds its lock closed.
//!
//! The table is written by `nft`, with all elements, in one transaction. Elements that change with a container are
//! written by netlink.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::{Arc, PoisonError},
    time::Duration,
};

use serde_json::Value;
use tokio::sync::Mutex;

use super::{
    elements::{
        DeviceName, ELEMENTS_MAX, Element, Elements, Family, OwnChanges, Set, Step, device_name,
    },
    nft::{Listing, TAG, Table},
    nft_watch::NftWatch,
};
use crate::{
    error::KernelError,
    handle::Kernel,
    net::{bridge::BRIDGE_PORTS_MAX, link::check_name, neighbours::MacAddress},
    switch::port_lock::{LOCK_ADDRESSES_MAX, PortLock},
};

const TABLE: Table = Table { family: "bridge", name: "weft-ports" };
/// The most ports, of all bridges, that may be locked or open.
pub const PORT_LOCKS_MAX: usize = 16 * BRIDGE_PORTS_MAX;
/// How long it is kept in mind which port had a frame dropped, in seconds.
const OFFENDER_KNOWN_S: u32 = 60;
/// How long a change waits while the table is written, in milliseconds.
const PATIENCE_MS: u64 = 2_000;
/// Before programs that change addresses (NF_BR_PRI_NAT_DST_BRIDGED is -300).
const PRIORITY: i32 = -310;

const fn set(name: &'static str) -> Set {
    Set { family: Family::Bridge, table: TABLE.name, name }
}

/// Ports that may send from any address.
const OPEN: Set = set("open");
/// A port and its Ethernet address.
const MACS: Set = set("macs");
/// A port and one of its IP addresses.
const V4: Set = set("addresses4");
const V6: Set = set("addresses6");
/// The same as [`V6`]: `nft` takes no set of IPv6 addresses for the target of a message of neighbour discovery.
const TARGETS: Set = set("targets");
/// Ports that had a frame dropped of late.
const OFFENDERS: Set = set("offenders");
/// The sets with a port's members.
const SETS: [Set; 5] = [OPEN, MACS, V4, V6, TARGETS];

/// The reasons for a drop, as the names of counters.
const REASONS: [&str; 7] = ["mac", "vlan", "arp", "ip", "nd", "router", "dhcp"];

/// Frames that locked ports sent and that were dropped.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LockCounts {
    /// How many, by reason: `mac` (another Ethernet address), `vlan` (a tag), `arp`, `ip` and `nd` (another IP address
    /// as sender or as target of an answer), `router` (router advertisements and redirects), `dhcp` (of a server).
    pub dropped: BTreeMap<String, u64>,
    /// Ports that sent one in the last minute.
    pub ports: Vec<String>,
}

impl LockCounts {
    /// All dropped frames.
    #[must_use]
    pub fn all(&self) -> u64 {
        self.dropped.values().sum()
    }
}

/// The locks of a host's ports, and the nftables table that enforces them. Clones share the same state.
#[derive(Clone)]
pub struct PortLocks {
    kernel: Kernel,
    /// The beginning of the names of ports that are locked.
    prefix: String,
    wanted: Arc<std::sync::Mutex<Locked>>,
    shared: Arc<Mutex<Shared>>,
    own: OwnChanges,
}

/// Locks by port; `None`: it may send from any address.
type Locked = BTreeMap<String, Option<PortLock>>;

#[derive(Default)]
struct Shared {
    /// What the table holds, while it stands.
    held: Locked,
    /// Whether the table stands with these elements, as far as is known.
    stands: bool,
    /// How `nft` shows the table as it was written.
    written: Option<Vec<Value>>,
    counts: LockCounts,
    socket: Option<Elements>,
}

impl PortLocks {
    /// Locks ports whose names begin with `prefix`, 1 to 14 bytes, on all bridges: those in `wanted` as [`Self::set`]
    /// does. Nothing is written.
    ///
    /// # Errors
    /// [`KernelError::InvalidName`].
    pub fn new(
        kernel: Kernel,
        prefix: &str,
        wanted: BTreeMap<String, Option<PortLock>>,
    ) -> Result<Self, KernelError> {
        check_name(prefix)?;
        Ok(Self {
            kernel,
            prefix: prefix.to_owned(),
            wanted: Arc::new(std::sync::Mutex::new(wanted)),
            shared: Arc::default(),
            own: OwnChanges::default(),
        })
    }

    /// Sets what a port may send from; `None`: any address. It need not exist yet. Writes the table if there is none.
    ///
    /// # Errors
    /// See [`Self::ensure`], which then writes it; [`KernelError::TimedOut`] if `nft` is slow, which does not lose the
    /// change; [`KernelError::LockTooLong`], and [`KernelError::TableFull`] beyond [`PORT_LOCKS_MAX`] ports (nothing is
    /// changed).
    pub async fn set(&self, port: &str, lock: Option<PortLock>) -> Result<(), KernelError> {
        if let Some(lock) = &lock {
            lock.check(port)?;
        }
        {
            let mut wanted = self.wanted();
            if !wanted.contains_key(port) && wanted.len() >= PORT_LOCKS_MAX {
                let table = "locks of ports".into();
                return Err(KernelError::TableFull { table, limit: PORT_LOCKS_MAX });
            }
            wanted.insert(port.to_owned(), lock);
        }
        self.change().await
    }

    /// Forgets a port: one of that name sends nothing until it is set again.
    ///
    /// # Errors
    /// See [`Self::set`].
    pub async fn forget(&self, port: &str) -> Result<(), KernelError> {
        self.wanted().remove(port);
        self.change().await
    }

    /// Creates or restores the table, and returns its counts. Counts survive, except those of the moment before
    /// another program changed it.
    ///
    /// # Errors
    /// [`KernelError::TableTaken`] if another program's table has the name, [`KernelError::NftRefused`] also where
    /// the kernel cannot do it, [`KernelError::NftMissing`], [`KernelError::Program`], [`KernelError::Socket`],
    /// [`KernelError::NotPermitted`].
    pub async fn ensure(&self) -> Result<LockCounts, KernelError> {
        let mut shared = self.shared.lock().await;
        self.stand(&mut shared).await?;
        Ok(shared.counts.clone())
    }

    /// Watches the table for changes by other programs. Open it before [`Self::ensure`], so that none is missed.
    ///
    /// # Errors
    /// [`KernelError::Socket`] if the kernel gives no socket.
    pub fn watch(&self) -> Result<NftWatch, KernelError> {
        self.kernel.nft_watch(vec![TABLE], Some(self.own.clone()))
    }

    /// Removes the table. False if there was none.
    ///
    /// # Errors
    /// See [`Self::ensure`]; another program's table stays.
    pub async fn remove(kernel: &Kernel) -> Result<bool, KernelError> {
        let _one = kernel.inner.filters.lock().await;
        kernel.nft_remove(TABLE).await
    }

    fn wanted(&self) -> std::sync::MutexGuard<'_, Locked> {
        self.wanted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has the table follow a change. Who holds the state for longer looks for changes at the end.
    async fn change(&self) -> Result<(), KernelError> {
        let limit = Duration::from_millis(PATIENCE_MS);
        let Ok(mut shared) = tokio::time::timeout(limit, self.shared.lock()).await else {
            let doing = "write what a port may send from".into();
            return Err(KernelError::TimedOut { doing, limit_ms: PATIENCE_MS });
        };
        if shared.stands {
            self.follow(&mut shared).await;
        }
        if shared.stands { Ok(()) } else { self.stand(&mut shared).await }
    }

    /// Writes how what is wanted differs from what the table holds. If that fails, the table does not stand.
    async fn follow(&self, shared: &mut Shared) {
        let wanted = self.wanted().clone();
        let ports: BTreeSet<&String> = wanted.keys().chain(shared.held.keys()).collect();
        let differs = |port: &&&String| wanted.get(**port) != shared.held.get(**port);
        let (mut gone, mut new) = (BTreeSet::new(), BTreeSet::new());
        for port in ports.iter().filter(differs) {
            let (before, after) = (elements_of(&shared.held, port), elements_of(&wanted, port));
            gone.extend(before.difference(&after).cloned());
            new.extend(after.difference(&before).cloned());
        }
        let gone = by_set(gone).map(|(set, all)| Step::Remove(set, all));
        let steps: Vec<Step> =
            gone.chain(by_set(new).map(|(set, all)| Step::Add(set, all))).collect();
        if steps.is_empty() {
            return;
        }
        // If this future is dropped, the contents of the sets are unknown.
        shared.stands = false;
        let changed = match self.socket(shared) {
            Ok(socket) => {
                let changed = socket.change(&steps).await;
                changed.map_err(|error| error.while_doing("write what a port may send from"))
            }
            Err(error) => Err(error),
        };
        match changed {
            Ok(()) => (shared.held, shared.stands) = (wanted, true),
            Err(error) => {
                shared.socket = None;
                tracing::debug!(%error, "writing all port locks instead");
            }
        }
    }

    /// Makes the table hold all that is wanted, and reads its counts.
    async fn stand(&self, shared: &mut Shared) -> Result<(), KernelError> {
        let kernel = self.kernel.clone();
        let _one = kernel.inner.filters.lock().await;
        let found = kernel.nft_list_without_members(TABLE).await?;
        if found.as_ref().is_some_and(|found| !found.is_ours()) {
            return Err(TABLE.taken());
        }
        if let Some(found) = &found {
            shared.counts.dropped = dropped(found);
        }
        let is_written = |found: &Listing| shared.written.as_ref() == Some(&found.shape());
        let stands = shared.stands
            && found.as_ref().is_some_and(is_written)
            && self.is_whole(shared).await?;
        if stands {
            shared.counts.ports = self.offenders(shared).await?;
        } else {
            shared.stands = false;
            shared.counts.ports.clear();
            let wanted = self.wanted().clone();
            let text = self.text(&wanted, &shared.counts);
            kernel.nft_write(&text, "write the locks of ports").await?;
            let found = kernel.nft_list_without_members(TABLE).await?;
            shared.written = found.map(|found| found.shape());
            (shared.held, shared.stands) = (wanted, shared.written.is_some());
        }
        if shared.stands {
            self.follow(shared).await;
        }
        Ok(())
    }

    /// Whether the sets hold the elements that they should, and no others.
    async fn is_whole(&self, shared: &mut Shared) -> Result<bool, KernelError> {
        for set in SETS {
            let found: Option<BTreeSet<Element>> =
                self.list(shared, set).await?.into_iter().collect();
            let all = shared.held.keys().flat_map(|port| elements_of(&shared.held, port));
            let wanted = all.filter(|(of, _)| *of == set).map(|(_, element)| element);
            if found != Some(wanted.collect()) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    async fn offenders(&self, shared: &mut Shared) -> Result<Vec<String>, KernelError> {
        let found = self.list(shared, OFFENDERS).await?;
        let name = |element: Option<Element>| {
            let key = element?.key;
            let end = key.iter().position(|byte| *byte == 0).unwrap_or(key.len());
            String::from_utf8(key.get(..end)?.to_vec()).ok()
        };
        let names: BTreeSet<String> = found.into_iter().filter_map(name).collect();
        Ok(names.into_iter().collect())
    }

    async fn list(
        &self,
        shared: &mut Shared,
        set: Set,
    ) -> Result<Vec<Option<Element>>, KernelError> {
        let listed = self.socket(shared)?.list(set).await;
        listed.map_err(|error| {
            shared.socket = None;
            error.while_doing("list what ports may send from")
        })
    }

    fn socket<'a>(&self, shared: &'a mut Shared) -> Result<&'a mut Elements, KernelError> {
        let opened = match shared.socket.take() {
            Some(socket) => socket,
            None => Elements::open(&self.kernel, &self.own)?,
        };
        Ok(shared.socket.insert(opened))
    }

    /// The whole table in nft's language.
    fn text(&self, wanted: &Locked, counts: &LockCounts) -> String {
        let Table { family, name } = TABLE;
        let all: BTreeSet<_> =
            wanted.iter().flat_map(|(port, lock)| members(port, lock.as_ref())).collect();
        let set = |set: Set, key: &str, addresses: usize| {
            let of = all.iter().filter(|(at, _, _)| *at == set);
            let words: Vec<&str> = of.map(|(_, words, _)| words.as_str()).collect();
            let elements = match words.is_empty() {
                true => String::new(),
                false => format!("elements = {{ {} }};", words.join(", ")),
            };
            let size = addresses * PORT_LOCKS_MAX;
            format!("set {} {{ {key}; size {size}; {elements} }}", set.name)
        };
        let counter = |reason: &&str| {
            let packets = counts.dropped.get(*reason).copied().unwrap_or_default();
            format!("counter dropped-{reason} {{ packets {packets} bytes 0 }}")
        };
        let drop = |reason: &str| {
            format!("update @offenders {{ iifname }} counter name dropped-{reason} drop")
        };
        let mut lines = vec![
            format!("table {family} {name}"),
            format!("delete table {family} {name}"),
            format!("table {family} {name} {{"),
            format!("chain {TAG} {{ }}"),
        ];
        lines.extend(REASONS.iter().map(counter));
        let per_port = LOCK_ADDRESSES_MAX + 1;
        lines.extend([
            set(OPEN, "type ifname", 1),
            set(MACS, "type ifname . ether_addr", 1),
            set(V4, "type ifname . ipv4_addr", per_port),
            set(V6, "type ifname . ipv6_addr", per_port),
            set(TARGETS, "typeof iifname . @th,64,128", per_port),
            format!(
                "set {} {{ type ifname; size {PORT_LOCKS_MAX}; flags dynamic, timeout; \
                 timeout {OFFENDER_KNOWN_S}s; }}",
                OFFENDERS.name
            ),
        ]);
        lines.extend(chains(&self.prefix, drop));
        lines.push("}\n".to_owned());
        lines.join("\n")
    }
}

/// The rules. `drop` is what is done for a reason.
fn chains(prefix: &str, drop: impl Fn(&str) -> String) -> Vec<String> {
    let [mac, vlan, arp, ip, nd, router, dhcp] = REASONS.map(drop);
    vec![
        "chain check {".into(),
        format!("iifname . ether saddr != @macs {mac}"),
        // A tag may stand in the frame or beside it. One of VLAN 0 would hide what is behind it from these rules, but
        // not from its receiver.
        format!("ether type {{ 8021q, 8021ad }} {vlan}"),
        format!("meta protocol {{ 8021q, 8021ad }} {vlan}"),
        "meta protocol arp goto check-arp".into(),
        "meta protocol ip goto check-ip4".into(),
        "meta protocol ip6 goto check-ip6".into(),
        "}".into(),
        "chain check-arp {".into(),
        format!("arp htype != 1 {arp}"),
        format!("arp ptype != ip {arp}"),
        format!("arp hlen != 6 {arp}"),
        format!("arp plen != 4 {arp}"),
        format!("iifname . arp saddr ether != @macs {arp}"),
        // A probe (RFC 5227).
        "arp saddr ip 0.0.0.0 return".into(),
        format!("iifname . arp saddr ip != @addresses4 {arp}"),
        "}".into(),
        "chain check-ip4 {".into(),
        // A host without an address joins groups (RFC 3376 section 4.2.13).
        "ip saddr 0.0.0.0 ip protocol igmp return".into(),
        format!("iifname . ip saddr != @addresses4 {ip}"),
        format!("ip frag-off & 0x1fff == 0 udp sport 67 {dhcp}"),
        "}".into(),
        // Some kernels take the data of a later fragment for ports and types.
        "chain check-later6 {".into(),
        format!("iifname . ip6 saddr != @addresses6 {ip}"),
        "}".into(),
        "chain check-ip6 {".into(),
        "frag frag-off != 0 goto check-later6".into(),
        format!("icmpv6 type {{ nd-router-advert, nd-redirect }} {router}"),
        // Detection of duplicate addresses asks for the own address (RFC 4862 section 5.4).
        format!(
            "ip6 saddr :: icmpv6 type nd-neighbor-solicit iifname . @th,64,128 != @targets {nd}"
        ),
        format!("icmpv6 type nd-neighbor-advert iifname . @th,64,128 != @targets {nd}"),
        "ip6 saddr :: icmpv6 type { nd-neighbor-solicit, mld-listener-query, mld-listener-report, \
         mld-listener-done, mld2-listener-report } return"
            .into(),
        format!("iifname . ip6 saddr != @addresses6 {ip}"),
        format!("udp sport 547 {dhcp}"),
        "}".into(),
        format!(
            "chain prerouting {{ type filter hook prerouting priority {PRIORITY}; policy accept;"
        ),
        format!("iifname \"{prefix}*\" iifname != @open jump check"),
        "}".into(),
    ]
}

/// The elements of one port.
fn elements_of(all: &Locked, port: &str) -> BTreeSet<(Set, Element)> {
    let lock = all.get(port);
    let members = lock.into_iter().flat_map(|lock| members(port, lock.as_ref()));
    members.map(|(set, _, element)| (set, element)).collect()
}

/// The members of the sets for one port: in nft's words, and as the kernel has them.
fn members(port: &str, lock: Option<&PortLock>) -> Vec<(Set, String, Element)> {
    let name: DeviceName = device_name(port);
    let element = |rest: &[u8]| Element { key: [&name[..], rest].concat(), data: None };
    let Some(lock) = lock else { return vec![(OPEN, format!("\"{port}\""), element(&[]))] };
    let mac: MacAddress = lock.mac;
    let [a, b, c, d, e, f] = mac;
    let mac_words = format!("{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{f:02x}");
    let mut all =
        vec![(MACS, format!("\"{port}\" . {mac_words}"), element(&[&mac[..], &[0; 2]].concat()))];
    for address in lock.senders() {
        let words = format!("\"{port}\" . {address}");
        match address {
            IpAddr::V4(v4) => all.push((V4, words, element(&v4.octets()))),
            IpAddr::V6(v6) => {
                all.push((V6, words, element(&v6.octets())));
                let number = u128::from(v6);
                all.push((TARGETS, format!("\"{port}\" . {number:#x}"), element(&v6.octets())));
            }
        }
    }
    all
}

/// Runs of elements of one set each, few enough for one message.
fn by_set(all: BTreeSet<(Set, Element)>) -> impl Iterator<Item = (Set, Vec<Element>)> {
    let mut sets: BTreeMap<Set, Vec<Element>> = BTreeMap::new();
    for (set, element) in all {
        sets.entry(set).or_default().push(element);
    }
    sets.into_iter().flat_map(|(set, all)| {
        all.chunks(ELEMENTS_MAX).map(|part| (set, part.to_vec())).collect::<Vec<_>>()
    })
}

fn dropped(found: &Listing) -> BTreeMap<String, u64> {
    let counter = |reason: &str| {
        let is_it = |it: &&Value| it["name"] == format!("dropped-{reason}");
        let packets = found.of("counter").find(is_it)?["packets"].as_u64()?;
        Some((reason.to_owned(), packets))
    };
    REASONS.iter().filter_map(|reason| counter(reason)).collect()
}
