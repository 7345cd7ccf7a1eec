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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::testing::hex;

    /// The last case of each row says whether it must open.
    type Row = (u32, String, String, String, String, String, String, String);

    fn key_of(cipher: Cipher, key: &[u8], nonce: &[u8]) -> (AeadKey, [u8; 8]) {
        let sa_key = SaKey::from_bytes([key, &nonce[..4]].concat().try_into().unwrap());
        (AeadKey::new(cipher, &sa_key), nonce[4..].try_into().unwrap())
    }

    /// Seals with the plaintext split after `split` bytes between the two inputs.
    fn sealed(key: &AeadKey, iv: [u8; 8], aad: &[u8], plaintext: &[u8], split: usize) -> Vec<u8> {
        let mut out = vec![0; plaintext.len() + ICV_LEN];
        out[..split].copy_from_slice(&plaintext[..split]);
        let (head, rest) = out.split_at_mut(split);
        key.seal(iv, aad, head, &plaintext[split..], rest).unwrap();
        out
    }

    fn check_wycheproof(cipher: Cipher, json: &str, cases: usize) {
        let rows: Vec<Row> = serde_json::from_str(json).unwrap();
        assert_eq!(rows.len(), cases);
        assert!(rows.iter().any(|row| row.7 == "invalid"));
        for (case, key, nonce, aad, plaintext, ciphertext, tag, result) in rows {
            let (key, iv) = key_of(cipher, &hex(&key), &hex(&nonce));
            let (aad, plaintext, tag) = (hex(&aad), hex(&plaintext), hex(&tag));
            let expected = [hex(&ciphertext), tag.clone()].concat();
            for split in [plaintext.len(), plaintext.len() / 2, 0] {
                let equal = sealed(&key, iv, &aad, &plaintext, split) == expected;
                assert_eq!(equal, result == "valid", "case {case}, split {split}");
            }
            let mut opened = hex(&ciphertext);
            match key.open(iv, &aad, &mut opened, &tag) {
                Ok(()) => {
                    assert_eq!(result, "valid", "case {case}");
                    assert_eq!(opened, plaintext, "case {case}");
                }
                Err(AeadError) => assert_eq!(result, "invalid", "case {case}"),
            }
        }
    }

    #[test]
    fn aes_256_gcm_agrees_with_wycheproof() {
        let json = include_str!("../tests/vectors/wycheproof-aes-256-gcm.json");
        check_wycheproof(Cipher::Aes256Gcm, json, 66);
    }

    #[test]
    fn chacha20_poly1305_agrees_with_wycheproof() {
        let json = include_str!("../tests/vectors/wycheproof-chacha20-poly1305.json");
        check_wycheproof(Cipher::ChaCha20Poly1305, json, 316);
    }

    /// RFC 7634 appendix A: a whole ESP packet, but with 32-bit sequence numbers.
    #[test]
    fn rfc_7634_example_packet() {
        let (key, iv) = key_of(
            Cipher::ChaCha20Poly1305,
            &hex("808182838485868788898a8b8c8d8e8f909192939495969798999a9b9c9d9e9f"),
            &hex("a0a1a2a3 1011121314151617"),
        );
        let plaintext = hex("45000054a6f200004001e778c6336405c000020508005b7a3a080000553bec10
             0007362708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f20212223
             2425262728292a2b2c2d2e2f30313233343536370102 0204");
        let packet = hex("24039428b97f417e3c13753a4f05087b67c352e6a7fab1b982d466ef407ae5c6
             14ee8099d52844eb61aa95dfab4c02f72aa71e7c4c4f64c9befe2facc638e8f3
             cbec163fac469b502773f6fb94e664da9165b82829f641e0
             76aaa8266b7fb0f7b11b369907e1ad43");
        check_packet(&key, iv, &hex("01020304 00000005"), &plaintext, &packet);
    }

    /// draft-mcgrew-gcm-test-01 section 4: the case of RFC 4106 with a 256-bit key and 32-bit
    /// sequence numbers; those with 64 bits are in the tests of the SA.
    #[test]
    fn rfc_4106_example_packet() {
        let (key, iv) = key_of(
            Cipher::Aes256Gcm,
            &hex("abbccddef00112233445566778899aababbccddef00112233445566778899aab"),
            &hex("11223344 0102030405060708"),
        );
        let plaintext = hex("4500003069a6400080062690c0a801029389155e0a9e008b2dc57ee000000000
             7002400020bf0000020405b40101040201020201");
        let packet = hex("ff425c9b724599df7a3bcd510194e00d6a78107f1b0b1cbf06efae9d65a5d763
             748a637985771d347f0545659f14e99def842d8eb335f4eecfdbf831824b4c49
             15956c96");
        check_packet(&key, iv, &hex("4a2cbfe3 00000002"), &plaintext, &packet);
    }

    fn check_packet(key: &AeadKey, iv: [u8; 8], aad: &[u8], plaintext: &[u8], packet: &[u8]) {
        for split in 0..=plaintext.len() {
            assert_eq!(sealed(key, iv, aad, plaintext, split), packet, "split {split}");
        }
        let (ciphertext, icv) = packet.split_at(plaintext.len());
        let mut opened = ciphertext.to_vec();
        key.open(iv, aad, &mut opened, icv).unwrap();
        assert_eq!(opened, plaintext);
    }
}
