//! Docker engines on hosts of the lab: those of Debian's packages, and the newest.

use std::time::Duration;

use anyhow::{Context, anyhow, ensure};
use weft_bench::comparison::install::LeftOut;
use weft_bench::sandbox::docker::PACKAGES;
pub use weft_bench::sandbox::docker::{Engine, IMAGE};
use weft_bench::sandbox::{Host, Programs, Sandbox, SandboxOptions, try_wait_until};

use crate::go;
use crate::net::Lab;
use crate::packages::unpacked;

/// How long an engine may take to start.
const START_LIMIT: Duration = Duration::from_secs(60);
/// The limit of each wait.
const LIMIT: Duration = Duration::from_secs(20);

/// Which engines a lab has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Release {
    /// Those of Debian's packages.
    Debian,
    /// Docker 29: [`go::docker`].
    Newest,
}

impl Release {
    /// The programs of an engine.
    ///
    /// # Errors
    /// They cannot be fetched or built.
    pub fn programs(self) -> anyhow::Result<Programs> {
        match self {
            Self::Debian => unpacked(&PACKAGES),
            Self::Newest => go::docker().map_err(|LeftOut(why)| anyhow!(why)),
        }
    }
}

/// Runs a scenario with Docker 29, or says why it is left out.
///
/// # Errors
/// Those of the scenario.
pub fn with_newest(scenario: impl FnOnce(Release) -> anyhow::Result<()>) -> anyhow::Result<()> {
    go::with("Docker 29", go::docker(), |_| scenario(Release::Newest))
}

/// Makes two tests of each scenario: with Debian's engines, and with Docker 29.
#[macro_export]
macro_rules! with_each_docker {
    ($($scenario:ident),+ $(,)?) => {
        mod debian {
            $(#[test]
            fn $scenario() -> anyhow::Result<()> {
                super::$scenario($crate::docker::Release::Debian)
            })+
        }
        mod docker_29 {
            $(#[test]
            fn $scenario() -> anyhow::Result<()> {
                $crate::docker::with_newest(super::$scenario)
            })+
        }
    };
}

/// Starts an engine on a host and waits until it answers.
///
/// # Errors
/// As [`Release::programs`], or the engine does not start.
pub fn start(release: Release, sandbox: &Sandbox, host: &Host) -> anyhow::Result<Engine> {
    Ok(Engine::start(sandbox, host, release.programs()?, START_LIMIT)?)
}

/// As [`start`], for `weft attach`: see [`Engine::start_open`].
///
/// # Errors
/// As [`start`].
pub fn start_open(release: Release, sandbox: &Sandbox, host: &Host) -> anyhow::Result<Engine> {
    Ok(Engine::start_open(sandbox, host, release.programs()?, START_LIMIT)?)
}

/// Launches Weft on a host that has an engine, or will have one.
///
/// # Errors
/// As [`Sandbox::launch`].
pub fn launch(sandbox: &Sandbox, host: &Host) -> anyhow::Result<()> {
    let words = Engine::launch_arguments(sandbox, host)?;
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    Ok(sandbox.launch(host, &words)?)
}

/// Two hosts, each with a daemon and an engine.
pub struct Docked {
    /// The engines. They end before the hosts.
    pub engines: [Engine; 2],
    /// The hosts.
    pub lab: Lab,
}

impl Docked {
    /// Launches both daemons, and then starts both engines.
    ///
    /// # Errors
    /// As [`start`], or a daemon does not start.
    pub fn start(release: Release) -> anyhow::Result<Self> {
        let lab = launched()?;
        let engine = |index| start(release, &lab.sandbox, lab.host(index));
        let engines = [engine(0)?, engine(1)?];
        Ok(Self { engines, lab })
    }

    /// Both engines run these words of `docker`.
    ///
    /// # Errors
    /// With the complaint of `docker`.
    pub fn both(&self, words: &[&str]) -> anyhow::Result<()> {
        Ok(self.engines.iter().try_for_each(|engine| engine.run(words).map(drop))?)
    }

    /// Weft offers its network to Docker by itself.
    ///
    /// # Errors
    /// The network does not come, with the warnings of a daemon.
    pub fn wait_ready_network(&self) -> anyhow::Result<()> {
        for (engine, host) in self.engines.iter().zip(self.lab.sandbox.hosts()) {
            try_wait_until("the network weft in Docker", LIMIT, || {
                Ok(engine.inspect("weft").is_ok_and(|network| network["Driver"] == "weft"))
            })
            .with_context(|| {
                format!("{:?}", host.weft_json(&["status"]).map(|it| it["warnings"].clone()))
            })?;
        }
        Ok(())
    }

    /// Waits until nothing of any container is left on the hosts: no interface, attachment or address.
    ///
    /// # Errors
    /// What is left.
    pub fn wait_clean(&self, limit: Duration) -> anyhow::Result<()> {
        let mut last = None;
        let waited = try_wait_until("nothing to be left of any container", limit, || {
            last = self.is_clean().err();
            Ok(last.is_none())
        });
        match (waited, last) {
            (Err(_), Some(error)) => Err(error),
            (waited, _) => Ok(waited.map(drop)?),
        }
    }

    fn is_clean(&self) -> anyhow::Result<()> {
        for host in self.lab.sandbox.hosts() {
            let links = host.netns().exec(&["ip", "-o", "link"])?.success()?.stdout;
            let left = |line: &&str| ["weftv", "weftc"].iter().any(|name| line.contains(name));
            let left: Vec<&str> = links.lines().filter(left).collect();
            ensure!(left.is_empty(), "interfaces are left on {}: {left:?}", host.nickname());
            let attached = host.weft_json(&["ps"])?;
            ensure!(attached.as_array().is_some_and(Vec::is_empty), "left: {attached}");
            let used = used_addresses(host)?;
            ensure!(used == 0, "{used} addresses are left on {}", host.nickname());
        }
        Ok(())
    }
}

/// Two hosts with daemons that will have engines.
///
/// # Errors
/// A daemon does not start.
pub fn launched() -> anyhow::Result<Lab> {
    let sandbox = Sandbox::new(&SandboxOptions::default())?;
    for host in sandbox.hosts() {
        launch(&sandbox, host)?;
    }
    let lab = Lab { sandbox };
    lab.wait_active()?;
    Ok(lab)
}

/// Waits until the daemon of a host follows its engine's events, or does not.
///
/// # Errors
/// It does not come to that.
pub fn wait_events(host: &Host, are_followed: bool) -> anyhow::Result<()> {
    let wanted = if are_followed { "followed" } else { "not followed" };
    try_wait_until(&format!("Docker's events to be {wanted}"), LIMIT, || {
        let status = host.weft_json(&["status"]);
        Ok(status.is_ok_and(|status| status["docker"]["events"] == wanted))
    })?;
    Ok(())
}

/// Waits until a container has an answer to a ping.
///
/// # Errors
/// There is none in time.
pub fn ping(engine: &Engine, from: &str, to: &str) -> anyhow::Result<()> {
    try_wait_until(&format!("{from} to reach {to}"), LIMIT, || {
        let ping = ["exec", from, "ping", "-c", "1", "-W", "1", to];
        Ok(engine.docker(&ping).is_ok_and(|output| output.status.success()))
    })?;
    Ok(())
}

/// Addresses that containers of a host hold.
fn used_addresses(host: &Host) -> anyhow::Result<u64> {
    let ipam = host.weft_json(&["status", "ipam"])?;
    let hosts = ipam["hosts"].as_array().with_context(|| format!("no hosts: {ipam}"))?;
    let used = hosts.iter().filter_map(|host| host["used"].as_u64());
    Ok(used.sum())
}
