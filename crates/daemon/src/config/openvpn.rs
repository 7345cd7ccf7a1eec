//! How the gateway for OpenVPN clients serves: options of `weft openvpn serve`, or the section `openvpn` of the
//! configuration file.

use std::net::SocketAddr;
use std::path::PathBuf;

use serde::{Deserialize, Deserializer};
use weft_api::{
    Auth, ClientName, Listen, LoginSettings, ManagementPlace, OidcSettings, Rate, ServeEngine,
    ServeRequest, ToolSettings,
};

use super::{ConfigError, absolute};

/// Options of `weft openvpn serve`. Each may stand in the section `openvpn` of the configuration file under the same
/// name.
#[derive(Clone, Debug, Default, Deserialize, clap::Args)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct OpenvpnOptions {
    /// Where to listen, as [udp:|tcp:][ADDRESS:]PORT; may be repeated (default: udp:1194, on all addresses)
    #[arg(long, value_name = "PLACE")]
    pub listen: Vec<Listen>,
    /// What profiles name this host by, as [udp:|tcp:]HOST[:PORT]; may be repeated (default: the address that other
    /// hosts use, by each protocol that is listened on)
    #[arg(long, value_name = "HOST")]
    pub remote: Vec<String>,
    /// Network that clients join (default: weft)
    #[arg(long, value_name = "NAME")]
    pub network: Option<String>,
    /// Seconds without a packet after which either end sends a ping (default: 10)
    #[arg(long, value_name = "SECONDS")]
    pub ping: Option<u32>,
    /// Seconds without a packet after which a client connects again (default: 60)
    #[arg(long, value_name = "SECONDS")]
    pub ping_restart: Option<u32>,
    /// What moves clients' packets
    #[arg(long, value_enum, value_name = "ENGINE", default_value = "auto")]
    pub engine: OpenvpnEngine,
    /// What clients show: certificate, password, both, or oidc: a certificate and a login by a web page (default:
    /// certificate)
    #[arg(long, value_name = "WHAT")]
    pub auth: Option<Auth>,
    /// Name by which a client with both is known: certificate, user, or same, where both must agree (default: same)
    #[arg(long, value_name = "WHICH")]
    pub client_name: Option<ClientName>,
    /// Program that judges user names and passwords in the place of this host's users
    #[arg(long, value_name = "PATH")]
    pub auth_program: Option<PathBuf>,
    /// Seconds for which a token stands for the password; 0: no tokens (default: 43200)
    #[arg(long, value_name = "SECONDS")]
    pub token_lifetime: Option<u32>,
    /// A token that was not renewed for twice so many seconds is no longer good (default: 3600)
    #[arg(long, value_name = "SECONDS")]
    pub token_renewal: Option<u32>,
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
    /// Send all that clients send through this host, with its address outside (net.ipv4.ip_forward must be on)
    #[arg(long)]
    pub redirect_gateway: bool,
    /// Most bits a second that come from each address of a client, such as 20M (default: no limit)
    #[arg(long, value_name = "RATE")]
    #[serde(deserialize_with = "rate")]
    pub client_up: Option<Rate>,
    /// Most bits a second that go to each address of a client, such as 20M (default: no limit)
    #[arg(long, value_name = "RATE")]
    #[serde(deserialize_with = "rate")]
    pub client_down: Option<Rate>,
    /// Option that all clients are pushed, such as 'route 192.0.2.0 255.255.255.0'; may be repeated
    #[arg(long, value_name = "OPTION")]
    pub push: Vec<String>,
    /// Status file as OpenVPN's, by its name in the directory openvpn of Weft's runtime directory
    #[arg(long, value_name = "NAME")]
    pub status: Option<PathBuf>,
    /// Seconds between two writings of the status file (default: 60)
    #[arg(long, value_name = "SECONDS", requires = "status")]
    pub status_interval: Option<u32>,
    /// Format of a status: 1, 2 or 3 (default: 1)
    #[arg(long, value_name = "FORMAT")]
    pub status_version: Option<u8>,
    /// Management interface as OpenVPN's: the name of a socket in the same directory, or ADDRESS:PORT of the loopback
    #[arg(long, value_name = "PLACE")]
    pub management: Option<ManagementPlace>,
    /// File whose first line is the password of the management interface; a port needs one
    #[arg(long, value_name = "FILE", requires = "management")]
    pub management_password: Option<PathBuf>,
}

/// `--engine` of `weft openvpn serve` and `weft openvpn connect`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum OpenvpnEngine {
    /// The kernel's ovpn device where there is one, else Weft's own
    #[default]
    Auto,
    /// Only the kernel's ovpn device
    Kernel,
    /// Only Weft's own device
    Userspace,
}

impl OpenvpnOptions {
    /// The request to the daemon. Paths become absolute, since the daemon has another working directory.
    ///
    /// # Errors
    /// [`ConfigError::Oidc`] or [`ConfigError::OidcAlone`]: an option of the identity provider is missing.
    pub fn request(self) -> Result<ServeRequest, ConfigError> {
        let oidc = self.provider()?;
        let login = LoginSettings {
            auth: self.auth.unwrap_or_default(),
            client_name: self.client_name.unwrap_or_default(),
            program: self.auth_program,
            token_lifetime_s: self.token_lifetime,
            token_renewal_s: self.token_renewal,
            oidc,
        };
        let tools = ToolSettings {
            status_file: self.status,
            status_interval_s: self.status_interval,
            status_version: self.status_version,
            management: self.management,
            management_password: self.management_password.as_deref().map(absolute),
        };
        Ok(ServeRequest {
            listen: self.listen,
            network: self.network,
            remotes: self.remote,
            ping_s: self.ping,
            ping_restart_s: self.ping_restart,
            engine: match self.engine {
                OpenvpnEngine::Auto => ServeEngine::Auto,
                OpenvpnEngine::Kernel => ServeEngine::Kernel,
                OpenvpnEngine::Userspace => ServeEngine::Userspace,
            },
            login,
            redirect_gateway: self.redirect_gateway,
            client_up: self.client_up,
            client_down: self.client_down,
            pushes: self.push,
            tools,
        })
    }

    /// The identity provider; `None`: none was named.
    fn provider(&self) -> Result<Option<OidcSettings>, ConfigError> {
        let Some(issuer) = self.oidc_issuer.clone() else {
            // The command line has refused these already; a file has not.
            return if self.has_rest_of_provider() {
                Err(ConfigError::OidcAlone)
            } else {
                Ok(None)
            };
        };
        let (Some(client_id), Some(redirect)) =
            (self.oidc_client_id.clone(), self.oidc_redirect.clone())
        else {
            return Err(ConfigError::Oidc);
        };
        let path = |path: &Option<PathBuf>| path.as_deref().map(absolute);
        Ok(Some(OidcSettings {
            issuer,
            client_id,
            client_secret: path(&self.oidc_client_secret),
            redirect,
            listen: self.oidc_listen,
            certificate: path(&self.oidc_certificate),
            key: path(&self.oidc_key),
            ca: path(&self.oidc_ca),
            claim: self.oidc_claim.clone(),
            groups: self.oidc_group.clone(),
            groups_claim: self.oidc_groups_claim.clone(),
            scopes: self.oidc_scope.clone(),
            wait_s: self.oidc_wait,
        }))
    }

    fn has_rest_of_provider(&self) -> bool {
        let files =
            [&self.oidc_client_secret, &self.oidc_certificate, &self.oidc_key, &self.oidc_ca];
        let texts =
            [&self.oidc_client_id, &self.oidc_redirect, &self.oidc_claim, &self.oidc_groups_claim];
        files.into_iter().any(Option::is_some)
            || texts.into_iter().any(Option::is_some)
            || self.oidc_listen.is_some()
            || self.oidc_wait.is_some()
            || !self.oidc_group.is_empty()
            || !self.oidc_scope.is_empty()
    }
}

/// A rate as on the command line, or a number of bits a second.
fn rate<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Rate>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Written {
        Text(String),
        Bits(u64),
    }
    let rate = match Written::deserialize(deserializer)? {
        Written::Text(text) => text.parse(),
        Written::Bits(bits) => Rate::try_from(bits),
    };
    rate.map(Some).map_err(serde::de::Error::custom)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn request(file: &str) -> Result<ServeRequest, String> {
        let options: OpenvpnOptions = toml::from_str(file).map_err(|error| error.to_string())?;
        options.request().map_err(|error| error.to_string())
    }

    #[test]
    fn an_empty_section_is_the_command_without_options() {
        assert_eq!(request("").unwrap(), ServeRequest::default());
    }

    #[test]
    fn a_section_has_the_options_names_and_values() {
        let asked = request(
            "listen = [\"udp:1194\", \"tcp:443\"]\nremote = [\"vpn.example.net\"]\nnetwork = \"shop\"\nping = 5\n\
             ping-restart = 30\nengine = \"userspace\"\nauth = \"oidc\"\nclient-name = \"user\"\ntoken-lifetime = 0\n\
             oidc-issuer = \"https://id.example.com\"\noidc-client-id = \"weft\"\n\
             oidc-redirect = \"https://vpn.example.com:9443/callback\"\noidc-group = [\"staff\"]\n\
             redirect-gateway = true\nclient-up = \"20M\"\nclient-down = 64000\n\
             push = [\"route 192.0.2.0 255.255.255.0\"]\nstatus = \"s\"\nstatus-version = 2\nmanagement = \"m\"\n",
        )
        .unwrap();
        assert_eq!(asked.listen, ["1194".parse().unwrap(), "tcp:443".parse().unwrap()]);
        assert_eq!(
            (asked.remotes[0].as_str(), asked.network.as_deref()),
            ("vpn.example.net", Some("shop"))
        );
        assert_eq!((asked.ping_s, asked.ping_restart_s), (Some(5), Some(30)));
        assert_eq!((asked.engine, asked.redirect_gateway), (ServeEngine::Userspace, true));
        assert_eq!((asked.client_up, asked.client_down), ("20M".parse().ok(), "64K".parse().ok()));
        assert_eq!(asked.pushes, ["route 192.0.2.0 255.255.255.0"]);
        let login = asked.login;
        assert_eq!((login.auth, login.client_name), (Auth::Oidc, ClientName::User));
        assert_eq!(login.token_lifetime_s, Some(0));
        assert_eq!(login.oidc.unwrap().groups, ["staff"]);
        assert_eq!(
            (asked.tools.status_version, asked.tools.status_file),
            (Some(2), Some("s".into()))
        );
        assert_eq!(asked.tools.management, "m".parse().ok());
    }

    #[test]
    fn what_is_wrong_in_a_section_is_named() {
        for (file, word) in [
            ("listne = []", "listne"),
            ("json = true", "json"),
            ("listen = [\"nowhere\"]", "nowhere"),
            ("engine = \"fast\"", "fast"),
            ("auth = \"none\"", "none"),
            ("client-up = \"1\"", "no rate"),
            ("client-up = 1", "no rate"),
            ("client-up = true", "client-up"),
            ("ping = -1", "ping"),
            ("oidc-issuer = \"https://id.example.com\"", "oidc-client-id"),
            ("oidc-scope = [\"a\"]", "oidc-issuer"),
            ("oidc-wait = 9", "oidc-issuer"),
        ] {
            let error = request(file).unwrap_err();
            assert!(error.contains(word), "{file}: {error}");
        }
    }
}
