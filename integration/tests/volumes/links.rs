//! A link that is cut while a volume is mounted, through gateway and executor as they are.

use std::fs::{self, File};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use posh_integration::network::{LinkState, set_link};
use posh_integration::{ChildProcess, Host};

use super::{VOLUME, mounted, mounts, must, posh, shell};

/// What docs/configuration.md says of calls while the server is out of reach.
const CALLS_FAIL_AFTER: Duration = Duration::from_secs(30);
/// On a busy machine, on top of it.
const LATE: Duration = Duration::from_secs(15);

/// What a session holds ends by itself so long after its last sign of life; there is one every
/// other second.
const LEASES_LAST: Duration = Duration::from_secs(10);

/// Reads something new of the server in a thread of its own; whoever waits for it is told.
fn reading(path: PathBuf) -> mpsc::Receiver<(std::io::Result<Vec<u8>>, Duration)> {
    let (sender, receiver) = mpsc::sync_channel(1);
    std::thread::spawn(move || {
        let began = Instant::now();
        let _ = sender.send((fs::read(path), began.elapsed()));
    });
    receiver
}

/// Without --hard calls fail after the stated time, with it they wait; either goes on with what was
/// open when the link is back, and either can be unmounted when it is not.
#[test]
fn a_cut_link_is_waited_for_and_open_files_go_on_afterwards() {
    let lab = mounted();
    let host = &lab.workstation;
    shell(host, "mkdir /mnt/hard");
    must(host, &["mount", "store1:s1", "/mnt/hard", "--hard"]);
    fs::write(lab.data(1).join("held"), "before").unwrap();
    let held =
        File::options().read(true).write(true).open(host.path(format!("{VOLUME}/held"))).unwrap();
    let mut text = String::new();
    (&held).read_to_string(&mut text).unwrap();
    assert_eq!(text, "before");

    set_link(host, 1, LinkState::Down).unwrap();
    // Nobody has looked at these: the server has to be asked.
    let soft = reading(host.path(format!("{VOLUME}/unknown")));
    let hard = reading(host.path("/mnt/hard/unknown"));
    let (failed, after) = soft.recv_timeout(CALLS_FAIL_AFTER + LATE).unwrap();
    assert_eq!(failed.unwrap_err().kind(), ErrorKind::TimedOut, "after {after:?}");
    assert!(after > Duration::from_secs(1) && after < CALLS_FAIL_AFTER + LATE, "{after:?}");
    assert!(hard.try_recv().is_err(), "a call of a hard volume did not wait");
    fs::write(lab.data(1).join("unknown"), "there").unwrap();

    set_link(host, 1, LinkState::Up).unwrap();
    let (found, after) = hard.recv_timeout(CALLS_FAIL_AFTER + LATE).unwrap();
    assert_eq!(found.unwrap(), b"there", "after {after:?}");
    let began = Instant::now();
    while fs::read(host.path(format!("{VOLUME}/unknown"))).ok().as_deref() != Some(b"there") {
        assert!(began.elapsed() < CALLS_FAIL_AFTER, "the volume does not come back");
    }
    // What was open is still that file.
    held.write_all_at(b"after!", 0).unwrap();
    held.sync_all().unwrap();
    assert_eq!(fs::read(lab.data(1).join("held")).unwrap(), b"after!");
    drop(held);

    set_link(host, 1, LinkState::Down).unwrap();
    for path in ["/mnt/hard", VOLUME] {
        let output = posh(host, &["umount", path]);
        assert!(
            began.elapsed() < 2 * CALLS_FAIL_AFTER + LATE,
            "{output:?} after {:?}",
            began.elapsed()
        );
    }
    assert_eq!(mounts(host), [""; 0]);
}

/// What a program wrote when the link went is on the server when it is back, once.
#[test]
fn writes_go_on_when_the_link_is_back() {
    let lab = mounted();
    let host = &lab.workstation;
    // A process of its own, from before: whatever this one starts closes a copy of the open file,
    // which waits for the link.
    let mut switch = Switch::start(host);
    let mut file = File::create(host.path(format!("{VOLUME}/log"))).unwrap();
    for number in 0..40 {
        if number == 10 || number == 30 {
            switch.turn();
        }
        writeln!(file, "line {number}").unwrap();
    }
    file.sync_all().unwrap();
    let expect: String = (0..40).map(|number| format!("line {number}\n")).collect();
    assert_eq!(fs::read_to_string(lab.data(1).join("log")).unwrap(), expect);
    assert_eq!(shell(host, &format!("cat {VOLUME}/log | wc -l")), "40\n");
}

/// Cuts the link and mends it, in turns.
struct Switch(ChildProcess);

impl Switch {
    fn start(host: &Host) -> Self {
        let mut shell = host.command("bash");
        shell.args([
            "-c",
            "while :; do for to in down up; do read -r _ || exit; ip link set dev s1 $to; echo; done; done",
        ]);
        shell.stdin(Stdio::piped()).stdout(Stdio::piped());
        Self(host.spawn(shell).unwrap())
    }

    /// Returns when it is done.
    fn turn(&mut self) {
        self.0.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
        self.0.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
    }
}

/// Its session ends with it: what it held on the server is nobody's any more.
#[test]
fn a_volume_that_is_unmounted_makes_nobody_wait() {
    let lab = mounted();
    let host = &lab.workstation;
    shell(host, "mkdir /mnt/other");
    must(host, &["mount", "store1:s1", "/mnt/other"]);
    // A right to write that only this volume has.
    shell(host, &format!("mkdir {VOLUME}/new; echo first > {VOLUME}/new/f; sync {VOLUME}/new"));
    must(host, &["umount", VOLUME]);
    let began = Instant::now();
    assert_eq!(
        shell(host, "cat /mnt/other/new/f; echo second >> /mnt/other/new/f; cat /mnt/other/new/f"),
        "first\nfirst\nsecond\n"
    );
    assert!(began.elapsed() < LEASES_LAST / 2, "{:?}", began.elapsed());
    must(host, &["umount", "/mnt/other"]);
}
