//! All integration tests, in one binary because linking is what costs. They need
//! root, /dev/fuse and the built programs, and fail where one is missing.

// All of this is test code; clippy's own exception knows only #[test] functions.
#![allow(clippy::unwrap_used)]

mod apps;
mod arena;
mod bad_input;
mod cases;
mod chaos;
mod coherence;
mod doors;
mod failure;
mod groups;
mod guards;
mod hung_mounts;
mod lab_selftest;
mod left_behind;
mod load;
mod mounted_over;
mod random;
mod restrictions;
mod scripts;
mod semantics;
mod shapes;
mod skew;
mod split;
mod ssh;
mod terminal;
mod tls;
mod trace;
mod user;
mod volumes;

use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use posh_integration::programs::Programs;

/// Tests that keep all cores busy by themselves take turns: a shell that gets no
/// processor for long makes posh place its pipeline in pieces, which is right but slow.
static WHOLE_MACHINE: Mutex<()> = Mutex::new(());

fn whole_machine() -> MutexGuard<'static, ()> {
    WHOLE_MACHINE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The programs under test: those in `POSH_PROGRAMS`, where `cargo xtask test` puts them together
/// as they are installed, or else those in the target directory that this test was built into.
fn programs() -> Programs {
    let together =
        std::env::var_os("POSH_PROGRAMS").map(|directory| Path::new(&directory).join("posh-lab"));
    Programs::beside(&together.unwrap_or_else(|| env!("CARGO_BIN_EXE_posh-lab").into())).unwrap()
}
