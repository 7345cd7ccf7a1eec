//! What programs of other projects watch the gateway by: the status file and the management interface.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;
use weft_api::{ApiError, ErrorKind, ManagementPlace, ToolSettings};

use super::Gateway;
use super::management::{self, ListenError, Listener, Password};
use super::roster::Format;
use super::secret_file::secret_in;
use super::status_file::{self, StatusFile};

/// The folder of the gateway's files and sockets for other programs, in the runtime directory: the daemon may write
/// nowhere else.
const FOLDER: &str = "openvpn";
/// Root's alone, as are the files.
const FOLDER_MODE: u32 = 0o700;
/// The longest name of a file, in bytes.
const NAME_BYTES_MAX: usize = 64;
/// OpenVPN's defaults.
const INTERVAL_S: u32 = 60;
const FORMAT: u8 = 1;
/// The longest pause between two writings of the status file, in seconds.
pub(super) const INTERVAL_MAX_S: u32 = 86_400;

/// What is asked for cannot be had.
#[derive(Debug, thiserror::Error)]
pub(super) enum ToolsError {
    /// A path that the daemon may not write to.
    #[error(
        "the gateway makes no file {}: it may write to {} alone; give a name there, and link to it (ln -s {} {})",
        .path.display(), .folder.display(), .folder.join("NAME").display(), .path.display()
    )]
    Place {
        /// What was asked for.
        path: PathBuf,
        /// Where it may be.
        folder: PathBuf,
    },
    /// Two files of one name.
    #[error("the status file and the socket of the management interface have one name: {0}")]
    Same(PathBuf),
    /// A format that there is none of.
    #[error("there is no status version {0}: 1, 2 or 3")]
    Format(u8),
    /// A pause that is none.
    #[error("a status file is written every 1 to {INTERVAL_MAX_S} seconds, not {0}")]
    Interval(u32),
    /// Other hosts could connect.
    #[error(
        "the management interface would be open to other hosts at {0}: give an address of this host's loopback, such as 127.0.0.1"
    )]
    NotLoopback(std::net::IpAddr),
    /// All users of the host could connect.
    #[error(
        "all users of this host could connect to the management interface: give a file with its password (--management-password FILE), or a name for a socket of root's"
    )]
    NoPassword,
    /// The password file cannot be read.
    #[error("the password file {path} of the management interface cannot be read: {why}")]
    PasswordFile {
        /// The file.
        path: PathBuf,
        /// Why.
        why: String,
    },
    /// The interface cannot listen.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// A bug.
    #[error("reading the password file failed ({0}); this is a bug in weft")]
    Failed(#[from] tokio::task::JoinError),
}

/// All that was asked for, before it runs.
pub(super) struct Tools {
    status: Option<StatusFile>,
    management: Option<(Listener, Format)>,
}

/// The folder of the gateway's files for other programs.
pub(super) fn folder(runtime_dir: &Path) -> PathBuf {
    runtime_dir.join(FOLDER)
}

/// Makes the folder. Call it before the daemon restricts its writes.
pub(crate) fn prepare(runtime_dir: &Path) {
    use std::os::unix::fs::DirBuilderExt;

    let folder = folder(runtime_dir);
    let made = std::fs::DirBuilder::new().recursive(true).mode(FOLDER_MODE).create(&folder);
    if let Err(error) = made {
        let folder = folder.display();
        tracing::warn!(%error, %folder, "cannot make the directory of the gateway's status file");
    }
}

/// The settings with the names of files alone, once they are found to be possible. `has_password`: there is one without a
/// file.
fn checked(
    folder: &Path,
    asked: ToolSettings,
    has_password: bool,
) -> Result<ToolSettings, ToolsError> {
    let status_file = asked.status_file.map(|path| placed(folder, path)).transpose()?;
    let management = match asked.management {
        Some(ManagementPlace::Unix(path)) => Some(ManagementPlace::Unix(placed(folder, path)?)),
        other => other,
    };
    if let Some(version) = asked.status_version
        && Format::of(version).is_none()
    {
        return Err(ToolsError::Format(version));
    }
    if let Some(interval) = asked.status_interval_s
        && !(1..=INTERVAL_MAX_S).contains(&interval)
    {
        return Err(ToolsError::Interval(interval));
    }
    let has_password = has_password || asked.management_password.is_some();
    match &management {
        Some(ManagementPlace::Tcp(address)) if !address.ip().is_loopback() => {
            return Err(ToolsError::NotLoopback(address.ip()));
        }
        Some(ManagementPlace::Tcp(_)) if !has_password => return Err(ToolsError::NoPassword),
        Some(ManagementPlace::Unix(name)) if Some(name) == status_file.as_ref() => {
            return Err(ToolsError::Same(name.clone()));
        }
        _ => {}
    }
    Ok(ToolSettings { status_file, management, ..asked })
}

/// The name of a file that is given by its name, or by its path in the folder.
fn placed(folder: &Path, path: PathBuf) -> Result<PathBuf, ToolsError> {
    let is_there = path.parent().is_some_and(|parent| parent == folder || parent == Path::new(""));
    match path.to_str().and_then(name_of).filter(|_| is_there) {
        Some(name) => Ok(name),
        None => Err(ToolsError::Place { path, folder: folder.to_owned() }),
    }
}

/// The name that a path ends with; `None`: it is none that a file in the folder may have.
pub(super) fn name_of(path: &str) -> Option<PathBuf> {
    let name = Path::new(path).file_name()?.to_str()?;
    let is_name = name.len() <= NAME_BYTES_MAX
        && !name.starts_with('.')
        && !name.ends_with(".new")
        && !name.contains(|char: char| char.is_control());
    is_name.then(|| name.into())
}

impl Gateway {
    /// The settings as they are kept, once they are found to be possible.
    pub(super) fn checked_tools(&self, asked: ToolSettings) -> Result<ToolSettings, ApiError> {
        let import = self.imported_now();
        let has_password = import.is_some_and(|it| it.management_password().is_some());
        let checked = checked(&self.folder, asked, has_password);
        checked.map_err(|error| ApiError::new(ErrorKind::BadRequest, error))
    }

    /// Makes ready what programs of other projects watch the gateway by.
    pub(super) async fn open_tools(&self, asked: &ToolSettings) -> Result<Tools, ApiError> {
        let password = self.imported_now().and_then(|import| import.management_password());
        let opened = Tools::open(&self.folder, asked, password).await;
        opened.map_err(|error| ApiError::new(ErrorKind::Conflict, error))
    }

    /// Where the status file and the management interface are, for people.
    pub(super) fn shown_tools(&self, asked: &ToolSettings) -> (Option<PathBuf>, Option<String>) {
        let status = asked.status_file.as_ref().map(|name| self.folder.join(name));
        let management = asked.management.as_ref().map(|place| match place {
            ManagementPlace::Unix(name) => self.folder.join(name).display().to_string(),
            ManagementPlace::Tcp(address) => address.to_string(),
        });
        (status, management)
    }
}

impl Tools {
    /// Makes ready what was asked for. `password` holds where no file has another.
    pub(super) async fn open(
        folder: &Path,
        asked: &ToolSettings,
        password: Option<Password>,
    ) -> Result<Self, ToolsError> {
        let format = Format::of(asked.status_version.unwrap_or(FORMAT));
        let format = format.unwrap_or(Format::One);
        let interval = Duration::from_secs(asked.status_interval_s.unwrap_or(INTERVAL_S).into());
        let path = asked.status_file.as_ref().map(|name| folder.join(name));
        let status = path.map(|path| StatusFile { path, interval, format });
        let password = match asked.management_password.clone() {
            // The disk may be slow.
            Some(file) => Some(tokio::task::spawn_blocking(move || password_of(&file)).await??),
            None => password,
        };
        let listener = match (&asked.management, password) {
            (None, _) => None,
            (Some(ManagementPlace::Unix(name)), password) => {
                Some(Listener::unix(&folder.join(name), password)?)
            }
            (Some(ManagementPlace::Tcp(_)), None) => return Err(ToolsError::NoPassword),
            (Some(ManagementPlace::Tcp(address)), Some(password)) => {
                Some(Listener::tcp(*address, password).await?)
            }
        };
        Ok(Self { status, management: listener.map(|listener| (listener, format)) })
    }

    /// Runs it until what is returned is dropped.
    pub(super) fn start(self, gateway: &Arc<Gateway>) -> JoinSet<()> {
        let mut tasks = JoinSet::new();
        if let Some(file) = self.status {
            tasks.spawn(status_file::keep(Arc::clone(gateway), file));
        }
        if let Some((listener, format)) = self.management {
            tasks.spawn(management::serve(Arc::clone(gateway), listener, format));
        }
        tasks
    }
}

/// The password of the management interface.
fn password_of(path: &Path) -> Result<Password, ToolsError> {
    secret_in(path).map_err(|why| ToolsError::PasswordFile { path: path.to_owned(), why })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn file(path: &str) -> ToolSettings {
        ToolSettings { status_file: Some(path.into()), ..ToolSettings::default() }
    }

    #[test]
    fn files_are_in_their_folder_alone() {
        let folder = Path::new("/run/weft/openvpn");
        for path in ["status.log", "/run/weft/openvpn/status.log"] {
            let settings = checked(folder, file(path), false).unwrap();
            assert_eq!(settings.status_file.unwrap(), Path::new("status.log"));
        }
        for path in
            ["/var/log/status.log", "../status.log", "a/b", "", ".x", "x.new", "/", "a\nb", ".."]
        {
            let error = checked(folder, file(path), false).unwrap_err().to_string();
            assert!(error.contains("/run/weft/openvpn/NAME"), "{path:?}: {error}");
        }
    }

    #[test]
    fn a_port_is_of_the_loopback_and_has_a_password() {
        let folder = Path::new("/run/weft/openvpn");
        let settings = |place: &str, password: Option<&str>| ToolSettings {
            management: Some(place.parse().unwrap()),
            management_password: password.map(PathBuf::from),
            ..ToolSettings::default()
        };
        for place in ["127.0.0.1:7505", "[::1]:7505"] {
            assert!(checked(folder, settings(place, Some("/etc/pw")), false).is_ok());
            assert!(checked(folder, settings(place, None), true).is_ok());
        }
        assert!(checked(folder, settings("management.sock", None), false).is_ok());
        let refused =
            |place, password| checked(folder, settings(place, password), false).unwrap_err();
        assert!(matches!(refused("127.0.0.1:7505", None), ToolsError::NoPassword));
        assert!(matches!(refused("192.0.2.1:7505", Some("x")), ToolsError::NotLoopback(_)));
        assert!(matches!(refused("0.0.0.0:7505", Some("x")), ToolsError::NotLoopback(_)));
        let same = ToolSettings { status_file: Some("a".into()), ..settings("a", None) };
        assert!(matches!(checked(folder, same, false), Err(ToolsError::Same(_))));
    }

    #[test]
    fn numbers_have_limits() {
        let folder = Path::new("/run/weft/openvpn");
        let version = |status_version| ToolSettings { status_version, ..file("a") };
        assert!(checked(folder, version(Some(3)), false).is_ok());
        assert!(matches!(checked(folder, version(Some(4)), false), Err(ToolsError::Format(4))));
        let interval = |status_interval_s| ToolSettings { status_interval_s, ..file("a") };
        assert!(checked(folder, interval(Some(1)), false).is_ok());
        assert!(matches!(checked(folder, interval(Some(0)), false), Err(ToolsError::Interval(0))));
        assert!(checked(folder, interval(Some(86_401)), false).is_err());
    }
}
