//! The AEADs of ESP: the only place that knows which library seals and opens.

use aws_lc_rs::aead::{AES_256_GCM, Aad, CHACHA20_POLY1305, LessSafeKey, Nonce, UnboundKey};

use crate::{Cipher, SaKey};

/// Bytes of the integrity check value (RFC 4106 section 6, RFC 7634 section 2).
pub(crate) const ICV_LEN: usize = 16;

/// The library refused: forged input on opening, impossible length on sealing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AeadError;

/// A prepared AEAD key and the salt that begins each of its nonces.
pub(crate) struct AeadKey {
    key: LessSafeKey,
    salt: [u8; 4],
}

impl AeadKey {
    /// Expands the key once, so that no packet pays for it.
    pub(crate) fn new(cipher: Cipher, sa_key: &SaKey) -> Self {
        let algorithm = match cipher {
            Cipher::Aes256Gcm => &AES_256_GCM,
            Cipher::ChaCha20Poly1305 => &CHACHA20_POLY1305,
        };
        let (key, salt) = sa_key.expose().split_at(32);
        let key = UnboundKey::new(algorithm, key).expect("both AEADs take 32 bytes of key");
        Self { key: LessSafeKey::new(key), salt: [salt[0], salt[1], salt[2], salt[3]] }
    }

    /// Encrypts `in_out`, then `extra` into the front of `extra_out_and_icv`, and puts the ICV
    /// behind it; that slice is exactly [`ICV_LEN`] longer than `extra`.
    pub(crate) fn seal(
        &self,
        iv: [u8; 8],
        aad: &[u8],
        in_out: &mut [u8],
        extra: &[u8],
        extra_out_and_icv: &mut [u8],
    ) -> Result<(), AeadError> {
        self.key
            .seal_in_place_scatter(self.nonce(iv), Aad::from(aad), in_out, extra, extra_out_and_icv)
            .map_err(|_| AeadError)
    }

    /// Decrypts `in_out` in place if `icv` is right. If not, `in_out` holds nothing of use.
    pub(crate) fn open(
        &self,
        iv: [u8; 8],
        aad: &[u8],
        in_out: &mut [u8],
        icv: &[u8],
    ) -> Result<(), AeadError> {
        self.key
            .open_in_place_separate_tag(self.nonce(iv), Aad::from(aad), icv, in_out)
            .map(|_| ())
            .map_err(|_| AeadError)
    }

    /// Salt, then IV (RFC 4106 section 4, RFC 7634 section 2).
    #[inline]
    fn nonce(&self, iv: [u8; 8]) -> Nonce {
        let mut nonce = [0; 12];
        nonce[..4].copy_from_slice(&self.salt);
        nonce[4..].copy_from_slice(&iv);
        Nonce::assume_unique_for_key(nonce)
    }
}
