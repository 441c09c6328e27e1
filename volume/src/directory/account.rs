//! Fair shares of the resources that all sessions of a machine share: memory for answers,
//! descriptors, places in queues. Each is a [`Pool`] with usage by [`Account`]: one identity, with
//! all its sessions.
//!
//! Invariant: an account that uses nothing of a pool finds room in it, however many accounts take
//! what they can. An account may have as much as it leaves free (dynamic thresholds, Choudhury and
//! Hahne, 1998): one takes half, two a third each, and so on.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
    thread,
};

use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

/// Divisor for CPU-bound work of one account: half of the processors, at least one.
const STEPS_PART: usize = 2;

/// An identity that shares are counted for.
#[derive(Debug)]
pub struct Account {
    name: String,
    /// Permits for steps of long operations; see [`super::steps`].
    steps: Arc<Semaphore>,
}

/// A limited resource, shared by all accounts.
#[derive(Debug)]
pub struct Pool {
    limit: usize,
    /// Limit for one account, even if no other uses the pool.
    own_limit: usize,
    state: Mutex<PoolState>,
    returned: Notify,
    turns: Mutex<HashMap<String, Turn>>,
}

/// Lock held by an account's first waiter, so that a returned charge wakes only one of them.
type Turn = Arc<tokio::sync::Mutex<()>>;

#[derive(Debug, Default)]
struct PoolState {
    used: usize,
    by: HashMap<String, usize>,
}

/// A share taken from a pool; dropping it returns it.
#[derive(Debug)]
#[must_use = "it is given back when dropped"]
pub struct Charge {
    pool: Arc<Pool>,
    account: Arc<Account>,
    amount: usize,
}

impl Account {
    /// Creates an account with that name. Pools count accounts of one name as one.
    #[must_use]
    pub fn named(name: &str) -> Arc<Self> {
        let processors = thread::available_parallelism().map_or(1, usize::from);
        let steps = (processors / STEPS_PART).max(1);
        Arc::new(Self { name: name.to_owned(), steps: Arc::new(Semaphore::new(steps)) })
    }

    /// Waits for a permit for one step of a long, CPU-bound operation.
    pub async fn step(&self) -> Option<OwnedSemaphorePermit> {
        // The semaphore is never closed.
        self.steps.clone().acquire_owned().await.ok()
    }

    /// Returns the identity.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }
}

/// Usage of a limited resource, as it counts for one account.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolUsage {
    /// The account's part of `used`.
    pub own: usize,
    /// Usage by all accounts.
    pub used: usize,
    /// Size of the resource.
    pub limit: usize,
}

impl PoolUsage {
    /// Returns true if the account may take `want` more.
    #[must_use]
    pub fn may_take(self, want: usize) -> bool {
        let free = self.limit.saturating_sub(self.used);
        want <= free && (self.own == 0 || self.own.saturating_add(want) <= free)
    }
}

impl Pool {
    /// Creates an unused pool.
    #[must_use]
    pub fn new(limit: usize, own_limit: usize) -> Arc<Self> {
        Arc::new(Self {
            limit,
            own_limit,
            state: Mutex::default(),
            returned: Notify::new(),
            turns: Mutex::default(),
        })
    }

    /// Takes `amount` if it is within the account's share.
    pub fn try_take(self: &Arc<Self>, account: &Arc<Account>, amount: usize) -> Option<Charge> {
        let mut state = self.state.lock().expect("not poisoned");
        let own = state.by.get(&account.name).copied().unwrap_or_default();
        let usage = PoolUsage { own, used: state.used, limit: self.limit };
        let fits = own + amount <= self.own_limit && usage.may_take(amount);
        fits.then(|| {
            state.used += amount;
            *state.by.entry(account.name.clone()).or_default() += amount;
            Charge { pool: self.clone(), account: account.clone(), amount }
        })
    }

    /// Waits until `amount` is within the account's share, and takes it. `amount` is capped at what
    /// the account can ever get.
    pub async fn take(self: &Arc<Self>, account: &Arc<Account>, amount: usize) -> Charge {
        let amount = amount.min(self.own_limit).min(self.limit / 2);
        let turn = self.turn(account);
        let _turn = turn.lock().await;
        loop {
            let returned = self.returned.notified();
            tokio::pin!(returned);
            // Registers for wake-ups before the check, so that none is missed.
            returned.as_mut().enable();
            if let Some(charge) = self.try_take(account, amount) {
                return charge;
            }
            returned.await;
        }
    }

    fn turn(&self, account: &Account) -> Turn {
        let mut turns = self.turns.lock().expect("not poisoned");
        turns.retain(|_, turn| Arc::strong_count(turn) > 1);
        turns.entry(account.name.clone()).or_default().clone()
    }

    #[cfg(test)]
    fn used(&self) -> usize {
        self.state.lock().expect("not poisoned").used
    }
}

impl Charge {
    /// Returns the amount.
    #[must_use]
    pub fn amount(&self) -> usize {
        self.amount
    }

    /// Returns the pool.
    #[must_use]
    pub fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        let mut state = self.pool.state.lock().expect("not poisoned");
        state.used -= self.amount;
        if let Some(own) = state.by.get_mut(&self.account.name) {
            *own -= self.amount;
            if *own == 0 {
                state.by.remove(&self.account.name);
            }
        }
        drop(state);
        self.pool.returned.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_has_nothing_finds_room() {
        let pool = Pool::new(1024, 512);
        let mut held = Vec::new();
        for number in 0..8 {
            let account = Account::named(&number.to_string());
            let before = held.len();
            while let Some(charge) = pool.try_take(&account, 1) {
                held.push(charge);
            }
            assert!(held.len() > before, "account {number}");
        }
        assert_eq!(pool.used(), held.len());
        drop(held);
        assert_eq!(pool.used(), 0);
    }

    #[tokio::test]
    async fn one_that_waits_is_woken_and_holds_up_nobody_else() {
        let pool = Pool::new(100, 40);
        let (ada, bob) = (Account::named("ada"), Account::named("bob"));
        let held = pool.take(&ada, 1000).await;
        assert!(pool.try_take(&ada, 1).is_none());
        let (its, whose) = (pool.clone(), ada.clone());
        let waiting = tokio::spawn(async move { its.take(&whose, 30).await.amount });
        assert_eq!(pool.take(&bob, 20).await.amount, 20);
        // One that waits for something else of the same account is no concern of this pool's.
        let other = Pool::new(10, 10);
        assert_eq!(other.take(&ada, 5).await.amount, 5);
        drop(held);
        assert_eq!(waiting.await.unwrap(), 30);
    }
}
