//! Signals that a program sends to a whole process group, as `timeout` and `kill -- -PGID` do.

use std::fs;

use posh_integration::oracle::{Door, Under};
use posh_integration::{Lab, LabSpec, Script};

use crate::{programs, whole_machine};

/// Commands that get a signal together end by it together: none takes the end of another one for
/// the end of its input, and writes what it would have written then.
#[test]
fn a_signal_to_a_group_ends_all_of_its_commands_by_it() {
    let _alone = whole_machine();
    let lab = Lab::start(&LabSpec::servers(1), &programs()).unwrap();
    fs::write(lab.data(1).join("list"), "two\none\n").unwrap();
    let text = r#"set -m; cd /mnt/s1
        for i in {1..15}; do
            tail -f list | cat -n | sort > out$i &
            sleep 0.4; kill -TERM -- -$(jobs -p %%); wait %%
        done 2> /dev/null
        cat out*; ls"#;
    for door in Door::ALL {
        let script = Script::new(text).door(door);
        let outcome = script.run(&lab.workstation, Under::PoshExplained).unwrap();
        let said = String::from_utf8_lossy(&outcome.stdout);
        assert!(said.starts_with("list\n") && said.contains("out15\n"), "{outcome}");
        let report = outcome.report();
        let offloaded = report.stages("sort").filter(|stage| stage.is_offloaded()).count();
        assert!(offloaded > 10, "{report:#?}");
    }
}
