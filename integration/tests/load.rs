//! Many pipelines at once: each result right, none mixed up, nothing left behind.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use posh_integration::oracle::Under;
use posh_integration::quiet::{files_left, processes_left, temporary_files};
use posh_integration::{Lab, LabSpec, Script};

use crate::programs;

const SHELLS: usize = 8;
const PIPELINES: usize = 25;
/// What is still running after that long was left behind.
const AFTERWARDS: Duration = Duration::from_secs(2);

/// Pipeline `n` finds its own lines only, and has as many of them as no other.
fn line(n: usize, i: usize) -> String {
    format!("key-{n:03} line {i:04} of {}\n", n + 1)
}

#[test]
fn two_hundred_pipelines_from_eight_shells() {
    let lab = Lab::start(&LabSpec::servers(1), &programs()).unwrap();
    let all = SHELLS * PIPELINES;
    let content: String =
        (0..all).flat_map(|i| (0..all).filter(move |n| i <= *n).map(move |n| line(n, i))).collect();
    fs::write(lab.data(1).join("log"), &content).unwrap();
    let home = lab.workstation.path("/home/user");
    fs::create_dir(home.join("out")).unwrap();

    // The gateway starts with the first shell; its socket and log stay, as does the executor's
    // directory.
    let first = Script::new("cat /mnt/s1/log | wc -c").run(&lab.workstation, Under::Posh).unwrap();
    assert_eq!(String::from_utf8_lossy(&first.stdout).trim(), content.len().to_string(), "{first}");
    let before = [&lab.workstation, &lab.servers[0].host].map(|h| temporary_files(h).unwrap());
    let shell = |number: usize| {
        let from = number * PIPELINES;
        let text = format!(
            "for n in $(seq {from} {}); do key=$(printf 'key-%03d' $n)\n\
             (cat /mnt/s1/log | grep \"$key \" | sort -r > ~/out/$n; echo \"$n ${{PIPESTATUS[*]}}\" >> ~/out/status) &\ndone; wait",
            from + PIPELINES - 1
        );
        Script::new(text).run(&lab.workstation, Under::Posh).unwrap()
    };
    std::thread::scope(|scope| {
        let shells: Vec<_> = (0..SHELLS).map(|n| scope.spawn(move || shell(n))).collect();
        for shell in shells {
            let outcome = shell.join().unwrap();
            assert!(
                outcome.status.success() && outcome.stderr.is_empty() && outcome.stdout.is_empty(),
                "{outcome}"
            );
        }
    });

    for n in 0..all {
        let expected: String = (0..=n).rev().map(|i| line(n, i)).collect();
        let found = fs::read_to_string(home.join(format!("out/{n}"))).unwrap();
        assert!(
            found == expected,
            "pipeline {n}: {} bytes instead of {}",
            found.len(),
            expected.len()
        );
    }
    let statuses = fs::read_to_string(home.join("out/status")).unwrap();
    let bad: Vec<_> = statuses.lines().filter(|l| !l.ends_with(" 0 0 0")).collect();
    assert!(statuses.lines().count() == all && bad.is_empty(), "{bad:?}");
    assert_nothing_left(&lab, &before);
}

fn assert_nothing_left(lab: &Lab, before: &[BTreeSet<PathBuf>; 2]) {
    for (host, before) in [&lab.workstation, &lab.servers[0].host].into_iter().zip(before) {
        let processes = processes_left(host, AFTERWARDS).unwrap();
        assert!(processes.is_empty(), "left on {}: {processes:?}", host.name());
        let files = files_left(host, before, AFTERWARDS).unwrap();
        assert!(files.is_empty(), "left on {}: {files:?}", host.name());
    }
}
