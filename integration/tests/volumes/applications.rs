//! Programs that ask much of a file system, on a volume: a database whose writer is killed,
//! editors, synchronisers, a compiler.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use posh_integration::process::ChildProcess;
use posh_integration::services;
use posh_integration::volumes::Mounts;
use posh_integration::{Host, Lab, LabSpec};

use super::shell;
use crate::programs;

/// Where the laboratory mounts the first server's export.
const VOLUME: &str = "/mnt/s1";
/// How often the database's writer is killed.
const KILLS: u64 = 8;

fn volume() -> Lab {
    Lab::start(&LabSpec::servers(1).mounts(Mounts::Volume), &programs()).unwrap()
}

/// A process of the workstation that is killed with the test.
fn begin(host: &Host, text: &str) -> ChildProcess {
    let mut command = host.command("bash");
    command.args(["-c", text]).stdout(Stdio::null()).stderr(Stdio::null());
    host.spawn(command).unwrap()
}

/// Each row that was said to be committed is there, whenever the writer was killed, and the
/// database is whole.
#[test]
fn sqlite_keeps_what_was_committed_when_its_writer_is_killed() {
    let lab = volume();
    let host = &lab.workstation;
    let database = format!("{VOLUME}/rows.db");
    shell(
        host,
        &format!("sqlite3 {database} 'create table rows(number integer primary key, text)'"),
    );
    // Its standard output is the transactions that have ended.
    let writer = format!(
        "echo $$ > ~/group; from=$(sqlite3 {database} 'select coalesce(max(number), 0) from rows')
         for n in $(seq $((from + 1)) $((from + 10000))); do
             printf \"begin; insert into rows values(%d, hex(randomblob(2000))); commit; select %d;\\n\" $n $n
         done | sqlite3 -bail {database} > ~/committed"
    );
    for round in 0..KILLS {
        fs::write(host.path("/home/user/committed"), "").unwrap();
        // A group of its own: all of the pipeline is killed at once.
        let mut process =
            begin(host, &format!("exec setsid bash -c '{}'", writer.replace('\'', "'\\''")));
        // Until something was committed, and then a moment of the round's own more.
        let committed =
            || fs::metadata(host.path("/home/user/committed")).is_ok_and(|file| file.size() > 0);
        while !committed() {
            assert!(process.try_wait().unwrap().is_none(), "the writer has ended in round {round}");
        }
        assert!(
            !process.wait_at_most(Duration::from_millis(17 * round)).unwrap(),
            "the writer has ended"
        );
        shell(host, "read group < ~/group; kill -9 -- -$group");
        process.wait().unwrap();
        shell(host, "read group < ~/group; while kill -0 -- -$group 2> /dev/null; do :; done");
        let last = shell(
            host,
            "tail -n 1 ~/committed | grep -x '[0-9]*' || tail -n 2 ~/committed | head -n 1",
        );
        let last: u64 = last.trim().parse().unwrap();
        let query =
            format!("pragma integrity_check; select count(*) from rows where number <= {last}");
        assert_eq!(
            shell(host, &format!("sqlite3 {database} '{query}'")),
            format!("ok\n{last}\n"),
            "round {round}"
        );
        // What the server has is the same, and needs nothing any more.
        let copy = tempfile::NamedTempFile::new().unwrap();
        fs::copy(lab.data(1).join("rows.db"), copy.path()).unwrap();
        let output =
            Command::new("sqlite3").arg("-readonly").arg(copy.path()).arg(&query).output().unwrap();
        assert_eq!(
            String::from_utf8_lossy(&output.stdout),
            format!("ok\n{last}\n"),
            "round {round}, on the server"
        );
    }
}

#[test]
fn git_clones_checks_out_collects_and_checks() {
    let lab = volume();
    let text = format!(
        "set -e; export GIT_CONFIG_GLOBAL=/dev/null GIT_AUTHOR_NAME=n GIT_AUTHOR_EMAIL=e GIT_COMMITTER_NAME=n GIT_COMMITTER_EMAIL=e
         git init -q -b main /tmp/origin; cd /tmp/origin
         for round in 1 2; do
             for i in $(seq 30); do mkdir -p d$((i % 7)); seq $((i * round * 9)) > d$((i % 7))/f$i; done
             git add .; git commit -q -m $round; git tag r$round
         done
         cd {VOLUME}; git clone -q /tmp/origin one; cd one; git checkout -q r1; git status --porcelain
         git checkout -q -b side; git rm -q -r d1; cp -r d2 new; git add new; git commit -q -m side; git checkout -q main
         git merge -q -s ours side -m merged; git checkout -q side; git checkout -q -
         git repack -q -a -d; git gc -q --prune=now; git fsck --strict; git status --porcelain; git log --format=%s -n 1
         cd ..; git clone -q --no-hardlinks one two; git -C two fsck; diff -r --exclude=.git one two"
    );
    assert_eq!(shell(&lab.workstation, &text), "merged\n");
}

#[test]
fn editors_archives_and_rsync_do_what_they_do_elsewhere() {
    let lab = volume();
    let script = |place: &str| {
        format!(
            "set -e; mkdir -p {place}/t/d; cd {place}; for i in $(seq 40); do seq $i > t/d/f$i; done; ln -s d/f1 t/link; ln t/d/f2 t/hard
             for i in 1 2 3; do vi -es -c '1s/^/edited /' -c wq t/d/f$i < /dev/null; done; head -n 1 t/d/f3 t/hard
             tar -cf t.tar t; mkdir x; tar -xf t.tar -C x; diff -r --no-dereference t x/t
             rsync -aH t/ r/; rsync -aH --delete --itemize-changes t/ r/; rm r/d/f9; echo more >> t/d/f8
             rsync -aH --delete t/ r/; diff -r --no-dereference t r; stat -c '%n %h %A' r/* r/d/f[1-4]
             cp -a t c; mv c/d c/e; find . -type f | sort | xargs md5sum | grep -v t.tar; rm -r t x r c; ls"
        )
    };
    assert_eq!(
        shell(&lab.workstation, &script(VOLUME)),
        shell(&lab.workstation, &script("/tmp/plain"))
    );
}

/// rustc maps what it links, locks its directories and renames into place.
#[test]
fn cargo_builds_a_crate() {
    let lab = volume();
    let host = &lab.workstation;
    for (name, text) in [
        ("Cargo.toml", "[package]\nname = \"tiny\"\nversion = \"0.1.0\"\nedition = \"2021\"\n"),
        ("src/main.rs", "fn main() {\n    println!(\"{}\", tiny::text());\n}\n"),
        ("src/lib.rs", "pub fn text() -> &'static str {\n    \"built on a volume\"\n}\n"),
    ] {
        fs::create_dir_all(host.path(format!("{VOLUME}/tiny/src"))).unwrap();
        services::write_file(host, format!("{VOLUME}/tiny/{name}"), text.as_bytes()).unwrap();
    }
    // The toolchain that has built this test; laboratories have homes of their own.
    let cargo = PathBuf::from(env!("CARGO"));
    let tools = cargo.parent().unwrap().display();
    let build = format!(
        "cd {VOLUME}/tiny; export PATH={tools}:$PATH; cargo build --quiet --offline; target/debug/tiny"
    );
    assert_eq!(shell(host, &build), "built on a volume\n");
    let again = build.replace(
        "cargo build",
        "touch src/lib.rs; sed -i s/built/rebuilt/ src/lib.rs; cargo build",
    );
    assert_eq!(shell(host, &again), "rebuilt on a volume\n");
}
