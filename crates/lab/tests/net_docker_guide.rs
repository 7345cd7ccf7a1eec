//! The commands of docs/docker.md, run in the order in which its readers would run them.

use std::time::Duration;

use anyhow::{Context, ensure};
use weft_bench::sandbox::try_wait_until;
use weft_lab::docker::{Docked, Engine, IMAGE, Release};

const LIMIT: Duration = Duration::from_secs(20);
const PAGE: &str = include_str!("../../../docs/docker.md");

/// A command of the page.
struct Shown {
    /// Its words after `docker`.
    words: Vec<&'static str>,
    /// The hosts on which it runs, by the remark behind it.
    hosts: &'static [usize],
}

/// The commands of the page, but those of docker-compose: net_compose runs them.
fn shown() -> Vec<Shown> {
    let blocks = PAGE.split("```sh\n").skip(1).filter_map(|rest| rest.split("```").next());
    let lines = blocks.flat_map(str::lines).filter_map(|line| line.strip_prefix("docker "));
    let command = |line: &'static str| {
        let (command, remark) = line.split_once('#').unwrap_or((line, ""));
        let hosts: &[usize] = match remark {
            _ if remark.contains("both") => &[0, 1],
            _ if remark.contains("second") => &[1],
            _ => &[0],
        };
        Shown { words: command.split_whitespace().collect(), hosts }
    };
    lines.map(command).collect()
}

/// Gives the image of the lab the names of the page's images. `nginx` needs no command.
fn name_images(engine: &Engine) -> anyhow::Result<()> {
    engine.run(&["tag", IMAGE, "busybox"])?;
    engine.run(&["create", "--name", "template", IMAGE, "sleep", "1000"])?;
    engine.run(&["commit", "template", "nginx"])?;
    engine.run(&["rm", "template"])?;
    Ok(())
}

/// The network that a command names.
fn network_of(words: &[&'static str]) -> Option<&'static str> {
    let at = words.iter().position(|word| *word == "--network")?;
    words.get(at + 1).copied()
}

#[test]
fn each_command_that_a_user_of_docker_is_told_works() -> anyhow::Result<()> {
    let docked = Docked::start(Release::Debian)?;
    docked.wait_ready_network()?;
    docked.engines.iter().try_for_each(name_images)?;
    let commands = shown();
    ensure!(commands.iter().any(|it| it.words.contains(&"ping")), "the page shows no ping");
    for Shown { words, hosts } in &commands {
        for host in *hosts {
            run(&docked, *host, words).with_context(|| format!("docker {}", words.join(" ")))?;
        }
    }
    docked.engines[0].run(&["rm", "--force", "web"])?;
    for name in commands.iter().filter(|it| it.words.starts_with(&["network", "create"])) {
        let name = name.words.last().copied().unwrap_or_default();
        // A network that the page creates on one host is missing on the other.
        docked.engines.iter().try_for_each(|it| it.docker(&["network", "rm", name]).map(drop))?;
    }
    docked.both(&["network", "rm", "weft"])?;
    docked.wait_clean(LIMIT)
}

/// Runs a command as a reader would. `ADDRESS` is that of `web` on the first host, and a ping ends.
fn run(docked: &Docked, host: usize, words: &[&'static str]) -> anyhow::Result<()> {
    let engine = &docked.engines[host];
    if !words.contains(&"ADDRESS") {
        if words.starts_with(&["run"]) {
            // The page uses the name again.
            engine.docker(&["rm", "--force", "web"])?;
        }
        engine.run(words)?;
        return Ok(());
    }
    let network = network_of(words).context("it names no network")?;
    let address = docked.engines[0].address("web", network)?;
    let words: Vec<&str> = words
        .iter()
        .flat_map(|word| match *word {
            "ADDRESS" => vec![address.as_str()],
            "ping" => vec!["ping", "-c", "3", "-W", "2"],
            word => vec![word],
        })
        .collect();
    try_wait_until("the answers", LIMIT, || {
        let output = engine.docker(&words)?;
        Ok(output.status.success() && output.stdout.contains(" 0% packet loss"))
    })?;
    Ok(())
}
