//! A certificate authority, a server and a client for tests.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, RootCertStore, ServerConfig, SupportedProtocolVersion};

/// The name in the server's certificate.
pub(crate) const SERVER: &str = "server";

/// A certificate with its key.
pub(crate) struct Identity {
    pub(crate) certificate: CertificateDer<'static>,
    pub(crate) certificate_pem: String,
    pub(crate) key: Vec<u8>,
    pub(crate) key_pem: String,
}

/// All of them.
pub(crate) struct Pki {
    pub(crate) ca: CertificateDer<'static>,
    pub(crate) ca_pem: String,
    pub(crate) server: Identity,
    pub(crate) client: Identity,
}

impl Pki {
    pub(crate) fn new() -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, "authority");
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let key = KeyPair::generate().unwrap();
        let ca = params.self_signed(&key).unwrap();
        let issuer = Issuer::new(params, key);
        let sign = |name: &str, usage| {
            let mut params = CertificateParams::new([name.to_owned()]).unwrap();
            params.distinguished_name.push(DnType::CommonName, name);
            params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
            params.extended_key_usages = vec![usage];
            let key = KeyPair::generate().unwrap();
            let certificate = params.signed_by(&key, &issuer).unwrap();
            Identity {
                certificate: certificate.der().clone(),
                certificate_pem: certificate.pem(),
                key: key.serialize_der(),
                key_pem: key.serialize_pem(),
            }
        };
        Self {
            ca: ca.der().clone(),
            ca_pem: ca.pem(),
            server: sign(SERVER, ExtendedKeyUsagePurpose::ServerAuth),
            client: sign("client", ExtendedKeyUsagePurpose::ClientAuth),
        }
    }

    fn roots(&self) -> Arc<RootCertStore> {
        let mut roots = RootCertStore::empty();
        roots.add(self.ca.clone()).unwrap();
        Arc::new(roots)
    }

    pub(crate) fn server_tls(
        &self,
        versions: &[&'static SupportedProtocolVersion],
    ) -> Arc<ServerConfig> {
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let verifier =
            WebPkiClientVerifier::builder_with_provider(self.roots(), provider.clone()).build();
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(versions)
            .unwrap()
            .with_client_cert_verifier(verifier.unwrap())
            .with_single_cert(vec![self.server.certificate.clone()], key(&self.server))
            .unwrap();
        config.send_tls13_tickets = 0;
        Arc::new(config)
    }

    pub(crate) fn client_tls(
        &self,
        versions: &[&'static SupportedProtocolVersion],
    ) -> Arc<ClientConfig> {
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(versions)
            .unwrap()
            .with_root_certificates(self.roots())
            .with_client_auth_cert(vec![self.client.certificate.clone()], key(&self.client))
            .unwrap();
        Arc::new(config)
    }
}

/// The name that a client verifies.
pub(crate) fn server_name() -> ServerName<'static> {
    ServerName::try_from(SERVER).unwrap()
}

fn key(identity: &Identity) -> PrivateKeyDer<'static> {
    PrivatePkcs8KeyDer::from(identity.key.clone()).into()
}
