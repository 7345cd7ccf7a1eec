//! Key files that wrap the control channel or sign tokens: static keys (tls-auth, tls-crypt), the two files of
//! tls-crypt-v2, and the key of auth tokens.
//!
//! A static key, which is a [`KeyBlock`], is hexadecimal between two lines; the others are PEM. The texts are those
//! that `openvpn --genkey` writes and reads.

use std::fmt;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use zeroize::Zeroizing;

use crate::control::{CLIENT_KEY_BYTES_MAX, CLIENT_KEY_BYTES_MIN};
use crate::device::{KEY_BLOCK_BYTES, KeyBlock, KeyFileError};

/// Bytes of a cipher key, and of an HMAC key, in a half of a key. Algorithms use the first ones.
pub const HALF_KEY_BYTES: usize = 64;
/// Bytes of a tls-crypt-v2 server key and of an auth token key: one cipher key and one HMAC key.
pub const SINGLE_KEY_BYTES: usize = 2 * HALF_KEY_BYTES;
/// The longest key file that is read, in bytes.
pub const KEY_FILE_BYTES_MAX: usize = 16 * 1024;

const SERVER_KEY_LABEL: &str = "OpenVPN tls-crypt-v2 server key";
const CLIENT_KEY_LABEL: &str = "OpenVPN tls-crypt-v2 client key";
const AUTH_TOKEN_KEY_LABEL: &str = "OpenVPN auth-token server key";
/// Characters on a line of PEM.
const PEM_LINE_CHARS: usize = 64;

/// A text is not the key file that it was to be: the configuration's fault.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    /// A static key that cannot be read.
    #[error(transparent)]
    Static(#[from] KeyFileError),
    /// The lines around it are missing.
    #[error(
        "no {label:?} in the file: give the file that openvpn --genkey {genkey} wrote",
        genkey = genkey(.label)
    )]
    NotAFile {
        /// What the file should hold.
        label: &'static str,
    },
    /// Something else than base64 between the lines.
    #[error("the {label:?} is not base64: restore the file")]
    NotBase64 {
        /// What the file should hold.
        label: &'static str,
    },
    /// Too little or too much.
    #[error("the {label:?} has {have} bytes, expected {expected}: restore the file")]
    WrongLength {
        /// What the file should hold.
        label: &'static str,
        /// Bytes in the file.
        have: usize,
        /// Bytes that there should be.
        expected: &'static str,
    },
    /// No key file is that long.
    #[error("the key file has {0} bytes, at most {KEY_FILE_BYTES_MAX} are read: name another file")]
    TooLong(usize),
}

fn genkey(label: &str) -> &'static str {
    match label {
        SERVER_KEY_LABEL => "tls-crypt-v2-server",
        CLIENT_KEY_LABEL => "tls-crypt-v2-client",
        _ => "auth-token",
    }
}

/// A tls-crypt-v2 server key, which wraps the keys of all clients. It is erased when dropped, and never shown.
#[derive(Clone)]
pub struct ServerKeyV2(SingleKey);

/// The key by which a server signs its auth tokens. It is erased when dropped, and never shown.
#[derive(Clone)]
pub struct AuthTokenKey(SingleKey);

/// A tls-crypt-v2 client key: the client's own key, and the same wrapped for the server.
#[derive(Clone)]
pub struct ClientKeyV2 {
    /// Kc: used as a tls-crypt key.
    pub key: KeyBlock,
    /// WKc, which only the server can unwrap; its last two bytes are its length.
    pub wrapped: Vec<u8>,
}

type SingleKey = Zeroizing<[u8; SINGLE_KEY_BYTES]>;

/// Reads the static key file that `openvpn --genkey secret` writes, or an inline block, of limited length.
///
/// # Errors
/// [`KeyError::Static`], [`KeyError::TooLong`]
pub fn read_static_key(text: &str) -> Result<KeyBlock, KeyError> {
    check_length(text)?;
    Ok(KeyBlock::parse(text)?)
}

macro_rules! single_key {
    ($name:ident, $label:ident) => {
        impl $name {
            /// A key of random bytes.
            pub fn new(bytes: [u8; SINGLE_KEY_BYTES]) -> Self {
                Self(Zeroizing::new(bytes))
            }

            /// Reads the PEM that `openvpn --genkey` writes.
            ///
            /// # Errors
            /// [`KeyError`]
            pub fn parse(text: &str) -> Result<Self, KeyError> {
                let bytes = read_pem($label, text)?;
                let wrong =
                    KeyError::WrongLength { label: $label, have: bytes.len(), expected: "128" };
                let bytes = <[u8; SINGLE_KEY_BYTES]>::try_from(&bytes[..]).map_err(|_| wrong)?;
                Ok(Self::new(bytes))
            }

            /// The PEM. It holds the secret.
            pub fn to_text(&self) -> Zeroizing<String> {
                write_pem($label, &*self.0)
            }

            /// Both keys. Never log them.
            pub fn expose(&self) -> &[u8; SINGLE_KEY_BYTES] {
                &self.0
            }

            /// The cipher key. Never log it.
            pub fn cipher_key(&self) -> &[u8; HALF_KEY_BYTES] {
                self.0.first_chunk().expect("two keys of 64 bytes in 128")
            }

            /// The HMAC key. Never log it.
            pub fn hmac_key(&self) -> &[u8; HALF_KEY_BYTES] {
                self.0.last_chunk().expect("two keys of 64 bytes in 128")
            }
        }
    };
}

single_key!(ServerKeyV2, SERVER_KEY_LABEL);
single_key!(AuthTokenKey, AUTH_TOKEN_KEY_LABEL);

impl ClientKeyV2 {
    /// Reads the PEM that `openvpn --genkey` writes. Whether the server can unwrap the second part is not checked.
    ///
    /// # Errors
    /// [`KeyError`]
    pub fn parse(text: &str) -> Result<Self, KeyError> {
        let bytes = read_pem(CLIENT_KEY_LABEL, text)?;
        let wrong = KeyError::WrongLength {
            label: CLIENT_KEY_LABEL,
            have: bytes.len(),
            expected: "256 and the length that its last two bytes say",
        };
        let Some((key, wrapped)) = bytes.split_first_chunk::<KEY_BLOCK_BYTES>() else {
            return Err(wrong);
        };
        let said = wrapped.last_chunk::<2>().map(|last| usize::from(u16::from_be_bytes(*last)));
        let allowed = CLIENT_KEY_BYTES_MIN..=CLIENT_KEY_BYTES_MAX;
        if said != Some(wrapped.len()) || !allowed.contains(&wrapped.len()) {
            return Err(wrong);
        }
        Ok(Self { key: KeyBlock::new(*key), wrapped: wrapped.to_vec() })
    }

    /// The PEM. It holds the secret.
    pub fn to_text(&self) -> Zeroizing<String> {
        let mut bytes = Zeroizing::new(self.key.expose().to_vec());
        bytes.extend_from_slice(&self.wrapped);
        write_pem(CLIENT_KEY_LABEL, &bytes)
    }
}

const fn check_length(text: &str) -> Result<(), KeyError> {
    if text.len() > KEY_FILE_BYTES_MAX { Err(KeyError::TooLong(text.len())) } else { Ok(()) }
}

fn read_pem(label: &'static str, text: &str) -> Result<Zeroizing<Vec<u8>>, KeyError> {
    check_length(text)?;
    let (begin, end) = (format!("-----BEGIN {label}-----"), format!("-----END {label}-----"));
    let start = text.find(&begin).ok_or(KeyError::NotAFile { label })? + begin.len();
    let rest = text.get(start..).unwrap_or_default();
    let stop = rest.find(&end).ok_or(KeyError::NotAFile { label })?;
    let body = rest.get(..stop).unwrap_or_default();
    let digits = body.bytes().filter(|byte| !byte.is_ascii_whitespace());
    let digits = Zeroizing::new(digits.collect::<Vec<u8>>());
    let bytes = STANDARD.decode(&*digits).map_err(|_| KeyError::NotBase64 { label })?;
    Ok(Zeroizing::new(bytes))
}

fn write_pem(label: &str, bytes: &[u8]) -> Zeroizing<String> {
    let digits = Zeroizing::new(STANDARD.encode(bytes));
    let mut text = Zeroizing::new(String::with_capacity(digits.len() * 2 + 128));
    text.push_str(&format!("-----BEGIN {label}-----\n"));
    let mut rest = digits.as_str();
    while let Some((line, more)) = rest.split_at_checked(PEM_LINE_CHARS) {
        text.push_str(line);
        text.push('\n');
        rest = more;
    }
    if !rest.is_empty() {
        text.push_str(rest);
        text.push('\n');
    }
    text.push_str(&format!("-----END {label}-----\n"));
    text
}

macro_rules! opaque {
    ($($name:ident),*) => {$(
        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.debug_struct(stringify!($name)).finish_non_exhaustive()
            }
        }
    )*};
}

opaque!(ServerKeyV2, AuthTokenKey, ClientKeyV2);

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use proptest::prelude::*;

    use super::*;

    /// What `openvpn --genkey tls-crypt-v2-server` of OpenVPN 2.6.14 wrote.
    const SERVER_FILE: &str = "-----BEGIN OpenVPN tls-crypt-v2 server key-----
QMIcBIhEzntUZPSpsersOEHr7WTElZZsvzvrLI+JrBozBjSpsGrJe1rAxn+5+5ih
bs3QTsQiQ0rfqi7v2bo2TF6qt2JC/pgjzkyNjooRcQGnSYP3IZu6UZM+J8/4gbGJ
19vgq/xzprtL44QKjVC7SS5kebRwGP6an5zf+19ALi4=
-----END OpenVPN tls-crypt-v2 server key-----
";

    fn key() -> KeyBlock {
        KeyBlock::new(std::array::from_fn(|at| at as u8))
    }

    #[test]
    fn a_server_key_is_written_as_openvpn_writes_it() {
        let key = ServerKeyV2::parse(&format!("# ours\n{SERVER_FILE}")).unwrap();
        assert_eq!(key.cipher_key()[..4], [0x40, 0xc2, 0x1c, 0x04]);
        assert_eq!(key.to_text().as_str(), SERVER_FILE);
        let error = AuthTokenKey::parse(SERVER_FILE).unwrap_err();
        assert!(error.to_string().contains("--genkey auth-token wrote"), "{error}");
    }

    #[test]
    fn bad_files_are_refused_with_the_fault() {
        let cut = SERVER_FILE.replace("19ALi4=", "19A");
        let error = ServerKeyV2::parse(&cut).unwrap_err();
        assert!(matches!(error, KeyError::WrongLength { have: 126, .. }), "{error}");
        let error = ServerKeyV2::parse(&SERVER_FILE.replace('Q', "!")).unwrap_err();
        assert_eq!(error, KeyError::NotBase64 { label: SERVER_KEY_LABEL });
        let error = ServerKeyV2::parse(&SERVER_FILE.replace("-----END", "")).unwrap_err();
        assert_eq!(error, KeyError::NotAFile { label: SERVER_KEY_LABEL });
        assert_eq!(read_static_key("").unwrap_err(), KeyError::Static(KeyFileError::NotAFile));
        let long = " ".repeat(KEY_FILE_BYTES_MAX + 1);
        assert_eq!(read_static_key(&long).unwrap_err(), KeyError::TooLong(long.len()));
        let mut client = ClientKeyV2 { key: key(), wrapped: vec![1; 299] };
        assert!(ClientKeyV2::parse(&client.to_text()).is_err(), "its length is not its last bytes");
        client.wrapped[297..].copy_from_slice(&[0x01, 0x2b]);
        let again = ClientKeyV2::parse(&client.to_text()).unwrap();
        assert_eq!((again.key.expose(), again.wrapped), (client.key.expose(), client.wrapped));
    }

    #[test]
    fn no_key_shows_in_debug_output() {
        let server = ServerKeyV2::new([0xab; 128]);
        let client = ClientKeyV2 { key: key(), wrapped: vec![9; 40] };
        let text = format!("{server:?} {client:?}");
        assert_eq!(text, "ServerKeyV2 { .. } ClientKeyV2 { .. }");
    }

    proptest! {
        #[test]
        fn no_text_makes_a_reader_panic(text in ".{0,200}", at in 0_usize..300, cut in ".{0,3}") {
            let mut known = SERVER_FILE.replace("server key", "client key");
            let at = at.min(known.len());
            known.insert_str(at, &cut);
            for text in [&text, &known] {
                let _ = read_static_key(text);
                let _ = ServerKeyV2::parse(text);
                let _ = AuthTokenKey::parse(text);
                let _ = ClientKeyV2::parse(text);
            }
        }
    }
}
