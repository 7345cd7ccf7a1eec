//! The admission of hosts, the reasons both sides report, and the limits of an attacker.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod common;

use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use common::raw::{PREAMBLE, RawHost, WRONG_PASSWORD};
use common::{Host, config, password, within};
use quinn::{RecvStream, SendStream};
use tokio::time::timeout;
use weft_crypto::PeerId;
use weft_link::limits::{FAILURES_PER_MINUTE_MAX, MESSAGE_MAX_BYTES, UNADMITTED_MAX};
use weft_link::{
    Admission, Config, Direction, Event, KeyHash, LinkState, REASON_BAD_TOKEN, REASON_ITSELF,
    REASON_WRONG_PASSWORD, Target,
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wrong_password_is_refused_with_the_reason_on_both_sides() {
    let (mut a, mut b) = (Host::with_password("right"), Host::with_password("wrong"));
    let begin = Instant::now();
    b.dial(&a);
    let at_b = b.until_failed().await;
    let at_a = a.until_failed().await;
    println!("refused after {:?}", begin.elapsed());
    assert_eq!(at_b.reason.as_deref(), Some(REASON_WRONG_PASSWORD));
    assert_eq!(at_a.reason.as_deref(), Some(REASON_WRONG_PASSWORD));
    assert_eq!((at_b.direction, at_a.direction), (Direction::Outbound, Direction::Inbound));
    assert_eq!((at_a.peer, at_a.refusals), (Some(b.id()), 1));
    assert!(at_a.address.starts_with("127.0.0.1:"));
    assert!(at_b.next_try.unwrap() > Duration::from_secs(5), "slowly");
    assert!(a.was_never_up() && b.was_never_up());

    // The right password makes the old refusal disappear.
    b.links.set_secret(weft_link::Secret::new(b"right".to_vec()).unwrap());
    b.dial(&a);
    b.up().await;
    a.up().await;
    assert!(a.links.status().iter().all(|line| line.state == LinkState::Established));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failures_are_slowed_down_by_source_and_nobody_else_is() {
    let mut a = Host::start(Config { host: Some(Ipv4Addr::UNSPECIFIED.into()), ..admit() });
    let port = a.addr.port();
    let to = (Ipv4Addr::LOCALHOST, port).into();
    let guesser = RawHost::new(Ipv4Addr::LOCALHOST);
    for _ in 0..FAILURES_PER_MINUTE_MAX {
        let mut talk = guesser.greet(to).await;
        assert!(!talk.prove("guess").await);
        assert_eq!(talk.closed().await.0, WRONG_PASSWORD);
    }
    let line = a.until(|line| line.refusals == u64::from(FAILURES_PER_MINUTE_MAX)).await;
    assert_eq!(line.reason.as_deref(), Some(REASON_WRONG_PASSWORD));

    // The next one is answered 12 s later; the test only checks that it is not answered at once.
    let mut slow = guesser.greet(to).await;
    slow.start("guess").await;
    let answer = timeout(Duration::from_secs(2), slow.get()).await;
    assert!(answer.is_err(), "answered at once: {answer:?}");

    // Another source is served meanwhile.
    let config = Config { host: Some(Ipv4Addr::new(127, 0, 0, 2).into()), ..admit() };
    let other = Host::start(config);
    assert!(
        other.links.connect(Target::from(std::net::SocketAddr::from((Ipv4Addr::LOCALHOST, port))))
    );
    assert_eq!(a.up().await.peer, other.id());

    // And the first one is not locked out.
    assert!(within(slow.get()).await.is_ok());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_abandoned_guess_is_a_failure_too() {
    let a = Host::start(admit());
    let guesser = RawHost::new(Ipv4Addr::LOCALHOST);
    for _ in 0..FAILURES_PER_MINUTE_MAX {
        let mut talk = guesser.greet(a.addr).await;
        talk.start("guess").await;
        assert!(within(talk.get()).await.is_ok());
        talk.conn.close(0_u8.into(), b"");
    }
    let mut talk = guesser.greet(a.addr).await;
    talk.start("guess").await;
    let answer = timeout(Duration::from_secs(2), talk.get()).await;
    assert!(answer.is_err(), "answered at once: {answer:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_token_admits_one_host_once_which_then_knows_the_secret() {
    let mut a = Host::start(config(Admission::Secret(weft_link::Secret::random())));
    let token = a.links.new_token().unwrap();
    let text = token.expose_text();
    let joining = config(Admission::Token(text.parse().unwrap()));
    let mut b = Host::start(joining.clone());
    assert!(b.links.new_token().is_none(), "it has not joined yet");
    let pinned = Target { key_hash: Some(KeyHash::short(a.id())), ..Target::from(a.addr) };
    assert!(b.links.connect(pinned.clone()));
    let secret = match b.next().await {
        Event::SecretLearned { secret } => secret,
        other => panic!("{other:?}"),
    };
    let (at_b, at_a) = (b.up().await, a.up().await);
    assert_eq!(at_a.session, at_b.session);
    assert!(b.links.new_token().is_some());

    // The token is used up.
    let mut c = Host::start(config(Admission::Token(text.parse().unwrap())));
    c.dial(&a);
    assert_eq!(c.until_failed().await.reason.as_deref(), Some(REASON_BAD_TOKEN));
    assert_eq!(a.until_failed().await.reason.as_deref(), Some(REASON_BAD_TOKEN));
    assert!(c.was_never_up());

    // b returns with the secret, and so does a host that b admits.
    b.links.shutdown().await;
    a.down().await;
    let again = Config { admission: Admission::Secret(secret), instance: 3, ..joining };
    let mut b = Host::start(again);
    assert!(b.links.connect(pinned));
    b.up().await;
    assert_eq!(a.up().await.instance, 3);
    let token = b.links.new_token().unwrap();
    let mut c = Host::start(config(Admission::Token(token)));
    c.dial(&b);
    assert!(matches!(c.next().await, Event::SecretLearned { .. }));
    c.up().await;
    c.dial(&a);
    assert_eq!(c.up().await.peer, a.id());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hosts_that_have_not_joined_admit_nobody() {
    let a = Host::start(config(password("p")));
    let token = a.links.new_token().unwrap();
    let (b, c) = (
        Host::start(config(Admission::Token(token.clone()))),
        Host::start(config(Admission::Token(token))),
    );
    b.dial(&c);
    let line = b.until(|line| line.state == LinkState::Retrying).await;
    assert!(line.reason.unwrap().contains("has not joined a network yet"));
}

/// All texts and keys of strangers count as one cause.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn texts_of_strangers_make_no_more_lines() {
    const TRIES: u64 = 40;
    let mut a = Host::start(admit());
    for number in 0..TRIES {
        let stranger = RawHost::new(Ipv4Addr::LOCALHOST);
        let talk = stranger.greet(a.addr).await;
        talk.conn.close(12_u8.into(), format!("text {number}\x1b[31m").as_bytes());
        let line = a.until(|line| line.refusals > number).await;
        assert!(line.reason.unwrap().contains(&format!("text {number} [31m")));
    }
    assert_eq!(a.links.status().len(), 1);
    let mut told = 0;
    while let Some(event) = a.events.try_recv() {
        told += usize::from(matches!(event, Event::Refused { .. }));
    }
    assert_eq!(told, 1, "once a minute");
    // Nor does a stranger that answers where this host dials.
    let stranger = RawHost::new(Ipv4Addr::LOCALHOST);
    assert!(a.links.connect(Target::from(stranger.addr())));
    for number in 0..4 {
        let incoming = within(stranger.endpoint.accept()).await.unwrap();
        let conn = within(async { incoming.accept().unwrap().await }).await.unwrap();
        conn.close(9_u8.into(), format!("busy with {number}").as_bytes());
        a.until(|line| line.reason.as_ref().is_some_and(|r| r.contains(&number.to_string()))).await;
    }
    let mut told = 0;
    while let Some(event) = a.events.try_recv() {
        told += usize::from(matches!(event, Event::TargetChanged { .. }));
    }
    assert_eq!(told, 1, "of one cause");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_a_host_with_the_password_can_say_that_this_one_has_a_copy() {
    const SAME_IDENTITY: u8 = 15;
    let text = b"you are a copy";
    let mut a = Host::start(admit());
    let raw = RawHost::new(Ipv4Addr::LOCALHOST);

    // A stranger says it before the first stream, before its guess, and after it.
    let conn = raw.connect(a.addr).await.unwrap();
    let confirmed = async {
        while conn.stats().frame_rx.handshake_done == 0 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    within(confirmed).await;
    conn.close(SAME_IDENTITY.into(), text);
    a.until(|line| line.refusals == 1).await;
    let talk = raw.greet(a.addr).await;
    talk.conn.close(SAME_IDENTITY.into(), text);
    a.until(|line| line.refusals == 2).await;
    let mut talk = raw.greet(a.addr).await;
    talk.start("guess").await;
    assert!(within(talk.get()).await.is_ok());
    talk.conn.close(SAME_IDENTITY.into(), text);
    let line = a.until(|line| line.refusals == 3).await;
    assert_eq!(line.reason.as_deref(), Some("closed by the peer: you are a copy"));
    // And where this host dials.
    assert!(a.links.connect(Target::from(raw.addr())));
    let incoming = within(raw.endpoint.accept()).await.unwrap();
    let conn = within(async { incoming.accept().unwrap().await }).await.unwrap();
    conn.close(SAME_IDENTITY.into(), text);
    let line = a.until(|line| line.direction == Direction::Outbound && line.reason.is_some()).await;
    assert_eq!(line.reason.as_deref(), Some("closed by the peer: you are a copy"));
    while let Some(event) = a.events.try_recv() {
        assert!(!matches!(event, Event::SameIdentity { .. }), "{event:?}");
    }

    let mut talk = raw.greet(a.addr).await;
    assert!(talk.prove("p").await);
    talk.conn.close(SAME_IDENTITY.into(), text);
    let told = async {
        loop {
            if let Event::SameIdentity { reason } = a.event().await {
                break reason;
            }
        }
    };
    assert_eq!(within(told).await, "you are a copy", "a host of the network is believed");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stranger_that_says_it_is_this_host_is_not_believed() {
    const ITSELF: u8 = 4;
    let a = Host::start(admit());
    let raw = RawHost::new(Ipv4Addr::LOCALHOST);
    assert!(a.links.connect(Target::from(raw.addr())));
    let incoming = within(raw.endpoint.accept()).await.unwrap();
    let conn = within(async { incoming.accept().unwrap().await }).await.unwrap();
    conn.close(ITSELF.into(), REASON_ITSELF.as_bytes());
    let line = a.until(|line| line.reason.is_some()).await;
    assert_ne!(line.reason.as_deref(), Some(REASON_ITSELF));
    assert!(!line.is_itself, "the host would found its own network");
    assert_eq!(line.state, LinkState::Failed);
}

/// A relay in between ends TLS on both sides with its own key and passes on every byte.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_relay_between_two_hosts_with_the_same_password_is_found_out() {
    let (mut a, mut b) = (Host::with_password("p"), Host::with_password("p"));
    let relay = RawHost::new(Ipv4Addr::LOCALHOST);
    assert!(a.links.connect(Target::from(relay.addr())));
    let incoming = within(relay.endpoint.accept()).await.unwrap();
    let to_a = within(async { incoming.accept().unwrap().await }).await.unwrap();
    let to_b = relay.connect(b.addr).await.unwrap();
    let (a_send, a_recv) = within(to_a.accept_bi()).await.unwrap();
    let (b_send, b_recv) = to_b.open_bi().await.unwrap();
    let forth = tokio::spawn(pass_on(a_recv, b_send));
    let back = tokio::spawn(pass_on(b_recv, a_send));
    // b detects it first, and tells the relay.
    let at_b = b.until_failed().await;
    assert_eq!(at_b.reason.as_deref(), Some(REASON_WRONG_PASSWORD));
    assert_eq!(at_b.peer, Some(PeerId::of_public_key(&relay.public_key())));
    to_a.close(0_u8.into(), b"");
    let (forth, back) = (forth.await.unwrap(), back.await.unwrap());
    let frame = |len: usize| 4 + 1 + len;
    assert_eq!(forth, PREAMBLE.len() + frame(5 + 32) + frame(32), "all of a's exchange went by");
    assert_eq!(back, PREAMBLE.len() + frame(32), "and b's share, but no proof of b");
    let line = a.until(|line| line.next_try.is_some()).await;
    assert_eq!(line.state, LinkState::Failed);
    assert!(line.next_try.unwrap() > Duration::from_secs(5), "the next guess comes slowly");
    assert!(a.was_never_up() && b.was_never_up());
}

async fn pass_on(mut from: RecvStream, mut to: SendStream) -> usize {
    let mut count = 0;
    let mut buffer = [0; 4096];
    while let Ok(Some(len)) = from.read(&mut buffer).await {
        count += len;
        if to.write_all(&buffer[..len]).await.is_err() {
            break;
        }
    }
    count
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn versions_without_overlap_are_named_on_both_sides() {
    let a = Host::start(admit());
    let b = Host::start(Config { versions: 2..=3, ..admit() });
    b.dial(&a);
    let at_a = a.until_failed().await.reason.unwrap();
    let at_b = b.until_failed().await.reason.unwrap();
    assert_eq!(at_a, "peer speaks protocol 2..3, this host 1..1: upgrade the older one");
    assert_eq!(at_b, "peer speaks protocol 1..1, this host 2..3: upgrade the older one");

    let mut newer = Host::start(Config { versions: 1..=9, ..admit() });
    newer.dial(&a);
    newer.up().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn time_is_not_looked_at_and_an_over_long_message_ends_the_link() {
    for decides in [true, false] {
        joins_and_sends_too_much(decides).await;
    }
}

/// Joins by hand, then sends a message over the limit; `decides`: the raw host has the lower peer
/// id.
async fn joins_and_sends_too_much(decides: bool) {
    let mut a = Host::with_password("p");
    // Its certificate expired in 1980.
    let raw = RawHost::that_decides(decides, a.id());
    let mut talk = raw.greet(a.addr).await;
    talk.join("p").await;
    assert_eq!(a.up().await.nickname, "raw");
    talk.put(b"hello").await;
    assert_eq!(a.message().await, b"hello");
    talk.put(&vec![1; MESSAGE_MAX_BYTES]).await;
    assert_eq!(a.message().await.len(), MESSAGE_MAX_BYTES);
    let _ = talk.send.write_all(&(MESSAGE_MAX_BYTES as u32 + 1).to_be_bytes()).await;
    assert!(a.down().await.contains("over the limit"));
    assert!(talk.closed().await.1.contains("over the limit"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn breaches_of_admission_are_refused() {
    let mut a = Host::with_password("p");
    let raw = RawHost::new(Ipv4Addr::LOCALHOST);

    let conn = raw.connect(a.addr).await.unwrap();
    let (mut send, _recv) = conn.open_bi().await.unwrap();
    send.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
    let line = a.until_failed().await;
    assert_eq!(line.reason.unwrap(), "the peer does not speak Weft's link protocol");

    let mut identity_share = vec![1, 1, 0, 0, 0, 0];
    identity_share.extend_from_slice(&[0; 32]);
    let frames: [&[u8]; 5] = [b"", b"\x05", &[0xff; 64], &identity_share, &[0; 129]];
    for frame in frames {
        let mut talk = raw.greet(a.addr).await;
        talk.put(frame).await;
        let (code, reason) = talk.closed().await;
        assert_eq!(code, 10, "{reason}");
    }
    // An announced length is not trusted before the proof.
    let mut talk = raw.greet(a.addr).await;
    talk.send.write_all(&u32::MAX.to_be_bytes()).await.unwrap();
    assert_eq!(talk.closed().await.0, 10);
    assert!(a.was_never_up());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn silent_connections_are_dropped_and_do_not_keep_others_out() {
    let mut config = config(password("p"));
    // All of them must have connected by then.
    config.timing.admission_timeout = Duration::from_secs(10);
    let mut a = Host::start(config);
    let raw = RawHost::new(Ipv4Addr::LOCALHOST);
    let mut silent = Vec::new();
    for _ in 0..UNADMITTED_MAX {
        silent.push(raw.connect(a.addr).await.unwrap());
    }
    // Neither another silent connection nor another host is kept out: the oldest gives way.
    silent.push(raw.connect(a.addr).await.unwrap());
    let mut b = Host::with_password("p");
    b.dial(&a);
    a.up().await;
    b.up().await;
    let mut evicted = 0;
    for conn in silent {
        let error = within(conn.closed()).await.to_string();
        evicted += usize::from(error.contains("busy"));
        assert!(error.contains("busy") || error.contains("longer than"), "{error}");
    }
    assert!(evicted >= 1, "nobody made room");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_that_is_known_is_not_locked_out_by_what_others_try_from_its_address() {
    let mut a = Host::start(admit());
    let kept = config(password("p"));
    let mut b = Host::start(kept.clone());
    b.dial(&a);
    a.up().await;
    b.up().await;
    b.links.shutdown().await;
    a.down().await;

    let guesser = RawHost::new(Ipv4Addr::LOCALHOST);
    for _ in 0..FAILURES_PER_MINUTE_MAX {
        assert!(!guesser.greet(a.addr).await.prove("guess").await);
    }
    let mut waiting = guesser.greet(a.addr).await;
    waiting.start("guess").await;
    let b = Host::start(Config { instance: 2, ..kept });
    b.dial(&a);
    a.up().await;
    assert!(waiting.conn.close_reason().is_none());
    let answer = timeout(Duration::from_millis(1), waiting.get()).await;
    assert!(answer.is_err(), "b came in later than a stranger");
}

fn admit() -> Config {
    config(password("p"))
}
