//! The certificates of a foreign authority: the server's own, those that verify clients, and lists of revoked ones.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer};
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{NoClientAuth, WebPkiClientVerifier};
use rustls::{RootCertStore, ServerConfig, SupportedProtocolVersion};
use weft_openvpn::config::{TlsSettings, TlsVersion, VerifyClientCert};
use x509_parser::certificate::X509Certificate;
use x509_parser::prelude::FromDer;
use x509_parser::revocation_list::CertificateRevocationList;
use x509_parser::time::ASN1Time;
use x509_parser::x509::SubjectPublicKeyInfo;

use crate::services::gateway::authority::serial_of;
use crate::timestamp;

/// Revoked certificates of all lists at most.
const REVOKED_MAX: usize = 1_000_000;

/// Certificates that lists name as revoked.
#[derive(Debug, Default)]
pub(super) struct Revocations {
    /// The issuer's name as it is encoded, and the serial number in hexadecimal digits.
    revoked: HashSet<(Vec<u8>, String)>,
    /// When the first of the lists ends.
    ends: Option<SystemTime>,
}

impl Revocations {
    /// Reads lists in PEM, which these authorities have signed.
    ///
    /// # Errors
    /// The fault, in words.
    pub(super) fn read(pem: &str, ca: &[CertificateDer<'_>]) -> Result<Self, String> {
        let mut all = Self::default();
        for list in CertificateRevocationListDer::pem_slice_iter(pem.as_bytes()) {
            let list = list.map_err(|error| format!("crl-verify is no PEM ({error})"))?;
            let (_, list) = CertificateRevocationList::from_der(&list).map_err(|error| {
                format!("crl-verify holds no list of revoked certificates ({error})")
            })?;
            all.add(&list, ca)?;
        }
        Ok(all)
    }

    fn add(
        &mut self,
        list: &CertificateRevocationList<'_>,
        ca: &[CertificateDer<'_>],
    ) -> Result<(), String> {
        let issuer = list.issuer();
        if !ca.iter().any(|ca| is_signed_by(list, ca)) {
            return Err(format!(
                "the list of revoked certificates of {issuer} is signed by no authority of ca: give the list of that authority"
            ));
        }
        if let Some(ends) = list.next_update().map(time_of) {
            self.ends = Some(self.ends.map_or(ends, |other| other.min(ends)));
        }
        for entry in list.iter_revoked_certificates() {
            if self.revoked.len() == REVOKED_MAX {
                return Err(format!("more than {REVOKED_MAX} revoked certificates"));
            }
            let issuer = issuer.as_raw().to_vec();
            self.revoked.insert((issuer, serial_of(entry.raw_serial())));
        }
        Ok(())
    }

    pub(super) fn has(&self, issuer: &[u8], serial: &str) -> bool {
        !self.revoked.is_empty() && self.revoked.contains(&(issuer.to_vec(), serial.to_owned()))
    }

    pub(super) fn len(&self) -> usize {
        self.revoked.len()
    }

    pub(super) const fn ends(&self) -> Option<SystemTime> {
        self.ends
    }

    /// Why nobody can be let in now: a list has ended. OpenVPN refuses all clients then, too.
    pub(super) fn expired(&self, now: SystemTime) -> Option<String> {
        let ends = self.ends.filter(|ends| *ends < now)?;
        Some(format!(
            "the list of revoked certificates (crl-verify) ended on {}: make a new one, and weft openvpn import --crl FILE",
            timestamp::format(ends)
        ))
    }
}

/// The certificates in a text.
pub(super) fn certificates(name: &str, pem: &str) -> Result<Vec<CertificateDer<'static>>, String> {
    let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem.as_bytes()).collect();
    let all = all.map_err(|error| format!("{name} is no PEM ({error}): restore the file"))?;
    if all.is_empty() {
        return Err(format!("{name} holds no certificate: name the right file"));
    }
    Ok(all)
}

/// How the server shows who it is, and verifies its clients.
pub(super) fn tls(
    settings: &TlsSettings,
    client_cert: VerifyClientCert,
) -> Result<Arc<ServerConfig>, String> {
    let key = settings.key.as_ref().ok_or("no key")?;
    let key = PrivateKeyDer::from_pem_slice(key.expose().as_bytes())
        .map_err(|error| format!("key is no private key in PEM ({error}): restore the file"))?;
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let verifier = verifier(settings, client_cert, &provider)?;
    let builder = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&versions(settings))
        .map_err(|error| format!("no version of TLS is left ({error}): correct tls-version-min"))?
        .with_client_cert_verifier(verifier);
    let config = builder.with_single_cert(chain(settings)?, key);
    let mut config = config.map_err(|error| {
        format!("cert and key do not go together, or the key is of an unknown kind ({error})")
    })?;
    // OpenVPN resumes no sessions.
    config.send_tls13_tickets = 0;
    Ok(Arc::new(config))
}

fn verifier(
    settings: &TlsSettings,
    client_cert: VerifyClientCert,
    provider: &Arc<CryptoProvider>,
) -> Result<Arc<dyn ClientCertVerifier>, String> {
    if client_cert == VerifyClientCert::None {
        return Ok(Arc::new(NoClientAuth));
    }
    let mut roots = RootCertStore::empty();
    for ca in certificates("ca", settings.ca.as_deref().unwrap_or_default())? {
        roots.add(ca).map_err(|error| format!("a certificate of ca cannot be used: {error}"))?;
    }
    let roots = Arc::new(roots);
    let builder = WebPkiClientVerifier::builder_with_provider(roots, Arc::clone(provider));
    let builder = match client_cert {
        VerifyClientCert::Optional => builder.allow_unauthenticated(),
        VerifyClientCert::Require | VerifyClientCert::None => builder,
    };
    builder.build().map_err(|error| format!("ca cannot be used: {error}"))
}

/// What is wrong with the certificates now.
pub(super) fn faults(
    settings: &TlsSettings,
    client_cert: VerifyClientCert,
    now: SystemTime,
) -> Vec<String> {
    let mut faults = Vec::new();
    let ca = certificates("ca", settings.ca.as_deref().unwrap_or_default()).unwrap_or_default();
    let own = chain(settings).unwrap_or_default();
    for (name, certificate) in
        ca.iter().map(|ca| ("ca", ca)).chain(own.iter().map(|own| ("cert", own)))
    {
        match X509Certificate::from_der(certificate) {
            Ok((_, certificate)) => faults.extend(validity_fault(name, &certificate, now)),
            Err(error) => faults.push(format!("a certificate of {name} is damaged ({error})")),
        }
    }
    faults.extend(tls(settings, client_cert).err());
    faults
}

/// The common name of the server's certificate, which profiles may check.
pub(super) fn server_name(settings: &TlsSettings) -> Option<String> {
    let chain = chain(settings).ok()?;
    let (_, certificate) = X509Certificate::from_der(chain.first()?).ok()?;
    let name = certificate.subject().iter_common_name().last()?.as_str().ok()?.to_owned();
    Some(name)
}

/// When a certificate ends, RFC 3339.
pub(super) fn end_of(certificate: &X509Certificate<'_>) -> String {
    timestamp::format(time_of(certificate.validity().not_after))
}

/// Whether a certificate is one of an authority with this public key, encoded.
pub(super) fn has_key(certificate: &CertificateDer<'_>, key: &[u8]) -> bool {
    let parsed = X509Certificate::from_der(certificate);
    parsed.is_ok_and(|(_, certificate)| certificate.public_key().raw == key)
}

fn chain(settings: &TlsSettings) -> Result<Vec<CertificateDer<'static>>, String> {
    let mut chain = certificates("cert", settings.cert.as_deref().unwrap_or_default())?;
    if let Some(extra) = &settings.extra_certs {
        chain.extend(certificates("extra-certs", extra)?);
    }
    Ok(chain)
}

fn versions(settings: &TlsSettings) -> Vec<&'static SupportedProtocolVersion> {
    let all =
        [(TlsVersion::V1_3, &rustls::version::TLS13), (TlsVersion::V1_2, &rustls::version::TLS12)];
    let allowed = settings.tls_min..=settings.tls_max;
    all.into_iter().filter(|(version, _)| allowed.contains(version)).map(|it| it.1).collect()
}

fn validity_fault(
    name: &str,
    certificate: &X509Certificate<'_>,
    now: SystemTime,
) -> Option<String> {
    let (subject, validity) = (certificate.subject(), certificate.validity());
    let (begins, ends) = (time_of(validity.not_before), time_of(validity.not_after));
    if ends < now {
        let ended = timestamp::format(ends);
        return Some(format!("the certificate {subject} of {name} ended on {ended}: renew it"));
    }
    if begins > now {
        let begins = timestamp::format(begins);
        return Some(format!(
            "the certificate {subject} of {name} begins on {begins} only: check this host's clock"
        ));
    }
    None
}

fn time_of(time: ASN1Time) -> SystemTime {
    let seconds = u64::try_from(time.timestamp()).unwrap_or_default();
    UNIX_EPOCH + Duration::from_secs(seconds)
}

fn is_signed_by(list: &CertificateRevocationList<'_>, ca: &CertificateDer<'_>) -> bool {
    let Ok((_, ca)) = X509Certificate::from_der(ca) else { return false };
    ca.subject().as_raw() == list.issuer().as_raw() && verifies(list, ca.public_key())
}

fn verifies(list: &CertificateRevocationList<'_>, key: &SubjectPublicKeyInfo<'_>) -> bool {
    let oid = list.signature_algorithm.algorithm.as_bytes();
    let Ok(length) = u8::try_from(oid.len()) else { return false };
    // The encoding of an algorithm begins with its object identifier.
    let head = [&[6, length], oid].concat();
    let provider = rustls::crypto::aws_lc_rs::default_provider();
    let known = provider.signature_verification_algorithms.all;
    let (message, signature) = (list.tbs_cert_list.as_ref(), &list.signature_value.data);
    known.iter().filter(|known| known.signature_alg_id().as_ref().starts_with(&head)).any(|known| {
        known.verify_signature(&key.subject_public_key.data, message, signature).is_ok()
    })
}
