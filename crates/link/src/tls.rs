//! TLS 1.3 with self-signed Ed25519 identities on both sides; no authority, no wall clock.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, aws_lc_rs, verify_tls13_signature};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::time_provider::TimeProvider;
use rustls::{CertificateError, DigitallySignedStruct, DistinguishedName, Error, SignatureScheme};
use rustls_pki_types::{CertificateDer, ServerName, UnixTime};
use weft_crypto::PeerId;
use x509_parser::oid_registry::OID_SIG_ED25519;
use x509_parser::prelude::{FromDer, X509Certificate};

use crate::error::LinkError;
use crate::identity::Identity;
use crate::limits::{HANDSHAKE_TIMEOUT_MS, Timing, UNADMITTED_MAX};
use crate::target::KeyHash;

/// Fixed forever: versions are negotiated inside (see `wire`).
const ALPN: &[u8] = b"weft-link";
/// Certificates identify keys, not hosts.
pub(crate) const SERVER_NAME: &str = "weft";
/// The DER bytes between the signed part of a certificate and the 64 bytes of its Ed25519 signature (RFC
/// 8410). The parser is lax about them, and no signature covers them.
const SIGNATURE_HEADER: [u8; 10] = [0x30, 5, 6, 3, 0x2b, 0x65, 0x70, 3, 0x41, 0];
const SIGNATURE_LEN: usize = 64;
const CERTIFICATE_MAX_BYTES: usize = 4096;
/// Bytes that a peer may send before we read them.
pub(crate) const STREAM_WINDOW_BYTES: u32 = 256 << 10;
const SEND_WINDOW_BYTES: u64 = 1 << 20;
const INCOMING_BUFFER_BYTES: u64 = 64 << 10;
const INCOMING_BUFFER_TOTAL_BYTES: u64 = 8 << 20;

/// The endpoint's configuration for inbound connections.
pub(crate) fn server_config(
    identity: &Identity,
    timing: &Timing,
) -> Result<quinn::ServerConfig, LinkError> {
    let mut tls = rustls::ServerConfig::builder_with_details(provider(), Arc::new(NoClock))
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(failed)?
        .with_client_cert_verifier(Arc::new(Verifier::new(None)))
        .with_single_cert(vec![identity.certificate()], identity.private_key())
        .map_err(failed)?;
    tls.alpn_protocols = vec![ALPN.to_vec()];
    tls.send_tls13_tickets = 0;
    let crypto = QuicServerConfig::try_from(tls).map_err(failed)?;
    let mut config = quinn::ServerConfig::with_crypto(Arc::new(crypto));
    let mut tokens = quinn::ValidationTokenConfig::default();
    tokens.sent(0);
    config
        .transport_config(transport(timing)?)
        .validation_token_config(tokens)
        .retry_token_lifetime(Duration::from_millis(HANDSHAKE_TIMEOUT_MS))
        .time_source(Arc::new(Monotonic(Instant::now())))
        .max_incoming(4 * UNADMITTED_MAX)
        .incoming_buffer_size(INCOMING_BUFFER_BYTES)
        .incoming_buffer_size_total(INCOMING_BUFFER_TOTAL_BYTES);
    Ok(config)
}

/// The configuration for one outbound attempt, and its verifier, which reports a key mismatch
/// afterwards.
pub(crate) fn client_config(
    identity: &Identity,
    timing: &Timing,
    expected: Option<KeyHash>,
) -> Result<(quinn::ClientConfig, Arc<Verifier>), LinkError> {
    let verifier = Arc::new(Verifier::new(expected));
    let mut tls = rustls::ClientConfig::builder_with_details(provider(), Arc::new(NoClock))
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(failed)?
        .dangerous()
        .with_custom_certificate_verifier(verifier.clone())
        .with_client_auth_cert(vec![identity.certificate()], identity.private_key())
        .map_err(failed)?;
    tls.alpn_protocols = vec![ALPN.to_vec()];
    tls.resumption = rustls::client::Resumption::disabled();
    tls.enable_sni = false;
    let crypto = QuicClientConfig::try_from(tls).map_err(failed)?;
    let mut config = quinn::ClientConfig::new(Arc::new(crypto));
    config.transport_config(transport(timing)?);
    Ok((config, verifier))
}

/// The other end of an established connection: its peer id and its public key.
pub(crate) fn peer_of(connection: &quinn::Connection) -> Option<(PeerId, [u8; 32])> {
    let identity = connection.peer_identity()?;
    let chain = identity.downcast::<Vec<CertificateDer<'static>>>().ok()?;
    let key = public_key_of(chain.first()?).ok()?;
    Some((PeerId::of_public_key(&key), key))
}

/// Accepts any well-formed self-signed Ed25519 certificate. On the dialling side, the key must have the
/// expected hash, if there is one.
#[derive(Debug)]
pub(crate) struct Verifier {
    expected: Option<KeyHash>,
    /// The peer whose key was refused as unexpected.
    mismatch: Mutex<Option<PeerId>>,
}

impl Verifier {
    fn new(expected: Option<KeyHash>) -> Self {
        Self { expected, mismatch: Mutex::new(None) }
    }

    /// The peer with the unexpected key, if that is why the handshake failed.
    pub(crate) fn mismatch(&self) -> Option<PeerId> {
        *self.mismatch.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn verify(&self, certificate: &CertificateDer<'_>) -> Result<(), Error> {
        let peer = PeerId::of_public_key(&public_key_of(certificate)?);
        if self.expected.as_ref().is_some_and(|expected| !expected.matches(peer)) {
            *self.mismatch.lock().unwrap_or_else(PoisonError::into_inner) = Some(peer);
            return Err(CertificateError::ApplicationVerificationFailure.into());
        }
        Ok(())
    }
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        self.verify(end_entity).map(|()| ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _cert: &CertificateDer<'_>,
        _dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(Error::General("TLS 1.2 is not spoken".to_owned()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = provider().signature_verification_algorithms;
        verify_tls13_signature(message, cert, dss, &algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }
}

impl ClientCertVerifier for Verifier {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        self.verify(end_entity).map(|()| ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        ServerCertVerifier::verify_tls12_signature(self, message, cert, dss)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        ServerCertVerifier::verify_tls13_signature(self, message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }
}

/// The raw key of a certificate that is well-formed, Ed25519 and signed by that key.
fn public_key_of(certificate: &CertificateDer<'_>) -> Result<[u8; 32], Error> {
    let bad = || Error::from(CertificateError::BadEncoding);
    if certificate.len() > CERTIFICATE_MAX_BYTES {
        return Err(bad());
    }
    let (rest, parsed) = X509Certificate::from_der(certificate).map_err(|_| bad())?;
    let key_info = parsed.public_key();
    let all_ed25519 = key_info.algorithm.algorithm == OID_SIG_ED25519
        && parsed.signature_algorithm.algorithm == OID_SIG_ED25519;
    let unsigned = certificate.iter().rev().skip(SIGNATURE_LEN).take(SIGNATURE_HEADER.len());
    let canonical = unsigned.eq(SIGNATURE_HEADER.iter().rev());
    if !rest.is_empty() || !all_ed25519 || !canonical {
        return Err(bad());
    }
    let key = <[u8; 32]>::try_from(&*key_info.subject_public_key.data).map_err(|_| bad())?;
    let signature = &parsed.signature_value.data;
    let signed = provider()
        .signature_verification_algorithms
        .mapping
        .iter()
        .filter(|(scheme, _)| *scheme == SignatureScheme::ED25519)
        .flat_map(|(_, algorithms)| algorithms.iter())
        .any(|algorithm| {
            algorithm.verify_signature(&key, parsed.tbs_certificate.as_ref(), signature).is_ok()
        });
    if signed { Ok(key) } else { Err(CertificateError::BadSignature.into()) }
}

/// aws-lc-rs with the hybrid post-quantum group first, and X25519 as the only other group.
fn provider() -> Arc<CryptoProvider> {
    let mut provider = aws_lc_rs::default_provider();
    provider.kx_groups = vec![aws_lc_rs::kx_group::X25519MLKEM768, aws_lc_rs::kx_group::X25519];
    Arc::new(provider)
}

fn transport(timing: &Timing) -> Result<Arc<quinn::TransportConfig>, LinkError> {
    let mut transport = quinn::TransportConfig::default();
    transport
        .max_concurrent_bidi_streams(1_u8.into())
        .max_concurrent_uni_streams(0_u8.into())
        .datagram_receive_buffer_size(None)
        // A GSO batch would need a buffer of 13 KB for each peer, and the messages here are short.
        .enable_segmentation_offload(false)
        .stream_receive_window(STREAM_WINDOW_BYTES.into())
        .receive_window(STREAM_WINDOW_BYTES.into())
        .send_window(SEND_WINDOW_BYTES)
        .keep_alive_interval(Some(timing.keep_alive))
        .max_idle_timeout(Some(timing.idle_timeout.try_into().map_err(failed)?));
    Ok(Arc::new(transport))
}

#[allow(clippy::needless_pass_by_value)] // what map_err hands over
fn failed(error: impl ToString) -> LinkError {
    LinkError::Tls(error.to_string())
}

/// TLS needs no time here: certificates have no expiry, and there is no resumption.
#[derive(Debug)]
struct NoClock;

impl TimeProvider for NoClock {
    fn current_time(&self) -> Option<UnixTime> {
        Some(UnixTime::since_unix_epoch(Duration::ZERO))
    }
}

/// Retry tokens live for seconds and only in this process: they need no wall clock.
struct Monotonic(Instant);

impl quinn::TimeSource for Monotonic {
    fn now(&self) -> SystemTime {
        SystemTime::UNIX_EPOCH + self.0.elapsed()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use rcgen::{CertificateParams, KeyPair, PKCS_ECDSA_P256_SHA256, PKCS_ED25519};

    #[test]
    fn the_hybrid_group_is_preferred() {
        let names: Vec<_> = provider().kx_groups.iter().map(|group| group.name()).collect();
        assert_eq!(names, [rustls::NamedGroup::X25519MLKEM768, rustls::NamedGroup::X25519]);
    }

    #[test]
    fn a_self_signed_ed25519_certificate_gives_its_key() {
        let identity = Identity::generate().unwrap();
        assert_eq!(public_key_of(&identity.certificate()).unwrap(), identity.public_key());
    }

    #[test]
    fn other_certificates_are_refused() {
        let certificate = |key: &KeyPair| CertificateParams::default().self_signed(key).unwrap();
        let other = certificate(&KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).unwrap());
        assert!(public_key_of(other.der()).is_err(), "another algorithm");

        let good = certificate(&KeyPair::generate_for(&PKCS_ED25519).unwrap());
        for at in 0..good.der().len() {
            let mut bytes = good.der().to_vec();
            bytes[at] ^= 1;
            assert!(public_key_of(&bytes.into()).is_err(), "byte {at} changed");
        }
        let mut longer = good.der().to_vec();
        longer.push(0);
        assert!(public_key_of(&longer.into()).is_err(), "trailing byte");
        assert!(public_key_of(&vec![0x30; CERTIFICATE_MAX_BYTES + 1].into()).is_err());
    }

    #[test]
    fn only_the_expected_key_is_taken_and_the_other_is_named() {
        let (one, two) = (Identity::generate().unwrap(), Identity::generate().unwrap());
        let verifier = Verifier::new(Some(KeyHash::short(one.peer_id())));
        assert!(verifier.verify(&one.certificate()).is_ok());
        assert_eq!(verifier.mismatch(), None);
        assert!(verifier.verify(&two.certificate()).is_err());
        assert_eq!(verifier.mismatch(), Some(two.peer_id()));
    }
}
