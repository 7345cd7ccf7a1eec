//! A program of the administrator's that judges passwords, as OpenVPN's `auth-user-pass-verify PROGRAM via-file`.
//!
//! Its argument is a file with the user name and the password, a line each, for root alone and only while it runs.
//! Its environment says where the client comes from, whose certificate it has shown and what the client says of itself
//! (`IV_`, `UV_`), by OpenVPN's names, and has the variables of a configuration that was taken over (`setenv`). Exit
//! code 0 lets the client in, 1 does not.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process_group};
use tokio::process::Command;
use weft_openvpn::key_method::PeerInfo;
use zeroize::Zeroizing;

use crate::services::gateway::authority::Holder;

/// How long the program may take, in seconds: less than a client waits for its key.
const PROGRAM_LIMIT_S: u64 = 20;
/// The longest reason that the client gets to see, in bytes.
const REASON_BYTES_MAX: usize = 256;
/// How the files begin that are made for the program.
const FILE_PREFIX: &str = "openvpn-login-";
const SYSTEM_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// Whoever can write to the program could become root.
const OTHERS_WRITE: u32 = 0o022;
/// Only the owner of a file removes it from such a directory.
const STICKY: u32 = 0o1000;
const MAY_RUN: u32 = 0o111;

/// Who is to be judged.
pub(super) struct Question<'a> {
    pub(super) program: &'a Path,
    /// Where the files are made.
    pub(super) directory: &'a Path,
    pub(super) user: &'a str,
    pub(super) password: &'a str,
    pub(super) certificate: Option<&'a Holder>,
    pub(super) from: SocketAddr,
    /// What the client says of itself.
    pub(super) info: &'a PeerInfo,
    /// The variables of a configuration that was taken over.
    pub(super) variables: &'a [(String, String)],
}

/// What the program says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    /// The client is let in.
    Yes,
    /// It is not; the client shows this, if there is a reason.
    No(Option<String>),
}

/// The program says neither yes nor no.
#[derive(Debug, thiserror::Error)]
pub(super) enum ProgramError {
    /// Administrator: it is no program that root may trust.
    #[error("{0}")]
    Fault(String),
    /// Administrator: it cannot be run.
    #[error(
        "cannot run {program}: {error}; it must be a program or a script with #! that root may run"
    )]
    Start {
        /// The program.
        program: PathBuf,
        /// Why.
        error: io::Error,
    },
    /// The runtime directory: the file for the program cannot be made.
    #[error("cannot write the file for the login program: {0}")]
    File(io::Error),
    /// Administrator: it takes too long.
    #[error("{program} has not ended after {PROGRAM_LIMIT_S} s, and was killed")]
    Late {
        /// The program.
        program: PathBuf,
    },
    /// Administrator: another exit code.
    #[error("{program} ended with {status}; 0 lets the client in, 1 does not")]
    Exit {
        /// The program.
        program: PathBuf,
        /// How it ended.
        status: std::process::ExitStatus,
    },
}

/// Why a program cannot be one, in words for the administrator.
pub(super) fn fault(program: &Path) -> Option<String> {
    let shown = program.display();
    if !program.is_absolute() {
        return Some(format!("{shown} is no absolute path of a program"));
    }
    let data = match fs::metadata(program) {
        Ok(data) => data,
        Err(error) => return Some(format!("cannot look at {shown}: {error}")),
    };
    if !data.is_file() || data.mode() & MAY_RUN == 0 {
        return Some(format!("{shown} is no program: give a file that may be run (chmod +x)"));
    }
    let is_safe = data.uid() == 0 && data.mode() & OTHERS_WRITE == 0;
    if !is_safe {
        return Some(format!(
            "{shown} can be written by others than root: correct its owner or mode"
        ));
    }
    // A link leads to a file in another directory.
    let real = fs::canonicalize(program).unwrap_or_else(|_| program.to_owned());
    let open = open_directory(program).or_else(|| open_directory(&real))?;
    Some(format!(
        "others than root can put another program in the place of {shown}: correct the owner or mode of {}",
        open.display()
    ))
}

/// A directory above a file in which others than root can put another in its place.
fn open_directory(file: &Path) -> Option<&Path> {
    let is_open = |directory: &&Path| {
        fs::metadata(directory).is_ok_and(|data| {
            let may_write = data.mode() & OTHERS_WRITE != 0 && data.mode() & STICKY == 0;
            data.uid() != 0 || may_write
        })
    };
    file.ancestors().skip(1).find(is_open)
}

/// Removes what an earlier daemon has left that was killed while a program ran.
pub(super) fn tidy(directory: &Path) {
    let Ok(files) = fs::read_dir(directory) else { return };
    for file in files.filter_map(Result::ok) {
        if file.file_name().as_encoded_bytes().starts_with(FILE_PREFIX.as_bytes()) {
            let _ = fs::remove_file(file.path());
        }
    }
}

/// Asks the program.
///
/// # Errors
/// It does not answer; see [`ProgramError`].
pub(super) async fn ask(question: &Question<'_>) -> Result<Answer, ProgramError> {
    let Question { user, password, .. } = question;
    if let Some(fault) = fault(question.program) {
        return Err(ProgramError::Fault(fault));
    }
    // The file has a line for each.
    if [user, password].iter().any(|text| text.contains(['\n', '\r', '\0'])) {
        return Ok(Answer::No(None));
    }
    let content = Zeroizing::new(format!("{user}\n{password}\n"));
    let login = PrivateFile::new(question.directory, &content).map_err(ProgramError::File)?;
    let reason = PrivateFile::new(question.directory, "").map_err(ProgramError::File)?;
    let status = run(question, &login.0, &reason.0).await?;
    match status.code() {
        Some(0) => Ok(Answer::Yes),
        Some(1) => Ok(Answer::No(reason.first_line())),
        _ => Err(ProgramError::Exit { program: question.program.to_owned(), status }),
    }
}

async fn run(
    question: &Question<'_>,
    login: &Path,
    reason: &Path,
) -> Result<std::process::ExitStatus, ProgramError> {
    let program = question.program.to_owned();
    let mut command = Command::new(&program);
    command
        .arg(login)
        .env_clear()
        .env("PATH", SYSTEM_PATH)
        .env("LC_ALL", "C.UTF-8")
        .envs(question.variables.iter().map(|(name, value)| (name, value)))
        .envs(said(question.info))
        .env("username", question.user)
        .env("script_type", "user-pass-verify")
        .env("auth_failed_reason_file", reason)
        .env("untrusted_port", question.from.port().to_string())
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .process_group(0)
        .kill_on_drop(true);
    match question.from.ip().to_canonical() {
        IpAddr::V4(address) => command.env("untrusted_ip", address.to_string()),
        IpAddr::V6(address) => command.env("untrusted_ip6", address.to_string()),
    };
    if let Some(Holder { name, serial, .. }) = question.certificate {
        let (hex, number) = (with_colons(serial), decimal(serial));
        command.env("common_name", name).env("tls_serial_hex_0", hex).env("tls_serial_0", number);
    }
    let spawned = command.spawn();
    let mut child =
        spawned.map_err(|error| ProgramError::Start { program: program.clone(), error })?;
    let group = Group(child.id().and_then(|id| Pid::from_raw(i32::try_from(id).ok()?)));
    let limit = Duration::from_secs(PROGRAM_LIMIT_S);
    let ended = tokio::time::timeout(limit, child.wait()).await;
    drop(group);
    match ended {
        Ok(Ok(status)) => Ok(status),
        Ok(Err(error)) => Err(ProgramError::Start { program, error }),
        Err(_) => Err(ProgramError::Late { program }),
    }
}

/// What a client says of itself, as far as it may.
fn said(info: &PeerInfo) -> impl Iterator<Item = (&str, &str)> {
    info.lines().filter(|(name, _)| name.starts_with("IV_") || name.starts_with("UV_"))
}

/// `4f01` as `4f:01`.
fn with_colons(hex: &str) -> String {
    let pairs = hex.as_bytes().chunks(2).map(String::from_utf8_lossy);
    pairs.collect::<Vec<_>>().join(":")
}

/// A number of any length in hexadecimal digits as a decimal one.
fn decimal(hex: &str) -> String {
    // The last digit first.
    let mut digits = vec![0];
    for mut carry in hex.chars().filter_map(|digit| digit.to_digit(16)) {
        for digit in &mut digits {
            let value = *digit * 16 + carry;
            (*digit, carry) = (value % 10, value / 10);
        }
        while carry > 0 {
            digits.push(carry % 10);
            carry /= 10;
        }
    }
    digits.iter().rev().filter_map(|digit| char::from_digit(*digit, 10)).collect()
}

/// The program and those that it started; they end with this value.
struct Group(Option<Pid>);

impl Drop for Group {
    fn drop(&mut self) {
        if let Some(leader) = self.0 {
            // Mostly nobody is left.
            let _ = kill_process_group(leader, Signal::KILL);
        }
    }
}

/// A file for root alone, which goes with this value.
struct PrivateFile(PathBuf);

impl PrivateFile {
    fn new(directory: &Path, content: &str) -> io::Result<Self> {
        let path = directory.join(format!("{FILE_PREFIX}{:016x}", rand::random::<u64>()));
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path)?;
        let made = Self(path);
        file.write_all(content.as_bytes())?;
        Ok(made)
    }

    /// What the program wrote, for a client to show.
    fn first_line(&self) -> Option<String> {
        let text = fs::read(&self.0).ok()?;
        let text = text.get(..REASON_BYTES_MAX.min(text.len()))?;
        let text = String::from_utf8_lossy(text);
        let line = text.lines().next()?.trim();
        let line: String = line.chars().filter(|char| !char.is_control()).collect();
        Some(line).filter(|line| !line.is_empty())
    }
}

impl Drop for PrivateFile {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn script(directory: &Path, text: &str) -> PathBuf {
        let (path, draft) = (directory.join("judge"), tempfile::NamedTempFile::new().unwrap());
        fs::write(draft.path(), format!("#!/bin/sh\n{text}\n")).unwrap();
        // Written by another process: a file that this one had open for writing may be busy still, in a child that
        // another test starts.
        let mut install = std::process::Command::new("install");
        let install = install.args(["-m", "755"]).arg(draft.path()).arg(&path);
        assert!(install.status().unwrap().success());
        path
    }

    async fn asked(directory: &Path, text: &str) -> Result<Answer, ProgramError> {
        let program = script(directory, text);
        let certificate =
            Holder { name: "laptop".into(), serial: "4f01".into(), ..Holder::default() };
        let variables = [("REQUIRED_GROUP", "vpn"), ("username", "root")];
        let variables = variables.map(|(name, value)| (name.to_owned(), value.to_owned()));
        let info = PeerInfo::parse("IV_PLAT=linux\nUV_ROOM=7\nPATH=/tmp\nLD_PRELOAD=/tmp/x\n");
        let question = Question {
            certificate: Some(&certificate),
            info: &info,
            variables: &variables,
            ..question(&program, directory)
        };
        ask(&question).await
    }

    fn question<'a>(program: &'a Path, directory: &'a Path) -> Question<'a> {
        static NO_INFO: std::sync::LazyLock<PeerInfo> = std::sync::LazyLock::new(PeerInfo::default);
        Question {
            program,
            directory,
            user: "anna",
            password: "pass word",
            certificate: None,
            from: "192.0.2.7:4000".parse().unwrap(),
            info: &NO_INFO,
            variables: &[],
        }
    }

    fn left(directory: &Path) -> usize {
        fs::read_dir(directory).unwrap().count()
    }

    #[tokio::test]
    async fn a_program_gets_all_that_it_needs_and_says_yes_or_no() {
        let place = tempfile::tempdir().unwrap();
        let dir = place.path();
        let check = "
            [ \"$(cat \"$1\")\" = \"anna\npass word\" ] || exit 1
            [ \"$(stat -c %a \"$1\")\" = 600 ] || exit 1
            [ \"$common_name $tls_serial_hex_0 $tls_serial_0\" = 'laptop 4f:01 20225' ] || exit 1
            [ \"$username $REQUIRED_GROUP\" = 'anna vpn' ] || exit 1
            [ \"$IV_PLAT $UV_ROOM $LD_PRELOAD\" = 'linux 7 ' ] || exit 1
            [ \"$PATH\" != /tmp ] || exit 1
            [ \"$untrusted_ip $untrusted_port\" = '192.0.2.7 4000' ] || exit 1
            ! env | grep -q 'pass word'";
        assert_eq!(asked(dir, check).await.unwrap(), Answer::Yes);
        assert_eq!(asked(dir, "exit 1").await.unwrap(), Answer::No(None));
        let why = "echo 'Your account has expired' > \"$auth_failed_reason_file\"; exit 1";
        let said = asked(dir, why).await.unwrap();
        assert_eq!(said, Answer::No(Some("Your account has expired".into())));
        assert_eq!(left(dir), 1, "a file is left");
    }

    #[tokio::test]
    async fn a_program_that_fails_says_neither() {
        let place = tempfile::tempdir().unwrap();
        let dir = place.path();
        assert!(matches!(asked(dir, "exit 2").await, Err(ProgramError::Exit { .. })));
        assert!(matches!(asked(dir, "kill -9 $$").await, Err(ProgramError::Exit { .. })));
        assert_eq!(left(dir), 1, "a file is left");
        let program = script(dir, "exit 0");
        let from = "[2001:db8::1]:1".parse().unwrap();
        let broken = Question { password: "two\nlines", from, ..question(&program, dir) };
        assert_eq!(ask(&broken).await.unwrap(), Answer::No(None));
        // It was good when it was named.
        fs::set_permissions(&program, fs::Permissions::from_mode(0o777)).unwrap();
        assert!(matches!(ask(&question(&program, dir)).await, Err(ProgramError::Fault(_))));
        assert_eq!(left(dir), 1, "a file is left");
    }

    #[tokio::test]
    async fn a_program_that_does_not_end_is_killed_with_its_children() {
        let place = tempfile::tempdir().unwrap();
        let dir = place.path();
        let program = script(dir, "sleep 600 & echo $! > \"$(dirname \"$0\")/child\"; wait");
        let question = question(&program, dir);
        let started = async {
            loop {
                let child = fs::read_to_string(dir.join("child")).unwrap_or_default();
                if child.ends_with('\n') {
                    break child.trim().to_owned();
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        // The login is given up, as when the daemon ends.
        let child = tokio::select! {
            _ = ask(&question) => panic!("it has ended"),
            child = started => child,
        };
        let is_gone = || {
            let state = fs::read_to_string(format!("/proc/{child}/stat")).unwrap_or_default();
            state.is_empty() || state.contains(") Z ")
        };
        for _ in 0..1_000 {
            if is_gone() {
                break;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        assert!(is_gone(), "a child of the program goes on");
        assert_eq!(left(dir), 2, "a file is left");
    }

    #[test]
    fn serial_numbers_are_written_as_openvpn_writes_them() {
        for (hex, colons, number) in [
            ("", "", "0"),
            ("4f01", "4f:01", "20225"),
            ("0a", "0a", "10"),
            (
                "ffffffffffffffffffffffffffffffffffffffff",
                "ff:ff:ff:ff:ff:ff:ff:ff:ff:ff:ff:ff:ff:ff:ff:ff:ff:ff:ff:ff",
                "1461501637330902918203684832716283019655932542975",
            ),
        ] {
            assert_eq!((with_colons(hex).as_str(), decimal(hex).as_str()), (colons, number));
        }
    }

    #[test]
    fn a_program_that_others_could_replace_is_none() {
        let place = tempfile::tempdir().unwrap();
        let program = script(place.path(), "exit 0");
        assert_eq!(fault(&program), None);
        for (mode, text) in [(0o777, "by others than root"), (0o600, "may be run")] {
            fs::set_permissions(&program, fs::Permissions::from_mode(mode)).unwrap();
            assert!(fault(&program).unwrap().contains(text));
        }
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        let link = place.path().join("link");
        std::os::unix::fs::symlink(&program, &link).unwrap();
        for (mode, is_good) in [(0o777, false), (0o1777, true), (0o755, true)] {
            fs::set_permissions(place.path(), fs::Permissions::from_mode(mode)).unwrap();
            for way in [&program, &link] {
                let fault = fault(way);
                assert_eq!(fault.is_none(), is_good, "{mode:o}: {fault:?}");
            }
        }
        fs::remove_file(&link).unwrap();
        assert!(fault(Path::new("judge")).unwrap().contains("no absolute path"));
        assert!(fault(place.path()).unwrap().contains("no program"));
        let _kept = PrivateFile::new(place.path(), "x").unwrap();
        tidy(place.path());
        assert_eq!(left(place.path()), 1);
    }
}
