//! What somebody at a terminal sees and does: the same under posh as in the shell
//! alone. Each story is told once by the shell on the mount, which is the oracle, and
//! once by posh; what both wrote on their terminals must be the same bytes.

mod ends;
mod jobs;
mod output;
mod shells;
mod story;

use std::fs;
use std::path::Path;
use std::process::Command;

use posh_integration::{Lab, LabSpec};

use crate::programs;

/// A laboratory with files to look at.
fn lab() -> Lab {
    lab_of(&LabSpec::servers(1))
}

fn lab_of(spec: &LabSpec) -> Lab {
    let lab = Lab::start(spec, &programs()).unwrap();
    fill(&lab.data(1));
    make_repository(&lab);
    lab
}

fn fill(data: &Path) {
    let lines = |count: usize, step: usize| -> String {
        let line = |i: usize| {
            format!(
                "line {} with {}\n",
                i * step % 1009,
                if i % 50 == 3 { "a needle" } else { "hay" }
            )
        };
        (0..count).map(line).collect()
    };
    fs::write(data.join("f"), lines(400, 7)).unwrap();
    fs::write(data.join("g"), lines(400, 7).replace("line 21 ", "line twenty-one ")).unwrap();
    fs::write(data.join("large"), lines(200_000, 13)).unwrap();
    fs::write(data.join("log"), "hay\na needle\nhay\n").unwrap();
    fs::create_dir(data.join("many")).unwrap();
    for i in 0..60 {
        fs::write(data.join(format!("many/{}-{i}", "name".repeat(1 + i % 4))), lines(i, 3))
            .unwrap();
    }
    for odd in ["with space", "tab\there", "new\nline", "ünïcödé", "quote'd", "-dash"] {
        fs::write(data.join("many").join(odd), "odd\n").unwrap();
    }
    fs::create_dir(data.join("many/directory")).unwrap();
    std::os::unix::fs::symlink("f", data.join("link")).unwrap();
    std::os::unix::fs::symlink("nowhere", data.join("many/dangling")).unwrap();
    fs::write(data.join("many/archive.tar.gz"), "").unwrap();
}

fn make_repository(lab: &Lab) {
    let host = &lab.servers[0].host;
    let git = |words: &[&str]| {
        let mut command: Command = host.command("git");
        command
            .args([
                "-C",
                "/srv/s1/repo",
                "-c",
                "user.name=A User",
                "-c",
                "user.email=user@example.org",
            ])
            .args(words);
        command
            .env("GIT_AUTHOR_DATE", "2024-05-06T07:08:09Z")
            .env("GIT_COMMITTER_DATE", "2024-05-06T07:08:09Z");
        host.must(command).unwrap();
    };
    let repository = lab.data(1).join("repo");
    fs::create_dir(&repository).unwrap();
    git(&["init", "-q", "-b", "main"]);
    // What git keeps of files is then the same over the mount and on the server.
    git(&["config", "core.checkStat", "minimal"]);
    git(&["config", "core.trustctime", "false"]);
    for (number, text) in (1..).zip(["one\n", "one\ntwo\n", "one\ntwo\nthree\n"]) {
        fs::write(repository.join("file"), text).unwrap();
        git(&["add", "file"]);
        git(&[
            "commit",
            "-q",
            "-m",
            &format!("change number {number} which has a subject of some length"),
        ]);
    }
    fs::write(repository.join("file"), "one\n2\nthree\nfour\n").unwrap();
}
