//! A server of the control channel: its gate, and a session behind it. Input: how packets are wrapped 1 byte, then
//! packets. Each is its length 1 byte and its content: either a datagram as it is, if its first byte is 0, or
//! (else) what the client's end of the session makes a right packet of: opcode and key id 1, packet id 1, number of
//! acknowledgements 1, these 1 each, payload.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustls::ServerConfig;
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use weft_openvpn::control::{ACKS_MAX, Acks, ControlPacket};
use weft_openvpn::device::{KeyBlock, Side};
use weft_openvpn::gate::{Gate, GateConfig, Gated};
use weft_openvpn::key_method::LinkOptions;
use weft_openvpn::negotiation::{DEFAULT_CIPHERS, ServerPolicy};
use weft_openvpn::session::{EVENTS_MAX, Event, ServerOptions, Session, Timing};
use weft_openvpn::wrap::{
    AuthDigest, AuthDirection, Metadata, ReplayId, SERVER_KEY_BYTES, ServerKey, WrapKeys,
};
use weft_openvpn::{Opcode, SessionId};

const UNIX_S: u64 = 1_800_000_000;
/// The most packets that a session may have to send after one call.
const TRANSMITS_MAX: usize = 64;

/// Nothing panics, nothing is let in without the cookie, what is to be sent has an end, and a session that does not get
/// anywhere is over.
pub fn run(data: &[u8]) {
    let Some((kind, mut rest)) = data.split_first() else { return };
    let mut server = Server::new(kind % 4);
    while let Some((length, behind)) = rest.split_first() {
        let (packet, behind) = behind.split_at(usize::from(*length).min(behind.len()));
        rest = behind;
        match packet.split_first() {
            Some((0, bytes)) => server.handle_raw(bytes),
            Some(_) => server.handle_made(packet),
            None => server.now += Duration::from_secs(1),
        }
    }
    server.wait_for_the_end();
}

struct Server {
    now: Instant,
    gate: Gate,
    session: Option<Session>,
    client_keys: WrapKeys,
    client_key: Vec<u8>,
    client: SessionId,
    replay_id: ReplayId,
    is_over: bool,
}

impl Server {
    fn new(kind: u8) -> Self {
        let key = KeyBlock::new(std::array::from_fn(|at| at as u8));
        let server_key = ServerKey::new(&[5; SERVER_KEY_BYTES]);
        let client_key = server_key.wrap(&key, &Metadata::Timestamp(1)).expect("short metadata");
        let auth = |direction| WrapKeys::tls_auth(&key, AuthDigest::Sha256, direction);
        let crypt = |side| WrapKeys::tls_crypt(&key, side);
        let (wrap, client_keys) = match kind {
            0 => (Some(WrapKeys::None), WrapKeys::None),
            1 => (Some(auth(AuthDirection::Zero)), auth(AuthDirection::One)),
            2 => (Some(crypt(Side::Server)), crypt(Side::Client)),
            _ => (None, crypt(Side::Client)),
        };
        let config =
            GateConfig { wrap, client_keys: Some(Arc::new(server_key)), ..GateConfig::default() };
        let now = Instant::now();
        Self {
            now,
            gate: Gate::new(now, config, &[3; 32]),
            session: None,
            client_keys,
            client_key,
            client: SessionId::new([0xc1; 8]).expect("not zero"),
            replay_id: ReplayId { time_s: 7, number: 1 },
            is_over: false,
        }
    }

    fn handle_raw(&mut self, bytes: &[u8]) {
        let admitted = self.gate.handle_datagram(self.now, UNIX_S, address(), bytes);
        assert!(!matches!(admitted, Ok(Gated::Admit(_))), "let in without the cookie");
        if let Some(session) = &mut self.session {
            let _ = session.handle_datagram(self.now, bytes);
        }
        self.poll();
    }

    fn handle_made(&mut self, packet: &[u8]) {
        let Some((head, rest)) = packet.split_first_chunk::<3>() else { return };
        let Ok((opcode, key_id)) = Opcode::parse(head[0]) else { return };
        let (ids, payload) = rest.split_at(usize::from(head[2]).min(ACKS_MAX).min(rest.len()));
        let ids: Vec<u32> = ids.iter().map(|id| u32::from(*id)).collect();
        let own = self.session.as_ref().map(Session::own);
        let acks = own.and_then(|_| Acks::new(&ids).ok()).unwrap_or_default();
        let is_ack = opcode == Opcode::AckV1;
        let made = ControlPacket {
            opcode,
            key_id,
            session: self.client,
            acks,
            remote_session: own.filter(|_| !acks.ids().is_empty()),
            packet_id: (!is_ack).then_some(u32::from(head[1])),
            payload: if is_ack { &[] } else { payload },
        };
        let (mut plain, mut bytes) = (Vec::new(), Vec::new());
        if made.write(&mut plain).is_err() {
            return;
        }
        self.client_keys.wrap(&plain, self.replay_id, &mut bytes);
        self.replay_id.number += 1;
        if opcode.has_client_key() {
            bytes.extend_from_slice(&self.client_key);
        }
        match &mut self.session {
            Some(session) => {
                let _ = session.handle_datagram(self.now, &bytes);
            }
            None => self.knock(&bytes),
        }
        self.poll();
    }

    /// A first packet. A connection lets in without a cookie.
    fn knock(&mut self, bytes: &[u8]) {
        let _ = self.gate.handle_datagram(self.now, UNIX_S, address(), bytes);
        let admitted = self.gate.handle_stream(self.now, UNIX_S, [0x5e; 8], bytes);
        let Ok(admission) = admitted else { return };
        let session = Session::admit(self.now, UNIX_S, admission, options(), address(), &[9; 32]);
        self.session = Some(session.expect("the configuration is right"));
    }

    fn poll(&mut self) {
        let Some(session) = &mut self.session else { return };
        session.handle_timeout(self.now);
        let mut count = 0;
        while let Some(event) = session.poll_event() {
            assert!(!self.is_over, "an event behind the last: {event:?}");
            self.is_over = matches!(event, Event::Ended(_));
            count += 1;
        }
        assert!(count <= EVENTS_MAX + 1, "{count} events at once");
        let sent = std::iter::from_fn(|| session.poll_transmit(self.now)).take(TRANSMITS_MAX);
        assert!(sent.count() < TRANSMITS_MAX, "no end of packets");
    }

    /// Nobody has a certificate, so that no handshake succeeds: the session must be over in the end.
    fn wait_for_the_end(&mut self) {
        for _ in 0..TRANSMITS_MAX {
            let Some(at) = self.session.as_ref().and_then(|end| end.poll_timeout(self.now)) else {
                break;
            };
            self.now = self.now.max(at);
            self.poll();
        }
        let Some(session) = &self.session else { return };
        assert!(self.is_over && session.is_drained(self.now), "the session never ends");
    }
}

#[derive(Debug)]
struct NoCertificate;

impl ResolvesServerCert for NoCertificate {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        None
    }
}

fn options() -> Arc<ServerOptions> {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let tls = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("the provider has them")
        .with_no_client_auth()
        .with_cert_resolver(Arc::new(NoCertificate));
    Arc::new(ServerOptions {
        tls: Arc::new(tls),
        timing: Timing::default(),
        policy: ServerPolicy {
            ciphers: DEFAULT_CIPHERS.to_vec(),
            fallback: None,
            has_epochs: true,
            has_dynamic_tls_crypt: true,
        },
        has_exporter: true,
        link: LinkOptions {
            tun_mtu: 1_500,
            is_tcp: false,
            cipher: None,
            auth_digest: "SHA1".to_owned(),
            has_tls_auth: false,
            key_direction: None,
        },
    })
}

fn address() -> SocketAddr {
    SocketAddr::from(([192, 0, 2, 7], 40_000))
}
