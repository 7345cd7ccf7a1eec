//! New clients of a foreign authority, whose private key is here, and clients that are revoked here.

use std::sync::Arc;
use std::time::SystemTime;

use aws_lc_rs::digest::{SHA256, digest};
use rcgen::{ExtendedKeyUsagePurpose, Issuer, KeyPair, PublicKeyData};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use weft_api::{ApiError, ClientProfile, ErrorKind};
use weft_openvpn::config::{NewProfile, TlsSettings, Wrapping};
use weft_openvpn::device::{KEY_BLOCK_BYTES, KeyBlock};
use weft_openvpn::messages::Secret;
use weft_openvpn::static_key::ClientKeyV2;
use weft_openvpn::wrap::{Metadata, ServerKey};
use zeroize::Zeroizing;

use super::trust::{certificates, has_key, server_name};
use super::{Imported, Saved};
use crate::services::gateway::authority::{
    AuthorityError, CERTIFICATES_MAX, CLIENT_DAYS, Issued, check_name, end_params, hex, new_serial,
    random,
};
use crate::services::gateway::places::Remote;
use crate::services::gateway::profile::Asks;
use crate::services::gateway::{Gateway, refusal};
use crate::timestamp;

/// Why the authority's key cannot be used; `None`: it can.
pub(super) fn key_fault(key: &str, tls: &TlsSettings) -> Option<String> {
    issuing(key, tls).err()
}

/// The authority's key, and its certificate.
fn issuing(key: &str, tls: &TlsSettings) -> Result<(KeyPair, CertificateDer<'static>), String> {
    if key.contains("-----BEGIN ENCRYPTED PRIVATE KEY-----")
        || key.contains("Proc-Type: 4,ENCRYPTED")
    {
        return Err("the authority's key is encrypted: decrypt it with openssl pkey -in KEY".into());
    }
    let key = PrivateKeyDer::from_pem_slice(key.as_bytes())
        .map_err(|error| format!("the authority's key is no private key in PEM ({error})"))?;
    let key = KeyPair::try_from(&key)
        .map_err(|error| format!("the authority's key is of an unknown kind ({error})"))?;
    let public = key.subject_public_key_info();
    let ca = certificates("ca", tls.ca.as_deref().unwrap_or_default())?;
    let ca = ca.into_iter().find(|ca| has_key(ca, &public));
    let ca = ca.ok_or("the authority's key is of none of the certificates of ca: name another")?;
    Ok((key, ca))
}

impl Gateway {
    /// Issues a certificate by the authority that was taken over.
    pub(in crate::services::gateway) async fn issue_imported(
        self: &Arc<Self>,
        import: Arc<Imported>,
        name: String,
        remotes: Vec<Remote>,
        asks_password: bool,
    ) -> Result<ClientProfile, ApiError> {
        let issued = super::aside(move || import.issue(name, &remotes, asks_password)).await?;
        let (saved, profile) = issued?;
        self.save_import(saved).await?;
        Ok(profile)
    }

    /// Revokes a client of the authority that was taken over. Returns the serial numbers of certificates that were
    /// issued here.
    pub(in crate::services::gateway) async fn revoke_imported(
        self: &Arc<Self>,
        import: &Imported,
        name: &str,
    ) -> Result<Vec<String>, ApiError> {
        let mut saved = import.saved.clone();
        let now = timestamp::format(SystemTime::now());
        let mut serials = Vec::new();
        for issued in &mut saved.issued {
            if issued.name == name && issued.revoked.is_none() {
                issued.revoked = Some(now.clone());
                serials.push(issued.serial.clone());
            }
        }
        let is_new = !saved.revoked_names.contains_key(name);
        if serials.is_empty() && !is_new {
            return Err(refusal(AuthorityError::Unknown(name.to_owned())));
        }
        saved.revoked_names.entry(name.to_owned()).or_insert(now);
        self.save_import(saved).await?;
        Ok(serials)
    }
}

impl Imported {
    /// For `weft ca init`.
    pub(in crate::services::gateway) fn shown(&self) -> Result<weft_api::Authority, String> {
        use x509_parser::prelude::FromDer;
        let ca = certificates("ca", self.settings.tls.ca.as_deref().unwrap_or_default())?;
        let first = ca.first().ok_or("ca holds no certificate")?;
        let (_, parsed) = x509_parser::certificate::X509Certificate::from_der(first)
            .map_err(|error| error.to_string())?;
        let is_good = |issued: &&Issued| issued.revoked.is_none();
        Ok(weft_api::Authority {
            name: parsed.subject().to_string(),
            fingerprint: hex(digest(&SHA256, first).as_ref()),
            not_after: super::trust::end_of(&parsed),
            clients: self.saved.issued.iter().filter(is_good).count(),
            revoked: self.revocations.len() + self.saved.revoked_names.len(),
            home: None,
        })
    }

    fn issue(
        &self,
        name: String,
        remotes: &[Remote],
        asks_password: bool,
    ) -> Result<(Saved, ClientProfile), ApiError> {
        let conflict = |error: String| ApiError::new(ErrorKind::Conflict, error);
        check_name(&name).map_err(refusal)?;
        let key = self.saved.ca_key.as_ref().ok_or_else(|| {
            conflict(
                "the authority's private key is not on this host, so it makes no profiles: make the client's certificate where the key is, or weft openvpn import FILE --ca-key KEY".into(),
            )
        })?;
        if self.saved.issued.len() >= CERTIFICATES_MAX {
            return Err(refusal(AuthorityError::Full));
        }
        let tls = &self.settings.tls;
        let (key, ca) = issuing(key, tls).map_err(conflict)?;
        let made = |error: rcgen::Error| refusal(AuthorityError::Make(error));
        let issuer = Issuer::from_ca_cert_der(&ca, key).map_err(made)?;
        let (client, serial) = (KeyPair::generate().map_err(made)?, new_serial());
        let usage = ExtendedKeyUsagePurpose::ClientAuth;
        let (params, not_after) = end_params(&name, &serial, usage, CLIENT_DAYS, SystemTime::now());
        let certificate = params.signed_by(&client, &issuer).map_err(made)?.pem();
        let serial = hex(&serial);
        let client = Secret::new(client.serialize_pem());
        let asks = Asks { password: asks_password, code: false };
        let profile =
            self.profile(&name, remotes, Some((&certificate, &client)), asks).map_err(conflict)?;
        let mut saved = self.saved.clone();
        let (of, until) = (name.clone(), not_after.clone());
        saved.issued.push(Issued {
            name: of,
            serial: serial.clone(),
            not_after: until,
            revoked: None,
        });
        let profile = profile.to_string();
        Ok((saved, ClientProfile { name, serial, not_after, profile }))
    }

    /// The profile for all users, who show a name and a password alone.
    ///
    /// # Errors
    /// It cannot be written: why.
    pub(in crate::services::gateway) fn shared_profile(
        &self,
        remotes: &[Remote],
        asks_code: bool,
    ) -> Result<Zeroizing<String>, String> {
        self.profile("", remotes, None, Asks { password: true, code: asks_code })
    }

    /// The profile of a client, wrapped as the server's other clients are.
    fn profile(
        &self,
        name: &str,
        remotes: &[Remote],
        cert: Option<(&str, &Secret)>,
        asks: Asks,
    ) -> Result<Zeroizing<String>, String> {
        let tls = &self.settings.tls;
        let client_key = self.settings.tls_crypt_v2.as_ref().map(|key| {
            let block = KeyBlock::new(random::<KEY_BLOCK_BYTES>());
            let metadata = Metadata::User(name.as_bytes().to_vec());
            let wrapped = ServerKey::new(key.expose()).wrap(&block, &metadata);
            wrapped.map(|wrapped| ClientKeyV2 { key: block, wrapped })
        });
        let client_key = client_key.transpose().map_err(|error| error.to_string())?;
        let wrapping = match (&client_key, &tls.tls_crypt, &tls.tls_auth) {
            (Some(key), ..) => Wrapping::TlsCryptV2(key),
            (None, Some(key), _) => Wrapping::TlsCrypt(key),
            (None, None, Some(key)) => {
                let other = tls.key_direction.map(|digit| 1 - digit.min(1));
                Wrapping::TlsAuth(key, other, &tls.auth_digest)
            }
            (None, None, None) => Wrapping::None,
        };
        let server_name = server_name(tls);
        let profile = NewProfile {
            comment: &match cert {
                Some(_) => format!("{name}, for Weft. It holds a private key: keep it secret."),
                None => "All users, for Weft. Each logs in with a name and a password.".into(),
            },
            remotes,
            is_random: false,
            ca: tls.ca.as_deref().unwrap_or_default(),
            cert,
            wrapping,
            server_name: server_name.as_deref(),
            asks_password: asks.password,
            challenge: asks.challenge(),
        };
        profile.to_text().map_err(|error| error.to_string())
    }
}
