//! Key files and tokens. Input: kind 1 byte (a static key, a server's, a client's, a token's key, a token), then the
//! text.

use weft_openvpn::auth_token::{TOKEN_PREFIX, TokenSigner};
use weft_openvpn::static_key::{AuthTokenKey, ClientKeyV2, ServerKeyV2, read_static_key};

/// A key that is read is written, and read again, as the same; no token is good that nobody has signed.
pub fn run(data: &[u8]) {
    let Some((kind, bytes)) = data.split_first() else { return };
    let text = String::from_utf8_lossy(bytes);
    match kind % 5 {
        0 => {
            let Ok(key) = read_static_key(&text) else { return };
            let again = read_static_key(&key.to_text()).expect("written");
            assert_eq!(again.expose(), key.expose());
        }
        1 => {
            let Ok(key) = ServerKeyV2::parse(&text) else { return };
            let again = ServerKeyV2::parse(&key.to_text()).expect("written");
            assert_eq!(again.expose(), key.expose());
        }
        2 => {
            let Ok(key) = ClientKeyV2::parse(&text) else { return };
            let again = ClientKeyV2::parse(&key.to_text()).expect("written");
            assert_eq!((again.key.expose(), again.wrapped), (key.key.expose(), key.wrapped));
        }
        3 => {
            let Ok(key) = AuthTokenKey::parse(&text) else { return };
            let again = AuthTokenKey::parse(&key.to_text()).expect("written");
            assert_eq!(again.expose(), key.expose());
        }
        _ => {
            let signer = TokenSigner::new(&AuthTokenKey::new([7; 128]), None, 3_600);
            assert!(signer.verify("anna", &text, 0).is_err());
            assert!(signer.verify("anna", &format!("{TOKEN_PREFIX}{text}"), 0).is_err());
        }
    }
}
