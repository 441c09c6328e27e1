//! Times of this process's steps, for a traced session. Only the start is noted before it is known
//! if the session is traced: that costs no system call (vdso(7)).

use posh_proto::{clock::monotonic_ns, stage::Times};

/// Time of this program's start.
#[derive(Clone, Copy)]
pub struct StartTime(u64);

impl StartTime {
    /// Now.
    pub fn now() -> Self {
        Self(monotonic_ns())
    }
}

/// Times to report to the gateway; none in a session that is not traced.
pub struct Noted(Option<Times>);

impl Noted {
    /// Since `start`, if the session is traced.
    pub fn since(start: StartTime, is_traced: bool) -> Self {
        Self(is_traced.then(|| Times { started_ns: start.0, ..Times::default() }))
    }

    /// Times so far.
    pub fn so_far(&self) -> Option<Times> {
        self.0
    }

    /// The command is about to be enlisted.
    pub fn enlisted(&mut self) {
        self.note(|times| &mut times.enlisted_ns);
    }

    /// The directive has arrived.
    pub fn directed(&mut self) {
        self.note(|times| &mut times.directed_ns);
    }

    /// Output was written; only the first time counts.
    pub fn wrote(&mut self) {
        self.note(|times| &mut times.first_byte_ns);
    }

    /// The command has ended.
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
        let mut noted = Noted::since(StartTime::now(), true);
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
        let mut noted = Noted::since(StartTime::now(), false);
        noted.ended();
        assert_eq!(noted.so_far(), None);
    }
}
