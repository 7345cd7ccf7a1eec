//! `./dev net`: the namespace lab, on this machine's kernel.

use std::process::ExitCode;

use clap::Parser;
use weft_bench::sandbox::progress::note;
use weft_lab::net::suite::{Request, run_tests};
use weft_lab::ring::Ring;
use weft_lab::vm::interrupt;

#[derive(Parser)]
#[command(name = "./dev net", about = "Tests of real daemons in network namespaces")]
struct Options {
    /// Ring of tests to run if no NAME is given
    #[arg(long, value_enum, default_value_t = Ring::Full)]
    ring: Ring,
    /// Run only tests whose name, TARGET::TEST, contains NAME
    name: Option<String>,
}

fn main() -> ExitCode {
    interrupt::watch();
    let Options { ring, name } = Options::parse();
    match run_tests(&Request { name, ring }) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            note(&format!("error: {error:#}"));
            ExitCode::FAILURE
        }
    }
}
