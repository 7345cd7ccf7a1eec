//! One client of the crowd.

use std::io;
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::path::Path;
use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use anyhow::Context;
use rustls::ClientConfig;
use weft::openvpn::connect::tls;
use weft_crypto::ReplayWindow;
use weft_crypto::ovpn::{OpeningKey, SealingKey};
use weft_openvpn::config::{ClientProfile, read_client_profile};
use weft_openvpn::data::{self, DataPacket, FIRST_WORD_BYTES, OVERHEAD_BYTES, PING, Payload};
use weft_openvpn::device::Slot;
use weft_openvpn::key_method::PeerInfo;
use weft_openvpn::messages::Message;
use weft_openvpn::session::{ClientOptions, DataKeys, Event, Session, Timing, session_of};
use weft_openvpn::wrap::WrapKeys;
use weft_packet::{icmp, ipv4};

use super::{ECHO_MAX, ECHO_PAUSE, FAREWELL, Stayed, Tally};

/// The longest datagram that is read, in bytes.
const DATAGRAM_BYTES_MAX: usize = 2_048;
const ICMP: u8 = 1;
/// Bytes of an echo request behind its header.
const ECHO_BYTES: usize = 200;

/// How a client leaves, or goes on.
#[derive(Clone, Copy, Debug)]
pub(super) enum Leaving {
    Farewell,
    Silently,
    ToComeAnew,
    ByAnotherPort,
    WithANewKey,
}

impl Leaving {
    pub(super) const KINDS: usize = 5;
    /// Those after which the session is over.
    pub(super) const LAST_KINDS: usize = 3;

    pub(super) const fn of(number: usize) -> Self {
        match number {
            0 => Self::Farewell,
            1 => Self::Silently,
            2 => Self::ToComeAnew,
            3 => Self::ByAnotherPort,
            _ => Self::WithANewKey,
        }
    }
}

/// The state of a client.
#[derive(Clone, Copy, Debug)]
pub(super) enum State {
    /// It comes at this time.
    Away(Instant),
    /// It has been shaking hands since.
    Coming(Instant),
    /// It is connected.
    Here,
    /// It has said farewell, and repeats that until then.
    Going(Instant),
    /// Its session was ended by the server.
    Over,
}

/// A key of the data channel, in both directions.
struct Keys {
    id: u8,
    sealing: SealingKey,
    first_word: [u8; FIRST_WORD_BYTES],
    opening: OpeningKey,
    window: ReplayWindow,
}

impl Keys {
    fn of(keys: &DataKeys) -> Option<Self> {
        let attributes = keys.attributes(keys.peer.get(), Slot::Primary);
        let (encrypt, decrypt) = (attributes.encrypt?, attributes.decrypt?);
        Some(Self {
            id: keys.key_id.get(),
            sealing: SealingKey::new(keys.cipher, &encrypt.cipher_key, encrypt.nonce_tail).ok()?,
            first_word: data::first_word(keys.key_id, Some(keys.peer)),
            opening: OpeningKey::new(keys.cipher, &decrypt.cipher_key, decrypt.nonce_tail).ok()?,
            window: ReplayWindow::new(),
        })
    }
}

/// One client.
pub(super) struct Member {
    name: String,
    tls: Arc<ClientConfig>,
    wrap: WrapKeys,
    client_key: Option<Vec<u8>>,
    pub(super) state: State,
    pub(super) stays_until: Instant,
    pub(super) leaves: Leaving,
    pub(super) socket: Option<UdpSocket>,
    session: Option<Session>,
    keys: [Option<Keys>; 2],
    own: Option<Ipv4Addr>,
    gateway: Option<Ipv4Addr>,
    /// Echo requests without an answer yet: their numbers and times.
    open: Vec<(u16, Instant)>,
    echo_at: Instant,
    /// Of this session.
    pub(super) echoes: u64,
    pub(super) answers: u64,
    sent_bytes: u64,
    received_bytes: u64,
    /// The last thing that it did, and when.
    did: (&'static str, Instant),
    /// Counts that are not in the tally yet.
    news: Tally,
}

impl Member {
    /// A client with the profile in a file named HOST-NAME.ovpn.
    pub(super) fn read(path: &Path) -> anyhow::Result<Self> {
        let text = std::fs::read_to_string(path)?;
        let mut files = |name: &str| Err(format!("{name} is not in the profile"));
        let profile: ClientProfile = read_client_profile(&text, &mut files).profile;
        let (wrap, client_key) = tls::wrapping(&profile)?;
        let name = path.file_stem().and_then(|stem| stem.to_str()).context("no name")?;
        let now = Instant::now();
        Ok(Self {
            name: name.split_once('-').map_or(name, |(_, name)| name).to_owned(),
            tls: tls::configuration(&profile.tls)?,
            wrap,
            client_key,
            state: State::Away(now),
            stays_until: now,
            leaves: Leaving::Farewell,
            socket: None,
            session: None,
            keys: [None, None],
            own: None,
            gateway: None,
            open: Vec::new(),
            echo_at: now,
            echoes: 0,
            answers: 0,
            sent_bytes: 0,
            received_bytes: 0,
            did: ("began", now),
            news: Tally::default(),
        })
    }

    pub(super) const fn is_connected(&self) -> bool {
        matches!(self.state, State::Here)
    }

    /// Whether no answer is awaited.
    pub(super) const fn is_settled(&self) -> bool {
        self.open.is_empty()
    }

    pub(super) fn stayed(&self) -> Option<Stayed> {
        Some(Stayed {
            name: self.name.clone(),
            address: self.own?,
            sent_bytes: self.sent_bytes,
            received_bytes: self.received_bytes,
        })
    }

    /// Begins a session from a new socket, in the place of the one before.
    pub(super) fn connect(
        &mut self,
        socket: UdpSocket,
        server: SocketAddr,
        seed: [u8; 32],
    ) -> anyhow::Result<()> {
        let (now, unix_s) = (Instant::now(), SystemTime::now().duration_since(UNIX_EPOCH)?);
        self.forget();
        let session = Session::connect(now, unix_s.as_secs(), self.options()?, server, &seed)?;
        (self.socket, self.session) = (Some(socket), Some(session));
        self.state = State::Coming(now);
        self.send(now);
        Ok(())
    }

    /// Ends the session at this end, without a word.
    pub(super) fn forget(&mut self) {
        (self.socket, self.session, self.keys) = (None, None, [None, None]);
        (self.own, self.gateway) = (None, None);
        (self.echoes, self.answers) = (0, 0);
        (self.sent_bytes, self.received_bytes) = (0, 0);
        self.open.clear();
    }

    /// Notes what it did, for reports of losses.
    pub(super) const fn noted(&mut self, what: &'static str, now: Instant) {
        self.did = (what, now);
    }

    /// Adds to the tally what happened since the last time.
    pub(super) fn count(&mut self, tally: &mut Tally) {
        let news = std::mem::take(&mut self.news);
        for (sum, more) in [
            (&mut tally.connected, news.connected),
            (&mut tally.echoes, news.echoes),
            (&mut tally.answers, news.answers),
            (&mut tally.unopened, news.unopened),
        ] {
            *sum += more;
        }
        tally.lost.extend(news.lost);
    }

    /// Handles all datagrams that have come.
    pub(super) fn receive(&mut self, now: Instant) {
        let mut buffer = [0; DATAGRAM_BYTES_MAX];
        loop {
            let received = self.socket.as_ref().map(|socket| socket.recv(&mut buffer));
            let length = match received {
                Some(Ok(length)) => length,
                // The answer to an earlier datagram.
                Some(Err(error)) if error.kind() == io::ErrorKind::ConnectionRefused => continue,
                Some(Err(_)) | None => return,
            };
            let bytes = &mut buffer[..length];
            if session_of(bytes).is_none() {
                self.receive_data(bytes);
            } else if let Some(session) = &mut self.session {
                // A packet that is dropped comes again.
                let _ = session.handle_datagram(now, bytes);
                self.follow(now);
            }
        }
    }

    /// Looks after what may have waited too long.
    pub(super) fn look(&mut self, now: Instant) {
        let is_lost = |(_, at): &mut (u16, Instant)| now >= *at + ECHO_MAX;
        for (number, at) in self.open.extract_if(.., is_lost) {
            let (what, when) = self.did;
            let later = at.checked_duration_since(when);
            let told = match later {
                Some(later) => format!("{} ms after it {what}", later.as_millis()),
                None => format!("{} ms before it {what}", (when - at).as_millis()),
            };
            self.news.lost.push(format!("{}: echo {number}, {told}", self.name));
        }
        let Some(session) = &mut self.session else { return };
        if session.poll_timeout(now).is_some_and(|at| at <= now) {
            session.handle_timeout(now);
            self.follow(now);
        }
    }

    /// Ends the session with a last word, which is repeated for a moment.
    pub(super) fn say_farewell(&mut self, now: Instant) {
        self.state = State::Going(now + FAREWELL);
        if let Some(session) = &mut self.session {
            session.close(now, &Message::Exit);
        }
        self.follow(now);
    }

    /// Asks for a new key. False: one was asked for a moment ago.
    pub(super) fn renew(&mut self, now: Instant) -> bool {
        let begun = self.session.as_mut().is_some_and(|session| session.renegotiate(now).is_ok());
        self.follow(now);
        begun
    }

    /// Does what the session asks for.
    fn follow(&mut self, now: Instant) {
        while let Some(event) = self.session.as_mut().and_then(Session::poll_event) {
            match event {
                Event::InstallKey(Slot::Primary, keys) => self.keys[0] = Keys::of(&keys),
                Event::InstallKey(Slot::Secondary, keys) => self.keys[1] = Keys::of(&keys),
                Event::SwapKeys => self.keys.swap(0, 1),
                Event::RemoveSecondaryKey => self.keys[1] = None,
                Event::Pushed(options) => {
                    let value = |words: &str| {
                        let rest = options.iter().find_map(|option| option.strip_prefix(words))?;
                        rest.split_whitespace().next()?.parse().ok()
                    };
                    (self.own, self.gateway) = (value("ifconfig "), value("route-gateway "));
                }
                Event::Connected => {
                    self.news.connected += 1;
                    (self.state, self.echo_at) = (State::Here, now);
                    self.noted("connected", now);
                }
                Event::Ended(_) if matches!(self.state, State::Going(_)) => {}
                Event::Ended(_) => self.state = State::Over,
                Event::Authenticate(_) | Event::Message(_) => {}
            }
        }
        self.send(now);
    }

    fn send(&mut self, now: Instant) {
        let (Some(session), Some(socket)) = (&mut self.session, &self.socket) else { return };
        while let Some(transmit) = session.poll_transmit(now) {
            // The session sends lost packets again.
            let _ = socket.send(&transmit.bytes);
        }
    }

    /// Sends an echo request to the gateway, if it is time.
    pub(super) fn echo_if_due(&mut self, now: Instant) {
        let (Some(own), Some(gateway)) = (self.own, self.gateway) else { return };
        if now < self.echo_at {
            return;
        }
        let number = (self.echoes + 1) as u16;
        let plain = echo_request(own, gateway, number);
        if self.seal(&plain) {
            self.echo_at = now + ECHO_PAUSE;
            self.echoes += 1;
            self.news.echoes += 1;
            self.sent_bytes += plain.len() as u64;
            self.open.push((number, now));
        }
    }

    /// Sends a sign of life that is no packet, if it is time.
    pub(super) fn ping_if_due(&mut self, now: Instant) {
        if now >= self.echo_at && self.seal(&PING) {
            self.echo_at = now + ECHO_PAUSE;
        }
    }

    /// Sends a packet through the tunnel. False: there is no key for it.
    fn seal(&self, plain: &[u8]) -> bool {
        let ([Some(keys), _], Some(socket)) = (&self.keys, &self.socket) else { return false };
        let mut packet = vec![0; OVERHEAD_BYTES + plain.len()];
        packet[OVERHEAD_BYTES..].copy_from_slice(plain);
        let reserved = keys.sealing.reserve(1, keys.first_word);
        let sealed = reserved.and_then(|mut one| one.seal_in_place(&mut packet, plain.len()));
        sealed.is_ok() && socket.send(&packet).is_ok()
    }

    fn receive_data(&mut self, bytes: &mut [u8]) {
        let id = DataPacket::parse(bytes).map(|packet| packet.key_id.get()).ok();
        let mut keys = self.keys.iter_mut().flatten();
        let keys = keys.find(|keys| Some(keys.id) == id);
        let opened = keys.map(|keys| keys.opening.open(&mut keys.window, bytes));
        let Some(Ok(plain)) = opened else {
            self.news.unopened += 1;
            return;
        };
        let Payload::Packet(packet) = Payload::of(&bytes[plain]) else { return };
        self.received_bytes += packet.len() as u64;
        let Some(number) = echo_reply(packet, self.own) else { return };
        if let Some(at) = self.open.iter().position(|(open, _)| *open == number) {
            self.open.swap_remove(at);
            self.answers += 1;
            self.news.answers += 1;
        }
    }

    /// The settings of a stock client.
    fn options(&self) -> anyhow::Result<ClientOptions> {
        let (tls, server_name) = (self.tls.clone(), tls::server_name()?);
        Ok(ClientOptions {
            timing: Timing { renegotiate_after: None, ..Timing::default() },
            peer_info: PeerInfo::parse("IV_VER=2.6.14\nIV_PLAT=linux\nIV_MTU=1600\n"),
            client_key: self.client_key.clone(),
            ..ClientOptions::new(tls, server_name, self.wrap.clone())
        })
    }
}

fn echo_request(source: Ipv4Addr, destination: Ipv4Addr, number: u16) -> Vec<u8> {
    let mut packet = vec![0; ipv4::LEN + icmp::LEN + ECHO_BYTES];
    let header = ipv4::Builder {
        tos: 0,
        total_len: packet.len() as u16,
        id: number,
        dont_fragment: true,
        ttl: 64,
        protocol: ICMP,
        source,
        destination,
    };
    header.write(&mut packet);
    icmp::finish_v4(&mut packet[ipv4::LEN..], icmp::V4_ECHO_REQUEST, 0, number.into());
    packet
}

/// The number of an echo reply to this client.
fn echo_reply(packet: &[u8], own: Option<Ipv4Addr>) -> Option<u16> {
    let (header, message) = packet.split_at_checked(ipv4::LEN)?;
    let to: [u8; 4] = header.get(16..20)?.try_into().ok()?;
    let is_its = header.get(9) == Some(&ICMP) && Some(Ipv4Addr::from(to)) == own;
    let reply = icmp::Header::parse(message).ok()?;
    (is_its && reply.kind == icmp::V4_ECHO_REPLY).then_some(reply.rest as u16)
}
