//! A client of the control channel, and the frames of its connection. Input: how packets are wrapped 1 byte, then
//! packets as `openvpn_server` has them, which come from the server here. With kind 4 the rest is what came over TCP.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustls::pki_types::ServerName;
use rustls::{ClientConfig, RootCertStore};
use weft_openvpn::control::{ACKS_MAX, Acks, ControlPacket};
use weft_openvpn::device::{KeyBlock, Side};
use weft_openvpn::frame;
use weft_openvpn::key_method::{Credentials, IvProto, LinkOptions, PeerInfo};
use weft_openvpn::negotiation::DEFAULT_CIPHERS;
use weft_openvpn::session::{ClientOptions, EVENTS_MAX, Event, Features, Session, Timing};
use weft_openvpn::wrap::{AuthDigest, AuthDirection, ReplayId, WrapKeys};
use weft_openvpn::{Opcode, SessionId};

const UNIX_S: u64 = 1_800_000_000;
/// The most packets that a session may have to send after one call.
const TRANSMITS_MAX: usize = 64;
/// The longest packet of a connection.
const FRAME_BYTES_MAX: usize = 2_048;

/// Nothing panics, what is to be sent has an end, and a session with a server that proves nothing is over in the end.
pub fn run(data: &[u8]) {
    let Some((kind, mut rest)) = data.split_first() else { return };
    if kind % 5 == 4 {
        return frames(rest);
    }
    let mut client = Client::new(kind % 5);
    while let Some((length, behind)) = rest.split_first() {
        let (packet, behind) = behind.split_at(usize::from(*length).min(behind.len()));
        rest = behind;
        match packet.split_first() {
            Some((0, bytes)) => client.handle(bytes),
            Some(_) => client.handle_made(packet),
            None => client.now += Duration::from_secs(1),
        }
    }
    client.wait_for_the_end();
}

/// What is read of a stream is written as it was.
fn frames(mut bytes: &[u8]) {
    while let Ok(Some((packet, rest))) = frame::split(bytes, FRAME_BYTES_MAX) {
        let mut again = Vec::new();
        frame::write(packet, &mut again).expect("read");
        assert_eq!(again, bytes[..bytes.len() - rest.len()]);
        bytes = rest;
    }
}

struct Client {
    now: Instant,
    session: Session,
    server_keys: WrapKeys,
    server: SessionId,
    replay_id: ReplayId,
    is_over: bool,
}

impl Client {
    fn new(kind: u8) -> Self {
        let key = KeyBlock::new(std::array::from_fn(|at| at as u8));
        let auth = |direction| WrapKeys::tls_auth(&key, AuthDigest::Sha256, direction);
        let crypt = |side| WrapKeys::tls_crypt(&key, side);
        let (wrap, server_keys) = match kind {
            0 => (WrapKeys::None, WrapKeys::None),
            1 => (auth(AuthDirection::One), auth(AuthDirection::Zero)),
            _ => (crypt(Side::Client), crypt(Side::Server)),
        };
        let client_key = (kind == 3).then(|| vec![7; 300]);
        let now = Instant::now();
        let options = options(wrap, client_key);
        let session = Session::connect(now, UNIX_S, options, address(), &[9; 32]);
        Self {
            now,
            session: session.expect("the configuration is right"),
            server_keys,
            server: SessionId::new([0x5e; 8]).expect("not zero"),
            replay_id: ReplayId { time_s: 7, number: 1 },
            is_over: false,
        }
    }

    fn handle(&mut self, bytes: &[u8]) {
        let _ = self.session.handle_datagram(self.now, bytes);
        self.poll();
    }

    fn handle_made(&mut self, packet: &[u8]) {
        let Some((head, rest)) = packet.split_first_chunk::<3>() else { return };
        let Ok((opcode, key_id)) = Opcode::parse(head[0]) else { return };
        let (ids, payload) = rest.split_at(usize::from(head[2]).min(ACKS_MAX).min(rest.len()));
        let ids: Vec<u32> = ids.iter().map(|id| u32::from(*id)).collect();
        let acks = Acks::new(&ids).unwrap_or_default();
        let is_ack = opcode == Opcode::AckV1;
        let made = ControlPacket {
            opcode,
            key_id,
            session: self.server,
            acks,
            remote_session: (!acks.ids().is_empty()).then(|| self.session.own()),
            packet_id: (!is_ack).then_some(u32::from(head[1])),
            payload: if is_ack { &[] } else { payload },
        };
        let (mut plain, mut bytes) = (Vec::new(), Vec::new());
        if made.write(&mut plain).is_err() {
            return;
        }
        self.server_keys.wrap(&plain, self.replay_id, &mut bytes);
        self.replay_id.number += 1;
        self.handle(&bytes);
    }

    fn poll(&mut self) {
        self.session.handle_timeout(self.now);
        let mut count = 0;
        while let Some(event) = self.session.poll_event() {
            assert!(!self.is_over, "an event behind the last: {event:?}");
            let is_let_in = matches!(event, Event::Connected | Event::InstallKey(..));
            assert!(!is_let_in, "connected with a server that proves nothing");
            self.is_over = matches!(event, Event::Ended(_));
            count += 1;
        }
        assert!(count <= EVENTS_MAX + 1, "{count} events at once");
        let sent = std::iter::from_fn(|| self.session.poll_transmit(self.now));
        assert!(sent.take(TRANSMITS_MAX).count() < TRANSMITS_MAX, "no end of packets");
    }

    fn wait_for_the_end(&mut self) {
        self.poll();
        for _ in 0..TRANSMITS_MAX {
            let Some(at) = self.session.poll_timeout(self.now) else { break };
            self.now = self.now.max(at);
            self.poll();
        }
        assert!(self.is_over && self.session.is_drained(self.now), "the session never ends");
    }
}

fn options(wrap: WrapKeys, client_key: Option<Vec<u8>>) -> ClientOptions {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let tls = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("the provider has them")
        .with_root_certificates(RootCertStore::empty())
        .with_no_client_auth();
    ClientOptions {
        tls: Arc::new(tls),
        server_name: ServerName::try_from("openvpn.invalid").expect("a name"),
        timing: Timing::default(),
        ciphers: DEFAULT_CIPHERS.to_vec(),
        fallback: None,
        features: Features::default(),
        link: LinkOptions {
            tun_mtu: 1_500,
            is_tcp: false,
            cipher: None,
            auth_digest: "SHA1".to_owned(),
            has_tls_auth: false,
            key_direction: None,
        },
        credentials: Credentials::Missing,
        peer_info: PeerInfo::default(),
        proto: IvProto::default(),
        wrap,
        client_key,
        is_stream: false,
    }
}

fn address() -> SocketAddr {
    SocketAddr::from(([192, 0, 2, 1], 1_194))
}
