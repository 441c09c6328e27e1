//! Samples and their statistics: the median, and their spread.

use serde::{Deserialize, Serialize};

/// Samples of one quantity, in the order in which they were taken; never empty.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Samples(Vec<f64>);

/// The spread of samples.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// Median.
    pub median: f64,
    /// Lower quartile.
    pub lower_quartile: f64,
    /// Upper quartile.
    pub upper_quartile: f64,
    /// The least.
    pub least: f64,
    /// The greatest.
    pub greatest: f64,
}

impl Samples {
    /// `None` without samples, or with one that is not finite.
    pub fn new(values: Vec<f64>) -> Option<Samples> {
        let sound = !values.is_empty() && values.iter().all(|v| v.is_finite());
        sound.then_some(Samples(values))
    }

    /// One sample.
    pub fn one(value: f64) -> Samples {
        Samples(vec![value])
    }

    /// Number of samples.
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// Median.
    pub fn median(&self) -> f64 {
        self.summary().median
    }

    /// Applies a function to each sample.
    pub fn map(&self, change: impl Fn(f64) -> f64) -> Samples {
        Samples(self.0.iter().copied().map(change).collect())
    }

    /// Median, quartiles and extremes.
    pub fn summary(&self) -> Summary {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        let at = |share: f64| quantile(&sorted, share);
        Summary {
            median: at(0.5),
            lower_quartile: at(0.25),
            upper_quartile: at(0.75),
            least: at(0.0),
            greatest: at(1.0),
        }
    }
}

/// Between the two neighbours of `share`, in proportion (type 7 of Hyndman and Fan, 1996).
fn quantile(sorted: &[f64], share: f64) -> f64 {
    let place = share * (sorted.len() - 1) as f64;
    let (below, above) = (sorted[place.floor() as usize], sorted[place.ceil() as usize]);
    below + (above - below) * place.fract()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_and_quartiles_lie_between_neighbours() {
        let samples = Samples::new(vec![4.0, 1.0, 3.0, 2.0]).unwrap();
        let found = samples.summary();
        assert_eq!((found.median, found.lower_quartile, found.upper_quartile), (2.5, 1.75, 3.25));
        assert_eq!((found.least, found.greatest), (1.0, 4.0));
        assert_eq!(Samples::one(7.0).median(), 7.0);
    }

    #[test]
    fn nothing_and_no_numbers_are_no_samples() {
        assert!(Samples::new(Vec::new()).is_none());
        assert!(Samples::new(vec![1.0, f64::NAN]).is_none());
    }
}
