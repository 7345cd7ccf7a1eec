//! What servers and clients have in common: certificates, keys, ciphers, checks of the other end, times.

use std::str::FromStr;

use weft_crypto::DataCipher;
use zeroize::Zeroizing;

use super::lexer::Directive;
use super::{Args, Files, Outcome, TAKEN, nothing};
use crate::device::KeyBlock;
use crate::messages::Secret;
use crate::negotiation::{DEFAULT_CIPHERS, cipher_of, parse_ciphers};
use crate::static_key::read_static_key;

/// Most fingerprints of peers.
const FINGERPRINTS_MAX: usize = 4_096;
/// Bytes of a SHA-256 fingerprint.
const FINGERPRINT_BYTES: usize = 32;

/// A version of TLS.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum TlsVersion {
    /// TLS 1.2.
    V1_2,
    /// TLS 1.3.
    V1_3,
}

/// Which name of a certificate must be equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NameKind {
    /// The whole subject.
    Subject,
    /// The common name.
    Name,
    /// How the common name begins.
    NamePrefix,
}

/// A check of the other end's certificate (`verify-x509-name`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NameCheck {
    /// What is compared.
    pub kind: NameKind,
    /// With what.
    pub name: String,
}

/// Certificates, keys and times.
#[derive(Clone, Debug)]
pub struct TlsSettings {
    /// The authorities that sign the other end's certificate, PEM.
    pub ca: Option<String>,
    /// The own certificate, PEM.
    pub cert: Option<String>,
    /// The own key, PEM.
    pub key: Option<Secret>,
    /// Certificates between the own one and its authority, PEM.
    pub extra_certs: Option<String>,
    /// Revoked certificates, PEM.
    pub crl: Option<String>,
    /// The key of tls-auth.
    pub tls_auth: Option<KeyBlock>,
    /// The digit of its direction.
    pub key_direction: Option<u8>,
    /// The digest of its HMAC.
    pub auth_digest: String,
    /// The key of tls-crypt.
    pub tls_crypt: Option<KeyBlock>,
    /// The data ciphers, the best first.
    pub ciphers: Vec<DataCipher>,
    /// The cipher of a peer that names none.
    pub fallback: Option<DataCipher>,
    /// The oldest version of TLS.
    pub tls_min: TlsVersion,
    /// The newest version of TLS.
    pub tls_max: TlsVersion,
    /// The other end's certificate must be one of a server or a client, by its extended key usage.
    pub checks_usage: bool,
    /// The other end's name.
    pub name_check: Option<NameCheck>,
    /// SHA-256 fingerprints of the only certificates allowed.
    pub fingerprints: Vec<[u8; FINGERPRINT_BYTES]>,
    /// Seconds until keys are renewed; 0: never.
    pub renew_s: u32,
    /// Seconds that a handshake may take.
    pub handshake_s: u32,
    /// Seconds that an old key is good beside a new one.
    pub transition_s: u32,
    /// Seconds until a control packet is sent again.
    pub retransmit_s: u32,
}

impl Default for TlsSettings {
    fn default() -> Self {
        Self {
            ca: None,
            cert: None,
            key: None,
            extra_certs: None,
            crl: None,
            tls_auth: None,
            key_direction: None,
            auth_digest: "SHA1".to_owned(),
            tls_crypt: None,
            ciphers: DEFAULT_CIPHERS.to_vec(),
            fallback: None,
            tls_min: TlsVersion::V1_2,
            tls_max: TlsVersion::V1_3,
            checks_usage: false,
            name_check: None,
            fingerprints: Vec::new(),
            renew_s: 3_600,
            handshake_s: 60,
            transition_s: 3_600,
            retransmit_s: 2,
        }
    }
}

/// The extended key usage that the other end's certificate must have.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum PeerUsage {
    Server,
    Client,
}

impl TlsSettings {
    /// Takes a directive over that is alike for servers and clients; `None`: it is none of these.
    pub(super) fn apply(
        &mut self,
        usage: PeerUsage,
        directive: &Directive,
        files: &mut dyn Files,
    ) -> Option<Outcome> {
        let args = Args(directive);
        Some(match directive.name.as_str() {
            "ca" | "cert" | "key" | "extra-certs" | "crl-verify" => self.pem(args, files),
            "tls-auth" | "tls-crypt" | "key-direction" | "auth" => self.wrapping(args, files),
            "cipher" | "data-ciphers" | "ncp-ciphers" | "data-ciphers-fallback" => {
                self.ciphers(args)
            }
            "tls-version-min" | "tls-version-max" | "tls-cert-profile" => self.versions(args),
            "remote-cert-tls" | "remote-cert-eku" => self.usage(usage, args),
            "verify-x509-name" => self.name(args),
            "peer-fingerprint" => self.fingerprints(args),
            "reneg-sec" | "hand-window" | "tran-window" | "tls-timeout" => self.times(args),
            _ => return None,
        })
    }

    fn pem(&mut self, args: Args<'_>, files: &mut dyn Files) -> Outcome {
        if args.0.name == "crl-verify" && args.optional::<String>(1, "dir")?.is_some() {
            return Err(
                "a folder of revoked serial numbers is not read: name a CRL file".to_owned()
            );
        }
        let content = args.content(files)?;
        let found = |label: &str| content.contains(&format!("-----BEGIN {label}-----"));
        let need = |label: &str| {
            let name = &args.0.name;
            if found(label) {
                Ok(Some(content.to_string()))
            } else {
                Err(format!("{name} holds no {label:?} in PEM: name the right file, or convert it"))
            }
        };
        match args.0.name.as_str() {
            "ca" => self.ca = need("CERTIFICATE")?,
            "cert" => self.cert = need("CERTIFICATE")?,
            "extra-certs" => self.extra_certs = need("CERTIFICATE")?,
            "crl-verify" => self.crl = need("X509 CRL")?,
            _ => self.key = Some(private_key(&content)?),
        }
        TAKEN
    }

    fn wrapping(&mut self, args: Args<'_>, files: &mut dyn Files) -> Outcome {
        let read = |files: &mut dyn Files| -> Result<KeyBlock, String> {
            read_static_key(&args.content(files)?).map_err(|error| error.to_string())
        };
        let digit = |at| match args.get::<u8>(at, "0 or 1")? {
            digit @ 0..=1 => Ok(digit),
            _ => Err(args.bad(at, "0 or 1")),
        };
        match args.0.name.as_str() {
            "tls-auth" => {
                args.at_most(2)?;
                self.tls_auth = Some(read(files)?);
                if args.0.values.len() == 2 {
                    self.key_direction = Some(digit(1)?);
                }
            }
            "tls-crypt" => self.tls_crypt = Some(read(files)?),
            "key-direction" => self.key_direction = Some(digit(0)?),
            _ => {
                let digest = args.text(0, "a digest")?.to_ascii_uppercase();
                let known = ["NONE", "SHA1", "SHA224", "SHA256", "SHA384", "SHA512", "MD5"];
                if !known.contains(&digest.as_str()) {
                    return Err(args.bad(0, "SHA1, SHA256, SHA384 or SHA512"));
                }
                self.auth_digest = digest;
            }
        }
        TAKEN
    }

    fn ciphers(&mut self, args: Args<'_>) -> Outcome {
        let value = args.text(0, "ciphers")?;
        match args.0.name.as_str() {
            "cipher" if cipher_of(value).is_none() => {
                return nothing("data-ciphers says it; all ciphers of Weft are AEADs");
            }
            "cipher" | "data-ciphers-fallback" => {
                let bad = || args.bad(0, "AES-256-GCM, AES-128-GCM or CHACHA20-POLY1305");
                self.fallback = Some(cipher_of(value).ok_or_else(bad)?);
            }
            _ => {
                // Names that are no AEAD are no loss as long as one is left.
                let optional: Vec<String> = value
                    .split(':')
                    .map(|name| format!("?{}", name.trim_start_matches('?')))
                    .map(|name| if name == "?DEFAULT" { "DEFAULT".to_owned() } else { name })
                    .collect();
                let list = parse_ciphers(&optional.join(":"));
                self.ciphers = list.map_err(|error| error.to_string())?;
            }
        }
        TAKEN
    }

    fn versions(&mut self, args: Args<'_>) -> Outcome {
        let expected = "1.2 or 1.3";
        match (args.0.name.as_str(), args.text(0, expected)?) {
            ("tls-cert-profile", "insecure") => {
                return Err(
                    "signatures by SHA-1 are always refused: renew the certificates".to_owned()
                );
            }
            ("tls-cert-profile", _) => return nothing("the TLS library refuses weak signatures"),
            ("tls-version-min", "1.0" | "1.1") => {
                return nothing("TLS 1.2 is the oldest, which all clients since 2.4 have");
            }
            ("tls-version-min", "1.2") => self.tls_min = TlsVersion::V1_2,
            ("tls-version-min", "1.3") => self.tls_min = TlsVersion::V1_3,
            ("tls-version-max", "1.2") => self.tls_max = TlsVersion::V1_2,
            ("tls-version-max", "1.3") => self.tls_max = TlsVersion::V1_3,
            ("tls-version-max", "1.0" | "1.1") => {
                return Err("TLS 1.0 and 1.1 are never spoken: remove it".to_owned());
            }
            _ => return Err(args.bad(0, expected)),
        }
        TAKEN
    }

    fn usage(&mut self, usage: PeerUsage, args: Args<'_>) -> Outcome {
        let words = match usage {
            PeerUsage::Server => ["server", "TLS Web Server Authentication", "1.3.6.1.5.5.7.3.1"],
            PeerUsage::Client => ["client", "TLS Web Client Authentication", "1.3.6.1.5.5.7.3.2"],
        };
        let value = args.text(0, words[0])?;
        let allowed = if args.0.name == "remote-cert-tls" { &words[..1] } else { &words[1..] };
        if !allowed.contains(&value) {
            return Err(args.bad(0, allowed[0]));
        }
        self.checks_usage = true;
        TAKEN
    }

    fn name(&mut self, args: Args<'_>) -> Outcome {
        args.at_most(2)?;
        let kind = match args.optional::<String>(1, "a kind")?.as_deref() {
            None | Some("subject") => NameKind::Subject,
            Some("name") => NameKind::Name,
            Some("name-prefix") => NameKind::NamePrefix,
            Some(_) => return Err(args.bad(1, "subject, name or name-prefix")),
        };
        self.name_check = Some(NameCheck { kind, name: args.text(0, "a name")?.to_owned() });
        TAKEN
    }

    fn fingerprints(&mut self, args: Args<'_>) -> Outcome {
        let expected = "SHA-256 fingerprints, as openssl x509 -fingerprint -sha256 prints them";
        let text = match &args.0.block {
            Some(block) => block.to_string(),
            None => args.text(0, expected)?.to_owned(),
        };
        let comment = |line: &&str| line.is_empty() || line.starts_with(['#', ';']);
        for line in text.lines().map(str::trim).filter(|line| !comment(line)) {
            let digits = line.split(':');
            let bytes: Option<Vec<u8>> =
                digits.map(|pair| u8::from_str_radix(pair, 16).ok()).collect();
            let bytes = bytes.and_then(|bytes| bytes.try_into().ok());
            let bad = || format!("peer-fingerprint has a bad line {line:?}: it takes {expected}");
            if self.fingerprints.len() == FINGERPRINTS_MAX {
                return Err(format!("more than {FINGERPRINTS_MAX} fingerprints: use an authority"));
            }
            self.fingerprints.push(bytes.ok_or_else(bad)?);
        }
        TAKEN
    }

    fn times(&mut self, args: Args<'_>) -> Outcome {
        let seconds = args.get(0, "seconds")?;
        match args.0.name.as_str() {
            "reneg-sec" => self.renew_s = seconds,
            "hand-window" => self.handshake_s = seconds,
            "tran-window" => self.transition_s = seconds,
            _ => self.retransmit_s = seconds,
        }
        TAKEN
    }
}

fn private_key(content: &Zeroizing<String>) -> Result<Secret, String> {
    let has = |word: &str| content.contains(word);
    if has("-----BEGIN ENCRYPTED PRIVATE KEY-----") || has("Proc-Type: 4,ENCRYPTED") {
        return Err(
            "the key is encrypted: decrypt it with openssl pkey -in KEY -out KEY".to_owned()
        );
    }
    if !has("PRIVATE KEY-----") {
        return Err(
            "key holds no private key in PEM: name the right file, or convert it".to_owned()
        );
    }
    Ok(Secret::new(content.as_str()))
}

/// Two numbers.
pub(super) fn number_pair<T: FromStr>(args: Args<'_>, expected: &str) -> Result<(T, T), String> {
    Ok((args.get(0, expected)?, args.get(1, expected)?))
}
