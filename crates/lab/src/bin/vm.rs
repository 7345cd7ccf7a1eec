//! `./dev vm`: guests with Debian's kernels, for features that this machine's kernel lacks.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use weft_bench::sandbox::progress::{note, print};
use weft_lab::ring::Ring;
use weft_lab::vm::kernel::{Choice, Kernel};
use weft_lab::vm::suite::{self, Request};
use weft_lab::vm::{Clock, Guest, Job, interrupt, place_of, script_of};

/// The exit code where the guest itself failed, and not what ran in it.
const FAILED: u8 = 125;
/// Environment variables with these prefixes are passed to the guest.
const INHERITED: [&str; 4] = ["PROPTEST_", "RUST_BACKTRACE", "RUST_LOG", "WEFT_"];

#[derive(Parser)]
#[command(name = "./dev vm", about = "Guests with Debian's kernels under QEMU, without KVM")]
struct Options {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Run a command in a guest and exit with its code (125: the guest failed)
    Run {
        #[command(flatten)]
        guest: GuestOptions,
        /// Stop the guest after S seconds
        #[arg(long, value_name = "S", default_value_t = 540)]
        timeout: u64,
        /// Clock of the guest; with instructions, a busy machine does not slow it and waits take no time
        #[arg(long, value_enum, default_value_t = Clock::Host)]
        clock: Clock,
        /// One word is a script for bash; several are a program and its arguments
        #[arg(required = true, last = true, value_name = "COMMAND")]
        command: Vec<String>,
    },
    /// Open a shell in a guest; `exit` stops the guest
    Shell {
        #[command(flatten)]
        guest: GuestOptions,
    },
    /// Run tests in guests: those of the namespace lab (net_*) and those of guests' kernels (vm_*)
    Test {
        /// newest, or 6.1 (Debian 12's) (default: the table in suite.rs decides; newest with NAME)
        #[arg(long)]
        kernel: Option<Choice>,
        /// Guests that run at once (default: as cores and memory allow)
        #[arg(long, value_name = "N")]
        guests: Option<usize>,
        /// weft binary for the guests
        #[arg(long, value_name = "FILE", env = "WEFT_BIN")]
        weft: Option<PathBuf>,
        /// Directory of logs (default: vm in cargo's target directory)
        #[arg(long, value_name = "DIR")]
        logs: Option<PathBuf>,
        /// Ring of tests to run if no NAME is given
        #[arg(long, value_enum, default_value_t = Ring::Full)]
        ring: Ring,
        /// Run only tests whose name, TARGET::TEST, contains NAME
        name: Option<String>,
    },
    /// Fetch the kernels and list them
    Kernels {
        /// Ask Debian for newer kernels
        #[arg(long)]
        update: bool,
    },
}

#[derive(Args)]
struct GuestOptions {
    /// newest, or 6.1 (Debian 12's)
    #[arg(long, default_value_t = Choice::Newest)]
    kernel: Choice,
    /// Copy a file or directory to / of the guest under its name; may be repeated
    #[arg(long, value_name = "F")]
    file: Vec<PathBuf>,
    /// Memory of the guest in MiB
    #[arg(long, value_name = "MIB", default_value_t = 2048)]
    memory: u32,
    /// Additional kernel parameters of the guest, such as ipv6.disable=1
    #[arg(long, value_name = "WORDS", default_value = "")]
    boot: String,
    /// Directory to receive the files that the command leaves under /out
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// weft binary for the guest
    #[arg(long, value_name = "FILE", env = "WEFT_BIN")]
    weft: Option<PathBuf>,
    /// File to receive the guest's kernel log
    #[arg(long, value_name = "FILE")]
    log: Option<PathBuf>,
}

fn main() -> ExitCode {
    interrupt::watch();
    match task(Options::parse().task) {
        Ok(code) => code,
        Err(error) => {
            if let Some(interrupted) = error.downcast_ref::<interrupt::Interrupted>() {
                return ExitCode::from(u8::try_from(interrupted.0).unwrap_or(FAILED));
            }
            note(&format!("error: {error:#}"));
            ExitCode::from(FAILED)
        }
    }
}

fn task(task: Task) -> anyhow::Result<ExitCode> {
    match task {
        Task::Run { guest, timeout, clock, command } => {
            let job = job(&guest, script_of(&command), timeout, clock)?;
            let kernel = Kernel::get(guest.kernel, false)?;
            let ending = Guest::new(&kernel, &job)?.run(&mut |bytes| {
                let mut out = std::io::stdout();
                let _ = out.write_all(bytes).and_then(|()| out.flush());
            })?;
            Ok(exit_code(ending.code))
        }
        Task::Shell { guest } => {
            let job = job(&guest, "bash -i".to_owned(), u64::MAX, Clock::Host)?;
            let kernel = Kernel::get(guest.kernel, false)?;
            Ok(exit_code(Guest::new(&kernel, &job)?.interact()?))
        }
        Task::Test { kernel, guests, weft, logs, ring, name } => {
            let environment = environment();
            let logs = std::path::absolute(logs.unwrap_or_else(default_logs))?;
            let request = Request { name, kernel, ring, guests, weft, environment, logs };
            let passed = suite::run_tests(&request)?;
            Ok(if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE })
        }
        Task::Kernels { update } => {
            for choice in Choice::ALL {
                let kernel = Kernel::get(choice, update)?;
                let place = kernel.directory()?;
                print(&format!(
                    "{choice}\t{}\t{}\t{}\n",
                    kernel.release,
                    kernel.suite,
                    place.display()
                ));
            }
            Ok(ExitCode::SUCCESS)
        }
    }
}

fn job(options: &GuestOptions, script: String, limit_s: u64, clock: Clock) -> anyhow::Result<Job> {
    let files = options.file.iter().map(|file| Ok((file.clone(), place_of(file)?)));
    Ok(Job {
        script,
        files: files.collect::<anyhow::Result<_>>()?,
        weft: options.weft.clone(),
        environment: environment(),
        memory_mib: options.memory,
        clock,
        boot: options.boot.clone(),
        limit: Duration::from_secs(limit_s),
        out: options.out.clone(),
        log: options.log.clone(),
    })
}

fn default_logs() -> PathBuf {
    let target =
        std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| "target".into(), PathBuf::from);
    target.join("vm")
}

/// The variables of this program that are a guest's too.
fn environment() -> Vec<(String, String)> {
    let inherited =
        |name: &str| name != "WEFT_BIN" && INHERITED.iter().any(|part| name.starts_with(part));
    std::env::vars().filter(|(name, _)| inherited(name)).collect()
}

fn exit_code(code: i32) -> ExitCode {
    ExitCode::from(u8::try_from(code).unwrap_or(FAILED))
}
