//! Interactive shells with start-up files, prompts, completion, history; pagers at the
//! end of a remote pipeline; and terminals that change their size.

use posh_integration::Shell;
use posh_integration::terminal::TerminalSize;

use super::lab;
use super::story::{Teller, tell};

const UP: &str = "\x1b[A";

/// What Debian gives to new users: aliases with colours, completion, a prompt.
fn skeleton() -> String {
    std::fs::read_to_string("/etc/skel/.bashrc").unwrap()
}

#[test]
fn a_users_own_bashrc() {
    let lab = lab();
    let own = "PROMPT_COMMAND='told=$(ls /mnt/s1/many | wc -l)'\n\
               TICK_PS1='$(git -C /mnt/s1/repo branch --show-current) $told $(grep -c needle /mnt/s1/f) '\n\
               alias ll='ls -l'\nhello() { echo hello from a function; }\nexport -f hello\nshopt -s checkwinsize\n";
    tell(&lab, Shell::Bash, &(skeleton() + own), |t| {
        t.line("ls /mnt/s1/many");
        t.line("grep needle /mnt/s1/f | tail -n 2");
        t.line("hello; bash -c hello");
        t.line("cd /mnt/s1/many; ls; cd");
        t.line("alias; shopt; set -o; trap");
        t.line("echo \"$BASH_VERSION $SHLVL $-\"; complete | wc -l");
        t.line("false");
        t.line("history");
        t.key(&format!("{UP}{UP}\r"));
    });
}

/// Tab: a path on the mount, a command's name, a choice of several, a variable.
#[test]
fn completion() {
    let lab = lab();
    for (rc, shell) in [
        (String::new(), Shell::Bash),
        (skeleton(), Shell::Bash),
        (ZSH_COMPLETION.into(), Shell::Zsh),
    ] {
        // zsh shows the space that it would take away again.
        let space = if shell == Shell::Zsh { "\x1b[1m " } else { " " };
        tell(&lab, shell, &rc, |t| {
            complete(t, "wc -l /mnt/s1/lar", &format!("large{space}"));
            complete(t, "wc -l < /mnt/s1/many/arc", &format!("archive.tar.gz{space}"));
            complete(t, "tsor", &format!("tsort{space}"));
        });
    }
}

const ZSH_COMPLETION: &str = "autoload -Uz compinit && compinit -u -D\n";

/// Completes what was typed, which is done when the line is whole.
fn complete(t: &mut Teller<'_>, typed: &str, completed: &str) {
    t.press(typed);
    let last = typed.split(['/', ' ']).next_back().unwrap();
    t.until(last);
    t.press("\t");
    let rest = &completed[completed.rfind(last).unwrap() + last.len()..];
    t.until(rest);
    match typed == "tsor" {
        true => t.key("< /dev/null\r"),
        false => t.key("\r"),
    };
}

#[test]
fn zsh_and_fish() {
    let lab = lab();
    for shell in [Shell::Zsh, Shell::Fish] {
        tell(&lab, shell, "", |t| {
            t.line("cat /mnt/s1/f | command grep needle | tail -n 2");
            t.line("cd /mnt/s1/many");
            t.line("ls");
            t.line("command grep -c needle ../f ../g");
            t.line("cd");
            t.line("false");
            t.line("echo $status");
            t.key(&format!("{UP}{UP}\r"));
        });
    }
}

#[test]
fn a_new_size() {
    let lab = lab();
    tell(&lab, Shell::Bash, "", |t| {
        t.line("ls /mnt/s1/many; echo $COLUMNS");
        for size in [TerminalSize::new(40, 120), TerminalSize::new(20, 50)] {
            t.session.terminal().resize(size).unwrap();
            t.line("ls /mnt/s1/many");
            t.line("echo $COLUMNS $LINES; ls -x /mnt/s1/many");
        }
    });
}

#[test]
fn pagers() {
    let lab = lab();
    tell(&lab, Shell::Bash, "export LESSHISTFILE=-", |t| {
        // More than may be under way unread, so that it still runs.
        t.begin("cat /mnt/s1/large{,,} | grep -n hay | less", "\r\n:");
        let remote = [t.remote("cat"), t.remote_if_joined("grep")].concat();
        t.press(" ");
        t.until("\r\n:");
        t.press("/line 650 w\r");
        t.until("line 949 with hay\r\n:");
        assert_eq!(t.key("q"), 0);
        t.assert_gone(&remote);
        t.begin("grep -r hay /mnt/s1 | less", "\r\n:");
        assert_eq!(t.key("q"), 0);
        t.assert_gone(&[]);
        t.begin("cd /mnt/s1/repo && git log -p", "\r\n:");
        // git ends by SIGPIPE, or not, as it finds the time to write.
        t.by_luck("q");
        t.line("git log --oneline");
        t.line("git diff --stat");
    });
}
