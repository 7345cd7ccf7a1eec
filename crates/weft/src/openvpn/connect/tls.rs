//! What a profile's certificates and keys become: the configuration of TLS, and what wraps control packets.

use std::sync::Arc;

use anyhow::{Context, anyhow, bail};
use aws_lc_rs::digest::{SHA256, digest};
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{
    CertificateDer, CertificateRevocationListDer, PrivateKeyDer, ServerName, UnixTime,
};
use rustls::version::{TLS12, TLS13};
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, Error, RootCertStore, SignatureScheme,
};
use weft_openvpn::config::{ClientProfile, NameCheck, NameKind, TlsSettings, TlsVersion};
use weft_openvpn::device::Side;
use weft_openvpn::wrap::{AuthDigest, AuthDirection, WrapKeys};
use x509_parser::prelude::{FromDer, X509Certificate};

/// The configuration of TLS.
///
/// # Errors
/// A certificate or key of the profile that cannot be used.
pub fn configuration(settings: &TlsSettings) -> anyhow::Result<Arc<ClientConfig>> {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let versions = match (settings.tls_min, settings.tls_max) {
        (TlsVersion::V1_2, TlsVersion::V1_2) => vec![&TLS12],
        (TlsVersion::V1_2, TlsVersion::V1_3) => vec![&TLS12, &TLS13],
        (TlsVersion::V1_3, TlsVersion::V1_3) => vec![&TLS13],
        (TlsVersion::V1_3, TlsVersion::V1_2) => {
            bail!("tls-version-min is above tls-version-max: correct the profile")
        }
    };
    let verifier = Arc::new(Verifier::new(settings, provider.clone())?);
    let builder = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&versions)?
        .dangerous()
        .with_custom_certificate_verifier(verifier);
    let mut config = match (&settings.cert, &settings.key) {
        (Some(cert), Some(key)) => {
            let mut chain = certificates(cert, "cert")?;
            if let Some(extra) = &settings.extra_certs {
                chain.extend(certificates(extra, "extra-certs")?);
            }
            let key = PrivateKeyDer::from_pem_slice(key.expose().as_bytes());
            let key = key.map_err(|error| anyhow!("the profile's key cannot be read: {error}"))?;
            let with_cert = builder.with_client_auth_cert(chain, key);
            with_cert.context("the profile's certificate and key do not belong together")?
        }
        _ => builder.with_no_client_auth(),
    };
    // OpenVPN sends no name and resumes no session.
    config.enable_sni = false;
    config.resumption = rustls::client::Resumption::disabled();
    Ok(Arc::new(config))
}

/// What wraps control packets, and the client's key of tls-crypt-v2, as it goes to the server.
///
/// # Errors
/// A digest that is not known.
pub fn wrapping(profile: &ClientProfile) -> anyhow::Result<(WrapKeys, Option<Vec<u8>>)> {
    let tls = &profile.tls;
    if let Some(key) = &profile.tls_crypt_v2 {
        return Ok((WrapKeys::tls_crypt(&key.key, Side::Client), Some(key.wrapped.clone())));
    }
    if let Some(key) = &tls.tls_crypt {
        return Ok((WrapKeys::tls_crypt(key, Side::Client), None));
    }
    let Some(key) = &tls.tls_auth else { return Ok((WrapKeys::None, None)) };
    let digest = match tls.auth_digest.as_str() {
        "SHA1" => AuthDigest::Sha1,
        "SHA224" => AuthDigest::Sha224,
        "SHA256" => AuthDigest::Sha256,
        "SHA384" => AuthDigest::Sha384,
        "SHA512" => AuthDigest::Sha512,
        other => bail!("tls-auth with auth {other} is not spoken: use SHA1 or SHA256"),
    };
    let direction = match tls.key_direction {
        None => AuthDirection::Both,
        Some(0) => AuthDirection::Zero,
        Some(_) => AuthDirection::One,
    };
    Ok((WrapKeys::tls_auth(key, digest, direction), None))
}

/// The name that TLS asks for. The verifier compares names by the profile's rule.
pub fn server_name() -> anyhow::Result<ServerName<'static>> {
    Ok(ServerName::try_from("openvpn.invalid")?)
}

fn certificates(pem: &str, what: &str) -> anyhow::Result<Vec<CertificateDer<'static>>> {
    let read: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem.as_bytes()).collect();
    read.map_err(|error| anyhow!("{what} of the profile cannot be read: {error}"))
}

/// Verifies the server's certificate as a profile says.
#[derive(Debug)]
struct Verifier {
    /// By its authority, unless fingerprints alone decide.
    authority: Option<Arc<WebPkiServerVerifier>>,
    fingerprints: Vec<[u8; 32]>,
    name: Option<NameCheck>,
    checks_usage: bool,
    provider: Arc<CryptoProvider>,
}

impl Verifier {
    fn new(settings: &TlsSettings, provider: Arc<CryptoProvider>) -> anyhow::Result<Self> {
        let authority = match &settings.ca {
            Some(pem) => {
                let mut roots = RootCertStore::empty();
                for certificate in certificates(pem, "ca")? {
                    roots.add(certificate).context("ca of the profile is no authority")?;
                }
                let roots = Arc::new(roots);
                let mut builder =
                    WebPkiServerVerifier::builder_with_provider(roots, provider.clone());
                if let Some(crl) = &settings.crl {
                    let lists = CertificateRevocationListDer::pem_slice_iter(crl.as_bytes());
                    let lists: Result<Vec<_>, _> = lists.collect();
                    let lists = lists.map_err(|error| anyhow!("crl-verify: {error}"))?;
                    builder = builder.with_crls(lists).allow_unknown_revocation_status();
                    builder = builder.enforce_revocation_expiration();
                }
                Some(builder.build().context("the authority of the profile cannot be used")?)
            }
            None => None,
        };
        Ok(Self {
            authority,
            fingerprints: settings.fingerprints.clone(),
            name: settings.name_check.clone(),
            checks_usage: settings.checks_usage,
            provider,
        })
    }

    /// What the profile demands beyond the authority.
    fn check(&self, certificate: &CertificateDer<'_>) -> Result<(), Error> {
        let refused = |error| Err(Error::InvalidCertificate(error));
        if !self.fingerprints.is_empty() {
            let found = digest(&SHA256, certificate);
            if !self.fingerprints.iter().any(|known| known == found.as_ref()) {
                return refused(CertificateError::ApplicationVerificationFailure);
            }
        }
        if self.name.is_none() && !self.checks_usage {
            return Ok(());
        }
        let Ok((_, parsed)) = X509Certificate::from_der(certificate) else {
            return refused(CertificateError::BadEncoding);
        };
        if self.name.as_ref().is_some_and(|check| !is_named(&parsed, check)) {
            return refused(CertificateError::NotValidForName);
        }
        let usage = parsed.extended_key_usage().ok().flatten();
        if self.checks_usage && !usage.is_some_and(|usage| usage.value.server_auth) {
            return refused(CertificateError::InvalidPurpose);
        }
        Ok(())
    }
}

fn is_named(certificate: &X509Certificate<'_>, check: &NameCheck) -> bool {
    let subject = certificate.subject();
    let name = subject.iter_common_name().filter_map(|name| name.as_str().ok()).last();
    match check.kind {
        NameKind::Subject => subject.to_string() == check.name,
        NameKind::Name => name == Some(check.name.as_str()),
        NameKind::NamePrefix => name.is_some_and(|name| name.starts_with(&check.name)),
    }
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        if let Some(authority) = &self.authority {
            let verified =
                authority.verify_server_cert(certificate, intermediates, server_name, ocsp, now);
            match verified {
                Ok(_) => {}
                // It compares names last, when all else is verified; OpenVPN compares none unless it is told to.
                Err(Error::InvalidCertificate(
                    CertificateError::NotValidForName
                    | CertificateError::NotValidForNameContext { .. },
                )) => {}
                Err(error) => return Err(error),
            }
        }
        self.check(certificate)?;
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls12_signature(message, certificate, signed, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signed, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}
