//! The profile of a client.

use super::lexer::{self, Directive};
use super::server::device;
use super::tls::{PeerUsage, TlsSettings};
use super::walk::{Apply, Kind, Walk};
use super::{Args, Files, ImportLine, Outcome, Proto, TAKEN, Verdict, nothing};
use crate::messages::{PushOption, Secret};
use crate::static_key::ClientKeyV2;

/// OpenVPN's port.
const PORT_DEFAULT: u16 = 1194;
/// Most servers of a profile, as OpenVPN's own.
const REMOTES_MAX: usize = 64;
/// Most filters, options and variables of a profile.
const ITEMS_MAX: usize = 4_096;

/// A server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Remote {
    /// Its name or address.
    pub host: String,
    /// Its port; `None`: that of the profile.
    pub port: Option<u16>,
    /// The transport; `None`: that of the profile.
    pub proto: Option<Proto>,
}

/// User name and password.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Login {
    /// The name, where the profile has it.
    pub user: Option<String>,
    /// The password, where the profile has it.
    pub password: Option<Secret>,
}

/// A question that is asked beside the password.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StaticChallenge {
    /// The question.
    pub text: String,
    /// The answer may be shown while it is typed.
    pub echo: bool,
    /// The answer is put behind the password rather than sent beside it.
    pub is_concatenated: bool,
}

/// What to do with pushed options that begin like a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PullFilter {
    /// They are taken.
    Accept(String),
    /// They are left out.
    Ignore(String),
    /// The connection ends.
    Reject(String),
}

/// What a profile says.
#[derive(Clone, Debug, Default)]
pub struct ClientProfile {
    /// The servers, in their order.
    pub remotes: Vec<Remote>,
    /// The port of servers without one.
    pub port: Option<u16>,
    /// The transport of servers without one.
    pub proto: Proto,
    /// Servers are tried in a random order.
    pub is_random: bool,
    /// Only servers of this transport are tried: TCP or not.
    pub only_tcp: Option<bool>,
    /// The source address.
    pub local: Option<String>,
    /// The source port.
    pub local_port: Option<u16>,
    /// Certificates, keys and times.
    pub tls: TlsSettings,
    /// The key of tls-crypt-v2.
    pub tls_crypt_v2: Option<ClientKeyV2>,
    /// User name and password are needed.
    pub login: Option<Login>,
    /// A question beside the password.
    pub challenge: Option<StaticChallenge>,
    /// The server's options are asked for.
    pub pulls: bool,
    /// Pushed routes and names are left out.
    pub ignores_routes: bool,
    /// Routes are not set, neither pushed nor own.
    pub sets_no_routes: bool,
    /// Filters, the first that fits decides.
    pub pull_filters: Vec<PullFilter>,
    /// Options that need no push.
    pub options: Vec<PushOption>,
    /// The server learns the platform's version and more.
    pub tells_details: bool,
    /// Variables `UV_…` for the server.
    pub variables: Vec<(String, String)>,
    /// Seconds without anything sent until a ping.
    pub ping_s: Option<u32>,
    /// Seconds without anything received until a new connection.
    pub ping_restart_s: Option<u32>,
    /// Seconds without anything received until the end.
    pub ping_exit_s: Option<u32>,
    /// The tunnel's MTU, in bytes.
    pub tun_mtu: Option<u32>,
    /// The server is told when the client ends.
    pub exit_notify: bool,
    /// Seconds that one server is tried.
    pub connect_timeout_s: Option<u32>,
    /// Seconds between two attempts.
    pub connect_retry_s: Option<u32>,
    /// Most attempts; `None`: no end.
    pub attempts_max: Option<u32>,
}

/// A profile, read.
#[derive(Clone, Debug)]
pub struct ClientImport {
    /// What it says.
    pub profile: ClientProfile,
    /// What became of each line.
    pub lines: Vec<ImportLine>,
    /// What a client needs and the profile does not have.
    pub missing: Vec<&'static str>,
}

/// Reads a client's profile, and the files that it names.
pub fn read_client_profile(text: &str, files: &mut dyn Files) -> ClientImport {
    let mut profile = ClientProfile::default();
    let (lines, _) = Walk::new(Kind::Client, files).run(text, &mut profile);
    let missing = profile.missing();
    ClientImport { profile, lines, missing }
}

impl Apply for ClientProfile {
    fn apply(&mut self, directive: &Directive, files: &mut dyn Files) -> Outcome {
        let args = Args(directive);
        if let Some(outcome) = self.tls.apply(PeerUsage::Server, directive, files) {
            return outcome;
        }
        let tried = self.servers(args).or_else(|| self.pulling(args));
        let tried = tried.or_else(|| self.login(args, files)).or_else(|| self.times(args));
        // The table says that it is taken over, so one of these takes it.
        tried.unwrap_or_else(|| Err(format!("{} is not read here: remove it", directive.name)))
    }
}

impl ClientProfile {
    /// A server's port and transport.
    pub fn target(&self, remote: &Remote) -> (u16, Proto) {
        let port = remote.port.or(self.port).unwrap_or(PORT_DEFAULT);
        (port, remote.proto.unwrap_or(self.proto))
    }

    fn missing(&self) -> Vec<&'static str> {
        let has_cert = self.tls.cert.is_some();
        let all = [
            (self.remotes.is_empty(), "no server: add remote HOST"),
            (
                self.tls.ca.is_none() && self.tls.fingerprints.is_empty(),
                "no authority: add ca FILE or peer-fingerprint",
            ),
            (has_cert && self.tls.key.is_none(), "no key of the certificate: add key FILE"),
            (
                !has_cert && self.login.is_none(),
                "neither certificate nor password: add cert and key, or auth-user-pass",
            ),
            (!self.pulls, "a client takes its address from the server: add client"),
        ];
        all.into_iter().filter(|(is_missing, _)| *is_missing).map(|(_, what)| what).collect()
    }

    fn servers(&mut self, args: Args<'_>) -> Option<Outcome> {
        Some(match args.0.name.as_str() {
            "remote" => remote(args).and_then(|remote| self.add_remote(remote)),
            "connection" => self.connection(args),
            "remote-random" => {
                self.is_random = true;
                TAKEN
            }
            "port" | "rport" => args.get(0, "a port").map(|port| {
                self.port = Some(port);
                Verdict::Taken
            }),
            "lport" => args.get(0, "a port").map(|port| {
                self.local_port = Some(port);
                Verdict::Taken
            }),
            "local" => args.text(0, "an address").map(|address| {
                self.local = Some(address.to_owned());
                Verdict::Taken
            }),
            "proto" => args.get(0, "udp or tcp, with 4 or 6 behind").map(|proto| {
                self.proto = proto;
                Verdict::Taken
            }),
            "proto-force" => args.get::<Proto>(0, "udp or tcp").map(|proto| {
                self.only_tcp = Some(proto.is_tcp);
                Verdict::Taken
            }),
            "dev" | "dev-type" => device(args),
            "topology" => nothing("the server says it"),
            "mode" => match args.text(0, "p2p") {
                Ok("p2p") => TAKEN,
                _ => Err("this is a server's file: give a client's profile".to_owned()),
            },
            "comp-lzo" | "compress" => {
                nothing("Weft never compresses; a server that does so is named when it says it")
            }
            _ => return None,
        })
    }

    fn add_remote(&mut self, remote: Remote) -> Outcome {
        if self.remotes.len() == REMOTES_MAX {
            return Err(format!("more than {REMOTES_MAX} servers: remove some"));
        }
        self.remotes.push(remote);
        TAKEN
    }

    fn connection(&mut self, args: Args<'_>) -> Outcome {
        let Some(block) = &args.0.block else {
            return Err("connection is a block: write <connection> and </connection>".to_owned());
        };
        let (mut found, mut port, mut proto) = (None, None, None);
        for line in lexer::read(block) {
            let directive =
                line.map_err(|bad| format!("line {} of it: {}", bad.line, bad.error))?;
            let inner = Args(&directive);
            match directive.name.as_str() {
                "remote" => found = Some(remote(inner)?),
                "port" | "rport" => port = Some(inner.get(0, "a port")?),
                "proto" => proto = Some(inner.get(0, "udp or tcp, with 4 or 6 behind")?),
                "nobind"
                | "bind"
                | "float"
                | "connect-timeout"
                | "connect-retry"
                | "mssfix"
                | "explicit-exit-notify"
                | "connect-retry-max"
                | "server-poll-timeout" => {}
                name => {
                    return Err(format!(
                        "{name} of one connection is not read: move it out of the block"
                    ));
                }
            }
        }
        let remote = found.ok_or("the connection has no remote: add it".to_owned())?;
        let (port, proto) = (remote.port.or(port), remote.proto.or(proto));
        self.add_remote(Remote { host: remote.host, port, proto })
    }

    fn pulling(&mut self, args: Args<'_>) -> Option<Outcome> {
        match args.0.name.as_str() {
            "client" | "pull" => self.pulls = true,
            "tls-client" => {}
            "route-nopull" => self.ignores_routes = true,
            "route-noexec" => self.sets_no_routes = true,
            "push-peer-info" => self.tells_details = true,
            "pull-filter" => return Some(self.filter(args)),
            "setenv" => return Some(self.variable(args)),
            "route" | "route-ipv6" | "route-gateway" | "route-metric" | "redirect-gateway"
            | "redirect-private" | "dhcp-option" | "dns" | "block-ipv6" | "inactive"
            | "session-timeout" => return Some(self.option(args)),
            "route-ipv6-gateway" => return Some(nothing("routes go into the tunnel's device")),
            _ => return None,
        }
        Some(TAKEN)
    }

    fn filter(&mut self, args: Args<'_>) -> Outcome {
        let start = args.text(1, "accept, ignore or reject, and a text")?.to_owned();
        if self.pull_filters.len() == ITEMS_MAX {
            return Err(format!("more than {ITEMS_MAX} filters: remove some"));
        }
        self.pull_filters.push(match args.text(0, "accept, ignore or reject")? {
            "accept" => PullFilter::Accept(start),
            "ignore" => PullFilter::Ignore(start),
            "reject" => PullFilter::Reject(start),
            _ => return Err(args.bad(0, "accept, ignore or reject")),
        });
        TAKEN
    }

    fn variable(&mut self, args: Args<'_>) -> Outcome {
        let name = args.text(0, "a name and a value")?;
        if !name.starts_with("UV_") {
            return nothing("it is for programs that OpenVPN runs");
        }
        if self.variables.len() == ITEMS_MAX {
            return Err(format!("more than {ITEMS_MAX} variables: remove some"));
        }
        let value = args.optional(1, "a value")?.unwrap_or_default();
        self.variables.push((name.to_owned(), value));
        TAKEN
    }

    fn option(&mut self, args: Args<'_>) -> Outcome {
        if self.options.len() == ITEMS_MAX {
            return Err(format!("more than {ITEMS_MAX} options: remove some"));
        }
        let option = PushOption::parse(&args.0.shown()).map_err(|error| error.to_string())?;
        self.options.push(option);
        TAKEN
    }

    fn login(&mut self, args: Args<'_>, files: &mut dyn Files) -> Option<Outcome> {
        Some(match args.0.name.as_str() {
            "auth-user-pass" => self.user_pass(args, files),
            "static-challenge" => self.static_challenge(args),
            "tls-crypt-v2" => args.content(files).and_then(|text| {
                let key = ClientKeyV2::parse(&text).map_err(|error| error.to_string())?;
                self.tls_crypt_v2 = Some(key);
                TAKEN
            }),
            _ => return None,
        })
    }

    fn user_pass(&mut self, args: Args<'_>, files: &mut dyn Files) -> Outcome {
        let mut login = Login::default();
        let is_typed = args.0.values.first().is_none_or(|value| value == "username-only");
        if !is_typed || args.0.block.is_some() {
            let text = args.content(files)?;
            let mut lines = text.lines();
            login.user = lines.next().map(str::to_owned).filter(|user| !user.is_empty());
            login.password = lines.next().map(Secret::new);
            if login.user.is_none() {
                return Err("the file has no user name on its first line: add it".to_owned());
            }
        }
        self.login = Some(login);
        TAKEN
    }

    fn static_challenge(&mut self, args: Args<'_>) -> Outcome {
        let is_concatenated = match args.optional::<String>(2, "scrv1 or concat")?.as_deref() {
            None | Some("scrv1") => false,
            Some("concat") => true,
            Some(_) => return Err(args.bad(2, "scrv1 or concat")),
        };
        self.challenge = Some(StaticChallenge {
            text: args.text(0, "a question, and 0 or 1")?.to_owned(),
            echo: args.get::<u8>(1, "0 or 1")? != 0,
            is_concatenated,
        });
        TAKEN
    }

    fn times(&mut self, args: Args<'_>) -> Option<Outcome> {
        let slot = match args.0.name.as_str() {
            "ping" => &mut self.ping_s,
            "ping-restart" => &mut self.ping_restart_s,
            "ping-exit" => &mut self.ping_exit_s,
            "tun-mtu" => &mut self.tun_mtu,
            "connect-timeout" | "server-poll-timeout" => &mut self.connect_timeout_s,
            "connect-retry" => &mut self.connect_retry_s,
            "connect-retry-max" => &mut self.attempts_max,
            "keepalive" => return Some(self.keepalive(args)),
            "explicit-exit-notify" => {
                return Some(args.optional::<u32>(0, "a number").map(|times| {
                    self.exit_notify = times != Some(0);
                    Verdict::Taken
                }));
            }
            "resolv-retry" => return Some(nothing("names are looked up again with each attempt")),
            _ => return None,
        };
        Some(args.get(0, "a number").map(|value| {
            *slot = Some(value);
            Verdict::Taken
        }))
    }

    fn keepalive(&mut self, args: Args<'_>) -> Outcome {
        self.ping_s = Some(args.get(0, "two times in seconds")?);
        self.ping_restart_s = Some(args.get(1, "two times in seconds")?);
        TAKEN
    }
}

fn remote(args: Args<'_>) -> Result<Remote, String> {
    args.at_most(3)?;
    let host = args.text(0, "a host, and perhaps a port and a transport")?.to_owned();
    let port = args.optional(1, "a port")?;
    if port == Some(0) {
        return Err(args.bad(1, "a port"));
    }
    Ok(Remote { host, port, proto: args.optional(2, "udp or tcp, with 4 or 6 behind")? })
}
