//! The accept rule for bridged frames where br_netfilter makes iptables filter them. Needs iptables (both
//! kinds) and a kernel with br_netfilter.

use std::time::Duration;

use weft_kernel::{ForwardRule, Kernel};

use crate::{
    lab::{BRIDGE, Container, attach_spec, host_with_bridge, on_a_host, run, wait_until},
    switch::ping,
};

/// How soon a rule that is gone must be back.
const RESTORED: Duration = Duration::from_secs(8);
const SWITCHES: [&str; 2] = ["bridge-nf-call-iptables", "bridge-nf-call-ip6tables"];

fn br_netfilter(on: bool) {
    let _ = std::process::Command::new("modprobe").arg("br_netfilter").output();
    for switch in SWITCHES {
        let path = format!("/proc/sys/net/bridge/{switch}");
        std::fs::write(&path, if on { "1" } else { "0" })
            .unwrap_or_else(|error| panic!("this test needs br_netfilter: {path}: {error}"));
    }
}

/// A host with two containers that reach each other.
async fn pair() -> (Kernel, [Container; 2]) {
    let kernel = host_with_bridge().await;
    let containers = [Container::new(), Container::new()];
    for (container, n) in containers.iter().zip(1..) {
        kernel.attach(&attach_spec(n, container)).await.unwrap();
    }
    for to in ["10.32.0.2", "fd32::2"] {
        assert!(wait_until(|| ping(&containers[0], to)), "{to}");
    }
    (kernel, containers)
}

fn both_reach(containers: &[Container; 2]) -> [bool; 2] {
    ["10.32.0.2", "fd32::2"].map(|to| ping(&containers[0], to))
}

fn rules(program: &str) -> String {
    run(program, &["-S"])
}

const RULE: &str = "-i weft -o weft -m comment --comment weft -j ACCEPT";

/// Tests one kind of iptables, by its two programs.
async fn frames_pass_while_the_rule_stands(programs: [&str; 2]) {
    br_netfilter(true);
    let (kernel, containers) = pair().await;
    let mut rule = ForwardRule::new(kernel.clone(), BRIDGE).unwrap();
    assert!(!rule.ensure().await.unwrap(), "no chain judges anything");
    for program in programs {
        run(program, &["-P", "FORWARD", "DROP"]);
        run(program, &["-A", "FORWARD", "-i", "eth9", "-m", "comment", "--comment", "theirs"]);
    }
    let theirs = programs.map(rules);
    assert_eq!(both_reach(&containers), [false, false]);
    assert!(rule.ensure().await.unwrap());
    assert_eq!(both_reach(&containers), [true, true]);
    assert!(!rule.ensure().await.unwrap());
    let mut restarted = ForwardRule::new(kernel.clone(), BRIDGE).unwrap();
    assert!(!restarted.ensure().await.unwrap());
    for program in programs {
        let text = rules(program);
        assert!(text.contains(&format!("-A FORWARD {RULE}\n")), "{text}");
        // Docker comes: its chain is the better place.
        run(program, &["-N", "DOCKER-USER"]);
        run(program, &["-I", "FORWARD", "-j", "DOCKER-USER"]);
    }
    assert!(rule.ensure().await.unwrap());
    for program in programs {
        let text = rules(program);
        assert_eq!(text.matches(RULE).count(), 1, "{text}");
        assert!(text.contains(&format!("-A DOCKER-USER {RULE}\n")), "{text}");
    }
    assert_eq!(both_reach(&containers), [true, true]);
    // br_netfilter switched off: not needed any more.
    br_netfilter(false);
    assert!(rule.ensure().await.unwrap());
    br_netfilter(true);
    assert!(rule.ensure().await.unwrap());
    assert!(rule.remove().await.unwrap());
    assert!(!rule.remove().await.unwrap());
    for (program, theirs) in programs.into_iter().zip(theirs) {
        run(program, &["-D", "FORWARD", "-j", "DOCKER-USER"]);
        run(program, &["-X", "DOCKER-USER"]);
        assert_eq!(rules(program), theirs);
    }
    assert_eq!(both_reach(&containers), [false, false]);
}

#[test]
fn frames_pass_iptables_nft_while_the_rule_stands() {
    on_a_host(|| frames_pass_while_the_rule_stands(["iptables-nft", "ip6tables-nft"]));
}

#[test]
fn frames_pass_iptables_legacy_while_the_rule_stands() {
    on_a_host(|| frames_pass_while_the_rule_stands(["iptables-legacy", "ip6tables-legacy"]));
}

#[test]
fn a_rule_that_is_gone_comes_back_and_the_switch_is_noticed() {
    on_a_host(|| async {
        br_netfilter(false);
        let (kernel, containers) = pair().await;
        run("iptables-nft", &["-P", "FORWARD", "DROP"]);
        run("ip6tables-nft", &["-P", "FORWARD", "DROP"]);
        let mut rule = ForwardRule::new(kernel, BRIDGE).unwrap();
        let mut watch = rule.watch().unwrap();
        assert!(!rule.ensure().await.unwrap());
        // Docker is started: the switch is polled.
        br_netfilter(true);
        tokio::time::timeout(RESTORED, rule.keep(&mut watch)).await.unwrap().unwrap();
        assert_eq!(both_reach(&containers), [true, true]);
        for damage in [&["-F", "FORWARD"][..], &["-D", "FORWARD", "1"], &["-F"]] {
            run("iptables-nft", damage);
            tokio::time::timeout(RESTORED, rule.keep(&mut watch)).await.unwrap().unwrap();
            assert!(rules("iptables-nft").contains(RULE), "{damage:?}");
        }
        assert_eq!(both_reach(&containers), [true, true]);
    });
}
