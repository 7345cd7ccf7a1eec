//! Names of containers over real hosts, judged by dig, by glibc's resolver and by musl's.

use std::fs::{self, Permissions};
use std::net::Ipv4Addr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use tempfile::TempDir;
use weft_bench::sandbox::progress::note;
use weft_bench::sandbox::{
    Container, Host, Output, Running, SandboxError, require, try_wait_until,
};
use weft_lab::net::{Lab, counter, wait_ping};

/// The hosts' own addresses on the network, which `weft expose` will give; high in the range, where no container is.
const SERVERS: [Ipv4Addr; 2] = [Ipv4Addr::new(10, 47, 255, 1), Ipv4Addr::new(10, 47, 255, 2)];
const LIMIT: Duration = Duration::from_secs(10);
/// From attach to resolvable on all hosts.
const KNOWN_LIMIT: Duration = Duration::from_secs(1);

/// Two hosts that answer DNS on an address of the network, and a container of each.
fn pair() -> anyhow::Result<(Lab, Container, Container)> {
    require("dig", "bind9-dnsutils")?;
    let listen = SERVERS.map(|address| address.to_string()).join(",");
    let lab = Lab::pair(&["--dns-listen", &listen])?;
    for (index, server) in SERVERS.iter().enumerate() {
        lab.host(index).netns().ip(&format!("address add {server}/12 dev weft"))?.success()?;
    }
    let (one, two) = lab.containers()?;
    wait_ping(&one, SERVERS[0].into(), LIMIT)?;
    wait_ping(&two, SERVERS[1].into(), LIMIT)?;
    for (from, server) in [(&one, SERVERS[0]), (&two, SERVERS[1])] {
        wait_served(from, server)?;
    }
    Ok((lab, one, two))
}

/// The output of dig for these words, asked of one host's server.
fn dig(from: &Container, server: Ipv4Addr, words: &[&str]) -> Result<String, SandboxError> {
    let server = format!("@{server}");
    let fixed = ["dig", "+time=2", "+tries=2", server.as_str()];
    Ok(from.exec(&[&fixed, words].concat())?.success()?.stdout)
}

/// The short answers of dig, sorted.
fn short(from: &Container, server: Ipv4Addr, words: &[&str]) -> Result<Vec<String>, SandboxError> {
    let text = dig(from, server, &[&["+short"], words].concat())?;
    let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
    lines.sort_unstable();
    Ok(lines)
}

/// The name of a container, which is that of its namespace.
fn name_of(container: &Container) -> String {
    container.netns().name().to_owned()
}

fn full(container: &Container) -> String {
    format!("{}.weft.local", name_of(container))
}

/// Waits until a host serves DNS there: it looks once a second whether it has the address by now.
fn wait_served(from: &Container, server: Ipv4Addr) -> Result<(), SandboxError> {
    try_wait_until(&format!("DNS at {server}"), LIMIT, || {
        Ok(dig(from, server, &["weft.local", "SOA"]).is_ok_and(|text| text.contains("SOA")))
    })
    .map(drop)
}

fn wait_short(
    from: &Container,
    server: Ipv4Addr,
    words: &[&str],
    wanted: &[String],
    limit: Duration,
) -> anyhow::Result<Duration> {
    let begun = Instant::now();
    let what = format!("{words:?} to be {wanted:?}");
    try_wait_until(&what, limit, || Ok(short(from, server, words)? == wanted))?;
    Ok(begun.elapsed())
}

#[test]
fn each_host_answers_for_the_containers_of_all() -> anyhow::Result<()> {
    let (lab, one, two) = pair()?;
    for (from, server) in [(&one, SERVERS[0]), (&two, SERVERS[1])] {
        for of in [&one, &two] {
            let name = name_of(of);
            let (v4, v6) = (of.ipv4()?.to_string(), of.ipv6()?.to_string());
            for text in
                [name.clone(), format!("{name}.weft.local"), format!("{name}.weft.weft.local")]
            {
                wait_short(from, server, &[&text, "A"], std::slice::from_ref(&v4), LIMIT)?;
                wait_short(from, server, &[&text, "AAAA"], std::slice::from_ref(&v6), LIMIT)?;
            }
            for address in [&v4, &v6] {
                wait_short(
                    from,
                    server,
                    &["-x", address],
                    &[format!("{name}.weft.local.")],
                    LIMIT,
                )?;
            }
        }
        let text = dig(from, server, &["C2.Weft.LOCAL", "A"])?;
        ensure!(text.contains("C2.Weft.LOCAL."), "the letter case is changed: {text}");
        let text = dig(from, server, &[&full(&two), "MX"])?;
        ensure!(text.contains("status: NOERROR") && text.contains("SOA"), "{text}");
        let text = dig(from, server, &["none.weft.local", "A"])?;
        ensure!(text.contains("status: NXDOMAIN") && text.contains("SOA"), "{text}");
        let text = dig(from, server, &["+edns=1", "+noednsneg", &full(&two)])?;
        ensure!(text.contains("status: BADVERS"), "{text}");
        let text = dig(from, server, &[&full(&two), "ANY"])?;
        ensure!(text.contains("RFC8482"), "{text}");
    }
    // One connection, many queries.
    let text = dig(
        &one,
        SERVERS[0],
        &["+tcp", "+keepopen", "+short", &name_of(&one), &name_of(&two), &full(&one)],
    )?;
    ensure!(text.lines().count() == 3, "{text}");
    ensure!(counter(lab.host(0), "dns_answered")? > 0, "nothing is counted");
    Ok(())
}

#[test]
fn a_new_container_is_known_everywhere_in_a_second_and_a_gone_one_no_more() -> anyhow::Result<()> {
    let (lab, one, _two) = pair()?;
    let three = lab.host(1).add_container("c3")?;
    let address = three.ipv4()?.to_string();
    let took = wait_short(&one, SERVERS[0], &[&name_of(&three)], &[address], KNOWN_LIMIT)?;
    note(&format!("known on the other host after {took:?}"));
    lab.host(1).weft(&["detach", &format!("netns:{}", three.netns().name())])?.success()?;
    wait_short(&one, SERVERS[0], &[&full(&three)], &[], KNOWN_LIMIT)?;
    Ok(())
}

#[test]
fn names_given_by_hand_outlive_a_restart_and_end_with_their_removal() -> anyhow::Result<()> {
    let (lab, one, two) = pair()?;
    let (first, second) = (lab.host(0), lab.host(1));
    second
        .weft(&["dns-add", "db", "192.0.2.5", "192.0.2.6", "--srv", "sql/tcp:5432"])?
        .success()?;
    let both = ["192.0.2.5", "192.0.2.6"].map(str::to_owned);
    wait_short(&one, SERVERS[0], &["db"], &both, KNOWN_LIMIT)?;
    let service = ["0 0 5432 db.weft.local.".to_owned()];
    wait_short(&two, SERVERS[1], &["_sql._tcp.db.weft.local", "SRV"], &service, KNOWN_LIMIT)?;
    let looked_up = first.weft_json(&["dns-lookup", "db"])?;
    ensure!(looked_up.as_array().is_some_and(|it| it.len() == 2), "{looked_up}");
    ensure!(looked_up[0]["source"] == "added" && looked_up[0]["local"] == false, "{looked_up}");
    second.kill_daemon();
    second.start_daemon(&["--dns-listen", &SERVERS[1].to_string()])?;
    wait_short(&one, SERVERS[0], &["db"], &both, LIMIT)?;
    second.weft(&["dns-remove", "db", "192.0.2.5"])?.success()?;
    wait_short(&one, SERVERS[0], &["db"], &both[1..], KNOWN_LIMIT)?;
    let refused = first.weft(&["dns-remove", "db"])?;
    ensure!(
        refused.status.code() == Some(4) && refused.stderr.contains("dns-lookup db"),
        "{refused:?}"
    );
    second.weft(&["dns-remove", "db"])?.success()?;
    wait_short(&one, SERVERS[0], &["db.weft.local"], &[], KNOWN_LIMIT)?;
    Ok(())
}

#[test]
fn names_of_a_host_that_died_end() -> anyhow::Result<()> {
    let (lab, one, two) = pair()?;
    wait_short(&one, SERVERS[0], &[&name_of(&two)], &[two.ipv4()?.to_string()], LIMIT)?;
    lab.host(1).kill_daemon();
    lab.host(1).netns().ip("link set eth0 down")?.success()?;
    // The link's end is noticed after 8 s, and names outlive it by 15 s.
    wait_short(&one, SERVERS[0], &[&full(&two)], &[], Duration::from_secs(30))?;
    let text = dig(&one, SERVERS[0], &[&full(&two)])?;
    ensure!(text.contains("status: NXDOMAIN"), "{text}");
    Ok(())
}

#[test]
fn many_addresses_are_cut_by_udp_and_whole_by_tcp() -> anyhow::Result<()> {
    let (lab, one, _two) = pair()?;
    for host in 0..2 {
        for part in 0..4_u8 {
            let addresses: Vec<String> =
                (1..=16).map(|n| format!("192.0.{part}.{}", n + host * 16)).collect();
            let name = format!("many{part}");
            let words: Vec<&str> = ["dns-add", &name]
                .into_iter()
                .chain(addresses.iter().map(String::as_str))
                .collect();
            lab.host(host).weft(&words)?.success()?;
        }
    }
    let count = |words: &[&str]| -> Result<usize, SandboxError> {
        Ok(short(&one, SERVERS[0], words)?.len())
    };
    try_wait_until("all addresses", LIMIT, || Ok(count(&["+tcp", "many0"])? == 32))?;
    let plain = dig(&one, SERVERS[0], &["+noedns", "+ignore", "many0"])?;
    let size = plain
        .lines()
        .find_map(|line| line.strip_prefix(";; MSG SIZE  rcvd: "))
        .context("a size")?;
    ensure!(size.parse::<usize>()? <= 512 && plain.contains(" tc "), "{plain}");
    ensure!(count(&["+noedns", "many0"])? == 32, "dig asks again by TCP");
    ensure!(count(&["+bufsize=1232", "+ignore", "many0"])? == 32, "fits a longer datagram");
    Ok(())
}

/// A program that prints the addresses of a name as libc gives them, or its error; built with a libc's compiler.
const RESOLVE: &str = r#"
#include <netdb.h>
#include <stdio.h>
#include <arpa/inet.h>
int main(int argc, char **argv) {
    struct addrinfo hints = { .ai_socktype = SOCK_STREAM }, *found, *it;
    char text[INET6_ADDRSTRLEN];
    if (argc < 2) return 2;
    int error = getaddrinfo(argv[1], NULL, &hints, &found);
    if (error) { printf("%s\n", gai_strerror(error)); return 1; }
    for (it = found; it; it = it->ai_next) {
        const void *address = it->ai_family == AF_INET
            ? (void *)&((struct sockaddr_in *)it->ai_addr)->sin_addr
            : (void *)&((struct sockaddr_in6 *)it->ai_addr)->sin6_addr;
        printf("%s\n", inet_ntop(it->ai_family, address, text, sizeof text));
    }
    return 0;
}
"#;

fn resolver(lab: &Lab, compiler: &'static str, package: &'static str) -> anyhow::Result<PathBuf> {
    require(compiler, package)?;
    let source = lab.sandbox.directory().join("resolve.c");
    let program = lab.sandbox.directory().join(format!("resolve-{compiler}"));
    fs::write(&source, RESOLVE)?;
    let built = Command::new(compiler).arg("-o").arg(&program).arg(&source).status()?;
    ensure!(built.success(), "{compiler} does not build the resolver");
    Ok(program)
}

/// The answer of a libc's resolver for a name, with this resolv.conf.
fn resolved(
    lab: &Lab,
    from: &Container,
    program: &Path,
    conf: &str,
    name: &str,
) -> anyhow::Result<(bool, Vec<String>, Duration)> {
    let file = lab.sandbox.directory().join("resolv.conf");
    fs::write(&file, conf)?;
    let script = "mount --bind \"$1\" /etc/resolv.conf && exec \"$2\" \"$3\"";
    let words =
        [Path::new("sh"), file.as_path(), program].map(|path| path.to_string_lossy().into_owned());
    let begun = Instant::now();
    let output =
        from.exec(&["unshare", "-m", "sh", "-c", script, &words[0], &words[1], &words[2], name])?;
    let mut lines: Vec<String> = output.stdout.lines().map(str::to_owned).collect();
    lines.sort_unstable();
    Ok((output.status.success(), lines, begun.elapsed()))
}

#[test]
fn glibc_and_musl_resolve_names_through_their_search_lists() -> anyhow::Result<()> {
    let (lab, one, two) = pair()?;
    lab.host(1).weft(&["dns-add", "four", "192.0.2.4"])?.success()?;
    wait_short(&one, SERVERS[0], &["four"], &["192.0.2.4".to_owned()], LIMIT)?;
    let server = format!("nameserver {}\n", SERVERS[0]);
    let confs = [
        server.clone(),
        format!("search weft.local\n{server}"),
        // The name is in the last domain, and the one before has none like it.
        format!("search none.weft.local weft.local\noptions ndots:5\n{server}"),
        format!("{server}nameserver {}\n", SERVERS[1]),
    ];
    for (compiler, package) in [("cc", "gcc"), ("musl-gcc", "musl-tools")] {
        let program = resolver(&lab, compiler, package)?;
        let mut both = vec![two.ipv4()?.to_string(), two.ipv6()?.to_string()];
        both.sort_unstable();
        for conf in &confs {
            for name in [name_of(&two), full(&two)] {
                let (found, lines, _) = resolved(&lab, &one, &program, conf, &name)?;
                ensure!(found && lines == both, "{compiler} {name} with {conf:?}: {lines:?}");
            }
            // A name with IPv4 alone, asked for both: no wait for the other family.
            let (found, lines, took) = resolved(&lab, &one, &program, conf, "four")?;
            ensure!(found && lines == ["192.0.2.4"], "{compiler} four with {conf:?}: {lines:?}");
            note(&format!("{compiler} resolved four in {took:?}"));
            let (found, lines, _) = resolved(&lab, &one, &program, conf, "nobody.weft.local")?;
            ensure!(!found, "{compiler} nobody with {conf:?}: {lines:?}");
        }
    }
    Ok(())
}

#[test]
fn a_server_that_is_weft_itself_is_named_and_never_asked() -> anyhow::Result<()> {
    let (lab, _one, two) = pair()?;
    let host: &Host = lab.host(1);
    host.stop_daemon()?;
    let own = SERVERS[1].to_string();
    host.start_daemon(&["--dns-listen", &own, "--dns-upstream", &own])?;
    try_wait_until("the warning", LIMIT, || {
        let status = host.weft_json(&["status"])?;
        let warnings = status["warnings"].as_array().cloned().unwrap_or_default();
        Ok(warnings.iter().any(|it| it.as_str().is_some_and(|it| it.contains("weft itself"))))
    })?;
    let text = dig(&two, SERVERS[1], &["www.example.org"])?;
    ensure!(text.contains("status: SERVFAIL"), "{text}");
    wait_short(&two, SERVERS[1], &[&name_of(&two)], &[two.ipv4()?.to_string()], LIMIT)?;
    Ok(())
}

/// Adds the user of systemd-resolved and runs a program. The bus has to know this user too.
const WITH_USER: &str = "for table in passwd group; do
    file=$1/$table
    [ -e $file ] || cp /etc/$table $file
    grep -q ^systemd-resolve: $file || case $table in
        passwd) echo systemd-resolve:x:991:991::/:/usr/sbin/nologin ;;
        group) echo systemd-resolve:x:991: ;;
    esac >> $file
    mount --bind $file /etc/$table || exit 1
done
shift && exec \"$@\"";
/// Starts systemd-resolved with a separate /run.
const RESOLVED: &str = "mount -t tmpfs -o mode=755 tmpfs /run && mkdir -p /run/systemd/resolve &&
chown systemd-resolve: /run/systemd/resolve && exec systemd-resolved";

/// A host with a message bus and with systemd-resolved.
struct Resolver<'a> {
    host: &'a Host,
    variable: String,
    /// The directory of its tables of users and groups.
    users: String,
    _bus: (Running, TempDir),
    resolved: Option<Running>,
}

impl<'a> Resolver<'a> {
    fn start(lab: &Lab, host: &'a Host) -> anyhow::Result<Self> {
        for program in ["systemd-resolved", "resolvectl"] {
            require(program, "systemd-resolved")?;
        }
        require("dbus-daemon", "dbus-daemon")?;
        let directory = lab.sandbox.directory();
        let config = directory.join("bus.conf");
        // Outside /run, which systemd-resolved sees empty. The daemon's sandbox forbids abstract sockets.
        let place = tempfile::tempdir()?;
        fs::set_permissions(place.path(), Permissions::from_mode(0o755))?;
        let socket = place.path().join("bus");
        let address = format!("unix:path={}", socket.display());
        fs::write(
            &config,
            format!(
                "<busconfig><type>system</type><listen>{address}</listen><auth>EXTERNAL</auth>\
                 <policy context='default'><allow user='*'/><allow own='*'/>\
                 <allow send_destination='*' eavesdrop='true'/><allow eavesdrop='true'/>\
                 </policy></busconfig>"
            ),
        )?;
        let file = format!("--config-file={}", config.display());
        let users = directory.to_string_lossy().into_owned();
        let with_user = ["unshare", "-m", "sh", "-c", WITH_USER, "sh", &users];
        let words = ["dbus-daemon", "--nofork", "--nopidfile", &file];
        let bus = host.netns().spawn(&[&with_user[..], &words].concat())?;
        try_wait_until("the bus", LIMIT, || Ok(socket.exists()))?;
        let variable = format!("DBUS_SYSTEM_BUS_ADDRESS={address}");
        let mut resolver = Self { host, variable, users, _bus: (bus, place), resolved: None };
        resolver.restart()?;
        Ok(resolver)
    }

    /// Starts systemd-resolved, in place of the one that runs.
    fn restart(&mut self) -> anyhow::Result<()> {
        self.resolved = None;
        let with_user = ["unshare", "-m", "sh", "-c", WITH_USER, "sh", &self.users];
        let words = [&["env", &self.variable], &with_user[..], &["sh", "-c", RESOLVED]].concat();
        self.resolved = Some(self.host.netns().spawn(&words)?);
        try_wait_until("systemd-resolved", LIMIT, || Ok(self.ctl(&["status"])?.status.success()))?;
        Ok(())
    }

    fn ctl(&self, words: &[&str]) -> Result<Output, SandboxError> {
        let fixed = ["env", &self.variable, "resolvectl", "--no-pager"];
        self.host.netns().exec(&[&fixed, words].concat())
    }

    fn address(&self) -> (&str, &str) {
        self.variable.split_once('=').unwrap_or_default()
    }
}

#[test]
fn the_host_itself_knows_the_names_through_systemd_resolved() -> anyhow::Result<()> {
    let (lab, _one, two) = pair()?;
    let host: &Host = lab.host(0);
    host.stop_daemon()?;
    let mut resolver = Resolver::start(&lab, host)?;
    let own = SERVERS[0].to_string();
    host.start_daemon_with(&["--dns-listen", &own], &[resolver.address()])?;
    let told = format!("systemd-resolved asks {own} for weft.local");
    let wait_told = || {
        let last = std::cell::RefCell::default();
        let told = try_wait_until("systemd-resolved to be told", LIMIT, || {
            *last.borrow_mut() = host.weft_json(&["status"])?["host_dns"].clone();
            Ok(*last.borrow() == told.as_str())
        });
        told.with_context(|| format!("at last: {}", last.borrow()))
    };
    wait_told()?;
    let address = two.ipv4()?.to_string();
    let wait_found = |resolver: &Resolver<'_>| {
        try_wait_until("a name of the other host", LIMIT, || {
            Ok(resolver.ctl(&["query", &full(&two)])?.stdout.contains(&address))
        })
    };
    wait_found(&resolver)?;
    let none = resolver.ctl(&["query", "nobody.weft.local"])?;
    ensure!(!none.status.success() && none.stderr.contains("not found"), "{none:?}");
    // Other names are not asked of Weft.
    let before = counter(host, "dns_forwarded")?;
    resolver.ctl(&["query", "www.example.org"])?;
    ensure!(counter(host, "dns_forwarded")? == before, "a foreign name came to Weft");
    // It has forgotten everything when it starts again.
    resolver.restart()?;
    wait_found(&resolver)?;
    host.stop_daemon()?;
    let servers = resolver.ctl(&["dns", "weft"])?.success()?.stdout;
    ensure!(!servers.contains(&own), "still told after the end: {servers}");

    // An address of `weft expose` does by itself, once that by hand is gone.
    host.netns().ip(&format!("address del {own}/12 dev weft"))?.success()?;
    host.start_daemon_with(&[], &[resolver.address()])?;
    host.weft(&["expose"])?.success()?;
    wait_found(&resolver)?;
    let settings = resolver.ctl(&["status", "weft-host"])?.success()?.stdout;
    ensure!(settings.contains("-LLMNR") && settings.contains("-mDNS"), "{settings}");

    // Names of another network, once the host is exposed to it.
    let far = lab.host(1);
    far.weft(&["network", "create", "shop"])?.success()?;
    far.weft(&["dns-add", "--network", "shop", "till", "10.134.7.7"])?.success()?;
    let till = ["query", "till.shop.weft.local"];
    ensure!(!resolver.ctl(&till)?.status.success(), "known although the host is not exposed");
    try_wait_until("the network to be known", LIMIT, || {
        Ok(host.weft(&["expose", "--network", "shop"])?.status.success())
    })?;
    try_wait_until("a name of network shop", LIMIT, || {
        Ok(resolver.ctl(&till)?.stdout.contains("10.134.7.7"))
    })?;
    wait_found(&resolver)?;
    Ok(())
}

#[test]
fn an_exposed_host_answers_dns_and_is_known_by_its_name() -> anyhow::Result<()> {
    require("dig", "bind9-dnsutils")?;
    let lab = Lab::pair(&[])?;
    let (one, two) = lab.containers()?;
    let exposed = lab.host(0).weft_json(&["expose"])?;
    let first = exposed["addresses"][0].as_str().unwrap_or_default();
    let server: Ipv4Addr = first.split('/').next().unwrap_or_default().parse()?;
    wait_served(&one, server)?;
    wait_served(&two, server)?;
    wait_short(&two, server, &[&name_of(&one)], &[one.ipv4()?.to_string()], LIMIT)?;
    wait_short(&two, server, &[&lab.host(0).nickname()], &[server.to_string()], LIMIT)?;
    lab.host(0).weft(&["expose", "--name", "front"])?.success()?;
    wait_short(&two, server, &["front"], &[server.to_string()], LIMIT)?;
    lab.host(0).weft(&["hide"])?.success()?;
    try_wait_until("no socket to be open for DNS", LIMIT, || {
        let open = lab.host(0).netns().exec(&["ss", "-Hlnut", "sport", "=", ":53"])?.success()?;
        Ok(open.stdout.trim().is_empty())
    })?;
    Ok(())
}

#[test]
fn a_host_in_a_namespace_leaves_the_machines_resolver_alone() -> anyhow::Result<()> {
    let (lab, _one, _two) = pair()?;
    let status = lab.host(0).weft_json(&["status"])?;
    let how = status["host_dns"].as_str().unwrap_or_default();
    ensure!(how.contains("separate network namespace"), "{status}");
    Ok(())
}
