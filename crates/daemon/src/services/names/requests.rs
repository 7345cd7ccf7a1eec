//! `weft dns-lookup`, `dns-add` and `dns-remove`.

use std::net::IpAddr;
use std::sync::{Arc, PoisonError};

use hickory_proto::rr::Name;
use tokio::sync::{mpsc, oneshot};
use weft_api::{
    ApiError, DnsAddRequest, DnsLookupRequest, DnsName, DnsRecord, DnsRemoveRequest, ErrorKind,
};
use weft_crypto::PeerId;
use weft_mesh::{NamePort, NameRecord, Transport, limits};

use super::zone::{DEFAULT_NETWORK, Entry, Found, Scope, Source, Zone, is_reserved};
use super::{NAMES_FILE, Names};
use crate::core::control::{NamesSnapshot, Request};

/// Records in one answer.
const RECORDS_MAX: usize = 10_000;

impl Names {
    /// The addresses of a name or the names of an address, as a container on the network sees them; without a
    /// network, as the host does. `nickname` names a host.
    pub(crate) async fn lookup(
        &self,
        control: &mpsc::Sender<Request>,
        request: &DnsLookupRequest,
        nickname: impl Fn(PeerId) -> Option<String>,
    ) -> Result<Vec<DnsRecord>, ApiError> {
        if let Some(network) = &request.network {
            self.check_network(control, &network.to_ascii_lowercase()).await?;
        }
        let scope = match &request.network {
            Some(network) => Scope::Network(network.to_ascii_lowercase()),
            None => Scope::Host,
        };
        let zone = self.zone_now();
        let records = match request.name.parse::<IpAddr>() {
            Ok(address) => of_address(&zone, &scope, address, self.local, &nickname),
            Err(_) => {
                let (name, entry) = self.of_name(&zone, &scope, &request.name)?;
                let network = request.network.as_deref().unwrap_or_default();
                records(&name.to_ascii(), network, entry, self.local, &nickname, |_| true)
            }
        };
        if records.is_empty() {
            let known = zone.list(&scope, None).len();
            let of =
                request.network.as_ref().map(|it| format!(" on network {it}")).unwrap_or_default();
            let text = format!(
                "{} has no entry{of} ({known} names are known); weft ps on its host shows whether it is attached, weft dns-add gives a name",
                request.name
            );
            return Err(ApiError::new(ErrorKind::NotFound, text));
        }
        Ok(records.into_iter().take(RECORDS_MAX).collect())
    }

    /// Refuses a network that this host is not on. The core is asked of one that is not in the zone: it may be new.
    async fn check_network(
        &self,
        control: &mpsc::Sender<Request>,
        network: &str,
    ) -> Result<(), ApiError> {
        if network == DEFAULT_NETWORK || self.zone_now().has_network(network) {
            return Ok(());
        }
        let (reply, told) = oneshot::channel();
        let _ = control.send(Request::Names { reply }).await;
        let NamesSnapshot { networks, .. } = told.await.map_err(stopping)?;
        if networks.iter().any(|known| known.name == network) {
            return Ok(());
        }
        let text =
            format!("network {network} is not on this host; weft network ls lists those that are");
        Err(ApiError::new(ErrorKind::NotFound, text))
    }

    /// The entry of a name: below the domain, or absolute.
    fn of_name<'a>(
        &self,
        zone: &'a Zone,
        scope: &Scope,
        text: &str,
    ) -> Result<(Name, &'a Entry), ApiError> {
        let unfit = |error: hickory_proto::ProtoError| {
            let text = format!("{text} is no name of DNS: {error}");
            ApiError::new(ErrorKind::BadRequest, text)
        };
        let mut given = Name::from_ascii(text).map_err(unfit)?;
        given.set_fqdn(true);
        let below = match zone.domain().zone_of(&given) {
            true => given.clone(),
            false => {
                let mut below = given.clone().append_domain(zone.domain()).map_err(unfit)?;
                below.set_fqdn(true);
                below
            }
        };
        match zone.find(scope, &below) {
            Some(Found::Entry(entry) | Found::Service(_, _, entry)) => Ok((below, entry)),
            _ => Err(ApiError::new(
                ErrorKind::NotFound,
                format!(
                    "no container and no entry has the name {text}; weft ps on each host lists its containers, weft dns-add gives a name"
                ),
            )),
        }
    }

    /// Gives addresses a name, beside those that it has from this host.
    pub(crate) async fn add(
        self: Arc<Self>,
        control: mpsc::Sender<Request>,
        request: DnsAddRequest,
    ) -> Result<Vec<DnsName>, ApiError> {
        let network = network_of(request.network);
        let ports = request.ports.iter().map(|text| parse_port(text)).collect::<Result<_, _>>()?;
        let record = NameRecord {
            name: self.relative(&request.name, &network),
            network,
            addresses: request.addresses,
            ports,
            is_client: false,
        };
        let reserved = is_reserved(&record.name).then_some("the name means each machine itself");
        if let Some(fault) = record.fault().or(reserved) {
            let text = format!("{} is not added: {fault}", request.name);
            return Err(ApiError::new(ErrorKind::BadRequest, text));
        }
        self.check_network(&control, &record.network).await?;
        self.change(control, move |names| {
            let same = |it: &&mut NameRecord| (&it.name, &it.network) == (&record.name, &record.network);
            match names.iter_mut().find(same) {
                Some(known) => {
                    known.addresses.extend(&record.addresses);
                    known.addresses.sort_unstable();
                    known.addresses.dedup();
                    known.ports.extend(record.ports);
                    known.ports.sort_unstable();
                    known.ports.dedup();
                    if let Some(fault) = known.fault() {
                        return Err(ApiError::new(ErrorKind::Conflict, format!("{} is not added: {fault}", record.name)));
                    }
                }
                None => names.push(record),
            }
            if names.len() > limits::NAMES_BY_HAND_MAX {
                let text = format!(
                    "this host has {} names given by hand, and no more are possible; remove some with weft dns-remove",
                    limits::NAMES_BY_HAND_MAX
                );
                return Err(ApiError::new(ErrorKind::Conflict, text));
            }
            Ok(())
        })
        .await
    }

    /// Takes a name, or some of its addresses, back.
    pub(crate) async fn remove(
        self: Arc<Self>,
        control: mpsc::Sender<Request>,
        request: DnsRemoveRequest,
    ) -> Result<Vec<DnsName>, ApiError> {
        let network = network_of(request.network);
        let key = (self.relative(&request.name, &network), network);
        self.change(control, move |names| {
            let before = names.clone();
            for record in names.iter_mut().filter(|it| (&it.name, &it.network) == (&key.0, &key.1)) {
                let gone = |it: &IpAddr| request.addresses.is_empty() || request.addresses.contains(it);
                record.addresses.retain(|it| !gone(it));
            }
            names.retain(|record| !record.addresses.is_empty());
            if *names == before {
                let text = format!(
                    "{} was not given by hand on this host, so it cannot be removed here; weft dns-lookup {} shows which host announces it",
                    key.0, key.0
                );
                return Err(ApiError::new(ErrorKind::NotFound, text));
            }
            Ok(())
        })
        .await
    }

    /// The name in lower case, without the domain, and without the network before the domain.
    fn relative(&self, text: &str, network: &str) -> String {
        let text = text.trim_end_matches('.').to_ascii_lowercase();
        let without =
            |text: &str, last: &str| text.strip_suffix(last)?.strip_suffix('.').map(str::to_owned);
        let Some(below) = without(&text, &self.domain().to_ascii_lowercase()) else { return text };
        without(&below, network).unwrap_or(below)
    }

    /// Changes the names given by hand, on a separate thread, since it waits for the disk. It goes on to its end
    /// if the caller leaves.
    async fn change(
        self: Arc<Self>,
        control: mpsc::Sender<Request>,
        change: impl FnOnce(&mut Vec<NameRecord>) -> Result<(), ApiError> + Send + 'static,
    ) -> Result<Vec<DnsName>, ApiError> {
        let changed = tokio::task::spawn_blocking(move || self.change_now(&control, change)).await;
        changed.map_err(|error| ApiError::new(ErrorKind::Internal, error))?
    }

    /// Changes the names given by hand: on disk, then in the mesh. Returns all of them.
    fn change_now(
        &self,
        control: &mpsc::Sender<Request>,
        change: impl FnOnce(&mut Vec<NameRecord>) -> Result<(), ApiError>,
    ) -> Result<Vec<DnsName>, ApiError> {
        let _changing = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let mut names = self.added_now();
        change(&mut names)?;
        self.store
            .save(NAMES_FILE, &names)
            .map_err(|error| ApiError::new(ErrorKind::Unavailable, error))?;
        self.added.lock().unwrap_or_else(PoisonError::into_inner).clone_from(&names);
        let (reply, told) = oneshot::channel();
        let _ = control.blocking_send(Request::SetNames { names: self.own_now(), reply });
        told.blocking_recv()
            .map_err(stopping)?
            .map_err(|error| ApiError::new(ErrorKind::Internal, error))?;
        Ok(names.iter().map(shown).collect())
    }
}

/// The network of a request, in lower case.
fn network_of(given: Option<String>) -> String {
    given.map_or_else(|| DEFAULT_NETWORK.to_owned(), |it| it.to_ascii_lowercase())
}

fn stopping(_: oneshot::error::RecvError) -> ApiError {
    ApiError::new(ErrorKind::Unavailable, "weft is stopping")
}

fn shown(record: &NameRecord) -> DnsName {
    let port = |it: &NamePort| format!("{}/{}:{}", it.service, transport(it.transport), it.port);
    DnsName {
        name: record.name.clone(),
        network: record.network.clone(),
        addresses: record.addresses.clone(),
        ports: record.ports.iter().map(port).collect(),
    }
}

const fn transport(transport: Transport) -> &'static str {
    match transport {
        Transport::Tcp => "tcp",
        Transport::Udp => "udp",
        Transport::Sctp => "sctp",
    }
}

/// `SERVICE/PROTOCOL:PORT`.
fn parse_port(text: &str) -> Result<NamePort, ApiError> {
    let parse = || {
        let (service, rest) = text.split_once('/')?;
        let (protocol, port) = rest.split_once(':')?;
        let transports = [Transport::Tcp, Transport::Udp, Transport::Sctp];
        let transport = transports.into_iter().find(|it| transport(*it) == protocol)?;
        Some(NamePort {
            service: service.to_ascii_lowercase(),
            transport,
            port: port.parse().ok()?,
        })
    };
    parse().ok_or_else(|| {
        let text = format!("{text} is not SERVICE/PROTOCOL:PORT, such as http/tcp:80");
        ApiError::new(ErrorKind::BadRequest, text)
    })
}

fn of_address(
    zone: &Zone,
    scope: &Scope,
    address: IpAddr,
    local: PeerId,
    nickname: &impl Fn(PeerId) -> Option<String>,
) -> Vec<DnsRecord> {
    let named = zone.list(scope, Some(address)).into_iter();
    named
        .flat_map(|(network, name, entry)| {
            let full = zone.full_name(scope, network, name);
            let full = full.map(|it| it.to_ascii()).unwrap_or_default();
            records(&full, network, entry, local, nickname, |it| it == address)
        })
        .collect()
}

fn records(
    name: &str,
    network: &str,
    entry: &Entry,
    local: PeerId,
    nickname: &impl Fn(PeerId) -> Option<String>,
    wanted: impl Fn(IpAddr) -> bool,
) -> Vec<DnsRecord> {
    let held = entry.held().iter().filter(|held| wanted(held.address));
    held.map(|held| DnsRecord {
        name: name.trim_end_matches('.').to_owned(),
        network: network.to_owned(),
        address: held.address,
        peer: held.owner.to_hex(),
        nickname: nickname(held.owner),
        local: held.owner == local,
        source: match held.source {
            Source::Container => "container",
            Source::Client => "client",
            Source::Added => "added",
        }
        .to_owned(),
    })
    .collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::config::LaunchOptions;
    use crate::core::control::NetworkNames;
    use crate::upkeep::store::Store;

    const NO_NAME: fn(PeerId) -> Option<String> = |_| None;

    /// The service's state, and a core that takes all names and has the networks `weft` and `shop`. The zone has none
    /// yet.
    fn names(dir: &std::path::Path) -> (Arc<Names>, mpsc::Sender<Request>) {
        let file = tempfile::NamedTempFile::new().unwrap();
        let settings = LaunchOptions::default()
            .settings(Some(file.path()), std::path::Path::new("/r"))
            .unwrap();
        let local = PeerId::from_bytes([1; 32]);
        let names = Arc::new(Names::new(&settings, local, Store::open(dir).unwrap()).unwrap());
        let (control, mut requests) = mpsc::channel(4);
        tokio::spawn(async move {
            while let Some(request) = requests.recv().await {
                match request {
                    Request::SetNames { reply, .. } => _ = reply.send(Ok(())),
                    Request::Names { reply } => _ = reply.send(snapshot()),
                    _ => panic!("another request"),
                }
            }
        });
        (names, control)
    }

    fn snapshot() -> NamesSnapshot {
        let network = |name: &str| NetworkNames {
            name: name.to_owned(),
            ranges: Vec::new(),
            is_internal: false,
            hosts: Vec::new(),
        };
        let networks = vec![network("weft"), network("shop")];
        NamesSnapshot { networks, revision: 1, is_complete: true }
    }

    fn add(name: &str, addresses: &[&str]) -> DnsAddRequest {
        DnsAddRequest {
            name: name.to_owned(),
            network: None,
            addresses: addresses.iter().map(|it| it.parse().unwrap()).collect(),
            ports: Vec::new(),
        }
    }

    fn remove(name: &str, addresses: &[&str]) -> DnsRemoveRequest {
        let DnsAddRequest { name, network, addresses, .. } = add(name, addresses);
        DnsRemoveRequest { name, network, addresses }
    }

    #[tokio::test]
    async fn names_given_by_hand_are_kept_on_disk_and_taken_back() {
        let dir = tempfile::tempdir().unwrap();
        let (one, control) = names(dir.path());
        Arc::clone(&one).add(control.clone(), add("DB", &["192.0.2.1"])).await.unwrap();
        let all = Arc::clone(&one)
            .add(control.clone(), add("db.weft.local.", &["192.0.2.2", "192.0.2.1"]))
            .await
            .unwrap();
        assert_eq!((all.len(), all[0].name.as_str(), all[0].addresses.len()), (1, "db", 2));
        let mut with_port = add("web", &["fd00::1"]);
        with_port.ports = vec!["HTTP/tcp:80".into()];
        let all = Arc::clone(&one).add(control.clone(), with_port).await.unwrap();
        assert_eq!(all[1].ports, ["http/tcp:80"]);

        let (again, control) = names(dir.path());
        assert_eq!(again.added_now().len(), 2);
        let all =
            Arc::clone(&again).remove(control.clone(), remove("db", &["192.0.2.1"])).await.unwrap();
        assert_eq!(all[0].addresses, ["192.0.2.2".parse::<IpAddr>().unwrap()]);
        assert_eq!(
            Arc::clone(&again).remove(control.clone(), remove("Db", &[])).await.unwrap().len(),
            1
        );
        let error =
            Arc::clone(&again).remove(control.clone(), remove("db", &[])).await.unwrap_err();
        assert_eq!(error.kind, ErrorKind::NotFound);
        assert!(error.error.contains("weft dns-lookup db"), "{error}");
    }

    #[tokio::test]
    async fn each_bad_field_is_refused_and_changes_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let (names, control) = names(dir.path());
        let port =
            |text: &str| DnsAddRequest { ports: vec![text.into()], ..add("a", &["192.0.2.1"]) };
        let bad = [
            add("", &["192.0.2.1"]),
            add("a b", &["192.0.2.1"]),
            add("LocalHost", &["192.0.2.1"]),
            add("\u{e4}", &["192.0.2.1"]),
            add(&"a.".repeat(100), &["192.0.2.1"]),
            add("a", &[]),
            add("a", &["0.0.0.0"]),
            add("a", &["ff02::1"]),
            DnsAddRequest { addresses: vec![[192, 0, 2, 1].into(); 17], ..add("a", &[]) },
            DnsAddRequest { network: Some("a.b".into()), ..add("a", &["192.0.2.1"]) },
            DnsAddRequest { network: Some(String::new()), ..add("a", &["192.0.2.1"]) },
            port(""),
            port("http"),
            port("http/tcp"),
            port("http/icmp:80"),
            port("http/tcp:0"),
            port("http/tcp:65536"),
            port("/tcp:80"),
        ];
        for request in bad {
            let error = Arc::clone(&names).add(control.clone(), request.clone()).await.unwrap_err();
            assert_eq!(error.kind, ErrorKind::BadRequest, "{request:?}: {error}");
        }
        assert!(names.added_now().is_empty());
        for n in 0..17_u8 {
            let result = Arc::clone(&names)
                .add(control.clone(), add("full", &[&format!("192.0.2.{n}")]))
                .await;
            assert_eq!(result.is_err(), n == 16, "{n}");
        }
        assert_eq!(names.added_now()[0].addresses.len(), 16);
    }

    #[tokio::test]
    async fn a_lookup_of_nothing_says_what_to_do() {
        let dir = tempfile::tempdir().unwrap();
        let (names, control) = names(dir.path());
        let look = async |name: &str, network: Option<&str>| {
            let network = network.map(str::to_owned);
            let request = DnsLookupRequest { name: name.to_owned(), network };
            names.lookup(&control, &request, NO_NAME).await.unwrap_err()
        };
        for (name, network) in [("web", None), ("192.0.2.1", None), ("fd00::1", Some("Shop"))] {
            let error = look(name, network).await;
            assert_eq!(error.kind, ErrorKind::NotFound);
            assert!(error.error.contains(name) && error.error.contains("weft ps"), "{error}");
        }
        assert_eq!(look("a..b", None).await.kind, ErrorKind::BadRequest);
        assert_eq!(look(&"a".repeat(300), None).await.kind, ErrorKind::BadRequest);
        let error = look("web", Some("Bank")).await;
        assert_eq!(error.kind, ErrorKind::NotFound);
        assert!(error.error.contains("bank is not on this host"), "{error}");
        assert!(error.error.contains("weft network ls"), "{error}");
    }

    #[tokio::test]
    async fn a_name_is_given_on_a_network_of_this_host_alone_and_taken_back_on_any() {
        let dir = tempfile::tempdir().unwrap();
        let bank = NameRecord {
            name: "db".into(),
            network: "bank".into(),
            addresses: vec![[192, 0, 2, 9].into()],
            ports: Vec::new(),
            is_client: false,
        };
        // It was given while this host was on that network.
        Store::open(dir.path()).unwrap().save(NAMES_FILE, &vec![bank]).unwrap();
        let (names, control) = names(dir.path());
        let on = |network: &str, name: &str| DnsAddRequest {
            network: Some(network.to_owned()),
            ..add(name, &["192.0.2.1"])
        };
        let error = Arc::clone(&names).add(control.clone(), on("bank", "web")).await.unwrap_err();
        assert_eq!(error.kind, ErrorKind::NotFound);
        assert!(error.error.contains("network bank is not on this host"), "{error}");
        assert!(error.error.contains("weft network ls"), "{error}");
        let mut all = Vec::new();
        // All of them are one name.
        for text in ["web", "web.weft.local", "Web.shop.weft.local."] {
            all = Arc::clone(&names).add(control.clone(), on("SHOP", text)).await.unwrap();
        }
        let shown: Vec<_> = all.iter().map(|it| (it.network.as_str(), it.name.as_str())).collect();
        assert_eq!(shown, [("bank", "db"), ("shop", "web")]);
        let gone = DnsRemoveRequest { network: Some("bank".into()), ..remove("db", &[]) };
        let left = Arc::clone(&names).remove(control.clone(), gone).await.unwrap();
        assert_eq!(left.len(), 1, "a name of a network that this host has left");
    }
}
