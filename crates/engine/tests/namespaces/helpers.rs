//! One flow over several cores: helpers of a worker, and what TCP sees of them.

use std::io::{Read, Write};
use std::net::{IpAddr, TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use weft_engine::{Engine, EngineConfig};
use weft_engine::{EngineError, HELPERS_MAX, Work};
use weft_io::namespace::run_in;

use crate::common::{Host, MTU, PATIENCE, VNI, connect, fresh_namespace, pattern, strangers_with};

/// Two hosts that send to each other, each worker with this number of helpers.
fn helped(helpers: Option<usize>) -> (Host, Host) {
    let hosts = strangers_with(|config| config.helpers = helpers);
    connect(&hosts.0, &hosts.1, 300);
    connect(&hosts.1, &hosts.0, 400);
    hosts
}

/// Sends `bytes` over and over for so long, and checks all that arrives. Returns how often.
fn stream(from: &Host, to: &Host, address: IpAddr, bytes: &[u8], time: Duration) -> usize {
    let listener = to.run(|| TcpListener::bind((address, 0)).unwrap());
    let target = listener.local_addr().unwrap();
    thread::scope(|scope| {
        let server = scope.spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            let (mut got, mut times) = (vec![0; bytes.len()], 0);
            while stream.read_exact(&mut got).is_ok() {
                assert!(got == bytes, "the stream arrived changed");
                times += 1;
            }
            times
        });
        let mut client = from.run(|| TcpStream::connect_timeout(&target, PATIENCE).unwrap());
        client.set_write_timeout(Some(PATIENCE)).unwrap();
        let (end, mut times) = (Instant::now() + time, 0);
        while Instant::now() < end {
            client.write_all(bytes).unwrap();
            times += 1;
        }
        drop(client);
        assert_eq!(server.join().unwrap(), times);
        times
    })
}

/// The host's TCP counters of packets out of order (`nstat`), by name.
fn out_of_order(host: &Host) -> Vec<(String, u64)> {
    let text = host.run(|| std::fs::read_to_string("/proc/thread-self/net/netstat").unwrap());
    let line = |nth| text.lines().filter(|line| line.starts_with("TcpExt:")).nth(nth).unwrap();
    let names = line(0).split(' ').zip(line(1).split(' ')).skip(1);
    let wanted = |name: &str| name.contains("Reorder") || name == "TCPOFOQueue";
    let found: Vec<_> = names
        .filter(|(name, _)| wanted(name))
        .map(|(name, value)| (name.to_owned(), value.parse().unwrap()))
        .collect();
    assert!(found.len() >= 4, "{text}");
    found
}

#[test]
fn tcp_sees_nothing_out_of_order() {
    for helpers in [1, 3] {
        let (a, b) = helped(Some(helpers));
        let bytes = pattern(9, 8 << 20);
        stream(&a, &b, b.v4.into(), &bytes, Duration::from_secs(2));
        thread::scope(|scope| {
            scope.spawn(|| stream(&a, &b, b.v6, &bytes, Duration::from_secs(1)));
            stream(&b, &a, a.v4.into(), &bytes, Duration::from_secs(1));
        });
        for host in [&a, &b] {
            assert!(
                out_of_order(host).iter().all(|(_, count)| *count == 0),
                "{helpers}: {:?}",
                out_of_order(host)
            );
            assert_eq!(host.drops(), []);
            let counters = host.engine.counters();
            assert_eq!(counters.done(Work::HelpersOn), helpers as u64);
            assert!(counters.done(Work::UnitsHelped) > 100, "{counters:?}");
            assert!(counters.workers[0].helpers_busy > Duration::ZERO);
        }
    }
}

#[test]
fn workers_with_helpers_come_and_go_under_traffic() {
    let (a, b) = helped(Some(2));
    let bytes = pattern(10, 1 << 20);
    thread::scope(|scope| {
        let traffic = scope.spawn(|| stream(&a, &b, b.v4.into(), &bytes, Duration::from_secs(1)));
        for number in [3, 1, 2].into_iter().cycle() {
            a.run(|| a.engine.set_workers(number)).unwrap();
            b.run(|| b.engine.set_workers(4 - number)).unwrap();
            thread::sleep(Duration::from_millis(30));
            if traffic.is_finished() {
                break;
            }
        }
        assert!(traffic.join().unwrap() > 0);
    });
    let counters = a.engine.counters();
    assert!(counters.done(Work::HelpersOff) > 0, "{counters:?}");
    assert!(counters.done(Work::UnitsHelped) > 0, "{counters:?}");
}

/// All datagrams arrive with any number of helpers that this machine gets; at rest there are none.
#[test]
fn helpers_that_come_by_themselves_go_by_themselves() {
    let (a, b) = helped(None);
    stream(&a, &b, b.v4.into(), &pattern(11, 4 << 20), Duration::from_secs(3));
    let is_off = |host: &Host| {
        host.wait_counters(|counters| {
            counters.done(Work::HelpersOn) == counters.done(Work::HelpersOff)
        });
    };
    is_off(&a);
    is_off(&b);
}

#[test]
fn the_number_of_helpers_has_a_limit() {
    let namespace = fresh_namespace();
    let mut config = EngineConfig::new("weft0", VNI, MTU);
    config.helpers = Some(HELPERS_MAX + 1);
    let error = run_in(&namespace, || Engine::start(&config, |_| {}).unwrap_err()).unwrap();
    assert!(matches!(error, EngineError::Configuration { .. }), "{error}");
    assert!(error.to_string().contains(&format!("0 to {HELPERS_MAX}")), "{error}");
}
