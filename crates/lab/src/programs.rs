//! Test programs of the labs: how they are built, and which tests they hold.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, bail};
use serde_json::Value;

use crate::vm::{interrupt, run};

/// The features of `weft` that a lab needs: SA keys for tshark, and data channel keys near their limit.
const FEATURES: &str = "weft/keylog,weft/aged-keys,weft/faults";

/// A test program and the tests of it that run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Program {
    pub(crate) target: String,
    pub(crate) file: PathBuf,
    pub(crate) tests: Vec<String>,
}

/// The directories of test programs.
pub(crate) struct Places<'a> {
    pub(crate) packages: &'a [&'a str],
    /// Test programs have names that begin so.
    pub(crate) prefixes: &'a [&'a str],
}

/// Builds the test programs that can hold a test of this name and asks each for its tests.
///
/// # Errors
/// A build failed, or a program does not list its tests.
pub(crate) fn programs(places: &Places<'_>, name: Option<&str>) -> anyhow::Result<Vec<Program>> {
    let targets = targets(&metadata()?, places);
    if let Some(pair) = targets.windows(2).find(|pair| pair[0] == pair[1]) {
        bail!("two packages have a test program {}: a lab has one directory for all", pair[0]);
    }
    // A name such as `net_mtu` or `net_mtu::…` tells the program; building the others would only cost time.
    let named = name.and_then(|name| name.split("::").next());
    let chosen = |target: &&String| named.is_some_and(|name| target.as_str() == name);
    let chosen: Vec<&String> = match targets.iter().filter(chosen).collect::<Vec<_>>() {
        some if !some.is_empty() => some,
        _ => targets.iter().collect(),
    };
    let mut programs = Vec::new();
    for (target, file) in built(&chosen)? {
        let output = run(Command::new(&file).args(["--list", "--format", "terse"]))?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let tests = text.lines().filter_map(|line| line.strip_suffix(": test")).map(str::to_owned);
        programs.push(Program { target, file, tests: tests.collect() });
    }
    Ok(programs)
}

/// The names of all tests, `target::test`.
pub(crate) fn names(programs: &[Program]) -> Vec<String> {
    let of = |program: &Program| {
        let target = program.target.clone();
        program.tests.clone().into_iter().map(move |test| format!("{target}::{test}"))
    };
    programs.iter().flat_map(of).collect()
}

/// The folder of a package of this workspace.
///
/// # Errors
/// Cargo says nothing of it.
pub(crate) fn folder_of(package: &str) -> anyhow::Result<PathBuf> {
    let metadata = metadata()?;
    let mut packages = metadata["packages"].as_array().into_iter().flatten();
    let found = packages.find(|it| it["name"] == package);
    let manifest = found.and_then(|it| it["manifest_path"].as_str());
    let folder = manifest.and_then(|manifest| Path::new(manifest).parent());
    Ok(folder.with_context(|| format!("cargo knows no package {package}"))?.to_owned())
}

fn cargo() -> Command {
    Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
}

fn metadata() -> anyhow::Result<Value> {
    let output = run(cargo().args(["metadata", "--no-deps", "--locked", "--format-version", "1"]))?;
    Ok(serde_json::from_slice(&output.stdout)?)
}

fn targets(metadata: &Value, places: &Places<'_>) -> Vec<String> {
    let packages = metadata["packages"].as_array().into_iter().flatten();
    let ours = packages.filter(|package| {
        package["name"].as_str().is_some_and(|name| places.packages.contains(&name))
    });
    let targets = ours.flat_map(|package| package["targets"].as_array().into_iter().flatten());
    let tests = targets.filter(|target| {
        target["kind"].as_array().is_some_and(|kinds| kinds.iter().any(|kind| kind == "test"))
    });
    let mut names: Vec<String> = tests
        .filter_map(|target| target["name"].as_str())
        .filter(|name| places.prefixes.iter().any(|prefix| name.starts_with(prefix)))
        .map(str::to_owned)
        .collect();
    names.sort();
    names
}

/// Builds test programs as all steps of `./dev test` have them, and gives their files.
fn built(targets: &[&String]) -> anyhow::Result<Vec<(String, PathBuf)>> {
    let mut command = cargo();
    command.args(["test", "--locked", "--no-run", "--message-format", "json-render-diagnostics"]);
    command.args(["--workspace", "--features", FEATURES]);
    for target in targets {
        command.args(["--test", target]);
    }
    let output = command.stderr(Stdio::inherit()).output().context("cannot start cargo")?;
    interrupt::check()?;
    anyhow::ensure!(output.status.success(), "the tests of the lab cannot be built");
    let mut found = Vec::new();
    for line in String::from_utf8_lossy(&output.stdout).lines() {
        let Ok(message) = serde_json::from_str::<Value>(line) else { continue };
        let name = message["target"]["name"].as_str().unwrap_or_default();
        if let Some(file) = message["executable"].as_str()
            && targets.iter().any(|target| *target == name)
        {
            found.push((name.to_owned(), PathBuf::from(file)));
        }
    }
    anyhow::ensure!(
        found.len() == targets.len(),
        "cargo built {} of {} tests",
        found.len(),
        targets.len()
    );
    found.sort();
    Ok(found)
}
