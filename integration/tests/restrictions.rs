//! A process that has been given less than its user has must not get it back on a server.

use std::fs;

use posh_integration::oracle::Under;
use posh_integration::{Lab, LabSpec, Script};

use crate::programs;

const PROGRAMS: &str = posh_integration::host::PROGRAMS;

#[test]
fn a_command_with_less_than_the_gateway_s_rights_runs_here() {
    let lab = Lab::start(&LabSpec::servers(1), &programs()).unwrap();
    fs::write(lab.data(1).join("f"), "x\n").unwrap();
    let run = |before: &str| {
        let script = Script::new(format!("{before} cat /mnt/s1/f"));
        let outcome = script.run(&lab.workstation, Under::PoshExplained).unwrap();
        assert_eq!(
            (outcome.stdout.as_slice(), outcome.status.code()),
            (&b"x\n"[..], Some(0)),
            "{before}: {outcome}"
        );
        let stages: Vec<(bool, String)> = outcome
            .report()
            .stages("cat")
            .map(|stage| (stage.is_offloaded(), stage.reason.clone()))
            .collect();
        (stages, format!("{outcome}"))
    };
    let (stages, said) = run("env");
    assert!(stages.len() == 1 && stages[0].0, "{said}");
    for before in [
        "setpriv --no-new-privs",
        "setpriv --groups 7",
        "setpriv --bounding-set -sys_admin",
        "unshare -m",
        "unshare -U -r",
    ] {
        let (stages, said) = run(before);
        assert!(stages.iter().all(|(is_offloaded, _)| !is_offloaded), "{before}: {said}");
    }
    let (stages, said) = run("setpriv --no-new-privs");
    assert!(stages.iter().any(|(_, reason)| reason.contains("with no_new_privs")), "{said}");
}

/// It would mount what it likes where the user looks, or end the gateway.
#[test]
fn a_confined_program_does_not_command_the_gateway() {
    let lab = Lab::start(&LabSpec::servers(1), &programs()).unwrap();
    fs::write(lab.data(1).join("f"), "x\n").unwrap();
    let posh = format!("{PROGRAMS}/posh");
    let text = format!(
        "{posh} -c 'cat /mnt/s1/f'; {posh} mounts > /dev/null; echo $?
         setpriv --no-new-privs {posh} mounts > /dev/null 2>&1; echo $?
         setpriv --no-new-privs {posh} gateway stop > /dev/null 2>&1; echo $?
         setpriv --no-new-privs {posh} -c 'cat /mnt/s1/f' 2> said; grep -c 'gateway.s own rights' said
         {posh} mounts > /dev/null; echo $?"
    );
    let outcome = Script::new(text).run(&lab.workstation, Under::Shell).unwrap();
    let said = String::from_utf8_lossy(&outcome.stdout).into_owned();
    let lines: Vec<&str> = said.lines().collect();
    assert_eq!(lines[..2], ["x", "0"], "{outcome}");
    assert!(lines[2] != "0" && lines[3] != "0", "{outcome}");
    assert_eq!(lines[4..], ["x", "1", "0"], "{outcome}");
}
