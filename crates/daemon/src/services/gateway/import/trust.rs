//! The certificates of a foreign authority: the server's own, those that verify clients, and lists of revoked ones.

use std::collections::{BTreeMap, HashSet};
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

/// The authority of a list: its name as it is encoded, and its public key.
type ListAuthority = (Vec<u8>, Vec<u8>);

/// Certificates that lists name as revoked.
#[derive(Debug, Default)]
pub(super) struct Revocations {
    /// The issuer's name as it is encoded, and the serial number in hexadecimal digits.
    revoked: HashSet<(Vec<u8>, String)>,
    /// Names, as they are encoded, of authorities all of whose certificates in `ca` are revoked.
    fallen: HashSet<Vec<u8>>,
    /// When the newest list of each authority was made.
    made: BTreeMap<ListAuthority, SystemTime>,
    /// When the first of the lists ends.
    ends: Option<SystemTime>,
}

impl Revocations {
    /// Reads lists in PEM, which these authorities have signed. The newest of each authority counts.
    ///
    /// # Errors
    /// The fault, in words.
    pub(super) fn read(pem: &str, ca: &[CertificateDer<'_>]) -> Result<Self, String> {
        let encoded: Result<Vec<_>, _> =
            CertificateRevocationListDer::pem_slice_iter(pem.as_bytes()).collect();
        let encoded = encoded.map_err(|error| format!("crl-verify is no PEM ({error})"))?;
        let mut lists = Vec::new();
        let mut all = Self::default();
        for encoded in &encoded {
            let (_, list) = CertificateRevocationList::from_der(encoded).map_err(|error| {
                format!("crl-verify holds no list of revoked certificates ({error})")
            })?;
            let authority = authority_of(&list, ca).ok_or_else(|| {
                let issuer = list.issuer();
                format!(
                    "the list of revoked certificates of {issuer} is signed by no authority of ca: give the list of that authority"
                )
            })?;
            let made = time_of(list.last_update());
            let newest = all.made.entry(authority.clone()).or_insert(made);
            *newest = made.max(*newest);
            lists.push((authority, made, list));
        }
        for (authority, made, list) in &lists {
            if all.made.get(authority) == Some(made) {
                all.add(list)?;
            }
        }
        all.find_fallen(ca);
        Ok(all)
    }

    fn add(&mut self, list: &CertificateRevocationList<'_>) -> Result<(), String> {
        if let Some(ends) = list.next_update().map(time_of) {
            self.ends = Some(self.ends.map_or(ends, |other| other.min(ends)));
        }
        for entry in list.iter_revoked_certificates() {
            if self.revoked.len() == REVOKED_MAX {
                return Err(format!("more than {REVOKED_MAX} revoked certificates"));
            }
            let issuer = list.issuer().as_raw().to_vec();
            self.revoked.insert((issuer, serial_of(entry.raw_serial())));
        }
        Ok(())
    }

    /// An authority has fallen with its last certificate: by a list, or since the authority above it has fallen.
    fn find_fallen(&mut self, ca: &[CertificateDer<'_>]) {
        let ca = ca.iter().filter_map(|ca| Some(X509Certificate::from_der(ca).ok()?.1));
        let ca: Vec<X509Certificate<'_>> = ca.collect();
        loop {
            let good: HashSet<&[u8]> = ca
                .iter()
                .filter(|ca| {
                    let (name, issuer) = (ca.subject().as_raw(), ca.issuer().as_raw());
                    !self.is_listed(issuer, &serial_of(ca.raw_serial()))
                        && (name == issuer || !self.fallen.contains(issuer))
                })
                .map(|ca| ca.subject().as_raw())
                .collect();
            let names = ca.iter().map(|ca| ca.subject().as_raw());
            let fallen: HashSet<Vec<u8>> =
                names.filter(|name| !good.contains(name)).map(<[u8]>::to_vec).collect();
            if fallen == self.fallen {
                return;
            }
            self.fallen = fallen;
        }
    }

    /// Whether a certificate counts no more: a list names it, or its issuer has fallen.
    pub(super) fn has(&self, issuer: &[u8], serial: &str) -> bool {
        self.fallen.contains(issuer) || self.is_listed(issuer, serial)
    }

    fn is_listed(&self, issuer: &[u8], serial: &str) -> bool {
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

    /// Why these lists cannot take the place of others: one was made before that of the same authority.
    pub(super) fn older_than(&self, others: &Self) -> Option<String> {
        let newer = self.made.iter().find_map(|(authority, made)| {
            let other = others.made.get(authority)?;
            (other > made).then_some(other)
        })?;
        Some(format!(
            "the list is older than the one that counts, of {}: give the newest",
            timestamp::format(*newer)
        ))
    }
}

/// Those of the lists in a text that these authorities have signed; `None`: none.
pub(super) fn lists_of(pem: &str, ca: &[CertificateDer<'_>]) -> Option<String> {
    const END: &str = "-----END X509 CRL-----";
    let blocks = pem.split_inclusive(END).filter(|block| Revocations::read(block, ca).is_ok());
    let kept: String = blocks.filter(|block| block.contains(END)).collect();
    Some(kept).filter(|kept| !kept.is_empty())
}

/// Whether two texts have a certificate in common.
pub(super) fn share_certificate(one: &str, other: &str) -> bool {
    let (one, other) = (certificates("ca", one), certificates("ca", other));
    one.unwrap_or_default().iter().any(|one| other.iter().flatten().any(|other| one == other))
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

fn authority_of(
    list: &CertificateRevocationList<'_>,
    ca: &[CertificateDer<'_>],
) -> Option<ListAuthority> {
    ca.iter().find_map(|ca| {
        let (_, ca) = X509Certificate::from_der(ca).ok()?;
        let is_its =
            ca.subject().as_raw() == list.issuer().as_raw() && verifies(list, ca.public_key());
        is_its.then(|| (list.issuer().as_raw().to_vec(), ca.public_key().raw.to_vec()))
    })
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use rcgen::{
        BasicConstraints, CertificateParams, CertificateRevocationListParams, DnType, IsCa, Issuer,
        KeyIdMethod, KeyPair, RevokedCertParams, SerialNumber, date_time_ymd,
    };

    use super::*;

    /// An authority, and its certificates.
    struct Ca {
        issuer: Issuer<'static, KeyPair>,
        certificate: CertificateDer<'static>,
        serial: u64,
    }

    impl Ca {
        fn new(name: &str, serial: u64, above: Option<&Self>) -> Self {
            let mut params = CertificateParams::default();
            params.distinguished_name.push(DnType::CommonName, name);
            params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
            params.serial_number = Some(SerialNumber::from(serial));
            let key = KeyPair::generate().unwrap();
            let certificate = match above {
                Some(above) => params.signed_by(&key, &above.issuer).unwrap(),
                None => params.self_signed(&key).unwrap(),
            };
            let certificate = certificate.der().clone();
            Self { issuer: Issuer::new(params, key), certificate, serial }
        }

        /// Its list of the year, in PEM.
        fn list(&self, year: i32, serials: &[u64]) -> String {
            let revoked = serials.iter().map(|serial| RevokedCertParams {
                serial_number: SerialNumber::from(*serial),
                revocation_time: date_time_ymd(year, 1, 1),
                reason_code: None,
                invalidity_date: None,
            });
            let list = CertificateRevocationListParams {
                this_update: date_time_ymd(year, 1, 1),
                next_update: date_time_ymd(year + 1, 1, 1),
                crl_number: SerialNumber::from(1),
                issuing_distribution_point: None,
                revoked_certs: revoked.collect(),
                key_identifier_method: KeyIdMethod::Sha256,
            };
            list.signed_by(&self.issuer).unwrap().pem().unwrap()
        }

        fn name(&self) -> Vec<u8> {
            let (_, parsed) = X509Certificate::from_der(&self.certificate).unwrap();
            parsed.subject().as_raw().to_vec()
        }

        fn hex(&self) -> String {
            serial_of(&self.serial.to_be_bytes())
        }
    }

    #[test]
    fn the_newest_list_of_each_authority_counts() {
        let (one, other) = (Ca::new("one", 1, None), Ca::new("other", 2, None));
        let ca = [one.certificate.clone(), other.certificate.clone()];
        let old = one.list(2020, &[7]);
        let all = format!("{}\n{old}\n{}", one.list(2090, &[8]), other.list(2091, &[9]));
        let lists = Revocations::read(&all, &ca).unwrap();
        assert_eq!(lists.len(), 2);
        assert!(lists.has(&one.name(), "08") && lists.has(&other.name(), "09"));
        assert!(!lists.has(&one.name(), "07") && !lists.has(&one.name(), "09"));
        assert_eq!(lists.expired(SystemTime::now()), None, "the end of an old list counts");
        let older = Revocations::read(&old, &ca).unwrap();
        assert!(older.expired(SystemTime::now()).is_some());
        assert!(older.older_than(&lists).is_some());
        assert_eq!((lists.older_than(&older), lists.older_than(&lists)), (None, None));
        // With one authority less.
        let left = lists_of(&all, &ca[1..]).unwrap();
        assert_eq!(Revocations::read(&left, &ca[1..]).unwrap().len(), 1);
        assert_eq!(lists_of(&old, &ca[1..]), None);
        assert!(Revocations::read(&old, &ca[1..]).is_err());
    }

    #[test]
    fn whom_a_revoked_authority_has_certified_counts_no_more() {
        let root = Ca::new("root", 1, None);
        let middle = Ca::new("middle", 2, Some(&root));
        let low = Ca::new("low", 3, Some(&middle));
        let other = Ca::new("other", 4, Some(&root));
        let ca = [&root, &middle, &low, &other].map(|ca| ca.certificate.clone());
        let none = Revocations::read(&root.list(2090, &[99]), &ca).unwrap();
        let lists = Revocations::read(&root.list(2090, &[middle.serial]), &ca).unwrap();
        for (issuer, is_gone) in [(&root, false), (&middle, true), (&low, true), (&other, false)] {
            let name = String::from_utf8_lossy(&issuer.name()).into_owned();
            assert_eq!(lists.has(&issuer.name(), "0a"), is_gone, "{name}");
            assert!(!none.has(&issuer.name(), "0a"), "{name}");
        }
        assert!(lists.has(&root.name(), &middle.hex()));
        // Its successor has the same name, and a certificate that counts.
        let again = Ca::new("middle", 5, Some(&root));
        let ca = [&root, &middle, &again].map(|ca| ca.certificate.clone());
        let lists = Revocations::read(&root.list(2090, &[middle.serial]), &ca).unwrap();
        assert!(!lists.has(&again.name(), "0a"));
    }
}
