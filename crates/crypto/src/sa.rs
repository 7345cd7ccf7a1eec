//! Security associations of format `esp`: one direction, one AEAD key, one sequence-number space.
//!
//! An ESP packet here is SPI 4, sequence low 4, IV 8, ciphertext, ICV 16 (DESIGN section 4). The
//! associated data is SPI, sequence high, sequence low (RFC 4106 section 5 with extended sequence
//! numbers; RFC 7634 section 2.1 likewise); the nonce is the SA's salt, then the IV.

use std::fmt;
use std::ops::Range;

use crate::aead::{AeadKey, ICV_LEN};
use crate::window::{Replay, ReplayWindow};
use crate::{Cipher, SaKey};

/// Bytes in front of the ciphertext: SPI, low half of the sequence number, IV.
pub const ESP_HEADER_LEN: usize = 16;

/// Bytes behind the ciphertext: the integrity check value.
pub const ESP_ICV_LEN: usize = ICV_LEN;

/// Why a packet was not sealed. Nothing was sealed and no sequence number was used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SealError {
    /// Ours: the SA should have been replaced long before. Send nothing more on it.
    #[error("the SA's sequence numbers are used up; a new SA is needed")]
    Exhausted,
    /// Ours: the datagram's buffer does not hold header, plaintext and ICV.
    #[error("no room in the datagram for the ESP header, the plaintext and the ICV")]
    NoRoom,
}

/// Why a packet was not opened. All are the network's or an attacker's doing; drop and count.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OpenError {
    /// Too short for an ESP header and an ICV.
    #[error("too short for an ESP packet")]
    TooShort,
    /// As [`Replay::Duplicate`].
    #[error("a packet with this sequence number was accepted before")]
    Duplicate,
    /// As [`Replay::TooOld`].
    #[error("the sequence number is too far behind")]
    TooOld,
    /// Not sealed by the holder of the SA's key, or changed on the way; or of another SA.
    #[error("the packet is not authentic")]
    Forged,
}

impl From<Replay> for OpenError {
    fn from(replay: Replay) -> Self {
        match replay {
            Replay::Duplicate => Self::Duplicate,
            Replay::TooOld => Self::TooOld,
        }
    }
}

/// What seals the packets of one outbound SA.
pub trait Sealer {
    /// Seals a datagram whose whole plaintext already stands behind the room for the ESP header.
    ///
    /// On entry `datagram` is [`ESP_HEADER_LEN`] bytes of room, `plaintext_len` bytes of plaintext
    /// (ESP trailer included), [`ESP_ICV_LEN`] bytes of room, anything. Returns the packet's length.
    ///
    /// # Errors
    /// [`SealError`]; then the plaintext is as it was.
    fn seal_in_place(
        &mut self,
        datagram: &mut [u8],
        plaintext_len: usize,
    ) -> Result<usize, SealError>;

    /// Seals a datagram whose plaintext begins in place, `head_len` bytes of it, and goes on with
    /// `extra` from another buffer (the last bytes of which are the ESP trailer).
    ///
    /// On entry `datagram` is [`ESP_HEADER_LEN`] bytes of room, the head, room for `extra` and the
    /// ICV, anything. Returns the packet's length.
    ///
    /// # Errors
    /// [`SealError`]; then the head is as it was.
    fn seal(
        &mut self,
        datagram: &mut [u8],
        head_len: usize,
        extra: &[u8],
    ) -> Result<usize, SealError> {
        let plaintext_len = head_len.checked_add(extra.len()).ok_or(SealError::NoRoom)?;
        datagram
            .get_mut(ESP_HEADER_LEN..)
            .and_then(|plaintext| plaintext.get_mut(head_len..plaintext_len))
            .ok_or(SealError::NoRoom)?
            .copy_from_slice(extra);
        self.seal_in_place(datagram, plaintext_len)
    }
}

/// An outbound SA.
///
/// Its sequence number begins at 1 and never repeats; the IV is the sequence number XORed with a
/// salt, hence unique too.
pub struct SealingSa {
    key: AeadKey,
    spi: u32,
    /// The last sequence number used.
    sequence: u64,
    iv_salt: u64,
}

impl SealingSa {
    /// A fresh SA. A key must never be given to two of them.
    ///
    /// `spi` is the receiver's choice; `iv_salt` is any random value.
    pub fn new(cipher: Cipher, spi: u32, key: &SaKey, iv_salt: u64) -> Self {
        Self { key: AeadKey::new(cipher, key), spi, sequence: 0, iv_salt }
    }

    /// The SPI in its packets.
    pub const fn spi(&self) -> u32 {
        self.spi
    }

    /// How many packets it has sealed; also the last sequence number used.
    pub const fn packets(&self) -> u64 {
        self.sequence
    }

    /// As [`Sealer::seal`].
    ///
    /// # Errors
    /// [`SealError`]; then the head is as it was.
    #[inline]
    pub fn seal(
        &mut self,
        datagram: &mut [u8],
        head_len: usize,
        extra: &[u8],
    ) -> Result<usize, SealError> {
        Sealer::seal(self, datagram, head_len, extra)
    }

    /// As [`Sealer::seal_in_place`].
    ///
    /// # Errors
    /// [`SealError`]; then the plaintext is as it was.
    #[inline]
    pub fn seal_in_place(
        &mut self,
        datagram: &mut [u8],
        plaintext_len: usize,
    ) -> Result<usize, SealError> {
        Sealer::seal_in_place(self, datagram, plaintext_len)
    }
}

impl Sealer for SealingSa {
    #[inline]
    fn seal_in_place(
        &mut self,
        datagram: &mut [u8],
        plaintext_len: usize,
    ) -> Result<usize, SealError> {
        let total = plaintext_len
            .checked_add(ESP_HEADER_LEN + ESP_ICV_LEN)
            .filter(|total| *total <= datagram.len())
            .ok_or(SealError::NoRoom)?;
        let sequence = self.sequence.checked_add(1).ok_or(SealError::Exhausted)?;
        // Used up whatever comes of it, so that no failure can make a nonce repeat.
        self.sequence = sequence;
        let iv = (sequence ^ self.iv_salt).to_be_bytes();
        let (header, sealed) = datagram[..total].split_at_mut(ESP_HEADER_LEN);
        header[..4].copy_from_slice(&self.spi.to_be_bytes());
        header[4..8].copy_from_slice(&(sequence as u32).to_be_bytes());
        header[8..].copy_from_slice(&iv);
        let (plaintext, icv) = sealed.split_at_mut(plaintext_len);
        self.key
            .seal(iv, &associated_data(self.spi, sequence), plaintext, &[], icv)
            .map_err(|_| SealError::NoRoom)?;
        Ok(total)
    }
}

impl fmt::Debug for SealingSa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SealingSa")
            .field("spi", &self.spi)
            .field("packets", &self.sequence)
            .finish_non_exhaustive()
    }
}

/// An inbound SA with its replay window.
pub struct OpeningSa {
    key: AeadKey,
    spi: u32,
    window: ReplayWindow,
}

impl OpeningSa {
    /// A fresh SA, nothing received yet. `spi` is this host's choice.
    pub fn new(cipher: Cipher, spi: u32, key: &SaKey) -> Self {
        Self { key: AeadKey::new(cipher, key), spi, window: ReplayWindow::new() }
    }

    /// The SPI of the packets it opens.
    pub const fn spi(&self) -> u32 {
        self.spi
    }

    /// The highest sequence number opened; 0 before the first.
    pub const fn highest(&self) -> u64 {
        self.window.highest()
    }

    /// Opens an ESP packet, from the SPI to the end of the ICV, in place.
    ///
    /// Returns where in `packet` the plaintext stands, ESP trailer included. The window is asked
    /// before the packet is opened and told only afterwards, so a forged packet moves nothing.
    ///
    /// # Errors
    /// [`OpenError`]; after [`OpenError::Forged`] the packet's bytes are of no use.
    #[inline]
    pub fn open(&mut self, packet: &mut [u8]) -> Result<Range<usize>, OpenError> {
        let end = packet.len().checked_sub(ESP_ICV_LEN).ok_or(OpenError::TooShort)?;
        let (header, sealed) =
            packet.split_first_chunk_mut::<ESP_HEADER_LEN>().ok_or(OpenError::TooShort)?;
        let (ciphertext, icv) =
            sealed.split_last_chunk_mut::<ESP_ICV_LEN>().ok_or(OpenError::TooShort)?;
        let [s0, s1, s2, s3, n0, n1, n2, n3, iv @ ..] = *header;
        if u32::from_be_bytes([s0, s1, s2, s3]) != self.spi {
            return Err(OpenError::Forged);
        }
        let sequence = self.window.infer(u32::from_be_bytes([n0, n1, n2, n3]));
        self.window.check(sequence)?;
        self.key
            .open(iv, &associated_data(self.spi, sequence), ciphertext, icv)
            .map_err(|_| OpenError::Forged)?;
        self.window.mark(sequence);
        Ok(ESP_HEADER_LEN..end)
    }
}

impl fmt::Debug for OpeningSa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OpeningSa")
            .field("spi", &self.spi)
            .field("highest", &self.highest())
            .finish_non_exhaustive()
    }
}

#[inline]
fn associated_data(spi: u32, sequence: u64) -> [u8; 12] {
    let mut aad = [0; 12];
    aad[..4].copy_from_slice(&spi.to_be_bytes());
    aad[4..].copy_from_slice(&sequence.to_be_bytes());
    aad
}
