//! The 256 bytes that the keys of both directions are cut from (`docs/design/ovpn.md`, key block).

use std::fmt;

use weft_crypto::EpochSecret;
use zeroize::Zeroizing;

use super::{KeyDirection, NONCE_TAIL_BYTES};

/// Bytes of a block.
pub const KEY_BLOCK_BYTES: usize = 256;
/// Bytes of one direction: a cipher key of up to 64 and an HMAC key of up to 64.
const DIRECTION_BYTES: usize = 128;
/// The offset of the HMAC key, whose first bytes are the nonce tail of an AEAD.
const TAIL_START: usize = 64;
/// Bytes of an epoch's secret: the first ones of its direction.
const EPOCH_SECRET_BYTES: usize = 32;
/// Bytes on a line of a static key file.
const FILE_LINE_BYTES: usize = 16;
/// The first and the last line around the lines of a static key file.
const BEGIN: &str = "-----BEGIN OpenVPN Static key V1-----";
const END: &str = "-----END OpenVPN Static key V1-----";

/// An end of a tunnel. The two ends take their directions from the block in opposite order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Side {
    /// Its packets are sealed with the first half.
    Client,
    /// Its packets are sealed with the second half.
    Server,
}

/// Key material for both directions. It is erased when dropped, and never shown.
#[derive(Clone)]
pub struct KeyBlock(Zeroizing<[u8; KEY_BLOCK_BYTES]>);

/// A text is not a key file: the configuration's fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeyFileError {
    /// The lines around it are missing.
    #[error(
        "not a static key file: the line {BEGIN:?} or {END:?} is missing; make one with openvpn --genkey secret FILE"
    )]
    NotAFile,
    /// Something else than hexadecimal digits.
    #[error("line {0} of the key file is not hexadecimal: restore the file")]
    NotHexadecimal(usize),
    /// Too little or too much.
    #[error("invalid key length {0} in the key file, expected {KEY_BLOCK_BYTES}: restore the file")]
    WrongLength(usize),
}

impl KeyBlock {
    /// A block as it was negotiated.
    pub fn new(bytes: [u8; KEY_BLOCK_BYTES]) -> Self {
        Self(Zeroizing::new(bytes))
    }

    /// Reads a static key file as `openvpn --genkey` writes it: lines of hexadecimal digits between two
    /// lines that say so, comments and empty lines around.
    ///
    /// # Errors
    /// [`KeyFileError`]
    pub fn parse(text: &str) -> Result<Self, KeyFileError> {
        let mut block = Zeroizing::new([0; KEY_BLOCK_BYTES]);
        let mut lines = (1..).zip(text.lines().map(str::trim));
        lines.find(|(_, line)| *line == BEGIN).ok_or(KeyFileError::NotAFile)?;
        let mut filled = 0;
        let mut is_whole = false;
        for (number, line) in lines {
            if line == END {
                is_whole = true;
                break;
            }
            let wrong = KeyFileError::NotHexadecimal(number);
            if line.len() % 2 == 1 {
                return Err(wrong);
            }
            for digits in line.as_bytes().chunks(2) {
                let value = |digit: u8| char::from(digit).to_digit(16).ok_or(wrong);
                let byte = value(digits[0])? << 4 | value(digits[1])?;
                if let Some(room) = block.get_mut(filled) {
                    *room = byte as u8;
                }
                filled += 1;
            }
        }
        match (is_whole, filled) {
            (false, _) => Err(KeyFileError::NotAFile),
            (true, KEY_BLOCK_BYTES) => Ok(Self(block)),
            (true, bytes) => Err(KeyFileError::WrongLength(bytes)),
        }
    }

    /// The text of a static key file with these bytes. It holds the secret.
    pub fn to_text(&self) -> Zeroizing<String> {
        let mut text = Zeroizing::new(String::with_capacity(KEY_BLOCK_BYTES * 3));
        text.push_str("#\n# 2048 bit OpenVPN static key\n#\n");
        text.push_str(BEGIN);
        for (at, byte) in self.0.iter().enumerate() {
            if at % FILE_LINE_BYTES == 0 {
                text.push('\n');
            }
            let digit = |nibble: u8| char::from_digit(nibble.into(), 16).unwrap_or('0');
            text.push(digit(byte >> 4));
            text.push(digit(byte & 15));
        }
        text.push('\n');
        text.push_str(END);
        text.push('\n');
        text
    }

    /// The bytes as they were negotiated or read. Never log them.
    pub fn expose(&self) -> &[u8; KEY_BLOCK_BYTES] {
        &self.0
    }

    /// Returns the sealing and the opening direction of one end; the cipher's key has `cipher_key_bytes`
    /// bytes, at most 64.
    pub fn directions(&self, side: Side, cipher_key_bytes: usize) -> (KeyDirection, KeyDirection) {
        let (client, server) = self.0.split_at(DIRECTION_BYTES);
        let cut = |half: &[u8]| {
            let mut nonce_tail = [0; NONCE_TAIL_BYTES];
            nonce_tail.copy_from_slice(&half[TAIL_START..TAIL_START + NONCE_TAIL_BYTES]);
            KeyDirection {
                cipher_key: half[..cipher_key_bytes.min(TAIL_START)].to_vec(),
                nonce_tail,
            }
        };
        match side {
            Side::Client => (cut(client), cut(server)),
            Side::Server => (cut(server), cut(client)),
        }
    }

    /// A name for one end's sealing key, by which a repeated key is recognised. The key cannot be found from
    /// it.
    pub fn sealing_fingerprint(&self, side: Side) -> [u8; 32] {
        let (client, server) = self.0.split_at(DIRECTION_BYTES);
        let half = match side {
            Side::Client => client,
            Side::Server => server,
        };
        weft_crypto::fingerprint(&[b"weft static key half v1", half])
    }

    /// The secrets of the first epoch that one end seals with and that it opens with.
    pub fn epoch_secrets(&self, side: Side) -> (EpochSecret, EpochSecret) {
        let cut = |start: usize| {
            let mut secret = Zeroizing::new([0; EPOCH_SECRET_BYTES]);
            secret.copy_from_slice(&self.0[start..start + EPOCH_SECRET_BYTES]);
            EpochSecret::from_bytes(*secret)
        };
        match side {
            Side::Client => (cut(0), cut(DIRECTION_BYTES)),
            Side::Server => (cut(DIRECTION_BYTES), cut(0)),
        }
    }
}

impl fmt::Debug for KeyBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeyBlock").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn block() -> [u8; KEY_BLOCK_BYTES] {
        std::array::from_fn(|at| at as u8)
    }

    /// As OpenVPN writes it.
    fn file(bytes: &[u8]) -> String {
        let line = |line: &[u8]| line.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        let lines: Vec<String> = bytes.chunks(16).map(line).collect();
        format!("#\n# 2048 bit OpenVPN static key\n#\n{BEGIN}\n{}\n{END}\n", lines.join("\n"))
    }

    #[test]
    fn a_file_is_read_and_cut_for_both_ends() {
        let key = KeyBlock::parse(&file(&block())).unwrap();
        assert_eq!(*key.to_text(), file(&block()));
        let (seals, opens) = key.directions(Side::Client, 32);
        // OpenVPN's slices for AES-256-GCM.
        assert_eq!(seals.cipher_key, (0..32).collect::<Vec<u8>>());
        assert_eq!(seals.nonce_tail, [64, 65, 66, 67, 68, 69, 70, 71]);
        assert_eq!(opens.cipher_key, (128..160).collect::<Vec<u8>>());
        let secrets = key.epoch_secrets(Side::Server);
        assert_eq!(secrets.0.expose()[..], (128..160).collect::<Vec<u8>>());
        assert_eq!(secrets.1.expose()[..], (0..32).collect::<Vec<u8>>());
        assert_eq!(opens.nonce_tail, [192, 193, 194, 195, 196, 197, 198, 199]);
        assert_eq!(key.directions(Side::Server, 32), (opens, seals));
        assert_eq!(key.directions(Side::Server, 16).0.cipher_key.len(), 16);
        let [client, server] =
            [Side::Client, Side::Server].map(|side| key.sealing_fingerprint(side));
        assert_ne!(client, server);
        let mut other = block();
        other[127] ^= 1;
        assert_ne!(KeyBlock::new(other).sealing_fingerprint(Side::Client), client);
        assert_eq!(KeyBlock::new(other).sealing_fingerprint(Side::Server), server);
        assert!(!format!("{key:?}").contains("12"), "{key:?}");
    }

    #[test]
    fn bad_key_files_are_refused_with_the_fault() {
        let whole = file(&block());
        let error = |text: &str| KeyBlock::parse(text).unwrap_err();
        assert_eq!(error(""), KeyFileError::NotAFile);
        assert_eq!(error(&whole.replace(END, "")), KeyFileError::NotAFile);
        assert_eq!(error(&whole.replace("00010203", "0001020x")), KeyFileError::NotHexadecimal(5));
        assert_eq!(error(&whole.replace("1011", "101")), KeyFileError::NotHexadecimal(6));
        assert_eq!(error(&file(&block()[..240])), KeyFileError::WrongLength(240));
        assert_eq!(error(&file(&[7; 300])), KeyFileError::WrongLength(300));
    }
}
