//! The key schedule: from a link's session key to the key of each SA.

use aws_lc_rs::hkdf;
use zeroize::Zeroizing;

use crate::{Format, PeerId, SaKey, SessionKey};

/// The key of one SA: HKDF-SHA256 (RFC 5869), 36 bytes out, 40 for `ovpn`.
///
/// - input keying material: the session key, 32 bytes;
/// - salt: `nonce`, 32 random bytes that the receiving side made and sent over the link;
/// - info: the receiver's peer id (32 bytes) || the format's name in ASCII (`esp` or `ovpn`, no
///   terminator) || `spi` (4 bytes, big-endian) || `lane` (2 bytes, big-endian).
///
/// The output is 32 bytes of AEAD key, then 4 bytes of salt, or 8 for `ovpn`. The info is unambiguous: all its parts
/// but the name have a fixed length. Since the receiver is in it, the two directions of a lane
/// have different keys even if the SPIs and nonces were equal.
pub fn derive_sa_key(
    session: &SessionKey,
    nonce: &[u8; 32],
    receiver: &PeerId,
    format: Format,
    spi: u32,
    lane: u16,
) -> SaKey {
    let (spi, lane) = (spi.to_be_bytes(), lane.to_be_bytes());
    let info = [&receiver.as_bytes()[..], format.name().as_bytes(), &spi, &lane];
    let fill = |key: &mut [u8]| {
        hkdf_into(hkdf::HKDF_SHA256, nonce, session.expose(), &info, key);
    };
    if format == Format::Ovpn {
        let mut key = Zeroizing::new([0; 40]);
        fill(key.as_mut_slice());
        return SaKey::for_ovpn(*key);
    }
    let mut key = Zeroizing::new([0; 36]);
    fill(key.as_mut_slice());
    SaKey::from_bytes(*key)
}

/// HKDF (RFC 5869), extract and expand, with the info in parts. `out` is at most 255 hash lengths.
pub(crate) fn hkdf_into(
    hash: hkdf::Algorithm,
    salt: &[u8],
    input: &[u8],
    info: &[&[u8]],
    out: &mut [u8],
) {
    expand(&hkdf::Salt::new(hash, salt).extract(input), info, out);
}

/// HKDF-Expand (RFC 5869 section 2.3), with the info in parts. `out` is at most 255 hash lengths.
pub(crate) fn expand(prk: &hkdf::Prk, info: &[&[u8]], out: &mut [u8]) {
    struct Length(usize);
    impl hkdf::KeyType for Length {
        fn len(&self) -> usize {
            self.0
        }
    }
    prk.expand(info, Length(out.len()))
        .and_then(|okm| okm.fill(out))
        .expect("the callers' lengths are constants below 255 hash lengths");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{hex, hex_array};

    fn bytes_from(first: u8) -> [u8; 32] {
        std::array::from_fn(|i| first + i as u8)
    }

    fn derive(receiver: u8, format: Format, spi: u32, lane: u16) -> SaKey {
        derive_sa_key(
            &SessionKey::from_bytes(bytes_from(0)),
            &bytes_from(32),
            &PeerId::from_bytes(bytes_from(receiver)),
            format,
            spi,
            lane,
        )
    }

    /// The expected keys were computed from the documented layout with another HKDF.
    #[test]
    fn the_layout_of_the_info_is_fixed() {
        assert_eq!(
            derive(64, Format::Esp, 0xc0ff_ee01, 0x0203).expose(),
            &hex_array("4b13845682653a264f110b853ee8668a738511a0f37123faed09be7807c934274ffd4f40")
        );
        let ovpn = derive(64, Format::Ovpn, 0xc0ff_ee01, 0x0203);
        assert_eq!(
            ovpn.cipher_key(),
            &hex_array("6f1367b776730c708ac184693e3b6976defc4a0a3de657c400a13313d138b952")
        );
        assert_eq!(ovpn.nonce_tail(), &hex_array("1231d69484761248"));
        assert_eq!(ovpn.format(), Format::Ovpn);
    }

    #[test]
    fn every_input_changes_the_key() {
        let key = derive(64, Format::Esp, 256, 0);
        assert_ne!(key, derive(65, Format::Esp, 256, 0));
        assert_ne!(key, derive(64, Format::Ovpn, 256, 0));
        assert_ne!(key, derive(64, Format::Esp, 257, 0));
        assert_ne!(key, derive(64, Format::Esp, 256, 1));
        let peer = PeerId::from_bytes(bytes_from(64));
        let session = SessionKey::from_bytes(bytes_from(0));
        assert_ne!(key, derive_sa_key(&session, &bytes_from(33), &peer, Format::Esp, 256, 0));
        let session = SessionKey::from_bytes(bytes_from(1));
        assert_ne!(key, derive_sa_key(&session, &bytes_from(32), &peer, Format::Esp, 256, 0));
    }

    /// RFC 5869 appendix A, the cases for SHA-256.
    #[test]
    fn hkdf_agrees_with_rfc_5869() {
        let check = |input: &[u8], salt: &[u8], info: &[u8], expected: &str| {
            let expected = hex(expected);
            let mut out = vec![0; expected.len()];
            hkdf_into(hkdf::HKDF_SHA256, salt, input, &[info], &mut out);
            assert_eq!(out, expected);
            let (front, back) = info.split_at(info.len() / 2);
            hkdf_into(hkdf::HKDF_SHA256, salt, input, &[front, back], &mut out);
            assert_eq!(out, expected, "info in two parts");
        };
        let range = |from: u8, to: u8| (from..=to).collect::<Vec<u8>>();
        check(
            &[0x0b; 22],
            &range(0x00, 0x0c),
            &range(0xf0, 0xf9),
            "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865",
        );
        check(
            &range(0x00, 0x4f),
            &range(0x60, 0xaf),
            &range(0xb0, 0xff),
            "b11e398dc80327a1c8e7f78c596a49344f012eda2d4efad8a050cc4c19afa97c
             59045a99cac7827271cb41c65e590e09da3275600c2f09b8367793a9aca3db71
             cc30c58179ec3e87c14c01d5c1f3434f1d87",
        );
        check(
            &[0x0b; 22],
            &[],
            &[],
            "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8",
        );
    }
}
