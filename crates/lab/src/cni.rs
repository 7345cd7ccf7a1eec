//! A runtime of CNI for tests: it runs the plugins of a configuration one after the other, as libcni does, or Weft's
//! plugin alone.

use std::io::Write;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, ensure};
use serde_json::{Map, Value, json};
use weft_bench::sandbox::{Host, Netns, Sandbox, try_wait_until};

use crate::packages::unpacked;

/// The reference plugins.
const PACKAGES: [&str; 1] = ["containernetworking-plugins"];
/// Their place in the package.
const PLACE: &str = "usr/lib/cni";
/// How long the last traces of containers may take to go.
const CLEAN_LIMIT: Duration = Duration::from_secs(20);

/// A directory with the reference plugins.
///
/// # Errors
/// apt cannot fetch them.
pub fn reference_plugins() -> anyhow::Result<PathBuf> {
    unpacked(&PACKAGES)?.folder(PLACE).context("the packages are not unpacked")
}

/// The runtimes' attachments, devices and rules that are left on a host, and addresses that no attachment has.
///
/// # Errors
/// Returns an error if a program fails.
pub fn leftovers(host: &Host) -> anyhow::Result<String> {
    let attached = host.weft_json(&["ps"])?.as_array().cloned().unwrap_or_default();
    let by_cni = attached.iter().filter(|it| it["made_by"] == "cni").map(ToString::to_string);
    let mut left: Vec<String> = by_cni.collect();
    for (words, mark) in
        [(&["ip", "-o", "link"][..], "bwp"), (&["nft", "list", "ruleset"], "CNI-DN-")]
    {
        let shown = host.netns().exec(words)?.success()?.stdout;
        left.extend(shown.lines().filter(|line| line.contains(mark)).map(str::to_owned));
    }
    // An address whose DEL never came is kept for a while.
    let ipam = host.weft_json(&["status", "ipam"])?;
    let hosts = ipam["hosts"].as_array().map(Vec::as_slice).unwrap_or_default();
    let own = hosts.iter().filter(|it| it["nickname"] == host.nickname());
    let used: u64 = own.filter_map(|it| it["used"].as_u64()).sum();
    if used > u64::try_from(attached.len())? {
        left.push(format!("{used} addresses are in use by {} attachments", attached.len()));
    }
    Ok(left.join("\n"))
}

/// Waits until nothing of any container is left on a host: no [`leftovers`].
///
/// # Errors
/// What is left.
pub fn wait_clean(host: &Host) -> anyhow::Result<()> {
    let mut left = String::new();
    let clean = try_wait_until("containers to leave nothing behind", CLEAN_LIMIT, || {
        left = leftovers(host).unwrap_or_else(|error| error.to_string());
        Ok(left.is_empty())
    });
    clean.map(drop).with_context(|| left)
}

/// A configuration that `weft setup-cni` has written for a host.
pub struct Chain<'a> {
    host: &'a Host,
    bin_dir: PathBuf,
    /// The configuration, which a test may change.
    pub list: Value,
}

/// A container of a runtime.
pub struct Contained<'a> {
    id: &'a str,
    namespace: &'a Netns,
    /// What the runtime hands to plugins, by capability.
    wishes: Value,
    /// The result of ADD.
    pub result: Value,
}

impl<'a> Chain<'a> {
    /// Runs `weft setup-cni` on a host, with further words.
    ///
    /// # Errors
    /// With the complaint of `weft`.
    pub fn set_up(sandbox: &Sandbox, host: &'a Host, words: &[&str]) -> anyhow::Result<Self> {
        let directory = sandbox.directory().join(format!("cni-{}", host.index()));
        let (bin_dir, config_dir) = (directory.join("bin"), directory.join("net.d"));
        std::fs::create_dir_all(&bin_dir)?;
        for plugin in ["portmap", "bandwidth"] {
            let found = reference_plugins()?.join(plugin);
            std::os::unix::fs::symlink(found, bin_dir.join(plugin))?;
        }
        let [bin, config] = [&bin_dir, &config_dir].map(|it| it.to_string_lossy().into_owned());
        let places = ["setup-cni", "--bin-dir", &bin, "--config-dir", &config];
        host.weft(&[&places[..], words].concat())?.success()?;
        let text = std::fs::read(config_dir.join("10-weft.conflist"))?;
        Ok(Self { host, bin_dir, list: serde_json::from_slice(&text)? })
    }

    /// Adds a container to the network.
    ///
    /// # Errors
    /// With the complaint of a plugin.
    pub fn add<'b>(
        &self,
        id: &'b str,
        namespace: &'b Netns,
        wishes: Value,
    ) -> anyhow::Result<Contained<'b>> {
        let mut container = Contained { id, namespace, wishes, result: Value::Null };
        for plugin in self.plugins() {
            container.result = self.run("ADD", plugin, &container)?;
        }
        Ok(container)
    }

    /// Has one plugin check a container.
    ///
    /// # Errors
    /// With its complaint.
    pub fn check(&self, name: &str, container: &Contained<'_>) -> anyhow::Result<()> {
        let mut plugins = self.plugins();
        let plugin = plugins.find(|plugin| plugin["type"] == name).context("no such plugin")?;
        self.run("CHECK", plugin, container).map(drop)
    }

    /// Removes a container from the network.
    ///
    /// # Errors
    /// With the complaint of a plugin.
    pub fn del(&self, container: &Contained<'_>) -> anyhow::Result<()> {
        let mut plugins: Vec<&Value> = self.plugins().collect();
        plugins.reverse();
        plugins.into_iter().try_for_each(|plugin| self.run("DEL", plugin, container).map(drop))
    }

    fn plugins(&self) -> impl Iterator<Item = &Value> {
        self.list["plugins"].as_array().into_iter().flatten()
    }

    fn run(
        &self,
        command: &str,
        plugin: &Value,
        container: &Contained<'_>,
    ) -> anyhow::Result<Value> {
        let mut config = plugin.as_object().cloned().context("a plugin is an object")?;
        let able = config.remove("capabilities").unwrap_or_default();
        let wishes = container.wishes.as_object().into_iter().flatten();
        let fit = wishes.filter(|(capability, _)| able[capability.as_str()] == true);
        let fit: Map<String, Value> =
            fit.map(|(key, value)| (key.clone(), value.clone())).collect();
        if !fit.is_empty() {
            config.insert("runtimeConfig".to_owned(), fit.into());
        }
        for field in ["cniVersion", "name"] {
            config.insert(field.to_owned(), self.list[field].clone());
        }
        if !container.result.is_null() {
            config.insert("prevResult".to_owned(), container.result.clone());
        }
        let name = plugin["type"].as_str().context("a plugin has a type")?;
        let program = self.bin_dir.join(name).to_string_lossy().into_owned();
        let mut program = self.host.netns().command(&program);
        program.env("CNI_PATH", &self.bin_dir);
        let config = Value::Object(config);
        let child = start(&mut program, command, container.id, Some(container.namespace), &config)?;
        let output = child.wait_with_output()?;
        let text = String::from_utf8_lossy(&output.stdout);
        ensure!(output.status.success(), "{command} by {name}: {} {text}", output.status);
        Ok(if text.is_empty() { Value::Null } else { serde_json::from_str(&text)? })
    }
}

impl Contained<'_> {
    /// Its first address without the prefix length.
    ///
    /// # Errors
    /// It has none.
    pub fn address(&self) -> anyhow::Result<String> {
        let address = self.result["ips"][0]["address"].as_str().and_then(|it| it.split('/').next());
        Ok(address.with_context(|| format!("no address: {}", self.result))?.to_owned())
    }
}

/// Weft's plugin without a configuration on disk, for what no runtime does.
pub struct Plugin<'a> {
    host: &'a Host,
    file: PathBuf,
}

impl<'a> Plugin<'a> {
    /// The plugin that asks the daemon of a host.
    ///
    /// # Errors
    /// Its file cannot be made.
    pub fn of(sandbox: &Sandbox, host: &'a Host) -> anyhow::Result<Self> {
        let file = sandbox.directory().join(format!("plugin-{}", host.index()));
        std::fs::create_dir_all(&file)?;
        let file = file.join("weft-cni");
        std::os::unix::fs::symlink(host.binary(), &file)?;
        Ok(Self { host, file })
    }

    /// Runs a command for a container in a namespace, with further fields of the configuration. Returns the exit
    /// code and the output.
    ///
    /// # Errors
    /// It does not start, or its output is no JSON.
    pub fn run(
        &self,
        command: &str,
        container: &str,
        namespace: Option<&Netns>,
        more: &Value,
    ) -> anyhow::Result<(i32, Value)> {
        let output = self.start(command, container, namespace, more)?.wait_with_output()?;
        let answer = match output.stdout.is_empty() {
            true => Value::Null,
            false => serde_json::from_slice(&output.stdout)?,
        };
        Ok((output.status.code().unwrap_or(-1), answer))
    }

    /// As [`Self::run`], for a command that succeeds.
    ///
    /// # Errors
    /// With the plugin's complaint.
    pub fn good(
        &self,
        command: &str,
        container: &str,
        namespace: Option<&Netns>,
    ) -> anyhow::Result<Value> {
        self.good_with(command, container, namespace, &json!({}))
    }

    /// As [`Self::good`], with further fields of the configuration.
    ///
    /// # Errors
    /// With the plugin's complaint.
    pub fn good_with(
        &self,
        command: &str,
        container: &str,
        namespace: Option<&Netns>,
        more: &Value,
    ) -> anyhow::Result<Value> {
        let (code, answer) = self.run(command, container, namespace, more)?;
        ensure!(code == 0, "{command} of {container}: {answer}");
        Ok(answer)
    }

    /// Begins a command and kills the plugin after a while. False if it had ended before.
    ///
    /// # Errors
    /// It does not start.
    pub fn run_killed(
        &self,
        command: &str,
        container: &str,
        namespace: Option<&Netns>,
        after: Duration,
    ) -> anyhow::Result<bool> {
        let mut child = self.start(command, container, namespace, &json!({}))?;
        std::thread::sleep(after);
        child.kill()?;
        Ok(child.wait()?.code().is_none())
    }

    fn start(
        &self,
        command: &str,
        container: &str,
        namespace: Option<&Netns>,
        more: &Value,
    ) -> anyhow::Result<Child> {
        let mut config = json!({
            "cniVersion": "1.1.0",
            "name": "weft",
            "type": "weft-cni",
            "runtimeDir": self.host.runtime_directory(),
        });
        let fields = more.as_object().cloned().unwrap_or_default();
        config.as_object_mut().context("an object")?.extend(fields);
        let mut program = Command::new(&self.file);
        program.env("CNI_PATH", "/opt/cni/bin");
        start(&mut program, command, container, namespace, &config)
    }
}

/// Starts a plugin, with the environment and the input that the specification wants.
fn start(
    program: &mut Command,
    command: &str,
    container: &str,
    namespace: Option<&Netns>,
    config: &Value,
) -> anyhow::Result<Child> {
    let mut child = program
        .env("CNI_COMMAND", command)
        .env("CNI_CONTAINERID", container)
        .env("CNI_IFNAME", "eth0")
        .env("CNI_NETNS", namespace.map(Netns::path).unwrap_or_default())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()?;
    child.stdin.take().context("no input")?.write_all(config.to_string().as_bytes())?;
    Ok(child)
}
