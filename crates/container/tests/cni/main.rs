//! The CNI plugin as a runtime sees it: environment, standard input, standard output, exit code.
#![allow(clippy::unwrap_used)]

mod input;
mod lab;
mod specification;
