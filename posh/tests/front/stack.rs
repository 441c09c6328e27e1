//! The hook in programs that give it next to nothing: a child on a small stack in its parent's
//! memory, and threads that use the environment. Each behaves as under bash.

// All of this is test code; clippy's own exception knows only #[test] functions.
#![allow(clippy::unwrap_used)]

use std::{
    fs,
    os::unix::{ffi::OsStrExt as _, fs::symlink},
    path::{Path, PathBuf},
    process::{Command, Output},
};

use posh_hook::session::STAGE;
use posh_proto::stage::SessionFile;
use prost::Message as _;

use super::{
    assert_same,
    fake::{Fake, Installed},
    stdout,
};

/// Less than that the hook takes of its caller's stack.
const MOST_BYTES: usize = 2048;

/// What programs execute by.
const BY_PATH: &[&str] = &[
    "execve",
    "execv",
    "execl",
    "execl-long",
    "execle",
    "fexecve",
    "execveat",
    "execveat-fd",
    "posix_spawn",
];
const BY_NAME: &[&str] = &["execvp", "execvpe", "execlp", "posix_spawnp"];
/// Of those, the ones whose program has no path for the stage program to be told.
const WITHOUT_A_PATH: &[&str] = &["fexecve", "execveat-fd"];

/// An installation with a session in which posh knows `cat` and `sh`, a directory that is owned,
/// and a link to it.
struct Session {
    installed: Installed,
    _fake: Fake,
}

impl Session {
    /// `stage` is the stage program.
    fn with(stage: impl FnOnce(&Installed) -> PathBuf) -> Self {
        let installed = Installed::new().configured();
        let stage = stage(&installed);
        let (session, shims) = (installed.at("session-1"), installed.at("session-1/bin"));
        fs::create_dir_all(&shims).unwrap();
        symlink(&stage, shims.join("cat")).unwrap();
        fs::remove_file(session.join(STAGE)).unwrap();
        symlink(&stage, session.join(STAGE)).unwrap();
        fs::create_dir(installed.at("home/mnt")).unwrap();
        fs::write(installed.at("home/mnt/file"), "content\n").unwrap();
        fs::write(installed.at("home/file"), "mine\n").unwrap();
        chain_of_links(&installed.at("home"), "mnt");
        let prefixes =
            [b"o", installed.at("home/mnt").as_os_str().as_bytes(), b"/\0"].concat().into();
        let socket = installed.at("nobody.sock").as_os_str().as_bytes().to_vec().into();
        let file =
            SessionFile { session: "s-1".into(), socket, prefixes, ..SessionFile::default() };
        fs::write(session.join("session"), file.encode_to_vec()).unwrap();
        let fake = Fake::listen(&installed.socket(), &shims);
        Self { installed, _fake: fake }
    }

    fn with_the_stage_program() -> Self {
        Self::with(|_| PathBuf::from(env!("CARGO_BIN_EXE_posh-stage")))
    }

    /// Its stage program ends with 9.
    fn that_shows_what_is_seen() -> Self {
        Self::with(|installed| installed.at("bin/posh-stage"))
    }

    fn compiled(&self, name: &str) -> PathBuf {
        let source = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("tests/front")
            .join(name)
            .with_extension("c");
        let program = self.installed.at("bin").join(name);
        // Bound at its start: the loader takes more of a small stack than all that is measured.
        let mut cc = Command::new("cc");
        let built = cc
            .args(["-O1", "-pthread", "-Wl,-z,now", "-o"])
            .arg(&program)
            .arg(source)
            .status()
            .unwrap();
        assert!(built.success());
        program
    }

    /// The same text under posh and bash.
    fn both(&self, text: &str) -> [Output; 2] {
        [self.installed.posh(&["-c", text]), self.installed.bash(&["-c", text])]
    }
}

/// `link` leads by 20 others to `target`.
fn chain_of_links(directory: &Path, target: &str) {
    (0..20).fold(target.to_owned(), |target, number| {
        let name = format!("link{number}");
        symlink(&target, directory.join(&name)).unwrap();
        name
    });
    symlink("link19", directory.join("link")).unwrap();
}

/// Each function with each stack and each file: a shell's text.
fn all_of(program: &Path, stacks: &[u32], files: &[&str]) -> String {
    text_of(program, |_| true, (stacks, files, 1))
}

/// Some functions with each stack and each file, so many times.
fn text_of(
    program: &Path,
    chosen: fn(&str) -> bool,
    (stacks, files, repeat): (&[u32], &[&str], usize),
) -> String {
    let mut text = String::new();
    for stack in stacks {
        for (functions, cat) in [(BY_PATH, "/usr/bin/cat"), (BY_NAME, "cat")] {
            for (function, file) in functions
                .iter()
                .filter(|f| chosen(f))
                .flat_map(|f| files.iter().map(move |file| (f, file)))
            {
                let program = program.display();
                text += &format!("{program} {function} {stack} {repeat} {cat} cat {file} ''\n");
            }
        }
    }
    text
}

#[test]
fn a_small_stack_is_not_overrun() {
    let session = Session::with_the_stage_program();
    let program = session.compiled("small_stack");
    let files = ["mnt/file", "link/file", "file", "/etc/hostname"];
    let text = all_of(&program, &[4, 8, 16], &files);
    let [ours, theirs] = session.both(&text);
    assert_same(&ours, &theirs);
    let lines = stdout(&ours);
    assert_eq!(
        lines.matches(", overwritten 0, mappings 0").count(),
        3 * files.len() * 13,
        "{lines}"
    );
    // Long words, a large environment, and more variables than there is room for.
    let long = "x".repeat(4000);
    for (setting, word) in
        [("", &*long), ("for i in $(seq 2000); do export V$i=$i; done", "mnt/file")]
    {
        let text = format!("{setting}\n{}", all_of(&program, &[8], &[word]));
        let [ours, theirs] = session.both(&text);
        assert_same(&ours, &theirs);
    }
    let many = "for i in $(seq 9000); do export V$i=$i; done";
    let [ours, theirs] =
        session.both(&format!("{many}\n{}", all_of(&program, &[8], &["mnt/file"])));
    assert_same(&ours, &theirs);
}

#[test]
fn the_hook_takes_less_than_two_kilobytes_of_its_caller_s_stack() {
    let session = Session::with_the_stage_program();
    let program = session.compiled("small_stack");
    let text = all_of(&program, &[16], &["mnt/file", "link/file", "file"]);
    let used = |run: &dyn Fn(&[&str]) -> Output| {
        let text = format!("exec 9> ~/used\n{text}");
        assert!(run(&["-c", &text]).status.success());
        let used = fs::read_to_string(session.installed.at("home/used")).unwrap();
        let read = |line: &str| {
            line.split_once(' ').map(|(name, bytes)| (name.to_owned(), bytes.parse().unwrap()))
        };
        used.lines().map(|line| read(line).unwrap()).collect::<Vec<(String, usize)>>()
    };
    let ours = used(&|arguments| session.installed.posh(arguments));
    let theirs = used(&|arguments| session.installed.bash(arguments));
    assert_eq!(ours.len(), 3 * 13);
    for ((function, ours), (_, theirs)) in ours.iter().zip(&theirs) {
        assert!(
            *ours > *theirs && *ours - 64 < MOST_BYTES.max(*theirs),
            "{function}: {ours}, bash {theirs}"
        );
    }
}

#[test]
fn children_in_their_parent_s_memory_leave_it_as_it_was() {
    let session = Session::that_shows_what_is_seen();
    let program = session.compiled("small_stack");
    const CHILDREN: usize = 20;
    let text =
        text_of(&program, |f| !WITHOUT_A_PATH.contains(&f), (&[16], &["mnt/file"], CHILDREN));
    let output = session.installed.posh(&["-c", &text]);
    // Each of them is seen: none has kept what the next one needs.
    for line in stdout(&output).lines() {
        let function = line.split(' ').next().unwrap();
        let expected =
            format!("{function} 16:{}, overwritten 0, mappings 0", " 900/0".repeat(CHILDREN));
        assert_eq!(line, expected);
    }
    assert_eq!(stdout(&output).lines().count(), 11);
}

#[test]
fn nothing_writes_to_the_environment_of_a_program_with_threads() {
    let session = Session::with_the_stage_program();
    let program = session.compiled("environment");
    let text = r#"echo "$0 it's"; printenv LD_PRELOAD POSH_HOOK; cat mnt/file; exit 3"#;
    let line = format!("{} 20 '{}'", program.display(), text.replace('\'', "'\\''"));
    let [ours, theirs] = session.both(&line);
    assert_same(&ours, &theirs);
    assert!(stdout(&ours).ends_with("strange 0, none 1\n"), "{}", stdout(&ours));
    // And what the shells execute is seen.
    let session = Session::that_shows_what_is_seen();
    let program = session.compiled("environment");
    symlink(env!("CARGO_BIN_EXE_posh-stage"), session.installed.at("session-1/new")).unwrap();
    fs::rename(
        session.installed.at("session-1/new"),
        session.installed.at("session-1").join(STAGE),
    )
    .unwrap();
    let output =
        session.installed.posh(&["-c", &format!("{} 2 'cat mnt/file'", program.display())]);
    assert_eq!(stdout(&output), "900\n900\n900\n900\nstrange 0, none 1\n");
}

#[test]
fn pointers_that_lead_nowhere_are_the_kernel_s_to_refuse() {
    let session = Session::with_the_stage_program();
    let program = session.compiled("pointers");
    let [ours, theirs] = session.both(program.to_str().unwrap());
    assert_same(&ours, &theirs);
    assert_eq!(stdout(&ours).matches("Bad address").count(), 15, "{}", stdout(&ours));
}

#[test]
fn a_fork_in_the_middle_of_other_threads_execs_has_all_it_needs() {
    const FORKS: usize = 100;
    let session = Session::that_shows_what_is_seen();
    let program = session.compiled("forks");
    let line = format!("{} {FORKS} /usr/bin/cat mnt/file", program.display());
    assert_eq!(stdout(&session.installed.posh(&["-c", &line])), format!("{FORKS}\n"));
}
