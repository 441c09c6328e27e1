//! bash's own test suite, from Debian's source package, which `cargo xtask test --full`
//! fetches. Each of its files is run by bash and by posh; the oracle is the bash that is
//! installed, not what the suite itself expects of a bash that was built for it.

use std::fs;
use std::path::Path;
use std::process::Command;

use super::compare;
use super::visitor::{Run, Visitor};

const DIRECTORY: &str = "/home/visitor/tests";
/// Job control, `read -t` and `wait` take their time there.
const LIMIT_S: u32 = 120;
/// Of 84 files; a few print process ids and times.
const AT_LEAST: usize = 70;
/// They run the others, or profile; the last prints how long its commands took.
const NOT_COMPARED: [&str; 4] = ["run-all", "run-minimal", "run-gprof", "run-posixpipe"];
/// Runs a file of the suite and shows what its test printed, where that is not what the suite
/// expects.
const SCRIPT: &str = ". \"./$1\"; status=$?; cat \"$BASH_TSTOUT\" 2> /dev/null; rm -f \"$BASH_TSTOUT\"; exit $status";

#[test]
fn bash_by_its_own_tests() {
    let Some(tests) = std::env::var_os("POSH_BASH_TESTS") else {
        println!("bash's own test suite: NOT compared; `cargo xtask test --full` fetches it");
        return;
    };
    let visitor = Visitor::arrive();
    let mut copy = Command::new("cp");
    copy.arg("-r").arg(&tests).arg(visitor.path(DIRECTORY));
    assert!(copy.status().unwrap().success());
    visitor.own_tree(DIRECTORY);
    visitor.make_directory("/home/visitor/tmp");
    let runs: Vec<Run> = names(Path::new(&tests)).iter().map(|name| run(name)).collect();
    // One at a time: they share their directory.
    compare(&visitor, &runs, 1).check("bash's own test suite", AT_LEAST);
}

fn names(tests: &Path) -> Vec<String> {
    let entries =
        fs::read_dir(tests).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<_> =
        entries.filter(|n| n.starts_with("run-") && !NOT_COMPARED.contains(&n.as_str())).collect();
    names.sort();
    names
}

fn run(name: &str) -> Run {
    let words = ["-c", SCRIPT, "bash", name].map(str::to_owned).to_vec();
    let path = format!("{DIRECTORY}:/usr/local/bin:/usr/bin:/bin");
    let variables = [
        ("PATH", path.as_str()),
        ("TMPDIR", "/home/visitor/tmp"),
        ("BASH_TSTOUT", "/home/visitor/tmp/out"),
        ("THIS_SH", "/bin/bash"),
    ];
    let variables = variables.map(|(n, v)| (n.to_owned(), v.to_owned())).to_vec();
    Run {
        name: name.to_owned(),
        words,
        directory: DIRECTORY.to_owned(),
        limit_s: LIMIT_S,
        variables,
    }
}
