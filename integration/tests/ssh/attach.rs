//! `posh attach`: the program comes to the server, or nothing there changes.

use super::*;

/// `posh attach` in a terminal, with this answer to its question.
fn attach(lab: &Lab, answer: &str) -> RunOutcome {
    let mut command = lab.workstation.command("sh");
    let posh = lab.workstation.programs().join("posh");
    command.args([
        "-c",
        &format!("echo {answer} | script -qec '{} attach store1' /dev/null", posh.display()),
    ]);
    collect(&lab.workstation, command, "posh attach", SCRIPT_LIMIT).unwrap()
}

#[test]
fn attach_installs_and_upgrades_after_asking() {
    let lab = lab();
    let server = &lab.servers[0].host;
    let installed = server.path(INSTALLED);
    fs::remove_file(&installed).unwrap();
    let refused = posh(&lab.workstation, &["attach", "store1"]);
    assert!(!refused.status.success());
    assert!(String::from_utf8_lossy(&refused.stderr).contains("give --yes"), "{refused}");
    let declined = attach(&lab, "n");
    assert!(
        !declined.status.success() && stdout(&declined).contains("nothing was copied"),
        "{declined}"
    );
    assert!(!installed.exists());

    let done = attach(&lab, "y");
    assert!(
        done.status.success() && stdout(&done).contains("to ~/.local/bin on store1? [y/N]"),
        "{done}"
    );
    let built = lab.workstation.path(PROGRAMS).join("posh-executor");
    assert!(fs::read(&installed).unwrap() == fs::read(&built).unwrap());
    let outcome = assert_same(&lab.workstation, &Script::new("cat /mnt/s1/f | grep needle | sort"));
    assert_offloaded(outcome.report());
    assert!(stdout(&posh(&lab.workstation, &["attach", "store1"])).contains("already"));

    // One of another version goes; what runs of it is not disturbed.
    let silent = Silent::start(&lab);
    fs::remove_file(&installed).unwrap();
    write_file(server, INSTALLED, b"#!/bin/sh\necho posh-executor 0.0.1\n").unwrap();
    fs::set_permissions(&installed, fs::Permissions::from_mode(0o755)).unwrap();
    assert!(posh(&lab.workstation, &["attach", "--yes", "store1"]).status.success());
    assert!(fs::read(&installed).unwrap() == fs::read(&built).unwrap());
    commands(&lab);
    kill(the_ssh(&lab).pid);
    silent.rest();
    let left: Vec<_> = fs::read_dir(installed.parent().unwrap())
        .unwrap()
        .map(|e| e.unwrap().file_name())
        .collect();
    assert_eq!(left, ["posh-executor"]);
}

/// What came only in part, or does not run there, replaces nothing.
#[test]
fn attach_puts_nothing_unfinished_in_place() {
    let lab = lab();
    let server = &lab.servers[0].host;
    let installed = server.path(INSTALLED);
    fs::remove_file(&installed).unwrap();
    write_file(server, INSTALLED, b"of the user's own").unwrap();
    server
        .run(|| {
            let point = "/home/user/.local/bin";
            let none: Option<&str> = None;
            let flags = nix::mount::MsFlags::MS_BIND;
            nix::mount::mount(Some(point), point, none, flags, none)?;
            let flags = flags | nix::mount::MsFlags::MS_REMOUNT | nix::mount::MsFlags::MS_NOEXEC;
            nix::mount::mount(none, point, none, flags, none)
        })
        .unwrap();
    let failed = posh(&lab.workstation, &["attach", "--yes", "store1"]);
    let said = String::from_utf8_lossy(&failed.stderr).into_owned();
    assert!(!failed.status.success() && said.contains("Permission denied"), "{said}");
    assert_eq!(fs::read(&installed).unwrap(), b"of the user's own");
    assert_eq!(fs::read_dir(installed.parent().unwrap()).unwrap().count(), 1);
}
