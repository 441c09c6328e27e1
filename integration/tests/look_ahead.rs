//! Directories of the first commands' patterns are listed before the shell asks. That nobody
//! else did is sure where the shell does not expand patterns at all (`set -f`); that the listing
//! was made shows in what sshfs goes on showing of a change behind its back.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use posh_integration::network;
use posh_integration::oracle::Under;
use posh_integration::services::WORKSTATION_KEY;
use posh_integration::{Lab, LabSpec, Script};

use crate::programs;

/// What a command would take that waited for a mount that hangs.
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

/// Runs `text`, and then another command whose end waits for the listings.
fn run(lab: &Lab, text: &str) {
    let both = format!("{text}\ncp \"$D/other/f\" \"$D/other/g\"");
    let script = Script::new(both).variable("D", lab.mount(1).to_str().unwrap());
    let outcome = script.run(&lab.workstation, Under::PoshExplained).unwrap();
    assert!(outcome.status.success(), "{outcome}");
    let copied: Vec<_> = outcome.report().stages("cp").collect();
    assert!(copied.len() == 1 && copied[0].is_offloaded(), "{:#?}", outcome.report());
}

/// Whether the workstation remembers a listing of `directory`: something new on the server is not in it.
fn is_remembered(lab: &Lab, directory: &str) -> bool {
    fs::write(lab.data(1).join(directory).join("new"), "").unwrap();
    let listed = fs::read_dir(lab.workstation.path(lab.mount(1).join(directory))).unwrap();
    !listed.flatten().any(|entry| entry.file_name() == "new")
}

fn lab(directories: &[&str]) -> Lab {
    let lab = Lab::start(&LabSpec::servers(1), &programs()).unwrap();
    let fill = |directory: &Path| {
        fs::create_dir_all(directory).unwrap();
        fs::write(directory.join("f"), "x\n").unwrap();
    };
    fill(&lab.data(1).join("other"));
    directories.iter().for_each(|directory| fill(&lab.data(1).join(directory)));
    lab
}

#[test]
fn directories_are_listed_before_the_shell_does() {
    let lab = lab(&["a", "b", "late", "quoted"]);
    run(&lab, "set -f\necho \"$D\"/a/* $D/b/x?.csv '$D/quoted/*' | cat > /dev/null\necho $D/late/*");
    assert!(is_remembered(&lab, "a") && is_remembered(&lab, "b"));
    assert!(!is_remembered(&lab, "late") && !is_remembered(&lab, "quoted"));
}

#[test]
fn directories_of_a_second_command_are_listed_before_the_shell_does() {
    let lab = lab(&["a", "b", "late"]);
    run(
        &lab,
        "set -f\ncat \"$D/other/f\" | wc > \"$D/out\"\n: echo\necho \"$D\"/a/* $D/b/x* | cat > /dev/null\necho $D/late/*",
    );
    assert!(is_remembered(&lab, "a") && is_remembered(&lab, "b") && !is_remembered(&lab, "late"));
}

#[test]
fn directories_that_a_first_command_may_change_are_left_to_the_shell() {
    let firsts = [
        "cat $D/other/f > $D/made/new",
        "cat $D/other/f > $HOME/out",
        "cat $D/other/f | tee $D/out",
        "sh -c :",
        "f() { :; }; f",
        "X=1 cat $D/other/f",
        "cat < /dev/null",
        "while false; do :; done",
        "cat $D/other/f | grep -c x; cat $D/other/f",
    ];
    let names: Vec<String> = (0..firsts.len()).map(|index| format!("d{index}")).collect();
    let lab = lab(&names.iter().map(String::as_str).collect::<Vec<_>>());
    for (first, name) in firsts.iter().zip(&names) {
        run(&lab, &format!("set -f\n{}\necho \"$D/{name}\"/*", first.replace("made", name)));
        assert!(!is_remembered(&lab, name), "{first}");
    }
}

#[test]
fn what_a_first_command_changes_behind_a_link_is_seen_by_the_second() {
    let lab = lab(&["d"]);
    for round in 0..5 {
        let name = format!("made-{round}");
        symlink(format!("d/{name}"), lab.data(1).join(format!("link-{round}"))).unwrap();
        let text = format!("cat \"$D/other/f\" > \"$D/link-{round}\"\necho \"$D\"/d/*; cat \"$D/d/{name}\"");
        let script = Script::new(text).variable("D", lab.mount(1).to_str().unwrap());
        let outcome = script.run(&lab.workstation, Under::PoshExplained).unwrap();
        let stdout = String::from_utf8_lossy(&outcome.stdout);
        assert!(outcome.status.success() && stdout.contains(&name) && stdout.ends_with("x\n"), "{outcome}");
    }
}

#[test]
fn a_program_that_changes_the_server_itself_is_waited_for() {
    let lab = lab(&["d"]);
    let options = "-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR -o BatchMode=yes";
    let server = network::addresses(1).1;
    let text = format!("ssh -n {options} -i {WORKSTATION_KEY} root@{server} touch /srv/s1/d/new\necho \"$D\"/d/*");
    let script = Script::new(text).variable("D", lab.mount(1).to_str().unwrap());
    let outcome = script.run(&lab.workstation, Under::PoshExplained).unwrap();
    assert!(outcome.status.success() && String::from_utf8_lossy(&outcome.stdout).contains("/d/new"), "{outcome}");
}

#[test]
fn a_mount_that_hangs_delays_nobody_on_another_one() {
    let lab = Lab::start(&LabSpec::servers(2), &programs()).unwrap();
    for index in [1, 2] {
        fs::write(lab.data(index).join("f"), "x\n").unwrap();
    }
    let script = |text: &str| {
        let script = Script::new(text).variable("D", lab.mount(1).to_str().unwrap());
        script.variable("E", lab.mount(2).to_str().unwrap())
    };
    script("cp $D/f $D/g").run(&lab.workstation, Under::Posh).unwrap();
    let hung = Stopped::new(lab.mount_process(2));
    // The shell itself needs nothing there.
    let first = script("set -f\n: \"$E\"/* | cat").run(&lab.workstation, Under::Posh).unwrap();
    assert!(first.status.success(), "{first}");
    let outcome = script("cp $D/f $D/h").run(&lab.workstation, Under::PoshExplained).unwrap();
    assert!(outcome.status.success() && outcome.wall < PATIENCE, "{outcome}");
    assert!(outcome.report().stages("cp").all(|stage| stage.is_offloaded()), "{:#?}", outcome.report());
    drop(hung);
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
        posh.args(["-c", "cat /mnt/s1/f; git -C /mnt/s1 status"]).stdout(Stdio::null()).stderr(Stdio::null());
        host.spawn(posh).unwrap()
    });
    for _ in 0..4 {
        let outcome = script.clone().run(host, Under::PoshExplained).unwrap();
        assert!(outcome.status.success() && outcome.wall < PATIENCE, "{outcome}");
        assert!(outcome.report().stages("cat").all(|stage| stage.is_offloaded()), "{:#?}", outcome.report());
    }
    drop(hung);
    for mut shell in waiting {
        assert!(shell.wait().unwrap().code().is_some());
    }
}

#[test]
fn what_a_first_command_changes_is_seen_by_the_second() {
    let lab = lab(&["d"]);
    for round in 0..5 {
        let text = format!("cat \"$D\"/d/* > \"$D/d/made-{round}\"; ls \"$D/d\"; echo \"$D\"/d/*");
        let script = Script::new(text).variable("D", lab.mount(1).to_str().unwrap());
        let outcome = script.run(&lab.workstation, Under::PoshExplained).unwrap();
        let made = format!("made-{round}");
        let times = String::from_utf8_lossy(&outcome.stdout).matches(&made).count();
        assert!(outcome.status.success() && times == 2, "{outcome}");
    }
}
