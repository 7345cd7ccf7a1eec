//! The identity provider of `weft openvpn serve`.

use std::net::SocketAddr;
use std::path::PathBuf;

use anyhow::bail;
use clap::Args;
use weft_api::OidcSettings;

/// Where users log in by a web page.
#[derive(Debug, Default, Args)]
pub struct OpenvpnOidcArgs {
    /// Issuer of the identity provider (OpenID Connect) for --auth oidc, as https://id.example.com
    #[arg(long, value_name = "URL", requires = "oidc_client_id", requires = "oidc_redirect")]
    pub oidc_issuer: Option<String>,
    /// Name by which the provider knows this gateway
    #[arg(long, value_name = "NAME", requires = "oidc_issuer")]
    pub oidc_client_id: Option<String>,
    /// File whose first line is the secret that the provider has given for it (default: there is none)
    #[arg(long, value_name = "FILE", requires = "oidc_issuer")]
    pub oidc_client_secret: Option<PathBuf>,
    /// Where browsers come back to, as https://vpn.example.com:9443/callback; the provider must know it
    #[arg(long, value_name = "URL", requires = "oidc_issuer")]
    pub oidc_redirect: Option<String>,
    /// Where this host answers browsers (default: the port of --oidc-redirect, on all addresses)
    #[arg(long, value_name = "ADDRESS:PORT", requires = "oidc_issuer")]
    pub oidc_listen: Option<SocketAddr>,
    /// File with the certificate for browsers, as PEM (default: no TLS, for a program on this host that has it)
    #[arg(long, value_name = "FILE", requires = "oidc_key")]
    pub oidc_certificate: Option<PathBuf>,
    /// File with the private key of that certificate, as PEM
    #[arg(long, value_name = "FILE", requires = "oidc_certificate", requires = "oidc_issuer")]
    pub oidc_key: Option<PathBuf>,
    /// File with the authorities by which the provider is known, as PEM (default: those of the system)
    #[arg(long, value_name = "FILE", requires = "oidc_issuer")]
    pub oidc_ca: Option<PathBuf>,
    /// Claim that names the user (default: preferred_username)
    #[arg(long, value_name = "CLAIM", requires = "oidc_issuer")]
    pub oidc_claim: Option<String>,
    /// Group that lets a user in; may be repeated (default: all users of the provider)
    #[arg(long, value_name = "GROUP", requires = "oidc_issuer")]
    pub oidc_group: Vec<String>,
    /// Claim that has the user's groups (default: groups)
    #[arg(long, value_name = "CLAIM", requires = "oidc_group")]
    pub oidc_groups_claim: Option<String>,
    /// Scope to ask for beside openid, profile and email; may be repeated
    #[arg(long, value_name = "SCOPE", requires = "oidc_issuer")]
    pub oidc_scope: Vec<String>,
    /// Seconds that a login may take (default: 180)
    #[arg(long, value_name = "SECONDS", requires = "oidc_issuer")]
    pub oidc_wait: Option<u32>,
}

impl OpenvpnOidcArgs {
    /// What the daemon is asked for; `None`: no provider was named. Paths become absolute, since the daemon has another
    /// directory.
    ///
    /// # Errors
    /// A part of it is missing.
    pub(crate) fn settings(self) -> anyhow::Result<Option<OidcSettings>> {
        let Some(issuer) = self.oidc_issuer else { return Ok(None) };
        let (Some(client_id), Some(redirect)) = (self.oidc_client_id, self.oidc_redirect) else {
            bail!("--oidc-issuer goes with --oidc-client-id and --oidc-redirect");
        };
        let absolute = |path: Option<PathBuf>| path.map(std::path::absolute).transpose();
        Ok(Some(OidcSettings {
            issuer,
            client_id,
            client_secret: absolute(self.oidc_client_secret)?,
            redirect,
            listen: self.oidc_listen,
            certificate: absolute(self.oidc_certificate)?,
            key: absolute(self.oidc_key)?,
            ca: absolute(self.oidc_ca)?,
            claim: self.oidc_claim,
            groups: self.oidc_group,
            groups_claim: self.oidc_groups_claim,
            scopes: self.oidc_scope,
            wait_s: self.oidc_wait,
        }))
    }
}
