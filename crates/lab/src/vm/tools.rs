//! tshark for guests. It has 160 MB of libraries, so it stands on a disk that is read on demand. A guest that does
//! not run it pays nothing.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context;
use weft_bench::sandbox::progress::step;

use super::libraries::libraries;
use super::{cache_directory, locked, make_directory, run, scratch};

/// The program and its data on this machine (packages `tshark` and `libwireshark-data`).
const PROGRAM: &str = "/usr/bin/tshark";
const DATA: &str = "/usr/share/wireshark";
/// Room on the disk beside the files, for the file system itself.
const SPARE_BYTES: u64 = 24 << 20;

/// The guest's `tshark`: mounts the disk on first use.
pub(crate) const WRAPPER: &str = r#"#!/bin/bash
if ! mountpoint -q /vm/tools; then
  for entry in /sys/block/vd*; do
    serial=
    read -r serial <"$entry/serial"
    [ "$serial" = tools ] && modprobe ext4 && mount -o ro "/dev/${entry##*/}" /vm/tools
  done
fi
[ -x /vm/tools/bin/tshark ] || { echo 'tshark: this guest has none: apt-get install tshark on its host' >&2; exit 127; }
export LD_LIBRARY_PATH=/vm/tools/lib WIRESHARK_DATA_DIR=/vm/tools/data
export WIRESHARK_PLUGIN_DIR=/nonexistent WIRESHARK_EXTCAP_DIR=/nonexistent
exec /vm/tools/bin/tshark "$@"
"#;

/// The disk, made if there is none for this very tshark; nothing where this machine has no tshark.
pub(crate) fn disk() -> anyhow::Result<Option<PathBuf>> {
    let program = Path::new(PROGRAM);
    if !program.exists() {
        return Ok(None);
    }
    let libraries = libraries(&[program.to_owned()])?;
    let place = cache_directory()?.join("images");
    let _lock = locked(&place)?;
    let disk = place.join(format!("tools-{:016x}.ext4", fingerprint(program, &libraries)?));
    if disk.exists() {
        return Ok(Some(disk));
    }
    step("making the disk with tshark for guests");
    let tree = scratch()?;
    let inside = |name: &str| tree.path().join(name);
    for folder in ["bin", "lib"] {
        make_directory(&inside(folder))?;
    }
    std::fs::copy(program, inside("bin/tshark"))?;
    for library in &libraries {
        let name = library.file_name().context("a library without a name")?;
        std::fs::copy(library, inside("lib").join(name))?;
    }
    if Path::new(DATA).is_dir() {
        run(Command::new("cp").args(["-rLT", DATA]).arg(inside("data")))?;
    }
    for entry in std::fs::read_dir(&place)?.flatten() {
        if entry.file_name().to_string_lossy().starts_with("tools-") {
            let _ = std::fs::remove_file(entry.path());
        }
    }
    let fresh = disk.with_extension(format!("new-{}", std::process::id()));
    std::fs::File::create(&fresh)?.set_len(size_of(tree.path())? + SPARE_BYTES)?;
    let mut make = Command::new("mke2fs");
    make.args(["-q", "-F", "-t", "ext4", "-O", "^has_journal", "-m", "0", "-d"]);
    run(make.arg(tree.path()).arg(&fresh))?;
    std::fs::rename(&fresh, &disk).with_context(|| format!("cannot make {}", disk.display()))?;
    Ok(Some(disk))
}

fn fingerprint(program: &Path, libraries: &[PathBuf]) -> anyhow::Result<u64> {
    let mut hasher = DefaultHasher::new();
    for file in libraries.iter().map(PathBuf::as_path).chain([program]) {
        let about = std::fs::metadata(file)?;
        (file, about.len(), about.modified()?).hash(&mut hasher);
    }
    Ok(hasher.finish())
}

/// The bytes of a folder's files, each rounded up to a block.
fn size_of(folder: &Path) -> anyhow::Result<u64> {
    const BLOCK_BYTES: u64 = 4096;
    let mut bytes = 0;
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        let about = entry.metadata()?;
        let own = if about.is_dir() { size_of(&entry.path())? } else { about.len() };
        bytes += own.div_ceil(BLOCK_BYTES) * BLOCK_BYTES + BLOCK_BYTES;
    }
    Ok(bytes)
}
