//! What the hook asks before it starts the stage program, which here is a script that ends with 9.

// All of this is test code; clippy's own exception knows only #[test] functions.
#![allow(clippy::unwrap_used)]

use std::{
    fs,
    io::{Read as _, Write as _},
    os::unix::{
        ffi::OsStrExt as _,
        fs::symlink,
        net::{UnixListener, UnixStream},
    },
    process::Output,
    sync::{Arc, Mutex},
    thread,
};

use bytes::BytesMut;
use posh_hook::pipes;
use posh_proto::{
    frame,
    stage::{Question, RunHere, SessionFile, ToGateway, ToStage, to_gateway, to_stage},
};
use prost::Message as _;

use super::{
    fake::{Fake, Installed},
    stderr, stdout,
};

/// A mount of nothing.
const OWNED: &str = "/nonexistent/v";

/// An installation with a gateway whose sessions' stage socket answers so, and with the questions
/// that come.
fn with_answers(asks: bool, answer: Vec<u8>) -> (Installed, Fake, Arc<Mutex<Vec<Question>>>) {
    let installed = Installed::new().configured();
    let shims = installed.at("session-1/bin");
    fs::create_dir_all(&shims).unwrap();
    symlink(installed.at("bin/posh-stage"), shims.join("cat")).unwrap();
    let fake = Fake::listen(&installed.socket(), &shims);
    let listener = UnixListener::bind(installed.at("ask.sock")).unwrap();
    let socket = installed.at("ask.sock").as_os_str().as_bytes().to_vec().into();
    let prefixes = format!("o{OWNED}/\0").into_bytes().into();
    let session =
        SessionFile { session: "s-1".into(), socket, prefixes, asks, ..SessionFile::default() };
    fs::write(installed.at("session-1/session"), session.encode_to_vec()).unwrap();
    let asked = Arc::<Mutex<Vec<Question>>>::default();
    let heard = Arc::clone(&asked);
    // It ends with the tests' process.
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            heard.lock().unwrap().push(question(&mut stream));
            // Who has its answer may hang up.
            let _ = stream.write_all(&answer);
        }
    });
    (installed, fake, asked)
}

fn question(stream: &mut UnixStream) -> Question {
    let mut header = [0; frame::HEADER_BYTES];
    stream.read_exact(&mut header).unwrap();
    let mut message = vec![0; u32::from_le_bytes(header) as usize];
    stream.read_exact(&mut message).unwrap();
    match ToGateway::decode(&message[..]).unwrap().kind {
        Some(to_gateway::Kind::Question(question)) => question,
        other => panic!("{other:?}"),
    }
}

fn run_here() -> Vec<u8> {
    let mut bytes = BytesMut::new();
    frame::encode(&ToStage { kind: Some(to_stage::Kind::RunHere(RunHere::default())) }, &mut bytes);
    bytes.to_vec()
}

#[test]
fn a_command_that_stays_is_executed_without_the_stage_program() {
    let (installed, _fake, asked) = with_answers(true, run_here());
    let long = "x".repeat(300);
    let line = format!("cat {OWNED}/f '' 'two words' {long}; echo $?");
    let (ours, theirs) = (installed.posh(&["-c", &line]), installed.bash(&["-c", &line]));
    assert_eq!((stdout(&ours), stderr(&ours)), (stdout(&theirs), stderr(&theirs)));
    assert!(stdout(&ours).ends_with("1\n"));
    let asked = asked.lock().unwrap();
    let [question] = asked.as_slice() else { panic!("{asked:?}") };
    assert_eq!(&question.program[..], b"/usr/bin/cat");
    assert_eq!(question.cwd, installed.at("home").as_os_str().as_bytes());
    assert_eq!((question.streams, question.writes.len()), (0, 2), "the output is two pipes");
    assert_eq!(question.argv, ["cat", &format!("{OWNED}/f"), "", "two words", &long]);
}

#[test]
fn whatever_else_is_answered_the_stage_program_is_started() {
    let answers: [&[u8]; 4] = [b"", &[2, 0, 0, 0, 0x12, 0], &[2, 0, 0], &[0xff; 64]];
    for answer in answers {
        let (installed, _fake, asked) = with_answers(true, answer.to_vec());
        let output = installed.posh(&["-c", &format!("cat {OWNED}/f; echo $?")]);
        assert_eq!(
            (stdout(&output).as_str(), asked.lock().unwrap().len()),
            ("9\n", 1),
            "{answer:?}"
        );
    }
}

#[test]
fn only_what_can_be_told_so_soon_is_asked() {
    // Of another end of a pipe; of too long a line; of another process.
    let long = "x".repeat(3000);
    let spawned = "import os; os._exit(os.waitstatus_to_exitcode(os.waitpid(os.posix_spawn('/usr/bin/cat', \
                   ['cat', '/nonexistent/v/f'], os.environ), 0)[1]))";
    for line in [
        "true | cat",
        &format!("true | cat {OWNED}/f"),
        &format!("cat {OWNED}/f {long}"),
        &format!("/usr/bin/python3 -c \"{spawned}\""),
    ] {
        let (installed, _fake, asked) = with_answers(true, run_here());
        let output = installed.posh(&["-c", &format!("{line}; echo $?")]);
        assert_eq!(
            (stdout(&output).as_str(), asked.lock().unwrap().len()),
            ("9\n", 0),
            "{line} {}",
            stderr(&output)
        );
    }
    // And of nothing in a session without volumes.
    let (installed, _fake, asked) = with_answers(false, run_here());
    let output = installed.posh(&["-c", &format!("cat {OWNED}/f; echo $?")]);
    assert_eq!((stdout(&output).as_str(), asked.lock().unwrap().len()), ("9\n", 0));
}

/// The same with a place for notes of pipes.
fn with_notes(asks: bool, answer: Vec<u8>) -> (Installed, Fake, Arc<Mutex<Vec<Question>>>) {
    let (installed, fake, asked) = with_answers(asks, answer);
    fs::write(installed.at("session-1").join(pipes::FILE), vec![0; pipes::FILE_BYTES as usize])
        .unwrap();
    (installed, fake, asked)
}

/// On a machine with more to do than processors a reader may not hear of its writer in time, and
/// becomes a stage.
fn with_luck(run: impl Fn() -> Output) -> Output {
    let mut runs = (0..50).map(|_| run());
    runs.find(|output| !stdout(output).ends_with("9\n")).expect("it is heard of in time, once")
}

#[test]
fn a_pipeline_that_touches_no_mount_is_executed_as_given() {
    let data = "a\nb\n";
    for line in [
        "cat f | cat",
        "cat < f | cat - | /usr/bin/cat",
        "echo a word | cat",
        "{ echo one; echo two; } | cat | cat",
        "f() { cat; }; cat f | f",
        "cat f | while read -r x; do echo \"<$x>\" | cat; done",
        "exec cat f | cat",
        "/usr/bin/python3 -c 'print(1)' | cat",
        "env -u X nice cat f | cat",
        "cat f f 2>&1 nonexistent | cat",
    ] {
        let (installed, _fake, asked) = with_notes(false, Vec::new());
        fs::write(installed.at("home/f"), data).unwrap();
        let line = format!("cd; {line}; echo ${{PIPESTATUS[*]}}");
        let ours = with_luck(|| installed.posh(&["-c", &line]));
        let theirs = installed.bash(&["-c", &line]);
        assert_eq!((stdout(&ours), stderr(&ours)), (stdout(&theirs), stderr(&theirs)), "{line}");
        assert_eq!(asked.lock().unwrap().len(), 0);
    }
}

#[test]
fn what_a_command_on_a_mount_writes_is_left_to_stages() {
    // By the last of the pipeline: 9 is the stage program's.
    let says_nothing = "sh -c 'i=0; while [ $i -lt 100000 ]; do i=$((i + 1)); done; echo'";
    for line in [
        &format!("cat {OWNED}/f | cat"),
        &format!("cat {OWNED}/f | cat | cat"),
        &format!("{says_nothing} | cat"),
    ] {
        let (installed, _fake, _) = with_notes(false, Vec::new());
        let output = installed.posh(&["-c", &format!("{line}; echo $?")]);
        assert_eq!(stdout(&output), "9\n", "{line} {}", stderr(&output));
    }
    // Of a session that somebody tells of, everything.
    for told in [0, 1] {
        let (installed, _fake, _) = with_notes(false, Vec::new());
        let file = installed.at("session-1/session");
        let mut session = SessionFile::decode(&fs::read(&file).unwrap()[..]).unwrap();
        (session.always_enlist, session.trace) = (told == 0, told == 1);
        fs::write(&file, session.encode_to_vec()).unwrap();
        let output = installed.posh(&["-c", "echo | cat; echo $?"]);
        assert_eq!(stdout(&output), "9\n");
    }
}

#[test]
fn what_is_piped_to_a_command_at_hand_comes_from_one_that_stays() {
    let (installed, _fake, asked) = with_notes(true, run_here());
    let line = format!("cat {OWNED}/f | cat - {OWNED}/g | cat; echo ${{PIPESTATUS[*]}}");
    let ours = with_luck(|| {
        asked.lock().unwrap().clear();
        installed.posh(&["-c", &line])
    });
    let theirs = installed.bash(&["-c", &line]);
    let lines = |output: &Output| {
        let mut lines: Vec<_> = stderr(output).lines().map(str::to_owned).collect();
        lines.sort();
        (stdout(output), lines)
    };
    assert_eq!(lines(&ours), lines(&theirs));
    assert_eq!(asked.lock().unwrap().len(), 2);
    // Not at hand: nor is what follows asked about.
    let (installed, _fake, asked) = with_notes(true, Vec::new());
    let output = installed.posh(&["-c", &line]);
    assert_eq!(
        (stdout(&output).as_str(), asked.lock().unwrap().len()),
        ("9 9 9\n", 1),
        "{}",
        stderr(&output)
    );
}
