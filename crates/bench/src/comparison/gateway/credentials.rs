//! Certificates and keys of the table `gateway`: those of Weft's own authority, which both servers use, and clients'.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rcgen::{
    CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose,
};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, SignatureScheme};
use serde::Deserialize;
use weft_openvpn::device::{KEY_BLOCK_BYTES, KeyBlock, Side};
use weft_openvpn::static_key::{ClientKeyV2, ServerKeyV2};
use weft_openvpn::wrap::{Metadata, ServerKey, WrapKeys};

use super::super::others::write_secret;
use crate::sandbox::SandboxError;

/// The name in the server's certificate.
pub(super) const SERVER_NAME: &str = "weft-openvpn";
/// The files of both servers and of stock clients, in a directory of the run.
pub(super) const FILES: Files = Files {
    authority: "ca.pem",
    server: "server.pem",
    server_key: "server.key",
    server_v2: "server.v2",
    client_key: "client.key",
    client_v2: "client.v2",
    crowd: "crowd.pem",
};

/// Names of files.
pub(super) struct Files {
    pub(super) authority: &'static str,
    pub(super) server: &'static str,
    pub(super) server_key: &'static str,
    /// The tls-crypt-v2 key of the server.
    pub(super) server_v2: &'static str,
    /// The private key of every client.
    pub(super) client_key: &'static str,
    /// The tls-crypt-v2 key of every client.
    pub(super) client_v2: &'static str,
    /// The certificates of the generator's clients, one behind the other.
    crowd: &'static str,
}

/// What Weft's authority keeps in the state directory, as far as it is needed here.
#[derive(Deserialize)]
struct Authority {
    name: String,
    certificate: String,
    key: String,
    server_certificate: String,
    server_key: String,
    wrapping_key: String,
}

/// Writes the files of both servers, and of clients: `named` for stock ones, `crowd` for the generator. All clients
/// have one private key, so that the names alone differ.
///
/// # Errors
/// Returns an error if Weft's authority cannot be read, or a file cannot be written.
pub(super) fn write_all(
    authority: &Path,
    directory: &Path,
    named: &[&str],
    crowd: usize,
) -> Result<(), SandboxError> {
    let bad = |why: String| SandboxError::UnexpectedOutput {
        command: authority.display().to_string(),
        why,
    };
    let text = fs::read_to_string(authority)
        .map_err(SandboxError::io(format!("read {}", authority.display())))?;
    let known: Authority = serde_json::from_str(&text).map_err(|error| bad(error.to_string()))?;
    let client = Clients::of(&known).map_err(|error| bad(error.to_string()))?;
    let wrapping = ServerKeyV2::parse(&known.wrapping_key).map_err(|it| bad(it.to_string()))?;
    let block = KeyBlock::new(rand::random::<[u8; KEY_BLOCK_BYTES]>());
    let wrapped = ServerKey::new(wrapping.expose()).wrap(&block, &Metadata::User(Vec::new()));
    let wrapped = wrapped.map_err(|error| bad(error.to_string()))?;
    let client_v2 = ClientKeyV2 { key: block, wrapped }.to_text();
    let write = |name: &str, text: &str| write_secret(&directory.join(name), text);
    write(FILES.authority, &known.certificate)?;
    write(FILES.server, &known.server_certificate)?;
    write(FILES.server_key, &known.server_key)?;
    write(FILES.server_v2, &known.wrapping_key)?;
    write(FILES.client_key, &client.key.serialize_pem())?;
    write(FILES.client_v2, &client_v2)?;
    let sign = |name: &str| client.sign(name).map_err(|error| bad(error.to_string()));
    for name in named {
        write(&certificate_file(name), &sign(name)?)?;
    }
    let crowd = (0..crowd).map(|number| sign(&format!("crowd{number}")));
    write(FILES.crowd, &crowd.collect::<Result<String, _>>()?)
}

/// The file of a stock client's certificate.
pub(super) fn certificate_file(name: &str) -> String {
    format!("{name}.pem")
}

/// Signs clients' certificates.
struct Clients {
    issuer: Issuer<'static, KeyPair>,
    key: KeyPair,
}

impl Clients {
    fn of(authority: &Authority) -> Result<Self, rcgen::Error> {
        let mut params = CertificateParams::default();
        params.distinguished_name.remove(DnType::CommonName);
        params.distinguished_name.push(DnType::CommonName, authority.name.as_str());
        params.is_ca = IsCa::Ca(rcgen::BasicConstraints::Constrained(0));
        let issuer = Issuer::new(params, KeyPair::from_pem(&authority.key)?);
        Ok(Self { issuer, key: KeyPair::generate()? })
    }

    fn sign(&self, name: &str) -> Result<String, rcgen::Error> {
        let mut params = CertificateParams::default();
        params.distinguished_name.remove(DnType::CommonName);
        params.distinguished_name.push(DnType::CommonName, name);
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        params.use_authority_key_identifier_extension = true;
        Ok(params.signed_by(&self.key, &self.issuer)?.pem())
    }
}

/// What the generator's clients connect by.
pub(super) struct Crowd {
    /// A configuration of TLS for each client.
    pub(super) tls: Vec<Arc<ClientConfig>>,
    pub(super) wrap: WrapKeys,
    /// The tls-crypt-v2 key, wrapped for the server.
    pub(super) client_key: Vec<u8>,
    pub(super) server_name: ServerName<'static>,
}

impl Crowd {
    /// Reads the files that [`write_all`] wrote, for this many clients from the `first` on.
    ///
    /// # Errors
    /// Returns an error if a file is missing or damaged, or has too few certificates.
    pub(super) fn read(directory: &Path, first: usize, clients: usize) -> anyhow::Result<Self> {
        let path = |name: &str| -> PathBuf { directory.join(name) };
        let key = PrivateKeyDer::from_pem_file(path(FILES.client_key))?;
        // One group alone, so that both servers do the same work: OpenVPN's may have no post-quantum one.
        let provider = Arc::new(CryptoProvider {
            kx_groups: vec![rustls::crypto::aws_lc_rs::kx_group::X25519],
            ..rustls::crypto::aws_lc_rs::default_provider()
        });
        let server = CertificateDer::from_pem_file(path(FILES.server))?;
        let verifier = Arc::new(Pinned { server, provider: Arc::clone(&provider) });
        let mut tls = Vec::with_capacity(clients);
        let certificates = CertificateDer::pem_file_iter(path(FILES.crowd))?;
        for certificate in certificates.skip(first).take(clients) {
            let config = ClientConfig::builder_with_provider(Arc::clone(&provider))
                .with_protocol_versions(&[&rustls::version::TLS13])?
                .dangerous()
                .with_custom_certificate_verifier(Arc::clone(&verifier) as _)
                .with_client_auth_cert(vec![certificate?], key.clone_key())?;
            tls.push(Arc::new(config));
        }
        anyhow::ensure!(tls.len() == clients, "{} has too few certificates", FILES.crowd);
        let v2 = ClientKeyV2::parse(&fs::read_to_string(path(FILES.client_v2))?)?;
        Ok(Self {
            tls,
            wrap: WrapKeys::tls_crypt(&v2.key, Side::Client),
            client_key: v2.wrapped,
            server_name: ServerName::try_from(SERVER_NAME)?,
        })
    }
}

/// Takes the one certificate that it knows. It has no name in the place where TLS libraries look for one.
#[derive(Debug)]
struct Pinned {
    server: CertificateDer<'static>,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for Pinned {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        match *end_entity == self.server {
            true => Ok(ServerCertVerified::assertion()),
            false => Err(rustls::CertificateError::UnknownIssuer.into()),
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls12_signature(message, cert, signed, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls13_signature(message, cert, signed, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    /// An authority as Weft's daemon saves one.
    fn authority() -> String {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, "bench");
        params.is_ca = IsCa::Ca(rcgen::BasicConstraints::Constrained(0));
        let certificate = params.self_signed(&key).unwrap().pem();
        serde_json::json!({
            "name": "bench", "certificate": certificate, "key": key.serialize_pem(),
            "server_certificate": certificate, "server_key": key.serialize_pem(),
            "wrapping_key": ServerKeyV2::new([7; 128]).to_text().as_str(),
            "issued": [], "later": "fields mean nothing here",
        })
        .to_string()
    }

    #[test]
    fn the_generator_reads_the_clients_that_were_written() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("authority.json");
        fs::write(&file, authority()).unwrap();
        write_all(&file, directory.path(), &["one"], 3).unwrap();
        assert!(directory.path().join(certificate_file("one")).is_file());
        let crowd = Crowd::read(directory.path(), 1, 2).unwrap();
        assert_eq!((crowd.tls.len(), crowd.client_key.is_empty()), (2, false));
        assert!(Crowd::read(directory.path(), 2, 2).is_err(), "there is one certificate left");
    }
}
