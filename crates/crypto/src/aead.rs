//! The AEADs of both encrypted formats: the only place that calls the libraries that seal and open.

use std::hint::black_box;

use aws_lc_rs::aead as aws_lc;
use ring::aead as ring;

use crate::library::{Choice, Library, SizeClass};
use crate::{Cipher, DataCipher, SaKey};

/// Bytes of the integrity check value (RFC 4106 section 6, RFC 7634 section 2), the tag of `ovpn`.
pub(crate) const ICV_LEN: usize = 16;

/// Bytes of a nonce, of every AEAD here.
pub(crate) const NONCE_LEN: usize = 12;

/// The library refused: forged input on opening, impossible length on sealing; or a key is not as
/// long as its cipher's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AeadError;

/// A prepared AEAD key and the salt that begins each of its nonces: that of an SA.
pub(crate) struct AeadKey {
    expanded: ExpandedKey,
    salt: [u8; 4],
}

impl AeadKey {
    /// Expands the key once, so that no packet pays for it.
    pub(crate) fn new(cipher: Cipher, sa_key: &SaKey, choice: Choice) -> Self {
        let (key, salt) = sa_key.expose().split_at(32);
        let expanded = ExpandedKey::new(cipher.into(), key, choice);
        let expanded = expanded.expect("both AEADs take 32 bytes of key");
        Self { expanded, salt: [salt[0], salt[1], salt[2], salt[3]] }
    }

    /// Encrypts `sealed` in place, but for its last [`ICV_LEN`] bytes, where it puts the ICV.
    ///
    /// Never inlined, so that its instructions can be told from the caller's (`./dev counts`). Inlined wrappers of
    /// the libraries would change with everything else in the program.
    #[inline(never)]
    pub(crate) fn seal(&self, iv: [u8; 8], aad: &[u8], sealed: &mut [u8]) -> Result<(), AeadError> {
        let (plaintext, icv) = sealed.split_last_chunk_mut().ok_or(AeadError)?;
        self.expanded.seal_inline(self.nonce(iv), aad, plaintext, icv)
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
        self.expanded.open_inline(self.nonce(iv), aad, in_out, icv)
    }

    /// Salt, then IV (RFC 4106 section 4, RFC 7634 section 2).
    #[inline]
    fn nonce(&self, iv: [u8; 8]) -> [u8; NONCE_LEN] {
        let mut nonce = [0; NONCE_LEN];
        nonce[..4].copy_from_slice(&self.salt);
        nonce[4..].copy_from_slice(&iv);
        nonce
    }

    #[cfg(test)]
    pub(crate) fn is_rings(&self, plaintext_len: usize) -> bool {
        self.expanded.is_rings(plaintext_len)
    }
}

/// A prepared AEAD key; the caller gives whole nonces. It is in the form of those libraries alone that have a
/// class of sizes: the forms take most of a peer's memory.
pub(crate) enum ExpandedKey {
    AwsLc(aws_lc::LessSafeKey),
    Ring(Box<ring::LessSafeKey>),
    Both { aws_lc: aws_lc::LessSafeKey, ring: Box<ring::LessSafeKey>, choice: Choice },
}

/// The form for a packet.
enum Form<'a> {
    AwsLc(&'a aws_lc::LessSafeKey),
    Ring(&'a ring::LessSafeKey),
}

impl ExpandedKey {
    /// Expands the key once. If ring lacks the cipher, AWS-LC serves all sizes.
    ///
    /// # Errors
    /// The key has not [`DataCipher::key_bytes`] bytes.
    pub(crate) fn new(cipher: DataCipher, key: &[u8], choice: Choice) -> Result<Self, AeadError> {
        let algorithm = match cipher {
            DataCipher::Aes128Gcm => &aws_lc::AES_128_GCM,
            DataCipher::Aes192Gcm => &aws_lc::AES_192_GCM,
            DataCipher::Aes256Gcm => &aws_lc::AES_256_GCM,
            DataCipher::ChaCha20Poly1305 => &aws_lc::CHACHA20_POLY1305,
        };
        let of_aws_lc = || {
            let key = aws_lc::UnboundKey::new(algorithm, key).map_err(|_| AeadError)?;
            Ok(aws_lc::LessSafeKey::new(key))
        };
        let rings = ring_algorithm(cipher).filter(|_| choice.has(Library::Ring));
        let Some(rings) = rings else { return of_aws_lc().map(Self::AwsLc) };
        if !choice.has(Library::AwsLc) {
            return Ok(Self::Ring(Box::new(ring_key(rings, key)?)));
        }
        // ring's last: only as a part of this is it erased.
        let aws_lc = of_aws_lc()?;
        Ok(Self::Both { aws_lc, ring: Box::new(ring_key(rings, key)?), choice })
    }

    /// Encrypts `in_out` in place; its tag goes where the packet's layout has it.
    #[inline(never)]
    pub(crate) fn seal(
        &self,
        nonce: [u8; NONCE_LEN],
        aad: &[u8],
        in_out: &mut [u8],
        tag: &mut [u8; ICV_LEN],
    ) -> Result<(), AeadError> {
        self.seal_inline(nonce, aad, in_out, tag)
    }

    /// Inlined always, so that an SA's packets cost no second call.
    #[inline(always)]
    fn seal_inline(
        &self,
        nonce: [u8; NONCE_LEN],
        aad: &[u8],
        in_out: &mut [u8],
        tag: &mut [u8; ICV_LEN],
    ) -> Result<(), AeadError> {
        match self.form_for(in_out.len()) {
            Form::AwsLc(key) => {
                // The call that writes the tag into the packet; it could take more plaintext from elsewhere.
                let nonce = aws_lc::Nonce::assume_unique_for_key(nonce);
                key.seal_in_place_scatter(nonce, aws_lc::Aad::from(aad), in_out, &[], tag)
                    .map_err(|_| AeadError)
            }
            Form::Ring(key) => ring_seal(key, nonce, aad, in_out, tag),
        }
    }

    /// Decrypts `in_out` in place if `tag` is right. If not, `in_out` holds nothing of use.
    #[inline(never)]
    pub(crate) fn open(
        &self,
        nonce: [u8; NONCE_LEN],
        aad: &[u8],
        in_out: &mut [u8],
        tag: &[u8; ICV_LEN],
    ) -> Result<(), AeadError> {
        self.open_inline(nonce, aad, in_out, tag)
    }

    /// Inlined always, as [`Self::seal_inline`].
    #[inline(always)]
    fn open_inline(
        &self,
        nonce: [u8; NONCE_LEN],
        aad: &[u8],
        in_out: &mut [u8],
        tag: &[u8; ICV_LEN],
    ) -> Result<(), AeadError> {
        match self.form_for(in_out.len()) {
            Form::AwsLc(key) => {
                let nonce = aws_lc::Nonce::assume_unique_for_key(nonce);
                let opened =
                    key.open_in_place_separate_tag(nonce, aws_lc::Aad::from(aad), tag, in_out);
                opened.map(|_| ()).map_err(|_| AeadError)
            }
            Form::Ring(key) => {
                let (nonce, aad) =
                    (ring::Nonce::assume_unique_for_key(nonce), ring::Aad::from(aad));
                let opened = key.open_in_place_separate_tag(nonce, aad, (*tag).into(), in_out, 0..);
                opened.map(|_| ()).map_err(|_| AeadError)
            }
        }
    }

    /// The form for a plaintext of this length.
    #[inline(always)]
    fn form_for(&self, plaintext_len: usize) -> Form<'_> {
        match self {
            Self::AwsLc(key) => Form::AwsLc(key),
            Self::Ring(key) => Form::Ring(key),
            Self::Both { aws_lc, ring, choice } => match choice.of(SizeClass::of(plaintext_len)) {
                Library::AwsLc => Form::AwsLc(aws_lc),
                Library::Ring => Form::Ring(ring),
            },
        }
    }

    #[cfg(test)]
    pub(crate) fn is_rings(&self, plaintext_len: usize) -> bool {
        matches!(self.form_for(plaintext_len), Form::Ring(_))
    }
}

impl Drop for ExpandedKey {
    /// AWS-LC erases its keys. ring does not: its key is overwritten with that of no packet.
    fn drop(&mut self) {
        if let Self::Ring(key) | Self::Both { ring: key, .. } = self {
            **key = ring_key(&ring::AES_256_GCM, &[0; 32]).expect("32 bytes are a key of it");
            // Or the compiler sees that the key is not read any more.
            black_box(key);
        }
    }
}

#[inline(always)]
fn ring_seal(
    key: &ring::LessSafeKey,
    nonce: [u8; NONCE_LEN],
    aad: &[u8],
    in_out: &mut [u8],
    tag: &mut [u8; ICV_LEN],
) -> Result<(), AeadError> {
    let nonce = ring::Nonce::assume_unique_for_key(nonce);
    let made = key.seal_in_place_separate_tag(nonce, ring::Aad::from(aad), in_out);
    tag.copy_from_slice(made.map_err(|_| AeadError)?.as_ref());
    Ok(())
}

/// ring's name for the cipher, if ring has it.
fn ring_algorithm(cipher: DataCipher) -> Option<&'static ring::Algorithm> {
    match cipher {
        DataCipher::Aes128Gcm => Some(&ring::AES_128_GCM),
        DataCipher::Aes192Gcm => None,
        DataCipher::Aes256Gcm => Some(&ring::AES_256_GCM),
        DataCipher::ChaCha20Poly1305 => Some(&ring::CHACHA20_POLY1305),
    }
}

fn ring_key(
    algorithm: &'static ring::Algorithm,
    key: &[u8],
) -> Result<ring::LessSafeKey, AeadError> {
    let key = ring::UnboundKey::new(algorithm, key).map_err(|_| AeadError)?;
    Ok(ring::LessSafeKey::new(key))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::testing::{hex, hex_array};

    /// The last case of each row says whether it must open.
    type Row = (u32, String, String, String, String, String, String, String);

    fn key_of(library: Library, cipher: Cipher, key: &[u8], nonce: &[u8]) -> (AeadKey, [u8; 8]) {
        let sa_key = SaKey::from_bytes([key, &nonce[..4]].concat().try_into().unwrap());
        let key = AeadKey::new(cipher, &sa_key, Choice::all(library));
        assert_eq!(key.is_rings(100), library == Library::Ring);
        (key, nonce[4..].try_into().unwrap())
    }

    fn sealed(key: &AeadKey, iv: [u8; 8], aad: &[u8], plaintext: &[u8]) -> Vec<u8> {
        let mut out = [plaintext, &[0; ICV_LEN]].concat();
        key.seal(iv, aad, &mut out).unwrap();
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
        let is_equal = sealed(&key, iv, &aad, &plaintext) == expected;
        assert_eq!(is_equal, result == "valid", "{library:?}, case {case}");
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

    /// draft-mcgrew-gcm-test-01 section 4: the case of RFC 4106 with a 256-bit key and 32-bit sequence numbers.
    /// The tests of the SA have those with 64 bits.
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
            assert_eq!(sealed(&key, iv, aad, plaintext), packet, "{library:?}");
            let (ciphertext, icv) = packet.split_at(plaintext.len());
            let mut opened = ciphertext.to_vec();
            key.open(iv, aad, &mut opened, icv.try_into().unwrap()).unwrap();
            assert_eq!(opened, plaintext);
        }
    }

    /// McGrew and Viega, "The Galois/Counter Mode of Operation", appendix B, test cases 4, 10 and 16:
    /// the same input under keys of three lengths.
    #[test]
    fn aes_gcm_of_every_key_length_agrees_with_its_specification() {
        let key = hex("feffe9928665731c6d6a8f9467308308feffe9928665731c6d6a8f9467308308");
        let nonce = hex_array("cafebabefacedbaddecaf888");
        let aad = hex("feedfacedeadbeeffeedfacedeadbeefabaddad2");
        let plaintext = hex("d9313225f88406e5a55909c5aff5269a86a7a9531534f7da2e4c303d8a318a72
             1c3c0c95956809532fcf0e2449a6b525b16aedf5aa0de657ba637b39");
        let aes_128 = "42831ec2217774244b7221b784d0d49ce3aa212f2c02a4e035c17e2329aca12e
             21d514b25466931c7d8f6a5aac84aa051ba30b396a0aac973d58e091
             5bc94fbc3221a5db94fae95ae7121a47";
        let aes_192 = "3980ca0b3c00e841eb06fac4872a2757859e1ceaa6efd984628593b40ca1e19c
             7d773d00c144c525ac619d18c84a3f4718e2448b2fe324d9ccda2710
             2519498e80f1478f37ba55bd6d27618c";
        let aes_256 = "522dc1f099567d07f47f37a32a84427d643a8cdcbfe5c0c97598a2bd2555d1aa
             8cb08e48590dbb3da7b08b1056828838c5f61e6393ba7a0abcc9f662
             76fc6ece0f4e1768cddf8853bb2d551b";
        for (bytes, expected) in [(16, aes_128), (24, aes_192), (32, aes_256)] {
            let (cipher, expected) = (DataCipher::aes_gcm(bytes).unwrap(), hex(expected));
            for library in Library::ALL {
                let key = ExpandedKey::new(cipher, &key[..bytes], Choice::all(library)).unwrap();
                let (mut text, mut tag) = (plaintext.clone(), [0; ICV_LEN]);
                key.seal(nonce, &aad, &mut text, &mut tag).unwrap();
                assert_eq!([&text[..], &tag].concat(), expected, "{cipher}, {library:?}");
                key.open(nonce, &aad, &mut text, &tag).unwrap();
                assert_eq!(text, plaintext, "{cipher}, {library:?}");
                tag[15] ^= 1;
                assert_eq!(key.open(nonce, &aad, &mut text, &tag), Err(AeadError));
            }
        }
    }
}
