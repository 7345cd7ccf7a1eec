//! Medians, spreads and a latency histogram.

use std::time::Duration;

/// The histogram's resolution in nanoseconds.
const BUCKET_WIDTH_NS: u64 = 100;
/// The histogram's buckets: 50 ms; the last one counts longer times too.
const BUCKETS_MAX: usize = 500_000;

/// The median of the values, the mean of the middle two if their number is even. `None` without finite
/// values.
#[must_use]
pub fn median(values: &[f64]) -> Option<f64> {
    let mut sorted: Vec<f64> = values.iter().copied().filter(|value| value.is_finite()).collect();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    let upper = *sorted.get(middle)?;
    if sorted.len() % 2 == 1 {
        return Some(upper);
    }
    sorted.get(middle.checked_sub(1)?).map(|lower| f64::midpoint(*lower, upper))
}

/// The least and the greatest value, `None` of none.
#[must_use]
pub fn spread(values: &[f64]) -> Option<(f64, f64)> {
    let finite = || values.iter().copied().filter(|value| value.is_finite());
    Some((finite().reduce(f64::min)?, finite().reduce(f64::max)?))
}

/// Counts of round-trip times, in steps of 100 ns.
#[derive(Debug, Clone)]
pub struct Histogram {
    buckets: Vec<u32>,
    count: u64,
}

impl Default for Histogram {
    fn default() -> Self {
        Self { buckets: vec![0; BUCKETS_MAX], count: 0 }
    }
}

impl Histogram {
    /// Counts one time.
    pub fn record(&mut self, time: Duration) {
        let wanted = time.as_nanos() / u128::from(BUCKET_WIDTH_NS);
        let index = usize::try_from(wanted).unwrap_or(BUCKETS_MAX).min(BUCKETS_MAX - 1);
        if let Some(bucket) = self.buckets.get_mut(index) {
            *bucket = bucket.saturating_add(1);
            self.count += 1;
        }
    }

    /// How many times were counted.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.count
    }

    /// The time, in microseconds, that the given share (0 to 1) of all times does not exceed;
    /// `None` if nothing was counted.
    #[must_use]
    pub fn quantile_us(&self, share: f64) -> Option<f64> {
        if self.count == 0 {
            return None;
        }
        let wanted = (share.clamp(0.0, 1.0) * self.count as f64).ceil().max(1.0) as u64;
        let mut seen = 0_u64;
        for (index, bucket) in self.buckets.iter().enumerate() {
            seen += u64::from(*bucket);
            if seen >= wanted {
                return Some((index as u64 + 1) as f64 * BUCKET_WIDTH_NS as f64 / 1_000.0);
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn the_median_of_odd_even_and_no_values() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), Some(2.5));
        assert_eq!(median(&[f64::NAN, 7.0]), Some(7.0));
        assert_eq!(median(&[]), None);
    }

    #[test]
    fn the_spread_is_least_and_greatest() {
        assert_eq!(spread(&[3.0, 1.0, f64::NAN, 2.0]), Some((1.0, 3.0)));
        assert_eq!(spread(&[]), None);
    }

    #[test]
    fn quantiles_of_one_to_hundred_microseconds() {
        let mut histogram = Histogram::default();
        for microseconds in 1..=100 {
            histogram.record(Duration::from_nanos(microseconds * 1_000 - 50));
        }
        assert_eq!(histogram.count(), 100);
        assert_eq!(histogram.quantile_us(0.5), Some(50.0));
        assert_eq!(histogram.quantile_us(0.99), Some(99.0));
        assert_eq!(histogram.quantile_us(0.0), Some(1.0));
    }

    #[test]
    fn a_time_beyond_the_range_counts_into_the_last_bucket() {
        let mut histogram = Histogram::default();
        histogram.record(Duration::from_secs(100));
        assert_eq!(histogram.quantile_us(0.5), Some(50_000.0));
        assert_eq!(Histogram::default().quantile_us(0.5), None);
    }
}
