//! The certificate authority of a gateway's clients: it issues certificates and tls-crypt-v2 keys, and knows which
//! certificates are revoked. One file of the state directory has it all.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use aws_lc_rs::digest::{SHA256, digest};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, PublicKeyData, SerialNumber, date_time_ymd,
};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{NoClientAuth, WebPkiClientVerifier};
use rustls::{RootCertStore, ServerConfig};
use serde::{Deserialize, Serialize};
use weft_crypto::PeerId;
use weft_openvpn::device::{KEY_BLOCK_BYTES, KeyBlock};
use weft_openvpn::messages::Secret;
use weft_openvpn::static_key::{ClientKeyV2, ServerKeyV2};
use weft_openvpn::wrap::{Metadata, SERVER_KEY_BYTES, ServerKey};
use x509_parser::prelude::{FromDer, X509Certificate};
use zeroize::Zeroizing;

use crate::timestamp;

/// Certificates that an authority issues at most.
pub(super) const CERTIFICATES_MAX: usize = 100_000;
/// The longest name of a client, in bytes: as long as a part of a DNS name, and fit for a certificate.
const NAME_BYTES_MAX: usize = 63;
/// How long the authority's certificate and the server's are good for, in days.
const AUTHORITY_DAYS: u64 = 3_650;
/// How long a client's certificate is good for, in days.
pub(super) const CLIENT_DAYS: u64 = 825;
/// Certificates are good from so long before they are issued, in days: clients' clocks may be late.
const EARLIER_DAYS: u64 = 1;
const DAY: Duration = Duration::from_secs(86_400);
const SERIAL_BYTES: usize = 16;
/// The name in the server's certificate, which profiles name.
pub(super) const SERVER_NAME: &str = "weft-openvpn";

/// Why an authority cannot do something.
#[derive(Debug, thiserror::Error)]
pub(super) enum AuthorityError {
    /// User: a name that cannot be one.
    #[error(
        "{0:?} is no name for a client: give 1 to {NAME_BYTES_MAX} letters, digits, dots, -, _, @ and +"
    )]
    BadName(String),
    /// User: too many certificates.
    #[error("the authority has issued {CERTIFICATES_MAX} certificates, which is its limit")]
    Full,
    /// User: no certificate of this name is good.
    #[error("no client {0} has a certificate that is good: weft openvpn client {0} issues one")]
    Unknown(String),
    /// Bug: another host is the authority's home.
    #[error("the authority's private key is on another host")]
    NotHere,
    /// A certificate cannot be made.
    #[error("cannot make a certificate: {0}")]
    Make(#[from] rcgen::Error),
    /// The state directory: its file has no such things in it.
    #[error(
        "openvpn-authority.json in the state directory is damaged ({0}): restore it from a backup"
    )]
    Damaged(String),
}

/// An authority, as it is saved.
#[derive(Clone, Serialize, Deserialize)]
pub(super) struct Authority {
    name: String,
    certificate: String,
    /// `None` on a host that is not its home.
    key: Option<Zeroizing<String>>,
    server_certificate: String,
    server_key: Zeroizing<String>,
    /// The tls-crypt-v2 key under which those of the clients are wrapped.
    wrapping_key: Zeroizing<String>,
    not_after: String,
    /// On a host that is not its home, those that are revoked.
    issued: Vec<Issued>,
    /// Certificates that are good, on a host that is not its home.
    #[serde(default)]
    good: Option<usize>,
    /// The host that is to be its home, which has the private key, too, or gets it: this host writes no more.
    #[serde(default)]
    moving: Option<PeerId>,
}

/// A certificate of a client.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Issued {
    pub(super) name: String,
    pub(super) serial: String,
    pub(super) not_after: String,
    /// When it was revoked.
    pub(super) revoked: Option<String>,
}

/// A client's new certificate, with all that its profile needs.
pub(super) struct Credentials {
    pub(super) serial: String,
    pub(super) not_after: String,
    pub(super) authority: String,
    pub(super) certificate: String,
    pub(super) key: Secret,
    /// The tls-crypt-v2 key.
    pub(super) client_key: ClientKeyV2,
}

/// What a profile for all users needs.
pub(super) struct Shared {
    pub(super) authority: String,
    /// The tls-crypt-v2 key.
    pub(super) client_key: ClientKeyV2,
}

/// Whose a certificate is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Holder {
    pub(super) name: String,
    pub(super) serial: String,
    /// The issuer's name, as it is encoded.
    pub(super) issuer: Vec<u8>,
    /// The certificates of authorities that it came with: the issuer's name and the serial number of each.
    pub(super) above: Vec<(Vec<u8>, String)>,
}

impl Authority {
    /// A new one for a host.
    pub(super) fn new(nickname: &str) -> Result<Self, AuthorityError> {
        let name = format!("Weft clients of {nickname}");
        let (key, now) = (KeyPair::generate()?, SystemTime::now());
        let (params, not_after) = authority_params(&name, now);
        let certificate = params.self_signed(&key)?.pem();
        let issuer = Issuer::new(params, &key);
        let server_key = KeyPair::generate()?;
        let usage = ExtendedKeyUsagePurpose::ServerAuth;
        let (params, _) = end_params(SERVER_NAME, &new_serial(), usage, AUTHORITY_DAYS, now);
        let server_certificate = params.signed_by(&server_key, &issuer)?.pem();
        let wrapping_key = ServerKeyV2::new(random::<SERVER_KEY_BYTES>()).to_text();
        Ok(Self {
            name,
            certificate,
            key: Some(Zeroizing::new(key.serialize_pem())),
            server_certificate,
            server_key: Zeroizing::new(server_key.serialize_pem()),
            wrapping_key,
            not_after,
            issued: Vec::new(),
            good: None,
            moving: None,
        })
    }

    /// Issues a certificate and a tls-crypt-v2 key for a client.
    pub(super) fn issue(&mut self, name: &str) -> Result<Credentials, AuthorityError> {
        check_name(name)?;
        if self.issued.len() >= CERTIFICATES_MAX {
            return Err(AuthorityError::Full);
        }
        let now = SystemTime::now();
        let key = self.key.as_ref().filter(|_| self.is_home()).ok_or(AuthorityError::NotHere)?;
        let issuer = Issuer::new(authority_params(&self.name, now).0, KeyPair::from_pem(key)?);
        let (key, serial) = (KeyPair::generate()?, new_serial());
        let usage = ExtendedKeyUsagePurpose::ClientAuth;
        let (params, not_after) = end_params(name, &serial, usage, CLIENT_DAYS, now);
        let certificate = params.signed_by(&key, &issuer)?.pem();
        let client_key = self.new_client_key(&Metadata::User(name.as_bytes().to_vec()))?;
        let serial = hex(&serial);
        let issued = Issued {
            name: name.to_owned(),
            serial: serial.clone(),
            not_after: not_after.clone(),
            revoked: None,
        };
        self.issued.push(issued);
        Ok(Credentials {
            serial,
            not_after,
            authority: self.certificate.clone(),
            certificate,
            key: Secret::new(key.serialize_pem()),
            client_key,
        })
    }

    /// What a profile for all users needs: a tls-crypt-v2 key, which says nothing about its holder.
    pub(super) fn shared(&self) -> Result<Shared, AuthorityError> {
        let client_key = self.new_client_key(&Metadata::User(Vec::new()))?;
        Ok(Shared { authority: self.certificate.clone(), client_key })
    }

    fn new_client_key(&self, metadata: &Metadata) -> Result<ClientKeyV2, AuthorityError> {
        let key = KeyBlock::new(random::<KEY_BLOCK_BYTES>());
        let wrapped = self.wrapping_key()?.wrap(&key, metadata);
        let wrapped = wrapped.map_err(|error| AuthorityError::Damaged(error.to_string()))?;
        Ok(ClientKeyV2 { key, wrapped })
    }

    /// Revokes all certificates of a client. Returns their serial numbers.
    pub(super) fn revoke(&mut self, name: &str) -> Result<Vec<String>, AuthorityError> {
        let now = timestamp::format(SystemTime::now());
        let mut serials = Vec::new();
        for issued in &mut self.issued {
            if issued.name == name && issued.revoked.is_none() {
                issued.revoked = Some(now.clone());
                serials.push(issued.serial.clone());
            }
        }
        if serials.is_empty() {
            return Err(AuthorityError::Unknown(name.to_owned()));
        }
        Ok(serials)
    }

    /// Whether this host alone issues and revokes.
    pub(super) const fn is_home(&self) -> bool {
        self.key.is_some() && self.moving.is_none()
    }

    /// Whether the private key is here.
    pub(super) const fn has_key(&self) -> bool {
        self.key.is_some()
    }

    /// The host that it is being moved to.
    pub(super) const fn moving(&self) -> Option<PeerId> {
        self.moving
    }

    /// Moves it to another host, or no longer: meanwhile nobody issues and revokes.
    pub(super) const fn set_moving(&mut self, to: Option<PeerId>) {
        self.moving = to;
    }

    /// Whether both are the same authority.
    pub(super) fn is_same(&self, other: &Self) -> bool {
        self.certificate == other.certificate
    }

    /// Refuses an authority whose private key is missing, or is not its own.
    pub(super) fn check_key(&self) -> Result<(), AuthorityError> {
        let damaged = |text: String| AuthorityError::Damaged(text);
        let key = self.key.as_ref().ok_or_else(|| damaged("it has no private key".into()))?;
        let key = KeyPair::from_pem(key)?.subject_public_key_info();
        let certificate = CertificateDer::from_pem_slice(self.certificate.as_bytes());
        let certificate = certificate.map_err(|error| damaged(error.to_string()))?;
        let (_, parsed) =
            X509Certificate::from_der(&certificate).map_err(|error| damaged(error.to_string()))?;
        if parsed.public_key().raw != key {
            return Err(damaged("its private key is another authority's".into()));
        }
        self.wrapping_key()?;
        self.tls(true).map(drop)
    }

    /// Notes the revocations that another copy knows of.
    pub(super) fn add_revocations(&mut self, other: &Self) {
        for revoked in other.issued.iter().filter(|issued| issued.revoked.is_some()) {
            match self.issued.iter_mut().find(|issued| issued.serial == revoked.serial) {
                Some(issued) if issued.revoked.is_none() => issued.clone_from(revoked),
                Some(_) => {}
                None => self.issued.push(revoked.clone()),
            }
        }
    }

    /// What another host needs to serve: all but the private key, and of the certificates those that are revoked.
    pub(super) fn without_key(&self) -> Self {
        let revoked = self.issued.iter().filter(|issued| issued.revoked.is_some());
        let issued: Vec<Issued> = revoked.cloned().collect();
        let good = self.issued.len() - issued.len();
        Self { key: None, issued, good: Some(good), moving: None, ..self.clone() }
    }

    /// How often each name was revoked: the number of its certificates that are.
    pub(super) fn revocations(&self) -> BTreeMap<String, u32> {
        let mut all = BTreeMap::new();
        for issued in self.issued.iter().filter(|issued| issued.revoked.is_some()) {
            *all.entry(issued.name.clone()).or_default() += 1;
        }
        all
    }

    /// Whether a gateway serves with both in the same way, but for who is revoked.
    pub(super) fn serves_like(&self, other: &Self) -> bool {
        let parts = |it: &Self| {
            (it.certificate.clone(), it.server_certificate.clone(), it.wrapping_key.clone())
        };
        parts(self) == parts(other) && self.server_key == other.server_key
    }

    /// Whether a certificate is revoked.
    pub(super) fn is_revoked(&self, serial: &str) -> bool {
        self.issued.iter().any(|issued| issued.revoked.is_some() && issued.serial == serial)
    }

    /// How the server shows who it is, and verifies its clients, if they are to show certificates. Whether a certificate is revoked is asked when the
    /// client is let in: so a revocation needs no new configuration, and sessions do not begin anew.
    pub(super) fn tls(&self, needs_certificate: bool) -> Result<Arc<ServerConfig>, AuthorityError> {
        let damaged = |error: String| AuthorityError::Damaged(error);
        let certificate = |pem: &str| {
            CertificateDer::from_pem_slice(pem.as_bytes()).map_err(|it| damaged(it.to_string()))
        };
        let mut roots = RootCertStore::empty();
        roots.add(certificate(&self.certificate)?).map_err(|it| damaged(it.to_string()))?;
        let key = PrivateKeyDer::from_pem_slice(self.server_key.as_bytes());
        let key = key.map_err(|error| damaged(error.to_string()))?;
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let verifier =
            WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&provider));
        let verifier = verifier.build().map_err(|error| damaged(error.to_string()))?;
        let verifier = match needs_certificate {
            true => verifier,
            false => Arc::new(NoClientAuth),
        };
        let versions = [&rustls::version::TLS13, &rustls::version::TLS12];
        let builder = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&versions)
            .map_err(|error| damaged(error.to_string()))?
            .with_client_cert_verifier(verifier);
        let chain = vec![certificate(&self.server_certificate)?];
        let config = builder.with_single_cert(chain, key);
        let mut config = config.map_err(|error| damaged(error.to_string()))?;
        // OpenVPN resumes no sessions.
        config.send_tls13_tickets = 0;
        Ok(Arc::new(config))
    }

    /// The key under which the clients' tls-crypt-v2 keys are wrapped.
    pub(super) fn wrapping_key(&self) -> Result<ServerKey, AuthorityError> {
        let key = ServerKeyV2::parse(&self.wrapping_key);
        let key = key.map_err(|error| AuthorityError::Damaged(error.to_string()))?;
        Ok(ServerKey::new(key.expose()))
    }

    /// For `weft ca`.
    pub(super) fn shown(&self) -> Result<weft_api::Authority, AuthorityError> {
        let certificate = CertificateDer::from_pem_slice(self.certificate.as_bytes());
        let certificate =
            certificate.map_err(|error| AuthorityError::Damaged(error.to_string()))?;
        let revoked = self.issued.iter().filter(|issued| issued.revoked.is_some()).count();
        Ok(weft_api::Authority {
            name: self.name.clone(),
            fingerprint: hex(digest(&SHA256, &certificate).as_ref()),
            not_after: self.not_after.clone(),
            clients: self.good.unwrap_or(self.issued.len() - revoked),
            revoked,
            home: None,
        })
    }
}

/// Whose certificate this is, which TLS has verified; `None`: it names nobody that a client may be.
pub(super) fn holder_of(certificate: &CertificateDer<'_>) -> Option<Holder> {
    let (_, certificate) = X509Certificate::from_der(certificate).ok()?;
    let mut names = certificate.subject().iter_common_name();
    let name = names.next()?.as_str().ok()?.to_owned();
    if names.next().is_some() {
        return None;
    }
    check_name(&name).ok()?;
    let issuer = certificate.issuer().as_raw().to_vec();
    let serial = serial_of(certificate.raw_serial());
    Some(Holder { name, serial, issuer, above: Vec::new() })
}

/// The certificates of authorities that a client has shown with its own: the issuer's name and the serial number of
/// each.
pub(super) fn above_of(chain: &[CertificateDer<'_>]) -> Vec<(Vec<u8>, String)> {
    let parsed = chain.iter().filter_map(|shown| Some(X509Certificate::from_der(shown).ok()?.1));
    parsed.map(|it| (it.issuer().as_raw().to_vec(), serial_of(it.raw_serial()))).collect()
}

/// A serial number in hexadecimal digits, without leading zero bytes.
pub(super) fn serial_of(bytes: &[u8]) -> String {
    let zeros = bytes.iter().take_while(|byte| **byte == 0).count();
    hex(bytes.get(zeros..).unwrap_or_default())
}

/// Refuses a name that people, files, tables and command lines could take for something else. Names with `@` or `+`, as
/// those of mail addresses, are none in DNS.
pub(super) fn check_name(name: &str) -> Result<(), AuthorityError> {
    let is_fit = |byte: u8| byte.is_ascii_alphanumeric() || b".-_@+".contains(&byte);
    let is_name = (1..=NAME_BYTES_MAX).contains(&name.len()) && name.bytes().all(is_fit);
    if is_name { Ok(()) } else { Err(AuthorityError::BadName(name.to_owned())) }
}

/// What the authority's certificate says, and when it ends.
fn authority_params(name: &str, now: SystemTime) -> (CertificateParams, String) {
    let (mut params, not_after) = params(name, AUTHORITY_DAYS, now);
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    (params, not_after)
}

pub(super) fn end_params(
    name: &str,
    serial: &[u8; SERIAL_BYTES],
    usage: ExtendedKeyUsagePurpose,
    days: u64,
    now: SystemTime,
) -> (CertificateParams, String) {
    let (mut params, not_after) = params(name, days, now);
    params.serial_number = Some(SerialNumber::from_slice(serial));
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![usage];
    params.use_authority_key_identifier_extension = true;
    (params, not_after)
}

fn params(name: &str, days: u64, now: SystemTime) -> (CertificateParams, String) {
    let mut params = CertificateParams::default();
    params.distinguished_name.remove(DnType::CommonName);
    params.distinguished_name.push(DnType::CommonName, name);
    let end = now + DAY * u32::try_from(days).unwrap_or(u32::MAX);
    let (year, month, day) = date(now - DAY * u32::try_from(EARLIER_DAYS).unwrap_or(0));
    params.not_before = date_time_ymd(year, month, day);
    let (year, month, day) = date(end);
    params.not_after = date_time_ymd(year, month, day);
    (params, format!("{year:04}-{month:02}-{day:02}T00:00:00Z"))
}

/// The day of a time, in UTC.
fn date(time: SystemTime) -> (i32, u8, u8) {
    let text = timestamp::format(time);
    let mut parts = text.split(['-', 'T']);
    let mut next = || parts.next().and_then(|part| part.parse::<u16>().ok()).unwrap_or(1);
    let (year, month, day) = (next(), next(), next());
    (year.into(), u8::try_from(month).unwrap_or(1), u8::try_from(day).unwrap_or(1))
}

/// A number that no other certificate has. Its first byte is neither 0 nor negative, so that all write it alike.
pub(super) fn new_serial() -> [u8; SERIAL_BYTES] {
    let mut serial = random::<SERIAL_BYTES>();
    serial[0] = serial[0] & 0x3f | 0x40;
    serial
}

pub(super) fn random<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    rand::fill(&mut bytes[..]);
    bytes
}

pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_client_is_known_by_its_certificate_until_it_is_revoked() {
        let mut authority = Authority::new("host").unwrap();
        let first = authority.issue("alice").unwrap();
        let second = authority.issue("alice").unwrap();
        let other = authority.issue("bob.laptop").unwrap();
        let holder = |of: &Credentials| {
            holder_of(&CertificateDer::from_pem_slice(of.certificate.as_bytes()).unwrap()).unwrap()
        };
        assert_eq!(holder(&first).name, "alice");
        assert_eq!(holder(&first).serial, first.serial);
        assert_ne!(first.serial, second.serial);
        let mut revoked = authority.revoke("alice").unwrap();
        revoked.sort();
        let mut both = [&first, &second].map(|of| of.serial.clone());
        both.sort();
        assert_eq!(revoked, both);
        assert!(authority.is_revoked(&holder(&second).serial));
        assert!(!authority.is_revoked(&holder(&other).serial));
        let again = authority.revoke("alice").unwrap_err();
        assert!(again.to_string().contains("weft openvpn client alice"), "{again}");
        let third = authority.issue("alice").unwrap();
        assert!(!authority.is_revoked(&third.serial), "a new certificate is good");
        let shown = authority.shown().unwrap();
        assert_eq!((shown.clients, shown.revoked, shown.fingerprint.len()), (2, 2, 64));
    }

    #[test]
    fn another_host_gets_all_but_the_private_key() {
        let mut authority = Authority::new("host").unwrap();
        let (alice, bob) = (authority.issue("alice").unwrap(), authority.issue("bob").unwrap());
        authority.revoke("alice").unwrap();
        let shared = authority.without_key();
        let text = serde_json::to_string(&shared).unwrap();
        let key = authority.key.as_ref().unwrap().replace('\n', "\\n");
        assert!(!text.contains(&key) && serde_json::to_string(&authority).unwrap().contains(&key));
        let mut there: Authority = serde_json::from_str(&text).unwrap();
        assert!(!there.is_home() && there.serves_like(&authority) && there.tls(true).is_ok());
        assert!(there.is_revoked(&alice.serial) && !there.is_revoked(&bob.serial));
        assert_eq!(there.revocations(), authority.revocations());
        assert_eq!(there.shown().unwrap(), authority.shown().unwrap());
        assert!(matches!(there.issue("carol"), Err(AuthorityError::NotHere)));
    }

    #[test]
    fn an_older_copy_is_completed_and_one_without_its_key_is_refused() {
        let mut authority = Authority::new("host").unwrap();
        let (alice, bob) = (authority.issue("alice").unwrap(), authority.issue("bob").unwrap());
        let text = serde_json::to_string(&authority).unwrap();
        let mut older: Authority = serde_json::from_str(&text).unwrap();
        let later = authority.issue("carol").unwrap();
        authority.revoke("alice").unwrap();
        authority.revoke("carol").unwrap();
        older.add_revocations(&authority.without_key());
        assert!(older.is_revoked(&alice.serial) && older.is_revoked(&later.serial));
        assert!(!older.is_revoked(&bob.serial) && older.revocations() == authority.revocations());
        older.check_key().unwrap();
        assert!(older.without_key().check_key().is_err());
        older.key = Authority::new("other").unwrap().key;
        assert!(older.check_key().unwrap_err().to_string().contains("another authority's"));
        // While it moves, nobody issues here.
        authority.set_moving(Some(PeerId::from_bytes([1; 32])));
        assert!(!authority.is_home() && authority.has_key());
        assert!(matches!(authority.issue("dave"), Err(AuthorityError::NotHere)));
    }

    #[test]
    fn names_that_could_be_taken_for_something_else_are_refused() {
        let mut authority = Authority::new("host").unwrap();
        for name in ["", "a b", "a/b", "a:b", "a,b", "a\\b", "ä", "a\nb", &"x".repeat(64)] {
            assert!(matches!(authority.issue(name), Err(AuthorityError::BadName(_))), "{name}");
        }
        assert!(authority.issue(&"x".repeat(63)).is_ok());
        let anna = authority.issue("anna+vpn@example.com").unwrap();
        let certificate = CertificateDer::from_pem_slice(anna.certificate.as_bytes()).unwrap();
        assert_eq!(holder_of(&certificate).unwrap().name, "anna+vpn@example.com");
    }

    #[test]
    fn a_saved_authority_goes_on_and_a_damaged_one_is_named() {
        let mut authority = Authority::new("host").unwrap();
        let _ = authority.issue("alice").unwrap();
        let text = serde_json::to_string(&authority).unwrap();
        let mut again: Authority = serde_json::from_str(&text).unwrap();
        assert!(again.tls(true).is_ok() && again.wrapping_key().is_ok());
        let bob = again.issue("bob").unwrap();
        assert!(bob.authority == authority.certificate && bob.not_after.ends_with("T00:00:00Z"));
        again.server_key = Zeroizing::new("none".into());
        let damaged = again.tls(false).unwrap_err();
        assert!(damaged.to_string().contains("restore it from a backup"), "{damaged}");
    }
}
