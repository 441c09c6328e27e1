//! Calls of sessions that were not resumed in time: the next session of the same name gets the
//! outcomes of its calls from them.

use std::time::{Duration, Instant};

use bytes::Bytes;

use super::{MAX_SESSIONS, MAX_SESSIONS_OF_ONE};

/// Time for which they are kept: a workstation may be suspended.
pub const KEPT: Duration = Duration::from_secs(3600);
/// Bytes charged for all calls, and for those of one identity. They outlive their identity's
/// rights, and must not reduce others' shares of calls.
const BYTES: usize = 8 << 20;
const BYTES_OF_ONE: usize = 2 << 20;

/// All of them, oldest first.
#[derive(Debug)]
pub struct LeftCalls<T>(Vec<Of<T>>);

#[derive(Debug)]
struct Of<T> {
    whose: Whose,
    calls: T,
    bytes: usize,
    at: Instant,
}

/// The session that they belong to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Whose {
    pub identity: Option<String>,
    pub name: Bytes,
    pub export: String,
}

impl<T> Default for LeftCalls<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<T> LeftCalls<T> {
    /// Keeps the calls of a session, which take `bytes`, unless there is no room for them. Makes
    /// room by dropping its identity's own oldest, never another's.
    pub fn add(&mut self, whose: Whose, calls: T, bytes: usize) {
        let is_other = |its: &Whose| (&its.identity, &its.name) != (&whose.identity, &whose.name);
        self.0.retain(|its| its.at.elapsed() < KEPT && is_other(&its.whose));
        while !self.has_room(&whose, bytes) {
            let Some(oldest) = self.0.iter().position(|its| its.whose.identity == whose.identity)
            else {
                return tracing::warn!(
                    bytes,
                    "the calls of a session that has ended are not kept: there are too many"
                );
            };
            self.0.remove(oldest);
        }
        self.0.push(Of { whose, calls, bytes, at: Instant::now() });
    }

    fn has_room(&self, whose: &Whose, bytes: usize) -> bool {
        let own = || self.0.iter().filter(|its| its.whose.identity == whose.identity);
        let sum =
            |of: &mut dyn Iterator<Item = &Of<T>>| of.map(|its| its.bytes).sum::<usize>() + bytes;
        own().count() < MAX_SESSIONS_OF_ONE
            && self.0.len() < MAX_SESSIONS
            && sum(&mut own()) <= BYTES_OF_ONE
            && sum(&mut self.0.iter()) <= BYTES
    }

    /// Takes those of an earlier session of that name.
    pub fn take(&mut self, whose: &Whose) -> Option<T> {
        self.0.retain(|its| its.at.elapsed() < KEPT);
        let found = self.0.iter().position(|its| its.whose == *whose)?;
        Some(self.0.remove(found).calls)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(identity: &str, name: usize) -> Whose {
        let name = Bytes::from(name.to_string());
        Whose { identity: Some(identity.to_owned()), name, export: "logs".to_owned() }
    }

    #[test]
    fn calls_of_ended_sessions_have_a_bound() {
        let mut left = LeftCalls::default();
        left.add(of("bob", 0), 'b', 1000);
        for identity in ["ada", "cyd", "dee", "eve"] {
            for number in 0..5 {
                left.add(of(identity, number), 'x', BYTES_OF_ONE / 4);
            }
        }
        // The newest of each are kept, as far as there is room; bob's were added first.
        let known = |left: &mut LeftCalls<char>, identity: &str| {
            (0..5).filter(|n| left.take(&of(identity, *n)).is_some()).count()
        };
        assert_eq!(left.take(&of("ada", 0)), None);
        assert_eq!(
            ["ada", "cyd", "dee", "eve"].map(|identity| known(&mut left, identity)),
            [4, 4, 4, 3]
        );
        assert_eq!(left.take(&of("bob", 0)), Some('b'));
        left.add(of("ada", 0), 'x', BYTES_OF_ONE + 1);
        for number in 0..MAX_SESSIONS_OF_ONE + 2 {
            left.add(of("cyd", number), 'x', 1);
        }
        assert_eq!(left.take(&of("ada", 0)), None);
        assert_eq!((left.0.len(), left.take(&of("cyd", 1))), (MAX_SESSIONS_OF_ONE, None));
    }
}
