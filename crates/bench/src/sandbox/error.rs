//! Errors while a sandbox is made or used.

use std::io;
use std::time::Duration;

/// The reason why a sandbox failed.
#[derive(Debug, thiserror::Error)]
pub enum SandboxError {
    /// A command ended and failed; its message names the fault.
    #[error("`{command}` failed ({status}): {message}")]
    CommandFailed {
        /// The command line.
        command: String,
        /// Its exit status in words.
        status: String,
        /// The last lines that it wrote.
        message: String,
    },
    /// A command did not end in time and was killed.
    #[error("`{command}` did not exit within {} s and was killed", .limit.as_secs_f32())]
    CommandTimedOut {
        /// The command line.
        command: String,
        /// The time it was given.
        limit: Duration,
    },
    /// The daemon of a host ended by itself; its log says why.
    #[error("the daemon of {host} exited ({status}); its log says:\n{log}")]
    DaemonEnded {
        /// The host's nickname.
        host: String,
        /// Exit status in words.
        status: String,
        /// The last lines of its log.
        log: String,
    },
    /// The daemon of a host runs and does not answer; its log may say why.
    #[error("the daemon of {host} does not answer after {} s; its log says:\n{log}", .limit.as_secs())]
    DaemonSilent {
        /// The host's nickname.
        host: String,
        /// The limit of the wait.
        limit: Duration,
        /// The last lines of its log.
        log: String,
    },
    /// The operating system refused.
    #[error("{what}: {source}")]
    Io {
        /// The operation.
        what: String,
        /// The system's answer.
        source: io::Error,
    },
    /// A program of the laboratory is not installed.
    #[error("the program `{program}` is missing: install it with apt-get install {package}")]
    MissingProgram {
        /// The program.
        program: &'static str,
        /// The Debian package that has it.
        package: &'static str,
    },
    /// The caller is not root.
    #[error("only root can create network namespaces: run this as root")]
    NotRoot,
    /// A command's output could not be understood.
    #[error("unexpected output of `{command}`: {why}")]
    UnexpectedOutput {
        /// The command line.
        command: String,
        /// The fault in it.
        why: String,
    },
    /// Something did not become true in time.
    #[error("{what} did not come within {} s", .limit.as_secs_f32())]
    WaitTimedOut {
        /// The condition.
        what: String,
        /// The limit of the wait.
        limit: Duration,
    },
}

impl SandboxError {
    /// Returns a function that wraps an [`io::Error`] with the name of the operation.
    pub(crate) fn io(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let what = what.into();
        move |source| Self::Io { what, source }
    }
}
