//! Lanes of a path that takes over once another has failed.
#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use weft_crypto::{PeerId, SessionKey};
use weft_path::{
    Config, EngineCommand, EngineEvent, EngineKind, EngineOffer, Message, PathId, Paths,
    ProbeAnswer,
};

/// A host whose probes are all answered, and the state of its engines.
struct Host {
    paths: Paths,
    engines: BTreeMap<PathId, EngineKind>,
    /// Lanes beyond the first that it sends on.
    lanes: BTreeSet<(PathId, u16)>,
    bound: Option<PathId>,
    opens: Option<bool>,
}

impl Host {
    fn carry_out(&mut self, now: Instant, peer: PeerId) {
        while let Some(command) = self.paths.poll_command() {
            match command {
                EngineCommand::InstallOutbound { engine, path, sa, .. } => {
                    self.engines.insert(path, engine);
                    if sa.lane > 0 {
                        self.lanes.insert((path, sa.lane));
                    }
                }
                EngineCommand::SendProbe { probe, mtu, .. } => {
                    let answer = Message::ProbeAnswer(ProbeAnswer { probe, mtu });
                    self.paths.handle_message(now, peer, answer).unwrap();
                }
                EngineCommand::BindPath { path, .. } => self.bound = path,
                EngineCommand::OpenLanes { opens, .. } => self.opens = Some(opens),
                _ => {}
            }
        }
    }

    fn engine(&self) -> Option<EngineKind> {
        self.engines.get(&self.bound?).copied()
    }
}

#[test]
fn blocked_lanes_have_their_turn_once_their_path_carries_frames() {
    let mut now = Instant::now();
    let ids = [PeerId::from_bytes([1; 32]), PeerId::from_bytes([2; 32])];
    let mut engines = Config::default().engines;
    engines[0].lanes_max = 3;
    let kernel =
        EngineOffer { kind: EngineKind::Kernel, port: 6785, lanes_max: 1, ..engines[0].clone() };
    engines.push(kernel);
    let mut hosts = [0, 1].map(|index: usize| Host {
        paths: Paths::new(
            ids[index],
            Config { engines: engines.clone(), ..Config::default() },
            [index as u8 + 1; 32],
        ),
        engines: BTreeMap::new(),
        lanes: BTreeSet::new(),
        bound: None,
        opens: None,
    });
    let addresses: [IpAddr; 2] = [[192, 0, 2, 1].into(), [192, 0, 2, 2].into()];
    for (index, host) in hosts.iter_mut().enumerate() {
        let (own, other) = (addresses[index], addresses[1 - index]);
        let key = SessionKey::from_bytes([7; 32]);
        host.paths.handle_link_up(now, ids[1 - index], key, Some(own), other, index == 1);
    }
    let mut talk = |hosts: &mut [Host; 2], seconds: u32| {
        for _ in 0..50 * seconds {
            for index in [0, 1] {
                hosts[index].carry_out(now, ids[1 - index]);
                while let Some((_, message)) = hosts[index].paths.poll_message() {
                    hosts[1 - index].paths.handle_message(now, ids[index], message).unwrap();
                }
            }
            now += Duration::from_millis(20);
            hosts.iter_mut().for_each(|host| host.paths.handle_timeout(now));
        }
        now
    };
    let at = talk(&mut hosts, 2);
    assert_eq!(hosts.each_ref().map(Host::engine), [Some(EngineKind::Kernel); 2]);
    // The host with the lower id decides, and lets the host that dialled begin: the other one.
    assert_eq!(hosts.each_ref().map(|host| host.opens), [Some(false), Some(true)]);
    for host in &mut hosts {
        assert!(!host.lanes.is_empty());
        for (path, lane) in host.lanes.clone() {
            host.paths.handle_event(at, EngineEvent::LaneProven { path, lane, proven: false });
        }
    }
    let at = talk(&mut hosts, 2);
    assert_eq!(hosts[0].opens, Some(false), "they carry nothing");
    for host in &mut hosts {
        let (engine, reason) = (EngineKind::Kernel, "gone".to_owned());
        host.paths.handle_event(at, EngineEvent::EngineFailed { engine, reason });
    }
    talk(&mut hosts, 1);
    assert_eq!(hosts.each_ref().map(|host| host.opens), [Some(true), Some(false)]);
}
