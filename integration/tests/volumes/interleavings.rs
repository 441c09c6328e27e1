//! A part of what `posh-lab coherence` does; all of it is run by `cargo xtask volumes`.

use posh_integration::interleave::{self, InterleaveOptions};

use crate::{programs, whole_machine};

#[test]
fn nothing_stale_is_seen_after_offloaded_commands() {
    let _turn = whole_machine();
    let options =
        InterleaveOptions { steps: 200, seed: 6, cut_every: 40, changes: 50, verbose: false };
    let tally = interleave::run(&options, &programs()).unwrap();
    println!("{tally}");
    assert!(tally.is_good(), "{tally}");
    assert!(tally.cuts > 0 && tally.reads > options.steps, "{tally}");
}
