//! Fair shares of the resources that all sessions of a machine share: memory for answers,
//! descriptors, places in queues. Each is a [`Pool`] with usage by [`Account`]: one identity, with
//! all its sessions.
//!
//! Invariant: an account that uses nothing of a pool finds room in it, however many accounts take
//! what they can. An account may have as much as it leaves free (dynamic thresholds, Choudhury and
//! Hahne, 1998): one takes half, two a third each, and so on.
//!
//! Invariant: guests of an account ([`Caller::is_guest`]: other local users of its workstation)
//! never deny it half of what it can have. All of them together count as another account with the
//! other half at most, which they share by the same rule: one takes half of that.

use std::{
    cell::Cell,
    collections::HashMap,
    sync::{Arc, Mutex},
    thread,
};

use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

use crate::store::Caller;

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
    /// Usage by the guests of accounts, which is not part of that in `by`.
    guests: HashMap<String, GuestUsage>,
}

/// Usage by all guests of an account.
#[derive(Debug, Default)]
struct GuestUsage {
    used: usize,
    by: HashMap<Guest, usize>,
}

/// User ID of a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Guest(u32);

thread_local! {
    static GUEST: Cell<Option<Guest>> = const { Cell::new(None) };
}

/// While it lives, this thread takes charges for a caller.
#[must_use = "it ends when dropped"]
pub struct ChargedFor(std::marker::PhantomData<*const ()>);

impl ChargedFor {
    pub fn begin(caller: &Caller) -> Self {
        GUEST.set(Guest::of(caller));
        Self(std::marker::PhantomData)
    }
}

impl Drop for ChargedFor {
    fn drop(&mut self) {
        GUEST.set(None);
    }
}

impl Guest {
    /// Returns `None` for an account's own user.
    pub fn of(caller: &Caller) -> Option<Self> {
        caller.is_guest.then_some(Self(caller.uid))
    }

    /// The guest that this thread takes charges for.
    pub fn of_thread() -> Option<Self> {
        GUEST.get()
    }
}

/// A share taken from a pool; dropping it returns it.
#[derive(Debug)]
#[must_use = "it is given back when dropped"]
pub struct Charge {
    pool: Arc<Pool>,
    account: Arc<Account>,
    guest: Option<Guest>,
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

    /// Takes `amount` if it is within the account's share, or within that of the guest whose call
    /// this thread performs.
    pub fn try_take(self: &Arc<Self>, account: &Arc<Account>, amount: usize) -> Option<Charge> {
        self.try_take_for(account, Guest::of_thread(), amount)
    }

    /// Takes `amount` if it is within the account's share, or that of its guest.
    pub fn try_take_for(
        self: &Arc<Self>,
        account: &Arc<Account>,
        guest: Option<Guest>,
        amount: usize,
    ) -> Option<Charge> {
        let mut state = self.state.lock().expect("not poisoned");
        let PoolState { used, by, guests } = &mut *state;
        let own = by.get(&account.name).copied().unwrap_or_default();
        let of_guests = guests.get(&account.name);
        let all = of_guests.map_or(0, |guests| guests.used);
        let within = |own| PoolUsage { own, used: *used, limit: self.limit }.may_take(amount);
        let fits = own + all + amount <= self.own_limit
            && match guest {
                None => within(own),
                Some(guest) => {
                    let one = of_guests.and_then(|guests| guests.by.get(&guest)).copied();
                    let limit = self.own_limit.min(self.limit / 2) / 2;
                    let share = PoolUsage { own: one.unwrap_or_default(), used: all, limit };
                    within(all) && share.may_take(amount)
                }
            };
        fits.then(|| {
            *used += amount;
            match guest {
                None => *by.entry(account.name.clone()).or_default() += amount,
                Some(guest) => {
                    let guests = guests.entry(account.name.clone()).or_default();
                    guests.used += amount;
                    *guests.by.entry(guest).or_default() += amount;
                }
            }
            Charge { pool: self.clone(), account: account.clone(), guest, amount }
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
        match self.guest {
            None => subtract(&mut state.by, &self.account.name, self.amount),
            Some(guest) => {
                if let Some(guests) = state.guests.get_mut(&self.account.name) {
                    guests.used -= self.amount;
                    subtract(&mut guests.by, &guest, self.amount);
                    if guests.used == 0 {
                        state.guests.remove(&self.account.name);
                    }
                }
            }
        }
        drop(state);
        self.pool.returned.notify_waiters();
    }
}

/// Limit of a session's table for the call that this thread performs: guests leave half of it.
pub fn halved_for_guests(limit: usize) -> usize {
    if Guest::of_thread().is_some() { limit / 2 } else { limit }
}

/// Subtracts from one number, which is removed when it is 0.
fn subtract<K, Q>(numbers: &mut HashMap<K, usize>, key: &Q, amount: usize)
where
    K: std::borrow::Borrow<Q> + Eq + std::hash::Hash,
    Q: Eq + std::hash::Hash + ?Sized,
{
    if let Some(number) = numbers.get_mut(key) {
        *number -= amount;
        if *number == 0 {
            numbers.remove(key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::directory::{Directory, DirectorySession, Liveness, Machine, Mutability, Rights};

    #[test]
    fn guests_leave_half_to_the_account_and_something_to_each_other() {
        let ada = Account::named("ada");
        for (limit, own_limit) in [(4096, 256), (1024, 1024)] {
            let pool = Pool::new(limit, own_limit);
            let take = |guest: Option<u32>| {
                let guest = guest.map(Guest);
                let charges = std::iter::from_fn(|| pool.try_take_for(&ada, guest, 1));
                charges.collect::<Vec<_>>()
            };
            let most = own_limit.min(limit / 2);
            let guests = [take(Some(2000)), take(Some(2001)), take(Some(2002))];
            let counts = guests.each_ref().map(Vec::len);
            assert_eq!(counts[0], most / 4, "{counts:?}");
            assert!(counts.iter().all(|count| *count > 0), "{counts:?}");
            assert!(counts.iter().sum::<usize>() <= most / 2, "{counts:?}");
            let own = take(None);
            assert!(own.len() >= most / 2, "{}", own.len());
            drop((guests, own));
            let state = pool.state.lock().unwrap();
            assert!(state.used == 0 && state.by.is_empty() && state.guests.is_empty());
        }
    }

    #[test]
    fn a_thread_takes_for_the_guest_whose_call_it_performs() {
        let (ada, pool) = (Account::named("ada"), Pool::new(4096, 256));
        let caller = |uid, is_guest| Caller { uid, is_guest, ..Caller::default() };
        let taken = |caller: &Caller| {
            let _charged = ChargedFor::begin(caller);
            std::iter::from_fn(|| pool.try_take(&ada, 1)).collect::<Vec<_>>().len()
        };
        assert_eq!([taken(&caller(2000, true)), taken(&caller(0, false))], [64, 256]);
        assert!(Guest::of_thread().is_none());
    }

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
    async fn jobs_of_a_session_take_for_their_callers() {
        let top = tempfile::tempdir().unwrap();
        let machine = Machine::start().unwrap();
        let directory =
            Directory::open(machine, top.path(), Rights::Own, Mutability::ReadWrite).unwrap();
        let session = DirectorySession::open(directory, Liveness::Own);
        for is_guest in [true, false] {
            let caller = Caller { uid: 2000, is_guest, ..Caller::default() };
            let seen = session.0.as_caller(&caller, |_| Ok(Guest::of_thread())).await.unwrap();
            assert_eq!(seen, is_guest.then_some(Guest(2000)));
        }
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
