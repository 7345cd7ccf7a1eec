//! The daemon's side of the process that holds sockets.

use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use weft_io::handover::peer_uid;
use weft_kernel::engine::SocketKeeper;

use super::process::is_trusted;
use super::rights::{self, Word};
use super::{ANSWER_LIMIT, ANSWER_LIMIT_MS, HOLD_MAX_S, PORTS_MAX, PortKeeper, socket_path};

/// This program, even if its file was replaced meanwhile.
const PROGRAM: &str = "/proc/self/exe";
/// The interval between checks whether the process has ended, in milliseconds.
const END_POLL_MS: u64 = 10;

/// The process that holds sockets for the daemon of one runtime directory, running or not.
#[derive(Debug)]
pub(super) struct Holder {
    runtime_dir: PathBuf,
    link: Mutex<Link>,
}

#[derive(Debug, Default)]
struct Link {
    /// While it is open, the process knows that a daemon lives.
    stream: Option<UnixStream>,
    /// The process, if this one has started it.
    child: Option<Child>,
    /// Whether it may hold descriptors of direct ports.
    has_ports: bool,
    /// Sends no requests, and stays open whatever becomes of one: without any daemon the process suspends
    /// ports.
    presence: Option<UnixStream>,
}

impl Holder {
    pub(super) fn new(runtime_dir: &Path) -> Self {
        Self { runtime_dir: runtime_dir.to_owned(), link: Mutex::default() }
    }

    fn link(&self) -> MutexGuard<'_, Link> {
        self.link.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Connects to the running process; `None` if there is none.
    fn connect(&self) -> io::Result<Option<UnixStream>> {
        let stream = match UnixStream::connect(socket_path(&self.runtime_dir)) {
            Ok(stream) => stream,
            Err(error) if is_absence(&error) => return Ok(None),
            Err(error) => return Err(error),
        };
        let uid = peer_uid(&stream)?;
        if !is_trusted(uid) {
            let text = format!("it is a process of user {uid}");
            return Err(io::Error::new(ErrorKind::PermissionDenied, text));
        }
        stream.set_read_timeout(Some(ANSWER_LIMIT))?;
        stream.set_write_timeout(Some(ANSWER_LIMIT))?;
        Ok(Some(stream))
    }

    /// Starts the process. The socket listens before the process runs, so that it accepts requests at once and
    /// never exists twice.
    fn start(&self) -> io::Result<(UnixStream, Child)> {
        let path = socket_path(&self.runtime_dir);
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener = UnixListener::bind(&path)?;
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600))?;
        let mut command = Command::new(PROGRAM);
        // The environment is cleared: it may contain a password.
        command
            .arg0("weft")
            .arg("--runtime-dir")
            .arg(&self.runtime_dir)
            .arg("hold-sockets")
            .env_clear()
            .stdin(OwnedFd::from(listener))
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let child = command.spawn()?;
        // Only the child holds the listener, so that no client connects to a process that is gone.
        drop(command);
        let process = child.id();
        tracing::info!(process, "started the process that holds sockets while no daemon runs");
        match self.connect() {
            Ok(Some(stream)) => Ok((stream, child)),
            Ok(None) => {
                reap(child);
                Err(io::Error::new(ErrorKind::ConnectionRefused, "the process exited at once"))
            }
            Err(error) => {
                reap(child);
                Err(error)
            }
        }
    }

    /// Hands descriptors to the process to keep; starts it if none runs.
    fn try_keep(&self, link: &mut Link, word: Word, fds: &[OwnedFd]) -> io::Result<()> {
        let stream = match link.stream.take() {
            Some(stream) => Some(stream),
            None => self.connect()?,
        };
        if let Some(stream) = stream {
            match ask(&stream, word, fds) {
                Ok(_) => {
                    link.stream = Some(stream);
                    return Ok(());
                }
                // The process was ended: start another one.
                Err(error) if is_absence(&error) => {}
                Err(error) => return Err(error),
            }
        }
        link.child.take().into_iter().for_each(reap);
        let (stream, child) = self.start()?;
        (link.child, link.presence) = (Some(child), None);
        ask(&stream, word, fds)?;
        link.stream = Some(stream);
        Ok(())
    }

    fn note_ports(&self, link: &mut Link) {
        link.has_ports = true;
        if link.presence.is_none() {
            link.presence = self.connect().ok().flatten();
        }
    }

    /// Takes the descriptors of direct ports that the process holds. A process of an earlier version holds
    /// none, and closes the connection.
    fn try_take_ports(&self, link: &mut Link) -> io::Result<Vec<OwnedFd>> {
        let stream = match link.stream.take() {
            Some(stream) => Some(stream),
            None => self.connect()?,
        };
        let Some(stream) = stream else { return Ok(Vec::new()) };
        let mut taken = Vec::new();
        let mut some = ask(&stream, Word::TakePorts, &[])?;
        while !some.is_empty() && taken.len() < PORTS_MAX {
            taken.append(&mut some);
            some = answer(&stream, Word::TakePorts)?;
        }
        link.stream = Some(stream);
        Ok(taken)
    }
}

impl SocketKeeper for Holder {
    fn take(&self) -> Vec<OwnedFd> {
        let mut link = self.link();
        let taken = self.connect().and_then(|stream| {
            let Some(stream) = stream else { return Ok(Vec::new()) };
            let sockets = ask(&stream, Word::Take, &[])?;
            link.stream = Some(stream);
            Ok(sockets)
        });
        taken.unwrap_or_else(|error| {
            tracing::warn!(%error, "cannot take back the sockets of an earlier run");
            Vec::new()
        })
    }

    fn keep(&self, sockets: Vec<OwnedFd>) {
        if let Err(error) = self.try_keep(&mut self.link(), Word::Keep, &sockets) {
            tracing::warn!(
                %error,
                "sockets are not held: if this daemon is killed, kernel traffic in UDP stops"
            );
        }
    }

    fn release(&self) {
        let mut link = self.link();
        let stream = match link.stream.take() {
            Some(stream) => Ok(Some(stream)),
            None => self.connect(),
        };
        let result = stream.and_then(|stream| match stream {
            Some(stream) => match link.has_ports {
                // Ports outlive a stopped daemon: the next one continues with the same devices.
                true => ask(&stream, Word::Rest, &[]).map(|_| link.stream = Some(stream)),
                false => ask(&stream, Word::Release, &[]).map(|_| await_end(&stream)),
            },
            None => Ok(()),
        });
        let rests = link.has_ports && result.is_ok();
        match result {
            Err(error) if !is_absence(&error) => tracing::warn!(
                %error,
                "the process that holds sockets does not answer; without a daemon it ends within \
                 {HOLD_MAX_S} s"
            ),
            _ => {}
        }
        if !rests {
            link.child.take().into_iter().for_each(reap);
        }
    }
}

impl PortKeeper for Holder {
    fn take_ports(&self) -> Vec<OwnedFd> {
        let mut link = self.link();
        let taken = self.try_take_ports(&mut link).unwrap_or_else(|error| {
            if !is_absence(&error) {
                tracing::warn!(%error, "cannot take back the direct ports of an earlier run");
            }
            Vec::new()
        });
        if !taken.is_empty() {
            self.note_ports(&mut link);
        }
        taken
    }

    fn keep_ports(&self, fds: Vec<OwnedFd>) {
        let mut link = self.link();
        for some in fds.chunks(rights::FDS_MAX) {
            match self.try_keep(&mut link, Word::KeepPorts, some) {
                Ok(()) => self.note_ports(&mut link),
                Err(error) => {
                    tracing::warn!(
                        %error,
                        "direct ports are not held: the next daemon gives their containers new devices"
                    );
                    return;
                }
            }
        }
    }
}

/// Whether there is no process, or it has gone.
fn is_absence(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::NotFound
            | ErrorKind::ConnectionRefused
            | ErrorKind::ConnectionReset
            | ErrorKind::BrokenPipe
            | ErrorKind::UnexpectedEof
    )
}

/// Sends one request and returns the descriptors of the answer.
fn ask(stream: &UnixStream, word: Word, fds: &[OwnedFd]) -> io::Result<Vec<OwnedFd>> {
    rights::send(stream, word, fds)?;
    answer(stream, word)
}

/// Receives an answer and returns its descriptors.
fn answer(stream: &UnixStream, word: Word) -> io::Result<Vec<OwnedFd>> {
    match rights::receive(stream)? {
        Some((answer, fds)) if answer == word => Ok(fds),
        Some(_) => Err(io::Error::new(ErrorKind::InvalidData, "unexpected answer")),
        None => Err(ErrorKind::UnexpectedEof.into()),
    }
}

/// Waits until the process closes the connection as it ends.
fn await_end(stream: &UnixStream) {
    let _ = rights::receive(stream);
}

/// Reaps a process that is ending, and kills it if it does not end in time.
fn reap(mut child: Child) {
    for _ in 0..ANSWER_LIMIT_MS / END_POLL_MS {
        match child.try_wait() {
            Ok(None) => std::thread::sleep(Duration::from_millis(END_POLL_MS)),
            _ => return,
        }
    }
    let _ = child.kill();
    let _ = child.wait();
}
