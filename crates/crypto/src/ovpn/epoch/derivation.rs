//! From the secret of one epoch to its key and to the next secret.

use aws_lc_rs::hkdf;
use zeroize::Zeroizing;

use crate::aead::{ExpandedKey, NONCE_LEN};
use crate::library::Choice;
use crate::{DataCipher, EpochSecret, schedule};

/// The key that seals and opens the packets of one epoch.
pub(super) struct EpochKey {
    pub(super) key: ExpandedKey,
    pub(super) implicit_iv: Zeroizing<[u8; NONCE_LEN]>,
}

impl EpochKey {
    /// The key of the epoch whose secret it is.
    pub(super) fn new(cipher: DataCipher, secret: &EpochSecret, choice: Choice) -> Self {
        let (key, implicit_iv) = material(cipher, secret);
        let key = ExpandedKey::new(cipher, &key[..cipher.key_bytes()], choice);
        Self { key: key.expect("it is as long as the cipher wants it"), implicit_iv }
    }
}

/// The secret of the next epoch.
pub(super) fn next(secret: &EpochSecret) -> EpochSecret {
    let mut next = Zeroizing::new([0; 32]);
    expand_label(secret, b"datakey upd", next.as_mut_slice());
    EpochSecret::from_bytes(*next)
}

/// The cipher key, of as many bytes as the cipher's, and the implicit IV.
fn material(
    cipher: DataCipher,
    secret: &EpochSecret,
) -> (Zeroizing<[u8; 32]>, Zeroizing<[u8; NONCE_LEN]>) {
    let (mut key, mut iv) = (Zeroizing::new([0; 32]), Zeroizing::new([0; NONCE_LEN]));
    expand_label(secret, b"data_key", &mut key[..cipher.key_bytes()]);
    expand_label(secret, b"data_iv", iv.as_mut_slice());
    (key, iv)
}

/// HKDF-Expand with SHA-256 under a label like those of TLS 1.3, with another prefix and without
/// context. `out` is at most 255 hash lengths.
fn expand_label(secret: &EpochSecret, label: &[u8], out: &mut [u8]) {
    const PREFIX: &[u8] = b"ovpn ";
    let bytes = (out.len() as u16).to_be_bytes();
    let label_bytes = [(PREFIX.len() + label.len()) as u8];
    let secret = hkdf::Prk::new_less_safe(hkdf::HKDF_SHA256, secret.expose());
    schedule::expand(&secret, &[&bytes, &label_bytes, PREFIX, label, &[0]], out);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{hex, hex_array};

    /// The answers of OpenVPN's own `test_crypto.c`.
    #[test]
    fn labels_are_expanded_as_openvpn_does() {
        let secret = EpochSecret::from_bytes(hex_array(
            "077709362c2e32df0ddc3f0dc47bba6390b6c73bb50f9c3122ec844ad7c2b3e5",
        ));
        for expected in [
            "185eaa1c7f228ab8eb29773214d92046",
            "875a8eec18556380b8d933ed323c2df8e8eccf4972e683f06a83ac",
        ] {
            let expected = hex(expected);
            let mut out = vec![0; expected.len()];
            expand_label(&secret, b"unit test", &mut out);
            assert_eq!(out, expected);
        }
    }

    /// Section C.
    #[test]
    fn the_key_of_an_epoch_as_openvpn_derives_it() {
        let mut secret = [0; 32];
        secret[..2].copy_from_slice(&[19, 12]);
        let (key, iv) = material(DataCipher::Aes192Gcm, &EpochSecret::from_bytes(secret));
        let expected = hex("ed8533db1c28ace418e9006ab29c17417d60ebe6cd90bf0a");
        assert_eq!((&key[..24], &key[24..]), (&expected[..], &[0; 8][..]));
        assert_eq!(*iv, hex_array::<12>("86890aabf032cb59f4cfa34e"));
    }
}
