//! The users of a gateway: names, Argon2id hashes of their passwords, secrets of their one-time codes. One file of the
//! state directory has them all, for root alone, and is replaced as a whole.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fmt;
use std::time::SystemTime;

use argon2::password_hash::phc::PasswordHash;
use argon2::{Argon2, PasswordHasher, PasswordVerifier};
use serde::{Deserialize, Serialize};
use weft_api::VpnUser;
use weft_openvpn::auth_token::TokenSigner;
use weft_openvpn::messages::PasswordForm;
use zeroize::Zeroizing;

use super::totp;
use crate::services::gateway::authority::check_name;
use crate::timestamp;
use crate::upkeep::store::StoreError;

/// Users at most.
const USERS_MAX: usize = 10_000;
/// The shortest password, in characters.
const PASSWORD_CHARS_MIN: usize = 8;
/// The longest password, in bytes: with a code it fits what stock clients send.
const PASSWORD_BYTES_MAX: usize = 90;
const SALT_BYTES: usize = 16;
/// Names of removed users that are remembered.
const REMOVED_MAX: usize = 100_000;
/// How the hashes of this version begin: Argon2id with 19 MiB and two passes, as OWASP's "Password Storage Cheat Sheet"
/// has it.
const HASH_START: &str = "$argon2id$v=19$m=19456,t=2,p=1$";
/// The longest hash, in bytes.
const HASH_BYTES_MAX: usize = 256;

/// Why a user cannot be changed.
#[derive(Debug, thiserror::Error)]
pub(in super::super) enum UserError {
    /// User: a name that cannot be one.
    #[error("{0:?} is no name for a user: give 1 to 63 letters, digits, dots, -, _, @ and +")]
    BadName(String),
    /// User: a password that is none.
    #[error("this password cannot be used: {0}")]
    BadPassword(&'static str),
    /// User: there is one of this name.
    #[error("there is a user {0} already: weft openvpn user passwd {0} changes the password")]
    Exists(String),
    /// User: there is none of this name.
    #[error("there is no user {0}: weft openvpn user add {0} adds one")]
    Unknown(String),
    /// User: too many.
    #[error("there are {USERS_MAX} users, which is the limit: weft openvpn user rm removes one")]
    Full,
    /// The library refuses.
    #[error("cannot hash the password: {0}")]
    Hash(argon2::password_hash::Error),
    /// The state directory.
    #[error(transparent)]
    Save(#[from] StoreError),
    /// A bug.
    #[error("the change failed ({0}); this is a bug in weft")]
    Failed(#[from] tokio::task::JoinError),
}

/// A change of the users. A host that is not the authority's home asks the home for it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "change", rename_all = "snake_case")]
pub(in super::super) enum UserChange {
    /// `weft openvpn user add`.
    Add { name: String, hash: Hashed, totp: bool },
    /// `weft openvpn user passwd`.
    SetPassword { name: String, hash: Hashed },
    /// `weft openvpn user totp`.
    SetTotp { name: String, off: bool },
    /// `weft openvpn user rm`.
    Remove { name: String },
}

/// The hash of a password, in the PHC string format, with salt and costs. It is never shown.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Zeroizing<String>", into = "Zeroizing<String>")]
pub(in super::super) struct Hashed(Zeroizing<String>);

/// All users, as they are saved.
#[derive(Clone, Default, Serialize, Deserialize)]
pub(in super::super) struct Users {
    /// How often users of a name were removed, whose addresses then became free. No user's name has a slash.
    #[serde(rename = "/removed", default, skip_serializing_if = "BTreeMap::is_empty")]
    removed: BTreeMap<String, u32>,
    #[serde(flatten)]
    all: BTreeMap<String, User>,
}

/// A user.
#[derive(Clone, Serialize, Deserialize)]
pub(super) struct User {
    /// In the PHC string format, with salt and costs.
    hash: Zeroizing<String>,
    /// The secret of the codes, in base32; `None`: logins need none.
    pub(super) totp: Option<Zeroizing<String>>,
    /// It changes with the password and the secret: tokens of before are no longer good.
    pub(super) generation: u32,
    added: String,
    password_set: String,
}

/// The hash of a password, which takes a core for some time.
///
/// # Errors
/// [`UserError::BadPassword`], [`UserError::Hash`]
pub(in super::super) fn hash(password: &str) -> Result<Hashed, UserError> {
    check_password(password)?;
    hash_any(password).map(Hashed)
}

fn hash_any(password: &str) -> Result<Zeroizing<String>, UserError> {
    let mut salt = [0_u8; SALT_BYTES];
    rand::fill(&mut salt[..]);
    let hash: Result<PasswordHash, _> =
        Argon2::default().hash_password_with_salt(password.as_bytes(), &salt);
    Ok(Zeroizing::new(hash.map_err(UserError::Hash)?.to_string()))
}

impl UserChange {
    /// The user's name.
    pub(in super::super) fn name(&self) -> &str {
        match self {
            Self::Add { name, .. }
            | Self::SetPassword { name, .. }
            | Self::SetTotp { name, .. }
            | Self::Remove { name } => name,
        }
    }
}

/// Another host's word: a hash by other costs could take a core and its memory for as long as it likes.
impl TryFrom<Zeroizing<String>> for Hashed {
    type Error = &'static str;

    fn try_from(text: Zeroizing<String>) -> Result<Self, Self::Error> {
        match text.starts_with(HASH_START) && text.len() <= HASH_BYTES_MAX {
            true => Ok(Self(text)),
            false => Err("no hash of a password as this version of weft makes it"),
        }
    }
}

impl From<Hashed> for Zeroizing<String> {
    fn from(hash: Hashed) -> Self {
        hash.0
    }
}

impl fmt::Debug for Hashed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Hashed(..)")
    }
}

impl User {
    /// Whether this is the user's password, which takes a core for some time. A user that does not exist takes as long.
    pub(super) fn has_password(user: Option<&Self>, password: &str) -> bool {
        let Some(user) = user else {
            let _ = hash_any(password);
            return false;
        };
        match PasswordHash::new(&user.hash) {
            Ok(hash) => Argon2::default().verify_password(password.as_bytes(), &hash).is_ok(),
            Err(error) => {
                tracing::warn!(%error, "a user's hash is damaged: weft openvpn user passwd sets it anew");
                let _ = hash_any(password);
                false
            }
        }
    }
}

impl Users {
    pub(super) fn get(&self, name: &str) -> Option<&User> {
        self.all.get(name)
    }

    /// How often users of each name were removed whose addresses became free by that.
    pub(in super::super) const fn removals(&self) -> &BTreeMap<String, u32> {
        &self.removed
    }

    /// The same without what is known of removed ones.
    pub(super) fn without_removals(self) -> Self {
        Self { removed: BTreeMap::new(), ..self }
    }

    /// Adds a user; the secret of codes, if there are to be codes.
    pub(in super::super) fn add(
        &mut self,
        name: &str,
        hash: Hashed,
        has_codes: bool,
    ) -> Result<Option<Zeroizing<String>>, UserError> {
        check_name(name).map_err(|_| UserError::BadName(name.to_owned()))?;
        if self.all.len() >= USERS_MAX && !self.all.contains_key(name) {
            return Err(UserError::Full);
        }
        let now = timestamp::format(SystemTime::now());
        let totp = has_codes.then(totp::new_secret);
        let user = User {
            hash: hash.0,
            totp: totp.clone(),
            generation: rand::random(),
            added: now.clone(),
            password_set: now,
        };
        match self.all.entry(name.to_owned()) {
            Entry::Occupied(_) => Err(UserError::Exists(name.to_owned())),
            Entry::Vacant(free) => {
                free.insert(user);
                Ok(totp)
            }
        }
    }

    /// Sets a user's password.
    pub(in super::super) fn set_password(
        &mut self,
        name: &str,
        hash: Hashed,
    ) -> Result<(), UserError> {
        let user = self.changed(name)?;
        user.hash = hash.0;
        user.password_set = timestamp::format(SystemTime::now());
        Ok(())
    }

    /// Gives a user a new secret of codes, or none.
    pub(in super::super) fn set_totp(
        &mut self,
        name: &str,
        is_off: bool,
    ) -> Result<Option<Zeroizing<String>>, UserError> {
        let user = self.changed(name)?;
        user.totp = (!is_off).then(totp::new_secret);
        Ok(user.totp.clone())
    }

    /// Removes a user. `is_client`: clients have that name, and addresses by it, which are to become free. Returns
    /// whether they do.
    pub(in super::super) fn remove(
        &mut self,
        name: &str,
        is_client: bool,
    ) -> Result<bool, UserError> {
        self.all.remove(name).ok_or_else(|| UserError::Unknown(name.to_owned()))?;
        let has_place = self.removed.len() < REMOVED_MAX || self.removed.contains_key(name);
        let frees = is_client && has_place;
        if frees {
            *self.removed.entry(name.to_owned()).or_default() += 1;
        }
        Ok(frees)
    }

    /// For `weft openvpn user ls`.
    pub(in super::super) fn shown(&self) -> Vec<VpnUser> {
        let shown = |(name, user): (&String, &User)| VpnUser {
            name: name.clone(),
            totp: user.totp.is_some(),
            added: user.added.clone(),
            password_set: user.password_set.clone(),
        };
        self.all.iter().map(shown).collect()
    }

    /// A user whose tokens are no longer good from now on.
    fn changed(&mut self, name: &str) -> Result<&mut User, UserError> {
        let user = self.all.get_mut(name).ok_or_else(|| UserError::Unknown(name.to_owned()))?;
        user.generation = user.generation.wrapping_add(1);
        Ok(user)
    }
}

/// Refuses a password that is too weak, or that clients cannot send as it is.
fn check_password(password: &str) -> Result<(), UserError> {
    let is_other_form = TokenSigner::is_token(password)
        || !matches!(PasswordForm::parse(password), PasswordForm::Plain(_));
    let fault = if password.chars().count() < PASSWORD_CHARS_MIN {
        "it has fewer than 8 characters"
    } else if password.len() > PASSWORD_BYTES_MAX {
        "it has more than 90 bytes"
    } else if password.chars().any(char::is_control) {
        "it has control characters"
    } else if is_other_form {
        "clients that send it would seem to send something else"
    } else {
        return Ok(());
    };
    Err(UserError::BadPassword(fault))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    const PASSWORD: &str = "correct horse";

    #[test]
    fn a_user_has_the_password_that_was_set_last() {
        let mut users = Users::default();
        assert!(users.add("anna", hash(PASSWORD).unwrap(), false).unwrap().is_none());
        let has = |users: &Users, password| User::has_password(users.get("anna"), password);
        assert!(has(&users, PASSWORD));
        assert!(!has(&users, "Correct horse") && !has(&users, ""));
        assert!(!User::has_password(users.get("berta"), PASSWORD));
        let before = users.get("anna").unwrap().generation;
        users.set_password("anna", hash("battery staple").unwrap()).unwrap();
        assert!(has(&users, "battery staple") && !has(&users, PASSWORD));
        assert_ne!(users.get("anna").unwrap().generation, before, "tokens of before are good");
        assert!(!users.remove("anna", false).unwrap() && users.removals().is_empty());
        assert!(!has(&users, "battery staple"));
    }

    #[test]
    fn hashes_are_salted_and_slow_and_say_by_what() {
        let (one, two) = (hash(PASSWORD).unwrap(), hash(PASSWORD).unwrap());
        assert_ne!(one, two);
        assert!(one.0.starts_with(HASH_START), "{}", one.0.as_str());
        let text = serde_json::to_string(&one).unwrap();
        assert!(serde_json::from_str::<Hashed>(&text).unwrap() == one);
        let dear = text.replace("m=19456", "m=99999999");
        assert!(serde_json::from_str::<Hashed>(&dear).is_err(), "another host's costs are taken");
        assert!(!format!("{one:?}").contains("argon2"));
    }

    #[test]
    fn what_is_saved_is_read_again_and_holds_no_password() {
        let mut users = Users::default();
        let secret = users.add("anna", hash(PASSWORD).unwrap(), true).unwrap().unwrap();
        let text = serde_json::to_string(&users).unwrap();
        assert!(!text.contains(PASSWORD) && text.contains(secret.as_str()));
        let again: Users = serde_json::from_str(&text).unwrap();
        assert!(User::has_password(again.get("anna"), PASSWORD));
        assert!(again.shown()[0].totp);
        // One whose addresses became free is remembered.
        assert!(users.remove("anna", true).unwrap());
        users.add("removed", hash(PASSWORD).unwrap(), false).unwrap();
        let again = serde_json::to_string(&users).unwrap();
        let again: Users = serde_json::from_str(&again).unwrap();
        assert_eq!(again.removals(), &BTreeMap::from([("anna".to_owned(), 1)]));
        assert!(again.get("removed").is_some() && again.shown().len() == 1);
    }

    #[test]
    fn names_and_passwords_that_cannot_be_are_refused() {
        let mut users = Users::default();
        let good = || hash(PASSWORD).unwrap();
        for name in ["", "a b", "a,b", "a/b", &"x".repeat(64)] {
            assert!(matches!(users.add(name, good(), false), Err(UserError::BadName(_))), "{name}");
        }
        let long = "x".repeat(91);
        for password in
            ["short", &long, "with\nnew line", "SCRV1:cHc=:MTIz", "CRV1::state::1", "SESS_ID_AT_xx"]
        {
            assert!(matches!(hash(password), Err(UserError::BadPassword(_))), "{password}");
        }
        users.add("anna@example.com", good(), false).unwrap();
        users.add("anna", good(), false).unwrap();
        assert!(matches!(users.add("anna", good(), false), Err(UserError::Exists(_))));
        assert!(matches!(users.remove("berta", true), Err(UserError::Unknown(_))));
        assert!(matches!(users.set_totp("berta", true), Err(UserError::Unknown(_))));
    }
}
