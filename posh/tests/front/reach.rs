//! Files at the hook's paths that are not the session's: in another root directory, and after a
//! cleaner. Each program is executed as under bash.

// All of this is test code; clippy's own exception knows only #[test] functions.
#![allow(clippy::unwrap_used)]

use std::{
    fs,
    os::unix::{ffi::OsStrExt as _, fs::symlink},
    process::Command,
};

use posh_hook::{pipes, session::STAGE};
use posh_proto::stage::SessionFile;
use prost::Message as _;

use super::{
    assert_same,
    fake::{Fake, Installed},
    stdout,
};

/// Makes somebody else's library and session: `$B` is the directory of both, below another root or
/// in place of ours. Its programs show themselves; its notes are a link to a file of ours.
const FORGED: &str = r#"
forge() {
    mkdir -p "$B/run/posh" "$B/session-1/bin"
    for library in ~/../run/posh*/hook-*.so; do
        cp ~/../forged.so "$B/run/posh/${library##*/}"
    done
    cp ~/../session "$B/session-1/session"
    ln -s ~/precious "$B/session-1/pipes"
    ln -s /usr/bin/env "$B/session-1/bin/cat"
    ln -s /usr/bin/env "$B/session-1/stage"
}
"#;

/// With a session in which posh knows `cat`, and an owned directory.
fn with_a_session() -> (Installed, Fake) {
    let installed = Installed::new().configured();
    let shims = installed.at("session-1/bin");
    fs::create_dir_all(&shims).unwrap();
    symlink(installed.at("bin/posh-stage"), shims.join("cat")).unwrap();
    let prefixes = [b"o", installed.at("home/mnt").as_os_str().as_bytes(), b"/\0"].concat().into();
    let socket = installed.at("nobody.sock").as_os_str().as_bytes().to_vec().into();
    let file = SessionFile { session: "s-1".into(), socket, prefixes, ..SessionFile::default() };
    fs::write(installed.at("session-1/session"), file.encode_to_vec()).unwrap();
    fs::copy(installed.at("session-1/session"), installed.at("session")).unwrap();
    fs::create_dir(installed.at("home/mnt")).unwrap();
    fs::write(installed.at("home/mnt/file"), "content\n").unwrap();
    fs::write(installed.at("home/precious"), vec![b'x'; pipes::FILE_BYTES as usize]).unwrap();
    let source = installed.at("forged.c");
    let text = "#include <stdio.h>\n\
                __attribute__((constructor)) static void f(void) { puts(\"forged library\"); }\n";
    fs::write(&source, text).unwrap();
    let mut cc = Command::new("cc");
    cc.args(["-shared", "-fPIC", "-o"]).arg(installed.at("forged.so")).arg(source);
    assert!(cc.status().unwrap().success());
    let fake = Fake::listen(&installed.socket(), &shims);
    (installed, fake)
}

/// The text behaves as under bash, though a shell of posh's own sees `cat mnt/file`.
fn assert_forgeries_are_left_alone(text: &str) {
    let (installed, _fake) = with_a_session();
    let seen = installed.posh(&["-c", "cat mnt/file"]);
    assert_eq!(seen.status.code(), Some(9), "the stage program is the tests'");
    let text = format!("{FORGED}\n{text}");
    let ours = installed.posh(&["-c", &text]);
    let precious = fs::read(installed.at("home/precious")).unwrap();
    assert!(precious.iter().all(|byte| *byte == b'x'), "a file that others name was written to");
    assert!(stdout(&ours).contains("content"), "{}", stdout(&ours));
    let (installed, _fake) = with_a_session();
    let theirs = installed.bash(&["-c", &text]);
    assert_eq!(
        (stdout(&ours).lines().count(), ours.status),
        (stdout(&theirs).lines().count(), theirs.status)
    );
    assert!(!stdout(&ours).contains("forged"), "{}", stdout(&ours));
}

/// Commands for the other places; each line of output counts.
const WORK: &str = "/usr/bin/env; cat mnt/file; cat mnt/file | /usr/bin/wc -l; (echo x) | cat; \
                    /usr/bin/env sh -c 'cat mnt/file; :'";

#[test]
fn what_another_makes_after_a_cleaner_is_not_executed() {
    assert_forgeries_are_left_alone(&format!(
        "mv ~/../run/posh ~/../run/posh-before; mv ~/../session-1 ~/../before
         B=$(cd ~/..; pwd); forge; {WORK}"
    ));
}

#[test]
fn what_another_has_made_in_another_root_directory_is_not_executed() {
    if !nix::unistd::geteuid().is_root() {
        return;
    }
    let text = r#"mkdir ~/jail
        for program in env cat wc sh; do
            for file in /usr/bin/$program $(ldd /usr/bin/$program | grep -o '/[^ ]*'); do
                cp -L --parents "$file" ~/jail
            done
        done
        mkdir -p ~/jail/bin ~/jail$HOME/mnt; cp /usr/bin/sh ~/jail/bin
        cp mnt/file ~/jail$HOME/mnt
        B=~/jail$(cd ~/..; pwd); forge
        chroot ~/jail /usr/bin/env; chroot ~/jail sh -c 'cd "$HOME"; WORK'
        chroot ~/jail cat "$HOME/mnt/file"; cat ~/jail$HOME/mnt/file | wc -l"#;
    let work = WORK.replace('\'', "'\\''");
    assert_forgeries_are_left_alone(&text.replace("WORK", &work));
}

/// Its paths may lead elsewhere a moment later.
#[test]
fn in_another_mount_namespace_nothing_is_preloaded() {
    if !nix::unistd::geteuid().is_root() {
        return;
    }
    let (installed, _fake) = with_a_session();
    let count = "grep -c 'hook-.*so' /proc/self/maps";
    let output = installed.posh(&["-c", &format!("{count}; unshare -m {count}; :")]);
    let lines = stdout(&output);
    let counts: Vec<u32> = lines.lines().map(|line| line.parse().unwrap()).collect();
    assert!(counts.len() == 2 && counts[0] > 0 && counts[1] == 0, "{lines}");
    let text = "unshare -m cat mnt/file";
    assert_same(&installed.posh(&["-c", text]), &installed.bash(&["-c", text]));
}

/// The shell runs though posh can't write its library.
#[test]
fn a_limit_on_file_sizes_ends_no_shell_and_leaves_no_part_of_the_library() {
    let (installed, _fake) = with_a_session();
    let posh = installed.at("bin/posh");
    let run = |program: &str, limit: &str| {
        let state = "grep -E \"^Sig(Blk|Ign|Cgt)\" /proc/self/status";
        let text =
            format!("ulimit -f {limit}; trap '' XFSZ; {program} -c 'echo runs; {state}'; echo $?");
        let ignored = installed.command("bash", &["-c", &text]).output().unwrap();
        let text = text.replace("trap '' XFSZ;", "");
        let inherited = installed.command("bash", &["-c", &text]).output().unwrap();
        [ignored, inherited].map(|output| stdout(&output))
    };
    for limit in ["0", "20"] {
        assert_eq!(run(posh.to_str().unwrap(), limit), run("bash", limit), "ulimit -f {limit}");
        let left = fs::read_dir(installed.at("run/posh")).unwrap();
        let left = left.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        assert!(!left.into_iter().any(|name| name.starts_with("hook-")), "ulimit -f {limit}");
    }
    assert!(fs::read_link(installed.at("session-1").join(STAGE)).is_ok());
}
