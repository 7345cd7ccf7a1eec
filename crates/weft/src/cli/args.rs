//! The words of the command line; Weave Net's where it had them.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use ipnet::IpNet;
use weft_daemon::config::{DEFAULT_RUNTIME_DIR, LaunchOptions, WORKERS_MAX};

use crate::dco::DcoCommand;
use crate::doctor::DoctorOptions;

/// Weft: an encrypted network for containers and hosts.
#[derive(Debug, Parser)]
#[command(name = "weft", version, max_term_width = 100, subcommand_required = true)]
pub struct Cli {
    /// Directory of the daemon's API socket
    #[arg(long, global = true, value_name = "DIR", env = "WEFT_RUNTIME_DIR", default_value = DEFAULT_RUNTIME_DIR)]
    pub runtime_dir: PathBuf,

    /// Configuration file (default: /etc/weft/weft.toml, if it exists)
    #[arg(long, global = true, value_name = "FILE", env = "WEFT_CONFIG")]
    pub config: Option<PathBuf>,

    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// One word per action.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Start the daemon on this host, and join the network of the hosts named
    Launch(LaunchArgs),
    /// Stop the daemon; containers keep their interfaces and a later launch takes them up again
    Stop(JsonOnly),
    /// Show the state of this host, its connections, peers, targets or address ranges
    Status(StatusArgs),
    /// Connect to more hosts
    Connect(ConnectArgs),
    /// Stop dialling hosts given to launch or connect
    Forget(ForgetArgs),
    /// Plug a container or network namespace into the network
    Attach(AttachArgs),
    /// Unplug a container or network namespace
    Detach(DetachArgs),
    /// Run a command in a new network namespace on the network
    Run(RunArgs),
    /// List attached containers
    Ps(JsonOnly),
    /// Print what another host needs to join; makes a new one-time token
    Token(JsonOnly),
    /// Print the whole state as JSON for a bug report (no secrets)
    Report(JsonOnly),
    /// Show what moves now, by peer and by container, and what is dropped and why
    Top(TopArgs),
    /// Show or change how many threads the vector engine has, while traffic goes on
    Workers(WorkersArgs),
    /// Stop the daemon, detach all containers and forget identity, ranges and peers
    Reset(ResetArgs),
    /// Say what this host has of what Weft uses, how fast it is, and what to do about the rest
    Doctor(DoctorOptions),
    /// Drive an OpenVPN data channel device by hand, the kernel's or one in userspace
    #[command(subcommand)]
    Dco(DcoCommand),
    /// Keep the daemon's sockets open while it is started again; the daemon starts this itself
    #[command(hide = true)]
    HoldSockets,
    /// Open containers' network namespaces for the daemon; the daemon starts this itself
    #[command(hide = true)]
    OpenNamespaces,
    /// Print completions for a shell
    Completions {
        /// Which shell
        shell: clap_complete::Shell,
    },
}

/// `weft launch`.
#[derive(Debug, Args)]
pub struct LaunchArgs {
    /// Stay in the foreground and log to standard error, for systemd and containers
    #[arg(long)]
    pub foreground: bool,

    /// Set by `launch` for the daemon it starts: secrets come and readiness goes over pipes
    #[arg(long, hide = true)]
    pub detached: bool,

    /// Print what other hosts need to join as JSON
    #[arg(long)]
    pub json: bool,

    /// Everything else.
    #[command(flatten)]
    pub options: LaunchOptions,
}

/// A command whose only choice is the form of its output.
#[derive(Debug, Args)]
pub struct JsonOnly {
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `weft status`.
#[derive(Debug, Args)]
pub struct StatusArgs {
    /// Which part
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
    /// Every path to each peer, in use or not, with its reason
    Paths,
    /// All hosts of the network
    Peers,
    /// Addresses this host dials
    Targets,
    /// Who owns which addresses
    Ipam,
}

/// `weft connect`.
#[derive(Debug, Args)]
pub struct ConnectArgs {
    /// HOST[:PORT]
    #[arg(required = true, value_name = "HOST")]
    pub hosts: Vec<String>,
    /// Forget all other targets
    #[arg(long)]
    pub replace: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `weft forget`.
#[derive(Debug, Args)]
pub struct ForgetArgs {
    /// HOST[:PORT], as given to launch or connect; or the name, address or key of a host that is gone or was reinstalled
    #[arg(required = true, value_name = "HOST")]
    pub hosts: Vec<String>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `weft attach`.
#[derive(Debug, Args)]
pub struct AttachArgs {
    /// [ADDRESS/LENGTH...] CONTAINER: a Docker container's name or id, the name of a network
    /// namespace (ip netns), a path such as /proc/PID/ns/net, or netns:NAME, pid:PID, docker:NAME.
    /// Without addresses the next free ones are given
    #[arg(required = true, value_name = "[ADDRESS/LENGTH...] CONTAINER")]
    pub words: Vec<String>,
    /// Leave out the routes that make multicast leave by this interface
    #[arg(long)]
    pub no_multicast_route: bool,
    /// Switch IPv6 on for this interface where the container has it off; else it gets IPv4 alone
    #[arg(long)]
    pub ipv6: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `weft detach`.
#[derive(Debug, Args)]
pub struct DetachArgs {
    /// The container, named as for attach, or as `weft ps` shows it
    pub container: String,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `weft run`.
#[derive(Debug, Args)]
pub struct RunArgs {
    /// Explicit addresses with prefix length
    #[arg(value_name = "ADDRESS/LENGTH")]
    pub addresses: Vec<IpNet>,
    /// The command and its arguments
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub command: Vec<String>,
}

/// `weft top`.
#[derive(Debug, Args)]
pub struct TopArgs {
    /// Time between two readings, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = super::top::parse_interval)]
    pub interval: Duration,
    /// End after so many tables or lines (default: go on)
    #[arg(long, value_name = "N")]
    pub count: Option<u64>,
    /// Print one line of JSON for each interval
    #[arg(long)]
    pub json: bool,
}

/// `weft workers`.
#[derive(Debug, Args)]
pub struct WorkersArgs {
    /// How many from now on, until the daemon is started again; `weft launch --workers N` or `workers =
    /// N` in the configuration file is for longer. Flows that run stay with their worker, new ones are
    /// shared out. A direct port that is there already is shared among as many as there are processors
    /// (4 to 8). Without it, how many there are
    #[arg(value_name = "N", value_parser = clap::value_parser!(u8).range(1..=WORKERS_MAX))]
    pub workers: Option<u8>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `weft reset`.
#[derive(Debug, Args)]
pub struct ResetArgs {
    /// Directory for identity, ranges and attachments
    #[arg(long, value_name = "DIR", env = "WEFT_STATE_DIR", default_value = weft_daemon::config::DEFAULT_STATE_DIR)]
    pub state_dir: PathBuf,
    /// Do not ask
    #[arg(long)]
    pub force: bool,
}

/// Splits `weft attach`'s words: addresses first, the container last.
///
/// # Errors
/// A word before the last is no address with prefix length.
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
}
