//! Processes with an unanswered request to the gateway: stage programs that enlist, and shells'
//! children that ask before they execute a command. They sleep because of the gateway, however long
//! it takes.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

use crate::enlisted::Pid;

/// Number of open requests per process.
#[derive(Debug, Clone, Default)]
pub struct Asking(Arc<Mutex<HashMap<Pid, u32>>>);

/// One open request. Drop it when it is answered, or when the assembler knows the process by its
/// request.
#[derive(Debug)]
pub struct OpenQuestion {
    asked_by: Pid,
    all: Asking,
}

impl Asking {
    /// Registers a request of this process.
    pub fn begin(&self, asked_by: Pid) -> OpenQuestion {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner).entry(asked_by).or_default() += 1;
        OpenQuestion { asked_by, all: self.clone() }
    }

    /// Returns true if the process has an open request.
    pub fn asks(&self, pid: Pid) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).contains_key(&pid)
    }
}

impl Drop for OpenQuestion {
    fn drop(&mut self) {
        let mut all = self.all.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(questions) = all.get_mut(&self.asked_by) {
            *questions -= 1;
            if *questions == 0 {
                all.remove(&self.asked_by);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_asks_until_its_last_question_is_answered() {
        let asking = Asking::default();
        let (first, second) = (asking.begin(1), asking.begin(1));
        drop(first);
        assert!(asking.asks(1) && !asking.asks(2));
        drop(second);
        assert!(!asking.asks(1));
    }
}
