//! A simulation of the life of what was written through volumes: programs on two machines, their
//! gateways' volumes and the server's directory in one process, in simulated time, while
//! connections break, messages are late, either side is killed and starts anew from its disk, and
//! the disk is full. A seed decides all of it; `model` says what must hold whatever happens.
//!
//! * `chance`: numbers that a seed decides; `server`: the executor's process; `link`: the way to
//!   it; `gateway`: the volume and its journal; `program`: what is done with it; `model`: what that
//!   promises; `world`: one run; `shared`: a value that others wait for
//!
//! `cargo xtask simulate` runs as many seeds as one likes, by the environment:
//! `POSH_SIMULATE_FROM`, `POSH_SIMULATE_SEEDS`, `POSH_SIMULATE_FAULT`, `POSH_SIMULATE_VERBOSE` (all
//! steps), `POSH_SIMULATE_REQUESTS` (with what the server is asked for), `POSH_SIMULATE_ALL` (goes
//! on behind a seed that breaks something).
//!
//! Not simulated: the kernel's caches, the messages' encoding and HTTP/2, and power cuts (what is
//! written to either disk is there when its process dies).
#![allow(clippy::unwrap_used)]

mod chance;
mod gateway;
mod link;
mod model;
mod program;
mod server;
mod shared;
mod world;

use std::time::Instant;

use server::Fault;

const SEEDS: u64 = 200;
/// A planted fault is found among so many.
const SEEDS_OF_FAULT: u64 = 2000;
/// The last steps of a run that broke something.
const SHOWN_LINES: usize = 400;

fn setting(name: &str) -> Option<String> {
    std::env::var(format!("POSH_SIMULATE_{name}")).ok()
}

fn number(name: &str, default: u64) -> u64 {
    setting(name).map_or(default, |number| number.parse().unwrap())
}

fn tell(seed: u64, outcome: &world::Outcome) -> String {
    let shown = if setting("REQUESTS").is_some() { usize::MAX } else { SHOWN_LINES };
    let hidden = outcome.log.len().saturating_sub(shown);
    let lines = outcome.log[hidden..].join("\n");
    format!("seed {seed}:\n{lines}\n\nseed {seed} breaks:\n{}", outcome.broken.join("\n"))
}

/// The first seed that breaks something.
fn first_broken(
    seeds: std::ops::Range<u64>,
    fault: Option<Fault>,
) -> Option<(u64, world::Outcome)> {
    seeds
        .map(|seed| (seed, world::run(seed, fault)))
        .find(|(_, outcome)| !outcome.broken.is_empty())
}

#[test]
fn no_seed_breaks_a_promise() {
    let from = number("FROM", 0);
    let count = number("SEEDS", SEEDS);
    let fault = setting("FAULT").map(|name| Fault::named(&name).expect("a fault of that name"));
    let began = Instant::now();
    let mut broken = Vec::new();
    for seed in from..from + count {
        let outcome = world::run(seed, fault);
        if !outcome.broken.is_empty() {
            println!("{}", tell(seed, &outcome));
            broken.push(seed);
            if fault.is_some() || setting("ALL").is_none() {
                break;
            }
        } else if setting("VERBOSE").is_some() {
            println!("{}", outcome.log.join("\n"));
        }
    }
    let rate = count as f64 / began.elapsed().as_secs_f64();
    println!("{count} seeds from {from}, {rate:.0} a second");
    assert!(broken.is_empty(), "these seeds break promises: {broken:?}");
}

#[test]
fn each_planted_fault_is_found() {
    for (name, fault) in Fault::ALL {
        let found = first_broken(0..SEEDS_OF_FAULT, Some(fault));
        let (seed, outcome) = found.unwrap_or_else(|| panic!("nothing is found of {name}"));
        println!("{name}: seed {seed}: {}", outcome.broken[0]);
    }
}

#[test]
fn a_seed_gives_one_run() {
    for seed in 0..20 {
        let (one, other) = (world::run(seed, None).log, world::run(seed, None).log);
        let differs = one.iter().zip(&other).position(|(one, other)| one != other);
        if let Some(at) = differs {
            panic!("seed {seed}: {:#?} is not {:#?}", &one[at - at.min(3)..=at], other[at]);
        }
        assert_eq!(one.len(), other.len(), "seed {seed}");
    }
}
