//! Admission control: use of the machine by identity, and room for more. A run is admitted with all
//! that it will need, or refused at once with the limit that it exceeds. Nothing queues, since the
//! workstation can run the commands itself.

mod pressure;

use std::{
    collections::HashMap,
    fs,
    ops::{AddAssign, SubAssign},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use posh_proto::executor::{self, StatusReply, rejected::Kind};
use tokio::sync::watch;

use self::pressure::Pressure;
use crate::{
    callers::Caller,
    config::{Bounds, Limits},
    error::Refusal,
};

/// An identity with running work may have three times what would be left free. So one greedy
/// identity gets three quarters, two get 43 % each, and something is always left for a later one
/// ("dynamic thresholds", Choudhury and Hahne, 1998).
const SHARE_OF_FREE: usize = 3;

/// Calls open at a time, of all identities: one that waits for its first message costs some 10 KB,
/// and a frame of up to 32 KiB where its account is full. Far more than runs, so that a run too
/// many gets a refusal with a message.
const OPEN_CALLS: usize = 4096;
/// Calls open at a time, of one identity.
const OPEN_CALLS_OF_ONE: usize = 2048;

/// The kernel's default of kernel.pty.max.
const USUAL_PTYS: usize = 4096;
/// Part of the machine's pseudo-terminals that runs may use, and of these, one of several
/// identities.
const PART_OF_PTYS: usize = 4;

/// Connections of one identity without a limit of its own: each workstation has one or two, and
/// each costs up to its HTTP/2 window.
const CONNECTIONS_OF_ONE: usize = 16;

/// Burst of calls, in seconds of the steady rate.
const BURST_S: f64 = 2.0;

/// Resources that a run needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Need {
    /// Its commands.
    pub processes: usize,
    /// Bytes held for its streams, by the executor and in pipes, and for its specification.
    pub buffered_bytes: usize,
    /// Its open files in this program.
    pub descriptors: usize,
    /// Pseudo-terminals, of the machine's.
    pub ptys: usize,
}

/// Resources of this program and of the machine that runs share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capacity {
    /// Files that may be open.
    pub descriptors: usize,
    /// Pseudo-terminals.
    pub ptys: usize,
}

impl Capacity {
    /// With so many open files, and a quarter of the machine's pseudo-terminals: logins need some
    /// too.
    #[must_use]
    pub fn of_machine(descriptors: usize) -> Self {
        let ptys = fs::read_to_string("/proc/sys/kernel/pty/max")
            .ok()
            .and_then(|text| text.trim().parse().ok());
        Self { descriptors, ptys: (ptys.unwrap_or(USUAL_PTYS) / PART_OF_PTYS).max(1) }
    }

    /// Bounds of descriptors and pseudo-terminals of one identity where several share the machine,
    /// also for the first one: nothing else bounds what one run takes.
    fn of_one(self, is_shared: bool) -> (Option<usize>, Option<usize>) {
        let descriptors = self.descriptors - self.descriptors / (SHARE_OF_FREE + 1);
        match is_shared {
            true => (Some(descriptors), Some((self.ptys / PART_OF_PTYS).max(1))),
            false => (None, None),
        }
    }
}

/// Accounts of all identities; `None` stands for callers without one.
#[derive(Debug)]
pub struct Load {
    bounds: Bounds,
    capacity: Capacity,
    /// Several identities share the machine.
    is_shared: AtomicBool,
    state: Mutex<LoadState>,
    running: watch::Sender<usize>,
    pressure: Pressure,
}

#[derive(Debug, Default)]
struct LoadState {
    whole: Usage,
    by: HashMap<Option<String>, Account>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Usage {
    runs: usize,
    need: Need,
    connections: usize,
    calls: usize,
    refused: u64,
}

#[derive(Debug, Default)]
struct Account {
    usage: Usage,
    calls: Option<Bucket>,
}

/// Token bucket of calls.
#[derive(Debug)]
struct Bucket {
    left: f64,
    since: Instant,
}

/// One limit, for one request for more.
pub(crate) struct Limit {
    /// Its name in messages.
    pub name: &'static str,
    /// Amount requested.
    pub want: usize,
    /// Amount that the caller has.
    pub own: usize,
    /// The caller's own bound.
    pub own_limit: Option<usize>,
    /// Amount that all have.
    pub whole: usize,
    /// The executor's bound.
    pub whole_limit: usize,
}

/// Room for a run; returned when dropped.
#[derive(Debug)]
pub struct RunShare {
    load: Arc<Load>,
    identity: Option<String>,
    need: Need,
}

/// Room for waiting bytes; returned when dropped.
#[derive(Debug)]
pub struct BytesShare {
    load: Arc<Load>,
    identity: Option<String>,
    need: Need,
}

/// Room for a connection; returned when dropped.
#[derive(Debug)]
pub struct ConnectionShare {
    load: Arc<Load>,
    identity: Option<String>,
}

/// Room for an open call; returned when dropped.
#[derive(Debug)]
pub struct CallShare {
    load: Arc<Load>,
    identity: Option<String>,
}

impl Load {
    /// With nothing in use. `is_shared` if several identities share the machine.
    #[must_use]
    pub fn new(bounds: Bounds, capacity: Capacity, is_shared: bool) -> Self {
        Self {
            pressure: Pressure::new(&bounds),
            bounds,
            capacity,
            is_shared: is_shared.into(),
            state: Mutex::default(),
            running: watch::Sender::new(0),
        }
    }

    /// Sets if several identities share the machine from now on.
    pub(crate) fn share(&self, is_shared: bool) {
        self.is_shared.store(is_shared, Ordering::Relaxed);
    }

    /// Room for a run, or the reason of its refusal.
    pub(crate) fn admit_run(
        self: &Arc<Self>,
        caller: &Caller,
        need: Need,
    ) -> Result<RunShare, Refusal> {
        let pressure = self.pressure.refusal();
        let is_shared = self.is_shared.load(Ordering::Relaxed);
        let mut state = self.state.lock().expect("not poisoned");
        let usage = state.account(caller).usage;
        let refused_by_machine = pressure.filter(|_| !self.is_below_share(&state, usage));
        let runs = Limit {
            name: "concurrent runs",
            want: 1,
            own: usage.runs,
            own_limit: caller.limits.runs,
            whole: state.whole.runs,
            whole_limit: self.bounds.runs,
        };
        let needs = self.limits_of(caller, usage.need, state.whole.need, need);
        let full =
            [runs].iter().chain(&needs).find_map(|limit| limit.refusal(caller.name(), is_shared));
        if let Some(message) = full.or(refused_by_machine) {
            state.whole.refused += 1;
            state.account(caller).usage.refused += 1;
            return Err(Refusal::new(Kind::Overloaded, message));
        }
        state.whole.begin(need);
        state.account(caller).usage.begin(need);
        let running = state.whole.runs;
        drop(state);
        self.running.send_replace(running);
        Ok(RunShare { load: self.clone(), identity: caller.identity.clone(), need })
    }

    /// Room for waiting bytes, or the reason of a refusal.
    pub(crate) fn hold(
        self: &Arc<Self>,
        caller: &Caller,
        buffered_bytes: usize,
    ) -> Result<BytesShare, Refusal> {
        let need = Need { buffered_bytes, ..Need::default() };
        let is_shared = self.is_shared.load(Ordering::Relaxed);
        let mut state = self.state.lock().expect("not poisoned");
        let own = state.account(caller).usage.need;
        let limits = self.limits_of(caller, own, state.whole.need, need);
        if let Some(message) = limits
            .iter()
            .filter(|limit| limit.want > 0)
            .find_map(|l| l.refusal(caller.name(), is_shared))
        {
            state.whole.refused += 1;
            state.account(caller).usage.refused += 1;
            return Err(Refusal::new(Kind::Overloaded, message));
        }
        state.whole.need += need;
        state.account(caller).usage.need += need;
        Ok(BytesShare { load: self.clone(), identity: caller.identity.clone(), need })
    }

    /// The limits of a run's needs, given the use of the caller and of all.
    fn limits_of(&self, caller: &Caller, own: Need, whole: Need, need: Need) -> [Limit; 4] {
        let (descriptors, ptys) = self.capacity.of_one(self.is_shared.load(Ordering::Relaxed));
        let limit = |name, of: fn(&Need) -> usize, own_limit, whole_limit| Limit {
            name,
            want: of(&need),
            own: of(&own),
            own_limit,
            whole: of(&whole),
            whole_limit,
        };
        let (limits, bounds) = (&caller.limits, &self.bounds);
        [
            limit("processes", |need| need.processes, limits.processes, bounds.processes),
            limit(
                "buffered bytes",
                |need| need.buffered_bytes,
                limits.buffered_bytes,
                bounds.buffered_bytes,
            ),
            limit("open files", |need| need.descriptors, descriptors, self.capacity.descriptors),
            limit("pseudo-terminals", |need| need.ptys, ptys, self.capacity.ptys),
        ]
    }

    /// Room for a connection, or the reason of its refusal.
    pub(crate) fn admit_connection(
        self: &Arc<Self>,
        caller: &Caller,
    ) -> Result<ConnectionShare, Refusal> {
        let mut state = self.state.lock().expect("not poisoned");
        let own = state.account(caller).usage.connections;
        let limit = Limit {
            name: "connections",
            want: 1,
            own,
            own_limit: caller
                .limits
                .connections
                .or(caller.identity.as_ref().map(|_| CONNECTIONS_OF_ONE)),
            whole: state.whole.connections,
            whole_limit: self.bounds.connections,
        };
        if let Some(message) = limit.refusal(caller.name(), self.is_shared.load(Ordering::Relaxed))
        {
            return Err(Refusal::new(Kind::Overloaded, message));
        }
        state.whole.connections += 1;
        state.account(caller).usage.connections += 1;
        Ok(ConnectionShare { load: self.clone(), identity: caller.identity.clone() })
    }

    /// Room for a call that stays open, or the reason of its refusal.
    pub(crate) fn admit_open_call(self: &Arc<Self>, caller: &Caller) -> Result<CallShare, Refusal> {
        let mut state = self.state.lock().expect("not poisoned");
        let limit = Limit {
            name: "open calls",
            want: 1,
            own: state.account(caller).usage.calls,
            own_limit: Some(OPEN_CALLS_OF_ONE),
            whole: state.whole.calls,
            whole_limit: OPEN_CALLS,
        };
        if let Some(message) = limit.refusal(caller.name(), self.is_shared.load(Ordering::Relaxed))
        {
            return Err(Refusal::new(Kind::Overloaded, message));
        }
        state.whole.calls += 1;
        state.account(caller).usage.calls += 1;
        Ok(CallShare { load: self.clone(), identity: caller.identity.clone() })
    }

    /// Returns true if others must cause the machine's load. The commands of one identity may make
    /// as much load as they like, but must not keep an identity from the machine that runs nothing,
    /// or less than its share.
    fn is_below_share(&self, state: &LoadState, own: Usage) -> bool {
        if !self.is_shared.load(Ordering::Relaxed) {
            return false;
        }
        let at_work = state.by.values().filter(|account| account.usage.runs > 0).count();
        own.runs == 0 || own.need.processes.saturating_mul(at_work) < state.whole.need.processes
    }

    /// Counts a call; refuses one beyond the rate.
    pub(crate) fn admit_call(&self, caller: &Caller) -> Result<(), Refusal> {
        let Some(rate) = caller.limits.calls_per_second else { return Ok(()) };
        let mut state = self.state.lock().expect("not poisoned");
        let account = state.account(caller);
        let full = f64::from(rate) * BURST_S;
        let bucket =
            account.calls.get_or_insert_with(|| Bucket { left: full, since: Instant::now() });
        let now = Instant::now();
        bucket.left = (bucket.left
            + now.duration_since(bucket.since).as_secs_f64() * f64::from(rate))
        .min(full);
        bucket.since = now;
        if bucket.left >= 1.0 {
            bucket.left -= 1.0;
            return Ok(());
        }
        account.usage.refused += 1;
        state.whole.refused += 1;
        let message =
            format!("{} is at its limit of {rate} calls a second on this executor", caller.name());
        Err(Refusal::new(Kind::Overloaded, message))
    }

    /// Resolves when no run is left.
    pub async fn idle(&self) {
        // The sender lives as long as we do.
        let _ = self.running.subscribe().wait_for(|running| *running == 0).await;
    }

    /// Number of running runs.
    #[must_use]
    pub fn running(&self) -> usize {
        *self.running.borrow()
    }

    /// Status for `caller`: its own account, and the sum of all.
    #[must_use]
    pub fn status(&self, caller: &Caller) -> StatusReply {
        let (load_average, memory_pressure) = self.pressure.now();
        let pressure = self.pressure.refusal();
        let mut state = self.state.lock().expect("not poisoned");
        let own = state.account(caller).usage;
        let refusing = pressure.filter(|_| !self.is_below_share(&state, own)).unwrap_or_default();
        let bounds = Limits {
            runs: Some(self.bounds.runs),
            processes: Some(self.bounds.processes),
            buffered_bytes: Some(self.bounds.buffered_bytes),
            connections: Some(self.bounds.connections),
            ..Limits::default()
        };
        StatusReply {
            identity: caller.identity.clone().unwrap_or_default(),
            user: caller.user.as_ref().map(|user| user.name.clone()).unwrap_or_default(),
            own: Some(own.reply(&caller.limits)),
            whole: Some(state.whole.reply(&bounds)),
            load_average,
            memory_pressure,
            refusing,
            ..StatusReply::default()
        }
    }
}

impl LoadState {
    fn account(&mut self, caller: &Caller) -> &mut Account {
        self.by.entry(caller.identity.clone()).or_default()
    }
}

impl AddAssign for Need {
    fn add_assign(&mut self, other: Self) {
        self.processes += other.processes;
        self.buffered_bytes += other.buffered_bytes;
        self.descriptors += other.descriptors;
        self.ptys += other.ptys;
    }
}

impl SubAssign for Need {
    fn sub_assign(&mut self, other: Self) {
        self.processes -= other.processes;
        self.buffered_bytes -= other.buffered_bytes;
        self.descriptors -= other.descriptors;
        self.ptys -= other.ptys;
    }
}

impl Usage {
    fn begin(&mut self, need: Need) {
        self.runs += 1;
        self.need += need;
    }

    fn end(&mut self, need: Need) {
        self.runs -= 1;
        self.need -= need;
    }

    fn reply(&self, limits: &Limits) -> executor::Usage {
        let limit = |limit: Option<usize>| limit.unwrap_or(0) as u64;
        executor::Usage {
            runs: self.runs as u64,
            max_runs: limit(limits.runs),
            processes: self.need.processes as u64,
            max_processes: limit(limits.processes),
            buffered_bytes: self.need.buffered_bytes as u64,
            max_buffered_bytes: limit(limits.buffered_bytes),
            connections: self.connections as u64,
            max_connections: limit(limits.connections),
            refused: self.refused,
        }
    }
}

impl Limit {
    /// Message about the limit that is exceeded, if one is.
    pub fn refusal(&self, who: &str, is_shared: bool) -> Option<String> {
        let Self { name, want, own, own_limit, whole, whole_limit } = self;
        if own_limit.is_some_and(|limit| own + want > limit) {
            return Some(format!("{who} is at its limit of {name} on this executor"));
        }
        let free = whole_limit.saturating_sub(*whole);
        if *want > free {
            return Some(format!("the executor is at its limit of {name}"));
        }
        // An identity that has nothing yet may take all that is free.
        if is_shared && *own > 0 && own + want > (free - want).saturating_mul(SHARE_OF_FREE) {
            return Some(format!(
                "{who} has its share of the executor's {name}; the rest is for others"
            ));
        }
        None
    }
}

impl RunShare {
    /// Returns what only the start needed: all descriptors but so many, and so many bytes.
    pub(crate) fn has_begun(&mut self, descriptors: usize, specification_bytes: usize) {
        let over = Need {
            descriptors: self.need.descriptors.saturating_sub(descriptors),
            buffered_bytes: specification_bytes.min(self.need.buffered_bytes),
            ..Need::default()
        };
        self.need -= over;
        let mut state = self.load.state.lock().expect("not poisoned");
        state.whole.need -= over;
        if let Some(account) = state.by.get_mut(&self.identity) {
            account.usage.need -= over;
        }
    }
}

impl Drop for RunShare {
    fn drop(&mut self) {
        let mut state = self.load.state.lock().expect("not poisoned");
        state.whole.end(self.need);
        if let Some(account) = state.by.get_mut(&self.identity) {
            account.usage.end(self.need);
        }
        let running = state.whole.runs;
        drop(state);
        self.load.running.send_replace(running);
    }
}

impl Drop for BytesShare {
    fn drop(&mut self) {
        let mut state = self.load.state.lock().expect("not poisoned");
        state.whole.need -= self.need;
        if let Some(account) = state.by.get_mut(&self.identity) {
            account.usage.need -= self.need;
        }
    }
}

impl ConnectionShare {
    /// Its identity; `None` without a proven one.
    pub(crate) fn identity(&self) -> Option<&str> {
        self.identity.as_deref()
    }
}

impl Drop for ConnectionShare {
    fn drop(&mut self) {
        let mut state = self.load.state.lock().expect("not poisoned");
        state.whole.connections -= 1;
        if let Some(account) = state.by.get_mut(&self.identity) {
            account.usage.connections -= 1;
        }
    }
}

impl Drop for CallShare {
    fn drop(&mut self) {
        let mut state = self.load.state.lock().expect("not poisoned");
        state.whole.calls -= 1;
        if let Some(account) = state.by.get_mut(&self.identity) {
            account.usage.calls -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Config;

    fn caller(name: &str, limits: Limits) -> Caller {
        Caller {
            identity: Some(name.to_owned()),
            limits,
            ..Caller::anybody(&Config::new(Vec::new()))
        }
    }

    fn load(runs: usize, is_shared: bool) -> Arc<Load> {
        let capacity = Capacity { descriptors: 1000, ptys: 64 };
        Arc::new(Load::new(Bounds { runs, ..Bounds::default() }, capacity, is_shared))
    }

    fn fill(load: &Arc<Load>, caller: &Caller) -> (Vec<RunShare>, String) {
        let mut shares = Vec::new();
        loop {
            match load
                .admit_run(caller, Need { processes: 1, buffered_bytes: 1, ..Need::default() })
            {
                Ok(share) => shares.push(share),
                Err(refusal) => return (shares, refusal.message),
            }
        }
    }

    #[test]
    fn nobody_gets_the_last_places_of_a_shared_executor() {
        let load = load(512, true);
        let (first, second, third) = (
            caller("a", Limits::default()),
            caller("b", Limits::default()),
            caller("c", Limits::default()),
        );
        let (of_first, why) = fill(&load, &first);
        assert_eq!(
            (of_first.len(), why.as_str()),
            (384, "a has its share of the executor's concurrent runs; the rest is for others")
        );
        let (of_second, _) = fill(&load, &second);
        assert!((90..128).contains(&of_second.len()), "{}", of_second.len());
        assert!(!fill(&load, &third).0.is_empty());
        drop(of_first);
        assert!(fill(&load, &second).0.len() > 200);
        assert_eq!(load.running(), of_second.len());
    }

    #[test]
    fn small_executors_are_fair_too() {
        for runs in 2..8 {
            let load = load(runs, true);
            let (first, _) = fill(&load, &caller("a", Limits::default()));
            let (second, _) = fill(&load, &caller("b", Limits::default()));
            assert!(!first.is_empty() && !second.is_empty(), "{runs}");
        }
    }

    #[test]
    fn who_is_alone_may_have_it_all() {
        let (shares, why) = fill(&load(3, false), &Caller::anybody(&Config::new(Vec::new())));
        assert_eq!(
            (shares.len(), why.as_str()),
            (3, "the executor is at its limit of concurrent runs")
        );
    }

    #[test]
    fn who_has_less_at_work_than_others_is_not_refused_by_the_load() {
        let capacity = Capacity { descriptors: 1000, ptys: 64 };
        let mut load = Load::new(Bounds::default(), capacity, true);
        load.pressure = Pressure::seen_as_busy();
        let load = Arc::new(load);
        let [ada, bob, eve] = ["ada", "bob", "eve"].map(|name| caller(name, Limits::default()));
        let admit = |caller: &Caller, processes: usize| {
            load.admit_run(caller, Need { processes, buffered_bytes: 1, ..Need::default() })
        };
        // The cause of the load is unknown, but an identity without running work has not made it.
        let of_ada = admit(&ada, 20).unwrap();
        let refused = admit(&ada, 1).unwrap_err();
        assert!(
            refused.kind == Kind::Overloaded && refused.message.contains("load average"),
            "{refused}"
        );
        assert!(load.status(&ada).refusing.contains("load average"));
        let _of_bob = [admit(&bob, 1).unwrap(), admit(&bob, 1).unwrap()];
        assert_eq!(load.status(&bob).refusing, "");
        let _of_eve = admit(&eve, 1).unwrap();
        drop(of_ada);
        // Two thirds are more than one half.
        assert!(admit(&bob, 1).is_err());
        let _one_more_of_eve = admit(&eve, 1).unwrap();
        assert!(admit(&eve, 1).is_err());
        load.share(false);
        let why = "who is alone keeps nobody out, and has a workstation";
        assert!(admit(&caller("new", Limits::default()), 1).is_err(), "{why}");
    }

    #[test]
    fn own_limits_name_themselves() {
        let load = load(512, true);
        let need = Need { processes: 4, buffered_bytes: 100, ..Need::default() };
        for (limits, shares, what) in [
            (Limits { runs: Some(2), ..Limits::default() }, 2, "concurrent runs"),
            (Limits { processes: Some(11), ..Limits::default() }, 2, "processes"),
            (Limits { buffered_bytes: Some(99), ..Limits::default() }, 0, "buffered bytes"),
        ] {
            let caller = caller(what, limits);
            let held: Vec<_> =
                (0..shares).map(|_| load.admit_run(&caller, need).unwrap()).collect();
            let refusal = load.admit_run(&caller, need).unwrap_err();
            assert_eq!(refusal.kind, Kind::Overloaded);
            assert_eq!(
                refusal.message,
                format!("{what} is at its limit of {what} on this executor")
            );
            assert_eq!(load.status(&caller).own.unwrap().refused, 1);
            drop(held);
            assert_eq!(load.status(&caller).own.unwrap().processes, 0);
        }
    }

    #[test]
    fn calls_are_counted_by_the_second() {
        let load = load(1, false);
        let caller = caller("a", Limits { calls_per_second: Some(1), ..Limits::default() });
        let admitted = (0..10).filter(|_| load.admit_call(&caller).is_ok()).count();
        assert!((2..=3).contains(&admitted), "{admitted}");
    }

    #[test]
    fn connections_are_bounded_by_identity() {
        let load = load(1, true);
        let caller = caller("a", Limits { connections: Some(1), ..Limits::default() });
        let held = load.admit_connection(&caller).unwrap();
        assert!(
            load.admit_connection(&caller).unwrap_err().message.contains("limit of connections")
        );
        drop(held);
        assert!(load.admit_connection(&caller).is_ok());
    }

    #[test]
    fn one_run_does_not_take_all_descriptors_or_terminals() {
        let load = load(512, true);
        let (ada, bob) = (caller("ada", Limits::default()), caller("bob", Limits::default()));
        for (first, small) in [
            (
                Need { descriptors: 1000, ..Need::default() },
                Need { descriptors: 10, ..Need::default() },
            ),
            (Need { ptys: 64, ..Need::default() }, Need { ptys: 1, ..Need::default() }),
        ] {
            assert_eq!(load.admit_run(&ada, first).unwrap_err().kind, Kind::Overloaded);
            let held: Vec<_> = std::iter::from_fn(|| load.admit_run(&ada, small).ok()).collect();
            assert!((16..=75).contains(&held.len()), "{}", held.len());
            assert!(load.admit_run(&bob, small).is_ok());
        }
        let alone =
            Arc::new(Load::new(Bounds::default(), Capacity { descriptors: 1000, ptys: 64 }, false));
        assert!(
            alone.admit_run(&ada, Need { descriptors: 1000, ptys: 64, ..Need::default() }).is_ok()
        );
    }

    #[test]
    fn what_a_run_no_longer_needs_is_for_others() {
        let (load, ada) = (load(512, true), caller("ada", Limits::default()));
        let need = Need { descriptors: 500, buffered_bytes: 50, ..Need::default() };
        let mut first = load.admit_run(&ada, need).unwrap();
        assert!(load.admit_run(&ada, need).is_err());
        first.has_begun(5, 30);
        assert_eq!(load.status(&ada).own.unwrap().buffered_bytes, 20);
        drop((load.admit_run(&ada, need).unwrap(), first));
        assert_eq!(load.status(&ada).own.unwrap().buffered_bytes, 0);
        assert_eq!(load.state.lock().unwrap().whole.need, Need::default());
    }
}
