//! Inputs on several machines: parts run where their files are, their outputs are
//! joined in order or by an aggregator, and what can't be split runs here (paper §5.3).

use std::fs;

use posh_integration::host::PROGRAMS;
use posh_integration::oracle::Under;
use posh_integration::{Lab, LabSpec, RunOutcome, Script};

use crate::programs;

/// A pipeline, and for each of its commands where it runs.
const CASES: &[(&str, &[(&str, &str)])] = &[
    (
        "cat /mnt/s1/[ab] /mnt/s2/[ab] | grep 7 | wc -l",
        &[("cat", "store1+store2"), ("grep", "store1+store2"), ("wc", "store1+store2")],
    ),
    ("cat /mnt/s1/[ab] /mnt/s2/[ab] | grep -c 7", &[("grep", "store1+store2")]),
    ("cat /mnt/s1/[ab] /mnt/s2/[ab] | wc", &[("wc", "store1+store2")]),
    ("cat /mnt/s1/[ab] /mnt/s2/[ab] | tail -n 3", &[("tail", "store1+store2")]),
    (
        "cat /mnt/s1/[ab] /mnt/s2/[ab] | cut -c1 | sort | uniq -c",
        &[("sort", "store1+store2"), ("uniq", "store1+store2")],
    ),
    (
        "cat /mnt/s1/[ab] /mnt/s2/[ab] | cut -c1 | sort -r | uniq",
        &[("sort", "store1+store2"), ("uniq", "store1+store2")],
    ),
    (
        "cat /mnt/s1/[ab] /mnt/s2/[ab] | sort -n | tail -n 2",
        &[("sort", "store1+store2"), ("tail", "store1+store2")],
    ),
    ("sort -k3 -k1,1nr /mnt/s1/[ab] /mnt/s2/[ab]", &[("sort", "store1+store2")]),
    (
        "sort -u /mnt/s1/a /mnt/s2/a /mnt/s1/b | md5sum",
        &[("sort", "store1+store2+store1"), ("md5sum", "local")],
    ),
    ("wc /mnt/s1/a /mnt/s2/a /mnt/s2/empty", &[("wc", "store1+store2")]),
    ("wc -lL /mnt/s1/a /mnt/s2/open", &[("wc", "store1+store2")]),
    // A file that can't be read in the middle: who prints nothing then, or counts it, is not split.
    ("sort /mnt/s1/a /mnt/s2/missing /mnt/s1/b", &[("sort", "local")]),
    ("wc /mnt/s1/a /mnt/s2 /mnt/s2/missing /mnt/s1/b", &[("wc", "local")]),
    (
        "cat /mnt/s1/a /mnt/s2/missing /mnt/s2/a | sort | tail -n 1",
        &[("cat", "store1+store2"), ("sort", "store1+store2")],
    ),
    // What is wrong with the words is said once.
    ("cat /mnt/s1/a /mnt/s2/a | grep '['", &[("grep", "store1+store2")]),
    ("grep '\\d' /mnt/s1/a /mnt/s2/a", &[("grep", "store1+store2")]),
    ("cat /mnt/s1/a /mnt/s2/a | uniq -w x", &[("uniq", "store1+store2")]),
    ("cat /mnt/s2/a /mnt/s1/a /mnt/s2/b", &[("cat", "store2+store1+store2")]),
    // The first part does not end in a newline: its last line and the next file's first are one
    // line for grep.
    (
        "cat /mnt/s1/a /mnt/s1/open /mnt/s2/a | grep -n 1",
        &[("cat", "store1+store2"), ("grep", "local")],
    ),
    (
        "cat /mnt/s1/a /mnt/s1/empty /mnt/s2/a | grep -c 1",
        &[("cat", "store1+store2"), ("grep", "local")],
    ),
    // Names are printed though one part has a single file; statuses combine by grep's rule.
    ("grep -n 99 /mnt/s1/a /mnt/s2/a /mnt/s2/b", &[("grep", "store1+store2")]),
    ("grep nothing /mnt/s1/a /mnt/s2/a", &[("grep", "store1+store2")]),
    ("grep 99 /mnt/s1/a /mnt/s2/missing /mnt/s1/b", &[("grep", "store1+store2+store1")]),
    ("comm <(sort /mnt/s1/a) <(sort /mnt/s2/a)", &[("sort", "store"), ("comm", "local")]),
    ("comm <(sort /mnt/s1/a) <(sort /mnt/s1/b)", &[("sort", "store1"), ("comm", "store1")]),
    ("sort /mnt/s1/a /mnt/s2/a | head -n 3", &[("sort", "store1+store2"), ("head", "local")]),
    (
        "cat /mnt/s1/a > /mnt/s2/copy; md5sum < /mnt/s2/copy",
        &[("cat", "store1"), ("md5sum", "store2")],
    ),
    (
        "tee /mnt/s1/copy < /mnt/s2/a | tail -n 1; cmp /mnt/s1/copy /mnt/s2/a",
        &[("tee", "store1"), ("cmp", "local")],
    ),
];

/// One pipeline on one machine, with a splitting factor.
const FACTORS: &[(&str, &[(&str, &str)])] = &[
    (
        "cat /mnt/s1/[ab] | grep 7 | sort | uniq -c",
        &[("cat", "split in 2 parts"), ("grep", "split in 2 parts")],
    ),
    (
        "cat /mnt/s1/[ab] | cut -c1 | sort | uniq -c",
        &[
            ("sort", "joined by sort -m (store1), its output stays there"),
            ("uniq", "runs where its data is"),
        ],
    ),
    (
        "cat /mnt/s1/[ab] | tail -n 3 | rev",
        &[("tail", "joined by tail once more (store1), its output stays there")],
    ),
    ("cat /mnt/s1/[ab] | wc -c", &[("wc", "their results of wc joined (here)")]),
    (
        "sort -k3 /mnt/s1/b /mnt/s1/a > /mnt/s1/sorted; cat /mnt/s1/sorted",
        &[("sort", "joined by sort -m -k 3 (store1)")],
    ),
    ("sort /mnt/s1/b /mnt/s1/missing /mnt/s1/a", &[("sort", "runs where its data is")]),
    (
        "cat /mnt/s1/[ab] | sort | head -n 2",
        &[("sort", "joined by sort -m (store1)"), ("head", "runs where its data is")],
    ),
    ("grep -c 7 /mnt/s1/a /mnt/s1/b /mnt/s1/missing", &[("grep", "split in 3 parts")]),
];

fn lab() -> Lab {
    let lab = Lab::start(&LabSpec::servers(2), &programs()).unwrap();
    for server in [1, 2] {
        let lines = |from: usize| {
            (from..from + 500).map(|i| format!("{i} on {server}\n")).collect::<String>()
        };
        let data = lab.data(server);
        fs::write(data.join("a"), lines(0)).unwrap();
        fs::write(data.join("b"), lines(700)).unwrap();
        fs::write(data.join("open"), "1 without an end").unwrap();
        fs::write(data.join("empty"), "").unwrap();
    }
    lab
}

fn run(lab: &Lab, text: &str, under: Under) -> RunOutcome {
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
        let same =
            (&posh.stdout, &posh.stderr, posh.status) == (&bash.stdout, &bash.stderr, bash.status);
        assert!(same, "{text}\nbash: {bash}\nposh: {posh}");
        let explained = run(
            &lab,
            &format!("{PROGRAMS}/posh --split 3 --explain -c '{text}' 2>&1 >/dev/null"),
            Under::Shell,
        );
        let report = String::from_utf8_lossy(&explained.stdout).into_owned();
        for (command, reason) in *reasons {
            let is_stage = |l: &&str| !format!("{l} ").contains(&format!(" {command} "));
            let line = report.lines().skip_while(is_stage).nth(1).unwrap_or_default();
            assert!(line.contains(reason), "{text}: {command} should be {reason}:\n{report}");
        }
    }
}

/// Pipelines over much data, of which little is left.
const REDUCING: &[&str] = &[
    "cat /mnt/s1/big[12] /mnt/s2/big[12] | sort | uniq -c",
    "cat /mnt/s1/big[12] /mnt/s2/big[12] | grep -c 7",
    "cat /mnt/s1/big[12] /mnt/s2/big[12] | wc -l",
    "sort -n /mnt/s1/big1 /mnt/s2/big1 | tail -n 5",
];

/// The results of the parts, with room to spare; the files are a hundred times that.
const LITTLE_BYTES: u64 = 128 << 10;

#[test]
fn aggregators_keep_data_where_it_is() {
    let lab = lab();
    for server in [1, 2] {
        let data = lab.data(server);
        for part in [1, 2] {
            let lines: String =
                (0..400_000).map(|i| format!("{} of {}\n", i * part % 997, i % 2)).collect();
            fs::write(data.join(format!("big{part}")), lines).unwrap();
        }
    }
    for text in REDUCING {
        let bash = run(&lab, text, Under::Shell);
        let posh = run(&lab, text, Under::PoshExplained);
        assert_eq!((&posh.stdout, posh.status), (&bash.stdout, bash.status), "{text}");
        let report = posh.report();
        let pipeline = &report.pipelines[0];
        assert!(
            pipeline.stages.iter().all(|s| s.placement == "store1+store2"),
            "{text}: {pipeline:?}"
        );
        assert!(pipeline.bytes < LITTLE_BYTES, "{text}: {} bytes over the network", pipeline.bytes);
    }
}

/// Who reads the joined output may go, and who writes it learns of that as in a shell.
#[test]
fn statuses_of_split_stages() {
    let lab = lab();
    for server in [1, 2] {
        let lines: String = (0..300_000).map(|i| format!("{i} on {server}\n")).collect();
        // More than may be under way to a reader who has gone (4 MiB).
        fs::write(lab.data(server).join("huge"), lines.repeat(4)).unwrap();
        fs::write(lab.data(server).join("large"), lines).unwrap();
    }
    for text in [
        "sort /mnt/s1/large /mnt/s2/large | head -n 2; echo ${PIPESTATUS[@]}",
        "cat /mnt/s1/large /mnt/s2/large | sort -r | head -n 2; echo ${PIPESTATUS[@]}",
        "cat /mnt/s1/a /mnt/s2/missing | grep -c nothing | cat; echo ${PIPESTATUS[@]}",
        // One process ends in the first file, and never comes to the second.
        "cat /mnt/s1/huge /mnt/s2/missing | head -n 1; echo ${PIPESTATUS[@]}",
        "cat /mnt/s1/huge /mnt/s2/missing | grep on | cut -c2- | head -n 1",
        "sort /mnt/s1/large /mnt/s2/large > /dev/null; echo $?",
        "sort /mnt/s1/large /mnt/s2/large 2> /dev/null | md5sum",
        "sort /mnt/s1/a /mnt/s2/a >&-; echo $?",
        "set -o pipefail; cat /mnt/s1/a /mnt/s2/a | grep '[' | wc -l; echo $?",
    ] {
        let bash = run(&lab, text, Under::Shell);
        let posh = run(&lab, text, Under::Posh);
        let same =
            (&posh.stdout, &posh.stderr, posh.status) == (&bash.stdout, &bash.stderr, bash.status);
        assert!(same, "{text}\nbash: {bash}\nposh: {posh}");
    }
}
