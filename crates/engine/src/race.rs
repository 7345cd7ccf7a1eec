//! Finds the library that seals and opens fastest on this processor by a short race.
//!
//! On AVX-512 AWS-LC is ahead with most packets; on processors with VAES and no AVX-512 ring is, by half and
//! more. The race needs no list of such processors: it measures.

use std::time::{Duration, Instant};

use weft_crypto::{
    Choice, Cipher, ESP_HEADER_LEN, ESP_ICV_LEN, Library, OpeningSa, SaKey, SealingSa, SizeClass,
    prefer,
};

/// The time limit of the whole race, in milliseconds. A library that has not run by then cannot win.
pub const RACE_MS: u64 = 30;
/// A library other than the default is taken if it needs less than this share of the default's time.
const WINNING_SHARE: f64 = 0.95;
/// Times that each runs; the best counts, so that a disturbed run does no harm.
const ROUNDS: u32 = 4;
/// Bytes of plaintext between two looks at the clock, and packets at least.
const BATCH_BYTES: usize = 16_384;
const BATCH_PACKETS_MIN: usize = 4;

/// The AEADs that run.
const CIPHERS: [Cipher; 2] = [Cipher::Aes256Gcm, Cipher::ChaCha20Poly1305];

/// One library's time for one packet.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Lap {
    /// The AEAD.
    pub cipher: Cipher,
    /// The size of the packets.
    pub class: SizeClass,
    /// The library.
    pub library: Library,
    /// Nanoseconds to seal one; `None`: it did not run in time.
    pub seal_ns: Option<f64>,
    /// Nanoseconds to open one.
    pub open_ns: Option<f64>,
}

/// The libraries for one AEAD.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Winners {
    /// The AEAD.
    pub cipher: Cipher,
    /// The libraries to seal with.
    pub sealing: Choice,
    /// The libraries to open with.
    pub opening: Choice,
}

/// Holds the race, and has SAs made from now on use the winners. Takes [`RACE_MS`] of the calling
/// thread.
pub fn prefer_fastest() -> [Winners; 2] {
    let winners = winners(&run(Duration::from_millis(RACE_MS)));
    for Winners { cipher, sealing, opening } in winners {
        prefer(cipher, sealing, opening);
    }
    winners
}

/// Holds the race: all runners once, and again, until each has had its rounds or the time is over.
pub fn run(limit: Duration) -> Vec<Lap> {
    let start = Instant::now();
    let mut runners: Vec<Runner> = Vec::new();
    for cipher in CIPHERS {
        for class in SizeClass::ALL {
            runners.extend(Library::ALL.map(|library| Runner::new(cipher, class, library)));
        }
    }
    let share = limit / (ROUNDS * runners.len() as u32);
    for _ in 0..ROUNDS {
        for runner in &mut runners {
            let begun = Instant::now();
            // At least one batch each round, however slow the processor, while there is time.
            while start.elapsed() < limit {
                runner.batch();
                if begun.elapsed() >= share {
                    break;
                }
            }
        }
    }
    runners.into_iter().map(|runner| runner.lap).collect()
}

/// The libraries that were fastest by a margin; the default where none was, or did not run.
pub fn winners(laps: &[Lap]) -> [Winners; 2] {
    CIPHERS.map(|cipher| {
        let choice = |time: fn(&Lap) -> Option<f64>| {
            SizeClass::ALL.into_iter().fold(Choice::default(), |choice, class| {
                choice.with(class, fastest(laps, cipher, class, time))
            })
        };
        Winners { cipher, sealing: choice(|lap| lap.seal_ns), opening: choice(|lap| lap.open_ns) }
    })
}

fn fastest(
    laps: &[Lap],
    cipher: Cipher,
    class: SizeClass,
    time: fn(&Lap) -> Option<f64>,
) -> Library {
    let of = |library| {
        let mut laps = laps.iter();
        laps.find(|lap| (lap.cipher, lap.class, lap.library) == (cipher, class, library))
            .and_then(time)
    };
    let default = Library::default();
    let Some(to_beat) = of(default).map(|default| default * WINNING_SHARE) else { return default };
    let faster = Library::ALL.into_iter().filter_map(|library| Some((library, of(library)?)));
    let best = faster.filter(|(_, time)| *time < to_beat).min_by(|a, b| a.1.total_cmp(&b.1));
    best.map_or(default, |(library, _)| library)
}

/// One library with its packets. The key seals nothing else.
struct Runner {
    sealing: SealingSa,
    opening: OpeningSa,
    packets: Vec<u8>,
    packet_len: usize,
    lap: Lap,
}

impl Runner {
    fn new(cipher: Cipher, class: SizeClass, library: Library) -> Self {
        const SPI: u32 = 256;
        let key = SaKey::from_bytes([5; 36]);
        let bytes = class.typical_bytes();
        let packet_len = ESP_HEADER_LEN + bytes + ESP_ICV_LEN;
        let packets = (BATCH_BYTES / bytes).max(BATCH_PACKETS_MIN);
        let choice = Choice::all(library);
        Self {
            sealing: SealingSa::with(choice, cipher, SPI, &key, 0),
            opening: OpeningSa::with(choice, cipher, SPI, &key),
            packets: vec![0; packets * packet_len],
            packet_len,
            lap: Lap { cipher, class, library, seal_ns: None, open_ns: None },
        }
    }

    /// Seals all packets, then opens them.
    fn batch(&mut self) {
        let plaintext_len = self.packet_len - ESP_HEADER_LEN - ESP_ICV_LEN;
        let start = Instant::now();
        let mut right = true;
        for packet in self.packets.chunks_exact_mut(self.packet_len) {
            let sealer = self.sealing.reserve(1);
            right &= sealer.is_ok_and(|mut it| it.seal_in_place(packet, plaintext_len).is_ok());
        }
        let between = Instant::now();
        for packet in self.packets.chunks_exact_mut(self.packet_len) {
            right &= self.opening.open(packet).is_ok();
        }
        let count = (self.packets.len() / self.packet_len) as f64;
        let (seal, open) = (between.duration_since(start), between.elapsed());
        // A library that does not open what it has sealed is out.
        let best = |so_far: Option<f64>, time: Duration| {
            let one = if right { time.as_nanos() as f64 / count } else { f64::INFINITY };
            Some(so_far.map_or(one, |so_far| so_far.min(one)))
        };
        self.lap.seal_ns = best(self.lap.seal_ns, seal);
        self.lap.open_ns = best(self.lap.open_ns, open);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lap(library: Library, seal_ns: Option<f64>, open_ns: Option<f64>) -> Lap {
        Lap { cipher: Cipher::Aes256Gcm, class: SizeClass::Medium, library, seal_ns, open_ns }
    }

    fn of(laps: &[Lap]) -> (Library, Library) {
        let [aes, chacha] = winners(laps);
        assert_eq!(chacha.sealing, Choice::default());
        assert_eq!(aes.sealing.of(SizeClass::Small), Library::default());
        (aes.sealing.of(SizeClass::Medium), aes.opening.of(SizeClass::Medium))
    }

    #[test]
    fn another_library_must_win_by_a_margin() {
        use Library::{AwsLc, Ring};
        let default = lap(AwsLc, Some(100.0), Some(100.0));
        assert_eq!(of(&[default, lap(Ring, Some(96.0), Some(94.0))]), (AwsLc, Ring));
        assert_eq!(of(&[default, lap(Ring, Some(60.0), Some(160.0))]), (Ring, AwsLc));
        assert_eq!(of(&[default, lap(Ring, None, None)]), (AwsLc, AwsLc));
        assert_eq!(of(&[lap(AwsLc, None, None), lap(Ring, Some(1.0), Some(1.0))]), (AwsLc, AwsLc));
        assert_eq!(of(&[]), (AwsLc, AwsLc));
    }

    #[test]
    fn all_run_and_open_what_they_have_sealed() {
        for cipher in CIPHERS {
            for class in SizeClass::ALL {
                for library in Library::ALL {
                    let mut runner = Runner::new(cipher, class, library);
                    (0..3).for_each(|_| runner.batch());
                    assert!(runner.lap.seal_ns.is_some_and(f64::is_finite), "{:?}", runner.lap);
                    assert!(runner.lap.open_ns.is_some_and(f64::is_finite), "{:?}", runner.lap);
                }
            }
        }
    }

    #[test]
    fn new_sas_get_the_winners() {
        for Winners { cipher, sealing, opening } in prefer_fastest() {
            assert_eq!(weft_crypto::preferred(cipher), (sealing, opening));
        }
    }

    #[test]
    fn without_time_nobody_runs_and_the_default_stays() {
        let laps = run(Duration::ZERO);
        assert_eq!(laps.len(), CIPHERS.len() * SizeClass::ALL.len() * Library::ALL.len());
        assert!(laps.iter().all(|lap| lap.seal_ns.is_none() && lap.open_ns.is_none()));
        for winners in winners(&laps) {
            assert_eq!((winners.sealing, winners.opening), Default::default());
        }
    }
}
