//! Requests and answers about how OpenVPN clients show who they are.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use zeroize::Zeroizing;

use crate::oidc::OidcSettings;

/// What a client shows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Auth {
    /// A certificate of the authority.
    #[default]
    Certificate,
    /// A user name and a password; no certificate is asked for.
    Password,
    /// All of these.
    Both,
    /// A certificate, and a login at an identity provider by a web page (OpenID Connect).
    Oidc,
}

/// The name by which a client with a certificate and a user name is known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ClientName {
    /// Both names, which must be the same.
    #[default]
    Same,
    /// The certificate's, whatever the user's.
    Certificate,
    /// The user's, whatever the certificate's: OpenVPN's `username-as-common-name`.
    User,
}

/// A word that is none of those that there are: the user's fault.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{word:?} is none of these: {known}")]
pub struct UnknownWord {
    word: String,
    known: &'static str,
}

impl Auth {
    /// Its word on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Certificate => "certificate",
            Self::Password => "password",
            Self::Both => "both",
            Self::Oidc => "oidc",
        }
    }

    /// Whether a client shows a password.
    pub const fn has_password(self) -> bool {
        matches!(self, Self::Password | Self::Both)
    }

    /// Whether a client shows a certificate.
    pub const fn has_certificate(self) -> bool {
        matches!(self, Self::Certificate | Self::Both | Self::Oidc)
    }

    /// Whether a client logs in as a user, and gets a token for that.
    pub const fn has_user(self) -> bool {
        matches!(self, Self::Password | Self::Both | Self::Oidc)
    }
}

impl FromStr for Auth {
    type Err = UnknownWord;

    fn from_str(word: &str) -> Result<Self, Self::Err> {
        let all = [Self::Certificate, Self::Password, Self::Both, Self::Oidc];
        let unknown =
            || UnknownWord { word: word.to_owned(), known: "certificate, password, both, oidc" };
        all.into_iter().find(|auth| auth.name() == word).ok_or_else(unknown)
    }
}

impl FromStr for ClientName {
    type Err = UnknownWord;

    fn from_str(word: &str) -> Result<Self, Self::Err> {
        match word {
            "same" => Ok(Self::Same),
            "certificate" => Ok(Self::Certificate),
            "user" => Ok(Self::User),
            _ => Err(UnknownWord { word: word.to_owned(), known: "same, certificate, user" }),
        }
    }
}

/// How clients show who they are.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct LoginSettings {
    /// What they show.
    pub auth: Auth,
    /// By which name a client is known that shows both.
    pub client_name: ClientName,
    /// The program that judges passwords in the place of this host's users; `None`: those users.
    pub program: Option<PathBuf>,
    /// Seconds for which a token stands for the password; 0: there are no tokens. `None`: 43,200.
    pub token_lifetime_s: Option<u32>,
    /// A token that was not renewed for twice so many seconds is no longer good. `None`: 3,600.
    pub token_renewal_s: Option<u32>,
    /// Where users log in by a web page, with [`Auth::Oidc`].
    pub oidc: Option<OidcSettings>,
}

/// A password on its way to the daemon. It is never shown, and erased when dropped.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Password(Zeroizing<String>);

impl Password {
    /// Takes the password over.
    pub fn new(password: impl Into<String>) -> Self {
        Self(Zeroizing::new(password.into()))
    }

    /// The password itself. Never log it.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Password {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Password(..)")
    }
}

/// Adds a user, or changes the password of one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UserRequest {
    /// The user's name.
    pub name: String,
    /// The new password.
    pub password: Password,
    /// A new user's logins need a code, too. Without meaning for a user that there is.
    #[serde(default)]
    pub totp: bool,
}

/// Names a user.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UserName {
    /// The user's name.
    pub name: String,
}

/// Has a user's logins need codes by a new secret, or no codes any more.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TotpRequest {
    /// The user's name.
    pub name: String,
    /// No codes any more.
    pub off: bool,
}

/// A change of a user.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UserChanged {
    /// The user's name.
    pub name: String,
    /// Whether the user was connected; the session has ended.
    pub was_connected: bool,
    /// What an authenticator takes to make codes. It is a secret, and shown this once.
    pub otpauth: Option<String>,
}

impl fmt::Debug for UserChanged {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UserChanged")
            .field("name", &self.name)
            .field("was_connected", &self.was_connected)
            .finish_non_exhaustive()
    }
}

/// A user who may log in with a password.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VpnUser {
    /// The user's name.
    pub name: String,
    /// Whether a login needs a code.
    pub totp: bool,
    /// When the user was added, RFC 3339.
    pub added: String,
    /// When the password was set, RFC 3339.
    pub password_set: String,
}

/// Writes a profile without a certificate, for all users.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharedRequest {
    /// The profile asks for a code, too.
    pub totp: bool,
}

/// A profile for all users.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharedProfile {
    /// The profile, with the key without which the gateway gives no answer.
    pub profile: String,
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn words_are_those_of_json_and_passwords_are_not_shown() {
        for word in ["certificate", "password", "both", "oidc"] {
            let auth: Auth = word.parse().unwrap();
            assert_eq!(serde_json::to_value(auth).unwrap(), word);
        }
        for word in ["same", "certificate", "user"] {
            let name: ClientName = word.parse().unwrap();
            assert_eq!(serde_json::to_value(name).unwrap(), word);
        }
        let error = "pam".parse::<Auth>().unwrap_err().to_string();
        assert!(error.contains("certificate, password, both, oidc"), "{error}");
        let settings: LoginSettings = serde_json::from_str("{}").unwrap();
        assert_eq!(settings.auth, Auth::Certificate);
        let password = Password::new("secret");
        let request = UserRequest { name: "anna".into(), password, totp: true };
        assert!(!format!("{request:?}").contains("secret"));
        let text = serde_json::to_string(&request).unwrap();
        assert_eq!(serde_json::from_str::<UserRequest>(&text).unwrap(), request);
    }
}
