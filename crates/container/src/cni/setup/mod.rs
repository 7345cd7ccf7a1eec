//! Installs the plugin for container runtimes (`weft setup-cni`), and takes it away.
//!
//! A runtime that finds a configuration runs its plugins at once. So the order is: the daemon is ready,
//! the binary is in place, then the configuration appears. Removal goes the other way. All of it can be
//! repeated; what is right already is left as it is.

mod chained;
mod conflist;

use std::{
    fs, io,
    io::Read,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use self::{
    chained::{CHAINED, PORTMAP},
    conflist::{Entry, agreed_versions},
};
pub use self::{
    chained::{VERSION_ANSWER_BYTES_MAX, VERSION_TIMEOUT_MS},
    conflist::CONFLIST_NAME,
};
use super::{
    PLUGIN_NAME, Version,
    daemon::{Daemon, DaemonError, Readiness},
    environment::check_container,
    files,
};

/// Limit for the daemon's answer, in milliseconds.
pub const READY_TIMEOUT_MS: u64 = 5_000;
/// Most entries of the configuration directory that are looked at.
pub const CONFIGS_MAX: usize = 1_000;
/// The name of the network in the configuration. It never changes: runtimes remember it for DEL and GC.
pub const DEFAULT_NAME: &str = "weft";

/// Answers to strangers take the container's default route.
const NO_WAY_BACK: &str = "ports that portmap publishes do not answer outside the network, since containers have no default route; weft setup-cni --masquerade gives them one";

const BINARY_MODE: u32 = 0o755;
const CONFLIST_MODE: u32 = 0o644;
const DIR_MODE: u32 = 0o755;

/// The places and the content.
#[derive(Debug, Clone)]
pub struct Options {
    /// The directory in which runtimes look for configurations.
    pub config_dir: PathBuf,
    /// The directory in which runtimes look for plugins.
    pub bin_dir: PathBuf,
    /// Further directories of chained plugins. One that is found there alone is linked into `bin_dir`.
    pub chained_dirs: Vec<PathBuf>,
    /// The program to install: the running one.
    pub program: PathBuf,
    /// The network's name for runtimes.
    pub name: String,
    /// Weft's network, if it has another name.
    pub network: Option<String>,
    /// The daemon's runtime directory, if it is not the usual one.
    pub runtime_dir: Option<PathBuf>,
    /// Whether containers leave the network through this host, with its address.
    pub masquerade: bool,
}

impl Options {
    /// The usual places, and Debian's for chained plugins.
    #[must_use]
    pub fn of_program(program: PathBuf) -> Self {
        Self {
            config_dir: "/etc/cni/net.d".into(),
            bin_dir: "/opt/cni/bin".into(),
            chained_dirs: vec!["/usr/lib/cni".into()],
            program,
            name: DEFAULT_NAME.to_owned(),
            network: None,
            runtime_dir: None,
            masquerade: false,
        }
    }

    /// The file of the configuration.
    #[must_use]
    pub fn conflist(&self) -> PathBuf {
        self.config_dir.join(CONFLIST_NAME)
    }

    /// The file of the plugin.
    #[must_use]
    pub fn plugin(&self) -> PathBuf {
        self.bin_dir.join(PLUGIN_NAME)
    }
}

/// The state after an installation or a removal.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    /// Files that were written, linked or removed, in this order.
    pub changed: Vec<PathBuf>,
    /// Versions that the configuration offers; none after a removal.
    pub versions: Vec<Version>,
    /// Plugins behind Weft's in the list.
    pub chained: Vec<String>,
    /// Conditions that the user should know.
    pub notes: Vec<String>,
}

/// Why the plugin is not installed or removed.
#[derive(Debug, thiserror::Error)]
pub enum SetupError {
    /// State of the daemon.
    #[error("Weft is not ready, so no runtime is told of it: {0}; see weft status")]
    NotReady(String),
    /// Fault of the caller.
    #[error("cannot use {name:?} as the network's name: {why}")]
    Name {
        /// The name.
        name: String,
        /// The rule.
        why: String,
    },
    /// State of the file system.
    #[error("cannot {action} {path}: {error}")]
    Io {
        /// The action: copy, write, link or remove.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        error: io::Error,
    },
}

/// Installs the plugin and its configuration.
///
/// # Errors
/// [`SetupError`]; what was done before stays, and the call can be repeated.
pub async fn install(options: &Options, daemon: &impl Daemon) -> Result<Report, SetupError> {
    let network = options.network.as_ref().unwrap_or(&options.name);
    for name in [&options.name, network] {
        check_container(name).map_err(|why| SetupError::Name { name: name.clone(), why })?;
    }
    check_ready(daemon, network).await?;
    let mut report = Report::default();
    for directory in [&options.bin_dir, &options.config_dir] {
        files::make_dir(directory, DIR_MODE).map_err(failed("make", directory))?;
        files::sweep(directory);
    }
    copy_plugin(options, &mut report)?;
    let chained = chain(options, &mut report).await?;
    let versions = agreed_versions(chained.iter().map(|entry| entry.versions.as_slice()));
    let text = conflist::text(options, &versions, &chained)
        .map_err(failed("write", &options.conflist()))?;
    write_conflist(options, &text, &mut report)?;
    report.notes.extend(earlier_config(options));
    if !options.masquerade && chained.iter().any(|entry| entry.name() == PORTMAP) {
        report.notes.push(NO_WAY_BACK.to_owned());
    }
    if !versions.contains(&Version::V1_1_0) {
        let old: Vec<&str> =
            chained.iter().filter(|entry| entry.is_old()).map(Entry::name).collect();
        report.notes.push(format!(
            "runtimes send neither GC nor STATUS, which need CNI 1.1.0; containernetworking-plugins older than 1.6.0 lack it: {}",
            old.join(", ")
        ));
    }
    report.chained = chained.iter().map(|entry| entry.name().to_owned()).collect();
    report.versions = versions;
    Ok(report)
}

/// Takes configuration and plugin away. Containers that still run keep their network, but their runtime
/// can no longer send DEL for them. Links to chained plugins stay, since other configurations may use them.
///
/// # Errors
/// [`SetupError`]; the call can be repeated.
pub fn remove(options: &Options) -> Result<Report, SetupError> {
    let mut report = Report::default();
    for file in [options.conflist(), options.plugin()] {
        match fs::remove_file(&file) {
            Ok(()) => report.changed.push(file),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(failed("remove", &file)(error)),
        }
    }
    for directory in [&options.config_dir, &options.bin_dir] {
        files::sweep(directory);
    }
    Ok(report)
}

async fn check_ready(daemon: &impl Daemon, network: &str) -> Result<(), SetupError> {
    let limit = std::time::Duration::from_millis(READY_TIMEOUT_MS);
    let answer = tokio::time::timeout(limit, daemon.status(network)).await.unwrap_or_else(|_| {
        let late = format!("it did not answer within {READY_TIMEOUT_MS} ms");
        Err(DaemonError::Interrupted(late))
    });
    match answer {
        Ok(Readiness::Ready) => Ok(()),
        Ok(Readiness::Unready(why) | Readiness::CutOff(why)) => Err(SetupError::NotReady(why)),
        Err(error) => Err(SetupError::NotReady(error.to_string())),
    }
}

fn copy_plugin(options: &Options, report: &mut Report) -> Result<(), SetupError> {
    let plugin = options.plugin();
    if is_copy(&options.program, &plugin).map_err(failed("compare the program with", &plugin))? {
        return Ok(());
    }
    let mut program = fs::File::open(&options.program).map_err(failed("read", &options.program))?;
    files::replace(&options.bin_dir, PLUGIN_NAME, BINARY_MODE, |file| {
        io::copy(&mut program, file).map(|_| ())
    })
    .map_err(failed("copy the program to", &plugin))?;
    report.changed.push(plugin);
    Ok(())
}

/// Whether the installed plugin is a copy of the program, with the right mode.
fn is_copy(program: &Path, plugin: &Path) -> io::Result<bool> {
    let installed = match fs::metadata(plugin) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        other => other?,
    };
    let has_mode = installed.permissions().mode() & 0o7777 == BINARY_MODE;
    if !has_mode || fs::metadata(program)?.len() != installed.len() {
        return Ok(false);
    }
    let mut left = io::BufReader::new(fs::File::open(program)?).bytes();
    let mut right = io::BufReader::new(fs::File::open(plugin)?).bytes();
    loop {
        match (left.next().transpose()?, right.next().transpose()?) {
            (None, None) => return Ok(true),
            (left, right) if left != right => return Ok(false),
            _ => {}
        }
    }
}

/// The chained plugins that every runtime will find, each with its versions.
async fn chain(options: &Options, report: &mut Report) -> Result<Vec<Entry>, SetupError> {
    let mut entries = Vec::new();
    for chained in &CHAINED {
        let name = chained.name;
        let place = options.bin_dir.join(name);
        let elsewhere = options.chained_dirs.iter().map(|directory| directory.join(name));
        let Some(found) = [place.clone()].into_iter().chain(elsewhere).find(|path| path.is_file())
        else {
            report.notes.push(format!(
                "left out {name}, which {}: it is not in {}; install containernetworking-plugins and repeat",
                chained.purpose,
                options.bin_dir.display()
            ));
            continue;
        };
        let versions = chained::versions(&found).await.and_then(|versions| {
            let before = entries.iter().map(|entry: &Entry| entry.versions.as_slice());
            match agreed_versions(before.chain([versions.as_slice()])).is_empty() {
                true => Err("it speaks no version of CNI that all others speak".to_owned()),
                false => Ok(versions),
            }
        });
        let versions = match versions {
            Ok(versions) => versions,
            Err(why) => {
                report.notes.push(format!("left out {}: {why}", found.display()));
                continue;
            }
        };
        if found != place {
            link(&found, options, name).map_err(failed("link", &place))?;
            report.changed.push(place);
        }
        entries.push(Entry { chained, versions });
    }
    Ok(entries)
}

/// Links a plugin into the directory where runtimes look: one that a runtime does not find fails every
/// ADD. The old name goes, if it leads nowhere.
fn link(found: &Path, options: &Options, name: &str) -> io::Result<()> {
    let temporary = files::temporary(&options.bin_dir, name);
    match fs::remove_file(&temporary) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    std::os::unix::fs::symlink(found, &temporary)?;
    fs::rename(&temporary, options.bin_dir.join(name))
}

fn write_conflist(options: &Options, text: &str, report: &mut Report) -> Result<(), SetupError> {
    let path = options.conflist();
    if fs::read(&path).is_ok_and(|old| old == text.as_bytes()) {
        return Ok(());
    }
    files::replace_bytes(&options.config_dir, CONFLIST_NAME, CONFLIST_MODE, text.as_bytes())
        .map_err(failed("write", &path))?;
    report.changed.push(path);
    Ok(())
}

/// containerd and CRI-O use the configuration whose name comes first.
fn earlier_config(options: &Options) -> Option<String> {
    let is_config =
        |name: &str| [".conf", ".conflist", ".json"].iter().any(|suffix| name.ends_with(suffix));
    let names = fs::read_dir(&options.config_dir).ok()?.take(CONFIGS_MAX).flatten();
    let names = names.filter_map(|entry| entry.file_name().into_string().ok());
    let first = names.filter(|name| is_config(name)).min()?;
    (first.as_str() < CONFLIST_NAME).then(|| {
        format!(
            "containerd and CRI-O use {}, whose name comes before {CONFLIST_NAME}; move it away to use Weft",
            options.config_dir.join(first).display()
        )
    })
}

fn failed(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> SetupError + use<> {
    let path = path.to_owned();
    move |error| SetupError::Io { action, path, error }
}

#[cfg(test)]
mod tests;
