//! The AEADs of ESP: the only place that calls the libraries that seal and open.

use std::hint::black_box;

use aws_lc_rs::aead as aws_lc;
use ring::aead as ring;

use crate::library::{Choice, Library, SizeClass};
use crate::{Cipher, SaKey};

/// Bytes of the integrity check value (RFC 4106 section 6, RFC 7634 section 2).
pub(crate) const ICV_LEN: usize = 16;

/// The library refused: forged input on opening, impossible length on sealing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AeadError;

/// A prepared AEAD key and the salt that begins each of its nonces.
pub(crate) struct AeadKey {
    aws_lc: aws_lc::LessSafeKey,
    /// Where some sizes are ring's.
    ring: Option<Box<ring::LessSafeKey>>,
    choice: Choice,
    salt: [u8; 4],
}

impl AeadKey {
    /// Expands the key once, so that no packet pays for it.
    pub(crate) fn new(cipher: Cipher, sa_key: &SaKey, choice: Choice) -> Self {
        let algorithm = match cipher {
            Cipher::Aes256Gcm => &aws_lc::AES_256_GCM,
            Cipher::ChaCha20Poly1305 => &aws_lc::CHACHA20_POLY1305,
        };
        let (key, salt) = sa_key.expose().split_at(32);
        let ring = choice.has(Library::Ring).then(|| Box::new(ring_key(cipher, key)));
        let key = aws_lc::UnboundKey::new(algorithm, key).expect("both AEADs take 32 bytes of key");
        let aws_lc = aws_lc::LessSafeKey::new(key);
        Self { aws_lc, ring, choice, salt: [salt[0], salt[1], salt[2], salt[3]] }
    }

    /// Encrypts the first `head_len` bytes of `sealed` in place, then `extra` behind them, and puts the
    /// ICV behind both: `sealed` has exactly room for all.
    ///
    /// Never inlined, so that its instructions can be told from the caller's (`./dev counts`): what a
    /// compiler makes inline of the libraries' wrappers moves with everything else in the program.
    #[inline(never)]
    pub(crate) fn seal(
        &self,
        iv: [u8; 8],
        aad: &[u8],
        sealed: &mut [u8],
        head_len: usize,
        extra: &[u8],
    ) -> Result<(), AeadError> {
        if let Some(key) = self.rings(head_len + extra.len()) {
            let (plaintext, icv) = sealed.split_last_chunk_mut::<ICV_LEN>().ok_or(AeadError)?;
            plaintext[head_len..].copy_from_slice(extra);
            let nonce = ring::Nonce::assume_unique_for_key(self.nonce(iv));
            let tag = key.seal_in_place_separate_tag(nonce, ring::Aad::from(aad), plaintext);
            icv.copy_from_slice(tag.map_err(|_| AeadError)?.as_ref());
            return Ok(());
        }
        let nonce = aws_lc::Nonce::assume_unique_for_key(self.nonce(iv));
        let (head, rest) = sealed.split_at_mut(head_len);
        self.aws_lc
            .seal_in_place_scatter(nonce, aws_lc::Aad::from(aad), head, extra, rest)
            .map_err(|_| AeadError)
    }

    /// Decrypts `in_out` in place if `icv` is right. If not, `in_out` holds nothing of use. Never
    /// inlined, as [`Self::seal`].
    #[inline(never)]
    pub(crate) fn open(
        &self,
        iv: [u8; 8],
        aad: &[u8],
        in_out: &mut [u8],
        icv: &[u8; ICV_LEN],
    ) -> Result<(), AeadError> {
        if let Some(key) = self.rings(in_out.len()) {
            let nonce = ring::Nonce::assume_unique_for_key(self.nonce(iv));
            let opened = key.open_in_place_separate_tag(
                nonce,
                ring::Aad::from(aad),
                (*icv).into(),
                in_out,
                0..,
            );
            return opened.map(|_| ()).map_err(|_| AeadError);
        }
        let nonce = aws_lc::Nonce::assume_unique_for_key(self.nonce(iv));
        self.aws_lc
            .open_in_place_separate_tag(nonce, aws_lc::Aad::from(aad), icv, in_out)
            .map(|_| ())
            .map_err(|_| AeadError)
    }

    /// ring's key, if a plaintext of this length is ring's.
    #[inline]
    pub(crate) fn rings(&self, plaintext_len: usize) -> Option<&ring::LessSafeKey> {
        match self.choice.of(SizeClass::of(plaintext_len)) {
            Library::AwsLc => None,
            Library::Ring => self.ring.as_deref(),
        }
    }

    /// Salt, then IV (RFC 4106 section 4, RFC 7634 section 2).
    #[inline]
    fn nonce(&self, iv: [u8; 8]) -> [u8; 12] {
        let mut nonce = [0; 12];
        nonce[..4].copy_from_slice(&self.salt);
        nonce[4..].copy_from_slice(&iv);
        nonce
    }
}

impl Drop for AeadKey {
    /// AWS-LC erases its keys. ring does not: its key is overwritten with that of no packet.
    fn drop(&mut self) {
        if let Some(key) = &mut self.ring {
            **key = ring_key(Cipher::Aes256Gcm, &[0; 32]);
            // Or the compiler sees that nobody reads it any more.
            black_box(key);
        }
    }
}

fn ring_key(cipher: Cipher, key: &[u8]) -> ring::LessSafeKey {
    let algorithm = match cipher {
        Cipher::Aes256Gcm => &ring::AES_256_GCM,
        Cipher::ChaCha20Poly1305 => &ring::CHACHA20_POLY1305,
    };
    let key = ring::UnboundKey::new(algorithm, key).expect("both AEADs take 32 bytes of key");
    ring::LessSafeKey::new(key)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::testing::hex;

    /// The last case of each row says whether it must open.
    type Row = (u32, String, String, String, String, String, String, String);

    fn key_of(library: Library, cipher: Cipher, key: &[u8], nonce: &[u8]) -> (AeadKey, [u8; 8]) {
        let sa_key = SaKey::from_bytes([key, &nonce[..4]].concat().try_into().unwrap());
        let key = AeadKey::new(cipher, &sa_key, Choice::all(library));
        assert_eq!(key.rings(100).is_some(), library == Library::Ring);
        (key, nonce[4..].try_into().unwrap())
    }

    /// Seals with the plaintext split after `split` bytes between the two inputs.
    fn sealed(key: &AeadKey, iv: [u8; 8], aad: &[u8], plaintext: &[u8], split: usize) -> Vec<u8> {
        let mut out = vec![0; plaintext.len() + ICV_LEN];
        out[..split].copy_from_slice(&plaintext[..split]);
        key.seal(iv, aad, &mut out, split, &plaintext[split..]).unwrap();
        out
    }

    fn check_wycheproof(cipher: Cipher, json: &str, cases: usize) {
        let rows: Vec<Row> = serde_json::from_str(json).unwrap();
        assert_eq!(rows.len(), cases);
        assert!(rows.iter().any(|row| row.7 == "invalid"));
        for library in Library::ALL {
            for row in &rows {
                check_case(library, cipher, row);
            }
        }
    }

    fn check_case(library: Library, cipher: Cipher, row: &Row) {
        let (case, key, nonce, aad, plaintext, ciphertext, tag, result) = row;
        let (key, iv) = key_of(library, cipher, &hex(key), &hex(nonce));
        let (aad, plaintext, tag) = (hex(aad), hex(plaintext), hex(tag));
        let expected = [hex(ciphertext), tag.clone()].concat();
        for split in [plaintext.len(), plaintext.len() / 2, 0] {
            let equal = sealed(&key, iv, &aad, &plaintext, split) == expected;
            assert_eq!(equal, result == "valid", "{library:?}, case {case}, split {split}");
        }
        let mut opened = hex(ciphertext);
        match key.open(iv, &aad, &mut opened, &tag.try_into().unwrap()) {
            Ok(()) => {
                assert_eq!(result, "valid", "{library:?}, case {case}");
                assert_eq!(opened, plaintext, "{library:?}, case {case}");
            }
            Err(AeadError) => assert_eq!(result, "invalid", "{library:?}, case {case}"),
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
        let (cipher, key, nonce) = (
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
        check_packet((cipher, key, nonce), &hex("01020304 00000005"), &plaintext, &packet);
    }

    /// draft-mcgrew-gcm-test-01 section 4: the case of RFC 4106 with a 256-bit key and 32-bit
    /// sequence numbers; those with 64 bits are in the tests of the SA.
    #[test]
    fn rfc_4106_example_packet() {
        let (cipher, key, nonce) = (
            Cipher::Aes256Gcm,
            &hex("abbccddef00112233445566778899aababbccddef00112233445566778899aab"),
            &hex("11223344 0102030405060708"),
        );
        let plaintext = hex("4500003069a6400080062690c0a801029389155e0a9e008b2dc57ee000000000
             7002400020bf0000020405b40101040201020201");
        let packet = hex("ff425c9b724599df7a3bcd510194e00d6a78107f1b0b1cbf06efae9d65a5d763
             748a637985771d347f0545659f14e99def842d8eb335f4eecfdbf831824b4c49
             15956c96");
        check_packet((cipher, key, nonce), &hex("4a2cbfe3 00000002"), &plaintext, &packet);
    }

    fn check_packet(
        (cipher, key, nonce): (Cipher, &[u8], &[u8]),
        aad: &[u8],
        plaintext: &[u8],
        packet: &[u8],
    ) {
        for library in Library::ALL {
            let (key, iv) = key_of(library, cipher, key, nonce);
            for split in 0..=plaintext.len() {
                assert_eq!(sealed(&key, iv, aad, plaintext, split), packet, "{library:?}, {split}");
            }
            let (ciphertext, icv) = packet.split_at(plaintext.len());
            let mut opened = ciphertext.to_vec();
            key.open(iv, aad, &mut opened, icv.try_into().unwrap()).unwrap();
            assert_eq!(opened, plaintext);
        }
    }
}
