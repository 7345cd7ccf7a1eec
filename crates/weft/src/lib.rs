//! binary: the command line, and data channel devices driven by hand.
#![forbid(unsafe_code)]

pub mod cli;
pub mod dco;
pub mod doctor;
