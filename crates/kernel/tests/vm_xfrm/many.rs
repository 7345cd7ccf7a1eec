//! A thousand peers.

use std::{
    net::{IpAddr, Ipv4Addr},
    time::{Duration, Instant},
};

use weft_kernel::xfrm::{Direction, PolicySpec, StateSpec, XfrmEvent};

use crate::lab::{Host, block_on, policy, rest, state};

const PEERS: u16 = 1000;
/// Time limit to install, rekey or remove all of them.
const LIMIT: Duration = Duration::from_secs(5);

fn peer(number: u16) -> IpAddr {
    let [high, low] = number.to_be_bytes();
    Ipv4Addr::new(10, 77, high, low).into()
}

fn states(host: &Host, generation: u32) -> Vec<StateSpec> {
    let pair = |number: u16| {
        let spi = 0x1000 + generation * 0x0010_0000 + u32::from(number);
        let out = StateSpec { destination: peer(number), ..state(host, host, spi) };
        let source = out.destination;
        let back = state(host, host, spi);
        [out, StateSpec { direction: Direction::In, source, ..back }]
    };
    (0..PEERS).flat_map(pair).collect()
}

fn policies(host: &Host, generation: u32) -> Vec<PolicySpec> {
    let one = |spec: &StateSpec| {
        let mut policy = policy(host, host, spec.spi);
        policy.id.destination = spec.destination;
        policy
    };
    let outbound = |spec: &&StateSpec| spec.direction == Direction::Out;
    states(host, generation).iter().filter(outbound).map(one).collect()
}

/// Memory that the kernel has in use for itself, in KiB.
fn kernel_memory() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap();
    let of = |name: &str| -> u64 {
        let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        line.trim().trim_end_matches(" kB").parse().unwrap()
    };
    of("Slab:") + of("Percpu:") + of("VmallocUsed:")
}

fn all_ok<T: std::fmt::Debug, E: std::fmt::Display>(results: Vec<Result<T, E>>) {
    for result in results {
        if let Err(error) = result {
            panic!("{error}");
        }
    }
}

#[test]
fn a_thousand_peers_come_rekey_and_go_in_seconds() {
    block_on(async {
        let host = Host::new(1, false);
        host.run("ip link add u0 type dummy");
        host.run("ip address add 10.1.0.1/8 dev u0");
        host.run("ip link set u0 up");
        let mut watch = host.watch();
        // The first of its kind loads modules.
        host.xfrm.support().await.unwrap();
        let xfrm = &host.xfrm;
        let memory = kernel_memory();

        let start = Instant::now();
        all_ok(xfrm.add_states(&states(&host, 0)).await);
        all_ok(xfrm.set_policies(&policies(&host, 0)).await);
        let installed = start.elapsed();
        let per_peer = (kernel_memory() - memory) as f64 / f64::from(PEERS);
        assert_eq!(host.run("ip xfrm state count").split_whitespace().last(), Some("2000"));

        let start = Instant::now();
        all_ok(xfrm.add_states(&states(&host, 1)).await);
        let added = start.elapsed();
        all_ok(xfrm.set_policies(&policies(&host, 1)).await);
        let moved = start.elapsed() - added;
        let old: Vec<_> = states(&host, 0).iter().map(StateSpec::id).collect();
        all_ok(xfrm.remove_states(&old).await);
        let rekeyed = start.elapsed();

        let start = Instant::now();
        let ids: Vec<_> = states(&host, 1).iter().map(StateSpec::id).collect();
        let usage = xfrm.usage(&ids).await;
        let read = start.elapsed();
        assert!(usage.iter().all(|usage| matches!(usage, Ok(Some(_)))));

        let start = Instant::now();
        let own = (xfrm.own_states().await.unwrap(), xfrm.own_policies().await.unwrap());
        let listed = start.elapsed();
        assert_eq!((own.0.len(), own.1.len()), (2 * PEERS as usize, PEERS as usize));

        let start = Instant::now();
        let removed = xfrm.remove_own().await.unwrap();
        let gone = start.elapsed();
        assert_eq!((removed.states, removed.policies), (2 * PEERS as usize, PEERS as usize));
        println!(
            "{PEERS} peers: install {installed:.2?}, rekey {rekeyed:.2?} (states {added:.2?}, policies \
             {moved:.2?}), counters {read:.2?}, \
             list {listed:.2?}, remove {gone:.2?}, {per_peer:.1} KiB each"
        );
        for taken in [installed, rekeyed, gone] {
            assert!(taken < LIMIT, "{taken:?}");
        }
        let events = rest(&mut watch).await;
        assert!(events.iter().all(|event| *event == XfrmEvent::Lost), "{events:?}");
        println!("notices lost: {}", !events.is_empty());
    });
}
