//! A mount that hangs holds up nobody who does not use it.

use std::fs;
use std::process::Stdio;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use posh_integration::oracle::Under;
use posh_integration::{Lab, LabSpec, Script};

use crate::programs;

/// Longer than any command takes that needs nothing of the mount, shorter than the hang.
const PATIENCE: Duration = Duration::from_secs(25);

/// A process that answers nobody as long as this lives.
struct Stopped(Pid);

impl Stopped {
    fn new(process: u32) -> Stopped {
        let process = Pid::from_raw(process.try_into().unwrap());
        kill(process, Signal::SIGSTOP).unwrap();
        Stopped(process)
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        let _ = kill(self.0, Signal::SIGCONT);
    }
}

/// The gateway looks at what PATH names, and at git's settings at home; its tasks share one thread.
#[test]
fn shells_whose_path_and_home_hang_delay_no_other_one() {
    let lab = Lab::start(&LabSpec::servers(2), &programs()).unwrap();
    let host = &lab.workstation;
    fs::write(lab.data(1).join("f"), "x\n").unwrap();
    fs::create_dir(lab.data(2).join("bin")).unwrap();
    let far = lab.mount(2).to_str().unwrap().to_owned();
    let script = Script::new("cat $D/f").variable("D", lab.mount(1).to_str().unwrap());
    script.clone().run(host, Under::Posh).unwrap();
    let hung = Stopped::new(lab.mount_process(2));
    let waiting = [(); 4].map(|()| {
        let mut posh = host.command(host.programs().join("posh"));
        posh.env("PATH", format!("/usr/bin:/bin:{far}/bin")).env("HOME", &far);
        posh.args(["-c", "cat /mnt/s1/f; git -C /mnt/s1 status"])
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        host.spawn(posh).unwrap()
    });
    for _ in 0..4 {
        let outcome = script.clone().run(host, Under::PoshExplained).unwrap();
        assert!(outcome.status.success() && outcome.wall < PATIENCE, "{outcome}");
        assert!(
            outcome.report().stages("cat").all(|stage| stage.is_offloaded()),
            "{:#?}",
            outcome.report()
        );
    }
    drop(hung);
    for mut shell in waiting {
        assert!(shell.wait().unwrap().code().is_some());
    }
}
