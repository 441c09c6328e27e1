//! The laboratory itself: hosts are apart, bytes are counted, nothing stays.

use std::fs;
use std::process::{Command, Stdio};
use std::time::Duration;

use posh_integration::process::wait_gone;
use posh_integration::wire::{Profile, check};
use posh_integration::{Lab, LabSpec, network};

use crate::programs;

fn mounts_only() -> Lab {
    Lab::start(&LabSpec::servers(2).without_executors(), &programs()).unwrap()
}

#[test]
fn each_host_has_its_own_files() {
    let lab = mounts_only();
    fs::write(lab.data(1).join("f"), "content").unwrap();
    let server = &lab.servers[0].host;
    assert!(server.path("/srv/s1/f").exists());
    assert!(!server.path("/mnt/s1").exists(), "a server must not have the workstation's paths");
    assert!(
        !lab.workstation.path("/srv/s1").exists(),
        "the workstation must not have the server's paths"
    );
    assert!(!lab.servers[1].host.path("/srv/s1").exists(), "servers must not share directories");
    assert_eq!(fs::read_to_string(lab.workstation.path("/mnt/s1/f")).unwrap(), "content");
    for path in ["/mnt/s1", "/srv/s1"] {
        assert!(
            !std::path::Path::new(path).exists(),
            "{path} must not exist outside of the laboratory"
        );
    }
}

#[test]
fn each_host_has_its_own_network() {
    let lab = mounts_only();
    let reach = |from: &posh_integration::Host, address: &str| {
        let mut probe = from.command("bash");
        probe.args(["-c", &format!("exec 3<>/dev/tcp/{address}/22")]).stderr(Stdio::null());
        from.must(probe).is_ok()
    };
    assert!(reach(&lab.workstation, "10.77.1.2") && reach(&lab.workstation, "10.77.2.2"));
    assert!(!reach(&lab.servers[0].host, "10.77.2.2"), "servers have no wire between them");
}

#[test]
fn bytes_of_a_mount_are_counted() {
    let lab = mounts_only();
    let size = 1 << 20;
    fs::write(lab.data(1).join("f"), vec![7; size]).unwrap();
    let before = lab.bytes_moved().unwrap();
    assert_eq!(fs::read(lab.workstation.path("/mnt/s1/f")).unwrap().len(), size);
    let moved = lab.bytes_moved().unwrap() - before;
    assert!(
        (size as u64..2 * size as u64).contains(&moved),
        "{moved} bytes moved for a file of {size}"
    );
}

#[test]
fn the_end_of_a_laboratory_ends_what_ran_in_it() {
    let lab = mounts_only();
    let mut sleeper = lab.workstation.command("sh");
    // A daemon with a session of its own, which no process group reaches.
    sleeper.args([
        "-c",
        "setsid sleep 1000 >/dev/null 2>&1 & cd /mnt/s1 && exec sleep 1000 >/dev/null 2>&1 &",
    ]);
    lab.workstation.must(sleeper).unwrap();
    let running: Vec<_> = hosts(&lab).flat_map(|h| h.processes().unwrap()).collect();
    for name in ["sshd", "sshfs", "ssh", "sleep"] {
        assert!(running.iter().any(|p| p.program == name), "{name} is not among {running:?}");
    }
    drop(lab);
    for process in running {
        assert!(
            wait_gone(process.pid, Duration::ZERO).unwrap(),
            "{process:?} outlived its laboratory"
        );
    }
    assert!(!fs::read_to_string("/proc/self/mountinfo").unwrap().contains("/mnt/s1"));
}

/// Not even SIGKILL of the process that owns a laboratory leaves anything behind.
#[test]
fn a_killed_owner_takes_its_laboratory_along() {
    let mut owner = Command::new(programs().find("posh-lab").unwrap());
    let mut owner = owner.args(["hold", "1"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    let mut stdout = std::io::BufReader::new(owner.stdout.take().unwrap());
    std::io::BufRead::read_line(&mut stdout, &mut line).unwrap();
    let pids: Vec<u32> = line.split_whitespace().map(|p| p.parse().unwrap()).collect();
    // sshd with its two processes for the connection, sshfs and its ssh.
    assert_eq!(pids.len(), 5, "{line}");
    owner.kill().unwrap();
    owner.wait().unwrap();
    for pid in pids {
        assert!(
            wait_gone(pid, Duration::from_secs(5)).unwrap(),
            "process {pid} outlived its owner"
        );
    }
}

fn hosts(lab: &Lab) -> impl Iterator<Item = &posh_integration::Host> {
    std::iter::once(&lab.workstation).chain(lab.servers.iter().map(|s| &s.host))
}

/// A link may be worse than asked for on a busy machine, never better.
#[test]
fn a_link_is_as_long_and_as_narrow_as_asked() {
    let profile: Profile = "20:100".parse().unwrap();
    let lab =
        Lab::start(&LabSpec::servers(1).link(profile).without_executors(), &programs()).unwrap();
    let measured =
        check::measure(&lab.workstation, &lab.servers[0].host, &network::addresses(1).1).unwrap();
    assert!(measured.round_trip >= profile.round_trip, "{measured}");
    for megabits in [measured.megabits_out, measured.megabits_back] {
        // A buffer of 50 ms that empties within the measured time is all that may come on top.
        assert!(megabits <= 110.0, "{measured}");
    }
    let (out, back) = lab.servers[0].wire.as_ref().unwrap().carried();
    assert!(out > 1_000_000 && back > 1_000_000, "{out} and {back} bytes carried");
}
