//! What each version of CNI's specification promises, asked by hand and by CNI's own `cnitool`.

use std::io::Write;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use serde_json::{Value, json};
use weft::doctor::find_program;
use weft_bench::sandbox::progress::note;
use weft_bench::sandbox::{Container, Host, Netns, Running};
use weft_lab::inside::{Inside, place};
use weft_lab::net::{Lab, wait_ping};

const LIMIT: Duration = Duration::from_secs(20);
/// The directory of what libcni remembers.
const CACHE: &str = "/var/lib/cni/results";
/// The code of a version that does not support the command.
const INCOMPATIBLE_VERSION: i32 = 1;
/// Versions before lists of plugins.
const REFUSED: [&str; 2] = ["0.1.0", "0.2.0"];

/// What a version promises.
struct Promises {
    version: &'static str,
    /// Each address of a result states its family.
    states_family: bool,
    /// There is CHECK, and DEL comes with the result of ADD.
    has_check: bool,
    /// There are GC and STATUS, and interfaces of a result have their MTU.
    has_gc_and_status: bool,
}

const fn promises(version: &'static str, [family, check, gc]: [bool; 3]) -> Promises {
    let (states_family, has_check, has_gc_and_status) = (family, check, gc);
    Promises { version, states_family, has_check, has_gc_and_status }
}

const ALL: [Promises; 5] = [
    promises("0.3.0", [true, false, false]),
    promises("0.3.1", [true, false, false]),
    promises("0.4.0", [true, true, false]),
    promises("1.0.0", [false, true, false]),
    promises("1.1.0", [false, true, true]),
];

/// A host where runtimes find the plugin, a container to add, and one on the other host.
struct Stage {
    lab: Lab,
    inside: Inside,
    container: Netns,
    /// Keeps the container's namespace, by the path of a process.
    process: Running,
    far: Container,
    /// The plugin's entry in a configuration.
    entry: Value,
    _place: Running,
}

impl Stage {
    fn set() -> anyhow::Result<Self> {
        let lab = Lab::pair(&[])?;
        let host = lab.host(0);
        let place = place(&lab.sandbox, host)?;
        let inside = Inside::of(&place);
        inside.set_up_cni(host, &[])?;
        let list = inside.exec(&["cat", "/etc/cni/net.d/10-weft.conflist"])?;
        let list: Value = serde_json::from_str(&list)?;
        let mut entry = list["plugins"][0].clone();
        entry["network"] = "weft".into();
        let container = lab.sandbox.add_netns("cni")?;
        let process = container.spawn(&["sleep", "infinity"])?;
        let far = lab.host(1).add_container("far")?;
        Ok(Self { lab, inside, container, process, far, entry, _place: place })
    }

    fn host(&self) -> &Host {
        self.lab.host(0)
    }

    fn namespace(&self) -> String {
        format!("/proc/{}/ns/net", self.process.pid())
    }

    /// Runs the plugin by hand. Returns the exit code and the answer.
    fn ask(&self, command: &str, version: &str, more: &Value) -> anyhow::Result<(i32, Value)> {
        let mut config = self.entry.clone();
        let fields = config.as_object_mut().context("an object")?;
        fields.remove("capabilities");
        fields.extend(
            json!({ "cniVersion": version, "name": "hand" })
                .as_object()
                .cloned()
                .unwrap_or_default(),
        );
        fields.extend(more.as_object().cloned().unwrap_or_default());
        let mut child = self
            .inside
            .command(&["/opt/cni/bin/weft-cni"])
            .envs([("CNI_COMMAND", command), ("CNI_CONTAINERID", "a"), ("CNI_IFNAME", "eth0")])
            .envs([("CNI_NETNS", self.namespace().as_str()), ("CNI_PATH", "/opt/cni/bin")])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()?;
        child.stdin.take().context("no input")?.write_all(config.to_string().as_bytes())?;
        let output = child.wait_with_output()?;
        let answer = serde_json::from_slice(&output.stdout).unwrap_or_default();
        Ok((output.status.code().unwrap_or(-1), answer))
    }

    /// As [`Stage::ask`], and wants an answer or, if the version has no such command, its refusal.
    fn asked(&self, command: &str, version: &str, more: &Value, has: bool) -> anyhow::Result<()> {
        let (code, answer) = self.ask(command, version, more)?;
        let refused = code != 0 && answer["code"] == INCOMPATIBLE_VERSION;
        let right = if has { code == 0 } else { refused && answer["cniVersion"] == version };
        ensure!(right, "{command} in CNI {version}: {code} {answer}");
        Ok(())
    }

    fn attached(&self) -> anyhow::Result<usize> {
        Ok(self.host().weft_json(&["ps"])?.as_array().map_or(0, Vec::len))
    }

    fn is_clean(&self, when: &str) -> anyhow::Result<()> {
        ensure!(self.attached()? == 0, "an attachment is left {when}");
        let links = self.container.exec(&["ip", "-o", "link"])?.success()?.stdout;
        ensure!(!links.contains("eth0"), "an interface is left {when}: {links}");
        let links = self.host().netns().exec(&["ip", "-o", "link"])?.success()?.stdout;
        ensure!(!links.contains("weftv"), "a port is left {when}: {links}");
        Ok(())
    }

    /// The result of ADD has the form of its version and is true.
    fn judge(&self, promises: &Promises, result: &Value) -> anyhow::Result<()> {
        ensure!(result["cniVersion"] == promises.version, "{result}");
        let [port, eth0] = [0, 1].map(|index| &result["interfaces"][index]);
        ensure!(port["sandbox"].as_str().is_none_or(str::is_empty), "{result}");
        ensure!(eth0["name"] == "eth0" && eth0["sandbox"] == self.namespace(), "{result}");
        let mtu = self.container.exec(&["cat", "/sys/class/net/eth0/mtu"])?.success()?.stdout;
        let stated = promises.has_gc_and_status.then(|| mtu.trim().parse()).transpose()?;
        ensure!(eth0["mtu"].as_u64() == stated, "an MTU of {mtu}: {result}");
        let ips = result["ips"].as_array().context("no addresses")?;
        ensure!(ips.len() == 2, "{result}");
        for (ip, family) in ips.iter().zip(["4", "6"]) {
            let stated = promises.states_family.then_some(family);
            ensure!(ip["version"].as_str() == stated && ip["interface"] == 1, "{result}");
        }
        let address = ips[0]["address"].as_str().and_then(|it| it.split('/').next());
        wait_ping(&self.far, address.context("an address")?.parse()?, LIMIT)?;
        Ok(())
    }
}

#[test]
fn each_version_keeps_its_promises_to_a_caller() -> anyhow::Result<()> {
    let stage = Stage::set()?;
    for promises in &ALL {
        let version = promises.version;
        let none = json!({});
        let (code, added) = stage.ask("ADD", version, &none)?;
        ensure!(code == 0, "ADD in CNI {version}: {added}");
        stage.judge(promises, &added)?;
        let previous = json!({ "prevResult": added });
        stage.asked("CHECK", version, &previous, promises.has_check)?;
        stage.asked("STATUS", version, &none, promises.has_gc_and_status)?;
        stage.asked("GC", version, &none, promises.has_gc_and_status)?;
        ensure!(stage.attached()? == 1, "a GC without a list has removed an attachment");
        let no_valid = json!({ "cni.dev/valid-attachments": [] });
        stage.asked("GC", version, &no_valid, promises.has_gc_and_status)?;
        let left = usize::from(!promises.has_gc_and_status);
        ensure!(stage.attached()? == left, "after a GC in CNI {version}");
        let before = if promises.has_check { &previous } else { &none };
        for more in [before, before, &none] {
            stage.asked("DEL", version, more, true)?;
        }
        stage.is_clean(&format!("after DEL in CNI {version}"))?;
        let (code, versions) = stage.ask("VERSION", version, &none)?;
        let all: Vec<&str> = ALL.iter().map(|promises| promises.version).collect();
        ensure!(code == 0 && versions["supportedVersions"] == json!(all), "{versions}");
    }
    for version in REFUSED {
        let (code, answer) = stage.ask("ADD", version, &json!({}))?;
        ensure!(code != 0 && answer["code"] == INCOMPATIBLE_VERSION, "{version}: {answer}");
    }
    Ok(())
}

/// `cnitool` in the place of a host.
struct CniTool<'a> {
    stage: &'a Stage,
    program: String,
}

impl CniTool<'_> {
    /// Runs a command on the network of a version.
    fn run(&self, command: &str, version: &str) -> anyhow::Result<Result<String, String>> {
        let directory = format!("/etc/cni/{version}");
        let mut tool = self.stage.inside.command(&[&self.program, command, "tool"]);
        tool.arg(self.stage.namespace());
        tool.env("NETCONFPATH", directory).env("CNI_PATH", "/opt/cni/bin");
        let output = tool.stdin(Stdio::null()).output()?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
        Ok(match output.status.success() {
            true => Ok(text(&output.stdout)),
            false => Err(text(&output.stderr)),
        })
    }

    fn good(&self, command: &str, version: &str) -> anyhow::Result<String> {
        let done = self.run(command, version)?;
        done.map_err(|why| anyhow::anyhow!("cnitool {command} in CNI {version}: {why}"))
    }

    fn refused(&self, command: &str, version: &str, why: &str) -> anyhow::Result<()> {
        match self.run(command, version)? {
            Err(text) if text.contains(why) => Ok(()),
            other => bail!("cnitool {command} in CNI {version}: {other:?}, not {why}"),
        }
    }

    /// Writes a network for each version.
    fn configure(&self) -> anyhow::Result<()> {
        const WRITE: &str = "mkdir -p \"$1\"; printf %s \"$2\" >\"$1/tool.conflist\"";
        for version in ALL.iter().map(|promises| promises.version).chain(REFUSED) {
            let plugins = [&self.stage.entry];
            let list = json!({ "cniVersion": version, "name": "tool", "plugins": plugins });
            let directory = format!("/etc/cni/{version}");
            let list = list.to_string();
            self.stage.inside.exec(&["sh", "-ec", WRITE, "sh", &directory, &list])?;
        }
        Ok(())
    }
}

#[test]
fn each_version_keeps_its_promises_to_cnitool() -> anyhow::Result<()> {
    let Some(program) = find_program("cnitool") else {
        note(
            "not tested here: cnitool is not in PATH; go install github.com/containernetworking/cni/cnitool@v1.3.0",
        );
        return Ok(());
    };
    let stage = Stage::set()?;
    let tool = CniTool { stage: &stage, program: program.to_string_lossy().into_owned() };
    tool.configure()?;
    for promises in &ALL {
        let version = promises.version;
        stage.container.ip("link add eth0 type bridge")?;
        tool.refused("add", version, "already exists")?;
        stage.container.ip("link del eth0")?;
        stage.is_clean(&format!("after a failed ADD in CNI {version}"))?;
        let added: Value = serde_json::from_str(&tool.good("add", version)?)?;
        stage.judge(promises, &added)?;
        let again: Value = serde_json::from_str(&tool.good("add", version)?)?;
        ensure!(again["ips"] == added["ips"], "{again} is not {added}");
        match promises.has_check {
            true => drop(tool.good("check", version)?),
            false => tool.refused("check", version, "does not support the CHECK command")?,
        }
        tool.good("status", version)?;
        tool.good("del", version)?;
        tool.good("del", version)?;
        stage.is_clean(&format!("after DEL in CNI {version}"))?;
        // It removes all that it remembers, in older versions by DEL alone.
        tool.good("add", version)?;
        tool.good("gc", version)?;
        stage.is_clean(&format!("after GC in CNI {version}"))?;
    }
    for version in REFUSED {
        tool.refused("add", version, "incompatible CNI version")?;
    }

    // Without a daemon ADD is to be tried again, DEL succeeds, and STATUS tells where the version has it.
    for promises in &ALL {
        tool.good("add", promises.version)?;
        stage.host().kill_daemon();
        tool.refused("add", promises.version, "start it with weft launch")?;
        match promises.has_gc_and_status {
            true => tool.refused("status", promises.version, "Weft is not ready")?,
            false => drop(tool.good("status", promises.version)?),
        }
        tool.good("del", promises.version)?;
        let password = stage.lab.password_file().display().to_string();
        stage.host().start_daemon(&["--password-file", &password])?;
        weft_bench::sandbox::try_wait_until("the DEL to be made up for", LIMIT, || {
            Ok(stage.is_clean("").is_ok())
        })?;
        stage.lab.wait_active()?;
    }
    let left = stage.inside.exec(&["ls", CACHE])?;
    ensure!(left.is_empty(), "{left}");
    Ok(())
}
