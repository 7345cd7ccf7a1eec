//! Packets that arrive where inbound policies say how they must have arrived.

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

    // In plain: only from addresses that a policy names.
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

    // Inside another program's IPsec: it works, and the outer states are not ours.
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
