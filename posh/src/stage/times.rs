//! When what happened in this process, for a session that is traced. Only the start
//! is noted before it is known whether anybody wants to know: that costs no system call (vdso(7)).

use posh_proto::{clock::monotonic_ns, stage::Times};

/// The moment when this program began.
#[derive(Clone, Copy)]
pub struct Start(u64);

impl Start {
    /// Now.
    pub fn now() -> Self {
        Self(monotonic_ns())
    }
}

/// What the gateway will be told; in a session that is not traced, nothing.
pub struct Noted(Option<Times>);

impl Noted {
    /// Since `start`, if the session is traced.
    pub fn since(start: Start, is_traced: bool) -> Self {
        Self(is_traced.then(|| Times { started_ns: start.0, ..Times::default() }))
    }

    /// As far as it has come.
    pub fn so_far(&self) -> Option<Times> {
        self.0
    }

    /// The gateway is about to be asked.
    pub fn enlisted(&mut self) {
        self.note(|times| &mut times.enlisted_ns);
    }

    /// The directive has come.
    pub fn directed(&mut self) {
        self.note(|times| &mut times.directed_ns);
    }

    /// Bytes were written; only the first time counts.
    pub fn wrote(&mut self) {
        self.note(|times| &mut times.first_byte_ns);
    }

    /// All is over.
    pub fn ended(&mut self) {
        self.note(|times| &mut times.ended_ns);
    }

    fn note(&mut self, which: impl FnOnce(&mut Times) -> &mut u64) {
        if let Some(moment) = self.0.as_mut().map(which).filter(|moment| **moment == 0) {
            *moment = monotonic_ns();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_moment_counts() {
        let mut noted = Noted::since(Start::now(), true);
        noted.wrote();
        let first = noted.so_far().unwrap();
        noted.wrote();
        assert_eq!(noted.so_far(), Some(first));
        assert!(
            first.started_ns > 0 && first.started_ns <= first.first_byte_ns && first.ended_ns == 0
        );
    }

    #[test]
    fn unasked_nothing_is_noted() {
        let mut noted = Noted::since(Start::now(), false);
        noted.ended();
        assert_eq!(noted.so_far(), None);
    }
}
