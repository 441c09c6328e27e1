//! Inputs on several machines: parts run where their files are, their outputs are
//! joined in order, and what can't be split runs here (paper §5.3).

use std::fs;

use posh_integration::host::PROGRAMS;
use posh_integration::oracle::Under;
use posh_integration::{Lab, LabSpec, Outcome, Script};

use crate::programs;

/// A pipeline, and for each of its commands where it runs.
const CASES: &[(&str, &[(&str, &str)])] = &[
    (
        "cat /mnt/s1/[ab] /mnt/s2/[ab] | grep 7 | wc -l",
        &[("cat", "store1+store2"), ("grep", "store1+store2"), ("wc", "local")],
    ),
    ("cat /mnt/s2/a /mnt/s1/a /mnt/s2/b", &[("cat", "store2+store1+store2")]),
    // The first part does not end in a newline: its last line and the next file's first are one line for grep.
    ("cat /mnt/s1/a /mnt/s1/open /mnt/s2/a | grep -n 1", &[("cat", "store1+store2"), ("grep", "local")]),
    ("cat /mnt/s1/a /mnt/s1/empty /mnt/s2/a | grep -c 1", &[("cat", "store1+store2"), ("grep", "local")]),
    // Names are printed though one part has a single file; statuses combine by grep's rule.
    ("grep -n 99 /mnt/s1/a /mnt/s2/a /mnt/s2/b", &[("grep", "store1+store2")]),
    ("grep nothing /mnt/s1/a /mnt/s2/a", &[("grep", "store1+store2")]),
    ("grep 99 /mnt/s1/a /mnt/s2/missing /mnt/s1/b", &[("grep", "store1+store2+store1")]),
    ("comm <(sort /mnt/s1/a) <(sort /mnt/s2/a)", &[("sort", "store"), ("comm", "local")]),
    ("comm <(sort /mnt/s1/a) <(sort /mnt/s1/b)", &[("sort", "store1"), ("comm", "store1")]),
    ("sort /mnt/s1/a /mnt/s2/a | head -n 3", &[("sort", "local"), ("head", "local")]),
    ("cat /mnt/s1/a > /mnt/s2/copy; md5sum < /mnt/s2/copy", &[("cat", "store1"), ("md5sum", "store2")]),
    ("tee /mnt/s1/copy < /mnt/s2/a | tail -n 1; cmp /mnt/s1/copy /mnt/s2/a", &[("tee", "store1"), ("cmp", "local")]),
];

/// One pipeline on one machine, with a splitting factor.
const FACTORS: &[(&str, &[(&str, &str)])] = &[
    ("cat /mnt/s1/[ab] | grep 7 | sort | uniq -c", &[("cat", "split in 2 parts"), ("grep", "split in 2 parts")]),
    ("grep -c 7 /mnt/s1/a /mnt/s1/b /mnt/s1/missing", &[("grep", "split in 3 parts")]),
];

fn lab() -> Lab {
    let lab = Lab::start(&LabSpec::servers(2), &programs()).unwrap();
    for server in [1, 2] {
        let lines = |from: usize| (from..from + 500).map(|i| format!("{i} on {server}\n")).collect::<String>();
        let data = lab.data(server);
        fs::write(data.join("a"), lines(0)).unwrap();
        fs::write(data.join("b"), lines(700)).unwrap();
        fs::write(data.join("open"), "1 without an end").unwrap();
        fs::write(data.join("empty"), "").unwrap();
    }
    lab
}

fn run(lab: &Lab, text: &str, under: Under) -> Outcome {
    Script::new(text).run(&lab.workstation, under).unwrap()
}

#[test]
fn inputs_on_two_machines() {
    let lab = lab();
    for (text, places) in CASES {
        let text = format!("{text}; echo $?");
        let bash = run(&lab, &text, Under::Shell);
        let posh = run(&lab, &text, Under::Posh);
        assert_eq!((&posh.stdout, &posh.stderr), (&bash.stdout, &bash.stderr), "{text}");
        let explained = run(&lab, &text, Under::PoshExplained);
        assert_eq!(explained.stdout, bash.stdout, "{text}");
        for (command, place) in *places {
            let stages: Vec<_> = explained.report().stages(command).collect();
            let right = !stages.is_empty() && stages.iter().all(|s| s.placement.starts_with(place));
            assert!(right, "{text}: {command} should run at {place}: {stages:?}");
        }
    }
}

#[test]
fn a_splitting_factor_within_one_machine() {
    let lab = lab();
    for (text, reasons) in FACTORS {
        let bash = run(&lab, text, Under::Shell);
        let split = format!("{PROGRAMS}/posh --split 3 -c '{text}'");
        let posh = run(&lab, &split, Under::Shell);
        let same = (&posh.stdout, &posh.stderr, posh.status) == (&bash.stdout, &bash.stderr, bash.status);
        assert!(same, "{text}\nbash: {bash}\nposh: {posh}");
        let explained =
            run(&lab, &format!("{PROGRAMS}/posh --split 3 --explain -c '{text}' 2>&1 >/dev/null"), Under::Shell);
        let report = String::from_utf8_lossy(&explained.stdout).into_owned();
        for (command, reason) in *reasons {
            let line = report.lines().skip_while(|l| !l.contains(&format!(" {command} "))).nth(1).unwrap_or_default();
            assert!(line.contains(reason), "{text}: {command} should be {reason}:\n{report}");
        }
    }
}
