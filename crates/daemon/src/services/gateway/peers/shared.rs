//! What a gateway shares with others: the authority's documents, clients' addresses, places for profiles.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::sync::{oneshot, watch};
use weft_api::{ApiError, ErrorKind};
use weft_crypto::PeerId;
use weft_path::Vni;
use zeroize::Zeroizing;

use super::documents::{Content, Documents};
use super::exchange::OtherGateway;
use super::homes::{self, Replica, Taken};
use super::message::Versions;
use super::{Key, Peers, unix_ms};
use crate::core::control::Request;
use crate::devices::NETWORK;
use crate::services::attach::CLIENT_OWNER;
use crate::services::gateway::authority::Authority;
use crate::services::gateway::places::{self, Remote};
use crate::services::gateway::{AUTHORITY_FILE, Gateway, no_authority, owner_of};
use crate::services::networks::OnNetwork;
use crate::timestamp;

/// The file of a replica: the authority without its private key.
pub(in crate::services::gateway) const REPLICA_FILE: &str = "openvpn-replica.json";
/// How long a host that is to serve waits for the authority of another.
const FETCH_LIMIT: Duration = Duration::from_secs(10);
/// How long it waits to hear whether a linked host has one.
const TOLD_LIMIT: Duration = Duration::from_secs(2);
/// How often addresses are looked up anew, where other gateways have changed them meanwhile.
const LOOKUPS_MAX: usize = 4;

/// A document that gateways get from the authority's home.
struct Document {
    name: &'static str,
    /// What homes have it.
    of: Of,
    /// Its content at the home; `None`: there is none there, which replicas are told.
    read: fn(&Gateway) -> Option<Zeroizing<String>>,
    /// Takes the content on a replica, which saves it; `None`: the home has none. It comes from the home of what has this
    /// fingerprint. On a thread that may block.
    take: fn(&Gateway, Option<&str>, &str) -> Result<(), String>,
}

/// What gateways have in common, which is at home on one of them.
#[derive(Clone, Copy)]
enum Of {
    /// Weft's own authority.
    Authority,
    /// A configuration that was taken over.
    Import,
    /// Both.
    Any,
}

impl Of {
    /// Whether a home has such a document, by the fingerprint that it tells. So the home of an authority that hosts serve
    /// by cannot have them serve by a configuration, which decides more.
    fn is_at(self, fingerprint: &str) -> bool {
        match self {
            Self::Authority => !homes::is_import(fingerprint),
            Self::Import => homes::is_import(fingerprint),
            Self::Any => true,
        }
    }
}

/// All documents, in the order in which a replica takes them. The authority or the configuration is last: a host serves
/// once it has it.
const DOCUMENTS: [Document; 4] = [
    Document {
        name: "token-key",
        of: Of::Any,
        read: |gateway| Some(gateway.logins.key_document()),
        take: |gateway, content, _| {
            gateway.logins.take_key(content)?;
            gateway.follow_logins()
        },
    },
    Document {
        name: "users",
        of: Of::Any,
        read: |gateway| gateway.logins.users_document(),
        take: |gateway, content, _| {
            gateway.logins.take_users(content)?;
            gateway.follow_logins()
        },
    },
    Document {
        name: "authority",
        of: Of::Authority,
        read: Gateway::authority_document,
        take: |gateway, content, _| gateway.take_authority(content),
    },
    Document {
        name: "import",
        of: Of::Import,
        read: Gateway::import_document,
        take: Gateway::take_import,
    },
];

/// Their names.
pub(super) const NAMES: [&str; DOCUMENTS.len()] = {
    let mut names = [""; DOCUMENTS.len()];
    let mut index = 0;
    while index < names.len() {
        names[index] = DOCUMENTS[index].name;
        index += 1;
    }
    names
};

impl Peers {
    /// The linked host of this name, or with this peer id, that serves or is to.
    ///
    /// # Errors
    /// There is none, or there are several.
    pub(in crate::services::gateway) fn serving(
        &self,
        host: &str,
    ) -> Result<(PeerId, String), String> {
        let all: Vec<OtherGateway> = self.with_quietly(|state| state.gateways().cloned().collect());
        let is_it = |it: &&OtherGateway| it.nickname == host || it.peer.to_hex() == host;
        let linked: Vec<&OtherGateway> =
            all.iter().filter(is_it).filter(|it| it.is_linked).collect();
        match linked[..] {
            [one] => Ok((one.peer, one.nickname.clone())),
            [] => Err(format!(
                "no host {host} that is linked with this one serves OpenVPN clients: run weft openvpn serve there first"
            )),
            _ => Err(format!("several hosts are named {host}: give the peer id of one")),
        }
    }

    /// This host follows another home of its authority from now on.
    pub(in crate::services::gateway) fn follow(
        &self,
        home: PeerId,
        nickname: String,
        fingerprint: String,
    ) {
        let (versions, as_of) = (Versions::new(), unix_ms() / 1_000);
        let replica = Replica { fingerprint, home, nickname, versions, as_of };
        self.with(|state| state.follow(replica));
    }

    /// A linked host that is the home of this authority.
    pub(in crate::services::gateway) fn home_of(&self, fingerprint: &str) -> Option<String> {
        self.with_quietly(|state| state.home_of(fingerprint))
    }

    /// Changes each time when something was carried out.
    pub(in crate::services::gateway) fn news(&self) -> watch::Receiver<u64> {
        self.news.subscribe()
    }
}

impl Gateway {
    /// The documents of this host, its authority or its configuration have changed: other gateways are told at once.
    pub(in crate::services::gateway) fn authority_changed(&self) {
        let (authority, import) = (self.authority_now(), self.imported_now());
        let mut epochs = match &import {
            Some(import) => import.revoked_by_hand(),
            None => authority.as_ref().map(Authority::revocations).unwrap_or_default(),
        };
        for (name, count) in self.logins.removals() {
            *epochs.entry(name).or_default() += count;
        }
        let home = match import {
            Some(import) => (!import.is_replica()).then(|| import.fingerprint()),
            None => authority
                .filter(Authority::is_home)
                .and_then(|authority| Some(authority.shown().ok()?.fingerprint)),
        };
        let home = home.map(|fingerprint| {
            let content = |document: &Document| {
                let text = (document.read)(self).unwrap_or_default();
                (document.name.to_owned(), Content(text))
            };
            let its = DOCUMENTS.iter().filter(|document| document.of.is_at(&fingerprint));
            let all = its.map(content).collect();
            Documents::new(fingerprint, all)
        });
        self.peers.with(|state| {
            state.set_home(home);
            state.set_revocations(epochs);
        });
    }

    /// Takes a document of the authority's home. A host that has an authority of its own takes none.
    pub(super) fn take_document(&self, taken: &Taken) -> Result<(), String> {
        if self.authority_now().is_some_and(|authority| authority.is_home()) {
            return Err("this host has a certificate authority of its own".into());
        }
        let fingerprint = &taken.home.fingerprint;
        let mut known = DOCUMENTS.iter().filter(|document| document.of.is_at(fingerprint));
        let document = known.find(|document| document.name == taken.document);
        let document = document.ok_or("its home has no such document")?;
        let content = Some(taken.content.0.as_str()).filter(|content| !content.is_empty());
        (document.take)(self, content, fingerprint)
    }

    /// Waits for the authority or the configuration of another host, for as long as it seems to come: of several that of
    /// the host that serves on this network.
    pub(in crate::services::gateway) async fn fetch_authority(
        &self,
        network: Option<String>,
    ) -> Result<(), ApiError> {
        self.peers.with(|state| state.want_authority(network));
        let begun = tokio::time::Instant::now();
        let mut news = self.peers.news.subscribe();
        loop {
            if self.authority_now().is_some() || self.imported_now().is_some() {
                return Ok(());
            }
            let (home, is_told, conflicts) =
                self.peers.with_quietly(|state| (state.home(), state.is_told(), state.conflicts()));
            if let Some(conflict) = conflicts.into_iter().next() {
                return Err(ApiError::new(ErrorKind::Conflict, conflict));
            }
            let limit = if home.is_some() { FETCH_LIMIT } else { TOLD_LIMIT };
            let left = limit.saturating_sub(begun.elapsed());
            if home.is_some() && left.is_zero() {
                let text = "another host has an authority or a configuration, which has not come in time: try again; the log of weft says more";
                return Err(ApiError::new(ErrorKind::Unavailable, text));
            }
            if (home.is_none() && is_told) || left.is_zero() {
                return Err(no_authority());
            }
            let _ = tokio::time::timeout(left, news.changed()).await;
        }
    }

    /// The addresses of a client on a network: those that all gateways know, or new ones of this host's range. Where a
    /// configuration was taken over, `kept` are its address by its file and the one that it had last.
    pub(in crate::services::gateway) async fn client_addresses(
        &self,
        network: &OnNetwork,
        name: &str,
        kept: Option<Kept>,
    ) -> Result<Vec<IpAddr>, String> {
        let key: Key = (network.name.clone(), name.to_owned());
        let owner = owner_of(&network.name, name);
        for _ in 0..LOOKUPS_MAX {
            let _giving = self.peers.giving.read().await;
            let known = self.peers.with_quietly(|state| state.addresses(&key));
            if let Some((by, addresses)) = &known
                && *by != self.peers.local
                && (self.is_replica() || kept.is_none_or(|kept| kept.fits(addresses)))
                && self.is_member(*by).await
            {
                return Ok(addresses.clone());
            }
            let of = (owner.as_str(), network.vni);
            let given = match kept {
                Some(Kept { fixed, last, wants_ipv6 }) => {
                    self.imported_addresses(of, (fixed, last), wants_ipv6).await?
                }
                None => {
                    let given = self.attachments.addresses_for(of, None).await;
                    given.map_err(|error| error.to_string())?
                }
            };
            let given: Vec<IpAddr> = given.iter().map(ipnet::IpNet::addr).collect();
            let is_noted = self
                .peers
                .with(|state| state.give(key.clone(), given.clone(), known.as_ref(), unix_ms()));
            if is_noted {
                return Ok(given);
            }
            if self
                .peers
                .with_quietly(|state| state.addresses(&key))
                .is_some_and(|(by, _)| by != self.peers.local)
            {
                self.attachments.tell(Request::Release { owner: owner.clone() }).await;
            }
        }
        Err("other gateways change its addresses all the time".into())
    }

    /// This host's places for profiles.
    pub(super) async fn own_places(&self) -> Vec<String> {
        self.own_remotes().await.unwrap_or_default().iter().map(places::told).collect()
    }

    /// This host's servers for profiles.
    pub(in crate::services::gateway) async fn own_remotes(&self) -> Result<Vec<Remote>, ApiError> {
        let host = crate::upkeep::reach::own_address(self.peers.host, &self.kernel).await;
        self.remotes(host)
    }

    /// All places for a client's profile, those of all gateways of one network that serve by the same as this host. Which
    /// gateway comes first depends on the client's name, so that clients spread over them. Places over UDP come before
    /// those over TCP.
    pub(in crate::services::gateway) async fn places(
        &self,
        name: &str,
    ) -> Result<Vec<Remote>, ApiError> {
        let wanted = self.wanted_now();
        let all: Vec<OtherGateway> = self.peers.with_quietly(|state| {
            let own = state.fingerprint().unwrap_or_default();
            let is_same = |by: &str| by.is_empty() || own.is_empty() || by == own;
            state.gateways().filter(|it| is_same(&it.serves.by)).cloned().collect()
        });
        let network = wanted.as_ref().map(|wanted| wanted.network().to_owned());
        let network = network.or_else(|| all.first().map(|it| it.serves.network.clone()));
        let mut gateways: Vec<(PeerId, Vec<String>)> = Vec::new();
        for other in all.into_iter().filter(|it| Some(&it.serves.network) == network.as_ref()) {
            if other.is_linked || self.is_member(other.peer).await {
                gateways.push((other.peer, other.serves.remotes));
            }
        }
        if wanted.is_some() || gateways.is_empty() {
            let own = self.own_remotes().await?.iter().map(places::told).collect();
            gateways.push((self.peers.local, own));
        }
        gateways.sort();
        let spread =
            name.bytes().fold(0_usize, |sum, byte| sum.wrapping_mul(31) + usize::from(byte));
        let first = spread % gateways.len().max(1);
        gateways.rotate_left(first);
        let told = gateways.iter().flat_map(|(_, remotes)| remotes);
        let mut all: Vec<Remote> = told.filter_map(|text| places::heard(text)).collect();
        all.sort_by_key(|(_, _, is_tcp)| *is_tcp);
        Ok(all)
    }

    /// At the start: what this host knows is told to others. So are addresses that it gave before it knew of others.
    pub(super) async fn begin_exchange(self: &Arc<Self>) {
        // An administrator may have moved the files away, so that the host follows another home.
        if self.authority_now().is_none() && matches!(self.imported(), Ok(None)) {
            self.peers.with(super::exchange::Exchange::forget_home);
        }
        let gateway = Arc::clone(self);
        let _ = tokio::task::spawn_blocking(move || gateway.authority_changed()).await;
        let gateway = Arc::clone(self);
        tokio::spawn(async move {
            for held in gateway.attachments.allocations().await {
                let Some(key) = client_of(&held.owner) else { continue };
                if gateway.peers.addresses(&key).is_some() || !gateway.shares_addresses(&key.0) {
                    continue;
                }
                if gateway.imported_now().is_some_and(|import| import.network() == key.0) {
                    gateway.tell_addresses(&[(held.owner, held.vni, held.address)]).await;
                    continue;
                }
                let _giving = gateway.peers.giving.read().await;
                let owner = (held.owner.as_str(), held.vni);
                let Ok(given) = gateway.attachments.addresses_for(owner, None).await else {
                    continue;
                };
                let given = given.iter().map(ipnet::IpNet::addr).collect();
                gateway.peers.with(|state| state.give(key, given, None, unix_ms()));
            }
        });
    }

    /// Tells other gateways the addresses that a configuration gives to clients.
    pub(in crate::services::gateway) async fn tell_addresses(&self, held: &[Held]) {
        for (owner, _, address) in held.iter().filter(|(.., address)| address.is_ipv4()) {
            let Some(key) = client_of(owner).filter(|key| self.shares_addresses(&key.0)) else {
                continue;
            };
            let _giving = self.peers.giving.read().await;
            self.peers.with(|state| {
                let known = state.addresses(&key);
                if known.as_ref().is_none_or(|(_, addresses)| !addresses.contains(address)) {
                    state.give(key, vec![*address], known.as_ref(), unix_ms());
                }
            });
        }
    }

    /// Whether all gateways give a client the same addresses on a network. Where a name may be connected several times,
    /// each has its own.
    fn shares_addresses(&self, network: &str) -> bool {
        let import = self.imported_now();
        let import = import.filter(|import| import.network() == network);
        import.is_none_or(|import| !import.allows_duplicates())
    }

    /// Other gateways, for status.
    fn shown_gateways(&self) -> Vec<weft_api::OtherGateway> {
        let shown = |it: &OtherGateway| weft_api::OtherGateway {
            name: it.nickname.clone(),
            peer: it.peer.to_hex(),
            state: match (it.is_linked, it.serves.is_serving) {
                (false, _) => "away",
                (true, true) => "serving",
                (true, false) => "waiting",
            }
            .into(),
            network: it.serves.network.clone(),
            remotes: it.serves.remotes.clone(),
        };
        self.peers.with_quietly(|state| state.gateways().map(shown).collect())
    }

    /// The gateway, for status, with what it has to do with others.
    pub(in crate::services::gateway) fn with_others(
        &self,
        own: weft_api::Gateway,
    ) -> weft_api::Gateway {
        weft_api::Gateway {
            authority: self.shown_home(),
            gateways: self.shown_gateways(),
            addresses_agreed_by: Some(weft_api::ADDRESSES_FIRST_HOST.into()),
            ..own
        }
    }

    /// The home of the authority, for status.
    pub(in crate::services::gateway) fn shown_home(&self) -> Option<weft_api::AuthorityHome> {
        let now = timestamp::format(SystemTime::now());
        let (fingerprint, is_here) = match self.imported_now() {
            Some(import) => {
                // Without certificates of clients there may be no authority.
                let shown = import.shown().map(|shown| shown.fingerprint);
                (shown.unwrap_or_else(|_| import.fingerprint()), !import.is_replica())
            }
            None => {
                let authority = self.authority_now()?;
                (authority.shown().ok()?.fingerprint, authority.is_home())
            }
        };
        if is_here {
            let name = self.nickname.clone();
            return Some(weft_api::AuthorityHome {
                name,
                fingerprint,
                is_here: true,
                is_linked: true,
                as_of: now,
            });
        }
        self.peers.with_quietly(|state| {
            let replica = state.replica()?;
            let is_linked = state.home().is_some();
            let then = UNIX_EPOCH + Duration::from_secs(replica.as_of);
            Some(weft_api::AuthorityHome {
                name: replica.nickname.clone(),
                fingerprint,
                is_here: false,
                is_linked,
                as_of: if is_linked { now } else { timestamp::format(then) },
            })
        })
    }

    async fn is_member(&self, peer: PeerId) -> bool {
        let (reply, answer) = oneshot::channel();
        self.attachments.tell(Request::IsMember { peer, reply }).await;
        // A daemon that ends keeps what it knows.
        answer.await.unwrap_or(true)
    }

    /// Users and the key for tokens are those of the authority's home, once this host has the authority.
    pub(in crate::services::gateway) fn follow_logins(&self) -> Result<(), String> {
        if self.is_replica() {
            self.logins.follow_home().map_err(|error| error.to_string())?;
        }
        self.authority_changed();
        Ok(())
    }

    /// The authority without its private key.
    fn authority_document(&self) -> Option<Zeroizing<String>> {
        let shared = self.authority_now()?.without_key();
        serde_json::to_string(&shared).ok().map(Zeroizing::new)
    }

    fn take_authority(&self, content: Option<&str>) -> Result<(), String> {
        let content = content.ok_or("the home has no authority")?;
        // The error itself may have words of the text, which holds keys.
        let new: Authority = serde_json::from_str(content)
            .map_err(|_| "this version of weft cannot read the authority")?;
        new.wrapping_key().map_err(|error| error.to_string())?;
        if new.is_home() {
            return Err("it has a private key that no other host is to have".into());
        }
        self.store.save(REPLICA_FILE, &new).map_err(|error| error.to_string())?;
        let mut authority = self.authority.lock().unwrap_or_else(PoisonError::into_inner);
        if authority.as_ref().is_some_and(|before| !before.is_same(&new)) {
            return Err("it is another authority than this host's".into());
        }
        let before = authority.replace(new.clone());
        drop(authority);
        if before.as_ref().is_some_and(Authority::has_key) {
            // Another host is the home, and so has the key.
            self.store.remove(AUTHORITY_FILE).map_err(|error| error.to_string())?;
            tracing::info!("another host is the home of the certificate authority now");
        }
        self.follow_logins()?;
        if before.is_some_and(|before| !before.serves_like(&new)) {
            // Other keys: the gateway begins anew with them.
            self.wanted.send_modify(|_| {});
        }
        Ok(())
    }
}

/// An address of an owner on a network.
pub(in crate::services::gateway) type Held = (String, Vni, IpAddr);

/// The addresses that a configuration keeps for a client.
#[derive(Clone, Copy, Debug)]
pub(in crate::services::gateway) struct Kept {
    /// By its file.
    pub(in crate::services::gateway) fixed: Option<Ipv4Addr>,
    /// That which it had last.
    pub(in crate::services::gateway) last: Option<Ipv4Addr>,
    pub(in crate::services::gateway) wants_ipv6: bool,
}

impl Kept {
    /// Whether the address of its file is among these.
    fn fits(&self, addresses: &[IpAddr]) -> bool {
        self.fixed.is_none_or(|fixed| addresses.contains(&fixed.into()))
    }
}

/// The client that this owner of addresses is, as [`owner_of`] writes it.
fn client_of(owner: &str) -> Option<Key> {
    let rest = owner.strip_prefix(CLIENT_OWNER)?;
    let (network, written) = rest.split_once('/').unwrap_or((NETWORK, rest));
    let (mut name, mut bytes) = (Vec::new(), written.bytes());
    while let Some(byte) = bytes.next() {
        name.push(match byte {
            b'%' => {
                let digits = [bytes.next()?, bytes.next()?];
                u8::from_str_radix(std::str::from_utf8(&digits).ok()?, 16).ok()?
            }
            other => other,
        });
    }
    Some((network.to_owned(), String::from_utf8(name).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_home_has_an_authority_or_a_configuration() {
        let names = |fingerprint: &str| -> Vec<&str> {
            let its = DOCUMENTS.iter().filter(|document| document.of.is_at(fingerprint));
            its.map(|document| document.name).collect()
        };
        assert_eq!(names("ab01"), ["token-key", "users", "authority"]);
        assert_eq!(names("import-1"), ["token-key", "users", "import"]);
    }

    #[test]
    fn a_client_is_found_again_by_its_owner() {
        for network in [NETWORK, "openvpn"] {
            for name in ["anna", "anna@example.com", "Carla Smith", "50%", "ä/b"] {
                let key = (network.to_owned(), name.to_owned());
                assert_eq!(client_of(&owner_of(network, name)), Some(key));
            }
        }
        assert_eq!(client_of("container:x"), None);
        assert_eq!(client_of(&format!("{CLIENT_OWNER}a%4")), None);
    }
}
