//! What hosts that serve have in common for logins: the users, and the key that signs tokens. Both are those of the
//! authority's home. So a user is known on all hosts, and a token of one is good at the others. Hosts tell each other
//! the codes that they have taken.
//!
//! What an attempt limit counts, and whose codes are awaited, each host knows for itself.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use serde::{Deserialize, Serialize};
use tokio::sync::Notify;
use weft_openvpn::static_key::{AuthTokenKey, SINGLE_KEY_BYTES};
use zeroize::Zeroizing;

use super::users::Users;
use super::{
    CODES_FILE, KEY_FILE, Logins, REPLICA_KEY_FILE, REPLICA_USERS_FILE, USERS_FILE, lock, totp,
    unix_s,
};
use crate::upkeep::store::{Store, StoreError};

/// Codes taken that wait to be told; those beyond are not told.
const UNTOLD_MAX: usize = 1_024;

/// A user, and the step of a code that was taken.
pub(in super::super) type TakenCode = (String, u64);

/// Codes that other hosts are not told of yet.
#[derive(Default)]
pub(super) struct Untold {
    codes: Mutex<Vec<TakenCode>>,
    bell: Notify,
}

impl Untold {
    pub(super) fn push(&self, user: &str, step: u64) {
        let mut codes = lock(&self.codes);
        if codes.len() < UNTOLD_MAX {
            codes.push((user.to_owned(), step));
        }
        drop(codes);
        self.bell.notify_one();
    }
}

/// The key that signs tokens, as it is saved.
#[derive(Serialize, Deserialize)]
struct SavedKey {
    /// As OpenVPN's `--genkey auth-token` writes it.
    key: Zeroizing<String>,
}

impl Logins {
    /// The users, for a replica.
    pub(in super::super) fn users_document(&self) -> Option<Zeroizing<String>> {
        serde_json::to_string(&*lock(&self.users)).ok().map(Zeroizing::new)
    }

    /// The key that signs tokens, for a replica.
    pub(in super::super) fn key_document(&self) -> Zeroizing<String> {
        self.key().to_text()
    }

    /// How often users of each name were removed whose addresses became free by that.
    pub(in super::super) fn removals(&self) -> BTreeMap<String, u32> {
        lock(&self.users).removals().clone()
    }

    /// Keeps the users of the authority's home. They count after [`Self::follow_home`].
    ///
    /// # Errors
    /// They are no users, or cannot be saved.
    pub(in super::super) fn take_users(&self, document: Option<&str>) -> Result<(), String> {
        let document = document.ok_or("the home has no list of users")?;
        // The error itself may have words of the text, which holds secrets.
        let users: Users = serde_json::from_str(document)
            .map_err(|_| "this version of weft cannot read the users")?;
        self.store.save(REPLICA_USERS_FILE, &users).map_err(|error| error.to_string())
    }

    /// Keeps the key of the authority's home. It counts after [`Self::follow_home`].
    ///
    /// # Errors
    /// It is no key, or cannot be saved.
    pub(in super::super) fn take_key(&self, document: Option<&str>) -> Result<(), String> {
        let key = document.ok_or("the home has no key for tokens")?;
        AuthTokenKey::parse(key).map_err(|error| error.to_string())?;
        let saved = SavedKey { key: Zeroizing::new(key.to_owned()) };
        self.store.save(REPLICA_KEY_FILE, &saved).map_err(|error| error.to_string())
    }

    /// Users and key are those of the authority's home from now on, as far as they are here.
    ///
    /// # Errors
    /// A file cannot be read.
    pub(in super::super) fn follow_home(&self) -> Result<(), StoreError> {
        let new = users(&self.store, true)?;
        if let Some(key) = homes_key(&self.store)? {
            *lock(&self.key) = Some(Arc::new(key));
        }
        *lock(&self.users) = new;
        Ok(())
    }

    /// This host is the authority's home from now on: users and key are its own, those that it has or these.
    ///
    /// # Errors
    /// They are none, or cannot be saved.
    pub(in super::super) fn become_home(&self, given: Option<(&str, &str)>) -> Result<(), String> {
        let words = |error: StoreError| error.to_string();
        let (users, key) = match given {
            None => (lock(&self.users).clone(), self.key()),
            Some((users, key)) => {
                let key = AuthTokenKey::parse(key).map_err(|error| error.to_string())?;
                (serde_json::from_str(users).map_err(|error| error.to_string())?, Arc::new(key))
            }
        };
        self.store.save(USERS_FILE, &users).map_err(words)?;
        self.store.save(KEY_FILE, &SavedKey { key: key.to_text() }).map_err(words)?;
        (*lock(&self.users), *lock(&self.key)) = (users, Some(key));
        // They would be out of date if the authority moved on one day.
        for file in [REPLICA_USERS_FILE, REPLICA_KEY_FILE] {
            self.store.remove(file).map_err(words)?;
        }
        Ok(())
    }

    /// Codes that were taken here since the last call, once there are some.
    pub(in super::super) async fn codes_taken(&self) -> Vec<TakenCode> {
        loop {
            let codes = std::mem::take(&mut *lock(&self.untold.codes));
            if !codes.is_empty() {
                return codes;
            }
            self.untold.bell.notified().await;
        }
    }

    /// Another host has taken these codes: they are not taken here, too. It may wait for the disk.
    pub(in super::super) fn hear_codes(&self, told: Vec<TakenCode>) {
        let newest = unix_s() / totp::STEP_S + totp::STEPS_AROUND;
        let is_known = |user: &str| lock(&self.users).get(user).is_some();
        let mut codes = lock(&self.codes);
        for (user, step) in told {
            // A step of the future would keep the user out until then.
            if step <= newest && is_known(&user) {
                let last = codes.entry(user).or_default();
                *last = step.max(*last);
            }
        }
        self.store.save_or_later(CODES_FILE, &*codes);
    }

    /// The key that signs tokens: the one that there is, or that of an earlier run, or a new one.
    pub(super) fn key(&self) -> Arc<AuthTokenKey> {
        let mut key = lock(&self.key);
        Arc::clone(key.get_or_insert_with(|| Arc::new(own_key(&self.store))))
    }
}

/// The users of an earlier run. A replica that has heard none of the home's has its own.
pub(super) fn users(store: &Store, is_replica: bool) -> Result<Users, StoreError> {
    let own = || store.load::<Users>(USERS_FILE).map(Option::unwrap_or_default);
    match is_replica {
        false => own(),
        true => match store.load(REPLICA_USERS_FILE)? {
            Some(homes) => Ok(homes),
            None => own().map(Users::without_removals),
        },
    }
}

/// The key of the authority's home, if it is here.
pub(super) fn homes_key(store: &Store) -> Result<Option<AuthTokenKey>, StoreError> {
    let saved: Option<SavedKey> = store.load(REPLICA_KEY_FILE)?;
    Ok(saved.and_then(|saved| AuthTokenKey::parse(&saved.key).ok()))
}

fn own_key(store: &Store) -> AuthTokenKey {
    let saved = store.load::<SavedKey>(KEY_FILE).map_err(|error| error.to_string());
    let read = |saved: SavedKey| AuthTokenKey::parse(&saved.key).map_err(|error| error.to_string());
    match saved.and_then(|saved| saved.map(read).transpose()) {
        Ok(Some(key)) => return key,
        Ok(None) => {}
        Err(error) => {
            tracing::warn!(
                error,
                "cannot read the key that signs tokens; users give their passwords again"
            );
        }
    }
    let mut bytes = Zeroizing::new([0; SINGLE_KEY_BYTES]);
    rand::fill(&mut bytes[..]);
    let key = AuthTokenKey::new(*bytes);
    // If the disk is full, tokens are good until the daemon ends.
    store.save_or_later(KEY_FILE, &SavedKey { key: key.to_text() });
    key
}
