//! Accounts with recent CPU use. Rationing must cost nothing for a single active account; an almost
//! idle account doesn't count as a rival, since the share kept for it would be wasted.

use std::{
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

/// Half-life of an account's counted use: a shell's commands follow one another sooner.
const HALF_LIFE: Duration = Duration::from_millis(50);

/// Decayed use from which an account counts as active: a constant 1.4 % of a processor, or one
/// start of a command.
const AT_WORK: Duration = Duration::from_millis(1);

/// Limit of tracked accounts; those with the most use are kept.
const MOST: usize = 16;

/// Recent use of processors by account.
#[derive(Debug, Default)]
pub struct Rivals(Mutex<Vec<Use>>);

#[derive(Debug)]
struct Use {
    name: String,
    used: Duration,
    at: Instant,
}

impl Use {
    fn now(&self, now: Instant) -> Duration {
        let age = now.saturating_duration_since(self.at).as_secs_f64();
        self.used.mul_f64((-age / HALF_LIFE.as_secs_f64()).exp2())
    }
}

impl Rivals {
    /// Adds `used` to an account's CPU use.
    pub fn note(&self, name: &str, used: Duration, now: Instant) {
        let mut uses = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = uses.iter_mut().find(|known| known.name == name) {
            (known.used, known.at) = (known.now(now) + used, now);
            return;
        }
        if uses.len() == MOST
            && let Some(least) = (0..MOST).min_by_key(|at| uses[*at].now(now))
        {
            uses.swap_remove(least);
        }
        uses.push(Use { name: name.to_owned(), used, at: now });
    }

    /// Returns true if an account other than `name` is active.
    #[must_use]
    pub fn has_rival(&self, name: &str, now: Instant) -> bool {
        let uses = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        uses.iter().any(|other| other.name != name && other.now(now) >= AT_WORK)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_uses_something_is_a_rival_of_all_others_for_a_while() {
        let began = Instant::now();
        let after = |milliseconds| began + Duration::from_millis(milliseconds);
        let used = Duration::from_millis;
        let rivals = Rivals::default();
        rivals.note("ada", used(4), after(0));
        assert!(!rivals.has_rival("ada", after(1)) && rivals.has_rival("bob", after(1)));
        assert!(rivals.has_rival("bob", after(100)) && !rivals.has_rival("bob", after(101)));
        // A little now and then is not to be at work.
        for milliseconds in 1..20 {
            rivals.note("bob", Duration::from_micros(100), after(milliseconds * 80));
        }
        assert!(!rivals.has_rival("ada", after(20 * 80)));
        // Whoever uses most is not forgotten for others.
        rivals.note("ada", used(9), after(2000));
        for number in 0..99 {
            rivals.note(&format!("somebody {number}"), Duration::from_micros(1), after(2001));
        }
        assert!(rivals.has_rival("bob", after(2002)));
    }
}
