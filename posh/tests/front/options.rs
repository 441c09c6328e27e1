//! Words that are the shell's: its options, scripts and commands, exactly as bash takes them.

use std::{fs, os::unix::process::CommandExt as _, process::Command};

use crate::{assert_same, fake::Installed, stderr, stdout};

/// Words of a shell, in a directory with the script `s` and the file `rc`.
const LINES: &[&[&str]] = &[
    &["-c", "echo $0 $* $-", "a", "b"],
    &["-c", "echo $*", "x", "--", "--explain", "a"],
    &["-c", ""],
    &["-c"],
    &["-c", "-x"],
    &["-c", "--", "-x"],
    &["-c", "exit 3"],
    &["-c", "kill -TERM $$"],
    &["-lc", "shopt login_shell; echo $0 $-"],
    &["-l", "-c", "shopt login_shell"],
    &["--login", "-c", "shopt login_shell"],
    &["--noprofile", "--norc", "-l", "-c", "echo $-"],
    &["-ec", "false; echo no"],
    &["-ceu", "echo $-"],
    &["-xc", "echo x"],
    &["-x", "-c", "echo x"],
    &["-e", "s", "a", "b"],
    &["-x", "s"],
    &["-n", "s"],
    &["-v", "s"],
    &["-l", "s"],
    &["-D", "s"],
    &["--dump-strings", "s"],
    &["--pretty-print", "s"],
    &["s", "1", "2"],
    &["./s"],
    &["--", "s"],
    &["-", "s", "a"],
    &["-s", "a", "b"],
    &["nosuch"],
    &[""],
    &["-u", "-c", "echo $nope"],
    &["-f", "-c", "echo *"],
    &["-B", "-c", "echo {a,b}"],
    &["+B", "-c", "echo {a,b}"],
    &["+x", "-c", "echo $-"],
    &["-k", "-c", "echo $-"],
    &["-C", "-c", "echo x > s"],
    &["-T", "-c", "echo $-"],
    &["-E", "-c", "echo $-"],
    &["-P", "-c", "echo $-"],
    &["-p", "-c", "echo $-"],
    &["-t", "-c", "echo 1; echo 2"],
    &["-r", "-c", "cd /"],
    &["--restricted", "-c", "cd /"],
    &["-o", "pipefail", "-c", "false | true; echo $?"],
    &["+o", "pipefail", "-c", "false | true; echo $?"],
    &["-eu", "-o", "pipefail", "-c", "echo $-; set -o | grep pipefail"],
    &["-o", "nosuch", "-c", "x"],
    &["-o"],
    &["-O", "extglob", "-c", "shopt extglob"],
    &["+O", "extglob", "-c", "shopt extglob"],
    &["-O"],
    &["--posix", "-c", "shopt -o posix"],
    &["--verbose", "-c", "echo v"],
    &["--rcfile", "rc", "-i", "-c", "echo x"],
    &["--init-file", "rc", "-ic", "echo x"],
    &["--rcfile"],
    &["--bogus"],
    &["-Z"],
];

#[test]
fn the_shells_own_words_are_left_to_it() {
    let installed = Installed::new();
    let here = installed.at("words");
    fs::create_dir(&here).unwrap();
    fs::write(here.join("s"), "echo \"in $0 $*\" $-\nshopt login_shell\necho $\"text\"\n").unwrap();
    fs::set_permissions(here.join("s"), std::os::unix::fs::PermissionsExt::from_mode(0o755))
        .unwrap();
    fs::write(here.join("rc"), "echo rc\n").unwrap();
    let posh = installed.at("bin/posh");
    for line in LINES {
        let outcome = |command: &mut Command| command.current_dir(&here).output().unwrap();
        let ours = outcome(&mut installed.command(&posh, line));
        let theirs = outcome(&mut installed.command("bash", line));
        println!("{line:?}: {} {}", stdout(&ours), stderr(&ours));
        assert_same(&ours, &theirs);
        let with_own = [&["--door", "hook"], *line].concat();
        assert_same(&outcome(&mut installed.command(&posh, &with_own)), &theirs);
    }
}

/// As login(1) and sshd(8) start one.
#[test]
fn a_dash_before_its_name_makes_a_login_shell() {
    let installed = Installed::new();
    let text = "shopt login_shell; echo $0";
    let outcome = |program: &str, name: &str, words: &[&str]| {
        let mut command = installed.command(program, words);
        command.arg0(name).output().unwrap()
    };
    let theirs = outcome("bash", "-bash", &["-c", text]);
    assert!(stdout(&theirs).contains("on\n-bash"), "{}", stdout(&theirs));
    let posh = installed.at("bin/posh");
    let posh = posh.to_str().unwrap();
    assert_same(&outcome(posh, "-posh", &["-c", text]), &theirs);
    assert_same(&outcome(posh, "-posh", &["--door", "hook", "-c", text]), &theirs);
}
