//! The program `posh-gateway`, started by a shell with limits of its own.

// All of this is test code; clippy's own exception knows only #[test] functions.
#![allow(clippy::unwrap_used)]

use std::{
    fs,
    io::{BufRead as _, BufReader},
    process::{Child, Command, Stdio},
};

/// A gateway below a shell that has run `setting`, and the first line that it writes to its
/// starter.
fn started(directory: &tempfile::TempDir, setting: &str) -> (Child, String) {
    let config = directory.path().join("mounts.toml");
    fs::write(&config, "").unwrap();
    let program = env!("CARGO_BIN_EXE_posh-gateway");
    let line = format!("{setting}; exec {program} --config {} --ready-fd 1", config.display());
    let mut shell = Command::new("bash");
    shell.args(["-c", &line]).env("XDG_RUNTIME_DIR", directory.path());
    let mut gateway =
        shell.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut said = String::new();
    BufReader::new(gateway.stdout.take().unwrap()).read_line(&mut said).unwrap();
    (gateway, said)
}

#[test]
fn soft_limits_of_the_first_shell_are_not_those_of_the_gateway() {
    let directory = tempfile::tempdir().unwrap();
    let settings = "ulimit -S -f 0; ulimit -S -t 600; ulimit -S -v 9000000; ulimit -S -s 4096";
    let (mut gateway, said) = started(&directory, settings);
    let limits = fs::read_to_string(format!("/proc/{}/limits", gateway.id()));
    gateway.kill().unwrap();
    gateway.wait().unwrap();
    assert_eq!(said, "ready\n");
    let limits = limits.unwrap();
    let soft = |name: &str| {
        let line = limits.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        line.split_whitespace().next().unwrap().to_owned()
    };
    let names = ["Max file size", "Max cpu time", "Max address space", "Max stack size"];
    assert_eq!(names.map(soft), ["unlimited", "unlimited", "unlimited", "4194304"]);
}

#[test]
fn below_a_hard_limit_that_would_end_it_no_gateway_starts() {
    let directory = tempfile::tempdir().unwrap();
    for (limit, said) in [
        ("-f 0", "the size of files is limited to 0 bytes here (`ulimit -f`)"),
        ("-f 20", "the size of files is limited to 20480 bytes here (`ulimit -f`)"),
        ("-f 1000000", "the size of files is limited to 1024000000 bytes here (`ulimit -f`)"),
        ("-t 3600", "processor time is limited to 3600 s here (`ulimit -t`)"),
        ("-n 24", "the number of open files is limited to 24 descriptors here (`ulimit -n`)"),
        ("-n 1023", "the number of open files is limited to 1023 descriptors here (`ulimit -n`)"),
        ("-v 700000", "virtual memory is limited to 716800000 bytes here (`ulimit -v`)"),
        ("-d 700000", "the data segment is limited to 716800000 bytes here (`ulimit -d`)"),
        ("-s 512", "the stack is limited to 524288 bytes here (`ulimit -s`)"),
    ] {
        let (mut gateway, line) = started(&directory, &format!("ulimit {limit}"));
        let _ = gateway.kill();
        gateway.wait().unwrap();
        assert!(line.starts_with(said), "{limit}: {line}");
    }
}

#[test]
fn a_gateway_starts_below_hard_limits_that_it_can_live_with() {
    let directory = tempfile::tempdir().unwrap();
    let settings = "ulimit -n 1024; ulimit -v 9000000; ulimit -d 9000000; ulimit -s 8192; \
                    ulimit -l 8; ulimit -i 1; ulimit -q 0; ulimit -c 0";
    let (mut gateway, line) = started(&directory, settings);
    gateway.kill().unwrap();
    gateway.wait().unwrap();
    assert_eq!(line, "ready\n");
}
