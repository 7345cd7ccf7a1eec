//! The process that holds sockets. It has no keys and no capabilities, and reads nothing from the network.
//! It ends on request or when no daemon has come for some time.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, sockopt};
use rustix::thread::{CapabilitySet, CapabilitySets};
use weft_io::handover::{close_inherited, peer_uid};

use super::rights::{self, Word};
use super::{ANSWER_LIMIT, HOLD_MAX_S, PORTS_MAX, SOCKETS_MAX, socket_path};

/// Connections at once: the daemon's two, and those of `weft reset` or the next daemon meanwhile.
const CLIENTS_MAX: usize = 8;
/// The name of the process.
const NAME: &std::ffi::CStr = c"weft-holder";

/// Holds sockets for the daemon of a runtime directory. It ends when the daemon or its successor releases
/// them, or after ten minutes without a connection. The daemon starts it, with a listening socket as
/// standard input.
///
/// # Errors
/// Standard input is something else, or the kernel refuses to wait.
pub fn hold_sockets(runtime_dir: &Path) -> anyhow::Result<()> {
    let stdin = io::stdin();
    let listens = sockopt::socket_acceptconn(&stdin) == Ok(true)
        && sockopt::socket_domain(&stdin) == Ok(AddressFamily::UNIX);
    if !listens {
        bail!("only the daemon starts hold-sockets; do not run it by hand");
    }
    close_inherited().context("cannot list open descriptors; is /proc mounted?")?;
    let listener = UnixListener::from(stdin.as_fd().try_clone_to_owned()?);
    // The process outlives the daemon's terminal and session, and keeps no directory busy.
    let _ = rustix::process::setsid();
    let _ = std::env::set_current_dir("/");
    let _ = rustix::thread::set_name(NAME);
    drop_privileges();
    hold(&listener, &socket_path(runtime_dir), Duration::from_secs(HOLD_MAX_S))
        .context("cannot hold sockets any longer")
}

/// Root without capabilities may still delete its own socket; the process needs no more. If the kernel
/// refuses, the process still does not use them.
fn drop_privileges() {
    let none = CapabilitySet::empty();
    let none = CapabilitySets { effective: none, permitted: none, inheritable: none };
    let _ = rustix::thread::set_no_new_privs(true);
    let _ = rustix::thread::clear_ambient_capability_set();
    let _ = rustix::thread::set_capabilities(None, none);
}

/// Serves until released, or until no client has been connected for `limit`. The file `path` is removed
/// before `listener` closes: a client that finds the file finds a process that answers.
fn hold(listener: &UnixListener, path: &Path, limit: Duration) -> io::Result<()> {
    listener.set_nonblocking(true)?;
    let mut holding = Holding {
        path: path.to_owned(),
        held: Vec::new(),
        ports: Vec::new(),
        set: None,
        clients: Vec::new(),
        alone_since: Instant::now(),
        released: false,
        was_asked: false,
    };
    while !holding.released {
        let left = match holding.clients.is_empty() {
            true => Some(limit.saturating_sub(holding.alone_since.elapsed())),
            false => None,
        };
        if left == Some(Duration::ZERO) {
            holding.remove_path();
            break;
        }
        let ready = holding.wait(listener, left)?;
        holding.serve(&ready);
        holding.accept(listener);
        if holding.is_done() {
            holding.remove_path();
            break;
        }
    }
    Ok(())
}

struct Holding {
    path: PathBuf,
    held: Vec<OwnedFd>,
    /// The queues of direct ports.
    ports: Vec<OwnedFd>,
    /// The address set that their programs read. The kernel always reports an error on it in poll(2).
    set: Option<OwnedFd>,
    clients: Vec<UnixStream>,
    /// When the last client disconnected.
    alone_since: Instant,
    released: bool,
    /// Whether a client has sent any request.
    was_asked: bool,
}

impl Holding {
    /// Waits for a connection or a request; returns which clients are ready.
    fn wait(&mut self, listener: &UnixListener, limit: Option<Duration>) -> io::Result<Vec<bool>> {
        let limit = limit.and_then(|limit| Timespec::try_from(limit).ok());
        let clients = self.clients.iter().map(|client| PollFd::new(client, PollFlags::IN));
        let mut waiting: Vec<PollFd<'_>> = clients.collect();
        waiting.push(PollFd::new(listener, PollFlags::IN));
        // Only the end of its device wakes a port's queue.
        waiting.extend(self.ports.iter().map(|port| PollFd::new(port, PollFlags::empty())));
        match poll(&mut waiting, limit.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let count = self.clients.len();
        let is_ready = |one: &PollFd<'_>| !one.revents().is_empty();
        let ready = waiting.iter().take(count).map(is_ready).collect();
        let mut gone = waiting.iter().skip(count + 1).map(is_ready).collect::<Vec<_>>().into_iter();
        drop(waiting);
        self.ports.retain(|_| !gone.next().unwrap_or(false));
        Ok(ready)
    }

    /// Answers ready clients, and drops those that have gone or send invalid requests.
    fn serve(&mut self, ready: &[bool]) {
        let clients = std::mem::take(&mut self.clients);
        let had_any = !clients.is_empty();
        for (client, ready) in clients.into_iter().zip(ready) {
            if !ready || matches!(self.answer(&client), Ok(true)) {
                self.clients.push(client);
            }
        }
        if had_any && self.clients.is_empty() {
            self.alone_since = Instant::now();
            // Without a reader the queues would fill with the containers' frames.
            self.ports.iter().for_each(|port| _ = weft_io::tap::rest(port));
        }
    }

    /// Whether no daemon runs and all held descriptors are gone. The address set alone is useless.
    fn is_done(&mut self) -> bool {
        if !self.clients.is_empty() || !self.was_asked {
            return false;
        }
        self.ports.is_empty() && self.held.is_empty()
    }

    /// `false`: the client has gone.
    fn answer(&mut self, client: &UnixStream) -> io::Result<bool> {
        let Some((word, fds)) = rights::receive(client)? else { return Ok(false) };
        self.was_asked = true;
        match word {
            Word::Keep if fds.len() > SOCKETS_MAX => return Ok(false),
            Word::Keep => {
                self.held = fds;
                rights::send(client, word, &[])?;
            }
            Word::KeepPorts => {
                // Ports beyond the limit are closed: their containers get new devices next time.
                if self.ports.len() + fds.len() <= PORTS_MAX {
                    let (mut sets, queues): (Vec<_>, Vec<_>) =
                        fds.into_iter().partition(weft_io::redirect::is_set);
                    self.ports.extend(queues);
                    self.set = sets.pop().or(self.set.take());
                }
                rights::send(client, word, &[])?;
            }
            Word::TakePorts => {
                for some in self.ports.chunks(rights::FDS_MAX) {
                    rights::send(client, word, some)?;
                }
                if let Some(set) = &self.set {
                    rights::send(client, word, std::slice::from_ref(set))?;
                }
                rights::send(client, word, &[])?;
            }
            Word::Rest if !self.ports.is_empty() => {
                self.held.clear();
                rights::send(client, word, &[])?;
            }
            Word::Take => rights::send(client, word, &self.held)?,
            Word::Release | Word::Rest => {
                self.released = true;
                self.held.clear();
                self.ports.clear();
                self.set = None;
                self.remove_path();
                rights::send(client, word, &[])?;
            }
        }
        Ok(true)
    }

    /// Accepts waiting clients that run as root or as this process's own user.
    fn accept(&mut self, listener: &UnixListener) {
        while let Ok((client, _)) = listener.accept() {
            let trusted = peer_uid(&client).is_ok_and(is_trusted);
            let limited = client
                .set_nonblocking(false)
                .and_then(|()| client.set_read_timeout(Some(ANSWER_LIMIT)))
                .and_then(|()| client.set_write_timeout(Some(ANSWER_LIMIT)));
            if trusted && limited.is_ok() && self.clients.len() < CLIENTS_MAX {
                self.clients.push(client);
            }
        }
    }

    /// A file that cannot be removed does no harm: the next holder replaces it.
    fn remove_path(&self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Whether a process of this user may hand sockets over or take them.
pub(super) fn is_trusted(uid: u32) -> bool {
    uid == 0 || uid == rustix::process::geteuid().as_raw()
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
