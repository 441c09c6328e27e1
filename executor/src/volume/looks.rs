//! Looks at the paths of exports that sessions use: another directory, or mount, may be there by
//! now.
//!
//! Invariant: a directory that does not answer has one thread, however often a look is wished.

use std::{
    collections::{HashMap, hash_map::Entry},
    sync::{Arc, Mutex},
};

use super::end_all;
use crate::service::ServiceState;

/// Ends the sessions whose export's path names another directory by now. Waits for nothing.
pub fn end_replaced(shared: &Arc<ServiceState>) {
    for (path, directory) in shared.volumes.directories_in_use() {
        let number = Arc::as_ptr(&directory) as usize;
        if shared.volumes.looks.begin(number) {
            let shared = shared.clone();
            tokio::task::spawn_blocking(move || {
                loop {
                    if !directory.is_at(&path) {
                        let sessions =
                            shared.volumes.sessions_of(&path, |its| its.is_same(&directory));
                        end_all(&shared, sessions);
                    }
                    if shared.volumes.looks.end(number) {
                        break;
                    }
                }
            });
        }
    }
}

/// Looks at work, by directory.
#[derive(Debug, Default)]
pub struct Looks(Mutex<HashMap<usize, LookState>>);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LookState {
    AtWork,
    /// It is to be done once more: what it sees may be older than the last wish.
    Again,
}

impl Looks {
    /// Returns true if the caller is to look; else the one at work looks once more.
    fn begin(&self, number: usize) -> bool {
        let mut looks = self.0.lock().expect("not poisoned");
        match looks.entry(number) {
            Entry::Occupied(mut at_work) => {
                at_work.insert(LookState::Again);
                false
            }
            Entry::Vacant(entry) => {
                entry.insert(LookState::AtWork);
                true
            }
        }
    }

    /// Returns true if the look is over; else it is to be done once more.
    fn end(&self, number: usize) -> bool {
        let mut looks = self.0.lock().expect("not poisoned");
        if looks.remove(&number) == Some(LookState::Again) {
            looks.insert(number, LookState::AtWork);
            return false;
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_thread_looks_at_a_directory_however_often_that_is_wished() {
        let looks = Looks::default();
        assert!(looks.begin(1) && looks.begin(2));
        assert!((0..1000).all(|_| !looks.begin(1)));
        // Once more for all wishes since, and then it is over.
        assert!(!looks.end(1) && looks.end(1) && looks.end(2));
        assert!(looks.begin(1));
    }
}
