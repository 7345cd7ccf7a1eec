//! Several lanes to one peer, one per CPU.

use weft_crypto::Cipher;
use weft_kernel::{
    KernelError,
    xfrm::{Direction, LaneGroup, PolicySpec, StateSpec, Template},
};

use crate::lab::{Pair, block_on, kernel, policy_id, state};

/// CPUs of the guest.
const CPUS: u32 = 2;

/// The fallback first, then one lane for each CPU.
fn lanes(pair: &Pair, group: LaneGroup, spi: u32) -> Vec<StateSpec> {
    let lane = |n: u32| StateSpec {
        group: Some(group),
        cpu: n.checked_sub(1),
        ..state(&pair.a, &pair.b, spi + n)
    };
    (0..=CPUS).map(lane).collect()
}

async fn install(pair: &Pair, group: LaneGroup, spi: u32) {
    let lanes = lanes(pair, group, spi);
    let inbound: Vec<_> = lanes
        .iter()
        .map(|lane| StateSpec { direction: Direction::In, group: None, cpu: None, ..lane.clone() })
        .collect();
    pair.b.add(&inbound).await;
    pair.a.add(&lanes).await;
    let id = policy_id(&pair.a, &pair.b);
    pair.a.set(&[PolicySpec { id, template: Template::Lanes(group) }]).await;
}

#[test]
fn each_cpu_sends_on_its_own_lane() {
    block_on(async {
        let pair = Pair::new(false);
        pair.connect(Cipher::Aes256Gcm, None, 0x1000).await;
        let group = LaneGroup::new(1).unwrap();
        if kernel() < (6, 13) {
            let specs = lanes(&pair, group, 0x2000);
            let results = pair.a.xfrm.add_states(&specs).await;
            assert!(results[0].is_ok());
            assert!(results[1..].iter().all(|r| matches!(r, Err(KernelError::NoPerCpu))));
            return;
        }
        // Two groups at once, as during a rekey; the policy names the second.
        for (group, spi) in [(group, 0x2000), (LaneGroup::new(2).unwrap(), 0x3000)] {
            install(&pair, group, spi).await;
            for cpu in 0..CPUS {
                let sent = format!("taskset -c {cpu} ping -q -c 20 -i 0.01 {}", pair.b.inner);
                assert!(pair.a.run(&sent).contains(" 0% packet"));
            }
            let mut counts = Vec::new();
            for lane in lanes(&pair, group, spi) {
                counts.push(pair.a.packets(lane.id()).await);
                assert_eq!(counts.last(), Some(&pair.b.packets(lane.id()).await));
            }
            println!("fallback and lanes of group {group:?}: {counts:?}");
            assert_eq!(counts[0], 0, "the fallback was used: {counts:?}");
            assert!(counts[1] >= 18 && counts[2] >= 18, "{counts:?}");
            assert_eq!(counts[1] + counts[2], 40, "{counts:?}");
        }
        let own = pair.a.xfrm.own_states().await.unwrap();
        let cpus: Vec<_> = own.iter().filter_map(|state| state.cpu).collect();
        assert_eq!(cpus.len(), 2 * CPUS as usize);
    });
}

#[test]
fn a_cpu_without_a_lane_takes_the_fallback() {
    block_on(async {
        if kernel() < (6, 13) {
            return;
        }
        let pair = Pair::new(false);
        pair.connect(Cipher::Aes256Gcm, None, 0x1000).await;
        let group = LaneGroup::new(3).unwrap();
        install(&pair, group, 0x4000).await;
        let lanes = lanes(&pair, group, 0x4000);
        let gone = lanes[2].id();
        assert!(pair.a.xfrm.remove_states(&[gone]).await.pop().unwrap().unwrap());
        for cpu in 0..CPUS {
            let sent = format!("taskset -c {cpu} ping -q -c 20 -i 0.01 {}", pair.b.inner);
            assert!(pair.a.run(&sent).contains(" 0% packet"));
        }
        let counts = [pair.a.packets(lanes[0].id()).await, pair.a.packets(lanes[1].id()).await];
        assert_eq!(counts[0] + counts[1], 40, "{counts:?}");
        assert!(counts[0] >= 18 && counts[1] >= 18, "{counts:?}");
    });
}
