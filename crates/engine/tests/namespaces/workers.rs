//! Several workers, lanes that differ in number, and workers that come and go.

use std::net::UdpSocket;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use weft_engine::{Direction, DropReason, EngineError, LANE_LOOK_MS, WORKERS_MAX, Work};
use weft_io::tap::{Tap, TapOptions};
use weft_io::uninterrupted;
use weft_path::{EngineCommand, EngineEvent, EngineKind, Mac};

use crate::common::{
    Host, PATH, PATIENCE, VNI, connect, flows, inbound, outbound, pattern, strangers,
    strangers_with,
};

/// After so long the loads of lanes are forgotten: longer than two ticks of the flows.
const LOADS_FORGOTTEN: Duration = Duration::from_millis(50);

/// The SPI of a lane, as path choice makes them: the last byte is the lane.
fn spi(base: u32, lane: u16) -> u32 {
    base << 8 | u32::from(lane)
}

/// Makes `from` send to `to` on lanes from 0 on.
fn connect_lanes(from: &Host, to: &Host, base: u32, lanes: u16) {
    connect(from, to, spi(base, 0));
    for lane in 1..lanes {
        let mut sa = inbound(spi(base, lane));
        sa.lane = lane;
        to.command(EngineCommand::InstallInbound {
            engine: EngineKind::Userspace,
            remote: from.wire,
            peer: from.id,
            path: PATH,
            sa,
        });
        let mut sa = outbound(spi(base, lane));
        sa.lane = lane;
        from.command(EngineCommand::InstallOutbound {
            engine: EngineKind::Userspace,
            peer: to.id,
            path: PATH,
            sa,
            remote: to.data_address(),
        });
    }
}

/// None of the drops that a mistake about lanes or SAs would cause.
fn check_drops(host: &Host) {
    for reason in [
        DropReason::Replayed,
        DropReason::Forged,
        DropReason::UnknownSpi,
        DropReason::TooOld,
        DropReason::SendFailed,
        DropReason::NoPath,
    ] {
        assert_eq!(host.dropped(reason), 0, "{}", reason.name());
    }
}

/// Lanes that carried frames to the host; a dummy packet has no frame.
fn used_lanes(host: &Host) -> usize {
    let sas = host.engine.counters().sas;
    let inbound = sas.iter().filter(|sa| sa.direction == Direction::Inbound);
    inbound.filter(|sa| sa.traffic.bytes > 0).count()
}

/// How many SAs were said to be used for the first time.
fn first_uses(host: &Host) -> usize {
    let is_first = |event: &&EngineEvent| matches!(event, EngineEvent::InboundFirstUse { .. });
    host.events.all().iter().filter(is_first).count()
}

#[test]
fn peers_differ_in_workers_and_lanes() {
    for (workers, lanes) in [((1, 3), 1), ((3, 1), 1), ((2, 2), 2), ((2, 3), 2), ((3, 2), 4)] {
        let (a, b) = strangers();
        a.run(|| a.engine.set_workers(workers.0)).unwrap();
        b.run(|| b.engine.set_workers(workers.1)).unwrap();
        assert_eq!((a.engine.workers(), b.engine.workers()), workers);
        connect_lanes(&a, &b, 300, lanes);
        connect_lanes(&b, &a, 400, lanes);
        let bytes = pattern(5, 1 << 20);
        let until = Instant::now() + PATIENCE;
        // Lanes beyond the first carry frames once they are proven.
        let wanted = usize::from(lanes.min(2));
        while used_lanes(&a) < wanted || used_lanes(&b) < wanted {
            assert!(Instant::now() < until, "{workers:?}: {:?}", a.engine.counters());
            flows(&a, &b, b.v4.into(), 12, &bytes);
            flows(&b, &a, a.v6, 12, &bytes);
        }
        for host in [&a, &b] {
            check_drops(host);
            // The last lanes may have had neither a frame nor a look of their worker yet.
            while first_uses(host) < usize::from(lanes) {
                assert!(Instant::now() < until, "{:?}", host.events.all());
                thread::sleep(Duration::from_millis(10));
            }
            assert_eq!(first_uses(host), usize::from(lanes), "{:?}", host.events.all());
            // The kernel steers by lane, and a worker without its own lane receives nothing.
            let received = host.engine.counters().workers;
            for (number, worker) in received.iter().enumerate().skip(lanes.into()) {
                assert_eq!(
                    worker.done(Work::DatagramsReceived),
                    0,
                    "worker {number} of {workers:?}, {lanes} lanes"
                );
            }
        }
    }
}

#[test]
fn new_lanes_carry_before_the_next_look_at_all_lanes() {
    let limit = Duration::from_millis(LANE_LOOK_MS);
    for initiator_sends in [true, false] {
        let (a, b) = strangers();
        for host in [&a, &b] {
            host.run(|| host.engine.set_workers(2)).unwrap();
        }
        // The first has the lower peer id, hence begins.
        let (from, to) = if initiator_sends { (&a, &b) } else { (&b, &a) };
        // Nothing is said in answer: the frames that a lane carries prove it.
        let sink = to.run(|| UdpSocket::bind((to.v4, 0)).unwrap());
        connect_lanes(&a, &b, 300, 2);
        connect_lanes(&b, &a, 400, 2);
        let begun = Instant::now();
        while used_lanes(to) < 2 {
            assert!(
                begun.elapsed() < limit,
                "{initiator_sends}: {:?} from {:?}",
                to.engine.counters(),
                from.engine.counters()
            );
            let flow = from.run(|| UdpSocket::bind((from.v4, 0)).unwrap());
            flow.send_to(b"new", sink.local_addr().unwrap()).unwrap();
            thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Flows are counted by the worker that they come to: by chance, half of them come to each.
#[test]
fn a_flow_that_begins_beside_a_stream_goes_to_the_other_worker() {
    const FLOWS: u64 = 20;
    let (a, b) = strangers();
    a.run(|| a.engine.set_workers(2)).unwrap();
    connect_lanes(&a, &b, 300, 1);
    connect_lanes(&b, &a, 400, 1);
    let sink = b.run(|| UdpSocket::bind((b.v4, 0)).unwrap()).local_addr().unwrap();
    let new_flow = || a.run(|| UdpSocket::bind((a.v4, 0)).unwrap());
    let reads = |worker: usize| a.engine.counters().workers[worker].done(Work::TapReads);
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            let stream = new_flow();
            while !stop.load(Ordering::Relaxed) {
                // A full queue is the wanted load.
                let _ = stream.send_to(&[0; 1_000], sink);
            }
        });
        let begun = Instant::now();
        while reads(0).max(reads(1)) < 10_000 && begun.elapsed() < PATIENCE {
            thread::sleep(Duration::from_millis(1));
        }
        let other = if reads(0) < reads(1) { 0 } else { 1 };
        // A stream that got no processor for a while is not load: then half of them come here.
        let all_came = || {
            let before = reads(other);
            for _ in 0..FLOWS {
                let _ = new_flow().send_to(b"new", sink);
            }
            thread::sleep(Duration::from_millis(50));
            reads(other) - before >= FLOWS
        };
        let came = std::iter::repeat_with(all_came)
            .take_while(|came| *came || begun.elapsed() < PATIENCE)
            .any(|came| came);
        stop.store(true, Ordering::Relaxed);
        assert!(came, "{:?}", a.engine.counters().workers);
    });
}

#[test]
fn workers_come_and_go_under_traffic() {
    let (a, b) = strangers();
    connect_lanes(&a, &b, 300, 3);
    connect_lanes(&b, &a, 400, 3);
    let enough = AtomicBool::new(false);
    thread::scope(|scope| {
        let traffic = scope.spawn(|| {
            while !enough.load(Ordering::Relaxed) {
                flows(&a, &b, b.v4.into(), 4, &pattern(6, 24 << 20));
            }
        });
        let mut most = (0, 0);
        for number in [3, 1, 2, 4, 1, 3].into_iter().cycle() {
            a.run(|| a.engine.set_workers(number)).unwrap();
            b.run(|| b.engine.set_workers(4 - number.min(3))).unwrap();
            most = (most.0.max(a.engine.workers()), most.1.max(b.engine.workers()));
            // Numbers go on changing until the last flow has ended.
            enough.fetch_or(most == (4, 3), Ordering::Relaxed);
            thread::sleep(Duration::from_millis(20));
            if traffic.is_finished() {
                break;
            }
        }
        traffic.join().unwrap();
    });
    check_drops(&a);
    check_drops(&b);
    // The counts of departed workers are not lost.
    let all = a.engine.counters();
    assert_eq!(all.workers.len(), 4);
    assert!(
        all.workers.iter().skip(1).any(|worker| worker.done(Work::DatagramsSent) > 0),
        "{all:?}"
    );
}

/// Also while a worker that was removed is still there.
#[test]
fn queues_of_direct_ports_are_the_affair_of_the_workers_that_stay() {
    const FLOWS: u64 = 100;
    let (a, _b) = strangers();
    let peer = "10.98.0.2:9";
    a.run(|| {
        a.engine.set_workers(3).unwrap();
        let queues = (0..4).map(|_| Tap::open(&TapOptions::new("direct0")).unwrap()).collect();
        for line in [
            "ip address add 10.98.0.1/24 dev direct0",
            "sysctl -qw net.ipv6.conf.direct0.disable_ipv6=1",
            "ip link set direct0 up",
            "ip neighbour add 10.98.0.2 lladdr 02:00:00:00:00:99 dev direct0",
        ] {
            let mut words = line.split(' ');
            let status = Command::new(words.next().unwrap()).args(words).status().unwrap();
            assert!(status.success(), "{line}");
        }
        a.engine.add_port(VNI, Mac([2, 0, 0, 0, 0, 0x98]), queues).unwrap();
    });
    let read = || {
        let workers = a.engine.counters().workers;
        workers.iter().map(|worker| worker.done(Work::TapReads)).collect::<Vec<_>>()
    };
    let mut expected = 0;
    // The kernel shares flows out to all queues; frames to unknown addresses are read and dropped. Some more
    // are the switch's.
    let mut read_of_flows = || {
        let before = read();
        a.run(|| {
            for _ in 0..FLOWS {
                UdpSocket::bind(("10.98.0.1", 0)).unwrap().send_to(b"a flow", peer).unwrap();
            }
        });
        expected += FLOWS;
        a.wait_counters(|_| {
            a.engine.port_traffic().iter().any(|(_, _, traffic)| traffic.sent.packets == expected)
        });
        read().iter().zip(before).map(|(now, before)| now - before).collect::<Vec<_>>()
    };
    assert!(read_of_flows().iter().all(|frames| *frames > 0));
    for workers in [2, 3, 1] {
        a.run(|| a.engine.set_workers(workers)).unwrap();
        let by_worker = read_of_flows();
        let stay = |worker: usize| worker < workers;
        assert!(
            by_worker.iter().zip(0..).all(|(frames, worker)| stay(worker) == (*frames > 0)),
            "{workers} workers: {by_worker:?}"
        );
    }
}

#[test]
fn packets_sent_to_a_removed_worker_arrive() {
    const PAIRS: usize = 24;
    let (a, b) = strangers();
    for host in [&a, &b] {
        host.run(|| host.engine.set_workers(3)).unwrap();
    }
    connect_lanes(&a, &b, 300, 3);
    connect_lanes(&b, &a, 400, 3);
    let until = Instant::now() + PATIENCE;
    while used_lanes(&a) < 3 || used_lanes(&b) < 3 {
        assert!(Instant::now() < until, "{:?}", a.engine.counters());
        flows(&a, &b, b.v4.into(), 12, &pattern(9, 1 << 18));
        flows(&b, &a, a.v4.into(), 12, &pattern(9, 1 << 18));
    }
    // Flows that begin now go by their workers' lanes, and not where little of the last ones went.
    thread::sleep(LOADS_FORGOTTEN);
    let pair = |_| {
        let receiver = a.run(|| UdpSocket::bind((a.v4, 0)).unwrap());
        receiver.set_read_timeout(Some(PATIENCE)).unwrap();
        let sender = b.run(|| UdpSocket::bind((b.v4, 0)).unwrap());
        sender.connect(receiver.local_addr().unwrap()).unwrap();
        (sender, receiver)
    };
    let pairs: Vec<(UdpSocket, UdpSocket)> = (0..PAIRS).map(pair).collect();
    let beyond_first = || {
        let sas = a.engine.counters().sas;
        let lanes = sas.iter().filter(|sa| sa.direction == Direction::Inbound && sa.lane > 0);
        lanes.map(|sa| sa.traffic.bytes).sum::<u64>()
    };
    let before = beyond_first();
    // The peer hears within a second from where a lane is sent now.
    for round in 0_u8..75 {
        if round == 10 {
            a.run(|| a.engine.set_workers(1)).unwrap();
        }
        for (sender, receiver) in &pairs {
            sender.send(&[round; 64]).unwrap();
            let mut got = [0; 64];
            uninterrupted(|| receiver.recv(&mut got)).unwrap();
            assert_eq!(got, [round; 64]);
        }
        thread::sleep(Duration::from_millis(20));
    }
    assert!(beyond_first() > before + 75 * 64, "all went on one lane");
    check_drops(&a);
    check_drops(&b);
}

#[test]
fn a_worker_that_stays_awake_sleeps_all_the_same_when_nothing_comes() {
    let (a, b) = strangers_with(|config| config.busy_poll = Some(Duration::from_millis(2)));
    connect_lanes(&a, &b, 300, 1);
    connect_lanes(&b, &a, 400, 1);
    flows(&a, &b, b.v4.into(), 2, &pattern(8, 4 << 20));
    let busy = || {
        let worker = &a.engine.counters().workers[0];
        worker.busy + worker.awake
    };
    // The kernel's own packets, such as neighbour discovery, wake it now and then.
    let rest = || {
        let before = busy();
        thread::sleep(Duration::from_millis(400));
        busy().saturating_sub(before)
    };
    assert!(a.engine.counters().workers[0].awake > Duration::ZERO, "it never stays awake");
    assert!((0..10).any(|_| rest() < Duration::from_millis(100)), "it never sleeps");
}

#[test]
fn a_worker_that_is_to_sleep_at_once_is_never_awake_for_answers() {
    const ANSWERS: u32 = 2_000;
    let (a, b) = strangers_with(|config| config.busy_poll = Some(Duration::ZERO));
    connect_lanes(&a, &b, 300, 1);
    connect_lanes(&b, &a, 400, 1);
    let mut left = ANSWERS;
    ask(&a, &b, || {
        left -= 1;
        left > 0
    });
    assert_eq!(a.engine.counters().workers[0].awake, Duration::ZERO);
}

/// Requests from one host to the other and answers, one after the other, for as long as that is wanted.
fn ask(a: &Host, b: &Host, mut more: impl FnMut() -> bool) {
    let here = a.run(|| UdpSocket::bind((a.v4, 0)).unwrap());
    let there = b.run(|| UdpSocket::bind((b.v4, 0)).unwrap());
    here.connect(there.local_addr().unwrap()).unwrap();
    there.connect(here.local_addr().unwrap()).unwrap();
    for socket in [&here, &there] {
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
    }
    while more() {
        here.send(b"request").unwrap();
        uninterrupted(|| there.recv(&mut [0; 16])).unwrap();
        there.send(b"answer").unwrap();
        uninterrupted(|| here.recv(&mut [0; 16])).unwrap();
    }
}

/// Left to itself it stays awake for answers, and sleeps once there are none.
#[test]
fn requests_and_answers_keep_a_worker_awake_and_rest_does_not() {
    let (a, b) = strangers();
    connect_lanes(&a, &b, 300, 1);
    connect_lanes(&b, &a, 400, 1);
    let awake = || a.engine.counters().workers[0].awake;
    flows(&a, &b, b.v4.into(), 2, &pattern(8, 16 << 20));
    let after_bulk = awake();
    let begun = Instant::now();
    // A host that is slow for a while only makes it take longer.
    ask(&a, &b, || {
        assert!(begun.elapsed() < PATIENCE, "{:?}", a.engine.counters().workers[0]);
        awake() == after_bulk
    });
    let rest = || {
        let before = awake();
        thread::sleep(Duration::from_millis(400));
        awake() - before
    };
    assert!((0..10).any(|_| rest() < Duration::from_millis(5)), "it does not rest");
}

#[test]
fn the_number_of_workers_has_limits() {
    let (a, _b) = strangers();
    for number in [0, WORKERS_MAX + 1] {
        let error = a.run(|| a.engine.set_workers(number)).unwrap_err();
        assert!(matches!(error, EngineError::Configuration { .. }), "{error}");
        assert!(error.to_string().contains(&format!("1 to {WORKERS_MAX}")), "{error}");
    }
    assert_eq!(a.engine.workers(), 1);
}

/// Lets nothing in on `host` but its data port and answers, as a stateful firewall or a NAT does.
fn close(host: &Host, rule: &str) {
    let table = format!(
        "add table inet t; add chain inet t in {{ type filter hook input priority 0; }}; add rule inet t in iifname eth0 {rule}"
    );
    let status = host.run(|| Command::new("nft").arg(&table).status().unwrap());
    assert!(status.success(), "{table}");
}

#[test]
fn a_lane_that_does_not_get_through_carries_nothing() {
    for closed_is_initiator in [true, false] {
        let (a, b) = strangers();
        a.run(|| a.engine.set_workers(2)).unwrap();
        b.run(|| b.engine.set_workers(2)).unwrap();
        // The first has the lower peer id, hence begins. Only lane 0 comes from the data port.
        let closed = if closed_is_initiator { &a } else { &b };
        close(closed, "udp dport 6784 udp sport != 6784 ct state new drop");
        connect_lanes(&a, &b, 300, 2);
        connect_lanes(&b, &a, 400, 2);
        let bytes = pattern(7, 1 << 18);
        let until = Instant::now() + Duration::from_secs(6);
        while Instant::now() < until {
            flows(&a, &b, b.v4.into(), 4, &bytes);
            flows(&b, &a, a.v6, 4, &bytes);
        }
        // The initiator's own packets open the way back; those to a closed responder are lost.
        let lanes = if closed_is_initiator { 2 } else { 1 };
        assert_eq!((used_lanes(&a), used_lanes(&b)), (lanes, lanes), "{closed_is_initiator}");
        check_drops(&a);
        check_drops(&b);
    }
}
