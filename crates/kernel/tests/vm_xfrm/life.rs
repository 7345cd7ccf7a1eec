//! Changes of states and policies by other programs, and leftovers after a restart.

use std::time::Duration;

use weft_crypto::Cipher;
use weft_kernel::{
    KernelError,
    xfrm::{Direction, PolicySpec, Removed, StateId, StateSpec, Template, Xfrm, XfrmEvent},
};

use crate::lab::{Host, Pair, block_on, next, policy, policy_id, rest, state};

const KEY: &str = "0x000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1fa0a1a2a3";

#[test]
fn removals_by_others_are_reported_and_our_own_are_not() {
    block_on(async {
        let pair = Pair::new(false);
        let (a, b) = (&pair.a, &pair.b);
        let mut watch = a.watch();
        pair.connect(Cipher::Aes256Gcm, None, 0x1000).await;
        a.add(&[state(a, b, 0x1100)]).await;
        a.set(&[policy(a, b, 0x1100)]).await;
        let (own, policy_id) = (state(a, b, 0x1000).id(), policy_id(a, b));
        assert!(a.xfrm.remove_states(&[own]).await.pop().unwrap().unwrap());
        assert!(a.xfrm.remove_policies(&[policy_id]).await.pop().unwrap().unwrap());
        assert_eq!(rest(&mut watch).await, []);

        a.set(&[policy(a, b, 0x1100)]).await;
        let ends = format!("src {} dst {}", a.outer, b.outer);
        a.run(&format!("ip xfrm state delete {ends} proto esp spi 0x1100"));
        let state = StateId { destination: b.outer, spi: 0x1100 };
        assert_eq!(next(&mut watch).await, XfrmEvent::StateRemoved { state });
        a.run(&format!("ip xfrm policy update {ends} proto udp dport 6787 dir out action allow"));
        assert_eq!(next(&mut watch).await, XfrmEvent::PolicyRemoved { policy: policy_id });
        a.run(&format!("ip xfrm policy delete {ends} proto udp dport 6787 dir out"));
        a.set(&[policy(a, b, 0x1100)]).await;
        a.run(&format!("ip xfrm policy delete {ends} proto udp dport 6787 dir out"));
        assert_eq!(next(&mut watch).await, XfrmEvent::PolicyRemoved { policy: policy_id });
        a.run("ip xfrm state flush");
        assert_eq!(next(&mut watch).await, XfrmEvent::StatesFlushed);
        a.set(&[policy(a, b, 0x1100)]).await;
        a.run("ip xfrm policy flush");
        assert_eq!(next(&mut watch).await, XfrmEvent::PoliciesFlushed);
        // Another daemon's states are not ours to report.
        a.run(&format!(
            "ip xfrm state add {ends} proto esp spi 0x77 reqid 1 aead rfc4106(gcm(aes)) {KEY} 128"
        ));
        a.run(&format!("ip xfrm state delete {ends} proto esp spi 0x77"));
        assert_eq!(rest(&mut watch).await, []);
        assert_eq!(a.xfrm.own_policies().await.unwrap(), []);
        assert_eq!(a.xfrm.own_states().await.unwrap(), []);
    });
}

#[test]
fn a_restart_removes_exactly_its_own() {
    block_on(async {
        let pair = Pair::new(false);
        let (a, b) = (&pair.a, &pair.b);
        let ends = format!("src {} dst {}", a.outer, b.outer);
        a.run(&format!(
            "ip xfrm state add {ends} proto esp spi 0x5555 reqid 7 mode transport \
             aead rfc4106(gcm(aes)) {KEY} 128"
        ));
        a.run(&format!(
            "ip xfrm policy add {ends} proto udp dport 4242 dir out tmpl {ends} proto esp \
             reqid 7 mode transport"
        ));
        a.run("ip xfrm policy add src 10.8.0.0/16 dst 10.9.0.0/16 dir fwd action block");
        let shown = || (a.run("ip xfrm state"), a.run("ip xfrm policy"));
        let foreign = shown();

        pair.connect(Cipher::Aes256Gcm, None, 0x2000).await;
        let group = weft_kernel::xfrm::LaneGroup::new(9);
        let lane = StateSpec { group, ..state(a, b, 0x2100) };
        a.add(&[lane]).await;
        let id = weft_kernel::xfrm::PolicyId { port: 6788, ..policy_id(a, b) };
        a.set(&[PolicySpec { id, template: Template::Lanes(group.unwrap()) }]).await;
        assert_eq!(a.xfrm.own_states().await.unwrap().len(), 3);
        assert_eq!(a.xfrm.own_policies().await.unwrap().len(), 2);

        // Another process removes the objects after this one was killed.
        let runtime = tokio::runtime::Handle::current();
        let again = a.within(|| {
            let _guard = runtime.enter();
            Xfrm::open().unwrap()
        });
        let removed = again.remove_own().await.unwrap();
        assert_eq!(removed, Removed { states: 3, policies: 2 });
        assert_eq!(shown(), foreign);
        assert_eq!(again.remove_own().await.unwrap(), Removed::default());

        // Not by name either.
        let foreign_state = StateId { destination: b.outer, spi: 0x5555 };
        assert!(!again.remove_states(&[foreign_state]).await.pop().unwrap().unwrap());
        assert_eq!(again.usage(&[foreign_state]).await.pop().unwrap().unwrap(), None);
        let foreign_policy = weft_kernel::xfrm::PolicyId { port: 4242, ..policy_id(a, b) };
        assert!(!again.remove_policies(&[foreign_policy]).await.pop().unwrap().unwrap());
        assert_eq!(shown(), foreign);
    });
}

#[test]
fn a_placeholder_of_the_kernel_is_not_taken_for_a_state() {
    block_on(async {
        let pair = Pair::new(false);
        let (a, b) = (&pair.a, &pair.b);
        // As if an IKE daemon ran beside.
        let _listener = a.start("ip xfrm monitor acquire");
        std::thread::sleep(Duration::from_millis(300));
        a.set(&[policy(a, b, 0x3000)]).await;
        assert!(!pair.ping_succeeds());
        let shown = a.run("ip xfrm state");
        assert!(shown.contains("reqid 1464157780"), "no placeholder was made: {shown}");
        assert_eq!(a.xfrm.own_states().await.unwrap(), []);
        let states = 1;
        let removed = a.xfrm.remove_own().await.unwrap();
        assert_eq!(removed, Removed { states, policies: 1 }, "{shown}");
        assert_eq!(a.run("ip xfrm state"), "");
    });
}

#[test]
fn collisions_are_named_and_nothing_is_replaced() {
    block_on(async {
        let pair = Pair::new(false);
        let (a, b) = (&pair.a, &pair.b);
        pair.connect(Cipher::Aes256Gcm, None, 0x4000).await;
        assert!(pair.pings());
        let sent = a.packets(state(a, b, 0x4000).id()).await;
        // Even the very same: it would send under used numbers.
        let specs = [state(a, b, 0x4000), state(a, b, 0x4100)];
        let results = a.xfrm.add_states(&specs).await;
        let error = results[0].as_ref().unwrap_err();
        assert!(matches!(error, KernelError::SpiTaken { spi: 0x4000, .. }), "{error}");
        assert!(error.to_string().contains("0x00004000"), "{error}");
        assert!(results[1].is_ok());
        assert_eq!(a.packets(state(a, b, 0x4000).id()).await, sent);

        let ends = format!("src {} dst {}", a.outer, b.outer);
        a.run(&format!("ip xfrm policy add {ends} proto udp dport 6788 dir out action block"));
        let id = weft_kernel::xfrm::PolicyId { port: 6788, ..policy_id(a, b) };
        let spec = PolicySpec { id, template: Template::State { spi: 0x4000 } };
        let error = a.xfrm.set_policies(&[spec]).await.pop().unwrap().unwrap_err();
        assert!(matches!(error, KernelError::PolicyTaken { port: 6788, .. }), "{error}");
        assert!(a.run("ip xfrm policy").contains("action block"));
        assert!(pair.pings());
    });
}

#[test]
fn senseless_wishes_are_refused_before_the_kernel_sees_them() {
    block_on(async {
        let (a, b) = (Host::new(1, false), Host::new(2, true));
        let low = StateSpec { spi: 255, ..state(&a, &a, 0x5000) };
        let mixed = state(&a, &b, 0x5000);
        let cpu = StateSpec { cpu: Some(0), ..state(&a, &a, 0x5000) };
        let inward = StateSpec {
            direction: Direction::In,
            group: weft_kernel::xfrm::LaneGroup::new(1),
            ..cpu.clone()
        };
        for result in a.xfrm.add_states(&[low, mixed, cpu, inward]).await {
            let error = result.unwrap_err();
            assert!(matches!(error, KernelError::InvalidXfrm { .. }), "{error}");
        }
        let error = a.xfrm.set_policies(&[policy(&a, &b, 1)]).await.pop().unwrap().unwrap_err();
        assert!(matches!(error, KernelError::InvalidXfrm { .. }), "{error}");
        assert_eq!(a.run("ip xfrm state"), "");
    });
}

#[test]
fn the_same_policy_again_changes_nothing() {
    block_on(async {
        let pair = Pair::new(true);
        let (a, b) = (&pair.a, &pair.b);
        pair.connect(Cipher::Aes256Gcm, None, 0x6000).await;
        let index = || {
            let shown = a.run("ip -s xfrm policy");
            let updates = shown.lines().find(|line| line.contains("add ")).unwrap().to_owned();
            (shown.split("index ").nth(1).unwrap()[..4].to_owned(), updates)
        };
        let before = index();
        std::thread::sleep(Duration::from_millis(1100));
        a.set(&[policy(a, b, 0x6000)]).await;
        assert_eq!(index(), before);
        a.add(&[state(a, b, 0x6100)]).await;
        a.set(&[policy(a, b, 0x6100)]).await;
        assert_ne!(index(), before);
        assert_eq!(a.xfrm.own_policies().await.unwrap(), [policy(a, b, 0x6100)]);
    });
}
