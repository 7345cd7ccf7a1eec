//! The tunnel's packets under IPsec and the guard, as for a VXLAN device.

use std::{thread::sleep, time::Duration};

use crate::lab::{Container, Host, Outer, PORT, Underlay, capture, join, underlay_address, until};

/// Does by hand the work of the kernel engine: transport mode, selector with the UDP port alone.
fn protect(host: &Host, other: u8, outer: Outer) {
    let (own, remote) = (underlay_address(host.number, outer), underlay_address(other, outer));
    let key = |from: u8| format!("0x{}", format!("{from:02x}").repeat(36));
    let spi = |from: u8| format!("0x{:08x}", 0x1000 + u32::from(from));
    for (from, to, by) in [(own, remote, host.number), (remote, own, other)] {
        host.space.run(&format!(
            "ip xfrm state add src {from} dst {to} proto esp spi {} reqid 1464157780 mode transport \
             replay-window 32 flag esn aead 'rfc4106(gcm(aes))' {} 128",
            spi(by),
            key(by)
        ));
    }
    host.space.run(&format!(
        "ip xfrm policy add src {own} dst {remote} proto udp dport {PORT} dir out \
         tmpl src {own} dst {remote} proto esp spi {} reqid 1464157780 mode transport",
        spi(host.number)
    ));
}

const GUARD: &str = "table inet weft-test { \
    chain out { type filter hook output priority 0; udp dport 6787 rt ipsec missing counter drop; }; \
    chain post { type filter hook postrouting priority 0; udp dport 6787 rt ipsec missing counter drop; }; \
    chain in { type filter hook input priority 0; udp dport 6787 meta ipsec missing counter drop; }; }";

fn guard(host: &Host) {
    host.space.run(&format!("nft '{GUARD}'"));
}

fn carried_encrypted(outer: Outer) {
    let underlay = Underlay::new();
    let (one, two) = (Host::new(1, &underlay), Host::new(2, &underlay));
    let (a, c) = (one.container(1), two.container(3));
    guard(&one);
    guard(&two);
    join(&[&one, &two], &[&a, &c], outer);
    let seen = capture(&underlay.0, "u1", "");
    // Before the first SA: nothing in the clear.
    assert!(!a.space.succeeds(&format!("ping -c 2 -i 0.2 -W 1 {}", c.ipv4())));
    protect(&one, 2, outer);
    protect(&two, 1, outer);
    reach(&a, &c);
    c.pings(&a);
    let frame = [0x55; 1_402];
    let mut two = two;
    crate::lab::wait(one.switch.send_probe(underlay_address(2, outer), None, &frame)).unwrap();
    let probe = crate::lab::wait(async {
        let limit = Duration::from_secs(60);
        tokio::time::timeout(limit, two.inbox.probes.recv()).await.unwrap().unwrap()
    });
    assert_eq!(probe.frame, frame);
    // States gone, then policies too, while traffic runs.
    let counted = || one.space.run("nft list table inet weft-test");
    let before = counted();
    let traffic = a.space.spawn(&format!("ping -i 0.05 {}", c.ipv4()));
    sleep(Duration::from_millis(500));
    one.space.run("ip xfrm state flush");
    sleep(Duration::from_millis(700));
    one.space.run("ip xfrm policy flush");
    until("the guard drops what the policies took before", || counted() != before);
    drop(traffic);
    let text = seen.end();
    assert!(text.contains("ESP(spi="), "{text}");
    let clear: Vec<&str> = text.lines().filter(|line| line.contains(&format!(".{PORT}"))).collect();
    assert!(clear.is_empty(), "in the clear: {clear:?}");
    // Back with them: the tunnel's cached route must not outlive the policy.
    one.space.run("ip xfrm state flush");
    protect(&one, 2, outer);
    two.space.run("ip xfrm state flush");
    two.space.run("ip xfrm policy flush");
    protect(&two, 1, outer);
    reach(&a, &c);
}

/// A neighbour that did not answer counts as unreachable for a while.
fn reach(from: &Container, to: &Container) {
    until("an answer", || from.space.succeeds(&format!("ping -c 1 -W 2 {}", to.ipv4())));
    from.pings(to);
}

#[test]
fn a_policy_with_the_port_takes_the_tunnels_packets_over_ipv4() {
    carried_encrypted(Outer::Ipv4);
}

#[test]
fn a_policy_with_the_port_takes_the_tunnels_packets_over_ipv6() {
    carried_encrypted(Outer::Ipv6);
}
