//! A rate, as a text: a number of bits a second, with `K`, `M` or `G` behind it.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The letters of a rate, with what they stand for.
const UNITS: [(&str, u64); 3] = [("G", 1_000_000_000), ("M", 1_000_000), ("K", 1_000)];

/// Bits a second.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(into = "u64", try_from = "u64")]
pub struct Rate(u64);

/// A text or a number is no rate.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no rate: give bits a second from 64K to 100G, such as 20M")]
pub struct RateError(String);

impl Rate {
    /// The lowest and the highest, in bits a second.
    const RANGE: std::ops::RangeInclusive<u64> = 64_000..=100_000_000_000;

    /// Bits a second.
    pub const fn bits(self) -> u64 {
        self.0
    }
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match UNITS.into_iter().find(|(_, unit)| self.0.is_multiple_of(*unit)) {
            Some((letter, unit)) => write!(f, "{}{letter}", self.0 / unit),
            None => write!(f, "{}", self.0),
        }
    }
}

impl FromStr for Rate {
    type Err = RateError;

    fn from_str(text: &str) -> Result<Self, RateError> {
        let upper = text.to_ascii_uppercase();
        let unit =
            UNITS.into_iter().find_map(|(letter, unit)| Some((upper.strip_suffix(letter)?, unit)));
        let (digits, unit) = unit.unwrap_or((&upper, 1));
        let number = digits.parse::<u64>().ok().and_then(|number| number.checked_mul(unit));
        number.and_then(|bits| bits.try_into().ok()).ok_or_else(|| RateError(text.to_owned()))
    }
}

impl TryFrom<u64> for Rate {
    type Error = RateError;

    fn try_from(bits: u64) -> Result<Self, RateError> {
        match Self::RANGE.contains(&bits) {
            true => Ok(Self(bits)),
            false => Err(RateError(bits.to_string())),
        }
    }
}

impl From<Rate> for u64 {
    fn from(rate: Rate) -> Self {
        rate.0
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_rate_is_read_as_it_is_shown() {
        for (text, bits) in [("20M", 20_000_000), ("1500K", 1_500_000), ("64001", 64_001)] {
            let rate: Rate = text.parse().unwrap();
            assert_eq!((rate.bits(), rate.to_string().as_str()), (bits, text));
        }
        assert_eq!("2g".parse::<Rate>().unwrap().to_string(), "2G");
        for text in ["", "M", "63K", "101G", "-1M", "20 M", "20MB", "99999999999999999999G"] {
            let error = text.parse::<Rate>().unwrap_err().to_string();
            assert!(error.contains("64K to 100G"), "{text}: {error}");
        }
        assert!(serde_json::from_str::<Rate>("1").is_err());
        assert_eq!(serde_json::to_string(&"1M".parse::<Rate>().unwrap()).unwrap(), "1000000");
    }
}
