//! A value that others wait for. Those who wait are woken in the order in which they came, which
//! tokio's `watch` leaves to chance.

use std::sync::{Mutex, MutexGuard};

use tokio::sync::Notify;

pub struct Shared<T> {
    value: Mutex<T>,
    changed: Notify,
}

impl<T: Clone> Shared<T> {
    pub fn new(value: T) -> Self {
        Self { value: Mutex::new(value), changed: Notify::new() }
    }

    pub fn get(&self) -> T {
        self.borrow().clone()
    }

    pub fn borrow(&self) -> MutexGuard<'_, T> {
        self.value.lock().unwrap()
    }

    pub fn set(&self, value: T) -> T {
        let before = std::mem::replace(&mut *self.borrow(), value);
        self.changed.notify_waiters();
        before
    }

    pub fn modify(&self, change: impl FnOnce(&mut T)) {
        change(&mut self.borrow());
        self.changed.notify_waiters();
    }

    /// The first value that is so.
    pub async fn when(&self, is_so: impl Fn(&T) -> bool) -> T {
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            let found = self.get();
            if is_so(&found) {
                return found;
            }
            changed.await;
        }
    }
}
