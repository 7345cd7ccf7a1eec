//! The command line. Commands and options have Weave Net's names where it had them.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use weft_daemon::config::{DEFAULT_RUNTIME_DIR, LaunchOptions, OpenvpnOptions, WORKERS_MAX};

use crate::dco::DcoCommand;
use crate::doctor::DoctorOptions;
use crate::openvpn::connect::OpenvpnConnectArgs;
use crate::openvpn::import::OpenvpnImportArgs;

/// Weft: an encrypted network for containers and hosts.
#[derive(Debug, Parser)]
#[command(name = "weft", version, max_term_width = 100, subcommand_required = true)]
pub struct Cli {
    /// Directory of the daemon's API socket
    #[arg(long, global = true, value_name = "DIR", env = "WEFT_RUNTIME_DIR", default_value = DEFAULT_RUNTIME_DIR)]
    pub runtime_dir: PathBuf,

    /// Configuration file (default: /etc/weft/weft.toml if it exists)
    #[arg(long, global = true, value_name = "FILE", env = "WEFT_CONFIG")]
    pub config: Option<PathBuf>,

    /// The command to run.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Start the daemon on this host and join the network of the given hosts
    Launch(LaunchArgs),
    /// Stop the daemon; containers keep their interfaces, and the next launch resumes them
    Stop(JsonOnly),
    /// Show the state of this host, its connections, peers, targets or address ranges
    Status(StatusArgs),
    /// Connect to more hosts
    Connect(ConnectArgs),
    /// Stop dialling hosts that were given to launch or connect
    Forget(ForgetArgs),
    /// Connect a container or network namespace to the network
    Attach(AttachArgs),
    /// Disconnect a container or network namespace from the network
    Detach(DetachArgs),
    /// Give this host an interface and addresses on the network
    Expose(ExposeArgs),
    /// Take back the addresses that expose gave this host
    Hide(HideArgs),
    /// Run a command in a new network namespace that is attached to the network
    Run(RunArgs),
    /// List attached containers
    Ps(JsonOnly),
    /// Create, list, show or remove networks beside weft, each apart from all others
    #[command(subcommand)]
    Network(NetworkCommand),
    /// Make the certificate authority of OpenVPN clients
    #[command(subcommand)]
    Ca(CaCommand),
    /// Let OpenVPN clients join the network by this host, or connect to an OpenVPN server
    #[command(subcommand)]
    Openvpn(OpenvpnCommand),
    /// Show the addresses of a name, or the names of an address, as DNS answers them
    DnsLookup(DnsLookupArgs),
    /// Give addresses a name in DNS, for containers on all hosts
    DnsAdd(DnsAddArgs),
    /// Take back a name that dns-add gave on this host
    DnsRemove(DnsRemoveArgs),
    /// Install the CNI plugin for containerd, CRI-O, podman and nerdctl, or take it away
    SetupCni(SetupCniArgs),
    /// Create a one-time token and print it with the line that another host needs to join
    Token(JsonOnly),
    /// Print the daemon's state as JSON for a bug report, without secrets
    Report(JsonOnly),
    /// Show current traffic by peer and container, and drops by reason
    Top(TopArgs),
    /// Show or change the number of vector engine threads without interrupting traffic
    Workers(WorkersArgs),
    /// Stop the daemon, detach all containers, and delete identity, ranges and peers
    Reset(ResetArgs),
    /// Check this host's support for Weft and its speed, and name the remedy for each gap
    Doctor(DoctorOptions),
    /// Manage OpenVPN data channel devices by hand, in the kernel or in userspace
    #[command(subcommand)]
    Dco(DcoCommand),
    /// Keep the daemon's sockets open while it restarts; started by the daemon
    #[command(hide = true)]
    HoldSockets,
    /// Open containers' network namespaces for the daemon; started by the daemon
    #[command(hide = true)]
    OpenNamespaces,
    /// Print a completion script for a shell
    Completions {
        /// Shell to complete for
        shell: clap_complete::Shell,
    },
}

/// `weft launch`.
#[derive(Debug, Args)]
pub struct LaunchArgs {
    /// Stay in the foreground and log to standard error, as systemd and containers need it
    #[arg(long)]
    pub foreground: bool,

    /// Set by `launch` for the daemon it starts: secrets and readiness pass through pipes
    #[arg(long, hide = true)]
    pub detached: bool,

    /// Print the join line and token as JSON
    #[arg(long)]
    pub json: bool,

    /// Settings of the daemon.
    #[command(flatten)]
    pub options: LaunchOptions,
}

/// Options of a command that has only `--json`.
#[derive(Debug, Args)]
pub struct JsonOnly {
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `weft status`.
#[derive(Debug, Args)]
pub struct StatusArgs {
    /// Part to show (default: a summary of this host)
    #[arg(value_enum)]
    pub part: Option<StatusPart>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Parts of the status.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
pub enum StatusPart {
    /// State, engine, MTU and reason of each connection
    Connections,
    /// Every path to each peer, whether it is in use, and why
    Paths,
    /// All hosts of the network
    Peers,
    /// Addresses that this host dials
    Targets,
    /// Address ranges and the hosts that own them
    Ipam,
    /// OpenVPN clients that are connected to this host
    Clients,
}

/// `weft connect`.
#[derive(Debug, Args)]
pub struct ConnectArgs {
    /// Hosts to connect to, as HOST[:PORT]
    #[arg(required = true, value_name = "HOST")]
    pub hosts: Vec<String>,
    /// Stop dialling all other targets
    #[arg(long)]
    pub replace: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `weft forget`.
#[derive(Debug, Args)]
pub struct ForgetArgs {
    /// HOST[:PORT] as given to launch or connect; or name, address or key of a removed or reinstalled host
    #[arg(required = true, value_name = "HOST")]
    pub hosts: Vec<String>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `weft attach`.
#[derive(Debug, Args)]
pub struct AttachArgs {
    /// Addresses to assign (default: the next free ones), then the container: name or id of a Docker
    /// container, name of a network namespace (ip netns), a path such as /proc/PID/ns/net, or
    /// netns:NAME, pid:PID, docker:NAME
    #[arg(required = true, value_name = "[ADDRESS/LENGTH...] CONTAINER")]
    pub words: Vec<String>,
    /// Do not route multicast through this interface
    #[arg(long)]
    pub no_multicast_route: bool,
    /// Enable IPv6 on this interface if the container disables it (default: IPv4 only in such a container)
    #[arg(long)]
    pub ipv6: bool,
    /// Make this host the container's default route; expose the host first
    #[arg(long)]
    pub default_route: bool,
    /// Let the container send from other Ethernet and IP addresses than its own, as bridges, macvlan and VRRP do
    #[arg(long)]
    pub allow_macs: bool,
    /// Network to connect to (default: weft)
    #[arg(long, value_name = "NAME")]
    pub network: Option<String>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `weft detach`.
#[derive(Debug, Args)]
pub struct DetachArgs {
    /// Container, named as for attach or as `weft ps` shows it
    pub container: String,
    /// Network to disconnect from (default: the container's only one, or weft)
    #[arg(long, value_name = "NAME")]
    pub network: Option<String>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `weft expose`.
#[derive(Debug, Args)]
pub struct ExposeArgs {
    /// Addresses to assign (default: those that the host has, or the next free ones)
    #[arg(value_name = "ADDRESS/LENGTH")]
    pub addresses: Vec<IpNet>,
    /// The name of this host in DNS (default: its nickname)
    #[arg(long)]
    pub name: Option<String>,
    /// Enable IPv6 on this interface if the host disables it (default: IPv4 only on such a host)
    #[arg(long)]
    pub ipv6: bool,
    /// Let containers leave the network through this host, with its address
    #[arg(long, conflicts_with = "no_masquerade")]
    pub masquerade: bool,
    /// End --masquerade
    #[arg(long)]
    pub no_masquerade: bool,
    /// Network on which the host is to be (default: weft)
    #[arg(long, value_name = "NAME")]
    pub network: Option<String>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `weft hide`.
#[derive(Debug, Args)]
pub struct HideArgs {
    /// Addresses to take back (default: all)
    #[arg(value_name = "ADDRESS")]
    pub addresses: Vec<IpAddr>,
    /// Network on which the host has them (default: weft)
    #[arg(long, value_name = "NAME")]
    pub network: Option<String>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `weft run`.
#[derive(Debug, Args)]
pub struct RunArgs {
    /// Make this host the default route; expose the host first
    #[arg(long)]
    pub default_route: bool,
    /// Network to attach to (default: weft)
    #[arg(long, value_name = "NAME")]
    pub network: Option<String>,
    /// Addresses to assign (default: the next free ones)
    #[arg(value_name = "ADDRESS/LENGTH")]
    pub addresses: Vec<IpNet>,
    /// Command to run, with its arguments
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub command: Vec<String>,
}

/// The verbs of `weft ca`.
#[derive(Debug, Subcommand)]
pub enum CaCommand {
    /// Make the authority on this host, or show the one that there is
    Init(JsonOnly),
    /// Move the authority from this host to another that serves; this host forgets the private key
    Move(CaMoveArgs),
    /// Make this host the authority's home by a backup of openvpn-authority.json, where the home is lost
    Restore(CaRestoreArgs),
}

/// `weft ca move`.
#[derive(Debug, Args)]
pub struct CaMoveArgs {
    /// Name or peer id of the host
    pub host: String,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `weft ca restore`.
#[derive(Debug, Args)]
pub struct CaRestoreArgs {
    /// The backup, which holds the private key
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// The verbs of `weft openvpn`.
#[derive(Debug, Subcommand)]
pub enum OpenvpnCommand {
    /// Serve clients from now on, also after a restart; give this host an address on the network as expose does
    Serve(Box<OpenvpnServeArgs>),
    /// Serve no clients any more; the authority and the clients' addresses stay
    Stop(JsonOnly),
    /// Take over the configuration of an OpenVPN server, and say what becomes of each line
    ///
    /// Reads the file with all files that it names: certificates, keys, the clients' files, the list of revoked
    /// certificates. Then weft openvpn serve serves its clients.
    Import(OpenvpnImportArgs),
    /// Issue a certificate to a client and print its profile, which holds the private key
    ///
    /// With --shared: print a profile without a certificate, for all users of weft openvpn user.
    Client(OpenvpnProfileArgs),
    /// Revoke all certificates of a client and end its session
    Revoke(OpenvpnClientArgs),
    /// Users who log in with a password
    #[command(subcommand)]
    User(OpenvpnUserCommand),
    /// Connect to an OpenVPN server by a profile, and stay in the foreground until a signal ends it
    ///
    /// SIGTERM and SIGINT end it, SIGUSR1 makes it connect anew. All that it sets up is taken back at the end.
    Connect(OpenvpnConnectArgs),
}

/// `weft openvpn serve`.
#[derive(Debug, Args)]
pub struct OpenvpnServeArgs {
    /// How to serve.
    #[command(flatten)]
    pub options: OpenvpnOptions,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `weft openvpn client`.
#[derive(Debug, Args)]
pub struct OpenvpnProfileArgs {
    /// Name of the client
    #[arg(required_unless_present = "shared", conflicts_with = "shared")]
    pub name: Option<String>,
    /// A profile without a certificate, for all users
    #[arg(long)]
    pub shared: bool,
    /// The shared profile asks for a one-time code, too
    #[arg(long, requires = "shared")]
    pub totp: bool,
    /// Show the profile as a QR code in the terminal, for a phone
    #[arg(long, conflicts_with = "json")]
    pub qr: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// The verbs of `weft openvpn user`. Passwords are asked for at the terminal, or read from standard input.
#[derive(Debug, Subcommand)]
pub enum OpenvpnUserCommand {
    /// Add a user; the password is asked for, or is the first line of standard input
    Add(OpenvpnUserAddArgs),
    /// List the users
    Ls(JsonOnly),
    /// Remove a user and end the sessions; tokens are no longer good
    Rm(OpenvpnClientArgs),
    /// Change a user's password; the sessions begin anew, and tokens are no longer good
    Passwd(OpenvpnClientArgs),
    /// Have a user's logins need one-time codes by a new secret, and print it; or no codes any more
    Totp(OpenvpnUserTotpArgs),
}

/// `weft openvpn user add`.
#[derive(Debug, Args)]
pub struct OpenvpnUserAddArgs {
    /// Name of the user
    pub name: String,
    /// Logins need a one-time code, too; its secret is printed once, for an authenticator
    #[arg(long)]
    pub totp: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `weft openvpn user totp`.
#[derive(Debug, Args)]
pub struct OpenvpnUserTotpArgs {
    /// Name of the user
    pub name: String,
    /// No codes any more
    #[arg(long)]
    pub off: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `weft openvpn revoke`, and verbs of `weft openvpn user`.
#[derive(Debug, Args)]
pub struct OpenvpnClientArgs {
    /// Name of the client
    pub name: String,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// The verbs of `weft network`.
#[derive(Debug, Subcommand)]
pub enum NetworkCommand {
    /// Create a network; hosts share it if each creates it with the same options, or attaches to it by name
    Create(NetworkCreateArgs),
    /// List the networks of this host, and those that it knows from other hosts
    Ls(JsonOnly),
    /// Remove networks from this host; other hosts that hold them keep them
    Rm(NetworkNames),
    /// Show networks with their options, hosts and the owners of their ranges
    Inspect(NetworkNames),
}

/// `weft network create`.
#[derive(Debug, Args)]
pub struct NetworkCreateArgs {
    /// Name of the network: 1 to 63 lower-case letters, digits, - and _
    pub name: String,
    /// IPv4 range of its own (default: a /16 of 10.128.0.0/9 that follows from the name)
    #[arg(long, value_name = "RANGE", conflicts_with = "share_range")]
    pub subnet: Option<Ipv4Net>,
    /// IPv6 range of its own, a /64 (default: one that follows from the name)
    #[arg(long, value_name = "RANGE", conflicts_with = "share_range")]
    pub subnet6: Option<Ipv6Net>,
    /// Take addresses from the range of network weft
    #[arg(long)]
    pub share_range: bool,
    /// VXLAN network identifier, 2 to 16777214 (default: one that follows from the name)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(VNI_MIN..=VNI_MAX))]
    pub vni: Option<u32>,
    /// Give containers no way out of the network
    #[arg(long)]
    pub internal: bool,
    /// Let containers reach only the way out, not each other
    #[arg(long)]
    pub isolated: bool,
    /// MTU of its containers in bytes, at least 1280 (default: that of network weft)
    #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(u16).range(NETWORK_MTU_MIN_BYTES..))]
    pub mtu: Option<u16>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Lowest VNI of a user's network: 0 is not used, and 1 is that of `weft`.
const VNI_MIN: i64 = 2;
/// Highest VNI of a user's network: the one above is that of probes.
const VNI_MAX: i64 = 0xff_fffe;
/// Lowest MTU of a network, bytes: that which IPv6 needs.
const NETWORK_MTU_MIN_BYTES: i64 = 1_280;

/// A verb about networks that are there.
#[derive(Debug, Args)]
pub struct NetworkNames {
    /// Names of the networks
    #[arg(required = true, value_name = "NAME")]
    pub names: Vec<String>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `weft dns-lookup`.
#[derive(Debug, Args)]
pub struct DnsLookupArgs {
    /// A name, with or without the domain, or an address
    pub name: String,
    /// As a container on this network sees it (default: as the host does)
    #[arg(long)]
    pub network: Option<String>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `weft dns-add`.
#[derive(Debug, Args)]
pub struct DnsAddArgs {
    /// The name, with or without the domain
    pub name: String,
    /// Its addresses, beside those that it has
    #[arg(required = true, value_name = "ADDRESS")]
    pub addresses: Vec<IpAddr>,
    /// The network whose containers see it (default: weft)
    #[arg(long)]
    pub network: Option<String>,
    /// A service there, for SRV records, such as http/tcp:80; may be given several times
    #[arg(long = "srv", value_name = "SERVICE/PROTOCOL:PORT")]
    pub ports: Vec<String>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `weft dns-remove`.
#[derive(Debug, Args)]
pub struct DnsRemoveArgs {
    /// The name, with or without the domain
    pub name: String,
    /// Only these addresses (default: all)
    #[arg(value_name = "ADDRESS")]
    pub addresses: Vec<IpAddr>,
    /// The network (default: weft)
    #[arg(long)]
    pub network: Option<String>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `weft setup-cni`.
#[derive(Debug, Args)]
pub struct SetupCniArgs {
    /// Take configuration and plugin away; stop the containers first, since runtimes can then end none
    #[arg(long)]
    pub remove: bool,
    /// Directory in which runtimes look for plugins (default: /opt/cni/bin)
    #[arg(long, value_name = "DIR")]
    pub bin_dir: Option<PathBuf>,
    /// Directory in which runtimes look for configurations (default: /etc/cni/net.d)
    #[arg(long, value_name = "DIR")]
    pub config_dir: Option<PathBuf>,
    /// Let containers leave the network through this host with its address (needs net.ipv4.ip_forward=1);
    /// published ports are reached from outside only so
    #[arg(long, conflicts_with = "remove")]
    pub masquerade: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `weft top`.
#[derive(Debug, Args)]
pub struct TopArgs {
    /// Seconds between two readings
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = parse_interval)]
    pub interval: Duration,
    /// Stop after N tables or lines (default: run until interrupted)
    #[arg(long, value_name = "N")]
    pub count: Option<u64>,
    /// Print one line of JSON per interval
    #[arg(long)]
    pub json: bool,
}

/// `weft workers`.
#[derive(Debug, Args)]
pub struct WorkersArgs {
    /// Threads to run until the daemon restarts (default: show the current number). To keep a number,
    /// set `weft launch --workers N` or `workers = N` in the configuration file. Running flows stay with
    /// their worker; new flows use all workers. Existing direct ports keep their queues: one per worker,
    /// at least one per processor (4 to 8)
    #[arg(value_name = "N", value_parser = clap::value_parser!(u8).range(1..=WORKERS_MAX))]
    pub workers: Option<u8>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `weft reset`.
#[derive(Debug, Args)]
pub struct ResetArgs {
    /// Directory of identity, ranges and attachments
    #[arg(long, value_name = "DIR", env = "WEFT_STATE_DIR", default_value = weft_daemon::config::DEFAULT_STATE_DIR)]
    pub state_dir: PathBuf,
    /// Do not ask for confirmation
    #[arg(long)]
    pub force: bool,
}

/// Shortest `--interval`, in seconds: counting takes the daemon's time.
const INTERVAL_S_MIN: f64 = 0.1;
/// Longest `--interval`, in seconds.
const INTERVAL_S_MAX: f64 = 86_400.0;

/// Reads `--interval`.
fn parse_interval(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| format!("{text} is not a number of seconds"))?;
    if !(INTERVAL_S_MIN..=INTERVAL_S_MAX).contains(&seconds) {
        return Err(format!("must be {INTERVAL_S_MIN} to {INTERVAL_S_MAX} seconds"));
    }
    Ok(Duration::from_secs_f64(seconds))
}

/// Splits `weft attach`'s words: addresses first, the container last.
///
/// # Errors
/// A word before the last is not an address with prefix length.
pub(super) fn split_attach_words(words: &[String]) -> Result<(Vec<IpNet>, &str), String> {
    let Some((container, addresses)) = words.split_last() else {
        return Err("name a container".into());
    };
    if container.parse::<IpNet>().is_ok() {
        return Err(format!("{container} is an address; name the container after it"));
    }
    let addresses = addresses.iter().map(|word| {
        word.parse::<IpNet>().map_err(|_| {
            format!("{word} is not an address with a prefix length, such as 10.32.5.1/12")
        })
    });
    Ok((addresses.collect::<Result<_, _>>()?, container))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn attach_takes_addresses_then_a_container() {
        let words = |text: &str| text.split(' ').map(String::from).collect::<Vec<_>>();
        let (addresses, container) = split_attach_words(&words("10.1.0.1/16 fd00::1/64 web"))
            .map(|(a, c)| (a, c.to_owned()))
            .unwrap();
        assert_eq!((addresses.len(), container.as_str()), (2, "web"));
        assert!(split_attach_words(&words("10.1.0.1 web")).unwrap_err().contains("10.1.0.1"));
        assert!(
            split_attach_words(&words("web 10.1.0.1/16"))
                .unwrap_err()
                .contains("name the container")
        );
    }

    #[test]
    fn a_network_has_its_own_range_or_shares_one_and_a_vni_of_24_bits() {
        let parsed = |words: &str| Cli::try_parse_from(words.split(' '));
        let words = "weft network create shop --subnet 10.9.0.0/16 --subnet6 fd09::/64 --vni 5 --mtu 1280 --internal --isolated";
        let Command::Network(NetworkCommand::Create(args)) = parsed(words).unwrap().command else {
            panic!("{words} is another command");
        };
        assert_eq!((args.name.as_str(), args.vni, args.mtu), ("shop", Some(5), Some(1280)));
        assert_eq!(args.subnet.map(|net| net.to_string()).as_deref(), Some("10.9.0.0/16"));
        assert_eq!(args.subnet6.map(|net| net.to_string()).as_deref(), Some("fd09::/64"));
        assert!(args.internal && args.isolated && !args.share_range);
        assert!(parsed("weft network create shop --share-range --vni 16777214").is_ok());
        for wrong in [
            "create",
            "create shop --share-range --subnet 10.9.0.0/16",
            "create shop --share-range --subnet6 fd09::/64",
            "create shop --subnet fd09::/64",
            "create shop --vni 1",
            "create shop --vni 16777215",
            "create shop --mtu 1279",
            "rm",
            "inspect",
        ] {
            assert!(parsed(&format!("weft network {wrong}")).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_network_can_be_named_wherever_a_container_or_the_host_joins_or_leaves() {
        for words in ["attach web", "detach web", "run -- true", "expose", "hide"] {
            let (verb, rest) = words.split_once(' ').unwrap_or((words, ""));
            let rest = rest.split_whitespace();
            let words = ["weft", verb, "--network", "shop"].into_iter().chain(rest);
            let network = match Cli::try_parse_from(words).unwrap().command {
                Command::Attach(args) => args.network,
                Command::Detach(args) => args.network,
                Command::Run(args) => args.network,
                Command::Expose(args) => args.network,
                Command::Hide(args) => args.network,
                _ => None,
            };
            assert_eq!(network.as_deref(), Some("shop"), "{verb}");
        }
    }

    #[test]
    fn an_interval_is_a_number_of_seconds_within_reason() {
        assert_eq!(parse_interval("1"), Ok(Duration::from_secs(1)));
        assert_eq!(parse_interval("0.25"), Ok(Duration::from_millis(250)));
        for wrong in ["0", "-1", "NaN", "inf", "1e9", "one", ""] {
            assert!(parse_interval(wrong).is_err(), "{wrong}");
        }
    }
}
