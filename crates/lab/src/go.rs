//! Programs that are newer than those of Debian's packages, or that no package has, built once from Go modules and kept
//! in the cache.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::Path;
use std::process::Command;

use anyhow::{Context, anyhow};
use serde_json::Value;
use weft_bench::comparison::install::{LeftOut, go};
use weft_bench::sandbox::Programs;
use weft_bench::sandbox::progress::{note, step};

use crate::packages::unpacked;
use crate::vm::{cache_directory, locked, make_directory, run};

/// Leaves out what asks for libraries that the machine may lack.
const TAGS: &str =
    "no_btrfs no_zfs no_devmapper no_aufs exclude_graphdriver_btrfs exclude_graphdriver_zfs";
/// The image of all containers has this alone.
const BUSYBOX: &str = "busybox-static";

/// The newest Docker engine, with its client and all that it runs.
const DOCKER: Set = Set {
    name: "docker",
    modules: &[
        Module {
            path: "github.com/moby/moby/v2",
            version: "v2.0.0-beta.24",
            programs: &["/cmd/dockerd", "/cmd/docker-proxy"],
        },
        Module {
            path: "github.com/docker/cli",
            version: "v29.0.0+incompatible",
            programs: &["/cmd/docker"],
        },
        CONTAINERD,
        RUNC,
    ],
};
/// nerdctl, with a containerd of today.
const NERDCTL: Set = Set {
    name: "nerdctl",
    modules: &[
        Module {
            path: "github.com/containerd/nerdctl/v2",
            version: "v2.1.2",
            programs: &["/cmd/nerdctl"],
        },
        CONTAINERD,
        RUNC,
    ],
};
const CONTAINERD: Module = Module {
    path: "github.com/containerd/containerd/v2",
    version: "v2.4.2",
    programs: &["/cmd/containerd", "/cmd/containerd-shim-runc-v2", "/cmd/ctr"],
};
const RUNC: Module =
    Module { path: "github.com/opencontainers/runc", version: "v1.5.3", programs: &[""] };

/// The sources of the identity provider.
const PROVIDER: [(&str, &str); 3] = [
    ("main.go", include_str!("go/provider/main.go")),
    ("go.mod", include_str!("go/provider/go.mod")),
    ("go.sum", include_str!("go/provider/go.sum")),
];

/// Programs that are needed together.
struct Set {
    name: &'static str,
    modules: &'static [Module],
}

/// A module.
struct Module {
    path: &'static str,
    version: &'static str,
    /// Packages of it that are programs, after its path.
    programs: &'static [&'static str],
}

/// Docker 29 with its client, containerd and runc, and busybox.
///
/// # Errors
/// Why there is none on this machine.
pub fn docker() -> Result<Programs, LeftOut> {
    DOCKER.built()
}

/// nerdctl 2 with containerd and runc, and busybox.
///
/// # Errors
/// Why there is none on this machine.
pub fn nerdctl() -> Result<Programs, LeftOut> {
    NERDCTL.built()
}

/// An identity provider, `provider`.
///
/// # Errors
/// Why there is none on this machine.
pub fn provider() -> Result<Programs, LeftOut> {
    provider_in_cache().map_err(|error| LeftOut(format!("{error:#}")))
}

/// Runs a test with such programs, or says why it is left out.
///
/// # Errors
/// Those of the test.
pub fn with(
    what: &str,
    programs: Result<Programs, LeftOut>,
    test: impl FnOnce(Programs) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    match programs {
        Ok(programs) => test(programs),
        Err(LeftOut(why)) => {
            note(&format!("not tested here: {what}: {why}"));
            Ok(())
        }
    }
}

impl Set {
    fn built(&self) -> Result<Programs, LeftOut> {
        self.in_cache().map_err(|error| LeftOut(format!("{error:#}")))
    }

    fn in_cache(&self) -> anyhow::Result<Programs> {
        let place = cache_directory()?.join("go");
        let _lock = locked(&place)?;
        let root = place.join(self.folder());
        if let Some(programs) = Programs::in_folder(&root) {
            return Ok(programs);
        }
        let go = go().map_err(|LeftOut(why)| anyhow!(why))?;
        step(&format!("building {} from Go modules, once: this takes minutes", self.name));
        let bin = root.join("usr/bin");
        make_directory(&bin)?;
        for module in self.modules {
            let scratch = tempfile::tempdir_in(&place).context("no folder for a build")?;
            let built = module.build(&go, scratch.path(), &bin);
            built.with_context(|| format!("cannot build {}@{}", module.path, module.version))?;
        }
        let busybox = unpacked(&[BUSYBOX])?.program("busybox")?;
        std::fs::copy(busybox, bin.join("busybox")).context("cannot copy busybox")?;
        Ok(Programs::mark_unpacked(&root)?)
    }

    /// Other versions have another folder.
    fn folder(&self) -> String {
        let versions = self.modules.iter().map(|module| module.version);
        [self.name].into_iter().chain(versions).collect::<Vec<_>>().join("-")
    }
}

impl Module {
    fn build(&self, go: &Path, scratch: &Path, into: &Path) -> anyhow::Result<()> {
        let Self { path, version, programs } = self;
        let module = format!("{path}@{version}");
        let command = || {
            let mut command = Command::new(go);
            command.current_dir(scratch).env("GOFLAGS", "-mod=mod");
            command
        };
        let mut build = command();
        build.args(["build", "-trimpath", "-ldflags=-s -w", "-tags", TAGS, "-o"]).arg(into);
        if version.ends_with("+incompatible") {
            // Its dependencies are in files of other names.
            let described = run(command().args(["mod", "download", "-json", &module]))?;
            let described: Value = serde_json::from_slice(&described.stdout)?;
            let sources = described["Dir"].as_str().context("go names no folder")?;
            run(Command::new("cp").args(["-rT", "--no-preserve=mode", sources]).arg(scratch))?;
            for (from, to) in [("vendor.mod", "go.mod"), ("vendor.sum", "go.sum")] {
                std::fs::rename(scratch.join(from), scratch.join(to)).context(from)?;
            }
            build.args(programs.iter().map(|program| format!(".{program}")));
        } else {
            run(command().args(["mod", "init", "lab"]))?;
            run(command().args(["get", &module]))?;
            build.args(programs.iter().map(|program| format!("{path}{program}")));
        }
        run(&mut build).map(drop)
    }
}

fn provider_in_cache() -> anyhow::Result<Programs> {
    let place = cache_directory()?.join("go");
    let _lock = locked(&place)?;
    let root = place.join(provider_folder());
    if let Some(programs) = Programs::in_folder(&root) {
        return Ok(programs);
    }
    let go = go().map_err(|LeftOut(why)| anyhow!(why))?;
    step("building an identity provider from Go modules, once: this takes a minute");
    let bin = root.join("usr/bin");
    make_directory(&bin)?;
    let scratch = tempfile::tempdir_in(&place).context("no folder for a build")?;
    for (name, text) in PROVIDER {
        std::fs::write(scratch.path().join(name), text).context("cannot write sources")?;
    }
    let mut build = Command::new(go);
    build.current_dir(scratch.path()).args(["build", "-trimpath", "-ldflags=-s -w", "-o"]);
    run(build.arg(bin.join("provider")).arg(".")).context("cannot build an identity provider")?;
    Ok(Programs::mark_unpacked(&root)?)
}

/// Other sources have another folder.
fn provider_folder() -> String {
    let mut hasher = DefaultHasher::new();
    PROVIDER.hash(&mut hasher);
    format!("provider-{:016x}", hasher.finish())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_version_has_a_folder() {
        assert_eq!(NERDCTL.folder(), "nerdctl-v2.1.2-v2.4.2-v1.5.3");
    }
}
