//! The shared libraries that programs need in a guest.

use std::collections::BTreeSet;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail};

/// The shared libraries of programs, the loader included.
pub(crate) fn libraries(programs: &[PathBuf]) -> anyhow::Result<Vec<PathBuf>> {
    let programs: Vec<&PathBuf> = programs.iter().filter(|path| is_program(path)).collect();
    if programs.is_empty() {
        return Ok(Vec::new());
    }
    // `ldd` fails if any program is static; missing libraries are in its output.
    let output = Command::new("ldd").env("LC_ALL", "C").args(&programs).output();
    let output = output.context("cannot start ldd")?;
    let text = String::from_utf8_lossy(&output.stdout);
    if let Some(line) = text.lines().find(|line| line.contains("=> not found")) {
        bail!("a library of {} is missing: {}", programs[0].display(), line.trim());
    }
    Ok(library_paths(&text).into_iter().map(PathBuf::from).collect())
}

/// Whether a file is an ELF program or library.
pub(crate) fn is_program(path: &Path) -> bool {
    let mut magic = [0; 4];
    let read = std::fs::File::open(path).and_then(|mut file| file.read_exact(&mut magic));
    read.is_ok() && magic == *b"\x7fELF"
}

fn library_paths(text: &str) -> BTreeSet<String> {
    let path = |line: &str| {
        let line = line.strip_prefix('\t')?;
        let path = line.split_once(" => ").map_or(line, |(_, path)| path);
        let path = path.split(" (").next()?.trim();
        path.starts_with('/').then(|| path.to_owned())
    };
    text.lines().filter_map(path).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn libraries_are_read_from_ldd_for_one_program_and_for_many() {
        let text = "/usr/bin/a:\n\tlinux-vdso.so.1 (0x00007ffc)\n\tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f)\n\
            \t/lib64/ld-linux-x86-64.so.2 (0x00007f)\n/usr/bin/b:\n\tnot a dynamic executable\n";
        let paths: Vec<String> = library_paths(text).into_iter().collect();
        assert_eq!(paths, ["/lib/x86_64-linux-gnu/libc.so.6", "/lib64/ld-linux-x86-64.so.2"]);
    }

    #[test]
    fn the_shell_of_this_machine_has_a_loader() {
        let found = libraries(&[PathBuf::from("/bin/bash")]).unwrap();
        assert!(found.iter().any(|path| path.to_string_lossy().contains("ld-linux")), "{found:?}");
    }
}
