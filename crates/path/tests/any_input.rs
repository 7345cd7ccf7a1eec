//! Arbitrary input from peers, engines and links in any order. No panic, no key used twice, no more SAs than the
//! limits allow, and time always advances.
#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha20Rng;
use weft_crypto::{Cipher, Format, PeerId, SessionKey};
use weft_path::{
    Accept, Config, Encapsulation, EngineAbility, EngineCommand, EngineEvent, EngineKind,
    EngineOffer, GENERATIONS_MAX, Hello, LaneOffer, Message, MissingEngine, Offer, PathId, Paths,
    ProbeAnswer, RETIRED_MAX, Reason, RekeyRequest, Unheard, Withdraw,
};

const PEERS: u64 = 3;
/// Lanes that this host takes.
const LANES: usize = 2;
/// Paths with SAs between two hosts that have both engines.
const PATHS: usize = 5;

/// A liar's memory of this host's messages, so that lies come close to the truth.
#[derive(Default)]
struct Known {
    session: Vec<u64>,
    offers: Vec<u64>,
    probes: Vec<u64>,
    spis: Vec<u32>,
    paths: Vec<PathId>,
}

struct Dice(ChaCha20Rng);

impl Dice {
    fn below(&mut self, end: u64) -> u64 {
        self.0.next_u64() % end
    }

    fn any<T: Copy>(&mut self, known: &[T], other: T) -> T {
        match usize::try_from(self.below(known.len() as u64 + 1)) {
            Ok(index) if index < known.len() => known[known.len() - 1 - index % 8 % known.len()],
            _ => other,
        }
    }

    fn mtu(&mut self) -> u16 {
        [0, 1, 575, 576, 700, 1280, 1388, 1500, 9000, 65535]
            [usize::try_from(self.below(10)).unwrap()]
    }

    fn engine(&mut self) -> EngineKind {
        if self.below(2) == 0 { EngineKind::Kernel } else { EngineKind::Userspace }
    }

    fn address(&mut self) -> IpAddr {
        ["10.0.0.2", "::ffff:10.0.0.3", "fd00::2", "255.255.255.255", "0.0.0.0"]
            [usize::try_from(self.below(5)).unwrap()]
        .parse()
        .unwrap()
    }

    fn encapsulation(&mut self) -> Encapsulation {
        if self.below(3) == 0 { Encapsulation::Raw } else { Encapsulation::Udp }
    }

    fn format(&mut self) -> Format {
        [Format::Esp, Format::Esp, Format::Ovpn, Format::Plain]
            [usize::try_from(self.below(4)).unwrap()]
    }

    fn ciphers(&mut self) -> Vec<Cipher> {
        let all = [Cipher::Aes256Gcm, Cipher::ChaCha20Poly1305];
        all.into_iter().filter(|_| self.below(4) != 0).collect()
    }

    fn hello(&mut self, session: u64) -> Hello {
        Hello {
            session,
            instance: self.below(3),
            ciphers: self.ciphers(),
            engines: (0..self.below(4))
                .map(|_| EngineAbility {
                    engine: self.engine(),
                    format: self.format(),
                    lanes_max: u16::try_from(self.below(70_000) % 65_536).unwrap(),
                    ciphers: self.ciphers(),
                })
                .collect(),
            missing: (0..self.below(3))
                .map(|_| MissingEngine { engine: self.engine(), reason: "\u{1b}[1m".repeat(99) })
                .collect(),
            address: (self.below(2) == 0).then(|| self.address()),
            peer_address: (self.below(2) == 0).then(|| self.address()),
            trusted: self.below(2) == 0,
            mtu: self.mtu(),
            container_mtu: (self.below(2) == 0).then(|| self.mtu()),
            opens_lanes: (self.below(2) == 0).then(|| self.below(2) == 0),
            reply_wanted: self.below(2) == 0,
        }
    }

    fn message(&mut self, known: &Known) -> Message {
        let session = self.any(&known.session, 7);
        match self.below(14) {
            0..=2 => Message::Hello(self.hello(session)),
            3..=5 => Message::Offer(Offer {
                session,
                offer: self.below(2000),
                format: self.format(),
                engine: self.engine(),
                sender_engine: self.engine(),
                encapsulation: self.encapsulation(),
                address: (self.below(2) == 0).then(|| self.address()),
                port: u16::try_from(self.below(3)).unwrap(),
                cipher: Cipher::Aes256Gcm,
                rco: false,
                mtu: self.mtu(),
                lanes: (0..self.below(4))
                    .map(|lane| LaneOffer {
                        lane: u16::try_from(lane).unwrap(),
                        // Of either format, and of none.
                        spi: u32::try_from(252 + 8 * lane + self.below(8)).unwrap()
                            | if self.below(2) == 0 { 0 } else { 0x4800_0000 },
                        nonce: [u8::try_from(self.below(3)).unwrap(); 32],
                    })
                    .collect(),
            }),
            6 | 7 => Message::Accept(Accept {
                session,
                offer: self.any(&known.offers, 0),
                lanes: (0..u16::try_from(self.below(4)).unwrap()).collect(),
            }),
            8 | 9 => Message::ProbeAnswer(ProbeAnswer {
                probe: self.any(&known.probes, 0),
                mtu: if self.below(2) == 0 { 1388 } else { self.mtu() },
            }),
            10 => Message::RekeyRequest(RekeyRequest { spi: self.any(&known.spis, 1) }),
            11 => Message::Withdraw(Withdraw {
                session,
                format: self.format(),
                engine: self.engine(),
                sender_engine: self.engine(),
                encapsulation: self.encapsulation(),
                reason: "\u{e9}".repeat(500),
            }),
            12 => Message::Unheard(Unheard {
                session,
                format: self.format(),
                engine: self.engine(),
                sender_engine: self.engine(),
                encapsulation: self.encapsulation(),
            }),
            _ => Message::Unknown,
        }
    }

    fn event(&mut self, known: &Known, peer: PeerId) -> EngineEvent {
        let path = self.any(&known.paths, PathId(u32::MAX));
        let spi = self.any(&known.spis, 0);
        match self.below(11) {
            0 | 1 => {
                let (probe, mtu) = (self.below(9), self.mtu());
                EngineEvent::ProbeReceived { peer, path, probe, mtu, candidate: false }
            }
            2 => EngineEvent::InboundFirstUse { spi },
            3 => EngineEvent::OutboundNearLimit { path, spi },
            4 => EngineEvent::OutboundExhausted { path, spi },
            5 => EngineEvent::RemoteMoved { path, remote: (self.address(), 9).into() },
            6 => EngineEvent::MessageTooLong { path, mtu: self.mtu() },
            9 => {
                let (lane, proven) = (self.below(4) as u16, self.below(4) == 0);
                EngineEvent::LaneProven { path, lane, proven }
            }
            8 => EngineEvent::Unheard { peer, path },
            7 => EngineEvent::PathFailed { path, reason: "lie".into() },
            _ if self.below(20) == 0 => {
                EngineEvent::EngineFailed { engine: self.engine(), reason: "lie".into() }
            }
            _ => EngineEvent::MessageTooLong { path, mtu: 1300 },
        }
    }

    fn engines(&mut self) -> Vec<EngineOffer> {
        let all = [
            (EngineKind::Userspace, Format::Esp, 6784, 2),
            (EngineKind::Userspace, Format::Ovpn, 6784, 2),
            (EngineKind::Kernel, Format::Esp, 6785, 2),
            (EngineKind::Kernel, Format::Ovpn, 6786, 1),
        ];
        let all = all.map(|(kind, format, port, lanes_max)| {
            let ciphers = self.ciphers();
            EngineOffer { kind, format, port, lanes_max, rco: true, ciphers }
        });
        all.into_iter().filter(|_| self.below(3) != 0).collect()
    }
}

fn peer(number: u64) -> PeerId {
    PeerId::from_bytes([u8::try_from(number).unwrap(); 32])
}

/// Tracks the SAs that the commands installed.
#[derive(Default)]
struct Engine {
    inbound: BTreeMap<u32, PeerId>,
    /// SAs in the slots of the kernel's `ovpn` device.
    slots: BTreeMap<u32, PathId>,
    outbound: BTreeMap<PathId, (EngineKind, Format)>,
    /// Keys sent with in the present session.
    keys: BTreeSet<[u8; 36]>,
}

impl Engine {
    fn apply(&mut self, seed: u64, command: EngineCommand, known: &mut Known) {
        match command {
            EngineCommand::InstallInbound { engine, peer, path, sa, .. } => {
                assert!(self.inbound.insert(sa.spi, peer).is_none(), "seed {seed}");
                assert!(engine == EngineKind::Kernel || sa.encapsulation == Encapsulation::Udp);
                if (engine, sa.key.format()) == (EngineKind::Kernel, Format::Ovpn) {
                    self.take_slot(seed, path, sa.spi);
                }
                known.spis.push(sa.spi);
                known.paths.push(path);
            }
            EngineCommand::RemoveInbound { spi } => {
                self.inbound.remove(&spi);
                self.slots.remove(&spi);
            }
            EngineCommand::InstallOutbound { engine, path, sa, remote, .. } => {
                // Cleared with each session, since the same session may not recur in reality.
                assert!(self.keys.insert(*sa.key.expose()), "seed {seed}: a key used twice");
                assert!(!remote.ip().is_multicast());
                assert!(engine == EngineKind::Kernel || sa.encapsulation == Encapsulation::Udp);
                self.outbound.insert(path, (engine, sa.key.format()));
                known.spis.push(sa.spi);
            }
            EngineCommand::InstallPlain { path, remote, .. } => {
                assert_eq!(remote, IpAddr::from([10, 0, 0, 2]), "seed {seed}: it is not trusted");
                self.outbound.insert(path, (EngineKind::Kernel, Format::Plain));
                known.paths.push(path);
            }
            EngineCommand::RemoveOutbound { path } => {
                self.outbound.remove(&path);
            }
            EngineCommand::BindPath { path: Some(path), .. } => {
                assert!(self.outbound.contains_key(&path), "seed {seed}: bound without an SA");
            }
            EngineCommand::SetRemote { path, .. } => {
                let bound = [Format::Esp, Format::Plain].map(|it| (EngineKind::Kernel, it));
                let moved = self.outbound.get(&path);
                assert!(moved.is_some_and(|it| !bound.contains(it)), "seed {seed}: {moved:?}");
            }
            EngineCommand::SendProbe { probe, mtu, .. } => {
                assert!(mtu >= 400, "seed {seed}: a probe of {mtu} bytes");
                known.probes.push(probe);
            }
            _ => {}
        }
    }

    /// A path has room for two keys, which have a separate peer id.
    fn take_slot(&mut self, seed: u64, path: PathId, spi: u32) {
        let peer_id = |spi: u32| spi & 0xff_ffff;
        for (other, of) in &self.slots {
            assert_eq!(peer_id(*other) == peer_id(spi), *of == path, "seed {seed}: {other:08x}");
        }
        self.slots.insert(spi, path);
        let held = self.slots.values().filter(|of| **of == path).count();
        assert!(held <= 2, "seed {seed}: a third key");
    }
}

fn lie(seed: u64) {
    let mut dice = Dice(ChaCha20Rng::seed_from_u64(seed));
    let mut config = Config { rekey_after: Duration::from_secs(2), ..Config::default() };
    config.engines = dice.engines();
    config.trusted_subnets = vec!["10.0.0.2/32".parse().unwrap()];
    let mut paths = Paths::new(peer(200), config, [9; 32]);
    let mut now = Instant::now();
    let mut known = Known::default();
    let mut engine = Engine::default();
    for _ in 0..600 {
        let about = peer(dice.below(PEERS));
        match dice.below(40) {
            0 | 1 => {
                let key = [u8::try_from(dice.below(256)).unwrap(); 32];
                let remote = dice.address();
                let local = (dice.below(2) == 0).then(|| dice.address());
                let (key, dialled) = (SessionKey::from_bytes(key), dice.below(2) == 0);
                paths.handle_link_up(now, about, key, local, remote, dialled);
                engine.keys.clear();
            }
            2 => paths.handle_link_down(now, about),
            3 if dice.below(4) == 0 => {
                paths.handle_peer_gone(now, about);
                engine.inbound.retain(|_, owner| *owner != about);
            }
            4 => paths.handle_link_mtu(now, dice.mtu()),
            5 => {
                let missing = vec![(dice.engine(), Reason::KernelWithoutEsp)];
                paths.handle_engines(now, dice.engines(), missing);
            }
            6..=25 => {
                let message = dice.message(&known);
                let _ = paths.handle_message(now, about, message);
            }
            _ => paths.handle_event(now, dice.event(&known, about)),
        }
        if dice.below(3) == 0 {
            now += Duration::from_millis(dice.below(900));
        }
        let mut steps = 0;
        while paths.poll_timeout().is_some_and(|at| at <= now) {
            paths.handle_timeout(now);
            steps += 1;
            assert!(steps < 100, "seed {seed}: the same deadline again and again");
        }
        while let Some(command) = paths.poll_command() {
            engine.apply(seed, command, &mut known);
        }
        for number in 0..PEERS {
            let live = engine.inbound.values().filter(|owner| **owner == peer(number)).count();
            assert!(
                live <= (GENERATIONS_MAX * PATHS + RETIRED_MAX) * LANES,
                "seed {seed}: {live} SAs live"
            );
        }
        while let Some((_, message)) = paths.poll_message() {
            match message {
                Message::Hello(hello) => known.session.push(hello.session),
                Message::Offer(offer) => known.offers.push(offer.offer),
                _ => {}
            }
        }
        while paths.poll_change().is_some() {}
        let _ = paths.status(now);
    }
}

#[test]
fn lies_in_any_order_do_no_harm() {
    (0..800).for_each(lie);
}

#[test]
fn the_same_inputs_give_the_same_outputs() {
    let run = || {
        let now = Instant::now();
        let mut paths = Paths::new(peer(1), Config::default(), [3; 32]);
        let key = SessionKey::from_bytes([4; 32]);
        paths.handle_link_up(now, peer(2), key, None, [10, 0, 0, 2].into(), true);
        let Some((_, Message::Hello(mut hello))) = paths.poll_message() else { panic!() };
        hello.instance = 5;
        paths.handle_message(now, peer(2), Message::Hello(hello)).unwrap();
        let commands: Vec<_> = std::iter::from_fn(|| paths.poll_command()).collect();
        let messages: Vec<_> = std::iter::from_fn(|| paths.poll_message()).collect();
        (commands, messages)
    };
    assert!(run().0.iter().any(|it| matches!(it, EngineCommand::InstallInbound { .. })));
    assert_eq!(run(), run());
}
