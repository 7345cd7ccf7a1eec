//! docker-compose: the machine's own, or that of Debian's package.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context;
use weft_bench::sandbox::Programs;
use weft_bench::sandbox::docker::Engine;

use crate::packages::unpacked;
use crate::vm::run;

const PROGRAM: &str = "docker-compose";
const PACKAGES: [&str; 1] = [PROGRAM];
/// The place of version 2 in its package, which is a plugin of `docker`.
const PLUGIN: &str = "usr/libexec/docker/cli-plugins/docker-compose";
/// The place of what version 1 imports.
const MODULES: &str = "usr/lib/python3/dist-packages";

/// A Compose project on two hosts.
pub struct Compose {
    program: PathBuf,
    modules: Option<PathBuf>,
    file: PathBuf,
    project: &'static str,
}

impl Compose {
    /// A project with this Compose file, which is written to `place`.
    ///
    /// # Errors
    /// apt cannot fetch the program, or the file cannot be written.
    pub fn new(project: &'static str, text: &str, place: &Path) -> anyhow::Result<Self> {
        let (program, modules) = match Programs::installed().program(PROGRAM) {
            Ok(program) => (program, None),
            Err(_) => {
                let programs = unpacked(&PACKAGES)?;
                let plugin = programs.folder(PLUGIN).filter(|file| file.exists());
                let program = plugin.map_or_else(|| programs.program(PROGRAM), Ok)?;
                (program, programs.folder(MODULES))
            }
        };
        let file = place.join(format!("{project}.yaml"));
        std::fs::write(&file, text).with_context(|| format!("write {}", file.display()))?;
        Ok(Self { program, modules, file, project })
    }

    /// Runs docker-compose with these words for the engine of a host.
    ///
    /// # Errors
    /// With its complaint.
    pub fn run(&self, engine: &Engine, words: &[&str]) -> anyhow::Result<()> {
        let mut command = Command::new(&self.program);
        command.env("DOCKER_HOST", engine.address_of_socket());
        if let Some(modules) = &self.modules {
            command.env("PYTHONPATH", modules);
        }
        command.args(["-p", self.project, "-f"]).arg(&self.file).args(words);
        run(&mut command).map(drop)
    }

    /// The container of a service on the engine of a host, by its id.
    ///
    /// # Errors
    /// There is none.
    pub fn container(&self, engine: &Engine, service: &str) -> anyhow::Result<String> {
        let label = |key: &str, value: &str| format!("label=com.docker.compose.{key}={value}");
        let (project, service) = (label("project", self.project), label("service", service));
        let found = engine.run(&["ps", "-q", "--filter", &project, "--filter", &service])?;
        let first = found.lines().next().with_context(|| format!("no container of {service}"))?;
        Ok(first.to_owned())
    }
}
