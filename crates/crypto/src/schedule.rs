//! The key schedule: from a link's session key to the key of each SA.

use aws_lc_rs::hkdf;
use zeroize::Zeroizing;

use crate::{Format, PeerId, SaKey, SessionKey};

/// The key of one SA (DESIGN section 6.3): HKDF-SHA256 (RFC 5869), 36 bytes out.
///
/// - input keying material: the session key, 32 bytes;
/// - salt: `nonce`, 32 random bytes that the receiving side made and sent over the link;
/// - info: the receiver's peer id (32 bytes) || the format's name in ASCII (`esp` or `ovpn`, no
///   terminator) || `spi` (4 bytes, big-endian) || `lane` (2 bytes, big-endian).
///
/// The output is 32 bytes of AEAD key, then 4 bytes of salt. The info is unambiguous: all its parts
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
    let mut key = Zeroizing::new([0; 36]);
    hkdf_into(
        hkdf::HKDF_SHA256,
        nonce,
        session.expose(),
        &[receiver.as_bytes(), format.name().as_bytes(), &spi.to_be_bytes(), &lane.to_be_bytes()],
        key.as_mut_slice(),
    );
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
    struct Length(usize);
    impl hkdf::KeyType for Length {
        fn len(&self) -> usize {
            self.0
        }
    }
    hkdf::Salt::new(hash, salt)
        .extract(input)
        .expand(info, Length(out.len()))
        .and_then(|okm| okm.fill(out))
        .expect("the callers' lengths are constants below 255 hash lengths");
}
