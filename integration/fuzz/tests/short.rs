//! Every target for some seconds, on its seeds and on seeds that proptest has changed, the same
//! ones in every run. A panic in any task of the servers fails the test, and so does their growth.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{
    sync::{
        Mutex, Once, PoisonError,
        atomic::{AtomicUsize, Ordering},
        mpsc::{RecvTimeoutError, Sender, channel},
    },
    thread,
    time::Duration,
};

use posh_fuzz::{Target, target};
use proptest::{
    collection::vec,
    prelude::*,
    sample::Index,
    test_runner::{Config, RngAlgorithm, TestRng, TestRunner},
};

/// Memory that a target may still take after its first half, in KiB: allocators keep some.
const MAX_GROWTH_KIB: usize = 96 << 10;

/// The longest that one input may take. Sound calls have waits of twenty seconds.
const MAX_INPUT_TIME: Duration = Duration::from_secs(120);

/// One at a time: memory is the process's.
static TURN: Mutex<()> = Mutex::new(());

static PANICS: AtomicUsize = AtomicUsize::new(0);

/// One change of an input.
#[derive(Debug, Clone)]
enum Edit {
    Replace(Index, u8),
    Insert(Index, Vec<u8>),
    Remove(Index, u8),
    Repeat(Index, u8),
}

fn edit() -> impl Strategy<Value = Edit> {
    let index = any::<Index>;
    prop_oneof![
        (index(), any::<u8>()).prop_map(|(at, byte)| Edit::Replace(at, byte)),
        (index(), vec(any::<u8>(), 1..6)).prop_map(|(at, bytes)| Edit::Insert(at, bytes)),
        (index(), any::<u8>()).prop_map(|(at, count)| Edit::Remove(at, count)),
        (index(), any::<u8>()).prop_map(|(at, count)| Edit::Repeat(at, count)),
    ]
}

fn apply(input: &mut Vec<u8>, edit: &Edit) {
    let at = |index: &Index| if input.is_empty() { 0 } else { index.index(input.len()) };
    let end = |at: usize, count: u8| (at + usize::from(count)).min(input.len());
    match edit {
        Edit::Replace(index, byte) => {
            let at = at(index);
            input.splice(at..end(at, 1), [*byte]);
        }
        Edit::Insert(index, bytes) => {
            let at = at(index);
            input.splice(at..at, bytes.iter().copied());
        }
        Edit::Remove(index, count) => {
            let at = at(index);
            input.drain(at..end(at, *count));
        }
        Edit::Repeat(index, count) => {
            let at = at(index);
            let part = input[at..end(at, *count)].to_vec();
            input.splice(at..at, part);
        }
    }
}

fn resident_kib() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

/// Ends this process, so that the tests end, when an input takes too long: a thread that hangs
/// can't be stopped. It is to be told each input when it begins, and `None` when it ends.
fn watch(name: &'static str) -> Sender<Option<Vec<u8>>> {
    let (tell, told) = channel();
    thread::spawn(move || {
        let mut current: Option<Vec<u8>> = None;
        loop {
            match told.recv_timeout(MAX_INPUT_TIME) {
                Ok(next) => current = next,
                Err(RecvTimeoutError::Disconnected) => return,
                Err(RecvTimeoutError::Timeout) => {
                    if let Some(input) = &current {
                        eprintln!("{name} hangs for {MAX_INPUT_TIME:?} at this input: {input:?}");
                        std::process::abort();
                    }
                }
            }
        }
    });
    tell
}

fn try_target(name: &'static str) {
    static HOOK: Once = Once::new();
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    HOOK.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            // Of the servers: what panics in a test's own thread fails that test.
            if std::thread::current().name().is_some_and(|name| name.starts_with("tokio")) {
                PANICS.fetch_add(1, Ordering::Relaxed);
            }
            before(info);
        }));
    });
    let Target { run, seeds, short, .. } = target(name).unwrap();
    let watch = watch(name);
    let run = |input: &[u8]| {
        let _ = watch.send(Some(input.to_vec()));
        run(input);
        let _ = watch.send(None);
    };
    let seeds = seeds();
    assert!(!seeds.is_empty());
    seeds.iter().for_each(|seed| run(seed));
    let half = || {
        let config = Config { cases: short / 2, failure_persistence: None, ..Config::default() };
        let mut runner =
            TestRunner::new_with_rng(config, TestRng::deterministic_rng(RngAlgorithm::ChaCha));
        let inputs = (any::<Index>(), vec(edit(), 0..12)).prop_map(|(seed, edits)| {
            let mut input = seed.get(&seeds).clone();
            edits.iter().for_each(|edit| apply(&mut input, edit));
            input
        });
        runner.run(&inputs, |input| {
            run(&input);
            Ok(())
        })
    };
    half().unwrap();
    let before = resident_kib();
    half().unwrap();
    let growth = resident_kib().saturating_sub(before);
    assert!(growth < MAX_GROWTH_KIB, "{name}: {growth} KiB more after the same inputs again");
    assert_eq!(PANICS.load(Ordering::Relaxed), 0, "something panicked in a server");
}

macro_rules! short {
    ($($name:ident)*) => { $(
        #[test]
        fn $name() {
            try_target(stringify!($name));
        }
    )* };
}

short!(annotations invocations mounts_toml executor_toml mountinfo executor gateway stage_socket strangers volume answers volume_answers);

#[test]
fn every_target_is_tried() {
    let source = include_str!("short.rs");
    let tried = source.lines().find(|line| line.starts_with("short!(")).unwrap();
    for target in posh_fuzz::TARGETS {
        assert!(tried.contains(target.name), "{} is not in the short run", target.name);
    }
}
