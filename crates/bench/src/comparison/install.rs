//! Programs of other systems: those of Debian packages are found, those that no package has are built once
//! and kept.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::sandbox::{Output, SandboxError, find_program, output_of, progress};

/// Limit of the one build of a program.
const BUILD_LIMIT: Duration = Duration::from_secs(600);
/// Limit of a version command.
const VERSION_LIMIT: Duration = Duration::from_secs(5);
/// Go's program as its archive installs it, outside of the search path.
const GO: &str = "/usr/local/go/bin/go";

/// Why another system, or what it is needed for, is left out.
#[derive(Debug)]
pub struct LeftOut(pub String);

impl From<String> for LeftOut {
    fn from(why: String) -> Self {
        Self(why)
    }
}

impl From<&str> for LeftOut {
    fn from(why: &str) -> Self {
        Self(why.to_owned())
    }
}

impl From<SandboxError> for LeftOut {
    fn from(error: SandboxError) -> Self {
        Self(error.to_string())
    }
}

/// Finds the program of a Debian package.
pub(super) fn debian_program(program: &str, package: &str) -> Result<PathBuf, LeftOut> {
    let missing = || format!("`{program}` is missing (apt-get install {package})");
    find_program(program).ok_or_else(|| missing().into())
}

/// The version of an installed Debian package.
pub(super) fn debian_version(package: &str) -> Option<String> {
    said(Command::new("dpkg-query").args(["-W", "-f", "${Version}", package]))
}

/// The first line of a program's output for `--version`.
pub(super) fn version_of(program: &Path) -> Option<String> {
    said(Command::new(program).arg("--version"))
}

/// Finds a program that was built with Go, or builds it once. `package` is its path with `@` and a version.
///
/// # Errors
/// There is no Go toolchain, or it cannot build the program: why.
pub fn go_program(program: &str, package: &str) -> Result<PathBuf, LeftOut> {
    let cache = cache_directory()?;
    let binary = cache.join(program);
    if binary.is_file() {
        return Ok(binary);
    }
    build(program, Command::new(go()?).args(["install", package]).env("GOBIN", &cache))?;
    Ok(binary)
}

/// Finds Go's program.
///
/// # Errors
/// There is none.
pub fn go() -> Result<PathBuf, LeftOut> {
    let elsewhere = || Some(PathBuf::from(GO)).filter(|path| path.is_file());
    let go = find_program("go").or_else(elsewhere);
    go.ok_or_else(|| "there is no Go toolchain to build it with (https://go.dev/dl has it)".into())
}

/// Finds a program in the search path, or builds a release of a crate once.
pub(super) fn cargo_program(
    program: &str,
    package: &str,
    version: &str,
) -> Result<PathBuf, LeftOut> {
    if let Some(binary) = find_program(program) {
        return Ok(binary);
    }
    let cache = cache_directory()?;
    let binary = cache.join(program);
    if binary.is_file() {
        return Ok(binary);
    }
    let cargo = find_program("cargo");
    let cargo = cargo.ok_or("there is no cargo to build it with (https://rustup.rs has it)")?;
    let root = cache.parent().ok_or("there is no directory for a cache")?;
    let mut command = Command::new(cargo);
    command.args(["install", package, "--locked", "--version", version, "--root"]).arg(root);
    build(program, &mut command)?;
    Ok(binary)
}

fn build(program: &str, command: &mut Command) -> Result<(), LeftOut> {
    progress::note(&format!("building {program}, once"));
    output_of(command, BUILD_LIMIT).and_then(Output::success)?;
    Ok(())
}

fn cache_directory() -> Result<PathBuf, LeftOut> {
    let base = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let home = || Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache"));
    let base = base.or_else(home).ok_or("there is no home directory for a cache (set HOME)")?;
    Ok(base.join("weft/bin"))
}

/// The first line that a command prints, if it succeeds.
fn said(command: &mut Command) -> Option<String> {
    let output = output_of(command, VERSION_LIMIT).and_then(Output::success).ok()?;
    Some(output.stdout.lines().next()?.trim().to_owned())
}
