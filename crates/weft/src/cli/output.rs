//! Text for people, JSON for scripts; a closed pipe ends the output quietly.

mod gateway;
mod networks;

use std::collections::BTreeMap;
use std::fmt::{Display, Write as _};
use std::io::{self, Write};
use std::time::SystemTime;

use comfy_table::{Table, presets};
use serde::Serialize;

use weft_api::{
    Attachment, Connection, Detached, DnsName, DnsRecord, DockerStatus, FirewallRule, Hidden,
    HostRange, Invitation, Ipam, Path, Peer, Status, Target, Workers,
};
use weft_daemon::Reset;
use weft_daemon::timestamp;

pub(super) use self::gateway::{
    authority, authority_home, clients, gateway, other_gateways, revoked, user_changed, vpn_users,
};
pub(super) use self::networks::{network_created, networks, networks_in_full, networks_removed};

/// Prints `value` as JSON, or as the text that `render` makes of it.
pub(crate) fn print<T: Serialize>(
    json: bool,
    value: &T,
    render: impl FnOnce(&T) -> String,
) -> anyhow::Result<()> {
    let text = if json { serde_json::to_string_pretty(value)? } else { render(value) };
    match writeln!(io::stdout().lock(), "{}", text.trim_end()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(()),
    }
}

/// Prints what went wrong, with its causes, on standard error.
pub(super) fn error(error: &anyhow::Error) {
    let _ = writeln!(io::stderr().lock(), "weft: {error:#}");
}

/// Prints a line of progress on standard error.
pub(super) fn progress(text: &str) {
    let _ = writeln!(io::stderr().lock(), "{text}");
}

/// Prints a question on standard error.
pub(super) fn ask(question: &str) -> io::Result<()> {
    let mut stderr = io::stderr().lock();
    write!(stderr, "{question}")?;
    stderr.flush()
}

/// Prints the completions of a shell.
pub(super) fn completions(shell: clap_complete::Shell) -> anyhow::Result<()> {
    let mut command = <super::Cli as clap::CommandFactory>::command();
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut command, "weft", &mut text);
    io::stdout().lock().write_all(&text)?;
    Ok(())
}

pub(super) fn status(status: &Status) -> String {
    let mut text = String::new();
    let mut line = |label: &str, value: &dyn Display| {
        let _ = writeln!(text, "{label:>14}: {value}");
    };
    line("Version", &status.version);
    line("Host", &format!("{} ({})", short(&status.peer), status.nickname));
    line("Ready", &status.reason.as_ref().map_or_else(|| "yes".into(), |r| format!("no: {r}")));
    line("Since", &with_age(&status.since));
    let trusted: Vec<_> = status.trusted_subnets.iter().map(ToString::to_string).collect();
    line(
        "Encryption",
        &match status.encrypted {
            true => "always".into(),
            false => format!("always, except between hosts that both trust {}", trusted.join(", ")),
        },
    );
    line("Admission", &status.admission);
    line("Engines", &status.engines.join(", "));
    line("Workers", &status.workers);
    for (engine, reason) in &status.engines_missing {
        let how = if status.engines.contains(engine) { "part of " } else { "" };
        line("Not offered", &format!("{how}{engine} ({reason})"));
    }
    switch(status, &mut line);
    line("Container MTU", &status.mtu);
    status.narrow.iter().for_each(|narrow| line("Narrow path", narrow));
    line("UDP ports", &format!("{} links, {} data", status.port, status.data_port));
    line("Targets", &status.targets);
    line("Connections", &counted(&status.connections));
    line("Peers", &status.peers);
    line("Attached", &status.attachments);
    status.host_dns.iter().for_each(|how| line("Host DNS", how));
    faces(status, &mut line);
    for warning in &status.warnings {
        line("Warning", warning);
    }
    let missing: Vec<_> =
        status.offloads.iter().filter(|(_, works)| !**works).map(|(n, _)| n.as_str()).collect();
    let offloads =
        if missing.is_empty() { "all".into() } else { format!("without {}", missing.join(", ")) };
    line("Offloads", &offloads);
    let hardening = status.hardening.iter().map(|(means, state)| format!("{means} {state}"));
    let hardening = hardening.collect::<Vec<_>>().join(", ");
    if !hardening.is_empty() {
        line("Hardening", &hardening);
    }
    line("Addresses", &ipam_line(&status.ipam));
    text
}

/// Adds a line with a label.
type Line<'a> = &'a mut dyn FnMut(&str, &dyn Display);

/// The switch, and which frames pass it by.
fn switch(status: &Status, line: Line<'_>) {
    let switch_reason = status.switch_reason.as_ref().map(|reason| format!(" ({reason})"));
    line("Switch", &format!("{}{}", status.switch, switch_reason.unwrap_or_default()));
    let ports_reason = status.ports_reason.as_ref().map(|reason| format!(" ({reason})"));
    line("Port mode", &format!("{}{}", status.ports, ports_reason.unwrap_or_default()));
    if status.ports == "direct" {
        line("Direct ports", &PAST_THE_SWITCH);
    }
    for passed_by in &status.passed_by {
        line("Passed by", passed_by);
    }
    let shortcuts_reason = status.shortcuts_reason.as_ref().map(|reason| format!(" ({reason})"));
    if status.shortcuts > 0 || shortcuts_reason.is_some() {
        line("Shortcuts", &format!("{}{}", status.shortcuts, shortcuts_reason.unwrap_or_default()));
    }
    for FirewallRule { chain, effect, remedy } in &status.firewall {
        line("Firewall", &format!("{chain} {effect}; to accept them: {remedy}"));
    }
}

/// Docker and the gateway.
fn faces(status: &Status, line: Line<'_>) {
    if let Some(DockerStatus { events, reason, since }) = &status.docker {
        let reason = reason.as_ref().map(|reason| format!(": {reason}")).unwrap_or_default();
        line("Docker", &format!("events {events} since {since}{reason}"));
    }
    if let Some(own) = &status.gateway {
        line("OpenVPN", &gateway(own));
        own.authority.iter().for_each(|it| line("Authority", &authority_home(it)));
        if !own.gateways.is_empty() {
            line("Gateways", &other_gateways(&own.gateways));
        }
    }
}

pub(super) fn workers(workers: &Workers) -> String {
    let Workers { workers, workers_max, workers_default, lanes } = workers;
    let mut text =
        format!("{workers} of 1 to {workers_max} workers; {workers_default} by default here\n");
    if lanes > workers {
        let _ = writeln!(text, "they serve the {lanes} lanes offered to peers");
    }
    text
}

pub(super) fn connections(connections: &[Connection]) -> String {
    if connections.is_empty() {
        return "no connections; name a host with: weft connect HOST".into();
    }
    let mut table =
        table(&["", "ADDRESS", "PEER", "STATE", "PATH", "MTU", "RTT", "SINCE", "REASON"]);
    for connection in connections {
        let path = match (&connection.format, &connection.engine, &connection.cipher) {
            (Some(format), Some(engine), Some(cipher)) => format!("{format} {engine} {cipher}"),
            (Some(format), Some(engine), None) if connection.encrypted == Some(false) => {
                format!("{format} {engine} unencrypted")
            }
            _ => "-".into(),
        };
        table.add_row([
            arrow(Some(&connection.direction)).into(),
            connection.address.clone(),
            named(connection.peer.as_deref(), connection.nickname.as_deref()),
            connection.state.clone(),
            path,
            connection.mtu.map_or_else(|| "-".into(), |mtu| mtu.to_string()),
            connection.rtt_us.map_or_else(|| "-".into(), milliseconds),
            age(&connection.since),
            fault(&connection.state, connection.reason.as_deref()),
        ]);
    }
    format!("{table}\n{}", limits(connections))
}

/// The state of a path that carries frames.
const ACTIVE: &str = "active";

/// A reason that tells of a fault. A path that carries frames has none.
fn fault(state: &str, reason: Option<&str>) -> String {
    reason.filter(|_| state != ACTIVE).unwrap_or("-").into()
}

/// Why paths that carry frames are not faster: a line for each reason, with the hosts it applies to.
fn limits(connections: &[Connection]) -> String {
    let mut hosts: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for connection in connections.iter().filter(|connection| connection.state == ACTIVE) {
        if let Some(reason) = &connection.reason {
            let name = connection.nickname.as_ref().unwrap_or(&connection.address);
            hosts.entry(reason).or_default().push(name);
        }
    }
    let line = |(reason, names): (&str, Vec<&str>)| {
        format!("no faster path to {}: {reason}\n", names.join(", "))
    };
    hosts.into_iter().map(line).collect()
}

pub(super) fn paths(paths: &[Path]) -> String {
    if paths.is_empty() {
        return "no paths; see weft status connections for the state of each connection".into();
    }
    let or_dash = |text: &Option<String>| text.clone().unwrap_or_else(|| "-".into());
    let mut table = table(&[
        "PEER", "FORMAT", "HERE", "THERE", "AS", "STATE", "CIPHER", "MTU", "SINCE", "REASON",
    ]);
    for path in paths {
        table.add_row([
            named(Some(&path.peer), path.nickname.as_deref()),
            or_dash(&path.format),
            or_dash(&path.engine),
            or_dash(&path.remote_engine),
            or_dash(&path.encapsulation),
            path.state.clone(),
            or_dash(&path.cipher),
            path.mtu.map_or_else(|| "-".into(), |mtu| mtu.to_string()),
            age(&path.since),
            fault(&path.state, path.reason.as_deref()),
        ]);
    }
    table.to_string()
}

pub(super) fn peers(peers: &[Peer]) -> String {
    let mut text = String::new();
    for peer in peers {
        let state = match (peer.local, peer.linked) {
            (true, _) => "this host",
            (_, true) => "linked",
            (_, false) => "no link",
        };
        let addresses = peer.addresses.join(", ");
        let _ = writeln!(
            text,
            "{} ({})  {state}{}{addresses}",
            short(&peer.peer),
            peer.nickname,
            if addresses.is_empty() { "" } else { "  " }
        );
        for connection in &peer.connections {
            let _ = writeln!(
                text,
                "   {} {:<24} {} ({})  {}",
                arrow(connection.direction.as_deref()),
                connection.address.as_deref().unwrap_or("-"),
                short(&connection.peer),
                connection.nickname,
                connection.state
            );
        }
    }
    text
}

pub(super) fn targets(targets: &[Target]) -> String {
    if targets.is_empty() {
        return "no targets; name one with: weft connect HOST".into();
    }
    targets.iter().map(|target| format!("{}\n", target.address)).collect()
}

pub(super) fn ipam(ipam: &Ipam) -> String {
    format!("{}\n{}", ipam_line(ipam), ipam_owners(ipam))
}

/// The owners of a range.
fn ipam_owners(ipam: &Ipam) -> Table {
    let mut table = table(&["HOST", "ADDRESSES", "SHARE", "USED", ""]);
    for HostRange { peer, nickname, addresses, percent, used, reachable } in &ipam.hosts {
        table.add_row([
            format!("{} ({nickname})", short(peer)),
            addresses.to_string(),
            format!("{percent:.1} %"),
            used.map_or_else(|| "-".into(), |used| used.to_string()),
            if *reachable { String::new() } else { "not linked".into() },
        ]);
    }
    table
}

pub(super) fn attached(attachment: &Attachment) -> String {
    let addresses: Vec<_> = attachment.addresses.iter().map(ToString::to_string).collect();
    addresses.join(" ")
}

/// Prints notes on standard error, apart from the output that programs read.
#[expect(clippy::print_stderr, reason = "it is for people")]
pub(super) fn notes(attachment: &Attachment) {
    attachment.notes.iter().for_each(|note| eprintln!("weft: {note}"));
}

pub(super) fn detached(detached: &Detached) -> String {
    format!("{} detached", detached.id)
}

pub(super) fn hidden(hidden: &Hidden) -> String {
    if hidden.addresses.is_empty() {
        return "this host has no address on the network".into();
    }
    let addresses: Vec<_> = hidden.addresses.iter().map(ToString::to_string).collect();
    format!("{} hidden", addresses.join(" "))
}

/// The network that every host has.
const WEFT: &str = "weft";

pub(super) fn attachments(attachments: &[Attachment]) -> String {
    if attachments.is_empty() {
        return "no containers attached; attach one with: weft attach CONTAINER".into();
    }
    let mut headings = vec![
        "CONTAINER",
        "STATE",
        "MAC",
        "ADDRESSES",
        "MTU",
        "SINCE",
        "PORT",
        "BY",
        "ID",
        "REASON",
    ];
    let shows_network = attachments.iter().any(|a| a.network != WEFT);
    if shows_network {
        headings.insert(1, "NETWORK");
    }
    let mut table = table(&headings);
    for a in attachments {
        let since = a.state_since.as_ref().unwrap_or(&a.since);
        let reason = a.port_reason.as_ref().map(|reason| format!(" ({reason})"));
        let mut row = vec![
            a.name.clone(),
            a.state.clone(),
            a.mac.clone(),
            attached(a),
            a.mtu.to_string(),
            age(since),
            format!("{}{}", a.port, reason.unwrap_or_default()),
            a.made_by.clone(),
            a.id.clone(),
            a.reason.clone().unwrap_or_else(|| "-".into()),
        ];
        if shows_network {
            row.insert(1, a.network.clone());
        }
        table.add_row(row);
    }
    let mut text = table.to_string();
    for a in attachments {
        a.notes.iter().for_each(|note| _ = write!(text, "\n{}: {note}", a.name));
    }
    text
}

pub(super) fn dns_records(records: &[DnsRecord]) -> String {
    let mut table = table(&["NAME", "ADDRESS", "HOST", "FROM"]);
    for record in records {
        let host = match &record.nickname {
            Some(nickname) => format!("{} ({nickname})", short(&record.peer)),
            None => short(&record.peer).to_owned(),
        };
        table.add_row([&record.name, &record.address.to_string(), &host, &record.source]);
    }
    table.to_string()
}

pub(super) fn dns_names(names: &[DnsName]) -> String {
    if names.is_empty() {
        return "no names given by hand on this host".into();
    }
    let mut table = table(&["NAME", "NETWORK", "ADDRESSES", "SERVICES"]);
    for DnsName { name, network, addresses, ports } in names {
        let addresses: Vec<String> = addresses.iter().map(ToString::to_string).collect();
        table.add_row([name, network, &addresses.join(" "), &ports.join(" ")]);
    }
    table.to_string()
}

/// A note on direct ports for every output that mentions them.
const PAST_THE_SWITCH: &str =
    "rules, limits and captures on the switch do not see frames to and from other hosts";

/// The directories that a reset deleted and left.
pub(super) fn reset(done: &Reset, asked: &std::path::Path) -> String {
    let mut text = match &done.state {
        Some(dir) => format!(
            "weft is reset: removed its interfaces, and identity, ranges and secret in {}",
            dir.display()
        ),
        None => format!(
            "removed the interfaces of weft, but {} holds no identity, ranges or secret. If weft was launched with another --state-dir, name it: weft reset --state-dir DIR. Until then direct ports stay in their containers",
            asked.display()
        ),
    };
    if let Some(left) = &done.left {
        let left = left.display();
        let _ = write!(
            text,
            "\nthe last daemon here kept its state in {left}, which is unchanged: weft reset --state-dir {left}"
        );
    }
    text
}

pub(super) fn invitation(invitation: &Invitation) -> String {
    let mut text = format!("On another host run:\n  {}\n", invitation.join);
    if let Some(token) = &invitation.token {
        let minutes = invitation.token_lifetime_s.unwrap_or(0) / 60;
        let _ = write!(
            text,
            "and give it this token when asked (valid once, for {minutes} minutes):\n  {token}\n"
        );
    }
    if let Some(narrow) = &invitation.narrow_link {
        let _ = writeln!(text, "Mind: {narrow}.");
    }
    text
}

pub(super) fn table(headings: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_header(headings.iter().copied());
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    table
}

fn counted(counts: &std::collections::BTreeMap<String, usize>) -> String {
    let total: usize = counts.values().sum();
    let parts: Vec<_> = counts.iter().map(|(state, n)| format!("{n} {state}")).collect();
    if parts.is_empty() { "0".into() } else { format!("{total} ({})", parts.join(", ")) }
}

fn ipam_line(ipam: &Ipam) -> String {
    let range6 = ipam.range6.as_deref().map_or_else(String::new, |range| format!(" and {range}"));
    let state = ipam.reason.as_deref().unwrap_or(&ipam.state);
    format!("{}{range6}, {state}", ipam.range)
}

/// A peer id is shown as its first eight bytes.
fn short(peer: &str) -> &str {
    peer.get(..16).unwrap_or(peer)
}

pub(super) fn named(peer: Option<&str>, nickname: Option<&str>) -> String {
    match (peer, nickname) {
        (Some(peer), Some(nickname)) => format!("{} ({nickname})", short(peer)),
        (Some(peer), None) => short(peer).into(),
        (None, _) => "-".into(),
    }
}

fn arrow(direction: Option<&str>) -> &'static str {
    if direction == Some("inbound") { "<-" } else { "->" }
}

fn milliseconds(microseconds: u64) -> String {
    format!("{}.{:03} ms", microseconds / 1000, microseconds % 1000)
}

fn with_age(since: &str) -> String {
    format!("{since} ({} ago)", age(since))
}

/// The two largest units of the time since a time stamp.
fn age(since: &str) -> String {
    let Some(since) = timestamp::parse(since) else { return since.into() };
    let seconds = SystemTime::now().duration_since(since).map_or(0, |age| age.as_secs());
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3_600 => format!("{}m{:02}s", seconds / 60, seconds % 60),
        3_600..86_400 => format!("{}h{:02}m", seconds / 3_600, seconds % 3_600 / 60),
        _ => format!("{}d{:02}h", seconds / 86_400, seconds % 86_400 / 3_600),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_connection_shows_its_state_and_reason() {
        let connection = Connection {
            peer: Some("00112233445566778899aabbccddeeff".into()),
            nickname: Some("beta".into()),
            address: "192.0.2.2:6783".into(),
            direction: "outbound".into(),
            state: "failed".into(),
            format: Some("esp".into()),
            remote_engine: Some("userspace".into()),
            encapsulation: Some("udp".into()),
            engine: Some("userspace".into()),
            switch: Some("bridge".into()),
            cipher: Some("aes-256-gcm".into()),
            encrypted: Some(true),
            mtu: Some(1388),
            rtt_us: Some(1234),
            since: "1970-01-01T00:00:00Z".into(),
            reason: Some("probe unanswered".into()),
        };
        let text = connections(&[connection]);
        for part in [
            "->",
            "0011223344556677 (beta)",
            "failed",
            "esp userspace aes-256-gcm",
            "1388",
            "1.234 ms",
            "probe unanswered",
        ] {
            assert!(text.contains(part), "{part} is missing in {text}");
        }
        assert!(connections(&[]).contains("weft connect"));
    }

    #[test]
    fn containers_show_their_network_if_one_is_on_another_than_weft() {
        let attachment = |network: &str| -> Attachment {
            let text = format!(
                r#"{{"id":"netns:x","name":"x","interface":"weft0","mac":"02:00:00:00:00:07",
                "network":"{network}","addresses":[],"mtu":1388,"since":""}}"#
            );
            serde_json::from_str(&text).unwrap()
        };
        let words = |text: &str, line: usize| -> Vec<String> {
            let line = text.lines().nth(line).unwrap_or_default();
            line.split_whitespace().take(3).map(Into::into).collect()
        };
        let alone = attachments(&[attachment("weft")]);
        assert_eq!(words(&alone, 0), ["CONTAINER", "STATE", "MAC"]);
        assert_eq!(words(&alone, 1), ["x", "attached", "02:00:00:00:00:07"]);
        let both = attachments(&[attachment("weft"), attachment("shop")]);
        assert_eq!(words(&both, 0), ["CONTAINER", "NETWORK", "STATE"]);
        assert_eq!(words(&both, 1), ["x", "weft", "attached"]);
        assert_eq!(words(&both, 2), ["x", "shop", "attached"]);
    }

    #[test]
    fn why_a_healthy_path_is_no_faster_one_is_no_fault() {
        let healthy = |nickname: &str| Connection {
            nickname: Some(nickname.into()),
            address: "192.0.2.2:6783".into(),
            state: ACTIVE.into(),
            since: "1970-01-01T00:00:00Z".into(),
            reason: Some("kernel without ESP".into()),
            ..Connection::default()
        };
        let text = connections(&[healthy("beta"), healthy("gamma")]);
        let rows: Vec<_> = text.lines().map(str::trim_end).collect();
        let hosts: Vec<_> = rows.iter().filter(|row| row.contains("192.0.2.2")).collect();
        assert!(hosts.len() == 2 && hosts.iter().all(|row| row.ends_with('-')), "{text}");
        assert_eq!(
            rows.last(),
            Some(&"no faster path to beta, gamma: kernel without ESP"),
            "{text}"
        );
    }
}
