//! The lane that a flow takes and keeps.

use std::time::Instant;

use weft_io::steer::FLOW_PAUSE_NS;

use super::*;
use crate::LANE_ASKS_MAX;
use crate::tables::flows::{Flows, PAUSE_TICKS};
use crate::tables::state::Path;

const LANE_CIPHER: Cipher = Cipher::ChaCha20Poly1305;

fn key_of_lane(lane: u16) -> SaKey {
    SaKey::from_bytes([lane as u8 + 3; 36])
}

/// Installs one more lane, of which nothing has been heard yet, with a peer that has this engine.
fn add_lane_to(rig: &mut Rig, lane: u16, remote_engine: EngineKind) {
    let inbound = InboundSa {
        lane,
        cipher: LANE_CIPHER,
        key: key_of_lane(lane),
        remote_engine,
        ..inbound_sa(SPI + u32::from(lane))
    };
    rig.command(EngineCommand::InstallInbound {
        engine: EngineKind::Userspace,
        remote: Ipv4Addr::LOCALHOST.into(),
        peer: PEER,
        path: PATH,
        sa: inbound,
    });
    replace_outbound(rig, lane, remote_engine);
}

/// Installs the SA that a lane sends with.
fn replace_outbound(rig: &mut Rig, lane: u16, remote_engine: EngineKind) {
    let remote = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), rig.far_socket.port());
    let (spi, key) = (SPI + u32::from(lane), key_of_lane(lane));
    let outbound =
        OutboundSa { spi, lane, cipher: LANE_CIPHER, key, remote_engine, ..outbound_sa(SPI) };
    rig.command(EngineCommand::InstallOutbound {
        engine: EngineKind::Userspace,
        peer: PEER,
        path: PATH,
        sa: outbound,
        remote,
    });
}

fn add_lane(rig: &mut Rig, lane: u16) {
    add_lane_to(rig, lane, EngineKind::Userspace);
}

fn path(rig: &Rig) -> (u32, &Path) {
    let number = rig.state.path_number(PATH).unwrap();
    (number, rig.state.paths.get(number).unwrap())
}

fn prove(rig: &Rig, lane: u16) {
    rig.state.lane(path(rig).0, lane).unwrap().prove();
}

/// Installs more lanes that may carry at once.
fn add_proven<const N: usize>(rig: &mut Rig, lanes: [u16; N]) {
    for lane in lanes {
        add_lane(rig, lane);
        prove(rig, lane);
    }
}

/// A worker's look at its lanes, all of them or those that are asked for: whether some still are, and how many
/// dummies were sent.
fn look(rig: &Rig, all: bool) -> (bool, u64) {
    let (tap, socket, counters) = (&rig.tap, &rig.socket, &rig.counters);
    let env = Env { tap, socket, counters, events: &|_| {} };
    let before = rig.counters().done(Work::DatagramsSent);
    let asking = rig.transmitter.look_after_lanes(&rig.state, &env, 1, all);
    (asking, rig.counters().done(Work::DatagramsSent) - before)
}

/// Notes that a stream goes by a lane, or little.
fn carries(rig: &Rig, lane: usize, bytes: u64, tick: u32) {
    path(rig).1.lanes[lane].as_ref().unwrap().load.add(bytes, tick);
}

#[test]
fn lanes_share_the_flows_and_each_flow_keeps_its_lane() {
    let mut rig = Rig::new();
    add_lane(&mut rig, 2);
    // A lane of which nothing has been heard carries nothing.
    rig.transmit(&mut [udp_read(&pattern(100), true)]);
    rig.receive();
    assert!(!rig.state.lane(path(&rig).0, 2).unwrap().is_alive());
    prove(&rig, 2);
    for port in 0..32_u8 {
        let mut read = udp_read(&pattern(100), true);
        read[vnet::LEN + 14 + 20 + 1] = port;
        rig.transmit(&mut [read.clone(), read]);
    }
    rig.receive();
    let mut packets: Vec<u64> = [SPI, SPI + 2]
        .iter()
        .map(|spi| {
            rig.state.inbound.get(rig.state.inbound_of(*spi).unwrap()).unwrap().hold().highest()
        })
        .collect();
    packets[0] -= 1;
    assert_eq!(packets.iter().sum::<u64>(), 64);
    assert!(packets.iter().all(|count| *count >= 10 && count % 2 == 0), "{packets:?}");
}

/// Sends a packet of each of some flows; returns how many went by each of three lanes.
fn sent_by_lane(rig: &mut Rig, ports: std::ops::Range<u8>) -> [u64; 3] {
    let sent = |rig: &Rig| {
        let lanes = &path(rig).1.lanes;
        [0, 1, 2]
            .map(|lane| lanes.get(lane).and_then(Option::as_ref).map_or(0, |it| it.sa.packets()))
    };
    let before = sent(rig);
    for port in ports {
        let mut read = udp_read(&pattern(100), true);
        read[vnet::LEN + 14 + 20 + 1] = port;
        rig.transmit(&mut [read]);
    }
    rig.receive();
    let now = sent(rig);
    [0, 1, 2].map(|lane| now[lane] - before[lane])
}

#[test]
fn flows_stay_on_the_first_lane_when_others_open() {
    let pause = Duration::from_nanos(FLOW_PAUSE_NS.unsigned_abs().into());
    let mut rig = loop {
        let mut rig = Rig::new();
        let begun = Instant::now();
        assert_eq!(sent_by_lane(&mut rig, 0..32), [32, 0, 0]);
        add_proven(&mut rig, [1, 2]);
        let then = sent_by_lane(&mut rig, 0..32);
        // Else this thread got no processor for so long that they may have paused.
        if begun.elapsed() < pause {
            assert_eq!(then, [32, 0, 0]);
            break rig;
        }
    };
    let others = sent_by_lane(&mut rig, 32..64);
    assert!(others.iter().all(|packets| *packets > 0), "those that begin: {others:?}");
}

#[test]
fn a_flow_with_several_lanes_is_not_moved_by_one_with_a_single_lane_in_its_slot() {
    let mut rig = Rig::new();
    add_proven(&mut rig, [1]);
    let (number, hash) = (path(&rig).0, 77);
    let flows = Flows::default();
    // It begins beside a stream on the first lane.
    let lane = |tick| {
        carries(&rig, 0, 1 << 20, tick);
        flows.lane(path(&rig), (0, 2), hash, tick)
    };
    assert_eq!(lane(1), Some(1));
    flows.keep(number, hash, 2);
    assert_eq!(lane(2), Some(1), "it goes on");
    // Once it has paused, the slot is the other's.
    let later = 2 + PAUSE_TICKS.cast_unsigned();
    flows.keep(number, hash, later);
    assert_eq!(lane(later), Some(0));
}

#[test]
fn flows_that_come_to_another_worker_keep_their_lanes() {
    let mut rig = Rig::new();
    add_proven(&mut rig, [1, 2]);
    let [stays, goes] = [Flows::default(), Flows::default()];
    let [old, new, own] = [1, 2, 3].map(|number| number << 22);
    let pause = PAUSE_TICKS.cast_unsigned();
    assert_eq!(goes.lane(path(&rig), (2, 3), old, 1), Some(2));
    assert_eq!(goes.lane(path(&rig), (2, 3), new, pause), Some(2));
    assert_ne!(goes.lane(path(&rig), (2, 3), own, pause), Some(1));
    assert_eq!(stays.lane(path(&rig), (1, 3), own, pause), Some(1));
    stays.inherit(&goes, pause + 1);
    // One that begins, or has paused, comes to the first: streams go by the others.
    carries(&rig, 1, 1 << 20, pause + 1);
    carries(&rig, 2, 1 << 20, pause + 1);
    let lane = |hash| stays.lane(path(&rig), (1, 2), hash, pause + 1);
    assert_eq!([lane(new), lane(own), lane(old)], [Some(2), Some(1), Some(0)]);
}

#[test]
fn a_flow_that_begins_beside_a_stream_takes_another_lane_and_keeps_it() {
    let mut rig = Rig::new();
    add_proven(&mut rig, [1]);
    let flows = Flows::default();
    // The first of two workers, whose own lane is the first.
    let lane = |hash, tick| flows.lane(path(&rig), (0, 2), hash, tick);
    let (old, early, late) = (1_000, 20_000, 300_000);
    assert_eq!([lane(old, 1), lane(early, 4)], [Some(0); 2], "nothing goes anywhere yet");
    // The first flow has become a stream.
    carries(&rig, 0, 1 << 20, 6);
    carries(&rig, 1, 1_000, 6);
    assert_eq!(lane(late, 6), Some(1));
    assert_eq!([lane(old, 6), lane(early, 6)], [Some(0); 2], "they go on");
    // If as much goes by the other lane, a flow stays with its worker.
    carries(&rig, 0, 1 << 20, 7);
    carries(&rig, 1, 1 << 21, 7);
    assert_eq!(lane(4_000_000, 7), Some(0));
    assert_eq!([lane(old, 7), lane(late, 7)], [Some(0), Some(1)]);
    // No pause is long enough but one after which nothing can be under way.
    let pause = PAUSE_TICKS.cast_unsigned();
    let mut tick = 7;
    for _ in 0..10 {
        tick += pause - 1;
        carries(&rig, 0, 1 << 20, tick);
        assert_eq!([lane(old, tick), lane(late, tick)], [Some(0), Some(1)]);
    }
    tick += pause;
    carries(&rig, 0, 1 << 20, tick);
    assert_eq!(lane(early, tick), Some(1), "it has paused since the fifth tick");
    assert_eq!(lane(old, tick), Some(1), "it has paused as well");
}

#[test]
fn flows_that_begin_at_once_are_shared_out() {
    let mut rig = Rig::new();
    add_proven(&mut rig, [1, 2]);
    let flows = Flows::default();
    let mut begun = [0; 3];
    for hash in 0..9 {
        // All of them come to one worker.
        let lane = flows.lane(path(&rig), (0, 3), hash << 20, 5).unwrap();
        begun[lane] += 1;
        assert_eq!(flows.lane(path(&rig), (0, 3), hash << 20, 6), Some(lane), "it goes on");
    }
    assert_eq!(begun, [3; 3]);
    // Much later, one by one, each comes to the worker's own lane.
    for number in 1..10 {
        let lane = flows.lane(path(&rig), (0, 3), number << 20, 1_000 * number);
        assert_eq!(lane, Some(0));
    }
}

#[test]
fn a_flow_leaves_a_lane_that_is_gone_or_that_stood_in_for_its_own() {
    let mut rig = Rig::new();
    add_lane(&mut rig, 1);
    let flows = Flows::default();
    // The second of two workers, whose own lane is not proven yet.
    let lane = |rig: &Rig, tick| flows.lane(path(rig), (1, 2), 77, tick);
    assert_eq!(lane(&rig, 1), Some(0));
    prove(&rig, 1);
    assert_eq!(lane(&rig, 1), Some(1));
    rig.state.lane(path(&rig).0, 1).unwrap().disprove();
    assert_eq!(lane(&rig, 1), Some(0));
    prove(&rig, 1);
    assert_eq!(lane(&rig, 1), Some(1));
    // A worker more at the peer moves nothing that is at its own lane.
    add_lane(&mut rig, 2);
    prove(&rig, 2);
    carries(&rig, 1, 1 << 20, 1);
    assert_eq!(lane(&rig, 1), Some(1));
}

/// Looks that come soon are for lanes that carry nothing yet.
#[test]
fn lanes_that_are_new_are_asked_for_between_the_looks_at_all() {
    let mut rig = Rig::new();
    let begun = rig.state.lanes_begun();
    add_lane(&mut rig, 1);
    add_lane(&mut rig, 2);
    assert_eq!(rig.state.lanes_begun(), begun + 2);
    prove(&rig, 2);
    for _ in 1..LANE_ASKS_MAX {
        assert_eq!(look(&rig, false), (true, 1));
    }
    assert_eq!(look(&rig, false), (false, 1), "it was asked for often enough");
    assert_eq!(look(&rig, false), (false, 0));
    // Frames came in on the other, whose sender waits for a sign.
    rig.state.lane(path(&rig).0, 2).unwrap().carry();
    assert_eq!(look(&rig, true), (false, 2));
    // A new SA of a proven lane asks for nothing; a new SA of another lane asks for that lane.
    replace_outbound(&mut rig, 2, EngineKind::Userspace);
    assert_eq!((rig.state.lanes_begun(), look(&rig, false)), (begun + 2, (false, 0)));
    replace_outbound(&mut rig, 1, EngineKind::Userspace);
    assert_eq!((rig.state.lanes_begun(), look(&rig, false)), (begun + 3, (true, 1)));
    // A lane whose peer answers no dummies cannot be proven.
    replace_outbound(&mut rig, 1, EngineKind::Kernel);
    assert_eq!((rig.state.lanes_begun(), look(&rig, false)), (begun + 3, (false, 0)));
}

/// The peer's first packets may come before this host knows that its lanes have ports.
#[test]
fn a_lane_is_not_taken_for_proven_before_it_can_be_answered() {
    let mut rig = Rig::new();
    let (number, _) = path(&rig);
    rig.state.paths.get_mut(number).unwrap().responds = true;
    add_lane(&mut rig, 1);
    rig.state.lane(number, 1).unwrap().hear();
    assert_eq!(look(&rig, false), (true, 0));
    let source = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), rig.far_socket.port());
    rig.state.set_lane_source(number, 1, rig.socket.real.remote(source).unwrap());
    assert_eq!(look(&rig, false), (false, 1), "the peer hears that it came");
    assert!(path(&rig).1.is_open(1));
    // It is asked for no longer than any other.
    add_lane(&mut rig, 2);
    (1..LANE_ASKS_MAX).for_each(|_| assert_eq!(look(&rig, false), (true, 0)));
    assert_eq!(look(&rig, false), (false, 0));
}

/// Until the peer has learned that this host opens a lane, it still does so itself. Packets of this host by
/// its own way may be lost: an arrival proves nothing.
#[test]
fn frames_on_the_peers_lane_do_not_prove_a_lane_of_this_host() {
    let mut rig = Rig::new();
    add_lane(&mut rig, 1);
    let number = path(&rig).0;
    let remote = path(&rig).1.remote.unwrap().address();
    let nothing = |_| {};
    for (port, is_proven) in [(remote.port() ^ 1, false), (remote.port(), true)] {
        let source = SocketAddr::new(remote.ip(), port);
        let env =
            Env { tap: &rig.tap, socket: &rig.socket, counters: &rig.counters, events: &nothing };
        rig.state.lane(number, 1).unwrap().hear();
        rig.receiver.sources.check(&rig.state, &env, (number, 1), source);
        look(&rig, true);
        assert_eq!(path(&rig).1.is_open(1), is_proven);
    }
}

/// The kernel engine sends on as many lanes as it can use and answers no dummies. It takes the dummies' source for
/// its peer's address.
#[test]
fn towards_a_kernel_engine_there_is_the_first_lane_alone() {
    let mut rig = Rig::new();
    add_lane_to(&mut rig, 1, EngineKind::Kernel);
    // Something came in on it.
    prove(&rig, 1);
    let flows = Flows::default();
    for hash in 0..64 {
        let lane = flows.lane(path(&rig), (1, 2), hash << 24, 1);
        assert_eq!(lane, Some(0));
    }
    let nothing = |_| {};
    let env = Env { tap: &rig.tap, socket: &rig.socket, counters: &rig.counters, events: &nothing };
    rig.transmitter.tell_of_lanes(&rig.state, &env, 1);
    for _ in 0..10 {
        assert!(!rig.transmitter.look_after_lanes(&rig.state, &env, 1, true), "none is asked for");
    }
    assert_eq!(rig.counters().done(Work::DatagramsSent), 0, "dummies");
}

/// The kernel engine sends all lanes from one port, and where each of its CPUs has one, nothing on the first.
#[test]
fn a_kernel_engine_that_has_moved_is_seen_on_every_lane() {
    for (engine, seen) in [(EngineKind::Kernel, 1), (EngineKind::Userspace, 0)] {
        let mut rig = Rig::with(|outbound| outbound.remote_engine = engine);
        add_lane_to(&mut rig, 1, engine);
        let moved = Mutex::new(Vec::new());
        let note = |event| moved.lock().unwrap().push(event);
        let env =
            Env { tap: &rig.tap, socket: &rig.socket, counters: &rig.counters, events: &note };
        let source = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), 9);
        rig.receiver.sources.check(&rig.state, &env, (path(&rig).0, 1), source);
        let expected = EngineEvent::RemoteMoved { path: PATH, remote: source };
        assert_eq!(*moved.lock().unwrap(), vec![expected; seen], "{engine:?}");
    }
}
