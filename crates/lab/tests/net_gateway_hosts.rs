//! Several hosts of a mesh serve the same OpenVPN clients, judged by Debian's `openvpn`.

#![allow(clippy::print_stdout)]

use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use serde_json::Value;
use weft_bench::sandbox::{Container, Host, Netns, Running, require, slowness, try_wait_until};
use weft_lab::net::gateway::totp_code;
use weft_lab::net::{Lab, wait_ping};

const LIMIT: Duration = Duration::from_secs(30);
const CONNECTED: &str = "Initialization Sequence Completed";

/// Two hosts that serve, a third with a container, and a network outside on which clients reach the first two.
struct Stage {
    lab: Lab,
    outside: Netns,
    container: Container,
}

/// A machine on the network outside.
struct Machine(Netns);

/// A running client.
struct Client {
    process: Running,
    address: Ipv4Addr,
}

impl Stage {
    /// The first host has the authority, and the second takes it over.
    fn new() -> anyhow::Result<Self> {
        Self::serving(&[])
    }

    /// [`Self::new`] with further options of both.
    fn serving(options: &[&str]) -> anyhow::Result<Self> {
        require("openvpn", "openvpn")?;
        let lab = Lab::launched(3, &[])?;
        let outside = lab.sandbox.add_netns("outside")?;
        outside.ip("link add bridge type bridge")?;
        outside.ip("link set bridge up")?;
        let container = lab.host(2).add_container("c3")?;
        let stage = Self { lab, outside, container };
        let (home, replica) = (stage.host(0), stage.host(1));
        let refused = replica.weft(&["openvpn", "serve"])?;
        ensure!(refused.stderr.contains("weft ca init"), "{refused:?}");
        home.weft(&["ca", "init"])?.success()?;
        for (index, host) in [home, replica].into_iter().enumerate() {
            stage.plug_in(host.netns(), &format!("host{index}"), &place(index))?;
            let place = place(index);
            let words = ["openvpn", "serve", "--ping", "1", "--ping-restart", "4"];
            let served = host.weft_json(&[&words[..], &["--remote", &place], options].concat())?;
            ensure!(served["state"] == "serving", "{served}");
        }
        try_wait_until("both gateways to know each other", LIMIT, || {
            let knows = |host: &Host| {
                let gateway = &host.weft_json(&["status"])?["gateway"];
                Ok::<_, anyhow::Error>(gateway["gateways"][0]["state"] == "serving")
            };
            Ok(knows(home).unwrap_or(false) && knows(replica).unwrap_or(false))
        })?;
        Ok(stage)
    }

    fn host(&self, index: usize) -> &Host {
        self.lab.host(index)
    }

    /// Puts a namespace on the network outside.
    fn plug_in(&self, netns: &Netns, name: &str, address: &str) -> anyhow::Result<()> {
        let inside = netns.name();
        self.outside.ip(&format!("link add {name} type veth peer name wan netns {inside}"))?;
        self.outside.ip(&format!("link set {name} up master bridge"))?;
        netns.ip(&format!("addr add {address}/24 dev wan"))?;
        netns.ip("link set wan up")?;
        Ok(())
    }

    fn machine(&self, number: u8) -> anyhow::Result<Machine> {
        let netns = self.lab.sandbox.add_netns(&format!("m{number}"))?;
        self.plug_in(&netns, &format!("m{number}"), &format!("198.51.100.{}", 100 + number))?;
        Ok(Machine(netns))
    }

    /// A new profile, issued by a request to this host.
    fn profile(&self, host: &Host, name: &str) -> anyhow::Result<PathBuf> {
        let text = host.weft(&["openvpn", "client", name])?.success()?.stdout;
        let path = self.lab.sandbox.directory().join(format!("{name}.ovpn"));
        std::fs::write(&path, text)?;
        Ok(path)
    }

    /// The hosts on which a client is connected.
    fn hosts_of(&self, name: &str) -> Vec<usize> {
        let has = |index: &usize| {
            let clients = self.host(*index).weft_json(&["status", "clients"]).unwrap_or_default();
            clients.as_array().is_some_and(|all| all.iter().any(|it| it["name"] == name))
        };
        (0..2).filter(has).collect()
    }

    /// Waits until a client is connected on this host alone.
    fn wait_alone(&self, name: &str, host: usize) -> anyhow::Result<()> {
        try_wait_until(&format!("{name} on host {host} alone"), LIMIT, || {
            Ok(self.hosts_of(name) == [host])
        })?;
        Ok(())
    }
}

/// The address of a host on the network outside.
fn place(host: usize) -> String {
    format!("198.51.100.{}", host + 1)
}

/// The profile with this host's place alone.
fn only(profile: &Path, host: usize) -> anyhow::Result<PathBuf> {
    let (text, other) = (std::fs::read_to_string(profile)?, place(1 - host));
    let lines = text.lines().filter(|line| !line.starts_with(&format!("remote {other} ")));
    let path = profile.with_extension(format!("{host}.ovpn"));
    std::fs::write(&path, lines.map(|line| format!("{line}\n")).collect::<String>())?;
    Ok(path)
}

impl Machine {
    fn connect(&self, profile: &Path) -> anyhow::Result<Client> {
        let mut process = self.start(profile, &[])?;
        let address = connected(&mut process)?;
        Ok(Client { process, address })
    }

    fn start(&self, profile: &Path, options: &[&str]) -> anyhow::Result<Running> {
        let profile = profile.to_string_lossy();
        let words = ["openvpn", "--config", &profile, "--dev", "tun0", "--verb", "3"];
        Ok(self.0.spawn(&[&words[..], options].concat())?)
    }
}

/// Waits until a client is connected; returns its address.
fn connected(process: &mut Running) -> anyhow::Result<Ipv4Addr> {
    let pushed = process.line_with("PUSH_REPLY", LIMIT)?;
    process.line_with(CONNECTED, LIMIT)?;
    let found = pushed.split([',', '\'']).find_map(|option| option.strip_prefix("ifconfig "));
    let word = found.and_then(|rest| rest.split_whitespace().next());
    word.and_then(|word| word.parse().ok()).with_context(|| format!("no address: {pushed}"))
}

/// The gateway of a host, as its status shows it.
fn gateway(host: &Host) -> anyhow::Result<Value> {
    Ok(host.weft_json(&["status"])?["gateway"].clone())
}

#[test]
fn a_client_moves_to_the_other_host_with_its_address_and_back() -> anyhow::Result<()> {
    let stage = Stage::new()?;
    let machine = stage.machine(1)?;
    // The replica has the home issue.
    let profile = stage.profile(stage.host(1), "alice")?;
    let text = std::fs::read_to_string(&profile)?;
    for host in [0, 1] {
        let remote = format!("\nremote {} 1194 udp\n", place(host));
        ensure!(text.contains(&remote), "{remote} is missing");
    }
    let mut alice = machine.connect(&profile)?;
    let [first] = stage.hosts_of("alice")[..] else { anyhow::bail!("alice is nowhere") };
    let (first, second) = (stage.host(first), stage.host(1 - first));
    wait_ping(&stage.container, alice.address.into(), LIMIT)?;

    first.kill_daemon();
    let died = Instant::now();
    ensure!(connected(&mut alice.process)? == alice.address, "another address");
    println!("the client is connected again {} ms after the crash", died.elapsed().as_millis());
    wait_ping(&stage.container, alice.address.into(), LIMIT)?;
    try_wait_until("the other gateway to be away", LIMIT, || {
        Ok(gateway(second).is_ok_and(|it| it["gateways"][0]["state"] == "away"))
    })?;

    // The first one comes back, and the second ends: it says so.
    first.start_daemon(&[])?;
    try_wait_until("the first host to serve again", LIMIT, || {
        Ok(gateway(second).is_ok_and(|it| it["gateways"][0]["state"] == "serving"))
    })?;
    second.weft(&["openvpn", "stop"])?.success()?;
    ensure!(connected(&mut alice.process)? == alice.address, "another address");
    wait_ping(&stage.container, alice.address.into(), LIMIT)?;
    // A new profile names the host alone that serves.
    let text = std::fs::read_to_string(stage.profile(stage.host(1), "bob")?)?;
    ensure!(text.lines().filter(|line| line.starts_with("remote ")).count() == 1, "{text}");
    Ok(())
}

#[test]
fn a_name_has_one_session_and_a_revocation_ends_it_on_all_hosts() -> anyhow::Result<()> {
    let stage = Stage::new()?;
    let (one, two) = (stage.machine(1)?, stage.machine(2)?);
    let profile = stage.profile(stage.host(0), "alice")?;
    let mut at_home = one.connect(&only(&profile, 0)?)?;
    stage.wait_alone("alice", 0)?;
    let mut moved = two.connect(&only(&profile, 1)?)?;
    ensure!(moved.address == at_home.address, "another address at the other host");
    // The host where it was answers no more, before the client there notices.
    stage.wait_alone("alice", 1)?;
    at_home.process.kill();
    wait_ping(&stage.container, moved.address.into(), LIMIT)?;
    let neighbours = stage.host(0).netns().exec(&["ip", "neigh", "show", "proxy"])?.success()?;
    ensure!(!neighbours.stdout.contains(&moved.address.to_string()), "{neighbours:?}");

    // At the home; the session is at the replica.
    let begun = Instant::now();
    stage.host(0).weft(&["openvpn", "revoke", "alice"])?.success()?;
    let clients = |host: usize| stage.host(host).weft_json(&["status", "clients"]);
    try_wait_until("the session to end", LIMIT, || {
        Ok(clients(1).is_ok_and(|all| all.as_array().is_some_and(Vec::is_empty)))
    })?;
    let took = begun.elapsed();
    println!("the session at the replica has ended {} ms after the order", took.as_millis());
    ensure!(took < Duration::from_secs(5) * slowness(), "a revocation took {took:?}");
    moved.process.wait(LIMIT)?;
    let refused = two.connect(&only(&profile, 1)?);
    let refused = refused.err().context("a revoked client is let in")?;
    ensure!(refused.to_string().contains("revoked"), "{refused:#}");

    // At the replica; the session is at the home, and its address is free after that.
    let used = || {
        let ipam = stage.host(0).weft_json(&["status", "ipam"])?;
        let hosts = ipam["hosts"].as_array().context("no hosts")?;
        let own = hosts.iter().find(|it| it["nickname"] == stage.host(0).nickname());
        own.and_then(|own| own["used"].as_u64()).with_context(|| format!("{ipam}"))
    };
    let before = used()?;
    let profile = stage.profile(stage.host(1), "bob")?;
    let mut bob = one.connect(&only(&profile, 0)?)?;
    ensure!(used()? == before + 1, "bob has no address of the home's");
    stage.host(1).weft(&["openvpn", "revoke", "bob"])?.success()?;
    bob.process.wait(LIMIT)?;
    let unknown = stage.host(1).weft(&["openvpn", "revoke", "bob"])?;
    ensure!(unknown.status.code() == Some(4), "{unknown:?}");
    try_wait_until(
        "bob's address to be free",
        LIMIT,
        || Ok(used().is_ok_and(|now| now == before)),
    )?;
    Ok(())
}

#[test]
fn a_replica_serves_while_its_home_is_away_and_a_second_authority_is_named() -> anyhow::Result<()> {
    let stage = Stage::new()?;
    let (home, replica) = (stage.host(0), stage.host(1));
    let machine = stage.machine(1)?;
    let profile = only(&stage.profile(home, "alice")?, 1)?;
    let mut alice = machine.connect(&profile)?;
    let shown = gateway(replica)?;
    ensure!(shown["authority"]["is_here"] == false, "{shown}");
    ensure!(shown["authority"]["is_linked"] == true, "{shown}");
    ensure!(shown["authority"]["name"] == home.nickname(), "{shown}");
    ensure!(shown["addresses_agreed_by"] == "first-host", "{shown}");
    let files = [
        "openvpn-replica.json",
        "openvpn-replica-users.json",
        "openvpn-replica-token-key.json",
        "openvpn-peers.json",
        "openvpn-addresses.json",
    ];
    for file in files {
        let path = replica.state_directory().join(file);
        try_wait_until(&format!("{file} to be there"), LIMIT, || Ok(path.exists()))?;
        let mode =
            std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(&path)?.permissions());
        ensure!(mode & 0o777 == 0o600, "{file}: {mode:o}");
    }
    let text = |host: &Host, file: &str| std::fs::read_to_string(host.state_directory().join(file));
    let own: Value = serde_json::from_str(&text(home, "openvpn-authority.json")?)?;
    let key = own["key"].as_str().context("no key")?;
    let taken: Value = serde_json::from_str(&text(replica, "openvpn-replica.json")?)?;
    ensure!(taken["key"].is_null() && taken["server_key"].is_string(), "{taken}");
    ensure!(!taken.to_string().contains(key), "the replica has the authority's private key");

    // The home goes, and the replica starts anew.
    home.stop_daemon()?;
    replica.stop_daemon()?;
    alice.process.line_with("SIGUSR1", LIMIT)?;
    replica.start_daemon(&[])?;
    ensure!(connected(&mut alice.process)? == alice.address, "another address");
    wait_ping(&stage.container, alice.address.into(), LIMIT)?;
    let shown = gateway(replica)?;
    ensure!(shown["authority"]["is_linked"] == false, "{shown}");
    ensure!(shown["authority"]["as_of"].as_str().is_some_and(|it| it.starts_with("20")), "{shown}");
    let status = replica.weft(&["status"])?.success()?.stdout;
    ensure!(status.contains("which is not linked; as of 20"), "{status}");
    for words in [["openvpn", "client", "bob"], ["openvpn", "revoke", "alice"]] {
        let refused = replica.weft(&words)?;
        let named =
            refused.stderr.contains(&home.nickname()) && refused.stderr.contains("not linked");
        ensure!(refused.status.code() != Some(0) && named, "{refused:?}");
    }

    // A third host makes an authority of its own.
    home.start_daemon(&[])?;
    stage.lab.wait_active()?;
    let third = stage.host(2);
    third.weft(&["ca", "init"])?.success()?;
    for (host, other) in [(home, third), (third, home), (replica, third)] {
        let named = format!("host {} has another certificate authority", other.nickname());
        try_wait_until(&format!("{named}, at {}", host.nickname()), LIMIT, || {
            let status = host.weft_json(&["status"]).unwrap_or_default();
            Ok(status["warnings"].to_string().contains(&named))
        })?;
    }
    // Each keeps its own; the replica keeps that of the first, and takes its word again.
    ensure!(third.state_directory().join("openvpn-authority.json").exists());
    ensure!(serde_json::from_str::<Value>(&text(home, "openvpn-authority.json")?)? == own);
    ensure!(gateway(replica)?["authority"]["name"] == home.nickname());
    replica.weft(&["openvpn", "revoke", "alice"])?.success()?;
    alice.process.wait(LIMIT)?;
    Ok(())
}

const PASSWORD: &str = "correct horse";

/// `weft openvpn user` with a password.
fn user(host: &Host, words: &[&str], password: &str) -> anyhow::Result<Value> {
    let words = [&["openvpn", "user"][..], words, &["--json"]].concat();
    Ok(host.weft_with_input(&words, &format!("{password}\n"))?.success()?.json()?)
}

/// Waits until a host has these users.
fn wait_users(host: &Host, names: &[&str]) -> anyhow::Result<()> {
    try_wait_until(&format!("users {names:?} at {}", host.nickname()), LIMIT, || {
        let all = host.weft_json(&["openvpn", "user", "ls"]).unwrap_or_default();
        let all = all.as_array().cloned().unwrap_or_default();
        Ok(all.iter().map(|it| it["name"].as_str().unwrap_or_default()).eq(names.iter().copied()))
    })?;
    Ok(())
}

#[test]
fn a_login_is_good_on_all_hosts_and_a_removed_user_is_out_on_all() -> anyhow::Result<()> {
    require("python3", "python3")?;
    let stage = Stage::serving(&["--auth", "password"])?;
    let (home, replica) = (stage.host(0), stage.host(1));
    let (one, two) = (stage.machine(1)?, stage.machine(2)?);
    // The replica has the home add them.
    let added = user(replica, &["add", "anna", "--totp"], PASSWORD)?;
    let otpauth = added["otpauth"].as_str().context("no secret")?;
    user(home, &["add", "berta"], PASSWORD)?;
    for host in [home, replica] {
        wait_users(host, &["anna", "berta"])?;
    }
    let again = replica.weft_with_input(&["openvpn", "user", "add", "anna"], PASSWORD)?;
    ensure!(again.status.code() == Some(5), "{again:?}");
    // Both places, the home's first.
    let text = replica.weft(&["openvpn", "client", "--shared"])?.success()?.stdout;
    let rest = text.lines().filter(|line| !line.starts_with("remote "));
    let mut profile: String = rest.map(|line| format!("{line}\n")).collect();
    for host in [0, 1] {
        ensure!(text.contains(&format!("\nremote {} 1194 udp\n", place(host))), "{text}");
        profile.push_str(&format!("remote {} 1194 udp\n", place(host)));
    }
    let directory = stage.lab.sandbox.directory();
    let path = directory.join("office.ovpn");
    std::fs::write(&path, profile)?;
    let file = |name: &str, password: &str| -> anyhow::Result<String> {
        let path = directory.join(format!("{name}.login"));
        std::fs::write(&path, format!("{name}\n{password}\n"))?;
        Ok(path.to_string_lossy().into_owned())
    };

    // The password with a code, which a client has once alone: both are gone when it comes again.
    let with_code = format!("SCRV1:{}:{}", base64(PASSWORD)?, base64(&totp_code(otpauth)?)?);
    let login = file("anna", &with_code)?;
    let mut anna = one.start(&path, &["--auth-user-pass", &login, "--auth-nocache"])?;
    let address = connected(&mut anna)?;
    ensure!(stage.hosts_of("anna") == [0], "{:?}", stage.hosts_of("anna"));
    file("anna", "wrong horse")?;
    home.kill_daemon();
    ensure!(connected(&mut anna)? == address, "another address");
    ensure!(stage.hosts_of("anna") == [1], "{:?}", stage.hosts_of("anna"));
    wait_ping(&stage.container, address.into(), LIMIT)?;
    let refused = replica.weft(&["openvpn", "user", "rm", "anna"])?;
    ensure!(refused.stderr.contains(&home.nickname()), "{refused:?}");

    // Removed at the home; the session is at the replica.
    home.start_daemon(&[])?;
    stage.lab.wait_active()?;
    try_wait_until("the hosts to know each other again", LIMIT, || {
        let is_serving =
            |host| gateway(host).is_ok_and(|it| it["gateways"][0]["state"] == "serving");
        Ok(is_serving(home) && is_serving(replica))
    })?;
    let begun = Instant::now();
    home.weft(&["openvpn", "user", "rm", "anna"])?.success()?;
    try_wait_until("the session to end", LIMIT, || Ok(stage.hosts_of("anna").is_empty()))?;
    let took = begun.elapsed();
    println!("the session at the replica has ended {} ms after the order", took.as_millis());
    ensure!(took < Duration::from_secs(5) * slowness(), "a removal took {took:?}");
    anna.line_with("user removed", LIMIT)?;
    anna.wait(LIMIT)?;
    wait_users(replica, &["berta"])?;
    let only = only(&path, 1)?;
    let refused = |name: &str, password: &str| -> anyhow::Result<()> {
        let login = file(name, password)?;
        let mut client = two.start(&only, &["--auth-user-pass", &login])?;
        client.line_with("AUTH_FAILED,Wrong user name or password", LIMIT)?;
        client.wait(LIMIT)?;
        Ok(())
    };
    refused("anna", PASSWORD)?;

    // Another password, set at the replica; the session is at the home.
    let login = file("berta", PASSWORD)?;
    let mut berta = two.start(&path, &["--auth-user-pass", &login])?;
    connected(&mut berta)?;
    ensure!(stage.hosts_of("berta") == [0], "{:?}", stage.hosts_of("berta"));
    let changed = user(replica, &["passwd", "berta"], "battery staple")?;
    ensure!(changed["was_connected"] == true, "{changed}");
    berta.line_with("AUTH_FAILED,Wrong user name or password", LIMIT)?;
    berta.wait(LIMIT)?;
    let login = file("berta", "battery staple")?;
    let mut berta = two.start(&only, &["--auth-user-pass", &login])?;
    connected(&mut berta)?;
    Ok(())
}

#[test]
fn the_authority_moves_to_another_host_and_comes_back_by_a_backup() -> anyhow::Result<()> {
    let stage = Stage::serving(&["--auth", "both", "--client-name", "certificate"])?;
    let (old, new) = (stage.host(0), stage.host(1));
    let file = |host: &Host, name: &str| host.state_directory().join(name);
    let backup = stage.lab.sandbox.directory().join("backup.json");
    std::fs::copy(file(old, "openvpn-authority.json"), &backup)?;
    user(old, &["add", "anna"], PASSWORD)?;
    let profile = stage.profile(old, "alice")?;
    let login = stage.lab.sandbox.directory().join("anna.login");
    std::fs::write(&login, format!("anna\n{PASSWORD}\n"))?;
    let login = ["--auth-user-pass", &login.to_string_lossy()].map(str::to_owned);
    let login = login.each_ref().map(String::as_str);
    let machine = stage.machine(1)?;
    let mut alice = machine.start(&only(&profile, 0)?, &login)?;
    connected(&mut alice)?;

    for (host, to, text) in [
        (new, old.nickname(), "run this there"),
        (old, "nowhere".to_owned(), "no host nowhere that is linked"),
    ] {
        let refused = host.weft(&["ca", "move", &to])?;
        ensure!(refused.status.code() == Some(5) && refused.stderr.contains(text), "{refused:?}");
    }
    let key = |host: &Host| -> anyhow::Result<bool> {
        let Ok(text) = std::fs::read_to_string(file(host, "openvpn-authority.json")) else {
            return Ok(false);
        };
        Ok(serde_json::from_str::<Value>(&text)?["key"].is_string())
    };
    let moved = old.weft_json(&["ca", "move", &new.nickname()])?;
    ensure!(moved["home"] == new.nickname(), "{moved}");
    ensure!(key(new)? && !file(old, "openvpn-authority.json").exists(), "the key is elsewhere");
    let path = file(new, "openvpn-authority.json");
    let mode = std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(path)?.permissions());
    ensure!(mode & 0o777 == 0o600, "{mode:o}");
    let replica = std::fs::read_to_string(file(old, "openvpn-replica.json"))?;
    ensure!(serde_json::from_str::<Value>(&replica)?["key"].is_null(), "the key has stayed");
    ensure!(gateway(old)?["authority"]["name"] == new.nickname(), "{}", gateway(old)?);
    ensure!(gateway(new)?["authority"]["is_here"] == true, "{}", gateway(new)?);
    // Nobody was disturbed, and both go on as before, the other way round.
    ensure!(stage.hosts_of("alice") == [0], "{:?}", stage.hosts_of("alice"));
    user(old, &["add", "berta"], PASSWORD)?;
    for host in [old, new] {
        wait_users(host, &["anna", "berta"])?;
    }
    stage.profile(old, "bob")?;
    old.weft(&["openvpn", "revoke", "alice"])?.success()?;
    alice.wait(LIMIT)?;
    // A restart changes nothing.
    old.stop_daemon()?;
    old.start_daemon(&[])?;
    stage.lab.wait_active()?;
    try_wait_until("the old home to follow the new one", LIMIT, || {
        Ok(gateway(old).is_ok_and(|it| it["authority"]["is_linked"] == true))
    })?;
    ensure!(gateway(old)?["authority"]["name"] == new.nickname(), "{}", gateway(old)?);
    let early = old.weft(&["ca", "restore", &backup.to_string_lossy()])?;
    ensure!(
        early.status.code() == Some(5) && early.stderr.contains("run weft ca move"),
        "{early:?}"
    );

    // The new home is lost.
    new.kill_daemon();
    try_wait_until("the home to be away", LIMIT, || {
        Ok(gateway(old).is_ok_and(|it| it["authority"]["is_linked"] == false))
    })?;
    let none = old.weft(&["ca", "restore", &profile.to_string_lossy()])?;
    ensure!(none.status.code() == Some(2), "{none:?}");
    old.weft(&["ca", "restore", &backup.to_string_lossy()])?.success()?;
    ensure!(gateway(old)?["authority"]["is_here"] == true, "{}", gateway(old)?);
    let again = old.weft(&["ca", "restore", &backup.to_string_lossy()])?;
    ensure!(again.status.code() == Some(5), "{again:?}");
    // The backup does not know of the revocation, but this host does.
    let mut refused = machine.start(&only(&profile, 0)?, &login)?;
    refused.line_with("AUTH_FAILED,The certificate is revoked", LIMIT)?;
    refused.wait(LIMIT)?;
    let profile = stage.profile(old, "carol")?;
    let mut carol = machine.start(&profile, &login)?;
    connected(&mut carol)?;
    wait_users(old, &["anna", "berta"])?;
    // The lost one comes back after all.
    new.start_daemon(&[])?;
    for (host, other) in [(old, new), (new, old)] {
        let named = format!("host {} has the private key of the same", other.nickname());
        try_wait_until(&format!("{named}, at {}", host.nickname()), LIMIT, || {
            let status = host.weft_json(&["status"]).unwrap_or_default();
            Ok(status["warnings"].to_string().contains(&named))
        })?;
    }
    Ok(())
}

/// Base64 by a program that is not ours.
fn base64(text: &str) -> anyhow::Result<String> {
    let script = "import base64, sys; print(base64.b64encode(sys.argv[1].encode()).decode())";
    let output = std::process::Command::new("python3").args(["-c", script, text]).output()?;
    Ok(String::from_utf8(output.stdout)?.trim().to_owned())
}
