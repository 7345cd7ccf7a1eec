//! The choice of the library that seals and opens a packet.
//!
//! All libraries make the same packets, so only time decides the choice. It depends on processor, AEAD, packet
//! size and direction. A caller that can measure time sets it ([`prefer`]).

use std::sync::atomic::{AtomicU8, Ordering};

use crate::{Cipher, DataCipher};

/// A library that has the AEADs of SAs; AES-192-GCM, for OpenVPN alone, only AWS-LC has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Library {
    /// AWS-LC: AES-GCM with AVX-512, else with AES-NI. The default.
    #[default]
    AwsLc,
    /// ring: AES-GCM with VAES and AVX2, which AWS-LC 1.x has not.
    Ring,
}

impl Library {
    /// All of them, the default first.
    pub const ALL: [Self; 2] = [Self::AwsLc, Self::Ring];

    /// The name in the CLI and in JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::AwsLc => "aws-lc",
            Self::Ring => "ring",
        }
    }
}

/// Packets by the size of their plaintext: a library that is fast on one is not on another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SizeClass {
    /// Under 512 bytes: acknowledgements, requests.
    Small,
    /// Full packets of a link with an MTU of 1500.
    Medium,
    /// From 4,096 bytes: full packets of a link with a large MTU.
    Large,
}

impl SizeClass {
    /// All of them, the smallest first.
    pub const ALL: [Self; 3] = [Self::Small, Self::Medium, Self::Large];

    /// A typical size of the class, in bytes of plaintext: a UDP packet with 64 bytes of payload, or a full one on
    /// 1500 or 9000.
    pub const fn typical_bytes(self) -> usize {
        match self {
            Self::Small => 124,
            Self::Medium => 1_420,
            Self::Large => 8_920,
        }
    }

    /// The class of a plaintext.
    #[inline]
    pub const fn of(bytes: usize) -> Self {
        match bytes {
            0..512 => Self::Small,
            512..4_096 => Self::Medium,
            _ => Self::Large,
        }
    }
}

/// A library for each class of sizes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Choice([Library; 3]);

impl Choice {
    /// One library for all.
    pub const fn all(library: Library) -> Self {
        Self([library; 3])
    }

    /// The library for one class.
    #[inline]
    pub const fn of(self, class: SizeClass) -> Library {
        self.0[class as usize]
    }

    /// The same with another library for one class.
    #[must_use]
    pub const fn with(mut self, class: SizeClass, library: Library) -> Self {
        self.0[class as usize] = library;
        self
    }

    /// The library for full packets of a link with an MTU of 1500, for all.
    #[must_use]
    pub const fn of_full_packets(self) -> Self {
        Self::all(self.of(SizeClass::Medium))
    }

    /// Whether any class is this library's.
    pub const fn has(self, library: Library) -> bool {
        let mut class = 0;
        while class < self.0.len() {
            if self.0[class] as u8 == library as u8 {
                return true;
            }
            class += 1;
        }
        false
    }

    fn bits(self) -> u8 {
        self.0.iter().rev().fold(0, |bits, library| bits << 1 | *library as u8)
    }

    fn from_bits(bits: u8) -> Self {
        Self(std::array::from_fn(|class| Library::ALL[usize::from(bits >> class & 1)]))
    }
}

/// By AEAD: for sealing, for opening.
static PREFERRED: [[AtomicU8; 2]; 2] =
    [[AtomicU8::new(0), AtomicU8::new(0)], [AtomicU8::new(0), AtomicU8::new(0)]];

/// Says which libraries SAs and keys made from now on use, in this process. Nothing depends on it but
/// time.
pub fn prefer(cipher: Cipher, sealing: Choice, opening: Choice) {
    let [seal, open] = &PREFERRED[cipher as usize];
    seal.store(sealing.bits(), Ordering::Relaxed);
    open.store(opening.bits(), Ordering::Relaxed);
}

/// The libraries that a new SA of this AEAD seals with, and those that it opens with.
pub fn preferred(cipher: Cipher) -> (Choice, Choice) {
    let [seal, open] = &PREFERRED[cipher as usize];
    let choice = |bits: &AtomicU8| Choice::from_bits(bits.load(Ordering::Relaxed));
    (choice(seal), choice(open))
}

/// The libraries that a new key of the data channel seals with, and those that it opens with.
///
/// AES with a shorter key uses the choice for AES-256-GCM: the same code, in fewer rounds.
pub fn preferred_for_data(cipher: DataCipher) -> (Choice, Choice) {
    match cipher {
        DataCipher::Aes192Gcm => (Choice::default(), Choice::default()),
        DataCipher::Aes128Gcm | DataCipher::Aes256Gcm => preferred(Cipher::Aes256Gcm),
        DataCipher::ChaCha20Poly1305 => preferred(Cipher::ChaCha20Poly1305),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_library_of_full_packets_is_that_of_medium_ones() {
        for medium in Library::ALL {
            let others = Library::ALL.into_iter().find(|library| *library != medium);
            let choice = Choice::all(others.unwrap_or_default()).with(SizeClass::Medium, medium);
            assert_eq!(choice.of_full_packets(), Choice::all(medium));
        }
    }

    #[test]
    fn every_choice_survives_its_bits() {
        for bits in 0..8 {
            let choice = Choice::from_bits(bits);
            assert_eq!(choice.bits(), bits);
            assert_eq!(choice.has(Library::Ring), bits != 0);
            assert_eq!(choice.has(Library::AwsLc), bits != 7);
        }
        let choice = Choice::default().with(SizeClass::Medium, Library::Ring);
        assert_eq!(SizeClass::ALL.map(|class| choice.of(class) as u8), [0, 1, 0]);
        assert_eq!(Choice::all(Library::Ring).bits(), 7);
    }

    #[test]
    fn each_typical_size_is_of_its_class() {
        for class in SizeClass::ALL {
            assert_eq!(SizeClass::of(class.typical_bytes()), class);
        }
        assert_eq!(SizeClass::of(0), SizeClass::Small);
        assert_eq!(SizeClass::of(usize::MAX), SizeClass::Large);
    }
}
