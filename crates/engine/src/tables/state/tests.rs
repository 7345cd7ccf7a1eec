//! Effects of commands on the workers' tables.
#![allow(clippy::unwrap_used)]

use std::net::Ipv4Addr;

use weft_crypto::SaKey;

use super::*;
use crate::sample_sas::{inbound_sa, outbound_sa};

/// Asks for an inbound SA with this SPI, and returns why there is none.
fn refusal(state: &mut State, spi: u32) -> Option<CommandError> {
    let sa = InboundSa { key: SaKey::from_bytes([5; 36]), ..inbound_sa(spi) };
    let command = EngineCommand::InstallInbound {
        engine: EngineKind::Userspace,
        remote: Ipv4Addr::LOCALHOST.into(),
        peer: PeerId::from_bytes([9; 32]),
        path: PathId(1),
        sa,
    };
    state.apply(command, |address| Ok(Remote::of(address))).err()
}

#[test]
fn inbound_sas_are_taken_up_to_their_number() {
    let mut state = State::new(Vni(7), 1_388, Arc::default(), KeyLog::default());
    assert_eq!(refusal(&mut state, 1), None);
    // All but one of the others stand in the table alone: keys and windows for them take seconds.
    for spi in 2..INBOUND_SAS_MAX as u32 {
        state.spis.insert(spi.into(), u32::MAX);
    }
    let [last, one, another] = [100_000, 100_001, 100_002];
    assert_eq!(refusal(&mut state, last), None);
    let full = Some(CommandError::TableFull { table: "inbound SAs" });
    assert_eq!(refusal(&mut state, one), full);
    assert_eq!(state.inbound_of(one), None);
    assert_eq!(refusal(&mut state, last), Some(CommandError::SpiInUse { spi: last }));
    state.remove_inbound(1);
    assert_eq!(refusal(&mut state, one), None);
    assert!(state.inbound_of(one).and_then(|number| state.inbound.get(number)).is_some());
    assert_eq!(refusal(&mut state, another), full);
}

fn outbound(path: PathId, lane: u16, remote: &str) -> EngineCommand {
    let sa = OutboundSa {
        lane,
        key: SaKey::from_bytes([5; 36]),
        ..outbound_sa(1_000 + u32::from(lane))
    };
    let (engine, peer) = (EngineKind::Userspace, PeerId::from_bytes([9; 32]));
    EngineCommand::InstallOutbound { engine, peer, path, sa, remote: remote.parse().unwrap() }
}

/// The command applies to the peer's present and later paths, and voids the known lane state.
#[test]
fn the_end_that_opens_lanes_can_change() {
    let peer = PeerId::from_bytes([9; 32]);
    for local in [8, 10].map(|byte| PeerId::from_bytes([byte; 32])) {
        let mut state = State::of_host(local, Vni(7), 1_388, Arc::default(), KeyLog::default());
        let apply = |state: &mut State, command| {
            state.apply(command, |address| Ok(Remote::of(address))).unwrap();
        };
        let at = |state: &State, path| state.path_number(PathId(path)).unwrap();
        apply(&mut state, outbound(PathId(1), 0, "192.0.2.2:6784"));
        apply(&mut state, outbound(PathId(1), 1, "192.0.2.2:6784"));
        let number = at(&state, 1);
        let is_first = local < peer;
        assert_eq!(state.paths.get(number).unwrap().responds, !is_first);
        state.set_lane_source(number, 1, Remote::of("192.0.2.2:40000".parse().unwrap()));
        state.lane(number, 1).unwrap().prove();
        assert!(state.paths.get(number).unwrap().is_open(1));
        let begun = state.lanes_begun();
        apply(&mut state, EngineCommand::OpenLanes { peer, opens: !is_first });
        let path = state.paths.get(number).unwrap();
        assert_eq!((path.responds, path.is_open(1)), (is_first, false));
        assert!(path.known[1].source.is_none() && path.known[1].is_asked_for());
        assert_eq!(state.lanes_begun(), begun + 1, "its worker looks at once");
        apply(&mut state, outbound(PathId(2), 0, "192.0.2.2:6784"));
        assert_eq!(state.paths.get(at(&state, 2)).unwrap().responds, is_first);
        // Another peer's, and the peer once it is forgotten, are as ever.
        apply(&mut state, EngineCommand::RemovePeer { peer });
        apply(&mut state, outbound(PathId(3), 0, "192.0.2.2:6784"));
        assert_eq!(state.paths.get(at(&state, 3)).unwrap().responds, !is_first);
    }
}

/// On every lane, by every way that a remote comes in, and only where the family fits.
#[test]
fn a_peers_packets_leave_from_where_it_dialled() {
    let peer = PeerId::from_bytes([9; 32]);
    let local = PeerId::from_bytes([10; 32]);
    let (arc, keylog) = (Arc::default(), KeyLog::default());
    let mut state = State::of_host(local, Vni(7), 1_388, arc, keylog);
    let apply = |state: &mut State, command| {
        state.apply(command, |address| Ok(Remote::of(address))).unwrap();
    };
    let source = |state: &State, path, lane| {
        let number = state.path_number(PathId(path)).unwrap();
        state.paths.get(number).unwrap().way(lane).unwrap().1.source()
    };
    let set = |source: Option<&str>| EngineCommand::SetSource {
        peer,
        source: source.map(|source| source.parse().unwrap()),
    };
    let dialled: Option<IpAddr> = Some("192.0.2.101".parse().unwrap());
    apply(&mut state, outbound(PathId(1), 0, "192.0.2.2:6784"));
    apply(&mut state, outbound(PathId(1), 1, "192.0.2.2:6784"));
    let number = state.path_number(PathId(1)).unwrap();
    let lane = Remote::of("192.0.2.2:40000".parse().unwrap());
    state.set_lane_source(number, 1, lane);
    assert_eq!((source(&state, 1, 0), source(&state, 1, 1)), (None, None));
    apply(&mut state, set(Some("192.0.2.101")));
    assert_eq!((source(&state, 1, 0), source(&state, 1, 1)), (dialled, dialled));
    // Remotes, paths and lane sources that come later.
    let remote = "192.0.2.3:6784".parse().unwrap();
    apply(&mut state, EngineCommand::SetRemote { path: PathId(1), remote });
    apply(&mut state, outbound(PathId(2), 0, "192.0.2.2:6784"));
    apply(&mut state, outbound(PathId(3), 0, "[2001:db8::2]:6784"));
    state.set_lane_source(number, 1, Remote::of("192.0.2.3:40001".parse().unwrap()));
    let all = [(1, 0), (1, 1), (2, 0), (3, 0)].map(|(path, lane)| source(&state, path, lane));
    assert_eq!(all, [dialled, dialled, dialled, None]);
    apply(&mut state, set(None));
    assert_eq!((source(&state, 1, 0), source(&state, 1, 1)), (None, None));
    // Another peer's are not its.
    apply(&mut state, set(Some("192.0.2.101")));
    apply(&mut state, EngineCommand::RemovePeer { peer });
    apply(&mut state, outbound(PathId(4), 0, "192.0.2.2:6784"));
    assert_eq!(source(&state, 4, 0), None);
}
