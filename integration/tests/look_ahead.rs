//! Directories of a first command's patterns are listed before the shell asks. That nobody
//! else did is sure where the shell does not expand patterns at all (`set -f`); that the listing
//! was made shows in what sshfs goes on showing of a change behind its back.

use std::fs;
use std::path::Path;

use posh_integration::oracle::Under;
use posh_integration::{Lab, LabSpec, Script};

use crate::programs;

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
