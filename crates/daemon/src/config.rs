//! Settings of the daemon: flags, then `WEFT_*` variables, then the configuration file, then defaults.

mod openvpn;

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use serde::Deserialize;
use weft_api::ServeRequest;
use weft_crypto::Cipher;
use weft_kernel::engine::SwitchKind;
use zeroize::Zeroizing;

pub use openvpn::{OpenvpnEngine, OpenvpnOptions};

/// The default path of the configuration file.
pub const DEFAULT_CONFIG: &str = "/etc/weft/weft.toml";
/// Runtime directory: API socket and lock.
pub const DEFAULT_RUNTIME_DIR: &str = "/run/weft";
/// The default socket of the Docker engine.
const DOCKER_SOCKET: &str = "/var/run/docker.sock";
/// State directory: identity, ranges, attachments.
pub const DEFAULT_STATE_DIR: &str = "/var/lib/weft";

/// Flags of `weft launch`. Each may stand in the configuration file under the same name.
#[derive(Clone, Debug, Default, Deserialize, clap::Args)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct LaunchOptions {
    /// Hosts to connect to, as HOST[:PORT][#KEYHASH] (default: found a network, or resume the last one)
    #[arg(value_name = "HOST")]
    pub hosts: Vec<String>,

    /// File whose first line is the network's password
    #[arg(long, value_name = "FILE", env = "WEFT_PASSWORD_FILE")]
    pub password_file: Option<PathBuf>,

    /// File whose first line is a one-time join token (default: WEFT_TOKEN, else a prompt)
    #[arg(long, value_name = "FILE", env = "WEFT_TOKEN_FILE")]
    pub token_file: Option<PathBuf>,

    /// Name of this host in status output (default: the system's host name)
    #[arg(long, env = "WEFT_NICKNAME")]
    pub nickname: Option<String>,

    /// Local address for links and data; rules out the kernel's ovpn device (default: all addresses)
    #[arg(long, value_name = "IP", env = "WEFT_HOST")]
    pub host: Option<IpAddr>,

    /// UDP port of links (default: 6783)
    #[arg(long, env = "WEFT_PORT")]
    pub port: Option<u16>,

    /// UDP port of the vector engine (default: 6784)
    #[arg(long, env = "WEFT_DATA_PORT")]
    pub data_port: Option<u16>,

    /// Engine that moves packets (default: auto)
    #[arg(long, value_enum, env = "WEFT_ENGINE")]
    pub engine: Option<EngineChoice>,

    /// Threads of the vector engine, 1 to 32 (default: half of the processors, 1 to 8; two with two or
    /// three processors)
    #[arg(long, value_name = "N", env = "WEFT_WORKERS", value_parser = clap::value_parser!(u8).range(1..=WORKERS_MAX))]
    pub workers: Option<u8>,

    /// Helper threads per worker, by which one flow uses several cores, 0 to 7 (default: as many as
    /// help while processors are idle)
    #[arg(long, value_name = "N", env = "WEFT_HELPERS", value_parser = clap::value_parser!(u8).range(0..=HELPERS_MAX))]
    pub helpers: Option<u8>,

    /// Pin each worker of the vector engine to one processor, in order; for hosts that reserve these
    /// processors for Weft (default: the kernel schedules workers)
    #[arg(long, env = "WEFT_PIN_WORKERS")]
    pub pin_workers: bool,

    /// Microseconds that an idle worker polls before it sleeps, 0 to 10000; lowers latency for idle
    /// processor time (default: 150, while requests follow closely enough)
    #[arg(long, value_name = "MICROSECONDS", env = "WEFT_BUSY_POLL", value_parser = clap::value_parser!(u16).range(0..=BUSY_POLL_MAX_US))]
    pub busy_poll: Option<u16>,

    /// Wire format towards other hosts (default: auto)
    #[arg(long, value_enum, env = "WEFT_FORMAT")]
    pub format: Option<FormatChoice>,

    /// Switch that containers are attached to (default: auto)
    #[arg(long, value_enum, env = "WEFT_SWITCH")]
    pub switch: Option<SwitchChoice>,

    /// Kind of port that attaches containers (default: auto)
    #[arg(long, value_enum, env = "WEFT_PORT_MODE")]
    pub port_mode: Option<PortChoice>,

    /// Networks of hosts that may exchange unencrypted packets with this host, if those hosts also
    /// name this one; may be repeated (default: none)
    #[arg(long, value_name = "CIDR,...", value_delimiter = ',', env = "WEFT_TRUSTED_SUBNETS")]
    pub trusted_subnets: Vec<IpNet>,

    /// IPv4 range of containers' addresses, the same on every host (default: 10.32.0.0/12)
    #[arg(long, value_name = "CIDR", env = "WEFT_IPALLOC_RANGE")]
    pub ipalloc_range: Option<Ipv4Net>,

    /// IPv6 /64 prefix of containers' addresses (default: a unique local one that the first host makes)
    #[arg(long, value_name = "CIDR", env = "WEFT_IPALLOC_RANGE6")]
    pub ipalloc_range6: Option<Ipv6Net>,

    /// MTU of containers in bytes (default: 112 less than the host's link; 144 less with --format ovpn or
    /// a kernel with only ovpn)
    #[arg(long, env = "WEFT_MTU", value_parser = clap::value_parser!(u16).range(i64::from(MTU_MIN)..=i64::from(MTU_MAX)))]
    pub mtu: Option<u16>,

    /// Copy the DSCP of inner packets to the outer header, for routers; reveals the kind of traffic to
    /// observers (default: outer DSCP 0)
    #[arg(long, env = "WEFT_COPY_DSCP")]
    pub copy_dscp: bool,

    /// Disable super-packets in the vector engine, for kernels whose offloads are broken unnoticed by
    /// the test at start
    #[arg(long, env = "WEFT_NO_OFFLOADS")]
    pub no_offloads: bool,

    /// Preferred cipher of packets to this host: aes-256-gcm or chacha20-poly1305
    #[arg(long, value_parser = parse_cipher, env = "WEFT_CIPHER")]
    #[serde(default)]
    pub cipher: Option<Cipher>,

    /// Seconds between key changes, 1 to 2700; an SA lives at most 3600 (default: 2700)
    #[arg(long, value_name = "SECONDS", env = "WEFT_REKEY_SECONDS", value_parser = clap::value_parser!(u32).range(1..=2700))]
    pub rekey_seconds: Option<u32>,

    /// Dial only the given hosts, not those that other hosts announce
    #[arg(long, env = "WEFT_NO_DISCOVERY")]
    pub no_discovery: bool,

    /// Address of this host on which to answer DNS, such as Docker's bridge; may be given several times
    /// (default: none)
    #[arg(long, value_name = "IP", value_delimiter = ',', env = "WEFT_DNS_LISTEN")]
    pub dns_listen: Vec<IpAddr>,

    /// Domain of containers' names; choose another where hosts use multicast DNS (default: weft.local)
    #[arg(long, value_name = "DOMAIN", env = "WEFT_DNS_DOMAIN")]
    pub dns_domain: Option<String>,

    /// Name server for all other names; may be given several times (default: those of /etc/resolv.conf)
    #[arg(long, value_name = "IP", value_delimiter = ',', env = "WEFT_DNS_UPSTREAM")]
    pub dns_upstream: Vec<IpAddr>,

    /// Socket of the plugin for Docker: auto, off or a path (default: auto, which is
    /// /run/docker/plugins/weft.sock on a host that has Docker)
    #[arg(long, value_name = "SOCKET", env = "WEFT_DOCKER_PLUGIN")]
    pub docker_plugin: Option<DockerPlugin>,

    /// Socket of the Docker engine (default: /var/run/docker.sock)
    #[arg(long, value_name = "SOCKET", env = "WEFT_DOCKER_SOCKET")]
    pub docker_socket: Option<PathBuf>,

    /// Directory of identity, ranges and attachments (default: /var/lib/weft)
    #[arg(long, value_name = "DIR", env = "WEFT_STATE_DIR")]
    pub state_dir: Option<PathBuf>,

    /// How to serve OpenVPN clients, in the configuration file alone: a section with options of `weft openvpn serve`.
    #[arg(skip)]
    pub openvpn: Option<Box<OpenvpnOptions>>,
}

/// `--engine`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum EngineChoice {
    /// The kernel engine if the kernel has VXLAN, and IPsec or ovpn; else the vector engine
    #[default]
    Auto,
    /// Only the kernel engine
    Kernel,
    /// Only the vector engine
    Userspace,
}

/// `--format`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum FormatChoice {
    /// esp if the other host supports it, else ovpn
    #[default]
    Auto,
    /// VXLAN in IPsec ESP
    Esp,
    /// OpenVPN data packets, which the kernel moves by its ovpn device
    Ovpn,
}

/// `--switch`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum SwitchChoice {
    /// The same as bridge
    #[default]
    Auto,
    /// A Linux bridge
    Bridge,
    /// The Open vSwitch datapath of the kernel
    Odp,
}

impl SwitchChoice {
    /// The kind of switch to use.
    #[must_use]
    pub const fn kind(self) -> SwitchKind {
        match self {
            Self::Auto | Self::Bridge => SwitchKind::Bridge,
            Self::Odp => SwitchKind::Odp,
        }
    }
}

/// `--port-mode`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum PortChoice {
    /// direct if only the vector engine moves frames and no other rules may see them; else bridge
    #[default]
    Auto,
    /// A port of the switch, for all frames
    Bridge,
    /// A port of the bridge; frames for hosts on the vector engine bypass it (Linux 6.6)
    Shortcut,
    /// A device of the vector engine for traffic with other hosts, beside a port of the switch (Linux 6.6)
    Direct,
}

/// `--docker-plugin`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(from = "String")]
pub enum DockerPlugin {
    /// In the place where Docker looks, on a host that has Docker.
    #[default]
    Auto,
    /// Not served.
    Off,
    /// At this path; the driver's name in Docker is the file's name without its extension.
    At(PathBuf),
}

impl From<String> for DockerPlugin {
    fn from(text: String) -> Self {
        match text.as_str() {
            "auto" => Self::Auto,
            "off" => Self::Off,
            path => Self::At(absolute(Path::new(path))),
        }
    }
}

/// The daemon's settings.
#[derive(Clone)]
pub struct Settings {
    /// Hosts to connect to, as the user gave them.
    pub hosts: Vec<String>,
    /// The network's password.
    pub password: Option<Zeroizing<String>>,
    /// A one-time join token.
    pub token: Option<Zeroizing<String>>,
    /// Nickname.
    pub nickname: String,
    /// Local address for links and data.
    pub host: Option<IpAddr>,
    /// UDP port of links.
    pub port: u16,
    /// UDP port of the vector engine.
    pub data_port: u16,
    /// The engines that may be used.
    pub engine: EngineChoice,
    /// The wire formats offered to peers.
    pub format: FormatChoice,
    /// Threads of the vector engine.
    pub workers: usize,
    /// Helpers of each worker; `None`: as many as help.
    pub helpers: Option<usize>,
    /// Whether each worker is pinned to one processor.
    pub pin_workers: bool,
    /// How long an idle worker keeps polling; `None`: while it pays.
    pub busy_poll: Option<Duration>,
    /// The switch to use.
    pub switch: SwitchChoice,
    /// How containers are attached.
    pub port_mode: PortChoice,
    /// Networks of peers that need no encryption if they say the same.
    pub trusted_subnets: Vec<IpNet>,
    /// IPv4 range.
    pub range: Ipv4Net,
    /// IPv6 prefix, if set.
    pub range6: Option<Ipv6Net>,
    /// MTU of containers, if set.
    pub mtu: Option<u16>,
    /// Whether the DSCP of inner packets is copied to the outer header.
    pub copy_dscp: bool,
    /// Whether the vector engine uses super-packets where the kernel supports them.
    pub offloads: bool,
    /// AEADs in order of preference.
    pub ciphers: Vec<Cipher>,
    /// Age at which SAs are replaced.
    pub rekey_after: Duration,
    /// Whether to dial hosts that other hosts announce.
    pub discovery: bool,
    /// Addresses on which DNS is answered.
    pub dns_listen: Vec<IpAddr>,
    /// The domain of containers' names, without a dot at its end.
    pub dns_domain: String,
    /// Name servers for all other names; empty: those of the host.
    pub dns_upstreams: Vec<IpAddr>,
    /// The socket of Docker's plugin.
    pub docker_plugin: DockerPlugin,
    /// The socket of the Docker engine.
    pub docker_socket: PathBuf,
    /// State directory.
    pub state_dir: PathBuf,
    /// Runtime directory.
    pub runtime_dir: PathBuf,
    /// How the configuration file has OpenVPN clients served; `None`: it does not say.
    pub openvpn: Option<ServeRequest>,
}

/// The configuration is invalid.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// A named file cannot be read.
    #[error("cannot read {what} {path}: {error}")]
    Unreadable {
        /// The kind of file.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        error: std::io::Error,
    },
    /// The file with the password or token is empty.
    #[error("{what} {path} is empty; its first line must hold the {what}")]
    EmptySecret {
        /// Password or token.
        what: &'static str,
        /// The file.
        path: PathBuf,
    },
    /// The configuration file has an error.
    #[error("{path}: {error}")]
    Malformed {
        /// The file.
        path: PathBuf,
        /// The position and the error.
        error: Box<toml::de::Error>,
    },
    /// The address range is too small for two hosts.
    #[error("--ipalloc-range {0} is too small: it needs a prefix of /29 or shorter")]
    RangeTooSmall(Ipv4Net),
    /// The IPv6 range does not leave room for the mapping.
    #[error("--ipalloc-range6 {0} must be a /64")]
    Range6NotA64(Ipv6Net),
    /// Both ports are the same.
    #[error("--port and --data-port are both {0}; links and data need a port each")]
    PortsEqual(u16),
    /// Only the kernel's device was requested, with an address that it cannot bind to.
    #[error(
        "--host {0} cannot be used with the kernel's ovpn device, which binds to all addresses: leave out --host, or use --format esp or another --engine"
    )]
    HostAndDevice(IpAddr),
    /// No worker at all, or more than the engine allows.
    #[error("workers is {0}; set it to 1 to {max}", max = weft_engine::WORKERS_MAX)]
    Workers(usize),
    /// More helpers than a worker allows.
    #[error("helpers is {0}; set it to 0 to {max} per worker", max = weft_engine::HELPERS_MAX)]
    Helpers(usize),
    /// No address that answers can be sent from.
    #[error("--dns-listen {0} is not an address of one host; name one that this host has")]
    DnsListen(IpAddr),
    /// More addresses than the service takes.
    #[error("--dns-listen and --dns-upstream take at most {DNS_ADDRESSES_MAX} addresses each")]
    DnsAddresses,
    /// The domain is none, or too long for names below it.
    #[error(
        "--dns-domain {0} is not a domain of at most {DNS_DOMAIN_BYTES_MAX} letters, digits and hyphens, with dots between"
    )]
    DnsDomain(String),
    /// The identity provider lacks what belongs to it.
    #[error("oidc-issuer goes with oidc-client-id and oidc-redirect")]
    Oidc,
    /// There is no identity provider to which these belong.
    #[error("options of an identity provider go with oidc-issuer")]
    OidcAlone,
    /// A worker would never sleep.
    #[error("busy-poll is {0} microseconds; set it to 0 to {BUSY_POLL_MAX_US}")]
    BusyPoll(u128),
}

impl LaunchOptions {
    /// Flags and variables, completed from the configuration file and by defaults.
    ///
    /// # Errors
    /// See [`ConfigError`].
    pub fn settings(
        mut self,
        config: Option<&Path>,
        runtime_dir: &Path,
    ) -> Result<Settings, ConfigError> {
        self.fill_from(read_config(config)?);
        let password = match &self.password_file {
            Some(path) => Some(read_secret("password", path)?),
            None => {
                std::env::var("WEFT_PASSWORD").ok().filter(|p| !p.is_empty()).map(Zeroizing::new)
            }
        };
        let token = match &self.token_file {
            Some(path) => Some(read_secret("token", path)?),
            None => std::env::var("WEFT_TOKEN").ok().filter(|t| !t.is_empty()).map(Zeroizing::new),
        };
        let settings = Settings {
            hosts: self.hosts,
            password,
            token,
            nickname: self.nickname.unwrap_or_else(host_name),
            host: self.host,
            port: self.port.unwrap_or(LINK_PORT),
            data_port: self.data_port.unwrap_or(DATA_PORT),
            engine: self.engine.unwrap_or_default(),
            format: self.format.unwrap_or_default(),
            busy_poll: self.busy_poll.map(|time| Duration::from_micros(time.into())),
            helpers: self.helpers.map(usize::from),
            pin_workers: self.pin_workers,
            workers: self.workers.map_or_else(weft_engine::default_workers, usize::from),
            switch: self.switch.unwrap_or_default(),
            port_mode: self.port_mode.unwrap_or_default(),
            trusted_subnets: self.trusted_subnets.iter().map(IpNet::trunc).collect(),
            range: self.ipalloc_range.map_or(DEFAULT_RANGE, |range| range.trunc()),
            range6: self.ipalloc_range6.map(|range| range.trunc()),
            mtu: self.mtu,
            copy_dscp: self.copy_dscp,
            offloads: !self.no_offloads,
            ciphers: preference(self.cipher),
            rekey_after: Duration::from_secs(self.rekey_seconds.map_or(REKEY_S, u64::from)),
            discovery: !self.no_discovery,
            dns_listen: self.dns_listen,
            dns_domain: self.dns_domain.map_or_else(
                || DNS_DOMAIN.to_owned(),
                |domain| domain.trim_end_matches('.').to_ascii_lowercase(),
            ),
            dns_upstreams: self.dns_upstream,
            docker_plugin: self.docker_plugin.unwrap_or_default(),
            docker_socket: self.docker_socket.unwrap_or_else(|| DOCKER_SOCKET.into()),
            state_dir: absolute(&self.state_dir.unwrap_or_else(|| DEFAULT_STATE_DIR.into())),
            runtime_dir: absolute(runtime_dir),
            openvpn: self.openvpn.map(|options| options.request()).transpose()?,
        };
        settings.check()
    }

    /// Fills unset options from `file`.
    fn fill_from(&mut self, file: Self) {
        fn fill<T>(mine: &mut Option<T>, theirs: Option<T>) {
            if mine.is_none() {
                *mine = theirs;
            }
        }
        if self.hosts.is_empty() {
            self.hosts = file.hosts;
        }
        fill(&mut self.password_file, file.password_file);
        fill(&mut self.token_file, file.token_file);
        fill(&mut self.nickname, file.nickname);
        fill(&mut self.host, file.host);
        fill(&mut self.port, file.port);
        fill(&mut self.data_port, file.data_port);
        if self.trusted_subnets.is_empty() {
            self.trusted_subnets = file.trusted_subnets;
        }
        if self.dns_listen.is_empty() {
            self.dns_listen = file.dns_listen;
        }
        if self.dns_upstream.is_empty() {
            self.dns_upstream = file.dns_upstream;
        }
        fill(&mut self.dns_domain, file.dns_domain);
        fill(&mut self.engine, file.engine);
        fill(&mut self.format, file.format);
        fill(&mut self.workers, file.workers);
        fill(&mut self.helpers, file.helpers);
        fill(&mut self.busy_poll, file.busy_poll);
        fill(&mut self.switch, file.switch);
        fill(&mut self.port_mode, file.port_mode);
        fill(&mut self.ipalloc_range, file.ipalloc_range);
        fill(&mut self.ipalloc_range6, file.ipalloc_range6);
        fill(&mut self.mtu, file.mtu);
        fill(&mut self.cipher, file.cipher);
        fill(&mut self.rekey_seconds, file.rekey_seconds);
        fill(&mut self.docker_plugin, file.docker_plugin);
        fill(&mut self.docker_socket, file.docker_socket);
        fill(&mut self.state_dir, file.state_dir);
        self.openvpn = file.openvpn;
        self.no_discovery |= file.no_discovery;
        self.pin_workers |= file.pin_workers;
        self.copy_dscp |= file.copy_dscp;
        self.no_offloads |= file.no_offloads;
    }
}

impl Settings {
    fn check(self) -> Result<Self, ConfigError> {
        if self.range.prefix_len() > RANGE_PREFIX_MAX {
            return Err(ConfigError::RangeTooSmall(self.range));
        }
        if let Some(range6) = self.range6.filter(|range| range.prefix_len() != 64) {
            return Err(ConfigError::Range6NotA64(range6));
        }
        if self.port == self.data_port {
            return Err(ConfigError::PortsEqual(self.port));
        }
        let by_device = (self.format, self.engine) == (FormatChoice::Ovpn, EngineChoice::Kernel);
        if let Some(host) = self.host.filter(|_| by_device) {
            return Err(ConfigError::HostAndDevice(host));
        }
        let unfit = |address: &&IpAddr| address.is_unspecified() || address.is_multicast();
        if let Some(address) = self.dns_listen.iter().find(unfit) {
            return Err(ConfigError::DnsListen(*address));
        }
        if self.dns_listen.len().max(self.dns_upstreams.len()) > DNS_ADDRESSES_MAX {
            return Err(ConfigError::DnsAddresses);
        }
        let domain = &self.dns_domain;
        if domain.len() > DNS_DOMAIN_BYTES_MAX || !weft_mesh::is_dns_name(domain) {
            return Err(ConfigError::DnsDomain(domain.clone()));
        }
        // The command line has already validated flags; values from the file need the check.
        if !(1..=weft_engine::WORKERS_MAX).contains(&self.workers) {
            return Err(ConfigError::Workers(self.workers));
        }
        if let Some(helpers) = self.helpers.filter(|helpers| *helpers > weft_engine::HELPERS_MAX) {
            return Err(ConfigError::Helpers(helpers));
        }
        if let Some(time) = self.busy_poll.filter(|time| *time > weft_engine::BUSY_POLL_MAX) {
            return Err(ConfigError::BusyPoll(time.as_micros()));
        }
        Ok(self)
    }
}

/// Reads the first line of a file that holds a secret.
///
/// # Errors
/// The file cannot be read, or its first line is empty.
pub fn read_secret(what: &'static str, path: &Path) -> Result<Zeroizing<String>, ConfigError> {
    let text = std::fs::read_to_string(path)
        .map(Zeroizing::new)
        .map_err(|error| ConfigError::Unreadable { what, path: path.into(), error })?;
    match text.lines().next().map(str::trim_end) {
        Some(line) if !line.is_empty() => Ok(Zeroizing::new(line.to_owned())),
        _ => Err(ConfigError::EmptySecret { what, path: path.into() }),
    }
}

/// A file that the user names must exist; the default one may be missing.
fn read_config(path: Option<&Path>) -> Result<LaunchOptions, ConfigError> {
    let named = path.is_some();
    let path = path.unwrap_or(Path::new(DEFAULT_CONFIG));
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound && !named => String::new(),
        Err(error) => {
            let what = "configuration file";
            return Err(ConfigError::Unreadable { what, path: path.into(), error });
        }
    };
    toml::from_str(&text)
        .map_err(|error| ConfigError::Malformed { path: path.into(), error: Box::new(error) })
}

/// Makes a path absolute, since the daemon leaves its working directory.
fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.into())
}

fn parse_cipher(text: &str) -> Result<Cipher, String> {
    CIPHERS
        .into_iter()
        .find(|cipher| cipher.name() == text)
        .ok_or_else(|| format!("must be {} or {}", CIPHERS[0], CIPHERS[1]))
}

fn preference(first: Option<Cipher>) -> Vec<Cipher> {
    let mut ciphers = CIPHERS.to_vec();
    ciphers.sort_by_key(|cipher| Some(*cipher) != first);
    ciphers
}

fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

const CIPHERS: [Cipher; 2] = [Cipher::Aes256Gcm, Cipher::ChaCha20Poly1305];
/// The default address range of containers.
pub const DEFAULT_RANGE: Ipv4Net = Ipv4Net::new_assert(std::net::Ipv4Addr::new(10, 32, 0, 0), 12);
/// The default domain of containers' names.
pub const DNS_DOMAIN: &str = "weft.local";
/// With a network and a name before it, a name stays below the 255 bytes of RFC 1035.
const DNS_DOMAIN_BYTES_MAX: usize = 60;
const DNS_ADDRESSES_MAX: usize = 16;
const LINK_PORT: u16 = 6783;
const DATA_PORT: u16 = 6784;
/// Three quarters of an SA's lifetime of one hour.
const REKEY_S: u64 = 2_700;
const RANGE_PREFIX_MAX: u8 = 29;
/// IPv6 requires 1280 inside (RFC 8200 section 5).
const MTU_MIN: u16 = 1_280;
const MTU_MAX: u16 = 65_000;
const BUSY_POLL_MAX_US: i64 = weft_engine::BUSY_POLL_MAX.as_micros() as i64;
/// The most threads that the vector engine can have.
pub const WORKERS_MAX: i64 = weft_engine::WORKERS_MAX as i64;
const HELPERS_MAX: i64 = weft_engine::HELPERS_MAX as i64;

/// The key log, only in builds for tests that read the wire with another program.
pub(crate) fn keylog() -> Option<PathBuf> {
    let wanted = cfg!(feature = "keylog").then(|| std::env::var_os("WEFT_SA_KEYLOG"));
    wanted.flatten().map(PathBuf::from)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::io::Write;

    use super::*;

    fn settings(options: LaunchOptions, file: &str) -> Result<Settings, ConfigError> {
        let mut config = tempfile::NamedTempFile::new().unwrap();
        config.write_all(file.as_bytes()).unwrap();
        options.settings(Some(config.path()), Path::new("/run/weft"))
    }

    #[test]
    fn defaults_are_the_documented_ones() {
        let settings = settings(LaunchOptions::default(), "").unwrap();
        assert_eq!((settings.port, settings.data_port), (6783, 6784));
        assert_eq!(settings.range.to_string(), "10.32.0.0/12");
        assert_eq!(settings.ciphers[0], Cipher::Aes256Gcm);
        assert_eq!(settings.rekey_after, Duration::from_secs(2700));
        assert!(settings.discovery && settings.offloads && !settings.copy_dscp);
        assert!(!settings.pin_workers);
        assert_eq!((settings.dns_domain.as_str(), settings.dns_listen.len()), ("weft.local", 0));
    }

    #[test]
    fn addresses_and_domain_of_dns_are_checked() {
        let file = "dns-listen = [\"172.17.0.1\"]\ndns-domain = \"Corp.Example.\"\ndns-upstream = [\"192.0.2.53\"]";
        let good = settings(LaunchOptions::default(), file).unwrap();
        assert_eq!(good.dns_listen, ["172.17.0.1".parse::<IpAddr>().unwrap()]);
        assert_eq!(good.dns_upstreams, ["192.0.2.53".parse::<IpAddr>().unwrap()]);
        assert_eq!(good.dns_domain, "corp.example");
        let refused =
            |file: &str| settings(LaunchOptions::default(), file).err().unwrap().to_string();
        for (file, word) in [
            ("dns-listen = [\"0.0.0.0\"]", "0.0.0.0"),
            ("dns-listen = [\"ff02::1\"]", "ff02::1"),
            ("dns-listen = [\"nonsense\"]", "nonsense"),
            ("dns-listen = \"172.17.0.1\"", "dns-listen"),
            ("dns-domain = \"\"", "--dns-domain"),
            ("dns-domain = \"a..b\"", "a..b"),
            ("dns-domain = \"a b\"", "a b"),
            ("dns-domain = 7", "dns-domain"),
        ] {
            assert!(refused(file).contains(word), "{file}: {}", refused(file));
        }
        assert!(refused(&format!("dns-domain = \"{}\"", "a.".repeat(60))).contains("--dns-domain"));
        let many: Vec<String> = (1..=17).map(|n| format!("\"192.0.2.{n}\"")).collect();
        assert!(refused(&format!("dns-upstream = [{}]", many.join(","))).contains("16"));
    }

    #[test]
    fn a_flag_wins_over_the_file_and_the_file_over_the_default() {
        let options = LaunchOptions { port: Some(7000), ..Default::default() };
        let file = "port = 8000\ndata-port = 8001\nhosts = [\"a\", \"b:1\"]\ncipher = \"chacha20-poly1305\"\ncopy-dscp = true\npin-workers = true\n";
        let settings = settings(options, file).unwrap();
        assert!(settings.copy_dscp && settings.pin_workers);
        assert_eq!((settings.port, settings.data_port), (7000, 8001));
        assert_eq!(settings.hosts, ["a", "b:1"]);
        assert_eq!(settings.ciphers[0], Cipher::ChaCha20Poly1305);
    }

    #[test]
    fn wrong_configuration_is_named() {
        let message = |options, file| settings(options, file).err().unwrap().to_string();
        assert!(message(LaunchOptions::default(), "prot = 1").contains("prot"));
        let tiny = LaunchOptions {
            ipalloc_range: Some("10.0.0.0/30".parse().unwrap()),
            ..Default::default()
        };
        assert!(message(tiny, "").contains("10.0.0.0/30 is too small"));
        let equal = LaunchOptions { port: Some(1), data_port: Some(1), ..Default::default() };
        assert!(message(equal, "").contains("both 1"));
        assert!(message(LaunchOptions::default(), "workers = 0").contains("1 to 32"));
        assert!(message(LaunchOptions::default(), "helpers = 8").contains("0 to 7"));
        assert!(message(LaunchOptions::default(), "busy-poll = 10001").contains("0 to 10000"));
        let missing =
            LaunchOptions { password_file: Some("/nonexistent".into()), ..Default::default() };
        assert!(message(missing, "").contains("/nonexistent"));
        let empty = tempfile::NamedTempFile::new().unwrap();
        let empty =
            LaunchOptions { password_file: Some(empty.path().into()), ..Default::default() };
        assert!(message(empty, "").contains("is empty"));
    }
}
