//! Opening packets of the data channel, in both layouts. Input: kind 1 byte (bits 0 and 1 the cipher, bit 2
//! epochs, bit 3 a packet of somebody else's). Then a packet, if it is somebody else's; else the number of
//! alterations 1 byte, each as `alter` has them, and the plaintext.

use weft_crypto::ovpn::{
    EPOCH_HEADER_BYTES, EPOCH_OVERHEAD_BYTES, OVERHEAD_BYTES, OpenError, OpeningEpochs, OpeningKey,
    SealingEpochs, SealingKey,
};
use weft_crypto::{DataCipher, EpochSecret, ReplayWindow};

use super::alter;

const FIRST_WORD: [u8; 4] = [0x48, 0, 0, 9];
const TAIL: [u8; 8] = [3; 8];

/// Only unaltered packets sealed with the key are opened, each once, regardless of earlier attempts.
pub fn run(data: &[u8]) {
    let Some((kind, rest)) = data.split_first() else { return };
    let cipher = DataCipher::ALL[usize::from(kind & 3)];
    let has_epochs = kind & 4 != 0;
    if kind & 8 != 0 {
        let mut opening = Opening::new(cipher, has_epochs, 8);
        assert!(opening.open(&mut rest.to_vec()).is_err(), "opened, but never sealed");
        return;
    }
    let Some((count, rest)) = rest.split_first() else { return };
    let (alterations, plaintext) = rest.split_at((usize::from(*count) * 3).min(rest.len()));
    let mut opening = Opening::new(cipher, has_epochs, 7);
    let mut sealed = seal(cipher, has_epochs, plaintext);
    let mut altered = sealed.clone();
    alter(&mut altered, alterations);
    if altered != sealed {
        assert!(opening.open(&mut altered).is_err(), "opened, but altered");
    }
    let mut again = sealed.clone();
    let range = opening.open(&mut sealed).expect("sealed with the key and not altered");
    assert_eq!(&sealed[range], plaintext);
    assert_eq!(opening.open(&mut again), Err(OpenError::Duplicate));
}

fn seal(cipher: DataCipher, has_epochs: bool, plaintext: &[u8]) -> Vec<u8> {
    let (front, overhead) = match has_epochs {
        false => (OVERHEAD_BYTES, OVERHEAD_BYTES),
        true => (EPOCH_HEADER_BYTES, EPOCH_OVERHEAD_BYTES),
    };
    let mut packet = vec![0; front];
    packet.extend_from_slice(plaintext);
    packet.resize(overhead + plaintext.len(), 0);
    let len = plaintext.len();
    let sealed = if has_epochs {
        let epochs = SealingEpochs::new(cipher, EpochSecret::from_bytes([7; 32]));
        let sealer = epochs.current().reserve(1, FIRST_WORD);
        sealer.and_then(|mut sealer| sealer.seal_in_place(&mut packet, len))
    } else {
        let bytes = &[7; 32][..cipher.key_bytes()];
        let key = SealingKey::new(cipher, bytes, TAIL).expect("as long as the cipher's");
        let sealer = key.reserve(1, FIRST_WORD);
        sealer.and_then(|mut sealer| sealer.seal_in_place(&mut packet, len))
    };
    assert_eq!(sealed, Ok(packet.len()));
    packet
}

enum Opening {
    Classic(OpeningKey, ReplayWindow),
    Epochs(Box<OpeningEpochs>),
}

impl Opening {
    fn new(cipher: DataCipher, has_epochs: bool, seed: u8) -> Self {
        if has_epochs {
            let first = EpochSecret::from_bytes([seed; 32]);
            return Self::Epochs(Box::new(OpeningEpochs::new(cipher, first)));
        }
        let bytes = &[seed; 32][..cipher.key_bytes()];
        let key = OpeningKey::new(cipher, bytes, TAIL).expect("as long as the cipher's");
        Self::Classic(key, ReplayWindow::new())
    }

    fn open(&mut self, packet: &mut [u8]) -> Result<std::ops::Range<usize>, OpenError> {
        match self {
            Self::Classic(key, window) => key.open(window, packet),
            Self::Epochs(epochs) => epochs.open(packet),
        }
    }
}
