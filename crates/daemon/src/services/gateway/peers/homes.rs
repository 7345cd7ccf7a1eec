//! The home of an authority, and replicas of it on other hosts.
//!
//! The host that made the authority is its home and its only writer. A replica has what serving needs, and serves with
//! it while the home is away. It follows the home's word: what the home has is the newest.

use serde::{Deserialize, Serialize};
use weft_crypto::PeerId;
use zeroize::Zeroizing;

use super::documents::{Content, DOCUMENT_MAX_BYTES, Documents};
use super::message::{self, Message, Text, Versions};

/// A linked host that is the home of an authority.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Home {
    pub(super) peer: PeerId,
    pub(super) nickname: String,
    /// SHA-256 of the authority's certificate.
    pub(super) fingerprint: String,
    pub(super) versions: Versions,
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
    is_wanted: bool,
    fetch: Option<(Fetch, Zeroizing<String>)>,
}

impl Homes {
    pub(super) fn new(names: &'static [&'static str], replica: Option<Replica>) -> Self {
        Self { names, own: None, replica, is_wanted: false, fetch: None }
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

    pub(super) const fn want(&mut self) {
        self.is_wanted = true;
    }

    /// Another host is the home of this host's authority.
    pub(super) fn set_replica(&mut self, replica: Replica) {
        self.replica = Some(replica);
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
        let Some(first) = homes.first().filter(|_| self.is_wanted) else { return Ok(None) };
        match homes.iter().find(|home| home.fingerprint != first.fingerprint) {
            None => Ok(Some(first)),
            Some(other) => Err(format!(
                "hosts {} and {} have different certificate authorities, and this host takes neither: {REMEDY}",
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
            false => format!(
                "host {} has another certificate authority than this host: a profile of one is not good at the other; {REMEDY}",
                home.nickname
            ),
        };
        others.map(conflict).collect()
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
    ) -> Option<Result<Taken, Message>> {
        let (fetch, got) = self.fetch.as_mut().filter(|(fetch, _)| fetch == of)?;
        let is_next = got.len() == offset && (offset..=DOCUMENT_MAX_BYTES).contains(&total);
        if !is_next || text.len() > total - offset || (text.is_empty() && offset < total) {
            return None;
        }
        got.push_str(text);
        if got.len() < total {
            return Some(Err(want(fetch, got.len())));
        }
        let content = Content(std::mem::take(got));
        let Fetch { document, version, .. } = fetch.clone();
        let is_whole = content.version() == version;
        is_whole.then(|| Ok(Taken { home: home.clone(), document, version, content }))
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

const REMEDY: &str = "to keep one, stop weft on the other host, move openvpn-authority.json out of its state directory, and launch it again";

fn want(fetch: &Fetch, offset: usize) -> Message {
    let Fetch { document, version, .. } = fetch.clone();
    Message::Want { document, version, offset }
}
