//! The `weft` command.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    weft::cli::main(weft::cli::Cli::parse())
}
