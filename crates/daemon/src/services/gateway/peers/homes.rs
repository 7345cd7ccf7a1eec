//! The home of an authority, and replicas of it on other hosts.
//!
//! The host that made the authority is its home and its only writer. A replica has what serving needs, and serves with
//! it while the home is away. It follows the home's word: what the home has is the newest.

use serde::{Deserialize, Serialize};
use weft_crypto::PeerId;
use zeroize::Zeroizing;

use super::documents::{Content, DOCUMENT_MAX_BYTES, Documents};
use super::message::{self, Message, Text, Versions};

/// A linked host that is the home of an authority, or of a configuration that was taken over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Home {
    pub(super) peer: PeerId,
    pub(super) nickname: String,
    /// SHA-256 of the authority's certificate, or the number of the configuration.
    pub(super) fingerprint: String,
    pub(super) versions: Versions,
    /// On which it is to serve clients.
    pub(super) network: Option<String>,
}

/// Which authority this host serves with, and where it is at home.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Replica {
    pub(super) fingerprint: String,
    pub(super) home: PeerId,
    pub(super) nickname: String,
    pub(super) versions: Versions,
    /// When this host last knew that it had the newest, in seconds since 1970.
    pub(super) as_of: u64,
}

/// A document that is being fetched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Fetch {
    pub(super) home: PeerId,
    pub(super) document: String,
    pub(super) version: String,
}

/// What came of a part of a document.
pub(super) enum Fetched<T> {
    /// It was the last one.
    Whole(T),
    /// This asks for the next one.
    Part(Message),
}

/// A document, complete.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Taken {
    pub(super) home: Home,
    pub(super) document: String,
    pub(super) version: String,
    pub(super) content: Content,
}

/// What this host knows of homes.
pub(super) struct Homes {
    names: &'static [&'static str],
    own: Option<Documents>,
    replica: Option<Replica>,
    /// This host needs what a home has; of several homes, of one that serves on this network.
    wanted: Option<Option<String>>,
    fetch: Option<(Fetch, Zeroizing<String>)>,
}

impl Homes {
    pub(super) fn new(names: &'static [&'static str], replica: Option<Replica>) -> Self {
        Self { names, own: None, replica, wanted: None, fetch: None }
    }

    /// This host is the home of an authority. Returns what others are told.
    pub(super) fn set_own(&mut self, own: Option<Documents>) -> Option<message::Home> {
        self.own = own;
        let told = |own: &Documents| message::Home {
            fingerprint: own.fingerprint.clone(),
            documents: own.versions(),
        };
        self.own.as_ref().map(told)
    }

    pub(super) fn want(&mut self, network: Option<String>) {
        self.wanted = Some(network);
    }

    /// Another host is the home of this host's authority.
    pub(super) fn set_replica(&mut self, replica: Replica) {
        self.replica = Some(replica);
    }

    /// This host has nothing of a home: it follows the next one that it takes.
    pub(super) fn forget_home(&mut self) {
        self.replica = None;
    }

    pub(super) const fn replica(&self) -> Option<&Replica> {
        self.replica.as_ref()
    }

    /// What is under way over a link is void.
    pub(super) fn handle_link_down(&mut self, peer: PeerId) {
        self.fetch.take_if(|(fetch, _)| fetch.home == peer);
    }

    /// Notes until when this host had the newest. True: there is a new time to keep.
    pub(super) fn handle_home_gone(&mut self, home: &Home, unix_s: u64) -> bool {
        let Some(replica) = self.replica.as_mut() else { return false };
        let is_newest = |name: &&str| replica.versions.get(*name) == home.versions.get(*name);
        let has_all = self.names.iter().all(is_newest);
        if has_all {
            replica.as_of = unix_s;
        }
        has_all
    }

    /// The home to follow. An error says why none of several is.
    pub(super) fn choose<'a>(&self, homes: &'a [Home]) -> Result<Option<&'a Home>, String> {
        if self.own.is_some() {
            return Ok(None);
        }
        if let Some(replica) = &self.replica {
            let same = homes.iter().filter(|home| home.fingerprint == replica.fingerprint);
            let first = same.min_by_key(|home| home.peer != replica.home);
            return Ok(first);
        }
        let Some(network) = &self.wanted else { return Ok(None) };
        let is_there = |home: &&Home| network.is_some() && home.network == *network;
        let named: Vec<&Home> = homes.iter().filter(is_there).collect();
        let homes = if named.is_empty() { homes.iter().collect() } else { named };
        let Some(first) = homes.first().copied() else { return Ok(None) };
        match homes.iter().find(|home| home.fingerprint != first.fingerprint) {
            None => Ok(Some(first)),
            Some(other) => Err(format!(
                "hosts {} and {} have different certificate authorities or configurations, and this host takes neither: name the network of one by weft openvpn serve --network; or, {REMEDY}",
                first.nickname, other.nickname
            )),
        }
    }

    /// Homes that cannot be beside what this host has, in words.
    pub(super) fn conflicts(&self, homes: &[Home]) -> Vec<String> {
        if let Err(conflict) = self.choose(homes) {
            return vec![conflict];
        }
        let own = self.own.as_ref().map(|own| &own.fingerprint);
        let followed = self.choose(homes).ok().flatten();
        let replica = self.replica.as_ref().map(|replica| &replica.fingerprint);
        let Some(fingerprint) = own.or(replica) else { return Vec::new() };
        let others = homes.iter().filter(|home| Some(home.peer) != followed.map(|it| it.peer));
        let conflict = |home: &Home| match &home.fingerprint == fingerprint {
            true => format!(
                "host {} has the private key of the same certificate authority: one host alone may issue and revoke; {REMEDY}",
                home.nickname
            ),
            false if is_import(fingerprint) => format!(
                "host {} has taken over another configuration than this host serves by: a profile of one may not be good at the other; {REMEDY}",
                home.nickname
            ),
            false => format!(
                "host {} has another certificate authority than this host: a profile of one is not good at the other; {REMEDY}",
                home.nickname
            ),
        };
        // Clients of Weft's own authority and those of a configuration that was taken over may be beside each other.
        let is_beside = |home: &&Home| is_import(&home.fingerprint) != is_import(fingerprint);
        others.filter(|home| !is_beside(home)).map(conflict).collect()
    }

    /// Begins to fetch the first document that this host does not have as its home does.
    pub(super) fn follow(&mut self, homes: &[Home]) -> Option<(PeerId, Message)> {
        let home = self.choose(homes).ok().flatten()?;
        let has = |name: &str, version: &String| {
            let replica = self.replica.as_ref();
            replica.is_some_and(|replica| replica.versions.get(name) == Some(version))
        };
        let mut wanted = self.names.iter().filter_map(|name| {
            let version = home.versions.get(*name)?;
            (!has(name, version)).then_some((*name, version))
        });
        let Some((document, version)) = wanted.next() else {
            self.fetch = None;
            return None;
        };
        let (document, version) = (document.to_owned(), version.clone());
        let fetch = Fetch { home: home.peer, document, version };
        if self.fetch.as_ref().is_some_and(|(under_way, _)| *under_way == fetch) {
            return None;
        }
        let want = want(&fetch, 0);
        let peer = home.peer;
        self.fetch = Some((fetch, Zeroizing::default()));
        Some((peer, want))
    }

    /// A part of a document of this host.
    pub(super) fn part(&self, document: &str, version: &str, offset: usize) -> Option<Message> {
        let content = self.own.as_ref()?.get(document, version)?;
        let text = Text(content.part(offset)?.to_owned());
        let (document, version) = (document.to_owned(), version.to_owned());
        Some(Message::Part { document, version, offset, total: content.0.len(), text })
    }

    /// Takes a part. Returns the document once it is complete, or what to ask for next.
    pub(super) fn handle_part(
        &mut self,
        (home, of): (&Home, &Fetch),
        (offset, total): (usize, usize),
        text: &str,
    ) -> Option<Fetched<Taken>> {
        let (fetch, got) = self.fetch.as_mut().filter(|(fetch, _)| fetch == of)?;
        let is_next = got.len() == offset && (offset..=DOCUMENT_MAX_BYTES).contains(&total);
        if !is_next || text.len() > total - offset || (text.is_empty() && offset < total) {
            return None;
        }
        got.push_str(text);
        if got.len() < total {
            return Some(Fetched::Part(want(fetch, got.len())));
        }
        let content = Content(std::mem::take(got));
        let Fetch { document, version, .. } = fetch.clone();
        let is_whole = content.version() == version;
        is_whole.then(|| Fetched::Whole(Taken { home: home.clone(), document, version, content }))
    }

    /// A document was taken, or could not be, which is tried again.
    pub(super) fn handle_taken(&mut self, taken: &Taken, is_taken: bool, unix_s: u64) {
        let Taken { home, document, version, .. } = taken;
        self.fetch.take_if(|(fetch, _)| {
            fetch.home == home.peer && (&fetch.document, &fetch.version) == (document, version)
        });
        if !is_taken {
            return;
        }
        let replica = self.replica.get_or_insert_with(|| Replica {
            fingerprint: home.fingerprint.clone(),
            home: home.peer,
            nickname: home.nickname.clone(),
            versions: Versions::new(),
            as_of: unix_s,
        });
        (replica.home, replica.as_of) = (home.peer, unix_s);
        replica.nickname.clone_from(&home.nickname);
        replica.versions.insert(document.clone(), version.clone());
    }
}

/// Whether this is the fingerprint of a configuration that was taken over.
pub(super) fn is_import(fingerprint: &str) -> bool {
    fingerprint.starts_with(IMPORT)
}

/// How the fingerprint of a configuration begins. That of an authority has digits alone.
pub(in crate::services::gateway) const IMPORT: &str = "import-";

const REMEDY: &str = "to keep one, stop weft on the other host, move openvpn-authority.json or openvpn-import.json out of its state directory, launch it again, and run weft openvpn serve there";

fn want(fetch: &Fetch, offset: usize) -> Message {
    let Fetch { document, version, .. } = fetch.clone();
    Message::Want { document, version, offset }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::collections::BTreeMap;

    use super::*;

    fn home(number: u8, fingerprint: &str, network: Option<&str>) -> Home {
        Home {
            peer: PeerId::from_bytes([number; 32]),
            nickname: format!("host{number}"),
            fingerprint: fingerprint.to_owned(),
            versions: Versions::new(),
            network: network.map(str::to_owned),
        }
    }

    /// The conflicts of a home with this fingerprint with another one.
    fn conflicts(own: &str, other: &str) -> usize {
        let mut homes = Homes::new(&["users"], None);
        homes.set_own(Some(Documents::new(own.into(), BTreeMap::new())));
        homes.conflicts(&[home(1, other, None)]).len()
    }

    #[test]
    fn of_two_homes_the_one_is_taken_that_serves_on_the_network_asked_for() {
        let all = [home(1, "ab01", Some("weft")), home(2, "import-1", Some("openvpn"))];
        let chosen = |network: Option<&str>, all: &[Home]| {
            let mut homes = Homes::new(&["users"], None);
            assert_eq!(homes.choose(all), Ok(None), "nothing was asked for");
            homes.want(network.map(str::to_owned));
            homes.choose(all).map(|home| home.map(|home| home.nickname.clone()))
        };
        assert_eq!(chosen(Some("openvpn"), &all), Ok(Some("host2".into())));
        assert_eq!(chosen(Some("weft"), &all), Ok(Some("host1".into())));
        assert_eq!(chosen(Some("red"), &all[1..]), Ok(Some("host2".into())), "there is no other");
        for network in [None, Some("red")] {
            let refused = chosen(network, &all).unwrap_err();
            assert!(refused.contains("host1 and host2") && refused.contains("--network"));
        }
    }

    #[test]
    fn a_host_whose_files_were_moved_away_may_follow_another_home() {
        let all = [home(1, "import-1", None), home(2, "import-2", None)];
        let replica = Replica {
            fingerprint: "import-1".into(),
            home: all[0].peer,
            nickname: "host1".into(),
            versions: Versions::new(),
            as_of: 0,
        };
        let mut homes = Homes::new(&["users"], Some(replica));
        homes.want(None);
        assert_eq!(homes.choose(&all[1..]), Ok(None));
        homes.forget_home();
        assert_eq!(homes.choose(&all[1..]), Ok(Some(&all[1])));
    }

    #[test]
    fn a_configuration_may_be_beside_an_authority_but_not_beside_another_configuration() {
        assert_eq!(conflicts("import-1", "ab01"), 0);
        assert_eq!(conflicts("ab01", "import-1"), 0);
        assert_eq!(conflicts("import-1", "import-2"), 1);
        assert_eq!(conflicts("ab01", "ab02"), 1);
    }
}
