//! Ctrl-C, Ctrl-\, Ctrl-Z and what a shell makes of them: the foreground and the
//! background, and the server in either case.

use std::fs;

use posh_integration::Shell;
use posh_integration::running::Running;

use super::lab;
use super::story::{Teller, tell};

// fish has a function of that name; zsh and bash know `command` too.
const FOLLOW: &str =
    "tail -n +1 -f /mnt/s1/log | command grep --color=never --line-buffered needle";
const SIGN: &str = "a needle";
/// The end of the followed file.
const WHOLE: &str = "a needle\r\nhay\r\n";
const CTRL_C: &str = "\x03";
const CTRL_D: &str = "\x04";
const CTRL_Z: &str = "\x1a";
const CTRL_BACKSLASH: &str = "\x1c";

fn follow(t: &mut Teller<'_>) -> Vec<Running> {
    t.begin(FOLLOW, SIGN);
    [t.remote("tail"), t.remote_if_joined("grep")].concat()
}

fn interrupted(t: &mut Teller<'_>) {
    let remote = follow(t);
    assert_eq!(t.key(CTRL_C), 130);
    t.assert_gone(&remote);
    t.begin("tail -n +1 -f /mnt/s1/log", WHOLE);
    let remote = t.remote("tail");
    assert_eq!(t.key(CTRL_C), 130);
    t.assert_gone(&remote);
    assert_eq!(t.line("echo on we go"), 0);
}

#[test]
fn ctrl_c() {
    let lab = lab();
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        tell(&lab, shell, "", interrupted);
    }
}

#[test]
fn ctrl_backslash() {
    let lab = lab();
    for shell in [Shell::Bash, Shell::Zsh] {
        tell(&lab, shell, "", |t| {
            t.line("ulimit -c 0");
            let remote = follow(t);
            assert_eq!(t.key(CTRL_BACKSLASH), 131);
            t.assert_gone(&remote);
        });
    }
}

/// Ctrl-C between commands, in a function, in a substitution.
#[test]
fn ctrl_c_inside_of_the_language() {
    let lab = lab();
    tell(&lab, Shell::Bash, "", |t| {
        t.line("f() { tail -n +1 -f \"$1\" | grep --line-buffered needle; echo not reached; }");
        t.begin("f /mnt/s1/log", SIGN);
        let remote = [t.remote("tail"), t.remote_if_joined("grep")].concat();
        assert_eq!(t.key(CTRL_C), 130);
        t.assert_gone(&remote);
        t.begin("x=$(tail -n +1 -f /mnt/s1/log | tee /dev/stderr); echo not reached", WHOLE);
        let remote = t.remote("tail");
        assert_eq!(t.key(CTRL_C), 130);
        t.assert_gone(&remote);
        t.begin("for i in 1 2 3; do tail -n +1 -f /mnt/s1/log; done; echo not reached", WHOLE);
        let remote = t.remote("tail");
        assert_eq!(t.key(CTRL_C), 130);
        t.assert_gone(&remote);
        t.begin("while :; do tail -n +1 -f /mnt/s1/log | grep --line-buffered needle; done", SIGN);
        let remote = [t.remote("tail"), t.remote_if_joined("grep")].concat();
        assert_eq!(t.key(CTRL_C), 130);
        t.assert_gone(&remote);
        t.begin("(trap 'echo trapped' INT; tail -n +1 -f /mnt/s1/log; echo goes on)", WHOLE);
        t.key(CTRL_C);
        t.assert_gone(&[]);
    });
}

#[test]
fn job_control() {
    let lab = lab();
    for shell in [Shell::Bash, Shell::Zsh] {
        tell(&lab, shell, "", stopped_and_continued);
    }
}

fn stopped_and_continued(t: &mut Teller<'_>) {
    let remote = follow(t);
    assert_eq!(t.key(CTRL_Z), 148);
    t.append("not seen while stopped: needle 1\n");
    t.line("jobs");
    // From being stopped: it has the terminal before it goes on.
    t.begin("fg", "needle 1");
    t.append("needle 2\n");
    t.until("needle 2");
    assert_eq!(t.key(CTRL_Z), 148);
    // No prompt before the job goes on: what zsh writes while it hears of that is lost, its prompt
    // with the rest.
    t.begin("bg; read -r line", "needle");
    t.append("needle 3\n");
    t.until("needle 3");
    t.key("\r");
    t.line("jobs");
    // Not `wait %1`: a shell that hears of the end between the two has no such job any more. How it
    // ended, it says.
    t.line("kill %1; wait");
    t.assert_gone(&remote);
    t.line("jobs");
}

/// Killed while stopped, and the shell left with a stopped job.
#[test]
fn a_stopped_job_ends() {
    let lab = lab();
    tell(&lab, Shell::Bash, "", |t| {
        let remote = follow(t);
        assert_eq!(t.key(CTRL_Z), 148);
        t.line("kill %1; fg");
        t.assert_gone(&remote);
        let _ = follow(t);
        assert_eq!(t.key(CTRL_Z), 148);
        // The first time bash warns of it.
        t.line("exit");
    });
    assert_nothing_left(&lab);
}

fn assert_nothing_left(lab: &posh_integration::Lab) {
    for host in [&lab.servers[0].host, &lab.workstation] {
        let left = posh_integration::quiet::processes_left(host, super::story::PROMISE).unwrap();
        assert!(left.is_empty(), "left on {}: {left:?}", host.name());
    }
}

#[test]
fn jobs_in_the_background() {
    let lab = lab();
    tell(&lab, Shell::Bash, "", |t| {
        t.by_luck("grep -c needle /mnt/s1/large > /mnt/s1/count &\r");
        t.by_luck("wait %1; cat /mnt/s1/count\r");
        t.line("cat /mnt/s1/count");
        // A writer that the terminal stops.
        t.line("stty tostop");
        t.by_luck("grep -c needle /mnt/s1/large &\r");
        t.by_luck("until [ -n \"$(jobs -s)\" ]; do :; done\r");
        t.line("jobs");
        t.line("fg");
        t.line("stty -tostop");
        // A reader that the terminal stops.
        t.by_luck("cat > /mnt/s1/typed &\r");
        t.by_luck("until [ -n \"$(jobs -s)\" ]; do :; done\r");
        t.begin("fg", "/mnt/s1/typed");
        t.press("typed by hand\r");
        t.until("typed by hand\r\n");
        t.key(CTRL_D);
        t.line("cat /mnt/s1/typed");
    });
}

#[test]
fn what_is_typed_into_a_file() {
    let lab = lab();
    tell(&lab, Shell::Bash, "", |t| {
        // By then the line editor has given the terminal back.
        t.begin("echo re''ady; cat > /mnt/s1/typed; echo end of $?", "ready\r\n");
        t.press("first line\rsecond line\r");
        t.until("second line\r\n");
        t.key(CTRL_D);
        t.line("cat /mnt/s1/typed");
        t.line("wc -l < /mnt/s1/typed");
        t.begin("echo re''ady; grep -n line - /mnt/s1/typed", "ready\r\n");
        t.press("one more line\r");
        t.until("1:one more line");
        t.key(CTRL_D);
    });
}

/// The terminal is as it was, however the remote command ended.
#[test]
fn modes_after_a_killed_run() {
    let lab = lab();
    tell(&lab, Shell::Bash, "", |t| {
        t.line("stty -a");
        let before = t.session.terminal().modes().unwrap();
        for end in [CTRL_C, CTRL_BACKSLASH, CTRL_Z] {
            let _ = follow(t);
            t.key(end);
            // When the shell tells of the job's end is a matter of luck.
            if end == CTRL_Z {
                t.by_luck("kill -9 %1; fg\r");
            }
            t.by_luck("stty -a >> ~/modes\r");
        }
        let modes = fs::read_to_string(t.lab.workstation.path(t.home).join("modes")).unwrap();
        let [one, two, three] = modes.split_inclusive("-extproc\n").collect::<Vec<_>>()[..] else {
            panic!("{modes}")
        };
        assert_eq!((one, one), (two, three));
        let after = t.session.terminal().modes().unwrap();
        assert_eq!(format!("{before:?}"), format!("{after:?}"));
    });
}
