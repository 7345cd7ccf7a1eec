//! A network namespace of the sandbox and the programs that run in it.

use std::fs::File;
use std::io::{self, Read};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use super::SandboxError;
use super::gate;
use super::progress::slowness;

/// A command that was given no other limit is killed after this time.
const COMMAND_LIMIT: Duration = Duration::from_secs(120);
/// How long a command's output may outlast the command: a child process may hold the pipe.
const OUTPUT_DRAIN_MS: u64 = 500;
/// Time between SIGTERM and SIGKILL when a program's handle is dropped.
const DROP_GRACE: Duration = Duration::from_millis(500);
/// The pause between two looks whether a command has ended.
const POLL_INTERVAL_MS: u64 = 2;
/// The most lines of a failed command's output that its error quotes.
const QUOTED_LINES_MAX: usize = 12;

/// The result of a command.
#[derive(Debug, Clone)]
pub struct Output {
    /// The command line.
    pub command: String,
    /// How it ended.
    pub status: ExitStatus,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
}

impl Output {
    /// Returns the output if the command succeeded.
    ///
    /// # Errors
    /// [`SandboxError::CommandFailed`] with the last lines that it wrote.
    pub fn success(self) -> Result<Self, SandboxError> {
        if self.status.success() {
            return Ok(self);
        }
        let text = if self.stderr.trim().is_empty() { &self.stdout } else { &self.stderr };
        Err(SandboxError::CommandFailed {
            status: self.status.to_string(),
            message: last_lines(text, QUOTED_LINES_MAX),
            command: self.command,
        })
    }

    /// Reads standard output as JSON.
    ///
    /// # Errors
    /// [`SandboxError::UnexpectedOutput`] where it is not JSON.
    pub fn json(&self) -> Result<serde_json::Value, SandboxError> {
        serde_json::from_str(&self.stdout).map_err(|error| SandboxError::UnexpectedOutput {
            command: self.command.clone(),
            why: format!("{error}: {}", last_lines(&self.stdout, 3)),
        })
    }
}

/// A network namespace, by its name under `/run/netns`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Netns {
    name: String,
}

impl Netns {
    /// Makes a namespace with its loopback device up.
    pub(crate) fn create(name: String) -> Result<Self, SandboxError> {
        let _gate = gate::gate();
        run(Command::new("ip").args(["netns", "add", &name]))?;
        run(Command::new("ip").args(["-n", &name, "link", "set", "lo", "up"]))?;
        Ok(Self { name })
    }

    /// The name, as `ip netns` knows it.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The file that stands for the namespace.
    #[must_use]
    pub fn path(&self) -> String {
        format!("/run/netns/{}", self.name)
    }

    /// A command that will run in this namespace.
    #[must_use]
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.name, program]);
        command
    }

    /// Runs a command in this namespace to its end; the caller judges the status.
    ///
    /// # Errors
    /// [`SandboxError::CommandTimedOut`] after two minutes, [`SandboxError::Io`] if it does not start.
    pub fn exec(&self, words: &[&str]) -> Result<Output, SandboxError> {
        self.exec_within(COMMAND_LIMIT, words)
    }

    /// As [`Netns::exec`], with a limit of the caller's.
    ///
    /// # Errors
    /// As [`Netns::exec`].
    pub fn exec_within(&self, limit: Duration, words: &[&str]) -> Result<Output, SandboxError> {
        let (program, arguments) = words.split_first().unwrap_or((&"true", &[]));
        output_of(self.command(program).args(arguments), limit)
    }

    /// Runs `ip` on this namespace.
    ///
    /// # Errors
    /// [`SandboxError::CommandFailed`] with the message of `ip`.
    pub fn ip(&self, arguments: &str) -> Result<Output, SandboxError> {
        let words = arguments.split_whitespace();
        run(Command::new("ip").args(["-n", &self.name]).args(words))
    }

    /// Starts a command in this namespace and lets it run. Its output is read line by line by
    /// [`Running::line`]; it is killed when the value is dropped.
    ///
    /// # Errors
    /// [`SandboxError::Io`] if it does not start.
    pub fn spawn(&self, words: &[&str]) -> Result<Running, SandboxError> {
        let (program, arguments) = words.split_first().unwrap_or((&"true", &[]));
        Running::start(piped(self.command(program).args(arguments)))
    }

    /// As [`Netns::spawn`], with both outputs appended to a file.
    ///
    /// # Errors
    /// [`SandboxError::Io`] if it does not start.
    pub fn spawn_logged(&self, words: &[&str], log: &File) -> Result<Running, SandboxError> {
        let (program, arguments) = words.split_first().unwrap_or((&"true", &[]));
        let mut command = self.command(program);
        command.args(arguments);
        Running::start(logged(&mut command, log)?)
    }

    /// The processes that run in this namespace.
    pub(crate) fn pids(name: &str) -> Vec<u32> {
        let Ok(output) = Command::new("ip").args(["netns", "pids", name]).output() else {
            return Vec::new();
        };
        String::from_utf8_lossy(&output.stdout)
            .lines()
            .filter_map(|l| l.trim().parse().ok())
            .collect()
    }
}

/// Gives what starts the command both its outputs.
pub(crate) fn piped(command: &mut Command) -> &mut Command {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped())
}

/// Sends both outputs of a command to a file, and gives it a separate process group: Ctrl-C on the terminal
/// then reaches the sandbox first.
pub(crate) fn logged<'a>(
    command: &'a mut Command,
    log: &File,
) -> Result<&'a mut Command, SandboxError> {
    use std::os::unix::process::CommandExt;
    let copy = || log.try_clone().map_err(SandboxError::io("duplicate the log's descriptor"));
    Ok(command.stdin(Stdio::null()).stdout(copy()?).stderr(copy()?).process_group(0))
}

/// A program that runs in a namespace; ended, by its process id, when dropped.
#[derive(Debug)]
pub struct Running {
    child: Child,
    command: String,
    lines: Option<mpsc::Receiver<String>>,
}

impl Running {
    pub(crate) fn start(command: &mut Command) -> Result<Self, SandboxError> {
        let text = text_of(command);
        let _gate = gate::gate();
        let mut child = command.spawn().map_err(SandboxError::io(format!("start `{text}`")))?;
        let (sender, lines) = mpsc::channel();
        let mut piped = false;
        if let Some(pipe) = child.stdout.take() {
            forward_lines(pipe, sender.clone());
            piped = true;
        }
        if let Some(pipe) = child.stderr.take() {
            forward_lines(pipe, sender);
            piped = true;
        }
        Ok(Self { child, command: text, lines: piped.then_some(lines) })
    }

    /// The process id. `ip netns exec` becomes the program, so this is the program's.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits for the next line of either output.
    ///
    /// # Errors
    /// [`SandboxError::WaitTimedOut`] after `limit`; [`SandboxError::UnexpectedOutput`] if the
    /// program closed its outputs or they go to a file.
    pub fn line(&mut self, limit: Duration) -> Result<String, SandboxError> {
        self.line_within(limit * slowness())
    }

    fn line_within(&mut self, limit: Duration) -> Result<String, SandboxError> {
        let Some(lines) = &self.lines else {
            return Err(self.unexpected("its output goes to a file"));
        };
        match lines.recv_timeout(limit) {
            Ok(line) => Ok(line),
            Err(mpsc::RecvTimeoutError::Timeout) => {
                let what = format!("a line from `{}`", self.command);
                Err(SandboxError::WaitTimedOut { what, limit })
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => Err(self.unexpected("it has ended")),
        }
    }

    /// Waits for a line that contains `needle` and returns it.
    ///
    /// # Errors
    /// As [`Running::line`]; the error quotes what came instead.
    pub fn line_with(&mut self, needle: &str, limit: Duration) -> Result<String, SandboxError> {
        let deadline = Instant::now() + limit * slowness();
        let mut seen = String::new();
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.line_within(left) {
                Ok(line) if line.contains(needle) => return Ok(line),
                Ok(line) => {
                    seen.push_str(&line);
                    seen.push('\n');
                }
                Err(SandboxError::UnexpectedOutput { why, .. }) => {
                    return Err(self.unexpected(&format!("{why}: {}", last_lines(&seen, 6))));
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Returns how the program ended, or `None` while it runs.
    ///
    /// # Errors
    /// [`SandboxError::Io`] if the system does not say.
    pub fn ended(&mut self) -> Result<Option<ExitStatus>, SandboxError> {
        self.child.try_wait().map_err(SandboxError::io(format!("wait for `{}`", self.command)))
    }

    /// Waits for the program's end.
    ///
    /// # Errors
    /// [`SandboxError::CommandTimedOut`] after `limit`; the program is killed then.
    pub fn wait(&mut self, limit: Duration) -> Result<ExitStatus, SandboxError> {
        let limit = limit * slowness();
        let deadline = Instant::now() + limit;
        loop {
            if let Some(status) = self.ended()? {
                return Ok(status);
            }
            if Instant::now() >= deadline {
                self.kill();
                return Err(SandboxError::CommandTimedOut { command: self.command.clone(), limit });
            }
            std::thread::sleep(Duration::from_millis(POLL_INTERVAL_MS));
        }
    }

    /// Sends a signal by process id.
    pub fn signal(&self, signal: rustix::process::Signal) {
        gate::signal(self.pid(), signal);
    }

    /// Asks the program to end (SIGTERM), and kills it after `limit`.
    ///
    /// # Errors
    /// [`SandboxError::CommandTimedOut`] if it had to be killed.
    pub fn terminate(&mut self, limit: Duration) -> Result<ExitStatus, SandboxError> {
        if let Some(status) = self.ended()? {
            return Ok(status);
        }
        self.signal(rustix::process::Signal::TERM);
        self.wait(limit)
    }

    /// Kills the program (SIGKILL) and takes its status.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Lets the program run on after this process has ended.
    pub(crate) fn release(self) {
        std::mem::forget(self);
    }

    fn unexpected(&self, why: &str) -> SandboxError {
        SandboxError::UnexpectedOutput { command: self.command.clone(), why: why.to_owned() }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Asked first, so that it can remove what it made outside of the namespace.
        if matches!(self.child.try_wait(), Ok(None)) {
            let _ = self.terminate(DROP_GRACE);
        }
    }
}

/// Runs a command of the sandbox itself and wants it to succeed.
pub(crate) fn run(command: &mut Command) -> Result<Output, SandboxError> {
    output_of(command, COMMAND_LIMIT)?.success()
}

/// Runs a command to its end, with a limit.
pub(crate) fn output_of(command: &mut Command, limit: Duration) -> Result<Output, SandboxError> {
    let text = text_of(command);
    let limit = limit * slowness();
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(SandboxError::io(format!("start `{text}`")))?;
    let stdout = child.stdout.take().map(read_to_end);
    let stderr = child.stderr.take().map(read_to_end);
    let deadline = Instant::now() + limit;
    let status = loop {
        match child.try_wait().map_err(SandboxError::io(format!("wait for `{text}`")))? {
            Some(status) => break status,
            None if Instant::now() >= deadline => {
                let _ = child.kill();
                let _ = child.wait();
                return Err(SandboxError::CommandTimedOut { command: text, limit });
            }
            None => std::thread::sleep(Duration::from_millis(POLL_INTERVAL_MS)),
        }
    };
    Ok(Output { command: text, status, stdout: collect(stdout), stderr: collect(stderr) })
}

/// The last `count` lines of a text.
pub(crate) fn last_lines(text: &str, count: usize) -> String {
    let lines: Vec<&str> = text.trim_end().lines().collect();
    lines[lines.len().saturating_sub(count)..].join("\n")
}

fn text_of(command: &Command) -> String {
    let mut text = command.get_program().to_string_lossy().into_owned();
    for word in command.get_args() {
        text.push(' ');
        text.push_str(&word.to_string_lossy());
    }
    text
}

/// Reads a pipe on a separate thread, so that neither output can block the command.
fn read_to_end(mut pipe: impl Read + Send + 'static) -> mpsc::Receiver<Vec<u8>> {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        let mut chunk = [0_u8; 16 * 1024];
        while let Ok(length @ 1..) = pipe.read(&mut chunk) {
            if sender.send(chunk[..length].to_vec()).is_err() {
                return;
            }
        }
    });
    receiver
}

/// Takes what the reader of a pipe has; a grandchild that holds the pipe open cannot block this.
fn collect(chunks: Option<mpsc::Receiver<Vec<u8>>>) -> String {
    let Some(chunks) = chunks else { return String::new() };
    let mut bytes = Vec::new();
    while let Ok(chunk) = chunks.recv_timeout(Duration::from_millis(OUTPUT_DRAIN_MS)) {
        bytes.extend_from_slice(&chunk);
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

fn forward_lines(pipe: impl Read + Send + 'static, sender: mpsc::Sender<String>) {
    std::thread::spawn(move || {
        for line in io::BufRead::lines(io::BufReader::new(pipe)) {
            let Ok(line) = line else { return };
            if sender.send(line).is_err() {
                return;
            }
        }
    });
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_failed_command_is_quoted_in_its_error() {
        let mut command = Command::new("sh");
        command.args(["-c", "echo nothing to see; echo broken >&2; exit 3"]);
        let error = run(&mut command).unwrap_err().to_string();
        assert!(error.contains("broken") && error.contains('3'), "{error}");
    }

    #[test]
    fn a_command_that_hangs_is_killed() {
        let mut command = Command::new("sleep");
        let error = output_of(command.arg("60"), Duration::from_millis(50)).unwrap_err();
        assert!(matches!(error, SandboxError::CommandTimedOut { .. }), "{error}");
    }

    #[test]
    fn a_large_output_does_not_block_the_command() {
        let mut command = Command::new("sh");
        command.args(["-c", "head -c 1000000 /dev/zero; head -c 1000000 /dev/zero >&2"]);
        let output = run(&mut command).unwrap();
        assert_eq!((output.stdout.len(), output.stderr.len()), (1_000_000, 1_000_000));
    }

    #[test]
    fn lines_of_a_running_program_are_read_until_it_ends() {
        let mut command = Command::new("sh");
        command.args(["-c", "echo one; echo two"]).stdout(Stdio::piped());
        let mut running = Running::start(&mut command).unwrap();
        assert_eq!(running.line_with("two", Duration::from_secs(20)).unwrap(), "two");
        assert!(running.line(Duration::from_secs(20)).is_err());
        assert!(running.wait(Duration::from_secs(20)).unwrap().success());
    }

    #[test]
    fn the_last_lines_of_a_text() {
        assert_eq!(last_lines("a\nb\nc\n", 2), "b\nc");
        assert_eq!(last_lines("", 2), "");
    }
}
