//! Inspects the namespaces of containers, through another process where this one lacks the rights.

use weft_container::{ResolveOptions, Sandbox};
use weft_io::namespace::identity_at;

pub(crate) fn options() -> ResolveOptions {
    ResolveOptions { identify: identity_at, ..ResolveOptions::default() }
}

pub(crate) fn is_alive(sandbox: &Sandbox) -> bool {
    weft_container::is_alive(sandbox, identity_at)
}
