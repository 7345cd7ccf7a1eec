//! Logins at an identity provider (OpenID Connect).

use std::net::SocketAddr;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Where users log in by a web page, and where they come back to.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct OidcSettings {
    /// The provider's issuer, an `https` URL. The daemon reads the provider's discovery document below that URL.
    pub issuer: String,
    /// The client id of this gateway at the provider.
    pub client_id: String,
    /// File whose first line is the secret that the provider has given for it; `None`: there is none.
    pub client_secret: Option<PathBuf>,
    /// The `https` URL to which the provider sends browsers back. It must be known there.
    pub redirect: String,
    /// Where this host answers browsers; `None`: at the port of `redirect`, on all addresses.
    pub listen: Option<SocketAddr>,
    /// File with the certificate of the host in `redirect`, and those between it and its authority, as PEM. `None`: HTTP
    /// without TLS, on a loopback address alone, for a program there that has TLS.
    pub certificate: Option<PathBuf>,
    /// File with its private key, as PEM.
    pub key: Option<PathBuf>,
    /// File with the authorities by which the provider is known, as PEM; `None`: those of the system.
    pub ca: Option<PathBuf>,
    /// The claim that names the user; `None`: `preferred_username`.
    pub claim: Option<String>,
    /// The user is in one of these; none: no group is asked for.
    pub groups: Vec<String>,
    /// The claim that has the user's groups; `None`: `groups`.
    pub groups_claim: Option<String>,
    /// Scopes that are asked for beside `openid profile email`.
    pub scopes: Vec<String>,
    /// How long a login may take, in seconds; `None`: 180.
    pub wait_s: Option<u32>,
}
