//! Marks of calls that have changed something, for the record of what a session did: an error alone
//! does not tell, since a call of several system calls can fail after the first one.
//!
//! Invariant: an [`EffectMark`] is set before a system call that can change an export in part and
//! fail ([`begin`]), and at once after one that either changes it or fails ([`made`]). Each system
//! call that changes names, contents or attributes of an export is made by one of the two.

use std::{
    cell::RefCell,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

/// Mark that one change, a call or one of a batch of writes, has begun.
#[derive(Debug, Clone, Default)]
pub struct EffectMark(Arc<AtomicBool>);

/// The changes of one call.
pub type Effects = Arc<[EffectMark]>;

tokio::task_local! {
    /// Changes of the current call, which its jobs set.
    pub static EFFECTS: Effects;
}

thread_local! {
    /// Changes of this thread's job, and which of them is next.
    static OF_JOB: RefCell<Option<OfJob>> = const { RefCell::new(None) };
}

struct OfJob {
    effects: Effects,
    current: usize,
}

impl EffectMark {
    /// Returns true if the change may have happened, at least in part.
    #[must_use]
    pub fn has_begun(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// Returns those of the current call.
pub fn of_call() -> Option<Effects> {
    EFFECTS.try_with(Clone::clone).ok()
}

/// Restores what this thread noted before.
pub struct Noting(Option<OfJob>);

/// Has this thread set these, until the result is dropped.
pub fn note_in(effects: Option<Effects>) -> Noting {
    let new = effects.map(|effects| OfJob { effects, current: 0 });
    Noting(OF_JOB.replace(new))
}

impl Drop for Noting {
    fn drop(&mut self) {
        OF_JOB.replace(self.0.take());
    }
}

/// Makes the one of that number the next change of this thread's job.
pub fn turn_to(number: usize) {
    OF_JOB.with_borrow_mut(|job| {
        if let Some(job) = job {
            job.current = number;
        }
    });
}

/// Notes that the change begins.
pub fn begin() {
    OF_JOB.with_borrow(|job| {
        if let Some(effect) = job.as_ref().and_then(|job| job.effects.get(job.current)) {
            effect.0.store(true, Ordering::Release);
        }
    });
}

/// Notes the change if its system call, which changes all or nothing, has succeeded.
pub fn made<T, E>(result: Result<T, E>) -> Result<T, E> {
    if result.is_ok() {
        begin();
    }
    result
}

/// Works on a file that has no name yet: that changes nothing of the export.
pub fn without_name<T>(work: impl FnOnce() -> T) -> T {
    let _noting = note_in(None);
    work()
}
