//! Status views, built from the states of links, mesh, paths and engines.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use weft_api::{
    Attachment, Connection, ContainerTraffic, HostRange, Ipam, LaneTraffic, Peer, PeerConnection,
    PeerTraffic, ServiceStatus, Status, Traffic, Volume, WorkerTraffic,
};
use weft_crypto::{Format, PeerId};
use weft_kernel::engine::{KernelCounters, SwitchKind};
use weft_link::{LinkState, LinkStatus};
use weft_path::{EngineKind, EngineOffer, PathState, PathStatus, Reason};

use super::daemon::Daemon;
use crate::core::control::{LostLink, Readings, Snapshot};
use crate::services::attach::kept::ATTACHED;
use crate::services::supervisor::{HANGS, RUNNING};
use crate::timestamp;
use crate::upkeep::mtu::narrow_path;

/// How long a kernel request may take before `weft status` reports it.
const KERNEL_LATE: Duration = Duration::from_secs(2);

/// One line for each target, link, ended link and refused source. If the link is up, the line shows its
/// path's state.
pub(crate) fn connections(links: &[LinkStatus], snapshot: &Snapshot) -> Vec<Connection> {
    let paths = &snapshot.paths;
    let mut connections: Vec<Connection> =
        links.iter().map(|link| connection(link, paths, snapshot.kernel.switch)).collect();
    for lost in &snapshot.lost {
        match links.iter().position(|link| link.peer == Some(lost.peer)) {
            Some(index) => {
                let reason = &mut connections[index].reason;
                reason.get_or_insert_with(|| lost.reason.clone());
            }
            None => connections.push(ended(lost)),
        }
    }
    connections.sort_by(|a, b| (&a.nickname, &a.address).cmp(&(&b.nickname, &b.address)));
    connections
}

fn ended(lost: &LostLink) -> Connection {
    let since = timestamp::of_instant(lost.since);
    Connection {
        peer: Some(lost.peer.to_hex()),
        nickname: Some(lost.nickname.clone()),
        address: lost.remote.to_string(),
        direction: "inbound".into(),
        state: LinkState::Failed.name().into(),
        since: timestamp::format(since),
        reason: Some(lost.reason.clone()),
        ..Connection::default()
    }
}

fn connection(link: &LinkStatus, paths: &[PathStatus], switch: SwitchKind) -> Connection {
    let path = link
        .peer
        .and_then(|peer| weft_path::overall(paths.iter().filter(|path| path.peer == peer)));
    let mut connection = Connection {
        peer: link.peer.map(|peer| peer.to_hex()),
        nickname: link.nickname.clone(),
        address: link.address.clone(),
        direction: match link.direction {
            weft_link::Direction::Outbound => "outbound".into(),
            weft_link::Direction::Inbound => "inbound".into(),
        },
        state: link.state.name().into(),
        since: timestamp::format(timestamp::of_instant(link.since)),
        reason: link.reason.clone(),
        ..Connection::default()
    };
    let Some(path) = path.filter(|_| link.state == LinkState::Established) else {
        return connection;
    };
    connection.state = path.state.name().into();
    connection.format = path.format.map(|format| format.name().into());
    connection.engine = path.engine.map(|engine| engine.name().into());
    connection.remote_engine = path.remote_engine.map(|engine| engine.name().into());
    connection.encapsulation = encapsulation(&path);
    connection.switch = Some(switch.name().into());
    connection.cipher = path.cipher.map(|cipher| cipher.name().into());
    let is_known = path.cipher.is_some() || path.format == Some(Format::Plain);
    connection.encrypted = is_known.then_some(path.encrypted);
    connection.mtu = path.mtu;
    connection.rtt_us = path.rtt.and_then(|rtt| u64::try_from(rtt.as_micros()).ok());
    connection.since = timestamp::format(timestamp::of_instant(path.since));
    connection.reason = reason(&path);
    // A target may have another address than the one its peer is linked at.
    connection.reason = connection.reason.or_else(|| link.reason.clone());
    connection
}

/// The reason why the path is not in use, or not the best, or has blocked lanes.
fn reason(path: &PathStatus) -> Option<String> {
    let all = [&path.reason, &path.why_not_best, &path.lanes_blocked];
    all.into_iter().flatten().next().map(ToString::to_string)
}

/// Names each engine once, though it is offered for each of its formats.
fn names_of(offers: &[EngineOffer]) -> Vec<String> {
    let mut names: Vec<String> = offers.iter().map(|offer| offer.kind.name().into()).collect();
    names.dedup();
    names
}

fn encapsulation(path: &PathStatus) -> Option<String> {
    let esp = path.format == Some(Format::Esp);
    path.encapsulation.filter(|_| esp).map(|encapsulation| encapsulation.name().into())
}

/// Every path to every peer.
pub(crate) fn paths(links: &[LinkStatus], paths: &[PathStatus]) -> Vec<weft_api::Path> {
    let since = |instant| timestamp::format(timestamp::of_instant(instant));
    let of = |path: &PathStatus| weft_api::Path {
        peer: path.peer.to_hex(),
        nickname: nickname(links, path.peer),
        format: path.format.map(|format| format.name().into()),
        engine: path.engine.map(|engine| engine.name().into()),
        remote_engine: path.remote_engine.map(|engine| engine.name().into()),
        encapsulation: encapsulation(path),
        state: path.state.name().into(),
        reason: reason(path),
        since: since(path.since),
        next_try: path.next_try.map(since),
        cipher: path.cipher.map(|cipher| cipher.name().into()),
        encrypted: path.encrypted,
        mtu: path.mtu,
        rtt_us: path.rtt.and_then(|rtt| u64::try_from(rtt.as_micros()).ok()),
        remote: path.remote.map(|remote| remote.to_string()),
        rekeys: path.rekeys,
    };
    paths.iter().map(of).collect()
}

pub(crate) fn kernel_counters(kernel: &KernelCounters) -> BTreeMap<String, u64> {
    let mut counters: BTreeMap<String, u64> =
        kernel.named.iter().map(|(name, count)| ((*name).into(), *count)).collect();
    if let Some(guard) = kernel.guard {
        let rules = guard.named();
        counters.extend(rules.map(|(rule, count)| (format!("guard_{rule}"), count.packets)));
    }
    if let Some(age) = kernel.guard_age {
        let age = u64::try_from(age.as_millis()).unwrap_or(u64::MAX);
        counters.insert("guard_age_ms".into(), age);
    }
    counters
}

pub(crate) fn status(
    daemon: &Daemon,
    snapshot: &Snapshot,
    connections: &[Connection],
    attachments: &[Attachment],
) -> Status {
    let mut states: BTreeMap<String, usize> = BTreeMap::new();
    for connection in connections {
        *states.entry(connection.state.clone()).or_default() += 1;
    }
    let ipam = ipam(&snapshot.ipam);
    let reason = not_ready(&ipam, connections);
    let offers = crate::core::engines::offers(&daemon.settings, &snapshot.support);
    let (ports, ports_reason) = daemon.attachments.port_kind();
    let (shortcuts, shortcuts_reason) = daemon.attachments.shortcuts().state();
    Status {
        version: env!("CARGO_PKG_VERSION").into(),
        protocol: [weft_link::limits::PROTOCOL_VERSION, weft_link::limits::PROTOCOL_VERSION],
        peer: daemon.local.to_hex(),
        nickname: daemon.settings.nickname.clone(),
        port: daemon.settings.port,
        data_port: daemon.settings.data_port,
        since: timestamp::format(daemon.since),
        admission: if daemon.settings.password.is_some() { "password" } else { "token" }.into(),
        encrypted: daemon.settings.trusted_subnets.is_empty(),
        trusted_subnets: daemon.settings.trusted_subnets.clone(),
        mtu: daemon.mtu,
        narrow: narrow(daemon, snapshot),
        switch: snapshot.kernel.switch.name().into(),
        switch_reason: snapshot.kernel.switch_reason.clone(),
        ports: ports.name().into(),
        ports_reason,
        passed_by: daemon.attachments.passed_by(),
        shortcuts,
        shortcuts_reason,
        engines: names_of(&offers.engines),
        engines_missing: offers
            .missing
            .iter()
            .map(|(engine, reason)| (engine.name().into(), reason.to_string()))
            .collect(),
        firewall: daemon.firewall.found().into_iter().map(obstacle).collect(),
        workers: snapshot.workers,
        offloads: daemon.offloads.clone(),
        hardening: crate::upkeep::hardening::state(),
        targets: daemon.target_list().len(),
        connections: states,
        peers: snapshot.peers.iter().filter(|peer| !peer.local).count(),
        attachments: attachments.iter().filter(|it| it.state == ATTACHED).count(),
        ipam,
        host_dns: daemon.resolved.state(),
        docker: daemon.docker.status(),
        warnings: warnings(daemon, attachments, snapshot),
        port_lock: daemon.attachments.locks().status(),
        gateway: None,
        services: daemon.health.list(),
        loops: BTreeMap::from([
            ("core".to_owned(), daemon.turns.status()),
            ("gateway".to_owned(), daemon.gateway.turns().status()),
        ]),
        ready: reason.is_none(),
        reason,
    }
}

/// Paths that carry less than the containers' MTU.
fn narrow(daemon: &Daemon, snapshot: &Snapshot) -> Vec<String> {
    let switch = snapshot.kernel.switch;
    let narrow = |path: &PathStatus| {
        narrow_path(path, daemon.mtu, switch, || peer_name(snapshot, path.peer))
    };
    snapshot.paths.iter().filter_map(narrow).collect()
}

fn obstacle(found: weft_kernel::Obstacle) -> weft_api::FirewallRule {
    let weft_kernel::Obstacle { chain, effect, remedy } = found;
    weft_api::FirewallRule { chain, effect: effect.into(), remedy }
}

fn warnings(daemon: &Daemon, attachments: &[Attachment], snapshot: &Snapshot) -> Vec<String> {
    let disk = daemon.store.fault();
    let out = attachments.iter().filter(|it| it.state != ATTACHED).count();
    let out = (out > 0)
        .then(|| format!("{out} containers have addresses but are not attached: weft ps says why"));
    let lanes = lanes_blocked(daemon.settings.data_port, snapshot);
    let lanes = lanes.into_iter().chain(other_source(snapshot));
    let all = disk.into_iter().chain(daemon.warnings.list()).chain(out).chain(lanes);
    all.chain(late_kernel(snapshot.kernel_busy)).chain(failed_services(daemon)).collect()
}

/// A warning that the kernel is slow; paths move to it, and containers are attached, only afterwards.
fn late_kernel(busy: Option<Duration>) -> Option<String> {
    let busy = busy.filter(|busy| *busy >= KERNEL_LATE)?;
    Some(format!(
        "the kernel has not completed a request for {} s; another program may block its network configuration: look for a hanging ip, tc, nft or ethtool with `ps`",
        busy.as_secs()
    ))
}

/// Services that do not run.
fn failed_services(daemon: &Daemon) -> impl Iterator<Item = String> {
    let failed = daemon.health.list().into_iter().filter(|it| it.state != RUNNING);
    failed.map(|ServiceStatus { name, state, reason, since, .. }| {
        let reason = reason.unwrap_or_default();
        match state.as_str() {
            HANGS => format!(
                "service {name} has hung since {since} ({reason}) and cannot be stopped; restart weft: weft stop, weft launch"
            ),
            _ => format!("service {name} has been restarting since {since}: {reason}"),
        }
    })
}

/// Peers whose lanes beyond the first do not get through, whichever end opens them.
fn lanes_blocked(data_port: u16, snapshot: &Snapshot) -> Vec<String> {
    let blocked = |path: &PathStatus| {
        path.lanes_blocked.as_ref().map(|reason| {
            format!(
                "{reason} to {}: a firewall on the way admits only answers, so traffic to it uses fewer cores; one of the two hosts must accept: udp dport {data_port}",
                peer_name(snapshot, path.peer)
            )
        })
    };
    snapshot.paths.iter().filter_map(blocked).collect()
}

/// Peers that dialled another address than the kernel sends from, and whose kernel paths get no answer.
fn other_source(snapshot: &Snapshot) -> Vec<String> {
    let unanswered = |path: &&PathStatus| {
        let reasons =
            [Reason::Protocol50Blocked, Reason::DataPortsBlocked, Reason::ProbeUnanswered];
        path.engine == Some(EngineKind::Kernel)
            && path.state == PathState::Failed
            && path.reason.as_ref().is_some_and(|reason| reasons.contains(reason))
    };
    let peers: BTreeSet<PeerId> =
        snapshot.paths.iter().filter(unanswered).map(|path| path.peer).collect();
    let told = |peer: PeerId| {
        let (source, name) = (snapshot.sources.get(&peer)?, peer_name(snapshot, peer));
        Some(format!(
            "{name} dialled {source}, but by its routes the kernel engine answers from another address: a firewall there admits only answers from {source}; dial the other address, or add `src {source}` to the route to {name}"
        ))
    };
    peers.into_iter().filter_map(told).collect()
}

fn peer_name(snapshot: &Snapshot, id: PeerId) -> String {
    let peer = snapshot.peers.iter().find(|peer| peer.peer == id);
    peer.map_or_else(|| id.to_string(), |peer| peer.nickname.clone())
}

/// The obstacle between this host's containers and those of others.
fn not_ready(ipam: &Ipam, connections: &[Connection]) -> Option<String> {
    if let Some(reason) = &ipam.reason {
        return Some(reason.clone());
    }
    let idle = connections.iter().find(|connection| connection.state != "active")?;
    if connections.iter().any(|connection| connection.state == "active") {
        return None;
    }
    let reason = idle.reason.as_deref().map_or_else(String::new, |reason| format!(": {reason}"));
    Some(format!("no connection is active; {} is {}{reason}", idle.address, idle.state))
}

pub(crate) fn peers(peers: &[weft_mesh::PeerStatus], connections: &[Connection]) -> Vec<Peer> {
    let names: BTreeMap<PeerId, &str> =
        peers.iter().map(|peer| (peer.peer, peer.nickname.as_str())).collect();
    let own = |peer: PeerId| {
        let id = peer.to_hex();
        connections.iter().find(|connection| connection.peer.as_deref() == Some(id.as_str()))
    };
    peers
        .iter()
        .map(|peer| Peer {
            peer: peer.peer.to_hex(),
            nickname: peer.nickname.clone(),
            local: peer.local,
            linked: peer.linked,
            addresses: peer.addresses.iter().map(ToString::to_string).collect(),
            connections: peer
                .connections
                .iter()
                .map(|other| {
                    let known = own(*other).filter(|_| peer.local);
                    PeerConnection {
                        peer: other.to_hex(),
                        nickname: names.get(other).copied().unwrap_or_default().into(),
                        address: known.map(|known| known.address.clone()),
                        direction: known.map(|known| known.direction.clone()),
                        state: known.map_or_else(|| "established".into(), |k| k.state.clone()),
                    }
                })
                .collect(),
        })
        .collect()
}

pub(crate) fn ipam(ipam: &weft_mesh::IpamStatus) -> Ipam {
    let all = 2_f64.powi(32 - i32::from(ipam.range.prefix_len()));
    Ipam {
        state: if ipam.waiting.is_some() { "waiting" } else { "ready" }.into(),
        reason: ipam.waiting.clone(),
        range: ipam.range.to_string(),
        range6: ipam.range6.map(|range| range.to_string()),
        hosts: ipam
            .owners
            .iter()
            .map(|owner| HostRange {
                peer: owner.peer.to_hex(),
                nickname: owner.nickname.clone(),
                addresses: owner.addresses,
                percent: owner.addresses as f64 * 100.0 / all,
                used: owner.used,
                reachable: owner.linked,
            })
            .collect(),
    }
}

/// The engine's counters by name (drops as `drop_` and the reason), and those of paths.
pub(crate) fn counters(snapshot: &Snapshot) -> BTreeMap<String, u64> {
    let engine = &snapshot.counters;
    let drops = engine.drops.iter().map(|(reason, n)| (format!("drop_{}", reason.name()), *n));
    let work = engine.work.iter().map(|(work, n)| (work.name().to_owned(), *n));
    let rekeys = snapshot.paths.iter().map(|path| path.rekeys).sum();
    let paths = [("rekeys".to_owned(), rekeys), ("sas".to_owned(), engine.sas.len() as u64)];
    drops.chain(work).chain(paths).collect()
}

/// Traffic by peer id.
pub(crate) fn peer_counters(
    counters: &weft_engine::Counters,
) -> BTreeMap<String, BTreeMap<String, u64>> {
    let by_name = |peer: &weft_engine::PeerTraffic| {
        BTreeMap::from([
            ("packets_received".to_owned(), peer.received().packets),
            ("bytes_received".to_owned(), peer.received().bytes),
            ("packets_sent".to_owned(), peer.sent().packets),
            ("bytes_sent".to_owned(), peer.sent().bytes),
            ("dropped".to_owned(), peer.dropped),
        ])
    };
    counters.peers.iter().map(|peer| (peer.peer.to_hex(), by_name(peer))).collect()
}

/// The counters of each worker of the vector engine.
pub(crate) fn worker_counters(counters: &weft_engine::Counters) -> Vec<BTreeMap<String, u64>> {
    let by_name = |worker: &weft_engine::WorkerTotals| {
        let ms = |time: std::time::Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        let (busy_ms, helpers_busy_ms) = (ms(worker.busy), ms(worker.helpers_busy));
        BTreeMap::from([
            ("awake_ms".to_owned(), ms(worker.awake)),
            ("busy_ms".to_owned(), busy_ms),
            ("datagrams_received".to_owned(), worker.done(weft_engine::Work::DatagramsReceived)),
            ("datagrams_sent".to_owned(), worker.done(weft_engine::Work::DatagramsSent)),
            ("dropped".to_owned(), worker.dropped),
            ("helpers_busy_ms".to_owned(), helpers_busy_ms),
            ("helpers_off".to_owned(), worker.done(weft_engine::Work::HelpersOff)),
            ("helpers_on".to_owned(), worker.done(weft_engine::Work::HelpersOn)),
            ("units_helped".to_owned(), worker.done(weft_engine::Work::UnitsHelped)),
        ])
    };
    counters.workers.iter().map(by_name).collect()
}

/// The counters that `weft top` computes rates from.
pub(crate) fn traffic(
    readings: &Readings,
    containers: Vec<ContainerTraffic>,
    links: &[LinkStatus],
    monotonic_ms: u64,
) -> Traffic {
    let counters = &readings.counters;
    let mut volumes: BTreeMap<PeerId, (Volume, u64, Vec<LaneTraffic>)> = BTreeMap::new();
    for of in &counters.peers {
        let (volume, dropped, lanes) = volumes.entry(of.peer).or_default();
        *dropped += of.dropped;
        let (received, sent) = (of.received(), of.sent());
        add(volume, (received.packets, received.bytes), (sent.packets, sent.bytes));
        lanes.extend(of.lanes.iter().map(lane_traffic));
    }
    let mut drops: BTreeMap<String, u64> =
        counters.drops.iter().map(|(reason, n)| (reason.name().to_owned(), *n)).collect();
    for (name, count) in [
        ("socket_overflows", counters.done(weft_engine::Work::SocketOverflows)),
        ("kernel_replayed", readings.kernel.iter().map(|(_, of)| of.replayed).sum()),
        ("kernel_forged", readings.kernel.iter().map(|(_, of)| of.forged).sum()),
    ] {
        drops.insert(name.into(), count);
    }
    for (peer, of) in &readings.kernel {
        let (volume, dropped, _) = volumes.entry(*peer).or_default();
        *dropped += of.replayed + of.forged;
        add(volume, (of.received.packets, of.received.bytes), (of.sent.packets, of.sent.bytes));
    }
    let peers = volumes.into_iter().map(|(peer, (volume, dropped, lanes))| PeerTraffic {
        peer: peer.to_hex(),
        nickname: nickname(links, peer),
        engine: readings.engines.get(&peer).map(|engine| engine.name().into()),
        volume,
        dropped,
        lanes,
    });
    // Workers that are gone do nothing.
    let workers = counters.workers.iter().take(readings.workers).enumerate();
    let us = |time: std::time::Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
    let workers = workers.map(|(worker, of)| WorkerTraffic {
        worker,
        busy_us: us(of.busy),
        awake_us: us(of.awake),
        helpers_busy_us: us(of.helpers_busy),
        datagrams_received: of.done(weft_engine::Work::DatagramsReceived),
        datagrams_sent: of.done(weft_engine::Work::DatagramsSent),
        tap_reads: of.done(weft_engine::Work::TapReads),
        tap_writes: of.done(weft_engine::Work::TapWrites),
        dropped: of.dropped,
    });
    let (peers, workers) = (peers.collect(), workers.collect());
    Traffic { monotonic_ms, peers, containers, workers, drops }
}

fn lane_traffic(of: &weft_engine::LaneTraffic) -> LaneTraffic {
    let mut volume = Volume::default();
    add(&mut volume, (of.received.packets, of.received.bytes), (of.sent.packets, of.sent.bytes));
    LaneTraffic { lane: of.lane, volume }
}

/// Adds packets and bytes received, and packets and bytes sent.
fn add(volume: &mut Volume, received: (u64, u64), sent: (u64, u64)) {
    volume.packets_received += received.0;
    volume.bytes_received += received.1;
    volume.packets_sent += sent.0;
    volume.bytes_sent += sent.1;
}

fn nickname(links: &[LinkStatus], peer: PeerId) -> Option<String> {
    links.iter().find(|link| link.peer == Some(peer))?.nickname.clone()
}
