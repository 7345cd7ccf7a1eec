//! OpenVPN 2.7, which drives the kernel's `ovpn` device: from a newer Debian than this machine's, with the libraries of
//! that Debian in a folder of its own.

use std::path::{Path, PathBuf};

use anyhow::Context;
use weft_bench::sandbox::progress::step;

use super::apt::{Mirror, Suite};
use super::{cache_directory, locked, make_directory};

/// The folder in a guest.
pub(crate) const INSIDE: &str = "/newer";
/// The suite that has OpenVPN 2.7, and the one of its libraries.
const SUITE: &str = "trixie-backports";
const LIBRARIES_SUITE: &str = "trixie";
/// What the program needs; the list of `ldd` names more than its package does.
const LIBRARIES: [&str; 18] = [
    "libaudit1",
    "libc6",
    "libcap-ng0",
    "libcap2",
    "libgcrypt20",
    "libgpg-error0",
    "liblz4-1",
    "liblzma5",
    "liblzo2-2",
    "libnl-3-200",
    "libnl-genl-3-200",
    "libpam0g",
    "libpkcs11-helper1t64",
    "libssl3t64",
    "libsystemd0",
    "libxxhash0",
    "libzstd1",
    "zlib1g",
];
/// Parts of the packages that nothing here reads.
const LEFT_OUT: [&str; 3] = ["etc", "usr/share", "usr/lib/systemd"];

/// The folder with the program, from the cache or from Debian.
pub(crate) fn openvpn() -> anyhow::Result<PathBuf> {
    let place = cache_directory()?.join("newer");
    let _lock = locked(&place)?;
    let folder = place.join("openvpn");
    if folder.exists() {
        return Ok(folder);
    }
    step(&format!("fetching OpenVPN 2.7 from {SUITE}"));
    let fresh = place.join("openvpn.new");
    let _ = std::fs::remove_dir_all(&fresh);
    make_directory(&fresh)?;
    let (mirror, lists) = (Mirror::of_this_machine()?, place.join("apt"));
    unpack(&Suite::fetch(&mirror, SUITE, &lists)?, &["openvpn"], &fresh)?;
    unpack(&Suite::fetch(&mirror, LIBRARIES_SUITE, &lists)?, &LIBRARIES, &fresh)?;
    for part in LEFT_OUT {
        let _ = std::fs::remove_dir_all(fresh.join(part));
    }
    std::fs::rename(&fresh, &folder).context("cannot keep OpenVPN 2.7 in the cache")?;
    Ok(folder)
}

fn unpack(suite: &Suite, names: &[&str], into: &Path) -> anyhow::Result<()> {
    let mut packages = Vec::new();
    for name in names {
        let package = suite.package(name)?;
        packages.push(package.with_context(|| format!("{} has no {name}", suite.name()))?);
    }
    suite.unpack(&packages, into)
}
