//! What comes in where inbound policies say how it must have come.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use weft_crypto::Cipher;
use weft_kernel::xfrm::EntryPolicy;

use crate::lab::{Host, Pair, VXLAN_PORT, block_on, policy_id};

const KEY: &str = "0x000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1fa0a1a2a3";

/// From any host, sealed.
fn sealed(ipv6: bool) -> EntryPolicy {
    let any: IpAddr =
        if ipv6 { Ipv6Addr::UNSPECIFIED.into() } else { Ipv4Addr::UNSPECIFIED.into() };
    EntryPolicy { source: any, prefix: 0, port: VXLAN_PORT, plain: false }
}

async fn allow(host: &Host, entries: &[EntryPolicy]) {
    host.xfrm.set_entry_policies(entries).await.unwrap();
}

#[test]
fn only_what_a_state_of_ours_opened_comes_in_over_ipv4() {
    block_on(only_ours(false));
}

#[test]
fn only_what_a_state_of_ours_opened_comes_in_over_ipv6() {
    block_on(only_ours(true));
}

async fn only_ours(ipv6: bool) {
    let pair = Pair::new(ipv6);
    let (a, b) = (&pair.a, &pair.b);
    let refused = || b.counter("XfrmInTmplMismatch");
    pair.connect(Cipher::Aes256Gcm, None, 0x1000).await;
    allow(a, &[sealed(ipv6)]).await;
    allow(b, &[sealed(ipv6)]).await;
    assert!(pair.pings());
    assert_eq!(refused(), 0);

    // In plain: only from whom a policy names.
    assert!(a.xfrm.remove_policies(&[policy_id(a, b)]).await.pop().unwrap().unwrap());
    assert!(!pair.ping_succeeds());
    let before = refused();
    assert!(before > 0);
    let peer = EntryPolicy {
        source: a.outer,
        prefix: if ipv6 { 128 } else { 32 },
        plain: true,
        ..sealed(ipv6)
    };
    allow(b, &[sealed(ipv6), peer]).await;
    assert!(pair.pings());
    allow(b, &[sealed(ipv6), EntryPolicy { source: b.outer, ..peer }]).await;
    assert!(!pair.ping_succeeds());
    assert!(refused() > before);

    // In somebody else's IPsec: it works, and is not ours.
    let ends = format!("src {} dst {}", a.outer, b.outer);
    for host in [a, b] {
        host.run(&format!(
            "ip xfrm state add {ends} proto esp spi 0x3001 reqid 77 mode transport \
             aead rfc4106(gcm(aes)) {KEY} 128"
        ));
    }
    a.run(&format!(
        "ip xfrm policy add {ends} proto udp dport {VXLAN_PORT} dir out tmpl {ends} proto esp \
         reqid 77 mode transport"
    ));
    let before = refused();
    assert!(!pair.ping_succeeds());
    assert!(refused() > before);
    allow(b, &[]).await;
    assert!(pair.pings());
}

/// A router between the hosts has a tunnel to B, which goes around what A sends.
#[test]
fn our_states_within_somebody_elses_tunnel_are_ours() {
    block_on(async {
        let pair = Pair::new(false);
        let (a, b) = (&pair.a, &pair.b);
        pair.connect(Cipher::Aes256Gcm, None, 0x1000).await;
        allow(a, &[sealed(false)]).await;
        allow(b, &[sealed(false)]).await;
        // What has been sealed for B goes through an interface of IPsec, and so is sealed again.
        let ends = format!("src {} dst {}", a.outer, b.outer);
        for host in [a, b] {
            let number = if std::ptr::eq(host, a) { "if_id 9" } else { "" };
            host.run(&format!(
                "ip xfrm state add {ends} proto esp spi 0x4001 reqid 99 mode tunnel {number} \
                 aead rfc4106(gcm(aes)) {KEY} 128"
            ));
        }
        a.run(&format!(
            "ip xfrm policy add {ends} proto esp dir out if_id 9 tmpl {ends} proto esp reqid 99 \
             mode tunnel"
        ));
        a.run("ip link add around type xfrm dev u0 if_id 9");
        a.run("ip link set around up");
        // The VXLAN device of the pair names its device.
        a.run("ip link del vx");
        a.run(&format!(
            "ip link add vx type vxlan id 1 dstport {VXLAN_PORT} local {} remote {} noudpcsum \
             nolearning",
            a.outer, b.outer
        ));
        a.run("ip link set vx address 02:00:00:00:00:01 mtu 1280 up");
        a.run(&format!("ip address add {}/24 dev vx", a.inner));
        a.run(&format!("ip neigh replace {} lladdr 02:00:00:00:00:02 dev vx", b.inner));
        a.run(&format!("ip route add {} dev around", b.outer));
        assert!(pair.pings(), "{}", b.run("cat /proc/thread-self/net/xfrm_stat"));
        let shown = b.run("ip -s xfrm state list reqid 99");
        assert!(!shown.contains("0(bytes), 0(packets)"), "nothing took the tunnel: {shown}");
    });
}
