//! The Compose files of the page on Docker over two hosts, by docker-compose itself.

use std::time::Duration;

use anyhow::{Context, ensure};
use weft_bench::sandbox::{Host, try_wait_until};
use weft_lab::compose::Compose;
use weft_lab::docker::{Docked, Engine, IMAGE, Release, ping};

const LIMIT: Duration = Duration::from_secs(20);
const PAGE: &str = include_str!("../../../docs/docker.md");
const PROJECT: &str = "front";
/// Services for a file that has none.
const SERVICES: &str = "services:\n  web:\n    image: nginx\n  db:\n    image: nginx\n";

/// The Compose file of the page that has this text, with the image of the lab.
fn file_of_page(with: &str) -> anyhow::Result<String> {
    let mut files = PAGE.split("```yaml\n").skip(1).filter_map(|rest| rest.split("```").next());
    let file = files.find(|file| file.contains(with)).context("the page has no such file")?;
    let services = if file.contains("services:") { "" } else { SERVICES };
    // `sleep` takes no other signal.
    let image = format!("    image: {IMAGE}\n    command: sleep 1000\n    stop_signal: SIGKILL");
    let lines = services.lines().chain(file.lines());
    let lines = lines.map(|line| if line.contains("image:") { image.as_str() } else { line });
    Ok(lines.collect::<Vec<_>>().join("\n"))
}

/// An address of a host on a network.
fn expose(host: &Host, network: &str) -> anyhow::Result<String> {
    let exposed = host.weft_json(&["expose", "--network", network])?;
    let first = exposed["addresses"][0].as_str().and_then(|net| net.split('/').next());
    Ok(first.with_context(|| format!("no address: {exposed}"))?.to_owned())
}

/// Waits until a container resolves a name to this address alone.
fn resolve(from: (&Engine, &str), resolver: &str, name: &str, to: &str) -> anyhow::Result<()> {
    let (engine, container) = from;
    let mut answer = String::new();
    let waited = try_wait_until(&format!("the name {name}"), LIMIT, || {
        answer = engine.docker(&["exec", container, "nslookup", name, resolver])?.stdout;
        let answers = answer.split("Name:").skip(1);
        Ok(answers.clone().count() == 1 && answers.clone().all(|it| it.contains(to)))
    });
    waited.map(drop).with_context(|| answer)
}

/// Starts `web` on the first host and `db` on the second, which know and reach each other, and ends both. The networks
/// are Docker's and Weft's.
fn up_and_down(docked: &Docked, file: &str, in_docker: &str, in_weft: &str) -> anyhow::Result<()> {
    let compose = Compose::new(PROJECT, file, docked.lab.sandbox.directory())?;
    let [one, two] = &docked.engines;
    compose.run(one, &["up", "-d", "web"])?;
    compose.run(two, &["up", "-d", "db"])?;
    let web = compose.container(one, "web")?;
    let db = compose.container(two, "db")?;
    let at = [one.address(&web, in_docker)?, two.address(&db, in_docker)?];
    ensure!(at[0] != at[1], "both containers have the address {}", at[0]);
    ping(one, &web, &at[1])?;
    ping(two, &db, &at[0])?;
    let [first, second] =
        [expose(docked.lab.host(0), in_weft)?, expose(docked.lab.host(1), in_weft)?];
    resolve((one, &web), &first, "db", &at[1])?;
    resolve((two, &db), &second, "web", &at[0])?;

    // Compose renames the old container before it starts the new one.
    compose.run(one, &["up", "-d", "--force-recreate", "web"])?;
    let renewed = compose.container(one, "web")?;
    ensure!(renewed != web, "the container is the same");
    let address = one.address(&renewed, in_docker)?;
    ping(two, &db, &address)?;
    resolve((two, &db), &second, "web", &address)?;

    for (engine, host) in docked.engines.iter().zip(docked.lab.sandbox.hosts()) {
        host.weft(&["hide", "--network", in_weft])?.success()?;
        compose.run(engine, &["down"])?;
    }
    Ok(())
}

/// The networks of Weft's driver in Docker.
fn networks(engine: &Engine) -> anyhow::Result<String> {
    Ok(engine.run(&["network", "ls", "--filter", "driver=weft", "--format", "{{.Name}}"])?)
}

#[test]
fn a_network_of_compose_spans_two_hosts_and_goes_with_the_project() -> anyhow::Result<()> {
    let docked = Docked::start(Release::Debian)?;
    docked.wait_ready_network()?;
    up_and_down(&docked, &file_of_page("driver: weft")?, "front_shop", "shop")?;
    for engine in &docked.engines {
        ensure!(networks(engine)? == "weft", "{}", networks(engine)?);
    }
    docked.both(&["network", "rm", "weft"])?;
    docked.wait_clean(LIMIT)?;
    for host in docked.lab.sandbox.hosts() {
        try_wait_until("the network to go with Docker's", LIMIT, || {
            let left = host.weft_json(&["network", "ls"])?;
            Ok(left.as_array().is_some_and(|left| left.len() == 1))
        })?;
    }
    Ok(())
}

#[test]
fn a_project_uses_the_ready_network_and_leaves_it() -> anyhow::Result<()> {
    let docked = Docked::start(Release::Debian)?;
    docked.wait_ready_network()?;
    up_and_down(&docked, &file_of_page("external: true")?, "weft", "weft")?;
    for engine in &docked.engines {
        ensure!(networks(engine)? == "weft", "{}", networks(engine)?);
    }
    docked.both(&["network", "rm", "weft"])?;
    docked.wait_clean(LIMIT)
}
