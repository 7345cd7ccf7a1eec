//! A client of the control channel, and the frames of its connection. Input: how packets are wrapped 1 byte, then
//! the server's packets, as `control_channel` has them. With kind 4 the rest is what came over TCP.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use rustls::pki_types::ServerName;
use rustls::{ClientConfig, RootCertStore};
use weft_openvpn::device::{KeyBlock, Side};
use weft_openvpn::frame;
use weft_openvpn::session::{ClientOptions, Session};
use weft_openvpn::wrap::{AuthDigest, AuthDirection, WrapKeys};

use super::control_channel::{Channel, Step, UNIX_S, steps};

/// The longest packet of a connection.
const FRAME_BYTES_MAX: usize = 2_048;

/// Nothing panics, what is to be sent has an end, and a session with a server that proves nothing is over in the end.
pub fn run(data: &[u8]) {
    let Some((kind, rest)) = data.split_first() else { return };
    if kind % 5 == 4 {
        return frames(rest);
    }
    let mut client = client(kind % 5);
    for step in steps(rest) {
        match step {
            Step::Raw(bytes) => client.handle(bytes),
            Step::Made(packet) => {
                let made = client.made(packet);
                made.iter().for_each(|(_, bytes)| client.handle(bytes));
            }
            Step::Later => client.wait(),
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

fn client(kind: u8) -> Channel {
    let key = KeyBlock::new(std::array::from_fn(|at| at as u8));
    let auth = |direction| WrapKeys::tls_auth(&key, AuthDigest::Sha256, direction);
    let crypt = |side| WrapKeys::tls_crypt(&key, side);
    let (wrap, server_keys) = match kind {
        0 => (WrapKeys::None, WrapKeys::None),
        1 => (auth(AuthDirection::One), auth(AuthDirection::Zero)),
        _ => (crypt(Side::Client), crypt(Side::Server)),
    };
    let client_key = (kind == 3).then(|| vec![7; 300]);
    let (now, options) = (Instant::now(), ClientOptions { client_key, ..options(wrap) });
    let server = SocketAddr::from(([192, 0, 2, 1], 1_194));
    let session = Session::connect(now, UNIX_S, options, server, &[9; 32]);
    Channel::new(now, Some(session.expect("the configuration is right")), server_keys)
}

fn options(wrap: WrapKeys) -> ClientOptions {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let tls = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("the provider has them")
        .with_root_certificates(RootCertStore::empty())
        .with_no_client_auth();
    let server_name = ServerName::try_from("openvpn.invalid").expect("a name");
    ClientOptions::new(Arc::new(tls), server_name, wrap)
}
