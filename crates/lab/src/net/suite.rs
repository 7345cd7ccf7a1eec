//! The namespace lab as a whole: which tests run side by side, and their results.
//!
//! cargo-nextest does the same for any project. Debian does not package it, and building it takes longer than
//! the core of the lab.

use std::fs::File;
use std::io::{Read, Seek};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use anyhow::Context;
use weft_bench::comparison::install::LeftOut;
use weft_bench::sandbox::Programs;
use weft_bench::sandbox::progress::{note, print, step};
use weft_io::faults::NO_POWER_CUT;

use crate::go;
use crate::programs::{Places, Program, folder_of, names, programs};
use crate::ring::{Ring, each_fits, fits, is_one_of};
use crate::vm::interrupt;

const PACKAGE: &str = "weft-lab";
const PLACES: Places<'static> = Places { packages: &[PACKAGE], prefixes: &["net_"] };
/// The longest that one test may take outside a soak.
const TEST_LIMIT: Duration = Duration::from_secs(600);
/// How often to check whether a test has ended.
const POLL: Duration = Duration::from_millis(20);
/// How many tests run side by side.
const AT_ONCE: usize = 6;
/// Output of a test program that has run its one test.
const ONE_PASSED: &str = "test result: ok. 1 passed;";
/// What a test says of a part that it leaves out on this machine.
const LEFT_OUT: &str = "not tested here:";
/// The line of a test that has removed another run's sandbox.
const SWEPT: &str = "removed what the killed run";
/// How many of the slowest tests are named at the end.
const SLOWEST: usize = 10;

/// How many of [`QUIET`] run side by side.
const QUIET_AT_ONCE: usize = 2;
/// Tests that judge by a clock and wait most of their time: they run beside a few of their kind alone.
const QUIET: [&str; 1] = ["net_core::*"];

/// Tests that judge by speed or load the machine: they run alone. All others wait most of their time.
const ALONE: [&str; 14] = [
    "net_bench::*",
    "net_cni_many::two_hundred*",
    "net_docker::*::many*",
    "net_ecn::*",
    "net_gateway_life::keys*",
    "net_gateway_soak::*",
    "net_idle::*",
    "net_mixed::*",
    "net_ports::workers*",
    "net_pressure::*",
    "net_rekey::*",
    "net_top::*",
    "net_traffic::*",
    "net_workers::*",
];

/// Tests that the core omits: they watch growth or drift over minutes, measure a figure, or repeat another test
/// on ports of the other kind, with more containers, with engines that crash, or by another client of the same
/// interface (the core has one scenario of each: Docker, CNI, OpenVPN).
const NOT_CORE: [&str; 55] = [
    "net_bench::attach_and_detach*",
    "net_bench::every_column*",
    "net_bench::hosts_that_send_at_once*",
    "net_bench::the_gateway_is_measured*",
    "net_bench::the_table_of_data_channel*",
    "net_cni_chain::a_containers_rate*",
    "net_cni_many::*",
    "net_cni_pods::*",
    "net_compose::*",
    "net_docker::debian::a_container_has*",
    "net_docker::debian::containers_outlive*",
    "net_docker::debian::containers_that_always_restart*",
    "net_docker::debian::many*",
    "net_docker::docker_29::*",
    "net_docker_events::debian::an_attached*",
    "net_docker_events::docker_29::*",
    "net_docker_attach::*",
    "net_gateway_addresses::*",
    "net_gateway_auth::a_program*",
    "net_gateway_auth::a_token*",
    "net_gateway_auth::codes*",
    "net_gateway_auth::guesses*",
    "net_gateway_auth::certificates*",
    "net_gateway_hosts::a_login_is_good*",
    "net_gateway_hosts::a_name_has*",
    "net_gateway_hosts::a_replica_serves*",
    "net_gateway_hosts::the_authority_moves*",
    "net_gateway_import::way_out*",
    "net_gateway_way_out::a_host*",
    "net_gateway_way_out::each_client*",
    "net_gateway_tcp::garbage*",
    "net_gateway_tcp::traffic*",
    "net_gateway_import::bad_input*",
    "net_gateway_import::cases*",
    "net_gateway_import::hosts*",
    "net_gateway_import::watched*",
    "net_gateway_import::logins*",
    "net_gateway_import::matrix*",
    "net_gateway_import::minivpn*",
    "net_gateway_import::refused*",
    "net_gateway_import::seen*",
    "net_gateway_life::*",
    "net_gateway_odd::*",
    "net_gateway_oidc::*",
    "net_gateway_soak::*",
    "net_idle::memory*",
    "net_mixed::*",
    "net_moves::an_address_that_is_given_again*",
    "net_nerdctl::*",
    "net_podman::*",
    "net_shortcuts::where_somebody_limits*",
    "net_weave_guide::*",
    "net_workers::flows_over_two_lanes*",
    "net_workers::hosts_may_differ*",
    "net_workers::workers_come_and_go*",
];

/// Finds the programs of a Go module, or builds them.
type Finder = fn() -> Result<Programs, LeftOut>;

/// Tests with programs of Go modules. Their finders may take longer than a test.
const OF_GO: [(&str, Finder); 5] = [
    ("net_docker::docker_29::*", go::docker),
    ("net_docker_attach::docker_29::*", go::docker),
    ("net_docker_events::docker_29::*", go::docker),
    ("net_gateway_oidc::*", go::provider),
    ("net_nerdctl::*", go::nerdctl),
];

/// The tests to run.
#[derive(Debug, Clone, Default)]
pub struct Request {
    /// Only tests with this in their name, `target::test`; rings are not asked then.
    pub name: Option<String>,
    /// How much runs where no name is given.
    pub ring: Ring,
}

/// One test, which runs in a separate process.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Test {
    /// `target::test`.
    name: String,
    file: PathBuf,
    /// Its name in the program.
    inside: String,
}

/// How a test ended.
struct Ending {
    name: String,
    took: Duration,
    passed: bool,
}

/// Builds the tests, runs them, prints what failed, and tells whether all passed.
///
/// # Errors
/// Nothing fits the request, or a build failed. A test that fails is not an error.
pub fn run_tests(request: &Request) -> anyhow::Result<bool> {
    let programs = programs(&PLACES, request.name.as_deref())?;
    let mut plan = planned(&programs, request)?;
    for (pattern, build) in OF_GO {
        if plan.has(pattern) {
            let built = build();
            interrupt::check()?;
            if let Err(LeftOut(why)) = built {
                // Each of its tests would try again, for as long as this took.
                note(&format!("{LEFT_OUT} {pattern}: {why}"));
                plan.leave_out(pattern);
            }
        }
    }
    let Plan { beside, quiet, alone } = plan;
    let folder = folder_of(PACKAGE)?;
    let limit = (request.ring != Ring::Soak).then_some(TEST_LIMIT);
    let counts = (beside.len(), alone.len(), quiet.len());
    step(&format!(
        "{} tests side by side, then {} alone, then {} in twos",
        counts.0, counts.1, counts.2
    ));
    let mut endings = run_all(beside, AT_ONCE, &folder, limit)?;
    endings.extend(run_all(alone, 1, &folder, limit)?);
    // Last, since the kernel takes the namespaces of the first ones away for seconds.
    endings.extend(run_all(quiet, QUIET_AT_ONCE, &folder, limit)?);
    endings.sort_by_key(|ending| std::cmp::Reverse(ending.took));
    let lines = endings.iter().take(SLOWEST);
    let lines = lines.map(|it| format!("  {:>5.1} s  {}\n", it.took.as_secs_f64(), it.name));
    print(&format!("the slowest:\n{}", lines.collect::<String>()));
    let failed = endings.iter().filter(|ending| !ending.passed).count();
    let verdict = if failed == 0 { "ok" } else { "FAILED" };
    let passed = endings.len() - failed;
    print(&format!("test result: {verdict}. {passed} passed; {failed} failed\n"));
    Ok(failed == 0)
}

/// The tests to run, by how many of them run at once.
struct Plan {
    beside: Vec<Test>,
    quiet: Vec<Test>,
    alone: Vec<Test>,
}

impl Plan {
    fn has(&self, pattern: &str) -> bool {
        let mut all = self.beside.iter().chain(&self.quiet).chain(&self.alone);
        all.any(|test| fits(pattern, &test.name))
    }

    fn leave_out(&mut self, pattern: &str) {
        for tests in [&mut self.beside, &mut self.quiet, &mut self.alone] {
            tests.retain(|test| !fits(pattern, &test.name));
        }
    }
}

fn planned(programs: &[Program], request: &Request) -> anyhow::Result<Plan> {
    if request.name.is_none() {
        let names = names(programs);
        each_fits(&QUIET, &names, "the namespace lab")?;
        each_fits(&ALONE, &names, "the namespace lab")?;
        each_fits(&NOT_CORE, &names, "the core of the namespace lab")?;
        each_fits(&OF_GO.map(|(pattern, _)| pattern), &names, "the namespace lab")?;
    }
    let wanted = |test: &Test| match &request.name {
        Some(part) => test.name.contains(part.as_str()),
        None => request.ring != Ring::Core || !is_one_of(&NOT_CORE, &test.name),
    };
    let of = |program: &Program| {
        let Program { target, file, tests } = program.clone();
        tests.into_iter().map(move |inside| Test {
            name: format!("{target}::{inside}"),
            file: file.clone(),
            inside,
        })
    };
    let tests: Vec<Test> = programs.iter().flat_map(of).filter(wanted).collect();
    if let (Some(name), true) = (&request.name, tests.is_empty()) {
        anyhow::bail!("no test of the namespace lab has '{name}' in its name");
    }
    let (alone, others) = apart(tests, &ALONE);
    let (quiet, beside) = apart(others, &QUIET);
    Ok(Plan { beside, quiet, alone })
}

/// The tests that one of these patterns fits, and the others.
fn apart(tests: Vec<Test>, patterns: &[&str]) -> (Vec<Test>, Vec<Test>) {
    tests.into_iter().partition(|test| is_one_of(patterns, &test.name))
}

/// Runs tests, at most this many at once.
fn run_all(
    tests: Vec<Test>,
    at_once: usize,
    folder: &Path,
    limit: Option<Duration>,
) -> anyhow::Result<Vec<Ending>> {
    let waiting = Mutex::new(tests.into_iter());
    let ended = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..at_once {
            scope.spawn(|| {
                while interrupt::check().is_ok()
                    && let Some(test) = waiting.lock().ok().and_then(|mut tests| tests.next())
                {
                    let ending = run_test(&test, folder, limit);
                    if let Ok(mut ended) = ended.lock() {
                        ended.push(ending);
                    }
                }
            });
        }
    });
    interrupt::check()?;
    ended.into_inner().map_err(|_| anyhow::anyhow!("a thread that runs tests has panicked"))
}

fn run_test(test: &Test, folder: &Path, limit: Option<Duration>) -> Ending {
    let begun = Instant::now();
    let outcome = outcome_of(test, folder, limit);
    let took = begun.elapsed();
    let seconds = took.as_secs_f64();
    let name = test.name.clone();
    let said = match outcome {
        Ok(None) => {
            note(&format!("ok {seconds:>6.1} s  {name}"));
            return Ending { name, took, passed: true };
        }
        Ok(Some(said)) => said,
        Err(error) => format!("---- {name} stdout ----\n{error:#}\n"),
    };
    // The counts at the end are of all tests.
    let said = said.lines().filter(|line| !line.starts_with("test result:"));
    let said: String = said.map(|line| format!("{line}\n")).collect();
    print(&format!("FAILED {seconds:.1} s  {name}\n{said}"));
    Ending { name, took, passed: false }
}

/// The output of a failed test; `None` if it passed.
fn outcome_of(
    test: &Test,
    folder: &Path,
    limit: Option<Duration>,
) -> anyhow::Result<Option<String>> {
    let mut output = tempfile::tempfile().context("no file for a test's output")?;
    let mut command = Command::new(&test.file);
    // Daemons are killed, and no host loses its power.
    command.env(NO_POWER_CUT, "1");
    command.args(["--test-threads=1", "--exact", &test.inside]).current_dir(folder);
    command.stdin(std::process::Stdio::null());
    command.stdout(output.try_clone()?).stderr(output.try_clone()?);
    let mut child = command.spawn().with_context(|| format!("cannot start {}", test.name))?;
    let status = waited(&mut child, limit)?;
    output.rewind()?;
    let said = text_of(&mut output)?;
    Ok(match status {
        None => Some(format!("{said}\n---- {} stdout ----\nran over its limit\n", test.name)),
        Some(status) if status.success() && said.contains(ONE_PASSED) => {
            let is_told = |line: &&str| line.contains(LEFT_OUT) || line.contains(SWEPT);
            said.lines().filter(is_told).for_each(|line| note(line.trim()));
            None
        }
        // An ignored test, or one that no longer exists.
        Some(status) if status.success() => {
            Some(format!("{said}\n---- {} stdout ----\ndid not run\n", test.name))
        }
        Some(status) => Some(format!("{said}\n{status}\n")),
    })
}

fn text_of(output: &mut File) -> anyhow::Result<String> {
    let mut bytes = Vec::new();
    output.read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// How the child ended; nothing if it was killed at its limit.
fn waited(child: &mut Child, limit: Option<Duration>) -> anyhow::Result<Option<ExitStatus>> {
    let begun = Instant::now();
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if limit.is_some_and(|limit| begun.elapsed() > limit) || interrupt::check().is_err() {
            child.kill()?;
            child.wait()?;
            return Ok(None);
        }
        std::thread::sleep(POLL);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn program(target: &str, tests: &[&str]) -> Program {
        let tests = tests.iter().map(|&name| name.to_owned()).collect();
        Program { target: target.to_owned(), file: PathBuf::new(), tests }
    }

    fn test(file: &str, inside: &str) -> Test {
        let name = format!("net_x::{inside}");
        Test { name, file: file.into(), inside: inside.to_owned() }
    }

    #[test]
    fn a_name_asks_for_its_tests_alone() {
        let all = [
            program("net_dco", &["a", "ab"]),
            program("net_top", &["b"]),
            program("net_core", &["b", "c"]),
        ];
        let counts = |plan: Plan| (plan.beside.len(), plan.quiet.len(), plan.alone.len());
        let name = |name: &str| Request { name: Some(name.to_owned()), ..Request::default() };
        assert_eq!(counts(planned(&all, &name("net_dco::a")).unwrap()), (2, 0, 0));
        assert_eq!(counts(planned(&all, &name("b")).unwrap()), (1, 1, 1));
        let mut without = planned(&all, &name("b")).unwrap();
        assert!(without.has("net_top::*") && !without.has("net_top::a*"));
        without.leave_out("net_top::*");
        assert_eq!(counts(without), (1, 1, 0));
        assert!(planned(&all, &name("nothing")).is_err());
        let error = planned(&all, &Request::default()).map(drop).unwrap_err();
        assert!(error.to_string().contains("no test fits"), "{error}");
    }

    #[test]
    fn a_test_that_ends_badly_or_not_at_all_has_failed() {
        let here = Path::new("/");
        let program = tempfile::NamedTempFile::new().unwrap();
        let limited = |text: &str, limit: Duration| {
            std::fs::write(program.path(), format!("#!/bin/sh\n{text}\n")).unwrap();
            let path = program.path().with_extension("sh");
            // Written by another process: a file that this one had open for writing may be busy still, in a child
            // that another test starts.
            let mut install = Command::new("install");
            let install = install.args(["-m", "700"]);
            assert!(install.arg(program.path()).arg(&path).status().unwrap().success());
            let outcome = outcome_of(&test(&path.to_string_lossy(), "a"), here, Some(limit));
            std::fs::remove_file(&path).unwrap();
            outcome
        };
        let script = |text: &str| limited(text, Duration::from_secs(60));
        assert_eq!(script("echo 'test result: ok. 1 passed; 0 failed;'").unwrap(), None);
        let said = script("echo 'test result: ok. 0 passed; 0 failed; 1 ignored;'").unwrap();
        assert!(said.unwrap().contains("did not run"));
        let said = script("echo 'thread panicked'; exit 101").unwrap().unwrap();
        assert!(said.contains("thread panicked") && said.contains("101"), "{said}");
        let said = limited("exec sleep 600", Duration::from_millis(200)).unwrap().unwrap();
        assert!(said.contains("ran over its limit"), "{said}");
        assert!(outcome_of(&test("/nonexistent", "a"), here, None).is_err());
    }
}
