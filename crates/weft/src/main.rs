//! The `weft` command.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    if weft::cni::is_called() {
        return weft::cni::main();
    }
    weft::cli::main(weft::cli::Cli::parse())
}
