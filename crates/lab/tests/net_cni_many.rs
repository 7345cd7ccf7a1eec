//! Many CNI requests at once, while daemons and plugins are killed at random.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha12Rng;
use serde_json::json;
use weft_bench::sandbox::{Host, Netns, try_wait_until};
use weft_lab::cni::Plugin;
use weft_lab::net::Lab;
use weft_lab::net::guest::{figure, seed};

/// How often each container is added and deleted.
const TIMES: usize = 3;
/// One plugin of so many is killed.
const KILLED_OF: u32 = 4;
/// The latest kill of a plugin after its start, in milliseconds.
const KILL_MS_MAX: u64 = 400;
/// The pause between two kills of the daemon, in milliseconds.
const PAUSE_MS: std::ops::Range<u64> = 500..3_000;
/// The CNI error that asks the runtime to try again.
const TRY_AGAIN: i64 = 11;
/// The pause before the next try.
const TRY_PAUSE: Duration = Duration::from_millis(500);
/// A DEL that found the daemon too busy is read from its file within 30 s.
const LIMIT: Duration = Duration::from_secs(90);

#[test]
fn many_adds_and_dels_at_once_with_kills_leave_nothing() -> anyhow::Result<()> {
    come_and_go(40)
}

#[test]
fn two_hundred_adds_and_dels_at_once_with_kills_leave_nothing() -> anyhow::Result<()> {
    come_and_go(200)
}

/// What the containers' runtimes have seen.
#[derive(Default)]
struct Seen {
    added: AtomicUsize,
    killed: AtomicUsize,
}

fn come_and_go(containers: usize) -> anyhow::Result<()> {
    let seed = seed()?;
    let lab = Lab::pair(&[])?;
    let host = lab.host(0);
    let plugin = Plugin::of(&lab.sandbox, host)?;
    let add = |number| lab.sandbox.add_netns(&format!("cni{number}"));
    let namespaces: Vec<Netns> = (0..containers).map(add).collect::<Result<_, _>>()?;
    let seen = Seen::default();
    let kills = add_and_delete_with_kills(&lab, &plugin, &namespaces, seed, &seen)?;
    let (added, killed) = (seen.added.into_inner(), seen.killed.into_inner());
    let of = TIMES * containers;
    figure("ADDs that succeeded", format!("{added} of {of}"));
    figure("killed", format!("{killed} plugins, {kills} daemons"));
    ensure!(added > 0 && killed > 0 && kills > 0, "nothing was put to the test");
    wait_nothing_left(&lab)?;
    for namespace in &namespaces {
        let links = namespace.exec(&["ip", "-o", "link"])?.success()?.stdout;
        ensure!(!links.contains("eth0"), "{links}");
    }
    add_all_at_once(host, &plugin, &namespaces)?;
    // Weft holds no namespace: the kernel frees each, with its interface.
    for namespace in &namespaces {
        lab.sandbox.remove_netns(namespace)?;
    }
    try_wait_until("the namespaces to be gone", LIMIT, || {
        Ok(!host.netns().exec(&["ip", "-o", "link"])?.success()?.stdout.contains("weftv"))
    })?;
    for number in 0..containers {
        plugin.good("DEL", &name(number), None)?;
    }
    wait_nothing_left(&lab)
}

/// A runtime for each container, and a killer of daemons. Returns how many were killed.
fn add_and_delete_with_kills(
    lab: &Lab,
    plugin: &Plugin<'_>,
    namespaces: &[Netns],
    seed: u64,
    seen: &Seen,
) -> anyhow::Result<usize> {
    let host = lab.host(0);
    let password = lab.password_file().display().to_string();
    let mut random = ChaCha12Rng::seed_from_u64(seed);
    std::thread::scope(|scope| {
        let runtimes: Vec<_> = (0..)
            .zip(namespaces)
            .map(|(number, namespace)| {
                let random = ChaCha12Rng::seed_from_u64(random.random());
                scope.spawn(move || add_and_delete(plugin, number, namespace, random, seen))
            })
            .collect();
        let mut kills = 0;
        while kills == 0 || runtimes.iter().any(|runtime| !runtime.is_finished()) {
            std::thread::sleep(Duration::from_millis(random.random_range(PAUSE_MS)));
            host.kill_daemon();
            host.start_daemon(&["--password-file", &password])?;
            kills += 1;
        }
        for runtime in runtimes {
            runtime.join().map_err(|_| anyhow::anyhow!("a runtime has panicked"))??;
        }
        Ok(kills)
    })
}

/// Adds and deletes a container as a runtime does: an ADD may fail, and is followed by DELs until one succeeds.
fn add_and_delete(
    plugin: &Plugin<'_>,
    number: usize,
    namespace: &Netns,
    mut random: ChaCha12Rng,
    seen: &Seen,
) -> anyhow::Result<()> {
    let name = name(number);
    let mut kill_after = || {
        let is_killed = random.random_ratio(1, KILLED_OF);
        is_killed.then(|| Duration::from_millis(random.random_range(0..KILL_MS_MAX)))
    };
    for _ in 0..TIMES {
        match kill_after() {
            Some(after) => {
                let killed = plugin.run_killed("ADD", &name, Some(namespace), after)?;
                seen.killed.fetch_add(usize::from(killed), Ordering::Relaxed);
            }
            None => {
                let (code, _) = plugin.run("ADD", &name, Some(namespace), &json!({}))?;
                seen.added.fetch_add(usize::from(code == 0), Ordering::Relaxed);
            }
        }
        if let Some(after) = kill_after() {
            let killed = plugin.run_killed("DEL", &name, Some(namespace), after)?;
            seen.killed.fetch_add(usize::from(killed), Ordering::Relaxed);
        }
        plugin.good("DEL", &name, Some(namespace))?;
    }
    Ok(())
}

/// Adds all containers at the same time. Each gets an address of its own.
fn add_all_at_once(host: &Host, plugin: &Plugin<'_>, namespaces: &[Netns]) -> anyhow::Result<()> {
    let (begun, tries) = (Instant::now(), AtomicUsize::new(0));
    let results: Vec<_> = std::thread::scope(|scope| {
        let tries = &tries;
        let add =
            |(number, namespace)| scope.spawn(move || add_one(plugin, number, namespace, tries));
        let runtimes: Vec<_> = (0..).zip(namespaces).map(add).collect();
        runtimes.into_iter().map(std::thread::ScopedJoinHandle::join).collect()
    });
    let mut addresses = BTreeSet::new();
    for result in results {
        let address = result.map_err(|_| anyhow::anyhow!("a runtime has panicked"))??;
        ensure!(addresses.insert(address.clone()), "{address} was given twice");
    }
    let (tries, took_s) = (tries.into_inner(), begun.elapsed().as_secs_f64());
    figure("ADDs at once", format!("{} in {took_s:.1} s and {tries} tries", addresses.len()));
    let used = used(host)?;
    ensure!(used == addresses.len() as u64, "{used} addresses are in use");
    Ok(())
}

/// Adds a container, again for as long as the plugin asks for that.
fn add_one(
    plugin: &Plugin<'_>,
    number: usize,
    namespace: &Netns,
    tries: &AtomicUsize,
) -> anyhow::Result<String> {
    let begun = Instant::now();
    loop {
        tries.fetch_add(1, Ordering::Relaxed);
        let (code, answer) = plugin.run("ADD", &name(number), Some(namespace), &json!({}))?;
        if code == 0 {
            return Ok(answer["ips"][0]["address"].to_string());
        }
        let may_try = answer["code"] == TRY_AGAIN && begun.elapsed() < LIMIT;
        ensure!(may_try, "{} was not added: {answer}", name(number));
        std::thread::sleep(TRY_PAUSE);
    }
}

/// Waits until the host has no interface, attachment, address, record or file of any container.
fn wait_nothing_left(lab: &Lab) -> anyhow::Result<()> {
    let host = lab.host(0);
    let mut left = String::new();
    let waited = try_wait_until("nothing to be left", LIMIT, || {
        left = match remains(lab, host) {
            Ok(remains) => remains.join("; "),
            Err(error) => error.to_string(),
        };
        Ok(left.is_empty())
    });
    waited.map(drop).with_context(|| format!("left: {left}"))
}

fn remains(lab: &Lab, host: &Host) -> anyhow::Result<Vec<String>> {
    let mut found = Vec::new();
    let links = host.netns().exec(&["ip", "-o", "link"])?.success()?.stdout;
    found.extend(links.lines().filter(|line| line.contains("weftv")).map(str::to_owned));
    let attached = host.weft_json(&["ps"])?;
    if attached != json!([]) {
        found.push(format!("attached: {attached}"));
    }
    let used = used(host)?;
    if used > 0 {
        found.push(format!("{used} addresses are in use"));
    }
    for file in std::fs::read_dir(host.state_directory().join("attachments"))? {
        let saved = std::fs::read(file?.path())?;
        found.push(format!("saved: {}", String::from_utf8_lossy(&saved)));
    }
    let deletions = host.runtime_directory().join("cni-deleted");
    for file in std::fs::read_dir(deletions).into_iter().flatten() {
        let name = file?.file_name().to_string_lossy().into_owned();
        // A killed DEL may leave half a file, which the daemon removes ten minutes later.
        found.extend((!name.starts_with(".weft-new-")).then(|| format!("the DEL {name}")));
    }
    // On the other host, each container would have a record in DNS.
    let looked_up = lab.host(1).weft(&["dns-lookup", &name(0)])?;
    if looked_up.status.success() {
        found.push(format!("a name: {}", looked_up.stdout));
    }
    Ok(found)
}

/// The addresses that containers of all hosts have.
fn used(host: &Host) -> anyhow::Result<u64> {
    let ipam = host.weft_json(&["status", "ipam"])?;
    let hosts = ipam["hosts"].as_array().cloned().unwrap_or_default();
    Ok(hosts.iter().filter_map(|host| host["used"].as_u64()).sum())
}

fn name(number: usize) -> String {
    format!("many{number}")
}
