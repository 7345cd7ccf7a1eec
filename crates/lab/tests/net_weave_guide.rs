//! The commands of docs/weave-net.md, run in the order in which its readers would run them.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use anyhow::ensure;
use weft_bench::sandbox::{Host, Output, Sandbox, SandboxOptions, try_wait_until};
use weft_lab::documents::{commands, has_option, options};

const DOCUMENT: &str = "docs/weave-net.md";
const LIMIT: Duration = Duration::from_secs(20);
/// Options of Weave Net's that the document names.
const WEAVES: [&str; 2] = ["--password", "--no-fastdp"];

/// The document, and which of its commands were run.
struct Guide {
    shown: BTreeSet<String>,
    run: BTreeSet<String>,
}

impl Guide {
    fn read() -> anyhow::Result<Self> {
        let text = text()?;
        let shown = commands(&text).into_iter().map(|shown| shown.text).collect();
        Ok(Self { shown, run: BTreeSet::new() })
    }

    /// The words of a command that the document shows, with values for its placeholders.
    fn words(&mut self, command: &str, values: &[(&str, &str)]) -> anyhow::Result<Vec<String>> {
        ensure!(self.shown.contains(command), "{DOCUMENT} does not show weft {command}");
        self.run.insert(command.to_owned());
        let value = |word: &str| {
            // A host's placeholder may have a port.
            let (name, port) = word.split_at(word.find(':').unwrap_or(word.len()));
            let name = name.trim_matches(['[', ']', '…']);
            let value = values.iter().find(|(placeholder, _)| *placeholder == name);
            value.map_or(word.to_owned(), |(_, value)| format!("{value}{port}"))
        };
        Ok(command.split_whitespace().map(value).collect())
    }

    /// Runs a command on a host, with further words that the document leaves out.
    fn run(
        &mut self,
        host: &Host,
        command: &str,
        values: &[(&str, &str)],
        more: &[&str],
    ) -> anyhow::Result<Output> {
        let words = self.words(command, values)?;
        let words: Vec<&str> =
            words.iter().map(String::as_str).chain(more.iter().copied()).collect();
        Ok(host.weft(&words)?.success()?)
    }

    /// Runs `weft launch` in the foreground.
    fn launch(
        &mut self,
        host: &Host,
        command: &str,
        values: &[(&str, &str)],
        more: &[&str],
    ) -> anyhow::Result<()> {
        let words = self.words(command, values)?;
        let words = words.iter().skip(1).map(String::as_str);
        Ok(host.start_daemon(&words.chain(more.iter().copied()).collect::<Vec<_>>())?)
    }

    fn all_were_run(&self) -> anyhow::Result<()> {
        // A command may be named without its words.
        let is_named =
            |shown: &str| self.run.iter().any(|run| run.starts_with(&format!("{shown} ")));
        let left = self.shown.difference(&self.run).filter(|shown| !is_named(shown));
        let left: Vec<&String> = left.collect();
        ensure!(left.is_empty(), "{DOCUMENT} shows what this test does not run: {left:?}");
        Ok(())
    }
}

fn text() -> anyhow::Result<String> {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(DOCUMENT);
    Ok(std::fs::read_to_string(file)?)
}

#[test]
fn each_command_that_a_user_of_weave_net_is_told_works() -> anyhow::Result<()> {
    let mut guide = Guide::read()?;
    let sandbox = Sandbox::new(&SandboxOptions::default())?;
    let (one, two) = (sandbox.host(0), sandbox.host(1));
    let addresses = [one.ipv4().to_string(), two.ipv4().to_string()];
    let password = sandbox.password_file().to_string_lossy().into_owned();
    let web = sandbox.add_netns("web")?;
    let container = web.path();

    // Beside Weave Net.
    let beside = "launch --ipalloc-range 10.80.0.0/12 --port 7783 --data-port 7784 HOST:7783";
    for (host, other) in [(one, &addresses[1]), (two, &addresses[0])] {
        guide.launch(host, beside, &[("HOST", other)], &["--password-file", &password])?;
    }
    for host in sandbox.hosts() {
        host.wait_connected(1, LIMIT)?;
    }
    let text = guide.run(one, "status connections", &[], &[])?.stdout;
    ensure!(text.contains("active"), "{text}");
    guide.run(one, "attach CONTAINER", &[("CONTAINER", &container)], &[])?;
    web.exec(&["ip", "link", "show", "weft0"])?.success()?;
    let listed = guide.run(one, "ps", &[], &["--json"])?.json()?;
    let name = listed[0]["name"].as_str().unwrap_or_default().to_owned();
    try_wait_until("the container's name", LIMIT, || {
        let looked_up = guide.run(one, "dns-lookup NAME", &[("NAME", &name)], &[]);
        Ok(looked_up.is_ok_and(|it| it.stdout.contains("10.8")))
    })?;
    for host in sandbox.hosts() {
        guide.run(host, "reset", &[], &["--force"])?;
        host.wait_daemon(LIMIT)?;
    }

    // Without Weave Net.
    guide.launch(one, "launch --password-file FILE", &[("FILE", &password)], &[])?;
    let first = [("HOST", addresses[0].as_str())];
    guide.launch(two, "launch HOST…", &first, &["--password-file", &password])?;
    one.wait_connected(1, LIMIT)?;
    two.wait_connected(1, LIMIT)?;
    weave_words(&mut guide, two, &container, &addresses[0])?;
    more_networks(&mut guide, two, &container)?;
    let places = ["bin", "net.d"].map(|it| sandbox.directory().join(it).display().to_string());
    let [bin, configs] = &places;
    guide.run(two, "setup-cni", &[], &["--bin-dir", bin, "--config-dir", configs])?;
    guide.run(two, "stop", &[], &[])?;
    web.exec(&["ip", "link", "show", "weft0"])?.success()?;
    guide.all_were_run()
}

/// Commands that have Weave Net's names.
fn weave_words(guide: &mut Guide, host: &Host, container: &str, other: &str) -> anyhow::Result<()> {
    let other = [("HOST", other)];
    guide.run(host, "connect HOST", &other, &[])?;
    guide.run(host, "forget HOST", &other, &[])?;
    guide.run(host, "connect HOST", &other, &[])?;
    let at = [("ADDR", "10.32.77.7/12"), ("CONTAINER", container)];
    guide.run(host, "attach [ADDR] CONTAINER", &at, &[])?;
    let listed = host.weft_json(&["ps"])?;
    ensure!(listed[0]["addresses"][0] == "10.32.77.7/12", "{listed}");
    for part in ["", " connections", " peers", " targets", " ipam"] {
        guide.run(host, &format!("status{part}"), &[], &[])?;
    }
    guide.run(host, "report", &[], &[])?.json()?;
    guide.run(host, "expose", &[], &[])?;
    guide.run(host, "expose --name NAME", &[("NAME", "gate")], &[])?;
    host.netns().exec(&["sysctl", "-qw", "net.ipv4.ip_forward=1"])?.success()?;
    guide.run(host, "expose --masquerade", &[], &[])?;
    let named = [("NAME", "shop"), ("ADDR", "10.32.77.7")];
    guide.run(host, "dns-add NAME ADDR…", &named, &[])?;
    try_wait_until("the name", LIMIT, || {
        Ok(guide.run(host, "dns-lookup NAME", &named, &[]).is_ok())
    })?;
    guide.run(host, "dns-remove NAME [ADDR…]", &named, &[])?;
    guide.run(host, "hide", &[], &[])?;
    guide.run(host, "detach CONTAINER", &[("CONTAINER", container)], &[])?;
    let listed = host.weft_json(&["ps"])?;
    ensure!(listed == serde_json::json!([]), "{listed}");
    Ok(())
}

/// Networks in the place of Weave Net's subnets.
fn more_networks(guide: &mut Guide, host: &Host, container: &str) -> anyhow::Result<()> {
    guide.run(host, "network create --subnet 10.2.1.0/24 NAME", &[("NAME", "apart")], &[])?;
    let values = [("NAME", "apart"), ("C", container)];
    try_wait_until("an address of the network", LIMIT, || {
        Ok(guide.run(host, "attach --network NAME C", &values, &[]).is_ok())
    })?;
    let listed = host.weft_json(&["ps"])?;
    let address = listed[0]["addresses"][0].as_str().unwrap_or_default();
    ensure!(address.starts_with("10.2.1."), "{listed}");
    Ok(())
}

#[test]
fn each_option_that_a_user_of_weave_net_is_told_is_there() -> anyhow::Result<()> {
    let text = text()?;
    let shown: Vec<String> = options(&text).into_iter().map(|shown| shown.text).collect();
    for option in &shown {
        let known = has_option(option) || WEAVES.contains(&option.as_str());
        ensure!(known, "{DOCUMENT} names {option}, which Weft does not have");
    }
    for option in WEAVES {
        ensure!(shown.iter().any(|shown| shown == option), "{DOCUMENT} does not name {option}");
    }
    Ok(())
}
