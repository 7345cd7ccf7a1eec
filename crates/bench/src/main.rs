//! `./dev demo` and `./dev bench`.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser;
use weft_bench::comparison::peer::{self, PeerCommand};
use weft_bench::comparison::{self, BenchOptions};
use weft_bench::demo::{self, DemoOptions};
use weft_bench::sandbox::progress;

#[derive(Debug, Parser)]
#[command(name = "./dev", max_term_width = 100, subcommand_required = true)]
enum Task {
    /// Run two hosts with containers on this machine, show pings and figures, and remove everything
    Demo(DemoOptions),
    /// Measure Weft and other networks on this machine
    Bench(BenchOptions),
    /// Run the far end of a measurement
    #[command(hide = true, subcommand)]
    Peer(PeerCommand),
}

fn main() -> ExitCode {
    let done = match Task::parse() {
        Task::Demo(options) => demo::run(&options),
        Task::Bench(options) => comparison::run(&options),
        Task::Peer(command) => peer::run(&command),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            progress::note(&format!("error: {error:#}"));
            ExitCode::FAILURE
        }
    }
}
