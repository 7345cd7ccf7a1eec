//! Clients of a gateway that come and go by the hundred, in one thread: `weft-openvpn`'s own session in the role of the
//! client, and echo requests through the tunnel. Each is counted at this end, so that the gateway can be held to it.

mod member;

use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Context;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use weft_io::namespace::{Namespace, run_in};
use weft_io::poller::Poller;

use member::{Leaving, Member, State};

/// How often all clients are looked at.
const LOOK: Duration = Duration::from_millis(50);
/// A handshake that takes longer has failed.
const HANDSHAKE_MAX: Duration = Duration::from_secs(60);
/// An echo that takes longer is lost.
const ECHO_MAX: Duration = Duration::from_secs(10);
/// The pause between two clients that come to stay: a gateway answers 100 first packets in 10 s.
const COMING: Duration = Duration::from_millis(100);
/// The pause between two echo requests of a client.
const ECHO_PAUSE: Duration = Duration::from_millis(700);
/// How long a client that leaves repeats its last words.
const FAREWELL: Duration = Duration::from_secs(2);
/// How long clients stay, and stay away, in milliseconds.
const STAY_MS: std::ops::Range<u64> = 2_000..20_000;
const AWAY_MS: std::ops::Range<u64> = 0..4_000;

/// The account of all clients: their sessions, echoes and ends.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    /// Sessions that were connected.
    pub connected: u64,
    /// Handshakes that did not end in time, or in a refusal.
    pub failed: u64,
    /// Sessions that ended otherwise than by this client's will.
    pub ended: u64,
    /// Sessions that were ended with a farewell.
    pub farewells: u64,
    /// Sessions that were ended without a word.
    pub silent: u64,
    /// Sessions that were followed at once by another of the same client, from a new port.
    pub anew: u64,
    /// Sessions that went on from a new port.
    pub moved: u64,
    /// New keys that clients asked for.
    pub renewed: u64,
    /// Echo requests sent, and answered.
    pub echoes: u64,
    /// Echo requests answered.
    pub answers: u64,
    /// Echo requests without an answer: whose, and what it had done before.
    pub lost: Vec<String>,
    /// Data packets that could not be opened.
    pub unopened: u64,
}

/// A client that stays connected, and what it has sent and got since.
#[derive(Clone, Debug)]
pub struct Stayed {
    /// Its name.
    pub name: String,
    /// Its address on the network.
    pub address: Ipv4Addr,
    /// Bytes of the packets that it has sent inside of the tunnel.
    pub sent_bytes: u64,
    /// The same of those that came.
    pub received_bytes: u64,
}

/// Clients that come and go from a namespace.
pub struct Crowd {
    namespace: PathBuf,
    server: SocketAddr,
    members: Vec<Member>,
    random: ChaCha8Rng,
    poller: Poller,
    tally: Tally,
}

impl Crowd {
    /// Clients with these profiles, whose server is the one that is given. The seed decides what they do.
    ///
    /// # Errors
    /// A profile cannot be read.
    pub fn new(
        namespace: &Path,
        server: SocketAddr,
        profiles: &[PathBuf],
        seed: u64,
    ) -> anyhow::Result<Self> {
        let members = profiles.iter().map(|path| Member::read(path));
        Ok(Self {
            namespace: namespace.to_owned(),
            server,
            members: members.collect::<anyhow::Result<_>>()?,
            random: ChaCha8Rng::seed_from_u64(seed),
            poller: Poller::new()?,
            tally: Tally::default(),
        })
    }

    /// Has all come and go for so long, and leave at the end. Returns what they did.
    ///
    /// # Errors
    /// The system's error.
    pub fn come_and_go(&mut self, length: Duration) -> anyhow::Result<Tally> {
        let end = Instant::now() + length;
        let all = 0..self.members.len();
        for number in all.clone() {
            let wait = self.random.random_range(AWAY_MS);
            self.members[number].state = State::Away(Instant::now() + Duration::from_millis(wait));
        }
        while Instant::now() < end {
            self.turn()?;
            for number in all.clone() {
                self.step(number)?;
            }
        }
        // None comes again; those that are here say farewell.
        for number in all.clone() {
            self.members[number].stays_until = Instant::now();
            self.members[number].leaves = Leaving::Farewell;
        }
        while self.members.iter().any(|member| !matches!(member.state, State::Away(_))) {
            self.turn()?;
            for number in all.clone() {
                if !matches!(self.members[number].state, State::Away(_)) {
                    self.step(number)?;
                }
            }
        }
        Ok(self.tally.clone())
    }

    /// Connects all, has each send some echo requests, and leaves them connected.
    ///
    /// # Errors
    /// One does not connect, or loses an echo.
    pub fn stay(&mut self, echoes: u64) -> anyhow::Result<Vec<Stayed>> {
        let (begun, mut waiting) = (Instant::now(), 0..self.members.len());
        let end = begun + 3 * HANDSHAKE_MAX;
        let is_done = |member: &Member| member.is_connected() && member.answers == echoes;
        while !waiting.is_empty() || !self.members.iter().all(is_done) {
            self.turn()?;
            let now = Instant::now();
            if now >= begun + COMING * u32::try_from(waiting.start)?
                && let Some(number) = waiting.next()
            {
                self.connect(number)?;
            }
            for member in &mut self.members {
                member.look(now);
                member.count(&mut self.tally);
                match member.echoes < echoes {
                    true => member.echo_if_due(now),
                    false => member.ping_if_due(now),
                }
            }
            anyhow::ensure!(now < end, "not all are connected: {:?}", self.tally);
        }
        let stayed = self.members.iter().map(Member::stayed);
        stayed.collect::<Option<_>>().context("one has no address")
    }

    /// Ends all without a word.
    pub fn vanish(&mut self) {
        self.members.iter_mut().for_each(Member::forget);
    }

    /// Waits for datagrams and handles them.
    fn turn(&mut self) -> anyhow::Result<()> {
        let ready: Vec<u64> = self.poller.wait(Some(LOOK))?.collect();
        for token in ready {
            let number = usize::try_from(token)?;
            if let Some(member) = self.members.get_mut(number) {
                member.receive(Instant::now());
                member.count(&mut self.tally);
            }
        }
        Ok(())
    }

    /// Has a client do what is due.
    fn step(&mut self, number: usize) -> anyhow::Result<()> {
        let now = Instant::now();
        let member = &mut self.members[number];
        member.look(now);
        member.count(&mut self.tally);
        match member.state {
            State::Away(until) if until <= now => self.connect(number)?,
            State::Away(_) => {}
            State::Coming(since) if now > since + HANDSHAKE_MAX => {
                self.tally.failed += 1;
                self.away(number);
            }
            State::Coming(_) => {}
            State::Here if now >= member.stays_until && member.is_settled() => {
                self.leave(number)?;
            }
            State::Here if now < member.stays_until => member.echo_if_due(now),
            State::Here => {}
            State::Going(until) if until <= now => self.away(number),
            State::Going(_) => {}
            State::Over => {
                self.tally.ended += 1;
                self.away(number);
            }
        }
        Ok(())
    }

    fn connect(&mut self, number: usize) -> anyhow::Result<()> {
        let socket = self.socket(number)?;
        let stay = Duration::from_millis(self.random.random_range(STAY_MS));
        let leaves = Leaving::of(self.random.random_range(0..Leaving::KINDS));
        self.members[number].connect(socket, self.server, self.random.random())?;
        self.members[number].stays_until = Instant::now() + stay;
        self.members[number].leaves = leaves;
        Ok(())
    }

    /// A new socket for a client.
    fn socket(&self, number: usize) -> anyhow::Result<UdpSocket> {
        let any = match self.server {
            SocketAddr::V4(_) => SocketAddr::from(([0; 4], 0)),
            SocketAddr::V6(_) => SocketAddr::from(([0; 16], 0)),
        };
        let namespace = Namespace::open(&self.namespace)?;
        let socket = run_in(namespace, move || UdpSocket::bind(any))??;
        socket.connect(self.server)?;
        socket.set_nonblocking(true)?;
        self.poller.add(&socket, number as u64)?;
        Ok(socket)
    }

    /// Ends what a client does now.
    fn leave(&mut self, number: usize) -> anyhow::Result<()> {
        let now = Instant::now();
        let member = &mut self.members[number];
        match member.leaves {
            Leaving::Farewell => {
                self.tally.farewells += 1;
                member.say_farewell(now);
            }
            Leaving::Silently => {
                self.tally.silent += 1;
                self.away(number);
            }
            Leaving::ToComeAnew => {
                self.tally.anew += 1;
                self.connect(number)?;
            }
            Leaving::ByAnotherPort => {
                self.tally.moved += 1;
                member.noted("moved", now);
                let socket = self.socket(number)?;
                self.members[number].socket = Some(socket);
                self.go_on(number);
            }
            Leaving::WithANewKey => {
                if member.renew(now) {
                    self.tally.renewed += 1;
                    member.noted("renewed", now);
                }
                self.go_on(number);
            }
        }
        Ok(())
    }

    /// A client stays for another while, and leaves for good then.
    fn go_on(&mut self, number: usize) {
        let stay = Duration::from_millis(self.random.random_range(STAY_MS));
        let leaves = Leaving::of(self.random.random_range(0..Leaving::LAST_KINDS));
        self.members[number].stays_until = Instant::now() + stay;
        self.members[number].leaves = leaves;
    }

    fn away(&mut self, number: usize) {
        let wait = Duration::from_millis(self.random.random_range(AWAY_MS));
        self.members[number].forget();
        self.members[number].state = State::Away(Instant::now() + wait);
    }
}
