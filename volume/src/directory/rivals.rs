//! Whether somebody else is at work, too. What is rationed so that others get their share costs nothing where
//! there are no others.

use std::{
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

/// So long after its last piece of work somebody counts as being at work: commands of a shell follow one another sooner.
const MEMORY: Duration = Duration::from_millis(100);

/// Who is at work, by the names of accounts.
#[derive(Debug, Default)]
pub struct Rivals(Mutex<Latest>);

#[derive(Debug, Default)]
struct Latest {
    last: Option<(String, Instant)>,
    /// Somebody else, before that.
    before: Option<(String, Instant)>,
}

impl Rivals {
    /// Somebody is at work now.
    pub fn note(&self, name: &str, now: Instant) {
        let mut latest = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match &mut latest.last {
            Some((last, at)) if last == name => *at = now,
            last => latest.before = last.replace((name.to_owned(), now)),
        }
    }

    /// Whether somebody other than `name` was a moment ago.
    #[must_use]
    pub fn has_rival(&self, name: &str, now: Instant) -> bool {
        let latest = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_rival = |(other, at): &(String, Instant)| other != name && now.saturating_duration_since(*at) < MEMORY;
        [&latest.last, &latest.before].into_iter().flatten().any(is_rival)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_was_at_work_a_moment_ago_is_a_rival_of_all_others() {
        let began = Instant::now();
        let after = |milliseconds| began + Duration::from_millis(milliseconds);
        let rivals = Rivals::default();
        rivals.note("ada", after(0));
        assert!(!rivals.has_rival("ada", after(1)) && rivals.has_rival("bob", after(1)));
        rivals.note("bob", after(10));
        for milliseconds in 20..90 {
            rivals.note("ada", after(milliseconds));
        }
        assert!(rivals.has_rival("ada", after(109)) && !rivals.has_rival("ada", after(110)));
        assert!(rivals.has_rival("bob", after(110)) && rivals.has_rival("eve", after(110)));
    }
}
