//! Pipelines while everything fails around them, see `posh_integration::chaos`; all of
//! it is run by `cargo xtask chaos`.

use posh_integration::chaos::{self, ChaosOptions, Point};

use crate::{programs, whole_machine};

#[test]
fn forty_pipelines_while_everything_fails() {
    let _turn = whole_machine();
    let options = ChaosOptions { pipelines: 42, first: 0, seed: 7, labs: 3, short: true };
    let tally = chaos::run(&options, &programs()).unwrap();
    println!("{tally}");
    assert!(tally.is_good(), "{tally}");
    // Each point of the protocol was tried, and something had to be done about it.
    assert!(tally.points() == Point::ALL.len() && tally.retried() > 0, "{tally}");
}
