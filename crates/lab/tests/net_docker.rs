//! Docker's network and IPAM driver, with real Docker engines on two hosts.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::ensure;
use serde_json::json;
use weft_bench::demo;
use weft_bench::sandbox::{Sandbox, SandboxOptions, try_wait_until};
use weft_lab::docker::{Docked, Engine, IMAGE, Release, launch, ping};
use weft_lab::net::Lab;

const LIMIT: Duration = Duration::from_secs(20);

weft_lab::with_each_docker! {
    a_container_has_an_ipv6_address_that_its_user_chose_and_publishes_a_port,
    a_container_is_on_no_two_networks_whose_addresses_overlap,
    an_internal_network_of_docker_is_one_of_weft_on_each_host,
    containers_of_two_engines_share_the_ready_network,
    containers_outlive_a_daemon_that_stops_or_is_killed,
    containers_that_always_restart_come_back_after_a_crash_of_the_host,
    many_containers_at_once_leave_nothing,
    networks_of_docker_are_those_of_weft,
}

fn containers_of_two_engines_share_the_ready_network(release: Release) -> anyhow::Result<()> {
    let docked = Docked::start(release)?;
    let [one, two] = &docked.engines;
    // Docker's own IPAM driver would give the same addresses on every host.
    let text = one.refused(&["network", "create", "-d", "weft", "wrong"])?;
    ensure!(text.contains("--ipam-driver weft"), "{text}");
    docked.wait_ready_network()?;
    let run = ["run", "-d", "--network", "weft", "--name"];
    one.run(&[&run[..], &["web", IMAGE, "sleep", "1000"]].concat())?;
    let aliased = ["run", "-d", "--network", "weft", "--network-alias", "store", "--name"];
    two.run(&[&aliased[..], &["db", IMAGE, "sleep", "1000"]].concat())?;
    let (web, db) = (one.address("web", "weft")?, two.address("db", "weft")?);
    ensure!(web != db, "both containers have the address {web}");
    ping(one, "web", &db)?;
    ping(two, "db", &web)?;

    // Whoever made it, the attachment is listed, with its maker and its size.
    let listed = docked.lab.host(0).weft_json(&["ps"])?;
    let attached = &listed[0];
    ensure!(attached["made_by"] == "docker" && attached["state"] == "attached", "{listed}");
    let mtu = one.run(&["exec", "web", "cat", "/sys/class/net/eth0/mtu"])?;
    ensure!(attached["mtu"] == mtu.parse::<u64>()?, "the container has MTU {mtu}: {listed}");

    // Its names are known on the other host.
    for name in ["db", "store"] {
        try_wait_until(&format!("the name {name} on the other host"), LIMIT, || {
            let found = docked.lab.host(0).weft_json(&["dns-lookup", name]);
            Ok(found.is_ok_and(|found| found[0]["address"] == db.as_str()))
        })?;
    }
    ensure!(docked.lab.host(0).weft_json(&["ps"])?[0]["name"] == "web");

    // Addresses that the user chooses.
    let fixed = ["--ip", "10.33.0.9", "--mac-address", "02:00:00:00:33:09"];
    one.run(&[&run[..4], &fixed, &["--name", "fixed", IMAGE, "sleep", "1000"]].concat())?;
    ensure!(one.address("fixed", "weft")? == "10.33.0.9");
    let mac = one.run(&["exec", "fixed", "cat", "/sys/class/net/eth0/address"])?;
    ensure!(mac == "02:00:00:00:33:09", "{mac}");
    ping(two, "db", "10.33.0.9")?;
    let taken =
        two.refused(&[&run[..4], &fixed[..2], &["--name", "late", IMAGE, "true"]].concat())?;
    ensure!(taken.contains("10.33.0.9 is in use"), "{taken}");
    two.run(&["rm", "late"])?;

    // Out of the network and in again, while it runs.
    one.run(&["network", "disconnect", "weft", "web"])?;
    one.run(&["network", "connect", "weft", "web"])?;
    ping(two, "db", &one.address("web", "weft")?)?;

    // A container that restarts has its network again.
    one.run(&["restart", "-t", "0", "web"])?;
    ping(two, "db", &one.address("web", "weft")?)?;

    one.run(&["rm", "-f", "web", "fixed"])?;
    two.run(&["rm", "-f", "db"])?;
    docked.both(&["network", "rm", "weft"])?;
    docked.wait_clean(LIMIT)
}

fn a_container_has_an_ipv6_address_that_its_user_chose_and_publishes_a_port(
    release: Release,
) -> anyhow::Result<()> {
    let docked = Docked::start(release)?;
    docked.wait_ready_network()?;
    let [one, two] = &docked.engines;
    let of_weft = ["network", "create", "-d", "weft", "--ipam-driver", "weft", "--ipv6"];
    let ranges = ["--subnet", "10.9.0.0/24", "--subnet", "fd00:9::/64"];
    docked.both(&[&of_weft[..], &ranges, &["-o", "network=six", "six"]].concat())?;
    let run = ["run", "-d", "--network", "six", "--name"];
    let chosen = ["--ip6", "fd00:9::a09:9", "--publish", "8080:80"];
    let serve = [IMAGE, "httpd", "-f", "-p", "80", "-h", "/etc"];
    one.run(&[&run[..], &["web"], &chosen, &serve].concat())?;
    two.run(&[&run[..], &["db", IMAGE, "sleep", "1000"]].concat())?;
    let shown = &one.inspect("web")?["NetworkSettings"]["Networks"]["six"];
    ensure!(shown["GlobalIPv6Address"] == "fd00:9::a09:9", "{shown}");
    ping(two, "db", "fd00:9::a09:9")?;
    ping(two, "db", &one.address("web", "six")?)?;
    let late = [&run[..], &["late"], &chosen[..2], &[IMAGE, "true"]].concat();
    let taken = two.refused(&late)?;
    ensure!(taken.contains("fd00:9::a09:9 is in use"), "{taken}");

    // Docker publishes the port by its own network, for hosts outside.
    let url = format!("http://{}:8080/passwd", docked.lab.host(0).ipv4());
    try_wait_until("the published port", LIMIT, || {
        let words = ["curl", "-sS", "--max-time", "2", &url];
        let fetched = docked.lab.host(1).netns().exec(&words);
        Ok(fetched.is_ok_and(|it| it.stdout.contains("root")))
    })?;

    one.run(&["rm", "-f", "web"])?;
    two.run(&["rm", "-f", "db", "late"])?;
    docked.both(&["network", "rm", "six", "weft"])?;
    docked.wait_clean(LIMIT)
}

fn containers_outlive_a_daemon_that_stops_or_is_killed(release: Release) -> anyhow::Result<()> {
    let docked = Docked::start(release)?;
    let [one, two] = &docked.engines;
    docked.wait_ready_network()?;
    let run = ["run", "-d", "--network", "weft", "--name"];
    one.run(&[&run[..], &["web", IMAGE, "sleep", "1000"]].concat())?;
    two.run(&[&run[..], &["db", IMAGE, "sleep", "1000"]].concat())?;
    let db = two.address("db", "weft")?;
    ping(one, "web", &db)?;
    let host = docked.lab.host(0);
    for is_killed in [true, false] {
        if is_killed {
            host.kill_daemon();
        } else {
            host.stop_daemon()?;
        }
        launch(&docked.lab.sandbox, host)?;
        docked.lab.wait_active()?;
        ping(one, "web", &db)?;
        ping(two, "db", &one.address("web", "weft")?)?;
    }
    // The next containers get other addresses than those that run.
    one.run(&[&run[..], &["late", IMAGE, "sleep", "1000"]].concat())?;
    let mut addresses = BTreeSet::from([db.clone(), one.address("web", "weft")?]);
    ensure!(addresses.insert(one.address("late", "weft")?), "an address was given twice");
    ping(one, "late", &db)?;

    // Without a daemon Docker says so, and needs no help afterwards.
    host.stop_daemon()?;
    one.run(&["rm", "-f", "late"])?;
    launch(&docked.lab.sandbox, host)?;
    docked.lab.wait_active()?;
    one.run(&[&run[..], &["late", IMAGE, "sleep", "1000"]].concat())?;
    ping(one, "late", &db)?;
    one.run(&["rm", "-f", "web", "late"])?;
    two.run(&["rm", "-f", "db"])?;
    docked.both(&["network", "rm", "weft"])?;
    // Its lists, after a minute, show changes that Docker could not tell in the meantime.
    docked.wait_clean(Duration::from_secs(150))
}

fn containers_that_always_restart_come_back_after_a_crash_of_the_host(
    release: Release,
) -> anyhow::Result<()> {
    let docked = Docked::start(release)?;
    docked.wait_ready_network()?;
    let run = ["run", "-d", "--network", "weft", "--restart", "always", "--name"];
    docked.engines[0].run(&[&run[..], &["web", IMAGE, "sleep", "1000"]].concat())?;
    docked.engines[1].run(&[&run[..], &["db", IMAGE, "sleep", "1000"]].concat())?;
    let host = docked.lab.host(0);
    // Either may be up first.
    for engine_first in [true, false] {
        docked.engines[0].kill();
        host.kill_daemon();
        if engine_first {
            let launched = std::thread::scope(|scope| {
                let later = scope.spawn(|| {
                    std::thread::sleep(Duration::from_secs(3));
                    launch(&docked.lab.sandbox, host)
                });
                let started = docked.engines[0].start_again(host);
                later
                    .join()
                    .map_err(|_| anyhow::anyhow!("the launch panicked"))?
                    .and(started.map_err(Into::into))
            });
            launched?;
        } else {
            launch(&docked.lab.sandbox, host)?;
            docked.engines[0].start_again(host)?;
        }
        docked.lab.wait_active()?;
        let [one, two] = &docked.engines;
        try_wait_until("the container to run again", LIMIT, || {
            let running = one.inspect("web").is_ok_and(|it| it["State"]["Running"] == true);
            Ok(running && one.address("web", "weft").is_ok())
        })?;
        ping(one, "web", &two.address("db", "weft")?)?;
        ping(two, "db", &one.address("web", "weft")?)?;
    }
    docked.engines[0].run(&["rm", "-f", "web"])?;
    docked.engines[1].run(&["rm", "-f", "db"])?;
    docked.both(&["network", "rm", "weft"])?;
    docked.wait_clean(Duration::from_secs(150))
}

fn many_containers_at_once_leave_nothing(release: Release) -> anyhow::Result<()> {
    const CONTAINERS: usize = 50;
    let docked = Docked::start(release)?;
    let [one, _] = &docked.engines;
    docked.wait_ready_network()?;
    std::thread::scope(|scope| {
        let tasks: Vec<_> = (0..CONTAINERS)
            .map(|number| {
                scope.spawn(move || {
                    let name = format!("many{number}");
                    let run = ["run", "-d", "--network", "weft", "--name", &name, IMAGE];
                    one.run(&[&run[..], &["sleep", "1000"]].concat())?;
                    one.address(&name, "weft")
                })
            })
            .collect();
        let mut addresses = BTreeSet::new();
        for task in tasks {
            let address =
                task.join().map_err(|_| anyhow::anyhow!("a container's task panicked"))??;
            ensure!(addresses.insert(address.clone()), "{address} was given twice");
        }
        Ok(())
    })?;
    let names: Vec<String> = (0..CONTAINERS).map(|number| format!("many{number}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    one.run(&[&["rm", "-f"], &names[..]].concat())?;
    docked.both(&["network", "rm", "weft"])?;
    docked.wait_clean(LIMIT)
}

fn networks_of_docker_are_those_of_weft(release: Release) -> anyhow::Result<()> {
    let docked = Docked::start(release)?;
    docked.wait_ready_network()?;
    let [one, two] = &docked.engines;
    // One that takes addresses from the range of `weft`, one with a range that follows from its name, and one with a
    // range that the user chooses.
    let of_weft = ["network", "create", "-d", "weft", "--ipam-driver", "weft"];
    let own = ["--ipam-opt", "network=prod", "-o", "network=prod", "prod"];
    let chosen = ["--subnet", "10.9.0.0/24", "-o", "network=test", "test"];
    for more in [&["-o", "network=shop", "shop"][..], &own, &chosen] {
        docked.both(&[&of_weft[..], more].concat())?;
    }
    let closed = ["--internal", "--ipam-opt", "network=shut", "-o", "network=shut", "shut"];
    one.run(&[&of_weft[..], &closed].concat())?;
    one.run(&["network", "rm", "shut"])?;
    let wrong = ["--subnet", "10.8.0.0/24", "-o", "network=prod", "wrong"];
    let text = one.refused(&[&of_weft[..], &wrong].concat())?;
    ensure!(text.contains("--ipam-opt network=prod"), "{text}");
    for name in ["shop", "prod", "test"] {
        let run = |engine: &Engine, of: &str| {
            let name = format!("{name}-{of}");
            engine.run(&[
                "run",
                "-d",
                "--network",
                &name[..4],
                "--name",
                &name,
                IMAGE,
                "sleep",
                "1000",
            ])
        };
        run(one, "a")?;
        run(two, "b")?;
        ping(one, &format!("{name}-a"), &two.address(&format!("{name}-b"), name)?)?;
    }
    // Whoever is on another network is not reached.
    for (from, to, network) in [("shop-a", "prod-b", "prod"), ("prod-a", "shop-b", "shop")] {
        let ping = ["exec", from, "ping", "-c", "1", "-W", "1", &two.address(to, network)?];
        ensure!(!one.docker(&ping)?.status.success(), "{from} reaches {to}");
    }
    // A container on two networks.
    one.run(&["network", "connect", "test", "prod-a"])?;
    for (to, network) in [("prod-b", "prod"), ("test-b", "test")] {
        ping(one, "prod-a", &two.address(to, network)?)?;
    }
    let attached = docked.lab.host(0).weft_json(&["ps"])?;
    let networks: Vec<&str> =
        attached.as_array().into_iter().flatten().filter_map(|it| it["network"].as_str()).collect();
    ensure!(networks.iter().filter(|name| **name == "test").count() == 2, "{attached}");
    // A daemon that was killed goes on with all of them.
    docked.lab.host(0).kill_daemon();
    launch(&docked.lab.sandbox, docked.lab.host(0))?;
    docked.lab.wait_active()?;
    for (name, to) in [("shop-a", "shop-b"), ("prod-a", "prod-b"), ("test-a", "test-b")] {
        ping(one, name, &two.address(to, &to[..4])?)?;
    }
    for (engine, of) in [(one, "a"), (two, "b")] {
        for name in ["shop", "prod", "test"] {
            engine.run(&["rm", "-f", &format!("{name}-{of}")])?;
        }
    }
    docked.both(&["network", "rm", "shop", "prod", "test", "weft"])?;
    docked.wait_clean(LIMIT)?;
    wait_one_network(&docked)
}

/// Weft's networks go with Docker's, but for the ready one.
fn wait_one_network(docked: &Docked) -> anyhow::Result<()> {
    for host in docked.lab.sandbox.hosts() {
        try_wait_until("the networks to go with Docker's", LIMIT, || {
            let left = host.weft_json(&["network", "ls"])?;
            Ok(left.as_array().is_some_and(|left| left.len() == 1))
        })?;
    }
    Ok(())
}

fn a_container_is_on_no_two_networks_whose_addresses_overlap(
    release: Release,
) -> anyhow::Result<()> {
    let docked = Docked::start(release)?;
    let [one, _] = &docked.engines;
    let of_weft = ["network", "create", "-d", "weft", "--ipam-driver", "weft"];
    let same = ["--subnet", "10.9.0.0/24"];
    for name in ["shop", "prod"] {
        let option = format!("network={name}");
        let named = ["--ipam-opt", &option, "-o", &option, name];
        one.run(&[&of_weft[..], &same, &named].concat())?;
    }
    let apart = ["--subnet", "10.8.0.0/24", "-o", "network=test", "test"];
    one.run(&[&of_weft[..], &apart].concat())?;
    one.run(&["run", "-d", "--network", "shop", "--name", "web", IMAGE, "sleep", "1000"])?;
    let overlap = "is on network shop already, whose addresses overlap with those of network prod";
    let text = one.refused(&["network", "connect", "prod", "web"])?;
    ensure!(text.contains(overlap), "{text}");
    // A network that does not overlap is joined, also after the refusal.
    one.run(&["network", "connect", "test", "web"])?;
    let interfaces = one.run(&["exec", "web", "ls", "/sys/class/net"])?;
    ensure!(["eth0", "eth1"].iter().all(|name| interfaces.contains(name)), "{interfaces}");
    let attached = docked.lab.host(0).weft_json(&["ps"])?;
    ensure!(attached.as_array().is_some_and(|all| all.len() == 2), "{attached}");
    // Another container may have that network, and this one too once it has left the first.
    one.run(&["run", "-d", "--network", "prod", "--name", "db", IMAGE, "sleep", "1000"])?;
    one.run(&["network", "disconnect", "shop", "web"])?;
    one.run(&["network", "connect", "prod", "web"])?;
    ping(one, "web", &one.address("db", "prod")?)?;

    one.run(&["rm", "-f", "web", "db"])?;
    one.run(&["network", "rm", "shop", "prod", "test"])?;
    Ok(())
}

fn an_internal_network_of_docker_is_one_of_weft_on_each_host(
    release: Release,
) -> anyhow::Result<()> {
    let docked = Docked::start(release)?;
    let [one, two] = &docked.engines;
    let of_weft = ["network", "create", "-d", "weft", "--ipam-driver", "weft"];
    let shut = ["--ipam-opt", "network=shut", "-o", "network=shut", "shut"];
    let closed = ["--internal"];
    docked.both(&[&of_weft[..], &closed, &shut].concat())?;
    for host in docked.lab.sandbox.hosts() {
        let network = &host.weft_json(&["network", "inspect", "shut"])?[0];
        ensure!(network["internal"] == true && network["clashes"] == json!([]), "{network}");
        // No host lets containers out.
        let expose = host.weft(&["expose", "--network", "shut", "--masquerade"])?;
        let text = format!("{}{}", expose.stdout, expose.stderr);
        ensure!(!expose.status.success() && text.contains("shut is internal"), "{text}");
    }
    let run = ["run", "-d", "--network", "shut", "--name"];
    one.run(&[&run[..], &["web", IMAGE, "sleep", "1000"]].concat())?;
    two.run(&[&run[..], &["db", IMAGE, "sleep", "1000"]].concat())?;
    ping(one, "web", &two.address("db", "shut")?)?;
    let routes = one.run(&["exec", "web", "ip", "route"])?;
    ensure!(!routes.contains("default") && !routes.contains("eth1"), "{routes}");

    // Docker's network and Weft's are both internal, or neither.
    let text = two.refused(&[&of_weft[..], &shut[..4], &["open"]].concat())?;
    ensure!(text.contains("network shut cannot be used: it is internal"), "{text}");
    let open = ["--ipam-opt", "network=open", "-o", "network=open"];
    one.run(&[&of_weft[..], &open, &["open"]].concat())?;
    for named in [&open[..], &[]] {
        let text = two.refused(&[&of_weft[..], &closed, named, &["wrong"]].concat())?;
        ensure!(text.contains("it is not internal"), "{text}");
    }

    one.run(&["rm", "-f", "web"])?;
    two.run(&["rm", "-f", "db"])?;
    docked.both(&["network", "rm", "shut"])?;
    one.run(&["network", "rm", "open"])?;
    wait_one_network(&docked)
}

#[test]
fn the_demo_shows_containers_that_know_each_other_by_name() -> anyhow::Result<()> {
    let lab = Lab { sandbox: Sandbox::new(&SandboxOptions::default())? };
    demo::docker::launch_all(&lab.sandbox, true)?;
    lab.wait_active()?;
    ensure!(demo::docker::show(&lab.sandbox, Ok(Release::Debian.programs()?))?, "it was left out");
    // Nothing of it is in the status and the figures that follow.
    for host in lab.sandbox.hosts() {
        let attached = host.weft_json(&["ps"])?;
        ensure!(attached.as_array().is_some_and(Vec::is_empty), "left: {attached}");
        let networks = host.weft_json(&["network", "ls"])?;
        ensure!(networks.as_array().is_some_and(|left| left.len() == 1), "left: {networks}");
    }
    Ok(())
}
