//! A host that speaks the protocol by hand, written from the description in `wire`, to break its
//! rules.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;

use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use quinn::{Connection, ConnectionError, Endpoint, RecvStream, SendStream};
use rcgen::{CertificateParams, KeyPair, PKCS_ED25519};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::aws_lc_rs::default_provider;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{DigitallySignedStruct, DistinguishedName, Error, SignatureScheme};
use rustls_pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName, UnixTime};
use weft_crypto::{CpaceContext, CpaceInitiator, PeerId};

use super::within;

pub const PREAMBLE: [u8; 16] = *b"WEFTLINK\0\x01\0\x01\0\0\0\0";
/// Use: order 1, renews no session.
const FIRST_DECISION: [u8; 17] = [7, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0];
pub const WRONG_PASSWORD: u64 = 6;

pub struct RawHost {
    pub endpoint: Endpoint,
    key: KeyPair,
    certificate: CertificateDer<'static>,
}

impl RawHost {
    /// Has a certificate that expired long ago.
    pub fn new(from: Ipv4Addr) -> Self {
        let key = KeyPair::generate_for(&PKCS_ED25519).unwrap();
        let mut params = CertificateParams::default();
        params.not_before = rcgen::date_time_ymd(1980, 1, 1);
        params.not_after = rcgen::date_time_ymd(1980, 1, 2);
        let certificate = params.self_signed(&key).unwrap().der().clone();
        let chain = vec![certificate.clone()];
        let mut tls = rustls::ServerConfig::builder_with_provider(Arc::new(default_provider()))
            .with_protocol_versions(&[&rustls::version::TLS13])
            .unwrap()
            .with_client_cert_verifier(Arc::new(Anyone))
            .with_single_cert(chain, private(&key))
            .unwrap();
        tls.alpn_protocols = vec![b"weft-link".to_vec()];
        let crypto = Arc::new(QuicServerConfig::try_from(tls).unwrap());
        let config = quinn::ServerConfig::with_crypto(crypto);
        let endpoint = Endpoint::server(config, SocketAddr::from((from, 0))).unwrap();
        Self { endpoint, key, certificate }
    }

    /// A host that decides about connections with `peer`, or one that follows the peer's decisions.
    pub fn that_decides(decides: bool, peer: PeerId) -> Self {
        let is_wanted = |host: &Self| (PeerId::of_public_key(&host.public_key()) < peer) == decides;
        std::iter::repeat_with(|| Self::new(Ipv4Addr::LOCALHOST)).find(is_wanted).unwrap()
    }

    pub fn public_key(&self) -> [u8; 32] {
        self.key.public_key_raw().try_into().unwrap()
    }

    pub fn addr(&self) -> SocketAddr {
        self.endpoint.local_addr().unwrap()
    }

    pub async fn connect(&self, to: SocketAddr) -> Result<Connection, ConnectionError> {
        let mut tls = rustls::ClientConfig::builder_with_provider(Arc::new(default_provider()))
            .with_protocol_versions(&[&rustls::version::TLS13])
            .unwrap()
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(Anyone))
            .with_client_auth_cert(vec![self.certificate.clone()], private(&self.key))
            .unwrap();
        tls.alpn_protocols = vec![b"weft-link".to_vec()];
        let crypto = Arc::new(QuicClientConfig::try_from(tls).unwrap());
        let config = quinn::ClientConfig::new(crypto);
        within(self.endpoint.connect_with(config, to, "weft").unwrap()).await
    }

    /// A connection on which the preamble has been exchanged.
    pub async fn greet(&self, to: SocketAddr) -> RawTalk {
        let conn = self.connect(to).await.unwrap();
        let (mut send, mut recv) = conn.open_bi().await.unwrap();
        send.write_all(&PREAMBLE).await.unwrap();
        let mut theirs = [0; 16];
        within(recv.read_exact(&mut theirs)).await.unwrap();
        assert_eq!(theirs, PREAMBLE);
        RawTalk { conn, send, recv, ours: self.public_key() }
    }
}

pub struct RawTalk {
    pub conn: Connection,
    pub send: SendStream,
    pub recv: RecvStream,
    ours: [u8; 32],
}

impl RawTalk {
    pub async fn put(&mut self, frame: &[u8]) {
        let mut bytes = (frame.len() as u32).to_be_bytes().to_vec();
        bytes.extend_from_slice(frame);
        // The other side may have closed already; `closed` shows its reason.
        let _ = self.send.write_all(&bytes).await;
    }

    pub async fn get(&mut self) -> Result<Vec<u8>, quinn::ReadExactError> {
        let mut len = [0; 4];
        self.recv.read_exact(&mut len).await?;
        let mut bytes = vec![0; u32::from_be_bytes(len) as usize];
        self.recv.read_exact(&mut bytes).await?;
        Ok(bytes)
    }

    pub fn theirs(&self) -> [u8; 32] {
        let chain = self.conn.peer_identity().unwrap();
        let chain = chain.downcast::<Vec<CertificateDer<'static>>>().unwrap();
        let (_, certificate) = x509_parser::parse_x509_certificate(&chain[0]).unwrap();
        (*certificate.public_key().subject_public_key.data).try_into().unwrap()
    }

    /// Sends Start; the exchange continues once the share is answered.
    pub async fn start(&mut self, password: &str) -> CpaceInitiator {
        let mut sid = vec![0; 32];
        self.conn.export_keying_material(&mut sid, b"EXPORTER-weft-admission-1", &[0; 4]).unwrap();
        let context = CpaceContext {
            ci: b"weft-link 1 password".to_vec(),
            sid,
            ada: self.ours.to_vec(),
            adb: self.theirs().to_vec(),
        };
        let mut random = [0; 64];
        rand::fill(&mut random);
        let (cpace, share) = CpaceInitiator::start(password.as_bytes(), &context, random);
        let mut start = vec![1, 1, 0, 0, 0, 0];
        start.extend_from_slice(&share);
        self.put(&start).await;
        cpace
    }

    /// Proves the password and takes the peer's proof, if it shows one.
    pub async fn prove(&mut self, password: &str) -> bool {
        let cpace = self.start(password).await;
        let Ok(share) = within(self.get()).await else { return false };
        assert_eq!(share[0], 2);
        let proof = cpace.finish(share[1..].try_into().unwrap()).unwrap();
        let mut tag = vec![3];
        tag.extend_from_slice(&proof.tag());
        self.put(&tag).await;
        let Ok(tag) = within(self.get()).await else { return false };
        assert_eq!(tag[0], 4);
        proof.verify(tag[1..].try_into().unwrap()).is_ok()
    }

    /// Runs the protocol until the connection is the link.
    pub async fn join(&mut self, password: &str) {
        assert!(self.prove(password).await);
        let theirs = within(self.get()).await.unwrap();
        assert_eq!(theirs[0], 5);
        let mut ready = vec![5];
        ready.extend_from_slice(&[1; 8]);
        // No predecessor instance, and no session.
        ready.extend_from_slice(&[0; 16]);
        for part in [b"raw".as_slice(), b"null", b""] {
            ready.extend_from_slice(&(part.len() as u32).to_be_bytes());
            ready.extend_from_slice(part);
        }
        self.put(&ready).await;
        let (me, peer) = (PeerId::of_public_key(&self.ours), PeerId::of_public_key(&self.theirs()));
        if me < peer {
            self.put(&FIRST_DECISION).await;
        } else {
            assert_eq!(within(self.get()).await.unwrap(), FIRST_DECISION);
        }
    }

    /// The code and reason with which the other side closed.
    pub async fn closed(&self) -> (u64, String) {
        match within(self.conn.closed()).await {
            ConnectionError::ApplicationClosed(close) => {
                (close.error_code.into_inner(), String::from_utf8_lossy(&close.reason).into_owned())
            }
            other => panic!("{other:?}"),
        }
    }
}

fn private(key: &KeyPair) -> PrivateKeyDer<'static> {
    PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der()))
}

#[derive(Debug)]
struct Anyone;

impl ServerCertVerifier for Anyone {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }
}

impl ClientCertVerifier for Anyone {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        Ok(ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }
}
