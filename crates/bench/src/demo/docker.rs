//! Real Docker engines on the hosts: a container on one reaches a container on the other by its name.

use std::net::IpAddr;
use std::time::Duration;

use crate::sandbox::docker::{Engine, IMAGE, PACKAGES};
use crate::sandbox::{Host, Programs, Sandbox, SandboxError, gate, progress, try_wait_until};

/// How long an engine may take to start.
const ENGINE_LIMIT: Duration = Duration::from_secs(45);
/// How long a name may take to be known on the other host.
const NAME_LIMIT: Duration = Duration::from_secs(20);
/// The most lines of a command's output that are shown: of ping, those with the address and the round trip.
const LINES_SHOWN_MAX: usize = 2;
/// Docker's network, on every host.
const CREATE: [&str; 11] = [
    "network",
    "create",
    "-d",
    "weft",
    "--ipam-driver",
    "weft",
    "--ipam-opt",
    "network=shop",
    "-o",
    "network=shop",
    "shop",
];
/// What `web` does.
const SERVE: &str = "echo this page is from web on host1 >/tmp/index.html; exec httpd -f -h /tmp";
/// What `client` asks.
const ASK: [&str; 4] = ["wget", "-q", "-O-", "http://web/"];

/// The programs of an engine: the machine's, or those that the namespace lab has unpacked. Else which packages are
/// missing.
pub(super) fn programs() -> Result<Programs, String> {
    let missing = missing(&Programs::installed());
    if missing.is_empty() {
        return Ok(Programs::installed());
    }
    let unpacked =
        Programs::unpacked(&PACKAGES).filter(|programs| self::missing(programs).is_empty());
    unpacked.ok_or_else(|| format!("programs are missing: apt-get install {}", missing.join(" ")))
}

/// The packages of programs that are missing.
fn missing(programs: &Programs) -> Vec<&'static str> {
    let lacks = |name: &str| programs.program(name).is_err();
    let mut missing = Vec::new();
    if lacks("dockerd") {
        missing.push("docker.io");
    } else if lacks("docker") {
        missing.push("docker-cli");
    }
    if lacks("busybox") {
        missing.push("busybox-static");
    }
    missing
}

/// Starts the daemons, with Docker's plugin where there can be an engine.
///
/// # Errors
/// As [`Sandbox::launch_all`].
pub fn launch_all(sandbox: &Sandbox, with_docker: bool) -> Result<(), SandboxError> {
    if !with_docker {
        return sandbox.launch_all(&[]);
    }
    for host in sandbox.hosts() {
        let words = Engine::launch_arguments(sandbox, host)?;
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        sandbox.launch(host, &words)?;
    }
    Ok(())
}

/// Shows the containers and removes them. Without an engine that can run any, a line says so, and it returns false.
///
/// # Errors
/// Weft did not do its part.
pub fn show(sandbox: &Sandbox, programs: Result<Programs, String>) -> Result<bool, SandboxError> {
    progress::step("real Docker containers, one on each host, that know each other by name");
    let engines = match programs.and_then(|programs| engines(sandbox, &programs)) {
        Ok(engines) => engines,
        Err(why) => {
            // Whoever interrupts it ends the engines too, and is to see no reason.
            let _gate = gate();
            progress::note(&format!("left out: {why}"));
            return Ok(false);
        }
    };
    if let ([one, two], [first, second]) = (sandbox.hosts(), engines.as_slice()) {
        let web = Shown { host: one, engine: first };
        let client = Shown { host: two, engine: second };
        scene(&web, &client)?;
    }
    drop(engines);
    progress::note("removed the containers, their network and the engines");
    Ok(true)
}

fn scene(web: &Shown<'_>, client: &Shown<'_>) -> Result<(), SandboxError> {
    web.docker(&CREATE)?;
    client.docker(&CREATE)?;
    let resolver = client.expose()?.to_string();
    let run = ["run", "-d", "--network", "shop", "--name"];
    web.docker(&[&run[..], &["web", IMAGE, "sh", "-c", SERVE]].concat())?;
    let named = ["client", "--dns", &resolver, IMAGE, "sleep", "600"];
    client.docker(&[&run[..], &named].concat())?;
    // Names reach the other host about a second after a container's start.
    let exec = ["exec", "client"];
    try_wait_until("the name web", NAME_LIMIT, || {
        let asked = client.engine.docker(&[&exec[..], &["timeout", "3"], &ASK].concat())?;
        Ok(asked.status.success())
    })?;
    for words in [&["ping", "-c", "1", "web"][..], &ASK] {
        let output = client.docker(&[&exec, words].concat())?;
        let lines: Vec<&str> = output.lines().take(LINES_SHOWN_MAX).collect();
        progress::note(&lines.join("\n"));
    }
    web.engine.run(&["rm", "-f", "web"])?;
    client.engine.run(&["rm", "-f", "client"])?;
    client.host.weft(&["hide", "--network", "shop"])?.success()?;
    for shown in [web, client] {
        shown.engine.run(&["network", "rm", "shop"])?;
    }
    Ok(())
}

/// An engine on each host that can run containers of the image. Else why there is none.
fn engines(sandbox: &Sandbox, programs: &Programs) -> Result<Vec<Engine>, String> {
    let start = |host: &Host| {
        let engine = Engine::start(sandbox, host, programs.clone(), ENGINE_LIMIT)?;
        engine.run(&["run", "--rm", "--network", "none", IMAGE, "true"])?;
        Ok::<_, SandboxError>(engine)
    };
    let started = std::thread::scope(|scope| {
        let starting: Vec<_> =
            sandbox.hosts().iter().map(|host| scope.spawn(|| start(host))).collect();
        starting.into_iter().map(|thread| thread.join()).collect::<Vec<_>>()
    });
    let started = started.into_iter().map(|one| match one {
        Ok(Ok(engine)) => Ok(engine),
        Ok(Err(error)) => Err(error.to_string()),
        Err(_) => Err("the start of an engine panicked".to_owned()),
    });
    started.collect()
}

/// A host whose commands are shown.
struct Shown<'a> {
    host: &'a Host,
    engine: &'a Engine,
}

impl Shown<'_> {
    /// Shows and runs a command of `docker`; returns its output.
    fn docker(&self, words: &[&str]) -> Result<String, SandboxError> {
        self.say("docker", words);
        self.engine.run(words)
    }

    /// Gives the host an address on the network, at which it answers DNS.
    fn expose(&self) -> Result<IpAddr, SandboxError> {
        let words = ["expose", "--network", "shop"];
        self.say("weft", &words);
        let exposed = self.host.weft_json(&words)?;
        let addresses = exposed["addresses"].as_array().into_iter().flatten();
        let mut addresses =
            addresses.filter_map(|net| net.as_str()?.split('/').next()?.parse().ok());
        let address = addresses.find(IpAddr::is_ipv4);
        address.ok_or_else(|| SandboxError::UnexpectedOutput {
            command: format!("weft {} --json", words.join(" ")),
            why: format!("no IPv4 address in {exposed}"),
        })
    }

    fn say(&self, program: &str, words: &[&str]) {
        let quoted = words.iter().map(|word| match word.contains(' ') {
            true => format!("'{word}'"),
            false => (*word).to_owned(),
        });
        let words: Vec<String> = quoted.collect();
        progress::note(&format!("{}# {program} {}", self.host.nickname(), words.join(" ")));
    }
}
