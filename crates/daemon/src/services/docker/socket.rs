//! The plugin's socket: Docker finds a driver by the name of a socket in a fixed directory.

use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use weft_api::ApiListener;

use crate::config::{DockerPlugin, Settings};

/// The directory where Docker looks for plugins.
const PLUGINS_DIR: &str = "/run/docker/plugins";
const SOCKET_NAME: &str = "weft.sock";
const DIR_MODE: u32 = 0o755;
/// Signs of an engine on this host; one is enough.
const SIGNS: [&str; 5] = [
    "/run/docker.sock",
    "/run/docker",
    "/etc/docker",
    "/usr/bin/dockerd",
    "/usr/local/bin/dockerd",
];

/// The plugin's socket; `None` if it is not served on this host.
pub(crate) fn plugin_socket(settings: &Settings) -> Option<PathBuf> {
    match &settings.docker_plugin {
        DockerPlugin::Off => None,
        DockerPlugin::At(path) => Some(path.clone()),
        DockerPlugin::Auto => {
            let has_docker = SIGNS.iter().any(|sign| Path::new(sign).exists());
            has_docker.then(|| Path::new(PLUGINS_DIR).join(SOCKET_NAME))
        }
    }
}

/// Makes the directory of the plugin's socket and returns it. Call it before the daemon restricts its writes.
pub(crate) fn prepare(settings: &Settings) -> Option<PathBuf> {
    let directory = plugin_socket(settings)?.parent()?.to_owned();
    let made = std::fs::DirBuilder::new().recursive(true).mode(DIR_MODE).create(&directory);
    if let Err(error) = made {
        tracing::warn!(%error, directory = %directory.display(), "cannot make the directory of Docker's plugins");
        return None;
    }
    Some(directory)
}

/// Binds the socket. Replaces a leftover, but not a socket that a program listens on.
pub(super) fn bind(path: &Path) -> io::Result<ApiListener> {
    if weft_api::is_answered(path) {
        return Err(io::Error::new(io::ErrorKind::AddrInUse, "another program listens there"));
    }
    weft_api::listen(path)
}

/// Removes the socket, so that Docker does not wait for a plugin that is gone.
pub(super) fn remove(path: &Path) {
    if !weft_api::is_answered(path) {
        let _ = std::fs::remove_file(path);
    }
}
