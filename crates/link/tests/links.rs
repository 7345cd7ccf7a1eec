//! Two hosts on loopback: up, messages, one link, restart, renewal, targets.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod common;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use common::raw::RawHost;
use common::{Host, config, password, within};
use tokio::net::UdpSocket;
use weft_link::limits::MESSAGE_MAX_BYTES;
use weft_link::{
    Config, Event, Identity, KeyHash, LinkState, LinkStatus, Links, REASON_ITSELF, Secret,
    SendError, Target,
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_link_comes_up_with_one_key_and_carries_messages_both_ways() {
    let mut a = Host::with_password("p");
    let mut b = {
        let mut config = config(password("p"));
        config.nickname = "other\nhost".to_owned();
        config.hello = serde_json::json!({"range": "10.32.0.0/12"});
        Host::start(config)
    };
    a.dial(&b);
    let (at_a, at_b) = (a.up().await, b.up().await);
    assert_eq!((at_a.peer, at_b.peer), (b.id(), a.id()));
    assert_eq!(at_a.session, at_b.session);
    assert_eq!(at_a.session_id, at_b.session_id);
    assert_eq!(at_a.nickname, "other host");
    assert_eq!(at_a.hello["range"], "10.32.0.0/12");

    for size in [0, 1, 1000, MESSAGE_MAX_BYTES] {
        a.links.send(b.id(), vec![7; size]).unwrap();
        assert_eq!(b.message().await, vec![7; size]);
        b.links.send(a.id(), vec![8; size]).unwrap();
        assert_eq!(a.message().await, vec![8; size]);
    }
    assert_eq!(a.links.send(b.id(), vec![0; MESSAGE_MAX_BYTES + 1]), Err(SendError::TooLong));
    assert_eq!(a.links.send(a.id(), vec![]), Err(SendError::NotConnected));

    let line = a.until(|line| line.state == LinkState::Established).await;
    assert_eq!(line.peer, Some(b.id()));
    assert_eq!(line.address, b.addr.to_string());
    assert_eq!(a.links.status().len(), 1, "the target and the link are one line");
    assert_eq!(b.links.status().len(), 1);

    b.links.shutdown().await;
    assert_eq!(a.down().await, "the peer was stopped");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_hosts_that_dial_each_other_at_once_end_with_one_link() {
    for round in 0..50 {
        let mut a = Host::with_password("p");
        let mut b = Host::with_password("p");
        a.dial(&b);
        b.dial(&a);
        let (mut at_a, mut at_b) = (a.up().await, b.up().await);
        let mut renewals = [&at_a, &at_b].map(|up| BTreeMap::from([(up.session_id, up.renewal)]));
        // One of the connections may have been replaced by the other before both sides learned of
        // it.
        while at_a.session_id != at_b.session_id {
            tokio::select! {
                up = a.up() => at_a = up,
                up = b.up() => at_b = up,
            }
            for (known, up) in renewals.iter_mut().zip([&at_a, &at_b]) {
                known.insert(up.session_id, up.renewal);
            }
        }
        assert_eq!(at_a.session, at_b.session);
        // Both sides follow any later change alike: messages pass, and neither reports Down.
        for (from, to) in [(&a, b.id()), (&b, a.id())] {
            let sent = within(async {
                while from.links.send(to, b"last".to_vec()).is_err() {
                    tokio::task::yield_now().await;
                }
            });
            sent.await;
        }
        settle(&mut a, &mut b, &mut renewals).await;
        // A session that one side takes for a renewal must not be new to the other. The first would
        // wait for a greeting that is never repeated.
        let [known_a, known_b] = renewals;
        for (session, renewal) in known_a {
            assert!(known_b.get(&session).is_none_or(|other| *other == renewal), "round {round}");
        }
        println!("round {round} done");
        tokio::join!(a.links.shutdown(), b.links.shutdown());
    }
}

/// Both ends name the same session and keep it, and neither was down.
async fn settle(a: &mut Host, b: &mut Host, renewals: &mut [BTreeMap<u64, bool>; 2]) {
    tokio::time::sleep(Duration::from_millis(50)).await;
    for (host, known) in [&mut *a, b].into_iter().zip(renewals) {
        while let Some(event) = host.events.try_recv() {
            assert!(!matches!(event, Event::Down { .. }), "{event:?}");
            if let Event::Up { session_id, renewal, .. } = event {
                known.insert(session_id, renewal);
            }
        }
    }
    assert_eq!(a.links.session_id(b.id()), b.links.session_id(a.id()));
    assert!(a.links.session_id(b.id()).is_some());
    for host in [a, b] {
        let lines = host.links.status();
        let is_replaced = |line: &LinkStatus| {
            line.reason.as_deref().is_some_and(|reason| reason.contains("newer connection"))
        };
        assert!(!lines.iter().any(is_replaced), "a lost race is no failure: {lines:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restarted_host_replaces_its_old_link_at_once() {
    let identity = Identity::generate().unwrap();
    let mut a = Host::with_password("p");
    let first = Config { identity: identity.clone(), ..config(password("p")) };
    let second = Config { instance: 77, succeeds: Some(first.instance), ..first.clone() };
    let old = Host::start(first);
    old.dial(&a);
    let before = a.up().await;
    // The old one is killed: it neither answers nor closes, and its peer has not noticed. (Its port
    // stays open, like that of a host behind a dead network.)
    let new = Host::start(second);
    new.dial(&a);
    let after = a.up().await;
    assert_eq!(after.peer, before.peer);
    assert_eq!(after.instance, 77);
    assert!(!after.renewal);
    assert_ne!(after.session_id, before.session_id);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_long_greeting_ends_no_link() {
    let mut a = Host::with_password("p");
    let mut b = Host::with_password("p");
    b.dial(&a);
    a.up().await;
    b.up().await;
    // That of a mesh of 200 hosts which share 250 networks.
    for number in 0..50_000_u32 {
        b.links.send(a.id(), [number.to_be_bytes(); 50].concat()).unwrap();
    }
    for number in 0..50_000_u32 {
        assert_eq!(a.message().await[..4], number.to_be_bytes());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_of_an_old_link_do_not_come_after_its_successor_is_up() {
    let mut a = Host::with_password("p");
    let first = config(password("p"));
    let second =
        Config { instance: first.instance ^ 1, succeeds: Some(first.instance), ..first.clone() };
    let mut old = Host::start(first);
    old.dial(&a);
    let before = a.up().await;
    old.up().await;
    // More than may wait for the application: the link holds some back.
    for _ in 0..4_000 {
        old.links.send(a.id(), vec![0; 2_048]).unwrap();
    }
    tokio::time::sleep(Duration::from_millis(500)).await;
    let mut new = Host::start(second);
    new.dial(&a);
    new.up().await;
    new.links.send(a.id(), b"last".to_vec()).unwrap();
    let mut current = before.session_id;
    loop {
        match a.next().await {
            Event::Up { session_id, renewal: false, .. } => current = session_id,
            Event::Message { session_id, bytes, .. } => {
                assert_eq!(session_id, current, "of a link that was up before");
                if bytes == b"last" {
                    break;
                }
            }
            other => panic!("neither Up nor Message: {other:?}"),
        }
    }
    assert_ne!(current, before.session_id);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_two_hosts_with_one_identity_the_one_that_is_linked_stays_and_both_are_named() {
    for _ in 0..2 {
        let first = Config { nickname: "original".into(), ..config(password("p")) };
        let second =
            Config { nickname: "copy".into(), instance: first.instance ^ 1, ..first.clone() };
        let mut a = Host::with_password("p");
        let (original, mut copy) = (Host::start(first), Host::start(second));
        original.dial(&a);
        let before = a.up().await;
        // Either side may dial: the other end is known by its key in both cases.
        copy.dial(&a);
        let line = copy.until_failed().await;
        let reason = line.reason.unwrap();
        for part in
            ["copy at 127.0.0.1 has the same identity as original at 127.0.0.1", "`weft reset`"]
        {
            assert!(reason.contains(part), "{reason}");
        }
        assert!(line.next_try.unwrap() > Duration::from_secs(1), "slowly");
        let told = async {
            loop {
                if let Event::SameIdentity { reason } = copy.event().await {
                    break reason;
                }
            }
        };
        assert_eq!(within(told).await, reason, "the application hears of it");
        a.dial(&copy);
        let refused = |line: &LinkStatus| line.reason.as_deref() == Some(reason.as_str());
        a.until(refused).await;
        assert_eq!(a.links.session_id(before.peer), Some(before.session_id), "the link stays");
        assert_eq!(original.links.session_id(a.id()), Some(before.session_id), "at both ends");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_link_that_no_longer_answers_gives_way_to_another_instance() {
    let first = config(password("p"));
    let second = Config { instance: first.instance ^ 1, ..first.clone() };
    let mut a = Host::start(Config { timing: patient(), ..config(password("p")) });
    let old = Host::start(first);
    let wire = Arc::new(UdpSocket::bind("127.0.0.1:0").await.unwrap());
    assert!(old.links.connect(Target::from(wire.local_addr().unwrap())));
    let cable = tokio::spawn(carry(wire, old.addr, a.addr));
    let before = a.up().await;
    cable.abort();
    let new = Host::start(second);
    new.dial(&a);
    let after = a.up().await;
    assert_eq!(after.peer, before.peer);
    assert_ne!(after.instance, before.instance);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_target_whose_peer_is_linked_from_elsewhere_says_where() {
    let mut a = Host::start(Config { host: None, ..config(password("p")) });
    let mut b = Host::start(Config { host: None, ..config(password("p")) });
    let port = b.addr.port();
    assert!(a.links.connect(Target { port, ..Target::new("127.0.0.1") }));
    a.up().await;
    b.up().await;
    assert!(a.links.connect(Target { port, ..Target::new("127.0.0.2") }));
    let line = |address: &str| {
        let address = format!("{address}:{port}");
        let of = move |line: &LinkStatus| {
            line.address == address && line.state == LinkState::Established
        };
        a.until(of)
    };
    assert_eq!(line("127.0.0.1").await.reason, None);
    assert_eq!(line("127.0.0.2").await.reason, Some(format!("linked at 127.0.0.1:{port}")));
}

/// Hosts cloned from one image, where one dials the other.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_that_dials_the_original_is_not_taken_for_the_original_itself() {
    let first = config(password("p"));
    let mut hosts = [0, 1]
        .map(|n| Host::start(Config { instance: first.instance.wrapping_add(n), ..first.clone() }));
    hosts[0].dial(&hosts[1]);
    let line = hosts[0].until_failed().await;
    let reason = line.reason.unwrap();
    assert!(
        reason.contains("same identity as this one") && reason.contains("weft reset"),
        "{reason}"
    );
    for host in &mut hosts {
        let told = async { while !matches!(host.event().await, Event::SameIdentity { .. }) {} };
        within(told).await;
    }
}

/// Does not notice by itself that a peer is gone.
fn patient() -> weft_link::Timing {
    weft_link::Timing { idle_timeout: Duration::from_secs(60), ..Default::default() }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn renewal_gives_both_sides_a_new_key_and_loses_no_message() {
    let hourly = |port| {
        let mut config = config(password("p"));
        config.timing.renew_interval = Duration::from_millis(300);
        config.port = port;
        config
    };
    let mut a = Host::start(hourly(0));
    let mut b = Host::start(hourly(0));
    a.dial(&b);
    let mut sessions = [vec![a.up().await], vec![b.up().await]];
    let mut received = [0_u32; 2];
    let mut sent = 0_u32;
    let mut pause = tokio::time::interval(Duration::from_millis(1));
    let total = 2000;
    while received.iter().any(|count| *count < total)
        || sessions.iter().any(|sessions| sessions.len() < 4)
    {
        let (side, event) = tokio::select! {
            event = a.next() => (0, event),
            event = b.next() => (1, event),
            _ = pause.tick(), if sent < total => {
                a.links.send(b.id(), sent.to_be_bytes().to_vec()).unwrap();
                b.links.send(a.id(), sent.to_be_bytes().to_vec()).unwrap();
                sent += 1;
                continue;
            }
        };
        match event {
            Event::Message { bytes, .. } => {
                assert_eq!(bytes, received[side].to_be_bytes(), "in order, none lost");
                received[side] += 1;
            }
            Event::Up { peer, session, session_id, renewal, instance, nickname, hello, .. } => {
                assert!(renewal);
                sessions[side].push(common::Up {
                    peer,
                    session,
                    session_id,
                    renewal,
                    instance,
                    nickname,
                    hello,
                });
            }
            other => panic!("{other:?}"),
        }
    }
    let [at_a, at_b] = sessions;
    for (at_a, at_b) in at_a.iter().zip(&at_b) {
        assert_eq!(at_a.session, at_b.session);
        assert_eq!(at_a.session_id, at_b.session_id);
    }
    for two in at_a.windows(2) {
        assert_ne!(two[0].session, two[1].session);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unreachable_target_is_retried_and_comes_up_when_it_is_there() {
    let mut a = Host::with_password("p");
    // A silent port, until b takes it.
    let silent = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let address = silent.local_addr().unwrap();
    assert!(a.links.connect(Target::from(address)));
    let line = a.until(|line| line.state == LinkState::Retrying).await;
    assert!(line.reason.as_ref().unwrap().contains("no answer"), "{line:?}");
    drop(silent);
    let mut b = Host::start(Config { port: address.port(), ..config(password("p")) });
    assert_eq!(a.up().await.peer, b.id());
    b.up().await;

    // The same after a loss; b, too, must dial a peer that was up.
    b.links.close(a.id(), "the mesh says no");
    assert_eq!(a.down().await, "closed by the peer: the mesh says no");
    assert_eq!(b.down().await, "the mesh says no");
    let failed = |line: &LinkStatus| line.state == LinkState::Failed && line.next_try.is_some();
    let line = a.until(failed).await;
    assert_eq!(line.reason.unwrap(), "closed by the peer: the mesh says no");
    assert!(line.next_try.unwrap() > Duration::from_secs(1), "slowly");
    assert!(a.links.connect(Target::from(address)), "at once");
    a.up().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_that_was_up_is_dialled_again_and_a_refused_one_stays_out() {
    let mut a = Host::with_password("p");
    let kept = config(password("p"));
    let mut b = Host::start(kept.clone());
    let port = b.addr.port();
    a.dial(&b);
    a.up().await;
    b.up().await;
    assert!(a.links.forget(&Target::from(b.addr)), "a has no target any more");
    assert_eq!(a.links.status().len(), 1, "the link stays");
    b.links.shutdown().await;
    drop(b);
    a.down().await;
    let line = a.until(|line| line.state == LinkState::Retrying).await;
    assert_eq!(line.peer, Some(kept.identity.peer_id()));
    // Restarted without a target: a finds it.
    let mut b = Host::start(Config { port, instance: 2, ..kept });
    assert_eq!(a.up().await.instance, 2);
    b.up().await;

    a.links.refuse(b.id(), "removed by rmpeer");
    assert_eq!(b.down().await, "closed by the peer: removed by rmpeer");
    a.down().await;
    b.dial(&a);
    let line = b.until_failed().await;
    assert!(line.reason.unwrap().contains("removed by rmpeer"));
    assert!(b.was_never_up() && a.was_never_up());
    a.links.allow(b.id());
    b.dial(&a);
    a.up().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_that_dials_itself_is_told_so() {
    let a = Host::with_password("p");
    a.dial(&a);
    let line = a.until_failed().await;
    assert_eq!(line.reason.as_deref(), Some(REASON_ITSELF));
    assert!(line.is_itself);
    assert_eq!(a.links.status().len(), 1, "no refusal is shown");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn names_are_looked_up_and_both_address_families_work() {
    let mut a = Host::start(Config { host: None, ..config(password("p")) });
    let mut b = Host::start(Config { host: None, ..config(password("p")) });
    let port = b.links.local_addr().unwrap().port();
    for text in ["127.0.0.1", "[::1]", "localhost"] {
        let target: Target = format!("{text}:{port}").parse().unwrap();
        if text == "[::1]" && !std::path::Path::new("/proc/net/if_inet6").exists() {
            continue;
        }
        assert!(a.links.connect(target.clone()));
        assert_eq!(a.up().await.peer, b.id());
        b.up().await;
        a.until(|line| line.state == LinkState::Established).await;
        assert!(a.links.forget(&target));
        a.links.close(b.id(), "next");
        a.down().await;
        b.down().await;
    }
    let lost: Target = "no-such-host.invalid:1".parse().unwrap();
    assert!(a.links.connect(lost));
    let line = a.until(|line| line.state == LinkState::Retrying).await;
    assert!(line.reason.unwrap().starts_with("cannot look up no-such-host.invalid"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_changed_password_re_admits_every_peer() {
    let (mut a, mut b) = (Host::with_password("old"), Host::with_password("old"));
    a.dial(&b);
    a.up().await;
    b.up().await;
    b.links.set_secret(Secret::new(b"new".to_vec()).unwrap());
    assert!(a.down().await.contains("the password was changed"));
    b.down().await;
    a.links.set_secret(Secret::new(b"new".to_vec()).unwrap());
    a.dial(&b);
    a.up().await;
    b.up().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_that_takes_no_messages_loses_the_link_and_not_our_memory() {
    let (mut a, mut b) = (Host::with_password("p"), Host::with_password("p"));
    a.dial(&b);
    a.up().await;
    b.up().await;
    // b's application takes no events.
    let error = within(async {
        loop {
            if let Err(error) = a.links.send(b.id(), vec![0; MESSAGE_MAX_BYTES]) {
                return error;
            }
            tokio::task::yield_now().await;
        }
    });
    assert_eq!(error.await, SendError::Full);
    assert!(a.down().await.contains("fast enough"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flood_of_random_datagrams_leaves_a_running_link_alone() {
    let (mut a, mut b) = (Host::with_password("p"), Host::with_password("p"));
    a.dial(&b);
    a.up().await;
    b.up().await;
    let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let mut bytes = [0_u8; 1200];
    for round in 0..20_000_u32 {
        rand::fill(&mut bytes);
        // Every kind of first byte: short and long headers, the latter with QUIC's version.
        bytes[1..5].copy_from_slice(&[0, 0, 0, (round % 3) as u8]);
        let len = 1 + (round as usize * 37) % bytes.len();
        let _ = socket.try_send_to(&bytes[..len], b.addr);
        if round % 1000 == 0 {
            a.links.send(b.id(), round.to_be_bytes().to_vec()).unwrap();
            assert_eq!(b.message().await, round.to_be_bytes());
        }
    }
    // A newcomer gets in, too.
    let mut c = Host::with_password("p");
    c.dial(&b);
    c.up().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_port_in_use_is_a_clear_error() {
    let a = Host::with_password("p");
    let config = Config { port: a.addr.port(), ..config(password("p")) };
    let error = Links::start(config).unwrap_err();
    let address: SocketAddr = a.addr;
    assert!(error.to_string().contains(&address.to_string()), "{error}");
    assert!(error.to_string().contains("another weft"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_target_with_another_key_is_refused_with_both_keys_in_the_reason() {
    let (mut a, mut b) = (Host::with_password("p"), Host::with_password("p"));
    let expected = KeyHash::short(a.id());
    let target = Target { key_hash: Some(expected.clone()), ..Target::from(b.addr) };
    assert!(a.links.connect(target));
    let reason = a.until_failed().await.reason.unwrap();
    assert!(reason.contains(&expected.to_string()), "{reason}");
    assert!(reason.contains(&KeyHash::short(b.id()).to_string()), "{reason}");
    assert!(reason.contains(&format!("weft forget {}", b.addr)), "{reason}");
    assert!(a.was_never_up() && b.was_never_up());

    let target = Target { key_hash: Some(KeyHash::short(b.id())), ..Target::from(b.addr) };
    assert!(a.links.connect(target));
    a.up().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reinstalled_peer_is_told_apart_from_its_old_self_without_dialling_it() {
    let mut a = Host::with_password("p");
    let mut b = Host::with_password("p");
    let old = Identity::generate().unwrap().peer_id();
    a.dial(&b);
    a.up().await;
    b.up().await;
    let is_of_old = |line: &LinkStatus| line.peer == Some(old) && line.state == LinkState::Failed;
    // a knows that b has this address, and b knows that it is its own: neither sends anything there.
    for (host, itself) in [(&a, false), (&b, true)] {
        let begin = std::time::Instant::now();
        assert!(host.links.connect_peer(old, &[b.addr]));
        let reason = host.until(is_of_old).await.reason.unwrap();
        println!("told after {:?}", begin.elapsed());
        assert!(reason.contains(&format!("weft forget {}", b.addr)), "{reason}");
        assert_eq!(reason.contains("this host itself"), itself, "{reason}");
        // A repeated call starts no new attempt: the reason stays, and the next try stays far off.
        let before = host.until(is_of_old).await;
        assert!(host.links.connect_peer(old, &[b.addr]));
        let after = host.until(|line| line.peer == Some(old)).await;
        assert_eq!((after.since, after.reason), (before.since, before.reason));
        assert!(after.next_try.unwrap() > Duration::from_secs(10), "slowly");
    }
    let mut changes = 0;
    while let Some(event) = a.events.try_recv() {
        changes += usize::from(
            matches!(event, Event::TargetChanged { status } if status.peer == Some(old)),
        );
    }
    assert_eq!(changes, 1, "told once");
    // A target with the same address is independent, and continues.
    assert_eq!(
        a.links.status().iter().filter(|line| line.state == LinkState::Established).count(),
        1
    );
    a.links.forget_peer(old);
    assert_eq!(a.links.status().len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_is_tried_at_each_of_its_addresses() {
    let (mut a, mut b) = (Host::with_password("p"), Host::with_password("p"));
    let silent = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    assert!(a.links.connect_peer(b.id(), &[silent.local_addr().unwrap(), b.addr]));
    assert_eq!(a.up().await.peer, b.id());
    b.up().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_that_falls_silent_is_down_and_comes_back_with_the_network() {
    let impatient = || {
        let mut config = config(password("p"));
        config.timing.keep_alive = Duration::from_millis(100);
        config.timing.idle_timeout = Duration::from_secs(1);
        config
    };
    let (mut a, mut b) = (Host::start(impatient()), Host::start(impatient()));
    let wire = Arc::new(UdpSocket::bind("127.0.0.1:0").await.unwrap());
    assert!(a.links.connect(Target::from(wire.local_addr().unwrap())));
    let cable = tokio::spawn(carry(wire.clone(), a.addr, b.addr));
    let first = a.up().await;
    b.up().await;
    cable.abort();
    assert_eq!(a.down().await, "the peer no longer answers");
    assert_eq!(b.down().await, "the peer no longer answers");
    let cable = tokio::spawn(carry(wire, a.addr, b.addr));
    let again = a.up().await;
    assert_eq!(again.peer, b.id());
    assert_eq!(again.instance, first.instance);
    assert_ne!(again.session, first.session);
    b.up().await;
    cable.abort();
}

/// As where a refusal is lost, and its sender has forgotten the connection meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_that_is_reset_before_it_is_a_link_is_tried_again_at_once() {
    let mut config = config(password("p"));
    config.timing.keep_alive = Duration::from_millis(100);
    let (mut a, b) = (Host::start(config), Host::with_password("p"));
    let forgetful = RawHost::new(std::net::Ipv4Addr::LOCALHOST);
    let wire = Arc::new(UdpSocket::bind("127.0.0.1:0").await.unwrap());
    let (mute, told) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    let cable = {
        let (wire, mute, told) = (wire.clone(), mute.clone(), told.clone());
        let (a, b, forgetful) = (a.addr, b.addr, forgetful.addr());
        async move {
            let mut bytes = [0; 2048];
            let mut to = forgetful;
            loop {
                let (len, from) = wire.recv_from(&mut bytes).await.unwrap();
                let there = if from == a { to } else { a };
                if from == forgetful && mute.load(Ordering::SeqCst) {
                    continue;
                }
                wire.send_to(&bytes[..len], there).await.unwrap();
                // This packet was the reset.
                if from == forgetful && told.load(Ordering::SeqCst) {
                    to = b;
                }
            }
        }
    };
    let cable = tokio::spawn(cable);
    assert!(a.links.connect(Target::from(wire.local_addr().unwrap())));
    let conn = within(forgetful.endpoint.accept()).await.unwrap().await.unwrap();
    mute.store(true, Ordering::SeqCst);
    conn.close(6_u32.into(), b"wrong password");
    drop(conn);
    within(forgetful.endpoint.wait_idle()).await;
    told.store(true, Ordering::SeqCst);
    mute.store(false, Ordering::SeqCst);
    loop {
        match a.event().await {
            Event::Up { peer, .. } => break assert_eq!(peer, b.id()),
            Event::TargetChanged { status } => {
                assert_ne!(status.state, LinkState::Retrying, "given up: {:?}", status.reason);
            }
            other => panic!("{other:?}"),
        }
    }
    cable.abort();
}

/// Carries datagrams between two hosts.
async fn carry(wire: Arc<UdpSocket>, a: SocketAddr, b: SocketAddr) {
    let mut bytes = [0; 2048];
    loop {
        let (len, from) = wire.recv_from(&mut bytes).await.unwrap();
        let to = if from == a { b } else { a };
        wire.send_to(&bytes[..len], to).await.unwrap();
    }
}
