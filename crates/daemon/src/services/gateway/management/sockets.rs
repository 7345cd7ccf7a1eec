//! Where the management interface listens.

use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener};

use super::session::Password;

/// The socket is root's alone.
const MODE: u32 = 0o600;
/// The pause after a connection could not be taken, such as for want of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_secs(1);

/// The interface cannot listen.
#[derive(Debug, thiserror::Error)]
pub(in super::super) enum ListenError {
    /// A socket of the file system.
    #[error("the management interface cannot listen on {path}: {error}")]
    Unix {
        /// Its path.
        path: PathBuf,
        /// Why.
        error: io::Error,
    },
    /// A TCP port.
    #[error("the management interface cannot listen on {address}: {error}")]
    Tcp {
        /// The address.
        address: SocketAddr,
        /// Why.
        error: io::Error,
    },
}

/// A socket that listens.
pub(in super::super) struct Listener {
    socket: Socket,
    password: Option<Password>,
}

enum Socket {
    Unix { listener: UnixListener, _file: SocketFile },
    Tcp(TcpListener),
}

/// The file of a socket, which goes with it.
struct SocketFile(PathBuf);

impl Drop for SocketFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// A connection of either kind.
pub(super) trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

impl Listener {
    /// Listens on a socket of the file system. Replaces a leftover of an earlier run, but neither another file nor a
    /// socket that a program listens on.
    pub(in super::super) fn unix(
        path: &Path,
        password: Option<Password>,
    ) -> Result<Self, ListenError> {
        let failed = |error| ListenError::Unix { path: path.to_owned(), error };
        let in_use = |text: &str| failed(io::Error::new(io::ErrorKind::AddrInUse, text.to_owned()));
        match std::fs::symlink_metadata(path) {
            Ok(_) if weft_api::is_answered(path) => {
                return Err(in_use("another program listens there"));
            }
            Ok(there) if !there.file_type().is_socket() => {
                return Err(in_use("there is another file"));
            }
            Ok(_) => std::fs::remove_file(path).map_err(failed)?,
            Err(_) => {}
        }
        let listener = UnixListener::bind(path).map_err(failed)?;
        let file = SocketFile(path.to_owned());
        // Until then the directory keeps others away.
        let mode = std::fs::Permissions::from_mode(MODE);
        std::fs::set_permissions(path, mode).map_err(failed)?;
        Ok(Self { socket: Socket::Unix { listener, _file: file }, password })
    }

    /// Listens on a TCP port.
    pub(in super::super) async fn tcp(
        address: SocketAddr,
        password: Password,
    ) -> Result<Self, ListenError> {
        let bound = TcpListener::bind(address).await;
        let listener = bound.map_err(|error| ListenError::Tcp { address, error })?;
        Ok(Self { socket: Socket::Tcp(listener), password: Some(password) })
    }

    /// The password that a connection shows first.
    pub(super) fn password(&self) -> Option<Password> {
        self.password.clone()
    }

    /// The next connection.
    pub(super) async fn accept(&self) -> Box<dyn Stream> {
        loop {
            let accepted = match &self.socket {
                Socket::Unix { listener, .. } => {
                    listener.accept().await.map(|(stream, _)| Box::new(stream) as Box<dyn Stream>)
                }
                Socket::Tcp(listener) => {
                    listener.accept().await.map(|(stream, _)| Box::new(stream) as Box<dyn Stream>)
                }
            };
            match accepted {
                Ok(stream) => return stream,
                Err(error) => {
                    tracing::debug!(%error, "no connection to the management interface");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }
}
