//! A host's identity: an Ed25519 key and its self-signed certificate.

use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::sync::Arc;

use rcgen::{CertificateParams, DistinguishedName, DnType, KeyPair, PKCS_ED25519};
use rustls_pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use weft_crypto::PeerId;
use zeroize::Zeroizing;

use crate::error::LinkError;

const FILE_MODE: u32 = 0o600;

/// An Ed25519 key pair. Cheap to clone.
#[derive(Clone)]
pub struct Identity {
    inner: Arc<Inner>,
}

struct Inner {
    pkcs8: Zeroizing<Vec<u8>>,
    certificate: CertificateDer<'static>,
    public_key: [u8; 32],
}

impl Identity {
    /// A new identity.
    ///
    /// # Errors
    /// [`LinkError::Tls`] if the cryptographic library fails, which it does not in practice.
    pub fn generate() -> Result<Self, LinkError> {
        Self::from_key(&KeyPair::generate_for(&PKCS_ED25519).map_err(tls)?)
    }

    /// Loads the identity from a PKCS#8 PEM file. If the file does not exist, creates a new one
    /// there with mode 0600.
    ///
    /// # Errors
    /// [`LinkError::IdentityFile`] and [`LinkError::IdentityFormat`]; an existing file is never
    /// overwritten.
    pub fn load_or_create(path: &Path) -> Result<Self, LinkError> {
        let fail = |source| LinkError::IdentityFile { path: path.to_owned(), source };
        match fs::read_to_string(path).map(Zeroizing::new) {
            Ok(pem) => {
                let mode = fs::metadata(path).map_err(fail)?.permissions().mode() & 0o777;
                if mode != FILE_MODE {
                    let private = fs::Permissions::from_mode(FILE_MODE);
                    fs::set_permissions(path, private).map_err(fail)?;
                }
                KeyPair::from_pem_and_sign_algo(&pem, &PKCS_ED25519)
                    .ok()
                    .and_then(|key| Self::from_key(&key).ok())
                    .ok_or_else(|| LinkError::IdentityFormat { path: path.to_owned() })
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let key = KeyPair::generate_for(&PKCS_ED25519).map_err(tls)?;
                let pem = Zeroizing::new(key.serialize_pem());
                write_new(path, pem.as_bytes()).map_err(fail)?;
                Self::from_key(&key)
            }
            Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                Err(LinkError::IdentityFormat { path: path.to_owned() })
            }
            Err(error) => Err(fail(error)),
        }
    }

    /// The SHA-256 of the public key.
    pub fn peer_id(&self) -> PeerId {
        PeerId::of_public_key(&self.inner.public_key)
    }

    /// The raw Ed25519 public key.
    pub fn public_key(&self) -> [u8; 32] {
        self.inner.public_key
    }

    pub(crate) fn certificate(&self) -> CertificateDer<'static> {
        self.inner.certificate.clone()
    }

    pub(crate) fn private_key(&self) -> PrivateKeyDer<'static> {
        PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(self.inner.pkcs8.to_vec()))
    }

    fn from_key(key: &KeyPair) -> Result<Self, LinkError> {
        let public_key = <[u8; 32]>::try_from(key.public_key_raw())
            .map_err(|_| LinkError::Tls("the key is not Ed25519".to_owned()))?;
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        let name = PeerId::of_public_key(&public_key).to_hex();
        params.distinguished_name.push(DnType::CommonName, name);
        // Validity is never checked for such a certificate, so it spans the whole range of X.509.
        params.not_before = rcgen::date_time_ymd(1970, 1, 1);
        params.not_after = rcgen::date_time_ymd(9999, 12, 31);
        let certificate = params.self_signed(key).map_err(tls)?.der().clone();
        let pkcs8 = Zeroizing::new(key.serialize_der());
        Ok(Self { inner: Arc::new(Inner { pkcs8, certificate, public_key }) })
    }
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Identity({})", self.peer_id())
    }
}

#[allow(clippy::needless_pass_by_value)] // what map_err hands over
fn tls(error: rcgen::Error) -> LinkError {
    LinkError::Tls(error.to_string())
}

/// Writes a file atomically: it is either complete or absent.
fn write_new(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let directory = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{:016x}", rand::random::<u64>()));
    let temporary = directory.join(name);
    let mut file =
        OpenOptions::new().write(true).create_new(true).mode(FILE_MODE).open(&temporary)?;
    let written = file
        .write_all(bytes)
        .and_then(|()| file.sync_all())
        .and_then(|()| fs::hard_link(&temporary, path));
    fs::remove_file(&temporary)?;
    written?;
    File::open(directory)?.sync_all()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn an_identity_is_created_once_for_root_only_and_read_back() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("identity.pem");
        let made = Identity::load_or_create(&path).unwrap();
        let mode = fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, FILE_MODE);
        let read = Identity::load_or_create(&path).unwrap();
        assert_eq!(made.peer_id(), read.peer_id());
        assert_eq!(made.peer_id(), PeerId::of_public_key(&made.public_key()));
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1, "no file left behind");
        assert!(fs::read_to_string(&path).unwrap().starts_with("-----BEGIN PRIVATE KEY-----"));
    }

    #[test]
    fn a_foreign_file_is_refused_and_kept() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("identity.pem");
        for content in [b"hello".as_slice(), b"", b"\xff\xfe"] {
            fs::write(&path, content).unwrap();
            let error = Identity::load_or_create(&path).unwrap_err();
            assert!(matches!(error, LinkError::IdentityFormat { .. }), "{error}");
            assert_eq!(fs::read(&path).unwrap(), content);
        }
    }
}
