//! A server of the control channel: its gate, and a session behind it. Input: how packets are wrapped 1 byte, then
//! the client's packets, as `control_channel` has them.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use rustls::ServerConfig;
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use weft_openvpn::device::{KeyBlock, Side};
use weft_openvpn::gate::{Gate, GateConfig, Gated};
use weft_openvpn::negotiation::DEFAULT_CIPHERS;
use weft_openvpn::session::{ServerOptions, Session};
use weft_openvpn::wrap::{
    AuthDigest, AuthDirection, Metadata, SERVER_KEY_BYTES, ServerKey, WrapKeys,
};

use super::control_channel::{Channel, Step, UNIX_S, steps};

/// Nothing panics, nothing is let in without the cookie, what is to be sent has an end, and a session that does not get
/// anywhere is over.
pub fn run(data: &[u8]) {
    let Some((kind, rest)) = data.split_first() else { return };
    let mut server = Server::new(kind % 4);
    for step in steps(rest) {
        match step {
            Step::Raw(bytes) => server.handle_raw(bytes),
            Step::Made(packet) => server.handle_made(packet),
            Step::Later => server.channel.wait(),
        }
    }
    server.channel.wait_for_the_end();
}

struct Server {
    gate: Gate,
    channel: Channel,
    client_key: Vec<u8>,
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
        let channel = Channel::new(now, None, client_keys);
        Self { gate: Gate::new(now, config, &[3; 32]), channel, client_key }
    }

    fn handle_raw(&mut self, bytes: &[u8]) {
        let admitted = self.gate.handle_datagram(self.channel.now, UNIX_S, address(), bytes);
        assert!(!matches!(admitted, Ok(Gated::Admit(_))), "let in without the cookie");
        self.channel.handle(bytes);
    }

    fn handle_made(&mut self, packet: &[u8]) {
        let Some((opcode, mut bytes)) = self.channel.made(packet) else { return };
        if opcode.has_client_key() {
            bytes.extend_from_slice(&self.client_key);
        }
        match &self.channel.session {
            Some(_) => self.channel.handle(&bytes),
            None => self.knock(&bytes),
        }
    }

    /// A first packet. A connection lets in without a cookie.
    fn knock(&mut self, bytes: &[u8]) {
        let now = self.channel.now;
        let _ = self.gate.handle_datagram(now, UNIX_S, address(), bytes);
        let Ok(admission) = self.gate.handle_stream(now, UNIX_S, [0x5e; 8], bytes) else { return };
        let session = Session::admit(now, UNIX_S, admission, options(), address(), &[9; 32]);
        self.channel.session = Some(session.expect("the configuration is right"));
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
    let mut options = ServerOptions::new(Arc::new(tls), DEFAULT_CIPHERS.to_vec());
    options.policy.has_epochs = true;
    Arc::new(options)
}

fn address() -> SocketAddr {
    SocketAddr::from(([192, 0, 2, 7], 40_000))
}
