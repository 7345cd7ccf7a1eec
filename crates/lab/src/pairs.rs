//! Pairwise tests: few rows in which every two values of different factors meet.

/// A value of a factor, both by their places.
type Value = (usize, usize);

/// Rows for factors with these numbers of values. A row is the place of a value for each factor. Any two values of
/// different factors stand together in a row. The same numbers give the same rows.
#[must_use]
pub fn covering(sizes: &[usize]) -> Vec<Vec<usize>> {
    let mut open = pairs(sizes);
    let mut rows = Vec::new();
    while !open.is_empty() {
        let candidates = open.iter().map(|pair| grown(sizes, &open, *pair));
        // The first of those that cover most.
        let best = candidates.rev().max_by_key(|row| covers(&open, row));
        let Some(row) = best else { break };
        open.retain(|pair| !stands_in(*pair, &row));
        rows.push(row);
    }
    rows
}

/// The pairs of values that stand in none of these rows.
#[must_use]
pub fn missing(sizes: &[usize], rows: &[Vec<usize>]) -> Vec<(Value, Value)> {
    let is_missing = |pair: &(Value, Value)| !rows.iter().any(|row| stands_in(*pair, row));
    pairs(sizes).into_iter().filter(is_missing).collect()
}

/// All pairs of values of different factors.
fn pairs(sizes: &[usize]) -> Vec<(Value, Value)> {
    let values = |factor: usize| (0..sizes[factor]).map(move |value| (factor, value));
    let factors =
        (0..sizes.len()).flat_map(|one| (one + 1..sizes.len()).map(move |two| (one, two)));
    factors
        .flat_map(|(one, two)| {
            values(one).flat_map(move |one| values(two).map(move |two| (one, two)))
        })
        .collect()
}

fn stands_in(((factor, value), (other, with)): (Value, Value), row: &[usize]) -> bool {
    row[factor] == value && row[other] == with
}

fn covers(open: &[(Value, Value)], row: &[usize]) -> usize {
    open.iter().filter(|pair| stands_in(**pair, row)).count()
}

/// A row with this pair; each further factor gets the value that meets most open pairs with those that are set.
fn grown(sizes: &[usize], open: &[(Value, Value)], (one, two): (Value, Value)) -> Vec<usize> {
    let mut row: Vec<Option<usize>> = vec![None; sizes.len()];
    (row[one.0], row[two.0]) = (Some(one.1), Some(two.1));
    for factor in 0..sizes.len() {
        if row[factor].is_some() {
            continue;
        }
        let is_set = |(other, with): Value| row[other] == Some(with);
        let met = |value: usize| {
            let own = (factor, value);
            let fits = |(left, right): (Value, Value)| {
                (left == own && is_set(right)) || (right == own && is_set(left))
            };
            let touches = |(left, right): (Value, Value)| left == own || right == own;
            let now = open.iter().filter(|pair| fits(**pair)).count();
            (now, open.iter().filter(|pair| touches(**pair)).count())
        };
        row[factor] = (0..sizes[factor]).rev().max_by_key(|value| met(*value));
    }
    row.into_iter().map(Option::unwrap_or_default).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_two_values_meet_in_few_rows() {
        // The least that is possible is the product of the two greatest numbers.
        for (sizes, most) in [
            (&[2, 2][..], 4),
            (&[2, 2, 2], 4),
            (&[3, 3, 3, 3], 11),
            (&[2, 2, 5, 3, 2, 2, 3], 17),
            (&[4, 1, 3], 12),
        ] {
            let rows = covering(sizes);
            assert!(rows.len() <= most, "{sizes:?}: {} rows", rows.len());
            for one in 0..sizes.len() {
                for two in one + 1..sizes.len() {
                    let mut met: Vec<_> = rows.iter().map(|row| (row[one], row[two])).collect();
                    met.sort_unstable();
                    met.dedup();
                    assert_eq!(met.len(), sizes[one] * sizes[two], "{sizes:?}: {one} and {two}");
                    assert!(met.iter().all(|(a, b)| *a < sizes[one] && *b < sizes[two]));
                }
            }
            assert_eq!(rows, covering(sizes), "the rows are others each time");
        }
        assert!(covering(&[]).is_empty());
    }

    #[test]
    fn a_row_that_is_left_out_is_missed() {
        let sizes = [2, 5, 3];
        let mut rows = covering(&sizes);
        assert!(missing(&sizes, &rows).is_empty());
        rows.pop();
        assert!(!missing(&sizes, &rows).is_empty());
    }
}
