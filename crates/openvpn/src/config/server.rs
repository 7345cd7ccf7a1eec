//! The configuration of a server.

use std::net::{Ipv4Addr, Ipv6Addr};

use super::lexer::Directive;
use super::pushed::pushed_line;
use super::tls::{PeerUsage, TlsSettings, number_pair};
use super::walk::{Apply, Kind, Walk};
use super::{Args, Files, ImportLine, Outcome, Proto, TAKEN, Verdict, nothing, read};
use crate::messages::{PUSH_OPTIONS_MAX, PushOption, Secret, Topology};
use crate::static_key::{AuthTokenKey, ServerKeyV2};

/// OpenVPN's port.
const PORT_DEFAULT: u16 = 1194;
/// Most sockets of a server.
const LISTENS_MAX: usize = 64;
/// Most routes of a server's own.
const ROUTES_MAX: usize = 4_096;
/// Most variables for programs.
const VARIABLES_MAX: usize = 1_024;
/// How the names of the variables of `setenv-safe` begin.
const SAFE_PREFIX: &str = "OPENVPN_";

/// A socket: what is not said comes from [`ServerSettings::port`] and [`ServerSettings::proto`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listen {
    /// An address or name of this host; `None`: all addresses.
    pub host: Option<String>,
    /// The port.
    pub port: Option<u16>,
    /// The transport.
    pub proto: Option<Proto>,
}

/// Whether clients need a certificate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum VerifyClientCert {
    /// They do.
    #[default]
    Require,
    /// One that is shown must be good.
    Optional,
    /// None is asked for.
    None,
}

/// A program that judges user name and password.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoginProgram {
    /// The command.
    pub command: String,
    /// It gets both in a file rather than in its environment.
    pub is_by_file: bool,
}

/// Tokens in the place of passwords (`auth-gen-token`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenSettings {
    /// Seconds after the login; `None`: for ever.
    pub lifetime_s: Option<u64>,
    /// Seconds until a new one; `None`: with each renewal of keys.
    pub renewal_s: Option<u64>,
    /// Another program decides about tokens too.
    pub is_external: bool,
}

/// So many in so many seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    /// How many.
    pub count: u32,
    /// Seconds.
    pub seconds: u32,
}

/// A file of status.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StatusFile {
    /// Its path.
    pub path: String,
    /// Seconds between two writings.
    pub interval_s: u32,
}

/// The management interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Management {
    /// An address, or the path of a Unix socket.
    pub address: String,
    /// The port; `None`: a Unix socket.
    pub port: Option<u16>,
    /// The content of the file with its password, which is the first line.
    pub password: Option<Secret>,
}

/// What a server's configuration says.
#[derive(Clone, Debug)]
pub struct ServerSettings {
    /// Sockets; none: one on all addresses.
    pub listens: Vec<Listen>,
    /// The port of sockets without one.
    pub port: u16,
    /// The transport of sockets without one.
    pub proto: Proto,
    /// The network of clients: address and mask.
    pub ipv4: Option<(Ipv4Addr, Ipv4Addr)>,
    /// Clients without an address of their own get one of the pool (not with `nopool`).
    pub has_pool: bool,
    /// The first and the last address of the pool, where they are given.
    pub pool_ipv4: Option<(Ipv4Addr, Ipv4Addr)>,
    /// The network of clients: address and prefix length.
    pub ipv6: Option<(Ipv6Addr, u8)>,
    /// The first address of the pool, where it is given.
    pub pool_ipv6: Option<(Ipv6Addr, u8)>,
    /// The server's own address and the mask or other end, where `server` does not say it.
    pub own_ipv4: Option<(Ipv4Addr, Ipv4Addr)>,
    /// The server's own address, prefix length.
    pub own_ipv6: Option<(Ipv6Addr, u8)>,
    /// How addresses lay so far; all clients get a subnet.
    pub topology: Topology,
    /// Which client had which address.
    pub pool_file: Option<StatusFile>,
    /// Certificates, keys and times.
    pub tls: TlsSettings,
    /// The key of tls-crypt-v2.
    pub tls_crypt_v2: Option<ServerKeyV2>,
    /// Clients without early negotiation are refused (`force-cookie`).
    pub forces_cookie: bool,
    /// Whether clients need a certificate.
    pub client_cert: VerifyClientCert,
    /// The service of PAM that judges user name and password.
    pub pam_service: Option<String>,
    /// The program that judges user name and password.
    pub login_program: Option<LoginProgram>,
    /// Variables for programs, in the order of their lines: a later one of the same name counts.
    pub environment: Vec<(String, String)>,
    /// User name and password may be missing.
    pub is_login_optional: bool,
    /// A client's name is its user name.
    pub names_by_user: bool,
    /// Tokens.
    pub tokens: Option<TokenSettings>,
    /// The key of tokens.
    pub token_key: Option<AuthTokenKey>,
    /// Options that all clients are pushed.
    pub pushes: Vec<String>,
    /// Routes of this host to networks behind clients.
    pub routes: Vec<PushOption>,
    /// The folder with the files of single clients.
    pub client_folder: Option<String>,
    /// A client needs a file there.
    pub needs_client_file: bool,
    /// Clients reach each other.
    pub connects_clients: bool,
    /// A name may be connected several times.
    pub allows_duplicates: bool,
    /// Most clients.
    pub clients_max: u32,
    /// New clients.
    pub connect_rate: Option<Rate>,
    /// Answers to first packets.
    pub first_packet_rate: Rate,
    /// Seconds without anything sent until a ping; 0: none.
    pub ping_s: u32,
    /// Seconds without anything received until the client is gone; 0: never.
    pub ping_restart_s: u32,
    /// The tunnel's MTU, in bytes.
    pub tun_mtu: Option<u32>,
    /// Clients are told when the server ends.
    pub exit_notify: bool,
    /// All clients must take keys from the TLS exporter.
    pub forces_exporter: bool,
    /// A file of status.
    pub status: Option<StatusFile>,
    /// Its version: 1, 2 or 3.
    pub status_version: u8,
    /// The management interface.
    pub management: Option<Management>,
}

impl Default for ServerSettings {
    fn default() -> Self {
        Self {
            listens: Vec::new(),
            port: PORT_DEFAULT,
            proto: Proto::default(),
            ipv4: None,
            has_pool: true,
            pool_ipv4: None,
            ipv6: None,
            pool_ipv6: None,
            own_ipv4: None,
            own_ipv6: None,
            topology: Topology::Net30,
            pool_file: None,
            tls: TlsSettings::default(),
            tls_crypt_v2: None,
            forces_cookie: false,
            client_cert: VerifyClientCert::Require,
            pam_service: None,
            login_program: None,
            environment: Vec::new(),
            is_login_optional: false,
            names_by_user: false,
            tokens: None,
            token_key: None,
            pushes: Vec::new(),
            routes: Vec::new(),
            client_folder: None,
            needs_client_file: false,
            connects_clients: false,
            allows_duplicates: false,
            clients_max: 1_024,
            connect_rate: None,
            first_packet_rate: Rate { count: 100, seconds: 10 },
            ping_s: 0,
            ping_restart_s: 0,
            tun_mtu: None,
            exit_notify: false,
            forces_exporter: false,
            status: None,
            status_version: 1,
            management: None,
        }
    }
}

/// A server's configuration, read.
#[derive(Clone, Debug)]
pub struct ServerImport {
    /// What it says.
    pub settings: ServerSettings,
    /// What became of each line.
    pub lines: Vec<ImportLine>,
    /// What a server needs and the file does not have, and what in it contradicts itself.
    pub missing: Vec<&'static str>,
}

/// Reads a server's configuration. Files that it names are read at once, but for folders and those that change.
pub fn read_server_config(text: &str, files: &mut dyn Files) -> ServerImport {
    let mut settings = ServerSettings::default();
    let (lines, folder) = Walk::new(Kind::Server, files).run(text, &mut settings);
    let seen = |path: &mut String| {
        if let Some(folder) = folder.as_deref().filter(|_| !path.starts_with('/')) {
            *path = format!("{}/{path}", folder.trim_end_matches('/'));
        }
    };
    settings.client_folder.iter_mut().for_each(seen);
    settings.pool_file.iter_mut().for_each(|file| seen(&mut file.path));
    let missing = settings.missing();
    ServerImport { settings, lines, missing }
}

impl Apply for ServerSettings {
    fn apply(&mut self, directive: &Directive, files: &mut dyn Files) -> Outcome {
        let args = Args(directive);
        if let Some(outcome) = self.tls.apply(PeerUsage::Client, directive, files) {
            return outcome;
        }
        let tried = self.sockets(args).or_else(|| self.addresses(args));
        let tried = tried.or_else(|| self.clients(args)).or_else(|| self.liveness(args));
        let tried =
            tried.or_else(|| self.logins(args, files)).or_else(|| self.outside(args, files));
        // The table says that it is taken over, so one of these takes it.
        tried.unwrap_or_else(|| Err(format!("{} is not read here: remove it", directive.name)))
    }
}

impl ServerSettings {
    /// The server's own address in the network of clients: the first.
    pub fn server_ipv4(&self) -> Option<Ipv4Addr> {
        match (self.ipv4, self.own_ipv4) {
            (Some((network, _)), _) => Some(plus_ipv4(network, 1)),
            (None, own) => own.map(|(address, _)| address),
        }
    }

    /// The addresses, first and last, for clients without one of their own.
    pub fn client_pool_ipv4(&self) -> Option<(Ipv4Addr, Ipv4Addr)> {
        if self.pool_ipv4.is_some() {
            return self.pool_ipv4;
        }
        let (network, mask) = self.ipv4.filter(|_| self.has_pool)?;
        let last = u32::from(network) | !u32::from(mask);
        Some((plus_ipv4(network, 2), Ipv4Addr::from(last - 1)))
    }

    /// The server's own address in the network of clients: the first.
    pub fn server_ipv6(&self) -> Option<Ipv6Addr> {
        match (self.ipv6, self.own_ipv6) {
            (Some((network, _)), _) => Some(plus_ipv6(network, 1)),
            (None, own) => own.map(|(address, _)| address),
        }
    }

    /// The first address for clients without one of their own, and the prefix length.
    pub fn client_pool_ipv6(&self) -> Option<(Ipv6Addr, u8)> {
        let behind = |bits: u8| if bits < 112 { 0x1000 } else { 2 };
        self.pool_ipv6.or_else(|| {
            let (network, bits) = self.ipv6.filter(|_| self.has_pool)?;
            Some((plus_ipv6(network, behind(bits)), bits))
        })
    }

    fn is_pool_outside(&self) -> bool {
        match (self.ipv4, self.pool_ipv4) {
            (Some((network, mask)), Some((first, last))) => [first, last]
                .into_iter()
                .any(|address| u32::from(address) & u32::from(mask) != u32::from(network)),
            _ => false,
        }
    }

    fn missing(&self) -> Vec<&'static str> {
        let checks_no_certificate =
            self.client_cert == VerifyClientCert::None || !self.tls.fingerprints.is_empty();
        let has_login = self.pam_service.is_some() || self.login_program.is_some();
        let all = [
            (
                self.ipv4.is_none() && self.ipv6.is_none() && self.own_ipv4.is_none(),
                "no network of clients: add server NETWORK MASK",
            ),
            (self.tls.cert.is_none(), "no certificate: add cert FILE"),
            (self.tls.key.is_none(), "no key of the certificate: add key FILE"),
            (self.tls.ca.is_none() && !checks_no_certificate, "no authority: add ca FILE"),
            (
                self.client_cert != VerifyClientCert::Require && !has_login,
                "nobody is checked: clients need a certificate or a password",
            ),
            (
                self.is_pool_outside(),
                "the pool is outside of the network of clients: correct ifconfig-pool",
            ),
            (
                self.needs_client_file && self.client_folder.is_none(),
                "ccd-exclusive without client-config-dir: add the folder",
            ),
        ];
        all.into_iter().filter(|(is_missing, _)| *is_missing).map(|(_, what)| what).collect()
    }

    fn sockets(&mut self, args: Args<'_>) -> Option<Outcome> {
        Some(match args.0.name.as_str() {
            "local" => self.local(args),
            "port" | "lport" => args.get(0, "a port").map(|port| {
                self.port = port;
                Verdict::Taken
            }),
            "proto" => args.get(0, "udp or tcp, with 4 or 6 behind").map(|proto| {
                self.proto = proto;
                Verdict::Taken
            }),
            "dev" | "dev-type" => device(args),
            "mode" => match args.text(0, "server") {
                Ok("server") => TAKEN,
                Ok(_) => Err("tunnels without a server are not made: use server".to_owned()),
                Err(error) => Err(error),
            },
            "tls-server" => TAKEN,
            _ => return None,
        })
    }

    fn local(&mut self, args: Args<'_>) -> Outcome {
        args.at_most(3)?;
        if self.listens.len() == LISTENS_MAX {
            return Err(format!("more than {LISTENS_MAX} sockets: remove some"));
        }
        let host = Some(args.text(0, "an address")?).filter(|host| *host != "*");
        self.listens.push(Listen {
            host: host.map(str::to_owned),
            port: args.optional(1, "a port")?,
            proto: args.optional(2, "udp or tcp, with 4 or 6 behind")?,
        });
        TAKEN
    }

    fn addresses(&mut self, args: Args<'_>) -> Option<Outcome> {
        Some(match args.0.name.as_str() {
            "server" => self.network(args),
            "server-ipv6" => prefix(args).map(|prefix| {
                self.ipv6 = Some(prefix);
                Verdict::Taken
            }),
            "ifconfig" => number_pair(args, "two IPv4 addresses").map(|pair| {
                self.own_ipv4 = Some(pair);
                Verdict::Taken
            }),
            "ifconfig-ipv6" => prefix(args).map(|prefix| {
                self.own_ipv6 = Some(prefix);
                Verdict::Taken
            }),
            "ifconfig-pool" => {
                number_pair(args, "the first and the last address").and_then(|pool| {
                    if pool.0 > pool.1 {
                        return Err("the last address of the pool is before the first: correct it"
                            .to_owned());
                    }
                    self.pool_ipv4 = Some(pool);
                    TAKEN
                })
            }
            "ifconfig-ipv6-pool" => prefix(args).map(|prefix| {
                self.pool_ipv6 = Some(prefix);
                Verdict::Taken
            }),
            "ifconfig-pool-persist" => file(args, 600).map(|file| {
                self.pool_file = Some(file);
                Verdict::Taken
            }),
            "topology" => self.topology(args),
            "route" | "route-ipv6" => self.route(args),
            _ => return None,
        })
    }

    fn network(&mut self, args: Args<'_>) -> Outcome {
        args.at_most(3)?;
        let expected = "a network and a mask, and perhaps nopool";
        let (network, mask) = number_pair::<Ipv4Addr>(args, expected)?;
        let bits = u32::from(mask).leading_ones();
        if !(8..=30).contains(&bits) || u32::from(mask).count_ones() != bits {
            return Err(args.bad(1, "a mask from 255.0.0.0 to 255.255.255.252"));
        }
        if u32::from(network) & !u32::from(mask) != 0 {
            return Err(args.bad(0, "the first address of the network"));
        }
        match args.optional::<String>(2, "nopool")?.as_deref() {
            None => {}
            Some("nopool") => self.has_pool = false,
            Some(_) => return Err(args.bad(2, "nopool")),
        }
        self.ipv4 = Some((network, mask));
        TAKEN
    }

    fn topology(&mut self, args: Args<'_>) -> Outcome {
        self.topology = args.get(0, "subnet, net30 or p2p")?;
        match self.topology {
            Topology::Subnet => TAKEN,
            Topology::Net30 | Topology::P2p => {
                nothing("clients get topology subnet, which all since OpenVPN 2.1 have")
            }
        }
    }

    fn route(&mut self, args: Args<'_>) -> Outcome {
        if self.routes.len() == ROUTES_MAX {
            return Err(format!("more than {ROUTES_MAX} routes: remove some"));
        }
        let route = PushOption::parse(&args.0.shown()).map_err(|error| error.to_string())?;
        self.routes.push(route);
        TAKEN
    }

    fn clients(&mut self, args: Args<'_>) -> Option<Outcome> {
        match args.0.name.as_str() {
            "push" => return Some(self.push(args)),
            "client-config-dir" => {
                return Some(args.text(0, "a folder").map(|folder| {
                    self.client_folder = Some(folder.to_owned());
                    Verdict::Taken
                }));
            }
            "ccd-exclusive" => self.needs_client_file = true,
            "client-to-client" => self.connects_clients = true,
            "duplicate-cn" => self.allows_duplicates = true,
            "max-clients" => {
                return Some(args.get(0, "a number from 1").and_then(|clients_max| {
                    if clients_max == 0 {
                        return Err(args.bad(0, "a number from 1"));
                    }
                    self.clients_max = clients_max;
                    TAKEN
                }));
            }
            "connect-freq" | "connect-freq-initial" => return Some(self.rate(args)),
            "comp-lzo" | "compress" => {
                return Some(nothing(
                    "Weft never compresses; a client with comp-lzo in its profile is told to stop",
                ));
            }
            _ => return None,
        }
        Some(TAKEN)
    }

    fn push(&mut self, args: Args<'_>) -> Outcome {
        pushed_line(args, &mut |option| {
            if self.pushes.len() == PUSH_OPTIONS_MAX {
                return Err(format!("more than {PUSH_OPTIONS_MAX} pushed options: remove some"));
            }
            self.pushes.push(option);
            TAKEN
        })
    }

    fn rate(&mut self, args: Args<'_>) -> Outcome {
        let (count, seconds) = number_pair(args, "a number and seconds")?;
        let rate = Rate { count, seconds };
        if args.0.name == "connect-freq" {
            self.connect_rate = Some(rate);
        } else {
            self.first_packet_rate = rate;
        }
        TAKEN
    }

    fn liveness(&mut self, args: Args<'_>) -> Option<Outcome> {
        let seconds = || args.get::<u32>(0, "seconds");
        Some(match args.0.name.as_str() {
            "keepalive" => self.keepalive(args),
            "ping" => seconds().map(|seconds| {
                self.ping_s = seconds;
                Verdict::Taken
            }),
            "ping-restart" => seconds().map(|seconds| {
                self.ping_restart_s = seconds;
                Verdict::Taken
            }),
            "tun-mtu" => args.get(0, "bytes").map(|bytes| {
                self.tun_mtu = Some(bytes);
                Verdict::Taken
            }),
            "explicit-exit-notify" => args.optional::<u32>(0, "0, 1 or 2").map(|times| {
                self.exit_notify = times != Some(0);
                Verdict::Taken
            }),
            "force-tls-key-material-export" => {
                self.forces_exporter = true;
                TAKEN
            }
            _ => return None,
        })
    }

    /// The server waits twice as long as its clients, which are pushed the values as they are.
    fn keepalive(&mut self, args: Args<'_>) -> Outcome {
        let (ping, restart) = number_pair::<u32>(args, "two times in seconds")?;
        if ping == 0 || restart < ping.saturating_mul(2) {
            return Err(args.bad(1, "at least twice the first, which is at least 1"));
        }
        (self.ping_s, self.ping_restart_s) = (ping, restart.saturating_mul(2));
        self.pushes.extend([format!("ping {ping}"), format!("ping-restart {restart}")]);
        TAKEN
    }

    fn logins(&mut self, args: Args<'_>, files: &mut dyn Files) -> Option<Outcome> {
        Some(match args.0.name.as_str() {
            "tls-crypt-v2" => self.tls_crypt_v2(args, files),
            "verify-client-cert" => self.verify_client_cert(args),
            "client-cert-not-required" => {
                self.client_cert = VerifyClientCert::None;
                TAKEN
            }
            "auth-user-pass-verify" => self.login_program(args),
            "auth-user-pass-optional" => {
                self.is_login_optional = true;
                TAKEN
            }
            "plugin" => self.plugin(args),
            "username-as-common-name" => {
                self.names_by_user = true;
                TAKEN
            }
            "x509-username-field" => match args.text(0, "CN") {
                Ok("CN") => TAKEN,
                Ok(_) => {
                    Err("a client's name is the common name of its certificate: use CN".to_owned())
                }
                Err(error) => Err(error),
            },
            "auth-gen-token" => self.token_settings(args),
            "auth-gen-token-secret" => self.token_key(args, files),
            _ => return None,
        })
    }

    fn tls_crypt_v2(&mut self, args: Args<'_>, files: &mut dyn Files) -> Outcome {
        let key = ServerKeyV2::parse(&args.content(files)?).map_err(|error| error.to_string())?;
        self.forces_cookie = match args.optional::<String>(1, "force-cookie or allow-noncookie")? {
            None => false,
            Some(word) if word == "force-cookie" => true,
            Some(word) if word == "allow-noncookie" => false,
            Some(_) => return Err(args.bad(1, "force-cookie or allow-noncookie")),
        };
        self.tls_crypt_v2 = Some(key);
        TAKEN
    }

    fn verify_client_cert(&mut self, args: Args<'_>) -> Outcome {
        self.client_cert = match args.optional::<String>(0, "none, optional or require")?.as_deref()
        {
            None | Some("require") => VerifyClientCert::Require,
            Some("optional") => VerifyClientCert::Optional,
            Some("none") => VerifyClientCert::None,
            Some(_) => return Err(args.bad(0, "none, optional or require")),
        };
        TAKEN
    }

    fn login_program(&mut self, args: Args<'_>) -> Outcome {
        args.at_most(2)?;
        let is_by_file = match args.text(1, "via-file or via-env")? {
            "via-file" => true,
            "via-env" => false,
            _ => return Err(args.bad(1, "via-file or via-env")),
        };
        let command = args.text(0, "a command")?.to_owned();
        self.login_program = Some(LoginProgram { command, is_by_file });
        TAKEN
    }

    fn plugin(&mut self, args: Args<'_>) -> Outcome {
        let path = args.text(0, "a plugin")?;
        if !path.contains("auth-pam") {
            return Err(
                "plugins are not run, but for that of PAM: what this one does is lost".to_owned()
            );
        }
        // The service, then what is to be answered to which question.
        let words = args.0.values[1..].iter().flat_map(|value| value.split_whitespace());
        self.pam_service = Some(words.take(1).collect::<String>()).filter(|name| !name.is_empty());
        if self.pam_service.is_none() {
            return Err("the plugin of PAM names no service: add it, as login".to_owned());
        }
        TAKEN
    }

    fn token_settings(&mut self, args: Args<'_>) -> Outcome {
        args.at_most(3)?;
        let mut numbers = Vec::new();
        let mut is_external = false;
        for (at, value) in args.0.values.iter().enumerate() {
            match value.as_str() {
                "external-auth" => is_external = true,
                _ => numbers.push(args.get::<u64>(at, "seconds, or external-auth")?),
            }
        }
        let lifetime_s = numbers.first().copied().filter(|seconds| *seconds > 0);
        let renewal_s = numbers.get(1).copied().filter(|seconds| *seconds > 0);
        self.tokens = Some(TokenSettings { lifetime_s, renewal_s, is_external });
        TAKEN
    }

    fn token_key(&mut self, args: Args<'_>, files: &mut dyn Files) -> Outcome {
        let key = AuthTokenKey::parse(&args.content(files)?).map_err(|error| error.to_string())?;
        self.token_key = Some(key);
        TAKEN
    }

    fn outside(&mut self, args: Args<'_>, files: &mut dyn Files) -> Option<Outcome> {
        Some(match args.0.name.as_str() {
            "status" => file(args, 60).map(|file| {
                self.status = Some(file);
                Verdict::Taken
            }),
            "status-version" => match args.get(0, "1, 2 or 3") {
                Ok(version @ 1..=3) => {
                    self.status_version = version;
                    TAKEN
                }
                _ => Err(args.bad(0, "1, 2 or 3")),
            },
            "management" => self.management(args, files),
            "setenv" | "setenv-safe" => self.variable(args),
            _ => return None,
        })
    }

    /// A variable for programs; those of `setenv-safe` get a name that changes nothing about the program.
    fn variable(&mut self, args: Args<'_>) -> Outcome {
        args.at_most(2)?;
        let expected = "a name, and a value";
        let name = args.text(0, expected)?;
        if name.is_empty() || name.contains(['=', '\0']) {
            return Err(args.bad(0, expected));
        }
        let value: String = args.optional(1, expected)?.unwrap_or_default();
        if value.contains('\0') {
            return Err(args.bad(1, expected));
        }
        if self.environment.len() == VARIABLES_MAX {
            return Err(format!("more than {VARIABLES_MAX} variables: remove some"));
        }
        let prefix = if args.0.name == "setenv-safe" { SAFE_PREFIX } else { "" };
        self.environment.push((format!("{prefix}{name}"), value));
        TAKEN
    }

    fn management(&mut self, args: Args<'_>, files: &mut dyn Files) -> Outcome {
        let expected = "an address and a port, or a path and unix";
        let address = args.text(0, expected)?.to_owned();
        let port = match args.text(1, expected)? {
            "unix" => None,
            _ => Some(args.get(1, expected)?),
        };
        let path: Option<String> = args.optional(2, "a file")?;
        let password = path.map(|path| read(&path, files)).transpose()?;
        let password = password.map(|content| Secret::new(content.as_str()));
        self.management = Some(Management { address, port, password });
        TAKEN
    }
}

/// `dev` and `dev-type`, which say tun or tap.
pub(super) fn device(args: Args<'_>) -> Outcome {
    let name = args.text(0, "tun")?;
    if name.starts_with("tap") {
        return Err(
            "Weft carries IP packets, no Ethernet frames: change dev tap to dev tun".to_owned()
        );
    }
    if name == "tun" || args.0.name == "dev-type" {
        return TAKEN;
    }
    nothing("Weft names the device itself")
}

/// An address of a network; no prefix is so short that it could pass the end.
fn plus_ipv4(network: Ipv4Addr, count: u32) -> Ipv4Addr {
    u32::from(network).saturating_add(count).into()
}

fn plus_ipv6(network: Ipv6Addr, count: u128) -> Ipv6Addr {
    u128::from(network).saturating_add(count).into()
}

fn prefix(args: Args<'_>) -> Result<(Ipv6Addr, u8), String> {
    let expected = "an IPv6 address with its prefix length";
    let bad = || args.bad(0, expected);
    let (address, bits) = args.text(0, expected)?.split_once('/').ok_or_else(bad)?;
    let bits = bits.parse().ok().filter(|bits| *bits <= 124).ok_or_else(bad)?;
    Ok((address.parse().map_err(|_| bad())?, bits))
}

fn file(args: Args<'_>, interval_s: u32) -> Result<StatusFile, String> {
    let path = args.text(0, "a file")?.to_owned();
    Ok(StatusFile { path, interval_s: args.optional(1, "seconds")?.unwrap_or(interval_s) })
}
