//! tokio: outside requests -> attach / detach.
#![forbid(unsafe_code)]
