//! libFuzzer's program: its own arguments, the target in `POSH_FUZZ_TARGET`.
//! `posh-fuzz` with `POSH_FUZZ_SEEDS=DIR` as well writes the target's seeds there first.
#![no_main]
#![allow(unsafe_code, reason = "libfuzzer-sys exports C functions, and signal(2) is unsafe")]

use std::{path::PathBuf, sync::OnceLock};

use libfuzzer_sys::fuzz_target;
use nix::sys::signal::{SigHandler, Signal, signal};
use posh_fuzz::{TARGETS, Target, target};

fuzz_target!(init: { begin(); }, |data: &[u8]| (wanted().run)(data));

fn wanted() -> &'static Target {
    static WANTED: OnceLock<&Target> = OnceLock::new();
    WANTED.get_or_init(|| {
        let name = std::env::var("POSH_FUZZ_TARGET").unwrap_or_default();
        target(&name).unwrap_or_else(|| {
            let names: Vec<_> = TARGETS.iter().map(|target| target.name).collect();
            panic!("POSH_FUZZ_TARGET must be one of {}", names.join(", "))
        })
    })
}

fn begin() {
    // As Rust's own `main` would have done, which libFuzzer's takes the place of.
    // SAFETY: no handler is installed.
    let ignored = unsafe { signal(Signal::SIGPIPE, SigHandler::SigIgn) };
    ignored.expect("SIGPIPE can be ignored");
    write_seeds(wanted());
}

fn write_seeds(target: &Target) {
    let Some(directory) = std::env::var_os("POSH_FUZZ_SEEDS").map(PathBuf::from) else { return };
    for (number, seed) in (target.seeds)().into_iter().enumerate() {
        let file = directory.join(format!("seed-{number:03}"));
        std::fs::write(&file, seed)
            .unwrap_or_else(|error| panic!("cannot write {}: {error}", file.display()));
    }
}
