//! A runtime's request: environment and configuration, checked.

use std::path::{Path, PathBuf};

use super::{
    config::{Config, ValidAttachment},
    daemon::{Key, Target, Wishes},
    environment::{Args, Command, Environment, NETNS},
    error::{CniError, Code},
    result::{CniResult, Dns},
    version::Version,
};

/// A checked request.
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    /// The version of the answer.
    pub version: Version,
    /// The daemon's runtime directory, if the configuration names one.
    pub runtime_dir: Option<PathBuf>,
    /// The command with its parameters.
    pub action: Action,
}

/// A command with its parameters.
#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    /// ADD.
    Add(Box<Add>),
    /// DEL.
    Del(Del),
    /// CHECK.
    Check(Box<Check>),
    /// GC.
    Gc(Gc),
    /// STATUS of Weft's network of this name.
    Status(String),
    /// VERSION.
    Version,
}

/// Adds a container to a network.
#[derive(Debug, Clone, PartialEq)]
pub struct Add {
    /// The attachment.
    pub key: Key,
    /// The container's namespace.
    pub namespace: PathBuf,
    /// Wishes for the daemon.
    pub wishes: Wishes,
    /// Resolver settings that replace the network's.
    pub dns: Option<Dns>,
    /// The result of the plugins before.
    pub previous: Option<CniResult>,
}

/// Takes a container out of a network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Del {
    /// The attachments.
    pub target: Target,
    /// The container's namespace, if the runtime still has it.
    pub namespace: Option<PathBuf>,
}

/// Checks that an attachment is as ADD left it.
#[derive(Debug, Clone, PartialEq)]
pub struct Check {
    /// The attachment.
    pub key: Key,
    /// The container's namespace.
    pub namespace: PathBuf,
    /// The result of the whole list's ADD.
    pub previous: CniResult,
}

/// Removes attachments of a network that the runtime no longer knows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gc {
    /// The name of the configuration.
    pub network: String,
    /// The attachments that stay. `None`: the runtime does not say, and nothing is removed.
    pub valid: Option<Vec<ValidAttachment>>,
}

/// A request that cannot be obeyed, with the version in which to say so.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{error}")]
pub struct Rejected {
    /// The version of the answer.
    pub version: Version,
    /// The reason.
    pub error: CniError,
}

impl Request {
    /// Checks what a runtime asks for.
    ///
    /// # Errors
    /// [`Rejected`] with the specification's code. DEL is rejected only where it does not say what to
    /// delete: nothing else may keep a container from ending.
    pub fn parse(environment: &Environment, stdin: &[u8]) -> Result<Self, Rejected> {
        let config = Config::decode(stdin);
        let known = config.as_ref().ok().and_then(Config::known_version);
        let version = known.unwrap_or(Version::LATEST);
        Self::parse_as(version, environment, config).map_err(|error| Rejected { version, error })
    }

    /// The daemon's runtime directory, if the configuration names one.
    #[must_use]
    pub fn runtime_dir(&self) -> Option<&Path> {
        self.runtime_dir.as_deref()
    }

    fn parse_as(
        version: Version,
        environment: &Environment,
        config: Result<Config, CniError>,
    ) -> Result<Self, CniError> {
        let command = environment.command()?;
        if command == Command::Version {
            // Old runtimes send no configuration here.
            return Ok(Self { version, runtime_dir: None, action: Action::Version });
        }
        environment.check_needs(command)?;
        let config = match config {
            // The variables say what to delete.
            Err(_) if command == Command::Del => Config::default(),
            other => other?,
        };
        let runtime_dir = match command {
            Command::Del => config.runtime_dir().unwrap_or_default(),
            _ => config.runtime_dir()?,
        };
        // A version that Weft does not support keeps a container from starting, not from ending.
        if command != Command::Del {
            check_command(command, config.version()?)?;
        }
        Ok(Self { version, runtime_dir, action: action(command, environment, &config)? })
    }
}

fn action(
    command: Command,
    environment: &Environment,
    config: &Config,
) -> Result<Action, CniError> {
    Ok(match command {
        Command::Add => Action::Add(Box::new(add(environment, config)?)),
        Command::Del => Action::Del(del(environment, config)?),
        Command::Check => Action::Check(Box::new(check(environment, config)?)),
        Command::Gc => {
            Action::Gc(Gc { network: config.name()?, valid: config.valid_attachments()? })
        }
        Command::Status => {
            config.name()?;
            Action::Status(config.wishes(Args::default())?.network)
        }
        Command::Version => Action::Version,
    })
}

/// Fails if the command came into the specification after the configuration's version.
fn check_command(command: Command, version: Version) -> Result<(), CniError> {
    let (exists, name, since) = match command {
        Command::Check => (version.has_check(), "CHECK", Version::V0_4_0),
        Command::Gc => (version.has_gc_and_status(), "GC", Version::V1_1_0),
        Command::Status => (version.has_gc_and_status(), "STATUS", Version::V1_1_0),
        Command::Add | Command::Del | Command::Version => return Ok(()),
    };
    if exists {
        return Ok(());
    }
    let why = format!("{name} needs cniVersion {since}, and the configuration has {version}");
    Err(CniError::new(Code::IncompatibleVersion, format!("no {name} in CNI {version}"), why))
}

fn add(environment: &Environment, config: &Config) -> Result<Add, CniError> {
    let (key, namespace) = key(Command::Add, environment, config)?;
    let wishes = config.wishes(environment.args()?)?;
    Ok(Add { key, namespace, wishes, dns: config.dns()?, previous: config.previous()? })
}

fn del(environment: &Environment, config: &Config) -> Result<Del, CniError> {
    let target = environment.target(Command::Del)?;
    Ok(Del {
        target: Target {
            network: config.name_if_valid(),
            container: target.container,
            interface: target.interface,
        },
        namespace: target.namespace,
    })
}

fn check(environment: &Environment, config: &Config) -> Result<Check, CniError> {
    let (key, namespace) = key(Command::Check, environment, config)?;
    let previous = config.previous()?.ok_or_else(|| {
        let why = "prevResult: CHECK needs the result of ADD, and the runtime did not send it";
        CniError::new(Code::InvalidConfig, "prevResult missing", why)
    })?;
    Ok(Check { key, namespace, previous })
}

fn key(
    command: Command,
    environment: &Environment,
    config: &Config,
) -> Result<(Key, PathBuf), CniError> {
    let target = environment.target(command)?;
    let namespace = target
        .namespace
        .ok_or_else(|| CniError::new(Code::InvalidEnvironment, format!("{NETNS} missing"), ""))?;
    let key =
        Key { network: config.name()?, container: target.container, interface: target.interface };
    Ok((key, namespace))
}
