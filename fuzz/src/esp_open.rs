//! Opening ESP packets. Input: cipher and kind 1 byte. Then, if bit 1 is set, a packet; else the number of
//! alterations 1 byte, each as `alter` has them, and the plaintext.

use weft_crypto::{Cipher, OpenError, OpeningSa, SaKey, SealingSa};
use weft_packet::esp;

use super::alter;

const SPI: u32 = 0x1234_5678;

/// Only unaltered packets sealed with the key are opened, each once, regardless of earlier attempts.
pub fn run(data: &[u8]) {
    let Some((first, rest)) = data.split_first() else { return };
    let cipher = if first & 1 == 0 { Cipher::Aes256Gcm } else { Cipher::ChaCha20Poly1305 };
    if first & 2 != 0 {
        // A key that nothing is ever sealed with: libFuzzer sees what is compared, sealed packets too.
        let mut opening = OpeningSa::new(cipher, SPI, &SaKey::from_bytes([8; 36]));
        let _ = esp::classify(rest);
        let mut packet = rest.to_vec();
        if let Some(spi) = packet.first_chunk_mut::<4>() {
            *spi = SPI.to_be_bytes();
        }
        assert!(opening.open(&mut packet).is_err(), "opened, but never sealed");
        assert_eq!(opening.highest(), 0, "moved by a forged packet");
        return;
    }
    let Some((count, rest)) = rest.split_first() else { return };
    let (alterations, plaintext) = rest.split_at((usize::from(*count) * 3).min(rest.len()));
    let mut sealed = vec![0; esp::HEADER_LEN];
    sealed.extend_from_slice(plaintext);
    sealed.resize(sealed.len() + esp::ICV_LEN, 0);
    let key = SaKey::from_bytes([7; 36]);
    let mut opening = OpeningSa::new(cipher, SPI, &key);
    let sealing = SealingSa::new(cipher, SPI, &key, 5);
    let whole = sealing
        .reserve(1)
        .and_then(|mut sealer| sealer.seal_in_place(&mut sealed, plaintext.len()));
    assert_eq!(whole, Ok(sealed.len()));

    let mut altered = sealed.clone();
    alter(&mut altered, alterations);
    if altered != sealed {
        assert!(opening.open(&mut altered).is_err(), "opened, but altered");
    }
    let mut again = sealed.clone();
    let range = opening.open(&mut sealed).expect("sealed with the key and not altered");
    assert_eq!(&sealed[range], plaintext);
    assert_eq!(opening.open(&mut again), Err(OpenError::Duplicate));
    inside(plaintext);
}

/// The parts of an opened packet are within it.
fn inside(plaintext: &[u8]) {
    let Ok((length, _)) = esp::parse_trailer(plaintext) else { return };
    assert!(length + 2 <= plaintext.len());
    let Ok(inner) = esp::parse_inner_headers(&plaintext[..length]) else { return };
    assert!(inner.frame.start == esp::INNER_LEN && inner.frame.end <= length);
}
