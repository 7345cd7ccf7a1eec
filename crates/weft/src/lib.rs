//! binary: the daemon, the CLI, the HTTP API: where everything meets.
#![forbid(unsafe_code)]
